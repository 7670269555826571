"""The kernel that `ceilings` measures memory with. A file of its own, since Triton is not there without a GPU."""

import triton
import triton.language as tl


@triton.jit
def move(x, y, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr, POLICY: tl.constexpr):
    """Reads READS tensors of n elements that lie behind each other in x. Writes one of n, or a number a block.

    POLICY is the loads'. With "evict_last", which asks the L2 cache to keep what was read, 0.1 to 0.3 GB were
    moved 2 to 3 % faster on an H200; perhaps because what is written then leaves the cache earlier.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    value = tl.load(x + i, mask=inside, other=0, eviction_policy=POLICY)
    for k in tl.static_range(1, READS):
        value = value ^ tl.load(x + k * n + i, mask=inside, other=0, eviction_policy=POLICY)
    if WRITES:
        tl.store(y + i, value, mask=inside)
    else:
        tl.store(y + tl.program_id(0), tl.sum(value, 0))
