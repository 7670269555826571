"""What a source file says of others, and of itself."""

import ast
import pathlib
import re

from kernel_fusion.checks.repository import ROOT, STEPS


def number_of(path: pathlib.Path) -> int:
    """The step that a file belongs to, from 1; 0 for common and the emulator."""
    top = path.relative_to(ROOT).parts[0]
    return STEPS.index(top) + 1 if top in STEPS else 0


def includes(path: pathlib.Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def stands_alone(path: pathlib.Path) -> bool:
    """Whether a program includes nothing of ours, nor of a library's folder."""
    return not any("/" in name for name in includes(path))


def imports(path: pathlib.Path) -> set[str]:
    """Top-level names of the modules that a Python file imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def header(path: pathlib.Path) -> str:
    """The comment at the top of a file, without its slashes."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].removeprefix(" "))
    return "\n".join(lines)
