"""attention_block's v5_cluster: the heads of a few rows, divided among the blocks of a cluster."""

from faults import Fault

BLOCK3 = "step3-fused/kernels/attention_block"
TESTS3 = "step3-fused/test_one_launch.py"
TRAINING3 = "step3-fused/test_attention_training.py"


def shape(text: str) -> str:
    return f"{TESTS3}::test_any_shape[{text}-causal-v5_cluster-cpu]"


def heads(count: int) -> str:
    return f"{TESTS3}::test_any_number_of_heads[{count}-v5_cluster-cpu]"


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
        "cluster: nobody waits for what was fetched for the rows' ends",
        f"{BLOCK3}/v5_cluster.cu",
        "cp_async_wait<0>();  // what was fetched",
        "// what was fetched",
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
        f"{BLOCK3}/cluster_project.h",
        "row_sum(s.squares_and_count.first + off * (2 * s.mean_and_rest.second + off * count));",
        "row_sum(s.squares_and_count.first);",
        f"{TESTS3}::test_columns_far_from_the_rows_mean[v5_cluster-cpu]",
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
]
