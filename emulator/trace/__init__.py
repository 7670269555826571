"""Recorded runs: what the threads of a small launch read, write and wait for, in the order in which they ran.

tracer.cpp writes down addresses and bytes; here they become source lines, arrays and numbers. viewer.js steps through
them on a page.
"""

import argparse
import html as escapes
import json
import pathlib
import re
import struct
import tempfile
from collections.abc import Iterable

from rich.console import Console

from emulator import counts, programs
from emulator.console import UserError

MOST = 50_000  # events of a trace: a page of 10 MB
NEAR = 1024  # bytes beside an array
FOLDER = pathlib.Path(__file__).resolve().parent
# C++'s types, as struct's letters, and how many of them one is.
TYPES = {
    "float": "f", "double": "d", "int": "i", "unsigned int": "I", "long int": "q", "long unsigned int": "Q",
    "long long int": "q", "long long unsigned int": "Q", "short int": "h", "short unsigned int": "H", "char": "b",
    "signed char": "b", "unsigned char": "B", "bool": "B", "__half": "e",
}  # fmt: skip
VARIABLE = re.compile(
    r"\b__(?:constant|device)__\b(?:\s+(?:static|const|constexpr|volatile|inline))*"
    r"\s+([\w: ]+?)\s*\b(\w+)\s*[\[;={]"
)
UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}
PRECISION = {"e": 5, "f": 7, "d": 15, "bf16": 4}
# What orders threads and is not seen here: where a program has it, no access is called unordered.
OTHER_ORDER = re.compile(r"\basm\b|mbarrier|cp_async|bar_sync|__threadfence|__pipeline|cluster|\.sync\(|kf/ptx|step\d/")


class Array:
    """A shared variable, a parameter's memory, or a variable of the device."""

    def __init__(self, name: str, space: str, begin: int, size: int, type_text: str, block: int | None = None):
        self.name, self.space, self.block, self.begin, self.bytes = name, space, block, begin, size
        base, _, dimensions = type_text.partition(" [")
        base = re.sub(r"\b(const|volatile|kf::simt::|kf::emulated::)\s*", "", base).strip()
        self.shape = [int(n) for n in re.findall(r"\d+", dimensions)]
        vector = re.fullmatch(r"(u?)(float|double|int|char|short)([234])", base)
        if vector:
            self.shape = [*self.shape, int(vector[3])] if self.shape else []
            base = f"unsigned {vector[2]}" if vector[1] else vector[2]
            base = {"unsigned short": "short unsigned int", "short": "short int"}.get(base, base)
        self.letter = "bf16" if base == "__nv_bfloat16" else TYPES.get(base, "")
        self.type = base if self.letter else "bytes"
        self.element = 2 if self.letter == "bf16" else struct.calcsize(self.letter) if self.letter else 0
        self.cells: dict[int, object] = {}  # what they held at first; None where the first event writes

    def numbers(self, raw: bytes) -> list:
        """The elements that these bytes are."""
        if self.letter == "bf16":
            raw = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
        elif len(raw) % self.element:
            return [raw.hex()]
        letter = "f" if self.letter == "bf16" else self.letter
        return [
            readable(value, self.letter)
            for value in struct.unpack(f"<{len(raw) // struct.calcsize(letter)}{letter}", raw)
        ]

    def as_json(self) -> dict:
        cells = [[index, value] for index, value in sorted(self.cells.items())]
        found: dict = {"name": self.name, "space": self.space, "type": self.type, "cells": cells}
        if self.space == "shared":
            found |= {"block": self.block, "shape": self.shape or [self.bytes // max(self.element, 1)]}
        return found


def readable(value: float, letter: str) -> float | int | str:
    """A number as JSON has it: with its type's digits, and by its name where it is none."""
    if isinstance(value, int):
        return value
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    return float(f"{value:.{PRECISION[letter]}g}")


def record(
    source: pathlib.Path,
    arguments: Iterable[str] = (),
    *,
    blocks: str = "0-1",
    threads: str = "0-1023",
    launch: int = 1,
    to_the_end: bool = True,
    schedule: str = "forward",
    include_dirs: tuple[pathlib.Path, ...] = (),
    compiler_flags: tuple[str, ...] = (),
    stdout: int | None = None,
) -> tuple[int, dict]:
    """Compiles and runs a CUDA program and records one of its launches.

    Args:
        source: the .cu file.
        arguments: the program's own.
        blocks, threads: which are recorded, "N" or "FIRST-LAST", counted from 0, x first.
        launch: which launch of the program, from 1.
        to_the_end: False ends the program behind that launch, with code 0.
        schedule: the threads' order. With the same one the trace is the same, but for blocks that must run together.
        include_dirs, compiler_flags: as in `programs.compile_program`.
        stdout: as in `programs.run_program`.

    Returns:
        The program's exit code, and the trace, as JSON has it: README.md beside the emulation says what is in it.

    Raises:
        UserError: it cannot be compiled; it has fewer launches or blocks; there are more than MOST events.
    """
    program = programs.compile_program(
        source, flavour="trace", include_dirs=include_dirs, compiler_flags=compiler_flags
    )
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder) / "trace.json"
        settings = {
            "KF_SIMT_TRACE": str(written), "KF_SIMT_TRACE_LAUNCH": str(launch), "KF_SIMT_TRACE_BLOCKS": blocks,
            "KF_SIMT_TRACE_THREADS": threads, "KF_SIMT_TRACE_EVENTS": str(4 * MOST),
        }  # fmt: skip
        if not to_the_end:
            settings["KF_SIMT_TRACE_END"] = "1"
        code = programs.run_program(
            program, list(arguments), schedule=schedule, threads=1, settings=settings, stdout=stdout
        )
        if not written.exists():
            raise UserError(f"{source.name}: nothing to record: it has no launch {launch}, or did not come to its end")
        raw = json.loads(written.read_text(encoding="utf-8"))
    where = f"{source.name}: launch {launch}, blocks {blocks}, threads {threads}"
    if not raw["events"]:
        raise UserError(f"{where}: nothing happens there; the grid is {raw['grid']}, a block {raw['block']}")
    texts = counts.own_sources(source, include_dirs)
    trace = _Reader(raw, program, source, texts).trace()
    if raw["count"] > 4 * MOST or len(trace["events"]) > MOST:
        raise UserError(f"{where}: more than {MOST:,} events; record fewer: --trace-blocks 0 --trace-threads 0-31")
    return code, {"schedule": schedule, "blocks": blocks, "threads": threads, **trace}


class _Reader:
    """From what tracer.cpp wrote."""

    def __init__(self, raw: dict, program: pathlib.Path, source: pathlib.Path, texts: list[str]):
        self.raw, self.texts = raw, texts
        self.arrays: list[Array] = []
        self.shared: dict[tuple[int, int], Array] = {}
        waits = [event for event in raw["events"] if event[0] == "wait"]
        addresses = {pc for chain in raw["chains"] for pc in chain} | {pc for event in waits for pc in event[-1]}
        self.frames = counts.frames_of(program, addresses)
        chains = [self.chain(chain) for chain in raw["chains"]]
        files = [chain[-1].file for chain in chains if chain]
        self.file = pathlib.Path(files[0]) if files else source.resolve()
        self.chains = chains
        self.parameters = parameters(texts, counts.plain_name(raw["kernel"].split(" [")[0]))
        self.variables = variables(program, texts)
        self.letters: dict[tuple[int, int], Array] = {}
        for block, name, begin, size, type_text in raw["shared"]:
            dynamic = not name
            found = re.search(r"extern\s+__shared__[^;]*?\b(\w+)\s*\[\s*\]", "\n".join(texts)) if dynamic else None
            name = name or (found[1] if found else "shared")
            type_text = template_type(type_text).replace(" []", "") if dynamic else template_type(type_text)
            self.add(
                self.shared, (block, int(begin, 16)), Array(name, "shared", int(begin, 16), size, type_text, block)
            )

    def add(self, where: dict, key: object, array: Array) -> None:
        if key not in where:
            where[key] = array

    def chain(self, addresses: list[str]) -> list[counts.Frame]:
        kernel = self.raw["kernel"]
        return counts.within_kernel(kernel, [frame for pc in addresses for frame in self.frames[pc]])

    def line(self, chain: list[counts.Frame]) -> int:
        return next((frame.line for frame in chain if frame.file == str(self.file)), 0)

    def array(self, block: int, space: str, address: int, size: int) -> Array | None:
        if space == "shared":
            for (of, begin), array in self.shared.items():
                if of == block and begin <= address < begin + max(array.bytes, 1):
                    return array
            return None
        if space == "variable":
            for begin, bytes_, name, type_text in self.variables:
                if begin <= address < begin + bytes_:
                    return self.known(name, begin, bytes_, type_text)
            return None
        for beside in (0, NEAR):  # an access past an array is shown as the array's
            for number, (pointer, begin, bytes_, type_text) in enumerate(self.raw["arguments"]):
                if bytes_ and int(begin, 16) - beside <= address < int(begin, 16) + bytes_ + beside:
                    name = self.parameters[number] if number < len(self.parameters) else f"argument {number + 1}"
                    return self.known(name, int(pointer, 16), bytes_, template_type(type_text))
            for number, (begin, bytes_) in enumerate(self.raw["allocations"]):
                if int(begin, 16) <= address < int(begin, 16) + bytes_:
                    return self.known(f"memory {number + 1}", int(begin, 16), bytes_, "")
        return self.known("elsewhere", 0, 0, "")

    def known(self, name: str, begin: int, size: int, type_text: str) -> Array:
        for array in self.arrays:
            if array.begin == begin and array.name == name:
                return array
        return Array(name, "global", begin, size, type_text)

    def trace(self) -> dict:
        events = [found for event in self.raw["events"] for found in self.event(event)]
        put_loads_first(events)
        if not any(OTHER_ORDER.search(text) for text in self.texts):
            mark_unordered(events)
        text = self.file.read_text(encoding="utf-8", errors="replace")
        head = {key: self.raw[key] for key in ("kernel", "grid", "block", "launch", "error")}
        source = {"name": self.file.name, "lines": text.splitlines()}
        return {**head, "source": source, "arrays": [array.as_json() for array in self.arrays], "events": events}

    def event(self, raw: list) -> list[dict]:
        what, block, thread, *rest = raw
        found = {"what": what, "block": block, "thread": thread}
        if what == "exit":
            return [found]
        if what == "go on":
            return [self.gone_on(block, *rest)]
        if what == "wait":
            return [self.waiting(found, rest)]
        chain, space, address, size, *values = rest
        frames = self.chains[chain]
        if not frames:  # the launch itself, as it copies the arguments
            return []
        if what == "atomic load" and any(counts.plain_name(frame.function) == "atomic_update" for frame in frames):
            return []  # the first step of an atomic that is made of a loop
        array = self.array(block, space, int(address, 16), size)
        if array is None:
            return []
        if array not in self.arrays:
            self.arrays.append(array)
        if not array.element:
            array.letter, array.element = UNSIGNED.get(size, "B"), size if size in UNSIGNED else 1
        index = (int(address, 16) - array.begin) // array.element
        found["what"] = {"load": "read", "atomic load": "read", "store": "write"}.get(what, "atomic")
        found |= {"line": self.line(frames), "array": self.arrays.index(array), "index": index}
        before = array.numbers(bytes.fromhex(values[0]))
        for offset, value in enumerate(before):
            array.cells.setdefault(index + offset, None if found["what"] == "write" else value)
        if len(values) > 1:
            found["before"] = before
        found["values"] = array.numbers(bytes.fromhex(values[-1])) or ["outside"] * max(1, size // array.element)
        return [found]

    def waiting(self, found: dict, rest: list) -> dict:
        name, file, line, *shuffled, calls = rest
        own = line if pathlib.Path(file) == self.file else self.line(self.chain(calls))
        found |= {"line": own, "name": name}
        if shuffled:
            lane, bits, type_text = shuffled
            array = Array("", "", 0, 0, template_type(type_text))
            if not array.element:
                array.letter, array.element = "Q", 8
            self.letters[found["block"], found["thread"]] = array
            found |= {"from": lane, "gives": array.numbers(bytes.fromhex(bits)[: array.element])[0]}
        return found

    def gone_on(self, block: int, threads: list[int], values: list[str]) -> dict:
        found = {"what": "go on", "block": block, "threads": threads}
        if values:
            pairs = zip(threads, values, strict=True)
            arrays = ((self.letters[block, thread], bits) for thread, bits in pairs)
            found["gets"] = [array.numbers(bytes.fromhex(bits)[: array.element])[0] for array, bits in arrays]
        return found


def template_type(signature: str) -> str:
    """ "f() [with T = float [32]]": the type."""
    found = re.search(r"\[with (?:\w+ = [^;]*; )*?T = (.*?)(?:; .*)?\]$", signature)
    return found[1] if found else ""


def parameters(texts: list[str], kernel: str) -> list[str]:
    """The names of a kernel's parameters; none where its declaration is not found."""
    for text in texts:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(kernel)}\s*\(([^{{;]*?)\)\s*\{{", text)
        if found:
            without = re.sub(r"<[^<>]*>|\([^()]*\)|=[^,]*", "", found[1])
            names = [re.findall(r"\w+", one) for one in without.split(",")]
            return [words[-1] if words else "" for words in names]
    return []


def variables(program: pathlib.Path, texts: list[str]) -> list[tuple[int, int, str, str]]:
    """The device's variables: address in the file, size, name, type."""
    declared = {}
    for text in texts:
        for found in VARIABLE.finditer(text):
            type_text = {"unsigned": "unsigned int", "unsigned long long": "long long unsigned int"}.get(
                found[1], found[1]
            )
            declared[found[2]] = type_text
    if not declared:
        return []
    listed = [line.split(maxsplit=3) for line in counts.output(["nm", "-C", "-S", str(program)]).splitlines()]
    known = [words for words in listed if len(words) == 4 and words[3].split("::")[-1] in declared]
    names = ((begin, size, name.split("::")[-1]) for begin, size, _, name in known)
    return [(int(begin, 16), int(size, 16), name, declared[name]) for begin, size, name in names]


def put_loads_first(events: list[dict]) -> None:
    """Where a structure is copied, the compiler announces the store before the load."""
    for i, (first, second) in enumerate(zip(events, events[1:], strict=False)):
        copied = first["what"] == "write" and second["what"] == "read" and len(first["values"]) > 1
        if copied and all(first[key] == second[key] for key in ("block", "thread", "line", "values")):
            events[i : i + 2] = [second, first]


def mark_unordered(events: list[dict]) -> None:
    """Marks an access that nothing orders after another thread's of the same block, one of them a write, with that
    one's number: `"unordered": event`. Barriers of the block order, `__syncwarp` within a warp; shuffles do not."""
    passed: dict[tuple[int, int], list[int]] = {}  # of a thread: barriers, and those of its warp
    waits: dict[tuple[int, int], str] = {}
    last: dict[tuple[int, int, int], dict[tuple[int, str], tuple[list[int], int]]] = {}
    for number, event in enumerate(events):
        block, what = event["block"], event["what"]
        if what == "wait":
            waits[block, event["thread"]] = event["name"]
        elif what == "go on":
            for thread in event["threads"]:
                barriers = passed.setdefault((block, thread), [0, 0])
                name = waits.get((block, thread), "")
                barriers[0] += name.startswith("__syncthreads")
                barriers[1] += name == "__syncwarp"
        elif what != "exit":
            thread = event["thread"]
            mine = passed.setdefault((block, thread), [0, 0])
            for index in range(event["index"], event["index"] + len(event["values"])):
                seen = last.setdefault((block, event["array"], index), {})
                for (other, kind), (theirs, at) in seen.items():
                    both = {what, kind}
                    ordered = mine[0] > theirs[0] or (other // 32 == thread // 32 and mine[1] > theirs[1])
                    if other != thread and not ordered and both not in ({"read"}, {"atomic"}):
                        event["unordered"] = at
                seen[thread, what] = (list(mine), number)


# ---- pages ----


def html(trace: dict) -> str:
    """A part of a page, a <div> with its <script>, that shows a trace of `record` and steps through it. A page may have
    several, and needs nothing else: neither files nor a network."""
    data = json.dumps(trace, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("viewer.css", "viewer.js"))
    return (
        f'<div class="kf-trace" tabindex="0" role="group" aria-label="recorded run">\n<style>\n{style}</style>\n'
        f'<script type="application/json">{data}</script>\n<script>\n{script}</script>\n</div>\n'
    )


def page(trace: dict) -> str:
    """The same as a page of its own."""
    title = escapes.escape(f"{trace['kernel']}, {trace['source']['name']}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        "<style>body { margin: 0; color-scheme: light dark; background: Canvas; }</style>\n"
        f"<body>\n{html(trace)}</body>\n</html>\n"
    )


def save(trace: dict, path: pathlib.Path) -> None:
    """Writes a trace, as a page where the name ends in .html, else as JSON."""
    text = page(trace) if path.suffix == ".html" else json.dumps(trace, allow_nan=False) + "\n"
    beside = path.with_name(f"{path.name}.tmp")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def command(options: argparse.Namespace, console: Console) -> int:
    """`simt FILE.cu --trace PATH`. Returns the program's exit code."""
    if options.trace.suffix not in (".json", ".html"):
        raise UserError(f"--trace: {options.trace} must end in .json or .html")
    code, trace = record(
        options.file,
        options.arguments,
        blocks=options.trace_blocks or "0-1",
        threads=options.trace_threads or "0-1023",
        launch=options.trace_launch or 1,
        schedule=options.schedule or "forward",
        include_dirs=tuple(options.include),
        compiler_flags=tuple(options.compiler_flags),
    )
    save(trace, options.trace)
    unordered = sum("unordered" in event for event in trace["events"])
    console.print(f"{options.trace}: {len(trace['events']):,} events of {trace['kernel']}", markup=False)
    if unordered:
        console.print(f"{unordered:,} accesses are not ordered after another thread's", markup=False)
    return code
