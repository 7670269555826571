"""The commands that generate and that measure, and tokenizers."""

import dataclasses
import sys

import benchmark_gpt2
import gpt2_model
import pytest
import torch
import train
from generate import ByteTokenizer, FileTokenizer, read_tokenizer
from generate import main as generate_main
from gpt2_model import GPT2
from model.blocks import FORMS

from kernel_fusion import testing
from kernel_fusion.report import results
from step4_integration.gpt2_testing import with_config


def test_the_benchmark_of_models_writes_what_it_measured(tmp_path, monkeypatch):
    """A model of one layer, since only what is written counts here."""
    path = tmp_path / "results.json"
    monkeypatch.setitem(gpt2_model.SIZES, "gpt2", gpt2_model.Config(n_embd=32, n_layer=1, n_head=2))
    monkeypatch.setitem(benchmark_gpt2.CASES, "cpu", [("prefill", "gpt2", 1, 8), ("train", "gpt2", 1, 8)])
    monkeypatch.setattr(sys, "argv", ["benchmark_gpt2.py", "--device", "cpu", "--output", str(path)])
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", "0.1")
    with pytest.raises(SystemExit, match="0"):
        benchmark_gpt2.main()
    rows = [(row["op"], row["impl"], row["correct"]) for row in results.read(path).rows]
    ways = (*FORMS, "transformers")
    assert rows == [(f"gpt2_{what}", way, True) for what in ("prefill", "train") for way in ways]


def test_bytes_become_characters_when_they_are_complete():
    show = ByteTokenizer().stream()
    encoded = ByteTokenizer().encode("aé→")
    assert [show(byte) for byte in encoded] == ["a", "", "é", "", "", "→"]


def test_a_tokenizer_of_the_hub_reads_and_writes_text(bpe):
    ids = FileTokenizer(bpe).encode("the é→")
    assert len(ids) < len("the é→".encode())  # "the" is fewer tokens than letters
    show = FileTokenizer(bpe).stream()
    pieces = [show(token) for token in ids]
    assert "".join(pieces) == "the é→"
    assert "" in pieces  # a token that ends within a character shows nothing yet


def test_the_tokenizer_is_the_models(bpe, folder, tmp_path):
    copy = with_config(folder, tmp_path)
    with testing.raises(FileNotFoundError, "tokenizer.json is missing"):
        read_tokenizer(copy)
    (copy / "tokenizer.json").write_bytes(bpe.read_bytes())
    assert isinstance(read_tokenizer(copy), FileTokenizer)
    (tmp_path / "of bytes").mkdir()
    assert isinstance(read_tokenizer(with_config(folder, tmp_path / "of bytes", tokenizer="bytes")), ByteTokenizer)


def test_the_commands_options_reach_the_model(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "with room for 100 tokens"
    GPT2(dataclasses.replace(train.SMALL, n_positions=128)).save_pretrained(copy, tokenizer="bytes")
    calls = []

    def spy(model, prompts, tokens, *, on_token, **options):
        calls.append((model, prompts, tokens, options))
        if on_token:
            on_token(torch.tensor([33]))
        rows = len(prompts) * options["samples"]
        return [torch.tensor([35, 36, 33])] * rows, torch.tensor([[-0.5]] * rows)

    monkeypatch.setattr("generate.generate", spy)
    required = ["--model", str(copy), "--prompt", "#$", "--device", "cpu"]
    generate_main(required)
    more = ["--tokens", "5", "--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1",
            "--repetition-penalty", "1.3", "--seed", "3", "--blocks", "v1_torch", "--dtype", "bfloat16", "--stop", "%",
            "--samples", "2", "--window", "--log-probs", "--prompt", "x"]  # fmt: skip
    generate_main([*required, *more])
    said = "log-probability of its 1 new tokens: -0.500\n"
    lines = [f"[{row}] {prompt}!\n{said}" for row, prompt in enumerate(["#$", "#$", "x", "x"], start=1)]
    assert capsys.readouterr().out == "#$!\n" + "".join(lines)
    (model, prompts, tokens, options), (other, other_prompts, other_tokens, other_options) = calls
    assert (prompts, other_prompts) == ([[35, 36]], [[35, 36], [120]])
    assert (tokens, other_tokens) == (100, 5)
    assert options == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
                       "seed": None, "samples": 1, "stop": [], "window": False, "return_log_probs": True}  # fmt: skip
    assert other_options == {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3,
                             "seed": 3, "samples": 2, "stop": [37], "window": True,
                             "return_log_probs": True}  # fmt: skip
    assert (model.config.blocks, other.config.blocks) == ("v4_products", "v1_torch")
    assert (model.wte.weight.dtype, other.wte.weight.dtype) == (torch.float32, torch.bfloat16)
