"""Plots of results files, as SVG: the ladder of an op, and the roofline of a stage.

Each plot carries a digest of the figures it was drawn from, so that a stale one is found without drawing it again: what
matplotlib writes differs from version to version.
"""

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from kernel_fusion import results, stages, syllabus
from kernel_fusion.console import milliseconds

FORM = 1  # raise it when the drawing changes: every plot is then stale
RUNG, PEER, ROOF, FAINT = "#1f5fa8", "#8a8a8a", "#b3412f", "#c9c9c9"
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
NAME_HEIGHT = 0.042  # of the plot
LOGARITHMIC_FROM = 12  # the longest bar by the shortest: above this, short bars could not be told apart
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kernel-fusion",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",  # in a dark page too
}


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot that can be drawn.

    Args:
        path: where it belongs.
        alt: what it shows, in words.
        data: the figures in it.
        paint: called with `data`, gives a matplotlib figure.
    """

    path: pathlib.Path
    alt: str
    data: dict
    paint: Callable[[dict], Any]

    def digest(self) -> str:
        """Of the figures and of the form of the drawing."""
        text = json.dumps({"form": FORM, **self.data}, sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def is_stale(self) -> bool:
        """True where the file is missing or was drawn from other figures."""
        return not self.path.exists() or f">{self.digest()}<" not in self.path.read_text(encoding="utf-8")

    def draw(self) -> None:
        """Writes the file, beside its place and then renamed."""
        import matplotlib

        matplotlib.use("Agg")
        with matplotlib.rc_context(STYLE):
            figure = self.paint(self.data)
            beside = self.path.with_name(f"{self.path.name}.tmp")
            metadata = {"Identifier": self.digest(), "Title": self.alt, "Creator": "kernel-fusion report", "Date": None}
            figure.savefig(beside, format="svg", metadata=metadata)
        os.replace(beside, self.path)


def _bound(row: dict, ceilings: dict) -> str:
    """Which ceiling the row's percentage refers to: that of memory or that of arithmetic. The nearer one."""
    copy, matmul = ceilings["copy_gb_s"].get(str(row["bytes"])), ceilings["matmul_tflop_s"]
    of_copy = row["gb_s"] * 100 / row["percent_of_ceiling"]
    of_matmul = row["tflop_s"] * 100 / row["percent_of_ceiling"]
    if not copy or not matmul or not of_matmul:
        return "memory" if copy or not of_matmul else "arithmetic"
    return "memory" if abs(math.log(of_copy / copy)) <= abs(math.log(of_matmul / matmul)) else "arithmetic"


# ---- the ladder ----


def ladders(op: str) -> list[Plot]:
    """The ladder of `op`, once for each GPU measured: its largest case, the time of every rung and peer.

    Raises:
        UserError: no stage has the op.
    """
    return [
        _ladder(measured, op, results.largest(rows))
        for measured in results.load(syllabus.stage_of(op))
        if (rows := [row for row in measured.rows if row["op"] == op])
    ]


def _ladder(measured: results.Results, op: str, rows: list[dict]) -> Plot:
    first = rows[0]
    ceiling = first["ms"] * first["percent_of_ceiling"] / 100
    memory = _bound(first, measured.ceilings) == "memory"
    what = "a copy of as many bytes" if memory else "a large matrix product's rate"
    data = {
        "title": f"{op}: {results.case_title(first)}",
        "gpu": measured.gpu,
        "ceiling_ms": float(f"{ceiling:.3g}"),
        "ceiling": f"{what}: {milliseconds(ceiling)}",
        "bars": [[row["impl"], row["kind"], row["ms"] if row["correct"] else None] for row in rows],
    }
    times = ", ".join(f"{name} {_time(ms)}" for name, _, ms in data["bars"])
    alt = f"{data['title']}, on {measured.gpu}. {times}. Ceiling, {data['ceiling']}"
    return Plot(measured.path.with_name(f"{measured.path.stem}-{op}-ladder.svg"), alt, data, paint_ladder)


def _time(ms: float | None) -> str:
    return "wrong result" if ms is None else milliseconds(ms)


def paint_ladder(data: dict) -> Any:
    """A bar for each rung and peer, from the top, and the ceiling as a line."""
    from matplotlib.figure import Figure

    bars, ceiling = data["bars"], data["ceiling_ms"]
    times = [ms for _, _, ms in bars if ms is not None] + [ceiling]
    logarithmic = max(times) / min(times) > LOGARITHMIC_FROM
    figure = Figure(figsize=(8.5, 1.35 + 0.3 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    colours = [RUNG if kind == "rung" else PEER for _, kind, _ in bars]
    start = min(times) / 3 if logarithmic else 0
    places = range(len(bars))
    axes.barh(places, [(ms or start) - start for _, _, ms in bars], left=start, color=colours, height=0.66)
    axes.axvline(ceiling, color=ROOF, linewidth=1.4)
    for place, (_, _, ms) in zip(places, bars, strict=True):
        text = axes.annotate(
            _time(ms), (ms or start, place), (4, 0), textcoords="offset points", va="center", color="black"
        )
        text.set_bbox(BEHIND_TEXT)
    axes.set_yticks(places, [name for name, _, _ in bars])
    axes.set_ylim(len(bars) - 0.45, -0.55)
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(start, max(times) * (max(times) / start) ** 0.12)
    else:
        axes.set_xlim(0, max(times) * 1.14)
    axes.xaxis.set_major_formatter(lambda value, position: milliseconds(value) if value > 0 else "0")
    axes.set_xlabel(f"time{', logarithmic' if logarithmic else ''} (blue: our rungs, grey: peers)")
    axes.tick_params(axis="y", length=0)
    left, right = axes.get_xlim()
    across = math.log(ceiling / left) / math.log(right / left) if logarithmic else ceiling / right
    axes.annotate(
        data["ceiling"],
        (ceiling, 1),
        (3 if across < 0.6 else -3, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if across < 0.6 else "right",
        va="bottom",
        color=ROOF,
    )
    figure.suptitle(f"{data['title']}, on {data['gpu']}", fontsize=10, x=0.01, ha="left")
    return figure


# ---- the roofline ----


def rooflines(stage: stages.Stage) -> list[Plot]:
    """The roofline of `stage`, once for each GPU measured: every rung and peer at the largest forward case of each op.

    An op without floating-point operations has no place on it.
    """
    ops = syllabus.ops(stage)
    shown = []
    for measured in results.load(stage):
        rows = [row for row in measured.rows if row["op"] in ops and row["pass"] == "forward" and row["flops"]]
        if rows:
            shown.append(_roofline(measured, stage, rows))
    return shown


def _roofline(measured: results.Results, stage: stages.Stage, rows: list[dict]) -> Plot:
    cases = [results.largest([row for row in rows if row["op"] == op]) for op in dict.fromkeys(r["op"] for r in rows)]
    copies = {int(size): rate for size, rate in measured.ceilings["copy_gb_s"].items()}
    data = {
        "gpu": measured.gpu,
        "stage": stage.folder,
        "copy_tb_s": copies[max(copies)] / 1000,
        "matmul_tflop_s": measured.ceilings["matmul_tflop_s"],
        "ops": [
            {
                "op": case[0]["op"],
                "case": results.case_title(case[0]),
                "intensity": case[0]["flops"] / case[0]["bytes"],
                "points": [[row["impl"], row["kind"], row["tflop_s"]] for row in case if row["correct"]],
            }
            for case in cases
        ],
    }
    best = "; ".join(
        f"{op['op']}: {op['intensity']:.3g} FLOP/byte, fastest is {name} with {rate:.3g} TFLOP/s"
        for op in data["ops"]
        for name, _, rate in [max(op["points"], key=lambda point: point[2], default=("nothing right", "", 0.0))]
    )
    alt = f"Roofline of {stage.folder} on {measured.gpu}. {best}"
    return Plot(measured.path.with_name(f"{measured.path.stem}-roofline.svg"), alt, data, paint_roofline)


def paint_roofline(data: dict) -> Any:
    """The same roofs for each op, with its own rungs and peers named and those of the others faint."""
    from matplotlib.figure import Figure

    ops, copy, matmul = data["ops"], data["copy_tb_s"], data["matmul_tflop_s"]
    columns = min(2, len(ops))
    lines = math.ceil(len(ops) / columns)
    figure = Figure(figsize=(5.0 * columns, 0.4 + 4.3 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    intensities = [op["intensity"] for op in ops]
    rates = [rate for op in ops for _, _, rate in op["points"]]
    ridge = matmul / copy if matmul else max(intensities)
    left = min([*intensities, ridge]) / 4
    right = max(left * (max(intensities) / left) ** (1 / 0.58), 3 * ridge)  # names stand to the right of their points
    top = (matmul or right * copy) * 3
    bottom = min([*rates, left * copy]) / 2
    for op in ops:  # names go downwards from the fastest, away from the roof: there must be room below it
        fastest, room = math.log(max((rate for _, _, rate in op["points"]), default=top)), _room(op)
        bottom = min(bottom, math.exp((fastest - room * math.log(top)) / (1 - room)))
    for axes, op in zip(grid.flat, ops, strict=False):
        axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
        axes.plot([left, ridge, right], [left * copy, ridge * copy, matmul or right * copy], color=ROOF, linewidth=1.4)
        axes.axvline(op["intensity"], color=FAINT, linewidth=0.8, zorder=0)
        for other in (other for other in ops if other is not op):
            axes.plot([other["intensity"]] * len(other["points"]), [p[2] for p in other["points"]], ".", color=FAINT)
        axes.set_title(f"{op['op']}\n{op['case']}", fontsize=9, loc="left")
        roofs = f"copy: {copy:.3g} TB/s" + (f"\nmatrix product: {matmul:.3g} TFLOP/s" if matmul else "")
        text = axes.annotate(roofs, (0.02, 0.98), xycoords="axes fraction", va="top", fontsize=8, color=ROOF)
        text.set_bbox(BEHIND_TEXT)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, position: f"{value:g}")
        _name_points(axes, op)
    for axes in grid[-1]:
        axes.set_xlabel("FLOP per byte that has to move")
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s")
    for axes in list(grid.flat)[len(ops) :]:
        axes.set_axis_off()
    figure.suptitle(f"{data['stage']} on {data['gpu']}", fontsize=10, x=0.01, ha="left")
    return figure


def _room(op: dict) -> float:
    """The part of the plot's height that the names of the op's points take."""
    return min(0.03 + NAME_HEIGHT * (len(op["points"]) - 1), 0.7)


def _name_points(axes: Any, op: dict) -> None:
    """Marks the op's rungs and peers, with names beside them that keep apart, each with a line to its point."""
    points = sorted(op["points"], key=lambda point: point[2])
    place = (axes.transData + axes.transAxes.inverted()).transform
    across = place((op["intensity"], 1))[0] + 0.09
    wanted = [place((1, rate))[1] for _, _, rate in points]
    heights = spread(wanted, apart=NAME_HEIGHT, low=0.03, high=max([_room(op), *wanted]))
    for (name, kind, rate), height in zip(points, heights, strict=True):
        colour = RUNG if kind == "rung" else "#555555"
        axes.plot([op["intensity"]], [rate], "o" if kind == "rung" else "s", color=colour, markersize=4.5)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2, "relpos": (0, 0.5)}
        text = axes.annotate(
            f"{name}  {rate:.3g}",
            (op["intensity"], rate),
            (across, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour,
            arrowprops=line,
        )
        text.set_bbox(BEHIND_TEXT)


def spread(wanted: list[float], *, apart: float, low: float, high: float) -> list[float]:
    """Places as near to `wanted`, which rise, as they can be while `apart` from each other and within low and high.

    Where there is not room for all, they stand evenly and nearer than `apart`.
    """
    apart = min(apart, (high - low) / max(len(wanted) - 1, 1))
    groups: list[list[float]] = []  # what stands in one row, `apart` from each other, around the middle of its wishes
    for place in wanted:
        groups.append([place])
        while (
            len(groups) > 1
            and _bounds(groups[-2], apart, low, high)[1] + apart > _bounds(groups[-1], apart, low, high)[0]
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bounds(group, apart, low, high)[0] + apart * n for group in groups for n in range(len(group))]


def _bounds(group: list[float], apart: float, low: float, high: float) -> tuple[float, float]:
    """The lowest and the highest place of a group, moved into low and high."""
    length = apart * (len(group) - 1)
    start = min(max(sum(group) / len(group) - length / 2, low), high - length)
    return start, start + length
