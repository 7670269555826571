"""How a lesson shows its figures: as files, in a window, or drawn in letters."""

import io
import pathlib
import sys
from typing import Any


def show(folder: pathlib.Path, name: str, figure: Any = None) -> None:
    """Shows a figure, by default pyplot's: in a notebook or a window, else as a file in `folder`."""
    import matplotlib
    import matplotlib.pyplot as plt

    ipython = sys.modules.get("IPython")
    if figure is not None and ipython and ipython.get_ipython():
        from IPython.display import Image, display

        drawn = io.BytesIO()
        figure.savefig(drawn)
        display(Image(drawn.getvalue()))
    elif figure is None and matplotlib.get_backend().lower() != "agg":
        plt.show()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (figure or plt.gcf()).savefig(folder / f"{name}.png")
        plt.close()
        print("wrote", folder / f"{name}.png")


EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR = 60  # letters, of the longest


def cells(rows: dict[str, tuple[int, float]]) -> str:
    """A line for each name: so many cells, each filled to such a part."""
    wide = max(map(len, rows))
    drawn = {name: EIGHTHS[min(8, max(1, round(8 * part)))] * count for name, (count, part) in rows.items()}
    return "".join(f"{name:{wide}} {line}\n" for name, line in drawn.items())


def bars(rows: dict[str, float]) -> str:
    """A line for each name: a bar as long as its value, which is above 0."""
    longest = max(rows.values())
    return cells({name: (max(1, round(BAR * value / longest)), 1.0) for name, value in rows.items()})
