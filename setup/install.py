"""Installs setup/dependencies.txt into the Python that runs this: `python setup/install.py`; `make setup` calls it.

torch comes first, because it has several builds of one version. pip's configured registry decides which, except that
a Linux machine with neither an NVIDIA GPU nor nvcc takes torch's CPU build: the one on PyPI brings CUDA libraries of
several GB that nothing there could use. TORCH_INDEX=<address> takes torch from that index instead.

What pip says goes to build/setup.log; it is shown where pip fails.
"""

from __future__ import annotations  # an old Python shall read this far and be told so

import compileall
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOG = ROOT / "build" / "setup.log"
SILENT_S = 15
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def answers(index: str, seconds: float = 5) -> bool:
    """True where the package index at `index` has a page for torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=seconds) as page:
            return page.status == 200
    except (urllib.error.URLError, OSError):
        return False


def torch_index() -> str | None:
    """The index to take torch from, or None for pip's configured one."""
    asked = os.environ.get("TORCH_INDEX")
    if asked:
        return asked
    if platform.system() != "Linux":  # no CUDA build there to avoid
        return None
    if pathlib.Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") or shutil.which("nvcc"):
        return None
    return CPU_INDEX if answers(CPU_INDEX) else None


def torch_pin() -> str:
    """The requirement "torch==…" as dependencies.txt has it."""
    return re.search(
        r"^torch==\S+", (ROOT / "setup" / "dependencies.txt").read_text(encoding="utf-8"), re.MULTILINE
    ).group()


def run(what: str, command: list[str]) -> int:
    """Runs pip, its output in the log, and says each quarter of a minute that it is at work. Returns its code."""
    LOG.parent.mkdir(exist_ok=True)
    begun = time.monotonic()
    print(f"setup: {what} …", end="", flush=True)
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        begin = log.tell()
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        while True:
            try:
                code = child.wait(timeout=SILENT_S)
                break
            except subprocess.TimeoutExpired:
                print(f" {time.monotonic() - begun:.0f} s …", end="", flush=True)
            except BaseException:
                child.terminate()
                child.wait()
                raise
    print(f" {'failed' if code else 'ok'}, {time.monotonic() - begun:.0f} s", flush=True)
    if code:
        said = LOG.read_bytes()[begin:].decode(errors="replace").splitlines()
        print("\n".join(said[-30:]), file=sys.stderr)
    return code


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036  ruff believes that no older Python comes here
        print(f"setup: Python 3.10 or newer is needed, this is {platform.python_version()}", file=sys.stderr)
        return 1
    # pip would compile one module after the other.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    index = torch_index()
    from_index = ["--index-url", index] if index else []
    LOG.unlink(missing_ok=True)
    for what, command in (
        (f"{torch_pin()} from {index or 'the configured package registry'}", [*pip, torch_pin(), *from_index]),
        ("setup/dependencies.txt", [*pip, "-r", "setup/dependencies.txt"]),
    ):
        code = run(what, command)
        if code:
            print(f"setup: failed: {' '.join(command)}; see setup/environment.md", file=sys.stderr)
            return code
    # On all cores, and torch alone, which every command imports. Its files for newer Pythons fail, which is no matter.
    compileall.compile_dir(os.path.join(sysconfig.get_path("purelib"), "torch"), quiet=2, workers=0)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
