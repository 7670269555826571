"""The checks that all rungs and ops are held against: what they would no longer see."""

from kernel_fusion.checks.faults import Fault

CONTRACT = "common/kernel_fusion/testing/contract.py"
DEVICES = "common/kernel_fusion/testing/devices.py"
GRADIENTS = "common/kernel_fusion/testing/gradients.py"
HELPERS = "common/kernel_fusion/testing/helpers.py"
MEMORY = "common/kernel_fusion/testing/memory.py"
REGISTRATION = "common/kernel_fusion/testing/registration.py"
ACCURACY = "common/kernel_fusion/testing/accuracy.py"
TESTS = "common/kernel_fusion/tests/test_testing.py"
OP_CHECKS = "common/kernel_fusion/tests/test_op_checks.py"
RESULTS = "common/kernel_fusion/tests/test_results.py"
CLAIMS = "common/kernel_fusion/tests/test_claims.py"
REJECTED = f"{TESTS}::test_a_wrong_rung_is_rejected"
ALONE = f"{TESTS}::test_a_rung_that_is_wrong_for_one_tensors_layout_alone_is_rejected"

FAULTS = [
    Fault(
        "guards-not-looked-at",
        "what was written beside an output",
        CONTRACT,
        "            if outside:\n",
        "            if False:\n",
        f"{REJECTED}[past_the_end-4 bytes outside `out` were written]",
    ),
    Fault(
        "unwritten-not-looked-at",
        "what was never written, by that name",
        CONTRACT,
        "            if unwritten.any():\n",
        "            if False:\n",
        f"{REJECTED}[leaves_last-1 of 165 elements of `out`, the first at (4, 32), were never written]",
    ),
    Fault(
        "nan-is-no-error",
        "NaN in a result",
        ACCURACY,
        "torch.nan_to_num(error, nan=torch.inf, posinf=torch.inf)",
        "torch.nan_to_num(error, nan=0.0, posinf=torch.inf)",
        f"{TESTS}::test_max_error_takes_nan_and_a_wrong_infinity_as_infinitely_wrong",
    ),
    Fault(
        "twenty-times-eager",
        "errors up to twenty times those of eager PyTorch",
        ACCURACY,
        "FACTOR = 2.0",
        "FACTOR = 20.0",
        f"{TESTS}::test_an_eager_version_that_overflows_allows_no_more",
    ),
    Fault(
        "small-results-by-large-ones",
        "small results that are wrong beside large ones",
        ACCURACY,
        "return (8 * among + 1e-5 * own + float64_itself).clamp_(max=largest)[octave]",
        "return torch.full_like(reference, largest)",
        f"{TESTS}::test_a_tail_that_is_cut_off_is_found",
    ),
    Fault(
        "rounded-intermediates-allowed",
        "an intermediate that was rounded",
        CONTRACT,
        "            if int(wrong.sum()) > allowed:\n",
        "            if False:\n",
        f"{TESTS}::test_an_intermediate_that_was_rounded_is_found_unless_the_table_says_so",
    ),
    Fault(
        "inputs-not-looked-at",
        "inputs that were written to",
        CONTRACT,
        "            if not torch.equal(storage(tensor), untouched[name]):\n",
        "            if False:\n",
        f"{REJECTED}[modifies_beside_input-was modified]",
    ),
    Fault(
        "backend-not-looked-at",
        "work done by another backend than the tensors' device calls for",
        CONTRACT,
        "if set(ran) != {self.backend} and not (empty and not ran):",
        "if False:",
        f"{REJECTED}[wrong_backend-must run on the backend 'emulated']",
    ),
    Fault(
        "memory-not-poisoned",
        "scratch memory that is read before it is written",
        ACCURACY,
        "settings.fill_uninitialized_memory = True",
        "settings.fill_uninitialized_memory = False",
        f"{REJECTED}"
        "[scratch_not_written-1 of 165 elements of `out`, the first at (0, 3), are wrong: it is nan, must be]",
    ),
    Fault(
        "same-order-twice",
        "what depends on the order of a block's threads",
        MEMORY,
        '"KF_SIMT_SCHEDULE": order,',
        '"KF_SIMT_SCHEDULE": "forward",',
        f"{REJECTED}[missing_barrier-two runs: 1 of 165 elements of `out`, the first at (0, 0), differ: ]",
    ),
    Fault(
        "same-threads-twice",
        "what depends on the number of threads",
        MEMORY,
        "torch.set_num_threads(1 if threads > 1 else 2)",
        "torch.set_num_threads(threads)",
        f"{REJECTED}[threads_count-two runs]",
    ),
    Fault(
        "memory-of-the-call-before",
        "what a rung keeps of an earlier call",
        CONTRACT,
        '    if alone or subject.backend == "cpu":\n',
        "    if False:\n",
        f"{TESTS}::test_what_a_rung_keeps_of_an_earlier_call_is_found",
    ),
    Fault(
        "aliases-not-looked-at",
        "an output that is an input",
        CONTRACT,
        "        if out.untyped_storage().data_ptr() in seen:\n",
        "        if False:\n",
        f"{REJECTED}[returns_its_input-shares memory with an input]",
    ),
    Fault(
        "rung-before-not-looked-at",
        "a rung before that gives something else",
        CONTRACT,
        "earlier = names[: names.index(subject.rung)] if subject.rung in names else []",
        "earlier = []",
        f"{TESTS}::test_a_rung_before_that_is_wrong_is_rejected",
    ),
    Fault(
        "always-aligned",
        "rungs that need aligned tensors",
        MEMORY,
        'LAYOUTS = ("unaligned", "rows apart", "every second element")',
        'LAYOUTS = ("rows apart", "every second element")',
        f"{REJECTED}[needs_alignment-inputs laid out 'unaligned']",
    ),
    Fault(
        "never-alone",
        "one tensor's place or strides taken for another's",
        CONTRACT,
        "    if alone:\n        for index",
        "    if False:\n        for index",
        f"{ALONE}[sum-forgets_to_align_y-`y` alone laid out 'unaligned']",
    ),
    Fault(
        "outputs-always-aligned",
        "an output that must be aligned",
        CONTRACT,
        "got = subject.into(placed, composed, unaligned=(name,))",
        "got = subject.into(placed, composed)",
        f"{ALONE}[double-out_needs_alignment-`out` alone laid out 'unaligned']",
    ),
    Fault(
        "overlap-not-looked-at",
        "an output that lies over an input and is taken",
        CONTRACT,
        "                if refused != overlap:\n",
        "                if refused and not overlap:\n",
        f"{OP_CHECKS}::test_an_op_that_takes_or_refuses_the_wrong_output_is_rejected",
    ),
    Fault(
        "neighbours-not-looked-at",
        "an output that only touches an input and is refused",
        CONTRACT,
        "                if refused != overlap:\n",
        "                if overlap and not refused:\n",
        f"{OP_CHECKS}::test_an_op_that_takes_or_refuses_the_wrong_output_is_rejected",
    ),
    Fault(
        "gradient-alone-not-looked-at",
        "a gradient that depends on what else requires one",
        GRADIENTS,
        "        (alone,) = gradients([index])\n",
        "        alone = beside_others\n",
        f"{OP_CHECKS}::test_a_gradient_that_depends_on_what_else_requires_one_is_rejected",
    ),
    Fault(
        "second-gradients-not-looked-at",
        "a wrong second gradient",
        GRADIENTS,
        '        if not error <= allowed:\n            raise AssertionError(f"the second gradient',
        '        if False:\n            raise AssertionError(f"the second gradient',
        f"{OP_CHECKS}::test_a_wrong_second_gradient_is_rejected",
    ),
    Fault(
        "second-gradients-may-be-nan",
        "a second gradient that is NaN",
        GRADIENTS,
        '        if not error <= allowed:\n            raise AssertionError(f"the second gradient',
        '        if error > allowed:\n            raise AssertionError(f"the second gradient',
        f"{OP_CHECKS}::test_a_wrong_second_gradient_is_rejected[nan-torch.float32]",
    ),
    Fault(
        "words-not-looked-at",
        "an error whose text is another",
        HELPERS,
        "missing = [fragment for fragment in fragments if fragment not in str(caught.value)]",
        "missing = []",
        f"{TESTS}::test_raises_wants_every_fragment",
    ),
    Fault(
        "skipped-without-a-gpu",
        "a GPU that was asked for by name and is missing",
        DEVICES,
        'return [] if os.environ.get("KF_TEST_DEVICES") == "cuda" else [pytest.mark.skip(reason=reason)]',
        "return [pytest.mark.skip(reason=reason)]",
        f"{TESTS}::test_a_gpu_asked_for_by_name_is_never_skipped",
    ),
    Fault(
        "a-newer-rung-not-looked-at",
        "a rung that `auto` prefers and that only another GPU's results have",
        REGISTRATION,
        "if key not in by_key or is_measured(case) and not is_measured(by_key[key]):",
        "if key not in by_key:",
        f"{RESULTS}::test_a_rung_newer_than_the_h200s_figures_is_held_against_another_gpus",
    ),
    Fault(
        "a-claim-that-one-gpu-bears-out",
        "a claim that does not hold on the second GPU",
        "common/kernel_fusion/report/claims.py",
        "for cases in gpus:",
        "for cases in gpus[-1:]:",
        f"{CLAIMS}::test_a_claim_must_hold_on_every_gpu",
    ),
    Fault(
        "a-claim-about-nothing",
        "a claim about a rung that no GPU has run",
        "common/kernel_fusion/report/claims.py",
        "if len(not_measured) == len(gpus) > 0:",
        "if len(not_measured) > len(gpus) > 0:",
        f"{CLAIMS}::test_a_claim_that_no_gpu_can_tell_is_an_error",
    ),
    Fault(
        "versions-of-inputs-not-looked-at",
        "a version counter that rises without a write",
        REGISTRATION,
        "if value._version != (n in written)]",
        "if value._version < (n in written)]",
        f"{OP_CHECKS}::test_an_op_that_writes_in_silence_is_rejected",
    ),
]
