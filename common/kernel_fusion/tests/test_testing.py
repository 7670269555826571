"""The contract must reject what is wrong, each in its own words; a check that cannot fail is worth nothing."""

import pytest
import torch

from kernel_fusion import steps, testing
from kernel_fusion.testing import contract
from kernel_fusion.testing.accuracy import allowance, allowances, errors, max_error, misrounded, round_as_well
from kernel_fusion.tests.fake_step import step

EAGER = {"double": lambda x: x * 2, "softmax": lambda x: torch.softmax(x, -1), "sum": lambda x, y: x + y}


def check(rung, *, op="double", x=None, device="cpu", **more):
    x = testing.randn((5, 33), torch.float32, device) if x is None else x
    inputs = (x, x.flip(-1)) if op == "sum" else (x,)
    return testing.check_contract(step, op, inputs, rung, reference=EAGER[op], eager=EAGER[op], **more)


@pytest.mark.parametrize("shape", [(1,), (33,), (5, 33), (2, 3, 4, 5), (0, 7), ()])
@pytest.mark.parametrize("dtype", [*testing.DTYPES, torch.float64])
@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_right_rung_passes(device, dtype, shape):
    contract = check("v2_good", x=testing.randn(shape, dtype, device))
    assert contract.error <= contract.allowed
    assert contract.before == ("refuses" if 0 in shape else "v1_good")  # rung 'refuses' never gets to see an empty one
    assert contract.difference_to_before == 0


@pytest.mark.parametrize(
    ("rung", "complaint"),
    [
        ("leaves_last", "1 of 165 elements of `out`, the first at (4, 32), were never written"),
        ("past_the_end", "4 bytes outside `out` were written"),
        ("before_the_start", "4 bytes outside `out` were written"),
        ("stale", "two runs"),
        ("adds_to_out", "1 of 165 elements of `out`, the first at (0, 2), are the NaN that the buffer was full of"),
        ("adds_to_out", "computed from what `out` held before"),
        ("scratch_not_written", "1 of 165 elements of `out`, the first at (0, 3), are wrong: it is nan, must be"),
        ("nan", "the first at (0, 0), are wrong: it is nan"),
        ("nan", "1 elements are NaN"),
        ("off_by_a_percent", "against float64: 165 of 165 elements of `out`, the first at (0, 0), are wrong: it is"),
        ("run_to_run", "two runs"),
        (
            "missing_barrier",
            "the second by the Python function: 1 of 165 elements of `out`, the first at (0, 0), differ: ",
        ),
        ("threads_count", "two runs"),
        ("workers_count", "two runs"),
        ("modifies_input", "input `x` (shape (5, 33)), or memory beside it, was modified"),
        ("modifies_beside_input", "was modified"),
        ("reads_past_the_end", "1 elements are NaN"),
        ("ignores_strides", "inputs laid out 'rows apart'"),
        ("needs_alignment", "inputs laid out 'unaligned'"),
        ("wrong_backend", "must run on the backend 'emulated'"),
        ("does_not_count", "launches counted: none"),
        ("returns_its_input", "shares memory with an input"),
    ],
)
def test_a_wrong_rung_is_rejected(rung, complaint):
    with testing.raises(testing.ContractError, f"fake_step.double, rung '{rung}' on cpu", complaint):
        check(rung)


# ---- what changes no result: a protected page beside the tensor shows it ----


@pytest.fixture
def fenced(monkeypatch):
    """The step has a library that watches: another one's."""
    monkeypatch.setattr(step, "_C", steps.load("step1_simple"), raising=False)


@pytest.mark.parametrize(
    ("rung", "complaint"),
    [
        ("looks_past_the_end", "memory past the end of `x` ({}) was read, 0 bytes from it, by a thread that is not em"),
        ("looks_before_the_start", "memory before the begin of `x` (aligned) was read, 2 bytes from it, by a thread "),
        ("keeps_what_is_past_the_end", "memory past the end of `out` ({}) was "),
    ],
)
@pytest.mark.parametrize(("shape", "layout"), [((4, 8), "aligned"), ((5, 33), "unaligned")])
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_an_access_beside_a_tensor_is_rejected(fenced, dtype, shape, layout, rung, complaint):
    """At the end where whole vectors fill the tensor; else where it need not be aligned."""
    x = testing.randn(shape, dtype, "cpu")
    check("v2_good", x=x)
    with testing.raises(testing.ContractError, f"rung '{rung}' on cpu: rung '{rung}': {complaint.format(layout)}"):
        check(rung, x=x)


def test_an_access_beside_a_tensor_is_told_beside_what_else_is_wrong(fenced):
    with testing.raises(testing.ContractError, "against float64: ", "; rung 'off_and_looks': memory past the end of"):
        check("off_and_looks", x=testing.randn((4, 8), torch.float32, "cpu"))


@pytest.mark.parametrize("shape", [(1,), (0, 7), (), (3, 1, 2)])
@pytest.mark.parametrize("dtype", [*testing.DTYPES, torch.float64], ids=str)
def test_a_right_rung_passes_between_protected_pages(fenced, dtype, shape):
    check("v2_good", x=testing.randn(shape, dtype, "cpu"), alone=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_intermediate_that_was_rounded_is_found_unless_the_table_says_so(dtype):
    x = testing.randn((64, 65), dtype, "cpu")

    def sixth(x):
        return x / 3 * 6  # rounds in between too: twice its error would allow it

    def run(rung):
        return testing.check_contract(step, "double", (x,), rung, reference=lambda x: x * 2, eager=sixth)

    run("v1_good")
    run("rounds_and_says_so")
    complaint = "are not the exact result rounded once (it is "
    with testing.raises(testing.ContractError, "of 4160 elements of `out`", complaint, "may differ)"):
        run("rounds_on_the_way")


def test_runs_may_differ_in_their_last_bits_where_the_rung_says_so():
    check("varies_and_says_so")
    with testing.raises(
        testing.ContractError,
        "two runs, the second by the Python function: 1 of 165 elements of `out`, the first at (0, 0), differ: ",
    ):
        check("varies_by_more_than_it_says")


def test_reruns_are_compared_as_their_rung_says():
    runs = iter(torch.full((3, 5), value) for value in (1.0, 1.0 + 2**-22, 1.0 + 2**-22, 1.0))
    testing.check_reruns(lambda: next(runs), varies=True)
    for varies, change in ((False, 2**-22), (True, 1e-3)):
        runs = iter(torch.full((3, 5), 1.0 + change * (i == 2)) for i in range(4))
        with pytest.raises(AssertionError, match="run 3"):
            testing.check_reruns(lambda runs=runs: next(runs), varies=varies)
    assert not testing.differ(torch.full((2,), float("nan")), torch.full((2,), float("nan")), varies=True).any()
    assert testing.differ(torch.ones(2), torch.full((2,), float("nan")), varies=True).all()
    assert not testing.differ(torch.ones(0), torch.ones(0), varies=True).any()


def test_a_tail_that_is_cut_off_is_found():
    x = testing.randn((8, 64), torch.float32, "cpu", scale=6.0)
    check("v1_good", op="softmax", x=x)
    with testing.raises(testing.ContractError, "against float64", "it is 0, must be "):
        check("without_a_tail", op="softmax", x=x)


def test_what_a_rung_keeps_of_an_earlier_call_is_found():
    x = testing.randn((3, 31), torch.float32, "cpu")
    check("remembers_its_input", x=x)  # the same input each time: right
    with testing.raises(testing.ContractError, "against float64", "it is nan"):
        check("remembers_its_input", x=testing.randn((3, 32), torch.float32, "cpu"), alone=True)


@pytest.mark.parametrize(
    ("op", "rung", "complaint"),
    [
        ("sum", "forgets_to_align_y", "`y` alone laid out 'unaligned'"),
        ("sum", "strides_of_x_for_y", "`x` alone laid out 'rows apart'"),
        ("double", "out_needs_alignment", "`out` alone laid out 'unaligned'"),
        ("double", "wrong_where_columns_come_first", "`x` alone laid out 'columns first'"),
        ("double", "wrong_where_rows_lie_outermost_inside", "`x` alone laid out 'outermost inside'"),
    ],
)
def test_a_rung_that_is_wrong_for_one_tensors_layout_alone_is_rejected(op, rung, complaint):
    x = testing.randn((2, 3, 5, 8), torch.float32, "cpu")
    check(rung, op=op, x=x)  # all tensors laid out alike: nothing to see
    check("v1_good", op=op, x=x, alone=True)
    with testing.raises(testing.ContractError, complaint, "the first at (0, 0, "):
        check(rung, op=op, x=x, alone=True)


def test_a_missing_barrier_is_found_under_the_reverse_schedule_too(monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "reverse")
    with testing.raises(testing.ContractError):
        check("missing_barrier")


@pytest.mark.parametrize("scale", [0.01, 1.0])
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_a_uniform_softmax_is_rejected_even_where_rows_are_nearly_uniform(dtype, scale):
    check("v1_good", op="softmax", x=testing.randn((4, 16), dtype, "cpu", scale=scale))
    with testing.raises(testing.ContractError, "against float64"):
        check("uniform", op="softmax", x=testing.randn((4, 16), dtype, "cpu", scale=scale))


def test_a_rung_before_that_is_wrong_is_rejected(monkeypatch):
    monkeypatch.setattr(step, "rungs", lambda op, device: ["off_by_a_percent", "v2_good"])
    with testing.raises(testing.ContractError, "against rung 'off_by_a_percent'"):
        check("v2_good")


def test_the_wrong_stream_is_rejected():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with testing.raises(testing.ContractError, "on a stream that is not the default one"):
        check("wrong_stream", device="cuda")


def test_a_reference_that_is_not_float64_is_an_error_of_the_test():
    x = torch.ones(3)
    with testing.raises(ValueError, "`reference` must return float64", "float32"):
        testing.check_contract(step, "double", (x,), "cpu", reference=lambda x: x.float() * 2, eager=lambda x: x * 2)


def test_an_unknown_rung_raises_the_ops_own_error():
    with testing.raises(ValueError, "double: `rung` must be"):
        check("v9_unknown")


@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_registered_op_passes_check_op_and_one_that_returns_its_input_fails(device):
    testing.check_op(step, "double", (testing.randn((3, 4), torch.float32, device),), {"rung": "v1_good"})
    with pytest.raises(Exception, match="alias"):
        testing.check_op(step, "double", (torch.ones(3, 4),), {"rung": "returns_its_input"})


def test_raises_wants_every_fragment():
    with pytest.raises(AssertionError, match="lacks"), testing.raises(ValueError, "one", "two"):
        raise ValueError("only one")
    with pytest.raises(pytest.fail.Exception), testing.raises(ValueError):
        pass


def test_device_rungs_lists_the_emulated_rungs_and_skips_the_gpus_with_a_reason(monkeypatch):
    monkeypatch.delenv("KF_TEST_DEVICES", raising=False)
    params = testing.device_rungs("fake_step", "softmax")
    cpu = [p.values for p in params if p.values[0] == "cpu"]
    assert cpu == [("cpu", name) for name in ("cpu", "v1_good", "uniform", "without_a_tail")]
    cuda = [p for p in params if p.values[0] == "cuda"]
    assert [p.values[1] for p in cuda] == ["v1_good", "uniform", "without_a_tail"]
    if not torch.cuda.is_available():
        assert all(p.marks[0].kwargs["reason"] == "needs a GPU" for p in cuda)


def test_a_gpu_asked_for_by_name_is_never_skipped(monkeypatch):
    monkeypatch.setenv("KF_TEST_DEVICES", "cuda")
    assert all(p.values[0] == "cuda" and not p.marks for p in testing.device_rungs("fake_step", "softmax"))
    monkeypatch.setenv("KF_TEST_DEVICES", "tpu")
    with testing.raises(ValueError, "KF_TEST_DEVICES", "tpu"):
        testing.device_rungs("fake_step", "softmax")


def test_randn_is_the_same_everywhere_up_to_rounding():
    full = testing.randn((100,), torch.float64, "cpu", seed=3, scale=2.0)
    half = testing.randn((100,), torch.float16, "cpu", seed=3, scale=2.0)
    assert torch.equal(full.half(), half)
    assert not torch.equal(full, testing.randn((100,), torch.float64, "cpu", seed=4, scale=2.0))


def test_max_error_takes_nan_and_a_wrong_infinity_as_infinitely_wrong():
    inf, nan = torch.inf, torch.nan
    double = torch.float64
    assert max_error(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0], dtype=double)) == inf
    assert max_error(torch.tensor([inf]), torch.tensor([2.0], dtype=double)) == inf
    assert max_error(torch.tensor([inf], dtype=torch.half), torch.tensor([1e6], dtype=double)) == 0
    assert max_error(torch.tensor([-inf], dtype=torch.half), torch.tensor([1e6], dtype=double)) == inf
    assert max_error(torch.tensor([65504.0], dtype=torch.half), torch.tensor([1e6], dtype=double)) == inf
    with testing.raises(ValueError, "NaN"):
        max_error(torch.tensor([1.0]), torch.tensor([nan], dtype=double))
    with testing.raises(ValueError, "shape"):
        max_error(torch.ones(2), torch.ones(3, dtype=double))


def test_an_eager_version_that_overflows_allows_no_more():
    reference = torch.tensor([1.0, 100.0], dtype=torch.float64)
    assert allowance(reference, torch.tensor([1.0, torch.inf])) == pytest.approx(1e-3)
    assert allowance(reference, torch.tensor([1.5, torch.nan])) == pytest.approx(1.0 + 1e-3)
    assert allowance(reference, reference) == pytest.approx(1e-10)


def test_a_small_result_must_be_right_to_its_own_digits_a_cancelled_one_is_not():
    exact = 10.0 ** -torch.arange(80, dtype=torch.float64).div(2)  # as weights of a softmax: from 1 down to 1e-39
    limits = allowances(exact, exact.float() * (1 + 1e-7))
    assert limits[0] == allowance(exact, exact.float() * (1 + 1e-7))
    assert (errors((exact * (1 + 5e-6)).float(), exact) <= limits).all()
    assert (errors((exact * 0.99).float(), exact) > limits)[:20].all()
    cancelled = torch.linspace(-1, 1, 10000, dtype=torch.float64)  # each as wrong as the largest
    off = (cancelled + 1e-6 * torch.randn(10000, generator=torch.Generator().manual_seed(0)).double()).float()
    limits = allowances(cancelled, off)
    assert (errors((cancelled + 3e-6).float(), cancelled) <= limits).all()
    assert limits.max() < 3e-5


def test_a_result_that_cancelled_to_nothing_may_be_as_wrong_as_the_smallest_others():
    exact = torch.linspace(-1, 1, 1000, dtype=torch.float64)
    eager = exact.float() + 1e-6
    exact[500], eager[500] = 0.0, 0.0
    assert allowances(exact, eager)[500] > 1e-6


def test_allowances_of_what_overflows_of_integers_and_of_nothing():
    assert allowances(torch.tensor([torch.inf, 1.0]).double(), torch.tensor([torch.inf, 1.0]))[1] < 1e-4
    assert allowances(torch.ones(3), torch.ones(3, dtype=torch.int64)).tolist() == [0, 0, 0]
    assert (allowances(torch.ones(3).double(), torch.ones(3).double()) == 1e-12).all()
    assert allowances(torch.empty(0), torch.empty(0)).numel() == 0
    assert max_error(torch.empty(0), torch.empty(0)) == 0


def test_misrounded_counts_half_numbers_that_are_not_the_nearest():
    exact = torch.tensor([1.0, 1.001, 1e6, 3.0], dtype=torch.float64)
    assert misrounded(exact.half(), exact).sum() == 0
    assert misrounded(torch.tensor([1.0, 1.0, torch.nan, 3.0]).half(), exact).tolist() == [False, True, True, False]
    assert misrounded(torch.tensor([1.1, 2.0, 3.0, 4.0]), exact).sum() == 0  # float32


def test_a_half_result_may_miss_what_float32_misses_and_little_else():
    exact = torch.linspace(1, 2, 10000, dtype=torch.float64)
    wide = exact.half()
    assert round_as_well(exact.half(), wide, exact)[1] == 50
    assert round_as_well(exact[:10].half(), wide[:10], exact[:10])[1] == 4
    wide[:100] = 3
    wrong, allowed = round_as_well(wide, wide, exact)
    assert (wrong.sum(), allowed) == (0, 150)
    assert round_as_well(exact.half() + 1, wide, exact)[0].sum() == 9900


def test_what_was_checked_without_an_optional_input_is_not_what_is_compared_with():
    """The rung before was checked without `residual` a moment ago: its outputs there are of other inputs."""
    inputs = (torch.randn(3, 8), torch.ones(8))
    before = contract._Subject(step, "double", "v1_good", torch.device("cpu"), {}, None)
    before.keep(inputs, (torch.zeros(3, 8),))
    assert before.passed(inputs) is not None
    assert before.passed((*inputs, torch.randn(3, 8))) is None
