"""What `--data` may name: files of tokens, texts, a dataset of Hugging Face's. Files of tokens are never read whole."""

import importlib
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from generate import ByteTokenizer, FileTokenizer
from model.weights import hint

from training.batches import Tokens

HEADER = 1024  # bytes: 256 int32, of which three say something
FORMATS = {(20240520, 1): 2, (20240801, 7): 4}  # llm.c's magic number and version: bytes a token
HELD_OUT = 20  # the last of so many parts is held out, where the data has no part of its own for that
HELD_OUT_NAMES = ("val", "test")  # in a file's name
TEXTS = {".txt", ".md"}
END_OF_TEXT = "<|endoftext|>"
ROWS = 1000  # of a dataset, at a time


class Data(NamedTuple):
    train: Tokens
    held_out: Tokens
    vocab_size: int | None = None  # of the tokenizer, where there is one
    tokenizer: pathlib.Path | str | None = None  # its file, or "bytes"


def read(path: pathlib.Path, *, tokenizer: str | None = None, token_bytes: int = 2) -> Data:
    """The data at `path`.

    Args:
        path: a file `.bin` or a folder of them, as nanoGPT or llm.c write them: those with val or test in their name
            are held out; a folder that `datasets` has saved; else a text or a folder of texts.
        tokenizer: "bytes", or a folder with tokenizer.json; for texts.
        token_bytes: of a token in a file without a header, 2 or 4.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is not what its name says, or there is nothing in it.
    """
    if not path.exists():
        raise FileNotFoundError(f"--data: {path} is not there")
    files = sorted(path.glob("*.bin")) if path.is_dir() else [path] if path.suffix == ".bin" else []
    if files:
        held_out = [file for file in files if len(files) > 1 and any(name in file.stem for name in HELD_OUT_NAMES)]
        return with_held_out(
            *([map_file(file, token_bytes) for file in files if (file in held_out) == out] for out in (False, True)),
            names=[str(file) for file in files if file not in held_out],
        )
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        return read_dataset(path, tokenizer)
    encoder, found = tokenizer_of(tokenizer)
    return with_held_out([encoded(encoder, read_texts(path))], [], names=[str(path)])._replace(**found)


def with_held_out(train: list[np.ndarray], held_out: list[np.ndarray], *, names: list[str]) -> Data:
    """Where nothing is held out yet, the end of the last array is."""
    if not train:
        raise ValueError("--data: all files are held out, by their names; at least one must be to train on")
    if not held_out:
        kept = len(train[-1]) - len(train[-1]) // HELD_OUT
        train, held_out = [*train[:-1], train[-1][:kept]], [train[-1][kept:]]
    for part, what in ((train, "to train on"), (held_out, "held out")):
        if not sum(map(len, part)):
            raise ValueError(f"--data: {names[-1]}: no tokens {what}")
    return Data(Tokens(train, names), Tokens(held_out, ["the held-out tokens"] * len(held_out)))


def map_file(path: pathlib.Path, token_bytes: int) -> np.ndarray:
    """The tokens of a file, mapped into memory: with llm.c's header, or without any, as nanoGPT writes them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = np.frombuffer(file.read(HEADER), "<i4", count=min(3, size // 4))
    described = FORMATS.get((int(begin[0]), int(begin[1]))) if size >= HEADER else None
    offset, width = (HEADER, described) if described else (0, token_bytes)
    if size <= offset:
        raise ValueError(f"--data: {path} is empty")
    if described and size - offset != int(begin[2]) * width:
        raise ValueError(
            f"--data: {path} is not whole: its header says {begin[2]:,} tokens of {width} bytes, "
            f"and {size - offset:,} bytes follow"
        )
    if size % width:
        raise ValueError(
            f"--data: {path}: {size:,} bytes are no whole number of tokens of {width} bytes (--token-bytes)"
        )
    return np.memmap(path, dtype=f"<u{width}", mode="r", offset=offset)


def tokenizer_of(name: str | None) -> tuple[ByteTokenizer | FileTokenizer, dict]:
    """The tokenizer called `name`, and what `Data` says of it."""
    if name is None:
        raise ValueError("--tokenizer must be given with texts: a folder with tokenizer.json, or bytes")
    if name == "bytes":
        return ByteTokenizer(), {"vocab_size": 256, "tokenizer": "bytes"}
    path = pathlib.Path(name) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"--tokenizer: {path} is missing")
    try:
        tokenizer = FileTokenizer(path)
    except Exception as error:  # of no class of its own
        raise ValueError(f"--tokenizer: {path}: no tokenizer's file: {error}{hint(path)}") from error
    return tokenizer, {"vocab_size": tokenizer.tokenizer.get_vocab_size(), "tokenizer": path}


def read_texts(path: pathlib.Path) -> Iterable[str]:
    """The text, or those of the folder, in the order of their paths."""
    paths = sorted(p for p in path.rglob("*") if p.suffix in TEXTS) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"--data: {path} has no file that ends in .bin, {', '.join(sorted(TEXTS))}")
    for one in paths:
        try:
            yield one.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--data: {one} is no text in UTF-8: {error}") from error


def encoded(tokenizer: ByteTokenizer | FileTokenizer, texts: Iterable[str]) -> np.ndarray:
    """The tokens of the texts, one behind the other, a token for the end of each where the tokenizer has one."""
    end = None if isinstance(tokenizer, ByteTokenizer) else tokenizer.tokenizer.token_to_id(END_OF_TEXT)
    parts = [np.zeros(0, np.uint32)]
    for text in texts:
        parts.append(np.array(tokenizer.encode(text) + ([] if end is None else [end]), np.uint32))
    return np.concatenate(parts)


def read_dataset(path: pathlib.Path, tokenizer: str | None) -> Data:
    """A folder written by `save_to_disk`: its tokens, `input_ids`, or else its `text`."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"--data: {path} is a dataset of Hugging Face's, and reading it takes the package `datasets`, "
            f"which is not installed: pip install datasets"
        ) from error
    found = datasets.load_from_disk(str(path))
    parts = dict(found) if isinstance(found, dict) else {"train": found}
    if "train" not in parts:
        raise ValueError(f"--data: {path} must have a part `train`, has {', '.join(parts)}")
    columns = parts["train"].column_names
    about: dict = {}
    if "input_ids" in columns:

        def arrays(rows: list) -> np.ndarray:
            return np.concatenate([np.zeros(0, np.uint32), *(np.asarray(row, np.uint32) for row in rows)])

        column = "input_ids"
    elif "text" in columns:
        encoder, about = tokenizer_of(tokenizer)

        def arrays(rows: list) -> np.ndarray:
            return encoded(encoder, rows)

        column = "text"
    else:
        raise ValueError(f"--data: {path} must have a column `input_ids` or `text`, has {', '.join(columns)}")

    def tokens(part) -> np.ndarray:
        return np.concatenate([arrays(part[begin : begin + ROWS][column]) for begin in range(0, len(part), ROWS)])

    held_out = [tokens(parts[name]) for name in ("validation", "test") if name in parts][:1]
    return with_held_out([tokens(parts["train"])], held_out, names=[str(path)])._replace(**about)
