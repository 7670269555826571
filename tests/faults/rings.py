"""Rings whose stages are used again, and loops whose second round few shapes reach."""

from faults.kinds import (
    ATTENTION2,
    ATTENTION_BACKWARD2,
    DECODE2,
    EPILOGUES3,
    LAYER_NORM_BACKWARD3,
    LINEAR2,
    MMA,
    ONE_LAUNCH3,
    PIPELINE,
    PRODUCTS,
    STEP1,
    STEP2,
    STEP3,
)
from kernel_fusion.checks.faults import everywhere


def stages_of_tiles(*rungs):
    return tuple(f"{ATTENTION2}::test_stages_of_tiles_are_used_again_and_again[full-64-cpu-{rung}]" for rung in rungs)


def backward_tiles(*rungs):
    return tuple(f"{ATTENTION_BACKWARD2}::test_more_tiles_than_multiprocessors[full-16-cpu-{rung}]" for rung in rungs)


def stages_of_keys(*rungs):
    return tuple(f"{DECODE2}::test_stages_of_keys_are_used_again_and_again[8-cpu-{rung}]" for rung in rungs)


def stages_of_the_depth(rung, *ops):
    name = "test_stages_of_the_depth_are_used_again_and_again"
    return tuple(f"{EPILOGUES3}::{name}[{rung}-(33, 1504, 40)-{op}]" for op in ops)


def rows_again(rung, shape="(13000, 8)", more="alone"):
    test = f"test_more_rows_than_resident_blocks[{shape}-torch.float32-{more}-cpu-{rung}]"
    return f"{LAYER_NORM_BACKWARD3}::{test}"


RINGS = [
    *everywhere(
        "phase",
        "a stage's second filling is not waited for: its barrier's phase stays the first",
        (
            PIPELINE,
            "index = 0, phase ^= 1;",
            "index = 0;",
            *stages_of_tiles("v7_warpgroups", "v8_persistent", "v9_split"),
            *backward_tiles("v4_warpgroups", "v5_persistent", "v6_atomics", "v7_turns", "v8_wide"),
            *stages_of_the_depth("v3_hopper", *PRODUCTS),
            f"{LINEAR2}::test_more_tiles_than_emulated_multiprocessors[(2100, 72, 2600)-v7_persistent]",
            f"{LINEAR2}::test_more_tiles_than_emulated_multiprocessors[(2100, 72, 2600)-v8_cluster]",
            f"{LINEAR2}::test_each_width_of_tiles[v9_split-(64, 840, 200)-depth-width]",
        ),
        (
            f"{STEP2}/attention/v6_wgmma.cu",
            "parity = j / 2 % 2;",
            "parity = 0;",
            *stages_of_tiles("v6_wgmma"),
        ),
        (
            f"{STEP2}/linear/v6_wgmma.cu",
            "mbarrier_wait(&shared.full[stage], k_tile / kStages % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{LINEAR2}::test_any_shape[(40, 1104, 72)-depth-width-torch.bfloat16-cpu-v6_wgmma]",
        ),
        (
            f"{STEP2}/linear/v10_rows.cu",
            "mbarrier_wait(&shared.full[stage], step / kStages % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{LINEAR2}::test_each_width_of_tiles[v10_rows-(4, 840, 1016)-depth-width]",
        ),
        (
            f"{STEP3}/mlp/few_rows.h",
            "mbarrier_wait(&shared.full[stage], (done + step) / kStages % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{EPILOGUES3}::test_more_tiles_of_few_rows_than_emulated_multiprocessors",
        ),
        (
            f"{STEP3}/mlp/inner_slice.h",
            "mbarrier_wait(&shared.full[stage], pieces.round(piece) % 2);",
            "mbarrier_wait(&shared.full[stage], 0);",
            f"{EPILOGUES3}::test_slices_of_the_inner_width[(33, 1096, 520)-torch.bfloat16-depth-width]",
        ),
        (
            f"{STEP3}/layer_norm_backward/v4_bulk.cu",
            "stage = 0, phase ^= 1;",
            "stage = 0;",
            rows_again("v4_bulk"),
        ),
        (
            f"{STEP3}/attention_block/attend.h",
            "mbarrier_wait(&shared.q_empty[warpgroup], number % 2 ^ 1);",
            "mbarrier_wait(&shared.q_empty[warpgroup], 1);",
            f"{ONE_LAUNCH3}::test_many_batches[v4_dataflow-cpu]",
        ),
    ),
    *everywhere(
        "stage",
        "from its third round on a ring fills a stage that is still read, or reads one that is not filled",
        (
            f"{STEP2}/attention/v4_pipeline.cu",
            "issue_key_loads(first_key + kKeys, stage ^ 1);",
            "issue_key_loads(first_key + kKeys, first_key < 4 * kKeys ? stage ^ 1 : stage);",
            *stages_of_tiles("v4_pipeline"),
        ),
        (
            f"{STEP2}/attention/v5_registers.cu",
            "issue_key_loads(first_key + kKeys, stage ^ 1);",
            "issue_key_loads(first_key + kKeys, first_key < 4 * kKeys ? stage ^ 1 : stage);",
            *stages_of_tiles("v5_registers"),
        ),
        (
            f"{STEP2}/attention_decode/ring.h",
            "stage = stage + 1 == kStages ? 0 : stage + 1;",
            "stage = stage + 1 == (then < begin + 2 * kStages * kStep ? kStages : kStages - 1) ? 0 : stage + 1;",
            *stages_of_keys("v4_pipeline", "v5_cluster", "v6_paged"),
        ),
        (
            MMA,
            "issue_loads((step + kStages - 1) % kStages);",
            "issue_loads((step + kStages - (step < 2 * kStages ? 1 : 2)) % kStages);",
            *stages_of_the_depth("v2_mma", "linear_gelu"),
        ),
        (
            f"{STEP2}/linear/v4_vector.cu",
            "first_k += kDepth<C>, buffer ^= 1)",
            "first_k += kDepth<C>, buffer ^= first_k < 4 * kDepth<C>)",
            f"{LINEAR2}::test_any_shape[(40, 1104, 72)-depth-width-torch.float32-cpu-v4_vector]",
        ),
        (
            f"{STEP3}/layer_norm_backward/v3_persistent.cu",
            "row += step, turn ^= 1)",
            "row += step)",
            rows_again("v3_persistent", "(2200, 257)", "sum"),
        ),
        (
            f"{STEP3}/attention_block/cluster_attend.h",
            "stage = stage + 1 == kStages ? 0 : stage + 1;",
            "stage = i < 2 * kStages && stage + 1 == kStages ? 0 : min(stage + 1, kStages - 1);",
            f"{ONE_LAUNCH3}::test_new_tokens_against_a_cache[1000-v5_cluster-cpu]",
            f"{ONE_LAUNCH3}::test_new_tokens_against_a_cache[1000-v4_heads-cpu]",
        ),
        (
            f"{STEP3}/attention_block/cluster_project.h",
            "memory.weight[step % kAhead][i][weight_slot()];",
            "memory.weight[min(step, 3 * kAhead - 1) % kAhead][i][weight_slot()];",
            f"{ONE_LAUNCH3}::test_every_gpt2_width_and_the_widest[25-v5_cluster-cpu]",
        ),
    ),
]


SLICES = f"{EPILOGUES3}::test_more_slices_than_are_taken_at_once"


ROUNDS = everywhere(
    "second-round",
    "a loop does its first round alone",
    (
        f"{STEP1}/scale/v3_grid_stride.cu",
        "i < n; i += stride)",
        "i < n; i += n)",
        "step1-simple/test.py::test_more_elements_than_threads_at_once[scale-cpu-v3_grid_stride]",
    ),
    (
        f"{STEP2}/attention_decode/v3_mma.cu",
        "first < group.last; first += kWarps * kKeys)",
        "first < group.last; first = group.last)",
        *stages_of_keys("v3_mma"),
    ),
    (
        f"{STEP3}/attention_residual_layer_norm/v4_heads.cu",
        "row < kRows; row += rows_at_once) {\n    const int64_t global",
        "row < kRows; row += kRows) {\n    const int64_t global",
        f"{ONE_LAUNCH3}::test_rows_so_wide_that_a_block_has_four_warps[v4_heads-cpu]",
    ),
    (
        f"{STEP3}/mlp/inner_slice.h",
        "v < plan.rows * across; v += kMultipliers)",
        "v < min(plan.rows * across, kMultipliers); v += kMultipliers)",
        f"{SLICES}[(64, 24, 2600)]",
    ),
    (
        f"{STEP3}/mlp/v7_inner.cu",
        "plan.clusters, Rows<T>(a.bias_2",
        "std::min(plan.clusters, 16), Rows<T>(a.bias_2",
        f"{SLICES}[(7, 24, 8712)]",
    ),
)


PLAIN_ROUNDS = everywhere(
    "second-round",
    "a loop does its first round alone",
    (
        "step2-attention/include/step2/product_cpu.h",
        "first_row < part.last_row; first_row += most_rows)",
        "first_row < part.last_row; first_row = part.last_row)",
        f"{LINEAR2}::test_plain_cpp_takes_many_rows_in_turn",
    ),
)
