"""Everything that only a GPU can tell, in tasks that can be resumed: build, tests, memory and race checks, benchmarks.

Logs and the state lie in build/gpu-check/. A tool that is missing or refuses the machine is reported as not run.
"""

import argparse
import datetime
import functools
import hashlib
import importlib
import json
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from rich.console import Console

from kernel_fusion import steps
from kernel_fusion.bench import measuring
from kernel_fusion.console import CommandFailed, Refused, Tasks, UserError, duration, last_lines, run_logged
from kernel_fusion.learn import tour
from kernel_fusion.report import results
from kernel_fusion.testing.accuracy import as_tuple

ENVIRONMENT = {"KF_CUDA": "1", "KF_TEST_DEVICES": "cuda"}
SOURCES = {".py", ".cu", ".cpp", ".h", ".toml", ".txt"}
# What compute-sanitizer prints where it cannot work on a machine, as against finding an error.
REFUSALS = re.compile(
    r"Device not supported|is not supported on this|Insufficient permissions|Unable to find injection"
)
SUMMARIES = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
}
EXERCISED = re.compile(r"^exercised (\d+) rungs", re.MULTILINE)


class Task(NamedTuple):
    """A task: its name, the steps whose sources it depends on, and what it does, given a log."""

    name: str
    depends: tuple[steps.Step, ...]
    run: Callable[[pathlib.Path], None]


def folder() -> pathlib.Path:
    """Where logs and the state are kept."""
    return steps.ROOT / "build" / "gpu-check"


# ---- the tasks ----


def all_tasks() -> list[Task]:
    """The tasks in order. A step builds on the earlier ones, so it depends on their sources too."""

    def for_each(name: str, run: Callable) -> list[Task]:
        return [
            Task(f"{name}-{step.folder}", steps.STEPS[: number + 1], functools.partial(run, step))
            for number, step in enumerate(steps.STEPS)
        ]

    tasks = [
        *for_each("build", _build),
        Task("test-common", (), functools.partial(_pytest, ["common", "emulator"])),
        *for_each("test", _test),
    ]
    for tool in SUMMARIES:
        tasks += for_each(tool, functools.partial(_sanitize, tool))
    gpt2 = functools.partial(_benchmark, steps.STEPS[-1], script="benchmark_gpt2.py")
    return [*tasks, *for_each("bench", _benchmark), Task("bench-gpt2", steps.STEPS, gpt2)]


def _build(step: steps.Step, log: pathlib.Path) -> None:
    run_logged([sys.executable, "setup.py", "build_ext", "--inplace"], log, cwd=step.path, env=ENVIRONMENT)


def _pytest(folders: list[str], log: pathlib.Path) -> None:
    run_logged([sys.executable, "-m", "pytest", "-q", *folders], log, cwd=steps.ROOT, env=ENVIRONMENT)


def _test(step: steps.Step, log: pathlib.Path) -> None:
    _pytest([step.folder], log)
    if not re.search(r"\b[1-9]\d* passed", last_lines(log, 3)):
        raise AssertionError(f"no test of {step.folder} ran on the GPU; see {log}")


def _sanitize(tool: str, step: steps.Step, log: pathlib.Path) -> None:
    """Runs every rung on small shapes under compute-sanitizer.

    Raises:
        Refused: compute-sanitizer is missing, or does not work on this machine.
        CommandFailed, AssertionError: it found something, or the rungs did not run.
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )
    if sanitizer is None:
        raise Refused("compute-sanitizer is not installed")
    options = ["--tool", tool, "--error-exitcode", "99", "--target-processes", "all"]
    if tool == "memcheck":  # torch probes the driver with calls that may fail; our launchers check their own
        options += ["--report-api-errors", "no"]
    exercise = [sys.executable, "-m", "kernel_fusion.bench.gpu_check", step.module]
    # Without torch's cache each tensor is an allocation of its own, and what lies behind it is found.
    environment = {**ENVIRONMENT, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failure = None
    try:
        run_logged([sanitizer, *options, *exercise], log, cwd=steps.ROOT, env=environment)
    except CommandFailed as error:
        failure = error
    judge_sanitizer(tool, log, failure)


def judge_sanitizer(tool: str, log: pathlib.Path, failure: CommandFailed | None) -> None:
    """Decides from its log whether a run of compute-sanitizer passed; returns where it did.

    Raises:
        Refused: the tool does not work on this machine.
        CommandFailed: `failure`, for any other reason.
        AssertionError: it found something, or says nothing about having looked.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    refusal = next((line for line in text.splitlines() if line.startswith("=====") and REFUSALS.search(line)), None)
    if refusal:
        raise Refused(f"compute-sanitizer: {refusal.strip('= ')}")
    if failure:
        raise failure
    summary, exercised = SUMMARIES[tool].search(text), EXERCISED.search(text)
    if not summary or not exercised or exercised.group(1) == "0":
        raise AssertionError(f"{tool} gave no summary, or no rung ran under it; see {log}")
    if summary.group(1) != "0":
        raise AssertionError(f"{tool}: {summary.group(0)}; see {log}")


def _benchmark(step: steps.Step, log: pathlib.Path, script: str = "benchmark.py") -> None:
    run_logged([sys.executable, script, "--device", "cuda"], log, cwd=step.path, env=ENVIRONMENT)


# ---- what runs under compute-sanitizer ----


def exercise(step: steps.Step) -> int:
    """Runs every rung of every op of `step` twice on small shapes on the GPU. Returns how many (case, rung) pairs ran.

    References are computed on the CPU, so that the sanitizer sees our kernels and little else.

    Raises:
        AssertionError: a result is wrong.
    """
    benchmark = steps.load_benchmark(step)
    module = importlib.import_module(step.module)
    device = torch.device("cuda")
    ran = 0
    for case in benchmark.cases("emulated", "cuda"):
        inputs = case.inputs(device)
        on_cpu = tuple(v.cpu() if isinstance(v, torch.Tensor) else v for v in inputs)
        tolerance = measuring.Tolerance(case, on_cpu)
        for rung in module.rungs(case.op, device):
            own = measuring.own_copy(inputs)
            try:
                outputs = [as_tuple(case.run(*own, rung=rung)) for _ in range(2)]
            except ValueError as refusal:
                if f"rung '{rung}'" not in str(refusal):
                    raise
                print(f"{case.title()}: {refusal}")
                continue
            torch.cuda.synchronize()
            for output in outputs:
                error, _, correct = tolerance.check_of(rung, tuple(t.cpu() for t in output), on_cpu)
                if not correct:
                    raise AssertionError(f"{case.title()}, {rung}: {error:.3g} off, allowed are {tolerance.text()}")
            ran += 1
    return ran


# ---- what was done already ----


def sources_key(task: Task) -> str:
    """A digest of what the task's outcome depends on: sources, GPU, torch."""
    digest = hashlib.sha256()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    digest.update(f"{task.name} {gpu} {torch.__version__} {sys.version}".encode())
    folders = [steps.ROOT / "common", steps.ROOT / "emulator", *(step.path for step in task.depends)]
    for path in sorted(_sources(folders)):
        digest.update(str(path.relative_to(steps.ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(folders: list[pathlib.Path]) -> Iterator[pathlib.Path]:
    for start in folders:
        for path in start.rglob("*"):
            parts = path.relative_to(start).parts
            if path.suffix in SOURCES and path.is_file() and not {"build", "__pycache__"} & set(parts):
                yield path


def _read_state() -> dict:
    path = folder() / "state.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _passed_before(task: Task) -> dict | None:
    entry = _read_state().get(task.name)
    if not entry or entry["outcome"] != "ok" or entry["key"] != sources_key(task):
        return None
    if task.name.startswith("build-") and not steps.is_built(task.depends[-1]):
        return None
    return entry


# ---- the command ----


def chosen(tasks: list[Task], only: list[str]) -> list[Task]:
    """The tasks whose names start with one of `only`; all where it is empty.

    Raises:
        UserError: one of `only` fits no task.
    """
    for prefix in only:
        if not any(task.name.startswith(prefix) for task in tasks):
            raise UserError(f"--only {prefix}: no task starts so; the tasks are {', '.join(s.name for s in tasks)}")
    return [task for task in tasks if not only or any(task.name.startswith(prefix) for prefix in only)]


def run(tasks: list[Task], console: Console, *, fresh: bool = False) -> int:
    """Runs the tasks, except those that passed before and those whose build failed. Returns the exit code."""
    console.print(tour.environment_line(), markup=False, soft_wrap=True)
    folder().mkdir(parents=True, exist_ok=True)
    progress = Tasks(console, total=len(tasks))
    for task in tasks:
        before = None if fresh else _passed_before(task)
        broken = [name for name in progress.failed if name in {f"build-{step.folder}" for step in task.depends}]
        if before:
            progress.note(task.name, f"ok before, {duration(before['seconds'])}, {before['date']}")
        elif broken:
            progress.skip(task.name, f"{broken[0]} failed")
        else:
            _run_one(task, progress)
    console.print(f"logs: {folder()}", markup=False, soft_wrap=True)
    return progress.finish()


def _run_one(task: Task, progress: Tasks) -> None:
    key, began = sources_key(task), time.monotonic()
    log = folder() / f"{task.name}.log"
    with progress.task(task.name):
        task.run(log)
    refused = any(line.startswith(f"{task.name}: ") for line in progress.not_run)
    entry = {
        "outcome": "failed" if task.name in progress.failed else "not run" if refused else "ok",
        "key": key,
        "seconds": round(time.monotonic() - began, 1),
        "log": str(log.relative_to(steps.ROOT)),
        "date": datetime.datetime.now().isoformat(timespec="minutes"),
    }
    results.replace(folder() / "state.json", json.dumps({**_read_state(), task.name: entry}, indent=1))


def show_list(tasks: list[Task]) -> int:
    """Prints the tasks and how each ended."""
    state = _read_state()
    for task in tasks:
        entry = state.get(task.name)
        if entry is None:
            print(f"{task.name:32} never run")
            continue
        stale = "" if entry["key"] == sources_key(task) else ", with other sources"
        when = f"{duration(entry['seconds'])}, {entry['date']}{stale}"
        print(f"{task.name:32} {entry['outcome']}, {when}, {entry['log']}")
    return 0


def command(options: argparse.Namespace, console: Console) -> int:
    tasks = chosen(all_tasks(), options.only)
    if options.list:
        return show_list(tasks)
    if not torch.cuda.is_available():
        raise UserError(f"gpu-check needs a GPU, and torch {torch.__version__} sees none")
    return run(tasks, console, fresh=options.fresh)


if __name__ == "__main__":  # what compute-sanitizer watches
    print(f"exercised {exercise(steps.find(sys.argv[1]))} rungs", flush=True)
