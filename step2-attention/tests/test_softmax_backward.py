"""The gradient of softmax, on every device there is: against float64, eager PyTorch and the rung before.

python tests/test_softmax_backward.py            pytest's options may follow, such as -k v3_registers
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


def gradient_of(grad, y, scale=None, causal=False):
    """The formula, composed of PyTorch's operations. What is hidden is 0."""
    if causal:
        hidden = hidden_of_square(y)
        grad, y = grad.masked_fill(hidden, 0), y.masked_fill(hidden, 0)
    gradient = y * (grad - (y * grad).sum(-1, keepdim=True))
    return gradient if scale is None else scale * gradient


def grad_and_y(shape, dtype, device, scale=3.0, causal=False):
    """A gradient, and what softmax gives for random scores; hidden columns of both hold NaN."""
    grad, x = (testing.randn(shape, torch.float64, "cpu", seed=seed) for seed in (1, 0))
    y = torch.softmax(scale * x.masked_fill(hidden_of_square(x), -INFINITY) if causal else scale * x, -1)
    if causal:
        grad, y = (t.masked_fill(hidden_of_square(x), NAN) for t in (grad, y))
    return grad.to(device, dtype), y.to(device, dtype)


def can_do(rung, width, dtype):
    return rung != "v3_registers" or width * dtype.itemsize <= 1 << 16


def is_exact(rung, width):
    """Thousands of additions one after the other are not as exact as PyTorch's, and v1 is what v2 is compared with."""
    return width <= {"v1_naive": 2000, "v2_block": 5000}.get(rung, width)


def check(inputs, rung, scale=None, causal=False, **options):
    return testing.check_contract(
        step2_attention,
        "softmax_backward",
        inputs,
        rung,
        reference=gradient_of,
        eager=gradient_of,
        kwargs={"scale": scale, "causal": causal},
        **options,
    )


every_rung = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step2_attention", "softmax_backward"))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
float_and_half = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


# ---- the contract of correctness ----


@every_rung
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 127, 257, 768, 1023, 1025])
def test_rows_of_any_width(width, dtype, device, rung):
    check(grad_and_y((5, width), dtype, device), rung)


@every_rung
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (257, 3)], ids=str)
def test_rows_of_any_shape(shape, device, rung):
    check(grad_and_y(shape, torch.float32, device), rung)


@testing.where(lambda width, dtype, rung: can_do(rung, width, dtype) and is_exact(rung, width))
@every_rung
@float_and_half
@pytest.mark.parametrize("width", [384, 640, 896, 1280, 1600, 2040, 2049, 4095, 4097, 8200, 16384, 32765, 32768])
def test_rows_shared_by_more_and_more_threads(width, dtype, device, rung):
    check(grad_and_y((2, width), dtype, device), rung, layouts=dtype == torch.float32)


@testing.where(lambda width, dtype, rung: can_do(rung, width, dtype) and is_exact(rung, width))
@every_rung
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (50257, torch.bfloat16),
        (65539, torch.float32),
        (131073, torch.float16),
        (131072, torch.float32),  # more than 16 blocks of 32 KB
        (70001, torch.float64),
    ],
    ids=str,
)
@with_and_without_mask
def test_rows_as_wide_as_vocabularies(causal, width, dtype, device, rung):
    inputs = grad_and_y((2, width), dtype, device, causal=causal)
    check(inputs, rung, -0.5 if causal else None, causal, layouts=False)


@testing.where(lambda width, rung: is_exact(rung, width))
@every_rung
@float_and_half
@pytest.mark.parametrize("scale", [0.0, -1.3, 0.125, 9.0])
@pytest.mark.parametrize("width", [1, 33, 1023, 4097])
def test_scale_multiplies_the_gradient(width, scale, dtype, device, rung):
    check(grad_and_y((3, width), dtype, device), rung, scale, layouts=False)


@every_rung
@every_dtype
@pytest.mark.parametrize("shape", SQUARES, ids=str)
def test_a_row_of_a_causal_square_sees_up_to_its_own_column(shape, dtype, device, rung):
    check(grad_and_y(shape, dtype, device, causal=True), rung, 0.7, causal=True, layouts=len(shape) == 3)


@testing.where(lambda shape, dtype, rung: can_do(rung, shape[-1], dtype))
@every_rung
@float_and_half
@pytest.mark.parametrize("shape", [(2, 9, 9), (2, 70, 64), (1, 40, 532), (1, 3, 4099), (1, 24, 50257)], ids=str)
def test_what_is_hidden_has_no_influence_and_is_0(shape, dtype, device, rung):
    """Whatever it holds; and it is 0 where what is seen is NaN as well."""
    grad, y = grad_and_y(shape, dtype, device, causal=True)
    hidden = hidden_of_square(y).expand(shape)
    clean = step2_attention.softmax_backward(grad, y, causal=True, rung=rung)
    assert not clean.isnan().any()
    for anything in (0.0, INFINITY, -INFINITY):
        with poisoned_allocations():
            again = step2_attention.softmax_backward(
                grad.masked_fill(hidden, anything), y.masked_fill(hidden, anything), causal=True, rung=rung
            )
        assert torch.equal(again, clean)
    for spoiled in (grad, y):
        before = spoiled[..., 0].clone()
        spoiled[..., 0] = NAN  # every row that sees anything sees it
        got = step2_attention.softmax_backward(grad, y, causal=True, rung=rung)
        assert got[hidden].eq(0).all()
        assert got[~hidden].isnan().all()
        spoiled[..., 0] = before


@needs_touched_pages
@pytest.mark.parametrize("which", ["grad", "y"])
@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step2_attention", "softmax_backward") if p.values[0] == "cpu"]
)
def test_what_is_hidden_is_not_even_read(device, rung, which):
    """Memory that nobody has touched, not even for reading, has no page yet. A row has two of them."""
    untouched = untouched_square()
    width = len(untouched)
    other = torch.ones(width, width, dtype=torch.float64)
    grad, y = (untouched, other) if which == "grad" else (other, untouched)
    assert step2_attention.softmax_backward(grad, y, causal=True, rung=rung).eq(0).all()
    touched = touched_pages(untouched)
    assert touched[:, 0].all()
    assert touched[:, 1].nonzero().flatten().tolist() == list(range(width // 2, width))


@every_rung
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("firsts", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (3, 3, 3), (1, 2, 3), (2, 1, 1)], ids=str)
def test_grad_y_and_the_result_may_begin_anywhere(firsts, causal, dtype, device, rung):
    """Where they begin equally far from a multiple of 16 bytes they go in vectors, otherwise not."""
    wholes = [torch.full((3 * 301 + 8,), NAN, dtype=dtype, device=device) for _ in firsts]
    grad, y, out = (whole[first : first + 3 * 301].view(3, 301) for whole, first in zip(wholes, firsts, strict=True))
    for to, value in zip((grad, y), grad_and_y((3, 301), dtype, device, causal=causal), strict=True):
        to.copy_(value)
    ops.softmax_backward.out(grad, y, scale=0.5, causal=causal, rung=rung, out=out)
    exact = gradient_of(grad.double(), y.double(), 0.5, causal)
    torch.testing.assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert wholes[2][: firsts[2]].isnan().all()
    assert wholes[2][firsts[2] + 3 * 301 :].isnan().all()


@testing.where(lambda shape, rung: is_exact(rung, shape[-1]))
@every_rung
@float_and_half
@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 8200)], ids=str)
def test_each_tensor_is_found_wherever_it_lies(shape, dtype, device, rung):
    check(grad_and_y(shape, dtype, device), rung, alone=True, layouts=False)


@on_each_device
@every_dtype
@with_and_without_mask
def test_auto_does_gpt2_sized_rows(causal, dtype, device):
    for shape in ((256, 1024), (2, 50257)):
        check(grad_and_y(shape, dtype, device, causal=causal), "auto", causal=causal, layouts=False)


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step2_attention.rungs("softmax_backward", "cpu"):
        for width in (760, 97, 9001):
            if is_exact(rung, width):
                causal = width == 97
                check(grad_and_y((3, width), torch.float32, "cpu", causal=causal), rung, causal=causal)


# ---- inputs that are unusual, and right ----


@every_rung
@every_dtype
def test_gradients_at_the_ends_of_the_range(dtype, device, rung):
    info = torch.finfo(dtype)
    large, small = info.max / 4, info.smallest_normal
    grad = [[large, -large, large, 0.0], [large] * 4, [small, -small, 0.0, small], [large, 1.0, -3.0, 0.0]]
    y = [[0.25, 0.25, 0.5, 0.0], [0.25] * 4, [0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]]
    grad, y = (torch.tensor(rows, dtype=dtype, device=device) for rows in (grad, y))
    got = step2_attention.softmax_backward(grad, y, rung=rung)
    exact = gradient_of(grad.double(), y.double())
    torch.testing.assert_close(got.double(), exact, rtol=info.eps, atol=info.tiny)
    assert got[1].tolist() == [0] * 4  # the same gradient everywhere moves nothing: the weights add up to 1
    assert got[3].tolist() == [0] * 4  # nor does any where one weight is 1


@every_rung
@pytest.mark.parametrize("width", [4, 5, 300])
def test_a_row_with_nan_is_nan_as_in_pytorch_and_the_others_are_not(width, device, rung):
    grad, y = grad_and_y((5, width), torch.float32, device)
    grad[1, 0], y[2, -1], grad[3, width // 2] = NAN, NAN, INFINITY
    got, eager = step2_attention.softmax_backward(grad, y, rung=rung), gradient_of(grad, y)
    assert got.isnan().any(-1).tolist() == [False, True, True, True, False]
    assert got[1:3].isnan().all()
    assert torch.equal(got.isnan(), eager.isnan())


@every_rung
def test_every_column_counts_in_the_sum(device, rung):
    """A reduction that forgets a lane, or a cut that forgets an end, shows where a single product is not 0."""
    width = 1030
    for place in (0, 1, 31, 32, 255, 256, 1023, 1024, width - 1):
        grad, y = torch.zeros(1, width, device=device), torch.full((1, width), 0.5, device=device)
        grad[0, place] = 8.0
        expected = torch.full_like(y, -2.0)
        expected[0, place] = 2.0
        assert torch.equal(step2_attention.softmax_backward(grad, y, rung=rung), expected)


@every_rung
@with_and_without_mask
@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 3), (2, 0, 3)], ids=str)
def test_empty_tensors(shape, causal, device, rung):
    grad, y = (torch.empty(shape, device=device, requires_grad=True) for _ in range(2))
    grad_x = step2_attention.softmax_backward(grad, y, causal=causal, rung=rung)
    assert grad_x.shape == shape
    grad_x.sum().backward()
    assert grad.grad.shape == y.grad.shape == shape


@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step2_attention", "softmax_backward") if p.values[1] != "cpu"]
)
@pytest.mark.parametrize("width", [1024, 1021])
def test_more_than_2_to_32_elements(width, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "2")
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    rows = (1 << 22) + (1 << 15)
    grad, y, out = (testing.lazy_memory(rows * width, torch.bfloat16, device).view(rows, width) for _ in range(3))
    grad[-1:], y[-1:] = grad_and_y((1, width), torch.bfloat16, device)
    y[-2, 0], grad[-2, 0] = 0.5, 8.0
    ops.softmax_backward.out(grad, y, rung=rung, out=out)
    torch.testing.assert_close(out[-1].double(), gradient_of(grad[-1].double(), y[-1].double()), rtol=1e-2, atol=1e-6)
    assert out[-2, 0].item() == 2.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    """Sizes alone decide, so no memory is needed."""

    def choose(rung, **sizes):
        return step2_attention._C.choose("softmax_backward", rung, sizes, dtype)

    most = (1 << 31) - 1
    for rung in ("v2_block", "v3_registers", "v4_cluster", "auto"):
        assert choose(rung, rows=most) == (rung if rung != "auto" else "v3_registers")
        if rung != "auto":
            with testing.raises(ValueError, f"rung '{rung}' takes at most {most} ", "can: 'v1_naive'"):
                choose(rung, rows=1 << 31)
    assert choose("auto", rows=1 << 31) == "v1_naive"
    changes = (1 << 15) // dtype.itemsize
    for width, rung in ((changes, "v3_registers"), (changes + 1, "v4_cluster"), (1 << 40, "v2_block")):
        assert choose("auto", width=width) == rung
    fits = {"v3_registers": (1 << 16) // dtype.itemsize, "v4_cluster": 7 * (1 << 18) // dtype.itemsize}
    for rung, width in fits.items():
        assert choose(rung, width=width) == rung
        for wider in (width + 16 // dtype.itemsize, 1 << 40):
            with testing.raises(
                ValueError,
                f"softmax_backward: rung '{rung}' takes rows of at most {width * dtype.itemsize // 16} vectors of 16 "
                f"bytes, got width {wider}",
                "'v2_block'",
            ):
                choose(rung, width=wider)
    for width, blocks in ((50257, {2: 8, 4: 16, 8: 16}[dtype.itemsize]), (8, 1)):
        assert choose("v4_cluster", width=width, rows=most // blocks) == "v4_cluster"
        with testing.raises(ValueError, f"takes at most {most} blocks, got {most // blocks + 1} rows of {blocks}"):
            choose("v4_cluster", width=width, rows=most // blocks + 1)


# ---- as softmax's gradient, and its own ----


@on_each_device
@every_dtype
@with_and_without_mask
def test_the_gradient_of_softmax_is_this_op(causal, dtype, device):
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


@every_rung
@pytest.mark.parametrize(
    ("shape", "scale", "causal"),
    [((2, 3, 5), None, False), ((2, 3, 5), -0.7, True), ((4, 4), None, True), ((5, 3), 0.0, True), ((7,), 1.3, False)],
    ids=str,
)
def test_gradients_of_the_gradient(shape, scale, causal, device, rung):
    inputs = [testing.randn(shape, torch.float64, device, seed=seed).requires_grad_() for seed in range(2)]

    def function(grad, y):
        return step2_attention.softmax_backward(grad, y, scale=scale, causal=causal, rung=rung)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@on_each_device
@float_and_half
def test_what_is_hidden_takes_no_gradient_of_the_gradient(dtype, device):
    grad, y = (t.requires_grad_() for t in grad_and_y((2, 6, 4), dtype, device, causal=True))
    hidden = hidden_of_square(y).expand(y.shape)
    weights = testing.randn(y.shape, dtype, device, seed=2).masked_fill(hidden, NAN)
    got = torch.autograd.grad(step2_attention.softmax_backward(grad, y, scale=0.7, causal=True), (grad, y), weights)
    exact = [t.detach().double().masked_fill(hidden, 0).requires_grad_() for t in (grad, y)]
    expected = torch.autograd.grad(gradient_of(*exact, 0.7, True), exact, weights.double().masked_fill(hidden, 0))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine[hidden].eq(0).all()
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-2, atol=torch.finfo(dtype).eps)


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_second_gradients_are_as_exact_as_the_dtype_allows(dtype, device):
    def ours(grad, y):
        return step2_attention.softmax_backward(grad, y, scale=0.7, causal=True)

    inputs = tuple(testing.randn((4, 9), dtype, device, seed=seed) for seed in (2, 3))
    testing.check_second_gradients(ours, lambda grad, y: gradient_of(grad, y, 0.7, True), inputs)
    testing.check_each_input_alone(ours, inputs)


# ---- as torch sees it ----


@every_rung
def test_the_op_is_registered_as_torch_wants_it(device, rung):
    inputs = grad_and_y((4, 6), torch.float32, device)
    testing.check_op(step2_attention, "softmax_backward", inputs, {"rung": rung})
    halves = tuple(testing.transposed(t.bfloat16()) for t in inputs)
    testing.check_op(step2_attention, "softmax_backward", halves, {"rung": rung})
    squares = grad_and_y((4, 6), torch.float32, device, causal=True)
    testing.check_op(step2_attention, "softmax_backward", squares, {"scale": -0.3, "causal": True, "rung": rung})


@on_each_device
def test_softmax_and_its_gradient_compile_in_one_graph(device):
    def function(x, grad):
        return torch.autograd.grad(step2_attention.softmax(x, scale=0.7, causal=True), x, grad)[0]

    x = testing.randn((5, 5), torch.float32, device).requires_grad_()
    grad = testing.randn((5, 5), torch.float32, device, seed=1)

    def loss(x, grad):
        return (step2_attention.softmax(x, scale=0.7, causal=True) * grad).sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    compiled(x, grad).backward()
    torch.testing.assert_close(x.grad, function(x, grad))


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_leaves_the_dtype(dtype, device):
    """Gradients come in the dtype that softmax gave; a backward inside a region computes the same as outside."""
    for of in (dtype, torch.float32):
        grad, y = grad_and_y((5, 5), of, device)
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
    op = step2_attention.softmax_backward
    x = torch.ones(2, 3, device=device)
    with testing.raises(TypeError, "softmax_backward: `grad` must be float32, float16, bfloat16 or float64, got int64"):
        op(x.long(), x)
    with testing.raises(TypeError, "softmax_backward: `y` must have the dtype of `grad` (float32), got float16"):
        op(x, x.half())
    with testing.raises(ValueError, "softmax_backward: `grad` must have at least 1 dimension, got 0 (shape ())"):
        op(x[0, 0], x[0, 0])
    with testing.raises(ValueError, "softmax_backward: the last dimension of `grad` must not be 0, got shape (2, 0)"):
        op(x[:, :0], x[:, :0])
    with testing.raises(ValueError, "softmax_backward: `y` must have shape (2, 3), got (3,)"):
        op(x, x[0])
    with testing.raises(
        ValueError, "softmax_backward: `grad` must have at least 2 dimensions where `causal` is set, got 1 (shape (3,))"
    ):
        op(x[0], x[0], causal=True)
    if device == "cuda":
        with testing.raises(ValueError, "softmax_backward: `y` must be on the device of `grad`"):
            op(x, x.cpu())


@on_each_device
def test_an_output_that_shares_memory_is_refused(device):
    testing.check_apart(step2_attention, "softmax_backward", grad_and_y((4, 12), torch.float32, device))


@on_each_device
def test_a_rung_refuses_rows_that_it_cannot_hold(device):
    grad, y = torch.zeros(1, 16388, device=device), torch.ones(1, 16388, device=device)
    grad[0, -1] = 1.0
    for rung in step2_attention.rungs("softmax_backward", device):
        if rung == "v3_registers":
            with testing.raises(ValueError, "'v3_registers' takes rows of at most 4096 vectors", "'v4_cluster'"):
                step2_attention.softmax_backward(grad, y, rung=rung)
        else:
            got = step2_attention.softmax_backward(grad, y, rung=rung)
            assert got[0, 0].item() == -1.0
            assert got[0, -1].item() == 0.0


if __name__ == "__main__":
    testing.main(__file__)
