"""How long a function takes on a GPU or a CPU.

On a GPU, what is timed is the GPU's work and not the CPU's launching of it. Each call waits in the stream behind a
kernel that does nothing for longer than the CPU takes to launch the call, so a function that is slow to launch (a
torch.compile'd one checks its guards for 0.05 to 0.15 ms first) and one that is quick are measured alike. Whatever
still shows the CPU, because it waits for the GPU in its middle or launches for longer than we wait, is marked.

Inputs come from memory, not from the L2 cache. Writing a large buffer before each call puts out what lay there, except
what was loaded with the hint `evict_last`, as some kernels of Triton's do it: on an H200 a kernel that so reads 6 MB
seemed to take 5.1 µs, not 6.2. So these lines are made ordinary ones before.
"""

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernel_fusion.bench.noise import Spread, spread

SHORTEST_WAIT_MS, LONGEST_WAIT_MS = 0.3, 20.0
CALIBRATION_CYCLES = 2_000_000


class Timing(NamedTuple):
    """Milliseconds of a call; whether the CPU's launching is in them; what the last timed call returned."""

    ms: Spread
    host_bound: bool
    result: Any


def benchmark_kernel(fn: Callable, inputs: tuple, warmup: int = 10, repeat: int = 100) -> float:
    """The median time of `fn(*inputs)`, in milliseconds: see `measure`."""
    return measure(fn, inputs, warmup, repeat).ms.median


def measure(fn: Callable, inputs: tuple, warmup: int = 10, repeat: int = 100) -> Timing:
    """Times `fn(*inputs)`, each of `repeat` calls by itself; first `warmup` calls, while clocks and all else settle.

    On CUDA tensors by events on the current stream, as told above; on CPU tensors by a monotonic clock, caches as they
    are.
    """
    if repeat < 1 or warmup < 0:
        raise ValueError(
            f"benchmark_kernel: `repeat` must be at least 1 and `warmup` at least 0, got {repeat} and {warmup}"
        )
    device = device_of(inputs)
    for _ in range(warmup):
        fn(*inputs)
    if device.type == "cuda":
        return _Gpu(device).measure(fn, inputs, repeat)
    times: list[float] = []
    result = None
    for _ in range(repeat):
        began = time.perf_counter_ns()
        result = fn(*inputs)
        times.append((time.perf_counter_ns() - began) / 1e6)
    return Timing(spread(times), False, result)


def measure_call(fn: Callable, inputs: tuple, seconds: float) -> Timing:
    """Times `fn(*inputs)` as its caller sees it: from the call until its result is there, launching and all.

    For whole models, whose users wait for the CPU as well. What disturbs the CPU can last for longer than this
    measurement, so take several, with those of other implementations in between.

    `seconds`: for how long calls are repeated, after a first that does not count. One is made in any case.
    """
    device = device_of(inputs)
    on_gpu = device.type == "cuda"

    def until_done():
        result = fn(*inputs)
        if on_gpu:
            torch.cuda.synchronize(device)
        return result

    flush = _Flush(device) if on_gpu else None
    until_done()  # brings back to the CPU's caches what others put out
    times: list[float] = []
    result = None
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        if flush:
            flush()
            torch.cuda.synchronize(device)
        began = time.perf_counter_ns()
        result = until_done()
        times.append((time.perf_counter_ns() - began) / 1e6)
    return Timing(spread(times), False, result)


def device_of(inputs: tuple) -> torch.device:
    """The device of the first tensor in `inputs`; the CPU where there is none."""
    return next((value.device for value in inputs if isinstance(value, torch.Tensor)), torch.device("cpu"))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED: an L2 cache that cannot be asked to keep lines


class _Flush:
    """Puts out what lies in the L2 cache, when the GPU has done what it had to do."""

    def __init__(self, device: torch.device):
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.buffer = torch.empty(max(4 * properties.L2_cache_size, 1 << 28), dtype=torch.int8, device=device)
        self.can_keep_lines = properties.major >= 8

    def __call__(self) -> None:
        torch.cuda.synchronize(self.device)
        if self.can_keep_lines:
            with torch.cuda.device(self.device):
                error = _driver().cuCtxResetPersistingL2Cache()
            if error not in (0, NOT_SUPPORTED):
                raise RuntimeError(f"the driver's cuCtxResetPersistingL2Cache failed with error {error}")
            self.can_keep_lines = error == 0
        self.buffer.zero_()


class _Gpu:
    """One measurement on a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.flush = _Flush(device)
        begin, end = self._event(), self._event()
        torch.cuda._sleep(1000)  # loads the kernel
        begin.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
        self.cycles_per_ms = CALIBRATION_CYCLES / begin.elapsed_time(end)

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def _once(self, fn: Callable, inputs: tuple, wait_ms: float) -> tuple[float, bool, Any]:
        """Milliseconds of one call, whether all of it was launched while the GPU still waited, and its result."""
        waiting, start, end = self._event(), self._event(), self._event()
        self.flush()
        began = time.perf_counter()
        waiting.record()
        torch.cuda._sleep(int(wait_ms * self.cycles_per_ms))
        start.record()
        result = fn(*inputs)
        end.record()
        launching_ms = (time.perf_counter() - began) * 1e3
        end.synchronize()
        # The GPU began to wait after we began to count, so if it waited for longer than we took, we were in time.
        return start.elapsed_time(end), launching_ms < waiting.elapsed_time(start), result

    def measure(self, fn: Callable, inputs: tuple, repeat: int) -> Timing:
        wait_ms, in_a_row = SHORTEST_WAIT_MS, 0
        while in_a_row < 3 and wait_ms <= LONGEST_WAIT_MS:  # how long must the GPU wait?
            in_time = self._once(fn, inputs, wait_ms)[1]
            in_a_row, wait_ms = (in_a_row + 1, wait_ms) if in_time else (0, 2 * wait_ms)
        wait_ms = min(2 * wait_ms, LONGEST_WAIT_MS)  # a launch may take longer than the three that we saw
        hopeless = in_a_row < 3
        times: list[float] = []
        late, result = 0, None
        while len(times) < repeat:
            ms, in_time, result = self._once(fn, inputs, 0 if hopeless else wait_ms)
            if in_time or hopeless or late >= repeat:
                times.append(ms)
            else:
                late += 1  # the CPU was held up: measure this repeat again
        return Timing(spread(times), hopeless or late >= repeat, result)
