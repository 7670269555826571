"""What the tests of LayerNorm's ops, and of attention with what follows it, share: formulas, inputs, rungs."""

import pytest
import torch
import torch.nn.functional as F

import step3_fused
from kernel_fusion import testing
from kernel_fusion.ops import wide
from kernel_fusion.testing.accuracy import as_tuple
from step2_attention.testing import hidden_of

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")

ops = torch.ops.step3_fused


# ---- the formulas, composed of PyTorch's operations ----


def layer_norm_of(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def residual_layer_norm_of(x, residual, weight, bias, eps=1e-5):
    total = x + residual
    return layer_norm_of(total, weight, bias, eps), total


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
