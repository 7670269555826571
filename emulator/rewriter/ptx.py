"""Translates inline PTX into C++: each instruction becomes a call of a function of `include/kf_simt/ptx.h`.

`asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));` becomes, on the same lines, a block that copies
the operands into registers of the right type, calls `fma`, and copies the results back. Predicates become `if`, labels
`goto`. An instruction that is not emulated becomes a call of a function that g++ and clang refuse to compile: the error
names the instruction and its line, and stays away where the statement is not compiled or its function is never used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .ptx_arithmetic import Arithmetic
from .ptx_instruction import TYPES, U32, U64, Memory, Negated, Pair, PtxError, Register, Sink, Vector, value_of
from .ptx_memory import MemoryAccess
from .ptx_warp import Warp
from .tokens import CLOSERS, OPENERS


@dataclass
class Argument:
    """An operand of the asm statement."""

    constraint: str  # without = and +
    mode: str  # "=" (written), "+" (both) or "" (read)
    expression: str


CONSTRAINTS = {"r": U32, "l": U64, "h": TYPES["u16"], "f": "float", "d": "double", "b": "bool", "c": TYPES["u8"]}
SPECIAL = {
    **{f"tid.{x}": (f"kf_ptx::threadIdx.{x}", U32) for x in "xyz"},
    **{f"ntid.{x}": (f"kf_ptx::blockDim.{x}", U32) for x in "xyz"},
    **{f"ctaid.{x}": (f"kf_ptx::blockIdx.{x}", U32) for x in "xyz"},
    **{f"nctaid.{x}": (f"kf_ptx::gridDim.{x}", U32) for x in "xyz"},
    **{f"clusterid.{x}": (f"kf_ptx::kf_cluster_index().{x}", U32) for x in "xyz"},
    **{f"nclusterid.{x}": (f"kf_ptx::kf_grid_clusters().{x}", U32) for x in "xyz"},
    **{f"cluster_ctaid.{x}": (f"kf_ptx::kf_cluster_block_index().{x}", U32) for x in "xyz"},
    **{f"cluster_nctaid.{x}": (f"kf_ptx::kf_cluster_dim().{x}", U32) for x in "xyz"},
    "cluster_ctarank": ("kf_ptx::kf_cluster_rank()", U32),
    "cluster_nctarank": ("kf_ptx::kf_cluster_size()", U32),
    "is_explicit_cluster": ("(kf_ptx::kf_cluster_size() > 1)", "bool"),
    "laneid": ("kf_ptx::kf_lane_id()", U32),
    "warpid": ("kf_ptx::warp_id()", U32),
    "nwarpid": ("kf_ptx::warps()", U32),
    "smid": ("kf_ptx::sm_id()", U32),
    "nsmid": ("kf_ptx::sm_count()", U32),
    "gridid": ("kf_ptx::grid_id()", U64),
    "lanemask_eq": ("(1u << kf_ptx::kf_lane_id())", U32),
    "lanemask_lt": ("((1u << kf_ptx::kf_lane_id()) - 1u)", U32),
    "lanemask_le": ("(~0u >> (31u - kf_ptx::kf_lane_id()))", U32),
    "lanemask_gt": ("(~(~0u >> (31u - kf_ptx::kf_lane_id())))", U32),
    "lanemask_ge": ("(~((1u << kf_ptx::kf_lane_id()) - 1u))", U32),
    "clock": ("static_cast<unsigned>(kf_ptx::clock64())", U32),
    "clock_hi": ("static_cast<unsigned>(kf_ptx::clock64() >> 32)", U32),
    "clock64": ("static_cast<std::uint64_t>(kf_ptx::clock64())", U64),
    "globaltimer": ("kf_ptx::global_timer()", U64),
    "globaltimer_lo": ("static_cast<unsigned>(kf_ptx::global_timer())", U32),
    "globaltimer_hi": ("static_cast<unsigned>(kf_ptx::global_timer() >> 32)", U32),
    "dynamic_smem_size": ("kf_ptx::dynamic_shared_bytes()", U32),
    "WARP_SZ": ("32u", U32),
}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "'": "'", "0": "\0", "v": "\v", "f": "\f", "a": "\a"}

TOKEN = re.compile(
    r"""
      (?P<space>\s+|//[^\n]*|/\*.*?\*/)
    | (?P<argument>%\d+)
    | (?P<special>%+[A-Za-z_]\w*(?:\.[xyzw])?)
    | (?P<float>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    | (?P<integer>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
    | (?P<directive>\.[a-z]\w*)
    | (?P<word>[A-Za-z_$][\w$]*(?:(?:\.|::)[\w$]+)*)
    | (?P<op>[^\s])
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass
class Token:
    kind: str
    text: str
    at: int


def decode(literal: str) -> str:
    """The characters of a C string literal, raw or not."""
    raw = re.fullmatch(r'(?:u8|[uUL])?R"([^()\\\s]{0,16})\((.*)\)\1"', literal, re.DOTALL)
    if raw:
        return raw[2]
    body = literal[literal.index('"') + 1 : -1]
    return re.sub(r"\\(\r?\n|.)", lambda m: ESCAPES.get(m[1], "" if m[1].endswith("\n") else m[1]), body)


class AnyInstruction(Arithmetic, MemoryAccess, Warp):
    """Has a method for each instruction that is emulated."""


class Translator:
    """One asm statement."""

    def __init__(self, template: str, arguments: list[Argument], tag: str):
        # %= is a number that no other statement has; labels are local to the block here, so any word will do.
        self.template = template.replace("%=", "_here").replace("%%", "%")
        self.arguments = arguments
        self.tag = tag  # for the names of functions that report errors
        found = (Token(m.lastgroup or "", m.group(), m.start()) for m in TOKEN.finditer(self.template))
        self.tokens = [token for token in found if token.kind != "space"]
        self.at = 0
        self.scopes: list[dict[str, Register]] = [{}]
        self.label_scopes: list[dict[str, str]] = [self.labels_from(0)]
        self.labels = list(self.label_scopes[0].values())
        self.variables: list[str] = []
        self.errors = 0

    # The parts of a statement

    def translate(self) -> tuple[str, list[tuple[int, str]], str]:
        """What stands before the instructions, the instructions with their offsets, and what stands after them."""
        body: list[tuple[int, str]] = []
        while self.at < len(self.tokens):
            start = self.tokens[self.at].at
            try:
                text = self.statement()
            except PtxError as error:
                text = self.refusal(str(error))
                self.skip_statement()
            if text:
                body.append((start, text))
        before = "do { "
        if self.labels:
            before += "__label__ " + ", ".join(self.labels) + "; "
        before += "namespace kf_ptx = ::kf::simt::ptx; "
        after = ""
        for n, argument in enumerate(self.arguments):
            expression = argument.expression
            if argument.constraint in ("n", "i"):
                before += f"[[maybe_unused]] const auto kf_{n} = ({expression}); "
                continue
            kind = CONSTRAINTS.get(argument.constraint)
            if kind is None:
                body.insert(0, (0, self.refusal(f'the constraint "{argument.constraint}"')))
                continue
            if argument.mode == "":
                before += f"[[maybe_unused]] const auto kf_{n} = kf_ptx::input<{kind}>({expression}); "
                continue
            before += f"auto& kf_to_{n} = ({expression}); {kind} kf_{n} = "
            before += (
                f"kf_ptx::input<{kind}>(kf_to_{n}); " if argument.mode == "+" else f"kf_ptx::undefined<{kind}>(); "
            )
            after += f"kf_ptx::output(kf_to_{n}, kf_{n}); "
        before += "".join(self.variables)
        return before, body, after + "} while (0)"

    def refusal(self, what: str) -> str:
        self.errors += 1
        name = f"kf_refused_{self.tag}_{self.errors}"
        text = what.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'{{ void {name}() __attribute__((error("inline PTX: {text} is not emulated"))); {name}(); }}'

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead].text if self.at + ahead < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> Token:
        if self.at >= len(self.tokens):
            raise PtxError(f"`{self.template.strip()[-40:]}` (it ends too early)")
        token = self.tokens[self.at]
        if expected is not None and token.text != expected:
            raise PtxError(f"`{self.source_of(self.at)}` (found `{token.text}` instead of `{expected}`)")
        self.at += 1
        return token

    def source_of(self, token: int) -> str:
        """The text of the instruction that holds this token."""
        first = token
        while first > 0 and self.tokens[first - 1].text not in (";", ":"):
            first -= 1
        last = token
        while last < len(self.tokens) - 1 and self.tokens[last].text != ";":
            last += 1
        text = self.template[self.tokens[first].at : self.tokens[last].at + len(self.tokens[last].text)]
        return re.sub(r"\s+", " ", text).strip(" {};")

    def skip_statement(self) -> None:
        while self.at < len(self.tokens) and self.tokens[self.at].text != ";":
            self.at += 1
        self.at += 1

    def labels_from(self, start: int) -> dict[str, str]:
        """The labels of the scope that begins at this token."""
        found: dict[str, str] = {}
        depth = 0
        i = start
        while i < len(self.tokens):
            text = self.tokens[i].text
            if text == "{":
                depth += 1
            elif text == "}":
                depth -= 1
                if depth < 0:
                    break
            follows = i == start or self.tokens[i - 1].text in (";", "{", "}", ":")
            here = depth == 0 and follows and self.tokens[i].kind == "word"
            if here and i + 1 < len(self.tokens) and self.tokens[i + 1].text == ":":
                found[text] = f"kf_label_{i}"
            i += 1
        return found

    def statement(self) -> str:
        text = self.peek()
        if text == ";":
            self.at += 1
            return ""
        if text == "{":
            self.at += 1
            self.scopes.append({})
            self.label_scopes.append(self.labels_from(self.at))
            self.labels += self.label_scopes[-1].values()
            return ""
        if text == "}":
            self.at += 1
            if len(self.scopes) == 1:
                raise PtxError("`}` without `{`")
            self.scopes.pop()
            self.label_scopes.pop()
            return ""
        if text == ".reg":
            self.declaration()
            return ""
        if self.tokens[self.at].kind == "word" and self.peek(1) == ":":
            self.at += 2
            return f"{self.label(text)}: __attribute__((unused)); "
        condition = ""
        if text == "@":
            self.at += 1
            negated = self.peek() == "!"
            if negated:
                self.at += 1
            condition = f"if ({'!' if negated else ''}{value_of(self.operand(), 'bool')}) "
        start = self.at
        opcode = self.take()
        if opcode.kind != "word":
            raise PtxError(f"`{self.source_of(start)}`")
        if opcode.text in ("bra", "bra.uni"):
            target = self.label(self.take().text)
            self.take(";")
            return f"{condition}goto {target}; "
        operands = []
        if self.peek() not in (";", ""):
            operands.append(self.operand())
            while self.peek() == ",":
                self.at += 1
                operands.append(self.operand())
        if self.peek() != "":
            self.take(";")
        parts = opcode.text.split(".")
        try:
            return condition + "{ " + AnyInstruction(parts, operands).translate() + " } "
        except (IndexError, KeyError, AttributeError, TypeError, ValueError):
            # Fewer operands than the instruction has, or another kind of operand, or a type it does not know.
            return condition + self.refusal(f"`{self.source_of(start)}`")
        except PtxError as error:
            return condition + self.refusal(f"`{self.source_of(start)}`" + (f": {error}" if str(error) else ""))

    def label(self, name: str) -> str:
        for scope in reversed(self.label_scopes):
            if name in scope:
                return scope[name]
        raise PtxError(f"the jump to `{name}`")

    def declaration(self) -> None:
        self.take(".reg")
        kind = self.take().text.lstrip(".")
        if kind not in TYPES:
            raise PtxError(f"`.reg .{kind}`")
        cpp = TYPES[kind]
        if cpp.startswith("std::int"):
            cpp = cpp.replace("std::int", "std::uint")
        while True:
            name = self.take().text
            names = [name]
            if self.peek() == "<":
                self.at += 1
                names = [f"{name}{i}" for i in range(int(self.take().text))]
                self.take(">")
            for each in names:
                variable = f"kf_v{len(self.variables)}"
                self.variables.append(f"[[maybe_unused]] {cpp} {variable} = kf_ptx::undefined<{cpp}>(); ")
                self.scopes[-1][each.lstrip("%")] = Register(variable, cpp, writable=True)
            if self.peek() != ",":
                break
            self.take(",")
        self.take(";")

    def operand(self):
        text = self.peek()
        if text == "[":
            return self.memory()
        if text == "{":
            self.at += 1
            parts = []
            while self.peek() != "}":
                parts.append(self.operand())
                if self.peek() == ",":
                    self.at += 1
            self.take("}")
            return Vector(parts)
        if text == "!":
            self.at += 1
            return Negated(self.operand())
        if text == "_":
            self.at += 1
            first: Register | Sink = Sink()
        else:
            first = self.value()
        if self.peek() == "|":
            self.at += 1
            return Pair(first, Sink() if self.peek() == "_" and self.take() else self.value())
        return first

    def value(self) -> Register:
        sign = ""
        while self.peek() in ("-", "+"):
            sign = "-" if self.take().text == "-" else sign
        token = self.take()
        if token.kind == "argument":
            number = int(token.text[1:])
            if number >= len(self.arguments):
                raise PtxError(f"`{token.text}` (there are {len(self.arguments)} operands)")
            argument = self.arguments[number]
            if argument.constraint in ("n", "i"):
                return Register(f"{sign}kf_{number}", "constant")
            if argument.constraint not in CONSTRAINTS:
                raise PtxError(f'the constraint "{argument.constraint}"')
            kind = CONSTRAINTS[argument.constraint]
            return Register(f"{sign}kf_{number}", kind, writable=argument.mode != "")
        if token.kind == "integer":
            digits = token.text.rstrip("U")
            if re.fullmatch(r"0\d+", digits):
                digits = str(int(digits, 8))
            unsigned = token.text.endswith("U") or int(digits, 0) > 0x7FFFFFFFFFFFFFFF
            return Register(f"{sign}{digits}{'ULL' if unsigned else 'LL'}", "constant")
        if token.kind == "float":
            if token.text[:2].lower() == "0f":
                return Register(f"{sign}kf_ptx::__uint_as_float(0x{token.text[2:]}u)", "float")
            if token.text[:2].lower() == "0d":
                return Register(f"{sign}kf_ptx::__longlong_as_double(0x{token.text[2:]})", "double")
            return Register(f"{sign}{token.text}", "constant")
        name = token.text.lstrip("%")
        for scope in reversed(self.scopes):
            if name in scope:
                found = scope[name]
                return Register(sign + found.text, found.kind, found.writable and not sign)
        if name in SPECIAL:
            text, kind = SPECIAL[name]
            return Register(text, kind)
        raise PtxError(f"`{token.text}`")

    def memory(self) -> Memory:
        self.take("[")
        base = self.value()
        offset = ""
        while self.peek() in ("+", "-"):
            offset += f" {self.take().text} {value_of(self.value(), TYPES['s64'])}"
        coordinates = []
        if self.peek() == ",":
            self.at += 1
            operand = self.operand()
            coordinates = operand.parts if isinstance(operand, Vector) else [operand]
        self.take("]")
        return Memory(base, offset, coordinates)


def nesting(token) -> int:
    """By how many brackets what follows the token lies deeper."""
    return (token.text in OPENERS) - (token.text in CLOSERS) if token.kind == "op" else 0


def expanded(token, macros: dict, used: tuple = ()) -> list:
    """The token, or what it stands for if it is a macro without parameters."""
    body = macros.get(token.text) if token.kind == "word" and token.text not in used else None
    if body is None:
        return [token]
    return [inner for part in body for inner in expanded(part, macros, (*used, token.text))]


def rewrite_statement(source: str, start: int, tokens: list, tag: str, macros: dict, in_macro: bool) -> str | None:
    """The C++ for an asm statement, or None if its template is empty.

    `source` is the text of the file; the statement begins at `start`; `tokens` are those between its parentheses, each
    with `kind`, `text`, `start` and `end`; `macros` gives the tokens that a macro without parameters stands for. Every
    instruction stands on the line of the string that holds it. Within a macro line breaks are continued.
    """
    sections: list[list] = [[]]
    lines: list[int] = []  # of the tokens of the first section, within the statement
    depth = 0
    pieces = []
    for token in tokens:
        line = source.count("\n", start, token.start)
        depth += nesting(token)
        pieces += [(piece, line) for piece in (expanded(token, macros) if depth == 0 else [token])]
    for token, line in pieces:
        depth += nesting(token)
        if token.kind == "op" and token.text == ":" and depth == 0:
            sections.append([])
        else:
            sections[-1].append(token)
            if len(sections) == 1:
                lines.append(line)
    literals = sections[0]
    if not literals or all(t.kind == "string" and not decode(t.text).strip() for t in literals):
        return None

    template, places = "", []  # where each literal begins in the template, and its line within the statement
    refusal = ""
    if any(token.kind == "directive" for token, _ in pieces):
        refusal = "a statement with a preprocessor directive in it"
    for token, line in zip(literals, lines, strict=True):
        if token.kind == "string":
            places.append((len(template), line))
            template += decode(token.text)
        else:
            refusal = refusal or f"a template with `{token.text.strip()}` in it, which is not a string,"
    if len(sections) > 4:
        refusal = refusal or "`asm goto`"

    arguments: list[Argument] = []
    if not refusal:
        try:
            for mode, section in zip(("=", ""), sections[1:3], strict=False):
                arguments += arguments_of(source, section, mode)
        except PtxError as error:
            refusal = str(error)
    translator = Translator("" if refusal else template, arguments, tag)
    if refusal:
        before, body, after = "do { ", [(0, translator.refusal(refusal))], "} while (0)"
    else:
        before, body, after = translator.translate()
    out, line = before, 0
    for offset, text in body:
        target = max((place[1] for place in places if place[0] <= offset), default=0)
        if target > line:
            out += ("\\\n" if in_macro else "\n") * (target - line)
            line = target
        out += text
    return out + after


def arguments_of(source: str, tokens: list, mode: str) -> list[Argument]:
    """The operands in one section of an asm statement: `"constraint"(expression), …`"""
    arguments = []
    i = 0
    while i < len(tokens):
        constraint = tokens[i]
        if constraint.kind != "string" or i + 1 >= len(tokens) or tokens[i + 1].text != "(":
            raise PtxError(f"an operand that begins with `{constraint.text}`")
        depth, j = 0, i + 1
        while True:
            depth += nesting(tokens[j])
            if depth == 0:
                break
            j += 1
        text = ""
        for k in range(i + 2, j):
            gap = k > i + 2 and tokens[k].start > tokens[k - 1].end
            text += (" " if gap else "") + re.sub(r"\\?\n", " ", tokens[k].text)
        letters = decode(constraint.text)
        given = letters[:1] if letters[:1] in "=+" else ""
        if (given == "") != (mode == ""):
            raise PtxError(f'the constraint "{letters}"')
        arguments.append(Argument(letters.lstrip("=+&"), given, text))
        i = j + 1
        if i < len(tokens) and tokens[i].text == ",":  # nvcc does without
            i += 1
    return arguments
