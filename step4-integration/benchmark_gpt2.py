"""GPT-2 with random weights in each form of a block, beside transformers' own: milliseconds and tokens a second.

python benchmark_gpt2.py                  size full on a GPU, which also writes results/<gpu>-gpt2.json; else size cpu
python benchmark_gpt2.py --sizes quick
python benchmark_gpt2.py --only decode --profile      and where the GPU's time goes, kernel by kernel

prefill: `generate` reads a prompt and takes one token. decode: `generate` takes NEW tokens after a prompt, which it
reads too. train: forward, backward and an AdamW step in bfloat16, with weights in float32, at a learning rate of 0, so
that each repeat is the same; ours as train.py does it, peers under autocast. A time is what the caller waits for, the
CPU's launching included. "v4_products graph" is the same step as one CUDA graph, "v4_products compiled" the one whose
loss torch.compile has compiled.

The peers: "transformers" is its GPT2LMHeadModel in eager mode, with PyTorch's SDPA; "transformers compiled" the same
under torch.compile with CUDA graphs, greedy, with a static cache whose prompt has been read before the clock starts;
"v1_torch compiled" our first form, plain PyTorch, under torch.compile: what nanoGPT does.
"""

# ruff: noqa: E402  arguments are read first, so that --help needs no build
import argparse
import copy
import dataclasses
import functools
import gc
import pathlib
import sys
from collections.abc import Callable


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Times GPT-2 in each form of a block, beside transformers' own.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--sizes", choices=("cpu", "quick", "full"), help="default: full on a GPU, else cpu")
    parser.add_argument("--only", choices=("prefill", "decode", "train"), action="append", help="these cases alone")
    parser.add_argument("--forms", nargs="+", help="these forms of a block alone, of model/blocks/")
    parser.add_argument("--no-peers", action="store_true", help="ours only")
    parser.add_argument("--profile", action="store_true", help="print the last form's kernels with their times (GPU)")
    parser.add_argument("--output", type=pathlib.Path, help="write here (default: size full on a GPU, in results/)")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()

import gpt2_model
import torch
import torch._inductor.exc
from generate import generate
from gpt2_model import GPT2
from model.blocks import FORMS
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from training.step import backward
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, StaticCache

from kernel_fusion import testing  # not installed? pip install -e ..
from kernel_fusion.bench import benchmarks, measuring, results_file
from kernel_fusion.console import make_console, milliseconds
from kernel_fusion.report import results

GRAPH, COMPILED = " graph", " compiled"  # behind a form's name
NEW = {"cpu": 4, "quick": 64, "full": 128}  # tokens that a decode case takes
# what, model, batch, tokens (of the prompt, or of a row to train on)
CASES = {
    "cpu": [("prefill", "gpt2", 1, 64), ("decode", "gpt2", 1, 64), ("train", "gpt2", 1, 32)],
    "quick": [("prefill", "gpt2", 8, 1024), ("decode", "gpt2", 1, 512), ("train", "gpt2", 4, 1024)],
    "full": [
        ("prefill", "gpt2", 1, 128),
        ("prefill", "gpt2", 1, 1024),
        ("prefill", "gpt2", 8, 1024),
        ("decode", "gpt2", 1, 512),
        ("decode", "gpt2", 8, 512),
        ("decode", "gpt2", 32, 512),
        ("decode", "gpt2-xl", 1, 512),
        ("train", "gpt2", 16, 1024),
    ],
}


class Models:
    """The same random weights in transformers' model and in each form of ours, on one device."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device):
        config = gpt2_model.SIZES[name]
        torch.manual_seed(0)
        sizes = {key: getattr(config, key) for key in ("n_embd", "n_layer", "n_head")}
        with torch.device(device):
            self.hf = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
        self.hf.to(dtype)
        self.ours = {}
        for form in FORMS:  # one set of weights for all: they differ in how they compute
            with torch.device("meta"):
                model = GPT2(dataclasses.replace(config, blocks=form))
            model.load_state_dict(self.hf.transformer.state_dict(), assign=True)
            self.ours[form] = model
        self.parameters = sum(p.numel() for p in self.hf.parameters())

    def exact(self) -> GPT2LMHeadModel:
        """transformers' model in float64."""
        with torch.device(self.hf.device):
            exact = GPT2LMHeadModel(self.hf.config).eval().double()
        exact.load_state_dict(self.hf.state_dict())
        return exact


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The log-probability of the likeliest token of each row, [rows, 1]."""
    return logits.log_softmax(-1).amax(-1, keepdim=True)


def prefill(models: Models, new: int) -> tuple[Callable, dict[str, Callable], Callable]:
    """Ours, called with the ids and `rung=…`; the peers', and what is right, called with the ids."""
    compiled = torch.compile(models.hf, mode="reduce-overhead", dynamic=False)

    def ours(ids, rung):
        return generate(models.ours[rung], ids, 1, return_log_probs=True)[1]

    def theirs(model, ids):
        logits = model(ids, logits_to_keep=1, use_cache=False).logits[:, -1]
        return likeliest(logits.float())

    def exact(ids):
        return likeliest(models.exact()(ids, logits_to_keep=1, use_cache=False).logits[:, -1])

    peers = {"transformers": lambda ids: theirs(models.hf, ids)}
    if models.hf.device.type == "cuda":
        peers["transformers compiled"] = lambda ids: theirs(compiled, ids)
    return ours, peers, exact


def decode(models: Models, new: int) -> tuple[Callable, dict[str, Callable], Callable]:
    """As `prefill`. What is compared is the log-probability of the first new token."""

    def ours(ids, rung):
        return generate(models.ours[rung], ids, new, return_log_probs=True)[1][:, :1]

    def theirs(ids):
        cache = DynamicCache(config=models.hf.config)
        first = models.hf(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        token = first.argmax(-1, keepdim=True)
        for _ in range(new - 1):
            token = models.hf(token, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        return likeliest(first.float())

    read: dict[tuple, tuple[StaticCache, torch.Tensor]] = {}

    def step(token, cache):
        logits = models.hf(token, past_key_values=cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    compiled = torch.compile(step, mode="reduce-overhead", dynamic=False, fullgraph=True)

    def compiled_theirs(ids):
        key = tuple(ids.shape)
        if key not in read:
            cache = StaticCache(config=models.hf.config, max_cache_len=models.hf.config.n_positions)
            read[key] = cache, models.hf(ids, past_key_values=cache, use_cache=True).logits[:, -1]
        cache, first = read[key]
        for layer in cache.layers:  # it counts its tokens itself: those of the call before go
            layer.cumulative_length.fill_(ids.shape[1])
        token = first.argmax(-1, keepdim=True)
        for _ in range(new):
            token = compiled(token.clone(), cache)
        return likeliest(first.float())

    def exact(ids):
        return likeliest(models.exact()(ids, logits_to_keep=1, use_cache=False).logits[:, -1])

    peers = {"transformers": theirs}
    if models.hf.device.type == "cuda":
        peers["transformers compiled"] = compiled_theirs
    return ours, peers, exact


def as_graph(run: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """`run` as a CUDA graph for ids of this shape."""
    own = ids.clone()
    graph, result = testing.capture(lambda: run(own), warm_ups=3)

    def replay(ids: torch.Tensor) -> torch.Tensor:
        own.copy_(ids)
        graph.replay()
        return result.clone()

    return replay


def train(models: Models, new: int) -> tuple[Callable, dict[str, Callable], Callable]:
    """As `prefill`."""
    optimizers: dict[str, torch.optim.Optimizer] = {}
    graphs: dict[str, Callable] = {}
    # torch 2.11 tells its log of each op that it has no lowering for, whether anybody reads it or not, and spells out
    # what the arguments were made of: of twelve layers for ever.
    torch._inductor.exc.OperatorIssue.operator_str = staticmethod(lambda target, args, kwargs: str(target))

    @functools.cache
    def compiled_ours(form):
        model = copy.copy(models.ours[form])  # with the same weights
        model.loss = torch.compile(model.loss, dynamic=False)
        return model

    def step(key, model, backward_of):
        if key not in optimizers:
            in_a_graph = key.endswith(GRAPH)
            optimizers[key] = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True, capturable=in_a_graph)
        optimizers[key].zero_grad(set_to_none=True)
        loss = backward_of()
        optimizers[key].step()
        return loss

    def from_logits(logits, ids):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def theirs(name, model, logits_of):
        def backward_of(ids):
            with torch.autocast(models.hf.device.type, torch.bfloat16):
                loss = from_logits(logits_of(ids), ids)
            loss.backward()
            return loss.detach()

        return lambda ids: step(name, model, lambda: backward_of(ids))

    def ours(ids, rung):
        compiled = rung.endswith(COMPILED)
        model = compiled_ours(rung.removesuffix(COMPILED)) if compiled else models.ours[rung.removesuffix(GRAPH)]

        def run(ids):
            return step(rung, model, lambda: backward(model, [ids], torch.bfloat16))

        if not rung.endswith(GRAPH):
            return run(ids)
        if rung not in graphs:
            graphs[rung] = as_graph(run, ids)
        return graphs[rung](ids)

    def exact(ids):
        with torch.no_grad():
            return from_logits(models.exact()(ids).logits, ids)

    def logits_of_hf(model):
        return lambda ids: model(ids, use_cache=False).logits

    peers = {"transformers": theirs("hf", models.hf, logits_of_hf(models.hf))}
    if models.hf.device.type == "cuda":
        compiled, plain = torch.compile(models.hf, dynamic=False), models.ours["v1_torch"]
        peers["transformers compiled"] = theirs("hf compiled", models.hf, logits_of_hf(compiled))
        peers["v1_torch compiled"] = theirs("plain", plain, torch.compile(plain, dynamic=False))
    return ours, peers, exact


def case_of(what: str, name: str, batch: int, tokens: int, new: int, device: torch.device) -> benchmarks.Case:
    dtype = torch.float32 if what == "train" or device.type == "cpu" else torch.bfloat16
    models = Models(name, dtype, device)
    new = new if what == "decode" else 1
    run, peers, reference = {"prefill": prefill, "decode": decode, "train": train}[what](models, new)
    config = gpt2_model.SIZES[name]
    kv = 2 * config.n_layer * batch * config.n_embd * dtype.itemsize  # keys and values of a token: written once, read
    kv *= tokens if what != "decode" else sum(range(tokens, tokens + new))
    # A weight is read once a pass and takes part in one multiply-add a token; three times both in training.
    passes = {"prefill": 1, "decode": new, "train": 3}[what]
    worked = {"prefill": batch * tokens, "decode": batch * (tokens + new), "train": 3 * batch * tokens}[what]
    return benchmarks.Case(
        op=f"gpt2_{what}",
        shape={"parameters": models.parameters, "batch": batch, "tokens": tokens}
        | ({"new": new} if what == "decode" else {}),
        dtype=torch.bfloat16 if what == "train" else dtype,
        inputs=lambda on: (torch.randint(config.vocab_size, (batch, tokens), device=on),),
        bytes=passes * models.parameters * dtype.itemsize + kv,
        flops=2 * models.parameters * worked,
        bound="memory" if what == "decode" else "arithmetic",
        written=0,
        clock="call",
        run=run,
        reference=reference,
        peers=peers,
        direction="backward" if what == "train" else "forward",
    )


def table_of(case: benchmarks.Case, rows: list[dict]) -> Table:
    table = Table(title=case.title(), title_justify="left", title_style="bold")
    table.add_column("implementation")
    for column in ("time", "a token", "tokens/s", "TFLOP/s", "of the ceiling", "over the best peer", "peak memory"):
        table.add_column(column, justify="right")
    table.add_column("result")
    tokens = case.shape["batch"] * case.shape.get("new", case.shape["tokens"])
    theirs = min((row["ms"] for row in rows if row["kind"] == "peer"), default=None)
    for row in rows:
        a_token = milliseconds(row["ms"] / case.shape["new"]) if "new" in case.shape else ""
        cells = [row["impl"], milliseconds(row["ms"]), a_token, f"{tokens / row['ms'] * 1e3:,.0f}"]
        cells += [f"{row['tflop_s']:.3g}", benchmarks.percent(row), f"{theirs / row['ms']:.2f}×" if theirs else ""]
        cells.append(f"{row['peak_bytes'] / 1e9:.2f} GB" if "peak_bytes" in row else "")
        table.add_row(*cells, "right" if row["correct"] else "[bold red]WRONG[/]")
    return table


def peak_bytes(run: Callable, ids: torch.Tensor) -> int:
    """What a call takes of the GPU's memory at the most, beside what lies there before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(ids)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def profile_of(run: Callable, ids: torch.Tensor) -> str:
    """The kernels that take most of a call's time on the GPU."""
    run(ids)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(ids)
        torch.cuda.synchronize()
    return profiler.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70)


def look_closer(case: benchmarks.Case, rows: list[dict], device: torch.device, console: Console | None) -> None:
    """Adds to each row the memory that it took; prints where the last form's time goes, if there is a console."""
    (ids,) = case.inputs(device)
    with torch.set_grad_enabled(case.direction == "backward"):
        names = [row["impl"] for row in rows]
        calls = {name: case.peers.get(name) or functools.partial(case.run, rung=name) for name in names}
        # A graph's memory, and that of generation, stays from call to call.
        for row in [row for row in rows if case.direction == "backward" and not row["impl"].endswith(GRAPH)]:
            row["peak_bytes"] = results.rounded(peak_bytes(calls[row["impl"]], ids))
        if console:
            last = [row["impl"] for row in rows if row["kind"] == "rung"][-1]
            console.print(profile_of(calls[last], ids), soft_wrap=True)


def main() -> None:
    options = make_parser().parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = options.sizes or ("full" if device.type == "cuda" else "cpu")
    forms = options.forms or list(FORMS)
    console = make_console()
    ceilings = benchmarks.Ceilings(device)
    rows = []
    for what in CASES[size]:
        if options.only and what[0] not in options.only:
            continue
        case = case_of(*what, NEW[size], device)
        rungs = list(forms)
        if what[0] == "train" and device.type == "cuda" and "v4_products" in forms:
            rungs += ["v4_products" + GRAPH, "v4_products" + COMPILED]
        measured = measuring.run_case(None, case, device, rungs=rungs, peers=not options.no_peers, ceilings=ceilings)
        found = [m.row for m in measured]
        if device.type == "cuda":
            look_closer(case, found, device, console if options.profile else None)
        console.print(table_of(case, found))
        rows += found
        del case, measured
        torch._dynamo.reset()  # and what compiled peers hold
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    path = options.output
    whole = size == "full" and not (options.only or options.forms or options.no_peers)
    if path is None and device.type == "cuda" and whole:
        slug = results_file.gpu_slug(torch.cuda.get_device_name(device))
        path = pathlib.Path(__file__).parent / "results" / f"{slug}-gpt2.json"
    if path:
        results_file.write(path, rows, ceilings.as_json(), device)
        console.print(f"written: {path}", soft_wrap=True)
    sys.exit(1 if any(not row["correct"] for row in rows if row["kind"] == "rung") else 0)


if __name__ == "__main__":
    main()
