"""decode_step of several workers that share a model: threads here, whose buffers lie in one memory. test_parallel.py
has processes, and GPUs."""

import re

import pytest
import torch
from gpt2_model import GPT2, Config
from model.tensor_parallel import bounds, split_of
from torch._subclasses import FakeTensorMode

from kernel_fusion import testing
from step4_integration import decode_step, decode_step_bytes, decode_step_header
from step4_integration.testing import by_threads

RUNG = "v2_dependent"
SIZES = {"vocab_size": 53, "n_positions": 8, "n_embd": 40, "n_inner": 72, "n_layer": 2, "n_head": 5}


@pytest.fixture(autouse=True)
def patient_watchdog(monkeypatch):
    """The emulation's calls a wait for another launch endless when nothing moves for half a second."""
    monkeypatch.setenv("KF_SIMT_SPIN_SECONDS", "60")


def model_of(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = GPT2(Config(**SIZES, initializer_range=0.3)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return model.to(dtype)


class Worker:
    """The share of one of so many workers."""

    def __init__(self, model, rank, workers, rows):
        def share(name):
            split, whole = split_of(name, model.config), model.get_parameter(name)
            return whole if split is None else split.share(whole, rank, workers)

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.weights = [share(names[id(weight)]) for weight in model.step_weights()]
        self.tables = share("wte.weight"), model.wpe.weight
        heads = bounds(model.config.n_head, workers)
        caches = torch.full((2, 2, rows, heads[rank + 1] - heads[rank], 8, 8), torch.nan, dtype=model.wte.weight.dtype)
        self.k_cache, self.v_cache = caches
        self.begin, self.end = torch.zeros(2, rows, dtype=torch.int32)
        self.buffer = torch.full((decode_step_bytes(model.config.n_embd, workers),), 255, dtype=torch.uint8)
        self.buffer[: decode_step_header()] = 0
        self.rank, self.words = rank, bounds(model.config.vocab_size, workers)
        self.peers = []

    def arguments(self, ids):
        return {
            "ids": ids, "end": self.end, "begin": self.begin, "weights": self.weights, "token_weight": self.tables[0],
            "position_weight": self.tables[1], "k_cache": self.k_cache, "v_cache": self.v_cache, "rung": RUNG,
            "buffer": self.buffer, "peers": self.peers, "rank": self.rank, "words": self.words,
        }  # fmt: skip


def workers_of(model, count, rows):
    workers = [Worker(model, rank, count, rows) for rank in range(count)]
    for worker in workers:
        worker.peers = [other.buffer.data_ptr() for other in workers]
    return workers


def all_logits(workers, ids, **options):
    """All tokens' logits, which the workers have together."""
    found = by_threads(
        lambda rank: torch.stack([decode_step(**workers[rank].arguments(each) | options) for each in ids], 1),
        len(workers),
    )
    return torch.cat(found, 2)


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:1"])
@pytest.mark.parametrize(("count", "rows"), [(1, 2), (2, 2), (3, 2), (5, 2), (2, 1), (5, 1)])
def test_workers_add_tokens_as_one_does(count, rows, schedule, monkeypatch):
    """5 heads, 9 times 8 columns and 53 tokens, uneven shares; more tokens than there are slots."""
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    model = model_of()
    ids = torch.randint(53, (4, rows), generator=torch.Generator().manual_seed(count))
    found = all_logits(workers_of(model, count, rows), ids)
    exact = model_of().double()(ids.T)
    error = (found.double() - exact).abs().max()
    (alone,) = workers_of(model, 1, rows)
    alone.peers, alone.words = [], []
    whole = torch.stack([decode_step(**alone.arguments(each) | {"buffer": None}) for each in ids], 1)
    assert error <= 1.2 * (whole.double() - exact).abs().max()


def test_rows_of_another_number_come_in_between():
    """Eight rows leave more in a slot than one row would clear, and who is early would find it."""
    model, found = model_of(), []
    eight, one = workers_of(model, 2, 8), workers_of(model, 2, 1)
    for worker, other in zip(eight, one, strict=True):
        other.buffer, other.peers = worker.buffer, worker.peers
    ids = torch.arange(8) % 53
    for _ in range(3):
        found.append(all_logits(eight, [ids]))
        all_logits(one, [ids[:1]])
        for worker in eight:  # three slots of a part [32, 40] of each worker
            there = worker.buffer[decode_step_header() :].view(torch.int32).view(3, 2, 32, 40) != -1
            assert [slot.any(-1).nonzero().tolist() for slot in there].count([[0, 0], [1, 0]]) == 1
            assert there.sum() == 2 * 40
    (alone,) = workers_of(model, 1, 8)
    alone.peers, alone.words = [], []
    for each in found:
        whole = decode_step(**alone.arguments(ids) | {"buffer": None})
        assert (each[:, 0].float() - whole.float()).abs().max() <= 0.05


def test_a_worker_that_does_not_come_ends_the_wait_with_an_error(capfd):
    workers = workers_of(model_of(), 2, 1)  # the other one's buffer is there
    with testing.raises(RuntimeError, "__trap()"):
        all_logits(workers[:1], torch.ones(1, 1, dtype=torch.int64), patience=0.3)
    assert re.search(r"decode_step: worker 0 has waited \d+\.\d s for worker 1\n", capfd.readouterr().out)


def test_arguments_that_do_not_fit_are_refused_by_their_names():
    worker = workers_of(model_of(), 2, 1)[0]
    good, buffer, peers = worker.arguments(torch.ones(1, dtype=torch.int64)), worker.buffer, worker.peers
    for changed, text in (
        ({"peers": peers * 5}, "`peers` must be at most 8 addresses, got 10"),
        ({"rank": 2}, "`rank` must be from 0 to 1, as there are 2 `peers`, got 2"),
        ({"buffer": None}, "`buffer` must be given where `peers` are"),
        ({"buffer": buffer.int()}, "`buffer` must be uint8, got int32"),
        ({"buffer": buffer[16:]}, "`buffer` must be contiguous, begin at a multiple of 16 bytes and have "),
        ({"peers": peers[::-1]}, "`peers` must have the address of `buffer` at `rank` (0)"),
        ({"words": [0, 53]}, "`words` must be where each worker's tokens begin, and where the last one's end; "),
        ({"words": [0, 26, 53]}, "the 27 rows of `token_weight`, got [0, 26, 53]"),
        ({"patience": 0.0}, "`patience` must be from 0 to 1e9 seconds, got 0"),
        ({"ids": torch.tensor([53])}, "`ids` must be from 0 to 52, "),
        ({"rung": "auto"}, "`rung` must be the name of one for tensors on the CPU where `peers` are given"),
        ({"rung": "v1_launches"}, "rung 'v1_launches' takes a whole model; `peers` are of workers that share one"),
        ({"rung": "v3_persistent"}, "rung 'v3_persistent' takes a whole model; `peers` are of workers that share one"),
        ({"peers": []}, "`peers` must be given where `buffer` is"),
        ({"peers": [], "words": [], "buffer": None}, "`k_cache` must have heads of 40 columns together"),
        ({"logits": buffer[:54].view(torch.bfloat16).view(1, 27)}, "`buffer` must not share memory with `logits`"),
    ):
        op = decode_step
        if "logits" in changed:
            op = torch.ops.step4_integration.decode_step.out
        with testing.raises((TypeError, ValueError), text):
            op(**good | changed)


def test_shapes_are_known_without_data():
    worker = workers_of(model_of(), 2, 3)[1]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        given = worker.arguments(torch.ones(3, dtype=torch.int64))
        fakes = {name: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for name, v in given.items()}
        fakes["weights"] = [mode.from_tensor(weight) for weight in worker.weights]
        assert decode_step(**fakes).shape == (3, 26)
        with testing.raises(ValueError, "decode_step: `weights[2]` must have shape (40, 48)"):
            decode_step(**fakes | {"weights": [fakes["weights"][0]] * 26})
