"""Training of the ops that begin with attention, on every device: padding, dropout, what is kept, and the way back.

python -m pytest tests/test_attention_training.py            pytest's options may follow, such as -k v2_fused
"""

import functools
import math

import pytest
import torch
from test_fused import ON_TENSOR_CORES, attention_and_lse_of, attention_inputs, can_run, hidden_of, layer_norm_of
from torch.utils._python_dispatch import TorchDispatchMode

import step1_simple  # whose mask the projection's dropout has
import step2_attention  # whose mask attention's dropout has, and whose op is its way back
import step3_fused
from kernel_fusion import testing
from kernel_fusion.ops import wide
from kernel_fusion.testing.accuracy import as_tuple

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


# ---- the contract of correctness ----


def check(op, inputs, rung, **options):
    layouts = options.pop("layouts", False)
    return testing.check_contract(
        step3_fused,
        op,
        inputs,
        rung,
        reference=FORMULAS[op],
        eager=FORMULAS[op],
        kwargs=options,
        all_outputs={"return_statistics": True},
        layouts=layouts,
    )


@testing.where(lambda rung, dtype, attention_dropout_p: can_do(rung, dtype, attention_dropout_p))
@testing.where(lambda op, dropout_p: op == BLOCK or not dropout_p)
@every_rung
@every_dtype
@each_dropout
@with_and_without_mask
def test_with_padding(causal, dropout_p, attention_dropout_p, dtype, op, device, rung):
    inputs, options = given(op, dtype, device, dropout_p=dropout_p, attention_dropout_p=attention_dropout_p)
    check(op, inputs, rung, causal=causal, layouts=True, **options)


@testing.where(lambda rung, dtype: can_do(rung, dtype))
@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 1, 1, 8), (2, 3, 5, 33, 16), (2, 2, 64, 64, 24), (1, 2, 65, 31, 40), (3, 5, 130, 200, 8)], ids=str
)
def test_without_padding(shape, dtype, op, device, rung):
    attention_dropout_p = 0.0 if rung in ON_TENSOR_CORES else 0.4
    inputs, options = given(op, dtype, device, shape=shape, padding=False, attention_dropout_p=attention_dropout_p)
    check(op, inputs, rung, causal=True, **options)


@testing.where(lambda rung, dtype: can_do(rung, dtype))
@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@with_and_without_mask
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ([0, 3, 64, 65], None),
        (None, [130, 64, 65, 1]),
        ([0, 31, 32, 65], [70, 33, 129, 66]),
        ([-5, -(2**31), 0, 2**31 - 1], [131, 2**31 - 1, -1, -(2**31) + 1000]),  # beyond the tensor
    ],
    ids=["left", "right", "both", "beyond"],
)
def test_any_padding(begin, end, causal, dtype, op, device, rung):
    """Of a batch of four; tiles of 32 and of 64 keys that begin and end within them."""
    inputs, options = given(
        op, dtype, device, shape=(4, 2, 70, 130, 8), padding=False, dropout_p=0.0, attention_dropout_p=0.0
    )
    tensors = [t for t in inputs if torch.is_tensor(t)]
    keys = [None if b is None else bounds(b, device) for b in (begin, end)]
    check(op, (*tensors, *keys), rung, causal=causal, scale=0.4)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for op in FORMULAS:
        for _, device, rung in (param.values for param in rungs_of(op)):
            if device == "cpu":
                attention_dropout_p = 0.0 if rung in ON_TENSOR_CORES else 0.2
                inputs, options = given(op, dtype_of(rung), device, attention_dropout_p=attention_dropout_p)
                check(op, inputs, rung, causal=True, **options)


# ---- dropout ----


@every_rung_of_block
def test_the_projections_mask_is_that_of_step_1(op, device, rung):
    """Of a bias of 1, a weight and a residual of 0 the sum is the scaled mask."""
    for rows, heads, dropout_p in ((70, 5, 0.5), (13, 3, 0.1), (11, 2, 0.9), (3, 17, 1.0), (3, 2, 0.0)):
        tensors = attention_inputs(2, heads, rows, 4, 8, dtype_of(rung), device, projection=True)
        *qkv, residual, proj_weight, proj_bias, weight, bias = tensors
        inputs = (*qkv, 0 * residual, 0 * proj_weight, 0 * proj_bias + 1, weight, bias)
        for rng_state in (RNG_STATE, (-(1 << 63), (1 << 62) + 4)):
            options = {"rng_state": torch.tensor(rng_state), "dropout_p": dropout_p, "rung": rung}
            total = step3_fused.attention_block(*inputs, **options)[1]
            expected = (
                kept_of_projection(tuple(total.shape), dropout_p, rng_state) if dropout_p else torch.ones_like(total)
            )
            assert torch.equal(total, expected.to(total))


@testing.where(lambda rung: rung not in ON_TENSOR_CORES)
@every_rung
def test_attentions_mask_is_that_of_step_2(op, device, rung):
    """All weights are alike and v is a part of the identity, so attention's output shows which ones are left."""
    for q_length, k_length, dropout_p in ((1, 1, 0.4), (7, 9, 0.5), (70, 33, 0.1), (40, 130, 0.9), (20, 5, 1.0)):
        for first in range(0, k_length, 40):
            q, k, v, *rest = attention_inputs(
                2, 3, q_length, k_length, 40, torch.float32, device, projection=op == BLOCK
            )
            v = torch.eye(k_length, first + 40, device=device)[:, first:].expand_as(k)
            rng_state = torch.tensor(ATTENTION_RNG_STATE)
            outputs = statistics_of(
                op, (q * 0, k, v, *rest), rung, attention_rng_state=rng_state, attention_dropout_p=dropout_p
            )
            attended, lse = outputs[-4:-2]
            expected, same_lse = step2_attention.attention(
                q * 0,
                k,
                v,
                rng_state=rng_state,
                dropout_p=dropout_p,
                return_lse=True,
                rung="auto" if device == "cuda" else "cpu",
            )
            assert torch.equal(attended != 0, expected.transpose(1, 2).flatten(2) != 0)
            torch.testing.assert_close(attended, expected.transpose(1, 2).flatten(2))
            torch.testing.assert_close(lse, same_lse)  # dropped weights count in the sum


@every_rung
def test_what_drops_nothing_changes_nothing(op, device, rung):
    """Evaluation drops nothing, whatever state is given; nor does a part that rounds to 0. All keys are all keys."""
    inputs, _ = given(op, dtype_of(rung), device, padding=False, dropout_p=0.0, attention_dropout_p=0.0)
    tensors = [t for t in inputs if torch.is_tensor(t)]
    rng_state = torch.tensor(RNG_STATE)
    plain = statistics_of(op, tensors, rung)
    more = {"dropout_p": 0.7, "rng_state": rng_state} if op == BLOCK else {}
    for options in (
        {"attention_rng_state": rng_state},
        {"attention_dropout_p": 1e-6},
        {"training": False, "attention_dropout_p": 0.7},
        {"training": False, "attention_dropout_p": 0.7, "attention_rng_state": rng_state, **more},
        {"key_begin": bounds([0, 0, 0], device)},
        {"key_begin": bounds([-3, 0, 0], device), "key_end": bounds([70, 71, 1 << 30], device)},
    ):
        got = statistics_of(op, tensors, rung, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True)), options


@every_rung
def test_dropout_of_all(op, device, rung):
    dtype = dtype_of(rung)
    inputs, _ = given(op, dtype, device, dropout_p=0.0, attention_dropout_p=0.0)
    tensors = [t for t in inputs if torch.is_tensor(t)]
    if op == BLOCK:
        y, total = step3_fused.attention_block(*tensors, dropout_p=1.0, rung=rung)
        assert torch.equal(total, inputs[3])
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(y, layer_norm_of(total, *inputs[6:8]), rtol=tolerance, atol=tolerance)
    if can_do(rung, dtype, 1.0):
        attended, lse = statistics_of(op, tensors, rung, attention_dropout_p=1.0)[-4:-2]
        assert attended.eq(0).all()
        assert torch.equal(lse, statistics_of(op, tensors, rung)[-3])


@on_each_device
@every_op
def test_dropout_draws_states_of_its_own(op, device):
    inputs, _ = given(op, torch.float32, device, dropout_p=0.0, attention_dropout_p=0.0)
    function = functools.partial(getattr(step3_fused, op), *[t for t in inputs if torch.is_tensor(t)])
    for name in ("attention_dropout_p", "dropout_p") if op == BLOCK else ("attention_dropout_p",):
        torch.manual_seed(3)
        first, second = (as_tuple(function(**{name: 0.5}))[-1] for _ in range(2))
        torch.manual_seed(3)
        function(**{name: 0.5}, training=False)  # moves nothing on
        function(**{name: 0.0})
        assert torch.equal(as_tuple(function(**{name: 0.5}))[-1], first)
        assert not torch.equal(first, second)


@every_rung
def test_the_same_state_gives_the_same_and_another_gives_another(op, device, rung):
    """It is a tensor that the op reads when it is called: on the CPU, or in the GPU's memory."""
    attention_dropout_p = 0.0 if rung in ON_TENSOR_CORES else 0.5
    inputs, options = given(op, dtype_of(rung), device, attention_dropout_p=attention_dropout_p)
    where = len(inputs) - (2 if op == BLOCK else 1)
    expected = statistics_of(op, inputs, rung, **options)
    places = ["cpu", device]
    for place in places:
        rng_states = [None if s is None else s.to(place, copy=True) for s in inputs[where:]]
        for change in (0, 1, -1):
            for rng_state in rng_states:
                if rng_state is not None:
                    rng_state[0] += change
            got = statistics_of(op, (*inputs[:where], *rng_states), rung, **options)
            equal = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            assert equal is (change != 1 or inputs[where:] == (None,))  # v4_heads drops nothing


# ---- padding ----


@every_rung
@with_and_without_mask
def test_what_padding_holds_has_no_influence(causal, op, device, rung):
    inputs, options = given(
        op, dtype_of(rung), device, shape=(3, 2, 70, 130, 8), dropout_p=0.0, attention_dropout_p=0.0
    )
    begin, end = inputs[len(inputs) - (4 if op == BLOCK else 3) :][:2]
    key = torch.arange(130, device=device)
    padding = ((key < begin[:, None]) | (key >= end[:, None]))[:, None, :, None]

    def run(fill):
        q, k, v, *rest = inputs
        leaves, others = leaves_of((q, k.masked_fill(padding, fill), v.masked_fill(padding, fill), *rest))
        outputs = statistics_of(op, (*leaves, *others), rung, causal=causal, **options)
        return outputs, torch.autograd.grad(sum(o.float().square().sum() for o in outputs[: OUTPUTS[op]]), leaves)

    (clean, of_clean), (dirty, of_dirty) = run(0.0), run(NAN)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(of_clean, of_dirty, strict=True))
    for gradient in of_dirty[1:3]:
        assert gradient[padding.expand_as(gradient)].eq(0).all()
    assert clean[-3][2].eq(-math.inf).all()  # the last batch sees no key
    assert clean[-4][2].eq(0).all()
    assert of_dirty[0][2].eq(0).all()


# ---- gradients ----


@on_each_device
@every_op
@with_and_without_mask
def test_gradients_are_those_of_the_formula(causal, op, device):
    """By finite differences, of all outputs: those of attention and the statistics, too."""
    for padding in (False, True):
        for dropout in ({"dropout_p": 0.0, "attention_dropout_p": 0.0}, {"dropout_p": 0.4, "attention_dropout_p": 0.4}):
            inputs, options = given(
                op, torch.float64, device, shape=(3 if padding else 1, 2, 3, 9, 2), padding=padding, **dropout
            )
            leaves, others = leaves_of(inputs)
            if padding:  # a log-sum-exp of −inf has no differences
                others = (bounds([0, 5, 1], device), bounds([9, 8, 8], device), *others[2:])

            def function(*t, others=others, options=options):
                return statistics_of(op, (*t, *others), causal=causal, **options)

            # The last of three queries sees the last key, and all see the six keys before: nobody sees nothing.
            assert torch.autograd.gradcheck(function, leaves)


@every_op
def test_gradients_with_a_batch_that_sees_no_key(op):
    inputs, options = given(op, torch.float64, "cpu", shape=(3, 1, 2, 8, 2))
    leaves, others = leaves_of(inputs)
    assert torch.autograd.gradcheck(lambda *t: getattr(step3_fused, op)(*t, *others, **options), leaves)


@every_op
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padding"])
def test_gradients_of_gradients(padding, dropout_p, op):
    if op == ALONE and dropout_p:
        return
    inputs, options = given(
        op, torch.float64, "cpu", shape=(2, 1, 2, 9, 2), padding=padding, dropout_p=dropout_p, attention_dropout_p=0.0
    )
    leaves, others = leaves_of(inputs)
    assert torch.autograd.gradgradcheck(lambda *t: getattr(step3_fused, op)(*t, *others, **options), leaves)


@every_op
def test_gradients_of_gradients_through_attentions_dropout_are_refused(op):
    inputs, options = given(op, torch.float32, "cpu")
    leaves, others = leaves_of(inputs)
    out = as_tuple(getattr(step3_fused, op)(*leaves, *others, **options))[0]
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with testing.raises(NotImplementedError, "with dropout there are no gradients of gradients"):
        torch.autograd.grad(first[0].sum(), leaves[0])


@testing.where(lambda op, dropout_p: op == BLOCK or not dropout_p)
@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@every_op
@each_dropout
def test_gradients_are_as_good_as_eagers(dropout_p, attention_dropout_p, op, dtype, device):
    inputs, options = given(
        op, dtype, device, shape=(3, 3, 40, 70, 16), dropout_p=dropout_p, attention_dropout_p=attention_dropout_p
    )

    def gradients(function, inputs):
        leaves, others = leaves_of(inputs)
        outputs = as_tuple(function(*leaves, *others, causal=True, **options))[: OUTPUTS[op]]
        grads = [testing.randn(o.shape, dtype, device, seed=20 + i).to(o.dtype) for i, o in enumerate(outputs)]
        return torch.autograd.grad(outputs, leaves, grads)

    in_float64 = tuple(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs)
    got = gradients(getattr(step3_fused, op), inputs)
    eager, exact = gradients(FORMULAS[op], inputs), gradients(FORMULAS[op], in_float64)
    for g, e, x in zip(got, eager, exact, strict=True):
        assert g.dtype == dtype
        assert (g.double() - x).abs().max() <= 2 * (e.double() - x).abs().max() + 1e-5 * x.abs().max()


@on_each_device
@every_op
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(op, device):
    inputs, options = given(op, torch.float32, device)
    leaves, others = leaves_of(inputs)
    testing.check_each_input_alone(
        lambda *t: getattr(step3_fused, op)(*t, *others, **options), tuple(t.detach() for t in leaves)
    )


@on_each_device
@every_op
def test_a_backward_runs_no_piece_that_nobody_needs(op, device):
    inputs, options = given(op, torch.float32, device)
    leaves, others = leaves_of(inputs)

    def launches(needed):
        wanted = [t.detach().requires_grad_(i in needed) for i, t in enumerate(leaves)]
        outputs = as_tuple(getattr(step3_fused, op)(*wanted, *others, **options))
        steps_before = [step.launch_counts() for step in (step1_simple, step2_attention, step3_fused)]
        torch.autograd.grad(outputs, [wanted[i] for i in needed], [torch.ones_like(o) for o in outputs])
        after = [step.launch_counts() for step in (step1_simple, step2_attention, step3_fused)]
        return [sum(b.values()) - sum(a.values()) for a, b in zip(steps_before, after, strict=True)]

    everything = [1, 1, 2] if op == BLOCK else [0, 1, 1]
    assert launches(range(len(leaves))) == launches([0]) == everything
    assert launches([3]) == launches([len(leaves) - 1]) == [0, 0, 1]  # the residual; LayerNorm's bias
    if op == BLOCK:
        assert launches([4]) == launches([5]) == [1, 0, 2]  # the projection's weight and bias


class Largest(TorchDispatchMode):
    """What each operation returns: how many elements, at most, and how many in float32."""

    def __init__(self):
        super().__init__()
        self.most = self.most_in_float32 = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        for t in outputs if isinstance(outputs, tuple | list) else [outputs]:
            if torch.is_tensor(t):
                self.most = max(self.most, t.numel())
                if t.dtype == torch.float32:
                    self.most_in_float32 = max(self.most_in_float32, t.numel())
        return outputs


def backward_of(op, length, device):
    """One, still to be run."""
    inputs, options = given(op, torch.bfloat16, device, shape=(3, 2, length, length, 8))
    leaves, others = leaves_of(inputs)
    outputs = as_tuple(getattr(step3_fused, op)(*leaves, *others, causal=True, **options))
    grads = [torch.ones_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


@on_each_device
@every_op
def test_a_backward_holds_nothing_of_the_size_of_all_weights_and_no_wider_copies(op, device):
    backward = backward_of(op, 512, device)
    with Largest() as seen:
        backward()
    assert seen.most == 3 * 512 * 16  # a tensor as the output
    assert seen.most_in_float32 <= 3 * 512 * 2  # a number for each query of each head


@on_a_gpu
@every_op
def test_the_memory_of_a_backward_grows_with_the_length_alone(op, device):
    peaks = []
    for length in (1024, 2048):
        backward = backward_of(op, length, device)
        backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    weights = 3 * 2 * 2  # bytes of one pair of a query and a key, in bfloat16
    assert peaks[1] - peaks[0] < weights * (2048**2 - 1024**2) / 4


@every_op
def test_what_is_stored_between_forward_and_backward(op):
    """Inputs and, for each row, attended, lse, mean and rstd; of the masks nothing but their states."""
    inputs, options = given(op, torch.bfloat16, "cpu", shape=(3, 2, 16, 24, 8))
    leaves, others = leaves_of(inputs)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.shape)) or t, lambda t: t):
        getattr(step3_fused, op)(*leaves, *others, **options)
    half, row = torch.bfloat16, (3, 16, 16)
    expected = [(half, (3, 2, 16, 8)), *[(half, (3, 2, 24, 8))] * 2, (half, (16,))]  # q, k, v, weight
    expected += [(torch.int32, (3,))] * 2 + [(torch.int64, (2,))] * (2 if op == BLOCK else 1)
    expected += [(half, (16, 16))] if op == BLOCK else []  # the projection's weight
    expected += [(half, row)] * 2  # the sum, or the residual; attended
    expected += [(torch.float32, (3, 2, 16)), *[(torch.float32, (3, 16))] * 2]  # lse, mean, rstd
    assert sorted(map(str, saved)) == sorted(str((dtype, torch.Size(shape))) for dtype, shape in expected)


@on_each_device
@every_op
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_sees_the_same_masks_again(reentrant, op, device):
    inputs, options = given(op, torch.float32, device, dropout_p=0.0, attention_dropout_p=0.0)
    leaves, others = leaves_of([t for t in inputs if torch.is_tensor(t)])
    options = dict.fromkeys(options, 0.3)

    def layer(*t):
        return as_tuple(getattr(step3_fused, op)(*t, *others, **options))[0]

    def gradients(run):
        torch.manual_seed(11)
        return torch.autograd.grad(run(*leaves).square().sum(), leaves)

    expected = gradients(layer)
    if reentrant:
        torch.manual_seed(11)
        torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=True).square().sum().backward()
        got = tuple(t.grad for t in leaves)
    else:
        got = gradients(lambda *t: torch.utils.checkpoint.checkpoint(layer, *t, use_reentrant=False))
    assert all(map(torch.equal, got, expected))


# ---- as torch sees them ----


@every_rung
def test_an_op_is_registered_as_torch_wants_it(op, device, rung):
    attention_dropout_p = 0.0 if rung in ON_TENSOR_CORES else 0.2
    inputs, options = given(op, dtype_of(rung), device, shape=(3, 2, 5, 9, 8), attention_dropout_p=attention_dropout_p)
    testing.check_op(step3_fused, op, inputs, {"rung": rung, "causal": True, **options})


@every_op
def test_without_what_is_kept_it_is_registered_as_well(op):
    inputs, options = given(op, torch.float32, "cpu", shape=(3, 2, 5, 9, 8))
    leaves, others = leaves_of(inputs)
    torch.library.opcheck(getattr(ops, op).default, (*leaves, *others), {"keep": False, **options})

    def gradients(keep):
        outputs = getattr(ops, op)(*leaves, *others, keep=keep, causal=True, eps=0.1, **options)[: OUTPUTS[op]]
        return torch.autograd.grad(sum(out.square().sum() for out in outputs), leaves)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@every_op
def test_gradients_under_torch_compile(op):
    inputs, options = given(op, torch.float32, "cpu")
    leaves, others = leaves_of(inputs)

    def loss(*t):
        return sum(o.square().sum() for o in as_tuple(getattr(step3_fused, op)(*t, *others, **options)))

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(loss(*leaves), leaves)
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves), eager, strict=True):
        torch.testing.assert_close(got, want)


@on_each_device
def test_compiled_dropout_draws_anew_for_each_call_and_agrees_with_its_gradient(device):
    """Of a bias of ones the sum is the mask, and that bias's gradient the mask, added up over rows."""
    q, k, v, residual, proj_weight, proj_bias, weight, bias = attention_inputs(
        1, 2, 8, 8, 8, torch.float32, device, projection=True
    )
    proj_bias = torch.ones_like(proj_bias).requires_grad_()

    def two(proj_bias):
        inputs = (q, k, v, residual * 0, proj_weight * 0, proj_bias, weight, bias)
        return [step3_fused.attention_block(*inputs, dropout_p=0.5, attention_dropout_p=0.5)[1] for _ in range(2)]

    torch.compiler.reset()
    compiled = torch.compile(two, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    totals = []
    for _ in range(2):
        for total in compiled(proj_bias):
            (gradient,) = torch.autograd.grad(total.sum(), proj_bias, retain_graph=True)
            torch.testing.assert_close(gradient, total.sum((0, 1)))
            totals.append(total.detach())
    assert not any(torch.equal(mask, other) for i, mask in enumerate(totals) for other in totals[:i])


@on_each_device
@every_op
def test_autocast_keeps_padding_and_dropout(op, device):
    inputs, options = given(op, torch.float32, device)
    leaves, others = leaves_of(inputs)
    with torch.autocast(device, torch.bfloat16):
        got = statistics_of(op, (*leaves, *others), **options)
    expected = statistics_of(op, (*(t.bfloat16() for t in leaves), *others), **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    got[0].float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in leaves)


@on_a_gpu
@every_op
def test_forward_and_backward_in_a_cuda_graph(op, device):
    inputs, options = given(op, torch.bfloat16, device, shape=(3, 4, 128, 128, 64))
    leaves, others = leaves_of([t.to(device) for t in inputs])
    grad = testing.randn(leaves[3].shape, torch.bfloat16, device, seed=5)
    testing.check_gradients_in_a_cuda_graph(
        lambda *t: as_tuple(getattr(step3_fused, op)(*t, *others, **options))[0], leaves, grad
    )


@on_a_gpu
@every_op
def test_each_replay_of_a_cuda_graph_draws_anew(op, device):
    inputs, options = given(op, torch.float32, device)
    tensors = [t for t in inputs if torch.is_tensor(t)][: 10 if op == BLOCK else 8]
    graph, (out,) = testing.capture(lambda: as_tuple(getattr(step3_fused, op)(*tensors, **options))[:1])
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        for _ in range(3):
            graph.replay()
            seen.append(out.detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(seen[:3]) for b in seen[:i])


# ---- what is refused ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@every_op
def test_bad_options_are_refused_by_name(op, device):
    """By the Python function, and by the op itself, with and without data."""
    inputs, _ = given(op, torch.float32, device, dropout_p=0.0, attention_dropout_p=0.0)
    tensors = [t for t in inputs if torch.is_tensor(t) and t.is_floating_point()]
    rng_state = torch.tensor(RNG_STATE)
    parts = [("attention_dropout_p", "attention_rng_state")] + ([("dropout_p", "rng_state")] if op == BLOCK else [])
    for function in (getattr(step3_fused, op), getattr(ops, op)):

        def refuses(exception, text, function=function, **options):
            with testing.raises(exception, f"{op}: {text}"):
                function(*tensors, **options)

        for dropout_p, name in parts:
            for value in (-0.1, 1.5, NAN):
                refuses(ValueError, f"`{dropout_p}` must be from 0 to 1, got", **{dropout_p: value, name: rng_state})
            refuses(TypeError, f"`{name}` must be int64, got int32", **{dropout_p: 0.1, name: rng_state.int()})
            refuses(ValueError, f"`{name}` must have shape (2,), got (1,)", **{dropout_p: 0.1, name: rng_state[:1]})
            if device != "meta":
                refuses(
                    ValueError,
                    f"`{name}` must be on the CPU or on the tensors' device ({tensors[0].device}), got meta",
                    **{dropout_p: 0.1, name: rng_state.to("meta")},
                )
        for name in ("key_begin", "key_end"):
            good = torch.zeros(3, dtype=torch.int32, device=device)
            refuses(TypeError, f"`{name}` must be int32, got int64", **{name: good.long()})
            refuses(ValueError, f"`{name}` must have shape (3,), got (2,)", **{name: good[:2]})
            other = torch.zeros_like(good, device="cpu" if device == "meta" else "meta")
            refuses(ValueError, f"`{name}` must be on the device of `q`", **{name: other})
    for dropout_p, name in parts:
        with testing.raises(ValueError, f"{op}: `{name}` must be given where `{dropout_p}` is not 0"):
            getattr(ops, op)(*tensors, **{dropout_p: 0.1})


@on_each_device
@every_op
def test_an_output_that_shares_memory_with_anything_is_refused(op, device):
    inputs, options = given(op, torch.float32, device)
    testing.check_apart(step3_fused, op, inputs, options)


@pytest.mark.parametrize(("rung", "op"), ON_TENSOR_CORES.items())
def test_tensor_cores_refuse_to_drop_weights_and_name_who_can(rung, op):
    inputs, options = given(op, torch.bfloat16, "cpu")
    with testing.raises(
        ValueError,
        f"{op}: rung '{rung}' drops none of attention's weights: it takes an `attention_dropout_p` of 0",
        "these can: 'v1_separate', 'v2_fused', 'pieces'",
    ):
        getattr(step3_fused, op)(*inputs, **options, rung=rung)


@every_op
def test_forward_mode_is_refused(op):
    inputs, options = given(op, torch.float32, "cpu")
    leaves, others = leaves_of(inputs)
    testing.check_tangents_are_refused(
        lambda *t: getattr(step3_fused, op)(*t, *others, **options), tuple(t.detach() for t in leaves)
    )


def test_hidden_keys_of_the_formula():
    """What all of this is compared with: a mask by hand."""
    q, k = torch.zeros(2, 1, 2, 1), torch.zeros(2, 1, 3, 1)
    hidden = hidden_of(q, k, bounds([0, 1], "cpu"), bounds([3, 2], "cpu"), causal=True)
    assert hidden.int().tolist() == [[[[0, 0, 1], [0, 0, 0]]], [[[1, 0, 1], [1, 0, 1]]]]
