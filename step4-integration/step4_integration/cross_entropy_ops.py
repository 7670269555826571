"""Cross-entropy of logits, and of logits that are made and forgotten in chunks."""

import functools

import torch

from kernel_fusion.layers import without_autocast
from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_like,
    check_rows,
    check_shape,
    check_type,
    contiguous_like,
    needs_gradients,
    register_autograd,
    without_forward_mode,
)

_ops = torch.ops.step4_integration


@without_forward_mode
def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    return_grad: bool = False,
    rung: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """For each row of logits its loss, `lse - logits[target]`, and `lse`, the logarithm of what softmax divides by.

    Args:
        logits: [rows, vocab], rows at any distance; float32, float16, bfloat16 or float64.
        targets: [rows], int64, each from 0 to vocab - 1, or `ignore_index`.
        ignore_index: a row with that target has a loss and a gradient of 0.
        return_grad: return the gradient of the loss's sum, too.
        rung: "auto", or a name from `rungs("cross_entropy", logits.device)`.

    Returns:
        `(loss, lse)`, each [rows], float32 (float64 where the logits are); with `return_grad` `(loss, lse, grad)`, grad
        as the logits, contiguous. Only the loss has gradients, and they have none. Where one is needed, grad is made
        in the same launch, and the backward pass multiplies it.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: wrong shape or device, empty rows, unknown `rung`, and, for CPU tensors, a target outside the row.
            For CUDA tensors a check would wait for the GPU; such a target makes its loss and gradient NaN.
    """
    keep = return_grad or needs_gradients(logits)
    found = _ops.cross_entropy(logits, targets, ignore_index=ignore_index, keep=keep, rung=rung)
    return found if return_grad else found[:2]


@without_forward_mode
def cross_entropy_backward_(
    logits: torch.Tensor, targets: torch.Tensor, *, ignore_index: int = -100, rung: str = "auto"
) -> torch.Tensor:
    """Writes the gradient of the loss's sum, `softmax(logits) - onehot(targets)`, over the logits. Returns the loss.

    Args:
        logits: as in `cross_entropy`; its rows may lie apart, but each in one piece. No gradients are recorded.
        targets, ignore_index, rung: as in `cross_entropy`.

    Returns:
        The loss of each row, [rows].

    Raises:
        TypeError, ValueError: as `cross_entropy`; or rows that are not in one piece.
        RuntimeError: `logits` requires gradients, and they are being recorded.
    """
    return _ops.cross_entropy_backward_(logits, targets, ignore_index=ignore_index, rung=rung)


@without_forward_mode
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    chunk: int | None = None,
    rung: str = "auto",
) -> torch.Tensor:
    """The mean of `cross_entropy(hidden @ weight.T, targets)` over the targets that are not `ignore_index`.

    The logits of `chunk` rows at a time exist, in the dtype of `hidden`: their gradient is written over them, and made
    into that of `hidden` and `weight` at once. So these are computed in the forward pass, where they are needed; the
    backward pass multiplies them by what comes from above.

    Args:
        hidden: [rows, width]; float32, float16, bfloat16 or float64.
        weight: [vocab, width], dtype and device of `hidden`.
        targets: [rows], int64, each from 0 to vocab - 1, or `ignore_index`.
        chunk: rows at a time; None takes all whose logits are at most 2 GB.
        rung: "auto", or a name from `rungs("cross_entropy", hidden.device)`.

    Returns:
        A scalar, float32 (float64 where `hidden` is); NaN where all targets are ignored, as in PyTorch. In half types
        logits and their gradient are rounded, as PyTorch's operations do under autocast. Under autocast `hidden` and
        `weight` are made autocast's dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, an empty row or weight, `chunk` below 1, unknown `rung`, and, for CPU
            tensors, a target outside the vocabulary. For CUDA tensors it makes the loss NaN.
    """
    return _ops.linear_cross_entropy(
        hidden,
        weight,
        targets,
        ignore_index=ignore_index,
        chunk=chunk,
        keep_hidden=needs_gradients(hidden),
        keep_weight=needs_gradients(weight),
        rung=rung,
    )[0]


# ---- shapes, for torch.compile and for meta tensors ----


def _check_logits(op, logits, targets):
    check_dim(op, "logits", logits, 2)
    check_rows(op, "logits", logits)
    _check_targets(op, targets, "logits", logits)


def _check_targets(op, targets, first_name, first):
    check_type(op, "targets", targets, (torch.int64,))
    check_device(op, "targets", targets, first_name, first)
    check_dim(op, "targets", targets, 1)
    check_shape(op, "targets", targets, (first.shape[0],))


def _new_loss(like, shape):
    return like.new_empty(shape, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)


@torch.library.register_fake("step4_integration::cross_entropy")
def _(logits, targets, *, ignore_index=-100, keep=True, rung="auto"):
    _check_logits("cross_entropy", logits, targets)
    rows = logits.shape[:1]
    grad = contiguous_like(logits) if keep else logits.new_empty(0)
    return _new_loss(logits, rows), _new_loss(logits, rows), grad


@torch.library.register_fake("step4_integration::cross_entropy_backward_")
def _(logits, targets, *, ignore_index=-100, rung="auto"):
    _check_logits("cross_entropy_backward_", logits, targets)
    return _new_loss(logits, logits.shape[:1])


@torch.library.register_fake("step4_integration::linear_cross_entropy")
def _(
    hidden,
    weight,
    targets,
    *,
    ignore_index=-100,
    chunk=None,
    keep_hidden=True,
    keep_weight=True,
    rung="auto",
):
    op = "linear_cross_entropy"
    check_dim(op, "hidden", hidden, 2)
    check_rows(op, "hidden", hidden)
    check_like(op, "weight", weight, "hidden", hidden)
    check_dim(op, "weight", weight, 2)
    check_shape(op, "weight", weight, (weight.shape[0], hidden.shape[1]))
    torch._check_value(
        weight.shape[0] > 0, lambda: f"{op}: `weight` must not be empty, got shape {tuple(weight.shape)}"
    )
    _check_targets(op, targets, "hidden", hidden)
    torch._check_value(chunk is None or chunk > 0, lambda: f"{op}: `chunk` must be at least 1, got {chunk}")
    grad_hidden = contiguous_like(hidden) if keep_hidden else hidden.new_empty(0)
    grad_weight = _new_loss(weight, weight.shape if keep_weight else (0,))
    return _new_loss(hidden, ()), _new_loss(hidden, ()), grad_hidden, grad_weight


# ---- gradients: the forward pass has them, but for what comes from above ----


def _times(gradient, factor, dtype):
    """Multiplied in float32 at least, and rounded once. A factor without dimensions would be made a half first."""
    return torch.mul(gradient, factor.reshape(-1, 1), out=torch.empty_like(gradient, dtype=dtype))


def _once(op):
    """A backward that refuses to be differentiated: what it multiplies would be taken for a constant."""

    def decorate(backward):
        @functools.wraps(backward)
        def checked(ctx, *grads):
            if torch.is_grad_enabled():  # backward(create_graph=True)
                raise NotImplementedError(f"{op}: there are no gradients of gradients; leave out `create_graph`")
            return backward(ctx, *grads)

        return checked

    return decorate


def _kept(op, name, gradient, shape):
    if gradient.shape != shape:
        raise RuntimeError(f"{op}: the gradient of `{name}` was not kept; call it with its flag `keep` set")
    return gradient


def _cross_entropy_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(output[2])
    ctx.shape = inputs[0].shape
    ctx.mark_non_differentiable(*output[1:])


@_once("cross_entropy")
@without_autocast
def _cross_entropy_backward(ctx, grad_loss, *_):
    (gradient,) = ctx.saved_tensors
    gradient = _kept("cross_entropy", "logits", gradient, ctx.shape)
    return _times(gradient, grad_loss, gradient.dtype), None


register_autograd("step4_integration::cross_entropy", _cross_entropy_backward, setup_context=_cross_entropy_setup)


def _linear_cross_entropy_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*output[1:])
    ctx.shapes = [t.shape for t in inputs[:2]]
    ctx.mark_non_differentiable(*output[1:])


@_once("linear_cross_entropy")
@without_autocast
def _linear_cross_entropy_backward(ctx, grad_loss, *_):
    scale, *gradients = ctx.saved_tensors
    dtype = gradients[0].dtype  # grad_weight is wider where that is a half type
    found = []
    for name, gradient, shape, needed in zip(
        ("hidden", "weight"), gradients, ctx.shapes, ctx.needs_input_grad[:2], strict=True
    ):
        if needed:
            gradient = _times(_kept("linear_cross_entropy", name, gradient, shape), grad_loss * scale, dtype)
        found.append(gradient if needed else None)
    return *found, None


register_autograd(
    "step4_integration::linear_cross_entropy",
    _linear_cross_entropy_backward,
    setup_context=_linear_cross_entropy_setup,
)
