"""How wrong a result is, and how wrong it may be: one measure for tests, benchmarks and the tour."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

FACTOR = 2.0  # times the error of PyTorch composed in the same dtype


def in_float64(value: Any) -> Any:
    """A copy of `value` in float64 where it is a floating tensor, a copy where it is another tensor, else itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(torch.float64, copy=True) if value.is_floating_point() else value.detach().clone()


def as_tuple(outputs: torch.Tensor | tuple | list) -> tuple[torch.Tensor, ...]:
    """The outputs of an op as a tuple, also where it returns a single tensor."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def max_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """The greatest |out − reference|, in float64. NaN in `out` counts as infinitely wrong.

    Where `reference` exceeds the range of out's dtype, `out` must hold that very infinity.

    Raises:
        ValueError: shapes differ, or `reference` is NaN somewhere, so that nothing could be said.
    """
    if out.shape != reference.shape:
        raise ValueError(f"`out` has shape {tuple(out.shape)}, `reference` {tuple(reference.shape)}")
    if out.numel() == 0:
        return 0.0
    reference = reference.to(torch.float64)
    if reference.isnan().any():
        raise ValueError("`reference` is NaN somewhere; choose inputs whose result is defined")
    rounded = reference.to(out.dtype) if out.is_floating_point() else reference
    error = torch.where(rounded.isinf(), torch.where(out == rounded, 0.0, torch.inf), (out.double() - reference).abs())
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf).max().item()


def allowance(reference: torch.Tensor, eager: torch.Tensor) -> float:
    """The error that a result in eager's dtype may have: twice eager's own, and 1e-5·max|reference| (float64: 1e-12).

    Elements where `eager` overflows and `reference` does not say nothing about rounding and are left out.
    """
    if eager.shape != reference.shape:
        raise ValueError(f"`eager` has shape {tuple(eager.shape)}, `reference` {tuple(reference.shape)}")
    if eager.numel() == 0 or not eager.is_floating_point():
        return 0.0
    reference = reference.to(torch.float64)
    representable = reference.to(eager.dtype).isfinite()
    measured = representable & eager.isfinite()
    eager_error = torch.where(measured, (eager.double() - reference).abs(), 0.0).max().item()
    scale = torch.where(representable, reference.abs(), 0.0).max().item()
    return FACTOR * eager_error + (1e-12 if eager.dtype == torch.float64 else 1e-5) * scale


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty, in C++ too, gives memory full of NaN."""
    settings = torch.utils.deterministic.fill_uninitialized_memory
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Dd]eterministic.*", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = settings
