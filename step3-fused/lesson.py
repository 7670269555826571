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
# # Step 3 as a walk: LayerNorm, what is fused into a product's epilogue, and the product's tiles
#
# This notebook goes with [README.md](README.md), which explains each kernel. Here you look at what they do: how a mean
# far from 0 ruins a variance, what a gradient leaves out, how many bytes an epilogue saves, why a product is computed
# in tiles, and what to do where tiles are few.
#
# It runs on a CPU in less than a minute. The rules need PyTorch and no build. Where the step is built, the kernels run
# as well: `python setup.py build_ext --inplace`.

# %%
import functools
import math
import pathlib
import statistics

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from kernel_fusion import steps  # not installed? pip install -e ..
from kernel_fusion.learn import pictures
from kernel_fusion.report import plots, results

here = next(p for p in (pathlib.Path.cwd(), pathlib.Path.cwd() / "step3-fused") if (p / "step3_fused").is_dir())
torch.manual_seed(0)
step = steps.find("step3")
measured = results.read(step.path / "results" / "h200.json")
built = steps.is_built(step)
if built:
    import step3_fused
else:
    print("build the step first:", steps.build_command(step))
show = functools.partial(pictures.show, here / "build" / "lesson")
print("torch", torch.__version__, "- measured on", measured.gpu)

# %% [markdown]
# ## 1. A row, its mean and its variance
#
# LayerNorm moves each row to mean 0 and divides it by √(variance + ε). Three ways to the two numbers, in float32:


# %%
def one_pass(x):
    """The mean of x² less the square of the mean."""
    mean = x.mean(-1, keepdim=True)
    return mean, (x * x).mean(-1, keepdim=True) - mean * mean


def two_passes(x):
    """The mean, then the mean of (x − mean)²."""
    mean = x.mean(-1, keepdim=True)
    return mean, ((x - mean) ** 2).mean(-1, keepdim=True)


def normalized(x, statistics_of, eps=1e-5):
    """Rows as LayerNorm has them, without weight and bias."""
    mean, variance = statistics_of(x)
    return (x - mean) / (variance + eps).sqrt()


def normalized_with_rest(x, eps=1e-5):
    """As in include/step3/statistics.h: the second pass also finds by how much the mean was rounded."""
    mean = x.mean(-1, keepdim=True)
    off = x - mean
    rest = off.mean(-1, keepdim=True)
    return (off - rest) / ((off * off).mean(-1, keepdim=True) - rest * rest + eps).sqrt()


ways = {
    "one pass": lambda x: normalized(x, one_pass),
    "two passes": lambda x: normalized(x, two_passes),
    "two passes and the rest of the mean": normalized_with_rest,
}
x = torch.randn(64, 768)
for name, way in ways.items():
    print(f"{name:36} off from float64 by {(way(x).double() - normalized(x.double(), two_passes)).abs().max():.1e}")

# %% [markdown]
# Around 0 they are alike. Now the same rows, moved away from 0:


# %%
def error_around(mean, way):
    """The greatest error of y for rows with this mean and a spread of 1; a variance below 0 gives NaN: all is lost."""
    x = torch.randn(64, 768, generator=torch.Generator().manual_seed(1)) + mean
    return (way(x).double() - normalized(x.double(), two_passes)).abs().nan_to_num(math.inf).max().item()


means = [10 ** (i / 4) for i in range(25)]
figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
for name, way in ways.items():
    errors = [min(error_around(mean, way), 10.0) for mean in means]
    axis.loglog(means, errors, ".-", label=name)
axis.set(xlabel="mean of a row, its spread is 1", ylabel="greatest error of y (cut at 10)", ylim=(1e-7, 20))
axis.legend()
show("large_mean")
assert error_around(1e4, ways["one pass"]) > 0.1
assert error_around(1e4, normalized_with_rest) < 1e-5

# %% [markdown]
# Beside a mean of 10,000 the square is 10⁸, and a float has steps of 8 there: the variance, 1, is gone. With two passes
# what remains is the mean's own rounding. Where that counts, the third way has it.
#
# *Try:* a spread of 0.01. Where do the first two fail now? The figure that decides is mean / spread.

# %% [markdown]
# ## 2. One pass that is exact
#
# A block, a warp or a thread can have a part of a row, if parts can be merged. Three numbers are enough: how many,
# their mean, and the sum of the squares of x − mean. The formula is Chan's, Golub's and LeVeque's. Their means differ,
# and that adds to the squares.


# %%
def merged(a, b):
    """The group (count, mean, squares) of all numbers of two groups."""
    count = a[0] + b[0]
    if count == 0:
        return a
    apart, share = b[1] - a[1], b[0] / count
    return count, a[1] + apart * share, a[2] + b[2] + apart * apart * a[0] * share


numbers = [10000.0, 10001.0, 10002.0, 10007.0, 9995.0]
group = (0, 0.0, 0.0)
for number in numbers:
    group = merged(group, (1, number, 0.0))  # a number is a group of one
    print(f"{number:8} → {group[0]} numbers, mean {group[1]:9.3f}, variance {group[2] / group[0]:6.3f}")
assert math.isclose(group[2] / group[0], statistics.pvariance(numbers))

# %% [markdown]
# ## 3. What the gradient leaves out
#
# LayerNorm does not notice when a row grows by a constant, nor (ε aside) when x − mean grows by a factor. So its
# gradient has nothing in these two directions. With g = grad · weight and x̂ the normalised row:
#
#     grad_x = rstd · (g − average of g − x̂ · average of g·x̂)


# %%
def row_gradient(grad, x, weight, eps=1e-5):
    """The gradient of x, of each row from its two averages."""
    mean, variance = two_passes(x)
    rstd = 1 / (variance + eps).sqrt()
    x_hat, g = (x - mean) * rstd, grad * weight
    return rstd * (g - g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))


x, grad, weight = torch.randn(16).double(), torch.randn(16).double() + 1, torch.rand(16).double() + 0.5
x.requires_grad_()
(by_autograd,) = torch.autograd.grad(F.layer_norm(x, (16,), weight), x, grad)
x = x.detach()
dx, x_hat = row_gradient(grad, x, weight), normalized(x, two_passes)
print(f"the sum of dx is {dx.sum():.1e}, that of dx · x̂ {(dx * x_hat).sum():.1e}")
assert torch.allclose(dx, by_autograd)
assert abs(dx.sum()) < 1e-12
g = grad * weight
parts = {"g": g, "average of g": g.mean().expand(16), "x̂ · average of g·x̂": x_hat * (g * x_hat).mean()}
parts["what is left"] = g - parts["average of g"] - parts["x̂ · average of g·x̂"]
figure, axes = plt.subplots(1, 4, figsize=(10, 2.4), layout="constrained", sharey=True)
for axis, (name, values) in zip(axes, parts.items(), strict=True):
    axis.bar(range(16), values.tolist())
    axis.set(title=name, xticks=[])
show("gradient")

# %% [markdown]
# The gradients of weight and bias go the other way, down the columns: `(grad · x̂).sum(0)` and `grad.sum(0)`. All rows
# of all blocks add to them, so they come in two stages, each in a fixed order. The kernels, on rows around 1000:

# %%
if built:
    x, weight, bias = torch.randn(200, 96) + 1000, torch.rand(96) + 0.5, torch.randn(96)
    exact = F.layer_norm(x.double(), (96,), weight.double(), bias.double())
    for rung in step3_fused.rungs("layer_norm"):
        y, mean, rstd = step3_fused.layer_norm(x, weight, bias, rung=rung, return_statistics=True)
        print(f"layer_norm          {rung:14} off by {(y.double() - exact).abs().max():.1e}")
        assert (y.double() - exact).abs().max() < 1e-5
    grad = torch.randn(200, 96)
    expected = row_gradient(grad.double(), x.double(), weight.double())
    for rung in step3_fused.rungs("layer_norm_backward"):
        one, two = (step3_fused.layer_norm_backward(grad, x, weight, mean, rstd, rung=rung) for _ in range(2))
        same = all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        print(f"layer_norm_backward {rung:14} off by {(one[0].double() - expected).abs().max():.1e}, same bits: {same}")
        assert same

# %% [markdown]
# What the three rungs of the backward pass take on a GPU, as measured:

# %%
show("ladder", plots.ladders("layer_norm_backward")[0].figure())  # README.md has the same picture

# %% [markdown]
# ## 4. What an epilogue saves
#
# GPT-2's MLP begins with `gelu(x @ weight + bias)`. Apart, the product writes h = x @ weight + bias, and GELU reads it
# and writes y. In one kernel GELU is applied to the sums while they are in registers. h is written all the same where
# the backward pass needs it.


# %%
def bytes_of_linear_gelu(rows, depth, width, size, fused, keep):
    """Inputs read and outputs written, each once; not fused, h is written and read, kept or not."""
    inputs = rows * depth + depth * width + width
    outputs = (1 + keep if fused else 3) * rows * width
    return (inputs + outputs) * size


product_rate = 1e12 * measured.ceilings["matmul_tflop_s"]  # operations a second, of a large product
copies = measured.ceilings["copy_gb_s"]
copy_rate = 1e9 * copies[max(copies, key=int)]  # bytes a second
rows, depth, width = 16384, 768, 3072
work = 2 * rows * depth * width
print(f"the product: {work / 1e9:.0f} GFLOP, {1e6 * work / product_rate:.0f} µs at best")
for name, fused, keep in (("two kernels", False, True), ("fused, h kept", True, True), ("fused", True, False)):
    moved = bytes_of_linear_gelu(rows, depth, width, 2, fused, keep)
    print(f"{name:14} {moved / 1e6:4.0f} MB, {1e6 * moved / copy_rate:3.0f} µs at a copy's rate")

# %% [markdown]
# What is saved is 2·rows·width elements, or one time rows·width where h is kept, whatever the depth is. The product's
# work grows with the depth. So their ratio does not depend on rows and width at all:


# %%
def pass_over_product(depth, trips, size=2):
    """The time of `trips` passes over the outputs, relative to a product of that depth; both at best."""
    return (trips * size / copy_rate) / (2 * depth / product_rate)


depths = [2**i for i in range(6, 15)]
figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for trips, name in ((2, "h not kept: two trips saved"), (1, "h kept: one trip saved")):
    axis.loglog(depths, [100 * pass_over_product(depth, trips) for depth in depths], ".-", label=name)
for depth in (768, 3072):
    axis.axvline(depth, color="0.7", linewidth=1)
    axis.text(depth, 1.1, f" {depth}", color="0.4")
axis.set(xlabel="depth of the product", ylabel="saved, % of the product's time", ylim=(1, 1000))
axis.legend()
show("epilogue")
for depth in (768, 3072, 12288):
    print(f"depth {depth:5}: two trips cost {pass_over_product(depth, 2):4.0%} of the product")
assert math.isclose(pass_over_product(768, 2), 16 * pass_over_product(12288, 2))

# %% [markdown]
# At GPT-2's width an epilogue saves a good part, in a model whose width is 12,288 a few per cent. This is at best:
# while an epilogue computes, the tensor cores must have something else to do, or it costs what it saves. The kernels:

# %%
if built:
    x, weight, bias = torch.randn(70, 96).bfloat16(), torch.randn(96, 136).bfloat16(), torch.randn(136).bfloat16()
    h = x.double() @ weight.double() + bias.double()
    exact = F.gelu(h, approximate="tanh")
    for rung in ("v1_separate", "v2_mma", "v3_hopper"):
        y = step3_fused.linear_gelu(x, weight, bias, rung=rung)
        print(f"linear_gelu {rung:12} off by {(y.double() - exact).abs().max():.1e}")
        assert torch.allclose(y.double(), exact, rtol=2e-2, atol=2e-2)

# %% [markdown]
# ## 5. Tiles: arithmetic for each byte
#
# An element of x is needed for each column of the weight, one of the weight for each row of x. A block that computes a
# tile of outputs fetches each of its elements once. The larger the tile, the more products it makes of them:


# %%
def product_in_tiles(x, weight, tile_rows, tile_columns):
    """The product, tile by tile, and how many elements all tiles together have fetched."""
    rows, width = x.shape[0], weight.shape[1]
    y, fetched = torch.empty(rows, width, dtype=x.dtype), 0
    for row in range(0, rows, tile_rows):
        for column in range(0, width, tile_columns):
            of_x, of_weight = x[row : row + tile_rows], weight[:, column : column + tile_columns]
            fetched += of_x.numel() + of_weight.numel()
            y[row : row + tile_rows, column : column + tile_columns] = of_x @ of_weight
    return y, fetched


def flop_a_byte(tile_rows, tile_columns, size):
    """Of what a tile fetches: two operations for each product."""
    return 2 * tile_rows * tile_columns / ((tile_rows + tile_columns) * size)


x, weight = torch.randn(256, 64).double(), torch.randn(64, 512).double()
for tile in ((1, 1), (32, 32), (128, 128), (128, 256), (256, 256)):
    y, fetched = product_in_tiles(x, weight, *tile)
    each = 2 * 256 * 64 * 512 / (fetched * 2)
    print(f"tiles of {tile[0]:3} × {tile[1]:3}: {fetched:9} elements, {each:5.1f} FLOP a byte in bfloat16")
    assert torch.allclose(y, x @ weight)
    assert math.isclose(each, flop_a_byte(*tile, 2))

# %% [markdown]
# How much is enough? As much as the machine has: operations a second over bytes a second. The same question comes again
# inside a multiprocessor, between shared memory and registers. There a thread's tile of outputs is what counts: e × e
# sums need 2·e reads for e × e products. A multiprocessor reads 128 bytes a cycle from shared memory and does 256
# operations of float32, so it takes 2 FLOP a byte:

# %%
enough = product_rate / copy_rate
edges = [2**i for i in range(10)]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
left.loglog(edges, [flop_a_byte(edge, edge, 2) for edge in edges], ".-")
left.axhline(enough, color="0.6", linestyle="--")
left.text(1, 1.15 * enough, f"{measured.gpu}, if all came from memory: {enough:.0f}", color="0.4")
for edge, rung in ((1, "no tile"), (32, "v2"), (128, "v3 to v6")):
    left.annotate(rung, (edge, flop_a_byte(edge, edge, 2)), xytext=(6, -10), textcoords="offset points")
left.set(title="a block's tile, bfloat16", xlabel="edge", ylabel="FLOP a byte fetched", ylim=(0.3, 600))
right.loglog(edges[:5], [flop_a_byte(edge, edge, 4) for edge in edges[:5]], ".-")
right.axhline(2, color="0.6", linestyle="--")
right.text(1, 2.2, "float32, without tensor cores: 2", color="0.4")
for edge, rung in ((1, "v2"), (8, "v3")):
    right.annotate(rung, (edge, flop_a_byte(edge, edge, 4)), xytext=(6, -10), textcoords="offset points")
right.set(title="a thread's tile, float32", xlabel="edge", ylabel="FLOP a byte of shared memory", ylim=(0.15, 6))
show("tiles")
assert flop_a_byte(8, 8, 4) == 2
print(f"enough from memory: {enough:.0f} FLOP a byte; tiles of 128 × 256 have {flop_a_byte(128, 256, 2):.0f}")

# %% [markdown]
# No rung's tile is large enough for memory. It need not be: neighbouring blocks fetch the same rows and columns at
# about the same time, so most of it comes from the L2 cache. Their order sees to that.
#
# *Try:* why not tiles of 512 × 512? Count the sums: each is a register of 32 bits, and a multiprocessor has 65,536.

# %% [markdown]
# ## 6. Too few tiles
#
# An H200 has 132 multiprocessors. 133 tiles take as long as 264: the last one runs alone. How much of the machine
# works, with tiles of 128 × 256:

# %%
MULTIPROCESSORS = 132


def busy(tiles, blocks=MULTIPROCESSORS):
    """The share of multiprocessors at work, if each has one tile at a time and all take equally long."""
    return tiles / (math.ceil(tiles / blocks) * blocks)


def tiles_of(rows, width, tile_rows=128, tile_columns=256):
    """How many tiles a product's outputs are."""
    return math.ceil(rows / tile_rows) * math.ceil(width / tile_columns)


def width_of_tiles(rows, depth, width, tile_rows=64, tile_depth=64, fewest_columns=96, round_cost=1600):
    """How wide v9_split's tiles are: so that the multiprocessor with most of them is done first."""

    def busiest(columns):
        rounds = math.ceil(tiles_of(rows, width, tile_rows, columns) / MULTIPROCESSORS)
        return rounds * (math.ceil(depth / tile_depth) * max(columns, fewest_columns) + round_cost)

    return min((64, 128, 192, 256), key=busiest)


cases = {
    "MLP, forward": (16384, 768, 3072),
    "projection, forward": (16384, 768, 768),
    "gradient of its weight": (768, 16384, 768),
    "64 tokens, up": (64, 768, 3072),
    "64 tokens, down": (64, 3072, 768),
}
figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
counts = range(1, 900)
axis.plot(counts, [100 * busy(count) for count in counts], linewidth=1)
for name, (rows, depth, width) in cases.items():
    tiles, columns = tiles_of(rows, width), width_of_tiles(rows, depth, width)
    smaller = tiles_of(rows, width, 64, columns)
    print(f"{name:23} {tiles:4} tiles: {busy(tiles):4.0%} busy; {smaller:4} of 64 × {columns}: {busy(smaller):4.0%}")
    if tiles < counts.stop:
        axis.plot(tiles, 100 * busy(tiles), "o", color="C1")
        below = -8 if depth == 768 else 2
        axis.annotate(name, (tiles, 100 * busy(tiles)), xytext=(6, below), textcoords="offset points")
axis.set(xlabel="tiles", ylabel="% of multiprocessors busy", ylim=(0, 105))
show("waves")
assert tiles_of(768, 768, 64, width_of_tiles(768, 16384, 768)) == 72

# %% [markdown]
# The gradient of a weight has few outputs and a depth of all tokens. So `linear`'s v9_split makes tiles smaller, and a
# block's two warpgroups share the depth of each. Of few rows and a deep weight not even that is enough: v10_rows gives
# a tile to a cluster, of up to eight blocks. They add up what each has found. In a fixed order: here are
# the results that eight parts may give, if each adds to a float whenever it comes.

# %%
x, weight = torch.randn(16384), torch.randn(16384)
parts = (x * weight).reshape(8, -1).sum(1)
sums = torch.zeros(300)
for following in torch.stack([torch.randperm(8) for _ in range(300)]).T:
    sums += parts[following]
values, counts = sums.unique(return_counts=True)
print(f"{len(values)} different results of the same eight numbers")
assert len(values) > 1
figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
axis.stem((values.double() - parts.double().sum()).tolist(), counts.tolist(), basefmt=" ")
axis.set(xlabel="sum in a random order, less the exact one", ylabel="orders")
show("orders")

# %% [markdown]
# The rungs of step 2's `linear` on a product that no tile divides. All add up in float32 and round once, so all are as
# exact as bfloat16 is, and each gives the same bits twice:

# %%
if steps.is_built(steps.find("step2")):
    import step2_attention

    x, weight, bias = torch.randn(70, 96).bfloat16(), torch.randn(96, 136).bfloat16(), torch.randn(136).bfloat16()
    exact = x.double() @ weight.double() + bias.double()
    rounding = (exact.bfloat16().double() - exact).abs().max().item()
    for rung in step2_attention.rungs("linear"):
        if rung in ("v11_gemv", "v12_cublaslt"):
            continue  # for four rows at most; NVIDIA's library, on a GPU
        y, again = (step2_attention.linear(x, weight, bias, rung=rung) for _ in range(2))
        error = (y.double() - exact).abs().max().item()
        print(f"{rung:14} off by {error:.3f}, of which rounding {rounding:.3f}; same bits: {torch.equal(y, again)}")
        assert error < 1.1 * rounding
        assert torch.equal(y, again)
    print(step2_attention.launch_counts())

# %% [markdown]
# ## Next
#
# Write kernels yourself: [exercises](exercises/README.md). Then [step 4](../step4-integration/README.md): all of this
# in GPT-2.
