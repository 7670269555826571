"""The lesson as a notebook: it is lesson.py, is stored with its pictures, and runs in less than a minute."""

import pathlib

import pytest

from kernel_fusion.testing.lesson_contract import Lesson

LESSON = Lesson(
    pathlib.Path(__file__).resolve().parents[1], pictures=4, says=r"^linear_cross_entropy +[\d.]+, +[\d.]+ MB kept$"
)


@pytest.mark.parametrize("check", LESSON.checks())
def test_the_lesson(check):
    check()
