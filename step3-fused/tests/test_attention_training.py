"""Training of the ops that begin with attention, on every device: padding, dropout, what is kept, and the way back.

python -m pytest tests/test_attention_training.py            pytest's options may follow, such as -k v2_fused
"""

import math

import pytest
import torch

import step2_attention  # whose mask attention's dropout has, and whose op is its way back
import step3_fused
from kernel_fusion import testing
from step2_attention.testing import hidden_of
from step3_fused.attention_testing import (
    ALONE,
    ATTENTION_RNG_STATE,
    BLOCK,
    ON_TENSOR_CORES,
    OUTPUTS,
    RNG_STATE,
    attention_inputs,
    attention_ops,
    bounds,
    can_do,
    check,
    dtype_of,
    each_dropout,
    every,
    every_dtype,
    every_rung_of_attention,
    given,
    kept_of_rows,
    layer_norm_of,
    leaves_of,
    ops,
    rungs_of,
    with_and_without_mask,
    with_statistics,
)

# ---- the contract of correctness ----


@testing.where(lambda rung, dtype, attention_dropout_p: can_do(rung, dtype, attention_dropout_p))
@testing.where(lambda op, dropout_p: op == BLOCK or not dropout_p)
@every_rung_of_attention
@every_dtype
@each_dropout
@with_and_without_mask
def test_with_padding(causal, dropout_p, attention_dropout_p, dtype, op, device, rung):
    inputs, options = given(op, dtype, device, dropout_p=dropout_p, attention_dropout_p=attention_dropout_p)
    check(op, inputs, rung, causal=causal, **options)


@testing.where(lambda rung, dtype: can_do(rung, dtype))
@every_rung_of_attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 1, 1, 8), (2, 3, 5, 33, 16), (2, 2, 64, 64, 24), (1, 2, 65, 31, 40), (3, 5, 130, 200, 8)], ids=str
)
def test_without_padding(shape, dtype, op, device, rung):
    attention_dropout_p = 0.0 if rung in ON_TENSOR_CORES else 0.4
    inputs, options = given(op, dtype, device, shape=shape, padding=False, attention_dropout_p=attention_dropout_p)
    check(op, inputs, rung, causal=True, layouts=False, **options)


@testing.where(lambda rung, dtype: can_do(rung, dtype))
@every_rung_of_attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@with_and_without_mask
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ([0, 3, 64, 65], None),
        (None, [130, 64, 65, 1]),
        ([0, 31, 32, 65], [70, 33, 129, 66]),
        ([-5, -(2**31), 0, 2**31 - 1], [131, 2**31 - 1, -1, -(2**31) + 1000]),  # beyond the tensor
    ],
    ids=["left", "right", "both", "beyond"],
)
def test_any_padding(begin, end, causal, dtype, op, device, rung):
    """Of a batch of four; tiles of 32 and of 64 keys that begin and end within them."""
    inputs, options = given(
        op, dtype, device, shape=(4, 2, 70, 130, 8), padding=False, dropout_p=0.0, attention_dropout_p=0.0
    )
    tensors = [t for t in inputs if torch.is_tensor(t)]
    keys = [None if b is None else bounds(b, device) for b in (begin, end)]
    check(op, (*tensors, *keys), rung, causal=causal, scale=0.4, layouts=False)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for op, device, rung in (param.values for param in rungs_of(ALONE, BLOCK)):
        if device == "cpu":
            attention_dropout_p = 0.0 if rung in ON_TENSOR_CORES else 0.2
            inputs, options = given(op, dtype_of(rung), device, attention_dropout_p=attention_dropout_p)
            check(op, inputs, rung, causal=True, layouts=False, **options)


# ---- dropout ----


@every(BLOCK)
def test_the_projections_mask_is_that_of_step_1(op, device, rung):
    """Of a bias of 1, a weight and a residual of 0 the sum is the scaled mask."""
    for rows, heads, dropout_p in ((70, 5, 0.5), (13, 3, 0.1), (11, 2, 0.9), (3, 17, 1.0), (3, 2, 0.0)):
        tensors = attention_inputs(op, 2, heads, rows, 4, 8, dtype_of(rung), device)
        *qkv, residual, proj_weight, proj_bias, weight, bias = tensors
        inputs = (*qkv, 0 * residual, 0 * proj_weight, 0 * proj_bias + 1, weight, bias)
        for rng_state in (RNG_STATE, (-(1 << 63), (1 << 62) + 4)):
            options = {"rng_state": torch.tensor(rng_state), "dropout_p": dropout_p, "rung": rung}
            total = step3_fused.attention_block(*inputs, **options)[1]
            expected = kept_of_rows(tuple(total.shape), dropout_p, rng_state) if dropout_p else torch.ones_like(total)
            assert torch.equal(total, expected.to(total))


@testing.where(lambda rung: rung not in ON_TENSOR_CORES)
@every_rung_of_attention
def test_attentions_mask_is_that_of_step_2(op, device, rung):
    """All weights are alike and v is a part of the identity, so attention's output shows which ones are left."""
    for q_length, k_length, dropout_p in ((1, 1, 0.4), (7, 9, 0.5), (70, 33, 0.1), (40, 130, 0.9), (20, 5, 1.0)):
        for first in range(0, k_length, 40):
            q, k, v, *rest = attention_inputs(op, 2, 3, q_length, k_length, 40, torch.float32, device)
            v = torch.eye(k_length, first + 40, device=device)[:, first:].expand_as(k)
            rng_state = torch.tensor(ATTENTION_RNG_STATE)
            outputs = with_statistics(
                op, (q * 0, k, v, *rest), rung, attention_rng_state=rng_state, attention_dropout_p=dropout_p
            )
            attended, lse = outputs[-4:-2]
            expected, same_lse = step2_attention.attention(
                q * 0,
                k,
                v,
                rng_state=rng_state,
                dropout_p=dropout_p,
                return_lse=True,
                rung="auto" if device == "cuda" else "cpu",
            )
            assert torch.equal(attended != 0, expected.transpose(1, 2).flatten(2) != 0)
            torch.testing.assert_close(attended, expected.transpose(1, 2).flatten(2))
            torch.testing.assert_close(lse, same_lse)  # dropped weights count in the sum


@every_rung_of_attention
def test_what_drops_nothing_changes_nothing(op, device, rung):
    """Evaluation drops nothing, whatever state is given; nor does a part that rounds to 0. All keys are all keys."""
    inputs, _ = given(op, dtype_of(rung), device, padding=False, dropout_p=0.0, attention_dropout_p=0.0)
    tensors = [t for t in inputs if torch.is_tensor(t)]
    rng_state = torch.tensor(RNG_STATE)
    plain = with_statistics(op, tensors, rung)
    more = {"dropout_p": 0.7, "rng_state": rng_state} if op == BLOCK else {}
    for options in (
        {"attention_rng_state": rng_state},
        {"attention_dropout_p": 1e-6},
        {"training": False, "attention_dropout_p": 0.7},
        {"training": False, "attention_dropout_p": 0.7, "attention_rng_state": rng_state, **more},
        {"key_begin": bounds([0, 0, 0], device)},
        {"key_begin": bounds([-3, 0, 0], device), "key_end": bounds([70, 71, 1 << 30], device)},
    ):
        got = with_statistics(op, tensors, rung, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), options


@every_rung_of_attention
def test_dropout_of_all(op, device, rung):
    dtype = dtype_of(rung)
    inputs, _ = given(op, dtype, device, dropout_p=0.0, attention_dropout_p=0.0)
    tensors = [t for t in inputs if torch.is_tensor(t)]
    if op == BLOCK:
        y, total = step3_fused.attention_block(*tensors, dropout_p=1.0, rung=rung)
        assert torch.equal(total, inputs[3])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(y, layer_norm_of(total, *inputs[6:8]), rtol=tolerance, atol=tolerance)
    if can_do(rung, dtype, 1.0):
        attended, lse = with_statistics(op, tensors, rung, attention_dropout_p=1.0)[-4:-2]
        assert attended.eq(0).all()
        assert torch.equal(lse, with_statistics(op, tensors, rung)[-3])


# ---- padding ----


@every_rung_of_attention
@with_and_without_mask
def test_what_padding_holds_has_no_influence(causal, op, device, rung):
    inputs, options = given(
        op, dtype_of(rung), device, shape=(3, 2, 70, 130, 8), dropout_p=0.0, attention_dropout_p=0.0
    )
    begin, end = inputs[len(inputs) - (4 if op == BLOCK else 3) :][:2]
    key = torch.arange(130, device=device)
    padding = ((key < begin[:, None]) | (key >= end[:, None]))[:, None, :, None]

    def run(fill):
        q, k, v, *rest = inputs
        leaves, others = leaves_of((q, k.masked_fill(padding, fill), v.masked_fill(padding, fill), *rest))
        outputs = with_statistics(op, (*leaves, *others), rung, causal=causal, **options)
        return outputs, torch.autograd.grad(sum(o.float().square().sum() for o in outputs[: OUTPUTS[op]]), leaves)

    (clean, of_clean), (dirty, of_dirty) = run(0.0), run(math.nan)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(of_clean, of_dirty, strict=True))
    for gradient in of_dirty[1:3]:
        assert gradient[padding.expand_as(gradient)].eq(0).all()
    assert clean[-3][2].eq(-math.inf).all()  # the last batch sees no key
    assert clean[-4][2].eq(0).all()
    assert of_dirty[0][2].eq(0).all()


# ---- what is refused ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@attention_ops
def test_bad_options_are_refused_by_name(op, device):
    """By the Python function, and by the op itself, with and without data."""
    inputs, _ = given(op, torch.float32, device, dropout_p=0.0, attention_dropout_p=0.0)
    tensors = [t for t in inputs if torch.is_tensor(t) and t.is_floating_point()]
    rng_state = torch.tensor(RNG_STATE)
    parts = [("attention_dropout_p", "attention_rng_state")] + ([("dropout_p", "rng_state")] if op == BLOCK else [])
    for function in (getattr(step3_fused, op), getattr(ops, op)):

        def refuses(exception, text, function=function, **options):
            with testing.raises(exception, f"{op}: {text}"):
                function(*tensors, **options)

        for dropout_p, name in parts:
            for value in (-0.1, 1.5, math.nan):
                refuses(ValueError, f"`{dropout_p}` must be from 0 to 1, got", **{dropout_p: value, name: rng_state})
            refuses(TypeError, f"`{name}` must be int64, got int32", **{dropout_p: 0.1, name: rng_state.int()})
            refuses(ValueError, f"`{name}` must have shape (2,), got (1,)", **{dropout_p: 0.1, name: rng_state[:1]})
            if device != "meta":
                refuses(
                    ValueError,
                    f"`{name}` must be on the CPU or on the tensors' device ({tensors[0].device}), got meta",
                    **{dropout_p: 0.1, name: rng_state.to("meta")},
                )
        for name in ("key_begin", "key_end"):
            good = torch.zeros(3, dtype=torch.int32, device=device)
            refuses(TypeError, f"`{name}` must be int32, got int64", **{name: good.long()})
            refuses(ValueError, f"`{name}` must have shape (3,), got (2,)", **{name: good[:2]})
            other = torch.zeros_like(good, device="cpu" if device == "meta" else "meta")
            refuses(ValueError, f"`{name}` must be on the device of `q`", **{name: other})
    for dropout_p, name in parts:
        with testing.raises(ValueError, f"{op}: `{name}` must be given where `{dropout_p}` is not 0"):
            getattr(ops, op)(*tensors, **{dropout_p: 0.1})


@pytest.mark.parametrize(("rung", "op"), ON_TENSOR_CORES.items())
def test_tensor_cores_refuse_to_drop_weights_and_name_who_can(rung, op):
    inputs, options = given(op, torch.bfloat16, "cpu")
    with testing.raises(
        ValueError,
        f"{op}: rung '{rung}' drops none of attention's weights: it takes an `attention_dropout_p` of 0",
        "these can: 'v1_separate', 'v2_fused', 'pieces'",
    ):
        getattr(step3_fused, op)(*inputs, **options, rung=rung)


def test_hidden_keys_of_the_formula():
    """What all of this is compared with: a mask by hand."""
    q, k = torch.zeros(2, 1, 2, 1), torch.zeros(2, 1, 3, 1)
    hidden = hidden_of(q, k, bounds([0, 1], "cpu"), bounds([3, 2], "cpu"), causal=True)
    assert hidden.int().tolist() == [[[[0, 0, 1], [0, 0, 0]]], [[[1, 0, 1], [1, 0, 1]]]]
