"""Inputs of tests."""

import mmap
from typing import Any

import pytest
import torch


def randn(shape, dtype: torch.dtype, device, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """`scale` times normal numbers: the same on every device, and in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, dtype)


def staircase(length: int, device) -> torch.Tensor:
    """Levels to add to the columns of a row (or to keys): parts of it, however it is divided, have different means.

    Such a part has some bits of the column's number in common; each bit that is set adds 1. So what a rung loses where
    it puts parts together (the squares of their distance, how many columns the last one has) is no small share of the
    whole.

    Returns:
        float64 [length], with a mean of about 0.
    """
    column = torch.arange(length, device=device)
    bits = range(max(1, (length - 1).bit_length()))
    return torch.stack([(column >> bit & 1).double() - 0.5 for bit in bits]).sum(0)


def transposed(value: Any) -> Any:
    """A tensor with its last two dimensions the other way round in memory; what has fewer stays as it is."""
    return value.mT.contiguous().mT if isinstance(value, torch.Tensor) and value.dim() >= 2 else value


def lazy_memory(elements: int, dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A vector of zeros, on the CPU in memory that exists only where it is touched: larger than the machine's own.

    Skips the test where even that cannot be had, or, on a GPU, where there is too little memory.
    """
    size = elements * dtype.itemsize
    if torch.device(device).type == "cuda":
        if torch.cuda.mem_get_info()[0] < size + (1 << 30):
            pytest.skip(f"needs {size >> 30} GiB of GPU memory")
        return torch.zeros(elements, dtype=dtype, device=device)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python 3.11 knows the name
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"cannot reserve {size >> 30} GiB of addresses: {error}")
    return torch.frombuffer(memory, dtype=dtype)
