"""python benchmark.py [--help]: every rung of this step beside its peers, on the machine at hand."""

import functools

import torch
import torch.nn.functional as F

import step1_simple  # not installed? pip install -e ..
from kernel_fusion import steps
from kernel_fusion.bench import benchmarks

TEACHES = (
    "A thread an element, then 16 bytes a thread; operations in one kernel save trips through memory; "
    "then instructions are the bound, and sums down the columns need two stages."
)

FLOAT, HALF = torch.float32, torch.bfloat16
P, SEED, OFFSET = 0.1, 1234, 8  # dropout's

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


# ---- the ops composed from PyTorch's operations ----


def times_1_7(x):
    return x * 1.7


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def gelu_times_1_7(x):
    return F.gelu(x, approximate="tanh") * 1.7


def add_then_gelu(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def aten_gelu_backward(grad, x):
    return torch.ops.aten.gelu_backward(grad, x, approximate="tanh")


def aten_bias_gelu_backward(grad, x, bias):
    grad_x = torch.ops.aten.gelu_backward(grad, x + bias, approximate="tanh")
    return grad_x, grad_x.sum(0)


def dropout_then_add(x, bias, residual, mask):
    """With PyTorch's own random numbers; `mask` is for `dropout_by_mask`."""
    return F.dropout(x + bias, P) + residual


def dropout_by_mask(x, bias, residual, mask):
    return (x + bias) * mask * kept_factor() + residual


def dropout_backward_by_mask(grad, mask):
    """As PyTorch's backward: the forward has stored a mask, a byte an element."""
    grad_x = torch.ops.aten.native_dropout_backward(grad, mask, kept_factor())
    return grad_x, grad_x.sum(0)


def sum_of_rows(x):
    return x.sum(0)


def kept_factor() -> float:
    """One over the part that dropout keeps."""
    return 65536 / (65536 - round(65536 * P))


def dropout_rng_state() -> torch.Tensor:
    """On the CPU, as `step1_simple.draw_rng_state` gives it outside of graphs."""
    return torch.tensor([SEED, OFFSET])


def dropout_mask(rows: int, width: int, device) -> torch.Tensor:
    """What our dropout keeps: its result where x is 1, and bias and residual are 0."""
    one = torch.ones(rows, width, device=device)
    zero = torch.zeros_like(one)
    return step1_simple.bias_dropout_residual(one, zero[0], zero, P, dropout_rng_state()) != 0


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


def peers(device: str, eager, triton_kernel: str | None, *arguments) -> dict:
    """PyTorch as it comes: a kernel an operation. On a GPU torch.compile, which fuses them, and our Triton kernel."""
    if device == "cpu":
        return {"torch eager": eager}
    found = {"torch eager": eager, "torch.compile": benchmarks.compiled(eager)}
    if triton_kernel:
        found["triton"] = lambda *inputs: getattr(triton_kernels(), triton_kernel)(*inputs, *arguments)
    return found


def randn(dtype: torch.dtype, *shapes):
    """Makes the inputs, on the device it is called with."""
    return lambda on: tuple(torch.randn(shape, device=on, dtype=dtype) for shape in shapes)


def scale_case(n: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="scale",
        shape={"n": n},
        dtype=dtype,
        inputs=randn(dtype, (n,)),
        run=lambda x, rung: step1_simple.scale(x, 1.7, rung=rung),
        reference=times_1_7,
        bytes=2 * n * dtype.itemsize,
        flops=n,
        peers=peers(device, times_1_7, "scale", 1.7),
    )


def gelu_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="gelu",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=randn(dtype, (rows, width)),
        run=step1_simple.gelu,
        reference=tanh_gelu,
        bytes=2 * rows * width * dtype.itemsize,
        flops=9 * rows * width,
        peers=peers(device, tanh_gelu, "gelu"),
    )


def gelu_scale_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="gelu_scale",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=randn(dtype, (rows, width)),
        run=lambda x, rung: step1_simple.gelu_scale(x, 1.7, rung=rung),
        reference=gelu_times_1_7,
        bytes=2 * rows * width * dtype.itemsize,
        flops=10 * rows * width,
        peers=peers(device, gelu_times_1_7, "gelu_scale", 1.7),
    )


def gelu_backward_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="gelu_backward",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=randn(dtype, (rows, width), (rows, width)),
        run=step1_simple.gelu_backward,
        reference=aten_gelu_backward,
        bytes=3 * rows * width * dtype.itemsize,
        written=rows * width * dtype.itemsize,
        flops=16 * rows * width,
        peers=peers(device, aten_gelu_backward, "gelu_backward"),
        direction="backward",
    )


def bias_gelu_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="bias_gelu",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=randn(dtype, (rows, width), (width,)),
        run=step1_simple.bias_gelu,
        reference=add_then_gelu,
        bytes=(2 * rows * width + width) * dtype.itemsize,
        flops=10 * rows * width,
        peers=peers(device, add_then_gelu, "bias_gelu"),
    )


def bias_gelu_backward_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="bias_gelu_backward",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=randn(dtype, (rows, width), (rows, width), (width,)),
        run=step1_simple.bias_gelu_backward,
        reference=aten_bias_gelu_backward,
        bytes=(3 * rows * width + 2 * width) * dtype.itemsize,
        written=(rows * width + width) * dtype.itemsize,
        flops=18 * rows * width,
        peers=peers(device, aten_bias_gelu_backward, "bias_gelu_backward"),
        direction="backward",
    )


def bias_dropout_residual_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    tensors = randn(dtype, (rows, width), (width,), (rows, width))
    rng_state = dropout_rng_state()
    own = peers(device, dropout_then_add, None)
    if device == "cuda":
        own["triton"] = lambda x, bias, residual, mask: triton_kernels().bias_dropout_residual(
            x, bias, residual, P, SEED, OFFSET
        )
    return benchmarks.Case(
        op="bias_dropout_residual",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=lambda on: (*tensors(on), dropout_mask(rows, width, on)),
        run=lambda x, bias, residual, mask, rung: step1_simple.bias_dropout_residual(
            x, bias, residual, P, rng_state, rung=rung
        ),
        reference=dropout_by_mask,
        bytes=(3 * rows * width + width) * dtype.itemsize,
        written=rows * width * dtype.itemsize,
        flops=3 * rows * width,
        peers=own,
        eager=dropout_by_mask,
        peer_reference={"torch eager": by_the_peers_mask, "torch.compile": by_the_peers_mask},
    )


def bias_dropout_residual_backward_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    tensors = randn(dtype, (rows, width))
    rng_state = dropout_rng_state()
    return benchmarks.Case(
        op="bias_dropout_residual_backward",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=lambda on: (*tensors(on), dropout_mask(rows, width, on)),
        run=lambda grad, mask, rung: step1_simple.bias_dropout_residual_backward(grad, P, rng_state, rung=rung),
        reference=dropout_backward_by_mask,
        bytes=(2 * rows * width + width) * dtype.itemsize,
        flops=2 * rows * width,
        peers=peers(device, dropout_backward_by_mask, None),
        direction="backward",
    )


def column_sum_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    return benchmarks.Case(
        op="column_sum",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=randn(dtype, (rows, width)),
        run=step1_simple.column_sum,
        reference=sum_of_rows,
        bytes=(rows * width + width) * dtype.itemsize,
        written=width * dtype.itemsize,
        flops=rows * width,
        peers=peers(device, sum_of_rows, "column_sum"),
        direction="backward",
    )


CASES = {
    "scale": scale_case,
    "gelu": gelu_case,
    "gelu_scale": gelu_scale_case,
    "gelu_backward": gelu_backward_case,
    "bias_gelu": bias_gelu_case,
    "bias_gelu_backward": bias_gelu_backward_case,
    "bias_dropout_residual": bias_dropout_residual_case,
    "bias_dropout_residual_backward": bias_dropout_residual_backward_case,
    "column_sum": column_sum_case,
}


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [make(*case, device) for op, make in CASES.items() for case in sizes(size, op)]


if __name__ == "__main__":
    benchmarks.main("step1_simple", cases)
