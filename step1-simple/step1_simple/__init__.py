"""Step 1: elementwise ops. Each Python function calls a registered op; here it gets shapes, gradients and autocast."""

import torch

from kernel_fusion.stages import load

_C = load("step1_simple")
_ops = torch.ops.step1_simple

__all__ = ["bias_gelu", "launch_counts", "rungs", "scale", "scale_by_pybind"]

scale_by_pybind = _C.scale_by_pybind
launch_counts = _C.launch_counts


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


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


# ---- shapes, for torch.compile and for meta tensors: the checks of simple_host.cpp, without data ----

_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _check_floating(op, x):
    torch._check_type(
        x.dtype in _FLOATING,
        lambda: f"{op}: `x` must be float32, float16, bfloat16 or float64, got {_name(x.dtype)}",
    )


@torch.library.register_fake("step1_simple::scale")
def _(x, factor, *, rung="auto"):
    _check_floating("scale", x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("step1_simple::bias_gelu")
def _(x, bias, *, approximate="tanh", rung="auto"):
    _check_floating("bias_gelu", x)
    torch._check_value(x.dim() >= 1, lambda: "bias_gelu: `x` must have at least 1 dimension, got 0 (shape ())")
    torch._check_value(
        x.shape[-1] != 0, lambda: f"bias_gelu: the last dimension of `x` must not be 0, got shape {tuple(x.shape)}"
    )
    torch._check_value(
        approximate in ("tanh", "none"),
        lambda: f"bias_gelu: `approximate` must be 'tanh' or 'none', got '{approximate}'",
    )
    torch._check_type(
        bias.dtype == x.dtype,
        lambda: f"bias_gelu: `bias` must have the dtype of `x` ({_name(x.dtype)}), got {_name(bias.dtype)}",
    )
    torch._check_value(
        bias.device == x.device,
        lambda: f"bias_gelu: `bias` must be on the device of `x` ({x.device}), got {bias.device}",
    )
    torch._check_value(
        bias.dim() == 1 and bias.shape[0] == x.shape[-1],
        lambda: f"bias_gelu: `bias` must have shape ({x.shape[-1]},), got {tuple(bias.shape)}",
    )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ---- gradients: PyTorch's formulas on our ops ----


def _scale_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.factor = inputs[1]
    ctx.rung = keyword_only_inputs["rung"]


def _scale_backward(ctx, grad):
    return _ops.scale(grad, ctx.factor, rung=ctx.rung), None


torch.library.register_autograd("step1_simple::scale", _scale_backward, setup_context=_scale_setup)


def _bias_gelu_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.approximate = keyword_only_inputs["approximate"]


def _bias_gelu_backward(ctx, grad):
    x, bias = ctx.saved_tensors
    # In float32 for half types, as the forward: the sum is rounded nowhere, and the bias's gradient adds up many rows.
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    grad_sum = torch.ops.aten.gelu_backward(grad.to(wide), x.to(wide) + bias.to(wide), approximate=ctx.approximate)
    grad_x = grad_sum.to(x.dtype) if ctx.needs_input_grad[0] else None
    grad_bias = grad_sum.reshape(-1, bias.numel()).sum(0).to(bias.dtype) if ctx.needs_input_grad[1] else None
    return grad_x, grad_bias


torch.library.register_autograd("step1_simple::bias_gelu", _bias_gelu_backward, setup_context=_bias_gelu_setup)
