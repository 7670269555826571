"""Memory that all workers of a group see, and two sums through it: the end of a half block by the op `all_reduce`, and
a bucket of gradients by copies."""

import ctypes
import itertools
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from step4_integration import (  # not installed? pip install -e ..
    all_reduce,
    all_reduce_bytes,
    all_reduce_header,
    all_reduce_most,
)

MOST_WORKERS, MOST_WIDTH = all_reduce_most()
MOST_BYTES = 1 << 20  # of x; what is longer NCCL sums
PIECE = 1 << 23  # gradients that are summed together


def see_each_other(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's workers have GPUs of this host that read each other's memory. All get the same answer."""
    if device.type != "cuda" or os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        return False
    devices = [0] * dist.get_world_size(group)
    dist.all_gather_object(devices, device.index, group=group)
    pairs = itertools.permutations(devices, 2)
    return len(set(devices)) == len(devices) and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)


class SharedBuffer:
    """This worker's buffer, which the group's other workers read and write, and theirs. All must make it together."""

    def __init__(
        self, group: dist.ProcessGroup, bytes_: int, header: int, device: torch.device, *, patience: float = 60.0
    ):
        """
        Args:
            group: of workers on GPUs that see each other's memory, or on one host's CPU, for the emulation.
            bytes_, header: how large it is, and how much of it begins as zeros, the rest as ones in all bits.
            device: this worker's.
            patience: in seconds; who waits longer for another worker ends with an error.
        """
        self.rank, self.patience = dist.get_rank(group), patience
        self._others: Any  # is held, or its memory would go
        if device.type == "cuda":
            # This lesson sums in the GPUs, not in the switch between them.
            os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
            from torch.distributed import _symmetric_memory as symmetric

            self.buffer = symmetric.empty(bytes_, dtype=torch.uint8, device=device)
            self._others = symmetric.rendezvous(self.buffer, group)
            self.peers = [int(address) for address in self._others.buffer_ptrs]
        else:
            # The emulation's watchdog does not know of other processes, and would call a wait for them endless.
            os.environ.setdefault("KF_SIMT_SPIN_SECONDS", str(2 * patience))
            self._others = shared_files(group, bytes_)
            self.buffer = self._others[self.rank]
            self.peers = [other.data_ptr() for other in self._others]
        self.buffer.fill_(255)
        self.buffer[:header] = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group=group)

    def part(self, rank: int, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in that worker's buffer, from byte `begin` on."""
        if self.buffer.is_cuda:
            return self._others.get_buffer(rank, shape, dtype, begin // dtype.itemsize)
        end = begin + math.prod(shape) * dtype.itemsize
        return self._others[rank][begin:end].view(dtype).view(shape)


class PeerMemory(SharedBuffer):
    """Through which `all_reduce` sums."""

    def __init__(self, group: dist.ProcessGroup, width: int, device: torch.device, *, patience: float = 60.0):
        """
        Args:
            group, device, patience: as of `SharedBuffer`; up to 8 workers.
            width: of the widest row, up to 4096.

        Raises:
            ValueError: more workers, or wider rows.
        """
        workers = dist.get_world_size(group)
        if workers > MOST_WORKERS or width > MOST_WIDTH:
            raise ValueError(
                f"PeerMemory: `group` must be of at most {MOST_WORKERS} workers and `width` at most {MOST_WIDTH}, "
                f"got {workers} and {width}"
            )
        self.width = width
        super().__init__(group, all_reduce_bytes(width, workers), all_reduce_header(), device, patience=patience)

    def takes(self, *tensors: torch.Tensor) -> bool:
        """Whether `end` of these is faster than NCCL's sum and a LayerNorm. None of them is to have a gradient."""
        x = tensors[0]
        return (
            x.is_cuda
            and x.shape[-1] <= self.width
            and x.nbytes <= MOST_BYTES
            and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and all(tensor.dtype == x.dtype for tensor in tensors)
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        )

    def end(
        self, x: torch.Tensor, x_bias: torch.Tensor, residual: torch.Tensor, norm: Any, eps: float, rung: str = "auto"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """LayerNorm of `residual + x_bias + the sum of all workers' x`, and that sum; see `all_reduce`."""
        return all_reduce(
            x, x_bias, residual, norm.weight, norm.bias, self.buffer, self.peers, self.rank, eps=eps,
            patience=self.patience, rung=rung,
        )  # fmt: skip


class Bucket(SharedBuffer):
    """What a worker lays open of a bucket of gradients: for each worker its part of them, and its own part's sums."""

    MEETINGS = 2  # of a sum

    def __init__(self, group: dist.ProcessGroup, size: int, dtype: torch.dtype, device: torch.device):
        """`size`: how many gradients there are."""
        workers = dist.get_world_size(group)
        each = -(-size // (8 * workers)) * 8  # of a part: it begins at a multiple of 16 bytes
        here = -(-self.MEETINGS * workers * 4 // 16) * 16  # bytes of the words by which workers say that they are here
        at = here + workers * each * dtype.itemsize  # where the sums begin
        super().__init__(group, at + each * 4, here, device)
        self.group, self.shape = group, (workers, each)
        self.laid = self.part(self.rank, here, (workers * each,), dtype)
        # Everybody's numbers of this worker's part, and everybody's sums.
        self.of_mine = [self.part(rank, here, self.shape, dtype)[self.rank] for rank in range(workers)]
        self.sums = [self.part(rank, at, (each,), torch.float32) for rank in range(workers)]

    def meet(self, number: int) -> None:
        """What comes next waits for all workers to be here: on a GPU in its stream, on a CPU the caller.

        The GPU's front end does it, which reads the commands of its streams. A kernel would wait on a multiprocessor,
        and a product that has a block for each would wait with it. It waits for as long as it takes.
        """
        if not self.buffer.is_cuda:
            return dist.barrier(group=self.group)
        operations = meeting(self.peers, self.rank, number)
        array = (_Operation * len(operations))(*operations)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.buffer.device).cuda_stream)
        error = ctypes.CDLL("libcuda.so.1").cuStreamBatchMemOp_v2(stream, len(operations), array, 0)
        if error:
            raise RuntimeError(f"the driver's cuStreamBatchMemOp failed with error {error}")


def meeting(buffers: Sequence[int], rank: int, number: int) -> list["_Operation"]:
    """What a worker does where all meet: it writes a word to each other one, waits for theirs, and clears them. No
    worker comes to a meeting again before all have been at the sum's other one, so no word is written before the last
    one was cleared.

    Args:
        buffers: addresses of the workers' buffers.
        number: of the meeting, below `Bucket.MEETINGS`.
    """
    own, others = buffers[rank], [other for other in range(len(buffers)) if other != rank]
    word = [4 * (number * len(buffers) + other) for other in range(len(buffers))]
    told = [_Operation(_WRITE, 0, buffers[other] + word[rank], 1) for other in others]
    heard = [_Operation(_WAIT, 0, own + word[other], 1, _EQUAL) for other in others]
    cleared = [_Operation(_WRITE, 0, own + word[other], 0) for other in others]
    return told + heard + cleared


class _Operation(ctypes.Structure):
    """The driver's CUstreamBatchMemOpParams: `value` is written to `address`, or waited for."""

    _fields_ = (
        ("operation", ctypes.c_uint32), ("unused", ctypes.c_uint32), ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("more", ctypes.c_uint32 * 5),
    )  # fmt: skip


_WAIT, _WRITE, _EQUAL = 1, 2, 1  # as CUstreamBatchMemOpType and CUstreamWaitValue_flags have them


class Exchange:
    """Sums of gradients over a group's workers, each while the next gradients are computed.

    NCCL's kernels take multiprocessors from the products that run beside them. Here copies move the bytes, for which a
    GPU has engines of its own: each worker gets everybody's numbers of its part, in their own dtype, adds them up in
    float32, always in the same order, and gets the others' sums. Besides what lays the numbers side by side, that sum
    is the only kernel. A large bucket goes in pieces: one is copied while another is laid open or added up.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, piece: int = PIECE):
        """`group`, `device`: as of `SharedBuffer`. `piece`: how many gradients go together at
        most, or 8 for each worker."""
        self.group, self.device = group, device
        self.rank, self.workers = dist.get_rank(group), dist.get_world_size(group)
        whole = 8 * self.workers  # each worker's part of a piece begins at a multiple of 16 bytes
        self._piece = max(1, piece // whole) * whole
        self._buckets: dict[Any, list[Bucket]] = {}
        self._ways = [_Way(device, self.workers) for _ in range(2)]
        self._begun: list[_Way] = []

    def begin(self, key: Any, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sums over all workers, float32, all gradients' one behind the other; after `wait` they are there. All
        call it with the same keys in the same order, and gradients of the same sizes for a key. The first call for a
        key and a dtype makes its memory, so it is not to be captured in a graph."""
        dtype = gradients[0].dtype
        pieces = list(pieces_of([gradient.flatten() for gradient in gradients], self._piece))
        sizes = [sum(part.numel() for part in piece) for piece in pieces]
        if (key, dtype) not in self._buckets:
            self._buckets[key, dtype] = [Bucket(self.group, each, dtype, self.device) for each in sizes]
        buckets = self._buckets[key, dtype]
        total = torch.empty(sum(math.prod(bucket.shape) for bucket in buckets), device=self.device)
        for i, (bucket, piece, each) in enumerate(zip(buckets, pieces, sizes, strict=True)):
            torch.cat(piece, out=bucket.laid[:each])
            own = total[i * self._piece :][: math.prod(bucket.shape)].view(bucket.shape)
            self._sum(self._ways[i % 2], bucket, own)
        return total[: sum(sizes)]

    def _sum(self, way: "_Way", bucket: Bucket, total: torch.Tensor) -> None:
        """Of one piece, which is laid open. On a GPU it goes to the way's streams, behind what the current one has."""
        if way not in self._begun:
            self._begun.append(way)
        if way.side:
            way.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(way.side):
            stage = way.stage(bucket)
            bucket.meet(0)  # all have laid open
            self._copy(way, zip(stage, bucket.of_mine, strict=True))
            torch.sum(stage, 0, dtype=torch.float32, out=bucket.sums[self.rank])
            bucket.meet(1)  # all have their sums, and nobody reads what they have laid open
            self._copy(way, zip(total, bucket.sums, strict=True))

    def _copy(self, way: "_Way", pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One from each worker, beside each other; each begins with its own, so no two ask the same one at once."""
        every = list(pairs)
        for i, (to, source) in enumerate(every[self.rank :] + every[: self.rank]):
            if not way.side:
                to.copy_(source)
                continue
            way.copiers[i].wait_stream(way.side)
            with torch.cuda.stream(way.copiers[i]):
                to.copy_(source, non_blocking=True)
        for copier in way.copiers:
            way.side.wait_stream(copier)

    def wait(self) -> None:
        """What comes next on the current stream sees all sums that were begun."""
        for way in self._begun:
            if way.side:
                torch.cuda.current_stream(self.device).wait_stream(way.side)
        self._begun.clear()


class _Way:
    """Streams on which one sum follows the other, and the memory in which these come together."""

    def __init__(self, device: torch.device, workers: int):
        streams = [torch.cuda.Stream(device) for _ in range(1 + workers)] if device.type == "cuda" else [None]
        self.side, self.copiers = streams[0], streams[1:]
        self._stages: dict[tuple, torch.Tensor] = {}  # by their form

    def stage(self, bucket: Bucket) -> torch.Tensor:
        laid, form = bucket.laid, (bucket.shape, bucket.laid.dtype)
        if form not in self._stages:
            self._stages[form] = torch.empty(bucket.shape, dtype=laid.dtype, device=laid.device)
        return self._stages[form]


def pieces_of(vectors: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Vectors, one behind the other, in pieces of `most` elements; the last one has what is left."""
    piece, room = [], most
    for vector in vectors:
        while len(vector) > room:
            piece.append(vector[:room])
            yield piece
            vector, piece, room = vector[room:], [], most
        piece.append(vector)
        room -= len(vector)
    yield piece


def shared_files(group: dist.ProcessGroup, bytes_: int) -> list[torch.Tensor]:
    """A tensor of each worker of the host, which all of them see. The files are gone when all have them."""
    told = [tempfile.mkdtemp(prefix="kf-workers-") if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(told, group=group, group_src=0)
    folder = pathlib.Path(told[0])
    count = dist.get_world_size(group)
    found = [torch.from_file(str(folder / str(n)), shared=True, size=bytes_, dtype=torch.uint8) for n in range(count)]
    dist.barrier(group=group)
    if dist.get_rank(group) == 0:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return found
