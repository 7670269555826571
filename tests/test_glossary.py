"""docs/glossary.md says each term once: all are used, and no retired word is."""

import fnmatch
import re

import pytest
from repository import ROOT, files, relative

GLOSSARY = ROOT / "docs" / "glossary.md"
TERMS, RETIRED = GLOSSARY.read_text(encoding="utf-8").split("\n## Retired\n")
NAMES = re.findall(r"^- \*\*(.+?)\*\*: ", TERMS, re.MULTILINE)
ROWS = re.findall(r"^\| `(.+)` \| (.+?) \| (code|text) (.+?) \|$", RETIRED, re.MULTILINE)
# Neither the glossary itself, nor this, nor what tells how things were called.
TEXTS = {
    relative(path): path.read_text(encoding="utf-8")
    for path in files(".py", ".md", ".cu", ".h", ".cpp", ".ipynb", "Makefile", "CMakeLists.txt")
    if path != GLOSSARY and path.name not in ("test_glossary.py", "CHANGELOG.md")
}


def without_words(text: str) -> str:
    """C++ without its comments and strings."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', "", text, flags=re.DOTALL)


def fits(path: str, globs: str) -> bool:
    unwanted = [g[1:] for g in globs.split() if g.startswith("!")]
    wanted = [g for g in globs.split() if not g.startswith("!")]
    return any(fnmatch.fnmatch(path, g) for g in wanted) and not any(fnmatch.fnmatch(path, g) for g in unwanted)


def test_terms_stand_once_and_in_order():
    assert NAMES == sorted(set(NAMES), key=str.lower)


@pytest.mark.parametrize("term", NAMES)
def test_a_term_is_used(term):
    word = re.compile(rf"(?<![a-z0-9]){re.escape(term)}(?:s|es|d|ed|ing)?(?![a-z0-9])", re.IGNORECASE)
    assert any(word.search(text) for text in TEXTS.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_retired_word_is_gone(row):
    pattern, term, kind, globs = row
    assert term in NAMES or re.search(rf"\b{re.escape(term)}\b", "".join(TEXTS.values()))
    word = re.compile(pattern.replace("\\|", "|"))
    found = []
    for path, text in TEXTS.items():
        if fits(path, globs):
            looked = without_words(text) if kind == "code" else text
            found += [f"{path}: {m[0]!r}" for m in word.finditer(looked)]
    assert found == [], f"the term is {term}"
