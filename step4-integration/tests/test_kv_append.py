"""kv_append, on every device: that it writes its rows, and nothing else."""

import functools

import pytest
import torch

import step4_integration
from kernel_fusion import testing
from step4_integration.testing import check_append, every_append, every_dtype, heads_of, on_each_device, ops


@every_append
@every_dtype
@pytest.mark.parametrize("layout", ["packed", "contiguous", "last dimension apart", "unaligned"])
def test_kv_append_writes_its_rows_and_nothing_else(layout, dtype, device, rung):
    check_append(rung, dtype, device, layout=layout)


@every_append
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["k", "v", "k_cache", "v_cache"])
def test_kv_append_finds_each_tensor_wherever_it_lies(which, dtype, device, rung):
    """Where all tensors lie alike, one's address or strides can stand for another's."""
    for layout in ("unaligned", "rows apart", "heads outermost", "contiguous"):
        check_append(rung, dtype, device, dim=16, layout={which: layout})


@every_append
@every_dtype
@pytest.mark.parametrize("dim", [8, 5])
def test_kv_append_accesses_nothing_beside_its_tensors(dim, dtype, device, rung):
    """Up to the caches' last row; k and v are read to their end."""
    k, v = (testing.randn((2, 3, 4, dim), dtype, device, seed) for seed in (1, 2))
    caches = {name: torch.zeros(2, 3, 9, dim, dtype=dtype, device=device) for name in ("k_cache", "v_cache")}
    append = functools.partial(step4_integration.kv_append, position=5, rung=rung)
    testing.check_inside(step4_integration, append, k=k, v=v, **caches)


@every_append
@pytest.mark.parametrize("far", ["batch", "heads", "positions"])
@pytest.mark.parametrize("which", ["k", "v", "k_cache", "v_cache"])
def test_kv_append_at_offsets_beyond_32_bits(which, far, device, rung):
    """One tensor whose neighbours along one dimension are 2³² elements and more apart: most of it nobody touches."""
    dim = ["batch", "heads", "positions"].index(far)
    shape = [1, 1, 1, 8]
    shape[dim] = 2
    tensors = {name: testing.randn(shape, torch.float16, device, seed) for seed, name in enumerate(("k", "v"))}
    tensors |= {name: torch.zeros(shape, dtype=torch.float16, device=device) for name in ("k_cache", "v_cache")}
    expected = [tensors["k"].clone(), tensors["v"].clone()]
    distance = (1 << 32) + 4096  # what wraps around lands where nothing is
    strides = [8, 8, 8, 1]
    strides[dim] = distance
    memory = testing.lazy_memory(distance + 4096, torch.float16, device)
    tensors[which] = memory.as_strided(shape, strides).copy_(tensors[which])
    step4_integration.kv_append(*(tensors[n] for n in ("k_cache", "v_cache", "k", "v")), 0, rung=rung)
    assert torch.equal(tensors["k_cache"], expected[0])
    assert torch.equal(tensors["v_cache"], expected[1])


@every_append
@pytest.mark.parametrize("dim", [1, 31, 33, 64, 127, 160])
def test_kv_append_of_any_head_dim(dim, device, rung):
    check_append(rung, torch.float16, device, dim=dim)


@every_append
@pytest.mark.parametrize(("length", "position", "capacity"), [(1, 0, 1), (1, 1022, 1023), (31, 2, 33), (127, 0, 128)])
def test_kv_append_from_the_first_to_the_last_row(length, position, capacity, device, rung):
    check_append(rung, torch.float32, device, batch=1, length=length, position=position, capacity=capacity)


@every_append
@every_dtype
@pytest.mark.parametrize("dim", [8, 5])
def test_each_sequence_may_be_appended_at_a_position_of_its_own(dim, dtype, device, rung):
    check_append(rung, dtype, device, batch=3, dim=dim, positions=[2, -4, 0])


@pytest.mark.parametrize("rung", step4_integration.rungs("kv_append", "cpu"))
def test_positions_outside_the_caches_are_an_error_on_the_cpu(rung):
    cache, k = torch.zeros(2, 3, 9, 8), torch.ones(2, 3, 4, 8)
    for moved, first in ((4, 6), (-3, -1), (2**31 - 1, 2**31 + 1), (-(2**31), 2 - 2**31)):
        says = (f"kv_append: `position` (2) and `positions` ({moved} at 1) put 4 tokens at {first} to {first + 3}",)
        positions = torch.tensor([0, moved], dtype=torch.int32)
        with testing.raises(ValueError, *says, "outside the 9 tokens of `k_cache`"):
            step4_integration.kv_append(cache, cache.clone(), k, k, 2, positions, rung=rung)
    assert (cache == 0).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rung", step4_integration.rungs("kv_append", "cuda"))
def test_on_a_gpu_nothing_is_written_outside_the_caches_also_by_a_cuda_graph(rung):
    caches = [torch.zeros(3, 2, 7, 16, device="cuda") for _ in range(2)]
    k = testing.randn((3, 2, 3, 16), torch.float32, "cuda")
    positions = torch.zeros(3, dtype=torch.int32, device="cuda")
    graph, _ = testing.capture(lambda: step4_integration.kv_append(*caches, k, k, 2, positions, rung=rung))
    for moved in ([3, -4, 0], [1, 2**31 - 1, -(2**31)], [-1, 5, 4]):
        for cache in caches:
            cache.zero_()
        expected = torch.zeros_like(caches[0])
        for b, first in enumerate(moved):
            for j in range(3):
                if 0 <= 2 + first + j < 7:
                    expected[b, :, 2 + first + j] = k[b, :, j]
        positions.copy_(torch.tensor(moved))
        graph.replay()
        for cache in caches:
            assert torch.equal(cache, expected)


@every_append
def test_kv_append_of_nothing_changes_nothing(device, rung):
    cache = torch.ones(1, 2, 3, 4, device=device)
    nothing = torch.empty(1, 2, 0, 4, device=device)
    step4_integration.kv_append(cache, cache.clone(), nothing, nothing, 3, rung=rung)
    assert (cache == 1).all()


def test_kv_append_needs_gradients_to_be_off():
    cache, k = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 1, 4, requires_grad=True)
    for keys, values in ((k, k), (k, k.detach()), (k.detach(), k)):
        with testing.raises(RuntimeError, "kv_append: `k` and `v` must not require gradients", "torch.no_grad()"):
            step4_integration.kv_append(cache, cache.clone(), keys, values, 0)
    with torch.no_grad():
        step4_integration.kv_append(cache, cache.clone(), k, k, 0)
    assert cache.sum() == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rung", step4_integration.rungs("kv_append", "cuda"))
def test_kv_append_on_a_stream_of_its_own_and_in_a_cuda_graph(rung):
    caches = [torch.zeros(1, 2, 8, 16, device="cuda") for _ in range(2)]
    k = torch.zeros(1, 2, 3, 16, device="cuda")
    late = testing.randn((1, 2, 3, 16), torch.float32, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        k.copy_(late)
        step4_integration.kv_append(*caches, k, k, 2, rung=rung)
    torch.cuda.synchronize()
    assert torch.equal(caches[0][:, :, 2:5], late)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step4_integration.kv_append(*caches, k, k, 5, rung=rung)
    k.copy_(late * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(caches[1][:, :, 5:8], late * 2)


# ---- the ops as torch sees them ----


@every_append
def test_kv_append_is_registered_as_torch_wants_it(device, rung):
    caches = [torch.zeros(2, 3, 9, 8, device=device) for _ in range(2)]
    _, k, v = heads_of(testing.randn((2, 4, 3, 3, 8), torch.float32, device))
    moved = torch.tensor([1, -2], dtype=torch.int32, device=device)
    for more in ((2,), (2, moved)):
        torch.library.opcheck(ops.kv_append.default, (*caches, k, v, *more), {"rung": rung})

    def append(k_cache, v_cache, k, v, position, positions=None):
        step4_integration.kv_append(k_cache, v_cache, k, v, position, positions, rung=rung)
        return k_cache.sum() + v_cache.sum()

    expected = [cache.clone() for cache in caches]
    torch.compiler.reset()
    compiled = torch.compile(append, fullgraph=True, backend="aot_eager")
    for more in ((2,), (4, moved)):
        assert compiled(*caches, k, v, *more) == append(*expected, k, v, *more)
        assert torch.equal(torch.stack(caches), torch.stack(expected))


def test_a_growing_position_compiles_once_more_and_no_further():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def function(cache, k, position):
        step4_integration.kv_append(cache[0], cache[1], k, k, position)
        return cache.sum()

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=count)
    cache, k = torch.zeros(2, 1, 2, 9, 8), torch.ones(1, 2, 1, 8)
    for position in range(9):
        assert compiled(cache, k, position) == 32 * (position + 1)
    assert len(graphs) == 2  # the first position as a constant, then one graph for every other


@on_each_device
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_no_gradient_goes_through_a_cache_that_was_appended_to(which, compiled, device):
    caches = {name: torch.zeros(1, 2, 8, 16, device=device) for name in ("k_cache", "v_cache")}
    weight = torch.ones(1, 2, 8, 16, device=device, requires_grad=True)
    k = torch.ones(1, 2, 1, 16, device=device)
    loss = (weight * caches[which]).sum()
    torch.compiler.reset()
    append = step4_integration.kv_append
    with torch.no_grad():
        (torch.compile(append, fullgraph=True, backend="aot_eager") if compiled else append)(*caches.values(), k, k, 3)
    assert k._version == 0
    with testing.raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()


@on_each_device
def test_kv_append_under_inference_mode(device):
    """Tensors of that mode have no version counters; others have, also there."""
    k = torch.ones(1, 2, 1, 16, device=device)
    normal = torch.zeros(1, 2, 8, 16, device=device)
    with torch.inference_mode():
        cache = torch.zeros(1, 2, 8, 16, device=device)
        step4_integration.kv_append(cache, normal, k, k, 3)
    assert cache.sum() == normal.sum() == 32
    assert normal._version == 1
    with testing.raises(RuntimeError, "Inplace update to inference tensor outside InferenceMode"):
        step4_integration.kv_append(cache, normal, k, k, 4)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_kv_append_refuses(device):
    k_cache, v_cache = torch.zeros(2, 3, 9, 8, device=device), torch.zeros(2, 3, 9, 8, device=device)
    k = torch.ones(2, 3, 4, 8, device=device)

    def refused(exception, *fragments, k_cache=k_cache, v_cache=v_cache, k=k, v=k, position=0, **kwargs):
        with testing.raises(exception, *fragments):
            step4_integration.kv_append(k_cache, v_cache, k, v, position, **kwargs)

    refused(TypeError, "kv_append: `k_cache` must be float32", "got int64", k_cache=k_cache.long())
    refused(ValueError, "kv_append: `k_cache` must have 4 dimensions, got 3", k_cache=k_cache[0])
    refused(ValueError, "kv_append: `v_cache` must have shape (2, 3, 9, 8), got (2, 3, 4, 8)", v_cache=k)
    refused(TypeError, "kv_append: `k` must have the dtype of `k_cache` (float32), got float16", k=k.half())
    refused(ValueError, "kv_append: `k` must have shape (2, 3, 4, 8), got (2, 2, 4, 8)", k=k[:, :2])
    refused(ValueError, "kv_append: `v` must have shape (2, 3, 4, 8), got (2, 3, 3, 8)", v=k[:, :, 1:])
    refused(ValueError, "kv_append: `position` must not be negative, got -1", position=-1)
    for position in (6, 2**63 - 1):  # to which no length can be added
        says = (f"`position` ({position})", "the length of `k` (4)", "past the caches' length 9")
        refused(ValueError, *says, position=position)
    moved = torch.zeros(2, dtype=torch.int32, device=device)
    refused(TypeError, "kv_append: `positions` must be int32, got int64", positions=moved.long())
    refused(ValueError, "kv_append: `positions` must have shape (2,), got (2, 1)", positions=moved[:, None])
    refused(ValueError, "kv_append: `position` must not be negative, got -1", positions=moved, position=-1)
    if device != "meta":
        for some in (k, k[:, :, :0]):
            refused(ValueError, "kv_append: `rung` must be 'auto' or one of", "'v9'", k=some, v=some, rung="v9")
        refused(ValueError, "stride 1 along its last dimension", k_cache=k_cache.mT.contiguous().mT)
        for dim, size in enumerate((2, 3, 9)):
            expanded = v_cache.narrow(dim, 0, 1).expand(*(size if d == dim else -1 for d in range(4)))
            says = ("`v_cache` must not be an expanded tensor", f"dimension {dim} has stride 0")
            refused(ValueError, *says, v_cache=expanded)
