"""Output for people, on a terminal or piped, and the tasks of a long command."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from emulator.console import UserError, duration, make_console, progress, spoken  # noqa: F401  for all commands
from kernel_fusion import steps


def milliseconds(ms: float) -> str:
    """A time for people, three digits: "1.23 µs", "45.6 ms", "1.20 s"."""
    for factor, unit in ((1e3, "µs"), (1.0, "ms")):
        if ms * factor < 999.5:
            value = ms * factor
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{ms / 1e3:.2f} s"


def byte_count(count: float) -> str:
    """Bytes for people, three digits: "8.59 GB"."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"


class Refused(RuntimeError):
    """A tool that is missing or refuses this machine: its task was not run, which is neither a pass nor a failure."""


class CommandFailed(RuntimeError):
    """A command that ended with another code than 0."""

    def __init__(self, command: list[str], code: int, log: pathlib.Path | None):
        where = f"; its output is in {log}" if log else ""
        reason = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        super().__init__(f"{' '.join(map(str, command))} {reason}{where}")
        self.command, self.code, self.log = command, code, log


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """While a child runs, SIGTERM becomes SystemExit, so that the child is ended too."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _child(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process in a group of its own. Whatever ends the body early ends the whole group."""
    words = [str(word) for word in command]
    with _sigterm_raises(), subprocess.Popen(words, start_new_session=True, **options) as child:
        try:
            yield child
        except BaseException:
            _end(child)
            raise


def _end(child: subprocess.Popen) -> None:
    """Ends `child` and its process group; asks first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # it may just have ended by itself
            os.killpg(child.pid, number)
        try:
            child.wait(timeout=5)
            return
        except subprocess.TimeoutExpired:
            continue


def child_environment(**more: str) -> dict[str, str]:
    """Our environment for a child, which imports our packages even where they are not installed."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": steps.python_path(), **more}


def captured(
    command: Sequence[Any], cwd: pathlib.Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """`command` once it has ended, whatever its code, with what it printed."""
    env = child_environment(**environment)
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def run_shown(command: list[str], *, cwd: pathlib.Path | None = None, env: dict[str, str] | None = None) -> None:
    """Runs `command`, its output where ours goes. Interrupting this process ends the command and what it started.

    Raises:
        CommandFailed: the command's code is not 0.
    """
    sys.stdout.flush()
    with _child(command, cwd=cwd, env=child_environment(**(env or {})), stdin=subprocess.DEVNULL) as child:
        code = child.wait()
    if code != 0:
        raise CommandFailed(command, code, None)


def run_logged(
    command: list[str],
    log: pathlib.Path,
    *,
    cwd: pathlib.Path | None = None,
    env: dict[str, str] | None = None,
    on_line: Callable[[str], Any] | None = None,
) -> None:
    """Runs `command`, its output into `log`. Interrupting this process ends the command and what it started.

    Args:
        on_line: called with each line of output as it comes.

    Raises:
        CommandFailed: the command's code is not 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        log.open("w", encoding="utf-8") as output,
        _child(command, cwd=cwd, env=child_environment(**(env or {})), text=True, errors="replace", **options) as child,
    ):
        output.write(f"$ {' '.join(map(str, command))}\n")
        for line in child.stdout or ():
            output.write(line)
            output.flush()
            if on_line:
                on_line(line.rstrip("\n"))
        code = child.wait()
    if code != 0:
        raise CommandFailed(command, code, log)


def last_lines(path: pathlib.Path, count: int = 30) -> str:
    """The end of a log, to be shown where a task failed."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


class Tasks:
    """The tasks of a long command: one line each, with its time; failures are collected and named at the end."""

    def __init__(self, console: Console, total: int):
        self.console, self.total = console, total
        self.number = 0
        self.failed: list[str] = []
        self.not_run: list[str] = []

    @contextlib.contextmanager
    def task(self, name: str, *, shows: bool = False, note: str = "") -> Iterator[Callable[[str], Any]]:
        """Runs the body as a task. An exception in it makes the task a failed one, and the next task may still run.

        `shows`: the body prints something; otherwise a terminal shows a spinner meanwhile, and a pipe gets a line each
        `SILENT_S`. `note`: what else is said of it at its begin, such as how long it takes. Yields a function that
        takes how far the task is, "12 of 79 files" for instance.
        """
        self.number += 1
        label = f"[{self.number}/{self.total}] {name}{f', {note}' if note else ''}"
        began = time.monotonic()
        if shows:
            self.console.print(label, style="bold", markup=False)
        elif not self.console.is_terminal:
            self.console.print(f"{label} … ", end="", markup=False)  # what it is at; how it ended comes behind it
        end = label if self.console.is_terminal or shows else ""

        def say(at: str) -> None:
            nonlocal end
            self.console.print(f"{end and f'{end} … '}{at} …", markup=False, soft_wrap=True)
            end = label

        try:
            if shows:
                yield lambda at: None
            elif self.console.is_terminal:
                with self.console.status(label) as status:
                    yield lambda at: status.update(f"{label} … {at}")
            else:
                with spoken(say) as tell:
                    yield tell
        except Refused as refusal:
            self._not_run(name, end, str(refusal))
        except Exception as error:
            self.failed.append(name)
            self._line(end, f"FAILED after {duration(time.monotonic() - began)}", "bold red")
            self.console.print(_explanation(error), markup=False, soft_wrap=True)
        except BaseException:
            self._line(end, "interrupted", "bold red")
            raise
        else:
            self._line(end, f"ok, {duration(time.monotonic() - began)}", "green")

    def skip(self, name: str, why: str) -> None:
        """Counts a task that cannot run, and says why."""
        self.number += 1
        self._not_run(name, f"[{self.number}/{self.total}] {name}", why)

    def note(self, name: str, outcome: str) -> None:
        """Counts a task that needs not run again."""
        self.number += 1
        self._line(f"[{self.number}/{self.total}] {name}", outcome, "green")

    def _not_run(self, name: str, label: str, why: str) -> None:
        self.not_run.append(f"{name}: {why}")
        self._line(label, f"not run: {why}", "yellow")

    def _line(self, label: str, outcome: str, style: str) -> None:
        if label:
            self.console.print(f"{label} … ", end="", markup=False)
        self.console.print(outcome, style=style, markup=False, soft_wrap=True)

    def finish(self) -> int:
        """Prints what failed and what was not run. Returns the exit code."""
        for line in self.not_run:
            self.console.print(f"not run: {line}", style="yellow", markup=False, soft_wrap=True)
        for name in self.failed:
            self.console.print(f"failed: {name}", style="bold red", markup=False, soft_wrap=True)
        return 1 if self.failed else 0


def _explanation(error: Exception) -> str:
    """What to print about a task that failed: the end of its log, or where in Python it was."""
    if isinstance(error, CommandFailed):
        return f"{last_lines(error.log)}\n{error}" if error.log else str(error)
    if isinstance(error, UserError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()
