"""Attention in pure PyTorch: no build, no GPU. Try an idea here before you write it as a kernel.

    python pages/cpu_kernels.py                       compares what is here on one head size of GPT-2
    python pages/cpu_kernels.py --length 2048 --device mps

The two functions do what the first two rungs do: `cpu_fused_attention` writes all scores, `optimized_cpu_attention`
keeps a tile of them. `CPUKernelBenchmark` times functions of (q, k, v) beside each other; it refuses one that is wrong.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils import benchmark

from kernel_fusion.ops import check_dim, check_shape


def _check(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_dim(op, name, tensor, 4)
    for name, tensor in (("k", k), ("v", v)):
        check_shape(op, name, tensor, (*q.shape[:2], k.shape[2], q.shape[3]))


def _hidden(q_first: int, queries: int, k_first: int, keys: int, beyond: int, device: torch.device) -> torch.Tensor:
    """Which of `keys` keys each of `queries` queries does not see: query i sees keys j <= i + beyond."""
    query = torch.arange(q_first, q_first + queries, device=device)
    return torch.arange(k_first, k_first + keys, device=device) > query[:, None] + beyond


def cpu_fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """`softmax(scale * q @ k.mT) @ v` as the formula says, in one function; the scores are overwritten by the weights.

    Args:
        q: [B, H, Sq, D], floating, on any device; computed in float32 where it is of a half type.
        k, v: [B, H, Sk, D].
        causal: query i sees keys j <= i + Sk - Sq, so that the last query sees all.
        scale: factor for the scores; None for 1/sqrt(D).

    Returns:
        [B, H, Sq, D] of q's dtype. A query that sees no key gives 0.

    Raises:
        ValueError: a shape does not fit.
    """
    _check("cpu_fused_attention", q, k, v)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.to(wide).mT
    if causal:
        hidden = _hidden(0, q.shape[2], 0, k.shape[2], k.shape[2] - q.shape[2], q.device)
        scores.masked_fill_(hidden, -torch.inf)
    greatest = scores.detach().amax(-1, keepdim=True) if k.shape[2] else scores.new_zeros(*q.shape[:3], 1)
    greatest = greatest.masked_fill(greatest == -torch.inf, 0)  # nothing seen: −inf − (−inf) would be NaN
    weights = scores.sub_(greatest).exp_()
    total = weights.sum(-1, keepdim=True)
    return ((weights @ v.to(wide)) / total.masked_fill(total == 0, 1)).to(q.dtype)


def optimized_cpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    chunk_size: int = 256,
) -> torch.Tensor:
    """The same, a tile of queries and keys at a time with the online softmax: memory grows with Sq + Sk, not Sq * Sk.

    Args:
        q, k, v, causal, scale: as `cpu_fused_attention`.
        chunk_size: queries and keys of a tile, at least 1. A tile of scores should stay in cache: 256 * 256 float32 for
            each head are 256 KB.

    Returns:
        As `cpu_fused_attention`.

    Raises:
        ValueError: a shape does not fit, or `chunk_size` is below 1.
    """
    _check("optimized_cpu_attention", q, k, v)
    if chunk_size < 1:
        raise ValueError(f"optimized_cpu_attention: `chunk_size` must be at least 1, got {chunk_size}")
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q_length, k_length = q.shape[2], k.shape[2]
    beyond = k_length - q_length
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for first_query in range(0, q_length, chunk_size):
        queries = q[:, :, first_query : first_query + chunk_size].to(wide) * factor
        last_query = first_query + queries.shape[2] - 1
        greatest = queries.new_full((*queries.shape[:3], 1), -torch.inf)
        total = torch.zeros_like(greatest)
        sums = torch.zeros_like(queries)
        for first_key in range(0, min(k_length, last_query + beyond + 1) if causal else k_length, chunk_size):
            scores = queries @ k[:, :, first_key : first_key + chunk_size].to(wide).mT
            keys = scores.shape[-1]
            if causal and first_key + keys - 1 > first_query + beyond:  # the first query sees the least
                hidden = _hidden(first_query, queries.shape[2], first_key, keys, beyond, q.device)
                scores.masked_fill_(hidden, -torch.inf)
            before = greatest
            greatest = torch.maximum(greatest, scores.detach().amax(-1, keepdim=True))
            subtracted = greatest.masked_fill(greatest == -torch.inf, 0)
            weights = scores.sub_(subtracted).exp_()
            rescale = (before - subtracted).exp_()  # of what was added up under the old maximum; 0 at first
            total = total * rescale + weights.sum(-1, keepdim=True)
            sums = sums * rescale + weights @ v[:, :, first_key : first_key + chunk_size].to(wide)
        out[:, :, first_query : last_query + 1] = (sums / total.masked_fill(total == 0, 1)).to(q.dtype)
    return out


class Measured(NamedTuple):
    """One implementation: its median time in ms, and its greatest error against the formula in float64."""

    name: str
    ms: float
    error: float


class CPUKernelBenchmark:
    """Times implementations of attention beside each other, in one process, on the same tensors.

    Args:
        min_run_time: seconds for each implementation, at least.
        tolerance: the greatest error that is right, in units of the dtype's epsilon times the greatest output.
    """

    def __init__(self, min_run_time: float = 0.5, tolerance: float = 16.0):
        self.min_run_time = min_run_time
        self.tolerance = tolerance

    def compare_implementations(
        self,
        implementations: Mapping[str, Callable[..., torch.Tensor]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        **options: Any,
    ) -> list[Measured]:
        """Checks each implementation, times it, and prints a table.

        Args:
            implementations: by name; called as f(q, k, v, **options).
            q, k, v: as for `cpu_fused_attention`.
            options: such as causal=True.

        Returns:
            What was measured, the fastest first.

        Raises:
            ValueError: there is no implementation; or one gives another shape, NaN or a wrong result, and the text
                names it.
        """
        if not implementations:
            raise ValueError("compare_implementations: `implementations` must not be empty")
        exact = cpu_fused_attention(*(t.detach().cpu().double() for t in (q, k, v)), **options)
        allowed = self.tolerance * torch.finfo(q.dtype).eps * max(1.0, exact.abs().max().item())
        found, timers = [], []
        for name, function in implementations.items():
            out = function(q, k, v, **options)
            if out.shape != exact.shape:
                raise ValueError(f"{name}: the output has shape {tuple(out.shape)}, must have {tuple(exact.shape)}")
            error = (out.detach().cpu().double() - exact).abs().max().item()
            if not error <= allowed:  # NaN, too
                raise ValueError(f"{name}: the greatest error is {error:.3g}, allowed are {allowed:.3g}")
            timer = benchmark.Timer(
                "function(q, k, v, **options)",
                globals={"function": function, "q": q, "k": k, "v": v, "options": options},
                num_threads=torch.get_num_threads(),
                label=f"attention {tuple(q.shape)}, {k.shape[2]} keys, {q.dtype} on {q.device}",
                sub_label=name,
                description="time",
            ).blocked_autorange(min_run_time=self.min_run_time)
            timers.append(timer)
            found.append(Measured(name, timer.median * 1e3, error))
        benchmark.Compare(timers).print()
        return sorted(found, key=lambda one: one.ms)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
    """PyTorch's own. Its `is_causal` meets in the upper left corner, so Sq must be Sk where `causal`."""
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"sdpa: `q` and `k` must be equally long where causal, got {q.shape[2]} and {k.shape[2]}")
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu or mps (default: %(default)s)")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (1, options.heads, options.length, 64)
    q, k, v = (torch.randn(shape, generator=generator).to(options.device) for _ in range(3))
    implementations = {
        "cpu_fused_attention": cpu_fused_attention,
        "optimized_cpu_attention": optimized_cpu_attention,
        "torch's scaled_dot_product_attention": sdpa,
    }
    CPUKernelBenchmark().compare_implementations(implementations, q, k, v, causal=True)


if __name__ == "__main__":
    main()
