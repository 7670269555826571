"""Device functions get the text that the device's architecture sees, all else the host's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from emulator.ninja_file import is_clang
from emulator.rewriter import views

SIMT = Path(__file__).resolve().parents[1]
WORDS = [f"-D__{word}__=__kf_{word}__" for word in ("global", "device", "host")]


def squeezed(text):
    """With the spaces that matter alone."""
    return re.sub(r"(?<=\W) | (?=\W)", "", re.sub(r"\s+", " ", text)).strip()


@pytest.fixture
def both(tmp_path):
    """A function that gives the one text of a source, squeezed."""

    def merge(text):
        source = tmp_path / "a.cpp"
        source.write_text(text)
        preprocessor = views.Preprocessor(["c++", *WORDS], source, "a.o")
        merged, differs = views.one_text(preprocessor.text)
        assert differs == ("#if" in text)
        return squeezed(re.sub(r"^#.*$", "", merged, flags=re.MULTILINE))

    return merge


IF = "\n#ifdef __CUDA_ARCH__\n"
ELSE = "\n#else\n"
END = "\n#endif\n"


@pytest.mark.parametrize(
    ("text", "merged"),
    [
        (f"__device__ int f() {{ {IF} return 1; {ELSE} return 2; {END} }}", "int f() { return 1; }"),
        (f"__global__ void f() {{ {IF} one(); {ELSE} two(); {END} }}", "void f() { one(); }"),
        (f"int f() {{ {IF} return 1; {ELSE} return 2; {END} }}", "int f() { return 2; }"),
        (
            f"__host__ __device__ int f() {{ {IF} return 1; {ELSE} return 2; {END} }}",
            "int f() { if (::kf::simt::on_device()) { return 1; } { return 2; } }",
        ),
        (
            f"constexpr int f() {{ {IF} return 1; {ELSE} return 2; {END} }}",
            "constexpr int f() { if (!__builtin_is_constant_evaluated() && ::kf::simt::on_device()) { return 1; }"
            " { return 2; } }",
        ),
        # Macros, and what is declared in one view only.
        (f"{IF}\n#define N 1{ELSE}\n#define N 2{END} __device__ int a() {{ return N; }} int b() {{ return N; }}",
         "int a() { return 1; } int b() { return 2; }"),
        (f"{IF} __device__ int a() {{ return 1; }} {END} int b();", "int a() { return 1; } int b();"),
        (f"{IF} int a() {{ return 1; }} {END} int b();", "int b();"),
        (f"#ifndef __CUDA_ARCH__\n__device__ int a() {{ return 1; }} int c() {{ return 3; }} {END} int b();",
         "int c() { return 3; } int b();"),
        (f"{IF} __device__ {END} int f() {{ {IF} return 1; {ELSE} return 2; {END} }}",
         "int f() { if (::kf::simt::on_device()) { return 1; } { return 2; } }"),
        # Classes, namespaces, templates, operators, constructors.
        (f"namespace a {{ struct S : B<(1)> {{ int x = 3; __device__ S() : x{{1}}, y(2) {{"
         f" {IF} x = 1; {END} }} }} s; }}",
         "namespace a { struct S : B<(1)> { int x = 3; S() : x{1}, y(2) { x = 1; } } s; }"),
        (f"struct S {{ public: __device__ bool operator==(S) const {{ {IF} return 1; {END} }}"
         f" __device__ int operator()(int) {{ {IF} return 2; {END} }} }};",
         "struct S { public: bool operator==(S) const { return 1; } int operator()(int) { return 2; } };"),
        (f"template <class T, int N = (3 > 2)> __device__ auto f(T x) -> A<T, N> {{ {IF} return x; {END} }}",
         "template <class T, int N = (3 > 2)> auto f(T x) -> A<T, N> { return x; }"),
        (f"enum class E : int {{ a, b }}; int t[] = {{ 1, 2 }}; __device__ void f() {{ {IF} ; {END} }}",
         "enum class E : int { a, b }; int t[] = { 1, 2 }; void f() { ; }"),
        (f"struct S {{ __device__ int f(int x); }}; int S::f(int x) {{ {IF} return 1; {ELSE} return 2; {END} }}",
         "struct S { int f(int x); }; int S::f(int x) { return 1; }"),
        # Device functions in a host function.
        (f"int main() {{ {IF} no(); {END} run([=] __device__ (int i) {{ {IF} return 1; {ELSE} return 2; {END} }}); }}",
         "int main() { run([=] (int i) { return 1; }); }"),
        (f"int main() {{ run([=] __host__ __device__ (int i) {{ {IF} return 1; {ELSE} return 2; {END} }}); }}",
         "int main() { run([=] (int i) { if (::kf::simt::on_device()) { return 1; } { return 2; } }); }"),
        # Constants with two values, and what is made of them.
        (f"{IF} constexpr int n = 4; {ELSE} constexpr int n = 2; {END} const int m = n * 2;"
         " int h() { return n; } __device__ int d() { return s.n + n + m; }",
         "constexpr int n = 2; constexpr int n_on_device = 4;"
         " const int m = n * 2; const int m_on_device = n_on_device * 2;"
         " int h() { return n; } int d() { return s.n + n_on_device + m_on_device; }"),
        (f"struct S {{ {IF} using T = int; {ELSE} using T = char; {END} }}; __device__ void d() {{ S::T x; }}",
         "struct S { using T = char; using T_on_device = int; }; void d() { S::T_on_device x; }"),
    ],
)  # fmt: skip
def test_each_side_gets_its_own(both, text, merged):
    assert both(text) == squeezed(merged)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"{IF} int n = 4; {ELSE} int n = 2; {END}", "a.cpp:3: `n` is another with __CUDA_ARCH__ than without it"),
        (f"struct S {{ {IF} int n; {ELSE} char n; {END} }};", "a.cpp:3: `n` is another"),
        (
            f"{IF} constexpr int n = 4; {ELSE} constexpr int n = 2; {END} struct S {{ int a[n]; }};",
            "a.cpp:7: `a` is an",
        ),
        (f"void f() {{ {IF} g([] __device__ () {{}}); {END} }}", "a.cpp:1: this host function holds other __device__"),
    ],
)
def test_what_cannot_be_two_things_is_an_error(both, text, what):
    with pytest.raises(views.ViewError) as refused:
        both(text)
    assert what in str(refused.value)


def test_a_source_that_does_not_ask_is_left_as_it_is(both):
    text = "__device__ int f() { return 1; } int g() { return f(); }"
    assert both(text) == squeezed("int f() { return 1; } int g() { return f(); }")


def compiled(tmp_path, text, *flags):
    source, output, rule = tmp_path / "a.cpp", tmp_path / "a.o", tmp_path / "a.d"
    source.write_text(text)
    line = [*flags, "-MD", "-MF", str(rule), "-c", str(source), "-o", str(output)]
    done = subprocess.run(
        [sys.executable, "-S", str(SIMT), "compile", "c++", "-std=c++17", f"-I{SIMT / 'include'}", *line],
        capture_output=True,
        text=True,
    )
    return done, output, rule


def test_headers_of_either_view_are_dependencies_and_lines_stay_where_they_are(tmp_path):
    for name in ("one", "other"):
        (tmp_path / f"{name}.h").write_text("#pragma once\n")
    text = f'{views.REWRITTEN}#line 1 "prog.cu"\n__device__ void f() {{{IF}  wrong();{END}}}'
    text += f'{IF}#include "one.h"{ELSE}#include "other.h"{END}'
    done, output, rule = compiled(tmp_path, text, "-fpermissive", "-w")
    assert done.returncode != 0
    assert "prog.cu:3:" in done.stderr
    done, output, rule = compiled(tmp_path, text.replace("wrong", "__syncthreads"), "-Wall", "-Wextra", "-Werror")
    assert (done.returncode, done.stderr) == (0, "")
    assert output.is_file()
    assert {"one.h", "other.h"} <= {Path(word).name for word in rule.read_text().split()}


def test_a_cuda_source_is_rewritten_first_and_its_headers_are_dependencies(tmp_path):
    """Without what was written for it, which would make the object stale as soon as it is there."""
    source, rewritten, rule = tmp_path / "a.cu", tmp_path / "own" / "a.cu.cpp", tmp_path / "a.d"
    (tmp_path / "kernel.h").write_text("__global__ void k(int* p) { __shared__ int s; s = 1; *p = s; }\n")
    source.write_text('#include "kernel.h"\nvoid f(int* p) { k<<<1, 1>>>(p); }\n')
    command = [sys.executable, "-S", str(SIMT), "compile", "--rewrite", str(rewritten), "c++", "-std=c++17"]
    command += [f"-I{SIMT / 'include'}", "-MD", "-MF", str(rule), "-c", str(source), "-o", str(tmp_path / "a.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kernel_call" in rewritten.read_text()
    named = [Path(word) for word in rule.read_text().split()]
    assert {source, tmp_path / "kernel.h", SIMT / "include" / "cuda_runtime.h", SIMT / "rewriter" / "ptx.py"} <= set(
        named
    )
    assert not [path for path in named if rewritten.parent in path.parents]

    source.write_text("__global__ void k() { __shared__ int s = 1; }\n")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(rf"{source}:1: .* in this __shared__ declaration\n", done.stderr)


@pytest.mark.skipif(is_clang("c++"), reason="clang precompiles in another way")
def test_what_is_precompiled_is_not_read_again_and_makes_no_difference(tmp_path):
    text = f"{views.REWRITTEN}__device__ float f(float x) {{{IF} return __expf(x);{ELSE} return x;{END}}}"
    header = tmp_path / "first.h"
    header.write_text("#include <cuda_runtime.h>\n")
    plain = compiled(tmp_path, text, "-O1")[1].read_bytes()
    lines = len((tmp_path / "a.o.ii").read_text().splitlines())
    subprocess.run(
        ["c++", "-std=c++17", f"-I{SIMT / 'include'}", "-O1", "-x", "c++-header", header, "-o", f"{header}.gch"],
        check=True,
    )
    done, output, _ = compiled(tmp_path, text, "-O1", "-include", str(header), "-Winvalid-pch", "-Werror")
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "a.o.ii").read_text().splitlines()) < 50 < lines
    assert output.read_bytes() == plain


def test_what_is_kept_whole_comes_once_where_its_markers_differ(tmp_path):
    own = tmp_path / "a.cu"
    own.write_text("int f() {\n#ifdef __CUDA_ARCH__\n")
    texts = [
        f'# 0 "<command-line>"\n#pragma GCC pch_preprocess "first.h.gch"\n# {line} "<command-line>"\n# 1 "{own}"\n'
        f"__kf_device__ int f() {{ return {line}; }}\n"
        for line in (31, 0)
    ]
    text, differs = views.one_text(lambda flags: texts[bool(flags)])
    assert differs
    assert text.count("pch_preprocess") == 1
    assert "return 0" in text
    assert "return 31" not in text


def test_other_sources_are_compiled_as_they_are(tmp_path):
    done, output, rule = compiled(tmp_path, f"{IF}#error device{END}int main() {{}}\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert output.is_file()
    assert rule.is_file()
