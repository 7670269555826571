"""A walk through the four steps: builds each and shows at once what its rungs teach and how right they are; a fault
that the emulation finds; then GPT-2. What an interrupted tour was at is in build/tour/, and the next one begins there.

On a GPU each rung is timed beside its fastest peer. Without one, times would be the emulation's: what can be told there
is how the kernels ask memory for their bytes, see `rung_counts`.

The steps' parts run in processes of their own, so that one that crashes is named and the rest goes on.
"""

import argparse
import dataclasses
import functools
import importlib
import itertools
import os
import pathlib
import platform
import shutil
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from emulator.ninja_file import is_clang
from kernel_fusion import steps
from kernel_fusion.bench import benchmarks, measuring, rung_counts
from kernel_fusion.console import Refused, Tasks, duration, make_console, milliseconds, progress, run_logged, run_shown
from kernel_fusion.learn import pictures, planted
from kernel_fusion.report import results, syllabus
from kernel_fusion.testing.accuracy import as_tuple, max_error, poisoned_allocations

CPU_BUDGET_S = 0.3  # for the repeats of one implementation
ROWS = 10  # of a step's table, so that the tour stays one that is read
STATE = steps.ROOT / "build" / "tour"
FAULT = {"race": "a fault that the emulation finds"}
DEMONSTRATIONS = {
    "patched_gpt2": "Hugging Face's GPT-2 with our ops under it, beside the unpatched one",
    "train_small_gpt2": "a small GPT-2 trained on this repository's documents",
}
# On two cores.
BUILD_SECONDS = {"step1-simple": 30, "step2-attention": 60, "step3-fused": 80, "step4-integration": 35}
SHOWING_MINUTES, FULL_MINUTES, TRAINING_MINUTES = 2, 6, 0.5
# torch's C++ warns of rungs whose runs differ when it is told to fill memory with NaN, which every check does.
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
NEXT = """
Next: source .venv/bin/activate
The first puzzle, if you have done none: kernel-fusion learn next. Or the first lesson: step1-simple/README.md"""
ON_CPU = """\
off: the greatest difference from float64. allowed: twice PyTorch's own in the same dtype, or where there is none to
compare with, what rounding takes of the greatest value: a hundredth in bfloat16. An op without a dtype is in float32.
sectors: how many pieces of 32 bytes a warp's 32 lanes touch in one request, loads / stores; 4 bytes a lane side by side
make 4, 16 bytes make 16; at 32, no two lanes share one. bytes: all sectors together, over the bytes that must move at
the least; caches are not counted, and inputs are small here, so that some move many times the least. Of a ladder that
does not fit the last rung of the first reading is shown.
"""
LEGEND = "off: from float64; sectors: of a request, loads / stores; bytes: over the least; no dtype named: float32"
ON_GPU = """\
off: the greatest difference from float64. allowed: twice PyTorch's own in the same dtype. An op without a dtype is in
float32. Times are this GPU's, caches empty. GB/s: the bytes that must move at the least, over the time. Below an op's
rungs stands the fastest of its peers.
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
    """What the functions below need to look at a step."""

    module: types.ModuleType
    ideas: dict[tuple[str, str], str]  # by op and rung
    first_reading: set[tuple[str, str]]  # likewise
    at: Callable[[str], Any]  # is told how far they are
    say: Callable[[str], Any]  # is told what a reader must know besides the table


@dataclasses.dataclass
class Row:
    """A rung or a peer on one case, and what was found; None where nothing was."""

    case: measuring.Case
    name: str
    idea: str
    is_first_reading: bool = True
    error: float | None = None
    allowed: float = 0.0  # of the output that has this error
    refusal: str = ""  # why the rung did not run
    correct: bool = True
    launched: tuple[int, ...] = ()  # as `rung_counts.take_launched` gives them
    moved: rung_counts.Moved | None = None
    ms: float | None = None


def show_step(step: steps.Step, console: Console) -> int:
    """Prints what the step teaches, and a table of its rungs on a screen. Returns how many results were wrong.

    It must be built. Without a GPU, what the table's kernels ask of memory is counted, which compiles them once more.
    """
    benchmark, module = steps.load_benchmark(step), importlib.import_module(step.module)
    on_gpu = _has_gpu_kernels(module, benchmark)
    console.print(benchmark.TEACHES, style="italic", markup=False)
    if step == steps.STEPS[0]:
        console.print(ON_GPU if on_gpu else ON_CPU, style="dim", end="", markup=False)
    elif not on_gpu:
        console.print(LEGEND, style="dim", markup=False, soft_wrap=True)
    files = {op: syllabus.rungs(step, op) for op in syllabus.ops(step)}
    ideas = {(op, rung.name): rung.idea for op, own in files.items() for rung in own}
    first_reading = {(op, name) for op, own in files.items() for name in syllabus.first_reading(own)}
    notes: list[str] = []
    plain = None
    with progress(step.folder) as at:
        look = Look(module, ideas, first_reading, at, notes.append)
        if on_gpu:
            rows = timed_rows(look, first_cases(step, benchmark, "quick", "cuda"))
        else:
            rows = checked_rows(look, first_cases(step, benchmark, "emulated", "cpu"))
        chosen = on_a_screen(rows, ROWS)
        if not on_gpu:
            count_rows(step, chosen, look)
            ops = {row.case.op for row in chosen}
            plain = plain_cpp(look, [case for case in first_cases(step, benchmark, "cpu", "cpu") if case.op in ops])
    console.print(table_of(chosen, on_gpu))
    if len(chosen) < len(rows):
        console.print(f"{len(rows) - len(chosen)} more rungs: kernel-fusion rungs", style="dim", markup=False)
    if step == steps.STEPS[0]:
        console.print(picture(chosen), markup=False, end="")
    if why_not := refusals(rows):
        console.print(why_not, markup=False)
    wrong = sum(1 for row in rows if not row.correct)
    if plain:
        console.print(plain[0], markup=False, soft_wrap=True)
        wrong += plain[1]
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
            row = Row(case, rung, look.ideas.get((case.op, rung), ""), (case.op, rung) in look.first_reading)
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
    row.error, row.allowed, row.correct = tolerance.check_of(row.name, outputs, own)
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
            is_first = m is fastest or (case.op, m.row["impl"]) in look.first_reading
            rows.append(
                Row(case, m.row["impl"], idea, is_first, m.error, m.allowed, correct=m.row["correct"], ms=m.row["ms"])
            )
    return rows


def plain_cpp(look: Look, cases: list[measuring.Case]) -> tuple[str, int]:
    """Times the plain C++ version of each op beside its fastest peer. Returns these in words, and how many results were
    wrong.
    """
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
    few = "a few runs each, so a third more or less is noise"
    return f"Plain C++ on {cores()} cores, in brackets PyTorch, in ms, {few}: {', '.join(found)}", wrong


def on_a_screen(rows: list[Row], limit: int) -> list[Row]:
    """All rows, if at most `limit`. Else the ladder, as far as the first reading goes, of the first op of which that
    takes no more than half the screen, or leaves a row for each other op; of the other ops the last row that ran, of
    the first reading if one of it did; and as many more as fit.

    Rows that are wrong are always there.
    """
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.case.op, []).append(row)
    long = max((limit + 1) // 2, limit - len(by_op) + 1)
    ladders = ([row for row in own if row.is_first_reading] or own for own in by_op.values())
    ladder: list[Row] = next((own for own in ladders if len(own) <= long), [])
    lasts = [
        max(own, key=lambda row: (row.error is not None, row.is_first_reading, own.index(row)))
        for own in by_op.values()
    ]
    chosen: set[int] = set()
    for more in (ladder, *([last] for last in lasts), *by_op.values()):
        if len(together := chosen | {id(row) for row in more}) <= limit:
            chosen = together
    return [row for row in rows if id(row) in chosen or not row.correct]


def picture(rows: list[Row]) -> str:
    """What sets the rungs of the first ladder among `rows` apart: their loads, or on a GPU their times."""
    op = next((one.case.op for one, other in itertools.pairwise(rows) if one.case.op == other.case.op), "")
    ladder = [row for row in rows if row.case.op == op]
    if loads := {row.name: (round(row.moved.load), row.moved.used) for row in ladder if row.moved and row.moved.load}:
        title = f"What a warp of {op} loads in one request, a cell for each sector, full as far as its bytes are used:"
        return f"{title}\n{pictures.cells(loads)}"
    times = {row.name: row.ms for row in ladder if row.ms}
    return f"The time of {op}:\n{pictures.bars(times)}" if times else ""


def table_of(rows: list[Row], on_gpu: bool) -> Table:
    """The rows as a table; an op is named once, with its dtype where that is not float32."""
    table = Table("op", "rung", "what it teaches", box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in ("off", "allowed", *(("time", "GB/s") if on_gpu else ("sectors", "bytes"))):
        table.add_column(column, justify="right", no_wrap=True)
    before = None
    for row in rows:
        dtype = "" if row.case.dtype == torch.float32 else f" {measuring.dtype_name(row.case.dtype)}"
        op = f"{row.case.op}{dtype}" if row.case.op != before else ""
        cells = [escape(text) for text in (op, row.name, row.idea)]
        table.add_row(*cells, *_off_cells(row), *_cells(row, on_gpu))
        before = row.case.op
    return table


def _off_cells(row: Row) -> tuple[str, str]:
    """How far off a row is, and how far it may be."""
    if row.error is None:
        return "–", "–"
    error, allowed = (f"{value:.1e}" if value else "0" for value in (row.error, row.allowed))
    return error if row.correct else f"[bold red]{error} WRONG[/]", allowed


def _cells(row: Row, on_gpu: bool) -> tuple[str, str]:
    """Time and rate, or what was counted."""
    if on_gpu and row.ms is not None:
        return milliseconds(row.ms), f"{row.case.bytes / row.ms / 1e6:.3g}"
    if on_gpu or row.moved is None:
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


# ---- all of it ----


def stops() -> list[str]:
    """The parts of the tour, by name. A step's is to build it and to show it."""
    first, *others = [step.folder for step in steps.STEPS]
    return [first, *FAULT, *others, *DEMONSTRATIONS]


def stops_ahead(start: steps.Step | None, state: pathlib.Path) -> list[str]:
    """Those from `start` on; by default from where the last tour was interrupted, which is in `state`."""
    found = stops()
    at = start.folder if start else state.read_text(encoding="utf-8") if state.exists() else ""
    return found[found.index(at) :] if at in found else found


def plan(full: bool, ahead: list[str]) -> str:
    """What comes, and how long it takes."""
    unbuilt = [step.folder for step in steps.STEPS if step.folder in ahead and not steps.is_built(step)]
    shown = (FULL_MINUTES if full else SHOWING_MINUTES) + TRAINING_MINUTES
    building = sum(BUILD_SECONDS.get(folder, 0) for folder in unbuilt) / 60
    minutes = max(1, round(building + shown * len(ahead) / len(stops())))
    text = "Each step is built, and shown rung by rung. Then GPT-2 runs on their ops, and a small one is trained.\n"
    if len(ahead) < len(stops()):
        text = f"It goes on at {ahead[0]}. From the start: kernel-fusion tour --from {steps.STEPS[0].folder}\n"
    return (
        f"{text}That takes about {minutes} minute{'s' if minutes > 1 else ''} on 2 cores. Nothing is downloaded. "
        "Interrupted and begun again, it goes on where it was."
        + ("" if full else "\nEvery table with times: kernel-fusion tour --full.")
    )


def command(options: argparse.Namespace, console: Console) -> int:
    """The whole tour, or what is left of it. Returns the exit code: 1 where a task failed."""
    state = STATE / ("next-full" if options.full else "next")
    ahead = stops_ahead(options.start, state)
    tasks = Tasks(console, total=len(steps.STEPS) + len(stops()))
    tasks.number = tasks.total - len(ahead) - sum(step.folder in ahead for step in steps.STEPS)
    console.print(environment_line(), markup=False, soft_wrap=True)
    console.print(plan(options.full, ahead), markup=False, soft_wrap=True)
    for stop in ahead:
        if not tasks.failed:  # else the next tour begins at what failed
            results.replace(state, stop)
        try:
            visit(stop, options.full, tasks)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"make tour goes on at {state.read_text(encoding='utf-8')}") from None
    code = tasks.finish()
    if code == 0:
        state.unlink()
        console.print(NEXT, markup=False, soft_wrap=True)
    return code


def visit(stop: str, full: bool, tasks: Tasks) -> None:
    """One part of the tour."""
    if stop in FAULT:
        with tasks.task(FAULT[stop], shows=True):
            if is_clang(cxx := os.environ.get("CXX", "c++")):
                raise Refused(f"the race detector needs g++, and {cxx} is clang")
            run_shown(_part("--demonstration", stop))
    elif stop in DEMONSTRATIONS:
        missing = [step.folder for step in steps.STEPS if not_built(step, tasks)]
        if missing:
            tasks.skip(DEMONSTRATIONS[stop], f"{', '.join(missing)} not built")
            return
        with tasks.task(DEMONSTRATIONS[stop], shows=True):
            run_shown(_part("--demonstration", stop), env=QUIET)
    else:
        step = steps.find(stop)
        build_step(step, tasks)
        name = f"{step.folder}: every rung, checked" + (" and timed" if full or torch.cuda.is_available() else "")
        if not_built(step, tasks):
            tasks.skip(name, f"{step.folder} is not built")
            return
        with tasks.task(name, shows=True):
            run_shown(_part("--step", step.module, *(["--full"] if full else [])), env=QUIET)


def _build_name(step: steps.Step) -> str:
    return f"build {step.folder}"


def build_step(step: steps.Step, tasks: Tasks) -> None:
    """Builds a step as a task, its output in build/tour/."""
    log = STATE / f"build-{step.folder}.log"
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
    part.add_argument("--demonstration", choices=[*FAULT, *DEMONSTRATIONS])
    parser.add_argument("--full", action="store_true", help="with --step: a table for each case")
    options = parser.parse_args()
    console = make_console()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # by way of the ends of `with`, which erase what they showed
    try:
        if options.demonstration:
            # It raises where what it shows does not hold.
            in_fault = options.demonstration in FAULT
            where = planted if in_fault else steps.load_script(steps.STEPS[-1], "demonstrations")
            getattr(where, options.demonstration)(console)
            return 0
        wrong = (show_all_cases if options.full else show_step)(options.step, console)
    except KeyboardInterrupt:
        return 130
    if wrong:
        sys.exit(f"tour: {options.step.folder}: {wrong} wrong results, marked above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
