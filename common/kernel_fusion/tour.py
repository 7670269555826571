"""A walk through the four stages: builds them, and shows of each rung how right and how fast it is; then GPT-2.

The stages' parts run in processes of their own, so that one that crashes is named and the rest goes on.
"""

import argparse
import importlib
import importlib.util
import os
import platform
import shutil
import sys
import types

import torch
from rich.console import Console
from rich.table import Table

from kernel_fusion import benchmarks, stages
from kernel_fusion.accuracy import max_error
from kernel_fusion.console import Steps, make_console, milliseconds, run_logged, run_shown

CPU_BUDGET_S = 0.3  # for the repeats of one implementation
TRAINING_S = 120
DEMONSTRATIONS = {
    "patched_gpt2": "Hugging Face's GPT-2 with our ops under it, beside the unpatched one",
    "train_small_gpt2": "a small GPT-2 trained on this repository's documents",
}


def environment_line() -> str:
    """Python, torch, compilers and GPU in one line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    nvcc = "nvcc" if shutil.which("nvcc") else "no nvcc"
    cxx = os.environ.get("CXX", "c++")
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, {cxx}, {nvcc}, {gpu}, "
        f"{cores} cores, {platform.system()} {platform.machine()}"
    )


# ---- one stage ----


def load_benchmark(stage: stages.Stage) -> types.ModuleType:
    """The stage's benchmark.py as a module: its `TEACHES` and `cases`."""
    stages.on_path()
    spec = importlib.util.spec_from_file_location(f"{stage.module}_benchmark", stage.path / "benchmark.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def show_stage(stage: stages.Stage, console: Console) -> int:
    """Prints what the stage teaches, and a table for each of its cases. Returns how many results were wrong."""
    benchmark = load_benchmark(stage)
    module = importlib.import_module(stage.module)
    console.print(benchmark.TEACHES, style="italic", markup=False)
    wrong = 0
    for device, size in _places(module, benchmark):
        console.print(f"\n{benchmarks.heading(size, device)}", style="dim", markup=False)
        for case in benchmark.cases(size, device.type):
            wrong += show_case(module, case, size, device, console)
    return wrong


def _places(module: types.ModuleType, benchmark: types.ModuleType) -> list[tuple[torch.device, str]]:
    places = [(torch.device("cpu"), "cpu"), (torch.device("cpu"), "emulated")]
    if torch.cuda.is_available() and any(module.rungs(case.op, "cuda") for case in benchmark.cases("quick", "cuda")):
        places.append((torch.device("cuda"), "quick"))
    return places


def show_case(
    module: types.ModuleType, case: benchmarks.Case, size: str, device: torch.device, console: Console
) -> int:
    """Times and checks one case, and prints its table. Returns how many rungs were wrong."""
    measured = benchmarks.run_case(
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
        is_rung = m.row["kind"] == "rung"
        apart = _difference(m.outputs, before) if is_rung and before is not None else ""
        name = m.row["impl"] if is_rung else f"{m.row['impl']} (peer)"
        verdict = "right" if m.row["correct"] else "[bold red]WRONG[/]"
        table.add_row(name, f"{m.error:.1e}", apart, milliseconds(m.row["ms"]), f"{m.row['gb_s']:.3g}", verdict)
        if is_rung:
            before = m.outputs
    console.print(table)
    return sum(1 for m in measured if m.row["kind"] == "rung" and not m.row["correct"])


def _difference(outputs, others) -> str:
    worst = max(max_error(a.detach(), b.detach().double()) for a, b in zip(outputs, others, strict=True))
    return "0" if worst == 0 else f"{worst:.1e}"


def show_demonstration(name: str, console: Console, seconds: float) -> None:
    """Runs one of the last stage's demonstrations; it raises where what it shows does not hold."""
    stages.on_path()
    steps = importlib.import_module("tour_steps")
    if name == "train_small_gpt2":
        steps.train_small_gpt2(console, seconds=seconds)
    else:
        getattr(steps, name)(console)


# ---- all of it ----


def run(console: Console, *, training_seconds: float = TRAINING_S) -> int:
    """The whole tour. Returns the exit code: 1 where a step failed."""
    steps = Steps(console, total=2 * len(stages.STAGES) + len(DEMONSTRATIONS))
    console.print(environment_line(), markup=False, soft_wrap=True)
    for stage in stages.STAGES:
        build_stage(stage, steps)
    for stage in stages.STAGES:
        name = f"{stage.folder}: every rung, checked and timed"
        if not_built(stage, steps):
            steps.skip(name, f"{stage.folder} is not built")
            continue
        with steps.step(name, shows=True):
            run_shown(_part("--stage", stage.module))
    for function, what in DEMONSTRATIONS.items():
        missing = [stage.folder for stage in stages.STAGES if not_built(stage, steps)]
        if missing:
            steps.skip(what, f"{', '.join(missing)} not built")
            continue
        with steps.step(what, shows=True):
            run_shown(_part("--demonstration", function, "--seconds", str(training_seconds)))
    return steps.finish()


def _build_name(stage: stages.Stage) -> str:
    return f"build {stage.folder}"


def build_stage(stage: stages.Stage, steps: Steps) -> None:
    """Builds a stage as a step, its output in build/tour/."""
    log = stages.ROOT / "build" / "tour" / f"build-{stage.folder}.log"
    with steps.step(_build_name(stage)):
        run_logged([sys.executable, "setup.py", "build_ext", "--inplace"], log, cwd=stage.path)


def not_built(stage: stages.Stage, steps: Steps) -> bool:
    """True where the stage's build failed in this tour: an older library may lie there, but it is not what is shown."""
    return _build_name(stage) in steps.failed or not stages.is_built(stage)


def _part(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kernel_fusion.tour", *arguments]


def main() -> int:
    """python -m kernel_fusion.tour: all of the tour, or one part of it."""
    parser = argparse.ArgumentParser(description="A walk through the four stages.")
    parser.add_argument("--stage", help="only what is shown of this stage, which must be built")
    parser.add_argument("--demonstration", choices=DEMONSTRATIONS, help="only this")
    parser.add_argument("--seconds", type=float, default=TRAINING_S, help="the longest that training may take")
    options = parser.parse_args()
    console = make_console()
    if options.stage:
        wrong = show_stage(stages.find(options.stage), console)
        if wrong:
            sys.exit(f"tour: {options.stage}: {wrong} wrong results, marked above")
        return 0
    if options.demonstration:
        show_demonstration(options.demonstration, console, options.seconds)
        return 0
    return run(console, training_seconds=options.seconds)


if __name__ == "__main__":
    sys.exit(main())
