"""Faults of memory in a process that holds several libraries of emulated kernels, and Python's own handler."""

import subprocess
import sys
import textwrap

import pytest

from emulator import programs
from kernel_fusion.console import child_environment

SOURCE = """
__global__ void add_one(int* at) { *at += 1; }
extern "C" __attribute__((visibility("default"))) void add_one_to(int* at) { add_one<<<1, 1>>>(at); }
"""
# Two libraries `a` and `b`, each with a page that it watches, and the addresses of both.
PRELUDE = """
import ctypes, faulthandler, mmap, sys
faulthandler.enable()
a, b = (ctypes.CDLL(path) for path in sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
second = first + mmap.PAGESIZE
libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(2 * mmap.PAGESIZE), 0)
a.kf_simt_watch(ctypes.c_void_p(first), ctypes.c_size_t(mmap.PAGESIZE))
b.kf_simt_watch(ctypes.c_void_p(second), ctypes.c_size_t(mmap.PAGESIZE))
def seen(library):
    text = ctypes.create_string_buffer(1000)
    return library.kf_simt_seen(text, ctypes.c_size_t(1000)), text.value.decode()
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The paths of two libraries with the same kernel."""
    folder = tmp_path_factory.mktemp("libraries")
    for name in ("a", "b"):
        (folder / f"{name}.cu").write_text(SOURCE)
    return [str(programs.compile_library(folder / f"{name}.cu")) for name in ("a", "b")]


def in_a_process(libraries, text: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(text), *libraries]
    return subprocess.run(command, env=child_environment(), capture_output=True, text=True)


def test_each_library_sees_its_own_pages(libraries):
    done = in_a_process(
        libraries,
        """
        b.add_one_to(ctypes.c_void_p(second))
        a.add_one_to(ctypes.c_void_p(second))
        print(seen(a), seen(b))
        libc.memset(ctypes.c_void_p(first), 1, ctypes.c_size_t(4))
        a.add_one_to(ctypes.c_void_p(first))
        print(seen(a), seen(b))
        print(memory[0], memory[mmap.PAGESIZE])
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    emulated, plain, values = done.stdout.splitlines()
    assert emulated.startswith("(0, '') (1, 'region 0: writes 0x")
    assert emulated.endswith(" 0 bytes into it, by kernel add_one, block (0,0,0), thread (0,0,0)\\n')")
    assert plain.startswith("(1, 'region 0: writes 0x")
    assert plain.endswith(" by a thread that is not emulated\\n') (0, '')")
    assert values == "2 2"


def test_what_is_watched_by_nobody_is_left_to_python(libraries):
    done = in_a_process(libraries, "ctypes.string_at(1)")
    assert done.returncode == -11
    assert done.stderr.startswith("Fatal Python error: Segmentation fault\n")
