"""How wrong a result is, and how wrong it may be: one measure for tests, benchmarks and the tour."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

FACTOR = 2.0  # times the error of PyTorch composed in the same dtype
_SMALLEST_EXPONENT = {
    dtype: math.frexp(torch.finfo(dtype).smallest_normal)[1] for dtype in (torch.float32, torch.float16, torch.bfloat16)
}
MISROUNDED_SHARE = 0.005  # of a half type's results; clean rungs miss 0.0001, one that rounds an intermediate 0.05


def in_float64(value: Any) -> Any:
    """A copy of `value` in float64 where it is a floating tensor, a copy where it is another tensor, else itself."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(torch.float64, copy=True) if value.is_floating_point() else value.detach().clone()


def as_tuple(outputs: torch.Tensor | tuple | list) -> tuple[torch.Tensor, ...]:
    """The outputs of an op as a tuple, also where it returns a single tensor."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def errors(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|out − reference| of each element, in float64. NaN in `out` counts as infinitely wrong.

    Where `reference` exceeds the range of out's dtype, `out` must hold that very infinity.

    Raises:
        ValueError: another shape, or NaN in `reference`.
    """
    if out.shape != reference.shape:
        raise ValueError(f"`out` has shape {tuple(out.shape)}, `reference` {tuple(reference.shape)}")
    reference = reference.to(torch.float64)
    if reference.isnan().any():
        raise ValueError("`reference` is NaN somewhere; choose inputs whose result is defined")
    rounded = reference.to(out.dtype) if out.is_floating_point() else reference
    error = torch.where(rounded.isinf(), torch.where(out == rounded, 0.0, torch.inf), (out.double() - reference).abs())
    return torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)


def max_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """The greatest of `errors`; 0 for an empty tensor.

    Raises:
        ValueError: as for `errors`.
    """
    found = errors(out, reference)
    return found.max().item() if found.numel() else 0.0


def allowance(reference: torch.Tensor, eager: torch.Tensor) -> float:
    """The error that a result in eager's dtype may have: twice eager's own, and 1e-5·max|reference| (float64: 1e-12).

    Elements where `eager` overflows and `reference` does not say nothing about rounding and are left out.
    """
    if eager.shape != reference.shape:
        raise ValueError(f"`eager` has shape {tuple(eager.shape)}, `reference` {tuple(reference.shape)}")
    if eager.numel() == 0 or not eager.is_floating_point():
        return 0.0
    reference = reference.to(torch.float64)
    eager_error, representable = _eager_error(reference, eager)
    scale = torch.where(representable, reference.abs(), 0.0).max().item()
    return FACTOR * eager_error.max().item() + (1e-12 if eager.dtype == torch.float64 else 1e-5) * scale


def allowances(reference: torch.Tensor, eager: torch.Tensor) -> torch.Tensor:
    """As `allowance`, but for each element: a result that is small must be right to its own digits, if eager's is.

    For most it is `allowance`. For smaller ones, 8 times the greatest error that `eager` has among results up to 1024
    times as large (32 of them or 1 %, at least) and 1e-5 of the element itself. So a softmax whose tail is wrong is
    found beside weights near 1, while a result that is small because large ones cancelled may be as wrong as those.
    """
    largest = allowance(reference, eager)
    reference = reference.to(torch.float64)
    if eager.numel() == 0 or eager.dtype not in _SMALLEST_EXPONENT:
        return torch.full_like(reference, largest)
    eager_error, representable = _eager_error(reference, eager)
    exponent = torch.frexp(torch.nan_to_num(reference)).exponent.to(torch.int64)  # 2^(exponent−1) ≤ |x| < 2^exponent
    smallest = _SMALLEST_EXPONENT[eager.dtype]
    octave = torch.where(reference == 0, smallest, exponent).clamp_(min=smallest) - smallest
    count = torch.bincount(octave.flatten())
    worst = torch.zeros(len(count), dtype=torch.float64, device=reference.device)
    worst = worst.scatter_reduce_(0, octave.flatten(), eager_error.flatten(), "amax").cummax(0).values

    octaves = torch.arange(len(count), device=count.device)
    enough = torch.searchsorted(count.cumsum(0), min(octave.numel(), max(32, octave.numel() // 100)))
    among = worst[torch.maximum(octaves + 10, enough).clamp_(max=len(count) - 1)]
    own = torch.ldexp(torch.ones_like(worst), octaves + smallest)
    float64_itself = 1e-12 * torch.where(representable, reference.abs(), 0.0).max()
    return (8 * among + 1e-5 * own + float64_itself).clamp_(max=largest)[octave]


def misrounded(out: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Which elements are not `reference` rounded to out's half type. In wider types: none, there it takes luck.

    A kernel that computes in float32 and rounds once, at the end, misses few: those that lie so close to the middle of
    two half numbers that float32's own error decides. One that rounds an intermediate misses a tenth or a third.
    """
    if out.dtype not in (torch.float16, torch.bfloat16):
        return torch.zeros(out.shape, dtype=torch.bool, device=out.device)
    return out != reference.to(out.dtype)


def round_as_well(out: torch.Tensor, wide: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Which elements are `misrounded` in `out` and not in `wide`, and how many of them may be.

    `wide` was computed in float32 from the same inputs and rounded once. Where it misses, float32's digits do not
    reach: a long sum, or large numbers that cancel. As many may be missed elsewhere, since another formula has its weak
    spots elsewhere, and 0.5 % of all, at least 4.
    """
    missed = misrounded(wide, reference)
    return misrounded(out, reference) & ~missed, int(missed.sum()) + max(4, int(MISROUNDED_SHARE * out.numel()))


def _eager_error(reference: torch.Tensor, eager: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager's error, 0 where it overflows and says nothing; and where `reference` can be represented at all."""
    representable = reference.to(eager.dtype).isfinite()
    return torch.where(representable & eager.isfinite(), (eager.double() - reference).abs(), 0.0), representable


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty, in C++ too, gives memory full of NaN."""
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    before = torch.get_deterministic_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Dd]eterministic.*", category=UserWarning)
        torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports the compiler, for a second
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            settings.fill_uninitialized_memory = filled
