"""GPT-2 with random weights, fused and on separate ops, beside transformers' own: milliseconds and tokens a second.

python benchmark_gpt2.py                  size full on a GPU, which also writes results/<gpu>-gpt2.json; else size cpu
python benchmark_gpt2.py --sizes quick

prefill: a prompt is read, the logits of its last token computed. decode: one more token, its keys and values added to
those before. train: forward, backward and an AdamW step under bfloat16 autocast, at a learning rate of 0, so that each
repeat is the same. "transformers" is its GPT2LMHeadModel in eager mode, with PyTorch's SDPA. A time is what the caller
waits for, the CPU's launching included.
"""

import argparse
import dataclasses
import gc
import pathlib
import sys

import gpt2_model
import torch
from gpt2_model import GPT2, KVCache
from rich.table import Table
from torch.nn import functional as F
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from kernel_fusion.bench import benchmarks, measuring, results_file  # not installed? pip install -e ..
from kernel_fusion.console import make_console, milliseconds

WAYS = ("separate", "fused")
# what, model, batch, tokens (of the prompt, before the new one, or of a row to train on)
CASES = {
    "cpu": [("prefill", "gpt2", 1, 64), ("decode", "gpt2", 1, 64), ("train", "gpt2", 1, 32)],
    "quick": [("prefill", "gpt2", 8, 1024), ("decode", "gpt2", 1, 512), ("train", "gpt2", 4, 1024)],
    "full": [
        ("prefill", "gpt2", 1, 128),
        ("prefill", "gpt2", 1, 1024),
        ("prefill", "gpt2", 8, 1024),
        ("decode", "gpt2", 1, 512),
        ("decode", "gpt2", 8, 512),
        ("decode", "gpt2-xl", 1, 512),
        ("train", "gpt2", 16, 1024),
    ],
}


class Models:
    """The same random weights in transformers' model and in ours, on one device."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device):
        config = gpt2_model.SIZES[name]
        torch.manual_seed(0)
        sizes = {key: getattr(config, key) for key in ("n_embd", "n_layer", "n_head")}
        with torch.device(device):
            self.hf = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).eval()
            self.ours = {way: GPT2(dataclasses.replace(config, fused=way == "fused")) for way in WAYS}
        self.hf.to(dtype)
        for model in self.ours.values():
            model.to(dtype).load_state_dict(self.hf.transformer.state_dict())
        self.parameters = sum(p.numel() for p in self.hf.parameters())

    def exact(self) -> GPT2LMHeadModel:
        """transformers' model in float64."""
        with torch.device(self.hf.device):
            exact = GPT2LMHeadModel(self.hf.config).eval().double()
        exact.load_state_dict(self.hf.state_dict())
        return exact


def prefill(models: Models) -> dict:
    def ours(ids, rung):
        model = models.ours[rung]
        return model.logits(model.hidden(ids)[:, -1:])

    def theirs(ids):
        return models.hf(ids, logits_to_keep=1, use_cache=False).logits

    return {
        "run": ours,
        "reference": lambda ids: models.exact()(ids, logits_to_keep=1, use_cache=False).logits,
        "peers": {"transformers": theirs},
    }


def decode(models: Models) -> dict:
    caches = {}

    def ours(ids, rung):
        model, weight = models.ours[rung], models.ours[rung].wte.weight
        if rung not in caches:
            caches[rung] = KVCache(model.config, *ids.shape, dtype=weight.dtype, device=weight.device)
            model.hidden(ids[:, :-1], caches[rung])
        caches[rung].length = ids.shape[1] - 1
        return model.logits(model.hidden(ids[:, -1:], caches[rung]))

    def theirs(ids):
        if "hf" not in caches:
            caches["hf"] = DynamicCache(config=models.hf.config)
            models.hf(ids[:, :-1], past_key_values=caches["hf"], use_cache=True)
        logits = models.hf(ids[:, -1:], past_key_values=caches["hf"], use_cache=True).logits
        caches["hf"].crop(-1)
        return logits

    return {
        "run": ours,
        "reference": lambda ids: models.exact()(ids, logits_to_keep=1, use_cache=False).logits,
        "peers": {"transformers": theirs},
    }


def train(models: Models) -> dict:
    optimizers = {}

    def step(key, model, ids, logits_of):
        if key not in optimizers:
            optimizers[key] = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        with torch.autocast(ids.device.type, torch.bfloat16):
            logits = logits_of(ids)
        losses = F.cross_entropy(logits.flatten(0, 1)[:-1].float(), ids.flatten()[1:], reduction="none")
        optimizers[key].zero_grad(set_to_none=True)
        losses.mean().backward()
        optimizers[key].step()
        return losses.detach()

    def exact(ids):
        with torch.no_grad():
            return F.cross_entropy(models.exact()(ids).logits.flatten(0, 1)[:-1], ids.flatten()[1:], reduction="none")

    def theirs(ids):
        return step("hf", models.hf, ids, lambda ids: models.hf(ids, use_cache=False).logits)

    return {
        "run": lambda ids, rung: step(rung, models.ours[rung], ids, models.ours[rung]),
        "reference": exact,
        "peers": {"transformers": theirs},
        "direction": "backward",
    }


def case_of(what: str, name: str, batch: int, tokens: int, device: torch.device) -> benchmarks.Case:
    dtype = torch.float32 if what == "train" or device.type == "cpu" else torch.bfloat16
    models = Models(name, dtype, device)
    length = tokens + 1 if what == "decode" else tokens
    new = batch * (1 if what == "decode" else tokens)
    config = gpt2_model.SIZES[name]
    kv = 2 * config.n_layer * batch * tokens * config.n_embd * dtype.itemsize  # keys and values: written, or read
    return benchmarks.Case(
        op=f"gpt2_{what}",
        shape={"parameters": models.parameters, "batch": batch, "tokens": tokens},
        dtype=torch.bfloat16 if what == "train" else dtype,
        inputs=lambda on: (torch.randint(config.vocab_size, (batch, length), device=on),),
        # A weight is read once and takes part in one multiply-add a token; three times both in training.
        bytes=(3 if what == "train" else 1) * models.parameters * dtype.itemsize + kv,
        flops=(6 if what == "train" else 2) * models.parameters * new,
        bound="memory" if what == "decode" else "arithmetic",
        written=0,
        clock="call",
        **{"prefill": prefill, "decode": decode, "train": train}[what](models),
    )


def table_of(case: benchmarks.Case, rows: list[dict]) -> Table:
    table = Table(title=case.title(), title_justify="left", title_style="bold")
    table.add_column("implementation")
    for column in ("time", "tokens/s", "TFLOP/s", "of the ceiling", "over transformers"):
        table.add_column(column, justify="right")
    table.add_column("result")
    tokens = case.shape["batch"] * (1 if case.op == "gpt2_decode" else case.shape["tokens"])
    theirs = next((row["ms"] for row in rows if row["kind"] == "peer"), None)
    for row in rows:
        cells = [row["impl"], milliseconds(row["ms"]), f"{tokens / row['ms'] * 1e3:,.0f}", f"{row['tflop_s']:.3g}"]
        cells += [benchmarks.percent(row), f"{theirs / row['ms']:.2f}×" if theirs else ""]
        table.add_row(*cells, "right" if row["correct"] else "[bold red]WRONG[/]")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Times GPT-2, fused and separate, beside transformers' own.")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    parser.add_argument("--sizes", choices=CASES, help="default: full on a GPU, else cpu")
    parser.add_argument("--output", type=pathlib.Path, help="write here (default: size full on a GPU, in results/)")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = options.sizes or ("full" if device.type == "cuda" else "cpu")
    console = make_console()
    ceilings = benchmarks.Ceilings(device)
    rows = []
    for what in CASES[size]:
        case = case_of(*what, device)
        found = [m.row for m in measuring.run_case(None, case, device, rungs=list(WAYS), ceilings=ceilings)]
        console.print(table_of(case, found))
        rows += found
        del case
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    path = options.output
    if path is None and device.type == "cuda" and size == "full":
        slug = results_file.gpu_slug(torch.cuda.get_device_name(device))
        path = pathlib.Path(__file__).parent / "results" / f"{slug}-gpt2.json"
    if path:
        results_file.write(path, rows, ceilings.as_json(), device)
        console.print(f"written: {path}", soft_wrap=True)
    sys.exit(1 if any(not row["correct"] for row in rows if row["kind"] == "rung") else 0)


if __name__ == "__main__":
    main()
