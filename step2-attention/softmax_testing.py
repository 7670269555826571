"""What the tests of `softmax` and of its gradient share: the mask of squares, and which memory was looked at."""

import mmap
import pathlib

import pytest
import torch

SQUARES = [
    (1, 1),
    (5, 5),
    (2, 33, 33),
    (2, 3, 4, 4),
    (130, 130),
    (140, 140),
    (2, 1, 40),
    (3, 7, 31),
    (2, 2, 1023),
    (2, 40, 33),
]

PAGEMAP = pathlib.Path("/proc/self/pagemap")
needs_touched_pages = pytest.mark.skipif(not PAGEMAP.exists(), reason="needs Linux's list of touched pages")


def hidden_of(x):
    """What the causal mask hides of squares of scores: lower right corners meet."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(x.shape[-1] - x.shape[-2] + 1)


def untouched_square():
    """A float64 square of zeros in memory that nobody has touched, not even for reading. A row has two pages."""
    width = 2 * mmap.PAGESIZE // 8
    memory = mmap.mmap(-1, 8 * width * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float64).view(width, width)


def touched_pages(square):
    """Which pages of an `untouched_square` are there by now: bool [width, 2]."""
    with PAGEMAP.open("rb") as pages:  # 64 bits a page; the highest says that it is there
        pages.seek(square.data_ptr() // mmap.PAGESIZE * 8)
        listed = torch.frombuffer(bytearray(pages.read(8 * 2 * len(square))), dtype=torch.int64)
    return (listed < 0).view(-1, 2)
