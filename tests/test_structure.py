"""The rules that keep the house in order: who may know whom, and the form of steps and rungs."""

import functools
import pathlib
import re

import pytest

from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT, STEPS, files, relative
from kernel_fusion.checks.structure import header, imports, includes, number_of, stands_alone
from kernel_fusion.report import syllabus

MODULES = [step.replace("-", "_") for step in STEPS]
RUNGS = [path for path in files(".cu") if re.fullmatch(r"v\d+_\w+\.cu|pieces\.cu", path.name)]
PAGE_ONE = [path for step in STEPS for path in sorted((ROOT / step).glob("*_kernel.cu"))]
CODE = (".cu", ".cpp", ".h", ".py")


@pytest.mark.parametrize("path", files(".cu"), ids=relative)
def test_no_kernel_file_includes_torch(path):
    assert not [i for i in includes(path) if re.match(r"torch/|ATen/|c10/|pybind11/|kf/(host|cpu)\.h", i)]


@pytest.mark.parametrize("path", [p for s in STEPS for p in files(".cpp", under=s)], ids=relative)
def test_no_host_file_holds_a_kernel(path):
    if path.name != "kernels_test.cpp":  # checks rungs through their launchers, may have helpers of its own
        assert "__global__" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path", [p for u in ("common", "emulator", *STEPS) for p in files(*CODE, under=u)], ids=relative
)
def test_nobody_knows_a_later_step(path):
    own = number_of(path)
    if path.suffix == ".py":
        known = {MODULES.index(name) + 1 for name in imports(path) if name in MODULES}
    else:
        known = {int(n) for i in includes(path) for n in re.findall(r"\bstep(\d)[-/]", i)}
    assert {number for number in known if number > own} == set()


@pytest.mark.parametrize("step", STEPS)
def test_a_setup_script_is_short_and_names_no_later_step(step):
    text = (ROOT / step / "setup.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    named = {int(n) for n in re.findall(r"step(\d)-", text)}
    assert {number for number in named if number > STEPS.index(step) + 1} == set()


def test_each_step_has_its_files():
    missing = []
    for step in STEPS:
        wanted = ["README.md", "setup.py", "pybind.cpp", "benchmark.py", f"{step.replace('-', '_')}/__init__.py"]
        missing += [f"{step}/{name}" for name in wanted if not (ROOT / step / name).exists()]
        if not list((ROOT / step).glob("test*.py")):
            missing.append(f"{step}/test*.py")
    assert missing == []
    assert len(PAGE_ONE) >= 3


@pytest.mark.parametrize("path", PAGE_ONE, ids=relative)
def test_page_one_is_short_and_stands_alone(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120
    assert stands_alone(path)


def unfound(path: pathlib.Path, own: pathlib.Path, folders: list[pathlib.Path]) -> set[str]:
    """What `own`, a part of the program `path`, includes of ours that lies neither beside it nor in `folders`."""
    missing = set()
    for name in (name for name in includes(own) if "/" in name and not name.startswith("cooperative_groups")):
        there = next((full for folder in [own.parent, *folders] if (full := folder / name).exists()), None)
        missing |= unfound(path, there, folders) if there else {name}
    return missing


@pytest.mark.parametrize("path", [p for p in files(".cu") if " nvcc " in header(p)], ids=relative)
def test_the_line_for_nvcc_names_the_folders_of_what_is_included(path):
    """By its text, since not everybody who runs the tests has nvcc. Lines of a step are typed in its folder."""
    top = relative(path).split("/")[0]
    typed_in = ROOT / top if top in STEPS else ROOT
    for line in re.findall(r"^ *nvcc (.*)", header(path), re.MULTILINE):
        assert unfound(path, path, [typed_in / folder for folder in re.findall(r"-I (\S+)", line)]) == set(), line


def test_measurements_and_plots_do_not_fill_the_repository():
    stored = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files(".json", ".svg")}
    assert sum(stored.values()) < 12_000, sorted(stored.items(), key=lambda one: -one[1])[:5]


@pytest.mark.parametrize("path", RUNGS, ids=relative)
def test_rung_header_has_its_five_parts(path):
    text = header(path)
    title = rf"{path.parent.name} {path.stem}: \S"
    assert re.match(title, text), f"the first line must be: // {path.parent.name} {path.stem}: what it is"
    parts = ["Idea", *(["Since "] if not re.match("v1_|pieces", path.name) else []), "Launch", "Moves", "Limits"]
    missing = [part for part in parts if not re.search(rf"^{part}", text, re.MULTILINE)]
    assert missing == []


def test_whoever_is_launched_as_dependent_waits():
    """For the kernel in front, which may still write what it reads: the emulation, one kernel after the other, does not
    show it."""
    files = [path for step in STEPS for path in (ROOT / step).rglob("*") if path.suffix in (".cu", ".h")]
    files = [path for path in files if path.name not in ("dependent_launch.h", "clusters.h")]  # they pass a kernel on
    launcher = re.compile(r"\b(launch_dependent(_if|_in_clusters)?|launch_way)\(")
    launchers = {path: text for path in files if launcher.search(text := path.read_text())}
    assert len(launchers) >= 11
    assert [path for path, text in launchers.items() if "wait_on_dependent_grids();" not in text] == []


# A few lines of PTX for each instruction: no rung's idea.
WRAPPERS = {
    f"{name}.h"
    for name in (
        "acquire cluster cp_async dependent_launch mbarrier mma shared_address tensor_map tma warpgroup wgmma".split()
    )
}
TENSOR_CORES = {"mma.h", "wgmma.h"}
# Lines of a rung's file, and of it with the headers that nobody before it in the ladder includes.
PLAIN, WITH_TENSOR_CORES = (170, 400), (300, 720)
LONGER = {
    "attention v1_naive": 422,  # packed rows
    "attention_backward v2_tiled": 430,  # packed rows
    "attention_backward v6_atomics": 870,  # the same, which v7 and v8 take
    "attention_block v4_dataflow": 930,  # three parts that run side by side
    "decode_step v2_dependent": 1430,  # all of GPT-2, and what of it a worker of several has
    "decode_step v3_persistent": 1690,  # the same, its schedule, the packing of its weights, and its recording
    "decode_step v4_clusters": 1920,  # the same again, shared out in another way
}


@functools.cache
def included(path: pathlib.Path) -> list[pathlib.Path]:
    """The steps' headers that stand in a file's #include lines."""
    folders = [path.parent, *(ROOT / step / room for room in ("include", "kernels") for step in STEPS)]
    found = (next((full for folder in folders if (full := folder / name).exists()), None) for name in includes(path))
    return [header.resolve() for header in found if header]


def headers(path) -> set[pathlib.Path]:
    """The steps' headers that a file includes, and those that they include."""
    found, unread = set(), [path]
    while unread:
        new = set(included(unread.pop())) - found
        found |= new
        unread += new
    return found


def in_order_of_the_ladder():
    """Of each rung its file, all of its headers, and those that are new in it."""
    before = set()
    for step in steps.STEPS:
        for op in syllabus.ops(step):
            for rung in syllabus.rungs(step, op):
                own = headers(rung.path)
                new = {path for path in own - before if path.name not in WRAPPERS | {"rungs.h"}}
                yield pytest.param(rung.path, own, new, id=relative(rung.path))
                before |= own


def lines(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("path", "own", "new"), list(in_order_of_the_ladder()))
def test_rung_reads_in_one_sitting(path, own, new):
    """Code does not flee into headers: those that a rung introduces count with it."""
    file, together = WITH_TENSOR_CORES if {header.name for header in own} & TENSOR_CORES else PLAIN
    assert lines(path) <= file
    assert lines(path) + sum(map(lines, new)) <= LONGER.get(f"{path.parent.name} {path.stem}", together), new


@pytest.mark.parametrize("path", RUNGS, ids=relative)
def test_a_rung_that_rounds_on_the_way_says_so_in_its_row_and_header(path):
    rungs = path.with_name("rungs.h").read_text(encoding="utf-8")
    said = re.search(rf'RUNG\({path.stem}, \w+, \w+(?:,[ \\\n]*"([^"]*)")?', rungs).group(1)
    limits = " ".join(header(path).rpartition("\nLimits")[2].split())
    assert re.findall(r"rounds (.*)$", limits) == ([said] if said else [])


@pytest.mark.parametrize("path", [p for s in STEPS for p in sorted((ROOT / s).glob("tests/test_*.py"))], ids=relative)
def test_a_test_that_can_be_run_as_a_script_imports_only_packages(path):
    """Python looks for a script's imports beside the script, and not in the step's folder."""
    if "__main__" in path.read_text(encoding="utf-8"):
        beside = {other.stem for other in (ROOT / path.relative_to(ROOT).parts[0]).glob("*.py")}
        assert imports(path) & beside == set()
