"""gdb on a CUDA program that was compiled for debugging on the CPU."""

import pathlib
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence

import emulator
from emulator.console import UserError

COMMANDS = emulator.FOLDER / "gdb" / "cuda.py"


def debug(program: pathlib.Path, arguments: list[str], commands: Sequence[str] = ()) -> int:
    """Starts gdb on an executable of compile_program(..., flavour="debug"), with the commands of gdb/cuda.py.

    gdb carries out `commands` and ends, without asking anything; without any, it reads commands from the terminal.
    Returns gdb's exit code, with `commands` 1 where the last of them failed. Raises UserError where there is no gdb, or
    one without Python.
    """
    gdb = shutil.which("gdb")
    if gdb is None:
        raise UserError("gdb is not installed; Debian, Ubuntu: apt install gdb; Fedora: dnf install gdb")
    probe = [gdb, "-nx", "-batch", "-ex", "python print(6 * 7)"]
    if subprocess.run(probe, capture_output=True, text=True).stdout.strip() != "42":
        raise UserError(f"{gdb} was built without Python, which its commands for CUDA need; install the package `gdb`")
    script = ["-batch"] if commands else ["-ex", "echo `run` starts the program, `cuda help` lists commands.\\n"]
    for command in commands:
        script += ["-ex", command]
    line = [gdb, "-q", "-x", str(COMMANDS), *script, "--args", str(program), *arguments]
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        return subprocess.run(line).returncode
    before = signal.signal(signal.SIGINT, lambda number, frame: None)  # Ctrl-C is for gdb, which stops the program
    try:
        return subprocess.run(line).returncode
    finally:
        signal.signal(signal.SIGINT, before)
