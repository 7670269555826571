"""What the tour shows of the real steps, which must be built. .ci/run looks how long the whole of it is."""

import fcntl
import importlib
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest
import torch

from kernel_fusion import steps
from kernel_fusion.bench import rung_counts
from kernel_fusion.checks.repository import ROOT, run
from kernel_fusion.console import UserError, captured, child_environment, make_console
from kernel_fusion.learn import planted

pytestmark = pytest.mark.skipif(not all(map(steps.is_built, steps.STEPS)), reason="the steps are not built")
needs_counting = pytest.mark.skipif(bool(rung_counts.why_not()), reason=rung_counts.why_not())


def on_a_terminal(command: list[str], width: int = 120) -> int:
    """How many lines a command leaves on a terminal: those written, less those that it goes up again."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    env = {name: value for name, value in child_environment().items() if name not in ("COLUMNS", "LINES")}
    env["TERM"] = "xterm-256color"
    with subprocess.Popen(command, stdout=its, stderr=its, env=env, close_fds=True) as child:
        os.close(its)
        written = b""
        while piece := read(ours):
            written += piece
    os.close(ours)
    text = written.decode()
    assert child.returncode == 0, text
    return text.count("\n") - sum(int(lines) for lines in re.findall(r"\x1b\[(\d+)A", text))


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so where the other end is closed
        return b""


@pytest.mark.long
@needs_counting
def test_a_step_leaves_as_many_lines_on_a_terminal_as_in_a_pipe():
    step = steps.STEPS[-1]
    part = [sys.executable, "-m", "kernel_fusion.learn.tour", "--step", step.module]
    done = captured(part)
    assert done.returncode == 0, done.stdout + done.stderr
    assert on_a_terminal(part) == done.stdout.count("\n") > 5


@needs_counting
def test_the_tour_has_the_race_detector_find_a_race(capsys, monkeypatch):
    planted.race(make_console())
    said = capsys.readouterr().out
    assert re.search(rf"`mean`\n.* reads 4 bytes at {planted.RACE}:21\n.* wrote them at {planted.RACE}:16\n", said)
    monkeypatch.setattr(planted, "RACE", "docs/examples/block_sum.cu")  # whose result is wrong, but not by a race
    with pytest.raises(RuntimeError, match="the race was not found; the program ended with code"):
        planted.race(make_console())


@needs_counting
def test_a_chunk_a_thread_asks_for_a_sector_a_lane_and_vectors_for_what_they_need():
    step = steps.STEPS[0]
    library = rung_counts.build(step, ["scale"])
    wanted = [rung_counts.Wanted("scale", rung) for rung in ("v1_chunk", "v2_naive", "v4_vector")]
    began = []
    counted = rung_counts.count(step, library, wanted, began.append)
    assert began == wanted
    moved = {one.rung: rung_counts.moved(kernels) for one, kernels in counted.items()}
    n = 1 << 16  # float32
    assert moved == {
        "v1_chunk": (32, 32, 8 * 8 * n, 1 / 8), "v2_naive": (4, 4, 8 * n, 1), "v4_vector": (16, 16, 8 * n, 1)
    }  # fmt: skip
    # Once more in another order: what one rung does is not added to the next.
    again = rung_counts.count(step, library, wanted[::-1])
    assert {one.rung: rung_counts.moved(kernels) for one, kernels in again.items()} == moved


@needs_counting
def test_only_the_kernels_that_count_are_compiled_again():
    step = steps.STEPS[0]
    run(sys.executable, "setup.py", "-q", "build_ext", "--inplace", cwd=step.path)
    folder = rung_counts.build(step, ["scale"]).parents[1]
    for made in ROOT.glob(f"build/temp.*/{step.folder}/counting/kernels/scale/v1_chunk.cu.o"):
        made.unlink()
    shown = []
    rung_counts.build(step, ["scale"], shown.append)
    compiled = [line for line in (folder / "build.log").read_text().splitlines() if "] c++ " in line]
    assert len(compiled) == 1
    assert compiled[0].endswith("kernels/scale/v1_chunk.cu")
    assert shown == ["1 of 2 files", "2 of 2 files"]


@needs_counting
def test_the_kernels_that_a_rung_launches_are_its_own_and_those_of_the_rungs_that_it_is_made_of():
    step3 = steps.STEPS[2]
    module = importlib.import_module(step3.module)
    x, weight, bias = torch.randn(3, 40), torch.ones(40), torch.zeros(40)
    rung_counts.take_launched(module)
    found = {}
    for op, inputs in {"layer_norm": (x,), "residual_layer_norm": (x, x)}.items():
        getattr(module, op)(*inputs, weight, bias, rung="v1_naive" if op == "layer_norm" else "v1_separate")
        found[op] = rung_counts.launched_kernels(step3, rung_counts.take_launched(module))
    assert found["layer_norm"] == {"layer_norm/v1_naive"}
    assert found["residual_layer_norm"] == {"residual_layer_norm/v1_separate", "layer_norm/v2_block"}
    assert rung_counts.take_launched(module) == ()


@needs_counting
def test_a_rung_that_is_not_there_fails_with_the_childs_words():
    step = steps.find("step2")
    library = rung_counts.build(step, ["softmax"])
    with pytest.raises(UserError, match=r"`rung` must be 'auto' or one of 'cpu', 'v1_naive'(?s:.*), got 'v9'"):
        rung_counts.count(step, library, [rung_counts.Wanted("softmax", "v9")])
