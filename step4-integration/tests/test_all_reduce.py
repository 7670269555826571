"""all_reduce: workers are threads here, whose buffers lie in one memory, as GPUs see each other's. test_parallel.py has
processes, and GPUs."""

import re
import subprocess
import sys
import types

import pytest
import torch
from model.all_reduce import PeerMemory
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import step4_integration
from kernel_fusion import steps, testing
from step4_integration import all_reduce, all_reduce_bytes, all_reduce_header
from step4_integration.testing import by_threads

RUNGS = step4_integration.rungs("all_reduce", "cpu")
each_rung = pytest.mark.parametrize("rung", RUNGS)


@pytest.fixture(autouse=True)
def patient_watchdog(monkeypatch):
    """The emulation's calls a wait for another launch endless when nothing moves for half a second."""
    monkeypatch.setenv("KF_SIMT_SPIN_SECONDS", "60")


def buffers_of(workers, width):
    bytes_ = all_reduce_bytes(width, workers)
    found = [torch.full((bytes_,), 255, dtype=torch.uint8) for _ in range(workers)]
    for buffer in found:
        buffer[: all_reduce_header()] = 0
    return found


def summed(buffers, xs, others, rung, **options):
    """What each worker gets."""
    peers = [buffer.data_ptr() for buffer in buffers]
    return by_threads(
        lambda rank: all_reduce(xs[rank], *others, buffers[rank], peers, rank, rung=rung, **options), len(xs)
    )


def inputs(workers, rows, width, dtype=torch.float32):
    """Every worker's x, and what all have."""
    draw = torch.Generator().manual_seed(rows * width)
    shapes = [(rows, width)] * workers + [(width,), (rows, width), (width,), (width,)]
    made = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    return made[:workers], made[workers:]


def check(found, xs, others, rung):
    """Against float64; and all workers have the same bits."""
    x_bias, residual, weight, bias = (each.double() for each in others)
    total = sum(x.double() for x in xs)
    exact = residual + x_bias + total
    y = F.layer_norm(exact, exact.shape[-1:], weight, bias)
    unit = torch.finfo(xs[0].dtype).eps
    largest = exact.abs().max() + (total.abs().max() if rung == "v2_peer" else 0)
    for own_y, own_sum in found:
        assert (own_sum.double() - exact).abs().max() <= unit * largest
        assert (own_y.double() - y).abs().max() <= unit * (8 + 4 * largest)
        assert torch.equal(own_y, found[0][0])
        assert torch.equal(own_sum, found[0][1])


@each_rung
@pytest.mark.parametrize(("workers", "dtype"), [(2, torch.bfloat16), (3, torch.float32), (4, torch.float16)])
def test_workers_get_the_sum_of_all_and_the_same_bits(workers, dtype, rung):
    """Rows that vectors fit into and others, one after the other through the same buffers, which were made for the
    widest; and the first ones again."""
    buffers, first = buffers_of(workers, 200), None
    for rows, width in ((1, 8), (1, 200), (3, 16), (2, 33), (2, 200), (1, 8)):
        xs, others = inputs(workers, rows, width, dtype)
        found = summed(buffers, xs, others, rung)
        check(found, xs, others, rung)
        first = first or found
    assert torch.equal(first[0][0], found[0][0])
    assert torch.equal(first[0][1], found[0][1])


@each_rung
def test_a_block_goes_through_many_rows(rung):
    """There are 512 blocks at most, so the last rows are some block's second; twice is more turns than a ring has."""
    buffers = buffers_of(2, 8)
    xs, others = inputs(2, 515, 8)
    for _ in range(2):
        check(summed(buffers, xs, others, rung), xs, others, rung)


@each_rung
@pytest.mark.parametrize("schedule", ["reverse", "random:1"])
def test_threads_and_blocks_may_run_in_any_order(schedule, rung, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    xs, others = inputs(3, 7, 40)
    check(summed(buffers_of(3, 40), xs, others, rung), xs, others, rung)


@each_rung
def test_each_workers_x_may_begin_anywhere(rung):
    """How rows are sent must not depend on it: the others' would be sent otherwise."""
    xs, others = inputs(2, 2, 16, torch.bfloat16)
    xs[1] = torch.empty(33, dtype=torch.bfloat16)[1:].view(2, 16).copy_(xs[1])
    check(summed(buffers_of(2, 16), xs, others, rung, patience=5.0), xs, others, rung)


def test_the_last_two_rungs_round_the_same_once():
    xs, others = inputs(4, 2, 64, torch.bfloat16)
    three, four = (summed(buffers_of(4, 64), xs, others, rung)[0] for rung in ("v3_fused", "v4_push"))
    assert torch.equal(three[0], four[0])
    assert torch.equal(three[1], four[1])


def test_a_number_that_says_that_nothing_has_come_arrives_as_another_nan():
    xs, others = inputs(2, 2, 16, torch.bfloat16)
    xs[1].view(torch.int16)[0, 3:7] = -1
    for _, total in summed(buffers_of(2, 16), xs, others, "v4_push", patience=5.0):
        assert total[0].isnan().nonzero().flatten().tolist() == [3, 4, 5, 6]
        assert not total[1].isnan().any()


def test_slots_take_turns_for_ever():
    """Whatever number a counter of 32 bits has come to, the next slot is another one."""
    buffers, pushed = buffers_of(2, 16), 512 * 8 + 512
    for buffer in buffers:
        buffer[: all_reduce_header()].view(torch.int32)[pushed : pushed + 512] = -2
    for seed in range(4):
        xs, others = inputs(2, 2, 16)
        xs = [x + seed for x in xs]
        check(summed(buffers, xs, others, "v4_push", patience=5.0), xs, others, "v4_push")


@each_rung
def test_a_worker_that_does_not_come_ends_the_wait_with_an_error(rung, capfd):
    xs, others = inputs(2, 1, 16)
    with testing.raises(RuntimeError, "__trap()"):
        summed(buffers_of(2, 16), xs[:1], others, rung, patience=0.3)
    assert re.search(r"all_reduce: worker 0 has waited \d+\.\d s for worker 1\n", capfd.readouterr().out)


@each_rung
def test_workers_do_not_race(rung):
    """By the program for the race detector, which sees each worker's memory as one."""
    folders = ["", *(f"../{part}/include" for part in ("common", "step1-simple", "step2-attention", "step3-fused"))]
    own = steps.ROOT / "step4-integration"
    command = [sys.executable, "-m", "kernel_fusion", "simt", "--race", *(f"-I{own / each}" for each in folders)]
    command += [str(own / "tests" / "all_reduce_workers.cu"), rung, "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.stdout.endswith(f"{rung}, 3 workers: 0 numbers are wrong\n"), done.stdout + done.stderr


def test_arguments_that_do_not_fit_are_refused_by_their_names():
    (x, _), others = inputs(2, 1, 16)
    buffer, other = buffers_of(2, 16)
    peers = [buffer.data_ptr(), other.data_ptr()]
    good = dict(zip(("x_bias", "residual", "weight", "bias"), others, strict=True)) | {
        "x": x, "buffer": buffer, "peers": peers, "rank": 0, "rung": "v4_push",
    }  # fmt: skip
    for changed, text in (
        ({"x": x.double()}, "`x` must be float32, float16 or bfloat16, got float64"),
        ({"residual": x[:, :8]}, "`residual` must have shape (1, 16), got (1, 8)"),
        ({"bias": others[3].half()}, "`bias` must have the dtype of `x` (float32), got float16"),
        ({"buffer": buffer[:-1]}, "`buffer` must be contiguous, begin at a multiple of 16 bytes and have "),
        ({"buffer": buffer[16:]}, "`buffer` must be contiguous, begin at a multiple of 16 bytes and have "),
        ({"peers": peers * 5}, "`peers` must be from 1 to 8 addresses, got 10"),
        ({"peers": peers[::-1]}, "`peers` must have the address of `buffer` at `rank` (0)"),
        ({"rank": 2}, "`rank` must be from 0 to 1, as there are 2 `peers`, got 2"),
        ({"patience": 0.0}, "`patience` must be from 0 to 1e9 seconds, got 0"),
        ({"rung": "auto"}, "`rung` must be the name of one for tensors on the CPU"),
        ({"rung": "v5"}, "`rung` must be 'auto' or one of"),
        ({"x": torch.ones(1, 4097)}, "rows of `x` must be of 4096 at most, got 4097"),
    ):
        with testing.raises((TypeError, ValueError), f"all_reduce: {text}"):
            all_reduce(**good | changed)
    empty = all_reduce(**good | {"x": x[:0], "residual": x[:0]})
    assert [each.shape for each in empty] == [(0, 16)] * 2


def test_shapes_are_known_without_data():
    """opcheck would copy the buffer, and a copy has another address."""
    (x,), others = inputs(1, 3, 16, torch.bfloat16)
    (buffer,) = buffers_of(1, 16)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(each) for each in (x, *others, buffer)]
        for each in all_reduce(*fakes, [0], 0):
            assert (each.shape, each.dtype) == ((3, 16), torch.bfloat16)
        with testing.raises(ValueError, "all_reduce: `weight` must have shape (16,)"):
            all_reduce(*fakes[:3], fakes[1][:8], *fakes[4:], [0], 0)


def test_memory_takes_only_what_is_faster_through_it():
    memory = PeerMemory.__new__(PeerMemory)
    memory.width = 64

    def x(rows=8, width=64, dtype=torch.bfloat16, is_cuda=True, requires_grad=False):
        nbytes = rows * width * dtype.itemsize
        return types.SimpleNamespace(
            shape=(rows, width), nbytes=nbytes, dtype=dtype, is_cuda=is_cuda, requires_grad=requires_grad
        )

    assert memory.takes(x(), x())
    for other in (x(is_cuda=False), x(width=72), x(rows=8193), x(dtype=torch.float64), x(requires_grad=True)):
        assert not memory.takes(other)
    assert not memory.takes(x(), x(dtype=torch.float32))
    with torch.no_grad():
        assert memory.takes(x(requires_grad=True))
