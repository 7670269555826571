"""The ops as torch sees them: their gradients, registered, compiled, under autocast."""

import functools

import pytest
import torch

import step2_attention
import step3_fused
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple
from step3_fused.attention_testing import (
    FORMULAS,
    attention_inputs,
    attention_ops,
    every_op,
    every_op_and_rung,
    half_types,
    inputs_of,
    on_each_device,
    row_inputs,
)

# ---- gradients ----


def tiny_inputs(op, q_length, k_length, device):
    """In float64, as few elements as can be: the check moves each one."""
    if op.startswith("attention"):
        inputs = attention_inputs(
            1, 2, q_length, k_length, 2, torch.float64, device, projection=op == "attention_block"
        )
    else:
        inputs = row_inputs((2, 3), torch.float64, device, residual=op == "residual_layer_norm")
    return [t.requires_grad_() for t in inputs]


@on_each_device
@every_op
def test_gradients_are_those_of_the_formula(op, device):
    function = getattr(step3_fused, op)
    assert torch.autograd.gradcheck(function, tiny_inputs(op, 2, 3, device))
    assert torch.autograd.gradcheck(lambda *x: function(*x, eps=0.1), tiny_inputs(op, 2, 2, device))
    if op.startswith("attention"):
        options = {"causal": True, "scale": 0.7}
        for q_length, k_length in ((2, 3), (3, 1), (3, 2)):  # of the latter, two queries and one see nothing
            inputs = tiny_inputs(op, q_length, k_length, device)
            assert torch.autograd.gradcheck(lambda *x: function(*x, **options), inputs)


@every_op
def test_gradients_of_gradients(op):
    assert torch.autograd.gradgradcheck(getattr(step3_fused, op), tiny_inputs(op, 2, 3, "cpu"))


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@every_op
def test_second_gradients_are_as_exact_as_the_dtype_allows(op, dtype, device):
    cases = [(inputs_of(op, dtype, device), {"eps": 0.1})]
    if op.startswith("attention"):  # once more, with a query that sees nothing
        few_keys = attention_inputs(2, 3, 5, 4, 4, dtype, device, projection=op == "attention_block")
        cases = [(inputs, {"causal": True, "scale": 0.7}) for inputs in (cases[0][0], few_keys)]
    roundings = None  # gradients have parts that come by way of what was saved, and rounded
    for inputs, options in cases:
        ours, formula = (functools.partial(f, **options) for f in (getattr(step3_fused, op), FORMULAS[op]))
        testing.check_second_gradients(ours, formula, inputs, roundings)


@on_each_device
@every_op
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(op, device):
    testing.check_each_input_alone(getattr(step3_fused, op), inputs_of(op, torch.float32, device))


@every_op
def test_forward_mode_is_refused(op):
    testing.check_tangents_are_refused(getattr(step3_fused, op), inputs_of(op, torch.float32, "cpu"))


@every_op_and_rung
def test_a_backward_is_the_same_whatever_rung_the_forward_had(op, device, rung):
    """LayerNorm's gradient by this step's kernels; attention's, and the projection's, by step 2's."""
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, device)]
    outputs = getattr(step3_fused, op)(*inputs, rung=rung)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    before, of_step_2 = step3_fused.launch_counts(), step2_attention.launch_counts()
    torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])
    backend = "gpu" if device == "cuda" else "cpu"
    before[backend] += 1
    of_step_2[backend] += {"attention_block": 2, "attention_residual_layer_norm": 1}.get(op, 0)
    assert step3_fused.launch_counts() == before
    assert step2_attention.launch_counts() == of_step_2


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@every_op
def test_gradients_are_as_good_as_eagers(op, dtype, device):
    if op.startswith("attention"):
        inputs = attention_inputs(2, 3, 40, 40, 16, dtype, device, projection=op == "attention_block")
        options = {"causal": True}
    else:
        inputs, options = row_inputs((40, 96), dtype, device, residual=op == "residual_layer_norm"), {}

    def gradients(function, inputs):
        inputs = [t.detach().clone().requires_grad_() for t in inputs]
        outputs = function(*inputs, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [testing.randn(o.shape, dtype, device, seed=20 + i).to(o.dtype) for i, o in enumerate(outputs)]
        return torch.autograd.grad(outputs, inputs, grads)

    got = gradients(getattr(step3_fused, op), inputs)
    eager = gradients(FORMULAS[op], inputs)
    exact = gradients(FORMULAS[op], [t.double() for t in inputs])
    for g, e, x in zip(got, eager, exact, strict=True):
        assert g.dtype == dtype
        assert (g.double() - x).abs().max() <= 2 * (e.double() - x).abs().max() + 1e-5 * x.abs().max()


@every_op
def test_one_output_alone_has_gradients(op):
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, "cpu")]
    outputs = getattr(step3_fused, op)(*inputs)
    expected = FORMULAS[op](*inputs)
    if isinstance(outputs, torch.Tensor):
        outputs, expected = (outputs,), (expected,)
    for out, want in zip(outputs, expected, strict=True):
        got = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True, allow_unused=True)
        right = torch.autograd.grad(want.square().sum(), inputs, retain_graph=True, allow_unused=True)
        for g, r, t in zip(got, right, inputs, strict=True):
            torch.testing.assert_close(g, torch.zeros_like(t) if r is None else r, rtol=1e-4, atol=1e-5)


# ---- as torch sees them ----


@every_op_and_rung
def test_an_op_is_registered_as_torch_wants_it(op, device, rung):
    testing.check_op(step3_fused, op, inputs_of(op, torch.float32, device), {"rung": rung})


@on_each_device
@every_op
def test_an_op_on_transposed_tensors_is_registered_as_torch_wants_it(op, device):
    testing.check_op(step3_fused, op, tuple(map(testing.transposed, inputs_of(op, torch.bfloat16, device))))


@on_each_device
@attention_ops
def test_attention_is_registered_with_its_options(op, device):
    testing.check_op(step3_fused, op, inputs_of(op, torch.float32, device), {"causal": True, "scale": 0.3, "eps": 0.1})


@every_op
def test_gradients_under_torch_compile(op):
    def loss(*inputs):
        outputs = getattr(step3_fused, op)(*inputs)
        return sum(o.square().sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))

    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, "cpu")]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want)


@on_each_device
@half_types
@every_op
def test_autocast_normalises_in_float32_and_attends_in_its_own_dtype(op, dtype, device):
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, device)]
    mixed = [inputs[0].to(dtype), *inputs[1:]]
    expected_dtype = dtype if op.startswith("attention") else torch.float32
    with torch.autocast(device, dtype):
        outputs = getattr(step3_fused, op)(*mixed)
        exact = getattr(step3_fused, op)(*(t.double() for t in inputs))
    plain = getattr(step3_fused, op)(
        *(t.to(dtype).to(expected_dtype) if t is mixed[0] else t.to(expected_dtype) for t in mixed)
    )
    if isinstance(outputs, torch.Tensor):
        outputs, exact, plain = (outputs,), (exact,), (plain,)
    for out, want in zip(outputs, plain, strict=True):
        assert out.dtype == expected_dtype
        assert torch.equal(out, want)
    assert exact[0].dtype == torch.float64  # autocast leaves float64 alone, here too
    outputs[0].sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in inputs[1:])


@on_each_device
@every_op
def test_autocast_casts_each_tensor(op, device):
    inputs, options = inputs_of(op, torch.float32, device), {"eps": 0.1}
    to = torch.float32
    if op.startswith("attention"):
        to = torch.bfloat16
        options |= {"causal": True, "scale": 0.3}
    rounded = [t.bfloat16() for t in inputs]  # the same numbers in either dtype
    want = as_tuple(getattr(step3_fused, op)(*(t.to(to) for t in rounded), **options))
    for other in range(len(inputs)):
        for of, rest in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            mixed = [t.to(of if i == other else rest) for i, t in enumerate(rounded)]
            with torch.autocast(device, torch.bfloat16):
                got = as_tuple(getattr(step3_fused, op)(*mixed, **options))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@every_op
def test_a_backward_inside_autocast_computes_the_same(op):
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, "cpu")]

    def loss():
        outputs = getattr(step3_fused, op)(*inputs)
        return sum(o.square().sum() for o in (outputs if isinstance(outputs, tuple) else (outputs,)))

    outside = torch.autograd.grad(loss(), inputs)
    value = loss()
    with torch.autocast("cpu", torch.bfloat16):
        inside = torch.autograd.grad(value, inputs)
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("overload", testing.writing_overloads("step3_fused"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)
