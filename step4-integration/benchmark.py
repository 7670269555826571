"""python benchmark.py [--help]: every rung of this step beside PyTorch. The models are timed by benchmark_gpt2.py."""

import torch
import torch.nn.functional as F

import step4_integration  # not installed? pip install -e ..
from kernel_fusion.bench import benchmarks

TEACHES = "A whole GPT-2 from these ops: what is left to write are a look-up and a copy, and then it reads and trains."

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


def cases(size: str, device: str) -> list[benchmarks.Case]:
    """What to time at a size: "emulated", "cpu", "quick" or "full"."""
    return [
        *(embedding_case(*case, device) for case in EMBEDDING[size]),
        *(kv_append_case(*case, device) for case in KV_APPEND[size]),
    ]


if __name__ == "__main__":
    benchmarks.main("step4_integration", cases)
