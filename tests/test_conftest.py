"""What conftest.py adds to pytest: which tests run."""

from repository import pytest


def collected(*arguments: str) -> list[str]:
    """The tests that pytest would run."""
    done = pytest("--collect-only", "-q", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_shares_are_all_tests_and_none_twice():
    shares = [collected(f"--share={which}/3", "tests/test_make.py") for which in (1, 2, 3)]
    assert all(shares)
    assert sorted(sum(shares, [])) == sorted(collected("tests/test_make.py"))


def test_a_sample_is_at_most_so_many_of_a_file():
    every, sample = (collected(*options, "tests/test_make.py") for options in ((), ("--sample=4",)))
    assert 2 <= len(sample) <= 4 < len(every)
    assert set(sample) < set(every)


def test_a_share_that_is_none_is_refused():
    done = pytest("--share=4/3")
    assert done.returncode == 4
    assert "--share: invalid share value: '4/3'" in done.stderr


def test_cases_that_a_condition_leaves_out_are_not_collected():
    tests = collected("step2-attention/test_attention.py::test_gradient_of_attention")  # float64, 3 columns
    assert any("v1_naive" in test for test in tests)
    assert not any("v2_tiled" in test or "v3_mma" in test for test in tests)
