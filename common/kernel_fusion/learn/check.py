"""`kernel-fusion learn check`: an answer to an exercise is right, and does what its lesson is about.

Results alone do not tell: where every thread does all of the work, they are right, too. So the head of a solution says
what counts in it,

    // Counted: global load sectors, barriers

and of each of these an answer may take a fifth more than the solution, counted in the same run. What stands behind
`// Scored:` is shown beside the solution's, and nothing else. A puzzle's answer may not have a race, either.
"""

import functools
import math
import os
import pathlib
import re
import shlex
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from emulator import counts, programs
from emulator.ninja_file import is_clang
from kernel_fusion import steps
from kernel_fusion.console import UserError
from kernel_fusion.learn import exercises

ORDERS = ("forward", "reverse", "random:1")
COUNTED, SCORED = (re.compile(rf"^// {what}: (.+)$", re.MULTILINE) for what in ("Counted", "Scored"))
MORE = 1.2  # times what the solution takes
UNORDERED = "Nothing says which of the two comes first: another order of the threads, another result."


def measures(kernels: list[counts.Kernel]) -> dict[str, int]:
    """All that can be counted, over a program's kernels, by the words of a line `// Counted: …`."""
    found = {
        "launches": sum(launch["times"] for kernel in kernels for launch in kernel.launches),
        "barriers": sum(kernel.total.barriers for kernel in kernels),
        "shuffles": sum(kernel.total.shuffles for kernel in kernels),
    }
    for kind in counts.KINDS:
        space = ("requests", "sectors") if kind.startswith("global") else ("requests", "wavefronts", "conflicts")
        for field in space:
            found[f"{kind} {field}"] = sum(getattr(kernel.total[kind], field) for kernel in kernels)
    return found


def counted_words(solution: pathlib.Path, line_of: re.Pattern = COUNTED) -> list[str]:
    """What counts in an exercise; nothing in a bug hunt. Or what is scored.

    Raises:
        UserError: a word that nothing is counted by.
    """
    line = line_of.search(solution.read_text(encoding="utf-8"))
    words = line[1].split(", ") if line else []
    if unknown := set(words) - set(measures([])):
        raise UserError(f"{solution}: counted can be {', '.join(measures([]))}, got {', '.join(sorted(unknown))}")
    return words


def include_dirs(solution: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Where an exercise finds what it includes: as if it lay beside the solutions, and the steps' headers."""
    return (solution.parent, *(step.path / "include" for step in steps.STEPS))


def ran(
    source: pathlib.Path, solution: pathlib.Path, order: str, flavour: str = "plain"
) -> subprocess.CompletedProcess:
    """`source`, an answer to the exercise of `solution`, run with its threads in this order; its output as text."""
    return _run(programs.compile_program(source, flavour=flavour, include_dirs=include_dirs(solution)), order)


def _run(program: pathlib.Path, order: str) -> subprocess.CompletedProcess:
    environment = programs.run_environment(order)  # as `kernel-fusion simt` does
    return subprocess.run([str(program)], env=environment, capture_output=True, text=True)


def counted(source: pathlib.Path, solution: pathlib.Path) -> dict[str, int]:
    """What `source`, an answer to the exercise of `solution`, asks of the hardware.

    Raises:
        UserError: it cannot be compiled, does not come to its end, or is not right.
    """
    code, kernels = counts.run_program(
        source, [], include_dirs=include_dirs(solution), schedule="forward", stdout=subprocess.DEVNULL
    )
    if code != 0:
        raise UserError(f"{source} ended with code {code}")
    return measures(kernels)


@functools.cache
def counted_solution(solution: pathlib.Path) -> dict[str, int]:
    """As `counted` of the solution itself, once for all answers that are checked."""
    return counted(solution, solution)


def score(source: pathlib.Path, solution: pathlib.Path) -> dict[str, tuple[int, int]]:
    """What `source` takes of all that is counted or scored, and what the solution does. Raises UserError as `counted`
    does."""
    words = counted_words(solution) + counted_words(solution, SCORED)
    if not words:
        return {}
    theirs, ours = counted(source, solution), counted_solution(solution)
    return {word: (theirs[word], ours[word]) for word in words}


def beside_the_lesson(found: dict[str, tuple[int, int]], solution: pathlib.Path) -> list[str]:
    """A line for each thing of which an answer with such a score takes more than it may."""
    counted = {word: found[word] for word in counted_words(solution)}
    return [
        f"{word}: {theirs:,}, and the solution takes {ours:,}"
        for word, (theirs, ours) in counted.items()
        if theirs > MORE * ours
    ]


def table(found: dict[str, tuple[int, int]]) -> str:
    """A score, for people."""
    rows = [(word, f"{theirs:,}", f"{ours:,}") for word, (theirs, ours) in found.items()]
    return "\n".join(f"{word:26}{theirs:>10}{ours:>12}" for word, theirs, ours in [("", "yours", "best known"), *rows])


def said_by(done: subprocess.CompletedProcess, source: pathlib.Path) -> str:
    """What a run of `source` printed; of a trace of the race detector's library only the line of ours."""
    error, _, trace = done.stderr.partition("ThreadSanitizer:DEADLYSIGNAL")
    line = re.search(rf"{re.escape(str(source))}:\d+", trace)
    return done.stdout + error.rstrip() + (f", at {line[0]}" if line else "")


def counting(source: pathlib.Path, solution: pathlib.Path) -> str:
    """The command that counts line by line."""
    included = re.findall(r'^#include [<"](.+)[>"]', source.read_text(encoding="utf-8"), re.MULTILINE)
    included = [name for name in included if not (source.parent / name).exists()]
    folders = [folder for folder in include_dirs(solution) if any((folder / name).exists() for name in included)]
    words = ["kernel-fusion", "simt", "--count", *(f"-I{os.path.relpath(folder)}" for folder in folders)]
    return shlex.join([*words, os.path.relpath(source)])


# How a program names the first element that is wrong, and the launch before it.
NUMBER = r"(-?(?:nan|inf|\d+(?:\.\d+)?(?:e[+-]\d+)?))"
ELEMENT = re.compile(rf"(?:\w((?:\[\d+\])+)|\w+ \d+) is {NUMBER}, must be {NUMBER}(.*)")
LAUNCH = re.compile(r"(\d+) blocks? of (\d+)")


def likely_cause(printed: str) -> str:
    """Why the first element that a program calls wrong may be so, as far as its numbers tell; else ""."""
    found = ELEMENT.search(printed)
    if not found or re.match(r"[:;] \w", found[4]):  # the program says why
        return ""
    index, got, want = found[1] or "", float(found[2]), float(found[3])
    launch = LAUNCH.search(printed[: found.start()].rpartition("\n")[2])
    first = int(index[1:-1]) if index.count("[") == 1 else None
    if launch and first and first == int(launch[1]) * int(launch[2]):
        return f"{first} is the first that {launch[0]} threads do not reach, an element each"
    if launch and first and first == int(launch[2]):
        return f"{first} is the first of block 1: what tells a thread its block?"
    if math.isnan(got):
        return "never written, if NaN lay there before; else made of a NaN, or of 0 / 0 or inf - inf"
    if want and got == 0:
        return "nothing was added to it"
    for factor, words in ((2, "twice what it must be"), (0.5, "half of what it must be"), (-1, "the sign is turned")):
        if want and math.isclose(got, factor * want, rel_tol=1e-4):
            return words
    return ""


def why_more(word: str, found: dict[str, tuple[int, int]]) -> str:
    """Why an answer may take more of one thing than it may; "" where the counts do not tell."""
    theirs, ours = found[word]
    times = theirs / ours if ours else 0
    kind, _, what = word.rpartition(" ")
    requests = found.get(f"{kind} requests")
    if what == "sectors" and requests and ours and theirs / requests[0] > MORE * ours / requests[1]:
        return "each request takes more sectors: the lanes of a warp do not take neighbours"
    if what in ("conflicts", "wavefronts"):
        return "lanes of a warp want different words of one bank"
    if times > 16:
        return f"{times:.0f} times as many: does every thread do the work of all?"
    if what == "requests":
        return "the same is asked for more than once, or by fewer lanes of a warp or fewer bytes at a time"
    return ""


def _say_race(source: pathlib.Path, solution: pathlib.Path, say: Callable[[str], None]) -> None:
    """Where the order counts: the two lines of a race, if there is one. Not in a hunt, which is about finding them."""
    if solution.stem.startswith("hunt") or not _has_race_detector():
        return
    done = ran(source, solution, ORDERS[0], "race")
    if _is_race(done):
        say(said_by(done, source).rstrip())


def _is_race(done: subprocess.CompletedProcess) -> bool:
    return "race in " in done.stderr


def _has_race_detector() -> bool:
    return not is_clang(os.environ.get("CXX", "c++"))  # it is g++'s


def check(source: pathlib.Path, solution: pathlib.Path, say: Callable[[str], None] = print) -> bool:
    """Checks an answer, and says what it finds: what is wrong first, and where that can be told, why."""
    puzzle = exercises.group_of(solution) == exercises.PUZZLES
    flavour = "race" if puzzle and _has_race_detector() else "plain"
    # All at once, since a reader waits. The race detector takes long to begin, and sees a race in any order: in the
    # others runs what `score` needs.
    flavours = [flavour, *["count"] * bool(counted_words(solution) + counted_words(solution, SCORED))]
    with ThreadPoolExecutor() as pool:
        compiles = functools.partial(programs.compile_program, source, include_dirs=include_dirs(solution))
        program, *for_score = pool.map(lambda one: compiles(flavour=one), flavours)
        others = for_score[0] if flavour == "race" and for_score else program
        runs = pool.map(_run, [program, others, others], ORDERS)
    printed = None
    for order, done in zip(ORDERS, runs, strict=True):
        if done.returncode != 0:
            say(said_by(done, source).rstrip())
            if _is_race(done):
                say(UNORDERED)
                return False
            if cause := likely_cause(done.stdout):
                say(f"Likely: {cause}.")
            if order != ORDERS[0]:
                say(
                    f"So it is in another order of the threads, KF_SIMT_SCHEDULE={order}; in the usual one it is right."
                )
                _say_race(source, solution, say)
            return False
        if printed not in (None, done.stdout):
            say(f"{printed}In another order of the threads, KF_SIMT_SCHEDULE={order}, the same program prints:")
            say(f"{done.stdout}So its results depend on the order in which its threads come.")
            _say_race(source, solution, say)
            return False
        printed = done.stdout
    found = score(source, solution)
    if more := beside_the_lesson(found, solution):
        say("The results are right, but this is not what the exercise is about:")
        for line in more:
            say(f"  {line}")
            if cause := why_more(line.partition(":")[0], found):
                say(f"    likely: {cause}")
        say(f"By which lines? {counting(source, solution)}")
        return False
    verdict = f"all right, in {len(ORDERS)} orders of the threads"
    if puzzle:
        say(done.stdout.replace("all right\n", f"{verdict}{' and without a race' * (flavour == 'race')}"))
        say(table(found))
    else:
        words = counted_words(solution)
        say(verdict + (f"; counted: {', '.join(words)}" if words else ""))
    return True
