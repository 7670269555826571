"""`.ci/run` with other steps in the place of its own: it goes on after a failed one, and not after an interruption."""

import os
import re
import signal
import subprocess
import time

import pytest

from kernel_fusion.checks.repository import ROOT
from kernel_fusion.console import captured

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


TEXT = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def function(name: str) -> str:
    return re.search(rf"^{name}\(\) \{{.*?^\}}$", TEXT, flags=re.MULTILINE | re.DOTALL).group()


@pytest.fixture
def script(tmp_path):
    """The script with these steps, in a folder of its own."""
    before, own = TEXT.split("install() {", maxsplit=1)
    after = own[own.index("printf '\\n==== summary") :]
    path = tmp_path / ".ci" / "run"
    path.parent.mkdir()
    path.write_text(before + STEPS + after, encoding="utf-8")
    path.chmod(0o755)
    return path


HANGS_S = 1800


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
    out, _ = (run := start(script, 0)).communicate(timeout=HANGS_S)
    assert run.returncode == 1
    assert "went on after an error" not in out
    assert "the last step" in out
    summary = out.split("==== summary\n")[1]
    ends = [line.split()[0] if "not run" not in line else "not run" for line in summary.splitlines()[:5]]
    assert ends == ["ok", "FAILED", "not run", "ok", "ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupted_step_is_the_last(script, number):
    run = start(script, 2 * HANGS_S)
    try:
        deadline = time.monotonic() + HANGS_S
        while not (script.parents[1] / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(run.pid, number)  # as Ctrl-C does: the script and what it started
        out, error = run.communicate(timeout=HANGS_S)
    except BaseException:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert run.returncode == 130
    assert "interrupted" in error.splitlines()  # bash may say "Terminated" of the step, before or after
    assert "a long one" in out
    assert "the end" not in out


def growth(tmp_path, yardsticks: list[int], tour: int, tests: int) -> subprocess.CompletedProcess:
    """The step that judges how long the tour and the tests took, with these figures, in hundredths and in seconds."""
    limits = "tour_limit=20 tests_limit=50\n"
    folder = tmp_path / "build" / "ci"
    (folder / "yardstick").mkdir(parents=True)
    (folder / "yardstick" / "seconds").write_text("".join(f"{each}\n" for each in yardsticks))
    (folder / "tour.seconds").write_text(f"{tour}\n")
    (folder / "tests.seconds").write_text(f"{tests}\n")
    script = f"set -euo pipefail\n{limits}cores=2\nstated_times() {{ echo judged: $*; }}\n{function('growth')}\ngrowth"
    return captured(["bash", "-c", script], tmp_path)


@pytest.mark.parametrize(
    ("yardsticks", "tour", "tests", "code", "said"),
    [
        ([1000, 1100, 1000], 200, 500, 0, "tests: 500 s, 50 yardsticks, of which it may take 50"),
        ([1000, 1100, 1000], 201, 500, 1, "tour: this has grown"),
        ([1000, 1100, 1000], 200, 510, 1, "tests: this has grown"),
        ([2000, 2100, 2000], 400, 1000, 0, "tour: 400 s, 20 yardsticks, of which it may take 20"),
        ([1000, 1300, 1000], 999, 999, 3, "the machine was busy: not judged"),
    ],
)
def test_growth_is_judged_by_yardsticks_and_only_on_a_quiet_machine(tmp_path, yardsticks, tour, tests, code, said):
    done = growth(tmp_path, yardsticks, tour, tests)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    words = f"judged: build/ci/tour.log {tour} {' '.join(map(str, yardsticks))}\n"
    assert (words in done.stdout) == (code == 0)


def test_the_longest_silence_of_a_tour_is_measured(tmp_path):
    (tmp_path / "build" / "ci").mkdir(parents=True)
    script = f"set -eu\n{function('with_silence')}\n(echo one; sleep 2; echo '  two') | with_silence"
    done = captured(["bash", "-c", script], tmp_path)
    assert done.stdout == "one\n  two\n"
    assert int((tmp_path / "build" / "ci" / "tour.silence").read_text()) in range(1, 60)


@pytest.mark.parametrize(("yardstick", "silent"), [(250, 20), (600, 20), (1900, 57)])
def test_a_slow_machine_may_be_silent_for_longer(tmp_path, yardstick, silent):
    (tmp_path / "build" / "ci" / "yardstick").mkdir(parents=True)
    (tmp_path / "build" / "ci" / "yardstick" / "seconds").write_text(f"9999\n{yardstick}\n")
    done = captured(["bash", "-c", f"set -eu\n{function('silence')}\nsilence"], tmp_path)
    assert done.stdout == f"{silent}\n", done.stderr


@pytest.mark.parametrize(
    ("passed", "yardstick", "long", "code"),
    [(4590, 2000, "", 0), (4610, 2000, "", 3), (4610, 800, "", 0), (9999, 2000, 1, 0)],
)
def test_what_is_drawn_is_left_out_on_a_slow_machine_and_never_in_the_long_run(tmp_path, passed, yardstick, long, code):
    (tmp_path / "build" / "ci" / "yardstick").mkdir(parents=True)
    (tmp_path / "build" / "ci" / "yardstick" / "seconds").write_text(f"9999\n{yardstick}\n")
    script = f"set -eu\nlong={long} SECONDS={passed}\n{function('in_time')}\nin_time 20 || exit 3"
    done = captured(["bash", "-c", script], tmp_path)
    assert done.returncode == code, done.stderr
    assert ("and this would take 400 on this machine: left out" in done.stdout) == (code == 3)


def test_an_unknown_argument_is_refused():
    done = captured([ROOT / ".ci" / "run", "--lnog"])
    assert (done.returncode, done.stderr) == (2, "usage: .ci/run [--long]\n")


def test_the_tour_and_the_tests_run_before_anything_is_installed_for_them():
    steps = re.findall(r'^step "[^"]*" (\w+)$', TEXT, flags=re.MULTILINE)
    assert steps.index("tour") < steps.index("tests") < steps.index("more_tools") < steps.index("tests_with_tools")


def test_what_make_test_leaves_out_is_in_the_long_run():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert '-m "not long" tests emulator common $(STEPS)' in makefile
    assert re.search(r"^long_tests\(\) \{ .* -m long common emulator tests step\*-\*; \}$", TEXT, flags=re.MULTILINE)
    steps = re.findall(r'^  step "[^"]*" (\w+)$', TEXT.split('if [ -n "$long" ]')[1], flags=re.MULTILINE)
    assert {"long_tests", "all_planted_faults"} <= set(steps)


def test_tools_are_hidden_from_the_path_and_all_else_is_left(tmp_path):
    for folder, programs in {"one": ("cmake", "of_one"), "two": ("of_two",), "three": ("gdb", "of_three")}.items():
        (tmp_path / folder).mkdir()
        for program in programs:
            (tmp_path / folder / program).write_text("#!/bin/sh\n")
            (tmp_path / folder / program).chmod(0o755)
    path = os.pathsep.join([*(str(tmp_path / folder) for folder in ("one", "two", "three")), os.environ["PATH"]])
    script = f"set -eu\n{function('hide_tools')}\nhide_tools\n"
    script += "for p in of_one of_two of_three bash; do command -v $p; done\n"
    done = captured(["bash", "-c", script], tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:3] == [
        f"{tmp_path}/build/ci/path/1/of_one",
        f"{tmp_path}/two/of_two",
        f"{tmp_path}/build/ci/path/2/of_three",
    ]
