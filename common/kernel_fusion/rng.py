"""The state of dropout's random numbers, int64 [2], seed and offset: drawn, checked. kf/dropout.h is the C++ side."""

from typing import Any

import torch

from kernel_fusion.ops import check_shape, check_type


def drops(dropout_p: float) -> bool:
    """Whether anything is dropped: whether dropout_p, in 65536ths, is not 0. As threshold_of of kf/dropout.h rounds."""
    return 65536 * dropout_p >= 0.5


def draw(ops: Any, x: torch.Tensor) -> torch.Tensor:
    """A state for one dropout of `x`, from PyTorch's generator.

    By a step's op `draw_rng_state` (`ops`: torch.ops.…), on the CPU; on x's device while a CUDA graph is captured, so
    that each replay draws anew. Under torch.compile by torch.randint, on x's device; inside torch.vmap, too, which
    then knows that numbers are drawn and heeds its `randomness`.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        # A compiler takes two calls of an op with the same arguments for one, unless it knows that the op is random.
        # torch.compile knows that of PyTorch's own ops only (fx_graph_cse in torch 2.13), and so does torch.vmap.
        return torch.randint(1 << 62, (2,), device=x.device)
    return ops.draw_rng_state(x, on_device=x.is_cuda and _is_capturing(x.device))


def _is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device`, which need not be the current device, is captured into a CUDA graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def unused(x: torch.Tensor) -> torch.Tensor:
    """A state where nothing is dropped."""
    # torch.compile makes no CUDA graph of kernels among which a tensor on the CPU is needed.
    return torch.zeros(2, dtype=torch.int64, device=x.device if torch.compiler.is_compiling() else "cpu")


def check(
    op: str,
    name: str,
    dropout_p: float,
    rng_state: torch.Tensor | None,
    first: torch.Tensor,
    rng_state_name: str = "rng_state",
) -> None:
    """The checks of kf/dropout.h without data. `name`, `rng_state_name`: what `op` calls dropout_p and the state.

    `first` is its first tensor. `rng_state` may be None where nothing is dropped.
    """
    torch._check_value(0 <= dropout_p <= 1, lambda: f"{op}: `{name}` must be from 0 to 1, got {dropout_p}")
    if rng_state is None:
        torch._check_value(
            not drops(dropout_p), lambda: f"{op}: `{rng_state_name}` must be given where `{name}` is not 0"
        )
        return
    check_type(op, rng_state_name, rng_state, (torch.int64,))
    check_shape(op, rng_state_name, rng_state, (2,))
    torch._check_value(
        rng_state.device in (torch.device("cpu"), first.device),
        lambda: (
            f"{op}: `{rng_state_name}` must be on the CPU or on the tensors' device ({first.device}), "
            f"got {rng_state.device}"
        ),
    )


def register_fake(library: str) -> None:
    """The shape of `draw_rng_state` in `library`, for torch.compile."""

    @torch.library.register_fake(f"{library}::draw_rng_state")
    def _(x: torch.Tensor, *, on_device: bool) -> torch.Tensor:
        return torch.empty(2, dtype=torch.int64, device=x.device if on_device else "cpu")
