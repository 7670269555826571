"""The matrix product of a layer."""

import torch

from kernel_fusion import layers
from kernel_fusion.ops import register_autograd, without_forward_mode

_ops = torch.ops.step2_attention


@without_forward_mode
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    rung: str = "auto",
) -> torch.Tensor:
    """`x @ weight + bias`.

    Args:
        x: [..., depth], any strides; float32, float16, bfloat16 or float64.
        weight: [depth, width], as GPT-2's Conv1D stores it, or, `transposed`, [width, depth], as nn.Linear does.
        bias: [width], or None. All of one dtype and device.
        transposed: which way the weight lies.
        rung: "auto", or a name from `rungs("linear", x.device)`.

    Returns:
        [..., width], contiguous, of x's dtype, summed in float32 (float64 for float64) and rounded once; cuBLASLt,
        which "auto" may take on a GPU, rounds sums of parts as well at some sizes. There float32 is rounded to TF32
        before it is multiplied where `torch.backends.cuda.matmul.allow_tf32` is set, and nowhere else. Under autocast
        all are made autocast's dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, an empty row or weight, a `rung` that is unknown or cannot do this.
    """
    return _ops.linear(x, weight, bias, transposed=transposed, rung=rung)


@without_forward_mode
def linear_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, transposed: bool = False, rung: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in `linear`.

    Args:
        grad: the gradient of y; [..., width], any strides; float32, float16, bfloat16 or float64.
        x: [..., depth], weight: as in the forward pass. All of one dtype and device.
        transposed: which way the weight lies, and its gradient.
        rung: "auto", or a name from `rungs("linear_backward", grad.device)`.

    Returns:
        `(grad_x, grad_weight, grad_bias)`, contiguous, summed in float32 (float64 for float64), always in the same
        order, and rounded once, by cuBLASLt as in `linear`.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, an empty row, a `rung` that is unknown or cannot do this.
    """
    return _ops.linear_backward(grad, x, weight, transposed=transposed, rung=rung)


# ---- shapes, for torch.compile and for meta tensors: the checks of linear_host.cpp, without data ----


@torch.library.register_fake("step2_attention::linear")
def _(x, weight, bias=None, *, transposed=False, rung="auto"):
    return layers.empty_rows(x, layers.check_layer("linear", x, weight, bias, transposed))


@torch.library.register_fake("step2_attention::linear_backward")
def _(grad, x, weight, *, transposed=False, rung="auto"):
    layers.check_backward("linear_backward", grad, x, weight, transposed)
    return layers.empty_gradients(grad, x, weight)


# ---- gradients ----


def _linear_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias, ctx.transposed = bias is not None, keyword_only_inputs["transposed"]


@layers.without_autocast
def _linear_backward(ctx, grad):
    return layers.biased(ctx, _ops.linear_backward(grad, *ctx.saved_tensors, transposed=ctx.transposed))


register_autograd("step2_attention::linear", _linear_backward, setup_context=_linear_setup)

layers.register_second_gradient("step2_attention::linear_backward", layers.formula_of_backward, 3)
