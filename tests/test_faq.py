"""docs/faq.md quotes what programs print: the lines that are said to be ours stand in our sources."""

import pathlib
import re
from typing import NamedTuple

import pytest

from kernel_fusion.checks.repository import ROOT

FAQ = ROOT / "docs" / "faq.md"
LONGEST = 150  # lines
FEWEST = 8  # characters that a piece of a quoted line must have in common with a source
BETWEEN = r".{0,200}?"  # of the source's text for a …


class Row(NamedTuple):
    """A row of the page: the line that somebody prints, and the file of ours that does; None where it is another's."""

    quoted: str
    source: pathlib.Path | None


def rows() -> list[Row]:
    found = []
    for line in FAQ.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| (?:`` (.+?) ``|`([^`]+)`)[^|]* \| (?:\[[\w.]+\]\(([^)]+)\)|[^|\[]*) \| .+ \|$", line)
        if row:
            found.append(Row(row[1] or row[2], FAQ.parent / row[3] if row[3] else None))
    return found


OURS = [row for row in rows() if row.source]


def printed(source: str) -> str:
    """A source's text with what it joins joined: strings side by side, in C++ with what is printed between them as …"""
    joined = re.sub(r'"\s*\n\s*[rf]*"', "", source)
    return re.sub(r'"(?:, | \+ )[^"\n]*?(?:, |\s\+\s*)"', "…", joined).replace('\\"', '"')


def test_the_page_is_read_as_it_is_written():
    text = FAQ.read_text(encoding="utf-8")
    quoting = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows()) == len(quoting)
    assert len(OURS) > len(rows()) / 2
    assert len(text.splitlines()) <= LONGEST


@pytest.mark.parametrize("row", OURS, ids=lambda row: row.quoted)
def test_a_line_that_we_print_is_in_its_source(row):
    text = printed(row.source.read_text(encoding="utf-8"))
    pieces = [piece.strip() for piece in row.quoted.split("…")]
    assert max(map(len, pieces)) >= FEWEST
    assert re.search(BETWEEN.join(map(re.escape, pieces)), text, re.DOTALL)


@pytest.mark.parametrize(
    ("source", "quoted"),
    [
        ('raise Error(\n    f"{name} is not built; "\n    f"build it"\n)', "is not built; build it"),
        ('CHECK(false, op, ": `", name, "` must be 1");', "` must be 1"),
        ('fail("is at " + text_of(site) + ", and waits");', "is at …, and waits"),
    ],
)
def test_what_a_source_joins_is_one_line(source, quoted):
    assert quoted in printed(source)
