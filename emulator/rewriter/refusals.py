"""Names what a rewritten CUDA program uses and the emulation lacks: file, line and function, before it is compiled.

    python -S emulator check PROGRAM.cu.cpp -o CHECKED.cpp -- COMPILER FLAGS...

What it writes is the program as it is to be compiled (see views.py). The compiler preprocesses it, so that conditions
and macros are its own, and includes that are missing are all found. Then the program's own lines are searched for names
that CUDA has and neither the emulation nor the program defines. What is not found here (a function of a library nobody
listed) the compiler reports as undeclared.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from . import OWN_INCLUDE, rewrite, views

# Names of CUDA and its libraries, what they belong to, and its headers. The first pattern that matches a name counts.
FEATURES = [
    (r"cudaGraphics\w*|cuda(GL|EGL|D3D|VDPAU)\w+", "graphics interoperability", r"cuda_\w+_interop\.h|cuda(GL|EGL)\.h"),
    (r"cudaGraph\w*|cuda(Stream|Thread)\w*Captur\w*|cudaUserObject\w*", "graphs", ""),
    (r"\w*[tT]extureObject\w*|cuda\w*Texture\w*|cudaResource\w+|tex[123]D\w*|texCubemap\w*|texture",
     "textures", r"texture_\w+\.h|surface_\w+\.h"),
    (r"cuda\w*Surface\w*|surf[123]D\w*|surfCubemap\w*|surface", "surfaces", ""),
    (r"cuda\w*Array\w*|cuda\w*Mipmap\w*|cuda\w*ChannelDesc|cudaChannelFormat\w*", "CUDA arrays", ""),
    (r"cudaMemPool\w*|cudaMallocFromPoolAsync|cudaDevice[GS]et\w*MemPool", "memory pools", ""),
    (r"cudaIpc\w*", "memory shared by processes", ""),
    (r"cuda(Import|Destroy|Signal|Wait)?External\w*", "memory of other APIs", ""),
    (r"cudaMulticast\w*|multimem_\w+", "multicast memory", ""),
    (r"cudaMemcpyBatchAsync|cudaMemcpy3DBatchAsync", "batches of copies", ""),
    (r"cudaLibrary\w*|cudaKernel\w*|cudaGetDriverEntryPoint\w*|cudaGetFuncBySymbol", "loading of code", ""),
    (r"cudaGreen\w*|cudaExecutionCtx\w*", "execution contexts", ""),
    (r"cudaLog\w*", "logs of the driver", ""),
    (r"this_multi_grid|multi_grid_group|cudaLaunchCooperativeKernelMultiDevice", "grids over several devices", ""),
    (r"reduce_update_async|reduce_store_async", "asynchronous reductions", ""),
    (r"block_tile_memory|invoke_one\w*", "cooperative groups", ""),
    (r"load_matrix_sync|store_matrix_sync|mma_sync|fill_fragment|fragment", "wmma", r"mma\.h"),
    (r"__v(abs|add|avg|cmp|hadd|i?max|i?min|neg|sad|set|sub|subus|maxs|mins|ib)\w*[24]?|__v\w+[24]|__vi\w+",
     "SIMD-in-a-word instructions", ""),
    (r"__pipeline_\w+|__mbarrier_\w+", "pipeline primitives", r"cuda_pipeline.*|cuda_awbarrier.*"),
    (r"__nv_fp[468]\w*|__nv_cvt_\w+", "float8, float6 and float4", r"cuda_fp[468]\.h"),
    (r"__nvvm_\w+|__nv_\w+", "compiler intrinsics", ""),
    (r"cublas\w+|CUBLAS(LT)?_\w+", "cuBLAS", r"cublas.*"),
    (r"curand\w*|CURAND_\w+", "cuRAND", r"curand.*"),
    (r"cufft\w+|CUFFT_\w+", "cuFFT", r"cufft.*"),
    (r"cusparse\w+|CUSPARSE_\w+", "cuSPARSE", r"cusparse.*"),
    (r"cusolver\w+|CUSOLVER_\w+", "cuSOLVER", r"cusolver.*"),
    (r"cudnn[A-Z]\w+|CUDNN_\w+", "cuDNN", r"cudnn.*"),
    (r"cutensor[A-Z]\w+", "cuTENSOR", r"cutensor.*"),
    (r"nccl[A-Z]\w+", "NCCL", r"nccl\.h"),
    (r"nvrtc[A-Z]\w+", "compilation at run time", r"nvrtc\.h"),
    (r"nvml[A-Z]\w+", "NVML", r"nvml\.h"),
    (r"nvtx[A-Z]\w+", "NVTX", r"nvtx3/.*|nvToolsExt.*"),
    (r"nvjpeg[A-Z]\w+|nppi?[A-Z]\w+", "image libraries", r"npp.*|nvjpeg.*"),
    (r"cuda[A-Z]\w*", "runtime API", ""),
    (r"cu[A-Z]\w+|CU(device|context|module|function|stream|event|deviceptr|result)", "driver API", r"cuda\.h"),
    (r"__[a-z]\w*", "device function", ""),
    (r"", "Thrust", r"thrust/.*"),
    (r"", "CUB", r"cub/.*"),
    (r"", "libcu++", r"cuda/.*|nv/target"),
    (r"", "CUTLASS", r"cutlass/.*|cute/.*"),
]  # fmt: skip
# Namespaces: a name before `::`, or after `namespace`.
NAMESPACES = {
    "thrust": "Thrust",
    "cub": "CUB",
    "cuda": "libcu++",
    "nvcuda": "wmma",
    "wmma": "wmma",
    "cutlass": "CUTLASS",
    "cute": "CUTLASS",
    "nvtx3": "NVTX",
}
# The namespaces that a header declares: a program may name them in `using namespace` and use nothing of them.
DECLARED = {
    "wmma": "namespace nvcuda { namespace wmma {} }",
    "Thrust": "namespace thrust { namespace placeholders {} }",
    "CUB": "namespace cub {}",
    "libcu++": "namespace cuda { namespace std {} namespace ptx {} namespace device {} }",
    "CUTLASS": "namespace cutlass {} namespace cute {}",
    "NVTX": "namespace nvtx3 {}",
}
GROUPS = "cooperative_groups"
STUBS = "kf-headers-"  # begins the name of the folder with what stands in for headers
# Words that are ordinary ones, unless they are called.
CALLED = {"textures", "surfaces", "wmma"}
COMPILED_FEATURES = [(re.compile(pattern), reason) for pattern, reason, _ in FEATURES]
# What begins with two underscores and belongs to the compiler or the C library.
OF_THE_COMPILER = re.compile(
    r"__(builtin|sync|atomic|has|is|attribute|declspec|typeof|alignof|asm|volatile|const|inline|restrict|signed|extension"
    r"|real|imag|complex|label|decltype|underlying|func|thread|auto|null|int128|float\d|PRETTY|FUNCTION|cxa|gnu|cpu"
    r"|reference|remove|make|array|bases|direct|integer|type_pack|remove|constinit|transaction|kf)\w*"
)
# After these words a name is used, not declared.
USING = {
    "return", "else", "case", "throw", "new", "delete", "do", "co_return", "co_yield", "sizeof", "const", "volatile",
    "static", "extern", "constexpr", "inline", "typename", "mutable", "register", "thread_local", "and", "or", "not",
    "if", "while", "operator", "typedef",
}  # fmt: skip

# What may stand before a parenthesis in a declaration.
NOT_A_FUNCTION = {"alignas", "decltype", "__attribute__", "explicit", "noexcept", "requires", "__declspec"}

MARKER = re.compile(r'#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"([ \d]*)$')
TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])+\'|[A-Za-z_]\w*|\.?\d(?:\'?[\w.]|[eEpP][+-])*|::|->|\S'
)  # without comments, which the preprocessor took out
MISSING_FILE = re.compile(
    r"^(.*?):(\d+):\d+: fatal error: '?(.*?)'?(?:: No such file or directory| file not found)$", re.MULTILINE
)


class Finding(NamedTuple):
    """Something that is missing: where, in which function (empty outside of any), and the sentence that names it."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        place = f" in function {self.function}:" if self.function else ""
        return f"{self.file}:{self.line}:{place} {self.text}"


class Token(NamedTuple):
    text: str
    file: str
    line: int


def header_reason(name: str) -> str | None:
    """What a header belongs to that the emulation lacks, or None."""
    return next((reason for _, reason, pattern in FEATURES if pattern and re.fullmatch(pattern, name)), None)


def preprocess(preprocessor: views.Preprocessor) -> tuple[str, bool, list[Finding]]:
    """`views.one_text`, and the includes that were not found: an empty file stands in for each of them.

    In place of a header of CUDA's it has the namespaces. The text is then what must be compiled, as if it differed.
    """
    missing: dict[Finding, None] = {}
    stubs = False
    with tempfile.TemporaryDirectory(prefix=STUBS) as folder:

        def text_with_stubs(flags: list[str]) -> str:
            nonlocal stubs
            while True:
                done = preprocessor.run([*flags, f"-I{folder}"])
                if done.returncode == 0:
                    return done.stdout
                found = MISSING_FILE.search(done.stderr)
                if found is None:
                    raise views.ViewError(done.stderr.strip())
                file, line, name = found.groups()
                stub = Path(os.path.normpath(Path(folder) / name))
                reason = header_reason(name)
                if stub.exists() or Path(folder) not in stub.parents:
                    raise views.ViewError(done.stderr.strip())
                text = f"<{name}> is not emulated ({reason})" if reason else f"{name}: there is no such file"
                missing[Finding(file, int(line), "", text)] = None
                stubs = True
                stub.parent.mkdir(parents=True, exist_ok=True)
                stub.write_text(f"#pragma once\n{DECLARED.get(reason or '', '')}\n")

        text, differs = views.one_text(text_with_stubs)
    return text, differs or stubs, list(missing)


def split(text: str) -> tuple[list[Token], set[str], list[Finding]]:
    """The program's own tokens, the words of all other files, and includes of other CUDA installations' headers."""
    own: list[Token] = []
    others: list[str] = []
    findings: list[Finding] = []
    file, line, mine, stub = "", 0, False, False
    for row in text.split("\n"):
        marker = MARKER.match(row)
        if marker is not None:
            entered = marker[2].replace("\\\\", "\\").replace('\\"', '"')
            flags = marker[3].split()
            inside = str(OWN_INCLUDE) + os.sep
            name = re.search(r"(?:^|/)((?:thrust|cub|cuda|cutlass|cute|nvtx3)/[^/].*|[^/]+)$", entered)
            if mine and "1" in flags and "3" in flags and name and header_reason(name[1]):
                text = f"<{name[1]}> is not emulated ({header_reason(name[1])})"
                findings.append(Finding(file, line - 1, "", text))
            file, line = entered, int(marker[1])
            mine = not entered.startswith((inside, "<")) and "3" not in flags
            stub = f"{os.sep}{STUBS}" in entered
            continue
        if stub:
            pass
        elif not mine:
            others.append(row)
        elif not row.lstrip().startswith("#"):  # a pragma
            own += [Token(match.group(), file, line) for match in TOKEN.finditer(row)]
        line += 1
    return own, set(re.findall(r"[A-Za-z_]\w*", "\n".join(others))), findings


def is_name(text: str) -> bool:
    return text[0].isalpha() or text[0] == "_"


def declared(tokens: list[Token]) -> set[str]:
    """The names that the program declares, as far as the words around them tell: a name too many is no harm."""
    names = set()
    for i in range(1, len(tokens) - 1):
        name, before, after = tokens[i].text, tokens[i - 1].text, tokens[i + 1].text
        if not is_name(name):
            continue
        if before in ("struct", "class", "enum", "union", "namespace"):
            if i > 1 and tokens[i - 2].text == "using":
                continue
            if after in ("{", ":", ";", "="):
                names.add(name)
        elif before in ("using", "define"):
            names.add(name)
        elif (is_name(before) and before not in USING) or before in ("*", "&", ">"):
            if after in ("(", "=", ";", ",", "[", "{", ")", ":"):
                names.add(name)
        elif before in ("{", ",") and after == "=":  # of an enumeration
            names.add(name)
    return names


class Functions:
    """Follows braces, to tell the name of the function that a token is in and whether it is a kernel."""

    def __init__(self):
        self.statement: list[str] = []  # since the last ; { } outside of functions
        self.scopes: list[str] = []  # open braces: "scope" of a namespace or a class, "function", or "other"
        self.name = ""
        self.kernel = False

    def feed(self, text: str) -> None:
        inside = "function" in self.scopes
        listed = self.scopes[-1:] == ["other"]  # in the braces of an initialiser or an enumeration
        if text == "{":
            kind = "other"
            if not inside and not listed:
                name = self.function_name()
                if name:
                    kind, self.name, self.kernel = "function", name, False
                elif "=" not in self.statement and {"namespace", "class", "struct", "union", "extern"} & set(
                    self.statement
                ):
                    kind = "scope"
            self.scopes.append(kind)
            if kind != "other":
                self.statement = []
        elif text == "}":
            kind = self.scopes.pop() if self.scopes else "scope"
            if kind == "function":
                self.name, self.kernel = "", False
            if kind != "other":
                self.statement = []
        elif not inside and not listed:
            if text == ";" or (text == ":" and self.statement[-1:] in (["public"], ["private"], ["protected"])):
                self.statement = []
            else:
                self.statement.append(text)
        elif text == "enter_kernel":
            self.kernel = True

    def function_name(self) -> str:
        """The name before the parameters in a statement that ends in a function's body; empty if it is none."""
        words = self.statement
        while words[:1] == ["template"]:
            words = words[self.end_of_arguments(words) :]
        depth = angle = 0
        for i, text in enumerate(words):
            if text == "(" and depth == 0 and angle == 0:
                name = words[i - 1] if i > 0 else ""
                if "=" in words[:i] and "operator" not in words[:i]:
                    return ""
                if "operator" in words[:i]:
                    at = words.index("operator")
                    return "".join(words[at:i]) if i > at + 1 else "operator()"
                if is_name(name or "(") and name not in NOT_A_FUNCTION:
                    return ("~" if words[i - 2 : i - 1] == ["~"] else "") + name
            depth += (text == "(") - (text == ")")
            if depth == 0:
                angle += (text == "<") - (text == ">")
        return ""

    @staticmethod
    def end_of_arguments(words: list[str]) -> int:
        """The index after the > that closes the first < in `words`."""
        depth = angle = 0
        for i, text in enumerate(words):
            depth += (text in "([{") - (text in ")]}")
            if depth == 0 and text in ("<", ">"):
                angle += 1 if text == "<" else -1
                if angle == 0:
                    return i + 1
        return len(words)


def search(tokens: list[Token], known: set[str]) -> list[Finding]:
    """The places where the program's tokens name what is neither known nor its own, each name once a line."""
    own = declared(tokens)
    namespaces = {
        t.text for b, t in zip(tokens, tokens[1:], strict=False) if b.text == "namespace" and t.text not in NAMESPACES
    }
    namespaces |= {name for name in NAMESPACES if name in known}
    groups = {GROUPS} | {
        tokens[i - 2].text for i in range(2, len(tokens)) if [t.text for t in tokens[i - 1 : i + 1]] == ["=", GROUPS]
    }
    functions = Functions()
    findings: dict[Finding, None] = {}
    last = len(tokens) - 1
    for i, token in enumerate(tokens):
        text = token.text
        functions.feed(text)
        if not is_name(text):
            continue
        before = tokens[i - 1].text if i > 0 else ""
        after = tokens[i + 1].text if i < last else ""
        what = None
        if text == "kernel_call" and functions.kernel:
            what = "a launch within a kernel is not emulated (dynamic parallelism)"
        elif before == "::" and i > 1 and tokens[i - 2].text in groups and text not in known | own:
            what = f"{tokens[i - 2].text}::{text} is not emulated (cooperative groups)"
        elif before in (".", "->") or (before == "::" and i > 1 and is_name(tokens[i - 2].text)):
            pass  # a member, or a name of a namespace that was looked at already
        elif text in NAMESPACES:
            # `using namespace` uses nothing yet; with another name for it something will be.
            using = before == "namespace" and i > 1 and tokens[i - 2].text == "using"
            renamed = before == "=" and i > 2 and tokens[i - 3].text == "namespace"
            named = after == "::" or before == "namespace" or renamed
            if text not in namespaces and named and not using and text not in own:
                member = tokens[i + 2].text if after == "::" and i + 2 <= last else ""
                what = f"{text}{'::' if member else ''}{member} is not emulated ({NAMESPACES[text]})"
        elif text not in known and text not in own:
            reason = feature(text, called=after in ("(", "<"))
            what = reason and f"{text} is not emulated ({reason})"
        if what:
            findings[Finding(token.file, token.line, functions.name, what)] = None
    return list(findings)


def feature(name: str, called: bool) -> str | None:
    """What a name of CUDA's belongs to, or None for any other name."""
    for pattern, reason in COMPILED_FEATURES:
        if pattern.fullmatch(name):
            if name.startswith("__") and not name.startswith("__nv_fp"):
                if not called or OF_THE_COMPILER.fullmatch(name):
                    return None
            if not called and reason in CALLED and name.islower():
                return None
            return reason
    return None


def check(preprocessor: views.Preprocessor) -> tuple[str, bool, list[Finding]]:
    """The preprocessed program, whether its device functions see it otherwise, and what it uses that is not emulated.
    Raises ViewError where it cannot be preprocessed."""
    text, differs, missing = preprocess(preprocessor)
    tokens, known, foreign = split(text)
    findings = foreign + search(tokens, known)
    # A header that is only included is no harm; beside what is used of it, it is named.
    if findings or any("there is no such file" in one.text for one in missing):
        findings += missing
    return text, differs, sorted(findings, key=lambda finding: (finding.file, finding.line))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Names what a rewritten CUDA program uses and the emulation lacks.")
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="what to compile, if nothing is missing")
    parser.add_argument("--depfile", type=Path, help="write the files that were read, as make rules")
    parser.add_argument("compiler", nargs="+", help="the compiler and its flags, after --")
    options = parser.parse_args(arguments)
    preprocessor = views.Preprocessor(options.compiler, options.source, options.output)
    try:
        text, differs, findings = check(preprocessor)
    except views.ViewError as error:
        print(error, file=sys.stderr)
        return 1
    for finding in findings:
        print(finding, file=sys.stderr)
    if findings:
        return 1
    if options.depfile:
        rewrite.write(options.depfile, preprocessor.dependencies)
    rewrite.write(options.output, text if differs else options.source.read_text(errors="surrogateescape"))
    return 0
