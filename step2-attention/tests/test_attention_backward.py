"""Attention's gradients, on every device there is: against float64, eager PyTorch and the rung before.

What autograd makes of them is in test_attention_autograd.py.

python tests/test_attention_backward.py            pytest's options may follow, such as -k v2_tiled
"""

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from step2_attention.testing import (
    DTYPES,
    INFINITY,
    NAN,
    PADDING,
    attention_and_lse_of,
    bounds,
    can_do,
    dtype_of,
    every_dtype,
    every_rung_of,
    far_apart,
    float_and_half,
    gradients_of,
    of_the_op,
    on_each_device,
    ops,
    qkv,
    spoil_padding,
    two_along,
    with_and_without_mask,
)

OP = "attention_backward"
backward = step2_attention.attention_backward


def varies(rung):
    return rung not in ("auto", "cpu") and step2_attention.varies(OP, rung)


def eager(*inputs, **options):
    """As PyTorch composes it: a half type's log-sum-exp would be of no use."""
    return gradients_of(*inputs, by_lse=False, **options)


def given(q_length, k_length, dim, dtype, device, padding=(None, None), causal=False, scale=None, **shape):
    """All that the op takes: a gradient, attention's inputs, what attention made of them, and a gradient of its lse."""
    q, k, v = qkv(q_length, k_length, dim, dtype, device, **shape)
    key_begin, key_end = (None if keys is None else bounds(keys, device) for keys in padding)
    wide = (t.double() for t in (q, k, v))
    out, lse = attention_and_lse_of(*wide, key_begin, key_end, causal=causal, scale=scale)
    grad = testing.randn(q.shape, dtype, device, seed=4)
    grad_lse = testing.randn(lse.shape, torch.float32, device, seed=5)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return grad, q, k, v, out.to(dtype), lse.to(lse_dtype), key_begin, key_end, grad_lse.to(lse_dtype)


def check_backward(inputs, rung, causal=False, scale=None, **options):
    kwargs = {"causal": causal, "scale": scale}
    return testing.check_contract(
        step2_attention, OP, inputs, rung, reference=gradients_of, eager=eager, kwargs=kwargs, **options
    )


def assert_gradients(got, inputs, **options):
    expected = gradients_of(*(t.double() if t is not None and t.is_floating_point() else t for t in inputs), **options)
    rtol = 0.02 if got[0].dtype.itemsize == 2 else 1e-4
    greatest = max(e.abs().max().item() for e in expected)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=rtol, atol=rtol * greatest)


every_rung = every_rung_of(OP)


# ---- the contract of correctness ----


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_rung
@every_dtype
@with_and_without_mask
@pytest.mark.parametrize("length", [1, 31, 33, 129])
def test_gradients_of_any_length(length, causal, dtype, device, rung):
    check_backward(given(length, length, 64, dtype, device, causal=causal), rung, causal)


@every_rung
@with_and_without_mask
@pytest.mark.parametrize(("q_length", "k_length"), [(1, 130), (3, 70), (70, 3), (64, 65), (129, 64)])
def test_gradients_between_different_lengths(q_length, k_length, causal, device, rung):
    """(70, 3) and causal: the first queries see nothing, and have an lse of -inf."""
    check_backward(given(q_length, k_length, 32, dtype_of(rung), device, causal=causal), rung, causal, layouts=False)


@testing.where(lambda dim, rung: can_do(rung, dim, dtype_of(rung)))
@every_rung
@pytest.mark.parametrize("dim", [1, 8, 16, 17, 31, 32, 40, 64, 72, 96, 104, 111, 128, 136, 256, 300])
def test_gradients_with_any_head_dim(dim, device, rung):
    check_backward(given(40, 37, dim, dtype_of(rung), device), rung, layouts=False)


@every_rung
@with_and_without_mask
@pytest.mark.parametrize("padding", PADDING)
def test_only_keys_that_exist_take_part(padding, causal, device, rung):
    """What lies where no key is has no influence: it may even be NaN. Its own gradient is 0."""
    inputs = given(70, 70, 40, dtype_of(rung), device, PADDING[padding], causal, batch=4)
    check_backward(inputs, rung, causal, layouts=False)
    got = backward(*inputs, causal=causal, rung=rung)
    _, q, k, v, _, _, begin, end, _ = inputs
    missing = spoil_padding(q, k, v, begin, end)
    again = backward(*inputs, causal=causal, rung=rung)
    for g, a in zip(got, again, strict=True):
        assert not testing.differ(g, a, varies(rung)).any()
    for g in again[1:]:
        assert g.masked_fill(~missing[:, None, :, None], 0).eq(0).all()


@every_rung
@with_and_without_mask
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 1)])
def test_heads_that_share_their_keys_add_to_one_gradient(heads, kv_heads, causal, device, rung):
    shape = {"batch": 2, "heads": heads, "kv_heads": kv_heads}
    inputs = given(33, 70, 32, dtype_of(rung), device, ([0, 5], None), causal, **shape)
    check_backward(inputs, rung, causal, layouts=False)


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_rung
@float_and_half
def test_each_tensor_is_found_wherever_it_lies(dtype, device, rung):
    inputs = given(5, 7, 64, dtype, device, ([1, 2], [7, 6]), True, batch=2, heads=6, kv_heads=3)
    check_backward(inputs, rung, causal=True, alone=True, layouts=False)


@testing.where(lambda dim, rung: can_do(rung, dim, dtype_of(rung)) and rung not in ("cpu", "v1_naive", "v2_tiled"))
@every_rung
@pytest.mark.parametrize("dim", [16, 104])
@with_and_without_mask
def test_more_tiles_than_multiprocessors(causal, dim, device, rung):
    """Persistent blocks take several tiles of rows, one after the other, of other heads and batches.

    Between them are a batch without keys and, under the mask, queries that see none.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 16
    heads = multiprocessors // 2
    padding = ([0, 9, 5], [140, 9, 131])
    shape = {"batch": 3, "heads": heads, "kv_heads": heads // 2}
    inputs = given(300, 140, dim, dtype_of(rung), device, padding, causal, **shape)
    check_backward(inputs, rung, causal, layouts=False)


@testing.where(lambda dim, rung: can_do(rung, dim, dtype_of(rung)))
@every_rung
@pytest.mark.parametrize("dim", [16, 104])
@with_and_without_mask
def test_a_query_s_gradient_is_a_sum_over_many_tiles_of_keys(causal, dim, device, rung):
    """Five tiles of 128 keys: the first with padding, the last with none that exists; then, the first without one."""
    inputs = given(130, 520, dim, dtype_of(rung), device, ([3], [511]), causal)
    check_backward(inputs, rung, causal, layouts=False)
    shared = given(150, 400, dim, dtype_of(rung), device, ([200], [390]), causal, heads=2, kv_heads=1)
    check_backward(shared, rung, causal, layouts=False)
    _, q, k, v, _, _, begin, end, _ = shared
    before = backward(*shared, causal=causal, rung=rung)
    spoil_padding(q, k, v, begin, end)
    after = backward(*shared, causal=causal, rung=rung)
    assert not any(testing.differ(b, a, varies(rung)).any() for b, a in zip(before, after, strict=True))


@every_rung
def test_many_batches_without_a_key(device, rung):
    """Between two that have some: persistent blocks take many tiles in which there is nothing to do."""
    batch = 70
    ends = [33, *[0] * (batch - 2), 40]
    ends[5] = -(1 << 31)
    inputs = given(40, 140, 8, dtype_of(rung), device, ([0] * batch, ends), batch=batch)
    check_backward(inputs, rung, layouts=False)


@every_rung
def test_more_heads_than_a_grid_has_rows(device, rung):
    """Of Δ's kernel, from v2 on: 65535 heads at a time."""
    if device == "cpu":
        pytest.skip("minutes under emulation")
    inputs = given(3, 5, 8, dtype_of(rung), device, batch=1, heads=(1 << 16) + 3)
    check_backward(inputs, rung, layouts=False)


@every_rung
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale, device, rung):
    check_backward(given(20, 33, 32, dtype_of(rung), device, scale=scale), rung, scale=scale, layouts=False)


@every_rung
def test_without_a_gradient_of_the_log_sum_exp(device, rung):
    *inputs, _ = given(20, 33, 32, dtype_of(rung), device)
    check_backward((*inputs, None), rung, layouts=False)


@on_each_device
@every_dtype
@with_and_without_mask
def test_auto_does_gpt2_sized_layers(causal, dtype, device):
    check_backward(given(200, 256, 64, dtype, device, heads=12, causal=causal), "auto", causal, layouts=False)


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step2_attention.rungs(OP, "cpu"):
        check_backward(given(70, 90, 64, dtype_of(rung), "cpu", causal=True), rung, True, layouts=False)
        if can_do(rung, 104, dtype_of(rung)):
            check_backward(given(70, 130, 104, dtype_of(rung), "cpu"), rung, layouts=False)
        if rung in ("v6_atomics", "v7_turns", "v8_wide"):  # blocks wait for each other, and have several units
            check_backward(given(130, 400, 16, dtype_of(rung), "cpu", heads=8), rung, layouts=False)
        shared = given(40, 70, 32, dtype_of(rung), "cpu", ([3], [66]), True, heads=4, kv_heads=2)
        check_backward(shared, rung, True, layouts=False)


# ---- the same again, and the ends of the range ----


@testing.where(lambda dim, rung: can_do(rung, dim, dtype_of(rung)))
@every_rung
@pytest.mark.parametrize("dim", [64, 104])
@pytest.mark.parametrize("lengths", [(333, 1023), (33, 129)], ids=str)
def test_many_reruns_are_equal_to_the_last_bit(lengths, dim, device, rung):
    if device == "cpu" and max(lengths) > 200:
        pytest.skip("minutes under emulation")
    inputs = given(*lengths, dim, dtype_of(rung), device, ([3], [lengths[1] - 4]), True)
    testing.check_reruns(lambda *inputs: backward(*inputs, causal=True, rung=rung), *inputs, varies=varies(rung))


@on_each_device
def test_who_wants_the_same_bits_is_not_given_a_rung_that_varies(device, capfd):
    """As PyTorch's own operations: refused, or warned of, where torch.use_deterministic_algorithms says so."""
    inputs = given(70, 130, 64, torch.bfloat16, device, causal=True)
    varying = [rung for rung in step2_attention.rungs(OP, "cpu")[1:] if step2_attention.varies(OP, rung)]
    assert varying == ["v6_atomics"]
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="attention_backward by rung 'v6_atomics' does not have a deterministic"):
            backward(*inputs, causal=True, rung="v6_atomics")
        backward(*inputs, causal=True, rung="v7_turns")
        backward(*inputs, causal=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        backward(*inputs, causal=True, rung="v6_atomics")
        assert "v6_atomics" in capfd.readouterr().err  # an op in C++ warns there
    finally:
        torch.use_deterministic_algorithms(False)


@every_rung
@pytest.mark.parametrize("length", [1, 2, 5, 17, 128])
@with_and_without_mask
def test_large_scores_do_not_overflow(length, causal, device, rung):
    """As in FlashAttention's tests: q five times, k and v three times as large."""
    dtype = dtype_of(rung)
    _, q, k, v, *_ = given(length, length, 32, dtype, device)
    q, k, v = 5 * q, 3 * k, 3 * v
    out, lse = attention_and_lse_of(*(t.double() for t in (q, k, v)), causal=causal)
    inputs = testing.randn(q.shape, dtype, device, seed=6), q, k, v, out.to(dtype), lse.float()
    # Where a weight is nearly 1, grad·v − Δ is what is left of two sums that are nearly the same: right to the digits
    # of these, and not to its own.
    assert_gradients(backward(*inputs, causal=causal, rung=rung), inputs, causal=causal)


@every_rung
def test_scores_of_ten_thousand_pick_one_key(device, rung):
    """Where one weight is 1 and the others 0, the scores have no gradient, and v's is that of the output."""
    dtype = dtype_of(rung)
    q = torch.zeros(1, 1, 4, 16, dtype=dtype, device=device)
    k, v = torch.zeros_like(q), testing.randn(q.shape, dtype, device)
    q[..., 0], k[0, 0, :, 0] = 100, torch.tensor([-100.0, 0, 100, -100], device=device)
    out, lse = step2_attention.attention(q, k, v, scale=1.0, return_lse=True)
    assert lse.eq(10000).all()
    grad = testing.randn(q.shape, dtype, device, seed=2)
    dq, dk, dv = backward(grad, q, k, v, out, lse, scale=1.0, rung=rung)
    # Δ and grad·v are the same number, added up in another order: 100 times what is left of their difference.
    assert dq.abs().max() < 1e-2
    assert dk.abs().max() < 1e-2
    torch.testing.assert_close(dv[:, :, 2].double(), grad.double().sum(2), rtol=0.01, atol=0.01)
    assert dv[:, :, [0, 1, 3]].eq(0).all()


@every_rung
@with_and_without_mask
def test_a_query_that_sees_nothing_has_no_gradient_and_gives_none(causal, device, rung):
    padding = ([5, 0], [5, 7])
    inputs = given(20, 7, 32, dtype_of(rung), device, padding, causal, batch=2)
    dq, dk, dv = backward(*inputs, causal=causal, rung=rung)
    assert all(t.isfinite().all() for t in (dq, dk, dv))
    assert all(t[0].eq(0).all() for t in (dq, dk, dv))
    if causal:
        assert dq[1, :, :13].eq(0).all()
    assert dq[1, :, 13:].ne(0).any(-1).all()


@every_rung
def test_a_query_whose_scores_are_minus_infinity_has_no_gradient(device, rung):
    """Its log-sum-exp is -inf though it sees keys: forward gives 0 there, whatever the values are."""
    dtype = dtype_of(rung)
    q = torch.full((1, 1, 3, 8), 1e30, dtype=dtype, device=device)
    k = torch.full((1, 1, 5, 8), -1e30, dtype=dtype, device=device)
    v, grad = testing.randn(k.shape, dtype, device), testing.randn(q.shape, dtype, device)
    out, lse = step2_attention.attention(q, k, v, return_lse=True)
    assert out.eq(0).all()
    assert lse.eq(-INFINITY).all()
    assert all(g.eq(0).all() for g in backward(grad, q, k, v, out, lse, rung=rung))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    first = torch.autograd.grad(step2_attention.attention(*inputs), inputs, grad, create_graph=True)
    assert all(g.eq(0).all() for g in torch.autograd.grad(sum(g.sum() for g in first), inputs))


@testing.where(lambda dim, rung: can_do(rung, dim, dtype_of(rung)))
@every_rung
@pytest.mark.parametrize("dim", [32, 104])
@pytest.mark.parametrize("begin", [3, 64, 70])
def test_padding_on_the_left_may_be_nan_in_q_as_well(begin, dim, device, rung):
    """With a causal mask such tokens see nothing, and nothing that they hold reaches the others."""
    inputs = given(100, 100, dim, dtype_of(rung), device, ([begin], None), True)
    inputs[0][:, :, :begin] = 0
    expected = backward(*inputs, causal=True, rung=rung)
    for t in inputs[1:5]:
        t[:, :, :begin] = NAN
    got = backward(*inputs, causal=True, rung=rung)
    assert all(torch.equal(g[:, :, begin:], e[:, :, begin:]) for g, e in zip(got, expected, strict=True))
    assert all(g[:, :, :begin].eq(0).all() for g in got[1:])


@every_rung
def test_a_call_knows_nothing_of_the_one_before(device, rung):
    inputs = given(9, 20, 32, dtype_of(rung), device, heads=1)
    backward(*inputs, rung=rung)
    inputs[0].neg_(), inputs[3].add_(3), inputs[5].add_(0.5)  # other numbers in the same places
    assert_gradients(backward(*inputs, rung=rung), inputs)


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_what_another_head_left_is_not_read(dtype, device):
    """Infinite keys and values in the first batch, padding at the same places in the second; one thread does both."""
    padding = [0, 3], [40, 40]
    grad, q, k, v, out, lse, begin, end, _ = given(8, 40, 8, dtype, device, padding, batch=2, heads=1)
    expected_out = step2_attention.attention(q, k, v, begin, end)[1]
    expected = [g[1] for g in backward(grad, q, k, v, out, lse, begin, end)]
    k[0, :, 1], v[0, :, 1] = INFINITY, INFINITY
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        got_out = step2_attention.attention(q, k, v, begin, end)[1]
        got = [g[1] for g in backward(grad, q, k, v, out, lse, begin, end)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(got_out, expected_out)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- shapes and places ----


@every_rung
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 2, 3, 8), (0, 2, 4, 8)),
        ((2, 0, 3, 8), (2, 0, 4, 8)),
        ((2, 2, 0, 8), (2, 2, 4, 8)),
        ((2, 2, 3, 8), (2, 2, 0, 8)),
    ],
    ids=str,
)
def test_empty_tensors(q_shape, k_shape, device, rung):
    dtype = dtype_of(rung)
    q, k = (torch.ones(shape, dtype=dtype, device=device) for shape in (q_shape, k_shape))
    lse = torch.zeros(q_shape[:3], device=device)
    for got, like in zip(backward(q, q, k, k, q, lse, rung=rung), (q, k, k), strict=True):
        assert got.shape == like.shape
        assert got.eq(0).all()


@every_rung
@pytest.mark.parametrize("row", [35, 40])
def test_gradients_are_written_where_they_lie(row, device, rung):
    """Into GPT-2's packed gradient of q, k and v, for instance."""
    inputs = given(5, 5, 32, dtype_of(rung), device, batch=2, heads=3)
    memory = torch.full((2, 5, 3, 3, row), NAN, dtype=inputs[0].dtype, device=device)
    dq, dk, dv = memory[..., :32].permute(2, 0, 3, 1, 4)
    got = ops.attention_backward.out(*inputs, rung=rung, dq=dq, dk=dk, dv=dv)
    assert_gradients(got, inputs)
    assert memory[..., 32:].isnan().all()
    assert memory[..., :32].isfinite().all()


@every_rung
@pytest.mark.parametrize("far", ["batch", "heads", "positions"])
@pytest.mark.parametrize("which", ["grad", "q", "k", "v", "out", "dq", "dk", "dv"])
def test_offsets_beyond_32_bits(which, far, device, rung):
    q, k, v, grad = (testing.randn(two_along(far), torch.float16, device, seed) for seed in range(4))
    out, lse = step2_attention.attention(q, k, v, return_lse=True)
    tensors = {"grad": grad, "q": q, "k": k, "v": v, "out": out}
    tensors |= {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    expected = gradients_of(*(t.double() for t in (grad, q, k, v, out, lse)))
    tensors[which] = far_apart(tensors[which], far)
    inputs = [tensors[name] for name in ("grad", "q", "k", "v", "out")]
    got = ops.attention_backward.out(*inputs, lse, rung=rung, **{name: tensors[name] for name in ("dq", "dk", "dv")})
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=2e-3, atol=2e-3)


@every_rung_of(OP, lambda device, rung: device == "cuda")
def test_memory_does_not_grow_with_the_square_of_the_length(device, rung):
    def needed(length):
        inputs = given(length, length, 64, torch.bfloat16, device, heads=1, causal=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward(*inputs, causal=True, rung=rung)
        return torch.cuda.max_memory_allocated() - before

    grown = needed(4096) / needed(1024)
    assert (grown > 12) if rung == "v1_naive" else (grown < 5)


# ---- as torch sees it ----


@of_the_op(OP)
@every_rung
def test_it_is_registered_as_torch_wants_it(device, rung):
    dtype = dtype_of(rung)
    inputs = given(5, 7, 16, dtype, device, ([1, 0], [7, 5]), True, batch=2, heads=4, kv_heads=2)
    testing.check_op(step2_attention, OP, inputs, {"causal": True, "rung": rung})
    testing.check_op(step2_attention, OP, given(5, 7, 16, dtype, device)[:6], {"scale": 0.3, "rung": rung})


@on_each_device
@with_and_without_mask
def test_its_own_gradients(causal, device):
    """Of each input by itself, `out` and `lse` too: attention's second gradient goes through them."""
    inputs = given(4, 5, 3, torch.float64, device, ([0, 1, 3], [5, 4, 3]), causal, batch=3, heads=2, kv_heads=1)
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    with torch.no_grad():
        tensors[5].nan_to_num_(neginf=30)  # of queries that see nothing: finite differences of −∞ are NaN
    assert torch.autograd.gradcheck(lambda *t: backward(*t, causal=causal, scale=0.7), tensors)
    assert torch.autograd.gradcheck(lambda *t: backward(*t, None, causal=causal), tensors[:8])


# ---- what is chosen, and what is refused ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another(dtype):
    def choose(rung, **sizes):
        return step2_attention._C.choose(OP, rung, sizes, dtype)

    most = (1 << 31) - 1
    if dtype == torch.float64:
        assert choose("auto", batch=2) == "v1_naive"
        return
    half = dtype.itemsize == 2
    assert choose("auto", head_dim=64) == ("v7_turns" if half else "v2_tiled")
    assert choose("auto", head_dim=72) == ("v8_wide" if half else "v2_tiled")
    assert choose("auto", head_dim=12) == "v2_tiled"
    assert choose("auto", head_dim=256) == "v2_tiled"
    assert choose("auto", head_dim=257) == "v1_naive"
    assert choose("v2_tiled", batch=most) == "v2_tiled"
    for sizes in ({"batch": 1 << 31}, {"batch": 1 << 30, "q_length": 9}, {"batch": 1 << 30, "k_length": 9}):
        with testing.raises(ValueError, f"{OP}: rung 'v2_tiled' takes at most {most} blocks of 8 rows, got {1 << 31}"):
            choose("v2_tiled", **sizes)
    if half:
        with testing.raises(ValueError, f"{OP}: rung 'v3_mma' takes at most {most} blocks of 64 rows, got {1 << 31}"):
            choose("v3_mma", head_dim=64, batch=1 << 30, k_length=65)
        with testing.raises(ValueError, f"{OP}: rung 'v3_mma' takes at most {1 << 30} keys, got {1 << 31}"):
            choose("v3_mma", head_dim=64, k_length=1 << 31)


@on_each_device
def test_a_rung_refuses_by_name_what_it_cannot_do(device):
    x = torch.ones(1, 1, 2, 12, device=device)
    lse = torch.zeros(1, 1, 2, device=device)
    with testing.raises(ValueError, f"{OP}: rung 'v3_mma' takes float16 or bfloat16, got float32", "'v2_tiled'"):
        backward(x, x, x, x, x, lse, rung="v3_mma")
    with testing.raises(ValueError, "takes head_dim that is a multiple of 8 up to 128, got 12"):
        backward(*(x.half(),) * 5, lse, rung="v3_mma")
    with testing.raises(ValueError, "rung 'v2_tiled' takes float32, float16 or bfloat16, got float64", "'v1_naive'"):
        backward(*(x.double(),) * 5, lse.double(), rung="v2_tiled")
    for rung in ("v9", ""):
        for length in (2, 0):
            t = x[:, :, :length]
            with testing.raises(ValueError, f"{OP}: `rung` must be 'auto' or one of", f"got '{rung}'"):
                backward(t, t, t, t, t, lse[:, :, :length], rung=rung)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_bad_arguments_are_refused_by_name(device):
    q, k = (torch.ones(1, 2, length, 8, device=device) for length in (3, 4))
    lse = torch.ones(1, 2, 3, device=device)
    good = {"grad": q, "q": q, "k": k, "v": k, "out": q, "lse": lse}
    wrong = [
        ("grad", q.half(), TypeError, "`grad` must have the dtype of `q` (float32), got float16"),
        ("grad", q[:, :1], ValueError, "`grad` must have shape (1, 2, 3, 8), got (1, 1, 3, 8)"),
        ("q", q[0], ValueError, "`q` must have 4 dimensions, got 3"),
        ("k", k[..., :7], ValueError, "`k` must have shape (1, 2, 4, 8), got (1, 2, 4, 7)"),
        ("v", k.double(), TypeError, "`v` must have the dtype of `q` (float32), got float64"),
        ("v", k[:, :, :3], ValueError, "`v` must have shape (1, 2, 4, 8), got (1, 2, 3, 8)"),
        ("out", q.bfloat16(), TypeError, "`out` must have the dtype of `q` (float32), got bfloat16"),
        ("out", q[:, :, :2], ValueError, "`out` must have shape (1, 2, 3, 8), got (1, 2, 2, 8)"),
        ("lse", lse.double(), TypeError, "`lse` must be float32, got float64"),
        ("lse", lse[..., :2], ValueError, "`lse` must have shape (1, 2, 3), got (1, 2, 2)"),
        ("grad_lse", lse.half(), TypeError, "`grad_lse` must be float32, got float16"),
        ("grad_lse", lse[:, :1], ValueError, "`grad_lse` must have shape (1, 2, 3), got (1, 1, 3)"),
        ("key_begin", torch.ones(2, dtype=torch.int32, device=device), ValueError, "`key_begin` must have shape (1,)"),
        ("key_end", torch.ones(1, device=device), TypeError, "`key_end` must be int32, got float32"),
    ]
    for name, value, error, text in wrong:
        with testing.raises(error, f"{OP}: {text}"):
            backward(**{**good, name: value})
    other = "meta" if device != "meta" else "cpu"
    for name in ("grad", "k", "out", "lse"):
        with testing.raises(ValueError, f"{OP}: `{name}` must be on the device of `q`", f"got {other}"):
            backward(**{**good, name: torch.ones_like(good[name], device=other)})


@on_each_device
def test_a_bad_output_is_refused(device):
    inputs = given(3, 4, 8, torch.float32, device, ([1], [4]))
    outputs = {name: torch.empty_like(t) for name, t in zip(("dq", "dk", "dv"), inputs[1:4], strict=True)}
    call = ops.attention_backward.out
    for name, like in list(outputs.items()):
        with testing.raises(TypeError, f"{OP}: `{name}` must have the dtype of `q` (float32), got float16"):
            call(*inputs, **{**outputs, name: like.half()})
        with testing.raises(ValueError, f"{OP}: `{name}` must have shape"):
            call(*inputs, **{**outputs, name: like[..., :7]})
        with testing.raises(ValueError, f"{OP}: the last dimension of `{name}` must be contiguous"):
            call(*inputs, **{**outputs, name: torch.empty_like(like.mT.contiguous()).mT})
        with testing.raises(ValueError, f"{OP}: `{name}` must not be expanded"):
            call(*inputs, **{**outputs, name: like[:, :1].expand_as(like)})
    testing.check_apart(step2_attention, OP, inputs)


if __name__ == "__main__":
    testing.main(__file__)
