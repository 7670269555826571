"""What two forms of a block need."""

from typing import Any

import torch

from model.cache import Keys, KVCache


def split_heads(packed: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, side by side in each row of `packed`, as views [batch, heads, length, head_dim]: no copy."""
    if packed.requires_grad and not torch.compiler.is_compiling():
        return _Split.apply(packed, config.n_head)
    return _parts(packed, config.n_head)


def _parts(packed: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, length, width = packed.shape
    parts = packed.view(batch, length, 3, heads, width // (3 * heads))
    return parts.permute(2, 0, 3, 1, 4).unbind()


class _Split(torch.autograd.Function):
    """`_parts`, whose gradient is there already where attention's backward pass has put its three side by side."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return _parts(packed, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        base, heads = gradients[0]._base, gradients[0].shape[1]
        if base is not None and base.shape[2:4] == (3, heads) and base.is_contiguous() and not torch.is_grad_enabled():
            rows = base.flatten(2)
            if [*map(_place, gradients)] == [*map(_place, _parts(rows, heads))]:
                return rows, None
        return torch.stack([gradient.transpose(1, 2) for gradient in gradients], 2).flatten(2), None


def _place(x: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return x.data_ptr(), x.shape, x.stride()


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, head_dim] as rows [batch, length, n_embd]."""
    return x.transpose(1, 2).flatten(2)


def with_keys(
    cache: KVCache | None,
    layer: int,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, Keys]:
    """q and x, and what the new tokens attend to: themselves, or, with a cache, the tokens before as well."""
    q, k, v = qkv
    if cache is None:
        return q, x, Keys(k, v, None, causal=True, cu_seqlens=cu_seqlens)
    return cache.wanted(layer, q, x, cache.append(layer, k, v))


def scale_of(config: Any, layer: int) -> float:
    """The factor of attention's scores."""
    scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale
