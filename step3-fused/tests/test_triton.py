"""triton_kernels.py, on a GPU and by Triton's interpreter, against formulas."""

import pytest
import torch
import torch.nn.functional as F

from kernel_fusion import testing
from kernel_fusion.testing.triton_peer import RUNNERS, Runner, kernels_of, on_gpu

kernels = kernels_of("step3")


@pytest.fixture(params=RUNNERS)
def run(request, tmp_path):
    """A function that takes calls, (function, inputs, options), and gives their outputs."""
    return Runner("step3", request.param, tmp_path)


ALLOWED = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
every_dtype = pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)


def check(run, calls, formula, allowed=None):
    """Each call against `formula`, of its inputs in float64."""
    for (_, inputs, options), out in zip(calls, run(calls), strict=True):
        expected = formula(*(t if t is None else t.double() for t in inputs), **options)
        several = zip(out, expected, strict=True) if isinstance(out, tuple) else [(out, expected)]
        for one, right in several:
            assert one.shape == right.shape
            limit = ALLOWED[inputs[0].dtype] if allowed is None else allowed
            torch.testing.assert_close(one.double(), right, atol=limit * right.abs().max().item(), rtol=0)


def tensors(dtype, *shapes, offset=0.0):
    return tuple(testing.randn(shape, dtype, "cpu", seed) + offset for seed, shape in enumerate(shapes))


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
    y, (_, total), (grad_x, grad_weight, grad_bias), z = run(
        [
            ("layer_norm", (x, weight, weight), {}),
            ("residual_layer_norm", (x, x, weight, weight), {}),
            ("layer_norm_backward", (x, x, weight, mean, mean), {}),
            ("linear", (x, weight[:, None].contiguous()), {"config": 0}),
        ]
    )
    assert y.shape == total.shape == grad_x.shape == (0, 8)
    assert z.shape == (0, 1)
    assert not grad_weight.any()
    assert not grad_bias.any()


# ---- linear layers ----


def linear(x, weight, bias=None, residual=None, config=None):
    y = x @ weight
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


def linear_gelu(x, weight, bias=None, keep=False, config=None):
    preactivation = linear(x, weight, bias)
    y = F.gelu(preactivation, approximate="tanh")
    return (y, preactivation) if keep else y


def layer(rows, depth, width, dtype=torch.float32):
    """x, weight, bias and residual."""
    x, weight, bias, residual = tensors(dtype, (rows, depth), (depth, width), (width,), (rows, width))
    return x, weight * depth**-0.5, bias, residual


@every_dtype
def test_linear_of_any_shape(dtype, run):
    """Tiles of 64: less than one, one, just more; a depth that is not of whole pieces; more tiles than a group has."""
    run.multiplies(dtype)
    shapes = [(1, 1, 1), (5, 3, 7), (64, 64, 64), (65, 130, 66), (130, 72, 33), (600, 16, 65)]
    calls = [("linear", layer(*shape, dtype)[:inputs], {"config": 1}) for shape in shapes for inputs in (2, 3, 4)]
    check(run, calls, linear)


@every_dtype
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
def test_linear_gelu(keep, dtype, run):
    run.multiplies(dtype)
    inputs = [layer(*shape, dtype)[:3] for shape in [(1, 40, 24), (70, 90, 130)]]
    check(run, [("linear_gelu", given, {"keep": keep, "config": 1}) for given in inputs], linear_gelu)


def test_every_configuration_is_right(run):
    dtype = torch.float16 if run.how == "cuda" else torch.float32  # wide tiles must fit
    inputs = [layer(150, 200, 300, dtype), layer(2, 129, 16, dtype)]
    check(run, [("linear", given, {"config": n}) for given in inputs for n in range(len(kernels.CONFIGS))], linear)


def test_a_weight_is_read_as_it_lies(run):
    x, weight, bias, _ = layer(20, 70, 90)
    turned, strided = weight.mT.contiguous().mT, torch.stack([weight, weight], -1)[..., 0]
    check(run, [("linear", (x, w, bias), {"config": 1}) for w in (turned, strided)], linear)


@on_gpu
@every_dtype
def test_tuned_linear(dtype):
    for rows in (1, 40, 1030):
        x, weight, bias, residual = (t.cuda() for t in layer(rows, 200, 136, dtype))
        expected = linear(*(t.cpu().double() for t in (x, weight, bias, residual)))
        out = kernels.linear(x, weight, bias, residual).cpu().double()
        torch.testing.assert_close(out, expected, atol=ALLOWED[dtype] * expected.abs().max().item(), rtol=0)


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
BAD_LAYERS = {
    "`x` must be float32, float16 or bfloat16, got float64": lambda x, w, b, r: (x.double(), w, b, r),
    "`weight` must have 2 dimensions": lambda x, w, b, r: (x, w[0], b, r),
    "`weight` must have shape": lambda x, w, b, r: (x, w.mT, b, r),
    "`weight` must not be empty": lambda x, w, b, r: (x, w[:, :0], b[:0], r[:, :0]),
    "`bias` must have the dtype of `x`": lambda x, w, b, r: (x, w, b.half(), r),
    "`residual` must have shape": lambda x, w, b, r: (x, w, b, r[1:]),
    "`bias` must be contiguous": lambda x, w, b, r: (x, w, b.repeat(2)[::2], r),
    "`residual` must be contiguous": lambda x, w, b, r: (x, w, b, r.mT.contiguous().mT),
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_bad_rows_are_refused(message):
    with testing.raises((TypeError, ValueError), f"layer_norm: {message}"):
        kernels.layer_norm(*BAD_ROWS[message](*tensors(torch.float32, (5, 7), (7,), (7,))))


@pytest.mark.parametrize("message", BAD_LAYERS)
def test_bad_layers_are_refused(message):
    with testing.raises((TypeError, ValueError), f"linear: {message}"):
        kernels.linear(*BAD_LAYERS[message](*layer(5, 7, 9)))
