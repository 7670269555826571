"""Exercises: skeletons are cut from solutions when a reader asks for them, and nobody else writes those of a reader.

A step has the solutions in `exercises/solutions`; the reader's skeletons come into `exercises/mine`, which git ignores.
So do the puzzles, which come before the first step, in `docs/puzzles`.
A solution is a whole program with its answer between two markers, each a comment on a line of its own:

    // SOLUTION: what to write here
    // | the skeleton's own line instead of the answer, if it needs one
    the answer
    // END

The skeleton has `// TODO: what to write here` and its own lines in that place. A bug hunt's marker has no text and so
leaves no TODO: its skeleton holds the faulty lines and does not say where they are. Where a solution names its own
place, such as `exercises/solutions`, the skeleton names `exercises/mine`.
"""

import argparse
import difflib
import hashlib
import pathlib
import re

from kernel_fusion import steps
from kernel_fusion.console import UserError
from kernel_fusion.report import results

START, OWN_LINE, END = "// SOLUTION", "// |", "// END"
SOLUTIONS, MINE = "exercises/solutions", "exercises/mine"
PUZZLES = "puzzles"  # their group's name


def cut(solution: pathlib.Path) -> str:
    """The text of the skeleton that belongs to `solution`.

    Raises:
        UserError: a marker is missing or stands in a wrong place; the text names the line.
    """
    kept: list[str] = []
    opened = None  # the line of the marker whose answer we are in
    own_lines = False
    found = 0
    for number, line in enumerate(solution.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        indent = line[: len(line) - len(line.lstrip())]
        if text.startswith(START):
            if opened:
                raise UserError(f"{solution}:{number}: SOLUTION within the one of line {opened}")
            todo = re.fullmatch(rf"{START}(?:: (\S.*))?", text)
            if not todo:
                raise UserError(f"{solution}:{number}: must be `{START}` or `{START}: what to write`, got `{text}`")
            if todo.group(1):
                kept.append(f"{indent}// TODO: {todo.group(1)}")
            opened, own_lines = number, True
            found += 1
        elif text == END:
            if not opened:
                raise UserError(f"{solution}:{number}: END without a SOLUTION before it")
            opened = None
        elif not opened:
            kept.append(line)
        elif own_lines and text.startswith(OWN_LINE):
            kept.append(f"{indent}{text.removeprefix(OWN_LINE).removeprefix(' ')}".rstrip())
        else:
            own_lines = False
    if opened:
        raise UserError(f"{solution}:{opened}: SOLUTION without an END after it")
    if not found:
        raise UserError(f"{solution}: no line `{START}`")
    group = solution.parent.parent.name
    return "\n".join(kept).replace(f"{group}/solutions/", f"{group}/mine/") + "\n"


def programs(folder: pathlib.Path) -> list[pathlib.Path]:
    """The solutions in a folder by their numbers, 10 after 9; then those of the ladder, then hunts; puzzles alone."""

    def number(path: pathlib.Path) -> tuple[int, int, str]:
        kind, digits = re.match(r"[a-z]*", path.stem), re.search(r"\d+", path.stem)
        order = ["", "puzzle", "ladder", "hunt"].index(kind[0] if kind else "")
        return order, int(digits[0]) if digits else 0, path.stem

    return sorted(folder.glob("*.cu"), key=number)


def groups() -> dict[str, pathlib.Path]:
    """Where the exercises are, by name: the puzzles, then the steps by their folders."""
    found = {PUZZLES: steps.ROOT / "docs" / "puzzles"}
    return found | {step.folder: step.path / "exercises" for step in steps.STEPS}


def solutions() -> list[pathlib.Path]:
    """The solutions of every group, in order."""
    return [path for folder in groups().values() for path in programs(folder / "solutions")]


def solutions_here() -> list[pathlib.Path]:
    """Those of the step in whose folder we are, the puzzles in docs, or else all."""
    here = pathlib.Path.cwd()
    return [path for path in solutions() if here.is_relative_to(path.parents[2])] or solutions()


def copy_of(solution: pathlib.Path) -> pathlib.Path:
    """Where the reader's copy of the skeleton of `solution` stands."""
    return solution.parent.with_name("mine") / solution.name


def reset(path: pathlib.Path, text: str) -> pathlib.Path | None:
    """Writes over a file that may be somebody's answer, and so keeps what stood there.

    Returns:
        Where the former text is now, in build/exercises; None where there was none, or no other one.
    """
    kept = None
    if path.exists() and path.read_text(encoding="utf-8") != text:
        former = path.read_text(encoding="utf-8")
        digest = hashlib.sha256(former.encode()).hexdigest()[:8]
        kept = steps.ROOT / "build" / "exercises" / f"{path.stem}-{digest}{path.suffix}"
        results.replace(kept, former)
    results.replace(path, text)
    return kept


def changed_lines(solution: pathlib.Path) -> int:
    """How many lines of the reader's copy are not as they were handed out."""
    given, now = cut(solution).splitlines(), copy_of(solution).read_text(encoding="utf-8").splitlines()
    return sum(line.startswith("+ ") for line in difflib.ndiff(given, now))


def find(name: str) -> pathlib.Path:
    """The solution of the exercise called `name`, "1_grid_stride" for instance.

    Raises:
        UserError: there is none; the text has names that are like it.
    """
    wanted = pathlib.Path(name).name.removesuffix(".cu")
    known = {solution.stem: solution for solution in solutions()}
    if wanted not in known:
        alike = [other for other in known if wanted in other] or difflib.get_close_matches(wanted, known, cutoff=0.5)
        meant = f"did you mean {' or '.join(alike[:3])}? " if alike else ""
        raise UserError(f"there is no exercise {name!r}; {meant}`kernel-fusion exercises` lists them")
    return known[wanted]


def make(found: list[pathlib.Path]) -> None:
    """Makes the reader's copies that are not there, and lists all."""
    for solution in found:
        copy = copy_of(solution)
        if not copy.exists():
            results.replace(copy, cut(solution))
            state = "made"
        else:
            changed = changed_lines(solution)
            state = f"yours, {changed} line{'s' if changed > 1 else ''} changed" if changed else "not begun"
        print(f"{copy.relative_to(steps.ROOT)}: {state}")


def command(options: argparse.Namespace) -> int:
    """Runs `kernel-fusion exercises`. Returns the exit code."""
    if options.names:
        from kernel_fusion.learn import check  # which needs this module

        right = True
        for name in options.names:  # all of them, also after a wrong one
            if name in groups():
                make(programs(groups()[name] / "solutions"))
            else:
                right &= check.command(name)
        return 0 if right else 1
    if options.reset:
        for solution in [find(name) for name in options.reset]:
            path = copy_of(solution)
            kept = reset(path, cut(solution))
            was = f"; what stood there is now in {kept.relative_to(steps.ROOT)}" if kept else ""
            print(f"wrote {path.relative_to(steps.ROOT)}{was}")
        return 0
    make(solutions_here())
    return 0
