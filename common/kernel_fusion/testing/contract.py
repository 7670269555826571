"""What a rung must keep to, checked by one call: `check_contract`; and what an op must refuse or give again."""

import collections
import copy
import functools
import types
from collections.abc import Callable, Container
from typing import Any, NamedTuple, NoReturn

import torch

from kernel_fusion.testing.accuracy import allowances, as_tuple, errors, in_float64, poisoned_allocations, round_as_well
from kernel_fusion.testing.fences import Fences
from kernel_fusion.testing.memory import (
    LAYOUTS,
    OTHER_FILL,
    POISON,
    Guarded,
    bits,
    is_floating,
    layouts_alone,
    otherwise,
    place_of,
    relaid,
    same_bits,
    storage,
)

_DELAY_CYCLES = 20_000_000  # about ten milliseconds of a GPU doing nothing
_KEPT = 8  # results on a CPU: tests take an op's rungs one after the other, and then the rung before has run already


class ContractError(AssertionError):
    """A rung that does not keep to the contract; the text says in what."""


class Contract(NamedTuple):
    """What `check_contract` found: greatest error of any output, what was allowed, and how far the rung before was."""

    error: float
    allowed: float
    before: str | None
    difference_to_before: float | None


class _Passed(NamedTuple):
    """A rung's outputs, of a run that kept to the contract."""

    rung: tuple  # with its step, op and options
    inputs: tuple
    outputs: tuple[torch.Tensor, ...]


_passed: collections.deque[_Passed] = collections.deque(maxlen=_KEPT)


class _Subject:
    """One rung of one op, and the ways to run it."""

    def __init__(
        self,
        step: types.ModuleType,
        op: str,
        rung: str,
        device: torch.device,
        kwargs: dict,
        fences: Fences,
        all_outputs: dict | None = None,
    ):
        self.step, self.op, self.rung, self.device, self.kwargs = step, op, rung, device, kwargs
        self.fences = fences
        self.all_outputs = all_outputs or {}
        packet = getattr(getattr(torch.ops, step.__name__), op)
        if "out" not in packet.overloads():
            raise ValueError(f"{step.__name__}.{op} has no out-variant; check_contract needs one")
        self.out_variant = packet.out
        arguments = self.out_variant._schema.arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        self.out_names = written[-len(self.out_variant._schema.returns) :]  # behind what the op itself writes into
        self.names = [a.name for a in arguments if a.name not in self.out_names]
        if device.type == "cuda":
            self.backend = "gpu"
        else:
            self.backend = "cpu" if rung in ("auto", "cpu") else "emulated"

    def fail(self, text: str = "") -> NoReturn:
        if self.fences.found:
            more = len(self.fences.found) - 1
            text = "; ".join(t for t in (text, self.fences.found[0] + (f", and {more} more" if more else "")) if t)
        raise ContractError(f"{self.step.__name__}.{self.op}, rung '{self.rung}' on {self.device}: {text}")

    def placed(self, inputs, layout: str = "aligned", *, at_end: bool = True) -> tuple:
        """Copies of `inputs` laid out so, each at the end or the begin of its memory."""
        return tuple(
            relaid(self.fences, name, value, layout, at_end=at_end)
            for name, value in zip(self.names, inputs, strict=False)
        )

    def rounds(self) -> bool:
        """Whether the rung says that it rounds an intermediate. `auto` on a GPU may take any of them."""
        if self.backend == "cpu":
            return bool(self.step.rounds(self.op, "cpu"))
        names = self.step.rungs(self.op, self.device) if self.rung == "auto" else [self.rung]
        return any(self.step.rounds(self.op, name) for name in names)

    def functional(self, inputs) -> tuple[torch.Tensor, ...]:
        """Runs the Python function, its memory full of NaN beforehand."""
        with poisoned_allocations():
            function = functools.partial(getattr(self.step, self.op), rung=self.rung, **self.kwargs, **self.all_outputs)
            return self._counted(inputs, lambda: as_tuple(function(*inputs)))

    def into(self, inputs, like, *, unaligned: Container[str] = (), at_end: bool = True) -> tuple[torch.Tensor, ...]:
        """Runs the out-variant into tensors shaped as `like`, cut from poisoned buffers that are checked after.

        Outputs named in `unaligned` begin one element further.
        """
        guarded = self._into(inputs, like, unaligned, at_end, POISON)
        for name, g in zip(self.out_names, guarded, strict=True):
            outside = g.written_outside()
            if outside:
                self.fail(f"{outside} bytes outside `{name}` were written")
            unwritten = g.as_filled()
            if unwritten.any():
                self._fail_as_filled(name, unwritten, inputs, like, unaligned, at_end)
        return tuple(g.tensor for g in guarded)

    def _into(self, inputs, like, unaligned: Container[str], at_end: bool, fill: int) -> list[Guarded]:
        guarded = []
        for name, t in zip(self.out_names, like, strict=True):
            place = place_of(self.fences, name, "unaligned" if name in unaligned else "aligned", at_end)
            guarded.append(Guarded(t.shape, t.dtype, self.device, place, fill=fill))
        outs = {name: g.tensor for name, g in zip(self.out_names, guarded, strict=True)}
        with poisoned_allocations():
            self._counted(inputs, lambda: self.out_variant(*inputs, rung=self.rung, **self.kwargs, **outs))
        return guarded

    def _fail_as_filled(self, name: str, unwritten: torch.Tensor, inputs, like, unaligned, at_end) -> NoReturn:
        """Elements hold the poison: nobody wrote them, or what was written was computed from it. Other fill tells."""
        of = _of(unwritten, name)
        again = self._into(inputs, like, unaligned, at_end, OTHER_FILL)[self.out_names.index(name)]
        if again.as_filled()[_first(unwritten)]:
            self.fail(f"{of} were never written")
        value = again.tensor[_first(unwritten)].item()
        self.fail(
            f"{of} are the NaN that the buffer was full of; in one full of small numbers that element is {value:.6g}: "
            f"computed from what `{name}` held before, or not written in every run"
        )

    def passed(self, inputs) -> tuple[torch.Tensor, ...] | None:
        """The outputs for these very inputs, if they were checked a moment ago."""
        these = [p for p in _passed if p.rung == self._key() and len(p.inputs) == len(inputs)]
        same = (p for p in these if all(map(_same, p.inputs, inputs)))
        return next((p.outputs for p in same), None)

    def keep(self, inputs, outputs) -> None:
        """Keeps what has been checked for the next rung."""
        if self.device.type == "cpu" and not any(isinstance(v, torch.Tensor) for v in self.kwargs.values()):
            _passed.append(_Passed(self._key(), *map(_copies, (inputs, outputs))))

    def _key(self) -> tuple:
        return self.step, self.op, self.rung, repr(self.kwargs)

    def forget(self, inputs, like) -> None:
        """Runs once where all inputs are NaN: what a rung keeps of them would show in the next run."""
        nan = [torch.full_like(v, torch.nan) if is_floating(v) else v for v in inputs]
        outs = {name: torch.empty_like(t) for name, t in zip(self.out_names, like, strict=True)}
        with torch.no_grad():
            self.out_variant(*nan, rung=self.rung, **self.kwargs, **outs)

    def _counted(self, inputs, run: Callable) -> Any:
        """Runs, and checks that the right backend did, and that the inputs' memory is as it was."""
        tensors = {n: v for n, v in zip(self.names, inputs, strict=False) if isinstance(v, torch.Tensor)}
        untouched = {name: storage(tensor).clone() for name, tensor in tensors.items()}
        before = self.step.launch_counts()
        with torch.no_grad():
            result = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.fences.look(f"rung '{self.rung}'")
        after = self.step.launch_counts()
        ran = {backend: after[backend] - before[backend] for backend in after if after[backend] != before[backend]}
        empty = all(tensor.numel() == 0 for tensor in as_tuple(result))
        if set(ran) != {self.backend} and not (empty and not ran):
            self.fail(f"must run on the backend '{self.backend}'; launches counted: {ran or 'none'}")
        for name, tensor in tensors.items():
            if not torch.equal(storage(tensor), untouched[name]):
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
        return self.backend != "cpu" and self.rung != "auto" and self.step.varies(self.op, self.rung)

    def must_equal(self, outputs, others, what: str) -> None:
        """Fails where two runs differ in a bit; by more than their order explains where the rung varies."""
        for name, a, b in zip(self.out_names, outputs, others, strict=True):
            different = differ(a, b, self.varies())
            if different.any():
                at = _first(different)
                self.fail(f"{what}: {_of(different, name)} differ: {a[at].item():.9g} and {b[at].item():.9g}")


def _copies(values: tuple) -> tuple:
    return tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values)


def _same(a: Any, b: Any) -> bool:
    """Whether two inputs are the same to the bit, wherever they lie."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))
    return type(a) is type(b) and a == b


def differ(a: torch.Tensor, b: torch.Tensor, varies: bool = False) -> torch.Tensor:
    """Which elements differ in a bit; with `varies` by more than sums in another order do."""
    if not varies or a.numel() == 0:
        return bits(a) != bits(b)
    ours, theirs = a.double(), b.double()
    allowed = torch.finfo(a.dtype).eps * theirs.abs() + 1e-5 * theirs.abs().nan_to_num(0, 0, 0).max()
    return ~((ours - theirs).abs() <= allowed) & ~((ours == theirs) | (ours.isnan() & theirs.isnan()))


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def _of(wrong: torch.Tensor, name: str) -> str:
    """ "3 of 165 elements of `out`, the first at (4, 32),"."""
    return f"{int(wrong.sum())} of {wrong.numel()} elements of `{name}`, the first at {_first(wrong)},"


def check_contract(
    step: types.ModuleType,
    op: str,
    inputs: tuple,
    rung: str,
    *,
    reference: Callable,  # called with float64 copies of `inputs`, and `kwargs`; returns what the op returns
    eager: Callable,  # the same composed from PyTorch's operations, called with `inputs` and `kwargs`
    kwargs: dict | None = None,
    all_outputs: dict | None = None,  # for the Python function to return all that the op does: {"return_lse": True}
    layouts: bool = True,  # also with all inputs together unaligned, their rows apart, and every second element
    alone: bool = False,
) -> Contract:
    """Runs `rung` of `op` on `inputs` and checks all that every rung must keep to.

    - Outputs are cut from larger buffers of NaN: every element is written, nothing beside them is.
    - On a CPU nothing beside a tensor is accessed at all, not even the rest of a vector. In the first run each ends at
      a page that is protected, in the second inputs begin at one, in those with other layouts they end at one, in the
      last of these outputs begin at one. (What has no whole vectors ends there in the unaligned layout alone, else up
      to 15 bytes before.)
    - The error of each element against `reference` in float64 is at most twice that of `eager` among elements of its
      size, plus 1e-5 of its size (1e-12 in float64). NaN is an error.
    - In half types almost every element is the exact result, rounded once; unless the rung's table says what else it
      rounds.
    - The rung before agrees.
    - A second run, by the Python function, emulated in another order of threads, on another number of cores, gives the
      same bits. (On a CPU, plain C++ ran once before on inputs full of NaN, of which nothing may be left.)
    - Unaligned and non-contiguous inputs give results as good (`layouts=False` leaves this out).
    - On CUDA it works on a stream that is not the default one.
    - Inputs, and the memory beside them, stay as they were.
    - The counter of launches says that the backend which the tensors' device calls for did the work.

    With `alone` also each tensor alone is unaligned, re-strided and transposed, after a run on inputs of NaN. That is
    for one shape of each rung, whose dimensions all differ and which vectors divide, since it takes many runs.

    The ContractError of a rung that breaks one of these says which, and names the first wrong element.
    """
    kwargs = kwargs or {}
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    with Fences(step, device) as fences:
        subject = _Subject(step, op, rung, device, kwargs, fences, all_outputs)
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
    composed = as_tuple(eager(*_copies(inputs), **kwargs))
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
        wide = as_tuple(eager(*(v.detach().float() if is_floating(v) else v for v in inputs), **kwargs))
        subject.must_round_once(outputs, wide, expected)

    begun = subject.placed(inputs, at_end=False)
    with otherwise():  # shows where a barrier is missing, and a sum that depends on the number of threads
        returned = subject.functional(begun)
    for name, out, like in zip(subject.out_names, returned, composed, strict=True):
        if (out.shape, out.dtype, out.device) != (like.shape, like.dtype, like.device):
            found = f"{tuple(out.shape)} {out.dtype} {out.device}"
            subject.fail(f"`{name}` is {found}, eager gives {tuple(like.shape)} {like.dtype} {like.device}")
    _check_no_aliases(subject, returned, begun)
    subject.must_equal(outputs, returned, "two runs, the second by the Python function")

    before, difference = _compare_with_rung_before(subject, placed, outputs, composed, allowed)

    if layouts:
        for layout in LAYOUTS:
            unaligned = subject.out_names if layout == "unaligned" else ()
            got = subject.into(
                subject.placed(inputs, layout), composed, unaligned=unaligned, at_end=layout != LAYOUTS[-1]
            )
            error = max(error, subject.compare(got, expected, allowed, f"inputs laid out '{layout}'"))
    if alone:
        for index, (name, value) in enumerate(zip(subject.names, inputs, strict=False)):
            for layout in layouts_alone(value) if isinstance(value, torch.Tensor) else ():
                other = relaid(subject.fences, name, value, layout)
                got = subject.into((*placed[:index], other, *placed[index + 1 :]), composed)
                error = max(error, subject.compare(got, expected, allowed, f"`{name}` alone laid out '{layout}'"))
        for name in subject.out_names:
            got = subject.into(placed, composed, unaligned=(name,))
            error = max(error, subject.compare(got, expected, allowed, f"`{name}` alone laid out 'unaligned'"))

    if subject.device.type == "cuda":
        _check_stream(subject, placed, outputs)
    subject.keep(inputs, outputs)
    greatest = max((limits.max().item() for limits in allowed if limits.numel()), default=0.0)
    return Contract(error, greatest, before, difference)


def _check_no_aliases(subject: _Subject, returned, inputs) -> None:
    seen = [value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor) and value.numel()]
    for name, out in zip(subject.out_names, returned, strict=True):
        if out.numel() == 0:
            continue
        if out.untyped_storage().data_ptr() in seen:
            subject.fail(f"`{name}` shares memory with an input or another output")
        seen.append(out.untyped_storage().data_ptr())


def _compare_with_rung_before(subject: _Subject, inputs, outputs, like, allowed) -> tuple[str | None, float | None]:
    """Compares with the nearest earlier rung that can do `inputs`, else with `pieces`. Both may be off as allowed."""
    names = subject.step.rungs(subject.op, subject.device)
    earlier = names[: names.index(subject.rung)] if subject.rung in names else []
    pieces = [name for name in names if name == "pieces" and subject.rung != name]
    for name in [*reversed(earlier), *pieces]:
        other = _Subject(subject.step, subject.op, name, subject.device, subject.kwargs, subject.fences)
        try:
            theirs = other.passed(inputs) or other.into(inputs, like)
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
    late = [torch.full_like(v, torch.nan) if is_floating(v) else v for v in inputs]
    outs = {
        n: torch.full_like(o, torch.nan if is_floating(o) else -1)
        for n, o in zip(subject.out_names, outputs, strict=True)
    }
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(stream), torch.no_grad(), poisoned_allocations():
        torch.cuda._sleep(_DELAY_CYCLES)
        for to, value in zip(late, inputs, strict=True):
            if is_floating(value):
                to.copy_(value)
        subject.out_variant(*late, rung=subject.rung, **subject.kwargs, **outs)
        got = [out.clone() for out in outs.values()]
    torch.cuda.synchronize(subject.device)
    subject.must_equal(outputs, got, "on a stream that is not the default one")


def check_inside(step: types.ModuleType, function: Callable, **tensors: torch.Tensor) -> None:
    """Checks that `function` accesses nothing beside `tensors`: for an op without an out-variant, on a CPU.

    It takes them by their names, laid out as by `check_contract`, whose memory ends or begins where they do, and may
    write into them. The AssertionError names the tensor, the side and the kernel.
    """
    with Fences(step, next(iter(tensors.values())).device) as fences:
        for layout, at_end in [("aligned", True), ("aligned", False), ("unaligned", True), ("rows apart", True)]:
            function(**{name: relaid(fences, name, t, layout, at_end=at_end) for name, t in tensors.items()})
            fences.look(step.__name__)
        assert not fences.found, fences.found[0]


def check_apart(step: types.ModuleType, op: str, inputs: tuple, kwargs: dict | None = None) -> None:
    """Checks that `op` refuses an output that shares memory with an input or another output, whichever two they are.

    Where two only touch, it must run. Of an op without an out-variant, the inputs that it writes into are outputs; with
    one, `inputs` are without these.
    """
    kwargs = kwargs or {}
    packet = getattr(getattr(torch.ops, step.__name__), op)
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
            same_bits(again, first, f"run {run + 2}")
        elif any(differ(a, b, varies).any() for a, b in zip(again, first, strict=True)):
            raise AssertionError(f"run {run + 2} differs by more than the order of sums explains")
