"""The site's pages, made of Markdown and sources, and the pages' figures. That Sphinx takes them `make docs` shows."""

import re

import pytest

from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT, files, relative
from kernel_fusion.console import UserError
from kernel_fusion.learn import exercises, traces
from kernel_fusion.report import syllabus
from kernel_fusion.testing import raises

runs = steps.load_file("runs", ROOT / "docs" / "site" / "runs.py")
pages = steps.load_file("pages", ROOT / "docs" / "site" / "pages.py")
reference = steps.load_file("reference", ROOT / "docs" / "site" / "reference.py")
build = steps.load_file("build", ROOT / "docs" / "site" / "build.py")
figures = steps.load_file("figures", ROOT / "docs" / "figures.py")
README = pages.Path("step1-simple", "README.md")


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("[a](pages/dropout.md#x)", "[a](pages/dropout.md#x)", "step1-simple/pages/dropout.md"),
        ("[a](../README.md)", "[a](../index.md)", "README.md"),
        ("[a](test.py)", "[a](test.py.md)", "step1-simple/test.py"),
        ("[a](exercises/solutions)", "[a](exercises/solutions/index.md)", "step1-simple/exercises/solutions"),
        ("[a](lesson.ipynb)", "[a](lesson.md)", "step1-simple/lesson.ipynb"),
        ("![a](results/sectors.svg)", "![a](results/sectors.svg)", "step1-simple/results/sectors.svg"),
        ("[a](https://pytorch.org)", "[a](https://pytorch.org)", None),
        ("[a](#next)", "[a](#next)", None),
        ("```text\n[a](test.py)\n```", "```text\n[a](test.py)\n```", None),
    ],
)
def test_links_lead_to_pages(before, after, found):
    assert pages.linked(before, README) == (after, {pages.Path(found)} if found else set())


def test_a_link_that_leads_nowhere_is_an_error():
    with raises(pages.SiteError, "step1-simple/README.md: a link to pages/none.md, which is not there"):
        pages.linked("[a](pages/none.md)", README)


def test_a_rungs_header_is_read_by_its_parts():
    text = "// scale v2: title\n//\n// Idea      one\n//           two\n//\n// Since v1  three\n#include\n"
    assert pages.header_fields(text) == ([("Idea", ["one", "two", ""]), ("Since v1", ["three"])], 6)


def test_prose_is_escaped_and_drawings_stay():
    assert pages.prose(["a *b*", "c_", "", "x ─ y"]) == "a \\*b\\* c\\_\n\n" + pages.fenced("x ─ y", "text").rstrip()


def test_new_lines_are_those_that_the_rung_before_lacks():
    assert pages.new_lines("a\nb\nc\n", "a\nx\n\nc\nd\n") == [2, 5]


def test_a_rungs_page_shows_all_of_its_code_and_what_changed():
    before, rung = syllabus.rungs(steps.STEPS[0], "scale")[1:3]
    page, source = pages.rung_page(rung, before, None), rung.path.read_text(encoding="utf-8")
    fields, count = pages.header_fields(source)
    assert "\n".join(source.splitlines()[count:]) in page
    assert all(f"\n{label}\n: " in page for label, _ in fields)
    assert f"before: [{before.name}]({before.name}.cu.md)" in page
    (marked,) = re.findall(r":emphasize-lines: (\S+)", page)
    added = re.findall(r"^\+(?!\+\+)(.*\S.*)$", page.split("{code-block} diff")[1], re.MULTILINE)
    assert [source.splitlines()[count:][int(number) - 1] for number in marked.split(",")] == added


@pytest.mark.parametrize("page", sorted({exercises.page_of(one) for one in traces.solutions()}), ids=relative)
def test_each_exercise_leads_to_the_recorded_run_of_its_answer(page):
    source = pages.as_path(page)
    text, found = pages.linked(pages.with_runs(page.read_text(encoding="utf-8"), source), source)
    for solution in (one for one in traces.solutions() if exercises.page_of(one) == page):
        section = text.split(f"### {solution.name}: ")[1].split("\n##")[0]
        assert section.rstrip().endswith(f"\n\n[The answer, run thread by thread](solutions/{solution.name}.md)")
        assert pages.as_path(solution) in found
        assert pages.run_page(solution).count(runs.place(solution)) == 1


def test_a_page_without_recorded_runs_stays_as_it_is():
    text = (ROOT / "step4-integration" / "exercises" / "README.md").read_text(encoding="utf-8")
    assert pages.with_runs(text, pages.Path("step4-integration/exercises/README.md")) == text


@pytest.fixture
def recording(monkeypatch, tmp_path):
    """Two solutions, whose traces are made up; returns them and the names of those that were made."""
    found, made = [tmp_path / "a.cu", tmp_path / "b.cu"], []
    for solution in found:
        solution.write_text("1")
    monkeypatch.setattr(runs, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(runs.traces, "solutions", lambda: found)
    monkeypatch.setattr(runs.traces, "make", lambda solution: made.append(solution.stem) or solution.stem)
    monkeypatch.setattr(runs.trace, "html", lambda found: f"<p>{found}</p>")
    return found, made


def test_runs_are_kept_until_what_they_are_made_of_changes(recording, monkeypatch):
    (first, second), made = recording
    assert (runs.main(), runs.main(), made) == (0, 0, ["a", "b"])
    second.write_text("2")
    assert (runs.main(), made) == (0, ["a", "b", "b"])
    assert sorted(runs.KEPT.iterdir()) == sorted([runs.kept(first), runs.kept(second)])
    before = runs.shared()
    runs.shared.cache_clear()
    monkeypatch.setattr(runs, "files", lambda *endings, under="": [first])
    assert runs.shared() != before
    runs.shared.cache_clear()
    page = first.with_suffix(".html")
    page.write_text(f"x{runs.place(first)}y")
    runs.kept(first).write_text("<p>a</p>")
    runs.put(first, page)
    assert page.read_text() == "x<p>a</p>y"


def test_a_run_that_cannot_be_recorded_is_named(recording, monkeypatch, capsys):
    def refused(solution):
        raise UserError("needs g++")

    monkeypatch.setattr(runs.traces, "make", refused)
    assert runs.main() == 1
    assert capsys.readouterr().err == "docs: the run of a.cu cannot be recorded: needs g++\n"


def test_results_have_every_figure_once():
    script = pages.results_script(steps.STEPS[3])
    rows = sum(len(measured.rows) for measured in pages.results.load(steps.STEPS[3]))
    assert script.count('"impl":') == rows > 0


def test_declarations_are_read_with_the_comments_above():
    header = """// What it is for.
#pragma once
// Doubles.
template <class T>
__device__ T doubled(T x) {
  // A note on a statement.
  return twice(x);
}
// ---- a part ----
inline int plain() { return 0; }
// Three.
inline int three() { return 3; }
// Two of them.
struct Pair {
  int first;
  // The other one.
  int second = 0;
};
"""
    top, found = reference.declarations(header)
    assert top == ["What it is for."]
    said = [(one.comment, one.code) for one in found]
    assert said == [
        (["Doubles."], "template <class T>\n__device__ T doubled(T x)"),
        (["Three."], "inline int three()"),
        (["Two of them."], "struct Pair"),
        (["The other one."], "int second = 0;"),
    ]


def test_a_module_that_cannot_be_imported_says_so():
    assert "cannot be imported here: No module named 'no\\_such\\_module'" in reference.module("no_such_module")


def test_a_module_that_fails_fails_the_site(tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        reference.module("fails")


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">, <a class="x" href="b.html#not">, <img src="none.svg">')
    (tmp_path / "b.html").write_text('<p id="there"><a href="https://pytorch.org"><a href="#there">')
    assert build.dead_links(tmp_path) == ["a.html: b.html#not", "a.html: none.svg"]


@pytest.mark.parametrize("paint", figures.FIGURES, ids=lambda paint: paint.__name__)
def test_figures_are_as_the_script_draws_them_and_stand_in_a_page(paint):
    """To draw them anew: python docs/figures.py"""
    path = figures.FOLDER / f"{paint.__name__}.svg"
    assert path.read_text(encoding="utf-8") == figures.figure(paint)
    shown = re.compile(rf"!\[[^\]]{{40,}}\]\([./a-z]*figures/{path.name}\)")
    assert [page for page in files(".md") if shown.search(page.read_text(encoding="utf-8"))]
