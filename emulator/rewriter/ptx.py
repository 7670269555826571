"""Translates inline PTX into C++: each instruction becomes a call of a function of `include/kf_simt/ptx.h`.

`asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));` becomes, on the same lines, a block that copies
the operands into registers of the right type, calls `fma`, and copies the results back. Predicates become `if`, labels
`goto`. An instruction that is not emulated becomes a call of a function that g++ and clang refuse to compile: the error
names the instruction and its line, and stays away where the statement is not compiled or its function is never used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class PtxError(Exception):
    """What is not understood, and the offset in the template where it stands."""

    def __init__(self, message: str = "", offset: int = 0):
        super().__init__(message)
        self.offset = offset


@dataclass
class Argument:
    """An operand of the asm statement."""

    constraint: str  # without = and +
    mode: str  # "=" (written), "+" (both) or "" (read)
    expression: str


@dataclass
class Register:
    """Something with a value: a C++ variable or expression of the type `kind`."""

    text: str
    kind: str  # a C++ type, or "constant" for a number whose type the instruction gives
    writable: bool = False


@dataclass
class Sink:
    """`_`: a result that nobody wants."""


@dataclass
class Memory:
    """`[base + offset, {coordinates}]`"""

    base: Register
    offset: str
    coordinates: list


@dataclass
class Vector:
    parts: list


@dataclass
class Pair:
    """`d|p`"""

    first: object
    second: object


@dataclass
class Negated:
    """`!p`"""

    of: Register


U8, U16, U32, U64 = "std::uint8_t", "std::uint16_t", "std::uint32_t", "std::uint64_t"
S8, S16, S32, S64 = "std::int8_t", "std::int16_t", "std::int32_t", "std::int64_t"
TYPES = {
    "pred": "bool",
    **{f"{letter}{bits}": f"std::uint{bits}_t" for letter in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"std::int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    "f16": U16,
    "bf16": U16,
    "f16x2": U32,
    "bf16x2": U32,
    "tf32": U32,
    "e4m3x2": U16,
    "e5m2x2": U16,
}
HALVES = {"f16": ("F16", 1), "bf16": ("BF16", 1), "f16x2": ("F16", 2), "bf16x2": ("BF16", 2)}
CONSTRAINTS = {"r": U32, "l": U64, "h": U16, "f": "float", "d": "double", "b": "bool", "c": U8}
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


class Translator:
    """One asm statement."""

    def __init__(self, template: str, arguments: list[Argument], tag: str):
        # %= is a number that no other statement has; labels are local to the block here, so any word will do.
        self.template = template.replace("%=", "_here").replace("%%", "%")
        self.arguments = arguments
        self.tag = tag  # for the names of functions that report errors
        self.tokens = self.tokenize()
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

    def tokenize(self) -> list[Token]:
        return [
            Token(m.lastgroup or "", m.group(), m.start())
            for m in TOKEN.finditer(self.template)
            if m.lastgroup != "space"
        ]

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
            condition = f"if ({'!' if negated else ''}{self.read(self.operand(), 'bool')}) "
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
            return condition + "{ " + Instruction(self, parts, operands).translate() + " } "
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
        while kind in ("align", "v2", "v4"):
            raise PtxError(f"`.reg .{kind}`")
        if kind not in TYPES:
            raise PtxError(f"`.reg .{kind}`")
        cpp = TYPES[kind]
        if cpp.startswith("std::int"):
            cpp = cpp.replace("std::int", "std::uint")
        while True:
            name = self.take().text
            names = [name]
            if self.peek() == "<":
                self.take("<")
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
            offset += f" {self.take().text} {self.read(self.value(), S64)}"
        coordinates = []
        if self.peek() == ",":
            self.at += 1
            operand = self.operand()
            coordinates = operand.parts if isinstance(operand, Vector) else [operand]
        self.take("]")
        return Memory(base, offset, coordinates)

    @staticmethod
    def read(operand, kind: str) -> str:
        """The operand as a value of the C++ type `kind`."""
        if isinstance(operand, Negated):
            return f"!{Translator.read(operand.of, 'bool')}"
        if isinstance(operand, Pair) or not isinstance(operand, Register):
            raise PtxError()
        if operand.kind == "constant":
            return f"static_cast<{kind}>({operand.text})"
        if operand.kind == kind:
            return operand.text
        return f"kf_ptx::as<{kind}>({operand.text})"

    @staticmethod
    def write(operand, value: str) -> str:
        """A statement that gives the operand this value."""
        if isinstance(operand, Sink):
            return f"static_cast<void>({value});"
        if not isinstance(operand, Register) or not operand.writable:
            raise PtxError("its result has no place to go")
        return f"kf_ptx::put({operand.text}, {value});"


class Instruction:
    """One instruction: the parts of its name, and its operands."""

    def __init__(self, translator: Translator, parts: list[str], operands: list):
        self.translator = translator
        self.name = parts[0]
        self.parts = parts
        self.modifiers = parts[1:]
        self.operands = operands

    def translate(self) -> str:
        if self.name in NOTHING or any(".".join(self.parts).startswith(prefix) for prefix in NOTHING_PREFIXES):
            return ""
        handler = getattr(self, f"do_{self.name}", None)
        if handler is None and self.name in ALIASES:
            handler = getattr(self, f"do_{ALIASES[self.name]}")
        if handler is None:
            raise PtxError()
        return handler()

    # What handlers are made of

    def has(self, *modifiers: str) -> bool:
        return any(modifier in self.modifiers for modifier in modifiers)

    def only(self, *known: str) -> None:
        """Refuses a modifier that changes the meaning in a way that is not emulated."""
        for modifier in self.modifiers:
            if modifier not in known and modifier not in TYPES:
                raise PtxError(f"`.{modifier}`")

    @property
    def kind(self) -> str:
        """The PTX type that ends the name."""
        return self.modifiers[-1]

    @property
    def type(self) -> str:
        return TYPES[self.kind]

    def read(self, index: int, kind: str | None = None) -> str:
        return self.translator.read(self.operands[index], kind or self.type)

    def write(self, value: str, index: int = 0) -> str:
        return self.translator.write(self.operands[index], value)

    def space(self) -> str:
        for modifier in self.modifiers:
            space = modifier.split("::")[0]
            if space in ("shared", "global", "local", "const", "param"):
                return space
        return "generic"

    def address(self, memory: Memory, space: str | None = None) -> str:
        """A void* to what the operand means."""
        if not isinstance(memory, Memory):
            raise PtxError()
        space = space or self.space()
        if space == "shared":
            return f"kf_ptx::shared({self.translator.read(memory.base, U32)}{memory.offset})"
        if space == "param":
            raise PtxError()
        return f"kf_ptx::generic({self.translator.read(memory.base, U64)}{memory.offset})"

    def pointer(self, index: int, space: str | None = None) -> str:
        return self.address(self.operands[index], space)

    def vector(self, index: int) -> list:
        operand = self.operands[index]
        return operand.parts if isinstance(operand, Vector) else [operand]

    def array(self, parts: list, kind: str) -> str:
        """A std::array of the operands' values."""
        values = ", ".join(self.translator.read(part, kind) for part in parts)
        return f"std::array<{kind}, {len(parts)}>{{{{{values}}}}}"

    def results(self, index: int, value: str) -> str:
        """Gives the operands of a vector the elements of a std::array."""
        parts = self.vector(index)
        if len(parts) == 1:
            return self.translator.write(parts[0], f"({value})[0]")
        text = f"const auto kf_result = {value}; "
        return text + " ".join(self.translator.write(part, f"kf_result[{i}]") for i, part in enumerate(parts))

    def is_half(self) -> bool:
        return self.kind in HALVES

    def half(self, operation: str, count: int, first: int = 1) -> str:
        """An operation on one or two float16 or bfloat16 values."""
        name, width = HALVES[self.kind]
        values = ", ".join(self.read(first + i) for i in range(count))
        return f"kf_ptx::half_op<kf_ptx::{name}, {width}>(kf_ptx::{operation}(), {values})"

    # Integers and floating point

    def arithmetic(self, operation: str, count: int, half: str | None = None) -> str:
        self.only("rn", "ftz", "sat", "lo", "relu", "approx", "full", "NaN", "wrap", "noftz", "xorsign", "oob")
        if self.has("xorsign", "oob", "NaN") and not (self.has("NaN") and self.name in ("min", "max")):
            raise PtxError()
        if self.is_half():
            text = self.half(half or operation, count)
            if self.has("relu", "sat", "NaN"):
                raise PtxError()
            return self.write(text)
        values = ", ".join(self.read(1 + i) for i in range(count))
        ftz = self.has("ftz") and self.kind == "f32"
        if ftz:
            values = ", ".join(f"kf_ptx::flush({self.read(1 + i)})" for i in range(count))
        text = f"kf_ptx::{operation}()({values})"
        if self.has("sat"):
            if self.kind == "s32" and self.name in ("add", "sub"):
                text = f"kf_ptx::{operation}Saturated()({values})"
            elif self.kind == "f32":
                text = f"kf_ptx::__saturatef({text})"
            else:
                raise PtxError()
        if self.has("NaN"):
            text = f"kf_ptx::{operation}Nan()({values})"
        return self.write(f"kf_ptx::flush({text})" if ftz else text)

    def do_add(self) -> str:
        if self.has("cc"):
            raise PtxError()
        return self.arithmetic("Add", 2)

    def do_sub(self) -> str:
        if self.has("cc"):
            raise PtxError()
        return self.arithmetic("Sub", 2)

    def do_mul(self) -> str:
        if self.has("hi", "wide"):
            self.only("hi", "wide")
            name = "mul_hi" if self.has("hi") else "mul_wide"
            return self.write(f"kf_ptx::{name}({self.read(1)}, {self.read(2)})")
        return self.arithmetic("Mul", 2)

    def do_mul24(self) -> str:
        self.only("lo")
        return self.write(f"kf_ptx::mul24({self.read(1)}, {self.read(2)})")

    def do_mad(self) -> str:
        if self.kind in ("f32", "f64"):
            return self.do_fma()
        self.only("lo", "hi", "wide")
        if self.has("wide"):
            wide = {U16: U32, S16: S32, U32: U64, S32: S64}[self.type]
            return self.write(f"kf_ptx::Add()(kf_ptx::mul_wide({self.read(1)}, {self.read(2)}), {self.read(3, wide)})")
        name = "kf_ptx::mul_hi" if self.has("hi") else "kf_ptx::Mul()"
        return self.write(f"kf_ptx::Add()({name}({self.read(1)}, {self.read(2)}), {self.read(3)})")

    def do_fma(self) -> str:
        if self.is_half() and self.has("relu"):
            self.only("rn", "ftz", "relu")
            return self.write(self.half("FmaRelu", 3))
        return self.arithmetic("Fma", 3)

    def do_div(self) -> str:
        return self.arithmetic("Div", 2)

    def do_rem(self) -> str:
        return self.arithmetic("Rem", 2)

    def do_min(self) -> str:
        return self.arithmetic("Min", 2)

    def do_max(self) -> str:
        return self.arithmetic("Max", 2)

    def do_abs(self) -> str:
        return self.arithmetic("Abs", 1)

    def do_neg(self) -> str:
        return self.arithmetic("Neg", 1)

    def do_rcp(self) -> str:
        return self.arithmetic("Rcp", 1)

    def do_sqrt(self) -> str:
        return self.arithmetic("Sqrt", 1)

    def do_rsqrt(self) -> str:
        return self.arithmetic("Rsqrt", 1)

    def do_ex2(self) -> str:
        return self.arithmetic("Exp2", 1)

    def do_lg2(self) -> str:
        return self.arithmetic("Log2", 1)

    def do_sin(self) -> str:
        return self.arithmetic("Sin", 1)

    def do_cos(self) -> str:
        return self.arithmetic("Cos", 1)

    def do_tanh(self) -> str:
        return self.arithmetic("Tanh", 1)

    def bits(self, text: str, count: int) -> str:
        self.only()
        return self.write(text.format(*(self.read(1 + i) for i in range(count))))

    def do_and(self) -> str:
        return self.bits("({0} & {1})", 2)

    def do_or(self) -> str:
        return self.bits("({0} | {1})", 2)

    def do_xor(self) -> str:
        return self.bits("({0} ^ {1})", 2)

    def do_not(self) -> str:
        return self.bits("!{0}" if self.kind == "pred" else "~{0}", 1)

    def do_cnot(self) -> str:
        return self.bits("static_cast<" + self.type + ">({0} == 0)", 1)

    def do_shl(self) -> str:
        self.only()
        return self.write(f"kf_ptx::shift_left({self.read(1)}, {self.read(2, U32)})")

    def do_shr(self) -> str:
        self.only()
        return self.write(f"kf_ptx::shift_right({self.read(1)}, {self.read(2, U32)})")

    def do_shf(self) -> str:
        self.only("l", "r", "wrap", "clamp")
        name = f"funnel_{'left' if self.has('l') else 'right'}"
        clamp = "true" if self.has("clamp") else "false"
        return self.write(f"kf_ptx::{name}({self.read(1)}, {self.read(2)}, {self.read(3)}, {clamp})")

    def do_popc(self) -> str:
        return self.bits("static_cast<std::uint32_t>(__builtin_popcountll({0}))", 1)

    def do_clz(self) -> str:
        return self.bits("kf_ptx::leading_zeros({0})", 1)

    def do_brev(self) -> str:
        return self.bits("kf_ptx::reversed({0})", 1)

    def do_bfind(self) -> str:
        self.only("shiftamt")
        amount = "true" if self.has("shiftamt") else "false"
        return self.write(f"kf_ptx::find_leading({self.read(1)}, {amount})")

    def do_bfe(self) -> str:
        self.only()
        return self.write(f"kf_ptx::extract_field({self.read(1)}, {self.read(2, U32)}, {self.read(3, U32)})")

    def do_bfi(self) -> str:
        self.only()
        fields = ", ".join([self.read(1), self.read(2), self.read(3, U32), self.read(4, U32)])
        return self.write(f"kf_ptx::insert_field({fields})")

    def do_prmt(self) -> str:
        self.only("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
        if len(self.modifiers) > 1:
            raise PtxError()
        return self.write(f"kf_ptx::permute_bytes({self.read(1, U32)}, {self.read(2, U32)}, {self.read(3, U32)})")

    def do_lop3(self) -> str:
        self.only()
        return self.write(f"kf_ptx::logic3({', '.join(self.read(i, U32) for i in (1, 2, 3, 4))})")

    def do_dp4a(self) -> str:
        a, b = self.modifiers[-2:]
        kind = S32 if "s32" in (a, b) else U32
        return self.write(
            f"kf_ptx::dot4<{TYPES[a]}, {TYPES[b]}>({self.read(1, U32)}, {self.read(2, U32)}, {self.read(3, kind)})"
        )

    def do_sad(self) -> str:
        return self.bits("(({0} < {1} ? {1} - {0} : {0} - {1}) + {2})", 3)

    # Moves, conversions, comparisons

    def do_mov(self) -> str:
        self.only()
        target, source = self.operands
        if isinstance(target, Vector):
            parts = len(target.parts)
            part = {16: U16, 32: U32, 8: U8}[int(self.kind[1:]) // parts]
            kind = TYPES["b" + self.kind[1:]]
            return self.results(0, f"kf_ptx::split<{part}, {parts}>({self.read(1, kind)})")
        if isinstance(source, Vector):
            part = {16: U16, 32: U32, 8: U8}[int(self.kind[1:]) // len(source.parts)]
            return self.write(f"kf_ptx::join<{TYPES['b' + self.kind[1:]]}>({self.array(source.parts, part)})")
        if isinstance(source, Register) and source.kind == "float" and self.kind in ("b32", "u32", "s32", "f32"):
            return self.write(source.text)
        return self.write(self.read(1))

    def do_cvt(self) -> str:
        if self.modifiers[-2] in HALVES and HALVES[self.modifiers[-2]][1] == 2 and self.kind == "f32":
            self.only("rn", "rz", "relu", "satfinite")
            if self.has("satfinite"):
                raise PtxError()
            name = HALVES[self.modifiers[-2]][0]
            options = f"{'true' if self.has('rz') else 'false'}, {'true' if self.has('relu') else 'false'}"
            return self.write(
                f"kf_ptx::pack_halves<kf_ptx::{name}>({self.read(1, 'float')}, {self.read(2, 'float')}, {options})"
            )
        if self.modifiers[-2] in ("e4m3x2", "e5m2x2") and self.kind == "f32":
            self.only("rn", "satfinite")
            name = self.modifiers[-2][:4].upper()
            return self.write(f"kf_ptx::pack_bytes<kf_ptx::{name}>({self.read(1, 'float')}, {self.read(2, 'float')})")
        if self.modifiers[-2] == "f16x2" and self.kind in ("e4m3x2", "e5m2x2"):
            self.only("rn")
            return self.write(f"kf_ptx::unpack_bytes<kf_ptx::{self.kind[:4].upper()}>({self.read(1, U16)})")
        if self.modifiers[-2] == "tf32":
            self.only("rn", "rna", "rz")
            way = "rna" if self.has("rna") else "rn" if self.has("rn") else "rz"
            return self.write(f"kf_ptx::to_tf32_{way}({self.read(1, 'float')})")
        self.only("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "pack")
        to, source = self.modifiers[-2:]
        ways = [m for m in self.modifiers if re.fullmatch(r"r[nzmp]i?", m)]
        way = {"n": "Near", "z": "Zero", "m": "Down", "p": "Up"}[ways[0][1]] if ways else "Near"
        if ways and not ways[0].endswith("i") and way != "Near":
            # Rounding a float in another direction than to the nearest.
            if not (way == "Zero" and to in ("f16", "bf16", "f32") and source in ("f32", "f64")):
                raise PtxError()
        names = {"f16": "kf_ptx::F16", "bf16": "kf_ptx::BF16"}
        to_name, source_name = (names.get(name, TYPES[name]) for name in (to, source))
        whole = "true" if ways and ways[0].endswith("i") else "false"
        value = (
            f"kf_ptx::convert<{to_name}, {source_name}>({self.read(1, TYPES[source])}, kf_ptx::Way::k{way}, {whole})"
        )
        if self.has("sat"):
            if to == "f32":
                value = f"kf_ptx::__saturatef({value})"
            elif to in names:
                raise PtxError()
            # To an integer every conversion saturates here, except between integers.
            elif source not in ("f16", "bf16", "f32", "f64"):
                value = f"kf_ptx::saturated<{TYPES[to]}>({self.read(1, TYPES[source])})"
        return self.write(value)

    def do_cvta(self) -> str:
        self.only("to", "shared", "global", "local", "const", "param", "shared::cta", "shared::cluster")
        if self.space() == "shared":
            if self.has("to"):
                value = f"kf_ptx::to_shared({self.read(1, U64)})"
            else:
                value = f"reinterpret_cast<std::uint64_t>(kf_ptx::shared({self.read(1, U32)}))"
            return self.write(f"static_cast<{self.type}>({value})")
        return self.write(self.read(1))

    def do_isspacep(self) -> str:
        self.only("shared", "global", "shared::cta", "shared::cluster", "local", "const")
        if self.modifiers[-1].split("::")[0] not in ("shared", "global"):
            raise PtxError()
        name = "is_shared" if self.has("shared", "shared::cta") else "is_cluster_shared"
        within = f"kf_ptx::{name}(kf_ptx::generic({self.read(1, U64)}))"
        return self.write(within if self.space() == "shared" else f"!{within}")

    def comparison(self, a: str, b: str) -> str:
        name = next(m for m in self.modifiers if m in COMPARISONS)
        operator, unordered = COMPARISONS[name]
        if self.is_half():
            if HALVES[self.kind][1] != 1:
                raise PtxError()
            a, b = (f"kf_ptx::{HALVES[self.kind][0]}::to_float({x})" for x in (a, b))
        floating = self.is_half() or self.kind in ("f32", "f64")
        if name in ("num", "nan"):
            return f"{'!' if name == 'num' else ''}(std::isnan({a}) || std::isnan({b}))"
        if not floating:
            return f"({a} {operator} {b})"
        return f"kf_ptx::compare_floats({a}, {b}, {a} {operator} {b}, {'true' if unordered else 'false'})"

    def do_setp(self) -> str:
        self.only("and", "or", "xor", "ftz", *COMPARISONS)
        text = f"const bool kf_test = {self.comparison(self.read(1), self.read(2))}; "
        first, second = "kf_test", "!kf_test"
        if len(self.operands) == 4:
            name = next(m for m in self.modifiers if m in ("and", "or", "xor"))
            other = self.read(3, "bool")
            first, second = (f"({x} {LOGIC[name]} {other})" for x in (first, second))
        target = self.operands[0]
        if not isinstance(target, Pair):
            return text + self.write(first)
        text += f"const bool kf_first = {first}, kf_second = {second}; "
        text += self.translator.write(target.first, "kf_first")
        return text + self.translator.write(target.second, "kf_second")

    def do_set(self) -> str:
        self.only("ftz", *COMPARISONS)
        to = self.modifiers[-2]
        result = self.comparison(self.read(1), self.read(2))
        yes = "1.0f" if to == "f32" else f"static_cast<{TYPES[to]}>(-1)"
        return self.write(f"({result} ? {yes} : static_cast<{TYPES[to]}>(0))")

    def do_selp(self) -> str:
        self.only()
        return self.write(f"({self.read(3, 'bool')} ? {self.read(1)} : {self.read(2)})")

    def do_trap(self) -> str:
        return 'kf_ptx::kernel_error("trap", kf_ptx::CallSite::here());'

    def do_brkpt(self) -> str:
        return ""

    # Memory

    def width(self) -> int:
        return next((int(m[1:]) for m in self.modifiers if m in ("v2", "v4", "v8")), 1)

    def order(self) -> str:
        if self.has("acquire"):
            return "kf_ptx::Order::kAcquire"
        if self.has("release"):
            return "kf_ptx::Order::kRelease"
        if self.has("acq_rel"):
            return "kf_ptx::Order::kBoth"
        return "kf_ptx::Order::kRelaxed"

    def access(self) -> str:
        """How a load or store is done: plainly, or as an atomic."""
        strong = self.has("volatile", "relaxed", "acquire", "release", "mmio")
        return self.order() if strong else "kf_ptx::Order::kPlain"

    def memory_modifiers(self) -> None:
        known = SCOPES | SPACES | CACHES | {"nc", "v2", "v4", "v8", "weak", "volatile", "relaxed", "acquire", "release"}
        self.only(*known, "mmio", *(m for m in self.modifiers if re.fullmatch(r"L[12]::\w+", m)))

    def do_ld(self) -> str:
        self.memory_modifiers()
        load = f"kf_ptx::load<{self.type}, {self.width()}>({self.pointer(1)}, {self.access()})"
        return self.results(0, load)

    def do_ldu(self) -> str:
        return self.do_ld()

    def do_st(self) -> str:
        if self.has("async"):
            self.only("async", "weak", "v2", "v4", "mbarrier::complete_tx::bytes", *SPACES)
            values = self.array(self.vector(1), self.type)
            return f"kf_ptx::store_async({self.pointer(0)}, {values}, {self.pointer(2)});"
        self.memory_modifiers()
        return f"kf_ptx::store({self.pointer(0)}, {self.array(self.vector(1), self.type)}, {self.access()});"

    def do_atom(self) -> str:
        reduction = self.name == "red"
        if reduction and self.has("async"):
            self.only("async", "relaxed", *SCOPES, *SPACES, *ATOMICS, "mbarrier::complete_tx::bytes")
            value = self.translator.read(self.operands[1], self.type)
            function = f"kf_ptx::async_reduce<kf_ptx::Atomic{self.operation()}, {self.type}>"
            return f"{function}({self.pointer(0)}, {value}, {self.pointer(2)});"
        known = SCOPES | SPACES | set(ATOMICS) | {"noftz", "relaxed", "acquire", "release", "acq_rel", "v2", "v4", "v8"}
        self.only(*known, *(m for m in self.modifiers if m.startswith("L2::")))
        at = 0 if reduction else 1
        kind = self.type
        if self.is_half():
            name, width = HALVES[self.kind]
            operation = f"kf_ptx::AtomicHalf<kf_ptx::{name}, {width}, kf_ptx::Atomic{self.operation()}>"
        else:
            operation = f"kf_ptx::Atomic{self.operation()}"
        values = self.vector(at + 1)
        if self.has("cas"):
            compare, value = self.read(at + 1), self.read(at + 2)
            call = f"kf_ptx::compare_and_swap<{kind}>({self.pointer(at)}, {compare}, {value}, {self.order()})"
            return call + ";" if reduction else self.write(call)
        array = self.array(values, kind)
        call = f"kf_ptx::atomic<{operation}, {kind}>({self.pointer(at)}, {array}, {self.order()})"
        return f"static_cast<void>({call});" if reduction else self.results(0, call)

    def operation(self) -> str:
        return ATOMICS[next(m for m in self.modifiers if m in ATOMICS)]

    def do_createpolicy(self) -> str:
        return self.write("std::uint64_t{0}")  # what a cache keeps has no meaning here

    def do_fence(self) -> str:
        return "kf_ptx::__threadfence();"  # fence.proxy and fence.mbarrier_init are among NOTHING_PREFIXES

    def do_nanosleep(self) -> str:
        return f"kf_ptx::__nanosleep({self.read(0, U32)});"

    def do_mapa(self) -> str:
        self.only("shared::cluster")
        rank = self.read(2, U32)
        if self.space() == "shared":
            return self.write(f"kf_ptx::map_shared_rank({self.read(1, U32)}, {rank})")
        mapped = f"kf_ptx::map_shared_rank(kf_ptx::generic({self.read(1, U64)}), {rank})"
        return self.write(f"reinterpret_cast<std::uint64_t>({mapped})")

    def do_getctarank(self) -> str:
        self.only("shared::cluster")
        if self.space() == "shared":
            return self.write(f"kf_ptx::rank_of({self.read(1, U32)})")
        return self.write(f"kf_ptx::rank_of(kf_ptx::to_shared({self.read(1, U64)}))")

    # Warps and barriers

    def do_shfl(self) -> str:
        self.only("sync", "up", "down", "bfly", "idx")
        if not self.has("sync"):
            raise PtxError("it has no `.sync`")
        mode = {"up": "Up", "down": "Down", "bfly": "Xor", "idx": "Index"}[self.modifiers[1]]
        arguments = ", ".join(self.read(i, U32) for i in (1, 2, 3, 4))
        text = f"const auto kf_result = kf_ptx::shuffle_lanes(kf_ptx::Shuffle::k{mode}, {arguments}); "
        target = self.operands[0]
        if isinstance(target, Pair):
            first = self.translator.write(target.first, "kf_result.value")
            return text + first + self.translator.write(target.second, "kf_result.inside")
        return text + self.write("kf_result.value")

    def do_vote(self) -> str:
        self.only("sync", "all", "any", "uni", "ballot")
        name = {
            "all": "kf_ptx::__all_sync",
            "any": "kf_ptx::__any_sync",
            "uni": "kf_ptx::__uni_sync",
            "ballot": "kf_ptx::__ballot_sync",
        }[self.modifiers[1]]
        call = f"{name}({self.read(2, U32)}, {self.read(1, 'bool')})"
        return self.write(call if self.has("ballot") else f"({call} != 0)")

    def do_match(self) -> str:
        self.only("sync", "any", "all")
        value, mask = self.read(1), self.read(2, U32)
        if self.has("any"):
            return self.write(f"kf_ptx::__match_any_sync({mask}, {value})")
        text = f"int kf_all = 0; const unsigned kf_same = kf_ptx::__match_all_sync({mask}, {value}, &kf_all); "
        target = self.operands[0]
        if isinstance(target, Pair):
            first = self.translator.write(target.first, "kf_same")
            return text + first + self.translator.write(target.second, "(kf_all != 0)")
        return text + self.write("kf_same")

    def do_redux(self) -> str:
        self.only("sync", "add", "min", "max", "and", "or", "xor")
        kind = S32 if self.kind == "s32" else U32
        return self.write(f"kf_ptx::__reduce_{self.modifiers[1]}_sync({self.read(2, U32)}, {self.read(1, kind)})")

    def do_activemask(self) -> str:
        return self.write("kf_ptx::__activemask()")

    def do_elect(self) -> str:
        self.only("sync")
        text = f"const unsigned kf_lane = kf_ptx::elected({self.read(1, U32)}); "
        target = self.operands[0]
        if not isinstance(target, Pair):
            return text + self.write("kf_lane")
        first = self.translator.write(target.first, "kf_lane")
        return text + first + self.translator.write(target.second, "(kf_lane == kf_ptx::kf_lane_id())")

    def do_bar(self) -> str:
        self.only("sync", "arrive", "wait", "red", "warp", "aligned", "cta", "popc", "and", "or", "cluster", *SEMANTICS)
        if self.has("cluster"):
            return f"kf_ptx::cluster_{'arrive' if self.has('arrive') else 'wait'}(kf_ptx::CallSite::here());"
        if self.has("warp"):
            return f"kf_ptx::__syncwarp({self.read(0, U32)});"
        if self.has("red"):
            vote = "kCount" if self.has("popc") else "kAnd" if self.has("and") else "kOr"
            if self.read(1, U32) != "static_cast<std::uint32_t>(0LL)" or len(self.operands) != 3:
                raise PtxError("only barrier 0 of all threads can reduce")
            predicate = self.translator.read(self.operands[2], "bool")
            value = f"kf_ptx::block_barrier(kf_ptx::BarrierVote::{vote}, {predicate}, kf_ptx::CallSite::here())"
            return self.write(value if self.has("popc") else f"({value} != 0)")
        threads = self.read(1, U32) if len(self.operands) > 1 else "0u"
        wait = "false" if self.has("arrive") else "true"
        return f"kf_ptx::barrier({self.read(0, U32)}, {threads}, {wait});"

    # Matrices

    def do_mma(self) -> str:
        self.only("sync", "aligned", "row", "col", "satfinite", "e4m3", "e5m2", *MMA_SHAPES)
        shape = next(m for m in self.modifiers if m in MMA_SHAPES)
        after = self.modifiers[self.modifiers.index("col") + 1 :]
        if after[0] == "satfinite":
            raise PtxError()
        d, a, b, c = after
        names = MMA_TYPES
        if d != c or (shape, d, a) not in MMA or (a != b and not (a[0] == b[0] == "e" or {a, b} == {"s8", "u8"})):
            raise PtxError()
        k = int(shape[shape.index("k") + 1 :])
        register = {"f32": "float", "s32": S32, "f16": U32, "f64": "double"}[d]
        piece = "double" if a == "f64" else U32
        function = f"kf_ptx::mma<kf_ptx::{names[d]}, kf_ptx::{names[a]}, kf_ptx::{names[b]}, {k}>"
        operands = ", ".join(
            [self.array(self.vector(1), piece), self.array(self.vector(2), piece), self.array(self.vector(3), register)]
        )
        return self.results(0, f"{function}({operands})")

    def matrices(self) -> int:
        self.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *SPACES)
        if not self.has("b16"):
            raise PtxError()
        return next(int(m[1:]) for m in self.modifiers if m in ("x1", "x2", "x4"))

    def do_ldmatrix(self) -> str:
        count = self.matrices()
        trans = "true" if self.has("trans") else "false"
        return self.results(0, f"kf_ptx::load_matrix<{count}, {trans}>({self.pointer(1)})")

    def do_stmatrix(self) -> str:
        count = self.matrices()
        trans = "true" if self.has("trans") else "false"
        return f"kf_ptx::store_matrix<{count}, {trans}>({self.pointer(0)}, {self.array(self.vector(1), U32)});"

    def do_movmatrix(self) -> str:
        self.only("sync", "aligned", "m8n8", "trans", "b16")
        return self.write(f"kf_ptx::move_matrix({self.read(1, U32)})")

    def do_wgmma(self) -> str:
        if self.modifiers[0] == "commit_group":
            return "kf_ptx::warpgroup_commit();"
        if self.modifiers[0] == "wait_group":
            return f"kf_ptx::warpgroup_wait({self.read(0, U32)});"
        match = next(filter(None, (re.fullmatch(r"m64n(\d+)k(\d+)", m) for m in self.modifiers)))
        self.only("mma_async", "sync", "aligned", match[0], "e4m3", "e5m2")
        d, a, b = self.modifiers[-3:]
        n, k = int(match[1]), int(match[2])
        sizes = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
        if a not in sizes or k != sizes[a] or n % 8 != 0 or not 8 <= n <= 256 or d not in ("f32", "f16"):
            raise PtxError()
        if (a != b and not (a[0] == b[0] == "e")) or (d == "f16" and a in ("bf16", "tf32")):
            raise PtxError()
        registers = isinstance(self.operands[1], Vector)
        rest = self.operands[3:]
        flags = [self.translator.read(rest[0], "bool")]
        flags += [self.translator.read(operand, "int") for operand in rest[1:]]
        expected = 3 if sizes[a] != 16 else 4 if registers else 5
        if len(flags) != expected:
            raise PtxError(f"it has {len(flags)} flags instead of {expected}")
        if sizes[a] != 16:
            flags += ["0", "0"]
        elif registers:
            flags.insert(3, "0")  # registers have no major
        register = "float" if d == "f32" else U32
        count = n // 2 if d == "f32" else n // 4
        if len(self.vector(0)) != count:
            raise PtxError(f"it has {len(self.vector(0))} accumulators instead of {count}")
        left = self.array(self.vector(1), U32) if registers else self.read(1, U64)
        names = MMA_TYPES
        function = f"kf_ptx::warpgroup_mma<kf_ptx::{names[d]}, kf_ptx::{names[a]}, kf_ptx::{names[b]}, {n}>"
        accumulators = self.array(self.vector(0), register)
        return self.results(0, f"{function}({accumulators}, {left}, {self.read(2, U64)}, {', '.join(flags)})")

    # Asynchronous copies

    def do_cp(self) -> str:
        name = ".".join(self.modifiers)
        if name.startswith(("async.bulk", "reduce.async.bulk")):
            return self.bulk(name)
        if name.startswith("async.mbarrier.arrive"):
            self.only("async", "mbarrier", "arrive", "noinc", *SPACES)
            counted = "false" if self.has("noinc") else "true"
            return f"kf_ptx::copies_arrive({self.pointer(0)}, {counted});"
        if name == "async.commit_group":
            return "kf_ptx::commit_copies();"
        if name == "async.wait_group":
            return f"kf_ptx::wait_copies({self.read(0, U32)});"
        if name == "async.wait_all":
            return "kf_ptx::wait_all_copies();"
        self.only("async", "ca", "cg", *SPACES, *(m for m in self.modifiers if m.startswith("L2::")))
        size = self.read(2, U32)
        given = len(self.operands) - (1 if self.has("L2::cache_hint") else 0)
        source_size = size
        if given > 3:
            fourth = self.operands[3]
            predicate = isinstance(fourth, Negated) or (isinstance(fourth, Register) and fourth.kind == "bool")
            source_size = f"({self.read(3, 'bool')} ? 0u : {size})" if predicate else self.read(3, U32)
        cached = "true" if self.has("ca") else "false"
        to, source = self.pointer(0, "shared"), self.pointer(1, "global")
        return f"kf_ptx::copy_async({to}, {source}, {size}, {source_size}, {cached});"

    def bulk(self, name: str) -> str:
        if name == "async.bulk.commit_group":
            return "kf_ptx::commit_bulk();"
        if name.startswith("async.bulk.wait_group"):
            self.only("async", "bulk", "wait_group", "read")
            return f"kf_ptx::wait_bulk({self.read(0, U32)});"
        known = {"async", "reduce", "bulk", "tensor", "tile", "bulk_group", "mbarrier::complete_tx::bytes", "noftz"}
        known |= {"multicast::cluster", "L2::cache_hint", *SPACES, *ATOMICS, *(f"{n}d" for n in range(1, 6))}
        self.only(*known)
        spaces = [m.split("::")[0] for m in self.modifiers if m in SPACES]
        if len(spaces) != 2:
            raise PtxError()
        operands = list(self.operands)
        if self.has("L2::cache_hint"):
            operands.pop()
        to, source = spaces
        tensor = self.has("tensor")
        operation = f"kf_ptx::Reduction::k{self.operation()}" if self.has("reduce") else "kf_ptx::Reduction::kNone"
        if tensor:
            rank = next(int(m[0]) for m in self.modifiers if re.fullmatch(r"[1-5]d", m))
            mapped = operands[1] if source == "global" else operands[0]
            if len(mapped.coordinates) != rank:
                raise PtxError(f"it has {len(mapped.coordinates)} coordinates instead of {rank}")
            table = f"{self.address(mapped, 'generic')}, {self.array(mapped.coordinates, S32)}"
        if source == "global":
            shared, barrier = self.address(operands[0], "shared"), operands[2 if tensor else 3]
            mask = "kf_ptx::kOwnBlock"
            if self.has("multicast::cluster"):
                mask = self.translator.read(operands[3 if tensor else 4], U16)
            arrival = self.address(barrier, "shared")
            if tensor:
                return f"kf_ptx::load_tensor({shared}, {table}, {arrival}, {mask});"
            from_, size = self.address(operands[1], "global"), self.translator.read(operands[2], U32)
            return f"kf_ptx::load_bulk({shared}, {from_}, {size}, {arrival}, {mask});"
        if to == "shared":
            size = self.translator.read(operands[2], U32)
            shared, from_ = self.address(operands[0], "shared"), self.address(operands[1], "shared")
            if self.has("reduce"):
                raise PtxError()
            arrival = self.address(operands[3], "shared")
            return f"kf_ptx::load_bulk({shared}, {from_}, {size}, {arrival}, kf_ptx::kOwnBlock);"
        shared = self.address(operands[1], "shared")
        if tensor:
            return f"kf_ptx::store_tensor({table}, {shared}, {operation});"
        if self.has("reduce"):
            element = f"kf_ptx::Element::k{ELEMENTS[self.kind]}"
        else:
            element = "kf_ptx::Element::kByte"
        size = self.translator.read(operands[2], U32)
        return f"kf_ptx::store_bulk({self.address(operands[0], 'global')}, {shared}, {size}, {operation}, {element});"

    def do_mbarrier(self) -> str:
        what = self.modifiers[0]
        known = {
            "init",
            "inval",
            "arrive",
            "arrive_drop",
            "expect_tx",
            "complete_tx",
            "test_wait",
            "try_wait",
            "parity",
        }
        self.only(*known, "pending_count", "noComplete", *SEMANTICS, *SCOPES, *SPACES)
        if what == "pending_count":
            return self.write(f"kf_ptx::barrier_pending({self.read(1, U64)})")
        if what == "init":
            return f"kf_ptx::barrier_init({self.pointer(0)}, {self.read(1, U32)});"
        if what == "inval":
            return f"kf_ptx::barrier_invalidate({self.pointer(0)});"
        if what in ("expect_tx", "complete_tx"):
            return f"kf_ptx::barrier_{what}({self.pointer(0)}, {self.read(1, U32)});"
        if what in ("arrive", "arrive_drop"):
            expects = self.has("expect_tx")
            result = None if isinstance(self.operands[0], Memory) else self.operands[0]
            operands = self.operands[0 if result is None else 1 :]
            value = self.translator.read(operands[1], U32) if len(operands) > 1 else ("" if expects else "1u")
            count, bytes_ = ("1u", value) if expects else (value, "0u")
            drop = "true" if what == "arrive_drop" else "false"
            call = f"kf_ptx::barrier_arrive({self.address(operands[0])}, {count}, {bytes_}, {drop})"
            return f"static_cast<void>({call});" if result is None else self.translator.write(result, call)
        wait = "test" if what == "test_wait" else "try"
        if self.has("parity"):
            return self.write(f"kf_ptx::barrier_{wait}_parity({self.pointer(1)}, {self.read(2, U32)})")
        return self.write(f"kf_ptx::barrier_{wait}({self.pointer(1)}, {self.read(2, U64)})")


SCOPES = {"cta", "cluster", "gpu", "sys"}
SPACES = {"shared", "shared::cta", "shared::cluster", "global", "local", "const", "param"}
CACHES = {"ca", "cg", "cs", "lu", "cv", "wb", "wt"}
SEMANTICS = {"relaxed", "acquire", "release"}
ATOMICS = {
    "add": "Add",
    "min": "Min",
    "max": "Max",
    "and": "And",
    "or": "Or",
    "xor": "Xor",
    "exch": "Exchange",
    "inc": "Increment",
    "dec": "Decrement",
    "cas": "",
}
ELEMENTS = {
    "u32": "Unsigned32",
    "s32": "Signed32",
    "b32": "Unsigned32",
    "u64": "Unsigned64",
    "s64": "Signed64",
    "b64": "Unsigned64",
    "f32": "Float32",
    "f64": "Float64",
    "f16": "Float16",
    "bf16": "Bfloat16",
}
LOGIC = {"and": "&&", "or": "||", "xor": "!="}
COMPARISONS = {
    "eq": ("==", False),
    "ne": ("!=", False),
    "lt": ("<", False),
    "le": ("<=", False),
    "gt": (">", False),
    "ge": (">=", False),
    "lo": ("<", False),
    "ls": ("<=", False),
    "hi": (">", False),
    "hs": (">=", False),
    "equ": ("==", True),
    "neu": ("!=", True),
    "ltu": ("<", True),
    "leu": ("<=", True),
    "gtu": (">", True),
    "geu": (">=", True),
    "num": ("", False),
    "nan": ("", False),
}
MMA_TYPES = {
    "f16": "F16",
    "bf16": "BF16",
    "tf32": "TF32",
    "f32": "F32",
    "f64": "F64",
    "s8": "S8",
    "u8": "U8",
    "s32": "I32",
    "e4m3": "E4M3",
    "e5m2": "E5M2",
}
MMA = {
    *((f"m16n8k{k}", d, "f16") for k in (8, 16) for d in ("f16", "f32")),
    *((f"m16n8k{k}", "f32", "bf16") for k in (8, 16)),
    *((f"m16n8k{k}", "f32", "tf32") for k in (4, 8)),
    *((f"m16n8k{k}", "s32", a) for k in (16, 32) for a in ("s8", "u8")),
    *(("m16n8k32", "f32", a) for a in ("e4m3", "e5m2")),
    ("m8n8k4", "f64", "f64"),
}
MMA_SHAPES = {shape for shape, _, _ in MMA}
ALIASES = {"barrier": "bar", "red": "atom", "membar": "fence"}
# Instructions that change nothing that can be seen: hints, and the order between two ways to the same memory.
NOTHING = {"prefetch", "prefetchu", "applypriority", "setmaxnreg", "griddepcontrol", "pmevent"}
NOTHING_PREFIXES = (
    "fence.proxy",
    "fence.mbarrier_init",
    "cp.async.bulk.prefetch",
    "wgmma.fence",
)


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
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.text, 0) if token.kind == "op" else 0
        pieces += [(piece, line) for piece in (expanded(token, macros) if depth == 0 else [token])]
    for token, line in pieces:
        if token.kind == "op" and token.text in "([{":
            depth += 1
        elif token.kind == "op" and token.text in ")]}":
            depth -= 1
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
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(tokens[j].text, 0)
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
