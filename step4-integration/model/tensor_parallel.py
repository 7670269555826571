"""GPT-2 whose matrices are split over the workers of a group, as Megatron-LM splits them: tensor parallel.

A worker has some heads, some columns of the MLP and some of the vocabulary, and computes with them as if they were
all. A half of a block then ends in a sum over the workers, one all-reduce; vectors, positions and LayerNorm are the
same everywhere. Shoeybi et al., https://arxiv.org/abs/1909.08053.
"""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpt2_model import GPT2, Config, positions_of
from torch import nn
from torch.nn import functional as F

from model.all_reduce import MOST_WIDTH, MOST_WORKERS, PeerMemory, SharedBuffer, see_each_other
from model.blocks import v1_torch, v2_separate
from model.blocks.shared import join_heads, scale_of, split_heads, with_keys
from model.cache import KVCache
from step3_fused import linear_gelu  # not installed? pip install -e ..
from step4_integration import cross_entropy, decode_step_bytes, decode_step_header

CHUNK_BYTES = 1 << 30  # of logits in float32 that exist at a time
# Of each worker a tensor, into one tensor: 2.13 has a new name for it.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


# ---- who has what ----


def bounds(count: int, workers: int) -> list[int]:
    """Where each worker's share of `count` things begins, and where the last one's ends. The first ones have one more
    where they do not divide: 25 heads are 7, 6, 6 and 6."""
    most, more = divmod(count, workers)
    return [worker * most + min(worker, more) for worker in range(workers + 1)]


class Split(NamedTuple):
    """How a parameter is split along a dimension: into `parts` that lie side by side, each into `count` things of
    `size`."""

    dim: int
    count: int
    size: int = 1
    parts: int = 1

    def pieces(self, worker: int, workers: int) -> list[tuple[int, int]]:
        """Where each piece of a worker's share begins, and how long it is."""
        begin, end = bounds(self.count, workers)[worker : worker + 2]
        return [((part * self.count + begin) * self.size, (end - begin) * self.size) for part in range(self.parts)]

    def share(self, whole: torch.Tensor, worker: int, workers: int) -> torch.Tensor:
        pieces = [whole.narrow(self.dim, begin, length) for begin, length in self.pieces(worker, workers)]
        return torch.cat(pieces, self.dim)

    def joined(self, shares: list[torch.Tensor]) -> torch.Tensor:
        """What `share` took apart."""
        parts = [share.chunk(self.parts, self.dim) for share in shares]
        return torch.cat([worker[part] for part in range(self.parts) for worker in parts], self.dim)


def split_of(name: str, config: Config) -> Split | None:
    """How the parameter of that name is split; None for one that all workers have whole."""
    inner = 4 * config.n_embd if config.n_inner is None else config.n_inner
    unit = 8 if inner % 8 == 0 else 1  # 16 bytes of a half type: rows stay aligned
    heads, columns = (config.n_head, config.head_dim), (inner // unit, unit)
    splits = {
        "wte.weight": Split(0, config.vocab_size),
        "attn.c_attn.weight": Split(1, *heads, parts=3),
        "attn.c_attn.bias": Split(0, *heads, parts=3),
        "attn.c_proj.weight": Split(0, *heads),
        "mlp.c_fc.weight": Split(1, *columns),
        "mlp.c_fc.bias": Split(0, *columns),
        "mlp.c_proj.weight": Split(0, *columns),
    }
    return next((split for end, split in splits.items() if name.endswith(end)), None)


@dataclasses.dataclass(frozen=True)
class LocalConfig(Config):
    """A model's sizes as one worker sees them: `n_head` is its own heads, of `head_dim` numbers each."""

    head_dim: int = 0

    def __post_init__(self):
        """The whole model's have been checked; here `n_embd` need be no multiple of `n_head`."""


# ---- what moves between workers ----


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copied(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`x`, of which each worker makes something else: its gradient is the sum of theirs, an all-reduce. Under autocast
    in autocast's dtype, as the product behind it takes it: the sum then is of half as many bytes."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _Copied.apply(x, group)


def summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of the workers' `x`, contiguous, written over it: an all-reduce. Each worker's has the sum's gradient."""
    return _Summed.apply(x, group)


def gathered(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The workers' `x`, which may differ in length along `dim` by shares of different sizes; no gradients."""
    workers = dist.get_world_size(group)
    length = torch.tensor(x.shape[dim], device=x.device)
    lengths = torch.empty(workers, dtype=length.dtype, device=x.device)
    all_gather(lengths, length[None], group=group)
    return gathered_as(x, dim, lengths.tolist(), group)


def gathered_as(x: torch.Tensor, dim: int, lengths: list[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The same where the lengths are known, so that nobody waits for the GPU."""
    first = x.transpose(0, dim)
    padded = first.new_empty(max(lengths), *first.shape[1:])
    padded[: len(first)].copy_(first)
    found = padded.new_empty(len(lengths) * len(padded), *first.shape[1:])
    all_gather(found, padded, group=group)
    shares = zip(found.chunk(len(lengths)), lengths, strict=True)
    return [share[:length].transpose(0, dim) for share, length in shares]


# ---- a block ----


class Part(NamedTuple):
    """A worker's rows of a matrix. The bias is added once, to the sum."""

    weight: torch.Tensor
    bias: None = None


PLAIN = types.SimpleNamespace(
    product=lambda x, weights, config: v1_torch.product(x, weights),
    attend=lambda q, keys, scale, config: v1_torch.attention(q, keys, scale),
    inner=lambda y, weights, config: F.gelu(v1_torch.product(y, weights), approximate=config.gelu),
    add_and_norm=v1_torch.add_and_norm,
)
OURS = types.SimpleNamespace(
    product=v2_separate.product,
    attend=v2_separate.attend,
    inner=lambda y, weights, config: linear_gelu(y, weights.weight, weights.bias, approximate=config.gelu),
    add_and_norm=v2_separate.add_and_norm,
)


def end(group, ops, memory, update, bias, x, norm, config):
    """The end of a half block: the sum over workers, bias, residual and LayerNorm; and the sum."""
    if memory is not None and memory.takes(update, bias, x, norm.weight):
        return memory.end(update, bias, x, norm, config.layer_norm_epsilon)
    return ops.add_and_norm(summed(update, group) + bias, x, norm, config)


def block(group, ops, memory, weights, y, x, norm, config, layer, cache, cu_seqlens):
    """A form as those of model/blocks/, of their parts: `ops` are PyTorch's or the project's; `memory` is the workers'
    or None."""
    qkv = split_heads(ops.product(copied(y, group), weights.attn.c_attn, config), config)
    q, x, keys = with_keys(cache, layer, qkv, x, cu_seqlens)
    attended = ops.attend(q, keys, scale_of(config, layer), config)
    update = ops.product(join_heads(attended), Part(weights.attn.c_proj.weight), config)
    y, x = end(group, ops, memory, update, weights.attn.c_proj.bias, x, weights.ln_2, config)
    inner = ops.inner(copied(y, group), weights.mlp.c_fc, config)
    update = ops.product(inner, Part(weights.mlp.c_proj.weight), config)
    return end(group, ops, memory, update, weights.mlp.c_proj.bias, x, norm, config)


# ---- the loss ----


class _VocabParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, first, group, dtype, rung):
        """As `linear_cross_entropy`: gradients are made here, a chunk of logits at a time, and multiplied later."""
        device = hidden.device.type
        with torch.autocast(device, enabled=False):
            return _VocabParallelLoss._forward(ctx, hidden, weight, targets, first, group, dtype, rung)

    @staticmethod
    def _forward(ctx, hidden, weight, targets, first, group, dtype, rung):
        counted, wide = targets != -100, torch.promote_types(dtype, torch.float32)
        count = counted.sum()
        rows, weights = hidden.to(dtype), weight.to(dtype)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        needed = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(rows) if needed else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needed else None
        chunk = max(1, CHUNK_BYTES // (4 * len(weight)))
        for begin in range(0, len(rows), chunk):
            part = slice(begin, begin + chunk)
            logits = rows[part] @ weights.T
            own = targets[part] - first
            mine = (own >= 0) & (own < len(weight))
            own = own.where(mine, 0)
            loss, lse = cross_entropy(logits, own, rung=rung)
            # Of each worker a row's lse and, where it has the target, its logit: 8 bytes a row, not the logits.
            told = torch.stack([lse, (lse - loss).where(mine, 0)])
            every = told.new_empty(dist.get_world_size(group), *told.shape)
            all_gather(every, told[None], group=group)
            lse, logit = every[:, 0].logsumexp(0), every[:, 1].sum(0)
            total += (lse - logit).where(counted[part], 0).sum()
            if not needed:
                continue
            grad = logits.to(wide).sub_(lse[:, None]).exp_()
            grad.scatter_add_(1, own[:, None], -mine[:, None].to(wide))
            grad.mul_((counted[part] / count)[:, None])
            grad = grad.to(dtype)
            grad_hidden[part] = grad @ weights
            grad_weight += grad.T @ rows[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / count

    @staticmethod
    def backward(ctx, grad):
        of_hidden, of_weight = (
            (each * grad).to(dtype) for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return of_hidden, of_weight, None, None, None, None, None


# ---- the model ----


class TensorParallel(GPT2):
    """This worker's share of a model: called as that one, together with the others of the group, it gives the same.

    Its form of a block is that of `PLAIN` where the model's is v1_torch, and else that of `OURS`.
    """

    def __init__(self, model: GPT2, group: dist.ProcessGroup, device: torch.device | str | None = None):
        """
        Args:
            model: the whole, the same on all workers.
            device: of the share; None for the model's.

        Raises:
            ValueError: there are more workers than heads, or another thing that is shared.
        """
        worker, workers = dist.get_rank(group), dist.get_world_size(group)
        config = model.config
        for name in ("n_head", "vocab_size"):
            if getattr(config, name) < workers:
                raise ValueError(
                    f"tensor parallel: `{name}` must be at least {workers}, the workers, got {getattr(config, name)}"
                )
        with torch.device("meta"):
            super().__init__(config)
        self.group, self.whole_config, self.recompute = group, config, model.recompute
        self.ops = PLAIN if config.blocks == "v1_torch" else OURS
        heads, words = (bounds(count, workers) for count in (config.n_head, config.vocab_size))
        self.first_word, self.words = words[worker], [e - b for b, e in zip(words, words[1:], strict=False)]
        sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        sizes |= {
            "n_head": heads[worker + 1] - heads[worker], "head_dim": config.head_dim,
            "blocks": config.blocks if config.blocks == "v1_torch" else "v2_separate",
        }  # fmt: skip
        self.config = LocalConfig(**sizes)
        for name, parameter in model.named_parameters():
            module, _, kind = name.rpartition(".")
            share = self.share(name, parameter.detach()).to(device or parameter.device, copy=True)
            setattr(self.get_submodule(module), kind, nn.Parameter(share.contiguous()))

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This worker's part of the parameter `name`, or of what belongs to it."""
        split = split_of(name, self.whole_config)
        if split is None:
            return whole
        return split.share(whole, dist.get_rank(self.group), dist.get_world_size(self.group))

    def whole(self, name: str, share: torch.Tensor) -> torch.Tensor:
        """What `share` took a part of, from all workers of the group."""
        split = split_of(name, self.whole_config)
        return share if split is None else split.joined(gathered(share.detach(), split.dim, self.group))

    def is_split(self, name: str) -> bool:
        return split_of(name, self.whole_config) is not None

    @functools.cached_property
    def memory(self) -> PeerMemory | None:
        """Through which the workers' sums go where that is faster than NCCL, or None. All workers must ask together."""
        few = dist.get_world_size(self.group) <= MOST_WORKERS and self.config.n_embd <= MOST_WIDTH
        device = self.wte.weight.device
        if self.ops is PLAIN or not few or not see_each_other(self.group, device):
            return None
        return PeerMemory(self.group, self.config.n_embd, device)

    @functools.cached_property
    def _step_buffer(self) -> SharedBuffer | None:
        """Through which `decode_step` sums; None where it cannot. All workers must ask together."""
        config, weight = self.config, self.wte.weight
        fits = config.n_embd % 8 == 0 and config.n_embd <= 2048 and config.head_dim % 8 == 0 and config.head_dim <= 128
        if not fits or self.step_weights()[9].numel() % 8 or weight.dtype not in (torch.float16, torch.bfloat16):
            return None
        if self.memory is None:
            return None
        bytes_ = decode_step_bytes(config.n_embd, dist.get_world_size(self.group))
        return SharedBuffer(self.group, bytes_, decode_step_header(), weight.device)

    def takes_steps(self) -> bool:
        return self.whole_config.blocks == "v4_products" and self._step_buffer is not None

    def step_sharing(self) -> dict[str, Any]:
        own = self._step_buffer
        words = list(itertools.accumulate(self.words, initial=0))
        return {
            "buffer": own.buffer, "peers": own.peers, "rank": own.rank, "words": words, "patience": own.patience,
        }  # fmt: skip

    def own_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.new_empty(len(logits), len(self.wte.weight))

    def gather_logits(self, own: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The workers' logits side by side, [..., vocab_size], in `out` if that is given. No gradients."""
        return torch.cat(gathered_as(own, own.dim() - 1, self.words, self.group), -1, out=out)

    def form(self) -> Callable:
        # Training has its sums by NCCL: they have gradients, and are longer than what is summed faster here.
        return functools.partial(block, self.group, self.ops, None if torch.is_grad_enabled() else self.memory)

    def embedded(self, ids: torch.Tensor, cache: KVCache | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """Each worker has the rows of its own tokens; the sum has all."""
        own = ids - self.first_word
        mine = (own >= 0) & (own < len(self.wte.weight))
        rows = F.embedding(own.where(mine, 0), self.wte.weight) * mine[..., None]
        if cu_seqlens is not None:
            places = positions_of(ids, cu_seqlens)
        else:
            places = torch.arange(ids.shape[1], device=ids.device)
            places = places if cache is None or cache.begin is None else places + cache.begin[:, None]
        return summed(rows, self.group) + F.embedding(places, self.wpe.weight)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """All workers', which the loss does without."""
        return self.gather_logits(super().logits(hidden), out)

    def loss(self, ids: torch.Tensor, targets: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """As of the whole model. A row of logits is nowhere in one place."""
        hidden = copied(self.hidden(ids, None, cu_seqlens).flatten(0, 1), self.group)
        device, dtype = hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return _VocabParallelLoss.apply(
            hidden, self.wte.weight, targets.flatten(), self.first_word, self.group, dtype,
            self.config.rung("cross_entropy"),
        )  # fmt: skip

    def save_pretrained(self, folder: Any, **extra: Any) -> None:
        raise NotImplementedError("tensor parallel: a share is not a model; `whole` gathers a parameter")
