"""A step's results file: what a run notes of where and when it measured, and how a later run's rows are merged."""

import datetime
import os
import pathlib
import platform
import re
import subprocess

import torch

from kernel_fusion import steps
from kernel_fusion.report import results


def path_of(step: steps.Step, device: torch.device) -> pathlib.Path:
    """Where the results of `step` on this GPU are kept."""
    return step.path / "results" / f"{gpu_slug(torch.cuda.get_device_name(device))}.json"


def gpu_slug(name: str) -> str:
    """The name of a results file for a GPU: "h200" for "NVIDIA H200", "rtx-4090" for "NVIDIA GeForce RTX 4090"."""
    words = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "gpu"


def environment(device: torch.device) -> dict:
    on_gpu, driver = device.type == "cuda", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "driver": _first_line(driver) if on_gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **provenance(),
    }


def provenance() -> dict:
    """What was measured, and when."""
    return {"commit": _commit(), "date": datetime.date.today().isoformat()}


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=steps.ROOT)
    except FileNotFoundError:
        return None
    lines = done.stdout.split("\n")
    return lines[0].strip() or None if done.returncode == 0 else None


def _commit() -> str | None:
    """The commit that was measured, with "+" where files differ from it.

    Where there is no git, or no checkout, whoever runs the benchmark says it by KF_COMMIT; None if nobody does.
    """
    commit = _first_line(["git", "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return os.environ.get("KF_COMMIT") or None
    return f"{commit}+" if _first_line(["git", "status", "--porcelain"]) else commit


def write(path: pathlib.Path, rows: list[dict], ceilings: dict, device: torch.device) -> None:
    """Writes the results of a whole run. Hardware counters that stood there for the same rows stay, see `profile`."""
    here = environment(device)
    before = []
    if path.exists():
        old = results.read(path)
        keep_counters(rows, old, here)
        before = old.rows
    rows = results.placed(rows, before, map(results.key, rows))
    # Ceilings of other mixes stand only in the rows that they are for.
    kept = {name: ceilings[name] for name in ("copy_gb_s", "matmul_tflop_s")}
    results.write(results.Results(path, here, kept, rows))


def keep_counters(rows: list[dict], before: results.Results, here: dict) -> None:
    """Gives `rows` the hardware counters that `before` has of the same rows, if they are of the same GPU and driver.

    Counting takes runs of its own, by `kernel-fusion profile --save`, and what is counted is not what is timed. A row's
    "profile" says at which commit it was counted.
    """
    if any(before.environment[name] != here[name] for name in ("gpu", "driver", "cuda")):
        return
    counted = {results.key(row): row for row in before.rows if "profile" in row}
    for row in rows:
        if old := counted.get(results.key(row)):
            row.update({name: old[name] for name in ("dram_bytes", "sectors_per_request", "profile")})


def check_mergeable(path: pathlib.Path, device: torch.device) -> None:
    """Returns where figures measured here may stand beside those in `path`.

    Raises:
        ResultsError: there is no such file, or its GPU, driver, CUDA or torch is another one.
    """
    if not path.exists():
        raise results.ResultsError(f"--merge: there is no {path}; run the benchmark without --op first")
    here, there = environment(device), results.read(path).environment
    for name in ("gpu", "driver", "cuda", "torch"):
        if here[name] != there[name]:
            raise results.ResultsError(
                f"--merge: {path} was measured with {name} {there[name]}, this is {name} {here[name]}; "
                "figures of one file must come from one environment. Run the benchmark without --op"
            )


def merge(path: pathlib.Path, rows: list[dict], ceilings: dict, device: torch.device, known: list[tuple]) -> list[dict]:
    """Puts `rows` in the places of those with their keys in a results file. Its other rows stay.

    Where of an op no row stays, or only such as name their run, the file's environment notes commit and date under
    "ops"; else each new row does, as its "run". Ceilings that the file has stay too, since a row has its own.

    `ceilings`: of this run, as `Ceilings.as_json` gives them. `known`: the keys of all that the benchmark has, in its
    order.

    Returns:
        Rows of the ops measured that it has no more, and that are dropped: of other cases, or of rungs that are gone or
        now refuse the case. A peer may only not be installed here.

    Raises:
        ResultsError: as check_mergeable.
    """
    check_mergeable(path, device)
    before, here = results.read(path), environment(device)
    keep_counters(rows, before, here)
    measured, new = {row["op"] for row in rows}, {results.key(row) for row in rows}
    cases = {one[:-1] for one in known}
    kept: list[dict] = []
    dropped: list[dict] = []
    for row in before.rows:
        stands = results.key(row) in known if results.is_ours(row) else results.case_key(row) in cases
        if results.key(row) not in new:
            (kept if stands or row["op"] not in measured else dropped).append(row)
    run = {name: here[name] for name in ("commit", "date")}
    of_before = {row["op"] for row in kept if "run" not in row}
    notes = {**before.environment.get("ops", {}), **dict.fromkeys(measured - of_before, run)}
    old = before._replace(environment={**before.environment, "ops": notes})
    rows = [row if run.items() <= old.environment_of(row["op"]).items() else {**row, "run": run} for row in rows]
    merged = results.placed([*kept, *rows], before.rows, known)
    ops = {op: notes[op] for op in dict.fromkeys(row["op"] for row in merged) if op in notes}
    there = {name: value for name, value in before.environment.items() if name != "ops"} | ({"ops": ops} if ops else {})
    results.write(results.Results(path, there, _merged_ceilings(before.ceilings, ceilings), merged))
    return dropped


def _merged_ceilings(before: dict, new: dict) -> dict:
    """What `before` has, and what it lacks."""
    copies = {**new["copy_gb_s"], **before["copy_gb_s"]}
    product = before["matmul_tflop_s"]
    return {
        "copy_gb_s": dict(sorted(copies.items(), key=lambda item: int(item[0]))),
        "matmul_tflop_s": new["matmul_tflop_s"] if product is None else product,
    }
