"""Which tokens a step sees. The n-th batch is a function of the seed and n, so that to go on, a number suffices.

No state is kept, and nobody else's batches are known: of several processes each takes its own rank's.
"""

import bisect
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np
import torch

WHOLE, PIECE, PIECES = 1 << 24, 4096, 64  # tokens: up to how many all are hashed; else so many pieces


class Tokens:
    """Token ids in arrays, perhaps files that are mapped into memory. No window reaches over the end of an array."""

    def __init__(self, arrays: Sequence[np.ndarray], names: Sequence[str]):
        """`names`: of the arrays, for errors."""
        self.arrays, self.names = list(arrays), list(names)

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    def first(self, count: int) -> torch.Tensor:
        """The first tokens, at most so many."""
        parts, missing = [], count
        for array in self.arrays:
            parts.append(array[:missing].astype(np.int64))
            missing -= len(parts[-1])
        return torch.from_numpy(np.concatenate(parts))

    def digest(self) -> str:
        """What tells these tokens from others. Of a large array only pieces are read."""
        found = hashlib.sha256()
        for array in self.arrays:
            found.update(f"{len(array)} {array.itemsize};".encode())
            if len(array) <= WHOLE:
                found.update(np.ascontiguousarray(array).tobytes())
            else:
                for begin in np.linspace(0, len(array) - PIECE, PIECES, dtype=np.int64).tolist():
                    found.update(np.ascontiguousarray(array[begin : begin + PIECE]).tobytes())
        return found.hexdigest()[:16]


class Batches:
    """Batches of windows of length + 1 tokens: as many inputs, and each one's next token.

    In an epoch the windows lie side by side from a random token on, and come in a shuffled order, each once. The next
    epoch begins at another token and has another order.
    """

    def __init__(
        self, tokens: Tokens, length: int, batch: int, *, vocab_size: int, seed: int, rank: int = 0, world: int = 1
    ):
        self.tokens, self.length, self.batch, self.vocab_size = tokens, length, batch, vocab_size
        self.seed, self.rank, self.world = seed, rank, world
        # One less than would fit, so that there are as many wherever the first begins.
        counts = [max(0, (len(array) - length) // length) for array in tokens.arrays]
        self.ends = list(itertools.accumulate(counts))
        self.windows = self.ends[-1] if self.ends else 0
        if not self.windows:
            most = max(map(len, tokens.arrays), default=0)
            raise ValueError(
                f"train: the data must hold at least {2 * length} tokens in a row, twice the context, got {most}"
            )

    def at(self, number: int) -> torch.Tensor:
        """Batch `number`, [batch, length + 1], int64.

        Raises:
            ValueError: a token that the vocabulary does not have; the text names it.
        """
        begin = (number * self.world + self.rank) * self.batch
        return torch.from_numpy(np.stack([self._window(index) for index in range(begin, begin + self.batch)]))

    def _window(self, index: int) -> np.ndarray:
        epoch, among = divmod(index, self.windows)
        key = mixed(mixed(self.seed) + epoch)
        place = shuffled(among, self.windows, key)
        which = bisect.bisect_right(self.ends, place)
        before = self.ends[which - 1] if which else 0
        begin = key % self.length + (place - before) * self.length
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
