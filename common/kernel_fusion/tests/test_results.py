"""Results files have one text. What `auto` takes is held against them, and noise is no reason to prefer a rung."""

import itertools
import json
import math
import types

import pytest

from emulator import counts
from kernel_fusion import steps, testing
from kernel_fusion.bench import results_file
from kernel_fusion.report import results
from kernel_fusion.tests.test_report import row as report_row


def row(impl: str, ms: float, width: int, **more) -> dict:
    return report_row(impl, ms, width=width, ms_quartiles=[ms * 0.999, ms * 1.001], **more)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A step of which v1 is faster at width 8, v2 at width 9, and neither at width 10."""
    step = steps.Step("step1-fake", "step1_fake", "test.py")
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    monkeypatch.setattr(steps, "STEPS", (step,))
    times = {8: (1.0, 1.3), 9: (1.0, 0.5), 10: (1.0, 0.99)}
    rows = [row(f"v{i + 1}", ms, width) for width, pair in times.items() for i, ms in enumerate(pair)]
    rows.append(row("triton", 0.001, 8, kind="peer"))
    ceilings = {"copy_gb_s": {}, "mixed_gb_s": {}, "matmul_tflop_s": None}
    path = step.path / "results" / "h200.json"
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


def step_that_takes(choose, prefer=None) -> types.ModuleType:
    """A step whose `auto` takes what choose(width) says, and prefers, where it can run, what prefer(width) says."""
    module = types.ModuleType("step1_fake")
    module._C = types.SimpleNamespace(
        choose=lambda op, rung, sizes, dtype: choose(sizes["width"]),
        prefer=lambda op, sizes, dtype: (prefer or choose)(sizes["width"]),
    )
    return module


def test_auto_may_not_be_far_behind_in_any_case(measured):
    right = step_that_takes(lambda width: "v1" if width == 8 else "v2")
    testing.check_automatic(right, "double", dict)
    with testing.raises(AssertionError, "width 8", "1.30 times the time of v1"):
        testing.check_automatic(step_that_takes(lambda width: "v2"), "double", dict)


def test_what_auto_prefers_counts_where_it_was_measured(measured):
    def right(width):
        return "v1" if width == 8 else "v2"

    testing.check_automatic(step_that_takes(lambda width: "v2", prefer=right), "double", dict)
    testing.check_automatic(step_that_takes(right, prefer=lambda width: "not measured"), "double", dict)
    with testing.raises(AssertionError, "width 8", "1.30 times the time of v1"):
        testing.check_automatic(step_that_takes(right, prefer=lambda width: "v2"), "double", dict)


def test_a_rung_newer_than_the_h200s_figures_is_held_against_another_gpus(measured):
    """At width 8; at the other widths the H200's count, as they have what `auto` prefers there."""
    others = [row("v1", 0.1, 9), row("v2", 0.2, 9), row("v1", 1.0, 8), row("v3", 0.8, 8)]
    results.write(measured._replace(path=measured.path.with_name("h100.json"), rows=others))

    def prefer(width):
        return "v3" if width == 8 else "v2"

    testing.check_automatic(step_that_takes(lambda width: "v2", prefer=prefer), "double", dict)
    others[-1] = row("v3", 1.2, 8)
    results.write(measured._replace(path=measured.path.with_name("h100.json"), rows=others))
    with testing.raises(AssertionError, "width 8", "1.20 times the time of v1"):
        testing.check_automatic(step_that_takes(lambda width: "v2", prefer=prefer), "double", dict)


def test_auto_may_not_be_behind_over_all_cases(measured):
    testing.check_automatic(step_that_takes(lambda width: "v2"), "double", dict, at_most=1.4)
    with testing.raises(AssertionError, "times the time of v2, over all cases"):
        testing.check_automatic(step_that_takes(lambda width: "v1"), "double", dict, at_most=9.0)


def test_a_row_without_quartiles_counts_as_one_repeat():
    assert results.spread({**row("v1", 0.1, width=8), "ms_quartiles": None}) == (0.1, 0.1, 0.1)


# ---- the text of a file ----

FILES = [one.path for step in steps.STEPS for one in results.load(step)]


def numbers(value):
    """All numbers in `value`."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_stored_file_is_as_it_would_be_written(path, tmp_path):
    results.write(results.read(path)._replace(path=tmp_path / path.name))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_the_stored_counts_are_as_they_would_be_written():
    text = counts.COMPARED.read_text()
    assert results.as_text(json.loads(text), levels=2) == text
    assert 0 not in numbers(json.loads(text)["kernels"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_stored_figures_have_four_digits_and_none_that_others_give(path):
    loaded = json.loads(path.read_text())
    counted = ("shape", "bytes", "flops", "dram_bytes")  # exact
    figures = [{name: value for name, value in row.items() if name not in counted} for row in loaded["rows"]]
    assert [value for value in numbers([loaded["ceilings"], figures]) if results.rounded(value) != value] == []
    for row in loaded["rows"]:
        assert not {"tflop_s", "percent_of_ceiling"} & set(row)
        if "gb_s" in row:  # where the digits of `ms` give more than 1 more or less in the last
            last = 10 ** (math.floor(math.log10(row["gb_s"])) - 3)
            assert abs(row["gb_s"] - results.derived(row)["gb_s"]) > 1.5 * last


MEASURED = {"op": "double", "shape": {"rows": 4}, "dtype": "float32", "impl": "v1_naive", "ms": 0.2, "bytes": 4 * 10**8}


@pytest.mark.parametrize(
    ("more", "rates"),
    [
        ({"flops": 10**9, "ceiling": 4000}, (2000, 5, 50)),
        ({"flops": 10**9, "ceiling": 3456}, (2000, 5, 57.87)),
        ({"flops": 10**9, "ceiling": 800, "bound": "arithmetic"}, (2000, 5, 0.625)),
        ({"flops": 0}, (2000, 0, None)),
    ],
)
def test_rates_follow_from_what_was_measured(more, rates):
    found = results.derived({**MEASURED, **more})
    assert (found["gb_s"], found["tflop_s"], found["percent_of_ceiling"]) == rates


@pytest.mark.parametrize(
    ("name", "kind"),
    [("v1_naive", "rung"), ("v12_wgmma", "rung"), ("cpu", "rung"), ("v1", "rung"), ("pieces", "plan"),
     ("triton", "peer"), ("vendor", "peer"), ("v2.1 of theirs", "peer"), ("cpuinfo", "peer")],
)  # fmt: skip
def test_a_rung_is_known_by_its_name(name, kind):
    assert results.derived({**MEASURED, "flops": 0, "impl": name})["kind"] == kind


@pytest.mark.parametrize(
    ("value", "text"), [(4213.4, "4213"), (0.123456, "0.1235"), (123456, "123500"), (2.0, "2"), (None, "None")]
)
def test_figures_are_rounded_to_four_digits(value, text):
    assert str(results.rounded(value)) == text


def test_only_what_does_not_follow_is_written(tmp_path):
    plain = {**MEASURED, "flops": 10**9, "ms_quartiles": [0.1999, 0.2001], "ceiling": 4000}
    other = {"pass": "backward", "kind": "peer", "correct": False, "host_bound": True, "gb_s": 2001, "mark": 7}
    path = tmp_path / "h200.json"
    rows = [{**results.derived(plain), **plain}, {**results.derived(plain), **plain, "impl": "v2", **other}]
    results.write(results.Results(path, {"gpu": "NVIDIA H200", "ops": {"double": {"commit": "a"}}}, {}, rows))
    assert results.read(path).rows == rows
    first = '{"op": "double", "shape": {"rows": 4}, "dtype": "float32", "impl": "v1_naive", "ms": 0.2, '
    first += '"ms_quartiles": [0.1999, 0.2001], "ceiling": 4000, "bytes": 400000000, "flops": 1000000000}'
    second = first.replace('", "shape', '", "pass": "backward", "shape').replace('"v1_naive"', '"v2", "kind": "peer"')
    second = second.replace(', "ceiling', ', "host_bound": true, "correct": false, "ceiling')
    assert path.read_text().splitlines() == [
        "{",
        ' "environment": {',
        '  "gpu": "NVIDIA H200",',
        '  "ops": {',
        '   "double": {"commit": "a"}',
        "  }",
        " },",
        ' "ceilings": {},',
        ' "rows": [',
        f"  {first},",
        f'  {second[:-1]}, "gb_s": 2001, "mark": 7}}',
        " ]",
        "}",
    ]


def test_places_do_not_depend_on_what_was_measured_first():
    order = [row(impl, 1.0, width, op=op) for op in ("b", "a") for width in (9, 8) for impl in ("v2", "v10", "eager")]
    keys = [results.key(one) for one in order]
    for first, second, third in itertools.permutations([order[0::3], order[1::3], order[2::3]]):
        found = results.placed(first, [], keys)
        found = results.placed([*second, *found], found, keys)
        assert results.placed([*found, *third], found, keys) == order


def test_what_is_in_a_file_keeps_its_place():
    moved = [row(impl, 1.0, width) for width, impl in ((9, "v1"), (8, "v1"), (8, "theirs"))]
    new = [row(impl, 1.0, width) for width, impl in ((8, "v1"), (8, "v2"), (9, "v1"), (9, "v2"))]
    found = results.placed([*new, moved[2]], moved, [results.key(one) for one in new])
    assert [(one["shape"]["width"], one["impl"]) for one in found] == [
        *((9, "v1"), (9, "v2"), (8, "v1"), (8, "v2"), (8, "theirs"))
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_merge_of_one_measured_row_changes_one_line(path, tmp_path, monkeypatch):
    before = results.read(path)
    run = {"commit": "0123456789ab", "date": "2027-01-31"}
    monkeypatch.setattr(results_file, "environment", lambda device: {**before.environment, **run})
    known = [results.key(one) for one in before.rows]
    copy = tmp_path / path.name
    for old in before.rows[:: len(before.rows) // 5]:
        copy.write_bytes(path.read_bytes())
        new = {**old, "ms": results.rounded(old["ms"] * 1.1)}
        for name in ("again", "gb_s", "tflop_s", "percent_of_ceiling"):
            new.pop(name, None)
        copies, product = dict.fromkeys(before.ceilings["copy_gb_s"], 1), before.ceilings["matmul_tflop_s"] and 1
        other = {"copy_gb_s": copies, "mixed_gb_s": {}, "matmul_tflop_s": product}
        assert results_file.merge(copy, [{**results.derived(new), **new}], other, None, known) == []
        lines = list(zip(path.read_text().splitlines(), copy.read_text().splitlines(), strict=True))
        ((was, now),) = [(one, other) for one, other in lines if one != other]
        assert json.loads(was.strip(" ,"))["ms"] == old["ms"]
        after = json.loads(now.strip(" ,"))
        assert (after["ms"], after["run"]) == (new["ms"], run)
