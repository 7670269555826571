"""What a rung must keep to, checked by one call: `check_contract`. And what a registered op must keep to: `check_op`.

Environment:
    KF_TEST_DEVICES    cpu | cuda: only that device. Where it names cuda, a missing GPU is a failure, not a skip.
    KF_SIMT_SCHEDULE   forward | reverse | random:SEED: the order of an emulated block's threads between barriers.
"""

# ruff: noqa: F401  this is where tests import them from

from kernel_fusion.testing.contract import (
    Contract,
    ContractError,
    check_apart,
    check_contract,
    check_inside,
    check_reruns,
    differ,
)
from kernel_fusion.testing.devices import DEVICES, DTYPES, device_rungs, stands_for_all, where
from kernel_fusion.testing.gradients import (
    check_each_input_alone,
    check_gradients_in_a_cuda_graph,
    check_outputs_together,
    check_second_gradients,
    check_tangents_are_refused,
)
from kernel_fusion.testing.helpers import check_not_built, main, raises, without_progress
from kernel_fusion.testing.inputs import lazy_memory, randn, staircase, transposed
from kernel_fusion.testing.registration import (
    capture,
    check_automatic,
    check_dependent_launch,
    check_op,
    check_writes,
    writing_overloads,
)
