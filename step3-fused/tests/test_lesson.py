"""The lesson: the notebook is lesson.py, and runs in less than a minute; its rules are those of the kernels."""

import inspect
import math
import pathlib
import re

import pytest
import torch
import torch.nn.functional as F

from kernel_fusion.testing.lesson_contract import Lesson

HERE = pathlib.Path(__file__).resolve().parents[1]
LESSON = Lesson(HERE, pictures=7, says=r"^v9_split +off by [\d.]+, of which rounding [\d.]+; same bits: True$")


@pytest.mark.parametrize("check", LESSON.checks())
def test_the_lesson(check):
    check()


def test_without_a_build_the_script_says_what_to_build():
    LESSON.check_unbuilt()


# ---- its rules ----


@pytest.fixture(scope="module")
def lesson():
    """What lesson.py defines."""
    return LESSON.defined()


def constants(name):
    """The integers that a source gives names to."""
    text = (HERE / name).read_text(encoding="utf-8")
    return {found[1]: int(found[2]) for found in re.finditer(r"\b(k[A-Z]\w*) = (\d+)[,;]", text)}


def defaults(function):
    """The values of parameters that have one."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


@pytest.mark.parametrize("cuts", [(0, 0), (0, 9), (1, 1), (4, 7), (9, 9)])
def test_groups_merge_to_what_they_are_together(cuts, lesson):
    x = torch.randn(9, generator=torch.Generator().manual_seed(0)).double() + 1000
    whole = (0, 0.0, 0.0)
    for part in torch.tensor_split(x, cuts):
        mean = part.mean() if len(part) else torch.tensor(0.0)
        whole = lesson["merged"](whole, (len(part), mean.item(), ((part - mean) ** 2).sum().item()))
    assert whole[0] == 9
    assert whole[1:] == pytest.approx((x.mean().item(), (x.var(correction=0) * 9).item()))


def test_the_rest_of_the_mean_is_worth_its_pass(lesson):
    x = 10000 + 0.01 * torch.randn(8, 768, generator=torch.Generator().manual_seed(0))
    exact = F.layer_norm(x.double(), (768,), eps=1e-12)
    error = (lesson["normalized_with_rest"](x, eps=1e-12).double() - exact).abs().max()
    assert error < 1e-3 < 0.01 < (lesson["normalized"](x, lesson["two_passes"], 1e-12).double() - exact).abs().max()


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_a_row_s_gradient_is_autograd_s(eps, lesson):
    x, grad, weight = (torch.randn(3, 7, dtype=torch.float64) for _ in range(3))
    x.requires_grad_()
    (expected,) = torch.autograd.grad(F.layer_norm(x, (7,), weight[0], eps=eps), x, grad)
    assert torch.allclose(lesson["row_gradient"](grad, x.detach(), weight[0], eps), expected)


def test_an_epilogue_saves_what_lies_between(lesson):
    def moved(fused, keep):
        return lesson["bytes_of_linear_gelu"](16384, 768, 3072, 2, fused, keep)

    trip = 16384 * 3072 * 2
    assert moved(False, True) - moved(True, True) == trip
    assert moved(False, True) - moved(True, False) == 2 * trip
    seconds_a_byte, seconds_a_flop = 1 / lesson["copy_rate"], 1 / lesson["product_rate"]
    share = trip * seconds_a_byte / (2 * 16384 * 768 * 3072 * seconds_a_flop)
    assert lesson["pass_over_product"](768, 1) == pytest.approx(share)


@pytest.mark.parametrize("tile", [(1, 1), (4, 4), (4, 8), (5, 3), (100, 100)])
def test_tiles_make_the_whole_product(tile, lesson):
    x, weight = torch.randn(12, 5).double(), torch.randn(5, 16).double()
    y, fetched = lesson["product_in_tiles"](x, weight, *tile)
    assert torch.allclose(y, x @ weight)
    assert fetched == 5 * (12 * math.ceil(16 / tile[1]) + 16 * math.ceil(12 / tile[0]))


def test_tiles_are_those_of_v9(lesson):
    hopper = constants("../step2-attention/include/step2/hopper_tile.h")
    linear = "../step2-attention/kernels/linear"
    split = constants(f"{linear}/half_depth.h") | constants(f"{linear}/v9_split.cu")
    assert defaults(lesson["tiles_of"]) == {"tile_rows": hopper["kConsumers"] * 64, "tile_columns": 256}
    assert defaults(lesson["width_of_tiles"]) == {
        "tile_rows": split["kSplitRows"],
        "tile_depth": hopper["kDepth"],
        "fewest_columns": split["kFewestColumns"],
        "round_cost": split["kRoundCost"],
    }
    for rows, depth, width in ((1024, 3072, 768), (1024, 768, 768), (768, 16384, 768)):
        assert lesson["width_of_tiles"](rows, depth, width) == 128
    assert lesson["width_of_tiles"](64, 768, 3072) == 64  # 48 tiles: one more round would take longer
    assert lesson["width_of_tiles"](2048, 3072, 768) == 192


@pytest.mark.parametrize(("tiles", "share"), [(1, 1 / 132), (132, 1), (133, 133 / 264), (264, 1)])
def test_the_last_tiles_run_alone(tiles, share, lesson):
    assert lesson["busy"](tiles) == pytest.approx(share)
