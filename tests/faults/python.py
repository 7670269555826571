"""What each op is to torch: its function, its shapes without data, its gradients and theirs."""

from kernel_fusion.checks.faults import Fault

SHARED = "common/kernel_fusion/ops.py"
STEP1 = "step1-simple/step1_simple/__init__.py"
STEP2 = "step2-attention/step2_attention/__init__.py"
STEP3 = "step3-fused/step3_fused/__init__.py"
STEP4 = "step4-integration/step4_integration/__init__.py"
TEST1 = "step1-simple/test.py"
TEST2 = "step2-attention/test_attention.py"
SOFTMAX2 = "step2-attention/tests/test_softmax.py"
BACKWARD2 = "step2-attention/tests/test_softmax_backward.py"
TEST3 = "step3-fused/test_fused.py"
FRONT3 = "step3-fused/tests/test_front.py"
TEST4 = "step4-integration/test_integration.py"

STRIDES = "torch.empty_like(x, memory_format=torch.contiguous_format)"
DROPOUT1 = "step1-simple/tests/test_dropout.py"
GRADIENTS1 = "step1-simple/tests/test_gradients.py"
REFUSALS1 = "step1-simple/tests/test_refusals.py"
REGISTRATION1 = "step1-simple/tests/test_registration.py"
AUTOGRAD2 = "step2-attention/tests/test_attention_autograd.py"
REFUSALS2 = "step2-attention/tests/test_attention_refusals.py"
AUTOGRAD3 = "step3-fused/tests/test_autograd.py"
MEMORY3 = "step3-fused/tests/test_memory.py"
REFUSALS3 = "step3-fused/tests/test_refusals.py"
EMBEDDING4 = "step4-integration/tests/test_embedding.py"
KV_APPEND4 = "step4-integration/tests/test_kv_append.py"
TRANSPOSED1 = f"{REGISTRATION1}::test_ops_on_transposed_tensors_are_registered_as_torch_wants_it"
TRANSPOSED3 = f"{AUTOGRAD3}::test_an_op_on_transposed_tensors_is_registered_as_torch_wants_it"
DIFFERENCES1 = f"{GRADIENTS1}::test_gradients_are_those_of_finite_differences"
SECOND1 = f"{GRADIENTS1}::test_second_gradients_are_those_of_finite_differences"
SECOND_HALF1 = f"{GRADIENTS1}::test_second_gradients_are_as_exact_as_the_dtype_allows"
ALONE = "test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others"
ATTENTION2 = f"{AUTOGRAD2}::test_gradient_of_attention"
PADDED2 = f"{ATTENTION2}_with_padding_and_shared_keys_and_of_its_log_sum_exp"
FORMULA3 = f"{AUTOGRAD3}::test_gradients_are_those_of_the_formula"
EMBEDDING = f"{EMBEDDING4}::test_gradient_of_embedding[torch.int64-cpu-cpu]"

LESSON2 = "step2-attention/tests/test_lesson.py"
BENCHMARKS = "common/kernel_fusion/tests/test_benchmarks.py"
RECHECK = "common/kernel_fusion/tests/test_recheck.py"

FAULTS = [
    # ---- shapes without data: what torch.compile plans with ----
    Fault(
        "fake-lse-is-float",
        "without data the log-sum-exp of float64 is float32",
        STEP2,
        "dtype=torch.float64 if q.dtype == torch.float64 else torch.float32\n    )",
        "dtype=torch.float32\n    )",
        f"{AUTOGRAD2}::test_attention_is_registered_as_torch_wants_it[cpu-cpu]",
    ),
    Fault(
        "fake-keeps-strides-1",
        "outputs without data have the strides of a transposed input, in step 1",
        SHARED,
        STRIDES,
        "torch.empty_like(x)",
        f"{TRANSPOSED1}[scale-cpu]",
    ),
    Fault(
        "fake-keeps-strides-2",
        "the same in step 2",
        SHARED,
        STRIDES,
        "torch.empty_like(x)",
        f"{SOFTMAX2}::test_softmax_is_registered_as_torch_wants_it[cpu-cpu]",
    ),
    Fault(
        "fake-keeps-strides-3",
        "the same in step 3",
        SHARED,
        STRIDES,
        "torch.empty_like(x)",
        f"{TRANSPOSED3}[layer_norm-cpu]",
    ),
    Fault(
        "fake-keeps-strides-4",
        "the same in step 4",
        STEP4,
        "return token_weight.new_empty((batch, length, width))",
        "return token_weight.new_empty((batch, width, length)).mT",
        f"{EMBEDDING4}::test_embedding_is_registered_as_torch_wants_it[cpu-cpu]",
    ),
    Fault(
        "fake-in-float32",
        "a bias's gradient without data is float32, whatever the dtype",
        STEP1,
        'check_like("bias_gelu_backward", "bias", bias, "grad", grad, grad.shape[-1:])\n'
        '    _check_approximate("bias_gelu_backward", approximate)\n'
        "    return contiguous_like(grad), grad.new_empty(grad.shape[-1:])",
        'check_like("bias_gelu_backward", "bias", bias, "grad", grad, grad.shape[-1:])\n'
        '    _check_approximate("bias_gelu_backward", approximate)\n'
        "    return contiguous_like(grad), torch.empty(grad.shape[-1:], device=grad.device)",
        f"{TRANSPOSED1}[bias_gelu_backward-cpu]",
    ),
    Fault(
        "fake-of-rows",
        "the sum of columns without data is as long as there are rows",
        STEP1,
        "return x.new_empty(x.shape[-1:])",
        "return x.new_empty(x.shape[:1])",
        f"{TRANSPOSED1}[column_sum-cpu]",
    ),
    Fault(
        "fake-state-on-the-cpu",
        "dropout's state without data is on the CPU, also where it was asked on the device",
        "common/kernel_fusion/rng.py",
        'device=x.device if on_device else "cpu")',
        'device="cpu")',
        f"{REGISTRATION1}::test_the_state_of_dropout_is_registered_as_torch_wants_it",
    ),
    Fault(
        "fake-checks-no-shape",
        "`v` of another shape than `k` passes without data",
        STEP2,
        "    check_shape(op, v_name, v, k.shape)\n",
        "",
        f"{REFUSALS2}::test_attention_refuses[meta]",
    ),
    Fault(
        "fake-checks-no-bounds",
        "`key_begin` of another shape passes without data",
        SHARED,
        "            check_shape(op, name, bound, (q.shape[0],))\n",
        "",
        f"{REFUSALS2}::test_attention_refuses[meta]",
    ),
    Fault(
        "fake-checks-no-heads",
        "heads that cannot be shared out pass without data",
        STEP2,
        "kv_heads == heads or (kv_heads > 0 and heads % kv_heads == 0)",
        "True",
        f"{REFUSALS2}::test_attention_refuses[meta]",
    ),
    Fault(
        "fake-checks-no-dtype",
        "a tensor of another dtype than the first passes without data",
        SHARED,
        "        x.dtype == first.dtype,\n",
        "        True,\n",
        f"{REFUSALS3}::test_attention_refuses[attention_block-meta]",
    ),
    Fault(
        "fake-checks-no-position",
        "positions past the table pass without data",
        STEP4,
        "torch._check_value(position + length <= rows,",
        "torch._check_value(position <= rows,",
        f"{EMBEDDING4}::test_embedding_refuses[meta]",
    ),
    # ---- dropout: its state ----
    Fault(
        "state-switches-dropout-on",
        "`training=False` is forgotten where a state is given",
        STEP1,
        "    if not training:\n",
        "    if not training and rng_state is None:\n",
        f"{DROPOUT1}::test_dropout_of_nothing_and_of_all[cpu-cpu]",
    ),
    Fault(
        "dropout-in-evaluation",
        "`training=False` is forgotten",
        STEP1,
        "    if not training:\n",
        "    if False:\n",
        f"{DROPOUT1}::test_dropout_of_nothing_and_of_all[cpu-cpu]",
    ),
    Fault(
        "dropout-never",
        "dropout is off in training",
        STEP1,
        "    if not training:\n",
        "    if training:\n",
        f"{DROPOUT1}::test_checkpointing_sees_the_same_mask_again[False-cpu]",
    ),
    Fault(
        "evaluation-draws",
        "evaluation moves PyTorch's generator on",
        STEP1,
        "rng_state = rng.draw(_ops, x) if rng.drops(dropout_p) else rng.unused(x)",
        "rng_state = rng.draw(_ops, x)",
        f"{DROPOUT1}::test_dropout_moves_pytorchs_generator_on_and_evaluation_does_not[cpu]",
    ),
    Fault(
        "p-not-checked",
        "`p` above 1 passes where dropout is off",
        STEP1,
        "    if not 0 <= dropout_p <= 1:\n",
        "    if training and not 0 <= dropout_p <= 1:\n",
        f"{REFUSALS1}::test_dropout_refuses[cpu]",
    ),
    Fault(
        "compiled-dropouts-alike",
        "two dropouts in one compiled function drop the same",
        "common/kernel_fusion/rng.py",
        "    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:\n",
        "    if False:\n",
        f"{DROPOUT1}::test_compiled_dropout_draws_anew_for_each_call_and_agrees_with_its_gradient[cpu]",
    ),
    # ---- gradients ----
    Fault(
        "backward-forgets-its-rung",
        "the backward of `scale` runs by auto",
        STEP1,
        "_ops.scale(grad, ctx.factor, rung=ctx.rung), None",
        "_ops.scale(grad, ctx.factor), None",
        f"{GRADIENTS1}::test_a_backward_runs_by_auto_and_that_of_scale_by_its_rung[scale-cpu-v3_grid_stride]",
    ),
    Fault(
        "backward-of-another-rung",
        "the backward of `scale` runs by v2_naive, whatever rung was asked",
        STEP1,
        "_ops.scale(grad, ctx.factor, rung=ctx.rung), None",
        '_ops.scale(grad, ctx.factor, rung="v2_naive"), None',
        f"{GRADIENTS1}::test_a_backward_runs_by_auto_and_that_of_scale_by_its_rung[scale-cpu-v3_grid_stride]",
    ),
    Fault(
        "backward-of-pytorch",
        "the backward of `gelu` is PyTorch's, not this step's kernel",
        STEP1,
        "return _ops.gelu_backward(grad, ctx.saved_tensors[0], factor=ctx.factor, approximate=ctx.approximate)",
        "return ctx.factor * torch.ops.aten.gelu_backward(grad, ctx.saved_tensors[0], approximate=ctx.approximate)",
        f"{GRADIENTS1}::test_a_backward_runs_by_auto_and_that_of_scale_by_its_rung[gelu-cpu-v1_naive]",
    ),
    Fault(
        "factor-forgotten",
        "the backward of `gelu_scale` forgets the factor",
        STEP1,
        "ctx.factor = inputs[1] if len(inputs) == 2 else 1.0",
        "ctx.factor = 1.0",
        f"{DIFFERENCES1}[gelu_scale-cpu-cpu]",
    ),
    Fault(
        "approximation-forgotten",
        "the backward of `bias_gelu` takes the tanh form, whatever the forward had",
        STEP1,
        "_ops.bias_gelu_backward(grad, *ctx.saved_tensors, approximate=ctx.approximate)",
        "_ops.bias_gelu_backward(grad, *ctx.saved_tensors)",
        f"{DIFFERENCES1}[bias_gelu-cpu-cpu]",
    ),
    Fault(
        "residual-dropped-too",
        "the residual's gradient is dropped as x's is",
        STEP1,
        "return grad_x, grad_bias, grad, None, None",
        "return grad_x, grad_bias, grad_x, None, None",
        f"{DIFFERENCES1}[bias_dropout_residual-cpu-cpu]",
    ),
    Fault(
        "nothing-where-x-is-frozen",
        "no gradient at all where x requires none",
        STEP1,
        "def _dropout_backward(ctx, grad):\n",
        "def _dropout_backward(ctx, grad):\n"
        "    if not ctx.needs_input_grad[0]:\n"
        "        return None, None, grad, None, None\n",
        f"{GRADIENTS1}::{ALONE}[bias_dropout_residual-cpu]",
    ),
    Fault(
        "nothing-where-weight-is-frozen",
        "`layer_norm` gives the bias no gradient where the weight requires none",
        STEP3,
        "    return _gradients_of_rows(ctx, ctx.saved_tensors, grad, None, grad_mean, grad_rstd)\n",
        "    grads = _gradients_of_rows(ctx, ctx.saved_tensors, grad, None, grad_mean, grad_rstd)\n"
        "    return tuple(g * (i < 2 or ctx.needs_input_grad[1]) for i, g in enumerate(grads))\n",
        f"{AUTOGRAD3}::{ALONE}[layer_norm-cpu]",
    ),
    Fault(
        "cache-takes-keys-with-gradients",
        "`kv_append` refuses only where both k and v require gradients",
        STEP4,
        "(k.requires_grad or v.requires_grad)",
        "(k.requires_grad and v.requires_grad)",
        f"{KV_APPEND4}::test_kv_append_needs_gradients_to_be_off",
    ),
    Fault(
        "causal-forgotten-3",
        "the way back of fused attention forgets `causal`",
        STEP3,
        '"causal": options["causal"],\n        "scale"',
        '"causal": False,\n        "scale"',
        f"{FORMULA3}[attention_block-cpu]",
    ),
    Fault(
        "backward-without-mask",
        "the backward forgets `causal`",
        STEP2,
        '    ctx.causal, ctx.dropout_p = keyword_only_inputs["causal"],',
        "    ctx.causal, ctx.dropout_p = False,",
        f"{ATTENTION2}[4-4-causal-cpu-cpu]",
    ),
    Fault(
        "scale-of-0-is-none",
        "a scale of 0 is taken for none in the backward of step 3",
        STEP3,
        '"scale": options["scale"],\n        "dropout_p"',
        '"scale": options["scale"] or None,\n        "dropout_p"',
        f"{TEST3}::test_a_scale_of_0_weighs_all_keys_alike[full-attention_block-cpu-cpu]",
    ),
    Fault(
        "tangents-taken-for-0",
        "forward mode is not refused, and its derivatives are 0",
        SHARED,
        "forward_ad.unpack_dual(x).tangent is not None",
        "forward_ad.unpack_dual(x).tangent is None",
        f"{GRADIENTS1}::test_forward_mode_is_refused[scale]",
    ),
    Fault(
        "backward-in-half",
        "second gradients of half types are computed in the half type",
        SHARED,
        "return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x",
        "return x",
        f"{AUTOGRAD2}::test_second_gradients_are_as_exact_as_the_dtype_allows[5-5-torch.bfloat16-cpu]",
    ),
    Fault(
        "backward-in-autocast",
        "a second backward inside an autocast region multiplies in the region's dtype",
        STEP2,
        "with torch.autocast(q.device.type, enabled=False):",
        "if True:",
        f"{AUTOGRAD2}::test_a_backward_inside_autocast_computes_the_same[torch.bfloat16]",
    ),
    Fault(
        "gradient-of-the-mean-lost",
        "what a row's mean adds to the gradient of x is lost",
        STEP3,
        "        grad = (grad_mean / width).unsqueeze(-1)\n",
        "        grad = 0 * (grad_mean / width).unsqueeze(-1)\n",
        "step3-fused/tests/test_layer_norm_backward.py::test_mean_and_rstd_have_gradients_too[layer_norm-cpu]",
    ),
    Fault(
        "gradient-of-the-sum-lost",
        "the gradient that reaches `sum` is lost",
        STEP3,
        "_ops.layer_norm_backward(grad, x, weight, mean, rstd, grad_sum)\n        if",
        "_ops.layer_norm_backward(grad, x, weight, mean, rstd, None)\n        if",
        f"{FORMULA3}[residual_layer_norm-cpu]",
    ),
    Fault(
        "statistics-not-kept",
        "`layer_norm` keeps mean and rstd only where the caller asks for them, not where a gradient will",
        STEP3,
        "return_statistics or needs_gradients(x, weight, bias)",
        "return_statistics",
        f"{MEMORY3}::test_statistics_are_kept_where_a_gradient_is_wanted[layer_norm-cpu]",
    ),
    Fault(
        "nothing-saved-as-statistics",
        "`layer_norm`'s backward pass takes what was not kept for mean and rstd",
        STEP3,
        "*(output[1:] if keep else ())",
        "*output[1:]",
        f"{MEMORY3}::test_statistics_that_nobody_wants_are_not_written[24-layer_norm-cpu-cpu]",
    ),
    Fault(
        "residual-dropped",
        "the residual's gradient is dropped as that of x is",
        STEP3,
        "return grad_x, grad_total, *rest,",
        "return grad_x, grad_x, *rest,",
        f"{FRONT3}::test_the_backward_sees_the_mask_of_its_forward[cpu]",
    ),
    Fault(
        "drops-in-evaluation",
        "`training=False` does not switch off dropout in front of a residual",
        STEP3,
        "    if not training:\n        dropout_p = 0.0\n",
        "",
        f"{FRONT3}::test_without_a_front_nothing_has_changed[cpu-cpu]",
    ),
    Fault(
        "projection-not-turned",
        "the projection's gradient goes back through the matrix, not its transpose",
        STEP3,
        "_ops.linear_backward(grad_projected, attended, proj_weight)",
        "_ops.linear_backward(grad_projected, attended, proj_weight.mT)",
        f"{FORMULA3}[attention_block-cpu]",
    ),
    Fault(
        "sum-of-embedding-in-half",
        "a token's gradients are added in the half type",
        STEP4,
        "summed = wide(grad)",
        "summed = grad",
        f"{EMBEDDING4}::test_gradients_of_embedding_are_as_exact_as_the_dtype_allows[torch.bfloat16-cpu]",
    ),
    Fault(
        "gradient-at-position-0",
        "positions' gradients go to the table's first rows",
        STEP4,
        '    ctx.position = keyword_only_inputs["position"]\n',
        "    ctx.position = 0\n",
        EMBEDDING,
    ),
    # ---- gradients of gradients ----
    Fault(
        "curvature-wrong",
        "a digit of gelu's second derivative",
        STEP1,
        "u1 = 0.7978845608028654 * (1 + 0.134145 * x * x)",
        "u1 = 0.7978845608028654 * (1 + 0.044715 * x * x)",
        f"{SECOND1}[gelu-cpu]",
    ),
    Fault(
        "curvature-overflows",
        "gelu's second derivative is NaN far out",
        STEP1,
        "    x = x.clamp(-16, 16)\n",
        "",
        f"{GRADIENTS1}::test_second_gradients_far_out_are_0[tanh]",
    ),
    Fault(
        "second-gradient-in-half",
        "second gradients of half types are computed in the half type",
        STEP1,
        "    total = wide(x) + wide(bias)\n",
        "    total = x + bias\n",
        f"{SECOND_HALF1}[bias_gelu-torch.bfloat16-cpu]",
    ),
    Fault(
        "second-gradient-at-another-p",
        "dropout's second gradient drops 3 of 10, whatever p was",
        STEP1,
        "_ops.bias_dropout_residual_backward(weight, ctx.dropout_p, ctx.saved_tensors[0])[0], None, None",
        "_ops.bias_dropout_residual_backward(weight, 0.3, ctx.saved_tensors[0])[0], None, None",
        f"{SECOND1}[bias_dropout_residual-cpu]",
    ),
    Fault(
        "second-gradient-of-the-bias-lost",
        "what reaches the bias's gradient is lost",
        STEP1,
        "    weight = to_grad_x + to_grad_bias\n",
        "    weight = to_grad_x\n",
        f"{SECOND1}[bias_dropout_residual-cpu]",
    ),
    Fault(
        "second-gradient-cut-3",
        "the second gradient of fused attention takes its log-sum-exp for a constant",
        STEP3,
        "rows = _heads(grad, heads), q, k, v, _heads(attended, heads), lse",
        "rows = _heads(grad, heads), q, k, v, _heads(attended, heads), lse.detach()",
        f"{AUTOGRAD3}::test_second_gradients_are_as_exact_as_the_dtype_allows[attention_block-torch.float32-cpu]",
    ),
    # ---- the functions ----
    Fault(
        "mask-accepted",
        "`attn_mask` is ignored without a word",
        STEP2,
        "    if attn_mask is not None:\n",
        "    if False:\n",
        f"{REFUSALS2}::test_attention_refuses[cpu]",
    ),
    Fault(
        "scale-not-passed-on",
        "`attention` computes with its default scale",
        STEP2,
        '"dropout_p": dropout_p, "rung": rung}\n    out, lse = _ops.attention(',
        '"dropout_p": dropout_p, "rung": rung} | {"scale": None}\n    out, lse = _ops.attention(',
        f"{TEST2}::test_scale_defaults_to_one_over_the_root_of_head_dim[cpu-cpu]",
    ),
    Fault(
        "rung-not-passed-on",
        "`softmax` runs by auto, whatever rung is asked",
        STEP2,
        "return _ops.softmax(x, scale=scale, causal=causal, rung=rung)",
        "return _ops.softmax(x, scale=scale, causal=causal)",
        f"{SOFTMAX2}::test_softmax_of_any_shape[(7,)-cpu-v1_naive]",
    ),
    Fault(
        "softmax-gradient-unscaled",
        "the gradient of `softmax` is not multiplied by `scale`",
        STEP2,
        "_ops.softmax_backward(grad, ctx.saved_tensors[0], scale=ctx.scale, causal=ctx.causal)",
        "_ops.softmax_backward(grad, ctx.saved_tensors[0], causal=ctx.causal)",
        f"{SOFTMAX2}::test_gradient_of_softmax[(2, 3, 5)--0.7-True-cpu-cpu]",
    ),
    Fault(
        "softmax-gradient-unmasked",
        "the gradient of a hidden column reaches those that are seen",
        STEP2,
        "_ops.softmax_backward(grad, ctx.saved_tensors[0], scale=ctx.scale, causal=ctx.causal)",
        "_ops.softmax_backward(grad, ctx.saved_tensors[0], scale=ctx.scale)",
        f"{SOFTMAX2}::test_what_is_hidden_has_no_gradient_and_takes_none[torch.float32-cpu]",
    ),
    Fault(
        "softmax-gradient-of-pytorch",
        "the gradient of `softmax` is PyTorch's, not this step's kernel",
        STEP2,
        "_ops.softmax_backward(grad, ctx.saved_tensors[0], scale=ctx.scale, causal=ctx.causal)",
        "(ctx.scale or 1) * torch.ops.aten._softmax_backward_data(grad, ctx.saved_tensors[0], -1, grad.dtype)",
        f"{BACKWARD2}::test_the_gradient_of_softmax_is_this_op[full-torch.float32-cpu]",
    ),
    Fault(
        "second-gradient-of-what-is-hidden",
        "what is hidden takes part in the gradients of the gradient of `softmax`",
        STEP2,
        "(t.tril(t.size(-1) - t.size(-2)) for t in (grad_grad, grad, y))",
        "(t.tril(t.size(-1)) for t in (grad_grad, grad, y))",
        f"{BACKWARD2}::test_what_is_hidden_takes_no_gradient_of_the_gradient[torch.float32-cpu]",
    ),
    Fault(
        "second-gradient-without-the-sum",
        "the gradient of the gradient of `softmax` forgets that y stands in the sum",
        STEP2,
        " - grad * (y * grad_grad).sum(-1, keepdim=True)",
        "",
        f"{BACKWARD2}::test_gradients_of_the_gradient[(2, 3, 5)-None-False-cpu-cpu]",
    ),
    Fault(
        "softmax-second-gradient-in-half",
        "the gradient of the gradient of `softmax` is computed in the half type",
        STEP2,
        "dtype, grad_grad, grad, y = y.dtype, *map(wide, (grad_grad, grad, y))",
        "dtype = y.dtype",
        f"{BACKWARD2}::test_second_gradients_are_as_exact_as_the_dtype_allows[torch.bfloat16-cpu]",
    ),
    Fault(
        "no-heads-no-second-gradient",
        "where there is no head, the gradient of the gradient of `attention` divides by 0",
        STEP2,
        "group = q.size(1) // kv_heads if kv_heads else 1",
        "group = q.size(1) // kv_heads",
        f"{TEST2}::test_empty_tensors_have_empty_gradients[cpu]",
    ),
    Fault(
        "milliseconds-in-millionths",
        "the benchmark without a build gives its times in microseconds",
        "step2-attention/pages/cpu_kernels.py",
        "timer.median * 1e3, error",
        "timer.median * 1e6, error",
        "step2-attention/tests/test_cpu_kernels.py::test_times_are_milliseconds",
    ),
    Fault(
        "position-not-passed-on",
        "`embedding` counts positions from 0",
        STEP4,
        "return _ops.embedding(ids, token_weight, position_weight, position=position, rung=rung)",
        "return _ops.embedding(ids, token_weight, position_weight, rung=rung)",
        f"{EMBEDDING4}::test_embedding_adds_the_token_and_its_position[2-31-64-torch.float32-cpu-cpu]",
    ),
    Fault(
        "rungs-of-the-cpu",
        "`rungs` names the CPU's for a GPU too",
        STEP1,
        'return _C.rungs(op, torch.device(device).type == "cuda")',
        "return _C.rungs(op, False)",
        f"{REFUSALS1}::test_rungs_refuses_an_unknown_op",
    ),
    # ---- figures measured again ----
    Fault(
        "slower-kept",
        "recheck --best keeps the slower of two times",
        "common/kernel_fusion/bench/recheck.py",
        'pair.again < pair.row["ms"]',
        'pair.again > pair.row["ms"]',
        f"{RECHECK}::test_the_best_of_torch_compile_is_kept",
    ),
    Fault(
        "all-peers-kept",
        "recheck --best changes the times of peers that do not tune",
        "common/kernel_fusion/bench/recheck.py",
        'if pair.row["impl"] == COMPILED and pair.quartiles',
        "if pair.quartiles",
        f"{RECHECK}::test_the_best_of_torch_compile_is_kept",
    ),
    Fault(
        "compiled-beside-others",
        "torch.compile is measured in the process of the other peers",
        "common/kernel_fusion/bench/recheck.py",
        'alone = row["impl"] == COMPILED',
        "alone = False",
        f"{RECHECK}::test_a_process_measures_a_case_and_torch_compile_has_one_of_its_own",
    ),
    Fault(
        "no-quartiles-no-time",
        "a row without quartiles counts as if it had taken no time",
        "common/kernel_fusion/report/results.py",
        'or (row["ms"], row["ms"])',
        'or (0.0, row["ms"])',
        "common/kernel_fusion/tests/test_results.py::test_a_row_without_quartiles_counts_as_one_repeat",
    ),
    # ---- results, row by row ----
    Fault(
        "run-of-a-row-lost",
        "a row measured later than its op's others does not say so",
        "common/kernel_fusion/bench/benchmarks.py",
        'else {**row, "run": run}',
        "else row",
        f"{BENCHMARKS}::test_merging_a_rung_changes_its_row_and_no_other",
    ),
    Fault(
        "merged-by-op",
        "merging a rung drops the op's other rows",
        "common/kernel_fusion/bench/benchmarks.py",
        'if row["kind"] == "rung" else results.case_key(row) in cases',
        'and row["kind"] == "peer"',
        f"{BENCHMARKS}::test_merging_a_rung_changes_its_row_and_no_other",
    ),
    Fault(
        "share-of-the-other-ceiling",
        "arithmetic is held against memory's ceiling",
        "common/kernel_fusion/report/results.py",
        "100 * rates[bound] / ceiling",
        '100 * rates["memory"] / ceiling',
        "common/kernel_fusion/tests/test_results.py::test_rates_follow_from_what_was_measured",
    ),
    Fault(
        "rows-that-move",
        "a new row stands before the one that it should follow",
        "common/kernel_fusion/report/results.py",
        "place = keys.index(one) + 1",
        "place = keys.index(one)",
        "common/kernel_fusion/tests/test_results.py::test_what_is_in_a_file_keeps_its_place",
    ),
    Fault(
        "names-over-bars",
        "a plot's names begin where they should end",
        "common/kernel_fusion/report/svg.py",
        "x += part * self",
        "x += 0 * self",
        "common/kernel_fusion/tests/test_plots.py::test_what_is_drawn_stands_where_it_should",
    ),
    # ---- peers, and the rules that a lesson shows ----
    Fault(
        "peers-must-refuse-as-rungs-do",
        "a peer that cannot be imported ends the benchmark",
        "common/kernel_fusion/bench/benchmarks.py",
        '"peer": Exception}',
        '"peer": (ValueError, RuntimeError)}',
        f"{BENCHMARKS}::test_a_peer_that_raises_has_no_row_and_its_reason_is_said",
    ),
    Fault(
        "fragment-b-exchanged",
        "the lesson exchanges the two registers of operand b",
        "step2-attention/lesson.py",
        "return (2 * t + 8 * i, g), (2 * t + 8 * i + 1, g)",
        "return (2 * t + 8 * (1 - i), g), (2 * t + 8 * (1 - i) + 1, g)",
        f"{LESSON2}::test_fragments_of_operands_are_what_ldmatrix_loads",
    ),
    Fault(
        "swizzle-of-short-rows",
        "the lesson turns rows of 64 bytes as those of 128",
        "step2-attention/lesson.py",
        "row // 2 % 4",
        "row % 4",
        f"{LESSON2}::test_offsets_are_those_of_v5[32]",
    ),
    Fault(
        "stage-taken-too-early",
        "the lesson's copies start while their stage is still computed on",
        "step2-attention/lesson.py",
        "start = times[tile - stages][3] if tile >= stages",
        "start = times[tile - stages][2] if tile >= stages",
        f"{LESSON2}::test_copies_wait_for_their_stages_and_computing_for_its_copy",
    ),
    Fault(
        "half-is-dropped-by-default",
        "a half is dropped where p is not given, not a tenth",
        STEP1,
        "dropout_p: float = 0.1,",
        "dropout_p: float = 0.5,",
        f"{DROPOUT1}::test_a_tenth_is_dropped_where_p_is_not_given[cpu]",
    ),
    Fault(
        "second-gradient-rounded-before-its-sum",
        "the second gradient of a bias is a sum of rounded numbers",
        STEP1,
        "to_bias = to_x.reshape(-1, bias.numel()).sum(0)",
        "to_bias = wide(to_x.to(x.dtype)).reshape(-1, bias.numel()).sum(0)",
        f"{GRADIENTS1}::test_the_second_gradient_of_a_bias_is_rounded_once[torch.bfloat16]",
    ),
]
