"""Step 4: its ops against float64 and PyTorch, and GPT-2 on all the project's ops against Hugging Face's.

python test_integration.py            pytest's options may follow, such as -k embedding
"""

import contextlib

import demonstrations
import gpt2_model
import hf_patch
import pytest
import torch
import torch.nn.functional as F
from generate import generate, where_different
from gpt2_model import GPT2
from model.blocks import FORMS, v1_torch, v2_separate, v3_attention_block
from model.cache import KVCache
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
    each_form,
    make_hf,
    ours_of,
    tokens,
)
from step4_integration.testing import on_each_device

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- GPT-2 against Hugging Face ----

SIZES = {"2 heads of 32": (64, 2), "3 heads of 32": (96, 3), "5 heads of 32": (160, 5), "4 heads of 25": (100, 4)}


@each_form
@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_logits_equal_hugging_face(size, dtype, device, blocks, tmp_path):
    hf = make_hf(*SIZES[size])
    model = ours_of(hf, tmp_path, blocks=blocks, dtype=dtype, device=device)
    for ids in (tokens(2, 23, device), tokens(1, 1, device), tokens(1, 48, device)):
        check_logits(model, hf, ids)


@each_form
@pytest.mark.parametrize(
    "option",
    [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"activation_function": "gelu"},
     {"n_inner": 72}, {"layer_norm_epsilon": 0.1}],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_options_of_the_config_count(option, blocks, tmp_path):
    hf = make_hf(64, 2, **option)
    check_logits(ours_of(hf, tmp_path, blocks=blocks), hf, tokens())


def test_an_activation_is_what_transformers_calls_so():
    x = torch.linspace(-6, 6, 500, dtype=torch.float64)
    for name, approximate in gpt2_model.GELUS.items():
        torch.testing.assert_close(F.gelu(x, approximate=approximate), ACT2FN[name](x), rtol=0, atol=1e-9, msg=name)


def without_causality(monkeypatch, model):
    for form, name in [(v2_separate, "attention"), (v3_attention_block, "attention_block")]:
        right = getattr(form, name)
        monkeypatch.setattr(form, name, lambda *a, _right=right, **kw: _right(*a, **{**kw, "causal": False}))
    right = v1_torch.attention
    monkeypatch.setattr(v1_torch, "attention", lambda q, keys, scale: right(q, keys._replace(causal=False), scale))


def with_two_heads_swapped(monkeypatch, model):
    attention = model.h[1].attn
    size = model.config.n_embd // model.config.n_head
    for parameter in (attention.c_attn.weight, attention.c_attn.bias):
        heads = parameter.data.unflatten(-1, (3, -1, size))
        heads[..., [0, 1], :] = heads[..., [1, 0], :].clone()


def without_the_projections_bias(monkeypatch, model):
    model.h[0].attn.c_proj.bias.data.zero_()


@each_form
@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("mistake", [without_causality, with_two_heads_swapped, without_the_projections_bias])
def test_the_comparison_finds_a_model(mistake, dtype, device, blocks, hf, folder, monkeypatch):
    model = GPT2.from_pretrained(folder, blocks=blocks, dtype=dtype, device=device)
    check_logits(model, hf, tokens(device=device))
    mistake(monkeypatch, model)
    with testing.raises(AssertionError, "logits are", "allowed are"):
        check_logits(model, hf, tokens(device=device))


@each_form
@on_each_device
def test_gradients_equal_hugging_face(device, blocks, hf, folder):
    ids = tokens(device=device)

    def gradients(model, logits_of):
        loss = F.cross_entropy(logits_of(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss, list(parameters.values()))
        names = (name.removeprefix("transformer.") for name in parameters)
        return loss.item(), dict(zip(names, found, strict=True))

    exact, theirs = copy_of(hf, torch.float64, device), copy_of(hf, torch.float32, device)
    ours = GPT2.from_pretrained(folder, blocks=blocks, device=device)
    exact_loss, want = gradients(exact, lambda ids: exact(ids).logits)
    _, also = gradients(theirs, lambda ids: theirs(ids).logits)
    loss, got = gradients(ours, ours)
    assert abs(loss - exact_loss) < 1e-5 * exact_loss
    assert got.keys() == want.keys()
    for name in want:
        allowed = 3 * (also[name].double() - want[name]).abs().max() + 1e-5 * want[name].abs().max()
        assert (got[name].double() - want[name]).abs().max() <= allowed, name


# Launches of steps 1, 2 and 3 in a forward pass of two layers. All forms: the first LayerNorm, 1 of step 3.
SPENT = {
    "v1_torch": [0, 0, 1],
    "v2_separate": [2, 2 * 5 + 1, 1 + 2 * 2],  # a layer: bias_gelu; attention and 4 products; 2 sums with LayerNorm
    "v3_attention_block": [2, 2 * 3 + 1, 1 + 2 * 2],  # attention_block for attention, a product and a LayerNorm
    "v4_products": [0, 2 * 1 + 1, 1 + 2 * 3],  # attention_block, mlp, layer_norm
}


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_each_form_of_a_block_agrees_with_the_one_before(dtype, device, folder):
    steps = (step1_simple, step2_attention, step3_fused)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    last = None
    for form in FORMS:
        model = GPT2.from_pretrained(folder, blocks=form, dtype=dtype, device=device)
        before = [sum(step.launch_counts().values()) for step in steps]
        with torch.no_grad():
            logits = model(tokens(device=device))
        spent = [sum(step.launch_counts().values()) - old for step, old in zip(steps, before, strict=True)]
        assert spent == SPENT[form], form
        if last is not None:
            torch.testing.assert_close(logits, last, rtol=tolerance, atol=tolerance * last.abs().max().item())
        last = logits


def test_q_k_and_v_reach_the_op_without_a_copy(folder, monkeypatch):
    seen = []
    right = v3_attention_block.attention_block

    def spy(q, k, v, *args, **kwargs):
        seen.append((q, k, v))
        return right(q, k, v, *args, **kwargs)

    monkeypatch.setattr(v3_attention_block, "attention_block", spy)
    with torch.no_grad():
        GPT2.from_pretrained(folder)(tokens())
    for q, k, v in seen:
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert q.shape == (2, 3, 23, 32)
        assert q.stride() == (23 * 288, 32, 288, 1)


@pytest.mark.emulated
def test_a_forward_pass_under_emulation(folder):
    """Every op of the model by its .cu file, on a machine without a GPU."""
    last = {"embedding": "v2_vector", "layer_norm": "v2_block", "linear": "v2_tiled", "attention_block": "v2_fused",
            "mlp": "pieces", "kv_append": "v2_vector"}  # fmt: skip
    first = {"embedding": "v1_naive", "layer_norm": "v1_naive", "linear": "v1_naive", "attention": "v2_tiled",
             "attention_decode": "v1_head", "residual_layer_norm": "v1_separate", "bias_gelu": "v2_naive",
             "kv_append": "v1_naive"}  # fmt: skip
    ids = tokens(1, 9)
    steps_used = (step1_simple, step2_attention, step3_fused, step4_integration)
    for rungs, form in ((last, "v4_products"), (first, "v2_separate")):
        model = GPT2.from_pretrained(folder, blocks=form, rungs=rungs)
        plain = GPT2.from_pretrained(folder, blocks=form)
        with torch.no_grad():
            expected = plain(ids)
            before = [step.launch_counts() for step in steps_used]
            cache = KVCache(model.config, 1, 9)
            got = torch.cat([model(ids[:, :7], cache), model(ids[:, 7:], cache)], dim=1)
            after = [step.launch_counts() for step in steps_used]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        for step, old, new in zip(steps_used, before, after, strict=True):
            assert new["cpu"] == old["cpu"], step
            assert new["emulated"] > old["emulated"] or (form == "v4_products" and step is step1_simple)


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
        graph, logits = testing.capture(lambda: model(static))
        static.copy_(ids)
        graph.replay()
    assert torch.equal(logits, expected)


@on_each_device
@each_form
def test_training_under_autocast(blocks, device, folder):
    model = GPT2.from_pretrained(folder, blocks=blocks, device=device)
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


@each_form
@on_each_device
def test_greedy_generation_equals_hugging_face(device, blocks, hf, folder):
    ids = tokens(2, 7, device)
    theirs = copy_of(hf, device=device).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=41, do_sample=False, pad_token_id=0
    )
    assert all(len(set(row)) > 8 for row in theirs[:, 7:].tolist())  # a model that repeats itself would prove little
    model = GPT2.from_pretrained(folder, blocks=blocks, device=device)
    check_tokens(generate(model, ids, 41), theirs)
    check_tokens(generate(model, ids, 41, use_cache=False), theirs)


@each_form
@on_each_device
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
def test_greedy_generation_in_half_precision(dtype, device, blocks, hf, folder):
    """Two logits that are equal in a half type may be told apart by nobody; each token taken must be among the best."""
    ids = tokens(4, 7, device)
    ours = generate(GPT2.from_pretrained(folder, blocks=blocks, dtype=dtype, device=device), ids, 41)
    with torch.no_grad():
        exact = copy_of(hf, torch.float64, device)(ours).logits
        theirs = copy_of(hf, dtype, device)(ours).logits
    allowed = 6 * (theirs.double() - exact).abs().max()  # check_logits allows 3 for each of the two logits
    best = exact[:, 6:-1].max(-1).values
    taken = exact[:, 6:-1].gather(-1, ours[:, 7:, None])[..., 0]
    assert (best - taken).max() <= allowed
    assert (best == taken).float().mean() > 0.8


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
@pytest.mark.parametrize("seed", [7, 0, -(1 << 63), (1 << 64) - 1])
def test_draws_with_a_seed_can_be_repeated(seed, device, folder):
    model = GPT2.from_pretrained(folder, device=device)
    ids = tokens(4, 3, device)
    first = generate(model, ids, 20, temperature=1.5, seed=seed)
    check_tokens(generate(model, ids, 20, temperature=1.5, seed=seed), first)
    check_tokens(generate(model, ids, 20, temperature=1.5, seed=seed, use_cache=False), first)
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
    check_tokens(generate(model, ids[:2], 9, temperature=2.0, top_k=1), generate(model, ids[:2], 9))


def test_tokens_keep_the_type_of_the_prompt(folder):
    model = GPT2.from_pretrained(folder)
    short = generate(model, tokens().int(), 9)
    assert short.dtype == torch.int32
    check_tokens(short.long(), generate(model, tokens(), 9))


@pytest.mark.parametrize("top_k", [96, 97, 98, 1000])
def test_top_k_may_be_more_than_the_vocabulary(top_k, folder):
    model = GPT2.from_pretrained(folder)
    options = {"temperature": 3.0, "seed": 3}
    drawn = generate(model, tokens(64, 3), 9, **options, top_k=top_k)
    assert torch.equal(drawn, generate(model, tokens(64, 3), 9, **options)) == (top_k >= 97)


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


def test_prompts_of_unequal_length_give_what_each_gives_alone(folder):
    model = GPT2.from_pretrained(folder)
    rows = [tokens(1, length, seed=length)[0].tolist() for length in (7, 1, 23, 16)]
    for options in ({}, {"repetition_penalty": 1.5}, {"use_cache": False}, {"stop": [3, 41, 77]}):
        together = generate(model, rows, 20, **options)
        for row, text in zip(rows, together, strict=True):
            (alone,) = generate(model, [row], 20, **options)
            assert alone.tolist() == text[: len(alone)].tolist()
            assert len(set(text[len(alone) :].tolist())) <= 1  # filled with the token that it ended with


def test_generate_refuses_a_batch_of_none(folder):
    model = GPT2.from_pretrained(folder)
    for ids in (tokens()[0], tokens()[:0], tokens()[:, :0]):
        says = "generate: `prompts` must be [batch, length], at least one row and one token, got shape"
        with testing.raises(ValueError, f"{says} {tuple(ids.shape)}"):
            generate(model, ids, 1)
    assert torch.equal(generate(model, tokens(), 0), tokens())


# ---- the tour's demonstrations ----


def test_the_tours_step_says_that_both_models_agree(capsys):
    demonstrations.patched_gpt2(Console(width=120))
    printed = capsys.readouterr().out
    assert "32 greedy tokens after a prompt of 64: the same" in printed
    assert "patched 132, before 0, after 0" in printed


def attention_with(monkeypatch, change):
    """From here on the patched model's attention gives what `change` makes of its result."""
    for name in ("attention", "attention_decode"):
        right = getattr(step2_attention, name)
        monkeypatch.setattr(step2_attention, name, lambda *a, _right=right, **kw: change(_right(*a, **kw)))


DIFFERS = "the patched model differs from the unpatched one: "
LAUNCHES = "launches must be 132 in the patched model and 0 in the unpatched one"
SPOILED = {
    "a logit is off": (lambda m: attention_with(m, lambda out: out * 1.01), [DIFFERS + "a logit is", "off"]),
    "a token is another": (  # only one query at a time is wrong, so the logits of the prompt are right
        lambda m: attention_with(m, lambda out: out * (1 if out.shape[2] > 1 else 2)),
        [DIFFERS + "token", "tokens differ"],
    ),
    "our attention did not run": (lambda m: m.setattr(hf_patch, "patched", contextlib.nullcontext), [LAUNCHES]),
    "the patch stays": (lambda m: m.setattr(hf_patch, "remove", lambda model: None), [LAUNCHES]),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_the_tours_step_fails_where(spoiled, monkeypatch):
    spoil, says = SPOILED[spoiled]
    spoil(monkeypatch)
    with testing.raises(RuntimeError, *says):
        demonstrations.patched_gpt2(Console(quiet=True))


if __name__ == "__main__":
    testing.main(__file__)
