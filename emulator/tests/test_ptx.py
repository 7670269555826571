"""The translator of inline PTX: what it makes of a statement, what it refuses and how, and that lines stay in place."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from emulator.rewriter import rewrite as rewriter

SIMT = Path(__file__).resolve().parents[1]


needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def rewritten(tmp_path, text):
    source = tmp_path / "source.cu"
    source.write_text(text)
    output = tmp_path / "source.cpp"
    rewriter.rewrite(source, output)
    result = output.read_text()
    body = result[result.index(f'#line 1 "{source}"\n') :].split("\n", 1)[1]
    assert body.count("\n") == text.count("\n")
    return result, body


def compiled(tmp_path, text, *flags):
    """What g++ says to the rewritten text; empty if nothing."""
    rewritten(tmp_path, text)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", SIMT / "include", *flags]
    command += ["-c", tmp_path / "source.cpp", "-o", tmp_path / "source.o"]
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_a_statement_becomes_a_call(tmp_path):
    text = '__device__ void f(float& d, float a) { asm volatile("ex2.approx.f32 %0, %1;" : "=f"(d) : "f"(a + 1)); }\n'
    result, body = rewritten(tmp_path, text)
    assert "#include <kf_simt/ptx.h>" in result
    assert "kf_ptx::Exp2()(kf_1)" in body
    assert "kf_ptx::input<float>(a + 1)" in body
    assert body.rstrip().endswith("while (0); }")


@pytest.mark.parametrize(
    "statement",
    [
        'asm volatile("" ::: "memory");',
        'asm volatile("" : "+r"(x));',
        '__asm__ __volatile__("  \\n" ::: "memory");',
        "int asm_count = 3;",
        '// asm("trap;");',
    ],
)
def test_what_is_not_ptx_stays(tmp_path, statement):
    text = f"void f(int x) {{ {statement}\n }}\n"
    result, body = rewritten(tmp_path, text)
    assert body == text
    assert "kf_simt/ptx.h" not in result


def test_every_instruction_stands_on_its_line(tmp_path):
    text = (
        "__device__ void f(int& a, int b) {\n"
        "  asm volatile(\n"
        '      "{ .reg .b32 t;\\n"\n'
        '      "add.s32 t, %1, 1;\\n"  // a comment\n'
        '      "mul.lo.s32 %0, t, t; }"\n'
        '      : "=r"(a)\n'
        '      : "r"(b\n'
        "            + 1));\n"
        "  b = 2;\n"
        "}\n"
    )
    _, body = rewritten(tmp_path, text)
    lines = body.split("\n")
    assert "Add()" in lines[3]
    assert "Mul()" in lines[4]
    assert lines[8] == "  b = 2;"
    assert "input<std::uint32_t>(b + 1)" in lines[1]


def test_macros(tmp_path):
    text = (
        '#define NAME "add.s32"\n'
        '#define OUT "=r"(a)\n'
        '#define ADD(a, b) asm volatile( \\\n  NAME " %0, %1, " \\\n  "7;" : OUT \\\n  : "r"(b))\n'
        "__device__ int f(int x) { int y; ADD(y, x + 1); return y; }\n"
    )
    _, body = rewritten(tmp_path, text)
    lines = body.split("\n")
    assert all(line.endswith("\\") for line in lines[2:5])
    assert "Add()" in body
    assert "kf_to_0 = (a)" in body


@needs_gxx
def test_what_is_not_emulated_is_an_error_with_its_line(tmp_path):
    text = (
        "__device__ int used(int x) {\n"
        "  int y;\n"
        '  asm volatile("add.s32 %0, %1, 1;\\n"\n'
        '               "tcgen05.frobnicate.b32 %0, %1;\\n" : "=r"(y) : "r"(x));\n'
        "  return y;\n"
        "}\n"
    )
    errors = compiled(tmp_path, text)
    assert "inline PTX: `tcgen05.frobnicate.b32 %0, %1` is not emulated" in errors
    assert f"{tmp_path}/source.cu:4:" in errors
    assert "used" in errors


@needs_gxx
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("#if __CUDA_ARCH__ >= 1000", "#endif"),
        ("static inline void unused() {", "}"),
        ("template <class T> void never(T) {", "}"),
    ],
)
def test_an_instruction_that_nobody_needs_is_no_error(tmp_path, before, after):
    statement = 'asm volatile("tcgen05.frobnicate;");'
    if before.startswith("#"):
        text = f"void f() {{\n{before}\n{statement}\n{after}\n}}\n"
    else:
        text = f"{before}\n{statement}\n{after}\n"
    assert compiled(tmp_path, text, "-Wno-unused-function") == ""


@needs_gxx
@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ('asm("add.rm.f32 %0, %0, %0;" : "+f"(y));', "add.rm.f32"),
        ('asm("add.cc.u32 %0, %0, %0;" : "+r"(x));', "add.cc.u32"),
        ('asm("add.u32 %0, %0, nothing;" : "+r"(x));', "nothing"),
        ('asm("add.u32 %0, %0, %3;" : "+r"(x));', "%3"),
        ('asm("add.u32 %0, %0;" : "+r"(x));', "add.u32 %0, %0"),
        ('asm("add.u32 %0, %1, 1;" : "+r"(x) : "r"(x), "Z"(x));', 'the constraint \\"Z\\"'),
        ('asm("bra AWAY;" : "+r"(x));', "AWAY"),
        ('asm("mov.u32 %0, %%nosuch;" : "=r"(x));', "%nosuch"),
        ('asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0}, {%0}, {%0}, {%0};" : "+f"(y));', "m8n8k4"),
        ('asm("shfl.down.b32 %0, %0, 1, 31;" : "+r"(x));', "shfl.down.b32"),
        ('asm(UNKNOWN : "+r"(x));', "a template with `UNKNOWN` in it"),
        ('asm("mov.u32 %0, 1;"\n#if 1\n : "=r"(x)\n#endif\n);', "a preprocessor directive in it"),
    ],
)
def test_what_is_refused_is_named(tmp_path, statement, message):
    text = f"unsigned f(unsigned x, float y) {{\n{statement}\nreturn x + y;\n}}\n"
    assert message.replace("\\", "") in compiled(tmp_path, text, "-Wno-uninitialized").replace("\\", "")


@needs_gxx
def test_it_stands_wherever_a_statement_does(tmp_path):
    text = (
        "namespace ptx { struct lane_id {}; }\n"  # names of a program that are names of the emulation too
        "struct S { float x[2]; };\n"
        "template <int N> __device__ float f(S& s, const float* p, bool b) {\n"
        '  if (b) asm volatile("st.global.f32 [%0 + %2], %1;" :: "l"(p), "f"(s.x[0]), "n"(N * 4));\n'
        '  else asm("mov.f32 %0, %1;" : "=f"(s.x[1]) : "f"(1.0f));\n'
        '  for (int i = 0; i < 2; ++i) asm("fma.rn.f32 %0, %0, %0, %1;" : "+f"(s.x[i]) : "f"(s.x[1 - i]));\n'
        '  auto g = [&] { unsigned lane; asm("mov.u32 %0, %laneid;" : "=r"(lane)); return lane; };\n'
        "  return s.x[g() & 1];\n"
        "}\n"
        "float use(S& s, const float* p) { return f<3>(s, p, true); }\n"
    )
    assert compiled(tmp_path, text) == ""


def test_no_two_handlers_answer_to_one_name():
    names = re.findall(r"def (do_\w+)", (SIMT / "rewriter" / "ptx.py").read_text())
    assert len(names) == len(set(names))
