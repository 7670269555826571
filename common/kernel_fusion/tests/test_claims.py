"""Claims of the prose are compared with the results, and a claim that says nothing is an error."""

import pytest

from kernel_fusion import testing
from kernel_fusion.report import claims
from kernel_fusion.tests.test_report import repository, row, write_results  # noqa: F401  a fixture

ROWS = [
    row("v1_naive", 0.4, percent_of_ceiling=25.0, dram_bytes=512, profile={"busy": {"DRAM": 80.0, "tensor": 12.5}}),
    row("v2_vector", 0.1, percent_of_ceiling=99.0),
    row("torch.compile", 0.2, kind="peer"),
    row("FlashAttention-4", 0.3, kind="peer"),
    row("v1_naive", 0.01, width=4),
    row("v2_vector", 0.02, width=4),
]


@pytest.fixture
def said(repository):  # noqa: F811
    """What is wrong with a claim."""
    write_results(repository, ROWS)
    page = repository.path / "README.md"
    return lambda claim: list(claims.unsupported(f"\ntext\n<!-- claim: {claim} -->\n", page))


@pytest.mark.parametrize(
    "claim",
    [
        "double: v1_naive > 3 * v2_vector",
        "double: v2_vector < torch.compile, torch.compile < 0.6 * v1_naive",
        "double: ceiling(v2_vector) > 98, dram(v1_naive) > 1.9, tensor(v1_naive) > 12, tensor(v1_naive) < 13",
        "double width=4: v1_naive < v2_vector",
        "double: FlashAttention-4 > 2.9 * v2_vector, FlashAttention-4 < 1.6 * torch.compile",
        "double dtype=float32 width=8: v1_naive > v2_vector",
    ],
)
def test_a_claim_that_holds(said, claim):
    assert said(claim) == []


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ("double: v1_naive < v2_vector", "rows 4, width 8, float32: v1_naive is 400 µs and v2_vector is 100 µs"),
        ("double: v1_naive > 5 * v2_vector", "v1_naive is 400 µs and 5 * v2_vector is 5 * 100 µs"),
        ("double: ceiling(v1_naive) > 90", "ceiling(v1_naive) is 25.0 % and 90"),
        ("double: tensor(v1_naive) > 90", "tensor(v1_naive) is 12.5 % and 90"),
        ("double dtype=float32: v1_naive > v2_vector", "rows 4, width 4, float32: v1_naive is 10.0 µs"),
    ],
)
def test_a_claim_that_does_not_hold(said, claim, says):
    (line,) = said(claim)
    assert "README.md:3: " in line
    assert says in line


@pytest.mark.parametrize(
    ("claim", "complaint"),
    [
        ("double v1_naive > 2", "a claim must read"),
        ("double: v1_naive is fast", "`v1_naive is fast` is not of the form A < B"),
        ("double: v1_naive > rate(v2_vector)", "`rate(v2_vector)` is not a number, a rung or a peer"),
        ("double: v3_absent > 1", "rows 4, width 8, float32 has no result of 'v3_absent'"),
        ("double: dram(v2_vector) > 1", "has no dram of 'v2_vector'"),
        ("double: tensor(v2_vector) > 1", "has no tensor of 'v2_vector'"),
        ("double width=7: v1_naive > 1", "nobody measured double width=7"),
        ("triple: v1_naive > 1", "no step has an op 'triple'"),
    ],
)
def test_a_claim_about_nothing_is_an_error(said, claim, complaint):
    with testing.raises(claims.UserError, complaint):
        said(claim)


@pytest.fixture
def two_gpus(repository):  # noqa: F811
    """Results of a second GPU, which has a rung more, a slower v2, and no counters."""
    write_results(
        repository,
        [
            row("v1_naive", 0.4),
            row("v2_vector", 0.3),
            row("v3_new", 0.1),
            row("torch.compile", 0.2, kind="peer"),
            row("FlashAttention-4", 0.3, kind="peer", correct=False),
            row("v1_naive", 0.5, width=16),
        ],
        name="h100-80gb",
    )


@pytest.mark.parametrize(
    "claim",
    [
        "double width=8: v3_new < v2_vector",  # the other GPU was measured before there was a v3
        "double width=8: tensor(v1_naive) > 12",
        "double gpu=h200: v1_naive > 3 * v2_vector",
        "double gpu=h100-80gb width=8: v1_naive < 2 * v2_vector",
        "double width=4: v1_naive < v2_vector",  # the second GPU has no such case
    ],
)
def test_a_claim_that_holds_on_every_gpu_that_can_tell(said, two_gpus, claim):
    assert said(claim) == []


def test_a_claim_must_hold_on_every_gpu(said, two_gpus):
    (line,) = said("double width=8: v1_naive > 3 * v2_vector")
    assert "v1_naive is 400 µs and 3 * v2_vector is 3 * 300 µs" in line
    (line,) = said("double gpu=h100-80gb width=8: v2_vector < torch.compile")
    assert "v2_vector is 300 µs" in line


@pytest.mark.parametrize(
    ("claim", "complaint"),
    [
        ("double: v4_absent > 1", "has no result of 'v4_absent'"),
        ("double gpu=h200: v3_new > 1", "has no result of 'v3_new'"),
        ("double gpu=h100-80gb width=8: tensor(v1_naive) > 1", "has no tensor of 'v1_naive'"),
        ("double gpu=a100: v1_naive > 1", "nobody measured double gpu=a100"),
        ("double gpu=h100-80gb width=4: v1_naive > 1", "nobody measured double gpu=h100-80gb width=4"),
        ("double width=8: FlashAttention-4 > 0.1", "has no right result of 'FlashAttention-4'"),
        ("double dtype=float32: v2_vector > 0.001", "rows 4, width 16, float32 has no result of 'v2_vector'"),
    ],
)
def test_a_claim_that_no_gpu_can_tell_is_an_error(said, two_gpus, claim, complaint):
    with testing.raises(claims.ClaimError, complaint):
        said(claim)


def test_a_share_that_is_left_empty_supports_no_claim(repository, said):  # noqa: F811
    write_results(repository, [row("v1_naive", 0.4, percent_of_ceiling=None)])
    with testing.raises(claims.ClaimError, "has no ceiling of 'v1_naive'"):
        said("double: ceiling(v1_naive) > 1")


def test_without_results_nothing_is_claimed(repository):  # noqa: F811
    assert list(claims.unsupported("<!-- claim: double: v1_naive > 1 -->", repository.path / "README.md")) == []
