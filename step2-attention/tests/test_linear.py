"""linear and its backward pass, on every device there is: against float64, eager PyTorch and the rung before.

python tests/test_linear.py            pytest's options may follow, such as -k v7_persistent
"""

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from step2_attention.linear_testing import (
    HALF_TYPES,
    TENSOR_CORES,
    backward_inputs_of,
    can_do,
    gradients_of,
    inputs_of,
    linear_of,
)
from step2_attention.testing import every_dtype, every_rung_of, float_and_half, of_the_op, on_each_device

MOST = (1 << 31) - 1


def check(inputs, rung, *, transposed=False, **options):
    return testing.check_contract(
        step2_attention,
        "linear",
        inputs,
        rung,
        reference=linear_of,
        eager=linear_of,
        kwargs={"transposed": transposed},
        **options,
    )


def check_backward(inputs, rung, *, transposed=False, **options):
    return testing.check_contract(
        step2_attention,
        "linear_backward",
        inputs,
        rung,
        reference=gradients_of,
        eager=gradients_of,
        kwargs={"transposed": transposed},
        **options,
    )


every_rung, every_backward_rung = every_rung_of("linear"), every_rung_of("linear_backward")
either_way = pytest.mark.parametrize("transposed", [False, True], ids=["depth-width", "width-depth"])

# One tile and several, in each direction and in both sizes of tiles; multiples of 8, and not.
SHAPES = [
    (1, 1, 1),
    (5, 3, 7),
    (1, 40, 24),
    (3, 130, 66),
    (4, 64, 256),
    (33, 72, 40),
    (64, 200, 136),
    (130, 136, 264),
    (257, 72, 136),
    (40, 1104, 72),
    (66, 33, 515),
]


# ---- the contract of correctness ----


@every_rung
@every_dtype
@either_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@testing.where(lambda shape, transposed, dtype, device, rung: can_do(rung, device, *shape, dtype, transposed))
def test_any_shape(shape, transposed, dtype, device, rung):
    inputs = inputs_of(*shape, dtype, device, transposed=transposed)
    check(inputs, rung, transposed=transposed, layouts=shape in ((3, 130, 66), (64, 200, 136)))


@every_rung
@either_way
@float_and_half
def test_without_bias_and_with_several_dimensions(dtype, transposed, device, rung):
    for rows, depth, width in (((2, 2), 72, 40), ((2, 3, 5), 64, 88), ((64,), 64, 64)):
        if can_do(rung, device, 4 if rows == (2, 2) else 64, depth, width, dtype, transposed):
            inputs = inputs_of(rows, depth, width, dtype, device, transposed=transposed, bias=False)
            check(inputs, rung, transposed=transposed, layouts=False)


@every_rung
@either_way
@float_and_half
def test_each_tensor_wherever_it_lies(dtype, transposed, device, rung):
    for rows in (4, 24):
        if can_do(rung, device, rows, 40, 56, dtype, transposed):
            inputs = inputs_of(rows, 40, 56, dtype, device, transposed=transposed)
            check(inputs, rung, transposed=transposed, layouts=False, alone=True)


@every_rung
@float_and_half
@pytest.mark.parametrize("shape", [(1024, 768, 2304), (1000, 3072, 768), (64, 768, 3072), (1, 768, 50257)], ids=str)
def test_gpt2s_shapes(shape, dtype, device, rung):
    """On a GPU, where they take no time."""
    transposed = shape[2] == 50257
    if device == "cuda" and can_do(rung, device, *shape, dtype, transposed):
        inputs = inputs_of(*shape, dtype, device, transposed=transposed)
        check(inputs, rung, transposed=transposed, layouts=False)


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
@pytest.mark.parametrize("rung", ["v6_wgmma", "v7_persistent", "v8_cluster"])
def test_more_tiles_than_multiprocessors(rung, device):
    """Persistent blocks take tile after tile: their rings and barriers go round many times."""
    check(inputs_of(4000, 832, 2600, torch.bfloat16, device), rung, layouts=False)


@pytest.mark.parametrize("rung", ["v6_wgmma", "v7_persistent", "v8_cluster"])
@pytest.mark.parametrize("shape", [(300, 200, 17000), (2100, 72, 2600)], ids=str)
def test_more_tiles_than_emulated_multiprocessors(rung, shape):
    if rung in step2_attention.rungs("linear", "cpu"):
        x, weight, bias = inputs_of(*shape, torch.bfloat16, "cpu")
        y = step2_attention.linear(x, weight, bias, rung=rung).float()
        torch.testing.assert_close(y, linear_of(x.float(), weight.float(), bias.float()), rtol=1e-2, atol=1e-2)


def test_plain_cpp_takes_many_rows_in_turn():
    """1024 at a time, a thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        check(inputs_of(2100, 16, 24, torch.float32, "cpu"), "cpu", layouts=False)
    finally:
        torch.set_num_threads(threads)


TILES = {  # what each rung takes tiles of 64, 128, 192 and 256 columns for, where there are 16 multiprocessors
    "v7_persistent": [(64, 72, 200), (260, 72, 2000), (130, 72, 1096), (260, 72, 1096)],
    "v9_split": [(64, 840, 200), (60, 712, 1096), (70, 456, 1096), (70, 328, 1576)],  # each stage is used again
    "v10_rows": [(4, 840, 1016)],  # a tile has one block, which uses each stage again
}


@either_way
@pytest.mark.parametrize(
    ("rung", "shape"), [(rung, shape) for rung, shapes in TILES.items() for shape in shapes], ids=str
)
def test_each_width_of_tiles(rung, shape, transposed):
    check(inputs_of(*shape, torch.bfloat16, "cpu", transposed=transposed), rung, transposed=transposed)


@every_backward_rung
@every_dtype
@either_way
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (5, 3, 7), (8, 37, 16), (24, 40, 56), (130, 72, 136), (264, 136, 72)], ids=str
)
def test_gradients_of_any_shape(shape, transposed, dtype, device, rung):
    if can_do(rung, device, *shape, dtype, transposed, backward=True):
        inputs = backward_inputs_of(*shape, dtype, device, transposed=transposed)
        check_backward(inputs, rung, transposed=transposed, layouts=shape == (24, 40, 56))


@every_backward_rung
@float_and_half
def test_gradients_of_each_tensor_wherever_it_lies(dtype, device, rung):
    if can_do(rung, device, 24, 40, 56, dtype, False, backward=True):
        inputs = backward_inputs_of((3, 8), 40, 56, dtype, device)
        check_backward(inputs, rung, layouts=False, alone=True)


@every_backward_rung
def test_gradients_of_a_layer_of_gpt2(device, rung):
    if device == "cuda":
        for transposed in (False, True):
            inputs = backward_inputs_of(2048, 768, 3072, torch.bfloat16, device, transposed=transposed)
            check_backward(inputs, rung, transposed=transposed, layouts=False)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step2_attention.rungs("linear", "cpu"):
        for shape in ((3, 72, 40), (130, 200, 264)):
            if can_do(rung, "cpu", *shape, torch.bfloat16, False):
                check(inputs_of(*shape, torch.bfloat16, "cpu"), rung, layouts=False)


@every_rung
@pytest.mark.parametrize("shape", [(2, 264, 136), (300, 264, 520)], ids=str)
def test_runs_agree_to_the_last_bit(shape, device, rung):
    for dtype in (torch.float32, torch.bfloat16):
        if can_do(rung, device, *shape, dtype, False):
            x, weight, bias = inputs_of(*shape, dtype, device)
            testing.check_reruns(lambda x, w, b: step2_attention.linear(x, w, b, rung=rung), x, weight, bias)  # noqa: B023


@every_backward_rung
def test_gradients_agree_to_the_last_bit(device, rung):
    for dtype in (torch.float32, torch.bfloat16):
        if can_do(rung, device, 264, 72, 136, dtype, False, backward=True):
            inputs = backward_inputs_of(264, 72, 136, dtype, device)
            testing.check_reruns(lambda *a: step2_attention.linear_backward(*a, rung=rung), *inputs)  # noqa: B023


# ---- TF32 ----


@pytest.fixture
def tf32():
    """As a user allows it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@every_rung
@either_way
@pytest.mark.parametrize("shape", [(5, 40, 24), (33, 72, 40), (130, 136, 264)], ids=str)
def test_tf32_where_it_is_allowed(shape, transposed, device, rung, tf32):
    if rung != "v5_mma":
        return
    x, weight, bias = inputs_of(*shape, torch.float32, device, transposed=transposed)
    y = step2_attention.linear(x, weight, bias, transposed=transposed, rung=rung).double()
    exact = linear_of(x.double(), weight.double(), bias.double(), transposed)
    error = (y - exact).abs().max() / exact.abs().max()
    assert 1e-6 < error < 1e-3  # ten bits of a factor are kept; more would not be TF32


@on_each_device
def test_float32_is_float32_where_tf32_is_not_allowed(device):
    if torch.backends.cuda.matmul.allow_tf32:
        pytest.skip("this process allows TF32")
    with testing.raises(ValueError, "linear: rung 'v5_mma' takes float32 only where", "allow_tf32"):
        step2_attention.linear(*inputs_of(8, 8, 8, torch.float32, device), rung="v5_mma")
    for shape in ((64, 256, 128), (3, 768, 128)):
        check(inputs_of(*shape, torch.float32, device), "auto", layouts=False)


# ---- inputs that are unusual, and right ----


@every_rung
@either_way
def test_no_rows(transposed, device, rung):
    x, weight, bias = inputs_of((0, 3), 8, 16, torch.float32, device, transposed=transposed)
    assert step2_attention.linear(x, weight, bias, transposed=transposed).shape == (0, 3, 16)
    grads = step2_attention.linear_backward(x.new_empty(0, 3, 16), x, weight, transposed=transposed)
    assert grads[0].shape == (0, 3, 8)
    assert all(g.eq(0).all() for g in grads[1:])


@every_rung
def test_infinity_and_nan_stay_in_their_row_and_column(device, rung):
    for dtype in (torch.float32, torch.bfloat16):
        if not can_do(rung, device, 4, 72, 40, dtype, False):
            continue
        x, weight, bias = inputs_of(4, 72, 40, dtype, device)
        x[1, 3], weight[5, 7] = float("inf"), float("nan")
        y = step2_attention.linear(x, weight, bias, rung=rung)
        assert y[:, 7].isnan().all()
        others = torch.arange(40, device=device) != 7
        assert not y[1, others].isfinite().any()
        assert y[0, others].isfinite().all()
        assert y[2:, others].isfinite().all()


@every_rung
def test_a_sum_of_65504_and_more_does_not_overflow_on_the_way(device, rung):
    """Sums are float32: in float16 the first half of the depth alone would be infinite."""
    if not can_do(rung, device, 4, 128, 8, torch.float16, False):
        return
    x = torch.full((4, 128), 100.0, dtype=torch.float16, device=device)
    weight = torch.full((128, 8), 10.0, dtype=torch.float16, device=device)
    weight[64:] = -10
    weight[64] = 0
    y = step2_attention.linear(x, weight, rung=rung)
    assert y.eq(1000).all()


# ---- as torch sees it ----


@of_the_op("linear")
@every_rung
@either_way
def test_it_is_registered_as_torch_wants_it(transposed, device, rung):
    dtype = torch.bfloat16 if rung in TENSOR_CORES else torch.float32
    if can_do(rung, device, 4, 8, 16, dtype, transposed):
        inputs = inputs_of((2, 2), 8, 16, torch.float32 if dtype == torch.float32 else dtype, device)
        if transposed:
            inputs = (inputs[0], inputs[1].mT.contiguous(), inputs[2])
        testing.check_op(step2_attention, "linear", inputs, {"rung": rung, "transposed": transposed})


@every_backward_rung
def test_its_gradient_is_registered_as_torch_wants_it(device, rung):
    dtype = torch.bfloat16 if rung in TENSOR_CORES else torch.float32
    inputs = backward_inputs_of((2, 4), 8, 16, dtype, device)
    testing.check_op(step2_attention, "linear_backward", inputs, {"rung": rung})


@on_each_device
@either_way
def test_gradients_are_those_of_finite_differences(transposed, device):
    inputs = [t.requires_grad_() for t in inputs_of((2, 3), 4, 5, torch.float64, device, transposed=transposed)]
    function = lambda *a: step2_attention.linear(*a, transposed=transposed)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradcheck(function, inputs[:2])
    assert torch.autograd.gradgradcheck(function, inputs)
    testing.check_each_input_alone(function, tuple(inputs))


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_second_gradients_are_as_exact_as_the_dtype_allows(dtype, device):
    testing.check_second_gradients(step2_attention.linear, linear_of, inputs_of(6, 8, 16, dtype, device), None)


@on_each_device
def test_forward_mode_is_refused(device):
    testing.check_tangents_are_refused(step2_attention.linear, inputs_of(3, 4, 5, torch.float32, device))
    testing.check_tangents_are_refused(
        step2_attention.linear_backward, backward_inputs_of(3, 4, 5, torch.float32, device)
    )


@on_each_device
def test_autocast_makes_it_autocasts_dtype(device):
    inputs = [t.requires_grad_() for t in inputs_of(6, 8, 16, torch.float32, device)]
    with torch.autocast(device, dtype=torch.bfloat16):
        y = step2_attention.linear(*inputs)
        same = step2_attention.linear(*(t.bfloat16() for t in inputs))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, same)
    grads = torch.autograd.grad(y.float().square().sum(), inputs)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)
    square = inputs_of(6, 8, 8, torch.float32, device)  # so that the wrong way round has the right shape
    with torch.autocast(device, dtype=torch.bfloat16):
        y = step2_attention.linear(*square, transposed=True)
    assert torch.equal(y, step2_attention.linear(*(t.bfloat16() for t in square), transposed=True))


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_forward_and_backward_in_a_cuda_graph(device):
    variables = [t.requires_grad_() for t in inputs_of(256, 768, 2304, torch.bfloat16, device)]
    grad = testing.randn((256, 2304), torch.bfloat16, device, seed=5)
    testing.check_gradients_in_a_cuda_graph(step2_attention.linear, variables, grad)


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
@pytest.mark.parametrize("behind", ["v7_persistent", "v8_cluster", "v9_split", "v13_dependent", "attention"])
def test_a_launch_that_may_begin_early_waits_for_what_it_reads(behind, device):
    x, weight, _ = inputs_of(128, 768, 768, torch.bfloat16, device)
    if not can_do("v13_dependent", device, 128, 768, 768, torch.bfloat16, False):
        pytest.skip("no rung in front lets the next launch begin on this GPU")

    def linear(y, rung="v13_dependent"):
        return step2_attention.linear(y, weight, rung=rung)

    def attention(y):
        heads = y.view(2, 64, 12, 64).transpose(1, 2)
        return step2_attention.attention(heads, heads, heads, rung="v9_split")

    testing.check_dependent_launch(linear, attention if behind == "attention" else lambda y: linear(y, behind), x)


@pytest.mark.parametrize("op", ["linear", "linear_backward"])
def test_auto_is_read_off_the_results(op):
    testing.check_automatic(step2_attention, op, lambda shape: shape)


# ---- what a rung refuses ----


@on_each_device
def test_a_rung_refuses_what_it_says(device):
    """By name, with what it takes instead and which can; nothing is computed."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rungs for Hopper refuse any other GPU first")

    def refused(text, rung, shape, dtype, transposed=False):
        inputs = inputs_of(*shape, dtype, device, transposed=transposed)
        with testing.raises(ValueError, f"linear: rung '{rung}' {text}"):
            step2_attention.linear(*inputs, transposed=transposed, rung=rung)

    for rung in ("v6_wgmma", "v7_persistent", "v8_cluster", "v9_split", "v10_rows", "v13_dependent"):
        refused("takes float16 or bfloat16", rung, (8, 8, 8), torch.float32)
    for rung in ("v5_mma", "v6_wgmma", "v7_persistent", "v8_cluster", "v9_split", "v10_rows", "v13_dependent"):
        refused("takes a depth that is a multiple of 8, got 12", rung, (8, 12, 8), torch.bfloat16)
        refused("takes a width that is a multiple of 8, got 12", rung, (8, 8, 12), torch.bfloat16)
        refused("takes a depth that is a multiple of 8, got 12", rung, (8, 12, 8), torch.bfloat16, True)
        if rung != "v5_mma":
            step2_attention.linear(
                *inputs_of(8, 8, 12, torch.bfloat16, device, transposed=True), transposed=True, rung=rung
            )
    refused("takes rows ≤ 4, got 5", "v11_gemv", (5, 8, 8), torch.float32)
    if device == "cpu":
        refused("is NVIDIA's library and runs on GPUs only", "v12_cublaslt", (8, 8, 8), torch.float32)


@every_dtype
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    """Sizes alone decide, so no memory is needed."""

    def choose(rung, **sizes):
        return step2_attention._C.choose("linear", rung, {"rows": 8, "depth": 8, "width": 8} | sizes, dtype)

    for rung, most_rows, most_width in (
        ("v1_naive", 8 * 65535, 32 * MOST),
        ("v2_tiled", 32 * 65535, 32 * MOST),
        ("v3_registers", 128 * 65535, 128 * MOST),
        ("v4_vector", 128 * 65535, 128 * MOST),
    ):
        assert choose(rung, rows=most_rows, width=most_width) == rung
        with testing.raises(ValueError, f"rung '{rung}' takes rows ≤ {most_rows}, got {most_rows + 1}"):
            choose(rung, rows=most_rows + 1)
        with testing.raises(ValueError, f"rung '{rung}' takes width ≤ {most_width}, got {most_width + 1}"):
            choose(rung, width=most_width + 1)
    if dtype in HALF_TYPES:
        assert choose("v13_dependent", depth=6144) == "v13_dependent"
        with testing.raises(ValueError, "rung 'v13_dependent' takes a depth ≤ 6144, got 6152"):
            choose("v13_dependent", depth=6152)
        most = 1 << 30
        for rung in ("v6_wgmma", "v7_persistent", "v8_cluster", "v9_split"):
            for name in ("rows", "depth", "width"):
                with testing.raises(ValueError, f"rung '{rung}' takes rows, depth and width below 2³⁰"):
                    choose(rung, **{name: most + 8})


# ---- bad input ----


@on_each_device
def test_outputs_that_share_memory_with_anything_are_refused(device):
    testing.check_apart(step2_attention, "linear", inputs_of(6, 8, 16, torch.float32, device))
    testing.check_apart(step2_attention, "linear_backward", backward_inputs_of(6, 8, 16, torch.float32, device))


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_bad_arguments_are_refused(device):
    x, weight, bias = torch.ones(2, 3, device=device), torch.ones(3, 4, device=device), torch.ones(4, device=device)
    good = {"x": x, "weight": weight, "bias": bias}
    for exception, text, changed in (
        (TypeError, "`x` must be float32, float16, bfloat16 or float64, got int64", {"x": x.long()}),
        (ValueError, "the last dimension of `x` must not be 0, got shape (2, 0)", {"x": x[:, :0]}),
        (TypeError, "`weight` must have the dtype of `x` (float32), got float16", {"weight": weight.half()}),
        (ValueError, "`weight` must have 2 dimensions, got 1 (shape (4,))", {"weight": weight[0]}),
        (ValueError, "`weight` must have shape (3, 4), got (2, 4)", {"weight": weight[:2]}),
        (ValueError, "`weight` must have shape (4, 3), got (4, 2)", {"weight": weight.mT[:, :2], "transposed": True}),
        (ValueError, "`weight` must not be empty, got shape (3, 0)", {"weight": weight[:, :0], "bias": None}),
        (ValueError, "`bias` must have shape (4,), got (3,)", {"bias": bias[:3]}),
        (TypeError, "`bias` must have the dtype of `x` (float32), got float64", {"bias": bias.double()}),
    ):
        with testing.raises(exception, f"linear: {text}"):
            step2_attention.linear(**(good | changed))
    other = torch.ones(4, device="meta" if device != "meta" else "cpu")
    with testing.raises(ValueError, "linear: `bias` must be on the device of `x`"):
        step2_attention.linear(**(good | {"bias": other}))
    grad = torch.ones(2, 4, device=device)
    good = {"grad": grad, "x": x, "weight": weight}
    for exception, text, changed in (
        (TypeError, "`grad` must be float32, float16, bfloat16 or float64, got int64", {"grad": grad.long()}),
        (TypeError, "`x` must have the dtype of `grad` (float32), got float16", {"x": x.half()}),
        (
            ValueError,
            "`x` must have the shape of `grad` but for the last dimension, got (1, 3) and (2, 4)",
            {"x": x[:1]},
        ),
        (ValueError, "the last dimension of `x` must not be 0, got shape (2, 0)", {"x": x[:, :0]}),
        (ValueError, "`weight` must have shape (3, 4), got (2, 4)", {"weight": weight[:2]}),
    ):
        with testing.raises(exception, f"linear_backward: {text}"):
            step2_attention.linear_backward(**(good | changed))


@on_each_device
def test_an_unknown_rung_is_refused(device):
    for rows in (3, 0):
        inputs = inputs_of(rows, 8, 16, torch.float32, device)
        with testing.raises(ValueError, "linear: `rung` must be 'auto' or one of", "got 'v99'"):
            step2_attention.linear(*inputs, rung="v99")
        with testing.raises(ValueError, "linear_backward: `rung` must be 'auto' or one of", "got 'v99'"):
            step2_attention.linear_backward(*backward_inputs_of(rows, 8, 16, torch.float32, device), rung="v99")


if __name__ == "__main__":
    testing.main(__file__)
