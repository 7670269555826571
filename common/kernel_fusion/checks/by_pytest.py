"""Plants faults in copies of the tree, one at a time; the test that is named for each must fail, and pass without it.

Where a file is compiled, the objects made of it are compiled anew and linked with the others into the copy's library.
"""

import functools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import Future, as_completed
from pathlib import Path
from typing import Any

from kernel_fusion.checks.faults import Failure, Fault, arguments, output_of, planted, run, threads
from kernel_fusion.steps import ROOT

SECONDS = 600  # for one test: only against a fault that makes it hang
PRELOADED = ["torch", "torch._dynamo", "pytest", "transformers.models.gpt2.modeling_gpt2", "rich.console"]


# ---- a copy of the tree ----


def copy_of_tree(to: Path) -> None:
    """All of the repository but what is hidden, built or installed; of what is built, the steps' libraries."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        half_written = re.compile(r"\.pyc\.\d+$")  # by another process: gone before it is copied
        return {name for name in names if name.startswith(".") or name in ("build", "out") or half_written.search(name)}

    shutil.copytree(ROOT, to, ignore=left_out, symlinks=True)


def is_compiled(fault: Fault) -> bool:
    """Into a step's library. Of the program of step 4, cpp/, of a check of a schedule and of a recorded run the test
    itself compiles what is in the copy."""
    read = fault.file.endswith((".py", ".md"))
    return (
        not read
        and not fault.file.endswith("_check.h")
        and "/cpp/" not in fault.file
        and not fault.file.startswith("emulator/")
    )


def steps_of(fault: Fault) -> list[str]:
    """The folders of the steps that the fault's tests belong to: each links a library of its own."""
    return sorted({test.split("/")[0] for test in fault.tests})


# ---- a test in a copy: in a process forked from one that has imported torch, which saves seconds for each ----


def run_pytest(tree: Path, tests: list[str], log: Path) -> None:
    """Ends the process with pytest's exit code; all that is printed goes into `log`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    # Of this repository's own modules none may stand for the copy's.
    sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(ROOT / "tests"))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("kernel_fusion", "faults")]:
        del sys.modules[name]
    import pytest

    # It runs hundreds of times: asserts are not rewritten, and no garbage is collected at the end.
    quick = ["--assert=plain", "-p", "no:unraisableexception", "-p", "no:cacheprovider"]
    sys.exit(int(pytest.main(["-q", "-x", "--tb=short", *quick, *tests])))


# ---- a library with the fault ----


class Library:
    """A step's library as its setup.py built it: the commands, and which object is made of which files."""

    def __init__(self, step: str):
        self.step = ROOT / step
        output_of([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], self.step)
        (ninja_file,) = ROOT.glob(f"build/temp.*/{step}.ninja")
        (self.place,) = self.step.glob("*/_C*.so")
        self.build = ninja_file.parent
        ninja = [str(Path(sys.executable).with_name("ninja")), "-f", str(ninja_file), "-t"]
        self.commands = json.loads(output_of([*ninja, "compdb"], self.build))
        self.made_of: dict[str, set[str]] = {}
        for paragraph in output_of([*ninja, "deps"], self.build).strip().split("\n\n"):
            head, *files = paragraph.splitlines()
            self.made_of[head.split(": ")[0]] = {str(Path(self.build, file.strip()).resolve()) for file in files}

    def rebuild(self, file: str, tree: Path, tests: tuple[str, ...]) -> None:
        """Links the library anew in `tree`, with the objects that are made of `file` compiled from there.

        Where all `tests` name a rung, other rungs stay as they are: a header of a whole ladder is compiled once, not
        for each of its files.
        """
        named = [re.search(r"\[.*\b(v\d+_\w+|pieces\b)", test) for test in tests]
        tested = {match[1] for match in named if match} if all(named) else None
        compiled = []
        *compilations, link = self.commands  # in the order in which ninja would do them
        for command_of in compilations:
            made_of = self.made_of.get(command_of["output"], set()) | {str(Path(command_of["file"]).resolve())}
            rung = re.fullmatch(r"(v\d+_\w+|pieces)\.cu", Path(command_of["file"]).name)
            if str(ROOT / file) not in made_of or (tested and rung and rung[1] not in tested):
                continue
            Path(moved(command_of["output"], tree)).parent.mkdir(parents=True, exist_ok=True)
            # -w: a fault may leave a variable unused.
            output_of(["sh", "-c", moved(command_of["command"], tree) + " -w"], self.build)
            compiled.append(command_of["output"])
        if not compiled:
            raise Failure(f"nothing of {self.step.name} is made of {file}")
        place = tree / self.place.relative_to(ROOT)
        command = link["command"].replace(link["output"], f"{place}.new")
        for output in compiled:
            command = command.replace(f" {output} ", " ")
        # First, so that of a header's functions that several objects hold the linker takes those with the fault.
        objects = " ".join(moved(output, tree) for output in compiled)
        command = re.sub(r" (?=\S+\.o )", f" {objects} ", command, count=1)
        output_of(["sh", "-c", f"{command} && mv {place}.new {place}"], self.build)


def moved(text: str, tree: Path) -> str:
    """`text` with the repository's paths in `tree`, but for what is hidden, as .venv is, and precompiled headers."""
    return re.sub(re.escape(str(ROOT)) + r"(?=/[^.])(?!\S*/precompiled/)", str(tree), text)


# ---- all of them ----


class Planting:
    """What the workers share: where copies lie, the steps' libraries, and the process that tests are forked from."""

    def __init__(self, folder: Path, faults: list[Fault], jobs: int):
        self.folder, self.clean = folder, folder / "clean"
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        steps = {step for fault in faults if is_compiled(fault) for step in steps_of(fault)}
        self.libraries = {step: Library(step) for step in sorted(steps)}
        copy_of_tree(self.clean)

    def check_clean(self, tests: list[str]) -> None:
        """All `tests` of one file must pass without a fault."""
        tree = self.folder / f"clean-{abs(hash(tuple(tests)))}"
        shutil.copytree(self.clean, tree)
        code, printed = self.run(tree, sorted(set(tests)))
        if code != 0:
            raise Failure(f"without a fault pytest ended with {code}:\n{printed[-6000:]}")

    def check(self, fault: Fault) -> tuple[bool, str]:
        """Whether each of the fault's tests fails with it, and what pytest printed."""
        tree = self.folder / fault.name
        shutil.copytree(self.clean, tree)
        path = tree / fault.file
        path.write_text(planted(fault, path.read_text(encoding="utf-8")), encoding="utf-8")
        if is_compiled(fault):
            for step in steps_of(fault):
                tests = tuple(test for test in fault.tests if test.startswith(f"{step}/"))
                self.libraries[step].rebuild(fault.file, tree, tests)
        caught, all_printed = True, ""
        for test in fault.tests:
            code, printed = self.run(tree, [test])
            crashed = is_compiled(fault) and code < 0  # by a signal: seen too
            if code not in (0, 1) and not crashed:  # 1: tests failed; anything else is no answer
                raise Failure(f"{fault.name}: pytest ended with {code}:\n{printed[-6000:]}")
            caught = caught and code != 0
            all_printed += printed
        shutil.rmtree(tree)
        return caught, all_printed

    def run(self, tree: Path, tests: list[str]) -> tuple[int, str]:
        """pytest's exit code for `tests` in `tree`, and what it printed."""
        log = tree.with_suffix(".log")
        process = self.context.Process(target=run_pytest, args=(tree, tests, log))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            raise Failure(f"{', '.join(tests)} in {tree} did not end within {SECONDS} s")
        assert process.exitcode is not None  # it was waited for
        return process.exitcode, log.read_text(errors="replace")


def plant(faults: list[Fault], jobs: int, show: bool) -> list[str]:
    """Plants each of `faults`. Returns what is wrong: the names of those that survived, and why others say nothing."""
    wrong = []
    files: dict[str, list[str]] = {}
    for fault in faults:
        for test in fault.tests:
            files.setdefault(test.split("::")[0], []).append(test)
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        planting = Planting(Path(temporary), faults, jobs)
        with threads(jobs) as pool:
            work: dict[Future[Any], Fault | None] = {
                pool.submit(planting.check_clean, tests): None for tests in files.values()
            }
            by_time = sorted(faults, key=is_compiled, reverse=True)  # compiled ones take longest
            work |= {pool.submit(planting.check, fault): fault for fault in by_time}
            for future in as_completed(work):
                try:
                    result = future.result()
                except Failure as failure:
                    print(failure, flush=True)
                    wrong.append(str(failure))
                    continue
                if judged := work[future]:
                    caught, printed = result
                    wrong += [] if caught else [judged.name]
                    print(printed if show else "", end="")
                    print(f"{'caught  ' if caught else 'SURVIVED'} {judged.name}", flush=True)
    return wrong


@functools.cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main(doc: str, layers: dict[str, list[Fault]], slow: Collection[str], need_gpu: Collection[str]) -> int:
    """The command. `slow`: layers that take long to compile, up to half a minute a fault; planted if asked for."""
    named = {fault.name: (fault, layer) for layer, faults in layers.items() for fault in faults}
    parser = arguments(doc, list(named))
    parser.add_argument("--all", action="store_true", help=f"those in {' and '.join(slow)} too")
    parser.add_argument("--eightieth", type=int, choices=range(1, 81), help="every eightieth, beginning with this one")
    options = parser.parse_args()
    if options.only:
        chosen = [named[name] for name in named if name in options.only]
    else:
        chosen = [(fault, layer) for fault, layer in named.values() if options.all or layer not in slow]
        chosen = chosen[options.eightieth - 1 :: 80] if options.eightieth else chosen
        chosen = [(fault, layer) for fault, layer in chosen if layer not in need_gpu or has_gpu()]

    def work() -> str:
        if any(layer in need_gpu for _, layer in chosen) and not has_gpu():
            raise Failure("a fault of launches shows on a GPU alone, and there is none")
        wrong = plant([fault for fault, _ in chosen], options.jobs, show=options.only is not None)
        said = f"{len(chosen)} faults, {len(chosen) - len(wrong)} caught"
        if wrong:
            raise Failure("\n".join([said, *(line.splitlines()[0] for line in wrong)]))
        return said

    return run(work)
