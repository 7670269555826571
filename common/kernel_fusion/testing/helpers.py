"""Small helps for test files."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest


@contextlib.contextmanager
def raises(exception: type[BaseException], *fragments: str) -> Iterator[Any]:
    """As pytest.raises, and the message must contain every fragment."""
    with pytest.raises(exception) as caught:
        yield caught
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    if missing:
        raise AssertionError(f"the message lacks {missing}: {caught.value}") from caught.value


def main(file: str) -> NoReturn:
    """Runs the tests in `file`, with the command line's further arguments for pytest, and exits with pytest's code."""
    sys.exit(pytest.main([file, *sys.argv[1:]]))


def without_progress(said: str) -> str:
    """Standard error of a command without the lines that `console.progress` writes where a machine is slow."""
    return "".join(line for line in said.splitlines(keepends=True) if not line.endswith(" …\n"))
