"""What one call of a rung does to the GPU, as its hardware counters tell: bytes, sectors, occupancy, the busiest unit.

`kernel-fusion profile OP` starts Nsight Compute (`ncu`) on a child, this module. The child makes the
inputs of a case, warms each rung up, and calls it once between cudaProfilerStart and cudaProfilerStop. Before each call
stands a kernel of torch's that no rung launches: it tells in ncu's list where the next rung begins.

With --device cpu no GPU is needed: `rung_counts` has the emulated kernels count their accesses on a small case.
"""

import argparse
import glob
import importlib
import json
import pathlib
import re
import shutil
import sys

import torch
from rich.console import Console

from emulator import counts
from kernel_fusion import steps
from kernel_fusion.bench import measuring, results_file, rung_counts
from kernel_fusion.bench.counters import (
    METRICS,
    REGISTERS,
    Profile,
    busy,
    by_rung,
    bytes_words,
    limits,
    occupancy_words,
    parse,
    shared_words,
    table_of,
)
from kernel_fusion.console import CommandFailed, UserError, last_lines, progress, run_logged
from kernel_fusion.report import results, syllabus

PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
# What ncu prints where it is refused, and what to do about it.
REMEDIES = {
    r"ERR_NVGPUCTRPERM": (
        "The driver keeps the GPU's counters for administrators. Run the command as root:\n"
        '    sudo -E env PATH="$PATH" kernel-fusion profile …\n'
        "or let everybody read them: put this line into /etc/modprobe.d/nvidia-profiling.conf and restart:\n"
        "    options nvidia NVreg_RestrictProfilingToAdminUsers=0\n"
        "In a container, start it with --cap-add=SYS_ADMIN, or do the latter on its host."
    ),
    r"LibraryNotLoaded": (
        "ncu cannot load the driver's library for counters. Start the container with\n"
        "    --gpus all --env NVIDIA_DRIVER_CAPABILITIES=all --cap-add=SYS_ADMIN\n"
        "Where the machine's owner keeps the counters away, as many who rent GPUs do, only another machine helps."
    ),
    r"^==ERROR==.*driver resource was unavailable": (
        "Another program holds the GPU's counters: another profiler, or a monitor. NVIDIA's DCGM lets go of them with\n"
        "    dcgmi profile --pause"
    ),
    r"^==ERROR==.*not supported": (
        "This ncu does not know the GPU: install the newest Nsight Compute. Or the GPU is a part of one (MIG, vGPU), "
        "whose counters the host's owner must allow."
    ),
}


# ---- what is profiled ----


def cases_of(step: steps.Step, op: str, size: str = "full", device: str = "cuda") -> list[measuring.Case]:
    """The cases of `op` in the step's benchmark.py; by default those that it times on a GPU.

    Raises:
        UserError: it times none.
    """
    found = [case for case in steps.load_benchmark(step).cases(size, device) if case.op == op]
    if not found:
        raise UserError(f"{step.folder}/benchmark.py has no case of {op}")
    return found


def chosen(cases: list[measuring.Case], case: int | None, dtype: str | None) -> int:
    """Which case is meant, counted from 0: the one of that number, counted from 1, or the largest of that type.

    Raises:
        UserError: there is no such case.
    """
    if case is not None:
        if not 1 <= case <= len(cases):
            listed = "\n".join(f"  {number}: {one.title()}" for number, one in enumerate(cases, start=1))
            raise UserError(f"--case must be one of these, got {case}:\n{listed}")
        return case - 1
    fits = [n for n, one in enumerate(cases) if dtype in (None, measuring.dtype_name(one.dtype))]
    if not fits:
        known = ", ".join(dict.fromkeys(measuring.dtype_name(one.dtype) for one in cases))
        raise UserError(f"--dtype must be one of {known}, got {dtype!r}")
    return max(fits, key=lambda n: (cases[n].direction == "forward", cases[n].bytes, cases[n].flops))


def _chosen_rungs(options: argparse.Namespace, known: list[str]) -> list[str]:
    if unknown := [rung for rung in options.rung or [] if rung not in known]:
        raise UserError(f"--rung must be one of {', '.join(known)}, got {unknown[0]!r}")
    return options.rung or known


def find_ncu() -> str:
    """Nsight Compute's command: from the PATH, or from where NVIDIA's packages put it.

    Raises:
        UserError: it is not installed.
    """
    found = shutil.which("ncu") or next((path for place in PLACES for path in sorted(glob.glob(place))[::-1]), None)
    if found is None:
        raise UserError(
            "ncu (Nsight Compute) is neither on the PATH nor under /usr/local/cuda*/bin or /opt/nvidia/nsight-compute. "
            "Install it: apt install nsight-compute from NVIDIA's repository, or from "
            "https://developer.nvidia.com/nsight-compute"
        )
    return found


def command(ncu: str, table: pathlib.Path, child: list[str]) -> list[str]:
    """The command line of ncu: what it counts, and where it writes its table."""
    options = ["--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(table)]
    return [ncu, *options, "--metrics", ",".join(METRICS), sys.executable, "-m", "kernel_fusion.bench.profile", *child]


def measure(step: steps.Step, op: str, case: int, rungs: list[str]) -> tuple[list[Profile], dict[str, str]]:
    """Runs ncu on one call of each rung.

    Returns:
        The profiles, and the reasons of rungs that refuse the case.

    Raises:
        UserError: ncu is missing, or is refused the counters; the text says what to do.
    """
    folder = steps.ROOT / "build" / "profile"
    log, table, launched = (folder / f"{op}.{ending}" for ending in ("log", "csv", "json"))
    for path in (table, launched):
        path.unlink(missing_ok=True)
    words = command(find_ncu(), table, [str(launched), step.module, op, str(case), *rungs])
    failure = ""
    try:
        run_logged(words, log, cwd=steps.ROOT)
    except CommandFailed as error:
        failure = f"ended with code {error.code}"
    if not failure and not launched.exists():
        failure = "did not run the rungs"
    printed = {path: path.read_text(encoding="utf-8", errors="replace") for path in (table, log) if path.exists()}
    check_allowed("\n".join(printed.values()))
    if failure:
        raise UserError(f"{last_lines(log, 15)}\nncu {failure}; its output is in {folder}")
    done = json.loads(launched.read_text(encoding="utf-8"))
    profiles = by_rung(parse(printed.get(table, "")), done["ran"]) if done["ran"] else []
    return profiles, done["refused"]


def check_allowed(said: str) -> None:
    """Returns where ncu was let do its work.

    Args:
        said: all that it printed.

    Raises:
        UserError: it was refused the counters; the text says why and what to do.
    """
    for line in said.splitlines():
        for pattern, remedy in REMEDIES.items():
            if re.search(pattern, line):
                raise UserError(f"{line.strip('= ')}\n{remedy}")


# ---- the child ----


def exercise(case: measuring.Case, rungs: list[str]) -> dict:
    """Calls each rung once where ncu looks: warm, with an empty L2, after a marker.

    Returns:
        {"ran": rungs in order, "refused": {rung: reason}}.
    """
    device = torch.device("cuda")
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(max(4 * l2, 1 << 28), dtype=torch.int8, device=device)
    ran, refused = [], {}
    with torch.set_grad_enabled(case.direction == "backward"):
        inputs = case.inputs(device)
        for rung in rungs:
            own = measuring.own_copy(inputs)
            try:
                for _ in range(2):
                    case.run(*own, rung=rung)
            except (ValueError, RuntimeError) as refusal:
                if f"rung '{rung}'" not in str(refusal):
                    raise
                refused[rung] = str(refusal)
                continue
            flush.zero_()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda._sleep(1)
            case.run(*own, rung=rung)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
            ran.append(rung)
    return {"ran": ran, "refused": refused}


# ---- counts on the CPU ----


def run_on_cpu(options: argparse.Namespace, console: Console) -> None:
    """`kernel-fusion profile OP --device cpu`: what each rung's kernels access, line by line.

    Raises:
        UserError: a name is unknown, or the library cannot be built.
    """
    step = syllabus.step_of(options.op)
    if options.save:
        raise UserError("--save writes what a GPU's counters say, and goes with --device cuda only")
    rungs = _chosen_rungs(options, [rung.name for rung in syllabus.rungs(step, options.op)])
    with progress(f"building {step.folder} with kernels that count") as on_progress:
        library = rung_counts.build(step, [options.op], on_progress)
    rung_counts.use_library(step, library)
    cases = cases_of(step, options.op, "emulated", "cpu")
    number = chosen(cases, options.case, options.dtype)
    title = f"case {number + 1} of {len(cases)}: {cases[number].title()}"
    console.print(title, style="bold", markup=False, soft_wrap=True)
    console.print(f"{cases[number].bytes:,} bytes must be read or written, once each", markup=False)
    wanted = [rung_counts.Wanted(options.op, rung, number) for rung in rungs]
    with progress("running") as on_progress:
        counted = rung_counts.count(step, library, wanted, lambda one: on_progress(one.rung))
    found: dict[str, list[counts.Kernel]] = {}
    for one, kernels in counted.items():
        console.rule(one.rung, align="left")
        if isinstance(kernels, str):
            console.print(kernels, markup=False, soft_wrap=True)
        else:
            found[one.rung] = kernels
            counts.show(kernels, console)
    if options.json:
        listed = {rung: [kernel.as_json() for kernel in kernels] for rung, kernels in found.items()}
        text = json.dumps({"op": options.op, "case": cases[number].title(), "rungs": listed}, indent=1)
        results.replace(options.json, text + "\n")


# ---- results ----


def save(path: pathlib.Path, case: measuring.Case, profiles: list[Profile]) -> None:
    """Writes the counters into the rungs' rows of a results file.

    Raises:
        ResultsError: as find_rows.
    """
    loaded = results.read(path)
    rows = find_rows(loaded, case, [profile.rung for profile in profiles])
    for profile, row in zip(profiles, rows, strict=True):
        row["dram_bytes"] = profile.dram_bytes
        load, store = profile.sectors("ld"), profile.sectors("st")
        row["sectors_per_request"] = {"load": results.rounded(load), "store": results.rounded(store)}
        row["profile"] = {
            "kernels": len(profile.kernels),
            "occupancy": results.rounded(profile.occupancy),
            "registers": int(max(kernel[REGISTERS] for kernel in profile.kernels)),
            "limit": limits(profile),
            "busy": busy(profile.longest),
            "conflicts": results.rounded(profile.conflicts),
            **results_file.provenance(),
        }
    results.write(loaded)


def find_rows(loaded: results.Results, case: measuring.Case, rungs: list[str]) -> list[dict]:
    """The rows of these rungs at this case.

    Raises:
        ResultsError: a rung has none.
    """
    rows = {row["impl"]: row for row in loaded.rows if results.case_key(row) == case.key() and results.is_ours(row)}
    for rung in rungs:
        if rung not in rows:
            raise results.ResultsError(
                f"--save: {loaded.path} has no row of {case.title()}, '{rung}'; measure it first: "
                f"kernel-fusion bench --op {case.op} --merge"
            )
    return [rows[rung] for rung in rungs]


# ---- the command ----


def run(options: argparse.Namespace, console: Console) -> None:
    """Does what the arguments say.

    Raises:
        UserError: there is no GPU or no ncu, the counters are refused, or a name is unknown.
    """
    if options.device == "cpu":
        run_on_cpu(options, console)
        return
    if options.json:
        raise UserError("--json goes with --device cpu; on a GPU, --save writes the figures into results/<gpu>.json")
    step = syllabus.step_of(options.op)
    if not torch.cuda.is_available():
        raise UserError(
            f"profile needs a GPU, and torch {torch.__version__} sees none; --device cpu counts accesses without one"
        )
    find_ncu()
    cases = cases_of(step, options.op)
    number = chosen(cases, options.case, options.dtype)
    case = cases[number]
    known = importlib.import_module(step.module).rungs(options.op, "cuda")
    if not known:
        raise UserError(f"{step.folder} was built without CUDA; build it where nvcc is: {steps.build_command(step)}")
    rungs = _chosen_rungs(options, known)
    path = results_file.path_of(step, torch.device("cuda"))
    if options.save:  # before ncu takes its time
        if not path.exists():
            raise UserError(f"--save: there is no {path}; measure first: kernel-fusion bench {step.folder}")
        find_rows(results.read(path), case, options.rung or [])
    console.print(f"case {number + 1} of {len(cases)}: {case.title()}", style="bold", markup=False, soft_wrap=True)
    with progress(f"running {len(rungs)} rungs under Nsight Compute"):
        profiles, refused = measure(step, options.op, number, rungs)
    for reason in refused.values():
        console.print(reason, markup=False, soft_wrap=True)
    if not profiles:
        raise UserError("every rung refuses this case")
    show(profiles, case, console)
    if options.save:
        save(path, case, profiles)
        console.print(f"written: {path}", soft_wrap=True)


def show(profiles: list[Profile], case: measuring.Case, console: Console) -> None:
    """Prints the table, and for each rung what holds it up."""
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    console.print(f"predicted: {case.bytes:,} bytes, read or written once", markup=False)
    console.print(table_of(profiles, case.bytes))
    console.print(
        "A sector is 32 bytes. A request, 32 lanes side by side, needs 2, 4, 8 or 16 sectors where each lane takes 2, "
        "4, 8 or 16 bytes; with 32, each lane has a sector of its own. Caches were empty: compare bytes here, and "
        "times in the benchmark.",
        markup=False,
    )
    for profile in profiles:
        console.print(f"\n{profile.rung}", style="bold", markup=False)
        for line in (
            f"limit: {limits(profile)}",
            bytes_words(profile, case.bytes, l2),
            f"occupancy: {occupancy_words(profile.longest)}",
            "busy: " + ", ".join(f"{unit} {percent:.0f} %" for unit, percent in busy(profile.longest).items()),
            f"shared memory: {shared_words(profile)}",
        ):
            console.print(f"  {line}", markup=False, soft_wrap=True)


def main(launched: str, step: str, op: str, case: str, *rungs: str) -> None:
    """What ncu watches. `launched` gets what ran; cases are counted from 0."""
    done = exercise(cases_of(steps.find(step), op)[int(case)], list(rungs))
    results.replace(pathlib.Path(launched), json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
