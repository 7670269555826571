"""embedding_backward, and the gradients of `embedding`, which are made of it."""

import torch
import torch.nn.functional as F

from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_floating,
    check_shape,
    check_type,
    register_autograd,
    wide,
    without_forward_mode,
)

_ops = torch.ops.step4_integration


@without_forward_mode
def embedding_backward(grad: torch.Tensor, ids: torch.Tensor, vocab: int, *, rung: str = "auto") -> torch.Tensor:
    """The gradient of `table[ids]` with respect to the table: row v is the sum of `grad` where `ids` is v, else 0.

    Args:
        grad: [batch, length, width], any strides; float32, float16, bfloat16 or float64.
        ids: [batch, length], int64 or int32, on the device of `grad`, each from 0 to vocab - 1.
        vocab: how many rows the table has, below 2^31 - 1.
        rung: "auto", or a name from `rungs("embedding_backward", grad.device)`.

    Returns:
        [vocab, width], contiguous, dtype of `grad`: summed in float32 (float64 for float64), in an order that depends
        on `ids` alone, and rounded once. Every run gives the same bits.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: wrong shape or device, a `vocab` out of range, unknown `rung`, and, for CPU tensors, an id outside
            the table. For CUDA tensors a check would wait for the GPU; such an id's gradient is left out.
    """
    return _ops.embedding_backward(grad, ids, vocab, rung=rung)


@torch.library.register_fake("step4_integration::embedding_backward")
def _(grad, ids, vocab, *, rung="auto"):
    check_floating("embedding_backward", "grad", grad)
    check_dim("embedding_backward", "grad", grad, 3)
    check_type("embedding_backward", "ids", ids, (torch.int64, torch.int32))
    check_device("embedding_backward", "ids", ids, "grad", grad)
    check_shape("embedding_backward", "ids", ids, grad.shape[:2])
    most = 2**31 - 2
    torch._check_value(0 <= vocab <= most, lambda: f"embedding_backward: `vocab` must be from 0 to {most}, got {vocab}")
    return grad.new_empty((vocab, grad.shape[2]))


# ---- gradients ----


def _embedding_setup(ctx, inputs, keyword_only_inputs, output):
    ids, token_weight, position_weight, positions = inputs
    ctx.save_for_backward(ids, positions)
    ctx.vocab, ctx.rows = token_weight.shape[0], position_weight.shape[0]
    ctx.position = keyword_only_inputs["position"]


def _embedding_backward(ctx, grad):
    """A row of a table gets the sum of the gradients of all tokens that used it, summed in float32 for half types."""
    ids, positions = ctx.saved_tensors
    length = ids.shape[1]
    grad_token = grad_position = None
    if ctx.needs_input_grad[1]:
        grad_token = _ops.embedding_backward(grad, ids, ctx.vocab)
    if ctx.needs_input_grad[2] and positions is None:
        summed = wide(grad).sum(0).to(grad.dtype)
        grad_position = F.pad(summed, (0, 0, ctx.position, ctx.rows - ctx.position - length))
    elif ctx.needs_input_grad[2]:  # a token past the table became NaN: it has no row, and is left out
        place = (torch.arange(length, device=ids.device) + ctx.position + positions[:, None]).clamp(min=0)
        grad_position = _ops.embedding_backward(grad, place, ctx.rows)
    return None, grad_token, grad_position, None


register_autograd("step4_integration::embedding", _embedding_backward, setup_context=_embedding_setup)


def _backward_setup(ctx, inputs, keyword_only_inputs, output):
    _, ids, vocab = inputs
    ctx.save_for_backward(ids)
    ctx.vocab = vocab


def _backward_backward(ctx, grad_table):
    """The op adds up; so its own gradient is a look-up, 0 for an id that has no row."""
    (ids,) = ctx.saved_tensors
    outside = (ids < 0) | (ids >= ctx.vocab)
    looked_up = F.embedding(ids.masked_fill(outside, 0), grad_table)
    return looked_up.masked_fill(outside[..., None], 0), None, None


register_autograd("step4_integration::embedding_backward", _backward_backward, setup_context=_backward_setup)
