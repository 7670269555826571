"""layer_norm_backward, on every device there is: against float64, eager PyTorch and the rung before.

python tests/test_layer_norm_backward.py            pytest's options may follow, such as -k v3_persistent
"""

import ctypes
import random

import pytest
import torch
import torch.nn.functional as F

import step3_fused
from kernel_fusion import testing
from kernel_fusion.ops import wide
from step3_fused.attention_testing import DTYPES, every_dtype, on_a_gpu, on_each_device

OP = "layer_norm_backward"
MOST = (1 << 31) - 1

ops = torch.ops.step3_fused


def gradients_of(grad, x, weight, mean, rstd, grad_sum=None):
    """The formula. The mean is taken anew, since the saved one was rounded."""
    dtype, rows = grad.dtype, tuple(range(grad.dim() - 1))
    grad, x, weight = map(wide, (grad, x, weight))
    x_hat = (x - x.mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    g = grad * weight
    grad_x = rstd.unsqueeze(-1) * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if grad_sum is not None:
        grad_x = grad_x + wide(grad_sum)
    of_weight, of_bias = ((t.sum(rows) if rows else t).to(dtype) for t in (grad * x_hat, grad))
    return grad_x.to(dtype), of_weight, of_bias


def inputs_of(shape, dtype, device, *, more=False, mean=0.5, spread=1.0, eps=1e-5):
    """grad, x, weight, mean and rstd; with `more`, grad_sum."""
    x = testing.randn(shape, torch.float64, device, seed=1) + 0.5 * testing.staircase(shape[-1], device)
    x = (mean + spread * x).to(dtype)
    weight = 1 + testing.randn((shape[-1],), dtype, device, seed=2, scale=0.2)
    bias = torch.zeros_like(weight)
    statistics = step3_fused.layer_norm(x, weight, bias, eps=eps, return_statistics=True)[1:]
    grad = testing.randn(shape, dtype, device, seed=3)
    return grad, x, weight, *statistics, *([testing.randn(shape, dtype, device, seed=4)] if more else [])


def check(inputs, rung, **options):
    grad = inputs[0]
    if not able(rung, grad.device.type, grad.shape[-1], grad.dtype):
        with testing.raises(ValueError, f"{OP}: rung '{rung}' "):
            step3_fused.layer_norm_backward(*inputs, rung=rung)
        return None
    return testing.check_contract(step3_fused, OP, inputs, rung, reference=gradients_of, eager=gradients_of, **options)


def able(rung, device, width, dtype):
    """test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another holds the rung to it."""
    if rung != "v4_bulk":
        return True
    other_gpu = device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)
    bytes = width * dtype.itemsize
    return dtype != torch.float64 and bytes <= 32768 and bytes % 16 == 0 and not other_gpu


every_rung = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step3_fused", OP))
with_and_without_sum = pytest.mark.parametrize("more", [False, True], ids=["alone", "sum"])


# ---- the contract of correctness ----


@every_rung
@every_dtype
@pytest.mark.parametrize(
    "width", [1, 2, 8, 31, 33, 64, 127, 129, 256, 513, 760, 768, 1023, 1024, 1280, 1600, 2048, 2049, 4096]
)
def test_any_width(width, dtype, device, rung):
    check(inputs_of((5, width), dtype, device, more=width % 2 == 0), rung, layouts=width < 1600)


@every_rung
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (257, 3), (3, 8192), (3, 8191)], ids=str)
def test_any_shape(shape, device, rung):
    check(inputs_of(shape, torch.float32, device, more=True), rung, layouts=shape[-1] < 1000)


@every_rung
@with_and_without_sum
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3200, 8), (3201, 5), (13000, 8), (2200, 257), (800, 1032), (2400, 2056)], ids=str)
def test_more_rows_than_resident_blocks(shape, dtype, more, device, rung):
    """Persistent blocks take row after row then: v3's are 132·3 of four warps up to 1024 columns, 132·6 of two above.

    v4's warps are 132·16, its groups of four 132·4, whose rings have three stages: 13000 rows go round twice. Of 2200
    rows of 257 columns each two warps have three: their sums take turns in two stages.
    """
    if device == "cpu" and shape[-1] > 2000:
        pytest.skip("for GPUs: emulated it takes minutes")
    if device == "cpu" and shape[-1] > 1000 and not (more and (dtype == torch.bfloat16 or rung == "v4_bulk")):
        return  # once is enough where it takes seconds
    if device == "cpu" and shape[-1] == 257 and not (more and dtype == torch.float32 and rung == "v3_persistent"):
        return
    check(inputs_of(shape, dtype, device, more=more), rung, layouts=False)


def test_a_rerun_is_equal_wherever_memory_is_free():
    """Rows of eight are less than a vector: what the loops keep for themselves often lies side by side then."""
    heap, drawn, held = ctypes.CDLL(None), random.Random(0), []
    heap.malloc.restype, heap.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    inputs = inputs_of((2, 3, 5, 8), torch.float32, "cpu", more=True)
    first = step3_fused.layer_norm_backward(*inputs, rung="cpu")
    for _ in range(4000):
        held += [heap.malloc(drawn.randrange(16, 80, 8)) for _ in range(drawn.randrange(20))]
        drawn.shuffle(held)
        while len(held) > 200:
            heap.free(held.pop())
        assert all(map(torch.equal, first, step3_fused.layer_norm_backward(*inputs, rung="cpu")))
    while held:
        heap.free(held.pop())


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_wherever_it_lies(dtype, device, rung):
    check(inputs_of((2, 3, 64), dtype, device, more=True), rung, alone=True, layouts=False)


@on_each_device
def test_wide_rows_that_begin_anywhere_are_refused_or_right(device):
    """v4_bulk leaves them to v3_persistent, which holds 8192 columns; `auto` takes what can."""
    inputs = list(inputs_of((2, 8200), torch.bfloat16, device))
    want = step3_fused.layer_norm_backward(*inputs, rung="v1_naive")
    inputs[1] = torch.cat([inputs[1].flatten(), inputs[1][0, :1]])[1:].view(2, 8200).copy_(inputs[1])
    assert inputs[1].data_ptr() % 16 != 0
    if able("v4_bulk", device, 8200, torch.bfloat16):
        with testing.raises(ValueError, f"{OP}: rung 'v4_bulk' takes width ≤ 8192, got 8200; these can: '"):
            step3_fused.layer_norm_backward(*inputs, rung="v4_bulk")
    for got, expected in zip(step3_fused.layer_norm_backward(*inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step3_fused.rungs(OP, "cpu"):
        several_groups = [(280, 1032)] if rung == "v4_bulk" else []
        for shape in ((7, 96), (3, 1100), (5, 1030), (3, 1536), *several_groups):
            check(inputs_of(shape, torch.float32, "cpu", more=True), rung, layouts=False)


@every_rung
@pytest.mark.parametrize("width", [768, 1600])
@testing.where(lambda width, device, rung: able(rung, device, width, torch.float32))
def test_runs_agree_to_the_last_bit(width, device, rung):
    inputs = inputs_of((1500 if device == "cuda" else 30, width), torch.float32, device, more=True)
    first = step3_fused.layer_norm_backward(*inputs, rung=rung)
    for _ in range(500 if device == "cuda" else 3):
        again = step3_fused.layer_norm_backward(*inputs, rung=rung)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


LAUNCHES = {"v1_naive": 2, "v2_two_stage": 3, "v3_persistent": 2, "v4_bulk": 2}


@pytest.mark.parametrize("rung", LAUNCHES)
def test_a_rung_launches_as_many_kernels_as_its_header_says(rung):
    inputs = inputs_of((6, 40), torch.float32, "cpu")
    before = step3_fused.emulated_kernels()
    step3_fused.layer_norm_backward(*inputs, rung=rung)
    assert step3_fused.emulated_kernels() - before == LAUNCHES[rung]


# ---- inputs that are unusual, and right ----


@every_rung
@pytest.mark.parametrize("width", [31, 768, 1600])
@testing.where(lambda width, device, rung: able(rung, device, width, torch.float32))
def test_a_large_mean_does_not_drown_a_small_variance(width, device, rung):
    """The saved mean is off by up to 0.0005 near 10000, a twentieth of the spread."""
    for mean, spread in ((1e4, 1e-2), (-1e4, 1.0)):
        inputs = inputs_of((4, width), torch.float32, device, mean=mean, spread=spread, eps=1e-12)
        got = step3_fused.layer_norm_backward(*inputs, rung=rung)
        exact = gradients_of(*(t.double() for t in inputs))
        for g, e in zip(got, exact, strict=True):
            assert (g.double() - e).abs().max() <= 5e-6 * e.abs().max()


@every_rung
@every_dtype
@testing.where(lambda dtype, device, rung: able(rung, device, 40, dtype))
def test_a_constant_row_passes_on_no_more_than_the_sum(dtype, device, rung):
    """x̂ is 0: what comes back is rstd times what is left of g when its average is taken away."""
    weight = torch.ones(40, dtype=dtype, device=device)
    x, grad = torch.full((2, 40), 0.5, dtype=dtype, device=device), torch.ones(2, 40, dtype=dtype, device=device)
    statistics = step3_fused.layer_norm(x, weight, weight, return_statistics=True)[1:]
    grad_x, grad_weight, grad_bias = step3_fused.layer_norm_backward(grad, x, weight, *statistics, grad, rung=rung)
    torch.testing.assert_close(grad_x, grad)
    assert grad_weight.eq(0).all()
    torch.testing.assert_close(grad_bias, torch.full_like(grad_bias, 2))


@every_rung
@testing.where(lambda device, rung: able(rung, device, 1, torch.float32))
def test_rows_of_one_column(device, rung):
    got = step3_fused.layer_norm_backward(*inputs_of((6, 1), torch.float32, device), rung=rung)
    assert all(t.isfinite().all() for t in got)
    assert got[0].eq(0).all()


@every_rung
def test_large_numbers_do_not_overflow_in_half_precision(device, rung):
    grad, *rest = inputs_of((3, 96), torch.float16, device, spread=200.0)
    check((grad.mul_(200), *rest), rung, layouts=False)


@every_rung
def test_no_rows_have_sums_of_0(device, rung):
    grad_x, *sums = step3_fused.layer_norm_backward(*inputs_of((0, 8), torch.float32, device, more=True), rung=rung)
    assert grad_x.shape == (0, 8)
    assert all(s.shape == (8,) and s.eq(0).all() for s in sums)


@every_rung
def test_it_is_the_gradient_of_layer_norm(device, rung):
    grad, x, weight, mean, rstd = inputs_of((20, 96), torch.float32, device)
    variables = [x.clone().requires_grad_(), weight.clone().requires_grad_(), torch.zeros_like(weight).requires_grad_()]
    expected = torch.autograd.grad(F.layer_norm(variables[0], (96,), *variables[1:]), variables, grad)
    got = step3_fused.layer_norm_backward(grad, x, weight, mean, rstd, rung=rung)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


# ---- auto ----


@on_each_device
def test_auto_is_read_off_the_results(device):
    testing.check_automatic(step3_fused, OP, lambda shape: shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    """Sizes alone decide, so no memory is needed."""

    def choose(rung, **sizes):
        return step3_fused._C.choose(OP, rung, sizes, dtype)

    held, kept = (8192, 4096) if dtype == torch.float64 else (16384, 8192)
    assert choose("v3_persistent", rows=MOST, width=kept) == "v3_persistent"
    if dtype != torch.float64:
        most = 32768 // dtype.itemsize
        assert choose("v4_bulk", rows=MOST, width=most) == choose("auto", rows=MOST, width=most) == "v4_bulk"
        bytes = 32768 + 8 * dtype.itemsize
        text = f"{OP}: rung 'v4_bulk' takes rows up to 32768 bytes, got {bytes}; these can: '"
        with testing.raises(ValueError, text):
            choose("v4_bulk", rows=1, width=most + 8)
        text = f"takes rows of a multiple of 16 bytes, got {5 * dtype.itemsize}; these can: '"
        with testing.raises(ValueError, text):
            choose("v4_bulk", rows=1, width=5)
    odd = 1 if dtype == torch.float64 else 7  # no vector divides such widths
    assert choose("auto", rows=MOST, width=kept - odd) == "v3_persistent"
    assert choose("auto", rows=1, width=kept + 1) == choose("auto", rows=1, width=held - odd) == "v2_two_stage"
    assert choose("auto", rows=1, width=held + 1) == choose("auto", rows=MOST + 1, width=8) == "v1_naive"
    for rung, widest in (("v3_persistent", kept), ("v2_two_stage", held)):
        with testing.raises(ValueError, f"{OP}: rung '{rung}' takes width ≤ {widest}, got {widest + 1}; these can: '"):
            choose(rung, rows=1, width=widest + 1)
        with testing.raises(ValueError, f"{OP}: rung '{rung}' takes rows ≤ {MOST}, got {MOST + 1}; these can: '"):
            choose(rung, rows=MOST + 1, width=1)
    with testing.raises(ValueError, f"rung 'v1_naive' takes rows ≤ {8 * MOST}, got {8 * MOST + 1}; no rung can"):
        choose("v1_naive", rows=8 * MOST + 1, width=1)


@on_a_gpu
@pytest.mark.parametrize(
    ("rung", "width"),
    [
        *((rung, width) for rung in ("v2_two_stage", "v3_persistent") for width in (4096, 4093)),
        *(("v4_bulk", width) for width in (2048, 4096)),
    ],
)
def test_more_than_2_to_32_elements(width, rung, device):
    rows = (1 << 32) // width + (1 << 13)
    grad, grad_x = (testing.lazy_memory(rows * width, torch.bfloat16, device).view(rows, width) for _ in range(2))
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    mean, rstd = torch.zeros(rows, device=device), torch.ones(rows, device=device)
    grad[-1] = testing.randn((width,), torch.bfloat16, device)
    sums = {name: torch.empty_like(weight) for name in ("grad_weight", "grad_bias")}
    ops.layer_norm_backward.out(grad, grad, weight, mean, rstd, rung=rung, grad_x=grad_x, **sums)
    expected = gradients_of(grad[-1:], grad[-1:], weight, mean[:1], rstd[:1])
    for got, want in zip((grad_x[-1:], sums["grad_weight"], sums["grad_bias"]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert grad_x[-2].eq(0).all()


# ---- bad input ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_bad_arguments_are_refused(device):
    x, weight, row = torch.ones(2, 3, device=device), torch.ones(3, device=device), torch.ones(2, device=device)
    good = {"grad": x, "x": x, "weight": weight, "mean": row, "rstd": row}
    for exception, text, changed in (
        (TypeError, "`grad` must be float32, float16, bfloat16 or float64, got int64", {"grad": x.long()}),
        (ValueError, "the last dimension of `grad` must not be 0, got shape (2, 0)", {"grad": x[:, :0]}),
        (TypeError, "`x` must have the dtype of `grad` (float32), got float16", {"x": x.half()}),
        (ValueError, "`x` must have shape (2, 3), got (1, 3)", {"x": x[:1]}),
        (ValueError, "`weight` must have shape (3,), got (2,)", {"weight": weight[:2]}),
        (TypeError, "`mean` must be float32, got float16", {"mean": row.half()}),
        (ValueError, "`mean` must have shape (2,), got (2, 1)", {"mean": row[:, None]}),
        (TypeError, "`rstd` must be float32, got float64", {"rstd": row.double()}),
        (ValueError, "`rstd` must have shape (2,), got (1,)", {"rstd": row[:1]}),
        (ValueError, "`grad_sum` must have shape (2, 3), got (3,)", {"grad_sum": weight}),
        (TypeError, "`grad_sum` must have the dtype of `grad` (float32), got bfloat16", {"grad_sum": x.bfloat16()}),
    ):
        with testing.raises(exception, f"{OP}: {text}"):
            step3_fused.layer_norm_backward(**(good | changed))
    other = torch.ones(2, device="meta" if device != "meta" else "cpu")
    with testing.raises(ValueError, f"{OP}: `rstd` must be on the device of `grad`"):
        step3_fused.layer_norm_backward(**(good | {"rstd": other}))


@on_a_gpu
def test_the_second_stage_waits_for_the_first(device):
    """v4_bulk launches it while the first runs, and the first leaves multiprocessors free. The contract sees it."""
    for _ in range(20):
        check(inputs_of((120, 16384), torch.bfloat16, device), "v4_bulk", layouts=False)


if __name__ == "__main__":
    testing.main(__file__)
