# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Step 4 as a walk: a block's forms, the cache, a stale graph, the draw, the loss
#
# This notebook goes with [README.md](README.md). You train a small GPT-2 and look into it: which calls a block makes,
# what lies in the cache, what a graph remembers, which tokens may be drawn, what a loss keeps in memory. *Predict*
# before you run a cell; the answer stands below it.
#
# Half an hour; it runs on a CPU in less than a minute. Build the four steps first: `make -C .. build`.

# %%
import functools

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import train
from generate import ByteTokenizer, generate
from gpt2_model import GPT2
from model.blocks import FORMS
from model.runner import Runner
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

import step1_simple  # not installed? pip install -e ..
import step2_attention
import step3_fused
import step4_integration
from kernel_fusion import steps
from kernel_fusion.bench.benchmarks import benchmark_kernel
from kernel_fusion.learn import pictures

build = steps.find("step4").path / "build" / "lesson"
show = functools.partial(pictures.show, build)
STEPS = (step1_simple, step2_attention, step3_fused, step4_integration)
device = "cuda" if torch.cuda.is_available() and step2_attention.rungs("attention", "cuda") else "cpu"
print("torch", torch.__version__, "on", torch.cuda.get_device_name() if device == "cuda" else "the CPU")


def grid(axis, rows, title):
    """Draws rows of texts and numbers, each in a cell; an empty one is white."""
    shades = [[(text != "") + isinstance(text, int) for text in row] for row in rows]
    axis.imshow(shades, cmap="Blues", vmin=0, vmax=4, aspect="auto")
    for y, row in enumerate(rows):
        for x, text in enumerate(row):
            axis.text(x, y, text, ha="center", va="center", fontsize=8)
    axis.set(title=title, xticks=[], yticks=range(len(rows)))


# %% [markdown]
# ## 1. A model in some seconds
#
# [train.py](train.py) on the pages of the steps; a token is a byte. *Predict:* what is the loss, in nats a byte, of a
# model that knows nothing? Will 438,000 parameters beat a table of how often each byte follows which?

# %%
documents = [path.read_bytes() for path in sorted(steps.ROOT.glob("step*/**/*.md"))]
folder = build / "small-gpt2"
result = train.train(Console(quiet=True), steps=250, documents=documents, device=device, out=folder)
print(f"held-out text: GPT-2 {result.loss:.2f}, the table {result.bigram_loss:.2f}; knowing nothing ln 256 = 5.55")
model = GPT2.from_pretrained(folder, device=device)
assert result.loss < 3.5

# %% [markdown]
# They do, after 250 steps of 512 bytes: a table looks back one byte, attention up to 64.
#
# ## 2. The forms of a block
#
# The same weights in each form of [model/blocks/](model/blocks/__init__.py), and every call noted that makes a tensor.
# *Predict:* v1 makes ten a block, and what two calls hand on goes through memory. How few can it be?


# %%
class Calls(TorchDispatchMode):
    """Notes the name of each op that runs, but for those that only see a tensor in another shape."""

    names = ()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if "view" not in str(function) and not function.is_view:
            self.names += (str(function).split(".")[1],)
        return function(*arguments, **(keywords or {}))


def our_launches():
    """How often ops of the four steps have run until now."""
    return sum(sum(module.launch_counts().values()) for module in STEPS)


ids, rows = torch.randint(256, (2, 64), device=device), []
with torch.no_grad():
    exact = GPT2.from_pretrained(folder, device=device, blocks="v1_torch", dtype=torch.float64)(ids)
    for form in FORMS:
        other, before = GPT2.from_pretrained(folder, device=device, blocks=form), our_launches()
        with Calls() as noted:
            off = (other(ids).double() - exact).abs().max().item()
        names = noted.names[: noted.names.index("_to_copy")]  # what follows compares
        each = (len(names) - 3) // model.config.n_layer  # without embedding, first LayerNorm, last product
        rows.append(["attention" if "scaled" in name else name for name in names[2 : 2 + each]])
        took = f", {benchmark_kernel(other, (ids,), repeat=20):.2f} ms" if device == "cuda" else ""
        print(f"{form:18} off by {off:.0e}, {each:2} calls a block, launches of ours {our_launches() - before}{took}")
        assert off < 1e-3
figure, axis = plt.subplots(figsize=(10, 2.6), layout="constrained")
grid(axis, [[name.replace("_", "\n") for name in row] + [""] * (10 - len(row)) for row in rows], "a block's calls")
axis.set_yticklabels(FORMS)
show("forms")
assert [len(row) for row in rows[1:]] == [9, 6, 4]

# %% [markdown]
# Four. (A call is not yet a launch: of many rows a GPU's `auto` launches the parts of `mlp` one by one.) v2's ninth,
# `clone`, is no op of ours: it lays the heads side by side. `attention_block` reads them where they lie.
#
# ## 3. The cache
#
# Three prompts are read together, padded behind to the longest; `kv_append` writes their keys and values into the
# cache. Then each row gets a token, six times. How long a row is stands in `end`, on the device. *Predict:* to which
# slots does the first token of each row go, and what becomes of the padding?

# %%
tokenizer = ByteTokenizer()
prompts = [tokenizer.encode(text) for text in ("The kernel ", "A warp", "mem")]
lengths = [len(prompt) for prompt in prompts]
ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
runner = Runner(model, 3)
slots = [["p"] * length + ["·"] * (11 - length) + [""] * 7 for length in lengths]
figure, axes = plt.subplots(2, 1, figsize=(9, 3), layout="constrained")
grid(axes[0], slots, "read: p prompt, · padding")
with torch.no_grad():
    runner.read(ids, lengths)
    for number in range(6):
        before = runner.cache.k[0].clone()
        runner.token.copy_(runner.logits.argmax(-1))
        with Calls() as noted:
            runner.step()
        changed = (runner.cache.k[0] != before).any(-1).any(1)  # of all heads: [rows, slots]
        assert changed.nonzero().tolist() == [[row, length + number] for row, length in enumerate(lengths)]
        for row, slot in changed.nonzero().tolist():
            slots[row][slot] = number + 1
grid(axes[1], slots, "six tokens later")
print("end", runner.cache.end.tolist(), "- calls of a token", *noted.names)
show("cache")

# %% [markdown]
# Each row goes on behind its own prompt. Nobody looks at the padding, and it is written over. A token takes one call of
# ours, `decode_step`, which writes to the cache itself, and a copy of its logits. (With a GPU none: a graph is
# replayed.) *Predict:* does a row notice the others?

# %%
together, log_probs = generate(model, prompts, 24, return_log_probs=True)
for row, prompt in enumerate(prompts):
    (alone,), its_log_probs = generate(model, [prompt], 24, return_log_probs=True)
    off = (its_log_probs[0] - log_probs[row]).abs().max().item()
    print(f"{bytes(alone.tolist()).decode(errors='replace')!r}: alone, log-probabilities differ by {off:.0e}")
    assert torch.equal(alone, together[row])
    assert off < 1e-4

# %% [markdown]
# ## 4. What a graph remembers
#
# A CUDA graph notes launches with the *values* of their arguments; a tensor's value is its address. A list of such
# calls shows it on any machine. `kv_append` is noted with a position that the host counts, and with one that lies on
# the device. *Predict:* what do the two caches hold after eight replays?

# %%
append, new, length = step4_integration.kv_append, torch.zeros(1, 1, 1, 4), 0
end, (stale, right) = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 1, 1, 10, 4)
by_host = functools.partial(append, stale, stale.clone(), new, new, length)
on_device = functools.partial(append, right, right.clone(), new, new, 0, end)
graph, seen = [by_host, on_device, functools.partial(end.add_, 1)], ([], [])
for token in range(1, 9):
    new.fill_(token)
    for noted_call in graph:
        noted_call()
    length += 1  # which nobody reads any more
    for lines, cache in zip(seen, (stale, right), strict=True):
        lines.append([int(value) or "" for value in cache[0, 0, :, 0]])
figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
for axis, name, lines in zip(axes, ("a number of the host", "`end` on the device"), seen, strict=True):
    grid(axis, lines, name)
    axis.set(xlabel="slot", ylabel="replay")
show("replays")
assert [lines[-1] for lines in seen] == [[8] + [""] * 9, [*range(1, 9), "", ""]]

# %% [markdown]
# With a number of the host every token is written over the one before. Nothing fails, all shapes are right, and the
# model talks nonsense: the fault to hunt in the [exercises](exercises/README.md).
#
# ## 5. Which tokens may be drawn
#
# `sample` divides scores by `temperature`, keeps the `top_k` likeliest, of these as many as reach `top_p` together, and
# draws: bars are the formula, points 4000 draws. A draw is a function of logits and the row's state, seed and offset.
# *Predict:* which of the four gives the likeliest token most? And which rows of the states 7, 8, 7 draw the same?


# %%
def kept(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The probability of each token, 0 for those left out. (The op does not sort.)"""
    scores = logits / temperature
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[-1], -torch.inf)
    if top_p < 1:
        likely, order = scores.softmax(0).sort(descending=True)
        scores = scores.index_fill(0, order[likely.cumsum(0) - likely >= top_p], -torch.inf)
    return scores.softmax(0)


DRAWS, SHOWN = 4000, 16
with torch.no_grad():
    logits = model(torch.tensor([prompts[0][:-1]], device=device))[0, -1]
order = logits.topk(SHOWN).indices.cpu()
figure, axes = plt.subplots(1, 4, figsize=(11, 2.6), layout="constrained", sharey=True)
for axis, options in zip(axes, ({}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6}), strict=True):
    states = torch.stack([torch.arange(DRAWS), torch.zeros(DRAWS).long()], 1).to(device)  # a seed for each row
    tokens, _ = step4_integration.sample(logits.expand(DRAWS, -1), states, **options)
    drawn, expected = torch.bincount(tokens, minlength=256).cpu() / DRAWS, kept(logits, **options).cpu()
    assert not drawn[expected == 0].any()
    assert ((drawn - expected).abs() < 5 * (expected / DRAWS).sqrt() + 2 / DRAWS).all()
    axis.bar(range(SHOWN), expected[order], alpha=0.5)
    axis.plot(range(SHOWN), drawn[order], ".", color="C1")
    title = ", ".join(f"{name} {value}" for name, value in options.items()) or "all"
    axis.set(title=title, xticks=range(SHOWN), xticklabels=[repr(chr(byte))[1:-1] for byte in order])
    print(f"{title:15} {int((expected > 0).sum()):3} tokens, the likeliest {expected.max():.0%}")
for rung in step4_integration.rungs("sample", device):
    states = torch.tensor([[7, 0], [8, 0], [7, 0]], device=device)
    drawn = [step4_integration.sample(logits.expand(3, -1), states, top_k=40, rung=rung)[0] for _ in range(12)]
    texts = [bytes(row).decode(errors="replace") for row in torch.stack(drawn, 1).tolist()]
    print(f"{rung:10} {texts}, offsets {states[:, 1].tolist()}")
    assert texts[0] == texts[2] != texts[1]
show("sampling")

# %% [markdown]
# Low temperature; rows of equal states, whatever is beside them, and by every rung.
#
# ## 6. What a loss keeps
#
# Until the backward pass, `F.cross_entropy(hidden @ weight.T, targets)` keeps log-probabilities: rows · vocab.
# `linear_cross_entropy` makes the logits of `chunk` rows, turns them at once into gradients of hidden and weight, and
# keeps these. *Predict:* how many MB are kept of 2048 rows, a vocabulary of 2000, a width of 64?

# %%
hidden, weight = torch.randn(2048, 64, requires_grad=True), torch.randn(2000, 64, requires_grad=True)
targets, gradients = torch.randint(2000, (2048,)), []
for name, loss_of in {
    "F.cross_entropy": lambda: F.cross_entropy(hidden @ weight.T, targets),
    "linear_cross_entropy": lambda: step4_integration.linear_cross_entropy(hidden, weight, targets, chunk=64),
}.items():
    kept_tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept_tensors: kept.append(t) or t, lambda t: t):
        loss = loss_of()
    megabytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in kept_tensors}.values()) / 1e6
    print(f"{name:20} {loss:.4f}, {megabytes:4.1f} MB kept")
    gradients.append(torch.autograd.grad(loss, weight)[0])
assert torch.allclose(*gradients, atol=1e-5)

# %% [markdown]
# 4 · 2048 · 2000 bytes, hidden and weight; or two gradients. GPT-2's 16 · 1024 rows of 50257 logits are 3.3 GB in
# float32, its two gradients 0.2.
#
# ## 7. A text, token by token
#
# With the cache each token costs one row; without it, all rows again, and the text is the same.

# %%
stream, prompt = tokenizer.stream(), "The kernel "
options = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
print(prompt, end="")
ids = torch.tensor([tokenizer.encode(prompt)], device=device)
text = generate(model, ids, 52, on_token=lambda token: print(stream(token.item()), end="", flush=True), **options)
assert torch.equal(text, generate(model, ids, 52, use_cache=False, **options))
print("\n\nrows with the cache:", 11 + 51, "- without:", sum(range(11, 11 + 52)))

# %% [markdown]
# ## Next
#
# The [exercises](exercises/README.md); then how [generation](pages/generation.md), [sampling](pages/sampling.md) and
# [the loss](pages/cross_entropy.md) are built.
