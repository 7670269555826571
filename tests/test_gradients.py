"""Gradients of every op with several outputs, where these are used together. Steps' tests look at each alone."""

import functools
import importlib

import pytest
import torch

from kernel_fusion import steps, testing
from kernel_fusion.testing.accuracy import as_tuple

RNG_STATE = torch.tensor([20240131, 3])


def randn(*shape, seed):
    return testing.randn(shape, torch.float64, "cpu", seed=seed)


def bounds(*values):
    return torch.tensor(values, dtype=torch.int32)


def attention():
    """Two queries of two heads, which share keys and values; three keys."""
    return randn(2, 2, 2, 2, seed=1), randn(2, 1, 3, 2, seed=2), randn(2, 1, 3, 2, seed=3)


def attention_and_what_follows(*, projection):
    """q, k and v of two heads, the residual, perhaps the projection, and LayerNorm's two vectors."""
    q, k, v = (randn(2, 2, length, 2, seed=length) for length in (2, 3, 3))
    rows = [randn(4, 4, seed=7), randn(4, seed=8)] if projection else []
    return q, k, v, randn(2, 2, 4, seed=6), *rows, randn(4, seed=9), randn(4, seed=10)


def rows(number, width=4):
    return tuple(randn(3, width, seed=20 + i) for i in range(number))


def vectors(number, width=4):
    return tuple(randn(width, seed=30 + i) for i in range(number))


def with_key_bounds(inputs):
    return *inputs, bounds(0, 1), bounds(2, 3)


def backward_of_attention():
    q, k, v = attention()
    out, lse = torch.ops.step2_attention.attention(q, k, v)
    return randn(2, 2, 2, 2, seed=4), q, k, v, out, lse, None, None, randn(2, 2, 2, seed=5)


def layer_norm_backward(grad, x, weight, grad_sum=None):
    """The op, with the mean and rstd of `x`: it is a function of others in its own way."""
    statistics = x.mean(-1), torch.rsqrt(x.var(-1, correction=0) + 1e-5)
    return torch.ops.step3_fused.layer_norm_backward(grad, x, weight, *statistics, grad_sum)


def of_product(*more):
    """The gradient of three rows of width 5, `more`, x of depth 4 and the weight."""
    return randn(3, 5, seed=40), *more, randn(3, 4, seed=41), randn(4, 5, seed=42)


def mlp(residual):
    return *rows(1), randn(4, 6, seed=50), *vectors(1, 6), randn(6, 4, seed=51), *vectors(1), residual


# Of each op its inputs and options, case by case; the functions are called once the steps are loaded.
CASES = {
    "step1_simple.bias_gelu_backward": lambda: [((*rows(2), *vectors(1)), {})],
    "step1_simple.bias_dropout_residual_backward": lambda: [((*rows(1), p, RNG_STATE), {}) for p in (0.0, 0.4)],
    "step2_attention.linear_backward": lambda: [(of_product(), {})],
    "step2_attention.attention": lambda: [
        (attention(), {}),
        (with_key_bounds(attention()), {"causal": True}),
        ((*attention(), None, None, RNG_STATE), {"dropout_p": 0.4}),
    ],
    "step2_attention.attention_backward": lambda: [
        (backward_of_attention(), {}),
        (backward_of_attention()[:6], {"causal": True, "scale": 0.7}),
    ],
    "step3_fused.layer_norm": lambda: [((*rows(1), *vectors(2)), {})],
    "step3_fused.layer_norm_backward": lambda: [((*rows(2), *vectors(1)), {}), ((*rows(2), *vectors(1), *rows(1)), {})],
    "step3_fused.residual_layer_norm": lambda: [
        ((*rows(2), *vectors(2)), {}),
        ((*rows(2), *vectors(3)), {"keep": False}),
        ((*rows(2), *vectors(3), 0.4, RNG_STATE), {}),
    ],
    "step3_fused.attention_residual_layer_norm": lambda: [
        (attention_and_what_follows(projection=False), {}),
        ((*with_key_bounds(attention_and_what_follows(projection=False)), RNG_STATE), {"attention_dropout_p": 0.4}),
    ],
    "step3_fused.attention_block": lambda: [
        (attention_and_what_follows(projection=True), {}),
        (attention_and_what_follows(projection=True), {"keep": False}),
        (
            (*with_key_bounds(attention_and_what_follows(projection=True)), RNG_STATE, RNG_STATE),
            {"dropout_p": 0.4, "attention_dropout_p": 0.4},
        ),
    ],
    "step3_fused.linear_gelu": lambda: [((*of_product()[1:], *vectors(1, 5)), {})],
    "step3_fused.linear_gelu_backward": lambda: [(of_product(randn(3, 5, seed=43)), {})],
    "step3_fused.gelu_linear_backward": lambda: [(of_product(), {"approximate": "none"})],
    "step3_fused.linear_bias_dropout_residual_backward": lambda: [
        ((*of_product(), p, RNG_STATE), {}) for p in (0.0, 0.4)
    ],
    "step3_fused.mlp": lambda: [(mlp(None), {}), (mlp(randn(3, 4, seed=52)), {"approximate": "none"})],
}
FUNCTIONS = {"step3_fused.layer_norm_backward": layer_norm_backward}  # others than the op itself
# Of these only the first output has a gradient, by registration: statistics, a log-sum-exp, or what the backward keeps.
ONE_WITH_A_GRADIENT = {
    "step3_fused.layer_norm_linear": lambda: (of_product()[1], *vectors(2), of_product()[2]),
    "step4_integration.cross_entropy": lambda: (*rows(1), torch.tensor([0, 3, 1])),
    "step4_integration.linear_cross_entropy": lambda: (*rows(1), randn(5, 4, seed=60), torch.tensor([0, 3, 1])),
}
REFUSES = {  # to be recorded: a drawn token passes no gradient on, and training sums by torch.distributed
    "step4_integration.sample": lambda x: op("step4_integration.sample")(x, temperature=0.0),
    "step4_integration.all_reduce": lambda x: op("step4_integration.all_reduce")(
        x, x[0], x, x[0], x[0], torch.zeros(1, dtype=torch.uint8), [0], 0, rung="v2_peer"
    ),
}


def ops_of_several_outputs() -> set[str]:
    """All ops of the steps that return several tensors and have a gradient."""
    found = set()
    for step in steps.STEPS:
        importlib.import_module(step.module)
        for schema in torch._C._jit_get_all_schemas():
            name = schema.name
            registered = name.startswith(f"{step.module}::") and schema.overload_name == ""
            if registered and len(schema.returns) > 1:
                if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"):
                    found.add(name.replace("::", "."))
    return found


def op(name):
    step, function = name.split(".")
    return getattr(getattr(torch.ops, step), function)


def test_every_op_of_several_outputs_is_checked():
    assert ops_of_several_outputs() == set(CASES) | set(ONE_WITH_A_GRADIENT) | set(REFUSES)


@pytest.mark.parametrize("name", CASES)
def test_outputs_used_together(name):
    importlib.import_module(name.split(".")[0])
    function = FUNCTIONS.get(name) or op(name)
    for inputs, options in CASES[name]():
        testing.check_outputs_together(functools.partial(function, **options), inputs)


@pytest.mark.parametrize("name", ONE_WITH_A_GRADIENT)
def test_an_op_with_one_output_that_has_a_gradient_has_no_more(name):
    importlib.import_module(name.split(".")[0])
    x, *others = ONE_WITH_A_GRADIENT[name]()
    outputs = as_tuple(op(name)(x.requires_grad_(), *others))
    assert [out.requires_grad for out in outputs] == [True] + [False] * (len(outputs) - 1)


@pytest.mark.parametrize("name", REFUSES)
def test_an_op_that_cannot_be_recorded_says_so(name):
    importlib.import_module(name.split(".")[0])
    with testing.raises(RuntimeError, "must not require gradients"):
        REFUSES[name](randn(2, 3, seed=1).requires_grad_())
