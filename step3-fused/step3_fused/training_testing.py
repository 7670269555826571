"""What the tests of attention's ops under training share: formulas with padding and dropout, inputs, rungs."""

import functools

import pytest
import torch

import step1_simple  # whose mask the projection's dropout has
import step2_attention  # whose mask attention's dropout has, and whose op is its way back
import step3_fused
from kernel_fusion import testing
from kernel_fusion.ops import wide
from step3_fused.attention_testing import (
    ON_TENSOR_CORES,
    attention_and_lse_of,
    attention_inputs,
    can_run,
    layer_norm_of,
)

ALONE, BLOCK = "attention_residual_layer_norm", "attention_block"
RNG_STATE, ATTENTION_RNG_STATE = (1234, 8), (-98765, 40)  # seed and offset of dropout
NAN = float("nan")

ops = torch.ops.step3_fused


# ---- the formulas ----


@functools.lru_cache(maxsize=16)
def kept_of_projection(shape, dropout_p, rng_state):
    """What step 1's dropout multiplies a tensor by, on the CPU."""
    one, zero, flat = torch.ones(shape).double(), torch.zeros(shape).double(), torch.zeros(shape[-1]).double()
    return step1_simple.bias_dropout_residual(one, flat, zero, dropout_p, torch.tensor(rng_state))


@functools.lru_cache(maxsize=16)
def kept_of_weights(batch, heads, q_length, k_length, dropout_p, rng_state):
    """What step 2's dropout multiplies weights by, on the CPU: its output where all weights are alike, and v is 1."""
    q, k = (torch.zeros(batch, heads, n, 1).double() for n in (q_length, k_length))
    v = torch.eye(k_length).double().expand(batch, heads, -1, -1)
    q, k = (t.expand(-1, -1, -1, k_length) for t in (q, k))
    return k_length * step2_attention.attention(q, k, v, rng_state=torch.tensor(rng_state), dropout_p=dropout_p)


def factors_for(q, k, dropout_p, rng_state):
    if round(65536 * dropout_p) == 0:
        return 1
    return kept_of_weights(*q.shape[:3], k.shape[2], dropout_p, tuple(rng_state.tolist())).to(q)


def normalised(total, weight, bias, attended, lse, eps):
    """What both ops return: y and what follows it; mean and rstd are those of the sum, as it is rounded."""
    mean, rstd = wide(total).mean(-1), (wide(total).var(-1, correction=0) + eps).rsqrt()
    if total.dtype in (torch.float16, torch.bfloat16):  # by what rounding may move them; in a row alone perhaps nothing
        eps = torch.finfo(total.dtype).eps / 2
        mean, rstd = mean + wide(total).abs().mean(-1) * eps, rstd * (1 + eps)
    return layer_norm_of(total, weight, bias), (attended, lse, mean, rstd)


def alone_of(
    q,
    k,
    v,
    residual,
    weight,
    bias,
    begin=None,
    end=None,
    rng_state=None,
    *,
    causal=False,
    scale=None,
    attention_dropout_p=0.0,
):
    factors = factors_for(q, k, attention_dropout_p, rng_state)
    attended, lse = attention_and_lse_of(q, k, v, begin, end, causal, scale, factors)
    y, kept = normalised(attended + residual, weight, bias, attended, lse, 1e-5)
    return y, *kept


def block_of(
    q,
    k,
    v,
    residual,
    proj_weight,
    proj_bias,
    weight,
    bias,
    begin=None,
    end=None,
    rng_state=None,
    attention_rng_state=None,
    *,
    causal=False,
    scale=None,
    dropout_p=0.0,
    attention_dropout_p=0.0,
):
    factors = factors_for(q, k, attention_dropout_p, attention_rng_state)
    attended, lse = attention_and_lse_of(q, k, v, begin, end, causal, scale, factors)
    projected = attended @ proj_weight + proj_bias
    if round(65536 * dropout_p) > 0:
        projected = projected * kept_of_projection(tuple(projected.shape), dropout_p, tuple(rng_state.tolist())).to(
            projected
        )
    total = residual + projected
    y, kept = normalised(total, weight, bias, attended, lse, 1e-5)
    return y, total, *kept


FORMULAS = {ALONE: alone_of, BLOCK: block_of}
OUTPUTS = {ALONE: 1, BLOCK: 2}  # of the Python function


# ---- inputs ----


def bounds(keys, device):
    return torch.tensor(keys, dtype=torch.int32, device=device)


def given(op, dtype, device, *, shape=(3, 2, 37, 70, 8), padding=True, dropout_p=0.3, attention_dropout_p=0.2):
    """Inputs, and the options of dropout. Of three batches one sees all keys, one not the first, one none."""
    tensors = attention_inputs(*shape, dtype, device, projection=op == BLOCK)
    keys = shape[3]
    none = (None, None)
    padded = (bounds([0, 5, keys][: shape[0]], device), bounds([keys, keys - 7, keys][: shape[0]], device))
    attention_rng_state = torch.tensor(ATTENTION_RNG_STATE) if attention_dropout_p else None
    rng_states, options = (attention_rng_state,), {"attention_dropout_p": attention_dropout_p}
    if op == BLOCK:
        rng_states, options = (
            (torch.tensor(RNG_STATE) if dropout_p else None, *rng_states),
            {"dropout_p": dropout_p} | options,
        )
    return (*tensors, *(padded if padding else none), *rng_states), options


def can_do(rung, dtype, attention_dropout_p=0.0):
    if rung in ON_TENSOR_CORES:
        return dtype in (torch.float16, torch.bfloat16) and not attention_dropout_p
    return rung != "v2_fused" or dtype != torch.float64


def dtype_of(rung):
    return torch.bfloat16 if rung in ON_TENSOR_CORES else torch.float32


def rungs_of(op):
    for param in testing.device_rungs("step3_fused", op):
        device, rung = param.values
        skip = [] if can_run(device, rung) else [pytest.mark.skip("this GPU's compute capability is another one")]
        yield pytest.param(op, device, rung, marks=[*param.marks, *skip], id=f"{op}-{param.id}")


def leaves_of(inputs):
    """The floating tensors, which require gradients, and a function that puts the others behind them."""
    leaves = [t.detach().requires_grad_() for t in inputs if torch.is_tensor(t) and t.is_floating_point()]
    return leaves, inputs[len(leaves) :]


def statistics_of(op, inputs, rung="auto", **options):
    return getattr(step3_fused, op)(*inputs, return_statistics=True, rung=rung, **options)


every_op = pytest.mark.parametrize("op", [ALONE, BLOCK])
every_rung = pytest.mark.parametrize(
    ("op", "device", "rung"), [dropout_p for op in FORMULAS for dropout_p in rungs_of(op)]
)
every_rung_of_block = pytest.mark.parametrize(("op", "device", "rung"), list(rungs_of(BLOCK)))
every_dtype = pytest.mark.parametrize("dtype", [*testing.DTYPES, torch.float64], ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
on_a_gpu = pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
each_dropout = pytest.mark.parametrize(
    ("dropout_p", "attention_dropout_p"),
    [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)],
    ids=["none", "dropout_p", "attention_dropout_p", "both"],
)
