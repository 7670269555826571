"""Skeletons cut from solutions: what is cut, what is refused, and that nobody's answer is lost."""

import pytest

from kernel_fusion import cli, exercises, stages, testing
from kernel_fusion.console import UserError

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
    """A repository with one solution, whose skeleton is not yet written."""
    path = tmp_path / "step2-attention" / "exercises" / "solutions" / "1_twice.cu"
    path.parent.mkdir(parents=True)
    path.write_text(SOLUTION)
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    return path


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


def test_the_command_has_help(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["exercises", "--help"])
    assert left.value.code == 0
    assert "--check" in capsys.readouterr().out


def test_a_missing_skeleton_is_written(solution, capsys):
    assert cli.main(["exercises", "--check"]) == 1
    assert "step2-attention/exercises/1_twice.cu is not what its solution gives" in capsys.readouterr().out
    assert not exercises.skeleton_of(solution).exists()
    assert cli.main(["exercises"]) == 0
    assert exercises.skeleton_of(solution).read_text() == SKELETON
    assert "build" not in capsys.readouterr().out
    assert cli.main(["exercises", "--check"]) == 0
    assert "skeletons as their solutions give them: 1" in capsys.readouterr().out


def test_an_answer_is_kept_where_the_skeleton_is_written_anew(solution, tmp_path, capsys):
    skeleton = exercises.skeleton_of(solution)
    for answer in ("my first answer\n", "my second answer\n"):
        skeleton.write_text(answer)
        assert cli.main(["exercises", "--check"]) == 1
        assert skeleton.read_text() == answer
        assert cli.main(["exercises"]) == 0
        assert skeleton.read_text() == SKELETON
    kept = list((tmp_path / "build" / "exercises").iterdir())
    assert sorted(path.read_text() for path in kept) == ["my first answer\n", "my second answer\n"]
    said = capsys.readouterr().out
    assert [path for path in kept if str(path.relative_to(tmp_path)) not in said] == []
