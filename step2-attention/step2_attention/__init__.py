"""Step 2: softmax and attention. Each Python function calls a registered op; here it gets shapes and gradients."""

import torch

from kernel_fusion.ops import check_dim, check_floating, check_like, check_rows, check_shape, contiguous_like, wide
from kernel_fusion.stages import load

_C = load("step2_attention")
_ops = torch.ops.step2_attention

__all__ = ["attention", "launch_counts", "rounds", "rungs", "softmax"]

launch_counts = _C.launch_counts


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


def rounds(op: str, rung: str) -> str:
    """What `rung` of `op` rounds to the tensors' dtype on the way; "" for one that rounds once, at the end."""
    return _C.rounds(op, rung)


def softmax(x: torch.Tensor, *, rung: str = "auto") -> torch.Tensor:
    """`exp(x) / exp(x).sum(-1)`: positive, adds up to 1 over the last dimension, and does not overflow.

    Args:
        x: [..., width], any strides, width of any size but 0; float32, float16, bfloat16 or float64.
        rung: "auto", or a name from `rungs("softmax", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype, computed in float32 (float64 for float64) and rounded once. As in
        PyTorch, a row that holds NaN or +inf, or nothing but -inf, is NaN. Under autocast `x` is made float32.

    Raises:
        TypeError: `x` is of another dtype.
        ValueError: `x` has no dimension, or its last one is 0; unknown `rung`.

    Source: online normalizer, Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    """
    return _ops.softmax(x, rung=rung)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: None = None,
    causal: bool = False,
    scale: float | None = None,
    rung: str = "auto",
) -> torch.Tensor:
    """`softmax(scale * q @ k.mT) @ v` for each batch and head.

    Args:
        q: [B, H, Sq, D]; float32, float16, bfloat16 or float64. Any strides; views whose last dimension is contiguous,
            such as GPT-2's packed q, k and v, are read as they lie, others are copied first.
        k, v: [B, H, Sk, D], dtype and device of `q`.
        attn_mask: None; this stage has no other mask than `causal`.
        causal: query i sees keys j <= i + Sk - Sq, so that the last query sees all. (PyTorch's `is_causal` aligns the
            first query with the first key instead; at Sq = Sk both are the same.)
        scale: factor for the scores; None for 1/sqrt(D).
        rung: "auto", or a name from `rungs("attention", q.device)`.

    Returns:
        A contiguous tensor of q's shape and dtype, computed in float32 (float64 for float64) and rounded once. A query
        that sees no key gives 0. Under autocast q, k and v are made autocast's dtype.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, head_dim 0, any `attn_mask`, a `rung` that is unknown or cannot do this.

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762; in tiles, Dao et al., https://arxiv.org/abs/2205.14135.
    """
    if attn_mask is not None:
        got = f"a tensor of shape {tuple(attn_mask.shape)}" if isinstance(attn_mask, torch.Tensor) else repr(attn_mask)
        raise ValueError(f"attention: `attn_mask` must be None, got {got}; the only mask here is causal=True")
    return _ops.attention(q, k, v, causal=causal, scale=scale, rung=rung)


# ---- shapes, for torch.compile and for meta tensors: the checks of attention_host.cpp, without data ----


@torch.library.register_fake("step2_attention::softmax")
def _(x, *, rung="auto"):
    check_rows("softmax", "x", x)
    return contiguous_like(x)


@torch.library.register_fake("step2_attention::attention")
def _(q, k, v, *, causal=False, scale=None, rung="auto"):
    op = "attention"
    check_floating(op, "q", q)
    check_dim(op, "q", q, 4)
    batch, heads, q_length, head_dim = q.shape
    torch._check_value(
        head_dim != 0,
        lambda: f"attention: the last dimension of `q` (head_dim) must not be 0, got shape {tuple(q.shape)}",
    )
    check_like(op, "k", k, "q", q)
    check_dim(op, "k", k, 4)
    check_shape(op, "k", k, (batch, heads, k.shape[2], head_dim))
    check_like(op, "v", v, "q", q)
    check_dim(op, "v", v, 4)
    check_shape(op, "v", v, k.shape)
    return contiguous_like(q)


# ---- gradients: half types in float32, rounded once at the end ----


def _softmax_gradient(y, grad):
    return y * (grad - (y * grad).sum(-1, keepdim=True))


def _softmax_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(output)


def _softmax_backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return _softmax_gradient(wide(y), wide(grad)).to(y.dtype)


torch.library.register_autograd("step2_attention::softmax", _softmax_backward, setup_context=_softmax_setup)


def _attention_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.causal = keyword_only_inputs["causal"]
    scale = keyword_only_inputs["scale"]
    ctx.scale = inputs[0].size(-1) ** -0.5 if scale is None else scale


def _attention_backward(ctx, grad):
    dtype, device = grad.dtype, grad.device
    q, k, v, grad = map(wide, (*ctx.saved_tensors, grad))
    q_length, k_length = q.size(-2), k.size(-2)
    if k_length == 0:
        return torch.zeros_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
    with torch.autocast(device.type, enabled=False):  # a backward called inside an autocast region computes the same
        scores = ctx.scale * (q @ k.mT)
        if ctx.causal:
            hidden = torch.ones(q_length, k_length, dtype=torch.bool, device=device).triu(k_length - q_length + 1)
            # Softmax makes NaN of a row that sees nothing; its weights are 0.
            weights = _ops.softmax(scores.masked_fill(hidden, -torch.inf)).masked_fill(hidden, 0)
        else:
            weights = _ops.softmax(scores)
        grad_scores = ctx.scale * _softmax_gradient(weights, grad @ v.mT)
        grads = grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad
    return tuple(g.to(dtype) for g in grads)


torch.library.register_autograd("step2_attention::attention", _attention_backward, setup_context=_attention_setup)
