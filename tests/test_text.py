"""The Markdown tells the truth: quoted code is in its source, links and paths lead somewhere, tables are fresh."""

import pathlib
import re
import textwrap

import pytest
from repository import ROOT, fences, files, relative, without_fences

MARKDOWN = files(".md")
NAMES = {path.name for path in files("")}

# Written as code in the text, but of others: headers of CUDA and torch, files that only a run makes, patterns.
NOT_OURS = re.compile(
    r"(torch|ATen|c10|transformers|nvidia|include)/|cuda_|\.venv/|build/|out/|results/|[*<>{}…$~]|https?:"
)
SUFFIXES = r"\w\.(cu|cpp|h|py|md|json|txt|toml|ipynb)$"
MADE_BY_A_RUN = {"config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer.json", "build.ninja"}


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_quoted_code_equals_its_source(markdown):
    wrong = []
    for fence in fences(markdown):
        marker = re.fullmatch(r"<!-- source: (\S+) -->", fence.before.strip())
        if marker is None:
            continue
        source = (markdown.parent / marker.group(1)).resolve()
        if not source.exists():
            wrong.append(f"line {fence.line}: no file {marker.group(1)}")
        elif not stands_in(fence.text, source.read_text(encoding="utf-8")):
            wrong.append(f"line {fence.line}: these lines do not stand in {marker.group(1)}")
    assert wrong == []


def stands_in(quoted: str, source: str) -> bool:
    """Whether these whole lines stand in `source`, perhaps further to the right: cut out of a function."""
    for spaces in range(0, 13, 2):
        moved = textwrap.indent(quoted, " " * spaces, lambda line: line.strip() and not line.startswith("#"))
        if f"\n{moved}\n" in f"\n{source}\n":
            return True
    return False


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_links_lead_somewhere(markdown):
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(markdown)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (markdown.parent / path).resolve() if path else markdown
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            dead.append(target)
    assert dead == []


def anchors(markdown: pathlib.Path) -> set[str]:
    """The names GitHub gives to a file's headings."""
    headings = re.findall(r"^#+ (.*)$", without_fences(markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_named_files_exist(markdown):
    """`code` that looks like a path of ours: beside the file, from the root, or, a bare name, anywhere."""
    absent = []
    for code in re.findall(r"`([^`\s]+)`", without_fences(markdown)):
        path = code.rstrip("/").split("::")[0]
        if NOT_OURS.search(code) or path in MADE_BY_A_RUN:
            continue
        if "/" not in path:
            there = path in NAMES or not re.search(SUFFIXES, path)
        elif re.search(SUFFIXES, path) or (ROOT / path.split("/")[0]).is_dir():
            bases = [markdown.parent, ROOT, ROOT / "common" / "include", *ROOT.glob("step*/include")]
            there = any((base / path).exists() for base in bases)
        else:
            there = True
        absent += [] if there else [code]
    assert absent == []


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_named_make_targets_exist(markdown):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"`([^`\n]+)`", without_fences(markdown))
    code += [line for fence in fences(markdown) if fence.language == "bash" for line in fence.text.splitlines()]
    named = {target for text in code for target in re.findall(r"\bmake ([a-z-]+)", text)}
    assert named - targets == set()


def test_stages_show_their_results():
    """That the tables say what the results files say is tested in common/kernel_fusion/tests/test_report.py."""
    measured = {path.parents[1] for path in ROOT.glob("step*/results/*.json")}
    assert [p for p in measured if "<!-- results:" not in (p / "README.md").read_text(encoding="utf-8")] == []
