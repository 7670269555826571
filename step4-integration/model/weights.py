"""GPT-2's weights as Hugging Face stores them: `config.json` and safetensors, in a folder or on the hub.

Every tensor must have its place and every place its tensor; what does not fit is an error that names it.
"""

import contextlib
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator

import torch

# Entries of config.json that change what the model computes, and the only value that ours can do.
REQUIRED = {"model_type": "gpt2", "add_cross_attention": False, "tie_word_embeddings": True}
REQUIRED_WHERE_THERE = {"is_causal": True, "sliding_window": None, "attention_chunk_size": None}
ALIASES = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
           "max_position_embeddings": "n_positions"}  # fmt: skip
BUFFERS = (".attn.bias", ".attn.masked_bias")  # old files store the causal mask too
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"  # there where the weights lie in several files
HUB_OWNER = "openai-community"  # of "gpt2", "gpt2-medium", "gpt2-large" and "gpt2-xl"


def find(name: str | os.PathLike) -> pathlib.Path:
    """The folder called `name`; else the hub's files of that name, downloaded where they are not there yet."""
    folder = pathlib.Path(name)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        hub_name = str(name) if "/" in str(name) else f"{HUB_OWNER}/{name}"
        return pathlib.Path(snapshot_download(hub_name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except Exception as error:
        raise FileNotFoundError(
            f"from_pretrained: `name` must be a folder with config.json and model.safetensors, or a name on the "
            f"Hugging Face hub and a network to fetch it with; got {str(name)!r} ({type(error).__name__}: {error})"
        ) from error


def place(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Where the file called `name` of the model in `folder` is: beside its place if a save was killed, see `write`."""
    kept = old(folder / name)
    return kept if kept.exists() and is_under_way(folder) else folder / name


def old(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".old")


def beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".tmp")


def is_under_way(folder: pathlib.Path) -> bool:
    """Whether a save into `folder` has moved the old model aside, and is not done, or was killed then."""
    weights = [folder / WEIGHTS, folder / INDEX]
    return any(old(path).exists() for path in weights) and not any(path.exists() for path in weights)


def read_json(path: pathlib.Path) -> dict:
    """The entries of a JSON file.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it does not hold an object; the text names it.
    """
    if not path.exists():
        raise FileNotFoundError(f"from_pretrained: {path} is missing")
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"from_pretrained: {path}: no JSON: {error}{hint(path)}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"from_pretrained: {path}: must hold an object, got {json.dumps(entries)[:40]}")
    return entries


def hint(path: pathlib.Path) -> str:
    """What a file is that is not what its name says, where its first bytes tell."""
    with path.open("rb") as file:
        begin = file.read(64).lstrip().lower()
    if begin.startswith(b"version https://git-lfs"):
        return "; it is a pointer of Git LFS: `git lfs pull` fetches the file itself"
    if begin.startswith(b"<"):
        return "; it looks like a web page, as an address that was not the file's gives it"
    return "" if begin else "; it is empty"


def read_config(folder: pathlib.Path) -> dict:
    """The entries of config.json, under GPT-2's own names where transformers takes others too.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: no JSON, or an entry asks for what our model cannot do; the text names it.
    """
    path = place(folder, CONFIG)
    entries = read_json(path)
    for key, value in (REQUIRED | REQUIRED_WHERE_THERE).items():
        if entries.get(key, value) != value:
            raise ValueError(f"from_pretrained: {path}: `{key}` must be {value!r}, got {entries[key]!r}")
    for alias, name in ALIASES.items():
        if alias in entries and entries.setdefault(name, entries[alias]) != entries[alias]:
            raise ValueError(
                f"from_pretrained: {path}: `{alias}` must be `{name}`, of which it is another name, "
                f"got {entries[alias]!r} and {entries[name]!r}"
            )
    return entries


def read_tensors(folder: pathlib.Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the folder's safetensors files, one for each of `expected` and of its shape."""
    index = place(folder, INDEX)
    paths = [place(folder, WEIGHTS)]
    if index.exists() and not paths[0].exists():  # as transformers looks for them
        files = read_json(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ValueError(f"from_pretrained: {index}: `weight_map` must give each tensor the name of its file")
        paths = [folder / name for name in sorted(set(files.values()))]
    tensors = {}
    for path in paths:
        for name, value in read_safetensors(path).items():
            key = name.removeprefix("transformer.")
            if key in tensors:
                raise ValueError(f"from_pretrained: {path}: the tensor `{key}` is there twice")
            tensors[key] = value
    head = tensors.pop("lm_head.weight", None)

    for key, parameter in expected.items():
        if key not in tensors:
            raise ValueError(f"from_pretrained: {folder}: the tensor `{key}` is missing")
        if tensors[key].shape != parameter.shape:
            raise ValueError(
                f"from_pretrained: {folder}: `{key}` must have shape {tuple(parameter.shape)}, "
                f"got {tuple(tensors[key].shape)}"
            )
        if not tensors[key].is_floating_point():
            raise ValueError(f"from_pretrained: {folder}: `{key}` must be of a floating type, got {tensors[key].dtype}")
    for key in tensors:
        if key not in expected and not key.endswith(BUFFERS):
            raise ValueError(f"from_pretrained: {folder}: the model has no place for the tensor `{key}`")
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        raise ValueError(f"from_pretrained: {folder}: `lm_head.weight` must equal `wte.weight`, the head is tied to it")
    return tensors


def read_safetensors(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """What a safetensors file holds. A ValueError names one that is not whole, or none at all."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.exists():
        raise FileNotFoundError(f"from_pretrained: {path} is missing")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"from_pretrained: {path}: no whole safetensors file: {error}{hint(path)}") from error


def check_writable(folder: str | os.PathLike) -> None:
    """Makes `folder` where it is missing. An OSError says where a model could not be saved in it."""
    folder = pathlib.Path(folder)
    with failure_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def write(folder: str | os.PathLike, entries: dict, parameters: dict[str, torch.Tensor]) -> None:
    """Writes config.json and model.safetensors into `folder`; what else lies there stays.

    Two files cannot be renamed at once, and a config must never lie beside another model's weights. So both are written
    beside their places; the old ones step aside, weights first; the new ones take their places, weights last. While no
    weights are in place the old model lies whole in files called `.old`, where `from_pretrained` finds it, and others,
    such as transformers, say what they miss. Killed at any moment, this leaves the old model or the new one, and the
    next save clears up. Where something fails the old model is in its place again, and nothing new is left.

    Raises:
        OSError: a file could not be written; the text names it.
    """
    from safetensors.torch import save_file

    folder = pathlib.Path(folder)
    with failure_named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        clear_up(folder)
    config, index, weights = folder / CONFIG, folder / INDEX, folder / WEIGHTS
    entries = REQUIRED | {"architectures": ["GPT2LMHeadModel"]} | entries
    tensors = {f"transformer.{key}": value.detach().contiguous() for key, value in parameters.items()}
    new = []
    try:
        with failure_named(config):
            beside(config).write_text(json.dumps(entries, indent=2) + "\n")
            sync(beside(config))
        with failure_named(weights):
            save_file(tensors, beside(weights), metadata={"format": "pt"})
            sync(beside(weights))
        for path in (index, weights, config):
            with failure_named(path):
                if path.exists():
                    path.replace(old(path))
        for path in (config, weights):
            with failure_named(path):
                beside(path).replace(path)
                new.append(path)
                sync(folder)
    except BaseException:
        for path in reversed(new):
            path.unlink()
        raise
    finally:
        clear_up(folder)


def clear_up(folder: pathlib.Path) -> None:
    """Leaves nothing of a save but its outcome: the new model, or the old one in its place."""
    under_way = is_under_way(folder)
    for path in (folder / CONFIG, folder / WEIGHTS, folder / INDEX):
        beside(path).unlink(missing_ok=True)
        if under_way and old(path).exists():
            old(path).replace(path)
        old(path).unlink(missing_ok=True)


def sync(path: pathlib.Path) -> None:
    """Waits until a file's content, or what a folder calls its files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def failure_named(path: pathlib.Path) -> Iterator[None]:
    """Makes any failure to write, safetensors' own errors too, an OSError that names `path`."""
    try:
        yield
    except Exception as error:
        raise OSError(f"save_pretrained: {path} could not be written: {error}") from error
