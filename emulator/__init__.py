"""CUDA programs on a CPU. README.md beside this file is its chapter."""

import pathlib

__version__ = "0.1.0"  # of both wheels
FOLDER = pathlib.Path(__file__).resolve().parent
# Headers that every emulated source reads, compiled once: of a small source they take half of the time.
PRECOMPILED = ("cuda_runtime.h", "cuda_bf16.h", "cuda_fp16.h", "kf_simt/ptx.h", "stdexcept", "string")
# With these the kernels call count/callbacks.cpp at each access, comparison and basic block; the rest of the emulation
# is compiled without them. -O1 leaves the loads that nvcc leaves too. GCC would take a float4 apart before it adds the
# calls (-ftree-sra), and one 16-byte load would look like four; what it does to loops comes later and changes nothing.
# That fences order nothing for -fsanitize=thread (-Wtsan) is no matter: nobody looks for races here.
COUNTING = [
    "-O1", "-g1", "-fsanitize=thread", "-fsanitize-coverage=trace-pc,trace-cmp", "-fno-tree-sra",
    "-DKF_SIMT_INSTRUMENTED", "-Wno-tsan",
]  # fmt: skip


# And with these at each access as the source has it, one after the other, for recorded runs.
TRACING = ["-O0", "-g", "-fsanitize=thread", "-DKF_SIMT_INSTRUMENTED", "-Wno-tsan"]


def runtime_sources(*, counting: bool = False, tracing: bool = False) -> list[pathlib.Path]:
    """The sources that are linked to emulated kernels."""
    tools = sorted((FOLDER / "count").glob("*.cpp")) if counting else []
    if tracing:
        tools = [FOLDER / "count" / "callbacks.cpp", FOLDER / "trace" / "tracer.cpp"]
    return [*sorted((FOLDER / "src").glob("*.cpp")), *tools]


def rewriter_files() -> list[pathlib.Path]:
    """The files that decide what a CUDA source is compiled as."""
    return [FOLDER / "__main__.py", *sorted((FOLDER / "rewriter").glob("*.py"))]
