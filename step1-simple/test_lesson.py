"""The lesson as a notebook: it is lesson.py, is stored without outputs, and runs in less than a minute."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from kernel_fusion import testing
from kernel_fusion.console import child_environment

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT, NOTEBOOK = HERE / "lesson.py", HERE / "lesson.ipynb"


def notebooks(library):
    """A library for notebooks. A machine that only measures on its GPU need not have them."""
    return pytest.importorskip(library, reason="pip install -r setup/dependencies.txt")


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.fixture
def notebook():
    return notebooks("nbformat").read(NOTEBOOK, as_version=4)


def test_the_notebook_is_the_script(notebook):
    assert cells(notebook) == cells(notebooks("jupytext").read(SCRIPT)), "after a change: jupytext --sync lesson.py"


def test_the_notebook_is_stored_without_outputs(notebook):
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 10
    assert [cell.source for cell in code if cell.outputs or cell.execution_count is not None] == []


def test_the_notebook_runs(notebook):
    notebooks("ipykernel")
    client = notebooks("nbclient")
    done = client.NotebookClient(
        notebook, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
    ).execute()  # a cell that raises ends it, and the error has the cell
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == sum(cell.source.count('show("') for cell in notebook.cells) >= 5
    said = [output.text for output in outputs if output.get("name") == "stderr"]
    assert testing.without_progress("".join(said)) == ""


def test_the_script_runs_from_the_root_and_leaves_its_pictures():
    folder = HERE / "build" / "lesson"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.png")}
    environment = {**child_environment(), "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, os.path.relpath(SCRIPT, HERE.parent)],
        cwd=HERE.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, testing.without_progress(done.stderr)) == (0, "")
    written = [path for path in folder.glob("*.png") if path.stat().st_mtime_ns != before.get(path)]
    assert len(written) == done.stdout.count("wrote ") >= 5
    assert re.search(r"^latency [\d.]+ µs; for [\d.]+ TB/s: \d+ KB on each", done.stdout, re.MULTILINE)
