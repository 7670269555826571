"""LayerNorm, of a tensor, of a sum, and in front of a product."""

from typing import Any  # `Tensor | Any` is returned where a flag asks for a tuple

import torch

from kernel_fusion import layers, rng
from kernel_fusion.ops import (
    check_device,
    check_like,
    check_rows,
    check_shape,
    check_type,
    contiguous_like,
    needs_gradients,
    register_autograd,
    wide,
    without_forward_mode,
)
from step3_fused import shared

_ops = torch.ops.step3_fused


@without_forward_mode
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
    return_statistics: bool = False,
    rung: str = "auto",
) -> torch.Tensor | Any:
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension.

    Args:
        x: [..., width], any strides, width of any size but 0; float32, float16, bfloat16 or float64.
        weight, bias: [width], dtype and device of `x`.
        eps: added to the variance, under the root.
        return_statistics: return each row's mean and rstd, too.
        rung: "auto", or a name from `rungs("layer_norm", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype, computed in float32 (float64 for float64) and rounded once. The
        variance is the biased one, divided by width. Under autocast all are made float32. With `return_statistics`
        `(y, mean, rstd)`, of which the last two are [...], float32 (float64 for float64); rstd is
        `1 / sqrt(variance + eps)`.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, width 0, negative `eps`, a `rung` that is unknown or cannot do this.

    Source: Ba, Kiros and Hinton, https://arxiv.org/abs/1607.06450.
    """
    keep = return_statistics or needs_gradients(x, weight, bias)  # the way back wants them, too
    y, mean, rstd = _ops.layer_norm(x, weight, bias, eps=eps, keep=keep, rung=rung)
    return (y, mean, rstd) if return_statistics else y


@without_forward_mode
def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    grad_sum: torch.Tensor | None = None,
    *,
    rung: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in `layer_norm`.

    Args:
        grad: the gradient of y; [..., width], any strides; float32, float16, bfloat16 or float64.
        x: what was normalised, of grad's shape.
        weight: [width]. All of one dtype and device.
        mean, rstd: as `layer_norm` returns them with `return_statistics`.
        grad_sum: is added to x's gradient, of grad's shape: where x is a residual sum that goes on, what comes back
            from there. None for nothing.
        rung: "auto", or a name from `rungs("layer_norm_backward", grad.device)`.

    Returns:
        `(grad_x, grad_weight, grad_bias)`, contiguous, computed in float32 (float64 for float64) and rounded once. All
        sums have a fixed order: two runs give the same bits.

    Raises:
        TypeError, ValueError: as `layer_norm`.
    """
    return _ops.layer_norm_backward(grad, x, weight, mean, rstd, grad_sum, rung=rung)


@without_forward_mode
def residual_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    x_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    *,
    training: bool = True,
    eps: float = 1e-5,
    return_statistics: bool = False,
    rung: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """`sum = residual + dropout(x + x_bias)` and `y = layer_norm(sum)`.

    Args:
        x, residual: [..., width], any strides; float32, float16, bfloat16 or float64.
        weight, bias: LayerNorm's, [width].
        x_bias: [width], such as the bias of a projection that x comes from, or None. All of one dtype and device.
        dropout_p: the part of x + x_bias that is dropped, from 0 to 1, with the mask of step 1's
            `bias_dropout_residual`.
        rng_state: int64 [2], seed and offset, on the CPU or on x's device; default: a new one.
        training: False switches dropout off.
        eps, return_statistics: as in `layer_norm`.
        rung: "auto", or a name from `rungs("residual_layer_norm", x.device)`.

    Returns:
        `(y, sum)`, contiguous, of x's shape and dtype. Fused rungs normalise the sum as it was before it was rounded to
        the dtype. Under autocast all are made float32. With `return_statistics` `(y, sum, mean, rstd)`, the last two
        those of the sum, as `layer_norm` returns them. Nothing is stored of the mask but the state. The gradients of
        what is dropped, and of x_bias, are step 1's ops: that step must be built where they are needed.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device or `dropout_p`, width 0, negative `eps`, a `rung` that is unknown or cannot do
            this.
    """
    dropout_p, rng_state = shared.dropout("residual_layer_norm", "dropout_p", dropout_p, rng_state, training, x)
    keep = return_statistics or needs_gradients(x, residual, weight, bias, x_bias)  # the way back wants them, too
    outputs = _ops.residual_layer_norm(
        x, residual, weight, bias, x_bias, dropout_p, rng_state, eps=eps, keep=keep, rung=rung
    )
    return outputs if return_statistics else outputs[:2]


@without_forward_mode
def layer_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    eps: float = 1e-5,
    return_statistics: bool = False,
    rung: str = "auto",
) -> torch.Tensor | Any:
    """`layer_norm(x) @ weight + bias`: in GPT-2 what leads to q, k and v.

    Args:
        x: [..., depth], any strides; float32, float16, bfloat16 or float64.
        norm_weight, norm_bias: [depth], LayerNorm's.
        weight: [depth, width], or, `transposed`, [width, depth].
        bias: [width], or None. All of one dtype and device.
        transposed: which way the weight lies.
        eps, return_statistics: as in `layer_norm`; mean and rstd have no gradients here.
        rung: "auto", or a name from `rungs("layer_norm_linear", x.device)`.

    Returns:
        [..., width], contiguous, of x's dtype. In half types the normalised rows are rounded before they are
        multiplied. Under autocast all are made autocast's dtype. With `return_statistics` `(y, mean, rstd)`, the last
        two as `layer_norm` returns them.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, an empty row or weight, negative `eps`, a `rung` that is unknown or cannot do
            this.
    """
    y, mean, rstd = _ops.layer_norm_linear(
        x, norm_weight, norm_bias, weight, bias, transposed=transposed, eps=eps, rung=rung
    )
    return (y, mean, rstd) if return_statistics else y


# ---- shapes, for torch.compile and for meta tensors: the checks of the host files, without data ----


@torch.library.register_fake("step3_fused::layer_norm")
def _(x, weight, bias, *, eps=1e-5, keep=True, rung="auto"):
    check_rows("layer_norm", "x", x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_like("layer_norm", name, parameter, "x", x, x.shape[-1:])
    shared.check_eps("layer_norm", eps)
    return contiguous_like(x), shared.a_number_a_row(x, keep), shared.a_number_a_row(x, keep)


@torch.library.register_fake("step3_fused::layer_norm_backward")
def _(grad, x, weight, mean, rstd, grad_sum=None, *, rung="auto"):
    op = "layer_norm_backward"
    check_rows(op, "grad", grad)
    check_like(op, "x", x, "grad", grad, grad.shape)
    check_like(op, "weight", weight, "grad", grad, grad.shape[-1:])
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        check_type(op, name, statistic, (shared.statistics_dtype(grad),))
        check_shape(op, name, statistic, grad.shape[:-1])
        check_device(op, name, statistic, "grad", grad)
    if grad_sum is not None:
        check_like(op, "grad_sum", grad_sum, "grad", grad, grad.shape)
    return contiguous_like(grad), contiguous_like(weight), contiguous_like(weight)


@torch.library.register_fake("step3_fused::residual_layer_norm")
def _(x, residual, weight, bias, x_bias=None, dropout_p=0.0, rng_state=None, *, eps=1e-5, keep=True, rung="auto"):
    op = "residual_layer_norm"
    check_rows(op, "x", x)
    check_like(op, "residual", residual, "x", x, x.shape)
    for name, parameter in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
        if parameter is not None:
            check_like(op, name, parameter, "x", x, x.shape[-1:])
    rng.check(op, "dropout_p", dropout_p, rng_state, x)
    shared.check_eps(op, eps)
    return contiguous_like(x), contiguous_like(x), shared.a_number_a_row(x, keep), shared.a_number_a_row(x, keep)


@torch.library.register_fake("step3_fused::layer_norm_linear")
def _(x, norm_weight, norm_bias, weight, bias=None, *, transposed=False, eps=1e-5, rung="auto"):
    op = "layer_norm_linear"
    width = layers.check_layer(op, x, weight, bias, transposed)
    for name, parameter in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        check_like(op, name, parameter, "x", x, x.shape[-1:])
    shared.check_eps(op, eps)
    return layers.empty_rows(x, width), shared.a_number_a_row(x), shared.a_number_a_row(x)


# ---- gradients ----


def _layer_norm_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight, _ = inputs
    ctx.eps, keep = keyword_only_inputs["eps"], keyword_only_inputs["keep"]
    ctx.save_for_backward(x, weight, *(output[1:] if keep else ()))
    ctx.set_materialize_grads(False)


def _layer_norm_backward(ctx, grad, grad_mean, grad_rstd):
    return shared.gradients_of_rows(ctx, ctx.saved_tensors, grad, None, grad_mean, grad_rstd)


register_autograd("step3_fused::layer_norm", _layer_norm_backward, setup_context=_layer_norm_setup)


def _residual_layer_norm_setup(ctx, inputs, keyword_only_inputs, output):
    _, _, weight, _, x_bias, ctx.dropout_p, rng_state = inputs
    _, total, *statistics = output
    ctx.has_x_bias, ctx.eps = x_bias is not None, keyword_only_inputs["eps"]
    kept = statistics if keyword_only_inputs["keep"] else []
    # The sum is all that is needed of x, x_bias and residual.
    ctx.save_for_backward(total, weight, *kept, *([rng_state] if rng.drops(ctx.dropout_p) else []))
    ctx.set_materialize_grads(False)
    if ctx.has_x_bias or rng.drops(ctx.dropout_p):
        shared.step_1()  # an error comes now, not in the backward


def _residual_layer_norm_backward(ctx, grad_y, grad_sum, grad_mean, grad_rstd):
    *rows, rng_state = ctx.saved_tensors if rng.drops(ctx.dropout_p) else (*ctx.saved_tensors, None)
    grad_total, *rest = shared.gradients_of_rows(ctx, rows, grad_y, grad_sum, grad_mean, grad_rstd)
    grad_x, grad_x_bias = grad_total, None
    if rng_state is not None:
        grad_x, grad_x_bias = shared.step_1().bias_dropout_residual_backward(grad_total, ctx.dropout_p, rng_state)
    elif ctx.has_x_bias:
        grad_x_bias = shared.step_1().column_sum(grad_total)
    return grad_x, grad_total, *rest, grad_x_bias if ctx.has_x_bias else None, None, None


register_autograd(
    "step3_fused::residual_layer_norm", _residual_layer_norm_backward, setup_context=_residual_layer_norm_setup
)


def _layer_norm_linear_setup(ctx, inputs, keyword_only_inputs, output):
    x, norm_weight, norm_bias, weight, bias = inputs
    ctx.save_for_backward(x, norm_weight, norm_bias, weight)
    ctx.has_bias, ctx.transposed = bias is not None, keyword_only_inputs["transposed"]
    ctx.eps = keyword_only_inputs["eps"]
    ctx.mark_non_differentiable(*output[1:])
    shared.step_2()  # an error comes now, not in the backward


@layers.without_autocast
def _layer_norm_linear_backward(ctx, grad, *_):
    x, norm_weight, norm_bias, weight = ctx.saved_tensors
    # The rows, which the gradient of the weight needs, are normalised again. Their statistics come with them, with
    # gradients of their own for a second pass.
    normalised, mean, rstd = _ops.layer_norm(x, norm_weight, norm_bias, eps=ctx.eps)
    grad_rows, *of_layer = shared.step_2().linear_backward(grad, normalised, weight, transposed=ctx.transposed)
    of_norm = _ops.layer_norm_backward(grad_rows, x, norm_weight, mean, rstd)
    return *of_norm, of_layer[0], of_layer[1] if ctx.has_bias else None


register_autograd("step3_fused::layer_norm_linear", _layer_norm_linear_backward, setup_context=_layer_norm_linear_setup)


# The gradients of these gradients are few people's need: they are PyTorch's operations.


def _layer_norm_gradients_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)


def _layer_norm_gradients_backward(ctx, *grads):
    grad, x, weight, mean, rstd, grad_sum = ctx.saved_tensors
    with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
        variables = [wide(t).detach().requires_grad_() for t in (grad, x, weight, mean, rstd)]
        g, x, w, mean, rstd = variables
        x_hat = (x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
        weighted = g * w
        along = (weighted * x_hat).mean(-1, keepdim=True)
        grad_x = rstd.unsqueeze(-1) * (weighted - weighted.mean(-1, keepdim=True) - x_hat * along)
        rows = tuple(range(g.dim() - 1))
        outputs = (grad_x, (g * x_hat).sum(rows), g.sum(rows))
    found = torch.autograd.grad(outputs, variables, [wide(t) for t in grads])
    of_sum = None if grad_sum is None else grads[0]
    return *(f.to(t.dtype) for f, t in zip(found, ctx.saved_tensors[:5], strict=True)), of_sum


register_autograd(
    "step3_fused::layer_norm_backward",
    _layer_norm_gradients_backward,
    setup_context=_layer_norm_gradients_setup,
)
