"""What a registered op must keep to, as torch sees it: `check_op`; and that `auto` takes the fastest rung."""

import contextlib
import statistics
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd import forward_ad

from kernel_fusion import steps
from kernel_fusion.report import results
from kernel_fusion.testing.accuracy import as_tuple
from kernel_fusion.testing.helpers import raises
from kernel_fusion.testing.memory import is_floating, same_bits


def check_op(step: types.ModuleType, op: str, inputs: tuple, kwargs: dict | None = None) -> None:
    """Checks how `op` is registered: opcheck, torch.compile without a graph break, and capture into a CUDA graph.

    Floating tensors of `inputs` are made to require gradients for opcheck. `kwargs` may have a `rung`.
    torch.compile takes "inductor" on CUDA tensors, and "aot_eager" on CPU tensors, where inductor would only add the
    time of a C++ compilation.

    Raises:
        AssertionError: results differ; torch's own exceptions where a registration is wrong.
    """
    kwargs = kwargs or {}
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    function = getattr(step, op)
    name = f"{step.__name__}.{op}"

    needing_grad = tuple(v.detach().clone().requires_grad_() if is_floating(v) else v for v in inputs)
    torch.library.opcheck(getattr(getattr(torch.ops, step.__name__), op).default, needing_grad, kwargs)

    with torch.no_grad():
        expected = as_tuple(function(*inputs, **kwargs))
    torch.compiler.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(lambda *args: function(*args, **kwargs), fullgraph=True, backend=backend)
    with torch.no_grad():
        same_bits(as_tuple(compiled(*inputs)), expected, f"{name} under torch.compile")

    if device.type == "cuda":
        _check_cuda_graph(function, inputs, kwargs, name)


def capture(call: Callable, warm_ups: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `call()`, and what that returned while it was captured: each replay writes it anew.

    `warm_ups`: calls before: what is set up on the first cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(warm_ups):
                call()
    finally:  # also where it raises: what it has launched may write into memory that is free then
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # thread_local: what other threads call meanwhile, as NCCL's watchdog does, is none of the graph's.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        outputs = call()
    return graph, outputs


def _check_cuda_graph(function: Callable, inputs: tuple, kwargs: dict, name: str) -> None:
    """Captures a call on inputs of NaN, then replays it on the real ones."""
    static = tuple(torch.full_like(v, torch.nan) if is_floating(v) else v for v in inputs)
    with torch.no_grad():
        expected = as_tuple(function(*inputs, **kwargs))
        graph, captured = capture(lambda: as_tuple(function(*static, **kwargs)))
        for to, value in zip(static, inputs, strict=True):
            if is_floating(value):
                to.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
    same_bits(captured, expected, f"{name} replayed from a CUDA graph")


def check_dependent_launch(front: Callable, behind: Callable, x: torch.Tensor) -> None:
    """Checks that `behind(front(x))` waits for `front`'s kernel, beside which it is launched (CUDA tensors).

    `x` goes through both 20 times, its rows rotated, in a CUDA graph: there the launches follow each other closely
    enough. What lies between has the same memory each time, so who does not wait finds what the time before left.

    Raises:
        AssertionError: results differ from those where the host waits between the two.
    """
    xs = [x.roll(turn, 0) for turn in range(20)]

    def chain(between: Callable[[], object]) -> tuple:
        found: list[torch.Tensor] = []
        for each in xs:
            y = front(each)
            between()
            found += as_tuple(behind(y))
            del y
        return tuple(found)

    graph, captured = capture(lambda: chain(lambda: None))
    graph.replay()
    same_bits(captured, chain(torch.cuda.synchronize), "behind a kernel that may run still")


def check_automatic(
    step: types.ModuleType,
    op: str,
    sizes: Callable[[dict], dict[str, int] | None],
    *,
    at_most: float = 1.15,
    besides: Collection[str] = (),
) -> None:
    """Checks that what `auto` takes on a GPU is read off the step's results, where the rungs were measured.

    A case counts as results/h200.json has it. Where that has not the case, or not the rung that `auto` prefers, as
    both may be newer, another GPU's file is taken that has.

    Over all cases together no rung is faster than the chosen ones, by the mean of the ratios; in a single case another
    may be ahead, by `at_most` this factor. What is noise does not count.

    `sizes`: called with the shape of a case, gives the sizes as the op's Args have them; None leaves the case out, as
    one in which something else than sizes decides. `besides`: rungs that are left out, as the caller must give them
    something that `auto` cannot make.

    Raises:
        AssertionError: names the case or the rung.
    """

    def preferred(row: dict) -> str:
        return step._C.prefer(op, sizes(row["shape"]), getattr(torch, row["dtype"]))

    def is_measured(case: list[dict]) -> bool:
        return any(row["impl"] == preferred(row) for row in case)

    def chosen(row: dict) -> str:
        """What `auto` prefers, if it could do this case and so was measured; else what it takes instead."""
        if is_measured(by_key[results.case_key(row)]):
            return preferred(row)
        return step._C.choose(op, "auto", sizes(row["shape"]), getattr(torch, row["dtype"]))

    by_key: dict[tuple, list[dict]] = {}
    files = results.load(steps.find(step.__name__))
    files.sort(key=lambda file: file.path.name != "h200.json")
    for file in files:
        for case in results.cases([row for row in file.of(op) if sizes(row["shape"])]):
            key = results.case_key(case[0])
            if key not in by_key or is_measured(case) and not is_measured(by_key[key]):
                by_key[key] = case
    rows = [row for case in by_key.values() for row in case if row["impl"] not in besides]
    measured = files[0]._replace(rows=rows)
    by_case = results.behind(measured, op, chosen)
    worst = {case: max(ratios.items(), key=lambda item: item[1]) for case, ratios in by_case.items()}
    late = {case: f"{ratio:.2f} times the time of {rung}" for case, (rung, ratio) in worst.items() if ratio > at_most}
    assert not late, f"{op}: auto takes {late}"
    for rung in {rung for ratios in by_case.values() for rung in ratios}:
        mean = statistics.geometric_mean(ratios[rung] for ratios in by_case.values() if rung in ratios)
        assert mean <= 1.0, f"{op}: auto takes {mean:.3f} times the time of {rung}, over all cases"


def writing_overloads(step: str) -> list[torch._ops.OpOverload]:
    """All that writes into an argument in the library `step`, once built: out-variants, and ops with an (a!)."""
    names = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith(f"{step}::")}
    packets = [getattr(getattr(torch.ops, step), name) for name in sorted(names)]
    overloads = (getattr(packet, name) for packet in packets for name in packet.overloads())
    return [overload for overload in overloads if overload._schema.is_mutable]


def check_writes(overload: torch._ops.OpOverload) -> None:
    """Checks what torch does around an op that writes into arguments: their version counters rise by one, those of the
    others do not, and what requires gradients or has a tangent is refused.

    In place of the op's kernel stands one that does nothing, so any arguments do.

    Raises:
        AssertionError: names the overload and the argument.
    """
    schema = overload._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    lists = [a.name for a in schema.arguments if "List[Tensor]" in str(a.type)]
    needed = [a for a in schema.arguments if a.name not in tensors and not a.has_default_value()]
    numbers: dict[str, int | list[int]] = {a.name: [] if "List" in str(a.type) else 0 for a in needed}

    def call(**special):
        given = {name: torch.empty(1, device="meta") for name in tensors} | special
        overload(**given | {name: [given[name]] for name in lists}, **numbers)

    def nothing(*args, **kwargs):
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        outs = iter(given[name] for name in written[len(written) - len(schema.returns) :])
        outputs = tuple(next(outs) if r.alias_info else torch.empty(1, device="meta") for r in schema.returns)
        return outputs if len(outputs) > 1 else outputs[0] if outputs else None

    library, name = overload.name().split("::")
    with torch.library._scoped_library(library, "IMPL") as changed:
        changed.impl(name, nothing, "Meta", allow_override=True)
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            inputs = {n: torch.empty(1, device="meta") for n in tensors}
            with mode():
                call(**inputs)
            wrong = [n for n, value in inputs.items() if value._version != (n in written)]
            assert not wrong, f"{overload}: the version counter of {wrong} is wrong after the call"
        for name in tensors:
            needing = torch.empty(1, device="meta", requires_grad=True)
            with raises(RuntimeError, f"`{name}` must not require gradients"):
                call(**{name: needing})
            with torch.no_grad():
                call(**{name: needing})
            with forward_ad.dual_level(), raises(NotImplementedError, f"`{name}` must have no tangent"):
                call(**{name: forward_ad.make_dual(torch.empty(1, device="meta"), torch.empty(1, device="meta"))})
