"""python benchmark.py [--help]: every rung of this step beside its peers, on the machine at hand."""

from kernel_fusion.cli import bench_parser  # not installed? pip install -e ..

if __name__ == "__main__":
    bench_parser().parse_args()  # --help needs no build

import functools

import torch

import step3_fused
from kernel_fusion import steps
from kernel_fusion.bench import benchmarks, layers
from kernel_fusion.bench.layers import DOWN, DOWNWARD, FLOAT, HALF, SQUARE, UP, UPWARD

composed = steps.load_script(steps.find("step3"), "peers/composed")

TEACHES = "A row read once, then whole chains in one launch: what fusion saves, and where it loses."

# 4096 rows are 8 sequences of 512 tokens, 262144 are 128 of 2048, 1048576 are 128 of 8192.
MORE_ROWS = [(4096, 768), (4096, 16384), (262144, 1024)]
LAYER_NORM_ROWS = [
    *((rows, 768, torch.bfloat16) for rows in (8, 512)),  # eight texts being written, a token each; one being read
    *((4096, width, torch.bfloat16) for width in (1024, 4096)),
    (16384, 4096, torch.bfloat16),
    *((262144, width, torch.bfloat16) for width in (768, 4096)),
    *((1048576, width, torch.bfloat16) for width in (768, 1024)),
    (2048, 32768, torch.bfloat16),  # wider than one multiprocessor holds
    (1024, 131072, torch.bfloat16),
]
# rows, width, dtype. GPT-2 is 768 to 1600 wide; 16384 rows are 16 sequences of 1024 tokens.
ROWS = {
    "emulated": [(16, 768, torch.float32)],
    "cpu": [(4096, 768, torch.float32), (4096, 768, torch.bfloat16)],
    "quick": [(16384, 768, torch.bfloat16)],
    "full": [
        (16384, 768, torch.bfloat16),
        (16384, 768, torch.float32),
        (16384, 1024, torch.bfloat16),
        (16384, 1600, torch.bfloat16),
        (16384, 1599, torch.bfloat16),  # no row but the first starts at 16 bytes: rungs load one by one
        (8192, 4096, torch.bfloat16),
        (65536, 768, torch.bfloat16),
        (65536, 1024, torch.bfloat16),
        (65536, 4096, torch.bfloat16),
        *((rows, width, torch.bfloat16) for rows, width in MORE_ROWS),
    ],
}
# residual_layer_norm behind a projection's bias and dropout
FRONTS = {
    "emulated": [(16, 768, torch.float32)],
    "cpu": [(4096, 768, torch.float32)],
    "quick": [(16384, 768, torch.bfloat16)],
    "full": [(16384, 768, torch.bfloat16), (16384, 1024, torch.bfloat16)],
}
# B, H, S, D, dtype; causal, as GPT-2 is
ATTENTION = {
    "emulated": [(1, 2, 48, 64, torch.float32)],
    "cpu": [(16, 4, 128, 32, torch.float32), (1, 12, 512, 64, torch.float32)],
    "quick": [(1, 12, 128, 64, torch.bfloat16), (8, 12, 1024, 64, torch.bfloat16)],
    "full": [
        (1, 12, 128, 64, torch.bfloat16),
        (1, 12, 512, 64, torch.bfloat16),
        (1, 12, 1024, 64, torch.bfloat16),
        (4, 12, 1024, 64, torch.bfloat16),
        (8, 12, 128, 64, torch.bfloat16),
        (8, 12, 512, 64, torch.bfloat16),
        (8, 12, 1024, 64, torch.bfloat16),
        (8, 12, 1024, 64, torch.float32),
        (32, 12, 128, 64, torch.bfloat16),
        (32, 12, 512, 64, torch.bfloat16),
        (32, 12, 1024, 64, torch.bfloat16),
        (8, 16, 1024, 64, torch.bfloat16),
        (8, 20, 1024, 64, torch.bfloat16),
        (8, 25, 1024, 64, torch.bfloat16),
    ],
}
# With the projection: GPT-2's four widths.
BLOCK = ATTENTION | {
    "full": [
        *((b, h, s, 64, torch.bfloat16) for h in (12, 16, 20, 25) for b in (1, 4, 8, 32) for s in (128, 512, 1024)),
        (8, 12, 1024, 64, torch.float32),
    ]
}
# One new token for each text of a batch, whose keys and values are there: batch, heads, head_dim, keys.
DECODE = {"full": [(b, h, 64, keys) for h in (12, 25) for b in (1, 8, 32) for keys in (128, 1024)]}

SEED, OFFSET = 1234, 8  # dropout's

QKV = {
    "emulated": [(16, 64, 192, HALF)],
    "cpu": [(512, 768, 2304, FLOAT)],
    "quick": [(16384, 768, 2304, HALF)],
    "full": [(16384, 768, 2304, HALF)],
}
PROJECTIONS = DOWNWARD | {"full": [DOWN, SQUARE]}
# Where a residual is added and nothing dropped, at more sizes: GPT-2's four widths, many rows and few.
RESIDUALS = [
    *((rows, 768, 768, HALF) for rows in (128, 1024, 4096, 32768)),
    (1024, 3072, 768, HALF),
    *((8192, width, width, HALF) for width in (1024, 1280, 1600)),
    (32768, 1600, 1600, HALF),
    (16384, 6400, 1600, HALF),
]
# rows, width, inner, dtype
MLP = {
    "emulated": [(16, 64, 128, HALF)],
    "cpu": [(512, 768, 3072, FLOAT)],
    "quick": [UP],
    "full": [(rows, 768, 3072, HALF) for rows in (16384, 1024, 64)] + [(16384, 1600, 6400, HALF)],
}


@functools.cache
def triton_kernels():
    """Our versions in Triton, which only machines with a GPU need to have."""
    return steps.load_script(steps.find("step3"), "peers/triton_kernels")


def peers(function, device: str, triton=None) -> dict:
    """The op composed of PyTorch's as it comes, SDPA among them; torch.compile, which fuses what it can; our Triton."""
    if device == "cpu":
        return {"torch eager": function}
    found = {"torch eager": function, "torch.compile": benchmarks.compiled(function)}
    return found | ({"triton": triton} if triton else {})


def collections(device: str, quack=None, liger=None) -> dict:
    """Versions of QuACK's and Liger's, where these are installed."""
    if device == "cpu":
        return {}
    found = {"QuACK": quack} if quack and benchmarks.installed("quack") else {}
    return found | ({"Liger": liger} if liger and benchmarks.installed("liger_kernel") else {})


def rows_case(op: str, rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    function, tensors = getattr(composed, op), 1 if op == "layer_norm" else 2  # as many are read, and as many written
    own = peers(function, device, lambda *given: getattr(triton_kernels(), op)(*given))
    if op == "layer_norm":
        whole = dtype.itemsize == 2 and width % 8 == 0  # whole vectors of 16 bytes, of half types
        own |= collections(device, composed.quack_layer_norm if whole else None, composed.liger_layer_norm)

    def inputs(on):
        x = [torch.randn(rows, width, device=on, dtype=dtype) for _ in range(tensors)]
        return (*x, *(torch.randn(width, device=on, dtype=dtype) for _ in range(2)))

    return benchmarks.Case(
        op=op,
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=inputs,
        run=getattr(step3_fused, op),
        reference=function,
        bytes=(2 * tensors * rows * width + 2 * width) * dtype.itemsize,
        flops=(9 + tensors) * rows * width,
        peers=own,
    )


def front_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    rng_state = dropout_rng_state()
    own = peers(composed.front_residual_layer_norm, device)

    def inputs(on):
        x = (torch.randn(rows, width, device=on, dtype=dtype) for _ in range(2))
        return (*x, *(torch.randn(width, device=on, dtype=dtype) for _ in range(3)), dropout_mask(rows, width, on))

    return benchmarks.Case(
        op="residual_layer_norm",
        shape={"rows": rows, "width": width, "x_bias": 1, "p": composed.P},
        dtype=dtype,
        inputs=inputs,
        run=lambda *given, rung: step3_fused.residual_layer_norm(*given[:5], composed.P, rng_state, rung=rung),
        reference=composed.front_by_mask,
        bytes=(4 * rows * width + 3 * width) * dtype.itemsize,
        written=2 * rows * width * dtype.itemsize,
        flops=13 * rows * width,
        peers=own,
        eager=composed.front_by_mask,
        peer_reference=dict.fromkeys(own, composed.front_by_the_peers_mask),
    )


def backward_case(rows: int, width: int, dtype: torch.dtype, device: str) -> benchmarks.Case:
    own = peers(composed.layer_norm_backward, device, lambda *given: triton_kernels().layer_norm_backward(*given))
    whole = dtype.itemsize == 2 and width % 8 == 0
    own |= collections(
        device, composed.quack_layer_norm_backward if whole else None, composed.liger_layer_norm_backward
    )

    def inputs(on):
        grad, x = (torch.randn(rows, width, device=on, dtype=dtype) for _ in range(2))
        weight = torch.randn(width, device=on, dtype=dtype)
        return grad, x, weight, *step3_fused.layer_norm(x, weight, weight, return_statistics=True)[1:]

    return benchmarks.Case(
        op="layer_norm_backward",
        direction="backward",
        shape={"rows": rows, "width": width},
        dtype=dtype,
        inputs=inputs,
        run=step3_fused.layer_norm_backward,
        reference=composed.layer_norm_backward,
        bytes=(3 * rows * width + 3 * width) * dtype.itemsize + 8 * rows,
        written=(rows + 2) * width * dtype.itemsize,
        flops=15 * rows * width,
        peers=own,
    )


def attention_case(
    op: str, b: int, h: int, s: int, d: int, dtype: torch.dtype, device: str, keys: int | None = None
) -> benchmarks.Case:
    """`keys`: as many of a cache, the new ones among them; None for those of the queries themselves."""
    width, function = h * d, getattr(composed, op)
    block = op == "attention_block"

    def inputs(on):
        # q, k and v as views of one packed tensor, as a GPT-2 block has them
        packed = torch.randn(b, s, 3 * width, device=on, dtype=dtype)
        qkv = [t.view(b, s, h, d).transpose(1, 2) for t in packed.split(width, -1)]
        if keys is not None:
            qkv[1:] = (torch.randn(b, h, keys, d, device=on, dtype=dtype) for _ in range(2))
        proj = (torch.randn(width, width, device=on, dtype=dtype) * width**-0.5,) if block else ()
        vectors = (torch.randn(width, device=on, dtype=dtype) for _ in range(3 if block else 2))
        return (*qkv, torch.randn(b, s, width, device=on, dtype=dtype), *proj, *vectors)

    of_rows, of_keys = b * s * width, b * (keys or s) * width
    elements = of_rows * (4 if block else 3) + 2 * of_keys + (width * width if block else 0)  # q, residual, y; sum
    pairs = b * s * (s / 2 if keys is None else keys)  # of a query and a key that it sees
    return benchmarks.Case(
        op=op,
        shape={"B": b, "H": h, "S": s, "D": d} | ({} if keys is None else {"keys": keys}),
        dtype=dtype,
        inputs=inputs,
        run=lambda *x, rung: getattr(step3_fused, op)(*x, causal=True, rung=rung),
        reference=function,
        bytes=elements * dtype.itemsize,
        flops=round(4 * pairs * width) + (2 * b * s * width**2 if block else 0),
        peers=peers(function, device),
        bound="arithmetic" if keys is None else "memory",
    )


# ---- linear layers, and what is fused into their epilogues ----


def dropout_rng_state() -> torch.Tensor:
    """Dropout's seed and offset, on the CPU, as they are outside of graphs."""
    return torch.tensor([SEED, OFFSET])


def dropout_mask(rows: int, width: int, device) -> torch.Tensor:
    """What our dropout keeps: its result where the product is 1, and the residual 0."""
    one, unit = torch.ones(rows, 1, device=device), torch.ones(1, width, device=device)
    zero = torch.zeros(rows, width, device=device)
    return step3_fused.linear_bias_dropout_residual(one, unit, None, zero, composed.P, dropout_rng_state()) != 0


def layer_case(op: str, function, sizes: tuple, device: str, **more) -> benchmarks.Case:
    """As `layers.layer_case`, of x, weight and bias to y, beside PyTorch as it comes, unless `more` names others."""
    rows, depth, width, _ = sizes
    elements = {"read": rows * depth + depth * width + width, "written": rows * width}
    own = more.pop("peers", None) or peers(function, device)
    return layers.layer_case(step3_fused, op, function, sizes, own, **elements | more)


def linear_gelu_case(rows, depth, width, dtype: torch.dtype, *, keep: bool, device: str) -> benchmarks.Case:
    function = composed.linear_gelu_kept if keep else composed.linear_gelu
    own = peers(function, device, lambda *given: composed.triton_product().linear_gelu(*given, keep=keep))
    if device == "cuda" and not keep:
        own["torch _addmm_activation"] = composed.addmm_activation
    own |= collections(device, composed.quack_linear_gelu(keep))
    return layer_case(
        "linear_gelu",
        function,
        (rows, depth, width, dtype),
        device,
        written=(2 if keep else 1) * rows * width,
        flags={"keep": int(keep)},
        run=lambda *given, rung: step3_fused.linear_gelu(*given, return_preactivation=keep, rung=rung),
        peers=own,
    )


def layer_norm_linear_case(rows, depth, width, dtype: torch.dtype, *, device: str) -> benchmarks.Case:
    def inputs(on):
        x, *layer = layers.layer_inputs(rows, depth, width, dtype, on)
        return (x, *(torch.randn(depth, device=on, dtype=dtype) for _ in range(2)), *layer)

    return layer_case(
        "layer_norm_linear",
        composed.layer_norm_linear,
        (rows, depth, width, dtype),
        device,
        read=rows * depth + 2 * depth + depth * width + width,
        inputs=inputs,
    )


def dropout_residual_case(rows, depth, width, dtype: torch.dtype, *, p: float, device: str) -> benchmarks.Case:
    rng_state = dropout_rng_state()

    def inputs(on):
        layer = layers.layer_inputs(rows, depth, width, dtype, on)
        residual = torch.randn(rows, width, device=on, dtype=dtype)
        return (*layer, residual, *([dropout_mask(rows, width, on)] if p else []))

    if p:
        function, own = composed.dropout_by_mask, peers(composed.linear_dropout_residual, device)
        dropping = {"eager": function, "peer_reference": dict.fromkeys(own, composed.by_the_peers_mask)}
    else:
        function, dropping = composed.linear_residual, {}
        own = peers(function, device, composed.triton_linear_residual)
    return layer_case(
        "linear_bias_dropout_residual",
        function,
        (rows, depth, width, dtype),
        device,
        read=rows * depth + depth * width + width + rows * width,
        flags={"p": p},
        inputs=inputs,
        run=lambda x, weight, bias, residual, *_, rung: step3_fused.linear_bias_dropout_residual(
            x, weight, bias, residual, p, rng_state, rung=rung
        ),
        peers=own,
        **dropping,
    )


def mlp_case(rows, width, inner, dtype: torch.dtype, *, keep: bool, device: str) -> benchmarks.Case:
    function = composed.mlp_kept if keep else composed.mlp

    def inputs(on):
        x, *first = layers.layer_inputs(rows, width, inner, dtype, on)
        residual, *second = layers.layer_inputs(rows, inner, width, dtype, on)
        return (x, *first, *second, torch.randn_like(x))

    return layer_case(
        "mlp",
        function,
        (rows, width, inner, dtype),
        device,
        read=2 * rows * width + 2 * width * inner + inner + width,
        written=rows * width + (rows * inner if keep else 0),
        names=("rows", "width", "inner"),
        flags={"keep": int(keep)},
        flops=4 * rows * width * inner,
        inputs=inputs,
        run=lambda *given, rung: step3_fused.mlp(*given, return_preactivation=keep, rung=rung),
        peers=peers(function, device, composed.triton_mlp_kept if keep else composed.triton_mlp),
    )


def linear_gelu_backward_case(rows, depth, width, dtype: torch.dtype, *, device: str) -> benchmarks.Case:
    sizes, elements = (rows, depth, width, dtype), layers.gradients(rows, depth, width)

    def inputs(on):
        grad, *layer = layers.grad_and_layer(*sizes, on)
        return (grad, torch.randn_like(grad), *layer)

    elements["read"] += rows * width
    return layer_case("linear_gelu_backward", composed.linear_gelu_backward, sizes, device, **elements, inputs=inputs)


def gelu_linear_backward_case(rows, depth, width, dtype: torch.dtype, *, device: str) -> benchmarks.Case:
    sizes = rows, depth, width, dtype

    def inputs(on):
        grad, x, weight = layers.grad_and_layer(*sizes, on)
        return grad, x, weight, composed.tanh_gelu(x)

    return layer_case(
        "gelu_linear_backward",
        composed.gelu_linear_backward_of_x,
        sizes,
        device,
        **layers.gradients(rows, depth, width),
        inputs=inputs,
        run=lambda grad, x, weight, activation, rung: step3_fused.gelu_linear_backward(grad, x, weight, rung=rung),
        peers=peers(composed.gelu_linear_backward, device),
    )


def dropout_backward_case(rows, depth, width, dtype: torch.dtype, *, device: str) -> benchmarks.Case:
    sizes, rng_state = (rows, depth, width, dtype), dropout_rng_state()
    return layer_case(
        "linear_bias_dropout_residual_backward",
        composed.dropout_backward_by_mask,
        sizes,
        device,
        **layers.gradients(rows, depth, width),
        inputs=lambda on: (*layers.grad_and_layer(*sizes, on), dropout_mask(rows, width, on)),
        run=lambda grad, x, weight, mask, rung: step3_fused.linear_bias_dropout_residual_backward(
            grad, x, weight, composed.P, rng_state, rung=rung
        ),
    )


def linear_cases(size: str, device: str) -> list[benchmarks.Case]:
    """Of what is fused to a product."""
    return [
        *(linear_gelu_case(*case, keep=keep, device=device) for case in UPWARD[size] for keep in (False, True)),
        *(linear_gelu_backward_case(*case, device=device) for case in UPWARD[size]),
        *(layer_case("gelu_linear", composed.gelu_linear, case, device) for case in DOWNWARD[size]),
        *(gelu_linear_backward_case(*case, device=device) for case in DOWNWARD[size]),
        *(layer_norm_linear_case(*case, device=device) for case in QKV[size]),
        *(dropout_residual_case(*case, p=p, device=device) for case in PROJECTIONS[size] for p in (composed.P, 0)),
        *(dropout_residual_case(*case, p=0, device=device) for case in RESIDUALS if size == "full"),
        *(dropout_backward_case(*case, device=device) for case in PROJECTIONS[size]),
        *(mlp_case(*case, keep=False, device=device) for case in MLP[size]),
        *(mlp_case(*case, keep=True, device=device) for case in MLP[size][:2]),
    ]


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [
        *(rows_case("layer_norm", *case, device) for case in ROWS[size]),
        *(rows_case("layer_norm", *case, device) for case in LAYER_NORM_ROWS if size == "full"),
        *(rows_case("residual_layer_norm", *case, device) for case in ROWS[size]),
        *(front_case(*case, device) for case in FRONTS[size]),
        *(backward_case(*case, device) for case in ROWS[size]),
        *(
            attention_case(op, *case, device)
            for op, shapes in (("attention_residual_layer_norm", ATTENTION), ("attention_block", BLOCK))
            for case in shapes[size]
        ),
        *(
            attention_case(op, b, h, 1, d, HALF, device, keys)
            for op in ("attention_residual_layer_norm", "attention_block")
            for b, h, d, keys in DECODE.get(size, [])
        ),
        *linear_cases(size, device),
    ]


if __name__ == "__main__":
    benchmarks.main("step3_fused", cases)
