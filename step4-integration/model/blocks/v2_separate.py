"""The same block on this project's ops, one for each part: attention of step 2, bias and GELU of step 1, sum and
LayerNorm of step 3. Change: the scores of attention are never written, what is elementwise goes through memory once,
and a single new token is attended to by `attention_decode`, which shares a row's keys out over the GPU.

The products are step 2's `linear`.
"""

import torch

from model.blocks.shared import join_heads, scale_of, split_heads, with_keys
from step1_simple import bias_gelu  # not installed? pip install -e ..
from step2_attention import attention, attention_decode, linear
from step3_fused import residual_layer_norm


def block(weights, y, x, norm, config, layer, cache, cu_seqlens):
    qkv = split_heads(product(y, weights.attn.c_attn, config), config)
    q, x, keys = with_keys(cache, layer, qkv, x, cu_seqlens)
    attended = attend(q, keys, scale_of(config, layer), config)
    y, x = add_and_norm(product(join_heads(attended), weights.attn.c_proj, config), x, weights.ln_2, config)
    raw = linear(y, weights.mlp.c_fc.weight, rung=config.rung("linear"))
    hidden = bias_gelu(raw, weights.mlp.c_fc.bias, approximate=config.gelu, rung=config.rung("bias_gelu"))
    return add_and_norm(product(hidden, weights.mlp.c_proj, config), x, norm, config)


def product(x, weights, config, out=None):
    """`x @ weight + bias`, in `out` if that is given."""
    if out is not None:
        return torch.ops.step2_attention.linear.out(x, weights.weight, weights.bias, rung=config.rung("linear"), y=out)
    return linear(x, weights.weight, weights.bias, rung=config.rung("linear"))


def attend(q, keys, scale, config):
    if keys.end is not None:  # one query a row, over a cache
        return attention_decode(q, keys.k, keys.v, None, keys.end, scale=scale, rung=config.rung("attention_decode"))
    return attention(
        q, keys.k, keys.v, cu_seqlens=keys.cu_seqlens, causal=keys.causal, scale=scale, rung=config.rung("attention")
    )


def add_and_norm(update, x, norm, config):
    """Adds `update` to the residual stream `x`. Returns the sum's LayerNorm by `norm`, and the sum."""
    rung = config.rung("residual_layer_norm")
    return residual_layer_norm(update, x, norm.weight, norm.bias, eps=config.layer_norm_epsilon, rung=rung)
