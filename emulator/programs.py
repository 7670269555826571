"""CUDA programs and libraries for the CPU: rewritten, compiled by the host's compiler, linked to the emulation."""

import hashlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import emulator
from emulator.console import UserError, progress
from emulator.ninja_file import NinjaFile, is_clang, one_at_a_time, precompile, shell_words

KF_HEADERS = emulator.FOLDER.parent / "common" / "include"  # which a program may use: <kf/…>
# Where what is compiled lies: beside the emulator in its repository, else, as its own wheel, in the user's cache.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "simt")
BUILD = (
    emulator.FOLDER.parent / "build"
    if KF_HEADERS.is_dir()
    else CACHE / hashlib.sha256(str(emulator.FOLDER).encode()).hexdigest()[:8]
)
EMULATION = BUILD  # and where the emulation does, also for tests that put their programs elsewhere

# The compiler's flags for the program and the emulation.
FLAVOURS = {
    "plain": ["-O2", "-g1"],
    "debug": ["-O0", "-g"],
    "asan": ["-O1", "-g", "-fsanitize=address,alignment", "-fno-sanitize-recover=alignment"],
    "race": ["-O1", "-g", "-DKF_SIMT_TSAN", "-DKF_SIMT_INSTRUMENTED"],
    "count": ["-O2", "-g"],
    "trace": ["-O2", "-g", "-DKF_SIMT_TRACE"],
}
# Those for the program alone: the emulation is not instrumented where it tells a tool itself what happens.
INSTRUMENTED = {
    "race": ["-fsanitize=thread", "--param=tsan-distinguish-volatile=1"],
    "count": emulator.COUNTING,
    "trace": emulator.TRACING,
}
# What C++ leaves undefined and a GPU does not: src/checks says so, with the line. Not where accesses
# and branches are counted, which the checks would add to.
CHECKED = ["-fsanitize=shift-exponent,integer-divide-by-zero,float-cast-overflow"]
# Where g++ sees a path divide by zero or go through null, it makes a trap of it; with this the processor stops there.
LEFT_TO_THE_PROCESSOR = "-fno-isolate-erroneous-paths-dereference"
# And those for linking.
LINKED = {"asan": ["-fsanitize=address,alignment"], "race": ["-fsanitize=thread"]}
# What nvcc defines in a program of its own, for the host and the device alike; rewriter/views.py has the rest.
NVCC_MACROS = [
    "-D__CUDACC__", "-D__NVCC__", "-D__CUDACC_VER_MAJOR__=13", "-D__CUDACC_VER_MINOR__=0", "-D__CUDA_ARCH_LIST__=900",
]  # fmt: skip


class SimtError(UserError):
    """A program or a library that cannot be compiled."""


def compile_program(
    source: pathlib.Path,
    *,
    flavour: str = "plain",
    include_dirs: tuple[pathlib.Path, ...] = (),
    compiler_flags: tuple[str, ...] = (),
) -> pathlib.Path:
    """Compiles a CUDA program, with its `main`, for the CPU. Unchanged programs and the emulation are compiled once.

    Args:
        source: the .cu file.
        flavour: "plain", "debug" (for gdb: no optimisation), "asan" (AddressSanitizer), "race" (the race detector),
            "count" (accesses are counted, see `counts`) or "trace" (they are written down, see `trace`).
        include_dirs: where `#include` looks, besides the program's own folder and common/include.
        compiler_flags: for the compiler and the linker, such as "-fopenmp".

    Returns:
        The executable's path.

    Raises:
        SimtError: there is no such file, or no compiler; or it uses what is not emulated, and the text has a line for
            each such place; or it cannot be rewritten or compiled, and the text is the tools' own.
    """
    return _compile(source, flavour, include_dirs, compiler_flags, shared=False)


def compile_library(source: pathlib.Path, *, flavour: str = "plain") -> pathlib.Path:
    """Compiles a CUDA source into a shared library for the CPU, the emulation inside, for ctypes to call.

    Only functions marked `extern "C" __attribute__((visibility("default")))` can be called: everything else is hidden,
    so that libraries in one process do not share the emulation's variables. An error that the emulation finds is a C++
    exception; one that leaves such a function ends the process with its text.
    A process that has loaded the library does not see what the same file is compiled into later. The rest is as for
    `compile_program`.
    """
    return _compile(source, flavour, (), (), shared=True)


def _compile(
    source: pathlib.Path, flavour: str, include_dirs: tuple, compiler_flags: tuple, shared: bool
) -> pathlib.Path:
    source = source.resolve()
    if not source.is_file():
        raise SimtError(f"no such file: {source}")
    kind = "libraries" if shared else "programs"
    emulated = EMULATION / kind / flavour
    includes = [KF_HEADERS, *(path.resolve() for path in include_dirs)]
    digest = hashlib.sha256("\n".join(map(str, [source, *includes, *compiler_flags])).encode()).hexdigest()[:8]
    own = BUILD / kind / flavour / f"{source.stem}-{digest}"

    cxx = os.environ.get("CXX", "c++")
    if not shutil.which(shlex.split(cxx)[0]):
        raise SimtError(f"no C++ compiler {cxx}; Debian, Ubuntu: apt install g++; or CXX=… names another one")
    found = [f"-I{path}" for path in [source.parent, *includes]]
    searched = [*found, *(flag for flag in compiler_flags if flag.startswith("-I"))]
    # -fstack-clash-protection: a frame larger than the guard below a thread's stack does not step over it.
    flags = ["-std=c++17", *FLAVOURS[flavour], "-fstack-clash-protection", "-fno-strict-aliasing", "-ffp-contract=off"]
    flags += ["-DKF_BACKEND=emulated", f"-I{emulator.FOLDER / 'include'}"]
    flags += ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"] * shared
    checks = [] if flavour in ("count", "trace") else CHECKED
    if not is_clang(cxx):
        checks = [*checks, LEFT_TO_THE_PROCESSOR]
    alike = [cxx, *flags, *INSTRUMENTED.get(flavour, []), *checks, *(["-DKF_SIMT_PROGRAM"] * (not shared))]
    alike += [*NVCC_MACROS, "-fno-diagnostics-show-caret"]
    program = [*alike, *found, *compiler_flags]
    linked = [*LINKED.get(flavour, []), "-pthread", *(["-shared"] if shared else []), *compiler_flags]
    depfile = "-MD -MF $out.d -c $in -o $out"
    tool = [sys.executable, "-S", emulator.FOLDER]
    rewrite = f"{shell_words([*tool, 'rewrite', *searched])} $in -o $out --depfile $out.d"
    check = f"{shell_words([*tool, 'check'])} $in -o $out --depfile $out.d -- {shell_words(program)}"
    link = f"{shell_words([cxx, *linked])} $in -o $out.tmp && mv -f $out.tmp $out"

    # The emulation is the same for all programs of a flavour. Whoever is about to compile it keeps the others waiting.
    emulation = NinjaFile()
    compile_one = f"{shell_words([cxx, *flags])} -MD -MF $out.d -MT $out -c $in -o $out.tmp && mv -f $out.tmp $out"
    emulation.rule("runtime", compile_one, "compile $in")
    objects = []
    parts = emulator.runtime_sources(counting=flavour == "count", tracing=flavour == "trace")
    for more in ("checks", *(["program"] * (not shared))):
        parts += sorted((emulator.FOLDER / "src" / more).glob("*.cpp"))
    for part in parts:
        objects.append(emulated / "runtime" / f"{part.name}.o")
        emulation.build(objects[-1], "runtime", [part])
    header = emulated / "precompiled" / "cuda_runtime.h"  # which a rewritten program begins with
    needed = precompile(emulation, alike, header, "#include_next <cuda_runtime.h>\n")
    with progress("compiling the emulation"):
        _run_ninja(emulated / "runtime", emulation, "the emulation")

    ninja = NinjaFile()
    ninja.rule("rewrite", rewrite, "rewrite $in")
    ninja.rule("check", check, "check $in")
    ninja.rule("compile", f"{shell_words([cxx, '-I', header.parent, *program[1:]])} {depfile}", "compile $in")
    ninja.rule("link", link, "link $out", deps=False)
    rewritten = own / f"{source.name}.cpp"
    result = own / (f"{source.stem}.so" if shared else source.stem)
    ninja.build(rewritten, "rewrite", [source], emulator.rewriter_files())
    checked = own / f"{source.name}.checked.cpp"
    ninja.build(checked, "check", [rewritten], emulator.rewriter_files())
    ninja.build(own / f"{source.name}.o", "compile", [checked], needed)
    ninja.build(result, "link", [own / f"{source.name}.o", *objects])
    with progress(f"compiling {source.name}"):
        _run_ninja(own, ninja, source.name)
    return result


def _run_ninja(folder: pathlib.Path, file: NinjaFile, what: str) -> None:
    """Builds what `file` says in `folder`, one process at a time; says so where another one is at it."""
    import ninja as ninja_package

    ninja = pathlib.Path(ninja_package.BIN_DIR) / "ninja"
    with one_at_a_time(folder, what) as holding:
        file.write(folder / "build.ninja")
        command = [str(ninja), "-C", str(folder), "--quiet"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **holding)
    if done.returncode != 0:
        raise SimtError(_complaints(done.stdout))


# A call that the rewriter puts in the place of PTX that it cannot translate; the compiler reports it where it is used.
_REFUSED_PTX = re.compile(r"^(.*?:\d+):\d+: error: call to .kf_refused_\w+. declared with .*?: (inline PTX: .*)$")
_IN_FUNCTION = re.compile(r"In (?:member )?function [‘'](?:.*?[ *&])?([\w:~]+(?:<.*>)?)\(.*[’']")


def _complaints(output: str) -> str:
    """What the tools said, without ninja's own lines: which output failed, by which command."""
    lines = output.strip().splitlines()
    failed = [i for i, line in enumerate(lines) if line.startswith("FAILED: ")]
    dropped = {*failed, *(i + 1 for i in failed)}
    kept: list[str] = []
    function = ""
    for i, line in enumerate(lines):
        if i in dropped or line.startswith("ninja: build stopped"):
            continue
        if inside := _IN_FUNCTION.search(line):
            function = inside[1]
        if refused := _REFUSED_PTX.match(line):
            if kept and _IN_FUNCTION.search(kept[-1]):
                kept.pop()  # our line names the function itself
            line = f"{refused[1]}: {f'in function {function}: ' if function else ''}{refused[2]}"
        kept.append(line)
    return "\n".join(kept).strip() or output.strip()


def run_environment(schedule: str | None = None, threads: int | None = None) -> dict[str, str]:
    """The environment that a program runs in.

    A thread that has returned before a barrier is a warning here, since CUDA allows it, and so is an operation that
    only C++ leaves undefined; in our rungs they are errors.

    `schedule` is the threads' order ("forward", "reverse" or "random:SEED"), `threads` the number of OS threads of a
    launch; None leaves KF_SIMT_SCHEDULE or KF_SIMT_THREADS as it is.
    """
    environment = {"KF_SIMT_EXITED": "warn", "KF_SIMT_UNDEFINED": "warn", **os.environ}
    if schedule is not None:
        environment["KF_SIMT_SCHEDULE"] = schedule
    if threads is not None:
        environment["KF_SIMT_THREADS"] = str(threads)
    return environment


def run_program(
    program: pathlib.Path, arguments: list[str], *, schedule: str | None = None, threads: int | None = None,
    settings: dict[str, str] | None = None, stdout: int | None = None,
) -> int:  # fmt: skip
    """Runs an executable with our input and output, or what `subprocess` has for `stdout`, with `run_environment` and
    `settings`.

    Returns its exit code; 128 + n where signal n ended it.
    """
    environment = {**run_environment(schedule, threads), **(settings or {})}
    code = subprocess.run([str(program), *arguments], env=environment, stdout=stdout).returncode
    if code < 0 and -code != signal.SIGINT:
        name = signal.Signals(-code).name
        print(f"{program.name} was ended by {name}; --gdb stops where it comes", file=sys.stderr)
    return code if code >= 0 else 128 - code
