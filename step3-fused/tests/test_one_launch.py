"""One launch on tensor cores: attention_block's v4_dataflow and v5_cluster, attention_residual_layer_norm's v4_heads.

python -m pytest tests/test_one_launch.py
"""

import pytest
import torch

from kernel_fusion import testing
from step3_fused import attention_testing
from step3_fused.attention_testing import (
    FORMULAS,
    ON_TENSOR_CORES,
    attention_inputs,
    half_types,
    with_and_without_mask,
)

DATAFLOW, CLUSTER, HEADS = ON_TENSOR_CORES


def on_devices(*rungs, only=""):
    """Rungs, and the devices that run them."""
    params = [
        pytest.param(rung, device, marks=param.marks, id=f"{rung}-{device}")
        for param in attention_testing.rungs_of(*FORMULAS)
        for _, device, rung in [param.values]
        if rung in rungs and only in device
    ]
    return pytest.mark.parametrize(("rung", "device"), params)


on_each = on_devices(*ON_TENSOR_CORES)
each_rung = pytest.mark.parametrize("rung", ON_TENSOR_CORES)


def inputs_of(rung, *shape, device, dtype=torch.bfloat16):
    return attention_inputs(ON_TENSOR_CORES[rung], *shape, dtype, device)


def outputs_of(rung, *inputs, **options):
    """All that it returns, in a tuple."""
    return attention_testing.with_statistics(ON_TENSOR_CORES[rung], inputs, rung, **options)


def check(inputs, rung, **options):
    return attention_testing.check(ON_TENSOR_CORES[rung], inputs, rung, **({"layouts": False} | options))


@on_each
@half_types
@with_and_without_mask
@pytest.mark.parametrize("length", [1, 33, 64, 65, 127, 193])
def test_any_length(length, causal, dtype, device, rung):
    """A group of 64 rows, a band of three, and one row more or less."""
    check(
        inputs_of(rung, 2, 2, length, length, 64, device=device, dtype=dtype), rung, causal=causal, layouts=length == 33
    )


@on_each
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
def test_any_shape(shape, causal, device, rung):
    check(inputs_of(rung, *shape, device=device), rung, causal=causal)


@on_each
@pytest.mark.parametrize("heads", [12, 16, 20, 25, 32])
def test_every_gpt2_width_and_the_widest(heads, device, rung):
    for length in (1, 63, 128, 129, 1023, 1024, 2048) if device == "cuda" else (3, 66):
        check(inputs_of(rung, 1, heads, length, length, 64, device=device), rung, causal=True)


@on_devices(CLUSTER, HEADS)
@pytest.mark.parametrize("heads", [1, 2, 3, 5, 9, 16, 17, 32, 33, 70])
def test_any_number_of_heads(heads, device, rung):
    """One a block, several, and more than a cluster has blocks."""
    check(inputs_of(rung, 1, heads, 18, 40, 16, device=device), rung, causal=True)


@on_devices(CLUSTER, HEADS)
@pytest.mark.parametrize("dim", [8, 16, 24, 40, 48, 56, 64])
@pytest.mark.parametrize("heads", [2, 9])
def test_any_head_dim(heads, dim, device, rung):
    """The projection's depth is divided among warps wherever a head ends."""
    check(inputs_of(rung, 1, heads, 5, 9, dim, device=device), rung, causal=True)


@on_devices(CLUSTER, HEADS)
def test_a_block_that_projects_in_rounds(device, rung):
    """Where rows are many a cluster is one block, and its eight warps have more than eight groups of 64 columns."""
    batches = 2000 if device == "cuda" else 60
    check(inputs_of(rung, batches, 9, 3, 5, 64, device=device), rung, causal=True)


@on_devices(HEADS)
def test_rows_so_wide_that_a_block_has_four_warps(device, rung):
    """Where rows are many a cluster is one block, and so many heads leave no shared memory for eight warps."""
    batches = 2000 if device == "cuda" else 17
    check(inputs_of(rung, batches, 80, 9, 10, 64, device=device), rung, causal=True)


@on_devices(CLUSTER, HEADS)
@pytest.mark.parametrize("keys", [1, 16, 17, 127, 128, 129, 512, 1000])
def test_new_tokens_against_a_cache(keys, device, rung):
    for queries in (1, 2, 16):
        check(inputs_of(rung, 2, 3, queries, max(keys, queries), 64, device=device), rung, causal=True)


@on_devices(CLUSTER, HEADS)
def test_no_key(device, rung):
    check(inputs_of(rung, 2, 3, 5, 0, 16, device=device), rung)


@on_each
def test_many_batches(device, rung):
    shape = (33, 12, 515, 515, 64) if device == "cuda" else (33, 2, 67, 67, 8)
    check(inputs_of(rung, *shape, device=device), rung, causal=True)


@on_each
def test_it_finds_each_tensor_wherever_it_lies(device, rung):
    check(inputs_of(rung, 2, 3, 5, 7, 8, device=device), rung, causal=True, alone=True)


@on_each
def test_rows_far_from_0(device, rung):
    """Rows whose mean is 8 times what they deviate by."""
    q, k, v, residual, *rest = inputs_of(rung, 2, 2, 70, 70, 64, device=device)
    check((q, k, v, residual + 8, *rest), rung, causal=True)


@on_each
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (3, 64), (5, 16), (9, 24)])
def test_columns_far_from_the_rows_mean(heads, dim, device, rung):
    """Parts of a row, of which the last may be smaller, know little of its mean and variance."""
    q, k, v, residual, *rest = inputs_of(rung, 2, heads, 20, 20, dim, device=device)
    far = 4 * testing.staircase(heads * dim, device)
    check((q, k, v, (residual + far).to(residual), *rest), rung, causal=True)


@on_each
@pytest.mark.parametrize("greatest", [0, 20, 150, 299])
def test_each_part_of_the_keys_may_bring_a_new_maximum(greatest, device, rung):
    """One key is beyond what a float holds above the others, in which tiles, shared by warps, differ little."""
    q, k, v, *rest = inputs_of(rung, 1, 2, 5, 300, 64, device=device)
    q, k, v = q.abs(), k.abs(), (v + testing.staircase(300, device)[:, None]).to(v)
    check((q, k, v, *rest), rung)
    k[:, :, greatest] *= 60
    check((q, k, v, *rest), rung)


@each_rung
@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2", "random:3"])
def test_emulated_threads_may_run_in_any_order(schedule, rung, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for threads in ("1", "2"):  # as many blocks run at once
        monkeypatch.setenv("KF_SIMT_THREADS", threads)
        check(inputs_of(rung, 3, 2, 130, 130, 16, device="cpu"), rung, causal=True)
        check(inputs_of(rung, 2, 17, 70, 70, 8, device="cpu"), rung, causal=False)


@each_rung
@pytest.mark.parametrize("seed", range(8))
def test_queries_that_see_no_key_one_after_the_other(seed, rung, monkeypatch):
    """There is no product for which a warpgroup's warps would wait for each other."""
    monkeypatch.setenv("KF_SIMT_SCHEDULE", f"random:{seed}")
    monkeypatch.setenv("KF_SIMT_THREADS", "1")  # a block has many tiles
    inputs = inputs_of(rung, 3, 16, 200, 20, 8, device="cpu")
    nothing = torch.zeros(3, dtype=torch.int32)
    outputs = outputs_of(rung, *inputs, key_end=nothing)
    expected = attention_testing.with_statistics(ON_TENSOR_CORES[rung], inputs, "cpu", key_end=nothing)
    for got, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@on_each
def test_what_it_cannot_do_is_refused_by_name(device, rung):
    def refused(text, *shape, dtype=torch.bfloat16, **options):
        with testing.raises(ValueError, f"{ON_TENSOR_CORES[rung]}: rung '{rung}' {text}", "these can: "):
            outputs_of(rung, *inputs_of(rung, *shape, device=device, dtype=dtype), **options)

    refused("takes float16 or bfloat16, got float32", 1, 1, 1, 1, 8, dtype=torch.float32)
    refused("takes head_dim ≤ 64, got 72", 1, 1, 1, 1, 72)
    refused("takes head_dim that is a multiple of 8 up to 128, got 12", 1, 1, 1, 1, 12)
    refused("takes a scale above 0, got 0", 1, 1, 2, 2, 8, scale=0.0)
    if rung == DATAFLOW:
        refused("takes heads·head_dim ≤ 2048, got 2112", 1, 33, 1, 1, 64)
        refused("takes one key at the least", 1, 1, 2, 0, 8)
    if rung == CLUSTER:
        refused("takes heads·head_dim ≤ 4096, got 4544", 1, 71, 1, 1, 64)
        refused("keeps 16 rows of 100 heads in shared memory", 1, 100, 1, 1, 8)
    if rung == HEADS:
        refused("keeps 16 rows of 1700 heads in shared memory", 1, 1700, 1, 1, 64)


@on_devices(*ON_TENSOR_CORES, only="cuda")
def test_a_thousand_runs_are_bit_equal_while_another_stream_loads_the_gpu(device, rung):
    inputs = inputs_of(rung, 5, 12, 300, 300, 64, device=device)
    expected = outputs_of(rung, *inputs, causal=True)
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device=device)
    for i in range(1000):
        if i % 10 == 0:
            with torch.cuda.stream(other):
                busy = (busy @ busy).clamp(-1, 1)
        got = outputs_of(rung, *inputs, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), f"run {i}"
