"""What holds for the lesson of every step; the test file beside it calls this.

The notebook is the script, is stored without outputs, and runs in less than a minute. Both leave all their pictures.
"""

import os
import pathlib
import re
import runpy
import subprocess
import sys
import types
from typing import Any, NamedTuple

import pytest

from kernel_fusion import steps, testing
from kernel_fusion.console import child_environment


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


class Lesson(NamedTuple):
    """The one in a folder: lesson.py, and lesson.ipynb made of it.

    Args:
        here: the folder.
        pictures: how many there are at least.
        says: what stands in a line that the script prints: a regular expression.
    """

    here: pathlib.Path
    pictures: int
    says: str

    @property
    def script(self) -> pathlib.Path:
        return self.here / "lesson.py"

    def checks(self) -> list:
        """All that must hold, as parameters of a test that calls each."""
        checks = {
            "the notebook is the script": self.check_same,
            "the notebook is stored without outputs": self.check_stored,
            "the notebook runs": self.check_notebook,
            "the script runs from the root and leaves its pictures": self.check_script,
        }
        return [pytest.param(check, id=what) for what, check in checks.items()]

    def read(self) -> Any:
        """The notebook."""
        return _library("nbformat").read(self.here / "lesson.ipynb", as_version=4)

    def run(self, *arguments: str) -> str:
        """What Python prints with these arguments, at the repository's root. No window is opened."""
        environment = {**child_environment(), "MPLBACKEND": "agg"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.here.parent, env=environment, capture_output=True, text=True
        )
        assert (done.returncode, testing.without_progress(done.stderr)) == (0, ""), done.stderr
        return done.stdout

    def check_same(self) -> None:
        """The notebook has the script's cells."""
        script = _library("jupytext").read(self.script)
        assert _cells(self.read()) == _cells(script), "after a change: jupytext --sync lesson.py"

    def check_stored(self) -> None:
        """The notebook holds code, and nothing that a run leaves."""
        code = [cell for cell in self.read().cells if cell.cell_type == "code"]
        assert len(code) > 10
        assert [cell.source for cell in code if cell.outputs or cell.execution_count is not None] == []

    def check_notebook(self) -> None:
        """Every cell runs, each picture is shown, and nothing is said on standard error."""
        _library("ipykernel")
        notebook = self.read()
        client = _library("nbclient").NotebookClient(
            notebook, kernel_name="python3", resources={"metadata": {"path": str(self.here)}}
        )
        done = client.execute()  # a cell that raises ends it, and the error has the cell
        outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
        shown = [output for output in outputs if "image/png" in output.get("data", {})]
        assert len(shown) == sum(cell.source.count('show("') for cell in notebook.cells) >= self.pictures
        said = [output.text for output in outputs if output.get("name") == "stderr"]
        assert testing.without_progress("".join(said)) == ""

    def check_script(self) -> None:
        """The script writes each picture that it says it wrote, and prints its line."""
        folder = self.here / "build" / "lesson"
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
        said = self.run(os.path.relpath(self.script, self.here.parent))
        written = [path for path in folder.glob("*.png") if path.stat().st_mtime_ns != before.get(path)]
        assert len(written) == said.count("wrote ") >= self.pictures
        assert re.search(self.says, said, re.MULTILINE), said

    def check_unbuilt(self) -> None:
        """Without a build the script says what to build, and shows all that needs none."""
        step = steps.find(self.here.name)
        said = self.run("-c", UNBUILT, str(self.script), step.module)
        assert f"build the step first: cd {step.folder} && python setup.py build_ext --inplace" in said
        assert said.count("wrote ") >= self.pictures

    def defined(self) -> dict[str, Any]:
        """What the script defines."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MPLBACKEND", "agg")
            patch.chdir(self.here)
            return runpy.run_path(str(self.script))
