"""What tests of several files need."""

import pytest

from kernel_fusion import steps
from kernel_fusion.bench import benchmarks, ceilings, measuring


@pytest.fixture
def quick(monkeypatch):
    """Benchmarks of the fake step that take no time."""
    monkeypatch.setattr(measuring, "BUDGET_S", 0.01)
    monkeypatch.delenv("KF_BENCHMARK_SECONDS", raising=False)
    monkeypatch.setattr(benchmarks, "COPY_BYTES", {"cpu": [1024], "cuda": [1 << 20]})
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 64, "cuda": 1024})
    monkeypatch.setattr(steps, "find", lambda name: steps.Step("fake", "fake_step", "test.py"))
