"""ncu is run on the rungs of a case, a refusal says what to do, and counters go into the rows. No GPU needed."""

import argparse
import json
import sys

import pytest
import torch

from kernel_fusion import steps, testing
from kernel_fusion.bench import counters, profile, results_file
from kernel_fusion.console import UserError, make_console
from kernel_fusion.report import results
from kernel_fusion.tests.fake_step import double_case, step
from kernel_fusion.tests.test_counters import L2, MESSAGES, PREDICTED, figures, kernel, of, table
from kernel_fusion.tests.test_report import row


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
    pathlib.Path(words[words.index("kernel_fusion.bench.profile") + 1]).write_text(json.dumps(ran))
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


FAKE = steps.Step("step1-fake", "fake_step", "test.py")
TWO = table([(name, figures()) for name in ("spin_kernel", "v1_kernel", "spin_kernel", "v2_kernel")])


def test_ncu_is_run_once_for_all_rungs_on_one_case(ncu):
    folder = ncu(MESSAGES + TWO, {"ran": ["v1_good", "v2_good"], "refused": {"refuses": "too wide"}})
    profiles, refused = profile.measure(FAKE, "double", 3, ["v1_good", "refuses", "v2_good"])
    named = {one.rung: [k.name for k in one.kernels] for one in profiles}
    assert named == {"v1_good": ["v1_kernel"], "v2_good": ["v2_kernel"]}
    assert refused == {"refuses": "too wide"}
    words = json.loads((folder / "words.json").read_text())
    assert words[: words.index("--metrics")] == [
        *("--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"),
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(folder / "build/profile/double.csv")),
    ]
    assert set(words[words.index("--metrics") + 1].split(",")) == set(counters.METRICS)
    assert words[words.index("--metrics") + 2 :] == [
        *(sys.executable, "-m", "kernel_fusion.bench.profile", str(folder / "build/profile/double.json")),
        *("fake_step", "double", "3", "v1_good", "refuses", "v2_good"),
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

CASES = [double_case(), double_case(bytes=999, dtype=torch.bfloat16), double_case(bytes=512)]
CASES.append(double_case(bytes=9999, direction="backward"))


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
def saved(tmp_path):
    path = tmp_path / "h200.json"
    rows = [row("v1_good", 0.2), row("v1_good", 0.2, width=9), row("v2_good", 0.1), row("v1_good", 0.3, kind="peer")]
    results.write(results.Results(path, {"gpu": "NVIDIA H200"}, {}, rows))
    return path


def test_counters_go_into_the_rows_of_the_case(saved, monkeypatch):
    monkeypatch.setattr(results_file, "provenance", lambda: {"commit": "abc", "date": "2026-01-31"})
    before = results.read(saved).rows
    profile.save(saved, double_case(), [of(kernel(), rung="v1_good")])
    after = results.read(saved).rows
    assert after[1:] == before[1:]
    counted = {"dram_bytes": 4_000_000_000, "sectors_per_request": {"load": 16.0, "store": 16.0}}
    assert after[0] == {**before[0], **counted, "profile": after[0]["profile"]}
    assert after[0]["profile"] == {
        "kernels": 1,
        "occupancy": 88.5,
        "registers": 32,
        "limit": "memory: DRAM 93 % busy",
        "busy": {unit: 92.61 if unit == "DRAM" else 20.0 for _, unit in counters.UNITS.values()},
        "conflicts": None,
        "commit": "abc",
        "date": "2026-01-31",
    }


def test_counters_without_a_row_are_refused_and_nothing_is_written(saved):
    before = saved.read_text()
    missing = "has no row of double: rows 4, width 8, float32, 'v3'"
    with testing.raises(results.ResultsError, missing, "bench --op double"):
        profile.save(saved, double_case(), [of(kernel(), rung="v1_good"), of(kernel(), rung="v3")])
    assert saved.read_text() == before


@pytest.fixture
def machine(monkeypatch, ncu, saved):
    """A GPU as far as the parent process looks, with the fake step's op `double` and its results."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: argparse.Namespace(L2_cache_size=L2))
    monkeypatch.setattr(profile.syllabus, "step_of", lambda op: FAKE)
    monkeypatch.setattr(profile, "cases_of", lambda step, op: [double_case(bytes=PREDICTED)])
    monkeypatch.setattr(results_file, "path_of", lambda step, device: saved)
    ncu(TWO, {"ran": ["v1_good", "v2_good"], "refused": {"refuses": "double: rung 'refuses' takes nothing"}})
    return saved


def command(**more):
    options = {"op": "double", "rung": None, "case": None, "dtype": None, "save": False, "device": "cuda", "json": None}
    options |= more
    profile.run(argparse.Namespace(**options), make_console())


def test_the_command_prints_and_saves_where_it_is_asked_to(machine, capsys):
    before = machine.read_text()
    command()
    assert machine.read_text() == before
    command(save=True)
    out = capsys.readouterr().out
    assert "case 1 of 1: double: rows 4, width 8, float32" in out
    assert "double: rung 'refuses' takes nothing" in out
    assert "DRAM bytes are as predicted" in out
    assert f"written: {machine}" in out
    assert [r["dram_bytes"] for r in results.read(machine).rows] == [PREDICTED, None, PREDICTED, None]


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
    profile.main(str(tmp_path / "ran.json"), "step2_attention", "softmax", "1", "v1_naive", "v2_block")
    assert asked == [("second", ["v1_naive", "v2_block"])]
    assert json.loads((tmp_path / "ran.json").read_text()) == {"ran": ["v1_naive", "v2_block"]}
