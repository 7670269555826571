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
}

# Answers that a check must not take: what is replaced in the solution, by what, and what the check says.
WRONG_ANSWERS = [
    ("1_lanes_agree", "float greatest = -INFINITY;\n  for", "float greatest = 0;\n  for", "the greatest is -"),
    ("1_lanes_agree", "away > 0; away /= 2", "away > 1; away /= 2", "lane "),
    ("2_one_pass", "sum = sum * expf(before - greatest) +", "sum = sum +", "must be"),
    ("3_attention_in_one_pass", "mean[d] = mean[d] * factor +", "mean[d] = mean[d] +", "must be"),
    ("3_attention_in_one_pass", "sum = sum * factor + weight;", "sum += weight;", "must be"),
    ("4_swizzle", "(chunk ^ row % 8)", "(chunk ^ row % 4)", "lie in 4 groups of banks, not in 8"),
    ("4_swizzle", "(chunk ^ row % 8)", "(chunk | row % 8)", "outside, or on another one"),
    ("5_merge", "if (greatest == -INFINITY) return a;", "", "nan"),
    ("5_merge", "return {greatest, a.sum * of_a +", "return {greatest, a.sum +", "must be"),
    ("6_softmax_gradient", "delta += y[c] * grad[c];", "delta += grad[c];", "must be"),
    ("6_softmax_gradient", "delta = warp_sum(delta);", "", "must be"),
    ("7_gradient_of_a_query", "weight * (grad_weight - delta[i])", "weight * grad_weight", "must be"),
    ("7_gradient_of_a_query", "sum[d] += kScale * grad_score", "sum[d] += grad_score", "must be"),
    ("8_one_owner", "int i = mine; i < length", "int i = 0; i < length", "is nan, must be"),
    ("8_one_owner", "int i = mine; i < length", "int i = mine + 1; i < length", "must be"),
    ("9_moved_a_little", "loss(x, width, c, -by)) / (2 * by)", "loss(x, width, c, 0)) / by", "must be"),
    ("9_moved_a_little", "by = 1e-5", "by = 1e-9", "must be"),
    ("9_moved_a_little", "by = 1e-5", "by = 1e-3", "must be"),
]

EXERCISES = Exercises(pathlib.Path(__file__).resolve().parent, COMPLAINTS, WRONG_ANSWERS)


@pytest.mark.parametrize("check", EXERCISES.checks())
def test_exercises(check):
    check()
