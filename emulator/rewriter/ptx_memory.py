"""Instructions of PTX that access memory: loads, stores, atomics, asynchronous copies and their barriers."""

from __future__ import annotations

import re

from .ptx_instruction import (
    HALVES,
    S32,
    SCOPES,
    SEMANTICS,
    SPACES,
    U16,
    U32,
    U64,
    Instruction,
    Memory,
    Negated,
    PtxError,
    Register,
    assign,
    literal,
    value_of,
)

CACHES = {"ca", "cg", "cs", "lu", "cv", "wb", "wt"}
ATOMICS = {
    **{name: name.capitalize() for name in ("add", "min", "max", "and", "or", "xor")},
    "exch": "Exchange", "inc": "Increment", "dec": "Decrement", "cas": "",
}  # fmt: skip
ELEMENTS = {
    **{f"{letter}{bits}": f"{name}{bits}" for bits in (32, 64)
       for letter, name in (("u", "Unsigned"), ("s", "Signed"), ("b", "Unsigned"), ("f", "Float"))},
    "f16": "Float16", "bf16": "Bfloat16",
}  # fmt: skip


class MemoryAccess(Instruction):
    """Its methods named do_… write the instruction of that name."""

    def width(self) -> int:
        return next((int(m[1:]) for m in self.modifiers if m in ("v2", "v4", "v8")), 1)

    def order(self) -> str:
        orders = {"acquire": "Acquire", "release": "Release", "acq_rel": "Both"}
        return "kf_ptx::Order::k" + next((orders[m] for m in self.modifiers if m in orders), "Relaxed")

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

    do_ldu = do_ld

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
            value = value_of(self.operands[1], self.type)
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
            return "kf_ptx::close_copies();"
        if name == "async.wait_group":
            return f"kf_ptx::wait_copies({self.read(0, U32)});"
        if name == "async.wait_all":
            return "kf_ptx::wait_copies(kf_ptx::kAll);"
        self.only("async", "ca", "cg", *SPACES, *(m for m in self.modifiers if m.startswith("L2::")))
        size = self.read(2, U32)
        given = len(self.operands) - (1 if self.has("L2::cache_hint") else 0)
        source_size = size
        if given > 3:
            fourth = self.operands[3]
            predicate = isinstance(fourth, Negated) or (isinstance(fourth, Register) and fourth.kind == "bool")
            source_size = f"({self.read(3, 'bool')} ? 0u : {size})" if predicate else self.read(3, U32)
        cached = literal(self.has("ca"))
        to, source = self.pointer(0, "shared"), self.pointer(1, "global")
        return f"kf_ptx::copy_async({to}, {source}, {size}, {source_size}, {cached});"

    def bulk(self, name: str) -> str:
        if name == "async.bulk.commit_group":
            return "kf_ptx::close_stores();"
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
                mask = value_of(operands[3 if tensor else 4], U16)
            arrival = self.address(barrier, "shared")
            if tensor:
                return f"kf_ptx::load_tensor({shared}, {table}, {arrival}, {mask});"
            from_, size = self.address(operands[1], "global"), value_of(operands[2], U32)
            return f"kf_ptx::load_bulk({shared}, {from_}, {size}, {arrival}, {mask});"
        if to == "shared":
            size = value_of(operands[2], U32)
            shared, from_ = self.address(operands[0], "shared"), self.address(operands[1], "shared")
            if self.has("reduce"):
                raise PtxError()
            arrival = self.address(operands[3], "shared")
            return f"kf_ptx::load_bulk({shared}, {from_}, {size}, {arrival}, kf_ptx::kOwnBlock);"
        shared = self.address(operands[1], "shared")
        if tensor:
            return f"kf_ptx::store_tensor({table}, {shared}, {operation});"
        element = f"kf_ptx::Element::k{ELEMENTS[self.kind] if self.has('reduce') else 'Byte'}"
        size = value_of(operands[2], U32)
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
            value = value_of(operands[1], U32) if len(operands) > 1 else ("" if expects else "1u")
            count, bytes_ = ("1u", value) if expects else (value, "0u")
            drop = literal(what == "arrive_drop")
            call = f"kf_ptx::barrier_arrive({self.address(operands[0])}, {count}, {bytes_}, {drop})"
            return f"static_cast<void>({call});" if result is None else assign(result, call)
        if self.has("parity"):
            return self.write(f"kf_ptx::barrier_try_parity({self.pointer(1)}, {self.read(2, U32)})")
        return self.write(f"kf_ptx::barrier_try({self.pointer(1)}, {self.read(2, U64)})")
