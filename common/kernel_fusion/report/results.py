"""Results files, results/<gpu>.json of a step: read, written, and cut into cases.

A file is JSON of three parts. "environment": where and when its figures were measured; under "ops" the commit and date
of ops that a later run measured. "ceilings": what the machine can do at all. "rows": a row a line, known by its op,
pass, shape, dtype and impl. A row holds what was measured, in four digits, and the ceiling of the same run; what
`derived` gives is written only where a row has something else. "run" is the commit and date of a row that was measured
later than its op's others, "again" of a time that `recheck --best` has replaced.

A row never moves. A new one comes behind those before it in the order of the step's benchmark.py: its ops, its cases,
the rungs by number, the peers. So a text depends neither on the order of measuring nor on who measured before.
"""

import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

from kernel_fusion import steps
from kernel_fusion.bench import noise
from kernel_fusion.console import UserError

# The order of a row's fields in its line. What else a row has comes last.
FIELDS = (
    *("op", "pass", "shape", "dtype", "impl", "kind", "ms", "ms_quartiles", "host_bound", "correct"),
    *("bound", "ceiling", "bytes", "flops", "gb_s", "tflop_s", "percent_of_ceiling"),
    *("dram_bytes", "sectors_per_request", "run", "again", "profile"),
)
RUNG = re.compile(r"v\d+(_|$)|cpu$")  # how the name of a rung begins
PIECES = "pieces"  # an op's parts, each by its own `auto`: ours, and no rung


class ResultsError(UserError):
    """Results that cannot be read, or that do not fit what is to be written into them."""


class Results(NamedTuple):
    """A results file: where figures come from, what the machine can do at all, and the figures."""

    path: pathlib.Path
    environment: dict
    ceilings: dict
    rows: list[dict]

    @property
    def gpu(self) -> str:
        """The GPU's name, for people."""
        return self.environment["gpu"] or "CPU"

    def of(self, op: str, packed: bool = False) -> list[dict]:
        """The rows of `op`: those of packed rows, whose shape has `documents`, or the others.

        Both may have the same H and D. Who asks for these means a batch, if nothing is said of documents.
        """
        return [row for row in self.rows if row["op"] == op and ("documents" in row["shape"]) == packed]

    def select(self, op: str, values: dict[str, str]) -> list[dict]:
        """The rows of `op` with these values: of the shape, the dtype, the pass. Packed rows, if `documents` is one."""

        def has_them(row: dict) -> bool:
            sizes = {name: str(size) for name, size in row["shape"].items()}
            known = {"dtype": row["dtype"], "pass": row["pass"], **sizes}
            return all(known.get(name) == value for name, value in values.items())

        return [row for row in self.of(op, packed="documents" in values) if has_them(row)]

    def environment_of(self, op: str) -> dict:
        """Where the figures of `op` come from: a run that measured only some ops has a commit and a date of its own.

        So may a row: its "run".
        """
        return {**self.environment, **self.environment.get("ops", {}).get(op, {})}


@overload
def rounded(value: None) -> None: ...
@overload
def rounded(value: float) -> float: ...
def rounded(value: float | None) -> float | None:
    """`value` as results hold it: four digits, without a point where they need none."""
    if value is None:
        return None
    figure = float(f"{value:.4g}")
    return int(figure) if figure.is_integer() else figure


def kind_of(impl: str) -> str:
    """What an implementation is, by its name: "rung", "plan" for `pieces`, or "peer"."""
    return "rung" if RUNG.match(impl) else "plan" if impl == PIECES else "peer"


def is_ours(row: dict) -> bool:
    """Whether this is a rung's row, or that of `pieces`, and no peer's."""
    return row["kind"] != "peer"


def derived(row: dict) -> dict:
    """What need not stand in a file: fields as they are in most rows, and what follows from others.

    Those are `ms`, `bytes`, `flops`, and `ceiling`: GB/s or, where `bound` is "arithmetic", TFLOP/s; none where so few
    bytes say nothing.
    """
    rates = {"memory": row["bytes"] / row["ms"] / 1e6, "arithmetic": row["flops"] / row["ms"] / 1e9}
    bound, ceiling = row.get("bound", "memory"), row.get("ceiling")
    return {
        "pass": "forward",
        "kind": kind_of(row["impl"]),
        "ms_quartiles": None,
        "host_bound": False,
        "bound": "memory",
        "gb_s": rounded(rates["memory"]),
        "tflop_s": rounded(rates["arithmetic"]),
        "percent_of_ceiling": rounded(100 * rates[bound] / ceiling) if ceiling else None,
        "dram_bytes": None,
        "sectors_per_request": None,
        "correct": True,
    }


def as_stored(row: dict) -> dict:
    """`row` as a file has it: without what is derived, its fields in order."""
    known = derived(row)
    names = sorted(row, key=lambda name: FIELDS.index(name) if name in FIELDS else len(FIELDS))
    return {name: row[name] for name in names if row[name] != known.get(name)}


def read(path: pathlib.Path) -> Results:
    """The contents of a results file.

    Raises:
        ResultsError: the file is not in the form of results.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        rows = [{**derived(row), **row} for row in loaded["rows"]]
        return Results(path, loaded["environment"], loaded["ceilings"], rows)
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ResultsError(f"{path}: not in the form of results: {error!r}") from error


def load(step: steps.Step) -> list[Results]:
    """All results files of a step, by name of file."""
    return [read(path) for path in sorted((step.path / "results").glob("*.json"))]


def write(results: Results) -> None:
    """Writes a results file, beside its place and then renamed, so that it is never half there."""
    rows = [as_stored(row) for row in results.rows]
    replace(results.path, as_text({"environment": results.environment, "ceilings": results.ceilings, "rows": rows}))


def as_text(contents: dict, levels: int = 3) -> str:
    """JSON as our files have it: a line for an object's entry down to so many levels, and for a list's element."""
    return _lines(contents, levels, "") + "\n"


def _lines(value: Any, levels: int, indent: str) -> str:
    if not value or not levels or not isinstance(value, (dict, list)):
        return json.dumps(value, allow_nan=False)
    inner = f"{indent} "
    if isinstance(value, list):
        first, last, lines = "[", "]", [json.dumps(one, allow_nan=False) for one in value]
    else:
        first, last = "{", "}"
        lines = [f"{json.dumps(key)}: {_lines(one, levels - 1, inner)}" for key, one in value.items()]
    return f"{first}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{last}"


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file beside its place, then renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


def spread(row: dict) -> noise.Spread:
    """The median of a row's time and its quartiles, for the rule of `noise`.

    Rows that were kept only as a printed table have no quartiles: they count as one repeat.
    """
    return noise.Spread(row["ms"], *(row["ms_quartiles"] or (row["ms"], row["ms"])))


def case_key(row: dict) -> tuple:
    """What rows of one case have in common."""
    return (row["op"], row["pass"], row["dtype"], tuple(row["shape"].items()))


def key(row: dict) -> tuple:
    """What a row is known by: one measured anew takes the place of that with the same."""
    return (*case_key(row), row["impl"])


def placed(rows: list[dict], before: list[dict], order: Iterable[tuple]) -> list[dict]:
    """`rows` where they belong in a file.

    Args:
        rows: in any order.
        before: what the file had: of these, none moves.
        order: keys, all of new rows among them. A new row comes behind the nearest before it that is there.
    """
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    keys, place = list(dict.fromkeys(map(key, before))), 0
    for one in dict.fromkeys(order):
        if one in keys:
            place = keys.index(one) + 1
        elif one in found:
            keys.insert(place, one)
            place += 1
    first: dict[tuple, int] = {}  # of an op and of a case, whose rows stand together
    for one in keys:
        first.setdefault(one[:1], len(first))
        first.setdefault(one[:-1], len(first))
    keys.sort(key=lambda one: (first[one[:1]], first[one[:-1]]))
    return [row for one in keys for row in found.get(one, [])]


def cases(rows: list[dict]) -> list[list[dict]]:
    """`rows`, case by case."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(case_key(row), []).append(row)
    return list(found.values())


def largest(rows: list[dict]) -> list[dict]:
    """The rows of the case that moves most, forward before backward."""
    return max(cases(rows), key=lambda case: (case[0]["pass"] == "forward", case[0]["bytes"], case[0]["flops"]))


def case_title(row: dict) -> str:
    """ "rows 4096, width 1024, bfloat16". It says "backward" where the op's name does not."""
    sizes = ", ".join(f"{name} {size}" for name, size in row["shape"].items())
    backward = "backward, " if row["pass"] == "backward" and not row["op"].endswith("_backward") else ""
    return f"{backward}{sizes}, {row['dtype']}"


def behind(measured: Results, op: str, chosen: Callable[[dict], str]) -> dict[str, dict[str, float]]:
    """How the rung that a rule chooses stands against the others.

    `chosen`: the rule: called with a row of the case, gives a rung's name.
    Returns by case, and then by rung: the chosen rung's time as a multiple of that rung's. 1.0 where neither is faster
    beyond noise. Raises ResultsError: the file has no row of the op, or none of the rung that is chosen.
    """
    found = {}
    for case in cases([row for row in measured.of(op) if is_ours(row)]):
        rungs = {row["impl"]: spread(row) for row in case}
        name = chosen(case[0])
        if name not in rungs:
            raise ResultsError(f"{measured.path}: {op} {case_title(case[0])} has no row of rung '{name}'")
        ours = rungs[name]
        found[case_title(case[0])] = {
            rung: ours.median / theirs.median if noise.faster(ours, theirs) or noise.faster(theirs, ours) else 1.0
            for rung, theirs in rungs.items()
        }
    if not found:
        raise ResultsError(f"{measured.path}: no row of a rung of {op}")
    return found
