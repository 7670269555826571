"""The lists of planted faults fit the sources and the tests; planted_faults.py notices what survives."""

import collections
import dataclasses
import sys

import pytest
from planted_faults import FAULTS, LAYERS

from kernel_fusion.checks import by_pytest, repository
from kernel_fusion.checks.faults import Failure, Fault, planted, read_faults
from kernel_fusion.checks.repository import ROOT
from kernel_fusion.console import captured


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


def test_each_fault_has_a_test_that_exists(request):
    """With these very parameters. pytest names those that it does not find, asked for those that do not run now."""
    here = {item.nodeid for item in request.session.items}
    if elsewhere := {test for fault in FAULTS for test in fault.tests} - here:
        done = repository.pytest("--collect-only", "-q", *sorted(elsewhere))
        assert done.returncode == 0, done.stdout + done.stderr


def test_all_layers_have_faults():
    assert all(LAYERS.values())
    assert {fault.file.split("/")[0] for fault in FAULTS} >= {path.name for path in ROOT.glob("step*-*")}


ENTRY = "a-fault: wrong\n@ program.py\n- 2 * x\n+ 3 * x\n> test_program.py::test_of_three\n"


def test_a_list_is_read(tmp_path):
    """Of several lines, the texts are joined; without a new one, the old one goes."""
    list_of_two = tmp_path / "list.txt"
    without_new = ENTRY.replace("+ 3 * x", "- y\n> test_program.py::test_of_two")
    list_of_two.write_text(f"# A heading.\n\n{ENTRY}\n{without_new}")
    tests = ("test_program.py::test_of_two", "test_program.py::test_of_three")
    assert read_faults(list_of_two) == [
        Fault("a-fault", "wrong", "program.py", "2 * x", "3 * x", tests[1:]),
        Fault("a-fault", "wrong", "program.py", "2 * x\ny", "", tests),
    ]


@pytest.mark.parametrize("line", [line for line in ENTRY.splitlines(keepends=True) if not line.startswith("+")])
def test_an_entry_that_lacks_a_line_is_named_by_its_place(line, tmp_path):
    wrong = tmp_path / "list.txt"
    wrong.write_text(f"{ENTRY}\n{ENTRY.replace(line, '')}")
    with pytest.raises(Failure, match=r"list.txt:7: no fault: "):
        read_faults(wrong)


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
        fault = Fault("a-fault", "wrong", "program.py", "2 * x", new, (f"test_program.py::{test}",))
        return by_pytest.plant([fault], jobs=2, show=False)

    return plant


def test_a_fault_that_its_test_sees_is_caught_and_another_survives(small):
    assert small("3 * x") == []
    assert small("x * x", "test_of_two") == ["a-fault"]


@pytest.mark.parametrize(("new", "test"), [("(", "test_of_three"), ("3 * x", "test_of_four")])
def test_a_test_that_says_nothing_is_an_error(new, test, small):
    """It cannot be imported, or there is none of that name."""
    assert any(line.startswith("a-fault: pytest ended with 4") for line in small(new, test))


def test_a_test_that_fails_without_a_fault_is_an_error(small, tmp_path):
    (tmp_path / "test_program.py").write_text(TESTS.replace("== 6", "== 7"))
    assert [line.splitlines()[0] for line in small("3 * x")] == ["without a fault pytest ended with 1:"]


def test_the_command_knows_its_faults():
    ran = captured([sys.executable, ROOT / "tests" / "planted_faults.py", "--only", "no-such-fault"])
    assert ran.returncode == 2
    assert "invalid choice: 'no-such-fault'" in ran.stderr
