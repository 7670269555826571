"""Tasks name what failed and go on; children do not outlive an interruption."""

import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from emulator import console
from kernel_fusion import testing
from kernel_fusion.console import (
    CommandFailed,
    Refused,
    Tasks,
    child_environment,
    duration,
    make_console,
    milliseconds,
    run_logged,
)

HANGS_S = 1800


@pytest.fixture
def piped():
    return make_console(file=io.StringIO())


def text(piped):
    return piped.file.getvalue()


def test_piped_steps_are_one_plain_line_each(piped):
    tasks = Tasks(piped, total=3)
    with tasks.task("build the house"):
        pass
    tasks.note("paint it", "ok before")
    tasks.skip("move in", "no furniture")
    assert tasks.finish() == 0
    lines = re.sub(r"[\d.]+ s$", "T s", text(piped), flags=re.MULTILINE).splitlines()
    assert lines == [
        "[1/3] build the house … ok, T s",
        "[2/3] paint it … ok before",
        "[3/3] move in … not run: no furniture",
        "not run: move in: no furniture",
    ]


def test_a_step_that_fails_is_named_and_the_next_one_runs(piped):
    tasks = Tasks(piped, total=2)
    with tasks.task("first"):
        raise ValueError("the reason")
    with tasks.task("second"):
        pass
    assert tasks.finish() == 1
    assert "[1/2] first … FAILED after" in text(piped)
    assert "ValueError: the reason" in text(piped)
    assert "[2/2] second … ok" in text(piped)
    assert text(piped).endswith("failed: first\n")


@pytest.mark.parametrize(
    ("error", "code", "ending"),
    [
        (Refused("compute-sanitizer is not installed"), 0, r"not run: compute-sanitizer is not installed\n"),
        (console.UserError("install binutils"), 1, r"FAILED after [\d.]+ s\ninstall binutils\n"),
    ],
    ids=["neither passed nor failed", "to be mended by the user"],
)
def test_what_is_no_fault_of_ours_is_its_text_alone(piped, error, code, ending):
    tasks = Tasks(piped, total=1)
    with tasks.task("racecheck"):
        raise error
    assert re.fullmatch(rf"\[1/1\] racecheck … {ending}", text(piped))
    assert tasks.finish() == code


def test_an_interruption_is_no_failed_step(piped):
    tasks = Tasks(piped, total=1)
    with pytest.raises(KeyboardInterrupt), tasks.task("long"):
        raise KeyboardInterrupt
    assert tasks.failed == []
    assert text(piped) == "[1/1] long … interrupted\n"


def test_a_piped_task_says_what_it_is_at_before_it_ends(piped):
    with Tasks(piped, total=1).task("long") as at:
        at("1 of 2")
        assert text(piped) == "[1/1] long … "
    assert re.fullmatch(r"\[1/1\] long … ok, [\d.]+ s\n", text(piped))


def test_a_piped_task_is_never_silent_for_long(piped, monkeypatch):
    monkeypatch.setattr(console, "SILENT_S", 0.01)
    with Tasks(piped, total=1).task("long") as at:
        _wait_for(lambda: "\n" in text(piped))  # although the body says nothing
        at("1 of 2")
        _wait_for(lambda: "1 of 2" in text(piped))
    lines = re.sub(r"[\d.]+ s\b", "T s", text(piped)).splitlines()
    assert lines[0] == "[1/1] long … T s …"
    assert lines[-2:] == ["[1/1] long … 1 of 2, T s …", "[1/1] long … ok, T s"]


def test_on_a_terminal_a_step_shows_how_far_it_is():
    terminal = make_console(file=io.StringIO(), force_terminal=True, width=80)
    with Tasks(terminal, total=1).task("long") as at:
        at("1/2")
        _wait_for(lambda: "[1/1] long … 1/2" in text(terminal))
    assert "[1/1] long … ok" in re.sub(r"\x1b\[[\d;]*m", "", text(terminal))


def test_work_that_takes_long_is_announced_on_standard_error(monkeypatch, capsys):
    with console.progress("compiling"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(console, "SLOW_S", 0.01)
    said = []

    def heard():
        said.append(capsys.readouterr())
        return said[-1].err

    with console.progress("compiling [all]") as at:
        at("1/2")
        _wait_for(heard)
    said.append(capsys.readouterr())
    assert "".join(one.err for one in said) == "compiling [all] …\n"
    assert [one.out for one in said] == [""] * len(said)


@pytest.mark.parametrize("terminal", [False, True], ids=["piped", "on a terminal"])
def test_work_that_takes_long_says_how_far_it_is_and_how_long_it_takes(monkeypatch, capsys, terminal):
    if terminal:
        real = make_console
        monkeypatch.setattr(console, "make_console", lambda **options: real(**options, force_terminal=True, width=80))
        monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(console, "SLOW_S", 0.01)
    monkeypatch.setattr(console, "SILENT_S", 0.01)
    said = []

    def heard(words):
        said.append(capsys.readouterr().err)
        return words in "".join(said)

    with console.progress("compiling") as at:
        at("1 of 2")
        _wait_for(lambda: heard("compiling … 1 of 2, "))
        at("2 of 2")
        _wait_for(lambda: heard("compiling … 2 of 2, "))
    heard("")
    lines = "".join(said).split("\r\x1b[2K" if terminal else "\n")
    pattern = r"(compiling …( [12] of 2(, [\d.]+ s)?)?)?" if terminal else r"(compiling …( [12] of 2, [\d.]+ s …)?)?"
    assert [line for line in lines if not re.fullmatch(pattern, line)] == []


def test_on_a_terminal_work_shows_how_far_it_is_on_one_line(monkeypatch, capsys):
    real = make_console
    monkeypatch.setattr(console, "make_console", lambda **options: real(**options, force_terminal=True, width=20))
    monkeypatch.setenv("TERM", "xterm")

    def work():
        with console.progress("compiling") as at:
            at("1/2")
            at("a very long word about it")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    lines = capsys.readouterr().err.split("\r\x1b[2K")
    assert lines == ["", "compiling …", "compiling … 1/2", "compiling … a very ", ""]


def test_a_command_that_fails_shows_the_end_of_its_log(piped, tmp_path):
    tasks = Tasks(piped, total=1)
    script = "print('said before'); raise SystemExit(3)"
    with tasks.task("command"):
        run_logged([sys.executable, "-c", script], tmp_path / "logs" / "it.log")
    assert "said before" in text(piped)
    assert "ended with code 3; its output is in" in text(piped)


def test_a_command_ended_by_a_signal_says_so(tmp_path):
    script = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with testing.raises(CommandFailed, "was ended by SIGSEGV"):
        run_logged([sys.executable, "-c", script], tmp_path / "it.log")


def test_lines_arrive_while_the_command_runs(tmp_path):
    lines = []
    run_logged([sys.executable, "-c", "print(1); print(2)"], tmp_path / "it.log", on_line=lines.append)
    assert lines == ["1", "2"]
    assert (tmp_path / "it.log").read_text().endswith("1\n2\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_ends_the_command_and_what_it_started(tmp_path, number):
    marker = tmp_path / "grandchild"
    note = f"pathlib.Path({str(marker)!r}).write_text(str(os.getpid()))"
    grandchild = f"import os, pathlib, time; {note}; time.sleep({2 * HANGS_S})"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    parent = (
        "import pathlib, signal, sys; from kernel_fusion.console import run_logged; "
        # A shell starts background jobs with SIGINT ignored, and its children inherit that.
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"run_logged([sys.executable, '-c', {child!r}], pathlib.Path({str(tmp_path / 'log')!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], env=child_environment(), stderr=subprocess.DEVNULL)
    pid = _wait_for(lambda: marker.exists() and marker.read_text())
    process.send_signal(number)
    assert process.wait(timeout=HANGS_S) != 0
    assert _wait_for(lambda: not _alive(int(pid)))


def _wait_for(condition):
    end = time.monotonic() + HANGS_S
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")


@pytest.mark.parametrize(
    ("ms", "words"),
    [(0.00123, "1.23 µs"), (0.0456, "45.6 µs"), (0.789, "789 µs"), (0.99999, "1.00 ms"), (12.34, "12.3 ms"),
     (1200, "1.20 s")],
)  # fmt: skip
def test_times_have_three_digits(ms, words):
    assert milliseconds(ms) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.44, "0.4 s"), (12.4, "12 s"), (59.9, "1 min 00 s"), (185, "3 min 05 s")]
)
def test_durations_are_short(seconds, words):
    assert duration(seconds) == words
