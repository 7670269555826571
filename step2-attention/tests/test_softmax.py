"""Softmax, on every device there is: against float64, eager PyTorch and the rung before.

python tests/test_softmax.py            pytest's options may follow, such as -k v4_registers
"""

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import poisoned_allocations
from step2_attention.testing import SQUARES, hidden_of_square, needs_touched_pages, touched_pages, untouched_square

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
NAN = float("nan")

ops = torch.ops.step2_attention


def softmax_of(x, scale=None, causal=False):
    """The formula, composed of PyTorch's operations. What is hidden is 0."""
    scores = x if scale is None else scale * x
    if not causal:
        return torch.softmax(scores, -1)
    hidden = hidden_of_square(x)
    return torch.softmax(scores.masked_fill(hidden, -INFINITY), -1).masked_fill(hidden, 0)


def can_do(rung, width, dtype):
    return width * dtype.itemsize <= {"v4_registers": 1 << 16, "v6_cluster_registers": 1 << 19}.get(rung, 1 << 62)


def is_exact(rung, width):
    """Thousands of additions one after the other are not as exact as PyTorch's; nor are a hundred."""
    return width <= {"v1_naive": 2000, "v2_block": 20000}.get(rung, width)


def scores(shape, dtype, device):
    return (testing.randn(shape, torch.float64, device, scale=2.5) + 0.5 * testing.staircase(shape[-1], device)).to(
        dtype
    )


def check_softmax(x, rung, scale=None, causal=False, **options):
    return testing.check_contract(
        step2_attention,
        "softmax",
        (x,),
        rung,
        reference=softmax_of,
        eager=softmax_of,
        kwargs={"scale": scale, "causal": causal},
        **options,
    )


every_softmax = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step2_attention", "softmax"))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
float_and_half = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


# ---- the contract of correctness ----


@every_softmax
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 127, 129, 760, 768, 1023, 1600])
def test_softmax_of_any_width(width, dtype, device, rung):
    check_softmax(scores((5, width), dtype, device), rung)


@every_softmax
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (257, 3)], ids=str)
def test_softmax_of_any_shape(shape, device, rung):
    check_softmax(testing.randn(shape, torch.float32, device), rung)


@testing.where(lambda width, dtype, rung: can_do(rung, width, dtype) and is_exact(rung, width))
@every_softmax
@float_and_half
@pytest.mark.parametrize(
    "width", [384, 640, 768, 896, 1280, 1536, 1792, 2040, 2048, 2049, 4095, 4097, 8200, 16384, 32765, 32768]
)
def test_softmax_of_rows_shared_by_more_and_more_threads(width, dtype, device, rung):
    check_softmax(scores((2, width), dtype, device), rung, layouts=dtype == torch.float32)


@testing.where(lambda width, dtype, rung: can_do(rung, width, dtype) and is_exact(rung, width))
@every_softmax
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
def test_softmax_of_rows_as_wide_as_vocabularies(causal, width, dtype, device, rung):
    x = scores((2, width), dtype, device)
    check_softmax(x, rung, -0.5 if causal else None, causal, layouts=False)


@testing.where(lambda width, rung: is_exact(rung, width))
@every_softmax
@float_and_half
@pytest.mark.parametrize("scale", [0.0, -1.3, 0.125, 9.0])
@pytest.mark.parametrize("width", [1, 33, 1023, 4097])
def test_scale_is_what_x_is_multiplied_by_first(width, scale, dtype, device, rung):
    x = testing.randn((3, width), dtype, device)
    check_softmax(x, rung, scale, layouts=False)
    if scale == 0:
        torch.testing.assert_close(
            step2_attention.softmax(x, scale=scale, rung=rung), torch.full_like(x, 1 / width), rtol=1e-2, atol=0
        )


@every_softmax
@every_dtype
@pytest.mark.parametrize("shape", SQUARES, ids=str)
def test_a_row_of_a_causal_square_sees_up_to_its_own_column(shape, dtype, device, rung):
    check_softmax(testing.randn(shape, dtype, device, scale=3.0), rung, 0.7, causal=True, layouts=len(shape) == 3)


@testing.where(lambda shape, dtype, rung: can_do(rung, shape[-1], dtype))
@every_softmax
@float_and_half
@pytest.mark.parametrize("shape", [(2, 9, 9), (2, 70, 64), (1, 40, 532), (1, 3, 4099), (1, 24, 50257)], ids=str)
def test_what_is_hidden_has_no_influence_and_is_0(shape, dtype, device, rung):
    """It may be NaN or infinite; and it is 0 where the row has no maximum as well."""
    x = testing.randn(shape, dtype, device)
    hidden = hidden_of_square(x).expand(shape)
    clean = step2_attention.softmax(x, causal=True, rung=rung)
    for anything in (NAN, INFINITY, -INFINITY):
        with poisoned_allocations():
            again = step2_attention.softmax(x.masked_fill(hidden, anything), causal=True, rung=rung)
        assert torch.equal(again, clean)
    x[..., 0] = NAN  # every row that sees anything sees it
    spoiled = step2_attention.softmax(x, causal=True, rung=rung)
    assert spoiled[hidden].eq(0).all()
    assert spoiled[~hidden].isnan().all()
    nothing = step2_attention.softmax(torch.full_like(x, -INFINITY), causal=True, rung=rung)
    assert nothing[hidden].eq(0).all()
    assert nothing[~hidden].isnan().all()


@needs_touched_pages
@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step2_attention", "softmax") if p.values[0] == "cpu"]
)
def test_what_is_hidden_is_not_even_read(device, rung):
    """Memory that nobody has touched, not even for reading, has no page yet. A row has two of them."""
    x = untouched_square()
    width = len(x)
    y = step2_attention.softmax(x, causal=True, rung=rung)
    assert y[1, :3].tolist() == [0.5, 0.5, 0]
    touched = touched_pages(x)
    assert touched[:, 0].all()
    assert touched[:, 1].nonzero().flatten().tolist() == list(range(width // 2, width))


@every_softmax
@float_and_half
@with_and_without_mask
@pytest.mark.parametrize(("x_first", "out_first"), [(0, 1), (1, 0), (3, 3), (1, 2)])
def test_softmax_between_rows_that_begin_anywhere(x_first, out_first, causal, dtype, device, rung):
    """Where x and the output begin equally far from a multiple of 16 bytes vectors may be stored, otherwise not."""
    for shape in ((3, 301), (1, 10301)):
        count = shape[0] * shape[1]
        x = torch.full((count + 8,), NAN, dtype=dtype, device=device)
        out = x.clone()
        x, y = (t[first : first + count].view(shape) for t, first in ((x, x_first), (out, out_first)))
        x.copy_(testing.randn(shape, dtype, device))
        ops.softmax.out(x, causal=causal, rung=rung, out=y)
        torch.testing.assert_close(y, softmax_of(x, causal=causal))
        assert out[:out_first].isnan().all()
        assert out[out_first + count :].isnan().all()


@every_softmax
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softmax_finds_its_tensor_wherever_it_lies(dtype, device, rung):
    check_softmax(testing.randn((2, 3, 64), dtype, device), rung, alone=True, layouts=False)


@on_each_device
@every_dtype
@with_and_without_mask
def test_auto_does_gpt2_sized_rows(causal, dtype, device):
    check_softmax(testing.randn((256, 1024), dtype, device), "auto", causal=causal, layouts=False)
    check_softmax(testing.randn((2, 50257), dtype, device), "auto", causal=causal, layouts=False)


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step2_attention.rungs("softmax", "cpu"):
        for width in (760, 97, 9001):
            if is_exact(rung, width):
                check_softmax(testing.randn((3, width), torch.float32, "cpu"), rung, causal=width == 97)


# ---- inputs that are unusual, and right ----


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
@pytest.mark.parametrize("width", [4, 5, 300])
def test_a_row_without_a_maximum_is_nan_as_in_pytorch_and_the_others_are_not(width, device, rung):
    x = testing.randn((5, width), torch.float32, device)
    x[1] = -INFINITY
    x[2, width // 2] = NAN
    x[3, -1] = INFINITY
    for special in (step2_attention.softmax(x, rung=rung), torch.softmax(x, -1)):
        assert special.isnan().any(-1).tolist() == [False, True, True, True, False]
    assert step2_attention.softmax(x, rung=rung)[1:3].isnan().all()


@every_softmax
@pytest.mark.parametrize("width", [1030, 65539])
@testing.where(lambda width, rung: can_do(rung, width, torch.float32))
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
    check_softmax(x, rung, layouts=False)
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
    torch.testing.assert_close(
        step2_attention.softmax(x, scale=scale, rung=rung).double(),
        torch.softmax(scale * x.double(), -1),
        rtol=0,
        atol=torch.finfo(dtype).eps,
    )
    x[1, 7], x[2, 7], x[3] = INFINITY, -INFINITY, -INFINITY
    got = step2_attention.softmax(x, scale=scale, rung=rung)
    assert torch.equal(got.isnan(), torch.softmax(scale * x.double(), -1).isnan())


@every_softmax
@with_and_without_mask
@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 3), (2, 0, 3)], ids=str)
def test_empty_tensors(shape, causal, device, rung):
    x = torch.empty(shape, device=device, requires_grad=True)
    y = step2_attention.softmax(x, causal=causal, rung=rung)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step2_attention", "softmax") if p.values[1] != "cpu"]
)
@pytest.mark.parametrize("width", [1024, 1021])
def test_softmax_of_more_than_2_to_32_elements(width, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "4")  # v6's clusters have two
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    rows = (1 << 22) + (1 << 15)
    x, y = (testing.lazy_memory(rows * width, torch.bfloat16, device).view(rows, width) for _ in range(2))
    x[-1] = testing.randn((width,), torch.bfloat16, device, scale=3.0)
    ops.softmax.out(x, rung=rung, out=y)
    torch.testing.assert_close(y[-1].double(), torch.softmax(x[-1].double(), -1), rtol=1e-2, atol=1e-6)
    assert y[-2, 0].item() == pytest.approx(1 / width, rel=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    """Sizes alone decide, so no memory is needed."""

    def choose(rung, **sizes):
        return step2_attention._C.choose("softmax", rung, sizes, dtype)

    most = (1 << 31) - 1
    for rung in ("v2_block", "v3_online", "v4_registers", "v5_cluster", "auto"):
        assert choose(rung, rows=most) == (rung if rung != "auto" else "v4_registers")
        if rung != "auto":
            with testing.raises(ValueError, f"softmax: rung '{rung}' takes at most {most} ", "can: 'v1_naive'"):
                choose(rung, rows=1 << 31)
    assert choose("auto", rows=1 << 31) == "v1_naive"
    best_of_v4, of_16_bytes = (1 << 15) // dtype.itemsize, 16 // dtype.itemsize
    fits = {
        "v4_registers": (1 << 16) // dtype.itemsize,
        "v5_cluster": 7 * (1 << 19) // dtype.itemsize,
        "v6_cluster_registers": (1 << 19) // dtype.itemsize,
    }
    for width, rung in (
        (best_of_v4, "v4_registers"),
        (best_of_v4 + 1, "v6_cluster_registers"),
        (fits["v6_cluster_registers"] + of_16_bytes - 1, "v6_cluster_registers"),
        (fits["v6_cluster_registers"] + of_16_bytes, "v5_cluster"),
        (1 << 40, "v3_online"),
    ):
        assert choose("auto", width=width) == rung
    for rung, width in fits.items():
        assert choose(rung, width=width) == rung
        for wider in (width + of_16_bytes, 1 << 40):
            with testing.raises(
                ValueError,
                f"softmax: rung '{rung}' takes rows of at most {width * dtype.itemsize // 16} vectors of 16 bytes, "
                f"got width {wider}",
                "'v3_online'",
            ):
                choose(rung, width=wider)
    for rung, width, of_bytes in (
        ("v5_cluster", 50257, {2: 4, 4: 8, 8: 16}),
        ("v5_cluster", 8, {2: 1, 4: 1, 8: 1}),
        ("v6_cluster_registers", 50257, {2: 5, 4: 7, 8: 13}),
        ("v6_cluster_registers", 65536, {2: 4, 4: 8, 8: 16}),
        ("v6_cluster_registers", 8, {2: 2, 4: 2, 8: 2}),
    ):
        blocks = of_bytes[dtype.itemsize]
        assert choose(rung, width=width, rows=most // blocks) == rung
        with testing.raises(ValueError, f"takes at most {most} blocks, got {most // blocks + 1} rows of {blocks}"):
            choose(rung, width=width, rows=most // blocks + 1)


# ---- gradients ----


@every_softmax
@pytest.mark.parametrize(
    ("shape", "scale", "causal"),
    [((2, 3, 5), None, False), ((2, 3, 5), -0.7, True), ((4, 4), None, True), ((5, 3), 0.0, True), ((7,), 1.3, False)],
    ids=str,
)
def test_gradient_of_softmax(shape, scale, causal, device, rung):
    x = testing.randn(shape, torch.float64, device).requires_grad_()

    def function(x):
        return step2_attention.softmax(x, scale=scale, causal=causal, rung=rung)

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


@on_each_device
@float_and_half
def test_what_is_hidden_has_no_gradient_and_takes_none(dtype, device):
    """Neither NaN in a hidden column nor NaN as its gradient comes through."""
    x = testing.randn((2, 6, 4), dtype, device)
    hidden = hidden_of_square(x).expand(x.shape)
    x = x.masked_fill(hidden, NAN).requires_grad_()
    grad = testing.randn(x.shape, dtype, device, seed=1)
    y = step2_attention.softmax(x, scale=0.7, causal=True)
    (got,) = torch.autograd.grad(y, x, grad.masked_fill(hidden, NAN))
    assert got[hidden].eq(0).all()
    exact = x.detach().double().masked_fill(hidden, 0).requires_grad_()
    (expected,) = torch.autograd.grad(softmax_of(exact, 0.7, causal=True), exact, grad.double())
    torch.testing.assert_close(got.double(), expected, rtol=1e-2, atol=torch.finfo(dtype).eps)


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_second_gradients_are_as_exact_as_the_dtype_allows(dtype, device):
    testing.check_second_gradients(
        lambda x: step2_attention.softmax(x, scale=0.7, causal=True),
        lambda x: softmax_of(x, 0.7, causal=True),
        (testing.randn((4, 9), dtype, device),),
    )


# ---- as torch sees them ----


@every_softmax
def test_softmax_is_registered_as_torch_wants_it(device, rung):
    x = testing.randn((4, 6), torch.float32, device)
    testing.check_op(step2_attention, "softmax", (x,), {"rung": rung})
    testing.check_op(step2_attention, "softmax", (testing.transposed(x.bfloat16()),), {"rung": rung})
    testing.check_op(step2_attention, "softmax", (x,), {"scale": -0.3, "causal": True, "rung": rung})


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_passes_scale_and_mask_on(dtype, device):
    x = testing.randn((5, 5), dtype, device)
    with torch.autocast(device, dtype):
        got = step2_attention.softmax(x, scale=-2.0, causal=True)
    assert torch.equal(got, step2_attention.softmax(x.float(), scale=-2.0, causal=True))


@pytest.mark.parametrize("device", testing.DEVICES)
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


# ---- bad input ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_softmax_refuses(device):
    x = torch.ones(2, 3, device=device)
    with testing.raises(TypeError, "softmax: `x` must be float32, float16, bfloat16 or float64, got int64"):
        step2_attention.softmax(x.long())
    with testing.raises(ValueError, "softmax: `x` must have at least 1 dimension, got 0 (shape ())"):
        step2_attention.softmax(x[0, 0])
    with testing.raises(ValueError, "softmax: the last dimension of `x` must not be 0, got shape (2, 0)"):
        step2_attention.softmax(x[:, :0])
    with testing.raises(
        ValueError, "softmax: `x` must have at least 2 dimensions where `causal` is set, got 1 (shape (3,))"
    ):
        step2_attention.softmax(x[0], causal=True)


@on_each_device
def test_a_rung_refuses_rows_that_it_cannot_hold(device):
    x = torch.ones(1, 16388, device=device)
    for rung in step2_attention.rungs("softmax", device):
        if rung == "v4_registers":
            with testing.raises(ValueError, "'v4_registers' takes rows of at most 4096 vectors", "'v5_cluster'"):
                step2_attention.softmax(x, rung=rung)
        else:
            assert step2_attention.softmax(x, rung=rung).sum().item() == pytest.approx(1, rel=1e-4)


if __name__ == "__main__":
    testing.main(__file__)
