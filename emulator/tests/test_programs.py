"""Stand-alone CUDA programs as people write them: each runs unchanged, checks itself, and prints what a GPU prints."""

import pathlib
import shutil
import subprocess
import sys

import pytest
import torch

from emulator.command import WHOSE_TIMES
from kernel_fusion import testing
from kernel_fusion.console import child_environment

PROGRAMS = sorted((pathlib.Path(__file__).parent / "programs").glob("*.cu"))


def emulated(program: pathlib.Path, *options: str) -> str:
    """What the program prints under emulation."""
    command = [sys.executable, "-m", "kernel_fusion", "simt", *options, str(program)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert testing.without_progress(done.stderr) in ("", f"{WHOSE_TIMES}\n")
    return done.stdout


@pytest.mark.emulated
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_right_in_every_order_of_threads(program):
    printed = emulated(program, "--schedule", "forward")
    assert printed.count("\n") >= 3
    assert emulated(program, "--schedule", "reverse") == printed
    assert emulated(program, "--schedule", "random:1", "--threads", "1") == printed


@pytest.mark.skipif(shutil.which("nvcc") is None or not torch.cuda.is_available(), reason="needs nvcc and a GPU")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_gpu_prints_the_same(program, tmp_path):
    compiled = tmp_path / program.stem
    command = ["nvcc", "-arch=native", "-Werror=all-warnings", "-o", compiled, program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    on_gpu = subprocess.run([compiled], capture_output=True, text=True)
    assert on_gpu.returncode == 0, on_gpu.stdout + on_gpu.stderr
    assert on_gpu.stdout == emulated(program)
