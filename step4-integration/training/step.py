"""One step of training: forward and backward of each part of the batch, clipping, AdamW. Nothing waits for the GPU."""

import contextlib
from collections.abc import Sequence

import torch
from gpt2_model import GPT2

from training.optimizer import set_rate

WARM_UP = 3  # steps before one is captured: libraries get their memory, AdamW its moments


def cross_entropy(model: GPT2, windows: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats of each token of `windows` [batch, length + 1] but the first, given those before it."""
    windows = windows.long()
    return model.loss(windows[:, :-1], windows[:, 1:])


def autocast(model: GPT2, dtype: torch.dtype) -> torch.autocast:
    """Ops in bfloat16, if `dtype` is that; the weights themselves stay in float32."""
    return torch.autocast(model.wte.weight.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def weights_cast_once(model: GPT2) -> contextlib.AbstractContextManager:
    """Autocast keeps a weight that it has cast until its outermost region ends. This is one around all parts of a
    batch, in which nothing is cast, so that backward passes, which belong outside of autocast, find it as they should.
    """
    return torch.autocast(model.wte.weight.device.type, enabled=False)


def backward(model: GPT2, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Adds the gradient of the mean loss of all parts, which are of one size, to the parameters'. Returns that loss."""
    total = torch.zeros((), device=model.wte.weight.device, dtype=model.wte.weight.dtype)
    with weights_cast_once(model):
        for windows in parts:
            with autocast(model, dtype):
                loss = cross_entropy(model, windows) / len(parts)
            loss.backward()
            total += loss.detach()
    return total


def step(
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[torch.Tensor],
    rate: float,
    *,
    dtype: torch.dtype = torch.float32,
    clip: float = 1.0,
) -> torch.Tensor:
    """One step of training; returns the loss, not waited for.

    Args:
        parts: the batch in parts [batch, length + 1] of one size, each with a forward and a backward pass of its own.
        rate: this step's learning rate.
        dtype: bfloat16 for autocast.
        clip: the greatest norm that all gradients together keep.
    """
    set_rate(optimizer, rate)
    return _step(model, optimizer, parts, dtype, clip)


def _step(
    model: GPT2, optimizer: torch.optim.Optimizer, parts: Sequence[torch.Tensor], dtype: torch.dtype, clip: float
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = backward(model, parts, dtype)
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss


class GraphStep:
    """`step` as one CUDA graph. The first steps are taken as they come, on the stream of the capture; then one is
    captured, and this and all later ones are replays. Batches come into the same memory, and so does the rate.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self,
        model: GPT2,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[torch.Tensor],
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
                    loss = _step(model, optimizer, parts, dtype, clip)
                torch.cuda.current_stream().wait_stream(self.stream)
                return loss.clone()
            if self.graph is None:
                self.parts = [torch.empty_like(part) for part in parts]
                self.graph = torch.cuda.CUDAGraph()
                optimizer.zero_grad(set_to_none=True)  # gradients get their memory within the graph
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.loss = _step(model, optimizer, self.parts, dtype, clip)
            for own, part in zip(self.parts, parts, strict=True):
                own.copy_(part)
            self.graph.replay()
            return self.loss.clone()
