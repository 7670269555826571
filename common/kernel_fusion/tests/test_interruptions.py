"""Ctrl-C ends each long command, and what it started, with one line and the shell's code for it."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from kernel_fusion.bench import rung_counts
from kernel_fusion.console import child_environment
from kernel_fusion.tests.fake_repository import FakeRepository
from kernel_fusion.tests.test_console import HANGS_S, _alive, _wait_for

# Says who is at work, and does not end.
SLEEPS = """
import os, pathlib, time
beside = pathlib.Path({marker!r} + ".tmp")
beside.write_text(str(os.getpid()))
os.replace(beside, {marker!r})
time.sleep(3600)
"""


def as_in_a_terminal():
    """What is started in the background ignores SIGINT, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt(command: list[str], marker: pathlib.Path, how_to_go_on: str = "", **options) -> str:
    """Starts `command`, presses Ctrl-C once `marker` has the id of a process at work, looks what is left, and returns
    what was said.
    """
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, preexec_fn=as_in_a_terminal, **options) as process:
        try:
            at_work = int(_wait_for(lambda: marker.exists() and marker.read_text()))
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that stand in the foreground
            out, err = process.communicate(timeout=HANGS_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 130, out + err
    assert err.endswith(f"kernel-fusion: interrupted{how_to_go_on}\n")
    assert "Traceback" not in out + err
    _wait_for(lambda: not _alive(at_work))
    return out


GO_ON = {"tour": "; make tour goes on at step1-fake"}


@pytest.mark.parametrize("command", ["tour", "check", "bench"])
def test_what_runs_in_children_is_ended(tmp_path, command):
    repository, marker = FakeRepository(tmp_path, 1), tmp_path / "at-work"
    sleeps = SLEEPS.format(marker=str(marker))
    repository.step("step1-fake", before=sleeps)
    (tmp_path / "step1-fake" / "test.py").write_text(f"def test_sleeps():\n    exec({sleeps!r})\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npython_files = ["test.py"]\n')
    assert repository.python("-c", "import os; os.chdir('step1-fake'); exec(open('setup.py').read())").returncode == 0
    words = [sys.executable, "-m", "kernel_fusion", command]
    interrupt(words, marker, GO_ON.get(command, ""), cwd=tmp_path, env=repository.environment())


@pytest.mark.parametrize("command", ["tour", "profile double --device cpu"])
def test_a_build_is_ended(tmp_path, command):
    repository, marker = FakeRepository(tmp_path, 1), tmp_path / "at-work"
    repository.step("step1-fake", build=SLEEPS.replace("{marker!r}", repr(str(marker))))
    # Without what a fake repository puts behind it.
    shutil.copy(rung_counts.__file__, tmp_path / "common" / "kernel_fusion" / "bench")
    words = [sys.executable, "-m", "kernel_fusion", *command.split()]
    interrupt(words, marker, GO_ON.get(command, ""), cwd=tmp_path, env=repository.environment())


PROGRAM = r"""
#include <unistd.h>

#include <cstdio>

int main(int, char** words) {
  std::FILE* file = std::fopen(words[1], "w");
  std::fprintf(file, "%d", getpid());
  std::fclose(file);
  sleep(3600);
}
"""


@pytest.mark.parametrize("option", [[], ["--count"]], ids=["simt", "simt --count"])
def test_a_program_is_ended(tmp_path, option):
    (tmp_path / "sleeps.cu").write_text(PROGRAM)
    marker = tmp_path / "at-work"
    command = [sys.executable, "-m", "kernel_fusion", "simt", *option, str(tmp_path / "sleeps.cu"), str(marker)]
    interrupt(command, marker, env=child_environment())
