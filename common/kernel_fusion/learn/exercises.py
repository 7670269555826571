"""Exercises: skeletons are cut from solutions when a reader asks for them, and nobody else writes those of a reader.

A step has the solutions in `exercises/solutions`; the reader's skeletons come into `exercises/mine`, which git ignores.
A solution is a whole program with its answer between two markers, each a comment on a line of its own:

    // SOLUTION: what to write here
    // | the skeleton's own line instead of the answer, if it needs one
    the answer
    // END

The skeleton has `// TODO: what to write here` and its own lines in that place. A bug hunt's marker has no text and so
leaves no TODO: its skeleton holds the faulty lines and does not say where they are. Where a solution names its own
place, `exercises/solutions`, the skeleton names `exercises/mine`.
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
    return "\n".join(kept).replace(f"{SOLUTIONS}/", f"{MINE}/") + "\n"


def programs(folder: pathlib.Path) -> list[pathlib.Path]:
    """The solutions in a folder by their numbers, 10 after 9; hunts come last."""

    def number(path: pathlib.Path) -> tuple[bool, int, str]:
        digits = re.search(r"\d+", path.stem)
        return path.stem.startswith("hunt_"), int(digits[0]) if digits else 0, path.stem

    return sorted(folder.glob("*.cu"), key=number)


def solutions() -> list[pathlib.Path]:
    """The solutions of every step, in order."""
    return [path for step in steps.STEPS for path in programs(step.path / SOLUTIONS)]


def copy_of(solution: pathlib.Path) -> pathlib.Path:
    """Where the reader's copy of the skeleton of `solution` stands."""
    return solution.parents[2] / MINE / solution.name


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
        UserError: there is none, or in more than one step.
    """
    wanted = pathlib.Path(name).name.removesuffix(".cu")
    found = [solution for solution in solutions() if solution.stem == wanted]
    if len(found) != 1:
        known = ", ".join(solution.stem for solution in solutions())
        raise UserError(f"the exercise must be one of {known}, got {name!r}")
    return found[0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kernel-fusion exercises`."""
    parser.add_argument(
        "--reset",
        action="append",
        metavar="NAME",
        help="begin this one anew, 1_grid_stride for instance; may be repeated. What you wrote goes to build/exercises",
    )


def command(options: argparse.Namespace) -> int:
    """Runs `kernel-fusion exercises`. Returns the exit code."""
    if options.reset:
        for solution in [find(name) for name in options.reset]:
            path = copy_of(solution)
            kept = reset(path, cut(solution))
            was = f"; what stood there is now in {kept.relative_to(steps.ROOT)}" if kept else ""
            print(f"wrote {path.relative_to(steps.ROOT)}{was}")
        return 0
    for solution in solutions():
        copy = copy_of(solution)
        if not copy.exists():
            results.replace(copy, cut(solution))
            state = "made"
        else:
            changed = changed_lines(solution)
            state = f"yours, {changed} line{'s' if changed > 1 else ''} changed" if changed else "not begun"
        print(f"{copy.relative_to(steps.ROOT)}: {state}")
    return 0
