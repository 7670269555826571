"""What the emulation knows of its blocks and threads, read out of the program by gdb.

The members named here are those of `kf::simt::Worker` and `Launch` in ../src/runtime.h. One that is missing is an error
which names it.
"""

import pathlib
import re
import struct

import gdb

SIMT = pathlib.Path(__file__).resolve().parents[1]
WARP = 32
WORD = struct.calcsize("P")
OF_EMULATION = re.compile(r"/emulator/(src|include)/")  # the source of a frame that is none of the user's
WORKING = "'kf::simt::working'"  # the Worker of an OS thread that runs a launch

# What kf_simt_switch in ../src/fiber.cpp leaves at a fiber's `sp`: for each register its place, in words; then how many
# words it takes off the stack. `pc` is where the switch returns to, `fp` the frame pointer.
LAYOUTS = {
    "i386:x86-64": (
        {"r15": 0, "r14": 1, "r13": 2, "r12": 3, "rbx": 4, "rbp": 5, "rip": 6},
        {"size": 7, "sp": "rsp", "fp": "rbp", "pc": "rip"},
    ),
    "aarch64": (
        {**{f"x{19 + i}": i for i in range(12)}, "pc": 11},  # the floating-point registers are left as they are
        {"size": 20, "sp": "sp", "fp": "x29", "pc": "pc"},
    ),
}


# Where a thread was interrupted by the watchdog's signal: the code that a handler returns to on x86-64, and where above
# this return address Linux keeps the program counter.
SIGNAL_RETURN = b"\x48\xc7\xc0\x0f\0\0\0\x0f\x05"  # mov $15, %rax; syscall
INTERRUPTED_PC = 168


def member(value: gdb.Value, name: str) -> gdb.Value:
    """A member of a structure, references followed."""
    try:
        found = value[name]
    except gdb.error as error:
        raise gdb.GdbError(
            f"The emulation has no member `{name}` here ({error}): was the program compiled from another version?"
        ) from error
    return found.referenced_value() if found.type.code == gdb.TYPE_CODE_REF else found


def atomic(value: gdb.Value) -> gdb.Value:
    """What a std::atomic holds: the innermost first member, however the library calls it."""
    while value.type.strip_typedefs().code == gdb.TYPE_CODE_STRUCT:
        value = value[next(field for field in value.type.strip_typedefs().fields() if hasattr(field, "bitpos"))]
    return value


def memory(address: int, size: int) -> bytes:
    """Bytes of the program."""
    return bytes(gdb.selected_inferior().read_memory(address, size))


def memory_of(value: gdb.Value) -> bytes:
    """The bytes of a variable."""
    return memory(int(value.address), value.type.sizeof)


def text_of(index: tuple[int, int, int]) -> str:
    """An index as CUDA's tools write it."""
    return "({},{},{})".format(*index)


def parse_index(text: str) -> tuple[int, int, int]:
    """`7`, `7,1` or `(7,1,0)`; what is left out is 0."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    return (*numbers, 0, 0)[:3]


INDEX = r"\(\s*\d+(?:\s*,\s*\d+){0,2}\s*\)|\d+(?:\s*,\s*\d+){0,2}"  # what parse_index takes


def triple(value: gdb.Value) -> tuple[int, int, int]:
    """A dim3 or a uint3."""
    return tuple(int(member(value, name)) for name in "xyz")


def is_ours(sal: gdb.Symtab_and_line) -> bool:
    """Whether a place lies in the user's own source, and not in the emulation or a library."""
    if sal.symtab is None:
        return False
    path = sal.symtab.fullname()
    return not (OF_EMULATION.search(path) or path.startswith("/usr/"))


def own_frame(frame: gdb.Frame | None) -> gdb.Frame | None:
    """The innermost frame that lies in the user's own source, from `frame` on outwards."""
    while frame is not None and not is_ours(frame.find_sal()):
        frame = frame.older()
    return frame


def line_text(sal: gdb.Symtab_and_line) -> str:
    """A line of the source as ` at FILE:LINE`, without the folder."""
    return f" at {pathlib.PurePath(sal.symtab.filename).name}:{sal.line}"


def place(site: gdb.Value) -> str:
    """A `CallSite` as FILE:LINE, without the folder."""
    return f"{pathlib.PurePath(member(site, 'file').string()).name}:{int(member(site, 'line'))}"


def short_name(signature: str) -> str:
    """The name and the template arguments in a __PRETTY_FUNCTION__, as the emulation's errors have them."""
    text = re.sub(r"\{anonymous\}::|\(anonymous namespace\)::", "", signature)
    head, _, rest = text.partition("(")
    arguments = re.search(r" \[[^\[]*\]$", rest)
    return head.split(" ")[-1] + (arguments.group() if arguments else "")


class Block:
    """A block at work: a Worker, and the OS thread that it belongs to."""

    def __init__(self, worker: gdb.Value, os_thread: gdb.InferiorThread):
        self.worker = worker.dereference()
        self.os_thread = os_thread
        self.launch = member(self.worker, "launch_").dereference()
        self.config = member(self.launch, "config")
        self.index = triple(self.get("block_index_"))
        self.dim = triple(self.get("block_dim_"))
        self.threads = int(self.get("threads_"))
        self.current = int(self.get("current_"))  # the thread that runs, or ran last

    def get(self, name: str) -> gdb.Value:
        """A member of the Worker."""
        return member(self.worker, name)

    def kernel(self) -> str:
        """The kernel's name, with its template arguments; until it has begun, what the launch calls it."""
        info = atomic(member(self.launch, "kernel"))
        if int(info) == 0:
            return member(self.config, "name").string()
        return short_name(member(info.dereference(), "signature").string())

    def thread_at(self, number: int) -> tuple[int, int, int]:
        """The index of a thread, given its number in the block."""
        x, y, _ = self.dim
        return number % x, number // x % y, number // (x * y)

    def number_of(self, index: tuple[int, int, int]) -> int:
        """The number of a thread in the block, given its index."""
        if any(i >= limit for i, limit in zip(index, self.dim, strict=True)):
            raise gdb.GdbError(f"There is no thread {text_of(index)}: the block is of {text_of(self.dim)} threads.")
        return index[0] + self.dim[0] * (index[1] + self.dim[1] * index[2])

    def fiber(self, number: int) -> gdb.Value | None:
        """The stack of a thread that has begun and has not exited."""
        pointer = self.get("fiber_of_")[number]
        return pointer.dereference() if int(pointer) != 0 else None

    def has_exited(self, number: int) -> bool:
        """Whether a thread has returned from the kernel."""
        return bool(int(member(self.get("warp_")[number // WARP], "exited")) >> number % WARP & 1)

    def running(self, sp: int) -> int | None:
        """The number of the thread on whose stack the OS thread is, `sp` being its stack pointer; else None."""
        fiber = self.fiber(self.current)
        if fiber is None or self.has_exited(self.current):
            return None
        begin = int(member(fiber, "stack"))
        return self.current if begin <= sp <= begin + int(member(fiber, "size")) else None

    def states(self, running: int | None) -> list[str]:
        """What each thread does, in words; equal words for threads that are to be shown as one."""
        pointers = memory_of(self.get("fiber_of_"))
        waits = self.get("wait_")
        kinds = {field.enumval: field.name.split("::")[-1] for field in waits.type.target().fields()}
        kind_of = [kinds.get(byte, "") for byte in memory_of(waits)]
        barrier = self.get("barrier_")
        lines = Lines(self)
        states = []
        for w in range((self.threads + WARP - 1) // WARP):
            warp = self.get("warp_")[w]
            sets = {name: int(member(warp, name)) for name in ("lanes", "ready", "yielded", "exited", "asking")}
            operations = [member(warp, "operations")[i] for i in range(int(member(warp, "open")))]
            in_operation = {}
            for operation in operations:
                text = self._operation(operation, sets["lanes"] & ~sets["exited"])
                arrived = int(member(operation, "arrived"))
                in_operation.update({lane: text for lane in range(WARP) if arrived >> lane & 1})
            for lane in range(min(WARP, self.threads - w * WARP)):
                number = w * WARP + lane
                (fiber,) = struct.unpack_from("P", pointers, number * WORD)
                if sets["exited"] >> lane & 1:
                    state = "exited"
                elif number == running:
                    state = "runs"
                elif fiber == 0:
                    state = "not begun"
                elif sets["yielded"] >> lane & 1:
                    state = "gave way" + lines.of(number)
                elif sets["ready"] >> lane & 1:
                    state = "ready" + lines.of(number)
                elif sets["asking"] >> lane & 1:
                    state = f"waits at __activemask, {place(self.get('active_site_')[number])}"
                elif lane in in_operation:
                    state = in_operation[lane]
                elif kind_of[number] == "kNamed":
                    state = f"waits at bar.sync, {place(self.get('active_site_')[number])}"
                elif kind_of[number] == "kBarrier":
                    state = f"waits at {member(barrier, 'name').string()}, {place(member(barrier, 'site'))}"
                else:
                    state = "waits" + lines.of(number)
                states.append(state)
        return states

    def _operation(self, operation: gdb.Value, present: int) -> str:
        """What a lane in this operation of its warp waits for."""
        mask, arrived = (int(member(operation, name)) for name in ("mask", "arrived"))
        text = f"waits in {member(operation, 'name').string()}, {place(member(operation, 'site'))}, mask {mask:#010x}"
        missing = [lane for lane in range(WARP) if mask & present & ~arrived & (1 << lane)]
        return text + (f": {lanes_text(missing)} missing" if missing else "")

    def saved_registers(self, number: int) -> dict[str, int]:
        """The registers that a thread which does not run will have when it goes on."""
        words, names = layout()
        sp = saved_sp(self.fiber(number))
        saved = struct.unpack(f"{names['size']}P", memory(sp, names["size"] * WORD))
        return {**{name: saved[at] for name, at in words.items()}, names["sp"]: sp + names["size"] * WORD}


class Lines:
    """Finds the lines of the user's source where threads are that do not run.

    It follows the frame pointers, which code without optimisation has; gdb's own unwinding would take seconds for a
    whole block.
    """

    def __init__(self, block: Block):
        self.fibers = block.get("fiber_of_")
        self.registers, self.names = layout()
        self.start = int(gdb.parse_and_eval("(unsigned long)&kf_simt_begin"))  # where stacks begin
        self.known = {}

    def at(self, pc: int) -> str:
        """The line of a place in the code, or nothing where that is none of the user's."""
        if pc not in self.known:
            sal = gdb.find_pc_line(pc)
            self.known[pc] = line_text(sal) if is_ours(sal) else ""
        return self.known[pc]

    def is_signal_return(self, pc: int) -> bool:
        """Whether a return address belongs to a signal's handler."""
        key = "signal", pc
        if key not in self.known:
            self.known[key] = memory(pc, len(SIGNAL_RETURN)) == SIGNAL_RETURN
        return self.known[key]

    def of(self, number: int) -> str:
        """Where this thread is, as ` at FILE:LINE`, or nothing where it cannot be told."""
        fiber = self.fibers[number].dereference()
        begin = saved_sp(fiber)
        end = int(member(fiber, "stack")) + int(member(fiber, "size"))
        words = struct.unpack(f"{(end - begin) // WORD}P", memory(begin, (end - begin) // WORD * WORD))
        frame, pc = (words[self.registers[self.names[name]]] for name in ("fp", "pc"))
        found = ""
        while begin <= frame <= end - 2 * WORD and frame % WORD == 0:
            at = (frame - begin) // WORD
            found = found or self.at(pc - 1)
            if not found and self.is_signal_return(words[at + 1]):
                found = self.at(words[at + 2 + INTERRUPTED_PC // WORD])
            if words[at] <= frame:
                pc = words[at + 1]
                break
            frame, pc = words[at], words[at + 1]
        # A chain that does not end where stacks begin was none.
        return found if self.start < pc <= self.start + 64 else ""


def layout() -> tuple[dict[str, int], dict]:
    """The layout of a saved fiber on this machine."""
    name = gdb.selected_inferior().architecture().name()
    if name not in LAYOUTS:
        raise gdb.GdbError(f"Threads that do not run cannot be shown on {name}.")
    return LAYOUTS[name]


def saved_sp(fiber: gdb.Value) -> int:
    """The stack pointer of a fiber that does not run."""
    if "sp" not in [field.name for field in fiber.type.fields()]:
        raise gdb.GdbError("Threads that do not run cannot be shown: the emulation was compiled with KF_SIMT_SETJMP.")
    return int(fiber["sp"])


def lanes_text(lanes: list[int]) -> str:
    """`lanes 0-7, 9`."""
    parts = []
    for lane in lanes:
        if parts and parts[-1][1] == lane - 1:
            parts[-1][1] = lane
        else:
            parts.append([lane, lane])
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
    return f"lane{'s' if len(lanes) > 1 else ''} {text}"


def block_of_thread() -> Block | None:
    """The block that the selected OS thread works on, if any."""
    os_thread = gdb.selected_thread()
    if os_thread is None or not os_thread.is_valid():
        return None
    try:
        worker = gdb.parse_and_eval(WORKING)
    except gdb.error as error:
        raise gdb.GdbError(f"This is no CUDA program compiled for debugging on the CPU: {error}") from error
    if int(worker) == 0 or int(member(worker.dereference(), "launch_")) == 0:
        return None
    return Block(worker, os_thread)


def blocks_at_work() -> list[Block]:
    """All of them, in the order of their indices. The OS thread and frame that are selected stay so."""
    selected = gdb.selected_thread()
    if selected is None:
        return []
    frame = gdb.selected_frame()
    found = []
    for os_thread in gdb.selected_inferior().threads():
        os_thread.switch()
        block = block_of_thread()
        found += [block] if block is not None else []
    selected.switch()
    frame.select()
    return sorted(found, key=lambda block: block.index[::-1])
