"""Plots hold every rung and peer, keep their names apart, and are drawn the same each time."""

import itertools

import pytest
from matplotlib.text import Text

from kernel_fusion import plots, stages, testing
from kernel_fusion.console import UserError
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
    assert {"v1_naive", "200 µs", "wrong result", "torch <eager>", "a copy of as many bytes: 100 µs"} <= set(
        texts(figure)
    )
    assert [line.get_xdata()[0] for line in axes.lines] == [0.1]
    assert "v3_broken wrong result" in plot.alt


def test_the_largest_case_is_drawn_and_times_far_apart_are_logarithmic(repository):  # noqa: F811
    write_results(
        repository, [row("v1_naive", 0.2), row("v1_naive", 40.0, width=800), row("v2_vector", 0.8, width=800)]
    )
    (plot,) = plots.ladders("double")
    assert plot.data["title"] == "double: rows 4, width 800, float32"
    assert plot.paint(plot.data).axes[0].get_xscale() == "log"


def test_a_ceiling_of_arithmetic_is_called_one(repository):  # noqa: F811
    write_results(repository, [row("v1_naive", 0.2, tflop_s=70.0, percent_of_ceiling=10.0)])
    (plot,) = plots.ladders("double")
    assert plot.data["ceiling"] == "a large matrix product's rate: 20.0 µs"


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
    written = texts(plot.paint(plot.data))
    assert {"v1_naive  0.5", "v2_vector  1", "torch <eager>  0.5", "v1_naive  0.25"} <= set(written)
    assert not [text for text in written if "broken" in text]
    assert "double: 0.125 FLOP/byte, fastest is v2_vector with 1 TFLOP/s" in plot.alt


def test_names_of_points_that_lie_together_do_not_overlap():
    points = [[f"v{n}_name", "rung", 1.0 + n / 1000] for n in range(12)]
    op = {"op": "double", "case": "n 1", "intensity": 0.25, "points": points}
    figure = plots.paint_roofline(
        {"gpu": "H200", "stage": "step1", "copy_tb_s": 4.3, "matmul_tflop_s": 780.0, "ops": [op]}
    )
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts if "_name" in text.get_text()]
    assert len(boxes) == 12
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    frame = figure.axes[0].get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes)


def test_a_plot_is_the_same_each_time_and_carries_its_digest(repository):  # noqa: F811
    write_results(repository, ROWS)
    for plot in (*plots.ladders("double"), *plots.rooflines(repository)):
        assert plot.is_stale()
        plot.draw()
        first = plot.path.read_text()
        assert plot.digest() in first
        assert "Matplotlib" not in first.split("</metadata>")[0]
        assert not plot.is_stale()
        plot.draw()
        assert plot.path.read_text() == first
    assert not list(repository.path.rglob("*.tmp"))


def test_other_figures_or_another_form_make_a_plot_stale(repository, monkeypatch):  # noqa: F811
    write_results(repository, ROWS)
    (plot,) = plots.ladders("double")
    plot.draw()
    write_results(repository, ROWS[:2])
    assert plots.ladders("double")[0].is_stale()
    monkeypatch.setattr(plots, "FORM", plots.FORM + 1)
    assert plot.is_stale()


def test_an_unknown_op_is_an_error(repository):  # noqa: F811
    with testing.raises(UserError, "no stage has an op 'triple'"):
        plots.ladders("triple")
    assert plots.rooflines(stages.Stage("step9-none", "step9_none", "test.py")) == []


@pytest.mark.parametrize(
    ("wanted", "places"),
    [
        ([0.1, 0.5, 0.9], [0.1, 0.5, 0.9]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.0, 0.0], [0.0, 0.1]),
        ([1.0, 1.0], [0.9, 1.0]),
        ([0.5] * 21, [n / 20 for n in range(21)]),
        ([], []),
    ],
)
def test_names_are_spread_around_their_points(wanted, places):
    assert plots.spread(wanted, apart=0.1, low=0.0, high=1.0) == pytest.approx(places)
