"""clang-tidy on the host's C++ as the four steps are built: `make tidy`. Ends with 1 where it finds anything.

The commands are those of the build's ninja files, without OpenMP, whose header is the compiler's own.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMANDS = ROOT / "build" / "tidy" / "compile_commands.json"
RULES = ("host", "runtime")  # of kernel_fusion.build: what includes torch, and the emulation itself


def commands(written: pathlib.Path) -> list[dict]:
    """The compilations of a ninja file, as clang-tidy reads them."""
    ninja = [sys.executable, "-m", "ninja", "-C", written.parent, "-f", written.name, "--quiet", "-t", "compdb", *RULES]
    return json.loads(subprocess.run(ninja, stdout=subprocess.PIPE, text=True, check=True).stdout)


def complaints(source: str) -> str:
    """What clang-tidy says of a source and our headers in it."""
    tidy = [sys.executable, "-c", "import clang_tidy; clang_tidy.clang_tidy()", "-p", COMMANDS.parent, "--quiet"]
    # The compiler's own warnings are for the compiler that builds: with KF_WERROR=1 clang's would be errors here.
    flags = [f"--extra-arg={flag}" for flag in ("-fno-openmp", "-Wno-unused-command-line-argument", "-Wno-error")]
    done = subprocess.run([*tidy, *flags, source], capture_output=True, text=True)
    return done.stdout + (done.stderr if done.returncode and not done.stdout else "")


def main() -> int:
    built = [path for path in sorted(ROOT.glob("build/temp.*/step*.ninja")) if "-counting-" not in path.name]
    found = {one["file"]: one for path in built for one in commands(path)}  # all four link the emulation
    COMMANDS.parent.mkdir(exist_ok=True)
    COMMANDS.write_text(json.dumps(list(found.values())), encoding="utf-8")
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        said = [text for text in pool.map(complaints, sorted(found)) if text.strip()]
    print("\n".join(dict.fromkeys(said)) or f"clang-tidy: nothing in {len(found)} files")
    return 1 if said or not found else 0


if __name__ == "__main__":
    sys.exit(main())
