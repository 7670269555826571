"""Writes the tables of results into READMEs and docs, between markers, from results/<gpu>.json of the stages.

A document says where a table stands, and of what:

    <!-- results:softmax -->
    <!-- /results -->

    <!-- results:softmax dtype=bfloat16 rows=16384 width=1024 -->     only that case
    <!-- /results -->

python -m kernel_fusion.report writes the tables; with --check it only fails where one is stale.
"""

import argparse
import json
import os
import pathlib
import re
import sys

from kernel_fusion import stages, syllabus
from kernel_fusion.console import UserError, milliseconds

MARKED = re.compile(r"(<!-- results:(?P<op>\w+)(?P<select>[^>]*?)\s*-->\n)(?P<body>.*?)(<!-- /results -->)", re.DOTALL)
NOT_MEASURED = (
    "Not yet measured on a GPU. On a machine with one, `python benchmark.py` in `{folder}` writes its\n"
    "`results/<gpu>.json`, and `kernel-fusion report` the figures into this table.\n"
)


class ReportError(UserError):
    """A marker that names something unknown, or results that cannot be read."""


def documents() -> list[pathlib.Path]:
    """Every document of the repository that may hold tables."""
    found = [stages.ROOT / "README.md", *(stage.path / "README.md" for stage in stages.STAGES)]
    return [p for p in [*found, *sorted((stages.ROOT / "docs").rglob("*.md"))] if p.exists()]


def stage_of(op: str) -> stages.Stage:
    """The stage whose folder `kernels` has `op`.

    Raises:
        ReportError: none has.
    """
    for stage in stages.STAGES:
        if op in syllabus.ops(stage):
            return stage
    known = ", ".join(op for stage in stages.STAGES for op in syllabus.ops(stage))
    raise ReportError(f"no stage has an op {op!r}; there are {known}")


def load_results(stage: stages.Stage) -> list[dict]:
    """The contents of the stage's results files, by name of file.

    Raises:
        ReportError: a file is not in the form of results.
    """
    loaded = []
    for path in sorted((stage.path / "results").glob("*.json")):
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            loaded.append({key: results[key] for key in ("environment", "ceilings", "rows")})
        except (ValueError, KeyError, TypeError) as error:
            raise ReportError(f"{path}: not in the form of results: {error!r}") from error
    return loaded


def render(text: str, where: str = "document") -> str:
    """`text` with every marked table written anew.

    Raises:
        ReportError: a marker without its end, an unknown op or an unknown selection.
    """
    opened, closed = text.count("<!-- results:"), text.count("<!-- /results -->")
    if opened != closed or opened != len(MARKED.findall(text)):
        raise ReportError(f"{where}: {opened} `<!-- results:… -->` and {closed} `<!-- /results -->` do not pair up")
    return MARKED.sub(lambda m: m.group(1) + tables(m["op"], _selection(m["select"], where)) + m.group(5), text)


def _selection(text: str, where: str) -> dict[str, str]:
    words = text.split()
    for word in words:
        if "=" not in word:
            raise ReportError(f"{where}: in a marker of results, `{word}` must be name=value")
    return dict(word.split("=", 1) for word in words)


def tables(op: str, select: dict[str, str]) -> str:
    """The tables of `op`: one for each GPU measured, or the rungs without figures."""
    stage = stage_of(op)
    parts = []
    for results in load_results(stage):
        rows = [row for row in results["rows"] if row["op"] == op and _selected(row, select)]
        if rows:
            parts.append(_measured(stage, op, rows, results["environment"], all_cases=not select))
    if not parts:
        parts = [NOT_MEASURED.format(folder=stage.folder) + "\n" + _unmeasured(stage, op)]
    return "\n" + "\n".join(parts) + "\n"


def _selected(row: dict, select: dict[str, str]) -> bool:
    known = {"dtype": row["dtype"], "pass": row["pass"], **{k: str(v) for k, v in row["shape"].items()}}
    return all(known.get(name) == value for name, value in select.items())


def _case(row: dict) -> tuple:
    return (row["pass"], row["dtype"], tuple(row["shape"].items()))


def _case_title(row: dict) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in row["shape"].items())
    backward = "backward, " if row["pass"] == "backward" else ""
    return f"{backward}{sizes}, {row['dtype']}"


def _measured(stage: stages.Stage, op: str, rows: list[dict], environment: dict, *, all_cases: bool) -> str:
    """The largest case rung by rung; then, if there are more, every case in a line."""
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        cases.setdefault(_case(row), []).append(row)
    largest = max(cases.values(), key=lambda case: (case[0]["pass"] == "forward", case[0]["bytes"], case[0]["flops"]))
    commit = f", commit {environment['commit']}" if environment["commit"] else ""
    lines = [
        f"{environment['gpu'] or 'CPU'}, driver {environment['driver']}, CUDA {environment['cuda']}, torch "
        f"{environment['torch']}, {environment['date']}{commit}.",
        "",
        f"**{_case_title(largest[0])}** ({_bytes(largest[0]['bytes'])} at the least)",
        "",
        *_ladder(stage, op, largest),
    ]
    if all_cases and len(cases) > 1:
        lines += ["", "Every case: time, and percent of the ceiling.", "", *_matrix(list(cases.values()))]
    return "\n".join(lines) + "\n"


def _ladder(stage: stages.Stage, op: str, rows: list[dict]) -> list[str]:
    files = {rung.name: rung for rung in syllabus.rungs(stage, op)}
    lines = [
        "| rung | idea | moves, bytes | time | GB/s | TFLOP/s | of the ceiling | over the rung before |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
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
        lines.append(_line(cells))
        before = row["ms"] if row["correct"] else None
    return lines


def _matrix(cases: list[list[dict]]) -> list[str]:
    impls = list(dict.fromkeys(row["impl"] for case in cases for row in case))
    lines = [_line(["case", *impls]), "|---|" + "---:|" * len(impls)]
    for case in cases:
        by_impl = {row["impl"]: row for row in case}
        cells = [_case_title(case[0])]
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
    """Writes the tables into `paths`, or with `check` only compares. Returns the documents that were stale."""
    stale = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        fresh = render(text, str(path))
        if fresh == text:
            continue
        stale.append(path)
        if not check:
            beside = path.with_name(f"{path.name}.tmp")
            beside.write_text(fresh, encoding="utf-8")
            os.replace(beside, path)
    return stale


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments, here and in `kernel-fusion report`."""
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE", help="default: READMEs and docs")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table is stale")


def run(options: argparse.Namespace) -> int:
    """Does what the arguments say. Returns the exit code."""
    stale = update(options.files or documents(), check=options.check)
    for path in stale:
        print(f"{path}: {'stale; write it anew with: kernel-fusion report' if options.check else 'written'}")
    return 1 if options.check and stale else 0


def main() -> int:
    """python -m kernel_fusion.report [--check] [FILE…]"""
    parser = argparse.ArgumentParser(description="Writes the tables of results into READMEs and docs.")
    add_arguments(parser)
    try:
        return run(parser.parse_args())
    except (UserError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
