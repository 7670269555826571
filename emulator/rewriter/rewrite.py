"""Turns a CUDA source into C++ for the emulation in `include/` and `src/`.

    python -S emulator rewrite IN.cu -o OUT.cpp -I dir... [--depfile D]

Every line stays where it is, so that a debugger or a sanitizer shows the line of the `.cu`. What is changed:

- `k<<<grid, block, shared, stream>>>(args)` becomes a synchronous call of a lambda around `k`;
- `__shared__` variables become references into the memory of the block;
- the body of a kernel begins with a line that tells the runtime which kernel it is;
- inline PTX becomes calls of functions (see ptx.py);
- casts to integer types in device code convert as a GPU does;
- `__noinline__`, `#pragma unroll` and casts of kernels to `void*` are taken out;
- headers found beside the source or in the given directories are rewritten too, where they contain any of this.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from . import OWN_INCLUDE, ptx
from .casts import Casts
from .launches import KERNEL_ARGUMENT, Launches
from .shared_variables import SharedVariables
from .tokens import RewriteError, Source, Token

BARRIERS = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"}
# What begins device code: the body of a function, or of a lambda, with one of these words before it.
DEVICE_WORDS = {"__global__", "__device__"}
DEFINE = re.compile(r"#\s*define\s+(?P<name>[A-Za-z_]\w*)(?P<parameters>\([^)]*\))?", re.DOTALL)
INCLUDE = re.compile(r'#\s*include\s*(?P<name>"[^"\n]+"|<[^>\n]+>)')
DROPPED_PRAGMA = re.compile(r"#\s*pragma\s+(?:unroll|nounroll|nv_\w+|hd_warning_disable)\b")


class Scanner(Casts, Launches, SharedVariables):
    """Finds what has to change in a file."""

    def __init__(self, source: Source, rewriter: Rewriter):
        super().__init__(source, rewriter.integers, rewriter.parameters)
        self.aliases, self.device_macros, self.macros = rewriter.aliases, rewriter.device_macros, rewriter.macros
        self.resolve = rewriter.resolve

    def run(self) -> None:
        self.process(self.tokenize(0, len(self.text), macro=False), macro=False)

    def process(self, tokens: list[Token], macro: bool) -> None:
        braces: list[str] = []  # for each open brace: namespace, device (in the body of a device function) or other
        statement = 0  # the first token after the last ; { or }
        on_device = macro  # device code; of a macro nobody knows, and the host gets the host's results all the same
        i = 0
        while i < len(tokens):
            token = tokens[i]
            text = token.text
            if token.kind == "directive":
                self.directive(token)
            elif text == "{":
                braces.append("device" if on_device else self.kind_of_brace(tokens[statement:i]))
                statement = i + 1
            elif text == "}":
                if braces:
                    braces.pop()
                statement = i + 1
                goes_on = i + 1 < len(tokens) and tokens[i + 1].text in (",", "{")  # to the body, after a{x}, b(x)
                on_device = (on_device and goes_on) or macro or braces[-1:] == ["device"]
            elif text == ";":
                statement = i + 1
                on_device = macro or braces[-1:] == ["device"]
            elif text == "(":
                if on_device:
                    self.integer_cast(tokens, i)
            elif text == "<" and self.is_triple(tokens, i, "<") and (i == 0 or tokens[i - 1].text != "operator"):
                self.launch(tokens, i)
                i += 2
            elif token.kind == "word":
                if text in DEVICE_WORDS or text in self.aliases or text in self.device_macros:
                    on_device = True
                if text in ("typedef", "using"):
                    self.note_integer_type(tokens, i)
                elif text in ("class", "typename"):
                    self.note_parameter(tokens, i)
                elif on_device and (text == "static_cast" or self.may_be_integer(token)):
                    self.called_cast(tokens, i)
                if text == "__shared__":
                    i = self.shared(tokens, i, not macro and all(b == "namespace" for b in braces), macro)
                    continue
                if text == "__noinline__":
                    self.change(token.start, token.end, "")
                elif text == "__global__" or text in self.aliases:
                    self.kernel(tokens, i, macro)
                elif text in ("asm", "__asm__", "__asm"):
                    i = self.inline_ptx(tokens, i, macro)
                    continue
                elif text == "_Pragma":
                    self.pragma_operator(tokens, i)
                elif text in KERNEL_ARGUMENT:
                    self.kernel_argument(tokens, i, KERNEL_ARGUMENT[text])
            i += 1

    @staticmethod
    def kind_of_brace(before: list[Token]) -> str:
        words = [t.text for t in before if t.kind != "directive"]
        if "namespace" in words and "(" not in words:
            return "namespace"
        if len(before) >= 2 and words[-2:-1] == ["extern"] and before[-1].kind == "string":
            return "namespace"
        return "other"

    def directive(self, token: Token) -> None:
        include = INCLUDE.match(token.text)
        if include is not None:
            name = include["name"]
            found = self.resolve(self.path, name)
            if found is not None:
                start = token.start + include.start("name")
                self.source.includes.append((self.edit(start, start + len(name), name), found, name[0]))
            return
        if DROPPED_PRAGMA.match(token.text):
            self.change(token.start, token.end, "")
            return
        define = DEFINE.match(token.text)
        if define is None:
            return
        body = self.tokenize(token.start + define.end(), token.end, macro=True)
        if define["parameters"] is None:
            before = self.macros.get(define["name"], body)
            same = before is not None and [t.text for t in before] == [t.text for t in body]
            self.macros[define["name"]] = body if same else None
        words = [t.text for t in body]
        if DEVICE_WORDS.intersection(words) or self.device_macros.intersection(words):
            self.device_macros.add(define["name"])
        if "__global__" in words or self.aliases.intersection(words):
            if "(" not in words and "{" not in words and define["parameters"] is None:
                self.aliases.add(define["name"])
                return
        self.number_barriers(body)
        self.process(body, macro=True)

    def number_barriers(self, body: list[Token]) -> None:
        """Tells the barriers of a macro apart, which all stand where it is used."""
        called = [i for i, after in enumerate(body[1:]) if body[i].text in BARRIERS and after.text == "("]
        for number, i in enumerate(called[1:], 1):
            end = self.closing(body, i + 1)
            comma = ", " if end > i + 2 else ""
            site = f"{comma}::kf::simt::CallSite::here().nth({number})"
            self.change(body[end].start, body[end].start, site)

    def inline_ptx(self, tokens: list[Token], i: int, macro: bool) -> int:
        """Translates the asm statement at token i; returns the token after it."""
        opening = i + 1
        while opening < len(tokens) and tokens[opening].kind == "word":  # volatile, goto, inline
            opening += 1
        if opening >= len(tokens) or tokens[opening].text != "(":
            return i + 1
        end = self.closing(tokens, opening)
        start, stop = tokens[i].start, tokens[end].end
        self.names += 1
        inner = tokens[opening + 1 : end]
        text = ptx.rewrite_statement(self.text, start, inner, f"{self.tag}_{self.names}", self.macros, macro)
        if text is not None:
            self.source.ptx = True
            self.change(start, stop, self.fit(text, start, stop) if macro else text)
        return end + 1

    def pragma_operator(self, tokens: list[Token], i: int) -> None:
        if i + 3 < len(tokens) and tokens[i + 1].text == "(" and tokens[i + 2].kind == "string":
            if re.match(r'"\s*(?:unroll|nounroll|nv_\w+)\b', tokens[i + 2].text):
                self.change(tokens[i].start, tokens[i + 3].end, "")


class Rewriter:
    """Rewrites one source and the headers that it needs."""

    def __init__(self, include_dirs: list[Path]):
        self.include_dirs = [d.resolve() for d in include_dirs if d.resolve() != OWN_INCLUDE]
        self.integers: set[str] = set()  # types of the program's
        self.parameters: set[str] = set()  # names of types as templates' parameters
        self.aliases: set[str] = set()  # macros that stand for __global__
        self.device_macros: set[str] = set()  # those that hold __device__
        # Those without parameters, and their tokens; None if it depends on conditions.
        self.macros: dict[str, list[Token] | None] = {}
        self.sources: dict[Path, Source] = {}

    def resolve(self, including: Path, name: str) -> Path | None:
        """The project's file that `#include name` means, or None for any other."""
        inner = name[1:-1]
        dirs = ([including.parent] if name[0] == '"' else []) + self.include_dirs
        for directory in dirs:
            candidate = Path(os.path.normpath(directory / inner))
            if candidate.is_file():
                return None if OWN_INCLUDE in candidate.resolve().parents else candidate
        return None

    def load(self, path: Path) -> Source:
        if path in self.sources:
            return self.sources[path]
        text = path.read_bytes().decode("utf-8", errors="surrogateescape")
        source = self.sources[path] = Source(path, text)
        # Headers come first: a macro defined there may stand for __global__ here.
        for match in re.finditer(r'^[ \t]*#[ \t]*include[ \t]*("[^"\n]+"|<[^>\n]+>)', text, re.MULTILINE):
            found = self.resolve(path, match[1])
            if found is not None:
                self.load(found)
        Scanner(source, self).run()
        return source

    def needing_a_copy(self) -> set[Path]:
        """Headers that change, and those that include one of them."""
        needed = {path for path, source in self.sources.items() if source.changed}
        while True:
            more = {
                path
                for path, source in self.sources.items()
                if path not in needed and any(found in needed for _, found, _ in source.includes)
            }
            if not more:
                return needed
            needed |= more

    @staticmethod
    def render(source: Source) -> str:
        out, at = [], 0
        for edit in sorted(source.edits, key=lambda e: (e.start, e.end > e.start, e.order)):
            out += [source.text[at : edit.start], edit.text]
            at = edit.end
        out.append(source.text[at:])
        return "".join(out)

    def rewrite(self, path: Path, output: Path) -> None:
        path = Path(os.path.abspath(path))
        output = Path(os.path.abspath(output))
        main = self.load(path)
        copies = {
            header: output.parent / "kf_headers" / hashlib.sha256(str(header).encode()).hexdigest()[:12] / header.name
            for header in self.needing_a_copy()
            if header != path
        }
        for header in copies:
            self.point_includes(self.sources[header], copies)
        self.point_includes(main, copies)
        for header, copy in copies.items():
            write(copy, line_marker(header) + self.render(self.sources[header]), keep_if_same=True)
        # nvcc includes this header into every source.
        head = "#include <cuda_runtime.h>\n"
        if any(source.ptx for source in self.sources.values()):
            head += "#include <kf_simt/ptx.h>\n"
        write(output, head + line_marker(path) + self.render(main))

    @staticmethod
    def point_includes(source: Source, copies: dict[Path, Path]) -> None:
        for edit, found, quote in source.includes:
            if found in copies:
                edit.text = f'"{copies[found]}"'
            elif quote == '"':
                edit.text = f'"{found}"'  # the copy lies elsewhere than the file that named its neighbour


def line_marker(path: Path) -> str:
    escaped = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{escaped}"\n'


def write(path: Path, text: str, keep_if_same: bool = False) -> None:
    """Writes beside the file and renames, so that nobody reads half of it."""
    data = text.encode("utf-8", errors="surrogateescape")
    if keep_if_same and path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rewrite(
    source: str | Path, output: str | Path, include_dirs: Sequence[str | Path] = (), depfile: str | Path | None = None
) -> list[Path]:
    """Rewrites `source` into `output`; returns all files that were read. Raises RewriteError."""
    rewriter = Rewriter([Path(d) for d in include_dirs])
    rewriter.rewrite(Path(source), Path(output))
    files = list(rewriter.sources)
    if depfile is not None:
        write(Path(depfile), make_rule(output, files))
    return files


def make_rule(target: str | Path, files: list[Path]) -> str:
    """A make rule by which `target` depends on `files`, which were read for it, and on the rewriter's own."""
    names = [str(f) for f in (target, *files, *sorted(Path(__file__).parent.glob("*.py")))]
    escaped = [name.replace(" ", "\\ ").replace("$", "$$").replace("#", "\\#") for name in names]
    return f"{escaped[0]}: " + " \\\n  ".join(escaped[1:]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Turns a CUDA source into C++ for the emulation.")
    parser.add_argument("source", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("-I", dest="include_dirs", action="append", default=[], help="where project headers are found")
    parser.add_argument("--depfile", type=Path, help="write the files that were read, as a make rule")
    options = parser.parse_args(arguments)
    try:
        rewrite(options.source, options.output, options.include_dirs, options.depfile)
    except RewriteError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{options.source}: {error}", file=sys.stderr)
        return 1
    return 0
