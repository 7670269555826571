"""The way back of attention's ops with padding and dropout, and what they are to torch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import step1_simple  # whose mask the projection's dropout has
import step2_attention  # whose mask attention's dropout has, and whose op is its way back
import step3_fused
from kernel_fusion import testing
from step2_attention.testing import check_packed_gradients
from step3_fused.attention_testing import (
    ALONE,
    BLOCK,
    OUTPUTS,
    attention_inputs,
    attention_ops,
    bounds,
    call,
    given,
    leaves_of,
    on_a_gpu,
    on_each_device,
    ops,
    with_and_without_mask,
    with_statistics,
)

# ---- gradients ----


@on_each_device
@attention_ops
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
                return with_statistics(op, (*t, *others), causal=causal, **options)

            # The last of three queries sees the last key, and all see the six keys before: nobody sees nothing.
            assert torch.autograd.gradcheck(function, leaves)


@on_each_device
@attention_ops
def test_gradients_lie_side_by_side_where_q_k_and_v_do(op, device):
    (q, k, v, *others), options = given(op, torch.float32, device, shape=(2, 3, 70, 70, 16), padding=False)
    check_packed_gradients(lambda *qkv: call(op, (*qkv, *others), causal=True, **options)[0], (q, k, v))


@attention_ops
def test_gradients_with_a_batch_that_sees_no_key(op):
    inputs, options = given(op, torch.float64, "cpu", shape=(3, 1, 2, 8, 2))
    leaves, others = leaves_of(inputs)
    assert torch.autograd.gradcheck(lambda *t: call(op, (*t, *others), **options), leaves)


@attention_ops
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("padding", [False, True], ids=["whole", "padding"])
def test_gradients_of_gradients(padding, dropout_p, op):
    if op == ALONE and dropout_p:
        return
    inputs, options = given(
        op, torch.float64, "cpu", shape=(2, 1, 2, 9, 2), padding=padding, dropout_p=dropout_p, attention_dropout_p=0.0
    )
    leaves, others = leaves_of(inputs)
    assert torch.autograd.gradgradcheck(lambda *t: call(op, (*t, *others), **options), leaves)


@attention_ops
def test_gradients_of_gradients_through_attentions_dropout_are_refused(op):
    inputs, options = given(op, torch.float32, "cpu")
    leaves, others = leaves_of(inputs)
    out = call(op, (*leaves, *others), **options)[0]
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with testing.raises(NotImplementedError, "with dropout there are no gradients of gradients"):
        torch.autograd.grad(first[0].sum(), leaves[0])


@on_each_device
@attention_ops
def test_a_backward_runs_no_piece_that_nobody_needs(op, device):
    inputs, options = given(op, torch.float32, device)
    leaves, others = leaves_of(inputs)

    def launches(needed):
        wanted = [t.detach().requires_grad_(i in needed) for i, t in enumerate(leaves)]
        outputs = call(op, (*wanted, *others), **options)
        steps_before = [step.launch_counts() for step in (step1_simple, step2_attention, step3_fused)]
        torch.autograd.grad(outputs, [wanted[i] for i in needed], [torch.ones_like(o) for o in outputs])
        after = [step.launch_counts() for step in (step1_simple, step2_attention, step3_fused)]
        return [sum(b.values()) - sum(a.values()) for a, b in zip(steps_before, after, strict=True)]

    everything = [1, 2, 1] if op == BLOCK else [0, 1, 1]
    assert launches(range(len(leaves))) == launches([0]) == everything
    assert launches([3]) == launches([len(leaves) - 1]) == [0, 0, 1]  # the residual; LayerNorm's bias
    if op == BLOCK:
        assert launches([4]) == launches([5]) == [1, 1, 1]  # the projection's weight and bias


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
    outputs = call(op, (*leaves, *others), causal=True, **options)
    grads = [torch.ones_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, grads, retain_graph=True)


@on_each_device
@attention_ops
def test_a_backward_holds_nothing_of_the_size_of_all_weights_and_no_wider_copies(op, device):
    backward = backward_of(op, 512, device)
    with Largest() as seen:
        backward()
    assert seen.most == 3 * 512 * 16  # a tensor as the output
    assert seen.most_in_float32 <= 3 * 512 * 2  # a number for each query of each head


@on_a_gpu
@attention_ops
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


@attention_ops
def test_what_is_stored_between_forward_and_backward(op):
    """Inputs and, for each row, attended, lse, mean and rstd; of the masks nothing but their states."""
    inputs, options = given(op, torch.bfloat16, "cpu", shape=(3, 2, 16, 24, 8))
    leaves, others = leaves_of(inputs)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.dtype, t.shape)) or t, lambda t: t):
        call(op, (*leaves, *others), **options)
    half, row = torch.bfloat16, (3, 16, 16)
    expected = [(half, (3, 2, 16, 8)), *[(half, (3, 2, 24, 8))] * 2, (half, (16,))]  # q, k, v, weight
    expected += [(torch.int32, (3,))] * 2 + [(torch.int64, (2,))] * (2 if op == BLOCK else 1)
    expected += [(half, (16, 16))] if op == BLOCK else []  # the projection's weight
    expected += [(half, row)] * 2  # the sum, or the residual; attended
    expected += [(torch.float32, (3, 2, 16)), *[(torch.float32, (3, 16))] * 2]  # lse, mean, rstd
    assert sorted(map(str, saved)) == sorted(str((dtype, torch.Size(shape))) for dtype, shape in expected)


@on_each_device
@attention_ops
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_sees_the_same_masks_again(reentrant, op, device):
    inputs, options = given(op, torch.float32, device, dropout_p=0.0, attention_dropout_p=0.0)
    leaves, others = leaves_of([t for t in inputs if torch.is_tensor(t)])
    options = dict.fromkeys(options, 0.3)

    def layer(*t):
        return call(op, (*t, *others), **options)[0]

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


@attention_ops
def test_without_what_is_kept_it_is_registered_as_well(op):
    inputs, options = given(op, torch.float32, "cpu", shape=(3, 2, 5, 9, 8))
    leaves, others = leaves_of(inputs)
    torch.library.opcheck(getattr(ops, op).default, (*leaves, *others), {"keep": False, **options})

    def gradients(keep):
        outputs = getattr(ops, op)(*leaves, *others, keep=keep, causal=True, eps=0.1, **options)[: OUTPUTS[op]]
        return torch.autograd.grad(sum(out.square().sum() for out in outputs), leaves)

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@on_each_device
def test_compiled_dropout_draws_anew_for_each_call_and_agrees_with_its_gradient(device):
    """Of a bias of ones the sum is the mask, and that bias's gradient the mask, added up over rows."""
    tensors = attention_inputs(BLOCK, 1, 2, 8, 8, 8, torch.float32, device)
    q, k, v, residual, proj_weight, proj_bias, weight, bias = tensors
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


@on_a_gpu
@attention_ops
def test_each_replay_of_a_cuda_graph_draws_anew(op, device):
    inputs, options = given(op, torch.float32, device)
    tensors = [t for t in inputs if torch.is_tensor(t)][: 10 if op == BLOCK else 8]
    graph, (out,) = testing.capture(lambda: call(op, tensors, **options)[:1])
    seen = []
    for _ in range(2):
        torch.manual_seed(7)
        for _ in range(3):
            graph.replay()
            seen.append(out.detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(seen[:3], seen[3:], strict=True))
    assert not any(torch.equal(a, b) for i, a in enumerate(seen[:3]) for b in seen[:i])
