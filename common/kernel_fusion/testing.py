"""What a rung must keep to, checked by one call: `check_contract`. And what a registered op must keep to: `check_op`.

Environment:
    KF_TEST_DEVICES    cpu | cuda: only that device. Where it names cuda, a missing GPU is a failure, not a skip.
    KF_SIMT_SCHEDULE   forward | reverse | random:SEED: the order of an emulated block's threads between barriers.
"""

import contextlib
import copy
import importlib
import math
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import pytest
import torch

from kernel_fusion.accuracy import allowance, as_tuple, in_float64, max_error, poisoned_allocations

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

_POISON = -1  # all bits set: a NaN in each floating type, and one that arithmetic on other NaNs does not give
_GUARD_BYTES = 4096  # on each side of a tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DELAY_CYCLES = 20_000_000  # about ten milliseconds of a GPU doing nothing
_LAYOUTS = ("unaligned", "rows apart", "every second element")


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


def randn(shape, dtype: torch.dtype, device, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """`scale` times normal numbers: the same on every device, and in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)


# ---- memory that shows what was done to it ----


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers: so compared, NaN equals itself and 0 differs from −0."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    """The whole memory that `tensor` lies in, as integers."""
    storage = tensor.untyped_storage()
    dtype = torch.int64 if storage.nbytes() % 8 == 0 else torch.uint8
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage)


def _cut(shape, dtype: torch.dtype, device, *, unaligned: bool) -> tuple[torch.Tensor, int, int]:
    """A buffer of poison as bytes, and where in it a tensor begins and ends: aligned, or one element further."""
    start = _GUARD_BYTES + (dtype.itemsize if unaligned else 0)
    end = start + dtype.itemsize * math.prod(shape)
    words = -(-(end + _GUARD_BYTES) // 8)
    return torch.full((words,), _POISON, dtype=torch.int64, device=device).view(torch.uint8), start, end


class _Guarded:
    """A tensor for outputs, cut from a larger buffer, all of it filled with poison."""

    def __init__(self, shape, dtype: torch.dtype, device, *, unaligned: bool = False):
        self.buffer, self.start, self.end = _cut(shape, dtype, device, unaligned=unaligned)
        self.tensor = self.buffer[self.start : self.end].view(dtype).view(shape)

    def written_outside(self) -> int:
        """How many bytes of the guards are no longer as they were."""
        return sum(int((part != 0xFF).sum()) for part in (self.buffer[: self.start], self.buffer[self.end :]))

    def unwritten(self) -> list[int]:
        """The flat indices of elements that still hold the poison."""
        return (_bits(self.tensor).flatten() == _POISON).nonzero().flatten().tolist()


def _among_nan(shape, dtype: torch.dtype, device, *, unaligned: bool = False) -> torch.Tensor:
    """A tensor for inputs, cut from a larger buffer of ordinary NaN (−1 where `dtype` has none)."""
    buffer, start, end = _cut(shape, dtype, device, unaligned=unaligned)
    whole = buffer.view(dtype)
    if dtype.is_floating_point:
        whole.fill_(torch.nan)
    return whole[start // dtype.itemsize : end // dtype.itemsize].view(shape)


def _relaid(value: Any, layout: str) -> Any:
    """A tensor with the elements of `value` in other places, NaN around them. What has no dimension stays as it is."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.dtype == torch.bool:
        return value
    shape = list(value.shape)
    if layout == "every second element":
        shape[-1] *= 2
        view = _among_nan(shape, value.dtype, value.device)[..., ::2]
    elif layout == "rows apart":
        # As GPT-2's heads lie: [..., rows, heads, width + 3] in memory, seen as [..., heads, rows, width].
        shape[-1] += 3
        if value.dim() >= 3:
            shape[-2], shape[-3] = shape[-3], shape[-2]
        view = _among_nan(shape, value.dtype, value.device)[..., : value.shape[-1]]
        if value.dim() >= 3:
            view = view.transpose(-2, -3)
    else:
        view = _among_nan(shape, value.dtype, value.device, unaligned=layout == "unaligned")
    return view.copy_(value.detach())


@contextlib.contextmanager
def _schedule(name: str) -> Iterator[None]:
    before = os.environ.get("KF_SIMT_SCHEDULE")
    os.environ["KF_SIMT_SCHEDULE"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["KF_SIMT_SCHEDULE"]
        else:
            os.environ["KF_SIMT_SCHEDULE"] = before


def _other_schedule() -> str:
    return "forward" if os.environ.get("KF_SIMT_SCHEDULE") == "reverse" else "reverse"


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

    def __init__(self, stage: types.ModuleType, op: str, rung: str, device: torch.device, kwargs: dict):
        self.stage, self.op, self.rung, self.device, self.kwargs = stage, op, rung, device, kwargs
        packet = getattr(getattr(torch.ops, stage.__name__), op)
        if "out" not in packet.overloads():
            raise ValueError(f"{stage.__name__}.{op} has no out-variant; check_contract needs one")
        self.out_variant = packet.out
        arguments = self.out_variant._schema.arguments
        self.out_names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if device.type == "cuda":
            self.backend = "gpu"
        else:
            self.backend = "cpu" if rung in ("auto", "cpu") else "emulated"

    def fail(self, text: str) -> NoReturn:
        raise ContractError(f"{self.stage.__name__}.{self.op}, rung '{self.rung}' on {self.device}: {text}")

    def functional(self, inputs) -> tuple[torch.Tensor, ...]:
        """Runs the Python function, its memory full of NaN beforehand."""
        with poisoned_allocations():
            return self._counted(
                inputs, lambda: as_tuple(getattr(self.stage, self.op)(*inputs, rung=self.rung, **self.kwargs))
            )

    def into(self, inputs, like, *, unaligned: bool = False) -> tuple[torch.Tensor, ...]:
        """Runs the out-variant into tensors shaped as `like`, cut from poisoned buffers that are checked after."""
        guarded = [_Guarded(t.shape, t.dtype, self.device, unaligned=unaligned) for t in like]
        outs = {name: g.tensor for name, g in zip(self.out_names, guarded, strict=True)}
        with poisoned_allocations():
            self._counted(inputs, lambda: self.out_variant(*inputs, rung=self.rung, **self.kwargs, **outs))
        for name, g in zip(self.out_names, guarded, strict=True):
            outside = g.written_outside()
            if outside:
                self.fail(f"{outside} bytes outside `{name}` were written")
            unwritten = g.unwritten()
            if unwritten:
                of = f"{len(unwritten)} of {g.tensor.numel()} elements of `{name}`"
                self.fail(f"{of} were never written, the first at flat index {unwritten[0]}")
        return tuple(g.tensor for g in guarded)

    def _counted(self, inputs, run: Callable) -> Any:
        """Runs, and checks that the right backend did, and that the inputs' memory is as it was."""
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        untouched = [_storage(tensor).clone() for tensor in tensors]
        before = self.stage.launch_counts()
        with torch.no_grad():
            result = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        after = self.stage.launch_counts()
        ran = {backend: after[backend] - before[backend] for backend in after if after[backend] != before[backend]}
        empty = all(tensor.numel() == 0 for tensor in as_tuple(result))
        if set(ran) != {self.backend} and not (empty and not ran):
            self.fail(f"must run on the backend '{self.backend}'; launches counted: {ran or 'none'}")
        for index, (tensor, copy_before) in enumerate(zip(tensors, untouched, strict=True)):
            if not torch.equal(_storage(tensor), copy_before):
                self.fail(f"input tensor {index} (shape {tuple(tensor.shape)}), or memory beside it, was modified")
        return result

    def compare(self, outputs, references, allowed, what: str) -> float:
        """Fails where an output is farther from its reference than allowed. Returns the greatest error."""
        worst = 0.0
        for name, out, reference, limit in zip(self.out_names, outputs, references, allowed, strict=True):
            error = max_error(out, reference)
            if not error <= limit:
                nan = int(out.isnan().sum()) if out.is_floating_point() else 0
                note = f", {nan} elements are NaN" if nan else ""
                self.fail(f"{what}: `{name}` is {error:.3g} off, allowed are {limit:.3g}{note}")
            worst = max(worst, error)
        return worst

    def must_equal(self, outputs, others, what: str) -> None:
        """Fails where two runs differ in a bit."""
        for name, a, b in zip(self.out_names, outputs, others, strict=True):
            different = int((_bits(a) != _bits(b)).sum())
            if different:
                self.fail(f"{what}: `{name}` differs in {different} of {a.numel()} elements")


def check_contract(
    stage: types.ModuleType,
    op: str,
    inputs: tuple,
    rung: str,
    *,
    reference: Callable,
    eager: Callable,
    kwargs: dict | None = None,
    layouts: bool = True,
) -> Contract:
    """Runs `rung` of `op` on `inputs` and checks all that every rung must keep to.

    - Outputs are cut from larger buffers of NaN: every element is written, nothing beside them is.
    - The error against `reference` in float64 is at most twice that of `eager` plus 1e-5·max|reference|
      (1e-12 in float64). NaN is an error.
    - The rung before agrees.
    - A second run, emulated in another order of threads, gives the same bits; so does the Python function.
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

    Returns:
        A `Contract` with the figures.

    Raises:
        ContractError: the rung breaks one of these; the text says which.
    """
    kwargs = kwargs or {}
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    subject = _Subject(stage, op, rung, device, kwargs)

    # Each gets copies, since a faulty one might write into what the other reads.
    expected = as_tuple(reference(*map(in_float64, inputs), **copy.deepcopy(kwargs)))
    composed = as_tuple(eager(*(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in inputs), **kwargs))
    if len(expected) != len(subject.out_names) or len(composed) != len(subject.out_names):
        raise ValueError(f"`reference` and `eager` must return {len(subject.out_names)} outputs as {op} does")
    for tensor in expected:
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            raise ValueError(f"`reference` must return float64, got {tensor.dtype}")
    allowed = [allowance(r, e) for r, e in zip(expected, composed, strict=True)]

    placed = tuple(_relaid(value, "aligned") for value in inputs)
    outputs = subject.into(placed, composed)
    error = subject.compare(outputs, expected, allowed, "against float64")

    # Emulated threads run in another order this time, which shows where a barrier is missing.
    with _schedule(_other_schedule()):
        again = subject.into(placed, composed)
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
            relaid = tuple(_relaid(value, layout) for value in inputs)
            got = subject.into(relaid, composed, unaligned=layout == "unaligned")
            error = max(error, subject.compare(got, expected, allowed, f"inputs laid out '{layout}'"))

    if device.type == "cuda":
        _check_stream(subject, placed, outputs)
    return Contract(error, max(allowed), before, difference)


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
        other = _Subject(subject.stage, subject.op, name, subject.device, subject.kwargs)
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
    """On a stream of its own, inputs that arrive late there: work on any other stream reads NaN."""
    stream = torch.cuda.Stream(subject.device)
    late = [_relaid(torch.full_like(v, torch.nan), "aligned") if _is_floating(v) else v for v in inputs]
    outs = {n: torch.full_like(o, torch.nan) for n, o in zip(subject.out_names, outputs, strict=True)}
    torch.cuda.synchronize(subject.device)
    with torch.cuda.stream(stream), torch.no_grad():
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


def _check_cuda_graph(function: Callable, inputs: tuple, kwargs: dict, name: str) -> None:
    """Captures a call on inputs of NaN, then replays it on the real ones."""
    static = tuple(torch.full_like(v, torch.nan) if _is_floating(v) else v for v in inputs)
    with torch.no_grad():
        expected = as_tuple(function(*inputs, **kwargs))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(*static, **kwargs)  # what is set up on the first call cannot be captured
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = as_tuple(function(*static, **kwargs))
        for to, value in zip(static, inputs, strict=True):
            if _is_floating(value):
                to.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
    _same_bits(captured, expected, f"{name} replayed from a CUDA graph")


def _same_bits(outputs, expected, what: str) -> None:
    for index, (out, want) in enumerate(zip(outputs, expected, strict=True)):
        if (out.shape, out.dtype, out.stride()) != (want.shape, want.dtype, want.stride()):
            raise AssertionError(f"{what}: output {index} has another shape, dtype or strides than in eager mode")
        if not torch.equal(_bits(out), _bits(want)):
            raise AssertionError(f"{what}: output {index} differs from eager mode")


# ---- small helps for test files ----


@contextlib.contextmanager
def raises(exception: type[BaseException], *fragments: str) -> Iterator[Any]:
    """As pytest.raises, and the message must contain every fragment."""
    with pytest.raises(exception) as caught:
        yield caught
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    if missing:
        raise AssertionError(f"the message lacks {missing}: {caught.value}") from caught.value


def main(file: str) -> NoReturn:
    """Runs the tests in `file`, with the command line's further arguments for pytest, and exits with pytest's code."""
    sys.exit(pytest.main([file, *sys.argv[1:]]))
