"""Trains a small GPT-2, byte by byte, on this repository's own documents, with this project's forward and backward.

python train.py                 1500 steps, on a CPU about half a minute; writes ../out/small-gpt2
python train.py --steps 3000

Every tenth piece of the documents is held out. The bar is an interpolated bigram model of the same training text: it
knows how often each byte follows each other byte, and nothing more. The GPT-2 must predict the held-out text better.
"""

import argparse
import contextlib
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import gpt2_weights
import torch
from generate import ByteTokenizer, check_device, check_seed, generate
from gpt2_model import GPT2, Config
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch.nn import functional as F

from kernel_fusion import steps  # not installed? pip install -e ..
from kernel_fusion.console import make_console

OUT = steps.ROOT / "out" / "small-gpt2"
STEPS = 1500
# Short windows and many small steps: in a minute or two a model learns more from 3000 steps on 512 bytes than from 300
# on 5000. The weights start larger than GPT-2's 0.02, which suits its width of 768.
SMALL = Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4, initializer_range=0.08)

# ---- the text ----

SUFFIXES = {".md", ".py", ".cu", ".cpp", ".h", ".txt"}
NOT_OURS = {"build", "out", "node_modules"}  # beside folders whose name begins with a dot
PIECE = 2048  # bytes; every tenth piece of the documents is held out
EVALUATED = 24  # of those, as many as a few seconds suffice for


def read_documents(root: pathlib.Path = steps.ROOT) -> list[bytes]:
    """The repository's texts and sources, in the order of their paths."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if not (name.startswith(".") or name.endswith(".egg-info") or name in NOT_OURS)
        ]  # os.walk goes into these alone
        paths += [path for path in (pathlib.Path(folder, name) for name in files) if path.suffix in SUFFIXES]
    return [path.read_bytes() for path in sorted(paths)]


def split(documents: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Training text and held-out text, each a tensor of bytes. The same documents always give the same split."""
    pieces = [text[start : start + PIECE] for text in documents for start in range(0, len(text), PIECE)]
    if len(pieces) < 20:
        raise ValueError(f"split: `documents` must hold at least 20 pieces of {PIECE} bytes, got {len(pieces)}")
    train = [piece for number, piece in enumerate(pieces) if number % 10 != 9]
    held_out = pieces[9::10]
    return as_bytes(b"".join(train)), as_bytes(b"".join(held_out[:: math.ceil(len(held_out) / EVALUATED)]))


def as_bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---- the bar: an interpolated bigram model ----


class Bigram:
    """p(b after a) = w0·count(a b)/count(a) + w1·count(b)/n + w2/256, the weights fitted on the training text itself.

    Counts would look best on the text they were counted on. So the weights are fitted by EM on a tenth of the text,
    with counts of the other nine, and then all of it is counted. Jelinek and Mercer, "Interpolated estimation of Markov
    source parameters from sparse data", 1980.
    """

    def __init__(self, text: torch.Tensor):
        fold = len(text) // 10
        self._count(text[fold:])
        self.weights = torch.full((3,), 1 / 3, dtype=torch.float64)
        for _ in range(50):
            parts = self._parts(text[:fold]) * self.weights
            self.weights = (parts / parts.sum(1, keepdim=True)).mean(0)
        self._count(text)

    def _count(self, text: torch.Tensor) -> None:
        text = text.long()
        pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=65536).view(256, 256).double()
        seen = pairs.sum(1, keepdim=True)
        self.single = torch.bincount(text, minlength=256).double() / len(text)
        self.after = torch.where(seen > 0, pairs / seen.clamp(min=1), self.single)  # a byte never seen says nothing

    def _parts(self, text: torch.Tensor) -> torch.Tensor:
        """The three probabilities of each byte but the first, [n - 1, 3]."""
        text = text.long()
        uniform = torch.full((len(text) - 1,), 1 / 256, dtype=torch.float64)
        return torch.stack([self.after[text[:-1], text[1:]], self.single[text[1:]], uniform], dim=1)

    def loss(self, text: torch.Tensor) -> float:
        """Nats a byte on `text`, its first byte aside."""
        return -(self._parts(text) @ self.weights).log().mean().item()


# ---- training ----


class Result(NamedTuple):
    """Losses are in nats a byte, on the held-out text."""

    loss: float
    bigram_loss: float
    steps: int
    seconds: float
    folder: pathlib.Path


def cross_entropy(model: GPT2, windows: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats of each byte of `windows` [batch, length + 1] but the first, given those before it."""
    windows = windows.long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: GPT2, text: torch.Tensor, batch: int = 32) -> float:
    """Nats a byte on `text`, its first byte aside. A byte's context begins with its window, of n_positions bytes."""
    if len(text) < 2:
        raise ValueError(f"evaluate: `text` must hold at least 2 bytes, got {len(text)}")
    length = model.config.n_positions
    device = model.wte.weight.device
    total = 0.0
    whole = (len(text) - 1) // length
    starts = range(0, whole * length, length)
    for group in (starts[i : i + batch] for i in range(0, whole, batch)):
        part = torch.stack([text[i : i + length + 1] for i in group])  # a window's last byte is the next one's first
        total += cross_entropy(model, part.to(device)).item() * part.shape[0] * length
    rest = text[whole * length :]
    if len(rest) > 1:
        total += cross_entropy(model, rest[None].to(device)).item() * (len(rest) - 1)
    return total / (len(text) - 1)


def optimizer_of(model: GPT2, rate: float) -> torch.optim.AdamW:
    """AdamW as GPT-2 is trained; weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)


def schedule(progress: float) -> float:
    """The learning rate's factor: up over the first twentieth of the training, then down to a tenth along a cosine."""
    if progress < 0.05:
        return progress / 0.05
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.05) / 0.95)))


def random_windows(text: torch.Tensor, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`batch` stretches of `length` bytes of `text`, [batch, length]."""
    if len(text) < length:
        raise ValueError(f"random_windows: `text` must hold at least {length} bytes, got {len(text)}")
    starts = torch.randint(len(text) - length + 1, (batch,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()])


def step(model: GPT2, optimizer: torch.optim.AdamW, windows: torch.Tensor, rate: float) -> torch.Tensor:
    """One step of training; returns the loss, not waited for."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = cross_entropy(model, windows)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(
    console: Console,
    *,
    steps: int = STEPS,
    config: Config = SMALL,
    batch: int = 8,
    rate: float = 3e-3,
    seed: int = 0,
    device: str = "cpu",
    out: pathlib.Path = OUT,
    documents: list[bytes] | None = None,
) -> Result:
    """Takes `steps` of training, evaluates, and saves the model in `out`: at each quarter, and at the end.

    Raises:
        ValueError: an argument out of its range, or too little text.
        RuntimeError: the loss is no longer a number.
        OSError: the model could not be saved.
    """
    for name, number in (("steps", steps), ("batch", batch)):
        if number < 1:
            raise ValueError(f"train: `{name}` must be at least 1, got {number}")
    if not 0 < rate < math.inf:
        raise ValueError(f"train: `rate` must be a number above 0, got {rate}")
    if config.vocab_size != 256:
        raise ValueError(f"train: `config.vocab_size` must be 256, as many as there are bytes, got {config.vocab_size}")
    check_seed("train", seed)
    gpt2_weights.check_writable(out)  # now, and not when there is something to lose
    began = time.monotonic()
    text, held_out = split(read_documents() if documents is None else documents)
    bigram = Bigram(text)
    bar = bigram.loss(held_out)
    weights = ", ".join(f"{weight:.3f}" for weight in bigram.weights.tolist())
    console.print(f"{len(text):,} bytes to train on, {len(held_out):,} held out")
    console.print(f"bigram, weights {weights} (pair, single, uniform): held-out loss {bar:.3f}")

    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = GPT2(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"GPT-2, {config.n_layer} layers, width {config.n_embd}: {parameters:,} parameters, on {device}")
    optimizer = optimizer_of(model, rate)
    with one_thread(), shown(console) as show:
        for number in range(steps):
            windows = random_windows(text, batch, config.n_positions + 1, generator).to(device)
            loss = step(model, optimizer, windows, rate * schedule((number + 1) / steps))
            if number % 10 == 0:
                value = loss.item()
                if not math.isfinite(value):
                    raise RuntimeError(f"train: the loss of step {number} is {value}")
                show(number / steps, f"step {number}, loss {value:.3f}, bigram {bar:.3f}")
            if 4 * (number + 1) // steps > 4 * number // steps and number + 1 < steps:
                model.save_pretrained(out, **CHECKPOINT)
        final = evaluate(model, held_out)
    model.save_pretrained(out, **CHECKPOINT)
    return Result(final, bar, steps, time.monotonic() - began, out)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Products as small as these gain little from a second core, and wait long where another program holds it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Callable[[float, str], None]]:
    """A function (progress, note) that moves a bar on a terminal, and elsewhere prints a line now and then."""
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
        if progress - printed >= 0.2:
            printed = progress
            console.print(f"{progress:4.0%}  {note}")

    yield line


CHECKPOINT = {"tokenizer": "bytes", "bos_token_id": None, "eos_token_id": None}  # entries of config.json


def paragraph(folder: pathlib.Path, prompt: str = "The kernel ", length: int = 400, device: str = "cpu") -> str:
    """`prompt` continued by the model in `folder` to `length` bytes. When its positions are full, it reads the later
    half of them again as a new prompt."""
    model = GPT2.from_pretrained(folder, device=device)
    half = model.config.n_positions // 2
    text = ByteTokenizer().encode(prompt)
    while len(text) < length:
        ids = torch.tensor([text[-half:]], device=device)
        new = generate(model, ids, half, temperature=0.7, top_k=40, seed=len(text))
        text += new[0, ids.shape[1] :].tolist()
    return bytes(text[:length]).decode(errors="replace")


def report(console: Console, result: Result, device: str = "cpu") -> None:
    """Prints both losses and a paragraph.

    Raises:
        RuntimeError: the bigram model is not beaten.
    """
    console.print(
        f"held-out loss, nats a byte: GPT-2 {result.loss:.3f}, bigram {result.bigram_loss:.3f} "
        f"({result.steps} steps, {result.seconds:.0f} s; saved in {result.folder})"
    )
    if not result.loss < result.bigram_loss:
        raise RuntimeError(
            f"train: after {result.steps} steps the held-out loss {result.loss:.3f} is not below the bigram model's "
            f"{result.bigram_loss:.3f}; "
            f"give it more of them: --steps"
        )
    console.print("it writes (⏎ is a new line):")
    console.print(paragraph(result.folder, device=device).replace("\n", " ⏎ "), markup=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT-2 on this repository's own documents.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"how many (default: {STEPS})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help=f"where to save (default: {OUT})")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    console = make_console()
    try:
        check_device(options.device)
        result = train(console, steps=options.steps, device=options.device, out=options.out, seed=options.seed)
        report(console, result, options.device)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
