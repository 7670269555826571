"""Trains a GPT-2 with this project's forward and backward: a small one on this repository's own documents, byte by
byte, or one of your size on your data.

python train.py                 1500 steps, on a CPU about half a minute; writes ../out/small-gpt2
python train.py --steps 3000
python train.py --data tokens/ --model 124M --dtype bfloat16 --save-every 500 --out ../out/mine

Without --data there is a bar. Every tenth piece of the documents is held out, and an interpolated bigram model of the
same training text knows how often each byte follows each other byte, and nothing more. The GPT-2 must predict the
held-out text better. Your own data, and how to go on after a crash: pages/training.md.
"""

# ruff: noqa: E402  arguments are read first, so that --help needs no build
import argparse
import dataclasses
import itertools
import math
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from training.command import FINE_RATE, OUT, RATE, SIZES, SMALL_RATE, make_parser

if __name__ == "__main__":
    make_parser().parse_args()

import torch
from generate import ByteTokenizer, check_device, default_device, generate
from gpt2_model import GPT2, Config
from gpt2_model import SIZES as CONFIGS
from model import weights as weight_files
from rich.console import Console
from training import checkpoint
from training.batches import Batches, Packed, Tokens, packed
from training.data import Data, read
from training.documents import Bigram, read_documents, split, split_starts
from training.optimizer import optimizer_of
from training.progress import Board, Speed, in_words, shown, threads_for
from training.run import Run
from training.step import Part, cross_entropy, each_tensor
from training.worker import Worker

from kernel_fusion.console import make_console  # not installed? pip install -e ..

# Short windows and many small steps: in a minute or two a model learns more from 3000 steps on 512 bytes than from 300
# on 5000. The weights start larger than GPT-2's 0.02, which suits its width of 768.
SMALL = Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4, initializer_range=0.08)
BYTES = {"tokenizer": "bytes", "bos_token_id": None, "eos_token_id": None}  # entries of config.json


class Result(NamedTuple):
    """Losses are in nats a token, on the held-out part of the data."""

    loss: float
    bigram_loss: float | None  # of the repository's documents alone
    steps: int
    seconds: float
    folder: pathlib.Path


@torch.no_grad()
def evaluate(
    model: GPT2,
    text: torch.Tensor,
    batch: int = 32,
    *,
    length: int | None = None,
    dtype: torch.dtype = torch.float32,
    begins: torch.Tensor | None = None,
    worker: Worker | None = None,
) -> float:
    """Nats a token on `text`, its first one aside. A token's context begins with its window, of `length` tokens: all of
    the model's positions where that is None. Or with its document, if `begins` says which tokens begin one, a bool for
    each; they are left aside then."""
    if len(text) < 2:
        raise ValueError(f"evaluate: `text` must hold at least 2 tokens, got {len(text)}")
    if (largest := int(text.max())) >= model.config.vocab_size:
        raise ValueError(f"evaluate: `text` must be of tokens below {model.config.vocab_size}, has {largest}")
    length = length or model.config.n_positions
    device = model.wte.weight.device
    total, counted = torch.zeros((), dtype=torch.float64, device=device), 0
    whole = (len(text) - 1) // length
    starts = range(0, whole * length, length)

    def windows_of(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for group in (starts[i : i + batch] for i in range(0, whole, batch)):
            yield torch.stack([x[i : i + length + 1] for i in group])  # a window's last token is the next's first
        if len(rest := x[whole * length :]) > 1:
            yield rest[None]

    with (worker or Worker()).computing(model, dtype):
        flags = itertools.repeat(None) if begins is None else windows_of(begins)
        for windows, begun in zip(windows_of(text), flags, strict=False):
            part = windows if begun is None else packed(windows.long(), begun)
            count = int((part.targets != -100).sum()) if isinstance(part, Packed) else windows[:, 1:].numel()
            if count:
                total += cross_entropy(model, on_device(part, device)) * count
                counted += count
    return total.item() / max(1, counted)


def documents_of(documents: list[bytes], config: Config, console: Console) -> tuple[Data, float]:
    """The repository's texts as data, and the bigram model's loss on what is held out of them."""
    if config.vocab_size != 256:
        raise ValueError(f"train: `config.vocab_size` must be 256, as many as there are bytes, got {config.vocab_size}")
    text, held_out = split(documents)
    bigram = Bigram(text)
    bar = bigram.loss(held_out)
    weights = ", ".join(f"{weight:.3f}" for weight in bigram.weights.tolist())
    console.print(f"bigram, weights {weights} (pair, single, uniform): held-out loss {bar:.3f}")
    parts = (
        Tokens([part.numpy()], ["the documents"], starts=[places])
        for part, places in zip((text, held_out), split_starts(documents), strict=True)
    )
    return Data(*parts, vocab_size=256, tokenizer="bytes"), bar


def check_fits(data: Data, config: Config, run: Run, device: str) -> None:
    """A model of this config can be trained so on these data."""
    if run.context and run.context > config.n_positions:
        raise ValueError(
            f"train: `context` must be at most {config.n_positions}, the model's `n_positions`, got {run.context}"
        )
    if data.vocab_size and data.vocab_size > config.vocab_size:
        raise ValueError(
            f"train: the model's `vocab_size` must be at least {data.vocab_size}, as many as the tokenizer has, "
            f"got {config.vocab_size}"
        )
    if run.packed and data.train.starts is None:
        end = data.train.end_of_text
        if end is None:
            raise ValueError("train: `packed` needs data that says where its documents begin")
        if not 0 <= end < config.vocab_size:
            raise ValueError(
                f"--end-of-text must be below the model's `vocab_size`, {config.vocab_size}, got {end}: with --packed "
                f"it is the token that ends a document"
            )
    if run.graph and torch.device(device).type != "cuda":
        raise ValueError(f"train: `graph` needs a GPU, for a CUDA graph is captured there, got device {device}")


def on_device(part: Part, device: torch.device) -> Part:
    """Copied there; to a GPU without a wait, from memory that it reads by itself."""
    if device.type != "cuda":
        return part
    return each_tensor(lambda t: t.pin_memory().to(device, non_blocking=True), part)


def train(
    console: Console,
    *,
    data: Data | None = None,
    documents: list[bytes] | None = None,
    model: GPT2 | None = None,
    config: Config = SMALL,
    device: str = "cpu",
    out: pathlib.Path = OUT,
    log_every: int = 0,
    eval_every: int = 0,
    eval_tokens: int = 1 << 16,
    save_every: int = 0,
    keep: int = 2,
    resume: bool = False,
    tensorboard: bool = False,
    worker: Worker | None = None,
    on_loss: Callable[[int, torch.Tensor], Any] = lambda number, loss: None,
    **options: Any,
) -> Result:
    """Takes the steps of a training, evaluates, and saves the model in `out`, at the end and on the way.

    Args:
        data: None takes `documents`, and these as None the repository's.
        model: on `device`, in float32; None begins with random weights of `config`.
        log_every, eval_every, save_every: steps between two lines, losses on held-out data, checkpoints. 0 stands for
            few lines, one loss at the end, and no checkpoints but the model alone at each quarter.
        keep: so many checkpoints, the last ones.
        worker: one of several, which all call this; None is alone.
        resume: goes on from the last checkpoint in `out`, if there is one.
        on_loss: is called with each step's number and loss, which is not waited for.
        options: of `Run`.

    Raises:
        ValueError: an argument out of its range, too little data, or a checkpoint of another training.
        RuntimeError: the loss is no longer a number.
        OSError: the model could not be saved.
    """
    run = Run(**options)
    for name, number, least in (
        ("keep", keep, 1), ("log_every", log_every, 0), ("eval_every", eval_every, 0), ("save_every", save_every, 0),
        ("eval_tokens", eval_tokens, 2),
    ):  # fmt: skip
        if number < least:
            raise ValueError(f"train: `{name}` must be at least {least}, got {number}")
    worker = worker or Worker()
    worker.check(run)
    began = time.monotonic()

    def look() -> None:
        weight_files.check_writable(out)  # now, and not when there is something to lose
        checkpoint.clear_up(out)

    worker.first(look)
    last = next(iter(checkpoint.whole(out)[::-1]), None)
    if last and not resume:
        raise ValueError(
            f"train: {out} holds {last.name} of a training: --resume goes on from it; or give another --out"
        )
    bar = None
    config = model.config if model else config
    if data is None:
        data, bar = documents_of(read_documents() if documents is None else documents, config, console)
    check_fits(data, config, run, device)
    length = run.context or config.n_positions
    part = run.batch // run.accumulate // worker.shares
    batches = Batches(
        data.train, length, part, vocab_size=config.vocab_size, seed=run.seed, rank=worker.share, world=worker.shares,
        packed=run.packed,
    )  # fmt: skip
    held_out = data.held_out.first(eval_tokens)
    begins = data.held_out.first_begins(eval_tokens) if run.packed else None
    console.print(f"{len(data.train):,} tokens to train on, {len(data.held_out):,} held out")

    torch.manual_seed(run.seed)
    model = model or GPT2(config).to(device)
    model.recompute = run.recompute
    where = model.wte.weight.device
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"GPT-2, {config.n_layer} layers, width {config.n_embd}: {parameters:,} parameters, on {device}")
    about = {
        "run": dataclasses.asdict(run) | {"context": length}, "config": dataclasses.asdict(config),
        "data": data.train.digest(run.packed),
    }  # fmt: skip
    worker.check_same(about | {"out": str(out), "checkpoint": str(last), "save_every": save_every})
    speed = Speed(model, length, run.torch_dtype, worker.workers)
    model = worker.place(model, run)
    optimizer = optimizer_of(model, run.rate, weight_decay=run.weight_decay, in_a_graph=run.graph)
    take = worker.step(run, where)
    begin = 0
    if last:
        checkpoint.check_same(last, about)
        begin = worker.load(last, model, optimizer)
        worker.first(lambda: checkpoint.remove_older(out, keep))  # as the last save would have, had it not been killed
        console.print(f"goes on from {last}, after {begin} steps")
    elif resume:
        console.print(f"no checkpoint in {out} yet: begins at the first step")
    board = Board(out / "tensorboard" if tensorboard and worker.rank == 0 else None, begin)
    entries = BYTES if data.tokenizer == "bytes" else {}
    losses, loss = torch.zeros((), device=where), torch.zeros((), device=where)

    def check_losses(number: int) -> None:
        """Waits for the GPU."""
        if not math.isfinite(losses.item()):
            raise RuntimeError(f"train: the loss of step {number} is {loss.item()}")

    speed.pause()
    with threads_for(config), shown(console, every=log_every > 0) as show:
        for number in range(begin, run.steps):
            first = number * run.accumulate
            parts = [on_device(batches.at(first + i), where) for i in range(run.accumulate)]
            loss = take(model, optimizer, parts, run.rate_of(number), dtype=run.torch_dtype, clip=run.clip)
            losses += loss
            speed.tokens += run.batch * length
            on_loss(number, loss)
            done = number + 1
            if number % (log_every or 10) == 0:
                check_losses(number)
                found = speed.look()
                beside = f", bigram {bar:.3f}" if bar else in_words(found)
                show(number / run.steps, f"step {number}, loss {loss.item():.3f}{beside}")
                board.add(number, loss=loss.item(), rate=run.rate_of(number), **found)
            if eval_every and done % eval_every == 0 and done < run.steps:
                value = evaluate(model, held_out, length=length, dtype=run.torch_dtype, begins=begins, worker=worker)
                console.print(f"after {done} steps: held-out loss {value:.3f}")
                board.add(number, held_out_loss=value)
                speed.pause()
            if save_every and (done % save_every == 0 or done == run.steps):
                check_losses(number)
                worker.save(out, done, model, optimizer, about, keep=keep, config=entries)
                speed.pause()
            elif not save_every and 4 * done // run.steps > 4 * number // run.steps and done < run.steps:
                worker.save_model(out, model, entries)
        final = evaluate(model, held_out, length=length, dtype=run.torch_dtype, begins=begins, worker=worker)
    board.add(run.steps, held_out_loss=final)
    board.close()
    worker.save_model(out, model, entries)
    if isinstance(data.tokenizer, pathlib.Path) and worker.rank == 0:
        shutil.copyfile(data.tokenizer, out / "tokenizer.json")
    return Result(final, bar, run.steps, time.monotonic() - began, out)


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
    """Prints both losses and a paragraph; of other data than the repository's the loss.

    Raises:
        RuntimeError: the bigram model is not beaten.
    """
    about = f"({result.steps} steps, {result.seconds:.0f} s; saved in {result.folder})"
    if result.bigram_loss is None:
        console.print(f"held-out loss, nats a token: {result.loss:.3f} {about}")
        return
    console.print(f"held-out loss, nats a byte: GPT-2 {result.loss:.3f}, bigram {result.bigram_loss:.3f} {about}")
    if not result.loss < result.bigram_loss:
        raise RuntimeError(
            f"train: after {result.steps} steps the held-out loss {result.loss:.3f} is not below the bigram model's "
            f"{result.bigram_loss:.3f}; give it more of them: --steps"
        )
    console.print("it writes (⏎ is a new line):")
    console.print(paragraph(result.folder, device=device).replace("\n", " ⏎ "), markup=False)


def model_of(options: argparse.Namespace, data: Data | None) -> dict[str, Any]:
    """What `train` is given of a model: its weights, where --model names a folder, or else its config."""
    blocks = {"blocks": options.blocks} if options.blocks else {}
    small = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.heads}
    sizes = {name: value for name, value in (small | {"vocab_size": options.vocab_size}).items() if value is not None}
    if options.model and options.model not in SIZES:
        if sizes:
            raise ValueError(f"--model {options.model} has its own sizes; none may be given besides")
        if not pathlib.Path(options.model).is_dir():
            raise ValueError(f"--model must be {', '.join(SIZES)} or a folder, got {options.model!r}")
        return {"model": GPT2.from_pretrained(options.model, dtype=torch.float32, device=options.device, **blocks)}
    if options.model:
        if sizes.keys() - {"vocab_size"}:
            raise ValueError(f"--layers, --width and --heads are a small model's; --model {options.model} has its own")
        return {"config": dataclasses.replace(CONFIGS[SIZES[options.model]], **sizes, **blocks)}
    if data is not None:
        sizes.setdefault("vocab_size", data.vocab_size or Config.vocab_size)
    if options.context:
        sizes["n_positions"] = options.context
    return {"config": dataclasses.replace(SMALL, **sizes, **blocks)}


def train_as_told(options: argparse.Namespace, console: Console, **others: Any) -> Result:
    """`train` as the options say, and `others` besides."""
    check_device(options.device)
    data = None
    if options.data:
        ways = {"tokenizer": options.tokenizer, "token_bytes": options.token_bytes}
        data = read(options.data, end_of_text=options.end_of_text if options.packed else None, **ways)
    if options.rate is None:
        options.rate = SMALL_RATE if not options.model else RATE if options.model in SIZES else FINE_RATE
    passed = (
        "steps", "batch", "accumulate", "context", "packed", "rate", "warm_up", "weight_decay", "clip", "seed",
        "dtype", "recompute", "graph", "device", "out", "log_every", "eval_every", "eval_tokens", "save_every",
        "keep", "resume", "tensorboard",
    )  # fmt: skip
    chosen = {name: getattr(options, name) for name in passed}
    return train(console, data=data, **model_of(options, data), **chosen, **others)


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    options.device = options.device or default_device()
    console = make_console()
    try:
        report(console, train_as_told(options, console), options.device)
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
