"""The ops as torch sees them: registered, compiled, under autocast."""

import os
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F

import step1_simple
from kernel_fusion import testing
from step1_simple.testing import OPS, RNG_STATE, WITH_GELU, inputs_of, ops

# ---- as torch sees them ----


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_ops_are_registered_as_torch_wants_it(op, device):
    inputs = inputs_of(op, (4, 6), torch.float32, device)
    for rung in ("auto", step1_simple.rungs(op, device)[-1]):
        for approximate in ("tanh", "none") if op in WITH_GELU else (None,):
            keywords = {"rung": rung} | ({"approximate": approximate} if approximate else {})
            testing.check_op(step1_simple, op, inputs, keywords)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_ops_on_transposed_tensors_are_registered_as_torch_wants_it(op, device):
    inputs = inputs_of(op, (3, 4, 6), torch.bfloat16, device)  # and in another dtype than the most usual
    testing.check_op(step1_simple, op, tuple(map(testing.transposed, inputs)))


def test_the_state_of_dropout_is_registered_as_torch_wants_it():
    assert step1_simple.draw_rng_state(torch.ones(3, device="meta"), on_device=True).device.type == "meta"
    assert step1_simple.draw_rng_state(torch.ones(3, device="meta")).device.type == "cpu"
    tests = ("test_schema", "test_faketensor")  # the others run it twice and expect the same
    torch.library.opcheck(ops.draw_rng_state.default, (torch.ones(3),), {"on_device": False}, test_utils=tests)


def test_gradients_under_torch_compile():
    def loss(x, bias, residual):
        hidden = step1_simple.scale(step1_simple.bias_gelu(x, bias), 2.0)
        return step1_simple.bias_dropout_residual(hidden, bias, residual, 0.3, RNG_STATE).sum()

    inputs = [testing.randn(shape, torch.float32, "cpu").requires_grad_() for shape in ((4, 6), (6,), (4, 6))]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_bias_gelu_like_a_linear_layer(dtype, device):
    x = testing.randn((4, 6), torch.float32, device)
    bias = torch.nn.Parameter(testing.randn((6,), torch.float32, device, seed=1))
    with torch.autocast(device, dtype):
        from_wide = step1_simple.bias_gelu(x, bias)
        from_half = step1_simple.bias_gelu(x.to(dtype), bias)
        of_half = step1_simple.bias_gelu(x, bias.detach().to(dtype))
        exact = step1_simple.bias_gelu(x.double(), bias.double())
    want = step1_simple.bias_gelu(x.to(dtype), bias.to(dtype))
    assert all(torch.equal(got, want) and got.dtype == dtype for got in (from_wide, from_half, of_half))
    assert exact.dtype == torch.float64  # autocast leaves float64 alone, here too
    from_half.sum().backward()
    assert bias.grad.dtype == torch.float32


@pytest.mark.parametrize("device", testing.DEVICES)
def test_autocast_adds_in_the_widest_dtype_of_dropouts_inputs(device):
    x = testing.randn((4, 6), torch.bfloat16, device)
    bias = torch.nn.Parameter(testing.randn((6,), torch.float32, device, seed=1))
    residual = testing.randn((4, 6), torch.float32, device, seed=2)
    with torch.autocast(device, torch.bfloat16):
        mixed = step1_simple.bias_dropout_residual(x, bias, residual, 0.3, RNG_STATE)
        half = step1_simple.bias_dropout_residual(x, bias.to(x.dtype), residual.to(x.dtype), 0.3, RNG_STATE)
    assert mixed.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    mixed.sum().backward()
    assert bias.grad.dtype == torch.float32
    with torch.autocast(device, torch.bfloat16):
        with testing.raises(TypeError, "bias_dropout_residual: `bias` must be float32, float16, bfloat16", "got int64"):
            step1_simple.bias_dropout_residual(
                x, torch.ones(6, device=device, dtype=torch.int64), residual, 0.3, RNG_STATE
            )


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("wide", range(3), ids=["x", "bias", "residual"])
@pytest.mark.parametrize(
    ("narrow", "widest"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_autocast_finds_the_widest_dtype_wherever_it_is(narrow, widest, wide, device):
    shapes = ((4, 6), (6,), (4, 6))
    tensors = [testing.randn(shape, narrow, device, seed) for seed, shape in enumerate(shapes)]
    tensors[wide] = testing.randn(shapes[wide], widest, device, wide)
    with torch.autocast(device, torch.bfloat16):
        got = step1_simple.bias_dropout_residual(*tensors, 0.3, RNG_STATE)
    assert torch.equal(got, step1_simple.bias_dropout_residual(*(t.to(widest) for t in tensors), 0.3, RNG_STATE))
    assert got.dtype == widest


@pytest.mark.parametrize("device", testing.DEVICES)
def test_autocast_leaves_scale_and_gelu_alone(device):
    x = torch.ones(4, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert step1_simple.scale(x, 2.0).dtype == (x * 2.0).dtype == torch.float32
        assert step1_simple.gelu(x).dtype == F.gelu(x).dtype == torch.float32


def test_autocast_under_torch_compile():
    def function(x, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return step1_simple.bias_gelu(x, bias)

    x, bias = testing.randn((4, 6), torch.float32, "cpu"), torch.zeros(6)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x, bias)
    torch.testing.assert_close(compiled, function(x, bias), rtol=0, atol=0)


@pytest.mark.parametrize("overload", testing.writing_overloads("step1_simple"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)


# ---- the lesson of the first binding ----


def test_a_plain_pybind_function_breaks_the_graph():
    def function(x):
        return step1_simple.scale_by_pybind(x + 1, 2.0) + 1

    x = torch.ones(4)
    assert function(x).tolist() == [5.0] * 4  # in eager mode nothing is wrong
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the function it cannot trace
        assert torch._dynamo.explain(function)(x).graph_break_count == 1
        with testing.raises(torch._dynamo.exc.Unsupported, "scale_by_pybind"):
            torch.compile(function, fullgraph=True, backend="eager")(x)


def test_a_registered_op_does_not_break_the_graph():
    def function(x):
        return step1_simple.scale(x + 1, 2.0) + 1

    x = torch.ones(4)
    assert torch._dynamo.explain(function)(x).graph_break_count == 0
    assert torch.compile(function, fullgraph=True, backend="eager")(x).tolist() == [5.0] * 4


def test_a_plain_pybind_function_loses_the_gradient():
    x = torch.ones(4, requires_grad=True)
    assert not step1_simple.scale_by_pybind(x, 2.0).requires_grad
    assert step1_simple.scale(x, 2.0).requires_grad


# ---- plain C++: loops and half types of its own ----


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how many threads there are")
def test_plain_cpp_takes_as_many_threads_as_torch():
    """In a thread of the caller's, too, where OpenMP has not heard of torch.set_num_threads."""
    x, before, started = torch.ones(1 << 20), torch.get_num_threads(), []

    def scale():
        threads = len(os.listdir("/proc/self/task"))
        step1_simple.scale(x, 2.0)
        started.append(len(os.listdir("/proc/self/task")) - threads)

    torch.set_num_threads(5)
    try:
        thread = threading.Thread(target=scale)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert started == [4]


@pytest.mark.parametrize("factor", [1.0, 1 + 2**-9, 1.3, 2.0**-9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_plain_cpp_converts_every_number_as_torch_does(dtype, factor):
    """All 65,536, to float and back: exact, in between, subnormal, too great."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    wanted = (x.float() * factor).to(dtype)
    got = step1_simple.scale(x, factor)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()], wanted[~x.isnan()])
