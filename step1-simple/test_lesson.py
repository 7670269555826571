"""The lesson as a notebook: it is lesson.py, is stored without outputs, and runs in less than a minute."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from kernel_fusion.console import child_environment

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT, NOTEBOOK = HERE / "lesson.py", HERE / "lesson.ipynb"
SECONDS = 60


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


@pytest.mark.timeout(2 * SECONDS)
def test_the_notebook_runs_in_less_than_a_minute(notebook):
    notebooks("ipykernel")
    client = notebooks("nbclient")
    began = time.monotonic()
    done = client.NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
    ).execute()  # a cell that raises ends it, and the error has the cell
    assert time.monotonic() - began < SECONDS
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == sum(cell.source.count("plt.subplots(") for cell in notebook.cells)
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.timeout(2 * SECONDS)
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
        timeout=SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    written = [path for path in folder.glob("*.png") if path.stat().st_mtime_ns != before.get(path)]
    assert len(written) == done.stdout.count("wrote ") >= 5
