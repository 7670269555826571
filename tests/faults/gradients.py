"""Gradients, and gradients of gradients, in Python."""

from kernel_fusion.checks.faults import Fault

SHARED = "common/kernel_fusion/ops.py"
STEP1 = "step1-simple/step1_simple/__init__.py"
STEP2 = "step2-attention/step2_attention/__init__.py"
NORM3 = "step3-fused/step3_fused/layer_norm_ops.py"
ATTENTION3 = "step3-fused/step3_fused/attention_ops.py"
SHARED3 = "step3-fused/step3_fused/shared.py"
STEP4 = "step4-integration/step4_integration/__init__.py"
TEST3 = "step3-fused/test_fused.py"
FRONT3 = "step3-fused/tests/test_front.py"
GRADIENTS1 = "step1-simple/tests/test_gradients.py"
AUTOGRAD2 = "step2-attention/tests/test_attention_autograd.py"
AUTOGRAD3 = "step3-fused/tests/test_autograd.py"
MEMORY3 = "step3-fused/tests/test_memory.py"
EMBEDDING4 = "step4-integration/tests/test_embedding.py"
KV_APPEND4 = "step4-integration/tests/test_kv_append.py"
DIFFERENCES1 = f"{GRADIENTS1}::test_gradients_are_those_of_finite_differences"
SECOND1 = f"{GRADIENTS1}::test_second_gradients_are_those_of_finite_differences"
SECOND_HALF1 = f"{GRADIENTS1}::test_second_gradients_are_as_exact_as_the_dtype_allows"
ALONE = "test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others"
ATTENTION2 = f"{AUTOGRAD2}::test_gradient_of_attention"
FORMULA3 = f"{AUTOGRAD3}::test_gradients_are_those_of_the_formula"
EMBEDDING = f"{EMBEDDING4}::test_gradient_of_embedding[torch.int64-cpu-cpu]"

FAULTS = [
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
        NORM3,
        "    return shared.gradients_of_rows(ctx, ctx.saved_tensors, grad, None, grad_mean, grad_rstd)\n",
        "    grads = shared.gradients_of_rows(ctx, ctx.saved_tensors, grad, None, grad_mean, grad_rstd)\n"
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
        ATTENTION3,
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
        ATTENTION3,
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
        SHARED3,
        "        grad = (grad_mean / width).unsqueeze(-1)\n",
        "        grad = 0 * (grad_mean / width).unsqueeze(-1)\n",
        "step3-fused/tests/test_layer_norm_backward.py::test_mean_and_rstd_have_gradients_too[layer_norm-cpu]",
    ),
    Fault(
        "gradient-of-the-sum-lost",
        "the gradient that reaches `sum` is lost",
        SHARED3,
        "_ops.layer_norm_backward(grad, x, weight, mean, rstd, grad_sum)\n        if",
        "_ops.layer_norm_backward(grad, x, weight, mean, rstd, None)\n        if",
        f"{FORMULA3}[residual_layer_norm-cpu]",
    ),
    Fault(
        "statistics-not-kept",
        "`layer_norm` keeps mean and rstd only where the caller asks for them, not where a gradient will",
        NORM3,
        "return_statistics or needs_gradients(x, weight, bias)",
        "return_statistics",
        f"{MEMORY3}::test_statistics_are_kept_where_a_gradient_is_wanted[layer_norm-cpu]",
    ),
    Fault(
        "nothing-saved-as-statistics",
        "`layer_norm`'s backward pass takes what was not kept for mean and rstd",
        NORM3,
        "*(output[1:] if keep else ())",
        "*output[1:]",
        f"{MEMORY3}::test_statistics_that_nobody_wants_are_not_written[24-layer_norm-cpu-cpu]",
    ),
    Fault(
        "residual-dropped",
        "the residual's gradient is dropped as that of x is",
        NORM3,
        "return grad_x, grad_total, *rest,",
        "return grad_x, grad_x, *rest,",
        f"{FRONT3}::test_the_backward_sees_the_mask_of_its_forward[cpu]",
    ),
    Fault(
        "drops-in-evaluation",
        "`training=False` does not switch off dropout in front of a residual",
        SHARED3,
        "    if not training:\n        dropout_p = 0.0\n",
        "",
        f"{FRONT3}::test_without_a_front_nothing_has_changed[cpu-cpu]",
    ),
    Fault(
        "projection-not-turned",
        "the projection's gradient goes back through the matrix, not its transpose",
        ATTENTION3,
        "linear_backward(grad_projected, attended, proj_weight)",
        "linear_backward(grad_projected, attended, proj_weight.mT)",
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
        ATTENTION3,
        "rows = _heads(grad, heads), q, k, v, _heads(attended, heads), lse",
        "rows = _heads(grad, heads), q, k, v, _heads(attended, heads), lse.detach()",
        f"{AUTOGRAD3}::test_second_gradients_are_as_exact_as_the_dtype_allows[attention_block-torch.float32-cpu]",
    ),
]


OPS1, OPS2, NORM_OPS3, ATTENTION_OPS3, SHARED3, LINEAR_OPS3, LAYERS = (
    "step1-simple/step1_simple/__init__.py",
    "step2-attention/step2_attention/__init__.py",
    "step3-fused/step3_fused/layer_norm_ops.py",
    "step3-fused/step3_fused/attention_ops.py",
    "step3-fused/step3_fused/shared.py",
    "step3-fused/step3_fused/linear_ops.py",
    "common/kernel_fusion/layers.py",
)


def together(*ops):
    return tuple(f"tests/test_gradients.py::test_outputs_used_together[{op}]" for op in ops)


OUTPUTS_ALONE = [
    Fault(
        f"lost-together-{test[:-1].split('.')[-1]}",
        "a gradient is lost where another output is used too",
        file,
        old,
        new,
        test,
        tuple(more),
    )
    for file, old, new, test, *more in (
        (
            OPS1,
            "weight = wide(to_grad_x) + wide(to_grad_bias)",
            "weight = wide(to_grad_x) if to_grad_x.any() else wide(to_grad_bias)",
            *together("step1_simple.bias_gelu_backward"),
        ),
        (
            OPS1,
            "weight = to_grad_x + to_grad_bias",
            "weight = to_grad_x if to_grad_x.any() else to_grad_bias",
            *together("step1_simple.bias_dropout_residual_backward"),
        ),
        (
            OPS2,
            "given = (grad, q, k, v, out, lse, key_begin, key_end, grad_lse, rng_state)",
            "given = (grad, q, k, v, out, lse, key_begin, key_end, None if grad.any() else grad_lse, rng_state)",
            *together("step2_attention.attention"),
        ),
        (
            OPS2,
            "by_weight = by_grad_score * grad_weight + grad @ by_dv.mT",
            "by_weight = by_grad_score * grad_weight if by_dq.any() else grad @ by_dv.mT",
            *together("step2_attention.attention_backward"),
        ),
        (
            SHARED3,
            "        if grad_mean is not None or grad_rstd is not None:",
            "        if not grad.any() and (grad_mean is not None or grad_rstd is not None):",
            *together("step3_fused.layer_norm"),
        ),
        (
            NORM_OPS3,
            "found = torch.autograd.grad(outputs, variables, [wide(t) for t in grads])",
            "found = torch.autograd.grad(\n"
            "        outputs, variables, [wide(t) * (not grads[0].any() or t is grads[0]) for t in grads]\n    )",
            *together("step3_fused.layer_norm_backward"),
        ),
        (
            NORM_OPS3,
            "rows, grad_y, grad_sum, grad_mean, grad_rstd)\n    grad_x,",
            "rows, grad_y, grad_sum if grad_mean is None else None, grad_mean, grad_rstd)\n    grad_x,",
            *together("step3_fused.residual_layer_norm"),
        ),
        (
            ATTENTION_OPS3,
            "        grad = grad + given\n",
            "        grad = given\n",
            *together("step3_fused.attention_residual_layer_norm", "step3_fused.attention_block"),
        ),
        (
            LAYERS,
            "[wide(g) for g in grads], allow_unused=True)",
            "[wide(g) * (not grads[0].any() or g is grads[0]) for g in grads], allow_unused=True)",
            *together(
                "step2_attention.linear_backward",
                "step3_fused.linear_gelu_backward",
                "step3_fused.gelu_linear_backward",
                "step3_fused.linear_bias_dropout_residual_backward",
            ),
        ),
        (
            LINEAR_OPS3,
            "grads = more if grads is None else [a + b for a, b in zip(grads, more, strict=True)]",
            "grads = more if grads is None else grads",
            *together("step3_fused.linear_gelu"),
        ),
        (
            LINEAR_OPS3,
            "grad_inner = through if grad_inner is None else through + grad_inner",
            "grad_inner = through",
            *together("step3_fused.mlp"),
        ),
    )
]
