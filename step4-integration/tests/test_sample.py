"""sample: the same token from every rung, and the one that transformers' processors and Philox's number name."""

import functools

import pytest
import torch
from transformers.generation import logits_process

import step4_integration
from kernel_fusion import testing
from kernel_fusion.testing.philox import philox
from step4_integration.testing import NAN, every_dtype, on_each_device, ops

every_sample = pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step4_integration", "sample"))
INF = float("inf")
# What leaves tokens out, one by one and together.
WAYS = [
    {},
    {"temperature": 0.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_k": 300, "top_p": 0.6},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
    {"top_p": 0.5, "repetition_penalty": 0.7},
]


def rng_state(batch, device, seed=5):
    """A seed and an offset for each row, some of them beyond 32 bits."""
    rows = torch.arange(batch)
    return torch.stack([(rows << 33) + seed, (rows << 31) + 7], 1).to(device)


def marks(batch, width, device, dtype=torch.bool):
    return (torch.rand(batch, width, generator=torch.Generator().manual_seed(3)) < 0.3).to(device, dtype)


def probabilities(
    logits, seen=None, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, rung=None
):
    """What is drawn from, in float64: equals are kept together or not at all."""
    scores = logits.double()
    if seen is not None:
        penalised = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
        scores = torch.where(seen.bool(), penalised, scores)
    scores = scores / temperature
    if 0 < top_k < scores.shape[1]:
        scores = scores.masked_fill(scores < scores.topk(top_k)[0][:, -1:], -INF)
    if top_p < 1:
        in_order, _ = scores.softmax(1).sort(descending=True)
        reached = in_order.cumsum(1) >= top_p
        last = in_order.gather(1, reached.int().argmax(1, keepdim=True))
        scores = scores.masked_fill(scores.softmax(1) < last * (1 - 1e-9), -INF)
    relative = (scores - scores.amax(1, keepdim=True)).exp()
    return scores.masked_fill(relative < min_p * (1 - 1e-9), -INF).softmax(1)


def named_tokens(logits, state, seen=None, **way):
    """The first column at which the probabilities of it and those before it exceed the row's random number."""
    numbers = []
    for seed, offset in state.tolist():
        low, high, *_ = philox(seed, offset, torch.zeros(1, dtype=torch.int64))
        numbers.append((low.item() + (high.item() << 32)) / 2**64)
    reached = probabilities(logits.cpu(), None if seen is None else seen.cpu(), **way).cumsum(1)
    return (reached <= torch.tensor(numbers, dtype=torch.float64)[:, None]).sum(1)


def greedy(logits, temperature=0.0):
    return logits.argmax(1), logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1).amax(1).to(
        torch.float64 if logits.dtype == torch.float64 else torch.float32
    )


def check_greedy(logits, rung, **options):
    def eager(logits, temperature):
        token, log_prob = greedy(logits)
        return token, log_prob.float()

    return testing.check_contract(
        step4_integration,
        "sample",
        (logits,),
        rung,
        reference=greedy,
        eager=eager,
        kwargs={"temperature": 0.0},
        **options,
    )


# ---- greedy ----


@every_sample
@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (2, 31), (3, 33), (5, 127), (2, 768), (1, 1023), (2, 4097)], ids=str)
def test_greedy_is_the_likeliest_token(shape, dtype, device, rung):
    check_greedy(testing.randn(shape, dtype, device, scale=3), rung, layouts=shape[1] < 1000)


@every_sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_finds_logits_wherever_they_lie(dtype, device, rung):
    check_greedy(testing.randn((3, 40), dtype, device), rung, alone=True)


@every_sample
@every_dtype
def test_the_first_among_equals_is_taken(dtype, device, rung):
    """At whatever thread, warp and block it lies: the others are as great. −0 is 0."""
    width = 4200
    first = torch.tensor([0, 1, 31, 32, 255, 256, 1023, 1024, 4095, 4096, 4199], device=device)
    logits = torch.full((len(first), width), -1.0, dtype=dtype, device=device)
    logits[torch.arange(width, device=device) >= first[:, None]] = 0.0
    logits[torch.arange(len(first)), first] = -0.0
    token, log_prob = step4_integration.sample(logits, temperature=0.0, rung=rung)
    assert torch.equal(token, first)
    torch.testing.assert_close(log_prob.double(), logits.double().log_softmax(1).amax(1), rtol=1e-6, atol=1e-6)


# ---- drawn ----


@every_sample
@every_dtype
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("scale", [4.0, 0.01])
def test_the_number_names_the_token(scale, way, dtype, device, rung):
    """A flat distribution has many tokens near every threshold, and in half types many that are equal."""
    batch, width = 24, 700
    logits = testing.randn((batch, width), dtype, device, scale=scale)
    seen = marks(batch, width, device) if "repetition_penalty" in way else None
    state = rng_state(batch, device)
    expected = named_tokens(logits, state, seen, **way)
    token, log_prob = step4_integration.sample(logits, state, seen, rung=rung, **way)
    assert torch.equal(token.cpu(), expected)
    wanted = logits.double().log_softmax(1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(log_prob.double(), wanted, rtol=1e-6, atol=1e-6)


@every_sample
@every_dtype
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_rung_takes_the_same_token(way, dtype, device, rung):
    """And leaves the same behind, to the last bit: as plain C++ on a CPU, in rows that one block and several share."""
    for width, scale in ((1, 1.0), (33, 3.0), (1000, 0.02), (4500, 0.2)):
        logits = testing.randn((3, width), dtype, "cpu", seed=width, scale=scale)
        results = []
        for where, by in (("cpu", "cpu"), (device, rung)):
            state, seen = rng_state(3, where), marks(3, width, where)
            token, log_prob = step4_integration.sample(logits.to(where), state, seen, rung=by, **way)
            results.append([t.cpu() for t in (token, state, seen, log_prob)])
        for ours, theirs in zip(*(r[:3] for r in results), strict=True):
            assert torch.equal(ours, theirs), f"width {width}"
        torch.testing.assert_close(results[0][3], results[1][3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_is_kept_is_what_transformers_keeps(way):
    """Of scores that all differ; where some are equal, transformers' top_p keeps those that its sort puts first."""
    logits, seen = testing.randn((8, 500), torch.float32, "cpu", scale=3), marks(8, 500, "cpu")
    way = {"temperature": 1.0, "repetition_penalty": 1.0} | way
    processors = [
        ("repetition_penalty", logits_process.RepetitionPenaltyLogitsProcessor),
        ("temperature", logits_process.TemperatureLogitsWarper),
        ("top_k", logits_process.TopKLogitsWarper),
        ("top_p", logits_process.TopPLogitsWarper),
        ("min_p", logits_process.MinPLogitsWarper),
    ]
    for row in range(8):
        ids, scores = seen[row].nonzero().T, logits[row : row + 1].double()
        for name, processor in processors:
            if name in way:
                scores = processor(way[name])(ids, scores)
        ours = probabilities(logits[row : row + 1], seen[row : row + 1], **way)
        torch.testing.assert_close(ours, scores.softmax(1), rtol=1e-12, atol=0)


@on_each_device
def test_tokens_come_as_often_as_they_are_likely(device):
    """20,000 draws of one row, which lies in memory once: χ² of 19 degrees of freedom is below 43.8 in 999 of 1000."""
    logits = testing.randn((1, 50), torch.float32, device, scale=2)
    way = {"temperature": 1.2, "top_k": 20}
    state = torch.stack([torch.full((20000,), 11), torch.arange(20000)], 1).to(device)
    token, _ = step4_integration.sample(logits.expand(20000, 50), state, **way)
    expected = 20000 * probabilities(logits, **way)[0]
    found = torch.bincount(token, minlength=50).double()
    assert (found[expected == 0] == 0).all()
    kept = expected > 0
    assert kept.sum() == 20
    assert ((found - expected).square() / expected)[kept].sum() < 43.8


@every_sample
def test_a_row_is_drawn_alike_whatever_is_beside_it(device, rung):
    logits, state = testing.randn((5, 900), torch.bfloat16, device, scale=3), rng_state(5, device)
    together, _ = step4_integration.sample(logits, state.clone(), top_k=50, top_p=0.9, rung=rung)
    for row in range(5):
        own = slice(row, row + 1)
        alone, _ = step4_integration.sample(logits[own], state[own].clone(), top_k=50, top_p=0.9, rung=rung)
        assert torch.equal(alone, together[own])


@on_each_device
def test_many_rows_are_drawn_alike_by_smaller_clusters(device):
    logits, state = testing.randn((140, 4200), torch.float32, "cpu", scale=3), rng_state(140, "cpu")
    expected, _ = step4_integration.sample(logits, state.clone(), top_k=50, rung="cpu")
    token, _ = step4_integration.sample(logits.to(device), state.to(device), top_k=50, rung="v3_cluster")
    assert torch.equal(token.cpu(), expected)


@every_sample
def test_each_draw_counts_the_offset_up(device, rung):
    logits, state = testing.randn((4, 300), torch.float32, device), rng_state(4, device)
    state[3, 1] = 2**63 - 1  # and on from the least number
    begin = state.clone()
    tokens = []
    for count in range(1, 6):
        tokens.append(step4_integration.sample(logits, state, rung=rung)[0])
        assert torch.equal(state[:, 0], begin[:, 0])
        assert torch.equal(state[:, 1], begin[:, 1] + count)
    assert len({tuple(t.tolist()) for t in tokens}) == 5
    step4_integration.sample(logits, state, temperature=0.0, rung=rung)
    assert torch.equal(state[:, 1], begin[:, 1] + 5)
    again, _ = step4_integration.sample(logits, begin, rung=rung)
    assert torch.equal(again, tokens[0])


# ---- extremes ----


@every_sample
@every_dtype
def test_a_tiny_temperature_is_greedy(dtype, device, rung):
    logits = testing.randn((3, 200), dtype, device, scale=3)
    logits[:, 77] = logits.amax(1) + 1
    for temperature in (1e-3, 1e-40, 1e-60, 1e-320):
        token, _ = step4_integration.sample(logits, rng_state(3, device), temperature=temperature, rung=rung)
        assert torch.equal(token, torch.full_like(token, 77)), temperature


@every_sample
@every_dtype
def test_at_least_the_likeliest_stays(dtype, device, rung):
    logits = testing.randn((3, 200), dtype, device, scale=3)
    logits[:, 77] = logits.amax(1) + 1
    for way in (
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_p": 1e-30},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 0.0, "min_p": 1.0},
    ):
        for seed in range(3):
            token, _ = step4_integration.sample(logits, rng_state(3, device, seed), rung=rung, **way)
            assert torch.equal(token, torch.full_like(token, 77)), way


@every_sample
def test_a_top_k_beyond_the_vocabulary_keeps_all(device, rung):
    logits, state = testing.randn((4, 50), torch.float32, device), rng_state(4, device)
    expected, _ = step4_integration.sample(logits, state.clone(), rung=rung)
    for top_k in (50, 51, 2**62):
        assert torch.equal(step4_integration.sample(logits, state.clone(), top_k=top_k, rung=rung)[0], expected)


@every_sample
@every_dtype
def test_scores_that_differ_in_the_last_bit_are_not_alike(dtype, device, rung):
    """Keys end where a dtype's bits do; a threshold is no number that is cut off before."""
    scores = 1 + torch.arange(8, dtype=torch.float64) * torch.finfo(dtype).eps
    logits = scores.to(dtype).repeat(50, 1).to(device)
    token, _ = step4_integration.sample(logits, rng_state(50, device), top_k=1, rung=rung)
    assert token.tolist() == [7] * 50


@every_sample
@every_dtype
@pytest.mark.parametrize("width", [40, 1500])
def test_equals_are_kept_together(width, dtype, device, rung):
    """Of three values, of which the last that is needed is there many times."""
    logits = torch.zeros(1, width, dtype=dtype, device=device)
    logits[0, 3], logits[0, ::2] = 2.0, 1.0
    logits[0, 4] = 2.0
    state = torch.stack([torch.full((400,), 3), torch.arange(400)], 1).to(device)
    mass = probabilities(logits)[0]
    for way, kept in (
        ({"top_k": 1}, logits == 2),
        ({"top_k": 3}, logits >= 1),
        ({"top_p": 0.5 * mass[3].item()}, logits == 2),
        ({"top_p": 2.5 * mass[3].item()}, logits >= 1),
        ({"min_p": 0.3}, logits >= 1),
    ):
        # Under emulation a row is a block or more: few of them where they are wide.
        count = 400 if device == "cuda" or rung == "cpu" else 24
        token, _ = step4_integration.sample(logits.expand(count, width), state[:count].clone(), rung=rung, **way)
        assert kept[0, token].all(), way
        assert len(token.unique()) > 1
        assert (token > 4).any() == (kept.sum() > 2).item()


@every_sample
@every_dtype
def test_what_cannot_be_is_not_drawn(dtype, device, rung):
    logits = torch.full((3, 4500), -INF, dtype=dtype, device=device)
    logits[0, 4444], logits[1, 0], logits[2, 2] = 1.0, -3.0, torch.finfo(dtype).max
    for way in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5, "top_k": 9}, {"min_p": 0.5}):
        state = None if "temperature" in way else rng_state(3, device)
        token, log_prob = step4_integration.sample(logits, state, rung=rung, **way)
        assert token.tolist() == [4444, 0, 2]
        assert log_prob.tolist() == [0, 0, 0]


@every_sample
@every_dtype
def test_a_row_without_a_distribution_gives_no_token(dtype, device, rung):
    logits = testing.randn((6, 4500), dtype, device)
    logits[0, 4499], logits[1, 0], logits[2, 2222], logits[3] = NAN, NAN, INF, -INF
    logits[4, 7], logits[4, 4321] = INF, NAN
    for way in ({"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.5}):
        state, seen = rng_state(6, device), torch.zeros(6, 4500, dtype=torch.bool, device=device)
        token, log_prob = step4_integration.sample(logits, state, seen, rung=rung, **way)
        assert token[:5].tolist() == [-1] * 5
        assert log_prob[:5].isnan().all()
        assert token[5] >= 0
        assert log_prob[5].isfinite()
        assert seen.sum(1).tolist() == [0] * 5 + [1]
        assert torch.equal(state[:, 1] - rng_state(6, device)[:, 1], torch.full_like(token, "temperature" not in way))


@every_sample
def test_no_rows_give_no_tokens(device, rung):
    token, log_prob = step4_integration.sample(torch.empty(0, 50, device=device), rng_state(0, device), rung=rung)
    assert (token.shape, token.dtype, log_prob.shape, log_prob.dtype) == ((0,), torch.int64, (0,), torch.float32)


# ---- what is written, and where everything lies ----


@every_sample
@pytest.mark.parametrize("mark", [torch.bool, torch.uint8], ids=str)
def test_the_token_is_marked_and_penalised_from_then_on(mark, device, rung):
    """A great penalty: 20 steps take 20 different tokens, all of them of positive logits."""
    logits = testing.randn((2, 64), torch.float32, device).abs() + 0.1
    seen = torch.zeros(2, 64, dtype=mark, device=device)
    taken = [
        step4_integration.sample(logits, None, seen, temperature=0.0, repetition_penalty=1e6, rung=rung)[0]
        for _ in range(20)
    ]
    assert torch.equal(torch.stack(taken, 1), logits.topk(20).indices)
    expected = torch.zeros_like(seen).scatter_(1, logits.topk(20).indices, torch.ones_like(seen))
    assert torch.equal(seen, expected)


@every_sample
def test_marks_without_a_penalty_are_only_made(device, rung):
    logits, state = testing.randn((3, 500), torch.float32, device), rng_state(3, device)
    seen = marks(3, 500, device)
    expected, _ = step4_integration.sample(logits, state.clone(), rung=rung)
    token, _ = step4_integration.sample(logits, state, seen, rung=rung)
    assert torch.equal(token, expected)
    assert torch.equal(seen, marks(3, 500, device).scatter_(1, token[:, None], True))


@every_sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_tensor_is_found_wherever_it_lies(dtype, device, rung):
    way = {"top_k": 30, "top_p": 0.9, "repetition_penalty": 1.5, "rung": rung}
    logits = testing.randn((4, 300), dtype, device, scale=3)

    def run(logits, seen):
        token, log_prob = step4_integration.sample(logits, rng_state(4, device), seen, **way)
        return token, log_prob, seen.clone()

    expected = run(logits, marks(4, 300, device))
    apart = torch.full((4, 333), NAN, dtype=dtype, device=device)
    apart[:, 5:305] = logits
    others = (apart[:, 5:305], testing.transposed(logits), torch.stack([logits, logits], 2).flatten(1)[:, ::2])
    for other in others:
        assert all(map(torch.equal, run(other, marks(4, 300, device)), expected))
    wide = torch.ones(4, 333, dtype=torch.bool, device=device)
    wide[:, 5:305] = marks(4, 300, device)
    assert all(map(torch.equal, run(logits, wide[:, 5:305]), expected))
    assert wide[:, :5].all()
    assert wide[:, 305:].all()


@every_sample
@every_dtype
@pytest.mark.parametrize("width", [40, 333])
def test_nothing_beside_the_tensors_is_accessed(width, dtype, device, rung):
    def run(logits, seen):
        way = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
        step4_integration.sample(logits, rng_state(3, device), seen, rung=rung, **way)

    logits = testing.randn((3, width), dtype, device)
    testing.check_inside(step4_integration, run, logits=logits, seen=marks(3, width, device, torch.uint8))


@every_sample
def test_rows_beyond_32_bits(device, rung):
    distance = (1 << 32) + 4096  # what wraps around lands where nothing is
    logits = testing.lazy_memory(distance + 4096, torch.float16, device).as_strided((2, 100), (distance, 1))
    logits.copy_(testing.randn((2, 100), torch.float16, device, scale=3))
    seen = testing.lazy_memory(distance + 4096, torch.uint8, device).as_strided((2, 100), (distance, 1))
    seen.copy_(marks(2, 100, device))
    state, way = rng_state(2, device), {"top_k": 20, "repetition_penalty": 1.5}
    expected = named_tokens(logits.clone(), state, seen.clone(), **way)
    token, _ = step4_integration.sample(logits, state, seen, rung=rung, **way)
    assert torch.equal(token.cpu(), expected)
    assert seen[1, token[1]] == 1


@pytest.mark.parametrize("schedule", ["reverse", "random:1"])
def test_emulated_threads_may_run_in_any_order(schedule, monkeypatch):
    logits, way = testing.randn((2, 4300), torch.bfloat16, "cpu", scale=3), {"top_k": 60, "top_p": 0.9}
    expected, _ = step4_integration.sample(logits, rng_state(2, "cpu"), **way)
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    for rung in step4_integration.rungs("sample", "cpu"):
        token, _ = step4_integration.sample(logits, rng_state(2, "cpu"), rung=rung, **way)
        assert torch.equal(token, expected)


@on_each_device
def test_gpt2s_vocabulary(device):
    logits = testing.randn((2, 50257), torch.bfloat16, device, scale=3)
    way = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
    expected = named_tokens(logits, rng_state(2, device), **way)
    for rung in ["auto", *step4_integration.rungs("sample", device)]:
        if rung != "v1_naive" or device == "cuda":
            token, _ = step4_integration.sample(logits, rng_state(2, device), rung=rung, **way)
            assert torch.equal(token.cpu(), expected)


# ---- the op as torch sees it ----


@every_sample
def test_sample_is_registered_as_torch_wants_it(device, rung):
    logits, way = testing.randn((3, 50), torch.float32, device), {"top_k": 9, "repetition_penalty": 1.5, "rung": rung}
    torch.library.opcheck(ops.sample.default, (logits, rng_state(3, device), marks(3, 50, device)), way)
    torch.library.opcheck(ops.sample.default, (logits,), {"temperature": 0.0, "rung": rung})

    torch.compiler.reset()
    function = functools.partial(step4_integration.sample, **way)
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    results = []
    for call in (function, compiled):
        state, seen = rng_state(3, device), marks(3, 50, device)
        results.append([*call(logits, state, seen), *call(logits, state, seen), state, seen])
    assert all(map(torch.equal, *results))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rung", ["auto", *step4_integration.rungs("sample", "cuda")])
def test_each_replay_of_a_cuda_graph_draws_anew(rung):
    logits, state = testing.randn((2, 50257), torch.bfloat16, "cuda"), rng_state(2, "cuda")
    graph, (token, _) = testing.capture(lambda: step4_integration.sample(logits, state, rung=rung))
    state.copy_(rng_state(2, "cuda"))
    expected = rng_state(2, "cuda")
    for _ in range(5):
        graph.replay()
        wanted, _ = step4_integration.sample(logits, expected, rung=rung)
        assert torch.equal(token, wanted)
    assert torch.equal(state, expected)


def test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another():
    choose = step4_integration._C.choose

    def refused(rung, width, dtype, *fragments):
        with testing.raises(ValueError, f"sample: rung '{rung}'", *fragments):
            choose("sample", rung, {"batch": 1, "width": width}, dtype)

    assert choose("sample", "v2_radix", {"batch": 1, "width": 50257}, torch.float32) == "v2_radix"
    refused("v2_radix", 60000, torch.float32, "keeps a row's keys in shared memory", "'v1_naive'", "'v3_cluster'")
    refused("v2_radix", 50257, torch.float64, "keeps a row's keys in shared memory")
    assert choose("sample", "auto", {"batch": 1, "width": 262144}, torch.float64) == "v3_cluster"
    refused("v3_cluster", 262145, torch.bfloat16, "takes rows of at most 262144 columns, got 262145", "'v1_naive'")
    assert choose("sample", "auto", {"batch": 1, "width": 262145}, torch.bfloat16) == "v1_naive"
    assert choose("sample", "auto", {"batch": 2**30, "width": 50257}, torch.bfloat16) == "v2_radix"


@on_each_device
def test_an_output_that_shares_memory_with_anything_is_refused(device):
    shares = "must not share memory with"
    memory = torch.zeros(400, dtype=torch.int64, device=device)
    logits = memory[:100].view(torch.float32).view(2, 100)
    seen = memory[100:125].view(torch.uint8).view(2, 100)
    inside = memory[:4].view(2, 2), memory[98:102].view(2, 2)
    for state in inside:
        with testing.raises(ValueError, f"sample: `rng_state` {shares} `logits`"):
            step4_integration.sample(logits, state)
    with testing.raises(ValueError, f"sample: `seen` {shares} `rng_state`"):
        step4_integration.sample(logits, memory[124:128].view(2, 2), seen)
    with testing.raises(ValueError, f"sample: `seen` {shares} `logits`"):
        step4_integration.sample(logits, memory[200:204].view(2, 2), memory[:25].view(torch.uint8).view(2, 100))
    for name, at in (("logits", 0), ("rng_state", 202), ("seen", 124)):
        token, log_prob = memory[at : at + 2], memory[300:301].view(torch.float32)
        says = f"`token` {shares} `logits`" if name == "logits" else f"`{name}` {shares} `token`"
        with testing.raises(ValueError, f"sample: {says}"):
            ops.sample.out(logits, memory[200:204].view(2, 2), seen, token=token, log_prob=log_prob)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_sample_refuses(device):
    logits, state = torch.zeros(2, 9, device=device), torch.zeros(2, 2, dtype=torch.int64, device=device)
    seen = torch.zeros(2, 9, dtype=torch.bool, device=device)

    def refused(exception, *fragments, logits=logits, rng_state=state, seen=None, **way):
        with testing.raises(exception, *fragments):
            step4_integration.sample(logits, rng_state, seen, **way)

    refused(TypeError, "sample: `logits` must be float32", "got int64", logits=logits.long())
    refused(ValueError, "sample: `logits` must have 2 dimensions, got 1 (shape (9,))", logits=logits[0])
    refused(ValueError, "sample: `logits` must have from 1 to 16777216 columns, got 0", logits=logits[:, :0])
    many = logits[:, :1].expand(2, (1 << 24) + 1)
    refused(ValueError, "sample: `logits` must have from 1 to 16777216 columns, got 16777217", logits=many)
    refused(ValueError, "sample: `rng_state` must be given where `temperature` is not 0", rng_state=None)
    refused(TypeError, "sample: `rng_state` must be int64, got int32", rng_state=state.int())
    refused(ValueError, "sample: `rng_state` must have shape (2, 2), got (2,)", rng_state=state[0])
    refused(ValueError, "sample: `rng_state` must be contiguous", rng_state=state.T)
    refused(ValueError, "sample: `seen` must be given where `repetition_penalty` is not 1", repetition_penalty=1.5)
    refused(TypeError, "sample: `seen` must be bool or uint8, got int8", seen=seen.to(torch.int8))
    refused(ValueError, "sample: `seen` must have shape (2, 9), got (2, 8)", seen=seen[:, :8])
    for lies in (testing.transposed(seen), seen[:1].expand(2, 9)):
        refused(ValueError, "sample: `seen` must have stride 1 along its last dimension, and rows apart", seen=lies)
    for number in (-1.0, NAN, INF):
        refused(ValueError, "sample: `temperature` must be finite and not negative, got", temperature=number)
    refused(ValueError, "sample: `top_k` must not be negative, got -1", top_k=-1)
    for name in ("top_p", "min_p"):
        for number in (-0.1, 1.1, NAN):
            refused(ValueError, f"sample: `{name}` must be from 0 to 1, got", **{name: number})
    for number in (0.0, -1.0, NAN, INF):
        says = "sample: `repetition_penalty` must be finite and greater than 0, got"
        refused(ValueError, says, repetition_penalty=number, seen=seen)
    if device != "meta":
        for some in (logits, logits[:0]):
            refused(
                ValueError,
                "sample: `rung` must be 'auto' or one of",
                "'v9'",
                logits=some,
                rng_state=state[: len(some)],
                rung="v9",
            )
        refused(RuntimeError, "sample: `logits` must not require gradients", logits=logits.clone().requires_grad_())
        token, log_prob = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(3, device=device)
        with testing.raises(ValueError, "sample: `log_prob` must have shape (2,), got (3,)"):
            ops.sample.out(logits, state, token=token, log_prob=log_prob)
        with testing.raises(TypeError, "sample: `token` must be int64, got int32"):
            ops.sample.out(logits, state, token=token.int(), log_prob=log_prob[:2])
