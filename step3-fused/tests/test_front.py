"""A bias and dropout in front of residual_layer_norm's addition, on every device there is: values, masks, gradients.

python tests/test_front.py            pytest's options may follow, such as -k v3_registers
"""

import functools

import pytest
import torch
import torch.nn.functional as F

import step1_simple  # whose mask it is, and whose ops are its way back
import step3_fused
from kernel_fusion import testing
from kernel_fusion.ops import wide
from kernel_fusion.testing.accuracy import as_tuple
from kernel_fusion.testing.philox import mask_and_factor

DTYPES = [*testing.DTYPES, torch.float64]
OP = "residual_layer_norm"
RNG_STATE = (1234, 8)  # seed and offset of dropout

ops = torch.ops.step3_fused


@functools.lru_cache(maxsize=4)
def kept(shape, dropout_p, rng_state):
    """What step 1's dropout keeps of a tensor, on the CPU: where its output is not 0 of ones."""
    one, zero = torch.ones(shape), torch.zeros(shape)
    flat = torch.zeros(shape[-1])
    return step1_simple.bias_dropout_residual(one, flat, zero, dropout_p, torch.tensor(rng_state)) != 0


def sum_of(x, residual, x_bias, dropout_p, rng_state):
    """Rounded once: as v1_separate rounds it, so that its mean is off by the same."""
    value = wide(x) if x_bias is None else wide(x) + wide(x_bias)
    threshold = round(65536 * dropout_p)
    if threshold > 0:
        factor = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
        value = torch.where(kept(tuple(x.shape), dropout_p, tuple(rng_state.tolist())).to(x.device), value * factor, 0)
    return (wide(residual) + value).to(x.dtype)


def formula(x, residual, weight, bias, x_bias=None, dropout_p=0.0, rng_state=None, eps=1e-5):
    """What the op returns, and mean and rstd of the sum."""
    total = sum_of(x, residual, x_bias, dropout_p, rng_state)
    variance = wide(total).var(-1, correction=0)
    y = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return y, total, wide(total).mean(-1), (variance + eps).rsqrt()


def inputs_of(shape, dtype, device, *, dropout_p=0.1, x_bias=True):
    x = (0.5 + testing.randn(shape, torch.float64, device) + testing.staircase(shape[-1], device)).to(dtype)
    residual = 0.5 + testing.randn(shape, dtype, device, seed=1)
    weight, bias, before = (testing.randn(shape[-1:], dtype, device, seed=s, scale=0.3) for s in (2, 3, 4))
    return (
        x,
        residual,
        1 + weight,
        bias,
        before if x_bias else None,
        dropout_p,
        torch.tensor(RNG_STATE) if dropout_p else None,
    )


def check(inputs, rung, **options):
    return testing.check_contract(
        step3_fused,
        OP,
        inputs,
        rung,
        reference=formula,
        eager=formula,
        all_outputs={"return_statistics": True},
        **options,
    )


def differentiable(inputs, **options):
    """The op of its floating tensors, and these."""
    variables = [t.requires_grad_() for t in inputs[:5] if t is not None]
    x_bias, dropout_p, rng_state = inputs[4:]

    def function(x, residual, weight, bias, *given, function=step3_fused.residual_layer_norm):
        before = given[0] if x_bias is not None else None
        return function(x, residual, weight, bias, before, dropout_p, rng_state, **options)

    return function, variables


every_rung = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step3_fused", OP))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
on_a_gpu = pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
# with and without a bias, with some of x dropped, none and all
each_front = pytest.mark.parametrize(
    ("x_bias", "dropout_p"),
    [(True, 0.1), (True, 0.0), (False, 0.1), (True, 1.0)],
    ids=["bias-dropout", "bias", "dropout", "bias-all"],
)


# ---- the contract of correctness ----


@every_rung
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 7, 31, 33, 64, 127, 129, 760, 768, 1023, 1600, 2049, 4096])
def test_any_width(width, dtype, device, rung):
    check(inputs_of((5, width), dtype, device), rung, layouts=width < 1600)


@every_rung
@every_dtype
@each_front
@pytest.mark.parametrize("width", [33, 72, 768])
def test_any_front(width, x_bias, dropout_p, dtype, device, rung):
    check(inputs_of((6, width), dtype, device, x_bias=x_bias, dropout_p=dropout_p), rung, layouts=width == 72)


@every_rung
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (257, 3), (67, 40), (2, 8192), (2, 8191)], ids=str)
def test_any_shape(shape, device, rung):
    """Of a row or of many, over several blocks; rows that begin within the eight numbers of a call."""
    for dtype in (torch.float32, torch.bfloat16):
        check(inputs_of(shape, dtype, device), rung, layouts=shape[-1] < 1000)


@every_rung
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16384, 12288, 8193])
def test_rows_of_many_warps(width, dtype, device, rung):
    inputs = inputs_of((2, width), dtype, device)
    if rung == "v2_fused":
        with testing.raises(ValueError, f"{OP}: rung 'v2_fused' takes width ≤ 8192, got {width}"):
            step3_fused.residual_layer_norm(*inputs, rung=rung)
    else:
        check(inputs, rung, layouts=False)


@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_wherever_it_lies(dtype, device, rung):
    check(inputs_of((2, 3, 64), dtype, device), rung, alone=True, layouts=False)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step3_fused.rungs(OP, "cpu"):
        for shape in ((7, 96), (3, 2056), (3, 65)):
            check(inputs_of(shape, torch.bfloat16, "cpu"), rung, layouts=False)


@every_rung
def test_runs_agree_to_the_last_bit(device, rung):
    for dtype in (torch.float32, torch.bfloat16):
        function = functools.partial(step3_fused.residual_layer_norm, rung=rung, return_statistics=True)
        testing.check_reruns(function, *inputs_of((40, 520), dtype, device))


@every_rung
def test_a_launch_is_still_a_launch(device, rung):
    """The front has none of its own."""
    inputs = inputs_of((3, 64), torch.float32, device)
    if device == "cpu" and rung != "cpu":
        before = step3_fused.emulated_kernels()
        step3_fused.residual_layer_norm(*inputs, rung=rung)
        assert step3_fused.emulated_kernels() - before == (2 if rung == "v1_separate" else 1)


@every_rung
def test_empty_tensors(device, rung):
    x, residual, *rest = inputs_of((3, 8), torch.float32, device)
    y, total = step3_fused.residual_layer_norm(x[:0], residual[:0], *rest, rung=rung)
    assert y.shape == total.shape == (0, 8)


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
    x, residual, weight, bias, x_bias, *_ = inputs_of((4, 24), torch.float32, device)
    x[0], x_bias[3] = float("nan"), float("inf")
    y, total = step3_fused.residual_layer_norm(x, residual, weight, bias, x_bias, 1.0, rung=rung)
    assert torch.equal(total, residual)
    assert y.isfinite().all()


@every_rung
def test_without_a_front_nothing_has_changed(device, rung):
    """Evaluation keeps the bias and drops nothing, whatever state is given; a p that rounds to 0 drops nothing."""
    *four, x_bias, _, rng_state = inputs_of((4, 72), torch.bfloat16, device)
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


@on_each_device
def test_dropout_draws_a_state_of_its_own(device):
    *five, _, _ = inputs_of((6, 64), torch.float32, device)
    function = functools.partial(step3_fused.residual_layer_norm, *five)
    torch.manual_seed(3)
    first, second = (function(0.5)[1] for _ in range(2))
    torch.manual_seed(3)
    function(0.5, training=False)  # moves nothing on
    function(0.0)
    assert torch.equal(function(0.5)[1], first)
    assert not torch.equal(first, second)


@on_a_gpu
@every_dtype
def test_a_state_in_the_gpus_memory_gives_the_same(dtype, device):
    *inputs, rng_state = inputs_of((40, 1600), dtype, device)
    for rung in step3_fused.rungs(OP, device):
        here, there = (step3_fused.residual_layer_norm(*inputs, s, rung=rung) for s in (rng_state, rng_state.cuda()))
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize(
    ("device", "rung"),
    [dropout_p for dropout_p in testing.device_rungs("step3_fused", OP) if dropout_p.values[1] != "cpu"],
)
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
@each_front
def test_gradients_are_those_of_the_formula(x_bias, dropout_p, device):
    inputs = inputs_of((3, 3), torch.float64, device, x_bias=x_bias, dropout_p=dropout_p)
    function, variables = differentiable(inputs)
    assert torch.autograd.gradcheck(function, variables)
    function, variables = differentiable(inputs, eps=0.1, return_statistics=True)
    assert torch.autograd.gradcheck(function, variables)


@each_front
def test_gradients_of_gradients(x_bias, dropout_p):
    function, variables = differentiable(inputs_of((3, 3), torch.float64, "cpu", x_bias=x_bias, dropout_p=dropout_p))
    assert torch.autograd.gradgradcheck(function, variables)


@on_each_device
@each_front
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_gradients_are_as_good_as_eagers(dtype, x_bias, dropout_p, device):
    inputs = inputs_of((40, 96), dtype, device, x_bias=x_bias, dropout_p=dropout_p)
    function, variables = differentiable(inputs)

    def gradients(variables, **options):
        variables = [t.detach().requires_grad_() for t in variables]
        outputs = function(*variables, **options)[:2]
        grads = [testing.randn(o.shape, dtype, device, seed=20 + i).to(o.dtype) for i, o in enumerate(outputs)]
        return torch.autograd.grad(outputs, variables, grads)

    eager, exact = (gradients(given, function=formula) for given in (variables, [t.double() for t in variables]))
    for g, e, x in zip(gradients(variables), eager, exact, strict=True):
        assert g.dtype == dtype
        assert (g.double() - x).abs().max() <= 2 * (e.double() - x).abs().max() + 1e-5 * x.abs().max()


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_second_gradients_are_as_exact_as_the_dtype_allows(dtype, device):
    inputs = inputs_of((3, 6), dtype, device, dropout_p=0.3)
    function, variables = differentiable(inputs)
    reference = functools.partial(function, function=lambda *given: formula(*given)[:2])
    testing.check_second_gradients(function, reference, tuple(variables), None)


@on_each_device
@each_front
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(x_bias, dropout_p, device):
    function, variables = differentiable(inputs_of((3, 16), torch.float32, device, x_bias=x_bias, dropout_p=dropout_p))
    testing.check_each_input_alone(function, tuple(t.detach() for t in variables))


@on_each_device
def test_the_backward_sees_the_mask_of_its_forward(device):
    x, residual, *_ = inputs_of((6, 64), torch.float32, device)
    weight, bias = torch.ones(64, device=device), torch.zeros(64, device=device)
    x.requires_grad_(), residual.requires_grad_()
    _, total = step3_fused.residual_layer_norm(x, residual, weight, bias, dropout_p=0.5)
    of_x, of_residual = torch.autograd.grad(total, (x, residual), torch.ones_like(total))
    assert torch.equal(of_x, ((total - residual) != 0) * 2.0)
    assert torch.equal(of_residual, torch.ones_like(total))


@every_rung
def test_a_backward_is_the_same_whatever_rung_the_forward_had(device, rung):
    """This step's kernel, then step 1's; without a bias and dropout step 1 is not asked."""
    backend = "gpu" if device == "cuda" else "cpu"
    for options, more in (
        ({}, 1),
        ({"x_bias": False}, 1),
        ({"dropout_p": 0.0}, 1),
        ({"x_bias": False, "dropout_p": 0.0}, 0),
    ):
        function, variables = differentiable(inputs_of((3, 64), torch.float32, device, **options), rung=rung)
        outputs = function(*variables)
        before, of_step_1 = step3_fused.launch_counts(), step1_simple.launch_counts()
        torch.autograd.grad(outputs, variables, [torch.ones_like(out) for out in outputs])
        before[backend] += 1
        of_step_1[backend] += more
        assert step3_fused.launch_counts() == before
        assert step1_simple.launch_counts() == of_step_1


def test_nothing_is_stored_of_the_mask_but_the_state():
    function, variables = differentiable(inputs_of((8, 64), torch.float32, "cpu"))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        function(*variables)
    assert sorted(saved) == [(2,), (8,), (8,), (8, 64), (64,)]  # state, mean, rstd, sum, weight


def test_forward_mode_is_refused():
    function, variables = differentiable(inputs_of((3, 8), torch.float32, "cpu"))
    testing.check_tangents_are_refused(function, tuple(t.detach() for t in variables))


@on_a_gpu
def test_forward_and_backward_in_a_cuda_graph(device):
    *inputs, rng_state = inputs_of((256, 768), torch.bfloat16, device)
    function, variables = differentiable((*inputs, rng_state.cuda()))
    grad = testing.randn((256, 768), torch.bfloat16, device, seed=5)
    testing.check_gradients_in_a_cuda_graph(lambda *given: function(*given)[0], variables, grad)


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


@every_rung
def test_the_op_is_registered_as_torch_wants_it(device, rung):
    for options in ({}, {"dropout_p": 0.0}, {"x_bias": False}):
        testing.check_op(step3_fused, OP, inputs_of((3, 6), torch.float32, device, **options), {"rung": rung})


@on_each_device
def test_the_op_on_transposed_tensors_is_registered_as_torch_wants_it(device):
    tensors = inputs_of((3, 6), torch.bfloat16, device)
    testing.check_op(step3_fused, OP, (*map(testing.transposed, tensors[:2]), *tensors[2:]))


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


@each_front
def test_gradients_under_torch_compile(x_bias, dropout_p):
    function, variables = differentiable(inputs_of((3, 16), torch.float32, "cpu", x_bias=x_bias, dropout_p=dropout_p))

    def loss(*variables):
        return sum(o.square().sum() for o in function(*variables))

    eager = torch.autograd.grad(loss(*variables), variables)
    torch.compiler.reset()
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*variables), variables)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want)


@on_each_device
def test_autocast_casts_each_tensor(device):
    *tensors, dropout_p, rng_state = inputs_of((3, 16), torch.float32, device)
    rounded = [t.bfloat16() for t in tensors]  # the same numbers in either dtype
    want = step3_fused.residual_layer_norm(*(t.float() for t in rounded), dropout_p, rng_state)
    for other in range(5):
        for of, rest in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            mixed = [t.to(of if i == other else rest).requires_grad_() for i, t in enumerate(rounded)]
            with torch.autocast(device, torch.bfloat16):
                got = step3_fused.residual_layer_norm(*mixed, dropout_p, rng_state)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            grads = torch.autograd.grad(got[0].square().sum(), mixed)
            assert [g.dtype for g in grads] == [t.dtype for t in mixed]


def test_a_backward_inside_autocast_computes_the_same():
    function, variables = differentiable(inputs_of((3, 16), torch.float32, "cpu"))

    def loss():
        return sum(o.square().sum() for o in function(*variables))

    outside = torch.autograd.grad(loss(), variables)
    value = loss()
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(value, variables)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


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


@on_each_device
def test_an_output_that_shares_memory_with_anything_is_refused(device):
    testing.check_apart(step3_fused, OP, inputs_of((3, 6), torch.float32, device))


def test_where_step_1_is_not_built_the_forward_says_so(monkeypatch):
    """Not only the backward; and where no gradient needs it, step 1 is not asked."""

    def missing():
        raise ImportError("step1_simple is not built")

    monkeypatch.setattr(step3_fused.shared, "step_1", missing)
    inputs = inputs_of((3, 8), torch.float32, "cpu")
    assert len(as_tuple(step3_fused.residual_layer_norm(*inputs))) == 2
    function, variables = differentiable(inputs)
    with testing.raises(ImportError, "step1_simple is not built"):
        function(*variables)
    step3_fused.residual_layer_norm(*variables[:4])


if __name__ == "__main__":
    testing.main(__file__)
