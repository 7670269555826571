"""What fusion is, in PyTorch alone: y = residual + scale * f(x + bias), one operation after the other and fused.

python pages/simple_demo.py [--device cpu|cuda|mps] [--rows R] [--width W] [--dtype float32|float16|bfloat16]

It needs torch and nothing else of this repository. It computes the same in several ways, counts the bytes that each way
moves, checks every result against float64, and times them: with little arithmetic (f is relu), with much (f is gelu),
and on small tensors. All figures it prints are of this run.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

SCALE = 0.5
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CACHED_BYTES = 1024 * 1024  # of a block: it and what it is computed from fit into the second-level caches of two cores
SMALL_ROWS = 8


Tensors = tuple[torch.Tensor, ...]


class Activation(NamedTuple):
    """The function f: its name, f(v), and f(v) written to another tensor."""

    name: str
    of: Callable[[torch.Tensor], torch.Tensor]
    into: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


RELU = Activation("relu", torch.relu, lambda v, out: torch.clamp_min(v, 0, out=out))
GELU = Activation(
    "gelu",
    lambda v: F.gelu(v, approximate="tanh"),
    lambda v, out: torch.ops.aten.gelu.out(v, approximate="tanh", out=out),
)


class Way(NamedTuple):
    """One way to compute y: its name, the function, and how many tensors of y's size move between memory and chip.

    The function gets f; x, bias and residual; and tensors of y's shape that it may write to, four of them.
    """

    name: str
    run: Callable[[Activation, Tensors, Tensors], torch.Tensor]
    moves: str
    tensors: int


# ---- the ways ----


def as_written(f: Activation, inputs: Tensors, kept: Tensors | None = None) -> torch.Tensor:
    """Four operations. Each reads its inputs from memory and writes its result to a new tensor."""
    x, bias, residual = inputs
    shifted = x + bias  # reads x, writes shifted: 2 tensors
    active = f.of(shifted)  # reads one, writes one: 2
    scaled = active * SCALE  # 2
    return residual + scaled  # reads two, writes one: 3, so 9 in all


def into_kept(f: Activation, inputs: Tensors, kept: Tensors) -> torch.Tensor:
    """The same operations and the same 9 tensors, written to memory that is there already.

    New memory costs time by itself: a CPU's operating system fills it with zeros first. This way has no such cost, so
    comparing it with the fused way shows what the bytes alone make out.
    """
    (x, bias, residual), (shifted, active, scaled, y) = inputs, kept
    torch.add(x, bias, out=shifted)
    f.into(shifted, active)
    torch.mul(active, SCALE, out=scaled)
    return torch.add(residual, scaled, out=y)


def by_blocks(f: Activation, inputs: Tensors, kept: Tensors) -> torch.Tensor:
    """The same operations on a few rows at a time: on a CPU, fusion without a compiler.

    What one operation writes is still in the cache when the next one reads it, so that between memory and chip only x,
    residual and y move.
    """
    (x, bias, residual), (*scratch, y) = inputs, kept
    rows = max(1, CACHED_BYTES // (x.shape[1] * x.element_size()))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        block = scratch[0][:rows][: len(x[part])]
        torch.add(x[part], bias, out=block)
        f.into(block, block)
        torch.mul(block, SCALE, out=block)
        torch.add(residual[part], block, out=y[part])
    return y


# ---- checking and timing ----


def error_against_float64(y: torch.Tensor, f: Activation, inputs: Tensors) -> tuple[float, float]:
    """The largest difference from float64, and the largest that rounding explains: four rounded results."""
    x, bias, residual = (tensor.cpu() for tensor in inputs)
    y = y.cpu()
    differences, largest = [], 0.0
    for start in range(0, len(x), 256):  # a few rows at a time: float64 takes twice the memory
        part = slice(start, start + 256)
        exact = as_written(f, (x[part].double(), bias.double(), residual[part].double()))
        differences.append((y[part].double() - exact).abs().max())
        largest = max(largest, exact.abs().max().item())
    difference = torch.stack(differences).max().item()  # Python's max would lose a NaN
    return difference, 4 * torch.finfo(y.dtype).eps * largest


def synchronise(device: str) -> None:
    """Waits until the device has done what was asked of it. A CPU has when the call returns."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


class Seconds(NamedTuple):
    """The time of a call: the median of its repeats, and the quartiles that half of them lie between."""

    median: float
    low: float
    high: float

    def against(self, other: "Seconds") -> str:
        """ "1.24x" where this is 1.24 times as fast as `other`; "noise" where they are not apart."""
        apart = self.high < other.low or other.high < self.low
        return f"{other.median / self.median:.2f}x" if apart else "noise"


def seconds(runs: list[Callable[[], object]], device: str, budget: float = 0.5) -> list[Seconds]:
    """The times of a call of each, taken in turns, so that whatever else slows the machine down slows all of them.

    Calls are timed in groups of at least 10 ms, since asking for the time takes time too.
    """

    def timed(run: Callable[[], object], calls: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronise(device)
        return (time.perf_counter() - start) / calls

    for run in runs:
        timed(run, 1)  # the first call pays for starting up
    calls = [max(1, round(0.01 / timed(run, 1))) for run in runs]
    rounds, began = [], time.perf_counter()
    while len(rounds) < 5 or time.perf_counter() - began < budget * len(runs):
        rounds.append([timed(run, count) for run, count in zip(runs, calls, strict=True)])
    quartiles = [statistics.quantiles(times, n=4, method="inclusive") for times in zip(*rounds, strict=True)]
    return [Seconds(median, low, high) for low, median, high in quartiles]


# ---- the tables ----


def ways(device: str, f: Activation, inputs: Tensors) -> list[Way]:
    """What there is on this device, the fused way last."""
    found = [Way("as written", as_written, "2 + 2 + 2 + 3", 9), Way("memory kept", into_kept, "2 + 2 + 2 + 3", 9)]
    if device == "cpu":
        return [*found, Way("by blocks", by_blocks, "x, residual, y", 3)]
    one_kernel = torch.compile(as_written, dynamic=False)
    try:
        one_kernel(f, inputs)
    except Exception as error:  # whatever the compiler behind it raises where it cannot work; we say so and go on
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(f"torch.compile does not work here, so no way is fused: {lines[0]}")
        return found
    return [*found, Way("torch.compile", lambda f, inputs, kept: one_kernel(f, inputs), "x, residual, y", 3)]


def show(f: Activation, rows: int, width: int, dtype: torch.dtype, device: str) -> bool:
    """Computes, checks and times every way at one size, and prints the table. Returns whether all results agree."""
    torch.manual_seed(0)
    x, residual, bias = (torch.randn(shape).to(device, dtype) for shape in ((rows, width), (rows, width), (width,)))
    inputs, kept = (x, bias, residual), tuple(torch.empty_like(x) for _ in range(4))
    size = x.numel() * x.element_size()
    wrong = []

    found = ways(device, f, inputs)
    kind = str(dtype).removeprefix("torch.")
    print(f"\nf is {f.name}, {rows} rows of {width}, {kind}: a tensor is {size / 1e6:.3g} MB")
    print(f"{'':14} {'tensors moved':>15} {'MB':>8} {'ms':>9} {'GB/s':>7} {'speedup':>8}   off from float64")
    off = {}
    for way in found:
        for tensor in kept:
            tensor.fill_(float("nan"))  # what a way does not write must not be right by another way's work
        difference, allowed = error_against_float64(way.run(f, inputs, kept), f, inputs)
        right = difference <= allowed  # False where it is NaN
        wrong += [] if right else [way.name]
        off[way.name] = f"{difference:.1e}" + ("" if right else f" WRONG, at most {allowed:.1e}")
    *taken, copy = seconds(
        [*(lambda way=way: way.run(f, inputs, kept) for way in found), lambda: kept[0].copy_(x)], device
    )
    times = {way.name: took for way, took in zip(found, taken, strict=True)}
    speedups = {way.name: times[way.name].against(times[found[0].name]) for way in found[1:]}
    for way in found:
        moved, took = way.tensors * size + bias.numel() * bias.element_size(), times[way.name].median
        print(
            f"{way.name:14} {way.moves:>15} {moved / 1e6:8.3g} {1e3 * took:9.3g} {moved / took / 1e9:7.1f}"
            f" {speedups.get(way.name, ''):>8}   {off[way.name]}"
        )
    rate = 2 * size / copy.median / 1e9
    print(f"{'a copy':14} {'1 + 1':>15} {2 * size / 1e6:8.3g} {1e3 * copy.median:9.3g} {rate:7.1f}")

    if "noise" in speedups.values():
        print("Noise: not even three of four repeats of the one are shorter than three of four of the other. Other")
        print("programs at work make noise.")
    if found[-1].tensors == 3:
        one = tuple(t.flatten()[:1].reshape(1, -1) for t in inputs)
        taken = seconds([lambda way=way: way.run(f, one, one + one[:1]) for way in found[1:]], device, 0.2)
        fixed = {way.name: took for way, took in zip(found[1:], taken, strict=True)}
        explain(f.name, found[-1].name, times, fixed, rate=1.5 * copy.median / times[found[-1].name].median)
    if wrong:
        print(f"WRONG: {', '.join(wrong)}")
    return not wrong


def explain(f: str, fused: str, times: dict[str, Seconds], fixed: dict[str, Seconds], rate: float) -> None:
    """Says in words what the table shows: what moved, what came of it, and what else takes time.

    Args:
        f: the activation's name.
        fused: the name of the fused way.
        times: seconds of each way.
        fixed: seconds that "memory kept" and the fused way take for a single number.
        rate: how fast the fused way moves its bytes, as a fraction of a copy's rate.
    """
    kept = times["memory kept"]
    by = kept.against(times["as written"])
    print(f"Second line against first, {by}: as much moves, but no new memory is asked for.")
    speedup = times[fused].against(kept)
    if speedup == "noise":
        print("Third against second, noise: too noisy to say what fusion gains here; run it again.")
    elif kept.median / times[fused].median >= 1.1:
        print(f"Third against second, {speedup}: three intermediate results are neither written to memory nor read")
        print("again, so 3 tensors move instead of 9. If only bytes took time, it would be 3x.")
    else:
        print(f"Third against second, {speedup}: fusion gains little or nothing here, though 3 tensors move, not 9.")
    share = {name: min(1, fixed[name].median / times[name].median) for name in fixed}
    if max(share.values()) > 0.2:
        print(
            f"Starting the operations takes {share['memory kept']:.0%} of the second line's time, {share[fused]:.0%} of"
        )
        print("the third's, and tensors this small stay in the cache by themselves.")
    elif rate < 0.7 and speedup != "noise":
        print(
            f"The third moves its bytes at {rate:.0%} of a copy's rate: starting the operations and arithmetic, such as"
        )
        print(f"that of {f}, take time too, and fusion saves neither.")


def main(arguments: list[str] | None = None) -> int:
    """Shows a large and a small size. Returns 0 where every result agrees with float64, else 1."""
    usable = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    best = next(device for device, there in usable.items() if there)
    parser = argparse.ArgumentParser(description="Separate against fused operations, in PyTorch alone.")
    parser.add_argument("--device", choices=sorted(usable), default=best, help=f"default here: {best}")
    parser.add_argument("--rows", type=int, default=None, help="default: 16384, on a GPU 65536")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    options = parser.parse_args(arguments)
    rows = options.rows if options.rows is not None else 16384 if options.device == "cpu" else 65536
    for name, value in (("--rows", rows), ("--width", options.width)):
        if value < 1:
            parser.error(f"{name} must be at least 1, got {value}")
    if not usable[options.device]:
        parser.error(f"--device {options.device}: torch {torch.__version__} has no such device on this machine")

    print(f"y = residual + {SCALE} * f(x + bias) on {options.device}, torch {torch.__version__}")
    tables = [(RELU, rows), (GELU, rows)] + ([(GELU, SMALL_ROWS)] if rows > SMALL_ROWS else [])
    right = [show(f, size, options.width, DTYPES[options.dtype], options.device) for f, size in tables]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
