"""The MLP as one op, too: bias and GELU in the first product's epilogue, bias and residual in the second's.

Change: the MLP's inner row, four times as wide as the others, is written once and read once; in training GELU's
gradient is in the epilogue of the product before it as well. For few rows the whole MLP is one launch.
"""

from model.blocks.v3_attention_block import attend_and_norm
from step3_fused import layer_norm, mlp  # not installed? pip install -e ..


def block(weights, y, x, norm, config, layer, cache, cu_seqlens):
    y, x = attend_and_norm(weights, y, x, config, layer, cache, cu_seqlens)
    first, second = weights.mlp.c_fc, weights.mlp.c_proj
    x = mlp(
        y, first.weight, first.bias, second.weight, second.bias, x, approximate=config.gelu, rung=config.rung("mlp")
    )
    return layer_norm(x, norm.weight, norm.bias, eps=config.layer_norm_epsilon, rung=config.rung("layer_norm")), x
