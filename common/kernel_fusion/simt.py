"""CUDA programs and libraries for the CPU: rewritten, compiled by the host's compiler, linked to the emulation."""

import fcntl
import hashlib
import os
import pathlib
import subprocess
import sys

from kernel_fusion import stages
from kernel_fusion.build import COMMON, SIMT, NinjaFile, shell_words
from kernel_fusion.console import UserError

FLAVOURS = {"plain": ["-O2", "-g1"], "debug": ["-O0", "-g"], "asan": ["-O1", "-g", "-fsanitize=address"]}


class SimtError(UserError):
    """A program or a library that cannot be compiled."""


def compile_program(
    source: pathlib.Path, *, flavour: str = "plain", include_dirs: tuple[pathlib.Path, ...] = ()
) -> pathlib.Path:
    """Compiles a CUDA program, with its `main`, for the CPU. Unchanged programs and the emulation are compiled once.

    Args:
        source: the .cu file.
        flavour: "plain", "debug" (for gdb: no optimisation) or "asan" (AddressSanitizer).
        include_dirs: where `#include` looks, besides the program's own folder and common/include.

    Returns:
        The executable's path.

    Raises:
        SimtError: there is no such file, or it cannot be rewritten or compiled; then the text is the tools' own.
    """
    return _compile(source, "programs", flavour, include_dirs)


def compile_library(source: pathlib.Path, *, flavour: str = "plain") -> pathlib.Path:
    """Compiles a CUDA source into a shared library for the CPU, the emulation inside, for ctypes to call.

    Only functions marked `extern "C" __attribute__((visibility("default")))` can be called: everything else is hidden,
    so that libraries in one process do not share the emulation's variables. An error that the emulation finds is a C++
    exception; one that leaves such a function ends the process with its text.

    Args:
        source: the .cu file.
        flavour: "plain", or "debug" (for gdb: no optimisation).

    Returns:
        The library's path. A process that has loaded it does not see what the same file is compiled into later.

    Raises:
        SimtError: as `compile_program`.
    """
    return _compile(source, "libraries", flavour, ())


def _compile(source: pathlib.Path, kind: str, flavour: str, include_dirs: tuple[pathlib.Path, ...]) -> pathlib.Path:
    source = source.resolve()
    if not source.is_file():
        raise SimtError(f"no such file: {source}")
    folder = stages.ROOT / "build" / kind / flavour
    includes = [COMMON / "include", *(path.resolve() for path in include_dirs)]
    digest = hashlib.sha256("\n".join(map(str, [source, *includes])).encode()).hexdigest()[:8]
    own = folder / f"{source.stem}-{digest}"
    own.mkdir(parents=True, exist_ok=True)

    cxx = os.environ.get("CXX", "c++")
    found = [f"-I{path}" for path in [source.parent, *includes]]
    shared = kind == "libraries"
    flags = ["-std=c++17", *FLAVOURS[flavour], "-fno-strict-aliasing", "-DKF_BACKEND=emulated", f"-I{SIMT / 'include'}"]
    flags += ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"] if shared else []
    linked = [*FLAVOURS[flavour], "-pthread", *(["-shared"] if shared else [])]
    compile_one = f"{shell_words([cxx, *flags, *found])} -MD -MF $out.d -c $in -o $out"
    rewrite = f"{shell_words([sys.executable, SIMT / 'rewrite.py', *found])} $in -o $out --depfile $out.d"
    link = f"{shell_words([cxx, *linked])} $in -o $out.tmp && mv -f $out.tmp $out"

    ninja = NinjaFile()
    ninja.rule("compile", compile_one, "compile $in")
    ninja.rule("rewrite", rewrite, "rewrite $in")
    ninja.rule("link", link, "link $out", deps=False)
    objects = []
    for part in sorted((SIMT / "src").glob("*.cpp")):
        objects.append(folder / "runtime" / f"{part.name}.o")
        ninja.build(objects[-1], "compile", [part])
    rewritten = own / f"{source.name}.cpp"
    result = own / (f"{source.stem}.so" if shared else source.stem)
    ninja.build(rewritten, "rewrite", [source], [SIMT / "rewrite.py"])
    ninja.build(own / f"{source.name}.o", "compile", [rewritten])
    ninja.build(result, "link", [own / f"{source.name}.o", *objects])
    ninja.write(own / "build.ninja")
    _run_ninja(folder, own / "build.ninja")
    return result


def _run_ninja(folder: pathlib.Path, file: pathlib.Path) -> None:
    """All results of a kind and a flavour share one folder, and so the emulation's objects; one build at a time."""
    import ninja as ninja_package

    ninja = pathlib.Path(ninja_package.BIN_DIR) / "ninja"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [str(ninja), "-C", str(folder), "-f", str(file), "--quiet"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SimtError(done.stdout.strip())


def run_program(program: pathlib.Path, arguments: list[str]) -> int:
    """Runs an executable with our input and output. Returns its exit code; 128 + n where signal n ended it.

    A thread that has returned before a barrier is a warning here, since CUDA allows it; in our rungs it is an error.
    """
    environment = {"KF_SIMT_EXITED": "warn", **os.environ}
    code = subprocess.run([str(program), *arguments], env=environment).returncode
    return code if code >= 0 else 128 - code
