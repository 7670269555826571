"""The plain C++ versions: what `auto` runs on CPU tensors."""

from kernel_fusion.checks.faults import Fault

CPU1 = "step1-simple/cpu/simple_cpu.cpp"
ROWS1 = "step1-simple/include/step1/rows_cpu.h"
GELU1 = "step1-simple/include/step1/gelu_cpu.h"
PHILOX1 = "step1-simple/include/step1/philox_cpu.h"
CPU2 = "step2-attention/cpu/attention_cpu.cpp"
VECTORISED2 = "step2-attention/include/step2/vectorised_cpu.h"
CPU3 = "step3-fused/cpu/fused_cpu.cpp"
LOOPS3 = "step3-fused/cpu/cpu_loops.h"
CPU4 = "step4-integration/cpu/integration_cpu.cpp"
TEST1 = "step1-simple/test.py"
TEST2 = "step2-attention/test_attention.py"
SOFTMAX2 = "step2-attention/tests/test_softmax.py"
BACKWARD2 = "step2-attention/tests/test_softmax_backward.py"
TEST3 = "step3-fused/test_fused.py"
FRONT3 = "step3-fused/tests/test_front.py"
DROPOUT1 = "step1-simple/tests/test_dropout.py"
EMBEDDING4 = "step4-integration/tests/test_embedding.py"
KV_APPEND4 = "step4-integration/tests/test_kv_append.py"
PADDING2 = f"{TEST2}::test_attention_sees_only_keys_that_exist"
BITS1 = f"{TEST1}::test_sums_have_the_bits_they_always_had"

FAULTS = [
    Fault(
        "sum-rounded-1",
        "x + bias is rounded to the half type before GELU",
        CPU1,
        "gelu_of<kTanh>(static_cast<C>(x[c]) + static_cast<C>(bias[c]))",
        "gelu_of<kTanh>(static_cast<C>(static_cast<T>(static_cast<C>(x[c]) + static_cast<C>(bias[c]))))",
        f"{TEST1}::test_every_rung_keeps_the_contract[(33, 760)-torch.bfloat16-bias_gelu-cpu-cpu]",
    ),
    Fault(
        "scale-of-0-left-out",
        "a scale of 0 is taken for none",
        CPU2,
        "if (scale != 1) {",
        "if (scale != 1 && scale != 0) {",
        f"{SOFTMAX2}::test_scale_is_what_x_is_multiplied_by_first[33-0.0-torch.float32-cpu-cpu]",
    ),
    Fault(
        "square-of-one-row",
        "plain C++ takes a causal square for one row after the other",
        CPU2,
        "const int64_t last = row % a.q_length",
        "const int64_t last = row",
        f"{SOFTMAX2}::test_a_row_of_a_causal_square_sees_up_to_its_own_column[(2, 33, 33)-torch.float32-cpu-cpu]",
    ),
    Fault(
        "softmax-gradient-rounded",
        "plain C++ rounds the gradient of softmax before it is scaled",
        CPU2,
        "grad_x[c] = scale * (y[c] * (grad[c] - sum));",
        "grad_x[c] = scale * static_cast<float>(at::BFloat16(static_cast<float>(y[c] * (grad[c] - sum))));",
        f"{BACKWARD2}::test_scale_multiplies_the_gradient[33--1.3-torch.bfloat16-cpu-cpu]",
    ),
    Fault(
        "products-of-the-tail",
        "plain C++ leaves the last products out of a row's sum",
        VECTORISED2,
        "for (; i < n; ++i) part[0] += x[i] * y[i];",
        "",
        f"{BACKWARD2}::test_every_column_counts_in_the_sum[cpu-cpu]",
    ),
    Fault(
        "sum-rounded-3",
        "the sum is rounded to the half type before it is normalised",
        CPU3,
        "if constexpr (!std::is_same_v<T, C>) convert(row, a.width, sum);",
        "if constexpr (!std::is_same_v<T, C>) convert(row, a.width, sum), convert(sum, a.width, row);",
        f"{TEST3}::test_residual_layer_norm_of_any_width[768-torch.bfloat16-cpu-cpu]",
    ),
    Fault(
        "front-of-the-first-row",
        "plain C++ gives each row behind a front the random numbers of the first",
        CPU3,
        "row_numbers(a, r, numbers)",
        "row_numbers(a, 0, numbers)",
        f"{FRONT3}::test_the_mask_is_that_of_step_1[torch.float32-cpu-cpu]",
    ),
    Fault(
        "sum-by-threads",
        "the sum of columns depends on the number of threads",
        ROWS1,
        "const int64_t parts = std::min<int64_t>(rows, 32);",
        "const int64_t parts = std::min<int64_t>(rows, at::get_num_threads());",
        f"{BITS1}[column_sum-cpu-cpu]",
    ),
    Fault(
        "sum-in-other-parts",
        "the sum of columns is cut into 31 parts, not 32",
        ROWS1,
        "const int64_t parts = std::min<int64_t>(rows, 32);",
        "const int64_t parts = std::min<int64_t>(rows, 31);",
        f"{BITS1}[column_sum-cpu-cpu]",
    ),
    Fault(
        "a-part-of-the-sum-lost",
        "the last part's rows are not added",
        ROWS1,
        "for (int64_t part = 1; part < parts; ++part) add_row",
        "for (int64_t part = 1; part + 1 < parts; ++part) add_row",
        f"{TEST1}::test_every_rung_keeps_the_contract[(33, 760)-torch.float32-column_sum-cpu-cpu]",
    ),
    Fault(
        "counter-of-16-bits",
        "Philox's counter starts again after 2¹⁹ elements",
        PHILOX1,
        "const uint64_t subsequence = first + static_cast<uint64_t>(begin + l);",
        "const uint64_t subsequence = static_cast<uint16_t>(first + static_cast<uint64_t>(begin + l));",
        f"{DROPOUT1}::test_the_mask_is_philoxs_after_half_a_million_elements_too[cpu-cpu]",
    ),
    Fault(
        "offset-of-32-bits",
        "the high word of dropout's offset is lost",
        PHILOX1,
        "y[l] = static_cast<uint32_t>(offset / 4 >> 32);",
        "y[l] = 0;",
        f"{DROPOUT1}::test_every_bit_of_seed_and_offset_counts[cpu-cpu]",
    ),
    Fault(
        "key-of-32-bits",
        "the high word of dropout's seed is lost",
        PHILOX1,
        "key_y = static_cast<uint32_t>(seed >> 32);",
        "key_y = 0;",
        f"{DROPOUT1}::test_every_bit_of_seed_and_offset_counts[cpu-cpu]",
    ),
    Fault(
        "dropped-at-the-threshold",
        "an element whose number is the threshold is dropped",
        CPU1,
        "(numbers[c] >= threshold ? value : C(0)) + static_cast<C>(residual[c])",
        "(numbers[c] > threshold ? value : C(0)) + static_cast<C>(residual[c])",
        f"{DROPOUT1}::test_the_threshold_is_the_nearest_number_and_is_itself_kept[cpu-cpu]",
    ),
    Fault(
        "gelu-digit",
        "a digit of GELU's constant",
        GELU1,
        "(x + C(0.044715) * x * x * x)",
        "(x + C(0.04471) * x * x * x)",
        f"{TEST1}::test_every_rung_keeps_the_contract[(33, 760)-torch.float64-gelu-cpu-cpu]",
    ),
    Fault(
        "slope-overflows",
        "GELU's slope is NaN far out",
        GELU1,
        "slope[i] = x[i] > C(-16) ? (x[i] < C(16) ? x[i] : C(16)) : C(-16);",
        "slope[i] = x[i];",
        f"{TEST1}::test_the_slope_of_gelu_at_the_ends_of_the_range[torch.float32-tanh-gelu_backward-cpu-cpu]",
    ),
    Fault(
        "keys-of-the-head-before",
        "attention keeps the keys and values of a thread's first head",
        CPU2,
        "if (batch * a.kv_heads + kv_head != loaded) {",
        "if (loaded < 0) {",
        f"{TEST2}::test_attention_of_any_length[33-full-torch.float32-cpu-cpu]",
    ),
    Fault(
        "keys-of-the-call-before",
        "attention keeps the keys and values of a thread's last call",
        CPU2,
        "      Head<C> h(a.k_length, dim);\n      int64_t loaded = -1;\n",
        "      static thread_local Head<C> h(a.k_length, dim);\n"
        "      static thread_local int64_t loaded = -1;\n"
        "      if (h.dim != dim || h.v.size() != Head<C>(a.k_length, dim).v.size()) {\n"
        "        h = Head<C>(a.k_length, dim);\n"
        "        loaded = -1;\n"
        "      }\n",
        f"{TEST2}::test_a_call_knows_nothing_of_the_one_before[cpu-cpu]",
    ),
    Fault(
        "padding-seen-by-the-cpu",
        "keys before `key_begin` in the first block that has any are seen",
        CPU2,
        "const int64_t missing = std::max<int64_t>(0, block.begin - first);",
        "const int64_t missing = 0;",
        f"{PADDING2}[left-full-torch.float32-cpu-cpu]",
    ),
    Fault(
        "old-weights-in-padding",
        "scores of padding become weights as they are",
        CPU2,
        "      std::fill(row, row + missing, C(0));\n",
        "",
        f"{TEST2}::test_what_one_batch_holds_reaches_no_other[cpu-cpu]",
    ),
    Fault(
        "group-by-remainder",
        "heads take their keys in turn, not neighbours together",
        CPU2,
        "const int64_t kv_head = head / (a.heads / a.kv_heads);",
        "const int64_t kv_head = head % a.kv_heads;",
        f"{TEST2}::test_several_heads_may_share_their_keys[6-3-full-cpu-cpu]",
    ),
    Fault(
        "last-register-left-out",
        "columns beyond the last whole tile of registers are not multiplied",
        VECTORISED2,
        "  for (; j < n; j += kWidth) {",
        "  for (; j + kWidth <= n; j += kWidth) {",
        f"{TEST2}::test_attention_with_any_head_dim[40-cpu-cpu]",
    ),
    Fault(
        "one-key-fewer",
        "a causal query does not see its own key",
        CPU2,
        "first + a.k_length - a.q_length + 1 : a.k_length;",
        "first + a.k_length - a.q_length : a.k_length;",
        f"{TEST2}::test_attention_of_any_length[33-causal-torch.float32-cpu-cpu]",
    ),
    Fault(
        "nothing-seen-is-nan",
        "a query that sees no key divides 0 by 0",
        CPU2,
        "const C inverse = h.sum[i] == 0 ? C(0) : 1 / h.sum[i];",
        "const C inverse = 1 / h.sum[i];",
        f"{TEST2}::test_a_query_that_sees_no_key_gives_zero_and_no_gradient[torch.float32-cpu-cpu]",
    ),
    Fault(
        "old-weights-not-scaled",
        "what was accumulated under an old maximum is not scaled to the new one",
        CPU2,
        "for (int64_t d = 0; d < width; ++d) out[d] *= factor;",
        "for (int64_t d = 0; d < width; ++d) out[d] *= C(1);",
        f"{TEST2}::test_each_block_of_keys_may_bring_a_new_maximum[7-cpu-cpu]",
    ),
    Fault(
        "variance-by-squares",
        "the variance by E[x²] − E[x]²",
        LOOPS3,
        "const Sums<C> off = sums_from(row, width, mean);\n  const C rest = off.values / C(width);",
        "const Sums<C> off{0, sums_from(row, width, C(0)).squares - mean * mean * C(width)};\n  const C rest = 0;",
        f"{TEST3}::test_a_large_mean_does_not_drown_a_small_variance[768-torch.float32-cpu-cpu]",
    ),
    Fault(
        "row-without-its-end",
        "columns after the last whole pack are left out of a row's sums",
        LOOPS3,
        "  for (; c < width; ++c) {\n    const C off = row[c] - from;",
        "  for (; false; ++c) {\n    const C off = row[c] - from;",
        f"{TEST3}::test_layer_norm_of_any_width[33-torch.float32-cpu-cpu]",
    ),
    Fault(
        "projection-bias-lost",
        "the projection's bias is not added",
        CPU3,
        "Front<C>{proj_bias.data(),",
        "Front<C>{nullptr,",
        f"{TEST3}::test_attention_of_any_length[33-full-torch.float32-attention_block-cpu-cpu]",
    ),
    Fault(
        "keys-read-by-the-queries-stride",
        "k's rows are found by q's stride",
        CPU3,
        "rows_of(base(a.k, begin), a.k.seq_stride, keys,",
        "rows_of(base(a.k, begin), a.q.seq_stride, keys,",
        f"{TEST3}::test_every_rung_finds_each_tensor_wherever_it_lies[torch.float32-attention_block-cpu-cpu]",
    ),
    Fault(
        "positions-through-the-batch",
        "positions counted through the batch, not within a sequence",
        CPU4,
        "position + row % a.length * a.width,",
        "position + std::min(row, a.length - 1) * a.width,",
        f"{EMBEDDING4}::test_embedding_adds_the_token_and_its_position[2-31-64-torch.float32-cpu-cpu]",
    ),
    Fault(
        "row-of-the-table-in-32-bits",
        "a token's row is found by 32 bits",
        CPU4,
        "token + static_cast<int64_t>(ids[row]) * a.width",
        "token + static_cast<int32_t>(static_cast<int64_t>(ids[row]) * a.width)",
        f"{EMBEDDING4}::test_embedding_of_rows_beyond_32_bits[4096-id-cpu-cpu]",
    ),
    Fault(
        "cache-by-the-keys-strides",
        "the cache's heads are found by the strides of k",
        CPU4,
        "batch * to_strides.batch + head * to_strides.head;",
        "batch * to_strides.batch + head * to_strides.head / to_strides.head * from_strides.head;",
        f"{KV_APPEND4}::test_kv_append_writes_its_rows_and_nothing_else[contiguous-torch.float32-cpu-cpu]",
    ),
    Fault(
        "rows-in-32-bits-in-plain-c++",
        "a row is found by 32 bits",
        CPU1,
        "add_row(static_cast<const T*>(a.x) + row * a.width, sum, a.width);",
        "add_row(static_cast<const T*>(a.x) + static_cast<int32_t>(row * a.width), sum, a.width);",
        f"{TEST1}::test_the_rows_of_a_sum_beyond_32_bits_are_found_in_plain_cpp",
    ),
]
