"""What the prose of a document says about results, in a form that can be checked: a comment beside the sentence.

    As fast as a copy, and half as long as v1.
    <!-- claim: scale: ceiling(v4_vector) > 95, v1_chunk > 2 * v4_vector -->

    <!-- claim: bias_gelu width=3071: v4_exp > 2 * v5_any_width -->       in every case of this width

After the op may stand what its cases are selected by, `pass=forward` for instance: the claim is about all of these.
Without it, it is about the largest. A name is the time of a rung or peer; `ceiling(name)` is its percentage of the
ceiling, `dram(name)` the bytes that memory moved by those that had to be moved, and `tensor(name)` the percentage of
cycles in which the tensor cores were busy.

A claim is about every GPU that has results of its op, or, with `gpu=h200`, about that of results/h200.json. Where one
of them was measured before a rung was written, or without counters, the others decide.
"""

import operator
import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from kernel_fusion import steps
from kernel_fusion.console import UserError, milliseconds
from kernel_fusion.report import results, syllabus

CLAIM = re.compile(r"<!-- claim: (?P<op>\w+)(?P<select>( \w+=[\w.-]+)*): (?P<conditions>[^\n]+?) -->")
CONDITION = re.compile(r"(?P<left>.+?) (?P<than>[<>]) (?P<right>.+)")
SIDE = re.compile(
    r"(?:(?P<factor>[\d.]+) \* )?(?:(?P<field>ceiling|dram|tensor)\((?P<of>[^()]+)\)|(?P<name>[a-zA-Z][\w .-]*))"
)
NUMBER = re.compile(r"\d+(\.\d+)?")
THAN = {"<": operator.lt, ">": operator.gt}


class ClaimError(UserError):
    """A claim that is not in the form of one, or about something that nobody measured."""


class NotMeasuredError(ClaimError):
    """A claim about an implementation, or a counter of it, that a case has no result of."""


class Side(NamedTuple):
    """One side of a comparison: its value, and that for people."""

    value: float
    text: str


def unsupported(text: str, document: pathlib.Path) -> Iterator[str]:
    """A line for each claim in `text` that the results do not bear out.

    Raises:
        UserError: a claim is in another form, or of an op, a case or an implementation that nobody measured.
    """
    if text.count("<!-- claim") != len(CLAIM.findall(text)):
        raise ClaimError(f"{document}: a claim must read `<!-- claim: OP [name=value…]: A < B, … -->`")
    for claim in CLAIM.finditer(text):
        where = f"{document}:{text.count(chr(10), 0, claim.start()) + 1}"
        gpus = _cases(claim, where)
        for condition in claim["conditions"].split(", "):
            not_measured = []
            for cases in gpus:
                found, missing = _contradictions(condition, cases, where)
                yield from (f"{where}: `{condition}` does not hold for {claim['op']}, {says}" for says in found)
                if 0 < len(missing) < len(cases):
                    raise missing[0]
                not_measured += missing[:1]
            if len(not_measured) == len(gpus) > 0:
                raise not_measured[0]


def _contradictions(condition: str, cases: list[list[dict]], where: str) -> tuple[list[str], list[NotMeasuredError]]:
    """What the cases of one GPU have instead; and an error for each that cannot tell."""
    found, missing = [], []
    for case in cases:
        try:
            found.append(_contradiction(condition, case, where))
        except NotMeasuredError as error:
            missing.append(error)
    return [says for says in found if says], missing


def _cases(claim: re.Match, where: str) -> list[list[list[dict]]]:
    """The cases that the claim is about, by GPU measured."""
    select = dict(word.split("=") for word in claim["select"].split())
    gpu = select.pop("gpu", None)
    found = []
    measured = [one for step in steps.STEPS for one in results.load(step) if one.of(claim["op"])]
    if not measured:
        syllabus.step_of(claim["op"])  # an unknown op is an error
    for one in measured:
        rows = one.select(claim["op"], select)
        if rows and gpu in (None, one.path.stem):
            found.append(results.cases(rows) if select else [results.largest(rows)])
    if measured and not found:
        raise ClaimError(f"{where}: nobody measured {claim['op']}{claim['select']}")
    return found


def _contradiction(condition: str, case: list[dict], where: str) -> str:
    """What the case has instead, or ""."""
    parts = CONDITION.fullmatch(condition)
    if parts is None:
        raise ClaimError(f"{where}: `{condition}` is not of the form A < B")
    left, right = (_side(parts[side], case, where) for side in ("left", "right"))
    if THAN[parts["than"]](left.value, right.value):
        return ""
    return f"{results.case_title(case[0])}: {left.text} and {right.text}"


def _side(text: str, case: list[dict], where: str) -> Side:
    if NUMBER.fullmatch(text):
        return Side(float(text), text)
    parts = SIDE.fullmatch(text)
    if parts is None:
        fields = "`ceiling(…)`, `dram(…)` or `tensor(…)`"
        raise ClaimError(f"{where}: `{text}` is not a number, a rung or a peer, nor {fields} of one")
    name = parts["of"] or parts["name"]
    row = next((row for row in case if row["impl"] == name), None)
    if row is None:
        raise NotMeasuredError(f"{where}: {results.case_title(case[0])} has no result of {name!r}")
    if not row["correct"]:
        raise ClaimError(f"{where}: {results.case_title(case[0])} has no right result of {name!r}")
    value, shown = _quantity(row, parts["field"])
    if value is None:
        raise NotMeasuredError(f"{where}: {results.case_title(case[0])} has no {parts['field']} of {name!r}")
    return Side(
        float(parts["factor"] or 1) * value, f"{text} is {parts['factor'] + ' * ' if parts['factor'] else ''}{shown}"
    )


def _quantity(row: dict, field: str | None) -> tuple[float | None, str]:
    if field == "ceiling":
        return row["percent_of_ceiling"], f"{row['percent_of_ceiling']} %"
    if field == "dram":
        ratio = row["dram_bytes"] / row["bytes"] if row["dram_bytes"] is not None else None
        return ratio, f"{ratio or 0:.3g}×"
    if field == "tensor":
        busy = row["profile"]["busy"].get("tensor") if "profile" in row else None
        return busy, f"{busy} %"
    return row["ms"], milliseconds(row["ms"])
