"""cross_entropy and linear_cross_entropy, on every device: against float64, eager PyTorch and the rung before."""

import math

import pytest
import torch
import torch.nn.functional as F
from model.blocks import FORMS
from torch.profiler import ProfilerActivity, profile

import step4_integration
from kernel_fusion import testing
from kernel_fusion.ops import wide
from kernel_fusion.testing.memory import same_bits
from step4_integration import cross_entropy, cross_entropy_backward_, linear_cross_entropy
from step4_integration.testing import DTYPES, every_dtype, on_each_device, ops

every_rung = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step4_integration", "cross_entropy"))


def composed(logits, targets, ignore_index=-100):
    """Loss, lse and gradient by PyTorch's operations."""
    x = wide(logits)
    counts = (targets != ignore_index).unsqueeze(1)
    onehot = F.one_hot(targets.where(counts[:, 0], 0), x.shape[1])
    grad = ((x.softmax(1) - onehot) * counts).to(logits.dtype)
    return F.cross_entropy(x, targets, ignore_index=ignore_index, reduction="none"), x.logsumexp(1), grad


def rows_of(rows, width, dtype, device, *, ignored=()):
    """Logits and targets; the last row's target is the last column."""
    targets = torch.randint(width, (rows,), generator=torch.Generator().manual_seed(0))
    targets[-1] = width - 1
    targets[list(ignored)] = -100
    return 3 * testing.randn((rows, width), dtype, device), targets.to(device)


def check(inputs, rung, **options):
    options = {"kwargs": {}, "all_outputs": {"return_grad": True}} | options
    step = step4_integration
    testing.check_contract(step, "cross_entropy", inputs, rung, reference=composed, eager=composed, **options)


@every_rung
@every_dtype
@pytest.mark.parametrize(
    ("rows", "width"), [(1, 1), (3, 31), (2, 32), (4, 33), (3, 127), (2, 768), (5, 1023), (2, 1600), (1, 8200)]
)
def test_cross_entropy_is_that_of_float64(rows, width, dtype, device, rung):
    check(rows_of(rows, width, dtype, device), rung)


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_finds_each_tensor_wherever_it_lies(dtype, device, rung):
    check(rows_of(5, 64, dtype, device), rung, alone=True, layouts=False)


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_of_gpt2s_vocabulary(dtype, device, rung):
    """Rows that begin anywhere; from v3 on each thread loads several batches."""
    check(rows_of(3, 50257, dtype, device, ignored=[1]), rung, layouts=False)


@on_each_device
@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_cross_entropys_threads_may_run_in_any_order(schedule, device, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step4_integration.rungs("cross_entropy", device):
        check(rows_of(2, 4099, torch.bfloat16, device), rung, layouts=False)


@every_rung
@pytest.mark.parametrize("ignore_index", [-100, 2, 2**40])
def test_an_ignored_row_has_no_loss_and_no_gradient_whatever_it_holds(ignore_index, device, rung):
    logits, targets = rows_of(6, 37, torch.float32, device)
    targets[[1, 4]] = ignore_index
    targets[0] = 5
    check((logits, targets), rung, kwargs={"ignore_index": ignore_index})
    logits[1] = math.nan
    logits[4] = math.inf
    loss = cross_entropy_backward_(logits, targets, ignore_index=ignore_index, rung=rung)
    assert (loss[[1, 4]] == 0).all()
    assert (logits[[1, 4]] == 0).all()
    assert loss.isfinite().all()
    assert logits.isfinite().all()


@every_rung
@every_dtype
def test_extreme_logits(dtype, device, rung):
    logits, targets = rows_of(7, 43, dtype, device)
    logits[0] *= 1e4 if dtype != torch.float16 else 1e3
    logits[1] = 1e4
    logits[2] = -3e4
    logits[3, :-1] = -math.inf
    logits[4, targets[4]] = -math.inf
    logits[5] = -math.inf
    logits[6, 7] = math.inf
    loss, lse, grad = cross_entropy(logits, targets, return_grad=True, rung=rung)
    expected = composed(logits.double(), targets)
    torch.testing.assert_close(loss[:5].double(), expected[0][:5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:5].double(), expected[1][:5], rtol=1e-6, atol=1e-6)
    tolerance = {"rtol": 0, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(grad[:5].double(), expected[2][:5], **tolerance)
    for row in (5, 6):  # no maximum that could be subtracted
        assert loss[row].isnan()
        assert grad[row].isnan().any()
    assert lse[5] == -math.inf


@every_rung
def test_a_nan_reaches_the_loss(device, rung):
    logits, targets = rows_of(3, 300, torch.float32, device)
    for column in (0, 5, 299):
        with_nan = logits.clone()
        with_nan[1, column] = math.nan
        loss, lse, grad = cross_entropy(with_nan, targets, return_grad=True, rung=rung)
        assert loss.isnan().tolist() == lse.isnan().tolist() == [False, True, False]
        assert grad[1].isnan().all()
        assert not grad[[0, 2]].isnan().any()


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 37])
def test_in_place_the_logits_become_their_gradient_and_nothing_beside_them(width, dtype, device, rung):
    logits, targets = rows_of(5, width, dtype, device, ignored=[3])
    loss, _, grad = cross_entropy(logits, targets, return_grad=True, rung=rung)
    for beside in (0, 3, 8):
        memory = torch.full((5, width + beside), math.nan, dtype=dtype, device=device)
        rows = memory[:, :width].copy_(logits)
        got = cross_entropy_backward_(rows, targets, rung=rung)
        # The order of a sum depends on where the row begins.
        tolerance = {"rtol": 2 * torch.finfo(dtype).eps if beside else 0, "atol": 1e-6 if beside else 0}
        torch.testing.assert_close(got, loss, **tolerance)
        torch.testing.assert_close(rows, grad, **tolerance)
        assert memory[:, width:].isnan().all()

    testing.check_inside(
        step4_integration,
        lambda logits, targets: cross_entropy_backward_(
            logits.clone() if logits.stride(1) > 1 else logits, targets, rung=rung
        ),
        logits=logits,
        targets=targets,
    )


@every_rung
def test_rows_beyond_32_bits(device, rung):
    distance = (1 << 32) + 4096
    memory = testing.lazy_memory(distance + 4096, torch.float16, device)
    near, targets = rows_of(2, 40, torch.float16, device)
    far = memory.as_strided((2, 40), (distance, 1)).copy_(near)
    expected = cross_entropy(near, targets, return_grad=True, rung=rung)
    same_bits(cross_entropy(far, targets, return_grad=True, rung=rung), expected, "rows far apart")
    assert torch.equal(cross_entropy_backward_(far, targets, rung=rung), expected[0])
    assert torch.equal(far, expected[2])


@pytest.mark.parametrize("rung", step4_integration.rungs("cross_entropy", "cpu"))
def test_a_bad_target_is_an_error_on_the_cpu(rung):
    logits, targets = rows_of(4, 9, torch.float32, "cpu")
    for bad in (9, -1, 2**40):
        targets[2] = bad
        says = ("`targets` must be from 0 to 8, the columns of the logits, or -100", f"got {bad} at 2")
        with testing.raises(ValueError, "cross_entropy: ", *says):
            cross_entropy(logits, targets, rung=rung)
        with testing.raises(ValueError, "cross_entropy_backward_: ", *says):
            cross_entropy_backward_(logits, targets, rung=rung)
        with testing.raises(ValueError, "linear_cross_entropy: ", *says):
            linear_cross_entropy(logits, logits.new_ones(9, 9), targets, rung=rung)


@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step4_integration", "cross_entropy") if p.values[0] == "cuda"]
)
@every_dtype
def test_a_bad_target_is_nan_on_a_gpu(dtype, device, rung):
    """kernels_test.cpp shows the same under emulation, where Python's host checks come first."""
    logits, targets = rows_of(4, 300, dtype, device)
    expected = cross_entropy(logits, targets, return_grad=True, rung=rung)
    for bad in (300, -1, 2**40):
        targets[2] = bad
        loss, lse, grad = cross_entropy(logits, targets, return_grad=True, rung=rung)
        assert loss[2].isnan()
        assert grad[2].isnan().all()
        assert torch.equal(lse, expected[1])
        for got, want in ((loss, expected[0]), (grad, expected[2])):
            assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])


@every_rung
def test_gradient_of_cross_entropy(device, rung):
    logits, targets = rows_of(4, 7, torch.float64, device, ignored=[1])

    def function(logits):
        return cross_entropy(logits, targets, rung=rung)[0]

    assert torch.autograd.gradcheck(function, logits.requires_grad_())
    testing.check_tangents_are_refused(function, (logits,))
    with testing.raises(NotImplementedError, "cross_entropy: there are no gradients of gradients"):
        torch.autograd.grad(function(logits).sum(), logits, create_graph=True)


@on_each_device
@every_dtype
def test_gradients_of_cross_entropy_are_as_exact_as_the_dtype_allows(dtype, device):
    logits, targets = rows_of(4, 50, dtype, device)
    above = testing.randn((4,), torch.float32, device, seed=5)
    loss = cross_entropy(logits.requires_grad_(), targets)[0]
    loss.backward(above.to(loss.dtype))
    exact = composed(logits.detach().double(), targets)[2] * above.double().unsqueeze(1)
    assert logits.grad.dtype == dtype
    assert (logits.grad - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()


# ---- behind the LM head ----


def layer(rows, width, vocab, dtype, device, *, ignored=()):
    hidden = testing.randn((rows, width), dtype, device, seed=1)
    weight = testing.randn((vocab, width), dtype, device, seed=2)
    return hidden, weight, rows_of(rows, vocab, dtype, device, ignored=ignored)[1]


def linear_composed(hidden, weight, targets, **options):
    return F.cross_entropy(wide(F.linear(hidden, weight)), targets, **options)


def with_gradients(function, hidden, weight, targets, above=1.0, **options):
    variables = [t.detach().requires_grad_() for t in (hidden, weight)]
    loss = function(*variables, targets, **options)
    return loss.detach(), *torch.autograd.grad(loss * above, variables)


@every_rung
@every_dtype
@pytest.mark.parametrize("chunk", [None, 1, 4, 5, 13, 100])
def test_linear_cross_entropy_is_that_of_float64(chunk, dtype, device, rung):
    """The error of the loss and of both gradients is at most twice that of PyTorch's operations, and one rounding."""
    inputs = layer(13, 24, 37, dtype, device, ignored=[0, 7])
    got = with_gradients(linear_cross_entropy, *inputs, above=-1.7, chunk=chunk, rung=rung)
    theirs = with_gradients(linear_composed, *inputs, above=-1.7)
    exact = with_gradients(linear_composed, *(t.double() if t.is_floating_point() else t for t in inputs), above=-1.7)
    assert got[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, ours, other, want in zip(("loss", "hidden", "weight"), got, theirs, exact, strict=True):
        if name != "loss":
            assert ours.dtype == dtype
        roundings = 1 if ours.element_size() == 2 else 8
        allowed = 2 * (other - want).abs().max() + roundings * torch.finfo(ours.dtype).eps * want.abs().max()
        error = (ours - want).abs().max()
        assert error <= allowed, f"{name} is {error:.3g} off, allowed are {allowed:.3g}"


@every_rung
def test_gradient_of_linear_cross_entropy(device, rung):
    hidden, weight, targets = layer(5, 3, 7, torch.float64, device, ignored=[1])
    variables = (hidden.requires_grad_(), weight.requires_grad_())

    def function(hidden, weight):
        return linear_cross_entropy(hidden, weight, targets, chunk=2, rung=rung)

    assert torch.autograd.gradcheck(function, variables)
    testing.check_each_input_alone(function, variables)
    testing.check_tangents_are_refused(function, variables)
    with testing.raises(NotImplementedError, "linear_cross_entropy: there are no gradients of gradients"):
        torch.autograd.grad(function(*variables), variables, create_graph=True)


@every_rung
def test_two_runs_of_linear_cross_entropy_agree_to_the_last_bit(device, rung, monkeypatch):
    inputs = layer(50, 24, 70, torch.bfloat16, device)
    once = with_gradients(linear_cross_entropy, *inputs, chunk=16, rung=rung)
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "reverse")
    same_bits(with_gradients(linear_cross_entropy, *inputs, chunk=16, rung=rung), once, "two runs")


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_ignored_change_nothing(dtype, device):
    hidden, weight, targets = layer(12, 16, 33, dtype, device, ignored=[0, 5, 11])
    counted = targets != -100
    loss, grad_hidden, grad_weight = with_gradients(linear_cross_entropy, hidden, weight, targets)
    fewer = with_gradients(linear_cross_entropy, hidden[counted], weight, targets[counted])
    torch.testing.assert_close((loss, grad_hidden[counted], grad_weight), fewer)
    assert (grad_hidden[~counted] == 0).all()


@on_each_device
def test_a_row_that_is_ignored_has_no_gradient_even_where_it_is_nan(device):
    hidden, weight, targets = layer(3, 16, 33, torch.bfloat16, device, ignored=[1])
    hidden[1] = torch.nan
    _, grad_hidden, _ = with_gradients(linear_cross_entropy, hidden, weight, targets)
    assert (grad_hidden[1] == 0).all()
    assert (grad_hidden[::2] != 0).any(1).all()


@on_each_device
@pytest.mark.parametrize("rows", [0, 5])
def test_the_mean_over_no_targets_is_nan_and_its_gradients_are_0(rows, device):
    hidden, weight, _ = layer(max(rows, 1), 16, 33, torch.bfloat16, device)
    targets = torch.full((rows,), -100, device=device)
    loss, *grads = with_gradients(linear_cross_entropy, hidden[:rows], weight, targets)
    assert loss.isnan()
    assert linear_composed(hidden[:rows], weight, targets).isnan()
    assert grads[0].shape == (rows, 16)
    assert all((grad == 0).all() for grad in grads)


@on_each_device
def test_a_scaled_loss_scales_gradients_that_float16_would_lose(device):
    """1/rows is not in what is stored in float16: of 5000 rows it would leave the gradients few digits."""
    hidden, weight, targets = layer(5000, 4, 11, torch.float16, device)
    got = with_gradients(linear_cross_entropy, hidden, 1e-3 * weight, targets, above=2.0**12)
    exact = with_gradients(linear_composed, hidden.double(), (1e-3 * weight).double(), targets, above=2.0**12)
    for ours, want in zip(got[1:], exact[1:], strict=True):
        assert (ours - want).abs().max() <= 2e-3 * want.abs().max()


@on_each_device
def test_gradients_add_up_over_several_backward_passes(device):
    hidden, weight, targets = layer(6, 16, 33, torch.float32, device)
    loss = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets)
    (2 * loss).backward(retain_graph=True)
    once = weight.grad.clone()
    (2 * loss).backward()
    torch.testing.assert_close(weight.grad, 2 * once, rtol=0, atol=0)


@on_each_device
def test_autocast_makes_both_factors_its_dtype(device):
    hidden, weight, targets = layer(6, 16, 33, torch.float32, device)
    expected = with_gradients(linear_cross_entropy, hidden.bfloat16(), weight.bfloat16(), targets)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = with_gradients(linear_cross_entropy, hidden, weight, targets)
    assert [t.dtype for t in got] == [torch.float32] * 3
    same_bits(got, [t.float() for t in expected], "under autocast")


def allocations(call):
    """The bytes of each allocation on the CPU, by torch's own allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]


def test_no_more_logits_exist_than_a_chunk_in_the_dtype_of_hidden():
    rows, width, vocab, chunk = 64, 8, 1003, 16
    hidden, weight, targets = layer(rows, width, vocab, torch.bfloat16, "cpu")
    assert rows * vocab * 4 in allocations(lambda: linear_composed(hidden, weight, targets))
    columns = 1024  # rows of whole 128 bytes
    of_all_rows = {rows * width * size for width in (vocab, columns) for size in (2, 4)}
    for given, most in ((chunk, chunk), (None, rows)):
        found = allocations(lambda: linear_cross_entropy(hidden, weight, targets, chunk=given))  # noqa: B023
        assert found.count(columns * most * 2) == 1
        assert not of_all_rows.intersection(found) - {columns * most * 2}

    # With gradients; in float32, for which the CPU's products need no memory of their own.
    inputs = hidden.float(), weight.float(), targets
    found = allocations(lambda: with_gradients(linear_cross_entropy, *inputs, chunk=chunk))
    logits, head, grad_weight = columns * chunk * 4, columns * width * 4, vocab * width * 4
    largest = sorted((size for size in found if size >= grad_weight), reverse=True)
    assert largest[:3] == [logits, head, head]  # the weight with more rows, and its gradient
    assert set(largest[3:]) == {grad_weight}


@on_each_device
def test_gradients_that_nobody_needs_are_not_computed(device):
    hidden, weight, targets = layer(6, 16, 33, torch.float32, device)
    for keep_hidden, keep_weight in ((False, False), (True, False), (False, True)):
        options = {"keep_hidden": keep_hidden, "keep_weight": keep_weight}
        *_, grad_hidden, grad_weight = ops.linear_cross_entropy(hidden, weight, targets, **options)
        assert grad_hidden.shape == ((6, 16) if keep_hidden else (0,))
        assert grad_weight.shape == ((33, 16) if keep_weight else (0,))
    loss = ops.linear_cross_entropy(hidden.requires_grad_(), weight, targets, keep_hidden=False)[0]
    with testing.raises(RuntimeError, "the gradient of `hidden` was not kept"):
        loss.backward()


@pytest.mark.parametrize("blocks", FORMS)
@on_each_device
def test_the_models_loss_is_that_of_its_logits(blocks, device):
    from gpt2_model import GPT2, Config

    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.2}
    model = GPT2(Config(**sizes, blocks=blocks, rungs={"cross_entropy": "auto"})).double().to(device)
    ids = torch.randint(97, (3, 12), device=device)
    targets = torch.randint(97, (3, 12), device=device)
    targets[1, :4] = -100
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    expected = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    loss = model.loss(ids, targets)
    torch.testing.assert_close([loss, *torch.autograd.grad(loss, list(model.parameters()))], expected)


# ---- the ops as torch sees them ----


@every_rung
def test_the_ops_are_registered_as_torch_wants_them(device, rung):
    logits, targets = rows_of(5, 33, torch.float32, device, ignored=[2])
    testing.check_op(step4_integration, "cross_entropy", (logits, targets), {"rung": rung})
    torch.library.opcheck(ops.cross_entropy_backward_.default, (logits.clone(), targets), {"rung": rung})
    inputs = layer(5, 8, 33, torch.bfloat16, device, ignored=[2])
    testing.check_op(step4_integration, "linear_cross_entropy", inputs, {"chunk": 2, "rung": rung})


@on_each_device
def test_gradients_through_torch_compile(device):
    hidden, weight, targets = layer(6, 16, 33, torch.float32, device)
    expected = with_gradients(linear_cross_entropy, hidden, weight, targets)
    torch.compiler.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    torch.testing.assert_close(with_gradients(compiled, hidden, weight, targets), expected)


@on_each_device
def test_outputs_that_share_memory_with_anything_are_refused(device):
    testing.check_apart(step4_integration, "cross_entropy", rows_of(5, 8, torch.float32, device))
    testing.check_apart(step4_integration, "linear_cross_entropy", layer(5, 8, 9, torch.float32, device))


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_cross_entropy_refuses(device):
    logits, targets = (t.to(device) for t in rows_of(4, 9, torch.float32, "cpu"))
    for function in (cross_entropy, cross_entropy_backward_):
        op = function.__name__

        def refused(exception, *fragments, logits=logits, targets=targets, **kwargs):
            with testing.raises(exception, *fragments):
                function(logits, targets, **kwargs)  # noqa: B023

        refused(TypeError, f"{op}: `logits` must be float32", "got int64", logits=logits.long())
        refused(ValueError, f"{op}: `logits` must have 2 dimensions, got 1 (shape (9,))", logits=logits[0])
        refused(ValueError, f"{op}: the last dimension of `logits` must not be 0", logits=logits[:, :0])
        refused(TypeError, f"{op}: `targets` must be int64, got int32", targets=targets.int())
        refused(ValueError, f"{op}: `targets` must have 1 dimension, got 2", targets=targets[None])
        refused(ValueError, f"{op}: `targets` must have shape (4,), got (3,)", targets=targets[:3])
        if device != "meta":
            refused(ValueError, f"{op}: `rung` must be 'auto' or one of", "'v3_shared'", "'v9'", rung="v9")
    if device != "meta":
        for strided in (logits.t().contiguous().t(), logits[:1].expand(4, 9)):
            with testing.raises(ValueError, "cross_entropy_backward_: `logits` must have rows in one piece"):
                cross_entropy_backward_(strided, targets)
    with testing.raises(RuntimeError, "`logits` must not require gradients"):
        cross_entropy_backward_(logits.clone().requires_grad_(), targets)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_linear_cross_entropy_refuses(device):
    hidden, weight, targets = (t.to(device) for t in layer(5, 8, 9, torch.float32, "cpu"))

    def refused(exception, *fragments, hidden=hidden, weight=weight, targets=targets, **kwargs):
        with testing.raises(exception, *fragments):
            linear_cross_entropy(hidden, weight, targets, **kwargs)

    op = "linear_cross_entropy"
    refused(ValueError, f"{op}: `hidden` must have 2 dimensions", hidden=hidden[None])
    refused(TypeError, f"{op}: `hidden` must be float32", "got int64", hidden=hidden.long())
    refused(TypeError, f"{op}: `weight` must have the dtype of `hidden` (float32)", weight=weight.half())
    refused(ValueError, f"{op}: `weight` must have shape (9, 8), got (9, 7)", weight=weight[:, :7])
    refused(ValueError, f"{op}: `weight` must not be empty, got shape (0, 8)", weight=weight[:0])
    refused(TypeError, f"{op}: `targets` must be int64, got int32", targets=targets.int())
    refused(ValueError, f"{op}: `targets` must have shape (5,), got (4,)", targets=targets[:4])
    for chunk in (0, -3):
        refused(ValueError, f"{op}: `chunk` must be at least 1, got {chunk}", chunk=chunk)
    if device != "meta":
        refused(ValueError, f"{op}: `rung` must be 'auto' or one of", "'v9'", rung="v9")


@every_rung
def test_no_rows_give_no_losses(device, rung):
    logits, targets = rows_of(1, 9, torch.float32, device)
    for found in (
        cross_entropy(logits[:0], targets[:0], rung=rung)[0],
        cross_entropy_backward_(logits[:0], targets[:0], rung=rung),
    ):
        assert found.shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_too_long_for_shared_memory_go_to_another_rung():
    logits, targets = rows_of(2, 150_001, torch.float32, "cuda")
    with testing.raises(ValueError, "'v3_shared' keeps a row in shared memory", "these can: 'v1_naive', 'v2_online'"):
        cross_entropy(logits, targets, rung="v3_shared")
    check((logits, targets), "auto", layouts=False)
