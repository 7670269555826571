"""attention_block's v4_dataflow: one launch, whose parts run side by side. python test_dataflow.py, or pytest."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()

import pytest
import test_fused
import torch
from test_fused import attention_block_of, attention_inputs, from_pieces

import step3_fused
from kernel_fusion import testing

RUNG = "v4_dataflow"


def on_hopper(param):
    """A device that runs the rung: the emulation does, and GPUs of compute capability 9.0."""
    device = param.values[0]
    there = device != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)
    skip = [] if there else [pytest.mark.skip("needs a GPU of compute capability 9.0")]
    return pytest.param(device, marks=[*param.marks, *skip], id=device)


on_each_device = pytest.mark.parametrize("device", [on_hopper(param) for param in testing.DEVICES])
half_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def inputs_of(*shape, device, dtype=torch.bfloat16):
    return attention_inputs(*shape, dtype, device, projection=True)


def check(inputs, **options):
    return test_fused.check("attention_block", inputs, RUNG, **({"layouts": False} | options))


@on_each_device
@half_types
@with_and_without_mask
@pytest.mark.parametrize("length", [1, 33, 64, 65, 127, 193])
def test_any_length(length, causal, dtype, device):
    """A group of 64 rows, a band of three, and one row more or less."""
    check(inputs_of(2, 2, length, length, 64, device=device, dtype=dtype), causal=causal, layouts=length == 33)


@on_each_device
@with_and_without_mask
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 8),
        (2, 3, 5, 7, 8),
        (1, 2, 33, 31, 40),  # more queries than keys: two of them see nothing, if causal
        (3, 1, 1, 129, 64),  # a decode step
        (1, 2, 65, 300, 64),  # more keys than queries
        (9, 3, 65, 65, 16),  # batches in chunks of four, and one left
        (5, 1, 200, 200, 24),
        (1, 17, 70, 70, 8),  # a width of 136: a second tile of 8 columns
    ],
    ids=str,
)
def test_any_shape(shape, causal, device):
    check(inputs_of(*shape, device=device), causal=causal)


@on_each_device
@pytest.mark.parametrize("heads", [12, 16, 20, 25, 32])
def test_every_gpt2_width_and_the_widest(heads, device):
    for length in (1, 63, 128, 129, 1023, 1024, 2048) if device == "cuda" else (3, 66):
        check(inputs_of(1, heads, length, length, 64, device=device), causal=True)


@on_each_device
def test_many_batches(device):
    shape = (33, 12, 515, 515, 64) if device == "cuda" else (33, 2, 67, 67, 8)
    check(inputs_of(*shape, device=device), causal=True)


@on_each_device
def test_it_finds_each_tensor_wherever_it_lies(device):
    check(inputs_of(2, 3, 5, 7, 8, device=device), causal=True, alone=True)


@on_each_device
@half_types
def test_gpt2s_packed_q_k_v_are_read_as_they_lie(dtype, device):
    b, h, s, d = 2, 3, 70, 64
    packed = testing.randn((b, s, 3 * h * d), dtype, device)
    q, k, v = (t.unflatten(2, (h, d)).transpose(1, 2) for t in packed.split(h * d, dim=2))
    _, _, _, *rest = inputs_of(b, h, s, s, d, device=device, dtype=dtype)
    views = step3_fused.attention_block(q, k, v, *rest, causal=True, rung=RUNG)
    copies = step3_fused.attention_block(*(t.contiguous() for t in (q, k, v)), *rest, causal=True, rung=RUNG)
    assert all(torch.equal(a, b) for a, b in zip(views, copies, strict=True))


@on_each_device
@with_and_without_mask
def test_it_is_step_2s_attention_then_the_separate_pieces(causal, device):
    inputs = inputs_of(2, 3, 150, 150, 64, device=device)
    fused = step3_fused.attention_block(*inputs, causal=causal, rung=RUNG)
    torch.testing.assert_close(fused, from_pieces("attention_block", inputs, causal), rtol=2e-2, atol=2e-2)


@on_each_device
def test_the_future_has_no_influence(device):
    inputs = inputs_of(1, 2, 140, 140, 16, device=device)
    before = step3_fused.attention_block(*inputs, causal=True, rung=RUNG)[1]
    inputs[1][:, :, 125:], inputs[2][:, :, 125:] = 1e4, -1e4
    after = step3_fused.attention_block(*inputs, causal=True, rung=RUNG)[1]
    assert torch.equal(before[:, :125], after[:, :125])
    assert not torch.allclose(before[:, 125:], after[:, 125:])


@on_each_device
@half_types
def test_large_scores_pick_the_greatest(dtype, device):
    """Scores far beyond float16's range: a softmax that did not subtract the greatest would give NaN."""
    q, k, *rest = inputs_of(1, 2, 70, 70, 64, device=device, dtype=dtype)
    inputs = (q * 300, k * 300, *rest)
    got = step3_fused.attention_block(*inputs, causal=True, rung=RUNG)
    expected = attention_block_of(*(t.double() for t in inputs), causal=True)
    torch.testing.assert_close(got, tuple(t.to(dtype) for t in expected), rtol=2e-2, atol=2e-2)


@on_each_device
def test_rows_far_from_0(device):
    """Rows whose mean is 8 times what they deviate by."""
    q, k, v, residual, *rest = inputs_of(2, 2, 70, 70, 64, device=device)
    check((q, k, v, residual + 8, *rest), causal=True)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2", "random:3"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for threads in ("1", "2"):  # as many blocks run at once
        monkeypatch.setenv("KF_SIMT_THREADS", threads)
        check(inputs_of(3, 2, 130, 130, 16, device="cpu"), causal=True)
        check(inputs_of(2, 17, 70, 70, 8, device="cpu"), causal=False)


@pytest.mark.parametrize("seed", range(8))
def test_queries_that_see_no_key_one_after_the_other(seed, monkeypatch):
    """There is no product for which a warpgroup's warps would wait for each other."""
    monkeypatch.setenv("KF_SIMT_SCHEDULE", f"random:{seed}")
    monkeypatch.setenv("KF_SIMT_THREADS", "1")  # a block has many tiles
    inputs = inputs_of(3, 16, 200, 20, 8, device="cpu")
    nothing = torch.zeros(3, dtype=torch.int32)
    outputs = step3_fused.attention_block(*inputs, key_end=nothing, return_statistics=True, rung=RUNG)
    expected = step3_fused.attention_block(*inputs, key_end=nothing, return_statistics=True, rung="cpu")
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@on_each_device
def test_it_is_one_launch(device):
    inputs = inputs_of(2, 3, 70, 70, 8, device=device)
    if device == "cuda":
        step3_fused.attention_block(*inputs, rung=RUNG)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step3_fused.attention_block(*inputs, rung=RUNG)
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len([e for e in kernels if "Memset" not in e.name]) == 1
    else:
        before = step3_fused.emulated_kernels()
        step3_fused.attention_block(*inputs, rung=RUNG)
        assert step3_fused.emulated_kernels() == before + 1


@on_each_device
def test_what_it_cannot_do_is_refused_by_name(device):
    def refused(text, *shape, dtype=torch.bfloat16, **options):
        with testing.raises(ValueError, f"attention_block: rung '{RUNG}' {text}", "these can: "):
            step3_fused.attention_block(*inputs_of(*shape, device=device, dtype=dtype), rung=RUNG, **options)

    refused("takes float16 or bfloat16, got float32", 1, 1, 1, 1, 8, dtype=torch.float32)
    refused("takes head_dim ≤ 64, got 72", 1, 1, 1, 1, 72)
    refused("takes head_dim that is a multiple of 8 up to 128, got 12", 1, 1, 1, 1, 12)
    refused("takes heads·head_dim ≤ 2048, got 2112", 1, 33, 1, 1, 64)
    refused("takes one key at the least", 1, 1, 2, 0, 8)
    refused("takes a scale above 0, got 0", 1, 1, 2, 2, 8, scale=0.0)


@on_each_device
def test_no_row_is_no_work(device):
    y, total = step3_fused.attention_block(*inputs_of(2, 3, 0, 5, 8, device=device), rung=RUNG)
    assert y.shape == total.shape == (2, 0, 24)


@on_each_device
def test_torch_knows_it(device):
    testing.check_op(step3_fused, "attention_block", inputs_of(2, 3, 70, 70, 8, device=device), {"rung": RUNG})


@pytest.mark.parametrize("device", [on_hopper(p) for p in testing.DEVICES if "cuda" in p.values])
def test_a_thousand_runs_are_bit_equal_while_another_stream_loads_the_gpu(device):
    inputs = inputs_of(5, 12, 300, 300, 64, device=device)
    expected = step3_fused.attention_block(*inputs, causal=True, rung=RUNG)
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device=device)
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                busy = (busy @ busy).clamp(-1, 1)
        got = step3_fused.attention_block(*inputs, causal=True, rung=RUNG)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), f"run {i}"


if __name__ == "__main__":
    testing.main(__file__)
