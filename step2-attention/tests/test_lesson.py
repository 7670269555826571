"""The lesson: the notebook is lesson.py, and runs in less than a minute; its rules are those of the kernels."""

import pathlib
import re
import subprocess

import pytest
import torch

from emulator import counts, programs
from kernel_fusion import testing
from kernel_fusion.testing.lesson_contract import Lesson

HERE = pathlib.Path(__file__).resolve().parents[1]
LESSON = Lesson(HERE, pictures=8, says=r"^v8_persistent +[\d.e-]+ +[\d.]+% rounded otherwise$")


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


# What the hardware does, by the emulation: registers that ldmatrix fills, a product, offsets, and loads that are
# counted. Each element is its own number, row after row: below 256, so exact in bfloat16.
PROGRAM = """
#include <step2/mma.h>
#include <step2/tma.h>

#include <cstdio>

using namespace kf::KF_BACKEND;

__global__ void fragments(uint32_t* a_registers, uint32_t* b_registers, float* product) {
  __shared__ __align__(16) __nv_bfloat16 a[16][16], b[16][8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) a[i / 16][i % 16] = __float2bfloat16(i);
  for (int i = lane; i < 128; i += 32) b[i / 8][i % 8] = __float2bfloat16(i);
  __syncwarp();
  uint32_t left[4], right[2];
  ldmatrix<4>(left, &a[lane % 16][lane / 16 * 8]);
  ldmatrix_transposed<2>(right, &b[lane % 16][0]);
  float sum[4] = {};
  mma_m16n8k16<__nv_bfloat16>(sum, left, right);
  for (int i = 0; i < 4; ++i) a_registers[lane * 4 + i] = left[i], product[lane * 4 + i] = sum[i];
  for (int i = 0; i < 2; ++i) b_registers[lane * 2 + i] = right[i];
}

int main() {
  uint32_t *a, *b;
  float* product;
  cudaMallocManaged(&a, 128 * sizeof *a);
  cudaMallocManaged(&b, 64 * sizeof *b);
  cudaMallocManaged(&product, 128 * sizeof *product);
  fragments<<<1, 32>>>(a, b, product);
  cudaDeviceSynchronize();
  for (int i = 0; i < 128; ++i) std::printf("a %u\\n", a[i]);
  for (int i = 0; i < 64; ++i) std::printf("b %u\\n", b[i]);
  for (int i = 0; i < 128; ++i) std::printf("d %.0f\\n", product[i]);
  for (uint32_t i = 0; i < 8192; i += 16) std::printf("swizzled %u\\n", swizzled_offset(i, Swizzle::k128));
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """What PROGRAM prints, by the first word of its lines."""
    source = tmp_path_factory.mktemp("lesson") / "rules.cu"
    source.write_text(PROGRAM, encoding="utf-8")
    program = programs.compile_program(source, include_dirs=(HERE / "include",))
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    found = {}
    for name, value in map(str.split, lines):
        found.setdefault(name, []).append(int(value))
    return found


def bfloat16_of(registers):
    """The two numbers in each register, the lower half first."""
    return torch.tensor(registers, dtype=torch.int64).to(torch.int32).view(torch.bfloat16).view(-1, 2).tolist()


def test_fragments_of_operands_are_what_ldmatrix_loads(lesson, emulated):
    a = [[16 * row + column for row, column in lesson["a_places"](lane, i)] for lane in range(32) for i in range(4)]
    b = [[8 * row + column for row, column in lesson["b_places"](lane, i)] for lane in range(32) for i in range(2)]
    assert bfloat16_of(emulated["a"]) == a
    assert bfloat16_of(emulated["b"]) == b


def test_fragments_of_a_product_are_what_mma_leaves(lesson, emulated):
    a, b = torch.arange(256.0).view(16, 16), torch.arange(128.0).view(16, 8)
    product = (a @ b).tolist()
    places = [lesson["d_place"](lane, i) for lane in range(32) for i in range(4)]
    assert emulated["d"] == [product[row][column] for row, column in places]


def test_the_swizzle_is_tmas(lesson, emulated):
    assert emulated["swizzled"] == [lesson["swizzled"](offset) for offset in range(0, 8192, 16)]


def value_of(expression, **names):
    """What C++ makes of `expression`, of whole numbers."""
    python = re.sub(r"^(.*) \? (.*) : (.*)$", r"(\2) if (\1) else (\3)", expression).replace(" / ", " // ")
    return eval(python, names)


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_offsets_are_those_of_v5(dim, lesson):
    source = (HERE / "kernels" / "attention" / "v5_registers.cu").read_text(encoding="utf-8")
    turn, offset = re.search(r"\n  const int turn = (.*);\n  return (.*);\n", source).groups()
    for row in range(16):
        for column in range(0, dim, 4):
            names = {"kDim": dim, "kVector": 8, "row": row, "column": column}
            assert lesson["offset_of"](dim, row, column) == value_of(offset, turn=value_of(turn, **names), **names)


LOADS = """
#include <cstdio>

__global__ void load(const int* offsets, int4* to) {
  extern __shared__ __align__(128) unsigned char tile[];
  to[threadIdx.x] = *reinterpret_cast<const int4*>(tile + offsets[threadIdx.x]);
}

int main(int count, char** arguments) {
  int* offsets;
  int4* to;
  cudaMallocManaged(&offsets, 8 * sizeof *offsets);
  cudaMallocManaged(&to, 8 * sizeof *to);
  for (int i = 0; i < 8; ++i) std::sscanf(arguments[1 + i], "%d", &offsets[i]);
  load<<<1, 8, 4096>>>(offsets, to);
  cudaDeviceSynchronize();
}
"""


def test_wavefronts_are_those_that_the_emulation_counts(lesson, tmp_path):
    source = tmp_path / "loads.cu"
    source.write_text(LOADS, encoding="utf-8")
    for name, at in lesson["layouts"].items():
        offsets = [at(row, 3) for row in range(8)]
        code, kernels = counts.run_program(source, [str(offset) for offset in offsets])
        assert code == 0
        assert kernels[0].total["shared load"].wavefronts == lesson["wavefronts"](offsets), name


def test_queries_see_what_they_see_in_the_op(lesson):
    for q_length, k_length in ((5, 5), (3, 9), (9, 3)):
        mask = torch.ones(q_length, k_length, dtype=torch.bool).tril(k_length - q_length)
        seen = [lesson["seen_by"](i, q_length, k_length, True) for i in range(q_length)]
        assert seen == mask.sum(1).tolist()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lag", [0.0, 8.0])
@pytest.mark.parametrize(("q_length", "k_length"), [(1, 1), (70, 130), (130, 70), (64, 64), (5, 1)])
def test_attention_in_tiles_is_attention(q_length, k_length, lag, causal, lesson):
    q, k, v = (
        testing.randn((n, 32), torch.float32, "cpu", i, 3.0) for i, n in enumerate((q_length, k_length, k_length))
    )
    out, _ = lesson["attention_in_tiles"](q, k, v, causal=causal, lag=lag)
    mask = torch.ones(q_length, k_length, dtype=torch.bool).tril(k_length - q_length if causal else k_length)
    scores = (q.double() @ k.double().T / 32**0.5).masked_fill(~mask, -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0.0) @ v.double()
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)


def test_copies_wait_for_their_stages_and_computing_for_its_copy(lesson):
    times = lesson["pipeline"](9, 3, 1.0, 0.5, 0.7)
    assert times[0] == (0.0, 1.5, 1.5, 2.2)
    for tile, (start, arrived, begin, end) in enumerate(times):
        assert start == (times[tile - 3][3] if tile >= 3 else 0.0)
        assert arrived - start >= 1.5
        assert begin == max(arrived, times[tile - 1][3] if tile else 0.0)
        assert end == begin + 0.7


@pytest.mark.parametrize(
    ("groups", "in_turns", "product", "softmax", "share"),
    [
        (1, False, 2.0, 3.0, 2 / 5),
        (2, False, 2.0, 3.0, 2 / 5),  # two that do the same at the same time are one
        (2, True, 2.0, 3.0, 2 / 3),  # exponentials are the bound: 2 · 3 for 2 · 2 of products
        (2, True, 3.0, 2.0, 1.0),
        (3, True, 1.0, 1.0, 1.0),
    ],
)
def test_turns_fill_the_tensor_cores(groups, in_turns, product, softmax, share, lesson):
    spans = lesson["run"](groups, product, softmax, in_turns, tiles=200)
    assert lesson["busy"](spans, product, groups, tiles=200) == pytest.approx(share, abs=0.01)
    for group in range(groups):
        mine = [span for span in spans if span[0] == group]
        assert all(before[3] == after[2] for before, after in zip(mine, mine[1:], strict=False))
        work = sum(end - begin for _, doing, begin, end in mine if doing != "wait")
        assert work >= 200 * (product + softmax) - 1e-6


@pytest.mark.parametrize(("first_to_last", "longer"), [(True, 3), (False, 1)])
def test_blocks_that_take_turns_wait_as_the_page_says(lesson, first_to_last, longer):
    did = lesson["walks"](8, first_to_last)
    assert [steps.count(None) for steps in did] == [longer * block for block in range(8)]
    when = [{tile: at for at, tile in enumerate(steps) if tile is not None} for steps in did]
    for block, tiles in enumerate(when):
        assert sorted(tiles) == list(range(2 * block, 16))
        assert all(tiles[tile] > when[block - 1][tile] for tile in tiles if block > 0)


def test_a_score_s_gradient_needs_both_terms(lesson):
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    values, grad = (torch.randn(n, 4, dtype=torch.float64) for n in (5, 3))
    (expected,) = torch.autograd.grad(torch.softmax(scores, -1) @ values, scores, grad)
    right, wrong = lesson["score_gradients"](scores.detach(), values, grad)
    torch.testing.assert_close(right, expected)
    assert (wrong - expected).abs().max() > 0.01
