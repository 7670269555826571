"""docs/debugging.md: each of its programs has a fault that its tool reports, and none once it is mended."""

import functools
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from kernel_fusion.bench import counters, gpu_check, profile
from kernel_fusion.checks import commands
from kernel_fusion.checks.commands import absent, environment, line_of, pasted, stands_in
from kernel_fusion.checks.repository import ROOT, run
from kernel_fusion.checks.structure import stands_alone
from kernel_fusion.checks.text import Fence, fences
from kernel_fusion.console import UserError
from kernel_fusion.testing import without_progress

PAGE = ROOT / "docs" / "debugging.md"
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.cu"))
LONGEST = 40  # lines: what can be seen at once
NOT_YET = "(output to be taken from the GPU machine)"


class Fault(NamedTuple):
    """A program of docs/examples, the options of the tool, what then is said, and the code that it ends with."""

    name: str
    options: tuple[str, ...]
    said: str
    code: int = 0

    def __str__(self) -> str:
        return " ".join([self.name, *self.options])


ON_THE_CPU = [
    Fault("row_tail", (), r"columns 0, 999, 1000, 1001: 2 2 -?nan -?nan\n"),
    Fault("variance", (), r"variance -80\nkernel variances, .* thread \(1,0,0\): assertion .*variance\.cu:24\n", 1),
    Fault("block_sum", (), r"^9 9 9 9 \n"),
    Fault("block_sum", ("--race",), r"race in shared memory, `tile`\n.*block_sum\.cu:19\n.*block_sum\.cu:19\n", 1),
    Fault("warp_sums", (), r"ones: -?nan\n"),
    Fault("row_mean", ("--schedule", "reverse"), r": -63\.5 -?nan -?nan -?nan\n"),
    Fault("row_mean", ("--race",), r"race in shared memory, `mean`\n.*row_mean\.cu:21\n.*row_mean\.cu:16\n", 1),
    Fault("column_loop", (), r"is at __syncthreads \(.*_loop\.cu:20\), but .* waits at .*_loop\.cu:17\)\n", 1),
    Fault("lost_flag", (), r"kernel sum_row, block \(0,0,0\), thread \(0,0,0\): polls memory that no thread", 1),
    Fault("tile_edge", ("--asan",), r"heap-buffer-overflow(.*\n)+? +#0 .* in transpose.*tile_edge\.cu:17\n", 1),
    Fault(
        "two_memories", (), r"kernel sum_row, .*: reads 0x\w+ at .*two_memories\.cu:16, which is the host's memory: ", 1
    ),
    Fault(
        "early_read", (), r"warning: the host reads 0x\w+ at .*early_read\.cu:25, .* kernel sum_row \(.*:21\) writes"
    ),
    Fault("row_vectors", ("--asan",), r"row_vectors\.cu:19:.*misaligned address", 1),
    Fault("column_walk", ("--count",), r"global loads: .* 32 a request\n"),
    Fault("tile_banks", ("--count",), r"shared loads: .* [1-9][\d,]* of them by bank conflicts\n"),
]
# What the mended programs print.
RIGHT = {
    "row_tail": "columns 0, 999, 1000, 1001: 2 2 2 2\n",
    "variance": "row 1: mean 10000, variance 0.25\nno error\n",
    "block_sum": "256 256 256 256 \n",
    "warp_sums": "the mean of 960 ones: 1\n",
    "row_mean": "columns 0, 1, 126, 127: -63.5 -62.5 62.5 63.5\n",
    "column_loop": "the sum of 100 ones: 100\n",
    "lost_flag": "the sum of 64 ones: 64\n",
    "two_memories": "the sum of 100 ones: 100\n",
    "early_read": "the sum of 65536 ones: 65536\n",
    "tile_edge": "0 of 320 elements are wrong\n",
    "row_vectors": "first_four no error\nhalve      no error\nthe end    no error\n",
    "column_walk": "rows 0 and 1023: 256 256\n",
    "tile_banks": "row 1 begins with 1 257\n",
    "row_in_registers": "",
}


def emulated(name: str, *options: str, mended: bool = False) -> subprocess.CompletedProcess:
    """The program on the CPU, by the command."""
    command = [sys.executable, "-m", "kernel_fusion", "simt", *options, *(["--compiler-flags=-DMENDED"] * mended)]
    command.append(str(ROOT / "docs" / "examples" / f"{name}.cu"))
    return subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.parametrize("fault", ON_THE_CPU, ids=str)
def test_the_tool_reports_the_fault_each_time(fault):
    for _ in range(2):
        done = emulated(fault.name, *fault.options)
        assert done.returncode == fault.code, done.stdout + done.stderr
        assert re.search(fault.said, done.stdout + without_progress(done.stderr)), done.stdout + done.stderr


@pytest.mark.parametrize("fault", ON_THE_CPU, ids=str)
def test_of_the_mended_program_the_tool_says_nothing(fault):
    done = emulated(fault.name, *fault.options, mended=True)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    counts = "--count" in fault.options
    assert done.stdout.startswith(RIGHT[fault.name]) if counts else done.stdout == RIGHT[fault.name]
    assert not re.search(fault.said, done.stdout)


@pytest.mark.parametrize(
    "options",
    [
        ("--schedule", "reverse"),
        ("--race",),
        pytest.param(("--schedule", "random:1"), marks=pytest.mark.long),
        pytest.param(("--asan",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", RIGHT)
def test_the_mended_program_is_right_in_every_order_and_has_no_other_fault(name, options):
    done = emulated(name, *options, mended=True)
    assert (done.returncode, done.stdout, without_progress(done.stderr)) == (0, RIGHT[name], "")


def test_order_does_not_hide_what_the_race_detector_sees():
    for order in ("forward", "reverse", "random:1"):
        done = emulated("row_mean", "--race", "--schedule", order)
        assert "race in shared memory, `mean`" in done.stderr, order


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_program_is_short_and_stands_in_the_pages_table(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LONGEST
    assert "MENDED\n" in text
    assert f"docs/examples/{path.name}" in text.split("#include")[0]
    assert stands_alone(path)
    table = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert f"[{path.name}](examples/{path.name})" in "\n".join(table)
    assert path.stem in RIGHT


# ---- what the page shows ----


def pairs() -> list[tuple[Fence, Fence]]:
    """Commands of the page, and the output that stands next."""
    found = [fence for fence in fences(PAGE) if not fence.text.startswith("(gdb)")]
    return [(a, b) for a, b in zip(found, found[1:], strict=False) if a.language != "text" and b.language == "text"]


def on_a_gpu(fence: Fence) -> bool:
    return fence.language == "sh" or "gpu" in fence.tags


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=[pytest.mark.tools] if "gdb" in pair[0].tags else [])
        for pair in pairs()
        if not on_a_gpu(pair[0])
    ],
    ids=line_of,
)
def test_the_page_shows_what_is_printed(pair, tmp_path):
    typed, shown = pair
    if absent() & set(typed.tags):
        pytest.skip(f"needs {' '.join(typed.tags)}")
    said = pasted(tmp_path, typed.text.replace("source .venv/bin/activate", ""))
    assert stands_in(shown.text, said) is None, said


def test_a_line_that_is_not_printed_is_found():
    said = "a 0x12\nb -nan\nc one two three\n"
    assert stands_in("a 0x77\n…\nc one…three", said) is None
    assert stands_in("b nan\na 0x12", said) == "a 0x…"
    assert stands_in("c one", said) == "c one"


# ---- on a GPU, or with nvcc alone ----

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gpu = pytest.mark.skipif(shutil.which("nvcc") is None or not torch.cuda.is_available(), reason="needs a GPU")


@functools.cache
def compiled(folder, name: str, mended: bool, *flags: str) -> str:
    """The program for the GPU."""
    program = folder / f"{name}{'-mended' * mended}{'-debug' * ('-G' in flags)}"
    command = ["nvcc", "-O3", "-arch=native", "-lineinfo", *flags, *(["-DMENDED"] * mended), "-o", str(program)]
    if "-G" in flags:
        command.remove("-lineinfo")
    run(*command, str(ROOT / "docs" / "examples" / f"{name}.cu"))
    return str(program)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("for_the_gpu")


said_by = functools.partial(commands.said_by, timeout=120)  # on a GPU a fault may hang

SANITIZED = [
    ("memcheck", "tile_edge", r"Invalid __global__ read of size 4 bytes(.*\n)+?.*tile_edge\.cu:17"),
    ("memcheck", "row_vectors", r"Invalid __global__ read of size 16 bytes(.*\n)+?.*row_vectors\.cu:19"),
    ("racecheck", "row_mean", r"Race reported between .*row_mean\.cu:16(.*\n)+?.*row_mean\.cu:21"),
    ("initcheck", "row_tail", r"Uninitialized __global__ memory read(.*\n)+?.*row_tail\.cu:23"),
    ("synccheck", "column_loop", r"Barrier error detected"),
]
NOTHING = r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed"


@needs_gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize(("tool", "name", "found"), SANITIZED)
def test_compute_sanitizer_reports_the_fault_and_nothing_once_mended(folder, tool, name, found):
    command = ["compute-sanitizer", "--tool", tool]
    said = said_by([*command, compiled(folder, name, False)])
    if refusal := gpu_check.REFUSALS.search(said):
        pytest.skip(refusal[0])
    assert re.search(found, said), said
    assert not re.search(NOTHING, said)
    mended = said_by([*command, compiled(folder, name, True)])
    assert re.search(NOTHING, mended), mended
    assert RIGHT[name] in mended


@needs_gpu
def test_an_error_appears_at_its_launch_where_launches_wait(folder):
    program, error = compiled(folder, "row_vectors", False), "misaligned address"
    late = f"first_four no error\nhalve      no error\nthe end    {error}\n"
    assert said_by([program], CUDA_LAUNCH_BLOCKING="0") == late
    assert said_by([program], CUDA_LAUNCH_BLOCKING="1").startswith(f"first_four {error}\n")
    assert said_by([compiled(folder, "row_vectors", True)]) == RIGHT["row_vectors"]


@needs_gpu
def test_printf_and_assert_say_the_same_on_a_gpu(folder):
    said = said_by([compiled(folder, "variance", False)])
    assert "row 1: mean 10000, variance -80\n" in said
    assert re.search(r"variance\.cu:24: .*thread: \[1,0,0\] Assertion `variance\[row\] > 0` failed", said), said
    assert said_by([compiled(folder, "variance", True)]) == RIGHT["variance"]


@needs_gpu
@pytest.mark.skipif(shutil.which("cuda-gdb") is None, reason="needs cuda-gdb")
def test_cuda_gdb_stops_where_the_error_is_made(folder):
    command = ["cuda-gdb", "-nx", "-batch", "-ex", "run"]
    said = said_by([*command, compiled(folder, "row_vectors", False, "-g", "-G")])
    assert re.search(r"Misaligned Address(.*\n)*?.*row_vectors\.cu:19", said), said
    mended = said_by([*command, compiled(folder, "row_vectors", True, "-g", "-G")])
    assert "Misaligned" not in mended
    assert RIGHT["row_vectors"] in mended


COUNTED = [
    ("column_walk", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", 32 * 8192, 4 * 8192),
    ("column_walk", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", 8192, 8192),
    ("tile_banks", "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum", 31 * 2048, 0),
]
SLACK = 500  # a GPU counts some conflicts more, see emulator/README.md


def counted(program: str, metric: str) -> list[float]:
    """The metric of each launch."""
    try:
        ncu = profile.find_ncu()
        said = said_by([ncu, "--clock-control", "none", "--metrics", metric, program])
        profile.check_allowed(said)
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])
    return [counters.number(text) for text in re.findall(rf"{re.escape(metric)} .* ([\d.,]+)\n", said)]


@needs_gpu
@pytest.mark.parametrize(("name", "metric", "faulty", "mended"), COUNTED)
def test_ncu_counts_what_the_emulation_counts(folder, name, metric, faulty, mended):
    assert counted(compiled(folder, name, False), metric) == [pytest.approx(faulty, abs=SLACK)]
    assert counted(compiled(folder, name, True), metric) == [pytest.approx(mended, abs=SLACK)]


@needs_gpu
@pytest.mark.parametrize("kind", ["ld", "st"])
def test_ncu_counts_accesses_to_local_memory(folder, kind):
    metric = f"l1tex__t_requests_pipe_lsu_mem_local_op_{kind}.sum"
    rotated, centred = counted(compiled(folder, "row_in_registers", False), metric)
    assert min(rotated, centred) > 0
    assert counted(compiled(folder, "row_in_registers", True), metric) == [0, 0]


@needs_nvcc
@pytest.mark.parametrize("mended", [False, True])
def test_the_compiler_says_which_rows_do_not_stay_in_registers(mended, tmp_path):
    command = ["nvcc", "-O3", "-arch=sm_90", "-Xptxas", "-v", *(["-DMENDED"] * mended), "-o", str(tmp_path / "program")]
    said = said_by([*command, str(ROOT / "docs" / "examples" / "row_in_registers.cu")])
    kernel = r"Compiling entry function '(\w+)'(?:.*\n)+? +(\d+) bytes stack frame, (\d+) bytes spill stores"
    frames = {name: (int(frame), int(spilled)) for name, frame, spilled in re.findall(kernel, said)}
    rotated, centred = (next(frames[name] for name in frames if kernel in name) for kernel in ("rotated", "centred"))
    if mended:
        assert rotated == centred == (0, 0)
    else:
        assert rotated == (4 * 48, 0)
        assert min(centred) > 0


def is_cuda_13_0() -> bool:
    return shutil.which("nvcc") is not None and "release 13.0" in said_by(["nvcc", "--version"])


@pytest.mark.skipif(not is_cuda_13_0(), reason="the page shows what nvcc 13.0 says")
def test_the_page_shows_what_the_compiler_says(tmp_path):
    ((typed, shown),) = [pair for pair in pairs() if "-Xptxas" in pair[0].text]
    said = pasted(tmp_path, "mkdir -p build/debugging", typed.text)
    assert stands_in(shown.text, said) is None, said


@needs_gpu
@pytest.mark.skipif(not is_cuda_13_0(), reason="the page shows what CUDA 13.0 says")
def test_the_page_shows_what_the_gpu_says(tmp_path):
    before = next(fence for fence in fences(PAGE) if on_a_gpu(fence) and "nvcc" in fence.text)
    needs = {"ncu": "ncu", "cuda-gdb": "cuda-gdb", "compute-sanitizer": "compute-sanitizer"}
    wrong = []
    for typed, shown in [pair for pair in pairs() if on_a_gpu(pair[0]) and NOT_YET not in pair[1].text]:
        missing = [tool for word, tool in needs.items() if word in typed.text and shutil.which(tool) is None]
        said = "" if missing else pasted(tmp_path, before.text, typed.text)
        if missing or gpu_check.REFUSALS.search(said) or "ERR_NVGPUCTRPERM" in said or "LibraryNotLoaded" in said:
            continue
        if line := stands_in(shown.text, said):
            wrong.append(f"line {shown.line}: {line!r} is not in\n{said}")
    assert wrong == [], "\n".join(wrong)
