"""The list of planted faults fits the sources and the README's table; the command compiles and runs them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernel_fusion.checks import by_tools
from kernel_fusion.checks.faults import planted, read_faults, table_in
from kernel_fusion.steps import ROOT

FAULTS = read_faults(Path(__file__).with_name("planted_faults.txt"), by_tools.Fault)


def test_there_are_twenty_with_names_of_their_own_in_all_steps():
    assert len(FAULTS) == 20
    assert len({fault.name for fault in FAULTS}) == 20
    assert len({by_tools.row_start(fault) for fault in FAULTS}) == 20
    assert {fault.step for fault in FAULTS} == {path.name for path in ROOT.glob("step*") if path.is_dir()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_source(fault):
    text = (ROOT / fault.file).read_text()
    with_fault = planted(fault, text)
    assert with_fault != text
    assert with_fault.count("\n") == text.count("\n")  # lines stay
    suite = fault.filter.removesuffix(".*")
    tests = "".join(path.read_text() for path in (ROOT / fault.step / "tests").glob("*_test.cpp"))
    assert re.search(rf"^TEST\({suite},", tests, re.M)
    assert (ROOT / fault.rung).is_file()


@pytest.mark.tools
@pytest.mark.skipif(not all(map(shutil.which, ("cmake", "ninja"))), reason="needs cmake and ninja: pip install both")
def test_cmake_compiles_each_rung_where_it_is_looked_for(tmp_path):
    """Whether GoogleTest is there or not: nothing is compiled."""
    (tmp_path / "GTestConfig.cmake").write_text(
        "add_library(GTest::gtest_main INTERFACE IMPORTED)\nset(GTest_FOUND TRUE)\n"
    )
    folder = tmp_path / "build"
    command = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, f"-DGTest_DIR={tmp_path}"]
    command = [*map(str, command), f"-DPython3_EXECUTABLE={sys.executable}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compiled = {entry["file"] for entry in json.loads((folder / "compile_commands.json").read_text())}
    preset = object.__new__(by_tools.Preset)  # without the build that it begins with
    preset.folder = folder
    assert compiled.issuperset(preset.rewritten(fault) for fault in FAULTS)


def test_the_readme_has_a_row_for_each():
    lines = table_in((ROOT / "emulator/README.md").read_text()).splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len(rows) == len(FAULTS)
    for row, fault in zip(rows, FAULTS, strict=True):
        assert row.startswith(by_tools.row_start(fault))
        cells = [cell.strip() for cell in row.strip("|").split("|")][-len(by_tools.COLUMNS) :]
        assert set(cells) - {"–"}, "found by nothing"


def test_the_table_counts_what_each_column_found():
    nothing = dict.fromkeys(by_tools.COLUMNS, "")
    found = {fault.name: dict(nothing) for fault in FAULTS}
    found[FAULTS[0].name]["race detector"] = "yes"
    found[FAULTS[1].name] |= {"race detector": "yes", "contract": "error"}
    lines = by_tools.table(FAULTS, found).splitlines()
    assert lines[2].endswith("| – | – | yes | – |")
    assert lines[3].endswith("| error | – | yes | – |")
    assert lines[-1] == (
        "Found, of 20: contract 1, other orders 0, race detector 2 (1 by nothing else), AddressSanitizer 0."
    )
