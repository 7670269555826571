"""Faults to plant, a list a layer, and what planting one means.

The emulation's own list, of faults that its tools are compared by, is in common/simt/tests/planted_faults.py.
"""

from dataclasses import dataclass


class Failure(Exception):
    """Why there is no table; the text is for the user."""


@dataclass(frozen=True)
class Fault:
    """One fault: `old` stands once in `file`, `new` in its place is wrong, and `test` sees it.

    `test` is what pytest is given: a file and the test's name, perhaps with its parameters in brackets.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    test: str


def planted(fault, text: str) -> str:
    """The file's text with the fault in it. Raises Failure where the old text is not there exactly once."""
    times = text.count(fault.old)
    if times != 1:
        raise Failure(f"{fault.name}: {fault.file} has `{fault.old}` {times} times, not once; the list is out of date")
    return text.replace(fault.old, fault.new)
