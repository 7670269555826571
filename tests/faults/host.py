"""The host's part: checks, allocation, and the way to a rung. Where torch and kernels meet."""

from faults import Fault

SHARED = "common/include/kf/host.h"
HOST1 = "step1-simple/simple_host.cpp"
HOST2 = "step2-attention/attention_host.cpp"
HOST3 = "step3-fused/fused_host.cpp"
HOST4 = "step4-integration/integration_host.cpp"
TEST1 = "step1-simple/test.py"
TEST2 = "step2-attention/test_attention.py"
TEST3 = "step3-fused/test_fused.py"
TEST4 = "step4-integration/test_integration.py"
APART1 = f"{TEST1}::test_an_out_that_shares_memory_with_anything_is_refused"

FAULTS = [
    # ---- arguments ----
    Fault(
        "promotion-ignores-the-residual",
        "autocast's widest dtype is found without looking at the residual",
        HOST1,
        "for (const Tensor& t : {bias, residual})",
        "for (const Tensor& t : {bias})",
        f"{TEST1}::test_autocast_finds_the_widest_dtype_wherever_it_is[torch.bfloat16-torch.float32-residual-cpu]",
    ),
    Fault(
        "softmax-in-autocasts-dtype",
        "autocast makes softmax's input its own dtype, not float32",
        HOST2,
        "call_in<softmax>(at::kFloat,",
        "call_in<softmax>(std::nullopt,",
        f"{TEST2}::test_autocast_makes_softmax_float32_and_attention_lower_precision[torch.bfloat16-cpu]",
    ),
    Fault(
        "out-over-the-bias",
        "`out` may lie over the bias",
        HOST1,
        'check_apart("bias_gelu", {{"out", out}}, {{"x", x}, {"bias", bias}});',
        'check_apart("bias_gelu", {{"out", out}}, {{"x", x}});',
        f"{APART1}[bias_gelu-cpu]",
    ),
    Fault(
        "outputs-over-each-other",
        "two outputs may lie over each other",
        SHARED,
        "for (auto before = outs.begin(); before != out; ++before) check(*out, *before);",
        "",
        f"{APART1}[bias_gelu_backward-cpu]",
    ),
    Fault(
        "out-over-a-part",
        "`out` may lie over a part of an input",
        SHARED,
        "status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial",
        "status != at::MemOverlapStatus::Full",
        f"{APART1}[column_sum-cpu]",
    ),
    Fault(
        "out-over-v",
        "attention's `out` may lie over v",
        HOST2,
        'check_apart("attention", {{"out", out}, {"lse", lse}}, {{"q", q}, {"k", k}, {"v", v}});',
        'check_apart("attention", {{"out", out}, {"lse", lse}}, {{"q", q}, {"k", k}});',
        f"{TEST2}::test_an_out_that_shares_memory_with_an_input_is_refused[cpu]",
    ),
    Fault(
        "unaligned-output-lost",
        "an output whose rows begin anywhere is computed and not copied to its place",
        HOST2,
        "  if (!out_rows.is_same(out)) out.copy_(out_rows);\n",
        "",
        f"{TEST2}::test_an_output_of_any_strides_is_written_where_it_lies[19-(0, 1, 2)-cpu-v3_mma]",
    ),
    Fault(
        "rows-at-any-address",
        "rows of a half type reach tensor cores wherever they begin",
        HOST2,
        "bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;",
        "bool aligned = true;",
        f"{TEST2}::test_attention_of_any_length[33-full-torch.bfloat16-cpu-v3_mma]",
    ),
    Fault(
        "lse-over-the-bounds",
        "attention's `lse` may lie over `key_end`",
        HOST2,
        'if (key_end) check_apart("attention", {{"out", out}, {"lse", lse}}, {{"key_end", *key_end}});',
        'if (key_end) check_apart("attention", {{"out", out}}, {{"key_end", *key_end}});',
        f"{TEST2}::test_an_out_that_shares_memory_with_an_input_is_refused[cpu]",
    ),
    Fault(
        "bounds-in-pieces",
        "`key_begin` is read as if it were in one piece",
        HOST2,
        "key_begin ? key_begin->contiguous() : at::Tensor();",
        "key_begin ? *key_begin : at::Tensor();",
        f"{TEST2}::test_attention_finds_each_tensor_wherever_it_lies[torch.float32-cpu-cpu]",
    ),
    Fault(
        "any-heads",
        "heads that cannot be shared out reach a kernel",
        HOST2,
        "k.size(1) == q.size(1) || (k.size(1) > 0 && q.size(1) % k.size(1) == 0)",
        "k.size(1) > 0 || q.size(1) == 0",
        f"{TEST2}::test_attention_refuses[cpu]",
    ),
    Fault(
        "scale-of-0-is-none-2",
        "a scale of 0 is taken for none in step 2",
        HOST2,
        "scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))))",
        "scale.value_or(0) != 0 ? *scale : 1.0 / std::sqrt(static_cast<double>(q.size(3)))",
        f"{TEST2}::test_a_scale_of_0_weighs_all_keys_alike[full-cpu-cpu]",
    ),
    Fault(
        "scale-of-0-is-none-3",
        "the same in step 3",
        HOST3,
        "scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))))",
        "scale.value_or(0) != 0 ? *scale : 1 / std::sqrt(static_cast<double>(q.size(3)))",
        f"{TEST3}::test_a_scale_of_0_weighs_all_keys_alike[full-attention_block-cpu-cpu]",
    ),
    Fault(
        "eps-of-0-is-none",
        "an eps of 0 is taken for the default",
        HOST3,
        "x.numel() / width, width, eps, dtype_of(x)});\n  return out;",
        "x.numel() / width, width, eps == 0 ? 1e-5 : eps, dtype_of(x)});\n  return out;",
        f"{TEST3}::test_an_eps_of_0_adds_nothing[cpu-cpu]",
    ),
    Fault(
        "width-of-0",
        "an embedding of width 0 is taken",
        HOST4,
        "token_weight.size(0) > 0 && width > 0",
        "token_weight.size(0) > 0",
        f"{TEST4}::test_embedding_refuses[cpu]",
    ),
    Fault(
        "id-just-past-the-table",
        "the first id past the vocabulary is taken",
        HOST4,
        "return id < 0 || id >= vocab;",
        "return id < 0 || id > vocab;",
        f"{TEST4}::test_a_bad_id_is_an_error_on_the_cpu[torch.int64-cpu]",
    ),
    Fault(
        "cache-too-short",
        "keys past the cache's end are taken",
        HOST4,
        "position + k.size(2) <= k_cache.size(2)",
        "position <= k_cache.size(2)",
        f"{TEST4}::test_kv_append_refuses[cpu]",
    ),
    # ---- random numbers ----
    Fault(
        "seed-of-32-bits",
        "dropout's seed has 32 bits of PyTorch's generator",
        HOST1,
        "static_cast<int64_t>(generator->random64())",
        "static_cast<int64_t>(generator->random())",
        f"{TEST1}::test_the_seed_has_all_64_bits_of_pytorchs_generator[cpu]",
    ),
    Fault(
        "threshold-cut-off",
        "the threshold of dropout is cut off, not rounded",
        HOST1,
        "std::lround(p * 65536)",
        "static_cast<long>(p * 65536)",
        f"{TEST1}::test_the_threshold_is_the_nearest_number_and_is_itself_kept[cpu-cpu]",
    ),
    # ---- what is empty ----
    Fault(
        "empty-sum-by-chance",
        "the sum over no rows is what happened to lie there",
        HOST1,
        "if (x.numel() == 0) return out.zero_();",
        "if (x.numel() == 0) return out;",
        f"{TEST1}::test_empty_tensors_give_empty_tensors_and_sums_of_0[column_sum-cpu-cpu]",
    ),
    Fault(
        "nothing-to-see-by-chance",
        "attention over no keys is what happened to lie there",
        HOST2,
        "    out.zero_();\n    lse.fill_",
        "    lse.fill_",
        f"{TEST2}::test_empty_tensors[cpu-cpu]",
    ),
    Fault(
        "any-rung-for-the-empty",
        "an unknown rung passes with an empty tensor",
        HOST1,
        "  check_rung(scale_op(), rung, x);\n",
        "",
        f"{TEST1}::test_an_unknown_rung_is_refused_for_an_empty_tensor_too[scale-cpu]",
    ),
    Fault(
        "without-data-to-a-kernel",
        "tensors without data reach a kernel",
        SHARED,
        "TORCH_CHECK_VALUE(on.is_cpu() || on.is_cuda(), op.name,",
        "TORCH_CHECK_VALUE(true, op.name,",
        f"{TEST1}::test_a_tensor_without_data_never_reaches_a_kernel",
    ),
    # ---- where tensors lie ----
    Fault(
        "strides-of-another",
        "v is read by k's strides",
        HOST2,
        "args.v_stride = strides_of(v_rows);",
        "args.v_stride = strides_of(k_rows);",
        f"{TEST2}::test_attention_finds_each_tensor_wherever_it_lies[torch.float32-cpu-cpu]",
    ),
    Fault(
        "cache-strides-of-another",
        "v's cache is written by the strides of k's",
        HOST4,
        "strides_of(v_rows), strides_of(k_cache), strides_of(v_cache)",
        "strides_of(v_rows), strides_of(k_cache), strides_of(k_cache)",
        f"{TEST4}::test_kv_append_finds_each_tensor_wherever_it_lies[v_cache-torch.float32-cpu-cpu]",
    ),
    Fault(
        "rows-in-pieces",
        "rows that do not lie in one piece are read as if they did",
        SHARED,
        "return t.stride(-1) == 1 || t.size(-1) == 1 ? t : t.contiguous();",
        "return t;",
        f"{TEST2}::test_views_of_any_strides[cpu-cpu]",
    ),
    Fault(
        "bias-in-pieces",
        "a bias of every second element is read as if it lay in one piece",
        HOST1,
        "const Tensor contiguous = x.contiguous(), contiguous_bias = bias.contiguous();\n  run(bias_gelu_op()",
        "const Tensor contiguous = x.contiguous(), contiguous_bias = bias;\n  run(bias_gelu_op()",
        f"{TEST1}::test_every_rung_finds_each_tensor_wherever_it_lies[torch.float32-bias_gelu-cpu-cpu]",
    ),
    # ---- which rung ----
    Fault(
        "named-rung-on-the-cpu",
        "on CPU tensors plain C++ runs, whatever rung is named",
        SHARED,
        'if (!on_gpu && (rung_name == "auto" || rung_name == "cpu")) {',
        "if (!on_gpu) {",
        f"{TEST1}::test_a_named_rung_runs_where_its_tensor_lies[scale-cpu]",
    ),
    Fault(
        "division-that-overflows",
        "a rung whose division would overflow takes the sizes all the same",
        "step1-simple/kernels/bias_gelu/rungs.cpp",
        '{"v5_any_width", v5_any_width, fast_divide}',
        '{"v5_any_width", v5_any_width, anything}',
        f"{TEST1}::test_where_a_division_would_overflow_its_rung_refuses_and_auto_takes_the_one_before"
        "[torch.float32-bias_gelu]",
    ),
    Fault(
        "auto-gives-up",
        "`auto` refuses what its first choice cannot do, though another rung could",
        SHARED,
        'if (name == "auto" && !able.empty()) return *find_rung(table, able.back());',
        "",
        f"{TEST2}::test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another[torch.float32]",
    ),
    Fault(
        "auto-for-wide-rows",
        "`auto` takes a warp a row for the widest rows too",
        HOST3,
        "return args.width > 2048 || (half",
        "return (half",
        f"{TEST3}::test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another[torch.float32]",
    ),
]
