"""Which files of weights are read, what is written, and what a new model begins with."""

import dataclasses
import json

import gpt2_model
import pytest
import torch
import train
from generate import FileTokenizer, read_tokenizer
from gpt2_model import GPT2
from safetensors import safe_open
from transformers import GPT2LMHeadModel

from kernel_fusion import testing
from step4_integration.gpt2_testing import HALF_TYPES, check_logits, rewrite, tokens

C_ATTN, WTE = "transformer.h.0.attn.c_attn.weight", "transformer.wte.weight"
MISFITS = {
    "missing": (lambda t: t.pop("transformer.h.1.attn.c_proj.bias"), "the tensor `h.1.attn.c_proj.bias` is missing"),
    "unexpected": (
        lambda t: t.update({"transformer.h.2.ln_1.weight": torch.ones(96)}),
        "the model has no place for the tensor `h.2.ln_1.weight`",
    ),
    "twice": (lambda t: t.update({"wte.weight": t[WTE] + 1}), "the tensor `wte.weight` is there twice"),
    "as PyTorch's own linear layer has it": (
        lambda t: t.update({C_ATTN: t[C_ATTN].T.contiguous()}),
        "`h.0.attn.c_attn.weight` must have shape (96, 288), got (288, 96)",
    ),
    "of integers": (
        lambda t: t.update({WTE: t[WTE].long()}),
        "`wte.weight` must be of a floating type, got torch.int64",
    ),
    "of bytes": (lambda t: t.update({WTE: t[WTE].to(torch.int8)}), "`wte.weight` must be of a floating type"),
    "of truth values": (lambda t: t.update({WTE: t[WTE].bool()}), "`wte.weight` must be of a floating type"),
    "not tied": (lambda t: t.update({"lm_head.weight": t[WTE] + 1}), "`lm_head.weight` must equal `wte.weight`"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_tensor_that_does_not_fit_is_named(misfit, folder, tmp_path):
    change, says = MISFITS[misfit]
    copy = rewrite(folder, tmp_path, change)
    with testing.raises(ValueError, str(copy), says):
        GPT2.from_pretrained(copy)


def test_a_head_that_is_tied_is_read(folder, tmp_path):
    GPT2.from_pretrained(rewrite(folder, tmp_path, lambda t: t.update({"lm_head.weight": t[WTE].clone()})))


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
    GPT2(train.SMALL).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with testing.raises(FileNotFoundError, f"{tmp_path / 'model.safetensors'} is missing"):
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
        scale_attn_by_inverse_layer_idx=True, blocks="v1_torch", rungs={"attention": "v1_naive"},
    )  # fmt: skip
    default = gpt2_model.Config()
    assert all(getattr(config, f.name) != getattr(default, f.name) for f in dataclasses.fields(config))
    model = GPT2(config)
    model.save_pretrained(tmp_path, tokenizer="bytes")
    again = GPT2.from_pretrained(tmp_path, blocks="v1_torch", rungs=config.rungs)
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
