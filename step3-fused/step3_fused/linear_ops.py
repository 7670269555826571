"""The ops that fuse something to a matrix product, and the block that they make."""

from collections.abc import Callable
from typing import Any  # `Tensor | Any` is returned where a flag asks for a tuple

import torch
import torch.nn.functional as F

from kernel_fusion import layers, rng
from kernel_fusion.ops import (
    check_like,
    check_rows,
    contiguous_like,
    needs_gradients,
    register_autograd,
    without_forward_mode,
)
from step3_fused import shared
from step3_fused.layer_norm_ops import layer_norm, layer_norm_linear

_ops = torch.ops.step3_fused


@without_forward_mode
def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    approximate: str = "tanh",
    keep: bool = True,
    return_preactivation: bool = False,
    rung: str = "auto",
) -> torch.Tensor | Any:
    """`gelu(x @ weight + bias)`.

    Args:
        x: [..., depth], any strides; float32, float16, bfloat16 or float64.
        weight: [depth, width], or, `transposed`, [width, depth].
        bias: [width], or None. All of one dtype and device.
        transposed: which way the weight lies.
        approximate: "tanh", GPT-2's, or "none", exact.
        keep: write what goes into GELU, [..., width], for the backward pass. False saves that memory, and the backward
            pass computes the product again. Where nothing needs a gradient nothing is written.
        return_preactivation: return it, too.
        rung: "auto", or a name from `rungs("linear_gelu", x.device)`.

    Returns:
        [..., width], contiguous, of x's dtype; with `return_preactivation` `(y, preactivation)`. A rung may round the
        product before GELU, as PyTorch's operations do. Under autocast all are made autocast's dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, an empty row or weight, another `approximate`, a `rung` that is unknown or
            cannot do this.
    """
    options = {"transposed": transposed, "approximate": approximate, "rung": rung}
    keep = return_preactivation or (keep and needs_gradients(x, weight, bias))
    y, preactivation = _ops.linear_gelu(x, weight, bias, keep=keep, **options)
    return (y, preactivation) if return_preactivation else y


@without_forward_mode
def linear_gelu_backward(
    grad: torch.Tensor,
    preactivation: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    transposed: bool = False,
    approximate: str = "tanh",
    rung: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in `linear_gelu`.

    Args:
        grad: the gradient of y; [..., width], any strides; float32, float16, bfloat16 or float64.
        preactivation: what went into GELU, of grad's shape.
        x: [..., depth], weight: as in the forward pass. All of one dtype and device.
        transposed, approximate: the forward's.
        rung: "auto", or a name from `rungs("linear_gelu_backward", grad.device)`.

    Returns:
        `(grad_x, grad_weight, grad_bias)`, contiguous. In half types `grad · gelu'(preactivation)` is rounded before
        it is multiplied.

    Raises:
        TypeError, ValueError: as `linear_gelu`.
    """
    return _ops.linear_gelu_backward(
        grad, preactivation, x, weight, transposed=transposed, approximate=approximate, rung=rung
    )


@without_forward_mode
def gelu_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    approximate: str = "tanh",
    rung: str = "auto",
) -> torch.Tensor:
    """`gelu(x) @ weight + bias`.

    Args:
        x, weight, bias, transposed, approximate: as in `linear_gelu`.
        rung: "auto", or a name from `rungs("gelu_linear", x.device)`.

    Returns:
        [..., width], contiguous, of x's dtype. In half types the kernels round gelu(x) before it is multiplied; plain
        C++ does not. Under autocast all are made autocast's dtype.

    Raises:
        TypeError, ValueError: as `linear_gelu`.
    """
    return _ops.gelu_linear(x, weight, bias, transposed=transposed, approximate=approximate, rung=rung)


@without_forward_mode
def gelu_linear_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    transposed: bool = False,
    approximate: str = "tanh",
    rung: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in `gelu_linear`.

    Args:
        grad, x, weight, transposed, approximate: as in `linear_gelu_backward`.
        rung: "auto", or a name from `rungs("gelu_linear_backward", grad.device)`.

    Returns:
        `(grad_x, grad_weight, grad_bias)`, contiguous. In half types gelu(x) is rounded before it is multiplied; a rung
        may round grad · weightᵀ before the slope.

    Raises:
        TypeError, ValueError: as `linear_gelu`.
    """
    return _ops.gelu_linear_backward(grad, x, weight, transposed=transposed, approximate=approximate, rung=rung)


@without_forward_mode
def linear_bias_dropout_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    dropout_p: float = 0.1,
    rng_state: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    training: bool = True,
    rung: str = "auto",
) -> torch.Tensor:
    """`residual + dropout(x @ weight + bias)`, with the mask of step 1's `bias_dropout_residual`.

    Args:
        x: [..., depth], any strides; float32, float16, bfloat16 or float64.
        weight: [depth, width], or, `transposed`, [width, depth].
        bias: [width], or None.
        residual: [..., width]. All of one dtype and device.
        dropout_p: the part that is dropped, from 0 to 1.
        rng_state: int64 [2], seed and offset, on the CPU or on x's device; default: a new one.
        transposed: which way the weight lies.
        training: False switches dropout off.
        rung: "auto", or a name from `rungs("linear_bias_dropout_residual", x.device)`.

    Returns:
        A contiguous tensor of residual's shape and dtype. A rung may round the product first, as PyTorch's operations
        do. Under autocast all are made autocast's dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device or `dropout_p`, an empty row or weight, a `rung` that is unknown or cannot do
            this.
    """
    op = "linear_bias_dropout_residual"
    dropout_p, rng_state = shared.dropout(op, "dropout_p", dropout_p, rng_state, training, x)
    if rng_state is None:
        rng_state = rng.unused(x)
    return _ops.linear_bias_dropout_residual(
        x, weight, bias, residual, dropout_p, rng_state, transposed=transposed, rung=rung
    )


@without_forward_mode
def linear_bias_dropout_residual_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dropout_p: float,
    rng_state: torch.Tensor,
    *,
    transposed: bool = False,
    rung: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, weight and bias in `linear_bias_dropout_residual`; that of the residual is `grad` itself.

    Args:
        grad, x, weight: as in `linear_gelu_backward`.
        dropout_p, rng_state, transposed: the forward's; the mask is made from the state again.
        rung: "auto", or a name from `rungs("linear_bias_dropout_residual_backward", grad.device)`.

    Returns:
        `(grad_x, grad_weight, grad_bias)`, contiguous. In half types the masked gradient is rounded before it is
        multiplied.

    Raises:
        TypeError, ValueError: as `linear_bias_dropout_residual`.
    """
    return _ops.linear_bias_dropout_residual_backward(
        grad, x, weight, dropout_p, rng_state, transposed=transposed, rung=rung
    )


@without_forward_mode
def mlp(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    transposed: bool = False,
    approximate: str = "tanh",
    keep: bool = True,
    return_preactivation: bool = False,
    rung: str = "auto",
) -> torch.Tensor | Any:
    """`gelu(x @ weight_1 + bias_1) @ weight_2 + bias_2`, and `residual` added to it.

    Args:
        x: [..., width], any strides; float32, float16, bfloat16 or float64.
        weight_1: [width, inner], or, `transposed`, [inner, width]. bias_1: [inner].
        weight_2: [inner, width], or, `transposed`, [width, inner]. bias_2: [width].
        residual: of x's shape, or None. All of one dtype and device.
        transposed, approximate, keep, return_preactivation: as in `linear_gelu`; what goes into GELU is [..., inner].
        rung: "auto", or a name from `rungs("mlp", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype; with `return_preactivation` `(y, preactivation)`. Rungs round what
        lies between the products, as PyTorch's operations do. Under autocast all are made autocast's dtype.

    Raises:
        TypeError, ValueError: as `linear_gelu`.
    """
    keep = return_preactivation or (keep and needs_gradients(x, weight_1, bias_1, weight_2, bias_2, residual))
    options = {"transposed": transposed, "approximate": approximate, "keep": keep, "rung": rung}
    y, preactivation = _ops.mlp(x, weight_1, bias_1, weight_2, bias_2, residual, **options)
    return (y, preactivation) if return_preactivation else y


def transformer_block(
    x: torch.Tensor,
    norm_1: tuple[torch.Tensor, torch.Tensor],
    qkv: tuple[torch.Tensor, torch.Tensor],
    projection: tuple[torch.Tensor, torch.Tensor],
    norm_2: tuple[torch.Tensor, torch.Tensor],
    mlp_1: tuple[torch.Tensor, torch.Tensor],
    mlp_2: tuple[torch.Tensor, torch.Tensor],
    *,
    heads: int,
    causal: bool = True,
    dropout_p: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    attention: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """One block of GPT-2, made of this step's ops.

    Args:
        x: [B, S, heads·D]; float32, float16, bfloat16 or float64.
        norm_1, norm_2: weight and bias of the two LayerNorms, [heads·D] each.
        qkv: weight [heads·D, 3·heads·D] and bias: q, k and v side by side. As GPT-2's Conv1D stores it, like all four.
        projection: weight [heads·D, heads·D] and bias.
        mlp_1, mlp_2: weight [heads·D, inner] and bias; weight [inner, heads·D] and bias.
        heads: how many heads attention has.
        causal: a token sees itself and those before it.
        dropout_p: the part of the projection's and of the MLP's outputs that dropout drops while `training`;
            attention's weights are not dropped.
        eps: of both LayerNorms.
        attention: a function of q, k and v, [B, heads, S, D] each, that takes `is_causal` and returns their output;
            default: PyTorch's scaled_dot_product_attention.

    Returns:
        [B, S, heads·D].

    Raises:
        TypeError, ValueError: as the ops; also where `heads` does not divide the width.
    """
    if x.dim() != 3 or heads < 1 or x.shape[-1] % heads != 0:
        raise ValueError(f"transformer_block: `x` must be [B, S, {heads}·D] for `heads` {heads}, got {tuple(x.shape)}")
    attend = F.scaled_dot_product_attention if attention is None else attention
    packed = layer_norm_linear(x, *norm_1, *qkv, eps=eps)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in packed.chunk(3, -1))
    attended = attend(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
    x = linear_bias_dropout_residual(attended, *projection, x, dropout_p, training=training)
    y = layer_norm(x, *norm_2, eps=eps).to(x.dtype)
    if training and rng.drops(dropout_p):
        inner = linear_gelu(y, *mlp_1)
        return linear_bias_dropout_residual(inner, *mlp_2, x, dropout_p)
    return mlp(y, *mlp_1, *mlp_2, x)


# ---- shapes, for torch.compile and for meta tensors: the checks of linear_host.cpp, without data ----


def _check_approximate(op, approximate):
    torch._check_value(
        approximate in ("tanh", "none"), lambda: f"{op}: `approximate` must be 'tanh' or 'none', got '{approximate}'"
    )


def _kept(x, width, keep):
    return layers.empty_rows(x, width) if keep else x.new_empty(0)


@torch.library.register_fake("step3_fused::linear_gelu")
def _(x, weight, bias=None, *, transposed=False, approximate="tanh", keep=True, rung="auto"):
    width = layers.check_layer("linear_gelu", x, weight, bias, transposed)
    _check_approximate("linear_gelu", approximate)
    return layers.empty_rows(x, width), _kept(x, width, keep)


@torch.library.register_fake("step3_fused::linear_gelu_backward")
def _(grad, preactivation, x, weight, *, transposed=False, approximate="tanh", rung="auto"):
    op = "linear_gelu_backward"
    check_rows(op, "grad", grad)
    check_like(op, "preactivation", preactivation, "grad", grad, grad.shape)
    layers.check_backward(op, grad, x, weight, transposed)
    _check_approximate(op, approximate)
    return layers.empty_gradients(grad, x, weight)


@torch.library.register_fake("step3_fused::gelu_linear")
def _(x, weight, bias=None, *, transposed=False, approximate="tanh", rung="auto"):
    width = layers.check_layer("gelu_linear", x, weight, bias, transposed)
    _check_approximate("gelu_linear", approximate)
    return layers.empty_rows(x, width)


@torch.library.register_fake("step3_fused::gelu_linear_backward")
def _(grad, x, weight, *, transposed=False, approximate="tanh", rung="auto"):
    layers.check_backward("gelu_linear_backward", grad, x, weight, transposed)
    _check_approximate("gelu_linear_backward", approximate)
    return layers.empty_gradients(grad, x, weight)


@torch.library.register_fake("step3_fused::linear_bias_dropout_residual")
def _(x, weight, bias, residual, dropout_p, rng_state, *, transposed=False, rung="auto"):
    op = "linear_bias_dropout_residual"
    width = layers.check_layer(op, x, weight, bias, transposed)
    check_like(op, "residual", residual, "x", x, (*x.shape[:-1], width))
    rng.check(op, "dropout_p", dropout_p, rng_state, x)
    return layers.empty_rows(x, width)


@torch.library.register_fake("step3_fused::linear_bias_dropout_residual_backward")
def _(grad, x, weight, dropout_p, rng_state, *, transposed=False, rung="auto"):
    op = "linear_bias_dropout_residual_backward"
    layers.check_backward(op, grad, x, weight, transposed)
    rng.check(op, "dropout_p", dropout_p, rng_state, grad)
    return layers.empty_gradients(grad, x, weight)


@torch.library.register_fake("step3_fused::mlp")
def _(
    x,
    weight_1,
    bias_1,
    weight_2,
    bias_2,
    residual=None,
    *,
    transposed=False,
    approximate="tanh",
    keep=True,
    rung="auto",
):
    op = "mlp"
    check_rows(op, "x", x)
    width = x.shape[-1]
    inner = layers.check_weight(op, "weight_1", weight_1, transposed, width, "x", x)
    check_like(op, "bias_1", bias_1, "x", x, (inner,))
    check_like(op, "weight_2", weight_2, "x", x, (width, inner) if transposed else (inner, width))
    check_like(op, "bias_2", bias_2, "x", x, (width,))
    if residual is not None:
        check_like(op, "residual", residual, "x", x, x.shape)
    _check_approximate(op, approximate)
    return contiguous_like(x), _kept(x, inner, keep)


rng.register_fake("step3_fused")


# ---- gradients: this step's own kernels ----


def _gelu_options(ctx, keyword_only_inputs):
    ctx.options = {name: keyword_only_inputs[name] for name in ("transposed", "approximate")}


def _linear_gelu_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight, bias = inputs
    ctx.keep, ctx.has_bias = keyword_only_inputs["keep"], bias is not None
    ctx.save_for_backward(x, weight, output[1] if ctx.keep else bias)
    _gelu_options(ctx, keyword_only_inputs)
    ctx.set_materialize_grads(False)
    shared.step_2()  # an error comes now, not in the backward


def _linear_gelu_backward(ctx, grad, grad_preactivation):
    x, weight, saved = ctx.saved_tensors
    transposed = ctx.options["transposed"]
    with torch.autocast(x.device.type, enabled=False):
        if grad is None:
            grads = None
        else:
            preactivation = saved if ctx.keep else shared.step_2().linear(x, weight, saved, transposed=transposed)
            grads = _ops.linear_gelu_backward(grad, preactivation, x, weight, **ctx.options)
        if grad_preactivation is not None and ctx.keep:  # somebody used what was returned besides
            more = shared.step_2().linear_backward(grad_preactivation, x, weight, transposed=transposed)
            grads = more if grads is None else [a + b for a, b in zip(grads, more, strict=True)]
    return (None, None, None) if grads is None else layers.biased(ctx, grads)


register_autograd("step3_fused::linear_gelu", _linear_gelu_backward, setup_context=_linear_gelu_setup)


def _gelu_linear_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None
    _gelu_options(ctx, keyword_only_inputs)


@layers.without_autocast
def _gelu_linear_backward(ctx, grad):
    return layers.biased(ctx, _ops.gelu_linear_backward(grad, *ctx.saved_tensors, **ctx.options))


register_autograd("step3_fused::gelu_linear", _gelu_linear_backward, setup_context=_gelu_linear_setup)


def _dropout_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight, bias, _, ctx.dropout_p, rng_state = inputs
    ctx.save_for_backward(x, weight, rng_state)
    ctx.has_bias, ctx.transposed = bias is not None, keyword_only_inputs["transposed"]
    if not rng.drops(ctx.dropout_p):
        shared.step_2()  # an error comes now, not in the backward


@layers.without_autocast
def _dropout_backward(ctx, grad):
    x, weight, rng_state = ctx.saved_tensors
    if rng.drops(ctx.dropout_p):
        grads = _ops.linear_bias_dropout_residual_backward(
            grad, x, weight, ctx.dropout_p, rng_state, transposed=ctx.transposed
        )
    else:
        grads = shared.step_2().linear_backward(grad, x, weight, transposed=ctx.transposed)
    return *layers.biased(ctx, grads), grad, None, None


register_autograd("step3_fused::linear_bias_dropout_residual", _dropout_backward, setup_context=_dropout_setup)


def _mlp_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight_1, bias_1, weight_2, _, residual = inputs
    ctx.keep, ctx.has_residual = keyword_only_inputs["keep"], residual is not None
    ctx.save_for_backward(x, weight_1, weight_2, output[1] if ctx.keep else bias_1)
    _gelu_options(ctx, keyword_only_inputs)
    ctx.set_materialize_grads(False)
    shared.step_2()  # an error comes now, not in the backward


def _mlp_backward(ctx, grad, grad_preactivation):
    x, weight_1, weight_2, saved = ctx.saved_tensors
    transposed = ctx.options["transposed"]
    of_second, grad_residual = (None, None), None
    with torch.autocast(x.device.type, enabled=False):
        grad_inner = grad_preactivation if ctx.keep else None
        if grad is not None:
            preactivation = saved if ctx.keep else shared.step_2().linear(x, weight_1, saved, transposed=transposed)
            through, *of_second = _ops.gelu_linear_backward(grad, preactivation, weight_2, **ctx.options)
            grad_inner = through if grad_inner is None else through + grad_inner
            grad_residual = grad if ctx.has_residual else None
        if grad_inner is None:
            return (None,) * 6
        of_first = shared.step_2().linear_backward(grad_inner, x, weight_1, transposed=transposed)
    return *of_first, *of_second, grad_residual


register_autograd("step3_fused::mlp", _mlp_backward, setup_context=_mlp_setup)


# The gradients of these gradients are few people's need: they are PyTorch's operations on the formulas.


def _gelu_slope(h, approximate):
    """As an operation that has a gradient itself."""
    h = h.detach().requires_grad_() if not h.requires_grad else h
    (slope,) = torch.autograd.grad(F.gelu(h, approximate=approximate).sum(), h, create_graph=True)
    return slope


def _formula_of_gelu_backward(grad, preactivation, x, weight, transposed, approximate):
    return layers.formula_of_backward(grad * _gelu_slope(preactivation, approximate), x, weight, transposed)


def _formula_of_gelu_linear_backward(grad, x, weight, transposed, approximate):
    activation = F.gelu(x, approximate=approximate)
    through, *rest = layers.formula_of_backward(grad, activation, weight, transposed)
    return through * _gelu_slope(x, approximate), *rest


def _formula_of_dropout_backward(grad, x, weight, dropout_p, rng_state, transposed):
    # Where the residual is 0 and the weight the unit matrix, the op is dropout alone.
    ones = torch.ones(grad.shape, dtype=grad.dtype, device=grad.device)
    unit, zeros = ones.new_ones(1, grad.shape[-1]), torch.zeros_like(ones)
    mask = _ops.linear_bias_dropout_residual(ones[..., :1].contiguous(), unit, None, zeros, dropout_p, rng_state)
    return layers.formula_of_backward(grad * mask.detach(), x, weight, transposed)


layers.register_second_gradient("step3_fused::linear_gelu_backward", _formula_of_gelu_backward, 4)
layers.register_second_gradient("step3_fused::gelu_linear_backward", _formula_of_gelu_linear_backward, 3)
layers.register_second_gradient("step3_fused::linear_bias_dropout_residual_backward", _formula_of_dropout_backward, 3)
