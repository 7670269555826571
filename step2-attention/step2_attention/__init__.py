"""Step 2: softmax and attention. Each Python function calls a registered op; here it gets shapes and gradients."""

import torch

from kernel_fusion.stages import load

_C = load("step2_attention")
_ops = torch.ops.step2_attention

__all__ = ["attention", "launch_counts", "rungs", "softmax"]

launch_counts = _C.launch_counts


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


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

_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _check_floating(op, name, x):
    got = _name(x.dtype)
    torch._check_type(
        x.dtype in _FLOATING, lambda: f"{op}: `{name}` must be float32, float16, bfloat16 or float64, got {got}"
    )


def _check_dim_4(name, x):
    shape = tuple(x.shape)
    torch._check_value(
        x.dim() == 4, lambda: f"attention: `{name}` must have 4 dimensions, got {len(shape)} (shape {shape})"
    )


def _check_like_q(name, x, q, shape):
    torch._check_type(
        x.dtype == q.dtype,
        lambda: f"attention: `{name}` must have the dtype of `q` ({_name(q.dtype)}), got {_name(x.dtype)}",
    )
    torch._check_value(
        x.device == q.device,
        lambda: f"attention: `{name}` must be on the device of `q` ({q.device}), got {x.device}",
    )
    _check_dim_4(name, x)
    torch._check_value(
        tuple(x.shape) == shape, lambda: f"attention: `{name}` must have shape {shape}, got {tuple(x.shape)}"
    )


@torch.library.register_fake("step2_attention::softmax")
def _(x, *, rung="auto"):
    _check_floating("softmax", "x", x)
    shape = tuple(x.shape)
    torch._check_value(len(shape) > 0, lambda: "softmax: `x` must have at least 1 dimension, got 0 (shape ())")
    torch._check_value(shape[-1] != 0, lambda: f"softmax: the last dimension of `x` must not be 0, got shape {shape}")
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("step2_attention::attention")
def _(q, k, v, *, causal=False, scale=None, rung="auto"):
    _check_floating("attention", "q", q)
    _check_dim_4("q", q)
    batch, heads, q_length, head_dim = q.shape
    torch._check_value(
        head_dim != 0,
        lambda: f"attention: the last dimension of `q` (head_dim) must not be 0, got shape {tuple(q.shape)}",
    )
    _check_dim_4("k", k)
    _check_like_q("k", k, q, (batch, heads, k.shape[2], head_dim))
    _check_like_q("v", v, q, tuple(k.shape))
    return torch.empty_like(q, memory_format=torch.contiguous_format)


# ---- gradients: half types in float32, rounded once at the end ----


def _wide(*tensors):
    return [t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors]


def _softmax_gradient(y, grad):
    return y * (grad - (y * grad).sum(-1, keepdim=True))


def _softmax_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(output)


def _softmax_backward(ctx, grad):
    (y,) = ctx.saved_tensors
    return _softmax_gradient(*_wide(y, grad)).to(y.dtype)


torch.library.register_autograd("step2_attention::softmax", _softmax_backward, setup_context=_softmax_setup)


def _attention_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.causal = keyword_only_inputs["causal"]
    scale = keyword_only_inputs["scale"]
    ctx.scale = inputs[0].size(-1) ** -0.5 if scale is None else scale


def _attention_backward(ctx, grad):
    dtype, device = grad.dtype, grad.device
    q, k, v, grad = _wide(*ctx.saved_tensors, grad)
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
