"""Builds in a copy of the tree: one that is killed, and one with a rung that a reader has written."""

import collections
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT, run

IGNORED = shutil.ignore_patterns("build", "__pycache__", "*.so", "*.egg-info")
BUILD = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")
LOAD = "from kernel_fusion import steps; import step1_simple as s; print(s.rungs('scale'))"
# The compiler's quickest way. It warns of more then: it does not see where a function cannot return.
COMPILER = """#!/bin/sh
exec c++ "$@" -O0 -g0 -w
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of common, the emulator and step 1, not built at first. What a test builds there, the next need not."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("common", "emulator", "step1-simple"):
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for name in ("CMakeLists.txt", "conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    compiler = folder / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        own = {"CXX": str(compiler), "KF_CUDA": "0", "MAX_JOBS": "2", "PYTHONPATH": steps.python_path(folder)}
        for name, value in own.items():
            patch.setenv(name, value)
        yield folder


@pytest.mark.long
def test_killed_build_is_not_trusted(copy):
    step = copy / "step1-simple"
    build = subprocess.Popen(BUILD, cwd=step, start_new_session=True, stdout=subprocess.DEVNULL)
    while not (objects := list(copy.glob("build/**/*.o"))) and build.poll() is None:
        time.sleep(0.1)
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    assert objects
    assert list(step.glob("step1_simple/_C*")) == []

    load = subprocess.run([sys.executable, "-c", LOAD], cwd=copy / "common", stderr=subprocess.PIPE, text=True)
    assert "cd step1-simple && python setup.py build_ext --inplace" in load.stderr

    run(*BUILD, cwd=step)
    assert "v2_naive" in run(sys.executable, "-c", LOAD, cwd=copy / "common")

    (library,) = step.glob("step1_simple/_C*")
    os.truncate(library, library.stat().st_size // 2)  # as where the kill comes while it is put into its place
    run(*BUILD, cwd=step)
    assert "v2_naive" in run(sys.executable, "-c", LOAD, cwd=copy / "common")


@pytest.mark.long
def test_a_rung_of_your_own_as_the_readme_tells_it(copy):
    """Step by step: a copy of v4_vector.cu, a row in rungs.h, its names; what is forgotten is an error."""
    step = copy / "step1-simple"
    scale = step / "kernels" / "scale"
    name = "v7_two_vectors"
    kernel = scale / f"{name}.cu"

    def build() -> subprocess.CompletedProcess:
        return subprocess.run(BUILD, cwd=step, capture_output=True, text=True)

    shutil.copy(scale / "v4_vector.cu", kernel)
    done = build()
    assert done.returncode == 1
    assert f"error: kernels/scale/{name}.cu: kernels/scale/rungs.h has no row for it" in done.stderr

    row = "  RUNG(v6_streaming, always, no_scratch)"
    header = scale / "rungs.h"
    header.write_text(replaced(header.read_text(), row, f"{row} \\\n  RUNG({name}, always, no_scratch)"))
    done = build()
    assert done.returncode == 1
    assert f"kernels/scale/{name}.cu: it does not define void {name}(" in done.stderr

    text = kernel.read_text(encoding="utf-8").replace("v4_vector", name)
    kernel.write_text(with_two_vectors(text), encoding="utf-8")
    done = build()
    assert done.returncode == 0, done.stdout + done.stderr

    tested = run(sys.executable, "test.py", "-k", name, "-q", cwd=step)
    assert int(re.search(r"(\d+) passed", tested)[1]) >= 10
    timed = run(sys.executable, "benchmark.py", "--op", "scale", "--rung", name, "--sizes", "emulated", cwd=step)
    assert re.search(rf"{name} .* right", timed)


def with_two_vectors(text: str) -> str:
    """v4_vector.cu with two vectors a thread, as a reader might write it."""
    for edit in (
        ("  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;\n", ""),
        (
            "n / N;\n",
            "n / N;\n  for (int k = 0; k < 2; ++k) {\n"
            "  const int64_t i = (2 * int64_t{blockIdx.x} + k) * blockDim.x + threadIdx.x;\n",
        ),
        ("to_compute(x[tail]));\n", "to_compute(x[tail]));\n  }\n"),
        ("ceil_div(ceil_div(a.n, N), kThreads)", "ceil_div(ceil_div(a.n, N), 2 * kThreads)"),
    ):
        text = replaced(text, *edit)
    return text


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1
    return text.replace(old, new)


GTEST = "add_library(GTest::gtest_main INTERFACE IMPORTED)\nset(GTest_FOUND TRUE)\n"


@pytest.mark.tools
@pytest.mark.skipif(not all(map(shutil.which, ("cmake", "ninja"))), reason="needs cmake and ninja: pip install both")
def test_cmake_refuses_a_rung_without_a_row(copy, tmp_path):
    """Whether GoogleTest is there or not: nothing is compiled."""
    (tmp_path / "GTestConfig.cmake").write_text(GTEST)
    kernel = copy / "step1-simple" / "kernels" / "gelu" / "v9_forgotten.cu"
    command = ["cmake", "-G", "Ninja", "-S", copy, "-B", tmp_path / "build", f"-DGTest_DIR={tmp_path}"]
    command = [*map(str, command), f"-DPython3_EXECUTABLE={sys.executable}"]
    run(*command)
    shutil.copy(kernel.with_name("v1_naive.cu"), kernel)
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        kernel.unlink()
    assert done.returncode == 1
    assert "  kernels/gelu/v9_forgotten.cu: kernels/gelu/rungs.h has no row for it; " in done.stderr


def test_what_two_steps_link_is_compiled_by_one_command():
    """Otherwise each build of one step would make the other compile it again."""
    commands = collections.defaultdict(list)
    for ninja_file in sorted(ROOT.glob("build/temp.*/step*.ninja")):
        if "counting" in ninja_file.name:  # made by another run, perhaps with another Python
            continue
        text = ninja_file.read_text(encoding="utf-8")
        rules = dict(re.findall(r"^rule (\w+)\n  command = (.*)$", text, re.M))
        for output, rule, source, includes in re.findall(
            r"^build (\S+\.o): (\w+) (\S+).*\n  includes = (.*)$", text, re.M
        ):
            commands[output].append((rules[rule], source, includes))
    assert any(len(by_step) > 1 for by_step in commands.values())
    assert [output for output, by_step in commands.items() if len(set(by_step)) > 1] == []
