"""What the ops refuse, and in which words."""

import pytest
import torch

import step1_simple
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple
from step1_simple.testing import NAN, OPS, RNG_STATE, WITH_GELU, inputs_of, ops


@pytest.mark.parametrize("device", testing.DEVICES)
def test_scale_refuses(device):
    x = torch.ones(2, 3, device=device)
    with testing.raises(TypeError, "scale: `x` must be float32, float16, bfloat16 or float64, got int32"):
        step1_simple.scale(x.int(), 2.0)
    with testing.raises(ValueError, "scale: `rung` must be 'auto' or one of", "'v2_naive', 'v3_grid_stride'", "'v9'"):
        step1_simple.scale(x, 2.0, rung="v9")
    with testing.raises(RuntimeError, "'factor'", "str"):
        step1_simple.scale(x, "2.0")
    with testing.raises(ValueError, "scale: `out` must be contiguous"):
        ops.scale.out(x, 2.0, out=torch.empty(3, 2, device=device).T)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_an_out_of_another_shape_or_dtype_is_refused(op, device):
    inputs = inputs_of(op, (2, 3), torch.float32, device)
    call = getattr(ops, op).out
    names = [a.name for a in call._schema.arguments if a.alias_info is not None]
    outs = dict(zip(names, as_tuple(getattr(step1_simple, op)(*inputs)), strict=True))
    for name, out in outs.items():
        with testing.raises(ValueError, f"{op}: `{name}` must have shape {tuple(out.shape)}, got (2,)"):
            call(*inputs, **outs | {name: out.new_empty(2)})
        with testing.raises(TypeError, f"{op}: `{name}` must have the dtype of", "(float32), got float16"):
            call(*inputs, **outs | {name: out.half()})


# The ops that have rows, and what each calls its first tensor.
WITH_ROWS = {
    "bias_gelu": "x",
    "bias_gelu_backward": "grad",
    "bias_dropout_residual": "x",
    "bias_dropout_residual_backward": "grad",
    "column_sum": "x",
}


def call(op, x, bias):
    """`op` of x in the place of all tensors with rows, and of bias."""
    return getattr(step1_simple, op)(*OPS[op][1](x, lambda seed, shape: x if shape == x.shape else bias))


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@pytest.mark.parametrize("op", WITH_ROWS)
def test_ops_with_rows_refuse(op, device):
    name = WITH_ROWS[op]
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with testing.raises(TypeError, f"{op}: `{name}` must be float32, float16, bfloat16 or float64, got int64"):
        call(op, x.long(), bias)
    with testing.raises(ValueError, f"{op}: `{name}` must have at least 1 dimension, got 0"):
        call(op, x[0, 0], bias)
    with testing.raises(ValueError, f"{op}: the last dimension of `{name}` must not be 0, got shape (2, 0)"):
        call(op, x[:, :0], bias[:0])


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@pytest.mark.parametrize("op", ["bias_gelu", "bias_gelu_backward", "bias_dropout_residual"])
def test_a_wrong_bias_is_refused(op, device):
    name = WITH_ROWS[op]
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with testing.raises(TypeError, f"{op}: `bias` must have the dtype of `{name}` (float32), got float16"):
        call(op, x, bias.half())
    with testing.raises(ValueError, f"{op}: `bias` must have shape (3,), got (2,)"):
        call(op, x, bias[:2])
    with testing.raises(ValueError, f"{op}: `bias` must have shape (3,), got (1, 3)"):
        call(op, x, bias[None])
    other = "meta" if device != "meta" else "cpu"
    with testing.raises(ValueError, f"{op}: `bias` must be on the device of `{name}`", f"got {other}"):
        call(op, x, bias.to(other) if other == "meta" else torch.ones(3))


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@pytest.mark.parametrize("op", sorted(WITH_GELU))
def test_an_unknown_approximation_is_refused(op, device):
    inputs = (v.to(device) if isinstance(v, torch.Tensor) else v for v in inputs_of(op, (2, 3), torch.float32, "cpu"))
    with testing.raises(ValueError, f"{op}: `approximate` must be 'tanh' or 'none', got 'erf'"):
        getattr(step1_simple, op)(*inputs, approximate="erf")


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_tensors_that_do_not_match_are_refused(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    calls = {
        "gelu_backward: `x`": lambda other: step1_simple.gelu_backward(x, other),
        "bias_gelu_backward: `x`": lambda other: step1_simple.bias_gelu_backward(x, other, bias),
        "bias_dropout_residual: `residual`": lambda other: step1_simple.bias_dropout_residual(
            x, bias, other, 0.1, RNG_STATE
        ),
    }
    for what, call in calls.items():
        for other in (bias, x[:1]):
            with testing.raises(ValueError, f"{what} must have shape (2, 3), got {tuple(other.shape)}"):
                call(other)
        first = "x" if "residual" in what else "grad"
        with testing.raises(TypeError, f"{what} must have the dtype of `{first}` (float32), got float16"):
            call(x.half())


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_dropout_refuses(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    calls = {
        "bias_dropout_residual": lambda p, rng_state: step1_simple.bias_dropout_residual(x, bias, x, p, rng_state),
        "bias_dropout_residual_backward": lambda p, rng_state: step1_simple.bias_dropout_residual_backward(
            x, p, rng_state
        ),
    }
    for op, call in calls.items():
        for p in (-0.1, 1.5, NAN):
            with testing.raises(ValueError, f"{op}: `dropout_p` must be from 0 to 1, got {p}"):
                call(p, RNG_STATE)
        with testing.raises(TypeError, f"{op}: `rng_state` must be int64, got int32"):
            call(0.1, RNG_STATE.int())
        with testing.raises(ValueError, f"{op}: `rng_state` must have shape (2,), got (3,)"):
            call(0.1, torch.zeros(3, dtype=torch.int64))
        if op == "bias_dropout_residual":
            with testing.raises(ValueError, f"{op}: `dropout_p` must be from 0 to 1, got 5"):
                step1_simple.bias_dropout_residual(x, bias, x, 5, training=False)
        if device == "cpu":
            with testing.raises(ValueError, f"{op}: `rng_state` must be on the CPU or on the tensors' device (cpu)"):
                call(0.1, RNG_STATE.to("meta"))


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_bias_gelu_refuses_tensors_on_a_gpu_and_a_cpu(device):
    x, bias = torch.ones(2, 3), torch.ones(3)
    with testing.raises(ValueError, "bias_gelu: `bias` must be on the device of `x` (cpu), got cuda:0"):
        step1_simple.bias_gelu(x, bias.to(device))
    with testing.raises(ValueError, "bias_gelu: `bias` must be on the device of `x` (cuda:0), got cpu"):
        step1_simple.bias_gelu(x.to(device), bias)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_an_out_that_shares_memory_with_anything_is_refused(op, device):
    testing.check_apart(step1_simple, op, inputs_of(op, (4, 3), torch.float32, device))
    state_at_home = tuple(v.to(device) if v is RNG_STATE else v for v in inputs_of(op, (4, 3), torch.float16, device))
    testing.check_apart(step1_simple, op, state_at_home)


def test_a_tensor_without_data_never_reaches_a_kernel():
    """A function made by pybind11 is called whatever the device; a registered op on meta tensors is its fake."""
    for shape in ((2, 3), (0,)):
        with testing.raises(ValueError, "scale: the tensors must be on the CPU or on a CUDA device, got meta"):
            step1_simple.scale_by_pybind(torch.ones(shape, device="meta"), 2.0)
    assert step1_simple.scale(torch.ones(2, 3, device="meta"), 2.0).is_meta


def test_rungs_refuses_an_unknown_op():
    with testing.raises(ValueError, "rungs: `op` must be 'scale', 'gelu',", "or 'column_sum', got 'relu'"):
        step1_simple.rungs("relu")
    assert "cpu" not in step1_simple.rungs("scale", "cuda")
