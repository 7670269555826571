"""Whole blocks of transformers' GPT-2 on our ops: what somebody has changed in one, what others do with the model."""

import contextlib
import functools
import io

import hf_patch
import pytest
import torch
from torch import nn
from transformers import GPT2ForSequenceClassification, GPT2Model
from transformers.pytorch_utils import Conv1D

import step2_attention
import step3_fused
from kernel_fusion import testing
from step4_integration.gpt2_testing import check_tokens, copy_of, make_hf, tokens

blocks_patched = functools.partial(hf_patch.patched, blocks=True)


def gradients(model, under=contextlib.nullcontext, seed=1, **given):
    model.zero_grad()
    ids = tokens()
    with under(model):
        torch.manual_seed(seed)
        model(ids, labels=ids, **given).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=name)


class LoRA(nn.Module):
    """As PEFT puts it in the place of a layer."""

    def __init__(self, base: Conv1D, rank: int = 4):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.weight.shape[0], rank, bias=False)
        self.lora_B = nn.Linear(rank, base.weight.shape[1], bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def wrap(model, layers):
    for block in model.transformer.h:
        for path in layers:
            parent, name = block.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            setattr(parent, name, LoRA(getattr(parent, name)))


# ---- what somebody has changed ----


PRODUCTS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


@pytest.mark.parametrize("layers", [*([layer] for layer in PRODUCTS), PRODUCTS], ids=" ".join)
@pytest.mark.parametrize("late", [False, True], ids=["before the patch", "under the patch"])
def test_lora_in_the_place_of_a_product_is_called(late, layers):
    model = make_hf(64, 2).train()
    if late:
        hf_patch.apply(model, blocks=True)
    wrap(model, layers)
    if late:
        ours = gradients(model)
        hf_patch.remove(model)
    else:
        ours = gradients(model, blocks_patched)
    assert any("lora_A" in name for name in ours)
    check_equal(ours, gradients(model))


CHANGES = {
    "another activation": lambda block: setattr(block.mlp, "act", nn.ReLU()),
    "a LayerNorm of another kind": lambda block: setattr(block, "ln_2", nn.RMSNorm(64)),
    "a LayerNorm without a bias": lambda block: setattr(block, "ln_2", nn.LayerNorm(64, bias=False)),
    "a wider LayerNorm": lambda block: setattr(block, "ln_1", nn.LayerNorm(64, eps=0.1)),
    "another dropout": lambda block: setattr(block.attn, "resid_dropout", nn.Identity()),
    "another MLP": lambda block: setattr(block, "mlp", nn.Linear(64, 64)),
    "a hook of the attention": lambda block: block.attn.register_forward_hook(lambda m, i, o: (2 * o[0], o[1])),
    "a hook of the MLP": lambda block: block.mlp.register_forward_hook(lambda m, i, o: 2 * o),
    "a hook of a product": lambda block: block.attn.c_attn.register_forward_hook(lambda m, i, o: 2 * o),
    "a hook before a LayerNorm": lambda block: block.ln_1.register_forward_pre_hook(lambda m, i: (2 * i[0],)),
    "a hook of a block": lambda block: block.register_forward_pre_hook(lambda m, i: (2 * i[0], *i[1:])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changed_in_a_block_counts(change):
    model = make_hf(64, 2).train()
    torch.manual_seed(0)
    CHANGES[change](model.transformer.h[1])
    plain = gradients(model)
    check_equal(gradients(model, blocks_patched), plain)


@pytest.mark.parametrize("function", ["gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "gelu_fast"])
def test_each_activation(function):
    model = make_hf(64, 2, activation_function=function, n_inner=96)
    check_equal(gradients(model, blocks_patched), gradients(model))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_attention_that_somebody_chooses_later_is_called(implementation):
    model = make_hf(64, 2, attn_implementation=implementation)
    mask = torch.ones_like(tokens())
    mask[0, 3] = 0  # a hole
    with torch.no_grad():
        expected = model(tokens(), attention_mask=mask).logits
        with blocks_patched(model):
            model.set_attn_implementation(implementation)
            got = model(tokens(), attention_mask=mask).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_forward_that_somebody_put_there_is_not_lost():
    model = make_hf(64, 2)
    block = model.transformer.h[1]
    block.forward = functools.partial(type(block).forward, block)
    with testing.raises(ValueError, "apply: a block of `model` must not have a `forward` of its own", "`blocks`"):
        hf_patch.apply(model, blocks=True)
    with hf_patch.patched(model):
        model(tokens())


def test_layer_norms_of_another_dtype_are_called():
    model = make_hf(64, 2)
    half = copy_of(model, torch.bfloat16)
    for module in half.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    ids = tokens()
    with torch.no_grad():
        reference, theirs = copy_of(model, torch.float64)(ids).logits, half(ids).logits
        with blocks_patched(half):
            ours = half(ids).logits
    assert (ours.double() - reference).abs().max() <= 3 * (theirs.double() - reference).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_the_residual_stream_wide(dtype):
    model = make_hf(64, 2)
    ids = tokens()
    with torch.no_grad():
        reference = copy_of(model, torch.float64)(ids).logits
        with torch.autocast("cpu", dtype):
            theirs = model(ids, output_hidden_states=True)
            with blocks_patched(model):
                ours = model(ids, output_hidden_states=True)
    assert [h.dtype for h in ours.hidden_states] == [h.dtype for h in theirs.hidden_states]
    assert (ours.logits.double() - reference).abs().max() <= 3 * (theirs.logits.double() - reference).abs().max()


# ---- what others do with the model ----


@pytest.mark.parametrize("head", [GPT2Model, GPT2ForSequenceClassification])
def test_other_heads(head):
    torch.manual_seed(0)
    model = head(make_hf(64, 2, pad_token_id=0).config).eval()
    with torch.no_grad():
        expected = model(tokens())[0]
        with blocks_patched(model):
            torch.testing.assert_close(model(tokens())[0], expected, rtol=1e-5, atol=1e-5)


def test_hidden_states_are_those_of_each_block():
    model = make_hf(64, 2)
    with torch.no_grad():
        expected = model(tokens(), output_hidden_states=True).hidden_states
        with blocks_patched(model):
            got = model(tokens(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("first", ["checkpointing", "patch"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing(dropout, first, reentrant):
    """The gradients without it, and each block is computed twice."""
    model = make_hf(64, 2, attn_pdrop=dropout, resid_pdrop=dropout).train()
    expected = gradients(model, blocks_patched)

    def calls(under):
        before = step3_fused.launch_counts()["cpu"]
        got = gradients(model, under)
        return got, step3_fused.launch_counts()["cpu"] - before

    _, once = calls(blocks_patched)
    options = {"use_reentrant": reentrant}
    if first == "checkpointing":
        model.gradient_checkpointing_enable(options)
        got, twice = calls(blocks_patched)
    else:
        hf_patch.apply(model, blocks=True)
        model.gradient_checkpointing_enable(options)
        got, twice = calls(contextlib.nullcontext)
        hf_patch.remove(model)
    check_equal(got, expected)
    assert twice > once


@pytest.mark.parametrize("use_cache", [True, False])
def test_training_compiles(use_cache):
    """Without a cache transformers cannot tell here whether sequences are packed, so it is told by a mask."""
    model = make_hf(64, 2).train()
    ids = tokens()
    given = {"attention_mask": torch.ones_like(ids), "use_cache": use_cache}
    model(ids, **given).logits.square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compiler.reset()
    with blocks_patched(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(ids, **given).logits.square().mean().backward()
    check_equal({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("blocks", [False, True], ids=["attention", "blocks"])
def test_a_model_that_was_compiled_before_is_compiled_again(blocks):
    model = make_hf(64, 2)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")

    def launches():
        with torch.no_grad():
            before = step2_attention.launch_counts()["cpu"]
            compiled(tokens())
            return step2_attention.launch_counts()["cpu"] - before

    without = launches()
    with hf_patch.patched(model, blocks):
        under = launches()
    assert (without, under > 0, launches()) == (0, True, 0)


def test_class_and_names_of_parameters_stay():
    model = make_hf(64, 2)
    before = [(name, type(module)) for name, module in model.named_modules()], list(model.state_dict())
    with blocks_patched(model):
        assert ([(name, type(module)) for name, module in model.named_modules()], list(model.state_dict())) == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_copy_comes_out_of_its_blocks():
    model = make_hf(64, 2)
    with blocks_patched(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        assert all(block.forward.args[0] is block for block in other.transformer.h)
    hf_patch.remove(other)
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)


def test_a_pipeline(bpe):
    from transformers import PreTrainedTokenizerFast, pipeline

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(bpe), pad_token="a", padding_side="left")
    model = make_hf(64, 2, vocab_size=260)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    texts, options = ["the kernel", "the", "el, the ke"], {"max_new_tokens": 12, "do_sample": False, "batch_size": 3}
    expected = write(texts, **options)
    with blocks_patched(model):
        before = step3_fused.launch_counts()["cpu"]
        assert write(texts, **options) == expected
        assert step3_fused.launch_counts()["cpu"] > before


def test_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    texts = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]
    losses = []
    for under in (contextlib.nullcontext, blocks_patched):
        model = make_hf(64, 2)
        arguments = TrainingArguments(
            output_dir=tmp_path, max_steps=4, per_device_train_batch_size=4, report_to="none", use_cpu=True,
            save_strategy="no", learning_rate=1e-3, gradient_checkpointing=True, disable_tqdm=True,
        )  # fmt: skip
        with under(model):
            losses.append(Trainer(model, arguments, train_dataset=texts).train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_peft():
    peft = pytest.importorskip("peft")
    base = make_hf(64, 2)
    lora = peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False))
    plain = gradients(lora.train())
    with blocks_patched(base):
        check_equal(gradients(lora), plain)
        options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": torch.ones_like(tokens())}
        ours = lora.eval().generate(input_ids=tokens(), **options)
    check_tokens(ours, lora.generate(input_ids=tokens(), **options))


# ---- versions ----


def test_versions_of_transformers(recwarn):
    for version in (*hf_patch.TESTED, "5.7.1"):
        hf_patch.check_version(version)
    assert not recwarn
    with testing.raises(RuntimeError, "apply: transformers must be 5.0.0 or newer, got 4.57.6"):
        hf_patch.check_version("4.57.6")
    with pytest.warns(UserWarning, match="apply: tested with transformers 5.0.0 to .*, got 6.1.0"):
        hf_patch.check_version("6.1.0")
