#!/usr/bin/env python3
"""Plants faults in copies of this project, one at a time, and shows that the test named for each fails.

    make build
    python tests/planted_faults.py                 # those in Python and in kernels; fails where one survives. Those
                                                   # of launches only where there is a GPU
    python tests/planted_faults.py --all           # those in host files and plain C++ too, which compile longer
    python tests/planted_faults.py --tenth 1       # the first, eleventh … of them; also 2 to 10
    python tests/planted_faults.py --only NAME     # one of them, or several, with what pytest says
    python tests/planted_faults.py --list WORD     # prints those whose row in the table has WORD; without it, all

A fault is a few words of a file, and other words in their place (faults/). It is planted in a copy of the tree that has
the steps' libraries; where the file is compiled, the objects made of it are compiled anew and linked with the others
into the copy's library. Then the test runs there. It must fail, and it must pass in a copy without any fault.
"""

import sys

import faults.attention
import faults.backward
import faults.checkpoints
import faults.cluster
import faults.contract
import faults.dataflow
import faults.decode
import faults.dropout
import faults.fused_training
import faults.generation
import faults.gradients
import faults.hf_patch
import faults.host
import faults.kernels
import faults.kinds
import faults.linear
import faults.measuring
import faults.merges
import faults.model
import faults.plain
import faults.python
import faults.reads
import faults.rings
import faults.softmax
import faults.training

from kernel_fusion.checks import by_pytest

LAYERS = {
    "Python": [
        *faults.python.FAULTS,
        *faults.gradients.FAULTS,
        *faults.measuring.FAULTS,
        *faults.backward.PYTHON_FAULTS,
        *faults.dropout.PYTHON_FAULTS,
        *faults.linear.PYTHON_FAULTS,
        *faults.fused_training.PYTHON_FAULTS,
        *faults.gradients.OUTPUTS_ALONE,
        *faults.kinds.EMULATION,
    ],
    "model and training": [
        *faults.model.FAULTS,
        *faults.checkpoints.FAULTS,
        *faults.generation.FAULTS,
        *faults.training.FAULTS,
        *faults.hf_patch.FAULTS,
    ],
    "the checks themselves: they no longer see": faults.contract.FAULTS,
    "host": [
        *faults.host.FAULTS,
        *faults.backward.HOST_FAULTS,
        *faults.decode.HOST_FAULTS,
        *faults.dropout.HOST_FAULTS,
        *faults.linear.HOST_FAULTS,
        *faults.dataflow.HOST_FAULTS,
        *faults.fused_training.HOST_FAULTS,
    ],
    "plain C++": [
        *faults.plain.FAULTS,
        *faults.backward.PLAIN_FAULTS,
        *faults.decode.PLAIN_FAULTS,
        *faults.dropout.PLAIN_FAULTS,
        *faults.linear.PLAIN_FAULTS,
        *faults.fused_training.PLAIN_FAULTS,
        *faults.reads.PLAIN_READS,
        *faults.rings.PLAIN_ROUNDS,
    ],
    "kernels and their headers": [
        *faults.kernels.FAULTS,
        *faults.attention.FAULTS,
        *faults.softmax.FAULTS,
        *faults.backward.FAULTS,
        *faults.backward.FIVE_PRODUCTS,
        *faults.decode.FAULTS,
        *faults.dropout.FAULTS,
        *faults.dropout.TENSOR_CORES,
        *faults.linear.FAULTS,
        *faults.dataflow.FAULTS,
        *faults.cluster.FAULTS,
        *faults.fused_training.FAULTS,
        *faults.reads.READS,
        *faults.rings.RINGS,
        *faults.rings.ROUNDS,
        *faults.merges.MERGES,
    ],
    "launches, on a GPU alone": faults.kinds.LAUNCHES,
}
FAULTS = [fault for layer in LAYERS.values() for fault in layer]

if __name__ == "__main__":
    slow, need_gpu = ("host", "plain C++"), ("launches, on a GPU alone",)
    sys.exit(by_pytest.main(__doc__, LAYERS, slow, need_gpu))
