"""embedding_backward, on every device: against float64, eager PyTorch and the rung before."""

import pytest
import torch

import step4_integration
from kernel_fusion import testing
from kernel_fusion.ops import wide
from step4_integration.testing import every_dtype, on_each_device, ops

every_backward = pytest.mark.parametrize(
    ("device", "rung"), testing.device_rungs("step4_integration", "embedding_backward")
)


def summed(grad, ids, vocab):
    """As PyTorch adds up: in float32 for half types."""
    table = torch.zeros(vocab, grad.shape[-1], dtype=wide(grad).dtype, device=grad.device)
    return table.index_add(0, ids.flatten(), wide(grad).flatten(0, 1)).to(grad.dtype)


def case(batch, length, width, dtype, device, *, vocab):
    ids = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    return testing.randn((batch, length, width), dtype, device, seed=1), ids


def check(grad, ids, rung, vocab, **options):
    testing.check_contract(
        step4_integration,
        "embedding_backward",
        (grad, ids, vocab),
        rung,
        reference=summed,
        eager=summed,
        **options,
    )


@every_backward
@every_dtype
@pytest.mark.parametrize(
    ("batch", "length", "width", "vocab"),
    [
        (1, 1, 1, 1),
        (2, 31, 64, 7),
        (3, 33, 33, 50),
        (1, 127, 40, 300),
        (2, 5, 768, 19),
        (1, 3, 1600, 2),
        (1, 1023, 8, 5),
        (4, 129, 31, 2),
    ],
)
def test_a_row_gets_the_gradients_of_its_tokens(batch, length, width, vocab, dtype, device, rung):
    check(*case(batch, length, width, dtype, device, vocab=vocab), rung, vocab)


@every_backward
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_is_found_wherever_it_lies(dtype, device, rung):
    check(*case(2, 70, 16, dtype, device, vocab=3), rung, 3, alone=True, layouts=False)


@every_backward
@pytest.mark.parametrize(
    "counts", [(64,), (128, 64), (1, 127, 1), (63, 65, 64), (0, 130, 0, 62), (65, 1, 190)], ids=str
)
def test_segments_begin_and_end_anywhere_in_windows(counts, device, rung):
    """Of tokens that come sorted, and of the same in another order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[None].to(device)
    grad = testing.randn((1, ids.shape[1], 24), torch.float32, device, seed=1)
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0)).to(device)]
    for order in (ids, shuffled):
        check(grad, order, rung, len(counts), layouts=False)


@every_backward
def test_one_token_that_is_everywhere(device, rung):
    ids = torch.full((4, 1024), 1, device=device)
    check(testing.randn((4, 1024, 16), torch.bfloat16, device, seed=1), ids, rung, 3, layouts=False)


@every_backward
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_ids_may_be_of_either_integer_type(id_type, device, rung):
    grad, ids = case(2, 7, 24, torch.float32, device, vocab=19)
    ids[0, 0], ids[1, 6] = 0, 18  # the first and the last row of the table
    check(grad, ids.to(id_type), rung, 19)


@pytest.mark.parametrize(
    ("device", "rung"),
    [p for p in testing.device_rungs("step4_integration", "embedding_backward") if p.values[1] != "cpu"],
)
@pytest.mark.parametrize("far", ["grad", "table"])
@pytest.mark.parametrize("width", [4096, 4095])
def test_of_more_than_2_to_32_elements(width, far, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "40")
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    many = (1 << 20) + (1 << 10)
    tokens, vocab = (many, 40) if far == "grad" else (1, many)
    ids = torch.zeros(1, tokens, dtype=torch.int32, device=device)
    ids[0, -1] = vocab - 1
    grad = testing.lazy_memory(tokens * width, torch.float16, device).view(1, tokens, width)
    grad[0, -1] = testing.randn((width,), torch.float16, device)
    out = testing.lazy_memory(vocab * width, torch.float16, device).view(vocab, width)
    ops.embedding_backward.out(grad, ids, vocab, rung=rung, out=out)
    assert torch.equal(out[-1], grad[0, -1])
    assert (out[-2] == 0).all()


@every_backward
def test_without_tokens_all_is_zero(device, rung):
    for shape in ((0, 3, 8), (2, 0, 8)):
        grad = torch.empty(shape, device=device)
        ids = torch.empty(shape[:2], dtype=torch.int64, device=device)
        got = step4_integration.embedding_backward(grad, ids, 5, rung=rung)
        assert torch.equal(got, torch.zeros(5, 8, device=device))
    nothing = torch.empty(2, 0, 0, device=device)
    ids = torch.empty(2, 0, dtype=torch.int64, device=device)
    assert step4_integration.embedding_backward(nothing, ids, 0, rung=rung).shape == (0, 0)


@pytest.mark.parametrize("rung", step4_integration.rungs("embedding_backward", "cpu"))
def test_a_bad_id_is_an_error_on_the_cpu(rung):
    grad, ids = case(2, 5, 8, torch.float32, "cpu", vocab=19)
    for bad in (19, -1, 2**40):
        ids[1, 3] = bad
        with testing.raises(ValueError, "embedding_backward: `ids` must be from 0 to 18", f"got {bad} at (1, 3)"):
            step4_integration.embedding_backward(grad, ids, 19, rung=rung)


@pytest.mark.parametrize(
    ("device", "rung"),
    [p for p in testing.device_rungs("step4_integration", "embedding_backward") if p.values[0] == "cuda"],
)
def test_a_bad_id_is_left_out_on_a_gpu(device, rung):
    """kernels_test.cpp shows the same under emulation, where Python's host checks come first."""
    grad, ids = case(2, 50, 8, torch.float32, device, vocab=3)
    for bad in (3, -1, 2**40, -(2**40)):
        with_bad, without = ids.clone(), grad.clone()
        with_bad[:, 7:40] = bad
        without[:, 7:40] = 0
        got = step4_integration.embedding_backward(grad, with_bad, 3, rung=rung)
        torch.testing.assert_close(got, summed(without, ids, 3))


@every_backward
def test_second_gradients(device, rung):
    grad, ids = case(2, 5, 3, torch.float64, device, vocab=7)

    def function(grad):
        return step4_integration.embedding_backward(grad, ids, 7, rung=rung)

    assert torch.autograd.gradcheck(function, (grad.requires_grad_(),))
    assert torch.autograd.gradgradcheck(function, (grad,))
    testing.check_tangents_are_refused(function, (grad,))


# ---- the op as torch sees it ----


@every_backward
def test_it_is_registered_as_torch_wants_it(device, rung):
    grad, ids = case(2, 70, 8, torch.float32, device, vocab=3)
    testing.check_op(step4_integration, "embedding_backward", (grad, ids, 3), {"rung": rung})
    transposed = testing.transposed(grad), testing.transposed(ids)
    testing.check_op(step4_integration, "embedding_backward", (*transposed, 3), {"rung": rung})


@on_each_device
def test_an_output_that_shares_memory_with_an_input_is_refused(device):
    testing.check_apart(step4_integration, "embedding_backward", (*case(2, 5, 8, torch.float32, device, vocab=7), 7))


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_it_refuses(device):
    grad, ids = (t.to(device) for t in case(2, 5, 8, torch.float32, "cpu", vocab=7))

    def refused(exception, *fragments, grad=grad, ids=ids, vocab=7, **kwargs):
        with testing.raises(exception, *fragments):
            step4_integration.embedding_backward(grad, ids, vocab, **kwargs)

    refused(TypeError, "embedding_backward: `grad` must be float32", "got int64", grad=grad.long())
    refused(ValueError, "embedding_backward: `grad` must have 3 dimensions, got 2", grad=grad[0])
    refused(TypeError, "embedding_backward: `ids` must be int64 or int32, got float32", ids=ids.float())
    refused(ValueError, "embedding_backward: `ids` must have shape (2, 5), got (2, 4)", ids=ids[:, :4])
    for vocab in (-1, 2**31 - 1):
        says = f"embedding_backward: `vocab` must be from 0 to 2147483646, got {vocab}"
        refused(ValueError, says, vocab=vocab)
    if device != "meta":
        for some in (slice(None), slice(0)):
            says = ("embedding_backward: `rung` must be 'auto' or one of", "'v9'")
            refused(ValueError, *says, grad=grad[some], ids=ids[some], rung="v9")
        out = torch.empty(7, 9, device=device)
        with testing.raises(ValueError, "embedding_backward: `out` must have shape (7, 8), got (7, 9)"):
            ops.embedding_backward.out(grad, ids, 7, out=out)
