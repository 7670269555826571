"""Sharding rules: which parts of DTensors our ops take as they are, and what parts come out.

A rule names the dimensions of an op's tensors, and after the bar those that may be split over workers:

    "...d, dw', w -> ...w+d | ...w"     linear: rows or columns; d, which it sums over, may not

`...` are the leading dimensions, `_` a tensor whose dimensions have no name. `'` turns a weight where the op is told
that it is `transposed`. Behind + stand what a result is a sum over: the workers' are then parts of that sum. ? is a
result that is empty without `keep`. What may not be split is gathered by DTensor before the op.
"""

import importlib.abc
import importlib.machinery
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

Rule = str | Callable[..., str]
DTENSOR = "torch.distributed.tensor"
_waiting: dict[str, dict[str, Rule]] = {}


def register(library: str, rules: dict[str, Rule]) -> None:
    """Registers the rules of a step's ops; its other ops refuse DTensors by their name.

    DTensor is told of them when somebody imports it. They do not: it takes as long to import as torch itself.

    Args:
        library: of the ops, as "step2_attention"; all that it has are registered already.
        rules: by op, each a rule, or a function of the op's arguments by name that returns it. A tensor is there an
            object with `shape` and `mesh`, or None.
    """
    _waiting[library] = rules
    if DTENSOR in sys.modules:
        register_waiting()
    elif _importer not in sys.meta_path:
        sys.meta_path.insert(0, _importer)


class Importer(importlib.abc.MetaPathFinder):
    """Finds torch.distributed.tensor where others do, and registers what waits for it."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != DTENSOR:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def then_register(module: Any) -> None:
                execute(module)
                register_waiting()

            loader.exec_module = then_register
        return spec


_importer = Importer()


def register_waiting() -> None:
    """Tells DTensor of all rules that it has not been told of."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    known = [name.split("::") for name in torch._C._dispatch_get_all_op_names()]
    while _waiting:
        library, rules = _waiting.popitem()
        for name in {name.split(".")[0] for namespace, name in known if namespace == library}:
            packet = getattr(getattr(torch.ops, library), name)
            for op in (getattr(packet, overload) for overload in packet.overloads()):
                rule = rules.get(name) if op._overloadname == "default" else None
                register_sharding(op)(refusal(name) if rule is None else strategy(op, rule))
                # DTensor remembers the answer for such tensors, and asks anew where one of these differs. By itself it
                # would look at integers only, and `transposed` and `keep` would stay what they were at first.
                numbers = [(n, a) for n, a in enumerate(op._schema.arguments) if str(a.type) in ("bool", "int")]
                DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(
                    min((n for n, a in numbers if not a.kwarg_only), default=100),
                    [a.name for _, a in numbers if a.kwarg_only] or None,
                )


def refusal(name: str) -> Callable[..., Any]:
    """What stands for a rule where there is none."""
    what = "dropout" if name == "draw_rng_state" else name

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"{what}: there is no sharding rule for it, so it takes no DTensor; pass the whole tensor, "
            "`x.full_tensor()`, or this worker's part, `x.to_local()`"
        )

    return refuse


def strategy(op: Any, rule: Rule) -> Callable[..., Any]:
    """The function that `register_sharding` asks for: of the op's arguments, placements of its outputs and inputs."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    arguments = op._schema.arguments
    tensors = [a.name for a in arguments if "Tensor" in str(a.type)]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    wanted = () if isinstance(rule, str) else inspect.signature(rule).parameters

    def find(*positional: Any, **options: Any) -> list[tuple[list, list]]:
        given = defaults | dict(zip((a.name for a in arguments), positional, strict=False)) | options
        text = rule if isinstance(rule, str) else rule(*(given[name] for name in wanted))
        before, after, may_split = re.split(r"->|\|", text)
        inputs = list(zip(before.split(","), (given[name] for name in tensors), strict=True))
        leading = 0  # how many dimensions `...` are
        for dims, x in inputs:
            if "..." in dims and x is not None:
                leading = len(x.shape) - len(names_of(dims)) + 1

        def dims_of(text: str) -> list[str]:
            if "?" in text and not given["keep"]:
                return []
            found = names_of(text)[:: -1 if "'" in text and given["transposed"] else 1]
            return [one for name in found for one in (map(str, range(leading)) if name == "..." else (name,))]

        def placement(text: str, split: str | None) -> Any:
            dims, summed = (dims_of(part) for part in text.partition("+")[::2])
            return Shard(dims.index(split)) if split in dims else Partial() if split in summed else Replicate()

        return [
            (
                [placement(text, split) for text in after.split(",")],
                [placement(text, split) for text, x in inputs if x is not None],
            )
            for split in (None, *dims_of(may_split))
        ]

    return find


def names_of(dims: str) -> list[str]:
    """The dimensions' names, and "..." for those that have none."""
    return re.findall(r"\.\.\.|[a-z]", dims)
