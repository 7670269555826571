"""The exercises and the bug hunts of a model's ops: what is handed out fails as it should; solutions pass, also
under the race detector.
"""

import pathlib

import pytest

from kernel_fusion.learn.check import ran
from kernel_fusion.testing.exercise_contract import Exercises

# What each check says before anybody has written anything.
COMPLAINTS = {
    "1_kv_append": r"\AWRONG: row 0 is at 0 of 1: k_cache\[0\]\[0\]\[0\]\[0\] is 0\.5, must be 0\n",
    "2_left_padding": r"\AWRONG: keys 3 to 7 of 7: out\[1\]\[0\] is -?nan, must be \S+; lse is -?nan, must be ",
    "3_greedy": r"\AWRONG: 1 logits, all 1 but -?nan at 0 and 0: token 1, must be -1\n",
    "4_chunked_loss": r"\AWRONG: 1 logits from -5 on: the gradient of logit 0 of row 0, target 0, is -5, must be 0\n",
    "5_fused_head": r"\AWRONG: 17 rows: 850 floats of scratch at once, must be at most 800, logits of 16 rows\n",
    "hunt_1_stale_graph": r"\Alaunched anew: right\na graph, replayed: WRONG: token 1 is \S+, must be (.*\n)*Hint: ",
    "hunt_2_broken_resume": r"\Astopped after 1 steps: WRONG: the loss of step 1 is \S+, must be (.*\n)*Hint: ",
    "hunt_3_overtaken": r"\AWRONG: in order 0 block 5 warp 0 overwrites what is still to be read \(5, tag 2\)\nHint: ",
}

HERE = pathlib.Path(__file__).resolve().parent
EXERCISES = Exercises(HERE, COMPLAINTS)


@pytest.mark.parametrize("check", EXERCISES.checks())
def test_exercises(check):
    check()


@pytest.mark.parametrize("solution", EXERCISES.solutions, ids=lambda path: path.stem)
def test_the_race_detector_has_nothing_to_say_of_a_solution(solution):
    done = ran(solution, solution, "forward", "race")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_the_race_detector_sees_that_the_targets_logit_is_written_too_early():
    solution = HERE / "solutions" / "4_chunked_loss.cu"
    text, barrier = solution.read_text(encoding="utf-8"), "  __syncwarp();  // nobody writes before"
    assert text.count(barrier) == 1
    done = ran(EXERCISES.written("race", text.replace(barrier, "  //")), solution, "forward", "race")
    assert done.returncode == 1
    assert done.stderr.startswith("kernel cross_entropy: race in global memory\n"), done.stderr
