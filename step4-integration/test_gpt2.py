"""Step 4: its ops against float64 and PyTorch, and GPT-2 on all the project's ops against Hugging Face's.

python test_gpt2.py            pytest's options may follow, such as -k embedding
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gpt2_model
import hf_patch
import pytest
import torch
import torch.nn.functional as F
import train
from generate import ByteTokenizer, generate
from generate import main as generate_main
from gpt2_model import GPT2, KVCache
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import step1_simple
import step2_attention
import step3_fused
import step4_integration
from kernel_fusion import testing

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
    ],
)
def test_embedding_adds_the_token_and_its_position(batch, length, width, dtype, device, rung):
    check_embedding(tables(batch, length, width, dtype, device), rung, position=2)


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
        ids[1, 3] = bad
        with testing.raises(ValueError, "embedding: `ids` must be from 0 to 18", f"got {bad} at (1, 3)"):
            step4_integration.embedding(ids.to(id_type), token_weight, position_weight, rung=rung)


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
    assert torch.autograd.gradcheck(function, (weights[0].detach(), weights[1]))
    assert torch.autograd.gradcheck(function, (weights[0], weights[1].detach()))


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


# ---- kv_append ----


def heads_of(packed):
    """q, k and v as GPT-2 has them: views into rows of 3·H·D."""
    return packed.permute(2, 0, 3, 1, 4)


def bits(t):
    return t.contiguous().view(torch.uint8)


def check_append(rung, dtype, device, *, batch=2, heads=3, length=5, dim=8, capacity=11, position=4, layout="packed"):
    """Appends once to caches cut from larger buffers; every byte that should not change is compared, NaN as NaN."""
    _, k, v = heads_of(testing.randn((batch, length, 3, heads, dim), dtype, device))
    if layout == "contiguous":
        k, v = k.contiguous(), v.contiguous()
    if layout == "last dimension apart":
        k, v = (torch.stack([t, t], -1).flatten(-2)[..., ::2] for t in (k, v))
    if layout == "unaligned":
        k, v = (F.pad(t.reshape(-1), (1, 0))[1:].view(t.shape) for t in (k, v))
    around = {"packed": 0, "contiguous": 0, "last dimension apart": 0, "unaligned": 1}[layout]
    size = batch * heads * capacity * dim
    buffers = [torch.full((100 + around + size + 100,), NAN, dtype=dtype, device=device) for _ in range(2)]
    caches = [b[100 + around : 100 + around + size].view(batch, heads, capacity, dim) for b in buffers]
    expected = [buffer.clone() for buffer in buffers]
    for buffer, t in zip(expected, (k, v), strict=True):
        cache = buffer[100 + around : 100 + around + size].view(batch, heads, capacity, dim)
        cache[:, :, position : position + length] = t
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
    with testing.raises(RuntimeError, "kv_append: `k` and `v` must not require gradients", "torch.no_grad()"):
        step4_integration.kv_append(cache, cache.clone(), k, k, 0)
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
    refused(TypeError, "embedding: `position_weight` must have the dtype", position_weight=position_weight.half())
    refused(ValueError, "embedding: `position_weight` must have shape (7, 8)", position_weight=position_weight[:, :7])
    refused(ValueError, "embedding: `position` must not be negative, got -1", position=-1)
    refused(ValueError, "embedding: `position` (3)", "the length of `ids` (5)", "past the 7 rows", position=3)
    if device != "meta":
        refused(ValueError, "embedding: `rung` must be 'auto' or one of", "'v2_vector'", "'v9'", rung="v9")
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
    refused(ValueError, "`position` (6)", "the length of `k` (4)", "past the caches' length 9", position=6)
    if device != "meta":
        refused(ValueError, "kv_append: `rung` must be 'auto' or one of", "'v9'", rung="v9")
        refused(ValueError, "kv_append: `v_cache` must not share memory with `k_cache`", v_cache=k_cache)
        refused(ValueError, "kv_append: `k_cache` must not share memory with `k`", k=k_cache, v=k_cache)
        refused(ValueError, "stride 1 along its last dimension", k_cache=k_cache.mT.contiguous().mT)
        refused(ValueError, "`v_cache` must not be an expanded tensor", v_cache=v_cache[:1].expand(2, -1, -1, -1))


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


def test_a_stage_that_is_not_built_says_how_to_build_it(tmp_path):
    """In a copy without its library."""
    for folder in ("common/kernel_fusion", "step4-integration/step4_integration"):
        (tmp_path / folder).mkdir(parents=True)
        for file in (stages.ROOT / folder).glob("*.py"):
            (tmp_path / folder / file.name).write_text(file.read_text())
    run = subprocess.run(
        [sys.executable, "-c", "import step4_integration"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}/common:{tmp_path}/step4-integration"},
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "cd step4-integration && python setup.py build_ext --inplace" in run.stderr


# ---- GPT-2 against Hugging Face ----


SIZES = {"2 heads of 32": (64, 2), "3 heads of 32": (96, 3), "5 heads of 32": (160, 5), "4 heads of 25": (100, 4)}


def make_hf(n_embd, n_head, **options):
    """A random GPT-2 of transformers. Biases and LayerNorms are random too: at 0 and 1 they would hide mistakes."""
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
                parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("bias") else 0.2))
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
    before = [stage.launch_counts() for stage in (step2_attention, step3_fused)]
    with torch.no_grad():
        a, b = fused(tokens(device=device)), separate(tokens(device=device))
    after = [stage.launch_counts() for stage in (step2_attention, step3_fused)]
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
    stages_used = (step1_simple, step2_attention, step3_fused, step4_integration)
    for rungs, is_fused in ((fused, True), (separate, False)):
        model = GPT2.from_pretrained(folder, fused=is_fused, rungs=rungs)
        plain = GPT2.from_pretrained(folder, fused=is_fused)
        with torch.no_grad():
            expected = plain(ids)
            before = [stage.launch_counts() for stage in stages_used]
            cache = KVCache(model.config, 1, 9)
            got = torch.cat([model(ids[:, :7], cache), model(ids[:, 7:], cache)], dim=1)
            after = [stage.launch_counts() for stage in stages_used]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for stage, old, new in zip(stages_used, before, after, strict=True):
            assert new["cpu"] == old["cpu"], stage
            assert new["emulated"] > old["emulated"] or (is_fused and stage is step2_attention)


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


@pytest.mark.usefixtures("one_thread")
@fused_or_separate
@on_each_device
def test_greedy_generation_equals_hugging_face(device, fused, hf, folder):
    ids = tokens(2, 7, device)
    theirs = copy_of(hf, device=device).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=41, do_sample=False, pad_token_id=0
    )
    model = GPT2.from_pretrained(folder, fused=fused, device=device)
    assert torch.equal(generate(model, ids, 41), theirs)
    assert torch.equal(generate(model, ids, 41, use_cache=False), theirs)
    assert len(set(theirs[0].tolist())) > 5  # a model that repeats one token would prove little


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


@on_each_device
def test_draws_with_a_seed_can_be_repeated(device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(4, 3, device)
    first = generate(model, ids, 20, temperature=1.5, seed=7)
    assert torch.equal(first, generate(model, ids, 20, temperature=1.5, seed=7))
    assert torch.equal(first, generate(model, ids, 20, temperature=1.5, seed=7, use_cache=False))
    assert not torch.equal(first, generate(model, ids, 20, temperature=1.5, seed=8))
    assert not torch.equal(generate(model, ids, 20, temperature=1.5), generate(model, ids, 20, temperature=1.5))


def test_draws_follow_the_models_probabilities(folder):
    model = GPT2.from_pretrained(folder)
    ids = tokens(1, 5).expand(4000, 5)
    with torch.no_grad():
        probability = torch.softmax(model(ids[:1])[0, -1] / 0.8, -1)
    share = torch.bincount(generate(model, ids, 1, temperature=0.8, seed=0)[:, -1], minlength=97) / 4000
    assert (share - probability).abs().max() < 0.04
    likeliest = set(probability.topk(3).indices.tolist())
    assert set(generate(model, ids, 1, temperature=0.8, top_k=3, seed=0)[:, -1].tolist()) == likeliest
    assert torch.equal(generate(model, ids[:2], 9, temperature=2.0, top_k=1), generate(model, ids[:2], 9))


def test_generation_stops_when_all_rows_have_ended(hf, folder):
    model = GPT2.from_pretrained(folder)
    ids = tokens(2, 7)
    free = generate(model, ids, 30)
    stop = free[0, 12].item()  # a token that the first row comes to
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": stop, "pad_token_id": stop}
    theirs = hf.generate(ids, attention_mask=torch.ones_like(ids), **options)
    seen = []
    ours = generate(model, ids, 30, stop=stop, on_token=lambda token: seen.append(token.clone()))
    assert torch.equal(ours, theirs)
    assert torch.equal(torch.stack(seen, 1), ours[:, 7:])


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


def test_a_name_on_the_hub_is_fetched(monkeypatch, hf, folder):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **kw: {"owner/model": str(folder)}[name])
    check_logits(GPT2.from_pretrained("owner/model"), hf, tokens())


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_transformers_reads_what_we_save(dtype, folder, tmp_path):
    model = GPT2.from_pretrained(folder, dtype=dtype)
    model.save_pretrained(tmp_path / "saved")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=dtype)
    ours = GPT2.from_pretrained(tmp_path / "saved")
    assert ours.wte.weight.dtype == dtype
    check_logits(ours, theirs, tokens())
    for name, parameter in theirs.transformer.named_parameters():
        assert torch.equal(parameter, dict(ours.named_parameters())[name])


def test_an_interrupted_save_leaves_the_old_model(folder, tmp_path, monkeypatch):
    model = GPT2.from_pretrained(folder)
    model.save_pretrained(tmp_path / "saved")

    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        patch.setattr("safetensors.torch.save_file", full_disk)
        model.save_pretrained(tmp_path / "saved")
    assert torch.equal(GPT2.from_pretrained(tmp_path / "saved").wpe.weight, model.wpe.weight)
    model.wpe.weight.data.zero_()
    model.save_pretrained(tmp_path / "saved")
    assert not GPT2.from_pretrained(tmp_path / "saved").wpe.weight.any()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_four_sizes_have_gpt2s_parameters():
    counts = []
    for config in gpt2_model.SIZES.values():
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in GPT2(config).parameters()))
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]


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
        assert torch.equal(patched, generated)
        assert after - before == 2 * (2 + 20)
        assert hf.config._attn_implementation == implementation
        assert torch.equal(hf(ids).logits, expected)
        assert step2_attention.launch_counts()[backend] == after


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
    dropping = make_hf(64, 2, attn_pdrop=0.1).train()
    with hf_patch.patched(dropping), testing.raises(ValueError, "kernel_fusion: `attn_pdrop` must be 0 in training"):
        dropping(ids)


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


# ---- the small model and its bar ----


def as_text(text: str) -> torch.Tensor:
    return train.as_bytes(text.encode())


def test_the_bigram_models_probabilities_sum_to_one():
    bigram = train.Bigram(as_text("abracadabra " * 50))
    assert bigram.weights.sum().item() == pytest.approx(1)
    for first in (ord("a"), ord("z")):  # a byte that was seen, and one that never was
        pairs = torch.tensor([[first, second] for second in range(256)], dtype=torch.uint8)
        total = sum((bigram._parts(pair) @ bigram.weights).item() for pair in pairs)
        assert total == pytest.approx(1)


def test_the_bigram_model_is_as_good_as_its_text_allows():
    generator = torch.Generator().manual_seed(0)
    # The next byte is the one before plus 0 or 1, each with probability 1/2: no model can do better than log 2.
    steps = torch.randint(2, (20_000,), generator=generator)
    chain = (steps.cumsum(0) % 7 + 65).to(torch.uint8)
    bigram = train.Bigram(chain[:15_000])
    assert bigram.loss(chain[15_000:]) == pytest.approx(math.log(2), abs=0.01)
    assert bigram.weights[0] > 0.98
    # Independent bytes: pairs say nothing, and the loss is the entropy.
    noise = torch.randint(65, 73, (20_000,), generator=generator).to(torch.uint8)
    assert train.Bigram(noise[:15_000]).loss(noise[15_000:]) == pytest.approx(math.log(8), abs=0.01)


def test_the_fitted_weights_beat_any_single_part():
    text = as_text(pathlib.Path(__file__).read_text())
    bigram = train.Bigram(text[:20_000])
    held_out = text[20_000:30_000]
    fitted = bigram.loss(held_out)
    for weights in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1 / 3, 1 / 3, 1 / 3]):
        bigram.weights = torch.tensor(weights, dtype=torch.float64)
        assert fitted < bigram.loss(held_out)


def test_the_split_is_the_same_each_time_and_holds_a_tenth_out():
    documents = [bytes([65 + number]) * (train.PIECE * 3 + 5) for number in range(10)]
    text, held_out = train.split(documents)
    again = train.split(documents)
    assert torch.equal(text, again[0])
    assert torch.equal(held_out, again[1])
    pieces = 40
    assert len(text) + len(held_out) == sum(map(len, documents))
    assert len(held_out) == pytest.approx(train.PIECE * pieces / 10, rel=0.6)
    with testing.raises(ValueError, "split: `documents` must hold at least 20 pieces"):
        train.split([b"short"])


def test_the_repositorys_documents_are_read():
    documents = train.read_documents()
    assert pathlib.Path(__file__).read_bytes() in documents
    assert sum(map(len, documents)) > 100_000
    assert train.read_documents() == documents


@fused_or_separate
def test_evaluate_is_the_mean_loss_of_every_byte(fused):
    torch.manual_seed(0)
    config = dataclasses.replace(train.SMALL, n_positions=16, n_layer=1, n_embd=32, n_head=2, fused=fused)
    model = GPT2(config)
    text = as_text("every byte but the first is predicted exactly once.")
    losses = []
    with torch.no_grad():
        for start in range(0, len(text) - 1, 16):
            window = text[start : start + 17].long()
            losses.append(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none"))
    assert train.evaluate(model, text, batch=2) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert len(torch.cat(losses)) == len(text) - 1


@pytest.mark.usefixtures("one_thread")
@fused_or_separate
@on_each_device
def test_a_few_steps_of_training_lower_the_loss(device, fused):
    torch.manual_seed(0)
    config = dataclasses.replace(train.SMALL, n_positions=32, n_layer=2, n_embd=64, n_head=2, fused=fused)
    model = GPT2(config).to(device)
    text = as_text("the kernel reads what the kernel before it wrote, " * 40)
    optimizer = train.optimizer_of(model, 3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(25):
        windows = train.random_windows(text, 4, 33, generator).to(device)
        losses.append(train.step(model, optimizer, windows, 3e-3).item())
    assert losses[0] > 5
    assert losses[-1] < 0.6 * losses[0]


def test_the_schedule_rises_and_falls():
    assert train.schedule(0.0) == 0
    assert train.schedule(0.05) == pytest.approx(1)
    assert train.schedule(1.0) == pytest.approx(0.1)
    assert train.schedule(7.0) == pytest.approx(0.1)
    falling = [train.schedule(0.05 + 0.05 * n) for n in range(20)]
    assert falling == sorted(falling, reverse=True)


def test_training_saves_a_model_that_both_can_read(tmp_path, capsys):
    documents = [b"To be read, to be learned, to be written again. " * 1000]
    config = dataclasses.replace(train.SMALL, n_positions=32, n_layer=1, n_embd=32, n_head=2)
    console = Console(width=120)
    result = train.train(console, seconds=1.5, config=config, out=tmp_path / "small", documents=documents, batch=2)
    assert result.steps > 0
    printed = capsys.readouterr().out
    assert "bigram" in printed
    assert "held out" in printed
    ids = train.as_bytes(b"to be read")[None].long()
    ours = GPT2.from_pretrained(result.folder)
    theirs = GPT2LMHeadModel.from_pretrained(result.folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(train.paragraph(result.folder, "To be", length=90).encode(errors="replace")) >= 80
    generate_main(["--model", str(result.folder), "--prompt", "To be", "--tokens", "12", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("To be")


def test_a_model_that_is_no_better_than_bigrams_is_a_failure(tmp_path):
    result = train.Result(loss=3.0, bigram_loss=2.5, steps=1, seconds=1.0, folder=tmp_path)
    with testing.raises(RuntimeError, "3.000 is not below the bigram model's 2.500", "--seconds"):
        train.report(Console(quiet=True), result)
    with testing.raises(RuntimeError, "not below"):
        train.report(Console(quiet=True), result._replace(loss=NAN))


def test_train_refuses_no_time():
    with testing.raises(ValueError, "train: `seconds` must be positive, got 0"):
        train.train(Console(quiet=True), seconds=0)


def test_commands_end_with_a_message_and_a_code(tmp_path):
    with testing.raises(SystemExit, "generate.py:", "config.json is missing"):
        generate_main(["--model", str(tmp_path), "--prompt", "x"])
    with testing.raises(SystemExit, "train.py: train: `seconds` must be positive"):
        train.main(["--seconds", "-1"])


def test_bytes_become_characters_when_they_are_complete():
    show = ByteTokenizer().stream()
    encoded = ByteTokenizer().encode("aé→")
    assert [show(byte) for byte in encoded] == ["a", "", "é", "", "", "→"]


if __name__ == "__main__":
    testing.main(__file__)
