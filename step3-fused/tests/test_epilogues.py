"""The ops whose work hangs on a matrix product, on every device there is: against float64, eager and the rung before.

python tests/test_epilogues.py              pytest's options may follow, such as -k "mlp and v7_inner"
"""

import pytest
import torch

import step3_fused
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple
from kernel_fusion.testing.philox import mask_and_factor
from step3_fused.epilogue_testing import (
    ALIGNED,
    EPILOGUES,
    RNG_STATE,
    SHAPES,
    TENSOR_CORES,
    EpilogueCase,
    able,
    check,
    drops,
    either_way,
    every_dtype,
    every_op,
    every_rung,
    layer_norm_linear_of,
    on_a_gpu,
    on_each_device,
    with_norm,
    with_residual,
)


def expect_near(got, case, inputs, **options):
    """As the formula in float32, for products that take too long for the whole contract."""
    wide = [t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs]
    for g, want in zip(as_tuple(got), as_tuple(case.formula(*wide, **options)), strict=True):
        torch.testing.assert_close(g.float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


# ---- the contract of correctness ----


@every_rung
@every_dtype
@either_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@testing.where(
    lambda shape, transposed, dtype, op, device, rung: (
        able(op, rung, device, *shape, dtype, transposed)
        and (device == "cuda" or shape[0] < 100 or dtype in (torch.float32, torch.bfloat16))  # where it takes long
    )
)
def test_any_shape(shape, transposed, dtype, op, device, rung):
    for case in EPILOGUES[op]:
        inputs = case.inputs(*shape, dtype, device, transposed)
        layouts = shape == (64, 200, 136) and not transposed and (op, rung) not in ALIGNED
        check(op, case, inputs, rung, transposed=transposed, layouts=layouts)


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_option(dtype, op, device, rung):
    if able(op, rung, device, 24, 40, 56, dtype, False):
        for case in EPILOGUES[op]:
            for options in case.options[1:]:
                inputs = case.inputs((4, 6), 40, 56, dtype, device, False)
                if rung == "v4_cublaslt":
                    with pytest.raises(ValueError, match="takes approximate='tanh' only"):
                        getattr(step3_fused, op)(*inputs, rung=rung, **options)
                else:
                    check(op, case, inputs, rung, options=options, layouts=False)


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_wherever_it_lies(dtype, op, device, rung):
    if (op, rung) not in ALIGNED and able(op, rung, device, 24, 40, 56, dtype, False):
        case = EPILOGUES[op][-1 if op == "linear_bias_dropout_residual_backward" else 0]
        check(op, case, case.inputs((3, 8), 40, 56, dtype, device, False), rung, layouts=False, alone=True)


@every_rung
@either_way
def test_gpt2s_shapes(transposed, op, device, rung):
    """On a GPU, where they take no time."""
    for shape in ((2048, 768, 3072), (1000, 1600, 1600), (64, 768, 3072)):
        if device == "cuda" and able(op, rung, device, *shape, torch.bfloat16, transposed):
            for case in EPILOGUES[op]:
                inputs = case.inputs(*shape, torch.bfloat16, device, transposed)
                check(op, case, inputs, rung, transposed=transposed, layouts=False)


@every_rung
def test_more_tiles_than_multiprocessors(op, device, rung):
    """Persistent blocks take tile after tile: what an epilogue reads comes while another tile is computed."""
    if device == "cuda" and rung in ("v3_hopper", "v5_in_place", "v6_one_launch"):
        case = EPILOGUES[op][0]
        check(op, case, case.inputs(4000, 832, 2600, torch.bfloat16, device, False), rung, layouts=False)


@pytest.mark.parametrize("op", [op for op in EPILOGUES if "v3_hopper" in step3_fused.rungs(op, "cpu")])
@pytest.mark.parametrize("shape", [(130, 72, 1096), (260, 72, 2000), (64, 72, 200)], ids=str)
def test_each_width_of_tiles(shape, op):
    """v3_hopper takes tiles of 256 or 192, 128 and 64 columns for these, where there are 16 multiprocessors."""
    for case in EPILOGUES[op]:
        rows, depth, width = (shape[0], *shape[:0:-1]) if case.backward else shape
        check(op, case, case.inputs(rows, depth, width, torch.bfloat16, "cpu", False), "v3_hopper", layouts=False)


# Tiles of 256, 192, 128 and 64 columns, so 4, 3, 2 and 1 rounds a tile; one stage a tile, and many tiles a block.
@pytest.mark.parametrize(
    "shape",
    [
        (1100, 72, 1000),
        (1100, 200, 760),
        (260, 72, 2000),
        (130, 72, 1096),
        (64, 72, 200),
        (4000, 64, 64),
        (4000, 72, 64),
        (2100, 64, 2600),
    ],
    ids=str,
)
@either_way
def test_v5_in_place_with_each_width_of_tiles(shape, transposed):
    """It takes its rounds of 64 columns in turn through two stages, whatever a tile has of them."""
    case = EPILOGUES["linear_bias_dropout_residual"][0]
    inputs = case.inputs(*shape, torch.bfloat16, "cpu", transposed)
    got = step3_fused.linear_bias_dropout_residual(*inputs, transposed=transposed, rung="v5_in_place")
    expect_near(got, case, inputs, transposed=transposed)
    assert torch.equal(got, step3_fused.linear_bias_dropout_residual(*inputs, transposed=transposed, rung="v3_hopper"))


@pytest.mark.parametrize(
    ("op", "rung", "text", "shape", "more"),
    [
        ("linear_bias_dropout_residual", "v5_in_place", "a y that begins at a multiple of 16 bytes", (16, 136), {}),
        (
            "mlp",
            "v6_one_launch",
            "weights, residual, y and preactivation that begin",
            (16, 72),
            {"preactivation": torch.empty(0, dtype=torch.bfloat16), "keep": False},
        ),
    ],
    ids=["v5_in_place", "v6_one_launch"],
)
def test_outputs_that_tma_cannot_write_are_refused(op, rung, text, shape, more):
    inputs = EPILOGUES[op][0].inputs(16, 72, 136, torch.bfloat16, "cpu", False)
    y = torch.empty(shape[0] * shape[1] + 1, dtype=torch.bfloat16)[1:].view(shape)
    with testing.raises(ValueError, f"{op}: rung '{rung}' takes {text}"):
        getattr(torch.ops.step3_fused, op).out(*inputs, y=y, rung=rung, **more)


@pytest.mark.parametrize("op", ["linear_gelu", "linear_bias_dropout_residual", "gelu_linear_backward"])
def test_more_tiles_than_emulated_multiprocessors(op):
    case = EPILOGUES[op][0]
    rows, depth, width = (2100, 2600, 72) if case.backward else (2100, 72, 2600)
    inputs = case.inputs(rows, depth, width, torch.bfloat16, "cpu", False)
    expect_near(getattr(step3_fused, op)(*inputs, rung="v3_hopper", **case.all_outputs), case, inputs)


# Tiles of the depth: 47 of v2_mma, whose ring has four stages; 24 in tiles of 64 columns, with seven; 14 in tiles of
# 256 or 192 columns, of two blocks or one, with four, which the other ops' tests go round with many tiles.
@pytest.mark.parametrize("op", [op for op in EPILOGUES if "v3_hopper" in step3_fused.rungs(op, "cpu")])
@pytest.mark.parametrize(
    ("rung", "shape"),
    [("v2_mma", (33, 1504, 40)), ("v3_hopper", (33, 1504, 40)), ("v3_hopper", (130, 840, 1096))],
    ids=str,
)
@testing.where(lambda shape, op, rung: rung in step3_fused.rungs(op, "cpu") and (shape[2] == 40 or op == "gelu_linear"))
def test_stages_of_the_depth_are_used_again_and_again(rung, shape, op):
    """Also where what is multiplied is changed on its way from its stage."""
    case = EPILOGUES[op][0]
    rows, depth, width = (shape[0], *shape[:0:-1]) if case.backward else shape
    inputs = case.inputs(rows, depth, width, torch.bfloat16, "cpu", False)
    assert able(op, rung, "cpu", rows, depth, width, torch.bfloat16, False)
    check(op, case, inputs, rung, layouts=False)


# Of v7_inner: more slices than clusters at once, of blocks with two tiles, the last slice not whole; rings that go
# round in both layers, and a second tile that is not whole; one slice that is not whole, and blocks without columns of
# y; a ring that x alone goes round.
SLICES = [(7, 72, 2600), (33, 1096, 520), (64, 40, 136), (16, 2056, 256)]
# Of v6_one_launch, whose blocks go from one layer to the other and back: three bands of tiles of 128 columns, two of
# 256, two whose products take a single stage, and a single tile of rows, of which the second layer comes right after
# the first. The last tile of rows is not whole.
BANDS = [(900, 520, 264), (1030, 768, 256), (2100, 8, 16), (100, 264, 520)]
# Of v5_rows's blocks, which take tile after tile in both layers: rings that go round.
TILES = [(7, 72, 2600), (7, 1096, 520)]
# Of v7_inner: more eights of a block's columns than threads that add them up; more parts of y than are issued at once.
MORE_SLICES = [(64, 24, 2600), (7, 24, 8712)]


@either_way
@pytest.mark.parametrize(
    ("rung", "shape"),
    [
        *(("v5_rows", shape) for shape in TILES),
        *(("v6_one_launch", shape) for shape in BANDS),
        *(("v7_inner", shape) for shape in SLICES + MORE_SLICES),
    ],
    ids=str,
)
def test_whatever_parts_a_rung_of_mlp_divides_the_work_into(rung, shape, transposed):
    for case in EPILOGUES["mlp"]:
        inputs = case.inputs(*shape, torch.bfloat16, "cpu", transposed)
        check("mlp", case, inputs, rung, transposed=transposed, layouts=False)


@on_a_gpu
def test_the_clusters_parts_are_added_when_all_are_there(device):
    """v7_inner launches the second kernel while the first runs. The contract sees whether it waits."""
    case = EPILOGUES["mlp"][0]
    inputs = case.inputs(4, 768, 3072, torch.bfloat16, device, False)
    if able("mlp", "v7_inner", device, 4, 768, 3072, torch.bfloat16, False):
        for _ in range(20):
            check("mlp", case, inputs, "v7_inner", layouts=False)


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:1", "random:2"])
@pytest.mark.parametrize(
    ("rung", "shape", "threads"),
    [
        *(("v6_one_launch", shape, threads) for shape in BANDS for threads in (1, 3)),
        *(("v7_inner", shape, 1) for shape in SLICES),
    ],
    ids=str,
)
def test_an_mlp_of_few_blocks_at_once_in_any_order(rung, shape, threads, schedule, monkeypatch):
    """It comes to its end with any number of resident blocks, one included, and to the same bits."""
    inputs = EPILOGUES["mlp"][0].inputs(*shape, torch.bfloat16, "cpu", False)
    want = step3_fused.mlp(*inputs, rung=rung, return_preactivation=True)
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    monkeypatch.setenv("KF_SIMT_THREADS", str(threads))
    for keep in (True, False):
        got = as_tuple(step3_fused.mlp(*inputs, rung=rung, return_preactivation=keep))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=False))


@pytest.mark.parametrize(("rung", "launches"), [("pieces", 2), ("v5_rows", 1), ("v6_one_launch", 1), ("v7_inner", 2)])
def test_a_rung_of_mlp_launches_as_many_kernels_as_its_header_says(rung, launches):
    inputs = EPILOGUES["mlp"][0].inputs(64, 72, 136, torch.bfloat16, "cpu", False)
    before = step3_fused.emulated_kernels()
    step3_fused.mlp(*inputs, rung=rung)
    assert step3_fused.emulated_kernels() - before == launches


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
@every_op
def test_emulated_threads_may_run_in_any_order(op, schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step3_fused.rungs(op, "cpu"):
        if able(op, rung, "cpu", 136, 200, 264, torch.bfloat16, False):
            case = EPILOGUES[op][0]
            check(op, case, case.inputs(136, 200, 264, torch.bfloat16, "cpu", False), rung, layouts=False)


# ---- inputs that are unusual, and right ----


@every_rung
def test_no_rows(op, device, rung):
    case = EPILOGUES[op][0]
    inputs = case.inputs((0, 3), 8, 16, torch.float32, device, False)
    outputs = as_tuple(getattr(step3_fused, op)(*inputs, **case.all_outputs))
    expected = as_tuple(case.formula(*inputs))
    for out, want in zip(outputs, expected, strict=True):
        assert out.shape == want.shape
        assert out.eq(0).all()  # of a weight's gradient, the sum of nothing


@every_rung
@pytest.mark.parametrize("scale", [20.0, 2000.0])
def test_gelu_of_extreme_values_is_finite(scale, op, device, rung):
    """x³ overflows float16 at 41; where GELU is 0 or x, its slope is 0 or 1, and nothing is NaN."""
    if "gelu" not in op and op != "mlp":
        return
    for dtype in (torch.float32, torch.float16):
        if able(op, rung, device, 16, 40, 24, dtype, False):
            case = EPILOGUES[op][0]
            inputs = [
                t * scale if i == ("backward" in op) else t
                for i, t in enumerate(case.inputs(16, 40, 24, dtype, device, False))
            ]
            got = as_tuple(getattr(step3_fused, op)(*inputs, rung=rung, **case.all_outputs))
            wide = [t.double() for t in inputs]
            for g, want in zip(got, as_tuple(case.formula(*wide)), strict=True):
                if want.abs().max() < 60000 or dtype == torch.float32:
                    torch.testing.assert_close(g.double(), want, rtol=1e-2, atol=1e-2 * float(want.abs().max()))


@every_rung
def test_a_large_mean_does_not_drown_a_small_variance(op, device, rung):
    if op != "layer_norm_linear" or not able(op, rung, device, 4, 768, 16, torch.float32, False):
        return
    x, *norm, weight, bias = with_norm(4, 768, 16, torch.float32, device, False)
    x = 1e4 + 1e-2 * x
    got = step3_fused.layer_norm_linear(x, *norm, weight, bias, eps=1e-12, rung=rung)
    want = layer_norm_linear_of(*(t.double() for t in (x, *norm, weight, bias)), eps=1e-12)[0]
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@every_rung
def test_the_mask_is_that_of_step_1(op, device, rung):
    """Of a weight of ones, a mask is all that is left: element by element as kernel_fusion.testing.philox has it."""
    if op != "linear_bias_dropout_residual" or not drops(op, rung):
        return
    dtype = torch.bfloat16 if rung in TENSOR_CORES else torch.float32
    for rows, width, p in ((40, 520, 0.5), (130, 264, 0.1)):
        x, weight = torch.ones(rows, 8, dtype=dtype, device=device), torch.ones(8, width, dtype=dtype, device=device)
        residual = torch.zeros(rows, width, dtype=dtype, device=device)
        for seed_and_offset in ((7, 0), (-(1 << 63), (1 << 62) + 4)):
            rng_state = torch.tensor(seed_and_offset)
            y = step3_fused.linear_bias_dropout_residual(x, weight, None, residual, p, rng_state, rung=rung)
            mask, _ = mask_and_factor((rows, width), p, rng_state)
            assert torch.equal(y.cpu() != 0, mask)


@on_each_device
def test_a_tenth_is_dropped_by_default(device):
    x, weight, bias, residual, *_ = with_residual(0.5)(6, 8, 16, torch.float32, device, False)
    function = step3_fused.linear_bias_dropout_residual
    rng_state = torch.tensor(RNG_STATE)
    by_default, tenth = (function(x, weight, bias, residual, *p, rng_state=rng_state) for p in ((), (0.1,)))
    assert torch.equal(by_default, tenth)


# ---- what is kept for the backward pass, and what is not ----


@pytest.mark.parametrize("op", ["linear_gelu", "mlp"])
@on_each_device
def test_without_what_is_kept_everything_is_the_same(op, device):
    """The backward pass computes it again: the same bits on a CPU; on a GPU as `auto` computes it."""
    for dtype in (torch.float32, torch.bfloat16):
        case = EPILOGUES[op][0]
        inputs = [t.requires_grad_() for t in case.inputs(64, 72, 136, dtype, device, False)]
        function = getattr(step3_fused, op)
        y, other = (function(*inputs, keep=keep) for keep in (True, False))
        grad = testing.randn(y.shape, dtype, device, seed=9)
        ours, theirs = (torch.autograd.grad(out, inputs, grad) for out in (y, other))
        with torch.no_grad():
            plain = function(*inputs)
        for a, b in zip((y, y, *ours), (other, plain, *theirs), strict=True):
            if device == "cpu":
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(a.detach().abs().max()))


def saved_bytes(function):
    """What autograd keeps of a call, weights and inputs not counted twice."""
    seen = {}

    def pack(tensor):
        seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return sum(seen.values())


@pytest.mark.parametrize("op", ["linear_gelu", "mlp"])
def test_keep_is_the_memory_of_one_activation(op):
    inputs = [t.requires_grad_() for t in EPILOGUES[op][0].inputs(64, 40, 136, torch.float32, "cpu", False)]
    kept, without = (saved_bytes(lambda: getattr(step3_fused, op)(*inputs, keep=k)) for k in (True, False))  # noqa: B023
    bias = 136 * 4  # is saved instead
    assert kept - without == 64 * 136 * 4 - bias


@on_each_device
def test_the_contract_tells_one_gelu_from_the_other(device):
    """They differ by less than 0.001, which is more than float32 may be off."""
    for op in ("linear_gelu", "gelu_linear", "mlp"):
        case = EPILOGUES[op][0]
        inputs = case.inputs(16, 40, 24, torch.float32, device, False)
        other = EpilogueCase(lambda *a, approximate, **o: case.formula(*a, approximate="none", **o), *case[1:])  # noqa: B023
        for rung in step3_fused.rungs(op, device):
            if able(op, rung, device, 16, 40, 24, torch.float32, False):
                with testing.raises(AssertionError, "against float64"):
                    check(op, other, inputs, rung, layouts=False)


@every_op
def test_auto_is_read_off_the_results(op):
    def sizes(shape):
        drops = {"threshold": int(shape["p"] > 0)} if "p" in shape else {}
        return {name: n for name, n in shape.items() if name != "p"} | drops

    testing.check_automatic(step3_fused, op, sizes)


if __name__ == "__main__":
    testing.main(__file__)
