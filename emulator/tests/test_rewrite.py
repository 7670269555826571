"""The rewriter: what it changes, what it leaves alone, and that every line stays where it is."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from emulator import programs
from emulator.rewriter import rewrite as rewriter

SIMT = Path(__file__).resolve().parents[1]


def rewritten(tmp_path, text, include_dirs=()):
    source = tmp_path / "source.cu"
    source.write_text(text)
    output = tmp_path / "out" / "source.cpp"
    rewriter.rewrite(source, output, include_dirs)
    result = output.read_text()
    head = f'#include <cuda_runtime.h>\n#line 1 "{source}"\n'
    assert result.startswith(head)
    body = result[len(head) :]
    assert body.count("\n") == text.count("\n")
    return body


def unchanged(tmp_path, text):
    assert rewritten(tmp_path, text) == text


def squeeze(text):
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    "text",
    [
        "// k<<<1, 2>>>(x);\n",
        "/* __shared__ float x[3];\n k<<<1, 2>>>(x); */ int a;\n",
        'const char* s = "k<<<1, 2>>>(x) __shared__ \\" \\\\";\n',
        'auto s = R"x(k<<<1, 2>>>(y) )" __shared__ int a;\n)x"; int b;\n',
        'auto s = u8R"(<<<)" "x"; auto t = LR"(")";\n',
        "char c = '\"', d = '\\'', e = '<'; int f;\n",
        "int n = 1'000'000; float x = 0x1'0p-3f; auto y = 1e+5 + .5e-3;\n",
        "std::ostream& operator<<<int>(std::ostream&, int);\n",
        "int x = a << b >> 3; bool y = a < b > c; std::vector<std::vector<std::vector<int>>> v;\n",
        "#error don't panic, it's \"fine\n",
        "#if 0\nit's not even 'C++ k<<<\n#if 1\nnested's\n#endif\n#else\nint a;\n#endif\n",
        "// a comment that goes on \\\n __shared__ int x[3];\nint y;\n",
        '#define TEXT "__shared__ k<<<1, 1>>>()"\n',
        "#pragma once\n#pragma GCC diagnostic push\n",
        "int __shared__name; int not__global__;\n",
        "",
    ],
)
def test_leaves_alone(tmp_path, text):
    unchanged(tmp_path, text)


# In device code; [ and ] stand for the call that converts to the type before it, and its end.
@pytest.mark.parametrize(
    "text",
    [
        "x = (int)[a] + (unsigned)[b.c] - (short)[p->q] * 2;",
        "x = (long long)[f(a, b)[i]++] / (int)[-a] % (int)[*p];",
        "x = (int)[(a + b)] + (int)[(float)a] * 1;",
        "x = (int)[(unsigned)[a]] + (unsigned char)[s.t<float>(1)] < y;",
        "x = int([a]) + static_cast<unsigned short>([a * b]) + uint8_t([2.5f]);",
        "return (std::size_t)[n] < (int)[a] && b > (int)[sizeof(float)];",
        "for (int i = (int)[a]; i < (int)[b]; ++i) {}",
        "int y = c ? (int)[a] : (int)[b]; g((int)[a], int([b]));",
        "auto l = [=](int j) -> int { return (int)[a]; };",
        "x = (u32)[a] + (count_t)[b];",
    ],
)
def test_casts_to_integers_become_calls(tmp_path, text):
    text = text.replace("[=]", "<=>").replace("[i]", "<i>")
    source = f"typedef unsigned int u32;\nusing count_t = long;\n__device__ int f() {{ {re.sub(r'[][]', '', text)} }}\n"
    source = source.replace("<=>", "[=]").replace("<i>", "[i]")
    body = rewritten(tmp_path, source).splitlines()[2]
    kinds = iter(re.findall(r"kf_integer<(.*?)>\(", body))
    expected = re.sub(r"\[", lambda _: f"::kf::simt::kf_integer<{next(kinds)}>(", text).replace("]", ")")
    expected = expected.replace("<=>", "[=]").replace("<i>", "[i]")
    assert body == f"__device__ int f() {{ {expected} }}"
    for kind, type_ in re.findall(r"\((\w[\w :]*)\)::kf::simt::kf_integer<(.*?)>", body):
        assert kind == type_


@pytest.mark.parametrize(
    "text",
    [
        "int h(float x) { return (int)x + int(x); }\n",
        "__device__ int f(int (*g)(float), int);\n__device__ float g(int) { return 1; }\n",
        "__device__ int f(float x) { int y(x); float z = (float)y; function<int(float)> k; return sizeof(int); }\n",
        "__device__ void f() { int (*g)(int) = nullptr; bool b = (bool)1.5f; T* p = (T*)q; auto r = (int*)q; }\n",
        "__device__ int f(float x) { float y = x; int(z) = 3; return z; }\n",
        "struct S { __device__ bool operator()(int) const { return 1; } };\nint after(float x) { return (int)x; }\n",
    ],
)
def test_what_is_no_cast_to_an_integer_of_the_device_is_left_alone(tmp_path, text):
    unchanged(tmp_path, text)


def test_zeros_among_the_arguments_of_a_launch(tmp_path):
    body = squeeze(rewritten(tmp_path, "void f() { k<int><<<1, 0>>>(a, 0, 0x0, 0u, NULL, 10, b[0], g(0)); }\n"))
    zero = "::kf::simt::LiteralZero<decltype({})>()"
    arguments = f"(a, {zero.format('0')}, {zero.format('0x0')}, {zero.format('0u')}, nullptr, 10, b[0], g(0));"
    assert f"(1, 0).launch_with_zeros{arguments}" in body
    assert "-> decltype(static_cast<void>(k<int>(kf_args...)))" in body
    assert "decltype" not in rewritten(tmp_path, "void f() { k<<<1, 0>>>(a, b[0], 10, g(0)); }\n")


def test_the_barriers_of_a_macro_are_numbered(tmp_path):
    text = "#define STEP(c) if (c) { __syncthreads(); } else { __syncthreads(); __syncthreads_or(c); }\n"
    body = rewritten(tmp_path, text)
    assert "{ __syncthreads(); }" in body
    assert (
        "__syncthreads(::kf::simt::CallSite::here().nth(1)); __syncthreads_or(c, ::kf::simt::CallSite::here().nth(2));"
        in body
    )
    unchanged(tmp_path, "#define ONE() __syncthreads()\nvoid f() { __syncthreads(); __syncthreads(); }\n")


@pytest.mark.parametrize(
    ("launch", "kernel", "rest"),
    [
        ("k<<<1, 2>>>(a, b);", "k", "(1, 2).launch(a, b);"),
        ("k <<< g , b , s , st >>> ( );", "k", "( g , b , s , st ).launch ( );"),
        ("k<T, 4><<<g, b>>>(a);", "k<T, 4>", "(g, b).launch(a);"),
        ("ns::k<<<g, b>>>(a);", "ns::k", "(g, b).launch(a);"),
        ("::ns::k<A<B>, (1 > 2)><<<g, b>>>(a);", "::ns::k<A<B>, (1 > 2)>", "(g, b).launch(a);"),
        ("A<int>::template k<3><<<g, b>>>(a);", "A<int>::template k<3>", "(g, b).launch(a);"),
        ("kernels[i + 1]<<<g, b>>>(a);", "kernels[i + 1]", "(g, b).launch(a);"),
        ("(*pointer)<<<g, b>>>(a);", "(*pointer)", "(g, b).launch(a);"),
        ("table.row(2)->k<<<g, b>>>(a);", "table.row(2)->k", "(g, b).launch(a);"),
        ("if (x) k<<<g, b>>>(a);", "k", "(g, b).launch(a);"),
        ("return k<<<g, b>>>(a);", "k", "(g, b).launch(a);"),
        ("CHECK((k<<<dim3(1, 2), f({3, 4})>>>(a)));", "k", "(dim3(1, 2), f({3, 4})).launch(a)));"),
        ("[&] { k<<<g, b>>>(a); }();", "k", "(g, b).launch(a); }();"),
    ],
)
def test_launches(tmp_path, launch, kernel, rest):
    body = rewritten(tmp_path, f"void f() {{ {launch} }}\n")
    name = kernel.replace('"', '\\"')
    head = f"::kf::simt::kernel_call([&](auto&... kf_args) KF_SIMT_UNINSTRUMENTED {{ {kernel}"
    assert head in body
    assert squeeze(f'(kf_args...); }}, "{name}"){rest}').replace(" ", "") in body.replace(" ", "")


def test_a_launch_over_several_lines_keeps_them(tmp_path):
    text = "void f() {\n  ns::k<int,\n    2><<<g,\n    b>>>(\n      a,  // <<<\n      b);\n  int after;\n}\n"
    lines = rewritten(tmp_path, text).splitlines()
    assert "kernel_call" in lines[1]
    assert "2>" in lines[2]
    assert ".launch(" in lines[3]
    assert lines[6] == "  int after;"


@pytest.mark.parametrize(
    "text",
    ["k << <g, b> >>(x);", "k<< <g, b>> >(x);", "k < < < g, b > > > (x);", "k<A<B<C<int> > > > << <g, b >> > (x);"],
)
def test_launches_as_formatters_leave_them(tmp_path, text):
    body = rewritten(tmp_path, f"void f() {{\n  {text}\n}}\n")
    assert "kernel_call" in body
    assert re.search(r"\(\s*g, b\s*\)\.launch\s*\(x\);", body), body


def test_spaces_within_template_arguments_end_no_launch(tmp_path):
    body = rewritten(tmp_path, "void f() {\n  k<<<A<B<C<int> > >::value, (1)>>>(x);\n}\n")
    assert "(A<B<C<int> > >::value, (1)).launch(x);" in body


def test_launches_in_macros(tmp_path):
    text = "#define RUN(k, ...) \\\n  k<<<1, \\\n   2>>>(__VA_ARGS__)\nint after;\n"
    body = rewritten(tmp_path, text)
    assert "kernel_call" in body
    assert body.endswith("\nint after;\n")
    assert all(line.endswith("\\") for line in body.splitlines()[:2])


@pytest.mark.parametrize(
    ("declaration", "names"),
    [
        ("__shared__ float x[3];", ["x"]),
        ("__shared__ float tile[kTile][kTile + 1];", ["tile"]),
        ("__shared__ T a[N], b[N * 2][M], c;", ["a", "b", "c"]),
        ("__shared__ Pair<int, float> p;", ["p"]),
        ("__shared__ typename Foo<T>::Bar temp;", ["temp"]),
        ("static __shared__ volatile int flag;", ["flag"]),
        ("float __shared__ late[4];", ["late"]),
        ("__shared__ alignas(64) T x[2];", ["x"]),
        ("alignas(16) __shared__ unsigned char raw[64];", ["raw"]),
        ("__shared__ __align__(16) float4 v[(3 < 4) ? 1 : 2];", ["v"]),
        ("__shared__ struct { int a; float b[2]; } s;", ["s"]),
        ("__shared__ union {\n  int a;\n  float b;\n} u[2];", ["u"]),
        ("__shared__ float *p, **q[2];", ["p", "q"]),
        ("[[maybe_unused]] __shared__ std::size_t n;", ["n"]),
    ],
)
def test_static_shared(tmp_path, declaration, names):
    body = rewritten(tmp_path, f"void f() {{\n  {declaration}\n  int after;\n}}\n")
    assert "__shared__" not in body
    for name in names:
        assert re.search(rf"& {name} = ::kf::simt::static_shared<", body), body
    assert body.splitlines()[-2] == "  int after;"


@pytest.mark.parametrize(
    "declaration",
    [
        "extern __shared__ float x[];",
        "extern __shared__ __align__(16) unsigned char x[];",
        "extern volatile __shared__ T x[][4];",
    ],
)
def test_dynamic_shared(tmp_path, declaration):
    body = rewritten(tmp_path, f"void f() {{ {declaration} }}\n")
    assert re.search(r"& x = ::kf::simt::dynamic_shared<", body)
    outside = rewritten(tmp_path, f"namespace n {{\n{declaration}\n}}\n")
    assert "static thread_local" in outside


def test_kernels_are_marked(tmp_path):
    text = (
        "template <int N>\n__global__ void __launch_bounds__(N * 2, 1)\nk(int x,\n  int y)\n{ body(); }\n"
        "__global__ void declared(int);\n__launch_bounds__(96) __global__\n  void before() {}\n"
        '#define GLOBAL extern "C" __global__\nGLOBAL void other() {}\n'
    )
    body = rewritten(tmp_path, text)
    assert body.count("KernelInfo") == 3
    assert "{ static ::kf::simt::KernelInfo kf_kernel(__PRETTY_FUNCTION__, N * 2);" in body
    assert "other() { static ::kf::simt::KernelInfo kf_kernel(__PRETTY_FUNCTION__);" in body


def test_takes_out(tmp_path):
    text = (
        "__device__ __noinline__ int f();\n#pragma unroll\n#pragma unroll (4)\n"
        '#define UNROLL _Pragma("unroll 2") for\nfor (;;) {}\n'
        "cudaFuncSetAttribute((const void*)k<3>, a, b);\n"
        "cudaFuncGetAttributes(&attributes, reinterpret_cast<void*>(k));\n"
        "cudaLaunchCooperativeKernel((void *) k, g, b, (void**)args);\n"
    )
    body = rewritten(tmp_path, text)
    for gone in ("__noinline__", "unroll", "(const void*)", "reinterpret_cast", "(void *)"):
        assert gone not in body
    assert "(void**)args" in body


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("int a;\nk<<<1, 2>>>;\n", 2, "without the arguments"),
        ("\n\nf() { k<<<1, 2(a); }\n", 3, r"\( is never closed|<<< without >>>|closes nothing"),
        ("<<<1, 1>>>();\n", 1, "cannot tell what is launched"),
        ("int a;\n'unfinished\n", 2, "without its partner"),
        ('int a;\n\n"unfinished\n', 3, "without its partner"),
        ('auto s = R"x(...)y";\n', 1, "raw string without its end"),
        ("/* never\nclosed\n", 1, r"/\* without \*/"),
        ("void f() {\n __shared__ int x = 3;\n}\n", 2, "cannot find the name|initializer"),
        ("void f() {\n\n __shared__ int (*x)[3];\n}\n", 3, "cannot find the name"),
        ("void f() { __shared__ int x[3] }\n", 1, "without ;|closes nothing"),
        ("int a;\n__shared__ int x[3];\n", 2, "outside of a function"),
        ("void f() {\n extern __shared__ int x;\n}\n", 2, "must be an array"),
        ("#define K(name) \\\n  __global__ void name()\n", 2, "whole body"),
        ("__global__ int\n", 1, "without a function"),
    ],
)
def test_errors_name_the_line(tmp_path, capsys, text, line, words):
    source = tmp_path / "bad.cu"
    source.write_text(text)
    output = tmp_path / "bad.cpp"
    assert rewriter.main([str(source), "-o", str(output)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"{source}:{line}: "), message
    assert re.search(words, message), message
    assert not output.exists()


def test_missing_source(tmp_path, capsys):
    assert rewriter.main([str(tmp_path / "none.cu"), "-o", str(tmp_path / "none.cpp")]) == 1
    assert "none.cu" in capsys.readouterr().err


def headers(tmp_path):
    include = tmp_path / "include" / "kf"
    include.mkdir(parents=True)
    (include / "plain.h").write_text("#pragma once\nint plain();\n")
    (include / "deep.h").write_text(
        "#pragma once\n__device__ inline float f() {\n  __shared__ float x[2];\n  return x[0];\n}\n"
    )
    (include / "middle.h").write_text('#pragma once\n#include "deep.h"\n#include "plain.h"\nint middle();\n')
    (tmp_path / "beside.h").write_text("#pragma once\n__device__ __noinline__ int g();\n")
    return tmp_path / "include"


def test_headers(tmp_path):
    include = headers(tmp_path)
    names = ("<vector>", '"beside.h"', "<kf/middle.h>", "<kf/plain.h>", '"nowhere.h"')
    text = "".join(f"#include {name}\n" for name in names) + "int x;\n"
    lines = rewritten(tmp_path, text, [include]).splitlines()
    assert lines[0] == "#include <vector>"
    assert lines[3] == "#include <kf/plain.h>"
    assert lines[4] == '#include "nowhere.h"'
    copies = [Path(re.search(r'"(.*)"', lines[n])[1]) for n in (1, 2)]
    assert all(copy.is_relative_to(tmp_path / "out" / "kf_headers") for copy in copies)
    beside, middle = (copy.read_text().splitlines() for copy in copies)
    assert beside[0] == f'#line 1 "{tmp_path / "beside.h"}"'
    assert "__noinline__" not in beside[2]
    assert middle[0] == f'#line 1 "{include / "kf" / "middle.h"}"'
    deep = Path(re.search(r'"(.*)"', middle[2])[1])
    assert "static_shared" in deep.read_text()
    assert middle[3] == f'#include "{include / "kf" / "plain.h"}"'
    assert middle[4] == "int middle();"


def test_a_header_that_stays_the_same_is_not_written_again(tmp_path):
    include = headers(tmp_path)
    text = "#include <kf/deep.h>\n"
    rewritten(tmp_path, text, [include])
    copy = next((tmp_path / "out" / "kf_headers").rglob("deep.h"))
    before = copy.stat().st_mtime_ns
    rewritten(tmp_path, text, [include])
    assert copy.stat().st_mtime_ns == before


def test_headers_that_include_each_other(tmp_path):
    (tmp_path / "a.h").write_text('#pragma once\n#include "b.h"\n__global__ void k() {}\n')
    (tmp_path / "b.h").write_text('#pragma once\n#include "a.h"\nint b;\n')
    body = rewritten(tmp_path, '#include "b.h"\n')
    assert "kf_headers" in body


def test_own_headers_are_not_rewritten(tmp_path):
    body = rewritten(tmp_path, "#include <cuda_fp16.h>\n", [SIMT / "include"])
    assert body == "#include <cuda_fp16.h>\n"


def test_an_error_in_a_header_names_the_header(tmp_path):
    (tmp_path / "bad.h").write_text("int a;\nint b = k<<<;\n")
    with pytest.raises(rewriter.RewriteError, match=rf"^{re.escape(str(tmp_path / 'bad.h'))}:2: "):
        rewritten(tmp_path, '#include "bad.h"\n')


def test_depfile(tmp_path):
    include = headers(tmp_path)
    source = tmp_path / "with space.cu"
    source.write_text('#include <kf/middle.h>\n#include "beside.h"\n')
    output = tmp_path / "out.cpp"
    depfile = tmp_path / "out.d"
    arguments = [str(source), "-o", str(output), "-I", str(include), "--depfile", str(depfile)]
    assert rewriter.main(arguments) == 0
    target, files = depfile.read_text().split(": ", 1)
    assert target == str(output)
    listed = {Path(f.replace("\\ ", " ")) for f in re.split(r"(?<!\\)\s+", files.replace("\\\n", " ").strip())}
    kf = include / "kf"
    own = {source, kf / "middle.h", kf / "deep.h", kf / "plain.h", tmp_path / "beside.h"}
    assert listed == own | set((SIMT / "rewriter").glob("*.py"))


def test_nothing_is_left_half_written(tmp_path):
    rewritten(tmp_path, "__global__ void k() {}\n")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["source.cpp"]


def test_windows_line_ends(tmp_path):
    text = "__global__ void k() {\r\n  __shared__ int x[2];\r\n}\r\n#define RUN k<<<1, \\\r\n 1>>>()\r\n"
    source = tmp_path / "crlf.cu"
    source.write_bytes(text.encode())
    rewriter.rewrite(source, tmp_path / "crlf.cpp")
    body = (tmp_path / "crlf.cpp").read_bytes().decode()
    assert body.count("\n") == text.count("\n") + 2
    assert "static_shared" in body
    assert "kernel_call" in body


PROGRAM = """#include <cstdio>
#define LAUNCH(kernel, ...) \\
  kernel<<<2, \\
           32>>>(__VA_ARGS__)
template <class T>
__device__ __noinline__ T twice(T x) {
  return 2 * x;
}
template <class T, int N>
__global__ void k(T* out) {
  __shared__ T
      a[N],
      b[N];
  a[threadIdx.x] = twice(T(threadIdx.x));
  __syncthreads();
  b[threadIdx.x] = a[N - 1 - threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0 && blockIdx.x == 1) {
    *out = b[0];
    printf("line %d of %s\\n", __LINE__, __FILE__);
  }
}
int main() {
  float* out;
  cudaMalloc(&out, sizeof(float));
  LAUNCH((k<float, 32>), out);
  printf("%g line %d\\n", *out, __LINE__);
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("standard", ["c++17", "c++20"])
def test_a_program_runs_and_knows_its_lines(tmp_path, standard):
    """Without a warning, as a program alone and as part of a step: that is, without what `simt` adds."""
    source = tmp_path / "program.cu"
    source.write_text(PROGRAM)
    output = tmp_path / "program.cpp"
    subprocess.run([sys.executable, "-S", SIMT, "rewrite", source, "-o", output], check=True)
    flags = [f"-std={standard}", "-O1", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]
    program = tmp_path / "program"
    programs.compile_program(source)  # and with it the emulation
    parts = {path.name for path in (SIMT / "src").glob("*.cpp")}
    runtime = [path for path in programs.EMULATION.glob("programs/plain/runtime/*.o") if path.stem in parts]
    assert len(runtime) == len(parts)
    subprocess.run(["g++", *flags, "-I", SIMT / "include", output, *runtime, "-o", program, "-pthread"], check=True)
    run = subprocess.run([program], capture_output=True, text=True, check=True)
    assert run.stdout == f"line 20 of {source}\n62 line 27\n"
