"""The times that pages state, beside those that are measured. What takes more than three times what its page says, or
less than a quarter of it, is a mistake of the page.

Measured times are scaled by a yardstick, a fixed piece of compiling that is timed before and after. Where the two
differ, the machine had other work, and nothing is judged. All pages speak of two cores and no GPU.

python -m kernel_fusion.checks.times TOUR-LOG SECONDS YARDSTICKS    judges a tour, as .ci/run has measured it
"""

import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernel_fusion import steps
from kernel_fusion.checks.repository import ROOT

REFERENCE_S = 2.4  # the yardstick on the machine for which the pages' times hold, when it has no other work
SLOWER, SOONER, STEADY = 3.0, 4.0, 1.25


class Stated(NamedTuple):
    """A time on a page."""

    page: str
    pattern: str  # of the words around it, which are a group
    what: str  # whose: "build step1-simple", "tour", "make test", a test file, folders of tests, a page's command


BACKWARD, DECODE = (f"step2-attention/tests/test_{name}.py" for name in ("attention_backward", "decode"))
STATED = [
    Stated("README.md", r"before your eyes: (.*?) on two cores\. The tests", "tour"),
    Stated("README.md", r"The tests take (.*?)\.", "make test"),
    Stated("CONTRIBUTING.md", r"everything that runs here \| (.*?) \|", "make test"),
    Stated("CONTRIBUTING.md", r"all that belongs to no step \| (.*?) \|", "tests emulator common"),
    Stated("README.md", r"step 1's first build takes (.*?):", "build step1-simple"),
    Stated("step1-simple/README.md", r"The first time takes (.*?) on two cores", "build step1-simple"),
    Stated("step2-attention/README.md", r"The first build takes (.*?) on two cores", "build step2-attention"),
    Stated("step3-fused/README.md", r"The first build takes (.*?) on two cores", "build step3-fused"),
    Stated("step4-integration/README.md", r"The first time takes (.*?) on two cores", "build all"),
    Stated("step1-simple/README.md", r"by the first line everything, in (.*?), by the second", "step1-simple"),
    Stated("step2-attention/README.md", r"also \[tests/\]\(tests\), in (.*?), the second", "step2-attention"),
    Stated("step3-fused/README.md", r"stands in \[tests/\]\(tests\), in (.*?), the second", "step3-fused"),
    Stated("step4-integration/README.md", r"They take (.*?), with those in \[tests/\]", "step4-integration"),
    Stated("step2-attention/pages/backward.md", r"test_attention_backward\.py`, in (.*?)\.", BACKWARD),
    Stated("step2-attention/pages/decode.md", r"test_decode\.py`, in (.*?),", DECODE),
    Stated("step4-integration/README.md", r"600 steps take (.*?) on a CPU", "python train.py --steps 600"),
    Stated("docs/debugging.md", r"left out. It takes (.*?):", "python tests/planted_faults.py --only tail-not-written"),
]  # fmt: skip


# ---- what pages say ----

NUMBERS = "no one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
UNITS = {"second": 1, "minute": 60, "hour": 3600}
PARTS = {"half": 0.5, "quarter": 0.25}


def seconds(words: str) -> tuple[float, float]:
    """The least and the most that "about a minute", "one to two minutes" or "half an hour" says.

    Raises:
        ValueError: it is none of these.
    """
    found = re.fullmatch(r"(?:about )?(?:(?:a )?(half|quarter) (?:of )?)?(?:(\w+) to )?(\w+) (\w+?)s?", words)
    try:
        part, least, most, unit = found.groups() if found else ("",) * 4
        factor = PARTS.get(part, 1.0) * UNITS[unit]
        return _number(least or most) * factor, _number(most) * factor
    except (KeyError, ValueError):
        raise ValueError(f"no time: {words!r}") from None


def _number(word: str) -> int:
    return int(word) if word.isdecimal() else 1 if word in ("a", "an") else NUMBERS.index(word)


def words_of(stated: Stated) -> str:
    """How the page says it.

    Raises:
        ValueError: it does not say it, or more than once.
    """
    found = re.findall(stated.pattern, " ".join((ROOT / stated.page).read_text(encoding="utf-8").split()))
    if len(found) != 1:
        raise ValueError(f"{stated.page} states the time of {stated.what} {len(found)} times, by {stated.pattern!r}")
    return found[0]


# ---- what is measured ----


def yardstick() -> float:
    """How long the yardstick takes now."""
    began = time.monotonic()
    source = ROOT / ".ci" / "yardstick.cpp"
    command = [os.environ.get("CXX", "c++"), "-O2", "-std=c++17", "-c", str(source), "-o", os.devnull]
    subprocess.run(command, check=True)
    return time.monotonic() - began


def why_not(yardsticks: Iterable[float]) -> str:
    """Why nothing can be judged where the yardstick took so long at several times; empty where it can."""
    each = sorted(yardsticks)
    busy = each[-1] > STEADY * each[0]
    return f"the machine was busy: the yardstick took from {each[0]:.1f} to {each[-1]:.1f} s" if busy else ""


def problems(measured: Mapping[str, float], yardsticks: Iterable[float]) -> list[str]:
    """A line for each stated time that is off, of those whose `what` was measured, at the same time as `yardsticks`."""
    each = list(yardsticks)
    scale = REFERENCE_S * len(each) / sum(each)
    found = []
    for stated in (one for one in STATED if one.what in measured):
        words = words_of(stated)
        least, most = seconds(words)
        scaled = measured[stated.what] * scale
        if not least / SOONER <= scaled <= most * SLOWER:
            found.append(
                f"{stated.page}: {stated.what} takes {words}, it says, and it took {measured[stated.what]:.0f} s, "
                f"which are {scaled:.0f} s where the yardstick takes {REFERENCE_S} s"
            )
    return found


def of_tests(by_file: Mapping[str, float]) -> dict[str, float]:
    """The times of what `STATED` names of tests, from those of all files."""
    found = {}
    for what in {one.what for one in STATED if one.what.split()[0] not in ("build", "make", "python")}:
        parts = tuple(part if part.endswith(".py") else f"{part}/" for part in what.split())
        if own := [spent for file, spent in by_file.items() if file.startswith(parts)]:
            found[what] = sum(own)
    return found


def of_tour(log: str, spent: float) -> dict[str, float]:
    """The times of a tour and of its builds, by what it says. None of the latter where something was built before."""
    builds = {}
    for name, minutes, rest in re.findall(r"^\[\d+/\d+\] (build [\w-]+).* … ok, (?:(\d+) min )?([\d.]+) s$", log, re.M):
        builds[name] = 60 * int(minutes or 0) + float(rest)
    whole = {"build all": sum(builds.values())} if len(builds) == len(steps.STEPS) else {}
    return {"tour": spent, **builds, **whole}


def main(log: str, spent: str, *hundredths: str) -> int:
    """Judges a tour. The yardsticks are those of .ci/run: hundredths of a second, for three one after the other."""
    yardsticks = [int(each) / 300 for each in hundredths]
    if reason := why_not(yardsticks):
        print(f"{reason}; no stated time is judged")
        return 3
    found = problems(of_tour(pathlib.Path(log).read_text(encoding="utf-8"), float(spent)), yardsticks)
    print("\n".join(found) or "stated times hold")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
