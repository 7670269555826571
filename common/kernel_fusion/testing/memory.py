"""Memory that shows what was done to it, and tensors laid out as no rung expects them."""

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from kernel_fusion.testing.fences import Fences

# Repeated every two bytes: a NaN in each floating type, and none that arithmetic or torch.empty give by themselves.
POISON = 0xFFFD
OTHER_FILL = 0x3C3C  # small numbers
_GUARD_BYTES = 4096  # on each side of a tensor
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT = 16  # bytes: what vectors need
LAYOUTS = ("unaligned", "rows apart", "every second element")
_MORE_LAYOUTS = ("columns first", "outermost inside")  # for a tensor alone


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers: so compared, NaN equals itself and 0 differs from −0."""
    return tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])


def storage(tensor: torch.Tensor) -> torch.Tensor:
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


def place_of(fences: Fences, name: str, layout: str, at_end: bool) -> _Place:
    return _Place(fences, f"`{name}` ({layout})", at_end, unaligned=layout == "unaligned")


def _cut(shape, dtype: torch.dtype, device, place: _Place, fill: int = POISON) -> tuple[torch.Tensor, int, int]:
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


class Guarded:
    """A tensor for outputs, cut from a larger buffer, all of it filled with poison."""

    def __init__(self, shape, dtype: torch.dtype, device, place: _Place, *, fill: int = POISON):
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
        return bits(self.tensor) == _pattern(self.fill, self.tensor.element_size())


def _among_nan(shape, strides, dtype: torch.dtype, device, place: _Place) -> torch.Tensor:
    """A tensor for inputs, cut from a larger buffer of ordinary NaN (−1 where `dtype` has none, in bool True)."""
    extent = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    buffer, start, end = _cut((extent,), dtype, device, place)
    if dtype == torch.bool:
        whole = buffer.fill_(1).view(dtype)
    else:
        whole = buffer.view(dtype).fill_(torch.nan if dtype.is_floating_point else -1)
    return whole[start // dtype.itemsize : end // dtype.itemsize].as_strided(shape, strides)


def relaid(fences: Fences, name: str, value: Any, layout: str, *, at_end: bool = True) -> Any:
    """A tensor with the elements of `value` in other places, NaN around them. What is no tensor stays as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    place, shape = place_of(fences, name, layout, at_end), list(value.shape)
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


def layouts_alone(value: torch.Tensor) -> tuple[str, ...]:
    """The layouts that are no other than another one for a tensor of that shape."""
    if value.dim() == 0:
        return ()
    if value.dim() == 1:
        return ("unaligned", "every second element")
    return (*LAYOUTS, "columns first", *(["outermost inside"] if value.dim() >= 3 else []))


@contextlib.contextmanager
def otherwise() -> Iterator[None]:
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


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def same_bits(outputs, expected, what: str) -> None:
    for index, (out, want) in enumerate(zip(outputs, expected, strict=True)):
        if (out.shape, out.dtype, out.stride()) != (want.shape, want.dtype, want.stride()):
            raise AssertionError(
                f"{what}: output {index} has another shape, dtype or strides than before, in eager mode"
            )
        if not torch.equal(bits(out), bits(want)):
            raise AssertionError(f"{what}: output {index} has other bits than before, in eager mode")
