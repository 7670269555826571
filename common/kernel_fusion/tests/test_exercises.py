"""Skeletons cut from solutions: what is cut, what is refused, and that nobody's answer is lost."""

import re
import subprocess

import pytest

from kernel_fusion import cli, steps, testing
from kernel_fusion.console import UserError
from kernel_fusion.learn import check, exercises, traces

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
    names = [
        "1_first",
        "2_second",
        "9_ninth",
        "10_tenth",
        "ladder_1_low",
        "ladder_2_high",
        "hunt_1_one",
        "hunt_2_two",
        "hunt_10_ten",
    ]
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
    assert "there is no exercise '9_gone'; `kernel-fusion exercises` lists them" in capsys.readouterr().err
    assert exercises.copy_of(solution).read_text() == "mine\n"


def test_a_name_that_is_not_there_brings_those_that_are_like_it():
    for name, meant in {
        "grid": "1_grid_stride",
        "1_lanes_agre": "1_lanes_agree",
        "hunt_2": "hunt_2_some_orders or hunt_2_last_tile or hunt_2_far_from_0",
    }.items():
        with testing.raises(UserError, f"there is no exercise '{name}'; did you mean {meant}? `kernel-fusion"):
            exercises.find(name)


def test_each_name_is_there_once():
    names = [solution.stem for solution in exercises.solutions()]
    assert len(set(names)) == len(names)


def test_in_a_step_only_its_own_are_made_and_listed(solution, tmp_path, monkeypatch, capsys):
    other = tmp_path / "step3-fused" / "exercises" / "solutions" / "1_thrice.cu"
    other.parent.mkdir(parents=True)
    other.write_text(SOLUTION)
    monkeypatch.chdir(other.parents[1])
    assert cli.main(["exercises"]) == 0
    assert capsys.readouterr().out == "step3-fused/exercises/mine/1_thrice.cu: made\n"
    monkeypatch.chdir(tmp_path)
    assert cli.main(["exercises"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step2-attention/exercises/mine/1_twice.cu: made",
        "step3-fused/exercises/mine/1_thrice.cu: not begun",
    ]


@pytest.fixture
def puzzle(solution, tmp_path):
    """A puzzle in the repository with one solution."""
    path = tmp_path / "docs" / "puzzles" / "solutions" / "puzzle_01_twice.cu"
    path.parent.mkdir(parents=True)
    path.write_text(f"// docs/puzzles/solutions/{path.name}\n// Counted: barriers\n// Scored: shuffles\n{SOLUTION}")
    return path


def test_puzzles_are_a_group_of_their_own_and_come_first(puzzle, capsys):
    assert cli.main(["exercises", "puzzles"]) == 0
    assert capsys.readouterr().out == "docs/puzzles/mine/puzzle_01_twice.cu: made\n"
    copy = puzzle.parents[1] / "mine" / puzzle.name
    assert copy.read_text().startswith("// docs/puzzles/mine/puzzle_01_twice.cu\n")
    assert cli.main(["exercises"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "docs/puzzles/mine/puzzle_01_twice.cu: not begun",
        "step2-attention/exercises/mine/1_twice.cu: made",
    ]
    assert cli.main(["exercises", "step2-attention"]) == 0
    assert capsys.readouterr().out == "step2-attention/exercises/mine/1_twice.cu: not begun\n"


@pytest.mark.parametrize(("barriers", "shuffles", "right"), [(4, 1, True), (4, 90, True), (5, 1, False)])
def test_a_puzzle_may_not_race_and_what_is_scored_is_only_shown(
    puzzle, barriers, shuffles, right, monkeypatch, tmp_path
):
    runs, said = [], []

    def ran(source, solution, order, flavour="plain"):
        runs.append((order, flavour))
        return subprocess.CompletedProcess([], 0, "as drawn\nall right\n", "")

    answer = tmp_path / puzzle.name
    answer.touch()
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(check, "ran", ran)
    counts = {answer: {"barriers": barriers, "shuffles": shuffles}, puzzle: {"barriers": 4, "shuffles": 2}}
    monkeypatch.setattr(check, "counted", lambda source, solution: counts[source])
    assert check.check(answer, puzzle, said.append) == right
    assert runs == [(order, "race") for order in check.ORDERS]
    if right:
        drawn, table = said
        assert drawn == "as drawn\nall right, in 3 orders of the threads and without a race"
        assert table.split() == f"yours best known barriers {barriers} 4 shuffles {shuffles} 2".split()
    else:
        assert said[1] == "  barriers: 5, and the solution takes 4"


def test_of_a_crash_under_the_race_detector_the_readers_line_is_said():
    source = steps.ROOT / "mine.cu"
    trace = f"ThreadSanitizer:DEADLYSIGNAL\n #4 atomicAdd atomics.h:72\n #5 mine {source}:18 (mine+0x6c88)\n"
    done = subprocess.CompletedProcess([], -6, "", f"kernel mine: writes where it may not\n{trace}")
    assert check.said_by(done, source) == f"kernel mine: writes where it may not, at {source}:18"
    assert check.said_by(subprocess.CompletedProcess([], 1, "WRONG\n", ""), source) == "WRONG\n"


@pytest.mark.parametrize(("error", "hint"), [("race in shared memory", True), ("another error", False)])
def test_a_race_is_explained(puzzle, error, hint, monkeypatch):
    said = []
    monkeypatch.setattr(check, "ran", lambda *_: subprocess.CompletedProcess([], 66, "", f"{error}\n"))
    assert not check.check(puzzle, puzzle, said.append)
    assert said[0] == error
    assert ["which of the two comes first" in line for line in said[1:]] == [True] * hint


def test_git_and_the_checks_of_layout_pass_copies_by():
    """A reader's copies turn neither `git status` nor `make lint` nor a test red."""
    root = steps.ROOT
    ignored = (root / ".gitignore").read_text().splitlines()
    assert {"/step*/exercises/mine/", "/docs/puzzles/mine/"} <= set(ignored)
    assert "-name mine" in (root / "Makefile").read_text()
    assert '"mine"' in (root / "common" / "kernel_fusion" / "checks" / "repository.py").read_text()


LANES = steps.find("step2").path / "exercises" / "solutions" / "1_lanes_agree.cu"


def test_what_counts_is_something_that_is_counted(tmp_path):
    solution = tmp_path / "1_new.cu"
    solution.write_text("// Counted: barriers, global load requests\n")
    assert check.counted_words(solution) == ["barriers", "global load requests"]
    solution.write_text("// Counted: barriers, colours\n")
    with pytest.raises(UserError, match="counted can be launches, barriers, .*, got colours"):
        check.counted_words(solution)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("", "", "all right, in 3 orders of the threads; counted: global load requests, shared load requests"),
        ("away > 0;", "away > 1;", "WRONG: .*lane"),
        (
            "c = lane; c < width; c += 32",
            "c = 0; c < width; ++c",
            r"not what the exercise is about:\n  global load requests: (.|\n)*\? kernel-fusion simt --count \S+\.cu\n",
        ),
        ("greatest = fmaxf(greatest, row[c])", "greatest = row[c]; if (lane == 31) return", "WRONG|error"),
    ],
)
def test_an_answer_is_checked(right, wrong, says, tmp_path, capsys):
    answer = tmp_path / LANES.name
    answer.write_text(LANES.read_text().replace(right, wrong, 1))
    assert check.check(answer, LANES) == (not right)
    assert re.search(says, capsys.readouterr().out)


def test_what_only_another_order_shows_is_said_so(tmp_path, capsys):
    hunt = steps.find("step1").path / "exercises" / "solutions" / "hunt_2_some_orders.cu"
    skeleton = tmp_path / hunt.name
    skeleton.write_text(exercises.cut(hunt))
    assert not check.check(skeleton, hunt)
    assert "KF_SIMT_SCHEDULE=reverse; in the usual one it is right" in capsys.readouterr().out


def test_an_answer_whose_output_depends_on_the_order_is_not_taken(tmp_path, capsys):
    solution = steps.find("step1").path / "exercises" / "solutions" / "1_grid_stride.cu"
    answer = tmp_path / solution.name
    answer.write_text(
        "#include <cuda_runtime.h>\n#include <cstdio>\n__device__ int last;\n"
        "__global__ void write() { last = threadIdx.x; }\n"
        'int main() { int n; write<<<1, 32>>>(); cudaMemcpyFromSymbol(&n, last, 4); std::printf("%d\\n", n); }\n'
    )
    assert not check.check(answer, solution)
    said = "31\nIn another order of the threads, KF_SIMT_SCHEDULE=reverse, the same program prints:\n0\n"
    assert capsys.readouterr().out.startswith(said)


def test_each_of_several_answers_is_named(solution, monkeypatch, capsys):
    cli.main(["exercises"])
    monkeypatch.setattr(check, "check", lambda source, solution: print("as it is") or True)
    capsys.readouterr()
    assert cli.main(["exercises", "step2-attention/exercises/mine/1_twice.cu", "1_twice"]) == 0
    assert capsys.readouterr().out == "step2-attention/exercises/mine/1_twice.cu:\nas it is\n" * 2


def test_an_answer_that_is_not_there(solution):
    with pytest.raises(UserError, match="mine/1_twice.cu is not there; `kernel-fusion exercises` makes it"):
        check.command("1_twice")


def test_puzzles_and_the_exercises_of_steps_1_to_3_are_recorded():
    names = [solution.stem for solution in traces.solutions()]
    assert {"puzzle_01_map", "1_grid_stride", "1_lanes_agree", "1_statistics"} <= set(names)
    assert "1_kv_append" not in names
    assert set(traces.PARTS) <= set(names)


def test_a_solution_is_recorded_when_asked_for():
    found = traces.make(exercises.find("puzzle_05_blocks"))
    assert (found["kernel"], found["grid"], found["block"]) == ("blocks", [2, 1, 1], [4, 1, 1])
    assert [array["name"] for array in found["arrays"]] == ["x", "y"]
    assert len(found["events"]) == 8 * 3  # a read, a write and an exit each


@pytest.mark.long
@pytest.mark.parametrize("solution", traces.solutions(), ids=lambda solution: solution.stem)
def test_every_solution_can_be_recorded(solution):
    found = traces.make(solution)
    assert not found["error"]
    assert all(event["line"] > 0 for event in found["events"] if "line" in event)
