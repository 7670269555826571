"""Writes into READMEs and docs what follows from other files: tables and plots of results, and contents.

A document says with markers what stands where:

    <!-- contents -->                                                  links to the headings that follow
    <!-- /contents -->

    <!-- results:softmax -->                                           its largest case, a line for each rung and peer
    <!-- /results -->

    <!-- results:softmax dtype=bfloat16 width=1024 -->                 the largest of those cases
    <!-- /results -->

    <!-- best:h200 softmax width=768; attention D=64 -->               a line each: fastest rung beside fastest peer
    <!-- /best -->

    <!-- models:step4-integration h200-gpt2 -->                        what a step measured that is no op, whole models,
    <!-- /models -->                                                   of all its results or one file

    <!-- plot:ladder softmax -->                                       its largest case, a line for each rung and peer
    <!-- /plot -->

    <!-- plot:bytes softmax -->                                        predicted and measured bytes, and times
    <!-- /plot -->

    <!-- plot:roofline step2-attention -->                             the largest forward case of each op
    <!-- /plot -->

    <!-- plot:sectors naive=4@128 vector=16@16 -->                     of a load: bytes a lane, and to the next lane's
    <!-- /plot -->

    <!-- counts -->                                                    the emulation's counts beside a GPU's
    <!-- /counts -->

Each step that was measured also gets results/README.md, with every case and every figure.

`kernel-fusion report` writes all that, and draws the plots into results/ of their step; with --check it only fails
where something is stale. Either way it fails where the prose claims what the results do not say
(claims.py), and where results have rows of a rung that is gone.
"""

import argparse
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator

from emulator import counts
from kernel_fusion import steps
from kernel_fusion.console import UserError, progress
from kernel_fusion.report import claims, plots, results, syllabus, tables


def _marker(name: str, words: str = "") -> re.Pattern:
    return re.compile(rf"(<!-- {name}{words} -->\n)(?P<body>.*?)(<!-- /{name} -->)", re.DOTALL)


CONTENTS = _marker("contents")
TABLE = _marker("results", r":(?P<op>\w+)(?P<select>[^>]*?)")
BEST = _marker("best", r":(?P<gpu>\w+) (?P<listed>[^>]+?)")
MODELS = _marker("models", r":(?P<step>[\w-]+)(?: (?P<file>[\w-]+))?")
PLOT = _marker("plot", r":(?P<kind>\w+) (?P<of>[^>]+?)")
COUNTS = _marker("counts")
MARKERS = {"contents": CONTENTS, "results": TABLE, "best": BEST, "models": MODELS, "plot": PLOT, "counts": COUNTS}
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class ReportError(UserError):
    """A marker that does not pair up, or whose words are not understood."""


def documents() -> list[pathlib.Path]:
    """Every document of the repository that may hold markers; not the pages that are written as a whole."""
    found = [steps.ROOT / "README.md", steps.ROOT / "emulator" / "README.md"]
    for folder in (*(step.path for step in steps.STEPS), steps.ROOT / "docs"):
        written = [path for path in sorted(folder.rglob("*.md")) if path.parent.name != "results"]
        found += [path for path in written if "build" not in path.relative_to(folder).parts]
    return [path for path in found if path.exists()]


def render(text: str, document: pathlib.Path) -> str:
    """`text` with everything that has a marker written anew.

    Raises:
        UserError: a marker without its end, an unknown op or step, or an unknown selection.
    """
    for name, pattern in MARKERS.items():
        opened = len(re.findall(rf"<!-- {name}\b", text))
        closed = text.count(f"<!-- /{name} -->")
        if opened != closed or opened != len(pattern.findall(text)):
            raise ReportError(f"{document}: {opened} `<!-- {name}… -->` and {closed} `<!-- /{name} -->` do not pair up")
    text = _filled(COUNTS, text, lambda m: counts.comparison())
    text = _filled(TABLE, text, lambda m: tables.compact(m["op"], _selection(m["select"], document), document))
    text = _filled(BEST, text, lambda m: tables.best(m["gpu"], m["listed"], document))
    text = _filled(MODELS, text, lambda m: tables.models(_step(m["step"], document), document, m["file"]))
    text = _filled(PLOT, text, lambda m: _links(_plots(m, document), document))
    return _filled(CONTENTS, text, lambda m: _contents(text[m.end() :]))


def _filled(pattern: re.Pattern, text: str, body: Callable[[re.Match], str]) -> str:
    return pattern.sub(lambda m: m.group(1) + body(m) + m.groups()[-1], text)


def _step(name: str, document: pathlib.Path) -> steps.Step:
    try:
        return steps.find(name)
    except ValueError as error:
        raise ReportError(f"{document}: {error}") from error


def _contents(text: str) -> str:
    """Links to the headings of the second level in `text`, in a paragraph."""
    headings = re.findall(r"^## (.*)$", FENCE.sub("", text), re.MULTILINE)
    return "\n" + " · ".join(f"[{heading}](#{anchor(heading)})" for heading in headings) + "\n\n"


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading: without marks, in small letters, hyphens for blanks."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def plots_in(text: str, document: pathlib.Path) -> Iterator[plots.Plot]:
    """The plots that the markers in `text` name."""
    for marker in PLOT.finditer(text):
        yield from _plots(marker, document)


def _plots(marker: re.Match, document: pathlib.Path) -> list[plots.Plot]:
    kind, of = marker["kind"], marker["of"]
    if kind == "ladder":
        return plots.ladders(of)
    if kind == "bytes":
        return plots.bytes_of(of)
    if kind == "roofline":
        return plots.rooflines(_step(of, document))
    if kind == "sectors":
        step = document.parents[1] if document.parent.name == "pages" else document.parent
        return [plots.sectors(_patterns(of, document), step / "results")]
    raise ReportError(f"{document}: a plot is a ladder, a roofline, bytes or sectors, not {kind!r}")


def _patterns(text: str, document: pathlib.Path) -> dict[str, tuple[int, int]]:
    found = {}
    for word in text.split():
        pattern = re.fullmatch(r"(\w+)=(\d+)@(\d+)", word)
        if pattern is None:
            raise ReportError(f"{document}: in a marker of sectors, `{word}` must be name=BYTES@APART, of a lane")
        found[pattern[1]] = (int(pattern[2]), int(pattern[3]))
    return found


def _links(shown: list[plots.Plot], document: pathlib.Path) -> str:
    if not shown:
        return "\nNo plot yet: not measured on a GPU.\n\n"
    return "\n" + "".join(
        f"![{plot.alt}]({pathlib.Path(os.path.relpath(plot.path, document.parent)).as_posix()})\n\n" for plot in shown
    )


def _selection(text: str, document: pathlib.Path) -> dict[str, str]:
    words = text.split()
    for word in words:
        if "=" not in word:
            raise ReportError(f"{document}: in a marker of results, `{word}` must be name=value")
    return dict(word.split("=", 1) for word in words)


def update(paths: list[pathlib.Path], *, check: bool) -> list[pathlib.Path]:
    """Writes what the documents in `paths` have markers for, or with `check` only compares.

    Returns:
        The documents and plots that were stale.
    """
    stale = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        fresh = render(text, path)
        stale += _written(path, fresh, check)
        stale += [plot for plot in _drawn(plots_in(text, path), check=check) if plot not in stale]
    return stale


def _written(path: pathlib.Path, fresh: str, check: bool) -> list[pathlib.Path]:
    """The file, if it was stale."""
    if path.exists() and path.read_text(encoding="utf-8") == fresh:
        return []
    if not check:
        results.replace(path, fresh)
    return [path]


def update_pages(*, check: bool) -> list[pathlib.Path]:
    """Writes results/README.md of each step that was measured, and its plots, or with `check` only compares.

    Returns:
        Those that were stale.
    """
    stale = []
    for step in steps.STEPS:
        path, fresh = step.path / "results" / tables.PAGE, tables.page(step)
        if fresh is None:
            continue
        stale += _written(path, fresh, check)
        stale += _drawn([plot for op in syllabus.ops(step) for plot in plots.ladders(op)], check=check)
    return stale


def _drawn(shown: Iterable[plots.Plot], *, check: bool) -> list[pathlib.Path]:
    """Draws the plots that are stale, or with `check` only finds them."""
    stale = [plot for plot in shown if plot.is_stale()]
    if not check:
        for plot in stale:
            plot.draw()
    return list(dict.fromkeys(plot.path for plot in stale))


def orphans() -> list[str]:
    """A line for each op and name of a rung that results have rows of, and that has no source file any more."""
    found = []
    for step in steps.STEPS:
        rungs = {op: {"cpu", *(rung.name for rung in syllabus.rungs(step, op))} for op in syllabus.ops(step)}
        for measured in results.load(step):
            named = {(row["op"], row["impl"]): None for row in measured.rows if results.is_ours(row)}
            found += [
                f"{measured.path}: {op} has no rung {name!r} any more; to drop its rows: "
                f"kernel-fusion bench --op {op} --merge"
                for op, name in named
                if op in rungs and name not in rungs[op]
            ]
    return found


def unsupported(paths: list[pathlib.Path]) -> list[str]:
    """A line for each claim in the documents that the results do not bear out."""
    return [line for path in paths for line in claims.unsupported(path.read_text(encoding="utf-8"), path)]


def run(options: argparse.Namespace) -> int:
    """Does what the arguments say. Returns the exit code."""
    with progress("reading results, drawing plots"):
        stale = update(options.files or documents(), check=options.check)
        if not options.files:
            stale += [path for path in update_pages(check=options.check) if path not in stale]
    for path in stale:
        print(f"{path}: {'stale; write it anew with: kernel-fusion report' if options.check else 'written'}")
    wrong = unsupported(options.files or documents()) + orphans()
    for line in wrong:
        print(line)
    return 1 if (options.check and stale) or wrong else 0
