"""A case, which is an op at one shape and dtype: its rungs and peers are timed, and what they gave is checked."""

import copy
import dataclasses
import functools
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from kernel_fusion.bench import clock
from kernel_fusion.bench.ceilings import Ceilings
from kernel_fusion.bench.clock import device_of
from kernel_fusion.bench.noise import spread
from kernel_fusion.console import UserError
from kernel_fusion.report import results
from kernel_fusion.testing.accuracy import allowance, as_tuple, in_float64, max_error, poisoned_allocations

# Others' code raises what it likes.
OURS = (ValueError, RuntimeError)
REFUSALS: dict[str, tuple[type[Exception], ...]] = {"rung": OURS, "plan": OURS, "peer": (Exception,)}
BUDGET_S = 1.0  # what the repeats of one implementation may take together; KF_BENCHMARK_SECONDS says otherwise
# On a GPU there are at least 20, or 5 where one takes longer than this.
SLOW_S = 0.05
# By clock "call" the budget is spent in so many rounds, in each of which the implementations take turns. Whatever else
# the CPU does for a second then disturbs a few rounds of each, not all calls of one; and the median round decides.
ROUNDS = 9
# What `correct` allows of max|reference| where a case has no peer "torch eager" to compare with.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One op at one shape and dtype."""

    op: str
    shape: dict[str, int | float]  # names and sizes, for the tables: {"rows": 4096, "width": 1024}
    dtype: torch.dtype  # of the inputs
    inputs: Callable[[Any], tuple]  # called with a device, gives the positional arguments of the rest
    run: Callable  # called with the inputs and `rung=…`
    reference: Callable  # called with the inputs in float64, gives the right outputs
    bytes: int  # what must be read and written at the least, once each
    flops: int
    peers: dict[str, Callable] = dataclasses.field(default_factory=dict)  # by name, called with the inputs
    written: int | None = None  # of these bytes; default: half, as by a copy. It chooses memory's ceiling
    bound: str = "memory"  # or "arithmetic": which ceiling the op is under
    clock: str = "kernels"  # times the GPU's work; "call" what the caller waits for, the CPU's launching included
    direction: str = "forward"  # or "backward"
    # PyTorch composed in the inputs' dtype, whose error sets the tolerance; default: peer "torch eager".
    eager: Callable | None = None
    # By name of a peer, or a rung, that draws random numbers of its own: called with its outputs and the inputs in
    # float64, gives what was right for those numbers, or raises RuntimeError.
    peer_reference: dict[str, Callable] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        either = {"bound": ("memory", "arithmetic"), "direction": ("forward", "backward"), "clock": ("kernels", "call")}
        for name, (one, other) in either.items():
            if getattr(self, name) not in (one, other):
                raise ValueError(f"Case: `{name}` must be '{one}' or '{other}', got {getattr(self, name)!r}")
        if self.written is not None and not 0 <= self.written <= self.bytes:
            raise ValueError(f"Case: `written` must be from 0 to `bytes` ({self.bytes}), got {self.written}")

    def title(self) -> str:
        """ "softmax 4096×1024 bfloat16" and the like, with the names of the sizes."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.shape.items())
        backward = ", backward" if self.direction == "backward" and not self.op.endswith("_backward") else ""
        return f"{self.op}{backward}: {sizes}, {dtype_name(self.dtype)}"

    def key(self) -> tuple:
        """What its rows in a results file have in common: see results.case_key."""
        return self.op, self.direction, dtype_name(self.dtype), tuple(self.shape.items())


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def compiled(fn: Callable) -> Callable:
    """`fn` under torch.compile as it is fastest: static shapes, tuned, without CUDA graphs. A peer for GPU cases.

    That is mode "max-autotune-no-cudagraphs", with matrix products left to cuBLAS. Tuning Triton's against it takes
    half a minute a shape; in all eight shapes of steps 2 and 3 where it was tried on an H200, cuBLAS won.
    """
    options: dict[str, Any] = {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "max_autotune_gemm_backends": "ATEN",
    }
    return torch.compile(fn, dynamic=False, options=options)


def installed(module: str) -> bool:
    """Whether `module` is there, "quack" or "flash_attn.cute": for peers that only some machines have.

    Packages around it are imported, the module itself is not.
    """
    names = module.split(".")
    return all(importlib.util.find_spec(".".join(names[:count])) for count in range(1, len(names) + 1))


def reason(refusal: Exception) -> str:
    """The first line of what it says."""
    return (str(refusal) or repr(refusal)).splitlines()[0]


class Measured(NamedTuple):
    """A row of the results, the greatest error behind its `correct`, what is allowed there, and the last outputs."""

    row: dict
    error: float
    allowed: float
    outputs: tuple[torch.Tensor, ...]


def run_case(
    step: Any,
    case: Case,
    device: torch.device,
    *,
    rungs: list[str] | None = None,
    peers: bool = True,
    ceilings: Ceilings | None = None,
    budget_s: float | None = None,
    say: Callable[[str], Any] = print,
) -> list[Measured]:
    """Times every rung and peer of `case`, then checks what the last timed call gave.

    Who refuses the case gets no row, and `say` gets the reason; so does a result that is wrong.

    `step`: the step's module. `rungs`: names; default: all that it has for the device. `ceilings`: what
    percent_of_ceiling refers to; default: measured here. `budget_s`: what the repeats of one implementation may take on
    a CPU, or by clock "call"; default: budget().
    """
    ceilings = ceilings or Ceilings(device)
    budget_s = budget() if budget_s is None else budget_s
    names = step.rungs(case.op, device) if rungs is None else rungs
    impls: list[tuple[str, str, Callable]] = [
        (name, "plan" if name == results.PIECES else "rung", functools.partial(case.run, rung=name)) for name in names
    ]
    if peers:
        impls += [(name, "peer", fn) for name, fn in case.peers.items()]
    if peers and device.type == "cuda":
        # torch.compile gives a function up after eight recompilations and then runs it uncompiled, which is no peer.
        torch.compiler.reset()
    measured = []
    with torch.set_grad_enabled(case.direction == "backward"):
        inputs = case.inputs(device)
        tolerance = Tolerance(case, inputs)

        def attempt(impl: tuple, own: tuple) -> clock.Timing | None:
            name, kind, fn = impl
            _poison_free_memory(tolerance.references, case.dtype)
            try:
                if case.clock == "call":
                    return clock.measure_call(fn, own, budget_s / ROUNDS)
                return clock.measure(fn, own, *_repeats(fn, own, budget_s))
            except REFUSALS[kind] as refusal:
                if kind != "peer" and f"rung '{name}'" not in str(refusal):
                    raise
                say(f"{case.title()}: {kind} '{name}' not run: {reason(refusal)}")
                return None

        timed = _in_rounds if case.clock == "call" else _one_by_one
        for (name, kind, fn), own, timing in timed(attempt, impls, inputs):
            outputs = as_tuple(timing.result)
            error, allowed, correct = tolerance.check_of(name, outputs, own)
            if kind != "peer":  # once more: memory that it leaves unwritten may have held an earlier right result
                with poisoned_allocations():
                    correct = correct and tolerance.check_of(name, as_tuple(fn(*own)), own)[-1]
            if not correct:
                say(f"{case.title()}: {name} is WRONG: {error:.3g} off, allowed are {tolerance.text()}")
            measured.append(Measured(_row(case, name, kind, timing, correct, ceilings), error, allowed, outputs))
            del own  # its memory is free when the next one is timed
    return measured


def _one_by_one(attempt: Callable, impls: list[tuple], inputs: tuple) -> Iterator[tuple]:
    """Gives each implementation that does not refuse, with its inputs and timing, before the next one is timed."""
    for impl in impls:
        own = own_copy(inputs)
        timing = attempt(impl, own)
        if timing is not None:
            yield impl, own, timing


def _in_rounds(attempt: Callable, impls: list[tuple], inputs: tuple) -> Iterator[tuple]:
    """Gives the same after all were timed in turn, round by round. The median of a round counts as one repeat."""
    turns: list[tuple[tuple, tuple, list[float], Any]] = [(impl, own_copy(inputs), [], None) for impl in impls]
    for _ in range(1 + ROUNDS):  # the first warms up
        turns = [(impl, own, medians, attempt(impl, own)) for impl, own, medians, _ in turns]
        turns = [turn for turn in turns if turn[-1] is not None]
        for _, _, medians, timing in turns:
            medians.append(timing.ms.median)
    for impl, own, medians, timing in turns:
        yield impl, own, timing._replace(ms=spread(medians[1:]))


def own_copy(inputs: tuple) -> tuple:
    """Inputs for one implementation alone: what another one wrote into them would pass for its work.

    Tensors that carry a graph for gradients cannot be copied, and are shared.
    """
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        return inputs
    return copy.deepcopy(inputs)


def _poison_free_memory(like: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Overwrites what the next outputs will probably lie in, lest another's right result be found there."""
    blocks = [torch.full_like(tensor, torch.nan, dtype=dtype) for tensor in like for _ in range(3)]
    del blocks


def budget() -> float:
    """Seconds that the repeats of one implementation may take: KF_BENCHMARK_SECONDS, or BUDGET_S.

    Raises:
        UserError: it is set to something else than a number above 0.
    """
    asked = os.environ.get("KF_BENCHMARK_SECONDS", "")
    try:
        seconds = float(asked or BUDGET_S)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"KF_BENCHMARK_SECONDS: must be a number of seconds above 0, got {asked!r}")
    return seconds


def _repeats(fn, inputs, budget_s: float) -> tuple[int, int]:
    """Warm-up calls and repeats: as many as fit the budget, after a call to see how long one takes.

    On a GPU a naive rung at a large size would else take most of a run's time.
    """
    on_gpu = device_of(inputs).type == "cuda"
    if on_gpu:
        fn(*inputs)  # compiles, allocates
        torch.cuda.synchronize()
    began = time.perf_counter()
    fn(*inputs)
    if on_gpu:
        torch.cuda.synchronize()
    once = max(time.perf_counter() - began, 1e-6)
    fit = int((budget() if on_gpu else budget_s) / once)
    least = (5 if once > SLOW_S else 20) if on_gpu else 3
    return min(10, fit // 10), max(least, min(100, fit))


class Tolerance:
    """Says whether outputs are right: as near to float64 as the contract of `testing` asks."""

    def __init__(self, case: Case, inputs: tuple):
        self.case = case
        self.references = [r.to(torch.float64) for r in as_tuple(case.reference(*map(in_float64, inputs)))]
        eager = case.eager or case.peers.get("torch eager")
        if eager:
            composed = as_tuple(eager(*own_copy(inputs)))
            self.allowed = [allowance(r, e) for r, e in zip(self.references, composed, strict=True)]
        else:
            self.allowed = [ROUNDING[case.dtype] * (r.abs().max().item() if r.numel() else 0) for r in self.references]

    def check(self, outputs: tuple[torch.Tensor, ...], references: tuple | None = None) -> tuple[float, float, bool]:
        """The greatest error of any output against `references`, what is allowed there, and whether all are right."""
        right = references or self.references
        errors = [max_error(out.detach(), r) for out, r in zip(outputs, right, strict=True)]
        worst = max(range(len(errors)), key=errors.__getitem__)
        return errors[worst], self.allowed[worst], all(e <= a for e, a in zip(errors, self.allowed, strict=True))

    def check_of(self, name: str, outputs: tuple[torch.Tensor, ...], inputs: tuple) -> tuple[float, float, bool]:
        """The same for what the rung or peer `name` made of `inputs`, also where it draws random numbers of its own."""
        drawn = self.case.peer_reference.get(name)
        return self.check(outputs, as_tuple(drawn(outputs, *map(in_float64, inputs))) if drawn else None)

    def text(self) -> str:
        """What is allowed, output by output."""
        return ", ".join(f"{limit:.3g}" for limit in self.allowed)


def _row(case: Case, name: str, kind: str, timing: clock.Timing, correct: bool, ceilings: Ceilings) -> dict:
    if case.bound == "memory":
        ceiling = ceilings.memory(case.bytes, case.bytes // 2 if case.written is None else case.written)
    else:
        ceiling = ceilings.matmul()
    ms, low, high = map(results.rounded, timing.ms)
    row = {
        "op": case.op,
        "pass": case.direction,
        "impl": name,
        "kind": kind,
        "dtype": dtype_name(case.dtype),
        "shape": dict(case.shape),
        "ms": ms,
        "ms_quartiles": [low, high],
        "host_bound": timing.host_bound,
        "bound": case.bound,
        "ceiling": results.rounded(ceiling),
        "bytes": case.bytes,
        "flops": case.flops,
    }
    return {
        **row,
        **{name: value for name, value in results.derived(row).items() if name not in row},
        "correct": correct,
    }
