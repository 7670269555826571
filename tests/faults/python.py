"""What each op is to torch: its function, its shapes without data, its dropout. Gradients are in gradients.py."""

from kernel_fusion.checks.faults import Fault

SHARED = "common/kernel_fusion/ops.py"
STEP1 = "step1-simple/step1_simple/__init__.py"
STEP2 = "step2-attention/step2_attention/__init__.py"
STEP4 = "step4-integration/step4_integration/__init__.py"
TEST2 = "step2-attention/test_attention.py"
SOFTMAX2 = "step2-attention/tests/test_softmax.py"
BACKWARD2 = "step2-attention/tests/test_softmax_backward.py"
STRIDES = "torch.empty_like(x, memory_format=torch.contiguous_format)"
DROPOUT1 = "step1-simple/tests/test_dropout.py"
REFUSALS1 = "step1-simple/tests/test_refusals.py"
REGISTRATION1 = "step1-simple/tests/test_registration.py"
AUTOGRAD2 = "step2-attention/tests/test_attention_autograd.py"
REFUSALS2 = "step2-attention/tests/test_attention_refusals.py"
AUTOGRAD3 = "step3-fused/tests/test_autograd.py"
REFUSALS3 = "step3-fused/tests/test_refusals.py"
EMBEDDING4 = "step4-integration/tests/test_embedding.py"
TRANSPOSED1 = f"{REGISTRATION1}::test_ops_on_transposed_tensors_are_registered_as_torch_wants_it"
TRANSPOSED3 = f"{AUTOGRAD3}::test_an_op_on_transposed_tensors_is_registered_as_torch_wants_it"

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
]
