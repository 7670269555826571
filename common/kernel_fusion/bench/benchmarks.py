"""How fast a rung is, beside its peers and beside what the machine can do at all.

A step's `benchmark.py` lists its cases and ends with `benchmarks.main("<step>", cases)`. Times are medians, taken as
`clock` says. Ceilings are measured besides, as `ceilings` says: how fast memory is at the very number of bytes
that a case moves, and the rate of a large matrix product.
"""

import argparse
import collections
import copy
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.util
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from kernel_fusion import steps
from kernel_fusion.bench import clock
from kernel_fusion.bench.ceilings import Ceilings
from kernel_fusion.bench.clock import benchmark_kernel, device_of
from kernel_fusion.bench.journal import Journal
from kernel_fusion.bench.noise import spread
from kernel_fusion.console import UserError, make_console, milliseconds, progress
from kernel_fusion.report import results
from kernel_fusion.testing.accuracy import allowance, as_tuple, in_float64, max_error, poisoned_allocations

__all__ = ["Case", "Ceilings", "benchmark_kernel", "compiled", "device_of", "installed", "main", "run_case"]

OURS = (ValueError, RuntimeError)
REFUSALS = {"rung": OURS, "plan": OURS, "peer": Exception}  # others' code raises what it likes
SIZES = ("emulated", "cpu", "quick", "full")
COPY_BYTES = {"cuda": [1 << n for n in (22, 24, 26, 28, 30, 33)], "cpu": [1 << n for n in (16, 20, 24, 28)]}
BUDGET_S = 1.0  # what the repeats of one implementation may take together; KF_BENCHMARK_SECONDS says otherwise
# On a GPU there are at least 20, or 5 where one takes longer than this.
SLOW_S = 0.05
# By clock "call" the budget is spent in so many rounds, in each of which the implementations take turns. Whatever else
# the CPU does for a second then disturbs a few rounds of each, not all calls of one; and the median round decides.
ROUNDS = 9
# What `correct` allows of max|reference| where a case has no peer "torch eager" to compare with.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape and dtype.

    Args:
        op: the op's name.
        shape: names and sizes, for the tables: {"rows": 4096, "width": 1024}.
        dtype: of the inputs.
        inputs: called with a device, gives the positional arguments of the rest.
        run: called with the inputs and `rung=…`.
        reference: called with the inputs in float64, gives the right outputs.
        bytes: what must be read and written at the least, once each.
        written: how many of these bytes are written; default: half, as by a copy. It chooses memory's ceiling.
        flops: floating-point operations.
        peers: other implementations by name, called with the inputs.
        bound: "memory" or "arithmetic": which ceiling the op is under.
        clock: "kernels" times the GPU's work; "call" what the caller waits for, the CPU's launching included.
        direction: "forward" or "backward".
        eager: PyTorch composed in the inputs' dtype, whose error sets the tolerance; default: peer "torch eager".
        peer_reference: by name of a peer that draws random numbers of its own: called with its outputs and the inputs
            in float64, gives what was right for those numbers, or raises RuntimeError.
    """

    op: str
    shape: dict[str, int | float]
    dtype: torch.dtype
    inputs: Callable[[Any], tuple]
    run: Callable
    reference: Callable
    bytes: int
    flops: int
    peers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    written: int | None = None
    bound: str = "memory"
    clock: str = "kernels"
    direction: str = "forward"
    eager: Callable | None = None
    peer_reference: dict[str, Callable] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.bound not in ("memory", "arithmetic"):
            raise ValueError(f"Case: `bound` must be 'memory' or 'arithmetic', got {self.bound!r}")
        if self.direction not in ("forward", "backward"):
            raise ValueError(f"Case: `direction` must be 'forward' or 'backward', got {self.direction!r}")
        if self.clock not in ("kernels", "call"):
            raise ValueError(f"Case: `clock` must be 'kernels' or 'call', got {self.clock!r}")
        if self.written is not None and not 0 <= self.written <= self.bytes:
            raise ValueError(f"Case: `written` must be from 0 to `bytes` ({self.bytes}), got {self.written}")

    def title(self) -> str:
        """ "softmax 4096×1024 bfloat16" and the like, with the names of the sizes."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.shape.items())
        backward = ", backward" if self.direction == "backward" and not self.op.endswith("_backward") else ""
        return f"{self.op}{backward}: {sizes}, {dtype_name(self.dtype)}"

    def key(self) -> tuple:
        """What its rows in a results file have in common: see results.case_key."""
        return self.op, self.direction, dtype_name(self.dtype), tuple(self.shape.items())


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def compiled(fn: Callable) -> Callable:
    """`fn` under torch.compile as it is fastest: static shapes, tuned, without CUDA graphs. A peer for GPU cases.

    That is mode "max-autotune-no-cudagraphs", with matrix products left to cuBLAS. Tuning Triton's against it takes
    half a minute a shape; in all eight shapes of steps 2 and 3 where it was tried on an H200, cuBLAS won.
    """
    options = {"max_autotune": True, "coordinate_descent_tuning": True, "max_autotune_gemm_backends": "ATEN"}
    return torch.compile(fn, dynamic=False, options=options)


def installed(module: str) -> bool:
    """Whether `module` is there, "quack" or "flash_attn.cute": for peers that only some machines have.

    Packages around it are imported, the module itself is not.
    """
    names = module.split(".")
    return all(importlib.util.find_spec(".".join(names[:count])) for count in range(1, len(names) + 1))


# ---- cases ----


def reason(refusal: Exception) -> str:
    """The first line of what it says."""
    return (str(refusal) or repr(refusal)).splitlines()[0]


class Measured(NamedTuple):
    """A row of the results, the greatest error behind its `correct`, and what the last timed call returned."""

    row: dict
    error: float
    outputs: tuple[torch.Tensor, ...]


def run_case(
    step: Any,
    case: Case,
    device: torch.device,
    *,
    rungs: list[str] | None = None,
    peers: bool = True,
    ceilings: Ceilings | None = None,
    budget_s: float | None = None,
    say: Callable[[str], Any] = print,
) -> list[Measured]:
    """Times every rung and peer of `case`, then checks what the last timed call gave.

    Who refuses the case gets no row, and `say` gets the reason; so does a result that is wrong.

    Args:
        step: the step's module.
        case: what to run.
        device: where.
        rungs: names; default: all that the step has for the device.
        peers: time them too.
        ceilings: what percent_of_ceiling refers to; default: measured here.
        budget_s: what the repeats of one implementation may take on a CPU, or by clock "call"; default: budget().
        say: takes a line of text.
    """
    ceilings = ceilings or Ceilings(device)
    budget_s = budget() if budget_s is None else budget_s
    names = step.rungs(case.op, device) if rungs is None else rungs
    impls = [(name, results.kind_of(name), functools.partial(case.run, rung=name)) for name in names]
    if peers:
        impls += [(name, "peer", fn) for name, fn in case.peers.items()]
    if peers and device.type == "cuda":
        # torch.compile gives a function up after eight recompilations and then runs it uncompiled, which is no peer.
        torch.compiler.reset()
    measured = []
    with torch.set_grad_enabled(case.direction == "backward"):
        inputs = case.inputs(device)
        tolerance = Tolerance(case, inputs)

        def attempt(impl: tuple, own: tuple) -> clock.Timing | None:
            name, kind, fn = impl
            _poison_free_memory(tolerance.references, case.dtype)
            try:
                if case.clock == "call":
                    return clock.measure_call(fn, own, budget_s / ROUNDS)
                return clock.measure(fn, own, *_repeats(fn, own, budget_s))
            except REFUSALS[kind] as refusal:
                if kind != "peer" and f"rung '{name}'" not in str(refusal):
                    raise
                say(f"{case.title()}: {kind} '{name}' not run: {reason(refusal)}")
                return None

        timed = _in_rounds if case.clock == "call" else _one_by_one
        for (name, kind, fn), own, timing in timed(attempt, impls, inputs):
            outputs = as_tuple(timing.result)
            error, correct = tolerance.check(outputs, _own_reference(case, name, outputs, own))
            if kind != "peer":  # once more: memory that it leaves unwritten may have held an earlier right result
                with poisoned_allocations():
                    correct = correct and tolerance.check(as_tuple(fn(*own)))[1]
            if not correct:
                say(f"{case.title()}: {name} is WRONG: {error:.3g} off, allowed are {tolerance.text()}")
            measured.append(Measured(_row(case, name, kind, timing, correct, ceilings), error, outputs))
            del own  # its memory is free when the next one is timed
    return measured


def _one_by_one(attempt: Callable, impls: list[tuple], inputs: tuple) -> Iterator[tuple]:
    """Gives each implementation that does not refuse, with its inputs and timing, before the next one is timed."""
    for impl in impls:
        own = own_copy(inputs)
        timing = attempt(impl, own)
        if timing is not None:
            yield impl, own, timing


def _in_rounds(attempt: Callable, impls: list[tuple], inputs: tuple) -> Iterator[tuple]:
    """Gives the same after all were timed in turn, round by round. The median of a round counts as one repeat."""
    turns = [(impl, own_copy(inputs), [], None) for impl in impls]
    for _ in range(1 + ROUNDS):  # the first warms up
        turns = [(impl, own, medians, attempt(impl, own)) for impl, own, medians, _ in turns]
        turns = [turn for turn in turns if turn[-1] is not None]
        for _, _, medians, timing in turns:
            medians.append(timing.ms.median)
    for impl, own, medians, timing in turns:
        yield impl, own, timing._replace(ms=spread(medians[1:]))


def _own_reference(case: Case, name: str, outputs: tuple, inputs: tuple) -> tuple | None:
    """What is right for this implementation alone, where it draws random numbers of its own."""
    if name not in case.peer_reference:
        return None
    return as_tuple(case.peer_reference[name](outputs, *map(in_float64, inputs)))


def own_copy(inputs: tuple) -> tuple:
    """Inputs for one implementation alone: what another one wrote into them would pass for its work.

    Tensors that carry a graph for gradients cannot be copied, and are shared.
    """
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        return inputs
    return copy.deepcopy(inputs)


def _poison_free_memory(like: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Overwrites what the next outputs will probably lie in, lest another's right result be found there."""
    blocks = [torch.full_like(tensor, torch.nan, dtype=dtype) for tensor in like for _ in range(3)]
    del blocks


def budget() -> float:
    """Seconds that the repeats of one implementation may take: KF_BENCHMARK_SECONDS, or BUDGET_S.

    Raises:
        UserError: it is set to something else than a number above 0.
    """
    asked = os.environ.get("KF_BENCHMARK_SECONDS", "")
    try:
        seconds = float(asked or BUDGET_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"KF_BENCHMARK_SECONDS: must be a number of seconds above 0, got {asked!r}")
    return seconds


def _repeats(fn, inputs, budget_s: float) -> tuple[int, int]:
    """Warm-up calls and repeats: as many as fit the budget, after a call to see how long one takes.

    On a GPU a naive rung at a large size would else take most of a run's time.
    """
    on_gpu = device_of(inputs).type == "cuda"
    if on_gpu:
        fn(*inputs)  # compiles, allocates
        torch.cuda.synchronize()
    began = time.perf_counter()
    fn(*inputs)
    if on_gpu:
        torch.cuda.synchronize()
    once = max(time.perf_counter() - began, 1e-6)
    fit = int((budget() if on_gpu else budget_s) / once)
    least = (5 if once > SLOW_S else 20) if on_gpu else 3
    return min(10, fit // 10), max(least, min(100, fit))


class Tolerance:
    """Says whether outputs are right: as near to float64 as the contract of `testing` asks."""

    def __init__(self, case: Case, inputs: tuple):
        self.references = [r.to(torch.float64) for r in as_tuple(case.reference(*map(in_float64, inputs)))]
        eager = case.eager or case.peers.get("torch eager")
        if eager:
            composed = as_tuple(eager(*own_copy(inputs)))
            self.allowed = [allowance(r, e) for r, e in zip(self.references, composed, strict=True)]
        else:
            self.allowed = [ROUNDING[case.dtype] * _largest(r) for r in self.references]

    def check(self, outputs: tuple[torch.Tensor, ...], references: tuple | None = None) -> tuple[float, bool]:
        """The greatest error of any output against `references`, and whether all are within what is allowed."""
        references = references or self.references
        errors = [max_error(out.detach(), r) for out, r in zip(outputs, references, strict=True)]
        return max(errors), all(e <= a for e, a in zip(errors, self.allowed, strict=True))

    def text(self) -> str:
        """What is allowed, output by output."""
        return ", ".join(f"{limit:.3g}" for limit in self.allowed)


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _row(case: Case, name: str, kind: str, timing: clock.Timing, correct: bool, ceilings: Ceilings) -> dict:
    if case.bound == "memory":
        ceiling = ceilings.memory(case.bytes, case.bytes // 2 if case.written is None else case.written)
    else:
        ceiling = ceilings.matmul()
    ms, low, high = map(results.rounded, timing.ms)
    row = {
        "op": case.op,
        "pass": case.direction,
        "impl": name,
        "kind": kind,
        "dtype": dtype_name(case.dtype),
        "shape": dict(case.shape),
        "ms": ms,
        "ms_quartiles": [low, high],
        "host_bound": timing.host_bound,
        "bound": case.bound,
        "ceiling": results.rounded(ceiling),
        "bytes": case.bytes,
        "flops": case.flops,
    }
    return {
        **row,
        **{name: value for name, value in results.derived(row).items() if name not in row},
        "correct": correct,
    }


# ---- results ----


def gpu_slug(name: str) -> str:
    """The name of a results file for a GPU: "h200" for "NVIDIA H200", "rtx-4090" for "NVIDIA GeForce RTX 4090"."""
    words = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "gpu"


def environment(device: torch.device) -> dict:
    """Where the figures come from."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        if on_gpu
        else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **provenance(),
    }


def provenance() -> dict:
    """What was measured, and when."""
    return {"commit": _commit(), "date": datetime.date.today().isoformat()}


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=steps.ROOT)
    except FileNotFoundError:
        return None
    lines = done.stdout.split("\n")
    return lines[0].strip() or None if done.returncode == 0 else None


def _commit() -> str | None:
    """The commit that was measured, with "+" where files differ from it.

    Where there is no git, or no checkout, whoever runs the benchmark says it by KF_COMMIT; None if nobody does.
    """
    commit = _first_line(["git", "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return os.environ.get("KF_COMMIT") or None
    return f"{commit}+" if _first_line(["git", "status", "--porcelain"]) else commit


def write_results(path: pathlib.Path, rows: list[dict], ceilings: dict, device: torch.device) -> None:
    """Writes the results of a whole run. Hardware counters that stood there for the same rows stay, see `profile`."""
    here = environment(device)
    before = []
    if path.exists():
        old = results.read(path)
        keep_counters(rows, old, here)
        before = old.rows
    rows = results.placed(rows, before, map(results.key, rows))
    results.write(results.Results(path, here, _of_the_machine(ceilings), rows))


def _of_the_machine(ceilings: dict) -> dict:
    """What a file keeps of the ceilings. Those of other mixes stand only in the rows that they are for."""
    return {name: ceilings[name] for name in ("copy_gb_s", "matmul_tflop_s")}


def keep_counters(rows: list[dict], before: results.Results, here: dict) -> None:
    """Gives `rows` the hardware counters that `before` has of the same rows, if they are of the same GPU and driver.

    Counting takes runs of its own, by `kernel-fusion profile --save`, and what is counted is not what is timed. A row's
    "profile" says at which commit it was counted.
    """
    if any(before.environment[name] != here[name] for name in ("gpu", "driver", "cuda")):
        return
    counted = {results.key(row): row for row in before.rows if "profile" in row}
    for row in rows:
        if old := counted.get(results.key(row)):
            row.update({name: old[name] for name in ("dram_bytes", "sectors_per_request", "profile")})


def check_mergeable(path: pathlib.Path, device: torch.device) -> None:
    """Returns where figures measured here may stand beside those in `path`.

    Raises:
        ResultsError: there is no such file, or its GPU, driver, CUDA or torch is another one.
    """
    if not path.exists():
        raise results.ResultsError(f"--merge: there is no {path}; run the benchmark without --op first")
    here, there = environment(device), results.read(path).environment
    for name in ("gpu", "driver", "cuda", "torch"):
        if here[name] != there[name]:
            raise results.ResultsError(
                f"--merge: {path} was measured with {name} {there[name]}, this is {name} {here[name]}; "
                "figures of one file must come from one environment. Run the benchmark without --op"
            )


def merge_results(
    path: pathlib.Path, rows: list[dict], ceilings: dict, device: torch.device, known: list[tuple]
) -> list[dict]:
    """Puts `rows` in the places of those with their keys in a results file. Its other rows stay.

    Where of an op no row stays, or only such as name their run, the file's environment notes commit and date under
    "ops"; else each new row does, as its "run". Ceilings that the file has stay too, since a row has its own.

    Args:
        path: of the results file.
        rows: what was measured.
        ceilings: of this run, as `Ceilings.as_json` gives them.
        device: where it measured.
        known: the keys of all that the benchmark has, in its order.

    Returns:
        Rows of the ops measured that it has no more, and that are dropped: of other cases, or of rungs that are gone or
        now refuse the case. A peer may only not be installed here.

    Raises:
        ResultsError: as check_mergeable.
    """
    check_mergeable(path, device)
    before, here = results.read(path), environment(device)
    keep_counters(rows, before, here)
    measured, new = {row["op"] for row in rows}, {results.key(row) for row in rows}
    cases = {one[:-1] for one in known}
    kept, dropped = [], []
    for row in before.rows:
        stands = results.key(row) in known if results.is_ours(row) else results.case_key(row) in cases
        if results.key(row) not in new:
            (kept if stands or row["op"] not in measured else dropped).append(row)
    run = {name: here[name] for name in ("commit", "date")}
    of_before = {row["op"] for row in kept if "run" not in row}
    notes = {**before.environment.get("ops", {}), **dict.fromkeys(measured - of_before, run)}
    old = before._replace(environment={**before.environment, "ops": notes})
    rows = [row if run.items() <= old.environment_of(row["op"]).items() else {**row, "run": run} for row in rows]
    merged = results.placed([*kept, *rows], before.rows, known)
    ops = {op: notes[op] for op in dict.fromkeys(row["op"] for row in merged) if op in notes}
    there = {name: value for name, value in before.environment.items() if name != "ops"}
    results.write(
        results.Results(
            path, {**there, **({"ops": ops} if ops else {})}, _merged_ceilings(before.ceilings, ceilings), merged
        )
    )
    return dropped


def _merged_ceilings(before: dict, new: dict) -> dict:
    """What `before` has, and what it lacks."""
    copies = {**new["copy_gb_s"], **before["copy_gb_s"]}
    product = before["matmul_tflop_s"]
    return {
        "copy_gb_s": dict(sorted(copies.items(), key=lambda item: int(item[0]))),
        "matmul_tflop_s": new["matmul_tflop_s"] if product is None else product,
    }


def case_table(title: str, rows: list[dict], *, emulated: bool = False) -> Table:
    """The rows of one case as a table. Under emulation no time is compared with another, nor with a ceiling."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("implementation")
    table.add_column("kind")
    for column in ("time", "GB/s", "TFLOP/s", *(() if emulated else ("of the ceiling", "over the rung before"))):
        table.add_column(column, justify="right")
    table.add_column("result")
    before = None
    for row in rows:
        time = f"{milliseconds(row['ms'])}{' †' if row['host_bound'] else ''}"
        cells = [row["impl"], row["kind"], time, f"{row['gb_s']:.3g}", f"{row['tflop_s']:.3g}"]
        if not emulated:
            speedup = f"{before / row['ms']:.2f}×" if before and row["kind"] == "rung" else ""
            cells += [percent(row), speedup]
        table.add_row(*cells, "right" if row["correct"] else "[bold red]WRONG[/]")
        before = row["ms"]
    if any(row["host_bound"] for row in rows):
        table.caption = "† the CPU's launching is in this time"
    return table


def percent(row: dict) -> str:
    """A row's share of its ceiling; nothing where too few bytes move to tell."""
    share = row["percent_of_ceiling"]
    return "" if share is None else f"{share:.1f} %"


# ---- a step's benchmark.py ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Times every rung of this step beside its peers.",
        epilog="With KF_BENCHMARK_SECONDS=0.1 in the environment calls are repeated for a tenth of a second, not for "
        "one: less time, more noise.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--sizes", choices=SIZES, action="append", help="may be repeated; default: full on a GPU; cpu, then emulated"
    )
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    parser.add_argument("--rung", action="append", help="only this rung, and no peers; may be repeated")
    parser.add_argument("--no-peers", action="store_true", help="rungs only")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write the results there")
    parser.add_argument("--no-save", action="store_true", help="do not write results/<gpu>.json")
    parser.add_argument(
        "--merge", action="store_true", help="with --op: put what is measured into the results file, row by row"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on where a run of the same command was cut off, at the next case"
    )
    return parser


def main(step: str, cases: Callable[[str, str], list[Case]], arguments: list[str] | None = None) -> NoReturn:
    """The command line of a step's benchmark.py: times, prints tables, and on a GPU writes results/<gpu>.json.

    Results are written by a complete run on a GPU; by a run of some ops or rungs with --merge; or where --output says.
    Until then, each finished case is kept beside them, for --resume. Exits with 1 where a rung is wrong.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.merge and (not options.op or options.sizes or options.no_save):
        parser.error("--merge goes with --op, without --sizes or --no-save")
    console = make_console()
    where = steps.find(step)
    try:
        module = importlib.import_module(where.module)
    except ImportError as error:
        sys.exit(str(error))
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmark: --device cuda, but torch sees no GPU")
    sizes = options.sizes or (["full"] if device.type == "cuda" else ["cpu", "emulated"])
    _check_names(module, cases, device, sizes, options)
    path = options.output
    whole = not (options.op or options.rung or options.no_peers or options.sizes or options.no_save)
    if path is None and device.type == "cuda" and (whole or options.merge):
        path = results_path(where, device)
    try:
        budget()  # refuses before anything is measured
        if options.merge:
            if path is None:
                parser.error("--merge on a CPU needs --output")
            check_mergeable(path, device)
        if options.resume and path is None:
            parser.error("--resume goes with a run that writes results: see --output")
        journal = Journal(path, environment(device), resume=options.resume)
        rows, ceilings = measure(module, cases, device, sizes, options, console, journal)
        if not rows:
            sys.exit("benchmark: nothing measured: every rung and peer refused")
        if path and options.merge:
            measured = {results.key(row) for row in rows}
            known = [
                key
                for key in keys_of(module, cases, device, sizes)
                if key in measured or key[0] not in options.op or (options.rung and key[-1] not in options.rung)
            ]  # not who was asked in this run and refused
            dropped = merge_results(path, rows, ceilings, device, known)
            for (op, name), count in collections.Counter((row["op"], row["impl"]) for row in dropped).items():
                told = f"rows dropped, since they cannot be measured any more: {count} of {op}, {name}"
                console.print(told, markup=False, soft_wrap=True)
        elif path:
            write_results(path, rows, ceilings, device)
        if path:
            journal.close()
            console.print(f"written: {path}", soft_wrap=True)
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    wrong = [row for row in rows if results.is_ours(row) and not row["correct"]]
    sys.exit(1 if wrong else 0)


def results_path(step: steps.Step, device: torch.device) -> pathlib.Path:
    """Where the results of `step` on this GPU are kept."""
    return step.path / "results" / f"{gpu_slug(torch.cuda.get_device_name(device))}.json"


def _check_names(module, cases, device: torch.device, sizes: list[str], options: argparse.Namespace) -> None:
    """Exits where --op or --rung names something that none of these sizes has."""
    rungs: dict[str, list[str]] = {}
    for size in sizes:
        for case in cases(size, device.type):
            rungs.setdefault(case.op, []).extend(rungs_for(module, case.op, size, device))
    for op in options.op or []:
        if op not in rungs:
            sys.exit(f"benchmark: nothing measured: no op {op!r} at these sizes; there are {', '.join(rungs)}")
    known = {name for op, names in rungs.items() if not options.op or op in options.op for name in names}
    for rung in options.rung or []:
        if rung not in known:
            sys.exit(f"benchmark: nothing measured: no rung {rung!r} here; there are {', '.join(sorted(known))}")


def measure(
    module: Any,
    cases: Callable[[str, str], list[Case]],
    device: torch.device,
    sizes: list[str],
    options: argparse.Namespace,
    console: Console,
    journal: Journal,
) -> tuple[list[dict], dict]:
    """Measures all cases of `sizes` that `journal` does not have, and prints a table for each.

    Returns:
        The rows, and what the machine can do at all, as results have it.
    """
    ceilings = Ceilings(device, journal.ceilings)
    on_gpu = device.type == "cuda"
    if not (options.op or options.rung):
        with progress("measuring what this machine can do"):
            for size in COPY_BYTES[device.type]:
                if not on_gpu or size < torch.cuda.mem_get_info(device)[0] // 2:
                    ceilings.memory(size, size // 2)
            ceilings.matmul()
    rows = []
    for size in sizes:
        console.print(heading(size, device))
        for case in cases(size, device.type):
            if options.op and case.op not in options.op:
                continue
            names = rungs_for(module, case.op, size, device)
            if options.rung:
                names = [name for name in names if name in options.rung]
                if not names:
                    continue
            title = f"{size}: {case.title()}"
            if title in journal.cases:
                console.print(f"{case.title()}: measured before", markup=False, soft_wrap=True)
                rows += journal.cases[title]
                continue
            peers = not (options.rung or options.no_peers or size == "emulated")
            notes: list[str] = []
            with progress(case.title()):
                measured = run_case(module, case, device, rungs=names, peers=peers, ceilings=ceilings, say=notes.append)
            for note in notes:
                console.print(note, markup=False, soft_wrap=True)
            found = [m.row for m in measured]
            del measured
            console.print(case_table(case.title(), found, emulated=size == "emulated"))
            rows += found
            journal.add(title, found, ceilings.as_json())
            _free(device)
    return rows, ceilings.as_json()


def keys_of(
    module: Any, cases: Callable[[str, str], list[Case]], device: torch.device, sizes: list[str]
) -> list[tuple]:
    """The keys of all rows that a run of these sizes can have here, in order."""
    return [
        (*case.key(), name)
        for size in sizes
        for case in cases(size, device.type)
        for name in (*rungs_for(module, case.op, size, device), *case.peers)
    ]


def rungs_for(module: Any, op: str, size: str, device: torch.device) -> list[str]:
    """Which rungs a size is for: at "cpu" plain C++ only, since emulation would take minutes there."""
    names = module.rungs(op, device)
    return [name for name in names if name == "cpu"] if size == "cpu" else names


def heading(size: str, device: torch.device) -> str:
    """A line that says what and where is measured."""
    if device.type == "cuda":
        return f"size '{size}' on {torch.cuda.get_device_name(device)}"
    if size == "emulated":
        return (
            "size 'emulated' on the CPU: the kernels' own code, run thread by thread; says nothing about a GPU's times"
        )
    return f"size '{size}' on the CPU, {torch.get_num_threads()} threads"


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
