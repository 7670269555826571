"""The two ways in: simple_demo.py and tutorial_mega_kernel.py. Both check themselves, so here they are also broken."""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from kernel_fusion import build, testing
from kernel_fusion.console import child_environment

HERE = pathlib.Path(__file__).resolve().parents[1]


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, HERE / "pages" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(script, *arguments):
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True)


# ---- simple_demo.py ----


@pytest.fixture
def demo(monkeypatch):
    """simple_demo as a module, with a clock that takes every way once and says a millisecond."""
    module = loaded("simple_demo")

    def seconds(runs, device, budget=0.0):
        for run in runs:
            run()
        return [module.Seconds(1e-3, 1e-3, 1e-3)] * len(runs)

    monkeypatch.setattr(module, "seconds", seconds)
    return module


def test_the_demo_needs_torch_alone():
    text = (HERE / "pages" / "simple_demo.py").read_text(encoding="utf-8")
    names = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert names - set(sys.stdlib_module_names) == {"torch"}


def test_the_demo_runs_as_a_script():
    done = ran(HERE / "pages" / "simple_demo.py", "--device", "cpu", "--rows", "8", "--width", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines()}
    assert lines["as written"][:6] == ["2", "+", "2", "+", "2", "+"]
    assert [float(lines[way][at]) for way, at in (("as written", 7), ("memory kept", 7), ("by blocks", 3))] == [
        round((9 * 8 * 16 + 16) * 4 / 1e6, 5),
        round((9 * 8 * 16 + 16) * 4 / 1e6, 5),
        round((3 * 8 * 16 + 16) * 4 / 1e6, 5),
    ]
    assert re.search("too noisy to say|gains little or nothing here|3 tensors move instead of 9", done.stdout)
    assert "WRONG" not in done.stdout


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [("1", "1"), ("77", "33"), ("1025", "1000")], ids=str)
def test_every_way_agrees_with_float64(demo, capsys, dtype, size):
    assert demo.main(["--device", "cpu", "--dtype", dtype, "--rows", size[0], "--width", size[1]]) == 0
    assert "by blocks" in capsys.readouterr().out


def test_blocks_of_any_size_give_the_same(demo, monkeypatch):
    x, residual, bias = torch.randn(100, 33), torch.randn(100, 33), torch.randn(33)
    inputs, kept = (x, bias, residual), tuple(torch.full_like(x, float("nan")) for _ in range(4))
    whole = demo.as_written(demo.GELU, inputs)
    for rows in (1, 7, 100, 1000):
        monkeypatch.setattr(demo, "CACHED_BYTES", rows * 33 * 4)
        kept[3].fill_(float("nan"))
        torch.testing.assert_close(demo.by_blocks(demo.GELU, inputs, kept), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fault", ["the last row unwritten", "off by a thousandth"])
def test_a_way_that_is_wrong_is_found(demo, monkeypatch, capsys, fault):
    right = demo.by_blocks

    def wrong(f, inputs, kept):
        if fault == "off by a thousandth":
            return right(f, inputs, kept).mul_(1.001)
        x, bias, residual = inputs
        right(f, (x[:-1], bias, residual[:-1]), tuple(tensor[:-1] for tensor in kept))
        return kept[3]

    monkeypatch.setattr(demo, "by_blocks", wrong)
    assert demo.main(["--device", "cpu", "--rows", "70", "--width", "33"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: by blocks\n" in out
    assert "WRONG: as written" not in out


def test_a_compiler_that_does_not_work_is_said_and_not_the_end(demo, monkeypatch, capsys):
    def compiler(function, **options):
        def run(*arguments):
            raise RuntimeError("no compiler\nand so on")

        return run

    monkeypatch.setattr(demo.torch, "compile", compiler)
    inputs = (torch.ones(2, 3), torch.ones(3), torch.ones(2, 3))
    assert [way.tensors for way in demo.ways("mps", demo.GELU, inputs)] == [9, 9]
    assert capsys.readouterr().out == "torch.compile does not work here, so no way is fused: no compiler\n"
    monkeypatch.setattr(demo.torch, "compile", lambda function, **options: function)
    assert [way.name for way in demo.ways("mps", demo.GELU, inputs)] == ["as written", "memory kept", "torch.compile"]


@pytest.fixture
def stopped_clock(monkeypatch):
    """simple_demo as a module, with a clock that only `calls(name, seconds)` move on; `order` has who was called."""
    module, now, order = loaded("simple_demo"), [0.0], []
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def calls(name, takes):
        def run():
            order.append(name)
            now[0] += takes

        return run

    module.calls, module.order = calls, order
    return module


def test_times_are_of_one_call(stopped_clock):
    short, long = stopped_clock.seconds([stopped_clock.calls("a", 0.002), stopped_clock.calls("b", 0.02)], "cpu", 0.1)
    assert list(short) == pytest.approx([0.002] * 3)
    assert list(long) == pytest.approx([0.02] * 3)


def test_repeats_are_taken_in_turns(stopped_clock):
    stopped_clock.seconds([stopped_clock.calls("a", 0.03), stopped_clock.calls("b", 0.03)], "cpu", 0.1)
    assert "".join(stopped_clock.order) == "ab" * (2 + 5)


def test_a_nan_is_the_largest_difference_wherever_it_is(demo):
    """In each block of rows in turn: what comes after it must not hide it."""
    inputs = (torch.randn(600, 8), torch.randn(8), torch.randn(600, 8))
    for row in (0, 300, 599):
        y = demo.as_written(demo.GELU, inputs)
        y[row, 3] = float("nan")
        difference, allowed = demo.error_against_float64(y, demo.GELU, inputs)
        assert difference != difference
        assert 0 < allowed < 1


def test_a_difference_within_the_repeats_is_called_noise(demo, monkeypatch, capsys):
    seconds = demo.Seconds
    assert seconds(1.0, 0.9, 1.1).against(seconds(1.2, 1.05, 1.3)) == "noise"
    assert seconds(1.0, 0.9, 1.1).against(seconds(1.5, 1.2, 1.6)) == "1.50x"
    assert seconds(1.5, 1.2, 1.6).against(seconds(1.0, 0.9, 1.1)) == "0.67x"
    assert demo.main(["--device", "cpu", "--rows", "70", "--width", "33"]) == 0  # by a clock that says the same of all
    out = capsys.readouterr().out
    assert out.count("noise   ") == 2 * 3  # of each table all ways but the first
    assert "Noise: not even three of four repeats" in out
    assert "Third against second, noise: too noisy to say what fusion gains here; run it again." in out
    assert "little or nothing" not in out
    taken = [seconds(9.0, 8.0, 10.0), seconds(8.0, 7.0, 9.0), seconds(3.0, 2.0, 4.0), seconds(1.0, 1.0, 1.0)]
    monkeypatch.setattr(demo, "seconds", lambda runs, device, budget=0.0: taken[: len(runs)])
    assert demo.main(["--device", "cpu", "--rows", "8", "--width", "33"]) == 0
    out = capsys.readouterr().out
    assert "Second line against first, noise: as much moves" in out
    assert "Third against second, 2.67x: three intermediate results" in out
    taken[2] = seconds(7.5, 6.8, 6.9)
    assert demo.main(["--device", "cpu", "--rows", "8", "--width", "33"]) == 0
    assert "Third against second, 1.07x: fusion gains little or nothing here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--rows", "0"], "--rows must be at least 1, got 0"), (["--width", "-2"], "--width must be at least 1, got -2")],
)
def test_the_demo_refuses(demo, capsys, arguments, complaint):
    with pytest.raises(SystemExit) as left:
        demo.main(arguments)
    assert left.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_demo_refuses_a_device_that_is_not_there(demo, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--device", "cuda"])
    assert "--device cuda: torch" in capsys.readouterr().err


# ---- tutorial_mega_kernel.py ----

SCRIPT = HERE / "pages" / "tutorial_mega_kernel.py"


@pytest.fixture(scope="module")
def tutorial():
    return loaded("tutorial_mega_kernel")


@pytest.fixture(scope="module")
def emulated(tutorial):
    backend = tutorial.compile_for_cpu()
    return lambda *inputs: tutorial.mega_kernel(backend, "cpu", *inputs)


def test_the_tutorial_runs_emulated():
    done = ran(SCRIPT, "--backend", "emulated")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend: emulated" in done.stdout
    assert done.stdout.endswith("all right\n")
    assert done.stdout.count("Error: mega_kernel: ") == 3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("c < width;", "c < width - 1;"),  # an element never written
        pytest.param("+ factor * gelu(x[", "+ gelu(x[", marks=pytest.mark.long),
        pytest.param("+ bias[c])", "+ bias[0])", marks=pytest.mark.long),
        ("mega_kernel<<<rows, ", "mega_kernel<<<1, "),
    ],
)
def test_a_broken_kernel_is_found(tmp_path, right, wrong):
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(right) == 1
    copy = tmp_path / SCRIPT.name
    copy.write_text(text.replace(right, wrong), encoding="utf-8")
    done = ran(copy, "--backend", "emulated")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WRONG" in done.stdout
    assert "all right" not in done.stdout


def test_the_tutorials_kernel_takes_any_shape(emulated):
    for shape in ((), (1,), (5, 0), (0, 5), (2, 3, 257), (300, 2)):
        x, bias, residual = torch.randn(shape or (4,)), torch.randn(shape[-1:] or (4,)), torch.randn(shape or (4,))
        expected = residual + 1.5 * F.gelu(x + bias, approximate="tanh")
        torch.testing.assert_close(emulated(x, bias, residual, 1.5), expected, rtol=2e-6, atol=2e-6)


def test_the_tutorials_kernel_refuses(emulated):
    x, bias = torch.ones(2, 3), torch.ones(3)
    with testing.raises(TypeError, "mega_kernel: `bias` must be float32, got float64"):
        emulated(x, bias.double(), x, 1.0)
    with testing.raises(ValueError, "mega_kernel: `residual` must have shape (2, 3), got (3, 2)"):
        emulated(x, bias, torch.ones(3, 2), 1.0)
    with testing.raises(ValueError, "mega_kernel: `x` must be contiguous, got strides (1, 2)"):
        emulated(torch.ones(3, 2).T, bias, x, 1.0)
    with testing.raises(ValueError, "mega_kernel: `x` must have at least 1 dimension, got 0"):
        emulated(torch.tensor(1.0), bias, x, 1.0)
    with testing.raises(ValueError, "mega_kernel: `x` must be cpu, got meta"):
        emulated(x.to("meta"), bias, x, 1.0)
    with testing.raises(ValueError, "mega_kernel: `bias` must be on the device of `x` (cpu), got meta"):
        emulated(x, bias.to("meta"), x, 1.0)
    with testing.raises(ValueError, "mega_kernel: `bias` requires a gradient, and this kernel has no backward"):
        emulated(x, bias.clone().requires_grad_(), x, 1.0)
    with torch.no_grad():
        emulated(x, bias.clone().requires_grad_(), x, 1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_tutorial_says_why_there_is_no_gpu(tutorial, capsys, monkeypatch):
    assert tutorial.main(["--backend", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("tutorial_mega_kernel: --backend cuda: ")
    found = build.Cuda("/opt/nvcc", pathlib.Path("/opt"), ("9.0a",))
    monkeypatch.setattr(tutorial.build, "find_cuda", lambda: (found, ""))
    assert tutorial.choose("auto") == ("emulated", None, "nvcc is here (/opt/nvcc), but torch sees no GPU")


@pytest.mark.skipif(not torch.cuda.is_available() or build.find_cuda()[0] is None, reason="needs a GPU and nvcc")
def test_the_tutorial_runs_on_a_gpu_in_the_current_stream(tutorial, capsys):
    assert tutorial.main(["--backend", "cuda", "--rows", "64", "--width", "100"]) == 0
    assert "GB/s" in capsys.readouterr().out
    backend = tutorial.compile_for_gpu(build.find_cuda()[0])
    x, bias, residual = (torch.zeros(shape, device="cuda") for shape in ((64, 100), (100,), (64, 100)))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        residual.fill_(3.0)  # a kernel in another stream would run before this and find zeros
        y = tutorial.mega_kernel(backend, "cuda", x, bias, residual, 1.0)
        assert y.tolist() == [[3.0] * 100] * 64
