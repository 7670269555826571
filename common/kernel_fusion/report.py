"""Writes tables and plots of results into READMEs and docs, between markers, from results/<gpu>.json of the stages.

A document says where a table or a plot stands, and of what:

    <!-- results:softmax -->
    <!-- /results -->

    <!-- results:softmax dtype=bfloat16 rows=16384 width=1024 -->     only that case
    <!-- /results -->

    <!-- plot:ladder softmax -->                                       its largest case, a bar for each rung and peer
    <!-- /plot -->

    <!-- plot:roofline step2-attention -->                             the largest forward case of each op
    <!-- /plot -->

    <!-- counts -->                                                    the emulation's counts beside a GPU's
    <!-- /counts -->

python -m kernel_fusion.report writes the tables, and draws the plots into results/ of their stage; with --check it only
fails where one is stale.
"""

import argparse
import os
import pathlib
import re
import sys
from collections.abc import Iterator

from kernel_fusion import counts, plots, results, stages, syllabus
from kernel_fusion.console import UserError, milliseconds

TABLE = re.compile(r"(<!-- results:(?P<op>\w+)(?P<select>[^>]*?)\s*-->\n)(?P<body>.*?)(<!-- /results -->)", re.DOTALL)
PLOT = re.compile(r"(<!-- plot:(?P<kind>\w+) (?P<of>[\w-]+) -->\n)(?P<body>.*?)(<!-- /plot -->)", re.DOTALL)
COUNTS = re.compile(r"(<!-- counts -->\n)(?P<body>.*?)(<!-- /counts -->)", re.DOTALL)
NOT_MEASURED = (
    "Not yet measured on a GPU. On a machine with one, `python benchmark.py` in `{folder}` writes its\n"
    "`results/<gpu>.json`, and `kernel-fusion report` the figures into this table.\n"
)


class ReportError(UserError):
    """A marker that does not pair up, or whose words are not understood."""


def documents() -> list[pathlib.Path]:
    """Every document of the repository that may hold tables."""
    found = [stages.ROOT / "README.md", *(stage.path / "README.md" for stage in stages.STAGES)]
    found.append(stages.ROOT / "common" / "simt" / "README.md")
    return [p for p in [*found, *sorted((stages.ROOT / "docs").rglob("*.md"))] if p.exists()]


def render(text: str, document: pathlib.Path) -> str:
    """`text` with every marked table, and every link to a plot, written anew.

    Raises:
        UserError: a marker without its end, an unknown op or stage, or an unknown selection.
    """
    for start, name, pattern in (
        ("results:", "results", TABLE),
        ("plot:", "plot", PLOT),
        ("counts ", "counts", COUNTS),
    ):
        opened, closed = text.count(f"<!-- {start}"), text.count(f"<!-- /{name} -->")
        if opened != closed or opened != len(pattern.findall(text)):
            raise ReportError(
                f"{document}: {opened} `<!-- {start}… -->` and {closed} `<!-- /{name} -->` do not pair up"
            )
    text = COUNTS.sub(lambda m: m.group(1) + counts.comparison() + m.group(3), text)
    text = TABLE.sub(lambda m: m.group(1) + tables(m["op"], _selection(m["select"], document)) + m.group(5), text)
    return PLOT.sub(lambda m: m.group(1) + _links(_plots(m, document), document) + m.group(5), text)


def plots_in(text: str, document: pathlib.Path) -> Iterator[plots.Plot]:
    """The plots that the markers in `text` name."""
    for marker in PLOT.finditer(text):
        yield from _plots(marker, document)


def _plots(marker: re.Match, document: pathlib.Path) -> list[plots.Plot]:
    kind, of = marker["kind"], marker["of"]
    if kind == "ladder":
        return plots.ladders(of)
    if kind != "roofline":
        raise ReportError(f"{document}: a plot is a ladder or a roofline, not a {kind!r}")
    try:
        return plots.rooflines(stages.find(of))
    except ValueError as error:
        raise ReportError(f"{document}: {error}") from error


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


def tables(op: str, select: dict[str, str]) -> str:
    """The tables of `op`: one for each GPU measured, or the rungs without figures."""
    stage = syllabus.stage_of(op)
    parts = []
    for measured in results.load(stage):
        rows = [row for row in measured.rows if row["op"] == op and _selected(row, select)]
        if rows:
            parts.append(_measured(stage, op, rows, measured.environment_of(op), all_cases=not select))
    if not parts:
        parts = [NOT_MEASURED.format(folder=stage.folder) + "\n" + _unmeasured(stage, op)]
    return "\n" + "\n".join(parts) + "\n"


def _selected(row: dict, select: dict[str, str]) -> bool:
    known = {"dtype": row["dtype"], "pass": row["pass"], **{k: str(v) for k, v in row["shape"].items()}}
    return all(known.get(name) == value for name, value in select.items())


def _measured(stage: stages.Stage, op: str, rows: list[dict], environment: dict, *, all_cases: bool) -> str:
    """The largest case rung by rung; then, if there are more, every case in a line."""
    cases, largest = results.cases(rows), results.largest(rows)
    commit = f", commit {environment['commit']}" if environment["commit"] else ""
    lines = [
        f"{environment['gpu'] or 'CPU'}, driver {environment['driver']}, CUDA {environment['cuda']}, torch "
        f"{environment['torch']}, {environment['date']}{commit}.",
        "",
        f"**{results.case_title(largest[0])}** ({_bytes(largest[0]['bytes'])} at the least)",
        "",
        *_ladder(stage, op, largest),
    ]
    if all_cases and len(cases) > 1:
        lines += ["", "Every case: time, and percent of the ceiling.", "", *_matrix(cases)]
    return "\n".join(lines) + "\n"


def _ladder(stage: stages.Stage, op: str, rows: list[dict]) -> list[str]:
    files = {rung.name: rung for rung in syllabus.rungs(stage, op)}
    counted = any(row["dram_bytes"] is not None or row["sectors_per_request"] is not None for row in rows)
    heads = ["rung", "idea", "moves, bytes", "time", "GB/s", "TFLOP/s", "of the ceiling", "over the rung before"]
    heads += ["DRAM bytes, of the least", "sectors a request, load / store"] if counted else []
    lines = [_line(heads), "|---|---|---|" + "---:|" * (len(heads) - 3)]
    before = None
    for row in rows:
        rung = files.get(row["impl"])
        peer = row["kind"] == "peer"
        speedup = f"{before / row['ms']:.2f}×" if before and not peer else ""
        cells = [
            f"*{row['impl']}*" if peer else f"`{row['impl']}`",
            rung.idea if rung else "",
            rung.moves if rung else "",
        ]
        if row["correct"]:
            cells += [milliseconds(row["ms"]), f"{row['gb_s']:.4g}", f"{row['tflop_s']:.3g}"]
            cells += [f"{row['percent_of_ceiling']:.0f} %", speedup]
        else:
            cells += ["wrong result", "", "", "", ""]
        if counted:
            cells += [_dram(row), _sectors(row["sectors_per_request"])]
        lines.append(_line(cells))
        before = row["ms"] if row["correct"] else None
    return lines


def _dram(row: dict) -> str:
    """What memory itself moved, and how many times the bytes that had to be moved."""
    if row["dram_bytes"] is None:
        return ""
    return f"{_bytes(row['dram_bytes'])}, {row['dram_bytes'] / row['bytes']:.3g}×"


def _sectors(found: dict | None) -> str:
    if found is None:
        return ""
    return " / ".join("–" if found[way] is None else f"{found[way]:.3g}" for way in ("load", "store"))


def _matrix(cases: list[list[dict]]) -> list[str]:
    impls = list(dict.fromkeys(row["impl"] for case in cases for row in case))
    lines = [_line(["case", *impls]), "|---|" + "---:|" * len(impls)]
    for case in cases:
        by_impl = {row["impl"]: row for row in case}
        cells = [results.case_title(case[0])]
        for impl in impls:
            row = by_impl.get(impl)
            if row is None:
                cells.append("")
            elif row["correct"]:
                cells.append(f"{milliseconds(row['ms'])} ({row['percent_of_ceiling']:.0f} %)")
            else:
                cells.append("wrong result")
        lines.append(_line(cells))
    return lines


def _unmeasured(stage: stages.Stage, op: str) -> str:
    lines = ["| rung | idea | moves, bytes |", "|---|---|---|"]
    lines += [_line([f"`{rung.name}`", rung.idea, rung.moves]) for rung in syllabus.rungs(stage, op)]
    return "\n".join(lines) + "\n"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _bytes(count: int) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} bytes"


def update(paths: list[pathlib.Path], *, check: bool) -> list[pathlib.Path]:
    """Writes tables and plots of the documents in `paths`, or with `check` only compares.

    Returns:
        The documents and plots that were stale.
    """
    stale = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        fresh = render(text, path)
        if fresh != text:
            stale.append(path)
            if not check:
                results.replace(path, fresh)
        for plot in plots_in(text, path):
            if plot.path not in stale and plot.is_stale():
                stale.append(plot.path)
                if not check:
                    plot.draw()
    return stale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments, here and in `kernel-fusion report`."""
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE", help="default: READMEs and docs")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table or plot is stale")


def run(options: argparse.Namespace) -> int:
    """Does what the arguments say. Returns the exit code."""
    stale = update(options.files or documents(), check=options.check)
    for path in stale:
        print(f"{path}: {'stale; write it anew with: kernel-fusion report' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def main() -> int:
    """python -m kernel_fusion.report [--check] [FILE…]"""
    parser = argparse.ArgumentParser(description="Writes tables and plots of results into READMEs and docs.")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except (UserError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
