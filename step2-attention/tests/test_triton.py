"""triton_kernels.py, on a GPU and by Triton's interpreter, against formulas."""

import pytest
import torch

from kernel_fusion import testing
from kernel_fusion.testing.triton_peer import RUNNERS, Runner, kernels_of, on_gpu

kernels = kernels_of("step2")


@pytest.fixture(params=RUNNERS)
def attend(request, tmp_path):
    """A function that takes calls, (function, inputs, options), and gives their outputs."""
    return Runner("step2", request.param, tmp_path)


def formula(q, k, v, causal):
    """In the inputs' type. A query that sees no key gives 0."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


def qkv(q_length, k_length, dim, dtype=torch.float32, scale=1.0):
    shapes = ((2, 2, length, dim) for length in (q_length, k_length, k_length))
    return tuple(testing.randn(shape, dtype, "cpu", seed, scale) for seed, shape in enumerate(shapes))


def check(attend, inputs, causal, configs=(1,), allowed=2e-6):
    """Each of `inputs`, by each of these configurations, against the formula in float64."""
    options = [{"causal": causal, "config": config} for config in configs]
    calls = [("attention", tensors, given) for tensors in inputs for given in options]
    for (_, (q, k, v), _), out in zip(calls, attend(calls), strict=True):
        expected = formula(q.double(), k.double(), v.double(), causal)
        assert out.shape == expected.shape
        assert out.dtype == q.dtype
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, atol=allowed, rtol=allowed)


with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@with_and_without_mask
def test_attention_of_any_length(causal, attend):
    """Tiles of 64: less than one, one, just more; queries that see no key, no key at all, no query."""
    lengths = [(1, 1), (1, 200), (31, 33), (64, 64), (65, 129), (129, 65), (200, 3), (5, 0), (0, 5)]
    check(attend, [qkv(q_length, k_length, 16) for q_length, k_length in lengths], causal)


@with_and_without_mask
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_attention_of_any_head_dim(dtype, causal, attend):
    attend.multiplies(dtype)
    allowed = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    dims = (8, 16, 24, 64, 72, 80, 96, 128)
    narrow = 2 if dtype == torch.float32 else 1  # wider tiles of float32 do not fit
    check(attend, [qkv(70, 90, dim, dtype) for dim in dims], causal, (narrow,), allowed)


@with_and_without_mask
def test_every_configuration_is_right(causal, attend):
    dtype, allowed = (torch.float16, 3e-3) if attend.how == "cuda" else (torch.float32, 2e-6)  # wide tiles must fit
    inputs = [qkv(150, 300, 40, dtype), qkv(2, 129, 16, dtype)]
    check(attend, inputs, causal, range(len(kernels.CONFIGS)), allowed)


def test_tensors_are_read_as_they_lie(attend):
    """Cut out of one product, heads behind tokens, and one head for all."""
    packed = testing.randn((2, 90, 3, 2, 32), torch.float32, "cpu").permute(2, 0, 3, 1, 4)
    shared = tuple(t[:, :1].expand(2, 2, 90, 32) for t in packed)
    check(attend, [tuple(packed), shared], True)


def test_the_maximum_is_the_true_one(attend):
    """Scores far beyond what exp can do; and such that all are far below 0."""
    (q, k, _), (*_, v) = qkv(40, 100, 16, scale=30.0), qkv(40, 100, 16)
    check(attend, [(q, k, v), (q.abs(), -k.abs(), v)], True, allowed=1e-3)


@on_gpu
@with_and_without_mask
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_tuned_attention(dtype, causal):
    for dim in (64, 80, 128):
        q, k, v = (t.cuda() for t in qkv(300, 500, dim, dtype))
        out = kernels.attention(q, k, v, causal=causal).cpu().double()
        expected = formula(*(t.cpu().double() for t in (q, k, v)), causal)
        allowed = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(out, expected, atol=allowed, rtol=allowed)


BAD = {
    "`q` must be float32, float16 or bfloat16, got float64": lambda q, k, v: (q.double(), k, v),
    "`q` must have 4 dimensions": lambda q, k, v: (q[0], k, v),
    "(head_dim) must be 1 to 128, got 136": lambda q, k, v: (torch.zeros(1, 1, 2, 136), k, v),
    "`k` must have the dtype of `q`": lambda q, k, v: (q, k.half(), v),
    "`k` must have shape": lambda q, k, v: (q, k[..., :8], v),
    "`v` must have shape": lambda q, k, v: (q, k, v[:, :, :4]),
    "the last dimension of `q` must be contiguous": lambda q, k, v: (q.mT.contiguous().mT, k, v),
    "the last dimension of `k` must be contiguous": lambda q, k, v: (q, k.mT.contiguous().mT, v),
    "the last dimension of `v` must be contiguous": lambda q, k, v: (q, k, v.mT.contiguous().mT),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    with testing.raises((TypeError, ValueError), message):
        kernels.attention(*BAD[message](*qkv(5, 7, 16)))
