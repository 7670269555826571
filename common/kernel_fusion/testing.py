"""What a rung must keep to, checked by one call: `check_contract`. And what a registered op must keep to: `check_op`.

Environment:
    KF_TEST_DEVICES    cpu | cuda: only that device. Where it names cuda, a missing GPU is a failure, not a skip.
    KF_SIMT_SCHEDULE   forward | reverse | random:SEED: the order of an emulated block's threads between barriers.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import math
import mmap
import os
import statistics
import sys
import types
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch.autograd import forward_ad

from kernel_fusion import results, stages
from kernel_fusion.accuracy import (
    allowances,
    as_tuple,
    errors,
    in_float64,
    poisoned_allocations,
    round_as_well,
)
from kernel_fusion.fences import Fences

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# Repeated every two bytes: a NaN in each floating type, and none that arithmetic or torch.empty give by themselves.
_POISON = 0xFFFD
_OTHER_FILL = 0x3C3C  # small numbers
_GUARD_BYTES = 4096  # on each side of a tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT = 16  # bytes: what vectors need
_DELAY_CYCLES = 20_000_000  # about ten milliseconds of a GPU doing nothing
_LAYOUTS = ("unaligned", "rows apart", "every second element")
_MORE_LAYOUTS = ("columns first", "outermost inside")  # for a tensor alone


# ---- what to test on ----


def _test_devices() -> tuple[str, ...]:
    asked = os.environ.get("KF_TEST_DEVICES", "")
    if asked not in ("", "cpu", "cuda"):
        raise ValueError(f"KF_TEST_DEVICES must be cpu or cuda, got {asked!r}")
    return (asked,) if asked else ("cpu", "cuda")


def _skip(reason: str) -> list:
    # Who asks for CUDA by name wants to see it fail, not skipped.
    return [] if os.environ.get("KF_TEST_DEVICES") == "cuda" else [pytest.mark.skip(reason=reason)]


def _device_param(device: str):
    needs_gpu = device == "cuda" and not torch.cuda.is_available()
    return pytest.param(device, marks=_skip("needs a GPU") if needs_gpu else [])


DEVICES = [_device_param(device) for device in _test_devices()]


def device_rungs(stage: str, op: str) -> list:
    """A pytest.param(device, rung) for all that runs `op`: plain C++ and emulation on "cpu", the GPU's on "cuda".

    Without a GPU, or in a build without CUDA kernels, the latter are there as skips that say so. Those under emulation
    carry the mark `emulated`.

    Raises:
        ImportError: the stage is not built.
    """
    module = importlib.import_module(stage)
    params = []
    for device in _test_devices():
        marks = []
        names = module.rungs(op, device)
        if device == "cuda":
            if not torch.cuda.is_available():
                marks = _skip("needs a GPU")
            elif not names:
                marks = _skip(f"{stage} is built without CUDA kernels")
            names = names or [name for name in module.rungs(op, "cpu") if name != "cpu"]
        for name in names:
            emulated = [pytest.mark.emulated] if device == "cpu" and name != "cpu" else []
            params.append(pytest.param(device, name, marks=[*marks, *emulated], id=f"{device}-{name}"))
    return params


def where(condition: Callable[..., bool]):
    """Leaves out those cases of a test that `condition` says no to; they are neither run nor counted as passed.

    Args:
        condition: of some of the test's parameters, by their names.
    """
    return pytest.mark.where.with_args(condition)


def randn(shape, dtype: torch.dtype, device, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """`scale` times normal numbers: the same on every device, and in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)


def steps(length: int, device) -> torch.Tensor:
    """Levels to add to the columns of a row (or to keys): parts of it, however it is divided, have different means.

    Such a part has some bits of the column's number in common; each bit that is set adds 1. So what a rung loses where
    it puts parts together (the squares of their distance, how many columns the last one has) is no small share of the
    whole.

    Returns:
        float64 [length], with a mean of about 0.
    """
    column = torch.arange(length, device=device)
    bits = range(max(1, (length - 1).bit_length()))
    return sum((column >> bit & 1).double() - 0.5 for bit in bits)


# ---- memory that shows what was done to it ----


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers: so compared, NaN equals itself and 0 differs from −0."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory that `tensor` lies in, as integers."""
    storage = tensor.untyped_storage()
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.uint8
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)


def _pattern(fill: int, size: int) -> int:
    """The signed integer of `size` bytes that holds `fill` every two bytes."""
    return int.from_bytes(fill.to_bytes(2, "little") * (size // 2), "little", signed=True)


class _Place(NamedTuple):
    """Where in its memory a tensor lies, and what hands that memory out."""

    fences: Fences
    whose: str  # for texts
    at_end: bool = True  # it ends where its memory ends, else it begins where that begins
    unaligned: bool = False  # to what vectors need


def _place(fences: Fences, name: str, layout: str, at_end: bool) -> _Place:
    return _Place(fences, f"`{name}` ({layout})", at_end, unaligned=layout == "unaligned")


def _cut(shape, dtype: torch.dtype, device, place: _Place, fill: int = _POISON) -> tuple[torch.Tensor, int, int]:
    """A buffer full of `fill` as bytes, and where in it a tensor begins and ends.

    Beside it are at least _GUARD_BYTES, but for the side on which the memory ends or begins: there is a fence. What is
    to be aligned and has no whole vectors ends up to 15 bytes before it; what has, and is not to be, an element before.
    """
    size = dtype.itemsize * math.prod(shape)
    if not place.fences.active:
        start = _GUARD_BYTES + (dtype.itemsize if place.unaligned else 0)
        words = -(-(start + size + _GUARD_BYTES) // 8)
        buffer = torch.empty(words, dtype=torch.int64, device=device)
    else:
        whole = -(-(size + _GUARD_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        start = 0
        if place.unaligned:
            start = whole - size - (dtype.itemsize if size % _ALIGNMENT == 0 else 0)
        elif place.at_end:
            start = (whole - size) // _ALIGNMENT * _ALIGNMENT
        buffer = place.fences.memory(whole, start, start + size, place.whose).view(torch.int64)
    return buffer.fill_(_pattern(fill, 8)).view(torch.uint8), start, start + size


class _Guarded:
    """A tensor for outputs, cut from a larger buffer, all of it filled with poison."""

    def __init__(self, shape, dtype: torch.dtype, device, place: _Place, *, fill: int = _POISON):
        self.buffer, self.start, self.end = _cut(shape, dtype, device, place, fill)
        self.fill = fill
        self.tensor = self.buffer[self.start : self.end].view(dtype).view(shape)

    def written_outside(self) -> int:
        """How many bytes of the guards are no longer as they were."""
        guards = (self.buffer[: self.start], self.buffer[self.end :])
        as_they_were = torch.tensor(list(self.fill.to_bytes(2, "little")), dtype=torch.uint8, device=self.buffer.device)
        return sum(int((guard.view(-1, 2) != as_they_were).sum()) for guard in guards)

    def as_filled(self) -> torch.Tensor:
        """Which elements hold what the buffer was filled with."""
        return _bits(self.tensor) == _pattern(self.fill, self.tensor.element_size())


def _among_nan(shape, strides, dtype: torch.dtype, device, place: _Place) -> torch.Tensor:
    """A tensor for inputs, cut from a larger buffer of ordinary NaN (−1 where `dtype` has none, in bool True)."""
    extent = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    buffer, start, end = _cut((extent,), dtype, device, place)
    if dtype == torch.bool:
        whole = buffer.fill_(1).view(dtype)
    else:
        whole = buffer.view(dtype).fill_(torch.nan if dtype.is_floating_point else -1)
    return whole[start // dtype.itemsize : end // dtype.itemsize].as_strided(shape, strides)


def _relaid(fences: Fences, name: str, value: Any, layout: str, *, at_end: bool = True) -> Any:
    """A tensor with the elements of `value` in other places, NaN around them. What is no tensor stays as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    place, shape = _place(fences, name, layout, at_end), list(value.shape)
    if value.dim() == 0:
        layout = "aligned"
    if layout == "every second element":
        shape[-1] *= 2
        like = torch.empty(shape, device="meta")[..., ::2]
    elif layout == "rows apart":
        # As GPT-2's heads lie: [..., rows, heads, width + 3] in memory, seen as [..., heads, rows, width].
        shape[-1] += 3
        if value.dim() >= 3:
            shape[-2], shape[-3] = shape[-3], shape[-2]
        like = torch.empty(shape, device="meta")[..., : value.shape[-1]]
        if value.dim() >= 3:
            like = like.transpose(-2, -3)
    elif layout in _MORE_LAYOUTS:
        pair = (-1, -2) if layout == "columns first" else (0, 1)
        shape[pair[0]], shape[pair[1]] = shape[pair[1]], shape[pair[0]]
        like = torch.empty(shape, device="meta").transpose(*pair)
    else:
        like = torch.empty(shape, device="meta")
    return _among_nan(value.shape, like.stride(), value.dtype, value.device, place).copy_(value.detach())


def _layouts_alone(value: torch.Tensor) -> tuple[str, ...]:
    """The layouts that are no other than another one for a tensor of that shape."""
    if value.dim() == 0:
        return ()
    if value.dim() == 1:
        return ("unaligned", "every second element")
    return (*_LAYOUTS, "columns first", *(["outermost inside"] if value.dim() >= 3 else []))


@contextlib.contextmanager
def _otherwise() -> Iterator[None]:
    """Emulated threads run in another order and blocks on another number of cores; so does plain C++."""
    order = "forward" if os.environ.get("KF_SIMT_SCHEDULE") == "reverse" else "reverse"
    other = {"KF_SIMT_SCHEDULE": order, "KF_SIMT_THREADS": str((os.cpu_count() or 1) + 1)}
    before = {name: os.environ.get(name) for name in other}
    threads = torch.get_num_threads()
    os.environ.update(other)
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- the contract ----


class ContractError(AssertionError):
    """A rung that does not keep to the contract; the text says in what."""


class Contract(NamedTuple):
    """What `check_contract` found: greatest error of any output, what was allowed, and how far the rung before was."""

    error: float
    allowed: float
    before: str | None
    difference_to_before: float | None


class _Subject:
    """One rung of one op, and the ways to run it."""

    def __init__(
        self,
        stage: types.ModuleType,
        op: str,
        rung: str,
        device: torch.device,
        kwargs: dict,
        fences: Fences,
        all_outputs: dict | None = None,
    ):
        self.stage, self.op, self.rung, self.device, self.kwargs = stage, op, rung, device, kwargs
        self.fences = fences
        self.all_outputs = all_outputs or {}
        packet = getattr(getattr(torch.ops, stage.__name__), op)
        if "out" not in packet.overloads():
            raise ValueError(f"{stage.__name__}.{op} has no out-variant; check_contract needs one")
        self.out_variant = packet.out
        arguments = self.out_variant._schema.arguments
        self.out_names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.names = [a.name for a in arguments if a.name not in self.out_names]
        if device.type == "cuda":
            self.backend = "gpu"
        else:
            self.backend = "cpu" if rung in ("auto", "cpu") else "emulated"

    def fail(self, text: str = "") -> NoReturn:
        if self.fences.found:
            more = len(self.fences.found) - 1
            text = "; ".join(t for t in (text, self.fences.found[0] + (f", and {more} more" if more else "")) if t)
        raise ContractError(f"{self.stage.__name__}.{self.op}, rung '{self.rung}' on {self.device}: {text}")

    def placed(self, inputs, layout: str = "aligned", *, at_end: bool = True) -> tuple:
        """Copies of `inputs` laid out so, each at the end or the begin of its memory."""
        return tuple(
            _relaid(self.fences, name, value, layout, at_end=at_end)
            for name, value in zip(self.names, inputs, strict=False)
        )

    def one_placed(self, placed: tuple, index: int, value: torch.Tensor, layout: str) -> tuple:
        """`placed`, with a copy of `value` laid out so in place of one of them."""
        return (*placed[:index], _relaid(self.fences, self.names[index], value, layout), *placed[index + 1 :])

    def rounds(self) -> bool:
        """Whether the rung says that it rounds an intermediate. `auto` on a GPU may take any of them."""
        if self.backend == "cpu":
            return bool(self.stage.rounds(self.op, "cpu"))
        names = self.stage.rungs(self.op, self.device) if self.rung == "auto" else [self.rung]
        return any(self.stage.rounds(self.op, name) for name in names)

    def functional(self, inputs) -> tuple[torch.Tensor, ...]:
        """Runs the Python function, its memory full of NaN beforehand."""
        with poisoned_allocations():
            function = functools.partial(
                getattr(self.stage, self.op), rung=self.rung, **self.kwargs, **self.all_outputs
            )
            return self._counted(inputs, lambda: as_tuple(function(*inputs)))

    def into(self, inputs, like, *, unaligned: Container[str] = (), at_end: bool = True) -> tuple[torch.Tensor, ...]:
        """Runs the out-variant into tensors shaped as `like`, cut from poisoned buffers that are checked after.

        Outputs named in `unaligned` begin one element further.
        """
        guarded = self._into(inputs, like, unaligned, at_end, _POISON)
        for name, g in zip(self.out_names, guarded, strict=True):
            outside = g.written_outside()
            if outside:
                self.fail(f"{outside} bytes outside `{name}` were written")
            unwritten = g.as_filled()
            if unwritten.any():
                self._fail_as_filled(name, unwritten, inputs, like, unaligned, at_end)
        return tuple(g.tensor for g in guarded)

    def _into(self, inputs, like, unaligned: Container[str], at_end: bool, fill: int) -> list[_Guarded]:
        guarded = []
        for name, t in zip(self.out_names, like, strict=True):
            place = _place(self.fences, name, "unaligned" if name in unaligned else "aligned", at_end)
            guarded.append(_Guarded(t.shape, t.dtype, self.device, place, fill=fill))
        outs = {name: g.tensor for name, g in zip(self.out_names, guarded, strict=True)}
        with poisoned_allocations():
            self._counted(inputs, lambda: self.out_variant(*inputs, rung=self.rung, **self.kwargs, **outs))
        return guarded

    def _fail_as_filled(self, name: str, unwritten: torch.Tensor, inputs, like, unaligned, at_end) -> NoReturn:
        """Elements hold the poison: nobody wrote them, or what was written was computed from it. Other fill tells."""
        of = _of(unwritten, name)
        again = self._into(inputs, like, unaligned, at_end, _OTHER_FILL)[self.out_names.index(name)]
        if again.as_filled()[_first(unwritten)]:
            self.fail(f"{of} were never written")
        value = again.tensor[_first(unwritten)].item()
        self.fail(
            f"{of} are the NaN that the buffer was full of; in one full of small numbers that element is {value:.6g}: "
            f"computed from what `{name}` held before, or not written in every run"
        )

    def forget(self, inputs, like) -> None:
        """Runs once where all inputs are NaN: what a rung keeps of them would show in the next run."""
        nan = [torch.full_like(v, torch.nan) if _is_floating(v) else v for v in inputs]
        outs = {name: torch.empty_like(t) for name, t in zip(self.out_names, like, strict=True)}
        with torch.no_grad():
            self.out_variant(*nan, rung=self.rung, **self.kwargs, **outs)

    def _counted(self, inputs, run: Callable) -> Any:
        """Runs, and checks that the right backend did, and that the inputs' memory is as it was."""
        tensors = {n: v for n, v in zip(self.names, inputs, strict=False) if isinstance(v, torch.Tensor)}
        untouched = {name: _storage(tensor).clone() for name, tensor in tensors.items()}
        before = self.stage.launch_counts()
        with torch.no_grad():
            result = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.fences.look(f"rung '{self.rung}'")
        after = self.stage.launch_counts()
        ran = {backend: after[backend] - before[backend] for backend in after if after[backend] != before[backend]}
        empty = all(tensor.numel() == 0 for tensor in as_tuple(result))
        if set(ran) != {self.backend} and not (empty and not ran):
            self.fail(f"must run on the backend '{self.backend}'; launches counted: {ran or 'none'}")
        for name, tensor in tensors.items():
            if not torch.equal(_storage(tensor), untouched[name]):
                self.fail(f"input `{name}` (shape {tuple(tensor.shape)}), or memory beside it, was modified")
        return result

    def compare(self, outputs, references, allowed, what: str) -> float:
        """Fails where an element is farther from its reference than allowed. Returns the greatest error."""
        worst = 0.0
        for name, out, reference, limits in zip(self.out_names, outputs, references, allowed, strict=True):
            error = errors(out, reference)
            wrong = ~(error <= limits)
            if wrong.any():
                at = _first(wrong)
                nan = int(out.isnan().sum()) if out.is_floating_point() else 0
                self.fail(
                    f"{what}: {_of(wrong, name)} are wrong: it is {out[at].item():.6g}, must be "
                    f"{reference[at].item():.6g} ± {limits[at].item():.2g}; the greatest error is {error.max():.3g}"
                    + (f", {nan} elements are NaN" if nan else "")
                )
            worst = max(worst, error.max().item() if error.numel() else 0.0)
        return worst

    def must_round_once(self, outputs, wide, references) -> None:
        """Fails where more elements than allowed are not the exact result, rounded to the half type once."""
        for name, out, of_wide, reference in zip(self.out_names, outputs, wide, references, strict=True):
            wrong, allowed = round_as_well(out, of_wide.to(out.dtype), reference)
            if int(wrong.sum()) > allowed:
                at = _first(wrong)
                self.fail(
                    f"{_of(wrong, name)} are not the exact result rounded once (it is {out[at].item():.6g}, must be "
                    f"{reference[at].to(out.dtype).item():.6g}; {allowed} may differ): is an intermediate rounded? A "
                    "rung that means to says so by `rounds` in its table"
                )

    def varies(self) -> bool:
        """Whether the rung says that its runs may differ in their last bits."""
        return self.backend != "cpu" and self.rung != "auto" and self.stage.varies(self.op, self.rung)

    def must_equal(self, outputs, others, what: str) -> None:
        """Fails where two runs differ in a bit; by more than their order explains where the rung varies."""
        for name, a, b in zip(self.out_names, outputs, others, strict=True):
            different = differ(a, b, self.varies())
            if different.any():
                at = _first(different)
                self.fail(f"{what}: {_of(different, name)} differ: {a[at].item():.9g} and {b[at].item():.9g}")


def differ(a: torch.Tensor, b: torch.Tensor, varies: bool = False) -> torch.Tensor:
    """Which elements differ in a bit; with `varies` by more than sums in another order do."""
    if not varies or a.numel() == 0:
        return _bits(a) != _bits(b)
    ours, theirs = a.double(), b.double()
    allowed = torch.finfo(a.dtype).eps * theirs.abs() + 1e-5 * theirs.abs().nan_to_num(0, 0, 0).max()
    return ~((ours - theirs).abs() <= allowed) & ~((ours == theirs) | (ours.isnan() & theirs.isnan()))


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def _of(wrong: torch.Tensor, name: str) -> str:
    """ "3 of 165 elements of `out`, the first at (4, 32),"."""
    return f"{int(wrong.sum())} of {wrong.numel()} elements of `{name}`, the first at {_first(wrong)},"


def check_contract(
    stage: types.ModuleType,
    op: str,
    inputs: tuple,
    rung: str,
    *,
    reference: Callable,
    eager: Callable,
    kwargs: dict | None = None,
    all_outputs: dict | None = None,
    layouts: bool = True,
    alone: bool = False,
) -> Contract:
    """Runs `rung` of `op` on `inputs` and checks all that every rung must keep to.

    - Outputs are cut from larger buffers of NaN: every element is written, nothing beside them is.
    - On a CPU nothing beside a tensor is accessed at all, not even the rest of a vector. In the first run each ends at
      a page that is protected, in the second it begins at one, in those with other layouts it ends at one. (What has no
      whole vectors ends there in the unaligned layout alone, else up to 15 bytes before.)
    - The error of each element against `reference` in float64 is at most twice that of `eager` among elements of its
      size, plus 1e-5 of its size (1e-12 in float64). NaN is an error.
    - In half types almost every element is the exact result, rounded once; unless the rung's table says what else it
      rounds.
    - The rung before agrees.
    - A second run, emulated in another order of threads, on another number of cores, gives the same bits; so does the
      Python function. (On a CPU, plain C++ ran once before on inputs full of NaN, of which nothing may be left.)
    - Unaligned and non-contiguous inputs give results as good (`layouts=False` leaves this out).
    - On CUDA it works on a stream that is not the default one.
    - Inputs, and the memory beside them, stay as they were.
    - The counter of launches says that the backend which the tensors' device calls for did the work.

    Args:
        stage: the stage's module, such as `step2_attention`.
        op: the op's name; its Python function, registered op and out-variant are all used.
        inputs: the positional arguments, tensors and other values.
        rung: a name from `stage.rungs(op, device)`, or "auto".
        reference: called with float64 copies of `inputs`, and `kwargs`; returns what the op returns.
        eager: called with `inputs` and `kwargs`: the same composed from PyTorch's operations in the inputs' dtype.
        kwargs: the op's keyword arguments.
        all_outputs: keyword arguments with which the Python function returns all that the op does, such as
            `{"return_lse": True}`.
        layouts: also with all inputs together unaligned, their rows apart, and every second element.
        alone: also with each tensor alone unaligned, re-strided and transposed, and a run before on inputs of NaN.
            Takes many runs: for one shape of each rung, whose dimensions all differ and which vectors divide.

    Returns:
        A `Contract` with the figures.

    Raises:
        ContractError: the rung breaks one of these; the text says which, and names the first wrong element.
    """
    kwargs = kwargs or {}
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    with Fences(stage, device) as fences:
        subject = _Subject(stage, op, rung, device, kwargs, fences, all_outputs)
        contract = _check(subject, inputs, reference, eager, layouts, alone)
        if fences.found:
            subject.fail()
    return contract


def _check(
    subject: _Subject, inputs: tuple, reference: Callable, eager: Callable, layouts: bool, alone: bool
) -> Contract:
    """As `check_contract`; but what is accessed beside tensors is only noted."""
    kwargs = subject.kwargs

    # Each gets copies, since a faulty one might write into what the other reads.
    expected = as_tuple(reference(*map(in_float64, inputs), **copy.deepcopy(kwargs)))
    composed = as_tuple(eager(*(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in inputs), **kwargs))
    if len(expected) != len(subject.out_names) or len(composed) != len(subject.out_names):
        raise ValueError(f"`reference` and `eager` must return {len(subject.out_names)} outputs as {subject.op} does")
    for tensor in expected:
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            raise ValueError(f"`reference` must return float64, got {tensor.dtype}")
    allowed = [allowances(r, e) for r, e in zip(expected, composed, strict=True)]

    placed = subject.placed(inputs)
    if alone or subject.backend == "cpu":
        subject.forget(inputs, composed)
    outputs = subject.into(placed, composed)
    error = subject.compare(outputs, expected, allowed, "against float64")
    if any(t.dtype in (torch.float16, torch.bfloat16) for t in composed) and not subject.rounds():
        wide = as_tuple(eager(*(v.detach().float() if _is_floating(v) else v for v in inputs), **kwargs))
        subject.must_round_once(outputs, wide, expected)

    with _otherwise():  # shows where a barrier is missing, and a sum that depends on the number of threads
        again = subject.into(subject.placed(inputs, at_end=False), composed, at_end=False)
    subject.must_equal(outputs, again, "two runs")

    returned = subject.functional(placed)
    for name, out, like in zip(subject.out_names, returned, composed, strict=True):
        if (out.shape, out.dtype, out.device) != (like.shape, like.dtype, like.device):
            got = f"{tuple(out.shape)} {out.dtype} {out.device}"
            subject.fail(f"`{name}` is {got}, eager gives {tuple(like.shape)} {like.dtype} {like.device}")
    _check_no_aliases(subject, returned, placed)
    subject.must_equal(outputs, returned, "the Python function and the out-variant")

    before, difference = _compare_with_rung_before(subject, placed, outputs, composed, allowed)

    if layouts:
        for layout in _LAYOUTS:
            relaid = subject.placed(inputs, layout)
            got = subject.into(relaid, composed, unaligned=subject.out_names if layout == "unaligned" else ())
            error = max(error, subject.compare(got, expected, allowed, f"inputs laid out '{layout}'"))
    if alone:
        for index, name, layout in _each_alone(subject, inputs):
            relaid = subject.one_placed(placed, index, inputs[index], layout)
            got = subject.into(relaid, composed)
            error = max(error, subject.compare(got, expected, allowed, f"`{name}` alone laid out '{layout}'"))
        for name in subject.out_names:
            got = subject.into(placed, composed, unaligned=(name,))
            error = max(error, subject.compare(got, expected, allowed, f"`{name}` alone laid out 'unaligned'"))

    if subject.device.type == "cuda":
        _check_stream(subject, placed, outputs)
    greatest = max((limits.max().item() for limits in allowed if limits.numel()), default=0.0)
    return Contract(error, greatest, before, difference)


def _each_alone(subject: _Subject, inputs) -> Iterator[tuple[int, str, str]]:
    for index, (name, value) in enumerate(zip(subject.names, inputs, strict=False)):
        if isinstance(value, torch.Tensor):
            for layout in _layouts_alone(value):
                yield index, name, layout


def _check_no_aliases(subject: _Subject, returned, inputs) -> None:
    seen = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor) and value.numel()]
    for name, out in zip(subject.out_names, returned, strict=True):
        if out.numel() == 0:
            continue
        if out.untyped_storage().data_ptr() in seen:
            subject.fail(f"`{name}` shares memory with an input or another output")
        seen.append(out.untyped_storage().data_ptr())


def _compare_with_rung_before(subject: _Subject, inputs, outputs, like, allowed) -> tuple[str | None, float | None]:
    """Compares with the nearest earlier rung that can do `inputs`. Both may be off by what is allowed."""
    names = subject.stage.rungs(subject.op, subject.device)
    earlier = names[: names.index(subject.rung)] if subject.rung in names else []
    for name in reversed(earlier):
        other = _Subject(subject.stage, subject.op, name, subject.device, subject.kwargs, subject.fences)
        try:
            theirs = other.into(inputs, like)
        except ValueError as refusal:
            if f"rung '{name}'" not in str(refusal):
                raise
            continue
        twice = [2 * limit for limit in allowed]
        return name, subject.compare(outputs, [t.double() for t in theirs], twice, f"against rung '{name}'")
    return None, None


def _check_stream(subject: _Subject, inputs, outputs) -> None:
    """On a stream of its own, inputs that arrive late there: work on any other stream reads NaN.

    All is launched before anything runs, into scratch memory of NaN: so it shows too where one of a rung's kernels does
    not wait for the one in front.
    """
    stream = torch.cuda.Stream(subject.device)
    late = [torch.full_like(v, torch.nan) if _is_floating(v) else v for v in inputs]
    outs = {n: torch.full_like(o, torch.nan) for n, o in zip(subject.out_names, outputs, strict=True)}
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(stream), torch.no_grad(), poisoned_allocations():
        torch.cuda._sleep(_DELAY_CYCLES)
        for to, value in zip(late, inputs, strict=True):
            if _is_floating(value):
                to.copy_(value)
        subject.out_variant(*late, rung=subject.rung, **subject.kwargs, **outs)
        got = [out.clone() for out in outs.values()]
    torch.cuda.synchronize(subject.device)
    subject.must_equal(outputs, got, "on a stream that is not the default one")


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def check_inside(stage: types.ModuleType, function: Callable, **tensors: torch.Tensor) -> None:
    """Checks that `function` accesses nothing beside `tensors`: for an op without an out-variant, on a CPU.

    They are laid out as by `check_contract`, and their memory ends or begins where they do.

    Args:
        stage: the stage's module, whose kernels run.
        function: takes such tensors by their names, and may write into them.

    Raises:
        AssertionError: it reads or writes beside one; the text names it, the side and the kernel.
    """
    with Fences(stage, next(iter(tensors.values())).device) as fences:
        for layout, at_end in [("aligned", True), ("aligned", False), ("unaligned", True), ("rows apart", True)]:
            function(**{name: _relaid(fences, name, t, layout, at_end=at_end) for name, t in tensors.items()})
            fences.look(stage.__name__)
        assert not fences.found, fences.found[0]


def check_apart(stage: types.ModuleType, op: str, inputs: tuple, kwargs: dict | None = None) -> None:
    """Checks that `op` refuses an output that shares memory with an input or another output, whichever two they are.

    Where two only touch, it must run. Of an op without an out-variant, the inputs that it writes into are outputs.

    Args:
        stage: the stage's module.
        op: the op's name.
        inputs: the positional arguments; for an op with an out-variant without the outputs.
        kwargs: keyword arguments.

    Raises:
        AssertionError: two that share memory are taken, or two that touch are refused.
    """
    kwargs = kwargs or {}
    packet = getattr(getattr(torch.ops, stage.__name__), op)
    call = packet.out if "out" in packet.overloads() else packet.default
    arguments = call._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip((a.name for a in arguments), inputs, strict=False))
    if call is not packet.default:
        outputs = as_tuple(packet.default(*inputs, **kwargs))
        given |= dict(zip(written, outputs, strict=True))
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for index, out in enumerate(written):
        others = [name for name in tensors if name not in written] + written[:index]
        for other in [name for name in others if tensors[name].device == tensors[out].device]:
            for overlap in (True, False):
                pair = dict(zip((other, out), _beside(tensors[other], tensors[out], overlap), strict=True))
                try:
                    with torch.no_grad():
                        call(**given | pair, **kwargs)
                    refused = False
                except ValueError as error:
                    if f"{op}: `{out}` must not share memory with `{other}`" not in str(error):
                        raise
                    refused = True
                if refused != overlap:
                    how = "shares memory with" if overlap else "only touches"
                    raise AssertionError(f"{op}: `{out}` {how} `{other}`, and is {'refused' if refused else 'taken'}")


def _beside(first: torch.Tensor, second: torch.Tensor, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous copies in one buffer: the second begins in the last bytes of the first, or right after it."""
    end = first.numel() * first.element_size()
    start = (end - 1) // 16 * 16 if overlap else -(-end // 16) * 16
    buffer = torch.zeros(start + end + second.numel() * second.element_size(), dtype=torch.uint8, device=first.device)
    parts = [(first, 0), (second, start)]
    views = [buffer[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape) for t, at in parts]
    views[1].copy_(second)
    return views[0].copy_(first), views[1]


def check_reruns(function: Callable, *inputs, varies: bool = False) -> None:
    """Checks that `function` gives the same bits each time: in 500 runs on a GPU, in 3 under emulation.

    Args:
        varies: it need not, and may differ as `differ` allows.

    Raises:
        AssertionError: a run differs from the first one.
    """
    first = as_tuple(function(*inputs))
    for run in range(500 if first[0].is_cuda else 3):
        again = as_tuple(function(*inputs))
        if not varies:
            _same_bits(again, first, f"run {run + 2}")
        elif any(differ(a, b, varies).any() for a, b in zip(again, first, strict=True)):
            raise AssertionError(f"run {run + 2} differs by more than the order of sums explains")


# ---- the op as torch sees it ----


def check_op(
    stage: types.ModuleType,
    op: str,
    inputs: tuple,
    kwargs: dict | None = None,
    *,
    compile_backend: str | None = None,
) -> None:
    """Checks how `op` is registered: opcheck, torch.compile without a graph break, and capture into a CUDA graph.

    Args:
        stage: the stage's module.
        op: the op's name.
        inputs: positional arguments. Floating tensors are made to require gradients for opcheck.
        kwargs: keyword arguments, `rung` among them if one is to be named.
        compile_backend: for torch.compile; default "inductor" on CUDA tensors, "aot_eager" on CPU tensors, where
            inductor would only add the time of a C++ compilation.

    Raises:
        AssertionError: results differ; torch's own exceptions where a registration is wrong.
    """
    kwargs = kwargs or {}
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    function = getattr(stage, op)
    name = f"{stage.__name__}.{op}"

    needing_grad = tuple(v.detach().clone().requires_grad_() if _is_floating(v) else v for v in inputs)
    torch.library.opcheck(getattr(getattr(torch.ops, stage.__name__), op).default, needing_grad, kwargs)

    with torch.no_grad():
        expected = as_tuple(function(*inputs, **kwargs))
    torch.compiler.reset()
    backend = compile_backend or ("inductor" if device.type == "cuda" else "aot_eager")
    compiled = torch.compile(lambda *args: function(*args, **kwargs), fullgraph=True, backend=backend)
    with torch.no_grad():
        _same_bits(as_tuple(compiled(*inputs)), expected, f"{name} under torch.compile")

    if device.type == "cuda":
        _check_cuda_graph(function, inputs, kwargs, name)


def capture(step: Callable) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `step()`, and what that returned while it was captured: each replay writes it anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # what is set up on the first call cannot be captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return graph, outputs


def _check_cuda_graph(function: Callable, inputs: tuple, kwargs: dict, name: str) -> None:
    """Captures a call on inputs of NaN, then replays it on the real ones."""
    static = tuple(torch.full_like(v, torch.nan) if _is_floating(v) else v for v in inputs)
    with torch.no_grad():
        expected = as_tuple(function(*inputs, **kwargs))
        graph, captured = capture(lambda: as_tuple(function(*static, **kwargs)))
        for to, value in zip(static, inputs, strict=True):
            if _is_floating(value):
                to.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
    _same_bits(captured, expected, f"{name} replayed from a CUDA graph")


def _same_bits(outputs, expected, what: str) -> None:
    for index, (out, want) in enumerate(zip(outputs, expected, strict=True)):
        if (out.shape, out.dtype, out.stride()) != (want.shape, want.dtype, want.stride()):
            raise AssertionError(
                f"{what}: output {index} has another shape, dtype or strides than before, in eager mode"
            )
        if not torch.equal(_bits(out), _bits(want)):
            raise AssertionError(f"{what}: output {index} has other bits than before, in eager mode")


# ---- gradients ----


def check_each_input_alone(function: Callable, inputs: tuple) -> None:
    """Checks that the gradient of each floating tensor of `inputs` is the same whether the others require one or not.

    Raises:
        AssertionError: a gradient differs in a bit; the text names the input.
    """

    def gradients(needing: list[int]) -> tuple[torch.Tensor, ...]:
        values = [v.detach().requires_grad_(i in needing) if _is_floating(v) else v for i, v in enumerate(inputs)]
        outputs = as_tuple(function(*values))
        grads = [randn(out.shape, out.dtype, out.device, seed=50 + i) for i, out in enumerate(outputs)]
        return torch.autograd.grad(outputs, [values[i] for i in needing], grads)

    floating = [i for i, value in enumerate(inputs) if _is_floating(value)]
    for index, beside_others in zip(floating, gradients(floating), strict=True):
        (alone,) = gradients([index])
        different = int((_bits(alone) != _bits(beside_others)).sum())
        if different:
            raise AssertionError(f"input {index}: its gradient is another where it alone requires one")


def check_outputs_together(function: Callable, inputs: tuple) -> None:
    """Checks the gradients of several outputs of `function` that are used together: each two, and all.

    `torch.autograd.gradcheck` looks at outputs one by one. Here it gets the weighted sum of all; and the gradient of
    two must be the sum of their gradients.

    Args:
        function: returns a tuple, of whose tensors at least two have gradients.
        inputs: its arguments, floating tensors in float64 among them.

    Raises:
        AssertionError: a gradient differs; the text names the outputs and the input.
        ValueError: fewer than two outputs have gradients.
    """
    values = [v.detach().requires_grad_() if _is_floating(v) else v for v in inputs]
    floating = [i for i, value in enumerate(values) if _is_floating(value)]
    needing = [values[i] for i in floating]
    outputs = as_tuple(function(*values))
    used = [i for i, out in enumerate(outputs) if out.requires_grad and out.numel()]
    if len(used) < 2:
        raise ValueError(f"of {len(outputs)} outputs {len(used)} have gradients; there is nothing to use together")
    weights = {i: randn(outputs[i].shape, outputs[i].dtype, outputs[i].device, seed=80 + i) for i in used}

    def gradients(of: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        chosen = [outputs[i] for i in of], needing, [weights[i] for i in of]
        return torch.autograd.grad(*chosen, retain_graph=True, materialize_grads=True)

    alone = {i: gradients((i,)) for i in used}
    for together in itertools.combinations(used, 2):
        for index, got, *parts in zip(floating, gradients(together), *(alone[i] for i in together), strict=True):
            off = (got - sum(parts)).abs().max().item() if got.numel() else 0.0
            if not off <= 1e-9 * max(1.0, *(part.abs().max().item() for part in parts)):
                raise AssertionError(
                    f"outputs {together} used together: the gradient of input {index} is {off:.3g} off the sum of both"
                )

    def weighted(*values):
        outputs = as_tuple(function(*values))
        return sum((outputs[i] * weight).sum() for i, weight in weights.items())

    assert torch.autograd.gradcheck(weighted, values, fast_mode=True)


def check_gradients_in_a_cuda_graph(function: Callable, variables: list[torch.Tensor], grad: torch.Tensor) -> None:
    """Checks that forward and backward pass, captured into a CUDA graph, compute anew from what is there at a replay.

    Args:
        function: of the `variables`, CUDA tensors that require gradients; the first is changed.
        grad: the gradient of what `function` returns.

    Raises:
        AssertionError: a gradient differs in a bit from one outside of the graph.
    """

    def step():
        return torch.autograd.grad(function(*variables), variables, grad)

    step()  # what is set up on the first call cannot be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        variables[0].mul_(-0.5)
    graph.replay()
    _same_bits(captured, step(), "gradients replayed from a CUDA graph")


def check_tangents_are_refused(function: Callable, inputs: tuple) -> None:
    """Checks that `function` takes no tangent of a floating tensor of `inputs`: in forward mode it has no derivative.

    Raises:
        AssertionError: it takes one, and what comes out has perhaps none.
    """
    for index in [i for i, value in enumerate(inputs) if _is_floating(value)]:

        def of_one(x):
            return function(*(x if i == index else value for i, value in enumerate(inputs)))  # noqa: B023

        try:
            torch.func.jvp(of_one, (inputs[index].detach(),), (inputs[index].detach(),))
        except NotImplementedError as error:
            if "must have no tangent" not in str(error):
                raise
        else:
            raise AssertionError(f"input {index}: its tangent is not refused")


def check_second_gradients(function: Callable, reference: Callable, inputs: tuple, roundings: int | None = 1) -> None:
    """Checks the gradients of the gradients of `function` in the dtype of `inputs` against `reference` in float64.

    Each may be off by 1e-4 of the greatest and by `roundings` to the dtype.

    Args:
        function: of all `inputs`, floating tensors.
        reference: the same, composed of PyTorch's operations.
        roundings: 1, the result's own; 2 where the backward saves an output, which was rounded before. None where
            rounded parts may cancel: then up to three times the error of `reference` in the inputs' dtype is allowed.

    Raises:
        AssertionError: a second gradient is farther off, NaN or of another dtype; the text names the input.
    """

    def second(function: Callable, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        inputs = [value.detach().requires_grad_() for value in inputs]
        outputs = as_tuple(function(*inputs))
        # Drawn in the inputs' dtype, so that both calls have the very same numbers.
        grads = [
            randn(o.shape, dtype, o.device, seed=60 + i).to(o.dtype).requires_grad_() for i, o in enumerate(outputs)
        ]
        first = torch.autograd.grad(outputs, inputs, grads, create_graph=True)
        weights = [randn(g.shape, dtype, g.device, seed=70 + i).to(g.dtype) for i, g in enumerate(first)]
        total = sum((g * w).sum() for g, w in zip(first, weights, strict=True))
        return torch.autograd.grad(total, [*inputs, *grads], materialize_grads=True)

    dtype = inputs[0].dtype
    exact_ones = second(reference, [value.double() for value in inputs])
    composed = second(reference, inputs)
    for index, (got, exact, theirs) in enumerate(zip(second(function, inputs), exact_ones, composed, strict=True)):
        of = f"input {index}" if index < len(inputs) else f"gradient {index - len(inputs)}"
        if got.dtype != dtype:
            raise AssertionError(f"the second gradient of {of} is {got.dtype}, must be {dtype}")
        error = (got.double() - exact).abs().max().item()
        allowed = (0.51 * (roundings or 1) * torch.finfo(dtype).eps + 1e-4) * exact.abs().max().item()
        if roundings is None:
            allowed += 3 * (theirs.double() - exact).abs().max().item()
        if not error <= allowed:
            raise AssertionError(f"the second gradient of {of} is {error:.3g} off, allowed are {allowed:.3g}")


# ---- small helps for test files ----


def transposed(value: Any) -> Any:
    """A tensor with its last two dimensions the other way round in memory; what has fewer stays as it is."""
    return value.mT.contiguous().mT if isinstance(value, torch.Tensor) and value.dim() >= 2 else value


def lazy_memory(elements: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A vector of zeros, on the CPU in memory that exists only where it is touched: larger than the machine's own.

    Skips the test where even that cannot be had, or, on a GPU, where there is too little memory.
    """
    size = elements * dtype.itemsize
    if device == "cuda":
        if torch.cuda.mem_get_info()[0] < size + (1 << 30):
            pytest.skip(f"needs {size >> 30} GiB of GPU memory")
        return torch.zeros(elements, dtype=dtype, device=device)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python 3.11 knows the name
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"cannot reserve {size >> 30} GiB of addresses: {error}")
    return torch.frombuffer(memory, dtype=dtype)


@contextlib.contextmanager
def raises(exception: type[BaseException], *fragments: str) -> Iterator[Any]:
    """As pytest.raises, and the message must contain every fragment."""
    with pytest.raises(exception) as caught:
        yield caught
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    if missing:
        raise AssertionError(f"the message lacks {missing}: {caught.value}") from caught.value


def check_automatic(
    stage: types.ModuleType,
    op: str,
    sizes: Callable[[dict], dict[str, int] | None],
    *,
    at_most: float = 1.15,
) -> None:
    """Checks that what `auto` takes on a GPU is read off the stage's results, where the rungs were measured.

    A case counts as results/h200.json has it. Where that has not the case, or not the rung that `auto` prefers, as
    both may be newer, another GPU's file is taken that has.

    Over all cases together no rung is faster than the chosen ones, by the mean of the ratios; in a single case another
    may be ahead, by `at_most` this factor. What is noise does not count.

    Args:
        stage: the stage's module.
        op: the op.
        sizes: called with the shape of a case, gives the sizes as the op's Args have them; None leaves the case out,
            as one in which something else than sizes decides.
        at_most: see above.

    Raises:
        AssertionError: names the case or the rung.
    """

    def preferred(row: dict) -> str:
        return stage._C.prefer(op, sizes(row["shape"]), getattr(torch, row["dtype"]))

    def is_measured(case: list[dict]) -> bool:
        return any(row["impl"] == preferred(row) for row in case)

    def chosen(row: dict) -> str:
        """What `auto` prefers, if it could do this case and so was measured; else what it takes instead."""
        if is_measured(by_key[results.case_key(row)]):
            return preferred(row)
        return stage._C.choose(op, "auto", sizes(row["shape"]), getattr(torch, row["dtype"]))

    by_key: dict[tuple, list[dict]] = {}
    files = results.load(stages.find(stage.__name__))
    files.sort(key=lambda file: file.path.name != "h200.json")
    for file in files:
        for case in results.cases([row for row in file.of(op) if sizes(row["shape"])]):
            key = results.case_key(case[0])
            if key not in by_key or is_measured(case) and not is_measured(by_key[key]):
                by_key[key] = case
    measured = files[0]._replace(rows=[row for case in by_key.values() for row in case])
    by_case = results.behind(measured, op, chosen)
    worst = {case: max(ratios.items(), key=lambda item: item[1]) for case, ratios in by_case.items()}
    late = {case: f"{ratio:.2f} times the time of {rung}" for case, (rung, ratio) in worst.items() if ratio > at_most}
    assert not late, f"{op}: auto takes {late}"
    for rung in {rung for ratios in by_case.values() for rung in ratios}:
        mean = statistics.geometric_mean(ratios[rung] for ratios in by_case.values() if rung in ratios)
        assert mean <= 1.0, f"{op}: auto takes {mean:.3f} times the time of {rung}, over all cases"


def main(file: str) -> NoReturn:
    """Runs the tests in `file`, with the command line's further arguments for pytest, and exits with pytest's code."""
    sys.exit(pytest.main([file, *sys.argv[1:]]))


def without_progress(said: str) -> str:
    """Standard error of a command without the lines that `console.progress` writes where a machine is slow."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.endswith(" …\n"))


# ---- ops that write into their arguments ----


def writing_overloads(stage: str) -> list[torch._ops.OpOverload]:
    """All that writes into an argument in the library `stage`, once built: out-variants, and ops with an (a!)."""
    names = {
        n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{stage}::")
    }
    packets = [getattr(getattr(torch.ops, stage), name) for name in sorted(names)]
    overloads = (getattr(packet, name) for packet in packets for name in packet.overloads())
    return [overload for overload in overloads if overload._schema.is_mutable]


def check_writes(overload: torch._ops.OpOverload) -> None:
    """Checks what torch does around an op that writes into arguments: their version counters rise by one, those of the
    others do not, and what requires gradients or has a tangent is refused.

    In place of the op's kernel stands one that does nothing, so any arguments do.

    Raises:
        AssertionError: names the overload and the argument.
    """
    schema = overload._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    numbers = {a.name: 0 for a in schema.arguments if a.name not in tensors and not a.has_default_value()}

    def call(**special):
        overload(**{name: torch.empty(1, device="meta") for name in tensors} | special, **numbers)

    def nothing(*args, **kwargs):
        outputs = tuple(kwargs[name] for name in written) if schema.returns else (None,)
        return outputs if len(outputs) > 1 else outputs[0]

    library, name = overload.name().split("::")
    with torch.library._scoped_library(library, "IMPL") as changed:
        changed.impl(name, nothing, "Meta", allow_override=True)
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            inputs = {n: torch.empty(1, device="meta") for n in tensors}
            with mode():
                call(**inputs)
            wrong = [n for n, value in inputs.items() if value._version != (n in written)]
            assert not wrong, f"{overload}: the version counter of {wrong} is wrong after the call"
        for name in tensors:
            needing = torch.empty(1, device="meta", requires_grad=True)
            with raises(RuntimeError, f"`{name}` must not require gradients"):
                call(**{name: needing})
            with torch.no_grad():
                call(**{name: needing})
            with forward_ad.dual_level(), raises(NotImplementedError, f"`{name}` must have no tangent"):
                call(**{name: forward_ad.make_dual(torch.empty(1, device="meta"), torch.empty(1, device="meta"))})
