"""The checks that stand for host.h's where there is no data: what they let pass, and what they say."""

import pytest
import torch

from kernel_fusion import ops, testing


@pytest.fixture
def x():
    return torch.empty(2, 3, device="meta")


def test_what_fits_passes(x):
    ops.check_rows("op", "x", x)
    ops.check_dim("op", "x", x, 2)
    ops.check_type("op", "x", x, (torch.float32,))
    ops.check_like("op", "y", x.mT, "x", x)
    ops.check_like("op", "y", x.mT, "x", x, (3, 2))


@pytest.mark.parametrize(
    ("error", "text", "check"),
    [
        (TypeError, "`x` must be float32, float16, bfloat16 or float64, got int8", lambda x: ("floating", x.char())),
        (TypeError, "`x` must be int64 or int32, got float32", lambda x: ("type", x, (torch.int64, torch.int32))),
        (TypeError, "`x` must be int64, got float32", lambda x: ("type", x, (torch.int64,))),
        (TypeError, "`x` must be float32, float16, bfloat16 or float64, got bool", lambda x: ("rows", x.bool())),
        (ValueError, "`x` must have at least 1 dimension, got 0 (shape ())", lambda x: ("rows", x[0, 0])),
        (ValueError, "last dimension of `x` must not be 0, got shape (2, 0)", lambda x: ("rows", x[:, :0])),
        (ValueError, "`x` must have 4 dimensions, got 2 (shape (2, 3))", lambda x: ("dim", x, 4)),
        (ValueError, "`x` must have 1 dimension, got 2 (shape (2, 3))", lambda x: ("dim", x, 1)),
        (ValueError, "`x` must have shape (2, 4), got (2, 3)", lambda x: ("shape", x, (2, 4))),
        (ValueError, "`x` must have shape (3,), got (2, 3)", lambda x: ("shape", x, (3,))),
        (ValueError, "`x` must be on the device of `q` (cpu), got meta", lambda x: ("device", x, "q", torch.ones(1))),
        (TypeError, "`x` must have the dtype of `q` (float16), got float32", lambda x: ("like", x, "q", x.half())),
        (ValueError, "`x` must be on the device of `q` (cpu), got meta", lambda x: ("like", x, "q", torch.ones(1))),
        (ValueError, "`x` must have shape (3, 2), got (2, 3)", lambda x: ("like", x, "q", x, (3, 2))),
    ],
)
def test_what_does_not_fit_is_named(error, text, check, x):
    name, tensor, *more = check(x)
    with testing.raises(error, "softmax: ", text):
        getattr(ops, f"check_{name}")("softmax", "x", tensor, *more)


def test_outputs_are_contiguous_and_gradients_wide(x):
    assert ops.contiguous_like(x.mT).is_contiguous()
    assert ops.contiguous_like(x.mT).shape == (3, 2)
    assert [ops.wide(x.to(d)).dtype for d in (torch.half, torch.bfloat16, torch.float, torch.double)] == [
        torch.float32, torch.float32, torch.float32, torch.float64,
    ]  # fmt: skip
