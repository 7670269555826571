"""Counts patterns.cu twice, by Nsight Compute on a GPU and on the CPU, and shows the figures side by side.

    python emulator/tests/counts/compare_with_ncu.py --out emulator/results/h200-counts.json

Needs nvcc, ncu, the driver's leave to read the counters, and g++.
"""

import argparse
import collections
import csv
import datetime
import pathlib
import re
import subprocess
import sys
import tempfile

from emulator import counts
from kernel_fusion.bench.counters import CONFLICTS, REQUESTS, SECTORS, WAVEFRONTS, number
from kernel_fusion.bench.profile import check_allowed, find_ncu
from kernel_fusion.console import UserError
from kernel_fusion.report import results

HERE = pathlib.Path(__file__).resolve().parent

SOURCE = HERE / "patterns.cu"
# By what each of counts.figures is on a GPU: the sum of these. An atomic whose result nobody reads is a reduction.
METRICS = {
    **{
        f"global {kind} {what}": [name.format(op) for op in ops]
        for kind, ops in {"load": ["ld"], "store": ["st"], "atomic": ["red", "atom"]}.items()
        for what, name in {"requests": REQUESTS, "sectors": SECTORS}.items()
    },
    **{
        f"shared {kind} {what}": [name.format(op)]
        for kind, op in {"load": "ld", "store": "st"}.items()
        for what, name in {"wavefronts": WAVEFRONTS, "conflicts": CONFLICTS}.items()
    },
    "shared load requests": ["smsp__sass_inst_executed_op_shared_ld.sum"],
    "shared store requests": ["smsp__sass_inst_executed_op_shared_st.sum"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--arch", default="sm_90", help="for nvcc; default: %(default)s")
    options = parser.parse_args()
    try:
        found = compare(options.arch)
    except UserError as error:
        print(f"compare_with_ncu: {error}", file=sys.stderr)
        return 1
    results.replace(options.out, results.as_text(found, levels=2))
    print(counts.comparison(options.out))
    return 0


def compare(arch: str) -> dict:
    """{"environment": {gpu, driver, cuda, ncu, date}, "kernels": {name: {"emulated", "ncu"}}}, without zeros.

    Raises:
        UserError: a tool is missing or fails; the text is its own.
    """
    ncu = find_ncu()
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "patterns"
        output(["nvcc", "-std=c++17", "-O3", "-lineinfo", f"-arch={arch}", "-o", str(program), str(SOURCE)])
        wanted = [name for names in METRICS.values() for name in names]
        command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        said = output([*command, "--metrics", ",".join(wanted), str(program)])
    measured = by_kernel(said)
    code, kernels = counts.run_program(SOURCE, [])
    if code != 0:
        raise UserError(f"{SOURCE.name} ended with code {code} on the CPU")
    found = {}
    for kernel in kernels:
        row = measured[kernel.name]
        emulated = counts.figures(kernel)
        compared = {key: [row[name] for name in names if name in row] for key, names in METRICS.items()}
        absent = [METRICS[key] for key, values in compared.items() if len(values) < len(METRICS[key])]
        if absent:
            raise UserError(f"ncu did not count {absent} for {kernel.name}")
        sides = {
            "emulated": {key: emulated[key] for key in METRICS},
            "ncu": {key: round(sum(values)) for key, values in compared.items()},
        }
        found[kernel.name] = {side: +collections.Counter(figures) for side, figures in sides.items()}
    return {"environment": environment(ncu), "kernels": found}


def by_kernel(said: str) -> dict[str, dict[str, float]]:
    """The rows of ncu's table by the kernel's plain name. A metric without a figure is left out.

    Raises:
        UserError: there is no table, or ncu was refused the counters.
    """
    check_allowed(said)
    lines = said.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise UserError(f"ncu printed no table:\n{said}")
    rows = {}
    for row in csv.DictReader(lines[start:]):
        if not (row["ID"] or "").isdigit():  # the row of units
            continue
        figures = {metric: number(value or "") for metric, value in row.items() if metric and "__" in metric}
        name = counts.plain_name(row["Kernel Name"])
        rows[name] = {metric: value for metric, value in figures.items() if value == value}
    return rows


def environment(ncu: str) -> dict[str, str]:
    """Where ncu's figures come from."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, driver = (word.strip() for word in output(asked).splitlines()[0].split(",", 1))
    release = re.search(r"release ([\d.]+)", output(["nvcc", "--version"]))
    version = re.search(r"Version ([\d.]+)", output([ncu, "--version"]))
    return {
        "gpu": gpu,
        "driver": driver,
        "cuda": release.group(1) if release else "?",
        "ncu": version.group(1) if version else "?",
        "date": datetime.date.today().isoformat(),
    }


def output(command: list[str]) -> str:
    """What a command prints.

    Raises:
        UserError: it is missing, or ends with another code than 0.
    """
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError as error:
        raise UserError(f"{command[0]} is missing") from error
    if done.returncode != 0:
        check_allowed(done.stdout)
        raise UserError(f"{done.stdout.strip()}\n{command[0]} ended with code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
