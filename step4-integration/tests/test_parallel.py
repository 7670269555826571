"""Several workers: their steps are one worker's, whatever the strategy; what is saved goes on; failures are told.

One start of two workers on the CPU does all that step4_integration/parallel_testing.py has; each test looks at a part.
"""

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
import train_parallel
from gpt2_model import GPT2, SIZES
from model import processes
from model.all_reduce import meeting
from model.tensor_parallel import bounds, split_of
from torch._C._distributed_c10d import ErrorType
from training import parallel
from training.optimizer import optimizer_of
from training.parallel import Replicated, Sharded
from training.run import Run

from kernel_fusion import testing
from kernel_fusion.console import child_environment
from step4_integration import parallel_testing as workers

# Ten random moments, as (worker, step). The others' trainings end, and go on, with the mark `long`.
MOMENTS = random.Random(31).sample(list(itertools.product(range(2), range(12))), 10)
HANGS_S = 1800
each_kind = pytest.mark.parametrize("kind", workers.KINDS)


def torchrun(work, folder, count=2, device="cpu"):
    """Runs parallel_testing.py with so many workers. Returns torchrun's code and errors, and what each has found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "step4_integration.parallel_testing", work, str(folder), device]
    environment = child_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    found = [folder / f"{work}-{rank}.json" for rank in range(count)]
    return done.returncode, done.stderr, [json.loads(path.read_text()) for path in found if path.exists()]


@pytest.fixture
def alone():
    """This process as the only one of its group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where workers find what one worker has saved: the checkpoint `one`, of shards."""
    folder = tmp_path_factory.mktemp("workers")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        worker = Sharded(torch.device("cpu"))
        model = worker.place(workers.model_of(), Run())
        optimizer = optimizer_of(model, 1e-2)
        windows = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(0))
        for _ in range(5):
            worker.step(Run(), worker.device)(model, optimizer, [windows], 1e-2)
        worker.save(folder / "one", 5, model, optimizer, {}, keep=1, config={})
        (folder / "one.digest").write_text(workers.digest_of(model, optimizer))
    finally:
        dist.destroy_process_group()
    return folder


def kill(folder, rank, number):
    """A training of which a worker is killed: torchrun's code, the lines told, and how long it took all to end."""
    code, errors, _ = torchrun(f"killed-{rank}-{number}", folder)
    seconds = time.time() - float((folder / f"{rank} at {number}").read_text())
    return code, told_in(errors), seconds


def told_in(errors):
    return [line for line in errors.splitlines() if line.startswith("parallel_testing: ")]


def check_kills(kills, folder, rests, whole):
    """Each ended all its workers soon, with a line, and went on from its last checkpoint with the same losses."""
    for (rank, number), (code, told, seconds) in kills.items():
        assert code == 1
        assert len(told) == 1, told
        assert "--resume goes on from the last checkpoint" in told[0]
        assert seconds < 30
        expected = {str(n): whole[str(n)] for n in range(number // 3 * 3, 12)}
        assert rests[f"killed-{rank}-{number}"]["losses"] == expected


@pytest.fixture(scope="module")
def killed(folder):
    return {moment: kill(folder, *moment) for moment in MOMENTS[:2]}


@pytest.fixture(scope="module")
def found(folder, killed):
    code, errors, found = torchrun("several", folder)
    assert code == 0, errors[:4000]
    assert json.dumps(found[0]) == json.dumps(found[1])  # both workers have the same losses, tokens and errors
    return found[0]


def alone_trained(out, **options):
    return json.loads(json.dumps(workers.trained(out, **options)))


# ---- steps ----


@each_kind
def test_a_hundred_steps_of_two_workers_are_those_of_one(kind, found, tmp_path):
    one = alone_trained(tmp_path, **workers.MANY)
    two = found[f"{kind} 100 steps"]
    assert len(two["losses"]) == 100
    assert one["losses"]["99"] < one["losses"]["0"]
    for number, loss in one["losses"].items():
        assert two["losses"][number] == pytest.approx(loss, abs=1e-5), number
    assert two["held out"] == pytest.approx(one["held out"], abs=1e-5)


@each_kind
@pytest.mark.parametrize(
    ("case", "options", "allowed"),
    [
        ("packed", {"packed": True, "steps": 6}, 1e-5),
        ("bfloat16", {"dtype": "bfloat16", "recompute": True, "steps": 4}, 2e-2),
    ],
    ids=["packed", "bfloat16"],
)
def test_other_steps_of_two_workers_are_those_of_one(kind, case, options, allowed, found, tmp_path):
    """Packed parts have more or fewer tokens to predict, and count by their number over all workers."""
    one = alone_trained(tmp_path, **options)
    assert found[f"{kind} {case}"]["losses"] == {
        number: pytest.approx(loss, abs=allowed) for number, loss in one["losses"].items()
    }


def test_gradients_move_once_a_step_whatever_the_number_of_parts(found):
    parameters = sum(p.numel() for p in GPT2(workers.CONFIG).parameters())
    for parts in (1, 3):  # two blocks, the rest, and the loss
        assert found[f"ddp moves with {parts}"] == {"all_reduce": 4, "reduce_scatter": 0, "numbers": parameters + 1}
    assert [found[f"fsdp2 moves with {parts}"]["reduce_scatter"] for parts in (1, 3)] == [3, 3]  # two blocks, the rest


def test_a_block_that_is_shared_moves_two_sums_each_way(found):
    """And the embedding one, the loss's gradient one; the loss two and the norm one a step."""
    for parts in (1, 3):
        moves = found[f"tensor moves with {parts}"]
        assert moves["all_reduce"] == parts * (4 * workers.CONFIG.n_layer + 2) + 3
    assert found["without sums"]  # as the benchmark takes it


def test_gradients_summed_by_copies_are_those_summed_by_the_library(found):
    """Of two workers bit for bit: a + b is b + a."""
    assert found["sums by copies are right"]
    for parts in ("alone", "in parts"):
        assert found[f"{parts} by copies"] == found[f"{parts} by library"], parts


def test_graphs_of_workers_that_see_each_others_memory_sum_by_copies(alone, monkeypatch):
    worker = Replicated(alone)
    monkeypatch.setattr(parallel, "see_each_other", lambda *_: True)
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    for shares, graph, copies in ((2, False, False), (1, True, False), (2, True, True)):
        worker.shares = shares
        worker.place(workers.model_of(), Run(graph=graph))
        assert (worker.exchange is not None) == copies


@pytest.mark.parametrize(("count", "sums"), [(2, 4), (3, 2)])
def test_words_of_a_meeting_are_never_written_over(count, sums):
    """All orders in which so many workers can take the steps of so many sums: none waits for ever, nobody goes on
    before all have come, and all words are clear again in the end."""
    buffers = [1000 * rank for rank in range(count)]
    steps = [[each for number in (0, 1) for each in meeting(buffers, rank, number)] * sums for rank in range(count)]
    others, size = count - 1, 3 * (count - 1)  # of a meeting: it tells the others, hears from them, and clears
    first: tuple = (0,) * count, frozenset()  # where each worker is, and which words are 1
    seen, waiting = {first}, [first]
    while waiting:
        at, written = waiting.pop()
        goes_on = False
        for rank in range(count):
            if at[rank] == len(steps[rank]):
                continue
            step, place = steps[rank][at[rank]], at[rank] + 1
            waits, word = step.flags == 1, {step.address}
            if waits and not written & word:
                continue
            goes_on = True
            assert waits or not step.value or not written & word, "a word is written again before it was cleared"
            if place % size == 2 * others:  # it has heard from all
                assert min(at) > place // size * size, "somebody had not come"
            after = written if waits else written | word if step.value else written - word
            state = (*at[:rank], place, *at[rank + 1 :]), after
            if state not in seen:
                seen.add(state)
                waiting.append(state)
        assert goes_on or not written, at
        assert goes_on or all(place == len(each) for place, each in zip(at, steps, strict=True)), at


# ---- a model that is shared ----


@pytest.mark.parametrize("blocks", ["v1_torch", "v4_products"])
def test_a_shared_model_gives_the_whole_ones_logits_loss_and_gradients(blocks, found):
    whole, shared = found[f"{blocks} logits"]
    assert shared <= 2 * whole + 1e-6
    loss, exact, worst, gathered = found[f"{blocks} loss"]
    assert loss == pytest.approx(exact, abs=1e-5)
    assert worst < 1e-5
    assert gathered <= 2 * 2 * 27  # numbers: of each worker two a row, and no logits
    assert found[f"{blocks} bits"]


@pytest.mark.parametrize("blocks", ["v1_torch", "v4_products"])
def test_a_shared_model_generates_what_the_whole_one_does(blocks, found):
    greedy, drawn, shared_greedy, shared_drawn = found[f"{blocks} generated"]
    for one, other in ((greedy, shared_greedy), (drawn, shared_drawn)):
        assert one[0] == other[0]
        assert torch.tensor(one[1]) == pytest.approx(torch.tensor(other[1]), abs=1e-4)
    assert greedy[0] != drawn[0]


def test_half_blocks_end_right_through_memory_that_workers_share(found):
    """And all workers' have the same bits, as all that is found."""
    assert len(found["half blocks"]) == 3
    for error, _ in found["half blocks"].values():
        assert error < 2e-6


def test_workers_that_share_a_model_add_tokens_by_one_op(found):
    """Their sums are rounded less often than those of one that adds each product to its stream."""
    assert found["added tokens"].keys() == {"3", "1", "8", "2"}
    for rows, (error, alone, _, ends) in found["added tokens"].items():
        assert 0 < error <= 1.5 * alone
        assert ends == [6] * int(rows)


def test_texts_of_workers_that_add_tokens_by_one_op_are_the_whole_models(found):
    one, two, shared_one, shared_two, gathered = found["added texts"]
    for whole, shared in ((one, shared_one), (two, shared_two)):
        assert whole[0] == shared[0]
        assert torch.tensor(whole[1]) == pytest.approx(torch.tensor(shared[1]), abs=0.05)
    assert gathered == [1, 2]


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_shares_that_are_joined_are_the_whole_bit_for_bit(count):
    config = dataclasses.replace(workers.CONFIG, n_embd=50, n_head=25)
    for name, parameter in GPT2(config).named_parameters():
        if split := split_of(name, config):
            shares = [split.share(parameter, worker, count) for worker in range(count)]
            assert torch.equal(split.joined(shares), parameter), name


def test_what_does_not_divide_is_shared_as_equally_as_it_can_be():
    def shares(count, workers):
        return [end - begin for begin, end in itertools.pairwise(bounds(count, workers))]

    assert [shares(25, 2), shares(25, 4), shares(50257, 4)] == [[13, 12], [7, 6, 6, 6], [12565, 12564, 12564, 12564]]
    split = split_of("h.0.mlp.c_fc.weight", SIZES["gpt2-xl"])
    assert [length for worker in range(3) for _, length in split.pieces(worker, 3)] == [2136, 2136, 2128]


# ---- checkpoints ----


@each_kind
def test_workers_that_go_on_are_the_uninterrupted_ones(kind, found):
    whole, rest = found[f"{kind} whole"], found[f"{kind} rest"]
    assert rest["losses"] == {number: whole["losses"][number] for number in map(str, range(6, 12))}
    assert (rest["held out"], rest["weights"]) == (whole["held out"], whole["weights"])


def test_one_worker_goes_on_from_what_two_have_saved(found, folder, tmp_path):
    for kind in ("ddp", "tensor"):
        last = tmp_path / kind / "step-000009"
        (tmp_path / kind).mkdir()
        os.symlink(folder / kind / "step-000009", last)
        rest = alone_trained(tmp_path / kind, save_every=3, eval_every=4)
        expected = found[f"{kind} whole"]["losses"]
        assert rest["losses"] == {number: pytest.approx(expected[number], abs=1e-5) for number in ("9", "10", "11")}


def test_shards_are_read_by_another_number_of_workers_bit_for_bit(found, folder, alone):
    digest = (folder / "one.digest").read_text()
    assert found["one read by two"] == [5, digest]
    assert found["split after an evaluation"]
    worker = Sharded(alone)
    model = worker.place(workers.model_of(seed=2), Run())
    optimizer = optimizer_of(model, 1.0)
    assert worker.load(folder / "two" / "step-000005", model, optimizer) == 5
    assert workers.digest_of(model, optimizer) == digest


# ---- ops of DTensors, and compiled ----


@pytest.mark.parametrize("case", workers.SPLIT_OPS)
def test_an_op_of_parts_is_that_of_the_whole_and_gathers_nothing_without_need(case, found):
    *_, results, gradients = workers.SPLIT_OPS[case]
    error, *places = found["split"][case]
    assert error < 2e-5
    assert places == [results, gradients]


def test_what_was_found_for_other_options_is_not_taken(found):
    """DTensor remembers what it has found for tensors of these shapes."""
    assert max(found["split"][f"transposed {transposed}"] for transposed in (False, True)) < 2e-5
    assert found["split"]["kept"] == [4]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "no rule",
            "NotImplementedError: linear_cross_entropy: there is no sharding rule for it, so it takes no DTensor; ",
        ),
        (
            "dropped",
            "NotImplementedError: dropout: there is no sharding rule for it, so it takes no DTensor; pass the ",
        ),
        ("whole beside parts", "RuntimeError: step3_fused.layer_norm.default"),
    ],
    ids=["no rule", "dropped", "whole beside parts"],
)
def test_an_op_that_takes_no_parts_says_so_by_name(case, text, found):
    assert text in found["split"][case]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_compiled_steps_are_the_others(kind, found):
    expected, none = found["compile"][f"{kind} eager"]
    losses, seen = found["compile"][f"{kind} compiled"]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert not none
    assert {"step2_attention.linear", "step3_fused.attention_block", "step3_fused.mlp"} <= set(seen), seen


def test_rules_wait_until_dtensors_are_imported():
    """To import them takes as long as to import torch."""
    code = """
import sys, torch, step3_fused
assert "torch.distributed.tensor" not in sys.modules
from torch.distributed.tensor import DTensor
assert torch.ops.step3_fused.layer_norm.default in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=child_environment())


# ---- failures ----


def test_a_killed_worker_ends_all_with_a_line_and_its_steps_are_repeated(killed, found, folder):
    check_kills(killed, folder, found, found["ddp whole"]["losses"])


@pytest.mark.long
def test_workers_that_are_killed_at_more_moments(found, folder):
    kills = {moment: kill(folder, *moment) for moment in MOMENTS[2:]}
    code, errors, (rests, _) = torchrun("rest", folder)
    assert code == 0, errors[:4000]
    check_kills(kills, folder, rests, found["ddp whole"]["losses"])


@pytest.mark.parametrize(
    ("work", "device", "count"), [("hanging", "cpu", 3), ("hanging", "cuda", 2), ("hanging_graphs", "cuda", 2)]
)
def test_a_worker_that_hangs_is_named(work, device, count, folder):
    if device == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, there are {torch.cuda.device_count()}")
    code, errors, _ = torchrun(work, folder, count, device)
    assert code == 1
    (told,) = told_in(errors)
    assert "parallel_testing: worker 1 has ended or hangs; others have waited for it, so all end" in told


# Gloo's threads need Python for as long as they hold tensors: it must not be taken down.
ENDS = """
import atexit, os
import torch, torch.distributed as dist
from model.processes import process_group

class Kept:
    def __del__(self, write=os.write):
        write(2, b"taken down")

kept = Kept()
atexit.register(print, "at exit")
with process_group("ends", "cpu"):
    dist.all_reduce(torch.ones(3))
    print("in time", end=", ")
"""


def test_a_worker_on_the_cpu_ends_without_taking_python_down():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", ENDS]
    environment = child_environment(PYTHONUNBUFFERED="")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S)
    assert (done.returncode, done.stdout) == (0, "in time, at exit\n"), done.stderr
    assert "taken down" not in done.stderr


def test_what_nccls_watchdog_notes_ends_a_process(monkeypatch):
    """Here of groups that are none; with NCCL in the test above."""
    noted, told, finished = ErrorType.SUCCESS, threading.Event(), threading.Event()
    backend = types.SimpleNamespace(get_error=lambda: noted)
    group = type("Group", (), {"_get_backend": lambda self, device: backend})()
    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", {group: None})
    monkeypatch.setattr(os, "_exit", lambda code: finished.set())
    processes.end_when_stuck(torch.device("cuda"), told.set, finished)
    assert not told.wait(0.7)
    noted = ErrorType.TIMEOUT
    assert finished.wait(10)
    assert told.is_set()


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("other rate", "`rate` must be the same on all workers, is 0.01 on worker 0 and 0.02 on worker 1"),
        ("other data", "`data` must be the same on all workers, is "),
        ("odd batch", "`batch` must be a multiple of 4, `accumulate` times the workers that share it, got 6"),
        ("too many shares", "--tensor must divide 2, the number of workers, got 3"),
        ("few heads", "`n_head` must be at least 2, the workers, got 1"),
        ("shards by ddp", "is of shards: train_parallel.py --parallel fsdp2 goes on from it"),
        ("tensors by fsdp2", "is not of shards: train.py, or another --parallel, goes on from it"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(case, text, found):
    assert text in found[case]
    assert found[case].startswith("ValueError: ")


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_disk_that_is_full_for_one_worker_loses_nothing(kind, found):
    failed = found[f"full {kind}"]
    assert failed.startswith("OSError: train: the checkpoint ")
    assert "step-000006 could not be written: " in failed
    assert failed.endswith("step-000003 is whole, --resume goes on from it")
    assert ("worker 1: " in failed) == (kind == "fsdp2")
    assert [name for name in found[f"full {kind} left"] if "step" in name] == ["step-000003"]
    whole = found[f"{kind} whole"]["losses"]
    assert found[f"full {kind} rest"]["losses"] == {number: whole[number] for number in map(str, range(3, 12))}


def test_the_command_says_that_torchrun_starts_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with testing.raises(SystemExit, "train_parallel.py: it is started by torchrun: torchrun --standalone"):
        train_parallel.main([])
    monkeypatch.setenv("RANK", "0")
    with testing.raises(SystemExit, "train_parallel.py: --device must be cuda or cpu, where each worker has its own"):
        train_parallel.main(["--device", "cuda:1"])


# ---- more workers, and GPUs ----


@pytest.mark.long
def test_four_workers(folder):
    code, errors, found = torchrun("four", folder, 4)
    assert code == 0, errors[:4000]
    assert [each["heads"] for each in found] == [7, 6, 6, 6]
    assert max(each["error"] for each in found) < 1e-5
    assert all(each["sums by copies are right"] for each in found)
    one = alone_trained(folder / "one-of-four", **workers.MANY)
    for each in found:
        assert each["one read by four"] == [5, (folder / "one.digest").read_text()]
        for how in ("two by two", "by copies"):
            assert each[how]["losses"] == {n: pytest.approx(loss, abs=1e-5) for n, loss in one["losses"].items()}


@pytest.mark.parametrize("count", [2, 4])
def test_workers_on_gpus(count, folder):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, there are {torch.cuda.device_count()}")
    code, errors, found = torchrun("four" if count == 4 else "several", folder, count, "cuda")
    assert code == 0, errors[:4000]
    assert len(found) == count
    assert all(each["sums by copies are right"] for each in found)
    if count == 2:
        test_gradients_summed_by_copies_are_those_summed_by_the_library(found[0])
        for parts in ("alone", "in parts"):
            losses = found[0][f"{parts} by copies"]["losses"].items()
            assert found[0][f"{parts} by graph"]["losses"] == {n: pytest.approx(loss, abs=1e-5) for n, loss in losses}
        test_half_blocks_end_right_through_memory_that_workers_share(found[0])
        assert found[0]["half blocks"] == found[1]["half blocks"]
        test_workers_that_share_a_model_add_tokens_by_one_op(found[0])
        test_texts_of_workers_that_add_tokens_by_one_op_are_the_whole_models(found[0])
        for kind in workers.KINDS:
            launched, captured = (found[0][f"{kind} {how}"] for how in ("launched", "graph"))
            assert captured["losses"] == {n: pytest.approx(loss, abs=1e-5) for n, loss in launched["losses"].items()}
            assert captured["held out"] == pytest.approx(launched["held out"], abs=1e-5)
