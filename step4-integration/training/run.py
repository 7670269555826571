"""What a training is: all that its losses follow from, besides the data and the weights that it begins with."""

import dataclasses
import math

import torch
from generate import check_seed

from training.command import SMALL_RATE, STEPS
from training.optimizer import schedule


@dataclasses.dataclass(frozen=True)
class Run:
    """A checkpoint holds this, and `resume` compares it.

    `batch` windows of `context` tokens make a step, computed in `accumulate` parts; where `context` is None it is all
    of the model's positions. `packed`: no document in a window sees another. `warm_up`, in steps, is a twentieth of
    them where it is None.
    """

    steps: int = STEPS
    batch: int = 8
    accumulate: int = 1
    context: int | None = None
    packed: bool = False
    rate: float = SMALL_RATE
    warm_up: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    recompute: bool = False
    graph: bool = False

    def __post_init__(self):
        for name in ("steps", "batch", "accumulate", "context"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"train: `{name}` must be at least 1, got {number}")
        if self.batch % self.accumulate:
            raise ValueError(
                f"train: `accumulate` must divide `batch`, for its parts are of one size, got {self.accumulate} "
                f"and {self.batch}"
            )
        for name in ("rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"train: `{name}` must be a number above 0, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"train: `weight_decay` must be a number from 0 up, got {self.weight_decay}")
        if self.warm_up is not None and not 0 <= self.warm_up < self.steps:
            raise ValueError(f"train: `warm_up` must be from 0 to {self.steps - 1}, `steps` - 1, got {self.warm_up}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"train: `dtype` must be float32 or bfloat16, got {self.dtype!r}")
        check_seed("train", self.seed)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def rate_of(self, number: int) -> float:
        """The learning rate of step `number`."""
        progress = (number + 1) / self.steps
        return self.rate * (
            schedule(progress) if self.warm_up is None else schedule(progress, self.warm_up / self.steps)
        )
