"""train.py on data of one's own: its options, what it prints, what it refuses."""

import dataclasses
import sys
import types

import numpy as np
import pytest
import torch
import train
from generate import main as generate_main
from gpt2_model import GPT2, Config
from rich.console import Console
from training import progress
from training.batches import Tokens
from training.data import Data

from kernel_fusion import testing

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tokens(tmp_path):
    """A file of tokens below 300."""
    path = tmp_path / "tokens.bin"
    np.random.default_rng(0).integers(0, 300, 3000).astype(np.uint16).tofile(path)
    return path


SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--vocab-size", "300", "--device", "cpu"]


def test_the_commands_options_reach_the_training(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(train, "train", lambda console, **options: calls.append(options) or "result")
    monkeypatch.setattr(train, "report", lambda console, *arguments: calls.append(arguments))
    train.main(["--device", "cpu"])
    given = {
        "steps": 7, "batch": 6, "accumulate": 3, "context": 5, "rate": 0.5, "warm_up": 2, "weight_decay": 0.3,
        "clip": 2.5, "seed": 3, "dtype": "bfloat16", "device": "meta", "out": tmp_path, "log_every": 4,
        "eval_every": 9, "eval_tokens": 99, "save_every": 8, "keep": 5,
    }  # fmt: skip
    flags = ["--packed", "--recompute", "--graph", "--resume", "--tensorboard"]
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    train.main(words + flags)
    defaults = {
        "steps": 1500, "batch": 8, "accumulate": 1, "context": None, "rate": 3e-3, "warm_up": None,
        "weight_decay": 0.1, "clip": 1.0, "seed": 0, "dtype": "float32", "device": "cpu", "out": train.OUT,
        "log_every": 0, "eval_every": 0, "eval_tokens": 65536, "save_every": 0, "keep": 2, "recompute": False,
        "graph": False, "resume": False, "tensorboard": False, "data": None, "config": train.SMALL, "packed": False,
    }  # fmt: skip
    flagged = dict.fromkeys(["packed", "recompute", "graph", "resume", "tensorboard"], True)
    config = dataclasses.replace(train.SMALL, n_positions=5)
    assert calls == [
        defaults, ("result", "cpu"), defaults | given | flagged | {"config": config}, ("result", "meta"),
    ]  # fmt: skip


def test_a_model_is_chosen_by_its_size_by_a_folder_or_small(tokens, tmp_path):
    def chosen(*words, data=None):
        return train.model_of(train.make_parser().parse_args([*words, "--device", "cpu"]), data)

    with torch.device("meta"):
        assert sum(p.numel() for p in GPT2(chosen("--model", "124M")["config"]).parameters()) == 124_439_808
    widths = [(config.n_layer, config.n_embd) for config in (chosen("--model", size)["config"] for size in train.SIZES)]
    assert widths == [(12, 768), (24, 1024), (36, 1280), (48, 1600)]
    assert chosen("--model", "124M", "--vocab-size", "50304", "--blocks", "v1_torch")["config"] == Config(
        vocab_size=50304, blocks="v1_torch"
    )
    data = train.read(tokens)
    assert chosen(data=data)["config"] == dataclasses.replace(train.SMALL, vocab_size=50257)
    assert chosen(data=data._replace(vocab_size=77))["config"].vocab_size == 77
    GPT2(dataclasses.replace(train.SMALL, n_layer=1)).half().save_pretrained(tmp_path / "half")
    model = chosen("--model", str(tmp_path / "half"), "--blocks", "v2_separate")["model"]
    assert (model.wte.weight.dtype, model.config.n_layer, model.config.blocks) == (torch.float32, 1, "v2_separate")
    with testing.raises(ValueError, "--model must be 124M, 355M, 774M, 1558M or a folder, got '125M'"):
        chosen("--model", "125M")
    with testing.raises(ValueError, "--layers, --width and --heads are a small model's"):
        chosen("--model", "124M", "--layers", "3")
    with testing.raises(ValueError, f"--model {tmp_path} has its own sizes"):
        chosen("--model", str(tmp_path), "--width", "8")


def test_training_on_tokens_going_on_and_fine_tuning(tokens, tmp_path, capsys):
    words = ["--data", str(tokens), "--steps", "6", "--batch", "4", "--accumulate", "2", "--save-every", "3"]
    out = ["--out", str(tmp_path / "out")]
    train.main([*words, *SMALL, *out, "--log-every", "2", "--eval-every", "3", "--resume"])
    printed = capsys.readouterr().out
    assert "2,850 tokens to train on, 150 held out" in printed
    assert "no checkpoint in" in printed
    assert [f"step {number}, loss 5." in printed for number in range(6)] == [True, False] * 3
    assert printed.count(" tokens/s") == 3
    assert "after 3 steps: held-out loss 5." in printed
    assert "held-out loss, nats a token: 5." in printed
    train.main([*words, *SMALL, *out, "--resume"])
    assert "goes on from" in capsys.readouterr().out
    folder = str(tmp_path / "out" / "step-000003")
    train.main([*words, "--device", "cpu", "--model", folder, "--out", str(tmp_path / "fine")])
    assert "GPT-2, 1 layers, width 16" in capsys.readouterr().out
    assert (tmp_path / "fine" / "step-000006" / "model.safetensors").exists()
    with testing.raises(SystemExit, "train.py: train: ", "holds step-000006 of a training: --resume goes on from it"):
        train.main([*words, *SMALL, *out])


def test_a_text_and_its_tokenizer_make_a_model_that_writes(tmp_path, bpe, capsys):
    (tmp_path / "text.txt").write_text("the kernel, the kernel " * 200)
    words = ["--data", str(tmp_path / "text.txt"), "--tokenizer", str(bpe.parent), "--steps", "5", "--batch", "2"]
    train.main(
        [*words, "--layers", "1", "--width", "16", "--heads", "2", "--out", str(tmp_path / "out"), "--device", "cpu"]
    )
    capsys.readouterr()
    generate_main(["--model", str(tmp_path / "out"), "--prompt", "the kernel", "--tokens", "3", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("the kernel")


def some_data(**options):
    tokens = (np.arange(400) % 90).astype(np.uint16)
    return Data(Tokens([tokens[:300]], ["tokens"]), Tokens([tokens[300:]], ["held out"]), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context": 65}, "train: `context` must be at most 64, the model's `n_positions`, got 65"),
        ({"data": some_data(vocab_size=300)}, "train: the model's `vocab_size` must be at least 300, as many as the"),
        ({"packed": True}, "train: `packed` needs data that says where its documents begin"),
        ({"graph": True}, "train: `graph` needs a GPU, for a CUDA graph is captured there, got device cpu"),
        ({"keep": 0}, "train: `keep` must be at least 1, got 0"),
        ({"save_every": -1}, "train: `save_every` must be at least 0, got -1"),
        ({"eval_tokens": 1}, "train: `eval_tokens` must be at least 2, got 1"),
        ({"config": dataclasses.replace(train.SMALL, vocab_size=50)}, "the model's `vocab_size`, 50; tokens has "),
    ],
)  # fmt: skip
def test_training_refuses(options, says, tmp_path):
    with testing.raises(ValueError, says):
        train.train(Console(quiet=True), **{"data": some_data(), "steps": 3, "out": tmp_path} | options)


def test_packed_training_on_tokens_looks_for_the_token_that_ends_a_document(tokens, tmp_path, capsys):
    words = ["--data", str(tokens), "--steps", "2", "--batch", "4", *SMALL, "--packed", "--out", str(tmp_path / "out")]
    with testing.raises(SystemExit, "train.py: --end-of-text must be below the model's `vocab_size`, 300, got 50256"):
        train.main(words)
    losses = []
    for end_of_text in ("7", "299"):
        train.main([*words, "--end-of-text", end_of_text])
        losses.append(capsys.readouterr().out.split("held-out loss, nats a token: ")[1].split()[0])
    assert len(set(losses)) == 2


def test_tensorboard_is_refused_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with testing.raises(ValueError, "--tensorboard takes the package `tensorboard`, which is not installed"):
        train.train(Console(quiet=True), data=some_data(), steps=3, out=tmp_path, tensorboard=True)


def test_tensorboard_gets_losses_rates_and_speed(tmp_path, monkeypatch):
    got = {}

    class Writer:
        def __init__(self, folder, purge_step):
            got["folder"], got["from"] = folder, purge_step

        def add_scalar(self, name, value, step):
            got.setdefault(name, {})[step] = value

        def close(self):
            got["closed"] = True

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    options = {"data": some_data(), "steps": 5, "out": tmp_path, "log_every": 2, "eval_every": 2, "tensorboard": True}
    result = train.train(Console(quiet=True), **options)
    assert (got["folder"], got["from"], got["closed"]) == (str(tmp_path / "tensorboard"), 0, True)
    assert list(got["loss"]) == list(got["rate"]) == list(got["tokens a second"]) == [0, 2, 4]
    assert got["rate"][4] == pytest.approx(3e-4)
    assert list(got["held_out_loss"]) == [1, 3, 5]
    assert got["held_out_loss"][5] == result.loss


def test_the_peak_is_told_of_known_gpus_alone():
    assert progress.peak_of("NVIDIA H100 80GB HBM3") == progress.peak_of("NVIDIA H200") == 989e12
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GH200 480GB"):
        assert progress.peak_of(name) is None


def test_speed_and_mfu(monkeypatch):
    with torch.device("meta"):
        model = GPT2(Config())
    assert progress.flops_of_token(model, 1024) == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024
    clock = iter([100.0, 102.0, 102.0])
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    speed = progress.Speed(model, 1024, torch.bfloat16)
    assert speed.peak is None
    speed.peak, speed.tokens = 989e12, 1_000_000
    found = speed.look()
    assert found == {"tokens a second": 500_000, "MFU": pytest.approx(0.4323, rel=1e-3)}
    assert progress.in_words(found | {"memory": 23.1e9}) == ", 500,000 tokens/s, MFU 43.2%, peak 23.1 GB"
    assert speed.tokens == 0


def test_lines_are_printed_now_and_then_or_each(capsys):
    for every, count in ((False, 5), (True, 100)):
        with progress.shown(Console(), every=every) as show:
            for number in range(100):
                show(number / 100, "note")
        assert capsys.readouterr().out.count("note") == count
