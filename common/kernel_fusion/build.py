"""Builds a step's extension: host files, the emulated kernels, and the GPU's where nvcc and a CUDA torch are there.

`setup.py` of each step lists sources and flags; this module turns them into a ninja file. ninja knows what an edit
makes stale, and rebuilds what an interrupted build left. The library is linked under a temporary name and renamed. Of
two processes that build a step, one waits for the other.

Environment:
    KF_CUDA               auto (default) | 0 | 1: compile the kernels with nvcc where possible | never | or fail.
    TORCH_CUDA_ARCH_LIST  architectures, such as "8.0 9.0a+PTX"; default: the visible GPU's, else all that nvcc knows.
    MAX_JOBS              parallel compilations; default: the cores, fewer where memory is short.
    KF_WERROR             1: warnings in our own files are errors.
    KF_EMULATED           folder of another build, such as build/temp.…, whose objects of the emulation are linked.
    KF_HOST_FLAGS         more flags for host files, behind the others, such as -O0 where nothing is to run.
    CXX                   the host's C++ compiler; default c++.
"""

import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from glob import glob
from typing import NamedTuple

from setuptools import Extension
from setuptools.command.build_ext import build_ext as _build_ext

import emulator
from emulator.ninja_file import NinjaFile, ninja_path, one_at_a_time, precompile, shell_words
from kernel_fusion import rung_tables

COMMON = pathlib.Path(__file__).resolve().parents[1]
DEFAULT_ARCHITECTURES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0a", "10.0", "12.0")
GIB_PER_JOB = 2.0  # what one compilation of a file that includes torch takes at its peak, rounded up


class BuildError(RuntimeError):
    """A build that cannot be done, with what to do about it."""


class Borrowed(NamedTuple):
    """The rungs of an earlier step's op, with which some of a step's own begin; both link the same objects."""

    folder: str  # the op's, relative to setup.py, such as "../step2-attention/kernels/attention"
    include_dirs: list[str]  # as that step has them, relative to setup.py too


class StepExtension(Extension):
    """A step's library."""

    def __init__(
        self,
        name: str,  # "<module>._C"
        *,
        host: Sequence[str],  # .cpp files that may include torch
        kernels: Sequence[str],  # .cu files, each compiled for the emulation and, in a CUDA build, by nvcc
        include_dirs: Sequence[str],  # the step's own headers and those of earlier steps, relative to setup.py
        borrowed: Sequence[Borrowed] = (),
        cxx_flags: Sequence[str] = (),  # of host files and emulated kernels
        nvcc_flags: Sequence[str] = (),
    ) -> None:
        kernels = list(kernels)
        self.includes = {source: list(include_dirs) for source in (*host, *kernels)}
        for one in borrowed:
            theirs = sorted(glob(f"{one.folder}/*.cu"))
            kernels += theirs
            self.includes |= dict.fromkeys(theirs, one.include_dirs)
        super().__init__(name, sources=[*host, *kernels], include_dirs=list(include_dirs), language="c++")
        self.host, self.kernels = list(host), kernels
        self.cxx_flags, self.nvcc_flags = list(cxx_flags), list(nvcc_flags)


# ---- what there is to build with ----


class Cuda(NamedTuple):
    """A usable CUDA compiler: nvcc's path, the toolkit's folder, and the architectures to compile for."""

    nvcc: str
    home: pathlib.Path
    architectures: tuple[str, ...]


def cuda_home(nvcc: str) -> pathlib.Path:
    """The toolkit's folder as nvcc itself states it; nvcc on the PATH may be a wrapper script that lies elsewhere."""
    dry = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    found = re.search(r"^#\$ TOP=(.*)$", dry.stderr + dry.stdout, re.MULTILINE)
    if not found:
        raise BuildError(f"{nvcc} --dryrun names no TOP folder; is it NVIDIA's nvcc?\n{dry.stderr.strip()}")
    return pathlib.Path(found.group(1)).resolve()


def known_architectures(nvcc: str) -> set[str]:
    """Compute capabilities that nvcc can compile for, such as {"8.0", "9.0", "9.0a"}."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    known = {f"{int(sm[0]) // 10}.{int(sm[0]) % 10}{sm[1]}" for sm in re.findall(r"sm_(\d+)([a-z]?)", listed)}
    # The list leaves out the architecture-specific variants (9.0a), which exist from 9.0 on.
    return known | {f"{arch}a" for arch in known if arch[-1].isdigit() and float(arch) >= 9.0}


def architectures(nvcc: str) -> tuple[str, ...]:
    """What to compile for: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else the default list as far as nvcc knows it.

    9.0 means 9.0a, which runs on the same GPUs and has wgmma: without it the rungs for Hopper could only trap.

    Raises:
        BuildError: TORCH_CUDA_ARCH_LIST names what nvcc does not know.
    """
    import torch

    known = known_architectures(nvcc)
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if asked:
        unknown = [arch for arch in asked if arch.removesuffix("+PTX") not in known]
        if unknown:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: {nvcc} cannot compile for {' '.join(unknown)}; "
                f"it knows {' '.join(sorted(known))}"
            )
        return tuple("9.0a" if arch == "9.0" and "9.0a" in known else arch for arch in asked)
    if torch.cuda.is_available():
        capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        visible = []
        for major, minor in sorted(capabilities):
            specific = f"{major}.{minor}a"
            visible.append(specific if major == 9 and specific in known else f"{major}.{minor}")
        return tuple(visible)
    listed = [arch for arch in DEFAULT_ARCHITECTURES if arch in known]
    return (*listed[:-1], listed[-1] + "+PTX")


def gencode_flags(archs: tuple[str, ...]) -> list[str]:
    """nvcc's -gencode flags; "+PTX" adds PTX, from which a newer driver compiles for a GPU not listed."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def find_cuda() -> tuple[Cuda | None, str]:
    """The CUDA compiler to use, or None and the reason why the build has no GPU kernels.

    Raises:
        BuildError: KF_CUDA=1 and CUDA cannot be had, or KF_CUDA is neither auto, 0 nor 1.
    """
    import torch

    choice = os.environ.get("KF_CUDA", "auto").lower()
    if choice not in ("auto", "0", "1"):
        raise BuildError(f"KF_CUDA must be auto, 0 or 1, got {choice!r}")
    if choice == "0":
        return None, "KF_CUDA=0"
    nvcc = shutil.which("nvcc") or next((p for p in ("/usr/local/cuda/bin/nvcc",) if os.path.exists(p)), None)
    if torch.version.cuda is None:
        problem = f"torch {torch.__version__} is a build without CUDA"
    elif nvcc is None:
        problem = "nvcc is not on the PATH"
    else:
        release = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"release (\d+)\.(\d+)", release)
        if not found:
            problem = f"{nvcc} --version names no release"
        elif found.group(1) != torch.version.cuda.split(".")[0]:
            problem = (
                f"nvcc is of CUDA {found.group(1)}, torch of CUDA {torch.version.cuda}; their major versions must agree"
            )
        else:
            return Cuda(nvcc, cuda_home(nvcc), architectures(nvcc)), ""
    if choice == "1":
        raise BuildError(f"KF_CUDA=1, but {problem}")
    return None, problem


def parallel_jobs() -> int:
    """MAX_JOBS, else one job a core, but no more than the free memory feeds."""
    asked = os.environ.get("MAX_JOBS")
    if asked:
        if not asked.isdigit() or int(asked) < 1:
            raise BuildError(f"MAX_JOBS must be a positive integer, got {asked!r}")
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    except (ValueError, OSError, AttributeError):  # macOS does not say
        return cores
    return max(1, min(cores, int(available / GIB_PER_JOB)))


# ---- the ninja file ----


def _warnings() -> list[str]:
    return ["-Wall", "-Wextra"] + (["-Werror"] if os.environ.get("KF_WERROR") == "1" else [])


def counting_name(kernels: str) -> str:
    """What files of a build with these kernels counting are called; `kernels` as --counting has them."""
    short = kernels.replace("/", "-")
    return hashlib.sha256(kernels.encode()).hexdigest()[:12] if "," in kernels else short


def write_ninja(
    extension: StepExtension, folder: pathlib.Path, library: pathlib.Path, cuda: Cuda | None, counting: str = ""
) -> pathlib.Path:
    """Writes a ninja file for `extension` into `folder`; the build ends in `library`. Returns the file's path.

    The folder is that of all steps, so that what two of them need is compiled once: the emulation, and the rungs of
    one step that another borrows. Each step has a ninja file and, for what is its own, a folder there.

    With `counting` some emulated kernels count their accesses, see `counts`: "softmax" or "softmax/v1_naive", several
    with commas between them. Everything else is compiled as without it, and once for both.

    Where KF_EMULATED names the folder of another build, nothing of the emulation is compiled.

    Raises:
        BuildError: that folder lacks an object.
    """
    import torch
    from torch.utils import cpp_extension

    cxx = os.environ.get("CXX", "c++")
    here = pathlib.Path.cwd()
    common = ["-I", COMMON / "include"]
    hidden = ["-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-strict-aliasing"]
    with_cuda = ["-DKF_WITH_CUDA"] if cuda else []
    depfile = "-MD -MF $out.d"
    openmp = [] if sys.platform == "darwin" else ["-fopenmp"]  # Apple's clang has none: loops run on one core there

    torch_includes = [d for path in cpp_extension.include_paths() for d in ("-isystem", path)]
    torch_includes += ["-isystem", sysconfig.get_path("include")]
    if cuda:  # a slim toolkit leaves out libraries' headers; torch's own CUDA packages bring them
        torch_includes += ["-isystem", str(cuda.home / "include")]
        site = pathlib.Path(torch.__file__).resolve().parents[1]
        found = sorted(path for path in site.glob("nvidia/cu1*/include") if path.is_dir())
        torch_includes += [d for path in found for d in ("-isystem", str(path))]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    host_flags = [
        "-std=c++20", *hidden, *extension.cxx_flags, *_warnings(), *openmp, *common, *torch_includes, *with_cuda, abi,
        f"-DTORCH_EXTENSION_NAME={extension.name.rsplit('.', 1)[-1]}",
    ]  # fmt: skip
    # g++ warns where nvcc, whose word counts, does not: of threadIdx.x < n, and of unrolled loops over registers. And a
    # product and a sum stay two operations, so that all CPUs give the same bits.
    unlike_nvcc = ["-Wno-sign-compare", "-Wno-maybe-uninitialized", "-Wno-psabi", "-ffp-contract=off"]
    emulated_flags = [
        "-std=c++17", *hidden, "-O2", *_warnings(), *unlike_nvcc, "-DKF_BACKEND=emulated",
        "-I", emulator.FOLDER / "include", *common, abi,
    ]  # fmt: skip

    ninja = NinjaFile()
    host = shell_words([cxx, *host_flags])
    ninja.rule("host", f"{host} $includes {depfile} -c $in -o $out", "c++ $in")
    ninja.rule("runtime", f"{shell_words([cxx, *emulated_flags])} {depfile} -c $in -o $out", "c++ $in (emulation)")
    objects = []
    taken = os.environ.get("KF_EMULATED", "")

    needed = {}
    emulated = {} if taken else {"emulated": [], **({"counting": emulator.COUNTING} if counting else {})}
    for rule, more in emulated.items():
        compiler = [cxx, *emulated_flags, *more]
        header = folder / "precompiled" / rule / "precompiled.h"
        includes_all = "".join(f"#include <{name}>\n" for name in emulator.PRECOMPILED)
        needed[rule] = [*emulator.rewriter_files(), *precompile(ninja, compiler, header, includes_all)]
        # -S: without what site-packages may start. The real path: what `python` compiled, `python3` need not.
        command = shell_words([os.path.realpath(sys.executable), "-S", emulator.FOLDER, "compile", "--rewrite"])
        command += f" $rewritten {shell_words([*compiler, '-include', header])} $includes"
        ninja.rule(rule, f"{command} {depfile} -c $in -o $out", "c++ $in")

    def taken_over(output: pathlib.Path) -> bool:
        """Adds this object to those that are linked; whether it is another build's, and so not to be compiled."""
        if not taken:
            objects.append(output)
            return False
        other = pathlib.Path(taken).resolve() / output.relative_to(folder)
        if not other.exists():
            raise BuildError(f"KF_EMULATED: there is no {other}; build the step there first")
        objects.append(other)
        return True

    def place(source: str, kind: str, suffix: str) -> pathlib.Path:
        """Where what is made of a source lies: in a folder of the step that it belongs to."""
        path = pathlib.Path(os.path.normpath(here / source)).relative_to(here.parent)
        return folder / path.parts[0] / kind / f"{pathlib.Path(*path.parts[1:])}{suffix}"

    def includes(source: str) -> str:
        return shell_words(f"-I{os.path.normpath(here / d)}" for d in extension.includes[source])

    def compile_one(rule: str, source: str, kind: str) -> None:
        output = place(source, kind, ".o")
        flags = [includes(source)]
        if kind == "host":
            # Bindings only call: to make that faster takes a third of their time.
            flags += ["-O1"] * source.endswith("pybind.cpp") + shlex.split(os.environ.get("KF_HOST_FLAGS", ""))
        ninja.build(output, rule, [os.path.normpath(here / source)], includes=" ".join(flags))
        objects.append(output)

    for source in extension.host:
        compile_one("host", source, "host")
    for runtime in emulator.runtime_sources(counting=bool(counting)):
        output = folder / "runtime" / f"{runtime.name}.o"
        if not taken_over(output):
            ninja.build(output, "runtime", [runtime])
    chosen = set(counting.split(","))
    counts = {}
    for source in extension.kernels:
        op = pathlib.Path(source).parent.name
        counts[source] = not chosen.isdisjoint({op, f"{op}/{pathlib.Path(source).stem}"})
    # Those that count come first: of an inline function that kernels of several ops share, the linker takes the first.
    for source in sorted(extension.kernels, key=lambda source: not counts[source]):
        rule = "counting" if counts[source] else "emulated"
        output = place(source, rule, ".o")
        if taken_over(output):
            continue
        path = pathlib.Path(os.path.normpath(here / source))
        rewritten = shell_words([place(source, f"rewritten-{rule}", ".cpp")])
        own = f"{includes(source)} {shell_words(['-I', path.parent])}"
        ninja.build(output, rule, [path], needed[rule], includes=own, rewritten=rewritten)

    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    if cuda:
        nvcc_flags = [
            "-std=c++17", "-ccbin", cxx, *gencode_flags(cuda.architectures), *extension.nvcc_flags, "-DKF_BACKEND=gpu",
            *with_cuda, "--expt-relaxed-constexpr", *common, abi,
            f"-Xcompiler={','.join([*hidden, '-Wall', '-Wextra'])}",
        ]  # fmt: skip
        if os.environ.get("KF_WERROR") == "1":
            nvcc_flags.append("-Werror=all-warnings")
        nvcc = shell_words([cuda.nvcc, *nvcc_flags])
        ninja.rule("gpu", f"{nvcc} $includes -MD -MF $out.d -c $in -o $out", "nvcc $in")
        for source in extension.kernels:
            compile_one("gpu", source, "gpu")
        libraries += [f"-L{cuda.home / 'lib64'}", "-lc10_cuda", "-ltorch_cuda", "-lcudart"]

    shared = ["-shared", *openmp, "-pthread"]
    if sys.platform == "darwin":
        shared = ["-bundle", "-undefined", "dynamic_lookup", "-pthread"]
    link = f"{shell_words([cxx, *shared])} $in -o $out.tmp {shell_words(libraries)} && mv -f $out.tmp $out"
    ninja.rule("link", link, "link $out", deps=False)
    ninja.build(library, "link", objects)
    ninja.lines.append(f"default {ninja_path(library)}")
    path = folder / f"{here.name}{f'-counting-{counting_name(counting)}' if counting else ''}.ninja"
    ninja.write(path)
    return path


def check_cxx(cxx: str, folder: pathlib.Path) -> None:
    """Refuses a compiler that puts a C++ standard library of its own into each library it links.

    Streams and exceptions pass between torch and a step, so both must use one shared libstdc++ (or libc++). With a
    compiler set up for -static-libstdc++ everything builds, and then the first error message crashes the process. In
    `folder` it is remembered that `cxx` passed. The error names another compiler here that would do.
    """
    found = shutil.which(cxx)
    if found is None:
        raise BuildError(f"no C++ compiler: {cxx!r} is not on the PATH; install g++, or set CXX to your compiler")
    if sys.platform != "linux":
        return
    digest = hashlib.sha256(f"{os.path.realpath(found)} {os.stat(found).st_mtime_ns}".encode()).hexdigest()[:12]
    passed = folder / f"cxx-{digest}"
    if passed.exists():
        return
    if not links_shared(cxx):
        other = "/usr/bin/g++"
        usable = os.path.exists(other) and os.path.realpath(other) != os.path.realpath(found) and links_shared(other)
        way_out = f"use the one that is here too: export CXX={other}" if usable else "set CXX to one that does not"
        raise BuildError(
            f"the compiler {cxx} links the C++ standard library statically, but torch and the steps must share one; "
            f"{way_out}"
        )
    passed.touch()


def links_shared(cxx: str) -> bool:
    """Whether a library that `cxx` links takes the C++ standard library from the system's shared one.

    Raises:
        BuildError: it cannot link a library at all.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = pathlib.Path(folder, "trial.cpp"), pathlib.Path(folder, "trial.so")
        source.write_text('#include <iostream>\nextern "C" void trial() { std::cout << 1; }\n')
        command = [cxx, "-shared", "-fPIC", str(source), "-o", str(library)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise BuildError(f"the compiler {cxx} cannot make a shared library:\n{done.stdout.strip()}")
        return any(name in library.read_bytes() for name in (b"libstdc++.so", b"libc++.so"))


def check_rung_tables(extension: StepExtension) -> None:
    """Refuses a step in which a rung's file and its row in the list do not agree.

    Raises:
        BuildError: with a line for each rung that would not be found, or that the list names and nobody has.
    """
    folders = sorted({pathlib.Path(source).parent for source in extension.kernels})
    found = [line for folder in folders for line in rung_tables.problems(folder)]
    if found:
        raise BuildError("\n".join(found))


class build_ext(_build_ext):
    """`python setup.py build_ext --inplace` for steps; with --counting=…, emulated kernels count their accesses."""

    build_temp: str  # None before finalize_options
    user_options = [
        *_build_ext.user_options,
        ("counting=", None, "ops, or op/rung, whose emulated kernels count their accesses; goes with --build-lib"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.counting = ""

    def finalize_options(self) -> None:
        asked = self.build_temp
        super().finalize_options()
        if asked is None:  # one folder for all steps, with the name that setuptools has for this Python
            self.build_temp = str(COMMON.parent / "build" / pathlib.Path(self.build_temp).name)

    def run(self) -> None:
        (extension,) = self.extensions
        try:
            with one_at_a_time(pathlib.Path(self.build_temp).resolve(), extension.name.split(".")[0]) as self.holding:
                super().run()
        except BuildError as error:
            raise SystemExit(f"error: {error}") from None

    def build_extension(self, extension: StepExtension) -> None:
        import ninja as ninja_package

        check_rung_tables(extension)
        cuda, why_not = find_cuda()
        module = extension.name.split(".")[0]
        gpu = f"no CUDA kernels ({why_not})"
        if cuda:
            gpu = f"CUDA kernels for {' '.join(cuda.architectures)} by {cuda.nvcc}"
        jobs = parallel_jobs()
        print(f"{module}: plain C++, emulated kernels, {gpu}; {jobs} job{'s' if jobs > 1 else ''}", flush=True)
        folder = pathlib.Path(self.build_temp).resolve()
        check_cxx(os.environ.get("CXX", "c++"), folder)
        library = pathlib.Path(self.get_ext_fullpath(extension.name)).resolve()
        library.parent.mkdir(parents=True, exist_ok=True)
        path = write_ninja(extension, folder, library, cuda, self.counting)
        ninja = pathlib.Path(ninja_package.BIN_DIR) / "ninja"
        command = [str(ninja), "-f", str(path), "-j", str(jobs)]
        if subprocess.run(command, cwd=folder, **self.holding).returncode != 0:
            raise SystemExit(f"{module}: the build failed; the compiler's messages are above")

    def copy_extensions_to_source(self) -> None:
        """For --inplace: beside its place, then renamed, so that nobody ever loads half a library or keeps one."""
        for extension in self.extensions:
            place = self.get_ext_filename(extension.name)
            shutil.copy2(pathlib.Path(self.build_lib, place), f"{place}.tmp")
            os.replace(f"{place}.tmp", place)
