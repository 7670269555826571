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
# # Step 2 as a walk: lanes, tiles, fragments, banks, pipelines
#
# This notebook goes with [README.md](README.md), which explains each kernel. Here you look at what they do: which lane
# adds what, how a softmax is kept up to date, where a tensor core wants its operands, why rows are swizzled, and what
# runs beside what.
#
# It runs on a CPU in less than a minute. Parts 1 to 9 need PyTorch and no build: each rule in them is a few lines of
# Python, with the file named that it is taken from. Part 10 runs the kernels themselves, where the step is built:
# `python setup.py build_ext --inplace`.

# %%
import collections
import functools
import math

import matplotlib.pyplot as plt
import torch

from kernel_fusion import steps  # not installed? pip install -e ..
from kernel_fusion.learn import pictures
from kernel_fusion.report import plots, results

step = steps.find("step2")
show = functools.partial(pictures.show, step.path / "build" / "lesson")
torch.manual_seed(0)
measured = results.read(step.path / "results" / "h200.json")
print("torch", torch.__version__, "- measured on", measured.gpu)

# %% [markdown]
# ## 1. A sum without memory
#
# In a shuffle each lane reads a register of another lane: in `__shfl_xor_sync(…, away)`, of the lane whose number
# differs by `away`. Five of them add up 32 lanes (`warp_sum` in [reduce.h](include/step2/reduce.h)). Here are eight
# lanes and three steps:


# %%
def shuffle_xor(values, away):
    """What each lane reads."""
    return [values[lane ^ away] for lane in range(len(values))]


def sum_by_shuffles(values):
    """What the lanes hold at first, and after each step."""
    steps, away = [values], len(values) // 2
    while away:
        values = [own + other for own, other in zip(values, shuffle_xor(values, away), strict=True)]
        steps.append(values)
        away //= 2
    return steps


print("lane  ", *(f"{lane:4}" for lane in range(8)))
for away, values in zip(("", "xor 4", "xor 2", "xor 1"), sum_by_shuffles([1, 2, 3, 4, 5, 6, 7, 8]), strict=True):
    print(f"{away:6}", *(f"{value:4}" for value in values))

# %% [markdown]
# Every lane ends with the sum, and with the same bits: in each step the two lanes of a pair add the same two numbers.
# The order of the additions is another one than from left to right, so the last digits may be others.

# %%
numbers = torch.randn(32)
lanes = torch.stack(sum_by_shuffles(list(numbers))[-1])
in_order = sum(numbers)
print(f"by shuffles {lanes[0]:.8f}, in order {in_order:.8f}, exactly {numbers.double().sum():.8f}")
assert len(lanes.unique()) == 1

# %% [markdown]
# ## 2. The online softmax, step by step
#
# The greatest value of a row is known only at its end. So keep the greatest so far, and when a greater one comes,
# multiply what was added up by e^(old − new) ([online_softmax.h](include/step2/online_softmax.h)).


# %%
def push(state, value):
    """The greatest value and the sum after one more value, and the factor for what was added up before."""
    highest, total = state
    raised = max(highest, value)
    factor = math.exp(highest - raised) if highest > -math.inf else 0.0
    return (raised, total * factor + math.exp(value - raised)), factor


row, state = [1.0, 3.0, 2.0, -1.0, 5.0, 4.0], (-math.inf, 0.0)
print("value   greatest   factor      sum")
for value in row:
    state, factor = push(state, value)
    print(f"{value:5.1f}   {state[0]:8.1f}   {factor:6.4f}   {state[1]:6.4f}")
weights = [math.exp(value - state[0]) / state[1] for value in row]
assert torch.allclose(torch.tensor(weights), torch.softmax(torch.tensor(row), -1))

# %% [markdown]
# Two lanes that have each seen a part of the row merge by the same rule. So the threads of a block need one reduction,
# not a pass each for the maximum and the sum:


# %%
def merge(one, other):
    """What both have seen together."""
    highest = max(one[0], other[0])
    return highest, sum(total * math.exp(own - highest) for own, total in (one, other))


halves = [(-math.inf, 0.0), (-math.inf, 0.0)]
for place, value in enumerate(row):
    halves[place // 3], _ = push(halves[place // 3], value)
print("halves", *(f"({highest:.0f}, {total:.4f})" for highest, total in halves), "- merged", merge(*halves))
assert all(math.isclose(a, b) for a, b in zip(merge(*halves), state, strict=True))

# %% [markdown]
# *Try:* begin with 0 as the greatest value, not −∞, and let the row be −1000, −1001. What does the sum become?
#
# ## 3. Attention in tiles
#
# The output is a weighted mean, so it is kept up to date like the sum. Below is `v2_tiled`'s loop for one head, with
# three habits of `v5_registers`: powers of 2; a mask only in the tiles that need one; and a maximum that may lag behind
# by `lag` powers of 2, since what is multiplied by the same factor above and below the line does not change the
# quotient (`kMaxLag`, 8 in [online_softmax.h](include/step2/online_softmax.h)).


# %%
def seen_by(query, q_length, k_length, causal):
    """How many keys a query sees: BlockOfQueries in step2/attention/tensor_cores.h."""
    return max(0, min(k_length, query + 1 + k_length - q_length)) if causal else k_length


def attention_in_tiles(q, k, v, queries=64, keys=32, causal=True, lag=0.0, tell=lambda *words: None):
    """softmax(q @ k.T / sqrt(D)) @ v for one head, and how often an output was multiplied."""
    out, multiplied = torch.zeros_like(q), 0
    scale = q.shape[1] ** -0.5 * math.log2(math.e)
    for first in range(0, len(q), queries):
        mine = q[first : first + queries]
        seen = torch.tensor([seen_by(first + i, len(q), len(k), causal) for i in range(len(mine))])
        highest, total = torch.full((len(mine), 1), -torch.inf), torch.zeros(len(mine), 1)
        mean = torch.zeros_like(mine)
        for first_key in range(0, int(seen.max()), keys):
            score = scale * mine @ k[first_key : first_key + keys].T
            if first_key + score.shape[1] > seen.min():  # some query does not see all of these keys
                hidden = torch.arange(first_key, first_key + score.shape[1]) >= seen[:, None]
                score = score.masked_fill(hidden, -torch.inf)
            greatest = torch.maximum(highest, score.amax(1, keepdim=True))
            raised = greatest - highest > lag  # where nothing was seen yet and nothing is now: NaN, and not raised
            before, highest = highest, torch.where(raised, greatest, highest)
            subtracted = highest.masked_fill(highest == -torch.inf, 0)
            factor = torch.exp2(before - subtracted)
            weight = torch.exp2(score - subtracted)
            total = total * factor + weight.sum(1, keepdim=True)
            mean = mean * factor + weight @ v[first_key : first_key + keys]
            multiplied += int((raised & (before > -torch.inf)).sum())
            tell(first, first_key, highest[-1].item(), factor[-1].item(), total[-1].item())
        out[first : first + queries] = mean / total.masked_fill(total == 0, 1)
    return out, multiplied


q, k, v = (torch.randn(length, 64) for length in (70, 130, 130))
hidden = torch.arange(130) >= torch.tensor([seen_by(i, 70, 130, True) for i in range(70)])[:, None]
exact = torch.softmax((q.double() @ k.double().T / 8).masked_fill(hidden, -torch.inf), -1) @ v.double()
print("the last query of each block, tile by tile\nqueries   keys   greatest   factor      sum")
out, multiplied = attention_in_tiles(
    q, k, v, tell=lambda *said: print("{:7}   {:4}   {:8.3f}   {:6.4f}   {:6.3f}".format(*said))
)
late, seldom = attention_in_tiles(q, k, v, lag=8.0)
for name, found, times in (("lag 0", out, multiplied), ("lag 8", late, seldom)):
    print(f"{name}: {times:3} rows multiplied, off by {(found.double() - exact).abs().max():.1e}")
    assert torch.allclose(found.double(), exact, atol=1e-6)
assert seldom < multiplied

# %% [markdown]
# Which tiles are there at all? The mask meets in the lower right corner. Tiles above the diagonal are skipped, those on
# it are masked, and the rest, the more the longer, are compared with nothing.


# %%
def tiles(q_length, k_length, queries, keys, causal=True):
    """A row for each block of queries, in it 0 for a tile that is skipped, 1 for one that is masked, 2 for the rest."""
    kinds = torch.zeros(-(-q_length // queries), -(-k_length // keys), dtype=torch.int)
    seen = [seen_by(i, q_length, k_length, causal) for i in range(q_length)]
    for block, row in enumerate(kinds):
        mine = seen[block * queries : (block + 1) * queries]
        for tile in range(len(row)):
            row[tile] = 0 if tile * keys >= max(mine) else 1 if (tile + 1) * keys > min(mine) else 2
    return kinds


figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for axis, (q_length, k_length) in zip(axes, ((1024, 1024), (384, 1000)), strict=True):
    kinds = tiles(q_length, k_length, 128, 64)
    axis.imshow(kinds.numpy(), cmap="Blues", vmin=0, vmax=2.6, aspect="auto")
    axis.set(xlabel="tile of 64 keys", ylabel="block of 128 queries", title=f"{q_length} queries, {k_length} keys")
    axis.set(yticks=range(len(kinds)))
    masked, done = (kinds == 1).sum(), (kinds > 0).sum()
    work = done * 128 * 64 / sum(seen_by(i, q_length, k_length, True) for i in range(q_length))
    print(f"{q_length} × {k_length}: {masked} of {done} tiles masked, {work:.2f} × the work")
show("tiles")

# %% [markdown]
# ## 4. Fragments: which lane holds what
#
# `mma.m16n8k16` multiplies 16 × 16 by 16 × 8 numbers. They lie in the registers of the warp's 32 lanes, and where is
# fixed by the hardware ([mma.h](include/step2/mma.h)). With g = lane / 4 and t = lane % 4:


# %%
def a_places(lane, i):
    """Row and column of the two numbers in register `i` of operand a, i from 0 to 3."""
    g, t = divmod(lane, 4)
    row, column = g + 8 * (i % 2), 2 * t + 8 * (i // 2)
    return (row, column), (row, column + 1)


def b_places(lane, i):
    """The same of operand b, i from 0 to 1."""
    g, t = divmod(lane, 4)
    return (2 * t + 8 * i, g), (2 * t + 8 * i + 1, g)


def d_place(lane, i):
    """Row and column of number `i` of the product, i from 0 to 3."""
    g, t = divmod(lane, 4)
    return g + 8 * (i // 2), 2 * t + i % 2


def lanes_of(shape, places):
    """A matrix of the lanes that hold each place."""
    held = torch.full(shape, -1)
    for lane in range(32):
        for row, column in places(lane):
            assert held[row, column] == -1  # no place is held twice
            held[row, column] = lane
    assert (held >= 0).all()
    return held


fragments = {
    "a: 16 × 16": lanes_of((16, 16), lambda lane: [place for i in range(4) for place in a_places(lane, i)]),
    "b: 16 × 8": lanes_of((16, 8), lambda lane: [place for i in range(2) for place in b_places(lane, i)]),
    "d: 16 × 8": lanes_of((16, 8), lambda lane: [d_place(lane, i) for i in range(4)]),
}
figure, axes = plt.subplots(1, 3, figsize=(11, 5), width_ratios=(16, 8, 8), layout="constrained")
for axis, (name, held) in zip(axes, fragments.items(), strict=True):
    axis.imshow(held.numpy() % 4, cmap="Pastel1", vmin=0, vmax=8)
    for row, lanes in enumerate(held.tolist()):
        for column, lane in enumerate(lanes):
            axis.text(column, row, lane, ha="center", va="center", fontsize=7)
    axis.set(title=name, xticks=range(held.shape[1]), yticks=range(16))
    axis.tick_params(labelsize=7, length=0)
show("fragments")

# %% [markdown]
# A cell's number is the lane that holds it, its colour is t. Three things to see. A row of d lies in four neighbouring
# lanes, so its maximum takes two shuffles (`quad_max`). d and the halves of a have one pattern, so what leaves one
# product enters the next as it is: the trick of [v5_registers](kernels/attention/v5_registers.cu). And b is the same
# pattern turned, hence `ldmatrix` and, for V, `ldmatrix.trans`.

# %%
for lane in range(32):
    for n in range(2):  # two products of 8 columns make the 16 columns of the next a
        for r in range(2):
            left = [(row, column + 8 * n) for row, column in (d_place(lane, 2 * r), d_place(lane, 2 * r + 1))]
            assert left == list(a_places(lane, n * 2 + r))
print("row 5 of d is held by lanes", fragments["d: 16 × 8"][5].unique().tolist())

# %% [markdown]
# `wgmma` leaves a warp's 16 rows in that pattern again, 8 columns after the other: number i of a lane is number i % 4
# of the product i / 4 ([wgmma.h](include/step2/wgmma.h)). *Try:* which lane, and which of its numbers, holds row 9,
# column 77 of a product of 128 columns?
#
# ## 5. Banks, padding, swizzles
#
# Shared memory has 32 banks of 4 bytes, and each gives one word at a time. `ldmatrix` reads eight rows of 16 bytes
# together. Rows of 64 half-type numbers are 128 bytes long: all begin in bank 0. How often must memory be asked? What
# it gives at once is a *wavefront*.


# %%
def wavefronts(addresses, size=16):
    """How often shared memory must be asked for `size` bytes at each of these addresses: once a word of one bank."""
    words = {address // 4 + i for address in addresses for i in range(size // 4)}
    return max(collections.Counter(word % 32 for word in words).values())


def swizzled(offset):
    """Where byte `offset` of a tile with rows of 128 bytes lies: swizzled_offset in include/step2/tma.h."""
    return offset ^ ((offset >> 7 & 7) << 4)


layouts = {  # where chunk c, of 16 bytes, of row r lies
    "rows of 128 bytes": lambda r, c: 128 * r + 16 * c,
    "16 bytes longer: v3, v4": lambda r, c: 144 * r + 16 * c,
    "swizzled: v5 to v8": lambda r, c: swizzled(128 * r + 16 * c),
}
figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
for axis, (name, at) in zip(axes, layouts.items(), strict=True):
    times = {wavefronts([at(r, c) for r in range(8)]) for c in range(8)}
    assert len(times) == 1  # for each column of chunks alike
    picture = torch.zeros(8, 8)
    for r in range(8):
        for c in range(8):
            place = at(r, c) // 16 % 8  # four banks each
            picture[r, place] = c
            axis.text(place, r, c, ha="center", va="center", fontsize=8, weight="bold" if c == 0 else "normal")
    axis.imshow(picture.numpy() == 0, cmap="Oranges", vmax=2)
    axis.set(title=f"{name}\nwavefronts: {times.pop()}", xlabel="group of four banks", ylabel="row")
show("banks")

# %% [markdown]
# A number is a chunk of its row, and chunk 0 is marked. Without help the eight rows queue for the same four banks.
# Padding moves each row on by four banks, and costs an eighth of the memory. The swizzle exchanges the chunks within a
# row and costs nothing; TMA writes it, and `wgmma` reads it.
#
# v5 has rows of other lengths as well, those of 32, 64, 96 or 128 columns (`offset_of` in
# [v5_registers.cu](kernels/attention/v5_registers.cu)). Rows of 64 or 192 bytes begin in every second place only:


# %%
def offset_of(columns, row, column):
    """Where an element of a tile with so many columns lies, counted in elements."""
    turn = row % 8 if columns % 64 == 0 else row // 2 % 4
    return row * columns + ((column // 8) ^ turn) * 8 + column % 8


for columns in (32, 64, 96, 128):
    plain = {wavefronts([2 * (r * columns + c) for r in range(8)]) for c in range(0, columns, 8)}
    turned = {wavefronts([2 * offset_of(columns, r, c) for r in range(8)]) for c in range(0, columns, 8)}
    print(f"{columns:3} columns: eight rows of a chunk take {max(plain)} wavefronts, swizzled {max(turned)}")
    assert turned == {1}
assert all(2 * offset_of(64, r, c) == swizzled(2 * (64 * r + c)) for r in range(64) for c in range(64))

# %% [markdown]
# ## 6. The next tile is in flight
#
# A tile's copy takes a while to begin to arrive, the `latency`, and then a `transfer`. With one stage for a tile,
# everybody waits for it. With more stages, copies start as soon as a stage is free: `cp.async` in
# [v4_pipeline](kernels/attention/v4_pipeline.cu) has two, TMA's ring in
# [v7_warpgroups](kernels/attention/v7_warpgroups.cu) up to four. Change the numbers:


# %%
def pipeline(tiles, stages, latency, transfer, compute):
    """For each tile: when its copy starts, when it has arrived, and when computing on it begins and ends."""
    times = []
    for tile in range(tiles):
        start = times[tile - stages][3] if tile >= stages else 0.0  # its stage is free
        arrived = max(start + latency, times[-1][1] if times else 0.0) + transfer
        begin = max(arrived, times[-1][3] if times else 0.0)
        times.append((start, arrived, begin, begin + compute))
    return times


LATENCY, TRANSFER, COMPUTE = 1.0, 0.4, 1.0
figure, axes = plt.subplots(4, 1, figsize=(9, 6), sharex=True, layout="constrained")
for stages, axis in enumerate(axes, start=1):
    axis.invert_yaxis()
    for tile, (start, arrived, begin, end) in enumerate(pipeline(8, stages, LATENCY, TRANSFER, COMPUTE)):
        axis.barh(tile % stages, arrived - start, left=start, height=0.8, color=f"C{tile}", alpha=0.4)
        axis.barh(stages, end - begin, left=begin, height=0.8, color=f"C{tile}")
        axis.text((begin + end) / 2, stages, tile, ha="center", va="center", fontsize=8)
    axis.set(yticks=range(stages + 1), yticklabels=[*(f"stage {i}" for i in range(stages)), "compute"])
    a_tile = pipeline(1000, stages, LATENCY, TRANSFER, COMPUTE)[-1][3] / 1000
    expected = max(COMPUTE, TRANSFER, (LATENCY + TRANSFER + COMPUTE) / stages)
    print(f"{stages} stages: {a_tile:.2f} a tile; predicted {expected:.2f}")
    assert abs(a_tile - expected) < 0.01
axes[-1].set(xlabel="time")
show("pipeline")

# %% [markdown]
# A stage is taken from the start of a copy to the end of the computing, so a tile takes (latency + transfer + compute)
# over stages, and never less than the computing or the transfer alone. More stages than that buy nothing.
#
# The measured gain of v4 over v3 is smaller than from one stage to two: a multiprocessor holds several such blocks, and
# while one waits another computes. From `results/h200.json`:


# %%
def largest(dim):
    """The rows of attention that were measured in bfloat16 with this D, at its largest case, by implementation."""
    rows = [row for row in measured.of("attention") if row["dtype"] == "bfloat16" and row["shape"]["D"] == dim]
    return {row["impl"]: row for row in results.largest(rows)}


case = largest(64)
print(results.case_title(case["v3_mma"]))
print(f"v3_mma takes {case['v3_mma']['ms'] / case['v4_pipeline']['ms']:.2f} times as long as v4_pipeline")

# %% [markdown]
# ## 7. Turns at the tensor cores
#
# A warpgroup's tile is two products, then a softmax. While it exponentiates, the tensor cores rest, unless another
# warpgroup has its products done then. But two warpgroups that do the same at the same time share each unit, and are no
# faster than one. So [v7_warpgroups](kernels/attention/v7_warpgroups.cu) gives out turns: one multiplies, the others
# wait, and from then on one's softmax runs beside the other's products.
#
# The simulation knows two units, the tensor cores and those for exponentials. What is shared goes half as fast.


# %%
def run(groups, product, softmax, in_turns, tiles=6):
    """Who did what from when to when: (warpgroup, "products" or "softmax" or "wait", begin, end)."""
    now, spans = 0.0, []
    left = [["products", product, tiles] for _ in range(groups)]  # of each warpgroup: doing, how much, tiles to go
    queue = list(range(groups))  # who wants the tensor cores, in the order of coming
    while any(to_go for *_, to_go in left):
        speed = [0.0] * groups
        weighing = [g for g in range(groups) if left[g][0] == "softmax" and left[g][2]]
        for g in weighing:
            speed[g] = 1 / len(weighing)
        for g in queue[:1] if in_turns else queue:
            speed[g] = 1 if in_turns else 1 / len(queue)
        step = min(amount / speed[g] for g, (_, amount, _) in enumerate(left) if speed[g])
        for g, (doing, _, to_go) in enumerate(left):
            if to_go:
                spans.append((g, doing if speed[g] else "wait", now, now + step))
                left[g][1] -= step * speed[g]
        now += step
        for g, (doing, amount, to_go) in enumerate(left):
            if to_go and amount < 1e-9 and doing == "products":
                left[g] = ["softmax", softmax, to_go]
                queue.remove(g)
            elif to_go and amount < 1e-9:
                left[g] = ["products", product, to_go - 1]
                if to_go > 1:
                    queue.append(g)
    return spans


def busy(spans, product, groups, tiles=6):
    """The share of the time in which the tensor cores work."""
    return product * groups * tiles / max(end for *_, end in spans)


# %% [markdown]
# How long are both? A multiprocessor of an H200 does 4096 FLOPs of bfloat16 products a cycle
# ([NVIDIA](https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/)) and 16 exponentials
# ([CUDA basics](../docs/cuda_basics.md#what-instructions-cost)). A warpgroup's tile is 64 queries and 128 keys:

# %%
KEYS = 128
cycles = {d: (2 * 2 * 64 * KEYS * d / 4096, 64 * KEYS / 16) for d in (64, 128)}
for d, (product, softmax) in cycles.items():
    print(f"D {d:3}: both products {product:.0f} cycles, exponentials {softmax:.0f}")
PRODUCT, SOFTMAX = cycles[64]
colours = {"products": "#1f5fa8", "softmax": "#e0a030", "wait": "#eeeeee"}
ways = {"one": (1, False), "two together": (2, False), "two in turns": (2, True)}
figure, axes = plt.subplots(3, 1, figsize=(9, 4), sharex=True, height_ratios=(1, 2, 2), layout="constrained")
for axis, (name, (groups, in_turns)) in zip(axes, ways.items(), strict=True):
    spans = run(groups, PRODUCT, SOFTMAX, in_turns)
    for group, doing, begin, end in spans:
        axis.barh(group, end - begin, left=begin, color=colours[doing], height=0.8)
    axis.set(yticks=range(groups), title=f"{name}: tensor cores work {busy(spans, PRODUCT, groups):.0%}")
    axis.invert_yaxis()
axes[-1].set(xlabel="cycles: products blue, exponentials yellow", xlim=(0, None))
show("turns")

# %% [markdown]
# Beside it what was measured. v6 has no turns; v7 gives them to three warpgroups at D 64, to two at D 128; v8 has four
# without turns at D 64, and at D 128 two with. v7's 192 queries a block do not divide 1024. The prediction is a share
# of the tensor cores' time, the measurement a share of the rate of a large matrix product.

# %%
for d, (product, softmax) in cycles.items():
    for name, (groups, in_turns) in ways.items():
        share = busy(run(groups, product, softmax, in_turns, tiles=100), product, groups, tiles=100)
        print(f"D {d:3}  predicted  {name:14} {share:4.0%}")
    assert share > 0.95  # in turns
    for rung in ("v6_wgmma", "v7_warpgroups", "v8_persistent"):
        row = largest(d)[rung]
        print(f"D {d:3}  measured   {rung:14} {row['percent_of_ceiling']:4.0f}%  {results.case_title(row)}")

# %% [markdown]
# What the model leaves out: maxima, sums, conversions, barriers and waits, which a warpgroup's own chain has as well.
# [What limits v8](pages/hopper.md#what-limits-v8) tells what was tried against them.
#
# *Try:* `SOFTMAX` twice as long; three warpgroups; or let one of two begin later, by giving it less to do in its first
# tile. Do they then need turns?
#
# ## 8. Gradients: a term that is easily lost, and sums that many add to
#
# [Backward](pages/backward.md) derives them. What a score's gradient looks like with its second term, Δ, and without,
# against finite differences, in float64: move one score a little, and see how a loss changes.


# %%
def score_gradients(scores, values, grad):
    """(with Δ, without) for out = softmax(scores) @ values, where the loss changes by grad · out."""
    weights = torch.softmax(scores, -1)
    grad_weights = grad @ values.mT
    delta = (grad * (weights @ values)).sum(-1, keepdim=True)
    return weights * (grad_weights - delta), weights * grad_weights


scores, values, grad = (torch.randn(n, m, dtype=torch.float64) for n, m in ((3, 5), (5, 4), (3, 4)))
each = 1e-6 * torch.eye(scores.numel(), dtype=torch.float64).view(-1, *scores.shape)  # one score is moved at a time
up, down = ((grad * (torch.softmax(scores + by, -1) @ values)).sum((1, 2)) for by in (each, -each))
moved = ((up - down) / 2e-6).view_as(scores)
for name, found in zip(("with Δ", "without"), score_gradients(scores, values, grad), strict=True):
    print(f"{name:8} off by {(found - moved).abs().max():.0e}; a row adds up to {found.sum(-1)[0]:+.3f}")

# %% [markdown]
# Rows add up to 0 with Δ: if all scores of a row grow by the same, no weight changes.
#
# In [v7_turns](kernels/attention_backward/v7_turns.cu) blocks own 128 keys each and add to dq of 64 queries at a time,
# in the order of their keys. Eight blocks, a head's 1024 keys, begin together; a step is a tile of queries. Under the
# causal mask block n begins with the queries 128·n. When does who wait?


# %%
def walks(blocks, first_to_last):
    """For each block, what it does in each step: the number of a tile of queries, or None while it waits."""
    tiles = 2 * blocks
    left = [list(range(2 * block, tiles)) for block in range(blocks)]
    if not first_to_last:
        left = [to_do[::-1] for to_do in left]
    added = [0] * tiles  # blocks that have added to a tile: whose turn it is
    did = [[] for _ in range(blocks)]
    while any(left):
        now = added.copy()  # what others add in this step is not seen yet
        for block, to_do in enumerate(left):
            if to_do:
                turn = now[to_do[0]] == block
                did[block].append(to_do[0] if turn else None)
                if turn:
                    added[to_do.pop(0)] += 1
    return did


figure, axes = plt.subplots(2, 1, figsize=(9, 4.5), sharex=True, layout="constrained")
for axis, first_to_last in zip(axes, (True, False), strict=True):
    did = walks(8, first_to_last)
    for block, own in enumerate(did):
        for at, tile in enumerate(own):
            axis.barh(block, 1, left=at, color=colours["wait" if tile is None else "products"], edgecolor="white")
    waits = [own.count(None) for own in did]
    way = "from the first query to the last" if first_to_last else "from the last query to the first"
    axis.set(title=f"{way}: the blocks wait {', '.join(map(str, waits))} steps", yticks=range(8), ylabel="block")
    axis.invert_yaxis()
axes[-1].set(xlabel="step")
show("turns-of-blocks")

# %% [markdown]
# Only who starts behind waits, and then never again. *Try:* no mask, that is, each block walks over all tiles. And add
# in the order of the last keys first: which walk is the better one then?
#
# ## 9. Predicted and measured
#
# Softmax is bound by memory: each rung's header predicts the bytes that it moves, and a copy of as many takes so long.
# Attention is bound by arithmetic: the ceiling is a large matrix product.

# %%
show("bytes", plots.bytes_of("softmax")[0].figure())
show("ladder", plots.ladders("attention")[0].figure())  # README.md has the same picture

# %% [markdown]
# ## 10. The kernels themselves
#
# A CPU tensor with a rung's name runs that `.cu` file under emulation, tensor cores, TMA and mbarriers included. All
# rungs of attention on 70 queries and 130 keys. The greatest error is that of rounding the output, more or less. The
# share of outputs that are not the exact ones, rounded once, tells the rungs on tensor cores from the rest: they round
# the weights as well.

# %%
if steps.is_built(step):
    import step2_attention

    half = [t.bfloat16()[None, None] for t in (q, k, v)]
    score = (half[0].double() @ half[1].double().mT / 8).masked_fill(hidden, -torch.inf)
    reference = torch.softmax(score, -1) @ half[2].double()
    once = reference.bfloat16()
    rounding = (reference - once.double()).abs().max().item()
    print(f"{'exact, rounded once':20} {rounding:.1e}")
    for rung in step2_attention.rungs("attention"):
        out = step2_attention.attention(*half, causal=True, rung=rung)
        error, share = (out.double() - reference).abs().max().item(), (out != once).double().mean().item()
        print(f"{rung:20} {error:.1e}   {share:5.1%} rounded otherwise")
        assert error < 4 * rounding
else:
    print("build the step first:", steps.build_command(step))

# %% [markdown]
# What a rung asks of memory, line by line, sectors and conflicts of banks counted under emulation:
# `kernel-fusion profile softmax --device cpu`. That links the step once more, which takes some minutes.
#
# ## Next
#
# Write kernels yourself: [exercises](exercises/README.md). Then [what limits v8](pages/hopper.md#what-limits-v8).
