"""A rung that the table does not find, or that it names and nobody has, is an error before anything is compiled."""

import pathlib
import subprocess
import sys

import pytest

from kernel_fusion import build, rung_tables, steps

HEADER = """
struct Args { int n; };
void v1_naive(const Args& args, void* stream);
std::string v1_naive_can_implement(const Args& args);
// void v8_gone(const Args& args, void* stream);
void v2_two(const Args& args, void* stream);
"""
TABLE = """
constexpr Rung<Args> kRungs[] = {
    {"v1_naive", v1_naive, anything},    {"v2_two", v2_two, anything, scratch},
    // {"v9_gone", v9_gone, anything},
};
Rungs<Args> rungs() { return kRungs; }
"""


@pytest.fixture
def folder(tmp_path):
    """An op with two rungs, all in order."""
    op = tmp_path / "kernels" / "double"
    op.mkdir(parents=True)
    (op / "rungs.h").write_text(HEADER)
    (op / "rungs.cpp").write_text(TABLE)
    for name in ("v1_naive", "v2_two"):
        (op / f"{name}.cu").write_text(
            f"__global__ void {name}_kernel();\nvoid {name}(const Args& a, void* stream) {{}}\n"
        )
    return op


def edit(path: pathlib.Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_what_agrees_is_let_pass(folder):
    assert rung_tables.problems(folder) == []
    for step in steps.STEPS:
        for op in (step.path / "kernels").iterdir():
            assert rung_tables.problems(op) == []


FAULTS = {
    "a file without a row": (
        lambda op: edit(op / "rungs.cpp", '{"v2_two", v2_two, anything, scratch},', ""),
        'v2_two.cu: {}/rungs.cpp has no row for it; add {{"v2_two", v2_two, …}}',
    ),
    "a row that is a comment": (
        lambda op: edit(op / "rungs.cpp", '{"v2_two"', '// {"v2_two"'),
        "v2_two.cu: {}/rungs.cpp has no row for it",
    ),
    "a row without a file": (
        lambda op: (op / "v2_two.cu").unlink(),
        'rungs.cpp: row "v2_two" has no file {}/v2_two.cu',
    ),
    "a row copied and not changed": (
        lambda op: edit(op / "rungs.cpp", '"v2_two", v2_two', '"v2_two", v1_naive'),
        'rungs.cpp: row "v2_two" launches v1_naive',
    ),
    "a row twice": (
        lambda op: edit(op / "rungs.cpp", "// {", '{"v1_naive", v1_naive, anything}, // {'),
        'rungs.cpp: row "v1_naive" stands there 2 times',
    ),
    "a declaration with neither": (
        lambda op: edit(op / "rungs.h", "// void v8_gone", "void v8_gone"),
        "rungs.h: v8_gone is declared, and has neither a row in {}/rungs.cpp nor a file",
    ),
    "a file and a row without a declaration": (
        lambda op: edit(op / "rungs.h", "void v2_two", "// void v2_two"),
        "v2_two.cu: {}/rungs.h does not declare void v2_two(",
    ),
    "a file whose launcher kept the old name": (
        lambda op: edit(op / "v2_two.cu", "void v2_two(", "void v1_naive("),
        "v2_two.cu: it does not define void v2_two(",
    ),
    "a file with another kind of name": (
        lambda op: (op / "fast.cu").write_text(""),
        "fast.cu: a rung's file must be called v<number>_<name>.cu",
    ),
    "no table": (lambda op: (op / "rungs.cpp").unlink(), "there is no rungs.cpp"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_agree_is_named(folder, fault):
    plant, complaint = FAULTS[fault]
    plant(folder)
    (found,) = rung_tables.problems(folder)
    assert complaint.format(folder) in found


def test_the_build_refuses_it_before_it_compiles(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[1])
    kernels = [f"kernels/double/{name}.cu" for name in ("v1_naive", "v2_two")]
    extension = build.StepExtension(
        "fake._C", host=[], kernels=kernels, tables=["kernels/double/rungs.cpp"], include_dirs=[]
    )
    build.check_rung_tables(extension)
    edit(folder / "rungs.cpp", '{"v2_two", v2_two, anything, scratch},', "")
    with pytest.raises(build.BuildError, match=r"^kernels/double/v2_two\.cu: kernels/double/rungs\.cpp has no row"):
        build.check_rung_tables(extension)


def test_cmake_asks_it_without_the_package(folder):
    command = [sys.executable, "-I", "-S", rung_tables.__file__, folder]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    (folder / "v2_two.cu").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'row "v2_two" has no file' in done.stderr
