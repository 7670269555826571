"""attention_decode, on every device there is: against float64, eager PyTorch, the rung before, and `attention`.

python tests/test_decode.py               pytest's options may follow, such as -k paged
"""

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import poisoned_allocations
from step2_attention.testing import (
    INFINITY,
    NAN,
    bounds,
    cached,
    every_dtype,
    every_rung_of,
    far_apart,
    half_types,
    lse_for,
    of_the_op,
    on_each_device,
    ops,
    paged,
    spoil_padding,
    takes_pages,
    tolerance_of,
    two_along,
    views_of,
)

OP = "attention_decode"
decode = step2_attention.attention_decode


def unpaged(cache, block_table):
    """[batch, heads, keys, head_dim] out of pages."""
    if block_table is None:
        return cache
    return cache[block_table.long()].transpose(1, 2).flatten(2, 3)


def decode_and_lse_of(q, k_cache, v_cache, key_begin=None, key_end=None, block_table=None, scale=None):
    """The formula, composed of PyTorch's operations. A query that sees no key gives 0, and a log-sum-exp of -inf."""
    k, v = unpaged(k_cache, block_table), unpaged(v_cache, block_table)
    group, (q_length, dim) = q.shape[1] // k.shape[1], q.shape[2:]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    key = torch.arange(k.shape[2], device=q.device)
    end = k.shape[2] if key_end is None else key_end.clamp(max=k.shape[2]).view(-1, 1, 1, 1)
    later = torch.arange(q_length - 1, -1, -1, device=q.device).unsqueeze(1)  # queries that come after this one
    hidden = key >= end - later
    if key_begin is not None:
        hidden = hidden | (key < key_begin.view(-1, 1, 1, 1))
    scores = ((q @ k.mT) * (dim**-0.5 if scale is None else scale)).masked_fill(hidden, -INFINITY)
    wide = scores if q.dtype == torch.float64 else scores.float()
    return torch.softmax(scores, -1).masked_fill(hidden, 0) @ v, torch.logsumexp(wide, -1)


def on_tensor_cores(rung):
    return rung in ("v3_mma", "v4_pipeline", "v5_cluster", "v6_paged")


def dtype_of(rung):
    """One that the rung takes."""
    return torch.bfloat16 if on_tensor_cores(rung) else torch.float32


def can_do(rung, dim, dtype):
    if on_tensor_cores(rung):
        return dim % 8 == 0 and dim <= 128 and dtype in (torch.float16, torch.bfloat16)
    if rung == "v2_split":
        vector = 16 // dtype.itemsize
        return dtype != torch.float64 and dim % vector == 0 and dim <= 32 * vector
    return True


def assert_decodes(out, *inputs, **options):
    """Fails where `out` is not the formula's in float64."""
    wide = (t.double() if t is not None and t.is_floating_point() else t for t in inputs)
    expected, _ = decode_and_lse_of(*wide, **options)
    torch.testing.assert_close(out.double(), expected, **tolerance_of(out))


def check_decode(inputs, rung, **options):
    return testing.check_contract(
        step2_attention,
        OP,
        inputs,
        rung,
        reference=decode_and_lse_of,
        eager=decode_and_lse_of,
        all_outputs={"return_lse": True},
        **options,
    )


every_rung = every_rung_of(OP)
paged_rungs = every_rung_of(OP, lambda device, rung: takes_pages(rung))


# ---- the contract of correctness ----


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_rung
@every_dtype
@pytest.mark.parametrize("keys", [1, 2, 5, 17, 31, 33, 127, 129, 600, 1023])
def test_one_query_over_any_number_of_keys(keys, dtype, device, rung):
    check_decode(cached(1, keys, 64, dtype, device), rung, layouts=keys < 100)


@every_rung
@pytest.mark.parametrize("q_length", [2, 3, 7, 16])
@pytest.mark.parametrize("keys", [1, 15, 40, 300])
def test_several_queries(keys, q_length, device, rung):
    check_decode(cached(q_length, keys, 64, dtype_of(rung), device), rung)


@every_rung
@pytest.mark.parametrize(("heads", "kv_heads", "q_length"), [(4, 2, 1), (6, 1, 3), (34, 2, 1), (6, 3, 16), (32, 1, 2)])
def test_several_heads_may_share_their_keys(heads, kv_heads, q_length, device, rung):
    """Up to 64 rows that read the same keys: four products of 16."""
    inputs = cached(q_length, 150, 32, dtype_of(rung), device, heads=heads, kv_heads=kv_heads)
    check_decode((*inputs, bounds([0, 5], device), bounds([149, 81], device)), rung, layouts=False)


@every_rung
@pytest.mark.parametrize("dim", [8, 72])
@testing.where(lambda rung: on_tensor_cores(rung))
def test_stages_of_keys_are_used_again_and_again(dim, device, rung):
    """So many heads that nobody shares their keys: a warp's steps are thrice its ring's stages."""
    heads = 2 * (torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 16)
    shape = {"batch": 1, "heads": heads, "kv_heads": heads}
    if rung == "v6_paged":
        q, k, v, table = paged(1, 37, 32, dim, dtype_of(rung), device, **shape)
        check_decode((q, k, v, None, None, table), rung, layouts=False)
    else:
        check_decode(cached(1, 1184, dim, dtype_of(rung), device, **shape), rung, layouts=False)


@testing.where(lambda dim, dtype, rung: can_do(rung, dim, dtype))
@every_rung
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 16, 31, 32, 40, 72, 80, 96, 104, 112, 128, 160, 256])
def test_any_head_dim(dim, dtype, device, rung):
    check_decode(cached(3, 70, dim, dtype, device), rung)


LENGTHS = {
    "right": (None, [170, 64, 33, 1]),
    "left": ([0, 3, 140, 169], None),
    "both": ([0, 31, 32, 165], [170, 33, 164, 166]),
    "empty rows": ([0, 170, 9, 5], [0, 170, 9, 4]),
    "beyond the cache": ([-5, -(2**31), 0, 2**31 - 1], [171, 2**31 - 1, -1, 2**31 - 1]),
}


@every_rung
@pytest.mark.parametrize("q_length", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_batch_has_its_own_length(lengths, q_length, device, rung):
    """What lies where no key is has no influence: it may even be NaN."""
    begin, end = (None if keys is None else bounds(keys, device) for keys in LENGTHS[lengths])
    q, k, v = cached(q_length, 170, 64, dtype_of(rung), device, batch=4)
    check_decode((q, k, v, begin, end), rung, layouts=False)
    got = decode(q, k, v, begin, end, return_lse=True, rung=rung)
    nothing = spoil_padding(q, k, v, begin, end).all(-1)
    assert got[0][nothing].eq(0).all()
    assert got[1][nothing].eq(-INFINITY).all()
    again = decode(q, k, v, begin, end, return_lse=True, rung=rung)
    assert torch.equal(got[0], again[0])
    assert torch.equal(got[1], again[1])


@every_rung
def test_a_query_sees_one_key_less_than_the_next(device, rung):
    q, k, v = cached(4, 50, 64, dtype_of(rung), device, batch=1)
    end = bounds([23], device)
    before = decode(q, k, v, None, end, rung=rung)
    k[:, :, 20:], v[:, :, 20:] = 1e4, -1e4  # keys of the last three queries
    after = decode(q, k, v, None, end, rung=rung)
    assert torch.equal(before[:, :, 0], after[:, :, 0])
    assert before[:, :, 1:].ne(after[:, :, 1:]).any(-1).all()


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@paged_rungs
@every_dtype
@pytest.mark.parametrize(("pages", "block_size"), [(1, 16), (5, 16), (3, 48), (2, 256)])
def test_pages(pages, block_size, dtype, device, rung):
    inputs = paged(2, pages, block_size, 64, dtype, device)
    keys = pages * block_size
    check_decode((*inputs[:3], None, bounds([keys, keys - 5], device), inputs[3]), rung, layouts=block_size == 16)
    begin = bounds([3, keys - 9], device)
    check_decode((*inputs[:3], begin, None, inputs[3]), rung, layouts=False)


@paged_rungs
@pytest.mark.parametrize("block_size", [1, 24, 40])
def test_pages_of_any_size(block_size, device, rung):
    q, k, v, table = paged(3, 4, block_size, 64, dtype_of(rung), device)
    end = bounds([4 * block_size, 2 * block_size + 1], device)
    if rung == "v6_paged":
        with testing.raises(
            ValueError,
            f"rung 'v6_paged' takes a block_size that is a multiple of 16, got {block_size}; these can",
        ):
            decode(q, k, v, None, end, table, rung=rung)
    else:
        check_decode((q, k, v, None, end, table), rung, layouts=False)


@paged_rungs
def test_what_stands_in_the_table_where_no_key_is_does_not_matter(device, rung):
    q, k, v, table = paged(2, 6, 16, 64, dtype_of(rung), device)
    begin, end = bounds([17, 0], device), bounds([64, 33], device)
    before = decode(q, k, v, begin, end, table, rung=rung)
    table[0, 0], table[0, 4:], table[1, 3:] = -7, 2**31 - 1, -1
    assert torch.equal(decode(q, k, v, begin, end, table, rung=rung), before)


@paged_rungs
def test_a_page_may_be_that_of_several_texts(device, rung):
    """A beginning that texts share is kept once."""
    q, k, v, table = paged(1, 3, 16, 64, dtype_of(rung), device)
    table[1, 0] = table[0, 0]
    assert_decodes(decode(q, k, v, None, None, table, rung=rung), q, k, v, None, None, table)


@paged_rungs
def test_a_page_that_does_not_exist(device, rung):
    q, k, v, table = paged(3, 2, 16, 64, dtype_of(rung), device)
    for page in (5, 2**31 - 1, -1, -(2**31)):
        table[1, 1] = page
        end = bounds([32, 18], device)  # of batch 1 the first query sees 16 keys, those of the first page
        if device == "cpu":
            with testing.raises(ValueError, f"attention_decode: `block_table`[1, 1] must be from 0 to 4, got {page}"):
                decode(q, k, v, None, end, table, rung=rung)
            with testing.raises(ValueError, "attention_decode: `block_table`[1, 1] must be from 0 to 4"):
                decode(q, k, v, bounds([0, 5], device), end, table, rung=rung)  # 5, then 16, not 21
            continue
        out = decode(q, k, v, None, end, table, rung=rung)
        assert out[0].isfinite().all()
        assert out[1, :, 0].isfinite().all()
        assert out[1, :, 1:].isnan().all()


@every_rung
def test_each_tensor_wherever_it_lies(device, rung):
    inputs = cached(3, 7, 64, dtype_of(rung), device, batch=2, heads=6, kv_heads=3)
    inputs = (*inputs, bounds([1, 2], device), bounds([7, 6], device))
    check_decode(inputs, rung, alone=True, layouts=False)
    if takes_pages(rung):
        inputs = paged(3, 5, 16, 64, dtype_of(rung), device, batch=2, heads=6, kv_heads=3)
        inputs = (*inputs[:3], bounds([1, 2], device), bounds([70, 6], device), inputs[3])
        check_decode(inputs, rung, alone=True, layouts=False)


@every_rung
@pytest.mark.parametrize("steep", [7, 60])
def test_each_step_may_bring_a_new_maximum(steep, device, rung):
    q, k, v = cached(2, 900, 64, dtype_of(rung), device)
    k = (k.abs() * torch.linspace(1, steep, 900, device=device)[:, None]).to(q.dtype)
    v = (v + testing.staircase(900, device)[:, None]).to(q.dtype)
    check_decode((q.abs(), k, v), rung, layouts=False)
    check_decode((q.abs(), k.flip(2), v), rung, layouts=False)


@testing.where(lambda dtype, rung: can_do(rung, 64, dtype))
@every_rung
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_scores_beyond_the_half_types_range_pick_the_greatest(dtype, device, rung):
    q, k, v = cached(3, 40, 64, dtype, device)
    q, k = q.sign() * 1e4, k.sign() * 1e4  # scores of up to 8e8; float16 ends at 65504
    out = decode(q, k, v, rung=rung)
    expected, _ = decode_and_lse_of(q.double(), k.double(), v.double())
    torch.testing.assert_close(out, expected.to(dtype))


@every_rung
@pytest.mark.parametrize("scale", [0.0, -0.7, 0.3, None])
def test_any_scale(scale, device, rung):
    inputs = cached(2, 40, 32, dtype_of(rung), device)
    assert_decodes(decode(*inputs, scale=scale, rung=rung), *inputs, scale=scale)


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step2_attention.rungs(OP, "cpu"):
        check_decode(cached(2, 700, 64, dtype_of(rung), "cpu"), rung, layouts=False)
        check_decode(cached(1, 90, 104, dtype_of(rung), "cpu"), rung, layouts=False)


@every_rung
@pytest.mark.parametrize("keys", [333, 1023])
def test_many_reruns_are_equal_to_the_last_bit(keys, device, rung):
    testing.check_reruns(
        lambda *inputs: decode(*inputs, return_lse=True, rung=rung), *cached(3, keys, 64, dtype_of(rung), device)
    )


@every_rung
@pytest.mark.parametrize("far", ["batch", "heads", "positions"])
@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache", "out"])
def test_offsets_beyond_32_bits(which, far, device, rung):
    names = ["q", "k_cache", "v_cache", "out"]
    tensors = {name: testing.randn(two_along(far), torch.float16, device, seed) for seed, name in enumerate(names)}
    expected, _ = decode_and_lse_of(*(tensors[name].double() for name in names[:3]))
    q, k, v, out = (tensors | {which: far_apart(tensors[which], far)}).values()
    ops.attention_decode.out(q, k, v, rung=rung, out=out, lse=lse_for(q))
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)


@paged_rungs
def test_pages_beyond_32_bits(device, rung):
    block = 64
    distance = (1 << 32) // block  # from page to page
    memory = testing.lazy_memory(distance * (block + 1), torch.float16, device)
    k = memory.as_strided((block + 1, 1, 16, 64), (distance, 1024, 64, 1))
    k[block] = testing.randn((1, 16, 64), torch.float16, device, 1)
    v = k.flip(2)[block:].expand(block + 1, -1, -1, -1)
    q = testing.randn((1, 1, 1, 64), torch.float16, device, 2)
    out = decode(q, k, v, None, None, bounds([[block]], device), rung=rung)
    assert_decodes(out, q, k[block:], v[block:])


# ---- what it is beside `attention` ----


@every_rung
@pytest.mark.parametrize("q_length", [1, 5])
def test_it_is_attention_of_the_last_queries(q_length, device, rung):
    q, k, v = cached(q_length, 90, 64, dtype_of(rung), device, heads=4, kv_heads=2)
    begin, end = bounds([0, 7], device), bounds([90, 90], device)
    out, lse = decode(q, k, v, begin, end, return_lse=True, rung=rung)
    whole, whole_lse = step2_attention.attention(q, k, v, begin, end, causal=True, return_lse=True)
    torch.testing.assert_close(out, whole, **tolerance_of(out))
    torch.testing.assert_close(lse, whole_lse, rtol=1e-4, atol=1e-4)


@every_rung
def test_generating_token_by_token_gives_the_rows_of_the_whole(device, rung):
    q, k, v = cached(12, 12, 64, dtype_of(rung), device, batch=1)
    whole = step2_attention.attention(q, k, v, causal=True)
    k_cache, v_cache = torch.full_like(k, NAN), torch.full_like(v, NAN)
    for i in range(12):
        k_cache[:, :, i], v_cache[:, :, i] = k[:, :, i], v[:, :, i]
        row = decode(q[:, :, i : i + 1], k_cache, v_cache, None, bounds([i + 1], device), rung=rung)
        torch.testing.assert_close(row, whole[:, :, i : i + 1], **tolerance_of(row))


# ---- inputs that are unusual, and right ----


@every_rung
def test_empty_tensors(device, rung):
    def run(b, h, sq, sk):
        q, k = torch.ones(b, h, sq, 8, device=device), torch.ones(b, h, sk, 8, device=device)
        return decode(q, k, k, return_lse=True, rung=rung)

    for shape in ((0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3)):
        out, lse = run(*shape)
        assert out.shape == (*shape[:3], 8)
        assert lse.shape == shape[:3]
    table = torch.zeros(2, 0, dtype=torch.int32, device=device)
    q, k = torch.ones(2, 2, 3, 8, device=device), torch.ones(5, 2, 16, 8, device=device)
    with poisoned_allocations():  # or 0 might be what happened to lie there
        nothing = [run(2, 2, 3, 0), decode(q, k, k, block_table=table, return_lse=True, rung=rung)]
    for out, lse in nothing:
        assert out.tolist() == torch.zeros(2, 2, 3, 8).tolist()
        assert lse.eq(-INFINITY).all()


@every_rung
def test_views_of_any_strides(device, rung):
    q, k, v = cached(6, 40, 16, dtype_of(rung), device)
    for inputs in views_of(q, k, v):
        out = decode(*inputs, rung=rung)
        assert out.is_contiguous()
        assert_decodes(out, *inputs)


@every_rung
def test_a_cache_of_tokens_then_heads_is_read_as_it_lies(device, rung):
    """[batch, token, head, column], as other projects keep it, by a transposed view; and pages likewise."""
    q, k, v = cached(2, 48, 64, dtype_of(rung), device)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    assert_decodes(decode(q, k, v, rung=rung), q, k, v)
    if takes_pages(rung):
        q, k, v, table = paged(2, 3, 16, 64, dtype_of(rung), device)
        k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        assert_decodes(decode(q, k, v, None, None, table, rung=rung), q, k, v, None, None, table)


# ---- as torch sees it ----


@of_the_op("attention_decode")
@every_rung
def test_it_is_registered_as_torch_wants_it(device, rung):
    q, k, v = cached(3, 20, 16, dtype_of(rung), device, heads=4, kv_heads=2)
    lengths = bounds([1, 0], device), bounds([19, 20], device)
    inputs = [(q, k, v), (q, k, v, *lengths), tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))]
    if takes_pages(rung):
        *pages, table = paged(3, 2, 16, 16, dtype_of(rung), device)
        inputs.append((*pages, None, bounds([30, 31], device), table))
    for given in inputs:
        torch.library.opcheck(ops.attention_decode.default, given, {"scale": 0.3, "rung": rung})
        eager = decode(*given, return_lse=True, rung=rung)
        torch.compiler.reset()
        compiled = torch.compile(
            lambda *t: decode(*t, return_lse=True, rung=rung),  # noqa: B023
            fullgraph=True,
            backend="inductor" if device == "cuda" else "aot_eager",
        )(*given)
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@every_rung_of(OP, lambda device, rung: device == "cuda")
def test_a_cuda_graph_is_replayed_with_other_lengths(device, rung):
    if not takes_pages(rung):
        inputs, table = cached(2, 512, 64, dtype_of(rung), device), None
    else:
        *inputs, table = paged(2, 8, 64, 64, dtype_of(rung), device)
    begin, end = bounds([0, 0], device), bounds([512, 512], device)
    decode(*inputs, begin, end, table, rung=rung)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = decode(*inputs, begin, end, table, rung=rung)
    for lengths in ([(0, 3), (512, 17)], [(0, 0), (1, 0)], [(100, 5), (511, 333)]):
        begin.copy_(bounds(lengths[0], device)), end.copy_(bounds(lengths[1], device))
        inputs[0].add_(0.1)
        graph.replay()
        assert torch.equal(captured, decode(*inputs, begin, end, table, rung=rung))
        assert_decodes(captured, *inputs, begin, end, table)


@on_each_device
@half_types
def test_under_autocast_it_has_autocasts_dtype(dtype, device):
    inputs = cached(1, 30, 16, torch.float32, device)
    with torch.autocast(device, dtype):
        mixed = decode(*inputs, None, bounds([30, 9], device), scale=0.7)
    assert torch.equal(mixed, decode(*(t.to(dtype) for t in inputs), None, bounds([30, 9], device), scale=0.7))


@on_each_device
def test_gradients_are_refused_and_not_lost(device):
    for index, name in enumerate(("q", "k_cache", "v_cache")):
        inputs = list(cached(1, 5, 8, torch.float32, device))
        inputs[index].requires_grad_()
        with testing.raises(RuntimeError, "attention_decode:", f"`{name}`", "must not require gradients"):
            decode(*inputs)
        with torch.no_grad():
            assert not decode(*inputs).requires_grad


if __name__ == "__main__":
    testing.main(__file__)
