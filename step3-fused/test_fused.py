"""Step 3's ops, on every device there is: against float64, eager PyTorch, the rung before, and step 2.

python test_fused.py            pytest's options may follow, such as -k layer_norm
"""

import functools
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import step3_fused  # not installed? pip install -e ..
from kernel_fusion import steps, testing
from kernel_fusion.ops import wide
from kernel_fusion.testing.accuracy import as_tuple

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")

ops = torch.ops.step3_fused


# ---- the formulas, composed of PyTorch's operations ----


def layer_norm_of(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def residual_layer_norm_of(x, residual, weight, bias, eps=1e-5):
    total = x + residual
    return layer_norm_of(total, weight, bias, eps), total


def hidden_of(q, k, key_begin=None, key_end=None, causal=False):
    """Which queries do not see which keys: [B, 1, Sq, Sk]."""
    hidden = torch.zeros(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    key = torch.arange(k.shape[2], device=q.device)
    if causal:
        hidden |= torch.ones_like(hidden).triu(k.shape[2] - q.shape[2] + 1)
    if key_begin is not None:
        hidden |= key < key_begin.view(-1, 1, 1, 1)
    if key_end is not None:
        hidden |= key >= key_end.view(-1, 1, 1, 1)
    return hidden


def attention_and_lse_of(q, k, v, key_begin=None, key_end=None, causal=False, scale=None, factors=1):
    """Heads side by side: [B, Sq, H·D]; and the log-sum-exp. A query that sees no key gives 0, and -inf.

    factors: what dropout multiplies weights by.
    """
    hidden = hidden_of(q, k, key_begin, key_end, causal)
    scores = ((q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(hidden, -INFINITY)
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0) * factors
    return (weights @ v).transpose(1, 2).flatten(2), torch.logsumexp(wide(scores), -1)


def attention_of(*inputs, **options):
    return attention_and_lse_of(*inputs, **options)[0]


def attention_residual_layer_norm_of(q, k, v, residual, weight, bias, causal=False, scale=None, eps=1e-5):
    return layer_norm_of(attention_of(q, k, v, causal=causal, scale=scale) + residual, weight, bias, eps)


def attention_block_of(q, k, v, residual, proj_weight, proj_bias, weight, bias, causal=False, scale=None, eps=1e-5):
    projected = attention_of(q, k, v, causal=causal, scale=scale) @ proj_weight + proj_bias
    return residual_layer_norm_of(projected, residual, weight, bias, eps)


FORMULAS = {
    "layer_norm": layer_norm_of,
    "residual_layer_norm": residual_layer_norm_of,
    "attention_residual_layer_norm": attention_residual_layer_norm_of,
    "attention_block": attention_block_of,
}


# ---- inputs ----


def parameters(width, dtype, device, seed=10):
    """LayerNorm's weight and bias, not 1 and 0."""
    return 1 + testing.randn(width, dtype, device, seed, 0.2), testing.randn(width, dtype, device, seed + 1, 0.2)


def row_inputs(shape, dtype, device, *, residual=False):
    apart = min(1, 1024 / max(1, shape[-1]))  # less where sums are so long that float32's digits are scarce
    x = testing.randn(shape, torch.float64, device) + apart * testing.staircase(shape[-1], device)
    x = (x + 0.5).to(dtype)  # a mean of 0 would be all rounding
    more = (testing.randn(shape, dtype, device, seed=1),) if residual else ()
    return (x, *more, *parameters(shape[-1], dtype, device))


def attention_inputs(b, h, q_length, k_length, d, dtype, device, *, projection=False):
    width = h * d
    q = testing.randn((b, h, q_length, d), dtype, device, seed=1)
    k, v = (testing.randn((b, h, k_length, d), dtype, device, seed=s) for s in (2, 3))
    residual = testing.randn((b, q_length, width), dtype, device, seed=4)
    proj = ()
    if projection:
        proj_weight = testing.randn((width, width), dtype, device, seed=5, scale=width**-0.5)
        proj = (proj_weight, testing.randn(width, dtype, device, seed=6))
    return (q, k, v, residual, *proj, *parameters(width, dtype, device))


def inputs_of(op, dtype, device):
    """Something small and odd for any op."""
    if op in ("layer_norm", "residual_layer_norm"):
        return row_inputs((3, 6), dtype, device, residual=op == "residual_layer_norm")
    return attention_inputs(2, 3, 5, 7, 4, dtype, device, projection=op == "attention_block")


def with_statistics(op, formula):
    """The same, and what the way back wants: of attention its output and log-sum-exp; mean and rstd of what is
    normalised."""

    def extended(*inputs, **options):
        outputs = as_tuple(formula(*inputs, **options))
        eps, of_attention = options.pop("eps", 1e-5), ()
        if op.startswith("attention"):
            of_attention = attention_and_lse_of(*inputs[:3], **options)
        if op == "attention_residual_layer_norm":
            normalised = of_attention[0] + inputs[3]
        else:
            normalised = inputs[0] if op == "layer_norm" else outputs[1]
        dtype, normalised = normalised.dtype, wide(normalised)
        mean, rstd = normalised.mean(-1), (normalised.var(-1, correction=0) + eps).rsqrt()
        if of_attention and dtype != normalised.dtype:
            # What rounding what is normalised may do to them. In a row that is alone it may do nothing, by chance.
            mean, rstd = (
                mean + normalised.abs().mean(-1) * torch.finfo(dtype).eps / 2,
                rstd * (1 + torch.finfo(dtype).eps / 2),
            )
        return *outputs, *of_attention, mean, rstd

    return extended


def check(op, inputs, rung, *, reference=None, layouts=True, alone=False, **kwargs):
    formula = with_statistics(op, reference or FORMULAS[op])
    return testing.check_contract(
        step3_fused,
        op,
        inputs,
        rung,
        reference=formula,
        eager=formula,
        kwargs=kwargs,
        all_outputs={"return_statistics": True},
        layouts=layouts,
        alone=alone,
    )


# Rungs that take half types only, and drop none of attention's weights, and whose they are.
ON_TENSOR_CORES = {
    "v4_dataflow": "attention_block",
    "v5_cluster": "attention_block",
    "v4_heads": "attention_residual_layer_norm",
}


def can_run(device, rung):
    """The emulation runs all rungs; v4_dataflow needs a GPU of compute capability 9.0, the others one from 8.0 on."""
    if device != "cuda" or rung not in ON_TENSOR_CORES or not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability()
    return capability == (9, 0) or (rung != "v4_dataflow" and capability >= (8, 0))


def rungs_of(op):
    """Devices and rungs, as pytest's parameters: those that take any dtype. test_one_launch.py has the others."""
    return [param for param in testing.device_rungs("step3_fused", op) if param.values[1] not in ON_TENSOR_CORES]


def every(op):
    return pytest.mark.parametrize(("device", "rung"), rungs_of(op))


def can_do(rung, dtype):
    return rung != "v2_fused" or dtype != torch.float64


every_op_and_rung = pytest.mark.parametrize(
    ("op", "device", "rung"),
    [
        pytest.param(op, *param.values, marks=param.marks, id=f"{op}-{param.id}")
        for op in FORMULAS
        for param in rungs_of(op)
    ],
)
every_op = pytest.mark.parametrize("op", FORMULAS)
attention_ops = pytest.mark.parametrize("op", ["attention_residual_layer_norm", "attention_block"])
attention_ops_and_rungs = pytest.mark.parametrize(
    ("op", "device", "rung"),
    [
        pytest.param(op, *param.values, marks=param.marks, id=f"{op}-{param.id}")
        for op in ("attention_residual_layer_norm", "attention_block")
        for param in rungs_of(op)
    ],
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
half_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


# ---- the contract of correctness ----


@every("layer_norm")
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 127, 129, 760, 768, 1023, 1024, 1280, 1600, 2049, 4096])
def test_layer_norm_of_any_width(width, dtype, device, rung):
    check("layer_norm", row_inputs((5, width), dtype, device), rung)


@every("residual_layer_norm")
@every_dtype
@pytest.mark.parametrize("width", [1, 2, 31, 33, 64, 127, 129, 760, 768, 1023, 1024, 1280, 1600, 2049, 4096])
def test_residual_layer_norm_of_any_width(width, dtype, device, rung):
    check("residual_layer_norm", row_inputs((5, width), dtype, device, residual=True), rung)


@every("layer_norm")
@pytest.mark.parametrize("shape", [(7,), (1, 1), (2, 3, 5, 8), (257, 3), (1, 8192), (1, 8191)], ids=str)
def test_layer_norm_of_any_shape(shape, device, rung):
    check("layer_norm", row_inputs(shape, torch.float32, device), rung)
    check("layer_norm", row_inputs(shape, torch.float32, device), rung, eps=0.3)


@every_op_and_rung
@every_dtype
@pytest.mark.parametrize("width", [16392, 24001, 40960, 131072])
def test_rows_wider_than_one_multiprocessor_holds(width, dtype, op, device, rung):
    if not op.startswith("attention") and rung in ("cpu", "v1_naive", "v1_separate", "v4_cluster"):
        residual = op == "residual_layer_norm"
        check(op, row_inputs((2, width), dtype, device, residual=residual), rung, layouts=width == 24001)


@attention_ops_and_rungs
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("length", [1, 33, 127])
def test_attention_of_any_length(length, causal, dtype, op, device, rung):
    if can_do(rung, dtype):
        inputs = attention_inputs(1, 2, length, length, 64, dtype, device, projection=op == "attention_block")
        check(op, inputs, rung, causal=causal, layouts=length == 33)


@attention_ops_and_rungs
@with_and_without_mask
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1),
        (2, 3, 5, 7, 5),
        (1, 2, 33, 31, 33),  # more queries than keys: two of them see nothing, if causal
        (3, 1, 1, 129, 64),  # a decode step
        (1, 5, 3, 40, 40),
        (8, 2, 33, 35, 24),  # tiles of 16 rows
        (8, 2, 16, 16, 8),  # of 8
        (1, 3, 17, 70, 80),
        (2, 1, 9, 9, 111),
        (1, 2, 4, 4, 128),
    ],
    ids=str,
)
def test_attention_of_any_shape(shape, causal, op, device, rung):
    inputs = attention_inputs(*shape, torch.float32, device, projection=op == "attention_block")
    check(op, inputs, rung, causal=causal)


@every_op_and_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rung_finds_each_tensor_wherever_it_lies(dtype, op, device, rung):
    if op.startswith("attention"):
        inputs = attention_inputs(2, 3, 5, 7, 8, dtype, device, projection=op == "attention_block")
        check(op, inputs, rung, causal=True, alone=True, layouts=False)
    else:
        inputs = row_inputs((2, 3, 64), dtype, device, residual=op == "residual_layer_norm")
        check(op, inputs, rung, alone=True, layouts=False)


@attention_ops_and_rungs
@pytest.mark.parametrize("steep", [7, 60])
def test_each_tile_of_keys_may_bring_a_new_maximum(steep, op, device, rung):
    q, k, v, *rest = attention_inputs(1, 2, 3, 130, 16, torch.float32, device, projection=op == "attention_block")
    k = k.abs() * torch.linspace(1, steep, 130, device=device)[:, None]
    v = v + testing.staircase(130, device)[:, None]
    for keys in (k, k.flip(2), k.roll(65, 2)):
        check(op, (q.abs(), keys, v.to(q), *rest), rung, layouts=False)


@attention_ops_and_rungs
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("heads", [12, 16, 20, 25])
def test_every_gpt2_width(heads, dtype, op, device, rung):
    """All heads of GPT-2 small, medium, large and XL; lengths up to the context's 1024 where a GPU runs them."""
    for length in (1, 2, 31, 32, 33, 127, 128, 129, 1023, 1024) if device == "cuda" else (3,):
        for causal in (True, False) if device == "cuda" else (True,):
            inputs = attention_inputs(1, heads, length, length, 64, dtype, device, projection=op == "attention_block")
            check(op, inputs, rung, causal=causal, layouts=False)


@on_each_device
@attention_ops
@with_and_without_mask
def test_auto_does_gpt2_sized_layers(causal, op, device):
    for dtype in (torch.float32, torch.bfloat16):
        inputs = attention_inputs(2, 12, 128, 128, 64, dtype, device, projection=op == "attention_block")
        check(op, inputs, "auto", causal=causal, layouts=False)


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
@pytest.mark.parametrize("batch", [7, 8])
def test_the_product_adds_the_residual_where_rows_are_many(batch, device):
    """Of the pieces, with 8192 rows and more: 8 sequences of 1024 tokens of GPT-2 small."""
    inputs = attention_inputs(batch, 12, 1024, 1024, 64, torch.bfloat16, device, projection=True)
    check("attention_block", inputs, "pieces", causal=True, layouts=False)
    residual, proj_weight, proj_bias, *norm = inputs[3:]
    options = {"causal": True, "return_statistics": True, "rung": "pieces"}
    y, total, attended, _, mean, rstd = step3_fused.attention_block(*inputs, **options)
    if batch == 8:
        expected = step3_fused.linear_bias_dropout_residual(attended, proj_weight, proj_bias, residual, dropout_p=0.0)
        normalised = step3_fused.layer_norm(expected, *norm, return_statistics=True)
    else:
        projected = step3_fused.linear(attended, proj_weight, proj_bias)
        normal, expected, *statistics = step3_fused.residual_layer_norm(
            projected, residual, *norm, return_statistics=True
        )
        normalised = (normal, *statistics)
    assert torch.equal(total, expected)
    for got, same in zip((y, mean, rstd), normalised, strict=True):
        assert torch.equal(got, same)


@pytest.mark.parametrize("batch", [127, 128])
def test_the_emulated_product_adds_the_residual_where_rows_are_many(batch):
    """Then it is the rounded sum that is normalised."""
    inputs = attention_inputs(batch, 2, 64, 64, 8, torch.bfloat16, "cpu", projection=True)
    check("attention_block", inputs, "pieces", causal=True, layouts=False)
    y, total = step3_fused.attention_block(*inputs, causal=True, rung="pieces")
    assert torch.equal(y, step3_fused.layer_norm(total, *inputs[6:], rung="v3_registers")) == (batch == 128)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_auto_takes_what_was_measured_to_be_fastest(device):
    """On a GPU the rung that the results show ahead; on the CPU the plain C++ version. Bit for bit."""
    few, many, wide = (2, 12, 33, 33, 64), (2, 12, 65, 65, 64), (1, 17, 33, 33, 64)
    token, later = (3, 25, 1, 128, 64), (3, 25, 1, 129, 64)
    for op, shape, rung in (
        ("attention_block", few, "v5_cluster"),
        ("attention_block", many, "pieces"),
        ("attention_block", wide, "pieces"),
        ("attention_residual_layer_norm", few, "v4_heads"),
        ("attention_residual_layer_norm", many, "pieces"),
        ("attention_residual_layer_norm", wide, "pieces"),
        ("attention_residual_layer_norm", token, "v4_heads"),
        ("attention_residual_layer_norm", later, "pieces"),
    ):
        inputs = attention_inputs(*shape, torch.bfloat16, device, projection=op == "attention_block")
        if device == "cpu":
            rung = "cpu"
        elif torch.cuda.get_device_capability() < (9, 0):
            rung = "pieces"
        expected, got = (as_tuple(getattr(step3_fused, op)(*inputs, causal=True, rung=r)) for r in (rung, "auto"))
        for one, same in zip(got, expected, strict=True):
            assert torch.equal(one, same)
    for width, rung in ((768, "v3_registers"), (1599, "v1_naive"), (16384, "v3_registers"), (16392, "v4_cluster")):
        x, weight, bias = (testing.randn(shape, torch.bfloat16, device) for shape in ((5, width), (width,), (width,)))
        expected = step3_fused.layer_norm(x, weight, bias, rung=rung if device == "cuda" else "cpu")
        assert torch.equal(step3_fused.layer_norm(x, weight, bias), expected)


SIZES = {"B": ["batch"], "H": ["heads"], "S": ["q_length", "k_length"], "keys": ["k_length"], "D": ["head_dim"]} | {
    "x_bias": [],
    "p": [],
}


@pytest.mark.parametrize(
    "op", ["layer_norm", "residual_layer_norm", "attention_residual_layer_norm", "attention_block"]
)
def test_auto_is_read_off_the_results(op):
    testing.check_automatic(
        step3_fused, op, lambda shape: {name: n for k, n in shape.items() for name in SIZES.get(k, [k])}
    )


@every("attention_residual_layer_norm")
def test_rows_so_wide_that_fewer_fit_into_shared_memory(device, rung):
    """At most 16, 8, 4 and 1 rows of these widths fit into the 227 KB of a Hopper GPU, which the emulation has too."""
    memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device == "cuda" else 227 << 10
    for batch, width in ((16, 800), (16, 4000), (2, 9000), (2, 28000)):
        if rung == "v2_fused" and 4 * width + 36000 > memory:  # other GPUs have less
            continue
        inputs = attention_inputs(batch, width // 100, 1, 2, 100, torch.float16, device)
        check("attention_residual_layer_norm", inputs, rung, layouts=False)


@every("attention_block")
def test_rows_so_wide_that_fewer_fit_beside_their_projection(device, rung):
    for width in (1920, 7360) if device == "cuda" else (1920,):
        inputs = attention_inputs(16, width // 40, 1, 2, 40, torch.float16, device, projection=True)
        check("attention_block", inputs, rung, layouts=False)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for op in FORMULAS:
        for device, rung in (param.values for param in rungs_of(op)):
            if device == "cpu":
                check(op, inputs_of(op, torch.float32, "cpu"), rung, layouts=False)
    for op in ("attention_residual_layer_norm", "attention_block"):
        inputs = attention_inputs(8, 2, 33, 35, 24, torch.float32, "cpu", projection=op == "attention_block")
        for rung in ("v1_separate", "v2_fused", "pieces"):
            check(op, inputs, rung, causal=True, layouts=False)


# ---- what the fused ops are made of ----


def from_pieces(op, inputs, causal):
    """Step 2's attention, then this step's separate ops, each result written and read again."""
    import step2_attention  # where it is not built, the error gives the command

    q, k, v, residual, *rest = inputs
    attended = step2_attention.attention(q, k, v, causal=causal).transpose(1, 2).flatten(2)
    if op == "attention_block":
        proj_weight, proj_bias, *rest = rest
        return step3_fused.residual_layer_norm(attended @ proj_weight + proj_bias, residual, *rest)
    return step3_fused.layer_norm(attended + residual, *rest)


@attention_ops_and_rungs
@with_and_without_mask
@pytest.mark.parametrize("shape", [(2, 3, 50, 50, 64), (1, 4, 7, 33, 16)], ids=str)
def test_fused_is_step_2s_attention_then_the_separate_pieces(shape, causal, op, device, rung):
    inputs = attention_inputs(*shape, torch.float32, device, projection=op == "attention_block")
    fused = getattr(step3_fused, op)(*inputs, causal=causal, rung=rung)
    torch.testing.assert_close(fused, from_pieces(op, inputs, causal), rtol=1e-4, atol=1e-5)


@attention_ops_and_rungs
@with_and_without_mask
def test_fused_is_pytorchs_own_chain(causal, op, device, rung):
    inputs = attention_inputs(2, 3, 40, 40, 64, torch.float32, device, projection=op == "attention_block")
    q, k, v, residual, *rest = inputs
    x = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
    if op == "attention_block":
        proj_weight, proj_bias, *rest = rest
        x = x @ proj_weight + proj_bias
    total = x + residual
    y = F.layer_norm(total, total.shape[-1:], *rest)
    expected = (y, total) if op == "attention_block" else y
    torch.testing.assert_close(
        getattr(step3_fused, op)(*inputs, causal=causal, rung=rung), expected, rtol=1e-4, atol=1e-5
    )


LAUNCHES = {
    ("layer_norm", "v1_naive"): 1,
    ("layer_norm", "v2_block"): 1,
    ("layer_norm", "v3_registers"): 1,
    ("layer_norm", "v4_cluster"): 1,
    ("residual_layer_norm", "v1_separate"): 2,
    ("residual_layer_norm", "v2_fused"): 1,
    ("residual_layer_norm", "v3_registers"): 1,
    ("residual_layer_norm", "v4_cluster"): 1,
    ("attention_residual_layer_norm", "v1_separate"): 3,
    ("attention_residual_layer_norm", "v2_fused"): 1,
    ("attention_block", "v1_separate"): 4,
    ("attention_block", "v2_fused"): 1,
}
# The pieces are other ops' rungs: one for each, where they are not the library's.
EMULATED_LAUNCHES = {("attention_residual_layer_norm", "pieces"): 2, ("attention_block", "pieces"): 3}


@every_op_and_rung
def test_a_rung_launches_as_many_kernels_as_its_header_says(op, device, rung):
    if rung == "cpu" or (device == "cuda" and (op, rung) in EMULATED_LAUNCHES):
        return
    inputs = inputs_of(op, torch.float32, device)
    function = getattr(step3_fused, op)
    function(*inputs, rung=rung)
    if device == "cuda":
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            function(*inputs, rung=rung)
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len([e for e in kernels if "Memset" not in e.name and "Memcpy" not in e.name]) == LAUNCHES[op, rung]
    else:
        before = step3_fused.emulated_kernels()
        function(*inputs, rung=rung)
        assert step3_fused.emulated_kernels() - before == (LAUNCHES | EMULATED_LAUNCHES)[op, rung]


def test_only_attention_rungs_of_several_launches_ask_for_scratch():
    asking = {(op, rung) for op, rung in LAUNCHES | EMULATED_LAUNCHES if step3_fused.needs_scratch(op, rung)}
    separate = {(op, "v1_separate") for op in ("attention_residual_layer_norm", "attention_block")}
    assert asking == separate | set(EMULATED_LAUNCHES)


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
@attention_ops
def test_fused_allocates_nothing_but_its_outputs(op, device):
    inputs = attention_inputs(2, 12, 128, 128, 64, torch.bfloat16, device, projection=op == "attention_block")
    names = ("y", "sum", "attended") if op == "attention_block" else ("out", "attended")
    outs = {name: torch.empty_like(inputs[3]) for name in names} | {"lse": torch.empty(2, 12, 128, device=device)}
    outs |= {name: torch.empty(2, 128, device=device) for name in ("mean", "rstd")}
    for rung, grows in (("v2_fused", False), ("v1_separate", True)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        getattr(ops, op).out(*inputs, causal=True, rung=rung, **outs)
        assert (torch.cuda.max_memory_allocated() > before) is grows


# ---- what a wrong kernel would do, and how it shows ----


def heads_swapped(formula):
    def wrong(q, k, v, *rest, **options):
        order = list(range(q.shape[1]))
        order[0], order[1] = 1, 0
        return formula(q[:, order], k[:, order], v[:, order], *rest, **options)

    return wrong


def without_mask(formula):
    return lambda *inputs, causal: formula(*inputs)


def upper_left_mask(formula):
    def wrong(q, k, v, *rest, causal):
        return formula(q, k[:, :, : q.shape[2]], v[:, :, : q.shape[2]], *rest, causal=True)

    return wrong


def normalised_by_head(formula):
    """LayerNorm over each head's slice, as a block that owns one head would do it."""

    def wrong(q, k, v, residual, *rest, causal):
        x = attention_of(q, k, v, causal=causal) + residual
        heads = x.unflatten(2, (q.shape[1], q.shape[3]))
        y = F.layer_norm(heads, heads.shape[-1:]).flatten(2)
        return y * rest[0] + rest[1]

    return wrong


def without_projection_bias(formula):
    return lambda q, k, v, r, w, b, *rest, causal: formula(q, k, v, r, w, torch.zeros_like(b), *rest, causal=causal)


def projection_transposed(formula):
    return lambda q, k, v, r, w, *rest, causal: formula(q, k, v, r, w.mT, *rest, causal=causal)


def without_residual(formula):
    return lambda q, k, v, r, *rest, causal: formula(q, k, v, torch.zeros_like(r), *rest, causal=causal)


def uniform_softmax(formula):
    return lambda q, *rest, causal: formula(torch.zeros_like(q), *rest, causal=causal)


MISTAKES = [heads_swapped, without_mask, upper_left_mask, without_residual, uniform_softmax]


@pytest.mark.parametrize(
    ("op", "mistake"),
    [
        *(("attention_residual_layer_norm", mistake) for mistake in (*MISTAKES, normalised_by_head)),
        *(("attention_block", mistake) for mistake in (*MISTAKES, without_projection_bias, projection_transposed)),
    ],
)
@on_each_device
def test_the_contract_catches(mistake, op, device):
    """The mistake is made in the formula; a rung that made it would differ from the right one by as much."""
    inputs = attention_inputs(1, 3, 9, 12, 16, torch.float32, device, projection=op == "attention_block")
    for rung in (param.values[1] for param in rungs_of(op) if param.values[0] == device):
        with testing.raises(AssertionError, "against float64"):
            check(op, inputs, rung, reference=mistake(FORMULAS[op]), causal=True)


@attention_ops_and_rungs
def test_the_future_has_no_influence(op, device, rung):
    inputs = attention_inputs(1, 2, 40, 40, 16, torch.float32, device, projection=op == "attention_block")
    function = getattr(step3_fused, op)
    before = function(*inputs, causal=True, rung=rung)
    inputs[1][:, :, 25:], inputs[2][:, :, 25:] = 1e4, -1e4
    after = function(*inputs, causal=True, rung=rung)
    if op == "attention_block":
        before, after = before[1], after[1]
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


# ---- inputs that are unusual, and right ----


@every("layer_norm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [31, 768, 1600, 20000])
def test_a_large_mean_does_not_drown_a_small_variance(width, dtype, device, rung):
    """E[x²] − E[x]² has no digit left here; a mean rounded to float32 would shift the result by 0.05."""
    if width > 16384 and rung in ("v2_block", "v3_registers"):
        return  # refused
    weight, bias = parameters(width, dtype, device)
    for mean, spread in ((1e4, 1e-2), (-1e4, 1.0), (3e5, 0.5)):
        x = mean + testing.randn((4, width), torch.float64, device, scale=spread)
        x = x.to(dtype)
        y, saved, _ = (t.double() for t in step3_fused.layer_norm(x, weight, bias, return_statistics=True, rung=rung))
        exact = layer_norm_of(x.double(), weight.double(), bias.double())
        assert (y - exact).abs().max() <= 2e-6 * exact.abs().max()
        if dtype == torch.float32:  # the saved mean is the nearest number
            assert torch.equal(saved, x.double().mean(-1).float().double())


@every("residual_layer_norm")
def test_the_fused_sum_has_a_large_mean(device, rung):
    weight, bias = parameters(768, torch.float32, device)
    x = (1e4 + testing.randn((4, 768), torch.float64, device, scale=0.5)).float()
    residual = testing.randn((4, 768), torch.float32, device, seed=1, scale=0.01)
    check("residual_layer_norm", (x, residual, weight, bias), rung)


@every("layer_norm")
@every_dtype
def test_a_constant_row_gives_the_bias(dtype, device, rung):
    for width in (1, 33, 768):
        weight, bias = parameters(width, dtype, device)
        for value in (0.0, 1.0, -0.1, 1000.1):
            x = torch.full((2, width), value, dtype=dtype, device=device)
            y = step3_fused.layer_norm(x, weight, bias, rung=rung)
            torch.testing.assert_close(y, bias.expand(2, width))


@every("layer_norm")
def test_an_eps_of_0_adds_nothing(device, rung):
    x, weight, bias = row_inputs((3, 64), torch.float32, device)
    x *= 1e-4  # a variance of 1e-8, beside which the default of 1e-5 would be all
    torch.testing.assert_close(
        step3_fused.layer_norm(x, weight, bias, eps=0.0, rung=rung), layer_norm_of(x, weight, bias, 0.0)
    )


@attention_ops_and_rungs
@with_and_without_mask
def test_a_scale_of_0_weighs_all_keys_alike(causal, op, device, rung):
    inputs = attention_inputs(1, 2, 5, 7, 8, torch.float32, device, projection=op == "attention_block")
    inputs = tuple(t.requires_grad_() for t in inputs)
    out = getattr(step3_fused, op)(*inputs, causal=causal, scale=0.0, rung=rung)
    expected = FORMULAS[op](torch.zeros_like(inputs[0]), *inputs[1:], causal=causal)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    (out[0] if op == "attention_block" else out).square().sum().backward()
    assert inputs[0].grad.eq(0).all()
    assert inputs[1].grad.eq(0).all()


@attention_ops_and_rungs
def test_a_call_knows_nothing_of_the_one_before(op, device, rung):
    inputs = attention_inputs(1, 1, 3, 9, 8, torch.float32, device, projection=op == "attention_block")
    getattr(step3_fused, op)(*inputs, rung=rung)
    for tensor in inputs[1:]:
        tensor.neg_().mul_(1.5)  # other numbers in the same place
    out = getattr(step3_fused, op)(*inputs, rung=rung)
    torch.testing.assert_close(out, FORMULAS[op](*inputs), rtol=1e-4, atol=1e-5)


@every("layer_norm")
def test_eps_stands_under_the_root_and_the_variance_is_the_biased_one(device, rung):
    x = torch.tensor([[1.0, 3.0]], device=device)  # mean 2, variance 1 (divided by 2; by 1 it would be 2)
    one, zero = torch.ones(2, device=device), torch.zeros(2, device=device)
    y = step3_fused.layer_norm(x, one, zero, eps=3.0, rung=rung)  # outside the root it would be 1/(1 + 3)
    torch.testing.assert_close(y, torch.tensor([[-0.5, 0.5]], device=device))


@every_op_and_rung
@half_types
def test_large_numbers_do_not_overflow_in_half_precision(dtype, op, device, rung):
    """Squares of 200 exceed float16's range of 65504 from a sum of two on; sums are kept in float32."""
    inputs = inputs_of(op, dtype, device)
    rows = 3 if op.startswith("attention") else 0
    inputs[rows].mul_(200)
    check(op, inputs, rung)


@attention_ops_and_rungs
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_scores_beyond_the_half_types_range_pick_the_greatest(dtype, op, device, rung):
    inputs = attention_inputs(1, 2, 6, 6, 64, dtype, device, projection=op == "attention_block")
    inputs[0].sign_().mul_(1e4)
    inputs[1].sign_().mul_(1e4)  # scores of up to 8e8
    y = getattr(step3_fused, op)(*inputs, rung=rung)
    expected = FORMULAS[op](*(t.double() for t in inputs))
    if op == "attention_block":
        y, expected = y[0], expected[0]
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=5 * torch.finfo(dtype).eps)


@attention_ops_and_rungs
def test_a_query_that_sees_no_key_gives_the_residual_alone(op, device, rung):
    inputs = attention_inputs(1, 2, 40, 3, 8, torch.float32, device, projection=op == "attention_block")
    inputs = tuple(t.requires_grad_() for t in inputs)
    out = getattr(step3_fused, op)(*inputs, causal=True, rung=rung)
    y = out[0] if op == "attention_block" else out
    residual, weight, bias = inputs[3], *inputs[-2:]
    alone = residual + inputs[5] if op == "attention_block" else residual
    torch.testing.assert_close(y[:, :37], layer_norm_of(alone, weight, bias)[:, :37])
    y.square().sum().backward()
    assert inputs[0].grad[:, :, :37].eq(0).all()
    assert all(t.grad.isfinite().all() for t in inputs)


@every_op_and_rung
def test_empty_tensors(op, device, rung):
    function = getattr(step3_fused, op)
    if not op.startswith("attention"):
        more = (torch.empty(0, 8, device=device),) if op == "residual_layer_norm" else ()
        out = function(torch.empty(0, 8, device=device), *more, *parameters(8, torch.float32, device), rung=rung)
        assert (out[0] if op == "residual_layer_norm" else out).shape == (0, 8)
        return
    for b, q_length, k_length in ((0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)):
        inputs = attention_inputs(
            b, 2, q_length, k_length, 4, torch.float32, device, projection=op == "attention_block"
        )
        out = function(*inputs, rung=rung)
        y = out[0] if op == "attention_block" else out
        assert y.shape == (b, q_length, 8)
        if k_length == 0:  # attention over nothing is 0
            alone = inputs[3] + inputs[5] if op == "attention_block" else inputs[3]
            torch.testing.assert_close(y, layer_norm_of(alone, *inputs[-2:]))


# ---- strides ----


@attention_ops_and_rungs
def test_gpt2s_packed_q_k_v_are_read_as_they_lie(op, device, rung):
    b, s, h, d = 2, 33, 3, 64
    packed = testing.randn((b, s, 3 * h * d), torch.float32, device)
    q, k, v = (t.view(b, s, h, d).transpose(1, 2) for t in packed.split(h * d, -1))
    inputs = attention_inputs(b, h, s, s, d, torch.float32, device, projection=op == "attention_block")
    inputs = (q, k, v, *inputs[3:])
    out = getattr(step3_fused, op)(*inputs, causal=True, rung=rung)
    torch.testing.assert_close(out, FORMULAS[op](*inputs, causal=True), rtol=1e-4, atol=1e-5)


@attention_ops_and_rungs
def test_views_of_any_strides(op, device, rung):
    q, k, v, *rest = attention_inputs(2, 2, 6, 10, 16, torch.float32, device, projection=op == "attention_block")
    for views in (
        (q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 2, -1, -1), v),  # strides of 0
        (q.mT.contiguous().mT, k.mT.contiguous().mT, v.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)),
    ):
        out = getattr(step3_fused, op)(*views, *rest, rung=rung)
        torch.testing.assert_close(out, FORMULAS[op](*views, *rest), rtol=1e-4, atol=1e-5)


@attention_ops_and_rungs
@pytest.mark.parametrize("far", ["batch", "heads", "positions"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_attention_at_offsets_beyond_32_bits(which, far, op, device, rung):
    """One tensor whose neighbours along one dimension are 2³² elements and more apart: most of it nobody touches."""
    dim = ["batch", "heads", "positions"].index(far)
    b, h, s = (2 if i == dim else 1 for i in range(3))
    inputs = list(attention_inputs(b, h, s, s, 8, torch.float16, device, projection=op == "attention_block"))
    expected = FORMULAS[op](*(t.double() for t in inputs))
    distance = (1 << 32) + 4096  # what wraps around lands where nothing is
    strides = [8, 8, 8, 1]
    strides[dim] = distance
    index = "qkv".index(which)
    memory = testing.lazy_memory(distance + 4096, torch.float16, device)
    inputs[index] = memory.as_strided((b, h, s, 8), strides).copy_(inputs[index])
    outputs = getattr(step3_fused, op)(*inputs, rung=rung)
    for out, want in zip(as_tuple(outputs), as_tuple(expected), strict=True):
        torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("op", "device", "rung"),
    [
        pytest.param(op, *param.values, marks=param.marks, id=f"{op}-{param.id}")
        for op in ("layer_norm", "residual_layer_norm")
        for param in rungs_of(op)
        if param.values[1] != "cpu"
    ],
)
@pytest.mark.parametrize("width", [4096, 4093])
def test_layer_norm_of_more_than_2_to_32_elements(width, op, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "40")  # of v1_separate's sum, 40 · 256 elements
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    rows = (1 << 20) + (1 << 13)
    weight, bias = parameters(width, torch.bfloat16, device)
    x, y, total = (testing.lazy_memory(rows * width, torch.bfloat16, device).view(rows, width) for _ in range(3))
    kept = {name: torch.empty(rows, device=device) for name in ("mean", "rstd")}
    x[-1] = testing.randn((width,), torch.bfloat16, device)
    if op == "layer_norm":
        ops.layer_norm.out(x, weight, bias, rung=rung, y=y, **kept)
        expected = layer_norm_of(x[-1].double(), weight.double(), bias.double())
    else:
        ops.residual_layer_norm.out(x, x, weight, bias, rung=rung, y=y, sum=total, **kept)
        assert torch.equal(total[-1], 2 * x[-1])
        expected = layer_norm_of(2 * x[-1].double(), weight.double(), bias.double())
    torch.testing.assert_close(y[-1].double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(y[-2], bias)


@pytest.mark.parametrize(
    ("op", "device", "rung"),
    [
        pytest.param(op, *param.values, marks=param.marks, id=f"{op}-{param.id}")
        for op in FORMULAS
        for param in rungs_of(op)
    ],
)
@pytest.mark.parametrize("width", [24, 4100])
def test_statistics_that_nobody_wants_are_not_written(width, op, device, rung):
    """The rest is the same to the last bit; and who wants gradients after all has them computed anew."""
    if op.startswith("attention"):
        inputs = attention_inputs(1, 2, 5, 7, min(width // 2, 24), torch.float32, device, projection="block" in op)
    else:
        x, residual = (testing.randn((5, width), torch.float32, device, seed=seed) for seed in (1, 2))
        inputs = [x, *([residual] if op == "residual_layer_norm" else []), *parameters(width, torch.float32, device)]
    function, nobodys = getattr(ops, op), 4 if op.startswith("attention") else 2
    kept, without = (function(*inputs, keep=keep, rung=rung) for keep in (True, False))
    outputs = without[:-nobodys]
    assert all(t.shape == (0,) and t.dtype == torch.float32 for t in without[-nobodys:])
    assert all(torch.equal(a, b) for a, b in zip(kept[:-nobodys], outputs, strict=True))
    leaves = [t.clone().requires_grad_() for t in inputs]

    def gradients(keep):
        outputs_again = function(*leaves, keep=keep, rung=rung)[:-nobodys]
        return torch.autograd.grad(sum(out.square().sum() for out in outputs_again), leaves)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@on_each_device
@every_op
def test_statistics_are_kept_where_a_gradient_is_wanted(op, device, monkeypatch):
    asked = []
    real = getattr(ops, op)
    monkeypatch.setattr(step3_fused._ops, op, lambda *a, keep, **k: asked.append(keep) or real(*a, keep=keep, **k))
    inputs = inputs_of(op, torch.float32, device)
    function = getattr(step3_fused, op)
    function(*inputs)
    kept = 4 if op.startswith("attention") else 2
    assert len(function(*inputs, return_statistics=True)) == len(as_tuple(function(*inputs))) + kept
    for position in range(len(inputs)):
        leaves = [t.clone().requires_grad_(i == position) for i, t in enumerate(inputs)]
        function(*leaves)
        with torch.no_grad():
            function(*leaves)
    assert asked == [False, True, False, *[True, False] * len(inputs)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    """Sizes alone decide, so no memory is needed."""

    def choose(op, rung, **sizes):
        return step3_fused._C.choose(op, rung, sizes, dtype)

    most, block = (1 << 31) - 1, 4096 if dtype == torch.float64 else 8192
    for op, one, widest, other in (
        ("layer_norm", "v2_block", block, "v1_naive"),
        ("layer_norm", "v3_registers", 2 * block, "v1_naive"),
        ("residual_layer_norm", "v2_fused", block, "v1_separate"),
        ("residual_layer_norm", "v3_registers", 2 * block, "v1_separate"),
    ):
        assert choose(op, one, rows=most, width=widest) == one
        assert choose(op, "auto", rows=most, width=widest) == "v3_registers"
        for sizes, text in (
            ({"rows": most + 1, "width": widest}, f"takes rows ≤ {most}, got {most + 1}"),
            ({"rows": 1, "width": widest + 1}, f"takes width ≤ {widest}, got {widest + 1}"),
        ):
            # wider than v2 takes, v3 or v4 may take it; layer_norm's only where vectors divide the width
            wider = {block + 1: "v3_registers", 2 * block + 1: "v4_cluster"} if op == "residual_layer_norm" else {}
            assert choose(op, "auto", **sizes) == wider.get(sizes["width"], other)
            with testing.raises(ValueError, f"{op}: rung '{one}' {text}; these can: '{other}'"):
                choose(op, one, **sizes)
        assert choose(op, "auto", rows=1, width=2 * block + 8) == "v4_cluster"
        assert choose(op, "auto", rows=8 * most) == other
        for rung in (other, "auto"):
            with testing.raises(ValueError, f"got {8 * most + 1}; no rung can do this"):
                choose(op, rung, rows=8 * most + 1)
    for op in ("attention_residual_layer_norm", "attention_block"):
        sizes = {"batch": 1 << 10, "heads": 12, "q_length": 1024, "k_length": 1 << 40, "head_dim": 64}
        assert choose(op, "auto", **sizes) == "pieces"
        too_many = {"batch": 1 << 20, "heads": 1 << 6, "q_length": 1 << 9}
        with testing.raises(
            ValueError, f"rung 'v1_separate' takes at most {most} blocks of 16 queries, got {most + 1}"
        ):
            choose(op, "v1_separate", **too_many)
        if dtype == torch.float64:
            with testing.raises(ValueError, "rung 'v2_fused' takes float32, float16 and bfloat16, got float64"):
                choose(op, "v2_fused", **sizes)
            continue
        assert choose(op, "v2_fused", **sizes) == choose(op, "v2_fused", **too_many) == "v2_fused"
        # no product in float32 of so many rows, and v3 needs one
        alone = op == "attention_block" and dtype == torch.float32
        assert choose(op, "auto", **too_many) == ("v2_fused" if alone else "pieces")
        with testing.raises(
            ValueError, f"{op}: rung 'v2_fused' takes batch·q_length ≤ 2³¹−1, got {most + 1}; these can"
        ):
            choose(op, "v2_fused", batch=1 << 20, q_length=1 << 11)


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
    """LayerNorm's gradient, and the projection's, by this step's kernels; attention's by step 2's."""
    inputs = [t.requires_grad_() for t in inputs_of(op, torch.float32, device)]
    outputs = getattr(step3_fused, op)(*inputs, rung=rung)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    before = step3_fused.launch_counts()
    torch.autograd.grad(outputs, inputs, [torch.ones_like(out) for out in outputs])
    backend = "gpu" if device == "cuda" else "cpu"
    before[backend] += 2 if op == "attention_block" else 1
    assert step3_fused.launch_counts() == before


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


# ---- bad input ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_layer_norm_refuses(device):
    x, w = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with testing.raises(TypeError, "layer_norm: `x` must be float32, float16, bfloat16 or float64, got int64"):
        step3_fused.layer_norm(x.long(), w, w)
    with testing.raises(ValueError, "layer_norm: `x` must have at least 1 dimension, got 0 (shape ())"):
        step3_fused.layer_norm(x[0, 0], w, w)
    with testing.raises(ValueError, "layer_norm: the last dimension of `x` must not be 0, got shape (2, 0)"):
        step3_fused.layer_norm(x[:, :0], w[:0], w[:0])
    with testing.raises(TypeError, "layer_norm: `weight` must have the dtype of `x` (float32), got float16"):
        step3_fused.layer_norm(x, w.half(), w)
    with testing.raises(ValueError, "layer_norm: `bias` must have shape (3,), got (2,)"):
        step3_fused.layer_norm(x, w, w[:2])
    with testing.raises(ValueError, "residual_layer_norm: `residual` must have shape (2, 3), got (1, 3)"):
        step3_fused.residual_layer_norm(x, x[:1], w, w)
    other = "meta" if device != "meta" else "cpu"
    with testing.raises(ValueError, "layer_norm: `weight` must be on the device of `x`", f"got {other}"):
        step3_fused.layer_norm(x, torch.ones(3, device=other), w)


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
    refuses(ValueError, "`q` must have 4 dimensions, got 3 (shape (2, 3, 4))", q=good["q"][0])
    refuses(ValueError, "heads and head_dim of `q` must not be 0, got shape (1, 2, 3, 0)", q=good["q"][..., :0])
    refuses(ValueError, "heads and head_dim of `q` must not be 0, got shape (1, 0, 3, 4)", q=good["q"][:, :0])
    refuses(ValueError, "`k` must have 4 dimensions, got 3 (shape (2, 5, 4))", k=good["k"][0])
    for name, tensor in good.items():
        if name != "q":
            refuses(TypeError, f"`{name}` must have the dtype of `q` (float32), got float64", **{name: tensor.double()})
            other = "meta" if device != "meta" else "cpu"
            refuses(
                ValueError, f"`{name}` must be on the device of `q`", **{name: torch.ones(tensor.shape, device=other)}
            )
    refuses(ValueError, "`k` must have shape (1, 2, 5, 4), got (1, 1, 5, 4)", k=good["k"][:, :1])
    refuses(ValueError, "`v` must have shape (1, 2, 5, 4), got (1, 2, 4, 4)", v=good["v"][:, :, :4])
    refuses(ValueError, "`residual` must have shape (1, 3, 8), got (3, 8)", residual=good["residual"][0])
    refuses(ValueError, "`residual` must have shape (1, 3, 8), got (1, 3, 4)", residual=good["residual"][..., :4])
    refuses(ValueError, "`weight` must have shape (8,), got (4,)", weight=good["weight"][:4])
    refuses(ValueError, "`bias` must have shape (8,), got (4,)", bias=good["bias"][:4])
    if op == "attention_block":
        refuses(ValueError, "`proj_weight` must have shape (8, 8), got (8, 4)", proj_weight=good["proj_weight"][:, :4])
        refuses(ValueError, "`proj_bias` must have shape (8,), got (4,)", proj_bias=good["proj_bias"][:4])


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
@every_op
def test_an_unknown_rung_is_refused(op, device):
    inputs = inputs_of(op, torch.float32, device)
    more_than_batch = {"weight", "bias", "proj_weight", "proj_bias"}
    names = [a.name for a in getattr(ops, op).default._schema.arguments][: len(inputs)]
    empty = tuple(t if name in more_than_batch else t[:0] for name, t in zip(names, inputs, strict=True))
    getattr(step3_fused, op)(*empty)
    for rung in ("v9", "", "V2_FUSED"):
        for tensors in (inputs, empty):
            with testing.raises(ValueError, f"{op}: `rung` must be 'auto' or one of", "'v2_", f"got '{rung}'"):
                getattr(step3_fused, op)(*tensors, rung=rung)


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
            inputs = row_inputs((1, width + 1), dtype, device, residual=op == "residual_layer_norm")
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
    inputs = attention_inputs(1, 1000, 1, 1, 100, torch.float16, device)
    with testing.raises(
        ValueError,
        "rung 'v2_fused' keeps rows of heads·head_dim = 100000 numbers in shared memory",
        "this device has",
        "these can: 'v1_separate'",
    ):
        step3_fused.attention_residual_layer_norm(*inputs, rung="v2_fused")
    y = step3_fused.attention_residual_layer_norm(*inputs)  # auto takes one that can
    torch.testing.assert_close(y, attention_residual_layer_norm_of(*inputs), rtol=1e-2, atol=1e-2)


@on_each_device
def test_a_head_too_wide_for_shared_memory_is_refused_in_words(device):
    inputs = attention_inputs(1, 1, 1, 1, 2000, torch.float32, device)
    with testing.raises(
        ValueError,
        "rung 'v1_separate' keeps tiles of head_dim 2000 columns in shared memory",
        "these can: 'pieces'",
    ):
        step3_fused.attention_residual_layer_norm(*inputs, rung="v1_separate")
    check("attention_residual_layer_norm", inputs, "auto", layouts=False)


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
@every_op
def test_an_output_that_shares_memory_with_anything_is_refused(op, device):
    testing.check_apart(step3_fused, op, inputs_of(op, torch.float32, device))


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
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
    """The Python part alone, in another folder: what a fresh clone looks like."""
    for part in ("common/kernel_fusion", "step3-fused/step3_fused"):
        (tmp_path / part).mkdir(parents=True)
        for source in (steps.ROOT / part).glob("*.py"):
            (tmp_path / part / source.name).write_bytes(source.read_bytes())
    command, environment = (
        [sys.executable, "-c", "import step3_fused"],
        {**os.environ, "PYTHONPATH": steps.python_path(tmp_path)},
    )
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 1
    assert "step3_fused is not built" in ran.stderr
    assert "cd step3-fused && python setup.py build_ext --inplace" in ran.stderr


# ---- page one, and the example ----


def run_fused_kernel(program):
    command = [sys.executable, "-m", "kernel_fusion", "simt", str(program)]
    return subprocess.run(command, capture_output=True, text=True)


def test_fused_kernel_runs_under_emulation():
    ran = run_fused_kernel(pathlib.Path(__file__).with_name("fused_kernel.cu"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "one launch" in ran.stdout
    error = float(ran.stdout.split("in double: ")[1].split()[0])
    assert 0 < error < 1e-5
    assert "all right" in ran.stdout


def test_fused_kernel_fails_where_an_element_is_not_written(tmp_path):
    source = pathlib.Path(__file__).with_name("fused_kernel.cu").read_text()
    written = "y[token * kWidth + c] = (row[c]"
    assert written in source
    (tmp_path / "fused_kernel.cu").write_text(source.replace(written, f"if (c > 0) {written}"))
    ran = run_fused_kernel(tmp_path / "fused_kernel.cu")
    assert ran.returncode == 1
    assert "WRONG" in ran.stdout


def test_usage_example_runs():
    program = pathlib.Path(__file__).parent / "pages" / "usage_example.py"
    ran = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for op in FORMULAS:
        assert op in ran.stdout


if __name__ == "__main__":
    testing.main(__file__)
