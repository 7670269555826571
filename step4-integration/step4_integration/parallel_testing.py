"""What test_parallel.py has several workers do, started by torchrun; each writes what came of it as JSON.

python -m step4_integration.parallel_testing WORK FOLDER DEVICE      WORK is the name of a function here, and numbers
                                                                     for it: killed-1-7
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import resource
import signal
import sys
import time
import types
from collections.abc import Callable

import benchmark_parallel
import numpy as np
import torch
import torch.distributed as dist
import train
import train_parallel
from generate import generate
from gpt2_model import GPT2, Config
from model import tensor_parallel
from model.all_reduce import Exchange, PeerMemory, SharedBuffer
from model.processes import process_group
from model.tensor_parallel import TensorParallel
from rich.console import Console
from torch._dynamo.backends.registry import lookup_backend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from training.batches import Tokens
from training.data import Data
from training.optimizer import optimizer_of
from training.parallel import Parallel, Replicated, Sharded, whole_of
from training.run import Run
from training.step import cross_entropy as cross_entropy_of

import step1_simple
import step2_attention
import step3_fused
from kernel_fusion import testing
from step4_integration import (
    cross_entropy,
    decode_step,
    decode_step_bytes,
    decode_step_header,
    embedding,
    linear_cross_entropy,
    rungs,
)

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
    except (OSError, RuntimeError, ValueError) as error:  # of which NotImplementedError is one
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
    works = (
        same_steps, go_on, rest, shards, refuse, full_disks, moved, exchanged, share_a_model, half_blocks, add_tokens,
        split_ops, compiled,
    )  # fmt: skip
    for work in works:
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
        if device.type == "cuda":
            for name, graph in (("launched", False), ("graph", True)):
                out = folder / f"{kind}-{name}"
                options = {"device": device, "graph": graph, "eval_every": 1}
                found[f"{kind} {name}"] = trained(out, worker_of(kind, device), **options)
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
    return found


def shards(folder, device):
    """What one worker has saved of its shards, two read; and save for one to read."""
    worker = worker_of("fsdp2", device)
    model = worker.place(model_of(seed=1).to(device), Run())
    optimizer = optimizer_of(model, 1.0)
    steps = worker.load(folder / "one" / "step-000005", model, optimizer)
    found = {"one read by two": [steps, digest_of(model, optimizer)]}
    with torch.no_grad(), worker.computing(model, torch.float32):
        worker.loss(model, torch.zeros(1, 9, dtype=torch.int64, device=device))
    found["split after an evaluation"] = worker.is_split(model, "wte.weight")
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


class Exchanging(Replicated):
    """Gradients are summed by copies, on a CPU and where steps are launched one by one, too."""

    def place(self, model, run):
        model = super().place(model, run)
        self.exchange = Exchange(self.mesh.get_group("data"), self.device)
        return model


def exchanged(folder, device):
    """The same steps by copies and by the library; on GPUs in a graph, which sums by copies of itself, too."""
    found = {"sums by copies are right": sums_by_copies(device)}
    for name, options in {"alone": {"accumulate": 1, "dtype": "bfloat16"}, "in parts": {"accumulate": 2}}.items():
        ways = [("copies", Exchanging, False), ("library", Replicated, False)]
        if device.type == "cuda":
            ways.append(("graph", Replicated, True))
        for how, kind, graph in ways:
            out = folder / f"{name}-{how}"
            found[f"{name} by {how}"] = trained(out, kind(device), device=device, steps=5, graph=graph, **options)
    return found


def sums_by_copies(device) -> bool:
    """Whether sums of numbers that need all bits are right, of the same buckets three times, larger ones in pieces."""
    rank, world = dist.get_rank(), dist.get_world_size()
    exchange, right = Exchange(dist.group.WORLD, device, piece=32), True
    for turn in range(3):
        sums, exact = [], []
        for key, sizes in {"a": (5, 3), "b": (100,), "c": (1, 2, 29, 32), "d": (33, 60)}.items():
            of_all = []
            for worker in range(world):
                draw = torch.Generator().manual_seed(100 * turn + worker)
                of_all.append([torch.randn(size, generator=draw) for size in sizes])
            sums.append(exchange.begin(key, [each.to(device) for each in of_all[rank]]))
            exact.append(functools.reduce(torch.add, [torch.cat(each) for each in of_all]))
        exchange.wait()
        right = right and all(torch.equal(own.cpu(), other) for own, other in zip(sums, exact, strict=True))
    return right


@contextlib.contextmanager
def counted_calls():
    """How often workers add up and scatter, by name. PyTorch 2.13 has a new one for the latter."""
    calls = {"all_reduce": 0, "reduce_scatter": 0, "numbers": 0}  # that are added up
    names = {"all_reduce": "all_reduce"} | dict.fromkeys(
        [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)], "reduce_scatter"
    )
    before = {name: getattr(dist, name) for name in names}

    def counting(name):
        @functools.wraps(before[name])
        def call(*given, **options):
            calls[names[name]] += 1
            calls["numbers"] += given[0].numel() if names[name] == "all_reduce" else 0
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
            worker.step(Run(), device)(model, optimizer, [windows] * parts, 1e-3)
            with counted_calls() as calls:
                worker.step(Run(), device)(model, optimizer, [windows] * parts, 1e-3)
            found[f"{kind} moves with {parts}"] = calls
        if kind == "tensor":
            with benchmark_parallel.nothing_moves():
                loss = worker.step(Run(), device)(model, optimizer, [windows], 1e-3)
            found["without sums"] = loss.isfinite().item()
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
        found[f"{blocks} bits"] = all(torch.equal(parameters[name], p.cpu()) for name, p in model.named_parameters())
    return found


def half_blocks(folder, device):
    """The end of one by each rung, through memory that the workers share: how far it is from that by their group's sum,
    and its bits. On GPUs also by a graph, which is replayed."""
    memory = PeerMemory(dist.group.WORLD, 40, device)
    same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + dist.get_rank())
    x_bias, residual, weight, bias = (torch.randn(shape, generator=same).to(device) for shape in (40, (3, 40), 40, 40))
    norm = types.SimpleNamespace(weight=weight, bias=bias)
    found = {}
    for rung in rungs("all_reduce", device):
        x = torch.randn(3, 40, generator=own).to(device)
        total = x.double()
        dist.all_reduce(total)
        exact = total + x_bias.double() + residual.double()
        y, ended = memory.end(x, x_bias, residual, norm, 1e-5, rung)
        if device.type == "cuda":
            graph, (y, ended) = testing.capture(functools.partial(memory.end, x, x_bias, residual, norm, 1e-5, rung))
            for _ in range(5):
                graph.replay()
        wanted = F.layer_norm(exact, (40,), weight.double(), bias.double())
        errors = [(one.double() - other).abs().max().item() for one, other in ((ended, exact), (y, wanted))]
        found[rung] = [max(errors), torch.stack((y, ended)).tolist()]
    return {"half blocks": found}


@torch.no_grad()
def add_tokens(folder, device):
    """By `decode_step` of workers that share a model: how far logits are from float64's, that of one that has the whole
    beside it, and their bits. Rows of another number in between, and tokens of either worker."""
    config = dataclasses.replace(
        CONFIG, n_embd=40, n_inner=72, blocks="v4_products", initializer_range=0.3, scale_attn_by_inverse_layer_idx=True
    )
    model = model_of(config).to(device, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    shared = TensorParallel(model, dist.group.WORLD)
    bytes_ = decode_step_bytes(40, dist.get_world_size())
    memory = SharedBuffer(dist.group.WORLD, bytes_, decode_step_header(), device)
    words = tensor_parallel.bounds(97, dist.get_world_size())
    sharing = {"buffer": memory.buffer, "peers": memory.peers, "rank": memory.rank, "words": words}
    found = {}
    for rows in (3, 1, 8, 2):
        ids = torch.randint(97, (rows, 6), generator=torch.Generator().manual_seed(rows)).to(device)
        begin = torch.zeros(rows, dtype=torch.int32, device=device)
        ends, logits = (begin.clone(), begin.clone()), ([], [])
        models = (model, {}), (shared, sharing)
        caches = [
            torch.zeros(2, 2, rows, each.config.n_head, 8, 8, dtype=torch.bfloat16, device=device) for each, _ in models
        ]
        for token in ids.unbind(1):
            for which, (each, options) in enumerate(models):
                logits[which].append(
                    decode_step(
                        token.contiguous(), ends[which], begin, each.wte.weight, each.wpe.weight, each.step_weights(),
                        *caches[which], scale_by_layer=True, rung="v2_dependent", **options,
                    )
                )  # fmt: skip
        alone, own = torch.stack(logits[0], 1), torch.stack(logits[1], 1)
        all_of = torch.cat(tensor_parallel.gathered_as(own, 2, shared.words, dist.group.WORLD), 2)
        wanted = exact(ids)
        errors = [(each.double() - wanted).abs().max().item() for each in (all_of, alone)]
        found[rows] = [*errors, all_of.view(torch.int16).tolist(), ends[1].tolist()]
    gathered = []

    class Counting(TensorParallel):
        _step_buffer = memory  # on a CPU, too, where the emulation is not for every day

        def own_logits(self, logits):
            gathered.append(len(logits))
            return super().own_logits(logits)

    model = model_of(dataclasses.replace(config, rungs={"decode_step": "v2_dependent"})).to(device, torch.bfloat16)
    texts = []
    for each in (model, Counting(model, dist.group.WORLD)):
        for prompts in (ids[:1], [row[: 3 + i] for i, row in enumerate(ids)]):
            text, log_probs = generate(each, prompts, 7, return_log_probs=True)
            texts.append([[row.tolist() for row in text], log_probs.tolist()])
    return {"added tokens": found, "added texts": [*texts, sorted(set(gathered))]}


IDS = torch.arange(24).reshape(4, 6) % 11
QKV = ((2, 5, 7, 4),) * 3
# An op, its tensors or their shapes, where each is split: along a dimension, or not (-); then so of its results and of
# the gradients of its inputs, where + is a sum over the workers. 5 rows and 5 heads are 3 and 2.
SPLIT_OPS: dict[str, tuple[Callable, tuple, str, str, str]] = {
    "bias_gelu": (step1_simple.bias_gelu, ((5, 6, 8), (8,)), "20", "2", "20"),
    "linear by rows": (step2_attention.linear, ((5, 6, 8), (8, 8), (8,)), "0--", "0", "0++"),
    "linear by columns": (step2_attention.linear, ((5, 6, 8), (8, 8), (8,)), "-10", "2", "+10"),
    "linear by columns, transposed": (
        functools.partial(step2_attention.linear, transposed=True), ((5, 6, 8), (8, 8), (8,)), "-00", "2", "+00",
    ),
    "linear by its depth": (step2_attention.linear, ((5, 6, 8), (8, 8)), "20", "+", "20"),
    "softmax": (step2_attention.softmax, ((5, 6, 8),), "1", "1", "1"),
    "softmax, causal": (functools.partial(step2_attention.softmax, causal=True), ((5, 6, 8),), "1", "-", "-"),
    "attention by sequences": (functools.partial(step2_attention.attention, causal=True), QKV, "000", "0", "000"),
    "attention by heads": (functools.partial(step2_attention.attention, causal=True), QKV, "111", "1", "111"),
    "attention by heads, grouped": (
        step2_attention.attention, ((2, 8, 7, 4), (2, 4, 7, 4), (2, 4, 7, 4)), "111", "1", "111",
    ),
    "attention by heads, which part groups": (
        step2_attention.attention, ((2, 6, 7, 4), (2, 3, 7, 4), (2, 3, 7, 4)), "111", "-", "---",
    ),
    "layer_norm": (step3_fused.layer_norm, ((5, 6, 8), (8,), (8,)), "1--", "1", "1++"),
    "layer_norm of split rows": (step3_fused.layer_norm, ((5, 6, 8), (8,), (8,)), "2--", "-", "---"),
    "residual_layer_norm": (
        step3_fused.residual_layer_norm, ((5, 6, 8), (5, 6, 8), (8,), (8,), (8,)), "00---", "00", "00+++",
    ),
    "layer_norm_linear": (step3_fused.layer_norm_linear, ((5, 6, 8), (8,), (8,), (8, 12)), "0---", "0", "0+++"),
    "linear_gelu by rows": (step3_fused.linear_gelu, ((5, 6, 8), (8, 12), (12,)), "1--", "1", "1++"),
    "linear_gelu by columns": (step3_fused.linear_gelu, ((5, 6, 8), (8, 12), (12,)), "-10", "2", "+10"),
    "linear_gelu, nothing kept": (
        functools.partial(step3_fused.linear_gelu, keep=False), ((5, 6, 8), (8, 12), (12,)), "1--", "1", "1++",
    ),
    "gelu_linear": (step3_fused.gelu_linear, ((5, 6, 8), (8, 12)), "20", "+", "20"),
    "mlp": (step3_fused.mlp, ((5, 6, 8), (8, 12), (12,), (12, 8), (8,), (5, 6, 8)), "0----0", "0", "0++++0"),
    "attention_residual_layer_norm": (
        step3_fused.attention_residual_layer_norm, (*QKV, (2, 7, 20), (20,), (20,)), "0000--", "0", "0000++",
    ),
    "attention_block": (
        step3_fused.attention_block, (*QKV, (2, 7, 20), (20, 20), (20,), (20,), (20,)), "0000----", "00", "0000++++",
    ),
    "embedding by sequences": (embedding, (IDS, (11, 8), (9, 8)), "0--", "0", "++"),
    "embedding, another table": (embedding, (IDS, (13, 8), (9, 8)), "0--", "0", "++"),
    "embedding by columns": (embedding, (IDS, (11, 8), (9, 8)), "-11", "2", "11"),
    "cross_entropy": (cross_entropy, ((5, 11), IDS[0, :5]), "00", "00", "0"),
}  # fmt: skip


def split_ops(folder, device):
    """Ops of DTensors: how far they and their gradients are from those of whole tensors, and how they are split."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)

    def split(x, place):
        return distribute_tensor(x.detach(), mesh, [Shard(int(place)) if place.isdigit() else Replicate()])

    def unsummed(y):
        return y.redistribute(mesh, [Replicate()]) if y.placements[0].is_partial() else y

    def places(results):
        return "".join(str(p.dim) if p.is_shard() else "+" if p.is_partial() else "-" for (p,) in results)

    def with_gradients(op, inputs, grad):
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
        results = op(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        grads = torch.autograd.grad(results[0], [x for x in inputs if x.requires_grad], grad(results[0]))
        return results, grads

    found = {}
    for name, (op, given, where, _, _) in SPLIT_OPS.items():
        tensors = [x if isinstance(x, torch.Tensor) else torch.randn(x, generator=generator) for x in given]
        tensors = [x.to(device) for x in tensors]
        results, grads = with_gradients(op, [x.clone() for x in tensors], torch.cos)
        parts = [split(x, place) for x, place in zip(tensors, where, strict=True)]
        got, got_grads = with_gradients(op, parts, lambda y: torch.cos(unsummed(y)))
        pairs = zip((*results, *grads), (*got, *got_grads), strict=True)
        error = max((one - other.full_tensor()).abs().max().item() for one, other in pairs)
        found[name] = [error, *(places(each.placements for each in some) for some in (got, got_grads))]
    x, weight = split(torch.ones(4, 8), "0"), split(torch.ones(8), "-")
    whole, square = split(torch.ones(4, 8), "-"), torch.randn(8, 8, generator=generator).to(device)
    for transposed in (False, True):  # all else is the same
        y = step2_attention.linear(whole, split(square, "1"), transposed=transposed).full_tensor()
        expected = step2_attention.linear(whole.to_local(), square, transposed=transposed)
        found[f"transposed {transposed}"] = (y - expected).abs().max().item()
    step3_fused.layer_norm(x, weight, weight)
    found["kept"] = list(step3_fused.layer_norm(x, weight, weight, return_statistics=True)[1].full_tensor().shape)
    for name, refused in (
        ("no rule", lambda: linear_cross_entropy(x, x, split(IDS[0, :4], "0"))),
        ("dropped", lambda: step3_fused.residual_layer_norm(x, x, weight, weight, dropout_p=0.5)),
        ("whole beside parts", lambda: step3_fused.layer_norm(x, torch.ones(8), torch.ones(8))),
    ):
        found[name] = failure(refused)
    return {"split": found}


class Torchs(Replicated):
    """By PyTorch's DistributedDataParallel."""

    def place(self, model, run):
        class Loss(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, part):
                return cross_entropy_of(self.model, part)

        self.ddp = torch.nn.parallel.DistributedDataParallel(Loss())
        return model

    def computing(self, model, dtype):
        return contextlib.nullcontext()

    def loss(self, model, part):
        return self.ddp(part) * self.shares  # whose gradients are averages


def compiled(folder, device):
    """Two steps, compiled or not: their losses, and our ops that the compiler has seen."""
    found, config = {}, dataclasses.replace(CONFIG, n_layer=1, blocks="v4_products")
    windows = torch.randint(97, (2, 17), generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    for kind in ("ddp", "fsdp2"):
        for compiles in (False, True):
            model = model_of(config).to(device)
            worker = Torchs(device) if kind == "ddp" else worker_of(kind, device)
            model = worker.place(model, Run())
            seen: set[str] = set()

            def note(graph, inputs, seen=seen):
                seen |= {str(node.target) for node in graph.graph.nodes if "step" in str(node.target)}
                return lookup_backend("aot_eager")(graph, inputs)

            for module in ([worker.ddp] if kind == "ddp" else model.h) if compiles else ():
                module.compile(backend=note)
            optimizer = optimizer_of(model, 1e-2)
            losses = [worker.step(Run(), device)(model, optimizer, [windows], 1e-2).item() for _ in range(2)]
            found[f"{kind} {'compiled' if compiles else 'eager'}"] = [losses, sorted(seen)]
    return {"compile": found}


def killed(folder: pathlib.Path, device: torch.device, rank: int, number: int) -> dict:
    """A worker is killed before a step; there is a checkpoint after each third."""

    class Dying(Replicated):
        def step(self, run, device):
            take, numbers = super().step(run, device), itertools.count()

            def counted(*given, **options):
                if next(numbers) == number and self.rank == rank:
                    (folder / f"{rank} at {number}").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)
                return take(*given, **options)

            return counted

    out = folder / f"killed-{rank}-{number}"
    return {"killed": trained(out, Dying(device), device=device, save_every=3)}


def rest(folder: pathlib.Path, device: torch.device) -> dict:
    """All trainings that were killed go on."""
    outs = sorted(folder.glob("killed-?-*/"))
    return {out.name: trained(out, worker_of("ddp", device), device=device, save_every=3) for out in outs}


def hanging(folder: pathlib.Path, device: torch.device) -> dict:
    """Worker 1 does not come to the second sum."""
    for _ in range(2):
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        total.item()
        if dist.get_rank() == 1:
            time.sleep(300)
    return {}


def hanging_graphs(folder: pathlib.Path, device: torch.device) -> dict:
    """Worker 1 does not come to a step that is a graph."""

    class Hanging(Replicated):
        def step(self, run, device):
            take, numbers = super().step(run, device), itertools.count()

            def taken(*given, **options):
                if next(numbers) == 6 and self.rank == 1:
                    time.sleep(300)
                return take(*given, **options)

            return taken

    return trained(folder / "hanging", Hanging(device), device=device, graph=True)


def four(folder: pathlib.Path, device: torch.device) -> dict:
    """25 heads over four workers, and two groups of two."""
    config = dataclasses.replace(CONFIG, n_embd=50, n_head=25)
    model = model_of(config).to(device)
    shared = TensorParallel(model, dist.group.WORLD)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        error = (shared(ids) - model(ids)).abs().max().item()
    together = trained(folder / "two-by-two", Replicated(device, 2), device=device, **MANY)
    by_copies = trained(folder / "two-by-copies", Exchanging(device, 2), device=device, **MANY)
    worker = worker_of("fsdp2", device)
    placed = worker.place(model_of(seed=1).to(device), Run())
    optimizer = optimizer_of(placed, 1.0)
    steps = worker.load(folder / "one" / "step-000005", placed, optimizer)
    return {
        "error": error, "heads": shared.config.n_head, "two by two": together, "by copies": by_copies,
        "sums by copies are right": sums_by_copies(device),
        "one read by four": [steps, digest_of(placed, optimizer)],
    }  # fmt: skip


def main(work: str, folder: pathlib.Path, kind: str) -> None:
    torch.set_num_threads(1)
    timeout = (20 if kind == "cuda" else 3) if work.startswith("hanging") else 1800
    name, *numbers = work.split("-")
    with process_group("parallel_testing", kind, timeout=timeout, hint=train_parallel.HINT) as device:
        found = globals()[name](folder, device, *map(int, numbers))
        (folder / f"{work}-{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3])
