"""Checkpoints: folders `step-000123`, each a model that `from_pretrained` reads, with all else to go on from.

A checkpoint is written beside its place and then renamed, so that a folder of this name is whole, whenever the process
or the machine stops. What a stopped one has left is cleared up by the next.

    config.json, model.safetensors      as `save_pretrained` writes them
    training.safetensors                AdamW's moments and counts; the states of PyTorch's random generators
    training.json                       how many steps were taken, and of which training
"""

import contextlib
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpt2_model import GPT2
from model import weights as weight_files
from model.weights import beside, old, sync

TENSORS, ENTRIES = "training.safetensors", "training.json"
SHARDS = "shards"  # in place of the tensors, where several workers have saved their own
STATE = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of each parameter


def place(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"step-{number:06}"


def whole(folder: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints in `folder`, the oldest first."""
    found = {path: re.fullmatch(r"step-(\d{6,})", path.name) for path in folder.glob("step-*")}
    return sorted((path for path, name in found.items() if name), key=lambda path: int(path.name[5:]))


def clear_up(folder: pathlib.Path) -> None:
    """Removes what a save has left that was killed; one that was about to be replaced is in its place again."""
    for path in folder.glob("step-*.old"):
        if not path.with_suffix("").exists():
            path.replace(path.with_suffix(""))
        else:
            remove(path)
    for path in folder.glob("step-*.tmp"):
        shutil.rmtree(path)


def remove(path: pathlib.Path) -> None:
    """Removes a checkpoint. While that is under way it has no name of one."""
    leaving = path.with_suffix(".tmp")
    path.replace(leaving)
    shutil.rmtree(leaving)


def remove_older(folder: pathlib.Path, keep: int) -> None:
    """Removes all checkpoints but the last `keep`."""
    for older in whole(folder)[:-keep]:
        remove(older)


def save(
    folder: pathlib.Path,
    number: int,
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    entries: dict[str, Any],
    *,
    keep: int,
    config: dict[str, Any] | None = None,
) -> pathlib.Path:
    """Writes the checkpoint of step `number`, and removes all but the last `keep`.

    Args:
        entries: of training.json, besides the step; `config`: of config.json, besides the model's sizes.

    Raises:
        OSError: it could not be written, and nothing of it is left; the text says which one is whole.
    """
    config = model.config.entries() | (config or {})
    return write(
        folder, number, config, dict(model.named_parameters()), tensors_of(model, optimizer), entries, keep=keep
    )


def write(
    folder: pathlib.Path,
    number: int,
    config: dict[str, Any],
    parameters: dict[str, torch.Tensor],
    tensors: dict[str, torch.Tensor],
    entries: dict[str, Any],
    *,
    keep: int,
) -> pathlib.Path:
    """`save` of a model's parameters and of what `tensors_of` gives."""
    from safetensors.torch import save_file

    path = place(folder, number)
    try:
        begin(folder, number)
        weight_files.write(beside(path), config, parameters)
        save_file(tensors, beside(path) / TENSORS)
        finish(folder, number, entries, keep, (TENSORS,))
    except Exception as error:  # safetensors has errors of its own
        raise failure(folder, number, error) from error
    return path


def begin(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Makes the folder that becomes the checkpoint of step `number`, empty."""
    folder.mkdir(parents=True, exist_ok=True)
    path = place(folder, number)
    clear_up(folder)
    beside(path).mkdir()
    return beside(path)


def finish(folder: pathlib.Path, number: int, entries: dict[str, Any], keep: int, written: Sequence[str] = ()) -> None:
    """Makes a checkpoint of it. `written`: files in it that may not be on the disk yet."""
    path = place(folder, number)
    text = json.dumps({"step": number} | entries, indent=2)
    (beside(path) / ENTRIES).write_text(text + "\n", encoding="utf-8")
    for name in (*written, ENTRIES):
        sync(beside(path) / name)
    sync(beside(path))
    if path.exists():
        path.replace(old(path))
    beside(path).replace(path)
    sync(folder)
    clear_up(folder)
    remove_older(folder, keep)


def failure(folder: pathlib.Path, number: int, error: BaseException) -> OSError:
    """What to raise where it could not be written, of which nothing is left then."""
    path = place(folder, number)
    with contextlib.suppress(OSError):
        clear_up(folder)
    there = whole(folder)
    kept = f"; {there[-1]} is whole, --resume goes on from it" if there else "; there is none before it"
    return OSError(f"train: the checkpoint {path} could not be written: {error}{kept}")


def as_it_is(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a worker alone has of a parameter: all."""
    return tensor


def tensors_of(
    model: GPT2, optimizer: torch.optim.Optimizer, whole: Callable[[str, torch.Tensor], torch.Tensor] = as_it_is
) -> dict[str, torch.Tensor]:
    """What a training goes on from besides the weights, by name. `whole` makes of a worker's part of a moment all."""
    device = model.wte.weight.device
    found = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    states = optimizer.state_dict()["state"]
    for number, name in enumerate(names_of(model, optimizer)):
        state = {key: torch.as_tensor(states[number][key]) for key in STATE}
        found |= {
            f"{key}.{name}": (whole(name, value) if value.dim() else value).contiguous() for key, value in state.items()
        }
    return found


def names_of(model: GPT2, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names in the order in which the optimizer numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def entries_of(path: pathlib.Path) -> dict[str, Any]:
    return weight_files.read_json(path / ENTRIES)


def check_same(path: pathlib.Path, own: dict[str, Any]) -> None:
    """The checkpoint is of this training, or a ValueError names what is not the same."""
    saved = entries_of(path)
    for name, value in own.items():
        before = saved.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            differing = [key for key in value.keys() | before.keys() if value.get(key) != before.get(key)]
            if differing:
                key = min(differing)
                raise ValueError(
                    f"train: to resume {path}, `{key}` must be {before.get(key)!r}, as it was, got {value.get(key)!r}; "
                    f"--model {path} begins another training with its weights"
                )
        elif value != before:
            raise ValueError(
                f"train: to resume {path}, the {name} must be those that it has seen; these are others, or have changed"
            )


@torch.no_grad()
def load(
    path: pathlib.Path,
    model: GPT2,
    optimizer: torch.optim.Optimizer,
    share: Callable[[str, torch.Tensor], torch.Tensor] = as_it_is,
    whole: Mapping[str, torch.Tensor] | None = None,
) -> int:
    """Puts all back as it was when the checkpoint was written. Returns how many steps had been taken.

    Args:
        share: makes of a whole parameter or moment what this model has of it.
        whole: the whole parameters' shapes, where the model's are not.

    Raises:
        FileNotFoundError, ValueError: a file is missing, or no longer what was written.
    """
    parameters = dict(model.named_parameters())
    for name, value in weight_files.read_tensors(path, parameters if whole is None else whole).items():
        parameters[name].copy_(share(name, value))
    tensors = weight_files.read_safetensors(path / TENSORS)
    names = names_of(model, optimizer)
    needed = [f"{key}.{name}" for name in names for key in STATE] + ["random.cpu"]
    if missing := [name for name in needed if name not in tensors]:
        raise ValueError(f"train: {path / TENSORS}: the tensor `{missing[0]}` is missing")
    for name in names:
        for key in STATE[1:]:
            tensors[f"{key}.{name}"] = share(name, tensors[f"{key}.{name}"])
    state = {number: {key: tensors[f"{key}.{name}"] for key in STATE} for number, name in enumerate(names)}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["random.cpu"])
    if model.wte.weight.device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], model.wte.weight.device)
    return entries_of(path)["step"]
