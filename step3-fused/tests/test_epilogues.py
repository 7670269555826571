"""The ops whose work hangs on a matrix product, on every device there is: against float64, eager and the rung before.

python tests/test_epilogues.py              pytest's options may follow, such as -k "mlp and v7_inner"
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import step3_fused
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple
from kernel_fusion.testing.philox import mask_and_factor
from step3_fused.testing import (
    DTYPES,
    HALF_TYPES,
    TENSOR_CORES,
    backward_inputs_of,
    can_do,
    gradients_of,
    inputs_of,
    linear_of,
)

RNG_STATE = (1234, 8)  # seed and offset of dropout


# ---- the formulas, composed of PyTorch's operations ----


def linear_gelu_of(x, weight, bias=None, transposed=False, approximate="tanh"):
    preactivation = linear_of(x, weight, bias, transposed)
    return F.gelu(preactivation, approximate=approximate), preactivation


def times_slope(grad, x, approximate):
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


def linear_gelu_gradients(grad, preactivation, x, weight, transposed=False, approximate="tanh"):
    return gradients_of(times_slope(grad, preactivation, approximate), x, weight, transposed)


def gelu_linear_of(x, weight, bias=None, transposed=False, approximate="tanh"):
    return linear_of(F.gelu(x, approximate=approximate), weight, bias, transposed)


def gelu_linear_gradients(grad, x, weight, transposed=False, approximate="tanh"):
    through, *rest = gradients_of(grad, F.gelu(x, approximate=approximate), weight, transposed)
    return times_slope(through, x, approximate), *rest


def layer_norm_linear_of(x, norm_weight, norm_bias, weight, bias=None, transposed=False, eps=1e-5):
    rows = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    mean = wide.mean(-1)
    variance = (wide - mean.unsqueeze(-1)).square().mean(-1)  # torch.var warns where there are no rows
    return linear_of(rows, weight, bias, transposed), mean, (variance + eps).rsqrt()


def dropped(x, p, rng_state):
    mask, factor = mask_and_factor(x.shape, p, rng_state)
    return torch.where(mask.to(x.device), x * factor, 0)


def linear_bias_dropout_residual_of(x, weight, bias, residual, p, rng_state, transposed=False):
    return residual + dropped(linear_of(x, weight, bias, transposed), p, rng_state)


def dropout_gradients(grad, x, weight, p, rng_state, transposed=False):
    return gradients_of(dropped(grad, p, rng_state), x, weight, transposed)


def mlp_of(x, weight_1, bias_1, weight_2, bias_2, residual=None, transposed=False, approximate="tanh"):
    inner, preactivation = linear_gelu_of(x, weight_1, bias_1, transposed, approximate)
    y = linear_of(inner, weight_2, bias_2, transposed)
    return y if residual is None else y + residual, preactivation


# ---- the ops ----


class EpilogueCase(NamedTuple):
    """An op, and how to make its inputs: of rows, depth, width, dtype, device and `transposed`."""

    formula: Any
    inputs: Any
    options: tuple = ({},)  # each a set of keyword arguments
    all_outputs: dict = {}  # noqa: RUF012  with these the Python function returns all that the op does
    backward: bool = False


def layer(rows, depth, width, dtype, device, transposed):
    return tuple(inputs_of(rows, depth, width, dtype, device, transposed=transposed))


def with_preactivation(rows, depth, width, dtype, device, transposed):
    grad, x, weight = backward_inputs_of(rows, depth, width, dtype, device, transposed=transposed)
    return grad, testing.randn(grad.shape, dtype, device, seed=5), x, weight


def with_norm(rows, depth, width, dtype, device, transposed):
    x, *layer = inputs_of(rows, depth, width, dtype, device, transposed=transposed)
    norm = (testing.randn((depth,), dtype, device, seed=seed) for seed in (6, 7))
    return (x + testing.staircase(depth, device) + 1).to(dtype), *norm, *layer


def with_residual(p):
    def inputs(rows, depth, width, dtype, device, transposed):
        x, *layer = inputs_of(rows, depth, width, dtype, device, transposed=transposed)
        return x, *layer, testing.randn((*x.shape[:-1], width), dtype, device, seed=8), p, torch.tensor(RNG_STATE)

    return inputs


def backward_inputs(rows, depth, width, dtype, device, transposed):
    return backward_inputs_of(rows, depth, width, dtype, device, transposed=transposed)


def masked(p):
    def inputs(*sizes):
        return *backward_inputs(*sizes), p, torch.tensor(RNG_STATE)

    return inputs


def two_layers(residual):
    def inputs(rows, width, inner, dtype, device, transposed):
        first = inputs_of(rows, width, inner, dtype, device, transposed=transposed)
        second = inputs_of(rows, inner, width, dtype, device, transposed=transposed)[1:]
        return *first, *second, testing.randn(first[0].shape, dtype, device, seed=8) if residual else None

    return inputs


GELUS = ({"approximate": "tanh"}, {"approximate": "none"})
KEPT = {"return_preactivation": True}
EPILOGUES = {
    "linear_gelu": [EpilogueCase(linear_gelu_of, layer, GELUS, KEPT)],
    "linear_gelu_backward": [EpilogueCase(linear_gelu_gradients, with_preactivation, GELUS, backward=True)],
    "gelu_linear": [EpilogueCase(gelu_linear_of, layer, GELUS)],
    "gelu_linear_backward": [EpilogueCase(gelu_linear_gradients, backward_inputs, GELUS, backward=True)],
    "layer_norm_linear": [
        EpilogueCase(layer_norm_linear_of, with_norm, ({}, {"eps": 0.1}), {"return_statistics": True}),
    ],
    "linear_bias_dropout_residual": [
        EpilogueCase(linear_bias_dropout_residual_of, with_residual(p)) for p in (0.0, 0.3, 1.0)
    ],
    "linear_bias_dropout_residual_backward": [
        EpilogueCase(dropout_gradients, masked(p), backward=True) for p in (0.3, 1.0)
    ],
    "mlp": [EpilogueCase(mlp_of, two_layers(residual), GELUS, KEPT) for residual in (True, False)],
}


def rung_of_each_op():
    for op in EPILOGUES:
        for param in testing.device_rungs("step3_fused", op):
            yield pytest.param(op, *param.values, marks=param.marks, id=f"{op}-{param.id}")


def able(op, rung, device, rows, depth, width, dtype, transposed):
    """test_a_rung_refuses_what_it_says holds the rungs to it."""
    if rung == "v4_cublaslt":
        return device == "cuda" and (op != "linear_gelu" or (width % 8 == 0 and dtype in HALF_TYPES))
    if rung in ("v3_hopper", "v5_in_place") and op in ("linear_bias_dropout_residual", "gelu_linear_backward"):
        if depth % 8 or width % 8:  # what the epilogue reads comes by TMA
            return False
    if op == "gelu_linear_backward":  # the product for x, whose depth is the layer's width; any rung for the weight's
        return can_do(rung, device, rows, width, depth, dtype, not transposed)
    if op == "mlp":
        both = rung in ("v5_rows", "v6_one_launch", "v7_inner")  # the second layer's depth is the first one's width
        return can_do(rung, device, rows, depth, width, dtype, False) and not (both and width % 8)
    return can_do(rung, device, rows, depth, width, dtype, transposed, backward=EPILOGUES[op][0].backward)


def drops(op, rung):
    """Whether the rung has dropout; `check` holds those without to it."""
    return "dropout" in op and rung not in ("v4_cublaslt", "v5_in_place")


def check(op, case, inputs, rung, *, transposed=False, options=None, **more):
    if op == "linear_bias_dropout_residual" and not drops(op, rung) and inputs[4] > 0:
        with testing.raises(ValueError, "takes p = 0 only"):
            step3_fused.linear_bias_dropout_residual(*inputs, transposed=transposed, rung=rung)
        return None
    return testing.check_contract(
        step3_fused,
        op,
        inputs,
        rung,
        reference=case.formula,
        eager=case.formula,
        kwargs={"transposed": transposed} | (case.options[0] if options is None else options),
        all_outputs=case.all_outputs,
        **more,
    )


every_rung = pytest.mark.parametrize(("op", "device", "rung"), list(rung_of_each_op()))
every_op = pytest.mark.parametrize("op", EPILOGUES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
either_way = pytest.mark.parametrize("transposed", [False, True], ids=["depth-width", "width-depth"])

# These write to aligned memory only.
ALIGNED = (
    ("linear_gelu", "v4_cublaslt"),
    ("linear_bias_dropout_residual", "v5_in_place"),
    ("mlp", "v6_one_launch"),
)
SHAPES = [(1, 1, 1), (6, 3, 7), (4, 48, 24), (24, 66, 130), (64, 200, 136), (136, 72, 264)]


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


# Tiles of 256, 192, 128 and 64 columns, so 4, 3, 2 and 1 rounds a tile; one step a tile, and many tiles a block.
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
    want = case.formula(
        *(t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs),
        transposed=transposed,
    )
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    assert torch.equal(got, step3_fused.linear_bias_dropout_residual(*inputs, transposed=transposed, rung="v3_hopper"))


def test_v5_in_place_refuses_a_y_that_tma_cannot_write():
    inputs = EPILOGUES["linear_bias_dropout_residual"][0].inputs(16, 72, 136, torch.bfloat16, "cpu", False)
    whole = torch.empty(16 * 136 + 1, dtype=torch.bfloat16)
    with testing.raises(ValueError, "rung 'v5_in_place' takes a y that begins at a multiple of 16 bytes"):
        torch.ops.step3_fused.linear_bias_dropout_residual.out(*inputs, y=whole[1:].view(16, 136), rung="v5_in_place")


@pytest.mark.parametrize("op", ["linear_gelu", "linear_bias_dropout_residual", "gelu_linear_backward"])
def test_more_tiles_than_emulated_multiprocessors(op):
    case = EPILOGUES[op][0]
    rows, depth, width = (2100, 2600, 72) if case.backward else (2100, 72, 2600)
    inputs = case.inputs(rows, depth, width, torch.bfloat16, "cpu", False)
    got = getattr(step3_fused, op)(*inputs, rung="v3_hopper", **case.all_outputs)
    wide = [t.float() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs]
    for g, want in zip(as_tuple(got), as_tuple(case.formula(*wide)), strict=True):
        torch.testing.assert_close(g.float(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))


# Steps of the depth: 47 of v2_mma, whose ring has four stages; 24 in tiles of 64 columns, with seven; 14 in tiles of
# 256 or 192 columns, of two blocks or one, with four, which the other ops' tests go round with many tiles.
@pytest.mark.parametrize("op", [op for op in EPILOGUES if "v3_hopper" in step3_fused.rungs(op, "cpu")])
@pytest.mark.parametrize(
    ("rung", "shape"),
    [("v2_mma", (33, 1504, 40)), ("v3_hopper", (33, 1504, 40)), ("v3_hopper", (130, 840, 1096))],
    ids=str,
)
@testing.where(
    lambda shape, op, rung: (
        rung in step3_fused.rungs(op, "cpu") and (shape[2] == 40 or op in ("gelu_linear", "layer_norm_linear"))
    )
)
def test_stages_of_the_depth_are_used_again_and_again(rung, shape, op):
    """Also where what is multiplied is changed on its way from its stage."""
    case = EPILOGUES[op][0]
    rows, depth, width = (shape[0], *shape[:0:-1]) if case.backward else shape
    inputs = case.inputs(rows, depth, width, torch.bfloat16, "cpu", False)
    assert able(op, rung, "cpu", rows, depth, width, torch.bfloat16, False)
    check(op, case, inputs, rung, layouts=False)


def test_more_tiles_of_few_rows_than_emulated_multiprocessors():
    """v5_rows's blocks take tile after tile in both layers, and their rings go round."""
    for width, inner in ((72, 2600), (1096, 520)):
        case = EPILOGUES["mlp"][0]
        inputs = case.inputs(7, width, inner, torch.bfloat16, "cpu", False)
        check("mlp", case, inputs, "v5_rows", layouts=False)


# Of v7_inner: more slices than clusters at once, of blocks with two tiles, the last slice not whole; rings that go
# round in both layers, and a second tile that is not whole; one slice that is not whole, and blocks without columns of
# y; a ring that x alone goes round.
SLICES = [(7, 72, 2600), (33, 1096, 520), (64, 40, 136), (16, 2056, 256)]


@either_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SLICES, ids=str)
def test_slices_of_the_inner_width(shape, dtype, transposed):
    """The clusters of v7_inner share the inner width, its blocks a slice of it; stages are used again."""
    for case in EPILOGUES["mlp"]:
        check(
            "mlp", case, case.inputs(*shape, dtype, "cpu", transposed), "v7_inner", transposed=transposed, layouts=False
        )


@pytest.mark.parametrize("shape", [(64, 24, 2600), (7, 24, 8712)], ids=str)
def test_more_slices_than_are_taken_at_once(shape):
    """More eights of a block's columns than threads that add them up; more parts of y than are asked for at once."""
    case = EPILOGUES["mlp"][0]
    check("mlp", case, case.inputs(*shape, torch.bfloat16, "cpu", False), "v7_inner", layouts=False)


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_the_clusters_parts_are_added_when_all_are_there(device):
    """v7_inner launches the second kernel while the first runs. The contract sees whether it waits."""
    case = EPILOGUES["mlp"][0]
    inputs = case.inputs(4, 768, 3072, torch.bfloat16, device, False)
    if able("mlp", "v7_inner", device, 4, 768, 3072, torch.bfloat16, False):
        for _ in range(20):
            check("mlp", case, inputs, "v7_inner", layouts=False)


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:1", "random:2"])
@pytest.mark.parametrize("shape", SLICES, ids=str)
def test_slices_of_the_inner_width_in_any_order(shape, schedule, monkeypatch):
    """In whatever order threads come, v7_inner ends, and with the same bits."""
    inputs = EPILOGUES["mlp"][0].inputs(*shape, torch.bfloat16, "cpu", False)
    want = step3_fused.mlp(*inputs, rung="v7_inner", return_preactivation=True)
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    monkeypatch.setenv("KF_SIMT_THREADS", "1")
    for keep in (True, False):
        got = as_tuple(step3_fused.mlp(*inputs, rung="v7_inner", return_preactivation=keep))
        for g, w in zip(got, want, strict=False):
            assert torch.equal(g, w)


# Of v6_one_launch: three bands of tiles of 128 columns, two of 256, two whose products take a single step, and a single
# tile of rows, of which the second layer comes right after the first.
BANDS = [(900, 520, 264), (1030, 768, 256), (2100, 8, 16), (100, 264, 520)]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("shape", BANDS, ids=str)
def test_bands_of_rows(shape, residual):
    """v6_one_launch's blocks go from one layer to the other and back; the last tile of rows is not whole."""
    case = EPILOGUES["mlp"][0 if residual else 1]
    check("mlp", case, case.inputs(*shape, torch.bfloat16, "cpu", False), "v6_one_launch", layouts=False)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:1", "random:2"])
@pytest.mark.parametrize("shape", BANDS, ids=str)
def test_bands_of_rows_with_few_blocks_at_once(shape, schedule, threads, monkeypatch):
    """v6_one_launch comes to its end with any number of resident blocks, one included, and to the same bits."""
    inputs = EPILOGUES["mlp"][0].inputs(*shape, torch.bfloat16, "cpu", False)
    want = step3_fused.mlp(*inputs, rung="v6_one_launch", return_preactivation=True)
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    monkeypatch.setenv("KF_SIMT_THREADS", str(threads))
    for keep in (True, False):
        got = as_tuple(step3_fused.mlp(*inputs, rung="v6_one_launch", return_preactivation=keep))
        for g, w in zip(got, want, strict=False):
            assert torch.equal(g, w)


@pytest.mark.parametrize(("rung", "launches"), [("pieces", 2), ("v5_rows", 1), ("v6_one_launch", 1), ("v7_inner", 2)])
def test_a_rung_of_mlp_launches_as_many_kernels_as_its_header_says(rung, launches):
    inputs = EPILOGUES["mlp"][0].inputs(64, 72, 136, torch.bfloat16, "cpu", False)
    before = step3_fused.emulated_kernels()
    step3_fused.mlp(*inputs, rung=rung)
    assert step3_fused.emulated_kernels() - before == launches


def test_v6_one_launch_refuses_outputs_that_tma_cannot_write():
    inputs = EPILOGUES["mlp"][0].inputs(16, 72, 136, torch.bfloat16, "cpu", False)
    whole = torch.empty(16 * 72 + 1, dtype=torch.bfloat16)
    preactivation = torch.empty(0, dtype=torch.bfloat16)
    with testing.raises(
        ValueError, "mlp: rung 'v6_one_launch' takes weights, residual, y and preactivation that begin"
    ):
        torch.ops.step3_fused.mlp.out(
            *inputs, y=whole[1:].view(16, 72), preactivation=preactivation, keep=False, rung="v6_one_launch"
        )


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
@every_op
def test_emulated_threads_may_run_in_any_order(op, schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step3_fused.rungs(op, "cpu"):
        if able(op, rung, "cpu", 136, 200, 264, torch.bfloat16, False):
            case = EPILOGUES[op][0]
            check(op, case, case.inputs(136, 200, 264, torch.bfloat16, "cpu", False), rung, layouts=False)


@every_rung
def test_runs_agree_to_the_last_bit(op, device, rung):
    for dtype in (torch.float32, torch.bfloat16):
        if able(op, rung, device, 264, 72, 136, dtype, False):
            case = EPILOGUES[op][0]
            inputs = case.inputs(264, 72, 136, dtype, device, False)
            function = lambda *a: getattr(step3_fused, op)(*a, rung=rung, **case.all_outputs)  # noqa: B023, E731
            testing.check_reruns(function, *inputs)


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
def test_what_lies_beyond_the_depth_stays_out_of_rows_of_large_numbers(op, device, rung):
    """A row of one large number is 0 when it is normalised; beyond its end (0 - mean)·rstd would be infinite."""
    if op != "layer_norm_linear" or not able(op, rung, device, 8, 72, 16, torch.bfloat16, False):
        return
    x, *norm, weight, bias = with_norm(8, 72, 16, torch.bfloat16, device, False)
    x[3] = 2.0**120
    y = step3_fused.layer_norm_linear(x, *norm, weight, bias, rung=rung)
    assert y.isfinite().all()


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


@every_rung
def test_a_state_in_the_gpus_memory_gives_the_same(op, device, rung):
    if device == "cuda" and drops(op, rung):
        case = EPILOGUES[op][-1 if "backward" in op else 1]
        *inputs, rng_state = case.inputs(64, 72, 136, torch.bfloat16, device, False)
        function = getattr(step3_fused, op)
        here, there = (as_tuple(function(*inputs, s, rung=rung)) for s in (rng_state, rng_state.cuda()))
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@on_each_device
def test_dropout_draws_a_state_of_its_own(device):
    x, weight, bias, residual, *_ = with_residual(0.5)(6, 8, 16, torch.float32, device, False)
    function = step3_fused.linear_bias_dropout_residual
    torch.manual_seed(3)
    first, second = (function(x, weight, bias, residual, 0.5) for _ in range(2))
    torch.manual_seed(3)
    again = function(x, weight, bias, residual, 0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    without = function(x, weight, bias, residual, 0.5, training=False)
    assert torch.equal(without, function(x, weight, bias, residual, 0.0))
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


# ---- what a wrong kernel would do, and how it shows ----


def wrong(formula, change):
    def mistaken(*inputs, **options):
        outputs = list(as_tuple(formula(*inputs, **options)))
        outputs[0] = change(outputs[0])
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return mistaken


def the_last_columns_again(y):
    y = y.clone()
    y[..., -8:] = y[..., -16:-8]
    return y


def rows_swapped(y):
    return y.flip(0)


def a_hundredth_more(y):
    return y * 1.01


@every_op
@on_each_device
@pytest.mark.parametrize("change", [the_last_columns_again, rows_swapped, a_hundredth_more])
def test_the_contract_catches(change, op, device):
    for dtype in (torch.float32, torch.bfloat16):
        case = EPILOGUES[op][0]
        mistaken = EpilogueCase(wrong(case.formula, change), case.inputs, case.options, case.all_outputs)
        inputs = case.inputs(16, 40, 24, dtype, device, False)
        for rung in step3_fused.rungs(op, device):
            if change is a_hundredth_more and dtype != torch.float32:
                continue  # bfloat16 has eight bits
            if able(op, rung, device, 16, 40, 24, dtype, False):
                with testing.raises(AssertionError, "against float64"):
                    check(op, mistaken, inputs, rung, layouts=False)


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


# ---- as torch sees it ----


@every_rung
def test_it_is_registered_as_torch_wants_it(op, device, rung):
    dtype = torch.bfloat16 if rung in TENSOR_CORES else torch.float32
    if able(op, rung, device, 8, 8, 16, dtype, False):
        for case in EPILOGUES[op][: 1 if rung in ("v4_cublaslt", "v5_in_place") else 2]:
            testing.check_op(step3_fused, op, case.inputs((2, 4), 8, 16, dtype, device, False), {"rung": rung})


def differentiable(op, inputs, **options):
    """The op as a function of the tensors that have gradients, and these in float64."""
    variables = [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def function(*tensors):
        given = list(inputs)
        for i, t in zip(variables, tensors, strict=True):
            given[i] = t
        return getattr(step3_fused, op)(*given, **options)

    return function, [inputs[i].requires_grad_() for i in variables]


@every_op
@on_each_device
@either_way
def test_gradients_are_those_of_finite_differences(transposed, op, device):
    for case in EPILOGUES[op]:
        for options in case.options:
            inputs = case.inputs((2, 2), 3, 4, torch.float64, device, transposed)
            function, variables = differentiable(op, inputs, transposed=transposed, **options)
            assert torch.autograd.gradcheck(function, variables)
            if not case.backward:  # third derivatives are not there
                assert torch.autograd.gradgradcheck(function, variables)
            if case is EPILOGUES[op][0]:
                testing.check_each_input_alone(function, tuple(variables))


@pytest.mark.parametrize("op", ["linear_gelu", "mlp"])
@on_each_device
@either_way
def test_gradients_without_what_is_kept(transposed, op, device):
    inputs = EPILOGUES[op][0].inputs(3, 3, 4, torch.float64, device, transposed)
    function, variables = differentiable(op, inputs, transposed=transposed, keep=False)
    assert torch.autograd.gradcheck(function, variables)


@on_each_device
def test_the_preactivation_has_a_gradient_of_its_own(device):
    inputs = EPILOGUES["linear_gelu"][0].inputs(3, 3, 4, torch.float64, device, False)
    function, variables = differentiable("linear_gelu", inputs, return_preactivation=True)
    assert torch.autograd.gradcheck(function, variables)
    assert torch.autograd.gradcheck(lambda *a: function(*a)[1], variables)


@on_each_device
def test_gradients_without_a_bias(device):
    for op in ("linear_gelu", "gelu_linear"):
        x, weight, _ = inputs_of(3, 3, 4, torch.float64, device)
        assert torch.autograd.gradcheck(getattr(step3_fused, op), [x.requires_grad_(), weight.requires_grad_()])
    x, *norm, weight, _ = (t.requires_grad_() for t in with_norm(3, 3, 4, torch.float64, device, False))
    assert torch.autograd.gradcheck(step3_fused.layer_norm_linear, [x, *norm, weight])
    x, weight, _, residual, p, rng_state = with_residual(0.3)(3, 3, 4, torch.float64, device, False)
    assert torch.autograd.gradcheck(
        lambda x, w, r: step3_fused.linear_bias_dropout_residual(x, w, None, r, p, rng_state),
        [t.requires_grad_() for t in (x, weight, residual)],
    )


@every_op
@on_each_device
def test_forward_mode_is_refused(op, device):
    function, variables = differentiable(op, EPILOGUES[op][0].inputs(3, 4, 5, torch.float32, device, False))
    testing.check_tangents_are_refused(function, tuple(t.detach() for t in variables))


FORWARD = [op for op in EPILOGUES if "backward" not in op]


@pytest.mark.parametrize("op", FORWARD)
@on_each_device
def test_autocast_makes_it_autocasts_dtype(op, device):
    inputs = EPILOGUES[op][0].inputs(8, 8, 16, torch.float32, device, False)
    function, variables = differentiable(op, inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = function(*variables)
        same = function(*(t.bfloat16() for t in variables))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, same)
    grads = torch.autograd.grad(y.float().square().sum(), variables)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.parametrize("op", FORWARD)
@on_each_device
@either_way
def test_autocast_passes_each_option_on(transposed, op, device):
    """Of square weights: one that is read the wrong way round has the right shape."""
    for case in EPILOGUES[op]:
        for options in case.options:
            inputs = case.inputs(8, 8, 8, torch.float32, device, transposed)
            function, variables = differentiable(op, inputs, transposed=transposed, **options)
            with torch.autocast(device, dtype=torch.bfloat16):
                mixed = function(*variables)
            assert torch.equal(mixed, function(*(t.bfloat16() for t in variables)))


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_forward_and_backward_in_a_cuda_graph(op, device):
    inputs = list(EPILOGUES[op][0].inputs(256, 768, 3072, torch.bfloat16, device, False))
    if "dropout" in op:
        inputs[-2:] = 0.1, inputs[-1].cuda()
    function, variables = differentiable(op, inputs)
    grad = testing.randn(function(*variables).shape, torch.bfloat16, device, seed=5)
    testing.check_gradients_in_a_cuda_graph(function, variables, grad)


# ---- the block ----


def block_inputs(width, inner, dtype, device):
    def layer(depth, out, seed):
        weight = testing.randn((depth, out), dtype, device, seed=seed, scale=depth**-0.5)
        return weight, testing.randn((out,), dtype, device, seed=seed + 1, scale=0.1)

    norms = [tuple(testing.randn((width,), dtype, device, seed=s) for s in (k, k + 1)) for k in (20, 30)]
    x = testing.randn((2, 6, width), dtype, device, seed=40)
    return (
        x,
        norms[0],
        layer(width, 3 * width, 50),
        layer(width, width, 60),
        norms[1],
        layer(width, inner, 70),
        layer(inner, width, 80),
    )


def block_of(x, norm_1, qkv, projection, norm_2, mlp_1, mlp_2, heads, causal=True, eps=1e-5):
    width = x.shape[-1:]
    packed = F.layer_norm(x, width, *norm_1, eps) @ qkv[0] + qkv[1]
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in packed.chunk(3, -1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
    x = x + attended @ projection[0] + projection[1]
    inner = F.gelu(F.layer_norm(x, width, *norm_2, eps) @ mlp_1[0] + mlp_1[1], approximate="tanh")
    return x + inner @ mlp_2[0] + mlp_2[1]


def wide(inputs):
    return [tuple(t.double() for t in i) if isinstance(i, tuple) else i.double() for i in inputs]


@on_each_device
@every_dtype
def test_a_block_is_that_of_gpt2(dtype, device):
    inputs = block_inputs(24, 96, dtype, device)
    got = step3_fused.transformer_block(*inputs, heads=3)
    assert got.dtype == dtype
    exact = block_of(*wide(inputs), heads=3)
    eager = (block_of(*inputs, heads=3).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * eager + 1e-6 * exact.abs().max()
    for options in ({"causal": False}, {"eps": 0.1}):
        got = step3_fused.transformer_block(*inputs, heads=3, **options)
        exact = block_of(*wide(inputs), heads=3, **options)
        assert (got.double() - exact).abs().max() <= 4 * eager + 1e-6 * exact.abs().max()


@on_each_device
def test_a_block_takes_an_attention_and_has_gradients(device):
    inputs = block_inputs(8, 16, torch.float64, device)
    flat = [t.requires_grad_() for i in inputs for t in (i if isinstance(i, tuple) else (i,))]

    def block(x, *rest, function=step3_fused.transformer_block, **options):
        pairs = [tuple(rest[i : i + 2]) for i in range(0, len(rest), 2)]
        return function(x, *pairs, heads=2, **options)

    ours = torch.autograd.grad(block(*flat).sin().sum(), flat)
    theirs = torch.autograd.grad(block(*flat, function=block_of).sin().sum(), flat)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    calls = []

    def attention(q, k, v, is_causal):
        calls.append(is_causal)
        return v

    block(*flat, attention=attention)
    assert calls == [True]


@on_each_device
def test_a_block_drops_only_while_it_trains(device):
    inputs = block_inputs(24, 96, torch.float32, device)
    torch.manual_seed(1)
    first, second = (step3_fused.transformer_block(*inputs, heads=3, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    plain = step3_fused.transformer_block(*inputs, heads=3)
    assert torch.equal(step3_fused.transformer_block(*inputs, heads=3, dropout_p=0.5, training=False), plain)
    assert torch.equal(step3_fused.transformer_block(*inputs, heads=3, dropout_p=1.0), inputs[0])


@on_each_device
def test_a_block_refuses_what_is_no_block(device):
    x, *parameters = block_inputs(24, 96, torch.float32, device)
    for bad, heads in ((x, 5), (x, 0), (x, -3), (x[0], 3), (x[None], 3)):
        text = f"transformer_block: `x` must be [B, S, {heads}·D] for `heads` {heads}, got {tuple(bad.shape)}"
        with testing.raises(ValueError, text):
            step3_fused.transformer_block(bad, *parameters, heads=heads)


@every_op
def test_auto_is_read_off_the_results(op):
    def sizes(shape):
        drops = {"threshold": int(shape["p"] > 0)} if "p" in shape else {}
        return {name: n for name, n in shape.items() if name != "p"} | drops

    testing.check_automatic(step3_fused, op, sizes)


# ---- what a rung refuses ----


@on_each_device
@every_op
def test_a_rung_refuses_what_it_says(op, device):
    """By name, with what it takes instead; `able` says when. Nothing is computed."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rungs for Hopper refuse any other GPU first")
    case = EPILOGUES[op][0]
    for rung in step3_fused.rungs(op, device):
        for shape in ((8, 8, 8), (8, 12, 8), (8, 8, 12)):
            for dtype in (torch.float32, torch.bfloat16):
                for transposed in (False, True):
                    if able(op, rung, device, *shape, dtype, transposed):
                        continue
                    inputs = case.inputs(*shape, dtype, device, transposed)
                    with testing.raises(ValueError, f"{op}: rung '{rung}' "):
                        getattr(step3_fused, op)(*inputs, transposed=transposed, rung=rung)


# ---- bad input ----


@on_each_device
@every_op
def test_outputs_that_share_memory_with_anything_are_refused(op, device):
    testing.check_apart(step3_fused, op, EPILOGUES[op][0].inputs(6, 8, 16, torch.float32, device, False))


BAD = {
    "linear_gelu": [
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'sigmoid'", {"approximate": "sigmoid"}),
        (ValueError, "`bias` must have shape (4,), got (3,)", {"bias": (3,)}),
    ],
    "gelu_linear": [
        (ValueError, "`approximate` must be 'tanh' or 'none', got ''", {"approximate": ""}),
        (ValueError, "`weight` must have shape (3, 4), got (2, 4)", {"weight": (2, 4)}),
    ],
    "linear_gelu_backward": [
        (ValueError, "`preactivation` must have shape (2, 4), got (2, 3)", {"preactivation": (2, 3)}),
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'x'", {"approximate": "x"}),
        (ValueError, "`weight` must have shape (3, 4), got (4, 3)", {"weight": (4, 3)}),
    ],
    "gelu_linear_backward": [
        (
            ValueError,
            "`x` must have the shape of `grad` but for the last dimension, got (3, 3) and (2, 4)",
            {"x": (3, 3)},
        ),
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'x'", {"approximate": "x"}),
    ],
    "layer_norm_linear": [
        (ValueError, "`norm_weight` must have shape (3,), got (4,)", {"norm_weight": (4,)}),
        (ValueError, "`norm_bias` must have shape (3,), got (3, 1)", {"norm_bias": (3, 1)}),
        (ValueError, "`weight` must not be empty, got shape (3, 0)", {"weight": (3, 0)}),
        (ValueError, "`eps` must be a finite number ≥ 0, got -1", {"eps": -1.0}),
    ],
    "linear_bias_dropout_residual": [
        (ValueError, "`residual` must have shape (2, 4), got (4,)", {"residual": (4,)}),
        (ValueError, "`dropout_p` must be from 0 to 1, got 1.5", {"dropout_p": 1.5}),
        (TypeError, "`rng_state` must be int64, got float32", {"rng_state": (2,)}),
        (ValueError, "`bias` must have shape (4,), got (5,)", {"bias": (5,)}),
    ],
    "linear_bias_dropout_residual_backward": [
        (ValueError, "`dropout_p` must be from 0 to 1, got -0.1", {"dropout_p": -0.1}),
        (ValueError, "`weight` must have shape (3, 4), got (3, 5)", {"weight": (3, 5)}),
    ],
    "mlp": [
        (ValueError, "`bias_1` must have shape (4,), got (3,)", {"bias_1": (3,)}),
        (ValueError, "`weight_2` must have shape (4, 3), got (3, 4)", {"weight_2": (3, 4)}),
        (ValueError, "`bias_2` must have shape (3,), got (4,)", {"bias_2": (4,)}),
        (ValueError, "`residual` must have shape (2, 3), got (2, 4)", {"residual": (2, 4)}),
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'x'", {"approximate": "x"}),
    ],
}


@every_op
@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_bad_arguments_are_refused(op, device):
    function = getattr(step3_fused, op)
    names = [a.name for a in getattr(torch.ops.step3_fused, op).default._schema.arguments]
    inputs = EPILOGUES[op][0].inputs(2, 3, 4, torch.float32, "cpu", False)
    good = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in zip(names, inputs, strict=False)}
    if "rng_state" in good:
        good["rng_state"] = torch.tensor(RNG_STATE)
    for exception, text, changed in BAD[op]:
        changed = {n: torch.ones(v, device=device) if isinstance(v, tuple) else v for n, v in changed.items()}
        with testing.raises(exception, f"{op}: {text}"):
            function(**(good | changed))
    first = names[0]
    with testing.raises(TypeError, f"{op}: `{first}` must be float32, float16, bfloat16 or float64, got int32"):
        function(**(good | {first: good[first].int()}))
    for name, value in good.items():
        if name in (first, "rng_state") or not isinstance(value, torch.Tensor):
            continue
        with testing.raises(TypeError, f"{op}: `{name}` must have the dtype of `{first}` (float32), got float64"):
            function(**(good | {name: value.double()}))
        other = torch.empty_like(value, device="meta" if device != "meta" else "cpu")
        with testing.raises(ValueError, f"{op}: `{name}` must be on the device of `{first}`"):
            function(**(good | {name: other}))


@every_op
@on_each_device
def test_an_unknown_rung_is_refused(op, device):
    for rows in (3, 0):
        with testing.raises(ValueError, f"{op}: `rung` must be 'auto' or one of", "got 'v99'"):
            getattr(step3_fused, op)(*EPILOGUES[op][0].inputs(rows, 8, 16, torch.float32, device, False), rung="v99")


if __name__ == "__main__":
    testing.main(__file__)
