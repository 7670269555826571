#!/usr/bin/env python3
"""Plants faults in copies of this project, one at a time, and shows that the test named for each fails.

    make build
    python tests/planted_faults.py                 # those in Python and in kernels; fails where one survives. Those
                                                   # of launches only where there is a GPU
    python tests/planted_faults.py --all           # those in host files, plain C++ and the program too, which compile
                                                   # longer
    python tests/planted_faults.py --eightieth 1   # the first, the eighty-first … of them; also 2 to 80
    python tests/planted_faults.py --only NAME     # one of them, or several, with what pytest says

README.md beside this file says what they are.
"""

import sys
from pathlib import Path

from kernel_fusion.checks import by_pytest
from kernel_fusion.checks.faults import read_faults

LAYERS = {path.stem: read_faults(path) for path in sorted(Path(__file__).with_name("faults").glob("*.txt"))}
FAULTS = [fault for layer in LAYERS.values() for fault in layer]

if __name__ == "__main__":
    sys.exit(by_pytest.main(__doc__, LAYERS, slow=("host", "plain", "program"), need_gpu=("launches",)))
