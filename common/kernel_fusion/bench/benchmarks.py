"""How fast a rung is, beside its peers and beside what the machine can do at all.

A step's `benchmark.py` lists its cases and ends with `benchmarks.main("<step>", cases)`. Times are medians, taken as
`clock` says. Ceilings are measured besides, as `ceilings` says: how fast memory is at the very number of bytes
that a case moves, and the rate of a large matrix product.
"""

import argparse
import collections
import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table

from kernel_fusion import steps
from kernel_fusion.bench import results_file
from kernel_fusion.bench.ceilings import Ceilings
from kernel_fusion.bench.clock import benchmark_kernel, device_of
from kernel_fusion.bench.journal import Journal
from kernel_fusion.bench.measuring import Case, budget, compiled, installed, run_case
from kernel_fusion.cli import bench_parser
from kernel_fusion.console import UserError, make_console, milliseconds, progress
from kernel_fusion.report import results

__all__ = ["Case", "Ceilings", "benchmark_kernel", "compiled", "device_of", "installed", "main", "run_case"]

COPY_BYTES = {"cuda": [1 << n for n in (22, 24, 26, 28, 30, 33)], "cpu": [1 << n for n in (16, 20, 24, 28)]}


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


def main(step: str, cases: Callable[[str, str], list[Case]], arguments: list[str] | None = None) -> NoReturn:
    """The command line of a step's benchmark.py: times, prints tables, and on a GPU writes results/<gpu>.json.

    Results are written by a complete run on a GPU; by a run of some ops or rungs with --merge; or where --output says.
    Until then, each finished case is kept beside them, for --resume. Exits with 1 where a rung is wrong.
    """
    parser = bench_parser()
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
        path = results_file.path_of(where, device)
    try:
        budget()  # refuses before anything is measured
        if options.merge:
            if path is None:
                parser.error("--merge on a CPU needs --output")
            results_file.check_mergeable(path, device)
        if options.resume and path is None:
            parser.error("--resume goes with a run that writes results: see --output")
        journal = Journal(path, results_file.environment(device), resume=options.resume)
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
            dropped = results_file.merge(path, rows, ceilings, device, known)
            for (op, name), count in collections.Counter((row["op"], row["impl"]) for row in dropped).items():
                told = f"rows dropped, since they cannot be measured any more: {count} of {op}, {name}"
                console.print(told, markup=False, soft_wrap=True)
        elif path:
            results_file.write(path, rows, ceilings, device)
        if path:
            journal.close()
            console.print(f"written: {path}", soft_wrap=True)
    except UserError as error:
        sys.exit(f"benchmark: {error}")
    wrong = [row for row in rows if results.is_ours(row) and not row["correct"]]
    sys.exit(1 if wrong else 0)


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
            for moved in COPY_BYTES[device.type]:
                if not on_gpu or moved < torch.cuda.mem_get_info(device)[0] // 2:
                    ceilings.memory(moved, moved // 2)
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
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
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
