"""The forms of GPT-2's block: a ladder as of a kernel, each file one idea further than the one before.

A form is a function `block(weights, y, x, norm, config, layer, cache, cu_seqlens)`. `y` is the block's input,
normalised, and `x` the residual stream, both [batch, length, n_embd]; `norm` is the LayerNorm that stands after the
block: the next block's first, or the model's last; `cu_seqlens` says where a packed row's documents begin, or is None.
It returns the next `y`, normalised by `norm`, and the next `x`. All forms compute the same, and the tests hold each
against the one before.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from model.blocks import v1_torch, v2_separate, v3_attention_block, v4_products

FORMS = {
    "v1_torch": v1_torch.block,  # PyTorch's operations, one by one
    "v2_separate": v2_separate.block,  # an op of steps 1 to 3 for each
    "v3_attention_block": v3_attention_block.block,  # attention to LayerNorm in one op
    "v4_products": v4_products.block,  # and the products with what stands behind them
}


def recomputed(form: Callable) -> Callable:
    """The same form; of its activations training keeps its inputs alone, and computes the others again."""

    def block(*arguments: Any) -> Any:
        return checkpoint(form, *arguments, use_reentrant=False)

    return block
