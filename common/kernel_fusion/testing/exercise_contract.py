"""What holds for the exercises of every step; the test file beside them calls this.

What is handed out fails, and says where. The solution passes in every order of the threads. What is wrong, or right by
another way than the lesson's, is not taken. The README names it, and it is short.
"""

import pathlib
import re
from functools import partial
from typing import NamedTuple

import pytest

from kernel_fusion import steps
from kernel_fusion.checks.faults import Fault, planted, read_faults
from kernel_fusion.learn import check, exercises

# Headers that they may use, besides step 2's wrappers of PTX.
OURS = {"kf/exercise.h", "../ladder.h", "../puzzle.h", "../schedule_check.h"}
COUNTED = "counted "  # begins what wrong_answers.txt says of an answer that is right by another way than the lesson's
IN_ANOTHER_ORDER = "prints something else in another order"  # said of an answer that is right in each order alone


class Exercises(NamedTuple):
    """Those in a folder.

    Args:
        here: the folder.
        complaints: by name, what the check says before anybody has written anything: a regular expression.
        orders: by name, the order of the threads in which what is handed out fails, where that is not "forward".
        errors: by name, what the emulation says on standard error where it ends what is handed out: a regular
            expression. Without one nothing is said there.
    """

    here: pathlib.Path
    complaints: dict[str, str]
    orders: dict[str, str] = {}
    errors: dict[str, str] = {}

    @property
    def solutions(self) -> list[pathlib.Path]:
        return exercises.programs(self.here / "solutions")

    @property
    def wrong_answers(self) -> list[Fault]:
        """Those in wrong_answers.txt; the exercise's name is that of the file, and the one "test" what is said."""
        return read_faults(self.here / "wrong_answers.txt")

    def checks(self) -> list:
        """All that must hold, as parameters of a test that calls each. Of an exercise's wrong answers all but the first
        are `long` tests."""
        checks = [("the README names every exercise once as a heading", self.check_readme)]
        for path in self.solutions:
            checks += [
                (f"{path.stem}: what is handed out fails and says where", partial(self.check_handed_out, path)),
                (f"{path.stem}: the solution passes in every order", partial(self.check_solution, path)),
                (f"{path.stem} is short and stands alone", partial(self.check_stands_alone, path)),
            ]
        parameters = [pytest.param(check, id=what) for what, check in checks]
        seen = set()
        for answer in self.wrong_answers:
            check, marks = partial(self.check_wrong_answer, answer), [pytest.mark.long] if answer.file in seen else []
            parameters.append(pytest.param(check, id=f"{answer.name}: {answer.what}: is not taken", marks=marks))
            seen.add(answer.file)
        return parameters

    def written(self, name: str, text: str) -> pathlib.Path:
        """A program of this text in the build folder, touched only where it changes, so that it is compiled once."""
        path = steps.ROOT / "build" / "exercises-tested" / f"{self.here.parent.name}-{name}.cu"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        return path

    def skeleton(self, solution: pathlib.Path) -> pathlib.Path:
        """What is handed out, as it is cut now."""
        return self.written(solution.stem, exercises.cut(solution))

    def check_handed_out(self, solution: pathlib.Path) -> None:
        """The skeleton fails with its complaint."""
        done = check.ran(self.skeleton(solution), solution, self.orders.get(solution.stem, "forward"))
        assert done.returncode == 1, done.stdout + done.stderr
        assert re.search(self.complaints[solution.stem], done.stdout), done.stdout
        assert "all right" not in done.stdout
        assert re.fullmatch(self.errors.get(solution.stem, ""), done.stderr), done.stderr

    def check_solution(self, solution: pathlib.Path) -> None:
        """The solution passes in every order, and prints the same; the ladder's and puzzles' also without a race."""
        outputs = set()
        runs = [(order, "plain") for order in check.ORDERS]
        for order, flavour in runs + [("forward", "race")] * solution.stem.startswith(("ladder", "puzzle")):
            done = check.ran(solution, solution, order, flavour)
            assert done.returncode == 0, f"{order}: {done.stdout}{done.stderr}"
            assert done.stdout.endswith("all right\n")
            assert done.stderr == ""
            outputs.add(done.stdout)
        assert len(outputs) == 1

    def check_readme(self) -> None:
        """Each exercise is a heading, once, with its minutes and three hints, and has its place in the order of all.

        Commands name what is there.
        """
        text = (self.here / "README.md").read_text(encoding="utf-8")
        names = [path.stem for path in self.solutions]
        assert sorted(re.findall(r"^### (\w+)\.cu: .+ · \d+ minutes$", text, re.M)) == sorted(names)
        assert set(re.findall(rf"{exercises.MY}/[\w-]+/(\w+)\.cu", text)) <= set(names)
        assert set(self.complaints) == set(names)
        assert set(names) <= set(exercises.NAMES)
        for path in self.solutions:
            hints = exercises.said_of(path).hints
            assert len(set(hints)) == len(exercises.HINTS), path.stem
            assert max(map(len, hints)) <= 400

    def check_stands_alone(self, path: pathlib.Path) -> None:
        """A program is short, says how to run it and what is counted; so does what is handed out."""
        theirs, ours = path.read_text(encoding="utf-8"), exercises.cut(path)
        group = exercises.group_of(path)
        is_puzzle = group == exercises.PUZZLES
        folders = ("docs/puzzles/solutions", "my/puzzles") if is_puzzle else ("exercises/solutions", f"../my/{group}")
        texts = dict(zip(folders, (theirs, ours), strict=True))
        ladder, hunt = path.stem.startswith("ladder"), path.stem.startswith("hunt")
        answer = re.search(r"// SOLUTION.*?// END", theirs, re.DOTALL)
        assert not ladder or (answer and len(answer[0].splitlines()) <= 60)
        answers = [answer for answer in self.wrong_answers if answer.file.endswith(f"/{path.name}")]
        assert hunt or len(answers) >= 2
        assert check.counted_words(path) or not any(answer.tests[0].startswith(COUNTED) for answer in answers)
        for folder, text in texts.items():
            assert len(text.splitlines()) <= 130
            included = {name for name in re.findall(r"#include [<\"](.+?)[>\"]", text) if "/" in name}
            own = {f"../{pathlib.Path(name).name}" if name.startswith("../") else name for name in included}
            assert {name for name in own if not name.startswith("step2/")} <= OURS
            whole, alone = rf"learn check {path.stem}\n", rf"simt (-I \S+ )?{re.escape(folder)}/{path.name}"
            assert re.search(rf"^//   kernel-fusion {whole}//   kernel-fusion {alone}", text, re.MULTILINE)

    def check_wrong_answer(self, answer: Fault) -> None:
        """The solution with the answer in it is not taken, and the check says why.

        Where that is a count, the results are right.
        """
        solution = steps.ROOT / answer.file
        wrong = self.written(answer.name, planted(answer, solution.read_text(encoding="utf-8")))
        (says,) = answer.tests
        if says.startswith(COUNTED):
            found = check.beside_the_lesson(check.score(wrong, solution), solution)
            assert any(line.startswith(f"{says.removeprefix(COUNTED)}: ") for line in found), found
        elif says == IN_ANOTHER_ORDER:
            outputs = {order: check.ran(wrong, solution, order) for order in check.ORDERS}
            assert {done.returncode for done in outputs.values()} == {0}
            assert len({done.stdout for done in outputs.values()}) > 1
        else:
            done = check.ran(wrong, solution, "random:1", "race" if says.startswith("race in") else "plain")
            assert done.returncode != 0, done.stdout + done.stderr
            assert says in done.stdout + done.stderr
