"""Attention, on every device there is: against float64, eager PyTorch, the rung before, and step 1.

What softmax and attention share is here too; softmax's own tests are in test_softmax.py.

python test_attention.py            pytest's options may follow, such as -k v2_tiled
"""

import os
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import step2_attention  # not installed? pip install -e ..
from kernel_fusion import steps, testing
from kernel_fusion.testing.accuracy import poisoned_allocations
from step2_attention.testing import (
    PADDING,
    attention_and_lse_of,
    attention_of,
    bounds,
    can_do,
    dtype_of,
    lse_for,
    on_tensor_cores,
    qkv,
    tolerance_of,
)

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
NAN = float("nan")

ops = torch.ops.step2_attention


def softmax_of(x):
    return torch.softmax(x, -1)


def takes_any_scale(rung):
    return not on_tensor_cores(rung) or rung in ("v3_mma", "v4_pipeline")


def assert_attends(out, *inputs, **options):
    """Fails where `out` is not the formula's in float64."""
    expected = attention_of(*(t.double() for t in inputs), **options)
    torch.testing.assert_close(out.double(), expected, **tolerance_of(out))


def check_attention(inputs, rung, causal=False, **options):
    kwargs = {"causal": causal}
    return testing.check_contract(
        step2_attention,
        "attention",
        inputs,
        rung,
        reference=attention_and_lse_of,
        eager=attention_and_lse_of,
        kwargs=kwargs,
        all_outputs={"return_lse": True},
        **options,
    )


every_attention = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step2_attention", "attention"))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
half_types = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
with_and_without_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


# ---- the contract of correctness ----


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_attention
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 129])
def test_attention_of_any_length(length, causal, dtype, device, rung):
    check_attention(qkv(length, length, 64, dtype, device), rung, causal)


@every_attention
@with_and_without_mask
@pytest.mark.parametrize(
    ("q_length", "k_length"), [(1, 2), (1, 129), (2, 1), (33, 31), (31, 97), (65, 64), (129, 1), (200, 300)]
)
def test_attention_between_different_lengths(q_length, k_length, causal, device, rung):
    check_attention(qkv(q_length, k_length, 64, dtype_of(rung), device), rung, causal)


@every_attention
@pytest.mark.parametrize(
    ("dim", "q_length", "heads_each"), [(16, 300, 3), (104, 300, 3), (16, 800, 2.5), (104, 300, 1.25)]
)
@with_and_without_mask
def test_more_tiles_than_multiprocessors(causal, dim, q_length, heads_each, device, rung):
    """Persistent blocks take several tiles of queries, one after the other; some of these see no key.

    Two tiles a head, three, four, and so few heads that pairs of tiles would leave multiprocessors idle.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 16
    q, k, v = qkv(q_length, 140, dim, dtype_of(rung), device, heads=int(heads_each * multiprocessors))
    out, lse = step2_attention.attention(q, k, v, causal=causal, return_lse=True, rung=rung)
    assert_attends(out, q, k, v, causal=causal)
    _, exact = attention_and_lse_of(q.double(), k.double(), v.double(), causal=causal)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-4, atol=1e-4)


@every_attention
@pytest.mark.parametrize("dim", [16, 104])
@with_and_without_mask
def test_more_tiles_than_multiprocessors_with_padding_and_shared_keys(causal, dim, device, rung):
    """A block's later tiles are of other batches and heads; between them is a batch without keys."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 16
    heads = multiprocessors // 2
    q, k, v = qkv(300, 140, dim, dtype_of(rung), device, batch=3, heads=heads, kv_heads=heads // 2)
    begin, end = (torch.tensor(bounds, dtype=torch.int32, device=device) for bounds in ([0, 9, 5], [140, 9, 131]))
    out = step2_attention.attention(q, k, v, begin, end, causal=causal, rung=rung)
    assert_attends(out, q, k, v, begin, end, causal=causal)


@every_attention
@pytest.mark.parametrize("dim", [64, 104])
@with_and_without_mask
def test_stages_of_tiles_are_used_again_and_again(causal, dim, device, rung):
    """More tiles of keys than a rung has stages for, several times over."""
    q, k, v = qkv(65, 1900, dim, dtype_of(rung), device, heads=1)
    assert_attends(step2_attention.attention(q, k, v, causal=causal, rung=rung), q, k, v, causal=causal)


@every_attention
@pytest.mark.parametrize("steep", [7, 60])
def test_each_block_of_keys_may_bring_a_new_maximum(steep, device, rung):
    """Up to 2⁵⁰ times the weight before, which still fits, and beyond what a float holds."""
    q, k, v = qkv(3, 300, 64, dtype_of(rung), device)
    k = (k.abs() * torch.linspace(1, steep, 300, device=device)[:, None]).to(q.dtype)
    v = (v + testing.staircase(300, device)[:, None]).to(q.dtype)
    check_attention((q.abs(), k, v), rung)
    check_attention((q.abs(), k.flip(2), v), rung, layouts=False)  # for rungs that begin at the end
    check_attention((q.abs(), k.roll(150, 2), v), rung, layouts=False)  # for rungs that split the keys


@testing.where(lambda dim, rung: can_do(rung, dim, dtype_of(rung)))
@every_attention
@pytest.mark.parametrize("dim", [1, 8, 16, 31, 32, 33, 40, 80, 96, 104, 111, 128, 160, 256, 300])
def test_attention_with_any_head_dim(dim, device, rung):
    check_attention(qkv(17, 35, dim, dtype_of(rung), device, heads=1), rung, causal=True)
    check_attention(qkv(3, 9, dim, torch.bfloat16, device), rung)


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@with_and_without_mask
@pytest.mark.parametrize("padding", PADDING)
def test_attention_sees_only_keys_that_exist(padding, causal, dtype, device, rung):
    """What lies where no key is has no influence: it may even be NaN."""
    begin, end = (None if keys is None else bounds(keys, device) for keys in PADDING[padding])
    q, k, v = qkv(70, 70, 64, dtype, device, batch=4)
    check_attention((q, k, v, begin, end), rung, causal, layouts=False)
    got = step2_attention.attention(q, k, v, begin, end, causal=causal, return_lse=True, rung=rung)
    key = torch.arange(70, device=device)
    for batch in range(4):
        missing = torch.zeros(70, dtype=torch.bool, device=device)
        missing |= key < (0 if begin is None else begin[batch])
        missing |= key >= (70 if end is None else end[batch])
        k[batch, :, missing], v[batch, :, missing] = NAN, NAN
        if missing.all():
            assert got[0][batch].eq(0).all()
            assert got[1][batch].eq(-INFINITY).all()
    again = step2_attention.attention(q, k, v, begin, end, causal=causal, return_lse=True, rung=rung)
    assert torch.equal(got[0], again[0])
    assert torch.equal(got[1], again[1])


@every_attention
def test_what_one_batch_holds_reaches_no_other(device, rung):
    """Of every second one keys and values are NaN, and the next has padding where those lay."""
    inputs = qkv(40, 70, 64, dtype_of(rung), device, batch=8, heads=1)
    padding = bounds([0, 40] * 4, device), bounds([70, 66] * 4, device)
    expected = step2_attention.attention(*inputs, *padding, rung=rung)
    inputs[1][::2], inputs[2][::2] = NAN, NAN
    assert torch.equal(step2_attention.attention(*inputs, *padding, rung=rung)[1::2], expected[1::2])


@every_attention
@with_and_without_mask
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1), (6, 3)])
def test_several_heads_may_share_their_keys(heads, kv_heads, causal, device, rung):
    inputs = qkv(33, 40, 32, dtype_of(rung), device, batch=2, heads=heads, kv_heads=kv_heads)
    check_attention((*inputs, bounds([0, 5], device), None), rung, causal)


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_finds_each_tensor_wherever_it_lies(dtype, device, rung):
    inputs = qkv(5, 7, 64, dtype, device, batch=2, heads=6, kv_heads=3)
    inputs = (*inputs, bounds([1, 2], device), bounds([7, 6], device))
    check_attention(inputs, rung, causal=True, alone=True, layouts=False)


@on_each_device
@every_dtype
@with_and_without_mask
def test_auto_does_gpt2_sized_layers(causal, dtype, device):
    check_attention(qkv(200, 256, 64, dtype, device, heads=12), "auto", causal, layouts=False)


SIZES = {"B": "batch", "H": "heads", "Sq": "q_length", "Sk": "k_length", "D": "head_dim"}


@pytest.mark.parametrize("op", ["softmax", "attention"])
def test_auto_is_read_off_the_results(op):
    testing.check_automatic(step2_attention, op, lambda shape: {SIZES.get(k, k): n for k, n in shape.items()})


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step2_attention.rungs("attention", "cpu"):
        check_attention(qkv(37, 41, 64, dtype_of(rung), "cpu"), rung, causal=True)
        check_attention(qkv(5, 70, 104, dtype_of(rung), "cpu"), rung)


# ---- what attention is made of ----


@every_attention
@with_and_without_mask
def test_attention_is_step1_scale_then_a_matmul_then_softmax_then_a_matmul(causal, device, rung):
    import step1_simple  # where it is not built, the error gives the command

    q, k, v = (t.float() for t in qkv(50, 70, 64, dtype_of(rung), device))
    scores = step1_simple.scale(q, 64**-0.5) @ k.mT
    if causal:
        scores = scores.masked_fill(torch.ones(50, 70, device=device).triu(70 - 50 + 1).bool(), -INFINITY)
    rebuilt = step2_attention.softmax(scores) @ v
    out = step2_attention.attention(*(t.to(dtype_of(rung)) for t in (q, k, v)), causal=causal, rung=rung)
    torch.testing.assert_close(out.float(), rebuilt, **tolerance_of(out))


@every_attention
@with_and_without_mask
def test_attention_is_pytorchs(causal, device, rung):
    q, k, v = qkv(77, 77, 64, dtype_of(rung), device, batch=2)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(
        step2_attention.attention(q, k, v, causal=causal, rung=rung), expected, **tolerance_of(expected)
    )


@every_attention
def test_scale_defaults_to_one_over_the_root_of_head_dim(device, rung):
    q, k, v = qkv(9, 9, 16, dtype_of(rung), device)
    default, same, other = (step2_attention.attention(q, k, v, scale=s, rung=rung) for s in (None, 0.25, 0.7))
    assert torch.equal(default, same)
    assert_attends(other, q, k, v, scale=0.7)
    if takes_any_scale(rung):
        assert_attends(step2_attention.attention(q, k, v, scale=-0.7, rung=rung), q, k, v, scale=-0.7)
        return
    for scale in (-0.7, 0.0, NAN, 1e39):  # the last one is infinite in float32
        with testing.raises(ValueError, f"rung '{rung}' takes a scale above 0, got {scale:.6f}", "'v4_pipeline'"):
            step2_attention.attention(q, k, v, scale=scale, rung=rung)


@every_attention
@with_and_without_mask
def test_a_scale_of_0_weighs_all_keys_alike(causal, device, rung):
    if not takes_any_scale(rung):
        return
    q, k, v = (t.requires_grad_() for t in qkv(5, 7, 16, dtype_of(rung), device))
    out = step2_attention.attention(q, k, v, causal=causal, scale=0.0, rung=rung)
    seen = torch.ones(5, 7, device=device).tril(2 if causal else 7)
    torch.testing.assert_close(out.float(), (seen / seen.sum(-1, keepdim=True)) @ v.float(), **tolerance_of(out))
    out.square().sum().backward()
    assert q.grad.eq(0).all()
    assert k.grad.eq(0).all()


@every_attention
@pytest.mark.parametrize("lengths", [(333, 1023), (17, 129)], ids=str)
def test_many_reruns_are_equal_to_the_last_bit(lengths, device, rung):
    if device == "cpu" and max(lengths) > 200:
        pytest.skip("minutes under emulation")
    q, k, v = qkv(*lengths, 64, dtype_of(rung), device)
    padding = bounds([3], device), bounds([lengths[1] - 4], device)
    testing.check_reruns(
        lambda *inputs: step2_attention.attention(*inputs, causal=True, return_lse=True, rung=rung), q, k, v, *padding
    )


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step2_attention", "attention"))
def test_a_cuda_graph_is_replayed_with_other_lengths(device, rung):
    if device == "cpu":
        pytest.skip("needs a GPU")
    q, k, v = qkv(100, 120, 64, dtype_of(rung), device, batch=2)
    begin, end = bounds([0, 0], device), bounds([120, 120], device)
    step2_attention.attention(q, k, v, begin, end, rung=rung)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step2_attention.attention(q, k, v, begin, end, rung=rung)
    for lengths in ([(0, 3), (120, 17)], [(0, 0), (1, 0)], [(100, 5), (119, 33)]):
        begin.copy_(bounds(lengths[0], device)), end.copy_(bounds(lengths[1], device))
        q.add_(0.1)
        graph.replay()
        assert torch.equal(captured, step2_attention.attention(q, k, v, begin, end, rung=rung))
        assert_attends(captured, q, k, v, key_begin=begin, key_end=end)


@every_attention
def test_a_call_knows_nothing_of_the_one_before(device, rung):
    """One head, so that what a thread kept of the last head of one call would be that of the first of the next."""
    q, k, v = qkv(3, 9, 16, dtype_of(rung), device, heads=1)
    step2_attention.attention(q, k, v, rung=rung)
    k.neg_(), v.add_(3)  # other numbers in the same place
    assert_attends(step2_attention.attention(q, k, v, rung=rung), q, k, v)
    other_k, other_v = k.flip(2) * 2, v.flip(3)  # and in another
    assert_attends(step2_attention.attention(q, other_k, other_v, rung=rung), q, other_k, other_v)


# ---- what a wrong kernel would do, and how it shows ----


@every_attention
def test_attention_looks_where_the_key_fits(device, rung):
    """A uniform softmax would give the mean of v."""
    q = k = 30 * torch.eye(40, device=device, dtype=dtype_of(rung))[None, None]
    v = testing.randn((1, 1, 40, 40), dtype_of(rung), device)
    turned = torch.arange(40, device=device).roll(7)
    torch.testing.assert_close(step2_attention.attention(q[:, :, turned], k, v, rung=rung), v[:, :, turned])


@every_attention
def test_a_dropped_mask_is_caught(device, rung):
    def without_mask(q, k, v, causal):
        return attention_and_lse_of(q, k, v)

    with testing.raises(AssertionError, "against float64"):
        testing.check_contract(
            step2_attention,
            "attention",
            qkv(9, 9, 64, dtype_of(rung), device),
            rung,
            reference=without_mask,
            eager=without_mask,
            kwargs={"causal": True},
        )


@every_attention
def test_the_future_has_no_influence(device, rung):
    q, k, v = qkv(40, 40, 64, dtype_of(rung), device)
    before = step2_attention.attention(q, k, v, causal=True, rung=rung)
    k[:, :, 25:], v[:, :, 25:] = 1e4, -1e4
    after = step2_attention.attention(q, k, v, causal=True, rung=rung)
    assert torch.equal(before[:, :, :25], after[:, :, :25])
    assert not torch.allclose(before[:, :, 25:], after[:, :, 25:])


@every_attention
def test_decoding_one_by_one_gives_the_rows_of_the_whole(device, rung):
    q, k, v = qkv(35, 35, 64, dtype_of(rung), device)
    whole = step2_attention.attention(q, k, v, causal=True, rung=rung)
    for i in (0, 1, 31, 34):
        cache_k, cache_v = k[:, :, : i + 1], v[:, :, : i + 1]
        row = step2_attention.attention(q[:, :, i : i + 1], cache_k, cache_v, causal=True, rung=rung)
        torch.testing.assert_close(row, whole[:, :, i : i + 1], **tolerance_of(row))


# ---- inputs that are unusual, and right ----


@testing.where(lambda dtype, rung: can_do(rung, 32, dtype))
@every_attention
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("length", [1, 2, 5, 17, 128])
def test_large_scores_do_not_overflow(length, causal, dtype, device, rung):
    q, k, v = qkv(length, length, 32, dtype, device)
    q, k, v = (t.detach().requires_grad_() for t in (q * 5, k * 3, v * 3))
    check_attention((q, k, v), rung, causal, layouts=False)
    out = step2_attention.attention(q, k, v, causal=causal, rung=rung)
    out.backward(torch.ones_like(out))
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_attention
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_scores_beyond_the_half_types_range_pick_the_greatest(dtype, device, rung):
    q, k, v = qkv(6, 6, 64, dtype, device)
    q, k = q.sign() * 1e4, k.sign() * 1e4  # scores of up to 8e8; float16 ends at 65504
    out = step2_attention.attention(q, k, v, rung=rung)
    torch.testing.assert_close(out, attention_of(q.double(), k.double(), v.double()).to(dtype))


@testing.where(lambda dtype, rung: can_do(rung, 32, dtype))
@every_attention
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_a_query_that_sees_no_key_gives_zero_and_no_gradient(dtype, device, rung):
    q, k, v = (t.requires_grad_() for t in qkv(70, 3, 32, dtype, device))
    out, lse = step2_attention.attention(q, k, v, causal=True, return_lse=True, rung=rung)
    assert out[:, :, :67].eq(0).all()
    assert out[:, :, 67:].ne(0).all()
    assert lse[:, :, :67].eq(-INFINITY).all()
    assert lse[:, :, 67:].isfinite().all()
    out.backward(torch.ones_like(out))
    assert q.grad[:, :, :67].eq(0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@every_attention
def test_empty_tensors(device, rung):
    def attention(b, h, sq, sk, causal=False):
        q, k = torch.ones(b, h, sq, 8, device=device), torch.ones(b, h, sk, 8, device=device)
        return step2_attention.attention(q, k, k, causal=causal, return_lse=True, rung=rung)

    for shape in ((0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3)):
        out, lse = attention(*shape)
        assert out.shape == (*shape[:3], 8)
        assert lse.shape == shape[:3]
    for causal in (False, True):
        with poisoned_allocations():  # or 0 might be what happened to lie there
            nothing_to_see = attention(2, 2, 3, 0, causal)
        assert nothing_to_see[0].tolist() == torch.zeros(2, 2, 3, 8).tolist()
        assert nothing_to_see[1].eq(-INFINITY).all()
    assert step2_attention.softmax(torch.empty(0, 8, device=device)).shape == (0, 8)


@on_each_device
def test_empty_tensors_have_empty_gradients(device):
    q = torch.ones(1, 1, 3, 8, device=device, requires_grad=True)
    k = torch.ones(1, 1, 0, 8, device=device, requires_grad=True)
    step2_attention.attention(q, k, k).sum().backward()
    assert q.grad.eq(0).all()
    assert k.grad.shape == k.shape
    q, k = (torch.ones(1, 0, length, 8, device=device, requires_grad=True) for length in (3, 5))  # no heads
    (grad,) = torch.autograd.grad(step2_attention.attention(q, k, k).sum(), q, create_graph=True)
    grad.sum().backward()
    assert k.grad.shape == k.shape


# ---- strides ----


@every_attention
def test_gpt2s_packed_q_k_v_are_read_as_they_lie(device, rung):
    batch, length, heads, dim = 2, 33, 3, 64
    packed = testing.randn((batch, length, 3 * heads * dim), dtype_of(rung), device)
    q, k, v = (t.view(batch, length, heads, dim).transpose(1, 2) for t in packed.split(heads * dim, -1))
    assert_attends(step2_attention.attention(q, k, v, causal=True, rung=rung), q, k, v, causal=True)

    merged = torch.full_like(packed[..., : heads * dim], NAN)  # heads side by side, as the next layer wants them
    out = merged.view(batch, length, heads, dim).transpose(1, 2)
    ops.attention.out(q, k, v, causal=True, rung=rung, out=out, lse=lse_for(q))
    assert_attends(merged.view(batch, length, heads, dim).transpose(1, 2), q, k, v, causal=True)


@every_attention
def test_views_of_any_strides(device, rung):
    q, k, v = qkv(6, 10, 16, dtype_of(rung), device, batch=2)
    views = [
        (q[:1].expand(2, -1, -1, -1), k[:, :1].expand(-1, 2, -1, -1), v),  # strides of 0
        (q[:, :, ::2], k[:, :, 1::3], v[:, :, 1::3]),
        (q[..., ::2], k[..., ::2], v[..., 1::2]),  # rows not in one piece
        (q.flip(2), k.mT.contiguous().mT, v.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)),
    ]
    for inputs in views:
        out = step2_attention.attention(*inputs, rung=rung)
        assert out.is_contiguous()
        assert_attends(out, *inputs)


@every_attention
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("row", [19, 24])
def test_an_output_of_any_strides_is_written_where_it_lies(row, order, device, rung):
    q, k, v = qkv(5, 7, 16, dtype_of(rung), device, batch=2, heads=3)
    memory = torch.full([(2, 3, 5)[i] for i in order] + [row], NAN, dtype=q.dtype, device=device)
    out = memory[..., :16].permute(*(order.index(i) for i in range(3)), 3)
    ops.attention.out(q, k, v, causal=True, rung=rung, out=out, lse=lse_for(q))
    assert_attends(out, q, k, v, causal=True)
    assert memory[..., 16:].isnan().all()


@every_attention
@pytest.mark.parametrize("far", ["batch", "heads", "positions"])
@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_offsets_beyond_32_bits(which, far, device, rung):
    """One tensor whose neighbours along one dimension are 2³² elements and more apart: most of it nobody touches."""
    dim = ["batch", "heads", "positions"].index(far)
    shape = [1, 1, 1, 8]
    shape[dim] = 2
    tensors = {name: testing.randn(shape, torch.float16, device, seed) for seed, name in enumerate("qkv")}
    tensors["out"] = torch.empty(shape, dtype=torch.float16, device=device)
    distance = (1 << 32) + 4096  # what wraps around lands where nothing is
    memory = testing.lazy_memory(distance + 4096, torch.float16, device)
    strides = [8, 8, 8, 1]
    strides[dim] = distance
    expected = attention_of(*(tensors[name].double() for name in "qkv"))
    tensors[which] = memory.as_strided(shape, strides).copy_(tensors[which])
    q, k, v = (tensors[name] for name in "qkv")
    ops.attention.out(q, k, v, rung=rung, out=tensors["out"], lse=lse_for(q))
    torch.testing.assert_close(tensors["out"].double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    """Sizes alone decide, so no memory is needed."""

    def choose(op, rung, **sizes):
        return step2_attention._C.choose(op, rung, sizes, dtype)

    most = (1 << 31) - 1
    if dtype == torch.float64:
        assert choose("attention", "auto", batch=2) == "v1_naive"
        return
    assert choose("attention", "auto", batch=most) == "v2_tiled"
    assert choose("attention", "auto", batch=most // 7, heads=7, q_length=16) == "v2_tiled"
    for sizes in ({"batch": 1 << 31}, {"batch": 1 << 16, "heads": 1 << 15}, {"batch": 1 << 30, "q_length": 17}):
        assert choose("attention", "auto", **sizes) == "v1_naive"
        with testing.raises(
            ValueError, f"attention: rung 'v2_tiled' takes at most {most} blocks of 16 queries, got {1 << 31}"
        ):
            choose("attention", "v2_tiled", **sizes)
    half = dtype.itemsize == 2
    for dim, heads, length, keys, causal, rung in (
        (64, 132, 64, 64, False, "v9_split"),
        (64, 133, 64, 64, False, "v8_persistent"),
        (64, 132, 128, 128, False, "v8_persistent"),  # short: v7 would be no better
        (64, 66, 257, 257, False, "v7_warpgroups"),
        (64, 67, 257, 257, False, "v8_persistent"),
        (64, 16, 1024, 1024, True, "v9_split"),  # two rounds, of tiles that see half of the keys on average
        (64, 16, 1024, 1025, True, "v7_warpgroups"),
        (64, 17, 1024, 1024, True, "v7_warpgroups"),
        (64, 17, 512, 512, True, "v7_warpgroups"),
        (64, 16, 1024, 1024, False, "v7_warpgroups"),
        (128, 8, 1024, 1024, False, "v9_split"),
        (128, 16, 1024, 1024, False, "v7_warpgroups"),
        (128, 17, 1024, 1024, False, "v8_persistent"),
    ):
        sizes = {"heads": heads, "q_length": length, "k_length": keys, "head_dim": dim, "causal": causal}
        assert choose("attention", "auto", **sizes) == (rung if half else "v2_tiled"), sizes
    for rung in filter(on_tensor_cores, step2_attention.rungs("attention")):
        if not can_do(rung, 64, dtype):
            continue
        assert choose("attention", rung, head_dim=64, batch=most) == rung
        for sizes in ({"batch": 1 << 31}, {"batch": 1 << 30, "q_length": 257}):
            with testing.raises(ValueError, f"attention: rung '{rung}' takes at most {most} blocks of"):
                choose("attention", rung, head_dim=64, **sizes)
        with testing.raises(ValueError, f"attention: rung '{rung}' takes at most {1 << 30} keys, got {1 << 31}"):
            choose("attention", rung, head_dim=64, k_length=1 << 31)
    assert choose("attention", "auto", head_dim=256) == "v2_tiled"
    assert choose("attention", "auto", head_dim=257) == "v1_naive"


# ---- gradients ----


@testing.where(lambda rung: can_do(rung, 3, torch.float64))
@every_attention
@with_and_without_mask
@pytest.mark.parametrize(("q_length", "k_length"), [(4, 4), (2, 5), (5, 3), (4, 3)])
def test_gradient_of_attention(q_length, k_length, causal, device, rung):
    def function(q, k, v):
        return step2_attention.attention(q, k, v, causal=causal, scale=0.7, rung=rung)

    q, k, v = (t.requires_grad_() for t in qkv(q_length, k_length, 3, torch.float64, device))
    assert torch.autograd.gradcheck(function, (q, k, v))
    assert torch.autograd.gradgradcheck(function, (q, k, v))


@on_each_device
@with_and_without_mask
def test_gradient_of_attention_with_padding_and_shared_keys_and_of_its_log_sum_exp(causal, device):
    q, k, v = qkv(4, 5, 3, torch.float64, device, batch=3, heads=4, kv_heads=2)
    begin, end = bounds([0, 1, 3], device), bounds([5, 4, 3], device)

    def function(*inputs):
        out, lse = step2_attention.attention(*inputs, begin, end, causal=causal, return_lse=True)
        return out, lse.nan_to_num(neginf=0)

    inputs = [t.requires_grad_() for t in (q, k, v)]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    for which in (0, 1):  # one output alone
        assert torch.autograd.gradcheck(lambda *inputs: function(*inputs)[which], inputs)  # noqa: B023

    def both(*inputs):
        out, lse = function(*inputs)
        return out.square().sum() + lse.square().sum()  # gradcheck takes several outputs one by one

    assert torch.autograd.gradcheck(both, inputs)


@on_each_device
def test_padding_of_nan_reaches_no_gradient(device):
    q, k, v = qkv(4, 6, 8, torch.float32, device)
    k[:, :, :2], v[:, :, 5:] = NAN, NAN
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = step2_attention.attention(*inputs, bounds([2], device), bounds([5], device))
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
    assert all(g.isfinite().all() for g in (*grads, *second))
    for g in grads[1:]:
        assert g[:, :, [0, 1, 5]].eq(0).all()
        assert g[:, :, 2:5].ne(0).all()


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@with_and_without_mask
def test_gradients_are_as_exact_as_the_dtype_allows(causal, dtype, device):
    """One rounding on the CPU. On a GPU `auto` takes a rung that rounds weights: at most twice the error of PyTorch."""
    leaves = qkv(60, 70, 64, dtype, device)
    grad = testing.randn(leaves[0].shape, dtype, device, seed=9)

    def gradients(attention, to):
        inputs = [t.to(to).requires_grad_() for t in leaves]
        return torch.autograd.grad(attention(*inputs, causal=causal), inputs, grad.to(to))

    got, eager = gradients(step2_attention.attention, dtype), gradients(attention_of, dtype)
    for g, e, exact in zip(got, eager, gradients(attention_of, torch.float64), strict=True):
        assert g.dtype == dtype
        rounding = (exact - exact.to(dtype).double()).abs().max()
        allowed = 1.01 * rounding + 1e-5 * exact.abs().max()
        if device == "cuda":
            allowed = torch.maximum(allowed, 2 * (e.double() - exact).abs().max())
        assert (g.double() - exact).abs().max() <= allowed


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize(("q_length", "k_length"), [(5, 5), (4, 3)])
def test_second_gradients_are_as_exact_as_the_dtype_allows(q_length, k_length, dtype, device):
    options = {"causal": True, "scale": 0.7}
    testing.check_second_gradients(
        lambda q, k, v: step2_attention.attention(q, k, v, **options),
        lambda q, k, v: attention_of(q, k, v, **options),
        qkv(q_length, k_length, 8, dtype, device),
        roundings=None,
    )
    testing.check_second_gradients(step2_attention.softmax, softmax_of, (testing.randn((3, 9), dtype, device),))


@on_each_device
@with_and_without_mask
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(causal, device):
    inputs = qkv(5, 4, 8, torch.float32, device)
    testing.check_each_input_alone(lambda *t: step2_attention.attention(*t, causal=causal), inputs)


def test_forward_mode_is_refused():
    """PyTorch would take a tangent for 0. torch.func.grad it refuses itself, and vmap is a loop."""
    q, k, v = qkv(5, 4, 8, torch.float32, "cpu")
    out, lse = step2_attention.attention(q, k, v, return_lse=True)
    testing.check_tangents_are_refused(step2_attention.attention, (q, k, v))
    testing.check_tangents_are_refused(step2_attention.attention_backward, (out, q, k, v, out, lse))
    testing.check_tangents_are_refused(step2_attention.softmax, (q,))
    testing.check_tangents_are_refused(step2_attention.softmax_backward, (q, q))
    with pytest.raises(RuntimeError, match=r"autograd.Function with functorch transforms"):
        torch.func.grad(lambda q: step2_attention.attention(q, k, v).sum())(q)
    each = torch.vmap(lambda q: step2_attention.attention(q, k, v))(torch.stack([q, 2 * q]))
    assert torch.equal(each[1], step2_attention.attention(2 * q, k, v))


@every_attention
def test_a_backward_runs_by_auto_whatever_rung_the_forward_had(device, rung):
    q, k, v = (t.requires_grad_() for t in qkv(5, 7, 16, dtype_of(rung), device))
    x = testing.randn((3, 9), torch.float32, device).requires_grad_()
    softmax_rung = step2_attention.rungs("softmax", device)[-1]
    outputs = [step2_attention.attention(q, k, v, rung=rung), step2_attention.softmax(x, rung=softmax_rung)]
    before = step2_attention.launch_counts()
    torch.autograd.grad(outputs, (q, k, v, x), [torch.ones_like(out) for out in outputs])
    after = step2_attention.launch_counts()
    backend = "gpu" if device == "cuda" else "cpu"
    assert {k: after[k] - before[k] for k in after if after[k] != before[k]} == {backend: 2}


def test_a_gradient_of_stride_0_is_taken():
    q, k, v = (t.requires_grad_() for t in qkv(5, 5, 8, torch.float32, "cpu"))
    got = torch.autograd.grad(step2_attention.attention(q, k, v).sum() + step2_attention.softmax(q).sum(), (q, k, v))
    expected = torch.autograd.grad(attention_of(q, k, v).sum(), (q, k, v))  # softmax's rows add up to 1, always
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)


# ---- as torch sees them ----


@every_attention
def test_attention_is_registered_as_torch_wants_it(device, rung):
    inputs = qkv(5, 7, 16, dtype_of(rung), device)
    testing.check_op(step2_attention, "attention", inputs, {"causal": True, "rung": rung})
    testing.check_op(step2_attention, "attention", inputs, {"scale": 0.3, "rung": rung})
    strided = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)
    testing.check_op(step2_attention, "attention", strided, {"rung": rung})
    if can_do(rung, 16, torch.float64):  # whose log-sum-exp is float64, too
        testing.check_op(step2_attention, "attention", tuple(t.double() for t in inputs), {"rung": rung})
    transposed = tuple(testing.transposed(t.bfloat16()) for t in inputs)
    testing.check_op(step2_attention, "attention", transposed, {"rung": rung})
    shared = qkv(5, 7, 16, dtype_of(rung), device, batch=2, heads=4, kv_heads=2)
    padding = (bounds([1, 0], device), bounds([7, 5], device))
    testing.check_op(step2_attention, "attention", (*shared, *padding), {"causal": True, "rung": rung})


def test_gradients_under_torch_compile():
    def loss(q, k, v):
        return step2_attention.softmax(step2_attention.attention(q, k, v, causal=True)).square().sum()

    inputs = [t.requires_grad_() for t in qkv(6, 6, 8, torch.float32, "cpu")]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want)


@on_each_device
@half_types
def test_autocast_makes_softmax_float32_and_attention_lower_precision(dtype, device):
    q, k, v = (t.requires_grad_() for t in qkv(5, 5, 8, torch.float32, device))
    with torch.autocast(device, dtype):
        mixed = step2_attention.attention(q.to(dtype), k, v)  # lower precision, all the same dtype
        weights = step2_attention.softmax(q.to(dtype))
        assert mixed.dtype == F.scaled_dot_product_attention(q, k, v).dtype == dtype
        assert weights.dtype == torch.float32
        if device == "cuda":  # on CPU, PyTorch's softmax keeps the dtype it gets
            assert torch.softmax(q.to(dtype), -1).dtype == torch.float32
        exact = step2_attention.attention(*(t.double() for t in (q, k, v)))
        assert exact.dtype == torch.float64
        mixed.sum().backward()
    halves = [t.detach().to(dtype) for t in (q, k, v)]
    assert torch.equal(mixed, step2_attention.attention(*halves))
    assert q.grad.dtype == k.grad.dtype == torch.float32
    options = {"causal": True, "scale": 0.7}
    with torch.autocast(device, dtype):
        mixed = step2_attention.attention(q, k, v, **options)
    assert torch.equal(mixed, step2_attention.attention(*halves, **options))


@half_types
def test_a_backward_inside_autocast_computes_the_same(dtype):
    inputs = [t.requires_grad_() for t in qkv(20, 20, 8, torch.float32, "cpu")]

    def gradients(loss):
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    outside = gradients(step2_attention.attention(*inputs).square().sum())
    loss = step2_attention.attention(*inputs).square().sum()
    with torch.autocast("cpu", dtype):
        inside = gradients(loss)
    for a, b in zip(inside, outside, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_autocast_under_torch_compile():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return step2_attention.softmax(step2_attention.attention(q, k, v))

    inputs = qkv(5, 5, 8, torch.float32, "cpu")
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(compiled, function(*inputs))


@pytest.mark.parametrize("overload", testing.writing_overloads("step2_attention"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)


# ---- bad input ----


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_attention_refuses(device):
    q, k, v = (torch.ones(1, 2, n, 8, device=device) for n in (3, 4, 4))
    with testing.raises(ValueError, "attention: `attn_mask` must be None, got a tensor of shape (3, 4)", "causal=True"):
        step2_attention.attention(q, k, v, attn_mask=torch.ones(3, 4, device=device))
    with testing.raises(ValueError, "attention: `attn_mask` must be None, got 'alibi'"):
        step2_attention.attention(q, k, v, attn_mask="alibi")
    with testing.raises(TypeError, "attention: `key_end` must be int32, got int64"):
        step2_attention.attention(q, k, v, key_end=torch.ones(1, dtype=torch.int64, device=device))
    with testing.raises(ValueError, "attention: `key_begin` must have shape (1,), got (2,)"):
        step2_attention.attention(q, k, v, key_begin=torch.ones(2, dtype=torch.int32, device=device))
    with testing.raises(TypeError, "attention: `q` must be float32, float16, bfloat16 or float64, got int32"):
        step2_attention.attention(q.int(), k, v)
    with testing.raises(TypeError, "attention: `k` must have the dtype of `q` (float32), got float16"):
        step2_attention.attention(q, k.half(), v)
    with testing.raises(TypeError, "attention: `v` must have the dtype of `q` (float32), got float64"):
        step2_attention.attention(q, k, v.double())
    with testing.raises(ValueError, "attention: `q` must have 4 dimensions, got 3 (shape (2, 3, 8))"):
        step2_attention.attention(q[0], k, v)
    with testing.raises(ValueError, "attention: `k` must have 4 dimensions, got 3 (shape (2, 4, 8))"):
        step2_attention.attention(q, k[0], v)
    with testing.raises(ValueError, "attention: `v` must have 4 dimensions, got 3 (shape (2, 4, 8))"):
        step2_attention.attention(q, k, v[0])
    with testing.raises(ValueError, "attention: `v` must have shape (1, 1, 4, 8), got (1, 2, 4, 8)"):
        step2_attention.attention(q, k[:, :1], v)
    for heads in (0, 3, 4):
        odd = torch.ones(1, heads, 4, 8, device=device)
        with testing.raises(
            ValueError, f"attention: the heads of `q` must be a multiple of those of `k`, got 2 and {heads}"
        ):
            step2_attention.attention(q, odd, odd)
    with testing.raises(ValueError, "attention: `k` must have shape (1, 2, 4, 8), got (1, 2, 4, 7)"):
        step2_attention.attention(q, k[..., :7], v)
    with testing.raises(ValueError, "attention: `v` must have shape (1, 2, 4, 8), got (1, 2, 3, 8)"):
        step2_attention.attention(q, k, v[:, :, :3])
    with testing.raises(
        ValueError, "attention: the last dimension of `q` (head_dim) must not be 0, got shape (1, 2, 3, 0)"
    ):
        step2_attention.attention(q[..., :0], k[..., :0], v[..., :0])
    other = "meta" if device != "meta" else "cpu"
    with testing.raises(ValueError, "attention: `k` must be on the device of `q`", f"got {other}"):
        step2_attention.attention(q, torch.ones(1, 2, 4, 8, device=other), v)
    with testing.raises(ValueError, "attention: `key_end` must be on the device of `q`", f"got {other}"):
        step2_attention.attention(q, k, v, key_end=torch.ones(1, dtype=torch.int32, device=other))


@on_each_device
def test_a_rung_refuses_by_name_what_it_cannot_do_and_names_one_that_can(device):
    q = torch.ones(1, 1, 2, 257, device=device)
    with testing.raises(ValueError, "attention: rung 'v2_tiled' takes head_dim ≤ 256, got 257; these can: 'v1_naive'"):
        step2_attention.attention(q, q, q, rung="v2_tiled")
    q = torch.ones(1, 1, 2, 8, device=device, dtype=torch.float64)
    with testing.raises(ValueError, "rung 'v2_tiled' takes float32, float16 or bfloat16, got float64", "'v1_naive'"):
        step2_attention.attention(q, q, q, rung="v2_tiled")
    for rung in filter(on_tensor_cores, step2_attention.rungs("attention", device)):
        q = torch.ones(1, 1, 2, 8, device=device)
        for dtype in (torch.float32, torch.float64):
            got = str(dtype).removeprefix("torch.")
            with testing.raises(ValueError, f"rung '{rung}' takes float16 or bfloat16, got {got}", "these can: 'v1_"):
                step2_attention.attention(q.to(dtype), q.to(dtype), q.to(dtype), rung=rung)
        for dim in (12, 136):
            q = torch.ones(1, 1, 2, dim, device=device, dtype=torch.float16)
            with testing.raises(
                ValueError, f"rung '{rung}' takes head_dim that is a multiple of 8 up to 128, got {dim}", "'v2_tiled'"
            ):
                step2_attention.attention(q, q, q, rung=rung)
    q = torch.ones(1, 1, 2, 8, device=device)
    for rung in ("v9", "", "V1_NAIVE"):
        for x, y in ((q, q), (q[:0], q[:0]), (q, q[:, :, :0])):  # empty ones too
            with testing.raises(
                ValueError, "attention: `rung` must be 'auto' or one of", "'v2_tiled'", f"got '{rung}'"
            ):
                step2_attention.attention(x, y, y, rung=rung)
            with testing.raises(ValueError, "softmax: `rung` must be 'auto' or one of", "'v3_online'", f"got '{rung}'"):
                step2_attention.softmax(x, rung=rung)


@on_each_device
def test_a_bad_out_is_refused(device):
    x = torch.ones(4, 3, device=device)
    with testing.raises(ValueError, "softmax: `out` must have shape (4, 3), got (3,)"):
        ops.softmax.out(x, out=torch.empty(3, device=device))
    with testing.raises(ValueError, "softmax: `out` must be contiguous"):
        ops.softmax.out(x, out=torch.empty(3, 4, device=device).T)
    with testing.raises(ValueError, "softmax: `out` must not share memory with `x`"):
        ops.softmax.out(x, out=x)
    q = torch.ones(1, 2, 3, 8, device=device)
    with testing.raises(TypeError, "attention: `out` must have the dtype of `q` (float32), got float16"):
        ops.attention.out(q, q, q, out=q.half(), lse=lse_for(q))
    with testing.raises(ValueError, "attention: `out` must have shape (1, 2, 3, 8), got (1, 2, 3, 7)"):
        ops.attention.out(q, q, q, out=torch.empty(1, 2, 3, 7, device=device), lse=lse_for(q))
    with testing.raises(ValueError, "attention: the last dimension of `out` must be contiguous, got stride 3"):
        ops.attention.out(q, q, q, out=torch.empty(1, 2, 8, 3, device=device).mT, lse=lse_for(q))
    with testing.raises(ValueError, "attention: `out` must not be expanded"):
        ops.attention.out(q, q, q, out=torch.empty(1, 1, 3, 8, device=device).expand(1, 2, 3, 8), lse=lse_for(q))
    out = torch.empty_like(q)
    with testing.raises(TypeError, "attention: `lse` must be float32, got float64"):
        ops.attention.out(q, q, q, out=out, lse=lse_for(q).double())
    with testing.raises(TypeError, "attention: `lse` must be float64, got float32"):
        ops.attention.out(*(q.double(),) * 3, out=out.double(), lse=lse_for(q))
    with testing.raises(ValueError, "attention: `lse` must have shape (1, 2, 3), got (1, 2, 4)"):
        ops.attention.out(q, q, q, out=out, lse=torch.empty(1, 2, 4, device=device))
    with testing.raises(ValueError, "attention: `lse` must be contiguous"):
        ops.attention.out(q, q, q, out=out, lse=torch.empty(1, 3, 2, device=device).mT)


@on_each_device
def test_an_out_that_shares_memory_with_an_input_is_refused(device):
    testing.check_apart(step2_attention, "softmax", (testing.randn((4, 3), torch.float32, device),))
    inputs = (*qkv(3, 4, 8, torch.float32, device), bounds([1], device), bounds([4], device))
    testing.check_apart(step2_attention, "attention", inputs, {"causal": True})


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_tensors_on_a_gpu_and_a_cpu_are_refused(device):
    q = torch.ones(1, 1, 2, 8)
    with testing.raises(ValueError, "attention: `v` must be on the device of `q` (cpu), got cuda:0"):
        step2_attention.attention(q, q, q.to(device))
    q, on_cpu = q.to(device), q
    with testing.raises(ValueError, "attention: `k` must be on the device of `q` (cuda:0), got cpu"):
        step2_attention.attention(q, on_cpu, on_cpu)
    with testing.raises(ValueError, "attention: `lse` must be on the device of `q` (cuda:0), got cpu"):
        ops.attention.out(q, q, q, out=torch.empty_like(q), lse=lse_for(on_cpu))


def test_rungs_refuses_an_unknown_op():
    with testing.raises(
        ValueError,
        "rungs: `op` must be 'softmax', 'softmax_backward', 'attention', 'attention_backward' or 'attention_decode', "
        "got 'sdpa'",
    ):
        step2_attention.rungs("sdpa")
    assert "cpu" not in step2_attention.rungs("softmax", "cuda")


def test_a_step_that_is_not_built_says_how_to_build_it(tmp_path):
    """The Python part alone, in another folder: what a fresh clone looks like."""
    for part in ("common/kernel_fusion", "step2-attention/step2_attention"):
        (tmp_path / part).mkdir(parents=True)
        for source in (steps.ROOT / part).glob("*.py"):
            (tmp_path / part / source.name).write_bytes(source.read_bytes())
    command, environment = (
        [sys.executable, "-c", "import step2_attention"],
        {**os.environ, "PYTHONPATH": steps.python_path(tmp_path)},
    )
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 1
    assert "step2_attention is not built" in ran.stderr
    assert "cd step2-attention && python setup.py build_ext --inplace" in ran.stderr


# ---- page one ----


def run_attention_kernel(program):
    command = [sys.executable, "-m", "kernel_fusion", "simt", str(program)]
    return subprocess.run(command, capture_output=True, text=True)


def test_attention_kernel_runs_under_emulation():
    ran = run_attention_kernel(pathlib.Path(__file__).with_name("attention_kernel.cu"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "12 heads, 128 tokens, 64 columns" in ran.stdout
    error = float(ran.stdout.split("in double: ")[1].split()[0])
    assert 0 < error < 1e-5
    assert "all right" in ran.stdout


def test_attention_kernel_fails_where_an_element_is_not_written(tmp_path):
    source = pathlib.Path(__file__).with_name("attention_kernel.cu").read_text()
    written = "out[head_start + query * kDim + d] = mean"
    assert written in source
    (tmp_path / "attention_kernel.cu").write_text(source.replace(written, f"if (d > 0) {written}"))
    ran = run_attention_kernel(tmp_path / "attention_kernel.cu")
    assert ran.returncode == 1
    assert "WRONG" in ran.stdout


if __name__ == "__main__":
    testing.main(__file__)
