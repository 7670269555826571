"""Gradients, and gradients of gradients."""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import step1_simple
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple
from kernel_fusion.testing.memory import is_floating
from step1_simple.testing import OPS, RUNGS, WITH_GELU, gelu_of_sum, gelu_of_sum_gradients, inputs_of


def differentiable(op, rung, *, dtype=torch.float64):
    """`op` as a function of its differentiable tensors alone, the formula likewise, and those tensors."""
    arguments = inputs_of(op, (2, 3, 5), dtype, "cpu")
    others = arguments[sum(map(is_floating, arguments)) :]  # numbers, and dropout's state: they come last

    def formula(*tensors, **kwargs):
        return OPS[op][0](*tensors, *others, **kwargs)

    def function(*tensors, **kwargs):
        return getattr(step1_simple, op)(*tensors, *others, rung=rung, **kwargs)

    return function, formula, tuple(filter(is_floating, arguments))


FORWARD = [op for op in OPS if not op.endswith("_backward")]


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
def test_gradients_are_those_of_finite_differences(op, device, rung):
    function, _, inputs = differentiable(op, rung)
    for keywords in [{"approximate": "tanh"}, {"approximate": "none"}] if op in WITH_GELU else [{}]:
        call = functools.partial(function, **keywords)
        inputs = tuple(t.to(device).detach().requires_grad_() for t in inputs)
        assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", FORWARD)
def test_second_gradients_are_those_of_finite_differences(op, device):
    function, _, inputs = differentiable(op, "auto")
    for keywords in [{"approximate": "tanh"}, {"approximate": "none"}] if op in WITH_GELU else [{}]:
        call = functools.partial(function, **keywords)
        inputs = tuple(t.to(device).detach().requires_grad_() for t in inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("op", FORWARD)
def test_second_gradients_are_as_exact_as_the_dtype_allows(op, dtype, device):
    function, formula, inputs = differentiable(op, "auto", dtype=dtype)
    for keywords in [{"approximate": "tanh"}, {"approximate": "none"}] if op in WITH_GELU else [{}]:
        testing.check_second_gradients(
            functools.partial(function, **keywords),
            functools.partial(formula, **keywords),
            tuple(t.to(device) for t in inputs),
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_second_gradient_of_a_bias_is_rounded_once(dtype):
    """Rows that nearly cancel: had each been rounded, little of their sum would be right."""
    x = torch.tensor([[0.3], [0.305]]).repeat(500, 1).to(dtype)
    grad = torch.tensor([[0.7], [-0.7]]).repeat(500, 1).to(dtype)
    bias = torch.full((1,), 0.1, dtype=dtype, requires_grad=True)
    (got,) = torch.autograd.grad(step1_simple.bias_gelu_backward(grad, x, bias)[0], bias, torch.ones_like(x))
    wide = bias.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(gelu_of_sum_gradients(grad.double(), x.double(), wide)[0].sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_second_gradients_far_out_are_0(approximate):
    x = torch.tensor([1e8, -1e8, 1e20, -1e20, 30.0], requires_grad=True)
    (slope,) = torch.autograd.grad(step1_simple.gelu(x, approximate=approximate).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    assert curvature.abs().max() < 1e-30
    bias = torch.zeros(5, requires_grad=True)
    grad_x, _ = torch.autograd.grad(
        step1_simple.bias_gelu(x[None], bias, approximate=approximate).sum(), (x, bias), create_graph=True
    )
    (curvature,) = torch.autograd.grad(grad_x.sum(), x)
    assert curvature.abs().max() < 1e-30


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(op, device):
    function, _, inputs = differentiable(op, "auto")
    testing.check_each_input_alone(function, tuple(t.to(device) for t in inputs))


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused(op):
    function, _, inputs = differentiable(op, "auto")
    testing.check_tangents_are_refused(function, inputs)


BACKWARD = {
    "scale": "scale",
    "gelu": "gelu_backward",
    "gelu_scale": "gelu_backward",
    "bias_gelu": "bias_gelu_backward",
    "bias_dropout_residual": "bias_dropout_residual_backward",
    "bias_dropout_residual_backward": "bias_dropout_residual_backward",
}  # the op of this step that an op's backward calls; the others call PyTorch's alone


class Calls(TorchDispatchMode):
    """This step's ops that run meanwhile, each with its rung."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "step1_simple":
            self.made.append((function._opname, (kwargs or {}).get("rung", "auto")))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
def test_a_backward_runs_by_auto_and_that_of_scale_by_its_rung(op, device, rung):
    function, _, inputs = differentiable(op, rung, dtype=torch.float32)
    inputs = [t.to(device).requires_grad_() for t in inputs]
    outputs = as_tuple(function(*inputs))
    grads = [torch.ones_like(out) for out in outputs]
    before = step1_simple.launch_counts()
    with Calls() as calls:
        torch.autograd.grad(outputs, inputs, grads)
    after = step1_simple.launch_counts()
    taken = rung if op == "scale" else "auto"
    backend = "gpu" if device == "cuda" else "cpu" if taken in ("auto", "cpu") else "emulated"
    launches = {backend: 1} if op in BACKWARD else {}
    assert calls.made == ([(BACKWARD[op], taken)] if op in BACKWARD else [])
    assert {k: after[k] - before[k] for k in after if after[k] != before[k]} == launches


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_gradients_are_as_exact_as_the_dtype_allows(dtype, device):
    """4096 rows: summed in bfloat16, the bias's gradient would stop growing long before the end."""
    x = testing.randn((4096, 8), dtype, device).requires_grad_()
    bias = testing.randn((8,), dtype, device, seed=1).requires_grad_()
    grad = testing.randn((4096, 8), dtype, device, seed=2).abs()
    step1_simple.bias_gelu(x, bias).backward(grad)

    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    gelu_of_sum(*wide).backward(grad.double())
    for got, want in zip((x.grad, bias.grad), (wide[0].grad, wide[1].grad), strict=True):
        assert got.dtype == dtype
        rounding = (want - want.to(dtype).double()).abs().max()
        assert (got.double() - want).abs().max() <= 1.01 * rounding + 1e-5 * want.abs().max()


def test_a_gradient_of_stride_0_is_taken():
    x = testing.randn((3, 5), torch.float32, "cpu").requires_grad_()
    bias = torch.zeros(5, requires_grad=True)
    (step1_simple.bias_gelu(x, bias) + step1_simple.scale(x, 2.0)).sum().backward()
    expected = x.detach().requires_grad_()
    (gelu_of_sum(expected, bias.detach()) + 2.0 * expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)
