"""Two measurements of one row are compared, and what differs is said."""

import json

import pytest
import torch

from kernel_fusion import cli, steps
from kernel_fusion.bench import noise, recheck
from kernel_fusion.report import results
from kernel_fusion.tests.test_report import row as report_row

NO_CEILINGS = {"copy_gb_s": {}, "mixed_gb_s": {}, "matmul_tflop_s": None}


def row(impl: str, ms: float = 0.1, **more) -> dict:
    return report_row(impl, ms, **more)


def pair(first_us: float, again_us: float) -> recheck.Pair:
    return recheck.Pair(row("eager", kind="peer", ms=first_us / 1e3), again_us / 1e3)


@pytest.mark.parametrize(
    ("first_us", "again_us", "differs"),
    [(100, 104, False), (100, 106, True), (106, 100, True), (10, 10.9, False), (10, 11.1, True), (4.9, 4.0, False),
     (4.0, 40, False), (19, 21, True), (34.8, 9.3, True)],
)  # fmt: skip
def test_more_apart_than_allowed_for_its_length_differs(first_us, again_us, differs):
    assert pair(first_us, again_us).differs == differs


@pytest.fixture
def files(tmp_path):
    """Two results files with three rows each, and the command that compares them."""
    rows = [row("v1", ms=0.1), row("torch eager", kind="peer", ms=0.1), row("triton", kind="peer", ms=0.05)]
    environment = {"gpu": "NVIDIA H200"}
    one, other = tmp_path / "one.json", tmp_path / "other.json"

    def compare(*changed, options=()):
        results.write(results.Results(one, environment, NO_CEILINGS, rows))
        results.write(results.Results(other, environment, NO_CEILINGS, [*changed]))
        return cli.main(["recheck", str(one), "--against", str(other), *options])

    compare.rows = rows
    return compare


def test_two_files_that_agree(files, capsys):
    assert files(*files.rows) == 0
    assert "from 20.0 µs, 5% allowed: 2 rows, at most 0.0% apart" in capsys.readouterr().out


def test_a_row_that_differs_fails_and_is_named(files, capsys, tmp_path):
    compiled = row("triton", kind="peer", ms=0.06)
    output = tmp_path / "both.json"
    assert files(files.rows[1], compiled, options=["--output", str(output)]) == 1
    out = capsys.readouterr().out
    assert "triton" in out
    assert "20.0%" in out
    assert "1 of 2 rows differ" in out
    assert [r["again_ms"] for r in json.loads(output.read_text())["rows"]] == [0.1, 0.06]


def test_rungs_are_compared_when_asked(files, capsys):
    slower = row("v1", ms=0.2)
    assert files(slower, *files.rows[1:]) == 0
    assert files(slower, *files.rows[1:], options=["--rungs"]) == 1
    assert files(slower, *files.rows[1:], options=["--impl", "v1"]) == 1
    assert files(slower, *files.rows[1:], options=["--impl", "none"]) == 1
    assert "no row to compare" in capsys.readouterr().err
    assert files(options=["--rungs"]) == 1
    assert "no row stands in both" in capsys.readouterr().err


def test_only_the_machine_that_was_measured_can_be_measured_again(tmp_path, capsys):
    path = tmp_path / "h900.json"
    results.write(results.Results(path, {"gpu": "NVIDIA H900"}, NO_CEILINGS, [row("triton", kind="peer")]))
    assert cli.main(["recheck", str(path)]) == 1
    assert "was measured on NVIDIA H900" in capsys.readouterr().err


def test_what_was_measured_is_kept_where_the_rest_is_not(tmp_path, monkeypatch, capsys):
    """A step's results on "this machine", of whose rows the second is never measured."""
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    step = steps.find("step1")
    rows = [row("torch eager", kind="peer", ms=0.1), row("triton", kind="peer", ms=0.05)]
    path, output = step.path / "cpu.json", tmp_path / "both.json"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    results.write(results.Results(path, {"gpu": gpu}, NO_CEILINGS, rows))

    def interrupted(of, size, wanted):
        assert (of, size, wanted) == (step, "full", rows)
        yield wanted[0], noise.Spread(0.2, 0.2, 0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(recheck, "measure_alone", interrupted)
    assert cli.main(["recheck", str(path), "--output", str(output)]) == 130
    assert [r["again_ms"] for r in json.loads(output.read_text())["rows"]] == [0.2]
    assert "100 µs, alone 200 µs" in capsys.readouterr().out


def test_the_best_of_torch_compile_is_kept(tmp_path, monkeypatch, capsys):
    """And of nobody else: only torch.compile chooses anew each time."""
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    peer = {"kind": "peer", "ms": 0.1, "bytes": 10_000_000, "flops": 200_000_000, "percent_of_ceiling": None}
    peer |= {"gb_s": 100.0, "tflop_s": 2.0}
    faster, slower = ({"rows": 1, "width": width} for width in (8, 9))
    rows = [
        row("torch.compile", **{**peer, "shape": faster}),
        row("torch.compile", **{**peer, "shape": slower}),
        row("torch eager", **{**peer, "shape": faster}),
    ]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    path = steps.find("step1").path / "cpu.json"
    results.write(results.Results(path, {"gpu": gpu}, NO_CEILINGS, rows))
    times = [noise.Spread(0.08, 0.07, 0.09), noise.Spread(0.2, 0.2, 0.2), noise.Spread(0.08, 0.07, 0.09)]
    monkeypatch.setattr(recheck, "measure_alone", lambda of, size, wanted: zip(wanted, times, strict=True))
    assert cli.main(["recheck", str(path)]) == 1
    assert results.read(path).rows == rows
    assert cli.main(["recheck", str(path), "--best"]) == 1
    best = results.read(path).rows
    assert best[1:] == rows[1:]
    changed = {"ms": 0.08, "ms_quartiles": [0.07, 0.09], "gb_s": 125.0, "tflop_s": 2.5}
    assert set(best[0].pop("again")) == {"commit", "date"}
    assert best[0] == {**rows[0], **changed}
    assert cli.main(["recheck", str(path), "--best", "--against", str(path)]) == 1
    assert "with --against nothing is" in capsys.readouterr().err


def test_a_process_measures_a_case_and_torch_compile_has_one_of_its_own():
    one, other = ({"rows": 1, "width": width} for width in (8, 9))
    rows = [row(impl, kind="peer", shape=shape) for shape in (one, other) for impl in ("a", "torch.compile", "b")]
    assert recheck.together(rows) == [[rows[0], rows[2]], [rows[1]], [rows[3], rows[5]], [rows[4]]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures sizes of a CPU")
@pytest.mark.slow
def test_each_case_is_measured_in_a_process_of_its_own():
    step = steps.find("step1")
    shape = {"rows": 4096, "width": 768}
    wanted = [
        row("cpu", op="bias_gelu", shape=shape, dtype="float32"),
        row("torch eager", op="bias_gelu", kind="peer", shape=shape, dtype="float32"),
        row("no such rung", op="bias_gelu", shape=shape, dtype="float32"),
    ]
    found = list(recheck.measure_alone(step, "cpu", wanted))
    assert [one for one, _ in found] == wanted
    assert all(isinstance(again, noise.Spread) and 0 < again.median < 10_000 for _, again in found[:2])
    assert "no such rung" in found[2][1]
    unknown = row("cpu", op="bias_gelu", shape={"rows": 1, "width": 1}, dtype="float32")
    with pytest.raises(recheck.UserError, match="has no case bias_gelu rows 1, width 1, float32 any more"):
        list(recheck.measure_alone(step, "cpu", [unknown]))
