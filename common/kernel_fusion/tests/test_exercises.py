"""Skeletons cut from solutions: what is cut, what is refused, and that nobody's answer is lost."""

import random
import re
import subprocess
import sys
import time

import pytest

from kernel_fusion import cli, steps, testing
from kernel_fusion.console import UserError, child_environment
from kernel_fusion.learn import check, exercises, guide, traces

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


PAGE = """\
# Exercises

### 1_twice.cu: `x`, twice · 20 minutes

Twice.

<details><summary>A nudge</summary>Look at <code>a &lt; b</code>.</details>
<details><summary>More</summary>Add.</details>
<details><summary>Nearly the answer</summary><code>2 * x</code></details>

<details><summary>Answer</summary>It is.</details>

### 7_bulk_copy.cu: for later · 40 minutes

### 3_fuse.cu: three · 10 minutes
"""


@pytest.fixture
def solution(tmp_path, monkeypatch):
    """A repository with one solution, and a page that says more."""
    path = tmp_path / "step2-attention" / "exercises" / "solutions" / "1_twice.cu"
    path.parent.mkdir(parents=True)
    path.write_text(SOLUTION)
    exercises.page_of(path).write_text(PAGE)
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return path


def another(solution, name):
    """One more solution in that folder, on whose page it stands."""
    path = solution.with_name(f"{name}.cu")
    path.write_text(SOLUTION)
    return path


def test_the_order_has_each_exercise_once_and_nothing_else():
    names = [solution.stem for solution in exercises.solutions()]
    assert names == exercises.NAMES  # group by group, the puzzles first
    assert len(set(names)) == len(names)
    assert {"7_bulk_copy", "8_publish", "12_across_blocks"} < exercises.LATER < set(names)
    assert "6_async_copy" not in exercises.LATER


def test_the_answer_is_cut_and_the_skeletons_own_lines_stay(solution):
    assert exercises.cut(solution) == SKELETON
    assert exercises.answers(solution).splitlines() == [
        "  const int y = x;  // | is not the skeleton's here",
        "  return 2 * y;",
        "…",
        "  return x;",
    ]


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


def test_next_makes_a_copy_that_names_its_own_place_and_finds_its_header(solution, capsys):
    solution.write_text(f'// kernel-fusion simt exercises/solutions/1_twice.cu\n#include "../ladder.h"\n{SOLUTION}')
    assert cli.main(["learn", "next"]) == 0
    copy = steps.ROOT / "my" / "step2-attention" / "1_twice.cu"
    place, include, rest = copy.read_text().split("\n", 2)
    assert place == "// kernel-fusion simt ../my/step2-attention/1_twice.cu"
    assert include == '#include "../../step2-attention/exercises/ladder.h"'
    assert rest == SKELETON
    said = capsys.readouterr().out
    assert said.startswith("1_twice: `x`, twice, 20 minutes\n  file   my/step2-attention/1_twice.cu\n")
    assert "  page   step2-attention/exercises/README.md\n" in said
    assert "Commands in its head are for a shell in step2-attention.\nWrite in place of TODO" in said
    assert cli.main(["learn", "next"]) == 0
    assert "1_twice.cu, as you left it\n" in capsys.readouterr().out


def test_what_a_reader_wrote_is_never_touched_unasked(solution, monkeypatch, capsys):
    cli.main(["learn", "next"])
    copy = exercises.copy_of(solution)
    copy.write_text(SKELETON.replace("return 0;", "return x + x;"))
    before = copy.read_text()
    monkeypatch.setattr(check, "check", lambda *_: False)
    for text in (SOLUTION, SOLUTION.replace("int y", "int z")):  # also where the exercise itself has changed since
        solution.write_text(text)
        for what in ([], ["next"], ["check"], ["hint"], ["next", "1_twice"], ["solution", "1_twice"]):
            cli.main(["learn", *what])
        assert copy.read_text() == before
    cli.main(["learn"])
    other = another(solution, "3_fuse")
    cli.main(["learn", "next", "3_fuse"])
    assert exercises.copy_of(other).read_text() == SKELETON


def test_reset_begins_one_anew_and_keeps_what_was_written_beside_it(solution, capsys):
    other = another(solution, "3_fuse")
    for one in (solution, other):
        exercises.make(one)
    copy = exercises.copy_of(solution)
    exercises.copy_of(other).write_text("mine\n")
    guide.record(solution, solved=True)
    for answer in ("my first answer\n", "my second answer\n"):
        copy.write_text(answer)
        assert cli.main(["learn", "reset", "1_twice"]) == 0
        assert copy.read_text() == SKELETON
    assert guide.progress()["1_twice"]["solved"] is False
    assert exercises.copy_of(other).read_text() == "mine\n"
    kept = [copy.with_name(f"1_twice.cu.{number}") for number in (1, 2)]
    assert [path.read_text() for path in kept] == ["my first answer\n", "my second answer\n"]
    assert [line.rpartition("is now ")[2] for line in capsys.readouterr().out.splitlines()] == [
        f"my/step2-attention/1_twice.cu.{number}" for number in (1, 2)
    ]
    assert cli.main(["learn", "reset", "1_twice.cu", "3_fuse"]) == 0
    assert exercises.copy_of(other).read_text() == SKELETON
    assert len(list(copy.parent.iterdir())) == 5  # what was as handed out is not kept


def test_an_exercise_that_is_not_there_is_an_error_and_nothing_is_written(solution, capsys):
    exercises.make(solution)
    exercises.copy_of(solution).write_text("mine\n")
    assert cli.main(["learn", "reset", "1_twice", "9_gone"]) == 1
    assert "there is no exercise '9_gone'; `kernel-fusion learn` lists them" in capsys.readouterr().err
    assert exercises.copy_of(solution).read_text() == "mine\n"


def test_a_name_that_is_not_there_brings_those_that_are_like_it():
    for name, meant in {
        "grid": "1_grid_stride",
        "1_lanes_agre": "1_lanes_agree",
        "hunt_2": "hunt_2_some_orders or hunt_2_last_tile or hunt_2_far_from_0",
    }.items():
        with testing.raises(UserError, f"there is no exercise '{name}'; did you mean {meant}? `kernel-fusion"):
            exercises.find(name)


def test_what_is_next_is_of_the_core_path_as_long_as_there_is_something(solution, capsys):
    first, later, last = solution, another(solution, "7_bulk_copy"), another(solution, "3_fuse")
    known = {}
    for expected in (last, first, later, None):  # in the order of all; what is in no order comes last in it
        assert guide.upcoming(known) == expected
        if expected:
            known[expected.stem] = {"solved": True}
    for one in (first, later, last):
        guide.record(one, solved=True)
    assert cli.main(["learn", "next"]) == 0
    assert "All are solved" in capsys.readouterr().out
    assert cli.main(["learn", "hint"]) == 1
    assert "all of them are solved" in capsys.readouterr().err


def test_a_word_without_a_name_is_about_the_exercise_begun_or_checked_last(solution, monkeypatch, capsys):
    other = another(solution, "3_fuse")  # the first in the order
    right = set()
    monkeypatch.setattr(check, "check", lambda source, of, say: of in right)

    def said_of(*words):
        capsys.readouterr()
        cli.main(["learn", *words])
        return re.search(r"1_twice|3_fuse", capsys.readouterr().out)[0]

    assert said_of("hint") == "3_fuse"
    assert said_of("next", "1_twice") == "1_twice"
    assert said_of("check") == "1_twice"
    assert said_of("hint") == "1_twice"
    assert not exercises.copy_of(other).exists()
    assert said_of("next") == "3_fuse"
    assert said_of("check") == "3_fuse"
    assert said_of("check", "1_twice") == "1_twice"
    right.add(solution)
    assert said_of("check") == "1_twice"
    assert said_of("check") == "3_fuse"
    guide.record(solution.with_name("9_gone.cu"))  # of another version of the repository
    assert said_of("hint") == "3_fuse"


def test_status_has_a_line_an_exercise_and_the_hours_that_are_left(solution, capsys):
    later, tried = another(solution, "7_bulk_copy"), another(solution, "3_fuse")
    guide.record(solution, solved=True)
    for one in (later, tried):
        exercises.make(one)
    exercises.copy_of(later).write_text("begun\n")
    assert cli.main(["learn"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "step2-attention",
        "next 3_fuse three 10 min",
        "tried (7_bulk_copy) for later 40 min",
        "solved 1_twice `x`, twice 20 min",
        "",
        "1 of 3 solved. Core path: 0.2 of 0.5 hours left; names in brackets may wait for the second reading.",
        "kernel-fusion learn next: what to do now.",
    ]


def test_hints_come_one_by_one(solution, capsys):
    last = "1_twice, hint 3 of 3: `2 * x`\nThat was the last one. The answer: `kernel-fusion learn solution 1_twice`\n"
    for said in ("1_twice, hint 1 of 3: Look at `a < b`.\n", "1_twice, hint 2 of 3: Add.\n", last, last):
        assert cli.main(["learn", "hint"]) == 0
        assert capsys.readouterr().out.endswith(said)


def test_the_answer_is_shown_to_who_has_solved_it_or_asks_twice(solution, capsys):
    other = another(solution, "3_fuse")
    guide.record(other, solved=True)
    assert cli.main(["learn", "solution", "3_fuse"]) == 0
    assert "  return 2 * y;\n" in capsys.readouterr().out
    for code in (1, 0, 0):
        assert cli.main(["learn", "solution", "1_twice"]) == code
        assert ("  return 2 * y;\n" in capsys.readouterr().out) == (code == 0)


def test_old_answers_are_told_where_to_go_and_stay(solution, capsys):
    old = solution.parents[1] / "mine" / solution.name
    old.parent.mkdir()
    old.write_text("mine\n")
    for what in ("status", "next"):
        assert cli.main(["learn", what]) == 0
        said = capsys.readouterr().out
        move = "mkdir -p my/step2-attention && mv -i step2-attention/exercises/mine/*.cu my/step2-attention/"
        assert f"  {move}\n" in said
    exercises.copy_of(solution).unlink()
    subprocess.run(move, shell=True, check=True, cwd=steps.ROOT)
    assert exercises.copy_of(solution).read_text() == "mine\n"
    assert cli.main(["learn"]) == 0
    assert "mkdir" not in capsys.readouterr().out


RECORDS = """
import itertools, pathlib, sys
from kernel_fusion import steps
from kernel_fusion.learn import exercises, guide
from kernel_fusion.report import results
steps.ROOT = pathlib.Path(sys.argv[1])
for number in range(int(sys.argv[3])):
    for name in sys.argv[4:]:
        results.replace(exercises.copy_of(exercises.find(name)), f"{sys.argv[2]}_{number}")
        print(number, "written", flush=True)
        exercises.reset(exercises.find(name))
    guide.record(pathlib.Path(f"{sys.argv[2]}_{number}.cu"), solved=True, hints=number)
    print(number, "noted", flush=True)
"""


def recording(who, count, *answered):
    """A process that notes so many exercises as solved, and each time writes those `answered` and begins them anew. It
    says what it has done.
    """
    command = [sys.executable, "-c", RECORDS, str(steps.ROOT), who, str(count), *answered]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment())


def test_what_is_noted_survives_a_kill_at_any_moment(solution):
    moments, noted, written = random.Random(0), {}, set()
    copy = exercises.copy_of(solution)
    for kill in range(20):
        with recording(f"k{kill}", 100000, "1_twice") as process:
            said = "".join(process.stdout.readline() for _ in range(moments.randrange(2, 6)))
            time.sleep(moments.uniform(0, 0.01))
            process.kill()
            said += process.stdout.read()
        noted |= {f"k{kill}_{number}": int(number) for number in re.findall(r"(\d+) noted\n", said)}
        written |= {f"k{kill}_{number}" for number in re.findall(r"(\d+) written\n", said)}
        known = guide.progress()
        for name, number in noted.items():  # of those before, too
            assert known[name] == {"solved": True, "hints": number}
        exercises.reset(solution)
        assert copy.read_text() == SKELETON
        assert written <= {path.read_text() for path in copy.parent.glob("1_twice.cu.*")}
    assert len(noted) >= 20


def test_two_at_once_lose_nothing(solution):
    both = [recording(who, 40) for who in "ab"]
    for process in both:
        process.communicate()
    assert len(guide.progress()) == 80


@pytest.mark.parametrize("text", ["{", "[1]", '{"1_twice": 3}'])
def test_progress_that_cannot_be_read_is_an_error_and_stays(solution, text, capsys):
    path = steps.ROOT / "my" / "progress.json"
    path.parent.mkdir()
    path.write_text(text)
    for what in (["next"], ["hint", "1_twice"], ["reset", "1_twice"]):
        assert cli.main(["learn", *what]) == 1
        assert "my/progress.json: " in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize("wrong", ["status 1_twice", "solution", "reset", "hint 1_twice 3_fuse", "next nowhere"])
def test_a_name_too_many_or_too_few_is_an_error(solution, wrong, capsys):
    assert cli.main(["learn", *wrong.split()]) == 1
    assert re.search(r"learn \w+ takes (no|one|a) |there is no exercise 'nowhere'", capsys.readouterr().err)


def test_watch_checks_at_each_save_and_goes_on_to_the_next(solution, monkeypatch, capsys):
    first, second = another(solution, "3_fuse"), solution
    checked, began = [], time.monotonic()

    def checks(source, of, say):
        checked.append((of, source.read_text()))
        if source.read_text() == "broken\n":
            reads("right\n")  # and saves again, while this one is checked
            raise UserError("it does not compile")
        return source.read_text() == "right\n"

    def reads(text):
        """What a reader does meanwhile: saves one, as an editor that puts another file in its place."""
        at = exercises.copy_of(first if len(checked) < 3 else second)
        beside = at.with_suffix(".new")
        beside.write_text(text)
        beside.replace(at)

    saves = iter(["broken\n", "wrong\n", "right\n"])
    monkeypatch.setattr(check, "check", checks)
    monkeypatch.setattr(time, "sleep", lambda _: reads(next(saves)))
    assert cli.main(["learn", "watch"]) == 0
    texts = [text for _, text in checked]
    assert texts == [SKELETON, "broken\n", "right\n", "wrong\n", "right\n"]
    assert [of for of, _ in checked] == [first] * 3 + [second] * 2
    assert "it does not compile\nwaiting for the next save" in capsys.readouterr().out
    assert time.monotonic() - began < 3
    assert {name for name, one in guide.progress().items() if one["solved"]} == {"3_fuse", "1_twice"}


@pytest.fixture
def puzzle(solution, tmp_path):
    """A puzzle in the repository with one solution."""
    path = tmp_path / "docs" / "puzzles" / "solutions" / "puzzle_01_twice.cu"
    path.parent.mkdir(parents=True)
    path.write_text(f"// docs/puzzles/solutions/{path.name}\n// Counted: barriers\n// Scored: shuffles\n{SOLUTION}")
    exercises.page_of(path).write_text("### puzzle_01_twice.cu: twice · 5 minutes\n")
    return path


def test_puzzles_are_a_group_of_their_own_and_come_first(puzzle, solution, capsys):
    assert exercises.solutions() == [puzzle, solution]
    assert cli.main(["learn", "next", "step2-attention"]) == 0
    assert capsys.readouterr().out.startswith("1_twice: ")
    assert cli.main(["learn", "next"]) == 0
    assert capsys.readouterr().out.startswith(
        "puzzle_01_twice: twice, 5 minutes\n  file   my/puzzles/puzzle_01_twice.cu"
    )
    assert exercises.copy_of(puzzle).read_text().startswith("// my/puzzles/puzzle_01_twice.cu\n")


@pytest.mark.parametrize(("barriers", "shuffles", "right"), [(4, 1, True), (4, 90, True), (5, 1, False)])
def test_a_puzzle_may_not_race_and_what_is_scored_is_only_shown(
    puzzle, barriers, shuffles, right, monkeypatch, tmp_path
):
    runs, said = [], []

    def run(program, order):
        runs.append((order, program))
        return subprocess.CompletedProcess([], 0, "as drawn\nall right\n", "")

    answer = tmp_path / puzzle.name
    answer.touch()
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setattr(check.programs, "compile_program", lambda source, flavour, include_dirs: flavour)
    monkeypatch.setattr(check, "_run", run)
    counts = {answer: {"barriers": barriers, "shuffles": shuffles}, puzzle: {"barriers": 4, "shuffles": 2}}
    monkeypatch.setattr(check, "counted", lambda source, solution: counts[source])
    assert check.check(answer, puzzle, said.append) == right
    assert sorted(runs) == [("forward", "race"), ("random:1", "count"), ("reverse", "count")]
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
    monkeypatch.setattr(check.programs, "compile_program", lambda *_, **__: puzzle)
    monkeypatch.setattr(check, "_run", lambda *_: subprocess.CompletedProcess([], 66, "", f"{error}\n"))
    assert not check.check(puzzle, puzzle, said.append)
    assert said[0] == error
    assert ["which of the two comes first" in line for line in said[1:]] == [True] * hint


def test_git_and_the_checks_of_layout_pass_copies_by():
    """A reader's copies turn neither `git status` nor `make lint` nor a test red."""
    root = steps.ROOT
    ignored = (root / ".gitignore").read_text().splitlines()
    assert {"/my/", "/step*/exercises/mine/", "/docs/puzzles/mine/"} <= set(ignored)
    assert "-name my " in (root / "Makefile").read_text()
    assert '"my"' in (root / "common" / "kernel_fusion" / "checks" / "repository.py").read_text()


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("WRONG: n = 5: y[3] is 14, must be 13\n", ""),
        ("WRONG: y[3] is 3, must be even\n", ""),
        ("WRONG: y[3] is 26, must be 13: off by one\n", ""),  # said already
        ("WRONG: y[2][3] is -nan, must be 13\n", "never written"),
        ("WRONG: y[3] is 26, must be 13 and more\n", "twice what"),
        ("WRONG: y[3] is 6.5, must be 13\n", "half of what"),
        ("WRONG: y[3] is -0.13, must be 0.13\n", "sign"),
        ("WRONG: y[3] is 0, must be 0.13\n", "nothing was added"),
        ("WRONG: 63 rows of 33: the sum of column 0 is 26, must be 13\n", "twice what"),
        ("n = 99, 2 blocks of 32 threads: y[64] is nan, must be 1\n", "64 is the first that 2 blocks of 32 threads"),
        ("n = 99, 2 blocks of 32 threads: y[32] is 7, must be 1\n", "32 is the first of block 1"),
        ("n = 99, 2 blocks of 32 threads: y[33] is 7, must be 1\n", ""),
        ("4 blocks of 32: right\nWRONG: y[32] is 7, must be 1\n", ""),  # of another launch
    ],
)
def test_a_likely_cause_is_told_by_the_first_wrong_element(printed, cause):
    found = check.likely_cause(printed)
    assert cause in found
    assert bool(found) == bool(cause)


@pytest.mark.parametrize(
    ("word", "theirs", "ours", "requests", "cause"),
    [
        ("global load sectors", 256, 64, (8, 8), "do not take neighbours"),
        ("global load sectors", 256, 64, (32, 8), ""),
        ("global load sectors", 1674, 212, (69, 55), "do not take neighbours"),
        ("global load requests", 256, 8, (256, 8), "32 times as many: does every thread do the work of all?"),
        ("global load requests", 16, 8, (16, 8), "or fewer bytes at a time"),
        ("shared load conflicts", 31, 0, (1, 1), "one bank"),
        ("barriers", 5, 4, (1, 1), ""),
        ("shuffles", 5, 0, (1, 1), ""),
    ],
)
def test_a_count_that_is_too_high_is_explained(word, theirs, ours, requests, cause):
    found = {f"{word.rpartition(' ')[0]} requests": requests} | {word: (theirs, ours)}
    assert check.why_more(word, found).endswith(cause)
    assert bool(check.why_more(word, found)) == bool(cause)


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
            r"not what the exercise is about:\n  global load requests: .*\n    likely: .* times as many"
            r"(.|\n)*\? kernel-fusion simt --count \S+\.cu\n",
        ),
        ("greatest = fmaxf(greatest, row[c])", "greatest = row[c]; if (lane == 31) return", "WRONG|error"),
    ],
)
def test_an_answer_is_checked(right, wrong, says, tmp_path, capsys):
    answer = tmp_path / LANES.name
    answer.write_text(LANES.read_text().replace(right, wrong, 1))
    assert check.check(answer, LANES) == (not right)
    assert re.search(says, capsys.readouterr().out)


def test_the_command_that_counts_has_the_folders_that_the_program_needs():
    puzzle = exercises.find("puzzle_04_two_dimensions")
    assert re.fullmatch(r"kernel-fusion simt --count \S+/puzzle_04_two_dimensions.cu", check.counting(puzzle, puzzle))
    ladder = exercises.find("ladder_4_mma")
    assert "-Istep2-attention/include step2" in check.counting(ladder, ladder)


def test_what_only_another_order_shows_is_said_so(tmp_path, capsys):
    hunt = steps.find("step1").path / "exercises" / "solutions" / "hunt_2_some_orders.cu"
    skeleton = tmp_path / hunt.name
    skeleton.write_text(exercises.cut(hunt))
    assert not check.check(skeleton, hunt)
    said = capsys.readouterr().out
    assert "KF_SIMT_SCHEDULE=reverse; in the usual one it is right" in said
    assert "race in" not in said  # a hunt is about finding its lines


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
    told = capsys.readouterr().out
    assert told.startswith(said)
    assert re.search(rf"race in .*(.|\n)*{answer.name}:4\n", told)


def test_each_of_several_answers_is_named_and_noted(solution, monkeypatch, capsys):
    another(solution, "3_fuse")
    monkeypatch.setattr(check, "check", lambda source, of, say: say("as it is") or of == solution)
    assert cli.main(["learn", "check", "my/step2-attention/1_twice.cu", "3_fuse"]) == 1
    said = [f"my/step2-attention/{name}.cu:\nas it is\n" for name in ("1_twice", "3_fuse")]
    assert capsys.readouterr().out == "".join(said)
    assert guide.progress() == {"1_twice": {"solved": True}, "3_fuse": {}}
    assert cli.main(["learn", "check", "1_twice"]) == 0
    assert capsys.readouterr().out.endswith("Next: 3_fuse, 10 minutes; `kernel-fusion learn next`\n")


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
