"""Shared libraries made of CUDA sources, called by ctypes. Programs are tested with the command, in test_cli.py."""

import ctypes
import subprocess
import sys

import pytest

from kernel_fusion import simt, testing
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
        patch.setattr(simt.stages, "ROOT", folder)
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


@pytest.mark.timeout(120)
def test_a_library_is_compiled_once_and_called(house):
    source = written(house, "fill.cu")
    compiled = simt.compile_library(source)
    made = compiled.stat().st_mtime_ns
    library = ctypes.CDLL(str(compiled))
    assert filled(library) == [40, 41, 42, 0]
    assert library.fill_on_gpu((ctypes.c_int * 4)(), 3, 2048) != 0  # more threads than a block may have
    assert not hasattr(library, "hidden")
    assert simt.compile_library(source) == compiled
    assert compiled.stat().st_mtime_ns == made
    assert not list(compiled.parent.glob("*.tmp"))


@pytest.mark.timeout(120)
def test_each_library_calls_its_own_kernels(house):
    first, second = (
        ctypes.CDLL(str(simt.compile_library(written(house, f"own{start}.cu", "40", start)))) for start in ("10", "20")
    )
    assert [filled(first), filled(second), filled(first)] == [[10, 11, 12, 0], [20, 21, 22, 0], [10, 11, 12, 0]]


@pytest.mark.timeout(120)
def test_an_error_of_the_emulation_ends_the_process_with_its_text(house):
    source = written(house, "broken.cu", "  __syncthreads();", "  if (threadIdx.x < 9) return;  __syncthreads();")
    call = f"import ctypes; ctypes.CDLL({str(simt.compile_library(source))!r}).fill_on_gpu((ctypes.c_int * 4)(), 3, 32)"
    done = subprocess.run([sys.executable, "-c", call], env=child_environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert "fill" in done.stderr
    assert "broken.cu:6" in done.stderr


@pytest.mark.timeout(120)
def test_a_library_that_does_not_compile_says_where(house):
    with testing.raises(simt.SimtError, "wrong.cu:7", "nonsense"):
        simt.compile_library(written(house, "wrong.cu", "= first", "= nonsense"))
    with testing.raises(simt.SimtError, "no such file: ", "missing.cu"):
        simt.compile_library(house / "missing.cu")
