"""The ops of this step in Triton, dropout's backward aside: the other way to write them, a peer in benchmark.py.

A Triton program is one block seen as a whole: it works on vectors of BLOCK elements, and the compiler decides which
thread takes which, how wide a load is and what is kept in shared memory. Compare with kernels/: the index arithmetic is
the same, threads do not appear.

Source of the programming model: Tillet, Kung and Cox, https://doi.org/10.1145/3315508.3329973.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements a program


def _programs(n: int) -> tuple[int]:
    return (triton.cdiv(n, BLOCK),)


@triton.jit
def _gelu_gate(x):
    """(1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as 1 / (1 + exp(-2u)): x times this is GPT-2's GELU."""
    return 1.0 / (1.0 + tl.exp(-1.5957691216 * (x + 0.044715 * x * x * x)))


@triton.jit
def _gelu_slope(x):
    x = tl.where(x > 16.0, 16.0, tl.where(x < -16.0, -16.0, x))  # NaN stays, as it would not in tl.maximum
    s = _gelu_gate(x)
    return s + s * (1.0 - s) * x * (1.5957691216 + 0.2140644488 * x * x)


@triton.jit
def _scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + i, mask=inside).to(tl.float32)
    tl.store(y + i, (factor * value).to(y.dtype.element_ty), mask=inside)


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`factor * x` for a contiguous CUDA tensor."""
    y = torch.empty_like(x)
    _scale_kernel[_programs(x.numel())](x, y, x.numel(), factor, BLOCK)
    return y


@triton.jit
def _gelu_scale_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + i, mask=inside).to(tl.float32)
    tl.store(y + i, (factor * value * _gelu_gate(value)).to(y.dtype.element_ty), mask=inside)


def gelu_scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """`factor * gelu(x)`, GPT-2's approximation, for a contiguous CUDA tensor."""
    y = torch.empty_like(x)
    _gelu_scale_kernel[_programs(x.numel())](x, y, x.numel(), factor, BLOCK)
    return y


def gelu(x: torch.Tensor) -> torch.Tensor:
    """`gelu(x)`, GPT-2's approximation, for a contiguous CUDA tensor."""
    return gelu_scale(x, 1.0)


@triton.jit
def _gelu_backward_kernel(grad, x, grad_x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    slope = _gelu_slope(tl.load(x + i, mask=inside).to(tl.float32))
    value = tl.load(grad + i, mask=inside).to(tl.float32) * slope
    tl.store(grad_x + i, value.to(grad_x.dtype.element_ty), mask=inside)


def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of `gelu` for contiguous CUDA tensors."""
    grad_x = torch.empty_like(x)
    _gelu_backward_kernel[_programs(x.numel())](grad, x, grad_x, x.numel(), BLOCK)
    return grad_x


@triton.jit
def _bias_gelu_kernel(x, bias, y, n, width, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + i, mask=inside).to(tl.float32) + tl.load(bias + i % width, mask=inside).to(tl.float32)
    tl.store(y + i, (value * _gelu_gate(value)).to(y.dtype.element_ty), mask=inside)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`gelu(x + bias)`, GPT-2's approximation, for contiguous CUDA tensors."""
    y = torch.empty_like(x)
    _bias_gelu_kernel[_programs(x.numel())](x, bias, y, x.numel(), x.shape[-1], BLOCK)
    return y


# ---- dropout: the same random numbers as kernels/bias_dropout_residual ----


@triton.jit
def _kept(first, seed, offset, threshold, BLOCK: tl.constexpr):
    """Which of the elements `first`, `first` + 1, … stay: a Philox call for eight of them, 16 bits each."""
    call = first // 8 + tl.arange(0, BLOCK // 8)
    low, high = call.to(tl.uint32), (call >> 32).to(tl.uint32)
    count = (offset // 4).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low * 0 + count, low * 0, low, high)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK // 2,))  # a b c d of one call, then of the next
    numbers = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (BLOCK,))
    return numbers.to(tl.int32) >= threshold


@triton.jit
def _bias_dropout_residual_kernel(x, bias, residual, y, n, width, seed, offset, threshold, factor, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + i, mask=inside).to(tl.float32) + tl.load(bias + i % width, mask=inside).to(tl.float32)
    kept = _kept(first, seed, offset, threshold, BLOCK)
    value = tl.where(kept, factor * value, 0.0) + tl.load(residual + i, mask=inside).to(tl.float32)
    tl.store(y + i, value.to(y.dtype.element_ty), mask=inside)


def _dropout_numbers(p: float) -> tuple[int, float]:
    threshold = round(65536 * p)
    return threshold, 65536 / (65536 - threshold)


def bias_dropout_residual(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float, seed: int, offset: int
) -> torch.Tensor:
    """`residual + dropout(x + bias)` for contiguous CUDA tensors and p < 1; seed and offset below 2^31."""
    y = torch.empty_like(x)
    threshold, factor = _dropout_numbers(p)
    _bias_dropout_residual_kernel[_programs(x.numel())](
        x, bias, residual, y, x.numel(), x.shape[-1], seed, offset, threshold, factor, BLOCK
    )
    return y


# ---- gradients of a bias: partial sums of blocks of rows, then their sum. Both orders are fixed ----

ROWS, COLUMNS = 16, 256  # a tile of a program


def _parts(rows: int, width: int) -> tuple[int, int]:
    """How many programs share the rows, and how many rows each takes."""
    columns = triton.cdiv(width, COLUMNS)
    parts = max(1, min(triton.cdiv(rows, ROWS), 1056 // columns))
    rows_per_part = triton.cdiv(triton.cdiv(rows, parts), ROWS) * ROWS
    return triton.cdiv(rows, rows_per_part), rows_per_part


@triton.jit
def _column_sum_kernel(x, partial, rows, width, rows_per_part, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1).to(tl.int64) * rows_per_part
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rows_per_part, ROWS):
        row = begin + first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


def _finish(partial: torch.Tensor, parts: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    total = torch.empty((1, width), device=partial.device, dtype=torch.float32)
    _column_sum_kernel[(triton.cdiv(width, 32), 1)](partial, total, parts, width, triton.cdiv(parts, 64) * 64, 64, 32)
    return total[0].to(dtype)


def column_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of a contiguous CUDA matrix."""
    rows, width = x.shape
    parts, rows_per_part = _parts(rows, width)
    partial = torch.empty((parts, width), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(width, COLUMNS), parts)
    _column_sum_kernel[grid](x, partial, rows, width, rows_per_part, ROWS, COLUMNS)
    return _finish(partial, parts, width, x.dtype)


@triton.jit
def _bias_gelu_backward_kernel(
    grad, x, bias, grad_x, partial, rows, width, rows_per_part, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(1).to(tl.int64) * rows_per_part
    b = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rows_per_part, ROWS):
        row = begin + first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        i = row[:, None] * width + column[None, :]
        slope = _gelu_slope(tl.load(x + i, mask=inside, other=0.0).to(tl.float32) + b[None, :])
        value = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(grad_x + i, value.to(grad_x.dtype.element_ty), mask=inside)
        total += value
    tl.store(partial + tl.program_id(1) * width + column, tl.sum(total, 0), mask=column < width)


def bias_gelu_backward(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `bias_gelu` for contiguous CUDA matrices."""
    rows, width = x.shape
    parts, rows_per_part = _parts(rows, width)
    grad_x = torch.empty_like(x)
    partial = torch.empty((parts, width), device=x.device, dtype=torch.float32)
    grid = (triton.cdiv(width, COLUMNS), parts)
    _bias_gelu_backward_kernel[grid](grad, x, bias, grad_x, partial, rows, width, rows_per_part, ROWS, COLUMNS)
    return grad_x, _finish(partial, parts, width, x.dtype)
