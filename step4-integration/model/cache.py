"""Keys and values of the tokens so far, in place for a whole context: a static cache."""

import contextlib
import copy
from typing import Any, NamedTuple

import torch

from step4_integration import kv_append

# Up to so many rows one launch appends a prompt's keys and values of all layers; of more each layer has its own.
AT_ONCE = 1024


class Keys(NamedTuple):
    """What the queries of one call attend to, in one layer."""

    k: torch.Tensor  # [batch, heads, keys, head_dim]
    v: torch.Tensor
    end: torch.Tensor | None  # int32 [batch]: how many of the keys exist; None for all
    causal: bool  # the last query sees all keys, each query before it one less
    cu_seqlens: torch.Tensor | None = None  # of a packed row, where its documents begin: `causal` counts within each


class KVCache:
    """Keys and values of each layer, [layers, batch, heads, capacity, head_dim], and how many of them there are.

    Row b holds keys 0 to `end[b]`. `end` lies on the device, where a captured CUDA graph reads it: one graph then
    serves every length. Rows may be of different lengths. `length`, on the host, is the longest that a row can be.
    """

    def __init__(
        self, config: Any, batch: int, capacity: int | None = None, *, dtype=torch.float32, device: Any = "cpu"
    ):
        """`config`: a `gpt2_model.Config`. `capacity`: in tokens; None for all of the model's positions."""
        capacity = config.n_positions if capacity is None else capacity
        shape = (config.n_layer, batch, config.n_head, capacity, config.head_dim)
        # Zeros, for v1_torch: PyTorch's attention multiplies the values of masked keys by 0, and 0 · NaN is NaN. So
        # model/runner.py zeroes them again for each text. The project's ops do not look at masked keys.
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.end = torch.zeros(batch, dtype=torch.int32, device=device)
        self.next_end = self.end
        self.length, self.ragged = 0, False
        self.rung = config.rung("kv_append")
        self.rows: torch.Tensor | None = None  # what all layers have left in `rows_of`, until the call ends
        self.last: torch.Tensor | None = None  # of `open`
        self._beside: torch.cuda.Stream | None = None  # on which `rows` are appended

    @property
    def batch(self) -> int:
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        return self.k.shape[3]

    @property
    def begin(self) -> torch.Tensor | None:
        """Where each row's new tokens begin, as `end`; None for 0: then no launch reads or sets `end` first."""
        return self.end if self.length else None

    def first(self, batch: int) -> "KVCache":
        """The first rows as a cache of their own, in the same memory but for its lengths."""
        part = copy.copy(self)
        part.k, part.v = self.k[:, :batch], self.v[:, :batch]
        part.end = torch.zeros_like(self.end[:batch])
        part.clear()
        return part

    def clear(self) -> None:
        self.end.zero_()
        self.length, self.ragged = 0, False

    def open(self, new: int, last: torch.Tensor | None = None) -> None:
        """Begins a call that adds `new` tokens to every row. `last`, int64 [batch]: of a row's new tokens the last that
        is its own, and the only one whose hidden state is wanted; None for all. Behind it stands padding."""
        if self.length + new > self.capacity:
            raise ValueError(f"KVCache: {new} tokens after {self.length} are more than the capacity, {self.capacity}")
        if self.ragged and new > 1:
            raise ValueError(f"KVCache: rows of different lengths take one token at a time, got {new}")
        self.rows, self.last = None, last
        if self.length == 0:  # nobody reads `end` before
            self.next_end = self.end
            self.end.fill_(new) if last is None else torch.add(last, 1, out=self.end)
        elif last is None:
            self.next_end = self.end + new
        else:
            self.next_end = torch.add(self.end, last + 1, out=torch.empty_like(self.end))

    def rows_of(self, layer: int, length: int) -> torch.Tensor | None:
        """Where a layer of a prompt that begins a text leaves its packed q, k and v, [batch, length, 3 * width], so
        that the last layer appends those of all in one launch; None where `append` does so, layer by layer."""
        layers, batch, heads, _, head_dim = self.k.shape
        side_by_side = batch == 1 or self.k.stride(0) == batch * self.k.stride(1)
        if self.length or batch * length > AT_ONCE or not side_by_side or torch.is_grad_enabled():
            return None
        if self.rows is None:
            self.rows = self.k.new_empty(layers, batch, length, 3 * heads * head_dim)
        return self.rows[layer]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Keys:
        """Adds the new tokens' k and v, [batch, heads, new, head_dim], behind each row's keys.

        A prompt that begins a text meets its own keys alone. A single token meets all that the cache can hold, and is
        told on the device how many of them exist. Only a prompt's further parts need the host's `length`.
        """
        if self.rows is None:
            kv_append(self.k[layer], self.v[layer], k, v, 0, self.begin, rung=self.rung)
        elif layer + 1 == self.k.shape[0]:
            self._append_rows()
        new = k.shape[2]
        if self.length == 0:
            return Keys(k, v, None, causal=True)
        if new == 1:
            return Keys(self.k[layer], self.v[layer], self.next_end, causal=False)
        end = self.length + new
        return Keys(self.k[layer, :, :, :end], self.v[layer, :, :, :end], None, causal=True)

    def wanted(
        self, layer: int, q: torch.Tensor, x: torch.Tensor, keys: Keys
    ) -> tuple[torch.Tensor, torch.Tensor, Keys]:
        """What a layer computes with: behind the last one's keys and values nobody needs the other tokens of a row."""
        if self.last is None or layer + 1 < self.k.shape[0]:
            return q, x, keys
        of_row = self.last[:, None, None]
        q = q.gather(2, of_row[..., None].expand(-1, q.shape[1], 1, q.shape[3]))
        return q, x.gather(1, of_row.expand(-1, 1, x.shape[2])), Keys(keys.k, keys.v, self.next_end, causal=False)

    def _append_rows(self) -> None:
        """All layers' keys and values, in one launch. On a GPU, where a single token of each row goes on, it is beside
        what is left to compute, which is little and leaves memory idle."""
        heads, head_dim = self.k.shape[2], self.k.shape[4]
        rows = self.rows.view(-1, self.rows.shape[2], 3, heads, head_dim).permute(2, 0, 3, 1, 4)
        stream = contextlib.nullcontext()
        if self.last is not None and self.end.is_cuda:
            self._beside = self._beside or torch.cuda.Stream(self.end.device)
            self._beside.wait_stream(torch.cuda.current_stream(self.end.device))
            stream = torch.cuda.stream(self._beside)
        with stream:
            kv_append(self.k.flatten(0, 1), self.v.flatten(0, 1), rows[1], rows[2], 0, rung=self.rung)

    def close(self, new: int) -> None:
        """Ends the call: all layers have the new tokens. Behind `last` nobody knows on the host how long rows are."""
        if self.rows is not None and self.last is not None and self.end.is_cuda:
            torch.cuda.current_stream(self.end.device).wait_stream(self._beside)
        self.ragged = self.ragged or self.last is not None
        self.rows = None
        if self.next_end is not self.end:
            self.end.copy_(self.next_end)
        self.length += new
