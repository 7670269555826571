"""What pip makes of this tree. `pip install -e .` only makes the packages importable from where they lie.

`pip install .` compiles the four extensions and installs the ops: what `step*_simple` and the like import, and no
commands, tests or lessons. Such a wheel is for one Python and one minor version of torch.
"""

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parent
STEPS = {
    "step1_simple": "step1-simple",
    "step2_attention": "step2-attention",
    "step3_fused": "step3-fused",
    "step4_integration": "step4-integration",
}
SHARED = ("__init__", "layers", "ops", "rng", "steps")  # of kernel_fusion, what ops need
# Lower bounds only: setup/dependencies.txt holds the versions that are tested together.
DEPENDENCIES = [
    "torch>=2.9",
    "numpy>=1.26",
    "setuptools>=77",
    "ninja>=1.11",
    "rich>=13.0",
    "matplotlib>=3.8",
    "pytest>=8.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "transformers>=5.0",
    "safetensors>=0.4",
]


class OpsAlone(build_py):
    """The modules that ops need."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.packages = ["kernel_fusion", *STEPS]

    def find_package_modules(self, package: str, package_dir: str) -> list:
        found = super().find_package_modules(package, package_dir)
        if package == "kernel_fusion":
            return [one for one in found if one[1] in SHARED]
        return [one for one in found if not one[1].endswith("testing")]


class EachStep(build_ext):
    """The extensions, each by its step's own setup.py, whose objects are kept in build/ for the next time."""

    def build_extension(self, extension: Extension) -> None:
        step = ROOT / STEPS[extension.name.split(".")[0]]
        paths = [ROOT, ROOT / "common", *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", os.path.abspath(self.build_lib)]
        if subprocess.run(command, cwd=step, env=environment).returncode:
            raise SystemExit(f"{step.name} was not built; what went wrong is above")


def wheel() -> dict[str, Any]:
    """What a wheel has and the tree has not."""
    import torch

    folder = ROOT / "build" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)  # nothing of an earlier state of the tree
    return {
        "install_requires": [f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"],
        "ext_modules": [Extension(f"{module}._C", sources=[]) for module in STEPS],
        "cmdclass": {"build_py": OpsAlone, "build_ext": EachStep},
        "options": {"build": {"build_lib": str(folder)}},
    }


def tree() -> dict[str, Any]:
    """What the tree has and a wheel has not."""
    return {
        "install_requires": DEPENDENCIES,
        "entry_points": {"console_scripts": ["kernel-fusion = kernel_fusion.cli:main"]},
    }


setup(**(wheel() if "bdist_wheel" in sys.argv else tree()))
