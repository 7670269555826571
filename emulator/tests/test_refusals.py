"""What a program uses and the emulation lacks is named before it is compiled: file, line, function, and what it is."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from emulator.rewriter import refusals
from emulator.rewriter import rewrite as rewriter

SIMT = pathlib.Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")


@pytest.fixture
def findings(tmp_path):
    """A function that gives the refusals of a source, without its path, in order."""

    def find(text, **headers):
        for name, content in headers.items():
            (tmp_path / f"{name}.h").write_text(content)
        source = tmp_path / "prog.cu"
        source.write_text(text)
        output = tmp_path / "out" / "prog.cu.cpp"
        rewriter.rewrite(source, output, [tmp_path])
        compiler = ["c++", "-std=c++17", f"-I{SIMT / 'include'}", f"-I{tmp_path}"]
        _, _, found = refusals.check(refusals.views.Preprocessor(compiler, output, "checked"))
        return [str(one).replace(f"{tmp_path}/", "") for one in found]

    return find


EVERYTHING = """\
#include <cub/cub.cuh>
#include <thrust/device_vector.h>
#define CHECK(call) do { if ((call) != cudaSuccess) return 1; } while (0)
texture<float> old;
namespace app {
struct Runner {
  void run();
  cudaStream_t stream;
};
void Runner::run() { cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal); }
template <class T, int N = (4 > 3)>
__device__ T mean(const T* x) { return T(__vavgu4(x[0], x[1])); }
}  // namespace app
__global__ void child(int* x) { x[0] = 1; }
__global__ void parent(int* x) {
  if (x[0] == 0) {
    child<<<1, 1>>>(x);
  }
}
int main() {
  cudaGraph_t graph;
  CHECK(cudaGraphLaunch(
      nullptr, 0));
  const cudaArray_t array = nullptr;
  auto four = [](cudaTextureObject_t t) { return tex2D<float4>(t, 1.0f, 2.0f); };
  thrust::device_vector<int> v(3);
  cublasHandle_t handle; cublasCreate(&handle);
}
"""


def test_all_that_is_missing_is_named_at_once(findings):
    assert findings(EVERYTHING) == [
        "prog.cu:1: <cub/cub.cuh> is not emulated (CUB)",
        "prog.cu:2: <thrust/device_vector.h> is not emulated (Thrust)",
        "prog.cu:4: texture is not emulated (textures)",
        "prog.cu:10: in function run: cudaStreamBeginCapture is not emulated (graphs)",
        "prog.cu:10: in function run: cudaStreamCaptureModeGlobal is not emulated (graphs)",
        "prog.cu:12: in function mean: __vavgu4 is not emulated (SIMD-in-a-word instructions)",
        "prog.cu:17: in function parent: a launch within a kernel is not emulated (dynamic parallelism)",
        "prog.cu:21: in function main: cudaGraph_t is not emulated (graphs)",
        "prog.cu:22: in function main: cudaGraphLaunch is not emulated (graphs)",
        "prog.cu:24: in function main: cudaArray_t is not emulated (CUDA arrays)",
        "prog.cu:25: in function main: cudaTextureObject_t is not emulated (textures)",
        "prog.cu:25: in function main: tex2D is not emulated (textures)",
        "prog.cu:26: in function main: thrust::device_vector is not emulated (Thrust)",
        "prog.cu:27: in function main: cublasHandle_t is not emulated (cuBLAS)",
        "prog.cu:27: in function main: cublasCreate is not emulated (cuBLAS)",
    ]


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("surf2Dread<float>(s, 0, 0);", "surf2Dread is not emulated (surfaces)"),
        ("curandState state;", "curandState is not emulated (cuRAND)"),
        ("cudaMemPool_t pool;", "cudaMemPool_t is not emulated (memory pools)"),
        ("cuLaunchKernel();", "cuLaunchKernel is not emulated (driver API)"),
        ("CUcontext context;", "CUcontext is not emulated (driver API)"),
        ("cudaSomethingNew(1);", "cudaSomethingNew is not emulated (runtime API)"),
        ("ncclAllReduce(1);", "ncclAllReduce is not emulated (NCCL)"),
        ("cuda::std::array<int, 3> a;", "cuda::std is not emulated (libcu++)"),
        ("x = __nv_fp8_e4m3(1);", "__nv_fp8_e4m3 is not emulated (float8, float6 and float4)"),
        ("x = __not_there_yet(1);", "__not_there_yet is not emulated (device function)"),
        ("cudaMallocArray(&a, &d, 1, 1);", "cudaMallocArray is not emulated (CUDA arrays)"),
        ("cudaIpcGetMemHandle(&h, p);", "cudaIpcGetMemHandle is not emulated (memory shared by processes)"),
    ],
)
def test_a_feature_has_a_reason(findings, statement, complaint):
    assert findings(f"int main() {{\n  {statement}\n}}\n") == [f"prog.cu:2: in function main: {complaint}"]


@pytest.mark.parametrize(
    "text",
    [
        "void cudaHelper(int);\nint main() { cudaHelper(1); }\n",
        "inline cudaError_t cudaCheck(cudaError_t e) { return e; }\nint main() { return cudaCheck(cudaSuccess); }\n",
        "#define cudaSafeCall(x) (x)\nint main() { return cudaSafeCall(cudaDeviceSynchronize()); }\n",
        "template <class T> T* cudaNew(int n) { return nullptr; }\nint main() { return cudaNew<int>(3) != nullptr; }\n",
        "int main() { cudaError_t cudaStatus = cudaSuccess; return cudaStatus; }\n",
        "struct cuStack { int cuTop; };\nint main() { cuStack s; s.cuTop = 1; auto* p = &s; return p->cuTop - 1; }\n",
        "enum cuKind { cuRed = 1, cuGreen = 2 };\nint main() { return cuRed + cuGreen; }\n",
        "namespace cub { int size() { return 0; } }\nint main() { return cub::size(); }\n",
        "namespace mine { int cublasLike() { return 0; } }\nint main() { return mine::cublasLike(); }\n",
        "__device__ int __mine(int x) { return x; }\n__global__ void k(int* x) { x[0] = __mine(1); }\nint main() {}\n",
        "int main() { int texture = 1, surface = 2; return texture + surface - 3; }\n",
        "int main() { return __builtin_popcount(3) + __sync_val_compare_and_swap(new int(0), 0, 1) - 2; }\n",
        "#ifndef __CUDA_ARCH__\n__device__ int f() { return cudaOnlyThere(); }\n#endif\nint main() {}\n",
        "#if 0\ncudaGraph_t graph;\n#endif\nint main() {} // cudaGraph_t\n",
        'int main() { const char* s = "cudaGraphLaunch tex2D(1)"; return s == nullptr; }\n',
        "__global__ void k() {}\nvoid launch() { k<<<1, 1>>>(); }\nint main() { launch(); }\n",
    ],
)
def test_a_programs_own_names_and_inactive_code_are_left_alone(findings, text):
    assert findings(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "#include <mma.h>\n#include <cuda_fp8.h>\n#include <cublas_v2.h>\nint fragment = 0;\nint main() {}",
        "#include <mma.h>\nusing namespace nvcuda;\nusing namespace nvcuda::wmma;\nint main() {}\n",
        "#include <thrust/sort.h>\n#include <cub/cub.cuh>\n#include <cuda/std/array>\nusing namespace thrust;\n",
        "#include <curand_kernel.h>\n#include <cufft.h>\n#include <nccl.h>\n#include <nvtx3/nvToolsExt.h>\n",
        '#include "helper.h"\nint main() { return 0; }\n',
        "#include <cooperative_groups.h>\nnamespace cg = cooperative_groups;\n"
        "__global__ void k() { cg::this_thread_block().sync(); cg::this_grid().sync(); }\n",
    ],
)  # fmt: skip
def test_a_header_of_which_nothing_is_used_is_no_harm(findings, text, tmp_path):
    assert findings(text, helper="#include <cublasLt.h>\n#include <mma.h>\n") == []


# What is used of such a header, and the line of its first use.
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("#include <mma.h>\nnvcuda::wmma::fragment<int> f;", "nvcuda::wmma is not emulated (wmma)"),
        ("#include <mma.h>\nusing namespace nvcuda; wmma::fragment<int> f;", "wmma::fragment is not emulated (wmma)"),
        ("#include <mma.h>\nusing namespace nvcuda::wmma; fragment<int> f;", "fragment is not emulated (wmma)"),
        ("#include <cuda_fp8.h>\n__nv_fp8_e5m2 x;", "__nv_fp8_e5m2 is not emulated (float8, float6 and float4)"),
        ("#include <cublas_v2.h>\nint n = CUBLAS_OP_N;", "CUBLAS_OP_N is not emulated (cuBLAS)"),
        ("#include <thrust/sort.h>\nusing namespace thrust; void f() { thrust::sort(1); }",
         "in function f: thrust::sort is not emulated (Thrust)"),
        ("#include <cub/cub.cuh>\nnamespace c = cub; c::Sum s;", "cub is not emulated (CUB)"),
        ("#include <cooperative_groups.h>\nnamespace cg = cooperative_groups; cg::block_tile_memory<4> m;",
         "cg::block_tile_memory is not emulated (cooperative groups)"),
        ("#include <cooperative_groups.h>\nusing namespace cooperative_groups; block_tile_memory<4> m;",
         "block_tile_memory is not emulated (cooperative groups)"),
        ("#include <cooperative_groups.h>\ncooperative_groups::experimental::block_tile_memory<4> m;",
         "cooperative_groups::experimental is not emulated (cooperative groups)"),
    ],
)  # fmt: skip
def test_what_is_used_of_a_header_is_named_with_it(findings, text, complaint):
    header, *rest = findings(text + "\nint main() {}\n")
    if "cooperative_groups" in text:
        rest = [header, *rest]
    else:
        assert header.startswith("prog.cu:1: <")
    assert rest[0] == f"prog.cu:2: {complaint}"


def test_a_program_compiles_without_the_headers_that_it_does_not_need(tmp_path):
    source, checked = tmp_path / "a.cpp", tmp_path / "checked.cpp"
    source.write_text("#include <cuda_runtime.h>\n#include <mma.h>\nusing namespace nvcuda;\nint main() {}\n")
    compiler = ["c++", "-std=c++17", f"-I{SIMT / 'include'}"]
    assert refusals.main([str(source), "-o", str(checked), "--", *compiler]) == 0
    done = subprocess.run([*compiler, "-fsyntax-only", str(checked)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_headers_beside_the_program_are_searched_too(findings):
    text = '#include "helper.h"\n#include "absent.h"\nint main() { helper(); }\n'
    helper = "#pragma once\n\ninline void helper() {\n  cudaGraphDestroy(0);\n}\n"
    assert findings(text, helper=helper) == [
        "helper.h:4: in function helper: cudaGraphDestroy is not emulated (graphs)",
        "prog.cu:2: absent.h: there is no such file",
    ]


def test_the_names_of_functions(findings):
    text = """\
struct S {
  S() : x(0) { cudaGraphA(); }
  ~S() { cudaGraphB(); }
  int operator()(int) const noexcept { return cudaGraphC(); }
  int x;
};
extern "C" {
__global__ void __launch_bounds__(128, 2) kernel(int* x) { x[0] = cudaGraphD(); }
}
auto trailing(int x) -> int { return cudaGraphE(); }
int at_namespace = cudaGraphF();
int main(int argc, char** argv) try { return cudaGraphG(); } catch (...) { return 1; }
"""
    names = ["S", "~S", "operator()", "kernel", "trailing", "", "main"]
    lines = [2, 3, 4, 8, 10, 11, 12]
    expected = [
        f"prog.cu:{line}:{f' in function {name}:' if name else ''} cudaGraph{letter} is not emulated (graphs)"
        for line, name, letter in zip(lines, names, "ABCDEFG", strict=True)
    ]
    assert findings(text) == expected


def test_the_work_grows_with_a_table_and_not_with_its_square(findings):
    def steps(rows):
        table = "".join(f"  {{{row}, 2, 3}},\n" for row in range(rows))
        text = f"struct Row {{ int a, b, c; }};\nRow table[] = {{\n{table}}};\nint g() {{ return cuMissing(); }}\n"
        done = 0

        def count(frame, event, argument):
            nonlocal done
            done += event == "line"
            return count

        before = sys.gettrace()
        tokens = [refusals.Token(one, "prog.cu", 1) for one in refusals.TOKEN.findall(text)]
        sys.settrace(count)
        try:
            found = refusals.search(tokens, set())
        finally:
            sys.settrace(before)
        assert [one.function for one in found] == ["g"]
        return done

    few, many = steps(100), steps(400)
    assert many < 5 * few


def test_what_the_preprocessor_refuses_is_passed_on(findings):
    with pytest.raises(refusals.views.ViewError) as refused:
        findings("#error not for this machine\nint main() {}\n")
    assert "prog.cu:1" in str(refused.value)
    assert "not for this machine" in str(refused.value)


def test_device_code_is_searched_as_the_device_sees_it(findings):
    text = """\
__device__ int f() {
#if __CUDA_ARCH__ >= 900
  return __nv_only_there();
#else
  return __nv_only_elsewhere();
#endif
}
int main() {
#ifdef __CUDA_ARCH__
  cudaGraphA();
#endif
}
"""
    assert findings(text) == ["prog.cu:3: in function f: __nv_only_there is not emulated (compiler intrinsics)"]


def test_the_command_writes_the_program_only_if_nothing_is_missing(tmp_path, capsys):
    compiler = ["c++", f"-I{SIMT / 'include'}"]
    source, checked = tmp_path / "a.cpp", tmp_path / "checked.cpp"
    source.write_text("#include <cuda_runtime.h>\nint main() { cudaGraphCreate(); }\n")
    assert refusals.main([str(source), "-o", str(checked), "--", *compiler]) == 1
    assert capsys.readouterr().err == f"{source}:2: in function main: cudaGraphCreate is not emulated (graphs)\n"
    assert not checked.exists()
    source.write_text("#include <cuda_runtime.h>\nint main() { return cudaDeviceReset(); }\n")
    assert refusals.main([str(source), "-o", str(checked), "--", *compiler]) == 0
    assert checked.read_text() == source.read_text()
