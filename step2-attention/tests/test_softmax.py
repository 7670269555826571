"""Softmax and its gradient, on every device there is: against float64, eager PyTorch and the rung before.

python tests/test_softmax.py            pytest's options may follow, such as -k v4_registers or -k softmax_backward
"""

import itertools

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import poisoned_allocations
from step2_attention.testing import (
    INFINITY,
    NAN,
    SQUARES,
    every_dtype,
    every_rung_of,
    float_and_half,
    half_types,
    hidden_of_square,
    needs_touched_pages,
    of_the_op,
    on_each_device,
    ops,
    softmax_gradient_of,
    softmax_of,
    touched_pages,
    untouched_square,
    with_and_without_mask,
)

# What differs between the two. Inputs: of softmax the scores, of its gradient a gradient and what softmax gave.
FORMULAS = {"softmax": softmax_of, "softmax_backward": softmax_gradient_of}
INPUTS = {"softmax": 1, "softmax_backward": 2}
AUTO = {  # for wider and wider rows
    "softmax": ("v4_registers", "v6_cluster_registers", "v5_cluster", "v3_online"),
    "softmax_backward": ("v3_registers", "v4_cluster", "v2_block"),
}
MOST_BYTES = {  # of a row
    "softmax": {"v4_registers": 1 << 16, "v5_cluster": 7 << 19, "v6_cluster_registers": 1 << 19},
    "softmax_backward": {"v3_registers": 1 << 16, "v4_cluster": 7 << 18},
}
# Thousands of additions one after the other are not as exact as PyTorch's, and v1 is what v2 is compared with.
MOST_EXACT_COLUMNS = {
    "softmax": {"v1_naive": 2000, "v2_block": 20000},
    "softmax_backward": {"v1_naive": 2000, "v2_block": 5000},
}


def can_do(op, rung, width, dtype):
    return width * dtype.itemsize <= MOST_BYTES[op].get(rung, 1 << 62)


def is_exact(op, rung, width):
    return width <= MOST_EXACT_COLUMNS[op].get(rung, width)


def inputs_of(op, shape, dtype, device, causal=False):
    """Hidden columns hold NaN."""
    x, grad = (testing.randn(shape, torch.float64, "cpu", seed=seed) for seed in range(2))
    if op == "softmax":
        inputs = [2.5 * x + 0.5 * testing.staircase(shape[-1], "cpu")]
    else:
        inputs = [grad, softmax_of(3.0 * x, causal=causal)]
    if causal:
        inputs = [t.masked_fill(hidden_of_square(t), NAN) for t in inputs]
    return tuple(t.to(device, dtype) for t in inputs)


def randn(op, shape, dtype, device, first_seed=0):
    """Inputs near 0, in hidden columns too; of the gradient, `y` need be no softmax."""
    return tuple(testing.randn(shape, dtype, device, seed=first_seed + i) for i in range(INPUTS[op]))


def with_options(op, **options):
    return lambda *inputs: getattr(step2_attention, op)(*inputs, **options)


def check(op, inputs, rung, scale=None, causal=False, **options):
    options |= {"reference": FORMULAS[op], "eager": FORMULAS[op], "kwargs": {"scale": scale, "causal": causal}}
    testing.check_contract(step2_attention, op, inputs, rung, **options)


every_op = pytest.mark.parametrize("op", FORMULAS)
every_softmax, every_backward = (every_rung_of(op) for op in FORMULAS)
every_rung = pytest.mark.parametrize(
    ("op", "device", "rung"),
    [
        pytest.param(op, *p.values, marks=p.marks, id=f"{op}-{p.id}")
        for op in FORMULAS
        for p in testing.device_rungs("step2_attention", op)
    ],
)


# ---- the contract of correctness ----


@every_rung
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 127, 129, 257, 760, 768, 1023, 1025, 1600])
def test_rows_of_any_width(width, dtype, op, device, rung):
    check(op, inputs_of(op, (5, width), dtype, device), rung)


@every_rung
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (257, 3)], ids=str)
def test_rows_of_any_shape(shape, op, device, rung):
    check(op, inputs_of(op, shape, torch.float32, device), rung)


@testing.where(lambda width, dtype, op, rung: can_do(op, rung, width, dtype) and is_exact(op, rung, width))
@every_rung
@float_and_half
@pytest.mark.parametrize(
    "width", [384, 640, 768, 896, 1280, 1536, 1600, 1792, 2040, 2048, 2049, 4095, 4097, 8200, 16384, 32765, 32768]
)
def test_rows_shared_by_more_and_more_threads(width, dtype, op, device, rung):
    check(op, inputs_of(op, (2, width), dtype, device), rung, layouts=dtype == torch.float32)


@testing.where(lambda width, dtype, op, rung: can_do(op, rung, width, dtype) and is_exact(op, rung, width))
@every_rung
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (10240, torch.float32),
        (24583, torch.bfloat16),
        (28679, torch.bfloat16),
        (50257, torch.bfloat16),
        (65539, torch.float32),
        (65539, torch.bfloat16),
        (131072, torch.bfloat16),
        (131073, torch.float16),
        (131072, torch.float32),  # 16 blocks of 32 KB
        (262144, torch.float32),  # more than 16 blocks of 32 KB
        (70001, torch.float64),
    ],
    ids=str,
)
@with_and_without_mask
def test_rows_as_wide_as_vocabularies(causal, width, dtype, op, device, rung):
    inputs = inputs_of(op, (2, width), dtype, device, causal)
    check(op, inputs, rung, -0.5 if causal else None, causal, layouts=False)


@testing.where(lambda width, op, rung: is_exact(op, rung, width))
@every_rung
@float_and_half
@pytest.mark.parametrize("scale", [0.0, -1.3, 0.125, 9.0])
@pytest.mark.parametrize("width", [1, 33, 1023, 4097])
def test_scale_multiplies_scores_or_their_gradient(width, scale, dtype, op, device, rung):
    check(op, randn(op, (3, width), dtype, device), rung, scale, layouts=False)


@every_rung
@every_dtype
@pytest.mark.parametrize("shape", SQUARES, ids=str)
def test_a_row_of_a_causal_square_sees_up_to_its_own_column(shape, dtype, op, device, rung):
    check(op, inputs_of(op, shape, dtype, device, causal=True), rung, 0.7, causal=True, layouts=len(shape) == 3)


@testing.where(lambda shape, dtype, op, rung: can_do(op, rung, shape[-1], dtype))
@every_rung
@float_and_half
@pytest.mark.parametrize("shape", [(2, 9, 9), (2, 70, 64), (1, 40, 532), (1, 3, 4099), (1, 24, 50257)], ids=str)
def test_what_is_hidden_has_no_influence_and_is_0(shape, dtype, op, device, rung):
    """Whatever it holds; and it is 0 where what is seen is NaN, or has no maximum, as well."""
    inputs = inputs_of(op, shape, dtype, device, causal=True)
    hidden = hidden_of_square(inputs[0]).expand(shape)
    function = with_options(op, causal=True, rung=rung)
    clean = function(*inputs)
    assert not clean.isnan().any()
    for anything in (0.0, INFINITY, -INFINITY):
        with poisoned_allocations():
            again = function(*(t.masked_fill(hidden, anything) for t in inputs))
        assert torch.equal(again, clean)
    for spoiled in range(len(inputs)):
        values = [t.clone() for t in inputs]
        values[spoiled][..., 0] = NAN  # every row that sees anything sees it
        got = function(*values)
        assert got[hidden].eq(0).all()
        assert got[~hidden].isnan().all()
    if op == "softmax":
        nothing = function(torch.full_like(inputs[0], -INFINITY))
        assert nothing[hidden].eq(0).all()
        assert nothing[~hidden].isnan().all()


@needs_touched_pages
@testing.where(lambda device: device == "cpu")
@every_rung
def test_what_is_hidden_is_not_even_read(op, device, rung):
    """Memory that nobody has touched, not even for reading, has no page yet. A row has two of them."""
    for index in range(INPUTS[op]):
        untouched = untouched_square()
        width = len(untouched)
        inputs = [torch.ones(width, width, dtype=torch.float64) for _ in range(INPUTS[op])]
        inputs[index] = untouched
        got = with_options(op, causal=True, rung=rung)(*inputs)
        touched = touched_pages(untouched)
        assert touched[:, 0].all()
        assert touched[:, 1].nonzero().flatten().tolist() == list(range(width // 2, width))
        torch.testing.assert_close(got, FORMULAS[op](*inputs, causal=True))


@testing.where(lambda firsts, op: len(firsts) == INPUTS[op] + 1)
@testing.where(lambda shape, dtype, op, rung: can_do(op, rung, shape[-1], dtype))
@every_rung
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("shape", [(3, 301), (1, 10301)], ids=str)
@pytest.mark.parametrize(
    "firsts",
    [(0, 1), (1, 0), (3, 3), (1, 2), (0, 0, 1), (0, 1, 0), (1, 0, 0), (3, 3, 3), (1, 2, 3), (2, 1, 1)],
    ids=str,
)
def test_inputs_and_the_result_may_begin_anywhere(firsts, shape, causal, dtype, op, device, rung):
    """Where they begin equally far from a multiple of 16 bytes they go in vectors, otherwise not."""
    count = shape[0] * shape[1]
    wholes = [torch.full((count + 8,), NAN, dtype=dtype, device=device) for _ in firsts]
    *inputs, out = (whole[first : first + count].view(shape) for whole, first in zip(wholes, firsts, strict=True))
    for to, value in zip(inputs, inputs_of(op, shape, dtype, device, causal), strict=True):
        to.copy_(value)
    getattr(ops, op).out(*inputs, scale=0.5, causal=causal, rung=rung, out=out)
    exact = FORMULAS[op](*(t.double() for t in inputs), 0.5, causal)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert wholes[-1][: firsts[-1]].isnan().all()
    assert wholes[-1][firsts[-1] + count :].isnan().all()


@testing.where(lambda shape, op, rung: is_exact(op, rung, shape[-1]))
@every_rung
@float_and_half
@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 8200)], ids=str)
def test_each_tensor_is_found_wherever_it_lies(shape, dtype, op, device, rung):
    check(op, inputs_of(op, shape, dtype, device), rung, alone=True, layouts=False)


@every_op
@on_each_device
@every_dtype
@with_and_without_mask
def test_auto_does_gpt2_sized_rows(causal, dtype, device, op):
    for shape in ((256, 1024), (2, 50257)):
        check(op, inputs_of(op, shape, dtype, device, causal), "auto", causal=causal, layouts=False)


@every_op
@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, op, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step2_attention.rungs(op, "cpu"):
        for width in (760, 97, 9001):
            if is_exact(op, rung, width):
                inputs = inputs_of(op, (3, width), torch.float32, "cpu", causal=width == 97)
                check(op, inputs, rung, causal=width == 97)


# ---- inputs that are unusual, and right ----


@every_rung
@pytest.mark.parametrize("width", [4, 5, 300])
def test_a_row_with_nan_or_infinities_is_nan_as_in_pytorch_and_the_others_are_not(width, op, device, rung):
    for place in (0, width // 2, -1):
        inputs = inputs_of(op, (6, width), torch.float32, device)
        first, last = inputs[0], inputs[-1]
        first[1], first[2, place], last[3, place], first[4, place] = -INFINITY, NAN, NAN, INFINITY
        got = with_options(op, rung=rung)(*inputs)
        assert got.isnan().any(-1).tolist() == [False, True, True, True, True, False]
        assert got[1:4].isnan().all()
        assert torch.equal(got.isnan(), FORMULAS[op](*inputs).isnan())


@every_rung
@with_and_without_mask
@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 3), (2, 0, 3)], ids=str)
def test_empty_tensors(shape, causal, op, device, rung):
    inputs = [torch.empty(shape, device=device, requires_grad=True) for _ in range(INPUTS[op])]
    out = with_options(op, causal=causal, rung=rung)(*inputs)
    assert out.shape == shape
    out.sum().backward()
    assert all(t.grad.shape == shape for t in inputs)


@testing.where(lambda rung: rung != "cpu")
@every_rung
@pytest.mark.parametrize("width", [1024, 1021])
def test_more_than_2_to_32_elements(width, op, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "4")  # two rows of clusters of two
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    rows = (1 << 22) + (1 << 15)
    *inputs, out = (
        testing.lazy_memory(rows * width, torch.bfloat16, device).view(rows, width) for _ in range(INPUTS[op] + 1)
    )
    for to, value in zip(inputs, inputs_of(op, (2, width), torch.bfloat16, device), strict=True):
        to[-2:] = value
    getattr(ops, op).out(*inputs, rung=rung, out=out)
    exact = FORMULAS[op](*(t[-2:].double() for t in inputs))
    torch.testing.assert_close(out[-2:].double(), exact, rtol=1e-2, atol=1e-6)


def choose(op, rung, dtype, **sizes):
    """Sizes alone decide, so no memory is needed."""
    return step2_attention._C.choose(op, rung, sizes, dtype)


MOST = (1 << 31) - 1


@every_op
@every_dtype
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype, op):
    for rung in step2_attention.rungs(op, "cpu"):
        if rung not in ("cpu", "v1_naive", "v6_cluster_registers"):  # v6 has two blocks a row and more
            assert choose(op, rung, dtype, rows=MOST) == rung
            with testing.raises(ValueError, f"{op}: rung '{rung}' takes at most {MOST} ", "can: 'v1_naive'"):
                choose(op, rung, dtype, rows=MOST + 1)
    assert choose(op, "auto", dtype, rows=MOST) == AUTO[op][0]
    assert choose(op, "auto", dtype, rows=MOST + 1) == "v1_naive"
    of_16_bytes = 16 // dtype.itemsize
    last = (1 << 15) // dtype.itemsize
    for rung, wider in itertools.pairwise(AUTO[op]):
        assert choose(op, "auto", dtype, width=last) == rung
        assert choose(op, "auto", dtype, width=last + 1) == wider
        last = MOST_BYTES[op].get(wider, 0) // dtype.itemsize + of_16_bytes - 1
    assert choose(op, "auto", dtype, width=1 << 40) == AUTO[op][-1]
    for rung, most_bytes in MOST_BYTES[op].items():
        width = most_bytes // dtype.itemsize
        assert choose(op, rung, dtype, width=width) == rung
        takes = f"{op}: rung '{rung}' takes rows of at most {most_bytes // 16} vectors of 16 bytes, got width"
        for wider in (width + of_16_bytes, 1 << 40):
            with testing.raises(ValueError, f"{takes} {wider}", f"'{AUTO[op][-1]}'"):
                choose(op, rung, dtype, width=wider)


@every_dtype
@pytest.mark.parametrize(
    ("op", "rung", "width", "blocks"),  # in half types, float32 and float64
    [
        ("softmax", "v5_cluster", 50257, (4, 8, 16)),
        ("softmax", "v5_cluster", 8, (1, 1, 1)),
        ("softmax", "v6_cluster_registers", 50257, (5, 7, 13)),
        ("softmax", "v6_cluster_registers", 65536, (4, 8, 16)),
        ("softmax", "v6_cluster_registers", 8, (2, 2, 2)),
        ("softmax_backward", "v4_cluster", 50257, (8, 16, 16)),
        ("softmax_backward", "v4_cluster", 8, (1, 1, 1)),
    ],
)
def test_rows_of_more_blocks_than_a_grid_has_are_refused(op, rung, width, blocks, dtype):
    of_a_row = dict(zip((2, 4, 8), blocks, strict=True))[dtype.itemsize]
    rows = MOST // of_a_row
    assert choose(op, rung, dtype, width=width, rows=rows) == rung
    with testing.raises(ValueError, f"takes at most {MOST} blocks, got {rows + 1} rows of {of_a_row}"):
        choose(op, rung, dtype, width=width, rows=rows + 1)


# ---- gradients ----


@every_rung
@pytest.mark.parametrize(
    ("shape", "scale", "causal"),
    [((2, 3, 5), None, False), ((2, 3, 5), -0.7, True), ((4, 4), None, True), ((5, 3), 0.0, True), ((7,), 1.3, False)],
    ids=str,
)
def test_gradients_and_their_gradients(shape, scale, causal, op, device, rung):
    inputs = [t.requires_grad_() for t in randn(op, shape, torch.float64, device)]
    function = with_options(op, scale=scale, causal=causal, rung=rung)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@every_op
@on_each_device
@float_and_half
def test_what_is_hidden_has_no_gradient_and_takes_none(dtype, device, op):
    """Neither NaN in a hidden column nor NaN as its gradient comes through."""
    inputs = [t.requires_grad_() for t in inputs_of(op, (2, 6, 4), dtype, device, causal=True)]
    hidden = hidden_of_square(inputs[0]).expand(inputs[0].shape)
    grad = testing.randn(hidden.shape, dtype, device, seed=2)
    out = with_options(op, scale=0.7, causal=True)(*inputs)
    got = torch.autograd.grad(out, inputs, grad.masked_fill(hidden, NAN))
    exact = [t.detach().double().masked_fill(hidden, 0).requires_grad_() for t in inputs]
    expected = torch.autograd.grad(FORMULAS[op](*exact, 0.7, True), exact, grad.double().masked_fill(hidden, 0))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine[hidden].eq(0).all()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-2, atol=torch.finfo(dtype).eps)


@every_op
@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_second_gradients_are_as_exact_as_the_dtype_allows(dtype, device, op):
    first_seed = {"softmax": 0, "softmax_backward": 2}[op]  # such that a second gradient computed in a half type shows
    function, inputs = with_options(op, scale=0.7, causal=True), randn(op, (4, 9), dtype, device, first_seed)
    testing.check_second_gradients(function, lambda *inputs: FORMULAS[op](*inputs, 0.7, True), inputs)
    testing.check_each_input_alone(function, inputs)


@on_each_device
@every_dtype
@with_and_without_mask
def test_the_gradient_of_softmax_is_softmax_backward(causal, dtype, device):
    """By "auto", whatever rung softmax ran by."""
    x = testing.randn((6, 6), dtype, device).requires_grad_()
    grad = testing.randn((6, 6), dtype, device, seed=1)
    y = step2_attention.softmax(x, scale=0.7, causal=causal, rung=step2_attention.rungs("softmax", device)[-1])
    before = step2_attention.launch_counts()
    (got,) = torch.autograd.grad(y, x, grad)
    after = step2_attention.launch_counts()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {
        "gpu" if device == "cuda" else "cpu": 1
    }
    assert torch.equal(got, step2_attention.softmax_backward(grad, y.detach(), scale=0.7, causal=causal))


# ---- as torch sees them ----


@of_the_op()
@every_rung
def test_the_op_is_registered_as_torch_wants_it(op, device, rung):
    inputs, squares = (inputs_of(op, (4, 6), torch.float32, device, causal) for causal in (False, True))
    testing.check_op(step2_attention, op, inputs, {"rung": rung})
    testing.check_op(step2_attention, op, tuple(testing.transposed(t.bfloat16()) for t in inputs), {"rung": rung})
    testing.check_op(step2_attention, op, squares, {"scale": -0.3, "causal": True, "rung": rung})


# ---- softmax alone ----


@every_softmax
@every_dtype
def test_softmax_at_the_ends_of_the_range(dtype, device, rung):
    largest = torch.finfo(dtype).max
    rows = [
        [1e4, -1e4, 1e4, 0.0],
        [largest, largest, -largest, 0.0],
        [-largest, -largest, -largest, -largest],
        [-1e4, -1e4 - 8, -INFINITY, -INFINITY],
        [-INFINITY, -INFINITY, -INFINITY, 5.0],
    ]
    x = torch.tensor(rows, dtype=dtype, device=device)
    got = step2_attention.softmax(x, rung=rung)
    torch.testing.assert_close(got.double(), torch.softmax(x.double(), -1), rtol=0, atol=torch.finfo(dtype).eps)
    assert got[2].tolist() == [0.25] * 4
    assert got[4].tolist() == [0, 0, 0, 1]


@every_softmax
@pytest.mark.parametrize("width", [1030, 65539])
@testing.where(lambda width, rung: can_do("softmax", rung, width, torch.float32))
def test_softmax_finds_a_maximum_wherever_it_is(width, device, rung):
    """A running maximum that starts at 0, or a reduction that forgets a lane, a warp or a block, shows on rows that are
    far below 0."""
    places = [0, 1, 31, 32, 255, 256, 1023, 1024, width * 3 // 10, width * 6 // 10, width - 1]
    x = torch.full((len(places), width), -400.0, device=device)
    x[range(len(places)), places] = -200.0  # exp(−200) is 0 in float32, and exp(200) infinite
    y = step2_attention.softmax(x, rung=rung)
    assert y[range(len(places)), places].eq(1).all()
    assert y.sum(-1).eq(1).all()


@every_softmax
@every_dtype
def test_softmax_far_below_its_maximum_is_right_to_its_own_digits(dtype, device, rung):
    x = testing.randn((16, 257), dtype, device, scale=9.0)  # weights down to e^-50
    check("softmax", (x,), rung, layouts=False)
    exact = torch.softmax(x.double(), -1)
    info = torch.finfo(dtype)
    off = (step2_attention.softmax(x, rung=rung).double() - exact).abs()
    digits = max(info.eps, 1e-13 if dtype == torch.float64 else 1e-5)
    assert (off <= digits * exact + info.smallest_normal).all()


@every_softmax
@every_dtype
@pytest.mark.parametrize("scale", [-1.0, 1e4, 1e8])
def test_scaled_scores_at_the_ends_of_the_range(scale, dtype, device, rung):
    """Where they leave float32 they are infinite, as PyTorch's are; where not, the greatest has all the weight."""
    x = testing.randn((4, 300), dtype, device, scale=100.0)
    got, exact = step2_attention.softmax(x, scale=scale, rung=rung).double(), torch.softmax(scale * x.double(), -1)
    torch.testing.assert_close(got, exact, rtol=0, atol=torch.finfo(dtype).eps)
    x[1, 7], x[2, 7], x[3] = INFINITY, -INFINITY, -INFINITY
    got = step2_attention.softmax(x, scale=scale, rung=rung)
    assert torch.equal(got.isnan(), torch.softmax(scale * x.double(), -1).isnan())


@on_each_device
@half_types
def test_autocast_passes_scale_and_mask_on(dtype, device):
    x = testing.randn((5, 5), dtype, device)
    with torch.autocast(device, dtype):
        got = step2_attention.softmax(x, scale=-2.0, causal=True)
    assert torch.equal(got, step2_attention.softmax(x.float(), scale=-2.0, causal=True))


@on_each_device
@pytest.mark.parametrize("written", ["itself", "a view of it", "what it is a view of"])
def test_no_gradient_goes_through_a_value_that_was_written_over(written, device):
    """With that value gone autograd would take what the op wrote, and give a wrong gradient."""
    weight = torch.randn(2, 8, device=device, requires_grad=True)
    base = torch.ones(3, 2, 8, device=device)
    value, out = {
        "itself": (base[1], base[1]),
        "a view of it": (base[1], base[1, 1]),
        "what it is a view of": (base[1], base),
    }[written]
    loss = (weight * value).sum()
    ops.softmax.out(torch.randn(out.shape, device=device), out=out)
    with testing.raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()


# ---- its gradient alone ----


@every_backward
@every_dtype
def test_gradients_at_the_ends_of_the_range(dtype, device, rung):
    info = torch.finfo(dtype)
    large, small = info.max / 4, info.smallest_normal
    grad = [[large, -large, large, 0.0], [large] * 4, [small, -small, 0.0, small], [large, 1.0, -3.0, 0.0]]
    y = [[0.25, 0.25, 0.5, 0.0], [0.25] * 4, [0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]]
    grad, y = (torch.tensor(rows, dtype=dtype, device=device) for rows in (grad, y))
    got = step2_attention.softmax_backward(grad, y, rung=rung)
    exact = softmax_gradient_of(grad.double(), y.double())
    torch.testing.assert_close(got.double(), exact, rtol=info.eps, atol=info.tiny)
    assert got[1].tolist() == [0] * 4  # the same gradient everywhere moves nothing: the weights add up to 1
    assert got[3].tolist() == [0] * 4  # nor does any where one weight is 1


@every_backward
def test_every_column_counts_in_the_sum(device, rung):
    """A reduction that forgets a lane, or a cut that forgets an end, shows where a single product is not 0."""
    width = 1030
    for place in (0, 1, 31, 32, 255, 256, 1023, 1024, width - 1):
        grad, y = torch.zeros(1, width, device=device), torch.full((1, width), 0.5, device=device)
        grad[0, place] = 8.0
        expected = torch.full_like(y, -2.0)
        expected[0, place] = 2.0
        assert torch.equal(step2_attention.softmax_backward(grad, y, rung=rung), expected)


@on_each_device
@half_types
def test_autocast_leaves_the_dtype(dtype, device):
    """Gradients come in the dtype that softmax gave; a backward inside a region computes the same as outside."""
    for of in (dtype, torch.float32):
        grad, y = inputs_of("softmax_backward", (5, 5), of, device)
        outside = step2_attention.softmax_backward(grad, y, scale=-2.0, causal=True)
        with torch.autocast(device, dtype):
            assert torch.equal(step2_attention.softmax_backward(grad, y, scale=-2.0, causal=True), outside)
    x = testing.randn((5, 5), dtype, device).requires_grad_()
    with torch.autocast(device, dtype):
        y = step2_attention.softmax(x, scale=-2.0)
        (inside,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    assert inside.dtype == dtype
    assert torch.equal(inside, torch.autograd.grad(y, x, grad)[0])


# ---- bad input ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_what_is_refused(device):
    x = torch.ones(2, 3, device=device)
    other = x.cpu() if device == "cuda" else torch.ones(2, 3, device="meta" if device == "cpu" else "cpu")
    dtypes, two = "must be float32, float16, bfloat16 or float64, got int64", "must have at least 2 dimensions where"
    for error, text, inputs, causal in (
        (TypeError, f"softmax: `x` {dtypes}", [x.long()], False),
        (ValueError, "softmax: `x` must have at least 1 dimension, got 0 (shape ())", [x[0, 0]], False),
        (ValueError, "softmax: the last dimension of `x` must not be 0, got shape (2, 0)", [x[:, :0]], False),
        (ValueError, f"softmax: `x` {two} `causal` is set, got 1 (shape (3,))", [x[0]], True),
        (TypeError, f"`grad` {dtypes}", [x.long(), x], False),
        (TypeError, "`y` must have the dtype of `grad` (float32), got float16", [x, x.half()], False),
        (ValueError, "`grad` must have at least 1 dimension, got 0 (shape ())", [x[0, 0], x[0, 0]], False),
        (ValueError, "the last dimension of `grad` must not be 0, got shape (2, 0)", [x[:, :0], x[:, :0]], False),
        (ValueError, "`y` must have shape (2, 3), got (3,)", [x, x[0]], False),
        (ValueError, f"{two} `causal` is set, got 1 (shape (3,))", [x[0], x[0]], True),
        (ValueError, "`y` must be on the device of `grad`", [x, other], False),
    ):
        op = "softmax" if len(inputs) == 1 else "softmax_backward"
        with testing.raises(error, f"{op}: ", text):
            with_options(op, causal=causal)(*inputs)


@on_each_device
def test_an_output_of_the_gradient_that_shares_memory_is_refused(device):
    inputs = inputs_of("softmax_backward", (4, 12), torch.float32, device)
    testing.check_apart(step2_attention, "softmax_backward", inputs)


if __name__ == "__main__":
    testing.main(__file__)
