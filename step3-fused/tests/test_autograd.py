"""Each op as torch sees it: its gradients, registered, compiled, under autocast, in a CUDA graph."""

import pytest
import torch

import step2_attention
import step3_fused
from kernel_fusion import testing
from step3_fused.attention_testing import (
    FORMULAS,
    attention_inputs,
    attention_ops,
    call,
    every_op,
    every_op_and_rung,
    half_types,
    inputs_of,
    on_a_gpu,
    on_each_device,
)
from step3_fused.cases_testing import (
    CASES,
    NORMS,
    differentiable,
    every_case,
    every_forward,
    every_norm,
    every_rung_of_each_case,
)

# ---- gradients ----


@on_each_device
@pytest.mark.parametrize(
    "name", [name for name, case in NORMS.items() if case.op in ("layer_norm", "residual_layer_norm")]
)
def test_gradients_of_rows_are_those_of_finite_differences(name, device):
    function, variables = differentiable(name, torch.float64, device)
    assert torch.autograd.gradcheck(function, variables)
    function, variables = differentiable(name, torch.float64, device, eps=0.1, return_statistics=True)
    assert torch.autograd.gradcheck(function, variables)
    if device == "cpu":
        function, variables = differentiable(name, torch.float64, device)
        assert torch.autograd.gradgradcheck(function, variables)


@on_each_device
@attention_ops
def test_gradients_of_attention_are_those_of_finite_differences(op, device):
    options = {"causal": True, "scale": 0.7}
    # Of the last two, two queries and one see nothing.
    for q_length, k_length, more in (
        (2, 3, {}),
        (2, 2, {"eps": 0.1}),
        (2, 3, options),
        (3, 1, options),
        (3, 2, options),
    ):
        inputs = [t.requires_grad_() for t in attention_inputs(op, 1, 2, q_length, k_length, 2, torch.float64, device)]
        assert torch.autograd.gradcheck(lambda *t: call(op, t, **more), inputs)  # noqa: B023
        if device == "cpu" and not more:
            assert torch.autograd.gradgradcheck(lambda *t: call(op, t), inputs)


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, case in NORMS.items() if not case.options.get("attention_dropout_p")])
def test_second_gradients_are_as_exact_as_the_dtype_allows(name, dtype, device):
    case = NORMS[name]
    (ours, inputs), (formula, _) = (
        differentiable(name, dtype, device, function=f, eps=0.1) for f in (None, case.formula)
    )
    roundings = None  # gradients have parts that come by way of what was saved, and rounded
    testing.check_second_gradients(ours, formula, tuple(inputs), roundings)


@on_each_device
@every_case
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(name, device):
    function, variables = differentiable(name, torch.float32, device)
    testing.check_each_input_alone(function, tuple(t.detach() for t in variables))


@every_case
def test_forward_mode_is_refused(name):
    function, variables = differentiable(name, torch.float32, "cpu")
    testing.check_tangents_are_refused(function, tuple(t.detach() for t in variables))


@every_op_and_rung
def test_a_backward_is_the_same_whatever_rung_the_forward_had(op, device, rung):
    """LayerNorm's gradient by this step's kernels; attention's, and the projection's, by step 2's."""
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, device)]
    outputs = call(op, inputs, rung)
    before, of_step_2 = step3_fused.launch_counts(), step2_attention.launch_counts()
    torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])
    backend = "gpu" if device == "cuda" else "cpu"
    before[backend] += 1
    of_step_2[backend] += {"attention_block": 2, "attention_residual_layer_norm": 1}.get(op, 0)
    assert step3_fused.launch_counts() == before
    assert step2_attention.launch_counts() == of_step_2


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@every_norm
def test_gradients_are_as_good_as_eagers(name, dtype, device):
    def gradients(function, dtype_of_inputs=None):
        function, variables = differentiable(name, dtype, device, function=function, large=True)
        variables = [t.detach().to(dtype_of_inputs or dtype).requires_grad_() for t in variables]
        outputs = function(*variables)
        grads = [testing.randn(o.shape, dtype, device, seed=20 + i).to(o.dtype) for i, o in enumerate(outputs)]
        return torch.autograd.grad(outputs, variables, grads)

    formula = NORMS[name].formula
    rounding = max(1e-5, torch.finfo(dtype).eps / 2)  # of the result: eager's may have been lucky
    for g, e, x in zip(gradients(None), gradients(formula), gradients(formula, torch.float64), strict=True):
        assert g.dtype == dtype
        assert (g.double() - x).abs().max() <= 2 * (e.double() - x).abs().max() + rounding * x.abs().max()


@every_op
def test_one_output_alone_has_gradients(op):
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, "cpu")]
    for out, want in zip(call(op, inputs), FORMULAS[op](*inputs), strict=False):
        got = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True, allow_unused=True)
        right = torch.autograd.grad(want.square().sum(), inputs, retain_graph=True, allow_unused=True)
        for g, r, t in zip(got, right, inputs, strict=True):
            torch.testing.assert_close(g, torch.zeros_like(t) if r is None else r, rtol=1e-4, atol=1e-5)


# ---- as torch sees them ----


@testing.where(lambda name, device, rung: testing.stands_for_all("step3_fused", CASES[name].op, device, rung))
@every_rung_of_each_case
def test_an_op_is_registered_as_torch_wants_it(name, device, rung, dtype):
    case = CASES[name]
    testing.check_op(step3_fused, case.op, case.inputs(dtype, device, False), {"rung": rung, **case.options})


@on_each_device
@every_norm
def test_an_op_on_transposed_tensors_is_registered_as_torch_wants_it(name, device):
    case = NORMS[name]
    inputs = case.inputs(torch.bfloat16, device, False)
    transposed = (testing.transposed(t) if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs)
    testing.check_op(step3_fused, case.op, tuple(transposed), case.options)


def loss_of(function):
    return lambda *variables: sum(out.square().sum() for out in function(*variables))


@every_forward
def test_gradients_under_torch_compile(name):
    function, variables = differentiable(name, torch.float32, "cpu")
    eager = torch.autograd.grad(loss_of(function)(*variables), variables)
    torch.compiler.reset()
    compiled = torch.compile(loss_of(function), fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*variables), variables), eager, strict=True):
        torch.testing.assert_close(got, want)


@on_each_device
@half_types
@every_op
def test_autocast_normalises_in_float32_and_attends_in_its_own_dtype(op, dtype, device):
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, device)]
    mixed = [inputs[0].to(dtype), *inputs[1:]]
    expected_dtype = dtype if op.startswith("attention") else torch.float32
    with torch.autocast(device, dtype):
        outputs = call(op, mixed)
        exact = call(op, [t.double() for t in inputs])
    plain = call(op, [t.to(expected_dtype) for t in mixed])
    for out, want in zip(outputs, plain, strict=True):
        assert out.dtype == expected_dtype
        assert torch.equal(out, want)
    assert exact[0].dtype == torch.float64  # autocast leaves float64 alone, here too
    outputs[0].sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs[1:])


@on_each_device
@every_norm
def test_autocast_casts_each_tensor_and_keeps_each_option(name, device):
    to = torch.bfloat16 if NORMS[name].op.startswith("attention") else torch.float32
    function, variables = differentiable(name, torch.float32, device, eps=0.1, return_statistics=True)
    rounded = [t.detach().bfloat16() for t in variables]  # the same numbers in either dtype
    want = function(*(t.to(to) for t in rounded))
    for other in range(len(rounded)):
        for of, rest in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            mixed = [t.to(of if i == other else rest).requires_grad_() for i, t in enumerate(rounded)]
            with torch.autocast(device, torch.bfloat16):
                got = function(*mixed)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        grads = torch.autograd.grad(got[0].float().square().sum(), mixed, materialize_grads=True)
        assert [g.dtype for g in grads] == [t.dtype for t in mixed]


@every_forward
def test_a_backward_inside_autocast_computes_the_same(name):
    function, variables = differentiable(name, torch.float32, "cpu")
    outside = torch.autograd.grad(loss_of(function)(*variables), variables)
    value = loss_of(function)(*variables)
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(value, variables)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


@pytest.mark.parametrize("overload", testing.writing_overloads("step3_fused"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)


@on_a_gpu
@every_forward
def test_forward_and_backward_in_a_cuda_graph(name, device):
    function, variables = differentiable(name, torch.bfloat16, device, large=True, on_device=True)
    grad = testing.randn(function(*variables)[0].shape, torch.bfloat16, device, seed=5)
    testing.check_gradients_in_a_cuda_graph(lambda *t: function(*t)[0], variables, grad)
