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


def _device_param(device: str):
    needs_gpu = device == "cuda" and not torch.cuda.is_available()
    return pytest.param(device, marks=_skip("needs a GPU") if needs_gpu else [])


DEVICES = [_device_param(device) for device in _test_devices()]


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
            names = names or [name for name in module.rungs(op, "cpu") if name != "cpu"]
        for name in names:
            emulated = [pytest.mark.emulated] if device == "cpu" and name != "cpu" else []
            params.append(pytest.param(device, name, marks=[*marks, *emulated], id=f"{device}-{name}"))
    return params


def where(condition: Callable[..., bool]):
    """Leaves out those cases of a test that `condition` says no to; they are neither run nor counted as passed.

    Args:
        condition: of some of the test's parameters, by their names.
    """
    return pytest.mark.where.with_args(condition)
