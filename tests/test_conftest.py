"""What conftest.py adds to pytest: which tests run."""

import re

from kernel_fusion.checks.repository import ROOT, pytest


def collected(*arguments: str) -> list[str]:
    """The tests that pytest would run."""
    done = pytest("--collect-only", "-q", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


PROBE = """
import os, pathlib, pytest
def note(n):
    with open(pathlib.Path(__file__).with_name("drawn"), "a") as drawn:
        print(n, os.environ.get("KF_SIMT_SCHEDULE"), file=drawn)
@pytest.mark.emulated
@pytest.mark.parametrize("n", range(40))
def test_probe(n):
    note(n)
    assert n != FAILS
def test_nothing_emulated():
    note("plain")
"""


def schedules_drawn(folder, *options: str, fails: int | None = None) -> tuple[dict[str, str], str]:
    """The schedule in which each of the probe's tests ran, and what pytest printed."""
    (folder / "test_probe.py").write_text(PROBE.replace("FAILS", str(fails)), encoding="utf-8")
    (folder / "drawn").unlink(missing_ok=True)
    done = pytest("-q", "-p", "conftest", "-p", "no:cacheprovider", *options, str(folder / "test_probe.py"))
    assert done.returncode == (0 if fails is None else 1), done.stdout + done.stderr
    drawn = dict(line.split() for line in (folder / "drawn").read_text(encoding="utf-8").splitlines())
    return drawn, done.stdout


def test_each_emulated_test_draws_a_schedule_always_the_same_and_says_which_where_it_fails(tmp_path, monkeypatch):
    monkeypatch.delenv("KF_SIMT_SCHEDULE", raising=False)
    drawn, printed = schedules_drawn(tmp_path, fails=7)
    assert set(drawn.values()) == {"None"}
    assert "KF_SIMT_SCHEDULE" not in printed
    drawn, _ = schedules_drawn(tmp_path, "--schedules=reverse,random:1,random:2")
    assert drawn.pop("plain") == "None"
    assert len(drawn) == 40
    assert set(drawn.values()) == {"reverse", "random:1", "random:2"}
    again, printed = schedules_drawn(tmp_path, "--schedules=reverse,random:1,random:2", fails=7)
    assert again == {**drawn, "plain": "None"}
    assert f"KF_SIMT_SCHEDULE={drawn['7']}" in printed


def test_a_sample_is_at_most_so_many_of_a_file():
    every, sample = (collected(*options, "tests/test_make.py") for options in ((), ("--sample=4",)))
    assert 2 <= len(sample) <= 4 < len(every)
    assert set(sample) < set(every)


def test_cases_that_a_condition_leaves_out_are_not_collected():
    file = "step2-attention/tests/test_attention_autograd.py"
    tests = collected(f"{file}::test_gradient_of_attention")  # float64, 3 columns
    assert any("v1_naive" in test for test in tests)
    assert not any("v2_tiled" in test or "v3_mma" in test for test in tests)


CRASH = """
import os, pytest
@pytest.mark.parametrize("n", range(60))
def test_probe(n):
    if n == 31:
        os.abort()
"""


def test_a_crash_ends_the_run_of_make_test_and_is_named(tmp_path):
    options = re.search(r"^XDIST := (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    options[options.index("-n") + 1] = "2"
    (tmp_path / "test_probe.py").write_text(CRASH, encoding="utf-8")
    done = pytest(
        "-q", "-p", "conftest", "-p", "no:cacheprovider", *options, str(tmp_path / "test_probe.py"), timeout=1800
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"crashed while running '\S*test_probe\[31\]'", done.stdout)
