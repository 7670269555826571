"""What holds for the lesson of every step; the test file beside it calls this.

The notebook is the script, is stored with what it shows, and runs in less than a minute. Both leave all their pictures.
"""

import contextlib
import functools
import io
import os
import pathlib
import re
import runpy
import sys
import types
from typing import Any, NamedTuple

import pytest

from kernel_fusion import steps, testing
from kernel_fusion.console import captured
from kernel_fusion.learn import notebooks


def _library(name: str) -> types.ModuleType:
    """A library for notebooks. A machine that only measures on its GPU need not have them."""
    return pytest.importorskip(name, reason="pip install -r setup/dependencies.txt")


def _cells(notebook: Any) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


UNBUILT = """
import runpy
import sys

from kernel_fusion import steps

steps.is_built = lambda step: False
runpy.run_path(sys.argv[1])
assert sys.argv[2] not in sys.modules
"""


@functools.cache
def _ran(script: pathlib.Path) -> tuple[str, int, dict[str, Any]]:
    """Runs the script once, from the root: what it prints, how many pictures it writes, and what it defines."""
    folder, said = script.parent / "build" / "lesson", io.StringIO()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("MPLBACKEND", "agg")
        patch.chdir(script.parents[1])
        defined = runpy.run_path(os.path.relpath(script, script.parents[1]))
    written = [path for path in folder.glob("*.png") if path.stat().st_mtime_ns != before.get(path)]
    return said.getvalue(), len(written), defined


class Lesson(NamedTuple):
    """The one in a folder: lesson.py, and lesson.ipynb made of it."""

    here: pathlib.Path
    pictures: int  # how many there are at least
    says: str  # what stands in a line that the script prints: a regular expression

    @property
    def script(self) -> pathlib.Path:
        return self.here / "lesson.py"

    def checks(self) -> list:
        """All that must hold, as parameters of a test that calls each."""
        checks = {
            "the notebook is the script, stored with its pictures": self.check_stored,
            "the notebook runs": self.check_notebook,
            "the script runs from the root and leaves its pictures": self.check_script,
        }
        return [pytest.param(check, id=what) for what, check in checks.items()]

    def read(self) -> Any:
        """The notebook."""
        return _library("nbformat").read(self.here / "lesson.ipynb", as_version=4)

    def run(self, *arguments: str) -> str:
        """What Python prints with these arguments, at the repository's root. No window is opened."""
        done = captured([sys.executable, *arguments], self.here.parent, MPLBACKEND="agg")
        assert (done.returncode, testing.without_progress(done.stderr)) == (0, ""), done.stderr
        return done.stdout

    def check_stored(self) -> None:
        """The notebook holds the script's cells, run in their order, and nothing that tells where."""
        path, renew = self.here / "lesson.ipynb", f"after a change: kernel-fusion notebooks {self.here.name}"
        stored = self.read()
        assert _cells(stored) == _cells(_library("jupytext").read(self.script)), renew
        code = [cell for cell in stored.cells if cell.cell_type == "code"]
        assert len(code) > 8
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), renew
        self.check_outputs(code)
        assert not re.search(r"/(?:home|Users|root|tmp)/", path.read_text(encoding="utf-8")), renew
        assert str(self.here.parent) not in path.read_text(encoding="utf-8"), renew
        told = {"execution", "language_info"}  # when it ran, and by which Python
        assert all(told.isdisjoint(one) for one in (stored.metadata, *(cell.metadata for cell in code))), renew
        assert path.stat().st_size < 1 << 20, "a page would not show it"

    def check_outputs(self, code: list) -> None:
        """Each cell shows its pictures, and nothing is said on standard error."""
        for cell in code:
            shown = [output for output in cell.outputs if "image/png" in output.get("data", {})]
            assert len(shown) == cell.source.count('show("'), cell.source
        assert sum(cell.source.count('show("') for cell in code) >= self.pictures
        said = [output.text for cell in code for output in cell.outputs if output.get("name") == "stderr"]
        assert testing.without_progress("".join(said)) == ""

    def check_notebook(self) -> None:
        """Every cell runs and shows what it must."""
        _library("ipykernel")
        _library("nbclient")
        done = notebooks.run(self.read(), self.here)
        self.check_outputs([cell for cell in done.cells if cell.cell_type == "code"])

    def check_script(self) -> None:
        """The script writes each picture that it says it wrote, and prints its line."""
        said, pictures, _ = _ran(self.script)
        assert pictures == said.count("wrote ") >= self.pictures
        assert re.search(self.says, said, re.MULTILINE), said

    def check_unbuilt(self) -> None:
        """Without a build the script says what to build, and shows all that needs none."""
        step = steps.find(self.here.name)
        said = self.run("-c", UNBUILT, str(self.script), step.module)
        assert f"build the step first: cd {step.folder} && python setup.py build_ext --inplace" in said
        assert said.count("wrote ") >= self.pictures

    def defined(self) -> dict[str, Any]:
        """What the script defines."""
        return _ran(self.script)[-1]
