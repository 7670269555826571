"""A fault that the tour shows, and how the emulation finds it."""

import re
import subprocess

from rich.console import Console

from emulator import programs
from kernel_fusion import steps

RACE = "docs/examples/row_mean.cu"


def race(console: Console) -> None:
    """Has the race detector run a program in which a barrier is missing.

    Raises:
        RuntimeError: it finds nothing.
    """
    program = programs.compile_program(steps.ROOT / RACE, flavour="race")
    environment = programs.run_environment("forward")
    done = subprocess.run([str(program)], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    console.print(f"In {RACE} a thread computes a row's mean, all others subtract it, and no barrier is between.")
    console.print(
        "In the usual order of the threads the result is right all the same. The race detector finds it there:"
    )
    said = done.stderr.replace(f"{steps.ROOT}/", "").rstrip()
    console.print(said, markup=False, soft_wrap=True)
    if not re.search(r"race in shared memory, `mean`\n.* reads .*\n.* wrote ", said):
        raise RuntimeError(f"the race was not found; the program ended with code {done.returncode}")
    console.print(f"Yourself: kernel-fusion simt --race {RACE}; other faults, each with its tool: docs/debugging.md")
