"""The command `simt`: a stand-alone CUDA program, compiled and run on the CPU."""

import argparse
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable

from emulator import programs
from emulator.console import UserError, described, exit_code, make_console

SENTENCE = "Compiles and runs a stand-alone CUDA program on the CPU."
SCHEDULES = (
    "The threads' order, S: forward (thread 0 first), reverse, or random:SEED with any number as SEED, random:1 for "
    "instance. Between barriers the order must not matter; a missing barrier shows in one of them."
)
MORE = [
    "What it uses and the emulation lacks is named before it runs.",
    SCHEDULES,
    "After FILE.cu, the first word that is none of these options, or --, begins the program's arguments.",
]
EXAMPLES = [
    "program.cu",
    "--race program.cu -- 100000",
    "--schedule random:1 program.cu",
    "--count --json counts.json program.cu",
    "--trace run.html program.cu",
]


def schedule(text: str) -> str:
    """An order of emulated threads, as an argument."""
    if not re.fullmatch(r"forward|reverse|random:\d+", text):
        raise argparse.ArgumentTypeError(f"must be forward, reverse or random:SEED, got {text!r}")
    return text


def number(what: str, most: int) -> Callable[[str], int]:
    """The type of an argument that counts from 1."""

    def read(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be {what} from 1 to {most}, got {text!r}")
        return int(text)

    return read


NTH_LAUNCH, OS_THREADS = number("the number of a launch,", 10**9), number("a number of threads", 4096)


def span(text: str) -> str:
    """Blocks or threads by their numbers, as an argument."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if not found or int(found[2] or found[1]) < int(found[1]):
        raise argparse.ArgumentTypeError(f"must be N or FIRST-LAST, counted from 0, got {text!r}")
    return text


MODES = ("race", "asan", "gdb", "count", "trace")  # each compiles the program in its own way, so one at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes, before and after FILE.cu."""
    parser.usage = "%(prog)s [OPTION…] FILE.cu [OPTION…] [--] [ARGUMENT…]"
    parser.set_defaults(prog=parser.prog)
    _add_options(parser)
    # In one list, because argparse would drop a -- between the file and its arguments.
    parser.add_argument("words", nargs=argparse.PARSER, metavar="FILE.cu", help="the program, and its own arguments")


def _add_options(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """The options, which stand before FILE.cu or after it. Returns which of them take a value."""
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
        add(
            "--trace",
            type=pathlib.Path,
            metavar="PATH",
            help="record a launch, thread by thread: .html steps through it",
        ),
        add("--trace-blocks", type=span, metavar="A-B", help="with --trace: which blocks; default: 0-1"),
        add("--trace-threads", type=span, metavar="A-B", help="with --trace: which of their threads; default: all"),
        add("--trace-launch", type=NTH_LAUNCH, metavar="N", help="with --trace: which launch; default: the first"),
        add("--schedule", type=schedule, metavar="S", help="the threads' order"),
        add("--threads", type=OS_THREADS, metavar="N", help="OS threads of a launch; default: the cores"),
        add(
            "-I",
            dest="include",
            action="append",
            default=[],
            type=pathlib.Path,
            metavar="DIR",
            help="look there for what is included; may be repeated",
        ),
        add(
            "--compiler-flags",
            type=shlex.split,
            default=[],
            metavar="FLAGS",
            help="more flags for the C++ compiler, in one word: --compiler-flags='-fopenmp -DN=8'",
        ),
        add("--only-compile", action="store_true", help="print the program's path instead of running it"),
    ]
    return {name: option.nargs is None for option in options for name in option.option_strings}


def _read_words(options: argparse.Namespace) -> None:
    """Splits `options.words` into the file, our options after it, and `options.arguments`, which are the program's."""
    parser = argparse.ArgumentParser(prog=options.prog, add_help=False, allow_abbrev=False)
    takes_value = _add_options(parser)
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


def run(options: argparse.Namespace) -> int:
    """Does what was asked, with the options of `add_arguments`. Returns the exit code."""
    _read_words(options)
    modes = [mode for mode in MODES if getattr(options, mode)]
    if len(modes) > 1:
        raise UserError(f"--{modes[0]} and --{modes[1]} exclude each other")
    if options.json and not options.count:
        raise UserError("--json needs --count")
    chosen = [name for name in ("blocks", "threads", "launch") if getattr(options, f"trace_{name}")]
    if chosen and not options.trace:
        raise UserError(f"--trace-{chosen[0]} needs --trace")
    if options.trace and options.threads:
        raise UserError("--trace and --threads exclude each other: a recorded program has one OS thread")
    if options.gdb_ex and not options.gdb:
        raise UserError("--gdb-ex needs --gdb")
    if options.count and not options.only_compile:
        from emulator import counts

        code = counts.command(options, make_console())
        _say_whose_times(options.file)
        return code
    if options.trace and not options.only_compile:
        from emulator import trace

        return trace.command(options, make_console())
    flavour = {"gdb": "debug"}.get(modes[0], modes[0]) if modes else "plain"
    program = programs.compile_program(
        options.file, flavour=flavour, include_dirs=tuple(options.include), compiler_flags=tuple(options.compiler_flags)
    )
    if options.only_compile:
        print(program)
        return 0
    if options.gdb:
        from emulator import debugger

        os.environ.update(programs.run_environment(options.schedule, options.threads))
        return debugger.debug(program, options.arguments, options.gdb_ex)
    code = programs.run_program(program, options.arguments, schedule=options.schedule, threads=options.threads)
    _say_whose_times(options.file)
    return code


WHOSE_TIMES = "emulated: times are the CPU's, and say nothing about a GPU"


def _say_whose_times(source: pathlib.Path) -> None:
    """Below what a program has printed, if it takes times."""
    if "cudaEventElapsedTime" in source.read_text(encoding="utf-8", errors="replace"):
        print(WHOSE_TIMES, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Runs `simt`, as the emulator's own wheel installs it. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="simt", **described("simt", SENTENCE, MORE, EXAMPLES))
    add_arguments(parser)
    options = parser.parse_args(arguments)
    return exit_code("simt", lambda: run(options))
