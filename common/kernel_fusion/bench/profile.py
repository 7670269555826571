"""What one call of a rung does to the GPU, as its hardware counters tell: bytes, sectors, occupancy, the busiest unit.

`kernel-fusion profile OP` starts Nsight Compute (`ncu`) on a child, this module with --child. The child makes the
inputs of a case, warms each rung up, and calls it once between cudaProfilerStart and cudaProfilerStop. Before each call
stands a kernel of torch's that no rung launches: it tells in ncu's list where the next rung begins.

With --device cpu no GPU is needed: `rung_counts` has the emulated kernels count their accesses on a small case.
"""

import argparse
import csv
import dataclasses
import glob
import importlib
import json
import math
import pathlib
import re
import shutil
import sys
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from emulator import counts
from kernel_fusion import steps
from kernel_fusion.bench import benchmarks, rung_counts
from kernel_fusion.console import CommandFailed, UserError, last_lines, milliseconds, progress, run_logged
from kernel_fusion.report import results, syllabus

PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
MARKER = "spin_kernel"  # torch.cuda._sleep launches it
SECTORS, REQUESTS = (f"l1tex__t_{what}_pipe_lsu_mem_global_op_{{}}.sum" for what in ("sectors", "requests"))
WAVEFRONTS, CONFLICTS = (  # of shared memory: its passes, and those added since lanes wanted different rows of a bank
    f"l1tex__data_{what}_mem_shared_op_{{}}.sum" for what in ("pipe_lsu_wavefronts", "bank_conflicts_pipe_lsu")
)
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
REGISTERS = "launch__registers_per_thread"
TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
BLOCKS_BY = {
    f"launch__occupancy_limit_{key}": words
    for key, words in {
        "blocks": "the number of blocks",
        "registers": "registers",
        "shared_mem": "shared memory",
        "warps": "the number of threads",
    }.items()
}
# How busy a unit is, in percent of the most that it can do; and what it is called.
UNITS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("memory", "DRAM"),
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": ("L2 cache", "L2"),
    "l1tex__throughput.avg.pct_of_peak_sustained_active": ("L1 cache and shared memory", "L1"),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("instructions", "issue slots"),
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": ("integer and logic unit", "ALU"),
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": ("multiply-add unit", "FMA"),
    "sm__inst_executed_pipe_fp16.avg.pct_of_peak_sustained_active": ("half-precision unit", "FP16"),
    "sm__inst_executed_pipe_fp64.avg.pct_of_peak_sustained_active": ("float64 unit", "FP64"),
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": (
        "special-function unit (exp, tanh, reciprocal, conversions)",
        "XU",
    ),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("tensor cores", "tensor"),
}
BUSY = 60  # percent, from which a unit counts as what holds a kernel up
METRICS = [
    *(TIME, READ, WRITTEN, OCCUPANCY, REGISTERS),
    *(name.format(way) for name in (SECTORS, REQUESTS, WAVEFRONTS, CONFLICTS) for way in ("ld", "st")),
    *BLOCKS_BY,
    *UNITS,
]
SCALES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# What ncu prints where it is refused, and what to do about it.
REMEDIES = {
    r"ERR_NVGPUCTRPERM": (
        "The driver keeps the GPU's counters for administrators. Run the command as root:\n"
        '    sudo -E env PATH="$PATH" kernel-fusion profile …\n'
        "or let everybody read them: put this line into /etc/modprobe.d/nvidia-profiling.conf and restart:\n"
        "    options nvidia NVreg_RestrictProfilingToAdminUsers=0\n"
        "In a container, start it with --cap-add=SYS_ADMIN, or do the latter on its host."
    ),
    r"LibraryNotLoaded": (
        "ncu cannot load the driver's library for counters. Start the container with\n"
        "    --gpus all --env NVIDIA_DRIVER_CAPABILITIES=all --cap-add=SYS_ADMIN\n"
        "Where the machine's owner keeps the counters away, as many who rent GPUs do, only another machine helps."
    ),
    r"^==ERROR==.*driver resource was unavailable": (
        "Another program holds the GPU's counters: another profiler, or a monitor. NVIDIA's DCGM lets go of them with\n"
        "    dcgmi profile --pause"
    ),
    r"^==ERROR==.*not supported": (
        "This ncu does not know the GPU: install the newest Nsight Compute. Or the GPU is a part of one (MIG, vGPU), "
        "whose counters the host's owner must allow."
    ),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel as ncu saw it: its name, and what was counted, in seconds, bytes, percent and plain numbers."""

    name: str
    figures: dict[str, float]

    def __getitem__(self, metric: str) -> float:
        return self.figures[metric]


class Profile(NamedTuple):
    """One call of a rung: its kernels in the order of their launches."""

    rung: str
    kernels: list[Kernel]

    def sum(self, metric: str) -> float:
        """Of all kernels."""
        return sum(kernel[metric] for kernel in self.kernels)

    @property
    def dram_bytes(self) -> int:
        """What memory itself read and wrote."""
        return round(self.sum(READ) + self.sum(WRITTEN))

    @property
    def occupancy(self) -> float:
        """Percent of the warps that could have been resident, over the time of all kernels."""
        return sum(kernel[OCCUPANCY] * kernel[TIME] for kernel in self.kernels) / self.sum(TIME)

    def sectors(self, way: str) -> float | None:
        """Sectors a request over all kernels, for "ld" or "st"; None without requests."""
        requests = self.sum(REQUESTS.format(way))
        return self.sum(SECTORS.format(way)) / requests if requests else None

    @property
    def conflicts(self) -> float | None:
        """Percent of shared memory's wavefronts that bank conflicts made; None where threads do not use it."""
        wavefronts, conflicts = (
            sum(self.sum(name.format(way)) for way in ("ld", "st")) for name in (WAVEFRONTS, CONFLICTS)
        )
        return 100 * conflicts / wavefronts if wavefronts else None

    @property
    def longest(self) -> Kernel:
        """The kernel that takes most of the time."""
        return max(self.kernels, key=lambda kernel: kernel[TIME])


# ---- what ncu prints ----


def parse(text: str) -> list[Kernel]:
    """The kernels in a table that ncu printed with `--csv --page raw`, in the order of their launches.

    Lines before the table's header are ncu's messages. The row after the header holds the units, which are converted.

    Raises:
        UserError: there is no table, no kernel in it, or a metric is missing.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise UserError("ncu printed no table")
    table = csv.DictReader(lines[start:])
    found = {}
    units: dict[str, str] | None = None
    for row in table:
        if units is None:
            units = row
        elif row["ID"] and row["ID"].isdigit():  # a message may stand behind the table
            found[int(row["ID"])] = Kernel(row["Kernel Name"], _figures(row, units))
    if not found:
        raise UserError("ncu saw no kernel")
    return [found[number] for number in sorted(found)]


def _figures(row: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    figures = {}
    for metric in METRICS:
        figures[metric] = number(row.get(metric) or "") * scale(units.get(metric) or "")
        if math.isnan(figures[metric]) and metric not in (*BLOCKS_BY, *UNITS):
            raise UserError(f"ncu did not count {metric}; install the newest Nsight Compute")
    return figures


def number(text: str) -> float:
    """ "1,073.5" as 1073.5; NaN where ncu has no figure, as for a unit that the GPU lacks."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


def scale(unit: str) -> float:
    """What a figure in `unit` is multiplied with: "Mbyte" and "usecond" become bytes and seconds, "%" stays percent.

    Raises:
        UserError: the unit is unknown.
    """
    unit = unit.split("/")[0].strip()  # "register/thread"
    if unit in ("", "%", "byte", "second", "s", "sector", "request", "register", "block", "inst", "warp"):
        return 1.0
    for word in ("byte", "second", "sector", "request", "s"):
        prefix = unit.removesuffix(word)
        if prefix != unit and prefix in SCALES:
            return SCALES[prefix]
    raise UserError(f"ncu's table has a unit that is not known here: {unit!r}")


def by_rung(kernels: list[Kernel], rungs: list[str]) -> list[Profile]:
    """The kernels, told apart by the marker before each rung's own.

    Raises:
        UserError: there are not as many markers as rungs, or a rung without a kernel.
    """
    begins = [index for index, kernel in enumerate(kernels) if MARKER in kernel.name]
    if len(begins) != len(rungs):
        raise UserError(f"ncu saw {len(begins)} of {len(rungs)} rungs begin")
    profiles = []
    for rung, begin, end in zip(rungs, begins, [*begins[1:], len(kernels)], strict=True):
        if begin + 1 == end:
            raise UserError(f"rung '{rung}' launched no kernel")
        profiles.append(Profile(rung, kernels[begin + 1 : end]))
    return profiles


# ---- in words ----


def limit(kernel: Kernel) -> str:
    """What holds the kernel up, with the evidence: the unit that is busiest, or what is waited for."""
    found = sorted(((kernel[metric], *names) for metric, names in UNITS.items() if kernel[metric] >= 0), reverse=True)
    busiest = found[0][0] if found else 0
    if busiest >= BUSY:
        percent, words, unit = found[0]
        return f"{words}: {unit} {percent:.0f} % busy"
    seen = ", ".join(f"{unit} {percent:.0f} %" for percent, _, unit in found[:3])
    memory = max((percent for percent, _, unit in found if unit in ("DRAM", "L2")), default=busiest)
    more = "more bytes in flight" if memory >= 0.75 * busiest else "more that does not depend on the result awaited"
    return f"latency: nothing is more than {BUSY} % busy ({seen}); {more} would help"


def limits(profile: Profile) -> str:
    """The same for a rung: of several kernels, that which takes longest."""
    longest = profile.longest
    if len(profile.kernels) == 1:
        return limit(longest)
    share = 100 * longest[TIME] / profile.sum(TIME)
    return f"{short(longest.name)}, {share:.0f} % of the time, by {limit(longest)}"


def busy(kernel: Kernel) -> dict[str, float]:
    """Percent by the short names of the units that the GPU has."""
    return {unit: results.rounded(kernel[metric]) for metric, (_, unit) in UNITS.items() if kernel[metric] >= 0}


def shared_words(profile: Profile) -> str:
    """What bank conflicts cost, and what is not counted as one."""
    if profile.conflicts is None:
        return "no thread reads or writes any"
    return f"bank conflicts are {profile.conflicts:.0f} % of the wavefronts of loads and stores"


def occupancy_words(kernel: Kernel) -> str:
    """Occupancy, and what limits how many blocks a multiprocessor holds."""
    resident = f"{kernel[OCCUPANCY]:.0f} % of the warps resident"
    blocks = {words: kernel[metric] for metric, words in BLOCKS_BY.items() if kernel[metric] >= 0}
    if not blocks:
        return resident
    most = min(blocks.values())
    by = " and ".join(words for words, count in blocks.items() if count == most)
    return f"{resident}; {most:.0f} blocks fit a multiprocessor, by {by}"


def bytes_words(profile: Profile, predicted: int, l2: int) -> str:
    """Measured beside predicted DRAM bytes, and why they differ."""
    ratio = profile.dram_bytes / predicted
    missing = predicted - profile.dram_bytes
    if abs(ratio - 1) <= 0.02:
        return f"DRAM bytes are as predicted ({ratio:.3f}×)"
    if missing > 0:
        why = (
            f"what was written last lies in L2 ({_megabytes(l2)}) until after the kernel, and is not counted. "
            "In larger cases it weighs less"
        )
        if missing > l2:
            why = "more than L2 can hold: look at what the case counts as bytes"
        return f"DRAM bytes are {ratio:.3f}× the prediction. {_megabytes(missing)} are missing: {why}"
    whys = []
    if len(profile.kernels) > 1:
        whys.append(f"{len(profile.kernels)} launches: what one writes, the next reads again")
    scattered = [word for way, word in (("ld", "load"), ("st", "store")) if (profile.sectors(way) or 0) > 16.5]
    if scattered:
        whys.append(
            f"uncoalesced: a {' and a '.join(scattered)} touches more sectors than 32 lanes of 16 bytes need, and a "
            "sector that is used piece by piece is moved again when the cache has lost it"
        )
    if not whys:
        whys.append("something is moved more than once: read again after the cache has lost it, or scratch memory")
    return f"DRAM bytes are {ratio:.3g}× the prediction. {'; '.join(whys)}"


def short(name: str) -> str:
    """A kernel's name without return type, namespaces, and the arguments of template and function."""
    name = re.sub(r"\(anonymous namespace\)|<unnamed>", "_", name)
    name = re.sub(r"[<(].*", "", name)
    return name.split()[-1].split("::")[-1] if name.split() else "?"


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.4g} MB"


def table_of(profiles: list[Profile], predicted: int) -> Table:
    """A line for each kernel, and for each rung of several kernels a line for their sum."""
    table = Table("rung", "kernel")
    columns = ("time", "DRAM read", "written", "of predicted", "sectors a load", "a store", "occupancy", "registers")
    for column in columns:
        table.add_column(column, justify="right")
    for profile in profiles:
        parts = [(short(kernel.name), Profile(profile.rung, [kernel])) for kernel in profile.kernels]
        if len(parts) > 1:
            parts.append((f"sum of {len(parts)}", profile))
        for index, (name, part) in enumerate(parts):
            cells = [milliseconds(1e3 * part.sum(TIME)), _megabytes(part.sum(READ)), _megabytes(part.sum(WRITTEN))]
            cells += [f"{part.dram_bytes / predicted:.3f}×", _ratio(part.sectors("ld")), _ratio(part.sectors("st"))]
            cells += [f"{part.occupancy:.0f} %", f"{max(kernel[REGISTERS] for kernel in part.kernels):.0f}"]
            last = index == len(parts) - 1
            table.add_row("" if index else profile.rung, name, *cells, end_section=last)
    return table


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


# ---- what is profiled ----


def cases_of(step: steps.Step, op: str, size: str = "full", device: str = "cuda") -> list[benchmarks.Case]:
    """The cases of `op` in the step's benchmark.py; by default those that it times on a GPU.

    Raises:
        UserError: it times none.
    """
    found = [case for case in steps.load_benchmark(step).cases(size, device) if case.op == op]
    if not found:
        raise UserError(f"{step.folder}/benchmark.py has no case of {op}")
    return found


def chosen(cases: list[benchmarks.Case], case: int | None, dtype: str | None) -> int:
    """Which case is meant, counted from 0: the one of that number, counted from 1, or the largest of that type.

    Raises:
        UserError: there is no such case.
    """
    if case is not None:
        if not 1 <= case <= len(cases):
            listed = "\n".join(f"  {number}: {one.title()}" for number, one in enumerate(cases, start=1))
            raise UserError(f"--case must be one of these, got {case}:\n{listed}")
        return case - 1
    fits = [n for n, one in enumerate(cases) if dtype in (None, benchmarks.dtype_name(one.dtype))]
    if not fits:
        known = ", ".join(dict.fromkeys(benchmarks.dtype_name(one.dtype) for one in cases))
        raise UserError(f"--dtype must be one of {known}, got {dtype!r}")
    return max(fits, key=lambda n: (cases[n].direction == "forward", cases[n].bytes, cases[n].flops))


def find_ncu() -> str:
    """Nsight Compute's command: from the PATH, or from where NVIDIA's packages put it.

    Raises:
        UserError: it is not installed.
    """
    found = shutil.which("ncu") or next((path for place in PLACES for path in sorted(glob.glob(place))[::-1]), None)
    if found is None:
        raise UserError(
            "ncu (Nsight Compute) is neither on the PATH nor under /usr/local/cuda*/bin or /opt/nvidia/nsight-compute. "
            "Install it: apt install nsight-compute from NVIDIA's repository, or from "
            "https://developer.nvidia.com/nsight-compute"
        )
    return found


def command(ncu: str, table: pathlib.Path, child: list[str]) -> list[str]:
    """The command line of ncu: what it counts, and where it writes its table."""
    options = ["--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)]
    return [ncu, *options, "--metrics", ",".join(METRICS), sys.executable, "-m", "kernel_fusion.bench.profile", *child]


def child_arguments(step: steps.Step, op: str, case: int, rungs: list[str], launched: pathlib.Path) -> list[str]:
    """The arguments of the process that ncu watches."""
    named = [word for rung in rungs for word in ("--rung", rung)]
    return ["--child", step.module, "--op", op, "--case", str(case), *named, "--launched", str(launched)]


def measure(step: steps.Step, op: str, case: int, rungs: list[str]) -> tuple[list[Profile], dict[str, str]]:
    """Runs ncu on one call of each rung.

    Returns:
        The profiles, and the reasons of rungs that refuse the case.

    Raises:
        UserError: ncu is missing, or is refused the counters; the text says what to do.
    """
    folder = steps.ROOT / "build" / "profile"
    log, table, launched = (folder / f"{op}.{ending}" for ending in ("log", "csv", "json"))
    for path in (table, launched):
        path.unlink(missing_ok=True)
    words = command(find_ncu(), table, child_arguments(step, op, case, rungs, launched))
    failure = ""
    try:
        run_logged(words, log, cwd=steps.ROOT)
    except CommandFailed as error:
        failure = f"ended with code {error.code}"
    if not failure and not launched.exists():
        failure = "did not run the rungs"
    printed = {path: path.read_text(encoding="utf-8", errors="replace") for path in (table, log) if path.exists()}
    check_allowed("\n".join(printed.values()))
    if failure:
        raise UserError(f"{last_lines(log, 15)}\nncu {failure}; its output is in {folder}")
    done = json.loads(launched.read_text(encoding="utf-8"))
    profiles = by_rung(parse(printed.get(table, "")), done["ran"]) if done["ran"] else []
    return profiles, done["refused"]


def check_allowed(said: str) -> None:
    """Returns where ncu was let do its work.

    Args:
        said: all that it printed.

    Raises:
        UserError: it was refused the counters; the text says why and what to do.
    """
    for line in said.splitlines():
        for pattern, remedy in REMEDIES.items():
            if re.search(pattern, line):
                raise UserError(f"{line.strip('= ')}\n{remedy}")


# ---- the child ----


def exercise(case: benchmarks.Case, rungs: list[str]) -> dict:
    """Calls each rung once where ncu looks: warm, with an empty L2, after a marker.

    Returns:
        {"ran": rungs in order, "refused": {rung: reason}}.
    """
    device = torch.device("cuda")
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(4 * l2, 1 << 28), dtype=torch.int8, device=device)
    ran, refused = [], {}
    with torch.set_grad_enabled(case.direction == "backward"):
        inputs = case.inputs(device)
        for rung in rungs:
            own = benchmarks.own_copy(inputs)
            try:
                for _ in range(2):
                    case.run(*own, rung=rung)
            except (ValueError, RuntimeError) as refusal:
                if f"rung '{rung}'" not in str(refusal):
                    raise
                refused[rung] = str(refusal)
                continue
            flush.zero_()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda._sleep(1)
            case.run(*own, rung=rung)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
            ran.append(rung)
    return {"ran": ran, "refused": refused}


# ---- counts on the CPU ----


def run_on_cpu(options: argparse.Namespace, console: Console) -> None:
    """`kernel-fusion profile OP --device cpu`: what each rung's kernels access, line by line.

    Raises:
        UserError: a name is unknown, or the library cannot be built.
    """
    step = syllabus.step_of(options.op)
    if options.save:
        raise UserError("--save writes what a GPU's counters say, and goes with --device cuda only")
    known = [rung.name for rung in syllabus.rungs(step, options.op)]
    for rung in options.rung or []:
        if rung not in known:
            raise UserError(f"--rung must be one of {', '.join(known)}, got {rung!r}")
    with progress(f"building {step.folder} with kernels that count") as on_progress:
        library = rung_counts.build(step, [options.op], on_progress)
    rung_counts.use_library(step, library)
    cases = cases_of(step, options.op, "emulated", "cpu")
    number = chosen(cases, options.case, options.dtype)
    title = f"case {number + 1} of {len(cases)}: {cases[number].title()}"
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(f"{cases[number].bytes:,} bytes must be read or written, once each", markup=False)
    wanted = [rung_counts.Wanted(options.op, rung, number) for rung in options.rung or known]
    with progress("running") as on_progress:
        counted = rung_counts.count(step, library, wanted, lambda one: on_progress(one.rung))
    found: dict[str, list[counts.Kernel]] = {}
    for one, kernels in counted.items():
        console.rule(one.rung, align="left")
        if isinstance(kernels, str):
            console.print(kernels, markup=False, soft_wrap=True)
        else:
            found[one.rung] = kernels
            counts.show(kernels, console)
    if options.json:
        listed = {rung: [kernel.as_json() for kernel in kernels] for rung, kernels in found.items()}
        text = json.dumps({"op": options.op, "case": cases[number].title(), "rungs": listed}, indent=1)
        results.replace(options.json, text + "\n")


# ---- results ----


def save(path: pathlib.Path, case: benchmarks.Case, profiles: list[Profile]) -> None:
    """Writes the counters into the rungs' rows of a results file.

    Raises:
        ResultsError: as find_rows.
    """
    loaded = results.read(path)
    rows = find_rows(loaded, case, [profile.rung for profile in profiles])
    for profile, row in zip(profiles, rows, strict=True):
        row["dram_bytes"] = profile.dram_bytes
        load, store = profile.sectors("ld"), profile.sectors("st")
        row["sectors_per_request"] = {"load": results.rounded(load), "store": results.rounded(store)}
        row["profile"] = {
            "kernels": len(profile.kernels),
            "occupancy": results.rounded(profile.occupancy),
            "registers": int(max(kernel[REGISTERS] for kernel in profile.kernels)),
            "limit": limits(profile),
            "busy": busy(profile.longest),
            "conflicts": results.rounded(profile.conflicts),
            **benchmarks.provenance(),
        }
    results.write(loaded)


def find_rows(loaded: results.Results, case: benchmarks.Case, rungs: list[str]) -> list[dict]:
    """The rows of these rungs at this case.

    Raises:
        ResultsError: a rung has none.
    """
    rows = {row["impl"]: row for row in loaded.rows if results.case_key(row) == case.key() and results.is_ours(row)}
    for rung in rungs:
        if rung not in rows:
            raise results.ResultsError(
                f"--save: {loaded.path} has no row of {case.title()}, '{rung}'; measure it first: "
                f"kernel-fusion bench --op {case.op} --merge"
            )
    return [rows[rung] for rung in rungs]


# ---- the command ----


def run(options: argparse.Namespace, console: Console) -> None:
    """Does what the arguments say.

    Raises:
        UserError: there is no GPU or no ncu, the counters are refused, or a name is unknown.
    """
    if options.device == "cpu":
        run_on_cpu(options, console)
        return
    if options.json:
        raise UserError("--json goes with --device cpu; on a GPU, --save writes the figures into results/<gpu>.json")
    step = syllabus.step_of(options.op)
    if not torch.cuda.is_available():
        raise UserError(
            f"profile needs a GPU, and torch {torch.__version__} sees none; --device cpu counts accesses without one"
        )
    find_ncu()
    cases = cases_of(step, options.op)
    number = chosen(cases, options.case, options.dtype)
    case = cases[number]
    known = importlib.import_module(step.module).rungs(options.op, "cuda")
    if not known:
        raise UserError(f"{step.folder} was built without CUDA; build it where nvcc is: {steps.build_command(step)}")
    for rung in options.rung or []:
        if rung not in known:
            raise UserError(f"--rung must be one of {', '.join(known)}, got {rung!r}")
    rungs = options.rung or known
    path = benchmarks.results_path(step, torch.device("cuda"))
    if options.save:  # before ncu takes its time
        if not path.exists():
            raise UserError(f"--save: there is no {path}; measure first: kernel-fusion bench {step.folder}")
        find_rows(results.read(path), case, options.rung or [])
    console.print(f"case {number + 1} of {len(cases)}: {case.title()}", style="bold", markup=False, soft_wrap=True)
    with progress(f"running {len(rungs)} rungs under Nsight Compute"):
        profiles, refused = measure(step, options.op, number, rungs)
    for reason in refused.values():
        console.print(reason, markup=False, soft_wrap=True)
    if not profiles:
        raise UserError("every rung refuses this case")
    show(profiles, case, console)
    if options.save:
        save(path, case, profiles)
        console.print(f"written: {path}", soft_wrap=True)


def show(profiles: list[Profile], case: benchmarks.Case, console: Console) -> None:
    """Prints the table, and for each rung what holds it up."""
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    console.print(f"predicted: {case.bytes:,} bytes, read or written once", markup=False)
    console.print(table_of(profiles, case.bytes))
    console.print(
        "A sector is 32 bytes. A request, 32 lanes side by side, needs 2, 4, 8 or 16 sectors where each lane takes 2, "
        "4, 8 or 16 bytes; with 32, each lane has a sector of its own. Caches were empty: compare bytes here, and "
        "times in the benchmark.",
        markup=False,
    )
    for profile in profiles:
        console.print(f"\n{profile.rung}", style="bold", markup=False)
        for line in (
            f"limit: {limits(profile)}",
            bytes_words(profile, case.bytes, l2),
            f"occupancy: {occupancy_words(profile.longest)}",
            "busy: " + ", ".join(f"{unit} {percent:.0f} %" for unit, percent in busy(profile.longest).items()),
            f"shared memory: {shared_words(profile)}",
        ):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def main() -> int:
    """python -m kernel_fusion.bench.profile --child …: what ncu watches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", required=True, metavar="STEP", help="run rungs of this step, as ncu watches")
    parser.add_argument("--op", required=True)
    parser.add_argument("--case", required=True, type=int, metavar="N", help="counted from 0")
    parser.add_argument("--rung", required=True, action="append")
    parser.add_argument("--launched", required=True, type=pathlib.Path, metavar="FILE", help="gets what ran")
    options = parser.parse_args()
    step = steps.find(options.child)
    done = exercise(cases_of(step, options.op)[options.case], options.rung)
    results.replace(options.launched, json.dumps(done))
    return 0


if __name__ == "__main__":
    sys.exit(main())
