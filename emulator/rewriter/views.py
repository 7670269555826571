"""Compiles a rewritten CUDA source: device functions as the device's architecture sees them, all else as the host does.

    python -S emulator compile COMPILER FLAGS... -c IN.cpp -o OUT.o
    python -S emulator compile --rewrite IN.cpp COMPILER FLAGS... -c IN.cu -o OUT.o

The second line rewrites the CUDA source first, by rewrite.py, which saves a process for each source.

nvcc reads a source once for the host and once for each architecture, and defines `__CUDA_ARCH__` for the latter only.
Here both kinds of functions come from one compilation. So the preprocessor runs twice, and where its two texts differ
they become one: the bodies of `__global__` and `__device__` functions from the device's text, all else from the host's.
A function that is both (`__host__ __device__`, or `constexpr`) gets both bodies and takes the one of whoever calls it.

A macro defined under a condition reaches each side with its own meaning. So do constants, types and enumerations at
namespace scope or static in a class: the device's goes by the name NAME_on_device. What cannot be two things at once,
such as a variable or a member, is an error with its line.

Where the compiler is told to begin with a header that it has precompiled (`-include H`, and H.gch is there), the
preprocessor's texts name it in the place of what it holds, so that none of that is read again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from . import OWN_INCLUDE, rewrite
from .items import View, ViewError
from .merge import finished, merge

# The first words of what rewrite.py writes: other sources are compiled as they are.
REWRITTEN = "#include <cuda_runtime.h>\n"
# What nvcc defines for code of an sm_90a, which is what the runtime API says the device is.
DEVICE_MACROS = [
    "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-D__CUDA_ARCH_SPECIFIC__=900",
    "-D__CUDA_ARCH_FAMILY_SPECIFIC__=900",
]  # fmt: skip
# With this, __global__, __device__ and __host__ leave a trace in the preprocessor's output.
TRACED = ["-include", str(OWN_INCLUDE / "kf_simt" / "traced.h")]


def mentions_architecture(files: Iterable[str]) -> bool:
    """Whether one of the files tests what differs between the views."""
    own = (name for name in files if not name.startswith(("<", f"{OWN_INCLUDE}{os.sep}")) and os.path.isfile(name))
    return any(b"__CUDA_ARCH_" in Path(name).read_bytes() for name in own)


def begins_precompiled(compiler: list[str]) -> bool:
    """Whether the first `-include` of a command names a header that has been precompiled."""
    first = next((file for flag, file in zip(compiler, compiler[1:], strict=False) if flag == "-include"), None)
    return first is not None and os.path.exists(f"{first}.gch")


class Preprocessor:
    """Runs the compiler's preprocessor on a source, and remembers which files it has read."""

    def __init__(self, compiler: list[str], source: str | Path, target: str | Path):
        self.precompiled = begins_precompiled(compiler)
        self.command = [*compiler, *TRACED, "-E", *(["-fpch-preprocess"] * self.precompiled), "-x", "c++", str(source)]
        self.target = str(target)
        self.dependencies = ""  # as make rules

    def run(self, flags: list[str]) -> subprocess.CompletedProcess:
        """What came of it; the text is in `stdout`."""
        with tempfile.TemporaryDirectory() as folder:
            rule = Path(folder) / "rule"
            noted = ["-MD", "-MF", str(rule), "-MT", self.target]
            done = subprocess.run(
                [*self.command, *flags, *noted], capture_output=True, text=True, errors="surrogateescape"
            )
            if done.returncode == 0:
                self.dependencies += rule.read_text(errors="surrogateescape")
        return done

    def text(self, flags: list[str]) -> str:
        """The text. Raises ViewError with the preprocessor's own complaint."""
        done = self.run(flags)
        if done.returncode != 0:
            raise ViewError(done.stderr.strip())
        return done.stdout


def one_text(preprocess) -> tuple[str, bool]:
    """What the compiler shall see of a source, preprocessed, and whether device functions see it otherwise.

    `preprocess` returns the text that the preprocessor makes with the flags given.
    """
    host = View(preprocess([]))
    merged = None
    if mentions_architecture(host.texts):
        merged = merge(host, View(preprocess(DEVICE_MACROS)))
    return (finished(host.text), False) if merged is None else (merged, True)


def split_arguments(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The compiler with its flags, and the values of those that name files: -c, -o, -MF, -MT, and our --rewrite."""
    flags, named = [], {}
    words = iter(arguments)
    for word in words:
        if word in ("-c", "-o", "-MF", "-MT", "-MQ", "--rewrite"):
            named["-MT" if word == "-MQ" else word] = next(words, "")
        elif word not in ("-MD", "-MMD"):
            flags.append(word)
    return flags, named


def include_dirs(flags: list[str]) -> list[str]:
    """The folders of `-I folder` and `-Ifolder`."""
    apart = [folder for flag, folder in zip(flags, flags[1:], strict=False) if flag == "-I"]
    return apart + [flag[2:] for flag in flags if flag.startswith("-I") and flag != "-I"]


def main(arguments: list[str]) -> int:
    flags, named = split_arguments(arguments)
    if not flags or not named.get("-c") or not named.get("-o"):
        sys.stderr.write("usage: python -S emulator compile [--rewrite IN.cpp] COMPILER FLAGS... -c IN.cpp -o OUT.o\n")
        return 2
    source, output = Path(named["-c"]), named["-o"]
    rules = ""  # what the object depends on, beside what the preprocessor reads
    if "--rewrite" in named:
        try:
            read = rewrite.rewrite(source, named["--rewrite"], include_dirs(flags))
        except (rewrite.RewriteError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        rules = rewrite.make_rule(named.get("-MT", output), read)
        source = Path(named["--rewrite"]).absolute()
    if not source.read_bytes().startswith(REWRITTEN.encode()):
        return subprocess.run(arguments).returncode
    preprocessor = Preprocessor(flags, source, named.get("-MT", output))
    try:
        text, differs = one_text(preprocessor.text)
    except ViewError as error:
        print(error, file=sys.stderr)
        return 1
    if "-MF" in named:
        # Without what was written a moment ago, which is always newer than the object's last build began.
        own = rf"(?<=\s){re.escape(str(source.parent))}/(?:\\.|[^\s\\])*" if rules else r"(?!)"
        rewrite.write(Path(named["-MF"]), re.sub(own, "", preprocessor.dependencies) + rules)
    if differs:
        source = Path(f"{output}.ii")  # a preprocessed text, by its name: -include brings nothing more
        rewrite.write(source, text)
    return subprocess.run([*flags, "-c", str(source), "-o", output]).returncode
