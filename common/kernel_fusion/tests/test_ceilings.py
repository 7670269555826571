"""A ceiling is the best of several ways to move as many bytes, in the op's mix of reads and writes."""

import pytest
import torch

from kernel_fusion import testing
from kernel_fusion.bench import ceilings, clock


@pytest.mark.parametrize(
    ("total", "written", "mix"),
    [(100, 50, "1:1"), (100, 45, "1:1"), (300, 100, "2:1"), (400, 100, "3:1"), (100, 0, "1:0"), (1000, 3, "1:0"),
     (100, 90, "1:1"), (8, 1, "3:1")],
)  # fmt: skip
def test_the_mix_is_the_nearest(total, written, mix):
    assert ceilings.mix_of(total, written) == mix


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("mix", list(ceilings.MIXES))
def test_every_way_moves_the_bytes_of_its_mix(device, mix):
    reads, writes = ceilings.MIXES[mix]
    n = 4096
    x = torch.arange(1, reads * n + 1, dtype=torch.int32, device=device)
    y = torch.full((n,), -1, dtype=torch.int32, device=device)
    ways = ceilings._ways(mix, n, torch.device(device))
    assert len(ways) >= (13 if device == "cuda" else 1)
    for way in ways:
        y.fill_(-1)
        before = x.clone()
        way(x, y)
        assert torch.equal(x, before)
        assert not writes or bool((y != -1).all())


@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_copy_is_timed_about_as_fast_as_the_ceiling_says(device):
    device = torch.device(device)
    size = 1 << 26
    rate = ceilings.memory_rate(size, device)
    source = torch.ones(size // 8, dtype=torch.float32, device=device)
    ms = clock.benchmark_kernel(lambda x, y: y.copy_(x), (source, torch.empty_like(source)), 3, 10)
    factor = 1.1 if device.type == "cuda" else 20  # a CPU may have other work meanwhile; a wrong unit is 1000
    assert 1 / factor < size / ms / 1e6 / rate < factor


@pytest.mark.parametrize("device", [param for param in testing.DEVICES if "cuda" in param.values])
def test_an_odd_number_of_bytes_is_no_slower(device):
    """A copy of an odd number of bytes is slower than one of a few more: no ceiling for who reads rows of 1023."""
    device = torch.device(device)
    even, odd = (ceilings.memory_rate(size, device) for size in (1 << 26, (1 << 26) - 2))
    assert odd == pytest.approx(even, rel=0.05)


def test_ceilings_are_measured_once_and_kept_by_mix(monkeypatch):
    asked = []
    monkeypatch.setattr(ceilings, "memory_rate", lambda size, device, mix: asked.append((size, mix)) or 12.3456)
    found = ceilings.Ceilings(torch.device("cpu"))
    assert [found.memory(*args) for args in ((100, 50), (100, 50), (100, 0), (90, 30))] == [12.3456] * 4
    assert asked == [(100, "1:1"), (100, "1:0"), (90, "2:1")]
    assert found.as_json() == {
        "copy_gb_s": {"100": 12.35},
        "mixed_gb_s": {"2:1": {"90": 12.35}, "1:0": {"100": 12.35}},
        "matmul_tflop_s": None,
    }


def test_more_bytes_than_a_gpu_has_room_for_have_the_ceiling_of_many(monkeypatch):
    monkeypatch.setattr(ceilings, "memory_rate", lambda size, device, mix: size)
    assert ceilings.Ceilings(torch.device("cuda")).memory(1 << 40, 1 << 39) == ceilings.LARGEST < 1 << 34


def test_too_few_bytes_have_no_ceiling(monkeypatch):
    monkeypatch.setattr(ceilings, "memory_rate", lambda *args: pytest.fail("measured"))
    assert ceilings.Ceilings(torch.device("cuda")).memory(1 << 20, 1 << 19) is None
    with testing.raises(ValueError, "`mix` must be one of 1:1, 2:1, 3:1, 1:0, got '7:1'"):
        monkeypatch.undo()
        ceilings.memory_rate(1024, torch.device("cpu"), "7:1")
