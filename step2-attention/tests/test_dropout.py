"""Dropout of attention's weights, on every device there is: the mask is step 1's, forward and backward.

python tests/test_dropout.py            pytest's options may follow, such as -k v2_tiled
"""

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from step2_attention.testing import (
    NAN,
    attention_and_lse_of,
    bounds,
    can_do,
    dtype_of,
    every_dtype,
    every_rung_of,
    gradients_of,
    kept,
    on_each_device,
    qkv,
    with_and_without_mask,
)

RNG_STATE = torch.tensor([-123456789123456789, 987654321 * 4])

attention, backward = step2_attention.attention, step2_attention.attention_backward


every_rung, every_backward = every_rung_of("attention"), every_rung_of("attention_backward")


def factors_for(q, k, dropout_p, rng_state):
    """What weights are multiplied by, of q's dtype."""
    threshold = round(65536 * dropout_p)
    mask = kept(*q.shape[:3], k.shape[2], dropout_p, rng_state).to(q)
    return mask * (65536 / (65536 - threshold)) if threshold < 65536 else mask


def attention_of(q, k, v, key_begin=None, key_end=None, rng_state=None, *, causal=False, dropout_p=0.0):
    factors = factors_for(q, k, dropout_p, rng_state)
    return attention_and_lse_of(q, k, v, key_begin, key_end, causal, factors=factors)


def gradients_with_dropout(grad, q, k, *others, causal=False, dropout_p=0.0):
    *others, rng_state = others
    factors = factors_for(q, k, dropout_p, rng_state)
    return gradients_of(grad, q, k, *others, causal=causal, by_lse=False, factors=factors)


def given(device, dtype, *, dim=32, padding=True, q_length=37, k_length=70):
    """q, k, v and bounds, of two batches of heads that share keys."""
    tensors = qkv(q_length, k_length, dim, dtype, device, batch=2, heads=4, kv_heads=2)
    keys = (bounds([0, 5], device), bounds([k_length, k_length - 7], device)) if padding else (None, None)
    return *tensors, *keys


# ---- forward ----


@testing.where(lambda dtype, rung: can_do(rung, 32, dtype))
@every_rung
@every_dtype
@with_and_without_mask
def test_weights_are_dropped_as_step_1_would(causal, dtype, device, rung):
    testing.check_contract(
        step2_attention,
        "attention",
        (*given(device, dtype), RNG_STATE),
        rung,
        reference=attention_of,
        eager=attention_of,
        kwargs={"causal": causal, "dropout_p": 0.3},
        all_outputs={"return_lse": True},
    )


@every_rung
@pytest.mark.parametrize(("q_length", "k_length"), [(1, 1), (7, 9), (17, 33), (64, 256), (300, 300)])
def test_the_mask_read_back(q_length, k_length, device, rung):
    """All weights are alike and v is a part of the identity, so the output shows which ones are left."""
    dim, dtype = 64, dtype_of(rung)
    q, k = (torch.zeros(2, 3, n, dim, dtype=dtype, device=device) for n in (q_length, k_length))
    parts = torch.eye(k_length, -(-k_length // dim) * dim, dtype=dtype, device=device).split(dim, -1)
    outs = [attention(q, k, v.expand_as(k), rng_state=RNG_STATE, dropout_p=0.4, rung=rung) for v in parts]
    out = torch.cat(outs, -1)[..., :k_length]
    assert torch.equal(out.cpu() != 0, kept(2, 3, q_length, k_length, 0.4, RNG_STATE))
    torch.testing.assert_close(out[out != 0] * k_length, torch.full_like(out[out != 0], 65536 / (65536 - 26214)))


@every_rung
def test_dropout_of_nothing_and_of_all(device, rung):
    q, k, v, begin, end = given(device, dtype_of(rung))
    without = attention(q, k, v, begin, end, return_lse=True, rung=rung)
    for p, rng_state in ((0.0, RNG_STATE), (0.0, None), (1e-6, RNG_STATE), (1e-6, None)):
        out = attention(q, k, v, begin, end, rng_state, dropout_p=p, return_lse=True, rung=rung)
        assert all(map(torch.equal, out, without))
    nothing, lse = attention(q, k, v, begin, end, RNG_STATE, dropout_p=1.0, return_lse=True, rung=rung)
    assert nothing.eq(0).all()
    assert torch.equal(lse, without[1])


@every_rung
def test_the_mask_does_not_depend_on_where_the_state_lies(device, rung):
    tensors = given(device, dtype_of(rung))
    first = attention(*tensors, RNG_STATE, dropout_p=0.5, rung=rung)
    assert torch.equal(attention(*tensors, RNG_STATE.to(device), dropout_p=0.5, rung=rung), first)
    assert torch.equal(attention(*tensors, RNG_STATE.repeat_interleave(2)[::2], dropout_p=0.5, rung=rung), first)
    for other in (RNG_STATE + torch.tensor([1, 0]), RNG_STATE + torch.tensor([0, 4])):
        assert not torch.equal(attention(*tensors, other, dropout_p=0.5, rung=rung), first)


@on_each_device
def test_without_a_state_one_is_drawn_from_pytorchs_generator(device):
    tensors = given(device, torch.float32)

    def draw(p=0.5):
        return attention(*tensors, dropout_p=p)

    torch.manual_seed(7)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(draw(), first)
    assert torch.equal(draw(), second)
    torch.manual_seed(7)
    draw(0.0)  # draws nothing
    assert torch.equal(draw(), first)


# ---- backward ----


@testing.where(lambda dtype, rung: can_do(rung, 32, dtype))
@every_backward
@every_dtype
@with_and_without_mask
def test_gradients_with_the_same_mask(causal, dtype, device, rung):
    check_gradients(given(device, dtype), rung, causal)


@every_backward
@with_and_without_mask
def test_gradients_where_tiles_begin_with_pieces_of_the_mask(causal, device, rung):
    """Several tiles of queries and of keys, where no key is padding."""
    check_gradients(given(device, dtype_of(rung), padding=False, q_length=150, k_length=300), rung, causal)


def check_gradients(inputs, rung, causal):
    q, k, v, begin, end = inputs
    wide = (t.double() for t in (q, k, v))
    out, lse = attention_of(*wide, begin, end, RNG_STATE, causal=causal, dropout_p=0.3)
    grad = testing.randn(q.shape, q.dtype, q.device, seed=4)
    of_query = torch.float64 if q.dtype == torch.float64 else torch.float32
    grad_lse = testing.randn(lse.shape, of_query, q.device, seed=5)
    testing.check_contract(
        step2_attention,
        "attention_backward",
        (grad, q, k, v, out.to(q.dtype), lse.to(of_query), begin, end, grad_lse, RNG_STATE),
        rung,
        reference=gradients_with_dropout,
        eager=gradients_with_dropout,
        kwargs={"causal": causal, "dropout_p": 0.3},
        layouts=False,
    )


@on_each_device
@with_and_without_mask
def test_gradients_by_finite_differences(causal, device):
    inputs = [t.requires_grad_() for t in qkv(5, 9, 4, torch.float64, device)]
    assert torch.autograd.gradcheck(
        lambda *t: attention(*t, rng_state=RNG_STATE, causal=causal, dropout_p=0.4, return_lse=True), inputs
    )


@on_each_device
def test_backward_sees_the_mask_of_its_forward(device):
    """With weights all alike, dv is the sum over queries of what they kept."""
    torch.manual_seed(3)
    q, k = (torch.zeros(1, 2, 40, 8, device=device) for _ in range(2))
    v = torch.randn(1, 2, 40, 8, device=device, requires_grad=True)
    out = attention(q, k, v, dropout_p=0.5)
    out.sum().backward()
    # The forward's output is a linear function of v, and v.grad that function's weights, added up over queries.
    torch.testing.assert_close((v.grad * v).sum(), out.sum())
    assert v.grad.unique().numel() > 5


@on_each_device
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_sees_the_same_mask_again(reentrant, device):
    q, k, v = (t.requires_grad_() for t in qkv(20, 33, 16, torch.float32, device))

    def gradients(run):
        torch.manual_seed(11)
        return torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))

    def layer(*t):
        return attention(*t, dropout_p=0.3)

    expected = gradients(layer)
    if reentrant:
        for t in (q, k, v):
            t.grad = None
        torch.manual_seed(11)
        torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=True).square().sum().backward()
        got = tuple(t.grad for t in (q, k, v))
    else:
        got = gradients(lambda *t: torch.utils.checkpoint.checkpoint(layer, *t, use_reentrant=False))
    assert all(map(torch.equal, got, expected))


# ---- inside PyTorch ----


@on_each_device
def test_ops_are_registered_as_torch_expects(device):
    q, k, v = (t.requires_grad_() for t in qkv(5, 7, 8, torch.float32, device))
    options = {"causal": True, "dropout_p": 0.3}
    torch.library.opcheck(torch.ops.step2_attention.attention.default, (q, k, v, None, None, RNG_STATE), options)
    with torch.no_grad():
        out, lse = attention(q, k, v, rng_state=RNG_STATE, **options, return_lse=True)
    given = (torch.ones_like(out), q.detach(), k.detach(), v.detach(), out, lse, None, None, None, RNG_STATE)
    torch.library.opcheck(torch.ops.step2_attention.attention_backward.default, given, options)
    torch.library.opcheck(torch.ops.step2_attention.draw_rng_state.default, (q,), {"on_device": False})


@on_each_device
def test_compiled_attention_draws_anew_and_agrees_with_its_gradient(device):
    q, k = (torch.zeros(1, 2, 40, 8, device=device) for _ in range(2))
    v = torch.randn(1, 2, 40, 8, device=device, requires_grad=True)

    @torch.compile(backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True)
    def twice(v):
        return attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5)

    one, other = twice(v)
    assert not torch.equal(one, other)
    (dv,) = torch.autograd.grad(one.sum(), v)
    torch.testing.assert_close((dv * v).sum(), one.sum())


@on_each_device
def test_replays_of_a_cuda_graph_draw_anew(device):
    if device == "cpu":
        pytest.skip("needs a GPU")
    q, k, v = qkv(40, 40, 16, torch.float32, device)
    attention(q, k, v, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, dropout_p=0.5)
    runs = []
    for _ in range(3):
        graph.replay()
        runs.append(out.clone())
    assert not torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[1], runs[2])


@on_each_device
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_heeds_randomness(device):
    q, k, v = (t.expand(3, -1, -1, -1, -1) for t in qkv(20, 33, 16, torch.float32, device))

    def run(randomness):
        return torch.func.vmap(lambda *t: attention(*t, dropout_p=0.5), randomness=randomness)(q, k, v)

    with testing.raises(RuntimeError, "randomness"):
        run("error")
    same, different = run("same"), run("different")
    assert torch.equal(same[0], same[1])
    assert not torch.equal(different[0], different[1])


@on_each_device
def test_autocast_keeps_dropout(device):
    q, k, v = qkv(20, 33, 16, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        got = attention(q, k, v, rng_state=RNG_STATE, dropout_p=0.5)
    assert torch.equal(got, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), rng_state=RNG_STATE, dropout_p=0.5))


# ---- what is refused ----


@on_each_device
def test_what_is_refused(device):
    q, k, v = qkv(5, 7, 8, torch.float32, device)
    for p in (-0.1, 1.5, NAN):
        with testing.raises(ValueError, "attention: `dropout_p` must be from 0 to 1, got"):
            attention(q, k, v, dropout_p=p)
    with testing.raises(TypeError, "attention: `rng_state` must be int64, got int32"):
        attention(q, k, v, rng_state=RNG_STATE.int(), dropout_p=0.1)
    with testing.raises(ValueError, "attention: `rng_state` must have shape", "got"):
        attention(q, k, v, rng_state=RNG_STATE[:1], dropout_p=0.1)
    out, lse = attention(q, k, v, return_lse=True)
    with testing.raises(ValueError, "attention_backward: `rng_state` must be given where `dropout_p` is not 0"):
        backward(out, q, k, v, out, lse, dropout_p=0.1)
    with testing.raises(ValueError, "attention_backward: `dropout_p` must be from 0 to 1, got 2"):
        backward(out, q, k, v, out, lse, rng_state=RNG_STATE, dropout_p=2)


@on_each_device
@pytest.mark.parametrize("meta", [False, True], ids=["data", "meta"])
def test_the_op_itself_refuses_the_same_with_and_without_data(meta, device):
    q = torch.ones(1, 2, 5, 8, device="meta" if meta else device)
    op = torch.ops.step2_attention.attention
    for p in (2.0, -1e-6, NAN):
        for rng_state in (None, RNG_STATE):
            with testing.raises(ValueError, "attention: `dropout_p` must be from 0 to 1, got"):
                op(q, q, q, None, None, rng_state, dropout_p=p)
    for p in (0.1, 2**-17):  # the latter is rounded up to 1 of 65536
        with testing.raises(ValueError, "attention: `rng_state` must be given where `dropout_p` is not 0"):
            op(q, q, q, dropout_p=p)
    op(q, q, q, dropout_p=2**-18)


@on_each_device
def test_gradients_of_gradients_are_refused(device):
    q, k, v = (t.requires_grad_() for t in qkv(5, 7, 8, torch.float32, device))
    first = torch.autograd.grad(attention(q, k, v, dropout_p=0.5).sum(), (q, k, v), create_graph=True)
    with testing.raises(NotImplementedError, "attention: with dropout there are no gradients of gradients"):
        torch.autograd.grad(first[0].sum(), q)
    first = torch.autograd.grad(attention(q, k, v, dropout_p=1e-6).sum(), (q, k, v), create_graph=True)
    torch.autograd.grad(first[0].sum(), q)  # so small a part is none


if __name__ == "__main__":
    testing.main(__file__)
