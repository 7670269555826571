"""One step of training: forward and backward of each part of the batch, clipping, AdamW. Nothing waits for the GPU."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from gpt2_model import GPT2
from torch import nn

from training.batches import Packed
from training.optimizer import set_rate

WARM_UP = 3  # steps before one is captured: libraries get their memory, AdamW its moments


Part = torch.Tensor | Packed  # windows [batch, length + 1], or these as a row of documents


def cross_entropy(model: GPT2, part: Part) -> torch.Tensor:
    """Mean loss in nats of each token but the first, of a window or of a document, given those before it."""
    if isinstance(part, Packed):
        return model.loss(*part)
    windows = part.long()
    return model.loss(windows[:, :-1], windows[:, 1:])


Collect = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]  # weights, and their gradients


class _Copies(torch.autograd.Function):
    """Tensors in another dtype, all in a few launches, and their gradients back in the tensors' own; or in their own,
    where they are the tensors. `collect` is given the gradients, in place of the tensors."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, collect: Collect | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.collect, ctx.tensors = collect, tensors
        return _copies(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.collect is None:
            return None, None, *_copies(gradients, ctx.tensors[0].dtype)
        ctx.collect(ctx.tensors, gradients)
        return None, None, *[None] * len(gradients)


def _copies(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """In that dtype; views, where it is the tensors' own."""
    if tensors[0].dtype == dtype:
        return tuple(tensor.view_as(tensor) for tensor in tensors)
    found = tuple(torch.empty_like(tensor, dtype=dtype) for tensor in tensors)
    torch._foreach_copy_(found, tensors)
    return found


class Place(NamedTuple):
    """Where a module has one of its weights."""

    parameters: dict[str, torch.Tensor | None]
    name: str
    weight: torch.Tensor


def places_in(*modules: nn.Module) -> list[Place]:
    every = [module._parameters for root in modules for module in root.modules()]
    return [Place(found, name, weight) for found in every for name, weight in found.items() if weight is not None]


@contextlib.contextmanager
def weights_in(model: GPT2, dtype: torch.dtype, collect: Collect | None = None) -> Iterator[None]:
    """Within it the model computes in bfloat16, if `dtype` is that, with copies of its weights, all made at once. The
    backward pass belongs within it, too, for it may compute again; it adds to the gradients of the weights themselves.

    `collect`: is given the gradients in place of the weights, those of a block together, as soon as they are there.
    Autograd turns first to what was made last: a block's copies are made when it is called, each time anew, and so it
    turns to them before the block in front.
    """
    half = dtype == torch.bfloat16
    places, hooks = places_in(model), []
    of_blocks = {block: places_in(block.attn, block.mlp) for block in model.h} if collect else {}
    later = {id(place.weight) for each in of_blocks.values() for place in each}

    def put(places: Sequence[Place]) -> None:
        weights = [place.weight for place in places]
        made = _Copies.apply(dtype if half else weights[0].dtype, collect, *weights)
        for place, copy in zip(places, made, strict=True):
            place.parameters[place.name] = copy

    try:
        if half or collect:
            put([place for place in places if id(place.weight) not in later])
            for block, own in of_blocks.items():
                hooks.append(block.register_forward_pre_hook(lambda *_, own=own: put(own)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for place in places:
            place.parameters[place.name] = place.weight


def each_tensor(function: Callable, part: Part, *others: Part) -> Part:
    """A part of which each tensor is what `function` makes of it, and of those of others beside it."""
    return Packed(*map(function, part, *others)) if isinstance(part, Packed) else function(part, *others)


def weights_of(parts: Sequence[Part]) -> Sequence[int | torch.Tensor]:
    """How much each part's mean counts: as many as it has tokens to predict, which packed ones have more or less of."""
    return [(part.targets != -100).sum() if isinstance(part, Packed) else 1 for part in parts]


def backward(model: GPT2, parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
    """Adds the gradient of the mean loss of all parts, which are of one size, to the parameters'. Returns that loss."""
    total = torch.zeros((), device=model.wte.weight.device, dtype=model.wte.weight.dtype)
    weights = weights_of(parts)
    whole = sum(weights)
    with weights_in(model, dtype):
        for part, weight in zip(parts, weights, strict=True):
            loss = cross_entropy(model, part) * (weight / whole)
            loss.backward()
            total += loss.detach()
    return total


def clip_gradients(model: GPT2, most: float) -> None:
    """Makes all gradients together of the norm `most`, where theirs is greater."""
    nn.utils.clip_grad_norm_(model.parameters(), most)


def step(
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
    rate: float,
    *,
    dtype: torch.dtype = torch.float32,
    clip: float = 1.0,
    backward: Callable[..., torch.Tensor] = backward,
    clip_gradients: Callable[[GPT2, float], Any] = clip_gradients,
) -> torch.Tensor:
    """One step of training; returns the loss, not waited for.

    Args:
        parts: the batch in parts of one size, each with a forward and a backward pass of its own.
        rate: this step's learning rate.
        dtype: bfloat16 to compute in it.
        clip: the greatest norm that all gradients together keep.
        backward, clip_gradients: called as those of this module; several workers have their own.
    """
    set_rate(optimizer, rate)
    return _step(model, optimizer, parts, dtype, clip, backward, clip_gradients)


def _step(
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
    dtype: torch.dtype,
    clip: float,
    backward: Callable[..., torch.Tensor] = backward,
    clip_gradients: Callable[[GPT2, float], Any] = clip_gradients,
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = backward(model, parts, dtype)
    clip_gradients(model, clip)
    optimizer.step()
    return loss


class GraphStep:
    """`step` as one CUDA graph. The first steps are taken as they come, on the stream of the capture; then one is
    captured, and this and all later ones are replays. Batches come into the same memory, and so does the rate.
    """

    def __init__(self, device: torch.device, **workers: Callable) -> None:
        """`workers`: what several have of their own, as of `step`."""
        self.device, self.stream, self.workers = device, torch.cuda.Stream(device), workers
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self,
        model: GPT2,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[Part],
        rate: float,
        *,
        dtype: torch.dtype = torch.float32,
        clip: float = 1.0,
    ) -> torch.Tensor:
        set_rate(optimizer, rate)
        with torch.cuda.device(self.device):
            if self.taken < WARM_UP:
                self.taken += 1
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    loss = _step(model, optimizer, parts, dtype, clip, **self.workers)
                torch.cuda.current_stream().wait_stream(self.stream)
                return loss.clone()
            if self.graph is None:
                self.parts = [each_tensor(torch.empty_like, part) for part in parts]
                self.graph = torch.cuda.CUDAGraph()
                optimizer.zero_grad(set_to_none=True)  # gradients get their memory within the graph
                # thread_local: what NCCL's watchdog asks meanwhile is none of the graph's.
                with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                    self.loss = _step(model, optimizer, self.parts, dtype, clip, **self.workers)
            for own, part in zip(self.parts, parts, strict=True):
                each_tensor(torch.Tensor.copy_, own, part)
            self.graph.replay()
            return self.loss.clone()
