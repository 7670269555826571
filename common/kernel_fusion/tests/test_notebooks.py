"""`kernel-fusion notebooks`: what it stores, and what it refuses."""

import pytest

from kernel_fusion import cli, steps
from kernel_fusion.learn import notebooks

jupytext = pytest.importorskip("jupytext", reason="pip install -r setup/dependencies.txt")
nbformat = pytest.importorskip("nbformat", reason="pip install -r setup/dependencies.txt")

LESSON = """\
# %% [markdown]
# A walk.

# %%
import sys

print("six", file=sys.stderr)
print(2 * 3)

# %%
print(7)
"""


def test_a_notebook_is_stored_with_its_outputs_and_nothing_else(tmp_path):
    script = tmp_path / "lesson.py"
    script.write_text(LESSON.replace("print(7)", "print(8)"))
    nbformat.write(jupytext.read(script), tmp_path / "lesson.ipynb")
    before = nbformat.read(tmp_path / "lesson.ipynb", as_version=4)
    script.write_text(LESSON)
    notebook = notebooks.renewed(script)
    nbformat.validate(notebook)
    text, first, second = notebook.cells
    assert [cell.outputs for cell in (first, second)] == [
        [{"output_type": "stream", "name": "stdout", "text": said}] for said in ("6\n", "7\n")
    ]
    assert [cell.id for cell in (text, first)] == [cell.id for cell in before.cells[:2]]
    assert second.source == "print(7)"
    assert notebook.metadata == before.metadata
    assert first.metadata == second.metadata == {}


def test_without_a_build_nothing_is_written(monkeypatch, capsys):
    monkeypatch.setattr(steps, "is_built", lambda step: False)
    monkeypatch.delattr(notebooks, "renewed")
    assert cli.main(["notebooks", "1"]) == 1
    assert "build it with: cd step1-simple && python setup.py build_ext --inplace" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "tours"), [([], 1), (["step1"], 0)])
def test_all_notebooks_are_those_of_the_steps_and_the_tour(monkeypatch, capsys, asked, tours):
    written = {}
    monkeypatch.setattr(steps, "is_built", lambda step: True)
    monkeypatch.setattr(notebooks, "renewed", lambda script: script)
    monkeypatch.setattr(nbformat, "write", lambda script, path: written.update({path: script}))
    assert cli.main(["notebooks", *asked]) == 0
    assert all(path == script.with_suffix(".ipynb") for path, script in written.items())
    assert [path.name for path in written] == ["lesson.ipynb"] * (1 if asked else len(steps.STEPS)) + [
        "tour.ipynb"
    ] * tours
    assert capsys.readouterr().out.count("written: ") == len(written)
