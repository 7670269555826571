"""The patched GPT-2 of transformers with padding and every cache: the tokens and logits of the unpatched one."""

import functools

import hf_patch
import pytest
import torch
import transformers
from generate import where_different
from packaging.version import Version
from transformers import DynamicCache, GPT2LMHeadModel, StaticCache
from transformers.generation.configuration_utils import CompileConfig

from step4_integration.gpt2_testing import HALF_TYPES, check_tokens, copy_of, make_hf, tokens
from step4_integration.testing import on_each_device

attention_or_blocks = pytest.mark.parametrize("blocks", [False, True], ids=["attention", "blocks"])
before_5_4 = Version(transformers.__version__) < Version("5.4")
HEADS = {"gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25}
MASKS = {
    "whole": [(0, 12), (0, 12), (0, 12)],
    "left": [(4, 12), (0, 12), (11, 12)],
    "right": [(0, 8), (0, 12), (0, 1)],
    "both": [(2, 10), (0, 12), (3, 5)],
    "empty": [(0, 12), (0, 0), (2, 12)],  # one text of padding alone
}
padded = pytest.mark.parametrize("padding", ["left", "right", "both", "empty"])


def mask_of(padding, device="cpu", length=12):
    key, of_all = torch.arange(length), torch.tensor(MASKS[padding])
    return ((key >= of_all[:, :1]) & (key < of_all[:, 1:])).long().to(device)


def sized(size, **options):
    """As the checkpoint `size` is, but narrow, of three layers and few words."""
    heads = HEADS[size]
    return make_hf(8 * heads, heads, **({"n_layer": 3, "n_positions": 240} | options))


# ---- logits ----


@padded
@attention_or_blocks
@on_each_device
def test_padding_is_seen_by_nobody(device, blocks, padding):
    """Logits of tokens are those without the patch, whatever is padding, and no token's is NaN."""
    model = make_hf(96, 3).to(device)
    ids, mask = tokens(3, 12, device), mask_of(padding, device)
    others = ids.where(mask == 1, (ids + 1) % 97)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with hf_patch.patched(model, blocks):
            got, of_others = (model(x, attention_mask=mask).logits for x in (ids, others))
    torch.testing.assert_close(got[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[mask == 1], of_others[mask == 1])
    assert got.isfinite().all()


@padded
@attention_or_blocks
def test_gradients_know_of_padding(blocks, padding):
    """Also those of the embeddings: what is padding gets none."""
    ids, mask = tokens(3, 12), mask_of(padding)
    gradients = []
    for under in (False, True):
        model = make_hf(96, 3).double().train()
        x = model.transformer.wte(ids).detach().requires_grad_()
        if under:
            hf_patch.apply(model, blocks)
        logits = model(inputs_embeds=x, attention_mask=mask).logits
        logits[mask == 1].square().mean().backward()
        assert not x.grad[mask == 0].any()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@attention_or_blocks
@pytest.mark.parametrize("chunks", [(12,), (5, 6, 1), (1,) * 12], ids=str)
@pytest.mark.parametrize("padding", ["whole", "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_in_chunks_into_each_cache(cache, padding, chunks, blocks):
    model = make_hf(96, 3)
    ids, mask = tokens(3, 12), mask_of(padding)
    kinds = {"dynamic": DynamicCache, "static": functools.partial(StaticCache, max_cache_len=20)}
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with hf_patch.patched(model, blocks):
            past, parts, end = kinds[cache](config=model.config), [], 0
            for part in ids.split(chunks, dim=1):
                end += part.shape[1]
                out = model(part, attention_mask=mask[:, :end], past_key_values=past, use_cache=True)
                parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1)[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)


@attention_or_blocks
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize("padding", ["whole", "left"])
@on_each_device
def test_half_precision_of_each_size(device, padding, size, dtype, blocks):
    """The error against float64 is at most three times that of transformers' own model in the same dtype."""
    exact = sized(size)
    half = copy_of(exact, dtype, device)
    ids, mask = tokens(3, 12, device), mask_of(padding, device)
    with torch.no_grad():
        reference = copy_of(exact, torch.float64, device)(ids, attention_mask=mask).logits[mask == 1]
        theirs = half(ids, attention_mask=mask).logits[mask == 1]
        with hf_patch.patched(half, blocks):
            ours = half(ids, attention_mask=mask).logits[mask == 1]
    assert (ours.double() - reference).abs().max() <= 3 * (theirs.double() - reference).abs().max()


# ---- generation ----


@attention_or_blocks
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 5}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("padding", ["whole", "left", "right"])  # on the right it is a hole after the first token
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.usefixtures("one_thread")
def test_generation(cache, padding, options, blocks):
    if cache and "use_cache" in options:
        pytest.skip("no cache is no static one")
    if padding == "right" and "use_cache" in options:
        pytest.skip("a prompt with holes")
    if before_5_4 and "prefill_chunk_size" in options:
        pytest.skip("before 5.4 transformers cannot do this, patched or not")
    model = make_hf(96, 3)
    given = {
        "inputs": tokens(3, 12), "attention_mask": mask_of(padding), "cache_implementation": cache, "do_sample": False,
        "max_new_tokens": 20, "pad_token_id": 0, "disable_compile": True,
    }  # fmt: skip
    expected = model.generate(**given | options)
    with hf_patch.patched(model, blocks):
        check_tokens(model.generate(**given | options), expected)


@attention_or_blocks
@pytest.mark.parametrize("padding", ["whole", "left", "right"])
def test_generation_that_compiles(padding, blocks):
    """With a static cache `generate` compiles the model, and makes the mask before it calls it."""
    model = make_hf(96, 3)
    compile_config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    compile_config._compile_all_devices = True  # on the CPU, too
    given = {
        "inputs": tokens(3, 12), "attention_mask": mask_of(padding), "cache_implementation": "static",
        "do_sample": False, "max_new_tokens": 20, "pad_token_id": 0,
    }  # fmt: skip
    expected = model.generate(**given, disable_compile=True)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with hf_patch.patched(model, blocks):
        check_tokens(model.generate(**given, compile_config=compile_config), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.skipif(before_5_4, reason="before 5.4 transformers cannot compile this, patched or not")
@attention_or_blocks
@pytest.mark.parametrize("padding", ["whole", "left"])
def test_a_compiled_prompt_into_a_static_cache(padding, blocks):
    """How many keys there are stands on the device, and nobody may wait for it."""
    model = make_hf(96, 3)
    ids, mask = tokens(3, 12), mask_of(padding)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        with hf_patch.patched(model, blocks):
            past = StaticCache(config=model.config, max_cache_len=20)
            model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=past)
            torch.compiler.reset()
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            got = compiled(ids[:, 5:], attention_mask=mask, past_key_values=past).logits
    there = mask[:, 5:] == 1
    torch.testing.assert_close(got[there], expected[:, 5:][there], rtol=1e-5, atol=1e-5)


@attention_or_blocks
@on_each_device
def test_a_hole_that_nobody_could_wait_for_is_nan(device, blocks):
    """In its row and in no other."""
    model = make_hf(96, 3).to(device)
    ids, mask = tokens(3, 12, device), mask_of("left", device)
    mask[2, 5] = 1
    torch.compiler.reset()
    with torch.no_grad(), hf_patch.patched(model, blocks):
        with pytest.raises(ValueError, match="row 2 has a hole"):
            model(ids, attention_mask=mask)
        logits = torch.compile(model, backend="aot_eager")(ids, attention_mask=mask).logits
    assert logits[:2].isfinite().all()
    assert logits[2, -1].isnan().all()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", HEADS)
@pytest.mark.parametrize(
    ("padding", "blocks"),
    [
        pytest.param("whole", False, id="whole-attention"),
        pytest.param("left", True, id="left-blocks"),
        pytest.param("whole", True, id="whole-blocks", marks=pytest.mark.long),
        pytest.param("left", False, id="left-attention", marks=pytest.mark.long),
    ],
)
def test_two_hundred_tokens_of_each_size(padding, size, blocks, tmp_path):
    """After a save and a load, with each cache."""
    sized(size).save_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    given = {
        "inputs": tokens(3, 12), "attention_mask": mask_of(padding), "do_sample": False, "max_new_tokens": 200,
        "pad_token_id": 0, "disable_compile": True,
    }  # fmt: skip
    expected = model.generate(**given)
    with hf_patch.patched(model, blocks):
        model.save_pretrained(tmp_path / "patched")
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "patched").eval()
        assert where_different(loaded.generate(**given), expected) is None
        for cache in (None, "dynamic", "static"):
            check_tokens(model.generate(**given, cache_implementation=cache), expected)
