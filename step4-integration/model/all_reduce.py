"""Memory that all workers of a group see, and the end of a half block through it: the op `all_reduce`."""

import itertools
import os
import pathlib
import tempfile
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
