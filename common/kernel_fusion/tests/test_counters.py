"""What ncu prints is read rightly and put into the right words."""

import argparse
import csv
import io
import math

import pytest
import torch

from kernel_fusion import testing
from kernel_fusion.bench import counters, profile
from kernel_fusion.console import UserError, make_console
from kernel_fusion.tests.fake_step import double_case

SHARED = [name.format(way) for name in (counters.WAVEFRONTS, counters.CONFLICTS) for way in ("ld", "st")]
UNITS = {
    counters.TIME: "nsecond",
    counters.READ: "byte",
    counters.WRITTEN: "byte",
    counters.OCCUPANCY: "%",
    counters.REGISTERS: "register/thread",
    **{counters.SECTORS.format(way): "sector" for way in ("ld", "st")},
    **dict.fromkeys(SHARED, ""),
    **{counters.REQUESTS.format(way): "" for way in ("ld", "st")},
    **dict.fromkeys(counters.BLOCKS_BY, "block"),
    **dict.fromkeys(counters.UNITS, "%"),
}
DRAM, ISSUE, XU = (next(name for name in counters.UNITS if part in name) for part in ("dram__", "inst_issued", "_xu"))
L1 = next(name for name in counters.UNITS if "l1tex__" in name)
PREDICTED = 4_000_000_000
L2 = 60_000_000
MESSAGES = (
    '==PROF== Connected to process 4242 (/usr/bin/python3.12)\n==PROF== Profiling "v1_kernel": 0%....100% - 9 passes\n'
)


def figures(**more):
    """A coalesced kernel of float4 that is bound by memory."""
    return {
        counters.TIME: "1,000,000",
        counters.READ: "2,000,000,000",
        counters.WRITTEN: "2,000,000,000",
        counters.OCCUPANCY: "88.50",
        counters.REGISTERS: "32",
        counters.SECTORS.format("ld"): "16,000,000",
        counters.REQUESTS.format("ld"): "1,000,000",
        counters.SECTORS.format("st"): "8,000,000",
        counters.REQUESTS.format("st"): "500,000",
        **dict.fromkeys(SHARED, "0"),
        **dict(zip(counters.BLOCKS_BY, ("32", "8", "16", "8"), strict=True)),
        **dict.fromkeys(counters.UNITS, "20.00"),
        DRAM: "92.61",
        **more,
    }


def table(kernels, units=UNITS, order=None):
    """ncu's raw page: a header, a row of units, a row for each kernel, all words quoted."""
    columns = ["ID", "Process ID", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", *UNITS, "more__.sum"]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(columns)
    writer.writerow(["", "", "", "", "", "", "", *(units[name] for name in UNITS), "%"])
    rows = [
        [number, "4242", name, "1", "7", "(256, 1, 1)", "(65,536, 1, 1)", *(found[column] for column in UNITS), "0"]
        for number, (name, found) in enumerate(kernels)
    ]
    writer.writerows(rows[index] for index in (order or range(len(rows))))
    return text.getvalue()


def kernel(**more):
    (found,) = counters.parse(table([("v1_kernel", figures(**more))]))
    return found


def of(*kernels, rung="v1_naive"):
    return counters.Profile(rung, list(kernels))


# ---- what ncu prints ----


def test_a_table_is_read_by_the_names_of_its_columns():
    two = table([("v1_kernel", figures()), ("v2_kernel", figures())])
    first, second = counters.parse(f"{MESSAGES}{two}==PROF== done\n")
    assert (first.name, second.name) == ("v1_kernel", "v2_kernel")
    assert first[counters.READ] == 2e9
    assert first[counters.TIME] == pytest.approx(1e-3)
    assert first[counters.REGISTERS] == 32
    assert set(first.figures) == set(counters.METRICS)


def test_units_are_converted():
    units = {**UNITS, counters.READ: "Mbyte", counters.WRITTEN: "Gbyte", counters.TIME: "us"}
    units[counters.SECTORS.format("ld")] = "Msector"
    values = {counters.READ: "2,000.5", counters.WRITTEN: "2", counters.TIME: "1,000"}
    values[counters.SECTORS.format("ld")] = "16"
    (found,) = counters.parse(table([("v1_kernel", figures(**values))], units))
    assert found[counters.READ] == pytest.approx(2000.5e6)
    assert found[counters.WRITTEN] == 2e9
    assert found[counters.TIME] == pytest.approx(1e-3)
    assert of(found).sectors("ld") == 16


@pytest.mark.parametrize(
    ("unit", "factor"),
    [("ns", 1e-9), ("usecond", 1e-6), ("ms", 1e-3), ("second", 1), ("Kbyte", 1e3), ("register/thread", 1), ("%", 1)],
)
def test_units_of_old_and_new_versions(unit, factor):
    assert counters.scale(unit) == factor


@pytest.mark.parametrize("unit", ["furlong", "Kibyte"])
def test_an_unknown_unit_is_an_error(unit):
    with testing.raises(UserError, repr(unit)):
        counters.scale(unit)


def test_kernels_are_in_the_order_of_their_launches():
    text = table([(f"k{number}", figures()) for number in range(11)], order=[10, *range(10)])
    assert [found.name for found in counters.parse(text)] == [f"k{number}" for number in range(11)]


def test_a_unit_that_the_gpu_lacks_is_not_counted_and_a_needed_counter_is_an_error():
    assert math.isnan(kernel(**{XU: "n/a"})[XU])
    assert counters.limit(kernel(**{XU: "n/a"})).startswith("memory")
    with testing.raises(UserError, "did not count dram__bytes_read.sum"):
        kernel(**{counters.READ: "n/a"})
    with testing.raises(UserError, f"did not count {counters.TIME}"):
        counters.parse(table([("k", figures())]).replace(counters.TIME, "other"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "printed no table"),
        (MESSAGES + "==WARNING== No kernels were profiled.\n", "printed no table"),
        (MESSAGES + table([]), "saw no kernel"),
    ],
)
def test_without_figures_it_is_an_error(text, complaint):
    with testing.raises(UserError, complaint):
        counters.parse(text)


def test_kernels_belong_to_the_rung_whose_marker_is_before_them():
    names = ["at::cuda::spin_kernel(long)", "add", "gelu", "at::cuda::spin_kernel(long)", "fused"]
    kernels = counters.parse(table([(name, figures()) for name in names]))
    found = counters.by_rung(kernels, ["v1_unfused", "v2_naive"])
    named = {one.rung: [k.name for k in one.kernels] for one in found}
    assert named == {"v1_unfused": ["add", "gelu"], "v2_naive": ["fused"]}
    for rungs in (["v1_unfused"], ["v1_unfused", "v2_naive", "v3_vector"]):
        with testing.raises(UserError, f"ncu saw 2 of {len(rungs)} rungs begin"):
            counters.by_rung(kernels, rungs)
    with testing.raises(UserError, "rung 'v2_naive' launched no kernel"):
        counters.by_rung(kernels[:4], ["v1_unfused", "v2_naive"])


def test_several_kernels_are_summed():
    slow = kernel(**{counters.TIME: "3000000", counters.OCCUPANCY: "48.5", counters.SECTORS.format("ld"): "32000000"})
    both = of(kernel(), slow)
    assert both.dram_bytes == 8_000_000_000
    assert both.sum(counters.TIME) == pytest.approx(4e-3)
    assert both.sectors("ld") == 24
    assert both.occupancy == pytest.approx(58.5)
    assert both.longest is slow
    assert of(kernel(**{counters.REQUESTS.format("st"): "0", counters.SECTORS.format("st"): "0"})).sectors("st") is None


# ---- in words ----


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({}, "memory: DRAM 93 % busy"),
        ({ISSUE: "95.2"}, "instructions: issue slots 95 % busy"),
        ({XU: "97"}, "special-function unit (exp, tanh, reciprocal, conversions): XU 97 % busy"),
        ({L1: "99"}, "L1 cache and shared memory: L1 99 % busy"),
        ({DRAM: "41", XU: "35"}, "latency: nothing is more than 60 % busy (DRAM 41 %, XU 35 %,"),
        (dict.fromkeys(counters.UNITS, "n/a"), "latency: nothing is more than 60 % busy ()"),
    ],
)
def test_what_holds_a_kernel_up(busy, words):
    assert counters.limit(kernel(**busy)).startswith(words)


def test_who_does_not_wait_for_memory_is_not_told_to_ask_it_for_more():
    assert counters.limit(kernel(**{DRAM: "41"})).endswith("; more bytes in flight would help")
    assert counters.limit(kernel(**{DRAM: "9", ISSUE: "50", XU: "45", L1: "40"})).endswith(
        "(issue slots 50 %, XU 45 %, L1 40 %); more that does not depend on the result awaited would help"
    )


def test_of_several_kernels_the_longest_is_named():
    slow = counters.Kernel("void kf::gpu::(anonymous namespace)::gelu_kernel<float>(int)", kernel(**{XU: "97"}).figures)
    slow = counters.Kernel(slow.name, {**slow.figures, counters.TIME: 3e-3})
    assert counters.limits(of(kernel(), slow)) == (
        "gelu_kernel, 75 % of the time, by special-function unit (exp, tanh, reciprocal, conversions): XU 97 % busy"
    )
    assert counters.limits(of(kernel())) == "memory: DRAM 93 % busy"


def test_what_limits_the_blocks():
    assert counters.occupancy_words(kernel()) == (
        "88 % of the warps resident; 8 blocks fit a multiprocessor, by registers and the number of threads"
    )
    assert counters.occupancy_words(kernel(**dict.fromkeys(counters.BLOCKS_BY, "n/a"))) == "88 % of the warps resident"


@pytest.mark.parametrize(
    ("predicted", "more", "words"),
    [
        (PREDICTED, {}, "as predicted (1.000×)"),
        (4_070_000_000, {}, "as predicted (0.983×)"),
        (600_000_000, {counters.READ: "300e6", counters.WRITTEN: "274e6"}, "26 MB are missing: what was written last "),
        (8_000_000_000, {}, "4000 MB are missing: more than L2 can hold"),
        (2_000_000_000, {}, "2× the prediction. something is moved more than once"),
        (2_000_000_000, {counters.SECTORS.format("ld"): "32e6"}, "2× the prediction. uncoalesced: a load touches more"),
    ],
)
def test_why_bytes_differ_from_the_prediction(predicted, more, words):
    assert words in counters.bytes_words(of(kernel(**more)), predicted, L2)


def test_bank_conflicts_are_a_share_of_what_shared_memory_did():
    wavefronts, conflicts = ({"ld": loads, "st": stores} for loads, stores in (("3,000", "1,000"), ("750", "50")))
    counted = {counters.WAVEFRONTS.format(way): count for way, count in wavefronts.items()}
    counted |= {counters.CONFLICTS.format(way): count for way, count in conflicts.items()}
    found = of(kernel(**counted), kernel())
    assert found.conflicts == 20
    assert counters.shared_words(found).startswith("bank conflicts are 20 % of the wavefronts")
    assert counters.shared_words(of(kernel())) == "no thread reads or writes any"


def test_a_unit_that_the_gpu_lacks_is_not_said_to_be_idle():
    found = counters.busy(kernel(**{XU: "n/a"}))
    assert found["DRAM"] == 92.61
    assert "XU" not in found
    assert len(found) == len(counters.UNITS) - 1


def test_several_launches_explain_more_bytes():
    text = counters.bytes_words(of(kernel(), kernel()), PREDICTED, L2)
    assert text == "DRAM bytes are 2× the prediction. 2 launches: what one writes, the next reads again"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void kf::gpu::scale::(anonymous namespace)::v2_kernel<float, 4>(const float *, float *)", "v2_kernel"),
        ("void kf::gpu::scale::<unnamed>::v2_kernel<float, (int)4>(T1 *)", "v2_kernel"),
        ("v1_kernel", "v1_kernel"),
    ],
)
def test_names_of_kernels_are_short(name, short):
    assert counters.short(name) == short


def test_the_table_has_a_line_for_each_kernel_and_the_sum(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: argparse.Namespace(L2_cache_size=L2))
    profiles = [of(kernel(), kernel(), rung="v1_unfused"), of(kernel(), rung="v2_naive")]
    profile.show(profiles, double_case(bytes=PREDICTED), make_console())
    out = capsys.readouterr().out
    assert "predicted: 4,000,000,000 bytes" in out
    assert "sum of 2" in out
    assert out.count("88 %") == 4 + 2  # a line each for three kernels and a sum, and in words for two rungs
    assert "2.000×" in out
    assert "limit: memory: DRAM 93 % busy" in out
    assert "busy: DRAM 93 %, L2 20 %" in out
    assert out.count("shared memory: no thread reads or writes any") == 2
    assert "\x1b" not in out
