"""The tour says what it shows, names what fails, and goes on where it can. Run whole, on stages that are fakes."""

import re

import pytest

from kernel_fusion.tests.fake_repository import FakeRepository

pytestmark = pytest.mark.timeout(120)


def test_a_tour_shows_every_rung_and_ends_with_0(tmp_path):
    done = FakeRepository(tmp_path, 1).python("-m", "kernel_fusion", "tour", "--seconds", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert re.match(r"Python 3\.\d+\.\d+, torch ", out)
    assert "[1/4] build step1-fake … ok" in out
    assert "How to double a number." in out
    assert "size 'emulated' on the CPU" in out
    assert re.search(r"v1_good +│ +0\.0e\+00 │ +0 │ .*(µs|ms|s) │ .*right", out)
    assert "torch eager (peer)" in out
    assert "patched: no difference" in out
    assert "trained for at most 7 s" in out
    assert "failed" not in out.lower()
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", out), "control characters in piped output"


def test_what_fails_is_named_and_the_rest_is_shown(tmp_path):
    repository = FakeRepository(tmp_path, 4)
    repository.stage("step1-fake", build="raise SystemExit('no compiler here')")
    repository.stage("step2-fake", run="lambda x, rung: x * 3")
    repository.stage("step3-fake", before="import os\nos.abort()\n")
    done = repository.python("-m", "kernel_fusion", "tour")
    out = done.stdout
    assert done.returncode == 1
    assert "[1/10] build step1-fake … FAILED" in out
    assert "no compiler here" in out
    assert "step1-fake: every rung, checked and timed … not run: step1-fake is not built" in out
    assert "WRONG" in out
    assert "was ended by SIGABRT" in out
    assert out.count("How to double a number.") == 2  # of step2, whose results are wrong, and of step4
    assert re.search(r"\[8/10\] step4-fake: .* … ok", out)
    assert out.splitlines()[-3:] == [
        "failed: build step1-fake",
        "failed: step2-fake: every rung, checked and timed",
        "failed: step3-fake: every rung, checked and timed",
    ]


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
    repository.python("-m", "kernel_fusion.tour", "--stage", "1")
    build = repository.python("-c", "import os; os.chdir('step1-fake'); exec(open('setup.py').read())")
    assert build.returncode == 0
    repository.stage("step1-fake", build="raise SystemExit(1)")
    done = repository.python("-m", "kernel_fusion", "tour")
    assert done.returncode == 1
    assert "How to double" not in done.stdout
