"""Measures rows of a results file again, each case in a process of its own, and compares.

In a benchmark's one long run, what ran before could slow down what comes after: memory, caches, compiled code for other
shapes, the GPU's temperature. Here every case starts from nothing, on the next of the GPUs, and so does each row of
torch.compile. Two results files can be compared as well.

torch.compile chooses among kernels by timing them, and does not choose the same each time. `--best` writes the faster
of both measurements of its rows into the results, so that they show what it can do and not one draw.
"""

import argparse
import concurrent.futures
import functools
import importlib
import multiprocessing
import os
import pathlib
from collections.abc import Iterator
from multiprocessing.context import SpawnContext
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from kernel_fusion import steps
from kernel_fusion.bench import clock, measuring, noise, results_file
from kernel_fusion.console import UserError, milliseconds
from kernel_fusion.report import results

# From so many milliseconds on, medians may differ by this part. Less is too near to the time of a launch to say much.
ALLOWED = ((0.020, 0.05), (0.005, 0.10))
COMPILED = "torch.compile"  # the peer whose code is tuned by timing
AT_A_TIME = 8  # processes a GPU, at most one a core: while one measures, others start


class Pair(NamedTuple):
    """A row and its second measurement, in milliseconds."""

    row: dict
    again: float
    quartiles: tuple[float, float] | None = None  # of the second one

    @property
    def allowed(self) -> float | None:
        """By what part the two may differ; None where they are too short to be compared."""
        return next((part for from_ms, part in ALLOWED if min(self.row["ms"], self.again) >= from_ms), None)

    @property
    def apart(self) -> float:
        """By what part they do, of the shorter one."""
        return max(self.row["ms"], self.again) / min(self.row["ms"], self.again) - 1

    @property
    def differs(self) -> bool:
        """Whether that is more than allowed."""
        return self.allowed is not None and self.apart > self.allowed


def pairs(rows: list[dict], others: list[dict]) -> list[Pair]:
    """The rows that stand in both lists, in the order of the first."""
    again = {results.key(row): row["ms"] for row in others}
    return [Pair(row, again[results.key(row)]) for row in rows if results.key(row) in again]


# ---- one case, in a process of its own ----


def measure_case(step: steps.Step, size: str, index: int, rows: list[dict], gpu: int, lock) -> list[noise.Spread | str]:
    """Times `rows`, implementations of the step's case number `index`; of who refuses it, the reason.

    Whoever holds `lock` has GPU number `gpu` for itself, or the CPU; while it compiles, too, since tuning measures.
    """
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    case = steps.load_benchmark(step).cases(size, device.type)[index]
    if device.type == "cuda":
        importlib.import_module("torch._inductor.compile_fx")  # takes seconds, in which others may measure
    found: list[noise.Spread | str] = []
    with lock, torch.set_grad_enabled(case.direction == "backward"):
        if device.type == "cuda":
            torch.cuda.set_device(device)  # not before: a process that waits leaves the GPU alone
        inputs = case.inputs(device)
        repeats = (10, 100) if device.type == "cuda" else (1, 5)
        for row in rows:
            fn = functools.partial(case.run, rung=row["impl"]) if results.is_ours(row) else case.peers[row["impl"]]
            try:
                found.append(clock.measure(fn, measuring.own_copy(inputs), *repeats).ms)
            except measuring.REFUSALS[row["kind"]] as refusal:
                found.append(measuring.reason(refusal))
    return found


def together(rows: list[dict]) -> list[list[dict]]:
    """`rows` as they are measured, a list for each process: those of a case, and each of torch.compile alone."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        alone = row["impl"] == COMPILED
        groups.setdefault((*results.case_key(row), alone), []).append(row)
    return list(groups.values())


def measure_alone(step: steps.Step, size: str, rows: list[dict]) -> Iterator[tuple[dict, noise.Spread | str]]:
    """Each of `rows`, which `step`'s benchmark measured at `size`, measured again; as they come.

    Raises:
        UserError: the benchmark has no such case any more.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = steps.load_benchmark(step).cases(size, device)
    number = {case.key(): i for i, case in enumerate(cases)}
    for row in rows:
        if results.case_key(row) not in number:
            raise UserError(f"{step.folder}/benchmark.py has no case {row['op']} {results.case_title(row)} any more")
    groups = together(rows)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has touched
    with context.Manager() as manager:
        locks = [manager.Lock() for _ in range(max(1, torch.cuda.device_count()))]
        workers = min(AT_A_TIME * len(locks), os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            found = []
            for i, group in enumerate(groups):
                gpu = i % len(locks)
                work = (step, size, number[results.case_key(group[0])], group, gpu, locks[gpu])
                found.append(pool.submit(_in_a_process_of_its_own, context, *work))
            try:
                for group, future in zip(groups, found, strict=True):
                    yield from zip(group, future.result(), strict=True)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _in_a_process_of_its_own(context: SpawnContext, *arguments) -> list[noise.Spread | str]:
    """`measure_case` in a new process. (A pool of such processes, max_tasks_per_child, needs Python 3.11.)"""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(measure_case, *arguments).result()


# ---- the command ----


def command(options: argparse.Namespace, console: Console) -> int:
    """Runs `kernel-fusion recheck`. Returns the exit code: 1 where a row differs."""
    first = results.read(options.results)
    rows = [
        row
        for row in first.rows
        if row["correct"]
        and (options.op is None or row["op"] in options.op)
        and (row["impl"] in options.impl if options.impl else options.rungs or not results.is_ours(row))
    ]
    if not rows:
        raise UserError(f"{options.results}: no row to compare")
    if options.against:
        if options.best:
            raise UserError("--best keeps what is measured again, and with --against nothing is")
        compared = pairs(rows, results.read(options.against).rows)
    else:
        compared = _measured(first, rows, options.output, console)
    if not compared:
        raise UserError("nothing to compare: no row stands in both")
    if options.best:
        results.write(first._replace(rows=keep_best(first.rows, compared)))
    return show(compared, options.output, console)


def _measured(first: results.Results, rows: list[dict], output: pathlib.Path | None, console: Console) -> list[Pair]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    if here != first.environment["gpu"]:
        raise UserError(f"{first.path} was measured on {first.gpu}; this is {here or 'a CPU'}")
    step = next((one for one in steps.STEPS if first.path.resolve().is_relative_to(one.path)), None)
    if step is None:
        raise UserError(f"{first.path} lies in no step, so there is no benchmark to measure it again")
    compared = []
    for row, again in measure_alone(step, "full", rows):
        what = f"{row['op']} {results.case_title(row)}, {row['impl']}"
        if isinstance(again, str):
            console.print(f"{what}: not run: {again}", markup=False, soft_wrap=True)
            continue
        compared.append(Pair(row, again.median, again[1:]))
        keep(compared, output)  # after each row: whoever ends this has what was measured
        console.print(f"{what}: {milliseconds(row['ms'])}, alone {milliseconds(again.median)}", markup=False)
    return compared


def show(compared: list[Pair], output: pathlib.Path | None, console: Console) -> int:
    """Prints which pairs differ, and how near the others are. Returns 1 where one differs."""
    judged = [pair for pair in compared if pair.allowed is not None]
    differing = sorted((pair for pair in judged if pair.differs), key=lambda pair: -pair.apart)
    if differing:
        table = Table("op", "case", "implementation", title="differ by more than allowed", title_justify="left")
        for column in ("first", "again", "apart", "allowed"):
            table.add_column(column, justify="right")
        for pair in differing:
            numbers = milliseconds(pair.row["ms"]), milliseconds(pair.again), f"{pair.apart:.1%}", f"{pair.allowed:.0%}"
            table.add_row(pair.row["op"], results.case_title(pair.row), pair.row["impl"], *numbers)
        console.print(table)
    for from_ms, part in ALLOWED:
        of_kind = [pair.apart for pair in judged if pair.allowed == part]
        if of_kind:
            found = f"{len(of_kind)} rows, at most {max(of_kind):.1%} apart"
            console.print(f"from {milliseconds(from_ms)}, {part:.0%} allowed: {found}")
    console.print(f"{len(differing)} of {len(judged)} rows differ; {len(compared) - len(judged)} are too short to say")
    keep(compared, output)
    return 1 if differing else 0


def keep_best(rows: list[dict], compared: list[Pair]) -> list[dict]:
    """`rows`, those of torch.compile that were faster when measured again with their second time."""
    faster = {
        results.key(pair.row): (pair.again, *pair.quartiles)
        for pair in compared
        if pair.row["impl"] == COMPILED and pair.quartiles and pair.again < pair.row["ms"]
    }
    return [_with_time(row, faster[results.key(row)]) if results.key(row) in faster else row for row in rows]


def _with_time(row: dict, times: tuple[float, ...]) -> dict:
    ms, low, high = map(results.rounded, times)
    row = {**row, "ms": ms, "ms_quartiles": [low, high], "again": results_file.provenance()}
    return row | {rate: results.derived(row)[rate] for rate in ("gb_s", "tflop_s", "percent_of_ceiling")}


def keep(compared: list[Pair], output: pathlib.Path | None) -> None:
    """Writes both measurements of each row into `output`, if that is asked."""
    if output:
        kept = ("op", "pass", "impl", "kind", "dtype", "shape", "ms")
        listed = [{**{name: pair.row[name] for name in kept}, "again_ms": pair.again} for pair in compared]
        results.replace(output, results.as_text({"rows": listed}))
