"""Training of step 3's ops that begin with attention: padding, dropout, what is kept, and the way back."""

from kernel_fusion.checks.faults import Fault

PYTHON = "step3-fused/step3_fused/attention_ops.py"
HOST = "step3-fused/fused_host.cpp"
PLAIN = "step3-fused/cpu/fused_cpu.cpp"
HEADERS = "step3-fused/include/step3"
DATAFLOW = "step3-fused/kernels/attention_block"
TESTS = "step3-fused/tests/test_attention_training.py"
TRAINING_GRADIENTS3 = "step3-fused/tests/test_attention_training_gradients.py"
MEMORY3 = "step3-fused/tests/test_memory.py"

FORMULA = f"{TRAINING_GRADIENTS3}::test_gradients_are_those_of_the_formula[full-attention_block-cpu]"


def padded(rung: str, dropout: str = "both", dtype: str = "float32") -> str:
    return f"{TESTS}::test_with_padding[causal-{dropout}-torch.{dtype}-attention_block-cpu-{rung}]"


def any_padding(rung: str, side: str, dtype: str = "float32") -> str:
    return f"{TESTS}::test_any_padding[{side}-full-torch.{dtype}-attention_block-cpu-{rung}]"


def mask(rung: str) -> str:
    return f"{TESTS}::test_the_projections_mask_is_that_of_step_1[attention_block-cpu-{rung}]"


PYTHON_FAULTS = [
    Fault(
        "statistics-again-by-the-default-eps",
        "where mean and rstd are not kept they are computed again with the default eps",
        "step3-fused/step3_fused/shared.py",
        "statistics or _ops.layer_norm(x, weight, weight, eps=ctx.eps)[1:]",
        "statistics or _ops.layer_norm(x, weight, weight)[1:]",
        f"{TRAINING_GRADIENTS3}::test_without_what_is_kept_it_is_registered_as_well[attention_block]",
    ),
    Fault(
        "the-dropped-are-projected-back",
        "the projection's gradient is of all that came back, whatever dropout had dropped",
        PYTHON,
        "linear_backward(grad_projected, attended, proj_weight)",
        "linear_backward(grad_total, attended, proj_weight)",
        FORMULA,
    ),
    Fault(
        "weights-dropped-on-one-way-only",
        "the way back of fused attention drops no weights",
        PYTHON,
        '"dropout_p": options["attention_dropout_p"],\n    }',
        '"dropout_p": 0.0,\n    }',
        FORMULA,
    ),
    Fault(
        "states-change-places",
        "the way back drops of the projection by the state of attention's dropout",
        PYTHON,
        "bias_dropout_residual_backward(grad_total, ctx.dropout_p, rng_state)",
        "bias_dropout_residual_backward(grad_total, ctx.dropout_p, attention_rng_state)",
        FORMULA,
    ),
    Fault(
        "padding-comes-back",
        "the way back of fused attention takes padding for keys",
        PYTHON,
        "*rows, *bounds, grad_lse if ctx.keeps else None, rng_state, **ctx.attention",
        "*rows, None, None, grad_lse if ctx.keeps else None, rng_state, **ctx.attention",
        f"{TESTS}::test_what_padding_holds_has_no_influence[full-attention_block-cpu-cpu]",
    ),
    Fault(
        "who-used-attended-gets-nothing",
        "what comes back to attention's output from those who used it is lost",
        PYTHON,
        "    if given is not None and ctx.keeps:\n",
        "    if False:\n",
        FORMULA,
    ),
    Fault(
        "always-kept",
        "what the way back wants is kept where nobody needs a gradient",
        PYTHON,
        "keep = return_statistics or needs_gradients(*inputs)",
        "keep = return_statistics or True",
        f"{MEMORY3}::test_statistics_are_kept_where_a_gradient_is_wanted[attention_block-cpu]",
    ),
    Fault(
        "attentions-state-unchecked",
        "a state of another shape passes without data",
        PYTHON,
        '    rng.check(op, "dropout_p", dropout_p, rng_state, q)\n'
        '    rng.check(op, "attention_dropout_p", attention_dropout_p, attention_rng_state, q',
        '    rng.check(op, "dropout_p", dropout_p, rng_state, q)\n'
        '    rng.check(op, "attention_dropout_p", 0.0, None, q',
        f"{TESTS}::test_bad_options_are_refused_by_name[attention_block-meta]",
    ),
]

HOST_FAULTS = [
    Fault(
        "one-part-for-both",
        "attention's weights are dropped by the projection's part",
        HOST,
        'of_weights(op, "attention_dropout_p", attention_dropout_p,',
        'of_weights(op, "attention_dropout_p", dropout_p,',
        padded("v1_separate"),
    ),
    Fault(
        "an-unaligned-attended-is-lost",
        "attention's output that begins at no multiple of 16 bytes is not copied back",
        HOST,
        "{&to_y, &to_sum, &to_attended}",
        "{&to_y, &to_sum}",
        padded("v1_separate"),
    ),
]

PLAIN_FAULTS = [
    Fault(
        "lse-without-the-maximum",
        "the log-sum-exp is that of scores less their maximum",
        "step3-fused/cpu/cpu_loops.h",
        "lse[r] = most[r] + std::log(sum[r]);",
        "lse[r] = std::log(sum[r]);",
        padded("cpu", "none"),
    ),
    Fault(
        "padding-shifts-the-mask-of-fused-attention",
        "the mask begins with the first key that exists",
        PLAIN,
        "dropout_factors(a, head_of_all, first_row + r, begin, seen[r], factors.data());",
        "dropout_factors(a, head_of_all, first_row + r, 0, seen[r], factors.data());",
        padded("cpu"),
    ),
    Fault(
        "rows-of-a-tile-have-one-mask",
        "each row of a tile is dropped from as the tile's first",
        PLAIN,
        "row_numbers(after, first + r, numbers)",
        "row_numbers(after, first, numbers)",
        mask("cpu"),
    ),
]

FAULTS = [
    Fault(
        "padding-on-the-left-is-seen",
        "the fused rungs begin with the first key, whether it exists or not",
        f"{HEADERS}/attend.h",
        "for (int64_t first_key = seen.begin;",
        "for (int64_t first_key = 0;",
        any_padding("v2_fused", "left"),
    ),
    Fault(
        "lse-of-rows-that-do-not-exist",
        "rows past the last query write their log-sum-exp over the next head's",
        f"{HEADERS}/attend.h",
        "a.lse != nullptr && lane == 0 && query < a.q_length",
        "a.lse != nullptr && lane == 0",
        padded("v1_separate", "none"),
    ),
    Fault(
        "dropped-weights-do-not-count",
        "the weights that are left are divided by their own sum",
        f"{HEADERS}/attend.h",
        "weights[p * kKeys + lane] *= dropout.factor<C>(head_of_all, first_row + row + p, first_key + lane);",
        "const C kept = dropout.factor<C>(head_of_all, first_row + row + p, first_key + lane);\n"
        "        if (kept == C(0)) softmax[p].sum -= weights[p * kKeys + lane];\n"
        "        weights[p * kKeys + lane] *= kept;",
        padded("v2_fused", "attention_dropout_p"),
    ),
    Fault(
        "a-tile-has-the-mask-of-the-first",
        "each tile of rows is dropped from as the first",
        f"{HEADERS}/tile.h",
        "front.apply(start + c, c, value);",
        "front.apply(r * width + c, c, value);",
        mask("v2_fused"),
    ),
    Fault(
        "statistics-of-the-first-tile",
        "each tile of rows keeps its statistics where the first does",
        f"{HEADERS}/tile.h",
        "kept.keep(first + r, s);",
        "kept.keep(r, s);",
        padded("v2_fused", "none"),
    ),
    Fault(
        "best-takes-padding-for-keys",
        "the best separate launches: no key is padding behind the last",
        f"{HEADERS}/step2_attention.h",
        "args.key_begin = a.key_begin, args.key_end = a.key_end;",
        "args.key_begin = a.key_begin;",
        any_padding("pieces", "right"),
    ),
    Fault(
        "dataflow-begins-with-padding",
        "one launch: tiles of keys are counted from the first key, whether it exists or not",
        f"{DATAFLOW}/attend.h",
        "const int key = block.first_key + j * kKeys;",
        "const int key = j * kKeys;",
        any_padding("v4_dataflow", "left", "bfloat16"),
    ),
    Fault(
        "dataflow-weighs-padding",
        "one launch: values that are padding stay as they are, with a weight of 0",
        f"{DATAFLOW}/attend.h",
        "if (last >= 0 && block.first_key + block.keys < a.k_length)",
        "if (last >= 0 && block.first_key + block.keys < 0)",
        f"{TESTS}::test_what_padding_holds_has_no_influence[full-attention_block-cpu-v4_dataflow]",
    ),
    Fault(
        "dataflow-drops-by-the-row-before",
        "one launch: of two rows of a lane the second is dropped from by the first one's numbers",
        f"{DATAFLOW}/project.h",
        "dropout.apply_aligned(element + half * 8 * width + (group + i) * 8, x);",
        "dropout.apply_aligned(element + (group + i) * 8, x);",
        mask("v4_dataflow"),
    ),
    Fault(
        "dataflow-keeps-statistics-in-one-place",
        "one launch: all rows keep their means in the same places",
        f"{DATAFLOW}/normalize.h",
        "norm.mean[first + r] = mean[r]",
        "norm.mean[r] = mean[r]",
        padded("v4_dataflow", "none", "bfloat16"),
    ),
    Fault(
        "queries-leave-before-all-have-come",
        "one launch: a warpgroup that sees no key lets its next queries come before its other warps have seen these",
        f"{DATAFLOW}/attend.h",
        "      named_barrier_sync(1 + warpgroup, kWarpgroupSize);\n      if (leader) mbarrier_arrive",
        "      if (leader) mbarrier_arrive",
        "step3-fused/tests/test_one_launch.py::test_queries_that_see_no_key_one_after_the_other",
    ),
]
