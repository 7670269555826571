"""What `--data` may name: files of tokens, texts, a dataset of Hugging Face's. Files of tokens are never read whole."""

import importlib
import pathlib
from collections.abc import Iterable, Iterator, Sequence
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


def read(
    path: pathlib.Path, *, tokenizer: str | None = None, token_bytes: int = 2, end_of_text: int | None = None
) -> Data:
    """The data at `path`.

    Args:
        path: a file `.bin` or a folder of them, as nanoGPT or llm.c write them: those with val or test in their name
            are held out; a folder that `datasets` has saved; else a text or a folder of texts.
        tokenizer: "bytes", or a folder with tokenizer.json; for texts.
        token_bytes: of a token in a file without a header, 2 or 4.
        end_of_text: the token that ends a document, in files of tokens; of other data each text or row is one.

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
            end_of_text=end_of_text,
        )
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        return read_dataset(path, tokenizer)
    encoder, found = tokenizer_of(tokenizer)
    tokens, starts = joined(encoded(encoder, read_texts(path)))
    return with_held_out([tokens], [], names=[str(path)], starts=[starts])._replace(**found)


def with_held_out(
    train: list[np.ndarray],
    held_out: list[np.ndarray],
    *,
    names: list[str],
    starts: list[np.ndarray] | None = None,
    end_of_text: int | None = None,
) -> Data:
    """Where nothing is held out yet, the end of the last array is. `starts`: of documents in all arrays."""
    if not train:
        raise ValueError("--data: all files are held out, by their names; at least one must be to train on")
    if not held_out:
        kept = len(train[-1]) - len(train[-1]) // HELD_OUT
        train, held_out = [*train[:-1], train[-1][:kept]], [train[-1][kept:]]
        if starts:
            starts = [*starts[:-1], starts[-1][starts[-1] < kept], starts[-1][starts[-1] >= kept] - kept]
    for part, what in ((train, "to train on"), (held_out, "held out")):
        if not sum(map(len, part)):
            raise ValueError(f"--data: {names[-1]}: no tokens {what}")
    of_train, of_held_out = (starts[: len(train)], starts[len(train) :]) if starts else (None, None)
    return Data(
        Tokens(train, names, starts=of_train, end_of_text=end_of_text),
        Tokens(held_out, ["the held-out tokens"] * len(held_out), starts=of_held_out, end_of_text=end_of_text),
    )


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


Documents = tuple[np.ndarray, np.ndarray]  # tokens, and where documents begin in them


def document(tokens: Sequence[int]) -> Documents:
    return np.asarray(tokens, np.uint32), np.zeros(1, np.int64)


def joined(parts: Iterable[Documents]) -> Documents:
    """All of them, one behind the other."""
    tokens, starts, length = [np.zeros(0, np.uint32)], [np.zeros(0, np.int64)], 0
    for part, begins in parts:
        tokens.append(part)
        starts.append(begins + length)
        length += len(part)
    return np.concatenate(tokens), np.concatenate(starts)


def encoded(tokenizer: ByteTokenizer | FileTokenizer, texts: Iterable[str]) -> Iterator[Documents]:
    """The tokens of each text, and a token for its end where the tokenizer has one."""
    end = None if isinstance(tokenizer, ByteTokenizer) else tokenizer.tokenizer.token_to_id(END_OF_TEXT)
    for text in texts:
        yield document(tokenizer.encode(text) + ([] if end is None else [end]))


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

        def documents(rows: list) -> Iterable[Documents]:
            return map(document, rows)

        column = "input_ids"
    elif "text" in columns:
        encoder, about = tokenizer_of(tokenizer)

        def documents(rows: list) -> Iterable[Documents]:
            return encoded(encoder, rows)

        column = "text"
    else:
        raise ValueError(f"--data: {path} must have a column `input_ids` or `text`, has {', '.join(columns)}")

    def tokens(part) -> Documents:
        return joined(joined(documents(part[begin : begin + ROWS][column])) for begin in range(0, len(part), ROWS))

    found = [tokens(parts["train"])]
    found += [tokens(parts[name]) for name in ("validation", "test") if name in parts][:1]
    arrays, starts = ([pair[i] for pair in found] for i in range(2))
    return with_held_out(arrays[:1], arrays[1:], names=[str(path)], starts=starts)._replace(**about)
