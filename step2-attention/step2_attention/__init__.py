"""Step 2: the matrix product, softmax and attention. Each function calls a registered op, with shapes and gradients."""

import torch

from kernel_fusion import rng, sharding
from kernel_fusion.ops import (
    check_device,
    check_dim,
    check_documents,
    check_floating,
    check_key_bounds,
    check_like,
    check_rows,
    check_shape,
    check_type,
    contiguous_like,
    register_autograd,
    wide,
    without_forward_mode,
)
from kernel_fusion.steps import load

_C = load("step2_attention")

from step2_attention.linear_ops import linear, linear_backward  # noqa: E402  _C registers the ops

_ops = torch.ops.step2_attention

__all__ = [
    "attention",
    "attention_backward",
    "attention_decode",
    "launch_counts",
    "linear",
    "linear_backward",
    "rounds",
    "rungs",
    "softmax",
    "softmax_backward",
    "varies",
]

launch_counts = _C.launch_counts


def rungs(op: str, device: str | torch.device = "cpu") -> list[str]:
    """Names that `op` takes as `rung` for tensors on `device`, in the order of the lesson."""
    return _C.rungs(op, torch.device(device).type == "cuda")


def rounds(op: str, rung: str) -> str:
    """What `rung` of `op` rounds to the tensors' dtype on the way; "" for one that rounds once, at the end."""
    return _C.rounds(op, rung)


def varies(op: str, rung: str) -> bool:
    """Whether two runs of `rung` may differ in their last bits, since blocks add to the same numbers in any order."""
    return _C.varies(op, rung)


@without_forward_mode
def softmax(x: torch.Tensor, *, scale: float | None = None, causal: bool = False, rung: str = "auto") -> torch.Tensor:
    """`exp(scale * x) / exp(scale * x).sum(-1)`: positive, adds up to 1 over the last dimension, does not overflow.

    Args:
        x: [..., width], any strides, width of any size but 0; float32, float16, bfloat16 or float64.
        scale: what `x` is multiplied by first; None for 1.
        causal: x holds squares of scores, [..., Sq, Sk], and row i sees columns j <= i + Sk - Sq, so that the last row
            sees all. The other columns are 0, and what they hold is not used: it may be NaN.
        rung: "auto", or a name from `rungs("softmax", x.device)`.

    Returns:
        A contiguous tensor of x's shape and dtype, computed in float32 (float64 for float64) and rounded once. As in
        PyTorch, a row that sees NaN, or nothing but -inf, or +inf after the scaling, is NaN where it sees; a row that
        sees no column is 0. Under autocast `x` is made float32.

    Raises:
        TypeError: `x` is of another dtype.
        ValueError: `x` has no dimension, or one where `causal` is set, or its last one is 0; a `rung` that is unknown
            or cannot do this.

    Source: online normalizer, Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    """
    return _ops.softmax(x, scale=scale, causal=causal, rung=rung)


@without_forward_mode
def softmax_backward(
    grad: torch.Tensor, y: torch.Tensor, *, scale: float | None = None, causal: bool = False, rung: str = "auto"
) -> torch.Tensor:
    """`scale * y * (grad - (y * grad).sum(-1))`: the gradient of `softmax` with respect to its `x`.

    Args:
        grad: the gradient with respect to softmax's output, [..., width], any strides, width of any size but 0;
            float32, float16, bfloat16 or float64.
        y: that output; shape, dtype and device of `grad`, any strides.
        scale: as `softmax` had it; None for 1.
        causal: as `softmax` had it: row i of a square [Sq, Sk] sees columns j <= i + Sk - Sq. The other columns are 0,
            and what `grad` and `y` hold there is not used: it may be NaN.
        rung: "auto", or a name from `rungs("softmax_backward", grad.device)`.

    Returns:
        A contiguous tensor of grad's shape and dtype, computed in float32 (float64 for float64) and rounded once. Of
        half types `y` has been rounded before; that is not undone. Autocast leaves the dtype as it is.

    Raises:
        TypeError: `grad` or `y` is of another dtype.
        ValueError: `grad` has no dimension, or one where `causal` is set, or its last one is 0; `y` differs from it in
            shape or device; a `rung` that is unknown or cannot do this.
    """
    return _ops.softmax_backward(grad, y, scale=scale, causal=causal, rung=rung)


@without_forward_mode
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    attn_mask: None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
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
        rng_state: with dropout, where its random numbers start: int64 [2], seed and offset, on the CPU or on the device
            of `q`; None draws one from PyTorch's generator. Who calls `attention_backward` by hand draws it himself, by
            `torch.randint(1 << 62, (2,))`.
        cu_seqlens: where documents begin in a packed row, in which they lie one behind the other: int32 [n + 1] on the
            device of `q`, 0 first, never falling, Sq last. B is 1, and a query of document d, of those from
            cu_seqlens[d] on and before cu_seqlens[d + 1], sees that document only; `causal` counts within it. None: one
            document a batch. Not together with `key_begin` or `key_end`.
        cu_seqlens_k: where the same documents begin in k and v, Sk last; None for `cu_seqlens`.
        attn_mask: None; there are no other masks than these and `causal`.
        causal: query i sees keys j <= i + Sk - Sq, so that the last query sees all. (PyTorch's `is_causal` aligns the
            first query with the first key instead; at Sq = Sk both are the same.)
        scale: factor for the scores; None for 1/sqrt(D).
        dropout_p: part of the weights that is dropped, from 0 to 1, met to 1/131072; what is kept is divided by the
            part that is kept. Which ones depends on `rng_state` and their place in [B, H, Sq, Sk] alone, so the same
            state gives the same mask on a GPU, emulated and on the CPU.
        return_lse: return the log-sum-exp, too.
        rung: "auto", or a name from `rungs("attention", q.device)`.

    Returns:
        A contiguous tensor of q's shape and dtype, computed in float32 (float64 for float64) and rounded once. A query
        that sees no key gives 0. Under autocast q, k and v are made autocast's dtype. With `return_lse` a pair: that
        tensor, and for each query the natural logarithm of the sum of exp(score) over the keys that it sees, float32
        (float64 for float64) [B, H, Sq]; -inf for a query that sees none.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, head_dim 0, H no multiple of Hkv, any `attn_mask`, a `dropout_p` that is no
            part, a `rung` that is unknown or cannot do this, and, for CPU tensors, starts of documents that are none.
            For CUDA tensors a check would wait for the GPU; with such starts the output may be anything.

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762; in tiles, Dao et al., https://arxiv.org/abs/2205.14135;
        random numbers, Salmon et al., https://doi.org/10.1145/2063384.2063405.
    """
    if attn_mask is not None:
        got = f"a tensor of shape {tuple(attn_mask.shape)}" if isinstance(attn_mask, torch.Tensor) else repr(attn_mask)
        raise ValueError(
            f"attention: `attn_mask` must be None, got {got}; the masks here are causal=True, `key_begin` and `key_end`"
        )
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"attention: `dropout_p` must be from 0 to 1, got {dropout_p}")
    if rng_state is None and rng.drops(dropout_p):
        rng_state = rng.draw(_ops, q)
    options = {"causal": causal, "scale": scale, "dropout_p": dropout_p, "rung": rung}
    out, lse = _ops.attention(q, k, v, key_begin, key_end, rng_state, cu_seqlens, cu_seqlens_k, **options)
    return (out, lse) if return_lse else out


@without_forward_mode
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    rung: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `attention`.

    Reruns are equal to the last bit, but where `varies` says otherwise; no memory grows with Sq * Sk, but in v1_naive.

    Args:
        grad: the gradient of `out`, of its shape, dtype and device.
        q, k, v, key_begin, key_end, rng_state, cu_seqlens, cu_seqlens_k, causal, scale, dropout_p: as `attention` got
            them. With dropout `rng_state` must be given: the mask is made from it again.
        out, lse: what `attention` returned.
        grad_lse: the gradient of `lse`, of its shape and dtype; None for 0.
        rung: "auto", or a name from `rungs("attention_backward", q.device)`.

    Returns:
        dq, dk and dv: contiguous, of the shapes and the dtype of q, k and v, computed in float32 (float64 for float64)
        and rounded once, except where `rounds` says more. Keys that no query sees have a gradient of 0, whatever they
        hold. In float16 a rung on tensor cores overflows where a score's gradient exceeds 65504: scale the loss less.

    Raises:
        TypeError, ValueError: as `attention`.
        RuntimeError: a rung that varies, where torch.use_deterministic_algorithms is set.

    Source: Dao et al., https://arxiv.org/abs/2205.14135, appendix B.
    """
    options = {"causal": causal, "scale": scale, "dropout_p": dropout_p, "rung": rung}
    masks = (key_begin, key_end, grad_lse, rng_state, cu_seqlens, cu_seqlens_k)
    return _ops.attention_backward(grad, q, k, v, out, lse, *masks, **options)


@without_forward_mode
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    key_begin: torch.Tensor | None = None,
    key_end: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    rung: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a text's last tokens over a cache of keys, for generating.

    The last of `q` is the query of key `key_end - 1` and sees all keys that exist; each query before it sees one less.
    Lengths are read on the device, so a CUDA graph can be replayed with other ones.

    Args:
        q: [B, H, Sq, D], Sq from 1 to 16; float32, float16, bfloat16 or float64.
        k_cache, v_cache: [B, Hkv, Sk, D], dtype and device of `q`; Hkv divides H, as in `attention`. With
            `block_table` a heap of pages, [blocks, Hkv, block_size, D]. Read as they lie where rows begin at multiples
            of 16 bytes; others are copied first, which takes longer than the attention.
        key_begin, key_end: which keys exist in batch b: key_begin[b] <= j < key_end[b]. int32 [B] on the device of `q`;
            None for 0, and for all that the cache can hold.
        block_table: int32 [B, pages]; key j of batch b is key j % block_size of page block_table[b, j // block_size].
            Of pages without a key that exists nothing is looked at. Pages may stand in it several times.
        scale: factor for the scores; None for 1/sqrt(D).
        return_lse: return the log-sum-exp, too.
        rung: "auto", or a name from `rungs("attention_decode", q.device)`.

    Returns:
        As `attention` does.

    Raises:
        TypeError: a dtype that is not supported or not the same.
        ValueError: wrong shape or device, more than 16 queries, H no multiple of Hkv, a `rung` that is unknown or
            cannot do this, and, for CPU tensors, a page that the cache does not have. For CUDA tensors a check would
            wait for the GPU; the output of a query that sees such a page becomes NaN.
        RuntimeError: gradients are being recorded; `attention` passes them on.

    Source: split over keys, Dao et al., https://pytorch.org/blog/flash-decoding; pages, Kwon et al.,
        https://arxiv.org/abs/2309.06180.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k_cache, v_cache)):
        raise RuntimeError(
            "attention_decode: `q`, `k_cache` and `v_cache` must not require gradients; generate under torch.no_grad()"
        )
    out, lse = _ops.attention_decode(q, k_cache, v_cache, key_begin, key_end, block_table, scale=scale, rung=rung)
    return (out, lse) if return_lse else out


# ---- shapes, for torch.compile and for meta tensors: the checks of attention_host.cpp, without data ----


def _check_squares(op, name, x, causal):
    torch._check_value(
        not causal or x.dim() >= 2,
        lambda: (
            f"{op}: `{name}` must have at least 2 dimensions where `causal` is set, got {x.dim()} "
            f"(shape {tuple(x.shape)})"
        ),
    )


@torch.library.register_fake("step2_attention::softmax")
def _(x, *, scale=None, causal=False, rung="auto"):
    check_rows("softmax", "x", x)
    _check_squares("softmax", "x", x, causal)
    return contiguous_like(x)


@torch.library.register_fake("step2_attention::softmax_backward")
def _(grad, y, *, scale=None, causal=False, rung="auto"):
    check_rows("softmax_backward", "grad", grad)
    _check_squares("softmax_backward", "grad", grad, causal)
    check_like("softmax_backward", "y", y, "grad", grad, grad.shape)
    return contiguous_like(grad)


def _check_q(op, q):
    check_floating(op, "q", q)
    check_dim(op, "q", q, 4)
    torch._check_value(
        q.shape[3] != 0,
        lambda: f"{op}: the last dimension of `q` (head_dim) must not be 0, got shape {tuple(q.shape)}",
    )


def _check_keys(op, q, k_name, k, v_name, v, batch):
    heads, kv_heads = q.shape[1], k.shape[1]
    check_shape(op, k_name, k, (batch, kv_heads, k.shape[2], q.shape[3]))
    torch._check_value(
        kv_heads == heads or (kv_heads > 0 and heads % kv_heads == 0),
        lambda: f"{op}: the heads of `q` must be a multiple of those of `{k_name}`, got {heads} and {kv_heads}",
    )
    check_like(op, v_name, v, "q", q)
    check_dim(op, v_name, v, 4)
    check_shape(op, v_name, v, k.shape)


def _out_and_lse(q):
    return contiguous_like(q), q.new_empty(
        q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32
    )


def _check_attention(op, q, k, v, key_begin, key_end, cu_seqlens=None, cu_seqlens_k=None):
    _check_q(op, q)
    check_like(op, "k", k, "q", q)
    check_dim(op, "k", k, 4)
    _check_keys(op, q, "k", k, "v", v, q.shape[0])
    check_key_bounds(op, q, key_begin, key_end)
    check_documents(op, q, k, key_begin, key_end, cu_seqlens, cu_seqlens_k)


rng.register_fake("step2_attention")


@torch.library.register_fake("step2_attention::attention")
def _(
    q,
    k,
    v,
    key_begin=None,
    key_end=None,
    rng_state=None,
    cu_seqlens=None,
    cu_seqlens_k=None,
    *,
    causal=False,
    scale=None,
    dropout_p=0.0,
    rung="auto",
):
    _check_attention("attention", q, k, v, key_begin, key_end, cu_seqlens, cu_seqlens_k)
    rng.check("attention", "dropout_p", dropout_p, rng_state, q)
    return _out_and_lse(q)


@torch.library.register_fake("step2_attention::attention_backward")
def _(
    grad,
    q,
    k,
    v,
    out,
    lse,
    key_begin=None,
    key_end=None,
    grad_lse=None,
    rng_state=None,
    cu_seqlens=None,
    cu_seqlens_k=None,
    *,
    causal=False,
    scale=None,
    dropout_p=0.0,
    rung="auto",
):
    op = "attention_backward"
    _check_attention(op, q, k, v, key_begin, key_end, cu_seqlens, cu_seqlens_k)
    check_like(op, "grad", grad, "q", q, q.shape)
    check_like(op, "out", out, "q", q, q.shape)
    for name, of_query in (("lse", lse), ("grad_lse", grad_lse)):
        if of_query is not None:
            check_type(op, name, of_query, (torch.float64 if q.dtype == torch.float64 else torch.float32,))
            check_device(op, name, of_query, "q", q)
            check_shape(op, name, of_query, q.shape[:3])
    rng.check(op, "dropout_p", dropout_p, rng_state, q)
    return tuple(map(contiguous_like, (q, k, v)))


@torch.library.register_fake("step2_attention::attention_decode")
def _(q, k_cache, v_cache, key_begin=None, key_end=None, block_table=None, *, scale=None, rung="auto"):
    op = "attention_decode"
    _check_q(op, q)
    torch._check_value(
        q.shape[2] <= 16, lambda: f"{op}: `q` must have at most 16 queries, got {q.shape[2]}; `attention` takes more"
    )
    check_like(op, "k_cache", k_cache, "q", q)
    check_dim(op, "k_cache", k_cache, 4)
    _check_keys(op, q, "k_cache", k_cache, "v_cache", v_cache, q.shape[0] if block_table is None else k_cache.shape[0])
    check_key_bounds(op, q, key_begin, key_end)
    if block_table is not None:
        check_type(op, "block_table", block_table, (torch.int32,))
        check_device(op, "block_table", block_table, "q", q)
        check_dim(op, "block_table", block_table, 2)
        check_shape(op, "block_table", block_table, (q.shape[0], block_table.shape[1]))
    return _out_and_lse(q)


# ---- gradients: half types in float32, rounded once at the end ----


def _softmax_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(output)
    ctx.scale, ctx.causal = keyword_only_inputs["scale"], keyword_only_inputs["causal"]


def _softmax_backward(ctx, grad):
    return _ops.softmax_backward(grad, ctx.saved_tensors[0], scale=ctx.scale, causal=ctx.causal)


register_autograd("step2_attention::softmax", _softmax_backward, setup_context=_softmax_setup)


def _softmax_backward_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.scale, ctx.causal = keyword_only_inputs["scale"], keyword_only_inputs["causal"]


def _softmax_backward_backward(ctx, grad_grad):
    grad, y = ctx.saved_tensors
    # It is linear in grad, by a matrix that is symmetric: so that gradient is the op itself.
    to_grad = _ops.softmax_backward(grad_grad, y, scale=ctx.scale, causal=ctx.causal)
    dtype, grad_grad, grad, y = y.dtype, *map(wide, (grad_grad, grad, y))
    if ctx.causal:  # hidden columns are constants: even NaN has no influence there
        grad_grad, grad, y = (t.tril(t.size(-1) - t.size(-2)) for t in (grad_grad, grad, y))
    to_y = grad_grad * (grad - (y * grad).sum(-1, keepdim=True)) - grad * (y * grad_grad).sum(-1, keepdim=True)
    return to_grad, (to_y if ctx.scale is None else ctx.scale * to_y).to(dtype)


register_autograd(
    "step2_attention::softmax_backward", _softmax_backward_backward, setup_context=_softmax_backward_setup
)


def _attention_setup(ctx, inputs, keyword_only_inputs, output):
    q, k, v, *others = inputs
    ctx.save_for_backward(q, k, v, *output, *others)
    ctx.options = {name: keyword_only_inputs[name] for name in ("causal", "scale", "dropout_p")}
    ctx.set_materialize_grads(False)


def gradients(*inputs, **options):
    """attention_backward's, which lie in one tensor [B, S, 3, H, D] where q, k and v seem to, as in GPT-2: it is the
    gradient of what q, k and v were taken from, and needs no copy. Not under torch.compile, which takes outputs of an
    op for separate tensors; nor where gradients of gradients may follow."""
    q, k, v = inputs[1:4]
    batch, heads, length, head_dim = q.shape
    packed = (3 * length * heads * head_dim, head_dim, 3 * heads * head_dim, 1)
    if (
        torch.is_grad_enabled()
        or any(type(x) is not torch.Tensor or x.shape != q.shape or x.stride() != packed for x in (q, k, v))
    ):  # fmt: skip
        return _ops.attention_backward(*inputs, **options)
    dq, dk, dv = q.new_empty(batch, length, 3, heads, head_dim).permute(2, 0, 3, 1, 4).unbind()
    return _ops.attention_backward.out(*inputs, **options, dq=dq, dk=dk, dv=dv)


def _attention_backward(ctx, grad, grad_lse):
    q, k, v, out, lse, key_begin, key_end, rng_state, *documents = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(q)
    given = (grad, q, k, v, out, lse, key_begin, key_end, grad_lse, rng_state, *documents)
    return *gradients(*given, **ctx.options), *[None] * 5


register_autograd("step2_attention::attention", _attention_backward, setup_context=_attention_setup)


# The gradients of these gradients are few people's need: they are PyTorch's operations, with all scores in memory.


def _attention_backward_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.causal, ctx.dropout_p = keyword_only_inputs["causal"], keyword_only_inputs["dropout_p"]
    scale = keyword_only_inputs["scale"]
    ctx.scale = inputs[1].size(-1) ** -0.5 if scale is None else scale


def _hidden(q, k, key_begin, key_end, cu_seqlens, cu_seqlens_k, causal):
    """Which pairs of a query and a key do not see each other: a mask that broadcasts to [B, H, Sq, Sk]."""
    key = torch.arange(k.size(2), device=k.device)
    hidden = torch.zeros(q.size(2), k.size(2), dtype=torch.bool, device=k.device)
    if cu_seqlens is not None:
        cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        query = torch.arange(q.size(2), device=k.device)
        document = torch.bucketize(query, cu_seqlens, right=True)  # from 1 on, and so where its end stands
        hidden = document.unsqueeze(-1) != torch.bucketize(key, cu_seqlens_k, right=True)
        if causal:
            hidden = hidden | (key > (query + cu_seqlens_k[document] - cu_seqlens[document]).unsqueeze(-1))
    elif causal:
        hidden = key > torch.arange(q.size(2), device=k.device).unsqueeze(-1) + k.size(2) - q.size(2)
    if key_begin is not None:
        hidden = hidden | (key < key_begin[:, None, None, None])
    if key_end is not None:
        hidden = hidden | (key >= key_end[:, None, None, None])
    return hidden


def _attention_second_backward(ctx, by_dq, by_dk, by_dv):
    """Each by_x is the gradient of x. The names of rungs.h, where attention_backward's formulas stand."""
    if rng.drops(ctx.dropout_p):
        raise NotImplementedError("attention: with dropout there are no gradients of gradients; set `dropout_p` to 0")
    grad, q, k, v, out, lse, key_begin, key_end, grad_lse, _, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
    dtype, kv_heads = q.dtype, k.size(1)
    group = q.size(1) // kv_heads if kv_heads else 1
    grad, q, k, v, out, by_dq, by_dk, by_dv = map(wide, (grad, q, k, v, out, by_dq, by_dk, by_dv))
    with torch.autocast(q.device.type, enabled=False):  # called inside an autocast region it computes the same
        hidden = _hidden(q, k, key_begin, key_end, cu_seqlens, cu_seqlens_k, ctx.causal)
        padding = hidden.all(-2).unsqueeze(-1)  # may hold anything, NaN too, which a weight of 0 would not make 0
        k, v, by_dk, by_dv = (t.masked_fill(padding, 0).repeat_interleave(group, 1) for t in (k, v, by_dk, by_dv))
        weight = torch.exp((ctx.scale * (q @ k.mT) - lse.unsqueeze(-1)).masked_fill(hidden, -torch.inf))
        # Where lse is −∞ a query sees nothing, or nothing but scores of −∞.
        weight = weight.masked_fill(hidden | lse.eq(-torch.inf).unsqueeze(-1), 0)
        delta = (grad * out).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse.unsqueeze(-1)
        grad_weight = grad @ v.mT - delta
        grad_score = weight * grad_weight

        by_grad_score = ctx.scale * (by_dq @ k.mT + q @ by_dk.mT)
        by_weight = by_grad_score * grad_weight + grad @ by_dv.mT
        by_grad_weight = by_grad_score * weight
        by_delta = -by_grad_weight.sum(-1, keepdim=True)
        by_score = by_weight * weight
        by_grad = by_grad_weight @ v + weight @ by_dv + by_delta * out
        by_q = ctx.scale * (by_score @ k + grad_score @ by_dk)
        by_k = ctx.scale * (by_score.mT @ q + grad_score.mT @ by_dq)
        by_v = by_grad_weight.mT @ grad
        if group > 1:
            by_k, by_v = (t.unflatten(1, (kv_heads, group)).sum(2) for t in (by_k, by_v))
        by_out = by_delta * grad
        by_lse = -by_score.sum(-1)
    by_grad_lse = None if grad_lse is None else -by_delta.squeeze(-1)
    return *(t.to(dtype) for t in (by_grad, by_q, by_k, by_v, by_out)), by_lse, None, None, by_grad_lse, *[None] * 3


register_autograd(
    "step2_attention::attention_backward", _attention_second_backward, setup_context=_attention_backward_setup
)


# ---- which parts of DTensors an op takes ----


def _split_of_attention(q, k, rng_state):
    if rng_state is not None:  # a mask belongs to places of the whole tensor
        return ""
    together = q.shape[1] == k.shape[1] or k.shape[1] % q.mesh.size() == 0  # a query's head, and its key's
    return "bh" if together else "b"


sharding.register(
    "step2_attention",
    {
        "linear": lambda bias: "...d, dw', w -> ...w+d | ...w" + ("d" if bias is None else ""),
        "linear_backward": "...w, ...d, dw' -> ...d+w, dw'+..., w+... | ...dw",
        "softmax": lambda causal: "...qw -> ...qw | ..." if causal else "...w -> ...w | ...",
        "softmax_backward": lambda causal: "...qw, ...qw -> ...qw | ..." if causal else "...w, ...w -> ...w | ...",
        "attention": lambda q, k, rng_state: (
            "bhqd, bhkd, bhkd, b, b, _, _, _ -> bhqd, bhq | " + _split_of_attention(q, k, rng_state)
        ),
        "attention_backward": lambda q, k, rng_state: (
            "bhqd, bhqd, bhkd, bhkd, bhqd, bhq, b, b, bhq, _, _, _ -> bhqd, bhkd, bhkd | "
            + _split_of_attention(q, k, rng_state)
        ),
    },
)
