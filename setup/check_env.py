"""Says what this machine has for the project: `python setup/check_env.py`.

A line a thing: `ok`, `note` (works without; what you would gain) or `fix` (needed; what to do). Exits 1 after a `fix`.
"""

from __future__ import annotations  # an old Python shall read this far and be told so

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from typing import NamedTuple

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 9)
GIB = 2**30


class Line(NamedTuple):
    """One thing looked at: "ok", "note" or "fix", what it is, and what to do about it."""

    status: str
    what: str
    remedy: str = ""


def output(*command: str, text: str | None = None) -> tuple[int, str]:
    """Exit code and all output of `command`; 127 where it cannot be started or takes a minute."""
    try:
        done = subprocess.run(
            command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout


def first_line(text: str) -> str:
    """The first line with something on it."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def check_python() -> Line:
    """The version, and the headers that an extension is compiled with."""
    what = f"Python {platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return Line("fix", what, "install Python 3.10 or newer")
    if not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").exists():
        return Line("fix", f"{what}: no Python.h", "install its headers, on Debian and Ubuntu: apt install python3-dev")
    return Line("ok", what)


def check_compiler() -> Line:
    """The host's C++ compiler; torch's headers need C++20."""
    cxx = os.environ.get("CXX", "c++")
    code, version = output(cxx, "--version")
    if code:
        return Line(
            "fix", f"C++ compiler: {cxx} does not run", "apt install g++ make, on macOS: xcode-select --install"
        )
    what = f"C++ compiler: {first_line(version)}"
    source = "#include <concepts>\n#include <thread>\nstatic_assert(std::integral<int>);\nint main() {}\n"
    code, said = output(cxx, "-std=c++20", "-fsyntax-only", "-x", "c++", "-", text=source)
    if code:
        return Line(
            "fix", f"{what}: no C++20 ({first_line(said)})", "install g++ 11 or newer, or set CXX to a newer one"
        )
    return Line("ok", what)


def check_tool(name: str, version: str, needed_for: str, remedy: str) -> Line:
    """A program that helps but is not needed."""
    code, said = output(name, version)
    return Line("note", f"{name} not found: no {needed_for}", remedy) if code else Line("ok", first_line(said))


def import_torch():
    """torch, or the reason why it cannot be imported."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return None, f"no module {error.name}"
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries does not load
        return None, first_line(str(error))
    return torch, ""


def check_torch(torch, why_not: str) -> Line:
    """torch itself, and which build of it."""
    if torch is None:
        return Line(
            "fix", f"torch cannot be imported: {why_not}", "make setup, or pip install -r setup/dependencies.txt"
        )
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    what = f"torch {torch.__version__}, built {build}"
    if tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2]) < OLDEST_TORCH:
        return Line("fix", what, "torch 2.9 or newer is needed: pip install -r setup/dependencies.txt")
    return Line("ok", what)


def check_ninja() -> Line:
    """ninja as Python package: the build takes the program out of it."""
    try:
        import ninja
    except ModuleNotFoundError:
        return Line("fix", "ninja (Python package) is not installed", "pip install ninja")
    return Line("ok", f"ninja {ninja.__version__}")


def check_nvcc(torch) -> Line:
    """nvcc; its CUDA must be of the same major version as torch's."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        return Line("note", "nvcc not found: kernels run on the CPU only, by emulation", "for a GPU: CUDA toolkit")
    found = re.search(r"release (\d+)\.(\d+)", output(nvcc, "--version")[1])
    if found is None:
        return Line("fix", f"{nvcc} --version names no release", "put NVIDIA's nvcc first on the PATH")
    what = f"nvcc {found.group(1)}.{found.group(2)} ({nvcc})"
    if torch is None:
        return Line("note", f"{what}: not compared, torch is missing", "install torch first")
    if not torch.version.cuda:
        return Line(
            "note", f"{what}: not used, torch is a build without CUDA", "for a GPU: setup/environment.md, torch"
        )
    if torch.version.cuda.split(".")[0] != found.group(1):
        remedy = f"take the toolkit of CUDA {torch.version.cuda}, or a torch for CUDA {found.group(1)}"
        return Line("fix", f"{what}, but torch is for CUDA {torch.version.cuda}: the major versions must agree", remedy)
    return Line("ok", what)


def check_driver() -> Line:
    """NVIDIA's driver, as nvidia-smi reports it."""
    code, said = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if code == 127:
        return Line("note", "no NVIDIA driver: no GPU to run on", "none needed for the emulation")
    if code:
        return Line("fix", f"nvidia-smi fails: {first_line(said)}", "install or reload NVIDIA's driver, then reboot")
    return Line("ok", f"NVIDIA driver {first_line(said)}")


def check_gpus(torch, driver: Line) -> list[Line]:
    """Each GPU that torch sees: capability and memory."""
    if torch is None or not torch.version.cuda:
        return []
    if not torch.cuda.is_available():
        if driver.status == "note":  # no GPU here at all
            return []
        remedy = (
            f"the driver may be too old for CUDA {torch.version.cuda}: update it, or take a torch for an older CUDA"
        )
        return [Line("fix", "torch sees no GPU although a driver is there", remedy)]
    lines = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        what = f"GPU {index}: {gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / GIB:.0f} GiB"
        if (gpu.major, gpu.minor) < (7, 0):
            lines.append(
                Line("fix", what, "capability 7.0 (Volta) or newer is needed; KF_CUDA=0 builds without the GPU")
            )
        elif not any(arch.startswith(f"sm_{gpu.major}") for arch in torch.cuda.get_arch_list()):
            lines.append(Line("fix", f"{what}: torch has no code for it", "take a torch for another CUDA version"))
        else:
            lines.append(Line("ok", what))
    return lines


def memory_bytes() -> int:
    """The machine's memory, or the container's limit where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text(encoding="utf-8").strip()).isdigit():
        total = min(total, int(text))
    return total


def check_memory() -> Line:
    """Memory: compiling a file that includes torch takes up to 2 GiB."""
    what = f"memory: {memory_bytes() / GIB:.1f} GiB"
    if memory_bytes() < 3 * GIB:
        return Line("fix", what, "3 GiB are needed to compile; with less, add swap and set MAX_JOBS=1")
    return Line("ok", what)


def check_disk() -> Line:
    """Room for builds and, where torch is not there yet, for torch."""
    free = shutil.disk_usage(pathlib.Path(__file__).parent).free
    what = f"disk: {free / GIB:.0f} GiB free"
    return Line("ok", what) if free > 4 * GIB else Line("note", what, "torch and the builds need about 4 GiB")


def check_all() -> list[Line]:
    """All lines, in the order in which a problem should be mended."""
    torch, why_not = import_torch()
    driver = check_driver()
    return [
        check_python(),
        check_compiler(),
        check_torch(torch, why_not),
        check_ninja(),
        check_tool("cmake", "--version", "C++ tests of the kernels", "apt install cmake ninja-build libgtest-dev"),
        check_tool("gdb", "--version", "stepping through kernels", "apt install gdb"),
        driver,
        check_nvcc(torch),
        *check_gpus(torch, driver),
        check_memory(),
        check_disk(),
    ]


def main() -> int:
    lines = check_all()
    for line in lines:
        print(f"{line.status:<5} {line.what}" + (f"\n      -> {line.remedy}" if line.remedy else ""))
    broken = sum(line.status == "fix" for line in lines)
    print(f"\n{broken} to fix; other errors: docs/faq.md" if broken else "\nready: make tour")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
