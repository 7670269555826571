"""Plants faults in copies of rungs, and says which tool finds which in the step's GoogleTest program.

For each fault and each of the three presets the rung is compiled anew from a copy with the fault in it, linked into a
copy of its step's test program, and run. A tool finds a fault if
- contract: under `simt`, in the usual order of threads, a result is wrong, the runtime ends the kernel with an error,
  or the program crashes;
- other orders: the same for one of KF_SIMT_SCHEDULE=reverse, random:1 and random:2;
- race detector: under `simt-tsan` a race is reported, with both its lines;
- AddressSanitizer: under `simt-asan` it reports an access, or the runtime a write outside of shared memory.
The same tests without a fault must pass in all of these.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_fusion.checks.faults import Failure, arguments, output_of, planted, run, table_in, threads, with_table
from kernel_fusion.checks.faults import Fault as AnyFault
from kernel_fusion.steps import ROOT

TOOL = [sys.executable, "-S", str(ROOT / "emulator")]
PRESETS = ("simt", "simt-asan", "simt-tsan")
SCHEDULES = ("forward", "reverse", "random:1", "random:2")
COLUMNS = ("contract", "other orders", "race detector", "AddressSanitizer")
# Two accesses, each with its line in a source of ours. An access past a buffer can meet something else by chance.
RACE = re.compile(r"race in (\w+ )?(shared|global) memory.*\n.* at \S+\.(cu|h):\d+\n.* at \S+\.(cu|h):\d+\n")
SECONDS = 3600  # for one run; the runtime itself ends endless loops long before


@dataclass(frozen=True)
class Fault(AnyFault):
    """Its test is a rung, the source that is compiled, and the GoogleTest filter that runs it."""

    @property
    def rung(self) -> str:
        return self.tests[0].split()[0]

    @property
    def filter(self) -> str:
        return self.tests[0].split()[1]

    @property
    def step(self) -> str:
        return self.rung.split("/")[0]

    @property
    def target(self) -> str:
        return self.step.split("-")[0] + "_kernels_test"


def copy_of_tree(to: Path) -> None:
    """What rungs include, and they themselves: the emulation's headers are used where they are."""
    for folder in (ROOT / "common/include", *ROOT.glob("step*/include"), *ROOT.glob("step*/kernels")):
        shutil.copytree(folder, to / folder.relative_to(ROOT))


class Preset:
    """A folder that CMake has built, and the commands that it used."""

    def __init__(self, name: str, folder: Path, faults: list[Fault], jobs: int):
        self.name, self.folder = name, folder
        cache = folder / "CMakeCache.txt"
        if not cache.exists():
            raise Failure(f"{folder} is missing: cmake --preset {name} && cmake --build --preset {name}")
        home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache.read_text(), re.M)
        if home is None or Path(home[1]).resolve() != ROOT:
            raise Failure(f"{folder} was built from {home and home[1]}, not from {ROOT}")
        # Objects of older sources would not fit to those that are compiled here.
        targets = sorted({fault.target for fault in faults})
        output_of(["cmake", "--build", str(folder), "-j", str(jobs), "--target", *targets])
        self.compile = {
            entry["file"]: shlex.split(entry["command"])
            for entry in json.loads((folder / "compile_commands.json").read_text())
        }
        for fault in faults:
            if self.rewritten(fault) not in self.compile:
                raise Failure(f"{folder}: no command compiles {self.rewritten(fault)}")
        self.link = {target: self.read_link_command(target) for target in targets}

    def read_link_command(self, target: str) -> list[str]:
        lines = output_of(["ninja", "-C", str(self.folder), "-t", "commands", target]).splitlines()
        command = shlex.split(lines[-1])  # `: && c++ … -o program … && :`
        return command[2:-2]

    def program(self, target: str) -> Path:
        return self.folder / after(self.link[target], "-o")

    def rewritten(self, fault: Fault) -> str:
        """What CMake compiles of the fault's rung for its own step: a later step may compile it, too."""
        return str(self.folder / fault.step / "rewritten" / f"{fault.rung}.cpp")

    def build(self, fault: Fault, tree: Path, to: Path) -> Path:
        """Compiles the rung as it is in `tree` and links the step's tests with it."""
        to.mkdir()
        source, object_file, program = to / "rung.cpp", to / "rung.o", to / "program"
        command = list(self.compile[self.rewritten(fault)])
        original = after(command, "-o")
        emulation = str(ROOT / "emulator")
        for i, word in enumerate(command):
            if word.startswith(f"-I{ROOT}/") and not word.startswith(f"-I{emulation}/"):
                command[i] = f"-I{tree}/{word[len(f'-I{ROOT}/') :]}"
        includes = [word for word in command if word.startswith(f"-I{tree}/")]
        output_of([*TOOL, "rewrite", str(tree / fault.rung), "-o", str(source), *includes])
        command[command.index("-o") + 1] = str(object_file)
        command[command.index("-c") + 1] = str(source)
        if TOOL[-1] not in command:
            command = [*TOOL, "compile", *command]
        output_of([*command, "-w"], self.folder, SECONDS)  # a fault may leave a variable unused

        link = list(self.link[fault.target])
        link[link.index("-o") + 1] = str(program)
        link.remove(original)
        # First, or what it has in common with other rungs, a function of a header, would be taken from theirs.
        link.insert(1, str(object_file))
        output_of(link, self.folder, SECONDS)
        return program


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def run_tests(program: Path, tests: str, schedule: str, stop_at_first: bool) -> tuple[bool, str]:
    """Whether a test program passed, and what it said. The order of blocks and threads is the same each time: one OS
    thread does all."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KF_SIMT_", "GTEST_", "ASAN_", "TSAN_"))}
    environment |= {"KF_SIMT_THREADS": "1", "KF_SIMT_SCHEDULE": schedule, "ASAN_OPTIONS": "detect_leaks=0"}
    # glibc then maps each buffer for itself, so that a write just past one does not end the program, or not, by chance.
    environment["MALLOC_MMAP_THRESHOLD_"] = "0"
    command = [str(program), f"--gtest_filter={tests}", "--gtest_color=no"]
    if stop_at_first:
        command.append("--gtest_throw_on_failure")  # which ends the program
    try:
        done = subprocess.run(
            command, env=environment, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{shlex.join(command)} did not end within {SECONDS} s") from error
    text = done.stdout.decode(errors="replace")
    if re.search(r"Running 0 tests", text):
        raise Failure(f"{shlex.join(command)}: the filter matches no test")
    return done.returncode == 0, text


def kind_of_failure(text: str) -> str:
    if 'C++ exception with description "kernel ' in text:  # the runtime's, with kernel, block and thread
        return "error"
    return "wrong result" if ": Failure\n" in text else "crash"


def findings(preset: str, program: Path, tests: str) -> tuple[dict[str, str], str]:
    """What the preset's columns say, and the text of all runs. An empty cell: nothing was found."""
    if preset == "simt":
        runs = {schedule: run_tests(program, tests, schedule, stop_at_first=True) for schedule in SCHEDULES}
        (passed, said), *others = runs.values()
        cells = {
            "contract": "" if passed else kind_of_failure(said),
            "other orders": "" if all(passed for passed, _ in others) else "yes",
        }
        return cells, "".join(f"--- {schedule}\n{said}" for schedule, (_, said) in runs.items())
    # Not stopped at the first wrong result: what is asked here is whether the tool finds the cause.
    _, said = run_tests(program, tests, "forward", stop_at_first=False)
    if preset == "simt-tsan":
        return {"race detector": "yes" if RACE.search(said) else ""}, said
    reported = re.search(r"ERROR: AddressSanitizer|AddressSanitizer would name|error: .*misaligned", said)
    return {"AddressSanitizer": "yes" if reported else ""}, said


def row_start(fault: Fault) -> str:
    return f"| {fault.what} | {'/'.join(Path(fault.rung).with_suffix('').parts[-2:])} | "


def row(fault: Fault, cells: dict[str, str]) -> str:
    """The table's row of a fault. `cells`: by the column."""
    return f"{row_start(fault)}{' | '.join(cells[column] or '–' for column in COLUMNS)} |"


def table(faults: list[Fault], found: dict[str, dict[str, str]]) -> str:
    """The README's table. `found`: cells by the fault's name and the column."""
    lines = [f"| Fault | Rung | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += [row(fault, found[fault.name]) for fault in faults]
    totals = [sum(bool(found[fault.name][column]) for fault in faults) for column in COLUMNS]
    alone = [sum([c for c in COLUMNS if found[fault.name][c]] == [column] for fault in faults) for column in COLUMNS]
    each = ", ".join(
        f"{column} {total}" + (f" ({only} by nothing else)" if only else "")
        for column, total, only in zip(COLUMNS, totals, alone, strict=True)
    )
    return "\n".join([*lines, "", f"Found, of {len(faults)}: {each}."])


def measure(build: Path, faults: list[Fault], jobs: int, show: bool) -> dict[str, dict[str, str]]:
    presets = [Preset(name, build / name, faults, jobs) for name in PRESETS]
    found: dict[str, dict[str, str]] = {fault.name: {} for fault in faults}
    clean = sorted({(fault.target, fault.filter) for fault in faults})

    def check_clean(preset: Preset, target: str, tests: str) -> None:
        cells, text = findings(preset.name, preset.program(target), tests)
        if any(cells.values()) or "FAILED" in text:
            raise Failure(f"{preset.name}, {target} {tests}, without a fault: {cells}\n{text[-3000:]}")

    def check_fault(preset: Preset, fault: Fault, folder: Path) -> None:
        program = preset.build(fault, folder / "tree", folder / preset.name)
        cells, text = findings(preset.name, program, fault.filter)
        found[fault.name] |= cells
        if show:
            print(f"==== {fault.name}, {preset.name}\n{text[:6000]}")
        print(f"{fault.name}, {preset.name}: {', '.join(f'{k} {v}' for k, v in cells.items() if v) or '–'}", flush=True)

    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        work: list[tuple[Any, ...]] = []
        for fault in faults:
            folder = Path(temporary) / fault.name
            copy_of_tree(folder / "tree")
            path = folder / "tree" / fault.file
            path.write_text(planted(fault, path.read_text()))
            work += [(check_fault, preset, fault, folder) for preset in presets]
        work += [(check_clean, preset, *test) for preset in presets for test in clean]
        work.reverse()  # the slowest, later steps under the race detector, come first
        with threads(jobs) as pool:
            for future in as_completed([pool.submit(*task) for task in work]):
                future.result()
    return found


def main(doc: str, faults: list[Fault], readme: Path) -> int:
    """The command."""
    parser = arguments(doc, [fault.name for fault in faults])
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where the presets lie; default: build/")
    parser.add_argument("--step", choices=sorted({fault.step for fault in faults}), help="those in this step's rungs")
    options = parser.parse_args()
    if options.write and (options.only or options.step):
        parser.error("--write needs all faults")
    chosen = [f for f in faults if f.name in (options.only or [f.name]) and options.step in (None, f.step)]

    def work() -> str:
        found = measure(options.build.resolve(), chosen, options.jobs, show=options.only is not None)
        if missed := [fault.name for fault in chosen if not any(found[fault.name].values())]:
            raise Failure(f"found by nothing: {', '.join(missed)}")
        text = readme.read_text(encoding="utf-8")
        if options.write:
            readme.write_text(with_table(text, table(faults, found)), encoding="utf-8")
        else:
            lines = table(chosen, found).splitlines()
            lines = lines if len(chosen) == len(faults) else lines[2:-2]  # a part of the table: its rows
            if other := [line for line in lines if line not in table_in(text).splitlines()]:
                raise Failure("\n".join([f"the table in {readme} has other lines; --write writes these:", *other]))
        return f"{len(chosen)} faults"

    return run(work)
