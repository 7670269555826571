"""Packed sequences under transformers' own GPT-2: each as by itself, by transformers' own model."""

import contextlib
import functools
import inspect
import math

import hf_patch
import pytest
import torch
from transformers import DataCollatorWithFlattening, DynamicCache, GPT2Model
from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_causal_mask_function

from kernel_fusion import testing
from step4_integration.gpt2_testing import copy_of, make_hf, tokens
from step4_integration.testing import on_each_device

attention_or_blocks = pytest.mark.parametrize("blocks", [False, True], ids=["attention", "blocks"])
pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (9, 1, 23, 4)


def sequences():
    return [{"input_ids": tokens(1, length, seed=length)[0].tolist()} for length in LENGTHS]


def flattened(device="cpu", flash=False):
    """As a Trainer gets it; with FlashAttention's arguments, or positions that start again."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_position_ids=True, return_tensors="pt")
    batch = collator(sequences())
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}


def positions_that_start_again(batch=2):
    return torch.cat([torch.arange(n) for n in LENGTHS]).expand(batch, -1)


def alone(model, device="cpu"):
    """The logits of each sequence by itself, side by side, and the mean loss of all tokens that have one before."""
    logits, losses = [], []
    for sequence in sequences():
        ids = torch.tensor([sequence["input_ids"]], device=device)
        logits.append(model(ids).logits)
        losses.append(torch.nn.functional.cross_entropy(logits[-1][0, :-1], ids[0, 1:], reduction="sum"))
    return torch.cat(logits, 1), sum(losses) / (sum(LENGTHS) - len(LENGTHS))


@attention_or_blocks
@on_each_device
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("given", ["position_ids", "flash", "flash and a cache"])
def test_each_sequence_is_as_by_itself(given, checkpointed, device, blocks):
    """Logits, loss and gradients, from what DataCollatorWithFlattening makes."""
    theirs = copy_of(make_hf(64, 2), torch.float64, device).train()
    ours = copy_of(theirs, torch.float64, device).train()
    logits, loss = alone(theirs, device)
    loss.backward()
    if checkpointed:
        ours.gradient_checkpointing_enable()
    batch = flattened(device, given != "position_ids")
    with hf_patch.patched(ours, blocks):
        out = ours(**batch, use_cache=given == "flash and a cache")
        out.loss.backward()
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.loss, loss, check_dtype=False)
    for (name, got), want in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=lambda text, name=name: f"{name}: {text}")


@attention_or_blocks
@on_each_device
def test_positions_that_start_again_in_several_rows_equal_transformers(device, blocks):
    hf = copy_of(make_hf(64, 2), torch.float64, device)
    ids, positions = tokens(2, sum(LENGTHS), device), positions_that_start_again().clone()
    positions[1] = torch.arange(sum(LENGTHS))  # one sequence alone
    given = {"position_ids": positions.to(device), "use_cache": False}
    with torch.no_grad():
        expected = hf(ids, **given).logits
        assert not torch.allclose(expected, hf(ids, **given | {"use_cache": True}).logits)
        with hf_patch.patched(hf, blocks):
            torch.testing.assert_close(hf(ids, **given).logits, expected)


@attention_or_blocks
@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_sequence_sees_anothers_nan(dtype, device, blocks):
    hf = copy_of(make_hf(64, 2), dtype, device)
    own = slice(LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3]))
    batch = flattened(device, True)
    del batch["labels"]
    ids = batch.pop("input_ids")
    x = hf.transformer.wte(ids)
    spoiled = x.clone()
    spoiled[:, own] = math.nan
    with torch.no_grad(), hf_patch.patched(hf, blocks):
        clean, dirty = (hf(inputs_embeds=t, **batch).logits for t in (x, spoiled))
    assert dirty[:, own].isnan().all()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for rest in (slice(0, own.start), slice(own.stop, None)):
        torch.testing.assert_close(dirty[:, rest], clean[:, rest], **tolerance)


@attention_or_blocks
def test_packed_training_drops(blocks):
    model = make_hf(64, 2, attn_pdrop=0.4).train()
    batch = flattened(flash=True)

    def loss(seed):
        torch.manual_seed(seed)
        return model(**batch).loss.item()

    with hf_patch.patched(model, blocks):
        assert loss(1) == loss(1) != loss(2)
        model.eval()
        assert loss(1) == pytest.approx(alone(model)[1].item(), rel=1e-5)


@pytest.mark.parametrize("flash", [False, True], ids=["position_ids", "flash"])
def test_packed_sequences_compile(flash):
    """Where nobody may look at positions, all are taken for packed sequences."""
    model = copy_of(make_hf(64, 2))
    batch = flattened(flash=flash) | {"use_cache": False}
    del batch["labels"]
    with torch.no_grad(), hf_patch.patched(model, blocks=True):
        expected = model(**batch).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**batch).logits, expected, rtol=1e-5, atol=1e-5)


@attention_or_blocks
def test_what_is_no_packed_row_is_refused(blocks):
    model = copy_of(make_hf(64, 2))
    batch = flattened(flash=True)
    ids, starts = batch["input_ids"], batch["cu_seq_lens_q"]
    both = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    other = starts.clone()
    other[1] += 1
    cache = DynamicCache(config=model.config)
    before_mask = [None] * (list(inspect.signature(GPT2Model.forward).parameters).index("attention_mask") - 3)
    with torch.no_grad(), hf_patch.patched(model, blocks):
        for text, given in (
            ("`cu_seq_lens_q` and `cu_seq_lens_k` must both be given", {"cu_seq_lens_q": starts}),
            ("`cu_seq_lens_q` and `cu_seq_lens_k` must both be given", {"cu_seq_lens_k": starts}),
            ("`cu_seq_lens_q` and `cu_seq_lens_k` must both", both | {"cu_seq_lens_k": starts[:-1]}),
            ("`cu_seq_lens_k` must be `cu_seq_lens_q`", both | {"cu_seq_lens_k": other}),
            ("`attention_mask` must be None where `cu_seq_lens_q` is given", both | {"attention_mask": ids > 0}),
        ):
            with testing.raises(ValueError, f"kernel_fusion: {text}"):
                model(ids, **given)
        with testing.raises(ValueError, "kernel_fusion: `attention_mask` must be None where `cu_seq_lens_q` is given"):
            model.transformer(ids, None, *before_mask, ids > 0, **both)
        layer, q = model.transformer.h[0].attn, torch.randn(1, 2, 3, 8)
        with testing.raises(ValueError, "kernel_fusion: `cu_seq_lens_q` must be given to a call of the model"):
            hf_patch.attention_forward(layer, q, q, q, None, **both)
        model(tokens(1, 5), past_key_values=cache)
        with testing.raises(ValueError, "kernel_fusion: `past_key_values` must be empty where sequences are packed"):
            model(tokens(1, 5), past_key_values=cache, cu_seq_lens_q=starts, cu_seq_lens_k=starts)


def test_masks_that_are_made_of_something_else_are_refused():
    def own(batch, head, query, key):
        return query == key

    for function in (
        own,
        and_masks(causal_mask_function, own),
        sliding_window_causal_mask_function(4),
        functools.partial(own),
    ):
        with testing.raises(ValueError, "kernel_fusion: masks other than the causal one and packed sequences"):
            hf_patch.causal_mask(kv_length=8, q_length=8, mask_function=function, device=torch.device("cpu"))


def test_a_patched_model_goes_back_to_transformers_own_packing():
    hf = copy_of(make_hf(64, 2), torch.float64)
    batch = flattened()
    with torch.no_grad():
        expected = hf(**batch, use_cache=False).logits
        for context in (functools.partial(hf_patch.patched, hf), contextlib.nullcontext):
            with context():
                torch.testing.assert_close(hf(**batch, use_cache=False).logits, expected)
