"""Results files, results/<gpu>.json of a stage: read, written, and cut into cases."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from kernel_fusion import noise, stages
from kernel_fusion.console import UserError


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

    def of(self, op: str) -> list[dict]:
        """The rows of `op`."""
        return [row for row in self.rows if row["op"] == op]

    def environment_of(self, op: str) -> dict:
        """Where the figures of `op` come from: a run that measured only some ops has a commit and a date of its own."""
        return {**self.environment, **self.environment.get("ops", {}).get(op, {})}


def rounded(value: float | None) -> float | None:
    """`value` as results hold it: four digits."""
    return None if value is None else float(f"{value:.4g}")


def read(path: pathlib.Path) -> Results:
    """The contents of a results file.

    Raises:
        ResultsError: the file is not in the form of results.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        return Results(path, loaded["environment"], loaded["ceilings"], loaded["rows"])
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path}: not in the form of results: {error!r}") from error


def load(stage: stages.Stage) -> list[Results]:
    """All results files of a stage, by name of file."""
    return [read(path) for path in sorted((stage.path / "results").glob("*.json"))]


def write(results: Results) -> None:
    """Writes a results file, beside its place and then renamed, so that it is never half there."""
    contents = {"environment": results.environment, "ceilings": results.ceilings, "rows": results.rows}
    replace(results.path, as_text(contents))


def as_text(contents: dict) -> str:
    """JSON as our files have it."""
    return json.dumps(contents, indent=1, allow_nan=False) + "\n"


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


def cases(rows: list[dict]) -> list[list[dict]]:
    """`rows`, case by case."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(case_key(row), []).append(row)
    return list(found.values())


def largest(rows: list[dict]) -> list[dict]:
    """The rows of the case that moves most, forward before backward."""
    return max(cases(rows), key=lambda case: (case[0]["pass"] == "forward", case[0]["bytes"], case[0]["flops"]))


def selected(row: dict, select: dict[str, str]) -> bool:
    """Whether the row has these values: of its shape, its dtype, its pass."""
    known = {"dtype": row["dtype"], "pass": row["pass"], **{name: str(size) for name, size in row["shape"].items()}}
    return all(known.get(name) == value for name, value in select.items())


def case_title(row: dict) -> str:
    """ "rows 4096, width 1024, bfloat16". It says "backward" where the op's name does not."""
    sizes = ", ".join(f"{name} {size}" for name, size in row["shape"].items())
    backward = "backward, " if row["pass"] == "backward" and not row["op"].endswith("_backward") else ""
    return f"{backward}{sizes}, {row['dtype']}"


def behind(measured: Results, op: str, chosen: Callable[[dict], str]) -> dict[str, dict[str, float]]:
    """How the rung that a rule chooses stands against the others.

    Args:
        measured: a results file.
        op: the op.
        chosen: the rule: called with a row of the case, gives a rung's name.

    Returns:
        By case, and then by rung: the chosen rung's time as a multiple of that rung's. 1.0 where neither is faster
        beyond noise.

    Raises:
        ResultsError: the file has no row of the op, or none of the rung that is chosen.
    """
    found = {}
    for case in cases([row for row in measured.rows if row["op"] == op and row["kind"] == "rung"]):
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
