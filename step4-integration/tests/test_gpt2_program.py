"""The C++ program gpt2: the text that generate.py gives, and one line where a file is wrong. Built by CMake here."""

import dataclasses
import json
import os
import pathlib
import random
import shlex
import shutil
import subprocess
import unicodedata

import pytest
import torch
from generate import generate
from gpt2_model import GPT2, Config

from emulator.ninja_file import one_at_a_time
from kernel_fusion.checks.repository import ROOT
from kernel_fusion.checks.text import fences

BUILD = ROOT / "build" / "gpt2"  # of its own: another process may build the preset
TINY = Config(vocab_size=256, n_positions=64, n_embd=48, n_layer=2, n_head=3, initializer_range=0.2)
PROMPT = "The kernel é→"
CPU = torch.device("cpu")

pytestmark = pytest.mark.tools


def build(target: str, preset: str = "simt") -> pathlib.Path:
    """The program `target`; skips where CMake, ninja or what it needs is missing."""
    folder = BUILD / preset
    if not shutil.which("cmake") or not shutil.which("ninja"):
        pytest.skip("cmake and ninja are not installed")
    with one_at_a_time(folder, target):  # tests of several processes want the same folder
        said = subprocess.run(["cmake", "--preset", preset, "-B", folder], cwd=ROOT, capture_output=True, text=True)
        if "gpt2 is left out" in said.stdout or "GoogleTest is not installed" in said.stderr:
            pytest.skip((said.stdout + said.stderr).strip().splitlines()[-1])
        assert said.returncode == 0, said.stdout + said.stderr
        made = subprocess.run(["cmake", "--build", folder, "--target", target], capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder / "step4-integration" / target


@pytest.fixture(scope="module")
def program():
    return build("gpt2")


@pytest.fixture(scope="module")
def files_test():
    return build("gpt2_files_test")


def run(program: pathlib.Path, folder: pathlib.Path, *options: str) -> bytes:
    """What it prints behind the prompt."""
    done = subprocess.run([program, "--model", folder, "--prompt", PROMPT, *options], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert b"tokens/s" in done.stderr
    assert done.stdout.startswith(PROMPT.encode())
    assert done.stdout.endswith(b"\n")
    return done.stdout[len(PROMPT.encode()) : -1]


def model_of(config: Config, seed: int, dtype=torch.float32) -> GPT2:
    torch.manual_seed(seed)
    return GPT2(config).to(dtype)


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    model_of(TINY, 3).save_pretrained(folder, tokenizer="bytes")
    return folder


def continued(folder: pathlib.Path, ids: list[int], tokens: int, device: torch.device = CPU, **options) -> list[int]:
    """What `generate` adds."""
    return generate(GPT2.from_pretrained(folder).to(device), [ids], tokens, **options)[0].tolist()[len(ids) :]


RULES = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 5},
    "top_k": {"temperature": 1.3, "top_k": 7, "seed": -1},
    "nucleus": {"temperature": 1.1, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.4, "seed": (1 << 64) - 1},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
@pytest.mark.parametrize("backend", ["cpu", "emulated", "gpu"])
def test_the_program_and_generate_give_the_same_tokens(backend, rule, bytes_folder):
    device = torch.device("cuda" if backend == "gpu" else "cpu")
    if backend == "gpu" and not (torch.cuda.is_available() and shutil.which("nvcc")):
        pytest.skip("needs a GPU and nvcc")
    options = [word for name, value in rule.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    program = build("gpt2", "cuda" if backend == "gpu" else "simt")
    said = run(program, bytes_folder, "--tokens", "40", "--backend", backend, *options)
    assert list(said) == continued(bytes_folder, list(PROMPT.encode()), 40, device=device, **rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_every_dtype(dtype, program, tmp_path):
    config = dataclasses.replace(TINY, activation_function="gelu", scale_attn_by_inverse_layer_idx=True, n_inner=100)
    model_of(config, 4, dtype).save_pretrained(tmp_path, tokenizer="bytes")
    said = run(program, tmp_path, "--tokens", "30")
    assert list(said) == continued(tmp_path, list(PROMPT.encode()), 30)


def test_a_token_in_one_launch(program, tmp_path):
    """Its weights are packed, and it gives the tokens of the other rungs."""
    config = dataclasses.replace(TINY, n_embd=64, n_head=1)
    model = model_of(config, 6, torch.bfloat16)
    model.wte.weight.data.mul_(20)  # so that no two logits are nearly the same
    model.save_pretrained(tmp_path, tokenizer="bytes")
    said = run(program, tmp_path, "--tokens", "8", "--backend", "emulated")
    assert list(said) == continued(tmp_path, list(PROMPT.encode()), 8)


def test_the_last_position_is_used_and_no_more(program, bytes_folder):
    length = len(PROMPT.encode())
    most = TINY.n_positions + 1 - length
    assert list(run(program, bytes_folder)) == continued(bytes_folder, list(PROMPT.encode()), most)
    said = complaint(program, bytes_folder, "--tokens", str(most + 1))
    assert said == (
        f"gpt2: --tokens must be at most {most} after a prompt of {length} tokens, since the model has 64 positions; "
        f"got {most + 1}"
    )


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """transformers' own GPT-2 in several files, and a tokenizer that was trained on this project's text."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = ByteLevelBPETokenizer()
    text = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))]
    tokenizer.train_from_iterator(text, vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.save_model(str(folder))  # vocab.json and merges.txt
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=600, n_positions=96, n_embd=64, n_layer=3, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="300KB")
    assert (folder / "model.safetensors.index.json").exists()
    return folder


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json"])
def test_a_model_of_transformers_in_several_files(files, program, bpe_folder, tmp_path):
    from tokenizers import Tokenizer, decoders

    folder = tmp_path / "model"
    shutil.copytree(bpe_folder, folder)
    if files == "vocab.json":
        (folder / "tokenizer.json").unlink()
    tokenizer = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    ids = continued(bpe_folder, tokenizer.encode(PROMPT).ids, 40)
    said = run(program, folder, "--tokens", "40").decode(errors="replace")
    assert said == tokenizer.decode(ids, skip_special_tokens=False)


def random_texts(count: int) -> list[str]:
    """Words, spaces of all kinds, digits, marks and characters that Unicode has had for years."""
    draw = random.Random(0)
    known = [chr(c) for c in range(0x30000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    pieces = [" ", "  ", "\n", "\t", "\u00a0", "\u180e", "\u2003", "\u0085", "'s", "'ll", "'", "the", "kernel", "A9",
              "é", "<|endoftext|>", "<|end", "²", "\u0301", "٣", "日本", "👩‍👧", "--", "0"]  # fmt: skip
    return ["".join(draw.choice(draw.choice((pieces, known))) for _ in range(draw.randrange(24))) for _ in range(count)]


@pytest.mark.parametrize("files", ["tokenizer.json", "vocab.json"])
def test_the_tokenizer_is_that_of_hugging_face(files, files_test, bpe_folder, tmp_path):
    from tokenizers import Tokenizer

    texts = random_texts(4000)
    tokenizer = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    for name in ("tokenizer.json",) if files == "tokenizer.json" else ("vocab.json", "merges.txt"):
        shutil.copy(bpe_folder / name, tmp_path)
    cases = {"texts": texts, "ids": [encoding.ids for encoding in tokenizer.encode_batch(texts)]}
    (tmp_path / "tokenized.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [files_test, "--gtest_filter=Bpe.GivesTheTokensOfHuggingFace"],
        env=os.environ | {"GPT2_TOKENIZED": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "[  PASSED  ] 1 test." in done.stdout


def test_what_it_reads_is_checked(files_test):
    """Broken and whole files, one by one: tests/gpt2_files_test.cpp."""
    done = subprocess.run([files_test, "--gtest_brief=1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def complaint(program: pathlib.Path, folder: pathlib.Path, *options: str) -> str:
    """The one line that it says where it fails."""
    done = subprocess.run([program, "--model", folder, "--prompt", PROMPT, *options], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("gpt2: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.rstrip()


def test_a_broken_file_ends_in_one_line_that_names_it(program, bytes_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(bytes_folder, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert complaint(program, folder).startswith(f"gpt2: {weights}: no whole safetensors file: ")
    weights.unlink()
    assert complaint(program, folder) == f"gpt2: {weights} is missing"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": "relu"}))
    assert complaint(program, folder).startswith(f"gpt2: {folder}/config.json: `activation_function` must be one of")
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "tokenizer"}))
    assert complaint(program, folder) == f"gpt2: {folder}/tokenizer.json is missing"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "-1"], "--tokens must not be negative, got -1"),
        (["--tokens", "many"], "--tokens must be an integer, got 'many'"),
        (["--top-p", "1.5"], "--top-p must be from 0 to 1, got 1.5"),
        (["--temperature", "nan"], "--temperature must be from 0 up, got nan"),
        (["--backend", "tpu"], "--backend must be cpu or emulated, got tpu"),
        (["--beams", "4"], "--beams: no such option; see --help"),
        (["--prompt", ""], "--prompt must hold at least one token, got ''"),
    ],
)
def test_a_wrong_option_is_named(options, said, program, bytes_folder):
    assert complaint(program, bytes_folder, *options) == f"gpt2: {said}"


def test_help_names_every_option(program):
    said = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("usage: gpt2 --model FOLDER --prompt TEXT")
    assert all(f"--{name.replace('_', '-')} " in said for name in RULES["nucleus"])


def test_the_pages_command_runs(program, bytes_folder):
    page = ROOT / "step4-integration" / "pages" / "cpp.md"
    first = next(fence.text for fence in fences(page) if fence.language == "sh")
    built, (name, *words) = first.splitlines()[0], shlex.split(first.splitlines()[1])
    assert built == "cmake --preset simt && cmake --build --preset simt --target gpt2"  # as `build` has it
    assert name.endswith("/step4-integration/gpt2")
    words[words.index("--model") + 1] = str(bytes_folder)
    assert subprocess.run([program, *words], capture_output=True).stdout.startswith(b"The kernel ")


def test_logits_that_are_no_numbers_end_it(program, tmp_path):
    model = model_of(TINY, 3)
    model.ln_f.bias.data[0] = float("nan")
    model.save_pretrained(tmp_path, tokenizer="bytes")
    done = subprocess.run([program, "--model", tmp_path, "--prompt", "a"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "gpt2: the model's logits are no numbers: are these its weights?\n")
