"""Memory between pages that nobody may access: shows reads before the begin and past the end of a tensor.

A step's library has the handler of faults (emulator/src/signals.cpp), which notes who accessed such a page, opens
it and goes on; so one run tells about all tensors.
"""

import ctypes
import mmap
import re
import types
from typing import NamedTuple

import torch

_FENCE_BYTES = 1 << 20  # addresses only, as long as nobody comes there
_ACCESS = re.compile(r"region (\d+): (reads|writes) (0x[0-9a-f]+), \d+ bytes into it, by (.*)")
_TEXT_BYTES = 1 << 12


class _Fence(NamedTuple):
    whose: str
    before: bool
    begin: int  # of the tensor, as an address
    end: int


class Fences:
    """Hands out memory for CPU tensors, and tells who accessed what lies beside them. A context manager."""

    def __init__(self, step: types.ModuleType, device: torch.device):
        """The library of `step` watches. Without one, or for a GPU's tensors, there is nothing to hand out."""
        file = getattr(getattr(step, "_C", None), "__file__", None)
        self.active = device.type == "cpu" and file is not None
        self.found: list[str] = []  # what was accessed, each once
        self._fences: list[_Fence] = []
        if self.active:
            self._library = ctypes.CDLL(file)
            self._protect = ctypes.CDLL(None, use_errno=True).mprotect

    def __enter__(self) -> "Fences":
        return self

    def __exit__(self, *error) -> None:
        if self.active:
            self._library.kf_simt_unwatch()

    def memory(self, size: int, begin: int, end: int, whose: str) -> torch.Tensor:
        """Memory of `size` bytes, whole pages, with a fence before and one behind; zeros.

        Args:
            size: a multiple of the page size.
            begin, end: where in it a tensor lies, in bytes.
            whose: names the tensor in what is found.
        """
        pages = mmap.mmap(-1, size + 2 * _FENCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        first = address + _FENCE_BYTES
        for before, fence in ((True, address), (False, first + size)):
            # The pages live as long as the tensor, which may be no longer than this object: then nobody comes there.
            if self._protect(ctypes.c_void_p(fence), ctypes.c_size_t(_FENCE_BYTES), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
            self._library.kf_simt_watch(ctypes.c_void_p(fence), ctypes.c_size_t(_FENCE_BYTES))
            self._fences.append(_Fence(whose, before, first + begin, first + end))
        return torch.frombuffer(pages, dtype=torch.uint8, offset=_FENCE_BYTES, count=size)

    def look(self, by: str) -> None:
        """Adds to `found` what was accessed since the last look, by `by`."""
        if not self.active:
            return
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._library.kf_simt_seen(text, ctypes.c_size_t(_TEXT_BYTES))
        for number, how, where, thread in _ACCESS.findall(text.value.decode()):
            fence = self._fences[int(number)]
            far = fence.begin - int(where, 16) if fence.before else int(where, 16) - fence.end
            side = "before the begin" if fence.before else "past the end"
            did = "read" if how == "reads" else "written"
            self.found.append(f"{by}: memory {side} of {fence.whose} was {did}, {far} bytes from it, by {thread}")
