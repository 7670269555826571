"""What is shown of a training while it runs: a bar or lines, tokens a second, memory, MFU, TensorBoard."""

import contextlib
import importlib
import pathlib
import time
from collections.abc import Callable, Iterator

import torch
from gpt2_model import GPT2, Config
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kernel_fusion.console import byte_count

SMALL_WIDTH = 256
PEAK = 989e12  # dense products of bfloat16 a second, of H100 and H200 in their SXM form


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Products as small as a small model's gain little from a second core, and wait long where others hold it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(config: Config) -> contextlib.AbstractContextManager:
    return one_thread() if config.n_embd <= SMALL_WIDTH else contextlib.nullcontext()


@contextlib.contextmanager
def shown(console: Console, *, every: bool = False) -> Iterator[Callable[[float, str], None]]:
    """A function (progress, note) that moves a bar on a terminal, and elsewhere prints a line now and then, or `every`
    time."""
    if console.is_terminal:
        columns = (TextColumn("training"), BarColumn(), TextColumn("{task.percentage:>3.0f}%  {task.fields[note]}"))
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("training", total=1.0, note="")
            yield lambda progress, note: bar.update(task, completed=progress, note=note)
            bar.update(task, completed=1.0)
        return
    printed = -1.0

    def line(progress: float, note: str) -> None:
        nonlocal printed
        if every or progress - printed >= 0.2:
            printed = progress
            console.print(f"{progress:4.0%}  {note}")

    yield line


def peak_of(name: str) -> float | None:
    """Floating-point operations a second that the GPU of this name could do in bfloat16; None where that is unknown."""
    known = ("H100" in name or "H200" in name) and not any(form in name for form in ("PCIe", "NVL", "GH200"))
    return PEAK if known else None


def flops_of_token(model: GPT2, length: int) -> int:
    """Floating-point operations of a token in training, as nanoGPT and PaLM count them: six for each weight that it is
    multiplied by, and twelve for each pair of attention's products, the future's too. What is computed again does not
    count.
    """
    config = model.config
    weights = sum(p.numel() for p in model.parameters()) - model.wpe.weight.numel()
    return 6 * weights + 12 * config.n_layer * config.n_embd * length


class Speed:
    """Tokens a second since the last look, memory and MFU, in words and numbers."""

    def __init__(self, model: GPT2, length: int, dtype: torch.dtype, workers: int = 1):
        self.workers = workers  # that compute these tokens together
        self.flops, self.device = flops_of_token(model, length), model.wte.weight.device
        on_gpu = self.device.type == "cuda"
        self.peak = peak_of(torch.cuda.get_device_name(self.device)) if on_gpu and dtype == torch.bfloat16 else None
        self.began, self.tokens = time.perf_counter(), 0

    def pause(self) -> None:
        """What comes now is not counted: the next look begins here."""
        self.began, self.tokens = time.perf_counter(), 0

    def look(self) -> dict[str, float]:
        """To be called when nothing is waited for any more."""
        seconds = max(1e-9, time.perf_counter() - self.began)
        found = {"tokens a second": self.tokens / seconds}
        if self.peak:
            found["MFU"] = found["tokens a second"] * self.flops / (self.peak * self.workers)
        if self.device.type == "cuda":
            found["memory"] = torch.cuda.max_memory_allocated(self.device)
        self.pause()
        return found


def in_words(found: dict[str, float]) -> str:
    words = [f", {found['tokens a second']:,.0f} tokens/s"]
    if "MFU" in found:
        words.append(f", MFU {found['MFU']:.1%}")
    if "memory" in found:
        words.append(f", peak {byte_count(found['memory'])}")
    return "".join(words)


class Board:
    """Numbers for TensorBoard, where it is wanted."""

    def __init__(self, folder: pathlib.Path | None, begin: int = 0):
        """`begin`: the step from which on earlier numbers no longer hold.

        Raises:
            ValueError: TensorBoard is wanted and not installed.
        """
        self.writer = None
        if folder is not None:
            try:
                board = importlib.import_module("torch.utils.tensorboard")
            except ImportError as error:
                raise ValueError(
                    "--tensorboard takes the package `tensorboard`, which is not installed: pip install tensorboard"
                ) from error
            self.writer = board.SummaryWriter(str(folder), purge_step=begin)

    def add(self, step: int, **numbers: float) -> None:
        if self.writer:
            for name, number in numbers.items():
                self.writer.add_scalar(name, number, step)

    def close(self) -> None:
        if self.writer:
            self.writer.close()
