"""Results files have their form, and wrong results are called wrong."""

import itertools
import json
import pathlib
import types

import pytest
import torch

from kernel_fusion import steps, testing
from kernel_fusion.bench import benchmarks, ceilings
from kernel_fusion.console import UserError
from kernel_fusion.report import results
from kernel_fusion.tests.fake_step import step


def double_case(**more):
    options = {
        "op": "double",
        "shape": {"rows": 4, "width": 8},
        "dtype": torch.float32,
        "inputs": lambda device: (testing.randn((4, 8), torch.float32, device),),
        "run": step.double,
        "reference": lambda x: x * 2,
        "bytes": 256,
        "flops": 32,
        "peers": {"torch eager": lambda x: x * 2},
    }
    return benchmarks.Case(**{**options, **more})


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(benchmarks, "BUDGET_S", 0.01)
    monkeypatch.delenv("KF_BENCHMARK_SECONDS", raising=False)
    monkeypatch.setattr(benchmarks, "COPY_BYTES", {"cpu": [1024], "cuda": [1 << 20]})
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", {"cpu": 64, "cuda": 1024})
    monkeypatch.setattr(steps, "find", lambda name: steps.Step("fake", "fake_step", "test.py"))


def test_rows_have_exactly_the_fields_of_a_results_file(quick):
    rows = [m.row for m in benchmarks.run_case(step, double_case(), torch.device("cpu"), say=lambda text: None)]
    assert [(row["impl"], row["kind"]) for row in rows] == [
        ("cpu", "rung"),
        ("v1_good", "rung"),
        ("v2_good", "rung"),
        ("torch eager", "peer"),
    ]
    assert list(rows[0]) == [
        *("op", "pass", "impl", "kind", "dtype", "shape", "ms", "ms_quartiles", "host_bound", "bound"),
        *("ceiling", "bytes", "flops", "gb_s", "tflop_s"),
        *("percent_of_ceiling", "dram_bytes", "sectors_per_request", "correct"),
    ]
    row = rows[0]
    assert (row["op"], row["pass"], row["dtype"], row["shape"]) == (
        "double",
        "forward",
        "float32",
        {"rows": 4, "width": 8},
    )
    assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6, rel=1e-3)
    assert all(row["correct"] for row in rows)


def test_a_rung_that_refuses_has_no_row_and_its_reason_is_said(quick):
    said = []
    benchmarks.run_case(step, double_case(), torch.device("cpu"), say=said.append)
    assert [line for line in said if "rung 'refuses' not run: double: rung 'refuses' takes nothing" in line]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("no such head_dim\nat line 7"), "no such head_dim"),
        (ImportError("no libcute"), "no libcute"),
        (AssertionError(), "AssertionError()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_peer_that_raises_has_no_row_and_its_reason_is_said(error, reason, quick):
    def raises(x):
        raise error

    said = []
    peers = {"torch eager": lambda x: x * 2, "theirs": raises}
    measured = benchmarks.run_case(step, double_case(peers=peers), torch.device("cpu"), say=said.append)
    assert [m.row["impl"] for m in measured if m.row["kind"] == "peer"] == ["torch eager"]
    assert [line for line in said if line.endswith(f"peer 'theirs' not run: {reason}")]


def test_what_is_installed_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "kf_outer" / "inner").mkdir(parents=True)
    (tmp_path / "kf_outer" / "inner" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert benchmarks.installed("kf_outer.inner")
    assert not benchmarks.installed("kf_outer.other")
    assert not benchmarks.installed("kf_none.inner")


def test_an_error_that_is_no_refusal_is_not_swallowed(quick):
    def broken(x, rung):
        raise RuntimeError("out of memory")

    with testing.raises(RuntimeError, "out of memory"):
        benchmarks.run_case(step, double_case(run=broken), torch.device("cpu"))


@pytest.mark.parametrize("rung", ["off_by_a_percent", "nan"])
@pytest.mark.parametrize("peers", [{"torch eager": lambda x: x * 2}, {}])
def test_a_wrong_result_is_called_wrong(quick, rung, peers):
    said = []
    case = double_case(peers=peers)
    (found,) = benchmarks.run_case(step, case, torch.device("cpu"), rungs=[rung], peers=False, say=said.append)
    assert found.row["correct"] is False
    assert "WRONG" in said[0]


def test_correctness_is_checked_on_what_the_timed_calls_gave(quick):
    calls = itertools.count()

    def wrong_later(x, rung):
        return x * 2 if next(calls) < 2 else x

    (found,) = benchmarks.run_case(
        step, double_case(run=wrong_later), torch.device("cpu"), rungs=["cpu"], peers=False, say=lambda text: None
    )
    assert found.row["correct"] is False


def test_a_rung_that_writes_nothing_finds_no_earlier_right_result(quick):
    def into_cache(cache, x, rung):
        return cache.copy_(x) if rung == "v1_good" else cache

    def allocated(x, rung):
        out = torch.empty_like(x)
        return torch.mul(x, 2, out=out) if rung == "v1_good" else out

    inputs = {"inputs": lambda device: (torch.zeros(4096), torch.ones(4096))}
    for case in (
        double_case(run=into_cache, reference=lambda cache, x: x, peers={}, **inputs),
        double_case(run=into_cache, reference=lambda cache, x: x, peers={}, clock="call", **inputs),
        double_case(run=allocated, inputs=lambda device: (torch.ones(4096),)),
        double_case(run=allocated, inputs=lambda device: (torch.ones(4096),), clock="call"),
    ):
        rungs = ["v1_good", "v2_good"]
        found = benchmarks.run_case(step, case, torch.device("cpu"), rungs=rungs, peers=False, say=lambda text: None)
        assert [m.row["correct"] for m in found] == [True, False]


def test_arithmetic_is_held_against_the_matmul_ceiling(quick):
    ceilings = benchmarks.Ceilings(torch.device("cpu"))
    case = double_case(bound="arithmetic", flops=10**6)
    (found,) = benchmarks.run_case(step, case, torch.device("cpu"), rungs=["cpu"], peers=False, ceilings=ceilings)
    assert found.row["percent_of_ceiling"] == pytest.approx(
        100 * found.row["tflop_s"] / ceilings.as_json()["matmul_tflop_s"], rel=0.01
    )
    assert ceilings.as_json()["copy_gb_s"] == {}


def test_a_case_that_means_nothing_is_refused():
    for name, value in (("bound", "luck"), ("direction", "sideways"), ("clock", "sundial"), ("written", 257)):
        with testing.raises(ValueError, f"Case: `{name}` must be", str(value)):
            double_case(**{name: value})


def test_memorys_ceiling_is_that_of_the_bytes_and_of_what_is_written(quick, monkeypatch):
    asked = []
    monkeypatch.setattr(ceilings, "memory_rate", lambda size, device, mix: asked.append((size, mix)) or 1e9)
    for written in (None, 0):
        case = double_case(written=written)
        benchmarks.run_case(step, case, torch.device("cpu"), rungs=["cpu"], peers=False)
    assert asked == [(256, "1:1"), (256, "1:0")]


def test_a_share_that_says_nothing_is_left_out(quick, monkeypatch):
    monkeypatch.setattr(ceilings.Ceilings, "memory", lambda self, size, written: None)
    (found,) = benchmarks.run_case(step, double_case(), torch.device("cpu"), rungs=["cpu"], peers=False)
    assert found.row["percent_of_ceiling"] is None
    assert benchmarks.percent(found.row) == ""
    benchmarks.case_table("no share", [found.row])


def test_a_row_that_shows_the_host_is_marked(quick):
    (found,) = benchmarks.run_case(step, double_case(), torch.device("cpu"), rungs=["cpu"], peers=False)
    assert found.row["host_bound"] is False
    low, high = found.row["ms_quartiles"]
    assert low <= found.row["ms"] <= high
    table = benchmarks.case_table("marked", [{**found.row, "host_bound": True}])
    assert "†" in next(iter(table.columns[2].cells))
    assert "launching" in table.caption


def test_a_whole_call_is_timed_by_the_callers_clock(quick, monkeypatch):
    calls = []
    measure = benchmarks.clock.measure_call
    monkeypatch.setattr(benchmarks.clock, "measure_call", lambda *args: calls.append(args) or measure(*args))
    for clock, count in (("kernels", 0), ("call", 1 + benchmarks.ROUNDS)):
        case = double_case(clock=clock)
        benchmarks.run_case(step, case, torch.device("cpu"), rungs=["cpu"], peers=False)
        assert len(calls) == count


class Machine:
    """A clock of its own, and two implementations of `double` that take 10 and 20 ms of it where nothing disturbs them.

    `slower` says how much slower a call is. It gets the seconds since the start, how many turns the implementation had
    before this one, and whether the call is the first of its turn.
    """

    def __init__(self, monkeypatch, slower):
        self.ns, self.slower, self.turns = 0, slower, []
        own = types.SimpleNamespace(perf_counter=lambda: self.ns / 1e9, perf_counter_ns=lambda: self.ns)
        for module in (benchmarks, benchmarks.clock):
            monkeypatch.setattr(module, "time", own)
        monkeypatch.setattr(ceilings.Ceilings, "memory", lambda self, size, written: None)

    def double(self, x, rung, ms):
        first = self.turns[-1:] != [rung]
        self.turns += [rung] * first
        self.ns += int(ms * 1e6 * self.slower(self.ns / 1e9, self.turns.count(rung) - 1, first))
        return x * 2

    def measure(self, budget_s=1.0):
        """The milliseconds of both, and their quartiles."""
        case = double_case(
            run=lambda x, rung: self.double(x, rung, 10),
            peers={"theirs": lambda x: self.double(x, "theirs", 20)},
            clock="call",
        )
        measured = benchmarks.run_case(step, case, torch.device("cpu"), rungs=["ours"], budget_s=budget_s)
        return [m.row["ms"] for m in measured], [m.row["ms_quartiles"] for m in measured]


@pytest.mark.parametrize("begin", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_what_disturbs_the_cpu_for_a_while_does_not_decide(quick, monkeypatch, begin):
    machine = Machine(monkeypatch, lambda now, turn, first: 1.6 if begin <= now < begin + 0.9 else 1)
    ms, _ = machine.measure()
    assert ms == [10, 20]


def test_two_disturbed_rounds_beside_the_warm_up_are_not_even_in_the_quartiles(quick, monkeypatch):
    machine = Machine(monkeypatch, lambda now, turn, first: 9 if turn in (0, 3, 7) else 1)
    assert machine.measure() == ([10, 20], [[10, 10], [20, 20]])


def test_what_the_one_before_put_out_of_the_caches_does_not_count(quick, monkeypatch):
    machine = Machine(monkeypatch, lambda now, turn, first: 9 if first else 1)
    ms, _ = machine.measure(budget_s=0.01)
    assert ms == [10, 20]


def test_who_refuses_a_whole_call_is_asked_no_more(quick):
    calls = itertools.count()

    def third_time_out_of_memory(x):
        if next(calls) == 2:
            raise RuntimeError("out of memory")
        return x * 2

    said = []
    case = double_case(clock="call", peers={"theirs": third_time_out_of_memory})
    measured = benchmarks.run_case(
        step, case, torch.device("cpu"), rungs=["refuses", "cpu"], budget_s=1e-9, say=said.append
    )
    assert [m.row["impl"] for m in measured] == ["cpu"]
    assert [line.partition("float32: ")[2] for line in said] == [
        "rung 'refuses' not run: double: rung 'refuses' takes nothing; these can: 'v1_good'",
        "peer 'theirs' not run: out of memory",
    ]
    assert next(calls) == 3


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
    monkeypatch.setattr(benchmarks, "environment", lambda device: {**loaded.environment, "commit": "new"})
    monkeypatch.setattr(benchmarks, "results_path", lambda step, device: measured)
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
    assert "no rung 'v9' here; there are cpu, refuses, v1_good, v2_good" in run_main(
        "--rung", "v1_good", "--rung", "v9"
    )
    assert "no op 'triple' at these sizes; there are double" in run_main("--op", "double", "--op", "triple")


def test_a_wrong_rung_makes_the_command_fail(quick):
    case = double_case(run=lambda x, rung: x * 3)
    assert run_main("--sizes", "emulated", cases=lambda size, device: [case]) == 1


def test_a_backward_op_is_called_backward_once():
    assert double_case(direction="backward").title() == "double, backward: rows 4, width 8, float32"
    assert (
        double_case(direction="backward", op="double_backward").title() == "double_backward: rows 4, width 8, float32"
    )


def test_where_git_is_missing_the_commit_is_what_the_runner_says(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KF_COMMIT", "abc123")
    assert benchmarks.environment(torch.device("cpu"))["commit"] == "abc123"
    monkeypatch.delenv("KF_COMMIT")
    assert benchmarks.environment(torch.device("cpu"))["commit"] is None


def test_git_is_believed_before_the_runner(monkeypatch, tmp_path):
    git = tmp_path / "git"
    git.write_text('#!/bin/sh\ntest "$1" = rev-parse && echo 0123456789ab\nexit 0\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("KF_COMMIT", "abc123")
    assert benchmarks.environment(torch.device("cpu"))["commit"] == "0123456789ab"


@pytest.fixture
def measured(quick, tmp_path, monkeypatch):
    """A results file of the ops `double`, in two cases, and `softmax`; measured at commit "old"."""
    monkeypatch.setattr(benchmarks, "_commit", lambda: "old")
    path = tmp_path / "here.json"
    assert run_main("--output", path, cases=lambda size, device: [double_case(), soft_case()]) == 0
    monkeypatch.setattr(benchmarks, "_commit", lambda: "new")
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
    assert [row for row in after["rows"] if row["op"] == "softmax"] == [
        row for row in before["rows"] if row["op"] == "softmax"
    ]
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
        patched.setattr(benchmarks, "_commit", lambda: "newer")
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
        patched.setattr(benchmarks, "_commit", lambda: "newest")
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
    monkeypatch.setattr(benchmarks, "_commit", lambda: "newer")
    assert merge(measured, "--op", "double", cases=both) == 0
    assert "any more: 1 of double, refuses\n" in capsys.readouterr().out
    loaded = results.read(measured)
    run = {row["impl"]: row["run"]["commit"] for row in loaded.of("double") if "run" in row}
    assert run == dict.fromkeys(("cpu", "v1_good", "v2_good"), "newer")
    assert loaded.environment_of("double")["commit"] == "new"  # as of the row that stayed


COUNTED = {
    "dram_bytes": 264,
    "sectors_per_request": {"load": 4.0, "store": 4.0},
    "profile": {"kernels": 1, "commit": "older"},
}


def test_hardware_counters_stay_when_times_are_measured_again(measured):
    def everything(size, device):
        return [double_case(), soft_case()] if size == "emulated" else []

    def counted():
        return [row for row in results.read(measured).rows if row["dram_bytes"] is not None]

    assert run_main("--output", measured, cases=everything) == 0
    first = json.loads(measured.read_text())
    first["rows"][0].update(COUNTED)
    measured.write_text(json.dumps(first))
    assert run_main("--output", measured, cases=everything) == 0
    (row,) = counted()
    assert (row["op"], row["impl"]) == (first["rows"][0]["op"], first["rows"][0]["impl"])
    assert {name: row[name] for name in COUNTED} == COUNTED
    assert merge(measured, "--op", "double", cases=everything) == 0
    assert [one["impl"] for one in counted()] == [row["impl"]]

    other = json.loads(measured.read_text())
    other["environment"]["driver"] = "another"
    measured.write_text(json.dumps(other))
    assert run_main("--output", measured, cases=everything) == 0
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


# ---- a run that is cut off ----


def cut_off(path: pathlib.Path, monkeypatch) -> dict:
    """A run that ends in its second case. Returns what it kept."""

    def two_cases(size, device):
        return [double_case(), double_case(shape={"rows": 4, "width": 9})] if size == "emulated" else []

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


def resume(path: pathlib.Path, cases=lambda size, device: [double_case(), double_case(shape={"rows": 4, "width": 9})]):
    return run_main("--output", path, "--resume", cases=lambda *of: cases(*of) if of[0] == "emulated" else [])


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


def test_what_was_kept_and_is_damaged_is_said(quick, tmp_path):
    path = tmp_path / "h200.json"
    pathlib.Path(f"{path}.partial").write_text('{"environment": {}')
    assert "h200.json.partial is damaged" in resume(path)


def test_resuming_needs_a_file(quick, capsys):
    assert run_main("--resume") == 2
    assert "--resume goes with a run that writes results" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
    ],
)
def test_results_files_are_named_after_the_gpu(name, slug):
    assert benchmarks.gpu_slug(name) == slug


def test_the_environment_says_how_long_repeats_take(monkeypatch):
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", "0.25")
    assert benchmarks.budget() == 0.25
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", "")
    assert benchmarks.budget() == benchmarks.BUDGET_S


@pytest.mark.parametrize("asked", ["soon", "0", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused(monkeypatch, asked):
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", asked)
    with pytest.raises(UserError, match=f"KF_BENCHMARK_SECONDS: must be a number of seconds above 0, got '{asked}'"):
        benchmarks.budget()
