"""What this step's ops share: dropout's arguments, a row's statistics and its gradients, the ops of earlier steps."""

import functools
import math

import torch

from kernel_fusion import rng
from kernel_fusion.ops import wide

_ops = torch.ops.step3_fused


def dropout(op, name, dropout_p, rng_state, training, x):
    """The part that is dropped, `name` in `op`, and a state for it."""
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"{op}: `{name}` must be from 0 to 1, got {dropout_p}")
    if not training:
        dropout_p = 0.0
    if rng_state is None and rng.drops(dropout_p):
        rng_state = rng.draw(_ops, x)
    return dropout_p, rng_state


def check_eps(op, eps):
    torch._check_value(0 <= eps < math.inf, lambda: f"{op}: `eps` must be a finite number ≥ 0, got {eps}")


def statistics_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def a_number_a_row(x, keep=True):
    return x.new_empty(x.shape[:-1] if keep else 0, dtype=statistics_dtype(x))


def from_statistics(x, mean, rstd, grad_mean, grad_rstd):
    """What a row's mean and rstd, where somebody used them, add to the gradient of x; in their dtype."""
    width = x.shape[-1]
    grad = 0
    if grad_mean is not None:
        grad = (grad_mean / width).unsqueeze(-1)
    if grad_rstd is not None:
        grad = grad - (grad_rstd * rstd**3 / width).unsqueeze(-1) * (wide(x) - mean.unsqueeze(-1))
    return grad


def gradients_of_rows(ctx, rows, grad, grad_sum, grad_mean, grad_rstd):
    """Of x, weight and bias, by this step's kernels. `rows`: x, weight, and mean and rstd if they were kept."""
    x, weight, *statistics = rows
    if not statistics:  # there are none, of which somebody could have used anything
        grad_mean = grad_rstd = None
    if grad is None:
        grad = torch.zeros_like(x)
    with torch.autocast(x.device.type, enabled=False):  # a backward inside an autocast region computes the same
        mean, rstd = statistics or _ops.layer_norm(x, weight, weight, eps=ctx.eps)[1:]
        grad_x, grad_weight, grad_bias = _ops.layer_norm_backward(grad, x, weight, mean, rstd, grad_sum)
        if grad_mean is not None or grad_rstd is not None:
            grad_x = (wide(grad_x) + from_statistics(x, mean, rstd, grad_mean, grad_rstd)).to(x.dtype)
    return grad_x, grad_weight, grad_bias


@functools.cache
def step_1():
    """Step 1's ops. Where that step is not built, the error gives the command."""
    import step1_simple  # noqa: F401

    return torch.ops.step1_simple


@functools.cache
def step_2():
    """Step 2's ops. Where that step is not built, the error gives the command."""
    import step2_attention  # noqa: F401

    return torch.ops.step2_attention


def attention_gradients(*inputs, **options):
    """Step 2's `gradients` of attention."""
    from step2_attention import gradients

    return gradients(*inputs, **options)
