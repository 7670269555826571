"""The checks of an op accept a right one, and reject a mistake: in its gradients, in what `out` may lie over."""

import types

import pytest
import torch

from kernel_fusion import testing

# ---- gradients ----


def product(mistake: str):
    """`x * y`, with a mistake in its backward."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            to_x, to_y = grad * y, grad * x
            if mistake == "half as much where y is frozen" and not ctx.needs_input_grad[1]:
                to_x = to_x / 2
            if mistake == "detached":
                to_x = grad * y.detach()
            if mistake == "coarse":
                to_x = grad * (1 + 0.05) * y
            if mistake == "nan":
                to_y = grad * (x + torch.sqrt(x - x))  # right, but the root's slope at 0 is infinite
            return to_x, to_y

    return Product.apply


def inputs(dtype=torch.float32):
    return testing.randn((3, 5), dtype, "cpu"), testing.randn((3, 5), dtype, "cpu", seed=1)


def test_a_right_gradient_is_accepted():
    testing.check_each_input_alone(product(""), inputs())
    for dtype in testing.DTYPES:
        testing.check_second_gradients(product(""), torch.mul, inputs(dtype))


def test_a_gradient_that_depends_on_what_else_requires_one_is_rejected():
    with testing.raises(AssertionError, "input 0: its gradient is another where it alone requires one"):
        testing.check_each_input_alone(product("half as much where y is frozen"), inputs())


@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("mistake", ["detached", "coarse", "nan"])
def test_a_wrong_second_gradient_is_rejected(mistake, dtype):
    with testing.raises(AssertionError, "the second gradient of ", "off, allowed are"):
        testing.check_second_gradients(product(mistake), torch.mul, inputs(dtype))


def test_a_second_gradient_of_another_dtype_is_rejected():
    x, y = inputs(torch.float16)
    with testing.raises(AssertionError, "the second gradient of gradient 0 is torch.float32, must be torch.float16"):
        testing.check_second_gradients(lambda x, y: x.float() * y.float(), torch.mul, (x, y))


def sum_and_product(mistake: str):
    """`x + y` and `x * y`, with a mistake in their backward."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x + y, x * y

        @staticmethod
        def backward(ctx, to_sum, to_product):
            x, y = ctx.saved_tensors
            if mistake == "lost together" and to_product.any():
                to_sum = torch.zeros_like(to_sum)
            if mistake == "wrong alone":
                y = 1.1 * y
            return to_sum + to_product * y, to_sum + to_product * x

    return Both.apply


def test_outputs_used_together():
    doubles = inputs(torch.float64)
    testing.check_outputs_together(sum_and_product(""), doubles)
    with testing.raises(AssertionError, "outputs (0, 1) used together: the gradient of input 0 is ", " off the sum of"):
        testing.check_outputs_together(sum_and_product("lost together"), doubles)
    with pytest.raises(RuntimeError, match="mismatch"):
        testing.check_outputs_together(sum_and_product("wrong alone"), doubles)
    with testing.raises(ValueError, "of 1 outputs 1 have gradients"):
        testing.check_outputs_together(torch.mul, doubles)


# ---- what an output may lie over ----


def overlaps(a, b, between=0):
    """Whether fewer than `between` bytes lie between the two, or they share some."""
    first, second = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b))
    return first[1] + between > second[0]


LIBRARY = torch.library.Library("kf_apart", "DEF")
MISTAKES = {
    "right": lambda out, x, y: [overlaps(out, x), overlaps(out, y)],
    "forgets_y": lambda out, x, y: [overlaps(out, x), False],
    "refuses_neighbours": lambda out, x, y: [overlaps(out, x, 16), overlaps(out, y, 16)],
}


def step():
    """A step of ops that add two tensors and look at what `out` lies over, rightly or not."""
    module = types.SimpleNamespace(__name__="kf_apart")
    for name, look in MISTAKES.items():
        LIBRARY.define(f"{name}(Tensor x, Tensor y) -> Tensor")
        LIBRARY.define(f"{name}.out(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)")

        def into(x, y, *, out, name=name, look=look):
            for input_name, shared in zip("xy", look(out, x, y), strict=True):
                if shared:
                    raise ValueError(f"{name}: `out` must not share memory with `{input_name}`")
            return out.copy_(x + y)

        LIBRARY.impl(name, lambda x, y: x + y, "CPU")
        LIBRARY.impl(f"{name}.out", into, "CPU")
        setattr(module, name, getattr(torch.ops.kf_apart, name))
    return module


STEP = step()


def test_an_op_that_refuses_what_shares_memory_and_nothing_else_is_accepted():
    testing.check_apart(STEP, "right", inputs())


@pytest.mark.parametrize(
    ("op", "complaint"),
    [
        ("forgets_y", "forgets_y: `out` shares memory with `y`, and is taken"),
        ("refuses_neighbours", "refuses_neighbours: `out` only touches `x`, and is refused"),
    ],
)
def test_an_op_that_takes_or_refuses_the_wrong_output_is_rejected(op, complaint):
    with testing.raises(AssertionError, complaint):
        testing.check_apart(STEP, op, inputs())


# ---- what writes into its arguments ----


WRITES = torch.library.Library("kf_writes", "DEF")


def writes(name, raised, refused):
    """An op that writes into `out`; the arguments whose version counters rise, and those that may need no gradient."""
    WRITES.define(f"{name}(Tensor x, float factor, *, Tensor(a!) out) -> Tensor(a!)")
    overload = getattr(torch.ops.kf_writes, name).default

    def autograd(keys, x, factor, *, out):
        for argument, t in (("x", x), ("out", out)):
            if argument in refused and t.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(f"`{argument}` must not require gradients")
            if torch.autograd.forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError(f"`{argument}` must have no tangent")
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, x, factor, out=out)

    def versions(keys, x, factor, *, out):
        torch.autograd.graph.increment_version([t for argument, t in (("x", x), ("out", out)) if argument in raised])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, x, factor, out=out)

    WRITES.impl(name, autograd, "Autograd", with_keyset=True)
    WRITES.impl(name, versions, "ADInplaceOrView", with_keyset=True)
    return overload


def test_an_op_that_raises_the_versions_of_what_it_writes_is_accepted():
    overload = writes("right", raised=["out"], refused=["x", "out"])
    testing.check_writes(overload)
    assert overload in testing.writing_overloads("kf_writes")


@pytest.mark.parametrize(
    ("name", "raised", "refused", "complaint"),
    [
        ("mute", [], ["x", "out"], "the version counter of ['out'] is wrong"),
        ("raises_all", ["x", "out"], ["x", "out"], "the version counter of ['x'] is wrong"),
        ("takes_x", ["out"], ["out"], "DID NOT RAISE"),
        ("takes_out", ["out"], ["x"], "DID NOT RAISE"),
    ],
)
def test_an_op_that_writes_in_silence_is_rejected(name, raised, refused, complaint):
    with testing.raises((AssertionError, pytest.fail.Exception), complaint):
        testing.check_writes(writes(name, raised, refused))


# ---- small helps ----


def test_transposed_changes_the_strides_alone():
    x = torch.arange(24.0).view(2, 3, 4)
    assert testing.transposed(x).stride() == (12, 1, 3)
    assert torch.equal(testing.transposed(x), x)
    for value in (torch.ones(3), "text", 2.5):
        assert testing.transposed(value) is value
