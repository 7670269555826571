"""Dropout of attention's weights in step 2: the mask, the kernels, and the way from Python to them."""

from kernel_fusion.checks.faults import Fault

FORWARD = "step2-attention/kernels/attention"
BACKWARD = "step2-attention/kernels/attention_backward"
HOST = "step2-attention/attention_host.cpp"
PLAIN_BACKWARD = "step2-attention/cpu/attention_backward_cpu.cpp"
PYTHON = "step2-attention/step2_attention/__init__.py"
TEST = "step2-attention/tests/test_dropout.py"
DROPPED = f"{TEST}::test_weights_are_dropped_as_step_1_would"
READ = f"{TEST}::test_the_mask_read_back"
GRADIENTS = f"{TEST}::test_gradients_with_the_same_mask"

FAULTS = [
    Fault(
        "number-of-another-key",
        "of a call's eight numbers the wrong one decides",
        f"{FORWARD}/dropout.h",
        "query / 8 % 2 + key / 8 % 4 * 2",
        "query / 8 % 2 * 4 + key / 8 % 4",
        f"{READ}[17-33-cpu-v1_naive]",
    ),
    Fault(
        "heads-with-one-mask",
        "all heads drop the same weights",
        f"{FORWARD}/dropout.h",
        "(head * row_pieces + query / 16)",
        "(query / 16)",
        f"{READ}[7-9-cpu-v1_naive]",
    ),
    Fault(
        "dropped-weights-left-out-of-the-sum",
        "what is dropped does not count in the softmax",
        f"{FORWARD}/v2_tiled.cu",
        "softmax.sum += score[j];  // of all weights, dropped ones too",
        "softmax.sum += score[j] * (kDropout ? dropout.factor<float>(head, query, first_key + key + j) : 1.0f);",
        f"{DROPPED}[full-torch.float32-cpu-v2_tiled]",
    ),
    Fault(
        "dropout-not-in-the-gradients-of-scores",
        "the gradient of a weight that was dropped is not 0",
        f"{BACKWARD}/v2_tiled.cu",
        "weight[j] * (factor * grad_score[j] - its_delta)",
        "weight[j] * (grad_score[j] - its_delta)",
        f"{GRADIENTS}[full-torch.float32-cpu-v2_tiled]",
    ),
    Fault(
        "mask-of-the-other-role",
        "who owns keys takes the weight of query j and key i for that of query i and key j",
        f"{BACKWARD}/v2_tiled.cu",
        "query = kOwnsKeys ? other : own, key = kOwnsKeys ? own : other;",
        "query = own, key = other;",
        f"{GRADIENTS}[full-torch.float32-cpu-v2_tiled]",
    ),
    Fault(
        "values-of-dropped-weights",
        "dv is the sum over all weights",
        f"{BACKWARD}/v1_naive.cu",
        "    weight *= factor;  // as v met it\n",
        "",
        f"{GRADIENTS}[full-torch.float64-cpu-v1_naive]",
    ),
]

SAME_PLACES = f"{TEST}::test_gradients_where_tiles_begin_with_pieces_of_the_mask"

TENSOR_CORES = [
    Fault(
        "mask-of-the-first-half-of-the-keys",
        "who owns keys takes the numbers of keys 0 to 15 of a piece for 16 to 31 as well",
        f"{FORWARD}/dropout.h",
        "if (kOwnsKeys && key % 32 >= 16)",
        "if (false)",
        f"{SAME_PLACES}[full-cpu-v3_mma]",
    ),
    Fault(
        "rows-exchanged-in-the-mask",
        "a lane's two queries have each other's numbers",
        f"{FORWARD}/dropout.h",
        "const int r = kOwnsKeys ? j / 2 : j % 2, n = kOwnsKeys ? j % 2 : j / 2;",
        "const int r = kOwnsKeys ? j / 2 : 1 - j % 2, n = kOwnsKeys ? j % 2 : j / 2;",
        f"{READ}[64-256-cpu-v8_persistent]",
    ),
    Fault(
        "tiles-taken-for-pieces",
        "after padding on the left a tile's mask is read where it does not lie",
        f"{FORWARD}/dropout.h",
        "if ((column - in_eight) % kPiece != 0) {",
        "if (false) {",
        f"{DROPPED}[full-torch.bfloat16-cpu-v7_warpgroups]",
    ),
    Fault(
        "output-of-half-the-weights-too-small",
        "v8's output is not multiplied by one over the part that is kept",
        f"{FORWARD}/v8_persistent.cu",
        "kDropout ? dropout.scale() : 1.0f",
        "1.0f",
        f"{DROPPED}[full-torch.bfloat16-cpu-v8_persistent]",
    ),
    Fault(
        "dropped-weights-in-dv",
        "v6 and v7 multiply grad by weights that v never met",
        f"{BACKWARD}/five_products.h",
        "if constexpr (kDropout) attention::AttentionDropout::drop(weights, kept);",
        "",
        f"{SAME_PLACES}[causal-cpu-v7_turns]",
    ),
    Fault(
        "gradients-of-the-first-head-s-mask",
        "v6 and v7 take the first head's mask for all that share its keys",
        f"{BACKWARD}/five_products.h",
        "      const int64_t head = first_head + i;",
        "      const int64_t head = first_head;",
        f"{SAME_PLACES}[full-cpu-v6_atomics]",
    ),
]

PLAIN_FAULTS = [
    Fault(
        "row-of-the-neighbour-in-plain-c++",
        "queries i and i + 8 get each other's numbers",
        "step2-attention/include/step2/dropout_cpu.h",
        "query / 8 % 2 + j / 8 % 4 * 2",
        "1 - query / 8 % 2 + j / 8 % 4 * 2",
        f"{READ}[17-33-cpu-cpu]",
    ),
    Fault(
        "padding-shifts-the-mask-in-plain-c++",
        "the mask begins at the first key that exists",
        PLAIN_BACKWARD,
        "block.first + i, first + missing, see - missing, h.factors.data());",
        "block.first + i, first, see - missing, h.factors.data());",
        f"{GRADIENTS}[full-torch.float32-cpu-cpu]",
    ),
]

HOST_FAULTS = [
    Fault(
        "backward-without-dropout",
        "`attention_backward` checks its dropout and forgets it",
        HOST,
        "  dropout.fill(args);\n  args.dq",
        "  args.dq",
        f"{GRADIENTS}[full-torch.float32-cpu-v1_naive]",
    ),
    Fault(
        "dropout-without-a-state",
        "a mask is made of a state that nobody gave",
        HOST,
        "TORCH_CHECK_VALUE(threshold == 0 || rng_state, op,",
        "TORCH_CHECK_VALUE(true, op,",
        f"{TEST}::test_what_is_refused[cpu]",
    ),
]

PYTHON_FAULTS = [
    Fault(
        "autograd-forgets-dropout",
        "the backward that autograd calls knows nothing of dropout",
        PYTHON,
        'for name in ("causal", "scale", "dropout_p")}',
        'for name in ("causal", "scale")}',
        f"{TEST}::test_backward_sees_the_mask_of_its_forward[cpu]",
    ),
    Fault(
        "attention-draws-without-dropout",
        "attention moves PyTorch's generator on where nothing is dropped",
        PYTHON,
        "if rng_state is None and rng.drops(dropout_p):",
        "if rng_state is None:",
        f"{TEST}::test_without_a_state_one_is_drawn_from_pytorchs_generator[cpu]",
    ),
    Fault(
        "second-gradients-without-the-mask",
        "gradients of gradients are computed as if nothing was dropped",
        PYTHON,
        "    if rng.drops(ctx.dropout_p):\n",
        "    if False:\n",
        f"{TEST}::test_gradients_of_gradients_are_refused[cpu]",
    ),
]
