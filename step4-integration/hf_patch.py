"""Step 2's attention under transformers' own GPT-2, and out again.

transformers looks two things up by the name of the attention implementation: the function that computes attention, and
the function that makes its mask. Both are registered here under one name. With the first alone the model would call
ours with no mask at all, and causality would be lost without a word.

    from hf_patch import patched
    with patched(model):
        model.generate(ids)
"""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()
from transformers import AttentionInterface, AttentionMaskInterface, GPT2PreTrainedModel
from transformers.masking_utils import causal_mask_function

import step2_attention

NAME = "kernel_fusion"
_BEFORE = "_implementation_before_kernel_fusion"


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """What transformers calls in each GPT2Attention: q, k, v [batch, heads, length, head_dim], views into packed rows.

    The queries are the last of the keys, which is step 2's lower-right alignment: it covers a prompt, a prompt in
    chunks, and a single new token.
    """
    if attention_mask is not None:
        raise ValueError(
            f"{NAME}: `attention_mask` must be None or all ones: step 2's attention knows only the causal mask, got a "
            f"mask of shape {tuple(attention_mask.shape)}"
        )
    out = step2_attention.attention(query, key, value, causal=True, scale=scaling, dropout_p=dropout)
    return out.transpose(1, 2), None


def causal_only(
    *,
    kv_length,
    q_length=None,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    cache_position=None,
    **kwargs,
) -> None:
    """What transformers calls once a forward pass for the mask. Ours needs none; what it cannot do is refused here."""
    if cache_position is not None:  # transformers before 5.4 gives the queries' positions instead of length and offset
        q_length, q_offset = len(cache_position), int(cache_position[0])
    if mask_function is not causal_mask_function:
        raise ValueError(
            f"{NAME}: packed sequences (`position_ids` that start again) and masks other than the causal one are not "
            f"supported; step 2's attention knows only the causal mask"
        )
    if q_offset + q_length != kv_offset + kv_length:
        raise ValueError(
            f"{NAME}: the queries must be the last of the keys, got queries {int(q_offset)} to "
            f"{int(q_offset) + q_length - 1} among {kv_length} keys; a static cache does this, use a dynamic one"
        )
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            f"{NAME}: `attention_mask` must be all ones: padding is not supported; give prompts of equal length"
        )


def apply(model: GPT2PreTrainedModel) -> None:
    """Makes `model` compute attention by step 2's op. `remove` undoes it.

    Raises:
        TypeError: `model` is no GPT-2 of transformers.
        ValueError: it has cross-attention, or was patched before.
    """
    if not isinstance(model, GPT2PreTrainedModel):
        raise TypeError(f"apply: `model` must be a GPT-2 of transformers, got {type(model).__name__}")
    if model.config.add_cross_attention:
        raise ValueError("apply: `model` must not have cross-attention (`config.add_cross_attention`)")
    if model.config._attn_implementation == NAME:
        raise ValueError("apply: `model` is patched already")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, causal_only)
    setattr(model, _BEFORE, model.config._attn_implementation)
    model.set_attn_implementation(NAME)


def remove(model: GPT2PreTrainedModel) -> None:
    """Gives `model` the attention back that it had before `apply`."""
    if not hasattr(model, _BEFORE):
        raise ValueError("remove: `model` is not patched")
    model.set_attn_implementation(getattr(model, _BEFORE))
    delattr(model, _BEFORE)


@contextlib.contextmanager
def patched(model: GPT2PreTrainedModel) -> Iterator[torch.nn.Module]:
    """`apply` on entering, `remove` on leaving, also by an exception."""
    apply(model)
    try:
        yield model
    finally:
        remove(model)
