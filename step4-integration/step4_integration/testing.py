"""What the tests of this step's ops share."""

import threading

import pytest
import torch
import torch.nn.functional as F

import step4_integration
from kernel_fusion import testing

DTYPES = [*testing.DTYPES, torch.float64]
NAN = float("nan")

ops = torch.ops.step4_integration
every_embedding = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step4_integration", "embedding"))
every_append = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step4_integration", "kv_append"))
on_each_device = pytest.mark.parametrize("device", testing.DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def by_threads(work, count):
    """What work(0), work(1) … return, each in a thread of its own; an error of one is raised here."""
    found = [None] * count

    def keep(number):
        try:
            found[number] = work(number)
        except RuntimeError as error:
            found[number] = error

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


# ---- embedding ----


def look_up(ids, token_weight, position_weight, positions=None, position=0):
    place = position + torch.arange(ids.shape[1], device=ids.device)
    if positions is not None:
        place = (place + positions[:, None]).clamp(min=0)
    return F.embedding(ids, token_weight) + position_weight[place]


def tables(batch, length, width, dtype, device, *, vocab=19, positions=None):
    ids = torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    token_weight = testing.randn((vocab, width), dtype, device, seed=1)
    position_weight = testing.randn((positions or length + 3, width), dtype, device, seed=2)
    return ids, token_weight, position_weight


def check_embedding(inputs, rung, position=0, **options):
    return testing.check_contract(
        step4_integration,
        "embedding",
        inputs,
        rung,
        reference=look_up,
        eager=look_up,
        kwargs={"position": position},
        **options,
    )


# ---- kv_append ----


def heads_of(packed):
    """q, k and v as GPT-2 has them: views into rows of 3·H·D."""
    return packed.permute(2, 0, 3, 1, 4)


def bits(t):
    return t.contiguous().view(torch.uint8)


def in_layout(t, layout):
    """A tensor of the same elements in other places."""
    if layout == "contiguous":
        return t.contiguous()
    if layout == "last dimension apart":
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]
    if layout == "unaligned":
        return F.pad(t.reshape(-1), (1, 0))[1:].view(t.shape)
    if layout == "rows apart":
        return F.pad(t, (0, 3))[..., : t.shape[-1]]
    if layout == "heads outermost":
        return t.transpose(0, 1).contiguous().transpose(0, 1)
    return t


def cache_in_buffer(shape, dtype, device, layout):
    """A buffer of NaN, and a cache of that layout in it."""
    batch, heads, capacity, dim = shape
    row = dim + 3 if layout == "rows apart" else dim
    strides = [heads * capacity * row, capacity * row, row, 1]
    if layout == "heads outermost":
        strides[:2] = capacity * row, batch * capacity * row
    buffer = torch.full((208 + batch * heads * capacity * row,), NAN, dtype=dtype, device=device)
    return buffer, buffer.as_strided(shape, strides, 105 if layout == "unaligned" else 104)


def check_append(
    rung, dtype, device, *, batch=2, heads=3, length=5, dim=8, capacity=11, position=4, layout="packed", positions=None
):
    """Appends once to caches cut from larger buffers; every byte that should not change is compared, NaN as NaN.

    `layout` is that of all four tensors, or, as a dictionary, of some of them: the others are packed as GPT-2's are, or
    contiguous if they are caches. `positions`, numbers, are added to `position`.
    """
    names = ("k", "v", "k_cache", "v_cache")
    layouts = layout if isinstance(layout, dict) else dict.fromkeys(names, layout)
    k, v = (
        in_layout(t, layouts.get(name, "packed"))
        for name, t in zip(
            names, heads_of(testing.randn((batch, length, 3, heads, dim), dtype, device))[1:], strict=False
        )
    )
    shape = (batch, heads, capacity, dim)
    buffers, caches = zip(
        *(cache_in_buffer(shape, dtype, device, layouts.get(n, "contiguous")) for n in names[2:]), strict=True
    )
    expected = []
    for buffer, cache, t in zip(buffers, caches, (k, v), strict=True):
        expected.append(buffer.clone())
        same = expected[-1].as_strided(shape, cache.stride(), cache.storage_offset())
        for b, moved in enumerate(positions or [0] * batch):
            same[b, :, position + moved : position + moved + length] = t[b]
    copies = [bits(t).clone() for t in (k, v)]
    before = step4_integration.launch_counts()
    moved = positions and torch.tensor(positions, dtype=torch.int32, device=device)
    step4_integration.kv_append(*caches, k, v, position, moved, rung=rung)
    after = step4_integration.launch_counts()
    backend = "gpu" if device == "cuda" else "cpu" if rung in ("auto", "cpu") else "emulated"
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {backend: 1}
    for buffer, want in zip(buffers, expected, strict=True):
        assert torch.equal(bits(buffer), bits(want))
    for t, copy in zip((k, v), copies, strict=True):
        assert torch.equal(bits(t), copy)
