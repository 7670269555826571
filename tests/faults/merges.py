"""Statistics of a row's parts, put together wrongly."""

from faults.kinds import ATTENTION2, DECODE2, FUSED3, ONE_LAUNCH3, SOFTMAX2, STEP2, STEP3
from kernel_fusion.checks.faults import everywhere


def rows_of_a_cluster(*ops):
    return tuple(
        f"{FUSED3}::test_rows_wider_than_one_multiprocessor_holds[24001-torch.bfloat16-{op}-cpu-v4_cluster]"
        for op in ops
    )


def wide_softmax(rung):
    return f"{SOFTMAX2}::test_softmax_of_rows_as_wide_as_vocabularies[full-65539-torch.bfloat16-cpu-{rung}]"


def new_maximum(rung):
    return f"{ATTENTION2}::test_each_block_of_keys_may_bring_a_new_maximum[60-cpu-{rung}]"


CLUSTER_ROW = "step3-fused/include/step3/cluster_row.h"
FAR = f"{ONE_LAUNCH3}::test_columns_far_from_the_rows_mean"


MERGES = [
    *everywhere(
        "squares-between-parts",
        "the variance lacks how far the means of a row's parts are apart",
        (
            CLUSTER_ROW,
            "squares += squares_and_count[i].first + off * (2 * mean_and_sum[i].second + of_count);",
            "squares += squares_and_count[i].first;",
            *rows_of_a_cluster("layer_norm", "residual_layer_norm"),
        ),
        (
            f"{STEP3}/attention_block/clusters.h",
            "row_sum(s.squares_and_count.first + off * (2 * s.mean_and_rest.second + off * count))",
            "row_sum(s.squares_and_count.first)",
            f"{FAR}[4-64-v5_cluster-cpu]",
        ),
    ),
    *everywhere(
        "ragged-part",
        "the last part of a row counts as if it were as large as the others",
        (
            CLUSTER_ROW,
            "Pair<C>{squares, count}",
            "Pair<C>{squares, C(Row::kItems * Row::N * kWarpSize)}",
            *rows_of_a_cluster("layer_norm", "residual_layer_norm"),
        ),
        (
            f"{STEP3}/attention_block/cluster_project.h",
            "{row_sum(squares), static_cast<float>(columns)}",
            "{row_sum(squares), static_cast<float>(rest.width) / static_cast<float>(cluster_blocks())}",
            f"{FAR}[5-16-v5_cluster-cpu]",
        ),
        (
            f"{STEP3}/attention_residual_layer_norm/v4_heads.cu",
            "{row_sum(squares), static_cast<float>(columns)}",
            "{row_sum(squares), static_cast<float>(width) / static_cast<float>(blocks)}",
            f"{FAR}[5-16-v4_heads-cpu]",
        ),
    ),
    *everywhere(
        "maximum-of-a-part",
        "a row's maximum is that of its first parts alone",
        (
            f"{STEP2}/softmax/v5_cluster.cu",
            "for (int i = lane; i < blocks * kWarps; i += kWarpSize) row_max = ",
            "for (int i = lane; i < kWarps; i += kWarpSize) row_max = ",
            f"{SOFTMAX2}::test_softmax_finds_a_maximum_wherever_it_is[65539-cpu-v5_cluster]",
        ),
        (
            f"{STEP2}/attention/v9_split.cu",
            "const float max = greater_of(softmax.max[r], theirs.element[r]);",
            "const float max = softmax.max[r];",
            new_maximum("v9_split"),
        ),
        (
            f"{STEP2}/attention_decode/parts.h",
            "for (int i = 0; i < count; ++i) all.max",
            "for (int i = 0; i < count / 2; ++i) all.max",
            f"{DECODE2}::test_each_step_may_bring_a_new_maximum[60-cpu-v4_pipeline]",
        ),
        (
            f"{STEP3}/attention_block/cluster_attend.h",
            "const float greater = greater_of(max, part.max);",
            "const float greater = max == -INFINITY ? part.max : max;",
            f"{ONE_LAUNCH3}::test_each_part_of_the_keys_may_bring_a_new_maximum[20-v5_cluster-cpu]",
        ),
    ),
    *everywhere(
        "rest-of-the-variance",
        "the variance is around the rounded mean, not the true one",
        (
            "step3-fused/include/step3/statistics.h",
            "sum_of_squares * share - rest * rest + eps",
            "sum_of_squares * share + eps",
            f"{FUSED3}::test_a_large_mean_does_not_drown_a_small_variance[768-torch.float32-cpu-v1_naive]",
        ),
    ),
    *everywhere(
        "rest-of-the-saved-mean",
        "the mean that is returned is the first pass's, with its rounding",
        (
            "step3-fused/include/step3/statistics.h",
            "mean[row] = s.mean + s.rest;",
            "mean[row] = s.mean;",
            f"{FUSED3}::test_a_large_mean_does_not_drown_a_small_variance[1600-torch.float32-cpu-v1_naive]",
        ),
    ),
    *everywhere(
        "sum-of-a-part",
        "a part's sum of weights is not brought to the row's maximum",
        (
            f"{STEP2}/softmax/v5_cluster.cu",
            "row_sum += sum_of_warp[i] * weight_of(max_of_warp[i], row_max);",
            "row_sum += sum_of_warp[i];",
            wide_softmax("v5_cluster"),
        ),
        (
            f"{STEP2}/softmax/v6_cluster_registers.cu",
            "row_sum += max_and_sum[i].second * weight_of(max_and_sum[i].first, row_max);",
            "row_sum += max_and_sum[i].second;",
            wide_softmax("v6_cluster_registers"),
        ),
        (
            f"{STEP2}/attention/v9_split.cu",
            "softmax.sum[r] * own_factor[r] + theirs.element[2 + r] * factor[r]",
            "softmax.sum[r] * own_factor[r] + theirs.element[2 + r]",
            new_maximum("v9_split").replace("[60", "[7"),
        ),
        (
            f"{STEP2}/attention_decode/parts.h",
            "all.sum += part.sum * weight;",
            "all.sum += part.sum;",
            f"{DECODE2}::test_each_step_may_bring_a_new_maximum[7-cpu-v4_pipeline]",
        ),
    ),
]
