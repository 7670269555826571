"""Plots, as SVG: the ladder of an op, its bytes, the roofline of a step, the sectors that a load touches.

Each plot carries a digest of the figures it was drawn from, so that a stale one is found without drawing it again.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

from kernel_fusion import steps
from kernel_fusion.console import UserError, byte_count, milliseconds
from kernel_fusion.report import formulas, results, syllabus

FORM = 3  # raise it when the drawing changes: every plot is then stale
RUNG, PEER, ROOF, FAINT = "#1f5fa8", "#8a8a8a", "#b3412f", "#c9c9c9"
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
LOGARITHMIC_FROM = 12  # the longest time by the shortest: above this, short bars could not be told apart
LABEL_HEIGHT = 0.052  # of a roofline's plot, a line of text
SECTOR, LANES = 32, 32  # bytes, and threads of a warp
ONE_PLACE = 1.2  # intensities of ops nearer to each other than this factor could not be told apart
ONE_POINT = 1.12  # nor rates
STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",  # in a dark page too
}


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot that can be drawn."""

    path: pathlib.Path
    alt: str  # what it shows, in words
    data: dict  # the figures in it
    paint: Callable[[dict], Any]  # gives a matplotlib figure of them

    def digest(self) -> str:
        """Of the figures and of the form of the drawing."""
        text = json.dumps({"form": FORM, **self.data}, sort_keys=True)
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def is_stale(self) -> bool:
        """True where the file is missing or was drawn from other figures."""
        return not self.path.exists() or f">{self.digest()}<" not in self.path.read_text(encoding="utf-8")

    def figure(self) -> Any:
        """The plot as a matplotlib figure."""
        import matplotlib

        with matplotlib.rc_context(STYLE):
            return self.paint(self.data)

    def draw(self) -> None:
        """Writes the file, beside its place and then renamed."""
        import matplotlib

        from kernel_fusion.report import svg

        with matplotlib.rc_context(STYLE):
            results.replace(self.path, svg.draw(self.figure(), self.alt, self.digest()))


# ---- the ladder ----


def ladders(op: str) -> list[Plot]:
    """The ladder of `op`, once for each GPU measured: at its largest case the time of every rung and peer.

    The largest of those that most rungs ran: the last rungs of a ladder may not take every size.

    Raises:
        UserError: no step has the op.
    """
    return [
        _ladder(measured, op, results.largest(_with_most_rungs(rows)))
        for measured in results.load(syllabus.step_of(op))
        if (rows := measured.of(op))
    ]


def _with_most_rungs(rows: list[dict]) -> list[dict]:
    """The rows of the forward cases, if there are any, that most rungs ran."""
    forward = [row for row in rows if row["pass"] == "forward"] or rows
    ran = [(sum(results.is_ours(row) for row in case), case) for case in results.cases(forward)]
    most = max(count for count, _ in ran)
    return [row for count, case in ran if count == most for row in case]


def _ladder(measured: results.Results, op: str, rows: list[dict]) -> Plot:
    first = rows[0]
    data: dict[str, Any] = {
        "title": f"{op}: {results.case_title(first)}",
        "gpu": measured.gpu,
        "ceiling_ms": None,
        "ceiling": "",
        "times": [[row["impl"], row["kind"], row["ms"] if row["correct"] else None] for row in rows],
    }
    if first["percent_of_ceiling"] is not None:
        nearest = max(rows, key=lambda row: row["percent_of_ceiling"] or 0)  # the most digits where shares are rounded
        ceiling = nearest["ms"] * nearest["percent_of_ceiling"] / 100
        memory = first["bound"] == "memory"
        what = "as many bytes at memory's best" if memory else "as many operations in a large matrix product"
        data |= {"ceiling_ms": float(f"{ceiling:.3g}"), "ceiling": f"{what}: {milliseconds(ceiling)}"}
    times = ", ".join(f"{name} {_time(ms)}" for name, _, ms in data["times"])
    alt = f"{data['title']}, on {measured.gpu}. {times}." + (f" Ceiling, {data['ceiling']}" if data["ceiling"] else "")
    return Plot(measured.path.with_name(f"{measured.path.stem}-{op}-ladder.svg"), alt, data, paint_ladder)


def _time(ms: float | None) -> str:
    return "wrong result" if ms is None else milliseconds(ms)


def paint_ladder(data: dict) -> Any:
    """A line for each rung and peer, from the top, and the ceiling: bars from zero, or points on a logarithmic axis.

    A bar's length means something from zero only, and a logarithmic axis has none.
    """
    from matplotlib.figure import Figure

    lines, ceiling = data["times"], data["ceiling_ms"]
    times = [ms for _, _, ms in lines if ms is not None] + ([ceiling] if ceiling else [])
    low, high = min(times, default=1.0), max(times, default=1.0)
    logarithmic = high / low > LOGARITHMIC_FROM
    figure = Figure(figsize=(8.5, 1.35 + 0.3 * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    start = low / 2 if logarithmic else 0
    if logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(start, high * (high / start) ** 0.14)
    else:
        axes.set_xlim(0, high * 1.14)
    for place, (_, kind, ms) in enumerate(lines):
        colour = PEER if kind == "peer" else RUNG
        if logarithmic:
            axes.axhline(place, color=FAINT, linewidth=0.6, zorder=0)
            axes.plot([] if ms is None else [ms], [] if ms is None else [place], "o", color=colour, markersize=7)
        else:
            axes.barh(place, ms or 0, color=colour, height=0.66)
        gap = 8 if logarithmic and ms is not None else 4
        text = axes.annotate(_time(ms), (ms or start, place), (gap, 0), textcoords="offset points", va="center")
        text.set_bbox(BEHIND_TEXT)
    axes.set_yticks(range(len(lines)), [name for name, _, _ in lines])
    axes.set_ylim(len(lines) - 0.45, -0.55)
    axes.xaxis.set_major_formatter(lambda value, position: milliseconds(value) if value > 0 else "0")
    axes.set_xlabel(f"time{', logarithmic' if logarithmic else ''} (blue: our rungs, grey: peers)")
    axes.tick_params(axis="y", length=0)
    if ceiling:
        _draw_ceiling(axes, ceiling, data["ceiling"], logarithmic)
    figure.suptitle(f"{data['title']}, on {data['gpu']}", fontsize=10, x=0.01, ha="left")
    return figure


def _draw_ceiling(axes: Any, ceiling: float, words: str, logarithmic: bool) -> None:
    """A line, named above on the side where there is room."""
    axes.axvline(ceiling, color=ROOF, linewidth=1.4, zorder=1)
    left, right = axes.get_xlim()
    across = math.log(ceiling / left) / math.log(right / left) if logarithmic else ceiling / right
    axes.annotate(
        words,
        (ceiling, 1),
        (3 if across < 0.6 else -3, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="left" if across < 0.6 else "right",
        va="bottom",
        color=ROOF,
    )


# ---- bytes, predicted and measured ----


def bytes_of(op: str) -> list[Plot]:
    """For each GPU measured, at the largest case of `op`: the bytes that each rung's header predicts beside those that
    memory moved, and the time that the predicted ones take at a copy's rate beside the rung's.

    Raises:
        UserError: no step has the op, or no rung of it states its bytes.
    """
    step = syllabus.step_of(op)
    formula = {rung.name: rung.moves for rung in syllabus.rungs(step, op)}
    shown = []
    for measured in results.load(step):
        rows = [row for row in measured.of(op) if results.is_ours(row) and row["correct"]]
        lines = []
        for row in results.largest(rows) if rows else []:
            predicted = formulas.evaluate(formula.get(row["impl"], ""), row["shape"], row["dtype"])
            if predicted is not None:
                copy = predicted / _copy_rate(measured, predicted) / 1e6
                lines.append([row["impl"], predicted, row["dram_bytes"], float(f"{copy:.3g}"), row["ms"]])
        if lines:
            shown.append(_bytes_plot(measured, op, results.largest(rows)[0], lines))
        elif rows:
            raise UserError(f"no rung of {op} states its bytes as a formula of its shape")
    return shown


def _copy_rate(measured: results.Results, count: int) -> float:
    """GB/s of the copy whose bytes are nearest to `count`."""
    copies = measured.ceilings["copy_gb_s"]
    return copies[min(copies, key=lambda size: abs(math.log(int(size) / count)))]


def _bytes_plot(measured: results.Results, op: str, row: dict, lines: list[list]) -> Plot:
    data = {"title": f"{op}: {results.case_title(row)}", "gpu": measured.gpu, "rungs": lines}
    words = [
        f"{name}: {byte_count(predicted)} predicted, {byte_count(dram) if dram else 'not'} measured; "
        f"{milliseconds(copy)} at a copy's rate, {milliseconds(ms)} measured"
        for name, predicted, dram, copy, ms in lines
    ]
    alt = f"{data['title']}, on {measured.gpu}. {'. '.join(words)}"
    return Plot(measured.path.with_name(f"{measured.path.stem}-{op}-bytes.svg"), alt, data, paint_bytes)


def paint_bytes(data: dict) -> Any:
    """Two pairs of bars for each rung: bytes to the left, times to the right, what was predicted above what was."""
    from matplotlib.figure import Figure

    rungs = data["rungs"]
    figure = Figure(figsize=(8.5, 1.5 + 0.42 * len(rungs)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names, predicted, dram, copy, ms = zip(*rungs, strict=True)
    _pairs(left, predicted, dram, byte_count)
    _pairs(right, copy, ms, milliseconds)
    left.set_xlabel("bytes that memory moves")
    right.set_xlabel("time: at a copy's rate, and measured")
    left.set_yticks(range(len(rungs)), names)
    left.set_ylim(len(rungs) - 0.45, -0.55)
    for axes in (left, right):
        axes.tick_params(axis="y", length=0)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"{data['title']}, on {data['gpu']}", fontsize=10, x=0.01, ha="left")
    return figure


def _pairs(axes: Any, predicted: tuple, measured: tuple, words: Callable[[float], str]) -> None:
    from matplotlib.ticker import MaxNLocator

    for values, colour, label, up in ((predicted, ROOF, "predicted", -0.18), (measured, RUNG, "measured", 0.18)):
        places = [place + up for place in range(len(values))]
        axes.barh(places, [value or 0 for value in values], height=0.32, color=colour, label=label)
        for place, value in zip(places, values, strict=True):
            shown = words(value) if value else "not counted"
            axes.annotate(
                shown, (value or 0, place), (4, 0), textcoords="offset points", va="center", fontsize=7.5
            ).set_bbox(BEHIND_TEXT)
    axes.set_xlim(0, max(value or 0 for value in (*predicted, *measured)) * 1.22)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, position: words(value) if value > 0 else "0")


# ---- the sectors of a load ----


def sectors(patterns: dict[str, tuple[int, int]], folder: pathlib.Path) -> Plot:
    """What one load of a warp touches.

    Args:
        patterns: by name, the bytes that a lane takes, and from its first to the next lane's.
        folder: where the picture belongs.
    """
    data: dict[str, Any] = {"patterns": [[name, size, apart] for name, (size, apart) in patterns.items()]}
    words = []
    for name, size, apart in data["patterns"]:
        count = len(touched(size, apart))
        words.append(f"{name}: {count} sectors, {LANES * size} of {count * SECTOR} bytes used")
    return Plot(
        folder / "sectors.svg", f"Sectors that one load of a warp touches. {'; '.join(words)}", data, paint_sectors
    )


def touched(size: int, apart: int) -> list[int]:
    """The sectors that a warp touches where each lane takes `size` bytes, `apart` from the lane before."""
    return sorted({(lane * apart + byte) // SECTOR for lane in range(LANES) for byte in range(size)})


def paint_sectors(data: dict) -> Any:
    """A row for each pattern, in it a box for each sector that is touched, filled where a lane reads."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    patterns = data["patterns"]
    figure = Figure(figsize=(8.5, 0.75 + 0.62 * len(patterns)), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps["viridis"]
    for row, (_, size, apart) in enumerate(patterns):
        found = touched(size, apart)
        for lane in range(LANES):
            for number, sector in enumerate(found):
                first = max(lane * apart, sector * SECTOR) - sector * SECTOR
                last = min(lane * apart + size, (sector + 1) * SECTOR) - sector * SECTOR
                if first < last:
                    x, wide = number + 0.06 + 0.88 * first / SECTOR, 0.88 * (last - first) / SECTOR
                    colour = colours(lane / (LANES - 1))
                    axes.add_patch(Rectangle((x, row - 0.22), wide, 0.44, color=colour, linewidth=0))
        for number in range(len(found)):
            box = Rectangle((number + 0.06, row - 0.22), 0.88, 0.44, fill=False, edgecolor="#555555", linewidth=0.6)
            axes.add_patch(box)
        words = f"{len(found)} sectors, {LANES * size} of {len(found) * SECTOR} bytes used"
        axes.annotate(words, (0.06, row - 0.27), va="bottom", fontsize=8)
    axes.set_yticks(range(len(patterns)), [name for name, _, _ in patterns])
    axes.set_ylim(len(patterns) - 0.6, -0.65)
    axes.set_xlim(0, LANES)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel(
        "a box is a sector of 32 bytes; filled is what a lane reads, dark the first lane, light the last", fontsize=8
    )
    return figure


# ---- the roofline ----


def rooflines(step: steps.Step) -> list[Plot]:
    """The roofline of `step`, once for each GPU measured: every rung and peer at the largest forward case of each op.

    An op without floating-point operations has no place on it.
    """
    ops = syllabus.ops(step)
    shown = []
    for measured in results.load(step):
        cases = [
            results.largest(rows)
            for op in dict.fromkeys(row["op"] for row in measured.rows)
            if op in ops and (rows := [row for row in measured.of(op) if row["pass"] == "forward" and row["flops"]])
        ]
        if cases:
            shown.append(_roofline(measured, step, cases))
    return shown


def _roofline(measured: results.Results, step: steps.Step, cases: list[list[dict]]) -> Plot:
    copies = {int(size): rate for size, rate in measured.ceilings["copy_gb_s"].items()}
    data = {
        "gpu": measured.gpu,
        "step": step.folder,
        "copy_tb_s": copies[max(copies)] / 1000,
        "matmul_tflop_s": measured.ceilings["matmul_tflop_s"],
        "ops": [
            {
                "op": case[0]["op"],
                "intensity": case[0]["flops"] / case[0]["bytes"],
                "points": [[row["impl"], row["kind"], row["tflop_s"]] for row in case if row["correct"]],
            }
            for case in cases
        ],
    }
    best = "; ".join(f"{op['op']}: {op['intensity']:.3g} FLOP/byte, {_fastest(op)}" for op in data["ops"])
    alt = f"Roofline of {step.folder} on {measured.gpu}. {best}"
    return Plot(measured.path.with_name(f"{measured.path.stem}-roofline.svg"), alt, data, paint_roofline)


def _fastest(op: dict) -> str:
    """ "fastest is v4_vector with 0.536 TFLOP/s"."""
    if not op["points"]:
        return "nothing right"
    name, _, rate = max(op["points"], key=lambda point: point[2])
    return f"fastest is {name} with {rate:.3g} TFLOP/s"


def paint_roofline(data: dict) -> Any:
    """The roofs; on a line for each op's operations a byte its rungs and peers; its name above the roofs.

    Ops that could not be told apart share a line, and points that could not a mark.
    """
    from matplotlib.figure import Figure

    ops, copy, matmul = data["ops"], data["copy_tb_s"], data["matmul_tflop_s"]
    intensities = [op["intensity"] for op in ops]
    rates = [rate for op in ops for _, _, rate in op["points"]]
    ridge = matmul / copy if matmul else max(intensities)
    left, right = min([*intensities, ridge]) / 3, 3 * max([*intensities, ridge])
    roof = matmul or right * copy
    bottom = min([*rates, left * copy]) / 2
    groups = _near(ops, lambda op: op["intensity"], ONE_PLACE)
    labels = LABEL_HEIGHT * len(groups) + 0.05  # the part of the height above the roofs
    top = bottom * (roof / bottom) ** (1 / (1 - labels))
    figure = Figure(figsize=(8.5, 3.6 + 0.25 * len(groups)), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top))
    roofs = f"copy: {copy:.3g} TB/s" + (f"; matrix product: {matmul:.3g} TFLOP/s" if matmul else "")
    axes.plot([left, ridge, right], [left * copy, ridge * copy, roof], color=ROOF, linewidth=1.4, label=roofs)
    height = 0.97
    for group, x, to_the_left in _labelled(groups, left, right):
        axes.annotate(
            ", ".join(op["op"] for op in group),
            (x, height),
            (-4 if to_the_left else 4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if to_the_left else "left",
            va="top",
        )
        axes.axvline(x, ymax=height, color=FAINT, linewidth=0.8, zorder=0)
        height -= LABEL_HEIGHT
        for peer, mark, colour in ((True, "s", PEER), (False, "o", RUNG)):
            rates = [rate for op in group for _, kind, rate in op["points"] if (kind == "peer") == peer]
            found = [_mean(near) for near in _near(rates, float, ONE_POINT)]
            axes.plot([x] * len(found), found, mark, color=colour, markersize=4.5)
    axes.plot([], [], "o", color=RUNG, markersize=4.5, label="our rungs")
    axes.plot([], [], "s", color=PEER, markersize=4.5, label="peers")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, position: f"{value:g}")
    axes.set_xlabel("FLOP per byte that has to move")
    axes.set_ylabel("TFLOP/s")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{data['step']} on {data['gpu']}: the largest case of each op", fontsize=10, x=0.01, ha="left")
    return figure


def _labelled(groups: list[list[dict]], left: float, right: float) -> list[tuple[list[dict], float, bool]]:
    """The groups from the top label down, each with its intensity, and whether its label stands to the left of that.

    Those to the right come first, from the leftmost on, then those to the left, from the rightmost on: so no line
    crosses a label.
    """
    found = []
    for group in groups:
        x = _mean([op["intensity"] for op in group])
        found.append((group, x, math.log(x / left) / math.log(right / left) > 0.5))
    return sorted(found, key=lambda one: (one[2], -one[1] if one[2] else one[1]))


def _near(ones: list, value: Callable, factor: float) -> list[list]:
    """In their order, those together that are at most `factor` times the first of their group."""
    groups: list[list] = []
    for one in sorted(ones, key=value):
        if groups and value(one) <= factor * value(groups[-1][0]):
            groups[-1].append(one)
        else:
            groups.append([one])
    return groups


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
