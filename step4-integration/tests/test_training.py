"""Training: the bar, the split, an optimiser's step written out by hand, and the loop around it.

python -m pytest tests/test_training.py            pytest's options may follow, such as -k schedule
"""

import copy
import dataclasses
import io
import itertools
import math
import pathlib
import types

import pytest
import torch
import torch.nn.functional as F
import train
from generate import main as generate_main
from gpt2_model import GPT2
from rich.console import Console
from rich.progress import Progress
from transformers import GPT2LMHeadModel

from kernel_fusion import testing

NAN = float("nan")

on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
fused_or_separate = pytest.mark.parametrize("fused", [True, False], ids=["fused", "separate"])


# ---- the text, and the bar ----


def as_text(text: str) -> torch.Tensor:
    return train.as_bytes(text.encode())


def test_the_bigram_models_probabilities_sum_to_one():
    bigram = train.Bigram(as_text("abracadabra " * 50))
    assert bigram.weights.sum().item() == pytest.approx(1)
    for first in (ord("a"), ord("z")):  # a byte that was seen, and one that never was
        pairs = torch.tensor([[first, second] for second in range(256)], dtype=torch.uint8)
        total = sum((bigram._parts(pair) @ bigram.weights).item() for pair in pairs)
        assert total == pytest.approx(1)


def test_the_bigram_model_is_as_good_as_its_text_allows():
    generator = torch.Generator().manual_seed(0)
    # The next byte is the one before plus 0 or 1, each with probability 1/2: no model can do better than log 2.
    steps = torch.randint(2, (20_000,), generator=generator)
    chain = (steps.cumsum(0) % 7 + 65).to(torch.uint8)
    bigram = train.Bigram(chain[:15_000])
    assert bigram.loss(chain[15_000:]) == pytest.approx(math.log(2), abs=0.01)
    assert bigram.weights[0] > 0.98
    # Independent bytes: pairs say nothing, and the loss is the entropy.
    noise = torch.randint(65, 73, (20_000,), generator=generator).to(torch.uint8)
    assert train.Bigram(noise[:15_000]).loss(noise[15_000:]) == pytest.approx(math.log(8), abs=0.01)


def test_the_bigram_model_counts_all_of_its_text():
    text = as_text("z" + "ab" * 500)
    bigram = train.Bigram(text)
    assert bigram.single[ord("z")].item() == pytest.approx(1 / 1001)
    assert bigram.single[ord("a")].item() == pytest.approx(500 / 1001)
    assert bigram.after[ord("z"), ord("a")].item() == 1


def test_the_bigram_models_weights_are_not_fitted_on_what_was_counted():
    """Pairs of random bytes say nothing; on the text that they were counted in they would seem to say all."""
    noise = torch.randint(256, (3000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert train.Bigram(noise).weights[0] < 0.05


def test_the_fitted_weights_beat_any_single_part():
    text = as_text("".join(path.read_text() for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py"))))
    bigram = train.Bigram(text[:20_000])
    held_out = text[20_000:30_000]
    fitted = bigram.loss(held_out)
    for weights in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1 / 3, 1 / 3, 1 / 3]):
        bigram.weights = torch.tensor(weights, dtype=torch.float64)
        assert fitted < bigram.loss(held_out)


def numbered(pieces):
    """A text of so many pieces that all differ, and end in a piece that is not full."""
    return b"".join(b"%07d " % number * (train.PIECE // 8) for number in range(pieces)) + b"the end"


def pieces_of(text):
    return {bytes(piece.tolist()) for piece in text.split(train.PIECE)}


def test_the_split_is_the_same_each_time_and_holds_a_tenth_out():
    documents = [numbered(99), numbered(3)[train.PIECE :]]
    text, held_out = train.split(documents)
    again = train.split(documents)
    assert torch.equal(text, again[0])
    assert torch.equal(held_out, again[1])
    assert pieces_of(held_out) == {b"%07d " % number * (train.PIECE // 8) for number in range(9, 99, 10)} | {b"the end"}
    assert len(text) + len(held_out) == sum(map(len, documents))
    with testing.raises(ValueError, "split: `documents` must hold at least 20 pieces"):
        train.split([b"short"])


def test_nothing_of_the_held_out_text_is_trained_on():
    text, held_out = train.split([numbered(700)])
    assert len(held_out) == 24 * train.PIECE  # of 70 pieces, spread over all of the text
    assert len(text) == len(numbered(700)) - 70 * train.PIECE
    assert not pieces_of(text) & pieces_of(held_out)
    assert max(pieces_of(held_out)) > b"%07d" % 650


def test_the_repositorys_documents_are_read():
    documents = train.read_documents()
    assert pathlib.Path(__file__).read_bytes() in documents
    assert sum(map(len, documents)) > 100_000
    assert train.read_documents() == documents


def test_what_is_built_installed_or_hidden_is_no_document(tmp_path):
    texts = {
        "b.md": b"two", "a/c.cu": b"one", "a/d.txt": b"three", "z.h": b"four", "x.cpp": b"five", "y.py": b"six",
        "build/e.md": b"-", "a/build/f.py": b"-",
        "out/g.txt": b"-", ".venv/h.py": b"-", "node_modules/i.md": b"-", "kf.egg-info/j.txt": b"-", "k.bin": b"-",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert train.read_documents(tmp_path) == [b"one", b"three", b"two", b"five", b"six", b"four"]


TINY = dataclasses.replace(train.SMALL, n_positions=16, n_layer=1, n_embd=32, n_head=2)


@fused_or_separate
@pytest.mark.parametrize("length", [2, 16, 17, 33, 51])
def test_evaluate_is_the_mean_loss_of_every_byte(length, fused):
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, fused=fused))
    text = as_text("every byte but the first is predicted exactly once.")[:length]
    losses = []
    with torch.no_grad():
        for start in range(0, len(text) - 1, 16):
            window = text[start : start + 17].long()
            losses.append(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none"))
    assert train.evaluate(model, text, batch=2) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert len(torch.cat(losses)) == len(text) - 1


def test_evaluate_needs_a_byte_to_predict():
    with testing.raises(ValueError, "evaluate: `text` must hold at least 2 bytes, got 1"):
        train.evaluate(GPT2(TINY), as_text("a"))


# ---- a step ----


def test_windows_begin_at_every_byte_and_reach_the_last():
    text = torch.arange(60, dtype=torch.uint8)
    windows = train.random_windows(text, 2000, 11, torch.Generator().manual_seed(0))
    assert set(windows[:, 0].tolist()) == set(range(50))
    assert torch.equal(windows - windows[:, :1], torch.arange(11, dtype=torch.uint8).expand(2000, 11))
    assert torch.equal(train.random_windows(text[:11], 3, 11, torch.Generator()), text[:11].expand(3, 11))
    with testing.raises(ValueError, "random_windows: `text` must hold at least 11 bytes, got 10"):
        train.random_windows(text[:10], 3, 11, torch.Generator())


@fused_or_separate
@pytest.mark.parametrize("clipped", [True, False], ids=["clipped", "not clipped"])
def test_steps_of_training_are_adamws_written_out(clipped, fused):
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, fused=fused, initializer_range=0.02)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # decay would not show on biases of 0
            parameter.add_(0.02 * torch.randn_like(parameter))
    by_hand = copy.deepcopy(model)
    optimizer = train.optimizer_of(model, 1.0)  # each step brings its own rate
    generator = torch.Generator().manual_seed(0)
    first = {name: torch.zeros_like(p) for name, p in by_hand.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in by_hand.named_parameters()}

    for number, rate in enumerate([2e-3, 5e-3, 1e-3], start=1):
        windows = torch.randint(256, (2 if clipped else 60, 17), generator=generator, dtype=torch.uint8)
        loss = train.cross_entropy(by_hand, windows)
        gradients = dict(zip(first, torch.autograd.grad(loss, [p for _, p in by_hand.named_parameters()]), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        assert (norm > 1) == clipped
        with torch.no_grad():
            for name, parameter in by_hand.named_parameters():
                gradient = gradients[name] * (1 / (norm + 1e-6) if clipped else 1)
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
                decay = 0.1 if parameter.dim() == 2 else 0.0  # of matrices alone
                mean, mean_of_squares = first[name] / (1 - 0.9**number), second[name] / (1 - 0.95**number)
                parameter -= rate * (decay * parameter + mean / (mean_of_squares.sqrt() + 1e-8))

        assert train.step(model, optimizer, windows, rate).item() == loss.item()
        for (name, got), want in zip(model.named_parameters(), by_hand.parameters(), strict=True):
            difference = (got - want).abs().max().item()
            assert difference < 1e-6 * rate, f"step {number}: `{name}` is {difference:.2g} off"


@pytest.mark.usefixtures("one_thread")
@fused_or_separate
@on_each_device
def test_a_few_steps_of_training_lower_the_loss(device, fused):
    torch.manual_seed(0)
    config = dataclasses.replace(train.SMALL, n_positions=32, n_layer=2, n_embd=64, n_head=2, fused=fused)
    model = GPT2(config).to(device)
    text = as_text("the kernel reads what the kernel before it wrote, " * 40)
    optimizer = train.optimizer_of(model, 3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(25):
        windows = train.random_windows(text, 4, 33, generator).to(device)
        losses.append(train.step(model, optimizer, windows, 3e-3).item())
    assert losses[0] > 5
    assert losses[-1] < 0.6 * losses[0]


def test_the_schedule_rises_and_falls():
    assert train.schedule(0.0) == 0
    assert train.schedule(0.01) == pytest.approx(0.2)
    assert train.schedule(0.0499) == pytest.approx(0.998)
    assert train.schedule(0.05) == pytest.approx(1)
    assert train.schedule(0.05 + 0.95 / 4) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert train.schedule(0.525) == pytest.approx(0.55)
    assert train.schedule(1.0) == pytest.approx(0.1)
    assert train.schedule(7.0) == pytest.approx(0.1)


# ---- the loop ----


class Loop:
    """What `train.train` did: spies in its loop, and a clock that moves on by a second each time it is read."""

    def __init__(self, monkeypatch, tmp_path, **options):
        self.documents = [numbered(20), b"To be read, to be learned, to be written again. " * 200]
        self.rates, self.windows, self.threads, self.saves, self.models = [], [], [], [], []
        clock = itertools.count(100)
        monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
        step, save = train.step, GPT2.save_pretrained

        def spy_on_step(model, optimizer, windows, rate):
            self.models.append(copy.deepcopy(model))
            self.windows.append(windows)
            self.rates.append(rate)
            self.threads.append(torch.get_num_threads())
            return step(model, optimizer, windows, rate)

        def spy_on_save(model, *arguments, **entries):
            self.saves.append(len(self.rates))
            save(model, *arguments, **entries)

        monkeypatch.setattr(train, "step", spy_on_step)
        monkeypatch.setattr(GPT2, "save_pretrained", spy_on_save)
        options = {"steps": 20, "config": TINY, "batch": 3, "seed": 5, "rate": 2e-3} | options
        self.result = train.train(Console(width=120), **options, out=tmp_path / "small", documents=self.documents)


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.usefixtures("one_thread")
def test_the_loop_takes_its_steps_and_saves_at_each_quarter(monkeypatch, tmp_path, capsys):
    loop = Loop(monkeypatch, tmp_path)
    assert loop.result.steps == len(loop.rates) == 20
    assert loop.rates == [pytest.approx(2e-3 * train.schedule(number / 20)) for number in range(1, 21)]
    assert loop.saves == [5, 10, 15, 20]
    assert (loop.result.seconds, loop.result.folder) == (1, tmp_path / "small")
    printed = capsys.readouterr().out
    assert "step 0, loss 5." in printed
    assert "step 10, loss " in printed
    loop = Loop(monkeypatch, tmp_path, steps=1)
    assert (loop.result.steps, loop.saves) == (1, [1])
    assert Loop(monkeypatch, tmp_path, steps=6).saves == [2, 3, 5, 6]


@pytest.mark.usefixtures("one_thread")
def test_the_loop_draws_its_windows_from_the_training_text_alone(monkeypatch, tmp_path):
    loop = Loop(monkeypatch, tmp_path)
    text, _ = train.split(loop.documents)
    generator = torch.Generator().manual_seed(5)
    for windows in loop.windows:
        assert torch.equal(windows, train.random_windows(text, 3, 17, generator))


@pytest.mark.usefixtures("one_thread")
def test_the_losses_are_those_of_the_held_out_text(monkeypatch, tmp_path):
    loop = Loop(monkeypatch, tmp_path)
    text, held_out = train.split(loop.documents)
    saved = GPT2.from_pretrained(loop.result.folder)
    assert loop.result.loss == pytest.approx(train.evaluate(saved, held_out), rel=1e-5)
    assert loop.result.loss != pytest.approx(train.evaluate(saved, text), rel=1e-3)
    bigram = train.Bigram(text)
    assert loop.result.bigram_loss == bigram.loss(held_out)
    assert loop.result.bigram_loss != pytest.approx(bigram.loss(text), rel=1e-3)


@pytest.mark.usefixtures("one_thread")
def test_a_seed_repeats_a_training(monkeypatch, tmp_path):
    first, again, other = (Loop(monkeypatch, tmp_path, steps=4, seed=seed) for seed in (5, 5, 6))
    assert same_weights(first.models[0], again.models[0])
    assert same_weights(first.models[-1], again.models[-1])
    assert not same_weights(first.models[0], other.models[0])
    assert not same_weights(first.models[0], first.models[-1])


def test_training_uses_one_thread_and_gives_the_others_back(monkeypatch, tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        loop = Loop(monkeypatch, tmp_path, steps=3)
        assert set(loop.threads) == {1}
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), train.one_thread():
            1 / 0  # noqa: B018
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_a_loss_that_is_no_number_ends_the_training(monkeypatch, tmp_path):
    with testing.raises(RuntimeError, "train: the loss of step 10 is nan"):
        Loop(monkeypatch, tmp_path, rate=1e30)


@pytest.mark.usefixtures("one_thread")
def test_a_checkpoint_that_cannot_be_written_ends_the_training(monkeypatch, tmp_path):
    (tmp_path / "small").write_text("a file where the folder should be")
    with testing.raises(OSError, "small"):
        Loop(monkeypatch, tmp_path)
    monkeypatch.setattr(train, "train", lambda *a, **kw: GPT2(TINY).save_pretrained(kw["out"]))
    with testing.raises(SystemExit, "train.py: ", "small"):
        train.main(["--out", str(tmp_path / "small")])


def test_training_saves_a_model_that_both_can_read(tmp_path, capsys):
    documents = [b"To be read, to be learned, to be written again. " * 1000]
    config = dataclasses.replace(train.SMALL, n_positions=32, n_layer=1, n_embd=32, n_head=2)
    console = Console(width=120)
    result = train.train(console, steps=40, config=config, out=tmp_path / "small", documents=documents, batch=2)
    assert result.steps == 40
    printed = capsys.readouterr().out
    assert "bigram" in printed
    assert "held out" in printed
    ids = train.as_bytes(b"to be read")[None].long()
    ours = GPT2.from_pretrained(result.folder)
    theirs = GPT2LMHeadModel.from_pretrained(result.folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(train.paragraph(result.folder, "To be", length=90).encode(errors="replace")) >= 80
    generate_main(["--model", str(result.folder), "--prompt", "To be", "--tokens", "12", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("To be")


def test_a_model_that_is_no_better_than_bigrams_is_a_failure(tmp_path):
    result = train.Result(loss=3.0, bigram_loss=2.5, steps=1, seconds=1.0, folder=tmp_path)
    with testing.raises(RuntimeError, "after 1 steps the", "3.000 is not below the bigram model's 2.500", "--steps"):
        train.report(Console(quiet=True), result)
    with testing.raises(RuntimeError, "not below"):
        train.report(Console(quiet=True), result._replace(loss=NAN))


def test_a_report_shows_both_losses_and_what_the_model_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train, "paragraph", lambda folder, device: f"[{folder.name}]")
    result = train.Result(loss=1.5, bigram_loss=2.5, steps=7, seconds=1.0, folder=tmp_path / "small")
    train.report(Console(width=200), result)
    printed = capsys.readouterr().out
    assert "GPT-2 1.500, bigram 2.500 (7 steps, 1 s; saved in" in printed
    assert "[small]" in printed


def test_a_paragraph_goes_on_where_the_model_left_off(monkeypatch, tmp_path):
    GPT2(TINY).save_pretrained(tmp_path)
    prompts = []

    def counting(model, ids, tokens, **options):
        prompts.append(bytes(ids[0].tolist()))
        assert ids.shape[1] + tokens <= model.config.n_positions
        return torch.cat([ids, torch.arange(tokens)[None] + 97], dim=1)

    monkeypatch.setattr(train, "generate", counting)
    assert train.paragraph(tmp_path, "Once upon a time", length=30) == "Once upon a timeabcdefghabcdef"
    assert prompts == [b"n a time", b"abcdefgh"]


def test_a_bar_on_a_terminal_is_as_full_as_the_training_is_done(monkeypatch):
    bars = []

    def spy(*arguments, **options):
        bars.append(Progress(*arguments, **options))
        return bars[-1]

    monkeypatch.setattr(train, "Progress", spy)
    printed = io.StringIO()
    with train.shown(Console(file=printed, force_terminal=True, width=80)) as show:
        (task,) = bars[0].tasks
        for progress in (0.25, 0.5):
            show(progress, f"{progress} done")
            assert (task.percentage, task.fields["note"]) == (100 * progress, f"{progress} done")
    assert "100%" in printed.getvalue()


def test_train_refuses_no_steps():
    with testing.raises(ValueError, "train: `steps` must be at least 1, got 0"):
        train.train(Console(quiet=True), steps=0)


def test_the_command_ends_with_a_message_and_a_code():
    with testing.raises(SystemExit, "train.py: train: `steps` must be at least 1, got -1"):
        train.main(["--steps", "-1"])


def test_the_commands_options_reach_the_training(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(train, "train", lambda console, **options: calls.append(options) or "result")
    monkeypatch.setattr(train, "report", lambda console, *arguments: calls.append(arguments))
    train.main(["--device", "cpu"])
    train.main(["--steps", "7", "--device", "meta", "--out", str(tmp_path), "--seed", "3"])
    assert calls == [
        {"steps": 1500, "device": "cpu", "out": train.OUT, "seed": 0}, ("result", "cpu"),
        {"steps": 7, "device": "meta", "out": tmp_path, "seed": 3}, ("result", "meta"),
    ]  # fmt: skip
