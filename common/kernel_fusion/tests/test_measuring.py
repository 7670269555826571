"""Rungs and peers of a case are timed, wrong results are called wrong, and who refuses says why."""

import itertools
import types

import pytest
import torch

from kernel_fusion import testing
from kernel_fusion.bench import benchmarks, ceilings, clock, measuring
from kernel_fusion.console import UserError
from kernel_fusion.tests.fake_step import double_case, step


def run(case=None, **options):
    """What is measured of a case on the CPU, in silence."""
    quiet = {"say": lambda text: None}
    return measuring.run_case(step, case or double_case(), torch.device("cpu"), **(quiet | options))


def test_rows_have_exactly_the_fields_of_a_results_file(quick):
    rows = [m.row for m in run()]
    kinds = {row["impl"]: row["kind"] for row in rows}
    assert kinds == {"cpu": "rung", "v1_good": "rung", "v2_good": "rung", "torch eager": "peer"}
    assert list(rows[0]) == [
        *("op", "pass", "impl", "kind", "dtype", "shape", "ms", "ms_quartiles", "host_bound", "bound"),
        *("ceiling", "bytes", "flops", "gb_s", "tflop_s"),
        *("percent_of_ceiling", "dram_bytes", "sectors_per_request", "correct"),
    ]
    row = rows[0]
    known = {"op": "double", "pass": "forward", "dtype": "float32", "shape": {"rows": 4, "width": 8}}
    assert row | known == row
    assert row["gb_s"] == pytest.approx(row["bytes"] / row["ms"] / 1e6, rel=1e-3)
    assert all(row["correct"] for row in rows)


def test_a_rung_that_refuses_has_no_row_and_its_reason_is_said(quick):
    said = []
    run(say=said.append)
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
    measured = run(double_case(peers=peers), say=said.append)
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
        run(double_case(run=broken))


@pytest.mark.parametrize("rung", ["off_by_a_percent", "nan"])
@pytest.mark.parametrize("peers", [{"torch eager": lambda x: x * 2}, {}])
def test_a_wrong_result_is_called_wrong(quick, rung, peers):
    said = []
    case = double_case(peers=peers)
    (found,) = run(case, rungs=[rung], peers=False, say=said.append)
    assert found.row["correct"] is False
    assert "WRONG" in said[0]


def test_correctness_is_checked_on_what_the_timed_calls_gave(quick):
    calls = itertools.count()

    def wrong_later(x, rung):
        return x * 2 if next(calls) < 2 else x

    (found,) = run(double_case(run=wrong_later), rungs=["cpu"], peers=False)
    assert found.row["correct"] is False


def test_a_rung_that_writes_nothing_finds_no_earlier_right_result(quick):
    def into_cache(cache, x, rung):
        return cache.copy_(x) if rung == "v1_good" else cache

    def allocated(x, rung):
        out = torch.empty_like(x)
        return torch.mul(x, 2, out=out) if rung == "v1_good" else out

    inputs = {"inputs": lambda device: (torch.zeros(4096), torch.ones(4096))}
    for whose in ("kernels", "call"):
        for case in (
            double_case(run=into_cache, reference=lambda cache, x: x, peers={}, clock=whose, **inputs),
            double_case(run=allocated, inputs=lambda device: (torch.ones(4096),), clock=whose),
        ):
            found = run(case, rungs=["v1_good", "v2_good"], peers=False)
            assert [m.row["correct"] for m in found] == [True, False]


def test_arithmetic_is_held_against_the_matmul_ceiling(quick):
    ceilings = benchmarks.Ceilings(torch.device("cpu"))
    case = double_case(bound="arithmetic", flops=10**6)
    (found,) = run(case, rungs=["cpu"], peers=False, ceilings=ceilings)
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
        run(case, rungs=["cpu"], peers=False)
    assert asked == [(256, "1:1"), (256, "1:0")]


def test_a_share_that_says_nothing_is_left_out(quick, monkeypatch):
    monkeypatch.setattr(ceilings.Ceilings, "memory", lambda self, size, written: None)
    (found,) = run(rungs=["cpu"], peers=False)
    assert found.row["percent_of_ceiling"] is None
    assert benchmarks.percent(found.row) == ""
    benchmarks.case_table("no share", [found.row])


def test_a_row_that_shows_the_host_is_marked(quick):
    (found,) = run(rungs=["cpu"], peers=False)
    assert found.row["host_bound"] is False
    low, high = found.row["ms_quartiles"]
    assert low <= found.row["ms"] <= high
    table = benchmarks.case_table("marked", [{**found.row, "host_bound": True}])
    assert "†" in next(iter(table.columns[2].cells))
    assert "launching" in table.caption


def test_a_whole_call_is_timed_by_the_callers_clock(quick, monkeypatch):
    calls = []
    measure = clock.measure_call
    monkeypatch.setattr(clock, "measure_call", lambda *args: calls.append(args) or measure(*args))
    for whose, count in (("kernels", 0), ("call", 1 + measuring.ROUNDS)):
        case = double_case(clock=whose)
        run(case, rungs=["cpu"], peers=False)
        assert len(calls) == count


class Machine:
    """A clock of its own, and two implementations of `double` that take 10 and 20 ms of it where nothing disturbs them.

    `slower` says how much slower a call is. It gets the seconds since the start, how many turns the implementation had
    before this one, and whether the call is the first of its turn.
    """

    def __init__(self, monkeypatch, slower):
        self.ns, self.slower, self.turns = 0, slower, []
        own = types.SimpleNamespace(perf_counter=lambda: self.ns / 1e9, perf_counter_ns=lambda: self.ns)
        for module in (measuring, clock):
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
        measured = run(case, rungs=["ours"], budget_s=budget_s)
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
    measured = run(case, rungs=["refuses", "cpu"], budget_s=1e-9, say=said.append)
    assert [m.row["impl"] for m in measured] == ["cpu"]
    assert [line.partition("float32: ")[2] for line in said] == [
        "rung 'refuses' not run: double: rung 'refuses' takes nothing; these can: 'v1_good'",
        "peer 'theirs' not run: out of memory",
    ]
    assert next(calls) == 3


def test_a_backward_op_is_called_backward_once():
    for op, title in {"double": "double, backward", "double_backward": "double_backward"}.items():
        assert double_case(direction="backward", op=op).title() == f"{title}: rows 4, width 8, float32"


def test_the_environment_says_how_long_repeats_take(monkeypatch):
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", "0.25")
    assert measuring.budget() == 0.25
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", "")
    assert measuring.budget() == measuring.BUDGET_S


@pytest.mark.parametrize("asked", ["soon", "0", "-1", "nan", "inf"])
def test_a_time_that_is_none_is_refused(monkeypatch, asked):
    monkeypatch.setenv("KF_BENCHMARK_SECONDS", asked)
    with pytest.raises(UserError, match=f"KF_BENCHMARK_SECONDS: must be a number of seconds above 0, got '{asked}'"):
        measuring.budget()
