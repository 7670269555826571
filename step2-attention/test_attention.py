"""Attention, on every device there is: against float64, eager PyTorch, the rung before, and step 1.

python test_attention.py            pytest's options may follow, such as -k v2_tiled
"""

import pathlib
import subprocess
import sys

import pytest
import torch

import step2_attention  # not installed? pip install -e ..
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import poisoned_allocations
from step2_attention.testing import (
    DTYPES,
    INFINITY,
    NAN,
    PADDING,
    attention_and_lse_of,
    attention_of,
    bounds,
    can_do,
    dtype_of,
    every_attention,
    every_dtype,
    far_apart,
    float_and_half,
    lse_for,
    on_each_device,
    on_tensor_cores,
    ops,
    qkv,
    spoil_padding,
    tolerance_of,
    two_along,
    views_of,
    with_and_without_mask,
)


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
@testing.where(
    lambda dim, q_length, device, rung: device == "cuda" or rung == "v8_persistent" or (dim, q_length) == (16, 300)
)
def test_more_tiles_than_multiprocessors(causal, dim, q_length, heads_each, device, rung):
    """Persistent blocks take several tiles of queries, one after the other; some of these see no key. Of rungs
    whose blocks do not stay, one case is emulated.

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
@float_and_half
@with_and_without_mask
@pytest.mark.parametrize("padding", PADDING)
def test_attention_sees_only_keys_that_exist(padding, causal, dtype, device, rung):
    """What lies where no key is has no influence: it may even be NaN."""
    begin, end = (None if keys is None else bounds(keys, device) for keys in PADDING[padding])
    q, k, v = qkv(70, 70, 64, dtype, device, batch=4)
    check_attention((q, k, v, begin, end), rung, causal, layouts=False)
    got = step2_attention.attention(q, k, v, begin, end, causal=causal, return_lse=True, rung=rung)
    nothing = spoil_padding(q, k, v, begin, end).all(-1)
    assert got[0][nothing].eq(0).all()
    assert got[1][nothing].eq(-INFINITY).all()
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
@float_and_half
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
    def sizes(shape):  # of a packed row the documents' lengths decide, too
        return None if "documents" in shape else {SIZES.get(k, k): n for k, n in shape.items()}

    testing.check_automatic(step2_attention, op, sizes)


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
def test_the_future_has_no_influence(device, rung):
    q, k, v = qkv(40, 40, 64, dtype_of(rung), device)
    before = step2_attention.attention(q, k, v, causal=True, rung=rung)
    k[:, :, 25:], v[:, :, 25:] = 1e4, -1e4
    after = step2_attention.attention(q, k, v, causal=True, rung=rung)
    assert torch.equal(before[:, :, :25], after[:, :, :25])
    assert not torch.allclose(before[:, :, 25:], after[:, :, 25:])


# ---- inputs that are unusual, and right ----


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
    for inputs in views_of(q, k, v):
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
    shape = two_along(far)
    tensors = {
        name: testing.randn(shape, torch.float16, device, seed) for seed, name in enumerate(("q", "k", "v", "out"))
    }
    expected = attention_of(*(tensors[name].double() for name in "qkv"))
    q, k, v, out = (tensors | {which: far_apart(tensors[which], far)}).values()
    ops.attention.out(q, k, v, rung=rung, out=out, lse=lse_for(q))
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


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
    for length, documents, rung in (
        (4096, 16, "v8_persistent"),
        (4095, 16, "v6_wgmma"),
        (704, 16, "v9_split"),
    ):
        sizes = {"heads": 12, "q_length": length, "k_length": length, "head_dim": 64, "documents": documents}
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
