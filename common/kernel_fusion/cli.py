"""The command `kernel-fusion`."""

import argparse
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable

from emulator import command as simt
from emulator.console import described, exit_code
from kernel_fusion import steps
from kernel_fusion.console import CommandFailed, UserError, make_console, run_shown
from kernel_fusion.learn import exercises, guide
from kernel_fusion.report import documents as report
from kernel_fusion.report import syllabus


def step(text: str) -> steps.Step:
    """A step, as an argument."""
    try:
        return steps.find(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


STEP_NAMES = "STEP: step1-simple, step2-attention, step3-fused or step4-integration; or its number, 1 to 4."
SIZES = (
    "Sizes: emulated (small enough for the kernels to run thread by thread on the CPU), cpu (for plain C++), quick and "
    "full (for a GPU)."
)


def _op_names() -> str:
    named = "; ".join(f"{one.folder}: {', '.join(syllabus.ops(one))}" for one in steps.STEPS)
    return f"OP, of {named}. `kernel-fusion rungs OP` lists its rungs."


def _add(
    commands, name: str, sentence: str, more: list[str], examples: list[str], run: Callable[..., int], **options
) -> argparse.ArgumentParser:
    """Adds a command: `described` by a sentence, more and examples, and what does it and returns the exit code."""
    options |= described("kernel-fusion", sentence, more, examples)
    parser = commands.add_parser(name, help=sentence[0].lower() + sentence[1:].removesuffix("."), **options)
    parser.set_defaults(run=run)
    return parser


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Those that `kernel-fusion bench` hands on to a step's benchmark.py."""
    parser.add_argument("--op", action="append", metavar="OP", help="only this op; may be repeated")
    parser.add_argument("--rung", action="append", help="only this rung, and no peers; may be repeated")
    parser.add_argument(
        "--sizes",
        action="append",
        choices=("emulated", "cpu", "quick", "full"),
        help="may be repeated; default: full on a GPU; cpu, then emulated",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument(
        "--merge", action="store_true", help="with --op: put what is measured into results/<gpu>.json, row by row"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on where the same command was cut off, at the next case"
    )


def bench_parser() -> argparse.ArgumentParser:
    """The arguments of a step's benchmark.py, which reads them before it imports the step: --help needs no build."""
    parser = argparse.ArgumentParser(
        description="Times every rung of this step beside its peers.",
        epilog="With KF_BENCHMARK_SECONDS=0.1 in the environment calls are repeated for a tenth of a second, not for "
        "one: less time, more noise.",
    )
    add_bench_options(parser)
    parser.add_argument("--no-peers", action="store_true", help="rungs only")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write the results there")
    parser.add_argument("--no-save", action="store_true", help="do not write results/<gpu>.json")
    return parser


def make_parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    parser = argparse.ArgumentParser(
        prog="kernel-fusion",
        description="CUDA kernels from one elementwise operation to GPT-2, on a GPU or emulated.",
        epilog="`kernel-fusion COMMAND --help` has a command's arguments, their values and examples.",
    )
    add = functools.partial(_add, parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))

    tour = add(
        "tour",
        "Builds the steps and shows of every rung what it teaches and how right it is, then GPT-2.",
        [
            "It says at the start how long it takes. On a GPU each rung is timed, too. Interrupted and begun again, it "
            "goes on where it was.",
            STEP_NAMES,
        ],
        ["tour", "tour --from step1", "tour --full"],
        _command_of("learn.tour"),
    )
    tour.add_argument(
        "--full", action="store_true", help="a table with times for each case, instead of a screen a step"
    )
    tour.add_argument("--from", dest="start", type=step, metavar="STEP", help="begin at this step")

    check = add(
        "check",
        "Runs the steps' tests.",
        ["They must be built.", STEP_NAMES, simt.SCHEDULES],
        ["check", "check step2 --device cpu -k softmax", "check 1 --schedule random:7"],
        _check,
    )
    check.add_argument("steps", nargs="*", type=step, metavar="STEP", help="default: all four")
    check.add_argument("--device", choices=("cpu", "cuda"), help="only this device")
    check.add_argument(
        "--schedule", type=simt.schedule, metavar="S", help="only emulated tests, in this order of threads"
    )
    check.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="only tests whose names match, as pytest -k")

    bench = add(
        "bench",
        "Times every rung beside its peers.",
        ["The steps must be built.", STEP_NAMES, _op_names(), SIZES],
        ["bench step1 --op bias_gelu --sizes cpu", "bench --op scale --rung v4_vector --sizes emulated"],
        _bench,
    )
    bench.add_argument("steps", nargs="*", type=step, metavar="STEP", help="default: all four")
    add_bench_options(bench)

    profile = add(
        "profile",
        "Shows what a call of each rung asks of the hardware, by Nsight Compute or counted on the CPU.",
        [
            "With --device cpu it needs no GPU: the emulated kernels are compiled once more, so that they count their "
            "accesses, and run on a small case.",
            _op_names(),
        ],
        [
            "profile scale --device cpu",
            "profile softmax --rung v3_online --dtype bfloat16",
            "profile bias_gelu --case 3 --save",
        ],
        _profile,
    )
    profile.add_argument("op", metavar="OP")
    profile.add_argument("--rung", action="append", help="only this rung; may be repeated")
    which = profile.add_mutually_exclusive_group()
    which.add_argument("--case", type=int, metavar="N", help="the op's Nth case in benchmark.py; default: the largest")
    which.add_argument("--dtype", help="the largest case of this type: float32, bfloat16, …")
    profile.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: cuda")
    profile.add_argument("--save", action="store_true", help="write the figures into results/<gpu>.json")
    profile.add_argument("--json", type=pathlib.Path, metavar="PATH", help="with --device cpu: write the counts there")

    rungs = add(
        "rungs",
        "Lists rungs in the order of the lesson: their ideas, limits and length.",
        [_op_names().replace(" `kernel-fusion rungs OP` lists its rungs.", "")],
        ["rungs", "rungs softmax"],
        _rungs,
    )
    rungs.add_argument("op", nargs="?", metavar="OP", help="default: all of them")

    program = add(
        "simt",
        simt.SENTENCE,
        simt.MORE,
        ["simt step1-simple/simple_kernel.cu", *(f"simt {example}" for example in simt.EXAMPLES[1:])],
        simt.run,
    )
    simt.add_arguments(program)

    learn = add(
        "learn",
        "Guides through the exercises: what is next, whether your answer is right, hints, how far you are.",
        [
            "WHAT: " + "; ".join(f"{what}: {text}" for what, (*_, text) in guide.WHAT.items()) + ".",
            "Your files and how far you are lie in my/, which nothing writes over. An answer must be right in every "
            "order of the threads, and ask no more of the hardware than its lesson allows.",
            f"NAME: {', '.join(exercises.NAMES)}. For `next`, `hint` and `watch` also a group, of which it takes the "
            f"next one: {', '.join(exercises.groups())}.",
        ],
        ["learn", "learn next", "learn check", "learn check 1_grid_stride", "learn watch", "learn reset 1_grid_stride"],
        guide.command,
    )
    learn.add_argument("what", nargs="?", choices=guide.WHAT, default="status", metavar="WHAT", help="default: status")
    learn.add_argument("names", nargs="*", metavar="NAME", help="of an exercise; a path to its file will do")

    reports = add(
        "report",
        "Writes tables and plots of the results into READMEs and docs, and checks what these say of them.",
        ["FILE: a Markdown file with markers, such as <!-- results:softmax -->."],
        ["report", "report --check", "report step1-simple/README.md"],
        report.run,
    )
    reports.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE", help="default: all READMEs and docs")
    reports.add_argument("--check", action="store_true", help="write nothing; fail where a table or plot is stale")

    notebooks = add(
        "notebooks",
        "Writes the lessons' notebooks from their scripts and runs them, so that they are stored with their pictures.",
        ["After a change of a lesson.py or notebooks/tour.py, on a CPU. The step must be built.", STEP_NAMES],
        ["notebooks", "notebooks step2"],
        _command_of("learn.notebooks"),
    )
    notebooks.add_argument("steps", nargs="*", type=step, metavar="STEP", help="default: all, and the tour")

    again = add(
        "recheck",
        "Measures rows of a results file again, each case in a process of its own, and compares.",
        [
            "Two medians may differ by 5 % from 20 µs on, by 10 % from 5 µs on. Ends with 1 where one does. It needs "
            "the GPU of the file.",
            _op_names(),
        ],
        ["recheck step1-simple/results/h200.json --op gelu"],
        _command_of("bench.recheck"),
    )
    again.add_argument("results", type=pathlib.Path, metavar="FILE", help="such as step1-simple/results/h200.json")
    again.add_argument("--against", type=pathlib.Path, metavar="OTHER", help="measure nothing, compare with this file")
    again.add_argument("--op", action="append", metavar="OP", help="only this op; may be repeated")
    again.add_argument("--rungs", action="store_true", help="our rungs too, not only the peers")
    again.add_argument("--impl", action="append", help="only this rung or peer; may be repeated")
    again.add_argument("--output", type=pathlib.Path, metavar="PATH", help="write both times of each row there")
    again.add_argument("--best", action="store_true", help="keep the faster of torch.compile's times in FILE")

    gpu_check = add(
        "gpu-check",
        "On a GPU: builds, tests, checks memory and races, and measures.",
        ["Tasks that passed are not repeated while their sources stay. TASK: as --list names it, or its beginning."],
        ["gpu-check", "gpu-check --list", "gpu-check --only build --fresh"],
        _command_of("bench.gpu_check"),
    )
    gpu_check.add_argument("--only", action="append", default=[], metavar="TASK", help="tasks whose names start so")
    gpu_check.add_argument("--list", action="store_true", help="list the tasks and how each ended")
    gpu_check.add_argument("--fresh", action="store_true", help="repeat tasks that passed before")
    gpu_check.add_argument("--resume", action="store_true", help="do not repeat them: the default")
    return parser


def _command_of(module: str) -> Callable[[argparse.Namespace], int]:
    """`command` of a module that is imported only then: torch takes a second."""
    return lambda options: importlib.import_module(f"kernel_fusion.{module}").command(options, make_console())


def _need_built(wanted: list[steps.Step]) -> None:
    for one in wanted:
        if not steps.is_built(one):
            raise UserError(f"{one.folder} is not built for this Python; build it with: {steps.build_command(one)}")


def _check(options: argparse.Namespace) -> int:
    wanted = options.steps or list(steps.STEPS)
    _need_built(wanted)
    command = [sys.executable, "-m", "pytest", *(str(one.path) for one in wanted)]
    environment = {}
    if options.device:
        environment["KF_TEST_DEVICES"] = options.device
    if options.schedule:
        environment["KF_SIMT_SCHEDULE"] = options.schedule
        command += ["-m", "emulated"]
    if options.keyword:
        command += ["-k", options.keyword]
    return _shown(command, steps.ROOT, environment)


def _bench(options: argparse.Namespace) -> int:
    wanted = options.steps or list(steps.STEPS)
    at = {op: syllabus.step_of(op) for op in options.op or []}
    if at and not options.steps:
        wanted = [one for one in steps.STEPS if one in at.values()]
    for op, one in at.items():
        if one not in wanted:
            raise UserError(f"--op {op}: that is an op of {one.folder}")
    _need_built(wanted)
    arguments = [f"--{name}={value}" for name in ("rung", "sizes") for value in getattr(options, name) or []]
    arguments += [f"--device={options.device}"] if options.device else []
    arguments += [f"--{name}" for name in ("merge", "resume") if getattr(options, name)]
    worst = 0
    for one in wanted:
        print(f"{one.folder}:", flush=True)
        ops = [f"--op={op}" for op, where in at.items() if where == one]
        command = [sys.executable, "benchmark.py", *ops, *arguments]
        worst = max(worst, _shown(command, one.path, {}))
    return worst


def _profile(options: argparse.Namespace) -> int:
    step_of_op = syllabus.step_of(options.op)
    if options.device == "cuda":
        _need_built([step_of_op])
    from kernel_fusion.bench import profile

    profile.run(options, make_console())
    return 0


RUNGS_COLUMNS = """\
A rung's file is STEP/kernels/OP/RUNG.cu; in the order of the lesson each is built on the one before.
limits: what it does not take. lines: its file's. changed: how many of them the rung before does not have.
"""


def _rungs(options: argparse.Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    if options.op:
        syllabus.step_of(options.op)  # an unknown op is an error
    console = make_console()
    console.print(RUNGS_COLUMNS, style="dim", end="", markup=False)
    header = True
    for one in steps.STEPS:
        for op in (op for op in syllabus.ops(one) if options.op in (None, op)):
            table = Table(show_header=header, box=None, pad_edge=False, expand=True, header_style="bold")
            table.add_column("rung", width=14)
            table.add_column("idea", ratio=1)
            table.add_column("limits", ratio=1)
            table.add_column("lines", width=5, justify="right")
            table.add_column("changed", width=7, justify="right")
            before = None
            for rung in syllabus.rungs(one, op):
                changed = str(rung.changed_since(before)) if before else ""
                table.add_row(*map(escape, [rung.name, rung.idea, rung.limits, str(rung.lines()), changed]))
                before = rung
            console.print(f"\n{one.folder}: {op}", style="bold", markup=False)
            console.print(table)
            header = False
    return 0


def _shown(command: list[str], folder: pathlib.Path, environment: dict[str, str]) -> int:
    """Runs a command, its output where ours goes, and returns its code as ours. An interruption ends it."""
    try:
        run_shown(command, cwd=folder, env=environment)
    except CommandFailed as failed:
        return failed.code if failed.code >= 0 else 128 - failed.code
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    options = make_parser().parse_args(arguments)
    return exit_code("kernel-fusion", lambda: options.run(options))


if __name__ == "__main__":
    sys.exit(main())
