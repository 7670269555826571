"""Products with epilogues as torch sees them, beside what test_autograd.py has of all ops: each option."""

import pytest
import torch

import step3_fused
from kernel_fusion import testing
from step2_attention.linear_testing import inputs_of
from step3_fused.epilogue_testing import (
    EPILOGUES,
    either_way,
    every_op,
    on_each_device,
    with_norm,
    with_residual,
)


def differentiable(op, inputs, **options):
    """The op as a function of the tensors that have gradients, and these in float64."""
    variables = [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def function(*tensors):
        given = list(inputs)
        for i, t in zip(variables, tensors, strict=True):
            given[i] = t
        return getattr(step3_fused, op)(*given, **options)

    return function, [inputs[i].requires_grad_() for i in variables]


@every_op
@on_each_device
@either_way
def test_gradients_are_those_of_finite_differences(transposed, op, device):
    for case in EPILOGUES[op]:
        for options in case.options:
            inputs = case.inputs((2, 2), 3, 4, torch.float64, device, transposed)
            function, variables = differentiable(op, inputs, transposed=transposed, **options)
            assert torch.autograd.gradcheck(function, variables)
            if not case.backward:  # third derivatives are not there
                assert torch.autograd.gradgradcheck(function, variables)


@pytest.mark.parametrize("op", ["linear_gelu", "mlp"])
@on_each_device
@either_way
def test_gradients_without_what_is_kept(transposed, op, device):
    inputs = EPILOGUES[op][0].inputs(3, 3, 4, torch.float64, device, transposed)
    function, variables = differentiable(op, inputs, transposed=transposed, keep=False)
    assert torch.autograd.gradcheck(function, variables)


@on_each_device
def test_the_preactivation_has_a_gradient_of_its_own(device):
    inputs = EPILOGUES["linear_gelu"][0].inputs(3, 3, 4, torch.float64, device, False)
    function, variables = differentiable("linear_gelu", inputs, return_preactivation=True)
    assert torch.autograd.gradcheck(function, variables)
    assert torch.autograd.gradcheck(lambda *a: function(*a)[1], variables)


@pytest.mark.parametrize("op", ["linear_gelu", "layer_norm_linear", "linear_bias_dropout_residual", "mlp"])
def test_where_step_2_is_not_built_the_forward_says_so(op, monkeypatch):
    """Not only the backward; and where no gradient needs its product, step 2 is not asked."""

    def missing():
        raise ImportError("step2_attention is not built")

    monkeypatch.setattr(step3_fused.shared, "step_2", missing)
    inputs = with_residual(0.0) if op == "linear_bias_dropout_residual" else EPILOGUES[op][0].inputs
    given = inputs(3, 8, 16, torch.float32, "cpu", False)
    assert isinstance(getattr(step3_fused, op)(*given), torch.Tensor)
    given[0].requires_grad_()
    with testing.raises(ImportError, "step2_attention is not built"):
        getattr(step3_fused, op)(*given)


@on_each_device
def test_gradients_without_a_bias(device):
    for op in ("linear_gelu", "gelu_linear"):
        x, weight, _ = inputs_of(3, 3, 4, torch.float64, device)
        assert torch.autograd.gradcheck(getattr(step3_fused, op), [x.requires_grad_(), weight.requires_grad_()])
    x, *norm, weight, _ = (t.requires_grad_() for t in with_norm(3, 3, 4, torch.float64, device, False))
    assert torch.autograd.gradcheck(step3_fused.layer_norm_linear, [x, *norm, weight])
    x, weight, _, residual, p, rng_state = with_residual(0.3)(3, 3, 4, torch.float64, device, False)
    assert torch.autograd.gradcheck(
        lambda x, w, r: step3_fused.linear_bias_dropout_residual(x, w, None, r, p, rng_state),
        [t.requires_grad_() for t in (x, weight, residual)],
    )


FORWARD = [op for op in EPILOGUES if "backward" not in op]


@pytest.mark.parametrize("op", FORWARD)
@on_each_device
def test_autocast_makes_it_autocasts_dtype(op, device):
    inputs = EPILOGUES[op][0].inputs(8, 8, 16, torch.float32, device, False)
    function, variables = differentiable(op, inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = function(*variables)
        same = function(*(t.bfloat16() for t in variables))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, same)
    grads = torch.autograd.grad(y.float().square().sum(), variables)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.parametrize("op", FORWARD)
@on_each_device
@either_way
def test_autocast_passes_each_option_on(transposed, op, device):
    """Of square weights: one that is read the wrong way round has the right shape."""
    for case in EPILOGUES[op]:
        for options in case.options:
            inputs = case.inputs(8, 8, 8, torch.float32, device, transposed)
            function, variables = differentiable(op, inputs, transposed=transposed, **options)
            with torch.autocast(device, dtype=torch.bfloat16):
                mixed = function(*variables)
            assert torch.equal(mixed, function(*(t.bfloat16() for t in variables)))
