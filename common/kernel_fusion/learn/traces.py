"""Recorded runs of the puzzles and of the exercises of steps 1 to 3, made when somebody asks for them."""

import pathlib
import subprocess

from kernel_fusion import steps
from kernel_fusion.learn import check, exercises

# What is recorded where two whole blocks of the first launch are too much, or not the kernel in question.
PARTS: dict[str, dict] = {
    **dict.fromkeys(("ladder_1_tiled", "ladder_2_any_length", "ladder_3_lanes"), {"blocks": "0", "threads": "0-3"}),
    **dict.fromkeys(("ladder_5_attention_mma", "ladder_6_two_stages"), {"blocks": "0", "threads": "0-31"}),
    **dict.fromkeys(("5_register_tile", "8_publish"), {"blocks": "0", "threads": "0-3"}),
    "hunt_4_early_counter": {"threads": "0-31"},
}


def solutions() -> list[pathlib.Path]:
    """The programs that `make` records."""
    of_steps = {one.path for one in list(steps.STEPS)[:3]}
    return [one for one in exercises.solutions() if one.parents[2] in of_steps or one.parent.parent.name == "puzzles"]


def make(solution: pathlib.Path) -> dict:
    """The trace of one of `solutions`, for `emulator.trace.html`. Takes some seconds, most of them to compile it.

    Raises UserError where it cannot be recorded, see `emulator.trace.record`.
    """
    from emulator import trace

    part = PARTS.get(solution.stem, {})
    return trace.record(
        solution, include_dirs=tuple(check.include_dirs(solution)), to_the_end=False, stdout=subprocess.DEVNULL, **part
    )[1]
