"""The stand-alone programs that say how far off they are: a result that is no number is the worst of all. And the page
on one of them, which shows what it prints.
"""

import re
import subprocess

import pytest

from emulator import programs
from kernel_fusion.checks.commands import line_of, pasted, stands_in
from kernel_fusion.checks.repository import ROOT, relative
from kernel_fusion.checks.structure import stands_alone
from kernel_fusion.checks.text import fences
from kernel_fusion.learn import exercises

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
    "step3-fused/pages/timeline.cu": (
        "/ kWidth + 1e-5f);",
        "/ kWidth + 1e-5f) + (row == 5 && c == 3 ? NAN : 0);",
        r"greatest error against the CPU in double: -?nan\nWRONG",
    ),
    "emulator/tests/programs/nbody.cu": (
        "  double worst = 0;",
        "  positions[7].x = NAN;\n  double worst = 0;",
        "WRONG",
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
    done = subprocess.run(
        [programs.compile_program(program)], env=programs.run_environment(), capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(said, done.stdout), done.stdout


# ---- step3-fused/pages/timeline.cu and its page ----

TIMELINE = ROOT / "step3-fused" / "pages" / "timeline.cu"
PAGE = TIMELINE.with_name("one_launch.md")


def shown() -> list:
    """Commands of the page, and the output that stands next."""
    found = fences(PAGE)
    return [(a, b) for a, b in zip(found, found[1:], strict=False) if (a.language, b.language) == ("bash", "text")]


def timeline(*arguments: str, order: str = "forward", threads: int | None = None) -> str:
    """What the program prints."""
    program = programs.compile_program(TIMELINE)
    environment = programs.run_environment(order, threads)
    done = subprocess.run([str(program), *arguments], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("pair", shown(), ids=line_of)
def test_the_page_on_one_launch_shows_what_is_printed(pair, tmp_path):
    commands, output = pair
    hunt = exercises.find("hunt_5_few_blocks")  # as handed out: the reader's own may be mended
    (tmp_path / hunt.name).write_text(exercises.cut(hunt), encoding="utf-8")
    said = pasted(tmp_path, "cd step3-fused", commands.text.replace("../my/step3-fused", str(tmp_path)))
    assert stands_in(output.text, said) is None, said


def test_the_time_line_is_short_and_stands_alone():
    text = TIMELINE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert stands_alone(TIMELINE)
    assert len(shown()) == 3


@pytest.mark.parametrize("order", ["forward", "reverse", "random:1"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_time_line_is_the_same_in_every_order(order, threads):
    assert timeline(order=order, threads=threads) == timeline()


@pytest.mark.parametrize(("blocks", "lag"), [(1, 0), (1, 1), (2, 2), (3, 0), (3, 1), (3, 4), (4, 1), (7, 0), (40, 9)])
def test_each_tile_is_done_once_and_rows_after_their_heads(blocks, lag):
    said = timeline(str(blocks), str(lag))
    lines = [line.split("|")[1][1:] for line in said.splitlines() if line.startswith("block ")]
    assert len(lines) == blocks
    turns = [[line[i : i + 4].strip() for i in range(0, len(line), 5)] for line in lines]
    drawn, completed, published, under_way = [], [], dict.fromkeys("0123", 0), {}
    for turn in range(len(turns[0])):
        for block in range(blocks):
            event = turns[block][turn] if turn < len(turns[block]) else ""
            if re.fullmatch(r"A\d\.\d|R\d", event):
                drawn.append(event)
                under_way[block] = event
            elif event == "+1":
                published[under_way[block][1]] += 1
            elif event in ("go", "wait"):
                assert (published[under_way[block][1]] == 4) == (event == "go")
            elif event == "done":
                completed.append(under_way[block])
    heads, rows = [f"A{b}.{h}" for b in range(4) for h in range(4)], [f"R{b}" for b in range(4)]
    assert sorted(drawn) == heads + rows
    assert sorted(completed) == rows
