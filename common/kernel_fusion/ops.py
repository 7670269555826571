"""What the steps' Python parts share: the checks of kf/argument_checks.h without data, for fake and meta tensors.

A check's first arguments are the names of the op and of the argument, for the error: a TypeError for a dtype, else a
ValueError, raised so that torch.compile understands it.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def name_of(dtype: torch.dtype) -> str:
    """ "float32", as in the errors of the C++ side."""
    return str(dtype).removeprefix("torch.")


def check_type(op: str, name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """`x` has one of `dtypes`."""
    *most, last = map(name_of, dtypes)
    must = f"{', '.join(most)} or {last}" if most else last
    torch._check_type(x.dtype in dtypes, lambda: f"{op}: `{name}` must be {must}, got {name_of(x.dtype)}")


def check_floating(op: str, name: str, x: torch.Tensor) -> None:
    """`x` is of a type that kernels compute with."""
    check_type(op, name, x, FLOATING)


def check_dim(op: str, name: str, x: torch.Tensor, dim: int) -> None:
    """`x` has `dim` dimensions."""
    torch._check_value(
        x.dim() == dim,
        lambda: (
            f"{op}: `{name}` must have {dim} dimension{'s' if dim != 1 else ''}, got {x.dim()} (shape {tuple(x.shape)})"
        ),
    )


def check_shape(op: str, name: str, x: torch.Tensor, shape: Sequence[int]) -> None:
    """`x` has that shape."""
    torch._check_value(
        x.dim() == len(shape) and all(a == b for a, b in zip(x.shape, shape, strict=True)),
        lambda: f"{op}: `{name}` must have shape {tuple(shape)}, got {tuple(x.shape)}",
    )


def check_key_bounds(op: str, q: torch.Tensor, key_begin: torch.Tensor | None, key_end: torch.Tensor | None) -> None:
    """The bounds of the keys that exist are int32 [B] beside `q`, or None."""
    for name, bound in (("key_begin", key_begin), ("key_end", key_end)):
        if bound is not None:
            check_type(op, name, bound, (torch.int32,))
            check_device(op, name, bound, "q", q)
            check_shape(op, name, bound, (q.shape[0],))


def check_documents(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    key_begin: torch.Tensor | None,
    key_end: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> None:
    """The starts of a packed row's documents are int32 [documents + 1] beside `q`, or None: kf/documents.h, no data."""
    torch._check_value(
        cu_seqlens is not None or cu_seqlens_k is None, lambda: f"{op}: `cu_seqlens_k` needs `cu_seqlens`"
    )
    if cu_seqlens is None:
        return
    torch._check_value(
        key_begin is None and key_end is None,
        lambda: (
            f"{op}: `{'key_end' if key_begin is None else 'key_begin'}` must be None where `cu_seqlens` is given: "
            "a packed row has no padding"
        ),
    )
    torch._check_value(
        q.shape[0] == 1, lambda: f"{op}: `q` must have batch 1 where `cu_seqlens` is given, got {q.shape[0]}"
    )
    check_type(op, "cu_seqlens", cu_seqlens, (torch.int32,))
    check_device(op, "cu_seqlens", cu_seqlens, "q", q)
    check_dim(op, "cu_seqlens", cu_seqlens, 1)
    torch._check_value(
        cu_seqlens.shape[0] >= 2, lambda: f"{op}: `cu_seqlens` must have at least 2 numbers, got {cu_seqlens.shape[0]}"
    )
    if cu_seqlens_k is not None:
        check_type(op, "cu_seqlens_k", cu_seqlens_k, (torch.int32,))
        check_device(op, "cu_seqlens_k", cu_seqlens_k, "q", q)
        check_shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens.shape)
    else:
        torch._check_value(
            k.shape[2] == q.shape[2],
            lambda: f"{op}: `k` must be as long as `q` where `cu_seqlens_k` is None, got {k.shape[2]} and {q.shape[2]}",
        )


def check_device(op: str, name: str, x: torch.Tensor, first_name: str, first: torch.Tensor) -> None:
    """`x` is on the device of the op's first argument."""
    torch._check_value(
        x.device == first.device,
        lambda: f"{op}: `{name}` must be on the device of `{first_name}` ({first.device}), got {x.device}",
    )


def check_like(
    op: str, name: str, x: torch.Tensor, first_name: str, first: torch.Tensor, shape: Sequence[int] | None = None
) -> None:
    """`x` has the dtype and device of the op's first argument, and `shape`, where given."""
    torch._check_type(
        x.dtype == first.dtype,
        lambda: (
            f"{op}: `{name}` must have the dtype of `{first_name}` ({name_of(first.dtype)}), got {name_of(x.dtype)}"
        ),
    )
    check_device(op, name, x, first_name, first)
    if shape is not None:
        check_shape(op, name, x, shape)


def check_rows(op: str, name: str, x: torch.Tensor) -> None:
    """`x` is a floating tensor of rows that are not empty: [..., width], width > 0."""
    check_floating(op, name, x)
    torch._check_value(x.dim() >= 1, lambda: f"{op}: `{name}` must have at least 1 dimension, got 0 (shape ())")
    torch._check_value(
        x.shape[-1] != 0, lambda: f"{op}: the last dimension of `{name}` must not be 0, got shape {tuple(x.shape)}"
    )


def contiguous_like(x: torch.Tensor) -> torch.Tensor:
    """An output: contiguous, of x's shape, dtype and device, whatever its strides."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def needs_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records an op that takes `tensors`, and so will ask for its backward pass."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` as gradients compute with it: float32 where it is of a half type, else as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_forward_mode(op: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`op`, which refuses tensors of forward-mode differentiation: PyTorch would take their tangents for 0.

    Raises:
        NotImplementedError: in a call, a tensor has a tangent; the text names it.
    """
    signature = inspect.signature(op)

    @functools.wraps(op)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if forward_ad._current_level >= 0:
            for name, x in signature.bind(*args, **kwargs).arguments.items():
                if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                    raise NotImplementedError(
                        f"{op.__name__}: `{name}` must have no tangent: there is no forward-mode derivative; "
                        "torch.autograd.grad goes backward"
                    )
        return op(*args, **kwargs)

    return checked


_libraries: dict[str, torch.library.Library] = {}  # what is registered lives as long as these


def register_autograd(name: str, backward: Callable, *, setup_context: Callable) -> None:
    """torch.library.register_autograd for an op "library::name" that returns tensors and takes no lists of them.

    PyTorch's own asks the schema for each argument's default anew in each call, which for twenty arguments takes longer
    than the rest of the call; here they are asked for once.
    """
    namespace, op_name = name.split("::")
    op = getattr(getattr(torch.ops, namespace), op_name).default
    positional = tuple(a.default_value for a in op._schema.arguments if not a.kwarg_only)
    keyword_only = {a.name: a.default_value for a in op._schema.arguments if a.kwarg_only}

    def below(keyset: Any, inputs: Sequence, options: dict[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs, **options)

    def forward(ctx: Any, *given: Any) -> Any:
        *inputs, (keyset, options) = given
        output = below(keyset, inputs, options)
        # PyTorch leaves out what is equal to its default.
        setup_context(ctx, (*inputs, *positional[len(inputs) :]), keyword_only | options, output)
        return output

    def backward_of(ctx: Any, *gradients: Any) -> tuple:
        needed = ctx.needs_input_grad
        ctx.needs_input_grad = needed[:-1]
        try:
            found = backward(ctx, *gradients)
        finally:
            ctx.needs_input_grad = needed
        # Its last inputs may have been left out, and behind them all is (keyset, options).
        return *(found if isinstance(found, tuple) else (found,))[: len(needed) - 1], None

    of_op = {"forward": staticmethod(forward), "backward": staticmethod(backward_of)}
    function: Any = type(f"{namespace}_{op_name}", (torch.autograd.Function,), of_op)

    def call(keyset: Any, *inputs: Any, **options: Any) -> Any:
        if needs_gradients(*(x for x in inputs if isinstance(x, torch.Tensor))):
            return function.apply(*inputs, (keyset, options))
        return below(keyset, inputs, options)

    library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    library.impl(op_name, call, "Autograd", with_keyset=True)
