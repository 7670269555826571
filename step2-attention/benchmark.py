"""python benchmark.py [--help]: every rung of this stage beside PyTorch, on the machine at hand."""

import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import step2_attention
from kernel_fusion import benchmarks

TEACHES = "Threads that need each other's results: shuffles, barriers; attention without stored scores; tensor cores."

# rows, width, dtype
SOFTMAX = {
    "emulated": [(16, 1024, torch.float32)],
    "cpu": [(4096, 1024, torch.float32), (4096, 1024, torch.bfloat16)],
    "quick": [(16384, 1024, torch.bfloat16)],
    "full": [
        (16384, 768, torch.bfloat16),
        (16384, 1024, torch.bfloat16),
        (16384, 1024, torch.float32),
        (16384, 1600, torch.bfloat16),
        (16384, 1023, torch.bfloat16),  # no row but the first starts at 16 bytes: v3 loads one by one
        (8192, 4096, torch.bfloat16),
        (2048, 50257, torch.bfloat16),  # GPT-2's vocabulary
        (65536, 1024, torch.bfloat16),
        (65536, 4096, torch.bfloat16),
    ],
}
# B, H, Sq, Sk, D, causal, dtype
ATTENTION = {
    "emulated": [(1, 2, 64, 64, 64, True, torch.bfloat16)],  # which every rung takes
    "cpu": [(1, 12, 512, 512, 64, causal, torch.float32) for causal in (False, True)],
    "quick": [(8, 12, 1024, 1024, 64, True, torch.bfloat16)],
    "full": [
        (1, 12, 1024, 1024, 64, True, torch.bfloat16),
        (8, 12, 1, 1024, 64, False, torch.bfloat16),  # a decode step
        (8, 12, 1024, 1024, 64, True, torch.float32),
        (8, 12, 1024, 1024, 64, True, torch.float16),
        (8, 12, 1024, 1024, 64, False, torch.bfloat16),
        (8, 12, 1024, 1024, 64, True, torch.bfloat16),
        (32, 12, 512, 512, 64, True, torch.bfloat16),
        (32, 12, 1024, 1024, 64, False, torch.bfloat16),
        (32, 12, 1024, 1024, 64, True, torch.bfloat16),
        (4, 16, 4096, 4096, 64, False, torch.bfloat16),
        (4, 16, 4096, 4096, 64, True, torch.bfloat16),
        (4, 16, 2048, 2048, 128, True, torch.bfloat16),
        (4, 16, 4096, 4096, 128, True, torch.bfloat16),
    ],
}


def softmax_of(x):
    return torch.softmax(x, -1)


def softmax_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    peers = {"torch eager": softmax_of}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(softmax_of)
    return benchmarks.Case(
        op="softmax",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=lambda on: (torch.randn(rows, width, device=on, dtype=dtype),),
        run=step2_attention.softmax,
        reference=softmax_of,
        bytes=2 * rows * width * dtype.itemsize,
        flops=5 * rows * width,
        peers=peers,
    )


def composed(causal: bool):
    """Attention as the formula says, of four operations that each write their result."""

    def matmul_softmax_matmul(q, k, v):
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
                k.shape[-2] - q.shape[-2] + 1
            )
            scores = scores.masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return matmul_softmax_matmul


def sdpa(causal: bool, backend: SDPBackend | None = None):
    """PyTorch's own attention, by the backend that it would choose or by the one named."""

    def run(q, k, v):
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


@functools.cache
def causal_blocks(length: int):
    """Which tiles of scores FlexAttention has to look at."""
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")


def flex(q, k, v):
    """FlexAttention under torch.compile, causal: a Triton kernel made for the mask."""
    return compiled_flex(q, k, v, block_mask=causal_blocks(q.shape[-2]))


compiled_flex = torch.compile(flex_attention, dynamic=False)


def attention_case(b, h, sq, sk, d, causal: bool, dtype: torch.dtype, device: str) -> benchmarks.Case:
    assert not causal or sq == sk  # SDPA's is_causal is aligned to the upper left, ours to the lower right
    peers = {"torch eager": composed(causal)}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(composed(causal))
        peers["SDPA math"] = sdpa(causal, SDPBackend.MATH)
        peers["SDPA efficient"] = sdpa(causal, SDPBackend.EFFICIENT_ATTENTION)
        peers["SDPA flash"] = sdpa(causal, SDPBackend.FLASH_ATTENTION)
        peers["SDPA cuDNN"] = sdpa(causal, SDPBackend.CUDNN_ATTENTION)
        if causal and dtype.itemsize == 2:
            peers["FlexAttention"] = flex
    else:
        peers["SDPA"] = sdpa(causal)
    return benchmarks.Case(
        op="attention",
        shape={"B": b, "H": h, "Sq": sq, "Sk": sk, "D": d, "causal": int(causal)},
        dtype=dtype,
        inputs=lambda on: tuple(torch.randn(b, h, s, d, device=on, dtype=dtype) for s in (sq, sk, sk)),
        run=lambda q, k, v, rung: step2_attention.attention(q, k, v, causal=causal, rung=rung),
        reference=composed(causal),
        bytes=b * h * (2 * sq + 2 * sk) * d * dtype.itemsize,
        written=b * h * sq * d * dtype.itemsize,
        flops=4 * b * h * sq * sk * d // (2 if causal else 1),
        peers=peers,
        bound="memory" if sq == 1 else "arithmetic",
    )


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [
        *(softmax_case(*case, device) for case in SOFTMAX[size]),
        *(attention_case(*case, device) for case in ATTENTION[size]),
    ]


if __name__ == "__main__":
    benchmarks.main("step2_attention", cases)
