"""What `auto` takes is held against the results, and noise is no reason to prefer a rung."""

import types

import pytest

from kernel_fusion import results, stages, testing
from kernel_fusion.tests.test_report import row as report_row


def row(impl: str, ms: float, width: int, **more) -> dict:
    return report_row(impl, ms, width=width, ms_quartiles=[ms * 0.999, ms * 1.001], **more)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A stage of which v1 is faster at width 8, v2 at width 9, and neither at width 10."""
    stage = stages.Stage("step1-fake", "step1_fake", "test.py")
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "STAGES", (stage,))
    times = {8: (1.0, 1.3), 9: (1.0, 0.5), 10: (1.0, 0.99)}
    rows = [row(f"v{i + 1}", ms, width) for width, pair in times.items() for i, ms in enumerate(pair)]
    rows.append(row("triton", 0.001, 8, kind="peer"))
    ceilings = {"copy_gb_s": {}, "mixed_gb_s": {}, "matmul_tflop_s": None}
    path = stage.path / "results" / "h200.json"
    results.write(results.Results(path, {"gpu": "NVIDIA H200"}, ceilings, rows))
    return results.read(path)


def test_a_rule_is_compared_with_every_rung_and_with_no_peer(measured):
    found = results.behind(measured, "double", lambda row: "v2")
    assert [list(ratios) for ratios in found.values()] == [["v1", "v2"]] * 3
    assert [ratios["v1"] for ratios in found.values()] == [pytest.approx(1.3), pytest.approx(0.5), 1.0]


def test_what_is_not_there_is_an_error(measured):
    with testing.raises(results.ResultsError, "double rows 4, width 8, float32 has no row of rung 'v9'"):
        results.behind(measured, "double", lambda row: "v9")
    with testing.raises(results.ResultsError, "no row of a rung of triple"):
        results.behind(measured, "triple", lambda row: "v1")


def stage_that_takes(choose, prefer=None) -> types.ModuleType:
    """A stage whose `auto` takes what choose(width) says, and prefers, where it can run, what prefer(width) says."""
    module = types.ModuleType("step1_fake")
    module._C = types.SimpleNamespace(
        choose=lambda op, rung, sizes, dtype: choose(sizes["width"]),
        prefer=lambda op, sizes, dtype: (prefer or choose)(sizes["width"]),
    )
    return module


def test_auto_may_not_be_far_behind_in_any_case(measured):
    right = stage_that_takes(lambda width: "v1" if width == 8 else "v2")
    testing.check_automatic(right, "double", dict)
    with testing.raises(AssertionError, "width 8", "1.30 times the time of v1"):
        testing.check_automatic(stage_that_takes(lambda width: "v2"), "double", dict)


def test_what_auto_prefers_counts_where_it_was_measured(measured):
    def right(width):
        return "v1" if width == 8 else "v2"

    testing.check_automatic(stage_that_takes(lambda width: "v2", prefer=right), "double", dict)
    testing.check_automatic(stage_that_takes(right, prefer=lambda width: "not measured"), "double", dict)
    with testing.raises(AssertionError, "width 8", "1.30 times the time of v1"):
        testing.check_automatic(stage_that_takes(right, prefer=lambda width: "v2"), "double", dict)


def test_a_rung_newer_than_the_h200s_figures_is_held_against_another_gpus(measured):
    """At width 8; at the other widths the H200's count, as they have what `auto` prefers there."""
    others = [row("v1", 0.1, 9), row("v2", 0.2, 9), row("v1", 1.0, 8), row("v3", 0.8, 8)]
    results.write(measured._replace(path=measured.path.with_name("h100.json"), rows=others))

    def prefer(width):
        return "v3" if width == 8 else "v2"

    testing.check_automatic(stage_that_takes(lambda width: "v2", prefer=prefer), "double", dict)
    others[-1] = row("v3", 1.2, 8)
    results.write(measured._replace(path=measured.path.with_name("h100.json"), rows=others))
    with testing.raises(AssertionError, "width 8", "1.20 times the time of v1"):
        testing.check_automatic(stage_that_takes(lambda width: "v2", prefer=prefer), "double", dict)


def test_auto_may_not_be_behind_over_all_cases(measured):
    testing.check_automatic(stage_that_takes(lambda width: "v2"), "double", dict, at_most=1.4)
    with testing.raises(AssertionError, "times the time of v2, over all cases"):
        testing.check_automatic(stage_that_takes(lambda width: "v1"), "double", dict, at_most=9.0)


def test_a_row_without_quartiles_counts_as_one_repeat():
    assert results.spread({**row("v1", 0.1, width=8), "ms_quartiles": None}) == (0.1, 0.1, 0.1)
