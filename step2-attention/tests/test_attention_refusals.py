"""What attention refuses, and in which words."""

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from step2_attention.testing import bounds, lse_for, on_each_device, on_tensor_cores, ops, qkv


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_attention_refuses(device):
    q, k, v = (torch.ones(1, 2, n, 8, device=device) for n in (3, 4, 4))
    other = "meta" if device != "meta" else "cpu"
    bad = [
        (TypeError, "`key_end` must be int32, got int64", {"key_end": torch.ones(1, dtype=torch.int64, device=device)}),
        (ValueError, "`key_begin` must have shape (1,), got (2,)", {"key_begin": bounds([1, 1], device)}),
        (TypeError, "`q` must be float32, float16, bfloat16 or float64, got int32", {"q": q.int()}),
        (TypeError, "`k` must have the dtype of `q` (float32), got float16", {"k": k.half()}),
        (TypeError, "`v` must have the dtype of `q` (float32), got float64", {"v": v.double()}),
        (ValueError, "`q` must have 4 dimensions, got 3 (shape (2, 3, 8))", {"q": q[0]}),
        (ValueError, "`k` must have 4 dimensions, got 3 (shape (2, 4, 8))", {"k": k[0]}),
        (ValueError, "`v` must have 4 dimensions, got 3 (shape (2, 4, 8))", {"v": v[0]}),
        (ValueError, "`v` must have shape (1, 1, 4, 8), got (1, 2, 4, 8)", {"k": k[:, :1]}),
        (ValueError, "`k` must have shape (1, 2, 4, 8), got (1, 2, 4, 7)", {"k": k[..., :7]}),
        (ValueError, "`v` must have shape (1, 2, 4, 8), got (1, 2, 3, 8)", {"v": v[:, :, :3]}),
        (ValueError, "the last dimension of `q` (head_dim) must not be 0, got shape (1, 2, 3, 0)", {"q": q[..., :0]}),
        (ValueError, "`k` must be on the device of `q`", {"k": torch.ones(1, 2, 4, 8, device=other)}),
        (ValueError, "`key_end` must be on the device of `q`", {"key_end": bounds([1], other)}),
    ]
    for heads in (0, 3, 4):
        odd = torch.ones(1, heads, 4, 8, device=device)
        text = f"the heads of `q` must be a multiple of those of `k`, got 2 and {heads}"
        bad.append((ValueError, text, {"k": odd, "v": odd}))
    for error, text, changed in bad:
        with testing.raises(error, f"attention: {text}", f"got {other}" if "device" in text else ""):
            step2_attention.attention(**({"q": q, "k": k, "v": v} | changed))
    for mask, got in ((torch.ones(3, 4, device=device), "a tensor of shape (3, 4)"), ("alibi", "'alibi'")):
        with testing.raises(ValueError, f"attention: `attn_mask` must be None, got {got}", "causal=True"):
            step2_attention.attention(q, k, v, attn_mask=mask)


@on_each_device
def test_a_rung_refuses_by_name_what_it_cannot_do_and_names_one_that_can(device):
    q = torch.ones(1, 1, 2, 257, device=device)
    with testing.raises(ValueError, "attention: rung 'v2_tiled' takes head_dim ≤ 256, got 257; these can: 'v1_naive'"):
        step2_attention.attention(q, q, q, rung="v2_tiled")
    q = torch.ones(1, 1, 2, 8, device=device, dtype=torch.float64)
    with testing.raises(ValueError, "rung 'v2_tiled' takes float32, float16 or bfloat16, got float64", "'v1_naive'"):
        step2_attention.attention(q, q, q, rung="v2_tiled")
    for rung in filter(on_tensor_cores, step2_attention.rungs("attention", device)):
        q = torch.ones(1, 1, 2, 8, device=device)
        for dtype in (torch.float32, torch.float64):
            got = str(dtype).removeprefix("torch.")
            with testing.raises(ValueError, f"rung '{rung}' takes float16 or bfloat16, got {got}", "these can: 'v1_"):
                step2_attention.attention(q.to(dtype), q.to(dtype), q.to(dtype), rung=rung)
        for dim in (12, 136):
            q = torch.ones(1, 1, 2, dim, device=device, dtype=torch.float16)
            with testing.raises(
                ValueError, f"rung '{rung}' takes head_dim that is a multiple of 8 up to 128, got {dim}", "'v2_tiled'"
            ):
                step2_attention.attention(q, q, q, rung=rung)
    q = torch.ones(1, 1, 2, 8, device=device)
    for rung in ("v9", "", "V1_NAIVE"):
        for x, y in ((q, q), (q[:0], q[:0]), (q, q[:, :, :0])):  # empty ones too
            with testing.raises(
                ValueError, "attention: `rung` must be 'auto' or one of", "'v2_tiled'", f"got '{rung}'"
            ):
                step2_attention.attention(x, y, y, rung=rung)
            with testing.raises(ValueError, "softmax: `rung` must be 'auto' or one of", "'v3_online'", f"got '{rung}'"):
                step2_attention.softmax(x, rung=rung)


@on_each_device
def test_a_bad_out_is_refused(device):
    x = torch.ones(4, 3, device=device)
    with testing.raises(ValueError, "softmax: `out` must have shape (4, 3), got (3,)"):
        ops.softmax.out(x, out=torch.empty(3, device=device))
    with testing.raises(ValueError, "softmax: `out` must be contiguous"):
        ops.softmax.out(x, out=torch.empty(3, 4, device=device).T)
    with testing.raises(ValueError, "softmax: `out` must not share memory with `x`"):
        ops.softmax.out(x, out=x)
    q = torch.ones(1, 2, 3, 8, device=device)
    good = {"out": torch.empty_like(q), "lse": lse_for(q)}
    for error, text, name, value in (
        (TypeError, "`out` must have the dtype of `q` (float32), got float16", "out", q.half()),
        (ValueError, "`out` must have shape (1, 2, 3, 8), got (1, 2, 3, 7)", "out", q[..., 1:]),
        (ValueError, "the last dimension of `out` must be contiguous, got stride 3", "out", q.mT.contiguous().mT),
        (ValueError, "`out` must not be expanded", "out", q[:, :1].clone().expand(1, 2, 3, 8)),
        (TypeError, "`lse` must be float32, got float64", "lse", lse_for(q).double()),
        (ValueError, "`lse` must have shape (1, 2, 3), got (1, 2, 4)", "lse", torch.empty(1, 2, 4, device=device)),
        (ValueError, "`lse` must be contiguous", "lse", torch.empty(1, 3, 2, device=device).mT),
    ):
        with testing.raises(error, f"attention: {text}"):
            ops.attention.out(q, q, q, **(good | {name: value}))
    with testing.raises(TypeError, "attention: `lse` must be float64, got float32"):
        ops.attention.out(*(q.double(),) * 3, out=q.double(), lse=lse_for(q))


@on_each_device
def test_an_out_that_shares_memory_with_an_input_is_refused(device):
    testing.check_apart(step2_attention, "softmax", (testing.randn((4, 3), torch.float32, device),))
    inputs = (*qkv(3, 4, 8, torch.float32, device), bounds([1], device), bounds([4], device))
    testing.check_apart(step2_attention, "attention", inputs, {"causal": True})


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_tensors_on_a_gpu_and_a_cpu_are_refused(device):
    q = torch.ones(1, 1, 2, 8)
    with testing.raises(ValueError, "attention: `v` must be on the device of `q` (cpu), got cuda:0"):
        step2_attention.attention(q, q, q.to(device))
    q, on_cpu = q.to(device), q
    with testing.raises(ValueError, "attention: `k` must be on the device of `q` (cuda:0), got cpu"):
        step2_attention.attention(q, on_cpu, on_cpu)
    with testing.raises(ValueError, "attention: `lse` must be on the device of `q` (cuda:0), got cpu"):
        ops.attention.out(q, q, q, out=torch.empty_like(q), lse=lse_for(on_cpu))


def test_rungs_refuses_an_unknown_op():
    with testing.raises(
        ValueError,
        "rungs: `op` must be 'linear', 'linear_backward', 'softmax', 'softmax_backward', 'attention', "
        "'attention_backward' or 'attention_decode', "
        "got 'sdpa'",
    ):
        step2_attention.rungs("sdpa")
    assert "cpu" not in step2_attention.rungs("softmax", "cuda")


def test_a_step_that_is_not_built_says_how_to_build_it(tmp_path):
    testing.check_not_built("step2_attention", tmp_path)
