"""The exercises and bug hunts: what is handed out fails as it should, and every solution passes."""

import pathlib

import pytest

from kernel_fusion.learn.check import ORDERS, ran
from kernel_fusion.testing.exercise_contract import Exercises

# What each check says before anybody has written anything.
COMPLAINTS = {
    "1_grid_stride": r"WRONG: n = 1, 1 blocks of 32 threads: out\[0\] is -?nan, must be -1250; nobody wrote it",
    "2_vector_loads": r"WRONG: 0 calls of load4 and store4, must be 2",
    "3_fuse": r"WRONG: the results are right, but it took 3 launches; one is enough",
    "4_dropout_backward": r"WRONG: n = 1, p = 0\.1, blocks of 32: dx\[0\] is 1, must be 0: the forward",
    "5_column_sum": r"WRONG: 63 rows of 33: the sum of column 0 is \S+, must be",
    "hunt_1_some_sizes": r"n = +1003: right\n(.*\n)*n = +1026: WRONG: 2 elements(.*\n)*Hint: ",
    "hunt_2_some_orders": r"WRONG: 1 rows of 31: row 0, column \d+ is -?nan, must be 0\.\d+\nHint: ",
    "hunt_3_other_launch": r"16 of 128: right\n(.*\n)*.* 4 of 256: WRONG: element \d+ gave (.*\n)*Hint: ",
    "6_async_copy": r"WRONG: the results are right, but \d+ waits left nothing on its way",
    "7_bulk_copy": r"WRONG: 1 rows, 1 blocks: y\[0\]\[0\] is -?nan, must be 255",
}

HERE = pathlib.Path(__file__).resolve().parent
EXERCISES = Exercises(HERE, COMPLAINTS, orders={"hunt_2_some_orders": "random:1"})


@pytest.mark.parametrize("check", EXERCISES.checks())
def test_exercises(check):
    check()


def test_the_second_hunt_passes_in_order_and_only_there():
    skeleton = EXERCISES.skeleton(HERE / "solutions" / "hunt_2_some_orders.cu")
    codes = {order: ran(skeleton, skeleton, order).returncode for order in ORDERS}
    assert codes == {"forward": 0, "reverse": 1, "random:1": 1}
