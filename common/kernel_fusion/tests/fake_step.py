"""A step without a compiled part: ops in Python, whose rungs are right or wrong in one known way each.

It has what the helpers use of a step: registered ops with out-variants, Python functions, `rungs`, `rounds`, `varies`
and `launch_counts`.
"""

import ctypes
import os
import sys
import types

import torch

from kernel_fusion import testing
from kernel_fusion.bench.measuring import Case

NAME = "fake_step"
_counts = {"cpu": 0, "emulated": 0, "gpu": 0}
_calls = {"now and then": 0, "remembers": 0}
_kept = {}  # what a rung keeps of an earlier call


# ---- the rungs, by op ----


def _good(x, out):
    out.copy_(x * 2)


def _reverse():
    return os.environ.get("KF_SIMT_SCHEDULE", "forward") == "reverse"


def _past(tensor):
    return tensor.data_ptr() + tensor.nbytes


class Double:
    """Of double(x) = 2x: functions (x, out)."""

    cpu = v1_good = _good

    def refuses(x, out):
        raise ValueError("double: rung 'refuses' takes nothing; these can: 'v1_good'")

    v2_good = _good

    def leaves_last(x, out):
        out.view(-1)[:-1].copy_((x * 2).reshape(-1)[:-1])

    def past_the_end(x, out):
        _good(x, out)
        torch.as_strided(out, (out.numel() + 1,), (1,), out.storage_offset())[-1] = 0

    def before_the_start(x, out):
        _good(x, out)
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1)[0] = 0

    def stale(x, out):
        _calls["remembers"] += 1
        if _calls["remembers"] % 2 == 1:  # believes that the buffer still holds the last call's result
            _good(x, out)

    def adds_to_out(x, out):
        held = out.view(-1)[2] + 1  # y[i] += … in place of y[i] = …
        _good(x, out)
        out.view(-1)[2] = held

    def scratch_not_written(x, out):
        scratch = torch.empty(64, dtype=torch.uint8, device=x.device).view(out.dtype)
        _good(x, out)
        out.view(-1)[3] = scratch[0]

    def nan(x, out):
        _good(x, out)
        out.view(-1)[0] = torch.nan

    def off_by_a_percent(x, out):
        out.copy_(x * 2.02)

    def rounds_on_the_way(x, out):
        third = (x.double() / 3).to(x.dtype)  # 6x/3: exact until it is rounded in between
        out.copy_(third.double() * 6)

    rounds_and_says_so = rounds_on_the_way

    def run_to_run(x, out):
        _calls["now and then"] += 1
        out.copy_(x * 2 * (1 + 1e-7 * (_calls["now and then"] % 2)))

    varies_and_says_so = run_to_run

    def varies_by_more_than_it_says(x, out):
        _good(x, out)
        if _reverse():
            out.view(-1)[0] += 1e-4 * out.abs().max()

    def missing_barrier(x, out):
        _good(x, out)
        if _reverse():
            out.view(-1)[0] = 0  # a thread read its neighbour's element before the neighbour wrote it

    def threads_count(x, out):
        out.copy_(x * 2 * (1 + 1e-7 * torch.get_num_threads()))

    def workers_count(x, out):
        out.copy_(x * 2 * (1 + 1e-7 * int(os.environ.get("KF_SIMT_THREADS", "0"))))

    def remembers_its_input(x, out):
        _good(_kept.setdefault(tuple(x.shape), x.clone()), out)

    def modifies_input(x, out):
        _good(x, out)
        x.mul_(2)

    def modifies_beside_input(x, out):
        _good(x, out)
        torch.as_strided(x, (1,), (1,), x.storage_offset() - 1)[0] = 0

    def reads_past_the_end(x, out):
        _good(x, out)
        flat = torch.as_strided(x, (x.numel() + 1,), (1,), x.storage_offset())
        out.view(-1)[-1] = flat[-2] * 2 + 0 * flat[-1]

    # What changes nothing: a byte beside a tensor is looked at, or written as it was.

    def looks_past_the_end(x, out):
        _good(x, out)
        ctypes.string_at(_past(x), 1)

    def looks_before_the_start(x, out):
        _good(x, out)
        ctypes.string_at(x.data_ptr() - 2, 1)

    def off_and_looks(x, out):
        out.copy_(x * 2.02)
        ctypes.string_at(_past(x), 1)

    def keeps_what_is_past_the_end(x, out):
        _good(x, out)
        ctypes.memmove(_past(out), _past(out), 1)

    def ignores_strides(x, out):
        out.copy_(torch.as_strided(x, x.shape, out.stride(), x.storage_offset()) * 2)

    def needs_alignment(x, out):
        out.copy_(x * 2 if x.data_ptr() % 16 == 0 else x)

    def out_needs_alignment(x, out):
        out.copy_(x if out.data_ptr() % 16 and not x.data_ptr() % 16 else x * 2)

    def wrong_where_columns_come_first(x, out):
        out.copy_(x if x.stride(-1) != 1 and x.stride(-2) == 1 else x * 2)

    def wrong_where_rows_lie_outermost_inside(x, out):
        out.copy_(x if x.stride(0) < x.stride(1) else x * 2)

    def wrong_stream(x, out):
        with torch.cuda.stream(torch.cuda.default_stream(x.device)):
            _good(x, out)

    def wrong_backend(x, out):
        _good(x, out)
        _counts["cpu"] += 1

    def does_not_count(x, out):
        _good(x, out)
        _counts["emulated"] -= 1

    returns_its_input = _good


class Softmax:
    def cpu(x, out):
        out.copy_(torch.softmax(x.float(), -1))

    v1_good = cpu

    def uniform(x, out):
        out.fill_(1 / x.shape[-1])

    def without_a_tail(x, out):
        weights = torch.softmax(x.float(), -1)
        out.copy_(torch.where(weights > 1e-6 * weights.amax(-1, keepdim=True), weights, 0))


class Sum:
    """Of sum(x, y) = x + y: one pointer, one stride is not another."""

    def cpu(x, y, out):
        out.copy_(x + y)

    v1_good = cpu

    def forgets_to_align_y(x, y, out):
        out.copy_(x if y.data_ptr() % 16 and not x.data_ptr() % 16 else x + y)

    def strides_of_x_for_y(x, y, out):
        out.copy_(x + torch.as_strided(y, y.shape, x.stride(), y.storage_offset()))


_OPS = {
    of.__name__.lower(): {name: rung for name, rung in vars(of).items() if callable(rung)}
    for of in (Double, Softmax, Sum)
}
_INPUTS = {"double": ("x",), "softmax": ("x",), "sum": ("x", "y")}


# ---- the step ----


def _run(op, inputs, rung, out):
    if rung == "auto":
        rung = "cpu"
    if rung not in _OPS[op]:
        raise ValueError(f"{op}: `rung` must be 'auto' or one of {list(_OPS[op])}, got '{rung}'")
    if out.numel() == 0:
        return
    _counts["gpu" if out.is_cuda else "cpu" if rung == "cpu" else "emulated"] += 1
    _OPS[op][rung](*inputs, out)


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """The rungs that the table lists; the wrong ones can be run too, but nothing is compared with them."""
    names = list(_OPS[op])
    names = names[: names.index("leaves_last")] if op == "double" else names
    return names[1:] if torch.device(device).type == "cuda" else names


def rounds(op: str, rung: str) -> str:
    """What a rung says that it rounds; "" for nothing."""
    return "x / 3" if rung == "rounds_and_says_so" else ""


def varies(op: str, rung: str) -> bool:
    """Whether a rung says that its runs may differ in their last bits."""
    return rung.startswith("varies")


def _make() -> types.ModuleType:
    step = types.ModuleType(NAME)
    library = torch.library.Library(NAME, "DEF")

    def add(op):
        tensors = ", ".join(f"Tensor {name}" for name in _INPUTS[op])
        library.define(f'{op}({tensors}, *, str rung="auto") -> Tensor')
        library.define(f'{op}.out({tensors}, *, str rung="auto", Tensor(a!) out) -> Tensor(a!)')

        def out_variant(*inputs, rung="auto", out):
            _run(op, inputs, rung, out)
            return out

        def functional(*inputs, rung="auto"):
            out = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
            _run(op, inputs, rung, out)
            return inputs[0] if rung == "returns_its_input" else out

        for key in ("CPU", "CUDA"):
            library.impl(op, functional, key)
            library.impl(f"{op}.out", out_variant, key)
        torch.library.register_fake(
            f"{NAME}::{op}",
            lambda *inputs, rung="auto": torch.empty_like(inputs[0], memory_format=torch.contiguous_format),
            lib=library,
        )
        registered = getattr(getattr(torch.ops, NAME), op)
        setattr(step, op, lambda *inputs, rung="auto": registered(*inputs, rung=rung))

    for op in _OPS:
        add(op)
    torch.library.register_autograd(f"{NAME}::double", lambda ctx, grad: torch.ops.fake_step.double(grad), lib=library)
    step.library = library  # ops live as long as this object
    step.rungs = rungs
    step.rounds = rounds
    step.varies = varies
    step.launch_counts = lambda: dict(_counts)
    return step


if NAME not in sys.modules:  # torch knows a namespace once a process
    sys.modules[NAME] = _make()
step = sys.modules[NAME]


def double_case(**more):
    """A case of its op `double` at a small shape."""
    options = {
        "op": "double",
        "shape": {"rows": 4, "width": 8},
        "dtype": torch.float32,
        "inputs": lambda device: (testing.randn((4, 8), torch.float32, device),),
        "run": step.double,
        "reference": lambda x: x * 2,
        "bytes": 256,
        "flops": 32,
        "peers": {"torch eager": lambda x: x * 2},
    }
    return Case(**{**options, **more})
