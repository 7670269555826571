"""Which tokens a step sees. The n-th batch is a function of the seed and n, so that to go on, a number suffices.

No state is kept, and nobody else's batches are known: of several processes each takes its own rank's.
"""

import bisect
import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

WHOLE, PIECE, PIECES = 1 << 24, 4096, 64  # tokens: up to how many all are hashed; else so many pieces


class Tokens:
    """Token ids in arrays, perhaps files that are mapped into memory. No window reaches over the end of an array."""

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        names: Sequence[str],
        *,
        starts: Sequence[np.ndarray] | None = None,
        end_of_text: int | None = None,
    ):
        """`names`: of the arrays, for errors. Where a document begins say `starts`, of each array its places in their
        order, or else the token that ends the one before, `end_of_text`; or nobody."""
        self.arrays, self.names = list(arrays), list(names)
        self.starts, self.end_of_text = starts, end_of_text

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    def first(self, count: int) -> torch.Tensor:
        """The first tokens, at most so many."""
        parts, missing = [], count
        for array in self.arrays:
            parts.append(array[:missing].astype(np.int64))
            missing -= len(parts[-1])
        return torch.from_numpy(np.concatenate(parts))

    def begins(self, which: int, first: int, count: int) -> np.ndarray:
        """Of so many tokens of an array, from the one at `first` on, which begin a document: bool [count]."""
        found = np.zeros(count, bool)
        if self.starts is not None:
            among = np.searchsorted(self.starts[which], [first, first + count])
            found[self.starts[which][slice(*among)] - first] = True
        else:
            found[1:] = self.arrays[which][first : first + max(count, 1) - 1] == self.end_of_text
        found[:1] |= first == 0
        return found

    def first_begins(self, count: int) -> torch.Tensor:
        """The same of the tokens that `first` gives."""
        lengths = np.diff([0, *np.minimum(np.cumsum([len(array) for array in self.arrays]), count)])
        return torch.from_numpy(np.concatenate([self.begins(i, 0, length) for i, length in enumerate(lengths)]))

    def digest(self, with_documents: bool = False) -> str:
        """What tells these tokens from others, and perhaps their documents. Of a large array only pieces are read."""
        found = hashlib.sha256()
        if with_documents:
            found.update(f"{self.end_of_text};".encode())
            for starts in self.starts or []:
                found.update(np.asarray(starts, np.int64).tobytes())
        for array in self.arrays:
            found.update(f"{len(array)} {array.itemsize};".encode())
            if len(array) <= WHOLE:
                found.update(np.ascontiguousarray(array).tobytes())
            else:
                for begin in np.linspace(0, len(array) - PIECE, PIECES, dtype=np.int64).tolist():
                    found.update(np.ascontiguousarray(array[begin : begin + PIECE]).tobytes())
        return found.hexdigest()[:16]


class Packed(NamedTuple):
    """Windows side by side in one row, as documents of which none sees another, and each with positions of its own.

    A window begins a document, whatever came before it. There is always room for one that begins at each token, so that
    a step's tensors are of one shape; the documents that are left over are empty.
    """

    ids: torch.Tensor  # [1, windows * length]
    targets: torch.Tensor  # as `ids`; -100 where the next token begins a document, and nobody can know it
    cu_seqlens: torch.Tensor  # int32 [windows * length + 1]


def packed(windows: torch.Tensor, begins: torch.Tensor) -> Packed:
    """The row that windows [batch, length + 1] make, of whose tokens these, a bool each, begin a document."""
    targets = windows[:, 1:].masked_fill(begins[:, 1:], -100)
    begins = begins[:, :-1].clone()
    begins[:, 0] = True
    cu_seqlens = torch.full((targets.numel() + 1,), targets.numel(), dtype=torch.int32, device=windows.device)
    starts = begins.flatten().nonzero()[:, 0]
    cu_seqlens[: len(starts)] = starts
    return Packed(windows[:, :-1].reshape(1, -1), targets.reshape(1, -1), cu_seqlens)


class Batches:
    """Batches of windows of length + 1 tokens: as many inputs, and each one's next token. Or `packed` ones.

    In an epoch the windows lie side by side from a random token on, and come in a shuffled order, each once. The next
    epoch begins at another token and has another order.
    """

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        batch: int,
        *,
        vocab_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        packed: bool = False,
    ):
        self.tokens, self.length, self.batch, self.vocab_size = tokens, length, batch, vocab_size
        self.seed, self.rank, self.world, self.packed = seed, rank, world, packed
        # One less than would fit, so that there are as many wherever the first begins.
        counts = [max(0, (len(array) - length) // length) for array in tokens.arrays]
        self.ends = list(itertools.accumulate(counts))
        self.windows = self.ends[-1] if self.ends else 0
        if not self.windows:
            most = max(map(len, tokens.arrays), default=0)
            raise ValueError(
                f"train: the data must hold at least {2 * length} tokens in a row, twice the context, got {most}"
            )

    def at(self, number: int) -> torch.Tensor | Packed:
        """Batch `number`, [batch, length + 1], int64, or packed.

        Raises:
            ValueError: a token that the vocabulary does not have; the text names it. Or a packed batch without a
                target, of which no mean loss can be taken.
        """
        begin = (number * self.world + self.rank) * self.batch
        places = [self._place(index) for index in range(begin, begin + self.batch)]
        windows = torch.from_numpy(np.stack([self._window(*place) for place in places]))
        if not self.packed:
            return windows
        begins = [self.tokens.begins(*place, self.length + 1) for place in places]
        row = packed(windows, torch.from_numpy(np.stack(begins)))
        if not (row.targets >= 0).any():
            raise ValueError(
                f"train: with `packed` batch {number} has no token to predict: its documents are of one token each"
            )
        return row

    def _place(self, index: int) -> tuple[int, int]:
        """In which array a window lies, and where it begins there."""
        epoch, among = divmod(index, self.windows)
        key = mixed(mixed(self.seed) + epoch)
        place = shuffled(among, self.windows, key)
        which = bisect.bisect_right(self.ends, place)
        before = self.ends[which - 1] if which else 0
        return which, key % self.length + (place - before) * self.length

    def _window(self, which: int, begin: int) -> np.ndarray:
        window = self.tokens.arrays[which][begin : begin + self.length + 1].astype(np.int64)
        if window.max() >= self.vocab_size:
            at = int(np.argmax(window >= self.vocab_size))
            raise ValueError(
                f"train: tokens must be below the model's `vocab_size`, {self.vocab_size}; "
                f"{self.tokens.names[which]} has {window[at]} at {begin + at}"
            )
        return window


BITS = (1 << 64) - 1


def mixed(x: int) -> int:
    """64 bits that look random, another for each x: splitmix64, Steele, Lea and Flood, 2014."""
    x = (x + 0x9E3779B97F4A7C15) & BITS
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS
    return x ^ (x >> 31)


def shuffled(index: int, count: int, key: int) -> int:
    """Where `index` comes among `count` in the order of this key: a permutation of which nothing is stored.

    A Feistel network permutes the numbers of an even count of bits; what is too large is permuted again. Luby and
    Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for turn in range(4):
            left, right = right, left ^ (mixed(key + 4 * right + turn) & ((1 << half) - 1))
        index = left << half | right
        if index < count:
            return index
