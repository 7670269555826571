"""What gradients must keep to."""

import itertools
from collections.abc import Callable, Sequence

import torch

from kernel_fusion.testing.accuracy import as_tuple
from kernel_fusion.testing.inputs import randn
from kernel_fusion.testing.memory import bits, is_floating, same_bits
from kernel_fusion.testing.registration import capture


def check_each_input_alone(function: Callable, inputs: tuple) -> None:
    """Checks that the gradient of each floating tensor of `inputs` is the same whether the others require one or not.

    Raises:
        AssertionError: a gradient differs in a bit; the text names the input.
    """

    def gradients(needing: list[int]) -> tuple[torch.Tensor, ...]:
        values = [v.detach().requires_grad_(i in needing) if is_floating(v) else v for i, v in enumerate(inputs)]
        outputs = as_tuple(function(*values))
        grads = [randn(out.shape, out.dtype, out.device, seed=50 + i) for i, out in enumerate(outputs)]
        return torch.autograd.grad(outputs, [values[i] for i in needing], grads)

    floating = [i for i, value in enumerate(inputs) if is_floating(value)]
    for index, beside_others in zip(floating, gradients(floating), strict=True):
        (alone,) = gradients([index])
        different = int((bits(alone) != bits(beside_others)).sum())
        if different:
            raise AssertionError(f"input {index}: its gradient is another where it alone requires one")


def check_outputs_together(function: Callable, inputs: tuple) -> None:
    """Checks the gradients of several outputs of `function` that are used together: each two, and all.

    `torch.autograd.gradcheck` looks at outputs one by one. Here it gets the weighted sum of all; and the gradient of
    two must be the sum of their gradients. `function` returns a tuple, of whose tensors at least two have gradients, of
    `inputs`, with floating tensors in float64 among them.
    """
    values = [v.detach().requires_grad_() if is_floating(v) else v for v in inputs]
    floating = [i for i, value in enumerate(values) if is_floating(value)]
    needing = [values[i] for i in floating]
    outputs = as_tuple(function(*values))
    used = [i for i, out in enumerate(outputs) if out.requires_grad and out.numel()]
    if len(used) < 2:
        raise ValueError(f"of {len(outputs)} outputs {len(used)} have gradients; there is nothing to use together")
    weights = {i: randn(outputs[i].shape, outputs[i].dtype, outputs[i].device, seed=80 + i) for i in used}

    def gradients(of: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        chosen = [outputs[i] for i in of], needing, [weights[i] for i in of]
        return torch.autograd.grad(*chosen, retain_graph=True, materialize_grads=True)

    alone = {i: gradients((i,)) for i in used}
    for together in itertools.combinations(used, 2):
        for index, got, *parts in zip(floating, gradients(together), *(alone[i] for i in together), strict=True):
            off = (got - sum(parts)).abs().max().item() if got.numel() else 0.0
            if not off <= 1e-9 * max(1.0, *(part.abs().max().item() for part in parts)):
                raise AssertionError(
                    f"outputs {together} used together: the gradient of input {index} is {off:.3g} off the sum of both"
                )

    def weighted(*values):
        outputs = as_tuple(function(*values))
        return sum((outputs[i] * weight).sum() for i, weight in weights.items())

    assert torch.autograd.gradcheck(weighted, values, fast_mode=True)


def check_gradients_in_a_cuda_graph(function: Callable, variables: list[torch.Tensor], grad: torch.Tensor) -> None:
    """Checks that forward and backward pass, captured into a CUDA graph, compute anew from what is there at a replay.

    `variables`: CUDA tensors that require gradients; the first is changed. `grad`: of what `function` returns.
    """

    def call():
        return torch.autograd.grad(function(*variables), variables, grad)

    graph, captured = capture(call)
    with torch.no_grad():
        variables[0].mul_(-0.5)
    graph.replay()
    same_bits(captured, call(), "gradients replayed from a CUDA graph")


def check_tangents_are_refused(function: Callable, inputs: tuple) -> None:
    """Checks that `function` takes no tangent of a floating tensor of `inputs`: in forward mode it has no derivative.

    Raises:
        AssertionError: it takes one, and what comes out has perhaps none.
    """
    for index in [i for i, value in enumerate(inputs) if is_floating(value)]:

        def of_one(x):
            return function(*(x if i == index else value for i, value in enumerate(inputs)))  # noqa: B023

        try:
            torch.func.jvp(of_one, (inputs[index].detach(),), (inputs[index].detach(),))
        except NotImplementedError as error:
            if "must have no tangent" not in str(error):
                raise
        else:
            raise AssertionError(f"input {index}: its tangent is not refused")


def check_second_gradients(function: Callable, reference: Callable, inputs: tuple, roundings: int | None = 1) -> None:
    """Checks the gradients of the gradients of `function` in the dtype of `inputs` against `reference` in float64.

    Each may be off by 1e-4 of the greatest and by `roundings` to the dtype: 1, the result's own; 2 where the backward
    saves an output, which was rounded before. None where rounded parts may cancel: then up to three times the error of
    `reference`, composed of PyTorch's operations, in the inputs' dtype is allowed.
    """

    def second(function: Callable, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        inputs = [value.detach().requires_grad_() for value in inputs]
        outputs = as_tuple(function(*inputs))
        # Drawn in the inputs' dtype, so that both calls have the very same numbers.
        grads = [
            randn(o.shape, dtype, o.device, seed=60 + i).to(o.dtype).requires_grad_() for i, o in enumerate(outputs)
        ]
        first = torch.autograd.grad(outputs, inputs, grads, create_graph=True)
        weights = [randn(g.shape, dtype, g.device, seed=70 + i).to(g.dtype) for i, g in enumerate(first)]
        totals = [(g * w).sum() for g, w in zip(first, weights, strict=True)]
        return torch.autograd.grad(totals, [*inputs, *grads], materialize_grads=True)

    dtype = inputs[0].dtype
    exact_ones = second(reference, [value.double() for value in inputs])
    composed = second(reference, inputs)
    for index, (got, exact, theirs) in enumerate(zip(second(function, inputs), exact_ones, composed, strict=True)):
        of = f"input {index}" if index < len(inputs) else f"gradient {index - len(inputs)}"
        if got.dtype != dtype:
            raise AssertionError(f"the second gradient of {of} is {got.dtype}, must be {dtype}")
        error = (got.double() - exact).abs().max().item()
        allowed = (0.51 * (roundings or 1) * torch.finfo(dtype).eps + 1e-4) * exact.abs().max().item()
        if roundings is None:
            allowed += 3 * (theirs.double() - exact).abs().max().item()
        if not error <= allowed:
            raise AssertionError(f"the second gradient of {of} is {error:.3g} off, allowed are {allowed:.3g}")
