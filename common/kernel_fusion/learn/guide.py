"""`kernel-fusion learn`: what is next among the exercises, whether an answer is right, a hint, and how far you are.

How far is in `my/progress.json`, by name: `solved`, how many `hints` were read, and how often the solution was `asked`
for. Last in it stands the one that the reader was at last. An exercise that is not solved, and whose file is not as it
was handed out, is tried.
"""

import argparse
import fcntl
import json
import os
import pathlib
import textwrap
import time
from collections.abc import Callable

from kernel_fusion import steps
from kernel_fusion.console import UserError, make_console
from kernel_fusion.learn import exercises
from kernel_fusion.report import results

POLL_S = 0.2  # how often `watch` looks whether a file was saved


# ---- progress ----


def _progress_file() -> pathlib.Path:
    return steps.ROOT / exercises.MY / "progress.json"


def progress() -> dict[str, dict]:
    """What is known of each exercise, by name.

    Raises:
        UserError: the file is not as this module writes it.
    """
    path = _progress_file()
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(one, dict) for one in found.values()):
            raise ValueError("must be an object for each exercise")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{_shown(path)}: {error}; mend it, or move it away and begin to count anew") from error
    return found


def record(solution: pathlib.Path, **facts: object) -> None:
    """Adds what is now known of an exercise, and that it is at hand. Another `learn` may do so at the same time."""
    path = _progress_file()
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = progress()
        known[solution.stem] = known.pop(solution.stem, {}) | facts
        results.replace(path, json.dumps(known, indent=1) + "\n")


def upcoming(known: dict[str, dict], among: list[pathlib.Path] | None = None) -> pathlib.Path | None:
    """The first exercise that is not solved: of the core path, or where that is done, of the others."""
    left = [one for one in among or exercises.solutions() if not known.get(one.stem, {}).get("solved")]
    return next((one for one in left if one.stem not in exercises.LATER), left[0] if left else None)


def _at_hand(known: dict[str, dict]) -> pathlib.Path | None:
    """The exercise that was begun or checked last, by name or not, unless it is solved."""
    name = next(reversed(known), "")
    return next((one for one in exercises.solutions() if one.stem == name and not known[name].get("solved")), None)


# ---- what is said ----


def _shown(path: pathlib.Path) -> str:
    return os.path.relpath(path)


def _say_where_old_answers_go() -> None:
    """Answers were once kept beside the solutions, in folders `mine`."""
    for group, folder in exercises.groups().items():
        if any((folder / "mine").glob("*.cu")):
            old, new = _shown(folder / "mine"), _shown(steps.ROOT / exercises.MY / group)
            print(f"Answers of yours lie in {old}, where they were once kept. To go on with them:")
            print(f"  mkdir -p {new} && mv -i {old}/*.cu {new}/")


def _meant(names: list[str]) -> pathlib.Path:
    """The exercise of this name, the next one of this group, or the one at hand, else the next one."""
    if names and names[0] not in exercises.groups():
        return exercises.find(names[0])
    among = exercises.programs(exercises.groups()[names[0]] / "solutions") if names else None
    known = progress()
    if solution := (None if names else _at_hand(known)) or upcoming(known, among):
        return solution
    raise UserError(f"all of {names[0] if names else 'them'} are solved; NAME takes one up again")


def status(names: list[str]) -> int:
    """A line an exercise, and how long the core path still is."""
    from rich.markup import escape
    from rich.table import Table

    console, known = make_console(), progress()
    following = upcoming(known)
    minutes = {True: 0, False: 0}  # of the core path, by whether they are left
    solved = 0
    for group, folder in exercises.groups().items():
        table = Table(show_header=False, box=None, pad_edge=False, title=group, title_justify="left")
        table.title_style = "bold"
        for width in (6, 26, 60):
            table.add_column(width=width)
        table.add_column(justify="right", no_wrap=True)
        for solution in exercises.programs(folder / "solutions"):
            said, is_core = exercises.said_of(solution), solution.stem not in exercises.LATER
            is_solved = bool(known.get(solution.stem, {}).get("solved"))
            solved += is_solved
            if is_core:
                minutes[not is_solved] += said.minutes
            state = "tried" if exercises.is_begun(solution) else ""
            state = "solved" if is_solved else "next" if solution == following else state
            name = solution.stem if is_core else f"({solution.stem})"
            table.add_row(state, escape(name), escape(said.title), f"{said.minutes} min")
        if table.row_count:
            console.print(table)
    left, whole = minutes[True] / 60, sum(minutes.values()) / 60
    console.print(
        f"\n{solved} of {len(exercises.solutions())} solved. Core path: {left:.1f} of {whole:.1f} hours left; "
        "names in brackets may wait for the second reading.\nkernel-fusion learn next: what to do now.",
        markup=False,
        soft_wrap=True,
    )
    _say_where_old_answers_go()
    return 0


def begin(names: list[str]) -> int:
    """Makes the file of an exercise, and says what to do with it."""
    solution = _meant(names) if names else upcoming(progress())
    if solution is None:
        print("All are solved; `kernel-fusion learn next NAME` takes one up again")
        return 0
    said = exercises.said_of(solution)
    made = exercises.make(solution)
    record(solution)
    print(f"{solution.stem}: {said.title}, {said.minutes} minutes")
    print(f"  file   {_shown(exercises.copy_of(solution))}{'' if made else ', as you left it'}")
    print(f"  page   {_shown(exercises.page_of(solution))}")
    if (group := exercises.group_of(solution)) != exercises.PUZZLES:
        print(f"Commands in its head are for a shell in {group}.")
    hunt = solution.stem.startswith("hunt")
    print("Find the fault; nothing is marked." if hunt else "Write in place of TODO.")
    print(f"  kernel-fusion learn check {solution.stem}")
    print(f"  kernel-fusion learn hint {solution.stem}")
    _say_where_old_answers_go()
    return 0


def check(names: list[str], say: Callable[[str], None] = print) -> int:
    """Checks answers, and notes which are right."""
    from kernel_fusion.learn import check as checking  # which needs a compiler

    right = True
    for solution in [exercises.find(name) for name in names] or [_meant([])]:  # all of them, also after a wrong one
        exercises.make(solution)
        record(solution)
        source = exercises.copy_of(solution)
        say(f"{_shown(source)}:")
        if checking.check(source, solution, say):
            record(solution, solved=True)
        else:
            right = False
    if right and (following := upcoming(progress())):
        say(f"Next: {following.stem}, {exercises.said_of(following).minutes} minutes; `kernel-fusion learn next`")
    return 0 if right else 1


def hint(names: list[str]) -> int:
    """The hints so far, and one more."""
    solution = _meant(names)
    hints = exercises.said_of(solution).hints
    read = min(progress().get(solution.stem, {}).get("hints", 0) + 1, len(hints))
    for number, text in enumerate(hints[:read], start=1):
        print(textwrap.fill(f"{solution.stem}, hint {number} of {len(hints)}: {text}", 100))
    record(solution, hints=read)
    if read == len(hints):
        print(f"That was the last one. The answer: `kernel-fusion learn solution {solution.stem}`")
    return 0


def answer(names: list[str]) -> int:
    """The answer, if the exercise is solved or this is not the first time that it is asked for."""
    solution = exercises.find(names[0])
    known = progress().get(solution.stem, {})
    if not known.get("solved") and not known.get("asked"):
        record(solution, asked=1)
        print(f"{solution.stem} is not solved. `kernel-fusion learn hint {solution.stem}` helps; or ask once more.")
        return 1
    print(f"{exercises.answers(solution)}\nThe whole program: {_shown(solution)}")
    return 0


def reset(names: list[str]) -> int:
    """Begins exercises anew; what was written is kept."""
    for solution in [exercises.find(name) for name in names]:
        kept = exercises.reset(solution)
        record(solution, solved=False)
        was = f"; what you wrote is now {_shown(kept)}" if kept else ""
        print(f"{_shown(exercises.copy_of(solution))} is as it was handed out{was}")
    return 0


def _saved(path: pathlib.Path) -> tuple[int, int] | None:
    """What changes when a file is saved; None while an editor puts another one in its place."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino


def watch(names: list[str]) -> int:
    """Checks an exercise whenever it is saved. Without a name it goes on to the next one; else it ends with it."""
    solution = _meant(names)
    begin([solution.stem])
    while True:
        saved = _saved(exercises.copy_of(solution))
        try:
            right = check([solution.stem], lambda text: print(text, flush=True)) == 0
        except UserError as error:  # it does not compile, for instance
            right = False
            print(error, flush=True)
        if right:
            following = None if names else upcoming(progress())
            if following is None:
                return 0
            solution = following
            begin([solution.stem])
        print("waiting for the next save; Ctrl-C ends", flush=True)
        if right:
            saved = _saved(exercises.copy_of(solution))
        while _saved(exercises.copy_of(solution)) in (None, saved):
            time.sleep(POLL_S)


# What `kernel-fusion learn` does: by name the function, how many NAMEs it takes, and a line for --help.
WHAT: dict[str, tuple[Callable[[list[str]], int], range, str]] = {
    "status": (status, range(1), "a line an exercise, and how long the core path still is; so without any word"),
    "next": (begin, range(2), "makes the file of the next one, or of NAME, and says what to do"),
    "check": (check, range(1000), "checks the one that you are at, or each NAME"),
    "hint": (hint, range(2), "a hint for the one that you are at, or for NAME: three, the last nearly the answer"),
    "watch": (watch, range(2), "checks whenever you save, and goes on to the next one; with NAME, ends with it"),
    "solution": (answer, range(1, 2), "the answer to NAME, once it is solved, or asked for twice"),
    "reset": (reset, range(1, 1000), "begins each NAME anew, and keeps your file beside it, numbered"),
}


def command(options: argparse.Namespace) -> int:
    """Runs `kernel-fusion learn`. Returns the exit code."""
    run, numbers, _ = WHAT[options.what]
    if len(options.names) not in numbers:
        must = ["no NAME", "one NAME"][numbers[-1]] if numbers[-1] < 2 else "a NAME"
        raise UserError(f"learn {options.what} takes {must}, got {' '.join(options.names) or 'none'}")
    return run(options.names)
