"""The rungs as their source files tell it: the folder listing is the syllabus. Nothing needs to be built for this."""

import difflib
import pathlib
import re
from typing import NamedTuple

from kernel_fusion import stages


class RungFile(NamedTuple):
    """A rung's source: the idea from its first line, the bytes formula of its header or ""."""

    stage: stages.Stage
    op: str
    name: str
    path: pathlib.Path
    idea: str
    moves: str

    def lines(self) -> int:
        """The length of the file."""
        return len(self.path.read_text(encoding="utf-8").splitlines())

    def changed_since(self, before: "RungFile") -> int:
        """How many of this file's lines are not in the rung before."""
        old, new = (r.path.read_text(encoding="utf-8").splitlines() for r in (before, self))
        return sum(line.startswith("+ ") for line in difflib.ndiff(old, new))


def ops(stage: stages.Stage) -> list[str]:
    """The ops of a stage that have kernels: the folders in its `kernels`."""
    return sorted(p.name for p in (stage.path / "kernels").glob("*") if p.is_dir())


def rungs(stage: stages.Stage, op: str) -> list[RungFile]:
    """The rungs of `op`, in the order of the lesson."""
    paths = sorted((stage.path / "kernels" / op).glob("v*_*.cu"), key=_number)
    return [_read(stage, op, path) for path in paths]


def _number(path: pathlib.Path) -> tuple[int, str]:
    found = re.match(r"v(\d+)", path.name)
    return (int(found.group(1)) if found else 0, path.name)


def _read(stage: stages.Stage, op: str, path: pathlib.Path) -> RungFile:
    header = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        header.append(line[2:].strip())
    title = header[0] if header else ""
    idea = title.split(": ", 1)[1] if ": " in title else ""
    moves = ""
    for index, line in enumerate(header):
        if line.startswith("Moves"):
            text = " ".join([line.removeprefix("Moves").strip(), *header[index + 1 : index + 2]])
            found = re.match(r"(.*?)\s+bytes\b", text)
            moves = found.group(1) if found else ""
    return RungFile(stage, op, path.stem, path, idea, moves)
