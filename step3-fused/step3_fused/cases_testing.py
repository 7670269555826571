"""Every op of this step in a few lines, for tests of what all ops must keep to."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import step3_fused
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple
from kernel_fusion.testing.memory import is_floating
from step3_fused import attention_testing, epilogue_testing
from step3_fused.attention_testing import ALONE, BLOCK, FORMULAS, ROWS, attention_inputs, formula_of, front_inputs
from step3_fused.epilogue_testing import EPILOGUES


class Case(NamedTuple):
    op: str
    inputs: Callable  # of dtype, device, and whether to make them large
    formula: Any = None  # of what the Python function returns
    options: dict = {}  # noqa: RUF012


def plain_inputs(op, dtype, device, large):
    if op in ROWS:
        return attention_testing.row_inputs(op, (40, 96) if large else (3, 6), dtype, device)
    return attention_inputs(op, *((2, 3, 40, 40, 16) if large else (2, 3, 5, 7, 8)), dtype, device)


def with_front(x_bias, dropout_p):
    def inputs(dtype, device, large):
        return front_inputs((40, 96) if large else (3, 6), dtype, device, x_bias=x_bias, dropout_p=dropout_p)

    return Case("residual_layer_norm", inputs, formula_of("residual_layer_norm"))


def padded(op, dropout_p, attention_dropout_p):
    def given(dtype, device, large):
        shape = (3, 3, 40, 70, 16) if large else (3, 2, 5, 9, 8)
        parts = {"dropout_p": dropout_p, "attention_dropout_p": attention_dropout_p}
        return attention_testing.given(op, dtype, device, shape=shape, **parts)

    options = {"causal": True, "scale": 0.3} | given(torch.float32, "cpu", False)[1]
    return Case(op, lambda *a: given(*a)[0], formula_of(op), options)


def packed(dropout_p, attention_dropout_p):
    def given(dtype, device, large):
        parts = {"dropout_p": dropout_p, "attention_dropout_p": attention_dropout_p}
        return attention_testing.packed([13, 0, 33, 4] if large else [2, 0, 3, 1], dtype, device, **parts)

    options = {"causal": True} | given(torch.float32, "cpu", False)[1]
    return Case(BLOCK, lambda *a: given(*a)[0], formula_of(BLOCK), options)


def layer_norm_backward_inputs(dtype, device, large):
    x, weight, bias = attention_testing.row_inputs("layer_norm", (3, 8), dtype, device)
    statistics = step3_fused.layer_norm(x, weight, bias, return_statistics=True)[1:]
    grad, grad_sum = (testing.randn(x.shape, dtype, device, seed=seed) for seed in (3, 4))
    return grad, x, weight, *statistics, grad_sum


def epilogue(op, case):
    return Case(op, lambda dtype, device, large: case.inputs((2, 4), 8, 16, dtype, device, False))


NORMS = {op: Case(op, functools.partial(plain_inputs, op), formula_of(op)) for op in FORMULAS}
NORMS |= {
    f"residual_layer_norm {name}": with_front(*front)
    for name, front in {
        "x_bias, dropout": (True, 0.1),
        "x_bias": (True, 0.0),
        "dropout": (False, 0.1),
        "x_bias, all dropped": (True, 1.0),
    }.items()
}
NORMS |= {f"{op} padding": padded(op, 0.0, 0.0) for op in (ALONE, BLOCK)}
NORMS |= {f"{op} padding, weights dropped": padded(op, 0.0, 0.2) for op in (ALONE, BLOCK)}
NORMS |= {f"{BLOCK} padding, dropout": padded(BLOCK, 0.3, 0.0), f"{BLOCK} padding, both": padded(BLOCK, 0.3, 0.2)}
NORMS |= {f"{BLOCK} packed": packed(0.0, 0.0), f"{BLOCK} packed, both": packed(0.3, 0.2)}
PRODUCTS = {f"{op} {i}": epilogue(op, case) for op, cases in EPILOGUES.items() for i, case in enumerate(cases[:2])}
CASES = NORMS | PRODUCTS | {"layer_norm_backward": Case("layer_norm_backward", layer_norm_backward_inputs)}
FORWARD = [name for name, case in CASES.items() if "backward" not in case.op]

every_case = pytest.mark.parametrize("name", CASES)
every_norm = pytest.mark.parametrize("name", NORMS)
every_forward = pytest.mark.parametrize("name", FORWARD)


def differentiable(name, dtype, device, *, function=None, large=False, on_device=False, **options):
    """The op, or another function, of its floating tensors, and these. It returns a tuple.

    on_device: dropout's states lie there, too, as a CUDA graph wants them.
    """
    case = CASES[name]
    inputs = case.inputs(dtype, device, large)
    if on_device:
        inputs = [t.to(device) if torch.is_tensor(t) else t for t in inputs]
    where = [i for i, value in enumerate(inputs) if is_floating(value)]

    def of_tensors(*tensors):
        given = list(inputs)
        for i, tensor in zip(where, tensors, strict=True):
            given[i] = tensor
        return as_tuple((function or getattr(step3_fused, case.op))(*given, **case.options, **options))

    return of_tensors, [inputs[i].detach().requires_grad_() for i in where]


def rungs_of_cases():
    """Each case by each rung that can do it, and in which dtype."""
    for name, case in CASES.items():
        for param in testing.device_rungs("step3_fused", case.op):
            device, rung = param.values
            if name in NORMS:
                dtype = attention_testing.dtype_of(rung)
                dropped = case.options.get("attention_dropout_p", 0.0)
                able = attention_testing.can_do(rung, dtype, dropped) and attention_testing.can_run(device, rung)
                able = able and ("packed" not in name or attention_testing.takes_packed_rows(rung))
            elif name in PRODUCTS:
                dtype = torch.bfloat16 if rung in epilogue_testing.TENSOR_CORES else torch.float32
                drops = epilogue_testing.drops(case.op, rung) or "dropout" not in case.op or name.endswith("0")
                able = drops and epilogue_testing.able(case.op, rung, device, 8, 8, 16, dtype, False)
            else:
                dtype, able = torch.float32, True
            if able:
                yield pytest.param(name, device, rung, dtype, marks=param.marks, id=f"{name}-{param.id}")


every_rung_of_each_case = pytest.mark.parametrize(("name", "device", "rung", "dtype"), list(rungs_of_cases()))
