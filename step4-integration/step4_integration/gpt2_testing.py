"""What the tests of GPT-2 share: a model of transformers, ours of its weights, and how both are compared."""

import json

import pytest
import torch
from generate import where_different
from gpt2_model import GPT2
from model.blocks import FORMS
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

HALF_TYPES = [torch.float16, torch.bfloat16]
each_form = pytest.mark.parametrize("blocks", FORMS)


def make_hf(n_embd, n_head, **options):
    """A random GPT-2 of transformers. Biases and LayerNorms are random too: at 0 and 1 they would hide mistakes.

    Biases are small beside the embeddings: larger ones would choose the same token at every step.
    """
    sizes = {"vocab_size": 97, "n_positions": 48, "n_layer": 2, "initializer_range": 0.2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    others = sizes | dropout | {"bos_token_id": None, "eos_token_id": None} | options
    config = GPT2Config(n_embd=n_embd, n_head=n_head, **others)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if name.endswith("bias") else 0.2))
    return model


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


# ---- generation ----


def check_tokens(ours, theirs):
    different = where_different(ours, theirs)
    assert different is None, different


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


def with_config(folder, tmp_path, **entries):
    copy = rewrite(folder, tmp_path, lambda tensors: None)
    (copy / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | entries))
    return copy


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}
