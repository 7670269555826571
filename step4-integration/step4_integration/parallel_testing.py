"""What test_parallel.py has several workers do, started by torchrun; each writes what came of it as JSON.

python -m step4_integration.parallel_testing WORK FOLDER DEVICE      WORK is the name of a function here
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import resource
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist
import train
import train_parallel
from generate import generate
from gpt2_model import GPT2, Config
from model import tensor_parallel
from model.processes import process_group
from model.tensor_parallel import TensorParallel
from rich.console import Console
from training.batches import Tokens
from training.data import Data
from training.optimizer import optimizer_of
from training.parallel import Parallel, Replicated, Sharded, whole_of
from training.run import Run

# Five heads, 97 tokens and nine times eight columns: two workers cannot share them equally.
CONFIG = Config(
    vocab_size=97, n_positions=16, n_embd=20, n_inner=72, n_layer=2, n_head=5, initializer_range=0.1,
    blocks="v2_separate",
)  # fmt: skip
KINDS = ("ddp", "fsdp2", "tensor")
MANY = {"steps": 100, "rate": 1e-3, "batch": 4, "accumulate": 1}


def data(seed: int = 0) -> Data:
    tokens = np.random.default_rng(seed).integers(0, 97, 6000).astype(np.uint16)
    return Data(*(Tokens([part], [name], end_of_text=7) for name, part in (("a", tokens[:-300]), ("b", tokens[-300:]))))


def worker_of(kind: str, device: torch.device) -> Parallel:
    return Sharded(device) if kind == "fsdp2" else Replicated(device, dist.get_world_size() if kind == "tensor" else 1)


def trained(out: pathlib.Path, worker: Parallel | None = None, stop: int | None = None, device="cpu", **options):
    """The losses of the steps, the last held-out loss, and the final weights. `stop`: a step after which it ends."""
    losses = {}

    def note(number, loss):
        losses[number] = loss.item()
        if number == stop:
            raise KeyboardInterrupt

    options = {"steps": 12, "batch": 8, "accumulate": 2, "rate": 1e-2, "config": CONFIG, "data": data()} | options
    try:
        result = train.train(
            Console(quiet=True), out=out, worker=worker, on_loss=note, device=str(device), resume=True, **options
        )
    except KeyboardInterrupt:
        return None
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    return {"losses": losses, "held out": result.loss, "weights": digest}


def failure(work) -> str:
    try:
        work()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def with_a_limit(limit: int, work):
    """Where no file may become longer than `limit` bytes: as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def model_of(config: Config = CONFIG, seed: int = 0) -> GPT2:
    """Biases and LayerNorms are random too: at 0 and 1 they would hide mistakes."""
    torch.manual_seed(seed)
    model = GPT2(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


# ---- what workers do ----


def several(folder: pathlib.Path, device: torch.device) -> dict:
    found = {}
    for work in (same_steps, go_on, shards, refuse, full_disks, moved, share_a_model):
        found |= work(folder, device)
    return found


def same_steps(folder, device):
    found = {}
    for kind in KINDS:
        found[f"{kind} 100 steps"] = trained(folder / f"{kind}-100", worker_of(kind, device), device=device, **MANY)
        found[f"{kind} packed"] = trained(
            folder / f"{kind}-packed", worker_of(kind, device), device=device, packed=True, steps=6
        )
        found[f"{kind} bfloat16"] = trained(
            folder / f"{kind}-half", worker_of(kind, device), device=device, dtype="bfloat16", recompute=True, steps=4
        )
    return found


def go_on(folder, device):
    """Stopped after step 7 of 12, with a checkpoint after 3 and 6."""
    found = {}
    for kind in KINDS:
        options = {"device": device, "save_every": 3, "eval_every": 4}
        found[f"{kind} whole"] = trained(folder / f"{kind}-whole", worker_of(kind, device), **options)
        trained(folder / kind, worker_of(kind, device), 7, **options)
        dist.barrier()
        found[f"{kind} rest"] = trained(folder / kind, worker_of(kind, device), **options)
    found["killed rest"] = trained(folder / "killed", worker_of("ddp", device), device=device, save_every=3)
    return found


def shards(folder, device):
    """What one worker has saved of its shards, two read; and save for one to read."""
    worker = worker_of("fsdp2", device)
    model = worker.place(model_of(seed=1).to(device), Run())
    optimizer = optimizer_of(model, 1.0)
    steps = worker.load(folder / "one" / "step-000005", model, optimizer)
    found = {"one read by two": [steps, digest_of(model, optimizer)]}
    worker.save(folder / "two", steps, model, optimizer, {}, keep=1, config={})
    return found


def digest_of(model, optimizer) -> str:
    """Of all bits of parameters and moments."""
    found = hashlib.sha256()
    for name, value in Sharded.state(model, optimizer).items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(name.encode() + whole.cpu().numpy().tobytes())
    return found.hexdigest()


def refuse(folder, device):
    rank, worker = dist.get_rank(), worker_of("ddp", device)
    train_here = functools.partial(trained, folder / "refused", worker, device=device)
    return {
        "other rate": failure(lambda: train_here(rate=0.01 * (1 + rank))),
        "other data": failure(lambda: train_here(data=data(rank))),
        "odd batch": failure(lambda: train_here(batch=6)),
        "graph": failure(lambda: train_here(graph=True)),
        "too many shares": failure(lambda: Replicated(device, 3)),
        "few heads": failure(lambda: TensorParallel(GPT2(dataclasses.replace(CONFIG, n_head=1)), dist.group.WORLD)),
        "shards by ddp": failure(lambda: worker.load(folder / "two" / "step-000005", None, None)),
        "tensors by fsdp2": failure(lambda: Sharded(device).load(folder / "ddp" / "step-000012", None, None)),
    }


def full_disks(folder, device):
    """Worker 1's disk is full when it writes its shard; with tensors it is worker 0 that writes."""
    found = {}
    for kind, full in (("fsdp2", 1), ("ddp", 0)):
        out = folder / f"full-{kind}"
        options = {"device": device, "save_every": 3, "keep": 2}
        trained(out, worker_of(kind, device), 4, **options)
        dist.barrier()
        train_on = functools.partial(trained, out, worker_of(kind, device), **options)
        limited = functools.partial(with_a_limit, 4000, train_on) if dist.get_rank() == full else train_on
        found[f"full {kind}"] = failure(limited)
        found[f"full {kind} left"] = names(out)
        dist.barrier()
        found[f"full {kind} rest"] = trained(out, worker_of(kind, device), **options)
    return found


@contextlib.contextmanager
def counted_calls():
    """How often workers add up and scatter, by name. PyTorch 2.13 has a new one for the latter."""
    calls = {"all_reduce": 0, "reduce_scatter": 0}
    names = {"all_reduce": "all_reduce"} | dict.fromkeys(
        [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)], "reduce_scatter"
    )
    before = {name: getattr(dist, name) for name in names}

    def counting(name):
        @functools.wraps(before[name])
        def call(*given, **options):
            calls[names[name]] += 1
            return before[name](*given, **options)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name in names:
            setattr(dist, name, before[name])


def moved(folder, device):
    """What a step with so many parts moves between workers: calls by name."""
    found = {}
    for kind in KINDS:
        for parts in (1, 3):
            worker = worker_of(kind, device)
            model = worker.place(model_of().to(device), Run())
            optimizer = optimizer_of(model, 1e-3)
            windows = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
            buckets = []
            if kind == "ddp":

                def count(state, bucket):
                    state.append(bucket.buffer().numel())
                    return (
                        dist.all_reduce(bucket.buffer().div_(2), async_op=True)
                        .get_future()
                        .then(lambda f: f.value()[0])
                    )

                worker.ddp.register_comm_hook(buckets, count)
            worker.step(Run(), device)(model, optimizer, [windows] * parts, 1e-3)
            buckets.clear()
            with counted_calls() as calls:
                worker.step(Run(), device)(model, optimizer, [windows] * parts, 1e-3)
            found[f"{kind} moves with {parts}"] = calls | {"buckets": len(buckets), "numbers": sum(buckets)}
    return found


def share_a_model(folder, device):
    found = {}
    ids = torch.randint(97, (3, 9), generator=torch.Generator().manual_seed(0)).to(device)
    targets = ids.roll(-1, 1)
    targets[0, :4] = -100
    sizes = []
    gather = tensor_parallel.all_gather

    def spy(into, x, **options):
        sizes.append(into.numel())
        return gather(into, x, **options)

    for blocks in ("v1_torch", "v4_products"):
        model = model_of(dataclasses.replace(CONFIG, blocks=blocks)).to(device)
        exact = model_of(dataclasses.replace(CONFIG, blocks="v1_torch")).to(device).double()
        shared = TensorParallel(model, dist.group.WORLD)
        with torch.no_grad():
            reference = exact(ids)
            found[f"{blocks} logits"] = [(each(ids) - reference).abs().max().item() for each in (model, shared)]
        tensor_parallel.all_gather = spy
        tensor_parallel.CHUNK_BYTES = 4 * 50 * 10  # of three chunks
        sizes.clear()
        loss = shared.loss(ids, targets)
        loss.backward()
        tensor_parallel.all_gather = gather
        whole = exact.loss(ids, targets)
        whole.backward()
        worst = 0.0
        for name, parameter in exact.named_parameters():
            share = shared.share(name, parameter.grad)
            worst = max(worst, ((shared.get_parameter(name).grad - share).norm() / parameter.grad.norm()).item())
        found[f"{blocks} loss"] = [loss.item(), whole.item(), worst, max(sizes)]
        generated = []
        for each in (model, shared):
            for options in ({}, {"temperature": 1.0, "top_k": 20, "seed": 3}):
                texts, log_probs = generate(
                    each, [row[: 5 + i] for i, row in enumerate(ids)], 8, return_log_probs=True, **options
                )
                generated.append([[text.tolist() for text in texts], log_probs.tolist()])
        found[f"{blocks} generated"] = generated
        _, parameters = whole_of(shared, keep=True)
        found[f"{blocks} bits"] = all(torch.equal(parameters[name], p) for name, p in model.named_parameters())
    return found


def killed(folder: pathlib.Path, device: torch.device) -> dict:
    """Worker 1 is killed in step 7; there is a checkpoint after 6."""

    class Dying(Replicated):
        def step(self, run, device):
            take, taken = super().step(run, device), []

            def counted(*given, **options):
                taken.append(1)
                if len(taken) == 8 and self.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return take(*given, **options)

            return counted

    return {"killed": trained(folder / "killed", Dying(device), device=device, save_every=3)}


def four(folder: pathlib.Path, device: torch.device) -> dict:
    """25 heads over four workers, and two groups of two."""
    config = dataclasses.replace(CONFIG, n_embd=50, n_head=25)
    model = model_of(config).to(device)
    shared = TensorParallel(model, dist.group.WORLD)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        error = (shared(ids) - model(ids)).abs().max().item()
    together = trained(folder / "two-by-two", Replicated(device, 2), device=device, **MANY)
    worker = worker_of("fsdp2", device)
    placed = worker.place(model_of(seed=1).to(device), Run())
    optimizer = optimizer_of(placed, 1.0)
    steps = worker.load(folder / "one" / "step-000005", placed, optimizer)
    return {
        "error": error, "heads": shared.config.n_head, "two by two": together,
        "one read by four": [steps, digest_of(placed, optimizer)],
    }  # fmt: skip


def main(work: str, folder: pathlib.Path, kind: str) -> None:
    torch.set_num_threads(1)
    with process_group("parallel_testing", kind, hint=train_parallel.HINT) as device:
        found = globals()[work](folder, device)
        (folder / f"{work}-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])
