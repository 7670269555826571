"""This repository's own texts, byte by byte, and a bar for those who learn them: an interpolated bigram model."""

import itertools
import math
import os
import pathlib
from collections.abc import Iterator

import numpy as np
import torch

from kernel_fusion import steps

SUFFIXES = {".md", ".py", ".cu", ".cpp", ".h", ".txt"}
NOT_OURS = {"build", "out", "node_modules"}  # beside folders whose name begins with a dot
PIECE = 2048  # bytes; every tenth piece of the documents is held out
EVALUATED = 24  # of those, as many as a few seconds suffice for


def read_documents(root: pathlib.Path = steps.ROOT) -> list[bytes]:
    """The repository's texts and sources, in the order of their paths."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name for name in folders if not (name.startswith(".") or name.endswith(".egg-info") or name in NOT_OURS)
        ]  # os.walk goes into these alone
        paths += [path for path in (pathlib.Path(folder, name) for name in files) if path.suffix in SUFFIXES]
    return [path.read_bytes() for path in sorted(paths)]


def parts_of(documents: list[bytes]) -> list[list[tuple[bytes, bool]]]:
    """Pieces to train on and pieces that are held out, and of each whether the one before it does not stand before it
    in its document."""
    pieces = [(text[start : start + PIECE], start == 0) for text in documents for start in range(0, len(text), PIECE)]
    if len(pieces) < 20:
        raise ValueError(f"split: `documents` must hold at least 20 pieces of {PIECE} bytes, got {len(pieces)}")
    pieces = [(piece, first or number % 10 == 0) for number, (piece, first) in enumerate(pieces)]  # 9 is held out
    train = [piece for number, piece in enumerate(pieces) if number % 10 != 9]
    held_out = pieces[9::10]
    return [train, [(piece, True) for piece, _ in held_out[:: math.ceil(len(held_out) / EVALUATED)]]]


def split(documents: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Training text and held-out text, each a tensor of bytes. The same documents always give the same split."""
    train, held_out = (as_bytes(b"".join(piece for piece, _ in part)) for part in parts_of(documents))
    return train, held_out


def split_starts(documents: list[bytes]) -> list[np.ndarray]:
    """Where in either of these texts a document begins, or goes on after a gap."""
    return [
        np.array([place for place, (_, begins) in zip(places_of(part), part, strict=False) if begins])
        for part in parts_of(documents)
    ]


def places_of(part: list[tuple[bytes, bool]]) -> Iterator[int]:
    return itertools.accumulate((len(piece) for piece, _ in part), initial=0)


def as_bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---- the bar: an interpolated bigram model ----


class Bigram:
    """p(b after a) = w0·count(a b)/count(a) + w1·count(b)/n + w2/256, the weights fitted on the training text itself.

    Counts would look best on the text they were counted on. So the weights are fitted by EM on a tenth of the text,
    with counts of the other nine, and then all of it is counted. Jelinek and Mercer, "Interpolated estimation of Markov
    source parameters from sparse data", 1980.
    """

    def __init__(self, text: torch.Tensor):
        fold = len(text) // 10
        self._count(text[fold:])
        self.weights = torch.full((3,), 1 / 3, dtype=torch.float64)
        for _ in range(50):
            parts = self._parts(text[:fold]) * self.weights
            self.weights = (parts / parts.sum(1, keepdim=True)).mean(0)
        self._count(text)

    def _count(self, text: torch.Tensor) -> None:
        text = text.long()
        pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=65536).view(256, 256).double()
        seen = pairs.sum(1, keepdim=True)
        self.single = torch.bincount(text, minlength=256).double() / len(text)
        self.after = torch.where(seen > 0, pairs / seen.clamp(min=1), self.single)  # a byte never seen says nothing

    def _parts(self, text: torch.Tensor) -> torch.Tensor:
        """The three probabilities of each byte but the first, [n - 1, 3]."""
        text = text.long()
        uniform = torch.full((len(text) - 1,), 1 / 256, dtype=torch.float64)
        return torch.stack([self.after[text[:-1], text[1:]], self.single[text[1:]], uniform], dim=1)

    def loss(self, text: torch.Tensor) -> float:
        """Nats a byte on `text`, its first byte aside."""
        return -(self._parts(text) @ self.weights).log().mean().item()
