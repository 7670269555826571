"""Tables of results, in Markdown: the short one of a lesson, and the page with every case and every figure."""

import os
import pathlib

from kernel_fusion import steps
from kernel_fusion.console import UserError, byte_count, milliseconds
from kernel_fusion.report import formulas, plots, results, syllabus

PAGE = "README.md"  # in a step's results/
HOST_BOUND = "† The host takes longer to launch this than the GPU to compute it, so the time is the host's."
NOT_MEASURED = (
    "Not yet measured on a GPU. On a machine with one, `python benchmark.py` in `{folder}` writes its\n"
    "`results/<gpu>.json`, and `kernel-fusion report` the figures into this table.\n"
)
PAGE_HEAD = """# Results of {folder}

Every case that was measured, with every figure; the lesson is in [README.md](../README.md). `kernel-fusion report`
writes this page from the `.json` files beside it, so do not edit it by hand.

- *moves*: the bytes that the rung's own header predicts, as a formula and for this case. *At the least* is what the op
  cannot do without: each input read once, each output written once.
- *GB/s*: the bytes at the least, by the time. *TFLOP/s*: the formula's operations, by the time.
- *of the ceiling*: beside the fastest of several simple kernels that move as many bytes, or a large matrix product;
  empty where so few bytes say nothing.
- *DRAM*: what memory itself moved, counted by the GPU. *Sectors*: of 32 bytes, for one load and one store of a warp.

How this is measured, and how to read it: [performance](../../docs/performance.md).
"""


def compact(op: str, select: dict[str, str], document: pathlib.Path) -> str:
    """The table of a lesson: rung by rung the idea, the time, the share of the ceiling, the gain; of the largest case.

    Without results it lists the rungs.

    `select`: only cases with these values, by name. `document`: where the table will stand: its links begin there.
    """
    step = syllabus.step_of(op)
    parts = []
    for measured in results.load(step):
        rows = measured.select(op, select)
        if rows:
            parts.append(_compact(step, op, measured, results.largest(rows), document))
    if not parts:
        parts = [NOT_MEASURED.format(folder=step.folder) + "\n" + _unmeasured(step, op, document)]
    return "\n" + "\n".join(parts) + "\n"


def _compact(step: steps.Step, op: str, measured: results.Results, rows: list[dict], document: pathlib.Path) -> str:
    page = _link(step.path / "results" / PAGE, document)
    lines = [
        f"**{results.case_title(rows[0])}** on {measured.gpu}, {measured.environment_of(op)['date']}. "
        f"[Every case and figure]({page}#{op})",
        "",
        _line(["rung", "idea", "time", "of the ceiling", "over the rung before"]),
        "|---|---|---:|---:|---:|",
    ]
    files = _files(step, op)
    for row, gain in _with_gain(rows):
        rung = files.get(row["impl"])
        lines.append(_line([_name(row, rung, document), rung.idea if rung else "", _time(row), _share(row), gain]))
    return "\n".join([*lines, *_footnote(rows)]) + "\n"


def best(gpu: str, listed: str, document: pathlib.Path) -> str:
    """A line for each case of a list: the fastest rung, the fastest peer, and how much faster the rung is.

    Args:
        gpu: whose results, "h200" for instance.
        listed: "OP name=value …; OP …": of each op the largest case with these values.
        document: where the table will stand: its links begin there.

    Raises:
        UserError: no step has such an op, or nobody measured such a case there.
    """
    lines = [
        _line(["op", "case", "fastest rung", "time", "fastest peer", "time", ""]),
        "|---|---|---|---:|---|---:|---:|",
    ]
    for item in listed.split(";"):
        op, *words = item.split()
        step = syllabus.step_of(op)
        select = dict(word.split("=", 1) for word in words)
        measured = [one for one in results.load(step) if one.path.stem == gpu]
        rows = [row for one in measured for row in one.select(op, select) if row["correct"]]
        if not rows:
            raise UserError(f"{document}: nobody measured {item.strip()} on {gpu}")
        case = results.largest(rows)
        ours, peer = (
            min((row for row in case if (row["kind"] == "peer") == theirs), key=lambda row: row["ms"])
            for theirs in (False, True)
        )
        name = f"[{op}]({_link(step.path / 'results' / PAGE, document)}#{op})"
        rung = _name(ours, _files(step, op).get(ours["impl"]), document)
        gain = f"{peer['ms'] / ours['ms']:.2f}×"
        lines.append(_line([name, results.case_title(case[0]), rung, _time(ours), peer["impl"], _time(peer), gain]))
    return "\n" + "\n".join(lines) + "\n\n"


def page(step: steps.Step) -> str | None:
    """results/README.md of a step: every op, every case, every figure. None where nothing was measured."""
    measured = results.load(step)
    if not measured:
        return None
    document = step.path / "results" / PAGE
    parts = [PAGE_HEAD.format(folder=step.folder)]
    ops = list(dict.fromkeys(row["op"] for found in measured for row in found.rows))
    known = syllabus.ops(step)
    for op in sorted(ops, key=lambda op: (op not in known, ops.index(op))):
        parts.append(f"## {op}\n")
        for found in measured:
            for rows in (found.of(op), found.of(op, packed=True)):
                if rows:
                    parts.append(_full(step, op, rows, found.environment_of(op), document))
        parts += [f"![{plot.alt}]({plot.path.name})\n" for plot in (plots.ladders(op) if op in known else [])]
    return "\n".join(parts)


def _full(step: steps.Step, op: str, rows: list[dict], environment: dict, document: pathlib.Path) -> str:
    """The largest case rung by rung; then, if there are more, every case in a line."""
    cases, largest = results.cases(rows), results.largest(rows)
    lines = [
        f"{environment['gpu'] or 'CPU'}, driver {environment['driver']}, CUDA {environment['cuda']}, torch "
        f"{environment['torch']}, {_when(environment)}.",
        "",
        f"**{results.case_title(largest[0])}** ({byte_count(largest[0]['bytes'])} at the least)",
        "",
        *_ladder(step, op, largest, document),
    ]
    if len(cases) > 1:
        lines += ["", "Every case: time, and percent of the ceiling.", "", *_matrix(cases)]
    for case in cases:
        lines += _counters(step, case, document)
    return "\n".join([*lines, *_footnote(rows)]) + "\n"


def _ladder(step: steps.Step, op: str, rows: list[dict], document: pathlib.Path) -> list[str]:
    files = _files(step, op)
    counted = any(row["dram_bytes"] is not None or row["sectors_per_request"] is not None for row in rows)
    heads = ["rung", *(["moves, bytes"] if files else []), "time", "GB/s", "TFLOP/s", "of the ceiling"]
    heads += ["over the rung before", *(["DRAM, of the least", "sectors, load / store"] if counted else [])]
    texts = 2 if files else 1
    lines = [_line(heads), "|" + "---|" * texts + "---:|" * (len(heads) - texts)]
    for row, gain in _with_gain(rows):
        rung = files.get(row["impl"])
        cells = [_name(row, rung, document)]
        cells += [_moves(rung, row)] if files else []
        cells += [_time(row)]
        right = row["correct"]
        cells += [f"{row['gb_s']:.4g}", f"{row['tflop_s']:.3g}", _share(row), gain] if right else [""] * 4
        cells += [_dram(row), _sectors(row["sectors_per_request"])] if counted else []
        lines.append(_line(cells))
    return lines


COUNTED_UNITS = {
    "tensor": "tensor cores",
    "issue slots": "issue slots",
    "XU": "special functions",
    "L1": "L1 and shared memory",
    "DRAM": "DRAM",
}


def _counters(step: steps.Step, rows: list[dict], document: pathlib.Path) -> list[str]:
    """What Nsight Compute counted of the case's rungs: how busy units were. Nothing where it did not."""
    counted = [row for row in rows if row.get("profile", {}).get("busy")]
    if not counted:
        return []
    files = _files(step, rows[0]["op"])
    heads = ["rung", *COUNTED_UNITS.values(), "bank conflicts", "occupancy", "registers", "the limit"]
    lines = [
        "",
        f"What `kernel-fusion profile` says of {results.case_title(rows[0])}: for what part of the time units are busy "
        "(of several kernels, in the longest), and which part of the passes over shared memory bank conflicts added. "
        "Registers are a thread's at the launch; a rung may share them out anew.",
        "",
        _line(heads),
        "|---|" + "---:|" * (len(heads) - 2) + "---|",
    ]
    for row in counted:
        found = row["profile"]
        shares = [*(found["busy"].get(unit) for unit in COUNTED_UNITS), found["conflicts"], found["occupancy"]]
        cells = ["" if share is None else f"{share:.0f} %" for share in shares]
        name = _name(row, files.get(row["impl"]), document)
        lines.append(_line([name, *cells, str(found["registers"]), found["limit"]]))
    return lines


def _moves(rung: syllabus.RungFile | None, row: dict) -> str:
    """The header's formula, and what it comes to, where the formula is the whole of it."""
    if rung is None:
        return ""
    predicted = formulas.evaluate(rung.moves, row["shape"], row["dtype"])
    if predicted is None or predicted <= 0.99 * row["bytes"]:  # the header goes on: "… bytes, and K and V"
        return rung.moves
    return f"{rung.moves} = {byte_count(predicted)}"


def _matrix(cases: list[list[dict]]) -> list[str]:
    impls = list(dict.fromkeys(row["impl"] for case in cases for row in case))
    lines = [_line(["case", *impls]), "|---|" + "---:|" * len(impls)]
    for case in cases:
        by_impl = {row["impl"]: row for row in case}
        cells = [_time(by_impl[impl], share=True) if impl in by_impl else "" for impl in impls]
        lines.append(_line([results.case_title(case[0]), *cells]))
    return lines


def models(step: steps.Step, document: pathlib.Path, file: str | None = None) -> str:
    """What a step measured that is no op of its own, such as a whole model: a line a case, a column a way. `file`: only
    what is in results of that name."""
    known = syllabus.ops(step)
    parts = []
    for measured in results.load(step):
        rows = [row for row in measured.rows if row["op"] not in known]
        if rows and file in (None, measured.path.stem):
            parts.append(_models(measured, rows, document))
    if not parts:
        parts = ["Not yet measured on a GPU.\n"]
    return "\n" + "\n".join(parts) + "\n"


def _models(measured: results.Results, rows: list[dict], document: pathlib.Path) -> str:
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    sizes = list(dict.fromkeys(name for row in rows for name in row["shape"]))
    environment = measured.environment
    lines = [
        f"{measured.gpu}, {environment['date']}, torch {environment['torch']}. [Every figure]"
        f"({_link(measured.path.with_name(PAGE), document)})",
        "",
        _line(["", *sizes, "dtype", *impls]),
        "|---|" + "---:|" * len(sizes) + "---|" + "---:|" * len(impls),
    ]
    for case in results.cases(rows):
        by_impl = {row["impl"]: row for row in case}
        shape = [_size(case[0]["shape"].get(name)) for name in sizes]
        times = [_time(by_impl[impl]) if impl in by_impl else "" for impl in impls]
        lines.append(_line([case[0]["op"], *shape, case[0]["dtype"], *times]))
    return "\n".join([*lines, *_footnote(rows)]) + "\n"


def _size(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e6:.0f} M" if size >= 10_000_000 else str(size)


def _files(step: steps.Step, op: str) -> dict[str, syllabus.RungFile]:
    """The files of an op's rungs by name; none where it is no op of the step's own, such as a whole model."""
    return {rung.name: rung for rung in syllabus.rungs(step, op)} if op in syllabus.ops(step) else {}


# ---- cells ----


def _with_gain(rows: list[dict]) -> list[tuple[dict, str]]:
    """Each row with what it gained over the rung before it. Peers gain nothing here."""
    found, before = [], None
    for row in rows:
        gain = f"{before / row['ms']:.2f}×" if before and row["kind"] == "rung" and row["correct"] else ""
        found.append((row, gain))
        before = row["ms"] if row["correct"] else None
    return found


def _name(row: dict, rung: syllabus.RungFile | None, document: pathlib.Path) -> str:
    if row["kind"] == "peer":
        return f"*{row['impl']}*"
    return f"[`{row['impl']}`]({_link(rung.path, document)})" if rung else f"`{row['impl']}`"


def _time(row: dict, share: bool = False) -> str:
    if not row["correct"]:
        return "wrong result"
    of_ceiling = f" ({_share(row)})" if share and _share(row) else ""
    return milliseconds(row["ms"]) + ("†" if row.get("host_bound") else "") + of_ceiling


def _share(row: dict) -> str:
    share = row["percent_of_ceiling"]
    return f"{share:.0f} %" if row["correct"] and share is not None else ""


def _footnote(rows: list[dict]) -> list[str]:
    lines = ["", HOST_BOUND] if any(row["host_bound"] for row in rows) else []
    later: dict[str, list[str]] = {}
    for row in rows:
        if "run" in row:
            later.setdefault(_when(row["run"]), []).append(f"`{row['impl']}`")
    for when, names in later.items():
        lines += ["", f"Of another run, {when}: {', '.join(dict.fromkeys(names))}."]
    return lines


def _when(run: dict) -> str:
    return f"{run['date']}, commit {run['commit']}" if run["commit"] else run["date"]


def _dram(row: dict) -> str:
    """What memory itself moved, and how many times the bytes that had to be moved."""
    if row["dram_bytes"] is None:
        return ""
    return f"{byte_count(row['dram_bytes'])}, {row['dram_bytes'] / row['bytes']:.3g}×"


def _sectors(found: dict | None) -> str:
    if found is None:
        return ""
    return " / ".join("–" if found[way] is None else f"{found[way]:.3g}" for way in ("load", "store"))


def _unmeasured(step: steps.Step, op: str, document: pathlib.Path) -> str:
    lines = ["| rung | idea |", "|---|---|"]
    lines += [_line([f"[`{rung.name}`]({_link(rung.path, document)})", rung.idea]) for rung in syllabus.rungs(step, op)]
    return "\n".join(lines) + "\n"


def _link(path: pathlib.Path, document: pathlib.Path) -> str:
    return pathlib.Path(os.path.relpath(path, document.parent)).as_posix()


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
