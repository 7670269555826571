#!/usr/bin/env python3
"""Plants the faults of planted_faults.txt in copies of this project's rungs and shows which tool finds which.

    for p in simt simt-asan simt-tsan; do cmake --preset $p && cmake --build --preset $p; done
    python emulator/tests/planted_faults.py             # fails where the table in ../README.md is another
    python emulator/tests/planted_faults.py --write     # writes it
    python emulator/tests/planted_faults.py --only one-column-too-many      # one of them, with what the tools say
    python emulator/tests/planted_faults.py --step step2-attention         # those in one step

The tests are built first, where they are not up to date; then it takes a few minutes.
"""

import sys
from pathlib import Path

from kernel_fusion.checks import by_tools
from kernel_fusion.checks.faults import read_faults
from kernel_fusion.steps import ROOT

FAULTS = read_faults(Path(__file__).with_suffix(".txt"), by_tools.Fault)

if __name__ == "__main__":
    sys.exit(by_tools.main(__doc__, FAULTS, ROOT / "emulator/README.md"))
