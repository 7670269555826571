"""Your own CUDA kernel in one Python file: y = residual + factor * gelu(x + bias) in one launch instead of four.

python pages/tutorial_mega_kernel.py [--backend auto|cuda|emulated] [--rows R] [--width W]

The file has four parts: the kernel, its launcher, the binding that lets Python call it, and a function with the checks.
With a GPU, torch's `load_inline` compiles the source below by nvcc while this script runs. Without one, the same source
is compiled for the CPU, which then runs the kernel's threads one after another: to see that it is right, not how fast.
"""

import argparse
import ctypes
import fcntl
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from emulator import programs
from kernel_fusion import build, console
from kernel_fusion.bench.benchmarks import benchmark_kernel

HERE = pathlib.Path(__file__).resolve().parents[1]

# ---- parts 1 and 2: the kernel, and its launcher ----

CUDA_SOURCE = r"""
#include <cuda_runtime.h>

__device__ float gelu(float v) {  // the approximation that GPT-2 uses
  return 0.5f * v * (1.f + tanhf(0.7978845608f * (v + 0.044715f * v * v * v)));
}

// Part 1, the kernel: what one thread does. A block of threads does one row; thread t does columns t, t + 256, ….
// x + bias and gelu of it stay in registers: only x, residual and y move between memory and chip.
__global__ void mega_kernel(const float* x, const float* bias, const float* residual, float* y, int width,
                            float factor) {
  const long long start = static_cast<long long>(blockIdx.x) * width;  // of this block's row; may be more than 2^31
  for (int c = threadIdx.x; c < width; c += blockDim.x) {
    y[start + c] = residual[start + c] + factor * gelu(x[start + c] + bias[c]);
  }
}

// Part 2, the launcher: an ordinary function that says how many blocks of how many threads there are, and in which
// stream, a queue of the GPU's work. It returns what CUDA has against the launch, or no text where all is well.
extern "C" __attribute__((visibility("default"))) const char* launch_mega_kernel(
    const float* x, const float* bias, const float* residual, float* y, int rows, int width, float factor,
    void* stream) {
  if (rows == 0 || width == 0) return nullptr;  // a launch of no blocks would be an error
  mega_kernel<<<rows, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, bias, residual, y, width, factor);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
"""

# ---- part 3: the binding ----

# C++ that knows both torch and the launcher. `load_inline` adds the lines that make `mega_kernel` a Python function.
BINDING = r"""
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

extern "C" const char* launch_mega_kernel(const float* x, const float* bias, const float* residual, float* y, int rows,
                                          int width, float factor, void* stream);

void mega_kernel(torch::Tensor x, torch::Tensor bias, torch::Tensor residual, torch::Tensor y, int64_t rows,
                 double factor) {
  const c10::cuda::CUDAGuard guard(x.device());  // with several GPUs: launch on the one that holds x
  // The current stream: the kernel waits its turn behind what torch has asked of the GPU before, and no longer.
  void* const stream = c10::cuda::getCurrentCUDAStream().stream();
  const char* const error = launch_mega_kernel(
      x.data_ptr<float>(), bias.data_ptr<float>(), residual.data_ptr<float>(), y.data_ptr<float>(),
      static_cast<int>(rows), static_cast<int>(bias.numel()), static_cast<float>(factor), stream);
  TORCH_CHECK(error == nullptr, "mega_kernel: ", error);
}
"""

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], None]  # the fourth is y


def compile_for_gpu(cuda: build.Cuda) -> Backend:
    """Compiles all parts by nvcc and the C++ compiler into a library, and loads it as a Python module."""
    import ninja

    # torch guesses the toolkit's folder from where nvcc lies, and finds ninja on the PATH alone.
    os.environ.setdefault("CUDA_HOME", str(cuda.home))
    os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ['PATH']}"
    from torch.utils import cpp_extension

    folder = HERE / "build" / "tutorial" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "ours").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)  # ends with the process; torch's own lock stays where a build was killed
        (folder / "lock").unlink(missing_ok=True)
        module = cpp_extension.load_inline(
            "tutorial_mega_kernel",
            cpp_sources=BINDING,
            cuda_sources=CUDA_SOURCE,
            functions=["mega_kernel"],
            build_directory=str(folder),
            no_implicit_headers=True,  # the kernel needs nothing of torch, and compiles faster without
        )
    return module.mega_kernel


def compile_for_cpu() -> Backend:
    """Compiles parts 1 and 2 for the CPU. ctypes, which calls C functions of any library, is the binding."""
    source = HERE / "build" / "tutorial" / "mega_kernel.cu"
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.exists() or source.read_text(encoding="utf-8") != CUDA_SOURCE:
        source.write_text(CUDA_SOURCE, encoding="utf-8")
    launch = ctypes.CDLL(str(programs.compile_library(source, flavour="debug"))).launch_mega_kernel
    launch.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int, ctypes.c_int, ctypes.c_float, ctypes.c_void_p]
    launch.restype = ctypes.c_char_p

    def run(
        x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, y: torch.Tensor, rows: int, factor: float
    ) -> None:
        error = launch(*(t.data_ptr() for t in (x, bias, residual, y)), rows, bias.numel(), factor, None)
        if error is not None:
            raise RuntimeError(f"mega_kernel: {error.decode()}")

    return run


# ---- part 4: the function that others call ----


def mega_kernel(
    backend: Backend, device: str, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, factor: float
) -> torch.Tensor:
    """residual + factor * gelu(x + bias).

    A kernel gets addresses and believes them. What does not fit must be found before, or it reads and writes memory of
    others.

    Args:
        backend: the compiled kernel.
        device: the kind of device that it runs on, "cuda" or "cpu".
        x: float32, contiguous, any shape but ().
        bias: float32, as long as the last dimension of `x`.
        residual: float32, contiguous, of `x`'s shape.

    Raises:
        TypeError, ValueError: an argument does not fit; the text names it.
    """
    if x.dim() == 0:
        raise ValueError("mega_kernel: `x` must have at least 1 dimension, got 0")
    shapes = {"x": x.shape, "bias": x.shape[-1:], "residual": x.shape}
    for name, tensor in (("x", x), ("bias", bias), ("residual", residual)):
        if tensor.dtype != torch.float32:
            raise TypeError(f"mega_kernel: `{name}` must be float32, got {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.device.type != device or tensor.device != x.device:
            wanted = device if name == "x" else f"on the device of `x` ({x.device})"
            raise ValueError(f"mega_kernel: `{name}` must be {wanted}, got {tensor.device}")
        if tensor.shape != shapes[name]:
            raise ValueError(f"mega_kernel: `{name}` must have shape {tuple(shapes[name])}, got {tuple(tensor.shape)}")
        if not tensor.is_contiguous():
            raise ValueError(f"mega_kernel: `{name}` must be contiguous, got strides {tensor.stride()}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"mega_kernel: `{name}` requires a gradient, and this kernel has no backward")
    rows = x.numel() // max(1, x.shape[-1])
    if max(rows, x.shape[-1]) >= 2**31:
        raise ValueError(f"mega_kernel: `x` must have less than 2^31 rows and columns, got {rows} and {x.shape[-1]}")
    y = torch.empty_like(x)
    backend(x, bias, residual, y, rows, factor)
    return y


def separate(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, factor: float) -> torch.Tensor:
    """The same by four operations of torch. Each reads memory and writes memory."""
    shifted = x + bias
    active = F.gelu(shifted, approximate="tanh")
    scaled = factor * active
    return residual + scaled


# ---- the tour ----


def choose(wanted: str) -> tuple[str, build.Cuda | None, str]:
    """The backend for `--backend`, nvcc if it is the GPU's, and the reason in words.

    Raises:
        UserError: "cuda" was asked for and cannot be had.
    """
    if wanted == "emulated":
        return "emulated", None, "as you asked for"
    cuda, why_not = build.find_cuda()
    if cuda and not torch.cuda.is_available():
        cuda, why_not = None, f"nvcc is here ({cuda.nvcc}), but torch sees no GPU"
    if cuda:
        return "cuda", cuda, f"{torch.cuda.get_device_name()}, {cuda.nvcc}"
    if wanted == "cuda":
        raise console.UserError(f"--backend cuda: {why_not}")
    return "emulated", None, why_not


def main(arguments: list[str] | None = None) -> int:
    """Compiles, checks, and on a GPU times. Returns 0 where every result is right, else 1."""
    parser = argparse.ArgumentParser(description="One CUDA kernel, from source to a checked result.")
    parser.add_argument("--backend", choices=("auto", "cuda", "emulated"), default="auto")
    parser.add_argument("--rows", type=int, default=8192, help="of the timing on a GPU")
    parser.add_argument("--width", type=int, default=4096, help="of the timing on a GPU")
    options = parser.parse_args(arguments)
    try:
        name, cuda, why = choose(options.backend)
    except (console.UserError, build.BuildError) as error:
        print(f"tutorial_mega_kernel: {error}", file=sys.stderr)
        return 1
    device = "cuda" if cuda else "cpu"

    print("y = residual + factor * gelu(x + bias), in one launch")
    print(f"backend: {name} ({why})\n")
    print("1. The kernel is what one thread does; 256 threads are a block, and a block does a row of x.")
    print("2. The launcher says how many blocks there are, and puts the launch into a stream.")
    if cuda:
        print("3. The binding is C++ that takes tensors apart and calls the launcher; load_inline makes it a module.")
    else:
        print("3. The binding is ctypes, which calls the launcher in a library of the kernel compiled for the CPU.")
    print("4. A function checks what it is given, since a kernel cannot.\n")
    began = time.perf_counter()
    backend = compile_for_gpu(cuda) if cuda else compile_for_cpu()
    print(f"compiled in {time.perf_counter() - began:.1f} s (what is compiled already is kept)")

    def poisoned(x, bias, residual, y, rows, factor) -> None:
        """Fills y with NaN first: new memory may hold an old result, and an element never written would look right."""
        backend(x, bias, residual, y.fill_(float("nan")), rows, factor)

    print("\nThe largest difference from float64, beside that of torch's four operations in float32:")
    print(f"{'shape':>12} {'kernel':>10} {'torch':>10}")
    wrong = 0
    for shape in ((1,), (3, 33), (2, 5, 256), (7, 1000), (0, 8), (4, 0)):
        torch.manual_seed(0)
        x, bias, residual = (torch.randn(size, device=device) for size in (shape, shape[-1:], shape))
        y, eager = mega_kernel(poisoned, device, x, bias, residual, 0.5), separate(x, bias, residual, 0.5)
        exact = separate(x.double(), bias.double(), residual.double(), 0.5)
        ours, theirs = ((z.double() - exact).abs().flatten() for z in (y, eager))
        right = bool((ours <= 2e-6 * (1 + exact.abs().flatten())).all())  # NaN is not <=
        wrong += not right
        biggest = [f"{error.max().item():.1e}" if error.numel() else "no numbers" for error in (ours, theirs)]
        print(f"{str(shape):>12} {biggest[0]:>10} {biggest[1]:>10}{'' if right else '   WRONG'}")

    print("\nWhat does not fit is refused before it reaches the kernel:")
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    for bad in ((x.half(), bias, x), (x, bias[:2], x), (x, bias, torch.ones(3, 2, device=device).T)):
        try:
            mega_kernel(backend, device, *bad, 0.5)
        except (TypeError, ValueError) as error:
            print(f"  {type(error).__name__}: {error}")

    if cuda:
        shape = (options.rows, options.width)
        x, bias, residual = (torch.randn(size, device=device) for size in (shape, shape[-1:], shape))
        ours = functools.partial(mega_kernel, backend, device)
        print(f"\n{shape[0]} rows of {shape[1]}, float32:")
        for label, tensors, function in (("four operations", 9, separate), ("this kernel", 3, ours)):
            ms = benchmark_kernel(function, (x, bias, residual, 0.5), repeat=20)
            moved = tensors * 4 * x.numel()
            print(
                f"{label:>16}: {tensors} tensors move, {moved / 1e6:.0f} MB, {ms:.3g} ms, {moved / ms / 1e6:.0f} GB/s"
            )
    else:
        print("\nNo times: the CPU runs the kernel's threads one after another, which says nothing about a GPU.")
    print("\nall right" if not wrong else f"\n{wrong} WRONG")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
