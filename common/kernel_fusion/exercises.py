"""Exercises: the skeletons in `<stage>/exercises` are cut from the solutions in `<stage>/exercises/solutions`.

A solution is a whole program with its answer between two markers, each a comment on a line of its own:

    // SOLUTION: what to write here
    // | the skeleton's own line instead of the answer, if it needs one
    the answer
    // END

The skeleton has `// TODO: what to write here` and its own lines in that place. A bug hunt's marker has no text and so
leaves no TODO: its skeleton holds the faulty lines and does not say where they are.
"""

import argparse
import hashlib
import os
import pathlib
import re

from kernel_fusion import stages
from kernel_fusion.console import UserError

START, OWN_LINE, END = "// SOLUTION", "// |", "// END"


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
    return "\n".join(kept) + "\n"


def solutions() -> list[pathlib.Path]:
    """The solutions of every stage, in order."""
    return [path for stage in stages.STAGES for path in sorted(stage.path.glob("exercises/solutions/*.cu"))]


def skeleton_of(solution: pathlib.Path) -> pathlib.Path:
    """Where the skeleton of `solution` stands."""
    return solution.parents[1] / solution.name


def stale() -> list[pathlib.Path]:
    """The skeletons that are missing or are not what their solutions give."""
    found = []
    for solution in solutions():
        skeleton = skeleton_of(solution)
        if not skeleton.is_file() or skeleton.read_text(encoding="utf-8") != cut(solution):
            found.append(skeleton)
    return found


def restore(skeleton: pathlib.Path) -> pathlib.Path | None:
    """Writes a skeleton anew. What stood there may be somebody's answer, so it is kept.

    Returns:
        Where the former text is now, in build/exercises; None where there was none.
    """
    kept = None
    if skeleton.exists():
        former = skeleton.read_bytes()
        digest = hashlib.sha256(former).hexdigest()[:8]
        kept = stages.ROOT / "build" / "exercises" / f"{skeleton.stem}-{digest}{skeleton.suffix}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(former)
    beside = skeleton.with_name(f"{skeleton.name}.tmp")
    beside.write_text(cut(skeleton.parent / "solutions" / skeleton.name), encoding="utf-8")
    os.replace(beside, skeleton)
    return kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `kernel-fusion exercises`."""
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a skeleton is not as it was cut"
    )


def command(options: argparse.Namespace) -> int:
    """Runs `kernel-fusion exercises`. Returns the exit code."""
    found = stale()
    for skeleton in found:
        name = skeleton.relative_to(stages.ROOT)
        if options.check:
            print(f"{name} is not what its solution gives")
            continue
        kept = restore(skeleton)
        print(f"wrote {name}" + (f"; what stood there is now in {kept.relative_to(stages.ROOT)}" if kept else ""))
    if not found:
        print(f"skeletons as their solutions give them: {len(solutions())}")
    return 1 if found and options.check else 0
