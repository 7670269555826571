"""The tour says what it shows, names what fails, and goes on where it can. Run whole, on steps that are fakes."""

import re
import sys

import pytest
import torch

from kernel_fusion.bench import measuring, rung_counts
from kernel_fusion.console import make_console
from kernel_fusion.learn import tour
from kernel_fusion.tests.fake_repository import BUILDS, FakeRepository
from kernel_fusion.tests.test_interruptions import SLEEPS, interrupt
from kernel_fusion.tests.test_profile import double_case

WAITS = """
import time

def waits(x, rung):
    time.sleep(rung == "v1_good")
    return testing_step.double(x, rung=rung)
"""


def toured(repository: FakeRepository, *options: str, code: int = 0) -> str:
    """All that a tour says."""
    done = repository.python("-m", "kernel_fusion", "tour", *options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def shown(repository: FakeRepository, *options: str, code: int = 0) -> str:
    """All that the part of the tour says that shows step 1, once built."""
    build = repository.python("-c", "import os; os.chdir('step1-fake'); exec(open('setup.py').read())")
    assert build.returncode == 0
    done = repository.python("-m", "kernel_fusion.learn.tour", "--step", "1", *options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def repository(tmp_path):
    return FakeRepository(tmp_path, 1)


def test_a_tour_shows_every_rung_and_ends_with_0(repository):
    out = toured(repository)
    assert re.match(r"Python 3\.\d+\.\d+, torch ", out)
    assert re.search(r"That takes about 2 minutes on 2 cores\. (.|\n)* tour --full", out)
    assert "[1/5] build step1-fake … ok" in out
    assert re.search(r"\[3/5\] a fault that the emulation finds\nrace: found\n.*ok", out)
    assert "How to double a number." in out
    assert re.search(r"^double +v1_good +a sum +0 +\S+ +32 / 4 +4×$", out, re.MULTILINE)
    assert re.search(r"^ +v2_good +a product +0 +\S+ +32 / 4 +4×$", out, re.MULTILINE)
    assert re.search(r"^ +refuses +– +– +– +–$", out, re.MULTILINE)
    assert re.search(r"^Not run: double refuses \(takes nothing\)$", out, re.MULTILINE)
    assert re.search(
        r"^Plain C\+\+ on \d+ cores, in brackets PyTorch, .* noise: double [\d.e-]+ \([\d.e-]+\)$", out, re.M
    )
    assert "patched: no difference" in out
    assert "trained" in out
    assert "\nNext: " in out
    assert "failed" not in out.lower()
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", out), "control characters in piped output"


def test_the_plan_counts_what_is_not_built(monkeypatch):
    assert list(tour.BUILD_SECONDS) == [step.folder for step in tour.steps.STEPS]
    monkeypatch.setattr(tour.steps, "is_built", lambda step: False)
    whole = re.search(r"about (\d+) minutes", tour.plan(False, tour.stops()))
    monkeypatch.setattr(tour.steps, "is_built", lambda step: True)
    rest = re.search(r"about (\d+) minutes", tour.plan(False, tour.stops()))
    assert (int(whole[1]) - int(rest[1])) * 60 == pytest.approx(sum(tour.BUILD_SECONDS.values()), abs=60)
    assert "about 1 minute on 2 cores" in tour.plan(False, tour.stops()[-1:])


@pytest.mark.long
def test_a_full_tour_shows_a_table_for_each_case_with_times(repository):
    out = toured(repository, "--full")
    assert "size 'emulated' on the CPU" in out
    assert re.search(r"v1_good +│ +0\.0e\+00 │ +0 │ .*(µs|ms|s) │ .*right", out)
    assert "torch eager (peer)" in out
    assert "to count" not in out


def test_what_cannot_be_counted_is_said_and_fails_nothing(repository):
    repository.counting(why_not="counting needs g++, and c++ is clang")
    out = shown(repository)
    assert "not counted: counting needs g++, and c++ is clang" in out
    assert re.search(r"^double +v1_good +a sum +0 +\S+ +– +–$", out, re.MULTILINE)


def test_what_fails_is_named_and_the_rest_is_shown(tmp_path):
    repository = FakeRepository(tmp_path, 4)
    repository.step("step1-fake", build="raise SystemExit('no compiler here')")
    repository.step("step2-fake", run="lambda x, rung: x * 3")
    repository.step("step3-fake", before="import os\nos.abort()\n")
    done = repository.python("-m", "kernel_fusion", "tour")
    out = done.stdout
    assert done.returncode == 1
    assert "[1/11] build step1-fake … FAILED" in out
    assert "no compiler here" in out
    assert "step1-fake: every rung, checked … not run: step1-fake is not built" in out
    assert re.search(r"v1_good +a sum +\S+ WRONG +\S+ +32 / 4", out)
    assert "double: n 64, float32: v1_good is WRONG: " in out
    assert "was ended by SIGABRT" in out
    assert out.count("How to double a number.") == 2  # of step2, whose results are wrong, and of step4
    assert re.search(r"\[9/11\] step4-fake: .* … ok", out)
    assert (tmp_path / "build" / "tour" / "next").read_text() == "step1-fake"  # where the next one begins
    assert out.splitlines()[-3:] == [
        "failed: build step1-fake",
        "failed: step2-fake: every rung, checked",
        "failed: step3-fake: every rung, checked",
    ]


def test_a_build_and_a_rung_that_say_nothing_are_not_silent(repository):
    source = repository.root / "emulator" / "console.py"
    quick = re.sub(r"^(SLOW|SILENT)_S = .*", r"\1_S = 0.1", source.read_text(), flags=re.MULTILINE)
    source.write_text(quick)
    repository.step("step1-fake", build=f"import time\n{BUILDS}time.sleep(1)\n", run="waits", before=WAITS)
    out = toured(repository)
    assert len(re.findall(r"build step1-fake … 2 of 2 files, [\d.]+ s …\n", out)) > 2
    assert len(re.findall(r"step1-fake … double v1_good, [\d.]+ s …\n", out)) > 2


def test_steps_are_shown_before_the_next_is_built_and_an_interrupted_tour_goes_on_where_it_was(tmp_path):
    repository, marker = FakeRepository(tmp_path, 3), tmp_path / "at-work"
    repository.step("step2-fake", before=SLEEPS.format(marker=str(marker)))
    words = [sys.executable, "-m", "kernel_fusion", "tour"]
    out = interrupt(words, marker, "; make tour goes on at step2-fake", cwd=tmp_path, env=repository.environment())
    places = [out.index(words) for words in ("build step1", "How to double", "race: found", "build step2")]
    assert places == sorted(places)
    assert "build step3" not in out
    repository.step("step2-fake")
    out = toured(repository)
    assert "It goes on at step2-fake. From the start: kernel-fusion tour --from step1-fake" in out
    assert "[4/9] build step2-fake … ok" in out
    assert "step1-fake:" not in out
    assert out.count("How to double a number.") == 2
    assert not (tmp_path / "build" / "tour" / "next").exists()  # so that the next tour is whole


def test_a_tour_begins_where_it_is_told_or_was_interrupted_or_at_its_beginning(tmp_path):
    first, _, third, _ = tour.steps.STEPS
    state = tmp_path / "next"
    assert tour.stops_ahead(None, state) == tour.stops()
    assert tour.stops()[:3] == ["step1-simple", "race", "step2-attention"]
    state.write_text("train_small_gpt2")
    assert tour.stops_ahead(None, state) == ["train_small_gpt2"]
    assert tour.stops_ahead(first, state) == tour.stops()
    assert tour.stops_ahead(third, state) == tour.stops()[3:]
    state.write_text("what an older tour had")
    assert tour.stops_ahead(None, state) == tour.stops()


def test_a_result_that_is_never_written_is_wrong(repository):
    repository.step("step1-fake", run="lambda x, rung: torch.empty_like(x)")
    assert re.search(r"v2_good +a product +inf WRONG", shown(repository, code=1))


def test_plain_cpp_and_a_demonstration_that_are_wrong_fail_the_tour(repository):
    repository.step("step1-fake", run="lambda x, rung: x * (3 if rung == 'cpu' else 2)")
    repository.demonstrations(train="raise AssertionError('the bigram model is better')")
    out = toured(repository, code=1)
    assert "step1-fake: 1 wrong results, marked above" in out
    assert "the bigram model is better" in out
    assert "patched: no difference" in out
    assert "\nfailed: step1-fake: every rung, checked\nfailed: a small GPT-2 trained on this repository's docu" in out


@pytest.mark.long
def test_a_library_from_before_is_not_shown_where_the_build_fails(repository):
    assert "How to double" in shown(repository)
    repository.step("step1-fake", build="raise SystemExit(1)")
    assert "How to double" not in toured(repository, code=1)


def test_rungs_that_one_reason_holds_back_are_named_together():
    listed = rows(a=2, b=2)
    for row, why in zip(
        listed, ("takes dropout_p = 0 only", "", "runs on GPUs only", "takes dropout_p = 0 only"), strict=True
    ):
        row.refusal = why
    assert tour.refusals(listed) == "Not run: a v0, b v1 (takes dropout_p = 0 only); b v0 (runs on GPUs only)"
    assert tour.refusals(rows(a=1)) == ""


# ---- the table ----


def test_a_rung_that_draws_is_judged_by_what_was_right_for_its_draw(capsys):
    case = double_case(
        run=lambda x, rung: 2 * x + 1,
        peer_reference={"v1": lambda outputs, x: 2 * x + 1},
    )
    inputs = case.inputs("cpu")
    for name, correct in (("v1", True), ("v2", False)):
        row = tour.Row(case, name, "an idea")
        tour.check(row, inputs, measuring.Tolerance(case, inputs), print)
        assert row.correct == correct
        assert row.allowed == pytest.approx(1e-5 * (2 * inputs[0]).abs().max().item())
    assert "v2 is WRONG" in capsys.readouterr().out


def test_of_several_outputs_the_one_that_is_most_off_is_shown_with_what_it_may_be():
    case = double_case(peers={}, reference=lambda x: (x, 100 * x))
    x = torch.ones(4)
    tolerance = measuring.Tolerance(case, (x,))
    assert tolerance.check((x + 1e-6, 100 * x + 1e-4)) == (pytest.approx(1e-4, rel=0.1), pytest.approx(1e-3), True)
    assert tolerance.check((x + 1e-4, 100 * x + 2e-4)) == (pytest.approx(2e-4, rel=0.1), pytest.approx(1e-3), False)


def rows(**counts: int) -> list[tour.Row]:
    """So many rungs of each op."""
    return [
        tour.Row(double_case(op=op), f"v{number}", "an idea") for op, count in counts.items() for number in range(count)
    ]


def names(found: list[tour.Row]) -> list[str]:
    return [f"{row.case.op} {row.name}" for row in found]


def test_a_table_that_fits_is_shown_whole_of_a_longer_one_later_ops_show_their_last_rung():
    assert len(tour.on_a_screen(rows(a=3, b=3), 6)) == 6
    assert names(tour.on_a_screen(rows(a=3, b=4, c=2), 6)) == ["a v0", "a v1", "a v2", "b v3", "c v0", "c v1"]
    assert names(tour.on_a_screen(rows(a=9, b=9), 6)) == ["a v8", "b v8"]
    ladder = ["b v0", "b v1", "b v2"]
    assert names(tour.on_a_screen(rows(a=4, b=3, c=1, d=2), 6)) == ["a v3", *ladder, "c v0", "d v1"]
    assert names(tour.on_a_screen(rows(a=4, b=3, c=2, d=2, e=2, f=2), 6)) == ["a v3", *ladder, "c v1", "d v1"]


def test_of_a_longer_one_a_last_rung_that_did_not_run_gives_way():
    listed = rows(a=3, b=3)
    for row in listed[:5]:
        row.error = 0.0
    assert names(tour.on_a_screen(listed, 2)) == ["a v2", "b v1"]


def test_of_a_longer_one_the_last_rung_of_the_first_reading_is_shown():
    listed = rows(a=3, b=3)
    for row in listed:
        row.error = 0.0
    listed[2].is_first_reading = listed[4].is_first_reading = listed[5].is_first_reading = False
    assert names(tour.on_a_screen(listed, 2)) == ["a v1", "b v0"]
    listed[3].error = None
    assert names(tour.on_a_screen(listed, 3)) == ["a v0", "a v1", "b v2"]
    listed = rows(a=9, b=9)
    for row in listed[12:]:
        row.is_first_reading = False
    assert names(tour.on_a_screen(listed, 6)) == ["a v8", "b v0", "b v1", "b v2"]


def test_a_rung_that_is_wrong_is_always_shown():
    listed = rows(a=3, b=4)
    listed[4].correct = False
    assert names(tour.on_a_screen(listed, 4)) == ["a v0", "a v1", "a v2", "b v1", "b v3"]


def test_on_a_gpu_the_table_has_times_else_what_was_counted(capsys):
    row = tour.Row(double_case(bytes=1000), "v1", "[an idea]", error=1.5e-7, allowed=2e-6, ms=0.001)
    make_console().print(tour.table_of([row], on_gpu=True))
    assert re.search(r"double +v1 +\[an idea\] +1\.5e-07 +2\.0e-06 +1\.00 µs +1\n", capsys.readouterr().out)
    row.moved = rung_counts.Moved(None, 3.75, 1500, 0.0)  # nobody asked for a load
    make_console().print(tour.table_of([row], on_gpu=False))
    assert re.search(r" 1\.5e-07 +2\.0e-06 +– / 3\.75 +1\.5×\n", capsys.readouterr().out)
    row.case = double_case(bytes=1000, dtype=torch.bfloat16)
    make_console().print(tour.table_of([row], on_gpu=False))
    assert re.search(r"^double bfloat16 +v1 ", capsys.readouterr().out, re.MULTILINE)


def test_the_first_ladder_is_drawn_by_its_loads_or_its_times():
    listed = rows(a=1, b=3)
    assert tour.picture(listed) == ""
    for row, ms in zip(listed[1:], (1.0, 0.5, 0.001), strict=True):
        row.ms = ms
    assert tour.picture(listed) == f"The time of b:\nv0 {'█' * 60}\nv1 {'█' * 30}\nv2 █\n"
    listed[1].moved, listed[2].moved = rung_counts.Moved(32.0, 4.0, 1, 1 / 8), rung_counts.Moved(4.2, None, 1, 2.0)
    assert tour.picture(listed).endswith(f" are used:\nv0 {'▏' * 32}\nv1 ████\n")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_rungs_are_timed_beside_their_fastest_peer():
    look = tour.Look(tour.importlib.import_module("step1_simple"), {}, set(), lambda at: None, print)
    found = tour.timed_rows(look, tour.steps.load_benchmark(tour.steps.STEPS[0]).cases("quick", "cuda")[:1])
    assert [row.name for row in found][:2] == ["v1_chunk", "v2_naive"]
    assert [row.idea for row in found].count("(peer)") == 1
    assert all(row.ms > 0 and row.correct for row in found)
