"""What each rung of a step asks of memory, counted on the CPU.

The step's library is linked once more, with emulated kernels that count their accesses; all else in it is what the
step's own build compiled. A child, this module, loads it and runs one rung after the other.
"""

import ctypes
import functools
import importlib.machinery
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from emulator import counts
from emulator.ninja_file import is_clang
from kernel_fusion import steps
from kernel_fusion.build import counting_name
from kernel_fusion.console import CommandFailed, UserError, last_lines, run_logged
from kernel_fusion.report import results

SECTOR_BYTES = 32


def why_not() -> str:
    """Why nothing can be counted on this machine; empty where it can."""
    cxx = os.environ.get("CXX", "c++")
    if is_clang(cxx):
        return f"counting needs g++, and {cxx} is clang; choose it by CXX=g++"
    missing = [tool for tool in ("addr2line", "nm") if shutil.which(tool) is None]
    return f"counting needs {' and '.join(missing)}, of the package binutils" if missing else ""


def ninja_progress(tell: Callable[[str], Any], line: str) -> None:
    """Tells how far a build is, "12 of 79 files" for instance, where `line` is ninja's that says it."""
    if progress := re.match(r"\[(\d+)/(\d+)\] ", line):
        tell(f"{progress[1]} of {progress[2]} files")


def _run(command: list[str], log: pathlib.Path, folder: pathlib.Path, on_line: Callable[[str], Any]) -> None:
    try:
        run_logged(command, log, cwd=folder, on_line=on_line)
    except CommandFailed as error:
        raise UserError(f"{last_lines(log, 15)}\n{error}") from error


class Wanted(NamedTuple):
    """A rung on one of its step's cases of size "emulated", which are numbered from 0 within the op."""

    op: str
    rung: str
    case: int = 0


def build(
    step: steps.Step, kernels: Iterable[str], on_progress: Callable[[str], Any] = lambda progress: None
) -> pathlib.Path:
    """Builds the step's library with kernels that count, in build/counting; the installed one stays as it is.

    `kernels`: "softmax/v1_naive", or "softmax" for all of an op; the others run as they always do. `on_progress` gets
    "12 of 79 files" and the like as the build goes on.
    """
    counting = ",".join(sorted(set(kernels)))
    folder = steps.ROOT / "build" / "counting" / step.folder / counting_name(counting)
    log = folder / "build.log"
    command = [sys.executable, "setup.py", "build_ext", f"--counting={counting}", f"--build-lib={folder}"]
    _run(command, log, step.path, functools.partial(ninja_progress, on_progress))
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    found = next((path for suffix in suffixes if (path := folder / step.module / f"_C{suffix}").exists()), None)
    if found is None:
        raise UserError(f"{folder} has no library after the build; its output is in {log}")
    return found


# ---- which kernels a rung launches: its own, and those of the rungs that it is made of ----


def take_launched(module: types.ModuleType) -> tuple[int, ...]:
    """What emulated rungs have launched since the last call: an address in the library for each kernel.

    Args:
        module: the step's.
    """
    path = module._C.__file__
    take = ctypes.CDLL(path).kf_simt_take_launched
    take.argtypes, take.restype = [ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t], ctypes.c_size_t
    addresses = (ctypes.c_size_t * 4096)()
    count = take(addresses, len(addresses))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        begin = min(int(line.split("-")[0], 16) for line in maps if line.endswith(f" {os.path.realpath(path)}\n"))
    return tuple(address - begin for address in addresses[:count])


def launched_kernels(step: steps.Step, addresses: Iterable[int]) -> set[str]:
    """The kernels, as `build` takes them, in whose sources those stand that were launched from the installed library.

    Args:
        step: whose library it is.
        addresses: as `take_launched` gives them.
    """
    names: dict[int, set[str]] = {}
    for address, _, name in _symbols(pathlib.Path(str(steps.load(step.module).__file__))):
        names.setdefault(address, set()).add(name)
    wanted = set().union(*(names.get(address, set()) for address in addresses))
    found = set()
    for path in objects(step):
        defined = {name: kind for _, kind, name in _symbols(path) if name in wanted}
        if defined:
            found.add(f"{path.parent.name}/{path.name.removesuffix('.cu.o')}")
        # Of what several objects may hold, the linker has taken the first; what is local another may hold too.
        wanted -= {name for name, kind in defined.items() if kind in "uVW"}
    return found


def _symbols(path: pathlib.Path) -> Iterator[tuple[int, str, str]]:
    """Address, kind and name of what an object or a library defines."""
    for line in counts.output(["nm", "--defined-only", str(path)]).splitlines():
        address, kind, name = line.split(maxsplit=2)
        yield int(address, 16), kind, name


def objects(step: steps.Step) -> list[pathlib.Path]:
    """The emulated kernels of the step's library, in the order in which they were linked."""
    (written,) = steps.ROOT.glob(f"build/temp.*/{step.folder}.ninja")
    (linked,) = re.findall(r": link (.*)", written.read_text(encoding="utf-8"))
    return [pathlib.Path(path) for path in linked.split() if path.endswith(".cu.o") and "/emulated/" in path]


def count(
    step: steps.Step,
    library: pathlib.Path,
    wanted: Iterable[Wanted],
    on_rung: Callable[[Wanted], Any] = lambda one: None,
) -> dict[Wanted, list[counts.Kernel] | str]:
    """Runs these rungs once each. Returns their kernels with their counts, or why a rung refuses its case."""
    wanted = list(wanted)
    # A folder of its own, since somebody may count with this library at the same time; it stays after a failure.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="counts-", dir=library.parents[1]))
    log, plan = folder / "count.log", folder / "plan.json"
    results.replace(plan, json.dumps(wanted))

    def read(line: str) -> None:
        if begins := re.fullmatch(r"rung (\d+)", line):
            on_rung(wanted[int(begins[1])])

    command = [sys.executable, "-m", "kernel_fusion.bench.rung_counts", step.module, str(library), str(plan)]
    _run(command, log, steps.ROOT, read)
    refused = json.loads((folder / "refused.json").read_text(encoding="utf-8"))
    counted = {
        one: refused[str(number)] if str(number) in refused else counts.read(folder / f"{number}.json", library)
        for number, one in enumerate(wanted)
    }
    shutil.rmtree(folder)
    return counted


class Moved(NamedTuple):
    """What kernels ask of global memory together: sectors a request of loads and stores, and bytes, sector by sector.

    Atomics count as stores. A ratio is None where there are no such requests. used: the part of the loads' sectors that
    the lanes asked for; where several asked for the same bytes, it may be more than 1.
    """

    load: float | None
    store: float | None
    bytes: int
    used: float


def moved(kernels: Iterable[counts.Kernel]) -> Moved:
    """Adds up the kernels of one call of a rung."""
    loads, stores = counts.Access(), counts.Access()
    for kernel in kernels:
        loads.add(kernel.total["global load"])
        stores.add(kernel.total["global store"])
        stores.add(kernel.total["global atomic"])
    sectors = loads.sectors + stores.sectors
    used = loads.bytes / SECTOR_BYTES / max(1, loads.sectors)
    return Moved(loads.sectors_per_request, stores.sectors_per_request, sectors * SECTOR_BYTES, used)


# ---- the child ----


def use_library(step: steps.Step, library: pathlib.Path) -> None:
    """Loads `library` as the step's compiled part, in place of the installed one. To be called before its import."""
    import torch  # noqa: F401  its libraries must be loaded before the extension that links to them

    steps.load_file(f"{step.module}._C", library)


def run_all(step: steps.Step, library: pathlib.Path, wanted: list[Wanted], folder: pathlib.Path) -> dict[int, str]:
    """Runs the rungs in this process, and writes the counts of the nth into `folder`, as n.json.

    Returns:
        By number, why a rung refuses its case.
    """
    import torch

    from kernel_fusion.bench import measuring

    use_library(step, library)
    write_counts = ctypes.CDLL(str(library)).kf_simt_write_counts
    write_counts.argtypes, write_counts.restype = [ctypes.c_char_p], None
    cases: dict[str, list[measuring.Case]] = {}
    for case in steps.load_benchmark(step).cases("emulated", "cpu"):
        cases.setdefault(case.op, []).append(case)
    refused = {}
    for number, one in enumerate(wanted):
        print(f"rung {number}", flush=True)
        case = cases[one.op][one.case]
        with torch.set_grad_enabled(case.direction == "backward"):
            inputs = measuring.own_copy(case.inputs(torch.device("cpu")))
            try:
                case.run(*inputs, rung=one.rung)
            except (ValueError, RuntimeError) as refusal:
                if f"rung '{one.rung}'" not in str(refusal):
                    raise
                refused[number] = str(refusal)
        write_counts(os.fsencode(folder / f"{number}.json"))
    return refused


def main(step: str, library: str, plan: str) -> None:
    """The child. `library`: the step's compiled part, with counters. `plan`: JSON, a list of op, rung and case."""
    wanted = [Wanted(*one) for one in json.loads(pathlib.Path(plan).read_text(encoding="utf-8"))]
    folder = pathlib.Path(plan).parent
    refused = run_all(steps.find(step), pathlib.Path(library), wanted, folder)
    results.replace(folder / "refused.json", json.dumps(refused))


if __name__ == "__main__":
    main(*sys.argv[1:])
