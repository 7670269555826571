"""Where dropout's random numbers come from, whichever op drops: a state that is given, or a new one."""

import pytest
import torch

from kernel_fusion import testing
from step3_fused import attention_testing, epilogue_testing
from step3_fused.attention_testing import ALONE, BLOCK, call, on_each_device
from step3_fused.epilogue_testing import EPILOGUES

# An op, and what it calls the part that it drops and the state.
PARTS = [
    ("residual_layer_norm", "dropout_p", "rng_state"),
    ("linear_bias_dropout_residual", "dropout_p", "rng_state"),
    (ALONE, "attention_dropout_p", "attention_rng_state"),
    (BLOCK, "dropout_p", "rng_state"),
    (BLOCK, "attention_dropout_p", "attention_rng_state"),
]


def inputs_of(op, dtype, device):
    """Without dropout's arguments."""
    if op in EPILOGUES:
        return EPILOGUES[op][0].inputs(16, 24, 72, dtype, device, False)[:4]
    if op in attention_testing.ROWS:
        return attention_testing.row_inputs(op, (40, 96), dtype, device)
    return attention_testing.attention_inputs(op, 3, 2, 37, 70, 8, dtype, device)


def parts_and_rungs():
    for op, part, state in PARTS:
        for param in testing.device_rungs("step3_fused", op):
            device, rung = param.values
            dtype = torch.bfloat16 if rung in epilogue_testing.TENSOR_CORES else attention_testing.dtype_of(rung)
            if op in EPILOGUES:
                able = epilogue_testing.drops(op, rung)
                able = able and epilogue_testing.able(op, rung, device, 16, 24, 72, dtype, False)
            else:
                weights = 0.5 if part == "attention_dropout_p" else 0.0
                able = attention_testing.can_do(rung, dtype, weights) and attention_testing.can_run(device, rung)
            if able:
                yield pytest.param(
                    op, part, state, device, rung, dtype, marks=param.marks, id=f"{op}-{part}-{param.id}"
                )


@on_each_device
@pytest.mark.parametrize(("op", "part", "state"), PARTS)
def test_dropout_draws_a_state_of_its_own(op, part, state, device):
    inputs = inputs_of(op, torch.float32, device)

    def outputs(dropped, **options):
        return call(op, inputs, **{part: dropped}, **options)[-1]

    torch.manual_seed(3)
    first, second = outputs(0.5), outputs(0.5)
    torch.manual_seed(3)
    assert torch.equal(outputs(0.5, training=False), outputs(0.0))  # moves nothing on
    assert torch.equal(outputs(0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("op", "part", "state", "device", "rung", "dtype"), list(parts_and_rungs()))
def test_the_same_state_gives_the_same_and_another_gives_another(op, part, state, device, rung, dtype):
    """It is a tensor that the op reads when it is called: on the CPU, or in the GPU's memory."""
    inputs, rng_state = inputs_of(op, dtype, device), torch.tensor(attention_testing.RNG_STATE)
    expected = call(op, inputs, rung, **{part: 0.5, state: rng_state})
    for place in ("cpu", device):
        there = rng_state.to(place, copy=True)
        for change, same in ((0, True), (1, False), (-1, True)):
            there[0] += change
            got = call(op, inputs, rung, **{part: 0.5, state: there})
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) is same
