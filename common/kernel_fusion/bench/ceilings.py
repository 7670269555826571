"""What a machine can do at all, measured: how fast it moves bytes, and how fast it multiplies matrices.

How fast memory is depends on how much is moved, and a little on how many of the bytes are read: on an H200, some GB at
about 4.3 TB/s where half are reads, at 4.5 to 4.6 where all are. So the ceiling of an op is taken at its own number of
bytes and with its own mix, and it is the best of several simple kernels, since no single one is the best everywhere:
the driver's copy, torch's, and a Triton kernel with several sizes of blocks, whose loads ask the L2 cache to keep what
they read or do not.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable
from typing import Any

import torch

from kernel_fusion.bench.clock import benchmark_kernel
from kernel_fusion.report import results

MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
# Below this a GPU's copy takes about twice as long as a kernel that does nothing: no measure of memory.
SMALLEST = {"cuda": 4_000_000, "cpu": 0}
LARGEST = 1 << 33  # bytes: more are moved at the same rate, and have no room
MIXES = {"1:1": (1, 1), "2:1": (2, 1), "3:1": (3, 1), "1:0": (1, 0)}  # tensors read : tensors written
WAYS = ((512, 4), (1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 8))  # elements of a block, warps
POLICIES = ("", "evict_last")  # of the loads


def mix_of(total: int, written: int) -> str:
    """The mix nearest to an op that moves `total` bytes, `written` of them to memory: "2:1" for two reads a write."""
    if written * 8 < total:
        return "1:0"
    return min(MIXES, key=lambda name: abs(MIXES[name][1] / sum(MIXES[name]) - written / total))


def memory_rate(size: int, device: torch.device, mix: str = "1:1") -> float:
    """GB/s of the fastest simple kernel that moves about `size` bytes in this mix of reads and writes.

    Raises:
        ValueError: `mix` is unknown.
    """
    if mix not in MIXES:
        raise ValueError(f"memory_rate: `mix` must be one of {', '.join(MIXES)}, got {mix!r}")
    reads, writes = MIXES[mix]
    n = max(size // 4 // (reads + writes) // 4 * 4, 4)  # int32 elements of one tensor, a multiple of 16 bytes
    source = torch.zeros(reads * n, dtype=torch.int32, device=device)
    target = torch.empty(max(n * writes, -(-n // WAYS[0][0])), dtype=torch.int32, device=device)
    warmup, repeat = (5, 30) if device.type == "cuda" else (2, 20)
    ms = min(benchmark_kernel(way, (source, target), warmup, repeat) for way in _ways(mix, n, device))
    return 4 * n * (reads + writes) / ms / 1e6


def _ways(mix: str, n: int, device: torch.device) -> list[Callable]:
    """Functions of source and target, each of which moves the bytes."""
    reads, writes = MIXES[mix]
    ways: list[Callable] = []
    if mix == "1:1":
        ways.append(lambda x, y: y.copy_(x))
    elif writes == 0:
        ways.append(lambda x, y: x.max())
    else:
        ways.append(lambda x, y: torch.sum(x.view(reads, n), 0, dtype=x.dtype, out=y))
    if mix == "2:1":
        ways.append(lambda x, y: torch.add(x[:n], x[n:], out=y))
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        kernel = _triton_kernel()
        for (block, warps), policy in itertools.product(WAYS, POLICIES):
            fixed = {"READS": reads, "WRITES": writes, "BLOCK": block, "POLICY": policy, "num_warps": warps}
            ways.append(lambda x, y, grid=(-(-n // block),), fixed=fixed: kernel[grid](x, y, n, **fixed))
    return ways


@functools.cache
def _triton_kernel() -> Any:
    from kernel_fusion.bench.ceilings_triton import move

    return move


def matmul_rate(device: torch.device) -> float:
    """TFLOP/s of a large square matrix product: bfloat16 on a GPU, float32 on a CPU."""
    n = MATMUL_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    ms = benchmark_kernel(torch.matmul, (a, b), *((10, 50) if device.type == "cuda" else (2, 10)))
    return 2 * n**3 / ms / 1e9


class Ceilings:
    """What this machine can do, measured when first asked for.

    Args:
        device: what is measured.
        known: what was measured before on this device, as `as_json` gives it.
    """

    def __init__(self, device: torch.device, known: dict | None = None):
        self.device = device
        self.rates: dict[str, dict[int, float]] = {}
        self._matmul: float | None = None
        if known:
            tables = {"1:1": known["copy_gb_s"], **known["mixed_gb_s"]}
            self.rates = {mix: {int(size): rate for size, rate in table.items()} for mix, table in tables.items()}
            self._matmul = known["matmul_tflop_s"]

    def memory(self, size: int, written: int) -> float | None:
        """GB/s at `size` bytes, `written` of which are written. None where that is too few to tell."""
        if size < SMALLEST[self.device.type]:
            return None
        mix, size = mix_of(size, written), min(size, LARGEST)
        of_mix = self.rates.setdefault(mix, {})
        if size not in of_mix:
            of_mix[size] = memory_rate(size, self.device, mix)
        return of_mix[size]

    def matmul(self) -> float:
        """TFLOP/s of a large matrix product."""
        if self._matmul is None:
            self._matmul = matmul_rate(self.device)
        return self._matmul

    def as_json(self) -> dict:
        """The form of the results file: "copy_gb_s" by bytes; other mixes by their name, then by bytes."""

        def table(mix: str) -> dict[str, float]:
            return {str(size): results.rounded(rate) for size, rate in sorted(self.rates.get(mix, {}).items())}

        return {
            "copy_gb_s": table("1:1"),
            "mixed_gb_s": {mix: table(mix) for mix in MIXES if mix != "1:1" and mix in self.rates},
            "matmul_tflop_s": None if self._matmul is None else results.rounded(self._matmul),
        }
