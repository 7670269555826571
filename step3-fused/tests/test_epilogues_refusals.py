"""What products with epilogues refuse, and in which words."""

import pytest
import torch

import step3_fused
from kernel_fusion import testing
from step3_fused.epilogue_testing import EPILOGUES, RNG_STATE, able, every_op, on_each_device

# ---- what a rung refuses ----


@on_each_device
@every_op
def test_a_rung_refuses_what_it_says(op, device):
    """By name, with what it takes instead; `able` says when. Nothing is computed."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the rungs for Hopper refuse any other GPU first")
    case = EPILOGUES[op][0]
    for rung in step3_fused.rungs(op, device):
        for shape in ((8, 8, 8), (8, 12, 8), (8, 8, 12)):
            for dtype in (torch.float32, torch.bfloat16):
                for transposed in (False, True):
                    if able(op, rung, device, *shape, dtype, transposed):
                        continue
                    inputs = case.inputs(*shape, dtype, device, transposed)
                    with testing.raises(ValueError, f"{op}: rung '{rung}' "):
                        getattr(step3_fused, op)(*inputs, transposed=transposed, rung=rung)


# ---- bad input ----


BAD = {
    "linear_gelu": [
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'sigmoid'", {"approximate": "sigmoid"}),
        (ValueError, "`bias` must have shape (4,), got (3,)", {"bias": (3,)}),
    ],
    "gelu_linear": [
        (ValueError, "`approximate` must be 'tanh' or 'none', got ''", {"approximate": ""}),
        (ValueError, "`weight` must have shape (3, 4), got (2, 4)", {"weight": (2, 4)}),
    ],
    "linear_gelu_backward": [
        (ValueError, "`preactivation` must have shape (2, 4), got (2, 3)", {"preactivation": (2, 3)}),
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'x'", {"approximate": "x"}),
        (ValueError, "`weight` must have shape (3, 4), got (4, 3)", {"weight": (4, 3)}),
    ],
    "gelu_linear_backward": [
        (
            ValueError,
            "`x` must have the shape of `grad` but for the last dimension, got (3, 3) and (2, 4)",
            {"x": (3, 3)},
        ),
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'x'", {"approximate": "x"}),
    ],
    "layer_norm_linear": [
        (ValueError, "`norm_weight` must have shape (3,), got (4,)", {"norm_weight": (4,)}),
        (ValueError, "`norm_bias` must have shape (3,), got (3, 1)", {"norm_bias": (3, 1)}),
        (ValueError, "`weight` must not be empty, got shape (3, 0)", {"weight": (3, 0)}),
        (ValueError, "`eps` must be a finite number ≥ 0, got -1", {"eps": -1.0}),
    ],
    "linear_bias_dropout_residual": [
        (ValueError, "`residual` must have shape (2, 4), got (4,)", {"residual": (4,)}),
        (ValueError, "`dropout_p` must be from 0 to 1, got 1.5", {"dropout_p": 1.5}),
        (TypeError, "`rng_state` must be int64, got float32", {"rng_state": (2,)}),
        (ValueError, "`bias` must have shape (4,), got (5,)", {"bias": (5,)}),
    ],
    "linear_bias_dropout_residual_backward": [
        (ValueError, "`dropout_p` must be from 0 to 1, got -0.1", {"dropout_p": -0.1}),
        (ValueError, "`weight` must have shape (3, 4), got (3, 5)", {"weight": (3, 5)}),
    ],
    "mlp": [
        (ValueError, "`bias_1` must have shape (4,), got (3,)", {"bias_1": (3,)}),
        (ValueError, "`weight_2` must have shape (4, 3), got (3, 4)", {"weight_2": (3, 4)}),
        (ValueError, "`bias_2` must have shape (3,), got (4,)", {"bias_2": (4,)}),
        (ValueError, "`residual` must have shape (2, 3), got (2, 4)", {"residual": (2, 4)}),
        (ValueError, "`approximate` must be 'tanh' or 'none', got 'x'", {"approximate": "x"}),
    ],
}


@every_op
@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_bad_arguments_are_refused(op, device):
    function = getattr(step3_fused, op)
    names = [a.name for a in getattr(torch.ops.step3_fused, op).default._schema.arguments]
    inputs = EPILOGUES[op][0].inputs(2, 3, 4, torch.float32, "cpu", False)
    good = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in zip(names, inputs, strict=False)}
    if "rng_state" in good:
        good["rng_state"] = torch.tensor(RNG_STATE)
    for exception, text, changed in BAD[op]:
        changed = {n: torch.ones(v, device=device) if isinstance(v, tuple) else v for n, v in changed.items()}
        with testing.raises(exception, f"{op}: {text}"):
            function(**(good | changed))
    first = names[0]
    with testing.raises(TypeError, f"{op}: `{first}` must be float32, float16, bfloat16 or float64, got int32"):
        function(**(good | {first: good[first].int()}))
    for name, value in good.items():
        if name in (first, "rng_state") or not isinstance(value, torch.Tensor):
            continue
        with testing.raises(TypeError, f"{op}: `{name}` must have the dtype of `{first}` (float32), got float64"):
            function(**(good | {name: value.double()}))
        other = torch.empty_like(value, device="meta" if device != "meta" else "cpu")
        with testing.raises(ValueError, f"{op}: `{name}` must be on the device of `{first}`"):
            function(**(good | {name: other}))
