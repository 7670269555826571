"""Step 1: elementwise ops. Each Python function calls a registered op; here it gets shapes and gradients."""

import torch

from kernel_fusion import rng, sharding
from kernel_fusion.ops import (
    check_floating,
    check_like,
    check_rows,
    contiguous_like,
    register_autograd,
    wide,
    without_forward_mode,
)
from kernel_fusion.steps import load

_C = load("step1_simple")
_ops = torch.ops.step1_simple

__all__ = [
    "bias_dropout_residual",
    "bias_dropout_residual_backward",
    "bias_gelu",
    "bias_gelu_backward",
    "column_sum",
    "draw_rng_state",
    "gelu",
    "gelu_backward",
    "gelu_scale",
    "launch_counts",
    "rounds",
    "rungs",
    "scale",
    "scale_by_pybind",
    "varies",
]

scale_by_pybind = _C.scale_by_pybind
launch_counts, rounds, varies = _C.launch_counts, _C.rounds, _C.varies


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


@without_forward_mode
def scale(x: torch.Tensor, factor: float, *, rung: str = "auto") -> torch.Tensor:
    """`factor * x`.

    Args:
        x: any shape and strides; float32, float16, bfloat16 or float64.
        factor: a number; the product is computed in float32 (float64 for float64) and rounded once.
        rung: "auto", or a name from `rungs("scale", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: `x` is of another dtype.
        ValueError: unknown `rung`.
    """
    return _ops.scale(x, factor, rung=rung)


@without_forward_mode
def gelu(x: torch.Tensor, *, approximate: str = "tanh", rung: str = "auto") -> torch.Tensor:
    """The Gaussian error linear unit. As in PyTorch, `gelu(-inf)` is NaN.

    Args:
        x: any shape and strides; float32, float16, bfloat16 or float64.
        approximate: "tanh" (GPT-2's) or "none" (exact, by erf), as in `torch.nn.functional.gelu`.
        rung: "auto", or a name from `rungs("gelu", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: `x` is of another dtype.
        ValueError: unknown `approximate` or `rung`.

    Source: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415.
    """
    return _ops.gelu(x, approximate=approximate, rung=rung)


@without_forward_mode
def gelu_scale(x: torch.Tensor, factor: float, *, approximate: str = "tanh", rung: str = "auto") -> torch.Tensor:
    """`factor * gelu(x)`, rounded once.

    Args:
        x: any shape and strides; float32, float16, bfloat16 or float64.
        factor: a number.
        approximate: as for `gelu`.
        rung: "auto", or a name from `rungs("gelu_scale", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: `x` is of another dtype.
        ValueError: unknown `approximate` or `rung`.
    """
    return _ops.gelu_scale(x, factor, approximate=approximate, rung=rung)


@without_forward_mode
def gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, *, factor: float = 1.0, approximate: str = "tanh", rung: str = "auto"
) -> torch.Tensor:
    """`grad * factor * gelu'(x)`: the gradient of `gelu_scale`, and with factor 1 of `gelu`.

    Args:
        grad: the gradient of the output; any shape and strides.
        x: the forward's input; grad's shape, dtype and device.
        factor: the forward's.
        approximate: the forward's.
        rung: "auto", or a name from `rungs("gelu_backward", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device, `approximate` or `rung`.
    """
    return _ops.gelu_backward(grad, x, factor=factor, approximate=approximate, rung=rung)


@without_forward_mode
def bias_gelu(x: torch.Tensor, bias: torch.Tensor, *, approximate: str = "tanh", rung: str = "auto") -> torch.Tensor:
    """`gelu(x + bias)`, the sum kept in float32. As in PyTorch, `gelu(-inf)` is NaN.

    Args:
        x: [..., width], any strides; float32, float16, bfloat16 or float64.
        bias: [width], dtype and device of `x`. Under `torch.autocast` both are cast to autocast's dtype first, as the
            weights of a linear layer are.
        approximate: "tanh" (GPT-2's) or "none" (exact, by erf), as in `torch.nn.functional.gelu`.
        rung: "auto", or a name from `rungs("bias_gelu", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device, `approximate` or `rung`.

    Source: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415.
    """
    return _ops.bias_gelu(x, bias, approximate=approximate, rung=rung)


@without_forward_mode
def bias_gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, *, approximate: str = "tanh", rung: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `bias_gelu`: `grad * gelu'(x + bias)`, and the sum of that over all rows.

    Two runs give the same bits: the rows are added in a fixed order.

    Args:
        grad: [..., width], the gradient of the output; any strides.
        x: the forward's input; grad's shape, dtype and device.
        bias: [width], grad's dtype and device.
        approximate: the forward's.
        rung: "auto", or a name from `rungs("bias_gelu_backward", x.device)`.

    Returns:
        The gradients of x and bias, in their dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device, `approximate` or `rung`.
    """
    return _ops.bias_gelu_backward(grad, x, bias, approximate=approximate, rung=rung)


def draw_rng_state(x: torch.Tensor, *, on_device: bool = False) -> torch.Tensor:
    """Draws the random numbers' start for one dropout of `x` from PyTorch's generator, which moves on.

    `torch.manual_seed` sets that generator; checkpointing saves and restores it.

    Args:
        x: only its device counts.
        on_device: give the state on x's device. A CUDA graph needs that: then every replay draws anew. Otherwise it
            is on the CPU, and the launch passes it by value.

    Returns:
        int64 [2]: seed and offset.

    Raises:
        ValueError: a CUDA graph is captured and `on_device` is False.
    """
    return _ops.draw_rng_state(x, on_device=on_device)


@without_forward_mode
def bias_dropout_residual(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    dropout_p: float = 0.1,
    rng_state: torch.Tensor | None = None,
    *,
    training: bool = True,
    rung: str = "auto",
) -> torch.Tensor:
    """`residual + dropout(x + bias)`, computed in float32 and rounded once.

    Element i is kept where its random number of 16 bits is at least round(65536·p), and then divided by the part that
    is kept; dropout_p is met to 1/131072. The numbers depend on `rng_state` and i alone, so the same state gives the
    same mask on a GPU, emulated and on the CPU. Nothing is stored for the backward but the state.

    Args:
        x: [..., width], any strides; float32, float16, bfloat16 or float64.
        bias: [width], dtype and device of `x`.
        residual: shape, dtype and device of `x`. Under `torch.autocast` the three are cast to the widest of their
            dtypes, as in PyTorch's sums.
        dropout_p: the part that is dropped, from 0 to 1. A dropped element gives `residual`, whatever x is.
        rng_state: int64 [2], seed and offset, on the CPU or on x's device; default: `draw_rng_state(x)`.
        training: False switches dropout off.
        rung: "auto", or a name from `rungs("bias_dropout_residual", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device, `dropout_p` or `rung`.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405.
    """
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"bias_dropout_residual: `dropout_p` must be from 0 to 1, got {dropout_p}")
    if not training:
        dropout_p = 0.0
    if rng_state is None:
        rng_state = rng.draw(_ops, x) if rng.drops(dropout_p) else rng.unused(x)
    return _ops.bias_dropout_residual(x, bias, residual, dropout_p, rng_state, rung=rung)


@without_forward_mode
def bias_dropout_residual_backward(
    grad: torch.Tensor, dropout_p: float, rng_state: torch.Tensor, *, rung: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and bias in `bias_dropout_residual`; that of the residual is `grad` itself.

    Two runs give the same bits: the rows are added in a fixed order.

    Args:
        grad: [..., width], the gradient of the output; any strides.
        dropout_p: the forward's.
        rng_state: the forward's; the mask is made from it again.
        rung: "auto", or a name from `rungs("bias_dropout_residual_backward", grad.device)`.

    Returns:
        The gradients of x and bias, in grad's dtype.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: wrong shape, device, `dropout_p` or `rung`.
    """
    return _ops.bias_dropout_residual_backward(grad, dropout_p, rng_state, rung=rung)


@without_forward_mode
def column_sum(x: torch.Tensor, *, rung: str = "auto") -> torch.Tensor:
    """The sum over all dimensions but the last: the gradient of a bias. Two runs give the same bits.

    Args:
        x: [..., width], any strides; float32, float16, bfloat16 or float64. Added up in float32 (float64 for float64).
        rung: "auto", or a name from `rungs("column_sum", x.device)`.

    Returns:
        [width], in x's dtype.

    Raises:
        TypeError: `x` is of another dtype.
        ValueError: `x` has no dimension or no column; unknown `rung`.
    """
    return _ops.column_sum(x, rung=rung)


# ---- shapes, for torch.compile and for meta tensors: the checks of simple_host.cpp, without data ----


def _check_approximate(op, approximate):
    torch._check_value(
        approximate in ("tanh", "none"), lambda: f"{op}: `approximate` must be 'tanh' or 'none', got '{approximate}'"
    )


@torch.library.register_fake("step1_simple::scale")
def _(x, factor, *, rung="auto"):
    check_floating("scale", "x", x)
    return contiguous_like(x)


@torch.library.register_fake("step1_simple::gelu")
def _(x, *, approximate="tanh", rung="auto"):
    check_floating("gelu", "x", x)
    _check_approximate("gelu", approximate)
    return contiguous_like(x)


@torch.library.register_fake("step1_simple::gelu_scale")
def _(x, factor, *, approximate="tanh", rung="auto"):
    check_floating("gelu_scale", "x", x)
    _check_approximate("gelu_scale", approximate)
    return contiguous_like(x)


@torch.library.register_fake("step1_simple::gelu_backward")
def _(grad, x, *, factor=1.0, approximate="tanh", rung="auto"):
    check_floating("gelu_backward", "grad", grad)
    check_like("gelu_backward", "x", x, "grad", grad, grad.shape)
    _check_approximate("gelu_backward", approximate)
    return contiguous_like(grad)


@torch.library.register_fake("step1_simple::bias_gelu")
def _(x, bias, *, approximate="tanh", rung="auto"):
    check_rows("bias_gelu", "x", x)
    check_like("bias_gelu", "bias", bias, "x", x, x.shape[-1:])
    _check_approximate("bias_gelu", approximate)
    return contiguous_like(x)


@torch.library.register_fake("step1_simple::bias_gelu_backward")
def _(grad, x, bias, *, approximate="tanh", rung="auto"):
    check_rows("bias_gelu_backward", "grad", grad)
    check_like("bias_gelu_backward", "x", x, "grad", grad, grad.shape)
    check_like("bias_gelu_backward", "bias", bias, "grad", grad, grad.shape[-1:])
    _check_approximate("bias_gelu_backward", approximate)
    return contiguous_like(grad), grad.new_empty(grad.shape[-1:])


rng.register_fake("step1_simple")


@torch.library.register_fake("step1_simple::bias_dropout_residual")
def _(x, bias, residual, dropout_p, rng_state, *, rung="auto"):
    op = "bias_dropout_residual"
    check_rows(op, "x", x)
    check_like(op, "bias", bias, "x", x, x.shape[-1:])
    check_like(op, "residual", residual, "x", x, x.shape)
    rng.check(op, "dropout_p", dropout_p, rng_state, x)
    return contiguous_like(x)


@torch.library.register_fake("step1_simple::bias_dropout_residual_backward")
def _(grad, dropout_p, rng_state, *, rung="auto"):
    op = "bias_dropout_residual_backward"
    check_rows(op, "grad", grad)
    rng.check(op, "dropout_p", dropout_p, rng_state, grad)
    return contiguous_like(grad), grad.new_empty(grad.shape[-1:])


@torch.library.register_fake("step1_simple::column_sum")
def _(x, *, rung="auto"):
    check_rows("column_sum", "x", x)
    return x.new_empty(x.shape[-1:])


# ---- gradients: our own kernels, by `auto` whatever rung the forward had; scale's is scale itself and keeps its rung


def _scale_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.factor = inputs[1]
    ctx.rung = keyword_only_inputs["rung"]


def _scale_backward(ctx, grad):
    return _ops.scale(grad, ctx.factor, rung=ctx.rung), None


register_autograd("step1_simple::scale", _scale_backward, setup_context=_scale_setup)


def _gelu_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1] if len(inputs) == 2 else 1.0
    ctx.approximate = keyword_only_inputs["approximate"]


def _gelu_backward(ctx, grad):
    return _ops.gelu_backward(grad, ctx.saved_tensors[0], factor=ctx.factor, approximate=ctx.approximate)


def _gelu_scale_backward(ctx, grad):
    return _gelu_backward(ctx, grad), None


register_autograd("step1_simple::gelu", _gelu_backward, setup_context=_gelu_setup)
register_autograd("step1_simple::gelu_scale", _gelu_scale_backward, setup_context=_gelu_setup)


def _bias_gelu_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.approximate = keyword_only_inputs["approximate"]


def _bias_gelu_backward(ctx, grad):
    return _ops.bias_gelu_backward(grad, *ctx.saved_tensors, approximate=ctx.approximate)


register_autograd("step1_simple::bias_gelu", _bias_gelu_backward, setup_context=_bias_gelu_setup)


def _dropout_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.dropout_p = inputs[3]
    ctx.save_for_backward(inputs[4])


def _dropout_backward(ctx, grad):
    grad_x, grad_bias = _ops.bias_dropout_residual_backward(grad, ctx.dropout_p, ctx.saved_tensors[0])
    return grad_x, grad_bias, grad, None, None


register_autograd("step1_simple::bias_dropout_residual", _dropout_backward, setup_context=_dropout_setup)


def _column_sum_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.shape = inputs[0].shape


def _column_sum_backward(ctx, grad):
    return grad.expand(ctx.shape)


register_autograd("step1_simple::column_sum", _column_sum_backward, setup_context=_column_sum_setup)


# ---- gradients of gradients, rarely asked for: PyTorch's operations, in float32 for half types ----


def _gelu_slope(x, approximate):
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)


def _gelu_curvature(x, approximate):
    """gelu''(x). Beyond 16 it is 0, and the powers of x would overflow into infinity times 0; NaN stays."""
    x = x.clamp(-16, 16)
    if approximate == "none":
        return (2 - x * x) * torch.exp(-0.5 * x * x) * 0.3989422804014327
    u1 = 0.7978845608028654 * (1 + 0.134145 * x * x)
    t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))
    return (1 - t * t) * (u1 + x * 0.7978845608028654 * 0.134145 * x - x * t * u1 * u1)


def _gelu_backward_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.factor = keyword_only_inputs["factor"]
    ctx.approximate = keyword_only_inputs["approximate"]


def _gelu_backward_backward(ctx, grad_grad):
    grad, x = ctx.saved_tensors
    weight = ctx.factor * wide(grad_grad)
    to_grad = weight * _gelu_slope(wide(x), ctx.approximate)
    to_x = weight * wide(grad) * _gelu_curvature(wide(x), ctx.approximate)
    return to_grad.to(grad.dtype), to_x.to(x.dtype)


register_autograd("step1_simple::gelu_backward", _gelu_backward_backward, setup_context=_gelu_backward_setup)


def _bias_gelu_backward_backward(ctx, to_grad_x, to_grad_bias):
    grad, x, bias = ctx.saved_tensors
    weight = wide(to_grad_x) + wide(to_grad_bias)  # a row's gradient goes into both outputs
    total = wide(x) + wide(bias)
    to_grad = weight * _gelu_slope(total, ctx.approximate)
    to_x = weight * wide(grad) * _gelu_curvature(total, ctx.approximate)
    to_bias = to_x.reshape(-1, bias.numel()).sum(0)
    return to_grad.to(grad.dtype), to_x.to(x.dtype), to_bias.to(bias.dtype)


register_autograd("step1_simple::bias_gelu_backward", _bias_gelu_backward_backward, setup_context=_bias_gelu_setup)


def _dropout_backward_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.dropout_p = inputs[1]
    ctx.save_for_backward(inputs[2])


def _dropout_backward_backward(ctx, to_grad_x, to_grad_bias):
    # The backward is linear in grad: the same mask over the sum of what reaches its two outputs.
    weight = to_grad_x + to_grad_bias
    return _ops.bias_dropout_residual_backward(weight, ctx.dropout_p, ctx.saved_tensors[0])[0], None, None


register_autograd(
    "step1_simple::bias_dropout_residual_backward", _dropout_backward_backward, setup_context=_dropout_backward_setup
)


# ---- which parts of DTensors an op takes; dropout's masks belong to places of the whole tensor ----

sharding.register(
    "step1_simple",
    {
        "scale": "... -> ... | ...",
        "gelu": "... -> ... | ...",
        "gelu_scale": "... -> ... | ...",
        "gelu_backward": "..., ... -> ... | ...",
        "bias_gelu": "...w, w -> ...w | ...w",
        "bias_gelu_backward": "...w, ...w, w -> ...w, w+... | ...w",
        "column_sum": "...w -> w+... | ...w",
    },
)
