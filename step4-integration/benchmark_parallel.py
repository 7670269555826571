"""Several GPUs: a training step by each strategy, and tokens by workers that share a model, beside one GPU alone.

torchrun --standalone --nproc-per-node 4 benchmark_parallel.py                also writes results/<gpu>-parallel-x4.json
torchrun --standalone --nproc-per-node 2 benchmark_parallel.py --sizes cpu    tiny models, to see that it runs

train: forward, backward and AdamW under bfloat16, `batch` rows of `tokens` a GPU (weak scaling), so with tensor
parallelism, whose workers have the same rows, of all together. Beside it one GPU does a worker's rows alone, or, with
tensor parallelism, the same workers leave their sums out: what a step takes more than that is communication that
computing does not hide.
decode: `new` tokens after a prompt, one text, in bfloat16.
all_reduce: the end of a half block of so many rows, in bfloat16; on GPUs 20 of them in a CUDA graph, each waiting for
the one before. "NCCL" is torch.distributed's sum and step 3's residual_layer_norm, "torch one_shot" and "two_shot"
the sums of torch's symmetric memory and the same LayerNorm.

"v1_torch" is plain PyTorch under the same strategy, "compiled" the same with each block under torch.compile, "graph"
the whole step as one CUDA graph.
Embedding, the first LayerNorm and the loss are this project's in all of them.
"""

# ruff: noqa: E402  arguments are read first, so that --help needs no build
import argparse
import pathlib


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Times training and generation by the workers that torchrun starts.")
    parser.add_argument("--sizes", choices=("cpu", "full"), help="default: full on GPUs, else cpu")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases alone, such as ddp or tensor/gpt2-xl")
    parser.add_argument("--no-peers", action="store_true", help="ours only")
    parser.add_argument("--output", type=pathlib.Path, help="write here (default: on GPUs all cases, in results/)")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()

import contextlib
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import gpt2_model
import torch
import torch.distributed as dist
from generate import generate
from gpt2_model import GPT2, Config
from model.all_reduce import PeerMemory
from model.blocks import FORMS
from model.processes import process_group
from model.runner import forget
from model.tensor_parallel import TensorParallel
from rich.console import Console
from rich.table import Table
from training.optimizer import optimizer_of
from training.parallel import Parallel, Replicated, Sharded
from training.progress import PEAK, flops_of_token
from training.run import Run
from training.worker import Worker

from kernel_fusion import testing  # not installed? pip install -e ..
from kernel_fusion.bench import results_file
from kernel_fusion.console import byte_count, make_console, milliseconds
from kernel_fusion.report import results
from step3_fused import residual_layer_norm
from step4_integration import rungs

GRAPH, COMPILED, APART = " graph", " compiled", " without sums"  # behind a form's name


class Case(NamedTuple):
    what: str  # a strategy, or "decode"
    model: str
    batch: int
    tokens: int
    new: int = 0

    @property
    def op(self) -> str:
        if self.what == "all_reduce":
            return self.what
        return "gpt2_decode_tensor" if self.what == "decode" else f"gpt2_train_{self.what}"


TINY = Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4)
CASES = {
    "cpu": [Case(kind, "tiny", 2, 32) for kind in ("ddp", "fsdp2", "tensor")]
    + [Case("decode", "tiny", 1, 32, 8)]
    + [Case("all_reduce", "tiny", 1, 4)],
    "full": [
        Case("ddp", "gpt2", 16, 1024),
        Case("fsdp2", "gpt2", 16, 1024),
        Case("tensor", "gpt2", 16, 1024),
        Case("fsdp2", "gpt2-xl", 4, 1024),
        Case("decode", "gpt2-xl", 1, 512, 64),
        *(Case("all_reduce", "gpt2-xl", 1, rows) for rows in (1, 5, 20, 80, 327, 1310, 5243, 20972)),
    ],
}
REPEATS, ROUNDS = 5, 5


def model_of(name: str, impl: str, device: torch.device, dtype: torch.dtype = torch.float32) -> GPT2:
    """Random weights, the same on all workers."""
    config = TINY if name == "tiny" else gpt2_model.SIZES[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT2(dataclasses.replace(config, blocks=impl.split()[0])).to(dtype)
    if COMPILED in impl:
        block = torch.compile(FORMS["v1_torch"], dynamic=False)
        model.form = lambda: block
    return model


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def timed(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Milliseconds of a call, as the last of the workers has them, a round each."""
    for _ in range(3):
        work()
    found = []
    for _ in range(ROUNDS):
        wait(device)
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent = torch.tensor((time.perf_counter() - began) * 1e3 / repeats, device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        found.append(spent.item())
    return found


@contextlib.contextmanager
def nothing_moves() -> Iterator[None]:
    """In it sums over workers are left out; the numbers are wrong, and as many."""
    before = dist.all_reduce
    dist.all_reduce = lambda *given, **options: None
    try:
        yield
    finally:
        dist.all_reduce = before


def row_of(case: Case, impl: str, gpus: int, times: list[float], flops: int, moved: int, **others) -> dict:
    config = TINY if case.model == "tiny" else gpt2_model.SIZES[case.model]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT2(config).parameters())
    shape = {"parameters": parameters, "gpus": gpus, "batch": case.batch, "tokens": case.tokens}
    quartiles = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "op": case.op,
        "pass": "forward" if case.new else "backward",
        "shape": shape | ({"new": case.new} if case.new else {}),
        "dtype": "bfloat16",
        "impl": impl,
        "ms": results.rounded(statistics.median(times)),
        "ms_quartiles": [results.rounded(quartiles[0]), results.rounded(quartiles[2])],
        "bound": "memory" if case.new else "arithmetic",
        "bytes": moved,
        "flops": flops,
    } | others


def train_rows(case: Case, impls: list[str], device: torch.device) -> Iterator[dict]:
    """A row for each implementation by all workers, and one for it alone."""
    world = dist.get_world_size()
    for impl in impls:
        run = Run(batch=case.batch * world, dtype="bfloat16", graph=impl.endswith(GRAPH))
        for alone in (True, False):
            worker: Parallel = (
                Sharded(device) if case.what == "fsdp2" else Replicated(device, world if case.what == "tensor" else 1)
            )
            model = model_of(case.model, impl, device)
            a_token = flops_of_token(model, case.tokens)
            parameters = sum(p.numel() for p in model.parameters())
            vocab = model.config.vocab_size
            shared = case.what == "tensor"
            if shared or not alone:
                model = worker.place(model, run)
            optimizer = optimizer_of(model, 1e-4, in_a_graph=run.graph)
            take = (worker if shared or not alone else Worker()).step(run, device)
            draw = torch.Generator().manual_seed(worker.share)
            windows = torch.randint(vocab, (case.batch, case.tokens + 1), generator=draw).to(device)

            def work(model=model, optimizer=optimizer, take=take, windows=windows):
                return take(model, optimizer, [windows], 1e-4, dtype=torch.bfloat16)

            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if alone and shared:
                work()
                with nothing_moves():
                    times = timed_without(work, device)
            else:
                times = timed(work, device)
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            tokens = case.batch * case.tokens * (1 if alone or shared else world)
            gpus = 1 if alone and not shared else world
            name = impl + APART if alone and shared else impl
            yield row_of(case, name, gpus, times, tokens * a_token, 6 * parameters, peak_bytes=results.rounded(peak))
            del model, optimizer, work, worker, take
            clear(device)


def timed_without(work: Callable[[], object], device: torch.device) -> list[float]:
    """As `timed`, of this worker alone."""
    found = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(REPEATS):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1e3 / REPEATS)
    return found


def decode_rows(case: Case, impls: list[str], device: torch.device) -> Iterator[dict]:
    world = dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for impl in impls:
        for alone in (True, False):
            model = model_of(case.model, impl, device, dtype)
            parameters = sum(p.numel() for p in model.parameters())
            ids = torch.randint(model.config.vocab_size, (case.batch, case.tokens), generator=torch.Generator())
            ids = ids.to(device)
            if not alone:
                model = TensorParallel(model, dist.group.WORLD)
            times = timed(lambda model=model, ids=ids: generate(model, ids, case.new), device, 1)
            yield row_of(case, impl, 1 if alone else world, times, 2 * parameters * case.new, 2 * parameters * case.new)
            forget(model)
            del model
            clear(device)


def all_reduce_rows(case: Case, impls: list[str], device: torch.device) -> Iterator[dict]:
    """A row for each rung, and with peers for the same by NCCL, or gloo, and by torch's symmetric memory."""
    width = TINY.n_embd if case.model == "tiny" else gpt2_model.SIZES[case.model].n_embd
    dtype, group = torch.bfloat16 if device.type == "cuda" else torch.float32, dist.group.WORLD
    x, residual = torch.zeros(2, case.tokens, width, dtype=dtype, device=device)
    norm = torch.nn.LayerNorm(width, dtype=dtype, device=device).requires_grad_(False)
    memory = PeerMemory(group, width, device)

    def after(total: torch.Tensor):
        return residual_layer_norm(total, residual, norm.weight, norm.bias, norm.bias)

    def nccl():
        dist.all_reduce(x)
        return after(x)

    works: dict[str, Callable[[], object]] = {
        rung: functools.partial(memory.end, x, norm.bias, residual, norm, 1e-5, rung)
        for rung in rungs("all_reduce", device)
    }
    if len(impls) > 1:
        works = {"NCCL": nccl} | works
    if len(impls) > 1 and device.type == "cuda":
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(x.shape, dtype=dtype, device=device).zero_()
        symmetric.rendezvous(own, group)
        sums = torch.ops.symm_mem
        works["torch one_shot"] = lambda: after(sums.one_shot_all_reduce(own, "sum", group.group_name))
        works["torch two_shot"] = lambda: after(sums.two_shot_all_reduce_(own, "sum", group.group_name))
    calls = 20 if device.type == "cuda" else 1
    for impl, work in works.items():
        run = work
        if device.type == "cuda":
            graph, _ = testing.capture(lambda work=work: [work() for _ in range(calls)])
            run = graph.replay
        times = [each / calls for each in timed(run, device)]
        shape = {"rows": case.tokens, "width": width, "gpus": dist.get_world_size()}
        quartiles = [results.rounded(each) for each in statistics.quantiles(times, n=4, method="inclusive")[::2]]
        yield {
            "op": case.op, "pass": "forward", "shape": shape, "dtype": str(dtype).removeprefix("torch."), "impl": impl,
            "ms": results.rounded(statistics.median(times)), "ms_quartiles": quartiles, "bound": "memory",
            "bytes": x.nbytes * 5, "flops": 0,
        }  # fmt: skip


def clear(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()


def table_of(case: Case, rows: list[dict]) -> Table:
    table = Table(title=f"{case.op}: {case.model}, {case.batch} × {case.tokens}", title_justify="left")
    table.add_column("implementation")
    if case.what == "all_reduce":
        table.add_column("time", justify="right")
        for row in rows:
            table.add_row(row["impl"], milliseconds(row["ms"]))
        return table
    for column in ("GPUs", "time", "tokens/s", "MFU", "over alone", "peak memory"):
        table.add_column(column, justify="right")
    alone = {
        row["impl"].removesuffix(APART): row["ms"]
        for row in rows
        if row["shape"]["gpus"] == 1 or row["impl"].endswith(APART)
    }
    for row in rows:
        gpus = row["shape"]["gpus"]
        tokens = case.new or case.batch * case.tokens * (1 if case.what == "tensor" else gpus)
        mfu = f"{row['flops'] / row['ms'] * 1e3 / (PEAK * gpus):.1%}" if not case.new else ""
        cells = [row["impl"], str(gpus), milliseconds(row["ms"]), f"{tokens / row['ms'] * 1e3:,.0f}", mfu]
        cells += [f"{row['ms'] - alone[row['impl'].removesuffix(APART)]:+.2f} ms", byte_count(row.get("peak_bytes", 0))]
        table.add_row(*cells)
    return table


def main() -> None:
    options = make_parser().parse_args()
    try:
        with process_group("benchmark_parallel.py", "cpu" if options.sizes == "cpu" else None) as device:
            measure(options, device)
    except ValueError as error:
        sys.exit(f"benchmark_parallel.py: {error}")


def measure(options: argparse.Namespace, device: torch.device) -> None:
    world, on_gpu = dist.get_world_size(), device.type == "cuda"
    console = make_console() if dist.get_rank() == 0 else Console(quiet=True)
    rows = []
    path = options.output
    if path is None and on_gpu and not options.only:
        slug = results_file.gpu_slug(torch.cuda.get_device_name(device))
        path = pathlib.Path(__file__).parent / "results" / f"{slug}-parallel-x{world}.json"
    for case in CASES[options.sizes or ("full" if on_gpu else "cpu")]:
        if options.only and not {case.what, f"{case.what}/{case.model}"} & set(options.only):
            continue
        impls = ["v4_products"] if options.no_peers else ["v4_products", "v1_torch"]
        if on_gpu and case.what in ("ddp", "fsdp2", "tensor"):
            impls.insert(1, "v4_products" + GRAPH)
        if on_gpu and not options.no_peers and case.what in ("ddp", "fsdp2"):
            impls += ["v1_torch" + COMPILED, "v1_torch" + COMPILED + GRAPH]
        rows_of = {"decode": decode_rows, "all_reduce": all_reduce_rows}.get(case.what, train_rows)
        found = list(rows_of(case, impls, device))
        console.print(table_of(case, found))
        rows += found
        if path and dist.get_rank() == 0:
            results_file.write(path, rows, {"copy_gb_s": {}, "matmul_tflop_s": None}, device)
    if path:
        console.print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
