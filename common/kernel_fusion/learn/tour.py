"""A walk through the four steps: builds them, and shows of each rung what it teaches and how right it is; then GPT-2.

On a GPU each rung is timed beside its fastest peer. Without one, times would be the emulation's: what can be told there
is how the kernels ask memory for their bytes, see `rung_counts`.

The steps' parts run in processes of their own, so that one that crashes is named and the rest goes on.
"""

import argparse
import dataclasses
import functools
import importlib
import os
import platform
import shutil
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kernel_fusion import steps
from kernel_fusion.bench import benchmarks, measuring, rung_counts
from kernel_fusion.console import Tasks, duration, make_console, milliseconds, progress, run_logged, run_shown
from kernel_fusion.report import syllabus
from kernel_fusion.testing.accuracy import as_tuple, max_error, poisoned_allocations

CPU_BUDGET_S = 0.3  # for the repeats of one implementation
ROWS = 38  # of all steps' tables together, so that the tour stays one that is read
DEMONSTRATIONS = {
    "patched_gpt2": "Hugging Face's GPT-2 with our ops under it, beside the unpatched one",
    "train_small_gpt2": "a small GPT-2 trained on this repository's documents",
}
# On two cores.
BUILD_SECONDS = {"step1-simple": 30, "step2-attention": 50, "step3-fused": 105, "step4-integration": 15}
SHOWING_MINUTES, FULL_MINUTES, TRAINING_MINUTES = 2, 6, 0.5
# torch's C++ warns of rungs whose runs differ when it is told to fill memory with NaN, which every check does.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
NEXT = "\nNext: the first lesson, step1-simple/README.md. Its commands need the environment: source .venv/bin/activate"
ON_CPU = """\
off: the greatest difference from float64. sectors: how many pieces of 32 bytes a warp's 32 lanes touch in one request,
loads / stores; 4 bytes a lane side by side make 4, 16 bytes make 16; at 32, no two lanes share one. bytes: all sectors
together, over the bytes that must move at the least; caches are not counted, and inputs are small here, so that some
move many times the least. What is further off than its dtype allows is marked WRONG; bfloat16 may be 1e-2 off.
"""
ON_GPU = """\
off: the greatest difference from float64. Times are this GPU's, caches empty. GB/s: the bytes that must move at the
least, over the time. Below an op's rungs stands the fastest of its peers.
"""


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment_line() -> str:
    """Python, torch, compilers and GPU in one line."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    nvcc = "nvcc" if shutil.which("nvcc") else "no nvcc"
    cxx = os.environ.get("CXX", "c++")
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, {cxx}, {nvcc}, {gpu}, "
        f"{cores()} cores, {platform.system()} {platform.machine()}"
    )


# ---- one step, on a screen ----


class Look(NamedTuple):
    """What the functions below need to look at a step: its module, the rungs' ideas by op and name, and who is told
    how far they are and what a reader must know besides the table."""

    module: types.ModuleType
    ideas: dict[tuple[str, str], str]
    at: Callable[[str], Any]
    say: Callable[[str], Any]


@dataclasses.dataclass
class Row:
    """A rung or a peer on one case, and what was found; None where nothing was."""

    case: measuring.Case
    name: str
    idea: str
    error: float | None = None
    refusal: str = ""  # why the rung did not run
    correct: bool = True
    launched: tuple[int, ...] = ()  # as `rung_counts.take_launched` gives them
    moved: rung_counts.Moved | None = None
    ms: float | None = None


def show_step(step: steps.Step, console: Console) -> int:
    """Prints what the step teaches, and its share of a table of its rungs. Returns how many results were wrong.

    Without a GPU, what the kernels of the rungs in the table ask of memory is counted, which compiles these once more.

    Args:
        step: which must be built.
        console: where to print.
    """
    benchmark, module = steps.load_benchmark(step), importlib.import_module(step.module)
    on_gpu = _has_gpu_kernels(module, benchmark)
    console.print(benchmark.TEACHES, style="italic", markup=False)
    if step == steps.STEPS[0]:
        console.print(ON_GPU if on_gpu else ON_CPU, style="dim", end="", markup=False)
    ideas = {(op, rung.name): rung.idea for op in syllabus.ops(step) for rung in syllabus.rungs(step, op)}
    notes: list[str] = []
    plain = None
    with progress(step.folder) as at:
        look = Look(module, ideas, at, notes.append)
        if on_gpu:
            rows = timed_rows(look, first_cases(step, benchmark, "quick", "cuda"))
        else:
            rows = checked_rows(look, first_cases(step, benchmark, "emulated", "cpu"))
        chosen = on_a_screen(rows, share_of(step, len(rows)))
        if not on_gpu:
            count_rows(step, chosen, look)
            plain = plain_cpp(look, first_cases(step, benchmark, "cpu", "cpu"))
    console.print(table_of(chosen, on_gpu))
    if len(chosen) < len(rows):
        console.print(f"{len(rows) - len(chosen)} more rungs: kernel-fusion rungs", style="dim", markup=False)
    if why_not := refusals(rows):
        console.print(why_not, markup=False)
    wrong = sum(1 for row in rows if not row.correct)
    if plain:
        console.print(plain.words, markup=False)
        wrong += plain.wrong
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    return wrong


def _has_gpu_kernels(module: types.ModuleType, benchmark: types.ModuleType) -> bool:
    if not torch.cuda.is_available():
        return False
    return any(module.rungs(case.op, "cuda") for case in benchmark.cases("quick", "cuda"))


def first_cases(step: steps.Step, benchmark: types.ModuleType, size: str, device: str) -> list[measuring.Case]:
    """The first case of each op at this size, in the order of the lesson."""
    first: dict[str, measuring.Case] = {}
    for case in benchmark.cases(size, device):
        first.setdefault(case.op, case)
    order = [op for op in syllabus.ops(step) if op in first]
    return [first[op] for op in dict.fromkeys([*order, *first])]


def checked_rows(look: Look, cases: list[measuring.Case]) -> list[Row]:
    """Every rung of the cases' ops, run once under emulation and compared with float64."""
    rows = []
    for case in cases:
        with torch.set_grad_enabled(case.direction == "backward"):
            inputs = case.inputs(torch.device("cpu"))
            tolerance = measuring.Tolerance(case, inputs)
        for rung in (name for name in look.module.rungs(case.op, "cpu") if name != "cpu"):
            look.at(f"{case.op} {rung}")
            row = Row(case, rung, look.ideas.get((case.op, rung), ""))
            rung_counts.take_launched(look.module)  # by what made the inputs
            check(row, inputs, tolerance, look.say)
            row.launched = rung_counts.take_launched(look.module)
            rows.append(row)
    return rows


def check(row: Row, inputs: tuple, tolerance: measuring.Tolerance, say: Callable[[str], Any]) -> None:
    """Runs the row's rung once, in memory full of NaN, and notes its error. A rung that refuses the case has none."""
    case = row.case
    with torch.set_grad_enabled(case.direction == "backward"):
        own = measuring.own_copy(inputs)
        try:
            with poisoned_allocations():
                outputs = as_tuple(case.run(*own, rung=row.name))
        except (ValueError, RuntimeError) as refusal:
            if f"rung '{row.name}'" not in str(refusal):
                raise
            why = str(refusal).splitlines()[0].split("; these can:")[0]  # the table shows these
            row.refusal = why.split(f"rung '{row.name}' ")[-1]
            return
    row.error, row.correct = tolerance.check(outputs)
    if not row.correct:
        say(f"{case.title()}: {row.name} is WRONG: {row.error:.3g} off, allowed are {tolerance.text()}")


def refusals(rows: list[Row]) -> str:
    """The rungs that did not run, those of one reason together."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.refusal:
            found.setdefault(row.refusal, []).append(f"{row.case.op} {row.name}")
    told = "; ".join(f"{', '.join(who)} ({why})" for why, who in found.items())
    return f"Not run: {told}" if told else ""


def count_rows(step: steps.Step, rows: list[Row], look: Look) -> None:
    """Adds to each row that ran what its kernels asked of memory; where that cannot be counted, says why not."""
    if why_not := rung_counts.why_not():
        look.say(f"not counted: {why_not}")
        return
    by_rung = {rung_counts.Wanted(row.case.op, row.name): row for row in rows if row.error is not None}
    launched = {address for row in by_rung.values() for address in row.launched}
    look.at("building again, to count")
    sources = rung_counts.launched_kernels(step, launched)
    library = rung_counts.build(step, sources, lambda done: look.at(f"building again, to count, {done}"))
    counted = rung_counts.count(step, library, by_rung, lambda one: look.at(f"counting {one.op} {one.rung}"))
    for one, kernels in counted.items():
        if not isinstance(kernels, str):
            by_rung[one].moved = rung_counts.moved(kernels)


def timed_rows(look: Look, cases: list[measuring.Case]) -> list[Row]:
    """Every rung of the cases' ops on the GPU, checked and timed, and the fastest peer of each op."""
    rows = []
    device = torch.device("cuda")
    ceilings = benchmarks.Ceilings(device)
    for case in cases:
        look.at(case.op)
        measured = measuring.run_case(look.module, case, device, ceilings=ceilings, say=look.say)
        peers = [m for m in measured if m.row["kind"] == "peer" and m.row["correct"]]
        fastest = min(peers, key=lambda m: m.row["ms"], default=None)
        for m in (m for m in measured if m.row["kind"] != "peer" or m is fastest):
            idea = "(peer)" if m is fastest else look.ideas.get((case.op, m.row["impl"]), "")
            rows.append(Row(case, m.row["impl"], idea, m.error, m.row["correct"], ms=m.row["ms"]))
    return rows


class PlainCpp(NamedTuple):
    """The times of plain C++ in words, and how many of its results were wrong."""

    words: str
    wrong: int


def plain_cpp(look: Look, cases: list[measuring.Case]) -> PlainCpp:
    """Times the plain C++ version of each op beside its fastest peer."""
    found, wrong = [], 0
    device = torch.device("cpu")
    ceilings = benchmarks.Ceilings(device)
    for case in cases:
        look.at(f"{case.op}, plain C++")
        measured = measuring.run_case(
            look.module, case, device, rungs=["cpu"], ceilings=ceilings, budget_s=CPU_BUDGET_S, say=look.say
        )
        peers = [m.row["ms"] for m in measured if m.row["kind"] == "peer"]
        for own in (m.row for m in measured if m.row["kind"] != "peer"):
            wrong += not own["correct"]
            beside = f" ({min(peers):.3g})" if peers else ""
            found.append(f"{case.op} {own['ms']:.3g}{beside}")
    return PlainCpp(f"Plain C++ on {cores()} cores, in brackets PyTorch, in ms: {', '.join(found)}", wrong)


def share_of(step: steps.Step, rows: int) -> int:
    """How many of `ROWS` a step with so many gets: all, or an equal share of what shorter tables leave."""
    needed = {other: sum(len(syllabus.rungs(other, op)) for op in syllabus.ops(other)) for other in steps.STEPS}
    needed[step] = rows
    left = ROWS
    for before, other in enumerate(sorted(needed, key=needed.__getitem__)):
        share = min(needed[other], left // (len(needed) - before))
        if other == step:
            return share
        left -= share
    raise ValueError(f"{step.folder} is no step")


def on_a_screen(rows: list[Row], limit: int) -> list[Row]:
    """All rows, if at most `limit`. Else all of the first ops, as long as they fit, and of each other op the last row
    that ran.

    Rows that are wrong are always there.
    """
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.case.op, []).append(row)
    chosen: list[Row] = []
    for number, own in enumerate(by_op.values()):
        after = len(by_op) - number - 1  # of each of these ops one row at the least
        fits = len(chosen) + len(own) + after <= limit
        last = next((row for row in reversed(own) if row.error is not None), own[-1])
        chosen += [row for row in own if fits or row is last or not row.correct]
    return chosen


def table_of(rows: list[Row], on_gpu: bool) -> Table:
    """The rows as a table; an op is named once."""
    table = Table("op", "rung", "what it teaches", box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in ("off", *(("time", "GB/s") if on_gpu else ("sectors", "bytes"))):
        table.add_column(column, justify="right", no_wrap=True)
    before = None
    for row in rows:
        op = row.case.op if row.case.op != before else ""
        cells = [escape(text) for text in (op, row.name, row.idea)]
        table.add_row(*cells, _off_cell(row), *(_time_cells(row) if on_gpu else _moved_cells(row)))
        before = row.case.op
    return table


def _off_cell(row: Row) -> str:
    if row.error is None:
        return "–"
    error = f"{row.error:.1e}" if row.error else "0"
    return error if row.correct else f"[bold red]{error} WRONG[/]"


def _time_cells(row: Row) -> tuple[str, str]:
    return ("–", "–") if row.ms is None else (milliseconds(row.ms), f"{row.case.bytes / row.ms / 1e6:.3g}")


def _moved_cells(row: Row) -> tuple[str, str]:
    if row.moved is None:
        return "–", "–"
    sectors = ("–" if value is None else f"{value:.3g}" for value in (row.moved.load, row.moved.store))
    return " / ".join(sectors), f"{row.moved.bytes / row.case.bytes:.3g}×"


# ---- one step, in full ----


def show_all_cases(step: steps.Step, console: Console) -> int:
    """Prints a table for each of the step's cases, with times and peers. Returns how many results were wrong."""
    benchmark, module = steps.load_benchmark(step), importlib.import_module(step.module)
    console.print(benchmark.TEACHES, style="italic", markup=False)
    places = [(torch.device("cpu"), "cpu"), (torch.device("cpu"), "emulated")]
    if _has_gpu_kernels(module, benchmark):
        places.append((torch.device("cuda"), "quick"))
    wrong = 0
    for device, size in places:
        console.print(f"\n{benchmarks.heading(size, device)}", style="dim", markup=False)
        for case in benchmark.cases(size, device.type):
            wrong += show_case(module, case, size, device, console)
    return wrong


def show_case(module: types.ModuleType, case: measuring.Case, size: str, device: torch.device, console: Console) -> int:
    """Times and checks one case, and prints its table. Returns how many rungs were wrong."""
    measured = measuring.run_case(
        module,
        case,
        device,
        rungs=benchmarks.rungs_for(module, case.op, size, device),
        peers=size != "emulated",
        budget_s=CPU_BUDGET_S,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
    )
    table = Table(title=case.title(), title_justify="left", title_style="bold")
    table.add_column("rung")
    for column in ("off from float64", "off from the rung before", "time", "GB/s"):
        table.add_column(column, justify="right")
    table.add_column("result")
    before = None
    for m in measured:
        is_ours = m.row["kind"] != "peer"
        apart = _difference(m.outputs, before) if is_ours and before is not None else ""
        name = m.row["impl"] if is_ours else f"{m.row['impl']} (peer)"
        verdict = "right" if m.row["correct"] else "[bold red]WRONG[/]"
        table.add_row(name, f"{m.error:.1e}", apart, milliseconds(m.row["ms"]), f"{m.row['gb_s']:.3g}", verdict)
        if is_ours:
            before = m.outputs
    console.print(table)
    return sum(1 for m in measured if m.row["kind"] != "peer" and not m.row["correct"])


def _difference(outputs, others) -> str:
    worst = max(max_error(a.detach(), b.detach().double()) for a, b in zip(outputs, others, strict=True))
    return "0" if worst == 0 else f"{worst:.1e}"


def show_demonstration(name: str, console: Console) -> None:
    """Runs one of the last step's demonstrations; it raises where what it shows does not hold."""
    getattr(steps.load_script(steps.STEPS[-1], "demonstrations"), name)(console)


# ---- all of it ----


def plan(full: bool) -> str:
    """What comes, and how long it takes."""
    building = sum(BUILD_SECONDS.get(step.folder, 0) for step in steps.STEPS if not steps.is_built(step)) / 60
    minutes = building + (FULL_MINUTES if full else SHOWING_MINUTES) + TRAINING_MINUTES
    return (
        "The four steps are built, and shown rung by rung. Then GPT-2 runs on their ops, and a small one is trained.\n"
        f"That takes about {minutes:.0f} minutes on 2 cores. Nothing is downloaded. Interrupted and begun again, "
        "it goes on where it was." + ("" if full else "\nEvery table with times: kernel-fusion tour --full.")
    )


def run(console: Console, *, full: bool = False) -> int:
    """The whole tour. Returns the exit code: 1 where a task failed."""
    tasks = Tasks(console, total=2 * len(steps.STEPS) + len(DEMONSTRATIONS))
    console.print(environment_line(), markup=False, soft_wrap=True)
    console.print(plan(full), markup=False, soft_wrap=True)
    for step in steps.STEPS:
        build_step(step, tasks)
        name = f"{step.folder}: every rung, checked" + (" and timed" if full or torch.cuda.is_available() else "")
        if not_built(step, tasks):
            tasks.skip(name, f"{step.folder} is not built")
            continue
        with tasks.task(name, shows=True):
            run_shown(_part("--step", step.module, *(["--full"] if full else [])), env=QUIET)
    for function, what in DEMONSTRATIONS.items():
        missing = [step.folder for step in steps.STEPS if not_built(step, tasks)]
        if missing:
            tasks.skip(what, f"{', '.join(missing)} not built")
            continue
        with tasks.task(what, shows=True):
            run_shown(_part("--demonstration", function), env=QUIET)
    code = tasks.finish()
    if code == 0:
        console.print(NEXT, markup=False, soft_wrap=True)
    return code


def _build_name(step: steps.Step) -> str:
    return f"build {step.folder}"


def build_step(step: steps.Step, tasks: Tasks) -> None:
    """Builds a step as a task, its output in build/tour/."""
    log = steps.ROOT / "build" / "tour" / f"build-{step.folder}.log"
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    seconds = 0 if steps.is_built(step) else BUILD_SECONDS.get(step.folder, 0)
    with tasks.task(_build_name(step), note=f"about {duration(seconds)}" if seconds else "") as at:
        run_logged(command, log, cwd=step.path, on_line=functools.partial(rung_counts.ninja_progress, at))


def not_built(step: steps.Step, tasks: Tasks) -> bool:
    """True where the step's build failed in this tour: an older library may lie there, but it is not what is shown."""
    return _build_name(step) in tasks.failed or not steps.is_built(step)


def _part(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kernel_fusion.learn.tour", *arguments]


def main() -> int:
    """python -m kernel_fusion.learn.tour: one part of the tour."""
    parser = argparse.ArgumentParser(description="A part of the tour through the four steps.")
    part = parser.add_mutually_exclusive_group(required=True)
    part.add_argument("--step", type=steps.find, help="what is shown of this step, which must be built")
    part.add_argument("--demonstration", choices=DEMONSTRATIONS)
    parser.add_argument("--full", action="store_true", help="with --step: a table for each case")
    options = parser.parse_args()
    console = make_console()
    try:
        if options.demonstration:
            show_demonstration(options.demonstration, console)
            return 0
        wrong = (show_all_cases if options.full else show_step)(options.step, console)
    except KeyboardInterrupt:
        return 130
    if wrong:
        sys.exit(f"tour: {options.step.folder}: {wrong} wrong results, marked above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
