"""Step 3: LayerNorm, and attention fused with what follows it. Each Python function calls a registered op."""

import functools
import math
from typing import Any  # `Tensor | Any` is returned where a flag asks for a tuple

import torch

from kernel_fusion import rng
from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_floating,
    check_key_bounds,
    check_like,
    check_rows,
    check_shape,
    check_type,
    contiguous_like,
    needs_gradients,
    wide,
    without_forward_mode,
)
from kernel_fusion.steps import load

_C = load("step3_fused")
_ops = torch.ops.step3_fused

__all__ = [
    "needs_scratch",
    "attention_block",
    "attention_residual_layer_norm",
    "emulated_kernels",
    "gelu_linear",
    "gelu_linear_backward",
    "launch_counts",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_linear",
    "linear",
    "linear_backward",
    "linear_bias_dropout_residual",
    "linear_bias_dropout_residual_backward",
    "linear_gelu",
    "linear_gelu_backward",
    "mlp",
    "residual_layer_norm",
    "rounds",
    "rungs",
    "transformer_block",
    "varies",
]

launch_counts = _C.launch_counts
emulated_kernels = _C.emulated_kernels  # kernels that the emulation has launched: an op of three launches counts three


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


def rounds(op: str, rung: str) -> str:
    """What `rung` of `op` rounds to the tensors' dtype on the way; "" for one that rounds once, at the end."""
    return _C.rounds(op, rung)


def varies(op: str, rung: str) -> bool:
    """Whether two runs of `rung` may differ in their last bits, since blocks add to the same numbers in any order."""
    return _C.varies(op, rung)


def needs_scratch(op: str, rung: str) -> bool:
    """Whether `rung` of `op` needs global memory between its launches. One that is fused into one launch does not."""
    return _C.needs_scratch(op, rung)


def _dropout(op, name, dropout_p, rng_state, training, x):
    """The part that is dropped, `name` in `op`, and a state for it."""
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: `{name}` must be from 0 to 1, got {dropout_p}")
    if not training:
        dropout_p = 0.0
    if rng_state is None and rng.drops(dropout_p):
        rng_state = rng.draw(_ops, x)
    return dropout_p, rng_state


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
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, width 0, a `rung` that is unknown or cannot do this.
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
        eps: added to the variance, under the root.
        return_statistics: return each row's mean and rstd, too.
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
    dropout_p, rng_state = _dropout("residual_layer_norm", "dropout_p", dropout_p, rng_state, training, x)
    keep = return_statistics or needs_gradients(x, residual, weight, bias, x_bias)  # the way back wants them, too
    outputs = _ops.residual_layer_norm(
        x, residual, weight, bias, x_bias, dropout_p, rng_state, eps=eps, keep=keep, rung=rung
    )
    return outputs if return_statistics else outputs[:2]


@without_forward_mode
def attention_residual_layer_norm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    attention_rng_state: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    attention_dropout_p: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    return_statistics: bool = False,
    rung: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`layer_norm(attention(q, k, v) + residual)`, the heads side by side, normalised over the whole width H·D.

    Args:
        q: [B, H, Sq, D]; float32, float16, bfloat16 or float64. Any strides; views whose last dimension is contiguous,
            such as GPT-2's packed q, k and v, are read as they lie, others are copied first.
        k, v: [B, H, Sk, D].
        residual: [B, Sq, H·D]; column h·D + d belongs to head h.
        weight, bias: [H·D]. All of one dtype and device.
        key_begin, key_end: which keys exist, the rest being padding: in batch b those with
            key_begin[b] <= j < key_end[b]. int32 [B] on the device of `q`; None for 0, and for Sk.
        attention_rng_state: int64 [2], seed and offset, on the CPU or on q's device; default: a new one.
        causal: query i sees keys j <= i + Sk - Sq, so that the last query sees all.
        scale: factor for the scores; None for 1/sqrt(D).
        attention_dropout_p: the part of attention's weights that is dropped, from 0 to 1, with the mask of step 2's
            `attention`.
        training: False switches dropout off.
        eps: added to the variance, under the root.
        return_statistics: return what the way back needs, too.
        rung: "auto", or a name from `rungs("attention_residual_layer_norm", q.device)`.

    Returns:
        A contiguous tensor of residual's shape and dtype. The attention of a query that sees no key is 0. Fused rungs
        round once, at the end. Under autocast all are made autocast's dtype. With `return_statistics`
        `(out, attended, lse, mean, rstd)`: attention's output, as residual; the log-sum-exp of each query, [B, H, Sq],
        as step 2's `attention` returns it; and, [B, Sq], mean and rstd of what is normalised, as `layer_norm` does.
        These four are what is kept where a gradient is needed. Its way back has attention's weights, and the mask from
        its state, computed again, a tile at a time, by step 2's `attention_backward`: that step must be built.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device or `attention_dropout_p`, no heads, head_dim 0, negative `eps`, a `rung` that is
            unknown or cannot do this.
    """
    attention_dropout_p, attention_rng_state = _dropout(
        "attention_residual_layer_norm", "attention_dropout_p", attention_dropout_p, attention_rng_state, training, q
    )
    options = {"causal": causal, "scale": scale, "eps": eps, "attention_dropout_p": attention_dropout_p, "rung": rung}
    keep = return_statistics or needs_gradients(q, k, v, residual, weight, bias)  # the way back wants them, too
    outputs = _ops.attention_residual_layer_norm(
        q, k, v, residual, weight, bias, key_begin, key_end, attention_rng_state, keep=keep, **options
    )
    return outputs if return_statistics else outputs[0]


@without_forward_mode
def attention_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    residual: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    attention_rng_state: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    attention_dropout_p: float = 0.0,
    training: bool = True,
    eps: float = 1e-5,
    return_statistics: bool = False,
    rung: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """`sum = residual + dropout(attention(q, k, v) @ proj_weight + proj_bias)` and `y = layer_norm(sum)`.

    In a GPT-2 block this is everything between the projection to q, k, v and the MLP: `sum` goes on as the residual
    stream, `y` into the MLP.

    Args:
        q: [B, H, Sq, D]; float32, float16, bfloat16 or float64. Any strides; views whose last dimension is contiguous,
            such as GPT-2's packed q, k and v, are read as they lie, others are copied first.
        k, v: [B, H, Sk, D].
        residual: [B, Sq, H·D]; column h·D + d belongs to head h.
        proj_weight: [H·D in, H·D out], as GPT-2's Conv1D stores it: x @ W, no transpose.
        proj_bias, weight, bias: [H·D]. All of one dtype and device.
        key_begin, key_end: which keys exist, the rest being padding: in batch b those with
            key_begin[b] <= j < key_end[b]. int32 [B] on the device of `q`; None for 0, and for Sk.
        rng_state, attention_rng_state: for `dropout_p`, and for `attention_dropout_p`: int64 [2], seed and offset, on
            the CPU or on q's device; default: new ones.
        causal: query i sees keys j <= i + Sk - Sq, so that the last query sees all.
        scale: factor for the scores; None for 1/sqrt(D).
        dropout_p: the part of the projection, with its bias, that is dropped, from 0 to 1, with the mask of step 1's
            `bias_dropout_residual`.
        attention_dropout_p: the part of attention's weights that is dropped, with the mask of step 2's `attention`.
        training: False switches dropout off.
        eps: added to the variance, under the root.
        return_statistics: return what the way back needs, too.
        rung: "auto", or a name from `rungs("attention_block", q.device)`.

    Returns:
        `(y, sum)`, contiguous, of residual's shape and dtype. The attention of a query that sees no key is 0. Fused
        rungs keep everything up to the two outputs in float32. Under autocast all are made autocast's dtype, `residual`
        too. With `return_statistics` `(y, sum, attended, lse, mean, rstd)`: attention's output, as residual; the
        log-sum-exp of each query, [B, H, Sq], as step 2's `attention` returns it; and, [B, Sq], mean and rstd of the
        sum, as `layer_norm` does. These four are what is kept where a gradient is needed, and the states. The way back
        computes attention's weights again, a tile at a time, and the masks from their states. It is step 2's
        `attention_backward` and, with `dropout_p`, step 1's `bias_dropout_residual_backward`: these steps must be
        built.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device, `dropout_p` or `attention_dropout_p`, no heads, head_dim 0, negative `eps`, a
            `rung` that is unknown or cannot do this.
    """
    op = "attention_block"
    dropout_p, rng_state = _dropout(op, "dropout_p", dropout_p, rng_state, training, q)
    attention_dropout_p, attention_rng_state = _dropout(
        op, "attention_dropout_p", attention_dropout_p, attention_rng_state, training, q
    )
    options = {
        "causal": causal,
        "scale": scale,
        "eps": eps,
        "dropout_p": dropout_p,
        "attention_dropout_p": attention_dropout_p,
        "rung": rung,
    }
    inputs = (q, k, v, residual, proj_weight, proj_bias, weight, bias)
    keep = return_statistics or needs_gradients(*inputs)  # the way back wants them, too
    outputs = _ops.attention_block(*inputs, key_begin, key_end, rng_state, attention_rng_state, keep=keep, **options)
    return outputs if return_statistics else outputs[:2]


# ---- shapes, for torch.compile and for meta tensors: the checks of fused_host.cpp, without data ----


def _check_eps(op, eps):
    torch._check_value(0 <= eps < math.inf, lambda: f"{op}: `eps` must be a finite number ≥ 0, got {eps}")


def _check_attention(op, q, k, v, residual, key_begin, key_end, scale, eps, **parameters):
    check_floating(op, "q", q)
    check_dim(op, "q", q, 4)
    batch, heads, q_length, head_dim = q.shape
    torch._check_value(
        heads != 0 and head_dim != 0,
        lambda: f"{op}: heads and head_dim of `q` must not be 0, got shape {tuple(q.shape)}",
    )
    check_like(op, "k", k, "q", q)
    check_dim(op, "k", k, 4)
    check_shape(op, "k", k, (batch, heads, k.shape[2], head_dim))
    check_like(op, "v", v, "q", q, k.shape)
    width = heads * head_dim
    check_like(op, "residual", residual, "q", q, (batch, q_length, width))
    check_key_bounds(op, q, key_begin, key_end)
    for name, parameter in parameters.items():
        check_like(op, name, parameter, "q", q, (width, width) if name == "proj_weight" else (width,))
    torch._check_value(
        scale is None or math.isfinite(scale), lambda: f"{op}: `scale` must be finite or None, got {scale}"
    )
    _check_eps(op, eps)


def _statistics_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _a_number_a_row(x, keep=True):
    return x.new_empty(x.shape[:-1] if keep else 0, dtype=_statistics_dtype(x))


@torch.library.register_fake("step3_fused::layer_norm")
def _(x, weight, bias, *, eps=1e-5, keep=True, rung="auto"):
    check_rows("layer_norm", "x", x)
    for name, parameter in (("weight", weight), ("bias", bias)):
        check_like("layer_norm", name, parameter, "x", x, x.shape[-1:])
    _check_eps("layer_norm", eps)
    return contiguous_like(x), _a_number_a_row(x, keep), _a_number_a_row(x, keep)


@torch.library.register_fake("step3_fused::layer_norm_backward")
def _(grad, x, weight, mean, rstd, grad_sum=None, *, rung="auto"):
    op = "layer_norm_backward"
    check_rows(op, "grad", grad)
    check_like(op, "x", x, "grad", grad, grad.shape)
    check_like(op, "weight", weight, "grad", grad, grad.shape[-1:])
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        check_type(op, name, statistic, (_statistics_dtype(grad),))
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
    _check_eps(op, eps)
    return contiguous_like(x), contiguous_like(x), _a_number_a_row(x, keep), _a_number_a_row(x, keep)


def _kept_of_attention(q, residual, keep):
    attended = contiguous_like(residual) if keep else residual.new_empty(0)
    lse = q.new_empty(q.shape[:3] if keep else 0, dtype=_statistics_dtype(q))
    return attended, lse, _a_number_a_row(residual, keep), _a_number_a_row(residual, keep)


@torch.library.register_fake("step3_fused::attention_residual_layer_norm")
def _(
    q,
    k,
    v,
    residual,
    weight,
    bias,
    key_begin=None,
    key_end=None,
    attention_rng_state=None,
    *,
    causal=False,
    scale=None,
    eps=1e-5,
    attention_dropout_p=0.0,
    keep=True,
    rung="auto",
):
    op = "attention_residual_layer_norm"
    _check_attention(op, q, k, v, residual, key_begin, key_end, scale, eps, weight=weight, bias=bias)
    rng.check(op, "attention_dropout_p", attention_dropout_p, attention_rng_state, q, "attention_rng_state")
    return contiguous_like(residual), *_kept_of_attention(q, residual, keep)


@torch.library.register_fake("step3_fused::attention_block")
def _(
    q,
    k,
    v,
    residual,
    proj_weight,
    proj_bias,
    weight,
    bias,
    key_begin=None,
    key_end=None,
    rng_state=None,
    attention_rng_state=None,
    *,
    causal=False,
    scale=None,
    eps=1e-5,
    dropout_p=0.0,
    attention_dropout_p=0.0,
    keep=True,
    rung="auto",
):
    op = "attention_block"
    parameters = {"proj_weight": proj_weight, "proj_bias": proj_bias, "weight": weight, "bias": bias}
    _check_attention(op, q, k, v, residual, key_begin, key_end, scale, eps, **parameters)
    rng.check(op, "dropout_p", dropout_p, rng_state, q)
    rng.check(op, "attention_dropout_p", attention_dropout_p, attention_rng_state, q, "attention_rng_state")
    return contiguous_like(residual), contiguous_like(residual), *_kept_of_attention(q, residual, keep)


# ---- gradients ----


def _from_statistics(x, mean, rstd, grad_mean, grad_rstd):
    """What a row's mean and rstd, where somebody used them, add to the gradient of x; in their dtype."""
    width = x.shape[-1]
    grad = 0
    if grad_mean is not None:
        grad = (grad_mean / width).unsqueeze(-1)
    if grad_rstd is not None:
        grad = grad - (grad_rstd * rstd**3 / width).unsqueeze(-1) * (wide(x) - mean.unsqueeze(-1))
    return grad


def _gradients_of_rows(ctx, rows, grad, grad_sum, grad_mean, grad_rstd):
    """Of x, weight and bias, by this step's kernels. `rows`: x, weight, and mean and rstd if they were kept."""
    x, weight, *statistics = rows
    if not statistics:  # there are none, of which somebody could have used anything
        grad_mean = grad_rstd = None
    if grad is None:
        grad = torch.zeros_like(x)
    with torch.autocast(x.device.type, enabled=False):  # a backward inside an autocast region computes the same
        mean, rstd = statistics or _ops.layer_norm(x, weight, weight, eps=ctx.eps)[1:]
        grad_x, grad_weight, grad_bias = _ops.layer_norm_backward(grad, x, weight, mean, rstd, grad_sum)
        if grad_mean is not None or grad_rstd is not None:
            grad_x = (wide(grad_x) + _from_statistics(x, mean, rstd, grad_mean, grad_rstd)).to(x.dtype)
    return grad_x, grad_weight, grad_bias


def _layer_norm_setup(ctx, inputs, keyword_only_inputs, output):
    x, weight, _ = inputs
    ctx.eps, keep = keyword_only_inputs["eps"], keyword_only_inputs["keep"]
    ctx.save_for_backward(x, weight, *(output[1:] if keep else ()))
    ctx.set_materialize_grads(False)


def _layer_norm_backward(ctx, grad, grad_mean, grad_rstd):
    return _gradients_of_rows(ctx, ctx.saved_tensors, grad, None, grad_mean, grad_rstd)


torch.library.register_autograd("step3_fused::layer_norm", _layer_norm_backward, setup_context=_layer_norm_setup)


@functools.cache
def _step_1():
    """Step 1's ops. Where that step is not built, the error gives the command."""
    import step1_simple  # noqa: F401

    return torch.ops.step1_simple


def _residual_layer_norm_setup(ctx, inputs, keyword_only_inputs, output):
    _, _, weight, _, x_bias, ctx.dropout_p, rng_state = inputs
    _, total, *statistics = output
    ctx.has_x_bias, ctx.eps = x_bias is not None, keyword_only_inputs["eps"]
    kept = statistics if keyword_only_inputs["keep"] else []
    # The sum is all that is needed of x, x_bias and residual.
    ctx.save_for_backward(total, weight, *kept, *([rng_state] if rng.drops(ctx.dropout_p) else []))
    ctx.set_materialize_grads(False)
    if ctx.has_x_bias or rng.drops(ctx.dropout_p):
        _step_1()  # an error comes now, not in the backward


def _residual_layer_norm_backward(ctx, grad_y, grad_sum, grad_mean, grad_rstd):
    *rows, rng_state = ctx.saved_tensors if rng.drops(ctx.dropout_p) else (*ctx.saved_tensors, None)
    grad_total, *rest = _gradients_of_rows(ctx, rows, grad_y, grad_sum, grad_mean, grad_rstd)
    grad_x, grad_x_bias = grad_total, None
    if rng_state is not None:
        grad_x, grad_x_bias = _step_1().bias_dropout_residual_backward(grad_total, ctx.dropout_p, rng_state)
    elif ctx.has_x_bias:
        grad_x_bias = _step_1().column_sum(grad_total)
    return grad_x, grad_total, *rest, grad_x_bias if ctx.has_x_bias else None, None, None


torch.library.register_autograd(
    "step3_fused::residual_layer_norm", _residual_layer_norm_backward, setup_context=_residual_layer_norm_setup
)


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


torch.library.register_autograd(
    "step3_fused::layer_norm_backward",
    _layer_norm_gradients_backward,
    setup_context=_layer_norm_gradients_setup,
)


# Attention with what follows it: the way back is that of the pieces, each by its own op.


@functools.cache
def _step_2():
    """Step 2's ops. Where that step is not built, the error gives the command."""
    import step2_attention  # noqa: F401

    return torch.ops.step2_attention


def _heads(x, heads):
    """[B, S, H·D] as [B, H, S, D]: a view."""
    return x.unflatten(2, (heads, x.shape[2] // heads)).transpose(1, 2)


def _save_for_attention(ctx, options, tensors, bounds, rng_states, kept):
    """`tensors`, then what may be None: key_begin, key_end and the states; then, if they are kept, attended to rstd."""
    ctx.eps, ctx.keeps = options["eps"], options["keep"]
    ctx.attention = {
        "causal": options["causal"],
        "scale": options["scale"],
        "dropout_p": options["attention_dropout_p"],
    }
    ctx.save_for_backward(*tensors, *bounds, *rng_states, *(kept if ctx.keeps else ()))
    ctx.set_materialize_grads(False)
    _step_2()  # an error comes now, not in the backward


def _attended(ctx, q, k, v, bounds, rng_state, kept):
    """Attention's output, side by side, and log-sum-exp: kept, or computed again."""
    if ctx.keeps:
        return kept[:2]
    out, lse = _step_2().attention(q, k, v, *bounds, rng_state, **ctx.attention)
    return out.transpose(1, 2).flatten(2), lse


def _attention_gradients(ctx, grad, given, q, k, v, attended, lse, grad_lse, bounds, rng_state):
    """Of q, k and v. `grad`: of attention's output, side by side; `given`: what more, where somebody used it."""
    if given is not None and ctx.keeps:
        grad = grad + given
    heads = q.shape[1]
    rows = _heads(grad, heads), q, k, v, _heads(attended, heads), lse
    return _step_2().attention_backward(*rows, *bounds, grad_lse if ctx.keeps else None, rng_state, **ctx.attention)


def _attention_residual_layer_norm_setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, residual, weight, _, key_begin, key_end, rng_state = inputs
    tensors = q, k, v, residual, weight
    _save_for_attention(ctx, keyword_only_inputs, tensors, (key_begin, key_end), (rng_state,), output[1:])


def _attention_residual_layer_norm_backward(ctx, grad, grad_attended, grad_lse, grad_mean, grad_rstd):
    q, k, v, residual, weight, key_begin, key_end, rng_state, *kept = ctx.saved_tensors
    bounds = key_begin, key_end
    with torch.autocast(q.device.type, enabled=False):  # a backward inside an autocast region computes the same
        attended, lse = _attended(ctx, q, k, v, bounds, rng_state, kept)
        rows = (attended + residual, weight, *kept[2:])
        grad_total, *rest = _gradients_of_rows(ctx, rows, grad, None, grad_mean, grad_rstd)
        grad_qkv = None, None, None
        if any(ctx.needs_input_grad[:3]):
            of_attention = grad_total, grad_attended, q, k, v, attended, lse, grad_lse
            grad_qkv = _attention_gradients(ctx, *of_attention, bounds, rng_state)
    return *grad_qkv, grad_total, *rest, None, None, None


torch.library.register_autograd(
    "step3_fused::attention_residual_layer_norm",
    _attention_residual_layer_norm_backward,
    setup_context=_attention_residual_layer_norm_setup,
)


def _attention_block_setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, _, proj_weight, _, weight, _, key_begin, key_end, rng_state, attention_rng_state = inputs
    _, total, *kept = output
    ctx.dropout_p = keyword_only_inputs["dropout_p"]
    tensors, rng_states = (q, k, v, proj_weight, weight, total), (rng_state, attention_rng_state)
    _save_for_attention(ctx, keyword_only_inputs, tensors, (key_begin, key_end), rng_states, kept)
    if rng.drops(ctx.dropout_p):
        _step_1()


def _attention_block_backward(ctx, grad_y, grad_sum, grad_attended, grad_lse, grad_mean, grad_rstd):
    q, k, v, proj_weight, weight, total, key_begin, key_end, rng_state, attention_rng_state, *kept = ctx.saved_tensors
    bounds = key_begin, key_end
    with torch.autocast(q.device.type, enabled=False):  # a backward inside an autocast region computes the same
        rows = (total, weight, *kept[2:])
        grad_total, *rest = _gradients_of_rows(ctx, rows, grad_y, grad_sum, grad_mean, grad_rstd)
        grad_qkv, grad_proj = (None, None, None), (None, None)
        if any(ctx.needs_input_grad[:3]) or any(ctx.needs_input_grad[4:6]):
            attended, lse = _attended(ctx, q, k, v, bounds, attention_rng_state, kept)
            grad_projected = grad_total
            if rng.drops(ctx.dropout_p):
                grad_projected, _ = _step_1().bias_dropout_residual_backward(grad_total, ctx.dropout_p, rng_state)
            grad, *grad_proj = _ops.linear_backward(grad_projected, attended, proj_weight)
            if any(ctx.needs_input_grad[:3]):
                of_attention = grad, grad_attended, q, k, v, attended, lse, grad_lse
                grad_qkv = _attention_gradients(ctx, *of_attention, bounds, attention_rng_state)
    return *grad_qkv, grad_total, *grad_proj, *rest, None, None, None, None


torch.library.register_autograd(
    "step3_fused::attention_block", _attention_block_backward, setup_context=_attention_block_setup
)

from step3_fused.linear_ops import (  # noqa: E402  they use what stands above
    gelu_linear,
    gelu_linear_backward,
    layer_norm_linear,
    linear,
    linear_backward,
    linear_bias_dropout_residual,
    linear_bias_dropout_residual_backward,
    linear_gelu,
    linear_gelu_backward,
    mlp,
    transformer_block,
)
