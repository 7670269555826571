"""What two forms of a block need."""

from typing import Any

import torch

from model.cache import Keys, KVCache


def split_heads(packed: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, side by side in each row of `packed`, as views [batch, heads, length, head_dim]: no copy."""
    batch, length, width = packed.shape
    parts = packed.view(batch, length, 3, config.n_head, width // (3 * config.n_head))
    return tuple(parts.permute(2, 0, 3, 1, 4).unbind())


def join_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, head_dim] as rows [batch, length, n_embd]."""
    return x.transpose(1, 2).flatten(2)


def keys_of(
    cache: KVCache | None, layer: int, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> Keys:
    """What the new tokens attend to: themselves, or, with a cache, the tokens before as well."""
    return Keys(k, v, None, causal=True, cu_seqlens=cu_seqlens) if cache is None else cache.append(layer, k, v)


def scale_of(config: Any, layer: int) -> float:
    """The factor of attention's scores."""
    scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale
