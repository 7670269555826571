"""Where tensors lie: strides, offsets beyond 32 bits, what is not written, and what is too large."""

import functools

import pytest
import torch

import step3_fused
from kernel_fusion import testing
from step3_fused.attention_testing import (
    DTYPES,
    FORMULAS,
    attention_inputs,
    attention_ops_and_rungs,
    call,
    can_do,
    every_op,
    every_op_and_rung,
    every_rung_of_attention,
    every_rung_of_rows,
    inputs_of,
    layer_norm_of,
    on_each_device,
    ops,
    parameters,
    row_inputs,
    with_statistics,
)


@every_rung_of_attention
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@testing.where(lambda rung, dtype: can_do(rung, dtype))
def test_gpt2s_packed_q_k_v_are_read_as_they_lie(dtype, op, device, rung):
    b, s, h, d = 2, 70, 3, 64
    packed = testing.randn((b, s, 3 * h * d), dtype, device)
    qkv = [t.view(b, s, h, d).transpose(1, 2) for t in packed.split(h * d, -1)]
    rest = attention_inputs(op, b, h, s, s, d, dtype, device)[3:]
    views = with_statistics(op, (*qkv, *rest), rung, causal=True)
    copies = with_statistics(op, (*(t.contiguous() for t in qkv), *rest), rung, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))


@attention_ops_and_rungs
def test_views_of_any_strides(op, device, rung):
    q, k, v, *rest = attention_inputs(op, 2, 2, 6, 10, 16, torch.float32, device)
    for views in (
        (q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 2, -1, -1), v),  # strides of 0
        (q.mT.contiguous().mT, k.mT.contiguous().mT, v.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)),
    ):
        got, want = with_statistics(op, (*views, *rest), rung), FORMULAS[op](*views, *rest)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@attention_ops_and_rungs
@pytest.mark.parametrize("far", ["batch", "heads", "positions"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_attention_at_offsets_beyond_32_bits(which, far, op, device, rung):
    """One tensor whose neighbours along one dimension are 2³² elements and more apart: most of it nobody touches."""
    dim = ["batch", "heads", "positions"].index(far)
    b, h, s = (2 if i == dim else 1 for i in range(3))
    inputs = list(attention_inputs(op, b, h, s, s, 8, torch.float16, device))
    expected = FORMULAS[op](*(t.double() for t in inputs))
    distance = (1 << 32) + 4096  # what wraps around lands where nothing is
    strides = [8, 8, 8, 1]
    strides[dim] = distance
    index = "qkv".index(which)
    memory = testing.lazy_memory(distance + 4096, torch.float16, device)
    inputs[index] = memory.as_strided((b, h, s, 8), strides).copy_(inputs[index])
    for out, want in zip(call(op, inputs, rung), expected, strict=False):
        torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


@testing.where(lambda rung: rung != "cpu")
@every_rung_of_rows
@pytest.mark.parametrize("width", [4096, 4093])
def test_layer_norm_of_more_than_2_to_32_elements(width, op, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "40")  # of v1_separate's sum, 40 · 256 elements
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    rows = (1 << 20) + (1 << 13)
    weight, bias = parameters(width, torch.bfloat16, device)
    x, y, total = (testing.lazy_memory(rows * width, torch.bfloat16, device).view(rows, width) for _ in range(3))
    kept = {name: torch.empty(rows, device=device) for name in ("mean", "rstd")}
    x[-1] = testing.randn((width,), torch.bfloat16, device)
    if op == "layer_norm":
        ops.layer_norm.out(x, weight, bias, rung=rung, y=y, **kept)
        expected = layer_norm_of(x[-1].double(), weight.double(), bias.double())
    else:
        ops.residual_layer_norm.out(x, x, weight, bias, rung=rung, y=y, sum=total, **kept)
        assert torch.equal(total[-1], 2 * x[-1])
        expected = layer_norm_of(2 * x[-1].double(), weight.double(), bias.double())
    torch.testing.assert_close(y[-1].double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(y[-2], bias)


@every_op_and_rung
@pytest.mark.parametrize("width", [24, 4100])
def test_statistics_that_nobody_wants_are_not_written(width, op, device, rung):
    """The rest is the same to the last bit; and who wants gradients after all has them computed anew."""
    if op.startswith("attention"):
        inputs = attention_inputs(op, 1, 2, 5, 7, min(width // 2, 24), torch.float32, device)
    else:
        inputs = row_inputs(op, (5, width), torch.float32, device)
    function, nobodys = getattr(ops, op), 4 if op.startswith("attention") else 2
    kept, without = (function(*inputs, keep=keep, rung=rung) for keep in (True, False))
    outputs = without[:-nobodys]
    assert all(t.shape == (0,) and t.dtype == torch.float32 for t in without[-nobodys:])
    assert all(torch.equal(a, b) for a, b in zip(kept[:-nobodys], outputs, strict=True))
    leaves = [t.clone().requires_grad_() for t in inputs]

    def gradients(keep):
        outputs_again = function(*leaves, keep=keep, rung=rung)[:-nobodys]
        return torch.autograd.grad(sum(out.square().sum() for out in outputs_again), leaves)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@on_each_device
@every_op
def test_statistics_are_kept_where_a_gradient_is_wanted(op, device, monkeypatch):
    asked = []
    real = getattr(ops, op)
    monkeypatch.setattr(ops, op, lambda *a, keep, **k: asked.append(keep) or real(*a, keep=keep, **k))
    inputs = inputs_of(op, torch.float32, device)
    function = functools.partial(call, op)
    function(inputs)
    kept = 4 if op.startswith("attention") else 2
    assert len(function(inputs, return_statistics=True)) == len(function(inputs)) + kept
    for position in range(len(inputs)):
        leaves = [t.clone().requires_grad_(i == position) for i, t in enumerate(inputs)]
        function(leaves)
        with torch.no_grad():
            function(leaves)
    assert asked == [False, True, False, *[True, False] * len(inputs)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    """Sizes alone decide, so no memory is needed."""

    def choose(op, rung, **sizes):
        return step3_fused._C.choose(op, rung, sizes, dtype)

    most, block = (1 << 31) - 1, 4096 if dtype == torch.float64 else 8192
    for op, one, widest, other in (
        ("layer_norm", "v2_block", block, "v1_naive"),
        ("layer_norm", "v3_registers", 2 * block, "v1_naive"),
        ("residual_layer_norm", "v2_fused", block, "v1_separate"),
        ("residual_layer_norm", "v3_registers", 2 * block, "v1_separate"),
    ):
        assert choose(op, one, rows=most, width=widest) == one
        assert choose(op, "auto", rows=most, width=widest) == "v3_registers"
        for sizes, text in (
            ({"rows": most + 1, "width": widest}, f"takes rows ≤ {most}, got {most + 1}"),
            ({"rows": 1, "width": widest + 1}, f"takes width ≤ {widest}, got {widest + 1}"),
        ):
            # wider than v2 takes, v3 or v4 may take it; layer_norm's only where vectors divide the width
            wider = {block + 1: "v3_registers", 2 * block + 1: "v4_cluster"} if op == "residual_layer_norm" else {}
            assert choose(op, "auto", **sizes) == wider.get(sizes["width"], other)
            with testing.raises(ValueError, f"{op}: rung '{one}' {text}; these can: '{other}'"):
                choose(op, one, **sizes)
        assert choose(op, "auto", rows=1, width=2 * block + 8) == "v4_cluster"
        assert choose(op, "auto", rows=8 * most) == other
        for rung in (other, "auto"):
            with testing.raises(ValueError, f"got {8 * most + 1}; no rung can do this"):
                choose(op, rung, rows=8 * most + 1)
    for op in ("attention_residual_layer_norm", "attention_block"):
        sizes = {"batch": 1 << 10, "heads": 12, "q_length": 1024, "k_length": 1 << 40, "head_dim": 64}
        assert choose(op, "auto", **sizes) == "pieces"
        too_many = {"batch": 1 << 20, "heads": 1 << 6, "q_length": 1 << 9}
        with testing.raises(
            ValueError, f"rung 'v1_separate' takes at most {most} blocks of 16 queries, got {most + 1}"
        ):
            choose(op, "v1_separate", **too_many)
        if dtype == torch.float64:
            with testing.raises(ValueError, "rung 'v2_fused' takes float32, float16 and bfloat16, got float64"):
                choose(op, "v2_fused", **sizes)
            continue
        assert choose(op, "v2_fused", **sizes) == choose(op, "v2_fused", **too_many) == "v2_fused"
        # no product in float32 of so many rows, and v3 needs one
        alone = op == "attention_block" and dtype == torch.float32
        assert choose(op, "auto", **too_many) == ("v2_fused" if alone else "pieces")
        with testing.raises(
            ValueError, f"{op}: rung 'v2_fused' takes batch·q_length ≤ 2³¹−1, got {most + 1}; these can"
        ):
            choose(op, "v2_fused", batch=1 << 20, q_length=1 << 11)
