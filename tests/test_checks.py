"""The repository's own checks find what they are for."""

import subprocess
import sys

import pytest

from kernel_fusion.checks.repository import ROOT, run
from kernel_fusion.checks.text import fences, is_quoted

TEXT = "int f() {\n  if (x) {\n    y();\n#pragma unroll\n    z();\n  }\n}\n"


@pytest.mark.parametrize(
    ("quoted", "stands"),
    [
        ("    y();\n#pragma unroll\n    z();", True),
        ("if (x) {\n  y();", True),
        ("  y();\n#pragma unroll\n  z();", True),
        ("y();\n z();", False),
        ("y()", False),
        ("if (x) {\n  w();", False),
    ],
)
def test_changed_snippet_is_found(quoted, stands):
    assert is_quoted(quoted, TEXT) == stands


def test_fences_are_read_with_their_tags(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n<!-- source: a.cu -->\n```cuda\nint x;\n```\n\n```bash gpu\nls\nls\n```\n")
    first, second = fences(page)
    assert (first.language, first.text, first.before) == ("cuda", "int x;", "<!-- source: a.cu -->")
    assert (second.tags, second.text, second.line) == (("gpu",), "ls\nls", 9)


@pytest.mark.parametrize(
    ("emulated", "gpu", "code"),
    [
        ("namespace kf::emulated { inline int f() { return 1; } }\nint a() { return kf::emulated::f(); }", "gpu", 0),
        ("namespace kf { inline int f() { return 1; } }\nint a() { return kf::f(); }", "same", 1),
    ],
    ids=["own namespaces", "one name for both"],
)
def test_common_weak_symbol_is_found(tmp_path, emulated, gpu, code):
    """Unoptimised, so that nothing is inlined. The standard library's function is in both, and allowed."""
    standard = "#include <vector>\nstatic std::vector<int> v; void use() { v.push_back(1); }\n"
    second = emulated.replace("emulated", "gpu") if gpu == "gpu" else emulated
    for kind, text in (("emulated", emulated), ("gpu", second)):
        (tmp_path / kind).mkdir()
        source = tmp_path / kind / "x.cpp"
        source.write_text(standard + text)
        run("c++", "-std=c++17", "-O0", "-c", str(source), "-o", f"{source}.o")
    done = subprocess.run([sys.executable, ROOT / ".ci" / "weak_symbols.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("kf::f()" in done.stdout) == (code == 1)
    assert "0 weak symbols" not in done.stdout


def test_the_backends_objects_may_lie_in_two_folders(tmp_path):
    for kind in ("emulated", "gpu"):
        source = tmp_path / f"{kind}.cpp"
        source.write_text("namespace kf { inline int f() { return 1; } }\nint a() { return kf::f(); }")
        (tmp_path / f"of_{kind}" / kind).mkdir(parents=True)
        run("c++", "-std=c++17", "-O0", "-c", str(source), "-o", str(tmp_path / f"of_{kind}" / kind / "x.o"))
    script = [sys.executable, ROOT / ".ci" / "weak_symbols.py"]
    both = subprocess.run([*script, tmp_path / "of_gpu", tmp_path / "of_emulated"], capture_output=True, text=True)
    assert (both.returncode, "kf::f()" in both.stdout) == (1, True), both.stdout + both.stderr
    one = subprocess.run([*script, tmp_path / "of_gpu"], capture_output=True, text=True)
    assert one.returncode == 2
    assert "no objects of the emulation" in one.stderr
