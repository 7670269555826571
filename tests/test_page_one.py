"""The stand-alone programs that say how far off they are: a result that is no number is the worst of all."""

import re
import subprocess

import pytest
from repository import ROOT, relative

from kernel_fusion import simt

# What is replaced in a kernel so that one result in the middle becomes NaN, and what the program must say then.
PLANTED = {
    "step1-simple/simple_kernel.cu": ("y[i] = factor * x[i];  ", "y[i] = i == 7 ? NAN : factor * x[i];", "WRONG"),
    "step2-attention/attention_kernel.cu": (
        "+ query * kDim + d] = mean;",
        "+ query * kDim + d] = query == 5 && d == 3 ? NAN : mean;",
        r"greatest error against the CPU in double: -?nan\n12 of 98304 elements WRONG",
    ),
    "step3-fused/fused_kernel.cu": (
        "y[token * kWidth + c] = (row",
        "y[token * kWidth + c] = token == 5 && c == 3 ? NAN : (row",
        r"greatest error against the CPU in double: -?nan\nWRONG",
    ),
    "common/simt/tests/programs/nbody.cu": (
        "  double worst = 0;",
        "  positions[7].x = NAN;\n  double worst = 0;",
        "WRONG",
    ),
    "common/simt/tests/programs/softmax.cu": (
        "y[i] = __expf(x[i] - md.m) * inverse;",
        "y[i] = i == 3 ? NAN : __expf(x[i] - md.m) * inverse;",
        "  31 wide, .*, WRONG",
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_a_nan_in_the_middle_is_wrong(name, tmp_path):
    right, wrong, said = PLANTED[name]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text.count(right) == 1, relative(ROOT / name)
    program = tmp_path / "program.cu"
    program.write_text(text.replace(right, wrong).replace("#include <cstdio>", "#include <cmath>\n#include <cstdio>"))
    done = subprocess.run([simt.compile_program(program)], env=simt.run_environment(), capture_output=True, text=True)
    assert done.returncode in (1, 3), done.stdout  # softmax.cu: how many of its widths + done.stderr
    assert re.search(said, done.stdout), done.stdout
