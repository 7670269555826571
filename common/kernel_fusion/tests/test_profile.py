"""What ncu prints is read rightly and put into the right words, and a refusal says what to do. No GPU needed."""

import argparse
import csv
import io
import json
import math
import sys

import pytest
import torch

from kernel_fusion import steps, testing
from kernel_fusion.bench import benchmarks, profile
from kernel_fusion.console import UserError, make_console
from kernel_fusion.report import results
from kernel_fusion.tests.fake_step import step
from kernel_fusion.tests.test_report import row

UNITS = {
    profile.TIME: "nsecond",
    profile.READ: "byte",
    profile.WRITTEN: "byte",
    profile.OCCUPANCY: "%",
    profile.REGISTERS: "register/thread",
    **{name.format(way): "sector" for name in (profile.SECTORS,) for way in ("ld", "st")},
    **{
        name.format(way): ""
        for name in (profile.REQUESTS, profile.WAVEFRONTS, profile.CONFLICTS)
        for way in ("ld", "st")
    },
    **dict.fromkeys(profile.BLOCKS_BY, "block"),
    **dict.fromkeys(profile.UNITS, "%"),
}
DRAM, ISSUE, XU = (next(name for name in profile.UNITS if part in name) for part in ("dram__", "inst_issued", "_xu"))
L1 = next(name for name in profile.UNITS if "l1tex__" in name)
PREDICTED = 4_000_000_000
L2 = 60_000_000
MESSAGES = (
    '==PROF== Connected to process 4242 (/usr/bin/python3.12)\n==PROF== Profiling "v1_kernel": 0%....100% - 9 passes\n'
)


def figures(**more):
    """A coalesced kernel of float4 that is bound by memory."""
    return {
        profile.TIME: "1,000,000",
        profile.READ: "2,000,000,000",
        profile.WRITTEN: "2,000,000,000",
        profile.OCCUPANCY: "88.50",
        profile.REGISTERS: "32",
        profile.SECTORS.format("ld"): "16,000,000",
        profile.REQUESTS.format("ld"): "1,000,000",
        profile.SECTORS.format("st"): "8,000,000",
        profile.REQUESTS.format("st"): "500,000",
        **dict.fromkeys(
            (name.format(way) for name in (profile.WAVEFRONTS, profile.CONFLICTS) for way in ("ld", "st")), "0"
        ),
        **dict(zip(profile.BLOCKS_BY, ("32", "8", "16", "8"), strict=True)),
        **dict.fromkeys(profile.UNITS, "20.00"),
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
    (found,) = profile.parse(table([("v1_kernel", figures(**more))]))
    return found


def of(*kernels, rung="v1_naive"):
    return profile.Profile(rung, list(kernels))


# ---- what ncu prints ----


def test_a_table_is_read_by_the_names_of_its_columns():
    first, second = profile.parse(
        MESSAGES + table([("v1_kernel", figures()), ("v2_kernel", figures())]) + "==PROF== done\n"
    )
    assert (first.name, second.name) == ("v1_kernel", "v2_kernel")
    assert first[profile.READ] == 2e9
    assert first[profile.TIME] == pytest.approx(1e-3)
    assert first[profile.REGISTERS] == 32
    assert set(first.figures) == set(profile.METRICS)


def test_units_are_converted():
    units = {**UNITS, profile.READ: "Mbyte", profile.WRITTEN: "Gbyte", profile.TIME: "us"}
    units[profile.SECTORS.format("ld")] = "Msector"
    values = {profile.READ: "2,000.5", profile.WRITTEN: "2", profile.TIME: "1,000", profile.SECTORS.format("ld"): "16"}
    (found,) = profile.parse(table([("v1_kernel", figures(**values))], units))
    assert found[profile.READ] == pytest.approx(2000.5e6)
    assert found[profile.WRITTEN] == 2e9
    assert found[profile.TIME] == pytest.approx(1e-3)
    assert of(found).sectors("ld") == 16


@pytest.mark.parametrize(
    ("unit", "factor"),
    [("ns", 1e-9), ("usecond", 1e-6), ("ms", 1e-3), ("second", 1), ("Kbyte", 1e3), ("register/thread", 1), ("%", 1)],
)
def test_units_of_old_and_new_versions(unit, factor):
    assert profile.scale(unit) == factor


def test_an_unknown_unit_is_an_error():
    with testing.raises(UserError, "'furlong'"):
        profile.scale("furlong")
    with testing.raises(UserError, "'Kibyte'"):
        profile.scale("Kibyte")


def test_kernels_are_in_the_order_of_their_launches():
    text = table([(f"k{number}", figures()) for number in range(11)], order=[10, *range(10)])
    assert [found.name for found in profile.parse(text)] == [f"k{number}" for number in range(11)]


def test_a_unit_that_the_gpu_lacks_is_not_counted_and_a_needed_counter_is_an_error():
    assert math.isnan(kernel(**{XU: "n/a"})[XU])
    assert profile.limit(kernel(**{XU: "n/a"})).startswith("memory")
    with testing.raises(UserError, "did not count dram__bytes_read.sum"):
        kernel(**{profile.READ: "n/a"})
    with testing.raises(UserError, f"did not count {profile.TIME}"):
        profile.parse(table([("k", figures())]).replace(profile.TIME, "other"))


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
        profile.parse(text)


def test_kernels_belong_to_the_rung_whose_marker_is_before_them():
    names = ["at::cuda::spin_kernel(long)", "add", "gelu", "at::cuda::spin_kernel(long)", "fused"]
    kernels = profile.parse(table([(name, figures()) for name in names]))
    found = profile.by_rung(kernels, ["v1_unfused", "v2_naive"])
    assert [(one.rung, [k.name for k in one.kernels]) for one in found] == [
        ("v1_unfused", ["add", "gelu"]),
        ("v2_naive", ["fused"]),
    ]
    for rungs in (["v1_unfused"], ["v1_unfused", "v2_naive", "v3_vector"]):
        with testing.raises(UserError, f"ncu saw 2 of {len(rungs)} rungs begin"):
            profile.by_rung(kernels, rungs)
    with testing.raises(UserError, "rung 'v2_naive' launched no kernel"):
        profile.by_rung(kernels[:4], ["v1_unfused", "v2_naive"])


def test_several_kernels_are_summed():
    slow = kernel(**{profile.TIME: "3000000", profile.OCCUPANCY: "48.5", profile.SECTORS.format("ld"): "32000000"})
    both = of(kernel(), slow)
    assert both.dram_bytes == 8_000_000_000
    assert both.sum(profile.TIME) == pytest.approx(4e-3)
    assert both.sectors("ld") == 24
    assert both.occupancy == pytest.approx(58.5)
    assert both.longest is slow
    assert of(kernel(**{profile.REQUESTS.format("st"): "0", profile.SECTORS.format("st"): "0"})).sectors("st") is None


# ---- in words ----


@pytest.mark.parametrize(
    ("busy", "words"),
    [
        ({}, "memory: DRAM 93 % busy"),
        ({ISSUE: "95.2"}, "instructions: issue slots 95 % busy"),
        ({XU: "97"}, "special-function unit (exp, tanh, reciprocal, conversions): XU 97 % busy"),
        ({L1: "99"}, "L1 cache and shared memory: L1 99 % busy"),
        ({DRAM: "41", XU: "35"}, "latency: nothing is more than 60 % busy (DRAM 41 %, XU 35 %,"),
        (dict.fromkeys(profile.UNITS, "n/a"), "latency: nothing is more than 60 % busy ()"),
    ],
)
def test_what_holds_a_kernel_up(busy, words):
    assert profile.limit(kernel(**busy)).startswith(words)


def test_who_does_not_wait_for_memory_is_not_told_to_ask_it_for_more():
    assert profile.limit(kernel(**{DRAM: "41"})).endswith("; more bytes in flight would help")
    assert profile.limit(kernel(**{DRAM: "9", ISSUE: "50", XU: "45", L1: "40"})).endswith(
        "(issue slots 50 %, XU 45 %, L1 40 %); more that does not depend on the result awaited would help"
    )


def test_of_several_kernels_the_longest_is_named():
    slow = profile.Kernel("void kf::gpu::(anonymous namespace)::gelu_kernel<float>(int)", kernel(**{XU: "97"}).figures)
    slow = profile.Kernel(slow.name, {**slow.figures, profile.TIME: 3e-3})
    assert profile.limits(of(kernel(), slow)) == (
        "gelu_kernel, 75 % of the time, by special-function unit (exp, tanh, reciprocal, conversions): XU 97 % busy"
    )
    assert profile.limits(of(kernel())) == "memory: DRAM 93 % busy"


def test_what_limits_the_blocks():
    assert profile.occupancy_words(kernel()) == (
        "88 % of the warps resident; 8 blocks fit a multiprocessor, by registers and the number of threads"
    )
    assert profile.occupancy_words(kernel(**dict.fromkeys(profile.BLOCKS_BY, "n/a"))) == "88 % of the warps resident"


@pytest.mark.parametrize(
    ("predicted", "more", "words"),
    [
        (PREDICTED, {}, "as predicted (1.000×)"),
        (4_070_000_000, {}, "as predicted (0.983×)"),
        (
            600_000_000,
            {profile.READ: "300e6", profile.WRITTEN: "274e6"},
            "26 MB are missing: what was written last lies in L2",
        ),
        (8_000_000_000, {}, "4000 MB are missing: more than L2 can hold"),
        (2_000_000_000, {}, "2× the prediction. something is moved more than once"),
        (2_000_000_000, {profile.SECTORS.format("ld"): "32e6"}, "2× the prediction. uncoalesced: a load touches more"),
    ],
)
def test_why_bytes_differ_from_the_prediction(predicted, more, words):
    assert words in profile.bytes_words(of(kernel(**more)), predicted, L2)


def test_bank_conflicts_are_a_share_of_what_shared_memory_did():
    wavefronts, conflicts = ({"ld": loads, "st": stores} for loads, stores in (("3,000", "1,000"), ("750", "50")))
    counted = {profile.WAVEFRONTS.format(way): count for way, count in wavefronts.items()}
    counted |= {profile.CONFLICTS.format(way): count for way, count in conflicts.items()}
    found = of(kernel(**counted), kernel())
    assert found.conflicts == 20
    assert profile.shared_words(found).startswith("bank conflicts are 20 % of the wavefronts")
    assert profile.shared_words(of(kernel())) == "no thread reads or writes any"


def test_a_unit_that_the_gpu_lacks_is_not_said_to_be_idle():
    found = profile.busy(kernel(**{XU: "n/a"}))
    assert found["DRAM"] == 92.61
    assert "XU" not in found
    assert len(found) == len(profile.UNITS) - 1


def test_several_launches_explain_more_bytes():
    text = profile.bytes_words(of(kernel(), kernel()), PREDICTED, L2)
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
    assert profile.short(name) == short


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


# ---- refusals ----


@pytest.mark.parametrize(
    ("said", "remedies"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
            ["ERR_NVGPUCTRPERM", "sudo -E env", "NVreg_RestrictProfilingToAdminUsers=0", "--cap-add=SYS_ADMIN"],
        ),
        ("==ERROR== Failed to load: LibraryNotLoaded", ["LibraryNotLoaded", "NVIDIA_DRIVER_CAPABILITIES=all"]),
        ("Error: LibraryNotLoaded", ["--cap-add=SYS_ADMIN"]),
        ("==ERROR== Profiling failed because a driver resource was unavailable.", ["dcgmi profile --pause"]),
        ("==ERROR== Profiling is not supported on device 0", ["newest Nsight Compute", "MIG"]),
    ],
)
def test_refused_counters_say_what_to_do(said, remedies):
    with testing.raises(UserError, *remedies):
        profile.check_allowed(f"{MESSAGES}{said}\n")


def test_other_messages_are_no_refusal():
    profile.check_allowed(f"{MESSAGES}==WARNING== Section x is not supported\nRuntimeError: not supported\n")


def test_without_ncu_it_says_where_to_get_it(monkeypatch):
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    monkeypatch.setattr(profile, "PLACES", ("/nowhere/*/ncu",))
    with testing.raises(UserError, "apt install nsight-compute"):
        profile.find_ncu()


def test_ncu_is_found_beside_the_newest_toolkit(monkeypatch, tmp_path):
    for version in ("cuda-12.9", "cuda-13.0"):
        (tmp_path / version / "bin").mkdir(parents=True)
        (tmp_path / version / "bin" / "ncu").write_text("")
    monkeypatch.setattr(profile.shutil, "which", lambda name: None)
    monkeypatch.setattr(profile, "PLACES", (f"{tmp_path}/cuda*/bin/ncu",))
    assert profile.find_ncu() == f"{tmp_path}/cuda-13.0/bin/ncu"


# ---- the run, with an ncu that prints what it is told ----

NCU = """#!{python}
import json, pathlib, sys
words = sys.argv[1:]
pathlib.Path({folder!r}, "words.json").write_text(json.dumps(words))
table = {table!r}
if table:
    pathlib.Path(words[words.index("--log-file") + 1]).write_text(table)
ran = {ran!r}
if ran is not None:
    pathlib.Path(words[words.index("--launched") + 1]).write_text(json.dumps(ran))
print("said by the child")
sys.exit({code})
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Makes an ncu that writes this table and, as its child would, what ran."""
    monkeypatch.setattr(steps, "ROOT", tmp_path)

    def make(table, ran=None, code=0):
        path = tmp_path / "ncu"
        path.write_text(NCU.format(python=sys.executable, folder=str(tmp_path), table=table, ran=ran, code=code))
        path.chmod(0o755)
        monkeypatch.setattr(profile, "find_ncu", lambda: str(path))
        return tmp_path

    return make


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
    }
    return benchmarks.Case(**{**options, **more})


FAKE = steps.Step("step1-fake", "fake_step", "test.py")
TWO = table(
    [("spin_kernel", figures()), ("v1_kernel", figures()), ("spin_kernel", figures()), ("v2_kernel", figures())]
)


def test_ncu_is_run_once_for_all_rungs_on_one_case(ncu):
    folder = ncu(MESSAGES + TWO, {"ran": ["v1_good", "v2_good"], "refused": {"refuses": "too wide"}})
    profiles, refused = profile.measure(FAKE, "double", 3, ["v1_good", "refuses", "v2_good"])
    assert [(one.rung, [k.name for k in one.kernels]) for one in profiles] == [
        ("v1_good", ["v1_kernel"]),
        ("v2_good", ["v2_kernel"]),
    ]
    assert refused == {"refuses": "too wide"}
    words = json.loads((folder / "words.json").read_text())
    assert words[: words.index("--metrics")] == [
        *("--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"),
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(folder / "build/profile/double.csv")),
    ]
    assert set(words[words.index("--metrics") + 1].split(",")) == set(profile.METRICS)
    assert words[words.index("--metrics") + 2 :] == [
        *(
            sys.executable,
            "-m",
            "kernel_fusion.bench.profile",
            "--child",
            "fake_step",
            "--op",
            "double",
            "--case",
            "3",
        ),
        *("--rung", "v1_good", "--rung", "refuses", "--rung", "v2_good"),
        *("--launched", str(folder / "build/profile/double.json")),
    ]


def test_rungs_that_all_refuse_need_no_table(ncu):
    ncu("==WARNING== No kernels were profiled.\n", {"ran": [], "refused": {"refuses": "too wide"}})
    assert profile.measure(FAKE, "double", 0, ["refuses"]) == ([], {"refuses": "too wide"})


def test_a_run_that_fails_shows_what_was_said(ncu):
    folder = ncu("", None, code=3)
    with testing.raises(UserError, "said by the child", "ncu ended with code 3", str(folder / "build" / "profile")):
        profile.measure(FAKE, "double", 0, ["v1_good"])
    ncu(TWO, None)
    with testing.raises(UserError, "ncu did not run the rungs"):
        profile.measure(FAKE, "double", 0, ["v1_good"])
    ncu("==ERROR== ERR_NVGPUCTRPERM - no\n", None, code=1)
    with testing.raises(UserError, "NVreg_RestrictProfilingToAdminUsers"):
        profile.measure(FAKE, "double", 0, ["v1_good"])


def test_an_older_runs_table_is_not_taken_for_this_ones(ncu):
    ncu(TWO, {"ran": ["v1_good", "v2_good"], "refused": {}})
    profile.measure(FAKE, "double", 0, ["v1_good", "v2_good"])
    ncu("", {"ran": ["v1_good"], "refused": {}})
    with testing.raises(UserError, "printed no table"):
        profile.measure(FAKE, "double", 0, ["v1_good"])


# ---- cases ----

CASES = [
    double_case(),
    double_case(bytes=999, dtype=torch.bfloat16),
    double_case(bytes=512),
    double_case(bytes=9999, direction="backward"),
]


def test_the_largest_forward_case_is_the_default():
    assert profile.chosen(CASES, None, None) == 1
    assert profile.chosen(CASES, None, "float32") == 2
    assert profile.chosen(CASES, 1, None) == 0
    assert profile.chosen(CASES[3:], None, None) == 0


def test_a_case_that_is_not_there_is_an_error():
    for number in (0, 5):
        with testing.raises(UserError, f"got {number}", "2: double: rows 4, width 8, bfloat16", "4: double, backward"):
            profile.chosen(CASES, number, None)
    with testing.raises(UserError, "--dtype must be one of float32, bfloat16, got 'float16'"):
        profile.chosen(CASES, None, "float16")


def test_every_op_with_rungs_has_a_case_to_profile():
    (case, *_) = profile.cases_of(steps.find("step2"), "softmax")
    assert case.op == "softmax"
    with testing.raises(UserError, "step2-attention/benchmark.py has no case of nothing"):
        profile.cases_of(steps.find("step2"), "nothing")


# ---- the command ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so():
    with testing.raises(UserError, "profile needs a GPU"):
        command(op="softmax")


@pytest.fixture
def results_file(tmp_path):
    path = tmp_path / "h200.json"
    rows = [row("v1_good", 0.2), row("v1_good", 0.2, width=9), row("v2_good", 0.1), row("v1_good", 0.3, kind="peer")]
    results.write(results.Results(path, {"gpu": "NVIDIA H200"}, {}, rows))
    return path


def test_counters_go_into_the_rows_of_the_case(results_file, monkeypatch):
    monkeypatch.setattr(benchmarks, "provenance", lambda: {"commit": "abc", "date": "2026-01-31"})
    before = results.read(results_file).rows
    profile.save(results_file, double_case(), [of(kernel(), rung="v1_good")])
    after = results.read(results_file).rows
    assert after[1:] == before[1:]
    assert {**after[0], "dram_bytes": None, "sectors_per_request": None} == {
        **before[0],
        "profile": after[0]["profile"],
    }
    assert after[0]["dram_bytes"] == 4_000_000_000
    assert after[0]["sectors_per_request"] == {"load": 16.0, "store": 16.0}
    assert after[0]["profile"] == {
        "kernels": 1,
        "occupancy": 88.5,
        "registers": 32,
        "limit": "memory: DRAM 93 % busy",
        "busy": {unit: 92.61 if unit == "DRAM" else 20.0 for _, unit in profile.UNITS.values()},
        "conflicts": None,
        "commit": "abc",
        "date": "2026-01-31",
    }


def test_counters_without_a_row_are_refused_and_nothing_is_written(results_file):
    before = results_file.read_text()
    with testing.raises(
        results.ResultsError, "has no row of double: rows 4, width 8, float32, 'v3'", "bench --op double"
    ):
        profile.save(results_file, double_case(), [of(kernel(), rung="v1_good"), of(kernel(), rung="v3")])
    assert results_file.read_text() == before


@pytest.fixture
def machine(monkeypatch, ncu, results_file):
    """A GPU as far as the parent process looks, with the fake step's op `double` and its results."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: argparse.Namespace(L2_cache_size=L2))
    monkeypatch.setattr(profile.syllabus, "step_of", lambda op: FAKE)
    monkeypatch.setattr(profile, "cases_of", lambda step, op: [double_case(bytes=PREDICTED)])
    monkeypatch.setattr(profile.benchmarks, "results_path", lambda step, device: results_file)
    ncu(TWO, {"ran": ["v1_good", "v2_good"], "refused": {"refuses": "double: rung 'refuses' takes nothing"}})
    return results_file


def command(**more):
    options = {"op": "double", "rung": None, "case": None, "dtype": None, "save": False, "device": "cuda", "json": None}
    options |= more
    profile.run(argparse.Namespace(**options), make_console())


def test_the_command_prints_and_saves(machine, capsys):
    command(save=True)
    out = capsys.readouterr().out
    assert "case 1 of 1: double: rows 4, width 8, float32" in out
    assert "double: rung 'refuses' takes nothing" in out
    assert "DRAM bytes are as predicted" in out
    assert f"written: {machine}" in out
    assert [r["dram_bytes"] for r in results.read(machine).rows] == [PREDICTED, None, PREDICTED, None]


def test_the_command_saves_nothing_unasked(machine):
    before = machine.read_text()
    command()
    assert machine.read_text() == before


def test_what_cannot_be_saved_is_refused_before_ncu_runs(machine, ncu):
    folder = ncu("", None, code=1)
    with testing.raises(UserError, "--rung must be one of v1_good, refuses, v2_good, got 'v9'"):
        command(rung=["v9"])
    with testing.raises(results.ResultsError, "'refuses'; measure it first"):
        command(rung=["refuses"], save=True)
    machine.unlink()
    with testing.raises(UserError, "--save: there is no"):
        command(save=True)
    assert not (folder / "words.json").exists()


def test_options_of_the_other_device_are_refused(machine, tmp_path):
    with testing.raises(UserError, "--json goes with --device cpu"):
        command(json=tmp_path / "counts.json")
    with testing.raises(UserError, "goes with --device cuda only"):
        command(device="cpu", save=True)


def test_a_step_built_without_cuda_says_so(machine, monkeypatch):
    monkeypatch.setattr(step, "rungs", lambda op, device: [])
    with testing.raises(UserError, "step1-fake was built without CUDA"):
        command()


# ---- the child ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_child_runs_each_rung_and_notes_refusals():
    done = profile.exercise(double_case(), ["v1_good", "refuses", "v2_good"])
    assert done["ran"] == ["v1_good", "v2_good"]
    assert "takes nothing" in done["refused"]["refuses"]


def test_the_child_writes_what_ran(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(profile, "cases_of", lambda step, op: ["first", "second"])
    monkeypatch.setattr(profile, "exercise", lambda case, rungs: asked.append((case, rungs)) or {"ran": rungs})
    arguments = profile.child_arguments(steps.find("2"), "softmax", 1, ["v1_naive", "v2_block"], tmp_path / "ran.json")
    monkeypatch.setattr(sys, "argv", ["profile", *arguments])
    assert profile.main() == 0
    assert asked == [("second", ["v1_naive", "v2_block"])]
    assert json.loads((tmp_path / "ran.json").read_text()) == {"ran": ["v1_naive", "v2_block"]}
