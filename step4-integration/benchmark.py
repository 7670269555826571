"""python benchmark.py [--help]: every rung of this step beside PyTorch. The models are timed by benchmark_gpt2.py."""

import functools

from kernel_fusion.cli import bench_parser  # not installed? pip install -e ..

if __name__ == "__main__":
    bench_parser().parse_args()  # --help needs no build

import torch
import torch.nn.functional as F

import step4_integration
from kernel_fusion import testing
from kernel_fusion.bench import benchmarks

TEACHES = "A whole GPT-2 from these ops: what is left are look-ups, a cache, a token as one op, its choice, the loss."

VOCAB, POSITIONS = 50257, 1024
# batch, length, width, dtype
EMBEDDING = {
    "emulated": [(1, 16, 768, torch.float32)],
    "cpu": [(4, 512, 768, torch.float32)],
    "quick": [(8, 1024, 768, torch.bfloat16)],
    "full": [
        (1, 1, 768, torch.bfloat16),  # a decode step
        (8, 1024, 768, torch.bfloat16),
        (8, 1024, 768, torch.float32),
        (32, 1024, 768, torch.bfloat16),
        (32, 1024, 1600, torch.bfloat16),
    ],
}
# tokens, width, how many different ids, dtype; ids that are all the same make one long sum
EMBEDDING_BACKWARD = {
    "emulated": [(256, 8, 50, torch.float32)],
    "cpu": [(2048, 768, VOCAB, torch.float32)],
    "quick": [(16384, 768, VOCAB, torch.bfloat16)],
    "full": [
        (1024, 768, VOCAB, torch.bfloat16),
        (16384, 768, VOCAB, torch.bfloat16),
        (16384, 768, VOCAB, torch.float32),
        (16384, 768, 1000, torch.bfloat16),
        (16384, 768, 1, torch.bfloat16),
        (16384, 1600, VOCAB, torch.bfloat16),
    ],
}
# B, H, S, D, position, dtype
KV_APPEND = {
    "emulated": [(1, 2, 8, 64, 3, torch.float32)],
    "cpu": [(4, 12, 128, 64, 0, torch.float32)],
    "quick": [(8, 12, 1024, 64, 0, torch.bfloat16)],
    "full": [
        (1, 12, 1, 64, 512, torch.bfloat16),  # a decode step
        (64, 12, 1, 64, 512, torch.bfloat16),
        (8, 12, 1024, 64, 0, torch.bfloat16),
        (32, 12, 1024, 64, 0, torch.bfloat16),
        (32, 25, 1024, 64, 0, torch.bfloat16),
    ],
}
# rows, width (the vocabulary), dtype
CROSS_ENTROPY = {
    "emulated": [(2, 4001, torch.float32)],
    "cpu": [(128, VOCAB, torch.float32)],
    "quick": [(4096, VOCAB, torch.bfloat16)],
    "full": [
        (4096, VOCAB, torch.bfloat16),
        (4096, VOCAB, torch.float32),
        (4096, 50304, torch.bfloat16),  # rows of whole vectors
        (4096, 128256, torch.bfloat16),  # too wide for shared memory
        (16384, VOCAB, torch.bfloat16),
        (16384, 256, torch.bfloat16),
    ],
}
# rows, depth, width, dtype: the same behind the product that makes the logits, forward and backward
LINEAR_CROSS_ENTROPY = {
    "emulated": [(2, 32, 1001, torch.float32)],
    "cpu": [(128, 768, 5000, torch.float32)],
    "quick": [(4096, 768, VOCAB, torch.bfloat16)],
    "full": [
        (4096, 768, VOCAB, torch.bfloat16),
        (16384, 768, VOCAB, torch.bfloat16),  # GPT-2's batch of 16
        (32768, 768, VOCAB, torch.bfloat16),  # in two chunks
        (16384, 1600, VOCAB, torch.bfloat16),
    ],
}
# batch, width, temperature, top_k, top_p, dtype
SAMPLE = {
    "emulated": [(2, 1000, 1.0, 50, 0.9, torch.float32)],
    "cpu": [(4, VOCAB, 0.0, 0, 1.0, torch.float32), (4, VOCAB, 0.8, 50, 0.9, torch.float32)],
    "quick": [(1, VOCAB, 0.0, 0, 1.0, torch.bfloat16), (1, VOCAB, 0.8, 50, 0.9, torch.bfloat16)],
    "full": [
        *((batch, VOCAB, 0.0, 0, 1.0, torch.bfloat16) for batch in (1, 8, 32)),
        (1, VOCAB, 1.0, 0, 1.0, torch.bfloat16),
        (1, VOCAB, 0.8, 0, 0.9, torch.bfloat16),
        *((batch, VOCAB, 0.8, 50, 0.9, torch.bfloat16) for batch in (1, 8, 32)),
        (1, VOCAB, 0.8, 50, 0.9, torch.float32),
        (1, 128256, 0.8, 50, 0.9, torch.bfloat16),  # Llama 3's vocabulary
    ],
}
# batch, layers, width, heads, vocab, context, dtype
DECODE_STEP = {
    "emulated": [(2, 1, 64, 1, 131, 16, torch.bfloat16)],
    "cpu": [(1, 2, 768, 12, 5000, 128, torch.float32)],
    "quick": [(1, 12, 768, 12, VOCAB, 512, torch.bfloat16)],
    "full": [
        (1, 12, 768, 12, VOCAB, 512, torch.bfloat16),
        (8, 12, 768, 12, VOCAB, 512, torch.bfloat16),
        (32, 12, 768, 12, VOCAB, 512, torch.bfloat16),
        (1, 48, 1600, 25, VOCAB, 512, torch.bfloat16),
        (8, 48, 1600, 25, VOCAB, 512, torch.bfloat16),
    ],
}


def look_up(ids, token_weight, position_weight):
    return F.embedding(ids, token_weight) + position_weight[: ids.shape[1]]


def embedding_case(batch: int, length: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    def inputs(on):
        # No token twice: a row that is asked for again need not be read again, and `bytes` counts each of them.
        ids = torch.randperm(VOCAB, device=on)[: batch * length].view(batch, length)
        return (
            ids,
            torch.randn(VOCAB, width, device=on, dtype=dtype),
            torch.randn(POSITIONS, width, device=on, dtype=dtype),
        )

    peers = {"torch eager": look_up}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(look_up)
    return benchmarks.Case(
        op="embedding",
        shape={"batch": batch, "length": length, "width": width},
        dtype=dtype,
        inputs=inputs,
        run=step4_integration.embedding,
        reference=look_up,
        bytes=(2 * batch + 1) * length * width * dtype.itemsize + 8 * batch * length,
        written=batch * length * width * dtype.itemsize,
        flops=batch * length * width,
        peers=peers,
    )


def added_up(grad, ids):
    """As autograd does it for F.embedding."""
    return torch.ops.aten.embedding_dense_backward(grad, ids, VOCAB, -1, False)


def embedding_backward_case(tokens: int, width: int, distinct: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    def inputs(on):
        return torch.randn(1, tokens, width, device=on, dtype=dtype), torch.randint(distinct, (1, tokens), device=on)

    peers = {"torch eager": added_up}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(added_up)
    return benchmarks.Case(
        op="embedding_backward",
        direction="backward",
        shape={"tokens": tokens, "width": width, "distinct": distinct},
        dtype=dtype,
        inputs=inputs,
        run=lambda grad, ids, rung: step4_integration.embedding_backward(grad, ids, VOCAB, rung=rung),
        reference=added_up,
        bytes=(tokens + VOCAB) * width * dtype.itemsize + 8 * tokens,
        written=VOCAB * width * dtype.itemsize,
        flops=tokens * width,
        peers=peers,
    )


def into_own_caches(fill, capacity: int, position: int):
    """A function of k and v that fills caches by `fill` and returns what it wrote. Each rung has caches of its own, of
    NaN at first, so that none is taken for right because of what another left."""
    caches = {}

    def run(k, v, rung=""):
        if rung not in caches:
            shape = (*k.shape[:2], capacity, k.shape[3])
            caches[rung] = [torch.full(shape, torch.nan, dtype=k.dtype, device=k.device) for _ in range(2)]
        fill(*caches[rung], k, v, position, rung=rung)
        return tuple(cache[:, :, position : position + k.shape[2]] for cache in caches[rung])

    return run


def two_copies(k_cache, v_cache, k, v, position, rung):
    k_cache[:, :, position : position + k.shape[2]] = k
    v_cache[:, :, position : position + k.shape[2]] = v


def kv_append_case(b: int, h: int, s: int, d: int, position: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    def inputs(on):
        packed = torch.randn(b, s, 3, h, d, device=on, dtype=dtype)
        return packed.permute(2, 0, 3, 1, 4)[1:].unbind()

    capacity = max(POSITIONS, position + s)
    peers = {"torch eager": into_own_caches(two_copies, capacity, position)}
    if device == "cuda":
        peers["torch.compile"] = into_own_caches(benchmarks.compiled(two_copies), capacity, position)
    return benchmarks.Case(
        op="kv_append",
        shape={"B": b, "H": h, "S": s, "D": d},
        dtype=dtype,
        inputs=inputs,
        run=into_own_caches(step4_integration.kv_append, capacity, position),
        reference=lambda k, v: (k, v),
        bytes=4 * b * h * s * d * dtype.itemsize,
        flops=0,
        peers=peers,
    )


def loss_and_gradient(logits, targets):
    """As formulas, each of which has a matrix of its own unless somebody fuses them."""
    x = logits.float() if logits.element_size() == 2 else logits
    loss = F.cross_entropy(x, targets, reduction="none")
    return loss, (x.softmax(1) - F.one_hot(targets, x.shape[1])).to(logits.dtype)


@torch.enable_grad()
def by_autograd(logits, targets):
    logits = logits.detach().requires_grad_()
    loss = F.cross_entropy(logits.float() if logits.element_size() == 2 else logits, targets, reduction="none")
    return loss.detach(), torch.autograd.grad(loss.sum(), logits)[0]


def cross_entropy_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    def inputs(on):
        return 2 * torch.randn(rows, width, device=on, dtype=dtype), torch.randint(width, (rows,), device=on)

    peers = {"torch eager": by_autograd}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(loss_and_gradient)
    return benchmarks.Case(
        op="cross_entropy",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=inputs,
        run=lambda *given, rung: step4_integration.cross_entropy(*given, return_grad=True, rung=rung)[::2],
        reference=loss_and_gradient,
        bytes=2 * rows * width * dtype.itemsize,
        flops=8 * rows * width,
        peers=peers,
    )


def linear_loss(hidden, weight, targets):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float() if logits.element_size() == 2 else logits, targets)


def with_gradients(function):
    """A function that returns the loss and the gradients of hidden and weight."""

    @torch.enable_grad()
    def run(hidden, weight, targets, **options):
        variables = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
        loss = function(*variables, targets, **options)
        return loss.detach(), *torch.autograd.grad(loss, variables)

    return run


def liger_linear_cross_entropy(hidden, weight, targets):
    """Liger's: rows in chunks, too; kernels in Triton."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, targets)


def linear_cross_entropy_case(rows: int, depth: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    def inputs(on):
        hidden = torch.randn(rows, depth, device=on, dtype=dtype)
        weight = 0.1 * torch.randn(width, depth, device=on, dtype=dtype)
        return hidden, weight, torch.randint(width, (rows,), device=on)

    peers = {"torch eager": with_gradients(linear_loss)}
    if device == "cuda":
        peers["torch.compile"] = with_gradients(benchmarks.compiled(linear_loss))
        if benchmarks.installed("liger_kernel"):
            peers["Liger"] = with_gradients(liger_linear_cross_entropy)
    return benchmarks.Case(
        op="cross_entropy",
        shape={"rows": rows, "depth": depth, "width": width},
        dtype=dtype,
        inputs=inputs,
        run=with_gradients(step4_integration.linear_cross_entropy),
        reference=with_gradients(linear_loss),
        bytes=2 * (rows + width) * depth * dtype.itemsize,
        flops=6 * rows * depth * width,
        bound="arithmetic",
        peers=peers,
    )


def likeliest(logits, *_):
    log_prob, token = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1).max(1)
    return token, log_prob


def sample_case(
    batch: int, width: int, temperature: float, top_k: int, top_p: float, dtype: torch.dtype, device: str
) -> benchmarks.Case:
    """Logits as of a language model: a few stand out, and the others are far below."""

    def inputs(on):
        logits = (2.5 * torch.randn(batch, width, device=on)).to(dtype)
        return (logits, torch.randint(1 << 40, (batch, 2), device=on)) if temperature else (logits,)

    def kept(logits, slack=0.0):
        scores = logits / temperature
        if top_k:
            scores = scores.masked_fill(scores < scores.topk(top_k)[0][:, -1:], -torch.inf)
        if top_p < 1:
            in_order, columns = scores.sort(descending=True)
            weights = in_order.softmax(1)
            left_out = weights.cumsum(1) - weights >= top_p + slack
            scores = scores.masked_fill(left_out.scatter(1, columns, left_out), -torch.inf)
        return scores

    def chain(logits, *_):
        scores = logits.float()
        token = torch.multinomial(kept(scores).softmax(1), 1)
        return token[:, 0], scores.log_softmax(1).gather(1, token)[:, 0]

    def of_its_tokens(outputs, logits, *_):
        """What was right for the tokens that were drawn; −2 for one that must not be."""
        token = outputs[0]
        last = kept(logits, 1e-5).masked_fill(kept(logits, 1e-5).isinf(), torch.inf).amin(1, keepdim=True)
        may_be = (logits / temperature >= last).gather(1, token[:, None])[:, 0]  # equals of the last one, too
        return token.where(may_be, -2), logits.log_softmax(1).gather(1, token[:, None])[:, 0]

    function = chain if temperature else likeliest
    peers = {"torch eager": function}
    if device == "cuda":
        peers["torch.compile"] = benchmarks.compiled(function)
    drawing = [*step4_integration.rungs("sample", device), *peers] if temperature else []
    return benchmarks.Case(
        op="sample",
        shape={"batch": batch, "width": width, "temperature": temperature, "top_k": top_k, "top_p": top_p},
        dtype=dtype,
        inputs=inputs,
        run=functools.partial(step4_integration.sample, temperature=temperature, top_k=top_k, top_p=top_p),
        reference=likeliest,
        eager=likeliest,
        peer_reference=dict.fromkeys(drawing, of_its_tokens),
        bytes=batch * width * dtype.itemsize,
        written=12 * batch,
        flops=0,
        peers=peers,
    )


def step_by_operations(ids, token_weight, position_weight, k_cache, v_cache, *weights):
    """A token of GPT-2 by PyTorch's operations, one by one. All rows are as long as the caches, but for a slot."""
    layers, batch, heads, capacity, dim = k_cache.shape
    width = heads * dim
    x = token_weight[ids] + position_weight[capacity - 1]
    for layer in range(layers):
        ln_1, ln_1_bias, qkv, qkv_bias, out, out_bias, ln_2, ln_2_bias, fc, fc_bias, second, second_bias = weights[
            12 * layer : 12 * layer + 12
        ]
        y = F.layer_norm(x, (width,), ln_1, ln_1_bias)
        q, k, v = torch.addmm(qkv_bias, y, qkv).view(batch, 3, heads, 1, dim).unbind(1)
        keys, values = (torch.cat((cache[layer, :, :, :-1], new), 2) for cache, new in ((k_cache, k), (v_cache, v)))
        attended = F.scaled_dot_product_attention(q, keys, values).reshape(batch, width)
        x = x + torch.addmm(out_bias, attended, out)
        y = F.layer_norm(x, (width,), ln_2, ln_2_bias)
        x = x + torch.addmm(second_bias, F.gelu(torch.addmm(fc_bias, y, fc), approximate="tanh"), second)
    return F.layer_norm(x, (width,), *weights[-2:]) @ token_weight.T


def by_graph():
    """A function of the inputs and a rung that runs `decode_step`; on a GPU by a CUDA graph for each rung, in which
    the rows' lengths are set before, so that each replay adds the same token."""
    graphs, packed = {}, {}

    def run(ids, token_weight, position_weight, k_cache, v_cache, *weights, rung):
        end = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
        begin = torch.zeros_like(end)
        key = rung, k_cache.data_ptr()
        if rung in step4_integration.PACKED_RUNGS and key not in packed:
            packed[key] = step4_integration.decode_pack(token_weight, list(weights), rung=rung)

        def step():
            end.fill_(k_cache.shape[3] - 1)
            return step4_integration.decode_step(
                ids, end, begin, token_weight, position_weight, list(weights), k_cache, v_cache, packed.get(key),
                rung=rung,
            )  # fmt: skip

        if ids.device.type != "cuda":
            return step()
        if key not in graphs:
            graph, logits = testing.capture(step)
            graphs[key] = graph, logits, (end, begin)
        graph, logits, _ = graphs[key]
        graph.replay()
        return logits

    return run


def decode_step_case(
    batch: int, layers: int, width: int, heads: int, vocab: int, context: int, dtype: torch.dtype, device: str
) -> benchmarks.Case:
    shapes = [(width,)] * 2 + [(width, 3 * width), (3 * width,), (width, width), (width,)]
    shapes += [(width,)] * 2 + [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    shapes = shapes * layers + [(width,)] * 2

    def inputs(on):
        def randn(*shape):
            return torch.randn(*shape, device=on, dtype=dtype)

        weights = [randn(*shape) * (shape[0] ** -0.5 if len(shape) == 2 else 1) for shape in shapes]
        cache = (layers, batch, heads, context + 1, width // heads)
        ids = torch.randint(vocab, (batch,), device=on)
        return ids, randn(vocab, width), randn(POSITIONS, width), randn(*cache), randn(*cache), *weights

    parameters = sum(torch.Size(shape).numel() for shape in shapes) + vocab * width
    return benchmarks.Case(
        op="decode_step",
        shape={"batch": batch, "layers": layers, "width": width, "context": context},
        dtype=dtype,
        inputs=inputs,
        run=by_graph(),
        reference=step_by_operations,
        bytes=(parameters + 2 * layers * batch * context * width + batch * vocab) * dtype.itemsize,
        written=batch * vocab * dtype.itemsize,
        flops=2 * batch * (parameters + 2 * layers * context * width),
        peers={"torch eager": step_by_operations},
    )


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [
        *(embedding_case(*case, device) for case in EMBEDDING[size]),
        *(embedding_backward_case(*case, device) for case in EMBEDDING_BACKWARD[size]),
        *(kv_append_case(*case, device) for case in KV_APPEND[size]),
        *(cross_entropy_case(*case, device) for case in CROSS_ENTROPY[size]),
        *(linear_cross_entropy_case(*case, device) for case in LINEAR_CROSS_ENTROPY[size]),
        *(sample_case(*case, device) for case in SAMPLE[size]),
        *(decode_step_case(*case, device) for case in DECODE_STEP[size]),
    ]


if __name__ == "__main__":
    benchmarks.main("step4_integration", cases)
