"""What the compiler's preprocessor makes of a source, as declarations: functions, scopes and all else."""

from __future__ import annotations

import bisect
import os
import re
from dataclasses import dataclass, field

from . import OWN_INCLUDE

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
        self.words = [token.text for token in self.tokens]
        self.token_starts = [token.start for token in self.tokens]
        self.device_declarations: dict[str, frozenset[str]] = {}
        self.items, _ = self.read_items(0, in_class=False)

    def closing_angle(self, i: int) -> int:
        """The index of the > that closes the < at i; i itself where there is none."""
        depth = 0
        j = i
        while j < len(self.tokens):
            text = self.tokens[j].text
            if text in OPENERS:
                j = matching(self.words, j)
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
                i = matching(self.words, i)
            elif text == "<" and before and in_names(before) and before != "operator" and not initialised:
                i = self.closing_angle(i)
            elif text == "{":
                if initialised:
                    i = matching(self.words, i)
                elif parameters:
                    if members and before not in (")", "}", "..."):
                        i = matching(self.words, i)
                    else:
                        return self.function(begin, i, parameters)
                elif self.is_scope(begin, i):
                    children, end = self.read_items(i + 1, self.is_class(begin, i))
                    return self.scope(begin, i, end, children)
                else:
                    i = matching(self.words, i)
            i += 1
        return self.item("other", begin, len(tokens) - 1), len(tokens)

    def item(self, kind: str, begin: int, end: int) -> Item:
        tokens = self.tokens[begin : end + 1]
        return Item(kind, tokens[0].start, tokens[-1].end, tokens)

    def function(self, begin: int, brace: int, parameters: int) -> tuple[Item, int]:
        end = matching(self.words, brace)
        while end + 1 < len(self.tokens) and self.tokens[end + 1].text == "catch":
            while end + 1 < len(self.tokens) and self.tokens[end].text != "{":
                end += 1
            end = matching(self.words, end)
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
                i = matching(self.words, i) if self.tokens[i].text in OPENERS else i
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
                i = matching(self.words, i)
            elif text == "<":
                i = self.closing_angle(i)
            elif text != "::" and not in_names(text):
                return False
            i += 1
        return True

    def signature(self, parameters: int) -> str:
        name = self.tokens[parameters - 1].text if parameters > 0 else ""
        end = matching(self.words, parameters)
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

    def tokens_between(self, start: int, end: int) -> list[Token]:
        first, last = (bisect.bisect_left(self.token_starts, at) for at in (start, end))
        return self.tokens[first:last]


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
