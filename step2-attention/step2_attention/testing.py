"""What the tests of an op and of its gradient share: inputs, formulas, how exact all must be."""

import functools
import math
import mmap
import pathlib

import pytest
import torch

from kernel_fusion import testing

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
NAN = float("nan")

ops = torch.ops.step2_attention


def every_rung_of(op, only=lambda device, rung: True):
    """A test of each rung on each device that there is."""
    rungs = testing.device_rungs("step2_attention", op)
    return pytest.mark.parametrize(("device", "rung"), [p for p in rungs if only(*p.values)])


def of_the_op(op=None):
    """Leaves out rungs that a test of what is the op's need not run; `op` may be the test's own parameter."""
    if op is None:
        return testing.where(lambda op, device, rung: testing.stands_for_all("step2_attention", op, device, rung))
    return testing.where(lambda device, rung: testing.stands_for_all("step2_attention", op, device, rung))


every_attention = every_rung_of("attention")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
float_and_half = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
half_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
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


# FlashAttention's, of its tests of varlen: (queries, keys) of a document at the most, and head_dims.
VARLEN = [(1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)]
VARLEN += [(1024, 1023), (2048, 2048)]
VARLEN_DIMS = [32, 64, 96, 128]


def of_varlen(test):
    """A test of (queries, keys) and a head_dim: on a GPU all, on a CPU each of the short ones with one head_dim."""

    def runs(device, longest, dim):
        return device == "cuda" or (max(longest) <= 256 and dim == VARLEN_DIMS[VARLEN.index(longest) % 4])

    test = pytest.mark.parametrize("dim", VARLEN_DIMS)(testing.where(runs)(test))
    return pytest.mark.parametrize("longest", VARLEN, ids=str)(test)


def varlen(most, without):
    """Lengths of documents, up to `most`: some are 1, and number `without` is 0."""
    lengths = [most, 1, max(1, most - 20), max(1, most - most // 3), 2, max(1, most - 7)]
    lengths[without] = 0
    return lengths


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


def check_packed_gradients(function, inputs):
    """Of q, k and v that are slices of one tensor: the same bits as of others, in slices of one tensor."""
    packed = torch.stack(inputs).permute(1, 3, 0, 2, 4).contiguous()
    found = []
    for leaves in (inputs, packed.permute(2, 0, 3, 1, 4).unbind()):
        leaves = [t.detach().requires_grad_() for t in leaves]
        out = function(*leaves)
        found.append(torch.autograd.grad(out, leaves, testing.randn(out.shape, out.dtype, out.device, seed=9)))
    for apart, together, place in zip(*found, range(3), strict=True):
        assert torch.equal(apart, together)
        assert apart.is_contiguous()
        assert together._base is found[1][0]._base
        assert together.data_ptr() == together._base[:, :, place].data_ptr()
    assert found[1][0]._base.shape == packed.shape


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


def attention_and_lse_of(q, k, v, key_begin=None, key_end=None, causal=False, scale=None, factors=1.0):
    """The formula, composed of PyTorch's operations. A query that sees no key gives 0, and a log-sum-exp of -inf.

    factors: what dropout multiplies weights by.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = hidden_of(q, k, key_begin, key_end, causal)
    scores = scores.masked_fill(hidden, -INFINITY)
    wide = scores if q.dtype == torch.float64 else scores.float()
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0)
    return (factors * weights) @ v, torch.logsumexp(wide, -1)


def attention_of(*inputs, **options):
    return attention_and_lse_of(*inputs, **options)[0]


def kept(batch, heads, q_length, k_length, p, rng_state):
    """Which weights stay: by step 1's dropout of ones, where element 8n + j has number j of Philox's call n."""
    import step1_simple  # where it is not built, the error gives the command

    pieces = (batch * heads, -(-q_length // 16), -(-k_length // 32))
    ones = torch.ones(math.prod(pieces) * 64, 8)
    dropped = step1_simple.bias_dropout_residual(ones, torch.zeros(8), torch.zeros_like(ones), p, rng_state.cpu())
    # A call: of a piece the queries i and i + 8, and the keys j, j + 8, j + 16 and j + 24.
    numbers = dropped.ne(0).view(*pieces, 8, 8, 4, 2).permute(0, 1, 6, 3, 2, 5, 4)
    mask = numbers.reshape(batch * heads, pieces[1] * 16, pieces[2] * 32)
    return mask[:, :q_length, :k_length].reshape(batch, heads, q_length, k_length)


def gradients_of(
    grad,
    q,
    k,
    v,
    out,
    lse,
    key_begin=None,
    key_end=None,
    grad_lse=None,
    causal=False,
    scale=None,
    by_lse=True,
    factors=1.0,
):
    """The formulas of kernels/attention_backward/rungs.h; without `by_lse` the weights are a softmax of the scores."""
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    hidden = hidden_of(q, k, key_begin, key_end, causal)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = ((q @ k.mT) * scale).masked_fill(hidden, -INFINITY)
    weights = torch.exp(scores - lse.unsqueeze(-1)) if by_lse else torch.softmax(scores, -1)
    weights = weights.masked_fill(hidden, 0)
    delta = (grad * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.unsqueeze(-1).to(delta.dtype)
    grad_scores = weights * (factors * (grad @ v.mT) - delta)
    dk, dv = scale * grad_scores.mT @ q, (factors * weights).mT @ grad
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    return scale * grad_scores @ k, dk, dv


def spoil_padding(q, k, v, key_begin, key_end):
    """Makes keys and values NaN where no key exists. Returns where: [B, Sk]."""
    missing = hidden_of(q, k, key_begin, key_end).all(-2).squeeze(1)
    for t in (k, v):
        t.masked_fill_(missing[:, None, :, None], NAN)
    return missing


def views_of(q, k, v):
    """The same tensors, or parts of them, by strides of all kinds."""
    return [
        (q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 2, -1, -1), v),  # strides of 0
        (q[:, :, ::2], k[:, :, 1::3], v[:, :, 1::3]),
        (q[..., ::2], k[..., ::2], v[..., 1::2]),  # rows not in one piece
        (q.flip(2), k.mT.contiguous().mT, v.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)),
    ]


FAR = {"batch": 0, "heads": 1, "positions": 2}


def two_along(far):
    """A shape with two elements along this dimension."""
    return [2 if FAR[far] == dim else 1 for dim in range(3)] + [8]


def far_apart(t, far):
    """A copy of which these two are 2³² elements and more apart: most of the memory nobody touches."""
    distance = (1 << 32) + 4096  # what wraps around lands where nothing is
    strides = [8, 8, 8, 1]
    strides[FAR[far]] = distance
    return testing.lazy_memory(distance + 4096, t.dtype, t.device).as_strided(t.shape, strides).copy_(t)


# ---- of softmax and its gradient: formulas, the mask of squares, and which memory was looked at ----

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


def softmax_of(x, scale=None, causal=False):
    """The formula, composed of PyTorch's operations. What is hidden is 0."""
    scores = x if scale is None else scale * x
    if not causal:
        return torch.softmax(scores, -1)
    hidden = hidden_of_square(x)
    return torch.softmax(scores.masked_fill(hidden, -INFINITY), -1).masked_fill(hidden, 0)


def softmax_gradient_of(grad, y, scale=None, causal=False):
    """The formula, composed of PyTorch's operations. What is hidden is 0."""
    if causal:
        hidden = hidden_of_square(y)
        grad, y = grad.masked_fill(hidden, 0), y.masked_fill(hidden, 0)
    gradient = y * (grad - (y * grad).sum(-1, keepdim=True))
    return gradient if scale is None else scale * gradient


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


cached = functools.partial(qkv, batch=2)  # q, k_cache, v_cache


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
