"""Cases of ops around a matrix product: sizes that two steps time, inputs, bytes and FLOPs."""

import torch

from kernel_fusion.bench import benchmarks

HALF, FLOAT = torch.bfloat16, torch.float32
GPT2 = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]  # depth and width of its layers: q, k and v; projection; MLP
UP, DOWN, SQUARE = (16384, 768, 3072, HALF), (16384, 3072, 768, HALF), (16384, 768, 768, HALF)
# rows, depth, width, dtype of what leads up, to more columns, and of what leads down
UPWARD = {"emulated": [(16, 64, 128, HALF)], "cpu": [(512, 768, 3072, FLOAT)], "quick": [UP], "full": [UP]}
DOWNWARD = {"emulated": [(16, 128, 64, HALF)], "cpu": [(512, 3072, 768, FLOAT)], "quick": [DOWN], "full": [DOWN]}


def linear(x, weight, bias):
    return torch.addmm(bias, x, weight)


def linear_backward(grad, x, weight):
    return grad @ weight.mT, x.mT @ grad, grad.sum(0)


def bound_of(rows: int) -> str:
    """Each byte of the weight is for about as many operations as there are rows; an H200 computes 190 in its time."""
    return "memory" if rows <= 64 else "arithmetic"


def layer_inputs(rows: int, depth: int, width: int, dtype: torch.dtype, on, transposed: bool = False) -> tuple:
    """x, weight and bias of a linear layer."""
    shape = (width, depth) if transposed else (depth, width)
    return (
        torch.randn(rows, depth, device=on, dtype=dtype),
        torch.randn(shape, device=on, dtype=dtype) * depth**-0.5,
        torch.randn(width, device=on, dtype=dtype),
    )


def layer_case(
    step,
    op: str,
    function,
    sizes: tuple[int, int, int, torch.dtype],
    peers: dict,
    *,
    read: int,
    written: int,
    names: tuple = ("rows", "depth", "width"),
    flags: dict | None = None,
    **more,
) -> benchmarks.Case:
    """A case of an op around one product, or of its gradients, which are two.

    `function`: the same, composed. `sizes`: rows, depth and width, which `names` names, and dtype. `read`, `written`:
    how many elements. `flags`: what else tells cases apart. `more`: of the case, where it is not as for `linear`.
    """
    rows, depth, width, dtype = sizes
    backward = op.endswith("_backward")
    usual = {
        "inputs": lambda on: layer_inputs(*sizes, on),
        "run": getattr(step, op),
        "flops": (4 if backward else 2) * rows * depth * width,
    }
    return benchmarks.Case(
        op=op,
        shape=dict(zip(names, sizes, strict=False)) | (flags or {}),
        direction="backward" if backward else "forward",
        dtype=dtype,
        reference=function,
        bytes=(read + written) * dtype.itemsize,
        written=written * dtype.itemsize,
        bound=bound_of(rows),
        peers=peers,
        **(usual | more),
    )


def gradients(rows: int, depth: int, width: int) -> dict[str, int]:
    """Elements read and written for the gradients of x, weight and bias, out of grad, x and weight."""
    inputs = rows * depth + depth * width
    return {"read": rows * width + inputs, "written": inputs + width}


def grad_and_layer(rows: int, depth: int, width: int, dtype: torch.dtype, on) -> tuple:
    x, weight, _ = layer_inputs(rows, depth, width, dtype, on)
    return torch.randn(rows, width, device=on, dtype=dtype), x, weight
