"""What tests run on: devices, and the rungs of an op on each."""

import importlib
import os
from collections.abc import Callable

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _test_devices() -> tuple[str, ...]:
    asked = os.environ.get("KF_TEST_DEVICES", "")
    if asked not in ("", "cpu", "cuda"):
        raise ValueError(f"KF_TEST_DEVICES must be cpu or cuda, got {asked!r}")
    return (asked,) if asked else ("cpu", "cuda")


def _skip(reason: str) -> list:
    # Who asks for CUDA by name wants to see it fail, not skipped.
    return [] if os.environ.get("KF_TEST_DEVICES") == "cuda" else [pytest.mark.skip(reason=reason)]


_LACKING = [] if torch.cuda.is_available() else _skip("needs a GPU")
DEVICES = [pytest.param(device, marks=_LACKING if device == "cuda" else []) for device in _test_devices()]


def device_rungs(step: str, op: str) -> list:
    """A pytest.param(device, rung) for all that runs `op`: plain C++ and emulation on "cpu", the GPU's on "cuda".

    Without a GPU, or in a build without CUDA kernels, the latter are there as skips that say so. Those under emulation
    carry the mark `emulated`.

    Raises:
        ImportError: the step is not built.
    """
    module = importlib.import_module(step)
    params = []
    for device in _test_devices():
        marks = []
        names = module.rungs(op, device)
        if device == "cuda":
            if not torch.cuda.is_available():
                marks = _skip("needs a GPU")
            elif not names:
                marks = _skip(f"{step} is built without CUDA kernels")
            # One skip for all of them, since each case of a test would only say the same again.
            names = names or module.rungs(op, "cpu")[-1:]
        for name in names:
            emulated = [pytest.mark.emulated] if device == "cpu" and name != "cpu" else []
            params.append(pytest.param(device, name, marks=[*marks, *emulated], id=f"{device}-{name}"))
    return params


def stands_for_all(step: str, op: str, device: str, rung: str) -> bool:
    """Whether a test of what is the op's, whatever the rung, runs this one: plain C++, the last of the emulated rungs,
    and on a GPU all, since a CUDA graph is captured of each.
    """
    return device != "cpu" or rung in ("cpu", importlib.import_module(step).rungs(op, device)[-1])


def where(condition: Callable[..., bool]):
    """Leaves out those cases of a test that `condition` says no to; they are neither run nor counted as passed.

    Args:
        condition: of some of the test's parameters, by their names.
    """
    return pytest.mark.where.with_args(condition)
