"""A process that trains, alone: what of a training is done otherwise where there are several, see parallel.py."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from gpt2_model import GPT2

from training import checkpoint
from training.run import Run
from training.step import GraphStep, step, weights_in

Found = TypeVar("Found")


class Worker:
    """Number `rank` of `workers`. It computes part `share` of `shares` of each batch: several may share one."""

    rank, workers = 0, 1
    share, shares = 0, 1

    def check(self, run: Run) -> None:
        """This training can be shared out so; a ValueError says why not."""

    def check_same(self, about: dict[str, Any]) -> None:
        """All workers are to train the same, or a ValueError names what is not."""

    def first(self, work: Callable[[], Found]) -> Found | None:
        """Does this on worker 0, while the others wait; where it fails, it fails on all."""
        return work()

    def place(self, model: GPT2, run: Run) -> GPT2:
        """What this worker has of the model, the same on all before."""
        return model

    def computing(self, model: GPT2, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        """In it the model computes in bfloat16, if `dtype` is that."""
        return weights_in(model, dtype)

    def step(self, run: Run, device: torch.device) -> Callable[..., torch.Tensor]:
        """What takes a step, called as `training.step.step`."""
        return GraphStep(device) if run.graph else step

    def save(
        self,
        out: pathlib.Path,
        number: int,
        model: GPT2,
        optimizer: torch.optim.Optimizer,
        about: dict[str, Any],
        *,
        keep: int,
        config: dict[str, Any],
    ) -> None:
        """As `checkpoint.save`."""
        checkpoint.save(out, number, model, optimizer, about, keep=keep, config=config)

    def load(self, path: pathlib.Path, model: GPT2, optimizer: torch.optim.Optimizer) -> int:
        """As `checkpoint.load`.

        Raises:
            ValueError: the checkpoint is one of shards, which `Sharded` of parallel.py reads.
        """
        if (path / checkpoint.SHARDS).exists():
            raise ValueError(f"train: {path} is of shards: train_parallel.py --parallel fsdp2 goes on from it")
        return checkpoint.load(path, model, optimizer)

    def save_model(self, out: pathlib.Path, model: GPT2, entries: dict[str, Any]) -> None:
        """As `save_pretrained`."""
        model.save_pretrained(out, **entries)
