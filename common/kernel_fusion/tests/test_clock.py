"""A time is the kernel's, however slowly it is launched; and noise is called noise."""

import itertools
import time

import pytest
import torch

from kernel_fusion import testing
from kernel_fusion.bench import clock, noise

GPU = [param for param in testing.DEVICES if "cuda" in param.values]


def test_the_time_is_the_median_in_milliseconds():
    naps = itertools.cycle([0.002, 0.002, 0.1])
    ms = clock.benchmark_kernel(lambda x: time.sleep(next(naps)), (torch.ones(1),), warmup=0, repeat=9)
    assert 2 <= ms < 100


def test_warm_up_calls_do_not_count():
    naps = iter([0.1, 0.1, *[0.001] * 5])
    ms = clock.benchmark_kernel(lambda x: time.sleep(next(naps)), (torch.ones(1),), warmup=2, repeat=5)
    assert 1 <= ms < 100
    for measure in (clock.benchmark_kernel, clock.measure):
        with testing.raises(ValueError, "`repeat` must be at least 1"):
            measure(lambda: None, (), repeat=0)


def test_the_callers_clock_does_not_count_the_first_call_and_makes_one_that_counts():
    naps = iter([0.1, 0.001])
    timing = clock.measure_call(lambda x: time.sleep(next(naps)) or x, (torch.ones(1),), seconds=0.0)
    assert 1 <= timing.ms.median < 100
    assert torch.equal(timing.result, torch.ones(1))


# ---- on a GPU ----


def times_two(x):
    return x * 2


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("host_ms", [0.3, 3.0])
def test_time_on_the_host_before_the_kernel_is_not_the_kernels(device, host_ms):
    def slow_to_launch(x):
        until = time.perf_counter() + host_ms / 1e3
        while time.perf_counter() < until:
            pass
        return x * 2

    inputs = (torch.ones(1 << 24, device=device),)
    alone = clock.measure(times_two, inputs)
    late = clock.measure(slow_to_launch, inputs)
    assert not alone.host_bound
    assert not late.host_bound
    assert late.ms.median == pytest.approx(alone.ms.median, rel=0.05)
    assert torch.equal(late.result, inputs[0] * 2)


@pytest.mark.parametrize("device", GPU)
def test_time_on_the_host_between_two_kernels_is_not_in_it_either(device):
    def two(x, nap):
        y = x * 2
        time.sleep(nap)
        return y * 2

    x = torch.ones(1 << 24, device=device)
    without = clock.measure(two, (x, 0), repeat=20)
    with_nap = clock.measure(two, (x, 0.001), repeat=20)
    assert with_nap.ms.median == pytest.approx(without.ms.median, rel=0.05)


@pytest.mark.parametrize("device", GPU)
def test_a_function_that_waits_for_the_gpu_is_marked(device):
    def asks_back(x):
        return x * (1 if x[0].item() else 2)

    timing = clock.measure(asks_back, (torch.ones(1 << 20, device=device),), repeat=10)
    assert timing.host_bound


@pytest.mark.parametrize("device", GPU)
def test_a_graph_of_the_call_takes_as_long(device):
    """A replayed graph has no launching on the CPU in it at all."""
    x = torch.randn(16384, 1024, device=device)
    clock.measure(times_two, (x,), repeat=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        times_two(x)
    replayed = clock.measure(lambda x: graph.replay(), (x,))
    assert clock.measure(times_two, (x,)).ms.median == pytest.approx(replayed.ms.median, rel=0.05)


@pytest.mark.parametrize("device", GPU)
def test_the_callers_clock_has_the_host_in_it(device):
    def slow(x):
        time.sleep(0.005)
        return x * 2

    x = torch.ones(1 << 20, device=device)
    assert clock.measure_call(slow, (x,), seconds=0.05).ms.median >= 5
    assert clock.measure(slow, (x,), repeat=5).ms.median < 5


@pytest.mark.parametrize("device", GPU)
def test_inputs_come_from_memory_and_not_from_the_cache(device):
    x = torch.randn(1 << 22, device=device)  # 16 MB, which an L2 cache of 50 MB would keep
    y = torch.empty_like(x)
    ms = clock.benchmark_kernel(lambda x: y.copy_(x), (x,))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(100):
        y.copy_(x)
    end.record()
    end.synchronize()
    assert ms > 1.1 * start.elapsed_time(end) / 100


@pytest.mark.parametrize("device", GPU)
def test_what_was_to_be_evicted_last_comes_from_memory_as_well(device):
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU's L2 cache keeps nothing when asked to")
    from kernel_fusion.bench.ceilings_triton import move

    n = 1_500_000
    x = torch.zeros(n, dtype=torch.int32, device=device)
    y = torch.empty(n, dtype=torch.int32, device=device)
    fixed = {"READS": 1, "WRITES": 0, "BLOCK": 1024, "num_warps": 4}
    kept, usual = (
        clock.benchmark_kernel(
            lambda x, y, policy=policy: move[(-(-n // 1024),)](x, y, n, POLICY=policy, **fixed), (x, y)
        )
        for policy in ("evict_last", "")
    )
    assert kept > 0.93 * usual


# ---- how long the GPU must wait: without a GPU ----


class Scripted(clock._Gpu):
    """A GPU whose calls take 1 ms, and are launched in time where the GPU waits for longer than `host_ms` says."""

    def __init__(self, host_ms):
        self.device, self.host_ms, self.waits = None, host_ms, []

    def _once(self, fn, inputs, wait_ms):
        host = next(self.host_ms)
        self.waits.append(wait_ms)
        return 1.0 + max(0.0, host - wait_ms), host < wait_ms, "result"


def test_the_wait_grows_until_launches_are_in_time():
    gpu = Scripted(itertools.repeat(1.0))
    timing = gpu.measure(None, (), 20)
    assert timing == clock.Timing(noise.Spread(1.0, 1.0, 1.0), False, "result")
    assert gpu.waits[-20:] == [2.4] * 20  # 0.3, 0.6, 1.2 was in time; twice that


def test_a_late_launch_is_measured_again():
    seen = itertools.count()
    gpu = Scripted(9.0 if next(seen) in (5, 8, 9) else 0.1 for _ in itertools.repeat(None))
    timing = gpu.measure(None, (), 20)
    assert (timing.ms, timing.host_bound) == (noise.Spread(1.0, 1.0, 1.0), False)
    assert len(gpu.waits) == 3 + 20 + 3


@pytest.mark.parametrize("host_ms", [itertools.repeat(1e3), itertools.chain([0.1] * 3, itertools.repeat(5.0))])
def test_who_is_never_in_time_is_marked_and_measured_all_the_same(host_ms):
    timing = Scripted(host_ms).measure(None, (), 10)
    assert timing.host_bound
    assert timing.ms.median > 1.0


# ---- noise ----


def test_spread_is_the_median_and_the_quartiles():
    assert noise.spread([5, 1, 2, 4, 3]) == (3, 2, 4)
    assert noise.spread([7.0]) == (7.0, 7.0, 7.0)
    with testing.raises(ValueError, "`times` must not be empty"):
        noise.spread([])


@pytest.mark.parametrize(
    ("one", "other", "faster"),
    [
        ((1.0, 0.99, 1.01), (1.1, 1.09, 1.11), True),
        ((1.1, 1.09, 1.11), (1.0, 0.99, 1.01), False),
        ((1.0, 0.9, 1.2), (1.1, 1.09, 1.11), False),  # the repeats overlap
        ((1.0, 1.0, 1.0), (1.015, 1.015, 1.015), False),  # no more than from run to run
        ((0.0050, 0.0050, 0.0050), (0.0053, 0.0053, 0.0053), False),  # nor this, so near to a launch
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), False),
    ],
)
def test_faster_is_what_is_beyond_noise(one, other, faster):
    assert noise.faster(noise.Spread(*one), noise.Spread(*other)) == faster
