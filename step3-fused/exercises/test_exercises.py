"""The exercises and bug hunts of LayerNorm, products, and tiles that wait for others: what is handed out fails as it
should, all solutions pass.
"""

import pathlib
import re
import subprocess

import pytest

from emulator import programs
from kernel_fusion.learn.check import ORDERS, ran
from kernel_fusion.testing.exercise_contract import Exercises

# What each check says before anybody has written anything.
COMPLAINTS = {
    "1_statistics": r"WRONG: width 32, numbers from 0 on: lane 0 of row 0 has mean 0 and variance 0, must be 1\.45",
    "2_two_groups": r"WRONG: columns 0 to 40, 10 a part, numbers from 0 on: mean \S+ and variance 0, must be 2\.2",
    "3_row_gradient": r"WRONG: width 3: dx\[0\]\[0\] is -0\.498464, must be -0\.0107032",
    "4_columns_in_order": r"WRONG: 200 rows of 100: dweight\[\d+\] is \S+ in one order of the blocks and \S+ in",
    "5_register_tile": r"WRONG: right, but 2 reads for each product; 0\.25 are enough",
    "6_epilogue": r"WRONG: right, but h and y were read or written 4 times for each output; two are enough",
    "7_split_depth": r"WRONG: 8 x 500 x 12: y\[\d+\] is \S+ in one order of the blocks and \S+ in another",
    "8_publish": r"WRONG: 16 bands: y\[\d+\]\[\d+\] is -?nan, must be",
    "9_queue": r"\AWRONG: 3 bands: the rows of band 0 come after head 0 of band 2\n",
    "10_next_launch": r"\AWRONG: launch 1 is right, but leaves attended\[0\] at 4\n",
    "hunt_1_one_head": r"one head: right\n.*same numbers: right\n.*of its own: WRONG: y\[0\]\[0\] (.*\n)*Hint: ",
    "hunt_2_far_from_0": r"around 10: right\n(.*\n)*numbers around 1000: WRONG: y\[0\]\[0\] is -1\.58(.*\n)*Hint: ",
    "hunt_3_last_rows": r"\A4 rows: right\n8 rows: right\n\Z",
    "hunt_4_early_counter": r"\AWRONG: block 0: y\[0\]\[0\] is -?nan, must be (.*\n)*Hint: ",
    "hunt_5_few_blocks": r"\A8 blocks: right\n4 blocks: right\n\Z",
    "11_in_fragments": r"WRONG: y\[0\]\[0\] is -?nan, must be",
    "12_across_blocks": r"WRONG: width 2, row 0: block 0 has mean -?nan",
}

# The emulation ends this one: threads of a block are at two barriers.
AT_TWO_BARRIERS = (
    r"kernel column_sums, block \(0,0,0\), thread \(\d+,0,0\): is at __syncthreads \(.*\.cu:(\d+)\), "
    r"but thread \(\d+,0,0\) waits at __syncthreads \(.*\.cu:(\d+)\)\n"
)
# And this one: all three blocks wait for tiles that nobody will draw.
NOBODY_LEFT = (
    r"kernel dataflow, block \([012],0,0\), thread \(0,0,0\): "
    r"polls memory that no thread changes any more; the launch can never end\n"
)

# What no run need show, and the race detector sees: what is taken out of the solution.
RACES = [
    ("8_publish", "  __syncthreads();  // all threads have stored\n"),
    ("8_publish", "  __threadfence();  // whoever sees that the counter grew sees what they stored\n"),
    ("8_publish", "    __threadfence();  // what had been stored before the counter grew is read after it\n"),
    ("8_publish", "  __syncthreads();  // nobody reads before\n"),
]

HERE = pathlib.Path(__file__).resolve().parent
EXERCISES = Exercises(
    HERE,
    COMPLAINTS,
    orders={"hunt_4_early_counter": "reverse"},
    errors={"hunt_3_last_rows": AT_TWO_BARRIERS, "hunt_5_few_blocks": NOBODY_LEFT},
)
DATAFLOW = ("8_publish", "9_queue", "10_next_launch", "hunt_4_early_counter", "hunt_5_few_blocks")


@pytest.mark.parametrize("check", EXERCISES.checks())
def test_exercises(check):
    check()


@pytest.mark.parametrize("order", ORDERS)
def test_the_third_hunt_names_both_barriers(order):
    skeleton = EXERCISES.skeleton(HERE / "solutions" / "hunt_3_last_rows.cu")
    lines = skeleton.read_text(encoding="utf-8").splitlines()
    barriers = {number for number, line in enumerate(lines, start=1) if "__syncthreads()" in line}
    named = re.search(AT_TWO_BARRIERS, ran(skeleton, skeleton, order).stderr)
    assert {int(number) for number in named.groups()} == barriers


def under_the_race_detector(source: pathlib.Path) -> subprocess.CompletedProcess:
    program = programs.compile_program(source, flavour="race")
    return subprocess.run([str(program)], env=programs.run_environment("forward"), capture_output=True, text=True)


@pytest.mark.parametrize(("name", "removed"), RACES)
def test_the_race_detector_sees_what_is_missing(name, removed):
    text = (HERE / "solutions" / f"{name}.cu").read_text(encoding="utf-8")
    assert text.count(removed) == 1
    done = under_the_race_detector(EXERCISES.written(f"race-{RACES.index((name, removed))}", text.replace(removed, "")))
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.match(r"kernel attend_and_normalize: race in global memory\n", done.stderr), done.stderr


@pytest.mark.parametrize("name", DATAFLOW)
def test_the_race_detector_has_nothing_to_say_of_a_solution(name):
    done = under_the_race_detector(HERE / "solutions" / f"{name}.cu")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_the_fourth_hunt_passes_in_the_usual_order_and_the_race_detector_names_its_lines():
    skeleton = EXERCISES.skeleton(HERE / "solutions" / "hunt_4_early_counter.cu")
    assert ran(skeleton, skeleton, "forward").stdout == "all right\n"
    lines = skeleton.read_text(encoding="utf-8").splitlines()
    read, written = (
        next(number for number, line in enumerate(lines, start=1) if text in line)
        for text in ("float x[2] = {attention[", "attention[row * kWidth + c] = ")
    )
    done = under_the_race_detector(skeleton)
    assert done.returncode == 1
    named = r"race in global memory\n.* reads 4 bytes at .*\.cu:(\d+)\n.* wrote them at .*\.cu:(\d+)\n"
    assert [int(line) for line in re.search(named, done.stderr).groups()] == [read, written]
