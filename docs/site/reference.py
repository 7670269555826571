"""The pages of the reference: Python by autodoc, C++ by the comments above what headers declare."""

import importlib
import pathlib
import pkgutil
import re
from collections.abc import Iterator
from typing import NamedTuple

import pages
import pytest
from pages import Path

from kernel_fusion import steps
from kernel_fusion.steps import ROOT

PACKAGES = ("kernel_fusion", "emulator")  # of these every module; of a step what it offers
HEADERS = ("common/include/kf", *(f"{step.folder}/include/step{n}" for n, step in enumerate(steps.STEPS, 1)))


def reference() -> Iterator[tuple[Path, str]]:
    """All its pages: two lists, of Python and of C++, and those that they list."""
    yield Path("api/python.md"), "# Python\n\nThe steps' functions, and the packages that all steps use.\n"
    yield Path("api/cpp.md"), "# C++ and CUDA\n\nThe headers, by their folders.\n"
    for step in steps.STEPS:
        yield Path("api/python", f"{step.module}.md"), f"# {step.module}\n\n{module(step.module)}"
    for package in PACKAGES:
        text = "\n".join(f"## {name}\n\n{module(name)}" for name in modules(package))
        yield Path("api/python", f"{package}.md"), f"# {package}\n\n{text}"
    for folder in HEADERS:
        page = Path("api/cpp", f"{Path(folder).name}.md")
        yield page, header_page(Path(folder), page)


def modules(package: str) -> list[str]:
    """A package's modules, and those of its packages, but for commands and what checks this repository."""
    found = [package]
    for one in pkgutil.iter_modules([str(folder) for folder in importlib.import_module(package).__path__]):
        name = f"{package}.{one.name}"
        if one.name not in ("tests", "checks") and not one.name.startswith("_"):
            found += modules(name) if one.ispkg else [name]
    return found


def module(name: str) -> str:
    """What Sphinx is to say of a module; where what it imports is not installed, that. Another failure is raised."""
    try:
        importlib.import_module(name)
    except (ImportError, pytest.skip.Exception) as error:  # tests' helpers skip
        return f"```{{note}}\nNot shown, since it cannot be imported here: {pages.escaped(str(error))}\n```\n"
    return f"```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n   :member-order: bysource\n```\n"


class Declared(NamedTuple):
    """Something that a header declares, and the comment above it."""

    comment: list[str]
    code: str


def declarations(text: str) -> tuple[list[str], list[Declared]]:
    """The comment at the top of a header, and all that has a comment directly above it, members too."""
    lines = text.splitlines()
    top = next((n for n, line in enumerate(lines) if not line.startswith("//")), len(lines))
    found, comment = [], []
    for number in range(top, len(lines)):
        line = lines[number]
        if re.match(r" *//(?! ?----)", line):
            comment.append(re.sub(r"^ *// ?", "", line))
            continue
        if comment and re.match(r" {0,4}[A-Za-z_]", line) and not line.strip().startswith(("return", "if", "for")):
            found.append(Declared(comment, declaration(lines[number:])))
        comment = []
    return [re.sub(r"^// ?", "", line) for line in lines[:top]], [one for one in found if one.code]


def declaration(lines: list[str]) -> str:
    """The first declaration of `lines`, without its body; "" where they begin with a statement."""
    found: list[str] = []
    for line in lines:
        found.append(re.sub(r" *//.*", "", line))
        text = "\n".join(found)
        if re.search(r"[{;]", text):
            break
    indent = re.match(r" *", found[0])[0]
    text = "\n".join(line.removeprefix(indent) for line in found)
    head = re.split(r"(?<=[)\w]) \{", text)[0].rstrip()
    is_one = re.match(
        r"(template|struct|class|enum|using|constexpr|inline|static|__device__|__global__|__host__|extern|"
        r"[\w:<>, *&]+ \**&?\w+\(|[\w:<>,]+ \w+( =|;|\[))",
        head,
    )
    return head if is_one else ""


def header_page(folder: Path, page: Path) -> str:
    """The headers of a folder: of each its comment, and what it declares."""
    said = [f"# {folder.name}", "", f"In `{folder}`: what has a comment. A header's name leads to its code.", ""]
    for path in sorted((ROOT / folder).rglob("*.h")):
        source = pages.as_path(path)
        top, found = declarations(path.read_text(encoding="utf-8"))
        name = source.relative_to(folder.parent)
        said += [
            f"## {pages.escaped(str(name))}",
            "",
            f"[Code](../../{pages.page_of(source)})",
            "",
            pages.prose(top),
            "",
        ]
        for one in found:
            said += [pages.fenced(one.code, "cuda"), pages.prose(one.comment), ""]
    return "\n".join(said)


def headers() -> set[Path]:
    """The headers that the reference links to."""
    return {pages.as_path(path) for folder in HEADERS for path in pathlib.Path(ROOT, folder).rglob("*.h")}
