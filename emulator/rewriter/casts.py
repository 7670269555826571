"""Casts to integer types, which convert as a GPU does in device code."""

from __future__ import annotations

from .tokens import NOT_CALLED, OPENERS, Source, Token, Tokens

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


class Casts(Tokens):
    def __init__(self, source: Source, integers: set[str], parameters: set[str]):
        super().__init__(source)
        self.integers, self.parameters = integers, parameters  # both are the program's own

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
