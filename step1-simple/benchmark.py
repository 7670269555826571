"""python benchmark.py [--help]: every rung of this step beside its peers, on the machine at hand."""

from kernel_fusion.cli import bench_parser  # not installed? pip install -e ..

if __name__ == "__main__":
    bench_parser().parse_args()  # --help needs no build

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

import step1_simple
from kernel_fusion import steps
from kernel_fusion.bench import benchmarks
from step1_simple import testing as formulas

TEACHES = (
    "A thread an element, then 16 bytes a thread; operations in one kernel save trips through memory; "
    "then instructions are the bound, and sums down the columns need two stages."
)

FLOAT, HALF = torch.float32, torch.bfloat16
P, SEED, OFFSET = 0.1, 1234, 8  # dropout's
RNG_STATE = torch.tensor([SEED, OFFSET])  # on the CPU, as `step1_simple.draw_rng_state` gives it outside of graphs

# GPT-2: 768 to 1600 wide, its MLP four times that. 4096 rows are 8 sequences of 512 tokens, 262144 are 128 of 2048.
TALL = [4096, 16384, 65536, 262144]
EVERY = [(rows, width, HALF) for rows in TALL for width in (768, 1024, 3072, 4096)]
SOME = [(4096, 768, HALF), (16384, 768, HALF), (16384, 3072, HALF), (65536, 1024, HALF), (65536, 4096, HALF)]
LARGEST = [(262144, 4096, HALF)]
ODD = [(16384, 3071, HALF), (4096, 1023, HALF)]  # no row but the first starts at 16 bytes
SINGLE = [(16384, 768, FLOAT), (16384, 3072, FLOAT)]
FULL = {
    "scale": [(1 << n, dtype) for dtype in (FLOAT, HALF) for n in (20, 24, 28, 30)],
    "gelu": [*SOME, *LARGEST, *SINGLE],
    "gelu_scale": [*SOME, *LARGEST, *SINGLE],
    "gelu_backward": [*SOME, *LARGEST, *SINGLE],
    "bias_gelu": [*EVERY, *ODD, *SINGLE],
    "bias_gelu_backward": [*SOME, *LARGEST, *ODD, *SINGLE],
    "bias_dropout_residual": [*EVERY, *ODD, *SINGLE],
    "bias_dropout_residual_backward": [*SOME, *LARGEST, *ODD, *SINGLE],
    "column_sum": [*SOME, *LARGEST, *ODD, *SINGLE],
}


def sizes(size: str, op: str) -> list[tuple]:
    """Elements and dtype for scale; rows, width and dtype for the others."""
    if size == "full":
        return FULL[op]
    if op == "scale":
        return {"emulated": [(1 << 16, FLOAT)], "cpu": [(1 << 24, FLOAT)], "quick": [(1 << 26, FLOAT)]}[size]
    return {
        "emulated": [(64, 768, FLOAT)],
        "cpu": [(4096, 768, FLOAT), (4096, 3072, FLOAT)],
        "quick": [(16384, 3072, HALF)],
    }[size]


# ---- dropout composed from PyTorch's operations; the other ops are in step1_simple/testing.py ----


def dropout_then_add(x, bias, residual, mask):
    """With PyTorch's own random numbers; `mask` is for `dropout_by_mask`."""
    return F.dropout(x + bias, P) + residual


def dropout_by_mask(x, bias, residual, mask):
    return (x + bias) * mask * kept_factor() + residual


def dropout_backward_by_mask(grad, mask):
    """As PyTorch's backward: the forward has stored a mask, a byte an element."""
    grad_x = torch.ops.aten.native_dropout_backward(grad, mask, kept_factor())
    return grad_x, formulas.sum_of_rows(grad_x)


def kept_factor() -> float:
    """One over the part that dropout keeps."""
    return 65536 / (65536 - round(65536 * P))


def dropout_mask(rows: int, width: int, device) -> torch.Tensor:
    """What our dropout keeps: its result where x is 1, and bias and residual are 0."""
    one = torch.ones(rows, width, device=device)
    zero = torch.zeros_like(one)
    return step1_simple.bias_dropout_residual(one, zero[0], zero, P, RNG_STATE) != 0


def by_the_peers_mask(outputs, x, bias, residual, mask):
    """What is right for a peer with random numbers of its own: read off its output which elements it kept.

    Raises:
        RuntimeError: it did not keep the right part of them.
    """
    right, seen, kept = residual.clone(), 0, 0
    for rows in torch.arange(len(x), device=x.device).split(16384):  # in parts, since float64 takes much memory
        value = (x[rows] + bias) * kept_factor()
        added = outputs[0][rows].double() - residual[rows]
        taken = (added - value).abs() < added.abs()
        clear = value.abs() > 0.1 * residual[rows].abs() + 0.1  # where rounding cannot hide what was added
        seen, kept = seen + clear.sum().item(), kept + (clear & taken).sum().item()
        right[rows] += value * taken
    if abs(kept / seen - (1 - P)) > 8 * (P * (1 - P) / seen) ** 0.5:
        raise RuntimeError(f"keeps {kept / seen:.5f} of the elements, not {1 - P}")
    return right


# ---- the cases ----


@functools.cache
def triton_kernels():
    """Our versions in Triton, which only machines with a GPU need to have."""
    return steps.load_script(steps.find("step1"), "peers/triton_kernels")


def peers(device: str, eager, name: str, more: tuple | None) -> dict:
    """PyTorch as it comes: a kernel an operation. On a GPU torch.compile, which fuses them, and our Triton kernel."""
    if device == "cpu":
        return {"torch eager": eager}
    found = {"torch eager": eager, "torch.compile": benchmarks.compiled(eager)}
    if more is not None:
        found["triton"] = lambda *inputs: getattr(triton_kernels(), name)(*inputs, *more)
    return found


class Op(NamedTuple):
    """What the cases of an op have in common.

    Args:
        run: called with the inputs and `rung=…`.
        composed: the op from PyTorch's operations.
        reads: its inputs, a letter each: "x" is [rows, width], "b" is [width].
        writes: its outputs, likewise.
        flops: an element.
        triton: what our Triton kernel is given after the inputs; None where there is none.
    """

    run: Callable
    composed: Callable
    reads: str
    writes: str
    flops: int
    triton: tuple | None = ()


OPS = {
    "scale": Op(
        lambda x, rung: step1_simple.scale(x, 1.7, rung=rung), lambda x: formulas.scaled(x, 1.7), "x", "x", 1, (1.7,)
    ),
    "gelu": Op(step1_simple.gelu, formulas.gelu, "x", "x", 9),
    "gelu_scale": Op(
        lambda x, rung: step1_simple.gelu_scale(x, 1.7, rung=rung),
        lambda x: formulas.scaled_gelu(x, 1.7),
        "x",
        "x",
        10,
        (1.7,),
    ),
    "gelu_backward": Op(step1_simple.gelu_backward, formulas.gelu_gradient, "xx", "x", 16),
    "bias_gelu": Op(step1_simple.bias_gelu, formulas.gelu_of_sum, "xb", "x", 10),
    "bias_gelu_backward": Op(step1_simple.bias_gelu_backward, formulas.gelu_of_sum_gradients, "xxb", "xb", 18),
    "bias_dropout_residual": Op(
        lambda *inputs, rung: step1_simple.bias_dropout_residual(*inputs[:-1], P, RNG_STATE, rung=rung),
        dropout_by_mask,
        "xbx",
        "x",
        3,
    ),
    "bias_dropout_residual_backward": Op(
        lambda grad, mask, rung: step1_simple.bias_dropout_residual_backward(grad, P, RNG_STATE, rung=rung),
        dropout_backward_by_mask,
        "x",
        "xb",
        2,
        None,
    ),
    "column_sum": Op(step1_simple.column_sum, formulas.sum_of_rows, "x", "b", 1),
}


def case(name: str, *size, device: str) -> benchmarks.Case:
    """The case of an op at a size: elements and dtype for scale; rows, width and dtype for the others."""
    op, (*shape, dtype) = OPS[name], size
    n, width = math.prod(shape), shape[-1]

    def inputs(on):
        tensors = tuple(torch.randn(shape if t == "x" else width, device=on, dtype=dtype) for t in op.reads)
        return (*tensors, dropout_mask(*shape, on)) if "dropout" in name else tensors

    def moved(tensors: str) -> int:
        return sum(n if t == "x" else width for t in tensors) * dtype.itemsize

    special = {"peers": peers(device, op.composed, name, op.triton)}
    if name == "bias_dropout_residual":
        own = peers(device, dropout_then_add, name, None)
        special = {"eager": dropout_by_mask, "peer_reference": dict.fromkeys(own, by_the_peers_mask)}
        if device == "cuda":
            own["triton"] = lambda *inputs: triton_kernels().bias_dropout_residual(*inputs[:-1], P, SEED, OFFSET)
        special["peers"] = own
    return benchmarks.Case(
        op=name,
        shape={"n": n} if name == "scale" else {"rows": shape[0], "width": width},
        dtype=dtype,
        inputs=inputs,
        run=op.run,
        reference=op.composed,
        bytes=moved(op.reads + op.writes),
        written=moved(op.writes),
        flops=op.flops * n,
        direction="backward" if name.endswith("_backward") or name == "column_sum" else "forward",
        **special,
    )


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [case(op, *one, device=device) for op in OPS for one in sizes(size, op)]


if __name__ == "__main__":
    benchmarks.main("step1_simple", cases)
