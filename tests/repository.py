"""What the tests of the repository itself share: its files, its Markdown, and a command that must succeed."""

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

from kernel_fusion import steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = ("step1-simple", "step2-attention", "step3-fused", "step4-integration")


def files(*suffixes: str, under: str = ".") -> list[pathlib.Path]:
    """The repository's own files with one of these endings: nothing hidden, built or installed."""
    found = []
    for folder, subfolders, names in os.walk(ROOT / under):
        skipped = ("build", "out", "__pycache__", "mine")
        subfolders[:] = sorted(d for d in subfolders if not d.startswith(".") and d not in skipped)
        found += [pathlib.Path(folder, name) for name in sorted(names) if name.endswith(suffixes)]
    return found


def relative(path: pathlib.Path) -> str:
    """`path` as seen from the repository's root; also the name of a parametrised test."""
    return path.relative_to(ROOT).as_posix()


class Fence(NamedTuple):
    """A fenced block: its language, the words after it, its text, its first line's number, the line before it."""

    language: str
    tags: tuple[str, ...]
    text: str
    line: int
    before: str


def fences(markdown: pathlib.Path) -> list[Fence]:
    """All fenced blocks of a Markdown file, in order."""
    found, lines, start = [], markdown.read_text(encoding="utf-8").splitlines(), None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        language, *tags = lines[start][3:].split() or [""]
        before = next((text for text in reversed(lines[:start]) if text.strip()), "")
        found.append(Fence(language, tuple(tags), "\n".join(lines[start + 1 : number]), start + 2, before))
        start = None
    assert start is None, f"{relative(markdown)}:{start + 1}: a fence that is never closed"
    return found


def without_fences(markdown: pathlib.Path) -> str:
    """The text of a Markdown file with its fenced blocks emptied, line numbers kept."""
    return re.sub(
        r"^```.*?^```$", lambda m: "\n" * m.group().count("\n"), markdown.read_text(encoding="utf-8"), flags=re.M | re.S
    )


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


def commands_folder(folder: pathlib.Path) -> pathlib.Path:
    """Fills `folder` with the commands that READMEs name, bound to this Python. It goes first on the PATH."""
    for name, command in {
        "python": f'exec "{sys.executable}" "$@"',
        "python3": f'exec "{sys.executable}" "$@"',
        "kernel-fusion": f'PYTHONPATH="{steps.python_path()}" exec "{sys.executable}" -m kernel_fusion.cli "$@"',
    }.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    return folder
