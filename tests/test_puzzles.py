"""The puzzles: what is handed out fails as it should, every solution passes, and wrong answers get their reason.

All programs in one, in which KF_PUZZLE tells which of them is to run: compiled once a flavour, and not 50 times.
"""

import os
import pathlib
import re
from collections.abc import Callable

import pytest

from emulator import programs
from kernel_fusion.checks import times
from kernel_fusion.checks.faults import planted
from kernel_fusion.checks.repository import ROOT
from kernel_fusion.learn import check, exercises
from kernel_fusion.testing.exercise_contract import Exercises

HERE = ROOT / "docs" / "puzzles"
NOBODY = r"WRONG: {} is \?, must be \S+: nobody wrote it, nor any other\n$"
# What each check says before anybody has written anything.
COMPLAINTS = {path.stem: NOBODY.format(r"y\[0\]") for path in exercises.programs(HERE / "solutions")} | {
    "puzzle_04_two_dimensions": NOBODY.format(r"y\[0\]\[0\]"),
    "puzzle_07_transpose": NOBODY.format(r"y\[0\]\[0\]"),
    "puzzle_10_histogram": r"WRONG: counts\[0\] is 0, must be 1\n$",
    "puzzle_11_product": NOBODY.format(r"c\[0\]\[0\]"),
    "puzzle_12_softmax": NOBODY.format(r"y\[0\]\[0\]"),
}
PUZZLES = Exercises(HERE, COMPLAINTS)
MOST_LINES = 15  # that a reader writes


def lines_of_answers(text: str) -> list[str]:
    """What a reader writes in a solution of this text."""
    answers = re.findall(r"// SOLUTION.*?\n(.*?)// END", text, re.DOTALL)
    return [line for answer in answers for line in answer.splitlines() if line.strip() and "// |" not in line]


def answered(name: str, answer: str) -> str:
    """The solution of a puzzle with another answer."""
    solution = exercises.find(name).read_text(encoding="utf-8")
    return re.sub(r"// SOLUTION.*?// END", f"// SOLUTION: what\n{answer}\n// END", solution, flags=re.DOTALL)


# Answers that are taken, and are not the best known; what is seen of that.
TAKEN = {
    "puzzle_08_block_sum": (
        """
  __shared__ float sums[kThreads];
  const int i = blockIdx.x * kThreads + threadIdx.x;
  sums[threadIdx.x] = i < n ? x[i] : 0;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) y[blockIdx.x] = sums[0];""",
        r"^barriers +35 +5$",
    ),
    "puzzle_09_scan": (
        """
  __shared__ float sums[kThreads];
  const int i = threadIdx.x;
  sums[i] = i < n ? x[i] : 0;
  for (int back = 1; back < kThreads; back *= 2) {
    __syncthreads();
    const float before = i >= back ? sums[i - back] : 0;
    __syncthreads();
    sums[i] += before;
  }
  if (i < n) y[i] = sums[i];""",
        r"^barriers +42 +3$",
    ),
    "puzzle_10_histogram": (
        """
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) atomicAdd(&counts[x[i]], 1);""",
        r"^global atomic requests +33 +9$",
    ),
}
# Another: neighbours are added up, and so lanes that read at the same time are ever farther apart.
FAR_APART = TAKEN["puzzle_08_block_sum"][0].replace(
    "half = kThreads / 2; half > 0; half /= 2", "step = 1; step < kThreads; step *= 2"
).replace(
    "if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];",
    "const int at = 2 * step * threadIdx.x;\n    if (at < kThreads) sums[at] += sums[at + step];",
)  # fmt: skip


def others() -> dict[str, str]:
    """Answers that stand in no list, by name."""
    return {name: answered(name, answer) for name, (answer, _) in TAKEN.items()} | {
        "far_apart": answered("puzzle_08_block_sum", FAR_APART),
        "no_guard": answered("puzzle_10_histogram", TAKEN["puzzle_10_histogram"][0].replace("if (i < n) ", "")),
    }


@pytest.fixture(scope="module")
def together() -> dict[pathlib.Path, int]:
    """The programs, and the number of each in the one that holds them all."""
    found = [*PUZZLES.solutions, *map(PUZZLES.skeleton, PUZZLES.solutions)]
    for answer in PUZZLES.wrong_answers:
        text = (ROOT / answer.file).read_text(encoding="utf-8")
        found.append(PUZZLES.written(answer.name, planted(answer, text)))
    found += [PUZZLES.written(f"other-{name}", text) for name, text in others().items()]
    return {path.resolve(): number for number, path in enumerate(found)}


@pytest.fixture(autouse=True)
def one_program(together, monkeypatch):
    """What compiles one of the programs gets all of them, and the environment in which that one runs."""
    parts = [f'namespace p{number} {{\n#include "{path}"\n}}' for path, number in together.items()]
    cases = [f"    case {number}: return p{number}::main();" for number in together.values()]
    main = ["int main() {", '  switch (std::atoi(std::getenv("KF_PUZZLE"))) {', *cases, "  }", "  return 2;", "}", ""]
    source = PUZZLES.written("all", "\n".join([f'#include "{HERE / "puzzle.h"}"', *parts, *main]))
    compiled = programs.compile_program

    def compile_all(path: pathlib.Path, **options) -> pathlib.Path:
        monkeypatch.setenv("KF_PUZZLE", str(together[path.resolve()]))
        return compiled(source, **options)

    monkeypatch.setattr(programs, "compile_program", compile_all)


@pytest.mark.parametrize("check", PUZZLES.checks())
def test_puzzles(check):
    check()


def test_a_reader_writes_a_few_lines():
    written = {path.stem: len(lines_of_answers(path.read_text(encoding="utf-8"))) for path in PUZZLES.solutions}
    assert len(written) == 12
    assert {name: lines for name, lines in written.items() if not 1 <= lines <= MOST_LINES} == {}


def checked(source: pathlib.Path, name: str) -> tuple[bool, str]:
    """What `kernel-fusion learn check` says of an answer."""
    said: list[str] = []
    return check.check(source, exercises.find(name), said.append), "\n".join(said)


@pytest.mark.parametrize("name", TAKEN)
def test_an_answer_by_another_way_is_taken_and_scored(name):
    right, said = checked(PUZZLES.written(f"other-{name}", others()[name]), name)
    assert right, said
    assert "all right, in 3 orders of the threads and without a race\n" in said
    assert re.search(TAKEN[name][1], said, re.MULTILINE), said


def test_lanes_far_apart_are_not_taken():
    right, said = checked(PUZZLES.written("other-far_apart", others()["far_apart"]), "puzzle_08_block_sum")
    assert not right
    assert re.search(r"not what the exercise is about:\n  shared load conflicts: \d+, and the solution takes 0\n", said)


def test_the_solution_is_drawn_and_scored_as_the_best_known():
    right, said = checked(exercises.find("puzzle_03_guard"), "puzzle_03_guard")
    assert right, said
    assert (
        said
        == """\
n = 5, 1 block of 8 threads
        i   0   1   2   3   4
        x   3  10  17   1   8
        y  13  20  27  11  18
  must be  13  20  27  11  18
all right, in 3 orders of the threads and without a race
                               yours  best known
global load requests               6           6
global load sectors               17          17
global store requests              6           6"""
    )


def test_a_race_is_said_with_its_lines():
    (answer,) = [one for one in PUZZLES.wrong_answers if one.name == "puzzle_06_shared_memory-1"]
    path = PUZZLES.written(answer.name, planted(answer, (ROOT / answer.file).read_text(encoding="utf-8")))
    right, said = checked(path, "puzzle_06_shared_memory")
    assert not right
    assert re.search(rf"writes 4 bytes at .*{path.name}:\d+\n.* read them at .*{path.name}:\d+\n", said), said
    assert said.endswith("\nNothing says which of the two comes first: another order of the threads, another result.")


def test_an_address_that_is_not_there_is_said_with_its_line():
    path = PUZZLES.written("other-no_guard", others()["no_guard"])
    right, said = checked(path, "puzzle_10_histogram")
    assert not right
    assert re.fullmatch(rf"kernel .*histogram.*: \w+ .* where it may not, at .*{path.name}:\d+", said), said


def test_the_page_draws_what_is_printed():
    """Each puzzle's small case, without what came out."""
    sections = (HERE / "README.md").read_text(encoding="utf-8").split("\n### ")[1:]
    for solution, section in zip(PUZZLES.solutions, sections, strict=True):
        assert section.startswith(f"{solution.name}: ")
        (shown,) = re.findall(r"```text\n(.*?)\n```", section, re.DOTALL)
        printed = [line.rstrip() for line in check.ran(solution, solution, "forward").stdout.splitlines()]
        assert set(shown.splitlines()) <= set(printed), solution.stem


def processor_s(work: Callable[[], object]) -> float:
    """How long the processes that `work` starts are at work."""
    before = sum(os.times()[2:4])
    work()
    return sum(os.times()[2:4]) - before


@pytest.fixture(scope="module")
def pace() -> float:
    """How much faster than now a core of the pages' machine is, when it has no other work."""
    return times.REFERENCE_S / processor_s(times.yardstick)


@pytest.mark.long
@pytest.mark.parametrize("solution", PUZZLES.solutions, ids=lambda path: path.stem)
def test_a_puzzle_alone_is_checked_soon(solution, pace, monkeypatch):
    """In less than 5 s of one core's time, once the emulation is compiled."""
    monkeypatch.undo()
    checked(exercises.find("puzzle_01_map"), "puzzle_01_map")
    answer = PUZZLES.written(f"alone-{solution.stem}", f"// {os.getpid()}\n{solution.read_text(encoding='utf-8')}")
    said = []
    spent = processor_s(lambda: said.append(checked(answer, solution.stem)))
    assert said[0][0], said
    assert spent * pace < 5
