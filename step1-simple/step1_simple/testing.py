"""What the tests of this step's ops share: each op's formula, inputs, and which rungs there are."""

import pytest
import torch
import torch.nn.functional as F

from kernel_fusion import testing
from kernel_fusion.testing.philox import mask_and_factor

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
NAN = float("nan")

ops = torch.ops.step1_simple


# Every op: tensors and arguments by shape and dtype, PyTorch's way, and shapes that are multiples of nothing.
def scaled(x, factor):
    return x * factor


def gelu(x, approximate="tanh"):
    return F.gelu(x, approximate=approximate)


def scaled_gelu(x, factor, approximate="tanh"):
    return F.gelu(x, approximate=approximate) * factor


def gelu_gradient(grad, x, factor=1.0, approximate="tanh"):
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate) * factor


def gelu_of_sum(x, bias, approximate="tanh"):
    return F.gelu(x + bias, approximate=approximate)


def gelu_of_sum_gradients(grad, x, bias, approximate="tanh"):
    grad_x = torch.ops.aten.gelu_backward(grad, x + bias, approximate=approximate)
    return grad_x, sum_of_rows(grad_x)


def sum_of_rows(x):
    return x.reshape(-1, x.shape[-1]).sum(0)


def residual_plus_dropout(x, bias, residual, p, rng_state):
    mask, factor = mask_and_factor(x.shape, p, rng_state)
    return torch.where(mask.to(x.device), (x + bias) * factor, 0) + residual


def dropout_gradients(grad, p, rng_state):
    mask, factor = mask_and_factor(grad.shape, p, rng_state)
    grad_x = torch.where(mask.to(grad.device), grad * factor, 0)
    return grad_x, sum_of_rows(grad_x)


RNG_STATE = torch.tensor([0x0123456789ABCDEF, 12])

OPS = {
    "scale": (scaled, lambda x, more: (x, -1.7)),
    "gelu": (gelu, lambda x, more: (x,)),
    "gelu_scale": (scaled_gelu, lambda x, more: (x, -1.7)),
    "gelu_backward": (gelu_gradient, lambda x, more: (more(1, x.shape), x)),
    "bias_gelu": (gelu_of_sum, lambda x, more: (x, more(1, x.shape[-1:]))),
    "bias_gelu_backward": (gelu_of_sum_gradients, lambda x, more: (more(2, x.shape), x, more(1, x.shape[-1:]))),
    "bias_dropout_residual": (
        residual_plus_dropout,
        lambda x, more: (x, more(1, x.shape[-1:]), more(2, x.shape), 0.3, RNG_STATE),
    ),
    "bias_dropout_residual_backward": (dropout_gradients, lambda x, more: (x, 0.3, RNG_STATE)),
    "column_sum": (sum_of_rows, lambda x, more: (x,)),
}
BY_ELEMENTS = ("scale", "gelu", "gelu_scale", "gelu_backward")  # ops that do not care about rows
WITH_GELU = {"gelu", "gelu_scale", "gelu_backward", "bias_gelu", "bias_gelu_backward"}
RUNGS = [
    pytest.param(op, *parameter.values, marks=parameter.marks, id=f"{op}-{parameter.id}")
    for op in OPS
    for parameter in testing.device_rungs("step1_simple", op)
]
SHAPES = [(1, 1), (31, 64), (33, 760), (127, 33), (2, 3, 768), (5, 1600), (1023, 2), (127,), (9, 1023), (3, 257)]


def inputs_of(op: str, shape, dtype: torch.dtype, device: str) -> tuple:
    """The positional arguments of `op`."""
    x = testing.randn(shape, dtype, device, scale=2.0)
    return OPS[op][1](x, lambda seed, shape: testing.randn(shape, dtype, device, seed=seed))


def functions_of(op: str) -> dict:
    """The reference and eager PyTorch, for check_contract."""
    return {"reference": OPS[op][0], "eager": OPS[op][0]}
