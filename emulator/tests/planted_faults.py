#!/usr/bin/env python3
"""Plants twenty faults in copies of this project's rungs and shows which tool finds which.

    for p in simt simt-asan simt-tsan; do cmake --preset $p && cmake --build --preset $p; done
    python emulator/tests/planted_faults.py             # fails where the table in ../README.md is another
    python emulator/tests/planted_faults.py --write     # writes it
    python emulator/tests/planted_faults.py --only one-column-too-many      # one of them, with what the tools say
    python emulator/tests/planted_faults.py --step step2-attention         # those in one step

The tests are built first, where they are not up to date; then it takes a few minutes.
"""

import sys

from kernel_fusion.checks import by_tools
from kernel_fusion.checks.by_tools import Fault
from kernel_fusion.steps import ROOT

README = ROOT / "emulator/README.md"
STEP1, STEP2, STEP3, STEP4 = (
    f"{step}/kernels" for step in ("step1-simple", "step2-attention", "step3-fused", "step4-integration")
)
COLUMN_SUM = "step1-simple/include/step1/column_sum.h"
REDUCE = "step2-attention/include/step2/reduce.h"
ATTEND = "step3-fused/include/step3/attend.h"

FAULTS = [
    Fault(
        "guard-one-too-far",
        "guard `i <= n` in place of `i < n`",
        f"{STEP1}/scale/v2_naive.cu",
        "if (i < n) y[i]",
        "if (i <= n) y[i]",
        "Scale.*",
    ),
    Fault(
        "stride-of-a-block",
        "the loop's stride is the block, not the grid: work is done twice",
        f"{STEP1}/scale/v3_grid_stride.cu",
        "const int64_t stride = int64_t{gridDim.x} * blockDim.x;",
        "const int64_t stride = blockDim.x;",
        "Scale.*",
    ),
    Fault(
        "tail-forgotten",
        "the elements that do not fill a vector are forgotten",
        f"{STEP1}/gelu/v2_vector.cu",
        "if (tail < n) y[tail] = from_compute<T>(gelu_of<kTanh>(to_compute(x[tail])));",
        "",
        "Gelu.*",
    ),
    Fault(
        "random-numbers-twice",
        "dropout: the second four elements get the first four's random numbers",
        f"{STEP1}/bias_dropout_residual/v3_vector.cu",
        "eight.number(static_cast<int>(i % 8) + j)",
        "eight.number(j)",
        "BiasDropoutResidual.*",
    ),
    Fault(
        "eight-loaded-of-fewer",
        "the last thread loads eight elements where fewer are left",
        f"{STEP1}/bias_dropout_residual/v4_any_width.cu",
        "load_some<kAligned>(whole, x + i, 0, last, value);",
        "load_some<kAligned>(std::true_type{}, x + i, 0, last, value);",
        "BiasDropoutResidual.*",
    ),
    Fault(
        "no-barrier-after-writing",
        "`__syncthreads` missing between writing the sums and reading them",
        f"{STEP1}/column_sum/v2_two_stage.cu",
        "  sums[threadIdx.y][threadIdx.x] = sum;\n  __syncthreads();",
        "  sums[threadIdx.y][threadIdx.x] = sum;\n",
        "ColumnSum.*",
        header=COLUMN_SUM,
    ),
    Fault(
        "shared-array-too-small",
        "shared array without room for the groups that lie askew",
        f"{STEP1}/column_sum/v3_vector.cu",
        "__shared__ C sums[kTileRows * kEightEntries];",
        "__shared__ C sums[kTileRows * kEightTile];",
        "ColumnSum.*",
        header=COLUMN_SUM,
    ),
    Fault(
        "sums-of-different-maxima",
        "online softmax: threads' sums are added without scaling them to one maximum",
        f"{STEP2}/softmax/v3_online.cu",
        "row.sum = block_sum(own.sum * row.weight(own.max), shared);",
        "row.sum = block_sum(own.sum, shared);",
        "Softmax.*",
    ),
    Fault(
        "one-column-too-many",
        "last loop runs to `c <= width`: into the next row, past the last",
        f"{STEP2}/softmax/v2_block.cu",
        "for (int64_t c = threadIdx.x; c < width; c += blockDim.x) {\n    y[c]",
        "for (int64_t c = threadIdx.x; c <= width; c += blockDim.x) {\n    y[c]",
        "Softmax.*",
    ),
    Fault(
        "no-barrier-before-reuse",
        "`__syncthreads` missing before the reduction's array is used again",
        f"{STEP2}/softmax/v2_block.cu",
        "max = greater_of(max, shared[warp]);\n  __syncthreads();",
        "max = greater_of(max, shared[warp]);\n",
        "Softmax.*",
        header=REDUCE,
    ),
    Fault(
        "mask-of-the-first-group",
        "shuffle with the mask of the warp's first lanes in all its groups",
        f"{STEP2}/attention/v2_tiled.cu",
        "__shfl_xor_sync(kFullWarp, score[j], away)",
        "__shfl_xor_sync((1u << kGroup) - 1, score[j], away)",
        "Attention.*",
    ),
    Fault(
        "exit-before-barrier",
        "threads without a query return before the loop with the barriers",
        f"{STEP2}/attention/v2_tiled.cu",
        "  OnlineSoftmax<float> softmax;\n",
        "  OnlineSoftmax<float> softmax; if (!in_range) return;\n",
        "Attention.*",
    ),
    Fault(
        "no-barrier-before-loading",
        "`__syncthreads` missing before the next tile of keys is loaded",
        f"{STEP2}/attention/v2_tiled.cu",
        "__syncthreads();  // nobody reads",
        "// nobody reads",
        "Attention.*",
    ),
    Fault(
        "weights-shared-by-warps",
        "all warps write their weights to the same place",
        f"{STEP3}/attention_residual_layer_norm/v2_fused.cu",
        "C* weights = values + kKeys * stride + row * kKeys;",
        "C* weights = values + kKeys * stride;",
        "Fused.*",
        header=ATTEND,
    ),
    Fault(
        "no-syncwarp",
        "`__syncwarp` missing between the lanes' weights and their use",
        f"{STEP3}/attention_residual_layer_norm/v2_fused.cu",
        "    __syncwarp();\n",
        "\n",
        "Fused.*",
        header=ATTEND,
    ),
    Fault(
        "too-little-shared-memory",
        "the launch asks for shared memory without the weights' part",
        f"{STEP3}/attention_residual_layer_norm/v2_fused.cu",
        "return (rows + 2 * kKeys) * tile_stride(head_dim) + rows * kKeys;",
        "return (rows + 2 * kKeys) * tile_stride(head_dim);",
        "Fused.*",
        header=ATTEND,
    ),
    Fault(
        "padding-not-zeroed",
        "the end of a row that fills up a vector is left as it was",
        f"{STEP3}/attention_block/v2_fused.cu",
        "for (int c = width; c < stride; ++c) tile[threadIdx.x * stride + c] = 0;",
        "",
        "Fused.*",
    ),
    Fault(
        "position-over-the-batch",
        "positions counted through the batch, not within a sequence",
        f"{STEP4}/embedding/v1_naive.cu",
        "position_weight[row % length * width + column]",
        "position_weight[row * width + column]",
        "Embedding.*",
    ),
    Fault(
        "vectors-across-rows",
        "vectors although they do not divide the width",
        f"{STEP4}/embedding/v2_vector.cu",
        "a.width % kVector == 0 && aligned_16",
        "aligned_16",
        "Embedding.*",
    ),
    Fault(
        "strides-swapped",
        "strides of heads and tokens swapped",
        f"{STEP4}/kv_append/v1_naive.cu",
        "head * strides.head + token * strides.seq",
        "head * strides.seq + token * strides.head",
        "KvAppend.*",
    ),
]


if __name__ == "__main__":
    sys.exit(by_tools.main(__doc__, FAULTS, README))
