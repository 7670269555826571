"""CUDA sources for the CPU: shared libraries, called by ctypes, and programs, run by the command."""

import ctypes
import fcntl
import subprocess
import sys

import pytest

from emulator import programs
from kernel_fusion import cli, testing
from kernel_fusion.console import child_environment

LIBRARY = """\
#include <cuda_runtime.h>

__global__ void fill(int* x, int n) {
  __shared__ int first;
  if (threadIdx.x == 0) first = 40;
  __syncthreads();
  if (threadIdx.x < n) x[threadIdx.x] = first + threadIdx.x;
}

extern "C" __attribute__((visibility("default"))) int fill_on_gpu(int* x, int n, int threads) {
  fill<<<1, threads>>>(x, n);
  return cudaGetLastError();
}

extern "C" int hidden() { return 0; }
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A repository of its own for what is compiled here, with the emulation compiled once."""
    folder = tmp_path_factory.mktemp("house")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "BUILD", folder / "build")
        yield folder


def written(house, name: str, was: str = "", becomes: str = ""):
    """The source above in a file, with one place changed."""
    path = house / name
    path.write_text(LIBRARY.replace(was, becomes) if was else LIBRARY)
    return path


def filled(library) -> list[int]:
    numbers = (ctypes.c_int * 4)()
    assert library.fill_on_gpu(numbers, 3, 32) == 0
    return list(numbers)


def test_a_library_is_compiled_once_and_called(house):
    source = written(house, "fill.cu")
    compiled = programs.compile_library(source)
    made = compiled.stat().st_mtime_ns
    library = ctypes.CDLL(str(compiled))
    assert filled(library) == [40, 41, 42, 0]
    assert library.fill_on_gpu((ctypes.c_int * 4)(), 3, 2048) != 0  # more threads than a block may have
    assert not hasattr(library, "hidden")
    assert programs.compile_library(source) == compiled
    assert compiled.stat().st_mtime_ns == made
    assert not list(compiled.parent.glob("*.tmp"))


def test_each_library_calls_its_own_kernels(house):
    first, second = (
        ctypes.CDLL(str(programs.compile_library(written(house, f"own{start}.cu", "40", start))))
        for start in ("10", "20")
    )
    assert [filled(first), filled(second), filled(first)] == [[10, 11, 12, 0], [20, 21, 22, 0], [10, 11, 12, 0]]


def test_an_error_of_the_emulation_ends_the_process_with_its_text(house):
    source = written(house, "broken.cu", "  __syncthreads();", "  if (threadIdx.x < 9) return;  __syncthreads();")
    library = str(programs.compile_library(source))
    call = f"import ctypes; ctypes.CDLL({library!r}).fill_on_gpu((ctypes.c_int * 4)(), 3, 32)"
    done = subprocess.run([sys.executable, "-c", call], env=child_environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "fill" in done.stderr
    assert "broken.cu:6" in done.stderr


def test_a_library_that_does_not_compile_says_where(house):
    with testing.raises(programs.SimtError, "wrong.cu:7", "nonsense"):
        programs.compile_library(written(house, "wrong.cu", "= first", "= nonsense"))
    with testing.raises(programs.SimtError, "no such file: ", "missing.cu"):
        programs.compile_library(house / "missing.cu")


def test_a_compiler_that_is_not_there_is_named(house, monkeypatch):
    monkeypatch.setenv("CXX", "nothing++ -w")
    with testing.raises(programs.SimtError, "no C++ compiler nothing++ -w; Debian, Ubuntu: apt install g++"):
        programs.compile_library(written(house, "fill.cu"))


# What other people's programs take for granted.

STRANGERS = """\
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>
#include "helper.h"

#if !defined(__DRIVER_TYPES_H__) || !defined(__CUDA_RUNTIME_H__)
#error "include cuda_runtime.h first"
#endif

typedef struct CUstream_st *Stream;
typedef cudaStream_t OtherStream;

__global__ void times(long long* seen) {
  seen[0] = clock();
  seen[1] = clock64();
  seen[2] = clock();
}
__global__ __launch_bounds__(96) void with_arguments(float4 a, double b, int* out) { *out = a.x + b; }

int blocks_of(const void* kernel, int threads) {
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, 0);
  return blocks;
}

int main() {
  clock_t begin = clock();
  long long* seen;
  cudaMallocManaged(&seen, 3 * sizeof(*seen));
  cudaProfilerStart();
  Stream first = nullptr;
  OtherStream second = first;
  times << <1, 1, 0, second>> >(seen);
  cudaDeviceSynchronize();
  cudaProfilerStop();
  int khz = 0, rank = 5;
  cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0);
  bool ordered = seen[0] <= seen[1] && seen[1] <= seen[2];
  printf("%d %d", ordered, khz);
  printf(" %d", clock() >= begin && clock() < begin + 1000000ll * 3600);
  void* untyped = (void*)with_arguments;
  cudaFuncAttributes attributes;
  cudaFuncGetAttributes(&attributes, untyped);
  printf(" %d %d %d", blocks_of(untyped, 96), blocks_of((void*)with_arguments, 64), attributes.maxThreadsPerBlock);
  int grid = 0, block = 0;
  cudaOccupancyMaxPotentialBlockSize(&grid, &block, (void*)with_arguments, 0, 0);
  printf(" %d %d", grid, block);
  printf(" %s", cudaGetErrorName(cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, 0, 1)));
  printf(" %d %d\\n", INT_MAX, N);
  return cudaFree(seen);
}
"""


def test_what_programs_take_for_granted(house):
    folder = house / "strangers"
    (folder / "inc").mkdir(parents=True)
    (folder / "inc" / "helper.h").write_text("#include <cstdio>\n")
    path = folder / "strangers.cu"
    path.write_text(STRANGERS)
    program = programs.compile_program(path, compiler_flags=(f"-I{folder / 'inc'}", "-DN=8", "-fopenmp"))
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 1000000 1 21 32 96 336 96 cudaErrorInvalidDevice 2147483647 8\n"


def test_flags_for_the_compiler(house, command):
    path = house / "flags.cu"
    path.write_text("int main() { return CODE; }\n")
    assert command("--compiler-flags=-DCODE=7", path)[0] == 7
    assert command(path, "--compiler-flags", "-w -DCODE=9", "--race")[0] == 9
    assert command(path)[0] == 1


def test_a_build_that_waits_for_another_says_for_what(house, talks, command):
    program = programs.compile_program(talks)
    source = written(house, "unrelated.cu")
    programs.compile_library(source)
    with (program.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        programs.compile_library(source)  # is not held up
        waiting = subprocess.Popen(
            [sys.executable, "-c", WAITS.format(house=str(house), path=str(talks))],
            env=child_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        said = iter(waiting.stderr.readline, "")
        # The emulation itself others may compile just now.
        first = next(line for line in said if "waiting" in line and "the emulation" not in line)
        assert first == "waiting for another process that compiles it talks.cu …\n"
    assert waiting.wait() == 0
    waiting.stderr.close()


WAITS = """\
import pathlib
from emulator import programs
programs.BUILD = pathlib.Path({house!r}) / "build"
programs.compile_program(pathlib.Path({path!r}))
"""


# The command for programs: what belongs to it and what to the program, and what happens in the end.

TALKS = """\
#include "settings/greeting.h"

#include <cstdio>
#include <cstdlib>

__global__ void answer(int* x, int width) {
  if (threadIdx.x >= width) return;
  x[threadIdx.x] = GREETING + threadIdx.x;
}

int main(int argc, char** argv) {
  int* x;
  cudaMallocManaged(&x, 4 * sizeof(int));
  answer<<<1, 4>>>(x, 4);
  cudaDeviceSynchronize();
  std::printf("%d", x[3]);
  const char* schedule = std::getenv("KF_SIMT_SCHEDULE");
  const char* threads = std::getenv("KF_SIMT_THREADS");
  std::printf("|%s|%s", schedule ? schedule : "", threads ? threads : "");
  for (int i = 1; i < argc; ++i) std::printf("|%s", argv[i]);
  std::printf("\\n");
  return argc > 1 ? std::atoi(argv[argc - 1]) : 0;
}
"""


@pytest.fixture(scope="module")
def talks(house):
    """A program in a folder whose name has a space, with a header beside it."""
    folder = house / "a folder"
    (folder / "settings").mkdir(parents=True)
    (folder / "settings" / "greeting.h").write_text("#define GREETING 40\n")
    path = folder / "it talks.cu"
    path.write_text(TALKS)
    return path


@pytest.fixture
def command(house, monkeypatch, capfd):
    """Calls `kernel-fusion simt`; gives the exit code, and what was printed."""
    monkeypatch.delenv("KF_SIMT_SCHEDULE", raising=False)
    monkeypatch.delenv("KF_SIMT_THREADS", raising=False)

    def call(*words):
        code = cli.main(["simt", *map(str, words)])
        printed = capfd.readouterr()
        return code, printed.out, testing.without_progress(printed.err)

    return call


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        ([], [], "43||"),
        ([], ["7"], "43|||7"),
        (["--schedule", "reverse"], [], "43|reverse|"),
        ([], ["--schedule", "random:3", "--threads=2"], "43|random:3|2"),
        (["--threads", "3"], ["--schedule=forward", "--size", "9"], "43|forward|3|--size|9"),
        ([], ["--verbose", "--threads", "2"], "43|||--verbose|--threads|2"),
        ([], ["--", "--threads", "2"], "43|||--threads|2"),
        ([], ["--threads", "2", "--", "--", "-n"], "43||2|--|-n"),
        ([], ["-I", "settings", "-Iother", "-x", "-I", "0"], "43|||-x|-I|0"),
        ([], ["-5"], "43|||-5"),
        ([], [""], "43|||"),
        ([], ["--thread", "2"], "43|||--thread|2"),
    ],
)
def test_words_belong_to_the_command_or_to_the_program(talks, command, before, after, printed):
    code, out, err = command(*before, talks, *after)
    assert (out, err) == (printed + "\n", "")
    expected = int(after[-1]) if after and "|" + after[-1] in out and after[-1].lstrip("-").isdigit() else 0
    assert code == expected % 256


def test_a_changed_header_beside_the_program_counts(talks, command):
    header = talks.parent / "settings" / "greeting.h"
    assert command(talks)[1] == "43||\n"
    header.write_text("#define GREETING 50\n")
    try:
        assert command(talks)[1] == "53||\n"
    finally:
        header.write_text("#define GREETING 40\n")


@pytest.mark.parametrize("mode", [[], ["--count"]])
def test_whose_the_times_are_is_said_where_there_are_some(house, command, mode):
    path = house / "times.cu"
    path.write_text("#include <cuda_runtime.h>\nint main() { return sizeof(&cudaEventElapsedTime) != 8; }\n")
    assert command(*mode, path)[::2] == (0, "emulated: times are the CPU's, and say nothing about a GPU\n")


def test_only_compile_prints_the_program(talks, command):
    code, out, _ = command(talks, "--only-compile")
    assert code == 0
    done = subprocess.run([out.strip(), "x", "3"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "43|||x|3\n")


def test_a_program_that_needs_more_is_refused_before_it_runs(house, command):
    path = house / "needs_more.cu"
    path.write_text("#include <cub/cub.cuh>\nint main() {\n  cudaGraph_t graph;\n  return 3;\n}\n")
    code, out, err = command(path)
    assert (code, out) == (1, "")
    assert err == (
        f"kernel-fusion: {path}:1: <cub/cub.cuh> is not emulated (CUB)\n"
        f"{path}:3: in function main: cudaGraph_t is not emulated (graphs)\n"
    )


def test_ptx_that_is_not_emulated_is_named_with_line_and_function(house, command):
    path = house / "ptx.cu"
    path.write_text(
        '__global__ void k(int* x) {\n  asm volatile("nonsense.s32 %0, 1;" : "=r"(x[0]));\n}\nint main() {}\n'
    )
    code, _, err = command(path)
    assert code == 1
    assert err == f"kernel-fusion: {path}:2: in function k: inline PTX: `nonsense.s32 %0, 1` is not emulated\n"


def test_an_error_in_a_kernel_ends_the_program_after_what_it_has_printed(house, command):
    path = house / "diverges.cu"
    path.write_text(
        "#include <cstdio>\n"
        "__global__ void k() {\n"
        "  if (threadIdx.x < 7) __syncthreads();\n"
        "  else __syncthreads();\n"
        "}\n"
        'int main() { std::printf("begin\\n"); k<<<1, 32>>>(); std::printf("never\\n"); }\n'
    )
    code, out, err = command(path)
    assert (code, out) == (1, "begin\n")
    assert "diverges.cu:3" in err
    assert "diverges.cu:4" in err
    assert "terminate" not in err


@pytest.mark.slow
def test_addresses_out_of_bounds_are_found_by_asan_only(house, command):
    path = house / "overruns.cu"
    path.write_text(
        "__global__ void k(int* x) { x[threadIdx.x] = 1; }\n"
        "int main() {\n  int* x;\n  cudaMalloc(&x, 33 * sizeof(int));\n  k<<<1, 34>>>(x);\n  return cudaFree(x);\n}\n"
    )
    assert command(path)[0] == 0
    code, _, err = command(path, "--asan")
    assert code == 1
    assert "heap-buffer-overflow" in err
    assert "overruns.cu:1" in err


@pytest.mark.slow
def test_races_are_found_by_race(house, command):
    path = house / "races.cu"
    path.write_text(
        "__global__ void k(int* x) {\n"
        "  __shared__ int s[64];\n"
        "  s[threadIdx.x] = threadIdx.x;\n"
        "  x[threadIdx.x] = s[63 - threadIdx.x];\n"
        "}\n"
        "int main() {\n  int* x;\n  cudaMalloc(&x, 64 * sizeof(int));\n  k<<<1, 64>>>(x);\n  return cudaFree(x);\n}\n"
    )
    assert command(path)[0] == 0
    code, _, err = command("--race", path)
    assert code != 0
    assert "races.cu:3" in err
    assert "races.cu:4" in err
