"""Prompts read and tokens added for a number of rows: by CUDA graphs on a GPU, by plain calls elsewhere.

A graph is a list of launches that was recorded once. Replaying it costs the CPU some microseconds where calling the
ops one by one costs milliseconds. It is recorded with addresses, so ids, lengths and the cache stay where they are,
and what changes from token to token lies in the device's memory.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from model.cache import KVCache
from step4_integration import PACKED_RUNGS, decode_check, decode_pack, decode_pack_refusal, places

SHORTEST = 16  # prompts are read as if they were of 16, 32, 64 or 128 tokens, or of a multiple of 128: few graphs
MOST_ROWS = 8  # by decode_step; it takes up to 32, but from 12 on the block's ops are faster
# From so many new tokens on weights are packed: on an H200 that takes 0.6 ms at 124M and 5 at 1558M, and saves 0.09 and
# 0.4 a token of one row; of four of 1558M 0.15, which pays from 35 on.
PACKED_FOR, AUTO_PACKED = 16, "v4_clusters"
PROMPT_TOKENS = 1 << 15  # more are read in parts, so that their activations need less memory


def read_as(length: int, most: int) -> int:
    """How many tokens a prompt of `length` is padded to, at most `most`."""
    padded = -(-length // 128) * 128 if length > 64 else max(SHORTEST, 1 << (length - 1).bit_length())
    return min(padded, most)


class Changed(Exception):
    """A runner's graphs were recorded of other weights than the model has; asked anew, `runner_of` gives another."""


class Runner:
    """A model with the buffers for `rows` texts. `logits` [rows, vocab] are those of the tokens that come next.

    `with` borrows it for one call, behind which it is kept for the next one; after an error it is not, since nobody
    knows what that left.
    """

    def __init__(self, model: Any, rows: int):
        self.config, weight = model.config, model.wte.weight
        self._rungs = dict(model.config.rungs)
        self.cache = KVCache(model.config, rows, dtype=weight.dtype, device=weight.device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.logits = torch.empty(rows, self.config.vocab_size, dtype=weight.dtype, device=weight.device)
        self._begin = torch.zeros(rows, dtype=torch.int32, device=weight.device)
        self._device = weight.device
        self.model = weakref.ref(model)  # which need not live as long as its buffers
        self.kept_in: dict[int, Runner] = {}  # by `runner_of`
        self._weights = Weights(model)
        self._packed: torch.Tensor | None = None  # the weights once more, for a rung that this text is to have
        self._memory: torch.Tensor | None = None  # where they were packed for an earlier one
        self._prompts: dict[tuple[int, int], Prompt] = {}
        self._steps: dict[bool, torch.cuda.CUDAGraph] = {}  # by whether the weights are packed
        on_gpu = self._device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        # Graphs of a pool share its memory only where they are recorded on one stream. It must be of this device:
        # torch's own, where none is given, is of the device that recorded first.
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._done = torch.cuda.Event() if on_gpu else None

    def is_of(self, model: Any) -> bool:
        """Whether the recorded graphs still are those of the model: its weights lie where they lay."""
        return self.has_config_of(model) and self._weights.are_unchanged()

    def has_config_of(self, model: Any) -> bool:
        return model.config is self.config and model.config.rungs == self._rungs

    def _check(self) -> None:
        if self._weights.are_unchanged():
            return
        if self._pool:  # who writes into the buffers, on whichever stream, must have ended before they are given back
            torch.cuda.current_stream(self._device).synchronize()
        raise Changed

    @functools.cached_property
    def _by_step(self) -> bool:
        return self.cache.batch <= MOST_ROWS and self.model().takes_steps()

    @functools.cached_property
    def _sharing(self) -> dict[str, Any]:
        return self.model().step_sharing()

    def __enter__(self) -> "Runner":
        """What is launched from here on waits for the call before, which may have been on another stream."""
        if self._done and not self._done.query():  # to ask is sooner done than to wait
            torch.cuda.current_stream(self._device).wait_event(self._done)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: Any) -> None:
        if error:
            return
        if self._packed is not None:
            decode_check(self._packed)
        if self._done:
            self._done.record(torch.cuda.current_stream(self._device))
        with _lock:
            if self.kept_in is not _runners.get(self.model()):
                return  # `forget` was called meanwhile
            self.kept_in.pop(self.cache.batch, None)
            make_room(self.kept_in)
            self.kept_in[self.cache.batch] = self

    @functools.cached_property  # of weights that lie elsewhere, or are others, this is no runner
    def _pack_refusal(self) -> str:
        model = self.model()
        return decode_pack_refusal(model.wte.weight, model.step_weights(), rung=AUTO_PACKED, rows=self.cache.batch)

    def _packs(self, new_tokens: int) -> str | None:
        """The rung that is to add the tokens from packed weights: by name, or by "auto" one that can and is worth its
        packing. None: no such rung."""
        rung = self.config.rung("decode_step")
        if not self._by_step or self._sharing:
            return None
        if rung != "auto":
            return rung if rung in PACKED_RUNGS else None
        pays = self._pool and new_tokens >= PACKED_FOR
        return AUTO_PACKED if pays and not self._pack_refusal else None

    def read(self, ids: torch.Tensor, lengths: list[int], new_tokens: int = 0) -> None:
        """Begins anew with prompts [batch, length], of `lengths` tokens each; the rows of the runner are `rows/batch`
        for each. What stands in `ids` behind a prompt does not matter, if it is in the vocabulary. `new_tokens`: how
        many will be added at most. Raises `Changed`."""
        batch, length = ids.shape
        self._packed = None
        whole = batch * length <= PROMPT_TOKENS
        padded = read_as(length, self.config.n_positions) if whole and self._pool else length
        prompt = self._prompts.get((batch, padded))
        packs = self._packs(new_tokens)
        # A graph reads the prompt while the host looks whether it is the model's still: it writes what is ours alone.
        looks_later = prompt is not None and packs is None
        if not looks_later:
            self._check()
        if packs is not None:
            model = self.model()  # packed anew for each text: training and load_state_dict write weights in place
            weights = model.wte.weight, model.step_weights()
            self._packed = self._memory = decode_pack(*weights, self._memory, rung=packs)
        if prompt is None:
            prompt = Prompt(self, batch, padded)
            if whole and self._pool:  # one that is read in parts takes so long that its launching does not count
                prompt.graph = self.recorded(prompt.run)
                self._prompts[batch, padded] = prompt
        if self.config.blocks == "v1_torch":  # see KVCache: what an earlier text left may be NaN
            self.cache.k.zero_()
            self.cache.v.zero_()
        prompt.take(ids, lengths)
        if prompt.graph:
            prompt.graph.replay()
        else:
            prompt.run()
        if looks_later:
            self._check()
        if batch < self.cache.batch:
            samples = self.cache.batch // batch
            for cache in (self.cache.k, self.cache.v):
                cache[:, :, :, :length] = cache[:, :batch, :, :length].repeat_interleave(samples, dim=1)
            self.cache.end.copy_(prompt.cache.end.repeat_interleave(samples))
            self.logits.copy_(prompt.logits.repeat_interleave(samples, dim=0))
        self.cache.length, self.cache.ragged = max(lengths), min(lengths) < max(lengths)

    def step(self) -> None:
        """Adds `token` to each row, and computes the logits after it."""
        if not self._pool:
            return self._run_step()
        packed = self._packed is not None
        if packed not in self._steps:
            end, length = self.cache.end.clone(), self.cache.length

            def run() -> None:  # it is called twice, and the slot that it writes is written again
                self.cache.length = length
                self._run_step()

            self._steps[packed] = self.recorded(run)
            self.cache.end.copy_(end)
            self.cache.length = length
        self._steps[packed].replay()
        self.cache.length += 1

    def _run_step(self) -> None:
        model, config, cache = self.model(), self.config, self.cache
        if self._by_step:
            own = model.own_logits(self.logits)
            torch.ops.step4_integration.decode_step.out(
                self.token, cache.end, self._begin, model.wte.weight, model.wpe.weight, model.step_weights(),
                cache.k, cache.v, self._packed, scale=None if config.scale_attn_weights else 1.0,
                scale_by_layer=config.scale_attn_by_inverse_layer_idx, eps=config.layer_norm_epsilon,
                approximate=config.gelu, rung=config.rung("decode_step"), logits=own, **self._sharing,
            )  # fmt: skip
            if own is not self.logits:
                model.gather_logits(own, self.logits)
            cache.length += 1
        else:
            with torch.autocast(self._device.type, enabled=False):
                model.logits(model.hidden(self.token[:, None], cache)[:, 0], self.logits)

    def recorded(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """`run` as a graph. It runs once before: what is set up at first use is no launch of the graph's."""
        with _recording, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads call meanwhile, such as a loader of data, is none of the graph's.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        return graph


class Prompt:
    """Buffers for a batch of prompts of one padded length, and what is done with them."""

    def __init__(self, runner: Runner, batch: int, length: int):
        whole = batch == runner.cache.batch
        self._model, self.cache = runner.model, runner.cache if whole else runner.cache.first(batch)
        self.logits = runner.logits if whole else torch.empty_like(runner.logits[:batch])
        device = self.logits.device
        self.ids = torch.zeros(batch, length, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._lengths = [1] * batch
        self._last = torch.zeros(batch, dtype=torch.int64, device=device)  # of each prompt, where its last token is

    def take(self, ids: torch.Tensor, lengths: list[int]) -> None:
        """The prompts to be read, [batch, length], of `lengths` tokens each."""
        length = ids.shape[1]
        (self.ids if length == self.ids.shape[1] else self.ids[:, :length]).copy_(ids, non_blocking=self.ids.is_cuda)
        if length < self.ids.shape[1]:
            self.ids[:, length:].zero_()  # an id outside the vocabulary would be NaN, which no mask hides
        if lengths != self._lengths:
            self._last.copy_(torch.tensor([length - 1 for length in lengths], device="cpu"))
            self._lengths = lengths

    def run(self) -> None:
        """Reads the prompts into an empty cache, and computes the logits after the last token of each.

        Later tokens are not seen by earlier ones, so what stands behind a prompt's end changes nothing: its keys are
        written, and written over.
        """
        model, cache = self._model(), self.cache
        cache.length, cache.ragged = 0, False
        batch, length = self.ids.shape
        part = max(1, PROMPT_TOKENS // batch)
        hidden = None
        with torch.autocast(self.ids.device.type, enabled=False):
            for begin in range(0, length, part):
                cache.ragged = False  # of rows that have ended what is written further is written over
                ids = self.ids[:, begin : begin + part]
                last = self._last if part >= length else (self._last - begin).clamp(0, ids.shape[1] - 1)
                among = model.hidden(ids, cache, last=last)[:, 0]
                hidden = among if hidden is None else torch.where((self._last >= begin)[:, None], among, hidden)
            model.logits(hidden, self.logits)
        if part < length:
            torch.add(self._last, 1, out=cache.end)


class Weights:
    """The parameters of a model and where they lie, to be compared with later. The model itself is not held; on a GPU
    the memory of its parameters is, since a graph may be replayed before they are compared."""

    def __init__(self, model: nn.Module):
        self._memory = [parameter.detach() for parameter in model.parameters() if parameter.is_cuda]
        self._holders = [each for m in model.modules() for each in (m._modules, m._parameters)]
        self._held = [list(holder.values()) for holder in self._holders]  # no other object gets their addresses
        self._places = places(self._holders)

    def are_unchanged(self) -> bool:
        return places(self._holders) == self._places


KEPT = 2  # runners of a model; each holds a cache for all positions
_lock, _recording = threading.Lock(), threading.Lock()
_runners: weakref.WeakKeyDictionary[nn.Module, dict[int, Runner]] = weakref.WeakKeyDictionary()


def runner_of(model: Any, rows: int) -> Runner:
    """The model's runner for so many rows, to be borrowed: the one of the last calls, where the model is as it was.

    Whether its weights are the model's still, `Runner.read` looks. Who calls meanwhile, another thread or an
    `on_token`, gets one of their own.
    """
    with _lock:
        kept = _runners.setdefault(model, {})
        runner = kept.pop(rows, None)
        if runner is None or not runner.has_config_of(model):
            runner = None  # its memory goes before there is another
            for other in [other for other, old in kept.items() if not old.is_of(model)]:
                del kept[other]  # it would hold weights that are no longer the model's
            make_room(kept)
    runner = runner or Runner(model, rows)
    runner.kept_in = kept
    return runner


def make_room(kept: dict[int, Runner]) -> None:
    """Lets go of the runners that were not used for longest, so that another may come."""
    while len(kept) >= KEPT:
        del kept[next(iter(kept))]


def forget(model: Any) -> None:
    """Gives back the memory of the model's caches and graphs."""
    _runners.pop(model, None)
