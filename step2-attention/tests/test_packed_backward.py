"""attention_backward over packed rows: each document's gradients as by itself, and none gets any of another."""

import itertools

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from step2_attention.testing import (
    INFINITY,
    NAN,
    attention_and_lse_of,
    bounds,
    dtype_of,
    every_dtype,
    every_rung_of,
    gradients_of,
    kept,
    of_varlen,
    on_each_device,
    qkv,
    varlen,
    with_and_without_mask,
)

OP = "attention_backward"
backward = step2_attention.attention_backward

# Lengths of documents, in queries and, where these differ, in keys: some end with a tile, some are shorter than one.
LENGTHS = {
    "many": ([1, 37, 0, 128, 5, 100, 64, 0, 1, 1, 90], None),
    "ones": ([1] * 70, None),
    "no keys": ([70, 60, 3], [80, 0, 150]),
    "no queries": ([0, 30, 0, 50, 0], [33, 40, 200, 60, 1]),
    "more queries": ([113, 128, 90, 3], [75, 40, 130, 1]),
    "more keys": ([1, 113, 1, 30, 0], [147, 203, 3, 129, 64]),
}

packed_rungs = every_rung_of(
    OP, lambda device, rung: rung not in ("v3_mma", "v4_warpgroups", "v5_persistent", "v6_atomics")
)
in_turns = every_rung_of(OP, lambda device, rung: rung in ("v7_turns", "v8_wide"))


def dim_of(rung):
    """v8's columns are two slices, the second one not full."""
    return 104 if rung == "v8_wide" else 64


def starts(lengths, device):
    """cu_seqlens of documents."""
    return bounds([0, *itertools.accumulate(lengths)], device)


def each_alone(function, queries, keys, *tensors):
    """What function(grad, q, k, v, …) gives of each document's own rows, one behind the other."""
    parts = []
    for own, own_keys in zip(itertools.pairwise(queries.tolist()), itertools.pairwise(keys.tolist()), strict=True):
        rows = [slice(*(own_keys if i in (2, 3) else own)) for i in range(len(tensors))]
        parts.append(function(*(t[:, :, r] for t, r in zip(tensors, rows, strict=True))))
    return [torch.cat(outputs, 2) for outputs in zip(*parts, strict=True)]


def given(lengths, key_lengths, dim, dtype, device, causal=False, scale=None, heads=2, kv_heads=1):
    """All that the op takes: a gradient, attention's inputs, what it made of them, a gradient of its lse, documents."""
    queries = starts(lengths, device)
    keys = queries if key_lengths is None else starts(key_lengths, device)
    q, k, v = qkv(sum(lengths), sum(key_lengths or lengths), dim, dtype, device, heads=heads, kv_heads=kv_heads)
    grad = testing.randn(q.shape, dtype, device, seed=4)
    grad_lse = testing.randn(q.shape[:3], torch.float32, device, seed=5)
    out, lse = each_alone(
        lambda _, *own: attention_and_lse_of(*own, causal=causal, scale=scale),
        queries,
        keys,
        *(t.double() for t in (grad, q, k, v)),
    )
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    of_lse = lse.to(lse_dtype), None, None, grad_lse.to(lse_dtype)
    return grad, q, k, v, out.to(dtype), *of_lse, None, queries, None if key_lengths is None else keys


def of_documents(grad, q, k, v, out, lse, key_begin, key_end, grad_lse, rng_state, queries, keys=None, **options):
    """The formulas, on each document by itself."""

    def alone(*own):
        return gradients_of(*own[:6], grad_lse=own[6], **options)

    return each_alone(alone, queries, queries if keys is None else keys, grad, q, k, v, out, lse, grad_lse)


def assert_gradients(got, inputs, **options):
    wide = (t.double() if t is not None and t.is_floating_point() else t for t in inputs)
    expected = of_documents(*wide, **options)
    rtol = 0.02 if got[0].dtype.itemsize == 2 else 1e-4
    greatest = max(e.abs().max().item() for e in expected)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=rtol, atol=rtol * greatest)


@packed_rungs
@with_and_without_mask
@pytest.mark.parametrize("name", LENGTHS)
def test_each_document_has_the_gradients_that_it_has_by_itself(name, causal, device, rung):
    inputs = given(*LENGTHS[name], dim_of(rung), dtype_of(rung), device, causal)
    assert_gradients(backward(*inputs, causal=causal, rung=rung), inputs, causal=causal)


@every_dtype
@with_and_without_mask
def test_the_plain_version_in_every_dtype(causal, dtype):
    for name in ("many", "more queries", "more keys"):
        inputs = given(*LENGTHS[name], 24, dtype, "cpu", causal, scale=0.3, heads=4, kv_heads=2)
        assert_gradients(backward(*inputs, causal=causal, scale=0.3), inputs, causal=causal, scale=0.3)


@packed_rungs
def test_the_contract_with_documents(device, rung):
    """Among them one without keys, whose queries fill a tile that nobody comes to, and one without queries."""
    inputs = given([150, 40, 60, 0, 5], [0, 30, 100, 40, 9], 40, dtype_of(rung), device, causal=True)
    testing.check_contract(
        step2_attention,
        OP,
        inputs,
        rung,
        reference=of_documents,
        eager=lambda *inputs, **options: of_documents(*inputs, by_lse=False, **options),
        kwargs={"causal": True},
        layouts=False,
    )


@packed_rungs
@with_and_without_mask
def test_one_document_is_no_packed_row(causal, device, rung):
    """To the last bit, in every tile."""
    *inputs, queries, keys = given([200], [340], dim_of(rung), dtype_of(rung), device, causal)
    alone = backward(*inputs, causal=causal, rung=rung)
    for t, expected in zip(backward(*inputs, queries, keys, causal=causal, rung=rung), alone, strict=True):
        assert torch.equal(t, expected)


@packed_rungs
@with_and_without_mask
@pytest.mark.parametrize("value", [NAN, INFINITY, 100.0])
def test_no_document_gets_anything_of_another(value, causal, device, rung):
    """Whatever one in the middle of tiles holds: others keep their gradients to the last bit, and its own change."""
    inputs = given([30, 41, 20], [40, 57, 33], dim_of(rung), dtype_of(rung), device, causal)
    grad, q, k, v, out, lse, _, _, grad_lse, _, *documents = inputs
    before = backward(*inputs, causal=causal, rung=rung)
    queries, keys = (slice(*t[1:3].tolist()) for t in documents)
    for t, own in ((grad, queries), (q, queries), (k, keys), (v, keys), (grad_lse, queries)):
        t[:, :, own] = value
    own = attention_and_lse_of(q[:, :, queries].double(), *(t[:, :, keys].double() for t in (k, v)), causal=causal)
    out[:, :, queries], lse[:, :, queries] = (t.to(like.dtype) for t, like in zip(own, (out, lse), strict=True))
    after = backward(*inputs, causal=causal, rung=rung)
    for t, expected, own in zip(after, before, (queries, keys, keys), strict=True):
        assert not torch.equal(t[:, :, own], expected[:, :, own])
        assert value == 100 or t[:, :, own.stop - 1].isnan().all()
        t[:, :, own] = expected[:, :, own]
        assert torch.equal(t, expected)


@in_turns
@pytest.mark.parametrize("which", ["grad", "q", "k", "v"])
def test_one_nan_stays_in_its_document_and_is_seen_there(which, device, rung):
    """A document of several tiles, of which one element is NaN: no other gets it, and it is not lost."""
    lengths = [50, 200, 50]
    inputs = given(lengths, None, dim_of(rung), dtype_of(rung), device, True, heads=1)
    grad, q, k, v, out, lse, *_, queries, _ = inputs
    before = backward(*inputs, causal=True, rung=rung)
    dict(zip(("grad", "q", "k", "v"), inputs, strict=False))[which][0, 0, 240, 3] = NAN
    own = slice(50, 250)
    expected = attention_and_lse_of(*(t[:, :, own].double() for t in (q, k, v)), causal=True)
    out[:, :, own], lse[:, :, own] = (t.to(like.dtype) for t, like in zip(expected, (out, lse), strict=True))
    after = backward(*inputs, causal=True, rung=rung)
    for t, e in zip(after, before, strict=True):
        assert torch.equal(t[:, :, :50], e[:, :, :50])
        assert torch.equal(t[:, :, 250:], e[:, :, 250:])
        assert t[:, :, own].isfinite().all() == (which == "v" and t is after[2])  # values are no part of dv


@testing.where(lambda rung, dim: rung != "v7_turns" or dim <= 64)
@of_varlen
@packed_rungs
def test_lengths_of_flash_attention_s_varlen(longest, dim, device, rung):
    inputs = given(varlen(longest[0], 4), varlen(longest[1], 1), dim, dtype_of(rung), device, True, heads=1)
    assert_gradients(backward(*inputs, causal=True, rung=rung), inputs, causal=True)


@in_turns
@with_and_without_mask
def test_more_tiles_of_documents_than_multiprocessors(causal, device, rung):
    """Persistent blocks take several tiles; of keys that straddle documents, or of which nobody asks."""
    heads = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 8
    lengths, key_lengths = [1, 37, 0, 30, 5, 64, 0, 20], [60, 37, 190, 30, 0, 300, 130, 8]
    inputs = given(lengths, key_lengths, dim_of(rung), torch.bfloat16, device, causal, heads=heads, kv_heads=heads // 2)
    got = backward(*inputs, causal=causal, rung=rung)
    assert_gradients(got, inputs, causal=causal)
    again = backward(*inputs, causal=causal, rung=rung)
    assert all(torch.equal(a, g) for a, g in zip(again, got, strict=True))


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in ("v7_turns", "v8_wide"):
        inputs = given([100, 30, 0, 40], [100, 150, 60, 40], dim_of(rung), torch.bfloat16, "cpu", True)
        assert_gradients(backward(*inputs, causal=True, rung=rung), inputs, causal=True)


@packed_rungs
def test_dropout_goes_by_the_place_in_the_row(device, rung):
    # The second document begins at a piece of queries, not at one of keys; the third at neither.
    lengths, key_lengths = [32, 70, 1], [40, 90, 33]
    inputs = given(lengths, key_lengths, dim_of(rung), dtype_of(rung), device)
    grad, q, k, v, _, _, _, _, grad_lse, _, *documents = inputs
    rng_state, p = torch.tensor([3, 8]), 0.4
    factors = kept(1, 2, q.size(2), k.size(2), p, rng_state).to(device).double() / (1 - p)
    wide = [t.double() for t in (grad, q, k, v, grad_lse)]
    # All documents at once, so that factors stand where they do: what is hidden is far away.
    own = torch.block_diag(*(torch.ones(n, m) for n, m in zip(lengths, key_lengths, strict=True))).to(device) != 0
    scores = (wide[1] @ wide[2].mT * q.size(-1) ** -0.5).masked_fill(~own, -INFINITY)
    weights, lse = scores.softmax(-1), scores.logsumexp(-1)
    out = (factors * weights) @ wide[3]
    delta = (wide[0] * out).sum(-1) - wide[4]
    grad_scores = weights * (factors * (wide[0] @ wide[3].mT) - delta.unsqueeze(-1)) * q.size(-1) ** -0.5
    expected = (
        grad_scores @ wide[2],
        (grad_scores.mT @ wide[1]).sum(1, keepdim=True),
        ((factors * weights).mT @ wide[0]).sum(1, keepdim=True),
    )
    inputs = grad, q, k, v, out.to(q.dtype), lse.float(), None, None, grad_lse, rng_state, *documents
    tolerance = 0.02 if q.dtype.itemsize == 2 else 1e-4
    for g, e in zip(backward(*inputs, dropout_p=p, rung=rung), expected, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=tolerance, atol=tolerance * e.abs().max().item())


# ---- as torch sees it ----


@on_each_device
@with_and_without_mask
def test_gradients_of_attention_with_documents(causal, device):
    """And the gradients of these."""
    q, k, v = (t.requires_grad_() for t in qkv(7, 9, 3, torch.float64, device, heads=2, kv_heads=1))
    documents = starts([3, 0, 3, 1], device), starts([2, 1, 5, 1], device)

    def function(q, k, v):
        out, lse = step2_attention.attention(
            q, k, v, None, None, None, *documents, causal=causal, scale=0.7, return_lse=True
        )
        return out, lse.nan_to_num(neginf=0)

    assert torch.autograd.gradcheck(function, (q, k, v))
    assert torch.autograd.gradgradcheck(function, (q, k, v))


@on_each_device
def test_it_is_registered_as_torch_wants_it(device):
    inputs = given([3, 0, 5], [4, 1, 2], 16, torch.float32, device, True, heads=4, kv_heads=2)
    testing.check_op(step2_attention, OP, inputs, {"causal": True})


def test_rungs_without_documents_say_so():
    inputs = given([3, 5], None, 16, torch.float16, "cpu")
    for rung in ("v3_mma", "v4_warpgroups", "v5_persistent", "v6_atomics"):
        with testing.raises(ValueError, f"{OP}: rung '{rung}' takes no packed rows (`cu_seqlens`); these can: 'v1_"):
            backward(*inputs, rung=rung)
    with testing.raises(ValueError, "rung 'v2_tiled' takes packed rows (`cu_seqlens`) in float32 only"):
        backward(*inputs, rung="v2_tiled")


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_what_are_no_documents_is_refused(device):
    q = torch.ones(1, 2, 5, 8, device=device)
    good = {"grad": q, "q": q, "k": q, "v": q, "out": q, "lse": torch.ones(1, 2, 5, device=device)}
    documents = bounds([0, 3, 5], device)
    bad = [
        ("`cu_seqlens_k` needs `cu_seqlens`", {"cu_seqlens_k": documents}),
        ("`key_end` must be None where `cu_seqlens`", {"cu_seqlens": documents, "key_end": bounds([5], device)}),
        ("`cu_seqlens` must have at least 2 numbers, got 1", {"cu_seqlens": documents[:1]}),
    ]
    if device == "cpu":
        bad.append(("`cu_seqlens` must end with 5, got 4", {"cu_seqlens": bounds([0, 3, 4], device)}))
    for text, changed in bad:
        with testing.raises(ValueError, f"{OP}: {text}"):
            backward(**good, **changed)


if __name__ == "__main__":
    testing.main(__file__)
