"""What ops around a matrix product share, in whichever step: checks without data for fake tensors, and gradients.

A layer has x [..., depth], a weight [depth, width] or, `transposed`, [width, depth], and a bias [width] or None.
"""

import functools

import torch

from kernel_fusion.ops import check_dim, check_like, check_rows, check_shape, contiguous_like, register_autograd, wide


def check_weight(op, name, weight, transposed, depth, first_name, first):
    check_like(op, name, weight, first_name, first)
    check_dim(op, name, weight, 2)
    width = weight.shape[0 if transposed else 1]
    check_shape(op, name, weight, (width, depth) if transposed else (depth, width))
    torch._check_value(width > 0, lambda: f"{op}: `{name}` must not be empty, got shape {tuple(weight.shape)}")
    return width


def check_layer(op, x, weight, bias, transposed):
    check_rows(op, "x", x)
    width = check_weight(op, "weight", weight, transposed, x.shape[-1], "x", x)
    if bias is not None:
        check_like(op, "bias", bias, "x", x, (width,))
    return width


def check_backward(op, grad, x, weight, transposed):
    check_rows(op, "grad", grad)
    check_like(op, "x", x, "grad", grad)
    torch._check_value(
        x.dim() == grad.dim() and x.shape[:-1] == grad.shape[:-1],
        lambda: (
            f"{op}: `x` must have the shape of `grad` but for the last dimension, got {tuple(x.shape)} and "
            f"{tuple(grad.shape)}"
        ),
    )
    torch._check_value(
        x.shape[-1] != 0, lambda: f"{op}: the last dimension of `x` must not be 0, got shape {tuple(x.shape)}"
    )
    shape = (x.shape[-1], grad.shape[-1])
    check_like(op, "weight", weight, "grad", grad, shape[::-1] if transposed else shape)


def empty_rows(x, width):
    return x.new_empty((*x.shape[:-1], width))


def empty_gradients(grad, x, weight):
    return contiguous_like(x), contiguous_like(weight), grad.new_empty(grad.shape[-1])


def without_autocast(backward):
    """A backward inside an autocast region computes the same."""

    @functools.wraps(backward)
    def plain(ctx, grad, *more):
        with torch.autocast(grad.device.type, enabled=False):
            return backward(ctx, grad, *more)

    return plain


def biased(ctx, grads):
    """Of x, weight and bias, the last only where there is one."""
    return *grads[:2], grads[2] if ctx.has_bias else None


def turned(weight, transposed):
    """A weight as [depth, width]."""
    return weight.mT if transposed else weight


def formula_of_backward(grad, x, weight, transposed):
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)
    grad_weight = rows.mT @ inputs if transposed else inputs.mT @ rows
    return grad @ turned(weight, transposed).mT, grad_weight, rows.sum(0)


def register_second_gradient(op, formula, tensors):
    """Registers the gradient of `op`, such as "library::name_backward", with respect to its first `tensors` inputs.

    formula: of these in float32 or float64, of the other inputs and of the options but `rung`.
    """

    def setup(ctx, inputs, keyword_only_inputs, output):
        ctx.save_for_backward(*inputs[:tensors], *(t for t in inputs[tensors:] if isinstance(t, torch.Tensor)))
        ctx.others = [None if isinstance(t, torch.Tensor) else t for t in inputs[tensors:]]
        ctx.options = {name: value for name, value in keyword_only_inputs.items() if name != "rung"}

    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        more = iter(saved[tensors:])
        others = [next(more) if other is None else other for other in ctx.others]
        with torch.enable_grad(), torch.autocast(saved[0].device.type, enabled=False):
            variables = [wide(t).detach().requires_grad_() for t in saved[:tensors]]
            outputs = formula(*variables, *others, **ctx.options)
            found = torch.autograd.grad(outputs, variables, [wide(g) for g in grads], allow_unused=True)
        first = [
            torch.zeros_like(t) if f is None else f.to(t.dtype) for f, t in zip(found, saved[:tensors], strict=True)
        ]
        return *first, *(None for _ in others)

    register_autograd(op, backward, setup_context=setup)
