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
from dataclasses import dataclass, field
from pathlib import Path

from . import ptx

OWN_INCLUDE = Path(__file__).resolve().parents[1] / "include"

# Functions that take a kernel, and the position of that argument.
KERNEL_ARGUMENT = {
    "cudaLaunchKernel": 0,
    "cudaLaunchCooperativeKernel": 0,
    "cudaFuncSetAttribute": 0,
    "cudaFuncSetCacheConfig": 0,
    "cudaFuncGetAttributes": 1,
    "cudaFuncSetSharedMemConfig": 0,
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor": 1,
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags": 1,
    "cudaOccupancyMaxPotentialBlockSize": 2,
    "cudaOccupancyMaxPotentialBlockSizeVariableSMem": 2,
}
# Words that can stand before a parenthesis without being called.
NOT_CALLED = {"return", "if", "while", "for", "switch", "else", "do", "case", "co_return"}
BARRIERS = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"}
# What begins device code: the body of a function, or of a lambda, with one of these words before it.
DEVICE_WORDS = {"__global__", "__device__"}
# Words of which the name of an integer type consists, types that are one, and others. `bool` is none of them.
INTEGER_WORDS = {"signed", "unsigned", "char", "short", "int", "long", "const", "volatile"}
INTEGER_TYPES = {
    "size_t", "ssize_t", "ptrdiff_t", "intptr_t", "uintptr_t", "intmax_t", "uintmax_t", "uchar", "ushort", "uint",
    "ulong", *(f"{sign}int{kind}{bits}_t" for sign in ("", "u") for kind in ("", "_fast", "_least")
               for bits in (8, 16, 32, 64)),
}  # fmt: skip
OTHER_TYPES = {"float", "double", "bool", "void", "auto"}
# Operators before which an operand ends and after which another begins.
BINARY = set("=(,+-*/%<>!&|^?:[{};")
ZERO = re.compile(r"0[xXbB]?0*[uUlL]*")  # a null pointer, where one is wanted
OPENERS = {"(": ")", "[": "]", "{": "}"}
CLOSERS = {")": "(", "]": "[", "}": "{"}


class RewriteError(Exception):
    """Something in a source that cannot be parsed; the text is `file:line: message`."""

    def __init__(self, path: Path, line: int, message: str):
        super().__init__(f"{path}:{line}: {message}")


@dataclass
class Token:
    kind: str  # word, number, string, char, op, directive
    text: str
    start: int
    end: int


@dataclass
class Edit:
    start: int
    end: int
    text: str
    order: int


@dataclass
class Source:
    """One file: its text, the edits to make, and the files that it includes."""

    path: Path
    text: str
    edits: list[Edit] = field(default_factory=list)
    includes: list[tuple[Edit, Path, str]] = field(default_factory=list)  # where, the file, its first character: " or <
    changed: bool = False  # by more than the place of an include
    ptx: bool = False  # it holds inline PTX


# A token, or what separates tokens. Raw strings come before words, numbers with digit separators before characters.
SCANNER = re.compile(
    r"""
      (?P<space>(?:\s|\\\r?\n)+)
    | (?P<line_comment>//(?:\\\r?\n|[^\n])*)
    | (?P<block_comment>/\*.*?\*/)
    | (?P<raw>(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)")
    | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
    | (?P<char>(?:u8|[uUL])?'(?:\\.|[^'\\\n])+')
    | (?P<number>\.?[0-9](?:'[0-9A-Za-z_]|[eEpP][+-]|[0-9A-Za-z_.])*)
    | (?P<word>[A-Za-z_$\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*)
    | (?P<op>.)
    """,
    re.VERBOSE | re.DOTALL,
)
DIRECTIVE_END = re.compile(r"(?:/\*.*?\*/|//(?:\\\r?\n|[^\n])*|\\\r?\n|[^\n])*?(?=\n|\Z)", re.DOTALL)
DEFINE = re.compile(r"#\s*define\s+(?P<name>[A-Za-z_]\w*)(?P<parameters>\([^)]*\))?", re.DOTALL)
INCLUDE = re.compile(r'#\s*include\s*(?P<name>"[^"\n]+"|<[^>\n]+>)')
CONDITION = re.compile(r"#\s*(?P<what>if|ifdef|ifndef|elif|else|endif)\b(?P<rest>.*)", re.DOTALL)
DROPPED_PRAGMA = re.compile(r"#\s*pragma\s+(?:unroll|nounroll|nv_\w+|hd_warning_disable)\b")


class Scanner:
    """Splits a file into tokens and finds what has to change."""

    def __init__(
        self,
        source: Source,
        aliases: set[str],
        types: tuple[set[str], set[str], set[str]],
        macros: dict[str, list[Token] | None],
        resolve,
    ):
        self.source = source
        self.path = source.path
        self.text = source.text
        self.aliases = aliases  # macros that stand for __global__
        # Integer types of the program's, names of types as templates' parameters, and macros that hold __device__.
        self.integers, self.parameters, self.device_macros = types
        self.macros = macros  # those without parameters, and their tokens; None if it depends on conditions
        self.resolve = resolve
        self.tag = hashlib.sha256(str(source.path).encode()).hexdigest()[:6]
        self.names = 0

    def line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1

    def error(self, offset: int, message: str) -> RewriteError:
        return RewriteError(self.path, self.line(offset), message)

    def edit(self, start: int, end: int, text: str) -> Edit:
        missing = self.text.count("\n", start, end) - text.count("\n")
        if missing < 0:
            raise self.error(start, "internal error: a rewrite would move the lines that follow")
        edit = Edit(start, end, text + "\n" * missing, len(self.source.edits))
        self.source.edits.append(edit)
        return edit

    def change(self, start: int, end: int, text: str) -> None:
        self.source.changed = True
        self.edit(start, end, text)

    def run(self) -> None:
        self.tokens = self.tokenize(0, len(self.text), macro=False)
        self.process(self.tokens, macro=False)

    # Tokens

    def tokenize(self, start: int, end: int, macro: bool) -> list[Token]:
        tokens: list[Token] = []
        text = self.text
        at = start
        line_start = True  # nothing but space since the last newline
        skipped = 0  # depth of conditions within an `#if 0`
        while at < end:
            if not macro and line_start and text[at] == "#":
                ending = DIRECTIVE_END.match(text, at)
                assert ending is not None  # it may be empty
                stop = ending.end()
                directive = Token("directive", text[at:stop], at, stop)
                condition = CONDITION.match(directive.text)
                skipped = self.follow_condition(condition, skipped)
                if not skipped:
                    tokens.append(directive)
                at = stop
                continue
            if skipped:
                newline = text.find("\n", at, end)
                at = end if newline < 0 else newline + 1
                while at < end and text[at] in " \t\r":
                    at += 1
                line_start = True
                continue
            match = SCANNER.match(text, at, end)
            assert match is not None  # the last alternative takes any character
            kind = str(match.lastgroup if match.lastgroup != "delimiter" else "raw")
            piece = match.group()
            if kind in ("space", "line_comment", "block_comment"):
                if kind == "space" and "\n" in piece.replace("\\\r\n", "").replace("\\\n", ""):
                    line_start = True
            else:
                line_start = False
                if kind == "op":
                    if piece in "\"'":
                        raise self.error(at, f"{piece} without its partner")
                    if piece == "/" and text.startswith("/*", at):
                        raise self.error(at, "/* without */")
                if kind == "word" and piece.endswith("R") and text.startswith('"', match.end()):
                    raise self.error(at, "raw string without its end")
                tokens.append(Token("string" if kind == "raw" else kind, piece, at, match.end()))
            at = match.end()
        return tokens

    @staticmethod
    def follow_condition(condition: re.Match | None, skipped: int) -> int:
        """Counts nested conditions while within `#if 0`, whose text need not consist of tokens."""
        if condition is None:
            return skipped
        what = condition["what"]
        if skipped:
            if what in ("if", "ifdef", "ifndef"):
                return skipped + 1
            if what == "endif" or (skipped == 1 and what in ("else", "elif")):
                return skipped - 1
            return skipped
        return 1 if what == "if" and condition["rest"].split("//")[0].split("/*")[0].strip() == "0" else 0

    # What is changed

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
            elif text == "<" and self.is_triple(tokens, i, "<") and not self.is_operator(tokens, i):
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

    @staticmethod
    def is_triple(tokens: list[Token], i: int, char: str) -> bool:
        """Three of the same character begin at token i. Formatters that do not know <<< make << < of it."""
        return [t.text for t in tokens[i : i + 3]] == [char] * 3

    def is_end_of_configuration(self, tokens: list[Token], i: int, spaced: bool) -> bool:
        """Whether >>> is at token i; with spaces in it only where <<< has some, and before the kernel's arguments."""
        if not self.is_triple(tokens, i, ">"):
            return False
        if tokens[i].end == tokens[i + 1].start and tokens[i + 1].end == tokens[i + 2].start:
            return True
        return spaced and [t.text for t in tokens[i + 3 : i + 4]] == ["("]

    @staticmethod
    def is_operator(tokens: list[Token], i: int) -> bool:
        return i > 0 and tokens[i - 1].text == "operator"

    def closing(self, tokens: list[Token], i: int) -> int:
        """The index of the bracket that closes the one at i."""
        depth: list[str] = []
        for j in range(i, len(tokens)):
            text = tokens[j].text
            if tokens[j].kind != "op":
                continue
            if text in OPENERS:
                depth.append(OPENERS[text])
            elif text in CLOSERS:
                if not depth or depth.pop() != text:
                    raise self.error(tokens[j].start, f"{text} closes nothing")
                if not depth:
                    return j
        raise self.error(tokens[i].start, f"{tokens[i].text} is never closed")

    def opening(self, tokens: list[Token], i: int) -> int:
        """The index of the bracket that the one at i closes."""
        depth: list[str] = []
        for j in range(i, -1, -1):
            text = tokens[j].text
            if tokens[j].kind != "op":
                continue
            if text in CLOSERS:
                depth.append(CLOSERS[text])
            elif text in OPENERS:
                if not depth or depth.pop() != text:
                    raise self.error(tokens[j].start, f"{text} is never closed")
                if not depth:
                    return j
        raise self.error(tokens[i].start, f"{tokens[i].text} closes nothing")

    def opening_angle(self, tokens: list[Token], i: int) -> int:
        """The index of the < of the template arguments that end at i."""
        depth = 0
        j = i
        while j >= 0:
            text = tokens[j].text
            if tokens[j].kind == "op":
                if text == ">":
                    depth += 1
                elif text == "<":
                    depth -= 1
                    if depth == 0:
                        return j
                elif text in CLOSERS:
                    j = self.opening(tokens, j)
                elif text in OPENERS or text == ";":
                    break
            j -= 1
        raise self.error(tokens[i].start, "cannot find where the template arguments before <<< begin")

    def closing_angle(self, tokens: list[Token], i: int) -> int:
        """The index of the > of the template arguments that begin at i."""
        depth = 0
        j = i
        while j < len(tokens):
            text = tokens[j].text
            if tokens[j].kind == "op":
                if text == "<":
                    depth += 1
                elif text == ">":
                    depth -= 1
                    if depth == 0:
                        return j
                elif text in OPENERS:
                    j = self.closing(tokens, j)
                elif text == ";":
                    break
            j += 1
        raise self.error(tokens[i].start, "cannot find where these template arguments end")

    @staticmethod
    def is_scope(tokens: list[Token], i: int) -> bool:
        """`::` ends at token i."""
        return i > 0 and tokens[i].text == ":" and tokens[i - 1].text == ":" and tokens[i - 1].end == tokens[i].start

    def callee(self, tokens: list[Token], i: int) -> int:
        """The index of the first token of the expression that ends at i and is launched."""
        at = tokens[i].start if i >= 0 else 0
        while i >= 0:
            token = tokens[i]
            if token.text == ">":
                i = self.opening_angle(tokens, i) - 1
                if i < 0 or tokens[i].kind != "word":
                    break
                continue
            if token.text in (")", "]"):
                start = self.opening(tokens, i)
                before = tokens[start - 1] if start > 0 else None
                called = before is not None and (
                    (before.kind == "word" and before.text not in NOT_CALLED) or before.text in ("]", ">")
                )
                if not called and token.text == ")":
                    return start
                i = start - 1
                continue
            if token.kind != "word":
                break
            start = i
            if start > 0 and tokens[start - 1].text == "template":
                start -= 1
            if self.is_scope(tokens, start - 1):
                before = tokens[start - 3] if start >= 3 else None
                if before is not None and (
                    before.text == ">" or (before.kind == "word" and before.text not in NOT_CALLED)
                ):
                    i = start - 3
                    continue
                return start - 2
            if start > 0 and tokens[start - 1].text == ".":
                i = start - 2
                continue
            if start > 1 and tokens[start - 1].text == ">" and tokens[start - 2].text == "-":
                i = start - 3
                continue
            return start
        raise self.error(at, "cannot tell what is launched before <<<")

    def launch(self, tokens: list[Token], i: int) -> None:
        opening = tokens[i]
        if i == 0:
            raise self.error(opening.start, "cannot tell what is launched before <<<")
        first = self.callee(tokens, i - 1)
        j = i + 3
        spaced = opening.end < tokens[i + 1].start or tokens[i + 1].end < tokens[i + 2].start
        while j < len(tokens) and not self.is_end_of_configuration(tokens, j, spaced):
            if tokens[j].kind == "op" and tokens[j].text in OPENERS:
                j = self.closing(tokens, j)
            elif tokens[j].text in (";", "}", ")"):
                break
            j += 1
        if j >= len(tokens) or tokens[j].text != ">":
            raise self.error(opening.start, "<<< without >>>")
        if j + 3 >= len(tokens) or tokens[j + 3].text != "(":
            raise self.error(tokens[j].start, ">>> without the arguments of the kernel in parentheses")
        zeros = False
        depth = 0  # of brackets within the arguments
        for k in range(j + 4, self.closing(tokens, j + 3)):
            if tokens[k].kind == "op":
                depth += (tokens[k].text in OPENERS) - (tokens[k].text in CLOSERS)
            # Passed on by the lambda, these are numbers and no null pointers any more.
            if tokens[k - 1].text not in "(," or tokens[k + 1].text not in "),":
                continue
            if tokens[k].text == "NULL":
                self.change(tokens[k].start, tokens[k].end, "nullptr")
            elif ZERO.fullmatch(tokens[k].text) and not depth:
                zeros = True
                self.change(tokens[k].start, tokens[k].end, f"::kf::simt::LiteralZero<decltype({tokens[k].text})>()")
        kernel = self.text[tokens[first].start : tokens[i - 1].end]
        name = self.flat_text(kernel).replace("\\", "\\\\").replace('"', '\\"')
        # With a zero the launch asks whether the kernel takes numbers.
        result = f" -> decltype(static_cast<void>({self.flat_text(kernel)}(kf_args...)))" if zeros else ""
        head = f"::kf::simt::kernel_call([&](auto&... kf_args) KF_SIMT_UNINSTRUMENTED{result} {{ "
        self.change(tokens[first].start, tokens[first].start, head)
        self.change(opening.start, tokens[i + 2].end, f'(kf_args...); }}, "{name}")(')
        self.change(tokens[j].start, tokens[j + 2].end, ").launch_with_zeros" if zeros else ").launch")

    @staticmethod
    def flat_text(text: str) -> str:
        return re.sub(r"(?:\s|\\\n)+", " ", text)

    def kernel(self, tokens: list[Token], i: int, macro: bool) -> None:
        """Marks the body of the kernel whose declaration holds __global__ at token i."""
        bounds, cluster = "", ""
        j = i + 1
        parameters = False
        while j < len(tokens):
            text = tokens[j].text
            if text == "__launch_bounds__" and j + 1 < len(tokens) and tokens[j + 1].text == "(":
                end = self.closing(tokens, j + 1)
                bounds = self.first_argument(tokens, j + 1, end)
                j = end
            elif text == "__cluster_dims__" and j + 1 < len(tokens) and tokens[j + 1].text == "(":
                end = self.closing(tokens, j + 1)
                cluster = self.flat(tokens[j + 1].end, tokens[end].start)
                j = end
            elif text in ("(", "["):
                j = self.closing(tokens, j)
                parameters = True
            elif text == ";" or (text == "=" and parameters):
                return
            elif text == "{":
                argument = f", {bounds}" if bounds else ", 1024" if cluster else ""
                argument += f", ::kf::simt::dim3({cluster})" if cluster else ""
                mark = (
                    f" static ::kf::simt::KernelInfo kf_kernel(__PRETTY_FUNCTION__{argument});"
                    " ::kf::simt::enter_kernel(kf_kernel); "
                )
                self.change(tokens[j].end, tokens[j].end, mark)
                return
            j += 1
        if macro:
            raise self.error(tokens[i].start, "a macro that begins a kernel must hold the kernel's whole body")
        raise self.error(tokens[i].start, "__global__ without a function")

    def first_argument(self, tokens: list[Token], opening: int, closing: int) -> str:
        j = opening + 1
        while j < closing and tokens[j].text != ",":
            if tokens[j].kind == "op" and tokens[j].text in OPENERS:
                j = self.closing(tokens, j)
            elif (
                tokens[j].text == "<" and tokens[j - 1].kind == "word" and self.looks_like_arguments(tokens, j, closing)
            ):
                j = self.closing_angle(tokens, j)
            j += 1
        return re.sub(r"(?:\s|\\\n)+", " ", self.text[tokens[opening].end : tokens[j].start]).strip()

    def looks_like_arguments(self, tokens: list[Token], i: int, end: int) -> bool:
        try:
            return self.closing_angle(tokens, i) < end
        except RewriteError:
            return False

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

    def kernel_argument(self, tokens: list[Token], i: int, position: int) -> None:
        """Takes a cast to void* off the kernel that is argument number `position` of the call at i."""
        if i + 1 >= len(tokens) or tokens[i + 1].text != "(":
            return
        end = self.closing(tokens, i + 1)
        j = i + 2
        while position > 0 and j < end:
            if tokens[j].kind == "op" and tokens[j].text in OPENERS:
                j = self.closing(tokens, j)
            elif tokens[j].text == ",":
                position -= 1
            j += 1
        if j >= end:
            return
        if tokens[j].text == "(":
            close = self.closing(tokens, j)
            if self.is_void_pointer(tokens[j + 1 : close]):
                self.change(tokens[j].start, tokens[close].end, "")
        elif tokens[j].text in ("reinterpret_cast", "static_cast") and tokens[j + 1].text == "<":
            close = self.closing_angle(tokens, j + 1)
            if self.is_void_pointer(tokens[j + 2 : close]):
                self.change(tokens[j].start, tokens[close].end, "")

    @staticmethod
    def is_void_pointer(tokens: list[Token]) -> bool:
        return sorted(t.text for t in tokens if t.text != "const") == ["*", "void"]

    # Casts to integers

    def note_integer_type(self, tokens: list[Token], i: int) -> None:
        """Remembers the name that `typedef unsigned name;` or `using name = unsigned;` gives to an integer type."""
        end = next((j for j in range(i + 1, min(i + 9, len(tokens))) if tokens[j].text == ";"), i)
        if tokens[i].text == "using":
            name, kind = tokens[i + 1 : i + 2], tokens[i + 3 : end]
        else:
            name, kind = tokens[end - 1 : end], tokens[i + 1 : end - 1]
        if end > i and name[0].kind == "word" and self.is_integer_type(kind):
            self.integers.add(name[0].text)

    def note_parameter(self, tokens: list[Token], i: int) -> None:
        """Remembers the name of a type that a template has as a parameter."""
        if i > 0 and tokens[i - 1].text in ("<", ",") and i + 2 < len(tokens) and tokens[i + 1].kind == "word":
            if tokens[i + 2].text in (",", ">", "="):
                self.parameters.add(tokens[i + 1].text)

    def may_be_integer(self, token: Token) -> bool:
        return token.text in self.parameters or self.is_integer_type([token])

    def is_integer_type(self, tokens: list[Token]) -> bool:
        words = [t.text for t in tokens if t.text not in ("std", ":", "const", "volatile")]
        if len(words) == 1 and (words[0] in INTEGER_TYPES or words[0] in self.integers):
            return True
        return bool(words) and INTEGER_WORDS.issuperset(words)

    def is_type(self, tokens: list[Token]) -> bool:
        """Whether these tokens are a type, as far as their words tell."""
        words = [t.text for t in tokens]
        while words and words[-1] in ("*", "&"):
            words.pop()
            if words and words[-1] not in ("*", "&"):
                return all(word in (":", "<", ">") or word.isidentifier() for word in words)
        one = words[0] if len(words) == 1 else ""
        return one in OTHER_TYPES or one in self.parameters or self.is_integer_type(tokens)

    def integer_cast(self, tokens: list[Token], i: int) -> None:
        """Makes the operand of `(int)x`, which begins at token i, an integer as a GPU does."""
        close = next((j for j in range(i + 1, min(i + 9, len(tokens))) if tokens[j].text in "()"), i)
        if tokens[close].text != ")" or close + 1 >= len(tokens):
            return
        after = tokens[close + 1]
        if not self.is_integer_type(tokens[i + 1 : close]):
            # A name may be something else elsewhere: (T)x and (T)(x) are casts, (T)-x may be a difference.
            named = close == i + 2 and tokens[i + 1].text in self.parameters
            if not named or (after.kind == "op" and after.text not in "(~!"):
                return
        before = tokens[i - 1] if i > 0 else None
        if before is not None and (before.text == "]" or before.kind in ("number", "string")):
            return
        if before is not None and before.kind == "word" and before.text not in NOT_CALLED:
            return
        if before is not None and before.text in ("<", ">", ")") and i > 1 and tokens[i - 2].text == "operator":
            return
        self.convert(tokens, i + 1, close, close + 1, self.operand_end(tokens, close + 1))

    def called_cast(self, tokens: list[Token], i: int) -> None:
        """The same of `static_cast<int>(x)` and `int(x)`, which begin at token i."""
        if tokens[i].text == "static_cast":
            if i + 1 >= len(tokens) or tokens[i + 1].text != "<":
                return
            first, last = i + 2, self.closing_angle(tokens, i + 1)
            words = [t.text for t in tokens[first:last]]
            if not all(word == ":" or word.isidentifier() for word in words) or OTHER_TYPES.intersection(words):
                return
            opening = last + 1
        else:
            first, last, opening = i, i + 1, i + 1
            if i > 0 and tokens[i - 1].text not in BINARY and tokens[i - 1].text not in NOT_CALLED:
                return
            if i > 0 and tokens[i - 1].text in ";{}<":  # a declaration, or a template's argument
                return
        if opening >= len(tokens) or tokens[opening].text != "(":
            return
        close = self.closing(tokens, opening)
        inner = tokens[opening + 1 : close]
        if not inner or inner[0].text == "{":
            return
        if tokens[i].text != "static_cast":  # not `int (*f)(float)`, the type `int(float)`, or a constructor's call
            following = [t.text for t in tokens[close + 1 : close + 2]]
            if inner[0].text in "*&" or self.is_type(inner) or following == [">"] or self.has_comma(inner):
                return
        self.convert(tokens, first, last, opening + 1, close - 1)

    def has_comma(self, tokens: list[Token]) -> bool:
        """Whether there is a comma outside of brackets."""
        j = 0
        while j < len(tokens):
            if tokens[j].text == ",":
                return True
            j = self.closing(tokens, j) + 1 if tokens[j].kind == "op" and tokens[j].text in OPENERS else j + 1
        return False

    def convert(self, tokens: list[Token], first: int, last: int, begin: int, end: int | None) -> None:
        """Puts the tokens from `begin` to `end` into a call that converts them to the type from `first` to `last`."""
        if end is None:
            return
        kind = self.spaced(tokens[first:last]).replace("\n", " ")
        self.change(tokens[begin].start, tokens[begin].start, f"::kf::simt::kf_integer<{kind}>(")
        self.change(tokens[end].end, tokens[end].end, ")")

    def operand_end(self, tokens: list[Token], i: int) -> int | None:
        """The last token of the operand of a cast that begins at token i; None if there is none that can be parsed."""
        count = len(tokens)
        text = ""
        while i < count:
            text = tokens[i].text
            if text == "(":
                close = self.closing(tokens, i)
                after = tokens[close + 1] if close + 1 < count else None
                operand = after is not None and (
                    after.kind in ("number", "string", "char") or (after.kind == "word" and after.text.isidentifier())
                )
                if not operand and not self.is_type(tokens[i + 1 : close]):
                    break
                i = close + 1
            elif tokens[i].kind == "op" and text in "+-!~*&":
                i += 1
            else:
                break
        if i >= count or tokens[i].kind == "directive" or text in ("new", "delete", "const", "noexcept", "override"):
            return None
        if text == "sizeof":
            return self.closing(tokens, i + 1) if tokens[i + 1].text == "(" else None
        if text == "(":
            i = self.closing(tokens, i)
        elif text == ":" and tokens[i + 1].text == ":":
            i += 2
        elif tokens[i].kind == "op":
            return None
        while i + 1 < count:
            text, following = tokens[i + 1].text, tokens[i + 2].text if i + 2 < count else ""
            adjacent = i + 2 < count and tokens[i + 1].end == tokens[i + 2].start
            if text in ("(", "["):
                i = self.closing(tokens, i + 1)
            elif text == "." or (adjacent and text + following in ("->", "::")):
                i += 2 if text == "." else 3
                if i < count and tokens[i].text == "template":
                    i += 1
            elif adjacent and text + following in ("++", "--"):
                i += 2
            elif text == "<" and tokens[i].kind == "word" and self.is_call_of_template(tokens, i + 1):
                i = self.closing_angle(tokens, i + 1)
            else:
                break
        return i if i < count else None

    def is_call_of_template(self, tokens: list[Token], i: int) -> bool:
        """Whether the < at token i begins template arguments and not a comparison."""
        if not self.looks_like_arguments(tokens, i, len(tokens)):
            return False
        close = self.closing_angle(tokens, i)
        inner = [t.text for t in tokens[i + 1 : close]]
        return not {"&", "|", "?"}.intersection(inner) and [t.text for t in tokens[close + 1 : close + 2]] in (
            ["("], [":"], ["{"]
        )  # fmt: skip

    # Shared memory

    def declaration_start(self, tokens: list[Token], i: int) -> int:
        """The first token of the declaration that holds __shared__ at token i."""
        start = i
        while start > 0:
            before = tokens[start - 1]
            if before.text == ">":
                start = self.opening_angle(tokens, start - 1)
                continue
            if before.text == ")":
                opening = self.opening(tokens, start - 1)
                if opening > 0 and tokens[opening - 1].text in ("alignas", "__align__", "__attribute__", "decltype"):
                    start = opening - 1
                    continue
                break
            if before.text == ":" and self.is_scope(tokens, start - 1):
                start -= 2
                continue
            if before.kind != "word" or before.text in ("else", "do"):
                break
            start -= 1
        return start

    def shared(self, tokens: list[Token], i: int, at_namespace: bool, macro: bool) -> int:
        """Rewrites the declaration that holds __shared__ at token i; returns the token after it."""
        start = self.declaration_start(tokens, i)
        end = i
        while end < len(tokens) and tokens[end].text != ";":
            if tokens[end].kind == "op" and tokens[end].text in OPENERS:
                end = self.closing(tokens, end)
            elif tokens[end].kind == "directive":
                raise self.error(tokens[end].start, "a directive within a __shared__ declaration")
            end += 1
        if end >= len(tokens) and not macro:
            raise self.error(tokens[i].start, "__shared__ declaration without ;")

        dynamic = False
        align: list[str] = []
        left: list[int] = []  # tokens of the type and the declarators
        j = start
        while j < end:
            text = tokens[j].text
            if text in ("__shared__", "static", "__device__", "thread_local"):
                pass
            elif text == "extern":
                dynamic = True
            elif text in ("alignas", "__align__") and j + 1 < end and tokens[j + 1].text == "(":
                close = self.closing(tokens, j + 1)
                align.append(self.flat(tokens[j].start, tokens[close].end))
                j = close
            elif text == "[" and tokens[j + 1].text == "[":
                j = self.closing(tokens, j)
            else:
                left.append(j)
            j += 1
        parts = [tokens[k] for k in left]
        name_at = self.declarator_name(parts, tokens[i].start)
        type_end = name_at
        while type_end > 0 and parts[type_end - 1].text == "*":
            type_end -= 1
        if type_end == 0:
            raise self.error(tokens[i].start, "__shared__ declaration without a type")

        self.names += 1
        tag = f"{self.tag}_{self.names}"
        out = f"typedef {self.spaced(parts[:type_end])} kf_b{tag};"
        written_to = parts[type_end - 1].end
        for number, (prefix, name, suffix) in enumerate(self.declarators(parts[type_end:], tokens[i].start)):
            alias = f"kf_t{tag}_{number}"
            # Line breaks stand where they stood, as far as the order of the pieces allows.
            out += "\n" * self.text.count("\n", written_to, name.start)
            written_to = suffix[-1].end if suffix else name.end
            out += f" typedef kf_b{tag} {self.spaced(prefix)}{alias}{self.spaced(suffix)};"
            if dynamic:
                if not suffix:
                    raise self.error(name.start, f"`extern __shared__` must be an array, `{name.text}` is none")
                if at_namespace:
                    out += (
                        f" [[maybe_unused]] static thread_local ::std::decay_t<{alias}> const {name.text}"
                        f" = ::kf::simt::dynamic_shared<{alias}>();"
                    )
                else:
                    out += f" {alias}& {name.text} = ::kf::simt::dynamic_shared<{alias}>();"
                continue
            if at_namespace:
                raise self.error(name.start, f"`__shared__ {name.text}` outside of a function is not supported")
            aligned = "".join(f" struct {a} A{n} {{}};" for n, a in enumerate(align))
            alignment = f"alignof({alias})"
            for n in range(len(align)):
                alignment = f"::kf::simt::max_align({alignment}, alignof(A{n}))"
            out += (
                f" {alias}& {name.text} = ::kf::simt::static_shared<{alias}>("
                f"[]() -> ::kf::simt::SharedSlot& {{{aligned}"
                f' static ::kf::simt::SharedSlot kf_slot("{name.text}", sizeof({alias}), {alignment}, __FILE__,'
                f" __LINE__); return kf_slot; }}());"
            )
        stop = tokens[end].end if end < len(tokens) else tokens[-1].end
        if macro:
            out = out.replace("\n", "\\\n")
            if end >= len(tokens):
                out = out[:-1]
        self.change(tokens[start].start, stop, self.fit(out, tokens[start].start, stop))
        return end + 1

    def fit(self, out: str, start: int, stop: int) -> str:
        """Within a macro a line break that is left over must be continued; elsewhere `edit` adds it."""
        missing = self.text.count("\n", start, stop) - out.count("\n")
        if missing > 0 and "\\\n" in self.text[start:stop]:
            return out + "\\\n" * missing
        return out

    def flat(self, start: int, end: int) -> str:
        return self.flat_text(self.text[start:end])

    def spaced(self, tokens: list[Token]) -> str:
        """The text of these tokens with the line breaks between them, without comments."""
        out = ""
        for k, token in enumerate(tokens):
            if k > 0:
                gap = self.text[tokens[k - 1].end : token.start]
                out += "\n" * gap.count("\n") or (" " if gap else "")
            out += token.text
        return out

    def declarator_name(self, parts: list[Token], at: int) -> int:
        """The index of the first declared name."""
        k = 0
        while k < len(parts):
            text = parts[k].text
            following = parts[k + 1].text if k + 1 < len(parts) else ";"
            if parts[k].kind == "word" and following in ("[", ",", ";") and k > 0:
                return k
            if text == "<" and k > 0 and parts[k - 1].kind == "word":
                k = self.closing_angle(parts, k)
            elif text in ("{", "("):
                close = self.closing(parts, k)
                if text == "(" and parts[k - 1].text not in ("decltype", "__attribute__"):
                    break
                k = close
            k += 1
        raise self.error(at, "cannot find the name in this __shared__ declaration")

    def declarators(self, parts: list[Token], at: int):
        """Splits `*a[1], b` into (prefix, name, suffix)."""
        k = 0
        while k < len(parts):
            prefix = []
            while parts[k].text == "*":
                prefix.append(parts[k])
                k += 1
            name = parts[k]
            if name.kind != "word":
                raise self.error(name.start, "cannot parse this __shared__ declaration")
            k += 1
            suffix_start = k
            while k < len(parts) and parts[k].text == "[":
                k = self.closing(parts, k) + 1
            yield prefix, name, parts[suffix_start:k]
            if k < len(parts) and parts[k].text != ",":
                what = "an initializer is not allowed" if parts[k].text == "=" else "cannot parse this"
                raise self.error(parts[k].start, f"{what} in a __shared__ declaration")
            k += 1


class Rewriter:
    """Rewrites one source and the headers that it needs."""

    def __init__(self, include_dirs: list[Path]):
        self.include_dirs = [d.resolve() for d in include_dirs if d.resolve() != OWN_INCLUDE]
        self.aliases: set[str] = set()
        self.types: tuple[set[str], set[str], set[str]] = (set(), set(), set())
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
        Scanner(source, self.aliases, self.types, self.macros, self.resolve).run()
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
        out = []
        at = 0
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
    """A make rule by which `target` depends on `files`, which were read for it, and on what reads them."""
    names = [str(f) for f in (target, *files, ptx.__file__)]
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
