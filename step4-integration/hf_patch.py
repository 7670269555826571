"""Step 2's attention under transformers' own GPT-2, and out again.

transformers looks two things up by the name of the attention implementation: the function that computes attention, and
the function that makes its mask. Both are registered here under one name. With the first alone the model would call
ours with no mask at all, and causality would be lost without a word.

    from hf_patch import patched
    with patched(model):
        model.generate(ids)
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2Model, GPT2PreTrainedModel
from transformers.masking_utils import causal_mask_function

import step2_attention  # not installed? pip install -e ..

NAME = "kernel_fusion"
_BEFORE = "_before_kernel_fusion"  # of a patched model: what `remove` gives back
# What a call may hand on to attention that changes what attention is.
NOT_OURS = ("head_mask", "position_bias", "softcap", "s_aux", "sliding_window", "cache")


class CausalMask:
    """Stands where a mask would, so that a layer which gradient checkpointing computes again is the same or an error.

    Checkpointing gives the layer what it got the first time. Ours knows this object. Other implementations read it as a
    tensor, and learn that the patch has gone in between.
    """

    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise RuntimeError(
            f"{NAME}: a layer that ran under the patch is computed again without it, by gradient checkpointing; call "
            f"backward inside `with patched(model)` too"
        )

    def __getitem__(self, key):
        return self.__torch_function__()


CAUSAL = CausalMask()


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    """What transformers calls in each GPT2Attention: q, k, v [batch, heads, length, head_dim], views into packed rows.

    The queries are the last of the keys, which is step 2's lower-right alignment: it covers a prompt, a prompt in
    chunks, and a single new token.
    """
    if attention_mask is not CAUSAL:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{NAME}: a layer that ran without the patch is computed again under it, by gradient checkpointing; "
                f"call the model inside `with patched(model)` too, or backward outside"
            )
        if attention_mask is not None:
            raise ValueError(
                f"{NAME}: `attention_mask` must be None or all ones: step 2's attention knows only the causal mask, "
                f"got a mask of shape {tuple(attention_mask.shape)}"
            )
    if not (module.is_causal and (is_causal is None or is_causal)):
        raise ValueError(f"{NAME}: `is_causal` must be True, of a layer and of the call: the patch is causal attention")
    for name in NOT_OURS:
        if kwargs.get(name) is not None:
            raise ValueError(f"{NAME}: `{name}` must be None: step 2's attention has no such thing")
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
    config=None,
    **kwargs,
) -> CausalMask:
    """What transformers calls once a forward pass for the mask. Ours needs none; what it cannot do is refused here."""
    if cache_position is not None:  # transformers before 5.4 gives the queries' positions instead of length and offset
        q_length, q_offset = len(cache_position), int(cache_position[0])
    q_end, k_end = int(q_offset) + q_length, kv_offset + kv_length
    if not getattr(config, "is_causal", True):
        raise ValueError(
            f"{NAME}: `is_causal` must be True, of the config and of the call: the patch is causal attention"
        )
    if mask_function is not causal_mask_function:
        raise ValueError(
            f"{NAME}: packed sequences (`position_ids` that start again) and masks other than the causal one are not "
            f"supported; step 2's attention knows only the causal mask"
        )
    given = k_end if attention_mask is None else attention_mask.shape[-1]
    if given < q_end:
        raise ValueError(
            f"{NAME}: `attention_mask` must be as long as the keys, {q_end}, got {given}: those past its end would be "
            f"hidden, and padding is not supported"
        )
    if q_end != k_end:
        raise ValueError(
            f"{NAME}: the queries must be the last of the keys, got queries {int(q_offset)} to {q_end - 1} among "
            f"{kv_length} keys; a static cache does this, use a dynamic one; so does, without a cache, an "
            f"`attention_mask` that is longer than the tokens"
        )
    if attention_mask is not None and not attention_mask[:, kv_offset:k_end].all():
        raise ValueError(
            f"{NAME}: `attention_mask` must be all ones: padding is not supported; give prompts of equal length. If "
            f"you gave no mask, `generate` made one, 0 wherever a prompt holds `pad_token_id`: give it one of ones"
        )
    return CAUSAL


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, causal_only)


def refuse_weights(model, args, kwargs) -> None:
    """Before each call of a patched model: it has no weights of attention to give, and transformers would give none."""
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and model.config.output_attentions):
        raise ValueError(f"{NAME}: `output_attentions` must be False: step 2's attention never holds the weights")


def configs(model: GPT2PreTrainedModel) -> list[GPT2Config]:
    """What the model and its layers look into, each once: as a rule one object."""
    of_all = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in of_all if isinstance(config, GPT2Config)}.values())


def apply(model: GPT2PreTrainedModel) -> None:
    """Makes `model` compute attention by step 2's op. `remove` undoes it.

    The model gets a config of its own, a copy, and keeps it: another model may have been made from the same one.

    Raises:
        TypeError: `model` is no GPT-2 of transformers.
        ValueError: it has cross-attention, or was patched before.
    """
    if not isinstance(model, GPT2PreTrainedModel):
        raise TypeError(f"apply: `model` must be a GPT-2 of transformers, got {type(model).__name__}")
    if model.config.add_cross_attention:
        raise ValueError("apply: `model` must not have cross-attention (`config.add_cross_attention`)")
    if any(config._attn_implementation == NAME for config in configs(model)):
        raise ValueError("apply: `model` is patched already")
    own = {id(config): copy.deepcopy(config) for config in configs(model)}
    hooks = []
    for module in model.modules():
        if id(getattr(module, "config", None)) in own:
            module.config = own[id(module.config)]
        if isinstance(module, GPT2Model):
            hooks.append(module.register_forward_pre_hook(refuse_weights, with_kwargs=True))
    setattr(model, _BEFORE, ([(config, config._attn_implementation) for config in own.values()], hooks))
    for config in own.values():
        config._attn_implementation = NAME


def remove(model: GPT2PreTrainedModel) -> None:
    """Gives `model` the attention back that it had before `apply`."""
    if not hasattr(model, _BEFORE):
        raise ValueError("remove: `model` is not patched")
    implementations, hooks = getattr(model, _BEFORE)
    for config, implementation in implementations:
        config._attn_implementation = implementation
    for hook in hooks:
        hook.remove()
    delattr(model, _BEFORE)


@contextlib.contextmanager
def patched(model: GPT2PreTrainedModel) -> Iterator[torch.nn.Module]:
    """`apply` on entering, `remove` on leaving, also by an exception.

    Layers under gradient checkpointing are computed again in `backward`, which belongs inside as well, or is an error.
    What this cannot see: `torch.utils.checkpoint(use_reentrant=True)` around the whole model, with dropout.
    """
    apply(model)
    try:
        yield model
    finally:
        remove(model)
