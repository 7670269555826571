"""An instruction of PTX: its operands, the types that its name gives them, and what its C++ is made of."""

from __future__ import annotations

from dataclasses import dataclass


class PtxError(Exception):
    """What is not understood; without words, the whole instruction."""


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
    "b128": "kf_ptx::Bits128",
    **{f"{letter}{bits}": f"std::uint{bits}_t" for letter in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"std::int{bits}_t" for bits in (8, 16, 32, 64)},
    "f32": "float",
    "f64": "double",
    **dict.fromkeys(("f16", "bf16", "e4m3x2", "e5m2x2"), U16),
    **dict.fromkeys(("f16x2", "bf16x2", "tf32"), U32),
}
HALVES = {"f16": ("F16", 1), "bf16": ("BF16", 1), "f16x2": ("F16", 2), "bf16x2": ("BF16", 2)}
SCOPES = {"cta", "cluster", "gpu", "sys"}
SPACES = {"shared", "shared::cta", "shared::cluster", "global", "local", "const", "param"}
SEMANTICS = {"relaxed", "acquire", "release"}
ALIASES = {"barrier": "bar", "red": "atom", "membar": "fence"}
# Instructions that change nothing that can be seen: hints, and the order between two ways to the same memory.
NOTHING = {"prefetch", "prefetchu", "applypriority", "setmaxnreg", "griddepcontrol", "pmevent"}
NOTHING_PREFIXES = ("fence.proxy", "fence.mbarrier_init", "cp.async.bulk.prefetch", "wgmma.fence")


def value_of(operand, kind: str) -> str:
    """The operand as a value of the C++ type `kind`."""
    if isinstance(operand, Negated):
        return f"!{value_of(operand.of, 'bool')}"
    if isinstance(operand, Pair) or not isinstance(operand, Register):
        raise PtxError()
    if operand.kind == "constant":
        return f"static_cast<{kind}>({operand.text})"
    if operand.kind == kind:
        return operand.text
    return f"kf_ptx::as<{kind}>({operand.text})"


def assign(operand, value: str) -> str:
    """A statement that gives the operand this value."""
    if isinstance(operand, Sink):
        return f"static_cast<void>({value});"
    if not isinstance(operand, Register) or not operand.writable:
        raise PtxError("its result has no place to go")
    return f"kf_ptx::output({operand.text}, {value});"


def literal(flag: bool) -> str:
    return "true" if flag else "false"


class Instruction:
    """One instruction: the parts of its name, and its operands."""

    def __init__(self, parts: list[str], operands: list):
        self.name = parts[0]
        self.parts = parts
        self.modifiers = parts[1:]
        self.operands = operands

    def translate(self) -> str:
        if self.name in NOTHING or ".".join(self.parts).startswith(NOTHING_PREFIXES):
            return ""
        handler = getattr(self, f"do_{ALIASES.get(self.name, self.name)}", None)
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
        return value_of(self.operands[index], kind or self.type)

    def write(self, value: str, index: int = 0) -> str:
        return assign(self.operands[index], value)

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
            return f"kf_ptx::shared({value_of(memory.base, U32)}{memory.offset})"
        if space == "param":
            raise PtxError()
        return f"kf_ptx::generic({value_of(memory.base, U64)}{memory.offset})"

    def pointer(self, index: int, space: str | None = None) -> str:
        return self.address(self.operands[index], space)

    def vector(self, index: int) -> list:
        operand = self.operands[index]
        return operand.parts if isinstance(operand, Vector) else [operand]

    def array(self, parts: list, kind: str) -> str:
        """A std::array of the operands' values."""
        values = ", ".join(value_of(part, kind) for part in parts)
        return f"std::array<{kind}, {len(parts)}>{{{{{values}}}}}"

    def results(self, index: int, value: str) -> str:
        """Gives the operands of a vector the elements of a std::array."""
        parts = self.vector(index)
        if len(parts) == 1:
            return assign(parts[0], f"({value})[0]")
        text = f"const auto kf_result = {value}; "
        return text + " ".join(assign(part, f"kf_result[{i}]") for i, part in enumerate(parts))

    def is_half(self) -> bool:
        return self.kind in HALVES

    def half(self, operation: str, count: int, first: int = 1) -> str:
        """An operation on one or two float16 or bfloat16 values."""
        name, width = HALVES[self.kind]
        values = ", ".join(self.read(first + i) for i in range(count))
        return f"kf_ptx::half_op<kf_ptx::{name}, {width}>(kf_ptx::{operation}(), {values})"

    def both(self, first: str, second: str) -> str:
        """Gives `d|p` both values, and `d` alone the first."""
        target = self.operands[0]
        if not isinstance(target, Pair):
            return assign(target, first)
        return assign(target.first, first) + assign(target.second, second)
