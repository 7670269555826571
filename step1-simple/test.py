"""Step 1's ops, on every device there is: against float64, eager PyTorch and the rung before.

python test.py            pytest's options may follow, such as -k scale
"""

import functools
import math
import pathlib
import re
import shutil
import subprocess
import sys
import zlib

import pytest
import torch
import torch.nn.functional as F

import step1_simple  # not installed? pip install -e ..
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple, poisoned_allocations
from kernel_fusion.testing.philox import mask_and_factor
from step1_simple.testing import (
    BY_ELEMENTS,
    DTYPES,
    INFINITY,
    NAN,
    OPS,
    RNG_STATE,
    RUNGS,
    SHAPES,
    WITH_GELU,
    functions_of,
    inputs_of,
    ops,
)

# ---- the contract of correctness ----


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rung_keeps_the_contract(shape, dtype, op, device, rung):
    testing.check_contract(step1_simple, op, inputs_of(op, shape, dtype, device), rung, **functions_of(op))


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_rung_finds_each_tensor_wherever_it_lies(dtype, op, device, rung):
    inputs = inputs_of(op, (2, 3, 64), dtype, device)
    testing.check_contract(step1_simple, op, inputs, rung, alone=True, layouts=False, **functions_of(op))


@pytest.mark.parametrize(("op", "device", "rung"), [p for p in RUNGS if p.values[0] not in BY_ELEMENTS])
@pytest.mark.parametrize("width", [1, 12])
def test_rows_of_one_column_and_of_one_vector_and_a_half(width, op, device, rung):
    inputs = inputs_of(op, (33, width), torch.bfloat16, device)
    testing.check_contract(step1_simple, op, inputs, rung, **functions_of(op))


@pytest.mark.parametrize(("op", "device", "rung"), [p for p in RUNGS if p.values[0] == "scale"])
def test_more_elements_than_threads_at_once(op, device, rung):
    """v3_grid_stride's threads, 2048 a multiprocessor, take three of them; some two."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device == "cuda" else 16
    inputs = inputs_of(op, (2048 * multiprocessors * 5 // 2,), torch.float32, device)
    testing.check_contract(step1_simple, op, inputs, rung, layouts=False, **functions_of(op))


@pytest.mark.parametrize(("op", "device", "rung"), [p for p in RUNGS if p.values[0] in WITH_GELU])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 1600), (9, 1023)], ids=str)
def test_every_rung_has_the_exact_gelu_too(shape, dtype, op, device, rung):
    inputs = inputs_of(op, shape, dtype, device)
    testing.check_contract(step1_simple, op, inputs, rung, kwargs={"approximate": "none"}, **functions_of(op))


@pytest.mark.parametrize(("op", "device", "rung"), [p for p in RUNGS if p.values[0] in BY_ELEMENTS])
def test_ops_without_rows_take_a_tensor_without_dimensions(op, device, rung):
    inputs = inputs_of(op, (), torch.float32, device)
    testing.check_contract(step1_simple, op, inputs, rung, layouts=False, **functions_of(op))


@pytest.mark.parametrize(("op", "device", "rung"), [p for p in RUNGS if p.values[0] == "gelu_backward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_backward_has_the_factor_of_gelu_scale(dtype, op, device, rung):
    inputs = inputs_of(op, (7, 65), dtype, device)
    testing.check_contract(step1_simple, op, inputs, rung, kwargs={"factor": -1.7}, **functions_of(op))


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
@pytest.mark.parametrize("op", OPS)
def test_emulated_threads_may_run_in_any_order(op, schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    inputs = inputs_of(op, (37, 769), torch.float32, "cpu")
    for rung in step1_simple.rungs(op, "cpu"):
        testing.check_contract(step1_simple, op, inputs, rung, **functions_of(op))


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_auto_does_gpt2_sized_layers(op, dtype, device):
    inputs = inputs_of(op, (1024 if device == "cuda" else 64, 3072), dtype, device)
    testing.check_contract(step1_simple, op, inputs, "auto", layouts=False, **functions_of(op))


@pytest.mark.parametrize("op", OPS)
def test_auto_is_read_off_the_results(op):
    testing.check_automatic(
        step1_simple, op, lambda shape: {"n": math.prod(shape.values())} if op in BY_ELEMENTS else shape
    )


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_auto_gives_the_bits_of_the_fastest_rung(op, dtype, device):
    for shape in ((64, 768), (33, 1023)):
        inputs = inputs_of(op, shape, dtype, device)
        automatic = as_tuple(getattr(step1_simple, op)(*inputs))
        sizes = {"n": math.prod(shape)} if op in BY_ELEMENTS else {"rows": shape[0], "width": shape[1]}
        rung = step1_simple._C.choose(op, "auto", sizes, dtype) if device == "cuda" else "cpu"
        chosen = as_tuple(getattr(step1_simple, op)(*inputs, rung=rung))
        assert all(torch.equal(a, b) for a, b in zip(automatic, chosen, strict=True))


DIVIDES_FAST = {"bias_gelu": ("v5_any_width", "v4_exp"), "bias_dropout_residual": ("v4_any_width", "v3_vector")}


@pytest.mark.parametrize("op", DIVIDES_FAST)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_a_division_would_overflow_its_rung_refuses_and_auto_takes_the_one_before(dtype, op):
    """Sizes alone decide, so no memory is needed."""
    rung, before = DIVIDES_FAST[op]
    for rows, width in ((1, 1), ((1 << 21) - 1, 1 << 21), (1, 3037000499)):
        for name in ("auto", rung):
            assert step1_simple._C.choose(op, name, {"rows": rows, "width": width}, dtype) == rung
    for rows, width in ((1 << 21, 1 << 21), (1, 3037000500), (1 << 40, 1 << 12)):
        assert step1_simple._C.choose(op, "auto", {"rows": rows, "width": width}, dtype) == before
        with testing.raises(ValueError, f"{op}: rung '{rung}' takes rows·width² < 2⁶³; these can: '", f"'{before}'"):
            step1_simple._C.choose(op, rung, {"rows": rows, "width": width}, dtype)


@pytest.mark.parametrize("op", OPS)
def test_other_rungs_take_any_size(op):
    sizes = {"n": 1 << 40} if op in BY_ELEMENTS else {"rows": 1 << 20, "width": 1 << 20}
    for rung in step1_simple.rungs(op)[1:]:
        if rung != DIVIDES_FAST.get(op, (None,))[0]:
            assert step1_simple._C.choose(op, rung, sizes, torch.float16) == rung
    assert step1_simple._C.choose(op, "auto", sizes, torch.float16) == step1_simple._C.prefer(op, sizes, torch.float16)


# Under emulation those whose last blocks can run alone.
IN_HUGE_TENSORS = [p for p in RUNGS if p.values[1:] not in (("cpu", "cpu"), ("cpu", "v3_grid_stride"))]


@pytest.mark.parametrize(("op", "device", "rung"), IN_HUGE_TENSORS)
@pytest.mark.parametrize("width", [(1 << 26) + 8, (1 << 26) + 6])
def test_offsets_beyond_32_bits_are_right(width, op, device, rung, monkeypatch):
    """2³² elements and more: under emulation 2³⁵, of which the last blocks run; a GPU runs all of them.

    All are zero but the last 4096, so an offset that wraps around in 32 bits finds nothing.
    """
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "20")
    monkeypatch.setenv("KF_SIMT_SCHEDULE", "forward")
    rows, last = 68 if device == "cuda" else 516, 4096
    x, bias = (testing.lazy_memory(n, torch.bfloat16, device) for n in (rows * width, width))
    x[-last:] = testing.randn((last,), torch.bfloat16, device)
    bias[-last:] = testing.randn((last,), torch.bfloat16, device, seed=1)
    matrix = x.view(rows, width)
    inputs = OPS[op][1](matrix, lambda seed, shape: bias if len(shape) == 1 else matrix)
    outs = {}
    for argument in getattr(ops, op).out._schema.arguments:
        if argument.alias_info is not None:
            of_columns = argument.name == "grad_bias" or op == "column_sum"
            shape = (width,) if of_columns else (rows, width)
            outs[argument.name] = testing.lazy_memory(math.prod(shape), x.dtype, device).view(shape)
    getattr(ops, op).out(*inputs, rung=rung, **outs)

    # The same for the last elements alone. Sums over rows are the last row: the others are zeros.
    here = functools.partial(mask_and_factor, first=rows * width - last)
    monkeypatch.setattr("step1_simple.testing.mask_and_factor", here)
    end = tuple(v.flatten()[-last:].double() if v is matrix or v is bias else v for v in inputs)
    for out, want in zip(outs.values(), as_tuple(OPS[op][0](*end)), strict=True):
        written = 600  # so many at least, by any rung's last 20 blocks
        torch.testing.assert_close(out.flatten()[-written:].double(), want[-written:], rtol=1e-2, atol=1e-2)


def test_a_grid_stride_goes_on_beyond_32_bits(monkeypatch):
    """Under emulation the last block alone runs, all of its rounds: some 270 MB."""
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "1")
    block, stride = 256, 16 * 8 * 256  # the emulation has 16 multiprocessors
    n = (1 << 31) + stride
    x, out = (testing.lazy_memory(n, torch.bfloat16, "cpu") for _ in range(2))
    x[-block:] = testing.randn((block,), torch.bfloat16, "cpu")
    ops.scale.out(x, -1.7, rung="v3_grid_stride", out=out)
    assert torch.equal(out[-block:], x[-block:] * -1.7)


def test_the_rows_of_a_sum_beyond_32_bits_are_found_in_plain_cpp():
    """All rows but the last are zeros, which nobody has written and which take no memory."""
    rows, width = (1 << 16) + 1, 1 << 15
    x = testing.lazy_memory(rows * width, torch.bfloat16, "cpu").view(rows, width)
    x[-1] = testing.randn((width,), torch.bfloat16, "cpu")
    assert torch.equal(step1_simple.column_sum(x, rung="cpu"), x[-1])


def test_only_the_last_blocks_of_a_grid_run_where_that_is_asked(monkeypatch):
    x, out = torch.ones(1000), torch.zeros(1000)
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "2")
    ops.scale.out(x, 2.0, rung="v2_naive", out=out)
    assert out.tolist() == [0.0] * 512 + [2.0] * 488
    monkeypatch.setenv("KF_SIMT_LAST_BLOCKS", "0")
    with testing.raises(ValueError, "KF_SIMT_LAST_BLOCKS: `0` is not a number from 1 to"):
        step1_simple.scale(x, 2.0, rung="v2_naive")


# ---- sums in a fixed order ----


@functools.cache
def mixed(rows, width):
    """Numbers of all sizes, the same everywhere: in float32 almost every other order of addition gives other bits."""
    i = torch.arange(rows * width)
    return (((i * 7919 % 100003) - 50001).double() / 977 ** (i % 3).double()).float().view(rows, width)


# Only in the last does it matter whether a grid has one wave of blocks or more.
GOLDEN_SHAPES = [(20000, 3), (1100, 1030), (14000, 1030), (20000, 1024)]
GOLDEN = {  # CRC-32 of the sums' bytes
    ("column_sum", "cpu"): (0xBD879260, 0x7795A147, 0x823E155F, 0xFB176E62),
    ("column_sum", "v1_serial"): (0x9E6570AC, 0xC6BC9582, 0x55F08B0F, 0x2179A588),
    ("column_sum", "v2_two_stage"): (0xEFF6F2A5, 0xF76042E9, 0xB7549C96, 0x11C71197),
    ("column_sum", "v3_vector"): (0xEFF6F2A5, 0x3C0A2446, 0xBADC664A, 0x3440F4C0),
    ("bias_dropout_residual_backward", "cpu"): (0x02561FA4, 0xA3D9F72E, 0x2A07F4D2, 0xBB540D16),
    ("bias_dropout_residual_backward", "v1_separate"): (0xA29ADE36, 0x3C081CAA, 0x2BCC6156, 0x48E0E972),
    ("bias_dropout_residual_backward", "v2_fused"): (0xA29ADE36, 0x9874B547, 0x1828C747, 0xA20ECC18),
}


@pytest.mark.parametrize(
    ("op", "device", "rung"), [p for p in RUNGS if p.values[0] in ("column_sum", "bias_dropout_residual_backward")]
)
def test_sums_have_the_bits_they_always_had(op, device, rung):
    """On every device and in every version: how rows are shared among blocks must not depend on the machine."""
    for shape, golden in zip(GOLDEN_SHAPES, GOLDEN[op, rung], strict=True):
        x = mixed(*shape).to(device)
        if op == "column_sum":
            sums = step1_simple.column_sum(x, rung=rung)
        else:
            sums = step1_simple.bias_dropout_residual_backward(x, 0.5, RNG_STATE, rung=rung)[1]
        assert zlib.crc32(sums.cpu().numpy().tobytes()) == golden


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", ["scale/v4_vector", "bias_gelu/v3_vector"])
def test_vector_rungs_load_and_store_128_bits(source, tmp_path):
    here = pathlib.Path(__file__).parent
    includes = [f"-I{here.parent / 'common' / 'include'}", f"-I{here / 'include'}"]
    command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_80", "-ptx", "-DKF_BACKEND=gpu", *includes, "-o", "v.ptx"]
    subprocess.run([*command, str(here / "kernels" / f"{source}.cu")], check=True, cwd=tmp_path)
    kernels = re.split(r"\.entry ", (tmp_path / "v.ptx").read_text())[1:]
    vectorised = [
        k for k in kernels if re.search(r"ld\.global\S*\.v[24]\.", k) and re.search(r"st\.global\.v[24]\.", k)
    ]
    wide = [k for k in vectorised if re.search(r"ld\.global\S*\.(v4\.[bfu]32|v2\.[bfu]64)", k)]
    assert len(wide) == len(kernels) // 2  # for each type there is one kernel for vectors, and one for single elements


# ---- inputs that are unusual, and right ----


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "scale"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scale_keeps_infinity_nan_and_denormals(dtype, device, rung):
    info = torch.finfo(dtype)
    values = [INFINITY, -INFINITY, NAN, 0.0, -0.0, info.max, info.tiny, info.smallest_normal / 4, 1.0]
    x = torch.tensor(values, dtype=dtype, device=device)
    for factor in (2.0, 0.5, 0.0, INFINITY):
        torch.testing.assert_close(step1_simple.scale(x, factor, rung=rung), x * factor, rtol=0, atol=0, equal_nan=True)


GELUS = {
    "gelu": lambda x, **kwargs: step1_simple.gelu(x, **kwargs),
    "gelu_scale": lambda x, **kwargs: step1_simple.gelu_scale(x, 1.0, **kwargs),
    "bias_gelu": lambda x, **kwargs: step1_simple.bias_gelu(x, torch.zeros_like(x[0]), **kwargs),
}


@pytest.mark.parametrize(("op", "device", "rung"), [p for p in RUNGS if p.values[0] in GELUS])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_at_the_ends_of_the_range(dtype, approximate, op, device, rung):
    largest = torch.finfo(dtype).max / 4
    smallest = torch.finfo(dtype).smallest_normal / 4
    x = torch.tensor([[INFINITY, NAN, largest, -largest, smallest, -smallest, 0.0, 1.0]], dtype=dtype, device=device)
    want = [INFINITY, NAN, largest, 0.0, smallest / 2, -smallest / 2, 0.0, 0.8413]
    got = GELUS[op](x, approximate=approximate, rung=rung).cpu()
    expected = torch.tensor([want], dtype=torch.float64).to(dtype)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=0, equal_nan=True)


@pytest.mark.parametrize(("op", "device", "rung"), [p for p in RUNGS if p.values[0] in GELUS])
def test_gelu_of_minus_infinity_is_nan_as_in_pytorch(op, device, rung):
    x = torch.full((1, 8), -INFINITY, device=device)
    for approximate in ("tanh", "none"):
        assert F.gelu(x, approximate=approximate).isnan().all()
        assert GELUS[op](x, approximate=approximate, rung=rung).isnan().all()


@pytest.mark.parametrize(
    ("op", "device", "rung"), [p for p in RUNGS if p.values[0] in ("gelu_backward", "bias_gelu_backward")]
)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_slope_of_gelu_at_the_ends_of_the_range(dtype, approximate, op, device, rung):
    """0 and 1 far out, where x³ overflows; PyTorch gives NaN there for the tanh form."""
    largest = torch.finfo(dtype).max / 4
    x = torch.tensor([[INFINITY, -INFINITY, largest, -largest, NAN, 0.0, 30.0, -30.0]], dtype=dtype, device=device)
    one = torch.ones_like(x)
    if op == "gelu_backward":
        got = step1_simple.gelu_backward(one, x, approximate=approximate, rung=rung)
    else:
        got, _ = step1_simple.bias_gelu_backward(one, x, one[0] * 0, approximate=approximate, rung=rung)
    want = torch.tensor([[1.0, 0.0, 1.0, 0.0, NAN, 0.5, 1.0, 0.0]], dtype=dtype)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
def test_empty_tensors_give_empty_tensors_and_sums_of_0(op, device, rung):
    inputs = inputs_of(op, (2, 0, 8), torch.float32, device)
    with poisoned_allocations():  # or 0 might be what happened to lie there
        outputs = getattr(step1_simple, op)(*inputs, rung=rung)
    for output in as_tuple(outputs):
        assert output.tolist() == [0.0] * 8 if output.dim() == 1 else output.shape == (2, 0, 8)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_an_unknown_rung_is_refused_for_an_empty_tensor_too(op, device):
    for shape in ((2, 0, 8), (3, 8)):
        inputs = inputs_of(op, shape, torch.float32, device)
        for rung in ("v9", "", "V1_NAIVE", "auto "):
            with testing.raises(ValueError, f"{op}: `rung` must be 'auto' or one of", "'v1_", f"got '{rung}'"):
                getattr(step1_simple, op)(*inputs, rung=rung)


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
def test_views_of_any_strides_give_contiguous_results(op, device, rung):
    x = testing.randn((6, 10), torch.float32, device)
    views = [x.T.contiguous().T, x[::2], x[:, :1].expand(6, 10), x[0].expand(6, 10)]
    for view in views:
        inputs = OPS[op][1](view, lambda seed, shape: testing.randn((*shape, 2), torch.float32, device, seed)[..., 0])
        outputs = as_tuple(getattr(step1_simple, op)(*inputs, rung=rung))
        for output, want in zip(outputs, as_tuple(OPS[op][0](*inputs)), strict=True):
            assert output.is_contiguous()
            torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_a_named_rung_runs_where_its_tensor_lies(op, device):
    inputs = inputs_of(op, (3, 8), torch.float32, device)
    for rung in step1_simple.rungs(op, device):
        backend = "gpu" if device == "cuda" else "cpu" if rung == "cpu" else "emulated"
        before = step1_simple.launch_counts()
        getattr(step1_simple, op)(*inputs, rung=rung)
        after = step1_simple.launch_counts()
        assert {k: after[k] - before[k] for k in after} == {"cpu": 0, "emulated": 0, "gpu": 0} | {backend: 1}


# ---- page one ----


SIMPLE_KERNEL = pathlib.Path(__file__).with_name("simple_kernel.cu")


def run_simple_kernel(*arguments, program=SIMPLE_KERNEL):
    command = [sys.executable, "-m", "kernel_fusion", "simt", str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_simple_kernel_runs_under_emulation():
    ran = run_simple_kernel("1003")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    table, places = ran.stdout.split("expected\n")
    rows = [line.split() for line in places.splitlines()[:10]]
    assert [int(row[0]) for row in rows][::9] == [0, 1002]
    for _, x, got, expected in rows:
        assert got == expected
        assert abs(float(got) - 2.5 * float(x)) < 1e-3
    assert "all right" in ran.stdout
    blocks = [line.split()[:2] for line in table.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert blocks == [[str(threads), str(-(-1003 // threads))] for threads in (32, 64, 128, 256, 512, 1024)]


def test_simple_kernel_fails_where_the_kernel_is_wrong(tmp_path):
    broken = tmp_path / "simple_kernel.cu"
    broken.write_text(SIMPLE_KERNEL.read_text().replace("if (i < n) y", "if (i < n - 1) y"))
    ran = run_simple_kernel("1003", program=broken)
    assert ran.returncode == 1
    assert "WRONG" in ran.stdout


def test_simple_kernel_refuses_a_bad_n():
    ran = run_simple_kernel("0")
    assert ran.returncode == 1
    assert "n must be from 1 to 1000000000, got 0" in ran.stderr


if __name__ == "__main__":
    testing.main(__file__)
