"""A repository in a temporary folder: a copy of this package, and steps made of fake_step."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

from kernel_fusion import steps
from kernel_fusion.console import child_environment

BUILDS = """
import importlib.machinery, pathlib
print("[1/2] one\\n[2/2] the other")
pathlib.Path("{module}", "_C" + importlib.machinery.EXTENSION_SUFFIXES[0]).write_text("")
print("built {module}")
"""
MODULE = "from kernel_fusion.tests.fake_step import step\nrungs, double = step.rungs, step.double\n"
BENCHMARK = """
import torch
from kernel_fusion import testing
from kernel_fusion.bench import benchmarks, measuring

TEACHES = "How to double a number."

def cases(size, device):
    return [
        measuring.Case(
            op="double", shape={{"n": 64}}, dtype=torch.float32, bytes=512, flops=64,
            inputs=lambda device: (testing.randn((64,), torch.float32, device),),
            run={run}, reference=lambda x: x * 2, peers={{"torch eager": lambda x: x * 2}},
        )
    ]

if __name__ == "__main__":
    benchmarks.main("{folder}", cases)
"""
DEMONSTRATIONS = """
def patched_gpt2(console):
    console.print("patched: no difference")

def train_small_gpt2(console):
    console.print("trained")
    {train}
"""


# Put behind the copy of rung_counts.py: what a fake step's kernels ask of memory.
COUNTING = """

def why_not():
    return {why_not!r}

def take_launched(module):
    return (1,)

def launched_kernels(step, addresses):
    return {{"double/v1_good"}}

def build(step, kernels, on_progress=None):
    assert kernels == {{"double/v1_good"}}
    on_progress("1 of 1 files")
    return step.path / "library"

def count(step, library, wanted, on_rung=None):
    return {{one: [one] for one in wanted}}

def moved(kernels):
    return Moved(32.0, 4.0, 2048, 0.125)
"""
PLANTED = 'def race(console):\n    console.print("race: found")\n'


class FakeRepository:
    """Made with steps step1-fake, step2-fake…; the last holds the demonstrations. It sees no GPU."""

    def __init__(self, root: pathlib.Path, count: int):
        self.root, self.last = root, f"step{count}-fake"
        package = root / "common" / "kernel_fusion"
        half_written = "*.pyc.*"  # another process is about to rename it
        ignored = shutil.ignore_patterns(half_written)
        shutil.copytree(steps.ROOT / "common" / "kernel_fusion", package, ignore=ignored)
        ignored = shutil.ignore_patterns(half_written, "tests")
        shutil.copytree(steps.ROOT / "emulator", root / "emulator", ignore=ignored)
        names = [(f"step{n}-fake", f"step{n}_fake") for n in range(1, count + 1)]
        rows = "".join(f'Step("{folder}", "{module}", "test.py"), ' for folder, module in names)
        source = (package / "steps.py").read_text()
        source = re.sub(r"^STEPS = \(.*?^\)", f"STEPS = ({rows})", source, flags=re.MULTILINE | re.DOTALL)
        (package / "steps.py").write_text(source)
        (package / "learn" / "planted.py").write_text(PLANTED)
        for folder, module in names:
            (root / folder / module).mkdir(parents=True)
            (root / folder / module / "__init__.py").write_text(MODULE)
            self.step(folder)
            op = root / folder / "kernels" / "double"
            op.mkdir(parents=True)
            for rung, idea in {"v1_good": "a sum", "v2_good": "a product"}.items():
                (op / f"{rung}.cu").write_text(f"// double {rung}: {idea}\n")
        self.demonstrations()
        self.counting()

    def step(self, folder: str, *, build: str = BUILDS, run: str = "testing_step.double", before: str = "") -> None:
        """Writes a step's setup.py and benchmark.py: what its build does, and which function its case times."""
        module = folder.replace("-", "_")
        (self.root / folder / "setup.py").write_text(build.format(module=module))
        benchmark = BENCHMARK.format(folder=folder, run=run)
        start = f"import {module} as testing_step\n{textwrap.dedent(before)}"
        (self.root / folder / "benchmark.py").write_text(start + benchmark)

    def demonstrations(self, train: str = "pass") -> None:
        """Writes demonstrations.py: how training ends."""
        (self.root / self.last / "demonstrations.py").write_text(DEMONSTRATIONS.format(train=train))

    def counting(self, why_not: str = "") -> None:
        """Has the emulated kernels counted, or says why they cannot be."""
        source = (steps.ROOT / "common" / "kernel_fusion" / "bench" / "rung_counts.py").read_text()
        path = self.root / "common" / "kernel_fusion" / "bench" / "rung_counts.py"
        path.write_text(source + COUNTING.format(why_not=why_not))

    def python(self, *arguments: str) -> subprocess.CompletedProcess:
        """Runs this Python on `arguments` with the copied package."""
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.root, env=self.environment(), capture_output=True, text=True)

    def environment(self) -> dict[str, str]:
        """For a child that imports the copied packages."""
        path = os.pathsep.join(map(str, (self.root, self.root / "common", *self.root.glob("step*-fake"))))
        return child_environment(PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1", CUDA_VISIBLE_DEVICES="")
