"""A step's kernels in Triton: on a GPU as they are used, and without one by Triton's interpreter, which uses NumPy.

The interpreter has to be chosen before Triton is imported, so it has a process of its own. It multiplies bfloat16 as if
the bits were whole numbers, so products of that type need a GPU.
"""

import importlib.metadata
import importlib.util
import pathlib
import sys
from typing import Any, NamedTuple

import pytest
import torch

from kernel_fusion import steps
from kernel_fusion.console import captured
from kernel_fusion.testing.inputs import randn


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

torch.save(triton_peer.outputs(*sys.argv[1:3], torch.load(sys.argv[3])), sys.argv[4])
"""


def kernels_of(step: str, name: str = "triton_kernels") -> Any:
    """The module `name` of the step's peers."""
    return steps.load_script(steps.find(step), f"peers/{name}")


def outputs(step: str, name: str, calls: list[tuple]) -> list:
    """What the calls return: each a function's name, its tensors, and options, of which `config` is a number."""
    kernels, found = kernels_of(step, name), []
    for function, inputs, options in calls:
        if "config" in options:
            options = options | {"config": kernels.CONFIGS[options["config"]]}
        found.append(getattr(kernels, function)(*inputs, **options))
    return found


class Runner(NamedTuple):
    """Takes calls with tensors on the CPU, and gives their outputs there. `how`: cuda | interpreter."""

    step: str
    how: str
    folder: pathlib.Path
    name: str = "triton_kernels"

    def __call__(self, calls: list[tuple]) -> list:
        if self.how == "cuda":
            calls = [(function, _moved(inputs, "cuda"), options) for function, inputs, options in calls]
            return [_moved(output, "cpu") for output in outputs(self.step, self.name, calls)]
        files = [str(self.folder / name) for name in ("calls.pt", "outputs.pt")]
        torch.save(calls, files[0])
        done = captured([sys.executable, "-c", CHILD, self.step, self.name, *files], TRITON_INTERPRET="1")
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


ALLOWED = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(run, calls, formula, allowed=None):
    """Each call against `formula`, of its inputs in float64."""
    for (_, inputs, options), out in zip(calls, run(calls), strict=True):
        expected = formula(*(t if t is None else t.double() for t in inputs), **options)
        several = zip(out, expected, strict=True) if isinstance(out, tuple) else [(out, expected)]
        for one, right in several:
            assert one.shape == right.shape
            limit = ALLOWED[inputs[0].dtype] if allowed is None else allowed
            torch.testing.assert_close(one.double(), right, atol=limit * right.abs().max().item(), rtol=0)


def tensors(dtype, *shapes, offset=0.0):
    return tuple(randn(shape, dtype, "cpu", seed) + offset for seed, shape in enumerate(shapes))
