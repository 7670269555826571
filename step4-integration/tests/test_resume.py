"""Checkpoints: a training that goes on is the one that was not interrupted, bit for bit, wherever it was killed."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import train
from gpt2_model import GPT2
from rich.console import Console
from torch.nn import functional as F
from training import checkpoint
from training.batches import Tokens
from training.data import Data
from training.optimizer import optimizer_of
from training.step import step

import step1_simple
from kernel_fusion import steps, testing

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = pathlib.Path(__file__).parent
TINY = dataclasses.replace(train.SMALL, vocab_size=100, n_positions=8, n_layer=1, n_embd=16, n_head=2)


def some_data(seed=0, count=3000):
    tokens = np.random.default_rng(seed).integers(0, 100, count).astype(np.uint16)
    parts = ("tokens", tokens[:-200]), ("held out", tokens[-200:])
    return Data(*(Tokens([part], [name], end_of_text=7) for name, part in parts))


class Dropping(GPT2):
    """A model with dropout, PyTorch's and ours."""

    def hidden(self, *given):
        y = F.dropout(super().hidden(*given), 0.1, self.training)
        return step1_simple.bias_dropout_residual(y, y.new_zeros(y.shape[-1]), torch.zeros_like(y), 0.1)


def trained(out, **options):
    """The losses of a training's steps, exactly, and the result."""
    losses = {}
    torch.manual_seed(7)
    options = {"model": Dropping(TINY), "data": some_data(), "steps": 10, "batch": 4, "rate": 1e-2} | options
    result = train.train(
        Console(quiet=True), out=out, on_loss=lambda number, loss: losses.update({number: loss.item()}), **options
    )
    return losses, result


def stopped_at(number, out, **options):
    def stop(at, loss):
        if at == number:
            raise KeyboardInterrupt

    torch.manual_seed(7)
    options = {"model": Dropping(TINY), "data": some_data(), "steps": 10, "batch": 4, "rate": 1e-2} | options
    with pytest.raises(KeyboardInterrupt):
        train.train(Console(quiet=True), out=out, on_loss=stop, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 2, "eval_every": 3},
        {"dtype": "bfloat16", "recompute": True, "accumulate": 4},
        {"packed": True, "accumulate": 2, "eval_every": 3},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_a_training_that_goes_on_is_the_uninterrupted_one(options, tmp_path):
    """Data, their order, moments, and the generators of dropout: PyTorch's and ours."""
    whole, result = trained(tmp_path / "whole", **options)
    stopped_at(7, tmp_path / "out", save_every=3, **options)
    assert [path.name for path in checkpoint.whole(tmp_path / "out")] == ["step-000003", "step-000006"]
    rest, again = trained(tmp_path / "out", save_every=3, resume=True, **options)
    assert rest == {number: whole[number] for number in range(6, 10)}
    assert again.loss == result.loss
    assert len(set(whole.values())) == 10
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert files[0] == files[1]


def test_a_checkpoint_is_a_model_that_others_read_and_can_go_on_from(tmp_path):
    trained(tmp_path, save_every=5, keep=1)
    (path,) = checkpoint.whole(tmp_path)
    assert path.name == "step-000010"
    names = {"config.json", "model.safetensors", "training.safetensors", "training.json"}
    assert {file.name for file in path.iterdir()} == names
    model = GPT2.from_pretrained(path)
    assert torch.equal(model.wte.weight, GPT2.from_pretrained(tmp_path).wte.weight)
    losses, _ = trained(tmp_path / "fine", model=model, data=some_data(1))
    assert len(losses) == 10


def test_as_many_checkpoints_are_kept_as_are_wanted(tmp_path):
    trained(tmp_path, save_every=1, keep=3)
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["step-000008", "step-000009", "step-000010"]
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith("step-")} == {
        "config.json", "model.safetensors",
    }  # fmt: skip


def test_older_checkpoints_that_a_killed_save_has_left_go(tmp_path):
    trained(tmp_path, save_every=2, keep=4)
    assert len(checkpoint.whole(tmp_path)) == 4
    trained(tmp_path, save_every=2, keep=2, resume=True)
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["step-000008", "step-000010"]


def test_steps_are_in_the_order_of_their_numbers(tmp_path):
    for number in (999_999, 1_000_000, 20):
        checkpoint.place(tmp_path, number).mkdir()
    (tmp_path / "step-000030.tmp").mkdir()
    assert [path.name for path in checkpoint.whole(tmp_path)] == ["step-000020", "step-999999", "step-1000000"]


def test_without_resume_checkpoints_of_before_are_not_written_over(tmp_path):
    trained(tmp_path, save_every=5)
    with testing.raises(ValueError, f"train: {tmp_path} holds step-000010 of a training: --resume goes on"):
        trained(tmp_path, save_every=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 8}, "`batch` must be 4, as it was, got 8; --model "),
        ({"rate": 2e-2}, "`rate` must be 0.01, as it was, got 0.02"),
        ({"steps": 20}, "`steps` must be 10, as it was, got 20"),
        ({"context": 4}, "`context` must be 8, as it was, got 4"),
        ({"packed": True}, "`packed` must be False, as it was, got True"),
        ({"seed": 1}, "`seed` must be 0, as it was, got 1"),
        ({"model": None, "config": dataclasses.replace(TINY, n_layer=2)}, "`n_layer` must be 1, as it was, got 2"),
        ({"data": some_data(1)}, "the data must be those that it has seen; these are others, or have changed"),
        ({"data": some_data(count=3001)}, "the data must be those that it has seen"),
    ],
    ids=["batch", "rate", "steps", "context", "packed", "seed", "config", "data", "more data"],
)
def test_another_training_is_not_gone_on_with(options, says, tmp_path):
    stopped_at(4, tmp_path, save_every=3)
    with testing.raises(ValueError, f"train: to resume {tmp_path / 'step-000003'}, ", says):
        trained(tmp_path, save_every=3, resume=True, **options)


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "training.json"])
def test_a_checkpoint_that_was_cut_is_named(name, tmp_path):
    stopped_at(4, tmp_path, save_every=3)
    file = tmp_path / "step-000003" / name
    os.truncate(file, file.stat().st_size // 2)
    with testing.raises(ValueError, str(file)):
        trained(tmp_path, save_every=3, resume=True)


def test_a_missing_moment_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    stopped_at(4, tmp_path, save_every=3)
    file = tmp_path / "step-000003" / "training.safetensors"
    tensors = load_file(file)
    del tensors["exp_avg_sq.h.0.ln_1.bias"]
    save_file(tensors, file)
    with testing.raises(ValueError, f"train: {file}: the tensor `exp_avg_sq.h.0.ln_1.bias` is missing"):
        trained(tmp_path, save_every=3, resume=True)


def test_a_loss_that_is_no_number_is_not_saved(tmp_path):
    with testing.raises(RuntimeError, "train: the loss of step 3 is nan"):
        trained(tmp_path, rate=1e30, save_every=4, log_every=100)
    assert checkpoint.whole(tmp_path) == []


# ---- a save that does not come to its end ----

WATCHING = []  # functions that are called before a file is opened, renamed or removed; such a hook stays for ever


def look(event, arguments):
    if WATCHING and event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        watching = WATCHING.pop()  # so that what it opens itself does not count
        watching()
        WATCHING.append(watching)


sys.addaudithook(look)


def model_and_optimizer(config=TINY):
    torch.manual_seed(0)
    model = GPT2(config)
    optimizer = optimizer_of(model, 1e-3)
    step(model, optimizer, [torch.randint(100, (2, 9))], 1e-3)
    return model, optimizer


def files_of(folder):
    return {path.relative_to(folder): path.is_dir() or path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("layers", [(3, 1), (1, 3)], ids=["a smaller one", "a larger one"])
def test_a_save_in_anothers_place_leaves_one_of_both_whole_at_each_moment(layers, tmp_path):
    """Two sizes under one name: a mixture would not load."""
    folder, copies = tmp_path / "out", []
    configs = [dataclasses.replace(TINY, n_layer=count) for count in layers]
    checkpoint.save(folder, 5, *model_and_optimizer(configs[0]), {"run": 0}, keep=2)
    new = model_and_optimizer(configs[1])

    def note():
        copies.append(tmp_path / str(len(copies)))
        shutil.copytree(folder, copies[-1])

    WATCHING.append(note)
    try:
        checkpoint.save(folder, 5, *new, {"run": 1}, keep=2)
    finally:
        WATCHING.remove(note)
    note()
    seen = []
    for copied in copies:
        checkpoint.clear_up(copied)
        assert [path.name for path in copied.iterdir()] == ["step-000005"]
        path = copied / "step-000005"
        which = checkpoint.entries_of(path)["run"]
        model, optimizer = model_and_optimizer(configs[which])
        assert checkpoint.load(path, model, optimizer) == 5
        seen.append(which)
    assert seen == sorted(seen)
    assert set(seen) == {0, 1}
    assert len(seen) > 10


@pytest.mark.parametrize("number", range(1, 6))
def test_an_error_in_a_save_loses_nothing_and_leaves_nothing(number, tmp_path, monkeypatch):
    """Wherever the disk turns out to be full."""
    model, optimizer = model_and_optimizer()
    checkpoint.save(tmp_path, 5, model, optimizer, {}, keep=1)
    before, count = files_of(tmp_path), 0

    def failing(original):
        def function(*arguments, **options):
            nonlocal count
            count += 1
            if count == number:
                raise OSError(28, "No space left on device")
            return original(*arguments, **options)

        return function

    monkeypatch.setattr(checkpoint, "sync", failing(checkpoint.sync))
    monkeypatch.setattr(pathlib.Path, "write_text", failing(pathlib.Path.write_text))
    path = tmp_path / "step-000006"
    with testing.raises(
        OSError, f"train: the checkpoint {path} could not be written: ", "No space left on device",
        f"; {tmp_path / 'step-000005'} is whole, --resume goes on from it",
    ):  # fmt: skip
        checkpoint.save(tmp_path, 6, model, optimizer, {}, keep=1)
    assert files_of(tmp_path) == before


def test_all_of_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    model, optimizer = model_and_optimizer()
    events = []
    sync, replace = checkpoint.sync, pathlib.Path.replace
    monkeypatch.setattr(checkpoint, "sync", lambda path: (events.append(path.name), sync(path)))
    monkeypatch.setattr(
        pathlib.Path, "replace", lambda path, target: (events.append(f"-> {target.name}"), replace(path, target))[1]
    )
    checkpoint.save(tmp_path, 6, model, optimizer, {}, keep=2)
    own = [event for event in events if event.removeprefix("-> ") not in ("config.json", "model.safetensors")]
    assert own == ["training.safetensors", "training.json", "step-000006.tmp", "-> step-000006", tmp_path.name]


# ---- a process that is killed ----


def children(work, folder, every):
    """What tests/killed_training.py finds."""
    command = [sys.executable, str(HERE / "killed_training.py"), work, str(folder), str(every)]
    paths = [str(steps.ROOT / part) for part in ("step4-integration", "common")]
    paths = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return children("moments", tmp_path_factory.mktemp("killed"), 11)


def check_resumed(found, case):
    """It took the steps of the uninterrupted training, came to the same end, and left the same files."""
    assert case["losses"].items() <= found["whole"]["losses"].items(), case
    assert case["held out"] == found["whole"]["held out"], case
    assert case["files"] == found["files"], case


def first_step(case):
    return min(map(int, case["losses"]), default=12)


def check_killed(found):
    for case in found["killed"]:
        check_resumed(found, case)
    begins = [first_step(case) for case in found["killed"]]
    assert begins == sorted(begins)  # what was once saved is not lost
    assert set(begins) == {0, 3, 6, 9, 12}
    assert any(".tmp/" in name for case in found["killed"] for name in case["left"])


def test_killed_at_any_moment_a_training_goes_on_as_if_it_had_not_been(found):
    check_killed(found)
    assert len(found["killed"]) > 10


def test_a_full_disk_ends_in_a_line_and_loses_nothing(found):
    assert len(found["full"]) == 3
    for case in found["full"]:
        assert "could not be written: " in case["error"]
        assert case["error"].endswith(f"; {case['last']} is whole, --resume goes on from it")
        assert "\n" not in case["error"]
        assert not [name for name in case["left"] if ".tmp" in name or ".old" in name]
        check_resumed(found, case)


@pytest.mark.long
def test_killed_before_any_file(tmp_path):
    found = children("moments", tmp_path, 1)
    check_killed(found)
    assert len(found["killed"]) > 140


@pytest.mark.long
def test_killed_at_random_moments_again_and_again(tmp_path):
    found = children("random", tmp_path, 0)
    assert len(found["killed"]) == 20
    assert sum(case["times"] for case in found["killed"]) > 40
    for case in found["killed"]:
        check_resumed(found, case)
