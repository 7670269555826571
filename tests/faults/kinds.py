"""Faults that once survived, by kind: each at a place of every op that can have it.

A place is a file, what stands there, what is planted, and the tests that see it. Reads that nobody uses are volatile,
or the compiler would leave them out.
"""

from kernel_fusion.checks.faults import Fault, everywhere

STEP1, STEP2, STEP3, STEP4 = (
    f"{step}/kernels" for step in ("step1-simple", "step2-attention", "step3-fused", "step4-integration")
)
SOFTMAX2 = "step2-attention/tests/test_softmax.py"
ATTENTION2 = "step2-attention/test_attention.py"
ATTENTION_BACKWARD2 = "step2-attention/tests/test_attention_backward.py"
DECODE2 = "step2-attention/tests/test_decode.py"
FUSED3 = "step3-fused/test_fused.py"
LAYER_NORM_BACKWARD3 = "step3-fused/tests/test_layer_norm_backward.py"
LINEAR2 = "step2-attention/tests/test_linear.py"
EPILOGUES3 = "step3-fused/tests/test_epilogues.py"
ONE_LAUNCH3 = "step3-fused/tests/test_one_launch.py"
TILE, PIPELINE = "step2-attention/include/step2/hopper_tile.h", "step2-attention/include/step2/pipeline.h"
MMA = "step2-attention/include/step2/mma_product.h"
PRODUCTS = ("linear_gelu", "gelu_linear", "linear_bias_dropout_residual", "gelu_linear_backward")


LAUNCHES = everywhere(
    "no-wait",
    "a kernel that is launched while the one before runs does not wait for its end",
    (
        f"{STEP3}/layer_norm_backward/columns.h",
        "  if constexpr (kDependent) wait_on_dependent_grids();\n",
        "",
        f"{LAYER_NORM_BACKWARD3}::test_the_second_stage_waits_for_the_first[cuda]",
    ),
    (
        f"{STEP3}/mlp/v7_inner.cu",
        "  wait_on_dependent_grids();\n",
        "",
        f"{EPILOGUES3}::test_the_clusters_parts_are_added_when_all_are_there[cuda]",
    ),
)


REWRITE, REWRITE_TEST = "emulator/rewriter/rewrite.py", "emulator/tests/test_rewrite.py"


EMULATION = [
    Fault(
        "zero-within-an-argument",
        "a zero within an argument of a launch is made a null pointer",
        "emulator/rewriter/launches.py",
        "ZERO.fullmatch(tokens[k].text) and not depth:",
        "ZERO.fullmatch(tokens[k].text):",
        f"{REWRITE_TEST}::test_zeros_among_the_arguments_of_a_launch",
    ),
    Fault(
        "barriers-of-a-macro",
        "the second barrier of a macro is the first",
        REWRITE,
        "enumerate(called[1:], 1)",
        "enumerate(called[2:], 1)",
        f"{REWRITE_TEST}::test_the_barriers_of_a_macro_are_numbered",
    ),
    Fault(
        "casts-of-the-host",
        "the host's casts saturate as a GPU's do",
        REWRITE,
        "                if on_device:\n                    self.integer_cast(tokens, i)",
        "                self.integer_cast(tokens, i)",
        f"{REWRITE_TEST}::test_what_is_no_cast_to_an_integer_of_the_device_is_left_alone",
    ),
    Fault(
        "casts-to-named-types",
        "a cast to a type that the program names does not saturate",
        "emulator/rewriter/casts.py",
        "self.integers.add(name[0].text)",
        "pass",
        f"{REWRITE_TEST}::test_casts_to_integers_become_calls",
    ),
    Fault(
        "header-of-which-nothing-is-used",
        "`using namespace` counts as a use of a header that is not emulated",
        "emulator/rewriter/refusals.py",
        'using = before == "namespace" and i > 1 and tokens[i - 2].text == "using"',
        "using = False",
        "emulator/tests/test_refusals.py::test_a_header_of_which_nothing_is_used_is_no_harm",
    ),
]
