"""The times that pages state are found there, read as people mean them, and judged by what was measured."""

import sys

import pytest

from kernel_fusion.checks import times
from kernel_fusion.checks.repository import ROOT
from kernel_fusion.console import captured


@pytest.mark.parametrize("stated", times.STATED, ids=lambda stated: f"{stated.page}: {stated.what}")
def test_a_page_states_the_time_once_and_as_one(stated):
    least, most = times.seconds(times.words_of(stated))
    assert 0 < least <= most


@pytest.mark.parametrize("stated", times.STATED, ids=lambda stated: f"{stated.page}: {stated.what}")
def test_what_is_timed_is_there(stated):
    kind, _, rest = stated.what.partition(" ")
    if kind == "python":
        assert f"```bash\n{stated.what}\n```" in (ROOT / stated.page).read_text(encoding="utf-8")
    elif kind not in ("tour", "make", "build"):
        assert [part for part in stated.what.split() if not (ROOT / part).exists()] == []


@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        ("about a minute", 60, 60), ("one to two minutes", 60, 120), ("a quarter of an hour", 900, 900),
        ("about half a minute", 30, 30), ("a quarter of a minute", 15, 15), ("sixteen minutes", 960, 960),
        ("20 seconds", 20, 20), ("half an hour", 1800, 1800), ("about ten minutes", 600, 600),
    ],
)  # fmt: skip
def test_times_are_read(words, least, most):
    assert times.seconds(words) == (least, most)


@pytest.mark.parametrize("words", ["soon", "some minutes", "minutes"])
def test_what_is_no_time_is_refused(words):
    with pytest.raises(ValueError, match=words):
        times.seconds(words)


R = times.REFERENCE_S


@pytest.fixture
def page(monkeypatch):
    """A page that states a time of the tour, of two to three minutes."""
    monkeypatch.setattr(times, "STATED", [times.Stated("a page", "", "tour"), times.Stated("another", "", "tests")])
    monkeypatch.setattr(times, "words_of", lambda stated: "two to three minutes")


@pytest.mark.parametrize(
    ("measured", "yardsticks", "found"),
    [
        (31, [R, R], 0), (539, [R, R], 0), (29, [R, R], 1), (541, [R, R], 1),
        (1070, [2 * R, 2 * R], 0), (59, [2 * R, 2 * R], 1), (16, [R / 2, R / 2], 0),
    ],
)  # fmt: skip
def test_a_time_may_be_off_by_so_much_on_a_machine_as_fast_as_the_yardstick_says(page, measured, yardsticks, found):
    said = times.problems({"tour": measured}, yardsticks)
    assert len(said) == found
    assert all(line.startswith("a page: tour takes two to three minutes, it says, and it took") for line in said)


def test_on_a_busy_machine_nothing_is_judged():
    assert times.why_not([2.0, 2.4]) == ""
    assert times.why_not([2.0, 2.6]) == "the machine was busy: the yardstick took from 2.0 to 2.6 s"


def test_tests_are_added_up_by_folder_and_file():
    by_file = {"step1-simple/test.py": 1.0, "step1-simple/tests/test_x.py": 2.0, "tests/test_y.py": 4.0}
    by_file |= {"emulator/tests/test_z.py": 8.0, "step2-attention/tests/test_decode.py": 16.0}
    assert times.of_tests(by_file) == {
        "step1-simple": 3.0,
        "tests emulator common": 12.0,
        "step2-attention": 16.0,
        "step2-attention/tests/test_decode.py": 16.0,
    }


TOUR = """\
[1/11] build step1-simple, about 30 s … 3 of 53 files, 15 s …
[1/11] build step1-simple, about 30 s … ok, 29 s
[2/11] step1-simple: every rung, checked … ok, 35 s
[4/11] build step2-attention … ok, 2 min 13 s
"""


def test_a_tour_says_how_long_its_builds_took(tmp_path):
    builds = {"build step1-simple": 29, "build step2-attention": 133}
    assert times.of_tour(TOUR, 400) == {"tour": 400, **builds}
    more = "".join(f"[9/11] build {step}, about 9 s … ok, 1.5 s\n" for step in ("step3-fused", "step4-integration"))
    assert times.of_tour(TOUR + more, 400)["build all"] == 29 + 133 + 1.5 + 1.5


@pytest.mark.parametrize(
    ("yardsticks", "code", "said"),
    [(("720", "720"), 1, "README.md: tour takes"), (("720", "1000"), 3, "the machine was busy")],
)
def test_a_tour_is_judged_by_the_yardsticks_of_the_run(tmp_path, yardsticks, code, said):
    (tmp_path / "tour.log").write_text(TOUR)
    command = [sys.executable, "-m", "kernel_fusion.checks.times", str(tmp_path / "tour.log"), "9000", *yardsticks]
    done = captured(command)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr


CONFTEST = """
from kernel_fusion.checks import times
times.STATED = [times.Stated("a page", "", "tests")]
times.yardstick = iter({yardsticks}).__next__
times.words_of = lambda stated: "two hours"
"""


@pytest.mark.parametrize(
    ("yardsticks", "code", "said"),
    [
        ([2.4, 2.4], 1, "times: a page: tests takes two hours, it says, and it took 0 s"),
        ([2.4, 4.8], 0, "times: the machine was busy: the yardstick took from 2.4 to 4.8 s; no stated time is judged"),
    ],
)
def test_a_run_of_the_tests_fails_where_a_page_is_wrong(tmp_path, yardsticks, code, said):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text() + CONFTEST.format(yardsticks=yardsticks))
    done = captured(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--times", "tests"],
        tmp_path,
        CUDA_VISIBLE_DEVICES="",
        PYTEST_XDIST_WORKER_COUNT="",  # which it would take from this test
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    assert "times: tests 0 s" in done.stdout
