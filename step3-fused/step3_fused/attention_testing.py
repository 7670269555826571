"""What the tests of LayerNorm's ops, and of attention with what follows it, share: formulas, inputs, rungs."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

import step1_simple  # whose mask dropout of rows has
import step2_attention  # whose mask attention's dropout has, and whose op is its way back
import step3_fused
from kernel_fusion import testing
from kernel_fusion.ops import wide
from kernel_fusion.testing.accuracy import as_tuple
from step2_attention.testing import hidden_of

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
ROWS = ("layer_norm", "residual_layer_norm")
ALONE, BLOCK = "attention_residual_layer_norm", "attention_block"
RNG_STATE, ATTENTION_RNG_STATE = (1234, 8), (-98765, 40)  # seed and offset of dropout
OUTPUTS = {"layer_norm": 1, "residual_layer_norm": 2, ALONE: 1, BLOCK: 2}  # of the Python function

ops = torch.ops.step3_fused


# ---- the formulas, composed of PyTorch's operations: all that an op returns ----


@functools.lru_cache(maxsize=16)
def kept_of_rows(shape, dropout_p, rng_state):
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


def dropped(x, dropout_p, rng_state):
    if round(65536 * dropout_p) == 0:
        return x
    factors = kept_of_rows(tuple(x.shape), dropout_p, tuple(rng_state.tolist())).to(x)
    return torch.where(factors == 0, 0, x * factors)


def layer_norm_of(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def statistics_of(x, eps, kept_more_exactly=False):
    """Mean and rstd. `kept_more_exactly`: by what rounding may move them; in a row alone perhaps nothing, by chance."""
    mean, rstd = wide(x).mean(-1), (wide(x).var(-1, correction=0) + eps).rsqrt()
    if kept_more_exactly and x.dtype in (torch.float16, torch.bfloat16):
        rounding = torch.finfo(x.dtype).eps / 2
        mean, rstd = mean + wide(x).abs().mean(-1) * rounding, rstd * (1 + rounding)
    return mean, rstd


def layer_norm_formula(x, weight, bias, eps=1e-5):
    return layer_norm_of(x, weight, bias, eps), *statistics_of(x, eps)


def residual_layer_norm_formula(
    x, residual, weight, bias, x_bias=None, dropout_p=0.0, rng_state=None, eps=1e-5, kept_more_exactly=False
):
    """The sum is rounded once: as v1_separate rounds it, so that its mean is off by the same."""
    value = wide(x) if x_bias is None else wide(x) + wide(x_bias)
    total = (wide(residual) + dropped(value, dropout_p, rng_state)).to(x.dtype)
    return layer_norm_of(total, weight, bias, eps), total, *statistics_of(total, eps, kept_more_exactly)


def attention_and_lse_of(
    q, k, v, key_begin=None, key_end=None, rng_state=None, causal=False, scale=None, dropout_p=0.0, cu_seqlens=None
):
    """Heads side by side: [B, Sq, H·D]; and the log-sum-exp. A query that sees no key gives 0, and -inf."""
    hidden = hidden_of(q, k, key_begin, key_end, causal)
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(q.shape[2], device=q.device), cu_seqlens, right=True)
        hidden = hidden | (document[:, None] != document)
    scores = ((q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(hidden, -INFINITY)
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0)
    if round(65536 * dropout_p) > 0:
        weights = weights * kept_of_weights(*q.shape[:3], k.shape[2], dropout_p, tuple(rng_state.tolist())).to(q)
    return (weights @ v).transpose(1, 2).flatten(2), torch.logsumexp(wide(scores), -1)


def alone_formula(
    q, k, v, residual, weight, bias, *bounds_and_state, causal=False, scale=None, attention_dropout_p=0.0, eps=1e-5
):
    attended, lse = attention_and_lse_of(
        q, k, v, *bounds_and_state, causal=causal, scale=scale, dropout_p=attention_dropout_p
    )
    total = attended + residual
    return layer_norm_of(total, weight, bias, eps), attended, lse, *statistics_of(total, eps, kept_more_exactly=True)


def block_formula(
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
    cu_seqlens=None,
    *,
    causal=False,
    scale=None,
    dropout_p=0.0,
    attention_dropout_p=0.0,
    eps=1e-5,
):
    attended, lse = attention_and_lse_of(
        q, k, v, begin, end, attention_rng_state, causal, scale, attention_dropout_p, cu_seqlens
    )
    total = residual + dropped(attended @ proj_weight + proj_bias, dropout_p, rng_state)
    statistics = statistics_of(total, eps, kept_more_exactly=True)
    return layer_norm_of(total, weight, bias, eps), total, attended, lse, *statistics


FORMULAS = {
    "layer_norm": layer_norm_formula,
    "residual_layer_norm": residual_layer_norm_formula,
    ALONE: alone_formula,
    BLOCK: block_formula,
}


def formula_of(op):
    """Of what the Python function returns by itself."""

    def formula(*inputs, **options):
        outputs = FORMULAS[op](*inputs, **options)
        return outputs[0] if OUTPUTS[op] == 1 else outputs[: OUTPUTS[op]]

    return formula


# ---- inputs ----


def parameters(width, dtype, device, seed=10):
    """LayerNorm's weight and bias, not 1 and 0."""
    return 1 + testing.randn(width, dtype, device, seed, 0.2), testing.randn(width, dtype, device, seed + 1, 0.2)


def row_inputs(op, shape, dtype, device):
    apart = min(1, 1024 / max(1, shape[-1]))  # less where sums are so long that float32's digits are scarce
    x = testing.randn(shape, torch.float64, device) + apart * testing.staircase(shape[-1], device)
    x = (x + 0.5).to(dtype)  # a mean of 0 would be all rounding
    more = (testing.randn(shape, dtype, device, seed=1),) if op == "residual_layer_norm" else ()
    return (x, *more, *parameters(shape[-1], dtype, device))


def front_inputs(shape, dtype, device, *, dropout_p=0.1, x_bias=True):
    """Of residual_layer_norm, with what stands in front of its addition."""
    x, residual, weight, bias = row_inputs("residual_layer_norm", shape, dtype, device)
    before = testing.randn(shape[-1:], dtype, device, seed=4, scale=0.3) if x_bias else None
    return x, residual, weight, bias, before, dropout_p, torch.tensor(RNG_STATE) if dropout_p else None


def attention_inputs(op, b, h, q_length, k_length, d, dtype, device):
    width = h * d
    q = testing.randn((b, h, q_length, d), dtype, device, seed=1)
    k, v = (testing.randn((b, h, k_length, d), dtype, device, seed=s) for s in (2, 3))
    residual = testing.randn((b, q_length, width), dtype, device, seed=4)
    proj = ()
    if op == BLOCK:
        proj_weight = testing.randn((width, width), dtype, device, seed=5, scale=width**-0.5)
        proj = (proj_weight, testing.randn(width, dtype, device, seed=6))
    return (q, k, v, residual, *proj, *parameters(width, dtype, device))


def inputs_of(op, dtype, device):
    """Something small and odd for any op."""
    if op in ROWS:
        return row_inputs(op, (3, 6), dtype, device)
    return attention_inputs(op, 2, 3, 5, 7, 4, dtype, device)


def bounds(keys, device):
    return torch.tensor(keys, dtype=torch.int32, device=device)


def given(op, dtype, device, *, shape=(3, 2, 37, 70, 8), padding=True, dropout_p=0.3, attention_dropout_p=0.2):
    """Inputs, and the options of dropout. Of three batches one sees all keys, one not the first, one none."""
    tensors = attention_inputs(op, *shape, dtype, device)
    keys = shape[3]
    padded = (bounds([0, 5, keys][: shape[0]], device), bounds([keys, keys - 7, keys][: shape[0]], device))
    rng_states = (torch.tensor(ATTENTION_RNG_STATE) if attention_dropout_p else None,)
    options = {"attention_dropout_p": attention_dropout_p}
    if op == BLOCK:
        rng_states = (torch.tensor(RNG_STATE) if dropout_p else None, *rng_states)
        options = {"dropout_p": dropout_p} | options
    return (*tensors, *(padded if padding else (None, None)), *rng_states), options


def packed(lengths, dtype, device, *, heads=2, dim=8, **parts):
    """Inputs of attention_block with documents of these lengths in a row, and the options of dropout."""
    rows = sum(lengths)
    inputs, options = given(BLOCK, dtype, device, shape=(1, heads, rows, rows, dim), padding=False, **parts)
    return (*inputs, bounds([0, *itertools.accumulate(lengths)], device)), options


def leaves_of(inputs):
    """The floating tensors, which require gradients, and the others behind them."""
    leaves = [t.detach().requires_grad_() for t in inputs if torch.is_tensor(t) and t.is_floating_point()]
    return leaves, inputs[len(leaves) :]


# ---- rungs ----

# Rungs that take half types only, and drop none of attention's weights, and whose they are.
ON_TENSOR_CORES = {"v4_dataflow": BLOCK, "v5_cluster": BLOCK, "v4_heads": ALONE}


def can_run(device, rung):
    """The emulation runs all rungs; v4_dataflow needs a GPU of compute capability 9.0, the others one from 8.0 on."""
    if device != "cuda" or rung not in ON_TENSOR_CORES or not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability()
    return capability == (9, 0) or (rung != "v4_dataflow" and capability >= (8, 0))


def can_do(rung, dtype, attention_dropout_p=0.0):
    if rung in ON_TENSOR_CORES:
        return dtype in (torch.float16, torch.bfloat16) and not attention_dropout_p
    return rung != "v2_fused" or dtype != torch.float64


def takes_packed_rows(rung):
    return rung in ("auto", "cpu", "pieces")


def dtype_of(rung):
    return torch.bfloat16 if rung in ON_TENSOR_CORES else torch.float32


def close_of(rung):
    """How close outputs must be to other ways of computing them."""
    return {"rtol": 2e-2, "atol": 2e-2} if rung in ON_TENSOR_CORES else {"rtol": 1e-4, "atol": 1e-5}


def rungs_of(*names, tensor_cores=True):
    """Ops, devices and rungs, as pytest's parameters."""
    for op in names:
        for param in testing.device_rungs("step3_fused", op):
            device, rung = param.values
            if tensor_cores or rung not in ON_TENSOR_CORES:
                skip = [] if can_run(device, rung) else [pytest.mark.skip("this GPU's compute capability is another")]
                yield pytest.param(op, device, rung, marks=[*param.marks, *skip], id=f"{op}-{param.id}")


def every(*names, tensor_cores=True):
    return pytest.mark.parametrize(("op", "device", "rung"), list(rungs_of(*names, tensor_cores=tensor_cores)))


every_op_and_rung = every(*FORMULAS, tensor_cores=False)  # that takes any dtype: test_one_launch.py has the others
every_rung_of_rows = every(*ROWS)
every_rung_of_attention = every(ALONE, BLOCK)
attention_ops_and_rungs = every(ALONE, BLOCK, tensor_cores=False)
every_op = pytest.mark.parametrize("op", FORMULAS)
attention_ops = pytest.mark.parametrize("op", [ALONE, BLOCK])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
half_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
on_a_gpu = pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
# with and without a bias, with some of x dropped, none and all
each_front = pytest.mark.parametrize(
    ("x_bias", "dropout_p"),
    [(True, 0.1), (True, 0.0), (False, 0.1), (True, 1.0)],
    ids=["bias-dropout", "bias", "dropout", "bias-all"],
)
each_dropout = pytest.mark.parametrize(
    ("dropout_p", "attention_dropout_p"),
    [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)],
    ids=["none", "dropout_p", "attention_dropout_p", "both"],
)


# ---- calls ----


def call(op, inputs, rung="auto", **options):
    """What the op returns, in a tuple."""
    return as_tuple(getattr(step3_fused, op)(*inputs, rung=rung, **options))


def with_statistics(op, inputs, rung="auto", **options):
    return call(op, inputs, rung, return_statistics=True, **options)


def check(op, inputs, rung, *, reference=None, layouts=True, alone=False, **kwargs):
    formula = reference or FORMULAS[op]
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


def from_pieces(op, inputs, causal):
    """Step 2's attention, then this step's separate ops, each result written and read again."""
    q, k, v, residual, *rest = inputs
    attended = step2_attention.attention(q, k, v, causal=causal).transpose(1, 2).flatten(2)
    if op == BLOCK:
        proj_weight, proj_bias, *rest = rest
        return step3_fused.residual_layer_norm(attended @ proj_weight + proj_bias, residual, *rest)
    return (step3_fused.layer_norm(attended + residual, *rest),)
