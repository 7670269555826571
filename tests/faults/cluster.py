"""The heads of a few rows, divided among the blocks of a cluster: attention_block's v5_cluster, and v4_heads."""

from kernel_fusion.checks.faults import Fault

BLOCK3 = "step3-fused/kernels/attention_block"
HEADS3 = "step3-fused/kernels/attention_residual_layer_norm/v4_heads.cu"
TESTS3 = "step3-fused/tests/test_one_launch.py"
TRAINING3 = "step3-fused/tests/test_attention_training.py"


def shape(text: str) -> str:
    return f"{TESTS3}::test_any_shape[{text}-causal-v5_cluster-cpu]"


def heads(count: int) -> str:
    return f"{TESTS3}::test_any_number_of_heads[{count}-v5_cluster-cpu]"


def of_heads(text: str) -> str:
    return f"{TESTS3}::test_any_shape[{text}-causal-v4_heads-cpu]"


PADDED = f"{TRAINING3}::test_with_padding[full-none-torch.bfloat16-attention_block-cpu-v5_cluster]"
MASK = f"{TRAINING3}::test_the_projections_mask_is_that_of_step_1[attention_block-cpu-v5_cluster]"

FAULTS = [
    Fault(
        "cluster-forgets-the-last-keys",
        "cluster: the last tile of keys is left out",
        f"{BLOCK3}/cluster_attend.h",
        "if (first >= tiles * kKeys) break;",
        "if (first >= (tiles - 1) * kKeys) break;",
        shape("(1, 2, 65, 300, 64)"),
    ),
    Fault(
        "cluster-takes-the-first-part",
        "cluster: of the parts that warps found of a head only the first counts",
        f"{BLOCK3}/cluster_attend.h",
        "const int parts = min(1 << log_splits, tiles);",
        "const int parts = 1;",
        shape("(1, 2, 65, 300, 64)"),
    ),
    Fault(
        "cluster-mixes-up-heads",
        "cluster: each block finishes the heads of the first",
        f"{BLOCK3}/cluster_attend.h",
        "finish(first_head + first + head, row,",
        "finish(first + head, row,",
        heads(3),
    ),
    Fault(
        "cluster-lse-unscaled",
        "cluster: the log-sum-exp is of scores that are not scaled",
        f"{BLOCK3}/cluster_attend.h",
        "max * static_cast<float>(a.scale) + logf(sum)",
        "max + logf(sum)",
        PADDED,
    ),
    Fault(
        "cluster-reads-before-it-is-there",
        "cluster: nobody waits for what was loaded for the rows' ends",
        f"{BLOCK3}/v5_cluster.cu",
        "cp_async_wait<0>();  // what was loaded",
        "// what was loaded",
        shape("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "cluster-one-residual",
        "cluster: all rows of a block get the residual of its first",
        f"{BLOCK3}/cluster_project.h",
        "rest.residual + (row + min(r, rows - 1)) * rest.width",
        "rest.residual + row * rest.width",
        shape("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "cluster-depth-begins-with-a-head",
        "cluster: a part of the depth that begins within a head begins where the head does",
        f"{BLOCK3}/v5_cluster.cu",
        "column = (first_step - head_of_part * steps_of_head) * 16;",
        "column = 0;",
        shape("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "cluster-spread-of-each-block",
        "cluster: the variance leaves out how far the blocks' means are apart",
        f"{BLOCK3}/clusters.h",
        "row_sum(s.squares_and_count.first + off * (2 * s.mean_and_rest.second + off * count));",
        "row_sum(s.squares_and_count.first);",
        f"{TESTS3}::test_columns_far_from_the_rows_mean[4-64-v5_cluster-cpu]",
    ),
    Fault(
        "cluster-one-share-for-all-rounds",
        "cluster: each round of columns leaves its statistics over those of the round before",
        f"{BLOCK3}/v5_cluster.cu",
        "&header.share[rank + round][row]",
        "&header.share[rank][row]",
        f"{TESTS3}::test_a_block_that_projects_in_rounds[v5_cluster-cpu]",
    ),
    Fault(
        "cluster-mask-of-the-first-row",
        "cluster: the mask of the first row drops in all",
        f"{BLOCK3}/cluster_project.h",
        "rest.dropout.apply_aligned(at + c, x);",
        "rest.dropout.apply_aligned(first + c, x);",
        MASK,
    ),
    Fault(
        "cluster-attended-by-8-columns",
        "cluster: attention's output is kept as if each head had 8 columns",
        f"{BLOCK3}/v5_cluster.cu",
        "* width + head * head_dim + column, eight);",
        "* width + head * 8 + column, eight);",
        f"{TRAINING3}::test_without_padding[(2, 3, 5, 33, 16)-torch.bfloat16-attention_block-cpu-v5_cluster]",
    ),
    Fault(
        "cluster-heads-in-one-place",
        "cluster: each head's rows are sent to where the first head's lie",
        f"{BLOCK3}/v5_cluster.cu",
        "rows + (head * kRows + row) * kRowStride + column;",
        "rows + row * kRowStride + column;",
        heads(2),
    ),
    Fault(
        "heads-normalise-by-the-first-columns",
        "v4_heads: each block normalises by the weight and bias of the first block's columns",
        HEADS3,
        "first_column = first_head * head_dim;",
        "first_column = 0;",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-one-residual",
        "v4_heads: all rows of a block get the residual of its first",
        HEADS3,
        "widen(load_vector<N>(rest.residual + at), sum);",
        "widen(load_vector<N>(rest.residual + at - row * width), sum);",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-lse-of-one-batch",
        "v4_heads: the log-sum-exps of all batches are written in the place of the first",
        HEADS3,
        "[(batch * a.heads + head) * a.q_length + first_row + row] = lse;",
        "[head * a.q_length + first_row + row] = lse;",
        of_heads("(2, 3, 5, 7, 8)"),
    ),
    Fault(
        "heads-wait-for-rows-that-are-not",
        "v4_heads: a block waits for all 16 rows, also where there are fewer",
        HEADS3,
        "block.queries * blocks * static_cast<int>(sizeof(RowShare))",
        "kRows * blocks * static_cast<int>(sizeof(RowShare))",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-write-before-others-begin",
        "v4_heads: a block does not wait until the others have begun",
        HEADS3,
        "if (blocks > 1) cluster_barrier_wait();  // the others",
        "// the others",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-do-not-wait-for-each-other",
        "v4_heads: a row is normalised before all blocks have told what they know of it",
        HEADS3,
        "if (blocks > 1) mbarrier_wait_cluster(&header.shares_arrived, 0);",
        "",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-count-of-the-whole-row",
        "v4_heads: what a block knows of a row counts as if it were all columns",
        HEADS3,
        "row_sum(squares), static_cast<float>(columns)}};",
        "row_sum(squares), static_cast<float>(width)}};",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-beyond-head-dim",
        "v4_heads: columns beyond head_dim are written as well",
        HEADS3,
        "if (column >= head_dim) return;",
        "",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-attended-in-one-row",
        "v4_heads: all rows of attention's output are kept in the place of a block's first",
        HEADS3,
        "store_vector(rest.attended + at, narrow<T>(out));",
        "store_vector(rest.attended + at - row * width, narrow<T>(out));",
        of_heads("(1, 2, 33, 31, 40)"),
    ),
    Fault(
        "heads-statistics-of-nobody",
        "v4_heads: mean and rstd are kept by a block that need not exist",
        HEADS3,
        "if (rank == 0 && lane == 0) rest.kept.keep(global, of_row);",
        "if (rank == 1 && lane == 0) rest.kept.keep(global, of_row);",
        of_heads("(1, 1, 1, 1, 8)"),
    ),
    Fault(
        "heads-over-each-other",
        "v4_heads: a block's heads are put into the columns of its first",
        HEADS3,
        "(head - first_head) * head_dim + column, narrow<T>(sum)",
        "column, narrow<T>(sum)",
        f"{TESTS3}::test_any_number_of_heads[33-v4_heads-cpu]",
    ),
]
