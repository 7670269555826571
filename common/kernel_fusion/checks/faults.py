"""A fault to plant, and what planting one means."""

from dataclasses import dataclass
from pathlib import Path


class Failure(Exception):
    """Why there is no table; the text is for the user."""


@dataclass(frozen=True)
class Fault:
    """One fault: `old` stands once in `file`, `new` in its place is wrong, and `test` sees it.

    `test` is what pytest is given: a file and the test's name, perhaps with its parameters in brackets. `more` are
    others that must see it too: of other ops which the file is part of.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    test: str
    more: tuple[str, ...] = ()

    @property
    def tests(self) -> list[str]:
        return [self.test, *self.more]


def everywhere(name: str, what: str, *places: tuple[str, ...]) -> list[Fault]:
    """The same fault at several places: of each the file, the old text, the new one, and the tests that see it."""
    return [
        Fault(f"{name}-{Path(file).parent.name}-{Path(file).stem}", what, file, old, new, test, tuple(more))
        for file, old, new, test, *more in places
    ]


def planted(fault, text: str) -> str:
    """The file's text with the fault in it. Raises Failure where the old text is not there exactly once."""
    times = text.count(fault.old)
    if times != 1:
        raise Failure(f"{fault.name}: {fault.file} has `{fault.old}` {times} times, not once; the list is out of date")
    return text.replace(fault.old, fault.new)
