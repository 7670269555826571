"""The contract must reject what is wrong, each in its own words; a check that cannot fail is worth nothing."""

import pytest
import torch

from kernel_fusion import testing
from kernel_fusion.accuracy import allowance, max_error
from kernel_fusion.tests.fake_stage import stage


def check(rung, *, op="double", x=None, device="cpu", **more):
    x = testing.randn((5, 33), torch.float32, device) if x is None else x
    eager = {"double": lambda x: x * 2, "softmax": lambda x: torch.softmax(x, -1)}[op]
    return testing.check_contract(stage, op, (x,), rung, reference=eager, eager=eager, **more)


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
        ("leaves_last", "1 of 165 elements of `out` were never written, the first at flat index 164"),
        ("past_the_end", "4 bytes outside `out` were written"),
        ("before_the_start", "4 bytes outside `out` were written"),
        ("stale", "never written"),
        ("nan", "1 elements are NaN"),
        ("off_by_a_percent", "against float64"),
        ("run_to_run", "two runs"),
        ("missing_barrier", "two runs"),
        ("modifies_input", "was modified"),
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
    with testing.raises(testing.ContractError, f"fake_stage.double, rung '{rung}' on cpu", complaint):
        check(rung)


def test_a_missing_barrier_is_found_under_the_reverse_schedule_too(monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "reverse")
    with testing.raises(testing.ContractError):
        check("missing_barrier")


def test_a_uniform_softmax_is_rejected():
    check("v1_good", op="softmax")
    with testing.raises(testing.ContractError, "against float64"):
        check("uniform", op="softmax")


@pytest.mark.parametrize("scale", [0.01, 1.0])
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_a_uniform_softmax_is_rejected_even_where_rows_are_nearly_uniform(dtype, scale):
    with testing.raises(testing.ContractError, "against float64"):
        check("uniform", op="softmax", x=testing.randn((4, 16), dtype, "cpu", scale=scale))


def test_a_rung_before_that_is_wrong_is_rejected(monkeypatch):
    monkeypatch.setattr(stage, "rungs", lambda op, device: ["off_by_a_percent", "v2_good"])
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
        testing.check_contract(stage, "double", (x,), "cpu", reference=lambda x: x.float() * 2, eager=lambda x: x * 2)


def test_an_unknown_rung_raises_the_ops_own_error():
    with testing.raises(ValueError, "double: `rung` must be"):
        check("v9_unknown")


@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_registered_op_passes_check_op(device):
    testing.check_op(stage, "double", (testing.randn((3, 4), torch.float32, device),), {"rung": "v1_good"})


def test_an_op_that_returns_its_input_fails_check_op():
    with pytest.raises(Exception, match="alias"):
        testing.check_op(stage, "double", (torch.ones(3, 4),), {"rung": "returns_its_input"})


def test_raises_wants_every_fragment():
    with pytest.raises(AssertionError, match="lacks"), testing.raises(ValueError, "one", "two"):
        raise ValueError("only one")
    with pytest.raises(pytest.fail.Exception), testing.raises(ValueError):
        pass


def test_device_rungs_lists_the_emulated_rungs_and_skips_the_gpus_with_a_reason(monkeypatch):
    monkeypatch.delenv("KF_TEST_DEVICES", raising=False)
    params = testing.device_rungs("fake_stage", "softmax")
    cpu = [p.values for p in params if p.values[0] == "cpu"]
    assert cpu == [("cpu", "cpu"), ("cpu", "v1_good"), ("cpu", "uniform")]
    cuda = [p for p in params if p.values[0] == "cuda"]
    assert [p.values[1] for p in cuda] == ["v1_good", "uniform"]
    if not torch.cuda.is_available():
        assert all(p.marks[0].kwargs["reason"] == "needs a GPU" for p in cuda)


def test_a_gpu_asked_for_by_name_is_never_skipped(monkeypatch):
    monkeypatch.setenv("KF_TEST_DEVICES", "cuda")
    assert all(p.values[0] == "cuda" and not p.marks for p in testing.device_rungs("fake_stage", "softmax"))
    monkeypatch.setenv("KF_TEST_DEVICES", "tpu")
    with testing.raises(ValueError, "KF_TEST_DEVICES", "tpu"):
        testing.device_rungs("fake_stage", "softmax")


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
