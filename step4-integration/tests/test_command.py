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
    ways = ("separate", "fused", "transformers")
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

    def spy(model, ids, tokens, *, on_token, **options):
        calls.append((model, ids, tokens, options))
        on_token(torch.tensor([33]))

    monkeypatch.setattr("generate.generate", spy)
    required = ["--model", str(copy), "--prompt", "#$", "--device", "cpu"]
    generate_main(required)
    generate_main(
        [*required, "--tokens", "5", "--temperature", "0.5", "--top-k", "7", "--seed", "3", "--separate", "--dtype",
         "bfloat16"]
    )  # fmt: skip
    assert capsys.readouterr().out == "#$!\n#$!\n"
    (model, ids, tokens, options), (other, other_ids, other_tokens, other_options) = calls
    assert ids.tolist() == other_ids.tolist() == [[35, 36]]
    assert (tokens, other_tokens) == (100, 5)
    assert options == {"temperature": 0.0, "top_k": None, "seed": None}
    assert other_options == {"temperature": 0.5, "top_k": 7, "seed": 3}
    assert (model.config.fused, other.config.fused) == (True, False)
    assert (model.wte.weight.dtype, other.wte.weight.dtype) == (torch.float32, torch.bfloat16)


def test_the_command_ends_with_a_message_and_a_code(tmp_path):
    with testing.raises(SystemExit, "generate.py:", "config.json is missing"):
        generate_main(["--model", str(tmp_path), "--prompt", "x"])
