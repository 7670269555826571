"""Models on the disk: saved and killed at any moment, read from files that are not what they should be; and what the
commands that do so say of bad arguments.

python -m pytest tests/test_weights.py            pytest's options may follow, such as -k killed
"""

import itertools
import json
import os
import pathlib
import resource
import signal
import sys

import generate
import pytest
import torch
import train
from gpt2_model import GPT2, Config
from model import weights as weight_files
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from kernel_fusion import testing
from step4_integration import sample
from step4_integration.gpt2_testing import files_of

NAN, INFINITY = float("nan"), float("inf")
SIZES = {"vocab_size": 256, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}


def model(name):
    """Two models of the same sizes, so that either's weights fit either's config."""
    torch.manual_seed({"old": 0, "new": 1}[name])
    return GPT2(Config(**SIZES, layer_norm_epsilon={"old": 0.25, "new": 0.5}[name]))


MODELS = {name: model(name) for name in ("old", "new")}


def save(name, folder):
    MODELS[name].save_pretrained(folder, tokenizer="bytes")


def in_one_file(folder):
    save("old", folder)


def in_several_files(folder):
    save("old", folder.with_name("whole"))
    GPT2LMHeadModel.from_pretrained(folder.with_name("whole")).save_pretrained(folder, max_shard_size="5KB")
    assert (folder / weight_files.INDEX).exists()


def nothing(folder):
    folder.mkdir()


def named(epsilon, weight):
    """Which model has this config and these weights; a mixture has no name."""
    return next(
        n for n, m in MODELS.items() if m.config.layer_norm_epsilon == epsilon and torch.equal(m.wte.weight, weight)
    )


def as_read(folder):
    """The model that is read from `folder`, by name; None where there is none."""
    try:
        found = GPT2.from_pretrained(folder)
    except FileNotFoundError as error:
        if not str(error).endswith(("config.json is missing", "model.safetensors is missing")):
            raise
        return None
    return named(found.config.layer_norm_epsilon, found.wte.weight)


def as_transformers_reads(folder):
    try:
        found = GPT2LMHeadModel.from_pretrained(folder)
    except OSError as error:
        if "no file named model.safetensors" not in str(error):
            raise
        return None
    return named(found.config.layer_norm_epsilon, found.transformer.wte.weight)


WATCHING = []  # functions that are called before a file is opened, renamed or removed; such a hook stays for ever


def look(event, arguments):
    if WATCHING and event in ("open", "os.rename", "os.remove", "os.mkdir"):
        watching = WATCHING.pop()  # so that what it opens itself does not count
        watching()
        WATCHING.append(watching)


sys.addaudithook(look)


def states_of_a_save(folder, into):
    """Saves the new model in `folder`. Returns copies of the folder in each state that it was in on the way, and at the
    end: what a process would leave that is killed then."""
    states = [files_of(folder)]

    def note():
        if files_of(folder) != states[-1]:
            states.append(files_of(folder))

    WATCHING.append(note)
    try:
        save("new", folder)
    finally:
        WATCHING.remove(note)
    note()
    for number, files in enumerate(states):
        (into / str(number)).mkdir(parents=True)
        for name, content in files.items():
            (into / str(number) / name).write_bytes(content)
    return [into / str(number) for number in range(len(states))]


# ---- saving ----


@pytest.mark.parametrize("old", [in_one_file, in_several_files, nothing])
def test_a_save_that_is_killed_at_any_moment_leaves_the_old_model_or_the_new_one(old, tmp_path):
    before = {in_one_file: "old", in_several_files: "old", nothing: None}[old]
    folder = tmp_path / "model"
    old(folder)
    (folder / "notes.txt").write_text("beside it")
    states = states_of_a_save(folder, tmp_path / "states")
    seen, theirs = ([read(state) for state in states] for read in (as_read, as_transformers_reads))
    change = seen.index("new")
    assert change > 3
    assert seen == [before] * change + ["new"] * (len(seen) - change)  # the old one up to a moment, then the new one
    assert set(theirs[:change]) == {before, None}  # who knows nothing of this misses the weights, and reads no mixture
    assert set(theirs[change:]) == {"new"}
    for state in states:
        save("new", state)
        assert as_read(state) == as_transformers_reads(state) == "new"
        left = {path.name for path in state.iterdir()} - {"notes.txt", "generation_config.json"}
        assert {name for name in left if not name.startswith("model-0")} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("old", [in_one_file, in_several_files])
def test_a_save_after_a_killed_one_may_be_killed_too(old, tmp_path):
    """It clears up first, which must not lose the old model either."""
    folder = tmp_path / "model"
    old(folder)
    for number, state in enumerate(states_of_a_save(folder, tmp_path / "once")):
        before = as_read(state)
        seen = [as_read(again) for again in states_of_a_save(state, tmp_path / "twice" / str(number))]
        assert set(seen) == {before, "new"}
        assert seen == sorted(seen, key=[before, "new"].index)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), PermissionError("it is in use")], ids=["interrupted", "refused"]
)
@pytest.mark.parametrize(
    ("old", "number"), [*itertools.product([in_one_file, in_several_files], [1, 2, 3, 4]), (nothing, 1), (nothing, 2)]
)
def test_a_save_that_ends_at_any_rename_leaves_all_as_it_was(old, number, error, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    old(folder)
    before = files_of(folder)
    replace, count = pathlib.Path.replace, itertools.count(1)

    def failing(path, target):
        if next(count) == number:
            failing.named = path.with_name(path.name.removesuffix(".tmp"))
            raise error
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "replace", failing)
        with pytest.raises((KeyboardInterrupt, OSError)) as caught:
            save("new", folder)
    if isinstance(error, OSError):
        assert str(caught.value) == f"save_pretrained: {failing.named} could not be written: it is in use"
    assert files_of(folder) == before


@pytest.mark.parametrize("old", [in_one_file, nothing])
@pytest.mark.parametrize(("limit", "name"), [(100, "config.json"), (3000, "model.safetensors")])
def test_a_full_disk_leaves_all_as_it_was(limit, name, old, tmp_path):
    """A limit on the size of files stands for the disk: what is written, by us or by safetensors, fails midway."""
    folder = tmp_path / "model"
    old(folder)
    before = files_of(folder)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            save("new", folder)
        except OSError as error:
            os._exit(7 if f"save_pretrained: {folder / name} could not be written" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert files_of(folder) == before


def test_a_place_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with testing.raises(OSError, f"save_pretrained: {place} could not be written"):
            save("new", place)


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """Or a power failure after the rename might leave it empty. And so is the folder, after each that did."""
    save("old", tmp_path)
    events = []
    fsync, replace = os.fsync, pathlib.Path.replace

    def spy_on_fsync(descriptor):
        events.append(("written", pathlib.Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def spy_on_replace(path, target):
        events.append(("renamed", path.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", spy_on_fsync)
    monkeypatch.setattr(pathlib.Path, "replace", spy_on_replace)
    save("new", tmp_path)
    for name in ("config.json", "model.safetensors"):
        renamed = events.index(("renamed", f"{name}.tmp"))
        assert ("written", f"{name}.tmp") in events[:renamed]
        assert events[renamed + 1] == ("written", tmp_path.name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    save("old", tmp_path)
    tmp_path.chmod(0o500)
    try:
        with testing.raises(OSError, "save_pretrained: ", "config.json could not be written"):
            save("new", tmp_path)
        with testing.raises(OSError, f"save_pretrained: {tmp_path} could not be written"):
            weight_files.check_writable(tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert as_read(tmp_path) == "old"


def test_what_a_reader_sees_while_another_model_is_saved_is_no_mixture(tmp_path, monkeypatch):
    save("old", tmp_path)
    read = weight_files.read_tensors

    def late(folder, expected):
        save("new", folder)
        return read(folder, expected)

    with monkeypatch.context() as patch:
        patch.setattr(weight_files, "read_tensors", late)
        with testing.raises(ValueError, f"{tmp_path}: another model was saved there meanwhile"):
            GPT2.from_pretrained(tmp_path)
    assert as_read(tmp_path) == "new"


# ---- files that are not what they should be ----


def command(folder, *arguments, prompt="The"):
    """Runs generate.py, and returns the one line with which it ends."""
    with pytest.raises(SystemExit) as caught:
        generate.main(["--model", str(folder), "--prompt", prompt, "--device", "cpu", *arguments])
    assert str(caught.value).startswith("generate.py: ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


BAD = {
    "cut": (lambda whole: whole[: len(whole) // 2], ""),
    "cut within its header": (lambda whole: whole[:5], ""),
    "empty": (lambda whole: b"", "it is empty"),
    "a web page": (lambda whole: b"\n<!DOCTYPE html><html><body>404</body></html>", "it looks like a web page"),
    "a pointer": (
        lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n",
        "git lfs pull",
    ),
    "no text": (lambda whole: b"\xff\xfe\x00\xd8" * 9, ""),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", weight_files.INDEX, "tokenizer.json"])
def test_a_file_that_is_not_whole_is_named_in_one_line(name, bad, tmp_path):
    spoil, hint = BAD[bad]
    folder = tmp_path / "model"
    if name == weight_files.INDEX:
        in_several_files(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tokenizer": "bytes"}))
    else:
        MODELS["old"].save_pretrained(folder, **({} if name == "tokenizer.json" else {"tokenizer": "bytes"}))
    path = folder / name
    path.write_bytes(spoil(path.read_bytes() if path.exists() else b'{"model": {"type": "BPE"'))
    says = command(folder)
    assert f"{path}: no " in says
    assert hint in says


@pytest.mark.parametrize("bad", ["cut", "empty"])
def test_one_of_several_files_that_is_not_whole_is_named(bad, tmp_path):
    folder = tmp_path / "model"
    in_several_files(folder)
    path = sorted(folder.glob("model-0*"))[1]
    path.write_bytes(BAD[bad][0](path.read_bytes()))
    with testing.raises(ValueError, f"from_pretrained: {path}: no whole safetensors file"):
        GPT2.from_pretrained(folder)


@pytest.mark.parametrize("text", ["[1, 2]", '"gpt2"', "7", "null", "NaN"])
def test_a_config_that_is_no_object_is_named(text, tmp_path):
    save("old", tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert f"{tmp_path / 'config.json'}: must hold an object, got {text}" in command(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}], ids=str)
def test_an_index_that_names_no_files_is_named(index, tmp_path):
    folder = tmp_path / "model"
    in_several_files(folder)
    (folder / weight_files.INDEX).write_text(json.dumps(index))
    with testing.raises(ValueError, f"{folder / weight_files.INDEX}: `weight_map` must give each tensor"):
        GPT2.from_pretrained(folder)


def test_one_file_comes_before_several_as_transformers_has_it(tmp_path):
    folder = tmp_path / "model"
    in_several_files(folder)
    MODELS["new"].save_pretrained(tmp_path / "new")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((tmp_path / "new" / name).read_bytes())
    assert as_read(folder) == as_transformers_reads(folder) == "new"


def with_entries(folder, **entries):
    save("old", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return path


NO_INTEGERS = ["2", 2.0, None, True, [2], {"of": 2}, NAN]
NO_NUMBERS = ["1e-5", None, True, [1e-5], -1e-5, NAN, INFINITY]


@pytest.mark.parametrize(
    ("entry", "value", "must"),
    [
        *((entry, value, "an integer") for entry in ("n_head", "n_embd", "vocab_size") for value in NO_INTEGERS),
        *(("n_inner", value, "an integer") for value in NO_INTEGERS if value is not None),
        ("n_layer", "1", "an integer"),
        ("n_positions", "16", "an integer"),
        *((entry, 0, "at least 1") for entry in ("n_head", "n_inner", "n_layer")),
        ("n_head", -2, "at least 1"),
        ("n_embd", 1 << 40, "below 2^24"),
        *((entry, value, "a number") for entry in ("layer_norm_epsilon", "initializer_range") for value in NO_NUMBERS),
        *(("scale_attn_weights", value, "true or false") for value in ("false", 0, None)),
        *(("scale_attn_by_inverse_layer_idx", value, "true or false") for value in ("false", 1, None)),
        *(("activation_function", value, "one of gelu_new") for value in ("relu", None, 1, ["gelu"], {"gelu": 1})),
        *(("is_causal", value, "True") for value in (False, None, "no")),
        ("model_type", "llama", "'gpt2'"),
        ("add_cross_attention", True, "False"),
        ("tie_word_embeddings", False, "True"),
        ("sliding_window", 4, "None"),
        ("attention_chunk_size", 4, "None"),
        ("tokenizer", "words", "'bytes'"),
        ("tokenizer", ["bytes"], "'bytes'"),
    ],
)
def test_an_entry_of_the_config_that_is_wrong_is_named(entry, value, must, tmp_path):
    path = with_entries(tmp_path, **{entry: value})
    says = command(tmp_path)
    assert str(path) in says
    assert f"`{entry}` must be {must}" in says
    assert f"got {value!r}" in says


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"n_head": 5}, "`n_embd` must be a multiple of `n_head`, got 8 and 5"),
        ({"n_positions": 50}, "`wpe.weight` must have shape (50, 8), got (16, 8)"),
    ],
)
def test_entries_of_the_config_that_do_not_fit_are_named(entries, says, tmp_path):
    with_entries(tmp_path, **entries)
    assert says in command(tmp_path)


def test_other_names_of_an_entry_are_those_of_transformers(tmp_path):
    config = with_entries(tmp_path)
    entries = json.loads(config.read_text())
    for alias, name in GPT2Config.attribute_map.items():
        entries[alias] = entries.pop(name)
    config.write_text(json.dumps(entries))
    assert as_read(tmp_path) == as_transformers_reads(tmp_path) == "old"
    assert GPT2.from_pretrained(tmp_path).config == MODELS["old"].config
    config.write_text(json.dumps(entries | {"n_head": 4}))
    with testing.raises(ValueError, f"{config}: `num_attention_heads` must be `n_head`", "got 2 and 4"):
        GPT2.from_pretrained(tmp_path)


# ---- the commands ----


def test_the_command_adds_as_many_tokens_as_there_is_room_for(tmp_path, capsys):
    save("old", tmp_path)
    generate.main(["--model", str(tmp_path), "--prompt", "#$", "--device", "cpu"])
    assert capsys.readouterr().out.startswith("#$")
    generate.main(["--model", str(tmp_path), "--prompt", "#" * 16, "--device", "cpu"])
    assert capsys.readouterr().out.startswith("#" * 16)
    generate.main(["--model", str(tmp_path), "--prompt", "#$", "--device", "cpu", "--tokens", "0"])
    assert capsys.readouterr().out == "#$\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tokens", "-1"], "`max_new_tokens` must not be negative, got -1"),
        (["--tokens", "15"], "`max_new_tokens` must be from 0 to 14 after a prompt of 3 tokens"),
        (["--temperature", "-1"], "`temperature` must not be negative, got -1"),
        (["--temperature", "nan"], "`temperature` must be finite, got nan"),
        (["--temperature", "inf"], "`temperature` must be finite, got inf"),
        (["--top-k", "-3"], "`top_k` must not be negative, got -3"),
        (["--top-p", "1.5"], "`top_p` must be from 0 to 1, got 1.5"),
        (["--min-p", "-0.5"], "`min_p` must be from 0 to 1, got -0.5"),
        (["--repetition-penalty", "0"], "`repetition_penalty` must be finite and greater than 0, got 0"),
        (["--samples", "0"], "`samples` must be at least 1, got 0"),
        (["--stop", "ab"], "--stop must be one token, got ['ab']"),
        (
            ["--blocks", "v9"],
            "`blocks` must be one of v1_torch, v2_separate, v3_attention_block, v4_products",
        ),
        (["--seed", str(1 << 64)], "`seed` must be from -2^63 to 2^64 - 1"),
        (["--seed", str(-(1 << 63) - 1)], "`seed` must be from -2^63 to 2^64 - 1"),
        (["--device", "gpu"], "--device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["--device", "cuda:99"], "--device must be one that is there, got 'cuda:99'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_argument_of_the_command_is_one_line(arguments, says, tmp_path, capsys):
    save("old", tmp_path)
    assert says in command(tmp_path, *arguments)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "--prompt must hold at least one token, got ''"),
        ("x" * 17, "`prompts` must have at most 16 tokens, the model's positions, got 17"),
        (os.fsdecode(b"caf\xe9"), "--prompt must be text in UTF-8, got 'caf\\udce9'"),
    ],
    ids=["empty", "longer than the positions", "not UTF-8"],
)
def test_a_bad_prompt_is_one_line(prompt, says, tmp_path):
    save("old", tmp_path)
    assert says in command(tmp_path, prompt=prompt)


@pytest.mark.parametrize("vocab_size", [97, 104, 300])
def test_bytes_and_a_vocabulary_of_another_size(vocab_size, tmp_path):
    GPT2(Config(**SIZES | {"vocab_size": vocab_size})).save_pretrained(tmp_path, tokenizer="bytes")
    if vocab_size > 256:
        assert "`vocab_size` must be at most 256 where `tokenizer` is 'bytes', got 300" in command(tmp_path)
    else:
        must = f"--prompt must be of tokens from 0 to {vocab_size - 1}, the model's; its tokenizer made 104"
        assert must in command(tmp_path)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-300, 5e-324])
def test_a_tiny_temperature_takes_the_likeliest_token(temperature):
    ids = torch.randint(256, (4, 3), generator=torch.Generator().manual_seed(0))
    greedy = generate.generate(MODELS["old"], ids, 9)
    for top_k in (0, 3):
        drawn = generate.generate(MODELS["old"], ids, 9, temperature=temperature, top_k=top_k)
        assert generate.where_different(drawn, greedy) is None


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_a_huge_temperature_draws_all_tokens_alike(temperature):
    logits = torch.linspace(-50, 50, 8).expand(4000, 8)
    rng_state = torch.stack([torch.zeros(4000, dtype=torch.int64), torch.arange(4000) << 32], dim=1)
    drawn, _ = sample(logits, rng_state, temperature=temperature)
    assert torch.bincount(drawn, minlength=8).min() > 400


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 0}, "train: `steps` must be at least 1, got 0"),
        ({"batch": 0}, "train: `batch` must be at least 1, got 0"),
        ({"rate": 0.0}, "train: `rate` must be a number above 0, got 0"),
        ({"rate": NAN}, "train: `rate` must be a number above 0, got nan"),
        ({"rate": INFINITY}, "train: `rate` must be a number above 0, got inf"),
        ({"seed": 1 << 64}, "train: `seed` must be from -2^63 to 2^64 - 1"),
        ({"config": Config(**SIZES | {"vocab_size": 300})}, "train: `config.vocab_size` must be 256, as many as"),
        ({"documents": [b"short"]}, "split: `documents` must hold at least 20 pieces"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_train_refuses(options, says, tmp_path):
    with testing.raises(ValueError, says):
        train.train(Console(quiet=True), **{"steps": 1, "out": tmp_path} | options)


def test_training_looks_whether_it_can_save_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "optimizer_of", None)
    (tmp_path / "file").write_text("")
    with testing.raises(SystemExit, "train.py: ", f"{tmp_path / 'file' / 'below'} could not be written"):
        train.main(["--steps", "1", "--device", "cpu", "--out", str(tmp_path / "file" / "below")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with testing.raises(
        SystemExit, "train.py: --device must be one that is there, got 'cuda'; CUDA devices here: none"
    ):
        train.main(["--device", "cuda"])
