"""The host's part: checks, allocation, and the way to a rung. Where torch and kernels meet."""

from kernel_fusion.checks.faults import Fault

CHECKS = "common/include/kf/argument_checks.h"
SHARED = "common/include/kf/host.h"
PYTHON = "common/include/kf/python.h"
HOST1 = "step1-simple/simple_host.cpp"
HOST2 = "step2-attention/attention_host.cpp"
HOST3 = "step3-fused/fused_host.cpp"
HOST4 = "step4-integration/integration_host.cpp"
TEST1 = "step1-simple/test.py"
TEST2 = "step2-attention/test_attention.py"
SOFTMAX2 = "step2-attention/tests/test_softmax.py"
BACKWARD2 = "step2-attention/tests/test_softmax_backward.py"
TEST3 = "step3-fused/test_fused.py"
DROPOUT1 = "step1-simple/tests/test_dropout.py"
REFUSALS1 = "step1-simple/tests/test_refusals.py"
REGISTRATION1 = "step1-simple/tests/test_registration.py"
AUTOGRAD2 = "step2-attention/tests/test_attention_autograd.py"
REFUSALS2 = "step2-attention/tests/test_attention_refusals.py"
AUTOGRAD3 = "step3-fused/tests/test_autograd.py"
EMBEDDING4 = "step4-integration/tests/test_embedding.py"
KV_APPEND4 = "step4-integration/tests/test_kv_append.py"
OPS4 = "step4-integration/tests/test_ops.py"
APART1 = f"{REFUSALS1}::test_an_out_that_shares_memory_with_anything_is_refused"

FAULTS = [
    # ---- arguments ----
    Fault(
        "promotion-ignores-the-residual",
        "autocast's widest dtype is found without looking at the residual",
        HOST1,
        "for (const Tensor& t : {bias, residual})",
        "for (const Tensor& t : {bias})",
        f"{REGISTRATION1}::test_autocast_finds_the_widest_dtype_wherever_it_is[torch.bfloat16-torch.float32-residual-cpu]",
    ),
    Fault(
        "split-beyond-one-round",
        "auto splits the keys where tiles need a second round",
        "step2-attention/kernels/attention/rungs.h",
        "(half_seen ? 2 : 1) * 132",
        "(half_seen ? 2 : 1) * 133",
        f"{TEST2}::test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another[torch.bfloat16]",
    ),
    Fault(
        "blocks-that-stay-too-early",
        "auto takes persistent blocks where v7's tiles would need one round",
        "step2-attention/kernels/attention/rungs.h",
        "192 : 128) <= 132;",
        "192 : 128) < 132;",
        f"{TEST2}::test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another[torch.bfloat16]",
    ),
    Fault(
        "short-tiles-to-v7",
        "auto takes v7 for short texts, whose tiles it leaves half empty",
        "step2-attention/kernels/attention/rungs.h",
        "a.q_length > 256 &&",
        "a.q_length > 0 &&",
        f"{TEST2}::test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another[torch.bfloat16]",
    ),
    Fault(
        "padded-squares-split",
        "auto takes two rounds where the queries see most keys",
        "step2-attention/kernels/attention/rungs.h",
        "a.causal && a.q_length == a.k_length &&",
        "a.causal &&",
        f"{TEST2}::test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another[torch.bfloat16]",
    ),
    Fault(
        "wide-rows-not-shared",
        "auto takes v4 of softmax for rows that a cluster should share",
        "step2-attention/kernels/softmax/rungs.h",
        "a.width * size_of(a.dtype) <= 32768 ?",
        "a.width * size_of(a.dtype) <= 32784 ?",
        f"{SOFTMAX2}::test_what_is_too_large_for_a_rung_is_refused_and_auto_takes_another[torch.bfloat16]",
    ),
    Fault(
        "softmax-in-autocasts-dtype",
        "autocast makes softmax's input its own dtype, not float32",
        HOST2,
        "call_in<softmax>(at::kFloat,",
        "call_in<softmax>(std::nullopt,",
        f"{AUTOGRAD2}::test_autocast_makes_softmax_float32_and_attention_lower_precision[torch.bfloat16-cpu]",
    ),
    Fault(
        "autocast-forgets-the-mask",
        "under autocast `attention` is not causal",
        HOST2,
        "key_begin, key_end, rng_state, causal,\n                            scale, dropout_p, rung);",
        "key_begin, key_end, rng_state, false,\n                            scale, dropout_p, rung);",
        f"{AUTOGRAD2}::test_autocast_makes_softmax_float32_and_attention_lower_precision[torch.bfloat16-cpu]",
    ),
    Fault(
        "autocast-forgets-eps",
        "under autocast `attention_block` has its default eps",
        HOST3,
        "scale, eps, dropout_p, attention_dropout_p, keep, rung);\n}\n\n// ---- what there is",
        "scale, 1e-5, dropout_p, attention_dropout_p, keep, rung);\n}\n\n// ---- what there is",
        f"{AUTOGRAD3}::test_autocast_casts_each_tensor[attention_block-cpu]",
    ),
    Fault(
        "gradient-over-the-weights",
        "`out` of `softmax_backward` may lie over y",
        HOST2,
        '{{"out", out}}, {{"grad", grad}, {"y", y}});',
        '{{"out", out}}, {{"grad", grad}});',
        f"{BACKWARD2}::test_an_output_that_shares_memory_is_refused[cpu]",
    ),
    Fault(
        "weights-of-any-shape",
        "`softmax_backward` does not compare its arguments' shapes",
        HOST2,
        'check_like(op, "y", y, "grad", grad, grad.sizes());',
        'check_like(op, "y", y, "grad", grad);',
        f"{BACKWARD2}::test_what_is_refused[cpu]",
    ),
    Fault(
        "weights-as-they-lie",
        "`softmax_backward` reads y as if it were contiguous",
        HOST2,
        "contiguous_y = y.contiguous();",
        "contiguous_y = y;",
        f"{BACKWARD2}::test_each_tensor_is_found_wherever_it_lies[(2, 3, 64)-torch.float32-cpu-v1_naive]",
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
        CHECKS,
        "for (auto before = outs.begin(); before != out; ++before) check(*out, *before);",
        "",
        f"{APART1}[bias_gelu_backward-cpu]",
    ),
    Fault(
        "out-over-a-part",
        "`out` may lie over a part of an input",
        CHECKS,
        "status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial",
        "status != at::MemOverlapStatus::Full",
        f"{APART1}[column_sum-cpu]",
    ),
    Fault(
        "out-over-v",
        "attention's `out` may lie over v",
        HOST2,
        '{{"k", k}, {"v", v}, {"key_begin", key_begin}, {"key_end", key_end}, {"rng_state", rng_state}});',
        '{{"k", k}, {"key_begin", key_begin}, {"key_end", key_end}, {"rng_state", rng_state}});',
        f"{REFUSALS2}::test_an_out_that_shares_memory_with_an_input_is_refused[cpu]",
    ),
    Fault(
        "unaligned-output-lost",
        "an output whose rows begin anywhere is computed and not copied to its place",
        HOST2,
        "  run(attention_op(), rung, q, args);\n  if (!rows.out.is_same(out)) out.copy_(rows.out);\n",
        "  run(attention_op(), rung, q, args);\n",
        f"{TEST2}::test_an_output_of_any_strides_is_written_where_it_lies[19-(0, 1, 2)-cpu-v3_mma]",
    ),
    Fault(
        "rows-at-any-address",
        "rows of a half type reach tensor cores wherever they begin",
        "common/include/kf/argument_checks.h",
        "bool aligned = begins_at_16_bytes(t);",
        "bool aligned = true;",
        f"{TEST2}::test_attention_of_any_length[33-full-torch.bfloat16-cpu-v3_mma]",
    ),
    Fault(
        "lse-over-the-bounds",
        "the log-sum-exps may lie over an input",
        HOST2,
        'if (input) check_apart(op, {{"out", out}, {"lse", lse}}, {{name, *input}});',
        'if (input) check_apart(op, {{"out", out}}, {{name, *input}});',
        f"{REFUSALS2}::test_an_out_that_shares_memory_with_an_input_is_refused[cpu]",
    ),
    Fault(
        "bounds-in-pieces",
        "`key_begin` is read as if it were in one piece",
        HOST2,
        "begin(key_begin ? key_begin->contiguous() : at::Tensor()),",
        "begin(key_begin ? *key_begin : at::Tensor()),",
        f"{TEST2}::test_attention_finds_each_tensor_wherever_it_lies[torch.float32-cpu-cpu]",
    ),
    Fault(
        "any-heads",
        "heads that cannot be shared out reach a kernel",
        HOST2,
        "k.size(1) == q.size(1) || (k.size(1) > 0 && q.size(1) % k.size(1) == 0)",
        "k.size(1) > 0 || q.size(1) == 0",
        f"{REFUSALS2}::test_attention_refuses[cpu]",
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
        "w.data_ptr(), b.data_ptr(), y.data_ptr(), x.numel() / width, width, eps, dtype_of(x),",
        "w.data_ptr(), b.data_ptr(), y.data_ptr(), x.numel() / width, width, eps == 0 ? 1e-5 : eps, dtype_of(x),",
        f"{TEST3}::test_an_eps_of_0_adds_nothing[cpu-cpu]",
    ),
    Fault(
        "width-of-0",
        "an embedding of width 0 is taken",
        HOST4,
        "token_weight.size(0) > 0 && width > 0",
        "token_weight.size(0) > 0",
        f"{EMBEDDING4}::test_embedding_refuses[cpu]",
    ),
    Fault(
        "id-just-past-the-table",
        "the first id past the vocabulary is taken",
        HOST4,
        "return id < 0 || id >= vocab;",
        "return id < 0 || id > vocab;",
        f"{EMBEDDING4}::test_a_bad_id_is_an_error_on_the_cpu[torch.int64-cpu]",
    ),
    Fault(
        "cache-too-short",
        "keys past the cache's end are taken",
        HOST4,
        "position <= k_cache.size(2) - k.size(2)",
        "position <= k_cache.size(2)",
        f"{KV_APPEND4}::test_kv_append_refuses[cpu]",
    ),
    # ---- random numbers ----
    Fault(
        "seed-of-32-bits",
        "dropout's seed has 32 bits of PyTorch's generator",
        "common/include/kf/dropout.h",
        "static_cast<int64_t>(generator->random64())",
        "static_cast<int64_t>(generator->random())",
        f"{DROPOUT1}::test_the_seed_has_all_64_bits_of_pytorchs_generator[cpu]",
    ),
    Fault(
        "threshold-cut-off",
        "the threshold of dropout is cut off, not rounded",
        "common/include/kf/dropout.h",
        "std::lround(dropout_p * 65536)",
        "static_cast<long>(dropout_p * 65536)",
        f"{DROPOUT1}::test_the_threshold_is_the_nearest_number_and_is_itself_kept[cpu-cpu]",
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
        "  out.zero_();\n  lse.fill_",
        "  lse.fill_",
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
        f"{REFUSALS1}::test_a_tensor_without_data_never_reaches_a_kernel",
    ),
    # ---- where tensors lie ----
    Fault(
        "strides-of-another",
        "v is read by k's strides",
        HOST2,
        "args.v_stride = strides_of(v);",
        "args.v_stride = strides_of(k);",
        f"{TEST2}::test_attention_finds_each_tensor_wherever_it_lies[torch.float32-cpu-cpu]",
    ),
    Fault(
        "cache-strides-of-another",
        "v's cache is written by the strides of k's",
        HOST4,
        "strides_of(v_rows), strides_of(k_cache), strides_of(v_cache)",
        "strides_of(v_rows), strides_of(k_cache), strides_of(k_cache)",
        f"{KV_APPEND4}::test_kv_append_finds_each_tensor_wherever_it_lies[v_cache-torch.float32-cpu-cpu]",
    ),
    Fault(
        "rows-in-pieces",
        "rows that do not lie in one piece are read as if they did",
        CHECKS,
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
        "step1-simple/kernels/bias_gelu/rungs.h",
        "RUNG(v5_any_width, can_implement,",
        "RUNG(v5_any_width, always,",
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
    # ---- what autograd must know of a write ----
    Fault(
        "write-in-silence",
        "a write raises no version counter, and autograd takes new values for old",
        PYTHON,
        "t.unsafeGetTensorImpl()->bump_version();",
        "(void)t;",
        f"{KV_APPEND4}::test_no_gradient_goes_through_a_cache_that_was_appended_to[k_cache-eager-cpu]",
    ),
    Fault(
        "gradient-lost-in-out",
        "an out-variant takes what requires gradients, and passes none on",
        PYTHON,
        "!(c10::GradMode::is_enabled() && t.requires_grad())",
        "true",
        f"{OPS4}::test_what_an_op_writes_is_known_to_autograd[step4_integration.embedding.out]",
    ),
    Fault(
        "writes-not-watched",
        "a step's writes are not watched at all",
        "step2-attention/pybind.cpp",
        '  kf::watch_writes(m, "step2_attention");\n',
        "",
        f"{SOFTMAX2}::test_no_gradient_goes_through_a_value_that_was_written_over[itself-cpu]",
    ),
    Fault(
        "gradient-of-any-length",
        "`grad_bias` of any length is written",
        HOST1,
        '  check_out(op, "grad_bias", grad_bias, bias.sizes(), "grad", grad);\n',
        "",
        f"{REFUSALS1}::test_an_out_of_another_shape_or_dtype_is_refused[bias_gelu_backward-cpu]",
    ),
    Fault(
        "residual-of-any-dtype",
        "a residual of another dtype is read as if it were of that of x",
        HOST1,
        'check_like(op, "residual", residual, "x", x, x.sizes());',
        'check_device(op, "residual", residual, "x", x);\n  check_shape(op, "residual", residual, x.sizes());',
        f"{REFUSALS1}::test_tensors_that_do_not_match_are_refused[cpu]",
    ),
    Fault(
        "tokens-expanded",
        "a cache that is expanded along its tokens is taken",
        HOST4,
        "dim < 3; ++dim",
        "dim < 2; ++dim",
        f"{KV_APPEND4}::test_kv_append_refuses[cpu]",
    ),
    Fault(
        "last-id-not-checked",
        "the last id is not checked",
        HOST4,
        "const Id* last = first + ids.numel();",
        "const Id* last = first + ids.numel() - 1;",
        f"{EMBEDDING4}::test_a_bad_id_is_an_error_on_the_cpu[torch.int64-cpu]",
    ),
    Fault(
        "position-without-a-sum",
        "a position so great that no length can be added to it passes",
        HOST4,
        "position <= position_weight.size(0) - ids.size(1)",
        "position + ids.size(1) <= position_weight.size(0)",
        f"{EMBEDDING4}::test_embedding_refuses[cpu]",
    ),
]
