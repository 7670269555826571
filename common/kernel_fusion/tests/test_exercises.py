"""Skeletons cut from solutions: what is cut, what is refused, and that nobody's answer is lost."""

import pytest

from kernel_fusion import cli, steps, testing
from kernel_fusion.console import UserError
from kernel_fusion.learn import exercises

SOLUTION = """\
int twice(int x) {
  // SOLUTION: double it
  // | // (a shift is allowed)
  // | return 0;
  // | if (x) {
  // |   y();
  const int y = x;  // | is not the skeleton's here
  return 2 * y;
  // END
}
int once(int x) {
  // SOLUTION
  // |
  // |return x - 1;
  return x;
  // END
}
"""

SKELETON = """\
int twice(int x) {
  // TODO: double it
  // (a shift is allowed)
  return 0;
  if (x) {
    y();
}
int once(int x) {

  return x - 1;
}
"""


@pytest.fixture
def solution(tmp_path, monkeypatch):
    """A repository with one solution."""
    path = tmp_path / "step2-attention" / "exercises" / "solutions" / "1_twice.cu"
    path.parent.mkdir(parents=True)
    path.write_text(SOLUTION)
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    return path


def test_programs_stand_by_their_numbers_and_hunts_come_last(tmp_path):
    names = ["1_first", "2_second", "9_ninth", "10_tenth", "hunt_1_one", "hunt_2_two", "hunt_10_ten"]
    for name in reversed(names):
        (tmp_path / f"{name}.cu").touch()
    assert [path.stem for path in exercises.programs(tmp_path)] == names


def test_the_answer_is_cut_and_the_skeletons_own_lines_stay(solution):
    assert exercises.cut(solution) == SKELETON


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("// SOLUTION: a\n// SOLUTION: b\n// END\n", ":2: SOLUTION within the one of line 1"),
        ("// SOLUTION: a\nx\n", ":1: SOLUTION without an END after it"),
        ("x\n// END\n", ":2: END without a SOLUTION before it"),
        ("// SOLUTION a\n// END\n", ":1: must be `// SOLUTION` or `// SOLUTION: what to write`, got `// SOLUTION a`"),
        ("x\n", "no line `// SOLUTION`"),
    ],
)
def test_a_wrong_marker_is_an_error_with_its_line(solution, text, complaint):
    solution.write_text(text)
    with testing.raises(UserError, f"{solution}", complaint):
        exercises.cut(solution)


def test_a_first_call_makes_a_copy_that_names_itself(solution, capsys):
    solution.write_text(f"// kernel-fusion simt exercises/solutions/1_twice.cu\n{SOLUTION}")
    assert cli.main(["exercises"]) == 0
    copy = solution.parents[1] / "mine" / "1_twice.cu"
    assert copy.read_text() == f"// kernel-fusion simt exercises/mine/1_twice.cu\n{SKELETON}" == exercises.cut(solution)
    assert "step2-attention/exercises/mine/1_twice.cu: made\n" in capsys.readouterr().out
    assert cli.main(["exercises"]) == 0
    assert "1_twice.cu: not begun\n" in capsys.readouterr().out


def test_what_a_reader_wrote_is_never_touched_unasked(solution, capsys):
    cli.main(["exercises"])
    copy = exercises.copy_of(solution)
    copy.write_text(SKELETON.replace("return 0;", "return x + x;"))
    before = copy.read_text()
    for text in (SOLUTION, SOLUTION.replace("int y", "int z")):  # also where the exercise itself has changed since
        solution.write_text(text)
        assert cli.main(["exercises"]) == 0
        assert copy.read_text() == before
    assert "1_twice.cu: yours, 1 line changed\n" in capsys.readouterr().out


def test_reset_begins_one_anew_and_keeps_what_was_written(solution, tmp_path, capsys):
    other = solution.with_name("2_thrice.cu")
    other.write_text(SOLUTION)
    cli.main(["exercises"])
    copy = exercises.copy_of(solution)
    exercises.copy_of(other).write_text("mine\n")
    for answer in ("my first answer\n", "my second answer\n"):
        copy.write_text(answer)
        assert cli.main(["exercises", "--reset", "1_twice"]) == 0
        assert copy.read_text() == SKELETON
    assert exercises.copy_of(other).read_text() == "mine\n"
    kept = list((tmp_path / "build" / "exercises").iterdir())
    assert sorted(path.read_text() for path in kept) == ["my first answer\n", "my second answer\n"]
    said = capsys.readouterr().out
    assert [path for path in kept if str(path.relative_to(tmp_path)) not in said] == []
    assert cli.main(["exercises", "--reset", "1_twice.cu", "--reset", "2_thrice"]) == 0
    assert exercises.copy_of(other).read_text() == SKELETON
    assert len(list((tmp_path / "build" / "exercises").iterdir())) == 3  # what was as handed out is not kept


def test_an_exercise_that_is_not_there_is_an_error_and_nothing_is_written(solution, capsys):
    cli.main(["exercises"])
    exercises.copy_of(solution).write_text("mine\n")
    assert cli.main(["exercises", "--reset", "1_twice", "--reset", "9_gone"]) == 1
    assert "the exercise must be one of 1_twice, got '9_gone'" in capsys.readouterr().err
    assert exercises.copy_of(solution).read_text() == "mine\n"


def test_git_and_the_checks_of_layout_pass_copies_by():
    """A reader's copies turn neither `git status` nor `make lint` nor a test red."""
    root = steps.ROOT
    assert "/step*/exercises/mine/\n" in (root / ".gitignore").read_text()
    assert "-name mine" in (root / "Makefile").read_text()
    assert '"mine"' in (root / "common" / "kernel_fusion" / "checks" / "repository.py").read_text()
