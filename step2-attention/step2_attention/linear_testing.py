"""What the tests of a layer's product and of what is fused to it share: formulas, inputs, which rungs can do what."""

import torch

from kernel_fusion import testing

DTYPES = [*testing.DTYPES, torch.float64]
HALF_TYPES = (torch.float16, torch.bfloat16)


# ---- the formulas, composed of PyTorch's operations ----


def linear_of(x, weight, bias=None, transposed=False):
    y = x @ (weight.mT if transposed else weight)
    return y if bias is None else y + bias


def gradients_of(grad, x, weight, transposed=False):
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
    grad_weight = rows.mT @ inputs if transposed else inputs.mT @ rows
    return grad @ (weight if transposed else weight.mT), grad_weight, rows.sum(0)


def inputs_of(rows, depth, width, dtype, device, *, transposed=False, bias=True):
    """x, weight and bias; `rows` may be several dimensions."""
    rows = rows if isinstance(rows, tuple) else (rows,)
    shape = (width, depth) if transposed else (depth, width)
    x = testing.randn((*rows, depth), dtype, device, seed=1)
    weight = testing.randn(shape, dtype, device, seed=2, scale=depth**-0.5)
    return (x, weight, *([testing.randn((width,), dtype, device, seed=3)] if bias else []))


def backward_inputs_of(rows, depth, width, dtype, device, *, transposed=False):
    x, weight = inputs_of(rows, depth, width, dtype, device, transposed=transposed, bias=False)
    return testing.randn((*x.shape[:-1], width), dtype, device, seed=4), x, weight


# ---- which rungs can do what; test_a_rung_refuses_what_it_says holds the rungs to it ----

TENSOR_CORES = (
    *("v5_mma", "v6_wgmma", "v7_persistent", "v8_cluster", "v9_split", "v10_rows", "v13_dependent"),
    *("v2_mma", "v3_hopper"),  # of linear_backward
)


def fits_tensor_cores(rung, device, rows, depth, width, dtype, transposed, backward, on_any_gpu):
    """Whether tensor cores can multiply this. `on_any_gpu`: the rungs that need no GPU of compute capability 9.0."""
    if dtype not in HALF_TYPES:
        return False
    other_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)
    if device == "cuda" and other_gpu and rung not in on_any_gpu:
        return False
    along = [depth] if transposed else [depth, width]
    if backward:
        along = [depth, width, rows] if transposed else [depth, width]
    return all(size % 8 == 0 for size in along)


def can_do(rung, device, rows, depth, width, dtype, transposed, backward=False):
    """Whether a rung of linear, or with `backward` of linear_backward, takes this."""
    if rung == "v12_cublaslt":
        return device == "cuda"
    if rung == "v11_gemv":
        return rows <= 4
    if rung not in TENSOR_CORES:
        return True
    return fits_tensor_cores(
        rung, device, rows, depth, width, dtype, transposed, backward, on_any_gpu=("v5_mma", "v2_mma")
    )
