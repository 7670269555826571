"""Step 2's attention under transformers' own GPT-2, or whole blocks on our ops, and out again.

transformers looks two things up by the name of the attention implementation: the function that computes attention, and
the function that makes its mask. Both are registered here under one name. With the first alone the model would call
ours with no mask at all, and causality would be lost without a word.

    from hf_patch import patched
    with patched(model):
        model.generate(ids)

`blocks=True` replaces the forward of each block as well. pages/hugging_face.md says what that is good for.
"""

import contextlib
import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator

import torch
import transformers
from packaging.version import Version  # transformers needs it, too
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2Model, GPT2PreTrainedModel
from transformers.activations import ACT2FN
from transformers.masking_utils import causal_mask_function
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from transformers.pytorch_utils import Conv1D

import step2_attention  # not installed? pip install -e ..
import step3_fused
from kernel_fusion.ops import needs_gradients

NAME = "kernel_fusion"
TESTED = ("5.0.0", "5.23.0")  # the oldest and the newest version of transformers that the tests ran with
_BEFORE = "_before_kernel_fusion"  # of a patched model: what `remove` gives back
FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # FlashAttention's, of packed sequences
# What a call may hand on to attention that changes what attention is.
NOT_OURS = ("head_mask", "position_bias", "softcap", "s_aux", "sliding_window", "cache")


class CausalMask:
    """Stands where a mask would: causal, and of each text the keys that exist.

    Gradient checkpointing gives a layer that it computes again what the layer got the first time. Ours knows this
    object. Other implementations read it as a tensor, and learn that the patch has gone in between.

    Attributes:
        key_begin, key_end: as step 2's `attention` takes them.
        keys: which keys are given to it, so that the queries are the last of them and none is hidden in between: the
            first so many, or those of these indices, [B or 1, number]. None for all.
        holes: which texts' masks are no run of ones, bool [B], where nobody could look. They become NaN.
        cu_seqlens: of packed sequences, where each begins, all texts one behind the other; as `attention` takes it.
    """

    ndim, shape = 4, (0, 0, 0, 0)  # what transformers hands on as it is

    def __init__(self, key_begin=None, key_end=None, keys=None, holes=None, cu_seqlens=None):
        self.key_begin, self.key_end, self.keys, self.holes = key_begin, key_end, keys, holes
        self.cu_seqlens = cu_seqlens

    def contiguous(self):
        return self

    def applied(self, module, q, k, v):
        """q, k and v for attention that is causal and knows `key_begin` and `key_end`."""
        if self.holes is not None and module.layer_idx == 0:  # what is NaN there stays so
            q = q.masked_fill(self.holes[:, None, None, None], torch.nan)
        if isinstance(self.keys, torch.Tensor):
            indices = self.keys[:, None, :, None].expand(*k.shape[:2], -1, k.shape[3])
            return q, k.gather(2, indices), v.gather(2, indices)
        return (q, k, v) if self.keys is None else (q, k[:, :, : self.keys], v[:, :, : self.keys])

    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise RuntimeError(
            f"{NAME}: a layer that ran under the patch is computed again without it, by gradient checkpointing; call "
            f"backward inside `with patched(model)` too"
        )

    def __getitem__(self, key):
        return self.__torch_function__()


# ---- attention ----


def check_layer(module, attention_mask, kwargs) -> None:
    """What a layer of causal attention cannot do, by its name."""
    if not isinstance(attention_mask, CausalMask):
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{NAME}: a layer that ran without the patch is computed again under it, by gradient checkpointing; "
                f"call the model inside `with patched(model)` too, or backward outside"
            )
        if attention_mask is not None:
            raise ValueError(
                f"{NAME}: `attention_mask` must be None or of two dimensions: step 2's attention knows only the causal "
                f"mask and padding, got a mask of shape {tuple(attention_mask.shape)}"
            )
    if not (module.is_causal and kwargs.get("is_causal") in (None, True)):
        raise ValueError(f"{NAME}: `is_causal` must be True, of a layer and of the call: the patch is causal attention")
    if kwargs.get("cu_seq_lens_q") is not None:  # `take_documents` has not seen it
        raise ValueError(f"{NAME}: `cu_seq_lens_q` must be given to a call of the model, not of its `forward`")
    for name in NOT_OURS:
        if kwargs.get(name) is not None:
            raise ValueError(f"{NAME}: `{name}` must be None: step 2's attention has no such thing")


def in_one_row(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, head_dim] as one text [1, heads, batch * length, head_dim]: a view, as GPT-2 has them."""
    return x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def check_packed(q: torch.Tensor, k: torch.Tensor) -> None:
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{NAME}: `past_key_values` must be empty where sequences are packed, holds {k.shape[2] - q.shape[2]} keys"
        )


def scale_of(module: GPT2Attention) -> float:
    scale = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    return scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale


def attend(q, k, v, mask: CausalMask, scale: float, dropout: float) -> torch.Tensor:
    """Attention [batch, heads, queries, head_dim]. The queries are the last of the keys, step 2's alignment.

    It covers a prompt, a prompt in chunks, and a single new token, for which there is an op of its own.
    """
    if mask.cu_seqlens is not None:
        check_packed(q, k)
        rows = (in_one_row(t) for t in (q, k, v))
        out = step2_attention.attention(*rows, cu_seqlens=mask.cu_seqlens, causal=True, scale=scale, dropout_p=dropout)
        return out[0].unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)
    if q.shape[2] == 1 and not dropout and not needs_gradients(q, k, v):
        return step2_attention.attention_decode(q, k, v, mask.key_begin, mask.key_end, scale=scale)
    return step2_attention.attention(q, k, v, mask.key_begin, mask.key_end, causal=True, scale=scale, dropout_p=dropout)


def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """What transformers calls in each GPT2Attention: q, k, v [batch, heads, length, head_dim], views of packed rows."""
    check_layer(module, attention_mask, kwargs)
    mask = CausalMask() if attention_mask is None else attention_mask
    scale = scale_of(module) if scaling is None else scaling  # before 5.4 there is none
    out = attend(*mask.applied(module, query, key, value), mask, scale, dropout)
    return out.transpose(1, 2), None


# ---- its mask ----


def runs_of_ones(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where in each row of a bool [B, keys] the first ones begin and end, and whether others come after them."""
    key_begin = seen.view(torch.uint8).argmax(-1).int()
    key_end = key_begin + seen.sum(-1, dtype=torch.int32)
    after = torch.arange(seen.shape[1], device=seen.device) >= key_end[:, None]
    return key_begin, key_end, (seen & after).any(-1)


def hidden_first(seen: torch.Tensor) -> torch.Tensor:
    """The keys' indices, hidden ones first and each kind in its order. A single query does not care for the order."""
    return seen.byte().argsort(dim=-1, stable=True)


# What transformers makes the mask of packed sequences of, besides `causal_mask_function`.
PACKING = ("and_masks", "packed_sequence_mask_function", "remap_positions_for_packed_sequence")


def is_packing(mask_function: Callable) -> bool:
    """Whether a mask is made of the causal one and of packed sequences, and of nothing else."""
    if mask_function is causal_mask_function:
        return True
    held = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    parts = [part for one in held for part in (one if isinstance(one, tuple | list) else [one]) if callable(part)]
    maker = getattr(mask_function, "__qualname__", "").partition(".")[0]
    return maker in PACKING and all(is_packing(part) for part in parts)


def starts_of(mask_function: Callable, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Where packed sequences begin, all rows one behind the other: where a token does not see the one before it.

    Nobody waits for their number: there is room for one that begins at each token, and what is left over is empty.
    """
    row, query = torch.arange(batch, device=device)[:, None], torch.arange(1, length, device=device)
    begins = nn.functional.pad(~mask_function(row, row.new_zeros(()), query, query - 1), (1, 0), value=True)
    places = torch.arange(batch * length, dtype=torch.int32, device=device)
    starts = places.masked_fill(~begins.expand(batch, -1).flatten(), batch * length).sort().values
    return nn.functional.pad(starts, (0, 1), value=batch * length)


def can_look(device: torch.device) -> bool:
    """Whether the host may look at numbers on `device`, and wait for them."""
    return not torch.compiler.is_compiling() and not (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )


def causal_mask(
    *,
    kv_length,
    q_length=None,
    q_offset=0,
    kv_offset=0,
    mask_function=causal_mask_function,
    attention_mask=None,
    cache_position=None,
    config=None,
    batch_size=1,
    **kwargs,
) -> CausalMask:
    """What transformers calls once a forward pass for the mask. What ours cannot do is refused here.

    On a GPU it waits for the mask's numbers, once, as transformers' own masks do; without a mask for nothing.
    """
    if isinstance(attention_mask, CausalMask):  # `generate` made it before the call, as for a model that is compiled
        return attention_mask
    if cache_position is not None:  # transformers before 5.4 gives the queries' positions instead of length and offset
        q_length, q_offset = len(cache_position), cache_position[0]
    if not getattr(config, "is_causal", True):
        raise ValueError(
            f"{NAME}: `is_causal` must be True, of the config and of the call: the patch is causal attention"
        )
    if mask_function is not causal_mask_function:
        # torch.compile cannot look into a function, nor at positions: there GPT-2 takes all for packed sequences.
        if not torch.compiler.is_compiling() and not is_packing(mask_function):
            raise ValueError(f"{NAME}: masks other than the causal one and packed sequences are not supported")
        device = kwargs["device"] if cache_position is None else cache_position.device
        return CausalMask(cu_seqlens=starts_of(mask_function, batch_size, q_length, device))
    if isinstance(q_offset, torch.Tensor) and q_length > 1 and can_look(q_offset.device):
        q_offset = int(q_offset)
    keys = q_offset + q_length - kv_offset  # so many exist; a static cache has room for more
    on_host = not isinstance(keys, torch.Tensor)

    key_begin = key_end = holes = None
    if attention_mask is not None:
        given, k_end = attention_mask.shape[-1], kv_offset + (keys if on_host else kv_length)
        if on_host and given < k_end:
            raise ValueError(
                f"{NAME}: `attention_mask` must be as long as the keys, {k_end}, got {given}: those past its end would "
                f"be hidden"
            )
        seen = attention_mask[:, kv_offset:k_end].bool()
        if not on_host:  # always of one shape: a compiled model is not compiled again
            seen = nn.functional.pad(seen, (0, kv_length - seen.shape[1]))
            seen = seen & (torch.arange(kv_length, device=seen.device) < keys)
        key_begin, key_end, holes = runs_of_ones(seen)
        if can_look(seen.device):
            has_holes, hides_none = torch.stack([holes.any(), seen.all()]).tolist()
            if has_holes and q_length == 1:  # as after a prompt with padding on its right
                return CausalMask((~seen).sum(-1, dtype=torch.int32), keys=hidden_first(seen))
            if has_holes:
                raise ValueError(
                    f"{NAME}: `attention_mask` must be one run of ones in each row, with padding before and after it; "
                    f"row {int(holes.int().argmax())} has a hole. If you gave no mask, `generate` made one, 0 wherever "
                    f"a prompt holds `pad_token_id`: give it one of ones"
                )
            holes = None
            if hides_none and on_host:
                key_begin = key_end = None
    if on_host:
        return CausalMask(key_begin, key_end, None if keys >= kv_length else keys, holes)
    # The number of keys stands on the device: in a static cache's decoding, and where a prompt is read under
    # torch.compile. There the queries become the last of the keys by moving all keys to the end.
    key_end = keys.int().repeat(batch_size) if key_end is None else key_end
    if q_length == 1:
        return CausalMask(key_begin, key_end, None, holes)
    moved = (kv_length - keys).int()
    indices = (torch.arange(kv_length, device=keys.device) - moved).clamp(min=0)
    key_begin = moved.repeat(batch_size) if key_begin is None else key_begin + moved
    return CausalMask(key_begin, key_end + moved, indices[None], holes)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, causal_mask)


# ---- blocks ----

# What GPT2Block.forward is called with, by position, in this version of transformers.
PARAMETERS = list(inspect.signature(GPT2Block.forward).parameters)[1:]
RETURNS_TUPLE = "output_attentions" in PARAMETERS  # before 5.3
# A layer's forward does gradient checkpointing, so one that stands in its place has to; in older versions its caller.
FORWARD_CHECKPOINTS = "__call__" not in vars(GradientCheckpointingLayer)
GELUS = {
    type(ACT2FN[name]): approximate
    for name, approximate in {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}.items()
}


def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether nobody has put something else in the module's place, or would notice that it is not called."""
    return (
        type(module) is kind
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
    )


def is_ours(module: nn.Module, kind: type, x: torch.Tensor) -> bool:
    """Whether an op of ours may stand for a layer: ours have a bias and take one dtype, which autocast makes."""
    if not is_plain(module, kind) or module.bias is None:
        return False
    return torch.is_autocast_enabled(x.device.type) or module.weight.dtype == x.dtype


def product(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Conv1D. What LoRA or a quantisation has put in its place is called as it is."""
    return step2_attention.linear(x, module.weight, module.bias) if is_ours(module, Conv1D, x) else module(x)


def layer_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if is_ours(module, nn.LayerNorm, x):
        return step3_fused.layer_norm(x, module.weight, module.bias, eps=module.eps)
    return module(x)


def attention_part(block: GPT2Block, x, cache, mask, cache_position):
    """`x` with attention's output added, and its second LayerNorm."""
    attn, dropout, norm = block.attn, block.attn.resid_dropout, block.ln_2
    batch, length, width = x.shape
    packed = product(attn.c_attn, layer_norm(block.ln_1, x)).view(batch, length, 3, attn.num_heads, attn.head_dim)
    q, k, v = packed.permute(2, 0, 3, 1, 4)  # views [batch, heads, length, head_dim]: nothing is copied
    if cache is not None:
        cache = getattr(cache, "self_attention_cache", cache)
        positions = [] if cache_position is None else [{"cache_position": cache_position}]  # before 5.4
        k, v = cache.update(k, v, attn.layer_idx, *positions)
    q, k, v = mask.applied(attn, q, k, v)
    scale, attention_dropout_p = scale_of(attn), attn.attn_dropout.p if attn.training else 0.0
    if q.dtype == x.dtype and residual_is_ours(attn.c_proj, dropout, x) and is_ours(norm, nn.LayerNorm, x):
        rows = (q, k, v, x)
        if mask.cu_seqlens is not None:
            check_packed(q, k)
            rows = (*(in_one_row(t) for t in (q, k, v)), x.reshape(1, -1, width))
        y, x = step3_fused.attention_block(
            *rows, attn.c_proj.weight, attn.c_proj.bias, norm.weight, norm.bias, mask.key_begin, mask.key_end,
            cu_seqlens=mask.cu_seqlens, causal=True, scale=scale, dropout_p=dropout.p,
            attention_dropout_p=attention_dropout_p, training=attn.training, eps=norm.eps,
        )  # fmt: skip
        return x.view(batch, length, width), y.view(batch, length, width)
    heads = attend(q, k, v, mask, scale, attention_dropout_p).transpose(1, 2).reshape(batch, length, width)
    x = x + dropout(product(attn.c_proj, heads))
    return x, layer_norm(norm, x)


def residual_is_ours(projection: nn.Module, dropout: nn.Module, x: torch.Tensor) -> bool:
    """Under autocast transformers' residual stream stays as wide as it is, which ours would round."""
    autocast = torch.is_autocast_enabled(x.device.type)
    return not autocast and is_plain(dropout, nn.Dropout) and is_ours(projection, Conv1D, x)


def mlp_part(mlp: GPT2MLP, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`x` with the MLP of `y` added."""
    inner, outer, approximate = mlp.c_fc, mlp.c_proj, GELUS.get(type(mlp.act))
    gelu = approximate is not None and is_plain(mlp.act, type(mlp.act)) and is_ours(inner, Conv1D, y)
    residual = residual_is_ours(outer, mlp.dropout, x)
    drops = mlp.training and mlp.dropout.p > 0
    if gelu and residual and not drops:
        return step3_fused.mlp(y, inner.weight, inner.bias, outer.weight, outer.bias, x, approximate=approximate)
    if gelu:
        hidden = step3_fused.linear_gelu(y, inner.weight, inner.bias, approximate=approximate)
    else:
        hidden = mlp.act(product(inner, y))
    if residual:
        return step3_fused.linear_bias_dropout_residual(
            hidden, outer.weight, outer.bias, x, mlp.dropout.p, training=mlp.training
        )
    return x + mlp.dropout(product(outer, hidden))


def compute_block(block: GPT2Block, *args, **kwargs):
    """GPT2Block's forward by our ops, and by its own modules where somebody has changed one, or chosen an attention."""
    given = dict(zip(PARAMETERS, args, strict=False)) | kwargs
    x, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
    cache, cache_position = given.pop("past_key_values", None), given.pop("cache_position", None)
    if given.pop("encoder_hidden_states", None) is not None:
        raise ValueError(f"{NAME}: `encoder_hidden_states` must be None: the model has no cross-attention")
    if is_plain(block.attn, GPT2Attention) and block.attn.config._attn_implementation == NAME:
        check_layer(block.attn, mask, given)
        x, y = attention_part(block, x, cache, CausalMask() if mask is None else mask, cache_position)
    else:
        if cache_position is not None:
            given["cache_position"] = cache_position
        update, _ = block.attn(layer_norm(block.ln_1, x), past_key_values=cache, attention_mask=mask, **given)
        x = x + update
        y = layer_norm(block.ln_2, x)
    x = mlp_part(block.mlp, y, x) if is_plain(block.mlp, GPT2MLP) else x + block.mlp(y)
    return (x,) if RETURNS_TUPLE else x


def block_forward(block: GPT2Block, *args, **kwargs):
    if FORWARD_CHECKPOINTS and block.gradient_checkpointing and block.training:
        return block._gradient_checkpointing_func(functools.partial(compute_block, block, **kwargs), *args)
    return compute_block(block, *args, **kwargs)


def final_norm_forward(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type) or norm.weight.dtype == x.dtype:
        return step3_fused.layer_norm(x, norm.weight, norm.bias, eps=norm.eps)
    return nn.LayerNorm.forward(norm, x)


# ---- in and out ----


def refuse_weights(model, args, kwargs) -> None:
    """Before each call of a patched model: it has no weights of attention to give, and transformers would give none."""
    asked = kwargs.get("output_attentions")
    if asked or (asked is None and model.config.output_attentions):
        raise ValueError(f"{NAME}: `output_attentions` must be False: step 2's attention never holds the weights")


def take_documents(model, args, kwargs):
    """Before each call of a patched model: FlashAttention's arguments, which say where packed sequences begin, become
    a mask. Not every version of transformers hands them on to the layers."""
    starts, of_keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if starts is None and of_keys is None:
        return None
    given = dict(zip(list(inspect.signature(type(model).forward).parameters)[1:], args, strict=False)) | kwargs
    if starts is None or of_keys is None or starts.shape != of_keys.shape:
        raise ValueError(f"{NAME}: `cu_seq_lens_q` and `cu_seq_lens_k` must both be given, and be the same")
    if can_look(starts.device) and not torch.equal(starts, of_keys):
        raise ValueError(f"{NAME}: `cu_seq_lens_k` must be `cu_seq_lens_q`: a sequence attends to itself")
    if given.get("attention_mask") is not None:
        raise ValueError(f"{NAME}: `attention_mask` must be None where `cu_seq_lens_q` is given")
    others = {name: value for name, value in given.items() if name not in FLASH}
    return (), others | {"attention_mask": CausalMask(cu_seqlens=starts.int())}


def configs(model: GPT2PreTrainedModel) -> list[GPT2Config]:
    """What the model and its layers look into, each once: as a rule one object."""
    of_all = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in of_all if isinstance(config, GPT2Config)}.values())


def replaceable(model: GPT2PreTrainedModel) -> list[tuple[nn.Module, Callable]]:
    """The modules whose forward `blocks=True` replaces, and by what."""
    of_blocks = [(module, block_forward) for module in model.modules() if isinstance(module, GPT2Block)]
    norms = [module.ln_f for module in model.modules() if isinstance(module, GPT2Model)]
    return of_blocks + [(norm, final_norm_forward) for norm in norms if is_plain(norm, nn.LayerNorm)]


def check_version(version: str) -> None:
    """`version` of transformers, against those that are known to work."""
    oldest, newest = (Version(v) for v in TESTED)
    if Version(version) < oldest:
        raise RuntimeError(f"apply: transformers must be {TESTED[0]} or newer, got {version}")
    if Version(version).release[:2] > newest.release[:2]:
        warnings.warn(
            f"apply: tested with transformers {TESTED[0]} to {TESTED[1]}, got {version}; compare a few logits with "
            f"those of the model without the patch",
            stacklevel=3,
        )


def apply(model: GPT2PreTrainedModel, blocks: bool = False) -> None:
    """Makes `model` compute attention by step 2's op. `remove` undoes it.

    The model gets a config of its own, a copy, and keeps it: another model may have been made from the same one.

    Args:
        model: a GPT-2 of transformers, with any head.
        blocks: products, LayerNorms, GELU and residuals of the blocks are ours, too. A module that somebody has put in
            the place of one of theirs, as LoRA does, or hangs a hook on, goes on being called.

    Raises:
        TypeError: `model` is no GPT-2 of transformers.
        ValueError: it has cross-attention, or was patched before; with `blocks`, a block has a forward of its own.
        RuntimeError: transformers is older than what this was tested with. A newer one is a warning.
    """
    check_version(transformers.__version__)
    if not isinstance(model, GPT2PreTrainedModel):
        raise TypeError(f"apply: `model` must be a GPT-2 of transformers, got {type(model).__name__}")
    if model.config.add_cross_attention:
        raise ValueError("apply: `model` must not have cross-attention (`config.add_cross_attention`)")
    if any(config._attn_implementation == NAME for config in configs(model)):
        raise ValueError("apply: `model` is patched already")
    replaced = replaceable(model) if blocks else []
    if any("forward" in vars(module) for module, _ in replaced):
        raise ValueError(
            "apply: a block of `model` must not have a `forward` of its own, as device_map gives it; leave out `blocks`"
        )
    for module, forward in replaced:
        module.forward = functools.partial(forward, module)  # on the object: its class and its parameters stay
    own = {id(config): copy.deepcopy(config) for config in configs(model)}
    hooks = []
    for module in model.modules():
        if id(getattr(module, "config", None)) in own:
            module.config = own[id(module.config)]
        if isinstance(module, GPT2PreTrainedModel):
            hooks.append(module.register_forward_pre_hook(take_documents, with_kwargs=True))
        if isinstance(module, GPT2Model):
            hooks.append(module.register_forward_pre_hook(refuse_weights, with_kwargs=True))
    setattr(model, _BEFORE, ([(config, config._attn_implementation) for config in own.values()], hooks))
    for config in own.values():
        config._attn_implementation = NAME


def remove(model: GPT2PreTrainedModel) -> None:
    """Gives `model` the attention, and the blocks, back that it had before `apply`."""
    if not hasattr(model, _BEFORE):
        raise ValueError("remove: `model` is not patched")
    implementations, hooks = getattr(model, _BEFORE)
    for config, implementation in implementations:
        config._attn_implementation = implementation
    for hook in hooks:
        hook.remove()
    for module in model.modules():
        if getattr(vars(module).get("forward"), "func", None) in (block_forward, final_norm_forward):
            del module.forward
    delattr(model, _BEFORE)


@contextlib.contextmanager
def patched(model: GPT2PreTrainedModel, blocks: bool = False) -> Iterator[torch.nn.Module]:
    """`apply` on entering, `remove` on leaving, also by an exception.

    Layers under gradient checkpointing are computed again in `backward`, which belongs inside as well, or is an error.
    What this cannot see: `torch.utils.checkpoint(use_reentrant=True)` around the whole model, with dropout.
    """
    apply(model, blocks)
    try:
        yield model
    finally:
        remove(model)
