"""attention_decode: which rung is chosen, and what is refused, in words that say what to do.

python tests/test_decode_choice.py        pytest's options may follow, such as -k auto
"""

import pytest
import torch

import step2_attention
from kernel_fusion import testing
from step2_attention.testing import bounds, cached, lse_for, on_each_device, ops, paged, takes_pages

OP = "attention_decode"
decode = step2_attention.attention_decode


def choose(rung, dtype=torch.bfloat16, **sizes):
    return step2_attention._C.choose(OP, rung, {"head_dim": 64, "k_length": 1024} | sizes, dtype)


SIZES = {"B": "batch", "H": "heads", "Hkv": "kv_heads", "Sq": "q_length", "Sk": "k_length", "D": "head_dim"}


def test_auto_is_read_off_the_results():
    def sizes(shape):  # with pages only one rung in half types is made for many keys
        return None if "page" in shape else {SIZES[name]: n for name, n in shape.items()}

    testing.check_automatic(step2_attention, OP, sizes)


def test_auto_takes_the_last_rung_that_can():
    assert choose("auto") == "v6_paged"
    assert choose("auto", torch.float32) == "v2_split"
    assert choose("auto", head_dim=256) == "v2_split"
    assert choose("auto", torch.float32, head_dim=129) == "v1_head"
    assert choose("auto", torch.float64) == "v1_head"


@pytest.mark.parametrize("rung", ["v3_mma", "v4_pipeline", "v5_cluster", "v6_paged"])
def test_what_is_too_large_for_a_rung_is_refused(rung):
    """Sizes alone decide, so no memory is needed."""
    assert choose(rung, batch=65535, heads=65535, q_length=16) == rung
    for name, sizes in (("batches", {"batch": 65536}), ("heads", {"heads": 65536, "kv_heads": 2})):
        with testing.raises(ValueError, f"rung '{rung}' takes at most 65535 {name}, got 65536", "'v1_head'"):
            choose(rung, **sizes)
    with testing.raises(ValueError, f"rung '{rung}' takes at most {1 << 30} keys, got {1 << 31}"):
        choose(rung, k_length=1 << 31)
    for dim in (12, 136):
        with testing.raises(
            ValueError, f"rung '{rung}' takes head_dim that is a multiple of 8 up to 128, got {dim}", "'v1_head'"
        ):
            choose(rung, head_dim=dim)
    for dtype in (torch.float32, torch.float64):
        with testing.raises(ValueError, f"rung '{rung}' takes float16 or bfloat16, got {str(dtype)[6:]}", "'v1_head'"):
            choose(rung, dtype)


def test_what_is_too_large_for_the_first_rungs_is_refused():
    most = (1 << 31) - 1
    assert choose("v1_head", batch=most) == "v1_head"
    with testing.raises(ValueError, f"rung 'v1_head' takes at most {most} heads in all batches, got {1 << 31}"):
        choose("v1_head", batch=1 << 30, heads=2, kv_heads=2)
    with testing.raises(ValueError, "rung 'v1_head' takes head_dim ≤ 256, got 257"):
        choose("v1_head", head_dim=257)
    rows = most // 64
    assert choose("v2_split", batch=rows) == "v2_split"
    with testing.raises(ValueError, f"rung 'v2_split' takes at most {rows} queries in all heads and batches, got"):
        choose("v2_split", batch=rows // 3 + 1, q_length=3)
    with testing.raises(ValueError, "rung 'v2_split' takes float32, float16 or bfloat16, got float64"):
        choose("v2_split", torch.float64)
    for dtype, dim, vector in ((torch.float32, 6, 4), (torch.float32, 132, 4), (torch.float16, 264, 8)):
        with testing.raises(
            ValueError, f"takes head_dim that is a multiple of {vector} up to {32 * vector}, got {dim}", "'v2_split'"
        ):
            choose("v2_split", dtype, head_dim=dim)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_it_refuses(device):
    q, k, v = (torch.ones(2, 2, n, 8, device=device) for n in (3, 48, 48))
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    other = "meta" if device != "meta" else "cpu"
    bad = [
        (
            ValueError,
            "`q` must have at most 16 queries, got 17; `attention` takes",
            {"q": q[:, :, :1].expand(2, 2, 17, 8)},
        ),
        (TypeError, "`q` must be float32, float16, bfloat16 or float64, got int32", {"q": q.int()}),
        (ValueError, "`q` must have 4 dimensions, got 3 (shape (2, 3, 8))", {"q": q[0]}),
        (ValueError, "the last dimension of `q` (head_dim) must not be 0", {"q": q[..., :0]}),
        (TypeError, "`k_cache` must have the dtype of `q` (float32), got float16", {"k_cache": k.half()}),
        (TypeError, "`v_cache` must have the dtype of `q` (float32), got float16", {"v_cache": v.half()}),
        (ValueError, "`k_cache` must have 4 dimensions, got 3 (shape (2, 48, 8))", {"k_cache": k[0]}),
        (ValueError, "`v_cache` must have 4 dimensions, got 3 (shape (2, 48, 8))", {"v_cache": v[0]}),
        (ValueError, "`k_cache` must have shape (2, 2, 48, 8), got (1, 2, 48, 8)", {"k_cache": k[:1]}),
        (ValueError, "`k_cache` must have shape (2, 2, 48, 8), got (2, 2, 48, 7)", {"k_cache": k[..., :7]}),
        (ValueError, "`v_cache` must have shape (2, 2, 48, 8), got (2, 2, 47, 8)", {"v_cache": v[:, :, 1:]}),
        (ValueError, "`v_cache` must be on the device of `q`", {"v_cache": torch.ones(2, 2, 48, 8, device=other)}),
        (TypeError, "`block_table` must be int32, got int64", {"block_table": table.long()}),
        (ValueError, "`block_table` must have 2 dimensions, got 1 (shape (3,))", {"block_table": table[0]}),
        (ValueError, "`block_table` must have shape (2, 3), got (1, 3)", {"block_table": table[:1]}),
        (ValueError, "`block_table` must be on the device of `q`", {"block_table": bounds([[0] * 3] * 2, other)}),
    ]
    for heads in (0, 3, 4):
        odd = torch.ones(2, heads, 4, 8, device=device)
        text = f"the heads of `q` must be a multiple of those of `k_cache`, got 2 and {heads}"
        bad.append((ValueError, text, {"k_cache": odd, "v_cache": odd}))
    for name in ("key_begin", "key_end"):
        keys = bounds([1, 1], device)
        bad.append((TypeError, f"`{name}` must be int32, got int64", {name: keys.long()}))
        bad.append((ValueError, f"`{name}` must have shape (2,), got (3,)", {name: bounds([1, 1, 1], device)}))
    for error, text, changed in bad:
        with testing.raises(error, f"attention_decode: {text}", f"got {other}" if "device" in text else ""):
            decode(**({"q": q, "k_cache": k, "v_cache": v} | changed))


@on_each_device
def test_rungs_that_take_no_pages_say_so(device):
    q, k, v, table = paged(1, 2, 16, 64, torch.bfloat16, device)
    for rung in step2_attention.rungs(OP, device):
        if not takes_pages(rung):
            with testing.raises(ValueError, f"attention_decode: rung '{rung}' takes no `block_table`", "'v1_head'"):
                decode(q, k, v, block_table=table, rung=rung)


@on_each_device
def test_a_bad_out_is_refused(device):
    q, k, v = cached(3, 9, 8, torch.float32, device)
    out, lse = torch.empty_like(q), lse_for(q)
    with testing.raises(TypeError, "attention_decode: `out` must have the dtype of `q` (float32), got float16"):
        ops.attention_decode.out(q, k, v, out=out.half(), lse=lse)
    with testing.raises(ValueError, "attention_decode: `lse` must have shape (2, 2, 3), got (2, 2, 4)"):
        ops.attention_decode.out(q, k, v, out=out, lse=torch.empty(2, 2, 4, device=device))
    inputs = *paged(3, 2, 16, 8, torch.float32, device), bounds([1, 0], device), bounds([30, 31], device)
    testing.check_apart(step2_attention, OP, (*inputs[:3], *inputs[4:], inputs[3]))


if __name__ == "__main__":
    testing.main(__file__)
