"""What a program's kernels ask of memory, counted on the CPU: by kernel and by source line, in a GPU's own units.

count/ counts, and writes addresses of code; here they become source lines. A request is what the lanes of a warp ask
for in one instruction. A sector is 32 bytes of global memory. A wavefront is what shared memory does at once: at most
one word from each of its 32 banks; those that an access needs beyond its width are conflicts.
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

import emulator
from emulator import programs
from emulator.console import UserError
from emulator.rewriter.rewrite import Rewriter

KINDS = [f"{space} {kind}" for space in ("global", "shared") for kind in ("load", "store", "atomic")]
NEAR = 6  # lines between two that count, which the listing still shows


@dataclasses.dataclass
class Access:
    """Accesses of one kind."""

    requests: int = 0  # warp-level instructions
    lanes: int = 0  # that took part, of all requests together
    partial: int = 0  # requests in which not all of the warp's lanes took part
    bytes: int = 0  # what the lanes asked for
    sectors: int = 0  # of global memory, distinct within each request
    wavefronts: int = 0  # of shared memory; an atomic's are those of its addresses, lanes that meet aside
    conflicts: int = 0

    def add(self, other: "Access") -> None:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def sectors_per_request(self) -> float | None:
        return self.sectors / self.requests if self.requests and self.sectors else None


@dataclasses.dataclass
class Counts:
    """Of a kernel or a line: accesses by kind ("global load"), barriers that blocks passed, and once for each warp and
    time shuffles, reductions (`__reduce_add_sync`) among them, and branches that parted its lanes."""

    access: dict[str, Access] = dataclasses.field(default_factory=dict)
    barriers: int = 0
    shuffles: int = 0
    divergent_branches: int = 0

    def __getitem__(self, kind: str) -> Access:
        if kind not in KINDS:
            raise KeyError(kind)
        return self.access.get(kind, Access())

    def add(self, other: "Counts") -> None:
        for kind, access in other.access.items():
            self.access.setdefault(kind, Access()).add(access)
        self.barriers += other.barriers
        self.shuffles += other.shuffles
        self.divergent_branches += other.divergent_branches

    def as_json(self) -> dict:
        found: dict = {}
        for kind in KINDS:
            if kind in self.access:
                access = dataclasses.asdict(self.access[kind])
                for name in ("wavefronts", "conflicts") if kind.startswith("global") else ("sectors",):
                    del access[name]
                if kind.startswith("global"):
                    access["sectors_per_request"] = self.access[kind].sectors_per_request
                found[kind.replace(" ", "_")] = access
        return {**found, **{name: getattr(self, name) for name in ("barriers", "shuffles", "divergent_branches")}}


@dataclasses.dataclass(frozen=True)
class Frame:
    """A place in the source."""

    function: str
    file: str
    line: int


@dataclasses.dataclass
class Kernel:
    """A kernel, over all its launches."""

    name: str  # with its template arguments
    launches: list[dict]  # {"grid": [x, y, z], "block": …, "shared": bytes, "times": n} for each shape
    blocks: int  # that have run
    total: Counts = dataclasses.field(default_factory=Counts)
    # By chain of calls, innermost first; the last is a line of the kernel itself.
    places: dict[tuple[Frame, ...], Counts] = dataclasses.field(default_factory=dict)

    @property
    def file(self) -> str | None:
        """Where the kernel itself stands; None where nothing was counted."""
        return next((chain[-1].file for chain in self.places), None)

    def by_line(self, file: str) -> dict[int, Counts]:
        """What the lines of `file` do, with what they call in other files."""
        lines: dict[int, Counts] = {}
        for chain, counts in self.places.items():
            frame = next((frame for frame in chain if frame.file == file), None)
            if frame is not None:
                lines.setdefault(frame.line, Counts()).add(counts)
        return dict(sorted(lines.items()))

    def as_json(self) -> dict:
        lines = [
            {**dataclasses.asdict(chain[0]), "called_from": [dataclasses.asdict(f) for f in chain[1:]], **c.as_json()}
            for chain, c in sorted(self.places.items(), key=lambda item: [(f.file, f.line) for f in item[0][::-1]])
        ]
        launch = {"launches": self.launches, "blocks": self.blocks}
        return {"name": self.name, **launch, "total": self.total.as_json(), "lines": lines}


# ---- from what the program wrote ----


def environment(binary: pathlib.Path, written: pathlib.Path, sources: Iterable[str] = ()) -> dict[str, str]:
    """What tells a counting program or library to write its counts to `written` when the process ends. `sources` are
    texts in which `__constant__` variables are declared: reading these is not counted."""
    found = {"KF_SIMT_COUNT": str(written)}
    names = {name for text in sources for name in re.findall(r"\b__constant__\b[^;={(]*?\b(\w+)\s*[\[;={]", text)}
    if names:
        listed = [line.split(maxsplit=3) for line in output(["nm", "-C", "-S", str(binary)]).splitlines()]
        known = (words for words in listed if len(words) == 4 and words[3].split("::")[-1] in names)
        found["KF_SIMT_COUNT_CONSTANT"] = ",".join(f"{begin}:{size}" for begin, size, *_ in known)
    return found


def read(written: pathlib.Path, binary: pathlib.Path) -> list[Kernel]:
    """The counts that a program wrote, in the order of the kernels' places in the source. Raises UserError where it
    wrote none, since it was ended before its end, or addr2line is missing."""
    if not written.exists():
        raise UserError(f"{binary} wrote no counts: it did not come to its end")
    raw = json.loads(written.read_text(encoding="utf-8"))
    frames = frames_of(binary, {pc for place in raw["places"] for pc in place["pc"]})
    kernels = [Kernel(_without_aliases(one["name"]), one["launches"], one["blocks"]) for one in raw["kernels"]]
    for place in raw["places"]:
        kernel = kernels[place["kernel"]]
        chain = within_kernel(kernel.name, [frame for pc in place["pc"] for frame in frames[pc]])
        counts = _counts(place, chain)
        if counts is not None:
            theirs = [frame for frame in chain if not is_emulation(frame.file)] or chain[-1:]
            kernel.places.setdefault(tuple(theirs), Counts()).add(counts)
    for kernel, one in zip(kernels, raw["kernels"], strict=True):
        for event in ("barriers", "shuffles"):
            for where in one[event]:
                at = (Frame("", where["file"], where["line"]),)
                known = next((place for place in kernel.places if place[0].file == at[0].file), at)
                of = at if known[-1].file == at[0].file else (*at, known[-1])
                kernel.places.setdefault(of, Counts()).add(Counts(**{event: where["times"]}))
        for counts in kernel.places.values():
            kernel.total.add(counts)
    return sorted(kernels, key=lambda k: (k.file or "", min((c[-1].line for c in k.places), default=0), k.name))


def _without_aliases(name: str) -> str:
    """ "f [with T = float; int64_t = long int]" without the names of types that are no parameters of the template."""
    before, _, after = name.partition(" [with ")
    parameters = [one for one in after.removesuffix("]").split("; ") if re.match(r"(?!\w+_t\b)[\w ]+ = ", one)]
    return f"{before} [with {'; '.join(parameters)}]" if parameters else before


def _counts(place: dict, chain: list[Frame]) -> Counts | None:
    """What a place adds; None where it is the emulation's own doing: the launch, or a step of an atomic."""
    if not chain or (is_emulation(chain[0].file) and place["kind"] == "branch"):
        return None
    if place["kind"] == "branch":
        return Counts(divergent_branches=place["partial"]) if place["partial"] else None
    if place["reading"] == ("members" if is_emulation(chain[0].file) else "whole"):
        return None
    kind = place["kind"]
    if kind == "atomic load":  # the first step of an atomic that is made of a loop; else a load
        if any(plain_name(frame.function) == "atomic_update" for frame in chain):
            return None
        kind = "load"
    names = ("requests", "lanes", "partial", "sectors", "wavefronts", "conflicts")
    access = Access(bytes=place["lanes"] * place["size"], **{name: place[name] for name in names})
    return Counts({f"{place['space']} {kind}": access})


def is_emulation(file: str) -> bool:
    return file.startswith(f"{emulator.FOLDER / 'include'}{os.sep}")


def within_kernel(kernel: str, chain: list[Frame]) -> list[Frame]:
    """The chain up to the kernel; nothing if it does not come there, as what copies a kernel's arguments."""
    name = plain_name(kernel.split(" [")[0])
    for number, frame in enumerate(chain):
        if plain_name(frame.function) == name:
            return chain[: number + 1]
    return []


def plain_name(function: str) -> str:
    """A function's name without namespaces, arguments, and what the compiler adds."""
    function = re.sub(r"\(anonymous namespace\)|\{anonymous\}", "_", function)
    before = re.sub(r"[<(\[].*", "", function).split()
    return before[-1].split("::")[-1] if before else ""


def frames_of(binary: pathlib.Path, addresses: set[str]) -> dict[str, list[Frame]]:
    """For each address the functions it stands in, innermost first; more than one where they were inlined."""
    if not addresses:
        return {}
    ordered = sorted(addresses)
    command = ["addr2line", "-a", "-i", "-f", "-C", "-e", str(binary)]
    lines = output(command, "".join(f"0x{address}\n" for address in ordered)).splitlines()
    found: dict[str, list[Frame]] = {}
    addressed = iter(lines)
    current: list[Frame] = []
    for line in addressed:
        if re.fullmatch(r"0x[0-9a-f]{16}", line):
            current = found[format(int(line, 16), "x")] = []
            continue
        place = re.match(r"(.*?):(\d+|\?)(?: \(discriminator \d+\))?$", next(addressed))
        number = place[2] if place else "?"
        current.append(Frame(line, os.path.normpath(place[1]) if place else "?", int(number) if number != "?" else 0))
    return found


def output(command: list[str], given: str | None = None) -> str:
    """What one of binutils' programs prints, `given` being its input. Raises UserError where it is not there."""
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}, which tells source lines, is missing; binutils has it: apt install binutils")
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True).stdout


# ---- to people, and to programs ----


def show(kernels: list[Kernel], console: Console) -> None:
    """Prints each kernel's totals, and the lines of its source that count."""
    for kernel in kernels:
        console.print(f"\n{kernel.name}", style="bold", markup=False, soft_wrap=True)
        for launch in kernel.launches:
            grid, block = ("×".join(map(str, _trimmed(launch[key]))) for key in ("grid", "block"))
            times = f", {launch['times']} times" if launch["times"] > 1 else ""
            shared = f", {launch['shared']} bytes of dynamic shared memory" if launch["shared"] else ""
            console.print(f"grid {grid}, block {block}{shared}{times}", style="dim", markup=False)
        for line in summary(kernel.total):
            console.print(f"  {line}", markup=False, soft_wrap=True)
        if kernel.file is not None:
            console.print(listing(kernel, kernel.file, console.width))


def _trimmed(dimensions: list[int]) -> list[int]:
    while len(dimensions) > 1 and dimensions[-1] == 1:
        dimensions = dimensions[:-1]
    return dimensions


def summary(counts: Counts) -> list[str]:
    """A line for each kind of access, then barriers, shuffles and divergent branches."""
    lines = []
    for kind in KINDS:
        access = counts[kind]
        if not access.requests:
            continue
        words = f"{kind}s: {access.requests:,} requests, {access.bytes:,} bytes, "
        if kind.startswith("global"):
            words += f"{access.sectors:,} sectors, {access.sectors_per_request:.3g} a request"
        else:
            words += f"{access.wavefronts:,} wavefronts, {access.conflicts:,} of them by bank conflicts"
        if access.partial:
            words += f"; {access.partial:,} without all lanes"
        lines.append(words)
    if counts.barriers:
        lines.append(f"barriers passed by blocks: {counts.barriers:,}")
    if counts.shuffles:
        lines.append(f"shuffles by warps: {counts.shuffles:,}")
    if counts.divergent_branches:
        lines.append(f"branches that parted a warp's lanes: {counts.divergent_branches:,}")
    return lines


def _cells(counts: Counts) -> dict[str, str]:
    """The columns of the listing that this line has something for."""
    cells = {}
    for kind in KINDS[:3]:
        access = counts[kind]
        if access.requests:
            cells[kind.split()[1] + "s"] = f"{access.requests:,} × {access.sectors_per_request:.3g}"
    shared = Access()
    for kind in KINDS[3:]:
        shared.add(counts[kind])
    if shared.requests:
        cells["shared"] = f"{shared.requests:,}"
        cells["conflicts"] = f"{shared.conflicts:,}"
    if counts.barriers:
        cells["barriers"] = f"{counts.barriers:,}"
    if counts.shuffles:
        cells["shuffles"] = f"{counts.shuffles:,}"
    if counts.divergent_branches:
        cells["diverged"] = f"{counts.divergent_branches:,}"
    return cells


COLUMNS = ("loads", "stores", "atomics", "shared", "conflicts", "barriers", "shuffles", "diverged")


def listing(kernel: Kernel, file: str, width: int) -> Table:
    """The source around the lines that count. Global accesses are requests × sectors a request."""
    lines = kernel.by_line(file)
    cells = {number: _cells(counts) for number, counts in lines.items()}
    used = [name for name in COLUMNS if any(name in one for one in cells.values())]
    path = pathlib.Path(file)
    source = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("line", *used):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(path.name, no_wrap=True)
    taken = [max(len(name), *(len(one.get(name, "")) for one in cells.values())) + 2 for name in used]
    room = max(width - sum(taken) - len(str(max(lines))) - 6, 20)  # the source is cut short, the figures are not
    before = None
    for number in lines:
        shown = range(number, number + 1)
        if before is not None and number - before <= NEAR:
            shown = range(before + 1, number + 1)
        elif before is not None:
            table.add_row("⋮")
        for at in shown:
            text = Text(source[at - 1].expandtabs(4) if at <= len(source) else "")
            text.truncate(room, overflow="ellipsis")
            counted = cells.get(at, {})
            row = [str(at), *(counted.get(name, "") for name in used)]
            table.add_row(*row, text, style="" if counted else "dim")
        before = number
    return table


def figures(kernel: Kernel) -> dict[str, int]:
    """What a GPU's counters tell as well, by the names of the comparison's table."""
    found = {}
    for kind in KINDS:
        access = kernel.total[kind]
        found[f"{kind} requests"] = access.requests
        if kind.startswith("global"):
            found[f"{kind} sectors"] = access.sectors
        elif kind != "shared atomic":
            found[f"{kind} wavefronts"] = access.wavefronts
            found[f"{kind} conflicts"] = access.conflicts
    return found


def save(kernels: list[Kernel], path: pathlib.Path) -> None:
    """Writes the counts as JSON: {"kernels": [{name, launches, blocks, total, lines}]}."""
    found = {"kernels": [kernel.as_json() for kernel in kernels]}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


# ---- beside a GPU's counters ----

COMPARED = emulator.FOLDER / "results" / "h200-counts.json"
COMPARE = "python emulator/tests/counts/compare_with_ncu.py --out emulator/results/h200-counts.json"
NO_COMPARISON = f"""
Not yet compared with a GPU. On a machine with one and with Nsight Compute,

    {COMPARE}

counts both ways, and `kernel-fusion report` writes the table here.

"""


def compared(path: pathlib.Path = COMPARED) -> dict:
    """What compare_with_ncu.py wrote. What it left out of a kernel is 0."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    for both in stored["kernels"].values():
        both.update({side: collections.Counter(found) for side, found in both.items()})
    return stored


def comparison(path: pathlib.Path = COMPARED) -> str:
    """The table of the chapter: for each kernel sectors a request, bytes and conflicts, emulated beside ncu's."""
    if not path.exists():
        return NO_COMPARISON
    stored = compared(path)
    where = stored["environment"]
    columns = ["kernel", "sectors a load", "a store", "bytes moved", "bank conflicts, loads", "stores"]
    lines = [
        "",
        f"Counted here / by ncu on {where['gpu']}, CUDA {where['cuda']}, driver {where['driver']}, {where['date']}.",
        "",
        f"| {' | '.join(columns)} |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    for name, both in stored["kernels"].items():
        here, there = both["emulated"], both["ncu"]
        cells = [f"`{name}`"]
        for way in ("load", "store"):
            cells.append(" / ".join(_ratio(one, f"global {way}") for one in (here, there)))
        moved = (32 * (one["global load sectors"] + one["global store sectors"]) for one in (here, there))
        cells.append(" / ".join(f"{count:,}" for count in moved))
        for way in ("load", "store"):
            cells.append(" / ".join(f"{one[f'shared {way} conflicts']:,}" for one in (here, there)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def _ratio(found: dict[str, int], kind: str) -> str:
    requests = found[f"{kind} requests"]
    return f"{found[f'{kind} sectors'] / requests:.3g}" if requests else "–"


# ---- a program ----


def own_sources(source: pathlib.Path, include_dirs: tuple[pathlib.Path, ...] = ()) -> list[str]:
    """The texts of a program's own files."""
    rewriter = Rewriter([source.parent, *include_dirs])
    rewriter.load(source.resolve())
    return [one.text for one in rewriter.sources.values()]


def run_program(
    source: pathlib.Path,
    arguments: list[str],
    *,
    include_dirs: tuple[pathlib.Path, ...] = (),
    compiler_flags: tuple[str, ...] = (),
    schedule: str | None = None,
    threads: int | None = None,
    stdout: int | None = None,
) -> tuple[int, list[Kernel]]:
    """Compiles and runs a CUDA program, its accesses counted: its exit code, and the counts of its kernels. `stdout` as
    in `programs.run_program`. Raises UserError where it cannot be compiled, or did not come to its end."""
    program = programs.compile_program(
        source, flavour="count", include_dirs=include_dirs, compiler_flags=compiler_flags
    )
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "counts.json"
        settings = environment(program, written, own_sources(source, include_dirs))
        code = programs.run_program(
            program, arguments, schedule=schedule, threads=threads, settings=settings, stdout=stdout
        )
        return code, read(written, program)


def command(options: argparse.Namespace, console: Console) -> int:
    """`simt FILE.cu --count [--json PATH]`. Returns the program's exit code."""
    code, kernels = run_program(
        options.file,
        options.arguments,
        include_dirs=tuple(options.include),
        compiler_flags=tuple(options.compiler_flags),
        schedule=options.schedule,
        threads=options.threads,
    )
    if not kernels:
        console.print("no kernel has run")
    show(kernels, console)
    if options.json:
        save(kernels, options.json)
    return code
