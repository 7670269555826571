"""docs/glossary.md: its terms; and tests/retired_words.md, which they took the place of."""

import fnmatch
import re
from typing import NamedTuple

from kernel_fusion.checks.repository import ROOT, files, relative

GLOSSARY = ROOT / "docs" / "glossary.md"
RETIRED = ROOT / "tests" / "retired_words.md"
SAYS_OLD_NAMES = (GLOSSARY, RETIRED, ROOT / "CHANGELOG.md")


class Word(NamedTuple):
    """A retired word: a regular expression, the term in its place, and where it must be gone."""

    pattern: str
    term: str
    kind: str  # code | text: whether comments and strings may have it
    globs: str

    def uses(self, path: str, text: str) -> list[str]:
        """Where a file uses it."""
        globs = self.globs.split()
        if not any(fnmatch.fnmatch(path, g) for g in globs) or any(
            fnmatch.fnmatch(path, g[1:]) for g in globs if g[0] == "!"
        ):
            return []
        if self.kind == "code":  # of C++
            text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.DOTALL)
        return [f"{path}: {m[0]!r}" for m in re.finditer(self.pattern.replace("\\|", "|"), text)]


def terms() -> list[str]:
    return re.findall(r"^- \*\*(.+?)\*\*: ", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)


def retired() -> list[Word]:
    text = RETIRED.read_text(encoding="utf-8")
    return [Word(*row) for row in re.findall(r"^\| `(.+)` \| (.+?) \| (code|text) (.+?) \|$", text, re.MULTILINE)]


def texts() -> dict[str, str]:
    """All that the repository says, by the file; but for the glossary itself, and for what tells of old names."""
    found = files(".py", ".md", ".cu", ".h", ".cpp", ".ipynb", "Makefile", "CMakeLists.txt")
    return {relative(path): path.read_text(encoding="utf-8") for path in found if path not in SAYS_OLD_NAMES}
