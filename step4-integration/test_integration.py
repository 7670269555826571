"""Step 4: its ops against float64 and PyTorch, and GPT-2 on all the project's ops against Hugging Face's.

python test_integration.py            pytest's options may follow, such as -k embedding
"""

import contextlib
import math

import demonstrations
import gpt2_model
import hf_patch
import pytest
import torch
import torch.nn.functional as F
from generate import choose, generate, where_different
from gpt2_model import GPT2, KVCache
from rich.console import Console
from transformers.activations import ACT2FN

import step1_simple  # not installed? pip install -e ..
import step2_attention
import step3_fused
import step4_integration
from kernel_fusion import testing
from step4_integration.gpt2_testing import (
    HALF_TYPES,
    check_logits,
    check_tokens,
    copy_of,
    fused_or_separate,
    make_hf,
    ours_of,
    tokens,
)
from step4_integration.testing import on_each_device

# ---- GPT-2 against Hugging Face ----


SIZES = {"2 heads of 32": (64, 2), "3 heads of 32": (96, 3), "5 heads of 32": (160, 5), "4 heads of 25": (100, 4)}


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
