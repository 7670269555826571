"""triton_linear.py, on a GPU and by Triton's interpreter, against formulas."""

import pytest
import torch
import torch.nn.functional as F

from kernel_fusion import testing
from kernel_fusion.testing.triton_peer import ALLOWED, RUNNERS, Runner, check, kernels_of, on_gpu, tensors

kernels = kernels_of("step2", "triton_linear")


@pytest.fixture(params=RUNNERS)
def run(request, tmp_path):
    """A function that takes calls, (function, inputs, options), and gives their outputs."""
    return Runner("step2", request.param, tmp_path, "triton_linear")


every_dtype = pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)


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


def test_no_rows(run):
    x, weight = tensors(torch.float32, (0, 8), (8, 1))
    assert run([("linear", (x, weight), {"config": 0})])[0].shape == (0, 1)


# ---- what is refused ----

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


@pytest.mark.parametrize("message", BAD_LAYERS)
def test_bad_layers_are_refused(message):
    with testing.raises((TypeError, ValueError), f"linear: {message}"):
        kernels.linear(*BAD_LAYERS[message](*layer(5, 7, 9)))
