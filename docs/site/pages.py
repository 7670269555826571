"""The site's pages, in the form that Sphinx reads: the repository's Markdown where it lies, and pages made of sources.

None of it is stored. `stage` writes it into a folder that build.py hands to Sphinx:

    README.md of a folder           its index; other Markdown keeps its name
    a notebook                      a page with its pictures
    kernels/<op>                    the op: its rungs, its headers, its results
    kernels/<op>/v4_vector.cu       the rung: its header, its code, what changed since the rung before
    a puzzle's or exercise's answer its recorded run, its code
    what else a page links to       its code, or of a folder what is in it
"""

import difflib
import json
import pathlib
import posixpath
import re
import shutil
from collections.abc import Collection, Iterable, Iterator

import runs

from kernel_fusion import steps
from kernel_fusion.checks.repository import files, relative
from kernel_fusion.checks.text import steps_pages
from kernel_fusion.console import byte_count
from kernel_fusion.learn import exercises, traces
from kernel_fusion.report import results, syllabus
from kernel_fusion.report.documents import FENCE
from kernel_fusion.steps import ROOT

Path = pathlib.PurePosixPath  # from the repository's root, and of a page from the stage's
LEXERS = {".cu": "cuda", ".h": "cuda", ".cpp": "cpp", ".py": "python", ".yml": "yaml", ".yaml": "yaml"}
COPIED = (".svg", ".json")  # as they are
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!&+-])")  # in Markdown
DRAWN = re.compile(r"\S {3,}\S|[─│└┐┌┘├┤]")  # a comment's line that is no prose
CHAPTERS = {
    "Beside the steps": [
        *("docs/cuda_basics.md", "docs/memory_optimization.md", "docs/puzzles/README.md", "docs/debugging.md"),
        *("docs/gdb.md", "docs/performance.md", "docs/lessons_learned.md", "docs/faq.md", "emulator/README.md"),
    ],
    "Reference": ["results.md", "docs/glossary.md", "api/python.md", "api/cpp.md"],
    "The project": ["setup/environment.md", "setup/cloud.md", "CONTRIBUTING.md", "CHANGELOG.md"],
}


class SiteError(Exception):
    """What the site cannot be made of."""


def page_of(source: Path) -> Path:
    """The page of a file or folder of the repository. What is copied as it is keeps its place."""
    if (ROOT / source).is_dir():
        return source / "index.md"
    if source.name == "README.md":
        return source.with_name("index.md")
    if source.suffix == ".ipynb":
        return source.with_suffix(".md")
    return source if source.suffix in (".md", *COPIED) else source.with_name(f"{source.name}.md")


def link(page: Path, target: Path) -> str:
    """The address of `target`, a path of the repository, in `page`."""
    return posixpath.relpath(page_of(target), page.parent)


def linked(text: str, source: Path, made: Collection[str] = ()) -> tuple[str, set[Path]]:
    """The Markdown of `source` with links that lead to pages, and the paths of the repository that it links to.

    `made`: files that are written beside the page.

    Raises:
        SiteError: a link to what is not there.
    """
    found = set()

    def changed(match: re.Match) -> str:
        target, mark, anchor = match.group().partition("#")
        if re.match(r"[a-z]+:", target) or not target or target in made:
            return match.group()
        path = Path(posixpath.normpath(source.parent / target))
        if not (ROOT / path).exists():
            raise SiteError(f"{source}: a link to {target}, which is not there")
        found.add(path)
        return link(page_of(source), path) + mark + anchor

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(changed, text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, LINK.sub(changed, text[end:])]), found


def escaped(text: str) -> str:
    """`text` as Markdown that shows it as it is."""
    return SPECIAL.sub(r"\\\1", text)


def fenced(text: str, language: str, *options: str) -> str:
    """A block of code for Sphinx; options such as ":linenos:"."""
    return "\n".join([f"~~~~~~{{code-block}} {language}", *options, "", text, "~~~~~~", ""])


def prose(lines: Iterable[str], indent: str = "") -> str:
    """A comment's lines, without their marks, as paragraphs; what is drawn in them as it is."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        part = paragraph.split("\n")
        if any(DRAWN.search(line.strip()) for line in part):
            paragraphs.append(fenced(paragraph, "text"))
        else:
            paragraphs.append(escaped(" ".join(line.strip() for line in part)))
    text = "\n\n".join(paragraphs)
    return "\n".join(indent + line if line else "" for line in text.splitlines()).lstrip()


def language(path: Path) -> str:
    return LEXERS.get(path.suffix, "text")


class Stage:
    """The pages, until all are known: then those that stand in no list of contents are marked as such, and written."""

    def __init__(self) -> None:
        self.pages: dict[Path, str] = {}
        self.listed: set[Path] = {Path("index.md")}
        self.wanted: set[Path] = set()  # sources that pages link to

    def add(self, page: Path, text: str) -> None:
        self.pages[page] = text

    def contents(self, page: Path, entries: Iterable[Path], caption: str = "") -> str:
        """A list of contents that the reader sees beside the pages; entries are pages."""
        entries = list(entries)
        self.listed |= set(entries)
        names = [posixpath.relpath(entry.with_suffix(""), page.parent) for entry in entries]
        options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
        return "\n".join(["", "", "```{toctree}", *options, "", *names, "```", ""])

    def markdown(self, source: Path, more: str = "") -> None:
        """The page of a Markdown file, with `more` behind it."""
        text, found = linked(with_runs((ROOT / source).read_text(encoding="utf-8"), source), source)
        self.wanted |= found
        self.add(page_of(source), text + more)

    def write(self, folder: pathlib.Path) -> None:
        for page, text in self.pages.items():
            place = folder / page
            place.parent.mkdir(parents=True, exist_ok=True)
            head = {"orphan": page not in self.listed, "hide-toc": page.name.endswith((".cu.md", ".h.md"))}
            lines = [f"{name}: true" for name, said in head.items() if said]
            place.write_text("\n".join(["---", *lines, "---", "", text]) if lines else text, encoding="utf-8")
        for source in self.wanted:
            if source.suffix in COPIED:
                (folder / source).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, folder / source)


# ---- rungs, ops and other sources ----


def header_fields(text: str) -> tuple[list[tuple[str, list[str]]], int]:
    """What the comment at the top of a rung says, by the names of its parts, and how many lines it has.

    A name stands in the columns before its text, which are blank in the lines after.
    """
    fields: list[tuple[str, list[str]]] = []
    lines = text.splitlines()
    count = next((number for number, line in enumerate(lines) if not line.startswith("//")), len(lines))
    for line in lines[2:count]:
        label, rest = line[2:13].strip(), line[13:]
        if label:
            fields.append((label, []))
        if fields:
            fields[-1][1].append(rest)
    return fields, count


def new_lines(before: str, after: str) -> list[int]:
    """The numbers, from 1, of the lines of `after` that `before` does not have; blank ones aside."""
    lines = after.splitlines()
    same = difflib.SequenceMatcher(None, before.splitlines(), lines, autojunk=False)
    changed = [number for tag, _, _, first, end in same.get_opcodes() if tag != "equal" for number in range(first, end)]
    return [number + 1 for number in changed if lines[number].strip()]


def beside(*parts: str) -> str:
    """Parts that stand beside each other where there is room."""
    return '<div class="beside">\n\n' + "\n".join(f"<div>\n\n{part}\n</div>\n" for part in parts) + "\n</div>\n"


def as_path(path: pathlib.Path) -> Path:
    return Path(relative(path))


def rung_page(rung: syllabus.RungFile, before: syllabus.RungFile | None, after: syllabus.RungFile | None) -> str:
    """A rung: its header, its code beside what changed since the rung before, and the ways on."""
    source = as_path(rung.path)
    page, text = page_of(source), rung.path.read_text(encoding="utf-8")
    fields, count = header_fields(text)
    code = "\n".join(text.splitlines()[count:])
    ways = [f"[{rung.step.folder}]({link(page, Path(rung.step.folder))})", f"[{rung.op}](index.md)"]
    ways += [f"before: [{before.name}]({before.path.name}.md)"] if before else []
    ways += [f"next: [{after.name}]({after.path.name}.md)"] if after else []
    listing = [":linenos:", f":lineno-start: {count + 1}", f":caption: {source.name}"]
    parts = [fenced(code, "cuda", *listing)]
    if before:
        old = before.path.read_text(encoding="utf-8")
        old = "\n".join(old.splitlines()[header_fields(old)[1] :])
        if marked := new_lines(old, code):
            listing.append(f":emphasize-lines: {','.join(map(str, marked))}")
        changes = list(difflib.unified_diff(old.splitlines(), code.splitlines(), before.name, rung.name, lineterm=""))
        caption = f":caption: since {before.name}: {len(marked)} new lines, marked on the other side"
        parts = [fenced(code, "cuda", *listing), fenced("\n".join(changes), "diff", caption)]
    said = "".join(f"{escaped(label)}\n: {prose(lines, '  ')}\n\n" for label, lines in fields)
    return f"# {rung.op} {rung.name}: {escaped(rung.idea)}\n\n{' · '.join(ways)}\n\n{said}{beside(*parts)}"


def op_page(step: steps.Step, op: str, lessons: list[Path]) -> str:
    """An op: the pages that teach it, its rungs, its headers, and its results."""
    folder = Path(step.folder, "kernels", op)
    page = page_of(folder)
    taught = ", ".join(f"[{title_of(source)}]({link(page, source)})" for source in lessons)
    lines = [f"# {op}", "", f"Taught in {taught}." if taught else "", ""]
    lines += ["| rung | idea | limits | lines | changed |", "|---|---|---|---:|---:|"]
    before = None
    for rung in syllabus.rungs(step, op):
        changed = str(len(new_lines(*(one.path.read_text("utf-8") for one in (before, rung))))) if before else ""
        cells = [f"[{rung.name}]({rung.path.name}.md)", escaped(rung.idea), escaped(rung.limits)]
        lines.append("| " + " | ".join([*cells, str(rung.lines()), changed]) + " |")
        before = rung
    headers = [f"[{path.name}]({path.name}.md)" for path in sorted((ROOT / folder).glob("*.h"))]
    lines += ["", "*Changed*: lines that the rung before does not have. " + f"Headers: {', '.join(headers)}.", ""]
    if any(measured.of(op) for measured in results.load(step)):
        lines += ["## Results", "", results_view(page, [step], op)]
    return "\n".join(lines)


def title_of(source: Path) -> str:
    return re.search(r"^# (.*)$", (ROOT / source).read_text(encoding="utf-8"), re.MULTILINE)[1]


def source_page(source: Path) -> str:
    text = (ROOT / source).read_text(encoding="utf-8")
    return f"# {escaped(source.name)}\n\n`{source}`\n\n{fenced(text.rstrip(), language(source), ':linenos:')}"


def run_page(solution: pathlib.Path) -> str:
    """A solution: its recorded run, and its code."""
    source = as_path(solution)
    page, text = page_of(source), solution.read_text(encoding="utf-8")
    back, emulation = link(page, as_path(exercises.page_of(solution))), link(page, Path("emulator/README.md"))
    return (
        f"# {escaped(source.name)}: a recorded run\n\n[back]({back}) · [code](#the-program)\n\n"
        f"The answer's first launch, as [the emulation]({emulation}#recorded-runs) ran it. "
        f"A step is what one thread reads, writes or waits for.\n\n{runs.place(solution)}\n\n"
        f"## The program\n\n{fenced(text.rstrip(), language(source), ':linenos:')}"
    )


def with_runs(text: str, source: Path) -> str:
    """The Markdown of `source`, if it is a page of exercises with a link below each whose run is recorded."""
    recorded = {one.name for one in traces.solutions() if as_path(exercises.page_of(one)) == source}

    def more(part: re.Match) -> str:
        return part[0] + f"\n[The answer, run thread by thread](solutions/{part[1]})\n\n" * (part[1] in recorded)

    return re.sub(r"^### (\w+\.cu): .*?(?=^##|\Z)", more, text, flags=re.MULTILINE | re.DOTALL)


def folder_page(folder: Path, known: set[Path]) -> str:
    """What is in a folder of the repository; `known`: pages, to which it may link."""
    inside = [as_path(path) for path in files("", under=str(folder)) if not path.name.endswith((".so", ".tmp"))]
    depth = len(folder.parts) + 1
    lines = []
    for one in sorted({Path(*path.parts[:depth]) for path in inside}):
        name = escaped(one.name)
        lines.append(f"- [{name}]({link(page_of(folder), one)})" if page_of(one) in known else f"- {name}")
    return "\n".join([f"# {escaped(str(folder))}", "", *lines, ""])


# ---- results ----


def results_view(page: Path, wanted: list[steps.Step], op: str = "") -> str:
    """Where results.js puts tables and plots: of one op, or of those that the reader chooses."""
    up = "../" * (len(page.parts) - 1)
    scripts = "".join(f'<script src="{up}_static/results-{step.folder}.js"></script>\n' for step in wanted)
    named = f' data-op="{op}"' if op else ""
    return (
        f"Choose what was measured where; point at a mark, or go there with the tab key, for its figures; a column's "
        f"name sorts by it.\n\n"
        f'<div class="results"{named} data-root="{up}"><p>These figures need JavaScript.</p></div>\n'
        f'{scripts}<script src="{up}_static/results.js"></script>\n'
    )


def results_script(step: steps.Step) -> str:
    """The figures of a step, as the page's script reads them."""
    shown = []
    for measured in results.load(step):
        for case in results.cases(measured.rows):
            first = case[0]
            folder = ROOT / step.folder / "kernels" / first["op"]
            rows = [
                {
                    "impl": row["impl"],
                    "ours": results.is_ours(row),
                    "page": f"{relative(folder)}/{row['impl']}.cu.html"
                    if (folder / f"{row['impl']}.cu").exists()
                    else "",
                    **{name: row[name] for name in ("ms", "gb_s", "tflop_s", "percent_of_ceiling", "correct")},
                }
                for row in case
            ]
            name = {"step": step.folder, "gpu": measured.gpu, "op": first["op"], "case": results.case_title(first)}
            sizes = {"bytes": first["bytes"], "moved": byte_count(first["bytes"]), "bound": first["bound"]}
            shown.append({**name, **sizes, "rows": rows})
    return f"(window.kfResults ??= []).push(...{json.dumps(shown, ensure_ascii=False, separators=(',', ':'))});\n"


# ---- notebooks ----


def notebook(source: Path, folder: pathlib.Path) -> tuple[str, set[Path]]:
    """A stored notebook as Markdown, and what it links to; its pictures are written into `folder`."""
    from nbconvert import MarkdownExporter

    text, resources = MarkdownExporter().from_filename(str(ROOT / source))
    (folder / source.parent).mkdir(parents=True, exist_ok=True)
    for name, data in resources["outputs"].items():
        (folder / source.parent / name).write_bytes(data)
    return linked(text.replace("![png]", "![What the code above draws]"), source, resources["outputs"])


# ---- all ----


def stage(folder: pathlib.Path, api: Iterator[tuple[Path, str]], more_sources: set[Path]) -> None:
    """Writes all pages into `folder`, which is empty.

    Args:
        folder: for Sphinx.
        api: the pages of the reference.
        more_sources: what these link to.

    Raises:
        SiteError: a page links to what is not there.
    """
    site = Stage()
    site.wanted |= more_sources
    for step in steps.STEPS:
        stage_step(site, step)
    for page, text in api:
        site.add(page, text)
    for solution in traces.solutions():
        site.add(page_of(as_path(solution)), run_page(solution))
    site.add(Path("results.md"), f"# Results\n\n{results_view(Path('results.md'), list(steps.STEPS))}")
    chapters = {"Steps": [f"{step.folder}/README.md" for step in steps.STEPS], **CHAPTERS}
    index = Path("index.md")
    more = "".join(site.contents(index, [page_of(Path(name)) for name in names], of) for of, names in chapters.items())
    api_pages = [page for page in site.pages if page.parts[0] == "api" and len(page.parts) > 2]
    for kind in ("python", "cpp"):
        page = Path("api", f"{kind}.md")
        site.pages[page] += site.contents(page, [one for one in api_pages if one.parts[1] == kind])
    site.markdown(Path("README.md"), more=more)
    for path in files(".md"):
        if page_of(as_path(path)) not in site.pages:
            site.markdown(as_path(path))
    stage_sources(site, folder)
    site.write(folder)
    for step in steps.STEPS:
        (folder / "scripts").mkdir(exist_ok=True)
        (folder / "scripts" / f"results-{step.folder}.js").write_text(results_script(step), encoding="utf-8")


def stage_step(site: Stage, step: steps.Step) -> None:
    """A step's own page and its list of contents; its ops and their rungs."""
    own = Path(step.folder)
    readme, kernels = own / "README.md", own / "kernels"
    pages = [as_path(path) for path in steps_pages(step.folder)]
    ops = syllabus.ops(step)
    rest = [own / "exercises" / "README.md", own / "lesson.ipynb", kernels, own / "results" / "README.md"]
    site.markdown(readme, more=site.contents(page_of(readme), [page_of(source) for source in [*pages, *rest]]))
    site.wanted.add(own / "lesson.ipynb")
    lines = [f"# Kernels of {step.folder}", ""]
    for op in ops:
        lessons = [source for source in [readme, *pages] if f"kernels/{op}/" in (ROOT / source).read_text("utf-8")]
        site.add(page_of(kernels / op), op_page(step, op, lessons[:3]))
        lines.append(f"- [{op}]({op}/index.md): {', '.join(one.name for one in syllabus.rungs(step, op))}")
        ladder = syllabus.rungs(step, op)
        for before, rung, after in zip([None, *ladder], ladder, [*ladder[1:], None], strict=False):
            site.add(page_of(as_path(rung.path)), rung_page(rung, before, after))
        site.wanted |= {as_path(path) for path in rung.path.parent.glob("*.h")}
    more = site.contents(page_of(kernels), [page_of(kernels / op) for op in ops])
    site.add(page_of(kernels), "\n".join(lines) + more)


def stage_sources(site: Stage, folder: pathlib.Path) -> None:
    """What pages link to, and what these link to. A folder's list links to those of its files that have a page."""
    folders = []
    while todo := {one for one in site.wanted if page_of(one) not in site.pages and one.suffix not in COPIED}:
        for source in sorted(todo):
            if source.suffix == ".ipynb":
                text, found = notebook(source, folder)
                site.add(page_of(source), text)
                site.wanted |= found
            elif (ROOT / source).is_dir():
                folders.append(source)
                site.add(page_of(source), "")
            else:
                site.add(page_of(source), source_page(source))
    for source in folders:
        site.add(page_of(source), folder_page(source, set(site.pages)))
