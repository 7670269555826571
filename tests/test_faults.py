"""The lists of planted faults fit the sources and the tests; planted_faults.py notices what survives."""

import collections
import dataclasses
import subprocess
import sys

import pytest
from planted_faults import FAULTS, LAYERS

from kernel_fusion.checks import by_pytest, repository
from kernel_fusion.checks.faults import Failure, Fault, planted
from kernel_fusion.checks.repository import ROOT


def test_each_fault_fits_its_source():
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert planted(fault, text) != text, fault.name


@pytest.mark.parametrize("old", ["no such text", "def "])
def test_a_text_that_is_not_there_once_is_an_error(old):
    fault = dataclasses.replace(FAULTS[0], old=old)
    with pytest.raises(Failure, match=f"{fault.name}: .* times, not once; the list is out of date"):
        planted(fault, (ROOT / fault.file).read_text(encoding="utf-8"))


def test_each_fault_has_a_name_of_its_own():
    names = collections.Counter(fault.name for fault in FAULTS)
    assert [name for name, times in names.items() if times > 1] == []


def test_each_fault_has_a_test_that_exists():
    """With these very parameters. pytest names those that it does not find."""
    done = repository.pytest("--collect-only", "-q", *sorted({fault.test for fault in FAULTS}))
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_layers_have_faults():
    assert all(LAYERS.values())
    assert {fault.file.split("/")[0] for fault in FAULTS} >= {path.name for path in ROOT.glob("step*-*")}


def test_the_list_has_a_row_for_each_or_for_those_with_a_word():
    assert by_pytest.table(LAYERS).count("\n| ") == len(FAULTS) + len(LAYERS)  # each layer has a row of headings
    first = FAULTS[0]
    title, _, headings, _, *rows = by_pytest.table(LAYERS, first.name).splitlines()
    assert (title, headings) == (f"### Python: {len(rows)}", "| Name | Fault | File | Caught by |")
    assert f"| {first.name} | {first.what} | {first.file} | {first.test} |" in rows
    assert all(first.name in row for row in rows)


PROGRAM = "def double(x):\n    return 2 * x\n"
TESTS = """\
import sys
sys.path.insert(0, "")
import program

def test_of_two():
    assert program.double(2) == 4

def test_of_three():
    assert program.double(3) == 6
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository of one file and one file of tests; returns a function that plants faults in it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "test_program.py").write_text(TESTS)
    monkeypatch.setattr(by_pytest, "ROOT", tmp_path)
    monkeypatch.setattr(by_pytest, "PRELOADED", ["pytest"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that what is set for the tests' processes is taken back

    def plant(new: str, test: str = "test_of_three") -> list[str]:
        fault = Fault("a-fault", "wrong", "program.py", "2 * x", new, f"test_program.py::{test}")
        return by_pytest.plant([fault], jobs=2, show=False)

    return plant


def test_a_fault_that_its_test_sees_is_caught(small):
    assert small("3 * x") == []


def test_a_fault_that_its_test_does_not_see_survives(small):
    assert small("x * x", "test_of_two") == ["a-fault"]


@pytest.mark.parametrize(("new", "test"), [("(", "test_of_three"), ("3 * x", "test_of_four")])
def test_a_test_that_says_nothing_is_an_error(new, test, small):
    """It cannot be imported, or there is none of that name."""
    assert any(line.startswith("a-fault: pytest ended with 4") for line in small(new, test))


def test_a_test_that_fails_without_a_fault_is_an_error(small, tmp_path):
    (tmp_path / "test_program.py").write_text(TESTS.replace("== 6", "== 7"))
    assert [line.splitlines()[0] for line in small("3 * x")] == ["without a fault pytest ended with 1:"]


def test_the_command_knows_its_faults():
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "planted_faults.py"), "--only", "no-such-fault"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert "invalid choice: 'no-such-fault'" in ran.stderr
