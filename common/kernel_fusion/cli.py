"""The command `kernel-fusion`."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

from kernel_fusion import exercises, report, stages, syllabus
from kernel_fusion.console import UserError, child_environment, make_console


def schedule(text: str) -> str:
    """An order of emulated threads, as an argument."""
    if not re.fullmatch(r"forward|reverse|random:\d+", text):
        raise argparse.ArgumentTypeError(f"must be forward, reverse or random:SEED, got {text!r}")
    return text


def threads(text: str) -> int:
    """A number of OS threads, as an argument."""
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 4096, got {text!r}")
    return int(text)


def stage(text: str) -> stages.Stage:
    """A stage, as an argument."""
    try:
        return stages.find(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    parser = argparse.ArgumentParser(
        prog="kernel-fusion", description="CUDA kernels from one elementwise operation to GPT-2, on a GPU or emulated."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    tour = commands.add_parser("tour", help="build the stages and show of every rung how right and how fast it is")
    tour.add_argument("--seconds", type=float, default=None, help="the longest that training may take; default 120")
    tour.set_defaults(run=_tour)

    check = commands.add_parser("check", help="run the stages' tests")
    check.add_argument("stages", nargs="*", type=stage, metavar="STAGE", help="default: all four")
    check.add_argument("--device", choices=("cpu", "cuda"), help="only this device")
    check.add_argument(
        "--schedule",
        type=schedule,
        metavar="S",
        help="only emulated tests, threads in this order: reverse, random:1, …",
    )
    check.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="only tests whose names match, as pytest -k")
    check.set_defaults(run=_check)

    bench = commands.add_parser("bench", help="time every rung beside its peers")
    bench.add_argument("stages", nargs="*", type=stage, metavar="STAGE", help="default: all four")
    bench.add_argument("--op", action="append", help="only this op; may be repeated")
    bench.add_argument("--rung", action="append", help="only this rung, and no peers; may be repeated")
    bench.add_argument(
        "--sizes",
        action="append",
        choices=("emulated", "cpu", "quick", "full"),
        help="may be repeated; default: full on a GPU; cpu, then emulated",
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    bench.add_argument("--merge", action="store_true", help="with --op: put these ops' rows into results/<gpu>.json")
    bench.set_defaults(run=_bench)

    profile = commands.add_parser(
        "profile", help="a call's bytes and busy units, by Nsight Compute on a GPU; its accesses, counted on the CPU"
    )
    profile.add_argument("op", metavar="OP")
    profile.add_argument("--rung", action="append", help="only this rung; may be repeated")
    which = profile.add_mutually_exclusive_group()
    which.add_argument("--case", type=int, metavar="N", help="the op's Nth case in benchmark.py; default: the largest")
    which.add_argument("--dtype", help="the largest case of this type")
    profile.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: count a small case; no GPU")
    profile.add_argument("--save", action="store_true", help="write the figures into results/<gpu>.json")
    profile.add_argument("--json", type=pathlib.Path, metavar="PATH", help="with --device cpu: write the counts there")
    profile.set_defaults(run=_profile)

    rungs = commands.add_parser("rungs", help="list rungs in the order of the lesson, with their limits")
    rungs.add_argument("op", nargs="?", metavar="OP")
    rungs.set_defaults(run=_rungs)

    simt = commands.add_parser(
        "simt",
        help="run a stand-alone CUDA program on the CPU",
        usage="kernel-fusion simt [OPTION…] FILE.cu [OPTION…] [--] [ARGUMENT…]",
        description="Compiles and runs a CUDA program. What it uses and the emulation lacks is named before it runs.",
        epilog="After FILE.cu, the first word that is none of these options, or --, begins the program's arguments.",
    )
    _add_simt_options(simt)
    # In one list, because argparse would drop a -- between the file and its arguments.
    simt.add_argument("words", nargs=argparse.PARSER, metavar="FILE.cu", help="the program, and its own arguments")
    simt.set_defaults(run=_simt)

    exercise = commands.add_parser("exercises", help="write the skeletons of the exercises anew, from their solutions")
    exercises.add_arguments(exercise)
    exercise.set_defaults(run=exercises.command)

    reports = commands.add_parser("report", help="write tables and plots of results into READMEs and docs")
    report.add_arguments(reports)
    reports.set_defaults(run=report.run)

    gpu_check = commands.add_parser("gpu-check", help="on a GPU: build, test, memory and race checks, benchmarks")
    gpu_check.add_argument("--only", action="append", default=[], metavar="STEP", help="steps whose names start so")
    gpu_check.add_argument("--list", action="store_true", help="list the steps and how each ended")
    gpu_check.add_argument("--fresh", action="store_true", help="repeat steps that passed before")
    gpu_check.add_argument("--resume", action="store_true", help="do not repeat them: the default")
    gpu_check.set_defaults(run=_gpu_check)
    return parser


SIMT_MODES = ("race", "asan", "gdb", "count")  # each compiles the program in its own way, so one at a time


def _add_simt_options(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """The options of `simt`, which stand before FILE.cu or after it. Returns which of them take a value."""
    add = parser.add_argument
    options = [
        add("--race", action="store_true", help="report races between threads, with both lines"),
        add("--asan", action="store_true", help="stop at an access out of bounds (AddressSanitizer)"),
        add("--gdb", action="store_true", help="start gdb, with commands for blocks and threads"),
        add(
            "--gdb-ex",
            action="append",
            default=[],
            metavar="COMMAND",
            help="with --gdb: carry out COMMAND and end; may be repeated",
        ),
        add("--count", action="store_true", help="count accesses, sectors and bank conflicts by source line"),
        add("--json", type=pathlib.Path, metavar="PATH", help="with --count: write the counts there too"),
        add("--schedule", type=schedule, metavar="S", help="the threads' order: forward, reverse or random:SEED"),
        add("--threads", type=threads, metavar="N", help="OS threads of a launch; default: the cores"),
        add("-I", dest="include", action="append", default=[], type=pathlib.Path, metavar="DIR"),
        add("--only-compile", action="store_true", help="print the program's path instead of running it"),
    ]
    return {name: option.nargs is None for option in options for name in option.option_strings}


def _read_words(options: argparse.Namespace) -> None:
    """Splits `options.words` into the file, our options after it, and `options.arguments`, which are the program's."""
    parser = argparse.ArgumentParser(prog="kernel-fusion simt", add_help=False, allow_abbrev=False)
    takes_value = _add_simt_options(parser)
    options.file = pathlib.Path(options.words[0])
    words = options.words[1:]
    ours = 0
    while ours < len(words):
        word = words[ours]
        name = word.split("=")[0] if word.startswith("--") else word[:2]
        if name not in takes_value:
            break
        ours += 2 if takes_value[name] and word == name else 1
    parser.parse_args(words[:ours], options)
    rest = words[ours:]
    options.arguments = rest[1:] if rest[:1] == ["--"] else rest


# torch takes a second to import, so each command imports what it needs.


def _tour(options: argparse.Namespace) -> int:
    from kernel_fusion import tour

    return tour.run(make_console(), training_seconds=options.seconds or tour.TRAINING_S)


def _gpu_check(options: argparse.Namespace) -> int:
    from kernel_fusion import gpu_check

    return gpu_check.command(options)


def _need_built(wanted: list[stages.Stage]) -> None:
    for one in wanted:
        if not stages.is_built(one):
            raise UserError(f"{one.folder} is not built for this Python; build it with: {stages.build_command(one)}")


def _check(options: argparse.Namespace) -> int:
    wanted = options.stages or list(stages.STAGES)
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
    return _code(subprocess.run(command, cwd=stages.ROOT, env=child_environment(**environment)).returncode)


def _bench(options: argparse.Namespace) -> int:
    wanted = options.stages or list(stages.STAGES)
    at = {op: syllabus.stage_of(op) for op in options.op or []}
    if at and not options.stages:
        wanted = [one for one in stages.STAGES if one in at.values()]
    for op, one in at.items():
        if one not in wanted:
            raise UserError(f"--op {op}: that is an op of {one.folder}")
    _need_built(wanted)
    arguments = [f"--{name}={value}" for name in ("rung", "sizes") for value in getattr(options, name) or []]
    arguments += [f"--device={options.device}"] if options.device else []
    arguments += ["--merge"] if options.merge else []
    worst = 0
    for one in wanted:
        print(f"{one.folder}:", flush=True)
        ops = [f"--op={op}" for op, where in at.items() if where == one]
        command = [sys.executable, "benchmark.py", *ops, *arguments]
        worst = max(worst, _code(subprocess.run(command, cwd=one.path, env=child_environment()).returncode))
    return worst


def _profile(options: argparse.Namespace) -> int:
    stage_of_op = syllabus.stage_of(options.op)
    if options.device == "cuda":
        _need_built([stage_of_op])
    from kernel_fusion import profile

    profile.run(options, make_console())
    return 0


def _rungs(options: argparse.Namespace) -> int:
    from rich.markup import escape
    from rich.table import Table

    if options.op:
        syllabus.stage_of(options.op)  # an unknown op is an error
    console = make_console()
    for one in stages.STAGES:
        ops = [op for op in syllabus.ops(one) if options.op in (None, op)]
        if not ops:
            continue
        table = Table("op", "rung", "idea", "limits", title=one.folder, title_justify="left", title_style="bold")
        table.add_column("lines", justify="right")
        table.add_column("changed", justify="right")
        for op in ops:
            before = None
            for rung in syllabus.rungs(one, op):
                changed = str(rung.changed_since(before)) if before else ""
                cells = [op, rung.name, rung.idea, rung.limits, str(rung.lines()), changed]
                table.add_row(*map(escape, cells))
                before = rung
        console.print(table)
    return 0


def _simt(options: argparse.Namespace) -> int:
    from kernel_fusion import simt

    _read_words(options)
    modes = [mode for mode in SIMT_MODES if getattr(options, mode)]
    if len(modes) > 1:
        raise UserError(f"--{modes[0]} and --{modes[1]} exclude each other")
    if options.json and not options.count:
        raise UserError("--json needs --count")
    if options.gdb_ex and not options.gdb:
        raise UserError("--gdb-ex needs --gdb")
    if options.count and not options.only_compile:
        from kernel_fusion import counts

        return counts.command(options, make_console())
    flavour = {"gdb": "debug"}.get(modes[0], modes[0]) if modes else "plain"
    program = simt.compile_program(options.file, flavour=flavour, include_dirs=tuple(options.include))
    if options.only_compile:
        print(program)
        return 0
    if options.gdb:
        from kernel_fusion import debugger

        os.environ.update(simt.run_environment(options.schedule, options.threads))
        return debugger.debug(program, options.arguments, options.gdb_ex)
    return simt.run_program(program, options.arguments, schedule=options.schedule, threads=options.threads)


def _code(code: int) -> int:
    """A child's return code as ours."""
    return code if code >= 0 else 128 - code


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("kernel-fusion: interrupted", file=sys.stderr)
        return 130
    except (UserError, OSError) as error:
        print(f"kernel-fusion: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
