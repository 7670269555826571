"""A layer's product in Triton, with what may follow it: the other way to write it, a peer in the benchmarks.

A Triton program is one block seen as a whole. A tile that it multiplies is a value of the language, and so is one to
which GELU or a residual is added, as step 3 does; the compiler decides which thread holds what, how a tile lies in
shared memory and when its copy begins. Compare with kernels/linear.

Source: Triton's tutorial on matrix multiplication, https://triton-lang.org.
"""

import torch
import triton
import triton.language as tl

from kernel_fusion.ops import check_dim, check_like, check_type

TYPES = (torch.float32, torch.float16, torch.bfloat16)

# Rows and columns of a tile, how much of the depth is taken at a time, warps, and how many such pieces are there or on
# their way.
CONFIGS = [
    triton.Config({"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)
    for rows, columns, depth, warps, stages in (
        (16, 64, 128, 4, 4),  # for few rows
        (64, 64, 64, 4, 4),  # the largest that fits for float32
        (128, 128, 64, 4, 4),
        (128, 256, 64, 8, 3),
    )
]
GROUP = 8  # tiles one below the other that are computed before the next column's: what they read is in the L2 cache


def _sensible(configs: list, arguments: dict, **_) -> list:
    """Without tiles that would be empty for the most part, and without the lowest where rows are many."""
    rows = arguments["rows"]
    lowest = 64 if rows >= 1024 else 16
    return [c for c in configs if lowest <= c.kwargs["ROWS"] <= max(16, triton.next_power_of_2(rows))]


@triton.jit
def _gelu(x):
    """GPT-2's: x · (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3), as x / (1 + exp(-2u))."""
    return x / (1.0 + tl.exp(-1.5957691216 * (x + 0.044715 * x * x * x)))


@triton.jit
def _linear_kernel(
    x, weight, bias, residual, y, kept, rows, depth, width, along_depth, along_width,
    bucket,  # not looked at: what the tuning is remembered by
    GELU: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    below, beside = tl.cdiv(rows, ROWS), tl.cdiv(width, COLUMNS)
    of_group = GROUP * beside
    first = tl.program_id(0) // of_group * GROUP
    height = tl.minimum(below - first, GROUP)
    row = (first + tl.program_id(0) % of_group % height) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % of_group // height * COLUMNS + tl.arange(0, COLUMNS)

    # Beyond the last row and column those from the beginning are multiplied, and not stored.
    k = tl.arange(0, DEPTH)
    x_at = x + tl.cast(row % rows, tl.int64)[:, None] * depth + k[None, :]
    weight_at = weight + tl.cast(k, tl.int64)[:, None] * along_depth + tl.cast(column % width, tl.int64) * along_width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, depth, DEPTH):
        a = tl.load(x_at, mask=(begin + k < depth)[None, :], other=0.0)
        b = tl.load(weight_at, mask=(begin + k < depth)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32x3")
        x_at += DEPTH
        weight_at += tl.cast(DEPTH, tl.int64) * along_depth

    at = tl.cast(row, tl.int64)[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    if bias is not None:
        total += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if kept is not None:
        tl.store(kept + at, total.to(kept.dtype.element_ty), mask=inside)
    if GELU:
        total = _gelu(total)
    if residual is not None:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


_tuned_linear_kernel = triton.autotune(
    CONFIGS,
    key=["bucket", "depth", "width", "along_width", "GELU"],
    prune_configs_by={"early_config_prune": _sensible},
)(_linear_kernel)


def _linear(op, x, weight, bias, residual, gelu, keep, config):
    check_type(op, "x", x, TYPES)
    check_dim(op, "x", x, 2)
    check_dim(op, "weight", weight, 2)
    rows, depth, width = *x.shape, weight.shape[1]
    check_like(op, "weight", weight, "x", x, (depth, width))
    if 0 in (depth, width):
        raise ValueError(f"{op}: `weight` must not be empty, got shape {tuple(weight.shape)}")
    for name, tensor, shape in (("x", x, x.shape), ("bias", bias, (width,)), ("residual", residual, (rows, width))):
        if tensor is not None:
            check_like(op, name, tensor, "x", x, shape)
            if not tensor.is_contiguous():
                raise ValueError(f"{op}: `{name}` must be contiguous, got strides {tensor.stride()}")
    y = x.new_empty((rows, width))
    kept = torch.empty_like(y) if keep else None
    if rows > 0:
        kernel = _tuned_linear_kernel if config is None else _linear_kernel
        kernel[lambda meta: (triton.cdiv(rows, meta["ROWS"]) * triton.cdiv(width, meta["COLUMNS"]),)](
            x, weight, bias, residual, y, kept, rows, depth, width, *weight.stride(), triton.next_power_of_2(rows),
            GELU=gelu, GROUP=GROUP, **({} if config is None else config.all_kwargs()),
        )  # fmt: skip
    return y, kept


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    config: triton.Config | None = None,
) -> torch.Tensor:
    """`x @ weight + bias`, and `residual` added to it.

    Args:
        x: [rows, depth], contiguous; float32, float16 or bfloat16.
        weight: [depth, width], any strides: that of nn.Linear is `weight.mT` here.
        bias: [width], or None.
        residual: [rows, width], contiguous, or None.
        config: one of `CONFIGS`; None for the one that is fastest, found by trying each at the first call of its kind.

    Returns:
        [rows, width], of x's dtype, summed in float32 and rounded once.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: a shape, device or stride that does not fit, or an empty weight.
    """
    return _linear("linear", x, weight, bias, residual, False, False, config)[0]


def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    keep: bool = False,
    config: triton.Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`gelu(x @ weight + bias)`, GPT-2's approximation.

    Args:
        x, weight, bias, config: as for `linear`.
        keep: return what goes into GELU, too.

    Returns:
        [rows, width], of x's dtype; with `keep` `(y, preactivation)`.

    Raises:
        TypeError, ValueError: as `linear`.
    """
    y, kept = _linear("linear_gelu", x, weight, bias, None, True, keep, config)
    return (y, kept) if keep else y
