"""What the ops refuse, and in which words."""

import pytest
import torch

import step3_fused
from kernel_fusion import testing
from step3_fused.attention_testing import (
    ALONE,
    INFINITY,
    attention_inputs,
    attention_ops,
    check,
    every_op,
    formula_of,
    inputs_of,
    on_a_gpu,
    on_each_device,
    ops,
    row_inputs,
)
from step3_fused.cases_testing import CASES, every_case


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_layer_norm_refuses(device):
    x, w = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    other = "meta" if device != "meta" else "cpu"
    for exception, text, inputs in (
        (TypeError, "`x` must be float32, float16, bfloat16 or float64, got int64", (x.long(), w, w)),
        (ValueError, "`x` must have at least 1 dimension, got 0 (shape ())", (x[0, 0], w, w)),
        (ValueError, "the last dimension of `x` must not be 0, got shape (2, 0)", (x[:, :0], w[:0], w[:0])),
        (TypeError, "`weight` must have the dtype of `x` (float32), got float16", (x, w.half(), w)),
        (ValueError, "`bias` must have shape (3,), got (2,)", (x, w, w[:2])),
        (ValueError, "`weight` must be on the device of `x`", (x, torch.ones(3, device=other), w)),
    ):
        with testing.raises(exception, f"layer_norm: {text}"):
            step3_fused.layer_norm(*inputs)
    with testing.raises(ValueError, "residual_layer_norm: `residual` must have shape (2, 3), got (1, 3)"):
        step3_fused.residual_layer_norm(x, x[:1], w, w)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@attention_ops
def test_attention_refuses(op, device):
    shapes = {"q": (1, 2, 3, 4), "k": (1, 2, 5, 4), "v": (1, 2, 5, 4), "residual": (1, 3, 8)}
    if op == "attention_block":
        shapes |= {"proj_weight": (8, 8), "proj_bias": (8,)}
    shapes |= {"weight": (8,), "bias": (8,)}
    good = {name: torch.ones(shape, device=device) for name, shape in shapes.items()}

    def refuses(exception, text, **changed):
        with testing.raises(exception, f"{op}: {text}"):
            getattr(step3_fused, op)(**(good | changed))

    refuses(TypeError, "`q` must be float32, float16, bfloat16 or float64, got int32", q=good["q"].int())
    other = "meta" if device != "meta" else "cpu"
    for name, tensor in good.items():
        if name != "q":
            refuses(TypeError, f"`{name}` must have the dtype of `q` (float32), got float64", **{name: tensor.double()})
            elsewhere = torch.ones(tensor.shape, device=other)
            refuses(ValueError, f"`{name}` must be on the device of `q`", **{name: elsewhere})
    for name, text, shape in (
        ("q", "must have 4 dimensions, got 3 (shape (2, 3, 4))", (2, 3, 4)),
        ("k", "must have 4 dimensions, got 3 (shape (2, 5, 4))", (2, 5, 4)),
        ("k", "must have shape (1, 2, 5, 4), got (1, 1, 5, 4)", (1, 1, 5, 4)),
        ("v", "must have shape (1, 2, 5, 4), got (1, 2, 4, 4)", (1, 2, 4, 4)),
        ("residual", "must have shape (1, 3, 8), got (3, 8)", (3, 8)),
        ("residual", "must have shape (1, 3, 8), got (1, 3, 4)", (1, 3, 4)),
        ("weight", "must have shape (8,), got (4,)", (4,)),
        ("bias", "must have shape (8,), got (4,)", (4,)),
        ("proj_weight", "must have shape (8, 8), got (8, 4)", (8, 4)),
        ("proj_bias", "must have shape (8,), got (4,)", (4,)),
    ):
        if name in good:
            refuses(ValueError, f"`{name}` {text}", **{name: torch.ones(shape, device=device)})
    for shape in ((1, 2, 3, 0), (1, 0, 3, 4)):
        text = f"heads and head_dim of `q` must not be 0, got shape {shape}"
        refuses(ValueError, text, q=torch.ones(shape, device=device))


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@every_op
def test_bad_numbers_are_refused(op, device):
    inputs = inputs_of(op, torch.float32, device)
    for eps in (-1e-5, INFINITY, float("nan")):
        with testing.raises(ValueError, f"{op}: `eps` must be a finite number ≥ 0, got"):
            getattr(step3_fused, op)(*inputs, eps=eps)
    if op.startswith("attention"):
        with testing.raises(ValueError, f"{op}: `scale` must be finite or None, got inf"):
            getattr(step3_fused, op)(*inputs, scale=INFINITY)


@on_each_device
def test_a_rung_refuses_by_name_what_it_cannot_do_and_names_one_that_can(device):
    for op, rung, other in (
        ("layer_norm", "v2_block", "v1_naive"),
        ("layer_norm", "v3_registers", "v1_naive"),
        ("residual_layer_norm", "v2_fused", "v1_separate"),
        ("residual_layer_norm", "v3_registers", "v1_separate"),
    ):
        for dtype, width in ((torch.float32, 8192), (torch.float64, 4096)):
            width *= 2 if rung == "v3_registers" else 1
            inputs = row_inputs(op, (1, width + 1), dtype, device)
            text = f"{op}: rung '{rung}' takes width ≤ {width}, got {width + 1}; these can: '{other}'"
            with testing.raises(ValueError, text):
                getattr(step3_fused, op)(*inputs, rung=rung)
            getattr(step3_fused, op)(*inputs)
    for op in ("attention_residual_layer_norm", "attention_block"):
        text = f"{op}: rung 'v2_fused' takes float32, float16 and bfloat16, got float64; these can: 'v1_separate'"
        with testing.raises(ValueError, text):
            getattr(step3_fused, op)(*inputs_of(op, torch.float64, device), rung="v2_fused")


@on_each_device
def test_a_row_too_wide_for_shared_memory_is_refused_in_words(device):
    inputs = attention_inputs(ALONE, 1, 1000, 1, 1, 100, torch.float16, device)
    with testing.raises(
        ValueError,
        "rung 'v2_fused' keeps rows of heads·head_dim = 100000 numbers in shared memory",
        "this device has",
        "these can: 'v1_separate'",
    ):
        step3_fused.attention_residual_layer_norm(*inputs, rung="v2_fused")
    y = step3_fused.attention_residual_layer_norm(*inputs)  # auto takes one that can
    torch.testing.assert_close(y, formula_of(ALONE)(*inputs), rtol=1e-2, atol=1e-2)


@on_each_device
def test_a_head_too_wide_for_shared_memory_is_refused_in_words(device):
    inputs = attention_inputs(ALONE, 1, 1, 1, 1, 2000, torch.float32, device)
    with testing.raises(
        ValueError,
        "rung 'v1_separate' keeps tiles of head_dim 2000 columns in shared memory",
        "these can: 'pieces'",
    ):
        step3_fused.attention_residual_layer_norm(*inputs, rung="v1_separate")
    check(ALONE, inputs, "auto", layouts=False)


@on_each_device
def test_a_bad_out_is_refused(device):
    inputs = inputs_of("residual_layer_norm", torch.float32, device)
    x = inputs[0]
    good = {"y": torch.empty_like(x), "mean": torch.empty(3, device=device), "rstd": torch.empty(3, device=device)}
    for name, bad, text in (
        ("y", torch.empty(6, device=device), "must have shape (3, 6), got (6,)"),
        ("y", torch.empty(6, 3, device=device).T, "must be contiguous"),
        ("mean", torch.empty(3, device=device, dtype=torch.float64), "must be float32, got float64"),
        ("rstd", torch.empty(3, 1, device=device), "must have shape (3,), got (3, 1)"),
        ("rstd", torch.empty(6, device=device)[::2], "must be contiguous"),
    ):
        with testing.raises(TypeError if "float64" in text else ValueError, f"layer_norm: `{name}` {text}"):
            ops.layer_norm.out(x, *inputs[2:], **(good | {name: bad}))
    with testing.raises(ValueError, "layer_norm: `mean` must have shape (0,), got (3,)"):
        ops.layer_norm.out(x, *inputs[2:], keep=False, **good)
    inputs = inputs_of("attention_block", torch.float32, device)
    outs = {name: torch.empty_like(inputs[3]) for name in ("y", "sum", "attended")}
    outs |= {"lse": torch.empty(2, 3, 5, device=device)}
    outs |= {name: torch.empty(2, 5, device=device) for name in ("mean", "rstd")}
    for name, bad, text in (
        ("y", outs["y"].half(), "must have the dtype of `q` (float32), got float16"),
        ("attended", outs["attended"][:, :4], "must have shape (2, 5, 12), got (2, 4, 12)"),
        ("attended", outs["attended"].mT.contiguous().mT, "must be contiguous"),
        ("lse", outs["lse"].double(), "must be float32, got float64"),
        ("lse", outs["lse"][:, :2], "must have shape (2, 3, 5), got (2, 2, 5)"),
        ("lse", outs["lse"].mT.contiguous().mT, "must be contiguous"),
        ("mean", outs["mean"][:1], "must have shape (2, 5), got (1, 5)"),
        ("rstd", outs["rstd"].half(), "must be float32, got float16"),
    ):
        with testing.raises(TypeError if "float" in text else ValueError, f"attention_block: `{name}` {text}"):
            ops.attention_block.out(*inputs, **(outs | {name: bad}))
    with testing.raises(ValueError, "attention_block: `attended` must have shape (0,), got (2, 5, 12)"):
        ops.attention_block.out(*inputs, keep=False, **outs)


@on_each_device
@every_case
def test_an_unknown_rung_is_refused(name, device):
    """Of no rows as well."""
    case = CASES[name]
    inputs = case.inputs(torch.float32, device, False)
    arguments = getattr(ops, case.op).default._schema.arguments
    of_rows = {"x", "q", "k", "v", "residual", "grad", "grad_sum", "preactivation", "mean", "rstd"}
    of_rows |= {"key_begin", "key_end"}
    empty = [t[:0] if a.name in of_rows and t is not None else t for a, t in zip(arguments, inputs, strict=False)]
    if name.startswith("attention_block packed"):
        empty[-1] = None  # documents want a row to lie in
    getattr(step3_fused, case.op)(*empty, **case.options)
    for rung in ("v9", "", "V2_FUSED"):
        for tensors in (inputs, empty):
            with testing.raises(ValueError, f"{case.op}: `rung` must be 'auto' or one of", f"got '{rung}'"):
                getattr(step3_fused, case.op)(*tensors, **case.options, rung=rung)


@on_each_device
@every_case
def test_an_output_that_shares_memory_with_anything_is_refused(name, device):
    case = CASES[name]
    testing.check_apart(step3_fused, case.op, case.inputs(torch.float32, device, False), case.options)


@on_a_gpu
def test_tensors_on_a_gpu_and_a_cpu_are_refused(device):
    inputs = inputs_of("attention_block", torch.float32, "cpu")
    with testing.raises(ValueError, "attention_block: `bias` must be on the device of `q` (cpu), got cuda:0"):
        step3_fused.attention_block(*inputs[:-1], inputs[-1].to(device))


def test_asking_for_an_unknown_op_is_refused():
    with testing.raises(ValueError, "rungs: `op` must be 'layer_norm', ", "got 'softmax'"):
        step3_fused.rungs("softmax")
    assert "cpu" not in step3_fused.rungs("layer_norm", "cuda")
    with testing.raises(
        ValueError,
        "needs_scratch: `rung` must be one of 'v1_naive', 'v2_block', 'v3_registers', 'v4_cluster', got 'cpu'",
    ):
        step3_fused.needs_scratch("layer_norm", "cpu")


def test_a_step_that_is_not_built_says_how_to_build_it(tmp_path):
    testing.check_not_built("step3_fused", tmp_path)
