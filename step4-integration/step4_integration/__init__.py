"""Step 4: what GPT-2 needs besides attention, LayerNorm and GELU. Each Python function calls a registered op."""

import torch

from kernel_fusion import sharding
from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_floating,
    check_like,
    check_shape,
    check_type,
    without_forward_mode,
)
from kernel_fusion.steps import load

_C = load("step4_integration")
_ops = torch.ops.step4_integration

from step4_integration.all_reduce_ops import all_reduce  # noqa: E402  _C registers the op
from step4_integration.cross_entropy_ops import (  # noqa: E402  _C registers the ops
    cross_entropy,
    cross_entropy_backward_,
    linear_cross_entropy,
)
from step4_integration.decode_step_ops import (  # noqa: E402  _C registers the ops
    PACKED_RUNGS,
    decode_check,
    decode_pack,
    decode_pack_refusal,
    decode_step,
)
from step4_integration.embedding_gradients import embedding_backward  # noqa: E402  _C registers the op
from step4_integration.sample_ops import sample  # noqa: E402  _C registers the op

__all__ = [
    "PACKED_RUNGS",
    "all_reduce",
    "all_reduce_bytes",
    "all_reduce_header",
    "all_reduce_most",
    "cross_entropy",
    "cross_entropy_backward_",
    "decode_check",
    "decode_pack",
    "decode_pack_refusal",
    "decode_step",
    "decode_step_bytes",
    "decode_step_header",
    "embedding",
    "embedding_backward",
    "kv_append",
    "launch_counts",
    "linear_cross_entropy",
    "places",
    "rounds",
    "rungs",
    "sample",
    "varies",
]

launch_counts, places, rounds, varies = _C.launch_counts, _C.places, _C.rounds, _C.varies
all_reduce_bytes, all_reduce_header, all_reduce_most = _C.all_reduce_bytes, _C.all_reduce_header, _C.all_reduce_most
decode_step_bytes, decode_step_header = _C.decode_step_bytes, _C.decode_step_header


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


@without_forward_mode
def embedding(
    ids: torch.Tensor,
    token_weight: torch.Tensor,
    position_weight: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    position: int = 0,
    rung: str = "auto",
) -> torch.Tensor:
    """`token_weight[ids] + position_weight[position : position + length]`, the sum rounded once.

    Args:
        ids: [batch, length], int64 or int32, each from 0 to vocab - 1.
        token_weight: [vocab, width]; float32, float16, bfloat16 or float64.
        position_weight: [rows, width], dtype and device of `token_weight`.
        positions: int32 [batch] on the device of `ids`, added to `position`: token j of sequence b stands at
            `position + positions[b] + j`, and where that is below 0, at 0. A batch padded on the left passes minus the
            number of pads. It is read on the device, so a CUDA graph replays at positions that have changed.
        position: of the first id, from 0; a decode step passes the number of tokens before it.
        rung: "auto", or a name from `rungs("embedding", ids.device)`.

    Returns:
        [batch, length, width], contiguous.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, `position + length` past the table, unknown `rung`, and, for CPU tensors, an
            id outside the vocabulary or `positions` that lead past the table. For CUDA tensors a check would wait for
            the GPU; the row of such a token becomes NaN.
    """
    return _ops.embedding(ids, token_weight, position_weight, positions, position=position, rung=rung)


@without_forward_mode
def kv_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    positions: torch.Tensor | None = None,
    *,
    rung: str = "auto",
) -> None:
    """Writes `k` and `v` into the caches, from token `position` on. Nothing else in the caches changes.

    Args:
        k_cache, v_cache: [batch, heads, capacity, head_dim], stride 1 along head_dim; written in place.
        k, v: [batch, heads, length, head_dim], any strides; dtype and device of `k_cache`.
        position: the first token to write, from 0; `position + length` is at most the capacity.
        positions: int32 [batch] on the device of `k`, added to `position`: token j of sequence b is written at
            `position + positions[b] + j`. It is read on the device, so a CUDA graph replays at positions that have
            changed; there what would stand outside the capacity is not written.
        rung: "auto", or a name from `rungs("kv_append", k.device)`.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, `position + length` past the capacity, unknown `rung`, and, for CPU tensors,
            `positions` that lead outside the capacity.
        RuntimeError: gradients are being recorded for `k` or `v`; a cache passes none on.
    """
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RuntimeError("kv_append: `k` and `v` must not require gradients; generate under torch.no_grad()")
    _ops.kv_append(k_cache, v_cache, k, v, position, positions, rung=rung)


# ---- shapes, for torch.compile and for meta tensors: the checks of integration_host.cpp, without data ----


def _check_position(op, position, length, rows, what):
    torch._check_value(position >= 0, lambda: f"{op}: `position` must not be negative, got {position}")
    torch._check_value(position + length <= rows, lambda: f"{op}: `position` ({position}) and the length of {what}")


def _check_positions(op, position, positions, first_name, first, batch):
    """As `_check_position`, where `positions` decide what rows there must be."""
    check_type(op, "positions", positions, (torch.int32,))
    check_device(op, "positions", positions, first_name, first)
    check_shape(op, "positions", positions, (batch,))
    torch._check_value(position >= 0, lambda: f"{op}: `position` must not be negative, got {position}")


@torch.library.register_fake("step4_integration::embedding")
def _(ids, token_weight, position_weight, positions=None, *, position=0, rung="auto"):
    check_floating("embedding", "token_weight", token_weight)
    check_dim("embedding", "token_weight", token_weight, 2)
    vocab, width = token_weight.shape
    torch._check_value(
        vocab > 0 and width > 0,
        lambda: f"embedding: `token_weight` must not be empty, got shape {tuple(token_weight.shape)}",
    )
    check_like("embedding", "position_weight", position_weight, "token_weight", token_weight)
    check_dim("embedding", "position_weight", position_weight, 2)
    rows = position_weight.shape[0]
    check_shape("embedding", "position_weight", position_weight, (rows, width))
    check_type("embedding", "ids", ids, (torch.int64, torch.int32))
    check_device("embedding", "ids", ids, "token_weight", token_weight)
    check_dim("embedding", "ids", ids, 2)
    batch, length = ids.shape
    of = f"`ids` ({length}) go past the {rows} rows of `position_weight`"
    if positions is None:
        _check_position("embedding", position, length, rows, of)
    else:
        _check_positions("embedding", position, positions, "token_weight", token_weight, batch)
    return token_weight.new_empty((batch, length, width))


@torch.library.register_fake("step4_integration::kv_append")
def _(k_cache, v_cache, k, v, position, positions=None, *, rung="auto"):
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
    of = f"`k` ({length}) go past the caches' length {capacity}"
    if positions is None:
        _check_position("kv_append", position, length, capacity, of)
    else:
        _check_positions("kv_append", position, positions, "k_cache", k_cache, batch)


# ---- which parts of DTensors an op takes ----

sharding.register(
    "step4_integration",
    {
        "cross_entropy": "rv, r -> r, r, rv? | r",
        "embedding": "bl, vw, pw, b -> blw | bw",
        "embedding_backward": "blw, bl -> vw+bl | blw",
    },
)
