"""Attention fused with what follows it: the residual, LayerNorm, the projection."""

import math

import torch

from kernel_fusion import rng
from kernel_fusion.ops import (
    check_dim,
    check_documents,
    check_floating,
    check_key_bounds,
    check_like,
    check_shape,
    contiguous_like,
    needs_gradients,
    register_autograd,
    without_forward_mode,
)
from step3_fused import shared

_ops = torch.ops.step3_fused


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
    attention_dropout_p, attention_rng_state = shared.dropout(
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
    cu_seqlens: torch.Tensor | None = None,
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
        q, k, v, residual, key_begin, key_end, causal, scale, eps: as in `attention_residual_layer_norm`.
        proj_weight: [H·D in, H·D out], as GPT-2's Conv1D stores it: x @ W, no transpose.
        proj_bias, weight, bias: [H·D]. All of one dtype and device.
        rng_state, attention_rng_state: for `dropout_p`, and for `attention_dropout_p`: int64 [2], seed and offset, on
            the CPU or on q's device; default: new ones.
        cu_seqlens: where documents begin in a packed row, as step 2's `attention` has it: int32 [n + 1] on the device
            of `q`, 0 first, never falling, Sq last. B is 1, k and v are as long as q, no document sees another, and
            `causal` counts within each. None: one document a batch. Not together with `key_begin` or `key_end`.
        dropout_p: the part of the projection, with its bias, that is dropped, from 0 to 1, with the mask of step 1's
            `bias_dropout_residual`.
        attention_dropout_p: the part of attention's weights that is dropped, with the mask of step 2's `attention`.
        training: False switches dropout off.
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
        TypeError, ValueError: as `attention_residual_layer_norm`, and for `dropout_p`; for CPU tensors, also starts of
            documents that are none. For CUDA tensors a check would wait for the GPU; with such starts the outputs may
            be anything.
    """
    op = "attention_block"
    dropout_p, rng_state = shared.dropout(op, "dropout_p", dropout_p, rng_state, training, q)
    attention_dropout_p, attention_rng_state = shared.dropout(
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
    others = (key_begin, key_end, rng_state, attention_rng_state, cu_seqlens)
    outputs = _ops.attention_block(*inputs, *others, keep=keep, **options)
    return outputs if return_statistics else outputs[:2]


# ---- shapes, for torch.compile and for meta tensors: the checks of fused_host.cpp, without data ----


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
    shared.check_eps(op, eps)


def _kept_of_attention(q, residual, keep):
    attended = contiguous_like(residual) if keep else residual.new_empty(0)
    lse = q.new_empty(q.shape[:3] if keep else 0, dtype=shared.statistics_dtype(q))
    return attended, lse, shared.a_number_a_row(residual, keep), shared.a_number_a_row(residual, keep)


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
    cu_seqlens=None,
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
    check_documents(op, q, k, key_begin, key_end, cu_seqlens, None)
    rng.check(op, "dropout_p", dropout_p, rng_state, q)
    rng.check(op, "attention_dropout_p", attention_dropout_p, attention_rng_state, q, "attention_rng_state")
    return contiguous_like(residual), contiguous_like(residual), *_kept_of_attention(q, residual, keep)


# ---- gradients: those of the pieces, each by its own op ----


def _heads(x, heads):
    """[B, S, H·D] as [B, H, S, D]: a view."""
    return x.unflatten(2, (heads, x.shape[2] // heads)).transpose(1, 2)


def _save_for_attention(ctx, options, tensors, optional, kept):
    """`tensors`, then what may be None: key_begin, key_end and so on; then, if they are kept, attended to rstd."""
    ctx.eps, ctx.keeps = options["eps"], options["keep"]
    ctx.attention = {
        "causal": options["causal"],
        "scale": options["scale"],
        "dropout_p": options["attention_dropout_p"],
    }
    ctx.save_for_backward(*tensors, *optional, *(kept if ctx.keeps else ()))
    ctx.set_materialize_grads(False)
    shared.step_2()  # an error comes now, not in the backward


def _attended(ctx, q, k, v, bounds, rng_state, kept, cu_seqlens=None):
    """Attention's output, side by side, and log-sum-exp: kept, or computed again."""
    if ctx.keeps:
        return kept[:2]
    out, lse = shared.step_2().attention(q, k, v, *bounds, rng_state, cu_seqlens, **ctx.attention)
    return out.transpose(1, 2).flatten(2), lse


def _attention_gradients(ctx, grad, given, q, k, v, attended, lse, grad_lse, bounds, rng_state, cu_seqlens=None):
    """Of q, k and v. `grad`: of attention's output, side by side; `given`: what more, where somebody used it."""
    if given is not None and ctx.keeps:
        grad = grad + given
    heads = q.shape[1]
    rows = _heads(grad, heads), q, k, v, _heads(attended, heads), lse
    return shared.attention_gradients(
        *rows, *bounds, grad_lse if ctx.keeps else None, rng_state, cu_seqlens, **ctx.attention
    )


def _attention_residual_layer_norm_setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, residual, weight, _, key_begin, key_end, rng_state = inputs
    tensors = q, k, v, residual, weight
    _save_for_attention(ctx, keyword_only_inputs, tensors, (key_begin, key_end, rng_state), output[1:])


def _attention_residual_layer_norm_backward(ctx, grad, grad_attended, grad_lse, grad_mean, grad_rstd):
    q, k, v, residual, weight, key_begin, key_end, rng_state, *kept = ctx.saved_tensors
    bounds = key_begin, key_end
    with torch.autocast(q.device.type, enabled=False):  # a backward inside an autocast region computes the same
        attended, lse = _attended(ctx, q, k, v, bounds, rng_state, kept)
        rows = (attended + residual, weight, *kept[2:])
        grad_total, *rest = shared.gradients_of_rows(ctx, rows, grad, None, grad_mean, grad_rstd)
        grad_qkv = None, None, None
        if any(ctx.needs_input_grad[:3]):
            of_attention = grad_total, grad_attended, q, k, v, attended, lse, grad_lse
            grad_qkv = _attention_gradients(ctx, *of_attention, bounds, rng_state)
    return *grad_qkv, grad_total, *rest, None, None, None


register_autograd(
    "step3_fused::attention_residual_layer_norm",
    _attention_residual_layer_norm_backward,
    setup_context=_attention_residual_layer_norm_setup,
)


def _attention_block_setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, _, proj_weight, _, weight, _, *optional = inputs
    _, total, *kept = output
    ctx.dropout_p = keyword_only_inputs["dropout_p"]
    _save_for_attention(ctx, keyword_only_inputs, (q, k, v, proj_weight, weight, total), optional, kept)
    if rng.drops(ctx.dropout_p):
        shared.step_1()


def _attention_block_backward(ctx, grad_y, grad_sum, grad_attended, grad_lse, grad_mean, grad_rstd):
    q, k, v, proj_weight, weight, total, key_begin, key_end, *others = ctx.saved_tensors
    (rng_state, attention_rng_state, cu_seqlens, *kept), bounds = others, (key_begin, key_end)
    with torch.autocast(q.device.type, enabled=False):  # a backward inside an autocast region computes the same
        rows = (total, weight, *kept[2:])
        grad_total, *rest = shared.gradients_of_rows(ctx, rows, grad_y, grad_sum, grad_mean, grad_rstd)
        grad_qkv, grad_proj = (None, None, None), (None, None)
        if any(ctx.needs_input_grad[:3]) or any(ctx.needs_input_grad[4:6]):
            attended, lse = _attended(ctx, q, k, v, bounds, attention_rng_state, kept, cu_seqlens)
            grad_projected = grad_total
            if rng.drops(ctx.dropout_p):
                grad_projected, _ = shared.step_1().bias_dropout_residual_backward(grad_total, ctx.dropout_p, rng_state)
            grad, *grad_proj = shared.step_2().linear_backward(grad_projected, attended, proj_weight)
            if any(ctx.needs_input_grad[:3]):
                of_attention = grad, grad_attended, q, k, v, attended, lse, grad_lse
                grad_qkv = _attention_gradients(ctx, *of_attention, bounds, attention_rng_state, cu_seqlens)
    return *grad_qkv, grad_total, *grad_proj, *rest, *[None] * 5


register_autograd("step3_fused::attention_block", _attention_block_backward, setup_context=_attention_block_setup)
