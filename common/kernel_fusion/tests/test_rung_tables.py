"""A rung that the list does not find, or that it names and nobody has, is an error before anything is compiled."""

import pathlib
import subprocess
import sys

import pytest

from kernel_fusion import build, rung_tables, steps

HEADER = """
struct Args { int n; };

// v2_gone: another op has it
#define KF_OP double
#define KF_RUNGS(RUNG)               \\
  RUNG(v1_naive, always, no_scratch) \\
  RUNG(v3_three, can_implement,      \\
       scratch_bytes, "the sum")
#include <kf/rung_list.h>
"""
V1 = "RUNG(v1_naive, always, no_scratch)"
MORE = """
std::string v3_three_can_implement(const Args& a) { return ""; }
int64_t v3_three_scratch_bytes(const Args& a) { return 4; }
"""


@pytest.fixture
def folder(tmp_path):
    """An op with two rungs, all in order."""
    op = tmp_path / "kernels" / "double"
    op.mkdir(parents=True)
    (op / "rungs.h").write_text(HEADER)
    for name, more in (("v1_naive", ""), ("v3_three", MORE)):
        (op / f"{name}.cu").write_text(
            f"__global__ void {name}_kernel();\nvoid {name}(const Args& a, void* stream) {{}}\n{more}"
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
        lambda op: edit(op / "rungs.h", "RUNG(v3_three,", "OTHER("),
        "v3_three.cu: {}/rungs.h has no row for it; add RUNG(v3_three, always, no_scratch)",
    ),
    "a row that is a comment": (
        lambda op: edit(op / "rungs.h", "RUNG(v3_three", "// RUNG(v3_three"),
        "v3_three.cu: {}/rungs.h has no row for it",
    ),
    "a row without a file": (
        lambda op: (op / "v3_three.cu").unlink(),
        "rungs.h: RUNG(v3_three, …) has no file {}/v3_three.cu",
    ),
    "a row twice": (
        lambda op: edit(op / "rungs.h", V1, f"{V1} {V1}"),
        "rungs.h: RUNG(v1_naive, …) stands there 2 times",
    ),
    "a file whose launcher kept the old name": (
        lambda op: edit(op / "v3_three.cu", "void v3_three(", "void v1_naive("),
        "v3_three.cu: it does not define void v3_three(",
    ),
    "a check that nobody defines": (
        lambda op: edit(op / "v3_three.cu", "v3_three_can_implement", "can_implement"),
        "v3_three.cu: it does not define std::string v3_three_can_implement(const Args& args), which its row names",
    ),
    "a check that nobody asks": (
        lambda op: edit(op / "rungs.h", "can_implement", "always"),
        "v3_three.cu: its row does not say can_implement, and so nobody asks v3_three_can_implement",
    ),
    "scratch memory of unknown size": (
        lambda op: edit(op / "v3_three.cu", MORE.splitlines()[2], ""),
        "v3_three.cu: it does not define int64_t v3_three_scratch_bytes(const Args& args), which its row names",
    ),
    "rows out of order": (
        lambda op: (edit(op / "rungs.h", V1, ""), edit(op / "rungs.h", '"the sum")', f'"the sum") {V1}')),
        "rungs.h: the rungs do not stand in the order of their numbers",
    ),
    "pieces before a rung": (
        lambda op: (
            edit(op / "rungs.h", V1, f"{V1.replace('v1_naive', 'pieces')} {V1}"),
            (op / "pieces.cu").write_text("void pieces(const Args& a, void* stream) {}\n"),
        ),
        "rungs.h: the rungs do not stand in the order of their numbers",
    ),
    "a gap without a reason": (
        lambda op: edit(op / "rungs.h", "// v2_gone: another op has it", ""),
        "rungs.h: there is no v2, and no line `// v2_<name>: <why>` above the list",
    ),
    "a file with another kind of name": (
        lambda op: (op / "fast.cu").write_text(""),
        "fast.cu: a rung's file must be called v<number>_<name>.cu, or pieces.cu",
    ),
    "no list": (lambda op: (op / "rungs.h").unlink(), "there is no rungs.h"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_agree_is_named(folder, fault):
    plant, complaint = FAULTS[fault]
    plant(folder)
    (found,) = rung_tables.problems(folder)
    assert complaint.format(folder) in found


def test_the_build_refuses_it_before_it_compiles(folder, monkeypatch):
    monkeypatch.chdir(folder.parents[1])
    kernels = [f"kernels/double/{name}.cu" for name in ("v1_naive", "v3_three")]
    extension = build.StepExtension("fake._C", host=[], kernels=kernels, include_dirs=[])
    build.check_rung_tables(extension)
    edit(folder / "rungs.h", V1, "")
    with pytest.raises(build.BuildError, match=r"^kernels/double/v1_naive\.cu: kernels/double/rungs\.h has no row"):
        build.check_rung_tables(extension)


def test_cmake_asks_it_without_the_package(folder):
    command = [sys.executable, "-I", "-S", rung_tables.__file__, folder]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    (folder / "v3_three.cu").unlink()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "RUNG(v3_three, …) has no file" in done.stderr
