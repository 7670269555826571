"""Step 3's ops, on every device there is: against float64, eager PyTorch, the rung before, and step 2.

python test_fused.py            pytest's options may follow, such as -k layer_norm
"""

import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import step2_attention  # not installed? pip install -e ..
import step3_fused
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple
from step3_fused.attention_testing import (
    ALONE,
    BLOCK,
    FORMULAS,
    ON_TENSOR_CORES,
    OUTPUTS,
    attention_inputs,
    attention_ops,
    attention_ops_and_rungs,
    call,
    can_do,
    check,
    close_of,
    dtype_of,
    every,
    every_dtype,
    every_op,
    every_op_and_rung,
    every_rung_of_attention,
    every_rung_of_rows,
    from_pieces,
    half_types,
    inputs_of,
    layer_norm_of,
    on_a_gpu,
    on_each_device,
    ops,
    parameters,
    row_inputs,
    rungs_of,
    with_and_without_mask,
)

# ---- the contract of correctness ----


@every_rung_of_rows
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 127, 129, 760, 768, 1023, 1024, 1280, 1600, 2049, 4096])
def test_rows_of_any_width(width, dtype, op, device, rung):
    check(op, row_inputs(op, (5, width), dtype, device), rung)


@every("layer_norm")
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (257, 3), (1, 8192), (1, 8191)], ids=str)
def test_layer_norm_of_any_shape(shape, op, device, rung):
    for options in ({}, {"eps": 0.3}):
        check(op, row_inputs(op, shape, torch.float32, device), rung, **options)


@every_rung_of_rows
@every_dtype
@pytest.mark.parametrize("width", [16392, 24001, 40960, 131072])
def test_rows_wider_than_one_multiprocessor_holds(width, dtype, op, device, rung):
    if rung in ("cpu", "v1_naive", "v1_separate", "v4_cluster"):
        check(op, row_inputs(op, (2, width), dtype, device), rung, layouts=width == 24001)


@attention_ops_and_rungs
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("length", [1, 33, 127])
def test_attention_of_any_length(length, causal, dtype, op, device, rung):
    if can_do(rung, dtype):
        inputs = attention_inputs(op, 1, 2, length, length, 64, dtype, device)
        check(op, inputs, rung, causal=causal, layouts=length == 33)


@attention_ops_and_rungs
@with_and_without_mask
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1),
        (2, 3, 5, 7, 5),
        (1, 2, 33, 31, 33),  # more queries than keys: two of them see nothing, if causal
        (3, 1, 1, 129, 64),  # a decode step
        (1, 5, 3, 40, 40),
        (8, 2, 33, 35, 24),  # tiles of 16 rows
        (8, 2, 16, 16, 8),  # of 8
        (1, 3, 17, 70, 80),
        (2, 1, 9, 9, 111),
        (1, 2, 4, 4, 128),
    ],
    ids=str,
)
def test_attention_of_any_shape(shape, causal, op, device, rung):
    inputs = attention_inputs(op, *shape, torch.float32, device)
    check(op, inputs, rung, causal=causal)


@every_op_and_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rung_finds_each_tensor_wherever_it_lies(dtype, op, device, rung):
    if op.startswith("attention"):
        inputs = attention_inputs(op, 2, 3, 5, 7, 8, dtype, device)
        check(op, inputs, rung, causal=True, alone=True, layouts=False)
    else:
        inputs = row_inputs(op, (2, 3, 64), dtype, device)
        check(op, inputs, rung, alone=True, layouts=False)


@attention_ops_and_rungs
@pytest.mark.parametrize("steep", [7, 60])
def test_each_tile_of_keys_may_bring_a_new_maximum(steep, op, device, rung):
    q, k, v, *rest = attention_inputs(op, 1, 2, 3, 130, 16, torch.float32, device)
    k = k.abs() * torch.linspace(1, steep, 130, device=device)[:, None]
    v = v + testing.staircase(130, device)[:, None]
    for keys in (k, k.flip(2), k.roll(65, 2)):
        check(op, (q.abs(), keys, v.to(q), *rest), rung, layouts=False)


@attention_ops_and_rungs
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [12, 16, 20, 25])
def test_every_gpt2_width(heads, dtype, op, device, rung):
    """All heads of GPT-2 small, medium, large and XL; lengths up to the context's 1024 where a GPU runs them."""
    for length in (1, 2, 31, 32, 33, 127, 128, 129, 1023, 1024) if device == "cuda" else (3,):
        for causal in (True, False) if device == "cuda" else (True,):
            inputs = attention_inputs(op, 1, heads, length, length, 64, dtype, device)
            check(op, inputs, rung, causal=causal, layouts=False)


@on_each_device
@attention_ops
@with_and_without_mask
def test_auto_does_gpt2_sized_layers(causal, op, device):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = attention_inputs(op, 2, 12, 128, 128, 64, dtype, device)
        check(op, inputs, "auto", causal=causal, layouts=False)


@on_a_gpu
@pytest.mark.parametrize("batch", [7, 8])
def test_the_product_adds_the_residual_where_rows_are_many(batch, device):
    """Of the pieces, with 8192 rows and more: 8 sequences of 1024 tokens of GPT-2 small."""
    inputs = attention_inputs(BLOCK, batch, 12, 1024, 1024, 64, torch.bfloat16, device)
    check(BLOCK, inputs, "pieces", causal=True, layouts=False)
    residual, proj_weight, proj_bias, *norm = inputs[3:]
    options = {"causal": True, "return_statistics": True, "rung": "pieces"}
    y, total, attended, _, mean, rstd = step3_fused.attention_block(*inputs, **options)
    if batch == 8:
        expected = step3_fused.linear_bias_dropout_residual(attended, proj_weight, proj_bias, residual, dropout_p=0.0)
        normalised = step3_fused.layer_norm(expected, *norm, return_statistics=True)
    else:
        projected = step2_attention.linear(attended, proj_weight, proj_bias)
        normal, expected, *statistics = step3_fused.residual_layer_norm(
            projected, residual, *norm, return_statistics=True
        )
        normalised = (normal, *statistics)
    assert torch.equal(total, expected)
    for got, same in zip((y, mean, rstd), normalised, strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize("batch", [127, 128])
def test_the_emulated_product_adds_the_residual_where_rows_are_many(batch):
    """Then it is the rounded sum that is normalised."""
    inputs = attention_inputs(BLOCK, batch, 2, 64, 64, 8, torch.bfloat16, "cpu")
    check(BLOCK, inputs, "pieces", causal=True, layouts=False)
    y, total = step3_fused.attention_block(*inputs, causal=True, rung="pieces")
    assert torch.equal(y, step3_fused.layer_norm(total, *inputs[6:], rung="v3_registers")) == (batch == 128)


@on_each_device
def test_auto_takes_what_was_measured_to_be_fastest(device):
    """On a GPU the rung that the results show ahead; on the CPU the plain C++ version. Bit for bit."""
    few, many, wide = (2, 12, 33, 33, 64), (2, 12, 65, 65, 64), (1, 17, 33, 33, 64)
    token, later = (3, 25, 1, 128, 64), (3, 25, 1, 129, 64)
    for op, shape, rung in (
        (BLOCK, few, "v5_cluster"),
        (BLOCK, many, "pieces"),
        (BLOCK, wide, "pieces"),
        (ALONE, few, "v4_heads"),
        (ALONE, many, "pieces"),
        (ALONE, wide, "pieces"),
        (ALONE, token, "v4_heads"),
        (ALONE, later, "pieces"),
    ):
        inputs = attention_inputs(op, *shape, torch.bfloat16, device)
        if device == "cpu":
            rung = "cpu"
        elif torch.cuda.get_device_capability() < (9, 0):
            rung = "pieces"
        expected, got = (as_tuple(getattr(step3_fused, op)(*inputs, causal=True, rung=r)) for r in (rung, "auto"))
        for one, same in zip(got, expected, strict=True):
            assert torch.equal(one, same)
    for width, rung in ((768, "v3_registers"), (1599, "v1_naive"), (16384, "v3_registers"), (16392, "v4_cluster")):
        x, weight, bias = (testing.randn(shape, torch.bfloat16, device) for shape in ((5, width), (width,), (width,)))
        expected = step3_fused.layer_norm(x, weight, bias, rung=rung if device == "cuda" else "cpu")
        assert torch.equal(step3_fused.layer_norm(x, weight, bias), expected)


SIZES = {"B": ["batch"], "H": ["heads"], "S": ["q_length", "k_length"], "keys": ["k_length"], "D": ["head_dim"]} | {
    "x_bias": [],
    "p": [],
}


@every_op
def test_auto_is_read_off_the_results(op):
    testing.check_automatic(
        step3_fused, op, lambda shape: {name: n for k, n in shape.items() for name in SIZES.get(k, [k])}
    )


@every(ALONE, tensor_cores=False)
def test_rows_so_wide_that_fewer_fit_into_shared_memory(op, device, rung):
    """At most 16, 8, 4 and 1 rows of these widths fit into the 227 KB of a Hopper GPU, which the emulation has too."""
    memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device == "cuda" else 227 << 10
    for batch, width in ((16, 800), (16, 4000), (2, 9000), (2, 28000)):
        if rung == "v2_fused" and 4 * width + 36000 > memory:  # other GPUs have less
            continue
        check(op, attention_inputs(op, batch, width // 100, 1, 2, 100, torch.float16, device), rung, layouts=False)


@every(BLOCK, tensor_cores=False)
def test_rows_so_wide_that_fewer_fit_beside_their_projection(op, device, rung):
    for width in (1920, 7360) if device == "cuda" else (1920,):
        check(op, attention_inputs(op, 16, width // 40, 1, 2, 40, torch.float16, device), rung, layouts=False)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for op, device, rung in (param.values for param in rungs_of(*FORMULAS, tensor_cores=False)):
        if device == "cpu":
            check(op, inputs_of(op, torch.float32, "cpu"), rung, layouts=False)
    for op in (ALONE, BLOCK):
        inputs = attention_inputs(op, 8, 2, 33, 35, 24, torch.float32, "cpu")
        for rung in ("v1_separate", "v2_fused", "pieces"):
            check(op, inputs, rung, causal=True, layouts=False)


# ---- what the fused ops are made of ----


@every_rung_of_attention
@with_and_without_mask
@pytest.mark.parametrize("shape", [(2, 3, 150, 150, 64), (1, 4, 7, 33, 16)], ids=str)
def test_fused_is_step_2s_attention_then_the_separate_pieces(shape, causal, op, device, rung):
    inputs = attention_inputs(op, *shape, dtype_of(rung), device)
    fused = call(op, inputs, rung, causal=causal)
    torch.testing.assert_close(fused, from_pieces(op, inputs, causal), **close_of(rung))


SEVERAL_LAUNCHES = {
    ("residual_layer_norm", "v1_separate"): 2,
    (ALONE, "v1_separate"): 3,
    (BLOCK, "v1_separate"): 4,
    # The pieces are other ops' rungs: one for each, where they are not the library's.
    (ALONE, "pieces"): 2,
    (BLOCK, "pieces"): 3,
}


@every(*FORMULAS)
def test_a_rung_launches_as_many_kernels_as_its_header_says(op, device, rung):
    if rung == "cpu" or (device == "cuda" and rung == "pieces"):
        return
    inputs = inputs_of(op, torch.float32, device)
    if rung in ON_TENSOR_CORES:
        inputs = attention_inputs(op, 2, 3, 70, 70, 8, torch.bfloat16, device)
    call(op, inputs, rung)
    before = step3_fused.emulated_kernels()
    if device == "cuda":
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call(op, inputs, rung)
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        launched = len([e for e in kernels if "Memset" not in e.name and "Memcpy" not in e.name])
    else:
        call(op, inputs, rung)
        launched = step3_fused.emulated_kernels() - before
    assert launched == SEVERAL_LAUNCHES.get((op, rung), 1)


def test_only_attention_rungs_of_several_launches_and_v4s_counters_need_scratch():
    for op in FORMULAS:
        for rung in step3_fused.rungs(op)[1:]:
            several = op.startswith("attention") and (op, rung) in SEVERAL_LAUNCHES
            assert step3_fused.needs_scratch(op, rung) == (several or rung == "v4_dataflow"), rung


@on_a_gpu
@attention_ops
def test_fused_allocates_nothing_but_its_outputs(op, device):
    inputs = attention_inputs(op, 2, 12, 128, 128, 64, torch.bfloat16, device)
    names = ("y", "sum", "attended") if op == BLOCK else ("out", "attended")
    outs = {name: torch.empty_like(inputs[3]) for name in names} | {"lse": torch.empty(2, 12, 128, device=device)}
    outs |= {name: torch.empty(2, 128, device=device) for name in ("mean", "rstd")}
    for rung, grows in (("v2_fused", False), ("v1_separate", True)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(ops, op).out(*inputs, causal=True, rung=rung, **outs)
        assert (torch.cuda.max_memory_allocated() > before) is grows


# ---- what a wrong kernel would do, and how it shows ----


def heads_swapped(formula):
    def wrong(q, k, v, *rest, **options):
        order = list(range(q.shape[1]))
        order[0], order[1] = 1, 0
        return formula(q[:, order], k[:, order], v[:, order], *rest, **options)

    return wrong


def without_mask(formula):
    return lambda *inputs, causal: formula(*inputs)


def upper_left_mask(formula):
    def wrong(q, k, v, *rest, causal):
        return formula(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], *rest, causal=True)

    return wrong


def normalised_by_head(formula):
    """LayerNorm over each head's slice, as a block that owns one head would do it."""

    def wrong(q, k, v, residual, weight, bias, causal):
        _, attended, *rest = formula(q, k, v, residual, weight, bias, causal=causal)
        heads = (attended + residual).unflatten(2, (q.shape[1], q.shape[3]))
        return F.layer_norm(heads, heads.shape[-1:]).flatten(2) * weight + bias, attended, *rest

    return wrong


def without_projection_bias(formula):
    return lambda q, k, v, r, w, b, *rest, causal: formula(q, k, v, r, w, torch.zeros_like(b), *rest, causal=causal)


def projection_transposed(formula):
    return lambda q, k, v, r, w, *rest, causal: formula(q, k, v, r, w.mT, *rest, causal=causal)


def without_residual(formula):
    return lambda q, k, v, r, *rest, causal: formula(q, k, v, torch.zeros_like(r), *rest, causal=causal)


def uniform_softmax(formula):
    return lambda q, *rest, causal: formula(torch.zeros_like(q), *rest, causal=causal)


MISTAKES = [heads_swapped, without_mask, upper_left_mask, without_residual, uniform_softmax]


@pytest.mark.parametrize(
    ("op", "mistake"),
    [
        *((ALONE, mistake) for mistake in (*MISTAKES, normalised_by_head)),
        *((BLOCK, mistake) for mistake in (*MISTAKES, without_projection_bias, projection_transposed)),
    ],
)
@on_each_device
def test_the_contract_catches(mistake, op, device):
    """The mistake is made in the formula; a rung that made it would differ from the right one by as much."""
    inputs = attention_inputs(op, 1, 3, 9, 12, 16, torch.float32, device)
    for rung in (param.values[2] for param in rungs_of(op, tensor_cores=False) if param.values[1] == device):
        with testing.raises(AssertionError, "against float64"):
            check(op, inputs, rung, reference=mistake(FORMULAS[op]), causal=True)


@every_rung_of_attention
def test_the_future_has_no_influence(op, device, rung):
    inputs = attention_inputs(op, 1, 2, 140, 140, 16, dtype_of(rung), device)
    before = call(op, inputs, rung, causal=True)[-1]  # the sum, where it is returned
    inputs[1][:, :, 125:], inputs[2][:, :, 125:] = 1e4, -1e4
    after = call(op, inputs, rung, causal=True)[-1]
    assert torch.equal(before[:, :125], after[:, :125])
    assert not torch.allclose(before[:, 125:], after[:, 125:])


# ---- inputs that are unusual, and right ----


@every("layer_norm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [31, 768, 1600, 20000])
def test_a_large_mean_does_not_drown_a_small_variance(width, dtype, op, device, rung):
    """E[x²] − E[x]² has no digit left here; a mean rounded to float32 would shift the result by 0.05."""
    if width > 16384 and rung in ("v2_block", "v3_registers"):
        return  # refused
    weight, bias = parameters(width, dtype, device)
    for mean, spread in ((1e4, 1e-2), (-1e4, 1.0), (3e5, 0.5)):
        x = mean + testing.randn((4, width), torch.float64, device, scale=spread)
        x = x.to(dtype)
        y, saved, _ = (t.double() for t in step3_fused.layer_norm(x, weight, bias, return_statistics=True, rung=rung))
        exact = layer_norm_of(x.double(), weight.double(), bias.double())
        assert (y - exact).abs().max() <= 2e-6 * exact.abs().max()
        if dtype == torch.float32:  # the saved mean is the nearest number
            assert torch.equal(saved, x.double().mean(-1).float().double())


@every("residual_layer_norm")
def test_the_fused_sum_has_a_large_mean(op, device, rung):
    weight, bias = parameters(768, torch.float32, device)
    x = (1e4 + testing.randn((4, 768), torch.float64, device, scale=0.5)).float()
    residual = testing.randn((4, 768), torch.float32, device, seed=1, scale=0.01)
    check("residual_layer_norm", (x, residual, weight, bias), rung)


@every("layer_norm")
@every_dtype
def test_a_constant_row_gives_the_bias(dtype, op, device, rung):
    for width in (1, 33, 768):
        weight, bias = parameters(width, dtype, device)
        for value in (0.0, 1.0, -0.1, 1000.1):
            x = torch.full((2, width), value, dtype=dtype, device=device)
            y = step3_fused.layer_norm(x, weight, bias, rung=rung)
            torch.testing.assert_close(y, bias.expand(2, width))


@every("layer_norm")
def test_an_eps_of_0_adds_nothing(op, device, rung):
    x, weight, bias = row_inputs(op, (3, 64), torch.float32, device)
    x *= 1e-4  # a variance of 1e-8, beside which the default of 1e-5 would be all
    torch.testing.assert_close(
        step3_fused.layer_norm(x, weight, bias, eps=0.0, rung=rung), layer_norm_of(x, weight, bias, 0.0)
    )


@attention_ops_and_rungs
@with_and_without_mask
def test_a_scale_of_0_weighs_all_keys_alike(causal, op, device, rung):
    inputs = [t.requires_grad_() for t in attention_inputs(op, 1, 2, 5, 7, 8, torch.float32, device)]
    outputs = call(op, inputs, rung, causal=causal, scale=0.0)
    expected = FORMULAS[op](torch.zeros_like(inputs[0]), *inputs[1:], causal=causal)
    torch.testing.assert_close(outputs, expected[: OUTPUTS[op]], rtol=1e-4, atol=1e-5)
    outputs[0].square().sum().backward()
    assert inputs[0].grad.eq(0).all()
    assert inputs[1].grad.eq(0).all()


@every_op_and_rung
@half_types
def test_large_numbers_do_not_overflow_in_half_precision(dtype, op, device, rung):
    """Squares of 200 exceed float16's range of 65504 from a sum of two on; sums are kept in float32."""
    inputs = inputs_of(op, dtype, device)
    rows = 3 if op.startswith("attention") else 0
    inputs[rows].mul_(200)
    check(op, inputs, rung)


@testing.where(lambda rung, dtype: can_do(rung, dtype))
@every_rung_of_attention
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_scores_beyond_the_half_types_range_pick_the_greatest(dtype, op, device, rung):
    q, k, *rest = attention_inputs(op, 1, 2, 6, 6, 64, dtype, device)
    inputs = (q.sign() * 1e4, k.sign() * 1e4, *rest)  # scores of up to 8e8
    y, expected = call(op, inputs, rung)[0], FORMULAS[op](*(t.double() for t in inputs))[0]
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=5 * torch.finfo(dtype).eps)


@attention_ops_and_rungs
def test_a_query_that_sees_no_key_gives_the_residual_alone(op, device, rung):
    inputs = [t.requires_grad_() for t in attention_inputs(op, 1, 2, 40, 3, 8, torch.float32, device)]
    y = call(op, inputs, rung, causal=True)[0]
    residual, weight, bias = inputs[3], *inputs[-2:]
    alone = residual + inputs[5] if op == BLOCK else residual
    torch.testing.assert_close(y[:, :37], layer_norm_of(alone, weight, bias)[:, :37])
    y.square().sum().backward()
    assert inputs[0].grad[:, :, :37].eq(0).all()
    assert all(t.grad.isfinite().all() for t in inputs)


@every_rung_of_rows
def test_empty_rows(op, device, rung):
    assert all(y.shape == (0, 8) for y in call(op, row_inputs(op, (0, 8), torch.float32, device), rung))


@every_rung_of_attention
@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)], ids=str)
def test_empty_tensors(shape, op, device, rung):
    b, q_length, k_length = shape
    if rung == "v4_dataflow" and q_length > k_length:
        return  # refused
    inputs = attention_inputs(op, b, 2, q_length, k_length, 8, dtype_of(rung), device)
    outputs = call(op, inputs, rung)
    assert all(out.shape == (b, q_length, 16) for out in outputs)
    if k_length == 0:  # attention over nothing is 0
        alone = inputs[3] + inputs[5] if op == BLOCK else inputs[3]
        torch.testing.assert_close(outputs[0], layer_norm_of(alone, *inputs[-2:]), **close_of(rung))


# ---- page one, and the example ----


def run_fused_kernel(program):
    command = [sys.executable, "-m", "kernel_fusion", "simt", str(program)]
    return subprocess.run(command, capture_output=True, text=True)


def test_fused_kernel_runs_under_emulation():
    ran = run_fused_kernel(pathlib.Path(__file__).with_name("fused_kernel.cu"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "one launch" in ran.stdout
    error = float(ran.stdout.split("in double: ")[1].split()[0])
    assert 0 < error < 1e-5
    assert "all right" in ran.stdout


def test_fused_kernel_fails_where_an_element_is_not_written(tmp_path):
    source = pathlib.Path(__file__).with_name("fused_kernel.cu").read_text()
    written = "y[token * kWidth + c] = (row[c]"
    assert written in source
    (tmp_path / "fused_kernel.cu").write_text(source.replace(written, f"if (c > 0) {written}"))
    ran = run_fused_kernel(tmp_path / "fused_kernel.cu")
    assert ran.returncode == 1
    assert "WRONG" in ran.stdout


def test_usage_example_runs():
    program = pathlib.Path(__file__).parent / "pages" / "usage_example.py"
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for op in FORMULAS:
        assert op in ran.stdout


if __name__ == "__main__":
    testing.main(__file__)
