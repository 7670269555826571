"""The tour says what it shows, names what fails, and goes on where it can. Run whole, on steps that are fakes."""

import re

import pytest
import torch

from kernel_fusion.bench import rung_counts
from kernel_fusion.console import make_console
from kernel_fusion.learn import tour
from kernel_fusion.tests.fake_repository import FakeRepository
from kernel_fusion.tests.test_profile import double_case


def test_a_tour_shows_every_rung_and_ends_with_0(tmp_path):
    done = FakeRepository(tmp_path, 1).python("-m", "kernel_fusion", "tour")
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert re.match(r"Python 3\.\d+\.\d+, torch ", out)
    assert re.search(r"That takes about 2 minutes on 2 cores\. (.|\n)* tour --full", out)
    assert "[1/4] build step1-fake … ok" in out
    assert "How to double a number." in out
    assert re.search(r"^double +v1_good +a sum +0 +32 / 4 +4×$", out, re.MULTILINE)
    assert re.search(r"^ +v2_good +a product +0 +32 / 4 +4×$", out, re.MULTILINE)
    assert re.search(r"^ +refuses +– +– +–$", out, re.MULTILINE)
    assert re.search(r"^Not run: double refuses \(takes nothing\)$", out, re.MULTILINE)
    assert re.search(r"^Plain C\+\+ on \d+ cores, in brackets PyTorch, in ms: double [\d.e-]+ \([\d.e-]+\)$", out, re.M)
    assert "patched: no difference" in out
    assert "trained" in out
    assert out.splitlines()[-1].startswith("Next: ")
    assert "failed" not in out.lower()
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", out), "control characters in piped output"


def test_the_plan_counts_what_is_not_built(monkeypatch):
    monkeypatch.setattr(tour.steps, "is_built", lambda step: False)
    whole = re.search(r"about (\d+) minutes", tour.plan(full=False))
    monkeypatch.setattr(tour.steps, "is_built", lambda step: True)
    rest = re.search(r"about (\d+) minutes", tour.plan(full=False))
    assert (int(whole[1]) - int(rest[1])) * 60 == pytest.approx(sum(tour.BUILD_SECONDS.values()), abs=60)


def test_every_step_says_how_long_its_build_takes():
    assert list(tour.BUILD_SECONDS) == [step.folder for step in tour.steps.STEPS]


def test_a_full_tour_shows_a_table_for_each_case_with_times(tmp_path):
    done = FakeRepository(tmp_path, 1).python("-m", "kernel_fusion", "tour", "--full")
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert "size 'emulated' on the CPU" in out
    assert re.search(r"v1_good +│ +0\.0e\+00 │ +0 │ .*(µs|ms|s) │ .*right", out)
    assert "torch eager (peer)" in out
    assert "to count" not in done.stderr


def test_what_cannot_be_counted_is_said_and_fails_nothing(tmp_path):
    repository = FakeRepository(tmp_path, 1)
    repository.counting(why_not="counting needs g++, and c++ is clang")
    done = repository.python("-m", "kernel_fusion", "tour")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not counted: counting needs g++, and c++ is clang" in done.stdout
    assert re.search(r"^double +v1_good +a sum +0 +– +–$", done.stdout, re.MULTILINE)


def test_what_fails_is_named_and_the_rest_is_shown(tmp_path):
    repository = FakeRepository(tmp_path, 4)
    repository.step("step1-fake", build="raise SystemExit('no compiler here')")
    repository.step("step2-fake", run="lambda x, rung: x * 3")
    repository.step("step3-fake", before="import os\nos.abort()\n")
    done = repository.python("-m", "kernel_fusion", "tour")
    out = done.stdout
    assert done.returncode == 1
    assert "[1/10] build step1-fake … FAILED" in out
    assert "no compiler here" in out
    assert "step1-fake: every rung, checked … not run: step1-fake is not built" in out
    assert re.search(r"v1_good +a sum +\S+ WRONG +32 / 4", out)
    assert "double: n 64, float32: v1_good is WRONG: " in out
    assert "was ended by SIGABRT" in out
    assert out.count("How to double a number.") == 2  # of step2, whose results are wrong, and of step4
    assert re.search(r"\[8/10\] step4-fake: .* … ok", out)
    assert out.splitlines()[-3:] == [
        "failed: build step1-fake",
        "failed: step2-fake: every rung, checked",
        "failed: step3-fake: every rung, checked",
    ]


def test_a_result_that_is_never_written_is_wrong(tmp_path):
    repository = FakeRepository(tmp_path, 1)
    repository.step("step1-fake", run="lambda x, rung: torch.empty_like(x)")
    done = repository.python("-m", "kernel_fusion", "tour")
    assert done.returncode == 1
    assert re.search(r"v2_good +a product +inf WRONG", done.stdout)


def test_plain_cpp_that_is_wrong_fails_the_tour(tmp_path):
    repository = FakeRepository(tmp_path, 1)
    repository.step("step1-fake", run="lambda x, rung: x * (3 if rung == 'cpu' else 2)")
    done = repository.python("-m", "kernel_fusion", "tour")
    assert done.returncode == 1
    assert "step1-fake: 1 wrong results, marked above" in done.stdout + done.stderr
    assert "failed: step1-fake: every rung, checked" in done.stdout


def test_a_demonstration_that_fails_is_named(tmp_path):
    repository = FakeRepository(tmp_path, 1)
    repository.demonstrations(train="raise AssertionError('the bigram model is better')")
    done = repository.python("-m", "kernel_fusion", "tour")
    assert done.returncode == 1
    assert "the bigram model is better" in done.stdout + done.stderr
    assert "patched: no difference" in done.stdout
    assert done.stdout.splitlines()[-1] == "failed: a small GPT-2 trained on this repository's documents"


def test_a_library_from_before_is_not_shown_where_the_build_fails(tmp_path):
    repository = FakeRepository(tmp_path, 1)
    build = repository.python("-c", "import os; os.chdir('step1-fake'); exec(open('setup.py').read())")
    assert build.returncode == 0
    assert "How to double" in repository.python("-m", "kernel_fusion.learn.tour", "--step", "1").stdout
    repository.step("step1-fake", build="raise SystemExit(1)")
    done = repository.python("-m", "kernel_fusion", "tour")
    assert done.returncode == 1
    assert "How to double" not in done.stdout


def test_rungs_that_one_reason_holds_back_are_named_together():
    listed = rows(a=2, b=2)
    for row, why in zip(listed, ("takes p = 0 only", "", "runs on GPUs only", "takes p = 0 only"), strict=True):
        row.refusal = why
    assert tour.refusals(listed) == "Not run: a v0, b v1 (takes p = 0 only); b v0 (runs on GPUs only)"
    assert tour.refusals(rows(a=1)) == ""


# ---- the table ----


def rows(**counts: int) -> list[tour.Row]:
    """So many rungs of each op."""
    return [
        tour.Row(double_case(op=op), f"v{number}", "an idea") for op, count in counts.items() for number in range(count)
    ]


def names(found: list[tour.Row]) -> list[str]:
    return [f"{row.case.op} {row.name}" for row in found]


def test_a_table_that_fits_a_screen_is_shown_whole():
    assert len(tour.on_a_screen(rows(a=3, b=3), 6)) == 6


def test_of_a_longer_one_later_ops_show_their_last_rung():
    assert names(tour.on_a_screen(rows(a=3, b=4, c=2), 6)) == ["a v0", "a v1", "a v2", "b v3", "c v0", "c v1"]
    assert names(tour.on_a_screen(rows(a=9, b=9), 6)) == ["a v8", "b v8"]


def test_of_a_longer_one_a_last_rung_that_did_not_run_gives_way():
    listed = rows(a=3, b=3)
    for row in listed[:5]:
        row.error = 0.0
    assert names(tour.on_a_screen(listed, 2)) == ["a v2", "b v1"]


def test_a_rung_that_is_wrong_is_always_shown():
    listed = rows(a=3, b=4)
    listed[4].correct = False
    assert names(tour.on_a_screen(listed, 4)) == ["a v0", "a v1", "a v2", "b v1", "b v3"]


@pytest.mark.parametrize(
    ("needed", "given"),
    [([5, 4, 3, 2], [5, 4, 3, 2]), ([27, 19, 8, 4], [9, 9, 8, 4]), ([1, 40, 40, 40], [1, 9, 10, 10])],
)
def test_steps_share_the_rows_and_a_short_one_leaves_its_own(monkeypatch, needed, given):
    counts = dict(zip(tour.steps.STEPS, needed, strict=True))
    monkeypatch.setattr(tour, "ROWS", 30)
    monkeypatch.setattr(tour.syllabus, "ops", lambda step: ["op"])
    monkeypatch.setattr(tour.syllabus, "rungs", lambda step, op: [None] * counts[step])
    assert [tour.share_of(step, count) for step, count in counts.items()] == given


def test_on_a_gpu_the_table_has_times(capsys):
    row = tour.Row(double_case(bytes=1000), "v1", "[an idea]", error=1.5e-7, ms=0.001)
    make_console().print(tour.table_of([row], on_gpu=True))
    assert re.search(r"double +v1 +\[an idea\] +1\.5e-07 +1\.00 µs +1\n", capsys.readouterr().out)


def test_sectors_that_nobody_asked_for_are_a_dash(capsys):
    row = tour.Row(double_case(bytes=64), "v1", "", error=0.0, moved=rung_counts.Moved(None, 3.75, 96))
    make_console().print(tour.table_of([row], on_gpu=False))
    assert re.search(r" 0 +– / 3\.75 +1\.5×\n", capsys.readouterr().out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_rungs_are_timed_beside_their_fastest_peer():
    look = tour.Look(tour.importlib.import_module("step1_simple"), {}, lambda at: None, print)
    found = tour.timed_rows(look, tour.steps.load_benchmark(tour.steps.STEPS[0]).cases("quick", "cuda")[:1])
    assert [row.name for row in found][:2] == ["v1_chunk", "v2_naive"]
    assert [row.idea for row in found].count("(peer)") == 1
    assert all(row.ms > 0 and row.correct for row in found)
