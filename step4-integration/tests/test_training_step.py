"""A step of training: AdamW written out by hand, parts of a batch, autocast, recomputing, a CUDA graph; and that many
steps follow plain PyTorch.
"""

import collections
import copy
import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
import train
from gpt2_model import GPT2
from model.blocks.shared import join_heads, split_heads
from torch.utils._python_dispatch import TorchDispatchMode
from training import step as steps
from training.batches import Batches, Tokens, packed
from training.documents import as_bytes
from training.optimizer import optimizer_of, schedule
from training.run import Run

from kernel_fusion import testing
from step4_integration.gpt2_testing import each_form
from step4_integration.testing import on_each_device

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = dataclasses.replace(train.SMALL, n_positions=16, n_layer=2, n_embd=32, n_head=2)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def some_windows(batch=4, number=0, length=16, vocab_size=256):
    return torch.randint(vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(number))


@each_form
@pytest.mark.parametrize("clipped", [True, False], ids=["clipped", "not clipped"])
def test_steps_of_training_are_adamws_written_out(clipped, blocks):
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, n_layer=1, blocks=blocks, initializer_range=0.02)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # decay would not show on biases of 0
            parameter.add_(0.02 * torch.randn_like(parameter))
    by_hand = copy.deepcopy(model)
    optimizer = optimizer_of(model, 1.0)  # each step brings its own rate
    first = {name: torch.zeros_like(p) for name, p in by_hand.named_parameters()}
    second = {name: torch.zeros_like(p) for name, p in by_hand.named_parameters()}

    for number, rate in enumerate([2e-3, 5e-3, 1e-3], start=1):
        windows = some_windows(2 if clipped else 60, number)
        loss = steps.cross_entropy(by_hand, windows)
        gradients = dict(zip(first, torch.autograd.grad(loss, [p for _, p in by_hand.named_parameters()]), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        assert (norm > 1) == clipped
        with torch.no_grad():
            for name, parameter in by_hand.named_parameters():
                gradient = gradients[name] * (1 / (norm + 1e-6) if clipped else 1)
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.95 * second[name] + 0.05 * gradient**2
                decay = 0.1 if parameter.dim() == 2 else 0.0  # of matrices alone
                mean, mean_of_squares = first[name] / (1 - 0.9**number), second[name] / (1 - 0.95**number)
                parameter -= rate * (decay * parameter + mean / (mean_of_squares.sqrt() + 1e-8))

        assert steps.step(model, optimizer, [windows], rate).item() == pytest.approx(loss.item(), rel=1e-12)
        for (name, got), want in zip(model.named_parameters(), by_hand.parameters(), strict=True):
            difference = (got - want).abs().max().item()
            assert difference < 1e-6 * rate, f"step {number}: `{name}` is {difference:.2g} off"


@each_form
@on_each_device
def test_a_few_steps_of_training_lower_the_loss(device, blocks):
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(train.SMALL, n_positions=32, n_embd=64, n_head=2, blocks=blocks)).to(device)
    text = as_bytes(b"the kernel reads what the kernel before it wrote, " * 40).numpy()
    batches = Batches(Tokens([text], ["text"]), 32, 4, vocab_size=256, seed=0)
    optimizer = optimizer_of(model, 3e-3)
    losses = [steps.step(model, optimizer, [batches.at(n).to(device)], 3e-3).item() for n in range(25)]
    assert losses[0] > 5
    assert losses[-1] < 0.6 * losses[0]


def test_thirty_steps_follow_plain_pytorch():
    torch.manual_seed(0)
    ours = GPT2(TINY)
    theirs = GPT2(dataclasses.replace(TINY, blocks="v1_torch"))
    theirs.load_state_dict(ours.state_dict())
    optimizer = optimizer_of(ours, 1e-3)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() == 2]},
        {"params": [p for p in theirs.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    run = Run(steps=30, rate=1e-3)
    for number in range(30):
        windows = some_windows(8, number)
        loss = steps.step(ours, optimizer, [windows[:4], windows[4:]], run.rate_of(number))
        expected = F.cross_entropy(theirs(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        reference.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in reference.param_groups:
            group["lr"] = run.rate_of(number)
        reference.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_batch_add_up_to_it(dtype):
    torch.manual_seed(0)
    model = GPT2(TINY)
    whole, parts = copy.deepcopy(model), copy.deepcopy(model)
    windows = some_windows(6)
    losses = [steps.backward(whole, [windows], dtype), steps.backward(parts, windows.split(2), dtype)]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=tolerance)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert (one.grad - other.grad).norm() <= tolerance * one.grad.norm()


def some_rows(number=0, device="cpu"):
    """Packed windows, of which the first two have one document each, and the last two many."""
    windows = some_windows(4, number)
    begins = torch.rand(4, 17, generator=torch.Generator().manual_seed(number)) < 0.4
    begins[:2] = False
    return [packed(w.to(device), b.to(device)) for w, b in zip(windows.split(2), begins.split(2), strict=True)]


@each_form
def test_the_loss_of_a_packed_step_is_that_of_its_documents_alone(blocks):
    """And so are its gradients, where its parts have different numbers of tokens to predict."""
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, blocks=blocks)).double()
    alone = copy.deepcopy(model)
    rows = some_rows()
    loss = steps.backward(model, rows, torch.float32)
    losses = []
    for row in rows:
        starts = row.cu_seqlens.unique().tolist()
        for begin, end in itertools.pairwise(starts):
            targets = row.targets[0, begin:end]
            logits = alone(row.ids[:, begin:end])[0]
            losses += F.cross_entropy(logits[targets != -100], targets[targets != -100], reduction="none")
    counts = [(row.targets != -100).sum().item() for row in rows]
    assert counts[0] == 32 > counts[1]
    assert len(losses) == sum(counts)
    torch.stack(losses).mean().backward()
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, msg=lambda text, name=name: f"{name}: {text}")


class Made(TorchDispatchMode):
    """How often a tensor of each shape and dtype is made from one of another, and by how many operations."""

    def __init__(self):
        super().__init__()
        self.of, self.operations = collections.Counter(), 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        cast = [out] if function is torch.ops.aten._to_copy.default else []
        cast = arguments[0] if function is torch.ops.aten._foreach_copy_.default else cast
        self.of.update((tuple(t.shape), t.dtype) for t in cast)
        self.operations += bool(cast)
        return out


def test_weights_are_copied_at_once_a_step_and_anew_in_the_next():
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, n_layer=1))
    optimizer = optimizer_of(model, 0.1)
    parameters = [*model.parameters()]
    shapes = collections.Counter(tuple(p.shape) for p in model.h[0].parameters() if p.dim() == 2)
    for _ in range(2):
        in_bfloat16 = copy.deepcopy(model).bfloat16()
        with Made() as made:
            loss = steps.step(model, optimizer, some_windows(6).split(3), 0.1, dtype=torch.bfloat16)
        for shape, count in shapes.items():
            assert made.of[shape, torch.bfloat16] == count
            assert made.of[shape, torch.float32] == 2 * count  # gradients of each part
        assert made.operations < 20
        assert loss.item() == sum(steps.cross_entropy(in_bfloat16, part) / 2 for part in some_windows(6).split(3))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters} == {torch.float32}


def test_weights_are_back_after_an_error():
    model = GPT2(TINY)
    parameters = [*model.parameters()]
    with pytest.raises(IndexError):
        steps.backward(model, [torch.zeros(1, dtype=torch.int64)], torch.bfloat16)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_a_blocks_gradients_are_collected_before_the_block_in_front_is_computed():
    """So that several workers' sums of them have something to hide behind."""
    model, came = GPT2(TINY), []
    form, names = model.form(), {id(parameter): name for name, parameter in model.named_parameters()}

    def noting(weights, y, x, norm, config, layer, *rest):
        y.register_hook(lambda _: came.append(f"through {layer}"))
        return form(weights, y, x, norm, config, layer, *rest)

    def collect(weights, gradients):
        assert [w.shape for w in weights] == [g.shape for g in gradients]
        came.append(names[id(weights[0])])

    model.form = lambda: noting
    for dtype in (torch.float32, torch.bfloat16):
        came.clear()
        with steps.weights_in(model, dtype, collect):
            steps.cross_entropy(model, some_windows(2)).backward()
        blocks = [f"h.{layer}.attn.c_attn.weight" for layer in (1, 0)]
        assert came == [blocks[0], "through 1", blocks[1], "through 0", "wte.weight"]
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_in_bfloat16_are_as_good_as_autocasts():
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(TINY, initializer_range=0.1))
    exact, ours, autocasts = copy.deepcopy(model).double(), copy.deepcopy(model), copy.deepcopy(model)
    windows = some_windows(16)
    losses = [steps.backward(m, [windows], dtype) for m, dtype in ((exact, torch.float64), (ours, torch.bfloat16))]
    with torch.autocast("cpu", torch.bfloat16):
        loss = steps.cross_entropy(autocasts, windows)
    loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-3)
    for (name, right), got, theirs in zip(
        exact.named_parameters(), ours.parameters(), autocasts.parameters(), strict=True
    ):
        error, allowed = ((p.grad - right.grad).norm().item() for p in (got, theirs))
        assert error <= 2 * allowed, f"the gradient of `{name}` is {error:.2g} off, autocast's {allowed:.2g}"


def test_gradients_of_q_k_and_v_are_copied_only_where_they_lie_apart():
    packed = torch.randn(2, 5, 96, requires_grad=True)
    room = torch.randn(2, 6, 3, 2, 16)
    whole, part = room[:, :5].contiguous(), room[:, :5]
    together, of_larger = (rows.permute(2, 0, 3, 1, 4).unbind() for rows in (whole, part))
    apart, turned = [t.contiguous() for t in together], together[::-1]
    for gradients, stay in ((together, True), (apart, False), (turned, False), (of_larger, False)):
        (found,) = torch.autograd.grad(split_heads(packed, TINY), packed, gradients)
        assert torch.equal(found, torch.cat([join_heads(g) for g in gradients], -1))
        assert (found.data_ptr() == whole.data_ptr()) == stay
    (found,) = torch.autograd.grad(
        split_heads(packed, TINY), packed, [t.requires_grad_() for t in together], create_graph=True
    )
    assert found.requires_grad


@each_form
def test_attention_puts_the_gradients_of_q_k_and_v_together(blocks):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.add(function)
            return function(*arguments, **(options or {}))

    seen = set()
    torch.manual_seed(0)
    with Seen():
        steps.backward(GPT2(dataclasses.replace(TINY, blocks=blocks)), [some_windows()], torch.float32)
    assert bool(seen & {torch.ops.aten.cat.default, torch.ops.aten.stack.default}) == (blocks == "v1_torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_form
def test_what_is_computed_again_gives_the_same_bits_and_is_not_kept(blocks, dtype):
    torch.manual_seed(0)
    kept = GPT2(dataclasses.replace(TINY, blocks=blocks))
    recomputed = copy.deepcopy(kept)
    recomputed.recompute = True
    saved = []
    for model in (kept, recomputed):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            with steps.weights_in(model, dtype):
                steps.cross_entropy(model, some_windows())
        saved.append(sum(sizes))
        steps.backward(model, some_windows().split(2), dtype)
    assert saved[1] < 0.6 * saved[0]
    for one, other in zip(kept.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@on_gpu
@pytest.mark.parametrize("parts_of", [lambda n: some_windows(4, n).cuda().split(2), lambda n: some_rows(n, "cuda")])
def test_a_step_in_a_graph_is_the_step(parts_of):
    results = []
    for take in (steps.step, steps.GraphStep(torch.device("cuda", 0))):
        torch.manual_seed(0)
        model = GPT2(TINY).cuda()
        optimizer = optimizer_of(model, 1e-3, in_a_graph=take is not steps.step)
        run = Run(steps=12, rate=1e-3)
        losses = [take(model, optimizer, parts_of(n), run.rate_of(n), dtype=torch.bfloat16) for n in range(12)]
        results.append(torch.stack(losses))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_the_schedule_rises_and_falls():
    assert schedule(0.0) == 0
    assert schedule(0.01) == pytest.approx(0.2)
    assert schedule(0.0499) == pytest.approx(0.998)
    assert schedule(0.05) == pytest.approx(1)
    assert schedule(0.05 + 0.95 / 4) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    assert schedule(0.525) == pytest.approx(0.55)
    assert schedule(1.0) == pytest.approx(0.1)
    assert schedule(7.0) == pytest.approx(0.1)
    run = Run(steps=100, warm_up=20, rate=2.0)
    assert [run.rate_of(n) for n in (0, 9, 19, 59, 99)] == pytest.approx([0.1, 1.0, 2.0, 1.1, 0.2])
    assert Run(steps=100, warm_up=0, rate=2.0).rate_of(0) == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accumulate": 3}, "train: `accumulate` must divide `batch`, for its parts are of one size, got 3 and 8"),
        ({"accumulate": 0}, "train: `accumulate` must be at least 1, got 0"),
        ({"context": 0}, "train: `context` must be at least 1, got 0"),
        ({"rate": float("nan")}, "train: `rate` must be a number above 0, got nan"),
        ({"clip": 0.0}, "train: `clip` must be a number above 0, got 0"),
        ({"weight_decay": -0.1}, "train: `weight_decay` must be a number from 0 up, got -0.1"),
        ({"warm_up": 1500}, "train: `warm_up` must be from 0 to 1499, `steps` - 1, got 1500"),
        ({"dtype": "float16"}, "train: `dtype` must be float32 or bfloat16, got 'float16'"),
    ],
)
def test_a_run_refuses(options, says):
    with testing.raises(ValueError, says):
        Run(**options)
