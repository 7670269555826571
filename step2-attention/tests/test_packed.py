"""attention over packed rows: each document as by itself, and none sees another."""

import itertools

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from step2_attention.testing import (
    NAN,
    attention_and_lse_of,
    bounds,
    dtype_of,
    every_dtype,
    every_rung_of,
    kept,
    of_varlen,
    on_each_device,
    qkv,
    tolerance_of,
    varlen,
    with_and_without_mask,
)

# Lengths of documents, in queries and, where these differ, in keys: some end with a tile, some are shorter than one.
LENGTHS = {
    "many": ([1, 37, 0, 128, 5, 100, 64, 0, 1, 1, 90], None),
    "one": ([200], None),
    "ones": ([1] * 70, None),
    "empty ends": ([0, 0, 130, 0], None),
    "no keys": ([70, 60, 3], [80, 0, 100]),
    "more queries": ([113, 128, 90, 3], [75, 40, 130, 1]),
    "more keys": ([1, 113, 1, 30, 0], [147, 203, 3, 129, 64]),
}


packed_rungs = every_rung_of("attention", lambda device, rung: rung not in ("v3_mma", "v4_pipeline"))


def starts(lengths, device):
    """cu_seqlens of documents."""
    return bounds([0, *itertools.accumulate(lengths)], device)


def packed(name, dim, dtype, device, **options):
    """q, k, v, and the starts of documents in q and in k."""
    lengths, key_lengths = LENGTHS[name]
    q, k, v = qkv(sum(lengths), sum(key_lengths or lengths), dim, dtype, device, **options)
    return q, k, v, starts(lengths, device), None if key_lengths is None else starts(key_lengths, device)


def attend_packed(q, k, v, cu_seqlens, cu_seqlens_k=None, **options):
    return step2_attention.attention(
        q, k, v, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, return_lse=True, **options
    )


def each_alone(q, k, v, cu_seqlens, cu_seqlens_k=None, **options):
    """The formula on each document by itself."""
    own = [t.tolist() for t in (cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)]
    parts = []
    for (first, last), (first_key, last_key) in zip(*map(itertools.pairwise, own), strict=True):
        k_own, v_own = k[:, :, first_key:last_key], v[:, :, first_key:last_key]
        parts.append(attention_and_lse_of(q[:, :, first:last], k_own, v_own, **options))
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return out, lse


def assert_attends_packed(outputs, q, k, v, *documents, **options):
    expected, expected_lse = each_alone(*(t.double() for t in (q, k, v)), *documents, **options)
    torch.testing.assert_close(outputs[0].double(), expected, **tolerance_of(outputs[0]))
    torch.testing.assert_close(outputs[1].double(), expected_lse, rtol=1e-4, atol=1e-4)


@packed_rungs
@with_and_without_mask
@pytest.mark.parametrize("name", LENGTHS)
def test_each_document_is_attended_to_as_by_itself(name, causal, device, rung):
    inputs = packed(name, 64, dtype_of(rung), device, heads=2)
    assert_attends_packed(attend_packed(*inputs, causal=causal, rung=rung), *inputs, causal=causal)


@every_dtype
@with_and_without_mask
def test_the_plain_version_in_every_dtype(causal, dtype):
    for name in ("many", "more queries", "more keys"):
        inputs = packed(name, 24, dtype, "cpu")
        assert_attends_packed(attend_packed(*inputs, causal=causal), *inputs, causal=causal)


@packed_rungs
@pytest.mark.parametrize("dim", [16, 104])
def test_other_widths_and_heads_that_share_keys(dim, device, rung):
    inputs = packed("more keys", dim, dtype_of(rung), device, heads=4, kv_heads=2)
    assert_attends_packed(attend_packed(*inputs, causal=True, scale=0.3, rung=rung), *inputs, causal=True, scale=0.3)


@packed_rungs
@with_and_without_mask
def test_one_document_is_no_packed_row(causal, device, rung):
    """To the last bit, in every tile."""
    q, k, v = qkv(300, 340, 64, dtype_of(rung), device)
    documents = bounds([0, 300], device), bounds([0, 340], device)
    given = step2_attention.attention(q, k, v, causal=causal, return_lse=True, rung=rung)
    for t, expected in zip(attend_packed(q, k, v, *documents, causal=causal, rung=rung), given, strict=True):
        assert torch.equal(t, expected)


@packed_rungs
@pytest.mark.parametrize("value", [NAN, 1000.0])
def test_no_document_sees_another(value, device, rung):
    """Whatever one in the middle of tiles holds, even NaN: others stay as they were, and its own queries see it."""
    q, k, v, *documents = packed("more keys", 64, dtype_of(rung), device, heads=1)
    before = attend_packed(q, k, v, *documents, causal=True, rung=rung)
    queries, keys = (slice(*t[1:3].tolist()) for t in documents)
    for t, own in ((q, queries), (k, keys), (v, keys)):
        t[:, :, own] = value
    after = attend_packed(q, k, v, *documents, causal=True, rung=rung)
    assert not torch.equal(after[0][:, :, queries], before[0][:, :, queries])
    for t, expected in zip(after, before, strict=True):
        t[:, :, queries] = expected[:, :, queries]
        # A row that a neighbour's NaN has spoiled is computed again, by another way.
        exact = {"rtol": 0, "atol": 0} if value == value or t.dim() == 3 else tolerance_of(q)
        torch.testing.assert_close(t, expected, **exact)


@of_varlen
@packed_rungs
def test_lengths_of_flash_attention_s_varlen(longest, dim, device, rung):
    lengths, key_lengths = varlen(longest[0], 4), varlen(longest[1], 1)
    q, k, v = qkv(sum(lengths), sum(key_lengths), dim, dtype_of(rung), device, heads=1)
    documents = starts(lengths, device), starts(key_lengths, device)
    outputs = attend_packed(q, k, v, *documents, causal=True, rung=rung)
    assert_attends_packed(outputs, q, k, v, *documents, causal=True)


@pytest.mark.parametrize("dim", [64, 104])
@every_rung_of("attention", lambda device, rung: rung == "v8_persistent")
def test_more_tiles_of_documents_than_multiprocessors(dim, device, rung):
    """Persistent blocks take several tiles, the heaviest first; stages are used again."""
    heads = 2 * torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 20
    inputs = packed("many", dim, torch.bfloat16, device, heads=heads)
    assert_attends_packed(attend_packed(*inputs, causal=True, rung=rung), *inputs, causal=True)


@every_rung_of("attention", lambda device, rung: rung == "v8_persistent")
def test_more_slots_than_a_launch_takes(device, rung):
    """A block sorts at most 384 tiles of a head; most slots here are of none."""
    lengths = [0] * 900 + [3, 130] + [0] * 130 + [20]
    q, k, v = qkv(sum(lengths), sum(lengths), 64, torch.bfloat16, device, heads=1)
    documents = starts(lengths, device)
    assert_attends_packed(attend_packed(q, k, v, documents, causal=True, rung=rung), q, k, v, documents, causal=True)


@every_rung_of("attention", lambda device, rung: rung == "v8_persistent")
def test_groups_of_heads(device, rung):
    """Where keys and values are too many for the L2 cache; most are of a document without queries."""
    lengths, key_lengths = [3, 0, 5], [4, 2100, 6]
    q = testing.randn((1, 64, sum(lengths), 128), torch.bfloat16, device)
    k = testing.randn((1, 64, sum(key_lengths), 128), torch.bfloat16, device, seed=1)
    documents = starts(lengths, device), starts(key_lengths, device)
    assert_attends_packed(attend_packed(q, k, k, *documents, rung=rung), q, k, k, *documents)


@packed_rungs
def test_dropout_goes_by_the_place_in_the_row(device, rung):
    """v is a part of the identity and all weights of a query are alike, so the output shows which ones are left."""
    lengths, key_lengths = [30, 70, 1], [40, 90, 33]
    documents = starts(lengths, device), starts(key_lengths, device)
    q, k = (torch.zeros(1, 2, sum(n), 64, dtype=dtype_of(rung), device=device) for n in (lengths, key_lengths))
    parts = torch.eye(k.size(2), 192, dtype=q.dtype, device=device).split(64, -1)
    rng_state = torch.tensor([3, 8])
    options = {"rng_state": rng_state, "dropout_p": 0.4, "rung": rung}
    outs = [attend_packed(q, k, part.expand_as(k), *documents, **options)[0] for part in parts]
    out = torch.cat(outs, -1)[..., : k.size(2)].cpu()
    own = torch.block_diag(*(torch.ones(n, m) for n, m in zip(lengths, key_lengths, strict=True))) != 0
    assert torch.equal(out != 0, kept(1, 2, q.size(2), k.size(2), 0.4, rng_state) & own)


@packed_rungs
def test_the_contract_with_documents(device, rung):
    q, k, v, *documents = packed("more keys", 64, dtype_of(rung), device)
    testing.check_contract(
        step2_attention,
        "attention",
        (q, k, v, None, None, None, *documents),
        rung,
        reference=lambda q, k, v, *rest, **options: each_alone(q, k, v, *documents, **options),
        eager=lambda q, k, v, *rest, **options: each_alone(q, k, v, *documents, **options),
        kwargs={"causal": True},
        all_outputs={"return_lse": True},
    )


@on_each_device
def test_a_packed_row_is_an_op_to_torch(device):
    q, k, v, *documents = packed("more keys", 64, torch.bfloat16, device)
    given = (q, k, v, None, None, None, *documents)
    torch.library.opcheck(torch.ops.step2_attention.attention.default, given, {"causal": True})
    compiled = torch.compile(attend_packed, fullgraph=True, dynamic=False, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, *documents)[0], attend_packed(q, k, v, *documents)[0])
    with torch.autocast(device, torch.bfloat16):
        out, _ = attend_packed(*(t.float() for t in (q, k, v)), *documents)
    assert torch.equal(out, attend_packed(q, k, v, *documents)[0])


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_what_are_no_documents_is_refused(device):
    q, k = (torch.ones(1, 2, n, 8, device=device) for n in (5, 6))
    good = bounds([0, 3, 5], device)
    bad = [
        (ValueError, "`cu_seqlens_k` needs `cu_seqlens`", {"cu_seqlens": None, "cu_seqlens_k": good}),
        (ValueError, "`key_begin` must be None where `cu_seqlens` is given", {"key_begin": bounds([0], device)}),
        (ValueError, "`key_end` must be None where `cu_seqlens` is given", {"key_end": bounds([5], device)}),
        (ValueError, "`q` must have batch 1 where `cu_seqlens` is given, got 2", {n: torch.cat([q, q]) for n in "qkv"}),
        (TypeError, "`cu_seqlens` must be int32, got int64", {"cu_seqlens": good.long()}),
        (ValueError, "`cu_seqlens` must have 1 dimension, got 2", {"cu_seqlens": good[None]}),
        (ValueError, "`cu_seqlens` must have at least 2 numbers, got 1", {"cu_seqlens": good[:1]}),
        (TypeError, "`cu_seqlens_k` must be int32, got int64", {"cu_seqlens_k": good.long()}),
        (ValueError, "`cu_seqlens_k` must have shape (3,), got (2,)", {"cu_seqlens_k": good[:2]}),
        (ValueError, "`k` must be as long as `q` where `cu_seqlens_k` is None, got 6 and 5", {"k": k, "v": k}),
    ]
    if device == "cpu":
        bad += [
            (ValueError, "`cu_seqlens` must begin with 0, got 1", {"cu_seqlens": bounds([1, 5], device)}),
            (ValueError, "`cu_seqlens` must not fall, got 4 before 3", {"cu_seqlens": bounds([0, 4, 3, 5], device)}),
            (ValueError, "`cu_seqlens` must end with 5, got 4", {"cu_seqlens": bounds([0, 3, 4], device)}),
            (ValueError, "`cu_seqlens_k` must end with 5, got 6", {"cu_seqlens_k": bounds([0, 3, 6], device)}),
        ]
    for error, text, changed in bad:
        with testing.raises(error, f"attention: {text}"):
            step2_attention.attention(**({"q": q, "k": q, "v": q, "cu_seqlens": good} | changed))


@on_each_device
def test_rungs_without_documents_say_so(device):
    q = torch.ones(1, 1, 5, 8, device=device, dtype=torch.float16)
    for rung in ("v3_mma", "v4_pipeline"):
        with testing.raises(ValueError, f"rung '{rung}' takes no packed rows (`cu_seqlens`); these can: 'v1_naive', "):
            step2_attention.attention(q, q, q, cu_seqlens=bounds([0, 5], device), rung=rung)
    with testing.raises(ValueError, "rung 'v2_tiled' takes packed rows (`cu_seqlens`) in float32 only"):
        step2_attention.attention(q, q, q, cu_seqlens=bounds([0, 5], device), rung="v2_tiled")
