"""gdb's commands for emulated kernels, and the session in docs/gdb.md, which is replayed here."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from emulator import debugger, programs
from kernel_fusion import steps
from kernel_fusion.console import UserError, child_environment

DOCS = steps.ROOT / "docs"
PROGRAM = r"""
#include <cassert>
#include <cooperative_groups.h>
#include <cstdio>
#include <cstdlib>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

__device__ int twice(int i) { return 2 * i + threadIdx.x; }

__global__ void neighbours(int* x) {
  __shared__ int mine[64];
  mine[threadIdx.x] = twice(threadIdx.x);
  __syncthreads();  // neighbours: barrier
  int other = mine[63 - threadIdx.x];
  other += __shfl_xor_sync(0xffffffff, other, 1);  // neighbours: shuffle
  x[64 * blockIdx.x + threadIdx.x] = other;  // neighbours: end
}

__global__ void asserts() {
  assert(threadIdx.x != 5);
}

__device__ void wait_here(int i) {
  if (i < 40) __syncthreads();
  else __syncthreads();  // diverges: other
}
__global__ void diverges() { wait_here(threadIdx.x); }

__global__ void stuck() {
  if (threadIdx.x % 32 < 16) __shfl_sync(0xffffffff, 1, 0);  // stuck: shuffle
  else __syncthreads();
}

__global__ void too_large() {
  __shared__ float tile[40000];  // too_large: tile
  tile[threadIdx.x] = 1;
}

template <int N>
__global__ void arrays() {
  __shared__ float tile[N][N + 1];
  __shared__ __half halves[N];
  __shared__ unsigned char bytes[2][2][3];
  extern __shared__ double dynamic[];
  tile[threadIdx.y][threadIdx.x] = 0.25f * threadIdx.x;
  if (threadIdx.y == 0) {
    halves[threadIdx.x] = __float2half(0.5f * threadIdx.x);
    dynamic[threadIdx.x] = threadIdx.x + 0.5;
    bytes[threadIdx.x / 2 % 2][1][threadIdx.x % 2] = threadIdx.x;
  }
  double* const row = dynamic + 4;
  __syncthreads();
  row[0] = 7;  // arrays: end
}

__global__ void together(int* x) {
  x[64 * blockIdx.x + threadIdx.x] = blockIdx.x;  // together: begin
  cooperative_groups::this_grid().sync();  // together: barrier
  x[64 * blockIdx.x + threadIdx.x] += 1;
}

__global__ void polls(volatile int* flag) {
  while (flag[0] == 0) {}  // polls: loop
}

int main(int, char** arguments) {
  const int which = std::atoi(arguments[1]);
  int* x;
  cudaMallocManaged(&x, 192 * sizeof(int));
  cudaMemset(x, 0, 192 * sizeof(int));
  if (which == 0) neighbours<<<2, 64>>>(x);
  if (which == 1) asserts<<<2, 64>>>();
  if (which == 2) diverges<<<2, 64>>>();
  if (which == 3) stuck<<<2, 64>>>();
  if (which == 4) too_large<<<2, 64>>>();
  if (which == 5) arrays<4><<<1, dim3(4, 4), 64>>>();
  if (which == 5) arrays<8><<<2, dim3(8, 8), 64>>>();
  void* parameters[] = {&x};
  if (which == 6) cudaLaunchCooperativeKernel(reinterpret_cast<void*>(together), 3, 64, parameters, 0, nullptr);
  if (which == 7) polls<<<1, 32>>>(x);
  std::printf("result %d %d\n", x[3], x[64 + 3]);
}
"""
RESULT = "result 363 363"  # of `neighbours`: thread 3 adds 3 * 60, which thread 60 wrote, and its neighbour's 3 * 61


def line(mark: str) -> int:
    """The number of the line that is marked so in PROGRAM."""
    (number,) = (n for n, text in enumerate(PROGRAM.splitlines(), 1) if text.endswith(f"// {mark}"))
    return number


no_gdb = pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed: apt install gdb")


def needs_gdb(test):
    return pytest.mark.tools(no_gdb(test))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program above, compiled for debugging in a repository of its own."""
    folder = tmp_path_factory.mktemp("house")
    (folder / "prog.cu").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "BUILD", folder / "build")
        yield programs.compile_program(folder / "prog.cu", flavour="debug")


def replay(program: pathlib.Path, commands: list[str], *arguments: str, **environment: str) -> list[str]:
    """gdb's output of each command. What it says about threads of the operating system is left out."""
    typed = []
    for command in commands:
        typed += ["echo \\n(gdb)\\n", command]
    call = f"from emulator import debugger as d; import pathlib; d.debug(pathlib.Path({str(program)!r}), "
    done = subprocess.run(
        [sys.executable, "-c", f"{call}{list(arguments)}, {typed})"],
        env=child_environment(HOME="/nonexistent", **environment),  # without the user's own settings of gdb
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    noise = re.compile(r"\[Thread debugging|Using host libthread_db|\[New process|\[Switching to Thread|$")
    texts = done.stdout.split("\n(gdb)\n")[1:]
    return ["\n".join(text for text in one.splitlines() if not noise.match(text)) for one in texts]


def table(text: str) -> list[list[str]]:
    """The rows of `info cuda threads`: first thread, last thread, count, state; `*` before the first if it is shown."""
    return [re.split(r"\s{2,}", row.replace("* ", "*").strip(), maxsplit=3) for row in text.splitlines()[2:]]


@needs_gdb
def test_the_session_in_the_docs_is_what_gdb_says(tmp_path, monkeypatch):
    text = (DOCS / "gdb.md").read_text(encoding="utf-8")
    shown = "\n".join(re.findall(r"^```text\n(\(gdb\) .*?)\n```$", text, re.M | re.S))
    commands = re.findall(r"^\(gdb\) (.*)$", shown, re.M)
    assert len(commands) > 10
    monkeypatch.setattr(programs, "BUILD", tmp_path / "build")
    program = programs.compile_program(DOCS / "examples" / "block_sum.cu", flavour="debug")
    outputs = replay(program, commands)
    said = "\n".join(
        part for both in zip(commands, outputs, strict=True) for part in (f"(gdb) {both[0]}", both[1]) if part
    )

    def comparable(text: str) -> list[str]:
        """Without addresses, folders, empty lines, and the number of the emulation's frames within a barrier."""
        text = re.sub(r"0x[0-9a-f]{3,}", "0x…", text.replace(f"{DOCS.parent}/", ""))
        text = re.sub(r"^#[1-9]\d* +", "#… ", text, flags=re.M)
        return [row.rstrip() for row in text.splitlines() if row.strip()]

    assert comparable(said) == comparable(shown)


@needs_gdb
def test_threads_are_listed_by_what_they_do(program):
    commands = [
        f"cuda break prog.cu:{line('neighbours: shuffle')} block 1 thread 34",
        "run",
        "info cuda threads",
        "cuda thread 33",
        "cuda block thread",
        "info cuda kernels",
        "cuda thread 0",
        "continue",
    ]
    out = replay(program, commands, "0")
    barrier = f"ready at prog.cu:{line('neighbours: barrier')}"
    # Each warp goes on as far as it can, so warp 0 has been through its shuffle when warp 1 begins with its own.
    assert out[1].splitlines()[-1] == "[CUDA kernel neighbours, block (1,0,0), thread (34,0,0)]"
    shuffle = f"__shfl_xor_sync, prog.cu:{line('neighbours: shuffle')}, mask 0xffffffff: lanes 2-31 missing"
    assert table(out[2]) == [
        ["(0,0,0)", "(31,0,0)", "32", "exited"],
        ["(32,0,0)", "(33,0,0)", "2", f"waits in {shuffle}"],
        ["*(34,0,0)", "(34,0,0)", "1", f"runs at prog.cu:{line('neighbours: shuffle')}"],
        ["(35,0,0)", "(63,0,0)", "29", barrier],
    ]
    assert "thread (33,0,0): waits in __shfl_xor_sync" in out[3]
    assert out[4] == "kernel neighbours, block (1,0,0), thread (33,0,0)"
    launch = next(n for n, text in enumerate(PROGRAM.splitlines(), 1) if "neighbours<<<" in text)
    assert out[5].splitlines() == [
        f"neighbours<<<(2,1,1), (64,1,1)>>>, launched at prog.cu:{launch}",
        "  2 blocks: 1 ended; at work: (1,0,0)",
    ]
    assert out[6] == "thread (0,0,0) of block (1,0,0) has exited."
    assert RESULT in out[7]


@needs_gdb
def test_a_thread_that_waits_shows_its_own_frames_and_the_program_goes_on_unharmed(program):
    commands = [
        f"cuda break prog.cu:{line('neighbours: barrier')} thread 20 block 1",
        "run",
        "cuda thread 3",
        "backtrace",
        "print mine[threadIdx.x] + blockIdx.x",
        "info cuda threads",
        "next",
        "cuda thread running",
        "print threadIdx.x",
        "next",
        "next",
        "cuda block 1 thread (21,0,0)",
        "continue",
    ]
    out = replay(program, commands, "0")
    barrier = line("neighbours: barrier")
    assert f"thread (3,0,0): waits at __syncthreads, prog.cu:{barrier}]" in out[2]
    assert re.fullmatch(rf"#\d+ +0x\w+ in neighbours \(x=0x\w+\) at \S+prog.cu:{barrier}", out[3])
    assert out[4] == "$1 = 10"
    assert [row[:2] for row in table(out[5])] == [
        ["(0,0,0)", "(2,0,0)"],
        ["*(3,0,0)", "(3,0,0)"],
        ["(4,0,0)", "(19,0,0)"],
        ["(20,0,0)", "(20,0,0)"],
        ["(21,0,0)", "(63,0,0)"],
    ]
    assert table(out[5])[3][3] == f"runs at prog.cu:{barrier}"
    assert table(out[5])[4][3] == "not begun"
    assert out[6].startswith("Thread (3,0,0) does not run, so it cannot step.")
    assert "thread (20,0,0)]" in out[7]
    assert out[8] == "$2 = 20"
    # Over the barrier, still in the same thread.
    assert out[10].splitlines() == [
        f"{barrier + 2}\t{PROGRAM.splitlines()[barrier + 1]}",
        "[CUDA kernel neighbours, block (1,0,0), thread (20,0,0)]",
    ]
    assert "thread (21,0,0): ready" in out[11]
    assert RESULT in out[12]


@needs_gdb
def test_a_function_is_called_for_a_thread_that_waits(program, tmp_path):
    plain = tmp_path / "plain.cpp"
    plain.write_text("int twice(int i) { return 2 * i; }\nint main() { return twice(0); }\n")
    subprocess.run(["c++", "-g", plain, "-o", tmp_path / "plain"], check=True)
    asked = ["gdb", "-nx", "-batch", "-ex", "break main", "-ex", "run", "-ex", "print twice(1)", tmp_path / "plain"]
    said = subprocess.run(asked, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "$1 = 2\n" not in said.stdout:  # gdb 13 does not know the registers of processors with AMX
        pytest.skip(f"this gdb can call no function on this machine: {said.stdout.splitlines()[-1]}")
    barrier = line("neighbours: barrier")
    stop = f"cuda break prog.cu:{barrier} thread 20 block 1"
    out = replay(program, [stop, "run", "cuda thread 3", "print twice(1)", "continue"], "0")
    assert out[3] == "$1 = 5"  # it has run on that thread's stack, with its threadIdx
    assert RESULT in out[4]


@needs_gdb
def test_an_editor_may_continue_while_a_thread_that_waits_is_shown(program):
    """An editor's `continue` goes around the hooks of gdb's command."""
    commands = [
        f"-break-insert -c threadIdx.x==3 prog.cu:{line('neighbours: barrier') + 1}",  # it reads threadIdx there
        "-exec-arguments 0",
        "-exec-run",
        '-interpreter-exec console "cuda thread 2"',
        "-break-delete 1",
        "-exec-continue",
        "-gdb-exit",
    ]
    done = subprocess.run(
        ["gdb", "-nx", "-q", "-i", "mi", "-x", str(debugger.COMMANDS), str(program)],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
    )
    assert "thread (2,0,0): waits in __shfl_xor_sync" in done.stdout
    assert RESULT in done.stdout


@needs_gdb
@pytest.mark.parametrize(
    ("which", "said", "place"),
    [
        ("1", "thread (5,0,0): assertion `threadIdx.x != 5` failed", "  assert(threadIdx.x != 5);"),
        ("2", "thread (40,0,0): is at __syncthreads", "diverges: other"),
        ("3", "thread (0,0,0): waits at __shfl_sync", "stuck: shuffle"),
        ("4", "thread (0,0,0): needs 160000 bytes", "too_large: tile"),
    ],
)
def test_gdb_stops_in_the_thread_that_made_the_error(program, which, said, place):
    stop, threads, end = replay(program, ["run", "info cuda threads", "continue"], which)
    assert f"block (0,0,0), {said}" in stop.splitlines()[0]
    assert stop.splitlines()[-1].endswith(place)
    assert [f"thread {row[0][1:]}" for row in table(threads) if row[0].startswith("*")] == [said.partition(":")[0]]
    assert f"block (0,0,0), {said}" in end  # what the program itself says of it


@needs_gdb
def test_shared_arrays_are_printed_in_rows(program):
    commands = [
        f"cuda break prog.cu:{line('arrays: end')} block 1 thread 2,1 if N == 8",
        "run",
        "cuda shared",
        "cuda shared tile",
        "cuda shared halves",
        "print halves[3]",
        "cuda shared bytes",
        "cuda shared dynamic",
        "cuda shared dynamic 3",
        "cuda shared dynamic 2x3",
        "cuda shared row",
        "cuda shared tile 3",
        "cuda shared nothing",
        "cuda thread 7,7",
        "up",
        "cuda shared row 1",
    ]
    out = replay(program, commands, "5")
    assert "[CUDA kernel arrays [with int N = 8], block (1,0,0), thread (2,1,0)]" in out[1]
    first = next(n for n, text in enumerate(PROGRAM.splitlines(), 1) if "tile[N]" in text)
    assert out[2].splitlines() == [
        f"tile: float[8][9], 288 bytes, prog.cu:{first}",
        f"halves: __half[8], 16 bytes, prog.cu:{first + 1}",
        f"bytes: unsigned char[2][2][3], 12 bytes, prog.cu:{first + 2}",
        "dynamic: 64 bytes",
    ]
    row = "   0 0.25  0.5 0.75    1 1.25  1.5 1.75    -"
    assert out[3].splitlines() == [
        "tile: float[8][9], block (1,0,0); - has not been written",
        f"  [0] {row}",
        "  …   6 more rows like this",
        f"  [7] {row}",
    ]
    assert out[4].splitlines()[1] == "  [0]   0 0.5   1 1.5   2 2.5   3 3.5"
    assert out[5] == "$1 = 1.5"
    assert [text.split() for text in out[6].splitlines()[1:]] == [
        ["[0][0]", "255", "255", "255"],
        ["[0][1]", "4", "5", "255"],
        ["[1][0]", "255", "255", "255"],
        ["[1][1]", "6", "7", "255"],
    ]
    # Thread (1,1,0) has passed the barrier and written 7 into dynamic[4].
    assert out[7].splitlines() == ["dynamic: double[8], block (1,0,0)", "  [0] 0.5 1.5 2.5 3.5   7 5.5 6.5 7.5"]
    assert out[8].splitlines() == ["dynamic: double[3], block (1,0,0)", "  [0] 0.5 1.5 2.5"]
    assert out[9].splitlines()[1:] == ["  [0] 0.5 1.5 2.5", "  [1] 3.5   7 5.5"]
    assert out[10].splitlines() == ["row: double[4], block (1,0,0)", "  [0]   7 5.5 6.5 7.5"]
    assert out[11] == "`tile` has a size of its own: float[8][9]."
    assert out[12].startswith('No symbol "nothing" in current context.')
    assert out[15].startswith("No symbol")  # `up` has left the kernel
    assert "`cuda shared` lists" in out[15]


@needs_gdb
def test_blocks_that_are_at_work_together_are_told_apart(program):
    begin, barrier = line("together: begin"), line("together: barrier")
    commands = [
        f"cuda break prog.cu:{begin} block 1 thread 63",
        "run",
        "info cuda kernels",
        "cuda block 1 thread 5",
        "print blockIdx.x * 100 + threadIdx.x",
        "info cuda threads block 1",
        "cuda block 9",
        "continue",
    ]
    out = replay(program, commands, "6")
    assert "together<<<(3,1,1), (64,1,1)>>>" in out[2]
    assert "3 blocks: 0 ended; at work: " in out[2]
    assert f"thread (5,0,0): waits at grid.sync(), prog.cu:{barrier}]" in out[3]
    assert out[4] == "$1 = 105"
    assert table(out[5]) == [
        ["(0,0,0)", "(4,0,0)", "5", f"waits at grid.sync(), prog.cu:{barrier}"],
        ["*(5,0,0)", "(5,0,0)", "1", f"waits at grid.sync(), prog.cu:{barrier}"],
        ["(6,0,0)", "(62,0,0)", "57", f"waits at grid.sync(), prog.cu:{barrier}"],
        ["(63,0,0)", "(63,0,0)", "1", f"runs at prog.cu:{begin}"],
    ]
    assert out[6].startswith("Block (9,0,0) is not at work; these are: ")
    assert "result 1 2" in out[7]


@needs_gdb
def test_a_kernel_that_never_ends_can_be_interrupted_and_looked_at(program):
    interrupt = "python import os, signal, threading; pid = gdb.selected_inferior().pid; "
    interrupt += "threading.Timer(2, os.kill, (pid, signal.SIGINT)).start()"  # later than any limit of the emulation
    commands = ["break main", "run", interrupt, "continue", "info cuda threads", "cuda thread 0", "set var *flag = 1"]
    out = replay(program, [*commands, "continue"], "7")
    loop = line("polls: loop")
    assert "received signal SIGINT" in out[3]
    states = [row[3] for row in table(out[4])]
    # The signal finds one of the two at work, whichever it is.
    assert sorted(states[:2]) == [f"gave way at prog.cu:{loop}", f"runs at prog.cu:{loop}"]
    assert "result 0 0" in out[7]


@needs_gdb
def test_what_cannot_be_done_is_said(program):
    commands = [
        "cuda thread 3",
        "cuda break prog.cu:9999 thread 3",
        "cuda break",
        "show environment KF_SIMT_THREADS",
        f"cuda break prog.cu:{line('neighbours: barrier')} thread 2",
        "run",
        "cuda thread 3",
        "cuda thread 64",
        "cuda thread x",
        "cuda blocks",
        "info cuda threads block 1",
        "python kf_state.member(gdb.parse_and_eval('threadIdx'), 'w')",
    ]
    out = replay(program, commands, "0")
    assert out[0] == "The program is not running."
    assert out[1].startswith("No line 9999 in file")
    assert out[2].startswith("Usage: cuda break WHERE")
    assert out[3] == "KF_SIMT_THREADS = 1"
    assert out[6] == "thread (3,0,0) of block (0,0,0) has not begun."
    assert out[7] == "There is no thread (64,0,0): the block is of (64,1,1) threads."
    assert out[8].startswith("Usage: cuda [block B] [thread T]")
    assert out[9] == "There is no command `cuda blocks`. `cuda help` lists them."
    assert out[10] == "Block (1,0,0) is not at work; these are: (0,0,0)."
    assert "The emulation has no member `w` here" in out[11]
    (own,) = replay(program, ["show environment KF_SIMT_THREADS"], KF_SIMT_THREADS="2")
    assert own == "KF_SIMT_THREADS = 2"


def test_without_gdb_or_without_its_python_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="gdb is not installed; .*apt install gdb"):
        debugger.debug(tmp_path / "program", [])
    (tmp_path / "gdb").write_text("#!/bin/sh\necho 'Python scripting is not supported in this copy of GDB.' >&2\n")
    (tmp_path / "gdb").chmod(0o755)
    with pytest.raises(UserError, match="gdb was built without Python"):
        debugger.debug(tmp_path / "program", [])


def test_gdb_gets_commands_and_arguments_and_its_code_is_ours(tmp_path, monkeypatch):
    script = 'case "$*" in *"6 * 7"*) echo 42;; *) printf "%s\\n" "$@" > "$OUT"; exit 3;; esac'
    (tmp_path / "gdb").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "gdb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert debugger.debug(tmp_path / "program", ["--size", "3"], ["run", "backtrace"]) == 3
    words = (tmp_path / "out").read_text().splitlines()
    assert words[words.index("-batch") :] == [
        *["-batch", "-ex", "run", "-ex", "backtrace"],
        *["--args", str(tmp_path / "program"), "--size", "3"],
    ]
    assert debugger.debug(tmp_path / "program", []) == 3
    assert "-batch" not in (tmp_path / "out").read_text()
