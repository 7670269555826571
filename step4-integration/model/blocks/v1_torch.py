"""A block of PyTorch's own operations, one for each line of the formula: what the others are held against.

About 10 launches a block on a GPU. Between any two the whole tensor goes to memory and comes back.
"""

import torch
from torch.nn import functional as F

from model.blocks.shared import join_heads, scale_of, split_heads, with_keys


def block(weights, y, x, norm, config, layer, cache, cu_seqlens):
    qkv = split_heads(product(y, weights.attn.c_attn), config)
    q, x, keys = with_keys(cache, layer, qkv, x, cu_seqlens)
    attended = attention(q, keys, scale_of(config, layer))
    y, x = add_and_norm(product(join_heads(attended), weights.attn.c_proj), x, weights.ln_2, config)
    hidden = F.gelu(product(y, weights.mlp.c_fc), approximate=config.gelu)
    return add_and_norm(product(hidden, weights.mlp.c_proj), x, norm, config)


def product(x, weights):
    """`x @ weight + bias`; the weight lies [in, out]."""
    return F.linear(x, weights.weight.T, weights.bias)


def add_and_norm(update, x, norm, config):
    x = x + update
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, config.layer_norm_epsilon), x


def attention(q, keys, scale):
    """PyTorch's, with a mask where its own causal one, aligned to the first key, is not what is meant."""
    queries, count = q.shape[2], keys.k.shape[2]
    if keys.causal and queries == count and keys.cu_seqlens is None:
        return F.scaled_dot_product_attention(q, keys.k, keys.v, is_causal=True, scale=scale)
    j = torch.arange(count, device=q.device)
    seen = torch.ones(queries, count, dtype=torch.bool, device=q.device)
    if keys.causal:
        seen = j <= torch.arange(queries, device=q.device)[:, None] + count - queries
    if keys.end is not None:
        seen = seen & (j < keys.end[:, None, None, None])
    if keys.cu_seqlens is not None:
        document = torch.bucketize(j, keys.cu_seqlens, right=True)
        seen = seen & (document[:, None] == document)
    return F.scaled_dot_product_attention(q, keys.k, keys.v, attn_mask=seen, scale=scale)
