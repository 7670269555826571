"""The commands that pages name: which can run here, what they print, and whether a page shows that."""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT
from kernel_fusion.checks.text import Fence
from kernel_fusion.console import child_environment

AS_ACTIVATED = os.pathsep.join([str(pathlib.Path(sys.prefix, "bin")), os.environ["PATH"]])  # pip's ninja and cmake, too


@functools.cache
def has_googletest() -> bool:
    """Whether CMake finds GoogleTest, or is told where its source is."""
    if os.environ.get("KF_GTEST_SOURCE"):
        return True
    script = "find_package(GTest QUIET)\nif(NOT GTest_FOUND)\n  message(FATAL_ERROR none)\nendif()\n"
    with tempfile.TemporaryDirectory() as folder:
        project = f"cmake_minimum_required(VERSION 3.21)\nproject(look LANGUAGES CXX)\n{script}"
        pathlib.Path(folder, "CMakeLists.txt").write_text(project)
        look = ["cmake", "-G", "Ninja", "-S", folder, "-B", f"{folder}/build"]
        return subprocess.run(look, env={**os.environ, "PATH": AS_ACTIVATED}, capture_output=True).returncode == 0


def absent() -> set[str]:
    """The tags whose fences cannot run here."""
    needs = {"gpu": ("nvidia-smi", "nvcc"), "sanitizer": ("compute-sanitizer",), "gdb": ("gdb",)}
    needs["cmake"] = ("cmake", "ninja")
    tags = {tag for tag, names in needs.items() if not all(shutil.which(name, path=AS_ACTIVATED) for name in names)}
    return tags if "cmake" in tags or has_googletest() else {*tags, "cmake"}


def commands_folder(folder: pathlib.Path) -> pathlib.Path:
    """Fills `folder` with the commands that READMEs name, bound to this Python. It goes first on the PATH."""
    for name, command in {
        "python": f'exec "{sys.executable}" "$@"',
        "python3": f'exec "{sys.executable}" "$@"',
        "kernel-fusion": f'PYTHONPATH="{steps.python_path()}" exec "{sys.executable}" -m kernel_fusion.cli "$@"',
    }.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    return folder


def environment(**more: str) -> dict[str, str]:
    """For a command in the usual order of threads."""
    return {name: value for name, value in child_environment(**more).items() if name != "KF_SIMT_SCHEDULE"}


def pasted(folder: pathlib.Path, *texts: str) -> str:
    """What these commands print, in one shell at the root."""
    path = os.pathsep.join([str(commands_folder(folder)), os.environ["PATH"]])
    return said_by(["bash", "-c", "\n".join(texts)], PATH=path, COLUMNS="120")


def said_by(command: list[str], timeout: float | None = None, **more: str) -> str:
    """All that a command prints, at the root; a program that hangs is ended after `timeout` seconds."""
    streams: dict = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=ROOT, env=environment(**more), timeout=timeout, **streams).stdout


def comparable(text: str) -> list[str]:
    """Its lines without addresses, processes and folders; NaN without a sign; as newer compilers say it."""
    text = re.sub(r"0x[0-9a-f]+", "0x…", text.replace(f"{ROOT}/", ""))
    text = text.replace("-nan", "nan").replace(" to the right of ", " after ")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def stands_in(shown: str, said: str) -> str | None:
    """The first line of `shown` that does not stand in `said` after the lines before it. … is anything."""
    rest = iter(comparable(said))
    for line in comparable(shown):
        if line == "…":
            continue
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        if not any(pattern.fullmatch(other) for other in rest):
            return line
    return None


def line_of(pair: tuple[Fence, Fence]) -> str:
    return f"line {pair[0].line}"
