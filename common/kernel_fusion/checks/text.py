"""Markdown: its fenced blocks, its headings, and the order in which a step's pages are read."""

import pathlib
import re
import textwrap
from typing import NamedTuple

from kernel_fusion.checks.repository import ROOT, relative
from kernel_fusion.report.documents import FENCE, anchor


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
    return FENCE.sub(lambda m: "\n" * m.group().count("\n"), markdown.read_text(encoding="utf-8"))


def anchors(markdown: pathlib.Path) -> set[str]:
    """The names GitHub gives to a file's headings."""
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", without_fences(markdown), re.MULTILINE)}


def is_quoted(quoted: str, source: str) -> bool:
    """Whether these whole lines stand in `source`, perhaps further to the right: cut out of a function."""
    for spaces in range(0, 13, 2):
        moved = textwrap.indent(quoted, " " * spaces, lambda line: bool(line.strip()) and line[0] != "#")
        if f"\n{moved}\n" in f"\n{source}\n":
            return True
    return False


def steps_pages(step: str) -> list[pathlib.Path]:
    """The pages of a step beside its README, in the order in which that links to them."""
    text = (ROOT / step / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"\]\((pages/\w+\.md)(?:#[\w-]+)?\)", text)
    return [ROOT / step / name for name in dict.fromkeys(names)]


def words_around(lines: list[str], fence: Fence) -> str:
    """The paragraphs before and after a fenced block."""
    before, after = fence.line - 2, fence.line + len(fence.text.split("\n")) + 1
    return "\n".join([*paragraph(lines[:before][::-1])[::-1], *paragraph(lines[after - 1 :])])


def paragraph(lines: list[str]) -> list[str]:
    """The first lines that are not empty, up to an empty one."""
    text = "\n".join(lines).strip("\n").split("\n\n")[0]
    return text.split("\n")
