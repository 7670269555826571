"""The exercises and bug hunts: what is handed out fails as it should, and every solution passes."""

import pathlib
import re
import subprocess

import pytest

from kernel_fusion import exercises, simt, stages

HERE = pathlib.Path(__file__).resolve().parent
SOLUTIONS = sorted((HERE / "solutions").glob("*.cu"))
ORDERS = ("forward", "reverse", "random:1")

# What the check of each exercise says before anybody has written anything.
COMPLAINTS = {
    "1_grid_stride": r"WRONG: n = 1, 1 blocks of 32 threads: out\[0\] is -?nan, must be -1250; nobody wrote it",
    "2_vector_loads": r"WRONG: 0 calls of load4 and store4, must be 2",
    "3_fuse": r"WRONG: the results are right, but it took 3 launches; one is enough",
    "4_dropout_backward": r"WRONG: n = 1, p = 0\.1, blocks of 32: dx\[0\] is 1, must be 0: the forward dropped this",
    "5_column_sum": r"WRONG: 63 rows of 33: the sum of column 0 is \S+, must be",
    "hunt_1_some_sizes": r"n = +1003: right\n(.*\n)*n = +1026: WRONG: 2 elements(.*\n)*Hint: ",
    "hunt_2_some_orders": r"WRONG: 1 rows of 31: row 0, column \d+ is -?nan, must be 0\.\d+\nHint: ",
    "hunt_3_other_launch": r"16 of 128: right\n(.*\n)*.* 4 of 256: WRONG: element \d+ gave (.*\n)*Hint: ",
}


def ran(source: pathlib.Path, order: str) -> subprocess.CompletedProcess:
    """The program compiled for the CPU, and run with its threads in this order."""
    program = simt.compile_program(source)
    environment = simt.run_environment(order)  # as `kernel-fusion simt` does
    return subprocess.run([str(program)], env=environment, capture_output=True, text=True)


def written(name: str, text: str) -> pathlib.Path:
    """A program of this text in the build folder, touched only where it changes, so that it is compiled once."""
    path = stages.ROOT / "build" / "exercises-tested" / f"{HERE.parent.name}-{name}.cu"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return path


def handed_out(solution: pathlib.Path) -> pathlib.Path:
    """The skeleton as it is cut now."""
    return written(solution.stem, exercises.cut(solution))


def named(path: pathlib.Path) -> str:
    return path.stem


@pytest.mark.parametrize("solution", SOLUTIONS, ids=named)
def test_what_is_handed_out_fails_and_says_where(solution):
    order = "random:1" if solution.stem == "hunt_2_some_orders" else "forward"
    done = ran(handed_out(solution), order)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(COMPLAINTS[solution.stem], done.stdout), done.stdout
    assert "all right" not in done.stdout
    assert done.stderr == ""


def test_the_second_hunt_passes_in_order_and_only_there():
    skeleton = handed_out(HERE / "solutions" / "hunt_2_some_orders.cu")
    codes = {order: ran(skeleton, order).returncode for order in ORDERS}
    assert codes == {"forward": 0, "reverse": 1, "random:1": 1}


@pytest.mark.parametrize("solution", SOLUTIONS, ids=named)
def test_the_solution_passes_in_every_order(solution):
    outputs = set()
    for order in ORDERS:
        done = ran(solution, order)
        assert done.returncode == 0, f"{order}: {done.stdout}{done.stderr}"
        assert done.stdout.endswith("all right\n")
        assert done.stderr == ""
        outputs.add(done.stdout)
    assert len(outputs) == 1  # the fifth prints the bits of its sums


def test_every_skeleton_is_what_its_solution_gives():
    """Who changes a solution runs `kernel-fusion exercises --cut`. Readers work on copies, in exercises/mine."""
    assert [path.name for path in exercises.stale() if path.parent.parent == HERE] == []
    assert sorted(path.name for path in HERE.glob("*.cu")) == [path.name for path in SOLUTIONS]


def test_the_readme_names_every_exercise_once_as_a_heading():
    headings = re.findall(r"^### \[(\w+)\.cu\]\((\w+)\.cu\): .+ · \d+ minutes$", (HERE / "README.md").read_text(), re.M)
    assert [title for title, _ in headings] == [path.stem for path in SOLUTIONS] == [link for _, link in headings]
    assert set(COMPLAINTS) == {path.stem for path in SOLUTIONS}


@pytest.mark.parametrize(
    "path", [*SOLUTIONS, *sorted(HERE.glob("*.cu"))], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_an_exercise_is_short_and_stands_alone(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert [name for name in re.findall(r"#include [<\"](.+?)[>\"]", text) if "/" in name] == []
    assert f"kernel-fusion simt exercises/{path.name}" in text


# Answers that a check must not take: what is replaced in the solution, and by what.
WRONG_ANSWERS = [
    ("1_grid_stride", "i < n; i +=", "i < n - 1; i +=", "nobody wrote it"),
    ("1_grid_stride", "i < n; i +=", "i <= n; i +=", "was written, past the end"),
    ("2_vector_loads", "thread < head", "thread <= head", "WRONG"),
    ("4_dropout_backward", "philox(seed, i / 8)", "philox(seed, blockIdx.x)", "dx["),
    ("5_column_sum", "  wait_for_all();\n", "", "the sum of column"),
    ("5_column_sum", "  wait_for_all();\n", "  __syncthreads();\n", "threads 0 came to wait_for_all"),
    (
        "5_column_sum",
        "  __shared__ float sums",
        "  if (column >= columns) return;\n  __shared__ float sums",
        "63 rows of 33: the sums are right, but of 1024 threads 528 came to wait_for_all",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG_ANSWERS)))
def test_a_wrong_answer_is_not_taken(number):
    name, right, wrong, complaint = WRONG_ANSWERS[number]
    text = (HERE / "solutions" / f"{name}.cu").read_text(encoding="utf-8")
    assert text.count(right) == 1
    done = ran(written(f"wrong-{number}", text.replace(right, wrong)), "random:1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert complaint in done.stdout
