"""Arrays in the program's memory: found by name, and their elements as rows of numbers."""

import struct

import gdb
import kf_state
from kf_state import Block, member

LINE = 100  # characters
HALF_TYPES = {"kf::simt::__half": "e", "kf::simt::__nv_bfloat16": "H"}


def static_variables(block: Block) -> dict[str, tuple[gdb.Value, int]]:
    """The __shared__ variables that the block has come to: by name, the slot and the address."""
    vector = member(block.get("static_variables_"), "_M_impl")
    begin, end = member(vector, "_M_start"), member(vector, "_M_finish")
    found = {}
    for i in range(int(end - begin)):
        slot = member(begin[i], "slot").dereference()
        found[member(slot, "name").string()] = slot, int(member(begin[i], "address"))
    return found


def declared_type(slot: gdb.Value) -> gdb.Type | None:
    """The type of a __shared__ variable, from the place where it is declared."""
    name, size = member(slot, "name").string(), int(member(slot, "size"))
    at = f'"{member(slot, "file").string()}":{int(member(slot, "line"))}'
    for sal in gdb.decode_line(at)[1] or ():  # several where the kernel is a template
        scope = gdb.block_for_pc(sal.pc)
        while scope is not None and not scope.is_static and not scope.is_global:
            for symbol in scope:
                kind = symbol.type.strip_typedefs()
                is_reference = symbol.name == name and kind.code == gdb.TYPE_CODE_REF
                if is_reference and kind.target().sizeof == size:
                    return kind.target()
            scope = scope.superblock
    return None


def shape_of(kind: gdb.Type) -> tuple[gdb.Type, list[int]]:
    """The type of an array's elements, and the number of them in each dimension; 0 where it is open."""
    shape = []
    kind = kind.strip_typedefs()
    while kind.code == gdb.TYPE_CODE_ARRAY:
        shape.append(kind.sizeof // max(kind.target().sizeof, 1))
        kind = kind.target().strip_typedefs()
    return kind.unqualified(), shape


def array_text(element: gdb.Type, shape: list[int]) -> str:
    """The type of an array, as in its declaration."""
    return str(element).replace("kf::simt::", "") + "".join(f"[{n}]" for n in shape)


def find_array(block: Block, name: str, counts: list[int]) -> tuple[int, gdb.Type, list[int]]:
    """The address, the type of the elements, and the number of them in each dimension."""
    statics = static_variables(block)
    if name in statics and (kind := declared_type(statics[name][0])) is not None:
        address, (element, shape) = statics[name][1], shape_of(kind)
    else:
        value = evaluate(name)
        if value.type.strip_typedefs().code == gdb.TYPE_CODE_REF:
            value = value.referenced_value()
        if value.type.strip_typedefs().code == gdb.TYPE_CODE_PTR:
            address = int(value)
            element, shape = shape_of(value.type.strip_typedefs().target())
            shape = [0, *shape]
        elif value.address is not None:
            address, (element, shape) = int(value.address), shape_of(value.type)
        else:
            raise gdb.GdbError(f"`{name}` is no array.")
    if shape[:1] != [0]:
        if counts:
            raise gdb.GdbError(f"`{name}` has a size of its own: {array_text(element, shape)}.")
        return address, element, shape or [1]
    row = element.sizeof
    for n in shape[1:]:
        row *= n
    return address, element, [*(counts or [bytes_left(block, address, name) // row]), *shape[1:]]


def bytes_left(block: Block, address: int, name: str) -> int:
    """The bytes of dynamic shared memory from an address on."""
    begin = int(block.get("dynamic_"))
    end = begin + int(member(block.config, "shared"))
    if not begin <= address <= end:
        raise gdb.GdbError(f"`{name}` is not in dynamic shared memory; give the number of elements: {name} N")
    return end - address


def evaluate(expression: str) -> gdb.Value:
    """The value of an expression where gdb is, or in the nearest frame outwards that knows its names."""
    selected = frame = gdb.selected_frame()
    try:
        while frame is not None:
            frame.select()
            try:
                return gdb.parse_and_eval(expression)
            except gdb.error as error:
                first = error
            frame = frame.older()
    finally:
        selected.select()
    raise gdb.GdbError(f"{first} `cuda shared` lists the variables of this block.")


def rows(address: int, element: gdb.Type, shape: list[int]) -> list[str]:
    """An array as lines of numbers; lines that repeat are counted."""
    columns, count = shape[-1], 1
    for n in shape:
        count *= n
    words = element_words(address, element, count)
    width = max(map(len, words), default=1)
    per_line = columns
    if len(shape) == 1 or columns * (width + 1) > LINE:
        per_line = 1
        while per_line < min(32, columns) and 2 * per_line * (width + 1) <= LINE:
            per_line *= 2
    lines = []
    for start in range(0, count, columns):
        label, rest = "", start // columns
        for n in reversed(shape[:-1]):
            label, rest = f"[{rest % n}]{label}", rest // n
        for column in range(0, columns, per_line):
            at = f"{label}[{column}]" if per_line < columns or not label else label
            numbers = words[start + column : start + min(column + per_line, columns)]
            lines.append((at, " ".join(f"{word:>{width}}" for word in numbers)))
    labels = max((len(label) for label, _ in lines), default=0)
    found, repeats = [], 0
    for i, (label, numbers) in enumerate(lines):
        if i > 0 and numbers == lines[i - 1][1] and i + 1 < len(lines):
            repeats += 1
            continue
        if repeats == 1:
            found.append(f"  {lines[i - 1][0]:{labels}} {lines[i - 1][1]}")
        elif repeats:
            found.append(f"  {'…':{labels}} {repeats} more rows like this")
        repeats = 0
        found.append(f"  {label:{labels}} {numbers}")
    return found


def element_words(address: int, element: gdb.Type, count: int) -> list[str]:
    """Each of `count` elements as a word."""
    data = kf_state.memory(address, count * element.sizeof) if count else b""
    size = element.sizeof
    real = {4: "f", 8: "d"}.get(size) if element.code == gdb.TYPE_CODE_FLT else HALF_TYPES.get(str(element))
    if real is not None:
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        return ["-" if piece == b"\xff" * size else f"{real_number(real, piece):g}" for piece in pieces]
    if element.code in (gdb.TYPE_CODE_INT, gdb.TYPE_CODE_CHAR, gdb.TYPE_CODE_BOOL) and size in (1, 2, 4, 8):
        signed = int(gdb.Value(-1).cast(element)) < 0
        code = {1: "b", 2: "h", 4: "i", 8: "q"}[size]
        return [str(n) for n in struct.unpack(f"{count}{code if signed else code.upper()}", data)]
    first = gdb.Value(address).cast(element.pointer())
    return [first[i].format_string() for i in range(count)]


def real_number(code: str, data: bytes) -> float:
    """A floating-point number; bfloat16 is the upper half of a float."""
    return struct.unpack("<f", b"\0\0" + data)[0] if code == "H" else struct.unpack(code, data)[0]
