"""Our attention under transformers' own GPT-2."""

import contextlib
import functools
import io
from copy import deepcopy

import hf_patch
import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import step2_attention
import step3_fused
from kernel_fusion import testing
from step4_integration.gpt2_testing import HALF_TYPES, check_tokens, copy_of, files_of, make_hf, tokens
from step4_integration.testing import on_each_device

attention_or_blocks = pytest.mark.parametrize("blocks", [False, True], ids=["attention", "blocks"])


def launches(backend="cpu"):
    return step2_attention.launch_counts()[backend] + step3_fused.launch_counts()[backend]


# ---- under transformers' own model ----


@attention_or_blocks
@pytest.mark.usefixtures("one_thread")
@on_each_device
def test_the_patched_model_equals_the_unpatched(blocks, device, hf):
    hf = copy_of(hf, device=device)
    ids = tokens(device=device)
    mask = torch.ones_like(ids)
    backend = "gpu" if device == "cuda" else "cpu"
    with torch.no_grad():
        expected = hf(ids).logits
        generated = hf.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        implementation = hf.config._attn_implementation
        before = launches(backend)
        with hf_patch.patched(hf, blocks):
            logits = hf(ids).logits
            of_a_pass = launches(backend) - before
            with_mask = hf(ids, attention_mask=mask).logits
            patched = hf.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
            after = launches(backend)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(with_mask, logits)
        check_tokens(patched, generated)
        assert of_a_pass >= 9 if blocks else of_a_pass == 2  # at least, of 2 layers: 2 · 4 and the last LayerNorm
        assert device == "cuda" or after - before == of_a_pass * (2 + 20)
        assert hf.config._attn_implementation == implementation
        assert torch.equal(hf(ids).logits, expected)
        assert launches(backend) == after


@attention_or_blocks
@pytest.mark.usefixtures("one_thread")
@on_each_device
@pytest.mark.parametrize("chunks", [(23,), (1,) * 23, (9, 1, 13)], ids=str)
def test_the_patched_model_reads_a_prompt_in_chunks(blocks, chunks, device, hf):
    """Prefill, chunked prefill and decode: the queries are the last of the keys in each."""
    hf = copy_of(hf, device=device)
    ids = tokens(device=device)
    with torch.no_grad():
        expected = hf(ids).logits
        with hf_patch.patched(hf, blocks):
            cache = DynamicCache(config=hf.config)
            parts = [hf(part, past_key_values=cache, use_cache=True).logits for part in ids.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=3e-5)


@attention_or_blocks
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@on_each_device
def test_the_patched_model_in_half_precision(blocks, device, dtype, hf):
    ids = tokens(device=device)
    half, exact = copy_of(hf, dtype, device), copy_of(hf, torch.float64, device)
    with torch.no_grad():
        reference, theirs = exact(ids).logits, half(ids).logits
        with hf_patch.patched(half, blocks):
            ours = half(ids).logits
    assert (ours.double() - reference).abs().max() <= 3 * (theirs.double() - reference).abs().max()


PADDED = torch.ones(2, 23, dtype=torch.long)
PADDED[0, :6] = PADDED[1, 15:] = 0  # on the left, and on the right


@attention_or_blocks
@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
def test_the_patched_model_trains(mask, blocks, hf):
    ids = tokens()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    gradients = []
    for context in (contextlib.nullcontext, functools.partial(hf_patch.patched, blocks=blocks)):
        model = copy_of(hf).train()
        with context(model):
            model(ids, labels=labels, attention_mask=mask).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_patched_model_refuses_what_the_op_cannot_do(hf):
    hf = copy_of(hf)
    with hf_patch.patched(hf):
        with testing.raises(ValueError, "output_attentions"):
            hf.config.output_attentions = True


@attention_or_blocks
@pytest.mark.parametrize("part", ["attn_pdrop", "resid_pdrop"])
def test_patched_training_drops_and_evaluation_does_not(part, blocks):
    ids = torch.randint(97, (2, 24))
    model = make_hf(64, 2, **{part: 0.4})
    expected = model(ids).logits

    def gradients(seed):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach(), model.transformer.h[0].attn.c_attn.weight.grad.clone()

    with hf_patch.patched(model, blocks):
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
        lambda ids: torch.tensor([[1] * 8, [0, 1, 1, 0, 1, 1, 1, 0]]),
        "`attention_mask` must be one run of ones in each row, with padding before and after it; row 1 has a hole",
    ),
    "of booleans": (
        lambda ids: torch.ones(2, 1, 8, 8, dtype=torch.bool),
        "`attention_mask` must be None or of two dimensions: step 2's attention knows only the causal mask",
    ),
    "to be added, of four dimensions": (lambda ids: torch.zeros(2, 1, 8, 8), "got a mask of shape (2, 1, 8, 8)"),
}


@attention_or_blocks
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mask", HIDING)
def test_a_mask_that_hides_other_keys_is_refused(mask, use_cache, blocks, hf):
    """Without a cache older versions of transformers refuse one that is too short by themselves."""
    hf = copy_of(hf)
    ids = tokens(2, 8)
    make, fragment = HIDING[mask]
    with hf_patch.patched(hf, blocks), testing.raises(ValueError, "kernel_fusion: ", fragment):
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
        with testing.raises(ValueError, "`attention_mask` must be one run", "`generate` made one", "`pad_token_id`"):
            hf.generate(ids, **options)
        check_tokens(hf.generate(ids, attention_mask=mask, **options), expected)


def test_older_versions_of_transformers_give_the_queries_positions():
    mask = functools.partial(hf_patch.causal_mask, kv_length=8)
    for first in (0, 5):  # a prompt, a part of one
        assert mask(cache_position=torch.arange(first, 8)).keys is None
    assert mask(cache_position=torch.arange(3, 7)).keys == 7  # of a static cache
    of_a_token = mask(cache_position=torch.arange(5, 6))
    assert (of_a_token.keys, of_a_token.key_end.tolist()) == (None, [6])


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
        hf_patch.attention_forward(layer, q, q, q, hf_patch.CausalMask(), **{name: False if name == "is_causal" else 4})


@attention_or_blocks
@pytest.mark.parametrize(
    "option",
    [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"sliding_window": 4}, {},
     {"reorder_and_upcast_attn": True}],
    ids=lambda option: "".join(option) or "none",
)  # fmt: skip
def test_options_of_the_config_count_under_the_patch(option, blocks):
    model = make_hf(64, 2, attn_implementation="eager", **option)  # older versions' others ignore some
    ids = tokens()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected, generated = model(ids).logits, model.generate(ids, **options)
        with hf_patch.patched(model, blocks):
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
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


@attention_or_blocks
def test_a_model_of_the_same_config_is_not_patched(blocks, hf):
    a = copy_of(hf)
    b = GPT2LMHeadModel(a.config)
    implementation = b.config._attn_implementation
    with hf_patch.patched(a, blocks):
        assert b.config._attn_implementation == implementation
        with hf_patch.patched(b, blocks):
            pass
        with testing.raises(ValueError, "remove: `model` is not patched"):
            hf_patch.remove(b)
        before = launches()
        b(tokens())
        assert launches() == before
        a(tokens())
        assert launches() >= before + 2
        a.config.use_cache = False
    assert a.config._attn_implementation == implementation
    assert (a.config.use_cache, b.config.use_cache) == (False, True)


def test_a_model_inside_a_model_is_patched_once(hf):
    model = copy_of(hf)
    with hf_patch.patched(model.transformer):
        with testing.raises(ValueError, "apply: `model` is patched already"):
            hf_patch.apply(model)
        before = launches()
        model(tokens())
        assert launches() == before + 2
    with hf_patch.patched(model), testing.raises(ValueError, "apply: `model` is patched already"):
        hf_patch.apply(model.transformer)


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@attention_or_blocks
@pytest.mark.parametrize("duplicate", [deepcopy, pickled])
def test_a_copy_of_a_patched_model_is_patched_and_comes_out_by_itself(blocks, duplicate, hf):
    model = copy_of(hf)
    expected = model(tokens()).logits
    with hf_patch.patched(model, blocks):
        other = duplicate(model)
    before = launches()
    assert torch.equal(model(tokens()).logits, expected)
    assert launches() == before
    torch.testing.assert_close(other(tokens()).logits, expected, rtol=1e-5, atol=1e-5)
    assert launches() >= before + 2
    hf_patch.remove(other)
    assert torch.equal(other(tokens()).logits, expected)
    other(tokens(), output_attentions=True)


@attention_or_blocks
def test_a_patched_model_is_saved_as_any_other(blocks, hf, tmp_path):
    model = copy_of(hf)
    with hf_patch.patched(model, blocks):
        model.save_pretrained(tmp_path / "patched")
    model.save_pretrained(tmp_path / "not patched")
    assert files_of(tmp_path / "patched") == files_of(tmp_path / "not patched")
    assert not hasattr(GPT2LMHeadModel.from_pretrained(tmp_path / "patched"), hf_patch._BEFORE)


@attention_or_blocks
def test_the_patched_model_compiles(blocks, hf):
    model = copy_of(hf)
    with torch.no_grad(), hf_patch.patched(model, blocks):
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
