"""Attention in Triton: the other way to write it, a peer in benchmark.py.

A Triton program is one block seen as a whole: its tiles are values of the language, `tl.dot` multiplies two of them,
and the compiler decides which thread holds what, how a tile lies in shared memory and when its copy begins. Compare
with kernels/attention: here is v2_tiled's loop with the arithmetic of v5_registers.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691.
"""

import math

import torch
import triton
import triton.language as tl

from kernel_fusion.ops import check_dim, check_like, check_type

# Queries and keys of a tile, warps of a program, and how many tiles of keys are there or in flight.
CONFIGS = [
    triton.Config({"QUERIES": queries, "KEYS": keys}, num_warps=warps, num_stages=stages)
    for queries, keys, warps, stages in (
        (16, 128, 4, 3),  # for few queries
        (64, 64, 4, 3),
        (64, 32, 4, 2),  # for float32: wider tiles of 128 columns do not fit
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    )
]


@triton.jit
def _rows(first_row, rows, columns, stride, length, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """A tile of a head: `rows` from the one at `first_row` on. Zeros where there is no row or no column."""
    at = first_row + tl.cast(rows, tl.int64)[:, None] * stride + columns[None, :]
    if MASKED:
        tile = tl.load(at, mask=(rows < length)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM < columns.shape[0]:
        tile = tl.load(at, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _add_tiles(
    out, highest, total, queries, seen, scale, k_head, v_head, k_stride, v_stride, k_length, begin, end,
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of keys from `begin` to `end`. `seen`: how many keys each query sees."""
    keys, columns = tl.arange(0, KEYS), tl.arange(0, COLUMNS)
    for first in range(begin, end, KEYS):
        left = k_length - first
        k_first, v_first = k_head + tl.cast(first, tl.int64) * k_stride, v_head + tl.cast(first, tl.int64) * v_stride
        k = _rows(k_first, keys, columns, k_stride, left, HEAD_DIM, MASKED)
        score = tl.dot(queries, k.T, input_precision="tf32x3")
        if MASKED:
            score = tl.where((first + keys)[None, :] < seen[:, None], score, float("-inf"))
        raised = tl.maximum(highest, tl.max(score, 1) * scale)
        subtracted = raised
        if MASKED:  # nothing seen yet: −inf − (−inf) would be NaN
            subtracted = tl.where(raised == float("-inf"), 0.0, raised)
        weight = tl.exp2(score * scale - subtracted[:, None])
        factor = tl.exp2(highest - subtracted)
        total = total * factor + tl.sum(weight, 1)
        v = _rows(v_first, keys, columns, v_stride, left, HEAD_DIM, MASKED)
        out = tl.dot(weight.to(v.dtype), v, out * factor[:, None], input_precision="tf32x3")
        highest = raised
    return out, highest, total


@triton.jit(do_not_specialize=["q_bucket", "k_bucket"])
def _attention_kernel(
    q, k, v, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row,
    heads, q_length, k_length, scale,
    q_bucket, k_bucket,  # not looked at: what the tuning is remembered by
    HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(q_length, QUERIES)
    first = (tiles - 1 - tl.program_id(0) % tiles) * QUERIES  # the last queries, which see most, come first
    batch, head = (
        tl.cast(tl.program_id(0) // tiles // heads, tl.int64),
        tl.cast(tl.program_id(0) // tiles % heads, tl.int64),
    )
    rows, columns = tl.arange(0, QUERIES), tl.arange(0, COLUMNS)

    seen = tl.full((QUERIES,), k_length, tl.int32)
    all_see, end = k_length, k_length  # so many keys each query of the tile sees, and so many one of them does
    if CAUSAL:
        beyond = k_length - q_length + 1
        seen = tl.minimum(first + rows + beyond, k_length)
        all_see = tl.minimum(tl.maximum(first + beyond, 0), k_length)
        end = tl.minimum(tl.maximum(first + QUERIES - 1 + beyond, 0), k_length)
    whole = all_see // KEYS * KEYS  # the tiles before this one need no mask

    q_first = q + batch * q_batch + head * q_head + tl.cast(first, tl.int64) * q_row
    queries = _rows(q_first, rows, columns, q_row, q_length - first, HEAD_DIM, True)
    k_first, v_first = k + batch * k_batch + head * k_head, v + batch * v_batch + head * v_head
    result = tl.zeros((QUERIES, COLUMNS), tl.float32)
    highest = tl.full((QUERIES,), float("-inf"), tl.float32)  # in powers of 2
    total = tl.zeros((QUERIES,), tl.float32)
    result, highest, total = _add_tiles(
        result, highest, total, queries, seen, scale, k_first, v_first, k_row, v_row, k_length, 0, whole,
        HEAD_DIM, COLUMNS, KEYS, False,
    )  # fmt: skip
    result, highest, total = _add_tiles(
        result, highest, total, queries, seen, scale, k_first, v_first, k_row, v_row, k_length, whole, end,
        HEAD_DIM, COLUMNS, KEYS, True,
    )  # fmt: skip

    result = result / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: a query that sees no key
    at = (
        out
        + batch * out_batch
        + head * out_head
        + tl.cast(first + rows, tl.int64)[:, None] * out_row
        + columns[None, :]
    )
    inside = (first + rows < q_length)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=inside)


_tuned_kernel = triton.autotune(CONFIGS, key=["q_bucket", "k_bucket", "HEAD_DIM", "CAUSAL"])(_attention_kernel)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, config: triton.Config | None = None
) -> torch.Tensor:
    """`softmax(q @ k.mT / sqrt(D)) @ v` for each batch and head.

    Args:
        q: [B, H, Sq, D], D up to 128; float16, bfloat16 or float32. Any strides, but the last dimension is contiguous.
        k, v: [B, H, Sk, D], as `q`.
        causal: query i sees keys j <= i + Sk - Sq, so that the last query sees all.
        config: one of `CONFIGS`; None for the one that is fastest, found by trying each at the first call of its kind.

    Returns:
        A contiguous tensor of q's shape and dtype. A query that sees no key gives 0.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: a shape, device or stride that does not fit.
    """
    check_type("attention", "q", q, (torch.float32, torch.float16, torch.bfloat16))
    check_dim("attention", "q", q, 4)
    batch, heads, q_length, head_dim = q.shape
    if not 1 <= head_dim <= 128:
        raise ValueError(f"attention: the last dimension of `q` (head_dim) must be 1 to 128, got {head_dim}")
    check_dim("attention", "k", k, 4)
    check_like("attention", "k", k, "q", q, (batch, heads, k.shape[2], head_dim))
    check_like("attention", "v", v, "q", q, k.shape)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.stride(3) != 1:
            raise ValueError(f"attention: the last dimension of `{name}` must be contiguous, got {tensor.stride()}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out

    def grid(meta: dict) -> tuple[int]:
        return (batch * heads * triton.cdiv(q_length, meta["QUERIES"]),)

    kernel = _tuned_kernel[grid] if config is None else _attention_kernel[grid]
    kernel(
        q, k, v, out,
        *(tensor.stride(i) for tensor in (q, k, v, out) for i in range(3)),
        heads, q_length, k.shape[2], head_dim**-0.5 * math.log2(math.e),
        triton.next_power_of_2(q_length), triton.next_power_of_2(k.shape[2]),
        HEAD_DIM=head_dim, COLUMNS=max(16, triton.next_power_of_2(head_dim)), CAUSAL=causal,
        **({} if config is None else config.all_kwargs()),
    )  # fmt: skip
    return out
