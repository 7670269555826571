"""notebooks/: each is its script and runs without a GPU; hosted_gpu.ipynb chooses what a machine has need of."""

import pathlib
import re
import types

import pytest

from kernel_fusion.checks.repository import ROOT
from kernel_fusion.learn import notebooks

jupytext = pytest.importorskip("jupytext", reason="pip install -r setup/dependencies.txt")
nbformat = pytest.importorskip("nbformat", reason="pip install -r setup/dependencies.txt")

SCRIPT = ROOT / "notebooks" / "hosted_gpu.py"


def stored(script: pathlib.Path = SCRIPT):
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def code(words: str) -> str:
    """The cell with these words."""
    (found,) = [cell.source for cell in stored().cells if cell.cell_type == "code" and words in cell.source]
    return found


@pytest.mark.parametrize(
    ("script", "renew"),
    [(SCRIPT, "jupytext --sync notebooks/hosted_gpu.py"), (notebooks.TOUR, "kernel-fusion notebooks")],
    ids=lambda given: getattr(given, "stem", ""),
)
def test_a_notebook_is_its_script(script, renew):
    cells = [[(cell.cell_type, cell.source) for cell in one.cells] for one in (stored(script), jupytext.read(script))]
    assert cells[0] == cells[1], f"after a change: {renew}"


def test_the_notebook_for_a_gpu_is_stored_as_not_run():
    assert all(not cell.outputs for cell in stored().cells if cell.cell_type == "code")
    assert stored().metadata.accelerator == "GPU"  # which Colab then offers


def of_the_tour(notebook) -> tuple[list[bool], str]:
    """Of each cell with code whether it shows a picture; and all that they say."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [any("image/png" in output.get("data", {}) for output in own) for own in outputs]
    return pictures, "".join(output.get("text", "") for own in outputs for output in own)


def test_the_tour_is_stored_as_run_and_runs():
    pytest.importorskip("ipykernel", reason="pip install -r setup/dependencies.txt")
    pictures, said = of_the_tour(stored(notebooks.TOUR))
    assert str(ROOT) not in said
    found, told = of_the_tour(notebooks.run(stored(notebooks.TOUR), notebooks.TOUR.parent))
    assert found == pictures == [False, True, True, False, True, True, True]
    for one in (said, told):
        assert "race in shared memory, `mean`" in one
        assert re.search(r"^v9_split +off by \d", one, re.MULTILINE)
        assert re.search(r"^loss at first [56]\.\d\d, at last \d\.\d\d$", one, re.MULTILINE)  # ln 256 is 5.5


def test_far_from_the_project_it_asks_for_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="write the project's address into REPOSITORY"):
        exec(code("def run("), {"REPOSITORY": ""})


@pytest.mark.parametrize(
    ("nvcc", "ensurepip", "commands"),
    [
        ("release 13.0", 0, [("make setup", [])]),
        ("release 12.8", 0, [("make setup", ["TORCH_INDEX"])]),
        (None, 1, [("apt-get update", []), ("apt-get install", []), ("make setup", [])]),
    ],
)
def test_setup_is_that_of_the_machine(nvcc, ensurepip, commands):
    done = []
    said = types.SimpleNamespace(returncode=ensurepip, stdout=f"Cuda compilation tools, {nvcc}")
    machine = {
        "importlib": types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: None)),
        "subprocess": types.SimpleNamespace(run=lambda *command, **options: said),
        "shutil": types.SimpleNamespace(which=lambda name, path=None: nvcc and f"/bin/{name}"),
        "root": pathlib.Path("/project"),
        "run": lambda *command, **chosen: done.append((" ".join(command[:2]), list(chosen))),
    }
    exec(code("make"), machine)
    assert done == commands
    assert machine["python"] == "/project/.venv/bin/python"


@pytest.mark.long
def test_it_runs_here(monkeypatch):
    pytest.importorskip("ipykernel", reason="pip install -r setup/dependencies.txt")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--sample=8")
    notebook = notebooks.run(stored(), SCRIPT.parent)
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "set up already" in said
    assert "ready: make tour" in said
    assert " passed" in said
    assert ("there is no GPU" in said) == ("left out: there is no GPU to time" in said)
