"""`.ci/run` with other steps in the place of its own: it goes on after a failed one, and not after an interruption."""

import os
import re
import signal
import subprocess
import time

import pytest
from repository import ROOT

STEPS = """\
quick() { true; }
fails() { false; echo "went on after an error"; }
needs() { return 3; }
waits() { # as pytest and make, it takes the signal itself and ends with a code, so that bash does not end by itself
  bash -c 'trap "exit 130" INT TERM; touch waiting; sleep "$SECONDS_TO_WAIT"'
}
last() { echo "the last step"; }
step "a quick one" quick
step "a failing one" fails
step "one that cannot run" needs
step "a long one" waits
step "the end" last
"""


@pytest.fixture
def script(tmp_path):
    """The script with these steps, in a folder of its own."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    before, own = text.split("system_packages() {", maxsplit=1)
    after = re.split(r'^step "make tour" tour\n', own, flags=re.MULTILINE)[1]
    path = tmp_path / ".ci" / "run"
    path.parent.mkdir()
    path.write_text(before + STEPS + after, encoding="utf-8")
    path.chmod(0o755)
    return path


def start(script, seconds: int) -> subprocess.Popen:
    def as_in_a_terminal():  # a test suite in the background ignores SIGINT, and bash cannot trap what was ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(
        [str(script)],
        env={**os.environ, "SECONDS_TO_WAIT": str(seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=as_in_a_terminal,
    )


def test_a_failed_step_fails_the_run_and_the_next_still_runs(script):
    out, _ = (run := start(script, 0)).communicate(timeout=30)
    assert run.returncode == 1
    assert "went on after an error" not in out
    assert "the last step" in out
    summary = out.split("==== summary\n")[1]
    ends = [line.split()[0] if "not run" not in line else "not run" for line in summary.splitlines()[:5]]
    assert ends == ["ok", "FAILED", "not run", "ok", "ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_step_is_the_last(script, number):
    run = start(script, 60)
    try:
        deadline = time.monotonic() + 30
        while not (script.parents[1] / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(run.pid, number)  # as Ctrl-C does: the script and what it started
        out, error = run.communicate(timeout=30)
    except BaseException:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert run.returncode == 130
    assert "interrupted" in error.splitlines()  # bash may say "Terminated" of the step, before or after
    assert "a long one" in out
    assert "the end" not in out
