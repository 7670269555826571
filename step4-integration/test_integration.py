"""Step 4: its ops against float64 and PyTorch, and GPT-2 on all the project's ops against Hugging Face's.

python test_integration.py            pytest's options may follow, such as -k embedding
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import subprocess
import sys
from copy import deepcopy

import benchmark_gpt2
import demonstrations
import gpt2_model
import hf_patch
import pytest
import torch
import torch.nn.functional as F
import train
from generate import ByteTokenizer, FileTokenizer, choose, generate, read_tokenizer, where_different
from generate import main as generate_main
from gpt2_model import GPT2, KVCache
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN

import step1_simple  # not installed? pip install -e ..
import step2_attention
import step3_fused
import step4_integration
from kernel_fusion import steps, testing
from kernel_fusion.report import results

DTYPES = [*testing.DTYPES, torch.float64]
HALF_TYPES = [torch.float16, torch.bfloat16]
NAN = float("nan")

ops = torch.ops.step4_integration
every_embedding = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step4_integration", "embedding"))
every_append = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step4_integration", "kv_append"))
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
fused_or_separate = pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])


# ---- embedding ----


def look_up(ids, token_weight, position_weight, position=0):
    return F.embedding(ids, token_weight) + position_weight[position : position + ids.shape[1]]


def tables(batch, length, width, dtype, device, *, vocab=19, positions=None):
    ids = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    token_weight = testing.randn((vocab, width), dtype, device, seed=1)
    position_weight = testing.randn((positions or length + 3, width), dtype, device, seed=2)
    return ids, token_weight, position_weight


def check_embedding(inputs, rung, position=0, **options):
    return testing.check_contract(
        step4_integration,
        "embedding",
        inputs,
        rung,
        reference=look_up,
        eager=look_up,
        kwargs={"position": position},
        **options,
    )


@every_embedding
@every_dtype
@pytest.mark.parametrize(
    ("batch", "length", "width"),
    [
        (1, 1, 1),
        (2, 31, 64),
        (3, 33, 33),
        (1, 127, 40),
        (1, 3, 760),
        (2, 5, 768),
        (1, 3, 1600),
        (1, 1023, 8),
        (2, 129, 31),
        (2, 3, 12),
    ],
)
def test_embedding_adds_the_token_and_its_position(batch, length, width, dtype, device, rung):
    check_embedding(tables(batch, length, width, dtype, device), rung, position=2)


@every_embedding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_finds_each_tensor_wherever_it_lies(dtype, device, rung):
    check_embedding(tables(2, 5, 64, dtype, device), rung, position=2, alone=True, layouts=False)


@every_embedding
@pytest.mark.parametrize("far", ["id", "position"])
@pytest.mark.parametrize("width", [4096, 4095])
def test_embedding_of_rows_beyond_32_bits(width, far, device, rung):
    """A table of more than 2³² elements, most of which nobody touches; what wraps around lands where nothing is."""
    rows = (1 << 20) + (1 << 10)
    many = testing.lazy_memory(rows * width, torch.float16, device).view(rows, width)
    many[-1] = testing.randn((width,), torch.float16, device)
    few = testing.randn((2, width), torch.float16, device, seed=1)
    ids = torch.tensor([[rows - 1 if far == "id" else 1]], device=device)
    token_weight, position_weight, position = (many, few, 1) if far == "id" else (few, many, rows - 1)
    for id_type in (torch.int64, torch.int32):
        got = step4_integration.embedding(ids.to(id_type), token_weight, position_weight, position=position, rung=rung)
        assert torch.equal(got[0, 0], (many[-1].float() + few[1].float()).half())


@pytest.mark.parametrize(
    ("device", "rung"),
    [p for p in testing.device_rungs("step4_integration", "embedding") if p.values[1] != "cpu"],
)
@pytest.mark.parametrize("width", [4096, 4095])
def test_embedding_of_more_than_2_to_32_elements(width, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "20")
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    length = (1 << 20) + (1 << 10)
    ids = testing.lazy_memory(length, torch.int32, device).view(1, length)
    y = testing.lazy_memory(length * width, torch.float16, device).view(1, length, width)
    position_weight = testing.lazy_memory(length * width, torch.float16, device).view(length, width)
    token_weight = testing.randn((3, width), torch.float16, device)
    position_weight[-1] = testing.randn((width,), torch.float16, device, seed=1)
    ids[0, -1] = 2
    ops.embedding.out(ids, token_weight, position_weight, rung=rung, out=y)
    assert torch.equal(y[0, -1], (token_weight[2].float() + position_weight[-1].float()).half())


@every_embedding
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_ids_may_be_of_either_integer_type(id_type, device, rung):
    ids, token_weight, position_weight = tables(2, 7, 24, torch.float32, device)
    ids[0, 0], ids[1, 6] = 0, 18  # the first and the last row of the table
    check_embedding((ids.to(id_type), token_weight, position_weight), rung)


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step4_integration.rungs("embedding", "cpu"):
        check_embedding(tables(2, 9, 40, torch.float32, "cpu"), rung)
    for rung in step4_integration.rungs("kv_append", "cpu"):
        check_append(rung, torch.float32, "cpu")


SIZES_OF_ARGS = {"B": "batch", "H": "heads", "S": "length", "D": "head_dim"}


@pytest.mark.parametrize("op", ["embedding", "kv_append"])
def test_auto_is_read_off_the_results(op):
    testing.check_automatic(step4_integration, op, lambda shape: {SIZES_OF_ARGS.get(k, k): n for k, n in shape.items()})


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_auto_does_gpt2_sized_tables(dtype, device):
    check_embedding(tables(2, 1024, 768, dtype, device, vocab=2000, positions=1024), "auto", layouts=False)


@every_embedding
def test_no_tokens_give_no_rows(device, rung):
    _, token_weight, position_weight = tables(1, 1, 8, torch.float32, device)
    for shape in ((0, 3), (2, 0)):
        ids = torch.empty(shape, dtype=torch.int64, device=device)
        assert step4_integration.embedding(ids, token_weight, position_weight, rung=rung).shape == (*shape, 8)


@pytest.mark.parametrize("rung", step4_integration.rungs("embedding", "cpu"))
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_a_bad_id_is_an_error_on_the_cpu(id_type, rung):
    ids, token_weight, position_weight = tables(2, 5, 8, torch.float32, "cpu")
    for bad in (19, -1, 2**31 - 1):
        for at in ((0, 0), (1, 3), (1, 4)):
            with_bad = ids.index_put(tuple(map(torch.tensor, at)), torch.tensor(bad))
            with testing.raises(ValueError, "embedding: `ids` must be from 0 to 18", f"got {bad} at {at}"):
                step4_integration.embedding(with_bad.to(id_type), token_weight, position_weight, rung=rung)


@pytest.mark.parametrize(
    ("device", "rung"),
    [p for p in testing.device_rungs("step4_integration", "embedding") if p.values[0] == "cuda"],
)
@every_dtype
def test_a_bad_id_is_a_row_of_nan_on_a_gpu(dtype, device, rung):
    """kernels_test.cpp shows the same under emulation, where Python's host checks come first."""
    inputs = tables(2, 5, 8, dtype, device)
    expected = look_up(*inputs)
    for bad in (19, -1, 2**40):
        ids = inputs[0].clone()
        ids[1, 3] = bad
        y = step4_integration.embedding(ids, *inputs[1:], rung=rung)
        assert y[1, 3].isnan().all()
        y[1, 3] = expected[1, 3]
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


@every_embedding
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_gradient_of_embedding(id_type, device, rung):
    ids, token_weight, position_weight = tables(2, 5, 3, torch.float64, device)
    ids = ids.to(id_type)

    def function(token_weight, position_weight):
        return step4_integration.embedding(ids, token_weight, position_weight, position=1, rung=rung)

    weights = (token_weight.requires_grad_(), position_weight.requires_grad_())
    assert torch.autograd.gradcheck(function, weights)
    assert torch.autograd.gradgradcheck(function, weights)
    testing.check_each_input_alone(function, weights)
    testing.check_tangents_are_refused(function, weights)
    before = step4_integration.launch_counts()
    torch.autograd.grad(function(*weights).sum(), weights)
    after = step4_integration.launch_counts()
    assert sum(after.values()) - sum(before.values()) == 1  # the forward's; the backward is PyTorch's


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_gradients_of_embedding_are_as_exact_as_the_dtype_allows(dtype, device):
    """Each of 5 tokens is used about 800 times: summed in bfloat16, its gradient would stop growing long before."""
    ids, token_weight, position_weight = tables(1, 4000, 8, dtype, device, vocab=5)
    grad = testing.randn((1, 4000, 8), dtype, device, seed=3).abs()
    step4_integration.embedding(ids, token_weight.requires_grad_(), position_weight.requires_grad_()).backward(grad)

    wide = [t.detach().double().requires_grad_() for t in (token_weight, position_weight)]
    look_up(ids, *wide).backward(grad.double())
    for got, want in ((token_weight.grad, wide[0].grad), (position_weight.grad, wide[1].grad)):
        assert got.dtype == dtype
        rounding = (want - want.to(dtype).double()).abs().max()
        assert (got.double() - want).abs().max() <= 1.01 * rounding + 1e-5 * want.abs().max()


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_second_gradients_of_embedding_are_as_exact_as_the_dtype_allows(dtype, device):
    ids, *weights = tables(2, 5, 8, dtype, device)
    testing.check_second_gradients(
        lambda *tables: step4_integration.embedding(ids, *tables, position=1),
        lambda *tables: look_up(ids, *tables, position=1),
        tuple(weights),
    )


# ---- kv_append ----


def heads_of(packed):
    """q, k and v as GPT-2 has them: views into rows of 3·H·D."""
    return packed.permute(2, 0, 3, 1, 4)


def bits(t):
    return t.contiguous().view(torch.uint8)


def in_layout(t, layout):
    """A tensor of the same elements in other places."""
    if layout == "contiguous":
        return t.contiguous()
    if layout == "last dimension apart":
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]
    if layout == "unaligned":
        return F.pad(t.reshape(-1), (1, 0))[1:].view(t.shape)
    if layout == "rows apart":
        return F.pad(t, (0, 3))[..., : t.shape[-1]]
    if layout == "heads outermost":
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    return t


def cache_in_buffer(shape, dtype, device, layout):
    """A buffer of NaN, and a cache of that layout in it."""
    batch, heads, capacity, dim = shape
    row = dim + 3 if layout == "rows apart" else dim
    strides = [heads * capacity * row, capacity * row, row, 1]
    if layout == "heads outermost":
        strides[:2] = capacity * row, batch * capacity * row
    buffer = torch.full((208 + batch * heads * capacity * row,), NAN, dtype=dtype, device=device)
    return buffer, buffer.as_strided(shape, strides, 105 if layout == "unaligned" else 104)


def check_append(rung, dtype, device, *, batch=2, heads=3, length=5, dim=8, capacity=11, position=4, layout="packed"):
    """Appends once to caches cut from larger buffers; every byte that should not change is compared, NaN as NaN.

    `layout` is that of all four tensors, or, as a dictionary, of some of them: the others are packed as GPT-2's are, or
    contiguous if they are caches.
    """
    names = ("k", "v", "k_cache", "v_cache")
    layouts = layout if isinstance(layout, dict) else dict.fromkeys(names, layout)
    k, v = (
        in_layout(t, layouts.get(name, "packed"))
        for name, t in zip(
            names, heads_of(testing.randn((batch, length, 3, heads, dim), dtype, device))[1:], strict=False
        )
    )
    shape = (batch, heads, capacity, dim)
    buffers, caches = zip(
        *(cache_in_buffer(shape, dtype, device, layouts.get(n, "contiguous")) for n in names[2:]), strict=True
    )
    expected = []
    for buffer, cache, t in zip(buffers, caches, (k, v), strict=True):
        expected.append(buffer.clone())
        same = expected[-1].as_strided(shape, cache.stride(), cache.storage_offset())
        same[:, :, position : position + length] = t
    copies = [bits(t).clone() for t in (k, v)]
    before = step4_integration.launch_counts()
    step4_integration.kv_append(*caches, k, v, position, rung=rung)
    after = step4_integration.launch_counts()
    backend = "gpu" if device == "cuda" else "cpu" if rung in ("auto", "cpu") else "emulated"
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {backend: 1}
    for buffer, want in zip(buffers, expected, strict=True):
        assert torch.equal(bits(buffer), bits(want))
    for t, copy in zip((k, v), copies, strict=True):
        assert torch.equal(bits(t), copy)


@every_append
@every_dtype
@pytest.mark.parametrize("layout", ["packed", "contiguous", "last dimension apart", "unaligned"])
def test_kv_append_writes_its_rows_and_nothing_else(layout, dtype, device, rung):
    check_append(rung, dtype, device, layout=layout)


@every_append
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["k", "v", "k_cache", "v_cache"])
def test_kv_append_finds_each_tensor_wherever_it_lies(which, dtype, device, rung):
    """Where all tensors lie alike, one's address or strides can stand for another's."""
    for layout in ("unaligned", "rows apart", "heads outermost", "contiguous"):
        check_append(rung, dtype, device, dim=16, layout={which: layout})


@every_append
@every_dtype
@pytest.mark.parametrize("dim", [8, 5])
def test_kv_append_accesses_nothing_beside_its_tensors(dim, dtype, device, rung):
    """Up to the caches' last row; k and v are read to their end."""
    k, v = (testing.randn((2, 3, 4, dim), dtype, device, seed) for seed in (1, 2))
    caches = {name: torch.zeros(2, 3, 9, dim, dtype=dtype, device=device) for name in ("k_cache", "v_cache")}
    append = functools.partial(step4_integration.kv_append, position=5, rung=rung)
    testing.check_inside(step4_integration, append, k=k, v=v, **caches)


@every_append
@pytest.mark.parametrize("far", ["batch", "heads", "positions"])
@pytest.mark.parametrize("which", ["k", "v", "k_cache", "v_cache"])
def test_kv_append_at_offsets_beyond_32_bits(which, far, device, rung):
    """One tensor whose neighbours along one dimension are 2³² elements and more apart: most of it nobody touches."""
    dim = ["batch", "heads", "positions"].index(far)
    shape = [1, 1, 1, 8]
    shape[dim] = 2
    tensors = {name: testing.randn(shape, torch.float16, device, seed) for seed, name in enumerate(("k", "v"))}
    tensors |= {name: torch.zeros(shape, dtype=torch.float16, device=device) for name in ("k_cache", "v_cache")}
    expected = [tensors["k"].clone(), tensors["v"].clone()]
    distance = (1 << 32) + 4096  # what wraps around lands where nothing is
    strides = [8, 8, 8, 1]
    strides[dim] = distance
    memory = testing.lazy_memory(distance + 4096, torch.float16, device)
    tensors[which] = memory.as_strided(shape, strides).copy_(tensors[which])
    step4_integration.kv_append(*(tensors[n] for n in ("k_cache", "v_cache", "k", "v")), 0, rung=rung)
    assert torch.equal(tensors["k_cache"], expected[0])
    assert torch.equal(tensors["v_cache"], expected[1])


@every_append
def test_kv_append_far_into_a_cache(device, rung):
    position = (1 << 29) + 5  # · 8 elements a row: beyond 2³²
    caches = [testing.lazy_memory((position + 1) * 8, torch.float16, device).view(1, 1, -1, 8) for _ in range(2)]
    k, v = (testing.randn((1, 1, 1, 8), torch.float16, device, seed) for seed in (1, 2))
    step4_integration.kv_append(*caches, k, v, position, rung=rung)
    assert torch.equal(caches[0][:, :, -1:], k)
    assert torch.equal(caches[1][:, :, -1:], v)
    assert caches[0][0, 0, :64].eq(0).all()


@every_append
@pytest.mark.parametrize("dim", [1, 31, 33, 64, 127, 160])
def test_kv_append_of_any_head_dim(dim, device, rung):
    check_append(rung, torch.float16, device, dim=dim)


@every_append
@pytest.mark.parametrize(("length", "position", "capacity"), [(1, 0, 1), (1, 1022, 1023), (31, 2, 33), (127, 0, 128)])
def test_kv_append_from_the_first_to_the_last_row(length, position, capacity, device, rung):
    check_append(rung, torch.float32, device, batch=1, length=length, position=position, capacity=capacity)


@every_append
def test_caches_may_be_strided_views(device, rung):
    whole = torch.zeros(
        2, 2, 3, 2, 9, 12, device=device
    )  # [layer, batch, heads, k and v, capacity, more than head_dim]
    _, k, v = heads_of(testing.randn((2, 4, 3, 3, 8), torch.float32, device))
    step4_integration.kv_append(whole[1, :, :, 0, :, :8], whole[1, :, :, 1, :, :8], k, v, 5, rung=rung)
    expected = torch.zeros_like(whole)
    expected[1, :, :, 0, 5:, :8], expected[1, :, :, 1, 5:, :8] = k, v
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)


@every_append
def test_kv_append_of_nothing_changes_nothing(device, rung):
    cache = torch.ones(1, 2, 3, 4, device=device)
    nothing = torch.empty(1, 2, 0, 4, device=device)
    step4_integration.kv_append(cache, cache.clone(), nothing, nothing, 3, rung=rung)
    assert (cache == 1).all()


def test_kv_append_needs_gradients_to_be_off():
    cache, k = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 1, 4, requires_grad=True)
    for keys, values in ((k, k), (k, k.detach()), (k.detach(), k)):
        with testing.raises(RuntimeError, "kv_append: `k` and `v` must not require gradients", "torch.no_grad()"):
            step4_integration.kv_append(cache, cache.clone(), keys, values, 0)
    with torch.no_grad():
        step4_integration.kv_append(cache, cache.clone(), k, k, 0)
    assert cache.sum() == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rung", step4_integration.rungs("kv_append", "cuda"))
def test_kv_append_on_a_stream_of_its_own_and_in_a_cuda_graph(rung):
    caches = [torch.zeros(1, 2, 8, 16, device="cuda") for _ in range(2)]
    k = torch.zeros(1, 2, 3, 16, device="cuda")
    late = testing.randn((1, 2, 3, 16), torch.float32, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        k.copy_(late)
        step4_integration.kv_append(*caches, k, k, 2, rung=rung)
    torch.cuda.synchronize()
    assert torch.equal(caches[0][:, :, 2:5], late)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step4_integration.kv_append(*caches, k, k, 5, rung=rung)
    k.copy_(late * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(caches[1][:, :, 5:8], late * 2)


# ---- the ops as torch sees them ----


@every_embedding
def test_embedding_is_registered_as_torch_wants_it(device, rung):
    inputs = tables(2, 5, 8, torch.float32, device)
    testing.check_op(step4_integration, "embedding", inputs, {"position": 1, "rung": rung})
    transposed = tuple(map(testing.transposed, tables(2, 5, 8, torch.bfloat16, device)))
    testing.check_op(step4_integration, "embedding", transposed, {"rung": rung})


@every_append
def test_kv_append_is_registered_as_torch_wants_it(device, rung):
    caches = [torch.zeros(2, 3, 9, 8, device=device) for _ in range(2)]
    _, k, v = heads_of(testing.randn((2, 4, 3, 3, 8), torch.float32, device))
    torch.library.opcheck(ops.kv_append.default, (*caches, k, v, 2), {"rung": rung})

    def append(k_cache, v_cache, k, v, position):
        step4_integration.kv_append(k_cache, v_cache, k, v, position, rung=rung)
        return k_cache.sum() + v_cache.sum()

    expected = [cache.clone() for cache in caches]
    torch.compiler.reset()
    compiled = torch.compile(append, fullgraph=True, backend="aot_eager")
    assert compiled(*caches, k, v, 2) == append(*expected, k, v, 2)
    assert torch.equal(torch.stack(caches), torch.stack(expected))


def test_a_growing_position_compiles_once_more_and_no_further():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def function(cache, k, position):
        step4_integration.kv_append(cache[0], cache[1], k, k, position)
        return cache.sum()

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=count)
    cache, k = torch.zeros(2, 1, 2, 9, 8), torch.ones(1, 2, 1, 8)
    for position in range(9):
        assert compiled(cache, k, position) == 32 * (position + 1)
    assert len(graphs) == 2  # the first position as a constant, then one graph for every other


@pytest.mark.parametrize("overload", testing.writing_overloads("step4_integration"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)


@on_each_device
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_no_gradient_goes_through_a_cache_that_was_appended_to(which, compiled, device):
    caches = {name: torch.zeros(1, 2, 8, 16, device=device) for name in ("k_cache", "v_cache")}
    weight = torch.ones(1, 2, 8, 16, device=device, requires_grad=True)
    k = torch.ones(1, 2, 1, 16, device=device)
    loss = (weight * caches[which]).sum()
    torch.compiler.reset()
    append = step4_integration.kv_append
    with torch.no_grad():
        (torch.compile(append, fullgraph=True, backend="aot_eager") if compiled else append)(*caches.values(), k, k, 3)
    assert k._version == 0
    with testing.raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()


@on_each_device
def test_kv_append_under_inference_mode(device):
    """Tensors of that mode have no version counters; others have, also there."""
    k = torch.ones(1, 2, 1, 16, device=device)
    normal = torch.zeros(1, 2, 8, 16, device=device)
    with torch.inference_mode():
        cache = torch.zeros(1, 2, 8, 16, device=device)
        step4_integration.kv_append(cache, normal, k, k, 3)
    assert cache.sum() == normal.sum() == 32
    assert normal._version == 1
    with testing.raises(RuntimeError, "Inplace update to inference tensor outside InferenceMode"):
        step4_integration.kv_append(cache, normal, k, k, 4)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_embedding_refuses(device):
    ids, token_weight, position_weight = tables(2, 5, 8, torch.float32, "cpu", positions=7)
    ids, token_weight, position_weight = ids.to(device), token_weight.to(device), position_weight.to(device)

    def refused(exception, *fragments, ids=ids, token_weight=token_weight, position_weight=position_weight, **kwargs):
        with testing.raises(exception, *fragments):
            step4_integration.embedding(ids, token_weight, position_weight, **kwargs)

    refused(TypeError, "embedding: `ids` must be int64 or int32, got float32", ids=ids.float())
    refused(ValueError, "embedding: `ids` must have 2 dimensions, got 1 (shape (5,))", ids=ids[0])
    refused(TypeError, "embedding: `token_weight` must be float32", "got int64", token_weight=token_weight.long())
    refused(ValueError, "embedding: `token_weight` must have 2 dimensions", token_weight=token_weight[0])
    refused(ValueError, "embedding: `token_weight` must not be empty, got shape (0, 8)", token_weight=token_weight[:0])
    empty = {"token_weight": token_weight[:, :0], "position_weight": position_weight[:, :0]}
    refused(ValueError, "embedding: `token_weight` must not be empty, got shape (19, 0)", **empty)
    refused(TypeError, "embedding: `position_weight` must have the dtype", position_weight=position_weight.half())
    refused(ValueError, "embedding: `position_weight` must have shape (7, 8)", position_weight=position_weight[:, :7])
    refused(ValueError, "embedding: `position` must not be negative, got -1", position=-1)
    for position in (3, 2**63 - 1):  # to which no length can be added
        says = (f"embedding: `position` ({position})", "the length of `ids` (5)", "past the 7 rows")
        refused(ValueError, *says, position=position)
    if device != "meta":
        for some_ids in (ids, ids[:0], ids[:, :0]):
            refused(
                ValueError, "embedding: `rung` must be 'auto' or one of", "'v2_vector'", "'v9'", ids=some_ids, rung="v9"
            )
        out = torch.empty(2, 5, 9, device=device)
        with testing.raises(ValueError, "embedding: `out` must have shape (2, 5, 8), got (2, 5, 9)"):
            ops.embedding.out(ids, token_weight, position_weight, out=out)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_kv_append_refuses(device):
    k_cache, v_cache = torch.zeros(2, 3, 9, 8, device=device), torch.zeros(2, 3, 9, 8, device=device)
    k = torch.ones(2, 3, 4, 8, device=device)

    def refused(exception, *fragments, k_cache=k_cache, v_cache=v_cache, k=k, v=k, position=0, **kwargs):
        with testing.raises(exception, *fragments):
            step4_integration.kv_append(k_cache, v_cache, k, v, position, **kwargs)

    refused(TypeError, "kv_append: `k_cache` must be float32", "got int64", k_cache=k_cache.long())
    refused(ValueError, "kv_append: `k_cache` must have 4 dimensions, got 3", k_cache=k_cache[0])
    refused(ValueError, "kv_append: `v_cache` must have shape (2, 3, 9, 8), got (2, 3, 4, 8)", v_cache=k)
    refused(TypeError, "kv_append: `k` must have the dtype of `k_cache` (float32), got float16", k=k.half())
    refused(ValueError, "kv_append: `k` must have shape (2, 3, 4, 8), got (2, 2, 4, 8)", k=k[:, :2])
    refused(ValueError, "kv_append: `v` must have shape (2, 3, 4, 8), got (2, 3, 3, 8)", v=k[:, :, 1:])
    refused(ValueError, "kv_append: `position` must not be negative, got -1", position=-1)
    for position in (6, 2**63 - 1):  # to which no length can be added
        says = (f"`position` ({position})", "the length of `k` (4)", "past the caches' length 9")
        refused(ValueError, *says, position=position)
    if device != "meta":
        for some in (k, k[:, :, :0]):
            refused(ValueError, "kv_append: `rung` must be 'auto' or one of", "'v9'", k=some, v=some, rung="v9")
        refused(ValueError, "stride 1 along its last dimension", k_cache=k_cache.mT.contiguous().mT)
        for dim, size in enumerate((2, 3, 9)):
            expanded = v_cache.narrow(dim, 0, 1).expand(*(size if d == dim else -1 for d in range(4)))
            says = ("`v_cache` must not be an expanded tensor", f"dimension {dim} has stride 0")
            refused(ValueError, *says, v_cache=expanded)


@on_each_device
def test_an_output_that_shares_memory_with_anything_is_refused(device):
    testing.check_apart(step4_integration, "embedding", tables(2, 5, 8, torch.float32, device))
    k = testing.randn((2, 3, 4, 8), torch.float32, device)
    caches = torch.zeros(2, 2, 3, 9, 8, device=device)
    testing.check_apart(step4_integration, "kv_append", (caches[0], caches[1], k, k.clone(), 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_several_devices_are_refused():
    ids, token_weight, position_weight = tables(2, 5, 8, torch.float32, "cuda")
    with testing.raises(ValueError, "embedding: `ids` must be on the device of `token_weight` (cuda:0), got cpu"):
        step4_integration.embedding(ids.cpu(), token_weight, position_weight)
    with testing.raises(ValueError, "embedding: `position_weight` must be on the device of `token_weight`"):
        step4_integration.embedding(ids, token_weight, position_weight.cpu())


def test_rungs_of_an_unknown_op_are_refused():
    with testing.raises(ValueError, "rungs: `op` must be 'embedding' or 'kv_append', got 'unembedding'"):
        step4_integration.rungs("unembedding")
    assert "cpu" not in step4_integration.rungs("embedding", "cuda")


def test_a_step_that_is_not_built_says_how_to_build_it(tmp_path):
    """In a copy without its library."""
    for folder in ("common/kernel_fusion", "step4-integration/step4_integration"):
        (tmp_path / folder).mkdir(parents=True)
        for file in (steps.ROOT / folder).glob("*.py"):
            (tmp_path / folder / file.name).write_text(file.read_text())
    run = subprocess.run(
        [sys.executable, "-c", "import step4_integration"],
        env={**os.environ, "PYTHONPATH": steps.python_path(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "cd step4-integration && python setup.py build_ext --inplace" in run.stderr


def test_the_benchmark_of_models_writes_what_it_measured(tmp_path, monkeypatch):
    """A model of one layer, since only what is written counts here."""
    path = tmp_path / "results.json"
    monkeypatch.setitem(gpt2_model.SIZES, "gpt2", gpt2_model.Config(n_embd=32, n_layer=1, n_head=2))
    monkeypatch.setitem(benchmark_gpt2.CASES, "cpu", [("prefill", "gpt2", 1, 8), ("train", "gpt2", 1, 8)])
    monkeypatch.setattr(sys, "argv", ["benchmark_gpt2.py", "--device", "cpu", "--output", str(path)])
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", "0.1")
    with pytest.raises(SystemExit, match="0"):
        benchmark_gpt2.main()
    rows = [(row["op"], row["impl"], row["correct"]) for row in results.read(path).rows]
    ways = ("separate", "fused", "transformers")
    assert rows == [(f"gpt2_{what}", way, True) for what in ("prefill", "train") for way in ways]


# ---- GPT-2 against Hugging Face ----


SIZES = {"2 heads of 32": (64, 2), "3 heads of 32": (96, 3), "5 heads of 32": (160, 5), "4 heads of 25": (100, 4)}


def make_hf(n_embd, n_head, **options):
    """A random GPT-2 of transformers. Biases and LayerNorms are random too: at 0 and 1 they would hide mistakes.

    Biases are small beside the embeddings: larger ones would choose the same token at every step.
    """
    config = GPT2Config(
        vocab_size=97,
        n_positions=48,
        n_embd=n_embd,
        n_head=n_head,
        n_layer=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        **({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | options),
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if name.endswith("bias") else 0.2))
    return model


@pytest.fixture(scope="module")
def hf():
    """A tiny GPT-2 of transformers, in float32 on the CPU. Tests leave it as it is."""
    return make_hf(96, 3)


@pytest.fixture(scope="module")
def folder(hf, tmp_path_factory):
    """`hf` as transformers saves it."""
    folder = tmp_path_factory.mktemp("hf")
    hf.save_pretrained(folder)
    return folder


@pytest.fixture
def one_thread():
    """For many steps on tensors so small that a second thread is only waited for."""
    with train.one_thread():
        yield


def tokens(batch=2, length=23, device="cpu", seed=0):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed)).to(device)


def copy_of(hf, dtype=torch.float32, device="cpu"):
    copy = GPT2LMHeadModel(hf.config).eval()
    copy.load_state_dict(hf.state_dict())
    return copy.to(device, dtype)


def ours_of(hf, tmp_path, **options):
    hf.save_pretrained(tmp_path / "hf")
    return GPT2.from_pretrained(tmp_path / "hf", **options)


@torch.no_grad()
def check_logits(model, hf, ids):
    """The error of our logits against Hugging Face's in float64 is below three times that of Hugging Face's own model
    in our dtype."""
    weight = model.wte.weight
    reference = copy_of(hf, torch.float64, ids.device)(ids).logits
    theirs = copy_of(hf, weight.dtype, ids.device)(ids).logits
    allowed = 3 * (theirs.double() - reference).abs().max().item() + 1e-6 * reference.abs().max().item()
    error = (model(ids).double() - reference).abs().max().item()
    assert error <= allowed, f"logits are {error:.3g} off, allowed are {allowed:.3g}"


@fused_or_separate
@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_logits_equal_hugging_face(size, dtype, device, fused, tmp_path):
    hf = make_hf(*SIZES[size])
    model = ours_of(hf, tmp_path, fused=fused, dtype=dtype, device=device)
    for ids in (tokens(2, 23, device), tokens(1, 1, device), tokens(1, 48, device)):
        check_logits(model, hf, ids)


@fused_or_separate
@pytest.mark.parametrize(
    "option",
    [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"activation_function": "gelu"},
     {"n_inner": 72}, {"layer_norm_epsilon": 0.1}],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_options_of_the_config_count(option, fused, tmp_path):
    hf = make_hf(64, 2, **option)
    check_logits(ours_of(hf, tmp_path, fused=fused), hf, tokens())


def test_an_activation_is_what_transformers_calls_so():
    x = torch.linspace(-6, 6, 500, dtype=torch.float64)
    for name, approximate in gpt2_model.GELUS.items():
        torch.testing.assert_close(F.gelu(x, approximate=approximate), ACT2FN[name](x), rtol=0, atol=1e-9, msg=name)


def without_causality(monkeypatch, model):
    for name in ("attention_block", "attention"):
        right = getattr(gpt2_model, name)
        monkeypatch.setattr(gpt2_model, name, lambda *a, _right=right, **kw: _right(*a, **{**kw, "causal": False}))


def with_two_heads_swapped(monkeypatch, model):
    attention = model.h[1].attn
    size = attention.config.n_embd // attention.config.n_head
    for parameter in (attention.c_attn.weight, attention.c_attn.bias):
        heads = parameter.data.unflatten(-1, (3, -1, size))
        heads[..., [0, 1], :] = heads[..., [1, 0], :].clone()


def without_the_projections_bias(monkeypatch, model):
    model.h[0].attn.c_proj.bias.data.zero_()


@fused_or_separate
@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("mistake", [without_causality, with_two_heads_swapped, without_the_projections_bias])
def test_the_comparison_finds_a_model(mistake, dtype, device, fused, hf, folder, monkeypatch):
    model = GPT2.from_pretrained(folder, fused=fused, dtype=dtype, device=device)
    check_logits(model, hf, tokens(device=device))
    mistake(monkeypatch, model)
    with testing.raises(AssertionError, "logits are", "allowed are"):
        check_logits(model, hf, tokens(device=device))


@fused_or_separate
@on_each_device
def test_gradients_equal_hugging_face(device, fused, hf, folder):
    ids = tokens(device=device)

    def gradients(model, logits_of):
        loss = F.cross_entropy(logits_of(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()))
        names = (name.removeprefix("transformer.") for name in parameters)
        return loss.item(), dict(zip(names, found, strict=True))

    exact, theirs = copy_of(hf, torch.float64, device), copy_of(hf, torch.float32, device)
    ours = GPT2.from_pretrained(folder, fused=fused, device=device)
    exact_loss, want = gradients(exact, lambda ids: exact(ids).logits)
    _, also = gradients(theirs, lambda ids: theirs(ids).logits)
    loss, got = gradients(ours, ours)
    assert abs(loss - exact_loss) < 1e-5 * exact_loss
    assert got.keys() == want.keys()
    for name in want:
        allowed = 3 * (also[name].double() - want[name]).abs().max() + 1e-5 * want[name].abs().max()
        assert (got[name].double() - want[name]).abs().max() <= allowed, name


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_fused_and_separate_ops_agree(dtype, device, folder):
    fused, separate = (GPT2.from_pretrained(folder, fused=f, dtype=dtype, device=device) for f in (True, False))
    before = [step.launch_counts() for step in (step2_attention, step3_fused)]
    with torch.no_grad():
        a, b = fused(tokens(device=device)), separate(tokens(device=device))
    after = [step.launch_counts() for step in (step2_attention, step3_fused)]
    spent = [sum(x.values()) - sum(y.values()) for x, y in zip(after, before, strict=True)]
    # Separate: 2 attentions. Both: the first LayerNorm, and after each of 2 MLPs a residual_layer_norm. Fused:
    # 2 attention_blocks; separate: 2 more residual_layer_norms in their place.
    assert spent == [2, 2 * (1 + 2 + 2)]
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def test_q_k_and_v_reach_the_op_without_a_copy(folder, monkeypatch):
    seen = []
    right = gpt2_model.attention_block

    def spy(q, k, v, *args, **kwargs):
        seen.append((q, k, v))
        return right(q, k, v, *args, **kwargs)

    monkeypatch.setattr(gpt2_model, "attention_block", spy)
    with torch.no_grad():
        GPT2.from_pretrained(folder)(tokens())
    for q, k, v in seen:
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert q.shape == (2, 3, 23, 32)
        assert q.stride() == (23 * 288, 32, 288, 1)


@pytest.mark.emulated
def test_a_forward_pass_under_emulation(folder):
    """Every op of the model by its .cu file, on a machine without a GPU."""
    fused = {"embedding": "v2_vector", "layer_norm": "v2_block", "attention_block": "v2_fused",
             "residual_layer_norm": "v2_fused", "bias_gelu": "v5_any_width", "kv_append": "v2_vector"}  # fmt: skip
    separate = {"embedding": "v1_naive", "layer_norm": "v1_naive", "attention": "v2_tiled",
                "residual_layer_norm": "v1_separate", "bias_gelu": "v2_naive", "kv_append": "v1_naive"}  # fmt: skip
    ids = tokens(1, 9)
    steps_used = (step1_simple, step2_attention, step3_fused, step4_integration)
    for rungs, is_fused in ((fused, True), (separate, False)):
        model = GPT2.from_pretrained(folder, fused=is_fused, rungs=rungs)
        plain = GPT2.from_pretrained(folder, fused=is_fused)
        with torch.no_grad():
            expected = plain(ids)
            before = [step.launch_counts() for step in steps_used]
            cache = KVCache(model.config, 1, 9)
            got = torch.cat([model(ids[:, :7], cache), model(ids[:, 7:], cache)], dim=1)
            after = [step.launch_counts() for step in steps_used]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for step, old, new in zip(steps_used, before, after, strict=True):
            assert new["cpu"] == old["cpu"], step
            assert new["emulated"] > old["emulated"] or (is_fused and step is step2_attention)


@on_each_device
def test_the_model_compiles_into_one_graph(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens(device=device))
        torch.testing.assert_close(compiled, model(tokens(device=device)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_model_in_a_cuda_graph(folder):
    model = GPT2.from_pretrained(folder, dtype=torch.bfloat16, device="cuda")
    ids = tokens(device="cuda")
    with torch.no_grad():
        expected = model(ids)
        static = torch.zeros_like(ids)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(static)
        static.copy_(ids)
        graph.replay()
    assert torch.equal(logits, expected)


@on_each_device
@fused_or_separate
def test_training_under_autocast(fused, device, folder):
    model = GPT2.from_pretrained(folder, fused=fused, device=device)
    ids = tokens(device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    with torch.no_grad():
        exact = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - exact.item()) < 0.02 * exact.item()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# ---- generation ----


def check_tokens(ours, theirs):
    different = where_different(ours, theirs)
    assert different is None, different


def test_where_two_generations_part_is_said_in_words():
    ours = torch.tensor([[1, 2, 3, 4], [1, 2, 7, 4]])
    theirs = torch.tensor([[1, 2, 3, 5], [1, 2, 6, 4]])
    assert where_different(ours, ours.clone()) is None
    assert where_different(ours, theirs) == "token 2 of row 1 is 7, not 6; 2 of 8 tokens differ"
    assert where_different(ours, theirs[:, :3]) == "shape (2, 4) against (2, 3)"


@pytest.mark.usefixtures("one_thread")
@fused_or_separate
@on_each_device
def test_greedy_generation_equals_hugging_face(device, fused, hf, folder):
    ids = tokens(2, 7, device)
    theirs = copy_of(hf, device=device).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=41, do_sample=False, pad_token_id=0
    )
    assert all(len(set(row)) > 8 for row in theirs[:, 7:].tolist())  # a model that repeats itself would prove little
    model = GPT2.from_pretrained(folder, fused=fused, device=device)
    check_tokens(generate(model, ids, 41), theirs)
    check_tokens(generate(model, ids, 41, use_cache=False), theirs)


@pytest.mark.usefixtures("one_thread")
@fused_or_separate
@on_each_device
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_greedy_generation_in_half_precision(dtype, device, fused, hf, folder):
    """Two logits that are equal in a half type may be told apart by nobody; each token taken must be among the best."""
    ids = tokens(4, 7, device)
    ours = generate(GPT2.from_pretrained(folder, fused=fused, dtype=dtype, device=device), ids, 41)
    with torch.no_grad():
        exact = copy_of(hf, torch.float64, device)(ours).logits
        theirs = copy_of(hf, dtype, device)(ours).logits
    allowed = 6 * (theirs.double() - exact).abs().max()  # check_logits allows 3 for each of the two logits
    best = exact[:, 6:-1].max(-1).values
    taken = exact[:, 6:-1].gather(-1, ours[:, 7:, None])[..., 0]
    assert (best - taken).max() <= allowed
    assert (best == taken).float().mean() > 0.8


@pytest.mark.usefixtures("one_thread")
@on_each_device
@pytest.mark.parametrize("chunks", [(23,), (1,) * 23, (10, 1, 12), (22, 1)], ids=str)
def test_a_prompt_read_in_chunks_gives_the_same_logits(chunks, device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(device=device)
    cache = KVCache(model.config, 2, device=device)
    with torch.no_grad():
        parts = [model(part, cache) for part in ids.split(chunks, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(ids), rtol=1e-5, atol=1e-5)
    assert cache.length == 23


@pytest.mark.usefixtures("one_thread")
@on_each_device
def test_draws_with_a_seed_can_be_repeated(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(4, 3, device)
    first = generate(model, ids, 20, temperature=1.5, seed=7)
    check_tokens(generate(model, ids, 20, temperature=1.5, seed=7), first)
    check_tokens(generate(model, ids, 20, temperature=1.5, seed=7, use_cache=False), first)
    assert not torch.equal(first, generate(model, ids, 20, temperature=1.5, seed=8))
    assert not torch.equal(generate(model, ids, 20, temperature=1.5), generate(model, ids, 20, temperature=1.5))


@pytest.mark.usefixtures("one_thread")
def test_draws_follow_the_models_probabilities(folder):
    model = GPT2.from_pretrained(folder)
    ids = tokens(1, 5).expand(4000, 5)
    with torch.no_grad():
        probability = torch.softmax(model(ids[:1])[0, -1] / 0.8, -1)
    share = torch.bincount(generate(model, ids, 1, temperature=0.8, seed=0)[:, -1], minlength=97) / 4000
    assert (share - probability).abs().max() < 0.04
    likeliest = set(probability.topk(3).indices.tolist())
    assert set(generate(model, ids, 1, temperature=0.8, top_k=3, seed=0)[:, -1].tolist()) == likeliest
    check_tokens(generate(model, ids[:2], 9, temperature=2.0, top_k=1), generate(model, ids[:2], 9))


@pytest.mark.usefixtures("one_thread")
def test_a_seed_of_0_is_a_seed(folder):
    model = GPT2.from_pretrained(folder)
    first = generate(model, tokens(4, 3), 20, temperature=1.5, seed=0)
    check_tokens(generate(model, tokens(4, 3), 20, temperature=1.5, seed=0), first)


@pytest.mark.usefixtures("one_thread")
def test_tokens_keep_the_type_of_the_prompt(folder):
    model = GPT2.from_pretrained(folder)
    short = generate(model, tokens().int(), 9)
    assert short.dtype == torch.int32
    check_tokens(short.long(), generate(model, tokens(), 9))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("top_k", [96, 97, 98, 1000])
def test_top_k_may_be_more_than_the_vocabulary(top_k, folder):
    model = GPT2.from_pretrained(folder)
    options = {"temperature": 3.0, "seed": 3}
    drawn = generate(model, tokens(64, 3), 9, **options, top_k=top_k)
    assert torch.equal(drawn, generate(model, tokens(64, 3), 9, **options)) == (top_k >= 97)


def test_top_k_draws_among_no_more_where_logits_are_equal():
    logits = torch.zeros(1, 50).expand(2000, 50)
    assert len(choose(logits, 1.0, 3, torch.Generator().manual_seed(0)).unique()) == 3


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_draws_from_half_logits_are_computed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    # 300/0.004 is past float16's range.
    assert choose(torch.tensor([[300.0, 296.0]], dtype=dtype), 0.004, None, generator).tolist() == [0]
    # Divided by 0.7 and rounded to bfloat16 these would be 1 apart, and the first would be drawn in 73 of 100.
    logits = torch.tensor([[100.0, 99.5]], dtype=dtype).expand(40_000, 2)
    share = (choose(logits, 0.7, None, generator) == 0).float().mean().item()
    assert share == pytest.approx(1 / (1 + math.exp(-0.5 / 0.7)), abs=0.01)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_stops_when_all_rows_have_ended(use_cache, hf, folder):
    model = GPT2.from_pretrained(folder)
    ids = tokens(4, 7)
    free = generate(model, ids, 41)[:, 7:].tolist()
    # A token that each row comes to, after some steps of its own number; the last row comes to it well before the end.
    ends = {stop: [row.index(stop) for row in free] for stop in range(97) if all(stop in row for row in free)}
    stop, at = next((s, at) for s, at in ends.items() if len(set(at)) == 4 and min(at) > 1 and max(at) < 35)
    options = {"max_new_tokens": 41, "do_sample": False, "eos_token_id": stop, "pad_token_id": stop}
    theirs = hf.generate(ids, attention_mask=torch.ones_like(ids), **options)
    seen = []
    ours = generate(model, ids, 41, stop=stop, use_cache=use_cache, on_token=lambda token: seen.append(token.clone()))
    check_tokens(ours, theirs)
    assert ours.shape == (4, 7 + max(at) + 1)
    assert [row.index(stop) for row in ours[:, 7:].tolist()] == at
    assert all(token == stop for row, end in zip(ours[:, 7:].tolist(), at, strict=True) for token in row[end:])
    check_tokens(torch.stack(seen, 1), ours[:, 7:])


@pytest.mark.usefixtures("one_thread")
def test_a_row_that_never_ends_goes_on_beside_one_that_has(folder):
    model = GPT2.from_pretrained(folder)
    ids = tokens(2, 7)
    free = generate(model, ids, 41)
    first, second = free[:, 7:].tolist()
    stop = next(token for token in first[2:30] if token not in second)
    ours = generate(model, ids, 41, stop=stop)
    end = first.index(stop)
    check_tokens(ours[0], torch.tensor([*free[0, : 7 + end].tolist(), *[stop] * (41 - end)]))
    check_tokens(ours[1], free[1])


def test_generate_refuses(folder):
    model = GPT2.from_pretrained(folder)
    ids = tokens(1, 40)
    with testing.raises(ValueError, "generate: `ids` must be [batch, length]", "shape (40,)"):
        generate(model, ids[0], 1)
    with testing.raises(ValueError, "generate: `ids` must be [batch, length]", "shape (1, 0)"):
        generate(model, ids[:, :0], 1)
    with testing.raises(ValueError, "`max_new_tokens` must be from 0 to 8", "48 positions", "got 9"):
        generate(model, ids, 9)
    with testing.raises(ValueError, "generate: `temperature` must not be negative, got -1"):
        generate(model, ids, 1, temperature=-1)
    with testing.raises(ValueError, "generate: `top_k` must be at least 1, got 0"):
        generate(model, ids, 1, top_k=0)
    assert torch.equal(generate(model, ids, 0), ids)


def test_a_cache_needs_gradients_to_be_off(folder):
    model = GPT2.from_pretrained(folder)
    with testing.raises(RuntimeError, "kv_append: `k` and `v` must not require gradients"):
        model(tokens(), KVCache(model.config, 2))


def test_a_full_cache_is_an_error(folder):
    model = GPT2.from_pretrained(folder)
    cache = KVCache(model.config, 2, capacity=8)
    with torch.no_grad(), testing.raises(ValueError, "kv_append: `position` (7)", "past the caches' length 8"):
        model(tokens(2, 7), cache)
        model(tokens(2, 2), cache)


# ---- weights ----


def rewrite(folder, tmp_path, change):
    """A copy of `folder` whose tensors `change` has been given, as a dict."""
    copy = tmp_path / "changed"
    copy.mkdir()
    (copy / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


def test_a_missing_tensor_is_named(folder, tmp_path):
    copy = rewrite(folder, tmp_path, lambda t: t.pop("transformer.h.1.attn.c_proj.bias"))
    with testing.raises(ValueError, str(copy), "`h.1.attn.c_proj.bias` is missing"):
        GPT2.from_pretrained(copy)


def test_an_unexpected_tensor_is_named(folder, tmp_path):
    copy = rewrite(folder, tmp_path, lambda t: t.update({"transformer.h.2.ln_1.weight": torch.ones(96)}))
    with testing.raises(ValueError, "no place for the tensor `h.2.ln_1.weight`"):
        GPT2.from_pretrained(copy)


def test_a_tensor_of_another_shape_is_named(folder, tmp_path):
    """As PyTorch's own linear layer would store it: [out, in]."""
    name = "transformer.h.0.attn.c_attn.weight"
    copy = rewrite(folder, tmp_path, lambda t: t.update({name: t[name].T.contiguous()}))
    with testing.raises(ValueError, "`h.0.attn.c_attn.weight` must have shape (96, 288), got (288, 96)"):
        GPT2.from_pretrained(copy)


def test_a_head_that_is_not_tied_is_refused(folder, tmp_path):
    def tied(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()

    def free(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1

    GPT2.from_pretrained(rewrite(folder, tmp_path, tied))
    (tmp_path / "free").mkdir()
    with testing.raises(ValueError, "`lm_head.weight` must equal `wte.weight`"):
        GPT2.from_pretrained(rewrite(folder, tmp_path / "free", free))


def test_names_without_prefix_and_old_mask_buffers_are_read(hf, folder, tmp_path):
    """As the hub's oldest files are."""

    def older(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    check_logits(GPT2.from_pretrained(rewrite(folder, tmp_path, older)), hf, tokens())


def test_weights_in_several_files_are_read(hf, tmp_path):
    hf.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check_logits(GPT2.from_pretrained(tmp_path), hf, tokens())
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with testing.raises(FileNotFoundError, "model-00001-of-", "is missing"):
        GPT2.from_pretrained(tmp_path)


def with_config(folder, tmp_path, **entries):
    copy = rewrite(folder, tmp_path, lambda tensors: None)
    (copy / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | entries))
    return copy


@pytest.mark.parametrize(
    ("entry", "fragments"),
    [
        ({"model_type": "llama"}, ["`model_type` must be 'gpt2', got 'llama'"]),
        ({"add_cross_attention": True}, ["`add_cross_attention` must be False"]),
        ({"tie_word_embeddings": False}, ["`tie_word_embeddings` must be True"]),
        ({"activation_function": "relu"}, ["`activation_function` must be one of gelu_new", "got 'relu'"]),
        ({"n_head": 5}, ["`n_embd` must be a multiple of `n_head`, got 96 and 5"]),
        ({"n_layer": 0}, ["`n_layer` must be at least 1, got 0"]),
        ({"n_positions": 50}, ["`wpe.weight` must have shape (50, 96), got (48, 96)"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_is_not_ours_is_refused(entry, fragments, folder, tmp_path):
    with testing.raises(ValueError, *fragments):
        GPT2.from_pretrained(with_config(folder, tmp_path, **entry))


def test_an_unknown_op_in_rungs_is_refused(folder):
    with testing.raises(ValueError, "`rungs` may name", "attention_block", "got atention"):
        GPT2.from_pretrained(folder, rungs={"atention": "v1_naive"})


def test_a_name_that_nobody_knows_is_an_error_that_says_what_it_may_be(monkeypatch, tmp_path):
    def no_network(name, **kwargs):
        raise ConnectionError(f"no network for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_network)
    fragments = ["`name` must be a folder", "a name on the Hugging Face hub and a network", "openai-community/gpt2"]
    with testing.raises(FileNotFoundError, *fragments):
        GPT2.from_pretrained("gpt2")
    with testing.raises(FileNotFoundError, "no network for owner/model"):
        GPT2.from_pretrained("owner/model")
    with testing.raises(FileNotFoundError, "config.json is missing"):
        GPT2.from_pretrained(tmp_path)


def test_a_name_on_the_hub_is_fetched(monkeypatch, hf, tmp_path, bpe):
    """What we need of a model in several files, and a tokenizer; and no other framework's weights."""
    hub, here = tmp_path / "hub", tmp_path / "here"
    hf.save_pretrained(hub, max_shard_size="100KB")
    (hub / "tokenizer.json").write_bytes(bpe.read_bytes())
    (hub / "pytorch_model.bin").write_bytes(b"")

    def download(name, allow_patterns):
        here.mkdir()
        for path in hub.iterdir() if name == "owner/model" else ():
            if any(path.match(pattern) for pattern in allow_patterns):
                (here / path.name).write_bytes(path.read_bytes())
        return str(here)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    check_logits(GPT2.from_pretrained("owner/model"), hf, tokens())
    assert isinstance(read_tokenizer(here), FileTokenizer)
    assert not (here / "pytorch_model.bin").exists()


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_transformers_reads_what_we_save(dtype, folder, tmp_path):
    model = GPT2.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=dtype)
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it older versions of transformers refuse the file
    ours = GPT2.from_pretrained(tmp_path / "saved")
    assert ours.wte.weight.dtype == dtype
    check_logits(ours, theirs, tokens())
    for name, parameter in theirs.transformer.named_parameters():
        assert torch.equal(parameter, dict(ours.named_parameters())[name])


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.mark.parametrize("new", [False, True], ids=["over an older model", "in a new folder"])
@pytest.mark.parametrize(
    ("failing", "named"),
    [
        ("write config.json", "config.json"),
        ("write model.safetensors", "model.safetensors"),
        ("rename config.json", "config.json"),
        ("rename model.safetensors", "model.safetensors"),
    ],
)
def test_a_save_that_fails_names_the_file_and_leaves_the_old_model_whole(failing, named, new, tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    old, model = (GPT2(dataclasses.replace(train.SMALL, n_embd=n)) for n in (32, 64))
    if not new:
        old.save_pretrained(saved)
        (saved / "notes.txt").write_text("beside it")
    before = files_of(saved)
    replace, write_text = pathlib.Path.replace, pathlib.Path.write_text

    def full(path):
        pathlib.Path(path).write_bytes(b"half a file")
        raise OSError("no space left on device")

    def failing_write(path, text):
        return full(path) if path.name.startswith("config.json") else write_text(path, text)

    def failing_replace(path, target):
        if path.name == failing.removeprefix("rename ") + ".tmp":
            raise PermissionError("it is in use")
        return replace(path, target)

    with monkeypatch.context() as patch:
        if failing == "write config.json":
            patch.setattr(pathlib.Path, "write_text", failing_write)
        elif failing == "write model.safetensors":
            patch.setattr("safetensors.torch.save_file", lambda tensors, path, **kwargs: full(path))
        else:
            patch.setattr(pathlib.Path, "replace", failing_replace)
        with testing.raises(OSError, f"save_pretrained: {saved / named} could not be written: "):
            model.save_pretrained(saved)
    assert files_of(saved) == before

    model.save_pretrained(saved)
    assert torch.equal(GPT2.from_pretrained(saved).wpe.weight, model.wpe.weight)
    assert set(files_of(saved)) == {"config.json", "model.safetensors", *before}


def test_safetensors_own_errors_name_the_file_too(tmp_path, monkeypatch):
    def failing(*arguments, **options):
        raise SafetensorError("I/O error: no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    path = tmp_path / "model.safetensors"
    with testing.raises(OSError, f"save_pretrained: {path} could not be written: I/O error: no space left on device"):
        GPT2(train.SMALL).save_pretrained(tmp_path)
    assert files_of(tmp_path) == {}


def test_a_model_saved_over_one_in_several_files_is_the_one_that_is_read(hf, tmp_path):
    hf.save_pretrained(tmp_path, max_shard_size="100KB")
    model = GPT2.from_pretrained(tmp_path)
    model.wpe.weight.data.zero_()
    model.save_pretrained(tmp_path)
    assert not GPT2.from_pretrained(tmp_path).wpe.weight.any()


def test_a_saved_model_keeps_every_entry_of_its_config(tmp_path):
    config = gpt2_model.Config(
        vocab_size=11, n_positions=12, n_embd=8, n_layer=3, n_head=4, n_inner=20, layer_norm_epsilon=0.03,
        initializer_range=0.04, activation_function="gelu", scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True, fused=False, rungs={"attention": "v1_naive"},
    )  # fmt: skip
    default = gpt2_model.Config()
    assert all(getattr(config, f.name) != getattr(default, f.name) for f in dataclasses.fields(config))
    model = GPT2(config)
    model.save_pretrained(tmp_path, tokenizer="bytes")
    again = GPT2.from_pretrained(tmp_path, fused=False, rungs=config.rungs)
    assert again.config == config
    assert json.loads((tmp_path / "config.json").read_text())["tokenizer"] == "bytes"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name])


def test_a_new_model_starts_as_gpt2_does():
    """Projections into the residual stream, of which there are two a layer, are smaller by the root of their number."""
    torch.manual_seed(0)
    model = GPT2(gpt2_model.Config(vocab_size=300, n_positions=200, n_embd=128, n_layer=8, n_head=2))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif ".ln_" in f".{name}":
            assert parameter.eq(1).all(), name
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * std, name
    wider = GPT2(dataclasses.replace(model.config, initializer_range=0.3))
    assert wider.wte.weight.std().item() == pytest.approx(0.3, rel=0.05)


def test_the_four_sizes_have_gpt2s_parameters():
    counts = []
    for config in gpt2_model.SIZES.values():
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in GPT2(config).parameters()))
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
    assert [config.n_embd / config.n_head for config in gpt2_model.SIZES.values()] == [64] * 4


# ---- under transformers' own model ----


@pytest.mark.usefixtures("one_thread")
@on_each_device
def test_the_patched_model_equals_the_unpatched(device, hf):
    hf = copy_of(hf, device=device)
    ids = tokens(device=device)
    mask = torch.ones_like(ids)
    backend = "gpu" if device == "cuda" else "cpu"
    with torch.no_grad():
        expected = hf(ids).logits
        generated = hf.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        implementation = hf.config._attn_implementation
        before = step2_attention.launch_counts()[backend]
        with hf_patch.patched(hf):
            logits = hf(ids).logits
            assert step2_attention.launch_counts()[backend] - before == 2  # one a layer
            with_mask = hf(ids, attention_mask=mask).logits
            patched = hf.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
            after = step2_attention.launch_counts()[backend]
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(with_mask, logits)
        check_tokens(patched, generated)
        assert after - before == 2 * (2 + 20)
        assert hf.config._attn_implementation == implementation
        assert torch.equal(hf(ids).logits, expected)
        assert step2_attention.launch_counts()[backend] == after


@pytest.mark.usefixtures("one_thread")
@on_each_device
@pytest.mark.parametrize("chunks", [(23,), (1,) * 23, (9, 1, 13)], ids=str)
def test_the_patched_model_reads_a_prompt_in_chunks(chunks, device, hf):
    """Prefill, chunked prefill and decode: the queries are the last of the keys in each."""
    hf = copy_of(hf, device=device)
    ids = tokens(device=device)
    with torch.no_grad():
        expected = hf(ids).logits
        with hf_patch.patched(hf):
            cache = DynamicCache(config=hf.config)
            parts = [hf(part, past_key_values=cache, use_cache=True).logits for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@on_each_device
def test_the_patched_model_in_half_precision(device, dtype, hf):
    ids = tokens(device=device)
    half, exact = copy_of(hf, dtype, device), copy_of(hf, torch.float64, device)
    with torch.no_grad():
        reference, theirs = exact(ids).logits, half(ids).logits
        with hf_patch.patched(half):
            ours = half(ids).logits
    assert (ours.double() - reference).abs().max() <= 3 * (theirs.double() - reference).abs().max()


def test_the_patched_model_trains(hf):
    ids = tokens()
    gradients = []
    for context in (contextlib.nullcontext, hf_patch.patched):
        model = copy_of(hf).train()
        with context(model):
            model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_scale_of_a_layer_is_taken():
    hf = make_hf(64, 2, scale_attn_by_inverse_layer_idx=True)
    with torch.no_grad():
        expected = hf(tokens()).logits
        with hf_patch.patched(hf):
            torch.testing.assert_close(hf(tokens()).logits, expected, rtol=1e-5, atol=1e-5)


def test_the_patched_model_refuses_what_the_op_cannot_do(hf):
    hf = copy_of(hf)
    ids = tokens(2, 8)
    ones = torch.ones_like(ids)
    left_padded = ones.clone()
    left_padded[0, :3] = 0
    right_padded = left_padded.flip(1)
    with hf_patch.patched(hf):
        for mask in (left_padded, right_padded):
            with testing.raises(ValueError, "kernel_fusion: `attention_mask` must be all ones", "padding"):
                hf(ids, attention_mask=mask)
            with testing.raises(ValueError, "kernel_fusion: `attention_mask` must be all ones", "padding"):
                hf.generate(ids, attention_mask=mask, max_new_tokens=2, pad_token_id=0)
        with testing.raises(ValueError, "`attention_mask` must be None or all ones", "(2, 1, 8, 8)"):
            hf(ids, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))
        with testing.raises(ValueError, "kernel_fusion: packed sequences", "position_ids"):
            hf(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), use_cache=False)
        with testing.raises(ValueError, "kernel_fusion: the queries must be the last of the keys", "static cache"):
            hf.generate(
                ids, attention_mask=ones, max_new_tokens=2, pad_token_id=0, cache_implementation="static",
                disable_compile=True,
            )  # fmt: skip
        with testing.raises(ValueError, "output_attentions"):
            hf.config.output_attentions = True


def test_patched_training_drops_weights_of_attention_and_evaluation_none():
    ids = torch.randint(97, (2, 24))
    model = make_hf(64, 2, attn_pdrop=0.4)
    expected = model(ids).logits

    def gradients(seed):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach(), model.transformer.h[0].attn.c_attn.weight.grad.clone()

    with hf_patch.patched(model):
        torch.testing.assert_close(model(ids).logits, expected)
        model.train()
        first, again, other = gradients(1), gradients(1), gradients(2)
        assert all(map(torch.equal, first, again))
        assert not any(map(torch.equal, first, other))


MASKS = {
    "of booleans": lambda ids: torch.ones_like(ids, dtype=torch.bool),
    "of floats": lambda ids: torch.full(ids.shape, 0.5),  # what is not 0 is seen, as transformers reads it
    "in one row": lambda ids: torch.ones(1, ids.numel()),
    "of three dimensions": lambda ids: torch.ones(len(ids), 1, ids.shape[1]),
    "longer than the keys": lambda ids: torch.cat([torch.ones(ids.shape), torch.zeros(len(ids), 3)], 1),
}


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_hides_no_key_is_taken(mask, hf):
    hf = copy_of(hf, torch.float64)
    ids = tokens()
    with torch.no_grad():
        expected = hf(ids, attention_mask=MASKS[mask](ids)).logits
        with hf_patch.patched(hf):
            got = hf(ids, attention_mask=MASKS[mask](ids)).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


HIDING = {
    "shorter than the keys": (lambda ids: torch.ones(2, 5), "`attention_mask` must be as long as the keys, 8, got 5"),
    "empty": (lambda ids: torch.ones(2, 0), "`attention_mask` must be as long as the keys, 8, got 0"),
    "of one row for two": (lambda ids: torch.ones(1, 8), "`attention_mask` must be as long as the keys, 8, got 4"),
    "with a hole": (
        lambda ids: torch.ones(2, 8).index_fill(1, torch.tensor(3), 0),
        "`attention_mask` must be all ones",
    ),
    "to be added": (lambda ids: torch.zeros(2, 8), "`attention_mask` must be all ones"),
    "to be added, of four dimensions": (lambda ids: torch.zeros(2, 1, 8, 8), "got a mask of shape (2, 1, 8, 8)"),
}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mask", HIDING)
def test_a_mask_that_hides_a_key_is_refused(mask, use_cache, hf):
    """Without a cache older versions of transformers refuse one that is too short by themselves."""
    hf = copy_of(hf)
    ids = tokens(2, 8)
    make, fragment = HIDING[mask]
    with hf_patch.patched(hf), testing.raises(ValueError, "kernel_fusion: ", fragment):
        hf(ids, attention_mask=make(ids), use_cache=use_cache)


def test_a_mask_must_reach_over_the_cache_too(hf):
    """Of the new tokens alone, as some give it: the tokens before them would be hidden, and the new ones seen."""
    hf = copy_of(hf)
    ids = tokens(2, 8)
    with torch.no_grad(), hf_patch.patched(hf):
        cache = hf(ids[:, :5]).past_key_values
        with testing.raises(ValueError, "`attention_mask` must be as long as the keys, 8, got 3"):
            hf(ids[:, 5:], past_key_values=cache, attention_mask=torch.ones(2, 3))


def test_a_prompt_that_holds_the_padding_token_needs_a_mask(hf):
    hf = copy_of(hf)
    ids = tokens(2, 8)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": ids[0, 3].item()}
    mask = torch.ones_like(ids)
    expected = hf.generate(ids, attention_mask=mask, **options)
    with hf_patch.patched(hf):
        with testing.raises(ValueError, "`attention_mask` must be all ones", "`generate` made one", "`pad_token_id`"):
            hf.generate(ids, **options)
        check_tokens(hf.generate(ids, attention_mask=mask, **options), expected)


def test_older_versions_of_transformers_give_the_queries_positions():
    mask = functools.partial(hf_patch.causal_only, kv_length=8)
    for first in (0, 5, 7):  # a prompt, a part of one, a new token
        assert mask(cache_position=torch.arange(first, 8)) is hf_patch.CAUSAL
    with testing.raises(ValueError, "the queries must be the last of the keys, got queries 3 to 6 among 8 keys"):
        mask(cache_position=torch.arange(3, 7))


def test_a_call_may_ask_for_no_weights_where_the_config_asks_for_them(hf):
    hf = copy_of(hf)
    expected = hf(tokens()).logits
    with hf_patch.patched(hf):
        hf.config._output_attentions = True
        torch.testing.assert_close(hf(tokens(), output_attentions=False).logits, expected, rtol=1e-5, atol=1e-5)


def of_every_layer(name, value):
    return lambda model: [setattr(block.attn, name, value) for block in model.transformer.h]


@pytest.mark.parametrize(
    ("change", "call", "argument"),
    [
        (of_every_layer("is_causal", False), {}, "is_causal"),
        (lambda model: setattr(model.transformer.h[1].attn, "is_causal", False), {}, "is_causal"),
        (lambda model: setattr(model.config, "is_causal", False), {}, "is_causal"),
        (lambda model: None, {"output_attentions": True}, "output_attentions"),
        (lambda model: setattr(model.config, "_output_attentions", True), {}, "output_attentions"),
    ],
    ids=["of the layers", "of a layer", "of the config", "output_attentions", "output_attentions of the config"],
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_what_changes_the_meaning_of_attention_is_refused_by_name(implementation, change, call, argument):
    model = make_hf(64, 2, attn_implementation=implementation)
    with hf_patch.patched(model):
        model(tokens())
        change(model)
        with testing.raises(ValueError, f"kernel_fusion: `{argument}` must be "):
            model(tokens(), **call)


@pytest.mark.parametrize(
    "name", ["is_causal", "head_mask", "position_bias", "softcap", "s_aux", "sliding_window", "cache"]
)
def test_what_a_call_hands_on_to_attention_is_refused_by_name(name):
    """To the function, since not every version of transformers hands everything on."""
    q = torch.randn(1, 2, 3, 8)
    layer = make_hf(64, 2).transformer.h[0].attn
    with testing.raises(ValueError, f"kernel_fusion: `{name}` must be "):
        hf_patch.attention_forward(layer, q, q, q, hf_patch.CAUSAL, **{name: False if name == "is_causal" else 4})


@pytest.mark.parametrize(
    "option",
    [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"sliding_window": 4},
     {"attn_implementation": "eager"}, {"attn_implementation": "eager", "reorder_and_upcast_attn": True}],
    ids=lambda option: list(option)[-1],
)  # fmt: skip
def test_options_of_the_config_count_under_the_patch(option):
    model = make_hf(64, 2, **option)
    ids = tokens()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected, generated = model(ids).logits, model.generate(ids, **options)
        with hf_patch.patched(model):
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
            check_tokens(model.generate(ids, **options), generated)


def test_positions_that_start_again_are_only_positions_where_there_is_a_cache(hf):
    """As without the patch: transformers takes them for packed sequences where there is no cache."""
    hf = copy_of(hf, torch.float64)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        expected = hf(tokens(2, 8), position_ids=positions).logits
        with hf_patch.patched(hf):
            got = hf(tokens(2, 8), position_ids=positions).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


# ---- the patch, and gradient checkpointing ----


def checkpointed_gradients(model, reentrant, *, forward, backward):
    """Gradients with dropout where the forward and the backward pass are under the patch, or are not."""
    model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = tokens()

    def step(under, function):
        with hf_patch.patched(model) if under and not together else contextlib.nullcontext():
            return function()

    together = forward and backward
    with hf_patch.patched(model) if together else contextlib.nullcontext():
        torch.manual_seed(1)
        loss = step(forward, lambda: model(ids, labels=ids).loss)
        step(backward, loss.backward)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing_inside_the_patch_gives_the_gradients_of_no_checkpointing(reentrant):
    ids = tokens()
    model = make_hf(64, 2, attn_pdrop=0.3).train()
    with hf_patch.patched(model):
        torch.manual_seed(1)
        model(ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    # Checkpointing may be on before the model is patched, as here, or after.
    for got, want in zip(checkpointed_gradients(model, reentrant, forward=True, backward=True), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_that_is_computed_again_on_the_other_side_of_the_patch_is_an_error(implementation, reentrant):
    """It would draw another mask of dropout, and the gradient would be of neither."""
    model = make_hf(64, 2, attn_pdrop=0.3, attn_implementation=implementation)
    with testing.raises(RuntimeError, "kernel_fusion: ", "ran under the patch", "call backward inside `with patched("):
        checkpointed_gradients(model, reentrant, forward=True, backward=False)
    with testing.raises(
        RuntimeError, "kernel_fusion: ", "ran without the patch", "call the model inside `with patched("
    ):
        checkpointed_gradients(model, reentrant, forward=False, backward=True)
    checkpointed_gradients(model, reentrant, forward=False, backward=False)


# ---- the patch, and whose it is ----


def test_a_model_of_the_same_config_is_not_patched(hf):
    a = copy_of(hf)
    b = GPT2LMHeadModel(a.config)
    implementation = b.config._attn_implementation
    with hf_patch.patched(a):
        assert b.config._attn_implementation == implementation
        with hf_patch.patched(b):
            pass
        with testing.raises(ValueError, "remove: `model` is not patched"):
            hf_patch.remove(b)
        before = step2_attention.launch_counts()["cpu"]
        b(tokens())
        assert step2_attention.launch_counts()["cpu"] == before
        a(tokens())
        assert step2_attention.launch_counts()["cpu"] == before + 2
        a.config.use_cache = False
    assert a.config._attn_implementation == implementation
    assert (a.config.use_cache, b.config.use_cache) == (False, True)


def test_a_model_inside_a_model_is_patched_once(hf):
    model = copy_of(hf)
    with hf_patch.patched(model.transformer):
        with testing.raises(ValueError, "apply: `model` is patched already"):
            hf_patch.apply(model)
        before = step2_attention.launch_counts()["cpu"]
        model(tokens())
        assert step2_attention.launch_counts()["cpu"] == before + 2
    with hf_patch.patched(model), testing.raises(ValueError, "apply: `model` is patched already"):
        hf_patch.apply(model.transformer)


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [deepcopy, pickled])
def test_a_copy_of_a_patched_model_is_patched_and_comes_out_by_itself(duplicate, hf):
    model = copy_of(hf)
    expected = model(tokens()).logits
    with hf_patch.patched(model):
        other = duplicate(model)
    before = step2_attention.launch_counts()["cpu"]
    assert torch.equal(model(tokens()).logits, expected)
    assert step2_attention.launch_counts()["cpu"] == before
    torch.testing.assert_close(other(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
    assert step2_attention.launch_counts()["cpu"] == before + 2
    hf_patch.remove(other)
    assert torch.equal(other(tokens()).logits, expected)
    other(tokens(), output_attentions=True)


def test_a_patched_model_is_saved_as_any_other(hf, tmp_path):
    model = copy_of(hf)
    with hf_patch.patched(model):
        model.save_pretrained(tmp_path / "patched")
    model.save_pretrained(tmp_path / "not patched")
    assert files_of(tmp_path / "patched") == files_of(tmp_path / "not patched")
    assert not hasattr(GPT2LMHeadModel.from_pretrained(tmp_path / "patched"), hf_patch._BEFORE)


def test_the_patched_model_compiles(hf):
    model = copy_of(hf)
    with torch.no_grad(), hf_patch.patched(model):
        expected = model(tokens()).logits
        torch.compiler.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager")(tokens()).logits, expected)


def test_patching_is_undone_after_an_error_and_refused_twice(hf):
    hf = copy_of(hf)
    implementation = hf.config._attn_implementation
    with contextlib.suppress(ZeroDivisionError), hf_patch.patched(hf):
        1 / 0  # noqa: B018
    assert hf.config._attn_implementation == implementation
    with testing.raises(ValueError, "remove: `model` is not patched"):
        hf_patch.remove(hf)
    hf_patch.apply(hf)
    with testing.raises(ValueError, "apply: `model` is patched already"):
        hf_patch.apply(hf)
    hf_patch.remove(hf)
    with testing.raises(TypeError, "apply: `model` must be a GPT-2 of transformers, got Linear"):
        hf_patch.apply(torch.nn.Linear(1, 1))
    with testing.raises(ValueError, "must not have cross-attention"):
        hf_patch.apply(GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, add_cross_attention=True)))


# ---- the command, and tokenizers ----


def test_bytes_become_characters_when_they_are_complete():
    show = ByteTokenizer().stream()
    encoded = ByteTokenizer().encode("aé→")
    assert [show(byte) for byte in encoded] == ["a", "", "é", "", "", "→"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A tokenizer.json as the hub's GPT-2 has it, of few words: pairs of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the kernel, the kernel"], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_of_the_hub_reads_and_writes_text(bpe):
    ids = FileTokenizer(bpe).encode("the é→")
    assert len(ids) < len("the é→".encode())  # "the" is fewer tokens than letters
    show = FileTokenizer(bpe).stream()
    pieces = [show(token) for token in ids]
    assert "".join(pieces) == "the é→"
    assert "" in pieces  # a token that ends within a character shows nothing yet


def test_the_tokenizer_is_the_models(bpe, folder, tmp_path):
    copy = with_config(folder, tmp_path)
    with testing.raises(FileNotFoundError, "tokenizer.json is missing"):
        read_tokenizer(copy)
    (copy / "tokenizer.json").write_bytes(bpe.read_bytes())
    assert isinstance(read_tokenizer(copy), FileTokenizer)
    (tmp_path / "of bytes").mkdir()
    assert isinstance(read_tokenizer(with_config(folder, tmp_path / "of bytes", tokenizer="bytes")), ByteTokenizer)


def test_the_commands_options_reach_the_model(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "with room for 100 tokens"
    GPT2(dataclasses.replace(train.SMALL, n_positions=128)).save_pretrained(copy, tokenizer="bytes")
    calls = []

    def spy(model, ids, tokens, *, on_token, **options):
        calls.append((model, ids, tokens, options))
        on_token(torch.tensor([33]))

    monkeypatch.setattr("generate.generate", spy)
    required = ["--model", str(copy), "--prompt", "#$", "--device", "cpu"]
    generate_main(required)
    generate_main(
        [*required, "--tokens", "5", "--temperature", "0.5", "--top-k", "7", "--seed", "3", "--separate", "--dtype",
         "bfloat16"]
    )  # fmt: skip
    assert capsys.readouterr().out == "#$!\n#$!\n"
    (model, ids, tokens, options), (other, other_ids, other_tokens, other_options) = calls
    assert ids.tolist() == other_ids.tolist() == [[35, 36]]
    assert (tokens, other_tokens) == (100, 5)
    assert options == {"temperature": 0.0, "top_k": None, "seed": None}
    assert other_options == {"temperature": 0.5, "top_k": 7, "seed": 3}
    assert (model.config.fused, other.config.fused) == (True, False)
    assert (model.wte.weight.dtype, other.wte.weight.dtype) == (torch.float32, torch.bfloat16)


def test_the_command_ends_with_a_message_and_a_code(tmp_path):
    with testing.raises(SystemExit, "generate.py:", "config.json is missing"):
        generate_main(["--model", str(tmp_path), "--prompt", "x"])


# ---- the tour's demonstrations ----


@pytest.mark.usefixtures("one_thread")
def test_the_tours_step_says_that_both_models_agree(capsys):
    demonstrations.patched_gpt2(Console(width=120))
    printed = capsys.readouterr().out
    assert "32 greedy tokens after a prompt of 64: the same" in printed
    assert "patched 132, before 0, after 0" in printed


def attention_with(monkeypatch, change):
    """From here on the patched model's attention gives what `change` makes of its result."""
    right = step2_attention.attention
    monkeypatch.setattr(step2_attention, "attention", lambda *a, **kw: change(right(*a, **kw)))


@pytest.mark.usefixtures("one_thread")
def test_the_tours_step_fails_where_a_logit_is_off(monkeypatch):
    attention_with(monkeypatch, lambda out: out * 1.01)
    with testing.raises(RuntimeError, "the patched model differs from the unpatched one: a logit is", "off"):
        demonstrations.patched_gpt2(Console(quiet=True))


@pytest.mark.usefixtures("one_thread")
def test_the_tours_step_fails_where_a_token_is_another(monkeypatch):
    """Only one query at a time is wrong, so the logits of the prompt are right."""
    attention_with(monkeypatch, lambda out: out * (1 if out.shape[2] > 1 else 2))
    with testing.raises(RuntimeError, "the patched model differs from the unpatched one: token", "tokens differ"):
        demonstrations.patched_gpt2(Console(quiet=True))


@pytest.mark.usefixtures("one_thread")
def test_the_tours_step_fails_where_our_attention_did_not_run(monkeypatch):
    monkeypatch.setattr(hf_patch, "patched", contextlib.nullcontext)
    with testing.raises(RuntimeError, "launches must be 132 in the patched model and 0 in the unpatched one"):
        demonstrations.patched_gpt2(Console(quiet=True))


@pytest.mark.usefixtures("one_thread")
def test_the_tours_step_fails_where_the_patch_stays(monkeypatch):
    monkeypatch.setattr(hf_patch, "remove", lambda model: None)
    with testing.raises(RuntimeError, "launches must be 132 in the patched model and 0 in the unpatched one"):
        demonstrations.patched_gpt2(Console(quiet=True))


if __name__ == "__main__":
    testing.main(__file__)
