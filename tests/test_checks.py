"""The repository's own checks find what they are for."""

import sys

import pytest

from kernel_fusion.checks.repository import ROOT, run
from kernel_fusion.checks.text import fences, is_quoted
from kernel_fusion.console import captured

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


SHARED = "namespace kf { inline int f() { return 1; } }\nint a() { return kf::f(); }"
OWN = "namespace kf::BACKEND { inline int f() { return 1; } }\nint a() { return kf::BACKEND::f(); }"
STANDARD = "#include <vector>\nstatic std::vector<int> v; void use() { v.push_back(1); }\n"


@pytest.mark.parametrize(("text", "code"), [(OWN, 0), (SHARED, 1)], ids=["own namespaces", "one name for both"])
def test_common_weak_symbol_is_found(tmp_path, text, code):
    """Unoptimised, so that nothing is inlined. The standard library's function is in both, and allowed. The backends'
    objects may lie in two folders.
    """
    folders = []
    for kind in ("emulated", "gpu"):
        source = tmp_path / f"of_{kind}" / kind / "x.cpp"
        source.parent.mkdir(parents=True)
        source.write_text(STANDARD + text.replace("BACKEND", kind))
        run("c++", "-std=c++17", "-O0", "-c", str(source), "-o", f"{source}.o")
        folders.append(tmp_path / f"of_{kind}")
    script = [sys.executable, ROOT / ".ci" / "weak_symbols.py"]
    for told in ([tmp_path], folders[::-1]):
        done = captured([*script, *told])
        assert done.returncode == code, done.stdout + done.stderr
        assert ("kf::f()" in done.stdout) == (code == 1)
        assert "0 weak symbols" not in done.stdout
    alone = captured([*script, folders[1]])
    assert (alone.returncode, "no objects of the emulation" in alone.stderr) == (2, True)
