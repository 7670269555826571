"""python benchmark.py [--help]: every rung of this step beside PyTorch, on the machine at hand."""

from kernel_fusion.cli import bench_parser  # not installed? pip install -e ..

if __name__ == "__main__":
    bench_parser().parse_args()  # --help needs no build

import contextlib
import functools
import itertools
import random

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import step2_attention
from kernel_fusion import steps
from kernel_fusion.bench import benchmarks, layers
from kernel_fusion.bench.layers import DOWN, FLOAT, GPT2, HALF, UP, UPWARD

TEACHES = "Threads that need each other's results: tiles, shuffles, barriers; products on tensor cores; attention."

# rows, depth, width, dtype; with True the weight lies as nn.Linear's
LINEAR = {
    "emulated": [(4, 64, 72, HALF), (64, 64, 128, HALF)],  # the first is one that every rung takes
    "cpu": [(512, 768, 3072, FLOAT), (512, 3072, 768, FLOAT), (1, 768, 3072, FLOAT)],
    "quick": [UP],
    "full": [
        *((16384, *layer, HALF) for layer in GPT2),
        *((1024, *layer, HALF) for layer in [(768, 768), (768, 3072), (3072, 768), (1600, 6400), (6400, 1600)]),
        (2048, 3072, 768, HALF),
        (8192, 8192, 8192, HALF),
        (4096, 4096, 4096, FLOAT),
        *((rows, *layer, HALF) for rows in (1, 4, 16, 64) for layer in [(768, 3072), (3072, 768)]),
        *((rows, 768, 50257, HALF, True) for rows in (1, 64)),  # GPT-2's vocabulary
    ],
}
# rows, depth, width, dtype
LINEAR_BACKWARD = UPWARD | {"full": [UP, DOWN]}
# rows, width, dtype; with a fourth, rows of a square under the causal mask
SOFTMAX = {
    "emulated": [(16, 1024, torch.float32)],
    "cpu": [(4096, 1024, torch.float32), (4096, 1024, torch.bfloat16)],
    "quick": [(16384, 1024, torch.bfloat16)],
    "full": [
        (16384, 768, torch.bfloat16),
        (16384, 1024, torch.bfloat16),
        (16384, 1024, torch.float32),
        (16384, 1600, torch.bfloat16),
        (16384, 1023, torch.bfloat16),  # no row but the first starts at 16 bytes: v3 loads one by one
        (8192, 4096, torch.bfloat16),
        (2048, 50257, torch.bfloat16),  # GPT-2's vocabulary
        (65536, 1024, torch.bfloat16),
        (65536, 4096, torch.bfloat16),
        (2048, 65536, torch.bfloat16),
        (1024, 65536, torch.float32),
        (1024, 131072, torch.bfloat16),
        (96 * 1024, 1024, torch.bfloat16, 1024),  # the scores of B 8, H 12
    ],
}
# B, H, Sq, Sk, D, causal, dtype
ATTENTION = {
    "emulated": [(1, 2, 64, 64, 64, True, torch.bfloat16)],  # which every rung takes
    "cpu": [(1, 12, 512, 512, 64, causal, torch.float32) for causal in (False, True)],
    "quick": [(8, 12, 1024, 1024, 64, True, torch.bfloat16)],
    "full": [
        (1, 12, 1024, 1024, 64, True, torch.bfloat16),
        (8, 12, 1, 1024, 64, False, torch.bfloat16),  # a decode step
        (8, 12, 1024, 1024, 64, True, torch.float32),
        (8, 12, 1024, 1024, 64, True, torch.float16),
        (8, 12, 1024, 1024, 64, False, torch.bfloat16),
        (8, 12, 1024, 1024, 64, True, torch.bfloat16),
        (32, 12, 512, 512, 64, True, torch.bfloat16),
        (32, 12, 1024, 1024, 64, False, torch.bfloat16),
        (32, 12, 1024, 1024, 64, True, torch.bfloat16),
        (4, 16, 4096, 4096, 64, False, torch.bfloat16),
        (4, 16, 4096, 4096, 64, True, torch.bfloat16),
        (4, 16, 2048, 2048, 128, True, torch.bfloat16),
        (4, 16, 4096, 4096, 128, True, torch.bfloat16),
        (1, 12, 256, 256, 64, True, torch.bfloat16),  # few tiles
        (1, 16, 512, 512, 128, False, torch.bfloat16),
    ],
}
# tokens, H, D, causal, the documents' length, dtype; 0: at random, from 64 to 2048
PACKED = {
    "emulated": [(80, 2, 64, True, 50, torch.bfloat16)],
    "cpu": [(2048, 12, 64, True, 0, torch.float32)],
    "quick": [],
    "full": [
        (16384, 12, 64, True, 1024, torch.bfloat16),
        (16384, 12, 64, True, 0, torch.bfloat16),
        (16384, 12, 64, False, 0, torch.bfloat16),
        (32768, 12, 64, True, 0, torch.bfloat16),
        (16384, 16, 128, True, 0, torch.bfloat16),
    ],
}
# B, H, S, D, causal, dtype
ATTENTION_BACKWARD = {
    "emulated": [(1, 2, 64, 64, True, torch.bfloat16)],
    "cpu": [(1, 12, 512, 64, True, torch.float32)],
    "quick": [(8, 12, 1024, 64, True, torch.bfloat16)],
    "full": [
        (8, 12, 1024, 64, True, torch.float32),
        (8, 12, 1024, 64, True, torch.float16),
        (8, 12, 1024, 64, True, torch.bfloat16),
        (32, 12, 512, 64, True, torch.bfloat16),
        (16, 12, 1024, 64, True, torch.bfloat16),  # GPT-2's training
        (32, 12, 1024, 64, True, torch.bfloat16),
        (4, 16, 4096, 64, False, torch.bfloat16),
        (4, 16, 4096, 64, True, torch.bfloat16),
        (4, 16, 4096, 128, False, torch.bfloat16),
        (4, 16, 4096, 128, True, torch.bfloat16),
    ],
}
# As PACKED
PACKED_BACKWARD = {
    "emulated": [],
    "cpu": [],
    "quick": [],
    "full": [
        (16384, 12, 64, True, 1024, torch.bfloat16),
        (16384, 12, 64, True, 0, torch.bfloat16),
        (16384, 12, 64, False, 0, torch.bfloat16),
        (16384, 16, 128, True, 0, torch.bfloat16),
    ],
}
# B, H, Hkv, Sq, Sk, D, keys of a page (0: not paged), dtype
DECODE = {
    "emulated": [(1, 2, 2, 1, 256, 64, 0, torch.bfloat16)],
    "cpu": [(1, 12, 12, 1, 1024, 64, 0, torch.float32)],
    "quick": [(8, 12, 12, 1, 8192, 64, 0, torch.bfloat16)],
    "full": [
        *((b, 12, 12, 1, keys, 64, 0, torch.bfloat16) for b in (1, 8, 64) for keys in (1024, 8192, 32768)),
        (8, 12, 12, 1, 8192, 64, 64, torch.bfloat16),
        (8, 12, 12, 4, 8192, 64, 0, torch.bfloat16),
        (8, 32, 8, 1, 8192, 128, 0, torch.bfloat16),  # heads that share their keys
        (8, 12, 12, 1, 8192, 64, 0, torch.float32),
    ],
}


@functools.cache
def in_triton(name: str):
    """What we have in Triton, which only machines with a GPU need to have."""
    return steps.load_script(steps.find("step2"), f"peers/{name}")


def linear_case(rows, depth, width, dtype: torch.dtype, transposed: bool = False, *, device: str) -> benchmarks.Case:
    function = F.linear if transposed else layers.linear
    peers = {"torch eager": function}  # torch.compile would call the same product of the same library
    if device == "cuda":
        peers["triton"] = lambda x, weight, bias: in_triton("triton_linear").linear(
            x, weight.mT if transposed else weight, bias
        )
    return layers.layer_case(
        step2_attention,
        "linear",
        function,
        (rows, depth, width, dtype),
        peers,
        read=rows * depth + depth * width + width,
        written=rows * width,
        flags={"transposed": 1} if transposed else None,
        inputs=lambda on: layers.layer_inputs(rows, depth, width, dtype, on, transposed),
        run=lambda *given, rung: step2_attention.linear(*given, transposed=transposed, rung=rung),
    )


def linear_backward_case(rows, depth, width, dtype: torch.dtype, *, device: str) -> benchmarks.Case:
    sizes = rows, depth, width, dtype
    peers = {"torch eager": layers.linear_backward}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(layers.linear_backward)
    return layers.layer_case(
        step2_attention,
        "linear_backward",
        layers.linear_backward,
        sizes,
        peers,
        **layers.gradients(rows, depth, width),
        inputs=lambda on: layers.grad_and_layer(*sizes, on),
    )


def softmax_of(x):
    return torch.softmax(x, -1)


def quack_softmax(x):
    """QuACK's: a kernel in CuTe's Python."""
    from quack.softmax import softmax

    return softmax(x)


def causal_softmax_of(x):
    """Softmax of squares of scores under the causal mask, of operations that each write their result."""
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(x.shape[-1] - x.shape[-2] + 1)
    return torch.softmax(x.masked_fill(hidden, -torch.inf), -1)


def softmax_case(rows: int, width: int, dtype: torch.dtype, *square: int, device: str) -> benchmarks.Case:
    (q_length,) = square or (None,)
    assert q_length in (None, width)  # or rows would see nothing, or more than half
    formula = causal_softmax_of if q_length else softmax_of
    peers = {"torch eager": formula}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(formula)
        if not q_length and dtype.itemsize == 2 and benchmarks.installed("quack"):
            peers["QuACK"] = quack_softmax
    written = rows * width * dtype.itemsize
    seen = rows * (width + 1) // 2 if q_length else rows * width
    shape = (rows // q_length, q_length, width) if q_length else (rows, width)
    return benchmarks.Case(
        op="softmax",
        shape={"rows": rows, "width": width} | ({"Sq": q_length, "causal": 1} if q_length else {}),
        dtype=dtype,
        inputs=lambda on: (torch.randn(shape, device=on, dtype=dtype),),
        run=lambda x, rung: step2_attention.softmax(x, causal=q_length is not None, rung=rung),
        reference=formula,
        bytes=seen * dtype.itemsize + written,
        written=written,
        flops=5 * seen,
        peers=peers,
    )


def aten_softmax_backward(grad, y):
    """PyTorch's: a kernel of its own, to which a mask is nothing but weights of 0."""
    return torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)


def quack_softmax_backward(grad, y):
    from quack.softmax import softmax_bwd

    return softmax_bwd(grad, y)


def softmax_backward_case(rows: int, width: int, dtype: torch.dtype, *square: int, device: str) -> benchmarks.Case:
    forward = softmax_case(rows, width, dtype, *square, device=device)
    causal = "causal" in forward.shape
    peers = {"torch eager": aten_softmax_backward}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(aten_softmax_backward)
        if "QuACK" in forward.peers:
            peers["QuACK"] = quack_softmax_backward

    def inputs(on):
        (x,) = forward.inputs(on)
        y = (causal_softmax_of if causal else softmax_of)(x)
        return torch.randn_like(x), y

    return benchmarks.Case(
        op="softmax_backward",
        shape=forward.shape,
        dtype=dtype,
        inputs=inputs,
        run=lambda grad, y, rung: step2_attention.softmax_backward(grad, y, causal=causal, rung=rung),
        reference=aten_softmax_backward,
        bytes=2 * (forward.bytes - forward.written) + forward.written,  # of two tensors as much as softmax reads of one
        written=forward.written,
        flops=forward.flops,  # five operations, too, for each column that is seen
        peers=peers,
        direction="backward",
    )


def composed(causal: bool):
    """Attention as the formula says, of four operations that each write their result."""

    def matmul_softmax_matmul(q, k, v):
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
                k.shape[-2] - q.shape[-2] + 1
            )
            scores = scores.masked_fill(hidden, -torch.inf)
        return torch.softmax(scores, -1) @ v

    return matmul_softmax_matmul


def sdpa(causal: bool, backend: SDPBackend | None = None):
    """PyTorch's own attention, by the backend that it would choose or by the one named."""

    def run(q, k, v):
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


@functools.cache
def causal_blocks(length: int):
    """Which tiles of scores FlexAttention has to look at."""
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")


def flex(q, k, v):
    """FlexAttention under torch.compile, causal: a Triton kernel made for the mask."""
    return compiled_flex(q, k, v, block_mask=causal_blocks(q.shape[-2]))


compiled_flex = torch.compile(flex_attention, dynamic=False)


def flash_attention_4(causal: bool):
    """FlashAttention-4, which has heads behind tokens: given views, it reads and writes what the others do."""

    def run(q, k, v):
        from flash_attn.cute import flash_attn_func

        out = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=causal)
        out = out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp, too
        return out.transpose(1, 2)

    return run


def attention_peers(eager, causal: bool, dtype: torch.dtype, device: str, of=lambda forward: forward) -> dict:
    """The formula, and others' attention. `of`: what of theirs is timed, the forward as it is or its backward."""
    if device != "cuda":
        return {"torch eager": eager, "SDPA": of(sdpa(causal))}
    peers = {"torch eager": eager, "torch.compile": benchmarks.compiled(eager)}
    peers["SDPA efficient"] = of(sdpa(causal, SDPBackend.EFFICIENT_ATTENTION))
    peers["SDPA flash"] = of(sdpa(causal, SDPBackend.FLASH_ATTENTION))
    peers["SDPA cuDNN"] = of(sdpa(causal, SDPBackend.CUDNN_ATTENTION))
    if causal and dtype.itemsize == 2:
        peers["FlexAttention"] = of(flex)
    if dtype.itemsize == 2 and benchmarks.installed("flash_attn.cute"):
        peers["FlashAttention-4"] = of(flash_attention_4(causal))
    return peers


def attention_case(b, h, sq, sk, d, causal: bool, dtype: torch.dtype, device: str) -> benchmarks.Case:
    assert not causal or sq == sk  # SDPA's is_causal is aligned to the upper left, ours to the lower right
    peers = attention_peers(composed(causal), causal, dtype, device)
    if device == "cuda":
        peers["SDPA math"] = sdpa(causal, SDPBackend.MATH)
        peers["triton"] = lambda q, k, v: in_triton("triton_kernels").attention(q, k, v, causal=causal)
    return benchmarks.Case(
        op="attention",
        shape={"B": b, "H": h, "Sq": sq, "Sk": sk, "D": d, "causal": int(causal)},
        dtype=dtype,
        inputs=lambda on: tuple(torch.randn(b, h, s, d, device=on, dtype=dtype) for s in (sq, sk, sk)),
        run=lambda q, k, v, rung: step2_attention.attention(q, k, v, causal=causal, rung=rung),
        reference=composed(causal),
        bytes=b * h * (2 * sq + 2 * sk) * d * dtype.itemsize,
        written=b * h * sq * d * dtype.itemsize,
        flops=4 * b * h * sq * sk * d // (2 if causal else 1),
        peers=peers,
        bound="memory" if sq == 1 else "arithmetic",
    )


def lengths_of_documents(tokens: int, length: int) -> list[int]:
    """As many as there is room for; the last is what is left."""
    draw = random.Random(tokens)
    lengths, left = [], tokens
    while left:
        lengths.append(min(left, length or draw.randint(64, 2048)))
        left -= lengths[-1]
    return lengths


def each_document(attend):
    """Attention of one row, of the documents one after the other."""

    def run(q, k, v, starts):
        bounds = itertools.pairwise(starts.tolist())
        return torch.cat([attend(*(t[:, :, first:last] for t in (q, k, v))) for first, last in bounds], 2)

    return run


def varlen(call):
    """Somebody's attention of documents, which has heads behind tokens and no batch; given views."""

    def run(q, k, v, starts):
        out = call(*(t[0].transpose(0, 1) for t in (q, k, v)), starts)
        out = out[0] if isinstance(out, tuple) else out  # some versions return the log-sum-exp, too
        return out.transpose(0, 1)[None]

    return run


@functools.cache
def document_blocks(lengths: tuple[int, ...], causal: bool):
    """Which tiles of scores FlexAttention has to look at."""
    document = torch.repeat_interleave(torch.tensor(lengths)).cuda()

    def seen(b, h, q, k):
        return (document[q] == document[k]) & (q >= k) if causal else document[q] == document[k]

    return create_block_mask(seen, None, None, sum(lengths), sum(lengths), device="cuda")


def packed_peers(lengths: list[int], causal: bool, dtype: torch.dtype, device: str) -> dict:
    peers = {"torch eager": each_document(composed(causal))}
    if len(set(lengths)) == 1:  # the same tokens as a batch

        def as_batch(q, k, v, starts):
            out = torch.empty_like(q)
            *rows, out_rows = (t.unflatten(2, (len(lengths), -1))[0].transpose(0, 1) for t in (q, k, v, out))
            lse = torch.empty(out_rows.shape[:3], dtype=torch.float32, device=q.device)
            torch.ops.step2_attention.attention.out(*rows, causal=causal, out=out_rows, lse=lse)
            return out

        peers["as a batch"] = as_batch
    if device != "cuda":
        return peers | {"SDPA": each_document(sdpa(causal))}
    longest = max(lengths)
    if dtype.itemsize == 2 and benchmarks.installed("torch.nn.attention.varlen"):
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if causal else (-1, -1)
        peers["torch varlen"] = varlen(
            lambda q, k, v, s: varlen_attn(q, k, v, s, s, longest, longest, window_size=window)
        )
    peers["FlexAttention"] = lambda q, k, v, starts: compiled_flex(
        q, k, v, block_mask=document_blocks(tuple(lengths), causal)
    )
    if dtype.itemsize == 2 and benchmarks.installed("flash_attn.flash_attn_interface"):
        from flash_attn.flash_attn_interface import flash_attn_varlen_func as flash_2

        peers["FlashAttention-2"] = varlen(lambda q, k, v, s: flash_2(q, k, v, s, s, longest, longest, causal=causal))
    if dtype.itemsize == 2 and benchmarks.installed("flash_attn.cute"):
        from flash_attn.cute import flash_attn_varlen_func as flash_4

        peers["FlashAttention-4"] = varlen(
            lambda q, k, v, s: flash_4(q, k, v, cu_seqlens_q=s, cu_seqlens_k=s, causal=causal)
        )
    return peers


def packed_case(tokens, h, d, causal: bool, length, dtype: torch.dtype, device: str) -> benchmarks.Case:
    lengths = lengths_of_documents(tokens, length)

    def inputs(on):
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=on)
        return *(torch.randn(1, h, tokens, d, device=on, dtype=dtype) for _ in range(3)), starts

    return benchmarks.Case(
        op="attention",
        shape={"tokens": tokens, "documents": len(lengths), "H": h, "D": d, "causal": int(causal)},
        dtype=dtype,
        inputs=inputs,
        run=lambda q, k, v, starts, rung: step2_attention.attention(
            q, k, v, cu_seqlens=starts, causal=causal, rung=rung
        ),
        reference=each_document(composed(causal)),
        bytes=4 * h * tokens * d * dtype.itemsize,
        written=h * tokens * d * dtype.itemsize,
        flops=sum(4 * h * n * n * d for n in lengths) // (2 if causal else 1),
        peers=packed_peers(lengths, causal, dtype, device),
        bound="arithmetic",
    )


def backward_composed(causal: bool):
    """Attention's gradients as the formulas say, of operations that each write their result."""

    def run(grad, q, k, v, out, lse):
        scale = q.shape[-1] ** -0.5
        scores = (q @ k.mT) * scale
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)
        grad_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
        return scale * grad_scores @ k, scale * grad_scores.mT @ q, weights.mT @ grad

    return run


class BackwardOf:
    """The backward alone of somebody's attention: the forward runs at the first call with these inputs.

    What it saved is kept until the next one's takes its place.
    """

    latest = (None, None, None)  # whose, for which q, and the output with the inputs that it has gradients for

    def __init__(self, forward):
        self.forward = forward

    def __call__(self, grad, q, k, v, out, lse):
        if BackwardOf.latest[0] is not self or BackwardOf.latest[1] is not q:
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            BackwardOf.latest = self, q, (self.forward(*inputs), inputs)
        return torch.autograd.grad(*BackwardOf.latest[2], grad, retain_graph=True)


def attention_backward_case(b, h, s, d, causal: bool, dtype: torch.dtype, device: str) -> benchmarks.Case:
    eager = backward_composed(causal)
    peers = attention_peers(eager, causal, dtype, device, BackwardOf)

    def inputs(on):
        q, k, v, grad = (torch.randn(b, h, s, d, device=on, dtype=dtype) for _ in range(4))
        with torch.no_grad():
            return grad, q, k, v, *step2_attention.attention(q, k, v, causal=causal, return_lse=True)

    return benchmarks.Case(
        op="attention_backward",
        shape={"B": b, "H": h, "S": s, "D": d, "causal": int(causal)},
        dtype=dtype,
        inputs=inputs,
        run=lambda *given, rung: step2_attention.attention_backward(*given, causal=causal, rung=rung),
        reference=eager,
        bytes=b * h * s * (8 * d * dtype.itemsize + 4),
        written=b * h * s * 3 * d * dtype.itemsize,
        flops=10 * b * h * s * s * d // (2 if causal else 1),
        peers=peers,
        bound="arithmetic",
        direction="backward",
    )


def packed_backward_case(tokens, h, d, causal: bool, length, dtype: torch.dtype, device: str) -> benchmarks.Case:
    lengths = lengths_of_documents(tokens, length)
    eager = backward_composed(causal)

    @functools.cache
    def starts(on):
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=on)

    def each_document(*given):
        parts = [eager(*own) for own in zip(*(t.split(lengths, 2) for t in given), strict=True)]
        return tuple(torch.cat(gradients, 2) for gradients in zip(*parts, strict=True))

    def inputs(on):
        q, k, v, grad = (torch.randn(1, h, tokens, d, device=on, dtype=dtype) for _ in range(4))
        with torch.no_grad():
            documents = {"cu_seqlens": starts(q.device), "causal": causal}
            return grad, q, k, v, *step2_attention.attention(q, k, v, return_lse=True, **documents)

    def as_batch(*given):  # the same tokens
        gradients = [torch.empty_like(given[1]) for _ in range(3)]
        rows = [t.unflatten(2, (len(lengths), -1))[0].transpose(0, 1) for t in (*given, *gradients)]
        outs = dict(zip(("dq", "dk", "dv"), rows[6:], strict=True))
        torch.ops.step2_attention.attention_backward.out(*rows[:6], causal=causal, **outs)
        return tuple(gradients)

    def backward_of(forward):
        return BackwardOf(lambda q, k, v: forward(q, k, v, starts(q.device)))

    peers = {"torch eager": each_document}
    if len(set(lengths)) == 1:
        peers["as a batch"] = as_batch
    others = packed_peers(lengths, causal, dtype, device)
    peers |= {
        name: backward_of(forward) for name, forward in others.items() if name not in ("torch eager", "as a batch")
    }
    return benchmarks.Case(
        op="attention_backward",
        shape={"tokens": tokens, "documents": len(lengths), "H": h, "D": d, "causal": int(causal)},
        dtype=dtype,
        inputs=inputs,
        run=lambda *given, rung: step2_attention.attention_backward(
            *given, cu_seqlens=starts(given[1].device), causal=causal, rung=rung
        ),
        reference=each_document,
        bytes=h * tokens * (8 * d * dtype.itemsize + 4),
        written=h * tokens * 3 * d * dtype.itemsize,
        flops=sum(10 * h * n * n * d for n in lengths) // (2 if causal else 1),
        peers=peers,
        bound="arithmetic",
        direction="backward",
    )


def gathered(cache, table):
    """[batch, heads, keys, head_dim] out of pages."""
    return cache if table is None else cache[table.long()].transpose(1, 2).flatten(2, 3)


@functools.cache
def seen_by_last(q_length: int, k_length: int, device) -> torch.Tensor | None:
    """Which keys the last queries of a text see; None for one query, which sees all."""
    if q_length == 1:
        return None
    return torch.ones(q_length, k_length, dtype=torch.bool, device=device).tril(k_length - q_length)


def decode_composed(q, k, v, table):
    """Decoding as the formula says, of operations that each write their result."""
    k, v = (gathered(t, table).repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    seen = seen_by_last(q.shape[2], k.shape[2], q.device)
    return torch.softmax(scores if seen is None else scores.masked_fill(~seen, -torch.inf), -1) @ v


def decode_sdpa(backend: SDPBackend | None):
    """By PyTorch's own attention, which knows no pages: it gets them gathered."""

    def run(q, k, v, table):
        k, v = gathered(k, table), gathered(v, table)
        seen = seen_by_last(q.shape[2], k.shape[2], q.device)
        with sdpa_kernel(backend) if backend else contextlib.nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])

    return run


def decode_case(b, h, kv_heads, sq, sk, d, page: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    peers = {"torch eager": decode_composed}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(decode_composed)
        peers["SDPA efficient"] = decode_sdpa(SDPBackend.EFFICIENT_ATTENTION)
        peers["SDPA flash"] = decode_sdpa(SDPBackend.FLASH_ATTENTION)
        peers["SDPA cuDNN"] = decode_sdpa(SDPBackend.CUDNN_ATTENTION)
    else:
        peers["SDPA"] = decode_sdpa(None)
    shape = {"B": b, "H": h, "Hkv": kv_heads, "Sq": sq, "Sk": sk, "D": d} | ({"page": page} if page else {})

    def inputs(on):
        cache = (b * sk // page, kv_heads, page, d) if page else (b, kv_heads, sk, d)
        table = torch.randperm(cache[0], device=on, dtype=torch.int32).view(b, -1) if page else None
        return *(torch.randn(s, device=on, dtype=dtype) for s in ((b, h, sq, d), cache, cache)), table

    return benchmarks.Case(
        op="attention_decode",
        shape=shape,
        dtype=dtype,
        inputs=inputs,
        run=lambda q, k, v, table, rung: step2_attention.attention_decode(q, k, v, block_table=table, rung=rung),
        reference=decode_composed,
        bytes=(2 * b * kv_heads * sk + 2 * b * h * sq) * d * dtype.itemsize,
        written=b * h * sq * d * dtype.itemsize,
        flops=4 * b * h * sq * sk * d,
        peers=peers,
    )


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [
        *(linear_case(*case, device=device) for case in LINEAR[size]),
        *(linear_backward_case(*case, device=device) for case in LINEAR_BACKWARD[size]),
        *(softmax_case(*case, device=device) for case in SOFTMAX[size]),
        *(softmax_backward_case(*case, device=device) for case in SOFTMAX[size]),
        *(attention_case(*case, device) for case in ATTENTION[size]),
        *(packed_case(*case, device) for case in PACKED[size]),
        *(attention_backward_case(*case, device) for case in ATTENTION_BACKWARD[size]),
        *(packed_backward_case(*case, device) for case in PACKED_BACKWARD[size]),
        *(decode_case(*case, device) for case in DECODE[size]),
    ]


if __name__ == "__main__":
    benchmarks.main("step2_attention", cases)
