"""The rungs as their source files tell it: the folder listing is the syllabus. Nothing needs to be built for this."""

import difflib
import itertools
import pathlib
import re
from typing import NamedTuple

from kernel_fusion import steps
from kernel_fusion.console import UserError


class RungFile(NamedTuple):
    """A rung's source: the idea from its first line, the bytes formula and the limits of its header, or ""."""

    step: steps.Step
    op: str
    name: str
    path: pathlib.Path
    idea: str
    moves: str
    limits: str

    def lines(self) -> int:
        """The length of the file."""
        return len(self.path.read_text(encoding="utf-8").splitlines())

    def changed_since(self, before: "RungFile") -> int:
        """How many of this file's lines are not in the rung before."""
        old, new = (r.path.read_text(encoding="utf-8").splitlines() for r in (before, self))
        return sum(line.startswith("+ ") for line in difflib.ndiff(old, new))


def first_reading(files: list[RungFile]) -> list[str]:
    """The names of the rungs of an op before the first one that asks for Hopper, or is linked in a paragraph of its
    step's README.md that says "second reading"; its pieces are no rung.
    """
    names = itertools.takewhile(
        lambda rung: (
            "compute capability 9.0" not in rung.limits
            and "hopper" not in rung.name
            and f"(kernels/{rung.op}/{rung.name}.cu)" not in _second_reading(rung.step)
        ),
        files,
    )
    return [rung.name for rung in names if rung.name.startswith("v")]


def _second_reading(step: steps.Step) -> str:
    """The paragraphs of the step's README.md that say "second reading"."""
    readme = step.path / "README.md"
    paragraphs = readme.read_text(encoding="utf-8").split("\n\n") if readme.exists() else []
    return "\n\n".join(text for text in paragraphs if "second reading" in text.lower())


def ops(step: steps.Step) -> list[str]:
    """The ops of a step that have kernels: the folders in its `kernels`, in the lesson's order.

    That is the order of the headings that name them, or link to one of their rungs, in README.md and then in the pages
    it links to. What no heading names comes last.
    """
    readme = step.path / "README.md"
    lesson = readme.read_text(encoding="utf-8") if readme.exists() else ""
    pages = [step.path / name for name in dict.fromkeys(re.findall(r"\]\(((?:pages/)?\w+\.md)[)#]", lesson))]
    lesson += "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
    named = [word for heading in re.findall(r"^##+ (.*)", lesson, re.MULTILINE) for word in re.findall(r"\w+", heading)]
    folders = sorted(p.name for p in (step.path / "kernels").glob("*") if p.is_dir())
    return sorted(folders, key=lambda op: named.index(op) if op in named else len(named))


def step_of(op: str) -> steps.Step:
    """The step whose folder `kernels` has `op`.

    Raises:
        UserError: none has.
    """
    for step in steps.STEPS:
        if op in ops(step):
            return step
    known = ", ".join(op for step in steps.STEPS for op in ops(step))
    raise UserError(f"no step has an op {op!r}; there are {known}")


def rungs(step: steps.Step, op: str) -> list[RungFile]:
    """The rungs of `op`, in the order of the lesson, and its pieces, if it has any."""
    folder = step.path / "kernels" / op
    paths = [*sorted(folder.glob("v*_*.cu"), key=_number), *folder.glob("pieces.cu")]
    return [_read(step, op, path) for path in paths]


def _number(path: pathlib.Path) -> tuple[int, str]:
    found = re.match(r"v(\d+)", path.name)
    return (int(found.group(1)) if found else 0, path.name)


def _read(step: steps.Step, op: str, path: pathlib.Path) -> RungFile:
    header = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        header.append(line[2:])
    title = header[0] if header else ""
    idea = title.split(": ", 1)[1] if ": " in title else ""
    found = re.match(r"(.*?)\s+bytes\b", " ".join(_field(header, "Moves")[:2]))
    moves = found.group(1) if found else ""
    return RungFile(step, op, path.stem, path, idea, moves, limits=" ".join(_field(header, "Limits")))


def _field(header: list[str], name: str) -> list[str]:
    """The lines of a header's field. Its name stands in the columns before its text, which are empty in lines after."""
    lines: list[str] = []
    inside = False
    for line in header[1:]:
        label, text = line[:11].strip(), line[11:].strip()
        inside = label == name or inside and not label
        if inside and text:
            lines.append(text)
    return lines
