"""Tasks resume where sources are the same, and a tool that refuses is not taken for a pass."""

import json

import pytest
import torch

from kernel_fusion import cli, steps, testing
from kernel_fusion.bench import gpu_check
from kernel_fusion.console import CommandFailed, Refused, make_console

MEMCHECK_CLEAN = "exercised 12 rungs\n========= ERROR SUMMARY: 0 errors\n"
RACECHECK_CLEAN = "exercised 12 rungs\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"


def judge(tmp_path, tool, text, code=0):
    log = tmp_path / "log"
    log.write_text(f"========= COMPUTE-SANITIZER\n{text}")
    gpu_check.judge_sanitizer(tool, log, CommandFailed(["compute-sanitizer"], code, log) if code else None)


def test_a_clean_run_of_the_sanitizer_passes(tmp_path):
    judge(tmp_path, "memcheck", MEMCHECK_CLEAN)
    judge(tmp_path, "racecheck", RACECHECK_CLEAN)


REFUSAL = "========= Error: Device not supported. Please refer to the documentation\n"
WRITE = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 1 error\n"


@pytest.mark.parametrize(
    ("tool", "text", "code", "error", "complaint"),
    [
        ("memcheck", REFUSAL, 255, Refused, "Device not supported"),
        ("racecheck", REFUSAL, 0, Refused, "Device not supported"),
        ("memcheck", WRITE, 99, CommandFailed, "code 99"),
        ("memcheck", MEMCHECK_CLEAN.replace("0 errors", "3 errors"), 0, AssertionError, "3 error"),
        ("memcheck", "exercised 12 rungs\n", 0, AssertionError, "no summary"),
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", 0, AssertionError, "no rung ran"),
        ("memcheck", MEMCHECK_CLEAN.replace("12", "0"), 0, AssertionError, "no rung ran"),
        ("racecheck", RACECHECK_CLEAN.replace("0 hazards", "2 hazards"), 0, AssertionError, "2 hazard"),
        ("racecheck", MEMCHECK_CLEAN, 0, AssertionError, "no summary"),
        ("memcheck", "Traceback: Device not supported by this op\n", 1, CommandFailed, "code 1"),  # by the program
    ],
)
def test_a_refusal_is_not_run_and_anything_else_a_failure(tmp_path, tool, text, code, error, complaint):
    with testing.raises(error, complaint):
        judge(tmp_path, tool, text, code)


def test_a_missing_sanitizer_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *args, **kwargs: None)
    with testing.raises(Refused, "compute-sanitizer is not installed"):
        gpu_check._sanitize("memcheck", steps.STEPS[0], tmp_path / "log")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Two steps with a source file each, and tasks that write down that they ran."""
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    one, two = steps.Step("step1-a", "step1_a", "test.py"), steps.Step("step2-b", "step2_b", "test.py")
    for step in (one, two):
        step.path.mkdir()
        (step.path / "kernel.cu").write_text("// " + step.folder)
    (tmp_path / "common").mkdir()
    ran = []

    def task(name, depends, error=None):
        def run(log):
            ran.append(name)
            if error:
                raise error

        return gpu_check.Task(name, depends, run)

    return task, one, two, ran


def run(tasks, **options):
    return gpu_check.run(tasks, make_console(), **options)


def test_steps_that_passed_are_not_repeated_until_their_sources_change(repository, capsys):
    task, one, two, ran = repository
    tasks = [task("test-step1-a", (one,)), task("test-step2-b", (one, two))]
    assert run(tasks) == 0
    assert run(tasks) == 0
    assert ran == ["test-step1-a", "test-step2-b"]
    assert "ok before" in capsys.readouterr().out

    (two.path / "kernel.cu").write_text("// changed")
    (two.path / "build").mkdir()
    (two.path / "build" / "made.cpp").write_text("made by the build, no source")
    assert run(tasks) == 0
    assert ran[2:] == ["test-step2-b"]
    (steps.ROOT / "common" / "launch.h").write_text("")
    assert run(tasks) == 0
    assert ran[3:] == ["test-step1-a", "test-step2-b"]
    assert run(tasks, fresh=True) == 0
    assert len(ran) == 7


def test_failures_and_refusals_are_remembered_as_such_and_run_again(repository, capsys):
    task, one, _, ran = repository
    tasks = [
        task("test-step1-a", (one,), ValueError("broken")),
        task("memcheck-step1-a", (one,), Refused("no sanitizer")),
        task("bench-step1-a", (one,)),
    ]
    assert run(tasks) == 1
    out = capsys.readouterr().out
    assert "[1/3] test-step1-a … FAILED" in out
    assert "[2/3] memcheck-step1-a … not run: no sanitizer" in out
    assert "[3/3] bench-step1-a … ok" in out
    state = json.loads((gpu_check.folder() / "state.json").read_text())
    assert [entry["outcome"] for entry in state.values()] == ["failed", "not run", "ok"]
    run(tasks)
    assert ran[3:] == ["test-step1-a", "memcheck-step1-a"]
    gpu_check.show_list(tasks)
    listed = capsys.readouterr().out
    assert "failed, " in listed
    assert "not run, " in listed


def test_an_interrupted_step_is_not_taken_for_done(repository):
    task, one, _, ran = repository
    with pytest.raises(KeyboardInterrupt):
        run([task("test-step1-a", (one,), KeyboardInterrupt())])
    assert run([task("test-step1-a", (one,))]) == 0
    assert ran == ["test-step1-a", "test-step1-a"]


def test_what_needs_a_build_that_failed_is_not_run(repository, capsys):
    task, one, two, ran = repository
    tasks = [
        task("build-step1-a", (one,), ValueError("no nvcc")),
        task("test-step1-a", (one,)),
        task("test-step2-b", (one, two)),
    ]
    assert run(tasks) == 1
    assert ran == ["build-step1-a"]
    assert "[3/3] test-step2-b … not run: build-step1-a failed" in capsys.readouterr().out


def test_a_build_that_passed_but_lies_nowhere_is_repeated(repository):
    task, one, _, ran = repository
    tasks = [task("build-step1-a", (one,))]
    run(tasks)
    run(tasks)  # steps.is_built is False: the library has been removed
    assert ran == ["build-step1-a", "build-step1-a"]


def test_only_chooses_by_the_beginning_of_the_name():
    tasks = gpu_check.all_tasks()
    assert [s.name for s in gpu_check.chosen(tasks, ["memcheck-step2", "test-common"])] == [
        "test-common",
        "memcheck-step2-attention",
    ]
    assert gpu_check.chosen(tasks, []) == tasks
    with testing.raises(gpu_check.UserError, "--only coffee"):
        gpu_check.chosen(tasks, ["coffee"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert cli.main(["gpu-check"]) == 1
    assert "needs a GPU" in capsys.readouterr().err
