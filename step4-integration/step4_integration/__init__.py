"""Step 4: what GPT-2 needs besides attention, LayerNorm and GELU. Each Python function calls a registered op."""

import torch

from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_floating,
    check_like,
    check_shape,
    check_type,
    wide,
    without_forward_mode,
)
from kernel_fusion.steps import load

_C = load("step4_integration")
_ops = torch.ops.step4_integration

__all__ = ["embedding", "kv_append", "launch_counts", "rounds", "rungs", "varies"]

launch_counts = _C.launch_counts


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


def rounds(op: str, rung: str) -> str:
    """What `rung` of `op` rounds to the tensors' dtype on the way; "" for one that rounds once, at the end."""
    return _C.rounds(op, rung)


def varies(op: str, rung: str) -> bool:
    """Whether two runs of `rung` may differ in their last bits, since blocks add to the same numbers in any order."""
    return _C.varies(op, rung)


@without_forward_mode
def embedding(
    ids: torch.Tensor,
    token_weight: torch.Tensor,
    position_weight: torch.Tensor,
    *,
    position: int = 0,
    rung: str = "auto",
) -> torch.Tensor:
    """`token_weight[ids] + position_weight[position : position + length]`, the sum rounded once.

    Args:
        ids: [batch, length], int64 or int32, each from 0 to vocab - 1.
        token_weight: [vocab, width]; float32, float16, bfloat16 or float64.
        position_weight: [positions, width], dtype and device of `token_weight`.
        position: of the first id, from 0; a decode step passes the number of tokens before it.
        rung: "auto", or a name from `rungs("embedding", ids.device)`.

    Returns:
        [batch, length, width], contiguous.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, `position + length` past the table, unknown `rung`, and, for CPU tensors, an
            id outside the vocabulary. For CUDA tensors a check would wait for the GPU; such an id's row becomes NaN.
    """
    return _ops.embedding(ids, token_weight, position_weight, position=position, rung=rung)


@without_forward_mode
def kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    *,
    rung: str = "auto",
) -> None:
    """Writes `k` and `v` into the caches, from token `position` on. Nothing else in the caches changes.

    Args:
        k_cache, v_cache: [batch, heads, capacity, head_dim], stride 1 along head_dim; written in place.
        k, v: [batch, heads, length, head_dim], any strides; dtype and device of `k_cache`.
        position: the first token to write, from 0; `position + length` is at most the capacity.
        rung: "auto", or a name from `rungs("kv_append", k.device)`.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, `position + length` past the capacity, unknown `rung`.
        RuntimeError: gradients are being recorded for `k` or `v`; a cache passes none on.
    """
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RuntimeError("kv_append: `k` and `v` must not require gradients; generate under torch.no_grad()")
    _ops.kv_append(k_cache, v_cache, k, v, position, rung=rung)


# ---- shapes, for torch.compile and for meta tensors: the checks of integration_host.cpp, without data ----


def _check_position(op, position, length, rows, what):
    torch._check_value(position >= 0, lambda: f"{op}: `position` must not be negative, got {position}")
    torch._check_value(position + length <= rows, lambda: f"{op}: `position` ({position}) and the length of {what}")


@torch.library.register_fake("step4_integration::embedding")
def _(ids, token_weight, position_weight, *, position=0, rung="auto"):
    check_floating("embedding", "token_weight", token_weight)
    check_dim("embedding", "token_weight", token_weight, 2)
    vocab, width = token_weight.shape
    torch._check_value(
        vocab > 0 and width > 0,
        lambda: f"embedding: `token_weight` must not be empty, got shape {tuple(token_weight.shape)}",
    )
    check_like("embedding", "position_weight", position_weight, "token_weight", token_weight)
    check_dim("embedding", "position_weight", position_weight, 2)
    positions = position_weight.shape[0]
    check_shape("embedding", "position_weight", position_weight, (positions, width))
    check_type("embedding", "ids", ids, (torch.int64, torch.int32))
    check_device("embedding", "ids", ids, "token_weight", token_weight)
    check_dim("embedding", "ids", ids, 2)
    batch, length = ids.shape
    of = f"`ids` ({length}) go past the {positions} rows of `position_weight`"
    _check_position("embedding", position, length, positions, of)
    return token_weight.new_empty((batch, length, width))


@torch.library.register_fake("step4_integration::kv_append")
def _(k_cache, v_cache, k, v, position, *, rung="auto"):
    check_floating("kv_append", "k_cache", k_cache)
    check_dim("kv_append", "k_cache", k_cache, 4)
    check_like("kv_append", "v_cache", v_cache, "k_cache", k_cache)
    check_shape("kv_append", "v_cache", v_cache, k_cache.shape)
    check_like("kv_append", "k", k, "k_cache", k_cache)
    check_dim("kv_append", "k", k, 4)
    batch, heads, capacity, head_dim = k_cache.shape
    length = k.shape[2]
    check_shape("kv_append", "k", k, (batch, heads, length, head_dim))
    check_like("kv_append", "v", v, "k_cache", k_cache)
    check_shape("kv_append", "v", v, k.shape)
    _check_position("kv_append", position, length, capacity, f"`k` ({length}) go past the caches' length {capacity}")


# ---- gradients ----


def _embedding_setup(ctx, inputs, keyword_only_inputs, output):
    ids, token_weight, position_weight = inputs
    ctx.save_for_backward(ids)
    ctx.vocab, ctx.positions = token_weight.shape[0], position_weight.shape[0]
    ctx.position = keyword_only_inputs["position"]


def _embedding_backward(ctx, grad):
    """A row of a table gets the sum of the gradients of all tokens that used it, summed in float32 for half types."""
    (ids,) = ctx.saved_tensors
    summed = wide(grad)
    # The same sum as zeros.index_add_(0, ids, grad), which on a GPU adds in an order that changes from run to run.
    grad_token = torch.ops.aten.embedding_dense_backward(summed, ids, ctx.vocab, -1, False)
    after = ctx.positions - ctx.position - ids.shape[1]
    grad_position = torch.nn.functional.pad(summed.sum(0), (0, 0, ctx.position, after))
    return None, grad_token.to(grad.dtype), grad_position.to(grad.dtype)


torch.library.register_autograd("step4_integration::embedding", _embedding_backward, setup_context=_embedding_setup)
