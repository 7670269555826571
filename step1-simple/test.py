"""Step 1's ops, on every device there is: against float64, eager PyTorch and the rung before.

python test.py            pytest's options may follow, such as -k scale
"""

import pathlib
import re
import shutil
import subprocess
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "common"))
from kernel_fusion import stages

stages.on_path()

import pytest
import torch
import torch.nn.functional as F

import step1_simple
from kernel_fusion import testing

DTYPES = [*testing.DTYPES, torch.float64]
INFINITY = float("inf")
NAN = float("nan")

ops = torch.ops.step1_simple


def scaled(x, factor):
    return x * factor


def gelu_of_sum(x, bias, approximate="tanh"):
    return F.gelu(x + bias, approximate=approximate)


# ---- the contract of correctness ----


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "scale"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (31,), (33,), (127,), (1023,), (1600,), (3, 5, 7), ()], ids=str)
def test_scale_multiplies(shape, dtype, device, rung):
    x = testing.randn(shape, dtype, device)
    testing.check_contract(step1_simple, "scale", (x, -1.7), rung, reference=scaled, eager=scaled)


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "bias_gelu"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (31, 64), (33, 760), (127, 33), (2, 3, 768), (5, 1600), (1023, 2), (127,)], ids=str
)
def test_bias_gelu_is_gelu_of_the_sum(shape, approximate, dtype, device, rung):
    x = testing.randn(shape, dtype, device, scale=2.0)
    bias = testing.randn(shape[-1:], dtype, device, seed=1)
    testing.check_contract(
        step1_simple,
        "bias_gelu",
        (x, bias),
        rung,
        reference=gelu_of_sum,
        eager=gelu_of_sum,
        kwargs={"approximate": approximate},
    )


@pytest.mark.parametrize("schedule", ["random:1", "random:2"])
@pytest.mark.parametrize("op", ["scale", "bias_gelu"])
def test_emulated_threads_may_run_in_any_order(op, schedule, monkeypatch):
    monkeypatch.setenv("KF_SIMT_SCHEDULE", schedule)
    x = testing.randn((5, 760), torch.float32, "cpu")
    inputs, same = ((x, 0.5), scaled) if op == "scale" else ((x, x[0].clone()), gelu_of_sum)
    for rung in step1_simple.rungs(op, "cpu"):
        testing.check_contract(step1_simple, op, inputs, rung, reference=same, eager=same)


@pytest.mark.parametrize("device", testing.DEVICES)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
def test_auto_does_gpt2_sized_layers(dtype, device):
    x = testing.randn((128, 3072), dtype, device)
    bias = testing.randn((3072,), dtype, device, seed=1)
    testing.check_contract(
        step1_simple, "bias_gelu", (x, bias), "auto", reference=gelu_of_sum, eager=gelu_of_sum, layouts=False
    )


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("op", ["scale", "bias_gelu"])
def test_v2_loads_and_stores_128_bits(op, tmp_path):
    here = pathlib.Path(__file__).parent
    includes = [f"-I{here.parent / 'common' / 'include'}", f"-I{here / 'include'}"]
    command = ["nvcc", "-std=c++17", "-O3", "-arch=sm_80", "-ptx", "-DKF_BACKEND=gpu", *includes, "-o", "v2.ptx"]
    subprocess.run([*command, str(here / "kernels" / op / "v2_vector.cu")], check=True, cwd=tmp_path)
    kernels = re.split(r"\.entry ", (tmp_path / "v2.ptx").read_text())[1:]
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


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "bias_gelu"))
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gelu_at_the_ends_of_the_range(dtype, approximate, device, rung):
    largest = torch.finfo(dtype).max / 4
    smallest = torch.finfo(dtype).smallest_normal / 4
    x = torch.tensor([[INFINITY, NAN, largest, -largest, smallest, -smallest, 0.0]], dtype=dtype, device=device)
    bias = torch.zeros(7, dtype=dtype, device=device)
    expected = torch.tensor([[INFINITY, NAN, largest, 0.0, smallest / 2, -smallest / 2, 0.0]], dtype=torch.float64)
    got = step1_simple.bias_gelu(x, bias, approximate=approximate, rung=rung)
    torch.testing.assert_close(got.cpu(), expected.to(dtype), rtol=1e-2, atol=0, equal_nan=True)


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "bias_gelu"))
def test_gelu_of_minus_infinity_is_nan_as_in_pytorch(device, rung):
    x = torch.full((1, 3), -INFINITY, device=device)
    zero = torch.zeros(3, device=device)
    for approximate in ("tanh", "none"):
        assert F.gelu(x, approximate=approximate).isnan().all()
        assert step1_simple.bias_gelu(x, zero, approximate=approximate, rung=rung).isnan().all()


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "scale"))
def test_empty_tensors_give_empty_tensors(device, rung):
    assert step1_simple.scale(torch.empty(0, 3, device=device), 2.0, rung=rung).shape == (0, 3)
    x, bias = torch.empty(2, 0, 8, device=device), torch.ones(8, device=device)
    assert step1_simple.bias_gelu(x, bias, rung=rung).shape == (2, 0, 8)


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "scale"))
def test_views_of_any_strides_give_contiguous_results(device, rung):
    x = testing.randn((6, 10), torch.float32, device)
    bias = testing.randn((20,), torch.float32, device, seed=1)[::2]
    views = [x.T.contiguous().T, x[::2], x[:, :1].expand(6, 10), x[0].expand(6, 10)]
    for view in views:
        scale = step1_simple.scale(view, 3.0, rung=rung)
        gelu = step1_simple.bias_gelu(view, bias, rung=rung)
        assert scale.is_contiguous()
        assert gelu.is_contiguous()
        torch.testing.assert_close(scale, view * 3.0, rtol=0, atol=0)
        torch.testing.assert_close(gelu, gelu_of_sum(view, bias))


@pytest.mark.parametrize("device", testing.DEVICES)
def test_a_named_rung_runs_where_its_tensor_lies(device):
    x = torch.ones(4, device=device)
    for rung in step1_simple.rungs("scale", device):
        backend = "gpu" if device == "cuda" else "cpu" if rung == "cpu" else "emulated"
        before = step1_simple.launch_counts()
        step1_simple.scale(x, 2.0, rung=rung)
        after = step1_simple.launch_counts()
        assert {k: after[k] - before[k] for k in after} == {"cpu": 0, "emulated": 0, "gpu": 0} | {backend: 1}


# ---- gradients ----


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "scale"))
def test_gradient_of_scale(device, rung):
    x = testing.randn((3, 5), torch.float64, device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: step1_simple.scale(x, -1.7, rung=rung), (x,))
    assert torch.autograd.gradgradcheck(lambda x: step1_simple.scale(x, -1.7, rung=rung), (x,))


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "bias_gelu"))
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gradient_of_bias_gelu(approximate, device, rung):
    def function(x, bias):
        return step1_simple.bias_gelu(x, bias, approximate=approximate, rung=rung)

    x = testing.randn((2, 3, 5), torch.float64, device).requires_grad_()
    bias = testing.randn((5,), torch.float64, device, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(function, (x, bias))
    assert torch.autograd.gradgradcheck(function, (x, bias))
    assert torch.autograd.gradcheck(function, (x.detach(), bias))  # a frozen input, or a frozen bias
    assert torch.autograd.gradcheck(function, (x, bias.detach()))


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


@pytest.mark.parametrize(("device", "rung"), testing.device_rungs("step1_simple", "scale"))
def test_ops_are_registered_as_torch_wants_it(device, rung):
    x = testing.randn((4, 6), torch.float32, device)
    testing.check_op(step1_simple, "scale", (x, 0.5), {"rung": rung})
    testing.check_op(step1_simple, "bias_gelu", (x, x[0].clone()), {"rung": rung})
    testing.check_op(step1_simple, "bias_gelu", (x, x[0].clone()), {"approximate": "none", "rung": rung})


def test_gradients_under_torch_compile():
    def loss(x, bias):
        return step1_simple.scale(step1_simple.bias_gelu(x, bias), 2.0).sum()

    inputs = [testing.randn(shape, torch.float32, "cpu").requires_grad_() for shape in ((4, 6), (6,))]
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
def test_autocast_leaves_scale_alone(device):
    x = torch.ones(4, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert step1_simple.scale(x, 2.0).dtype == (x * 2.0).dtype == torch.float32


def test_autocast_under_torch_compile():
    def function(x, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return step1_simple.bias_gelu(x, bias)

    x, bias = testing.randn((4, 6), torch.float32, "cpu"), torch.zeros(6)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(x, bias)
    torch.testing.assert_close(compiled, function(x, bias), rtol=0, atol=0)


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
    with testing.raises(ValueError, "scale: `rung` must be 'auto' or one of", "'v1_naive', 'v2_vector'", "'v9'"):
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


@pytest.mark.parametrize("device", [*testing.DEVICES, "meta"])
def test_bias_gelu_refuses(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with testing.raises(TypeError, "bias_gelu: `x` must be float32, float16, bfloat16 or float64, got int64"):
        step1_simple.bias_gelu(x.long(), bias)
    with testing.raises(TypeError, "bias_gelu: `bias` must have the dtype of `x` (float32), got float16"):
        step1_simple.bias_gelu(x, bias.half())
    with testing.raises(ValueError, "bias_gelu: `bias` must have shape (3,), got (2,)"):
        step1_simple.bias_gelu(x, bias[:2])
    with testing.raises(ValueError, "bias_gelu: `bias` must have shape (3,), got (1, 3)"):
        step1_simple.bias_gelu(x, bias[None])
    with testing.raises(ValueError, "bias_gelu: `x` must have at least 1 dimension, got 0"):
        step1_simple.bias_gelu(x[0, 0], bias)
    with testing.raises(ValueError, "bias_gelu: the last dimension of `x` must not be 0, got shape (2, 0)"):
        step1_simple.bias_gelu(x[:, :0], bias[:0])
    with testing.raises(ValueError, "bias_gelu: `approximate` must be 'tanh' or 'none', got 'erf'"):
        step1_simple.bias_gelu(x, bias, approximate="erf")
    other = "meta" if device != "meta" else "cpu"
    with testing.raises(ValueError, "bias_gelu: `bias` must be on the device of `x`", f"got {other}"):
        step1_simple.bias_gelu(x, bias.to(other) if other == "meta" else torch.ones(3))


@pytest.mark.parametrize("device", [d for d in testing.DEVICES if "cuda" in d.values])
def test_bias_gelu_refuses_tensors_on_a_gpu_and_a_cpu(device):
    x, bias = torch.ones(2, 3), torch.ones(3)
    with testing.raises(ValueError, "bias_gelu: `bias` must be on the device of `x` (cpu), got cuda:0"):
        step1_simple.bias_gelu(x, bias.to(device))
    with testing.raises(ValueError, "bias_gelu: `bias` must be on the device of `x` (cuda:0), got cpu"):
        step1_simple.bias_gelu(x.to(device), bias)


@pytest.mark.parametrize("device", testing.DEVICES)
def test_bias_gelu_refuses_an_out_that_overlaps(device):
    x, bias = torch.ones(4, 3, device=device), torch.ones(3, device=device)
    with testing.raises(ValueError, "bias_gelu: `out` must not share memory with `x`"):
        ops.bias_gelu.out(x[1:], bias, out=x[:3])
    with testing.raises(ValueError, "bias_gelu: `out` must not share memory with `bias`"):
        ops.bias_gelu.out(x[:1], x[1], out=x[1:2])


def test_rungs_refuses_an_unknown_op():
    with testing.raises(ValueError, "rungs: `op` must be 'scale' or 'bias_gelu', got 'gelu'"):
        step1_simple.rungs("gelu")


# ---- page one ----


def run_simple_kernel(*arguments):
    program = pathlib.Path(__file__).with_name("simple_kernel.cu")
    command = [sys.executable, "-m", "kernel_fusion", "simt", str(program), *arguments]
    return subprocess.run(command, cwd=stages.ROOT / "common", capture_output=True, text=True, timeout=120)


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
    ran = subprocess.run(command, cwd=stages.ROOT / "common", capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert "WRONG" in ran.stdout


def test_simple_kernel_refuses_a_bad_n():
    ran = run_simple_kernel("0")
    assert ran.returncode == 1
    assert "n must be from 1 to 1000000000, got 0" in ran.stderr


if __name__ == "__main__":
    testing.main(__file__)
