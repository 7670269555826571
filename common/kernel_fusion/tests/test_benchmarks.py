"""A benchmark's results have their form, are merged row by row, and a run that was cut off goes on."""

import json
import pathlib

import pytest
import torch

from kernel_fusion import steps
from kernel_fusion.bench import benchmarks, ceilings, results_file
from kernel_fusion.report import results
from kernel_fusion.tests.fake_step import double_case


def run_main(*arguments, cases=lambda size, device: [double_case()]):
    with pytest.raises(SystemExit) as left:
        benchmarks.main("fake_step", cases, ["--device", "cpu", *map(str, arguments)])
    return left.value.code


def test_a_run_writes_the_results_in_their_form_and_leaves_nothing_beside(quick, tmp_path, capsys):
    path = tmp_path / "results" / "here.json"
    assert run_main("--output", path) == 0
    written = json.loads(path.read_text())
    assert list(written) == ["environment", "ceilings", "rows"]
    assert list(written["environment"]) == ["gpu", "driver", "cuda", "torch", "python", "commit", "date"]
    assert written["environment"]["gpu"] is None
    assert {"256", "1024"} == set(written["ceilings"]["copy_gb_s"])
    assert written["ceilings"]["matmul_tflop_s"] > 0
    assert len(written["rows"]) == 2 + 3  # size cpu: plain C++ and the peer; size emulated: three rungs
    assert [p.name for p in path.parent.iterdir()] == ["here.json"]
    out = capsys.readouterr().out
    assert "double: rows 4, width 8, float32" in out
    assert "\x1b" not in out


def test_a_run_on_the_cpu_writes_no_results_unasked(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    assert run_main("--sizes", "cpu") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_gpus_results_are_written_by_a_whole_run_and_by_a_merge(measured, monkeypatch):
    loaded, before = results.read(measured), measured.read_text()
    known = {"copy_gb_s": {}, "mixed_gb_s": {}, "matmul_tflop_s": None}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(results_file, "environment", lambda device: {**loaded.environment, "commit": "new"})
    monkeypatch.setattr(results_file, "path_of", lambda step, device: measured)
    monkeypatch.setattr(benchmarks, "measure", lambda *of: (loaded.of("double"), known))
    for arguments, writes in {
        "": True,
        "--op double --merge": True,
        "--op double --rung v1_good --merge": True,
        "--op double": False,
        "--rung v1_good": False,
        "--no-peers": False,
        "--sizes quick": False,
        "--no-save": False,
    }.items():
        measured.write_text(before)
        assert run_main("--device", "cuda", *arguments.split()) == 0
        assert (measured.read_text() != before) == writes, arguments


def test_rungs_can_be_named_and_an_unknown_one_is_an_error(quick, capsys):
    assert run_main("--sizes", "emulated", "--op", "double", "--rung", "v2_good") == 0
    out = capsys.readouterr().out
    assert "v2_good" in out
    assert "v1_good" not in out
    assert run_main("--sizes", "emulated", "--rung", "v2_good", "--rung", "v1_good") == 0
    out = capsys.readouterr().out
    assert "v1_good" in out
    assert "v2_good" in out
    assert "torch eager" not in out
    said = run_main("--rung", "v1_good", "--rung", "v9")
    assert "no rung 'v9' here; there are cpu, refuses, v1_good, v2_good" in said
    assert "no op 'triple' at these sizes; there are double" in run_main("--op", "double", "--op", "triple")


def test_a_wrong_rung_makes_the_command_fail(quick):
    case = double_case(run=lambda x, rung: x * 3)
    assert run_main("--sizes", "emulated", cases=lambda size, device: [case]) == 1


def test_where_git_is_missing_the_commit_is_what_the_runner_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KF_COMMIT", "abc123")
    assert results_file.environment(torch.device("cpu"))["commit"] == "abc123"
    monkeypatch.delenv("KF_COMMIT")
    assert results_file.environment(torch.device("cpu"))["commit"] is None


def test_git_is_believed_before_the_runner(monkeypatch, tmp_path):
    git = tmp_path / "git"
    git.write_text('#!/bin/sh\ntest "$1" = rev-parse && echo 0123456789ab\nexit 0\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("KF_COMMIT", "abc123")
    assert results_file.environment(torch.device("cpu"))["commit"] == "0123456789ab"


@pytest.fixture
def measured(quick, tmp_path, monkeypatch):
    """A results file of the ops `double`, in two cases, and `softmax`; measured at commit "old"."""
    monkeypatch.setattr(results_file, "_commit", lambda: "old")
    path = tmp_path / "here.json"
    assert run_main("--output", path, cases=lambda size, device: [double_case(), soft_case()]) == 0
    monkeypatch.setattr(results_file, "_commit", lambda: "new")
    return path


def soft_case():
    return double_case(
        op="softmax", run=lambda x, rung: torch.softmax(x, -1), reference=lambda x: torch.softmax(x, -1), peers={}
    )


def merge(path, *arguments, cases=lambda size, device: [double_case(shape={"rows": 4, "width": 9}), soft_case()]):
    return run_main("--merge", "--output", path, *arguments, cases=cases)


def test_merging_replaces_an_ops_rows_and_keeps_the_others(measured):
    before = json.loads(measured.read_text())
    before["ceilings"]["copy_gb_s"]["77"] = 7.7
    measured.write_text(json.dumps(before))
    assert merge(measured, "--op", "double") == 0
    after = json.loads(measured.read_text())
    softmaxes = ([row for row in whose["rows"] if row["op"] == "softmax"] for whose in (before, after))
    assert next(softmaxes) == next(softmaxes)
    doubles = [row for row in after["rows"] if row["op"] == "double"]
    assert {row["shape"]["width"] for row in doubles} == {9}
    assert after["rows"][: len(doubles)] == doubles  # where they stood before
    assert after["environment"]["commit"] == "old"
    assert after["environment"]["ops"] == {"double": {"commit": "new", "date": before["environment"]["date"]}}
    assert list(after["ceilings"]["copy_gb_s"]) == ["77", "256", "1024"]
    assert after["ceilings"]["matmul_tflop_s"] == before["ceilings"]["matmul_tflop_s"]
    assert merge(measured, "--op", "softmax") == 0
    assert set(json.loads(measured.read_text())["environment"]["ops"]) == {"double", "softmax"}


def both(size, device):
    """The cases of `measured`, the kernels' own only."""
    return [double_case(), soft_case()] if size == "emulated" else []


def test_merging_a_rung_changes_its_row_and_no_other(measured):
    assert run_main("--output", measured, cases=both) == 0  # at commit "new"
    before = measured.read_text().splitlines()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(results_file, "_commit", lambda: "newer")
        patched.setattr(ceilings, "memory_rate", lambda size, device, mix: 1234.56)
        assert merge(measured, "--op", "double", "--rung", "v2_good", cases=both) == 0
    after = measured.read_text().splitlines()
    ((was, now),) = [(one, other) for one, other in zip(before, after, strict=True) if one != other]
    old, new = (json.loads(line.strip(" ,")) for line in (was, now))
    assert results.key({**results.derived(old), **old}) == results.key({**results.derived(new), **new})
    assert (new["impl"], new["ceiling"], new["run"]["commit"]) == ("v2_good", 1235, "newer")
    loaded = results.read(measured)
    assert loaded.environment_of("double")["commit"] == "new"
    assert merge(measured, "--op", "double", "--rung", "cpu", "--rung", "v1_good", cases=both) == 0
    assert [row["impl"] for row in results.read(measured).rows if "run" in row] == ["v2_good"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(results_file, "_commit", lambda: "newest")
        assert merge(measured, "--op", "double", "--rung", "cpu", "--rung", "v1_good", cases=both) == 0
    loaded = results.read(measured)
    assert loaded.environment_of("double")["commit"] == "newest"
    assert {row["impl"]: row["run"]["commit"] for row in loaded.rows if "run" in row} == {"v2_good": "newer"}
    assert merge(measured, "--op", "double", cases=both) == 0  # all of one run again
    assert not [row for row in results.read(measured).rows if "run" in row]


def test_a_row_that_cannot_be_measured_any_more_is_dropped(measured, monkeypatch, capsys):
    assert run_main("--output", measured, cases=both) == 0
    loaded = results.read(measured)
    (v1,) = [row for row in loaded.of("double") if row["impl"] == "v1_good"]
    gone = [{**v1, "impl": "v0_gone"}, {**v1, "shape": {"rows": 9}}, {**v1, "impl": "refuses"}]
    elsewhere = {**v1, "impl": "not installed here", "kind": "peer"}
    other = {**v1, "impl": "v0_gone", "op": "softmax"}
    results.write(loaded._replace(rows=[*loaded.rows, *gone, elsewhere, other]))
    capsys.readouterr()
    assert merge(measured, "--op", "double", "--rung", "v1_good", cases=both) == 0
    out = capsys.readouterr().out
    assert "rows dropped, since they cannot be measured any more: 1 of double, v0_gone\n" in out
    assert "any more: 1 of double, v1_good\n" in out
    names = [(row["op"], row["impl"]) for row in results.read(measured).rows]
    assert ("double", "refuses") in names  # was not asked
    assert len(names) == len(loaded.rows) + 3
    assert {("double", "not installed here"), ("softmax", "v0_gone")} <= set(names)
    monkeypatch.setattr(results_file, "_commit", lambda: "newer")
    assert merge(measured, "--op", "double", cases=both) == 0
    assert "any more: 1 of double, refuses\n" in capsys.readouterr().out
    loaded = results.read(measured)
    run = {row["impl"]: row["run"]["commit"] for row in loaded.of("double") if "run" in row}
    assert run == dict.fromkeys(("cpu", "v1_good", "v2_good"), "newer")
    assert loaded.environment_of("double")["commit"] == "new"  # as of the row that stayed


COUNTED = {"dram_bytes": 264, "sectors_per_request": {"load": 4.0, "store": 4.0}, "profile": {"commit": "older"}}


def test_hardware_counters_stay_when_times_are_measured_again(measured):
    def counted():
        return [row for row in results.read(measured).rows if row["dram_bytes"] is not None]

    assert run_main("--output", measured, cases=both) == 0
    first = json.loads(measured.read_text())
    first["rows"][0].update(COUNTED)
    measured.write_text(json.dumps(first))
    assert run_main("--output", measured, cases=both) == 0
    (row,) = counted()
    assert (row["op"], row["impl"]) == (first["rows"][0]["op"], first["rows"][0]["impl"])
    assert {name: row[name] for name in COUNTED} == COUNTED
    assert merge(measured, "--op", "double", cases=both) == 0
    assert [one["impl"] for one in counted()] == [row["impl"]]

    other = json.loads(measured.read_text())
    other["environment"]["driver"] = "another"
    measured.write_text(json.dumps(other))
    assert run_main("--output", measured, cases=both) == 0
    assert counted() == []


@pytest.mark.parametrize("key", ["gpu", "driver", "cuda", "torch"])
def test_figures_of_another_environment_are_not_merged(measured, key, capsys):
    other = json.loads(measured.read_text())
    other["environment"][key] = "another"
    measured.write_text(json.dumps(other))
    before = measured.read_text()
    complaint = merge(measured, "--op", "double")
    assert f"was measured with {key} another" in complaint
    assert measured.read_text() == before
    assert "v1_good" not in capsys.readouterr().out  # found before anything was measured


def test_merging_needs_a_file_and_an_op(measured, tmp_path, capsys):
    assert "run the benchmark without --op first" in merge(tmp_path / "none.json", "--op", "double")
    for arguments in ([], ["--rung", "v1_good"], ["--op", "double", "--sizes", "cpu"]):
        assert merge(measured, *arguments) == 2
        assert "--merge goes with --op" in capsys.readouterr().err
    assert run_main("--merge", "--op", "double") == 2
    assert "--merge on a CPU needs --output" in capsys.readouterr().err


def cut_off(path: pathlib.Path, monkeypatch) -> dict:
    """A run that ends in its second case. Returns what it kept."""

    def ends(step, case, device, **more):
        if case.shape["width"] == 9:
            raise KeyboardInterrupt
        return run_case(step, case, device, **more)

    run_case = benchmarks.run_case
    with monkeypatch.context() as patched:
        patched.setattr(benchmarks, "run_case", ends)
        with pytest.raises(KeyboardInterrupt):
            benchmarks.main("fake_step", two_cases, ["--device", "cpu", "--output", str(path)])
    assert not path.exists()
    return json.loads(pathlib.Path(f"{path}.partial").read_text())


def two_cases(size, device):
    return [double_case(), double_case(shape={"rows": 4, "width": 9})] if size == "emulated" else []


def resume(path: pathlib.Path):
    return run_main("--output", path, "--resume", cases=two_cases)


def test_what_was_measured_before_a_run_was_cut_off_is_kept_and_not_measured_again(
    quick, tmp_path, monkeypatch, capsys
):
    path = tmp_path / "h200.json"
    kept = cut_off(path, monkeypatch)
    ((title, rows),) = kept["cases"].items()
    assert title == "emulated: double: rows 4, width 8, float32"
    for row in rows:
        row["ms"] = 77.0
    kept["ceilings"]["copy_gb_s"] = dict.fromkeys(kept["ceilings"]["copy_gb_s"], 5.5)
    pathlib.Path(f"{path}.partial").write_text(json.dumps(kept))
    capsys.readouterr()
    assert resume(path) == 0
    assert "double: rows 4, width 8, float32: measured before" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert [row["ms"] == 77.0 for row in written["rows"]] == [True] * len(rows) + [False] * len(rows)
    assert set(kept["ceilings"]["copy_gb_s"].items()) <= set(written["ceilings"]["copy_gb_s"].items())
    assert [p.name for p in tmp_path.iterdir()] == ["h200.json"]


def test_a_run_that_does_not_resume_measures_everything(quick, tmp_path, monkeypatch, capsys):
    path = tmp_path / "h200.json"
    cut_off(path, monkeypatch)
    assert run_main("--output", path) == 0
    assert "measured before" not in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["h200.json"]


def test_with_nothing_to_go_on_from_a_run_begins_at_the_first_case(quick, tmp_path):
    assert resume(tmp_path / "h200.json") == 0
    assert len(json.loads((tmp_path / "h200.json").read_text())["rows"]) > 0


@pytest.mark.parametrize("key", ["gpu", "driver", "cuda", "torch", "commit"])
def test_a_run_elsewhere_is_not_gone_on_with(quick, tmp_path, monkeypatch, key, capsys):
    path = tmp_path / "h200.json"
    kept = cut_off(path, monkeypatch)
    kept["environment"][key] = "another"
    pathlib.Path(f"{path}.partial").write_text(json.dumps(kept))
    assert f"was measured with {key} another" in resume(path)
    assert not path.exists()
    assert json.loads(pathlib.Path(f"{path}.partial").read_text()) == kept


def test_resuming_needs_a_file_and_no_damaged_one(quick, tmp_path, capsys):
    (tmp_path / "h200.json.partial").write_text('{"environment": {}')
    assert "h200.json.partial is damaged" in resume(tmp_path / "h200.json")
    assert run_main("--resume") == 2
    assert "--resume goes with a run that writes results" in capsys.readouterr().err


def test_results_files_are_named_after_the_gpu():
    names = ["NVIDIA H200", "NVIDIA GeForce RTX 4090", "Tesla V100-SXM2-16GB", "NVIDIA H100 80GB HBM3"]
    assert [*map(results_file.gpu_slug, names)] == ["h200", "rtx-4090", "v100-sxm2-16gb", "h100-80gb-hbm3"]
