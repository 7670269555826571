"""What Nsight Compute counts of a rung's kernels: read from the table that it prints, and put into words."""

import csv
import dataclasses
import math
import re
from typing import NamedTuple

from rich.table import Table

from kernel_fusion.console import UserError, milliseconds
from kernel_fusion.report import results

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
