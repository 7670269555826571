"""The commands of the READMEs and docs, executed in order where they stand.

A ```bash fence is run by `bash -e`: a stage's in the stage's folder, others at the root. A word after `bash` says what
a fence needs: `gpu`, `sanitizer`, `gdb` (run where there is one), `network` (an installation; not run here), `long`
(`make tour`, `make test`; .ci/run runs these). Test scripts run a sample of their tests: the whole of them runs beside
this one.
"""

import os
import shutil

import pytest
from repository import ROOT, STAGES, commands_folder, fences, relative, run

READMES = [ROOT / "README.md", ROOT / "setup" / "environment.md", *sorted((ROOT / "docs").glob("*.md"))]
READMES += [ROOT / stage / "README.md" for stage in STAGES]
TAGS = {"gpu", "sanitizer", "gdb", "network", "long"}


def absent() -> set[str]:
    """The tags whose fences cannot run here."""
    needs = {"gpu": ("nvidia-smi", "nvcc"), "sanitizer": ("compute-sanitizer",), "gdb": ("gdb", "cmake", "ninja")}
    return {tag for tag, programs in needs.items() if not all(map(shutil.which, programs))}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("readme", READMES, ids=relative)
def test_commands_run(readme, tmp_path):
    blocks = [fence for fence in fences(readme) if fence.language == "bash"]
    assert blocks, "no commands"
    for fence in blocks:
        assert set(fence.tags) <= TAGS, f"line {fence.line}: unknown tag"
        if {"network", "long", *absent()} & set(fence.tags):
            continue
        run(
            "bash",
            "-euxo",
            "pipefail",
            "-c",
            fence.text,
            cwd=readme.parent if readme.parent.name in STAGES else ROOT,
            PATH=f"{commands_folder(tmp_path)}{os.pathsep}{os.environ['PATH']}",
            PYTHON="python",
            PYTEST_ADDOPTS="--sample=8",
        )


def test_ci_runs_the_long_commands():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = {
        line
        for readme in READMES
        for fence in fences(readme)
        if "long" in fence.tags
        for line in fence.text.splitlines()
    }
    assert lines
    assert {line for line in lines if line.split("  #")[0].strip() not in script} == set()
