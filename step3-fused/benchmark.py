"""python benchmark.py [--help]: every rung of this stage beside PyTorch, on the machine at hand."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()

import torch
import torch.nn.functional as F

import step3_fused
from kernel_fusion import benchmarks

TEACHES = "A row read once, then whole chains in one launch: what fusion saves, and where it loses."

# rows, width, dtype. GPT-2 is 768 to 1600 wide; 16384 rows are 16 sequences of 1024 tokens.
ROWS = {
    "emulated": [(16, 768, torch.float32)],
    "cpu": [(4096, 768, torch.float32), (4096, 768, torch.bfloat16)],
    "quick": [(16384, 768, torch.bfloat16)],
    "full": [
        (16384, 768, torch.bfloat16),
        (16384, 768, torch.float32),
        (16384, 1024, torch.bfloat16),
        (16384, 1600, torch.bfloat16),
        (16384, 1599, torch.bfloat16),  # no row but the first starts at 16 bytes: v2 loads one by one
        (8192, 4096, torch.bfloat16),
        (65536, 768, torch.bfloat16),
        (65536, 1024, torch.bfloat16),
        (65536, 4096, torch.bfloat16),
    ],
}
# B, H, S, D, dtype; causal, as GPT-2 is
ATTENTION = {
    "emulated": [(1, 2, 48, 64, torch.float32)],
    "cpu": [(16, 4, 128, 32, torch.float32), (1, 12, 512, 64, torch.float32)],
    "quick": [(1, 12, 128, 64, torch.bfloat16), (8, 12, 1024, 64, torch.bfloat16)],
    "full": [
        (1, 12, 128, 64, torch.bfloat16),
        (1, 12, 1024, 64, torch.bfloat16),
        (8, 12, 128, 64, torch.bfloat16),
        (8, 12, 1024, 64, torch.bfloat16),
        (8, 12, 1024, 64, torch.float32),
        (32, 12, 1024, 64, torch.bfloat16),
        (8, 16, 1024, 64, torch.bfloat16),
        (8, 20, 1024, 64, torch.bfloat16),
        (8, 25, 1024, 64, torch.bfloat16),
    ],
}


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def residual_layer_norm(x, residual, weight, bias):
    total = x + residual
    return layer_norm(total, weight, bias), total


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def attention_residual_layer_norm(q, k, v, residual, weight, bias):
    return layer_norm(attention(q, k, v) + residual, weight, bias)


def attention_block(q, k, v, residual, proj_weight, proj_bias, weight, bias):
    projected = F.linear(attention(q, k, v), proj_weight.mT, proj_bias)
    return residual_layer_norm(projected, residual, weight, bias)


def peers(function, device: str) -> dict:
    """PyTorch as it comes, operation by operation, SDPA among them. And torch.compile, which fuses what it can."""
    if device == "cpu":
        return {"torch eager": function}
    return {"torch eager": function, "torch.compile": benchmarks.compiled(function)}


def rows_case(op: str, function, rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    tensors = 1 if op == "layer_norm" else 2  # as many are read, and as many written

    def inputs(on):
        x = [torch.randn(rows, width, device=on, dtype=dtype) for _ in range(tensors)]
        return (*x, *(torch.randn(width, device=on, dtype=dtype) for _ in range(2)))

    return benchmarks.Case(
        op=op,
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=inputs,
        run=getattr(step3_fused, op),
        reference=function,
        bytes=(2 * tensors * rows * width + 2 * width) * dtype.itemsize,
        flops=(9 + tensors) * rows * width,
        peers=peers(function, device),
    )


def attention_case(
    op: str, function, b: int, h: int, s: int, d: int, dtype: torch.dtype, device: str
) -> benchmarks.Case:
    width = h * d
    block = op == "attention_block"

    def inputs(on):
        # q, k and v as views of one packed tensor, as a GPT-2 block has them
        packed = torch.randn(b, s, 3 * width, device=on, dtype=dtype)
        qkv = (t.view(b, s, h, d).transpose(1, 2) for t in packed.split(width, -1))
        proj = (torch.randn(width, width, device=on, dtype=dtype) * width**-0.5,) if block else ()
        vectors = (torch.randn(width, device=on, dtype=dtype) for _ in range(3 if block else 2))
        return (*qkv, torch.randn(b, s, width, device=on, dtype=dtype), *proj, *vectors)

    elements = b * s * width * (6 if block else 5) + (width * width if block else 0)  # q, k, v, residual, y; sum
    return benchmarks.Case(
        op=op,
        shape={"B": b, "H": h, "S": s, "D": d},
        dtype=dtype,
        inputs=inputs,
        run=lambda *x, rung: getattr(step3_fused, op)(*x, causal=True, rung=rung),
        reference=function,
        bytes=elements * dtype.itemsize,
        flops=2 * b * s * s * width + (2 * b * s * width**2 if block else 0),
        peers=peers(function, device),
        bound="arithmetic",
    )


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    on_rows = {"layer_norm": layer_norm, "residual_layer_norm": residual_layer_norm}
    with_attention = {
        "attention_residual_layer_norm": attention_residual_layer_norm,
        "attention_block": attention_block,
    }
    return [
        *(rows_case(op, function, *case, device) for op, function in on_rows.items() for case in ROWS[size]),
        *(attention_case(op, function, *c, device) for op, function in with_attention.items() for c in ATTENTION[size]),
    ]


if __name__ == "__main__":
    benchmarks.main("step3_fused", cases)
