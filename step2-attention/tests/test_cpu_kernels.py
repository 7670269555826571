"""cpu_kernels.py: right at any length and tile, and its benchmark refuses what is wrong."""

import re
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F

from kernel_fusion import steps, testing
from kernel_fusion.console import child_environment

cpu_kernels = steps.load_script(steps.find("step2"), "pages/cpu_kernels")
CPUKernelBenchmark, cpu_fused_attention = cpu_kernels.CPUKernelBenchmark, cpu_kernels.cpu_fused_attention
optimized_cpu_attention = cpu_kernels.optimized_cpu_attention

every_function = pytest.mark.parametrize(
    ("function", "options"),
    [(cpu_fused_attention, {}), *((optimized_cpu_attention, {"chunk_size": n}) for n in (1, 7, 64, 1000))],
    ids=["fused", "tiles of 1", "tiles of 7", "tiles of 64", "one tile"],
)
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def qkv(q_length, k_length, dim=16, dtype=torch.float32):
    shapes = ((2, 3, length, dim) for length in (q_length, k_length, k_length))
    return tuple(testing.randn(shape, dtype, "cpu", seed) for seed, shape in enumerate(shapes))


def formula(q, k, v, causal=False, scale=None):
    """PyTorch's, with a mask that meets in the lower right corner."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask = seen.tril(k.shape[2] - q.shape[2]) if causal else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


@every_function
@with_and_without_mask
@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (33, 33), (64, 128), (31, 97), (100, 100)], ids=str)
def test_it_is_pytorchs(lengths, causal, function, options):
    q, k, v = qkv(*lengths)
    got = function(q, k, v, causal=causal, **options)
    torch.testing.assert_close(got, formula(q, k, v, causal))
    torch.testing.assert_close(function(q, k, v, scale=-0.7, **options), formula(q, k, v, scale=-0.7))


@every_function
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, function, options):
    q, k, v = qkv(20, 30, dtype=dtype)
    got = function(q, k, v, causal=True, **options)
    assert got.dtype == dtype
    exact = formula(q.double(), k.double(), v.double(), True)
    torch.testing.assert_close(got, exact.to(dtype))


@every_function
def test_large_scores_and_queries_that_see_nothing(function, options):
    q, k, v = qkv(9, 5)
    got = function(q * 1e4, k * 1e4, v, causal=True, **options)
    assert got[:, :, :4].eq(0).all()
    torch.testing.assert_close(got[:, :, 4:], formula(q * 1e4, k * 1e4, v, True)[:, :, 4:])
    assert function(q, k[:, :, :0], v[:, :, :0], **options).eq(0).all()
    assert function(q[:0], k[:0], v[:0], **options).shape == (0, 3, 9, 16)


@every_function
@with_and_without_mask
def test_gradients(causal, function, options):
    inputs = [t.requires_grad_() for t in qkv(5, 4, 3, torch.float64)]
    assert torch.autograd.gradcheck(lambda *t: function(*t, causal=causal, **options), inputs)


def test_tiles_never_hold_all_scores(monkeypatch):
    """By the largest tensor that any operation returns."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    q, k, v = qkv(300, 300, 8)
    with Watch():
        optimized_cpu_attention(q, k, v, chunk_size=20)
    assert largest == q.numel()
    with Watch():
        cpu_fused_attention(q, k, v)
    assert largest == 2 * 3 * 300 * 300


@pytest.mark.parametrize("function", [cpu_fused_attention, optimized_cpu_attention])
def test_bad_shapes_are_named(function):
    q, k, v = qkv(3, 4)
    name = function.__name__
    with testing.raises(ValueError, f"{name}: `k` must have 4 dimensions, got 3 (shape (3, 4, 16))"):
        function(q, k[0], v)
    with testing.raises(ValueError, f"{name}: `v` must have shape (2, 3, 4, 16), got (2, 3, 3, 16)"):
        function(q, k, v[:, :, :3])
    with testing.raises(ValueError, "optimized_cpu_attention: `chunk_size` must be at least 1, got 0"):
        optimized_cpu_attention(q, k, v, chunk_size=0)


def test_implementations_are_compared(capsys):
    q, k, v = qkv(40, 40)
    found = CPUKernelBenchmark(min_run_time=0.01).compare_implementations(
        {"formula": cpu_fused_attention, "tiles": optimized_cpu_attention}, q, k, v, causal=True
    )
    assert {one.name for one in found} == {"formula", "tiles"}
    assert [one.ms for one in found] == sorted(one.ms for one in found)
    assert all(0 < one.ms < 1000 and 0 < one.error < 1e-5 for one in found)
    printed = capsys.readouterr().out
    assert "formula" in printed
    assert "attention (2, 3, 40, 16), 40 keys, torch.float32 on cpu" in printed


def test_times_are_milliseconds():
    def slow(q, k, v):
        time.sleep(0.02)
        return cpu_fused_attention(q, k, v)

    (found,) = CPUKernelBenchmark(min_run_time=0.01).compare_implementations({"slow": slow}, *qkv(4, 4))
    assert 20 <= found.ms < 2000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda q, k, v: cpu_fused_attention(q, k, v) * 1.001, "the greatest error is"),
        (lambda q, k, v: cpu_fused_attention(q, k, v) * torch.nan, "the greatest error is nan"),
        (lambda q, k, v: cpu_fused_attention(q, k, v)[0], "the output has shape (3, 40, 16), must have (2, 3, 40, 16)"),
    ],
    ids=["a little off", "NaN", "shape"],
)
def test_a_wrong_implementation_is_refused_by_name(wrong, said):
    with testing.raises(ValueError, f"mine: {said}"):
        CPUKernelBenchmark(min_run_time=0.01).compare_implementations({"mine": wrong}, *qkv(40, 40))
    with testing.raises(ValueError, "`implementations` must not be empty"):
        CPUKernelBenchmark().compare_implementations({}, *qkv(4, 4))


def test_the_script_runs():
    command = [sys.executable, cpu_kernels.__file__, "--length", "64", "--heads", "2"]
    ran = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for name in ("cpu_fused_attention", "optimized_cpu_attention", "torch's scaled_dot_product_attention"):
        assert re.search(rf"{name} +\| +[\d.]+", ran.stdout)


if __name__ == "__main__":
    testing.main(__file__)
