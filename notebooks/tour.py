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
# # The tour: four steps in a minute
#
# One op of each step, run on this machine and compared with float64; a fault that the emulation finds; a small GPT-2 in
# training. The kernels run thread by thread on the CPU, so their results are a GPU's and their times are not: the plots
# have an H200's, from the results files. Build the steps first: `make build`, some minutes. `make tour` shows all ops.

# %%
import functools
import importlib

import matplotlib.pyplot as plt
import torch

from kernel_fusion import steps  # not installed? pip install -e ..
from kernel_fusion.console import make_console
from kernel_fusion.learn import pictures, planted, tour
from kernel_fusion.report import plots, syllabus

console = make_console(force_jupyter=False, force_terminal=False)  # plain text
show = functools.partial(pictures.show, steps.ROOT / "build" / "tour")
unbuilt = [step.folder for step in steps.STEPS if not steps.is_built(step)]
assert not unbuilt, f"build first: make build ({', '.join(unbuilt)})"
step1, step2, step3, step4 = steps.STEPS
torch.manual_seed(0)
print("torch", torch.__version__)


def ladder(step, op):
    """Runs every rung of an op: how far it is off from float64, and may be; its idea; what each took on an H200."""
    look = tour.Look(importlib.import_module(step.module), {}, set(), at=lambda text: None, say=print)
    cases = tour.first_cases(step, steps.load_benchmark(step), "emulated", "cpu")
    (case,) = (case for case in cases if case.op == op)
    print(case.title())
    ideas = {rung.name: rung.idea for rung in syllabus.rungs(step, op)}
    for row in tour.checked_rows(look, [case]):
        off = f"off by {row.error:.1e}, allowed {row.allowed:.1e}" if row.error is not None else row.refusal
        print(f"{row.name:13} {off:32} {ideas[row.name]}")
        assert row.correct
    show(op, plots.ladders(op)[0].figure())


# %% [markdown]
# ## Step 1: an element for each thread
#
# A tensor times a number. There is nothing to compute, so all that counts is how memory is asked.

# %%
ladder(step1, "scale")

# %% [markdown]
# ## Step 2: attention
#
# From `v2_tiled` on scores are never written to memory: a block goes through the keys once, and corrects what it has
# when a larger score comes. Tensor cores do the products from `v3_mma` on.

# %%
ladder(step2, "attention")

# %% [markdown]
# ## A fault, found without a GPU
#
# In this kernel a barrier is missing, and in the usual order of the threads the result is right all the same.

# %%
planted.race(console)

# %% [markdown]
# ## Step 3: a whole block in one launch
#
# Attention, projection, residual and LayerNorm. Less memory is moved, and the parts wait for each other: the plot shows
# where that pays.

# %%
ladder(step3, "attention_block")

# %% [markdown]
# ## Step 4: GPT-2
#
# A token of the whole model: all its layers for one new token of each sequence.

# %%
ladder(step4, "decode_step")

# %% [markdown]
# And a small GPT-2 learns to continue this repository's documents, byte by byte. 100 steps are a beginning, `make tour`
# takes 1000. A model that knows nothing has a loss of ln 256, 5.5.

# %%
train = steps.load_script(step4, "train")
losses = []
result = train.train(
    console, steps=100, out=steps.ROOT / "build" / "tour" / "notebook",
    on_loss=lambda number, loss: losses.append(loss.item()),
)  # fmt: skip
print(f"loss at first {losses[0]:.2f}, at last {losses[-1]:.2f}")
assert losses[-1] < losses[0] - 2
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
axis.plot(losses)
axis.set(xlabel="step", ylabel="loss")
show("loss")

# %% [markdown]
# ## Next
#
# [Step 1](../step1-simple/README.md) from its beginning, or first the [puzzles](../docs/puzzles/README.md).
