"""A stage without a compiled part: two ops in Python, whose rungs are right or wrong in one known way each.

It has what the helpers use of a stage: registered ops with out-variants, Python functions, `rungs`, `launch_counts`.
"""

import os
import sys
import types

import torch

NAME = "fake_stage"
_counts = {"cpu": 0, "emulated": 0, "gpu": 0}
_calls = {"now and then": 0, "remembers": 0}


# ---- rungs of double(x) = 2x: functions (x, out) ----


def _good(x, out):
    out.copy_(x * 2)


def _leaves_last(x, out):
    out.view(-1)[:-1].copy_((x * 2).reshape(-1)[:-1])


def _past_the_end(x, out):
    _good(x, out)
    torch.as_strided(out, (out.numel() + 1,), (1,), out.storage_offset())[-1] = 0


def _before_the_start(x, out):
    _good(x, out)
    torch.as_strided(out, (1,), (1,), out.storage_offset() - 1)[0] = 0


def _stale(x, out):
    _calls["remembers"] += 1
    if _calls["remembers"] % 2 == 1:  # believes that the buffer still holds the last call's result
        _good(x, out)


def _nan(x, out):
    _good(x, out)
    out.view(-1)[0] = torch.nan


def _off_by_a_percent(x, out):
    out.copy_(x * 2.02)


def _run_to_run(x, out):
    _calls["now and then"] += 1
    out.copy_(x * 2 * (1 + 1e-7 * (_calls["now and then"] % 2)))


def _missing_barrier(x, out):
    _good(x, out)
    if os.environ.get("KF_SIMT_SCHEDULE", "forward") == "reverse":
        out.view(-1)[0] = 0  # a thread read its neighbour's element before the neighbour wrote it


def _modifies_input(x, out):
    _good(x, out)
    x.mul_(2)


def _modifies_beside_input(x, out):
    _good(x, out)
    torch.as_strided(x, (1,), (1,), x.storage_offset() - 1)[0] = 0


def _reads_past_the_end(x, out):
    _good(x, out)
    flat = torch.as_strided(x, (x.numel() + 1,), (1,), x.storage_offset())
    out.view(-1)[-1] = flat[-2] * 2 + 0 * flat[-1]


def _ignores_strides(x, out):
    out.copy_(torch.as_strided(x, x.shape, out.stride(), x.storage_offset()) * 2)


def _needs_alignment(x, out):
    _good(x, out)
    if x.data_ptr() % 16:
        out.view(-1)[0] = 0


def _wrong_stream(x, out):
    with torch.cuda.stream(torch.cuda.default_stream(x.device)):
        _good(x, out)


def _refuses(x, out):
    raise ValueError("double: rung 'refuses' takes nothing; these can: 'v1_good'")


def _wrong_backend(x, out):
    _good(x, out)
    _counts["cpu"] += 1


def _does_not_count(x, out):
    _good(x, out)
    _counts["emulated"] -= 1


DOUBLE = {
    "cpu": _good,
    "v1_good": _good,
    "refuses": _refuses,
    "v2_good": _good,
    "leaves_last": _leaves_last,
    "past_the_end": _past_the_end,
    "before_the_start": _before_the_start,
    "stale": _stale,
    "nan": _nan,
    "off_by_a_percent": _off_by_a_percent,
    "run_to_run": _run_to_run,
    "missing_barrier": _missing_barrier,
    "modifies_input": _modifies_input,
    "modifies_beside_input": _modifies_beside_input,
    "reads_past_the_end": _reads_past_the_end,
    "ignores_strides": _ignores_strides,
    "needs_alignment": _needs_alignment,
    "wrong_stream": _wrong_stream,
    "wrong_backend": _wrong_backend,
    "does_not_count": _does_not_count,
    "returns_its_input": _good,
}


# ---- rungs of softmax ----


def _softmax(x, out):
    out.copy_(torch.softmax(x.float(), -1))


def _uniform(x, out):
    out.fill_(1 / x.shape[-1])


SOFTMAX = {"cpu": _softmax, "v1_good": _softmax, "uniform": _uniform}
_OPS = {"double": DOUBLE, "softmax": SOFTMAX}


# ---- the stage ----


def _run(op, x, rung, out):
    if rung == "auto":
        rung = "cpu"
    if rung not in _OPS[op]:
        raise ValueError(f"{op}: `rung` must be 'auto' or one of {list(_OPS[op])}, got '{rung}'")
    if x.numel() == 0:
        return
    _counts["gpu" if x.is_cuda else "cpu" if rung == "cpu" else "emulated"] += 1
    _OPS[op][rung](x, out)


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """The rungs that the table lists; the wrong ones can be run too, but nothing is compared with them."""
    names = list(_OPS[op])
    names = names[: names.index("leaves_last")] if op == "double" else names
    return names[1:] if torch.device(device).type == "cuda" else names


def _make() -> types.ModuleType:
    stage = types.ModuleType(NAME)
    library = torch.library.Library(NAME, "DEF")

    def add(op):
        library.define(f'{op}(Tensor x, *, str rung="auto") -> Tensor')
        library.define(f'{op}.out(Tensor x, *, str rung="auto", Tensor(a!) out) -> Tensor(a!)')

        def out_variant(x, *, rung="auto", out):
            _run(op, x, rung, out)
            return out

        def functional(x, *, rung="auto"):
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            _run(op, x, rung, out)
            return x if rung == "returns_its_input" else out

        for key in ("CPU", "CUDA"):
            library.impl(op, functional, key)
            library.impl(f"{op}.out", out_variant, key)
        torch.library.register_fake(
            f"{NAME}::{op}",
            lambda x, *, rung="auto": torch.empty_like(x, memory_format=torch.contiguous_format),
            lib=library,
        )
        registered = getattr(getattr(torch.ops, NAME), op)
        setattr(stage, op, lambda x, *, rung="auto": registered(x, rung=rung))

    for op in _OPS:
        add(op)
    torch.library.register_autograd(f"{NAME}::double", lambda ctx, grad: torch.ops.fake_stage.double(grad), lib=library)
    stage.library = library  # ops live as long as this object
    stage.rungs = rungs
    stage.launch_counts = lambda: dict(_counts)
    return stage


if NAME not in sys.modules:  # torch knows a namespace once a process
    sys.modules[NAME] = _make()
stage = sys.modules[NAME]
