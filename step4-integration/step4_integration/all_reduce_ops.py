"""all_reduce: the sum over workers at the end of a half block, with what follows it."""

import torch

from kernel_fusion.ops import check_like, check_rows, check_type, contiguous_like, without_forward_mode

_ops = torch.ops.step4_integration


@without_forward_mode
def all_reduce(
    x: torch.Tensor,
    x_bias: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    buffer: torch.Tensor,
    peers: list[int],
    rank: int,
    *,
    eps: float = 1e-5,
    patience: float = 60.0,
    rung: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum = residual + x_bias + the sum of all workers' x`, and `y = layer_norm(sum)`: the same bits for all workers.

    All workers call it with as many rows of the same width and dtype; only `x` differs. `model.all_reduce.PeerMemory`
    makes the buffers and has the addresses. Numbers are added in float32, x in the order of the workers.

    Args:
        x: [..., width], width up to 4096; float32, float16 or bfloat16. Copied where it is not contiguous, or does not
            begin at a multiple of 16 bytes, as the others are.
        x_bias: [width], dtype and device of `x`, as all that follow.
        residual: the shape of `x`.
        weight: [width].
        bias: [width].
        buffer: uint8, of `all_reduce_bytes(width, workers)` at least, `all_reduce_header()` zeros and then 255. It
            counts the calls, so it must have been in all that the other workers' were in.
        peers: the addresses of all workers' buffers, up to 8, as this worker's device knows them.
        rank: this worker's number among them.
        eps: added to the variance, under the root.
        patience: in seconds; who waits longer for another worker ends the kernel with an error.
        rung: "auto", or a name from `rungs("all_reduce", x.device)`. On the CPU it must be a name: workers are then
            threads, or processes that share memory.

    Returns:
        `y` and `sum`, as `x`, contiguous.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device; a buffer too small; `peers` and `rank` that do not belong to it; unknown
            `rung`, or "auto" on the CPU.
        RuntimeError: gradients are being recorded; a worker has not come in time. (On a GPU that is told by a later
            call, and nothing can be done there any more.)
    """
    return _ops.all_reduce(
        x, x_bias, residual, weight, bias, buffer, peers, rank, eps=eps, patience=patience, rung=rung
    )


@torch.library.register_fake("step4_integration::all_reduce")
def _(x, x_bias, residual, weight, bias, buffer, peers, rank, *, eps=1e-5, patience=60.0, rung="auto"):
    check_rows("all_reduce", "x", x)
    check_type("all_reduce", "x", x, (torch.float32, torch.float16, torch.bfloat16))
    for name, other in (("x_bias", x_bias), ("weight", weight), ("bias", bias)):
        check_like("all_reduce", name, other, "x", x, x.shape[-1:])
    check_like("all_reduce", "residual", residual, "x", x, x.shape)
    return contiguous_like(x), contiguous_like(x)
