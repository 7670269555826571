"""A matplotlib figure as SVG whose text depends on nothing but the figure: an element a line, places to a tenth of a
point, no names, no version. How wide a word is, on which the layout depends, is guessed here and not asked of a font.
"""

from html import escape
from typing import Any

from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.path import Path

# Of a letter, by the size of the font. DejaVu Sans is lower: newer matplotlib takes a font's height if that is more.
WIDTH, HEIGHT, DESCENT = 0.57, 1.02, 0.25
NEAR = 0.01  # points
FONT = "DejaVu Sans, Verdana, sans-serif"
ANCHORS = {"left": ("start", 0.0), "center": ("middle", 0.5), "right": ("end", 1.0)}


def draw(figure: Figure, title: str, digest: str) -> str:
    """`figure` as the text of an SVG file.

    It may have rectangles, straight lines, round marks and text, opaque and not dashed. `digest`: of what it was drawn
    from, for the file's metadata.
    """
    figure.set_dpi(72)  # a pixel is a point
    width, height = figure.get_size_inches() * 72
    renderer = Renderer(width, height)
    canvas: Any = figure.canvas
    canvas.get_renderer = lambda: renderer  # whom the layout asks
    _on_whole_points(figure)
    figure.draw(renderer)
    size = f'width="{_number(width)}pt" height="{_number(height)}pt" viewBox="0 0 {_number(width)} {_number(height)}"'
    return "\n".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">',
            f"<title>{escape(title, quote=False)}</title>",
            f"<metadata>{digest}</metadata>",
            *(f"<{name} {rest}" for name, rest in renderer.elements),
            "</svg>\n",
        ]
    )


def _on_whole_points(figure: Figure) -> None:
    """Lays the figure out, once, and moves its axes' edges to whole points: versions differ by parts of one."""
    if layout := figure.get_layout_engine():
        layout.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        edges = axes.get_position().get_points() * figure.get_size_inches() * 72
        (left, bottom), (right, top) = edges.round() / (figure.get_size_inches() * 72)
        axes.set_position((left, bottom, right - left, top - bottom))


class Renderer(RendererBase):
    """What matplotlib draws with: collects elements, each the name of a tag and the rest of its line."""

    def __init__(self, width: float, height: float):
        super().__init__()
        self.width, self.height = width, height
        self.elements: list[tuple[str, str]] = []

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self.width, self.height

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        size = prop.get_size_in_points()
        return WIDTH * size * len(s), HEIGHT * size, DESCENT * size

    def draw_path(self, gc: Any, path: Path, transform: Any, rgbFace: Any = None) -> None:
        stroke = f' stroke="{to_hex(gc.get_rgb())}" stroke-width="{_number(gc.get_linewidth())}"'
        style = f'fill="{to_hex(rgbFace) if rgbFace is not None else "none"}"{stroke if gc.get_linewidth() else ""}/>'
        points = [(x, self.height - y) for x, y in transform.transform_path(path).vertices]
        if len(points) == 0:
            return
        (left, right), (top, bottom) = ((min(of), max(of)) for of in zip(*points, strict=True))
        codes: Any = () if path.codes is None else path.codes
        if Path.CURVE4 in codes and abs((right - left) - (bottom - top)) < NEAR:  # a round mark
            place = f'cx="{_number((left + right) / 2)}" cy="{_number((top + bottom) / 2)}"'
            self.elements.append(("circle", f'{place} r="{_number((right - left) / 2)}" {style}'))
        elif Path.CLOSEPOLY in codes:
            if not all(min(x - left, right - x) < NEAR > min(y - top, bottom - y) for x, y in points):
                raise ValueError(f"svg.draw: `figure` must have rectangles and round marks only, got {path}")
            place = f'x="{_number(left)}" y="{_number(top)}"'
            size = f'width="{_number(right - left)}" height="{_number(bottom - top)}"'
            self.elements.append(("rect", f"{place} {size} {style}"))
        else:
            line = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
            before, rest = self.elements[-1] if self.elements else ("", "")
            if before == "path" and rest.endswith(f'" {style}'):  # such as the next of many marks of an axis
                line = rest.removeprefix('d="').removesuffix(f'" {style}') + line
                self.elements.pop()
            self.elements.append(("path", f'd="{line}" {style}'))

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        anchor, part = ANCHORS[mtext.get_horizontalalignment()] if angle == 0 else ANCHORS["left"]
        x += part * self.get_text_width_height_descent(s, prop, ismath)[0]
        turned = f' transform="rotate(-{_number(angle)} {_number(x)} {_number(y)})"' if angle else ""
        style = f'font-size="{_number(prop.get_size_in_points())}" text-anchor="{anchor}" fill="{to_hex(gc.get_rgb())}"'
        self.elements.append(
            ("text", f'x="{_number(x)}" y="{_number(y)}" {style}{turned}>{escape(s, quote=False)}</text>')
        )


def _number(value: float) -> str:
    """To a tenth. What lies between two goes up, whatever is added up in another order."""
    return f"{round(float(value) + 1e-6, 1) + 0.0:g}"
