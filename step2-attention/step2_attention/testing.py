"""What the tests of an op and of its gradient share: inputs, formulas, how exact all must be."""

import mmap
import pathlib

import pytest
import torch

from kernel_fusion import testing

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
NAN = float("nan")

ops = torch.ops.step2_attention
every_attention = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step2_attention", "attention"))
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

# Of a batch of four with 70 keys: key_begin, key_end.
PADDING = {
    "left": ([0, 3, 40, 69], None),
    "right": (None, [70, 64, 33, 1]),
    "both": ([0, 31, 32, 65], [70, 33, 64, 66]),
    "empty rows": ([0, 70, 9, 5], [0, 70, 9, 4]),
    "beyond the tensor": ([-5, -(2**31), 0, 2**31 - 1], [71, 2**31 - 1, -1, -(2**31) + 1000]),
}


def bounds(keys, device):
    """A key_begin or key_end, a number for each batch; or a block_table."""
    return torch.tensor(keys, dtype=torch.int32, device=device)


def lse_for(q):
    """The second output, of which nothing is written yet."""
    return torch.empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)


def tolerance_of(out):
    """Weights of a half type may have been rounded to it."""
    half = out.dtype in (torch.float16, torch.bfloat16)
    return {"rtol": 0.02, "atol": 0.02} if half else {"rtol": 1e-5, "atol": 1e-5}


def qkv(q_length, k_length, dim, dtype, device, *, batch=1, heads=2, kv_heads=None, scale=1.0):
    q = testing.randn((batch, heads, q_length, dim), dtype, device, seed=1, scale=scale)
    shape = (batch, kv_heads or heads, k_length, dim)
    k, v = (testing.randn(shape, dtype, device, seed=s, scale=scale) for s in (2, 3))
    return q, k, v


def on_tensor_cores(rung):
    return rung not in ("auto", "cpu", "v1_naive", "v2_tiled")


def most_columns(rung):
    """Of the rungs on tensor cores."""
    return 64 if rung in ("v6_atomics", "v7_turns") else 128


def can_do(rung, dim, dtype):
    if on_tensor_cores(rung):
        return dim % 8 == 0 and dim <= most_columns(rung) and dtype in (torch.float16, torch.bfloat16)
    return rung != "v2_tiled" or (dim <= 256 and dtype != torch.float64)


def dtype_of(rung):
    """One that the rung takes."""
    return torch.bfloat16 if on_tensor_cores(rung) else torch.float32


def hidden_of(q, k, key_begin=None, key_end=None, causal=False):
    """Which queries do not see which keys: [B, 1, Sq, Sk]."""
    hidden = torch.zeros(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    key = torch.arange(k.shape[2], device=q.device)
    if causal:
        hidden |= torch.ones_like(hidden).triu(k.shape[2] - q.shape[2] + 1)
    if key_begin is not None:
        hidden |= key < key_begin.view(-1, 1, 1, 1)
    if key_end is not None:
        hidden |= key >= key_end.view(-1, 1, 1, 1)
    return hidden


def attention_and_lse_of(q, k, v, key_begin=None, key_end=None, causal=False, scale=None):
    """The formula, composed of PyTorch's operations. A query that sees no key gives 0, and a log-sum-exp of -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = hidden_of(q, k, key_begin, key_end, causal)
    scores = scores.masked_fill(hidden, -INFINITY)
    wide = scores if q.dtype == torch.float64 else scores.float()
    return torch.softmax(scores, -1).masked_fill(hidden, 0) @ v, torch.logsumexp(wide, -1)


def attention_of(*inputs, **options):
    return attention_and_lse_of(*inputs, **options)[0]


# ---- of softmax and its gradient: the mask of squares, and which memory was looked at ----

SQUARES = [
    (1, 1),
    (5, 5),
    (2, 33, 33),
    (2, 3, 4, 4),
    (130, 130),
    (140, 140),
    (2, 1, 40),
    (3, 7, 31),
    (2, 2, 1023),
    (2, 40, 33),
]

PAGEMAP = pathlib.Path("/proc/self/pagemap")
needs_touched_pages = pytest.mark.skipif(not PAGEMAP.exists(), reason="needs Linux's list of touched pages")


def hidden_of_square(x):
    """What the causal mask hides of squares of scores: lower right corners meet."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(x.shape[-1] - x.shape[-2] + 1)


def untouched_square():
    """A float64 square of zeros in memory that nobody has touched, not even for reading. A row has two pages."""
    width = 2 * mmap.PAGESIZE // 8
    memory = mmap.mmap(-1, 8 * width * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float64).view(width, width)


def touched_pages(square):
    """Which pages of an `untouched_square` are there by now: bool [width, 2]."""
    with PAGEMAP.open("rb") as pages:  # 64 bits a page; the highest says that it is there
        pages.seek(square.data_ptr() // mmap.PAGESIZE * 8)
        listed = torch.frombuffer(bytearray(pages.read(8 * 2 * len(square))), dtype=torch.int64)
    return (listed < 0).view(-1, 2)


# ---- of decode ----


def cached(q_length, keys, dim, dtype, device, *, batch=2, heads=2, kv_heads=None, scale=1.0):
    """q, k_cache, v_cache."""
    q = testing.randn((batch, heads, q_length, dim), dtype, device, seed=1, scale=scale)
    shape = (batch, kv_heads or heads, keys, dim)
    return q, *(testing.randn(shape, dtype, device, seed=s, scale=scale) for s in (2, 3))


def paged(q_length, pages, block_size, dim, dtype, device, *, batch=2, heads=2, kv_heads=None):
    """q, k_cache, v_cache, block_table: every page is some batch's, in no order, and one is nobody's."""
    q = testing.randn((batch, heads, q_length, dim), dtype, device, seed=1)
    shape = (batch * pages + 1, kv_heads or heads, block_size, dim)
    caches = [testing.randn(shape, dtype, device, seed=s) for s in (2, 3)]
    order = torch.randperm(batch * pages + 1, generator=torch.Generator().manual_seed(5))
    for cache in caches:
        cache[order[-1]] = float("nan")
    return q, *caches, order[:-1].int().view(batch, pages).to(device)


def takes_pages(rung):
    return rung in ("auto", "cpu", "v1_head", "v6_paged")
