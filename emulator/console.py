"""What a command says to people, on a terminal or piped."""

import argparse
import contextlib
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

PIPED_WIDTH = 120


def make_console(**options: Any) -> Console:
    """A rich console. Where the output is no terminal it writes no control characters and cuts no table short."""
    console = Console(highlight=False, **options)
    if not console.is_terminal:
        console = Console(highlight=False, **{"width": PIPED_WIDTH, "color_system": None, **options})
    return console


def duration(seconds: float) -> str:
    """`seconds` for people: "0.4 s", "12 s", "3 min 05 s"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


SLOW_S = 2.0  # from when on something is said of work that is not shown on a terminal
SILENT_S = 15.0  # and how far it is, so often


@contextlib.contextmanager
def spoken(say: Callable[[str], Any], first_s: float = 0.0) -> Iterator[Callable[[str], Any]]:
    """While the body works, says each `SILENT_S` how far it is and for how long it has been at it, "3 of 7, 15 s"; with
    `first_s` an empty text once before, after so many seconds. Yields a function that takes how far.

    A thread speaks, so that a body says something which does not come to it; it sleeps in between.
    """
    at, over, began = "", threading.Event(), time.monotonic()

    def tell(words: str) -> None:
        nonlocal at
        at = words

    def speak() -> None:
        if first_s and not over.wait(first_s):
            say("")
        while not over.wait(SILENT_S):
            say(", ".join(filter(None, (at, duration(time.monotonic() - began)))))

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield tell
    finally:
        over.set()
        speaker.join()


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], Any]]:
    """While the body works, standard error says at what ("building step1-simple") and how far it is: on a terminal
    always, on one line; else by a line each `SILENT_S`, if it takes long. Yields a function that takes how far ("12 of
    79 files"). The body should print nothing.
    """
    console = make_console(stderr=True)
    if console.is_terminal and not console.is_dumb_terminal:
        erase = "\r\x1b[2K"

        def show(at: str) -> None:
            print(erase + f"{text} … {at}".rstrip()[: console.width - 1], end="", file=sys.stderr, flush=True)

        show("")
        try:
            with spoken(show) as tell:
                yield lambda at: [do(at) for do in (tell, show)]
        finally:
            print(erase, end="", file=sys.stderr, flush=True)
        return
    with spoken(lambda at: print(f"{text} …{at and f' {at} …'}", file=sys.stderr, flush=True), SLOW_S) as tell:
        yield tell


class UserError(RuntimeError):
    """What the user can put right; a command prints its text and nothing else."""


def described(prog: str, sentence: str, more: list[str], examples: list[str]) -> dict[str, Any]:
    """For argparse: what a command does in a sentence, `more` paragraphs on what is to be known and the values of its
    arguments, and examples without the program's name."""
    lines = "\n".join(f"  {prog} {example}" for example in examples)
    return {
        "description": textwrap.fill(sentence, 100),
        "epilog": "\n\n".join([*(textwrap.fill(text, 100) for text in more), f"for example:\n{lines}"]),
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def exit_code(prog: str, run: Callable[[], int]) -> int:
    """Runs a command. Returns its exit code, where it was interrupted or the user can put it right after a line."""
    try:
        return run()
    except KeyboardInterrupt as interrupt:  # a command may have said in it how to go on
        print("; ".join([f"{prog}: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 130
    except (UserError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
