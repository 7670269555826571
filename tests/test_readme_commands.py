"""The commands of every document, pasted in reading order into one shell that begins at the repository's root.

So a document says itself where it goes and which environment it takes: `source .venv/bin/activate`, `cd step1-simple`.
A word after ```bash says what a block needs: `gpu`, `sanitizer`, `gdb`, `cmake` (with ninja and GoogleTest; run where
there is one), `network` (an installation or a download; not run here), `docker` (an engine with Compose; not run here),
`long` (`make tour`, `make test`; .ci/run runs these), `may-fail` (its commands may end with 1, as an exercise that is
not solved does; `|| true` would also hide that a command is not found). Test scripts run a sample of their tests, since
the whole of them runs beside this one; and benchmarks repeat little: nobody looks at their figures.
"""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from kernel_fusion import steps
from kernel_fusion.checks import times
from kernel_fusion.checks.commands import absent, commands_folder
from kernel_fusion.checks.repository import ROOT, files, relative
from kernel_fusion.checks.text import Fence, fences

TAGS = {"gpu", "sanitizer", "gdb", "cmake", "network", "docker", "long", "may-fail"}
# How to get what blocks need that a user may add.
TO_GET = {
    "gdb": "gdb: apt install gdb",
    "cmake": "cmake, ninja and GoogleTest: apt install cmake ninja-build libgtest-dev; or, without root, "
    "pip install cmake ninja, and KF_GTEST_SOURCE=<folder of GoogleTest's source>",
}
MAY_FAIL = ["set +e; trap 'code=$?; [ $code = 1 ] || exit $code' ERR"]
MARK = r"^== (.*), after (\d+) s$"  # as `mark` writes it
HANGS_S = 3600  # no document takes a tenth of it
SHOWN = ROOT / "docs" / "debugging.md"  # test_debugging.py pastes its blocks, and looks what is printed
ACTIVATE = ROOT / ".venv" / "bin" / "activate"


# What is marked ```sh is not pasted here: which test runs it, or what it needs that a machine for tests does not have.
NOT_PASTED = {
    "CONTRIBUTING.md": "tests/test_contributing.py",
    **{f"{step.folder}/README.md": "tests/test_contributing.py" for step in steps.STEPS},
    "docs/debugging.md": "a GPU, cuda-gdb and ncu",
    "docs/performance.md": "a GPU whose counters may be read",
    "step4-integration/pages/cpp.md": "step4-integration/tests/test_gpt2_program.py; nvcc and a GPU",
    "step4-integration/pages/decode_step.md": "a GPU and Nsight Systems",
    "step4-integration/pages/parallel.md": "several GPUs",
}


def blocks(document: pathlib.Path) -> list[Fence]:
    """The document's blocks of commands."""
    return [fence for fence in fences(document) if fence.language == "bash"]


DOCUMENTS = [path for path in files(".md") if blocks(path)]


def paste(document: pathlib.Path, folder: pathlib.Path) -> tuple[int, str, str]:
    """Runs the document's blocks in one shell.

    Args:
        document: whose.
        folder: for commands, should there be no .venv of this Python.

    Returns:
        The shell's code; the block it was at, as document and line, or "the end"; what it printed.
    """
    script = ["set -euo pipefail"]
    if not is_ours(ACTIVATE):
        commands = commands_folder(folder)
        script.append(f'source() {{ [ "$(realpath -m "$1")" = "{ACTIVATE}" ] && PATH="{commands}:$PATH"; }}')
    for fence in blocks(document):
        if not {"network", "docker", "long", *absent()} & set(fence.tags):
            script += [mark(f"{relative(document)}:{fence.line}"), *(MAY_FAIL if "may-fail" in fence.tags else [])]
            script += ["set -x", fence.text, "{ set +x; } 2>/dev/null", "trap - ERR; set -e"]
    script.append(mark("the end"))
    ours = ("VIRTUAL_ENV", "PYTHONPATH", "MAKE", "MFLAGS")  # not in a fresh shell: of this environment, of `make test`
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"PATH": without_this_environment(), "PYTHON": sys.executable, "PYTEST_ADDOPTS": "--sample=8"}
    environment["KF_BENCHMARK_SECONDS"] = "0.1"
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["bash", "-c", "\n".join(script)]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=HANGS_S, **streams)
    return done.returncode, re.findall(MARK, done.stdout, re.MULTILINE)[-1][0], done.stdout


def mark(place: str) -> str:
    """The command that says where the shell is."""
    return f'printf "\\n== %s, after %s s\\n" "{place}" "$SECONDS"'


def is_ours(activate: pathlib.Path) -> bool:
    """Whether this script switches to the Python that runs these tests, and not to another or to none."""
    return activate.exists() and activate.parents[1].resolve() == pathlib.Path(sys.prefix).resolve()


def without_this_environment() -> str:
    """The PATH of a fresh shell, in which the environment of this Python has not been activated."""
    own = {str(pathlib.Path(sys.prefix, "bin"))} if sys.prefix != sys.base_prefix else set()
    return os.pathsep.join(path for path in os.environ["PATH"].split(os.pathsep) if path not in own)


def marked(document: pathlib.Path):
    """The document as a parameter, marked where some of its blocks need what not every machine has."""
    tools = any(TO_GET.keys() & set(fence.tags) for fence in blocks(document))
    marks = [pytest.mark.tools] if tools and document != SHOWN else []
    is_whole = document.name == "README.md" and document.parent in (ROOT, *(step.path for step in steps.STEPS))
    if is_whole or document == SHOWN:
        marks.append(pytest.mark.long)
    return pytest.param(document, marks=marks, id=relative(document))


@pytest.mark.tools
@pytest.mark.parametrize("tag", TO_GET)
def test_every_block_can_run_here(tag):
    if tag in absent():
        pytest.skip(f"blocks tagged `{tag}` are left out; to run them, get {TO_GET[tag]}")


@pytest.mark.parametrize("document", [marked(document) for document in DOCUMENTS])
def test_a_documents_commands_run_in_one_shell(document, tmp_path):
    stated = {fence.line: fence.text for fence in blocks(document) if fence.text in {one.what for one in times.STATED}}
    yardsticks = [times.yardstick()] if stated else []
    code, at, output = paste(document, tmp_path)
    assert (code, at) == (0, "the end"), output[-6000:]
    if stated:
        yardsticks.append(times.yardstick())
        if reason := times.why_not(yardsticks):
            pytest.skip(f"all commands ran; the times that the page states are not judged: {reason}")
        assert times.problems(spent(output, stated), yardsticks) == []


def spent(output: str, texts: dict[int, str]) -> dict[str, float]:
    """How many seconds these blocks took, which are given by their first line's number."""
    marks = [(place, int(after)) for place, after in re.findall(MARK, output, re.MULTILINE)]
    found = {}
    for (place, begin), (_, end) in itertools.pairwise(marks):
        if text := texts.get(int(place.rpartition(":")[2])):
            found[text] = end - begin
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_blocks_that_may_be_skipped_leave_no_trace(document):
    """What stays in the shell, a folder or a variable, would be missing where such a block does not run."""
    for fence in blocks(document):
        assert set(fence.tags) <= TAGS, f"line {fence.line}: unknown tag"
        if fence.tags:
            lasting = [line for line in fence.text.splitlines() if re.match(r"(cd|export|source|\w+=\S*$)\b", line)]
            assert lasting == [], f"line {fence.line}: put it into ( ) or into a block without a tag"


@pytest.fixture
def page(monkeypatch, tmp_path):
    """Pastes a document with these blocks."""
    document = ROOT / "page.md"

    def pasted(*texts: str) -> tuple[int, str, str]:
        parts = [text.partition("\n") for text in texts]
        found = [Fence("bash", tuple(tags.split()), text, n, "") for n, (tags, _, text) in enumerate(parts)]
        monkeypatch.setattr(sys.modules[__name__], "blocks", lambda path: found if path == document else [])
        return paste(document, tmp_path)

    return pasted


def test_a_block_finds_what_the_one_before_left(page):
    code, at, output = page("\ncd docs\nthing=7", "\npwd\necho $thing", "gpu\nfalse" if "gpu" in absent() else "\n:")
    assert (code, at) == (0, "the end")
    assert f"\n{ROOT / 'docs'}\n" in output
    assert "\n7\n" in output


@pytest.mark.parametrize("wrong", ["false", "cd nowhere", "false | cat", "echo $unset_variable", "exit 0"])
def test_the_block_that_fails_is_named(page, wrong):
    code, at, _ = page("\n:", f"\n{wrong}", "\n:")
    assert at == "page.md:1"
    assert (code, at) != (0, "the end")


@pytest.mark.parametrize("command", ["false", "false | cat", "for i in 1 2; do false; done", "diff Makefile LICENSE"])
def test_a_block_that_may_fail_may_end_with_1(page, command):
    assert page(f"may-fail\n{command}\n:", "\n:")[:2] == (0, "the end")


@pytest.mark.parametrize(("wrong", "code"), [("no-such-command", 127), ("no-such-command | cat", 127), ("exit 0", 0)])
def test_a_block_that_may_fail_may_not_do_otherwise_nor_may_the_next(page, wrong, code):
    assert page(f"may-fail\n{wrong}\n:", "\n:")[:2] == (code, "page.md:0")
    assert page("may-fail\nfalse", "\nfalse", "\n:")[:2] == (1, "page.md:1")


def test_a_blocks_seconds_are_those_up_to_the_next_one(page):
    _, _, output = page("\n:", "\nsleep 2", "\n:")
    found = spent(output, {1: "sleep 2", 2: ":"})
    assert found["sleep 2"] in range(2, 60)
    assert set(found) == {"sleep 2", ":"}


# What only a command begins with; a program's output or a table does not.
PROGRAMS = "docker|cmake|nvcc|ncu|nsys|torchrun|python3?|pip3?"
COMMAND = rf"^ *(?:\$ |\./|(?:make|git|kernel-fusion) [a-z]|(?:{PROGRAMS}) )"


def is_commands(fence: Fence) -> bool:
    """Whether a reader would type what stands in this block, by its language or its first words."""
    by_words = fence.language in ("", "text") and re.search(COMMAND, fence.text, re.MULTILINE)
    return bool(by_words) or fence.language in {"sh", "shell", "console", "zsh"}


def test_of_every_command_it_is_known_where_it_runs():
    found = {relative(path) for path in files(".md") for fence in fences(path) if is_commands(fence)}
    assert found == set(NOT_PASTED)
    tests = {word for words in NOT_PASTED.values() for word in re.findall(r"\S+\.py", words)}
    assert {test: (ROOT / test).exists() for test in tests} == dict.fromkeys(tests, True)
    assert is_commands(Fence("text", (), "first:\nmake setup", 1, ""))
    assert not is_commands(Fence("text", (), "all right", 1, ""))


def test_no_block_is_indented_so_that_all_are_found():
    lines = [(path, line) for path in files(".md") for line in path.read_text(encoding="utf-8").splitlines()]
    assert [f"{relative(path)}: {line}" for path, line in lines if re.match(r"\s+```|\s*~~~", line)] == []


def test_no_block_hides_an_error():
    hidden = [f"{relative(path)}:{fence.line}" for path in DOCUMENTS for fence in blocks(path) if "|| " in fence.text]
    assert hidden == []


def test_the_environment_is_there_only_once_it_is_activated(page):
    if sys.prefix != sys.base_prefix:
        code, _, _ = page("\nkernel-fusion rungs scale")
        assert code == 127
    code, _, output = page("\nsource .venv/bin/activate\nkernel-fusion rungs scale")
    assert code == 0, output
    code, _, output = page("\ncd docs\nsource .venv/bin/activate")
    assert code != 0, output


def test_without_an_environment_of_ours_its_activation_is_stood_in_for(page, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules[__name__], "ACTIVATE", ROOT / ".venv" / "bin" / "activate")
    monkeypatch.setattr(sys.modules[__name__], "is_ours", lambda path: False)
    code, _, output = page("\ncd docs\nsource ../.venv/bin/activate\nwhich kernel-fusion")
    assert (code, str(tmp_path) in output) == (0, True), output
    code, _, output = page("\ncd docs\nsource .venv/bin/activate")
    assert code != 0, output


def test_ci_runs_the_long_commands():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    long = [fence.text for document in DOCUMENTS for fence in blocks(document) if "long" in fence.tags]
    lines = set("\n".join(long).splitlines())
    assert lines
    assert {line for line in lines if line.split("  #")[0].strip() not in script} == set()
