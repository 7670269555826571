"""Plots hold every rung and peer, keep their names apart, and are drawn the same each time."""

import itertools
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Polygon
from matplotlib.text import Text

from kernel_fusion import steps, testing
from kernel_fusion.console import UserError
from kernel_fusion.report import plots, svg
from kernel_fusion.tests.test_report import repository, row, write_results  # noqa: F401  a fixture

ROWS = [
    row("v1_naive", 0.2, gb_s=1000.0, tflop_s=0.5, percent_of_ceiling=50.0),
    row("v2_vector", 0.1, gb_s=2000.0, tflop_s=1.0, percent_of_ceiling=100.0),
    row("v3_broken", 0.05, correct=False),
    row("torch <eager>", 0.3, kind="peer"),
]


def texts(figure):
    """All that is written in a figure."""
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_a_ladder_has_a_bar_for_each_and_the_ceiling(repository):  # noqa: F811
    write_results(repository, ROWS)
    (plot,) = plots.ladders("double")
    assert plot.path == repository.path / "results" / "h200-double-ladder.svg"
    figure = plot.paint(plot.data)
    (axes,) = figure.axes
    assert [round(bar.get_width(), 3) for bar in axes.patches] == [0.2, 0.1, 0, 0.3]
    assert axes.get_xlim()[0] == 0
    assert {"v1_naive", "200 µs", "wrong result", "torch <eager>", "as many bytes at memory's best: 100 µs"} <= set(
        texts(figure)
    )
    assert [line.get_xdata()[0] for line in axes.lines] == [0.1]
    assert "v3_broken wrong result" in plot.alt


def test_times_far_apart_are_points_on_a_logarithmic_axis(repository):  # noqa: F811
    """No bars: their length would say nothing where the axis has no zero."""
    rows = [row("v1_naive", 40.0), row("v2_vector", 0.8), row("v3_broken", 0.7, correct=False)]
    write_results(repository, [row("v1_naive", 0.2, width=4), *rows])
    (plot,) = plots.ladders("double")
    assert plot.data["title"] == "double: rows 4, width 8, float32"
    (axes,) = plot.paint(plot.data).axes
    assert axes.get_xscale() == "log"
    assert not axes.patches
    marks = [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines if line.get_marker() == "o"]
    assert marks == [(40.0, 0), (0.8, 1), ()]


def test_a_ceiling_of_arithmetic_is_called_one_and_without_any_a_ladder_has_none(repository):  # noqa: F811
    write_results(repository, [row("v1_naive", 0.2, tflop_s=70.0, percent_of_ceiling=10.0, bound="arithmetic")])
    (plot,) = plots.ladders("double")
    assert plot.data["ceiling"] == "as many operations in a large matrix product: 20.0 µs"
    write_results(repository, [row("v1_naive", 0.2, percent_of_ceiling=None)])
    (plot,) = plots.ladders("double")
    assert "eiling" not in plot.alt
    assert list(plot.paint(plot.data).axes[0].lines) == []


def test_bytes_are_those_of_the_header_beside_those_of_memory(repository):  # noqa: F811
    for name in ("v1_naive", "v2_vector"):
        path = repository.path / "kernels" / "double" / f"{name}.cu"
        path.write_text(path.read_text().replace("2·n", "4·n" if name == "v1_naive" else "2·n"))
    counted = {"width": 32, "bytes": 1024, "dram_bytes": 2000}
    write_results(repository, [row("v1_naive", 0.2, **counted), row("v2_vector", 0.1, width=32, bytes=1024)])
    (plot,) = plots.bytes_of("double")
    assert plot.path.name == "h200-double-bytes.svg"
    assert plot.data["rungs"] == [["v1_naive", 2048, 2000, 5.12e-07, 0.2], ["v2_vector", 1024, None, 2.56e-07, 0.1]]
    left, right = plot.paint(plot.data).axes
    assert [bar.get_width() for bar in left.patches] == [2048, 1024, 2000, 0]
    assert [bar.get_width() for bar in right.patches] == [5.12e-07, 2.56e-07, 0.2, 0.1]
    assert "not counted" in texts(left)
    assert "v1_naive: 2.05 KB predicted, 2 KB measured" in plot.alt


def test_a_rung_without_a_formula_has_no_place_beside_others(repository):  # noqa: F811
    for path in (repository.path / "kernels" / "double").glob("*.cu"):
        path.write_text(path.read_text().replace("2·n·sizeof(T)", "whatever it takes, some"))
    assert plots.bytes_of("double") == []
    write_results(repository, ROWS)
    with testing.raises(UserError, "no rung of double states its bytes"):
        plots.bytes_of("double")


@pytest.mark.parametrize(
    ("size", "apart", "count"), [(4, 128, 32), (4, 4, 4), (16, 16, 16), (2, 2, 2), (4, 0, 1), (8, 12, 12)]
)
def test_sectors_are_counted_as_memory_does(size, apart, count):
    found = plots.touched(size, apart)
    assert len(found) == count
    assert found == sorted(found)


def test_a_picture_of_sectors_fills_what_lanes_read(tmp_path):
    plot = plots.sectors({"apart": (4, 128), "beside": (4, 4)}, tmp_path)
    assert plot.path == tmp_path / "sectors.svg"
    assert plot.alt.endswith("apart: 32 sectors, 128 of 1024 bytes used; beside: 4 sectors, 128 of 128 bytes used")
    (axes,) = plot.paint(plot.data).axes
    filled = [patch for patch in axes.patches if patch.get_fill()]
    assert len(filled) == 64
    assert len(axes.patches) - len(filled) == 32 + 4
    assert sum(patch.get_width() for patch in filled) == pytest.approx(2 * 4 * 0.88)  # 128 bytes of each


def test_a_roofline_has_every_point_of_each_ops_largest_forward_case(repository):  # noqa: F811
    for op in ("triple", "copy", "double_backward"):
        (repository.path / "kernels" / op).mkdir()
    more = [
        row("v1_naive", 0.1, op="triple", tflop_s=0.25, flops=512),
        row("v1_naive", 9.0, op="triple", width=80, **{"pass": "backward"}),
        row("v1_naive", 0.1, op="copy", flops=0),
        row("v1_naive", 0.1, op="double_backward", **{"pass": "backward"}),
        row("separate", 0.1, op="a whole model"),
    ]
    write_results(repository, [*ROWS, *more])
    (plot,) = plots.rooflines(repository)
    assert plot.path == repository.path / "results" / "h200-roofline.svg"
    assert [(op["op"], op["intensity"]) for op in plot.data["ops"]] == [("double", 0.125), ("triple", 2.0)]
    assert (plot.data["copy_tb_s"], plot.data["matmul_tflop_s"]) == (4.0, 700.0)
    figure = plot.paint(plot.data)
    assert {"double", "triple"} <= set(texts(figure))
    rates = {round(rate, 3) for line in figure.axes[0].lines for rate in line.get_ydata() if line.get_marker() in "os"}
    assert rates == {0.5, 1.0, 0.25}  # one that is broken has no place
    assert "double: 0.125 FLOP/byte, fastest is v2_vector with 1 TFLOP/s" in plot.alt


def roofline(*ops):
    return {"gpu": "H200", "step": "step1", "copy_tb_s": 4.3, "matmul_tflop_s": 780.0, "ops": list(ops)}


def test_ops_that_share_a_place_are_drawn_once():
    points = [["v1_slow", "rung", 1.0], ["v2_fast", "rung", 9.6], ["peer", "peer", 9.6]]
    other = [["v1_slow", "rung", 1.05], ["v3_faster", "rung", 10.4]]
    first = {"op": "first", "intensity": 2.25, "points": points}
    second = {"op": "second", "intensity": 2.5, "points": other}
    (axes,) = plots.paint_roofline(roofline(first, second, {"op": "far", "intensity": 90.0, "points": other})).axes
    assert {"first, second", "far"} <= set(texts(axes))
    marks = [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "o"]
    assert [len(one) for one in marks] == [2, 2, 0]  # the last is the legend's
    assert marks[0] == pytest.approx([1.02, 9.99], abs=0.01)


def test_labels_of_ops_stay_inside_and_do_not_overlap():
    points = [["v1_separate", "rung", 0.5], ["torch.compile", "peer", 0.4]]
    names = [f"attention_residual_layer_norm_{n}" for n in range(8)]
    ops = [{"op": name, "intensity": 10.0 ** (n / 2 - 1), "points": points} for n, name in enumerate(names)]
    figure = plots.paint_roofline(roofline(*ops))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [Text.get_window_extent(text) for text in axes.texts if text.get_text() in names]
    assert len(boxes) == 8
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)
    roof = axes.transData.transform((1.0, 780.0))[1]
    assert all(box.y0 > roof for box in boxes)


def test_a_plot_is_the_same_each_time_and_carries_its_digest(repository):  # noqa: F811
    write_results(repository, ROWS)
    for plot in (*plots.ladders("double"), *plots.rooflines(repository)):
        assert plot.is_stale()
        plot.draw()
        first = plot.path.read_text()
        assert plot.digest() in first
        assert "matplotlib" not in first.lower()
        assert not plot.is_stale()
        plot.draw()
        assert plot.path.read_text() == first
    assert not list(repository.path.rglob("*.tmp"))


DRAWS = """
import json, pathlib, sys
from kernel_fusion import steps
from kernel_fusion.report import plots, results

step = steps.Step("step1-fake", "step1_fake", "test.py")
steps.ROOT, steps.STEPS = pathlib.Path(sys.argv[1]), (step,)
file = results.load(step)[0]
measured, order = file.rows[:: int(sys.argv[2])], [results.key(row) for row in file.rows]
placed = results.placed(measured[:2], [], order)  # measured two by two
for at in range(2, len(measured), 2):
    placed = results.placed([*measured[at : at + 2], *placed], placed, order)
results.write(file._replace(rows=placed))
for plot in (*plots.ladders("double"), *plots.rooflines(step), *plots.bytes_of("double")):
    plot.draw()
"""


def test_who_draws_and_the_order_of_measuring_change_nothing(repository):  # noqa: F811
    """In processes of their own, whose hashes differ."""
    texts = []
    for stride, seed in (("1", "1"), ("-1", "2")):
        write_results(repository, [*ROWS, row("v1_naive", 0.05, width=4), row("v2_vector", 0.04, width=4)])
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", DRAWS, str(steps.ROOT), stride]
        subprocess.run(command, env=environment, check=True)
        folder = repository.path / "results"
        texts.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert texts[0] == texts[1]
    assert len(texts[0]) == 4


def test_a_figure_more_changes_a_few_lines(repository):  # noqa: F811
    lines = []
    for ms in (0.2, 0.21):
        write_results(repository, [row("v1_naive", ms), *ROWS[1:]])
        (plot,) = plots.ladders("double")
        plot.draw()
        lines.append(plot.path.read_text().splitlines())
    changed = [after for before, after in zip(*lines, strict=True) if before != after]
    assert len(changed) == 5  # in words, the digest, the bar, its label and what is behind that
    assert sum("210 µs" in line for line in changed) == 2


def test_every_plot_in_this_repository_is_short():
    pictures = [path for step in steps.STEPS for path in (step.path / "results").glob("*.svg")]
    assert len(pictures) > 40
    assert [path for path in pictures if len(path.read_text().splitlines()) > 200] == []


def test_what_is_drawn_stands_where_it_should(repository):  # noqa: F811
    """Bars from the axis on, as long as the times; names and times beside them; marks and lines of a roofline."""
    write_results(repository, ROWS)
    (plot,) = plots.ladders("double")
    plot.draw()
    drawn = [(one.tag.split("}")[1], one.text, one.attrib) for one in ElementTree.parse(plot.path).getroot()]
    frame = [of for tag, _, of in drawn if tag == "rect"][1]
    assert all(frame[name].isdigit() for name in ("x", "width", "height"))  # in whole points
    numbers = [word for _, _, of in drawn for value in of.values() for word in re.findall(r"[\d.]+", value)]
    assert [number for number in numbers if len(number.partition(".")[2]) > 1] == []
    bars = [of for tag, _, of in drawn if tag == "rect" and of["fill"] in (plots.RUNG, plots.PEER)]
    assert {bar["x"] for bar in bars} == {frame["x"]}
    assert [bar["fill"] for bar in bars] == [plots.RUNG] * 3 + [plots.PEER]
    lengths = [float(bar["width"]) for bar in bars]
    assert lengths == pytest.approx([lengths[-1] * part for part in (2 / 3, 1 / 3, 0, 1)], abs=0.11)
    texts = {text: of for tag, text, of in drawn if tag == "text"}
    for bar, one, time in zip(bars, ROWS, ("200 µs", "100 µs", "wrong result", "300 µs"), strict=True):
        name, label = texts[one["impl"]], texts[time]
        middle, end = float(bar["y"]) + float(bar["height"]) / 2, float(bar["x"]) + float(bar["width"])
        assert (name["text-anchor"], label["text-anchor"]) == ("end", "start")
        assert float(bar["x"]) - 6 < float(name["x"]) < float(bar["x"])
        assert end < float(label["x"]) < end + 6
        assert all(middle < float(text["y"]) < middle + 6 for text in (name, label))
    (ceiling,) = [of["d"] for tag, _, of in drawn if tag == "path" and of["stroke"] == plots.ROOF]
    assert float(re.match(r"M([\d.]+) ", ceiling)[1]) == pytest.approx(float(frame["x"]) + lengths[1], abs=0.11)
    (roofline,) = plots.rooflines(repository)
    roofline.draw()
    assert roofline.path.read_text().count("<circle ") == 2 + 1  # the last is the legend's


def test_a_shape_that_cannot_be_drawn_is_refused():
    for shape in (Polygon([(0, 0), (1, 0), (0.5, 1)]), Ellipse((0.5, 0.5), 0.9, 0.2)):
        figure = Figure(layout="constrained")
        figure.add_subplot().add_patch(shape)
        with testing.raises(ValueError, "svg.draw: `figure` must have rectangles and round marks only"):
            svg.draw(figure, "", "")


def test_other_figures_or_another_form_make_a_plot_stale(repository, monkeypatch):  # noqa: F811
    write_results(repository, ROWS)
    (plot,) = plots.ladders("double")
    plot.draw()
    write_results(repository, ROWS[:2])
    assert plots.ladders("double")[0].is_stale()
    monkeypatch.setattr(plots, "FORM", plots.FORM + 1)
    assert plot.is_stale()


def test_an_unknown_op_is_an_error(repository):  # noqa: F811
    with testing.raises(UserError, "no step has an op 'triple'"):
        plots.ladders("triple")
    assert plots.rooflines(steps.Step("step9-none", "step9_none", "test.py")) == []
