"""decode_step: a token of GPT-2 in one call."""

import math
from typing import Any

import torch

from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_floating,
    check_like,
    check_shape,
    check_type,
    without_forward_mode,
)

_ops = torch.ops.step4_integration
MOST_ROWS = 32
OF_LAYER = 12
PACKED_RUNGS = ("v3_persistent", "v4_clusters")  # which read weights that `decode_pack` has packed for them


@without_forward_mode
def decode_step(
    ids: torch.Tensor,
    end: torch.Tensor,
    begin: torch.Tensor,
    token_weight: torch.Tensor,
    position_weight: torch.Tensor,
    weights: list[torch.Tensor],
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    packed: torch.Tensor | None = None,
    buffer: torch.Tensor | None = None,
    peers: list[int] | tuple[()] = (),
    rank: int = 0,
    words: list[int] | tuple[()] = (),
    *,
    scale: float | None = None,
    scale_by_layer: bool = False,
    eps: float = 1e-5,
    approximate: str = "tanh",
    patience: float = 60.0,
    rung: str = "auto",
) -> torch.Tensor:
    """GPT-2's logits after one more token of each row: embedding, all layers, LayerNorm and the last product.

    The caches hold of row b the slots `begin[b]` to `end[b] - 1`; what lies before is padding. The new token stands at
    position `end[b] - begin[b]`. Its keys and values are written to slot `end[b]`, it attends to the slots from
    `begin[b]` to `end[b]`, and then the op raises `end` by 1. Lengths are read on the device, so a CUDA graph replays
    at any length. What lies between products is rounded to the tensors' dtype, the residual stream is not. A row's
    logits do not depend on what else is in the batch.

    Args:
        ids: int64 [batch], each from 0 to vocab - 1; batch up to 32.
        end, begin: int32 [batch]; `end` is written in place.
        token_weight: [vocab, width], the embedding and the last product's weight; float32, float16, bfloat16 or
            float64. Here and below: contiguous, and of one dtype and device.
        position_weight: [positions, width].
        weights: 12 for each layer: `ln_1.weight`, `ln_1.bias`, `attn.c_attn.weight` [width, 3 * width],
            `attn.c_attn.bias`, `attn.c_proj.weight` [width, width], `attn.c_proj.bias`, `ln_2.weight`, `ln_2.bias`,
            `mlp.c_fc.weight` [width, inner], `mlp.c_fc.bias`, `mlp.c_proj.weight` [inner, width], `mlp.c_proj.bias`;
            then `ln_f.weight` and `ln_f.bias`.
        k_cache, v_cache: [layers, batch, heads, capacity, head_dim], heads * head_dim = width, stride 1 along head_dim;
            written in place.
        packed: None, or what `decode_pack` made of `token_weight` and `weights` for one of `PACKED_RUNGS`. "auto" takes
            that rung then, if it can: the first takes one row, the second 8, of wide models 4. Weights that have
            changed since are not seen. It keeps what tells one launch's
            messages from the next one's, and is written in place: one call at a time may have it.
        buffer, peers, rank, words: of one of up to 8 workers that share a model, each with its columns of `c_attn` and
            `c_fc`, rows of the two `c_proj`, heads of the caches and rows of `token_weight`; vectors but the split
            biases are whole. `buffer`: uint8, `decode_step_bytes(width, workers)` of them, which all workers write
            into, zeros up to `decode_step_header()` and 255 behind that. `peers`: the addresses of all workers' buffers
            on their devices, this one's at `rank`. `words`: where each worker's tokens begin, and where the last one's
            end. All call with the same `ids`, together, each on a device of its own. On a CPU by name of a rung only.
        scale: factor of attention's scores; None for 1 / sqrt(head_dim).
        scale_by_layer: whether layer l divides it by l + 1.
        eps: what the LayerNorms add to the variance.
        approximate: the GELU's form, "tanh" or "none", as of step 3's `linear_gelu`.
        patience: in seconds; who waits longer for another worker ends with an error.
        rung: "auto", or a name from `rungs("decode_step", ids.device)`.

    Returns:
        Logits, [batch, vocab], of a worker's own tokens.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape, device or layout, a number out of its range, unknown `rung`, and, for CPU tensors, an
            id outside the vocabulary or a row that has reached the caches' capacity or the last position. For CUDA
            tensors a check would wait for the GPU: logits of such a row are NaN. Where there is no slot or no position
            for it, nothing of it is written, and its `end` stays.
        RuntimeError: gradients are being recorded for a weight or a cache; a cache passes none on. For CPU tensors also
            what `decode_check` raises.
    """
    return _ops.decode_step(
        ids,
        end,
        begin,
        token_weight,
        position_weight,
        weights,
        k_cache,
        v_cache,
        packed,
        buffer,
        peers,
        rank,
        words,
        scale=scale,
        scale_by_layer=scale_by_layer,
        eps=eps,
        approximate=approximate,
        patience=patience,
        rung=rung,
    )


@without_forward_mode
def decode_pack(
    token_weight: torch.Tensor,
    weights: list[torch.Tensor],
    packed: torch.Tensor | None = None,
    *,
    rung: str = "v4_clusters",
) -> torch.Tensor:
    """The weights once more, in the order in which a rung of `decode_step` reads them on this device.

    As many bytes as the weights have, and more, since all warps' parts take as much as the largest: for `v4_clusters`
    0.30 GB for GPT-2 of 124M, 3.45 GB for 1558M. Weights that are changed later are packed again.

    Args:
        token_weight, weights: as of `decode_step`; float16 or bfloat16.
        packed: the memory, where an earlier call's is to be used again.
        rung: one of `PACKED_RUNGS`.

    Returns:
        uint8 [bytes]; `packed`, if that was given.

    Raises:
        TypeError, ValueError: as of `decode_step`, or shapes that the rung cannot do on this device; the text says
            which.
    """
    if packed is None:
        return _ops.decode_pack(token_weight, weights, rung=rung)
    return _ops.decode_pack.out(token_weight, weights, rung=rung, packed=packed)


def decode_pack_refusal(
    token_weight: torch.Tensor, weights: list[torch.Tensor], *, rung: str = "v4_clusters", rows: int = 1
) -> str:
    """Why `decode_pack` would refuse these shapes or this device, or the rung would refuse so many rows at once; or "".

    Raises:
        TypeError, ValueError: `token_weight` and `weights` are not a model's; as of `decode_step`. Or no rows.
    """
    return _ops.decode_pack_refusal(token_weight, weights, rung=rung, rows=rows)


def decode_check(packed: torch.Tensor) -> None:
    """Waits for the device, and raises what went wrong in a launch that was given `packed`.

    Blocks of `PACKED_RUNGS` wait for each other, some seconds at most. Where one gives up, so do all: the logits are
    NaN, `end` stays. After this function the next call works again.

    Raises:
        RuntimeError: a block waited in vain; for what, in which layer.
        ValueError: `packed` was made of weights of other shapes or another dtype, of as many bytes.
    """
    _ops.decode_check(packed)


@torch.library.register_fake("step4_integration::decode_step")
def _(
    ids,
    end,
    begin,
    token_weight,
    position_weight,
    weights,
    k_cache,
    v_cache,
    packed=None,
    buffer=None,
    peers=(),
    rank=0,
    words=(),
    *,
    scale=None,
    scale_by_layer=False,
    eps=1e-5,
    approximate="tanh",
    patience=60.0,
    rung="auto",
):
    """The checks of decode_step_host.cpp, without data; whether workers fit each other needs their addresses."""
    op, like = "decode_step", ("token_weight", token_weight)
    check_floating(op, "token_weight", token_weight)
    check_dim(op, "token_weight", token_weight, 2)
    vocab, width = token_weight.shape
    torch._check_value(
        vocab > 0 and width > 0,
        lambda: f"{op}: `token_weight` must not be empty, got shape {tuple(token_weight.shape)}",
    )
    check_like(op, "position_weight", position_weight, *like)
    check_dim(op, "position_weight", position_weight, 2)
    check_shape(op, "position_weight", position_weight, (position_weight.shape[0], width))
    check_like(op, "k_cache", k_cache, *like)
    check_dim(op, "k_cache", k_cache, 5)
    check_like(op, "v_cache", v_cache, *like)
    check_shape(op, "v_cache", v_cache, k_cache.shape)
    layers, batch, heads, _, head_dim = k_cache.shape
    torch._check_value(
        layers > 0, lambda: f"{op}: `k_cache` must have at least one layer, got shape {tuple(k_cache.shape)}"
    )
    own = heads * head_dim
    torch._check_value(
        own > 0 and (own == width or (len(peers) > 0 and own < width)),
        lambda: (
            f"{op}: `k_cache` must have heads of {width} columns together, the width of `token_weight`, got shape "
            f"{tuple(k_cache.shape)}"
        ),
    )
    torch._check_value(batch <= MOST_ROWS, lambda: f"{op}: `k_cache` must have at most {MOST_ROWS} rows, got {batch}")
    for name, tensor, dtype in (("ids", ids, torch.int64), ("end", end, torch.int32), ("begin", begin, torch.int32)):
        check_type(op, name, tensor, (dtype,))
        check_device(op, name, tensor, *like)
        check_shape(op, name, tensor, (batch,))
    count = layers * OF_LAYER + 2
    torch._check_value(
        len(weights) == count,
        lambda: (
            f"{op}: `weights` must be 12 for each of the caches' {layers} layers, and 2: {count}, got {len(weights)}"
        ),
    )
    inner = weights[9].numel()
    one = (width,)
    shapes: tuple[tuple[Any, ...], ...] = (
        one,
        one,
        (width, 3 * own),
        (3 * own,),
        (own, width),
        one,
        one,
        one,
        (width, inner),
        (inner,),
    )
    shapes += ((inner, width), one)
    for i, weight in enumerate(weights):
        check_like(op, f"weights[{i}]", weight, *like)
        check_shape(op, f"weights[{i}]", weight, shapes[i % OF_LAYER] if i < layers * OF_LAYER else one)
    for name, tensor in (
        ("token_weight", token_weight),
        ("position_weight", position_weight),
        ("ids", ids),
        ("end", end),
        ("begin", begin),
        *((f"weights[{i}]", weight) for i, weight in enumerate(weights)),
    ):
        torch._check_value(tensor.is_contiguous(), lambda name=name: f"{op}: `{name}` must be contiguous")
    if packed is not None:
        check_type(op, "packed", packed, (torch.uint8,))
        check_device(op, "packed", packed, *like)
        check_dim(op, "packed", packed, 1)
    torch._check_value(scale is None or math.isfinite(scale), lambda: f"{op}: `scale` must be finite, got {scale}")
    torch._check_value(0 <= eps < math.inf, lambda: f"{op}: `eps` must be finite and not negative, got {eps}")
    torch._check_value(
        approximate in ("tanh", "none"), lambda: f"{op}: `approximate` must be 'tanh' or 'none', got '{approximate}'"
    )
    return token_weight.new_empty((batch, vocab))
