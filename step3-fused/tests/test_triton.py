"""triton_kernels.py, on a GPU and by Triton's interpreter, against formulas."""

import pytest
import torch
import torch.nn.functional as F

from kernel_fusion import testing
from kernel_fusion.testing.triton_peer import RUNNERS, Runner, check, kernels_of, tensors

kernels = kernels_of("step3")


@pytest.fixture(params=RUNNERS)
def run(request, tmp_path):
    """A function that takes calls, (function, inputs, options), and gives their outputs."""
    return Runner("step3", request.param, tmp_path)


every_dtype = pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)


# ---- LayerNorm ----


def layer_norm(x, weight, bias, return_statistics=False):
    y = F.layer_norm(x, x.shape[-1:], weight, bias)
    return (y, x.mean(-1), (x.var(-1, correction=0) + 1e-5).rsqrt()) if return_statistics else y


def residual_layer_norm(x, residual, weight, bias):
    return layer_norm(x + residual, weight, bias), x + residual


def layer_norm_backward(grad, x, weight, mean, rstd):
    with torch.enable_grad():
        variables = [t.detach().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
        return torch.autograd.grad(layer_norm(*variables), variables, grad)


SHAPES = [(1, 1), (3, 2), (5, 33), (4, 768), (2, 1023), (3, 1600), (2, 4097), (0, 8)]


@every_dtype
def test_layer_norm_of_any_shape(dtype, run):
    inputs = [tensors(dtype, (rows, width), (width,), (width,)) for rows, width in SHAPES if rows]
    check(run, [("layer_norm", given, {}) for given in inputs], layer_norm)
    check(run, [("layer_norm", given, {"return_statistics": True}) for given in inputs[2:]], layer_norm)


def test_a_large_mean_does_no_harm(run):
    x, weight, bias = *tensors(torch.float32, (3, 1000), offset=1000.0), *tensors(torch.float32, (1000,), (1000,))
    check(run, [("layer_norm", (x, weight, bias), {})], layer_norm, 2e-4)


@every_dtype
def test_residual_layer_norm_of_any_shape(dtype, run):
    inputs = [tensors(dtype, (rows, width), (rows, width), (width,), (width,)) for rows, width in SHAPES[2:7]]
    check(run, [("residual_layer_norm", given, {}) for given in inputs], residual_layer_norm)


@every_dtype
def test_layer_norm_backward_of_any_shape(dtype, run):
    calls = []
    for rows, width in SHAPES[2:7]:
        grad, x, weight = tensors(dtype, (rows, width), (rows, width), (width,))
        statistics = layer_norm(x.double(), weight.double(), weight.double(), True)[1:]
        calls.append(("layer_norm_backward", (grad, x, weight, *(t.float() for t in statistics)), {}))
    check(run, calls, layer_norm_backward)


def test_no_rows(run):
    x, weight = tensors(torch.float32, (0, 8), (8,))
    mean = x.new_empty(0)
    y, (_, total), (grad_x, grad_weight, grad_bias) = run(
        [
            ("layer_norm", (x, weight, weight), {}),
            ("residual_layer_norm", (x, x, weight, weight), {}),
            ("layer_norm_backward", (x, x, weight, mean, mean), {}),
        ]
    )
    assert y.shape == total.shape == grad_x.shape == (0, 8)
    assert not grad_weight.any()
    assert not grad_bias.any()


# ---- what is refused ----

BAD_ROWS = {
    "`x` must be float32, float16 or bfloat16, got float64": lambda x, w, b: (x.double(), w, b),
    "`x` must have 2 dimensions": lambda x, w, b: (x[0], w, b),
    "`x` must have 1 to 65536 columns, got 0": lambda x, w, b: (x[:, :0], w[:0], b[:0]),
    "`weight` must have the dtype of `x`": lambda x, w, b: (x, w.half(), b),
    "`bias` must have shape": lambda x, w, b: (x, w, b[:3]),
    "`x` must be contiguous": lambda x, w, b: (x.mT.contiguous().mT, w, b),
    "`weight` must be contiguous": lambda x, w, b: (x, w.repeat(2)[::2], b),
    "`bias` must be contiguous": lambda x, w, b: (x, w, b.repeat(2)[::2]),
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_bad_rows_are_refused(message):
    with testing.raises((TypeError, ValueError), f"layer_norm: {message}"):
        kernels.layer_norm(*BAD_ROWS[message](*tensors(torch.float32, (5, 7), (7,), (7,))))
