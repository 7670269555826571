"""python benchmark.py [--help]: every rung of this stage beside PyTorch, on the machine at hand."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()

import torch
import torch.nn.functional as F

import step1_simple
from kernel_fusion import benchmarks

TEACHES = "A thread an element, then 16 bytes a thread; two operations in one kernel save a trip through memory."

# GPT-2's MLP is 4·768 and 4·1600 wide; 16384 rows are 16 sequences of 1024 tokens.
SIZES = {
    "emulated": {"scale": [(1 << 16, torch.float32)], "bias_gelu": [(64, 768, torch.float32)]},
    "cpu": {
        "scale": [(1 << 24, torch.float32)],
        "bias_gelu": [(2048, 3072, torch.float32), (2048, 3072, torch.bfloat16)],
    },
    "quick": {"scale": [(1 << 26, torch.float32)], "bias_gelu": [(16384, 3072, torch.bfloat16)]},
    "full": {
        "scale": [(1 << n, dtype) for dtype in (torch.float32, torch.bfloat16) for n in (20, 24, 28)],
        "bias_gelu": [
            (16384, 768, torch.bfloat16),
            (16384, 3072, torch.bfloat16),
            (16384, 3072, torch.float32),
            (16384, 6400, torch.bfloat16),
            (65536, 4096, torch.bfloat16),
            (16384, 3071, torch.bfloat16),  # no row but the first starts at 16 bytes: v2 must do as v1
        ],
    },
}


def times_1_7(x):
    return x * 1.7


def add_then_gelu(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def peers(function, device: str) -> dict:
    """PyTorch as it comes: for bias_gelu that is two kernels, the unfused way. And torch.compile, which fuses them."""
    if device == "cpu":
        return {"torch eager": function}
    return {"torch eager": function, "torch.compile": benchmarks.compiled(function)}


def scale_case(n: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="scale",
        shape={"n": n},
        dtype=dtype,
        inputs=lambda on: (torch.randn(n, device=on, dtype=dtype),),
        run=lambda x, rung: step1_simple.scale(x, 1.7, rung=rung),
        reference=times_1_7,
        bytes=2 * n * dtype.itemsize,
        flops=n,
        peers=peers(times_1_7, device),
    )


def bias_gelu_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="bias_gelu",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=lambda on: tuple(torch.randn(shape, device=on, dtype=dtype) for shape in ((rows, width), (width,))),
        run=step1_simple.bias_gelu,
        reference=add_then_gelu,
        bytes=(2 * rows * width + width) * dtype.itemsize,
        flops=10 * rows * width,
        peers=peers(add_then_gelu, device),
    )


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [
        *(scale_case(*case, device) for case in SIZES[size]["scale"]),
        *(bias_gelu_case(*case, device) for case in SIZES[size]["bias_gelu"]),
    ]


if __name__ == "__main__":
    benchmarks.main("step1_simple", cases)
