"""What the tests of products with epilogues share: formulas, each op's inputs, and which rungs there are."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import step3_fused
from kernel_fusion import testing
from kernel_fusion.testing.philox import mask_and_factor
from step2_attention.linear_testing import (
    DTYPES,
    HALF_TYPES,
    backward_inputs_of,
    fits_tensor_cores,
    gradients_of,
    inputs_of,
    linear_of,
)

RNG_STATE = (1234, 8)  # seed and offset of dropout


# ---- the formulas, composed of PyTorch's operations ----


def linear_gelu_of(x, weight, bias=None, transposed=False, approximate="tanh"):
    preactivation = linear_of(x, weight, bias, transposed)
    return F.gelu(preactivation, approximate=approximate), preactivation


def times_slope(grad, x, approximate):
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


def linear_gelu_gradients(grad, preactivation, x, weight, transposed=False, approximate="tanh"):
    return gradients_of(times_slope(grad, preactivation, approximate), x, weight, transposed)


def gelu_linear_of(x, weight, bias=None, transposed=False, approximate="tanh"):
    return linear_of(F.gelu(x, approximate=approximate), weight, bias, transposed)


def gelu_linear_gradients(grad, x, weight, transposed=False, approximate="tanh"):
    through, *rest = gradients_of(grad, F.gelu(x, approximate=approximate), weight, transposed)
    return times_slope(through, x, approximate), *rest


def layer_norm_linear_of(x, norm_weight, norm_bias, weight, bias=None, transposed=False, eps=1e-5):
    rows = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(-1)
    variance = (wide - mean.unsqueeze(-1)).square().mean(-1)  # torch.var warns where there are no rows
    return linear_of(rows, weight, bias, transposed), mean, (variance + eps).rsqrt()


def dropped(x, p, rng_state):
    mask, factor = mask_and_factor(x.shape, p, rng_state)
    return torch.where(mask.to(x.device), x * factor, 0)


def linear_bias_dropout_residual_of(x, weight, bias, residual, p, rng_state, transposed=False):
    return residual + dropped(linear_of(x, weight, bias, transposed), p, rng_state)


def dropout_gradients(grad, x, weight, p, rng_state, transposed=False):
    return gradients_of(dropped(grad, p, rng_state), x, weight, transposed)


def mlp_of(x, weight_1, bias_1, weight_2, bias_2, residual=None, transposed=False, approximate="tanh"):
    inner, preactivation = linear_gelu_of(x, weight_1, bias_1, transposed, approximate)
    y = linear_of(inner, weight_2, bias_2, transposed)
    return y if residual is None else y + residual, preactivation


# ---- the ops ----


class EpilogueCase(NamedTuple):
    """An op, and how to make its inputs: of rows, depth, width, dtype, device and `transposed`."""

    formula: Any
    inputs: Any
    options: tuple = ({},)  # each a set of keyword arguments
    all_outputs: dict = {}  # noqa: RUF012  with these the Python function returns all that the op does
    backward: bool = False


def layer(rows, depth, width, dtype, device, transposed):
    return tuple(inputs_of(rows, depth, width, dtype, device, transposed=transposed))


def with_preactivation(rows, depth, width, dtype, device, transposed):
    grad, x, weight = backward_inputs_of(rows, depth, width, dtype, device, transposed=transposed)
    return grad, testing.randn(grad.shape, dtype, device, seed=5), x, weight


def with_norm(rows, depth, width, dtype, device, transposed):
    x, *layer = inputs_of(rows, depth, width, dtype, device, transposed=transposed)
    norm = (testing.randn((depth,), dtype, device, seed=seed) for seed in (6, 7))
    return (x + testing.staircase(depth, device) + 1).to(dtype), *norm, *layer


def with_residual(p):
    def inputs(rows, depth, width, dtype, device, transposed):
        x, *layer = inputs_of(rows, depth, width, dtype, device, transposed=transposed)
        return x, *layer, testing.randn((*x.shape[:-1], width), dtype, device, seed=8), p, torch.tensor(RNG_STATE)

    return inputs


def backward_inputs(rows, depth, width, dtype, device, transposed):
    return backward_inputs_of(rows, depth, width, dtype, device, transposed=transposed)


def masked(p):
    def inputs(*sizes):
        return *backward_inputs(*sizes), p, torch.tensor(RNG_STATE)

    return inputs


def two_layers(residual):
    def inputs(rows, width, inner, dtype, device, transposed):
        first = inputs_of(rows, width, inner, dtype, device, transposed=transposed)
        second = inputs_of(rows, inner, width, dtype, device, transposed=transposed)[1:]
        return *first, *second, testing.randn(first[0].shape, dtype, device, seed=8) if residual else None

    return inputs


GELUS = ({"approximate": "tanh"}, {"approximate": "none"})
KEPT = {"return_preactivation": True}
EPILOGUES = {
    "linear_gelu": [EpilogueCase(linear_gelu_of, layer, GELUS, KEPT)],
    "linear_gelu_backward": [EpilogueCase(linear_gelu_gradients, with_preactivation, GELUS, backward=True)],
    "gelu_linear": [EpilogueCase(gelu_linear_of, layer, GELUS)],
    "gelu_linear_backward": [EpilogueCase(gelu_linear_gradients, backward_inputs, GELUS, backward=True)],
    "layer_norm_linear": [
        EpilogueCase(layer_norm_linear_of, with_norm, ({}, {"eps": 0.1}), {"return_statistics": True}),
    ],
    "linear_bias_dropout_residual": [
        EpilogueCase(linear_bias_dropout_residual_of, with_residual(p)) for p in (0.0, 0.3, 1.0)
    ],
    "linear_bias_dropout_residual_backward": [
        EpilogueCase(dropout_gradients, masked(p), backward=True) for p in (0.3, 1.0)
    ],
    "mlp": [EpilogueCase(mlp_of, two_layers(residual), GELUS, KEPT) for residual in (True, False)],
}


def rung_of_each_op():
    for op in EPILOGUES:
        for param in testing.device_rungs("step3_fused", op):
            yield pytest.param(op, *param.values, marks=param.marks, id=f"{op}-{param.id}")


TENSOR_CORES = (
    *("v2_mma", "v3_hopper", "v5_in_place", "v5_rows", "v6_one_launch", "v7_inner", "v5_dependent", "v6_dependent"),
)


# test_a_rung_refuses_what_it_says holds the rungs to it.
def can_do(rung, device, rows, depth, width, dtype, transposed, backward=False):
    if rung in ("v5_rows", "v7_inner") and rows > 64:
        return False
    if rung not in TENSOR_CORES:
        return True
    return fits_tensor_cores(rung, device, rows, depth, width, dtype, transposed, backward, on_any_gpu=("v2_mma",))


def able(op, rung, device, rows, depth, width, dtype, transposed):
    """test_a_rung_refuses_what_it_says holds the rungs to it."""
    if rung == "v4_cublaslt":
        return device == "cuda" and (op != "linear_gelu" or (width % 8 == 0 and dtype in HALF_TYPES))
    if rung in ("v3_hopper", "v5_in_place") and op in ("linear_bias_dropout_residual", "gelu_linear_backward"):
        if depth % 8 or width % 8:  # what the epilogue reads comes by TMA
            return False
    if op == "gelu_linear_backward":  # the product for x, whose depth is the layer's width; any rung for the weight's
        return can_do(rung, device, rows, width, depth, dtype, not transposed)
    if op == "mlp":
        both = rung in ("v5_rows", "v6_one_launch", "v7_inner")  # the second layer's depth is the first one's width
        return can_do(rung, device, rows, depth, width, dtype, False) and not (both and width % 8)
    return can_do(rung, device, rows, depth, width, dtype, transposed, backward=EPILOGUES[op][0].backward)


def drops(op, rung):
    """Whether the rung has dropout; `check` holds those without to it."""
    return "dropout" in op and rung not in ("v4_cublaslt", "v5_in_place")


def check(op, case, inputs, rung, *, transposed=False, options=None, **more):
    if op == "linear_bias_dropout_residual" and not drops(op, rung) and inputs[4] > 0:
        with testing.raises(ValueError, "takes dropout_p = 0 only"):
            step3_fused.linear_bias_dropout_residual(*inputs, transposed=transposed, rung=rung)
        return None
    return testing.check_contract(
        step3_fused,
        op,
        inputs,
        rung,
        reference=case.formula,
        eager=case.formula,
        kwargs={"transposed": transposed} | (case.options[0] if options is None else options),
        all_outputs=case.all_outputs,
        **more,
    )


every_rung = pytest.mark.parametrize(("op", "device", "rung"), list(rung_of_each_op()))
every_op = pytest.mark.parametrize("op", EPILOGUES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
on_a_gpu = pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
either_way = pytest.mark.parametrize("transposed", [False, True], ids=["depth-width", "width-depth"])

# These write to aligned memory only.
ALIGNED = (
    ("linear_gelu", "v4_cublaslt"),
    ("linear_bias_dropout_residual", "v5_in_place"),
    ("mlp", "v6_one_launch"),
)
SHAPES = [(1, 1, 1), (6, 3, 7), (4, 48, 24), (24, 66, 130), (64, 200, 136), (136, 72, 264)]
