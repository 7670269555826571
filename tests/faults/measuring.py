"""What measures and shows: figures, results, peers, and the rules that a lesson shows."""

from kernel_fusion.checks.faults import Fault

STEP1 = "step1-simple/step1_simple/__init__.py"
DROPOUT1 = "step1-simple/tests/test_dropout.py"
GRADIENTS1 = "step1-simple/tests/test_gradients.py"
LESSON2 = "step2-attention/tests/test_lesson.py"
BENCHMARKS = "common/kernel_fusion/tests/test_benchmarks.py"
MEASURING = "common/kernel_fusion/tests/test_measuring.py"
RECHECK = "common/kernel_fusion/tests/test_recheck.py"

FAULTS = [
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
        "common/kernel_fusion/bench/results_file.py",
        'else {**row, "run": run}',
        "else row",
        f"{BENCHMARKS}::test_merging_a_rung_changes_its_row_and_no_other",
    ),
    Fault(
        "merged-by-op",
        "merging a rung drops the op's other rows",
        "common/kernel_fusion/bench/results_file.py",
        "if results.is_ours(row) else results.case_key(row) in cases",
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
        "common/kernel_fusion/bench/measuring.py",
        '"peer": (Exception,)}',
        '"peer": (ValueError, RuntimeError)}',
        f"{MEASURING}::test_a_peer_that_raises_has_no_row_and_its_reason_is_said",
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
