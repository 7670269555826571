"""Training: the repository's text and the bar, the loop, what it prints. A step, data and checkpoints have files of
their own.

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
from training import documents, progress, worker
from training.optimizer import schedule
from transformers import GPT2LMHeadModel

from kernel_fusion import testing
from step4_integration.gpt2_testing import each_form

NAN = float("nan")
pytestmark = pytest.mark.usefixtures("one_thread")

# ---- the text, and the bar ----


def as_text(text: str) -> torch.Tensor:
    return documents.as_bytes(text.encode())


def test_the_bigram_models_probabilities_sum_to_one():
    bigram = documents.Bigram(as_text("abracadabra " * 50))
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
    bigram = documents.Bigram(chain[:15_000])
    assert bigram.loss(chain[15_000:]) == pytest.approx(math.log(2), abs=0.01)
    assert bigram.weights[0] > 0.98
    # Independent bytes: pairs say nothing, and the loss is the entropy.
    noise = torch.randint(65, 73, (20_000,), generator=generator).to(torch.uint8)
    assert documents.Bigram(noise[:15_000]).loss(noise[15_000:]) == pytest.approx(math.log(8), abs=0.01)


def test_the_bigram_model_counts_all_of_its_text():
    text = as_text("z" + "ab" * 500)
    bigram = documents.Bigram(text)
    assert bigram.single[ord("z")].item() == pytest.approx(1 / 1001)
    assert bigram.single[ord("a")].item() == pytest.approx(500 / 1001)
    assert bigram.after[ord("z"), ord("a")].item() == 1


def test_the_bigram_models_weights_are_not_fitted_on_what_was_counted():
    """Pairs of random bytes say nothing; on the text that they were counted in they would seem to say all."""
    noise = torch.randint(256, (3000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert documents.Bigram(noise).weights[0] < 0.05


def test_the_fitted_weights_beat_any_single_part():
    text = as_text("".join(path.read_text() for path in sorted(pathlib.Path(__file__).parent.glob("test_*.py"))))
    bigram = documents.Bigram(text[:20_000])
    held_out = text[20_000:30_000]
    fitted = bigram.loss(held_out)
    for weights in ([1, 0, 0], [0, 1, 0], [0, 0, 1], [1 / 3, 1 / 3, 1 / 3]):
        bigram.weights = torch.tensor(weights, dtype=torch.float64)
        assert fitted < bigram.loss(held_out)


def numbered(pieces):
    """A text of so many pieces that all differ, and end in a piece that is not full."""
    return b"".join(b"%07d " % number * (documents.PIECE // 8) for number in range(pieces)) + b"the end"


def pieces_of(text):
    return {bytes(piece.tolist()) for piece in text.split(documents.PIECE)}


def test_the_split_is_the_same_each_time_and_holds_a_tenth_out():
    texts = [numbered(99), numbered(3)[documents.PIECE :]]
    text, held_out = documents.split(texts)
    again = documents.split(texts)
    assert torch.equal(text, again[0])
    assert torch.equal(held_out, again[1])
    whole = {b"%07d " % number * (documents.PIECE // 8) for number in range(9, 99, 10)}
    assert pieces_of(held_out) == whole | {b"the end"}
    assert len(text) + len(held_out) == sum(map(len, texts))


def test_documents_of_the_split_begin_where_files_do_and_behind_gaps():
    texts = [numbered(12), b"", numbered(20)]
    begins = [
        [int(bytes(text[start : start + 7].tolist())) for start in starts]
        for text, starts in zip(documents.split(texts), documents.split_starts(texts), strict=True)
    ]
    assert begins == [[0, 10, 0, 7, 17], [9, 6, 16]]


def test_nothing_of_the_held_out_text_is_trained_on():
    text, held_out = documents.split([numbered(700)])
    assert len(held_out) == 24 * documents.PIECE  # of 70 pieces, spread over all of the text
    assert len(text) == len(numbered(700)) - 70 * documents.PIECE
    assert not pieces_of(text) & pieces_of(held_out)
    assert max(pieces_of(held_out)) > b"%07d" % 650


def test_the_repositorys_documents_are_read():
    texts = documents.read_documents()
    assert pathlib.Path(__file__).read_bytes() in texts
    assert sum(map(len, texts)) > 100_000
    assert documents.read_documents() == texts


def test_what_is_built_installed_or_hidden_is_no_document(tmp_path):
    texts = {
        "b.md": b"two", "a/c.cu": b"one", "a/d.txt": b"three", "z.h": b"four", "x.cpp": b"five", "y.py": b"six",
        "build/e.md": b"-", "a/build/f.py": b"-",
        "out/g.txt": b"-", ".venv/h.py": b"-", "node_modules/i.md": b"-", "kf.egg-info/j.txt": b"-", "k.bin": b"-",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert documents.read_documents(tmp_path) == [b"one", b"three", b"two", b"five", b"six", b"four"]


TINY = dataclasses.replace(train.SMALL, n_positions=16, n_layer=1, n_embd=32, n_head=2)


@each_form
@pytest.mark.parametrize("length", [2, 16, 17, 33, 51])
def test_evaluate_is_the_mean_loss_of_every_byte(length, blocks):
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, blocks=blocks))
    text = as_text("every byte but the first is predicted exactly once.")[:length]
    losses = []
    with torch.no_grad():
        for start in range(0, len(text) - 1, 16):
            window = text[start : start + 17].long()
            losses.append(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none"))
    assert train.evaluate(model, text, batch=2) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    assert len(torch.cat(losses)) == len(text) - 1


@each_form
def test_evaluate_of_documents_is_that_of_each_alone(blocks):
    """But where a window ends."""
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, blocks=blocks))
    text = as_text("no document sees another, nor is its first byte predicted")
    begins = torch.zeros(len(text), dtype=torch.bool)
    begins[[0, 3, 16, 17, 32, 40]] = True
    parts = [(0, 3), (3, 16), (17, 32), (32, 40), (40, 49), (48, 57)]  # 48: as a target, and then as an input
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(text[None, a : b - 1].long())[0], text[a + 1 : b].long(), reduction="none")
            for a, b in parts
        ]
    assert train.evaluate(model, text, batch=2, begins=begins) == pytest.approx(
        torch.cat(losses).mean().item(), rel=1e-5
    )


def test_evaluate_needs_a_byte_to_predict():
    with testing.raises(ValueError, "evaluate: `text` must hold at least 2 tokens, got 1"):
        train.evaluate(GPT2(TINY), as_text("a"))


# ---- the loop ----


class Loop:
    """What `train.train` did: spies in its loop, and a clock that moves on by a second each time it is read."""

    def __init__(self, monkeypatch, tmp_path, **options):
        self.documents = [numbered(20), b"To be read, to be learned, to be written again. " * 200]
        self.rates, self.windows, self.threads, self.saves, self.models = [], [], [], [], []
        clock = itertools.count(100)
        monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
        step, save = worker.step, GPT2.save_pretrained

        def spy_on_step(model, optimizer, parts, rate, **options):
            self.models.append(copy.deepcopy(model))
            self.windows += parts
            self.rates.append(rate)
            self.threads.append(torch.get_num_threads())
            return step(model, optimizer, parts, rate, **options)

        def spy_on_save(model, *arguments, **entries):
            self.saves.append(len(self.rates))
            save(model, *arguments, **entries)

        monkeypatch.setattr(worker, "step", spy_on_step)
        monkeypatch.setattr(GPT2, "save_pretrained", spy_on_save)
        options = {"steps": 20, "config": TINY, "batch": 3, "seed": 5, "rate": 2e-3} | options
        self.result = train.train(Console(width=120), **options, out=tmp_path / "small", documents=self.documents)


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_loop_takes_its_steps_and_saves_at_each_quarter(monkeypatch, tmp_path, capsys):
    loop = Loop(monkeypatch, tmp_path)
    assert loop.result.steps == len(loop.rates) == 20
    assert loop.rates == [pytest.approx(2e-3 * schedule(number / 20)) for number in range(1, 21)]
    assert loop.saves == [5, 10, 15, 20]
    assert (loop.result.seconds, loop.result.folder) == (1, tmp_path / "small")
    printed = capsys.readouterr().out
    assert "step 0, loss 5." in printed
    assert "step 10, loss " in printed
    loop = Loop(monkeypatch, tmp_path, steps=1)
    assert (loop.result.steps, loop.saves) == (1, [1])
    assert Loop(monkeypatch, tmp_path, steps=6).saves == [2, 3, 5, 6]


def test_the_loop_draws_its_windows_from_the_training_text_alone(monkeypatch, tmp_path):
    loop = Loop(monkeypatch, tmp_path)
    text, held_out = (bytes(part.tolist()) for part in documents.split(loop.documents))
    windows = [bytes(window.tolist()) for batch in loop.windows for window in batch]
    assert len(windows) == 60
    assert all(window in text for window in windows)
    learned = b"To be read, to be learned, to be written again. "  # is in both parts
    assert not any(window in held_out for window in windows if window not in learned * 3)


def test_the_losses_are_those_of_the_held_out_text(monkeypatch, tmp_path):
    loop = Loop(monkeypatch, tmp_path)
    text, held_out = documents.split(loop.documents)
    saved = GPT2.from_pretrained(loop.result.folder)
    assert loop.result.loss == pytest.approx(train.evaluate(saved, held_out), rel=1e-5)
    assert loop.result.loss != pytest.approx(train.evaluate(saved, text), rel=1e-3)
    bigram = documents.Bigram(text)
    assert loop.result.bigram_loss == bigram.loss(held_out)
    assert loop.result.bigram_loss != pytest.approx(bigram.loss(text), rel=1e-3)


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
        with pytest.raises(ZeroDivisionError), progress.one_thread():
            1 / 0  # noqa: B018
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_loss_that_is_no_number_ends_the_training(monkeypatch, tmp_path):
    with testing.raises(RuntimeError, "train: the loss of step 10 is nan"):
        Loop(monkeypatch, tmp_path, rate=1e30)


def test_training_saves_a_model_that_both_can_read(tmp_path, capsys):
    texts = [b"To be read, to be learned, to be written again. " * 1000]
    config = dataclasses.replace(train.SMALL, n_positions=32, n_layer=1, n_embd=32, n_head=2)
    console = Console(width=120)
    result = train.train(console, steps=40, config=config, out=tmp_path / "small", documents=texts, batch=2)
    assert result.steps == 40
    printed = capsys.readouterr().out
    assert "bigram" in printed
    assert "held out" in printed
    ids = documents.as_bytes(b"to be read")[None].long()
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

    monkeypatch.setattr(progress, "Progress", spy)
    printed = io.StringIO()
    with progress.shown(Console(file=printed, force_terminal=True, width=80)) as show:
        (task,) = bars[0].tasks
        for done in (0.25, 0.5):
            show(done, f"{done} done")
            assert (task.percentage, task.fields["note"]) == (100 * done, f"{done} done")
    assert "100%" in printed.getvalue()
