"""LayerNorm in Triton: the other way to write it, a peer in benchmark.py.

A Triton program is one block seen as a whole. A row that it normalises is one value of the language, and the compiler
decides which thread holds what. Compare with kernels/layer_norm, where v3_registers keeps a row in registers.

Source: Triton's tutorial on layer normalization, https://triton-lang.org.
"""

import torch
import triton
import triton.language as tl

from kernel_fusion.ops import check_dim, check_like, check_type

TYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 65536  # columns that a program holds

# ---- LayerNorm: a program holds a row ----


@triton.jit
def _normalised(value, weight, bias, column, inside, width, eps):
    """A row normalised, and its mean and rstd. The variance is of x − mean, so that a large mean does no harm."""
    mean = tl.sum(value, 0) / width
    centred = tl.where(inside, value - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return centred * rstd * scale + shift, mean, rstd


@triton.jit
def _layer_norm_kernel(x, residual, weight, bias, y, total, mean, rstd, width, eps, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    at, inside = tl.cast(row, tl.int64) * width + column, column < width
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)  # the sum is rounded once, then normalised
        tl.store(total + at, value, mask=inside)
        value = value.to(tl.float32)
    result, mean_of_row, rstd_of_row = _normalised(value, weight, bias, column, inside, width, eps)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)
    if mean is not None:
        tl.store(mean + row, mean_of_row)
        tl.store(rstd + row, rstd_of_row)


@triton.jit
def _layer_norm_backward_kernel(
    grad, x, weight, mean, rstd, grad_x, partial, rows, width, COLUMNS: tl.constexpr
):  # fmt: skip
    """Every n-th row is this program's, n being their number; its sums for weight and bias stay in registers."""
    program, programs, column = tl.program_id(0), tl.num_programs(0), tl.arange(0, COLUMNS)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for row in range(program, rows, programs):
        at = tl.cast(row, tl.int64) * width + column
        incoming = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(rstd + row)
        normal = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + row)) * factor
        normal = tl.where(inside, normal, 0.0)
        scaled = incoming * scale
        along = tl.sum(scaled * normal, 0) / width
        result = (scaled - tl.sum(scaled, 0) / width - normal * along) * factor
        tl.store(grad_x + at, result.to(grad_x.dtype.element_ty), mask=inside)
        of_weight += incoming * normal
        of_bias += incoming
    tl.store(partial + program * width + column, of_weight, mask=inside)
    tl.store(partial + (programs + program) * width + column, of_bias, mask=inside)


@triton.jit
def _column_sum_kernel(x, y, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of the columns of one of several matrices, always in the same order."""
    matrix, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(x + (matrix * rows + row)[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(y + matrix * width + column, tl.sum(total, 0).to(y.dtype.element_ty), mask=column < width)


def _columns(width: int) -> dict:
    """The size of a program for a row: a power of 2, and some 8 elements or more for each thread."""
    columns = triton.next_power_of_2(width)
    return {"COLUMNS": columns, "num_warps": min(max(columns // 256, 1), 16)}


def _check_rows(op: str, name: str, x: torch.Tensor) -> None:
    check_type(op, name, x, TYPES)
    check_dim(op, name, x, 2)
    if not 1 <= x.shape[1] <= WIDEST:
        raise ValueError(f"{op}: `{name}` must have 1 to {WIDEST} columns, got {x.shape[1]}")


def _check_contiguous(op: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: `{name}` must be contiguous, got strides {tensor.stride()}")


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5, *, return_statistics: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LayerNorm of each row.

    Args:
        x: [rows, width], contiguous; float32, float16 or bfloat16.
        weight, bias: [width], as `x`.
        eps: added to the variance, under the root.
        return_statistics: return each row's mean and rstd, too, for `layer_norm_backward`.

    Returns:
        A tensor like x; with `return_statistics` `(y, mean, rstd)`, the last two [rows] in float32.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: a shape, device or stride that does not fit, or more than 65536 columns.
    """
    _check_rows("layer_norm", "x", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        check_like("layer_norm", name, tensor, "x", x, x.shape[1:])
    _check_contiguous("layer_norm", x=x, weight=weight, bias=bias)
    y = torch.empty_like(x)
    mean, rstd = x.new_empty((2, len(x)), dtype=torch.float32) if return_statistics else (None, None)
    if len(x) > 0:
        _layer_norm_kernel[(len(x),)](
            x, None, weight, bias, y, None, mean, rstd, x.shape[1], eps, **_columns(x.shape[1])
        )
    return (y, mean, rstd) if return_statistics else y


def residual_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of each row of `x + residual`, and that sum.

    Args:
        x, residual: [rows, width], contiguous; float32, float16 or bfloat16.
        weight, bias: [width], as `x`.
        eps: added to the variance, under the root.

    Returns:
        `(y, total)`, both like x. `total` is rounded before it is normalised, as PyTorch's operations do.

    Raises:
        TypeError, ValueError: as `layer_norm`.
    """
    op = "residual_layer_norm"
    _check_rows(op, "x", x)
    check_like(op, "residual", residual, "x", x, x.shape)
    for name, tensor in (("weight", weight), ("bias", bias)):
        check_like(op, name, tensor, "x", x, x.shape[1:])
    _check_contiguous(op, x=x, residual=residual, weight=weight, bias=bias)
    y, total = torch.empty_like(x), torch.empty_like(x)
    if len(x) > 0:
        _layer_norm_kernel[(len(x),)](
            x, residual, weight, bias, y, total, None, None, x.shape[1], eps, **_columns(x.shape[1])
        )
    return y, total


def layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in `layer_norm`.

    Args:
        grad: the gradient of y; [rows, width], contiguous; float32, float16 or bfloat16.
        x, weight: as in the forward pass.
        mean, rstd: [rows], float32: what it returned besides.

    Returns:
        `(grad_x, grad_weight, grad_bias)`, the last two summed in an order that on one GPU is always the same.

    Raises:
        TypeError, ValueError: as `layer_norm`.
    """
    op = "layer_norm_backward"
    _check_rows(op, "grad", grad)
    check_like(op, "x", x, "grad", grad, grad.shape)
    check_like(op, "weight", weight, "grad", grad, grad.shape[1:])
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        check_type(op, name, tensor, (torch.float32,))
        if tensor.shape != grad.shape[:1] or tensor.device != grad.device:
            raise ValueError(
                f"{op}: `{name}` must have a number for each of {len(grad)} rows, got {tuple(tensor.shape)}"
            )
    _check_contiguous(op, grad=grad, x=x, weight=weight, mean=mean, rstd=rstd)
    rows, width = grad.shape
    programs = max(1, min(rows, 4 * _multiprocessors(grad.device)))
    grad_x, of_both = torch.empty_like(grad), grad.new_empty((2, width))
    partial = grad.new_empty((2, programs, width), dtype=torch.float32)
    _layer_norm_backward_kernel[(programs,)](
        grad, x, weight, mean, rstd, grad_x, partial, rows, width, **_columns(width)
    )
    _column_sum_kernel[(triton.cdiv(width, 32), 2)](partial, of_both, programs, width, ROWS=64, COLUMNS=32)
    return grad_x, of_both[0], of_both[1]


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
