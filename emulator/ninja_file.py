"""Ninja files, and what both that build by them need: the steps' libraries and the emulator's programs."""

import contextlib
import fcntl
import functools
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence


def ninja_path(path: str | pathlib.Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def shell_words(words: Iterable[object]) -> str:
    return " ".join(shlex.quote(str(word)) for word in words).replace("$", "$$")


class NinjaFile:
    """Collects rules and build lines."""

    def __init__(self) -> None:
        self.lines = ["ninja_required_version = 1.5", ""]

    def rule(self, name: str, command: str, description: str, deps: bool = True) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {description}"]
        if deps:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]
        self.lines.append("")

    def build(
        self,
        output: pathlib.Path,
        rule: str,
        inputs: Iterable[str | pathlib.Path],
        implicit: Sequence[pathlib.Path] = (),
        **variables: str,
    ) -> None:
        line = f"build {ninja_path(output)}: {rule} {' '.join(map(ninja_path, inputs))}"
        if implicit:
            line += " | " + " ".join(map(ninja_path, implicit))
        self.lines += [line, *(f"  {name} = {words}" for name, words in variables.items())]

    def write(self, path: pathlib.Path) -> None:
        write_if_changed(path, "\n".join(self.lines) + "\n")


def write_if_changed(path: pathlib.Path, text: str) -> None:
    """Writes a file beside its place and renames it; one that holds this already keeps its time."""
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text)
    os.replace(beside, path)


@contextlib.contextmanager
def one_at_a_time(folder: pathlib.Path, what: str) -> Iterator[dict]:
    """Keeps other processes from building in `folder` until the body is through; says so where one is at it.

    Yields, for `subprocess`, the options of the commands that build: they hold the lock too, so that what outlives this
    process, killed for instance, is waited for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+") as lock:  # holds the name of what is built
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            theirs = lock.read() or what
            print(f"waiting for another process that compiles {theirs} …", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(what)
        lock.flush()
        yield {"pass_fds": [lock.fileno()]}


@functools.cache
def is_clang(cxx: str) -> bool:
    """Whether the compiler is clang, which says that it is GCC too."""
    command = [*shlex.split(cxx), "-dM", "-E", "-x", "c++", os.devnull]
    return "__clang__" in subprocess.run(command, capture_output=True, text=True).stdout


def precompile(ninja: NinjaFile, compiler: list, header: pathlib.Path, text: str) -> list[pathlib.Path]:
    """Adds to `ninja` a header that is compiled once for all sources that are compiled with these flags.

    Only for GCC, which reads the header's text where it was compiled with other flags. torch's headers are not worth
    it: they take as long to load as to compile. A source must begin with `header`, by -include or by finding it in the
    first folder. Returns what must be there before a source is compiled with `compiler`, a command with all its flags.
    """
    write_if_changed(header, text)
    if is_clang(str(compiler[0])):
        return []
    compiled = header.with_name(f"{header.name}.gch")
    rule = f"precompile_{header.parent.name}"
    command = f"{shell_words(compiler)} -MD -MF $out.d -x c++-header $in -o $out"
    ninja.rule(rule, command, "c++ the emulation's headers")
    ninja.build(compiled, rule, [header])
    return [compiled]
