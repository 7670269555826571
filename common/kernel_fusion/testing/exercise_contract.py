"""What holds for the exercises of every step; the test file beside them calls this.

What is handed out fails, and says where. The solution passes in every order of the threads. The README names it, and
both stand alone.
"""

import pathlib
import re
import subprocess
from functools import partial
from typing import NamedTuple

import pytest

from emulator import programs
from kernel_fusion import steps
from kernel_fusion.learn import exercises

ORDERS = ("forward", "reverse", "random:1")


def ran(source: pathlib.Path, order: str) -> subprocess.CompletedProcess:
    """The program compiled for the CPU, and run with its threads in this order."""
    program = programs.compile_program(source)
    environment = programs.run_environment(order)  # as `kernel-fusion simt` does
    return subprocess.run([str(program)], env=environment, capture_output=True, text=True)


class Exercises(NamedTuple):
    """Those in a folder.

    Args:
        here: the folder.
        complaints: by name, what the check says before anybody has written anything: a regular expression.
        wrong_answers: what a check must not take: the exercise, words that stand once in its solution, others in their
            place, and what the check then says.
        orders: by name, the order of the threads in which what is handed out fails, where that is not "forward".
        errors: by name, what the emulation says on standard error where it ends what is handed out: a regular
            expression. Without one nothing is said there.
    """

    here: pathlib.Path
    complaints: dict[str, str]
    wrong_answers: list[tuple[str, str, str, str]]
    orders: dict[str, str] = {}
    errors: dict[str, str] = {}

    @property
    def solutions(self) -> list[pathlib.Path]:
        return exercises.programs(self.here / "solutions")

    def checks(self) -> list:
        """All that must hold, as parameters of a test that calls each."""
        checks = [("the README names every exercise once as a heading", self.check_readme)]
        for path in self.solutions:
            checks += [
                (f"{path.stem}: what is handed out fails and says where", partial(self.check_handed_out, path)),
                (f"{path.stem}: the solution passes in every order", partial(self.check_solution, path)),
                (f"{path.stem} is short and stands alone", partial(self.check_stands_alone, path)),
            ]
        for number, (name, *_) in enumerate(self.wrong_answers):
            check = partial(self.check_wrong_answer, number)
            checks.append((f"{name}: a wrong answer is not taken, number {number}", check))
        return [pytest.param(check, id=what) for what, check in checks]

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
        done = ran(self.skeleton(solution), self.orders.get(solution.stem, "forward"))
        assert done.returncode == 1, done.stdout + done.stderr
        assert re.search(self.complaints[solution.stem], done.stdout), done.stdout
        assert "all right" not in done.stdout
        assert re.fullmatch(self.errors.get(solution.stem, ""), done.stderr), done.stderr

    def check_solution(self, solution: pathlib.Path) -> None:
        """The solution passes in every order, and prints the same."""
        outputs = set()
        for order in ORDERS:
            done = ran(solution, order)
            assert done.returncode == 0, f"{order}: {done.stdout}{done.stderr}"
            assert done.stdout.endswith("all right\n")
            assert done.stderr == ""
            outputs.add(done.stdout)
        assert len(outputs) == 1

    def check_readme(self) -> None:
        """Each exercise is a heading, once, with the minutes that it takes; commands name what is there."""
        text = (self.here / "README.md").read_text(encoding="utf-8")
        names = [path.stem for path in self.solutions]
        assert re.findall(r"^### (\w+)\.cu: .+ · \d+ minutes$", text, re.M) == names
        assert set(re.findall(rf"{exercises.MINE}/(\w+)\.cu", text)) <= set(names)
        assert set(self.complaints) == set(names)

    def check_stands_alone(self, path: pathlib.Path) -> None:
        """A program is short, needs none of our headers, and says how to run it; so does what is handed out."""
        texts = {exercises.SOLUTIONS: path.read_text(encoding="utf-8"), exercises.MINE: exercises.cut(path)}
        for folder, text in texts.items():
            assert len(text.splitlines()) <= 130
            assert [name for name in re.findall(r"#include [<\"](.+?)[>\"]", text) if "/" in name] == []
            assert f"kernel-fusion simt {folder}/{path.name}" in text

    def check_wrong_answer(self, number: int) -> None:
        """The solution with other words in it is not taken, and the check says why."""
        name, right, wrong, complaint = self.wrong_answers[number]
        text = (self.here / "solutions" / f"{name}.cu").read_text(encoding="utf-8")
        assert text.count(right) == 1
        done = ran(self.written(f"wrong-{number}", text.replace(right, wrong)), "random:1")
        assert done.returncode == 1, done.stdout + done.stderr
        assert complaint in done.stdout
