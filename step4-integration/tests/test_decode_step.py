"""decode_step, on every device: a token of GPT-2 in one call."""

import functools
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F

import step4_integration
from kernel_fusion import steps, testing
from kernel_fusion.checks.repository import ROOT
from kernel_fusion.console import captured
from kernel_fusion.testing.fences import Fences
from kernel_fusion.testing.memory import relaid
from step4_integration.testing import every_dtype, on_each_device, ops

every_rung = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step4_integration", "decode_step"))
PACKED = step4_integration.PACKED_RUNGS
each_packed = pytest.mark.parametrize("rung", PACKED)
HALF = [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Model:
    """A GPT-2 of random weights, with caches of random keys for rows of the given lengths."""

    def __init__(self, dtype, device="cpu", *, width=64, heads=1, layers=2, inner=None, vocab=67, positions=24,
                 capacity=40, begin=(0,), end=(5,), seed=0):  # fmt: skip
        inner = 4 * width if inner is None else inner
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape, scale=1.0, mean=0.0):
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + mean).to(dtype).to(device)

        def norm():
            return [randn(width, scale=0.2, mean=1), randn(width, scale=0.2)]

        def product(depth, columns):
            return [randn(depth, columns, scale=depth**-0.5), randn(columns, scale=0.2)]

        self.token_weight, self.position_weight = randn(vocab, width), randn(positions, width, scale=0.5)
        self.weights = []
        for _ in range(layers):
            self.weights += [*norm(), *product(width, 3 * width), *product(width, width)]
            self.weights += [*norm(), *product(width, inner), *product(inner, width)]
        self.weights += norm()
        self.packed = {}  # by rung
        batch = len(end)
        shape = (layers, batch, heads, capacity, width // heads)
        self.k_cache, self.v_cache = randn(*shape), randn(*shape)
        self.begin = torch.tensor(begin, dtype=torch.int32, device=device)
        self.end = torch.tensor(end, dtype=torch.int32, device=device)
        self.ids = torch.randint(vocab, (batch,), generator=generator).to(device)
        for b in range(batch):  # what nobody may read
            for cache in (self.k_cache, self.v_cache):
                cache[:, b, :, : begin[b]] = math.nan
                cache[:, b, :, max(0, end[b]) :] = math.nan

    def arguments(self):
        return (self.ids, self.end, self.begin, self.token_weight, self.position_weight, self.weights, self.k_cache,
                self.v_cache)  # fmt: skip

    def step(self, rung="auto", **options):
        return step4_integration.decode_step(*self.arguments(), self.packed_for(rung), rung=rung, **options)

    def packed_for(self, rung):
        if rung in PACKED and rung not in self.packed:
            self.packed[rung] = step4_integration.decode_pack(self.token_weight, self.weights, rung=rung)
        return self.packed.get(rung)

    def rows(self, *which):
        """The same model with some of the rows, in that order."""
        part = object.__new__(Model)
        part.__dict__.update(self.__dict__)
        for name in ("ids", "end", "begin"):
            setattr(part, name, getattr(self, name)[list(which)].clone())
        part.k_cache, part.v_cache = self.k_cache[:, list(which)].clone(), self.v_cache[:, list(which)].clone()
        return part


def reference(model, *, scale=None, scale_by_layer=False, eps=1e-5, approximate="tanh"):
    """Logits, and the keys and values of the new tokens, [layers, batch, heads, head_dim], in float64 on the CPU."""
    weights = [weight.double().cpu() for weight in model.weights]
    token_weight, position_weight = model.token_weight.double().cpu(), model.position_weight.double().cpu()
    layers, batch, heads, _, dim = model.k_cache.shape
    width, begin, end = heads * dim, model.begin.tolist(), model.end.tolist()
    x = token_weight[model.ids.cpu()] + position_weight[[e - b for b, e in zip(begin, end, strict=True)]]
    new = []
    for layer in range(layers):
        ln_1, ln_1_bias, qkv, qkv_bias, projection, projection_bias, *mlp = weights[12 * layer : 12 * layer + 12]
        ln_2, ln_2_bias, fc, fc_bias, second, second_bias = mlp
        y = F.layer_norm(x, (width,), ln_1, ln_1_bias, eps)
        q, k, v = (y @ qkv + qkv_bias).view(batch, 3, heads, dim).unbind(1)
        factor = dim**-0.5 if scale is None else scale
        factor = factor / (layer + 1) if scale_by_layer else factor
        attended = []
        for b in range(batch):
            cache = [c[layer, b, :, begin[b] : end[b]].double().cpu() for c in (model.k_cache, model.v_cache)]
            keys, values = (torch.cat((old, now[b][:, None]), 1) for old, now in zip(cache, (k, v), strict=True))
            weight = (q[b][:, None] @ keys.mT * factor).softmax(-1)
            attended.append((weight @ values)[:, 0].reshape(width))
        x = x + torch.stack(attended) @ projection + projection_bias
        y = F.layer_norm(x, (width,), ln_2, ln_2_bias, eps)
        x = x + F.gelu(y @ fc + fc_bias, approximate=approximate) @ second + second_bias
        new.append((k, v))
    y = F.layer_norm(x, (width,), *weights[-2:], eps)
    return y @ token_weight.T, *(torch.stack(of) for of in zip(*new, strict=True))


def check(model, rung="auto", **options):
    """A step against the reference: logits, the caches, `end`, and nothing else written."""
    logits, k, v = reference(model, **options)
    before = [tensor.clone() for tensor in (model.k_cache, model.v_cache)]
    end = model.end.clone()
    got = model.step(rung=rung, **options)
    tolerance = TOLERANCE[got.dtype]
    most = tolerance * logits.abs().max().item()
    torch.testing.assert_close(got.double().cpu(), logits, rtol=tolerance, atol=most)
    assert torch.equal(model.end, end + 1)
    for cache, old, new in ((model.k_cache, before[0], k), (model.v_cache, before[1], v)):
        for b, slot in enumerate(end.tolist()):
            written = cache[:, b, :, slot]
            torch.testing.assert_close(written.double().cpu(), new[:, b], rtol=tolerance, atol=tolerance * 4)
            old[:, b, :, slot] = written
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))
    return got


SIZES = {"v3_persistent": ((128, 384), (768, 3072)), "v4_clusters": ((256, 640), (1600, 6400))}  # width, inner


def can(model, rung):
    weight, (_, rows, _, _, head_dim) = model.token_weight, model.k_cache.shape
    if rung in PACKED:
        # On 16 multiprocessors, and on an H200's.
        (width, inner), (most, most_inner) = SIZES[rung]
        width, inner = (most, most_inner) if weight.is_cuda else (width, inner)
        fits = weight.shape[1] <= width and model.weights[9].numel() <= inner
        return weight.dtype in HALF and rows <= most_rows(model, rung) and head_dim == 64 and fits
    return rung != "v2_dependent" or weight.dtype in HALF


def most_rows(model, rung):
    if rung != "v4_clusters":
        return 1 if rung in PACKED else step4_integration.decode_step_ops.MOST_ROWS
    return 8 if model.token_weight.shape[1] <= (768 if model.token_weight.is_cuda else 128) else 4


def check_if_it_can(model, rung, **options):
    if can(model, rung):
        check(model, rung, **options)


def as_many_as_it_takes(model, rung):
    """All rows, or the first ones."""
    return model.rows(*range(min(len(model.end), most_rows(model, rung))))


@every_rung
@every_dtype
@pytest.mark.parametrize(("width", "heads"), [(64, 1), (128, 2), (160, 2)])
def test_decode_step(width, heads, dtype, device, rung):
    check_if_it_can(Model(dtype, device, width=width, heads=heads), rung)


@every_rung
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 17, 32])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_decode_step_of_rows_of_any_lengths(rows, dtype, device, rung):
    end = [(7 * b + 3) % 23 + b for b in range(rows)]
    check_if_it_can(Model(dtype, device, width=128, heads=2, begin=range(rows), end=end, capacity=64), rung)


@every_rung
@pytest.mark.parametrize(
    "options",
    [
        {"width": 128, "heads": 16, "end": (300,), "positions": 301, "capacity": 301},  # rings go round, of keys
        {"width": 640, "heads": 8, "inner": 5120, "layers": 1, "vocab": 20},  # and of weights
        {"width": 64, "heads": 2, "layers": 1, "vocab": 2100},  # several tiles of logits a warp
        {
            "width": 128,
            "heads": 2,
            "inner": 384,
            "layers": 3,
            "vocab": 300,
            "end": (300,),
            "positions": 301,
            "capacity": 301,
        },  # heads in parts, groups of rows of the second product, several tiles of logits a block
        {
            "width": 320,
            "heads": 5,
            "inner": 960,
            "layers": 3,
            "vocab": 300,
            "end": (600,),
            "positions": 601,
            "capacity": 601,
        },  # more keys than fit into a part of a head at a time
        {
            "width": 64,
            "inner": 384,
            "layers": 3,
            "vocab": 3001,
            "end": (1000,),
            "positions": 1001,
            "capacity": 1001,
        },  # a warp's slots go round, of logits; 16 keys a warp
        {"width": 256, "heads": 4, "inner": 640, "vocab": 300, "end": (20,)},  # two heads to a cluster
        {"width": 256, "heads": 4, "inner": 640, "begin": (0, 3, 0), "end": (20, 9, 0)},  # and several rows
        {
            "width": 64,
            "begin": (0,) * 5,
            "end": (600, 3, 0, 513, 64),
            "positions": 601,
            "capacity": 601,
        },  # of a pair of rows one has more than 8 keys a warp
        {"width": 64, "inner": 80, "vocab": 20, "end": (0,), "capacity": 1, "positions": 1},  # few blocks
        {"width": 128, "heads": 1, "end": (70,), "positions": 71, "capacity": 100},  # 128 columns a head
        {"width": 72, "heads": 3, "inner": 200, "vocab": 1},  # widths that no tile divides
        {"width": 40, "heads": 5, "inner": 8, "end": (0,), "capacity": 1, "positions": 1},  # nothing before
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_decode_step_of_any_shape(options, device, rung):
    check_if_it_can(Model(torch.bfloat16, device, **options), rung)


@every_rung
@pytest.mark.parametrize(
    "options",
    [{"scale": 0.3}, {"scale": 0.0}, {"scale_by_layer": True}, {"eps": 0.5}, {"approximate": "none"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decode_step_with_options(options, dtype, device, rung):
    check_if_it_can(Model(dtype, device, width=128, heads=2, inner=640, layers=3), rung, **options)


@every_rung
def test_a_rows_logits_do_not_depend_on_the_other_rows(device, rung):
    """To the last bit, nor on how many there are, nor on their order; and neither does a second run."""
    if rung == "v3_persistent":
        model = Model(torch.bfloat16, device, end=(19,))
        again = model.rows(0)
        assert torch.equal(again.step(rung=rung), model.step(rung=rung))
        return
    model = Model(torch.bfloat16, device, width=128, heads=2, begin=range(9), end=range(3, 21, 2), capacity=30)
    model = as_many_as_it_takes(model, rung)
    model.token_weight[model.ids[4]] *= 64  # all of it is larger
    count = len(model.end)
    shuffled = [b for b in (8, 3, 5, 0, 1, 7, 2, 4, 6) if b < count]
    parts = [model.rows(*rows) for rows in (range(count), shuffled, (4, 5), (4,), range(3), range(count))]
    again, other, pair, alone, three, last = parts
    pair.k_cache[:, 1], pair.ids[1] = torch.inf, 0
    logits = model.step(rung=rung)
    assert torch.equal(again.step(rung=rung), logits)
    assert torch.equal(other.step(rung=rung), logits[shuffled])
    assert torch.equal(pair.step(rung=rung)[0], logits[4])
    assert torch.equal(alone.step(rung=rung)[0], logits[4])
    assert torch.equal(alone.k_cache[:, 0].nan_to_num(7), model.k_cache[:, 4].nan_to_num(7))
    assert torch.equal(three.step(rung=rung), logits[:3])
    assert torch.equal(last.step(rung=rung), logits)  # what the rows of a larger batch left is gone


@every_rung
def test_steps_follow_each_other(device, rung):
    """Each sees what the ones before have written."""
    heads = 1 if rung in PACKED else 2
    model = Model(torch.float16, device, width=64, heads=heads, begin=(2, 0), end=(2, 0), capacity=9)
    model = as_many_as_it_takes(model, rung)
    for _ in range(4):
        check(model, rung)


@every_rung
def test_large_residuals_lose_no_digits(device, rung):
    """A mean far from 0: the variance is no difference of large numbers."""
    model = Model(torch.float16, device, width=128, heads=2, inner=384, layers=1)
    model.position_weight += 60000
    check(model, rung)


@every_rung
def test_a_model_of_small_numbers_is_as_exact(device, rung):
    """x and all that is added to it is 2^20 times as small, which is exact, and LayerNorm's eps accordingly."""
    model, small = Model(torch.bfloat16, device), Model(torch.bfloat16, device)
    scale = 2.0**-20
    small.token_weight.mul_(scale)
    small.position_weight.mul_(scale)
    for i, weight in enumerate(small.weights[:-2]):
        if i % 12 in (4, 5, 10, 11):  # of the two c_proj
            weight.mul_(scale)
    expected = model.step(rung, eps=2.0**-17)
    assert torch.equal(small.step(rung, eps=2.0**-57) / scale, expected)


@every_rung
def test_an_infinite_weight_makes_all_logits_nan(device, rung):
    for which in (4, 10):  # of the two c_proj
        model = Model(torch.bfloat16, device)
        model.weights[which][3, 5] = math.inf
        assert model.step(rung).isnan().all()


@every_rung
def test_caches_may_be_parts_of_larger_ones(device, rung):
    """The first rows, and not the first slots: strides are those of the whole."""
    heads, rows = 1 if rung in PACKED else 2, 1 if rung == "v3_persistent" else 2
    model = Model(torch.bfloat16, device, width=64, heads=heads, end=(3, 4, 5), begin=(0, 1, 0), capacity=12)
    expected = model.rows(*range(rows)).step(rung=rung)
    for name in ("ids", "end", "begin"):
        setattr(model, name, getattr(model, name)[:rows].clone())
    model.k_cache, model.v_cache = (F.pad(c, (0, 0, 3, 1))[:, :rows, :, 3:-1] for c in (model.k_cache, model.v_cache))
    assert not model.k_cache.is_contiguous()
    check(model.rows(*range(rows)), rung)
    assert torch.equal(model.step(rung=rung), expected)
    assert (model.k_cache[:, 0, :, 3] == model.k_cache[:, 0, :, 3]).all()


@each_packed
@pytest.mark.parametrize(
    ("options", "says", "clusters_say"),
    [
        ({"dtype": torch.float32}, "takes float16 or bfloat16, got float32", None),
        ({"end": (5,) * 9, "begin": (0,) * 9}, "takes one row, got 9", "takes at most 8 rows, got 9"),
        (
            {"width": 256, "heads": 4, "inner": 640, "end": (5,) * 5, "begin": (0,) * 5},
            "takes one row, got 5",
            "takes at most 4 rows of this width, got 5",
        ),
        ({"width": 128, "heads": 1}, "takes a head_dim of 64, got 128", None),
        (
            {"width": 2368, "heads": 37, "layers": 1, "inner": 8, "vocab": 5},
            "takes a width up to 768, got 2368",
            "takes a width up to 1600, got 2368",
        ),
        (
            {"width": 320, "heads": 5, "inner": 640},
            "needs more multiprocessors for these widths than the 16 here",
            "needs room for 3 clusters of eight blocks at once, two heads each, got 2",
        ),
        (
            {"layers": 1, "inner": 3073},
            "takes an inner width up to 3072, got 3073",
            "takes an inner width up to 640, got 3073",
        ),
        (
            {"inner": 961},
            "needs more multiprocessors for these widths than the 16 here",
            "takes an inner width up to 640, got 961",
        ),
        (
            {"capacity": 1500, "positions": 1500},
            "takes at most 1408 keys before the new one, got 1499",
            "takes at most 1024 keys before the new one, got 1499",
        ),
        (
            {"width": 128, "heads": 2, "layers": 1, "inner": 384, "capacity": 1026, "positions": 1026},
            "takes at most 1024 keys before the new one, got 1025",
            None,
        ),
        ({}, "takes weights packed by decode_pack", None),
    ],
    ids=lambda of: of if isinstance(of, str) else "",
)
def test_a_token_in_one_launch_refuses(options, says, clusters_say, rung):
    options = dict(options)
    says = clusters_say or says if rung == "v4_clusters" else says
    model = Model(options.pop("dtype", torch.bfloat16), **options)
    with testing.raises(ValueError, f"rung '{rung}' {says}"):
        step4_integration.decode_step(*model.arguments(), rung=rung)
    if options.get("inner", 0) > 960:
        with testing.raises(ValueError, f"decode_pack: rung '{rung}' {says}"):
            step4_integration.decode_pack(model.token_weight, model.weights, rung=rung)


@each_packed
def test_packed_weights_are_refused_where_they_cannot_be_those(rung):
    model, other = Model(torch.bfloat16), Model(torch.bfloat16, vocab=700)
    packed = model.packed_for(rung)

    def refused(exception, *fragments, packed, model=model):
        with testing.raises(exception, *fragments):
            step4_integration.decode_step(*model.arguments(), packed, rung=rung)

    refused(TypeError, "`packed` must be uint8, got int8", packed=packed.char())
    refused(ValueError, "`packed` must have 1 dimension, got 2", packed=packed[None])
    refused(ValueError, "`packed` must be what `decode_pack` gives, got 8 bytes", packed=packed[:8])
    moved = F.pad(packed, (8, 0))[8:]
    refused(ValueError, "`packed` must begin at a multiple of 16 bytes", packed=moved)
    refused(ValueError, "this device and these shapes", f"got {len(packed)}", packed=packed, model=other)
    logits = packed[: 2 * 67].view(torch.bfloat16)[None]
    with testing.raises(ValueError, "decode_step: `packed` must not share memory with `logits`"):
        ops.decode_step.out(*model.arguments(), packed, rung=rung, logits=logits)
    # Of other shapes, or another dtype, and as many bytes.
    for options in ({"dtype": torch.bfloat16, "inner": 80}, {"dtype": torch.float16, "inner": 79}):
        alike = Model(**options, end=(3,))
        refused(ValueError, "decode_step: `packed` must be what `decode_pack` made of", "these shapes",
                packed=alike.packed_for(rung), model=Model(torch.bfloat16, inner=79))  # fmt: skip
        check(alike, rung)  # what has been refused elsewhere still is right for its own model


def test_rows_of_a_cache_begin_where_vectors_may():
    model = Model(torch.bfloat16, end=(5, 7), begin=(0, 0))
    packed, whole = model.packed_for("v4_clusters"), model.k_cache
    layers, rows, _, slots, dim = whole.shape
    apart = slots * dim + 4
    model.k_cache = torch.empty(layers * rows * apart, dtype=whole.dtype).as_strided(
        whole.shape, (rows * apart, apart, apart, dim, 1)
    )
    with testing.raises(ValueError, "takes caches whose slots are neighbours, and whose rows begin at multiples of 16"):
        step4_integration.decode_step(*model.arguments(), packed, rung="v4_clusters")
    model.k_cache = whole
    check(model, "v4_clusters")


def test_weights_packed_for_another_rung_are_refused():
    """As many bytes of them, too: what they were packed for stands in them."""
    model = Model(torch.bfloat16, vocab=700)
    sizes = {rung: len(model.packed_for(rung)) for rung in PACKED}
    for rung, other in (PACKED, PACKED[::-1]):
        packed = model.packed_for(other)
        packed = packed[: sizes[rung]] if len(packed) >= sizes[rung] else F.pad(packed, (0, sizes[rung] - len(packed)))
        with testing.raises(ValueError, "decode_step: `packed` must be what `decode_pack` made of"):
            step4_integration.decode_step(*model.arguments(), packed.clone(), rung=rung)


@each_packed
def test_decode_pack_refuses(rung):
    model, other = Model(torch.bfloat16), Model(torch.bfloat16, vocab=700)
    packed = model.packed_for(rung)

    def refused(exception, *fragments, packed=None, token_weight=other.token_weight, weights=other.weights, rung=rung):
        with testing.raises(exception, "decode_pack: ", *fragments):
            step4_integration.decode_pack(token_weight, weights, packed, rung=rung)

    refused(ValueError, "`packed` must have shape", packed=packed)
    refused(TypeError, "`packed` must be uint8, got int8", packed=packed.char())
    refused(ValueError, "`packed` must have 1 dimension, got 2", packed=packed[None])
    refused(ValueError, "`packed` must be contiguous", packed=packed[::2])
    refused(ValueError, "`packed` must be what `decode_pack` gives, got 8 bytes", packed=packed[:8])
    refused(ValueError, "`weights` must be 12 for each layer, and 2, got 25", weights=other.weights[1:])
    refused(ValueError, "`weights[2]` must have shape (64, 192)", weights=[*model.weights[:2], *model.weights[:-2]])
    refused(ValueError, "`token_weight` must be contiguous", token_weight=other.token_weight.mT.contiguous().mT)
    refused(ValueError, "`token_weight` must not be empty, got shape (0, 64)", token_weight=other.token_weight[:0])
    refused(ValueError, "`rung` must be 'v3_persistent' or 'v4_clusters', got 'auto'", rung="auto")
    refusal = functools.partial(step4_integration.decode_pack_refusal, other.token_weight, other.weights, rung=rung)
    assert refusal() == ""
    most = 1 if rung == "v3_persistent" else 8
    assert refusal(rows=most) == ""
    assert refusal(rows=9) == ("takes one row, got 9" if most == 1 else "takes at most 8 rows of this width, got 9")
    with testing.raises(ValueError, "decode_pack_refusal: `rows` must be at least 1, got 0"):
        refusal(rows=0)
    wide = Model(torch.bfloat16, layers=1, inner=3073)
    said = step4_integration.decode_pack_refusal(wide.token_weight, wide.weights, rung=rung)
    assert said == f"takes an inner width up to {3072 if rung == 'v3_persistent' else 640}, got 3073"
    empty = [torch.empty(0, dtype=torch.bfloat16) if i == 9 else weight for i, weight in enumerate(other.weights)]
    refused(ValueError, "`weights[9]` must not be empty", weights=empty)


@each_packed
def test_packed_weights_are_packed_again(rung):
    model = Model(torch.bfloat16)
    check(model, rung)
    packed = model.packed[rung]
    for weight in model.weights:
        weight.mul_(0.5)
    again = step4_integration.decode_pack(model.token_weight, model.weights, packed, rung=rung)
    assert again.data_ptr() == packed.data_ptr()
    check(model, rung)


@each_packed
def test_each_launch_numbers_its_messages_anew(rung):
    """Or it would take those of the launch before for its own, where they are in time."""
    model = Model(torch.bfloat16)
    for launches in (1, 2, 3):
        model.step(rung=rung)
        assert model.packed[rung][:4].view(torch.int32).tolist() == [launches]


@each_packed
def test_a_wait_in_vain_is_named_and_the_next_token_works(rung):
    """A launch whose state says that another block has given up."""
    model = Model(torch.bfloat16)
    model.step(rung=rung)
    state = model.packed[rung][:16].view(torch.int32)
    state[1:] = torch.tensor([2, 1, 7], dtype=torch.int32)
    end = model.end.clone()
    with testing.raises(RuntimeError, "block 7 waited in vain for q, k and v of layer 1"):
        model.step(rung=rung)
    assert torch.equal(model.end, end)
    step4_integration.decode_check(model.packed[rung])
    check(model, rung)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("layer", "rows"), [(0, 1), (1, 1), (0, 3)])
def test_sums_that_never_come_end_the_launch(layer, rows, half, device):
    """Of v4_clusters, in which then every later wait ends, too. Under emulation another block is said to have given up:
    so many polls as it takes would take minutes there."""
    model = Model(torch.bfloat16, device, layers=3, begin=(0,) * rows, end=(5,) * rows)
    model.step(rung="v4_clusters")
    packed = model.packed["v4_clusters"]
    # Shares::sums_at: two sets, of each layer and half those of 64 warps, 12 for each of 8 rows, behind 128 bytes.
    state, sums = packed[:16].view(torch.int32), packed[128:][: 2 * 3 * 2 * 64 * 8 * 12 * 8].view(torch.int64)
    assert not sums.view(2, -1)[state[0].item() % 2].any()  # they are for the next launch
    sums.view(2, 3, 2, -1)[state[0].item() % 2, layer, half] = 1  # as if a cluster more had added
    if device == "cpu":
        state[1:] = torch.tensor([1, layer, 7], dtype=torch.int32)
    with testing.raises(RuntimeError, "waited in vain for x of layer"):
        model.step(rung="v4_clusters")
        step4_integration.decode_check(packed)
    check(model, "v4_clusters")


@every_rung
def test_unaligned_tensors_are_not_for_vectors(device, rung):
    model = Model(torch.bfloat16, device, width=64)
    cache = F.pad(model.k_cache.reshape(-1), (1, 0))[1:].view(model.k_cache.shape)
    model.k_cache = cache
    if rung not in ("cpu", "v1_launches"):
        with testing.raises(ValueError, f"rung '{rung}' takes", "multiples of 16 bytes", "these can: 'v1_launches'"):
            model.step(rung=rung)
    else:
        check(model, rung)


@pytest.mark.parametrize("rung", step4_integration.rungs("decode_step", "cpu"))
def test_decode_step_accesses_nothing_beside_its_tensors(rung):
    shape = {"width": 64} if rung in PACKED else {"width": 72, "heads": 3}
    model = Model(torch.bfloat16, **shape, inner=200, layers=1, vocab=17, begin=(0, 1), end=(3, 5), capacity=6)
    names = ("ids", "end", "begin", "token_weight", "position_weight", "k_cache", "v_cache")
    model.end += torch.tensor([2, 0], dtype=torch.int32)  # both rows take the last slot
    for at_end in (True, False):
        part = as_many_as_it_takes(model.rows(0, 1), rung)
        with Fences(step4_integration, torch.device("cpu")) as fences:
            for name in names:
                setattr(part, name, relaid(fences, name, getattr(part, name), "aligned", at_end=at_end))
            part.weights = [
                relaid(fences, f"weights[{i}]", weight, "aligned", at_end=at_end)
                for i, weight in enumerate(part.weights)
            ]
            if rung in PACKED:
                packed = step4_integration.decode_pack(part.token_weight, part.weights, rung=rung)
                part.packed = {rung: relaid(fences, "packed", packed, "aligned", at_end=at_end)}
            part.step(rung=rung)
            fences.look("step4_integration")
            assert not fences.found, fences.found[0]


@pytest.mark.parametrize("rung", step4_integration.rungs("decode_step", "cpu"))
def test_a_row_without_a_place_is_an_error_on_the_cpu(rung):
    for what, options, says in (
        ("end", {"end": (3, 9), "begin": (0, 0), "capacity": 9}, "`end` (9 at 1) has reached the caches' capacity, 9"),
        ("end", {"end": (3, 9), "begin": (0, 0), "positions": 9}, "has reached the 9 rows of `position_weight`"),
        ("begin", {"end": (3, 3), "begin": (0, 4)}, "`begin` must be from 0 to `end` (3), got 4 at 1"),
        ("begin", {"end": (3, 3), "begin": (0, -1)}, "`begin` must be from 0 to `end` (3), got -1 at 1"),
    ):
        model = Model(torch.bfloat16, **(options | {"begin": (0, 0)}))
        model.begin.copy_(torch.tensor(options["begin"]))
        before = model.k_cache.clone()
        with testing.raises(ValueError, "decode_step: ", says):
            model.step(rung=rung)
        assert torch.equal(model.k_cache.nan_to_num(7), before.nan_to_num(7)), what
    for bad in (-1, 67):
        model = Model(torch.bfloat16)
        model.ids[0] = bad
        with testing.raises(ValueError, "decode_step: `ids` must be from 0 to 66", f"got {bad} at 0"):
            model.step(rung=rung)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_thousands_of_launches_give_the_same_numbers(rows):
    """Of v4_clusters and GPT-2 124M's widths. What a warp had loaded from its ring was written over before it had come,
    in one of a thousand launches of four rows: a few sums of the same layers differed."""
    model = Model(torch.bfloat16, "cuda", layers=12, width=768, heads=12, vocab=5003, positions=512, capacity=512,
                  begin=(0,) * rows, end=(500,) * rows)  # fmt: skip
    first = model.step(rung="v4_clusters")
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(6000):
        model.end.fill_(500)
        differ += (model.step(rung="v4_clusters") != first).sum()
    step4_integration.decode_check(model.packed["v4_clusters"])
    assert differ.item() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rung", step4_integration.rungs("decode_step", "cuda"))
def test_on_a_gpu_a_row_without_a_place_is_nan_and_writes_nothing(rung):
    options = {"width": 128, "heads": 2, "begin": (0, 0, 3, 0), "end": (3, 9, 5, 4), "capacity": 10}
    model = Model(torch.bfloat16, "cuda", **options)
    if rung in PACKED:
        for end, begin, token in ((10, 0, 0), (5, 6, 0), (4, 0, 67)):
            row = model.rows(0)
            row.end[0], row.begin[0], row.ids[0] = end, begin, token
            before = row.k_cache.clone()
            assert row.step(rung=rung).isnan().all()
            assert row.end.item() == (end if token == 0 else end + 1)
            assert token == 67 or torch.equal(row.k_cache.nan_to_num(7), before.nan_to_num(7))
        return
    good, _, _ = reference(model)
    model.end[1], model.begin[2] = 10, 6  # no slot; begins after its end
    model.ids[3] = 67
    before = model.k_cache.clone()
    logits = model.step(rung=rung)
    torch.testing.assert_close(logits[0].double().cpu(), good[0], rtol=0.03, atol=0.1)
    assert logits[1:].isnan().all()
    assert model.end.tolist() == [4, 10, 5, 5]
    for b in (1, 2):
        assert torch.equal(model.k_cache[:, b].nan_to_num(7), before[:, b].nan_to_num(7))
    assert model.k_cache[1, 3, :, 4].isnan().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rung", step4_integration.rungs("decode_step", "cuda"))
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_cuda_graph_replays_at_lengths_that_have_changed(rows, rung):
    model = Model(
        torch.bfloat16, "cuda", width=768, heads=12, layers=4, end=(5,) * rows, begin=(0,) * rows, positions=40,
        vocab=500,
    )  # fmt: skip
    if not can(model, rung):
        return
    eager = model.rows(*range(rows))
    start = model.end.clone()
    graph, logits = testing.capture(lambda: model.step(rung=rung))
    model.end.copy_(start)
    for _ in range(6):
        graph.replay()
        assert torch.equal(logits, eager.step(rung=rung))
        assert torch.equal(model.k_cache.nan_to_num(7), eager.k_cache.nan_to_num(7))
    assert torch.equal(model.end, start + 6)


@pytest.mark.parametrize("schedule", ["reverse", "random:1", "random:2"])
def test_emulated_threads_of_a_step_may_run_in_any_order(schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step4_integration.rungs("decode_step", "cpu"):
        shapes = [{"width": 72, "heads": 3}]
        if rung in PACKED:
            shapes = [{"width": 128, "heads": 2, "inner": 384}]
        for shape in shapes:
            model = Model(torch.bfloat16, **shape, layers=2, begin=(0, 1), end=(70, 3), positions=71, capacity=71)
            check(as_many_as_it_takes(model, rung), rung)


# ---- beside transformers ----


@on_each_device
def test_decode_step_is_transformers_gpt2(hf, device):
    hf = hf.to(device)
    inner = hf.transformer
    weights = [parameter.detach() for block in inner.h for parameter in block.parameters()]
    weights += [parameter.detach() for parameter in inner.ln_f.parameters()]
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    caches = torch.zeros(2, 2, 2, 3, 12, 32, device=device)
    end, begin = (torch.zeros(2, dtype=torch.int32, device=device) for _ in range(2))
    with torch.no_grad():
        expected = hf(ids).logits
        for i in range(ids.shape[1]):
            logits = step4_integration.decode_step(
                ids[:, i].contiguous(), end, begin, inner.wte.weight, inner.wpe.weight, weights, *caches
            )
            torch.testing.assert_close(logits, expected[:, i], rtol=1e-4, atol=1e-4)
    hf.cpu()


@pytest.mark.long
def test_a_recorded_token_is_in_order():
    """pages/token_trace.cu, which takes half a minute to compile."""
    step = steps.STEPS[-1].path
    folders = (step, *(ROOT / each / "include" for each in ("common", "step1-simple", "step2-attention")))
    command = [sys.executable, "-m", "kernel_fusion", "simt", *(f"-I{folder}" for folder in folders)]
    command += ["--compiler-flags=-DKF_BACKEND=emulated", step / "pages" / "token_trace.cu", "small"]
    done = captured(command)
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = json.loads(done.stdout)
    assert (recorded["layer"], recorded["keys"]) == (1, 5)
    assert len(recorded["blocks"]) > 1
    for block in recorded["blocks"]:
        for kind, (queries, attended, *of_product) in enumerate(block):
            assert of_product == sorted(of_product)
            assert (queries <= attended <= of_product[0]) if queries else (attended == 0)
            assert kind == 1 or not queries
        assert [product[-1] for product in block] == sorted(product[-1] for product in block)
    assert sum(block[1][0] != 0 for block in recorded["blocks"]) == 1  # a head, of few keys
    done = captured([*command, "clusters"])
    assert done.returncode == 0, done.stdout + done.stderr
    blocks = [block for [block] in json.loads(done.stdout)["blocks"]]
    assert len(blocks) == 16  # two clusters, of which the second has the head
    for number, block in enumerate(blocks):
        steps_taken = [step for step in block if step]
        assert steps_taken == sorted(steps_taken)
        assert (block[0] != 0) == (number >= 8)


# ---- the op as torch sees it ----


@every_rung
def test_decode_step_is_registered_as_torch_wants_it(device, rung):
    model = Model(torch.bfloat16, device, begin=(0, 1), end=(5, 4), capacity=9, layers=1)
    model = as_many_as_it_takes(model, rung)
    rows = range(len(model.end))
    expected = model.rows(*rows).step(rung=rung)
    packed = model.packed_for(rung)
    torch.library.opcheck(ops.decode_step.default, (*model.rows(*rows).arguments(), packed), {"rung": rung})
    logits = torch.full((len(rows), 67), torch.nan, dtype=torch.bfloat16, device=device)
    assert ops.decode_step.out(*model.rows(*rows).arguments(), packed, rung=rung, logits=logits) is logits
    assert torch.equal(logits, expected)
    torch.compiler.reset()
    compiled = torch.compile(step4_integration.decode_step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*model.arguments(), packed, rung=rung), expected)
    assert model.end.tolist() == [6, 5][: len(rows)]


@pytest.mark.parametrize("which", ["token_weight", "position_weight", "k_cache", "v_cache", "weights[3]"])
def test_decode_step_needs_gradients_to_be_off(which):
    model = Model(torch.float32)
    (model.weights[3] if which == "weights[3]" else getattr(model, which)).requires_grad_()
    name = which.split("[")[0]
    with testing.raises(RuntimeError, f"decode_step: `{name}` must not require gradients", "torch.no_grad()"):
        model.step()
    assert model.end.tolist() == [5]
    with torch.no_grad():
        model.step()
    assert model.end.tolist() == [6]


def test_no_rows_are_no_work():
    model = Model(torch.float32, begin=(), end=())
    assert model.step().shape == (0, 67)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_decode_step_refuses(device):
    def refused(exception, *fragments, rung="auto", options=None, **changed):
        model = Model(torch.float32, begin=(0, 0), end=(5, 4), capacity=9)
        for name in ("ids", "end", "begin", "token_weight", "position_weight", "k_cache", "v_cache"):
            value = changed.get(name, lambda t: t)(getattr(model, name))
            setattr(model, name, value.to(device) if value.device.type != device else value)
        model.weights = [weight.to(device) for weight in changed.get("weights", lambda w: w)(model.weights)]
        with testing.raises(exception, *fragments):
            model.step(rung=rung, **(options or {}))

    def weight(i, change):
        return lambda weights: [change(w) if i == j else w for j, w in enumerate(weights)]

    refused(TypeError, "decode_step: `token_weight` must be float32", "int64", token_weight=torch.Tensor.long)
    refused(ValueError, "`token_weight` must have 2 dimensions", token_weight=lambda t: t[0])
    refused(ValueError, "`position_weight` must have shape (24, 64), got (24, 63)", position_weight=lambda t: t[:, 1:])
    refused(TypeError, "`k_cache` must have the dtype of `token_weight`", k_cache=torch.Tensor.half)
    refused(ValueError, "`k_cache` must have 5 dimensions", k_cache=lambda t: t[0])
    refused(ValueError, "`k_cache` must have heads of 64 columns together", *[],
            k_cache=lambda t: t[..., 1:], v_cache=lambda t: t[..., 1:])  # fmt: skip
    refused(ValueError, "`v_cache` must have shape (2, 2, 1, 9, 64)", v_cache=lambda t: t[:, :1])
    refused(TypeError, "`ids` must be int64, got int32", ids=torch.Tensor.int)
    refused(TypeError, "`end` must be int32, got int64", end=torch.Tensor.long)
    refused(ValueError, "`begin` must have shape (2,), got (1,)", begin=lambda t: t[:1])
    refused(
        ValueError, "`weights` must be 12 for each of the caches' 2 layers, and 2: 26, got 25", weights=lambda w: w[1:]
    )
    refused(
        ValueError,
        "`weights[14]` must have shape (64, 192), got (192, 64)",
        weights=weight(14, lambda t: t.T.contiguous()),
    )
    refused(TypeError, "`weights[25]` must have the dtype of `token_weight`", weights=weight(25, torch.Tensor.double))
    refused(ValueError, "`scale` must be finite, got nan", options={"scale": math.nan})
    refused(ValueError, "`eps` must be finite and not negative, got -1", options={"eps": -1.0})
    refused(ValueError, "`approximate` must be 'tanh' or 'none', got 'erf'", options={"approximate": "erf"})
    many = torch.zeros(2, 33, 1, 9, 64)
    refused(ValueError, "`k_cache` must have at most 32 rows, got 33", k_cache=lambda t: many, v_cache=lambda t: many)
    none = torch.zeros(0, 2, 1, 9, 64)
    refused(ValueError, "`k_cache` must have at least one layer", k_cache=lambda t: none, v_cache=lambda t: none)
    if device == "cpu":
        refused(ValueError, "`weights[2]` must be contiguous", weights=weight(2, lambda t: t.T.contiguous().T))
        refused(ValueError, "`rung` must be 'auto' or one of", "'v9'", rung="v9")
        refused(ValueError, "`v_cache` must not be an expanded tensor: dimension 3 has stride 0",
                v_cache=lambda t: t[:, :, :, :1].expand(t.shape))  # fmt: skip
        refused(ValueError, "stride 1 along its last dimension", k_cache=lambda t: t.mT.contiguous().mT)
