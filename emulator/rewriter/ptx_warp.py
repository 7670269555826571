"""Instructions of PTX that threads carry out together: in a warp, at a barrier, in a matrix product."""

from __future__ import annotations

import re

from .ptx_instruction import S32, SEMANTICS, SPACES, U32, U64, Instruction, PtxError, Vector, literal, value_of

MMA_TYPES = {
    **{name: name.upper() for name in ("f16", "bf16", "tf32", "f32", "f64", "s8", "u8", "e4m3", "e5m2")},
    "s32": "I32",
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


class Warp(Instruction):
    """Its methods named do_… write the instruction of that name."""

    def do_shfl(self) -> str:
        self.only("sync", "up", "down", "bfly", "idx")
        if not self.has("sync"):
            raise PtxError("it has no `.sync`")
        mode = {"up": "Up", "down": "Down", "bfly": "Xor", "idx": "Index"}[self.modifiers[1]]
        arguments = ", ".join(self.read(i, U32) for i in (1, 2, 3, 4))
        text = f"const auto kf_result = kf_ptx::shuffle_lanes(kf_ptx::Shuffle::k{mode}, {arguments}); "
        return text + self.both("kf_result.value", "kf_result.inside")

    def do_vote(self) -> str:
        self.only("sync", "all", "any", "uni", "ballot")
        name = {name: name for name in ("all", "any", "uni", "ballot")}[self.modifiers[1]]
        call = f"kf_ptx::__{name}_sync({self.read(2, U32)}, {self.read(1, 'bool')})"
        return self.write(call if self.has("ballot") else f"({call} != 0)")

    def do_match(self) -> str:
        self.only("sync", "any", "all")
        value, mask = self.read(1), self.read(2, U32)
        if self.has("any"):
            return self.write(f"kf_ptx::__match_any_sync({mask}, {value})")
        text = f"int kf_all = 0; const unsigned kf_same = kf_ptx::__match_all_sync({mask}, {value}, &kf_all); "
        return text + self.both("kf_same", "(kf_all != 0)")

    def do_redux(self) -> str:
        self.only("sync", "add", "min", "max", "and", "or", "xor")
        kind = S32 if self.kind == "s32" else U32
        return self.write(f"kf_ptx::__reduce_{self.modifiers[1]}_sync({self.read(2, U32)}, {self.read(1, kind)})")

    def do_activemask(self) -> str:
        return self.write("kf_ptx::__activemask()")

    def do_elect(self) -> str:
        self.only("sync")
        text = f"const unsigned kf_lane = kf_ptx::elected({self.read(1, U32)}); "
        return text + self.both("kf_lane", "(kf_lane == kf_ptx::kf_lane_id())")

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
            predicate = value_of(self.operands[2], "bool")
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
        operands = ", ".join(self.array(self.vector(i), kind) for i, kind in ((1, piece), (2, piece), (3, register)))
        return self.results(0, f"{function}({operands})")

    def matrices(self) -> int:
        self.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16", *SPACES)
        if not self.has("b16"):
            raise PtxError()
        return next(int(m[1:]) for m in self.modifiers if m in ("x1", "x2", "x4"))

    def do_ldmatrix(self) -> str:
        count = self.matrices()
        trans = literal(self.has("trans"))
        return self.results(0, f"kf_ptx::load_matrix<{count}, {trans}>({self.pointer(1)})")

    def do_stmatrix(self) -> str:
        count = self.matrices()
        trans = literal(self.has("trans"))
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
        flags = [value_of(rest[0], "bool")]
        flags += [value_of(operand, "int") for operand in rest[1:]]
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
