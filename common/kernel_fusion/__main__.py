"""python -m kernel_fusion: the command `kernel-fusion` where the package is not installed."""

import sys

from kernel_fusion.cli import main

sys.exit(main())
