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
import warnings
import zlib

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

import step1_simple  # not installed? pip install -e ..
from kernel_fusion import testing
from kernel_fusion.testing.accuracy import as_tuple, poisoned_allocations
from kernel_fusion.testing.philox import mask_and_factor, philox, random_numbers

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
NAN = float("nan")

ops = torch.ops.step1_simple


# Every op: tensors and arguments by shape and dtype, PyTorch's way, and shapes that are multiples of nothing.


def scaled(x, factor):
    return x * factor


def gelu(x, approximate="tanh"):
    return F.gelu(x, approximate=approximate)


def scaled_gelu(x, factor, approximate="tanh"):
    return F.gelu(x, approximate=approximate) * factor


def gelu_gradient(grad, x, factor=1.0, approximate="tanh"):
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate) * factor


def gelu_of_sum(x, bias, approximate="tanh"):
    return F.gelu(x + bias, approximate=approximate)


def gelu_of_sum_gradients(grad, x, bias, approximate="tanh"):
    grad_x = torch.ops.aten.gelu_backward(grad, x + bias, approximate=approximate)
    return grad_x, sum_of_rows(grad_x)


def sum_of_rows(x):
    return x.reshape(-1, x.shape[-1]).sum(0)


def residual_plus_dropout(x, bias, residual, p, rng_state):
    mask, factor = mask_and_factor(x.shape, p, rng_state)
    return torch.where(mask.to(x.device), (x + bias) * factor, 0) + residual


def dropout_gradients(grad, p, rng_state):
    mask, factor = mask_and_factor(grad.shape, p, rng_state)
    grad_x = torch.where(mask.to(grad.device), grad * factor, 0)
    return grad_x, sum_of_rows(grad_x)


RNG_STATE = torch.tensor([0x0123456789ABCDEF, 12])

OPS = {
    "scale": (scaled, lambda x, more: (x, -1.7)),
    "gelu": (gelu, lambda x, more: (x,)),
    "gelu_scale": (scaled_gelu, lambda x, more: (x, -1.7)),
    "gelu_backward": (gelu_gradient, lambda x, more: (more(1, x.shape), x)),
    "bias_gelu": (gelu_of_sum, lambda x, more: (x, more(1, x.shape[-1:]))),
    "bias_gelu_backward": (gelu_of_sum_gradients, lambda x, more: (more(2, x.shape), x, more(1, x.shape[-1:]))),
    "bias_dropout_residual": (
        residual_plus_dropout,
        lambda x, more: (x, more(1, x.shape[-1:]), more(2, x.shape), 0.3, RNG_STATE),
    ),
    "bias_dropout_residual_backward": (dropout_gradients, lambda x, more: (x, 0.3, RNG_STATE)),
    "column_sum": (sum_of_rows, lambda x, more: (x,)),
}
BY_ELEMENTS = ("scale", "gelu", "gelu_scale", "gelu_backward")  # ops that do not care about rows
WITH_GELU = {"gelu", "gelu_scale", "gelu_backward", "bias_gelu", "bias_gelu_backward"}
RUNGS = [
    pytest.param(op, *parameter.values, marks=parameter.marks, id=f"{op}-{parameter.id}")
    for op in OPS
    for parameter in testing.device_rungs("step1_simple", op)
]
SHAPES = [(1, 1), (31, 64), (33, 760), (127, 33), (2, 3, 768), (5, 1600), (1023, 2), (127,), (9, 1023), (3, 257)]


def inputs_of(op: str, shape, dtype: torch.dtype, device: str) -> tuple:
    """The positional arguments of `op`."""
    x = testing.randn(shape, dtype, device, scale=2.0)
    return OPS[op][1](x, lambda seed, shape: testing.randn(shape, dtype, device, seed=seed))


def functions_of(op: str) -> dict:
    """The reference and eager PyTorch, for check_contract."""
    return {"reference": OPS[op][0], "eager": OPS[op][0]}


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


@pytest.mark.parametrize(
    ("op", "device", "rung"), [p for p in RUNGS if p.values[0] in ("scale", "gelu", "gelu_scale", "gelu_backward")]
)
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
    inputs = inputs_of(op, (1024, 3072), dtype, device)
    testing.check_contract(step1_simple, op, inputs, "auto", layouts=False, **functions_of(op))


FASTEST = {
    "scale": "v4_vector",
    "gelu": "v3_exp",
    "gelu_scale": "v3_vector",
    "gelu_backward": "v2_vector",
    "bias_gelu": "v5_any_width",
    "bias_gelu_backward": "v2_fused",
    "bias_dropout_residual": "v4_any_width",
    "bias_dropout_residual_backward": "v2_fused",
    "column_sum": "v3_vector",
}


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
    assert step1_simple._C.choose(op, "auto", sizes, torch.float16) == FASTEST[op]


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
    inputs = {
        "scale": (x, -1.7),
        "gelu": (x,),
        "gelu_scale": (x, -1.7),
        "gelu_backward": (x, x),
        "bias_gelu": (x, bias),
        "bias_gelu_backward": (x, x, bias),
        "bias_dropout_residual": (x, bias, x, 0.3, RNG_STATE),
        "bias_dropout_residual_backward": (x, 0.3, RNG_STATE),
        "column_sum": (x,),
    }[op]
    outs = {}
    for argument in getattr(ops, op).out._schema.arguments:
        if argument.alias_info is not None:
            of_columns = argument.name == "grad_bias" or op == "column_sum"
            outs[argument.name] = testing.lazy_memory(width if of_columns else rows * width, x.dtype, device)
            outs[argument.name] = outs[argument.name].view(width if of_columns else (rows, width))
    as_rows = tuple(v.view(rows, width) if v is x else v for v in inputs)
    getattr(ops, op).out(*as_rows, rung=rung, **outs)

    # The same for the last elements alone. Sums over rows are the last row: the others are zeros.
    here = functools.partial(mask_and_factor, first=rows * width - last)
    monkeypatch.setitem(globals(), "mask_and_factor", here)
    end = tuple(v[-last:].double() if v is x or v is bias else v for v in inputs)
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
        if output.dim() == 1:
            assert output.tolist() == [0.0] * 8
        else:
            assert output.shape == (2, 0, 8)


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
        outputs = getattr(step1_simple, op)(*inputs, rung=rung)
        expected = OPS[op][0](*inputs)
        pairs = zip(outputs, expected, strict=True) if isinstance(outputs, tuple) else [(outputs, expected)]
        for output, want in pairs:
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


# ---- dropout: its random numbers ----


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((-1, -1), -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x85A308D3243F6A88, 0x0370734413198A2E),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_philox_we_compare_with_has_the_published_answers(counter, key, words):
    """From the test vectors of Random123, the paper's own library."""

    def signed(number):
        return number - (1 << 64) if number >= 1 << 63 else number

    got = philox(signed(key), signed(counter[0]), torch.tensor([signed(counter[1])]))
    assert tuple(int(word) for word in got) == words


DROPOUT_RUNGS = testing.device_rungs("step1_simple", "bias_dropout_residual")
DROPOUT_BACKWARD_RUNGS = testing.device_rungs("step1_simple", "bias_dropout_residual_backward")


def kept_elements(shape, p, rng_state, device, rung="auto", dtype=torch.float32):
    """The mask, read off the result for x of ones without bias and residual."""
    one, zero = torch.ones(shape, device=device, dtype=dtype), torch.zeros(shape, device=device, dtype=dtype)
    bias = torch.zeros(shape[-1], device=device, dtype=dtype)
    return (step1_simple.bias_dropout_residual(one, bias, zero, p, rng_state, rung=rung) != 0).cpu()


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rng_state", [(0, 0), (1, 4), (-1, 4 * (1 << 40)), ((1 << 62) + 5, 8)], ids=str)
def test_the_mask_is_philoxs(rng_state, dtype, device, rung):
    rng_state = torch.tensor(rng_state)
    for shape in ((5, 64), (7, 33)):
        expected = random_numbers(shape, rng_state) >= round(65536 * 0.3)
        assert torch.equal(kept_elements(shape, 0.3, rng_state, device, rung, dtype), expected)


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_the_mask_is_philoxs_after_half_a_million_elements_too(device, rung):
    shape = (513, 1030)  # the counter's 17th bit counts eights from 2¹⁹ elements on
    mask = kept_elements(shape, 0.3, RNG_STATE, device, rung, torch.float16)
    assert torch.equal(mask, random_numbers(shape, RNG_STATE) >= round(65536 * 0.3))


def test_the_mask_is_philoxs_after_two_million_elements_in_plain_cpp():
    shape = (2100, 1030)
    mask = kept_elements(shape, 0.3, RNG_STATE, "cpu", "cpu", torch.float16)
    assert torch.equal(mask, random_numbers(shape, RNG_STATE) >= round(65536 * 0.3))


@pytest.mark.parametrize("device", testing.DEVICES)
def test_the_seed_has_all_64_bits_of_pytorchs_generator(device):
    x = torch.ones(1, device=device)
    seed = 0x0123456789ABCDEF
    torch.manual_seed(seed)
    if device == "cuda":
        assert step1_simple.draw_rng_state(x)[0].item() == seed
    else:
        drawn = step1_simple.draw_rng_state(x)[0].item()
        torch.manual_seed(seed)
        assert drawn == torch.empty(1, dtype=torch.int64).random_(-(1 << 63), None).item()


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_every_bit_of_seed_and_offset_counts(device, rung):
    masks = set()
    for bit in range(64):
        for rng_state in ([1 << bit, 0] if bit < 63 else [-(1 << 63), 0], [0, 4 << bit] if bit < 61 else None):
            if rng_state is not None:
                mask = kept_elements((2, 64), 0.5, torch.tensor(rng_state), device, rung)
                masks.add(tuple(mask.flatten().tolist()))
    assert len(masks) == 64 + 61


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_the_threshold_is_the_nearest_number_and_is_itself_kept(device, rung):
    numbers = random_numbers((4, 64), RNG_STATE)
    for number in numbers.flatten()[[0, 77, 255]].tolist():
        for beyond in (0, 0.4, 0.6):
            kept = kept_elements((4, 64), (number + beyond) / 65536, RNG_STATE, device, rung)
            assert torch.equal(kept, numbers >= (number if beyond < 0.5 else number + 1))


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_the_mask_does_not_depend_on_where_the_state_lies(device, rung):
    on_cpu = kept_elements((9, 65), 0.5, RNG_STATE, device, rung)
    assert torch.equal(kept_elements((9, 65), 0.5, RNG_STATE.to(device), device, rung), on_cpu)
    assert torch.equal(kept_elements((9, 65), 0.5, RNG_STATE.repeat_interleave(2)[::2], device, rung), on_cpu)


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_part_and_the_expected_sum(p, device, rung):
    rows, width = (64, 1024) if rung not in ("auto", "cpu") and device == "cpu" else (1024, 1024)
    one, zero = torch.ones(rows, width, device=device), torch.zeros(rows, width, device=device)
    y = step1_simple.bias_dropout_residual(one, zero[0], zero, p, RNG_STATE, rung=rung)
    kept = (y != 0).double()
    spread = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean().item() - (1 - p)) < 5 * spread
    assert abs(y.double().mean().item() - 1) < 5 * spread / (1 - p)
    # Neighbours, in a row and in a column, are kept independently of each other.
    for both in (kept[:, 1:] * kept[:, :-1], kept[1:] * kept[:-1]):
        assert abs(both.mean().item() - (1 - p) ** 2) < 5 * math.sqrt(2 * (1 - p) / kept.numel())


@pytest.mark.parametrize(("device", "rung"), DROPOUT_RUNGS)
def test_dropout_of_nothing_and_of_all(device, rung):
    x, residual = (testing.randn((3, 65), torch.float32, device, seed=seed) for seed in (0, 1))
    x[0, 0], x[1, 1] = INFINITY, NAN
    bias = torch.zeros(65, device=device)
    assert torch.equal(step1_simple.bias_dropout_residual(x, bias, residual, 1.0, RNG_STATE, rung=rung), residual)
    everything = step1_simple.bias_dropout_residual(x, bias, residual, 0.0, RNG_STATE, rung=rung)
    torch.testing.assert_close(everything, x + residual, rtol=0, atol=0, equal_nan=True)
    for rng_state in (None, RNG_STATE):  # a state that is given does not switch dropout on again
        evaluated = step1_simple.bias_dropout_residual(x, bias, residual, 0.7, rng_state, training=False, rung=rung)
        torch.testing.assert_close(evaluated, everything, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "rung"), DROPOUT_BACKWARD_RUNGS)
@pytest.mark.parametrize("shape", [(5, 64), (7, 33)], ids=str)
def test_the_backward_drops_what_the_forward_dropped(shape, device, rung):
    kept = kept_elements(shape, 0.4, RNG_STATE, device)
    grad_x, grad_bias = step1_simple.bias_dropout_residual_backward(
        torch.ones(shape, device=device), 0.4, RNG_STATE, rung=rung
    )
    assert torch.equal((grad_x != 0).cpu(), kept)
    torch.testing.assert_close(grad_bias, grad_x.sum(0))


@pytest.mark.parametrize(("device", "rung"), DROPOUT_BACKWARD_RUNGS)
def test_what_is_dropped_has_a_gradient_of_0_whatever_reaches_it(device, rung):
    for shape in ((5, 64), (7, 33)):
        kept = kept_elements(shape, 0.4, RNG_STATE, device).to(device)
        ones = torch.ones(shape, device=device)
        want = step1_simple.bias_dropout_residual_backward(ones, 0.4, RNG_STATE, rung=rung)
        for value in (INFINITY, NAN):
            got = step1_simple.bias_dropout_residual_backward(torch.where(kept, ones, value), 0.4, RNG_STATE, rung=rung)
            assert all(map(torch.equal, got, want))


def dropout_of_ones(device, p=0.5, shape=(4, 64)):
    one, zero = torch.ones(shape, device=device), torch.zeros(shape, device=device)
    return step1_simple.bias_dropout_residual(one, zero[0], zero, p)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_manual_seed_repeats_dropout_and_calls_differ(device):
    torch.manual_seed(7)
    first, second = dropout_of_ones(device), dropout_of_ones(device)
    torch.manual_seed(7)
    assert torch.equal(dropout_of_ones(device), first)
    assert torch.equal(dropout_of_ones(device), second)
    torch.manual_seed(8)
    assert not torch.equal(dropout_of_ones(device), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_tenth_is_dropped_where_p_is_not_given(device):
    one, zero = torch.ones(64, 64, device=device), torch.zeros(64, 64, device=device)
    torch.manual_seed(7)
    by_default = step1_simple.bias_dropout_residual(one, zero[0], zero)
    torch.manual_seed(7)
    assert torch.equal(by_default, dropout_of_ones(device, p=0.1, shape=(64, 64)))


@pytest.mark.parametrize("device", testing.DEVICES)
def test_dropout_moves_pytorchs_generator_on_and_evaluation_does_not(device):
    def next_number():
        return torch.rand(1, device=device).item()

    torch.manual_seed(7)
    untouched = next_number()
    torch.manual_seed(7)
    step1_simple.bias_dropout_residual(*(torch.ones(s, device=device) for s in ((2, 3), (3,), (2, 3))), training=False)
    assert next_number() == untouched
    torch.manual_seed(7)
    dropout_of_ones(device)
    assert next_number() != untouched


@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_saved_generator_state_repeats_dropout(device):
    module = torch.cuda if device == "cuda" else torch
    rng_state = module.get_rng_state()
    first = dropout_of_ones(device)
    module.set_rng_state(rng_state)
    assert torch.equal(dropout_of_ones(device), first)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_sees_the_same_mask_again(reentrant, device):
    torch.manual_seed(7)
    x = testing.randn((6, 64), torch.float32, device).requires_grad_()
    bias = torch.zeros(64, device=device, requires_grad=True)

    def layer(x):
        return step1_simple.bias_dropout_residual(step1_simple.gelu(x), bias, x, 0.5)

    out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    added = (out - x).detach()
    kept = added != 0
    out.sum().backward()
    torch.testing.assert_close(bias.grad, kept.sum(0) * 2.0)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_compiled_dropout_draws_anew_for_each_call_and_agrees_with_its_gradient(device):
    backend = "inductor" if device == "cuda" else "aot_eager"

    def two(x, bias):
        once = step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)
        return once, step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)

    torch.compiler.reset()
    compiled = torch.compile(two, fullgraph=True, backend=backend)
    x = torch.ones(8, 64, device=device, requires_grad=True)
    bias = torch.zeros(64, device=device, requires_grad=True)
    masks = []
    for _ in range(2):
        for out in compiled(x, bias):
            (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
            assert torch.equal(gradient, (out != 0) * 2.0)
            masks.append(out.detach() != 0)
    for index, mask in enumerate(masks):
        assert abs(mask.float().mean().item() - 0.5) < 0.15
        assert not any(torch.equal(mask, other) for other in masks[:index])


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_each_replay_of_a_cuda_graph_draws_anew(device):
    x = torch.ones(16, 64, device=device, requires_grad=True)
    bias = torch.zeros(64, device=device, requires_grad=True)

    def step():
        once = step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)
        twice = step1_simple.bias_dropout_residual(x, bias, torch.zeros_like(x), 0.5)
        return once, twice, *torch.autograd.grad((once * 3 + twice).sum(), x)

    graph, (once, twice, gradient) = testing.capture(step)
    seen = []
    torch.manual_seed(7)
    for _ in range(3):
        graph.replay()
        assert torch.equal(gradient, once * 3 + twice)  # the backward in the graph sees the masks of this replay
        seen += [once.detach().clone(), twice.detach().clone()]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])
    torch.manual_seed(7)
    for replay in range(3):
        graph.replay()
        assert torch.equal(once, seen[2 * replay])
        assert torch.equal(twice, seen[2 * replay + 1])


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_a_state_for_the_cpu_is_refused_while_a_cuda_graph_is_captured(device):
    x = torch.ones(2, 8, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with testing.raises(ValueError, "draw_rng_state: `on_device` must be True while a CUDA graph is captured"):
            step1_simple.draw_rng_state(x)
        x * 2


# ---- gradients ----


def differentiable(op, rung, *, dtype=torch.float64, p=0.3):
    """`op` as a function of tensors alone, and those tensors."""
    x = testing.randn((2, 3, 5), dtype, "cpu")
    bias, residual = testing.randn((5,), dtype, "cpu", 1), testing.randn((2, 3, 5), dtype, "cpu", 2)
    functions = {
        "scale": (lambda x: step1_simple.scale(x, -1.7, rung=rung), (x,)),
        "gelu": (lambda x, **k: step1_simple.gelu(x, rung=rung, **k), (x,)),
        "gelu_scale": (lambda x, **k: step1_simple.gelu_scale(x, -1.7, rung=rung, **k), (x,)),
        "gelu_backward": (lambda g, x, **k: step1_simple.gelu_backward(g, x, rung=rung, **k), (residual, x)),
        "bias_gelu": (lambda x, b, **k: step1_simple.bias_gelu(x, b, rung=rung, **k), (x, bias)),
        "bias_gelu_backward": (
            lambda g, x, b, **k: step1_simple.bias_gelu_backward(g, x, b, rung=rung, **k),
            (residual, x, bias),
        ),
        "bias_dropout_residual": (
            lambda x, b, r: step1_simple.bias_dropout_residual(x, b, r, p, RNG_STATE, rung=rung),
            (x, bias, residual),
        ),
        "bias_dropout_residual_backward": (
            lambda g: step1_simple.bias_dropout_residual_backward(g, p, RNG_STATE, rung=rung),
            (x,),
        ),
        "column_sum": (lambda x: step1_simple.column_sum(x, rung=rung), (x,)),
    }
    return functions[op]


FORWARD = [op for op in OPS if not op.endswith("_backward")]
REFERENCES = {
    "scale": lambda x: scaled(x, -1.7),
    "gelu_scale": lambda x, **k: scaled_gelu(x, -1.7, **k),
    "bias_dropout_residual": lambda x, b, r: residual_plus_dropout(x, b, r, 0.7, RNG_STATE),
}  # where the formula has more arguments than tensors


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
def test_gradients_are_those_of_finite_differences(op, device, rung):
    function, inputs = differentiable(op, rung)
    for keywords in [{"approximate": "tanh"}, {"approximate": "none"}] if op in WITH_GELU else [{}]:
        call = functools.partial(function, **keywords)
        inputs = tuple(t.to(device).detach().requires_grad_() for t in inputs)
        assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", FORWARD)
def test_second_gradients_are_those_of_finite_differences(op, device):
    function, inputs = differentiable(op, "auto", p=0.7)
    for keywords in [{"approximate": "tanh"}, {"approximate": "none"}] if op in WITH_GELU else [{}]:
        call = functools.partial(function, **keywords)
        inputs = tuple(t.to(device).detach().requires_grad_() for t in inputs)
        assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("op", FORWARD)
def test_second_gradients_are_as_exact_as_the_dtype_allows(op, dtype, device):
    function, inputs = differentiable(op, "auto", dtype=dtype, p=0.7)
    for keywords in [{"approximate": "tanh"}, {"approximate": "none"}] if op in WITH_GELU else [{}]:
        testing.check_second_gradients(
            functools.partial(function, **keywords),
            functools.partial(REFERENCES.get(op, OPS[op][0]), **keywords),
            tuple(t.to(device) for t in inputs),
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_second_gradient_of_a_bias_is_rounded_once(dtype):
    """Rows that nearly cancel: had each been rounded, little of their sum would be right."""
    x = torch.tensor([[0.3], [0.305]]).repeat(500, 1).to(dtype)
    grad = torch.tensor([[0.7], [-0.7]]).repeat(500, 1).to(dtype)
    bias = torch.full((1,), 0.1, dtype=dtype, requires_grad=True)
    (got,) = torch.autograd.grad(step1_simple.bias_gelu_backward(grad, x, bias)[0], bias, torch.ones_like(x))
    wide = bias.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(gelu_of_sum_gradients(grad.double(), x.double(), wide)[0].sum(), wide)
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_second_gradients_far_out_are_0(approximate):
    x = torch.tensor([1e8, -1e8, 1e20, -1e20, 30.0], requires_grad=True)
    (slope,) = torch.autograd.grad(step1_simple.gelu(x, approximate=approximate).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    assert curvature.abs().max() < 1e-30
    bias = torch.zeros(5, requires_grad=True)
    grad_x, _ = torch.autograd.grad(
        step1_simple.bias_gelu(x[None], bias, approximate=approximate).sum(), (x, bias), create_graph=True
    )
    (curvature,) = torch.autograd.grad(grad_x.sum(), x)
    assert curvature.abs().max() < 1e-30


@pytest.mark.parametrize("device", testing.DEVICES)
def test_frozen_inputs_get_no_gradient(device):
    _, tensors = differentiable("bias_dropout_residual", "auto")
    x, bias, residual = (t.to(device) for t in tensors)
    for frozen in range(3):
        inputs = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, bias, residual))]
        assert torch.autograd.gradcheck(lambda *t: step1_simple.bias_dropout_residual(*t, 0.3, RNG_STATE), inputs)
        if frozen < 2:
            assert torch.autograd.gradcheck(step1_simple.bias_gelu, inputs[:2])


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_each_input_alone_gets_the_gradient_that_it_gets_beside_the_others(op, device):
    function, inputs = differentiable(op, "auto")
    testing.check_each_input_alone(function, tuple(t.to(device) for t in inputs))


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused(op):
    testing.check_tangents_are_refused(*differentiable(op, "auto"))


BACKWARD = {
    "scale": "scale",
    "gelu": "gelu_backward",
    "gelu_scale": "gelu_backward",
    "bias_gelu": "bias_gelu_backward",
    "bias_dropout_residual": "bias_dropout_residual_backward",
    "bias_dropout_residual_backward": "bias_dropout_residual_backward",
}  # the op of this step that an op's backward calls; the others call PyTorch's alone


class Calls(TorchDispatchMode):
    """This step's ops that run meanwhile, each with its rung."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "step1_simple":
            self.made.append((function._opname, (kwargs or {}).get("rung", "auto")))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("op", "device", "rung"), RUNGS)
def test_a_backward_runs_by_auto_and_that_of_scale_by_its_rung(op, device, rung):
    function, inputs = differentiable(op, rung, dtype=torch.float32)
    inputs = [t.to(device).requires_grad_() for t in inputs]
    outputs = as_tuple(function(*inputs))
    grads = [torch.ones_like(out) for out in outputs]
    before = step1_simple.launch_counts()
    with Calls() as calls:
        torch.autograd.grad(outputs, inputs, grads)
    after = step1_simple.launch_counts()
    taken = rung if op == "scale" else "auto"
    backend = "gpu" if device == "cuda" else "cpu" if taken in ("auto", "cpu") else "emulated"
    launches = {backend: 1} if op in BACKWARD else {}
    assert calls.made == ([(BACKWARD[op], taken)] if op in BACKWARD else [])
    assert {k: after[k] - before[k] for k in after if after[k] != before[k]} == launches


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_gradients_are_as_exact_as_the_dtype_allows(dtype, device):
    """4096 rows: summed in bfloat16, the bias's gradient would stop growing long before the end."""
    x = testing.randn((4096, 8), dtype, device).requires_grad_()
    bias = testing.randn((8,), dtype, device, seed=1).requires_grad_()
    grad = testing.randn((4096, 8), dtype, device, seed=2).abs()
    step1_simple.bias_gelu(x, bias).backward(grad)

    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    gelu_of_sum(*wide).backward(grad.double())
    for got, want in zip((x.grad, bias.grad), (wide[0].grad, wide[1].grad), strict=True):
        assert got.dtype == dtype
        rounding = (want - want.to(dtype).double()).abs().max()
        assert (got.double() - want).abs().max() <= 1.01 * rounding + 1e-5 * want.abs().max()


def test_a_gradient_of_stride_0_is_taken():
    x = testing.randn((3, 5), torch.float32, "cpu").requires_grad_()
    bias = torch.zeros(5, requires_grad=True)
    (step1_simple.bias_gelu(x, bias) + step1_simple.scale(x, 2.0)).sum().backward()
    expected = x.detach().requires_grad_()
    (gelu_of_sum(expected, bias.detach()) + 2.0 * expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


# ---- as torch sees them ----


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_ops_are_registered_as_torch_wants_it(op, device):
    inputs = inputs_of(op, (4, 6), torch.float32, device)
    for rung in ("auto", step1_simple.rungs(op, device)[-1]):
        for approximate in ("tanh", "none") if op in WITH_GELU else (None,):
            keywords = {"rung": rung} | ({"approximate": approximate} if approximate else {})
            testing.check_op(step1_simple, op, inputs, keywords)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_ops_on_transposed_tensors_are_registered_as_torch_wants_it(op, device):
    inputs = inputs_of(op, (3, 4, 6), torch.bfloat16, device)  # and in another dtype than the most usual
    testing.check_op(step1_simple, op, tuple(map(testing.transposed, inputs)))


def test_the_state_of_dropout_is_registered_as_torch_wants_it():
    assert step1_simple.draw_rng_state(torch.ones(3, device="meta"), on_device=True).device.type == "meta"
    assert step1_simple.draw_rng_state(torch.ones(3, device="meta")).device.type == "cpu"
    tests = ("test_schema", "test_faketensor")  # the others run it twice and expect the same
    torch.library.opcheck(ops.draw_rng_state.default, (torch.ones(3),), {"on_device": False}, test_utils=tests)


def test_gradients_under_torch_compile():
    def loss(x, bias, residual):
        hidden = step1_simple.scale(step1_simple.bias_gelu(x, bias), 2.0)
        return step1_simple.bias_dropout_residual(hidden, bias, residual, 0.3, RNG_STATE).sum()

    inputs = [testing.randn(shape, torch.float32, "cpu").requires_grad_() for shape in ((4, 6), (6,), (4, 6))]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for got, want in zip(compiled, eager, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_casts_bias_gelu_like_a_linear_layer(dtype, device):
    x = testing.randn((4, 6), torch.float32, device)
    bias = torch.nn.Parameter(testing.randn((6,), torch.float32, device, seed=1))
    with torch.autocast(device, dtype):
        from_wide = step1_simple.bias_gelu(x, bias)
        from_half = step1_simple.bias_gelu(x.to(dtype), bias)
        exact = step1_simple.bias_gelu(x.double(), bias.double())
    assert from_wide.dtype == from_half.dtype == dtype
    assert exact.dtype == torch.float64  # autocast leaves float64 alone, here too
    torch.testing.assert_close(from_wide, step1_simple.bias_gelu(x.to(dtype), bias.to(dtype)), rtol=0, atol=0)
    from_half.sum().backward()
    assert bias.grad.dtype == torch.float32


@pytest.mark.parametrize("device", testing.DEVICES)
def test_autocast_adds_in_the_widest_dtype_of_dropouts_inputs(device):
    x = testing.randn((4, 6), torch.bfloat16, device)
    bias = torch.nn.Parameter(testing.randn((6,), torch.float32, device, seed=1))
    residual = testing.randn((4, 6), torch.float32, device, seed=2)
    with torch.autocast(device, torch.bfloat16):
        mixed = step1_simple.bias_dropout_residual(x, bias, residual, 0.3, RNG_STATE)
        half = step1_simple.bias_dropout_residual(x, bias.to(x.dtype), residual.to(x.dtype), 0.3, RNG_STATE)
    assert mixed.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    expected = step1_simple.bias_dropout_residual(x.float(), bias, residual, 0.3, RNG_STATE)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=0)
    mixed.sum().backward()
    assert bias.grad.dtype == torch.float32
    with torch.autocast(device, torch.bfloat16):
        with testing.raises(TypeError, "bias_dropout_residual: `bias` must be float32, float16, bfloat16", "got int64"):
            step1_simple.bias_dropout_residual(
                x, torch.ones(6, device=device, dtype=torch.int64), residual, 0.3, RNG_STATE
            )


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("wide", range(3), ids=["x", "bias", "residual"])
@pytest.mark.parametrize(
    ("narrow", "widest"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_autocast_finds_the_widest_dtype_wherever_it_is(narrow, widest, wide, device):
    shapes = ((4, 6), (6,), (4, 6))
    tensors = [testing.randn(shape, narrow, device, seed) for seed, shape in enumerate(shapes)]
    tensors[wide] = testing.randn(shapes[wide], widest, device, wide)
    with torch.autocast(device, torch.bfloat16):
        got = step1_simple.bias_dropout_residual(*tensors, 0.3, RNG_STATE)
    assert torch.equal(got, step1_simple.bias_dropout_residual(*(t.to(widest) for t in tensors), 0.3, RNG_STATE))
    assert got.dtype == widest


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("wide", range(2), ids=["x", "bias"])
def test_autocast_casts_each_of_bias_gelus_tensors(wide, device):
    tensors = [testing.randn((4, 6), torch.bfloat16, device), testing.randn((6,), torch.bfloat16, device, 1)]
    want = step1_simple.bias_gelu(*tensors)
    tensors[wide] = tensors[wide].float()
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(step1_simple.bias_gelu(*tensors), want)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_autocast_leaves_scale_and_gelu_alone(device):
    x = torch.ones(4, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert step1_simple.scale(x, 2.0).dtype == (x * 2.0).dtype == torch.float32
        assert step1_simple.gelu(x).dtype == F.gelu(x).dtype == torch.float32


def test_autocast_under_torch_compile():
    def function(x, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return step1_simple.bias_gelu(x, bias)

    x, bias = testing.randn((4, 6), torch.float32, "cpu"), torch.zeros(6)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x, bias)
    torch.testing.assert_close(compiled, function(x, bias), rtol=0, atol=0)


@pytest.mark.parametrize("overload", testing.writing_overloads("step1_simple"), ids=str)
def test_what_an_op_writes_is_known_to_autograd(overload):
    testing.check_writes(overload)


# ---- the lesson of the first binding ----


def test_a_plain_pybind_function_breaks_the_graph():
    def function(x):
        return step1_simple.scale_by_pybind(x + 1, 2.0) + 1

    x = torch.ones(4)
    assert function(x).tolist() == [5.0] * 4  # in eager mode nothing is wrong
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about the function it cannot trace
        assert torch._dynamo.explain(function)(x).graph_break_count == 1
        with testing.raises(torch._dynamo.exc.Unsupported, "scale_by_pybind"):
            torch.compile(function, fullgraph=True, backend="eager")(x)


def test_a_registered_op_does_not_break_the_graph():
    def function(x):
        return step1_simple.scale(x + 1, 2.0) + 1

    x = torch.ones(4)
    assert torch._dynamo.explain(function)(x).graph_break_count == 0
    assert torch.compile(function, fullgraph=True, backend="eager")(x).tolist() == [5.0] * 4


def test_a_plain_pybind_function_loses_the_gradient():
    x = torch.ones(4, requires_grad=True)
    assert not step1_simple.scale_by_pybind(x, 2.0).requires_grad
    assert step1_simple.scale(x, 2.0).requires_grad


# ---- bad input ----


@pytest.mark.parametrize("device", testing.DEVICES)
def test_scale_refuses(device):
    x = torch.ones(2, 3, device=device)
    with testing.raises(TypeError, "scale: `x` must be float32, float16, bfloat16 or float64, got int32"):
        step1_simple.scale(x.int(), 2.0)
    with testing.raises(ValueError, "scale: `rung` must be 'auto' or one of", "'v2_naive', 'v3_grid_stride'", "'v9'"):
        step1_simple.scale(x, 2.0, rung="v9")
    with testing.raises(RuntimeError, "'factor'", "str"):
        step1_simple.scale(x, "2.0")
    with testing.raises(TypeError, "scale: `out` must have the dtype of `x` (float32), got float64"):
        ops.scale.out(x, 2.0, out=torch.empty(2, 3, device=device, dtype=torch.float64))
    with testing.raises(ValueError, "scale: `out` must have shape (2, 3), got (3,)"):
        ops.scale.out(x, 2.0, out=torch.empty(3, device=device))
    with testing.raises(ValueError, "scale: `out` must be contiguous"):
        ops.scale.out(x, 2.0, out=torch.empty(3, 2, device=device).T)
    with testing.raises(ValueError, "scale: `out` must not share memory with `x`"):
        ops.scale.out(x, 2.0, out=x)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_an_out_of_another_shape_or_dtype_is_refused(op, device):
    inputs = inputs_of(op, (2, 3), torch.float32, device)
    call = getattr(ops, op).out
    names = [a.name for a in call._schema.arguments if a.alias_info is not None]
    outs = dict(zip(names, as_tuple(getattr(step1_simple, op)(*inputs)), strict=True))
    for name, out in outs.items():
        with testing.raises(ValueError, f"{op}: `{name}` must have shape {tuple(out.shape)}, got (2,)"):
            call(*inputs, **outs | {name: out.new_empty(2)})
        with testing.raises(TypeError, f"{op}: `{name}` must have the dtype of", "(float32), got float16"):
            call(*inputs, **outs | {name: out.half()})


def calls_with_rows():
    """For each op that has rows: itself as a function of x and bias, and what it calls them."""
    return {
        "bias_gelu": ("x", lambda x, bias: step1_simple.bias_gelu(x, bias)),
        "bias_gelu_backward": ("grad", lambda x, bias: step1_simple.bias_gelu_backward(x, x, bias)),
        "bias_dropout_residual": ("x", lambda x, bias: step1_simple.bias_dropout_residual(x, bias, x, 0.1, RNG_STATE)),
        "bias_dropout_residual_backward": (
            "grad",
            lambda x, bias: step1_simple.bias_dropout_residual_backward(x, 0.1, RNG_STATE),
        ),
        "column_sum": ("x", lambda x, bias: step1_simple.column_sum(x)),
    }


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@pytest.mark.parametrize("op", calls_with_rows())
def test_ops_with_rows_refuse(op, device):
    name, call = calls_with_rows()[op]
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with testing.raises(TypeError, f"{op}: `{name}` must be float32, float16, bfloat16 or float64, got int64"):
        call(x.long(), bias)
    with testing.raises(ValueError, f"{op}: `{name}` must have at least 1 dimension, got 0"):
        call(x[0, 0], bias)
    with testing.raises(ValueError, f"{op}: the last dimension of `{name}` must not be 0, got shape (2, 0)"):
        call(x[:, :0], bias[:0])


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
@pytest.mark.parametrize("op", ["bias_gelu", "bias_gelu_backward", "bias_dropout_residual"])
def test_a_wrong_bias_is_refused(op, device):
    name, call = calls_with_rows()[op]
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with testing.raises(TypeError, f"{op}: `bias` must have the dtype of `{name}` (float32), got float16"):
        call(x, bias.half())
    with testing.raises(ValueError, f"{op}: `bias` must have shape (3,), got (2,)"):
        call(x, bias[:2])
    with testing.raises(ValueError, f"{op}: `bias` must have shape (3,), got (1, 3)"):
        call(x, bias[None])
    other = "meta" if device != "meta" else "cpu"
    with testing.raises(ValueError, f"{op}: `bias` must be on the device of `{name}`", f"got {other}"):
        call(x, bias.to(other) if other == "meta" else torch.ones(3))


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_an_unknown_approximation_is_refused(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    calls = {
        "gelu": lambda a: step1_simple.gelu(x, approximate=a),
        "gelu_scale": lambda a: step1_simple.gelu_scale(x, 2.0, approximate=a),
        "gelu_backward": lambda a: step1_simple.gelu_backward(x, x, approximate=a),
        "bias_gelu": lambda a: step1_simple.bias_gelu(x, bias, approximate=a),
        "bias_gelu_backward": lambda a: step1_simple.bias_gelu_backward(x, x, bias, approximate=a),
    }
    for op, call in calls.items():
        with testing.raises(ValueError, f"{op}: `approximate` must be 'tanh' or 'none', got 'erf'"):
            call("erf")


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_tensors_that_do_not_match_are_refused(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with testing.raises(ValueError, "gelu_backward: `x` must have shape (2, 3), got (3,)"):
        step1_simple.gelu_backward(x, bias)
    with testing.raises(TypeError, "gelu_backward: `x` must have the dtype of `grad` (float32), got float64"):
        step1_simple.gelu_backward(x, x.double())
    with testing.raises(ValueError, "bias_gelu_backward: `x` must have shape (2, 3), got (1, 3)"):
        step1_simple.bias_gelu_backward(x, x[:1], bias)
    with testing.raises(ValueError, "bias_dropout_residual: `residual` must have shape (2, 3), got (3,)"):
        step1_simple.bias_dropout_residual(x, bias, bias, 0.1, RNG_STATE)
    with testing.raises(TypeError, "bias_dropout_residual: `residual` must have the dtype of `x`", "got float16"):
        step1_simple.bias_dropout_residual(x, bias, x.half(), 0.1, RNG_STATE)
    with testing.raises(TypeError, "bias_gelu_backward: `x` must have the dtype of `grad` (float32), got float16"):
        step1_simple.bias_gelu_backward(x, x.half(), bias)


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_dropout_refuses(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    calls = {
        "bias_dropout_residual": lambda p, rng_state: step1_simple.bias_dropout_residual(x, bias, x, p, rng_state),
        "bias_dropout_residual_backward": lambda p, rng_state: step1_simple.bias_dropout_residual_backward(
            x, p, rng_state
        ),
    }
    for op, call in calls.items():
        for p in (-0.1, 1.5, NAN):
            with testing.raises(ValueError, f"{op}: `dropout_p` must be from 0 to 1, got {p}"):
                call(p, RNG_STATE)
        with testing.raises(TypeError, f"{op}: `rng_state` must be int64, got int32"):
            call(0.1, RNG_STATE.int())
        with testing.raises(ValueError, f"{op}: `rng_state` must have shape (2,), got (3,)"):
            call(0.1, torch.zeros(3, dtype=torch.int64))
        if op == "bias_dropout_residual":
            with testing.raises(ValueError, f"{op}: `dropout_p` must be from 0 to 1, got 5"):
                step1_simple.bias_dropout_residual(x, bias, x, 5, training=False)
        if device == "cpu":
            with testing.raises(ValueError, f"{op}: `rng_state` must be on the CPU or on the tensors' device (cpu)"):
                call(0.1, RNG_STATE.to("meta"))


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_bias_gelu_refuses_tensors_on_a_gpu_and_a_cpu(device):
    x, bias = torch.ones(2, 3), torch.ones(3)
    with testing.raises(ValueError, "bias_gelu: `bias` must be on the device of `x` (cpu), got cuda:0"):
        step1_simple.bias_gelu(x, bias.to(device))
    with testing.raises(ValueError, "bias_gelu: `bias` must be on the device of `x` (cuda:0), got cpu"):
        step1_simple.bias_gelu(x.to(device), bias)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_an_out_that_shares_memory_with_anything_is_refused(op, device):
    testing.check_apart(step1_simple, op, inputs_of(op, (4, 3), torch.float32, device))
    state_at_home = tuple(v.to(device) if v is RNG_STATE else v for v in inputs_of(op, (4, 3), torch.float16, device))
    testing.check_apart(step1_simple, op, state_at_home)


def test_a_tensor_without_data_never_reaches_a_kernel():
    """A function made by pybind11 is called whatever the device; a registered op on meta tensors is its fake."""
    for shape in ((2, 3), (0,)):
        with testing.raises(ValueError, "scale: the tensors must be on the CPU or on a CUDA device, got meta"):
            step1_simple.scale_by_pybind(torch.ones(shape, device="meta"), 2.0)
    assert step1_simple.scale(torch.ones(2, 3, device="meta"), 2.0).is_meta


def test_rungs_refuses_an_unknown_op():
    with testing.raises(ValueError, "rungs: `op` must be 'scale', 'gelu',", "or 'column_sum', got 'relu'"):
        step1_simple.rungs("relu")
    assert "cpu" not in step1_simple.rungs("scale", "cuda")


# ---- page one ----


def run_simple_kernel(*arguments):
    program = pathlib.Path(__file__).with_name("simple_kernel.cu")
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
    source = pathlib.Path(__file__).with_name("simple_kernel.cu").read_text()
    broken = tmp_path / "simple_kernel.cu"
    broken.write_text(source.replace("if (i < n) y", "if (i < n - 1) y"))
    command = [sys.executable, "-m", "kernel_fusion", "simt", str(broken), "1003"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "WRONG" in ran.stdout


def test_simple_kernel_refuses_a_bad_n():
    ran = run_simple_kernel("0")
    assert ran.returncode == 1
    assert "n must be from 1 to 1000000000, got 0" in ran.stderr


if __name__ == "__main__":
    testing.main(__file__)
