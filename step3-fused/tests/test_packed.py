"""attention_block over packed rows: each document as by itself, and none sees another.

python -m pytest tests/test_packed.py            pytest's options may follow, such as -k pieces
"""

import itertools
import math

import pytest
import torch

import step3_fused
from kernel_fusion import testing
from step3_fused.attention_testing import (
    BLOCK,
    block_formula,
    bounds,
    can_do,
    check,
    close_of,
    dtype_of,
    every_dtype,
    leaves_of,
    on_each_device,
    packed,
    rungs_of,
    takes_packed_rows,
    with_and_without_mask,
    with_statistics,
)

LENGTHS = [1, 37, 0, 64, 5, 0, 1]  # of documents: some end within a tile, some are shorter than one, two are empty
NO_DROPOUT = {"dropout_p": 0.0, "attention_dropout_p": 0.0}

packed_rungs = pytest.mark.parametrize(
    ("op", "device", "rung"), [p for p in rungs_of(BLOCK) if takes_packed_rows(p.values[2])]
)


def each_alone(function, inputs):
    """What function(q, k, v, residual, …) gives of each document that is not empty, as (its rows, outputs)."""
    q, k, v, residual, *parameters = inputs[:8]
    for first, last in itertools.pairwise(inputs[-1].tolist()):
        if last > first:
            own = slice(first, last)
            yield own, function(*(t[:, :, own] for t in (q, k, v)), residual[:, own], *parameters)


@testing.where(lambda rung, dtype: can_do(rung, dtype))
@packed_rungs
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropped"])
def test_the_contract_with_documents(dropped, causal, dtype, op, device, rung):
    inputs, options = packed(LENGTHS, dtype, device, **({} if dropped else NO_DROPOUT))
    check(op, inputs, rung, causal=causal, layouts=not dropped, **options)


@packed_rungs
@with_and_without_mask
def test_each_document_is_as_by_itself(causal, op, device, rung):
    inputs, options = packed(LENGTHS, dtype_of(rung), device, **NO_DROPOUT)
    outputs = with_statistics(op, inputs, rung, causal=causal, **options)
    for own, alone in each_alone(lambda *t: block_formula(*(x.double() for x in t), causal=causal), inputs):
        for t, expected in zip(outputs, alone, strict=True):
            got = t[:, :, own] if t is outputs[3] else t[:, own]  # lse: [B, H, Sq]
            torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@packed_rungs
def test_one_document_is_no_packed_row(op, device, rung):
    inputs, options = packed([70], dtype_of(rung), device)
    outputs = with_statistics(op, inputs, rung, causal=True, **options)
    if rung == "pieces" or device == "cuda":  # unpacked, "auto" may choose another rung
        rung = "pieces"
    for t, expected in zip(outputs, with_statistics(op, inputs[:-1], rung, causal=True, **options), strict=True):
        assert torch.equal(t, expected)


@on_each_device
@with_and_without_mask
def test_gradients_are_those_of_each_document_alone(causal, device):
    inputs, options = packed(LENGTHS, torch.float64, device, **NO_DROPOUT)
    leaves, others = leaves_of(inputs)
    y, total = step3_fused.attention_block(*leaves, *others, causal=causal, **options)
    weight = testing.randn(y.shape, torch.float64, device, seed=90)
    got = torch.autograd.grad((y * weight + total.sin()).sum(), leaves)
    loss = sum(
        (outputs[0] * weight[:, own] + outputs[1].sin()).sum()
        for own, outputs in each_alone(lambda *t: block_formula(*t, causal=causal), (*leaves, *others))
    )
    for gradient, expected in zip(got, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(gradient, expected)


@on_each_device
def test_gradients_by_finite_differences(device):
    """Of all outputs: those of attention and the statistics, too; and of gradients."""
    inputs, options = packed([2, 0, 3], torch.float64, device, heads=1, dim=4, dropout_p=0.4, attention_dropout_p=0.4)
    leaves, others = leaves_of(inputs)
    assert torch.autograd.gradcheck(lambda *t: with_statistics(BLOCK, (*t, *others), causal=True, **options), leaves)
    options["attention_dropout_p"] = 0.0
    assert torch.autograd.gradgradcheck(
        lambda *t: with_statistics(BLOCK, (*t, *others), causal=True, **options)[:2], leaves
    )


@packed_rungs
def test_no_document_sees_another(op, device, rung):
    """Whatever one in the middle of a tile holds, even NaN: others stay as they were, and so do their gradients."""
    inputs, options = packed(LENGTHS, dtype_of(rung), device, **NO_DROPOUT)
    own = slice(*inputs[-1][1:3].tolist())
    others = torch.ones(sum(LENGTHS), dtype=torch.bool, device=device)
    others[own] = False

    def run(value):
        leaves, rest = leaves_of([t.clone() if torch.is_tensor(t) else t for t in inputs])
        if value is not None:
            with torch.no_grad():
                for t in leaves[:3]:
                    t[:, :, own] = value
        y, total = with_statistics(op, (*leaves, *rest), rung, causal=True, **options)[:2]
        loss = (y[:, others].sin() + total[:, others].cos()).sum()
        return y, total, torch.autograd.grad(loss, leaves[:4])

    y, total, gradients = run(None)
    for value in (math.nan, 1000.0):
        y_after, total_after, gradients_after = run(value)
        assert not torch.equal(total_after[:, own], total[:, own])
        torch.testing.assert_close(y_after[:, others], y[:, others], **close_of(rung))
        torch.testing.assert_close(total_after[:, others], total[:, others], **close_of(rung))
        for gradient, expected in zip(gradients_after[:3], gradients[:3], strict=True):
            torch.testing.assert_close(gradient[:, :, others], expected[:, :, others], **close_of(rung))
        assert torch.equal(gradients_after[3][:, others], gradients[3][:, others])


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_what_are_no_documents_is_refused(device):
    inputs, options = packed([3, 2], torch.float32, device, **NO_DROPOUT)
    q, k, v, residual, *_ = inputs
    twice = [torch.cat([t, t]) for t in (q, k, v, residual)]
    longer = [torch.cat([t, t], 2) for t in (k, v)]
    starts = inputs[-1]
    names = ("q", "k", "v", "residual", "proj_weight", "proj_bias", "weight", "bias")
    bad = [
        (ValueError, "`key_begin` must be None where `cu_seqlens` is given", {"key_begin": bounds([0], device)}),
        (ValueError, "`q` must have batch 1 where `cu_seqlens` is given, got 2", dict(zip(names, twice, strict=False))),
        (TypeError, "`cu_seqlens` must be int32, got int64", {"cu_seqlens": starts.long()}),
        (ValueError, "`cu_seqlens` must have at least 2 numbers, got 1", {"cu_seqlens": starts[:1]}),
        (ValueError, "`k` must be as long as `q`", dict(zip("kv", longer, strict=True))),
    ]
    if device == "cpu":
        bad += [
            (ValueError, "`cu_seqlens` must begin with 0, got 1", {"cu_seqlens": bounds([1, 5], device)}),
            (ValueError, "`cu_seqlens` must not fall, got 4 before 3", {"cu_seqlens": bounds([0, 4, 3, 5], device)}),
            (ValueError, "`cu_seqlens` must end with 5, got 4", {"cu_seqlens": bounds([0, 3, 4], device)}),
        ]
    for error, text, changed in bad:
        with testing.raises(error, f"attention_block: {text}"):
            step3_fused.attention_block(
                **(dict(zip(names, inputs, strict=False)) | {"cu_seqlens": starts} | changed), **options
            )


@on_each_device
def test_rungs_with_an_attention_of_their_own_say_so(device):
    inputs, options = packed([3, 5], torch.bfloat16, device, **NO_DROPOUT)
    for rung in ("v1_separate", "v2_fused", "v4_dataflow", "v5_cluster"):
        with testing.raises(
            ValueError, f"attention_block: rung '{rung}' takes no packed rows (`cu_seqlens`); these can: 'pieces'"
        ):
            step3_fused.attention_block(*inputs, rung=rung, **options)
