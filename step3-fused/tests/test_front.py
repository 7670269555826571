"""A bias and dropout in front of residual_layer_norm's addition, on every device there is: values, masks, gradients.

python tests/test_front.py            pytest's options may follow, such as -k v3_registers
"""

import functools

import pytest
import torch

import step1_simple  # whose mask it is, and whose ops are its way back
import step3_fused
from kernel_fusion import testing
from kernel_fusion.testing.philox import mask_and_factor
from step3_fused import attention_testing
from step3_fused.attention_testing import (
    RNG_STATE,
    each_front,
    every_dtype,
    front_inputs,
    half_types,
    on_a_gpu,
    on_each_device,
)

OP = "residual_layer_norm"

ops = torch.ops.step3_fused


def check(inputs, rung, **options):
    return attention_testing.check(OP, inputs, rung, **options)


every_rung = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step3_fused", OP))


# ---- the contract of correctness ----


@every_rung
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 7, 31, 33, 64, 127, 129, 760, 768, 1023, 1600, 2049, 4096])
def test_any_width(width, dtype, device, rung):
    check(front_inputs((5, width), dtype, device), rung, layouts=width < 1600)


@every_rung
@every_dtype
@each_front
@pytest.mark.parametrize("width", [33, 72, 768])
def test_any_front(width, x_bias, dropout_p, dtype, device, rung):
    check(front_inputs((6, width), dtype, device, x_bias=x_bias, dropout_p=dropout_p), rung, layouts=width == 72)


@every_rung
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (67, 3), (67, 40), (2, 8192), (2, 8191)], ids=str)
def test_any_shape(shape, device, rung):
    """Of a row or of many, over several blocks; rows that begin within the eight numbers of a call."""
    for dtype in (torch.float32, torch.bfloat16):
        check(front_inputs(shape, dtype, device), rung, layouts=shape[-1] < 1000)


@every_rung
@half_types
@pytest.mark.parametrize("width", [16384, 12288, 8193])
def test_rows_of_many_warps(width, dtype, device, rung):
    inputs = front_inputs((2, width), dtype, device)
    if rung == "v2_fused":
        with testing.raises(ValueError, f"{OP}: rung 'v2_fused' takes width ≤ 8192, got {width}"):
            step3_fused.residual_layer_norm(*inputs, rung=rung)
    else:
        check(inputs, rung, layouts=False)


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_wherever_it_lies(dtype, device, rung):
    check(front_inputs((2, 3, 64), dtype, device), rung, alone=True, layouts=False)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step3_fused.rungs(OP, "cpu"):
        for shape in ((7, 96), (3, 2056), (3, 65)):
            check(front_inputs(shape, torch.bfloat16, "cpu"), rung, layouts=False)


@every_rung
def test_a_launch_is_still_a_launch(device, rung):
    """The front has none of its own."""
    inputs = front_inputs((3, 64), torch.float32, device)
    if device == "cpu" and rung != "cpu":
        before = step3_fused.emulated_kernels()
        step3_fused.residual_layer_norm(*inputs, rung=rung)
        assert step3_fused.emulated_kernels() - before == (2 if rung == "v1_separate" else 1)


# ---- the mask ----


@every_rung
@every_dtype
def test_the_mask_is_that_of_step_1(dtype, device, rung):
    """Of ones and no residual the sum is the scaled mask: as step 1 and kernel_fusion.testing.philox have it."""
    for rows, width, dropout_p in ((40, 520, 0.5), (13, 264, 0.1), (11, 67, 0.9)):
        one = torch.ones(rows, width, dtype=dtype, device=device)
        zero, flat = torch.zeros_like(one), torch.zeros_like(one[0])
        for seed_and_offset in ((7, 0), (-(1 << 63), (1 << 62) + 4)):
            rng_state = torch.tensor(seed_and_offset)
            _, total = step3_fused.residual_layer_norm(one, zero, flat, flat, None, dropout_p, rng_state, rung=rung)
            assert torch.equal(total, step1_simple.bias_dropout_residual(one, flat, zero, dropout_p, rng_state))
            assert torch.equal(total.cpu() != 0, mask_and_factor((rows, width), dropout_p, rng_state)[0])


@every_rung
def test_what_is_dropped_leaves_the_residual_whatever_it_was(device, rung):
    x, residual, weight, bias, x_bias, *_ = front_inputs((4, 24), torch.float32, device)
    x[0], x_bias[3] = float("nan"), float("inf")
    y, total = step3_fused.residual_layer_norm(x, residual, weight, bias, x_bias, 1.0, rung=rung)
    assert torch.equal(total, residual)
    assert y.isfinite().all()


@every_rung
def test_without_a_front_nothing_has_changed(device, rung):
    """Evaluation keeps the bias and drops nothing, whatever state is given; a p that rounds to 0 drops nothing."""
    *four, x_bias, _, rng_state = front_inputs((4, 72), torch.bfloat16, device)
    function = functools.partial(step3_fused.residual_layer_norm, *four, rung=rung)
    plain, biased = function(), function(x_bias)
    assert not torch.equal(plain[1], biased[1])
    for one, other in (
        (plain, function(None, 0.0, rng_state)),
        (plain, function(dropout_p=0.7, training=False)),
        (plain, function(dropout_p=1e-6)),
        (biased, function(x_bias=x_bias, dropout_p=0.7, rng_state=rng_state, training=False)),
        (biased, function(x_bias, 0.0)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@testing.where(lambda rung: rung != "cpu")
@every_rung
@pytest.mark.parametrize("width", [4096, 4093])
def test_random_numbers_beyond_the_2_to_32th(width, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "40")
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    rows = (1 << 20) + (1 << 13)
    x, y, total = (testing.lazy_memory(rows * width, torch.bfloat16, device).view(rows, width) for _ in range(3))
    outs = {name: torch.empty(rows, device=device) for name in ("mean", "rstd")} | {"y": y, "sum": total}
    x_bias, flat = (torch.full((width,), c, dtype=torch.bfloat16, device=device) for c in (1, 0))
    ops.residual_layer_norm.out(x, x, flat, flat, x_bias, 0.5, torch.tensor(RNG_STATE), rung=rung, **outs)
    first = (rows - 1) * width
    begin = first // 8 * 8
    mask, factor = mask_and_factor((first - begin + width,), 0.5, torch.tensor(RNG_STATE), begin)
    assert torch.equal(total[-1].cpu().float(), mask[first - begin :] * factor)


# ---- gradients ----


@on_each_device
def test_the_backward_sees_the_mask_of_its_forward(device):
    x, residual, *_ = front_inputs((6, 64), torch.float32, device)
    weight, bias = torch.ones(64, device=device), torch.zeros(64, device=device)
    x.requires_grad_(), residual.requires_grad_()
    _, total = step3_fused.residual_layer_norm(x, residual, weight, bias, dropout_p=0.5)
    of_x, of_residual = torch.autograd.grad(total, (x, residual), torch.ones_like(total))
    assert torch.equal(of_x, ((total - residual) != 0) * 2.0)
    assert torch.equal(of_residual, torch.ones_like(total))


@every_rung
@each_front
def test_a_backward_is_the_same_whatever_rung_the_forward_had(x_bias, dropout_p, device, rung):
    """This step's kernel, then step 1's, which is called where there is a bias or dropout."""
    inputs = front_inputs((3, 64), torch.float32, device, x_bias=x_bias, dropout_p=dropout_p)
    leaves = [t.requires_grad_() for t in inputs[:5] if t is not None]
    outputs = step3_fused.residual_layer_norm(*inputs, rung=rung)
    before = [step.launch_counts() for step in (step3_fused, step1_simple)]
    torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs])
    for counts in before:
        counts["gpu" if device == "cuda" else "cpu"] += 1
    assert before == [step.launch_counts() for step in (step3_fused, step1_simple)]


def test_nothing_is_stored_of_the_mask_but_the_state():
    inputs = front_inputs((8, 64), torch.float32, "cpu")
    inputs[0].requires_grad_(), inputs[4].requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        step3_fused.residual_layer_norm(*inputs)
    assert sorted(saved) == [(2,), (8,), (8,), (8, 64), (64,)]  # state, mean, rstd, sum, weight


@on_a_gpu
def test_each_replay_of_a_cuda_graph_draws_anew(device):
    x = torch.ones(16, 64, device=device, requires_grad=True)
    zero, flat = torch.zeros_like(x), torch.zeros(64, device=device)

    def step():
        _, total = step3_fused.residual_layer_norm(x, zero, flat, flat, dropout_p=0.5)
        return total, *torch.autograd.grad(total.sum(), x)

    graph, (total, gradient) = testing.capture(step)
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        for _ in range(3):
            graph.replay()
            assert torch.equal(gradient, total)  # the backward in the graph sees the mask of this replay
            seen.append(total.detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(seen[:3]) for b in seen[:i])


# ---- as torch sees it ----


@on_each_device
def test_compiled_dropout_draws_anew_for_each_call_and_agrees_with_its_gradient(device):
    backend = "inductor" if device == "cuda" else "aot_eager"
    x = torch.ones(8, 64, device=device, requires_grad=True)
    zero, flat = torch.zeros_like(x), torch.zeros(64, device=device)

    def two(x):
        return [step3_fused.residual_layer_norm(x, zero, flat, flat, dropout_p=0.5)[1] for _ in range(2)]

    torch.compiler.reset()
    compiled = torch.compile(two, fullgraph=True, backend=backend)
    masks = []
    for _ in range(2):
        for total in compiled(x):
            (gradient,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
            assert torch.equal(gradient, total)
            masks.append(total.detach())
    assert not any(torch.equal(mask, other) for i, mask in enumerate(masks) for other in masks[:i])


# ---- bad input ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_what_is_refused(device):
    x, flat = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    other = "meta" if device != "meta" else "cpu"
    for exception, text, options in (
        (ValueError, "`x_bias` must have shape (3,), got (2,)", {"x_bias": flat[:2]}),
        (ValueError, "`x_bias` must have shape (3,), got (2, 3)", {"x_bias": x}),
        (TypeError, "`x_bias` must have the dtype of `x` (float32), got float16", {"x_bias": flat.half()}),
        (ValueError, "`x_bias` must be on the device of `x`", {"x_bias": torch.ones(3, device=other)}),
        (TypeError, "`rng_state` must be int64, got float32", {"dropout_p": 0.1, "rng_state": torch.ones(2)}),
        (
            ValueError,
            "`rng_state` must have shape (2,), got (3,)",
            {"dropout_p": 0.1, "rng_state": torch.ones(3).long()},
        ),
    ):
        with testing.raises(exception, f"{OP}: {text}"):
            step3_fused.residual_layer_norm(x, x, flat, flat, **options)
    for dropout_p in (-0.1, 1.1, float("nan")):
        for training in (True, False):
            with testing.raises(ValueError, f"{OP}: `dropout_p` must be from 0 to 1, got {dropout_p}"):
                step3_fused.residual_layer_norm(x, x, flat, flat, dropout_p=dropout_p, training=training)
        with testing.raises(ValueError, f"{OP}: `dropout_p` must be from 0 to 1, got {dropout_p}"):
            ops.residual_layer_norm(x, x, flat, flat, None, dropout_p, torch.tensor(RNG_STATE))
    with testing.raises(ValueError, f"{OP}: `rng_state` must be given where `dropout_p` is not 0"):
        ops.residual_layer_norm(x, x, flat, flat, None, 0.1)


def test_where_step_1_is_not_built_the_forward_says_so(monkeypatch):
    """Not only the backward; and where no gradient needs it, step 1 is not asked."""

    def missing():
        raise ImportError("step1_simple is not built")

    monkeypatch.setattr(step3_fused.shared, "step_1", missing)
    inputs = front_inputs((3, 8), torch.float32, "cpu")
    assert len(step3_fused.residual_layer_norm(*inputs)) == 2
    inputs[0].requires_grad_()
    with testing.raises(ImportError, "step1_simple is not built"):
        step3_fused.residual_layer_norm(*inputs)
    step3_fused.residual_layer_norm(*inputs[:4])


if __name__ == "__main__":
    testing.main(__file__)
