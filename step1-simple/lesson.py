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
# # Step 1 as a walk: memory, fusion, dropout, gradients
#
# This notebook goes with [README.md](README.md), which explains each kernel. Here you look at what they do: which
# addresses a warp touches, how many bytes must move, what a rung gains, which elements dropout drops, and whether
# gradients are right.
#
# It runs on a CPU in less than a minute. The kernels are those of this folder, run thread by thread by the emulation:
# their results are a GPU's, their times are not. Where there is a GPU, the last cells use it. Build the step first:
# `python setup.py build_ext --inplace`.

# %%
import functools
import pathlib

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import step1_simple  # not installed? pip install -e ..
from kernel_fusion.bench.benchmarks import benchmark_kernel
from kernel_fusion.learn import pictures
from kernel_fusion.report import plots, results

here = next(p for p in (pathlib.Path.cwd(), pathlib.Path.cwd() / "step1-simple") if (p / "step1_simple").is_dir())
torch.manual_seed(0)
gpu = torch.cuda.is_available() and "v4_vector" in step1_simple.rungs("scale", "cuda")
show = functools.partial(pictures.show, here / "build" / "lesson")
print("torch", torch.__version__, "on", torch.cuda.get_device_name() if gpu else "the CPU")

# %% [markdown]
# ## 1. A warp and its sectors
#
# Memory comes in sectors of 32 bytes. The 32 lanes of a warp execute a load together, and it takes as many sectors as
# they touch. Three ways to hand out float32 elements: a chunk of 32 neighbours to each lane (`v1_chunk`), one element
# to each lane (`v2_naive`), 16 bytes to each lane (`v4_vector`):

# %%
SECTOR = 32
patterns = {"v1_chunk": (4, 32 * 4), "v2_naive": (4, 4), "v4_vector": (16, 16)}  # bytes a lane, to the next lane's


def sectors(size, apart):
    """The sectors that 32 lanes touch, each with `size` bytes, `apart` from those of the lane before."""
    return {(lane * apart + byte) // SECTOR for lane in range(32) for byte in range(size)}


for rung, (size, apart) in patterns.items():
    touched = sectors(size, apart)
    print(f"{rung:10} {len(touched):3} sectors a request, {32 * size} of {SECTOR * len(touched)} bytes used")
assert [len(sectors(*pattern)) for pattern in patterns.values()] == [32, 4, 16]
show("sectors", plots.sectors(patterns, here).figure())  # README.md has the same picture

# %% [markdown]
# v2's lanes fill 4 sectors, v4's fill 16, and v1's put 4 bytes into each of 32. v4 has no fewer sectors a byte than v2.
# It has a quarter of the instructions, and four times as much in flight.
#
# *Try:* what happens to `v2_naive` if the tensor starts 4 bytes after the edge of a sector? Let `sectors` add 4 to each
# byte, and count.

# %% [markdown]
# ## 2. The kernels themselves
#
# A CPU tensor with a rung's name runs that `.cu` file under emulation. All rungs must give the same; the contract in
# `test.py` asks much more of them.

# %%
x = torch.randn(1003)  # a multiple of nothing
for rung in step1_simple.rungs("scale"):
    y = step1_simple.scale(x, 2.5, rung=rung)
    error = (y.double() - 2.5 * x.double()).abs().max().item()
    print(f"{rung:15} off from float64 by {error:.1e}")
    assert torch.equal(y, x * 2.5)
print(step1_simple.launch_counts())

# %% [markdown]
# ## 3. Count bytes, then predict
#
# Each op here is bound by memory, or should be. So the time at best is known before anything runs: bytes over rate. The
# rate is that of a copy. Fusion halves the bytes of `bias_gelu`: the sum is not written and read again.


# %%
def bytes_of_bias_gelu(rows, width, size, fused):
    """Inputs read and outputs written: x and y once each; without fusion the sum, too, is written and read."""
    return ((2 if fused else 4) * rows * width + width) * size


for fused in (False, True):
    moved = bytes_of_bias_gelu(65536, 4096, 2, fused)
    print(
        f"{'fused' if fused else 'unfused':8} {moved / 1e9:.2f} GB, at 4.2 TB/s {1e6 * moved / 4.2e12:.0f} µs at best"
    )

# %% [markdown]
# The results file of this step holds what was measured on an H200: to the left the bytes that each rung's header
# predicts beside those that memory counted, to the right the time that these bytes take at a copy's rate beside the
# rung's.

# %%
show("bytes", plots.bytes_of("bias_gelu")[0].figure())

# %% [markdown]
# Where the times differ more than the bytes, something other than bytes takes time. There are two suspects: too little
# is *in flight*, or *instructions* are the limit. Little's law sorts out the first: bytes in flight = rate · latency.
# Both were measured. The rate is a copy's. The latency follows from the law itself, turned round, where too little was
# in flight: the last line of the second table in `results/h200-block-sizes.txt`.

# %%
MULTIPROCESSORS = 132  # of an H200
copies = results.read(here / "results" / "h200.json").ceilings["copy_gb_s"]
rate = 1e9 * copies[max(copies, key=int)]  # bytes a second, of the largest copy
second_table = (here / "results" / "h200-block-sizes.txt").read_text(encoding="utf-8").split("\n\n")[1]
last_line = second_table.splitlines()[-1].split()  # … bytes in flight, "KB", µs, GB/s
under_way, reached = 1024 * int(last_line[-4]), 1e9 * int(last_line[-1])
latency = round(1e6 * under_way * MULTIPROCESSORS / (reached / 2), 1)  # µs; half of the traffic is reads: they wait
needed = 1e-6 * latency * rate / 2 / MULTIPROCESSORS
print(f"latency {latency} µs; for {rate / 1e12:.1f} TB/s: {needed / 1024:.0f} KB on each multiprocessor")
for what, bytes_a_thread, threads in (
    ("v2, bfloat16", 2, 2048),
    ("v2, float32", 4, 2048),
    ("v4, 16 bytes", 16, 2048),
    ("v4, a quarter of the threads", 16, 512),
    ("v5, four vectors, a quarter of the threads", 64, 512),
):
    has = bytes_a_thread * threads
    print(f"{what:43} {has / 1024:4.0f} KB under way: about {min(1, has / needed):4.0%} of a copy")

# %% [markdown]
# ## 4. Fusion on the CPU at hand
#
# The plain C++ version is one pass over memory too. PyTorch's two operations are two. The ratio depends on this machine
# and on how much of the tensors its caches hold.

# %%
x, bias = torch.randn(4096, 768), torch.randn(768)
two_operations = benchmark_kernel(lambda x, bias: F.gelu(x + bias, approximate="tanh"), (x, bias), repeat=9)
one_pass = benchmark_kernel(step1_simple.bias_gelu, (x, bias), repeat=9)
print(f"PyTorch, two operations {two_operations:.2f} ms; plain C++, one pass {one_pass:.2f} ms")
assert torch.allclose(step1_simple.bias_gelu(x, bias), F.gelu(x + bias, approximate="tanh"), atol=1e-5)

# %% [markdown]
# ## 5. GELU, and the formula that is as good and shorter
#
# GPT-2's GELU approximates the exact one by tanh. The kernels write (1 + tanh u)/2 as 1/(1 + exp(−2u)): two
# instructions of the special-function unit instead of some twenty. What counts is the error *after rounding to
# bfloat16*: the grey line is half a step of bfloat16.

# %%
x = torch.linspace(-6, 6, 2001)
exact = x.double() * 0.5 * (1 + torch.tanh(0.7978845608028654 * (x.double() + 0.044715 * x.double() ** 3)))
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.plot(x, F.gelu(x), label="exact, by erf")
left.plot(x, exact, "--", label="by tanh")
left.plot(x, 100 * (exact - F.gelu(x.double())), label="difference · 100")
left.set(title="gelu")
left.legend()
half = x.bfloat16()
reference = F.gelu(half.double(), approximate="tanh")
step = 2.0**-8 * reference.abs()  # bfloat16 has 8 significant bits
right.semilogy(half.float(), step + 1e-12, color="0.7", label="half a step of bfloat16")
for rung, size in (("v2_vector", 6), ("v3_exp", 2)):
    error = (step1_simple.gelu(half, rung=rung).double() - reference).abs()
    right.semilogy(half.float(), error + 1e-12, ".", markersize=size, label=rung)
    assert (error <= 1.02 * step + 1e-7).all()
right.set(title="error against float64, bfloat16", ylim=(1e-8, 1e-1))
right.legend(loc="lower right")
show("gelu")

# %% [markdown]
# The two agree but on the far left. There 1 + tanh u is the difference of two nearly equal numbers and loses its
# digits, and the form with exp keeps them.

# %% [markdown]
# ## 6. Dropout: the mask is a function
#
# The number of element i depends on seed, offset and i alone. Here is the mask of a 32 × 96 tensor from three
# implementations, then from another offset. The first three must be equal to the last bit.


# %%
def mask(rung, p=0.3, seed=2024, offset=0, shape=(32, 96)):
    """What dropout keeps: its output where x is 1 and the rest 0."""
    one, zero = torch.ones(shape), torch.zeros(shape)
    rng_state = torch.tensor([seed, offset])
    return step1_simple.bias_dropout_residual(one, zero[0], zero, p, rng_state, rung=rung) != 0


masks = {rung: mask(rung) for rung in ("cpu", "v2_naive", "v4_any_width")}
masks["cpu, offset 4"] = mask("cpu", offset=4)
assert torch.equal(masks["cpu"], masks["v2_naive"])
assert torch.equal(masks["cpu"], masks["v4_any_width"])
assert not torch.equal(masks["cpu"], masks["cpu, offset 4"])
figure, axes = plt.subplots(4, 1, figsize=(8, 7), layout="constrained")
for axis, (name, kept) in zip(axes, masks.items(), strict=True):
    axis.imshow(kept, cmap="gray", interpolation="nearest")
    axis.set(xticks=[], yticks=[], title=f"{name}: {kept.double().mean():.1%} kept")
show("masks")

# %% [markdown]
# Is the rate right, and are rows and columns independent? A million elements, p = 0.3. The share that is kept should be
# off by not more than a few times √(p(1−p)/n); neighbours should agree as often as chance has it.

# %%
kept = mask("cpu", shape=(1000, 1000)).double()
spread = (0.3 * 0.7 / kept.numel()) ** 0.5
print(f"kept {kept.mean():.5f}, expected 0.7 ± {spread:.5f}")
assert abs(kept.mean() - 0.7) < 5 * spread
for name, a, b in (
    ("beside", kept[:, 1:], kept[:, :-1]),
    ("below", kept[1:], kept[:-1]),
    ("eight on", kept[:, 8:], kept[:, :-8]),
):
    correlation = ((a - 0.7) * (b - 0.7)).mean() / 0.21
    print(f"correlation with the element {name:8} {correlation:+.4f}")
    assert abs(correlation) < 0.006

# %% [markdown]
# Without a state given, each call draws one from PyTorch's generator. So `torch.manual_seed` repeats a run, and the
# next call draws another mask. The backward finds the same mask without having stored it: the gradient is 0 where the
# output was dropped.

# %%
x = torch.ones(64, 64, requires_grad=True)
zero = torch.zeros(64, 64)
torch.manual_seed(1)
first, second = (step1_simple.bias_dropout_residual(x, zero[0], zero, 0.5) for _ in range(2))
torch.manual_seed(1)
again = step1_simple.bias_dropout_residual(x, zero[0], zero, 0.5)
print("same seed, same mask:", torch.equal(first, again), "- next call, same mask:", torch.equal(first, second))
assert torch.equal(first, again)
assert not torch.equal(first, second)
again.sum().backward()
assert torch.equal(x.grad, again.detach())  # 2 where kept, 0 where dropped, both ways

# %% [markdown]
# ## 7. Gradients
#
# `gradcheck` compares a gradient with differences of the forward, in float64. The plain C++ version and the kernels
# both have to pass.

# %%
x, bias, residual = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5), (5,), (3, 5)))
rng_state = torch.tensor([7, 0])
checks = {
    "gelu": (step1_simple.gelu, (x,)),
    "bias_gelu": (step1_simple.bias_gelu, (x, bias)),
    "dropout": (lambda *t: step1_simple.bias_dropout_residual(*t, 0.4, rng_state), (x, bias, residual)),
}
for name, (function, inputs) in checks.items():
    print(name, torch.autograd.gradcheck(function, inputs))

# %% [markdown]
# ## 8. A sum that is the same in every run
#
# The gradient of a bias is a sum over all rows. In float32 the order matters: here is one column of 4096 numbers, added
# up in 300 random orders, one number after the other, as atomic additions would. Each bar is a result that a run may
# give.

# %%
column = torch.randn(4096) + 0.1
orders = torch.stack([torch.randperm(4096) for _ in range(300)])
sums = torch.zeros(300)
for following in orders.T:
    sums += column[following]
off = sums.double() - column.double().sum()
print(f"{len(sums.unique())} different sums, off by up to {off.abs().max():.1e}")
assert len(sums.unique()) > 10
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
axis.hist(off, bins=40)
axis.set(xlabel="sum in a random order, less the exact one", ylabel="orders")
show("orders")

# %% [markdown]
# The kernels add in two stages, each in a fixed order. Whatever order the threads run in, the bits are the same:

# %%
x = torch.randn(1000, 33)
for rung in step1_simple.rungs("column_sum"):
    runs = [step1_simple.column_sum(x, rung=rung) for _ in range(3)]
    error = (runs[0].double() - x.double().sum(0)).abs().max().item()
    print(f"{rung:13} equal bits: {torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])}, error {error:.1e}")
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])

# %% [markdown]
# `v3_vector` loads eight elements at a time from multiples of eight, also where the width is odd. The picture shows the
# groups of a matrix that is 27 wide. Colours are the place within a group of eight. Look at rows 0, 8 and 16: they are
# alike, so a thread that takes every eighth row keeps its eight columns.

# %%
WIDTH = 27
place = torch.arange(20 * WIDTH).reshape(20, WIDTH) % 8
figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
axis.imshow(place, cmap="viridis", interpolation="nearest")
for row in (0, 8, 16):
    axis.axhline(row - 0.5, color="white", linewidth=1.5)
axis.set(xlabel="column", ylabel="row", yticks=range(0, 20, 4))
show("groups")
assert torch.equal(place[0], place[8])
assert not torch.equal(place[0], place[1])

# %% [markdown]
# ## 9. With a GPU
#
# The same questions to the hardware: every rung of `scale` in bfloat16 against a copy. `benchmark_kernel` times by
# events, and empties the L2 cache before each call. Without a GPU this cell says so, and the README's tables have an
# H200's figures.

# %%
if gpu:
    x = torch.randn(1 << 27, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = benchmark_kernel(y.copy_, (x,), repeat=20)
    print(f"{'copy':15} {1e3 * copy:7.0f} µs  {2 * x.nbytes / copy / 1e6:6.0f} GB/s")
    for rung in step1_simple.rungs("scale", "cuda"):
        took = benchmark_kernel(functools.partial(step1_simple.scale, factor=2.5, rung=rung), (x,), repeat=20)
        print(f"{rung:15} {1e3 * took:7.0f} µs  {2 * x.nbytes / took / 1e6:6.0f} GB/s  {copy / took:4.0%} of a copy")
else:
    print("no GPU, or a build without CUDA kernels")

# %% [markdown]
# ## Next
#
# Write kernels yourself: [exercises](exercises/README.md). What the counters of a GPU say about a rung:
# [performance](../docs/performance.md). Then [step 2](../step2-attention/README.md).
