#!/usr/bin/env python3
"""Plants twenty faults in copies of this project's rungs and shows which tool finds which.

    for p in simt simt-asan simt-tsan; do cmake --preset $p && cmake --build --preset $p; done
    python emulator/tests/planted_faults.py             # fails where the table in ../README.md is another
    python emulator/tests/planted_faults.py --write     # writes it
    python emulator/tests/planted_faults.py --only one-column-too-many      # one of them, with what the tools say
    python emulator/tests/planted_faults.py --step step2-attention         # those in one step

The tests are built first, where they are not up to date; then it takes a few minutes.

For each fault and each of the three presets the rung is compiled anew from a copy with the fault in it, linked into a
copy of its step's test program, and run. A tool finds a fault if
- contract: under `simt`, in the usual order of threads, a result is wrong, the runtime ends the kernel with an error,
  or the program crashes;
- other orders: the same for one of KF_SIMT_SCHEDULE=reverse, random:1 and random:2;
- race detector: under `simt-tsan` a race is reported, with both its lines;
- AddressSanitizer: under `simt-asan` it reports an access, or the runtime a write outside of shared memory.
The same tests without a fault must pass in all of these.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kernel_fusion.checks.faults import Failure, planted

ROOT = Path(__file__).resolve().parents[2]
TOOL = [sys.executable, "-S", str(ROOT / "emulator")]
README = ROOT / "emulator/README.md"
BEGIN, END = "<!-- planted faults -->", "<!-- /planted faults -->"

PRESETS = ("simt", "simt-asan", "simt-tsan")
SCHEDULES = ("forward", "reverse", "random:1", "random:2")
COLUMNS = ("contract", "other orders", "race detector", "AddressSanitizer")
# Two accesses, each with its line in a source of ours. An access past a buffer can meet something else by chance.
RACE = re.compile(r"race in (\w+ )?(shared|global) memory.*\n.* at \S+\.(cu|h):\d+\n.* at \S+\.(cu|h):\d+\n")
SECONDS = 3600  # for one run; the runtime itself ends endless loops long before


@dataclass(frozen=True)
class Fault:
    name: str
    what: str  # for the table
    rung: str  # the source that is compiled
    old: str
    new: str
    tests: str  # the GoogleTest filter that runs it
    header: str = ""  # where the fault is, if not in the rung itself

    @property
    def file(self) -> str:
        return self.header or self.rung

    @property
    def step(self) -> str:
        return self.rung.split("/")[0]

    @property
    def target(self) -> str:
        return self.step.split("-")[0] + "_kernels_test"


STEP1, STEP2, STEP3, STEP4 = (
    f"{step}/kernels" for step in ("step1-simple", "step2-attention", "step3-fused", "step4-integration")
)
COLUMN_SUM = "step1-simple/include/step1/column_sum.h"
REDUCE = "step2-attention/include/step2/reduce.h"
ATTEND = "step3-fused/include/step3/attend.h"

FAULTS = [
    Fault(
        "guard-one-too-far",
        "guard `i <= n` in place of `i < n`",
        f"{STEP1}/scale/v2_naive.cu",
        "if (i < n) y[i]",
        "if (i <= n) y[i]",
        "Scale.*",
    ),
    Fault(
        "stride-of-a-block",
        "the loop's stride is the block, not the grid: work is done twice",
        f"{STEP1}/scale/v3_grid_stride.cu",
        "const int64_t stride = int64_t{gridDim.x} * blockDim.x;",
        "const int64_t stride = blockDim.x;",
        "Scale.*",
    ),
    Fault(
        "tail-forgotten",
        "the elements that do not fill a vector are forgotten",
        f"{STEP1}/gelu/v2_vector.cu",
        "if (tail < n) y[tail] = from_compute<T>(gelu_of<kTanh>(to_compute(x[tail])));",
        "",
        "Gelu.*",
    ),
    Fault(
        "random-numbers-twice",
        "dropout: the second four elements get the first four's random numbers",
        f"{STEP1}/bias_dropout_residual/v3_vector.cu",
        "eight.number(static_cast<int>(i % 8) + j)",
        "eight.number(j)",
        "BiasDropoutResidual.*",
    ),
    Fault(
        "eight-loaded-of-fewer",
        "the last thread loads eight elements where fewer are left",
        f"{STEP1}/bias_dropout_residual/v4_any_width.cu",
        "load_some<kAligned>(whole, x + i, 0, last, value);",
        "load_some<kAligned>(std::true_type{}, x + i, 0, last, value);",
        "BiasDropoutResidual.*",
    ),
    Fault(
        "no-barrier-after-writing",
        "`__syncthreads` missing between writing the sums and reading them",
        f"{STEP1}/column_sum/v2_two_stage.cu",
        "  sums[threadIdx.y][threadIdx.x] = sum;\n  __syncthreads();",
        "  sums[threadIdx.y][threadIdx.x] = sum;\n",
        "ColumnSum.*",
        header=COLUMN_SUM,
    ),
    Fault(
        "shared-array-too-small",
        "shared array without room for the groups that lie askew",
        f"{STEP1}/column_sum/v3_vector.cu",
        "__shared__ C sums[kTileRows * kEightEntries];",
        "__shared__ C sums[kTileRows * kEightTile];",
        "ColumnSum.*",
        header=COLUMN_SUM,
    ),
    Fault(
        "sums-of-different-maxima",
        "online softmax: threads' sums are added without scaling them to one maximum",
        f"{STEP2}/softmax/v3_online.cu",
        "row.sum = block_sum(own.sum * row.weight(own.max), shared);",
        "row.sum = block_sum(own.sum, shared);",
        "Softmax.*",
    ),
    Fault(
        "one-column-too-many",
        "last loop runs to `c <= width`: into the next row, past the last",
        f"{STEP2}/softmax/v2_block.cu",
        "for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {\n    y[c]",
        "for (int64_t c = threadIdx.x; c <= width; c += blockDim.x) {\n    y[c]",
        "Softmax.*",
    ),
    Fault(
        "no-barrier-before-reuse",
        "`__syncthreads` missing before the reduction's array is used again",
        f"{STEP2}/softmax/v2_block.cu",
        "max = greater_of(max, shared[warp]);\n  __syncthreads();",
        "max = greater_of(max, shared[warp]);\n",
        "Softmax.*",
        header=REDUCE,
    ),
    Fault(
        "mask-of-the-first-group",
        "shuffle with the mask of the warp's first lanes in all its groups",
        f"{STEP2}/attention/v2_tiled.cu",
        "__shfl_xor_sync(kFullWarp, score[j], away)",
        "__shfl_xor_sync((1u << kGroup) - 1, score[j], away)",
        "Attention.*",
    ),
    Fault(
        "exit-before-barrier",
        "threads without a query return before the loop with the barriers",
        f"{STEP2}/attention/v2_tiled.cu",
        "  OnlineSoftmax<float> softmax;\n",
        "  OnlineSoftmax<float> softmax; if (!in_range) return;\n",
        "Attention.*",
    ),
    Fault(
        "no-barrier-before-loading",
        "`__syncthreads` missing before the next tile of keys is loaded",
        f"{STEP2}/attention/v2_tiled.cu",
        "__syncthreads();  // nobody reads",
        "// nobody reads",
        "Attention.*",
    ),
    Fault(
        "weights-shared-by-warps",
        "all warps write their weights to the same place",
        f"{STEP3}/attention_residual_layer_norm/v2_fused.cu",
        "C* weights = values + kKeys * stride + row * kKeys;",
        "C* weights = values + kKeys * stride;",
        "Fused.*",
        header=ATTEND,
    ),
    Fault(
        "no-syncwarp",
        "`__syncwarp` missing between the lanes' weights and their use",
        f"{STEP3}/attention_residual_layer_norm/v2_fused.cu",
        "    __syncwarp();\n",
        "\n",
        "Fused.*",
        header=ATTEND,
    ),
    Fault(
        "too-little-shared-memory",
        "the launch asks for shared memory without the weights' part",
        f"{STEP3}/attention_residual_layer_norm/v2_fused.cu",
        "return (rows + 2 * kKeys) * tile_stride(head_dim) + rows * kKeys;",
        "return (rows + 2 * kKeys) * tile_stride(head_dim);",
        "Fused.*",
        header=ATTEND,
    ),
    Fault(
        "padding-not-zeroed",
        "the end of a row that fills up a vector is left as it was",
        f"{STEP3}/attention_block/v2_fused.cu",
        "for (int c = width; c < stride; ++c) tile[threadIdx.x * stride + c] = 0;",
        "",
        "Fused.*",
    ),
    Fault(
        "position-over-the-batch",
        "positions counted through the batch, not within a sequence",
        f"{STEP4}/embedding/v1_naive.cu",
        "position_weight[row % length * width + column]",
        "position_weight[row * width + column]",
        "Embedding.*",
    ),
    Fault(
        "vectors-across-rows",
        "vectors although they do not divide the width",
        f"{STEP4}/embedding/v2_vector.cu",
        "a.width % kVector == 0 && aligned_16",
        "aligned_16",
        "Embedding.*",
    ),
    Fault(
        "strides-swapped",
        "strides of heads and tokens swapped",
        f"{STEP4}/kv_append/v1_naive.cu",
        "head * strides.head + token * strides.seq",
        "head * strides.seq + token * strides.head",
        "KvAppend.*",
    ),
]


def copy_of_tree(to: Path) -> None:
    """What rungs include, and they themselves: the emulation's headers are used where they are."""
    for folder in (
        "common/include",
        *(f"{p.name}/{part}" for p in ROOT.glob("step*") for part in ("include", "kernels")),
    ):
        if (ROOT / folder).is_dir():
            shutil.copytree(ROOT / folder, to / folder)


class Preset:
    """A folder that CMake has built, and the commands that it used."""

    def __init__(self, name: str, folder: Path, targets: set[str], jobs: int):
        self.name, self.folder = name, folder
        cache = folder / "CMakeCache.txt"
        if not cache.exists():
            raise Failure(f"{folder} is missing: cmake --preset {name} && cmake --build --preset {name}")
        home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache.read_text(), re.M)
        if home is None or Path(home[1]).resolve() != ROOT:
            raise Failure(f"{folder} was built from {home and home[1]}, not from {ROOT}")
        # Objects of older sources would not fit to those that are compiled here.
        output_of(["cmake", "--build", str(folder), "-j", str(jobs), "--target", *sorted(targets)], 3600)
        self.compile = {
            entry["file"]: shlex.split(entry["command"])
            for entry in json.loads((folder / "compile_commands.json").read_text())
        }
        for fault in FAULTS:  # all of them, whichever are planted
            if self.rewritten(fault) not in self.compile:
                raise Failure(f"{folder}: no command compiles {self.rewritten(fault)}")
        self.link = {target: self.read_link_command(target) for target in targets}

    def read_link_command(self, target: str) -> list[str]:
        lines = output_of(["ninja", "-C", str(self.folder), "-t", "commands", target], 60).splitlines()
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
        output_of([*TOOL, "rewrite", str(tree / fault.rung), "-o", str(source), *includes], 60)
        command[command.index("-o") + 1] = str(object_file)
        command[command.index("-c") + 1] = str(source)
        if TOOL[-1] not in command:
            command = [*TOOL, "compile", *command]
        output_of([*command, "-w"], SECONDS, cwd=self.folder)  # a fault may leave a variable unused

        link = list(self.link[fault.target])
        link[link.index("-o") + 1] = str(program)
        link.remove(original)
        # First, or what it has in common with other rungs, a function of a header, would be taken from theirs.
        link.insert(1, str(object_file))
        output_of(link, SECONDS, cwd=self.folder)
        return program


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def output_of(command: list[str], seconds: int, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, timeout=seconds, text=True, errors="replace", capture_output=True)
    if done.returncode != 0:
        raise Failure(f"{shlex.join(command)}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


@dataclass
class Run:
    passed: bool
    text: str


def run(program: Path, tests: str, schedule: str, stop_at_first: bool) -> Run:
    """One run of a test program. The order of blocks and threads is the same each time: one OS thread does all."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KF_SIMT_", "GTEST_", "ASAN_", "TSAN_"))}
    environment |= {"KF_SIMT_THREADS": "1", "KF_SIMT_SCHEDULE": schedule, "ASAN_OPTIONS": "detect_leaks=0"}
    # glibc then maps each buffer for itself, so that a write just past one does not end the program, or not, by chance.
    environment["MALLOC_MMAP_THRESHOLD_"] = "0"
    command = [str(program), f"--gtest_filter={tests}", "--gtest_color=no"]
    if stop_at_first:
        command.append("--gtest_throw_on_failure")  # which ends the program
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{shlex.join(command)} did not end within {SECONDS} s") from error
    text = done.stdout.decode(errors="replace")
    if re.search(r"Running 0 tests", text):
        raise Failure(f"{shlex.join(command)}: the filter matches no test")
    return Run(done.returncode == 0, text)


def kind_of_failure(text: str) -> str:
    if 'C++ exception with description "kernel ' in text:  # the runtime's, with kernel, block and thread
        return "error"
    return "wrong result" if ": Failure\n" in text else "crash"


def findings(preset: str, program: Path, tests: str) -> tuple[dict[str, str], str]:
    """What the preset's columns say, and the text of all runs. An empty cell: nothing was found."""
    if preset == "simt":
        usual, *others = (run(program, tests, schedule, stop_at_first=True) for schedule in SCHEDULES)
        cells = {
            "contract": "" if usual.passed else kind_of_failure(usual.text),
            "other orders": "" if all(other.passed for other in others) else "yes",
        }
        text = "".join(f"--- {schedule}\n{r.text}" for schedule, r in zip(SCHEDULES, (usual, *others), strict=True))
        return cells, text
    # Not stopped at the first wrong result: what is asked here is whether the tool finds the cause.
    done = run(program, tests, "forward", stop_at_first=False)
    if preset == "simt-tsan":
        return {"race detector": "yes" if RACE.search(done.text) else ""}, done.text
    reported = re.search(r"ERROR: AddressSanitizer|AddressSanitizer would name|error: .*misaligned", done.text)
    return {"AddressSanitizer": "yes" if reported else ""}, done.text


def row_start(fault: Fault) -> str:
    return f"| {fault.what} | {'/'.join(Path(fault.rung).with_suffix('').parts[-2:])} | "


def row(fault: Fault, cells: dict[str, str]) -> str:
    """The table's row of a fault. `cells`: by the column."""
    return f"{row_start(fault)}{' | '.join(cells[column] or '–' for column in COLUMNS)} |"


def table(found: dict[str, dict[str, str]]) -> str:
    """The README's table. `found`: cells by the fault's name and the column."""
    lines = [f"| Fault | Rung | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    lines += [row(fault, found[fault.name]) for fault in FAULTS]
    totals = [sum(bool(found[fault.name][column]) for fault in FAULTS) for column in COLUMNS]
    alone = [sum([c for c in COLUMNS if found[fault.name][c]] == [column] for fault in FAULTS) for column in COLUMNS]
    each = ", ".join(
        f"{column} {total}" + (f" ({only} by nothing else)" if only else "")
        for column, total, only in zip(COLUMNS, totals, alone, strict=True)
    )
    return "\n".join([*lines, "", f"Found, of {len(FAULTS)}: {each}."])


def in_readme(text: str) -> tuple[int, int]:
    """Where the table begins and ends in the README's text."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise Failure(f"{README} lacks the lines {BEGIN} and {END}")
    return begin + len(BEGIN), end


def measure(build: Path, faults: list[Fault], jobs: int, show: bool) -> dict[str, dict[str, str]]:
    presets = [Preset(name, build / name, {fault.target for fault in faults}, jobs) for name in PRESETS]
    found: dict[str, dict[str, str]] = {fault.name: {} for fault in faults}
    clean = sorted({(fault.target, fault.tests) for fault in faults})

    def check_clean(preset: Preset, target: str, tests: str) -> None:
        cells, text = findings(preset.name, preset.program(target), tests)
        if any(cells.values()) or "FAILED" in text:
            raise Failure(f"{preset.name}, {target} {tests}, without a fault: {cells}\n{text[-3000:]}")

    def check_fault(preset: Preset, fault: Fault, folder: Path) -> None:
        program = preset.build(fault, folder / "tree", folder / preset.name)
        cells, text = findings(preset.name, program, fault.tests)
        found[fault.name] |= cells
        if show:
            print(f"==== {fault.name}, {preset.name}\n{text[:6000]}")
        print(f"{fault.name}, {preset.name}: {', '.join(f'{k} {v}' for k, v in cells.items() if v) or '–'}", flush=True)

    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        work = []
        for fault in faults:
            folder = Path(temporary) / fault.name
            copy_of_tree(folder / "tree")
            path = folder / "tree" / fault.file
            path.write_text(planted(fault, path.read_text()))
            work += [(check_fault, preset, fault, folder) for preset in presets]
        work += [(check_clean, preset, *test) for preset in presets for test in clean]
        work.reverse()  # the slowest, later steps under the race detector, come first
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(*task) for task in work]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where the presets lie; default: build/")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--only", metavar="NAME", choices=[fault.name for fault in FAULTS], help="one fault, in detail")
    steps = sorted({fault.step for fault in FAULTS})
    what.add_argument("--step", choices=steps, help="the faults in this step's rungs")
    what.add_argument("--write", action="store_true", help="write the table into emulator/README.md; plants all")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time; default: %(default)s"
    )
    options = parser.parse_args()
    begun = time.monotonic()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of programs that a fault ends
    try:
        faults = [f for f in FAULTS if options.only in (None, f.name) and options.step in (None, f.step)]
        found = measure(options.build.resolve(), faults, options.jobs, show=options.only is not None)
        missed = [fault.name for fault in faults if not any(found[fault.name].values())]
        if missed:
            raise Failure(f"found by nothing: {', '.join(missed)}")
        if options.only:
            return 0
        text = README.read_text()
        begin, end = in_readme(text)
        if options.step:
            rows = [row(fault, found[fault.name]) for fault in faults]
            if other := [line for line in rows if line not in text[begin:end]]:
                raise Failure("\n".join([f"the table in {README} has other rows; --write writes these:", *other]))
        elif text[begin:end] != (new := f"\n\n{table(found)}\n\n"):
            if not options.write:
                raise Failure(f"the table in {README} is another; --write writes this one:\n{new}")
            README.write_text(text[:begin] + new + text[end:])
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"{len(faults)} faults, {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
