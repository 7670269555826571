"""The repository as its checks see it: its own files, and a command that must succeed."""

import os
import pathlib
import subprocess
import sys

from kernel_fusion import steps
from kernel_fusion.steps import ROOT

STEPS = tuple(step.folder for step in steps.STEPS)


def files(*suffixes: str, under: str = ".") -> list[pathlib.Path]:
    """The repository's own files with one of these endings: nothing hidden, built or installed."""
    found = []
    for folder, subfolders, names in os.walk(ROOT / under):
        skipped = ("build", "out", "__pycache__", "my", "mine")
        subfolders[:] = sorted(d for d in subfolders if not d.startswith(".") and d not in skipped)
        found += [pathlib.Path(folder, name) for name in sorted(names) if name.endswith(suffixes)]
    return found


def relative(path: pathlib.Path) -> str:
    """`path` as seen from the repository's root; also the name of a parametrised test."""
    return path.relative_to(ROOT).as_posix()


def run(*command: str, cwd: pathlib.Path = ROOT, **environment: str) -> str:
    """Output of a command that must end with 0."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)} (in {cwd}) ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def pytest(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess:
    """What pytest says with these arguments, and none that the environment adds. It may take `timeout` seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=timeout)
