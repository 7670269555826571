"""`kernel-fusion learn` from the first exercise to the last, with the solutions as answers; no wrong one is taken."""

import os
import re
import time

import pytest

from kernel_fusion import cli
from kernel_fusion.checks import times
from kernel_fusion.checks.faults import planted, read_faults
from kernel_fusion.checks.repository import ROOT
from kernel_fusion.learn import check, exercises, guide

WRONG = [
    answer
    for folder in exercises.groups().values()
    for answer in read_faults(folder / "wrong_answers.txt")
]  # fmt: skip
SAMPLE = ("puzzle_05_blocks", "1_grid_stride")  # tried in the usual tests


@pytest.fixture(autouse=True)
def my(tmp_path, monkeypatch):
    """Another reader's folder."""
    monkeypatch.setattr(exercises, "MY", str(tmp_path / "my"))
    monkeypatch.chdir(ROOT)


def solve(name: str, capsys) -> None:
    """What is next must be this one; what is handed out is rejected, and the solution taken."""
    capsys.readouterr()
    assert cli.main(["learn", "next"]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: ")
    solution = exercises.find(name)
    assert cli.main(["learn", "check"]) == 1, name
    assert guide.progress()[name] == {}
    exercises.copy_of(solution).write_text(solution.read_text(encoding="utf-8"), encoding="utf-8")
    code = cli.main(["learn", "check"])
    assert code == 0, capsys.readouterr().out
    assert guide.progress()[name] == {"solved": True}


def walk(names: list[str], capsys) -> None:
    """Solves these, one after the other; all others are solved already."""
    for solution in exercises.solutions():
        if solution.stem not in names:
            guide.record(solution, solved=True)
    for name in names:
        solve(name, capsys)
    capsys.readouterr()
    assert cli.main(["learn", "next"]) == 0
    assert capsys.readouterr().out.startswith("All are solved")


def test_a_few_are_solved_one_after_the_other(capsys):
    walk(list(SAMPLE), capsys)


@pytest.mark.long
def test_all_are_solved_one_after_the_other(capsys):
    later = [name for name in exercises.NAMES if name in exercises.LATER]
    walk([name for name in exercises.NAMES if name not in exercises.LATER] + later, capsys)


def first_of_the_sample(answer) -> bool:
    """Whether this is the first wrong answer to one of the sample."""
    return answer.name in {f"{name}-1" for name in SAMPLE}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answer, id=answer.name, marks=[] if first_of_the_sample(answer) else [pytest.mark.long])
        for answer in WRONG
    ],
)
def test_a_wrong_answer_is_not_taken_and_the_reason_is_said(answer, capsys):
    solution = ROOT / answer.file
    exercises.make(solution)
    copy = exercises.copy_of(solution)
    copy.write_text(planted(answer, solution.read_text(encoding="utf-8")), encoding="utf-8")
    assert cli.main(["learn", "check", solution.stem]) == 1
    said = capsys.readouterr().out
    assert guide.progress() == {solution.stem: {}}
    assert re.search(r"WRONG|error|race in|not what the exercise is about|In another order|kernel \w+", said), said


@pytest.mark.long
@pytest.mark.parametrize(("name", "seconds"), [("1_grid_stride", 3), ("puzzle_07_transpose", 4.5)])
def test_a_save_is_answered_soon(name, seconds):
    """Within 3 s, once the emulation is compiled. A puzzle is compiled twice at once, so its time is two cores'."""
    solution = exercises.find(name)
    exercises.make(solution)
    copy = exercises.copy_of(solution)
    check.check(solution, solution, lambda _: None)  # compiles the emulation, and counts the solution
    pace = times.REFERENCE_S / times.yardstick()  # how much faster the pages' machine is
    text = solution.read_text(encoding="utf-8").replace('"../', f'"{solution.parents[1]}/')
    copy.write_text(f"// {os.getpid()} {time.time()}\n{text}", encoding="utf-8")
    before = sum(os.times()[2:4])
    assert check.check(copy, solution, lambda _: None)
    assert (sum(os.times()[2:4]) - before) * pace < seconds
