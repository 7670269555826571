"""Recorded runs of the puzzles' and exercises' solutions, which build.py puts into their pages.

They are made while Sphinx works, by a process of their own, and kept in build/runs until a source changes.
"""

import functools
import hashlib
import pathlib
import sys

from emulator import trace
from kernel_fusion.checks.repository import files
from kernel_fusion.console import UserError
from kernel_fusion.learn import traces
from kernel_fusion.report import results
from kernel_fusion.steps import ROOT

KEPT = ROOT / "build" / "runs"


@functools.cache
def shared() -> bytes:
    """Of what any run may be made of: the emulation, all headers, and what is recorded of which launch."""
    tools = files(".py", ".cpp", ".js", ".css", under="emulator")
    texts = [path.read_bytes() for path in (*files(".h"), *tools, pathlib.Path(traces.__file__))]
    return hashlib.sha256(b"\0".join(texts)).digest()


def kept(solution: pathlib.Path) -> pathlib.Path:
    """Where the run of a solution lies once `main` has made it, by a name that changes with what it is made of."""
    digest = hashlib.sha256(shared() + solution.read_bytes()).hexdigest()[:16]
    return KEPT / f"{solution.stem}-{digest}.html"


def place(solution: pathlib.Path) -> str:
    """What stands in a page where the run of a solution belongs."""
    return f'<div data-run="{solution.stem}"></div>'


def put(solution: pathlib.Path, page: pathlib.Path) -> None:
    """Puts the run of a solution into its page, which has its place."""
    text = page.read_text(encoding="utf-8")
    assert text.count(place(solution)) == 1, f"{page}: no place for the run of {solution.name}"
    results.replace(page, text.replace(place(solution), kept(solution).read_text(encoding="utf-8")))


def main() -> int:
    """Makes the runs that are missing, and removes those that are out of date. Returns the exit code."""
    KEPT.mkdir(parents=True, exist_ok=True)
    solutions = traces.solutions()
    try:
        for solution in solutions:
            if not kept(solution).exists():
                results.replace(kept(solution), trace.html(traces.make(solution)))
    except UserError as error:
        print(f"docs: the run of {solution.name} cannot be recorded: {error}", file=sys.stderr)
        return 1
    for path in set(KEPT.iterdir()) - {kept(solution) for solution in solutions}:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
