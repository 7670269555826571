"""A fault to plant, and what planting takes, whoever sees the faults: pytest (by_pytest.py), or tools (by_tools.py)."""

import argparse
import concurrent.futures
import contextlib
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- planted faults -->", "<!-- /planted faults -->"


class Failure(Exception):
    """Why there is no table; the text is for the user."""


@dataclass(frozen=True)
class Fault:
    """One fault: `old` stands once in `file`, `new` in its place is wrong, and each of `tests` sees it.

    A test is what pytest is given: a file and the test's name, perhaps with its parameters in brackets.
    """

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_faults(path: Path, kind: type[Any] = Fault) -> list[Any]:
    """The faults of a list, as in tests/faults. Raises Failure with the line of an entry that is none."""
    faults, line = [], 1
    for entry in path.read_text(encoding="utf-8").split("\n\n"):
        lines = [text for text in entry.splitlines() if not text.startswith("#")]
        parts = {mark: [text[2:] for text in lines[1:] if text[:1] == mark] for mark in "@-+>"}
        if lines:
            name, colon, what = lines[0].partition(": ")
            if not colon or len(parts["@"]) != 1 or not parts["-"] or not parts[">"]:
                raise Failure(
                    f"{path}:{line}: no fault: its lines are `name: what is wrong`, @ file, - old, + new, > test"
                )
            old, new = ("\n".join(parts[mark]) for mark in "-+")
            faults.append(kind(name, what, parts["@"][0], old, new, tuple(parts[">"])))
        line += entry.count("\n") + 2
    return faults


def planted(fault, text: str) -> str:
    """The file's text with the fault in it. Raises Failure where the old text is not there exactly once."""
    times = text.count(fault.old)
    if times != 1:
        raise Failure(f"{fault.name}: {fault.file} has `{fault.old}` {times} times, not once; the list is out of date")
    return text.replace(fault.old, fault.new)


def output_of(command: list[str], cwd: Path | None = None, seconds: float | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, timeout=seconds, text=True, errors="replace", capture_output=True)
    if done.returncode != 0:
        raise Failure(f"{shlex.join(command)}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


@contextlib.contextmanager
def threads(jobs: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """So many at a time. What has not begun when an error ends the block never does."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


# ---- the table in a README, and the command ----


def table_in(text: str) -> str:
    """What stands between the two lines."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise Failure(f"the README lacks the lines {BEGIN} and {END}")
    return text[begin + len(BEGIN) : end].strip("\n")


def with_table(text: str, table: str) -> str:
    """A README's text with this table."""
    return text.replace(f"{BEGIN}\n\n{table_in(text)}\n\n{END}", f"{BEGIN}\n\n{table}\n\n{END}")


def arguments(doc: str, names: list[str]) -> argparse.ArgumentParser:
    """What all commands that plant faults take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these alone, with what is printed")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time; default: %(default)s"
    )
    return parser


def run(work: Callable[[], str]) -> int:
    """Does `work` and prints what it returns; gives the command's exit code."""
    begun = time.monotonic()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of programs that a fault ends
    try:
        said = work()
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"{said}, {time.monotonic() - begun:.0f} s")
    return 0
