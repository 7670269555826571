"""Dropout: which elements it drops, and where its random numbers come from."""

import math

import pytest
import torch
import torch.utils.checkpoint

import step1_simple
from kernel_fusion import testing
from kernel_fusion.testing.philox import philox, random_numbers
from step1_simple.testing import DTYPES, INFINITY, NAN, RNG_STATE


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((-1, -1), -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x85A308D3243F6A88, 0x0370734413198A2E),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_philox_we_compare_with_has_the_published_answers(counter, key, words):
    """From the test vectors of Random123, the paper's own library."""

    def signed(number):
        return number - (1 << 64) if number >= 1 << 63 else number

    got = philox(signed(key), signed(counter[0]), torch.tensor([signed(counter[1])]))
    assert tuple(int(word) for word in got) == words


DROPOUT_RUNGS = testing.device_rungs("step1_simple", "bias_dropout_residual")
DROPOUT_BACKWARD_RUNGS = testing.device_rungs("step1_simple", "bias_dropout_residual_backward")


def kept_elements(shape, p, rng_state, device, rung="auto", dtype=torch.float32):
    """The mask, read off the result for x of ones without bias and residual."""
    one, zero = torch.ones(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
    bias = torch.zeros(shape[-1], device=device, dtype=dtype)
    return (step1_simple.bias_dropout_residual(one, bias, zero, p, rng_state, rung=rung) != 0).cpu()


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rng_state", [(0, 0), (1, 4), (-1, 4 * (1 << 40)), ((1 << 62) + 5, 8)], ids=str)
def test_the_mask_is_philoxs(rng_state, dtype, device, rung):
    rng_state = torch.tensor(rng_state)
    for shape in ((5, 64), (7, 33)):
        expected = random_numbers(shape, rng_state) >= round(65536 * 0.3)
        assert torch.equal(kept_elements(shape, 0.3, rng_state, device, rung, dtype), expected)


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_the_mask_is_philoxs_after_half_a_million_elements_too(device, rung):
    shape = (2100 if rung == "cpu" else 513, 1030)  # the counter's 17th bit counts eights from 2¹⁹ elements on
    mask = kept_elements(shape, 0.3, RNG_STATE, device, rung, torch.float16)
    assert torch.equal(mask, random_numbers(shape, RNG_STATE) >= round(65536 * 0.3))


@pytest.mark.parametrize("device", testing.DEVICES)
def test_the_seed_has_all_64_bits_of_pytorchs_generator(device):
    x = torch.ones(1, device=device)
    seed = 0x0123456789ABCDEF
    torch.manual_seed(seed)
    if device == "cuda":
        assert step1_simple.draw_rng_state(x)[0].item() == seed
    else:
        drawn = step1_simple.draw_rng_state(x)[0].item()
        torch.manual_seed(seed)
        assert drawn == torch.empty(1, dtype=torch.int64).random_(-(1 << 63), None).item()


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_every_bit_of_seed_and_offset_counts(device, rung):
    seeds = [1 << bit if bit < 63 else -(1 << 63) for bit in range(64)]
    states = [*([seed, 0] for seed in seeds), *([0, 4 << bit] for bit in range(61))]
    masks = (kept_elements((2, 64), 0.5, torch.tensor(state), device, rung) for state in states)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 64 + 61


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_the_threshold_is_the_nearest_number_and_is_itself_kept(device, rung):
    numbers = random_numbers((4, 64), RNG_STATE)
    for number in numbers.flatten()[[0, 77, 255]].tolist():
        for beyond in (0, 0.4, 0.6):
            kept = kept_elements((4, 64), (number + beyond) / 65536, RNG_STATE, device, rung)
            assert torch.equal(kept, numbers >= (number if beyond < 0.5 else number + 1))


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_the_mask_does_not_depend_on_where_the_state_lies(device, rung):
    on_cpu = kept_elements((9, 65), 0.5, RNG_STATE, device, rung)
    assert torch.equal(kept_elements((9, 65), 0.5, RNG_STATE.to(device), device, rung), on_cpu)
    assert torch.equal(kept_elements((9, 65), 0.5, RNG_STATE.repeat_interleave(2)[::2], device, rung), on_cpu)


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_part_and_the_expected_sum(p, device, rung):
    rows, width = (64, 1024) if rung not in ("auto", "cpu") and device == "cpu" else (1024, 1024)
    one, zero = torch.ones(rows, width, device=device), torch.zeros(rows, width, device=device)
    y = step1_simple.bias_dropout_residual(one, zero[0], zero, p, RNG_STATE, rung=rung)
    kept = (y != 0).double()
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean().item() - (1 - p)) < 5 * spread
    assert abs(y.double().mean().item() - 1) < 5 * spread / (1 - p)
    # Neighbours, in a row and in a column, are kept independently of each other.
    for both in (kept[:, 1:] * kept[:, :-1], kept[1:] * kept[:-1]):
        assert abs(both.mean().item() - (1 - p) ** 2) < 5 * math.sqrt(2 * (1 - p) / kept.numel())


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_dropout_of_nothing_and_of_all(device, rung):
    x, residual = (testing.randn((3, 65), torch.float32, device, seed=seed) for seed in (0, 1))
    x[0, 0], x[1, 1] = INFINITY, NAN
    bias = torch.zeros(65, device=device)
    assert torch.equal(step1_simple.bias_dropout_residual(x, bias, residual, 1.0, RNG_STATE, rung=rung), residual)
    everything = step1_simple.bias_dropout_residual(x, bias, residual, 0.0, RNG_STATE, rung=rung)
    torch.testing.assert_close(everything, x + residual, rtol=0, atol=0, equal_nan=True)
    for rng_state in (None, RNG_STATE):  # a state that is given does not switch dropout on again
        evaluated = step1_simple.bias_dropout_residual(x, bias, residual, 0.7, rng_state, training=False, rung=rung)
        torch.testing.assert_close(evaluated, everything, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "rung"), DROPOUT_BACKWARD_RUNGS)
def test_what_is_dropped_has_a_gradient_of_0_whatever_reaches_it(device, rung):
    for shape in ((5, 64), (7, 33)):
        kept = kept_elements(shape, 0.4, RNG_STATE, device).to(device)
        ones = torch.ones(shape, device=device)
        want = step1_simple.bias_dropout_residual_backward(ones, 0.4, RNG_STATE, rung=rung)
        assert torch.equal(want[0] != 0, kept)
        for value in (INFINITY, NAN):
            got = step1_simple.bias_dropout_residual_backward(torch.where(kept, ones, value), 0.4, RNG_STATE, rung=rung)
            assert all(map(torch.equal, got, want))


def dropout_of_ones(device, p=0.5, shape=(4, 64)):
    one, zero = torch.ones(shape, device=device), torch.zeros(shape, device=device)
    return step1_simple.bias_dropout_residual(one, zero[0], zero, p)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_manual_seed_repeats_dropout_and_calls_differ(device):
    torch.manual_seed(7)
    first, second = dropout_of_ones(device), dropout_of_ones(device)
    torch.manual_seed(7)
    assert torch.equal(dropout_of_ones(device), first)
    assert torch.equal(dropout_of_ones(device), second)
    torch.manual_seed(8)
    assert not torch.equal(dropout_of_ones(device), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_tenth_is_dropped_where_p_is_not_given(device):
    one, zero = torch.ones(64, 64, device=device), torch.zeros(64, 64, device=device)
    torch.manual_seed(7)
    by_default = step1_simple.bias_dropout_residual(one, zero[0], zero)
    torch.manual_seed(7)
    assert torch.equal(by_default, dropout_of_ones(device, p=0.1, shape=(64, 64)))


@pytest.mark.parametrize("device", testing.DEVICES)
def test_dropout_moves_pytorchs_generator_on_and_evaluation_does_not(device):
    def next_number():
        return torch.rand(1, device=device).item()

    torch.manual_seed(7)
    untouched = next_number()
    torch.manual_seed(7)
    step1_simple.bias_dropout_residual(*(torch.ones(s, device=device) for s in ((2, 3), (3,), (2, 3))), training=False)
    assert next_number() == untouched
    torch.manual_seed(7)
    dropout_of_ones(device)
    assert next_number() != untouched


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_sees_the_same_mask_again(reentrant, device):
    torch.manual_seed(7)
    x = testing.randn((6, 64), torch.float32, device).requires_grad_()
    bias = torch.zeros(64, device=device, requires_grad=True)

    def layer(x):
        return step1_simple.bias_dropout_residual(step1_simple.gelu(x), bias, x, 0.5)

    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    added = (out - x).detach()
    kept = added != 0
    out.sum().backward()
    torch.testing.assert_close(bias.grad, kept.sum(0) * 2.0)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_compiled_dropout_draws_anew_for_each_call_and_agrees_with_its_gradient(device):
    backend = "inductor" if device == "cuda" else "aot_eager"

    def two(x, bias):
        once = step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)
        return once, step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)

    torch.compiler.reset()
    compiled = torch.compile(two, fullgraph=True, backend=backend)
    x = torch.ones(8, 64, device=device, requires_grad=True)
    bias = torch.zeros(64, device=device, requires_grad=True)
    masks = []
    for _ in range(2):
        for out in compiled(x, bias):
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert torch.equal(gradient, (out != 0) * 2.0)
            masks.append(out.detach() != 0)
    for index, mask in enumerate(masks):
        assert abs(mask.float().mean().item() - 0.5) < 0.15
        assert not any(torch.equal(mask, other) for other in masks[:index])


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_each_replay_of_a_cuda_graph_draws_anew(device):
    x = torch.ones(16, 64, device=device, requires_grad=True)
    bias = torch.zeros(64, device=device, requires_grad=True)

    def step():
        once = step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)
        twice = step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)
        return once, twice, *torch.autograd.grad((once * 3 + twice).sum(), x)

    graph, (once, twice, gradient) = testing.capture(step)
    seen = []
    torch.manual_seed(7)
    for _ in range(3):
        graph.replay()
        assert torch.equal(gradient, once * 3 + twice)  # the backward in the graph sees the masks of this replay
        seen += [once.detach().clone(), twice.detach().clone()]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    torch.manual_seed(7)
    for replay in range(3):
        graph.replay()
        assert torch.equal(once, seen[2 * replay])
        assert torch.equal(twice, seen[2 * replay + 1])


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_a_state_for_the_cpu_is_refused_while_a_cuda_graph_is_captured(device):
    x = torch.ones(2, 8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with testing.raises(ValueError, "draw_rng_state: `on_device` must be True while a CUDA graph is captured"):
            step1_simple.draw_rng_state(x)
        x * 2
