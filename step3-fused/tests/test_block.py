"""GPT-2's block, composed of this step's ops."""

import pytest
import torch
import torch.nn.functional as F

import step3_fused
from kernel_fusion import testing
from step3_fused.epilogue_testing import able, every_dtype, on_a_gpu, on_each_device


def block_inputs(width, inner, dtype, device):
    def layer(depth, out, seed):
        weight = testing.randn((depth, out), dtype, device, seed=seed, scale=depth**-0.5)
        return weight, testing.randn((out,), dtype, device, seed=seed + 1, scale=0.1)

    norms = [tuple(testing.randn((width,), dtype, device, seed=s) for s in (k, k + 1)) for k in (20, 30)]
    x = testing.randn((2, 6, width), dtype, device, seed=40)
    return (
        x,
        norms[0],
        layer(width, 3 * width, 50),
        layer(width, width, 60),
        norms[1],
        layer(width, inner, 70),
        layer(inner, width, 80),
    )


def block_of(x, norm_1, qkv, projection, norm_2, mlp_1, mlp_2, heads, causal=True, eps=1e-5):
    width = x.shape[-1:]
    packed = F.layer_norm(x, width, *norm_1, eps) @ qkv[0] + qkv[1]
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in packed.chunk(3, -1))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
    x = x + attended @ projection[0] + projection[1]
    inner = F.gelu(F.layer_norm(x, width, *norm_2, eps) @ mlp_1[0] + mlp_1[1], approximate="tanh")
    return x + inner @ mlp_2[0] + mlp_2[1]


def wide(inputs):
    return [tuple(t.double() for t in i) if isinstance(i, tuple) else i.double() for i in inputs]


@on_each_device
@every_dtype
def test_a_block_is_that_of_gpt2(dtype, device):
    inputs = block_inputs(24, 96, dtype, device)
    got = step3_fused.transformer_block(*inputs, heads=3)
    assert got.dtype == dtype
    exact = block_of(*wide(inputs), heads=3)
    eager = (block_of(*inputs, heads=3).double() - exact).abs().max()
    assert (got.double() - exact).abs().max() <= 2 * eager + 1e-6 * exact.abs().max()
    for options in ({"causal": False}, {"eps": 0.1}):
        got = step3_fused.transformer_block(*inputs, heads=3, **options)
        exact = block_of(*wide(inputs), heads=3, **options)
        assert (got.double() - exact).abs().max() <= 4 * eager + 1e-6 * exact.abs().max()


@on_each_device
def test_a_block_takes_an_attention_and_has_gradients(device):
    inputs = block_inputs(8, 16, torch.float64, device)
    flat = [t.requires_grad_() for i in inputs for t in (i if isinstance(i, tuple) else (i,))]

    def block(x, *rest, function=step3_fused.transformer_block, **options):
        pairs = [tuple(rest[i : i + 2]) for i in range(0, len(rest), 2)]
        return function(x, *pairs, heads=2, **options)

    ours = torch.autograd.grad(block(*flat).sin().sum(), flat)
    theirs = torch.autograd.grad(block(*flat, function=block_of).sin().sum(), flat)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    calls = []

    def attention(q, k, v, is_causal):
        calls.append(is_causal)
        return v

    block(*flat, attention=attention)
    assert calls == [True]


@on_each_device
def test_a_block_drops_only_while_it_trains(device):
    inputs = block_inputs(24, 96, torch.float32, device)
    torch.manual_seed(1)
    first, second = (step3_fused.transformer_block(*inputs, heads=3, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    plain = step3_fused.transformer_block(*inputs, heads=3)
    assert torch.equal(step3_fused.transformer_block(*inputs, heads=3, dropout_p=0.5, training=False), plain)
    assert torch.equal(step3_fused.transformer_block(*inputs, heads=3, dropout_p=1.0), inputs[0])


@on_each_device
def test_a_block_refuses_what_is_no_block(device):
    x, *parameters = block_inputs(24, 96, torch.float32, device)
    for bad, heads in ((x, 5), (x, 0), (x, -3), (x[0], 3), (x[None], 3)):
        text = f"transformer_block: `x` must be [B, S, {heads}·D] for `heads` {heads}, got {tuple(bad.shape)}"
        with testing.raises(ValueError, text):
            step3_fused.transformer_block(bad, *parameters, heads=heads)


def norm_behind(y, norm, projection):
    return step3_fused.layer_norm(y, *norm, rung="v3_registers")


def residual_norm_behind(y, norm, projection):
    return step3_fused.residual_layer_norm(y, y, *norm, rung="v3_registers")


def heads_behind(y, norm, projection):
    heads = y.view(2, 64, 12, 64).transpose(1, 2)
    residual = y.view(2, 64, 768)
    return step3_fused.attention_residual_layer_norm(heads, heads, heads, residual, *norm, rung="v4_heads")


def block_behind(y, norm, projection):
    heads = y.view(2, 64, 12, 64).transpose(1, 2)
    residual = y.view(2, 64, 768)
    return step3_fused.attention_block(heads, heads, heads, residual, *projection, *norm, rung="v5_cluster")


def product_behind(y, norm, projection):
    return step3_fused.linear_gelu(y, *projection, rung="v3_hopper")


@on_a_gpu
@pytest.mark.parametrize("behind", [norm_behind, residual_norm_behind, heads_behind, block_behind, product_behind])
def test_a_launch_that_may_begin_early_waits_for_what_it_reads(behind, device):
    _, norm, _, projection, *_ = block_inputs(768, 3072, torch.bfloat16, device)
    if not able("linear_gelu", "v5_dependent", device, 128, 768, 768, torch.bfloat16, False):
        pytest.skip("no rung in front lets the next launch begin on this GPU")
    rows = testing.randn((128, 768), torch.bfloat16, device)
    testing.check_dependent_launch(
        lambda x: step3_fused.linear_gelu(x, *projection, rung="v5_dependent"),
        lambda y: behind(y, norm, projection),
        rows,
    )
