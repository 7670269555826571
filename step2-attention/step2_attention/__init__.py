"""Step 2: softmax and attention. Each Python function calls a registered op; here it gets shapes and gradients."""

import torch

from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_floating,
    check_like,
    check_rows,
    check_shape,
    check_type,
    contiguous_like,
    wide,
)
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
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    *,
    attn_mask: None = None,
    causal: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    rung: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`softmax(scale * q @ k.mT) @ v` for each batch and head.

    Args:
        q: [B, H, Sq, D]; float32, float16, bfloat16 or float64. Any strides; views whose last dimension is contiguous,
            such as GPT-2's packed q, k and v, are read as they lie, others are copied first.
        k, v: [B, Hkv, Sk, D], dtype and device of `q`. Hkv divides H: head h of `q` reads head h // (H // Hkv).
        key_begin, key_end: which keys exist, the rest being padding: in batch b those with
            key_begin[b] <= j < key_end[b]. int32 [B] on the device of `q`; None for 0, and for Sk.
        attn_mask: None; there are no other masks than these and `causal`.
        causal: query i sees keys j <= i + Sk - Sq, so that the last query sees all. (PyTorch's `is_causal` aligns the
            first query with the first key instead; at Sq = Sk both are the same.)
        scale: factor for the scores; None for 1/sqrt(D).
        return_lse: return the log-sum-exp, too.
        rung: "auto", or a name from `rungs("attention", q.device)`.

    Returns:
        A contiguous tensor of q's shape and dtype, computed in float32 (float64 for float64) and rounded once. A query
        that sees no key gives 0. Under autocast q, k and v are made autocast's dtype. With `return_lse` a pair: that
        tensor, and for each query the natural logarithm of the sum of exp(score) over the keys that it sees, float32
        (float64 for float64) [B, H, Sq]; -inf for a query that sees none.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, head_dim 0, H no multiple of Hkv, any `attn_mask`, a `rung` that is unknown
            or cannot do this.

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762; in tiles, Dao et al., https://arxiv.org/abs/2205.14135.
    """
    if attn_mask is not None:
        got = f"a tensor of shape {tuple(attn_mask.shape)}" if isinstance(attn_mask, torch.Tensor) else repr(attn_mask)
        raise ValueError(
            f"attention: `attn_mask` must be None, got {got}; the masks here are causal=True, `key_begin` and `key_end`"
        )
    out, lse = _ops.attention(q, k, v, key_begin, key_end, causal=causal, scale=scale, rung=rung)
    return (out, lse) if return_lse else out


# ---- shapes, for torch.compile and for meta tensors: the checks of attention_host.cpp, without data ----


@torch.library.register_fake("step2_attention::softmax")
def _(x, *, rung="auto"):
    check_rows("softmax", "x", x)
    return contiguous_like(x)


@torch.library.register_fake("step2_attention::attention")
def _(q, k, v, key_begin=None, key_end=None, *, causal=False, scale=None, rung="auto"):
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
    kv_heads = k.shape[1]
    check_shape(op, "k", k, (batch, kv_heads, k.shape[2], head_dim))
    torch._check_value(
        kv_heads == heads or (kv_heads > 0 and heads % kv_heads == 0),
        lambda: f"attention: the heads of `q` must be a multiple of those of `k`, got {heads} and {kv_heads}",
    )
    check_like(op, "v", v, "q", q)
    check_dim(op, "v", v, 4)
    check_shape(op, "v", v, k.shape)
    for name, bound in (("key_begin", key_begin), ("key_end", key_end)):
        if bound is not None:
            check_type(op, name, bound, (torch.int32,))
            check_device(op, name, bound, "q", q)
            check_shape(op, name, bound, (batch,))
    return contiguous_like(q), q.new_empty(
        q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )


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
    ctx.set_materialize_grads(False)


def _missing(k, key_begin, key_end):
    """Which keys are padding: [B, 1, Sk]; None where all exist."""
    key = torch.arange(k.size(2), device=k.device)
    missing = None
    if key_begin is not None:
        missing = key < key_begin[:, None, None]
    if key_end is not None:
        after = key >= key_end[:, None, None]
        missing = after if missing is None else missing | after
    return missing


def _attention_backward(ctx, grad, grad_lse):
    q, k, v, key_begin, key_end = ctx.saved_tensors
    dtype, kv_heads, k_length = q.dtype, k.size(1), k.size(2)
    if (grad is None and grad_lse is None) or k_length == 0:
        return *(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)), None, None
    q, k, v = map(wide, (q, k, v))
    with torch.autocast(q.device.type, enabled=False):  # called inside an autocast region it computes the same
        hidden = None  # keys that a query does not see
        missing = _missing(k, key_begin, key_end)
        if missing is not None:
            # Padding may hold anything, NaN too, which a weight of 0 would not make 0.
            k, v = (t.masked_fill(missing.unsqueeze(-1), 0) for t in (k, v))
            hidden = missing.unsqueeze(-2)
        if ctx.causal:
            square = torch.ones(q.size(2), k_length, dtype=torch.bool, device=q.device)
            future = square.triu(k_length - q.size(2) + 1)
            hidden = future if hidden is None else hidden | future
        group = q.size(1) // kv_heads if kv_heads else 1
        if group > 1:
            k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = ctx.scale * (q @ k.mT)
        if hidden is None:
            weights = _ops.softmax(scores)
        else:
            # Softmax makes NaN of a row that sees nothing; its weights are 0.
            weights = _ops.softmax(scores.masked_fill(hidden, -torch.inf)).masked_fill(hidden, 0)
        # The log-sum-exp's own gradient is the weights.
        by_lse = None if grad_lse is None else weights * grad_lse.unsqueeze(-1)
        if grad is None:
            grad_scores, grad_v = by_lse, torch.zeros_like(v)
        else:
            grad_scores, grad_v = _softmax_gradient(weights, wide(grad) @ v.mT), weights.mT @ wide(grad)
            grad_scores = grad_scores if by_lse is None else grad_scores + by_lse
        grad_scores = ctx.scale * grad_scores
        grad_k = grad_scores.mT @ q
        if group > 1:
            grad_k, grad_v = (g.unflatten(1, (kv_heads, group)).sum(2) for g in (grad_k, grad_v))
        grads = grad_scores @ k, grad_k, grad_v
    return *(g.to(dtype) for g in grads), None, None


torch.library.register_autograd("step2_attention::attention", _attention_backward, setup_context=_attention_setup)
