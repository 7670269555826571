"""The command: what it lists, and how it says no."""

import pathlib
import re
import shlex
import sys
import sysconfig

import pytest

from emulator import command as emulated
from emulator import programs
from kernel_fusion import cli, steps
from kernel_fusion.console import captured
from kernel_fusion.learn import exercises
from kernel_fusion.report import syllabus


def kernel_fusion(*arguments):
    return captured([sys.executable, "-m", "kernel_fusion", *arguments])


def commands() -> dict:
    """Every command's own parser."""
    (subparsers,) = (action for action in cli.make_parser()._actions if hasattr(action, "choices") and action.choices)
    return subparsers.choices


def help_of(command: str, capsys) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_every_command_says_what_it_does_with_examples(capsys):
    assert {"tour", "check", "bench", "profile", "rungs", "simt", "learn", "report", "gpu-check"} <= set(commands())
    for command in commands():
        text = help_of(command, capsys)
        assert f"usage: kernel-fusion {command}" in text
        assert re.search(r"^[A-Z].*\.$", text, re.MULTILINE), "no sentence"
        assert f"\n  kernel-fusion {command}" in text
        assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(("command", "parser"), commands().items())
def test_every_example_is_taken(command, parser):
    examples = re.findall(r"^  kernel-fusion (.*)$", parser.epilog, re.MULTILINE)
    assert examples
    for example in examples:
        options = cli.make_parser().parse_args(shlex.split(example))
        assert options.command == command
        if command == "simt":
            emulated._read_words(options)
        if getattr(options, "op", None):
            for op in [options.op] if isinstance(options.op, str) else options.op:
                known = [rung.name for rung in syllabus.rungs(syllabus.step_of(op), op)]
                assert set(getattr(options, "rung", None) or []) <= set(known)
        for name in getattr(options, "names", []):
            exercises.find(name)


def test_help_names_the_values_of_arguments(capsys):
    assert "step1-simple, step2-attention" in help_of("check", capsys)
    assert "random:SEED" in help_of("simt", capsys)
    bench = " ".join(help_of("bench", capsys).split())
    names = "linear, softmax, attention, softmax_backward, linear_backward, attention_decode, attention_backward"
    assert f"step2-attention: {names};" in bench
    assert "emulated (small enough" in bench
    assert "1_grid_stride, 2_vector_loads" in help_of("learn", capsys)
    for argument in (action for parser in commands().values() for action in parser._actions):
        assert argument.help or argument.dest == "op", argument.dest  # the op's names are below


def test_ops_are_listed_in_the_order_of_the_lesson(capsys):
    forward, backward = syllabus.ops(steps.STEPS[0])[:5], syllabus.ops(steps.STEPS[0])[5:]
    assert forward == ["scale", "gelu", "gelu_scale", "bias_gelu", "bias_dropout_residual"]
    assert backward == ["gelu_backward", "column_sum", "bias_gelu_backward", "bias_dropout_residual_backward"]
    assert cli.main(["rungs"]) == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n{one.folder}: {op}\n") for one in steps.STEPS for op in syllabus.ops(one)]
    assert places == sorted(places)
    assert "changed: how many of them the rung before does not have" in out


def test_rungs_lists_an_op_in_the_order_of_the_lesson_and_what_each_can_implement(capsys):
    assert cli.main(["rungs", "softmax"]) == 0
    out = capsys.readouterr().out
    assert out.index("v1_naive") < out.index("v2_block") < out.index("v3_online")
    assert "a thread a row" in out
    assert "v2_tiled" not in out  # of attention
    assert "\x1b" not in out
    assert cli.main(["rungs", "layer_norm"]) == 0
    out = capsys.readouterr().out
    assert "limits" in out
    assert "width ≤ 8192" in out
    assert "rows ≤ 8·(2³¹−1)" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["rungs", "nothing"], "no step has an op 'nothing'"),
        (["profile", "nothing"], "no step has an op 'nothing'"),
        (["profile", "softmax", "--case", "1", "--dtype", "float32"], "not allowed with"),
        (["bench", "--op", "nothing"], "no step has an op 'nothing'"),
        (["bench", "step1", "--op", "softmax"], "--op softmax: that is an op of step2-attention"),
        (["check", "step9"], "`step` must be one of step1-simple"),
        (["check", "--schedule", "sideways"], "must be forward, reverse or random:SEED, got 'sideways'"),
        (["simt", "missing.cu"], "no such file"),
        (["simt", "--race", "--asan", "missing.cu"], "--race and --asan exclude each other"),
        (["simt", "--race", "missing.cu", "--count"], "--race and --count exclude each other"),
        (["simt", "--trace", "run.json", "missing.cu", "--count"], "--count and --trace exclude each other"),
        (["simt", "--trace", "run.json", "missing.cu", "--threads", "2"], "--trace and --threads exclude each other"),
        (["simt", "missing.cu", "--trace-blocks", "0"], "--trace-blocks needs --trace"),
        (["simt", "--trace-threads", "4-3", "missing.cu"], "must be N or FIRST-LAST, counted from 0, got '4-3'"),
        (["simt", "missing.cu", "--threads", "0"], "must be a number of threads from 1 to 4096, got '0'"),
        (["simt", "--threads", "many", "missing.cu"], "must be a number of threads from 1 to 4096, got 'many'"),
        (
            ["simt", "missing.cu", "--trace-launch", "0"],
            "must be the number of a launch, from 1 to 1000000000, got '0'",
        ),
        (["simt", "missing.cu", "--schedule", "sideways"], "must be forward, reverse or random:SEED, got 'sideways'"),
        (["simt", "missing.cu", "--schedule"], "--schedule: expected one argument"),
        (["gpu-check", "--only", "coffee"], "--only coffee: no task starts so"),
        (["report", "missing.md"], "missing.md"),
        ([], "COMMAND"),
    ],
)
def test_a_bad_argument_ends_with_a_line_and_a_code(arguments, complaint):
    done = kernel_fusion(*arguments)
    assert done.returncode in (1, 2)
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_step_that_is_not_built_is_named_with_the_command(monkeypatch, capsys):
    monkeypatch.setattr(steps, "is_built", lambda step: False)
    for command in ("check", "bench"):
        assert cli.main([command, "step2"]) == 1
        assert "cd step2-attention && python setup.py build_ext --inplace" in capsys.readouterr().err


@pytest.fixture
def recorded(monkeypatch):
    """Commands that would have been run, and their environments."""
    calls = []
    monkeypatch.setattr(cli, "run_shown", lambda command, cwd, env: calls.append((command, cwd, env)))
    monkeypatch.setattr(steps, "is_built", lambda step: True)
    return calls


def test_check_runs_a_steps_tests_in_an_order_of_threads(recorded):
    assert cli.main(["check", "2", "--device", "cpu", "--schedule", "random:7", "-k", "softmax"]) == 0
    ((command, cwd, env),) = recorded
    assert command[1:] == ["-m", "pytest", str(steps.ROOT / "step2-attention"), "-m", "emulated", "-k", "softmax"]
    assert cwd == steps.ROOT
    assert (env["KF_TEST_DEVICES"], env["KF_SIMT_SCHEDULE"]) == ("cpu", "random:7")


def test_bench_of_an_op_runs_its_step_only(recorded):
    assert cli.main(["bench", "--op", "softmax", "--sizes", "cpu", "--merge", "--resume"]) == 0
    ((command, cwd, _),) = recorded
    assert cwd.name == "step2-attention"
    assert command[1:] == ["benchmark.py", "--op=softmax", "--sizes=cpu", "--merge", "--resume"]


def test_bench_gives_each_step_its_own_ops_and_all_rungs(recorded):
    arguments = "--op layer_norm --op softmax --op attention --rung v1_naive --rung v2_block --device cuda"
    assert cli.main(["bench", *arguments.split()]) == 0
    rest = ["--rung=v1_naive", "--rung=v2_block", "--device=cuda"]
    assert [(cwd.name, command[2:]) for command, cwd, _ in recorded] == [
        ("step2-attention", ["--op=softmax", "--op=attention", *rest]),
        ("step3-fused", ["--op=layer_norm", *rest]),
    ]


PROGRAM = r"""
#include <cuda_runtime.h>
#include <cstdio>

__global__ void add(int* sum) { atomicAdd(sum, threadIdx.x); }

int main(int count, char** words) {
  int* sum;
  cudaMalloc(&sum, sizeof(int));
  cudaMemset(sum, 0, sizeof(int));
  add<<<2, 32>>>(sum);
  int result = 0;
  cudaMemcpy(&result, sum, sizeof(int), cudaMemcpyDeviceToHost);
  std::printf("%d %s\n", result, count > 1 ? words[1] : "");
  return result == 992 ? 0 : 1;
}
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A stand-alone CUDA program; what is compiled of it goes into the same temporary folder."""
    path = tmp_path / "program.cu"
    path.write_text(PROGRAM)
    monkeypatch.setattr(programs, "BUILD", tmp_path / "build")
    return path


def test_a_program_is_compiled_once_and_run_with_its_arguments(program, capfd):
    assert cli.main(["simt", str(program), "--hello"]) == 0
    assert capfd.readouterr().out == "992 --hello\n"
    executable = programs.compile_program(program)
    made = executable.stat().st_mtime_ns
    assert programs.compile_program(program).stat().st_mtime_ns == made
    program.write_text(PROGRAM.replace("992", "991"))
    assert cli.main(["simt", str(program)]) == 1
    assert not list(executable.parent.glob("*.tmp"))


def test_a_program_that_does_not_compile_says_where(program, capsys):
    program.write_text(PROGRAM.replace("threadIdx.x", "threadIdx.x + nonsense"))
    assert cli.main(["simt", str(program)]) == 1
    error = capsys.readouterr().err
    assert "program.cu:5" in error
    assert "nonsense" in error


def test_a_program_ended_by_a_signal_gives_the_shells_code_and_a_word(capsys):
    script = pathlib.Path("/bin/sh")
    assert programs.run_program(script, ["-c", "kill -SEGV $$"]) == 128 + 11
    assert capsys.readouterr().err == "sh was ended by SIGSEGV; --gdb stops where it comes\n"
    assert programs.run_program(script, ["-c", "exit 4"]) == 4


def test_the_package_runs_where_it_is_not_installed(tmp_path):
    script = "import sys; sys.path.append(sys.argv.pop(1)); import kernel_fusion.__main__"
    packages = sysconfig.get_path("purelib")  # without what an editable installation adds to the path: -S
    done = captured([sys.executable, "-S", "-c", script, packages, "rungs", "softmax"], tmp_path)
    assert done.returncode == 0, done.stderr
