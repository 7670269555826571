"""The exercises and bug hunts of attention: what is handed out fails as it should, and every solution passes."""

import pathlib

import pytest

from kernel_fusion.testing.exercise_contract import Exercises

# What each check says before anybody has written anything.
COMPLAINTS = {
    "1_lanes_agree": r"WRONG: width 32: lane 0 of row 0 has -2000, the greatest is",
    "2_one_pass": r"WRONG: right, but each number was read 3 times; two are enough",
    "3_attention_in_one_pass": r"WRONG: 33 queries, 33 keys, times 1: out\[0\]\[1\] is 0, must be 0\.5",
    "4_swizzle": r"WRONG: eight chunks of column 0 lie in 1 groups of banks, not in 8",
    "5_merge": r"WRONG: keys 0 to 40, 10 a part, slope 0\.1: \S+, must be",
    "6_softmax_gradient": r"WRONG: width 2: dx\[0\]\[0\] is -0\.0586245, must be -0\.0142265",
    "7_gradient_of_a_query": r"WRONG: 20 queries, 20 keys: dq\[1\]\[0\] is 0, must be -0\.149132",
    "8_one_owner": r"WRONG: length 33: dv\[0\]\[1\] is \S+ in one order and \S+ in another",
    "9_moved_a_little": r"WRONG: width 2: slope\[0\] is -0\.159164540\d+, must be -0\.158684897\d+",
    "hunt_1_cold_rows": r"from 300 on: right\n(.*\n)*numbers from -300 on: WRONG: y\[0\]\[0\] is (.*\n)*Hint: ",
    "hunt_2_last_tile": r"160 keys: right\n17 keys: WRONG: (.*\n)*Hint: ",
    "hunt_3_fast_warps": r"WRONG: 70 rows of 100: (.*\n)*Hint: ",
    "hunt_4_lost_delta": r"40 queries, 100 keys: right\n33 queries, 20 keys: WRONG: (.*\n)*Hint: ",
    "hunt_5_half_a_mask": r"length 2, dv: right\nlength 2, dk: WRONG: (.*\n)*Hint: ",
    "ladder_1_tiled": r"WRONG: 2 heads, 64 queries, 128 keys: out\[0\]\[0\]\[0\] is -?nan, .*; nobody wrote it",
    "ladder_2_any_length": r"WRONG: .*; nobody wrote it",
    "ladder_3_lanes": r"WRONG: .*; nobody wrote it",
    "ladder_4_mma": r"WRONG: out\[0\]\[0\] is -?nan, .*; nobody wrote it",
    "ladder_5_attention_mma": r"WRONG: .*; nobody wrote it",
    "ladder_6_two_stages": r"WRONG: .*; nobody wrote it",
    "ladder_7_tma": r"WRONG: out\[0\]\[0\] is -?nan",
    "ladder_8_wgmma": r"WRONG: .*; nobody wrote it",
    "10_ring": r"WRONG: 1 tiles: the sum of tile 0 is 0, must be",
    "11_three_products": r"WRONG: the largest relative error is \d\.\de-05, must be 5e-7 at most",
}

EXERCISES = Exercises(pathlib.Path(__file__).resolve().parent, COMPLAINTS)


@pytest.mark.parametrize("check", EXERCISES.checks())
def test_exercises(check):
    check()
