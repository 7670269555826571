"""When one time is shorter than another, and when the difference is noise: the rule, written once."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Medians of one function in two runs on one machine differ by up to this part of them, and by up to this many
# milliseconds: measured on an H200, each row of the results twice.
RUN_TO_RUN = 0.02
RUN_TO_RUN_MS = 0.0003


class Spread(NamedTuple):
    """The repeats of one measurement: their median, and the quartiles that half of them lie between."""

    median: float
    low: float
    high: float


def spread(times: Sequence[float]) -> Spread:
    """Sums repeats up.

    Raises:
        ValueError: there are none.
    """
    if not times:
        raise ValueError("spread: `times` must not be empty")
    ordered = sorted(times)
    if len(ordered) == 1:
        return Spread(ordered[0], ordered[0], ordered[0])
    low, median, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(median, low, high)


def faster(one: Spread, other: Spread) -> bool:
    """Whether `one` is faster than `other` beyond noise; both in milliseconds.

    It is where three of four of its repeats are below three of four of the other's, and where the medians differ by
    more than they do from run to run. So of two measurements, neither may be faster.
    """
    apart = other.median - one.median
    return one.high < other.low and apart > RUN_TO_RUN * other.median + RUN_TO_RUN_MS
