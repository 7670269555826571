"""A step's peers/triton_kernels.py: on a GPU as it is used, and without one by Triton's interpreter, which uses NumPy.

The interpreter has to be chosen before Triton is imported, so it has a process of its own. It multiplies bfloat16 as if
the bits were whole numbers, so products of that type need a GPU.
"""

import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

from kernel_fusion import steps
from kernel_fusion.console import child_environment


def _version(package: str) -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version(package).split(".")[:2]))


if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton: pip install triton", allow_module_level=True)

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
by_interpreter = pytest.mark.skipif(
    _version("triton") < (3, 7) and _version("numpy") >= (2, 4),
    reason="Triton before 3.7 cannot interpret by NumPy 2.4",
)
# For a fixture that makes a Runner.
RUNNERS = [pytest.param("interpreter", marks=by_interpreter), pytest.param("cuda", marks=on_gpu)]

CHILD = """
import sys
import torch
from kernel_fusion.testing import triton_peer

torch.save(triton_peer.outputs(sys.argv[1], torch.load(sys.argv[2])), sys.argv[3])
"""


def kernels_of(step: str) -> Any:
    """The module."""
    return steps.load_script(steps.find(step), "peers/triton_kernels")


def outputs(step: str, calls: list[tuple]) -> list:
    """What the calls return: each a function's name, its tensors, and options, of which `config` is a number."""
    kernels, found = kernels_of(step), []
    for function, inputs, options in calls:
        if "config" in options:
            options = options | {"config": kernels.CONFIGS[options["config"]]}
        found.append(getattr(kernels, function)(*inputs, **options))
    return found


class Runner(NamedTuple):
    """Takes calls with tensors on the CPU, and gives their outputs there.

    Args:
        step: whose kernels.
        how: cuda | interpreter.
        folder: for files.
    """

    step: str
    how: str
    folder: pathlib.Path

    def __call__(self, calls: list[tuple]) -> list:
        if self.how == "cuda":
            calls = [(function, _moved(inputs, "cuda"), options) for function, inputs, options in calls]
            return [_moved(output, "cpu") for output in outputs(self.step, calls)]
        files = [str(self.folder / name) for name in ("calls.pt", "outputs.pt")]
        torch.save(calls, files[0])
        done = subprocess.run(
            [sys.executable, "-c", CHILD, self.step, *files],
            env=child_environment(TRITON_INTERPRET="1"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return torch.load(files[1])

    def multiplies(self, dtype: torch.dtype) -> None:
        """Skips the test where this type cannot be multiplied."""
        if dtype == torch.bfloat16 and self.how != "cuda":
            pytest.skip("Triton's interpreter cannot multiply bfloat16")


def _moved(value: Any, device: str) -> Any:
    """A tensor, or several; None stays."""
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    return value if value is None else value.to(device)
