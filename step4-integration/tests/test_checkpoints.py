"""Which files of weights are read, what is written, and what a new model begins with."""

import dataclasses
import json
import pathlib

import gpt2_model
import pytest
import torch
import train
from generate import FileTokenizer, read_tokenizer
from gpt2_model import GPT2
from safetensors import SafetensorError, safe_open
from transformers import GPT2LMHeadModel

from kernel_fusion import testing
from step4_integration.gpt2_testing import HALF_TYPES, check_logits, files_of, rewrite, tokens, with_config


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
