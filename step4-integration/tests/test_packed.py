"""Packed rows through the model: logits and gradients of each document as by itself, and none sees another.

python -m pytest tests/test_packed.py            pytest's options may follow, such as -k v4_products
"""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from gpt2_model import GPT2, Config
from model.cache import KVCache

from kernel_fusion import testing
from step4_integration.gpt2_testing import each_form
from step4_integration.testing import on_each_device

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
LENGTHS = [5, 0, 12, 1, 3, 0]  # of documents: 21 tokens, more than the model has positions


def row_of(lengths=LENGTHS, device="cpu"):
    """Ids, a packed row, and where its documents begin."""
    ids = torch.randint(TINY.vocab_size, (1, sum(lengths)), generator=torch.Generator().manual_seed(3)).to(device)
    return ids, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def documents_of(cu_seqlens):
    """The rows of each document that is not empty."""
    return [slice(first, last) for first, last in itertools.pairwise(cu_seqlens.tolist()) if last > first]


def model_of(blocks, device="cpu", dtype=torch.float64):
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, blocks=blocks, scale_attn_by_inverse_layer_idx=True))
    with torch.no_grad():
        for parameter in model.parameters():  # a bias of 0 would hide where it is added
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(device, dtype)


@each_form
@on_each_device
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_each_document_has_the_logits_and_gradients_that_it_has_by_itself(recompute, device, blocks):
    packed, alone = model_of(blocks, device), model_of("v1_torch", device)
    packed.recompute = recompute
    ids, cu_seqlens = row_of(device=device)
    logits = packed(ids, cu_seqlens=cu_seqlens)
    parts = torch.cat([alone(ids[:, own]) for own in documents_of(cu_seqlens)], 1)
    torch.testing.assert_close(logits, parts)
    logits.sin().sum().backward()
    parts.sin().sum().backward()
    for (name, got), want in zip(packed.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=lambda text, name=name: f"{name}: {text}")


@each_form
@on_each_device
def test_the_loss_is_that_of_all_documents(device, blocks):
    model = model_of(blocks, device)
    ids, cu_seqlens = row_of(device=device)
    targets = ids.roll(-1, 1)
    parts = []
    for own in documents_of(cu_seqlens):
        targets[:, own.stop - 1] = -100
        parts.append(F.cross_entropy(model(ids[:, own])[0, :-1], ids[0, own][1:], reduction="sum"))
    loss = model.loss(ids, targets, cu_seqlens)
    torch.testing.assert_close(loss, sum(parts) / (targets != -100).sum())


@pytest.mark.parametrize("blocks", ["v2_separate", "v3_attention_block", "v4_products"])
@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_document_sees_anothers_nan(dtype, device, blocks):
    """A token's embedding is NaN, and so is what its document makes of it, and nobody else's. So with gradients."""
    model = model_of(blocks, device, dtype)
    ids, cu_seqlens = row_of([5, 4, 3], device)
    ids[:] = ids % 40
    clean = model.hidden(ids, None, cu_seqlens)
    with torch.no_grad():
        model.wte.weight[45] = math.nan
    ids[0, 6] = 45
    hidden = model.hidden(ids, None, cu_seqlens)
    own = torch.zeros(12, dtype=torch.bool, device=device)
    own[5:9] = True
    assert hidden[0, 6:9].isnan().all()  # the token and those behind it
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(hidden[0, ~own], clean[0, ~own], **tolerance)
    hidden[0, ~own].float().sin().sum().backward()
    of_tokens = model.wte.weight.grad
    others = torch.cat([ids[0, :5], ids[0, 9:]])
    assert of_tokens[others[~torch.isin(others, ids[0, 5:9])]].isfinite().all()


def test_a_loss_in_autocast_and_under_compile_is_the_same():
    model = model_of("v4_products", dtype=torch.float32)
    ids, cu_seqlens = row_of()
    targets = ids.roll(-1, 1)
    expected = model.loss(ids, targets, cu_seqlens)
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, targets, cu_seqlens), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.loss(ids, targets, cu_seqlens), expected, rtol=0.05, atol=0.05)


def test_what_is_no_packed_row_is_refused():
    model = model_of("v4_products", dtype=torch.float32)
    ids, cu_seqlens = row_of()
    with testing.raises(ValueError, "GPT2: `ids` must have batch 1 where `cu_seqlens` is given, got 2"):
        model(ids.expand(2, -1), cu_seqlens=cu_seqlens)
    with testing.raises(ValueError, "GPT2: `cache` must be None where `cu_seqlens` is given"):
        model(ids, KVCache(model.config, 1, 40), cu_seqlens)
    with testing.raises(ValueError, "attention_block: `cu_seqlens` must end with 21, got 20"):
        model(ids, cu_seqlens=torch.tensor([0, 10, 20], dtype=torch.int32))
    with testing.raises(ValueError, "embedding: "):  # a document that is longer than the model has positions
        model(ids, cu_seqlens=torch.tensor([0, 13, 21], dtype=torch.int32))
    without = copy.deepcopy(model)
    without.config = dataclasses.replace(model.config, rungs={"attention_block": "v2_fused"})
    with testing.raises(ValueError, "attention_block: rung 'v2_fused' takes no packed rows (`cu_seqlens`)"):
        without(ids, cu_seqlens=cu_seqlens)
