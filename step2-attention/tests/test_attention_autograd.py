"""Attention as torch sees it: its gradients, registered, compiled, under autocast."""

import pytest
import torch
import torch.nn.functional as F

import step2_attention
from kernel_fusion import testing
from step2_attention.testing import (
    NAN,
    attention_of,
    bounds,
    can_do,
    check_packed_gradients,
    dtype_of,
    every_attention,
    half_types,
    of_the_op,
    on_each_device,
    qkv,
    with_and_without_mask,
)

# ---- gradients ----


@testing.where(lambda rung: can_do(rung, 3, torch.float64))
@every_attention
@with_and_without_mask
@pytest.mark.parametrize(("q_length", "k_length"), [(4, 4), (2, 5), (5, 3), (4, 3)])
def test_gradient_of_attention(q_length, k_length, causal, device, rung):
    def function(q, k, v):
        return step2_attention.attention(q, k, v, causal=causal, scale=0.7, rung=rung)

    q, k, v = (t.requires_grad_() for t in qkv(q_length, k_length, 3, torch.float64, device))
    assert torch.autograd.gradcheck(function, (q, k, v))
    assert torch.autograd.gradgradcheck(function, (q, k, v))


@on_each_device
@with_and_without_mask
def test_gradient_of_attention_with_padding_and_shared_keys_and_of_its_log_sum_exp(causal, device):
    q, k, v = qkv(4, 5, 3, torch.float64, device, batch=3, heads=2, kv_heads=1)
    begin, end = bounds([0, 1, 3], device), bounds([5, 4, 3], device)

    def function(*inputs):
        out, lse = step2_attention.attention(*inputs, begin, end, causal=causal, return_lse=True)
        return out, lse.nan_to_num(neginf=0)

    inputs = [t.requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    for which in (0, 1):  # one output alone
        assert torch.autograd.gradcheck(lambda *inputs: function(*inputs)[which], inputs)  # noqa: B023

    def both(*inputs):
        out, lse = function(*inputs)
        return out.square().sum() + lse.square().sum()  # gradcheck takes several outputs one by one

    assert torch.autograd.gradcheck(both, inputs)


@on_each_device
def test_padding_of_nan_reaches_no_gradient(device):
    q, k, v = qkv(4, 6, 8, torch.float32, device)
    k[:, :, :2], v[:, :, 5:] = NAN, NAN
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = step2_attention.attention(*inputs, bounds([2], device), bounds([5], device))
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    assert all(g.isfinite().all() for g in (*grads, *second))
    for g in grads[1:]:
        assert g[:, :, [0, 1, 5]].eq(0).all()
        assert g[:, :, 2:5].ne(0).all()


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@with_and_without_mask
def test_gradients_are_as_exact_as_the_dtype_allows(causal, dtype, device):
    """One rounding on the CPU. On a GPU `auto` takes a rung that rounds weights: at most twice the error of PyTorch."""
    leaves = qkv(60, 70, 64, dtype, device)
    grad = testing.randn(leaves[0].shape, dtype, device, seed=9)

    def gradients(attention, to):
        inputs = [t.to(to).requires_grad_() for t in leaves]
        return torch.autograd.grad(attention(*inputs, causal=causal), inputs, grad.to(to))

    got, eager = gradients(step2_attention.attention, dtype), gradients(attention_of, dtype)
    for g, e, exact in zip(got, eager, gradients(attention_of, torch.float64), strict=True):
        assert g.dtype == dtype
        rounding = (exact - exact.to(dtype).double()).abs().max()
        allowed = 1.01 * rounding + 1e-5 * exact.abs().max()
        if device == "cuda":
            allowed = torch.maximum(allowed, 2 * (e.double() - exact).abs().max())
        assert (g.double() - exact).abs().max() <= allowed


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_lie_side_by_side_where_q_k_and_v_do(dtype, device):
    inputs = qkv(70, 70, 16, dtype, device, batch=2, heads=3)
    check_packed_gradients(lambda q, k, v: step2_attention.attention(q, k, v, causal=True), inputs)


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize(("q_length", "k_length"), [(5, 5), (4, 3)])
def test_second_gradients_are_as_exact_as_the_dtype_allows(q_length, k_length, dtype, device):
    options = {"causal": True, "scale": 0.7}
    testing.check_second_gradients(
        lambda q, k, v: step2_attention.attention(q, k, v, **options),
        lambda q, k, v: attention_of(q, k, v, **options),
        qkv(q_length, k_length, 8, dtype, device),
        roundings=None,
    )


@on_each_device
@with_and_without_mask
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(causal, device):
    inputs = qkv(5, 4, 8, torch.float32, device)
    testing.check_each_input_alone(lambda *t: step2_attention.attention(*t, causal=causal), inputs)


def test_forward_mode_is_refused():
    """PyTorch would take a tangent for 0. torch.func.grad it refuses itself, and vmap is a loop."""
    q, k, v = qkv(5, 4, 8, torch.float32, "cpu")
    out, lse = step2_attention.attention(q, k, v, return_lse=True)
    testing.check_tangents_are_refused(step2_attention.attention, (q, k, v))
    testing.check_tangents_are_refused(step2_attention.attention_backward, (out, q, k, v, out, lse))
    testing.check_tangents_are_refused(step2_attention.softmax, (q,))
    testing.check_tangents_are_refused(step2_attention.softmax_backward, (q, q))
    with pytest.raises(RuntimeError, match=r"autograd.Function with functorch transforms"):
        torch.func.grad(lambda q: step2_attention.attention(q, k, v).sum())(q)
    each = torch.vmap(lambda q: step2_attention.attention(q, k, v))(torch.stack([q, 2 * q]))
    assert torch.equal(each[1], step2_attention.attention(2 * q, k, v))


@every_attention
def test_a_backward_runs_by_auto_whatever_rung_the_forward_had(device, rung):
    q, k, v = (t.requires_grad_() for t in qkv(5, 7, 16, dtype_of(rung), device))
    x = testing.randn((3, 9), torch.float32, device).requires_grad_()
    softmax_rung = step2_attention.rungs("softmax", device)[-1]
    outputs = [step2_attention.attention(q, k, v, rung=rung), step2_attention.softmax(x, rung=softmax_rung)]
    before = step2_attention.launch_counts()
    torch.autograd.grad(outputs, (q, k, v, x), [torch.ones_like(out) for out in outputs])
    after = step2_attention.launch_counts()
    backend = "gpu" if device == "cuda" else "cpu"
    assert {k: after[k] - before[k] for k in after if after[k] != before[k]} == {backend: 2}


def test_a_gradient_of_stride_0_is_taken():
    q, k, v = (t.requires_grad_() for t in qkv(5, 5, 8, torch.float32, "cpu"))
    got = torch.autograd.grad(step2_attention.attention(q, k, v).sum() + step2_attention.softmax(q).sum(), (q, k, v))
    expected = torch.autograd.grad(attention_of(q, k, v).sum(), (q, k, v))  # softmax's rows add up to 1, always
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


# ---- as torch sees them ----


@of_the_op("attention")
@every_attention
def test_attention_is_registered_as_torch_wants_it(device, rung):
    inputs = qkv(5, 7, 16, dtype_of(rung), device)
    testing.check_op(step2_attention, "attention", inputs, {"causal": True, "rung": rung})
    testing.check_op(step2_attention, "attention", inputs, {"scale": 0.3, "rung": rung})
    strided = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)
    testing.check_op(step2_attention, "attention", strided, {"rung": rung})
    if can_do(rung, 16, torch.float64):  # whose log-sum-exp is float64, too
        testing.check_op(step2_attention, "attention", tuple(t.double() for t in inputs), {"rung": rung})
    transposed = tuple(testing.transposed(t.bfloat16()) for t in inputs)
    testing.check_op(step2_attention, "attention", transposed, {"rung": rung})
    shared = qkv(5, 7, 16, dtype_of(rung), device, batch=2, heads=4, kv_heads=2)
    padding = (bounds([1, 0], device), bounds([7, 5], device))
    testing.check_op(step2_attention, "attention", (*shared, *padding), {"causal": True, "rung": rung})


def test_gradients_under_torch_compile():
    def loss(q, k, v):
        return step2_attention.softmax(step2_attention.attention(q, k, v, causal=True)).square().sum()

    inputs = [t.requires_grad_() for t in qkv(6, 6, 8, torch.float32, "cpu")]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want)


@on_each_device
@half_types
def test_autocast_makes_softmax_float32_and_attention_lower_precision(dtype, device):
    q, k, v = (t.requires_grad_() for t in qkv(5, 5, 8, torch.float32, device))
    with torch.autocast(device, dtype):
        mixed = step2_attention.attention(q.to(dtype), k, v)  # lower precision, all the same dtype
        weights = step2_attention.softmax(q.to(dtype))
        assert mixed.dtype == F.scaled_dot_product_attention(q, k, v).dtype == dtype
        assert weights.dtype == torch.float32
        if device == "cuda":  # on CPU, PyTorch's softmax keeps the dtype it gets
            assert torch.softmax(q.to(dtype), -1).dtype == torch.float32
        exact = step2_attention.attention(*(t.double() for t in (q, k, v)))
        assert exact.dtype == torch.float64
        mixed.sum().backward()
    halves = [t.detach().to(dtype) for t in (q, k, v)]
    assert torch.equal(mixed, step2_attention.attention(*halves))
    assert q.grad.dtype == k.grad.dtype == torch.float32
    options = {"causal": True, "scale": 0.7}
    with torch.autocast(device, dtype):
        mixed = step2_attention.attention(q, k, v, **options)
    assert torch.equal(mixed, step2_attention.attention(*halves, **options))


@half_types
def test_a_backward_inside_autocast_computes_the_same(dtype):
    inputs = [t.requires_grad_() for t in qkv(20, 20, 8, torch.float32, "cpu")]

    def gradients(loss):
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    outside = gradients(step2_attention.attention(*inputs).square().sum())
    loss = step2_attention.attention(*inputs).square().sum()
    with torch.autocast("cpu", dtype):
        inside = gradients(loss)
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_autocast_under_torch_compile():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return step2_attention.softmax(step2_attention.attention(q, k, v))

    inputs = qkv(5, 5, 8, torch.float32, "cpu")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(compiled, function(*inputs))


@pytest.mark.parametrize("overload", testing.writing_overloads("step2_attention"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)
