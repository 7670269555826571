"""GPT-2's weights as Hugging Face stores them: `config.json` and safetensors, in a folder or on the hub.

Every tensor must have its place and every place its tensor; what does not fit is an error that names it.
"""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import torch

# Entries of config.json that change what the model computes, and the only value that ours can do.
REQUIRED = {"model_type": "gpt2", "add_cross_attention": False, "tie_word_embeddings": True}
BUFFERS = (".attn.bias", ".attn.masked_bias")  # old files store the causal mask too
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


def read_config(folder: pathlib.Path) -> dict:
    """The entries of config.json.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: an entry asks for what our model cannot do; the text names it.
    """
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"from_pretrained: {path} is missing")
    entries = json.loads(path.read_text())
    for key, value in REQUIRED.items():
        if entries.get(key, value) != value:
            raise ValueError(f"from_pretrained: {path}: `{key}` must be {value!r}, got {entries[key]!r}")
    return entries


def read_tensors(folder: pathlib.Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the folder's safetensors files, one for each of `expected` and of its shape."""
    from safetensors.torch import load_file

    index = folder / INDEX
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {}
    for name in names:
        if not (folder / name).exists():
            raise FileNotFoundError(f"from_pretrained: {folder / name} is missing")
        tensors |= {key.removeprefix("transformer."): value for key, value in load_file(folder / name).items()}
    head = tensors.pop("lm_head.weight", None)

    for key, parameter in expected.items():
        if key not in tensors:
            raise ValueError(f"from_pretrained: {folder}: the tensor `{key}` is missing")
        if tensors[key].shape != parameter.shape:
            raise ValueError(
                f"from_pretrained: {folder}: `{key}` must have shape {tuple(parameter.shape)}, "
                f"got {tuple(tensors[key].shape)}"
            )
    for key in tensors:
        if key not in expected and not key.endswith(BUFFERS):
            raise ValueError(f"from_pretrained: {folder}: the model has no place for the tensor `{key}`")
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        raise ValueError(f"from_pretrained: {folder}: `lm_head.weight` must equal `wte.weight`, the head is tied to it")
    return tensors


def write(folder: str | os.PathLike, entries: dict, parameters: dict[str, torch.Tensor]) -> None:
    """Writes config.json and model.safetensors into `folder`; what else lies there stays.

    Both are written in full beside their places, then renamed. Where something fails the model that was there before is
    still whole, and nothing new is left.

    Raises:
        OSError: a file could not be written; the text names it.
    """
    from safetensors.torch import save_file

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = folder / "config.json", folder / "model.safetensors"
    beside = {path: path.with_name(path.name + ".tmp") for path in (config, weights)}
    entries = REQUIRED | {"architectures": ["GPT2LMHeadModel"]} | entries
    tensors = {f"transformer.{key}": value.detach().contiguous() for key, value in parameters.items()}
    old = config.with_name(config.name + ".old")
    try:
        kept = shutil.copyfile(config, old) if config.exists() else None
        with failure_named(config):
            beside[config].write_text(json.dumps(entries, indent=2) + "\n")
        with failure_named(weights):
            save_file(tensors, beside[weights], metadata={"format": "pt"})
        with failure_named(config):
            beside[config].replace(config)
        try:
            with failure_named(weights):
                beside[weights].replace(weights)
        except OSError:  # the weights are still the old ones, and so must the config be
            kept.replace(config) if kept else config.unlink()
            raise
    finally:
        for path in (*beside.values(), old):
            path.unlink(missing_ok=True)
    (folder / INDEX).unlink(missing_ok=True)  # of an older model in several files, which would be read before ours


@contextlib.contextmanager
def failure_named(path: pathlib.Path) -> Iterator[None]:
    """Makes any failure to write, safetensors' own errors too, an OSError that names `path`."""
    try:
        yield
    except Exception as error:
        raise OSError(f"save_pretrained: {path} could not be written: {error}") from error
