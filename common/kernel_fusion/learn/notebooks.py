"""`kernel-fusion notebooks`: each lesson.ipynb anew from its lesson.py, and tour.ipynb, and run, so that who only looks
at it sees the pictures, too."""

import argparse
import copy
import pathlib
from typing import Any

from rich.console import Console

from kernel_fusion import steps
from kernel_fusion.console import UserError

TOUR = steps.ROOT / "notebooks" / "tour.py"


def run(notebook: Any, folder: pathlib.Path) -> Any:
    """Runs the cells in `folder` and returns the notebook with what they show. A cell that raises is an exception."""
    import nbclient

    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],  # it warns that it talks to this process over TCP
    )
    return client.execute()


def renewed(script: pathlib.Path) -> Any:
    """The notebook of `script` with its outputs, and without what tells when, where and by which Python it ran."""
    import jupytext
    import nbformat
    from jupytext.combine import combine_inputs_with_outputs

    stored = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    metadata = copy.deepcopy(stored.metadata)
    notebook = combine_inputs_with_outputs(jupytext.read(script), stored)  # cells that stayed keep their ids
    notebook = run(notebook, script.parent)
    notebook.metadata = metadata
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]  # a build's progress
    return notebook


def command(options: argparse.Namespace, console: Console) -> int:
    """Writes the notebooks of `options.steps`, or all and the tour's.

    Raises:
        UserError: a step is not built: its notebook would show less.
    """
    import nbformat

    scripts = []
    for step in options.steps or steps.STEPS:
        if not steps.is_built(step):
            raise UserError(f"{step.folder} is not built for this Python; build it with: {steps.build_command(step)}")
        scripts.append(step.path / "lesson.py")
    for script in scripts if options.steps else [*scripts, TOUR]:
        notebook = renewed(script)
        path = script.with_suffix(".ipynb")
        nbformat.write(notebook, path)
        console.print(f"written: {path.relative_to(steps.ROOT)}, {path.stat().st_size / 1024:.0f} KB")
    return 0
