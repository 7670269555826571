"""A source as tokens: its brackets, and the edits to make in it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

# Words that can stand before a parenthesis without being called.
NOT_CALLED = {"return", "if", "while", "for", "switch", "else", "do", "case", "co_return"}
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
CONDITION = re.compile(r"#\s*(?P<what>if|ifdef|ifndef|elif|else|endif)\b(?P<rest>.*)", re.DOTALL)


class Tokens:
    """One file, of which edits are made where its tokens are."""

    def __init__(self, source: Source):
        self.source = source
        self.path = source.path
        self.text = source.text
        self.tag = hashlib.sha256(str(source.path).encode()).hexdigest()[:6]
        self.names = 0  # that have been made with this tag

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

    def closing(self, tokens: list[Token], i: int, step: int = 1) -> int:
        """The index of the bracket that closes the one at i; with a step of -1, of the one that it closes."""
        partner, ends = (OPENERS, CLOSERS) if step > 0 else (CLOSERS, OPENERS)
        wrong = ("closes nothing", "is never closed")[::step]
        depth: list[str] = []
        for j in range(i, len(tokens) if step > 0 else -1, step):
            text = tokens[j].text
            if tokens[j].kind != "op":
                continue
            if text in partner:
                depth.append(partner[text])
            elif text in ends:
                if not depth or depth.pop() != text:
                    raise self.error(tokens[j].start, f"{text} {wrong[0]}")
                if not depth:
                    return j
        raise self.error(tokens[i].start, f"{tokens[i].text} {wrong[1]}")

    def closing_angle(self, tokens: list[Token], i: int, step: int = 1) -> int:
        """The same of the < or > of template arguments."""
        ours, theirs = ("<", ">")[::step]
        brackets, stops = (OPENERS, {";"}) if step > 0 else (CLOSERS, {";", *OPENERS})
        depth = 0
        j = i
        while 0 <= j < len(tokens):
            text = tokens[j].text
            if tokens[j].kind == "op":
                depth += (text == ours) - (text == theirs)
                if text == theirs and depth == 0:
                    return j
                if text in brackets:
                    j = self.closing(tokens, j, step)
                elif text in stops:
                    break
            j += step
        where = "where these template arguments end" if step > 0 else "where the template arguments before <<< begin"
        raise self.error(tokens[i].start, f"cannot find {where}")

    def looks_like_arguments(self, tokens: list[Token], i: int, end: int) -> bool:
        try:
            return self.closing_angle(tokens, i) < end
        except RewriteError:
            return False

    @staticmethod
    def is_scope(tokens: list[Token], i: int) -> bool:
        """`::` ends at token i."""
        return i > 0 and tokens[i].text == ":" and tokens[i - 1].text == ":" and tokens[i - 1].end == tokens[i].start

    def flat(self, start: int, end: int) -> str:
        """What stands there, on one line."""
        return re.sub(r"(?:\s|\\\n)+", " ", self.text[start:end])

    def spaced(self, tokens: list[Token]) -> str:
        """The text of these tokens with the line breaks between them, without comments."""
        out = ""
        for k, token in enumerate(tokens):
            if k > 0:
                gap = self.text[tokens[k - 1].end : token.start]
                out += "\n" * gap.count("\n") or (" " if gap else "")
            out += token.text
        return out

    def fit(self, out: str, start: int, stop: int) -> str:
        """Within a macro a line break that is left over must be continued; elsewhere `edit` adds it."""
        missing = self.text.count("\n", start, stop) - out.count("\n")
        if missing > 0 and "\\\n" in self.text[start:stop]:
            return out + "\\\n" * missing
        return out
