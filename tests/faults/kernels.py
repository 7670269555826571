"""Rungs and the headers that they share, run under emulation."""

from faults import Fault

STEP1 = "step1-simple/kernels"
STEP2 = "step2-attention/kernels"
STEP3 = "step3-fused/kernels"
STEP4 = "step4-integration/kernels"
PHILOX = "step1-simple/include/step1/philox.h"
ATTEND = "step3-fused/include/step3/attend.h"
TEST1 = "step1-simple/test.py"
TEST2 = "step2-attention/test_attention.py"
TEST3 = "step3-fused/test_fused.py"
TEST4 = "step4-integration/test_integration.py"
HUGE1 = f"{TEST1}::test_offsets_beyond_32_bits_are_right"
WHEREVER1 = f"{TEST1}::test_every_rung_finds_each_tensor_wherever_it_lies"
PADDING2 = f"{TEST2}::test_attention_sees_only_keys_that_exist"
SHARED2 = f"{TEST2}::test_several_heads_may_share_their_keys"
WHEREVER2 = f"{TEST2}::test_attention_finds_each_tensor_wherever_it_lies"
WHEREVER4 = f"{TEST4}::test_kv_append_finds_each_tensor_wherever_it_lies"

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
        "from_compute<T>(row.weight(to_compute(v.element[j])) / row.sum)",
        "from_compute<T>(row.weight(to_compute(v.element[j])) < C(1e-6) ? C(0)"
        " : row.weight(to_compute(v.element[j])) / row.sum)",
        f"{TEST2}::test_softmax_far_below_its_maximum_is_right_to_its_own_digits[torch.float32-cpu-v3_online]",
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
        "aligned_16(a.x, a.residual, a.weight, a.bias, a.y, a.sum)",
        "aligned_16(a.x, a.weight, a.bias, a.y, a.sum)",
        f"{TEST3}::test_every_rung_finds_each_tensor_wherever_it_lies[torch.float32-residual_layer_norm-cpu-v2_fused]",
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
        f"{TEST3}::test_layer_norm_of_more_than_2_to_32_elements[4096-layer_norm-cpu-v2_block]",
    ),
    Fault(
        "softmax-rows-in-32-bits",
        "the same in softmax",
        f"{STEP2}/softmax/v3_online.cu",
        "y += blockIdx.x * width;",
        "y += blockIdx.x * static_cast<unsigned>(width);",
        f"{TEST2}::test_softmax_of_more_than_2_to_32_elements[1024-cpu-v3_online]",
    ),
    Fault(
        "tile-in-32-bits",
        "where a tile's row lies is computed in 32 bits",
        ATTEND,
        "factor * to_compute(from[r * row_stride + d])",
        "factor * to_compute(from[static_cast<int>(r * row_stride) + d])",
        f"{TEST3}::test_attention_at_offsets_beyond_32_bits[k-positions-attention_block-cpu-v2_fused]",
    ),
    Fault(
        "cache-in-32-bits",
        "a cache's row is found by 32 bits",
        f"{STEP4}/kv_append/v2_vector.cu",
        "+ token * strides.token;",
        "+ static_cast<int>(token * strides.token);",
        f"{TEST4}::test_kv_append_at_offsets_beyond_32_bits[k_cache-positions-cpu-v2_vector]",
    ),
    Fault(
        "table-in-32-bits",
        "a token's row is found by 32 bits",
        f"{STEP4}/embedding/v2_vector.cu",
        "load_vector<N>(token + id * width + column)",
        "load_vector<N>(token + static_cast<int>(id * width) + column)",
        f"{TEST4}::test_embedding_of_rows_beyond_32_bits[4096-id-cpu-v2_vector]",
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
        f"{TEST1}::test_the_mask_is_philoxs_after_half_a_million_elements_too[cpu-v4_any_width]",
    ),
    Fault(
        "philox-offset",
        "the offset is not divided by the four numbers of a call",
        PHILOX,
        "{philox(seed, offset / 4, static_cast<uint64_t>(block))}",
        "{philox(seed, offset, static_cast<uint64_t>(block))}",
        f"{TEST1}::test_the_mask_is_philoxs[(1, 4)-torch.float32-cpu-v2_naive]",
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
        "future-seen",
        "a causal query sees one key of the future",
        f"{STEP2}/attention/rows.h",
        "query + a.k_length - a.q_length + 1)",
        "query + a.k_length - a.q_length + 2)",
        f"{TEST2}::test_the_future_has_no_influence[cpu-v1_naive]",
    ),
    Fault(
        "padding-on-the-left-seen",
        "keys before `key_begin` are seen",
        f"{STEP2}/attention/v2_tiled.cu",
        "int64_t first_key = seen_by_block.begin;",
        "int64_t first_key = 0;",
        f"{PADDING2}[left-full-torch.float32-cpu-v2_tiled]",
    ),
    Fault(
        "padding-on-the-right-seen",
        "keys from `key_end` on are seen by the last query",
        f"{STEP2}/attention/rows.h",
        "min(int64_t{a.key_end[batch]}, a.k_length)",
        "a.k_length",
        f"{PADDING2}[right-causal-torch.bfloat16-cpu-v1_naive]",
    ),
    Fault(
        "bounds-beyond-the-tensor",
        "a `key_begin` below 0 is taken as it is",
        f"{STEP2}/attention/rows.h",
        "max(int64_t{a.key_begin[batch]}, int64_t{0})",
        "int64_t{a.key_begin[batch]}",
        f"{PADDING2}[beyond the tensor-full-torch.float32-cpu-v2_tiled]",
    ),
    Fault(
        "padding-multiplied",
        "what lies in padding is multiplied by a weight of 0",
        f"{STEP2}/attention/v1_naive.cu",
        "for (int64_t key = seen.begin; key < seen.end; ++key)",
        "for (int64_t key = 0; key < a.k_length; ++key)",
        f"{PADDING2}[both-full-torch.float32-cpu-v1_naive]",
    ),
    Fault(
        "heads-shared-in-another-order",
        "heads take their keys in turn, not neighbours together",
        f"{STEP2}/attention/rows.h",
        "return head / (a.heads / a.kv_heads);",
        "return head / a.heads * a.kv_heads + head % a.kv_heads;",
        f"{SHARED2}[4-2-full-cpu-v2_tiled]",
    ),
    Fault(
        "log-sum-exp-without-its-maximum",
        "the log-sum-exp leaves out what was subtracted",
        f"{STEP2}/attention/v1_naive.cu",
        "lse[row] = max + logarithm(sum);",
        "lse[row] = logarithm(sum);",
        f"{TEST2}::test_attention_of_any_length[33-full-torch.float32-cpu-v1_naive]",
    ),
    Fault(
        "accumulator-not-scaled",
        "what was accumulated under an old maximum is not scaled to the new one",
        f"{STEP2}/attention/v2_tiled.cu",
        "for (int c = 0; c < kColumns; ++c) out[c] *= factor;",
        "for (int c = 0; c < kColumns; ++c) out[c] *= 1.0f;",
        f"{TEST2}::test_attention_between_different_lengths[1-129-full-cpu-v2_tiled]",
    ),
    Fault(
        "keys-past-the-end",
        "places past the last key weigh as if their score were 0",
        ATTEND,
        "const bool visible = key < a.k_length && (",
        "const bool visible = (",
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
]
