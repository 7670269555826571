"""Rungs and the headers that they share, run under emulation."""

from kernel_fusion.checks.faults import Fault

STEP1 = "step1-simple/kernels"
STEP2 = "step2-attention/kernels"
STEP3 = "step3-fused/kernels"
STEP4 = "step4-integration/kernels"
PHILOX = "step1-simple/include/step1/philox.h"
FRONT = "step3-fused/include/step3/front.h"
ATTEND = "step3-fused/include/step3/attend.h"
TEST1 = "step1-simple/test.py"
TEST2 = "step2-attention/test_attention.py"
SOFTMAX2 = "step2-attention/tests/test_softmax.py"
TEST3 = "step3-fused/test_fused.py"
FRONT3 = "step3-fused/tests/test_front.py"
DROPOUT1 = "step1-simple/tests/test_dropout.py"
MEMORY3 = "step3-fused/tests/test_memory.py"
EMBEDDING4 = "step4-integration/tests/test_embedding.py"
KV_APPEND4 = "step4-integration/tests/test_kv_append.py"
HUGE1 = f"{TEST1}::test_offsets_beyond_32_bits_are_right"
WHEREVER1 = f"{TEST1}::test_every_rung_finds_each_tensor_wherever_it_lies"
WHEREVER2 = f"{TEST2}::test_attention_finds_each_tensor_wherever_it_lies"
WHEREVER4 = f"{KV_APPEND4}::test_kv_append_finds_each_tensor_wherever_it_lies"

FAULTS = [
    # ---- intermediates rounded to the half type ----
    Fault(
        "weights-rounded",
        "attention's weights are rounded to the half type",
        f"{STEP2}/attention/v2_tiled.cu",
        "score[j] = softmax.weight(score[j]);",
        "score[j] = to_compute(from_compute<T>(softmax.weight(score[j])));",
        f"{TEST2}::test_attention_of_any_length[127-full-torch.bfloat16-cpu-v2_tiled]",
    ),
    Fault(
        "rounded-sum-normalised",
        "the rounded sum is normalised",
        f"{STEP3}/residual_layer_norm/v2_fused.cu",
        "rounded.element[j] = from_compute<T>(value[i][j]);",
        "rounded.element[j] = from_compute<T>(value[i][j]); value[i][j] = to_compute(rounded.element[j]);",
        f"{TEST3}::test_residual_layer_norm_of_any_width[768-torch.bfloat16-cpu-v2_fused]",
    ),
    Fault(
        "warps-weigh-alike",
        "where a cluster's warps meet, each counts as if it held one value",
        "step3-fused/include/step3/cluster_row.h",
        "const C off = mean_and_sum[i].first - mean, of_count = squares_and_count[i].second * off;",
        "const C off = mean_and_sum[i].first - mean, of_count = off;",
        f"{TEST3}::test_rows_wider_than_one_multiprocessor_holds[24001-torch.float32-layer_norm-cpu-v4_cluster]",
    ),
    Fault(
        "rest-of-a-warps-mean-lost",
        "what a warp's mean was rounded by does not reach the row's",
        "step3-fused/include/step3/cluster_row.h",
        "sum += mean_and_sum[i].second + of_count;",
        "sum += of_count;",
        f"{TEST3}::test_a_large_mean_does_not_drown_a_small_variance[20000-torch.float32-cpu-v4_cluster]",
    ),
    Fault(
        "half-a-meeting",
        "a warp of a cluster goes on when half of what the others store is there",
        "step3-fused/include/step3/cluster_row.h",
        "mbarrier_arrive_expect_tx(&arrived, blocks * kClusterRowWarps * 2 * static_cast<int>(sizeof(Pair<C>)));",
        "mbarrier_arrive_expect_tx(&arrived, blocks * kClusterRowWarps * static_cast<int>(sizeof(Pair<C>)));",
        f"{TEST3}::test_rows_wider_than_one_multiprocessor_holds[24001-torch.float32-residual_layer_norm-cpu-v4_cluster]",
    ),
    Fault(
        "biased-rounded",
        "x + bias is rounded to the half type before GELU",
        f"{STEP1}/bias_gelu/v2_naive.cu",
        "const auto sum = to_compute(x[i]) + to_compute(bias[i % width]);",
        "const auto sum = to_compute(from_compute<T>(to_compute(x[i]) + to_compute(bias[i % width])));",
        f"{TEST1}::test_every_rung_keeps_the_contract[(33, 760)-torch.bfloat16-bias_gelu-cpu-v2_naive]",
    ),
    Fault(
        "small-weights-lost",
        "softmax's weights below a millionth become 0",
        f"{STEP2}/softmax/v3_online.cu",
        "weight[j] = row.weight(weight[j]) / row.sum;",
        "weight[j] = row.weight(weight[j]) < C(1e-6) ? C(0) : row.weight(weight[j]) / row.sum;",
        f"{SOFTMAX2}::test_softmax_far_below_its_maximum_is_right_to_its_own_digits[torch.float32-cpu-v3_online]",
    ),
    # ---- where tensors lie ----
    Fault(
        "y-unaligned",
        "vectors although y is not aligned",
        f"{STEP1}/scale/v4_vector.cu",
        "if (aligned_16(a.x, a.y)) {",
        "if (aligned_16(a.x)) {",
        f"{WHEREVER1}[torch.float32-scale-cpu-v4_vector]",
    ),
    Fault(
        "bias-unaligned",
        "vectors although the bias is not aligned",
        f"{STEP1}/bias_gelu/v5_any_width.cu",
        "a.width % kVector == 0 && aligned_16(a.bias)",
        "a.width % kVector == 0",
        f"{WHEREVER1}[torch.float32-bias_gelu-cpu-v5_any_width]",
    ),
    Fault(
        "residual-unaligned",
        "vectors although the residual is not aligned",
        f"{STEP3}/residual_layer_norm/v2_fused.cu",
        "aligned_16(a.x, a.residual, a.weight, a.bias, a.y, a.sum, a.x_bias)",
        "aligned_16(a.x, a.weight, a.bias, a.y, a.sum, a.x_bias)",
        f"{TEST3}::test_every_rung_finds_each_tensor_wherever_it_lies[torch.float32-residual_layer_norm-cpu-v2_fused]",
    ),
    Fault(
        "x-bias-unaligned",
        "vectors although the bias in front is not aligned",
        f"{STEP3}/residual_layer_norm/v3_registers.cu",
        "a.y, a.sum, a.x_bias)",
        "a.y, a.sum)",
        f"{FRONT3}::test_each_tensor_wherever_it_lies[torch.float32-cpu-v3_registers]",
    ),
    Fault(
        "cache-unaligned",
        "vectors although v's cache is not aligned",
        f"{STEP4}/kv_append/v2_vector.cu",
        "aligned_16(a.k, a.v, a.k_cache, a.v_cache)",
        "aligned_16(a.k, a.v, a.k_cache)",
        f"{WHEREVER4}[v_cache-torch.float32-cpu-v2_vector]",
    ),
    Fault(
        "vectors-between-rows",
        "vectors although v's strides are no multiples of a vector",
        f"{STEP4}/kv_append/v2_vector.cu",
        " && divides(kVector, a.v_strides) &&",
        " &&",
        f"{WHEREVER4}[v-torch.float32-cpu-v2_vector]",
    ),
    Fault(
        "values-by-the-keys-stride",
        "v's rows are found by k's stride",
        f"{STEP2}/attention/v2_tiled.cu",
        "v_head, a.v_stride.seq, first_key",
        "v_head, a.k_stride.seq, first_key",
        f"{WHEREVER2}[torch.float32-cpu-v2_tiled]",
    ),
    Fault(
        "keys-by-the-queries-heads",
        "k's heads are found by q's stride",
        f"{STEP2}/attention/v1_naive.cu",
        "static_cast<const T*>(a.k), a.k_stride, kv_head_of",
        "static_cast<const T*>(a.k), {a.k_stride.batch, a.q_stride.head, a.k_stride.seq}, kv_head_of",
        f"{WHEREVER2}[torch.float32-cpu-v1_naive]",
    ),
    # ---- beyond 32 bits ----
    Fault(
        "elements-in-32-bits",
        "an element's index has 32 bits",
        f"{STEP1}/scale/v4_vector.cu",
        "const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;",
        "const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);",
        f"{HUGE1}[67108872-scale-cpu-v4_vector]",
    ),
    Fault(
        "rows-in-32-bits",
        "where a row begins is computed in 32 bits",
        f"{STEP3}/layer_norm/v2_block.cu",
        "x += int64_t{blockIdx.x} * width;",
        "x += static_cast<int>(blockIdx.x) * width;",
        f"{MEMORY3}::test_layer_norm_of_more_than_2_to_32_elements[4096-layer_norm-cpu-v2_block]",
    ),
    Fault(
        "softmax-rows-in-32-bits",
        "the same in softmax",
        f"{STEP2}/softmax/v3_online.cu",
        "y += blockIdx.x * width;",
        "y += blockIdx.x * static_cast<unsigned>(width);",
        f"{SOFTMAX2}::test_softmax_of_more_than_2_to_32_elements[1024-cpu-v3_online]",
    ),
    Fault(
        "tile-in-32-bits",
        "where a tile's row lies is computed in 32 bits",
        ATTEND,
        "factor * to_compute(from[r * row_stride + d])",
        "factor * to_compute(from[static_cast<int>(r * row_stride) + d])",
        f"{MEMORY3}::test_attention_at_offsets_beyond_32_bits[k-positions-attention_block-cpu-v2_fused]",
    ),
    Fault(
        "cache-in-32-bits",
        "a cache's row is found by 32 bits",
        f"{STEP4}/kv_append/v2_vector.cu",
        "+ token * strides.seq;",
        "+ static_cast<int>(token * strides.seq);",
        f"{KV_APPEND4}::test_kv_append_at_offsets_beyond_32_bits[k_cache-positions-cpu-v2_vector]",
    ),
    Fault(
        "table-in-32-bits",
        "a token's row is found by 32 bits",
        f"{STEP4}/embedding/v2_vector.cu",
        "load_vector<N>(token + id * width + column)",
        "load_vector<N>(token + static_cast<int>(id * width) + column)",
        f"{EMBEDDING4}::test_embedding_of_rows_beyond_32_bits[4096-id-cpu-v2_vector]",
    ),
    # ---- random numbers ----
    Fault(
        "philox-high-word",
        "the high word of Philox's counter is lost",
        PHILOX,
        "static_cast<uint32_t>(subsequence), static_cast<uint32_t>(subsequence >> 32));",
        "static_cast<uint32_t>(subsequence), 0);",
        f"{HUGE1}[67108872-bias_dropout_residual-cpu-v4_any_width]",
    ),
    Fault(
        "philox-counter-short",
        "Philox's counter starts again after 2¹⁹ elements",
        PHILOX,
        "{philox(seed, offset / 4, static_cast<uint64_t>(block))}",
        "{philox(seed, offset / 4, static_cast<uint16_t>(block))}",
        f"{DROPOUT1}::test_the_mask_is_philoxs_after_half_a_million_elements_too[cpu-v4_any_width]",
    ),
    Fault(
        "philox-offset",
        "the offset is not divided by the four numbers of a call",
        PHILOX,
        "{philox(seed, offset / 4, static_cast<uint64_t>(block))}",
        "{philox(seed, offset, static_cast<uint64_t>(block))}",
        f"{DROPOUT1}::test_the_mask_is_philoxs[(1, 4)-torch.float32-cpu-v2_naive]",
    ),
    Fault(
        "front-without-scale",
        "what dropout keeps in front of a residual is not divided by the part that it keeps",
        FRONT,
        "a.threshold, keep_scale<C>(a.threshold)}",
        "a.threshold, C(1)}",
        f"{FRONT3}::test_any_front[768-dropout-torch.bfloat16-cpu-v3_registers]",
    ),
    Fault(
        "x-bias-after-dropout",
        "the bias in front of a residual is added to what dropout has left",
        FRONT,
        "      for (int j = 0; j < N; ++j) value[j] += bias[j];\n    }\n    dropout.apply_aligned(element, value);",
        "      dropout.apply_aligned(element, value);\n"
        "      for (int j = 0; j < N; ++j) value[j] += bias[j];\n    } else {\n"
        "      dropout.apply_aligned(element, value);\n    }",
        f"{FRONT3}::test_any_front[768-bias-dropout-torch.bfloat16-cpu-v2_fused]",
    ),
    Fault(
        "numbers-of-the-first-half",
        "of a call's eight numbers both of its vectors of four floats get the first four",
        "step3-fused/include/step3/dropout.h",
        "eight.number(begin + j)",
        "eight.number(begin % 4 + j)",
        f"{FRONT3}::test_the_mask_is_that_of_step_1[torch.float32-cpu-v2_fused]",
    ),
    # ---- the arithmetic ----
    Fault(
        "tail-not-written",
        "elements after the last whole vector are not written",
        f"{STEP1}/scale/v4_vector.cu",
        "  if (tail < n) y[tail]",
        "  if (tail < n && N == 1) y[tail]",
        f"{TEST1}::test_every_rung_keeps_the_contract[(9, 1023)-torch.bfloat16-scale-cpu-v4_vector]",
    ),
    Fault(
        "keys-past-the-end",
        "places past the last key weigh as if their score were 0",
        ATTEND,
        "if (key >= attention::keys_seen(a, exist, query).end)",
        "if (a.causal && key >= attention::keys_seen(a, exist, query).end)",
        f"{TEST3}::test_attention_of_any_length[33-full-torch.float32-attention_block-cpu-v2_fused]",
    ),
    Fault(
        "rows-cut-otherwise",
        "the sum of columns is cut into two waves of blocks, not one",
        f"{STEP1}/column_sum/v3_vector.cu",
        "constexpr int kWaves = 1;",
        "constexpr int kWaves = 2;",
        f"{TEST1}::test_sums_have_the_bits_they_always_had[column_sum-cpu-v3_vector]",
    ),
    Fault(
        "bias-of-eight-by-fours",
        "eight of a bias are read where a row ends after four",
        f"{STEP1}/bias_dropout_residual/v4_any_width.cu",
        "a.width % 8 == 0 && aligned_16(a.bias)",
        "a.width % 4 == 0 && aligned_16(a.bias)",
        f"{TEST1}::test_rows_of_one_column_and_of_one_vector_and_a_half[12-bias_dropout_residual-cpu-v4_any_width]",
    ),
    Fault(
        "grid-stride-in-32-bits",
        "a grid-stride loop counts in 32 bits",
        f"{STEP1}/scale/v3_grid_stride.cu",
        "for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {",
        "for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += static_cast<int>(stride)) {",
        f"{TEST1}::test_a_grid_stride_goes_on_beyond_32_bits",
    ),
    Fault(
        "rounded-before-the-factor",
        "the gradient of GELU is rounded before it is multiplied by the factor",
        f"{STEP1}/gelu_backward/v1_naive.cu",
        "factor * to_compute(grad[i]) * gelu_slope<kTanh>(to_compute(x[i])));",
        "factor * to_compute(from_compute<T>(to_compute(grad[i]) * gelu_slope<kTanh>(to_compute(x[i])))));",
        f"{TEST1}::test_gelu_backward_has_the_factor_of_gelu_scale[torch.bfloat16-gelu_backward-cpu-v1_naive]",
    ),
    Fault(
        "dropped-infinity",
        "a gradient that is dropped is multiplied by 0, and infinity gives NaN",
        f"{STEP1}/bias_dropout_residual_backward/v2_fused.cu",
        "value[j] = eight.number(j) >= threshold ? scale * value[j] : C(0);",
        "value[j] *= eight.number(j) >= threshold ? scale : C(0);",
        f"{DROPOUT1}::test_what_is_dropped_has_a_gradient_of_0_whatever_reaches_it[cpu-v2_fused]",
    ),
    Fault(
        "table-by-fours",
        "vectors of eight halves are taken for rows of a multiple of four",
        f"{STEP4}/embedding/v2_vector.cu",
        "a.width % kVector == 0 &&",
        "a.width % 4 == 0 &&",
        f"{EMBEDDING4}::test_embedding_adds_the_token_and_its_position[2-3-12-torch.bfloat16-cpu-v2_vector]",
    ),
    Fault(
        "quotient-by-one",
        "rows of one column: the bias is read at the row's number",
        "step1-simple/include/step1/fast_divide.h",
        "if (multiplier_ == 0) return n;",
        "if (multiplier_ == 0) return 0;",
        f"{TEST1}::test_rows_of_one_column_and_of_one_vector_and_a_half[1-bias_gelu-cpu-v5_any_width]",
    ),
]
