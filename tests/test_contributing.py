"""CONTRIBUTING.md, done in a copy of the tree; and versions of tools, which stand in more than one place."""

import re
import shutil
import subprocess
import sys

import pytest

from emulator import programs
from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT, STEPS, run
from kernel_fusion.checks.text import fences

ABSENT = {"all_reduce": ["`cpu/*.cpp`"]}  # on the CPU its workers sum by torch.distributed
OPS = [(step, path.name) for step in STEPS for path in sorted((ROOT / step / "kernels").iterdir()) if path.is_dir()]
NOT_COPIED = shutil.ignore_patterns("build", "results", "__pycache__", ".*", "*.so", "*.egg-info", "my", "mine")
KERNEL_FUSION = (sys.executable, "-m", "kernel_fusion")
# A launch of the rung by itself: what the step's library does, which takes a minute to build.
PROGRAM = """
#include <cuda_runtime.h>
#include "v7_mine.cu"
int main() {
  float host[] = {1, 2, 3, 4, 5}, *x;
  cudaMalloc(&x, sizeof(host));
  cudaMemcpy(x, host, sizeof(host), cudaMemcpyHostToDevice);
  kf::KF_BACKEND::scale::v7_mine({x, x, 5, 3.0, kf::DType::kFloat32}, nullptr);
  cudaMemcpy(host, x, sizeof(host), cudaMemcpyDeviceToHost);
  return host[0] == 3 && host[4] == 15 ? 0 : 1;
}
"""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(heading: str, language: str, document: str = "CONTRIBUTING.md") -> list[str]:
    """The blocks below a heading of CONTRIBUTING.md, or of another document."""
    lines = text_of(document).splitlines()
    begin = lines.index(f"## {heading}") + 1
    end = next((n for n, line in enumerate(lines) if n > begin and line.startswith("## ")), len(lines))
    found = fences(ROOT / document)
    return [fence.text for fence in found if begin < fence.line <= end and fence.language == language]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the tree without measurements, nothing built."""
    folder = tmp_path_factory.mktemp("copy") / "tree"
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", steps.python_path(folder))
        patch.delenv("PYTEST_ADDOPTS", raising=False)
        yield folder


def test_a_rung_as_the_page_tells_it(copy, monkeypatch):
    begun, built = blocks("A rung", "sh")
    (missing,) = blocks("A rung", "text")
    step = copy / "step1-simple"
    header = step / "kernels" / "scale" / "rungs.h"
    tables = [sys.executable, str(copy / "common" / "kernel_fusion" / "rung_tables.py"), "kernels/scale"]

    run("bash", "-euc", begun, cwd=copy)
    asked = subprocess.run(tables, cwd=step, stderr=subprocess.PIPE, text=True)
    assert (asked.returncode, f"error: {asked.stderr.strip()}") == (1, missing)

    row = re.search(r"add (RUNG\(.*\))$", missing)[1]
    text = header.read_text(encoding="utf-8")
    last = re.findall(r"^  RUNG\(.*\)$", text, re.MULTILINE)[-1]
    header.write_text(text.replace(last, f"{last} \\\n  {row}"), encoding="utf-8")
    run(*tables, cwd=step)
    assert built.splitlines()[-1] == "kernel-fusion rungs scale"
    assert "\nv7_mine " in run(*KERNEL_FUSION, "rungs", "scale", cwd=copy)

    program = header.with_name("program.cu")
    program.write_text(PROGRAM)
    monkeypatch.setattr(programs, "BUILD", copy / "build")
    folders = (copy / "common" / "include", step / "include")
    run(str(programs.compile_program(program, include_dirs=folders, compiler_flags=("-DKF_BACKEND=emulated",))))
    program.unlink()


@pytest.mark.parametrize("step", STEPS)
def test_a_rung_of_a_readers_own_as_the_steps_page_tells_it(step, tmp_path):
    (text,) = blocks("A rung of your own", "sh", f"{step}/README.md")
    begun, build, test = text.splitlines()
    kernels, rung = re.search(r"> (kernels/\w+)/(\w+)\.cu$", begun).groups()
    script = re.fullmatch(rf"python (test\w*\.py) -k {rung}", test)[1]
    assert (ROOT / step / script).is_file()
    assert f"{kernels}/rungs.h" in build
    shutil.copytree(ROOT / step / kernels, tmp_path / kernels)
    run("bash", "-euc", begun, cwd=tmp_path)
    assert f"void {rung}(const Args& a, void* stream)" in (tmp_path / kernels / f"{rung}.cu").read_text()
    tables = [sys.executable, str(ROOT / "common" / "kernel_fusion" / "rung_tables.py"), kernels]
    asked = subprocess.run(tables, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert asked.returncode == 1
    assert f"{kernels}/rungs.h has no row for it; add RUNG({rung}, " in asked.stderr


def test_a_page_as_the_page_tells_it(copy):
    (commands,) = blocks("A page", "sh")
    texts = [sys.executable, "-m", "pytest", "-q", "tests/test_text.py", "-k"]
    order = "reading_order and step1"
    run("bash", "-euc", commands, cwd=copy)
    run(*texts, f"{order} or mine.md or binding.md", cwd=copy)
    shutil.copy(ROOT / "step1-simple" / "README.md", copy / "step1-simple")
    unlinked = subprocess.run([*texts, order], cwd=copy, stdout=subprocess.PIPE, text=True)
    assert unlinked.returncode == 1
    assert "mine.md" in unlinked.stdout


@pytest.mark.parametrize(("step", "op"), OPS)
def test_an_op_has_the_places_of_the_page(step, op):
    section = text_of("CONTRIBUTING.md").split("\n## An op\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)
    assert len(rows) == 9
    absent = []
    for row in rows:
        globs = re.findall(r"`(.*?)`", row.replace("<op>", op).replace("<module>", step.replace("-", "_")))
        found = [path.read_text(encoding="utf-8") for glob in globs for path in (ROOT / step).glob(glob)]
        if not any(re.search(rf"(?<![a-z]){op}(?![a-z])", text) for text in found):
            absent.append(row)
    assert absent == ABSENT.get(op, [])


def test_a_tool_has_one_version():
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", text_of("setup/dependencies.txt"), re.MULTILINE))
    hook = r"/(?:mirrors-)?(ruff|clang-format)(?:-pre-commit)?\n    rev: v(\S+)$"
    found = dict(re.findall(hook, text_of(".pre-commit-config.yaml"), re.MULTILINE))
    assert found == {name: pins[name] for name in ("ruff", "clang-format")}


def test_hosted_ci_calls_our_own():
    assert re.search(r"run: \.ci/run\b", text_of(".github/workflows/ci.yml"))
