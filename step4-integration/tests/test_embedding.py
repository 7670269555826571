"""embedding, on every device: against float64, eager PyTorch and the rung before."""

import pytest
import torch

import step4_integration
from kernel_fusion import testing
from step4_integration.testing import (
    check_embedding,
    every_dtype,
    every_embedding,
    look_up,
    on_each_device,
    ops,
    tables,
)


@every_embedding
@every_dtype
@pytest.mark.parametrize(
    ("batch", "length", "width"),
    [
        (1, 1, 1),
        (2, 31, 64),
        (3, 33, 33),
        (1, 127, 40),
        (1, 3, 760),
        (2, 5, 768),
        (1, 3, 1600),
        (1, 1023, 8),
        (2, 129, 31),
        (2, 3, 12),
        (5, 2, 264),
        (9, 7, 16),
    ],
)
def test_embedding_adds_the_token_and_its_position(batch, length, width, dtype, device, rung):
    check_embedding(tables(batch, length, width, dtype, device), rung, position=2)


@every_embedding
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embedding_finds_each_tensor_wherever_it_lies(dtype, device, rung):
    check_embedding(tables(2, 5, 64, dtype, device), rung, position=2, alone=True, layouts=False)


@every_embedding
@every_dtype
@pytest.mark.parametrize(("length", "width"), [(7, 64), (33, 31)])
def test_each_sequence_may_begin_at_a_position_of_its_own(length, width, dtype, device, rung):
    """What begins before the table is padded on the left: the first position. One ends where the table does."""
    positions = torch.tensor([-4, 1, -200, 0, -1], dtype=torch.int32, device=device)
    inputs = (*tables(5, length, width, dtype, device), positions)
    check_embedding(inputs, rung, position=2, alone=width == 64, layouts=width == 64)


@pytest.mark.parametrize("rung", step4_integration.rungs("embedding", "cpu"))
def test_positions_past_the_table_are_an_error_on_the_cpu(rung):
    inputs = tables(2, 5, 8, torch.float32, "cpu", positions=9)
    for positions, position, first in ((2, 3, 5), (0, 5, 5), (2**31 - 1, 0, 2**31 - 1), (2**31 - 1, 3, 2**31 + 2)):
        says = (f"embedding: `position` ({position}) and `positions` ({positions} at 1) put 5 tokens",)
        says += (f"at {first} to {first + 4}, outside the 9 rows of `position_weight`",)
        moved = torch.tensor([0, positions], dtype=torch.int32) if position < 5 else torch.tensor([-1, 0]).int()
        with testing.raises(ValueError, *says):
            step4_integration.embedding(*inputs, moved, position=position, rung=rung)
    with testing.raises(ValueError, "outside the 9 rows"):
        step4_integration.embedding(*inputs, torch.tensor([0, -(2**31)]).int(), position=2**63 - 1, rung=rung)


@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step4_integration", "embedding") if p.values[0] == "cuda"]
)
def test_a_position_past_the_table_is_a_row_of_nan_on_a_gpu(device, rung):
    inputs = tables(2, 5, 8, torch.float32, device, positions=9)
    positions = torch.tensor([-2, 2], dtype=torch.int32, device=device)
    token_weight = inputs[1].requires_grad_()
    position_weight = inputs[2].requires_grad_()
    y = step4_integration.embedding(*inputs, positions, position=4, rung=rung)
    assert torch.equal(y.isnan().all(-1), y.isnan().any(-1))
    assert y.isnan().any(-1).tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    y.sum().backward()
    assert position_weight.grad[:, 0].tolist() == [0, 0, 1, 1, 1, 1, 2, 1, 1]
    assert token_weight.grad[:, 0].sum() == 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rung", step4_integration.rungs("embedding", "cuda"))
def test_a_cuda_graph_replays_at_other_positions(rung):
    inputs = tables(2, 1, 64, torch.float32, "cuda", positions=9)
    positions = torch.zeros(2, dtype=torch.int32, device="cuda")
    graph, y = testing.capture(lambda: step4_integration.embedding(*inputs, positions, rung=rung))
    for step in range(3):
        positions.copy_(torch.tensor([step, 2 * step - 3]))
        graph.replay()
        assert torch.equal(y, look_up(*inputs, positions))


@every_embedding
@pytest.mark.parametrize("far", ["id", "position"])
@pytest.mark.parametrize("width", [4096, 4095])
def test_embedding_of_rows_beyond_32_bits(width, far, device, rung):
    """A table of more than 2³² elements, most of which nobody touches; what wraps around lands where nothing is."""
    rows = (1 << 20) + (1 << 10)
    many = testing.lazy_memory(rows * width, torch.float16, device).view(rows, width)
    many[-1] = testing.randn((width,), torch.float16, device)
    few = testing.randn((2, width), torch.float16, device, seed=1)
    ids = torch.tensor([[rows - 1 if far == "id" else 1]], device=device)
    token_weight, position_weight, position = (many, few, 1) if far == "id" else (few, many, rows - 1)
    for id_type in (torch.int64, torch.int32):
        got = step4_integration.embedding(ids.to(id_type), token_weight, position_weight, position=position, rung=rung)
        assert torch.equal(got[0, 0], (many[-1].float() + few[1].float()).half())


@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step4_integration", "embedding") if p.values[1] != "cpu"]
)
@pytest.mark.parametrize("width", [4096, 4095])
def test_embedding_of_more_than_2_to_32_elements(width, device, rung, monkeypatch):
    """Under emulation the last blocks run, in memory that exists where they touch it; a GPU runs all."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "20")
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    length = (1 << 20) + (1 << 10)
    ids = testing.lazy_memory(length, torch.int32, device).view(1, length)
    y = testing.lazy_memory(length * width, torch.float16, device).view(1, length, width)
    position_weight = testing.lazy_memory(length * width, torch.float16, device).view(length, width)
    token_weight = testing.randn((3, width), torch.float16, device)
    position_weight[-1] = testing.randn((width,), torch.float16, device, seed=1)
    ids[0, -1] = 2
    ops.embedding.out(ids, token_weight, position_weight, rung=rung, out=y)
    assert torch.equal(y[0, -1], (token_weight[2].float() + position_weight[-1].float()).half())


@every_embedding
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_ids_may_be_of_either_integer_type(id_type, device, rung):
    ids, token_weight, position_weight = tables(2, 7, 24, torch.float32, device)
    ids[0, 0], ids[1, 6] = 0, 18  # the first and the last row of the table
    check_embedding((ids.to(id_type), token_weight, position_weight), rung)


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_auto_does_gpt2_sized_tables(dtype, device):
    check_embedding(tables(2, 1024, 768, dtype, device, vocab=2000, positions=1024), "auto", layouts=False)


def test_a_batch_that_is_too_large_for_a_rung_is_refused():
    ids = torch.zeros(4 * 65535 + 1, 1, dtype=torch.int32)
    weight = torch.ones(1, 1)
    says = "embedding: rung 'v3_batched' takes at most 262140 sequences, got 262141; these can: 'v1_naive', 'v2_vector'"
    with testing.raises(ValueError, says):
        step4_integration.embedding(ids, weight, weight, rung="v3_batched")


@every_embedding
def test_no_tokens_give_no_rows(device, rung):
    _, token_weight, position_weight = tables(1, 1, 8, torch.float32, device)
    for shape in ((0, 3), (2, 0)):
        ids = torch.empty(shape, dtype=torch.int64, device=device)
        assert step4_integration.embedding(ids, token_weight, position_weight, rung=rung).shape == (*shape, 8)


@pytest.mark.parametrize("rung", step4_integration.rungs("embedding", "cpu"))
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_a_bad_id_is_an_error_on_the_cpu(id_type, rung):
    ids, token_weight, position_weight = tables(2, 5, 8, torch.float32, "cpu")
    for bad in (19, -1, 2**31 - 1):
        for at in ((0, 0), (1, 3), (1, 4)):
            with_bad = ids.index_put(tuple(map(torch.tensor, at)), torch.tensor(bad))
            with testing.raises(ValueError, "embedding: `ids` must be from 0 to 18", f"got {bad} at {at}"):
                step4_integration.embedding(with_bad.to(id_type), token_weight, position_weight, rung=rung)


@pytest.mark.parametrize(
    ("device", "rung"), [p for p in testing.device_rungs("step4_integration", "embedding") if p.values[0] == "cuda"]
)
@every_dtype
def test_a_bad_id_is_a_row_of_nan_on_a_gpu(dtype, device, rung):
    """kernels_test.cpp shows the same under emulation, where Python's host checks come first."""
    inputs = tables(2, 5, 8, dtype, device)
    expected = look_up(*inputs)
    for bad in (19, -1, 2**40):
        ids = inputs[0].clone()
        ids[1, 3] = bad
        y = step4_integration.embedding(ids, *inputs[1:], rung=rung)
        assert y[1, 3].isnan().all()
        y[1, 3] = expected[1, 3]
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


@every_embedding
@pytest.mark.parametrize("moved", [None, [2, -3]], ids=["together", "moved"])
@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_gradient_of_embedding(id_type, moved, device, rung):
    ids, token_weight, position_weight = tables(2, 5, 3, torch.float64, device)
    ids = ids.to(id_type)
    positions = None if moved is None else torch.tensor(moved, dtype=torch.int32, device=device)

    def function(token_weight, position_weight):
        return step4_integration.embedding(ids, token_weight, position_weight, positions, position=1, rung=rung)

    weights = (token_weight.requires_grad_(), position_weight.requires_grad_())
    assert torch.autograd.gradcheck(function, weights)
    assert torch.autograd.gradgradcheck(function, weights)
    testing.check_each_input_alone(function, weights)
    testing.check_tangents_are_refused(function, weights)
    before = step4_integration.launch_counts()
    torch.autograd.grad(function(*weights).sum(), weights)
    after = step4_integration.launch_counts()
    assert sum(after.values()) - sum(before.values()) == (2 if moved is None else 3)  # the positions' sum is PyTorch's


@on_each_device
@pytest.mark.parametrize(("batch", "length"), [(1, 4000), (4000, 1)])
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_gradients_of_embedding_are_as_exact_as_the_dtype_allows(dtype, batch, length, device):
    """Each of 5 tokens is used about 800 times: summed in bfloat16, its gradient would stop growing long before. And so
    would that of the one position of 4000 sequences."""
    ids, token_weight, position_weight = tables(batch, length, 8, dtype, device, vocab=5)
    grad = testing.randn((batch, length, 8), dtype, device, seed=3).abs()
    step4_integration.embedding(ids, token_weight.requires_grad_(), position_weight.requires_grad_()).backward(grad)

    wide = [t.detach().double().requires_grad_() for t in (token_weight, position_weight)]
    look_up(ids, *wide).backward(grad.double())
    for got, want in ((token_weight.grad, wide[0].grad), (position_weight.grad, wide[1].grad)):
        assert got.dtype == dtype
        rounding = (want - want.to(dtype).double()).abs().max()
        assert (got.double() - want).abs().max() <= 1.01 * rounding + 1e-5 * want.abs().max()


@on_each_device
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_second_gradients_of_embedding_are_as_exact_as_the_dtype_allows(dtype, device):
    ids, *weights = tables(2, 5, 8, dtype, device)
    testing.check_second_gradients(
        lambda *tables: step4_integration.embedding(ids, *tables, position=1),
        lambda *tables: look_up(ids, *tables, position=1),
        tuple(weights),
    )


# ---- the ops as torch sees them ----


@every_embedding
def test_embedding_is_registered_as_torch_wants_it(device, rung):
    inputs = tables(2, 5, 8, torch.float32, device)
    testing.check_op(step4_integration, "embedding", inputs, {"position": 1, "rung": rung})
    transposed = tuple(map(testing.transposed, tables(2, 5, 8, torch.bfloat16, device)))
    testing.check_op(step4_integration, "embedding", transposed, {"rung": rung})
    moved = torch.tensor([2, -3], dtype=torch.int32, device=device)
    testing.check_op(step4_integration, "embedding", (*inputs, moved), {"position": 1, "rung": rung})


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_embedding_refuses(device):
    ids, token_weight, position_weight = tables(2, 5, 8, torch.float32, "cpu", positions=7)
    ids, token_weight, position_weight = ids.to(device), token_weight.to(device), position_weight.to(device)

    def refused(exception, *fragments, ids=ids, token_weight=token_weight, position_weight=position_weight, **kwargs):
        with testing.raises(exception, *fragments):
            step4_integration.embedding(ids, token_weight, position_weight, **kwargs)

    refused(TypeError, "embedding: `ids` must be int64 or int32, got float32", ids=ids.float())
    refused(ValueError, "embedding: `ids` must have 2 dimensions, got 1 (shape (5,))", ids=ids[0])
    refused(TypeError, "embedding: `token_weight` must be float32", "got int64", token_weight=token_weight.long())
    refused(ValueError, "embedding: `token_weight` must have 2 dimensions", token_weight=token_weight[0])
    refused(ValueError, "embedding: `token_weight` must not be empty, got shape (0, 8)", token_weight=token_weight[:0])
    empty = {"token_weight": token_weight[:, :0], "position_weight": position_weight[:, :0]}
    refused(ValueError, "embedding: `token_weight` must not be empty, got shape (19, 0)", **empty)
    refused(TypeError, "embedding: `position_weight` must have the dtype", position_weight=position_weight.half())
    refused(ValueError, "embedding: `position_weight` must have shape (7, 8)", position_weight=position_weight[:, :7])
    refused(ValueError, "embedding: `position` must not be negative, got -1", position=-1)
    for position in (3, 2**63 - 1):  # to which no length can be added
        says = (f"embedding: `position` ({position})", "the length of `ids` (5)", "past the 7 rows")
        refused(ValueError, *says, position=position)
    moved = torch.zeros(2, dtype=torch.int32, device=device)
    refused(TypeError, "embedding: `positions` must be int32, got int64", positions=moved.long())
    refused(ValueError, "embedding: `positions` must have shape (2,), got (1,)", positions=moved[:1])
    refused(ValueError, "embedding: `position` must not be negative, got -1", positions=moved, position=-1)
    if device != "meta":
        for some_ids in (ids, ids[:0], ids[:, :0]):
            refused(
                ValueError, "embedding: `rung` must be 'auto' or one of", "'v2_vector'", "'v9'", ids=some_ids, rung="v9"
            )
        out = torch.empty(2, 5, 9, device=device)
        with testing.raises(ValueError, "embedding: `out` must have shape (2, 5, 8), got (2, 5, 9)"):
            ops.embedding.out(ids, token_weight, position_weight, out=out)
