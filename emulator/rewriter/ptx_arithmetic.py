"""Instructions of PTX that compute: numbers, bits, conversions, comparisons."""

from __future__ import annotations

import re
from functools import partialmethod

from .ptx_instruction import HALVES, S32, TYPES, U16, U32, U64, Instruction, Pair, PtxError, Register, Vector, literal

LOGIC = {"and": "&&", "or": "||", "xor": "!="}
SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARISONS = {  # the operator, and whether NaN makes it true
    **{name: (sign, False) for name, sign in SIGNS.items()},
    **{f"{name}u": (sign, True) for name, sign in SIGNS.items()},
    **{name: (sign, False) for name, sign in (("lo", "<"), ("ls", "<="), ("hi", ">"), ("hs", ">="))},
    **dict.fromkeys(("num", "nan"), ("", False)),
}


class Arithmetic(Instruction):
    """Its methods named do_… write the instruction of that name."""

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

    do_add = partialmethod(arithmetic, "Add", 2)
    do_sub = partialmethod(arithmetic, "Sub", 2)

    def do_mul(self) -> str:
        if self.has("hi", "wide"):
            self.only("hi", "wide")
            name = "mul_hi" if self.has("hi") else "mul_wide"
            return self.write(f"kf_ptx::{name}({self.read(1)}, {self.read(2)})")
        return self.arithmetic("Mul", 2)

    def do_mul24(self) -> str:
        self.only("lo")
        name = "__mul24" if self.kind == "s32" else "__umul24"
        return self.write(f"kf_ptx::{name}({self.read(1)}, {self.read(2)})")

    def do_mad(self) -> str:
        if self.kind in ("f32", "f64"):
            return self.do_fma()
        self.only("lo", "hi", "wide")
        if self.has("wide"):
            wide = TYPES[f"{self.kind[0]}{2 * int(self.kind[1:])}"]
            return self.write(f"kf_ptx::Add()(kf_ptx::mul_wide({self.read(1)}, {self.read(2)}), {self.read(3, wide)})")
        name = "kf_ptx::mul_hi" if self.has("hi") else "kf_ptx::Mul()"
        return self.write(f"kf_ptx::Add()({name}({self.read(1)}, {self.read(2)}), {self.read(3)})")

    def do_fma(self) -> str:
        if self.is_half() and self.has("relu"):
            self.only("rn", "ftz", "relu")
            return self.write(self.half("FmaRelu", 3))
        return self.arithmetic("Fma", 3)

    do_div = partialmethod(arithmetic, "Div", 2)
    do_rem = partialmethod(arithmetic, "Rem", 2)
    do_min = partialmethod(arithmetic, "Min", 2)
    do_max = partialmethod(arithmetic, "Max", 2)
    do_abs = partialmethod(arithmetic, "Abs", 1)
    do_neg = partialmethod(arithmetic, "Neg", 1)
    do_rcp = partialmethod(arithmetic, "Rcp", 1)
    do_sqrt = partialmethod(arithmetic, "Sqrt", 1)
    do_rsqrt = partialmethod(arithmetic, "Rsqrt", 1)
    do_ex2 = partialmethod(arithmetic, "Exp2", 1)
    do_lg2 = partialmethod(arithmetic, "Log2", 1)
    do_sin = partialmethod(arithmetic, "Sin", 1)
    do_cos = partialmethod(arithmetic, "Cos", 1)
    do_tanh = partialmethod(arithmetic, "Tanh", 1)

    def bits(self, text: str, count: int) -> str:
        self.only()
        return self.write(text.format(*(self.read(1 + i) for i in range(count))))

    do_and = partialmethod(bits, "({0} & {1})", 2)
    do_or = partialmethod(bits, "({0} | {1})", 2)
    do_xor = partialmethod(bits, "({0} ^ {1})", 2)

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
        name = f"__funnelshift_{'l' if self.has('l') else 'r'}{'c' if self.has('clamp') else ''}"
        return self.write(f"kf_ptx::{name}({self.read(1)}, {self.read(2)}, {self.read(3)})")

    do_popc = partialmethod(bits, "static_cast<std::uint32_t>(__builtin_popcountll({0}))", 1)
    do_clz = partialmethod(bits, "kf_ptx::leading_zeros({0})", 1)

    def do_brev(self) -> str:
        return self.bits("kf_ptx::__brevll({0})" if self.kind == "b64" else "kf_ptx::__brev({0})", 1)

    def do_bfind(self) -> str:
        self.only("shiftamt")
        amount = literal(self.has("shiftamt"))
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
        return self.write(f"kf_ptx::__byte_perm({self.read(1, U32)}, {self.read(2, U32)}, {self.read(3, U32)})")

    def do_lop3(self) -> str:
        self.only()
        return self.write(f"kf_ptx::logic3({', '.join(self.read(i, U32) for i in (1, 2, 3, 4))})")

    def do_dp4a(self) -> str:
        a, b = self.modifiers[-2:]
        kind = S32 if "s32" in (a, b) else U32
        return self.write(
            f"kf_ptx::dot4<{TYPES[a]}, {TYPES[b]}>({self.read(1, U32)}, {self.read(2, U32)}, {self.read(3, kind)})"
        )

    do_sad = partialmethod(bits, "(({0} < {1} ? {1} - {0} : {0} - {1}) + {2})", 3)

    # Moves, conversions, comparisons

    def do_mov(self) -> str:
        self.only()
        target, source = self.operands
        if isinstance(target, Vector):
            parts = len(target.parts)
            part = TYPES[f"u{int(self.kind[1:]) // parts}"]
            kind = TYPES["b" + self.kind[1:]]
            return self.results(0, f"kf_ptx::split<{part}, {parts}>({self.read(1, kind)})")
        if isinstance(source, Vector):
            part = TYPES[f"u{int(self.kind[1:]) // len(source.parts)}"]
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
            options = f"{literal(self.has('rz'))}, {literal(self.has('relu'))}"
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
        whole = literal(bool(ways) and ways[0].endswith("i"))
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
        return f"kf_ptx::compare_floats({a}, {b}, {a} {operator} {b}, {literal(unordered)})"

    def do_setp(self) -> str:
        self.only("and", "or", "xor", "ftz", *COMPARISONS)
        text = f"const bool kf_test = {self.comparison(self.read(1), self.read(2))}; "
        first, second = "kf_test", "!kf_test"
        if len(self.operands) == 4:
            name = next(m for m in self.modifiers if m in ("and", "or", "xor"))
            other = self.read(3, "bool")
            first, second = (f"({x} {LOGIC[name]} {other})" for x in (first, second))
        if not isinstance(self.operands[0], Pair):
            return text + self.write(first)
        text += f"const bool kf_first = {first}, kf_second = {second}; "
        return text + self.both("kf_first", "kf_second")

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
