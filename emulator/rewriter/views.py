"""Compiles a rewritten CUDA source: device functions as the device's architecture sees them, all else as the host does.

    python -S emulator compile COMPILER FLAGS... -c IN.cpp -o OUT.o
    python -S emulator compile --rewrite IN.cpp COMPILER FLAGS... -c IN.cu -o OUT.o

The second line rewrites the CUDA source first, by rewrite.py, which saves a process for each source.

nvcc reads a source once for the host and once for each architecture, and defines `__CUDA_ARCH__` for the latter only.
Here both kinds of functions come from one compilation. So the preprocessor runs twice, and where its two texts differ
they become one: the bodies of `__global__` and `__device__` functions from the device's text, all else from the host's.
A function that is both (`__host__ __device__`, or `constexpr`) gets both bodies and takes the one of whoever calls it.

A macro defined under a condition reaches each side with its own meaning. So do constants, types and enumerations at
namespace scope or static in a class: the device's goes by the name NAME_on_device. What cannot be two things at once,
such as a variable or a member, is an error with its line.

Where the compiler is told to begin with a header that it has precompiled (`-include H`, and H.gch is there), the
preprocessor's texts name it in the place of what it holds, so that none of that is read again.
"""

from __future__ import annotations

import bisect
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import rewrite

OWN_INCLUDE = Path(__file__).resolve().parents[1] / "include"
# The first words of what rewrite.py writes: other sources are compiled as they are.
REWRITTEN = "#include <cuda_runtime.h>\n"
# What nvcc defines for code of an sm_90a, which is what the runtime API says the device is.
DEVICE_MACROS = [
    "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-D__CUDA_ARCH_SPECIFIC__=900",
    "-D__CUDA_ARCH_FAMILY_SPECIFIC__=900",
]  # fmt: skip
# With this, __global__, __device__ and __host__ leave a trace in the preprocessor's output.
TRACED = ["-include", str(OWN_INCLUDE / "kf_simt" / "traced.h")]
SPACES = {"__kf_global__", "__kf_device__", "__kf_host__"}

MARKER = re.compile(r'#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"([ \d]*)$', re.MULTILINE)
TOKEN = re.compile(
    r'(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\((?:.|\n)*?\)(?P=delimiter)"'
    r'|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|(?:u8|[uUL])?\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_$\x80-\U0010ffff][\w$]*'
    r"|\.?\d(?:\'?[\w.]|(?<=[eEpP])[+-])*|::|->|^[ \t]*\#[^\n]*|\S",
    re.MULTILINE,
)
OPENERS = {"(": ")", "[": "]", "{": "}"}
CLASS_KEYS = {"class", "struct", "union"}
ATTRIBUTES = {"__attribute__", "alignas", "__declspec", "noexcept", "decltype", "explicit"}  # with parentheses, if any
OPERATORS = {"operator", *"=<>!+-*/%&|^"}  # before a = that is a part of an operator's name
# Words that do not make another function of a declaration.
LOOSE = {*SPACES, "inline", "__inline__", "__inline", "static", "extern", "constexpr"}
CONSTANT = {"constexpr", "const", "using", "typedef", "enum"}


class ViewError(Exception):
    """The two views of a source cannot be one program, or one cannot be preprocessed; the text says where and why."""


@dataclass
class Token:
    text: str
    start: int
    end: int


@dataclass
class Item:
    """A declaration, in its text from `start` to `end`."""

    kind: str  # function, scope (a namespace or a class), foreign (what other files hold) or other
    start: int
    end: int
    tokens: list[Token]
    body: tuple[int, int] | None = None  # of a function: its braces
    children: list[Item] = field(default_factory=list)  # of a scope
    in_class: bool = False
    spaces: frozenset[str] = frozenset()
    constexpr: bool = False
    signature: str = ""  # of a function and its declarations: the name and the parameters
    key: str = ""  # what the same declaration has in the other view

    @property
    def on_device(self) -> bool:
        return bool(self.spaces & {"__kf_global__", "__kf_device__"})

    @property
    def on_host(self) -> bool:
        return not self.on_device or "__kf_host__" in self.spaces


class View:
    """One of the preprocessor's two texts, as declarations."""

    def __init__(self, text: str):
        self.text = text
        self.regions: list[tuple[int, str, int]] = []  # where a file's text begins, the file, its line there
        self.starts: list[int] = []
        self.texts: dict[str, list[str]] = {}  # of each file, all its pieces
        self.theirs: set[str] = set()  # files of the system and of the emulation
        self.read_markers()

    def read_markers(self) -> None:
        system: list[bool] = []
        at, file, line = 0, "", 1
        for marker in MARKER.finditer(self.text):
            self.add_region(at, marker.start(), file, line)
            file, line = marker[2].replace('\\"', '"').replace("\\\\", "\\"), int(marker[1])
            flags = marker[3].split()
            if "1" in flags:
                system.append("3" in flags)
            elif "2" in flags and system:
                system.pop()
            if (system and system[-1]) or file.startswith(("<", f"{OWN_INCLUDE}{os.sep}")):
                self.theirs.add(file)
            at = marker.end() + 1
        self.add_region(at, len(self.text), file, line)

    def add_region(self, start: int, end: int, file: str, line: int) -> None:
        self.regions.append((start, file, line))
        self.starts.append(start)
        self.texts.setdefault(file, []).append(self.text[start:end])

    def files(self) -> list[str]:
        return list(self.texts)

    def place(self, offset: int) -> tuple[str, int]:
        start, file, line = self.regions[bisect.bisect_right(self.starts, offset) - 1]
        return file, line + self.text.count("\n", start, offset)

    def marker(self, offset: int) -> str:
        file, line = self.place(offset)
        escaped = file.replace("\\", "\\\\").replace('"', '\\"')
        return f'\n# {line} "{escaped}"\n'

    def error(self, offset: int, message: str) -> ViewError:
        file, line = self.place(offset)
        return ViewError(f"{file}:{line}: {message}")

    def parse(self, opaque: set[str]) -> None:
        """Finds the declarations of all files but the opaque ones, whose text is kept whole."""
        self.tokens: list[Token] = []
        ends = [*self.starts[1:], len(self.text)]
        for (start, file, _), end in zip(self.regions, ends, strict=True):
            if file in opaque:
                piece = self.text[start:end]
                if not MARKER.sub("", piece).strip():
                    continue
                if self.tokens and self.tokens[-1].text.startswith("\0"):
                    last = self.tokens[-1]
                    last.text, last.end = last.text + piece, end
                else:
                    self.tokens.append(Token("\0" + piece, start, end))
                continue
            for match in TOKEN.finditer(self.text, start, end):
                if not MARKER.match(match.group()):
                    self.tokens.append(Token(match.group().lstrip(), match.start(), match.end()))
        self.device_declarations: dict[str, frozenset[str]] = {}
        self.items, _ = self.read_items(0, in_class=False)

    def closing(self, i: int) -> int:
        """The index of the bracket that closes the one at i, or the last token's."""
        depth = 0
        tokens = self.tokens
        for j in range(i, len(tokens)):
            text = tokens[j].text
            if text in OPENERS:
                depth += 1
            elif text in ("}", ")", "]"):
                depth -= 1
                if depth == 0:
                    return j
        return len(tokens) - 1

    def closing_angle(self, i: int) -> int:
        """The index of the > that closes the < at i; i itself where there is none."""
        depth = 0
        j = i
        while j < len(self.tokens):
            text = self.tokens[j].text
            if text in OPENERS:
                j = self.closing(j)
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return j
            elif text in (";", "}"):
                break
            j += 1
        return i

    def read_items(self, i: int, in_class: bool) -> tuple[list[Item], int]:
        """The declarations from token i to the end of the scope, and the index of its closing brace."""
        items = []
        while i < len(self.tokens) and self.tokens[i].text != "}":
            item, i = self.read_item(i, in_class)
            item.in_class = in_class
            self.describe(item)
            items.append(item)
        return items, i

    def read_item(self, i: int, in_class: bool) -> tuple[Item, int]:
        tokens = self.tokens
        first = tokens[i]
        if first.text.startswith(("\0", "#")):
            kind = "foreign" if first.text[0] == "\0" else "other"
            return Item(kind, first.start, first.end, [first]), i + 1
        begin = i
        initialised = False  # an initialiser has begun
        parameters = 0  # the index of the ( of a function's parameters
        members = False  # a constructor initialises members
        while i < len(tokens):
            text = tokens[i].text
            before = tokens[i - 1].text if i > begin else ""
            if text == ";":
                return self.item("other", begin, i), i + 1
            if text == "}":  # the scope ends without ;
                return self.item("other", begin, max(begin, i - 1)), i
            if text == "template" and i + 1 < len(tokens) and tokens[i + 1].text == "<":
                i = self.closing_angle(i + 1)
            elif text == ":" and in_class and i == begin + 1 and before in ("public", "private", "protected"):
                return self.item("other", begin, i), i + 1
            elif text == ":" and parameters and not initialised:
                members = True
            elif text == "=" and before not in OPERATORS:
                initialised = True
            elif text == "(" and before == "operator":  # operator()
                i += 1
            elif text in ("(", "["):
                if text == "(" and not parameters and not initialised and before not in ("", *ATTRIBUTES):
                    parameters = i
                i = self.closing(i)
            elif text == "<" and before and in_names(before) and before != "operator" and not initialised:
                i = self.closing_angle(i)
            elif text == "{":
                if initialised:
                    i = self.closing(i)
                elif parameters:
                    if members and before not in (")", "}", "..."):
                        i = self.closing(i)
                    else:
                        return self.function(begin, i, parameters)
                elif self.is_scope(begin, i):
                    children, end = self.read_items(i + 1, self.is_class(begin, i))
                    return self.scope(begin, i, end, children)
                else:
                    i = self.closing(i)
            i += 1
        return self.item("other", begin, len(tokens) - 1), len(tokens)

    def item(self, kind: str, begin: int, end: int) -> Item:
        tokens = self.tokens[begin : end + 1]
        return Item(kind, tokens[0].start, tokens[-1].end, tokens)

    def function(self, begin: int, brace: int, parameters: int) -> tuple[Item, int]:
        end = self.closing(brace)
        while end + 1 < len(self.tokens) and self.tokens[end + 1].text == "catch":
            while end + 1 < len(self.tokens) and self.tokens[end].text != "{":
                end += 1
            end = self.closing(end)
        header = self.tokens[begin:brace]
        item = Item("function", header[0].start, self.tokens[end].end, header)
        item.body = (self.tokens[brace].start, self.tokens[end].end)
        item.signature = self.signature(parameters)
        return item, end + 1

    def scope(self, begin: int, brace: int, end: int, children: list[Item]) -> tuple[Item, int]:
        header = self.tokens[begin:brace]
        item = Item(
            "scope", header[0].start, self.tokens[min(end, len(self.tokens) - 1)].end, header, children=children
        )
        i = end + 1
        if self.is_class(begin, brace):  # up to the ; after it, with what is declared there
            while i < len(self.tokens) and self.tokens[i].text != ";":
                i = self.closing(i) if self.tokens[i].text in OPENERS else i
                item.tokens.append(self.tokens[i])
                i += 1
            if i < len(self.tokens):
                item.end = self.tokens[i].end
            i += 1
        return item, i

    def is_scope(self, begin: int, brace: int) -> bool:
        words = [t.text for t in self.tokens[begin:brace]]
        if "namespace" in words or (len(words) == 2 and words[0] == "extern"):
            return True
        return self.is_class(begin, brace)

    def is_class(self, begin: int, brace: int) -> bool:
        """`struct alignas(8) Name<int> final : Base {`, but not `struct Name f() {`."""
        i = begin
        while i < brace and self.tokens[i].text not in CLASS_KEYS:
            if self.tokens[i].text == "enum":
                return False
            i = self.closing_angle(i + 1) if self.tokens[i].text == "template" else i
            i += 1
        if i == brace:
            return False
        i += 1
        while i < brace:
            text = self.tokens[i].text
            if text in ("final", ":"):
                return True
            if text in ("(", "["):
                i = self.closing(i)
            elif text == "<":
                i = self.closing_angle(i)
            elif text != "::" and not in_names(text):
                return False
            i += 1
        return True

    def signature(self, parameters: int) -> str:
        name = self.tokens[parameters - 1].text if parameters > 0 else ""
        end = self.closing(parameters)
        return name + " ".join(t.text for t in self.tokens[parameters : end + 1])

    def describe(self, item: Item) -> None:
        words = [t.text for t in item.tokens]
        if item.kind == "function":
            item.spaces = frozenset(SPACES.intersection(words))
            if not item.spaces:
                item.spaces = self.device_declarations.get(item.signature, frozenset())
            item.constexpr = "constexpr" in words
            item.key = "f " + " ".join(word for word in without_attributes(words) if word not in LOOSE)
            return
        if item.kind == "other" and words[-1] == ";" and SPACES.intersection(words) and "(" in words:
            at = words.index("(")
            end = matching(words, at)
            self.device_declarations[words[at - 1] + " ".join(words[at : end + 1])] = frozenset(
                SPACES.intersection(words)
            )
        # GCC 13 begins the two texts with other markers.
        item.key = f"{item.kind[0]} " + MARKER.sub("", " ".join(words))

    def slice(self, start: int, end: int) -> str:
        return self.text[start:end]

    def tokens_between(self, start: int, end: int) -> list[Token]:
        starts = self.token_starts = getattr(self, "token_starts", None) or [t.start for t in self.tokens]
        return self.tokens[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, end)]


def in_names(text: str) -> bool:
    return text[0].isalpha() or text[0] in "_$"


def matching(words: list[str], i: int) -> int:
    depth = 0
    for j in range(i, len(words)):
        depth += (words[j] in OPENERS) - (words[j] in (")", "]", "}"))
        if depth == 0:
            return j
    return len(words) - 1


def without_attributes(words: list[str]) -> list[str]:
    left = []
    i = 0
    while i < len(words):
        if words[i] == "__attribute__":
            i = matching(words, i + 1)
        else:
            left.append(words[i])
        i += 1
    return left


def declared_names(words: list[str]) -> list[str]:
    """The names that a declaration of constants or types declares; none for any other."""
    if words[:1] == ["using"] and "=" in words:
        return [words[1]]
    if "enum" in words[:2] and "{" in words:
        brace = words.index("{")
        names = [word for word in words[:brace] if in_names(word) and word not in ("enum", "class", "struct")][:1]
        if not {"class", "struct"} & set(words[:brace]):
            inside = words[brace : matching(words, brace)]
            names += [b for a, b in zip(inside, inside[1:], strict=False) if a in ("{", ",") and in_names(b)]
        return names
    if words[:1] == ["typedef"]:
        return [word for word in words if in_names(word)][-1:]
    names = []
    i = 0
    while i < len(words):
        if words[i] in ("=", "[", "{", ",", ";"):
            if i > 0 and in_names(words[i - 1]) or (i > 0 and words[i - 1] == "]"):
                names += [word for word in words[:i] if in_names(word)][-1:]
            while i < len(words) and words[i] not in (",", ";"):
                i = matching(words, i) if words[i] in OPENERS else i
                i += 1
        elif words[i] == "(":
            return []  # a function
        i += 1
    return names


class Merge:
    """The host's text with what device functions see otherwise."""

    def __init__(self, host: View, device: View):
        self.host, self.device = host, device
        self.edits: list[tuple[int, int, str]] = []
        self.renamed: set[str] = set()
        self.foreign = {item.key for item in self.all_items(host.items) if item.kind == "foreign"}

    @classmethod
    def all_items(cls, items: list[Item]):
        for item in items:
            yield item
            yield from cls.all_items(item.children)

    def text(self) -> str:
        while True:  # what is made of a constant that has two values has two itself
            known = len(self.renamed)
            self.edits = []
            self.items(self.host.items, self.device.items, len(self.host.text))
            if len(self.renamed) == known:
                break
        out, at = [], 0
        for start, end, new in sorted(self.edits, key=lambda edit: edit[:2]):
            out += [self.host.text[at:start], new, self.host.marker(end)]
            at = end
        out.append(self.host.text[at:])
        return finished("".join(out))

    def items(self, host: list[Item], device: list[Item], end: int) -> None:
        """Merges the declarations of one scope, which ends at `end`."""
        keys = [item.key for item in host], [item.key for item in device]
        blocks: Sequence[tuple[str, int, int, int, int]] = [("equal", 0, len(host), 0, len(device))]
        if keys[0] != keys[1]:
            blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes()
        only_host = [item for what, a, b, _, _ in blocks if what in ("delete", "replace") for item in host[a:b]]
        for what, a, b, c, d in blocks:
            if what == "equal":
                for ours, theirs in zip(host[a:b], device[c:d], strict=True):
                    self.pair(ours, theirs)
                continue
            for item in host[a:b]:
                if item.kind == "function" and not item.on_host:
                    self.edits.append((item.start, item.end, ""))  # for no architecture that runs here
            at = host[b].start if b < len(host) else end
            for item in device[c:d]:
                self.insert(item, only_host, at)

    def pair(self, ours: Item, theirs: Item) -> None:
        if ours.kind == "scope":
            self.items(ours.children, theirs.children, self.end_of_scope(ours))
        elif ours.kind == "function":
            self.function(ours, theirs)
        elif ours.kind == "other" and self.renamed:
            words = [t.text for t in theirs.tokens]
            names = declared_names(words)
            if names and self.renamed.intersection(words).difference(names):
                self.insert_other(theirs, names, ours.end)

    def end_of_scope(self, scope: Item) -> int:
        last = max((child.end for child in scope.children), default=scope.start)
        return self.host.text.index("}", last)

    def function(self, ours: Item, theirs: Item) -> None:
        assert ours.body is not None
        assert theirs.body is not None
        on_device = theirs.on_device or theirs.constexpr
        on_host = ours.on_host
        body = self.device_text(*theirs.body)
        if self.same(ours.body, theirs.body):
            return
        if on_device and on_host:
            self.both(ours.body, theirs.body, constexpr=ours.constexpr or theirs.constexpr)
        elif on_device:
            self.edits.append((*ours.body, self.device.marker(theirs.body[0]) + body))
        else:
            self.lambdas(ours.body, theirs.body)

    def same(self, ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
        device = [self.name(t, b) for b, t in self.with_before(self.device.tokens_between(*theirs))]
        return device == [t.text for t in self.host.tokens_between(*ours)]

    def both(self, ours: tuple[int, int], theirs: tuple[int, int], constexpr: bool = False) -> None:
        choice = f"{{ if ({'!__builtin_is_constant_evaluated() && ' if constexpr else ''}::kf::simt::on_device()) "
        body = self.device.marker(theirs[0]) + self.device_text(*theirs)
        text = choice + body + self.host.marker(ours[0]) + self.host.slice(*ours) + " }"
        self.edits.append((*ours, text))

    def lambdas(self, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        """In a host function: the device functions in it, as lambdas and members of local classes are."""
        regions = self.device_regions(self.host, ours), self.device_regions(self.device, theirs)
        if len(regions[0]) != len(regions[1]):
            raise self.host.error(
                ours[0], "this host function holds other __device__ functions with __CUDA_ARCH__ than without"
            )
        for (own, on_host), (other, _) in zip(*regions, strict=True):
            if self.same(own, other):
                continue
            if on_host:
                self.both(own, other)
            else:
                self.edits.append((*own, self.device.marker(other[0]) + self.device_text(*other)))

    @staticmethod
    def device_regions(view: View, body: tuple[int, int]) -> list[tuple[tuple[int, int], bool]]:
        """The bodies within a function's body that run on the device, and whether they run on the host, too."""
        tokens = view.tokens_between(*body)
        words = [t.text for t in tokens]
        regions = []
        i = 0
        while i < len(words):
            if words[i] not in SPACES:
                i += 1
                continue
            spaces = set()
            while words[i] in SPACES:
                spaces.add(words[i])
                i += 1
            while i < len(words) and words[i] not in ("{", ";"):
                i = matching(words, i) + 1 if words[i] in ("(", "[") else i + 1
            if i < len(words) and words[i] == "{" and spaces != {"__kf_host__"}:
                end = matching(words, i)
                regions.append(((tokens[i].start, tokens[end].end), "__kf_host__" in spaces))
                i = end
        return regions

    def insert(self, item: Item, only_host: list[Item], at: int) -> None:
        """Adds what only the device's text declares."""
        if item.kind == "function" and not (item.on_device or item.constexpr):
            return
        if item.kind == "foreign" and item.key in self.foreign:
            return
        if item.kind == "other":
            names = set(declared_names([t.text for t in item.tokens]))
            for other in only_host:
                both = names.intersection(declared_names([t.text for t in other.tokens]))
                if other.kind == "other" and both:
                    self.insert_other(item, sorted(both), at)
                    return
        self.edits.append((at, at, self.device.marker(item.start) + self.device_text(item.start, item.end)))

    def insert_other(self, item: Item, names: list[str], at: int) -> None:
        words = {t.text for t in item.tokens}
        whole = not item.in_class or words & {"static", "using", "typedef", "enum"}
        if not names or not words & CONSTANT or not whole:
            what = f"`{names[0]}`" if names else "this declaration"
            raise self.device.error(
                item.start,
                f"{what} is another with __CUDA_ARCH__ than without it, and the emulation has host and device code in "
                "one program; only constants, types, macros and the bodies of functions may differ",
            )
        self.renamed.update(names)
        self.edits.append((at, at, self.device.marker(item.start) + self.device_text(item.start, item.end)))

    @staticmethod
    def with_before(tokens: list[Token]):
        return zip(["", *(t.text for t in tokens)], tokens, strict=False)

    def name(self, token: Token, before: str) -> str:
        return f"{token.text}_on_device" if token.text in self.renamed and before not in (".", "->") else token.text

    def device_text(self, start: int, end: int) -> str:
        """A piece of the device's text, with the device's names of what has two."""
        out, at = [], start
        for before, token in self.with_before(self.device.tokens_between(start, end)):
            name = self.name(token, before)
            if name != token.text:
                out += [self.device.text[at : token.start], name]
                at = token.end
        return "".join(out) + self.device.text[at:end]


def finished(text: str) -> str:
    """Without the traces of __device__ and the like, and without the nesting of includes, which is no longer whole."""
    text = re.sub(r"\b__kf_(?:global|device|host)__\b", "", text)
    return MARKER.sub(lambda m: f'# {m[1]} "{m[2]}"' + "".join(f" {f}" for f in m[3].split() if f in "34"), text)


def mentions_architecture(files: list[str]) -> bool:
    """Whether one of the files tests what differs between the views."""
    for name in files:
        if name.startswith(("<", f"{OWN_INCLUDE}{os.sep}")) or not os.path.isfile(name):
            continue
        if b"__CUDA_ARCH_" in Path(name).read_bytes():
            return True
    return False


def merge(host: View, device: View) -> str | None:
    """One text to compile of two, or None if they are the same. Raises ViewError."""
    if host.text == device.text:
        return None
    # Of other people's files only those need to be understood that differ.
    opaque = {file for file in host.theirs | device.theirs if host.texts.get(file) == device.texts.get(file)}
    opaque |= {file for file in host.texts.keys() | device.texts.keys() if file.startswith("<")}
    host.parse(opaque)
    device.parse(opaque)
    return Merge(host, device).text()


def write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, errors="surrogateescape")
    os.replace(temporary, path)


def begins_precompiled(compiler: list[str]) -> bool:
    """Whether the first `-include` of a command names a header that has been precompiled."""
    first = next((file for flag, file in zip(compiler, compiler[1:], strict=False) if flag == "-include"), None)
    return first is not None and os.path.exists(f"{first}.gch")


class Preprocessor:
    """Runs the compiler's preprocessor on a source, and remembers which files it has read."""

    def __init__(self, compiler: list[str], source: str | Path, target: str | Path):
        self.precompiled = begins_precompiled(compiler)
        self.command = [*compiler, *TRACED, "-E", *(["-fpch-preprocess"] * self.precompiled), "-x", "c++", str(source)]
        self.target = str(target)
        self.dependencies = ""  # as make rules

    def run(self, flags: list[str]) -> subprocess.CompletedProcess:
        """What came of it; the text is in `stdout`."""
        with tempfile.TemporaryDirectory() as folder:
            rule = Path(folder) / "rule"
            noted = ["-MD", "-MF", str(rule), "-MT", self.target]
            done = subprocess.run(
                [*self.command, *flags, *noted], capture_output=True, text=True, errors="surrogateescape"
            )
            if done.returncode == 0:
                self.dependencies += rule.read_text(errors="surrogateescape")
        return done

    def text(self, flags: list[str]) -> str:
        """The text. Raises ViewError with the preprocessor's own complaint."""
        done = self.run(flags)
        if done.returncode != 0:
            raise ViewError(done.stderr.strip())
        return done.stdout


def one_text(preprocess) -> tuple[str, bool]:
    """What the compiler shall see of a source, preprocessed, and whether device functions see it otherwise.

    Args:
        preprocess: called with flags for the preprocessor; returns its text.
    """
    host = View(preprocess([]))
    merged = None
    if mentions_architecture(host.files()):
        merged = merge(host, View(preprocess(DEVICE_MACROS)))
    return (finished(host.text), False) if merged is None else (merged, True)


def split_arguments(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The compiler with its flags, and the values of those that name files: -c, -o, -MF, -MT, and our --rewrite."""
    flags, named = [], {}
    words = iter(arguments)
    for word in words:
        if word in ("-c", "-o", "-MF", "-MT", "-MQ", "--rewrite"):
            named["-MT" if word == "-MQ" else word] = next(words, "")
        elif word not in ("-MD", "-MMD"):
            flags.append(word)
    return flags, named


def include_dirs(flags: list[str]) -> list[str]:
    """The folders of `-I folder` and `-Ifolder`."""
    apart = [folder for flag, folder in zip(flags, flags[1:], strict=False) if flag == "-I"]
    return apart + [flag[2:] for flag in flags if flag.startswith("-I") and flag != "-I"]


def main(arguments: list[str]) -> int:
    flags, named = split_arguments(arguments)
    if not flags or not named.get("-c") or not named.get("-o"):
        print(
            "usage: python -S emulator compile [--rewrite IN.cpp] COMPILER FLAGS... -c IN.cpp -o OUT.o", file=sys.stderr
        )
        return 2
    source, output = Path(named["-c"]), named["-o"]
    rules = ""  # what the object depends on, beside what the preprocessor reads
    if "--rewrite" in named:
        try:
            read = rewrite.rewrite(source, named["--rewrite"], include_dirs(flags))
        except (rewrite.RewriteError, OSError) as error:
            print(error, file=sys.stderr)
            return 1
        rules = rewrite.make_rule(named.get("-MT", output), read)
        source = Path(named["--rewrite"]).absolute()
    with source.open(encoding="utf-8", errors="surrogateescape") as file:
        rewritten = file.read(len(REWRITTEN)) == REWRITTEN
    if not rewritten:
        return subprocess.run(arguments).returncode
    preprocessor = Preprocessor(flags, source, named.get("-MT", output))
    try:
        text, differs = one_text(preprocessor.text)
    except ViewError as error:
        print(error, file=sys.stderr)
        return 1
    if "-MF" in named:
        # Without what was written a moment ago, which is always newer than the object's last build began.
        own = rf"(?<=\s){re.escape(str(source.parent))}/(?:\\.|[^\s\\])*" if rules else r"(?!)"
        write(Path(named["-MF"]), re.sub(own, "", preprocessor.dependencies) + rules)
    if differs:
        source = Path(f"{output}.ii")  # a preprocessed text, by its name: -include brings nothing more
        write(source, text)
    return subprocess.run([*flags, "-c", str(source), "-o", output]).returncode
