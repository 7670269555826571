"""The scripts of every step answer --help where nothing is built and before torch is imported; without it they say what
to build."""

import sys

import pytest

from kernel_fusion import steps
from kernel_fusion.console import captured

SCRIPTS = {
    "step1-simple": {"benchmark.py": []},
    "step2-attention": {"benchmark.py": []},
    "step3-fused": {"benchmark.py": []},
    "step4-integration": {
        "benchmark.py": [],
        "benchmark_gpt2.py": [],
        "benchmark_parallel.py": [],
        "gpt2_model.py": [],
        "generate.py": ["--model", "none", "--prompt", "The kernel"],
        "train.py": [],
        "train_parallel.py": [],
    },
}
COMMANDS = tuple(f"; build it with: {steps.build_command(step)}" for step in steps.STEPS)
UNBUILT = """
import atexit, runpy, sys
from kernel_fusion import steps
steps.is_built = lambda step: False
atexit.register(lambda: print("torch" in sys.modules))
sys.argv[:] = sys.argv[1:]
sys.path[0] = "."
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("folder", "script"), [(folder, script) for folder in SCRIPTS for script in SCRIPTS[folder]])
def test_help_needs_no_build(folder, script):
    step = steps.find(folder)
    shown = captured([sys.executable, "-c", UNBUILT, script, "--help"], step.path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith(f"usage: {script} [-h]")
    assert shown.stdout.endswith("\nFalse\n")  # torch takes a second
    refused = captured([sys.executable, "-c", UNBUILT, script, *SCRIPTS[folder][script]], step.path)
    assert refused.returncode == 1
    assert refused.stderr.rstrip().endswith(COMMANDS), refused.stderr
