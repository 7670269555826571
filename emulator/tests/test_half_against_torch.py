"""float16 and bfloat16 of the emulation against PyTorch's: all 65,536 patterns, and every rounding tie."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SIMT = Path(__file__).resolve().parents[1]

KERNELS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__global__ void widen(const unsigned short* in, float* as_half, float* as_bfloat16, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  as_half[i] = __half2float(__ushort_as_half(in[i]));
  as_bfloat16[i] = __bfloat162float(__ushort_as_bfloat16(in[i]));
}

__global__ void narrow(const float* in, unsigned short* as_half, unsigned short* as_bfloat16, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  as_half[i] = __half_as_ushort(__float2half_rn(in[i]));
  as_bfloat16[i] = __bfloat16_as_ushort(__float2bfloat16_rn(in[i]));
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void run_widen(const unsigned short* in, float* as_half, float* as_bfloat16, int n) {
  widen<<<(n + 255) / 256, 256>>>(in, as_half, as_bfloat16, n);
}

EXPORT void run_narrow(const float* in, unsigned short* as_half, unsigned short* as_bfloat16, int n) {
  narrow<<<(n + 255) / 256, 256>>>(in, as_half, as_bfloat16, n);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("half")
    (folder / "half.cu").write_text(KERNELS)
    subprocess.run([sys.executable, "-S", SIMT, "rewrite", folder / "half.cu", "-o", folder / "half.cpp"], check=True)
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread"]
    sources = [folder / "half.cpp", *sorted((SIMT / "src").glob("*.cpp"))]
    subprocess.run(["g++", *flags, "-I", SIMT / "include", *sources, "-o", folder / "half.so"], check=True)
    return ctypes.CDLL(str(folder / "half.so"))


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def same(got, expected):
    return bool(
        ((got == expected) | (got.isnan() & expected.isnan())).all()
        and (got.signbit() == expected.signbit())[~expected.isnan()].all()
    )


def every_pattern():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16)


def test_widening_every_pattern(library):
    bits = every_pattern()
    as_half, as_bfloat16 = torch.empty(65536), torch.empty(65536)
    library.run_widen(pointer(bits), pointer(as_half), pointer(as_bfloat16), 65536)
    assert same(as_half, bits.view(torch.float16).float())
    assert same(as_bfloat16, bits.view(torch.bfloat16).float())


def narrowed(library, values):
    as_half, as_bfloat16 = (torch.empty(values.numel(), dtype=torch.int16) for _ in range(2))
    library.run_narrow(pointer(values), pointer(as_half), pointer(as_bfloat16), values.numel())
    return as_half.view(torch.float16), as_bfloat16.view(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrowing_every_value_and_tie(library, dtype):
    exact = every_pattern().view(dtype).double()
    finite = exact[exact.isfinite()].sort().values.unique()
    ties = ((finite[1:] + finite[:-1]) / 2).float()
    last = (finite[-1] + (finite[-1] - finite[-2]) / 2).float().reshape(1)  # above it lies infinity
    ties = torch.cat([ties, last, -last])
    up, down = torch.full_like(ties, torch.inf), torch.full_like(ties, -torch.inf)
    values = torch.cat([ties, ties.nextafter(up), ties.nextafter(down), exact.float()])
    got = narrowed(library, values)[0 if dtype == torch.float16 else 1]
    assert same(got.float(), values.to(dtype).float())


def test_narrowing_random_floats(library):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4_000_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    as_half, as_bfloat16 = narrowed(library, values)
    assert same(as_half.float(), values.half().float())
    assert same(as_bfloat16.float(), values.bfloat16().float())
