"""A repository in a temporary folder: a copy of this package, and stages made of fake_stage."""

import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

from kernel_fusion import stages
from kernel_fusion.console import child_environment

BUILDS = """
import importlib.machinery, pathlib
pathlib.Path("{module}", "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]).write_text("")
print("built {module}")
"""
MODULE = "from kernel_fusion.tests.fake_stage import stage\nrungs, double = stage.rungs, stage.double\n"
BENCHMARK = """
import torch
from kernel_fusion import benchmarks, testing

TEACHES = "How to double a number."

def cases(size, device):
    return [
        benchmarks.Case(
            op="double", shape={{"n": 64}}, dtype=torch.float32, bytes=512, flops=64,
            inputs=lambda device: (testing.randn((64,), torch.float32, device),),
            run={run}, reference=lambda x: x * 2, peers={{"torch eager": lambda x: x * 2}},
        )
    ]

if __name__ == "__main__":
    benchmarks.main("{folder}", cases)
"""
TOUR_STEPS = """
def patched_gpt2(console):
    console.print("patched: no difference")

def train_small_gpt2(console, seconds=120):
    console.print(f"trained for at most {{seconds:.0f}} s")
    {train}
"""


class FakeRepository:
    """Made with stages step1-fake, step2-fake…; the first holds the demonstrations."""

    def __init__(self, root: pathlib.Path, count: int):
        self.root = root
        package = root / "common" / "kernel_fusion"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(stages.ROOT / "common" / "kernel_fusion", package, ignore=ignored)
        names = [(f"step{n}-fake", f"step{n}_fake") for n in range(1, count + 1)]
        rows = "".join(f'Stage("{folder}", "{module}", "test.py"), ' for folder, module in names)
        source = (package / "stages.py").read_text()
        source = re.sub(r"^STAGES = \(.*?^\)", f"STAGES = ({rows})", source, flags=re.MULTILINE | re.DOTALL)
        (package / "stages.py").write_text(source)
        for folder, module in names:
            (root / folder / module).mkdir(parents=True)
            (root / folder / module / "__init__.py").write_text(MODULE)
            self.stage(folder)
        self.demonstrations()

    def stage(self, folder: str, *, build: str = BUILDS, run: str = "testing_stage.double", before: str = "") -> None:
        """Writes a stage's setup.py and benchmark.py: what its build does, and which function its case times."""
        module = folder.replace("-", "_")
        (self.root / folder / "setup.py").write_text(build.format(module=module))
        benchmark = BENCHMARK.format(folder=folder, run=run)
        start = f"import {module} as testing_stage\n{textwrap.dedent(before)}"
        (self.root / folder / "benchmark.py").write_text(start + benchmark)

    def demonstrations(self, train: str = "pass") -> None:
        """Writes tour_steps.py: how training ends."""
        (self.root / "step1-fake" / "tour_steps.py").write_text(TOUR_STEPS.format(train=train))

    def python(self, *arguments: str) -> subprocess.CompletedProcess:
        """Runs this Python on `arguments` with the copied package."""
        environment = {**child_environment(), "PYTHONPATH": str(self.root / "common"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True)
