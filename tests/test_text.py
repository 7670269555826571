"""The Markdown tells the truth: quoted code is in its source, links and paths lead somewhere, tables are fresh."""

import json
import os
import re

import pytest

from kernel_fusion.checks.repository import ROOT, STEPS, files, relative
from kernel_fusion.checks.text import anchors, fences, is_quoted, steps_pages, without_fences, words_around

MARKDOWN = files(".md")
NAMES = {path.name for path in files("")}

# Written as code in the text, but of others: headers of CUDA and torch, files that only a run makes, patterns.
NOT_OURS = re.compile(
    r"(torch|ATen|c10|transformers|nvidia|include)/|cuda_|\.venv/|build/|out/|results/|[*<>{}…$~]|https?:"
)
SUFFIXES = r"\w\.(cu|cpp|h|py|md|json|txt|toml|ipynb)$"
MADE_BY_A_RUN = {
    "my",
    "config.json",
    "model.safetensors",
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "build.ninja",
}


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
        elif not is_quoted(fence.text, source.read_text(encoding="utf-8")):
            wrong.append(f"line {fence.line}: these lines do not stand in {marker.group(1)}")
    assert wrong == []


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
def test_paths_are_links(markdown):
    """The first `path` of a file of ours is a link, or stands after one; so that a reader can follow it."""
    text = without_fences(markdown)
    linked, bare = {}, []
    for link in re.finditer(r"\]\(([^)\s#]+)[^)\s]*\)", text):
        linked.setdefault((markdown.parent / link[1]).resolve(), link.start())
    for code in re.finditer(r"`([^`\s]+)`", text):
        named = [base / code[1] for base in (markdown.parent, ROOT) if (base / code[1]).is_file()]
        if named and linked.get(named[0].resolve(), len(text)) > code.end():
            bare.append(f"line {text.count(chr(10), 0, code.start()) + 1}: {code[1]}")
    assert bare == []


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_named_make_targets_exist(markdown):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    code = re.findall(r"`([^`\n]+)`", without_fences(markdown))
    code += [line for fence in fences(markdown) if fence.language == "bash" for line in fence.text.splitlines()]
    named = {target for text in code for target in re.findall(r"\bmake (?:-C \S+ )?([a-z-]+)", text)}
    assert named - targets == set()


def test_steps_show_their_results():
    """That the tables say what the results files say is tested in common/kernel_fusion/tests/test_report.py."""
    measured = {path.parents[1] for path in ROOT.glob("step*/results/*.json")}
    assert [p for p in measured if "<!-- results:" not in (p / "README.md").read_text(encoding="utf-8")] == []


# ---- questions ----

QUESTION = re.compile(
    r"^<details><summary>Predict first: (.*?)</summary>(.*?)</details>\n(.*)", re.MULTILINE | re.DOTALL
)


def questions(text: str) -> list[tuple[str, str, str]]:
    """Each question that a reader answers before he sees the figure: it, the answer, the line behind."""
    parts = text.split("<details>")
    found = [QUESTION.match(f"<details>{part}") for part in parts[1:] if part.startswith("<summary>Predict")]
    return [(one[1], one[2], one[3].partition("\n")[0]) if one else ("", "", "") for one in found]


def test_an_answer_with_figures_is_borne_out_by_results():
    found = {relative(page): questions(page.read_text(encoding="utf-8")) for page in MARKDOWN}
    asked = [(page, *one) for page, own in found.items() for one in own]
    assert len(asked) >= 5
    for page, question, answer, behind in asked:
        assert question.endswith("?"), page
        assert re.search(r"\d", answer), page
        assert behind.startswith("<!-- claim: "), page


# ---- pages that can be read ----

STEP_PAGES = [path for step in STEPS for path in [ROOT / step / "README.md", *sorted((ROOT / step).glob("pages/*.md"))]]
LONGEST_PAGE = 600  # lines: what can be read in one sitting
WITHOUT_CONTENTS = 120  # lines


@pytest.mark.parametrize("page", STEP_PAGES, ids=relative)
def test_a_page_is_read_in_one_sitting(page):
    assert len(page.read_text(encoding="utf-8").splitlines()) <= LONGEST_PAGE


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_contents_stand_at_the_top(markdown):
    text = markdown.read_text(encoding="utf-8")
    one_table = text.count("\n## ") < 2
    if markdown.parent.name == "results" or one_table or len(text.splitlines()) <= WITHOUT_CONTENTS:
        return
    assert "<!-- contents -->" in text.split("\n## ")[0]


@pytest.mark.parametrize("step", STEPS)
def test_pages_are_linked_in_reading_order(step):
    pages = steps_pages(step)
    assert sorted(pages) == sorted(path for path in STEP_PAGES if path.parent == ROOT / step / "pages")
    following = dict(zip(STEPS, STEPS[1:], strict=False))
    order = [ROOT / step / "README.md", *pages, ROOT / following.get(step, "") / "README.md"]
    for page, after in zip(order, order[1:], strict=False):
        link = os.path.relpath(after, page.parent)
        assert f"]({link})" in page.read_text(encoding="utf-8").split("\n## Next\n")[1], relative(page)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_built_before_its_first_use(step):
    texts = [fence.text for fence in fences(ROOT / step / "README.md") if fence.language == "bash"]
    builds = [n for n, text in enumerate(texts) if re.search(r"build_ext|make -C \.\. build", text)]
    uses = [n for n, text in enumerate(texts) if re.search(r"import step\d_|python (test|benchmark|train|gpt2)", text)]
    assert builds[0] < uses[0]


@pytest.mark.parametrize("page", STEP_PAGES, ids=relative)
def test_results_stand_after_the_rungs_that_they_are_of(page):
    text = page.read_text(encoding="utf-8")
    step = ROOT / page.relative_to(ROOT).parts[0]
    pages = [step / "README.md", *steps_pages(step.name)]  # in the order in which they are read
    read = "".join(other.read_text(encoding="utf-8") for other in pages[: pages.index(page)])
    for marker in re.finditer(r"<!-- (?:results:|plot:ladder |plot:bytes )(\w+)", text):
        rungs = [*(step / "kernels" / marker[1]).glob("v*_*.cu"), *(step / "kernels" / marker[1]).glob("pieces.cu")]
        assert rungs
        before = read + text[: marker.start()]
        unexplained = [rung.stem for rung in rungs if f"kernels/{marker[1]}/{rung.name})" not in before]
        assert unexplained == [], f"{marker[0]}: these rungs come later, or not at all"


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_nothing_generated_comes_before_its_words(markdown):
    text = markdown.read_text(encoding="utf-8")
    for marker in re.finditer(r"<!-- (results|plot|models|counts)\b[^\n]*-->", text):
        lines = [line for line in text[: marker.start()].splitlines() if line.strip()]
        assert not lines[-1].startswith("#"), f"{marker[0]} stands directly below a heading"
    first = re.search(r"<!-- results:", text)
    if first and markdown.name == "README.md":
        assert re.search(r"\*[\w ]*ceiling\*", text[: first.start()]), "what the ceiling is comes after a table with it"


# Commands that take longer than 20 s the first time; those that download more than 100 MB.
SLOW = re.compile(
    r"^make (tour|test|setup|-C \.\. build)|^pip |profile .*--device cpu|cmake --build"
    r"|^python (setup|test\w*|benchmark\w*|train)\.py( build_ext.*| --sizes quick| --steps.*)?$"
)


@pytest.mark.parametrize("markdown", MARKDOWN, ids=relative)
def test_long_waits_and_downloads_are_announced(markdown):
    """In the paragraph before the block, or after it: how long; how much. Of each command the first time."""
    lines = markdown.read_text(encoding="utf-8").splitlines()
    known = set()
    for fence in fences(markdown):
        if fence.language != "bash":
            continue
        commands = [line.split("  #")[0].strip() for line in fence.text.splitlines()]
        slow = {line.split(" -k ")[0] for line in commands if SLOW.search(line)}
        around = words_around(lines, fence)
        if slow - known and not re.search(r"\b(seconds?|minutes?)\b", around):
            pytest.fail(f"line {fence.line}: how long does this take? {sorted(slow - known)}")
        known |= slow
        if "network" in fence.tags:
            assert re.search(r"\b[\d.]+ [MG]B\b", around), f"line {fence.line}: how much is downloaded?"


def test_helpers_are_explained_where_they_first_come():
    """Before the second heading below the first quoted rung."""
    page = ROOT / "step1-simple" / "README.md"
    first = next(fence for fence in fences(page) if "source: kernels/" in fence.before)
    section = "\n".join(without_fences(page).splitlines()[first.line :]).split("\n### ")[0]
    names = ("to_compute", "from_compute", "compute_t", "with_type", "as_stream", "KF_BACKEND", "*tag*")
    assert [name for name in names if name not in section] == []


def test_littles_law_is_one_figure():
    """Rate, latency and what must be in flight: of the measurements, and the same wherever they are told."""
    ceilings = json.loads((ROOT / "step1-simple" / "results" / "h200.json").read_text(encoding="utf-8"))["ceilings"]
    rate = 1e9 * ceilings["copy_gb_s"][max(ceilings["copy_gb_s"], key=int)]
    text = (ROOT / "step1-simple" / "results" / "h200-block-sizes.txt").read_text(encoding="utf-8")
    words = text.split("\n\n")[1].splitlines()[-1].split()
    latency = round(1e6 * 1024 * int(words[-4]) * 132 / (1e9 * int(words[-1]) / 2), 1)
    reads, bytes_in_all = rate / 2, rate / 2 * latency / 1e6
    each = f"{bytes_in_all / 132 / 1024:.0f} KB"
    said = {
        "step1-simple/README.md": [
            f"after about {latency} µs",
            f"A copy at {rate / 1e12:.1f} TB/s",
            f"{reads / 1e12:.2f} TB/s · {latency} µs = {bytes_in_all / 1e6:.1f} MB, or {each} on each",
            f"twice the {each} that Little",
        ],
        "step1-simple/pages/limits.md": [
            f"{words[-4]} KB on each of 132 multiprocessors, and {words[-1]} GB/s of which half are reads, "
            f"make a latency of {latency} µs"
        ],
        "docs/cuda_basics.md": [
            f"A load takes about {latency} µs",
            f"a copy at {rate / 1e12:.1f} TB/s reads {reads / 1e12:.2f} TB/s; · {latency} µs = "
            f"{bytes_in_all / 1e6:.1f} MB in flight on the whole GPU = {each} on each",
        ],
        "docs/memory_optimization.md": [f"A load takes about {latency} µs", f"about {each} a multiprocessor"],
    }
    for name, sentences in said.items():
        flat = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert [sentence for sentence in sentences if sentence not in flat] == [], name
