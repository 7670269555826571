"""AdamW as GPT-2 is trained, and its learning rate."""

import math

import torch
from gpt2_model import GPT2


def optimizer_of(model: GPT2, rate: float, *, weight_decay: float = 0.1, in_a_graph: bool = False) -> torch.optim.AdamW:
    """AdamW, on a GPU as one kernel for many tensors; weight decay on matrices alone.

    With `in_a_graph` the rate lies on the GPU, where a replay of a CUDA graph reads it, and so does the count of steps.
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    device = matrices[0].device
    return torch.optim.AdamW(
        groups,
        lr=torch.tensor(rate, device=device) if in_a_graph else rate,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=device.type == "cuda",
        capturable=in_a_graph,
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def schedule(progress: float, warm_up: float = 0.05) -> float:
    """The learning rate's factor: up over the first part of the training, then down to a tenth along a cosine."""
    if progress < warm_up:
        return progress / warm_up
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
