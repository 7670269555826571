"""Attention, its projection, bias, residual and LayerNorm as one op, step 3's `attention_block`.

Change: three calls become one, and for few rows one launch. The MLP is as before.
"""

from model.blocks.shared import scale_of, split_heads, with_keys
from model.blocks.v2_separate import add_and_norm, product
from step1_simple import bias_gelu  # not installed? pip install -e ..
from step2_attention import linear
from step3_fused import attention_block


def block(weights, y, x, norm, config, layer, cache, cu_seqlens):
    y, x = attend_and_norm(weights, y, x, config, layer, cache, cu_seqlens)
    raw = linear(y, weights.mlp.c_fc.weight, rung=config.rung("linear"))
    hidden = bias_gelu(raw, weights.mlp.c_fc.bias, approximate=config.gelu, rung=config.rung("bias_gelu"))
    return add_and_norm(product(hidden, weights.mlp.c_proj, config), x, norm, config)


def attend_and_norm(weights, y, x, config, layer, cache, cu_seqlens):
    """The block's first half: adds attention over `y` to `x`. Returns the sum's LayerNorm by ln_2, and the sum."""
    rows = None if cache is None else cache.rows_of(layer, y.shape[1])
    qkv = split_heads(product(y, weights.attn.c_attn, config, rows), config)
    q, x, keys = with_keys(cache, layer, qkv, x, cu_seqlens)
    projection, norm = weights.attn.c_proj, weights.ln_2
    return attention_block(
        q, keys.k, keys.v, x, projection.weight, projection.bias, norm.weight, norm.bias, None, keys.end,
        cu_seqlens=keys.cu_seqlens, causal=keys.causal, scale=scale_of(config, layer), eps=config.layer_norm_epsilon,
        rung=config.rung("attention_block"),
    )  # fmt: skip
