"""gdb's commands for a CUDA program that is compiled for debugging on the CPU: `gdb -x cuda.py PROGRAM`.

The commands are called as in cuda-gdb where it has them. `cuda help` lists all.
"""

import contextlib
import os
import pathlib
import re
import struct
import sys

import gdb
import gdb.unwinder
from gdb.FrameDecorator import FrameDecorator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))  # gdb does not

import kf_focus  # noqa: E402
import kf_state  # noqa: E402
from kf_arrays import HALF_TYPES, array_text, declared_type, find_array, real_number, rows, shape_of, static_variables  # noqa: E402
from kf_state import INDEX, SIMT, Block, member, parse_index, text_of  # noqa: E402

HELP = """\
info cuda kernels              the kernel that runs, its grid, and where it was launched
info cuda threads [block B]    what each thread of the blocks at work does
cuda kernel | block | thread   the kernel, block and thread that gdb shows
cuda block B thread T          show another thread: its backtrace, its variables. Either may be left out
cuda thread running            go back to the thread that runs
cuda break WHERE [block B] [thread T] [if CONDITION]
                               stop there in one block, in one thread
cuda shared                    the variables in shared memory
cuda shared ARRAY [N | RxC]    the elements of one, in rows; for a pointer or an `extern` array N, or R rows of C

B and T are n, x,y or x,y,z. gdb's own commands work as always; `backtrace -no-filters` shows the emulation's frames.
"""


def command(name: str, kind: int, completion: int = gdb.COMPLETE_NONE, prefix: bool = False):
    """Makes a command of a function, which gets what is typed after the name; its docstring is the command's help."""

    def make(function):
        invoke = {"__doc__": function.__doc__, "invoke": lambda self, argument, from_tty: function(argument)}
        type(function.__name__, (gdb.Command,), invoke)(name, kind, completion, prefix)

    return make


@command("cuda", gdb.COMMAND_DATA, prefix=True)
def cuda(argument):
    """CUDA's threads, blocks and shared memory, emulated on the CPU; `cuda help` lists the commands."""
    if argument:
        raise gdb.GdbError(f"There is no command `cuda {argument}`. `cuda help` lists them.")
    gdb.write(HELP)


@command("cuda help", gdb.COMMAND_SUPPORT)
def cuda_help(argument):
    """List the commands for CUDA."""
    gdb.write(HELP)


for _word in ("kernel", "block", "thread"):

    @command(f"cuda {_word}", gdb.COMMAND_STACK)
    def focus(argument, word=_word):
        """Show or change the thread that gdb shows: cuda block B thread T. B and T are n, x,y or x,y,z.

        `cuda thread running` goes back to the thread that runs. Before the program continues this happens by itself."""
        text = f"{word} {argument}"
        words = re.fullmatch(rf"(?:\s*(?:kernel|block|thread)(?:\s*(?:running|{INDEX}))?)+\s*", text)
        found = re.findall(rf"(kernel|block|thread)\s*(running|{INDEX})?", text)
        given = {word: value for word, value in found if value}
        if not words or len(found) != len({word for word, _ in found}) or given.get("block") == "running":
            raise gdb.GdbError("Usage: cuda [block B] [thread T], where B and T are n, x,y or x,y,z")
        block = kf_focus.focused()
        if "block" in given:
            block = find_block(parse_index(given["block"]))
        if given.get("thread") == "running" or ("block" in given and "thread" not in given):
            number = kf_focus.running(block)
            if number is None:
                raise gdb.GdbError("No thread of this block runs: the emulation itself is at work.")
            kf_focus.show_thread(block, number)
        elif "thread" in given:
            kf_focus.show_thread(block, block.number_of(parse_index(given["thread"])))
        else:
            gdb.write(where(block, kf_focus.shown(block)) + "\n")
            return
        number = kf_focus.shown(block)
        runs = kf_focus.running(block)
        state = "" if number == runs else f": {block.states(runs)[number]}"
        gdb.write(f"[Switching focus to CUDA {where(block, number)}{state}]\n")
        gdb.execute("frame")


@command("cuda break", gdb.COMMAND_BREAKPOINTS, gdb.COMPLETE_LOCATION)
def cuda_break(argument):
    """Stop in one block or one thread: cuda break WHERE [block B] [thread T] [if CONDITION].

    WHERE is what `break` takes. B and T are n, x,y or x,y,z."""
    rest, _, condition = re.sub(r"\s+", " ", argument).partition(" if ")
    wanted = {}
    while found := re.fullmatch(rf"(.*?)\s*\b(block|thread)\s*({INDEX})\s*", rest):
        rest = found[1]
        if found[2] in wanted:
            raise gdb.GdbError(f"`{found[2]}` is given twice.")
        wanted[found[2]] = parse_index(found[3])
    if not rest:
        raise gdb.GdbError("Usage: cuda break WHERE [block B] [thread T] [if CONDITION]")
    try:
        gdb.decode_line(rest)  # a breakpoint of Python's would wait for a library that has the place
    except gdb.error as error:
        raise gdb.GdbError(str(error)) from error
    ThreadBreakpoint(rest, wanted.get("block"), wanted.get("thread"), condition)


class ThreadBreakpoint(gdb.Breakpoint):
    """A breakpoint for one block, one thread, or both."""

    def __init__(self, place: str, block: tuple | None, thread: tuple | None, condition: str):
        super().__init__(place)
        self.only_block, self.only_thread, self.only_if = block, thread, condition

    def stop(self) -> bool:
        at = kf_state.block_of_thread()
        if at is None:
            return False
        if self.only_block not in (None, at.index) or self.only_thread not in (None, at.thread_at(at.current)):
            return False
        return not self.only_if or bool(gdb.parse_and_eval(self.only_if))


@command("info cuda", gdb.COMMAND_STATUS, prefix=True)
def info_cuda(argument):
    """What runs: info cuda kernels, info cuda threads."""
    raise gdb.GdbError("Usage: info cuda kernels, info cuda threads. `cuda help` lists all commands.")


@command("info cuda kernels", gdb.COMMAND_STATUS)
def info_kernels(argument):
    """The kernel that runs, its grid, and where it was launched."""
    kf_focus.focused()  # refuses where there is none
    launches = {}
    for block in kf_state.blocks_at_work():
        launches.setdefault(int(block.launch.address), []).append(block)
    for blocks in launches.values():
        config = blocks[0].config
        grid = kf_state.triple(member(config, "grid"))
        shared = int(member(config, "shared"))
        sizes = f"{text_of(grid)}, {text_of(blocks[0].dim)}" + (f", {shared}" if shared else "")
        line = f"{pathlib.PurePath(member(config, 'file').string()).name}:{int(member(config, 'line'))}"
        ended = int(kf_state.atomic(member(blocks[0].launch, "exits")))
        at_work = ", ".join(text_of(block.index) for block in blocks)
        gdb.write(f"{blocks[0].kernel()}<<<{sizes}>>>, launched at {line}\n")
        gdb.write(f"  {grid[0] * grid[1] * grid[2]} blocks: {ended} ended; at work: {at_work}\n")


@command("info cuda threads", gdb.COMMAND_STATUS)
def info_threads(argument):
    """What each thread of the blocks at work does: info cuda threads [block B].

    Neighbours that do the same share a line. `*` marks the thread that gdb shows."""
    found = re.fullmatch(rf"\s*(?:block\s*({INDEX}))?\s*", argument)
    if not found:
        raise gdb.GdbError("Usage: info cuda threads [block B]")
    focused = kf_focus.focused()
    for block in [find_block(parse_index(found[1]))] if found[1] else kf_state.blocks_at_work():
        write_threads(block, block.index == focused.index)


def write_threads(block: Block, in_focus: bool) -> None:
    """The table of a block's threads."""
    runs, shown = kf_focus.running(block), kf_focus.shown(block) if in_focus else None
    states = block.states(runs)
    if runs is not None:
        states[runs] += kf_focus.running_line(block)
    groups = []
    for number, state in enumerate(states):
        if groups and groups[-1][2] == state and shown not in (number, number - 1):
            groups[-1][1] = number
        else:
            groups.append([number, number, state])
    rows = [("", "ThreadIdx", "To ThreadIdx", "Count", "State")]
    for first, last, state in groups:
        ends = [text_of(block.thread_at(number)) for number in (first, last)]
        rows.append(("*" if first == shown else "", *ends, str(last - first + 1), state))
    width = [max(len(row[column]) for row in rows) for column in range(4)]
    gdb.write(f"kernel {block.kernel()}, block {text_of(block.index)}\n")
    for mark, first, last, count, state in rows:
        gdb.write(f"{mark:1} {first:{width[1]}}  {last:{width[2]}}  {count:>{width[3]}}  {state}\n")


def find_block(index: tuple[int, int, int]) -> Block:
    """The block with this index, if it is at work."""
    at_work = kf_state.blocks_at_work()
    for block in at_work:
        if block.index == index:
            return block
    there = ", ".join(text_of(block.index) for block in at_work) or "none"
    raise gdb.GdbError(f"Block {text_of(index)} is not at work; these are: {there}.")


def where(block: Block, number: int | None) -> str:
    """Kernel, block and thread, in words."""
    thread = f", thread {text_of(block.thread_at(number))}" if number is not None else ""
    return f"kernel {block.kernel()}, block {text_of(block.index)}{thread}"


# Shared memory


@command("cuda shared", gdb.COMMAND_DATA, gdb.COMPLETE_SYMBOL)
def cuda_shared(argument):
    """Print shared memory of the block: cuda shared [ARRAY [N | RxC]].

    Without ARRAY it lists the variables. A pointer or an array declared `extern` may be followed by the number of its
    elements, or of rows and columns; without one, all that is left of the dynamic shared memory is printed. An element
    of a floating-point type that nothing has been written to is shown as `-`."""
    block = kf_focus.focused()
    if not argument.strip():
        list_shared(block)
        return
    name, *counts = re.fullmatch(r"\s*(.+?)(?:\s+(\d+)(?:\s*x\s*(\d+))?)?\s*", argument).groups()
    address, element, shape = find_array(block, name, [int(count) for count in counts if count])
    lines = rows(address, element, shape)
    unwritten = "; - has not been written" if any(re.search(r" -( |$)", line) for line in lines) else ""
    gdb.write(f"{name}: {array_text(element, shape)}, block {text_of(block.index)}{unwritten}\n")
    gdb.write("".join(f"{line}\n" for line in lines))


def list_shared(block: Block) -> None:
    """A line for each variable."""
    for name, (slot, _) in static_variables(block).items():
        kind = declared_type(slot)
        words = array_text(*shape_of(kind)) if kind is not None else "of a type that is not known"
        gdb.write(f"{name}: {words}, {int(member(slot, 'size'))} bytes, {kf_state.place(slot)}\n")
    gdb.write(f"dynamic: {int(member(block.config, 'shared'))} bytes\n")


class Printer:
    """What gdb prints in the place of a value's members: what the function returns."""

    def __init__(self, to_string):
        self.to_string = to_string


def find_printer(value: gdb.Value) -> Printer | None:
    """Prints a half or a bfloat16 as a number, and a kernel's name in the place of the emulation's record of it, which
    `info locals` would spell out."""
    name = str(value.type.strip_typedefs().unqualified())
    if name in HALF_TYPES:
        return Printer(lambda: f"{real_number(HALF_TYPES[name], struct.pack('<H', int(member(value, 'bits')))):g}")
    if name == "kf::simt::KernelInfo":
        return Printer(lambda: kf_state.short_name(member(value, "signature").string()))
    return None


# What happens by itself


def stopped(event: gdb.StopEvent) -> None:
    """Says after each stop in a kernel which thread it is. At an error it shows the thread that the error names."""
    Stepping.end()
    try:
        block = kf_state.block_of_thread()
    except gdb.GdbError as error:
        gdb.write(f"[{error}]\n")
        return
    if block is None:
        return
    hit = getattr(event, "breakpoints", [])
    error = next((b for b in hit if isinstance(b, ErrorBreakpoint)), None)
    if error is None:
        gdb.write(f"[CUDA {where(block, kf_focus.shown(block))}]\n")
        return
    frame = gdb.newest_frame()
    number, text = int(frame.read_var("thread")), string(frame.read_var("what"))
    gdb.write(f"\nCUDA error: {where(block, number)}: {text}\n")
    if number == kf_focus.running(block) or (block.fiber(number) is not None and not block.has_exited(number)):
        kf_focus.show_thread(block, number)
    gdb.execute("frame")


def string(value: gdb.Value) -> str:
    """A std::string of libstdc++, or whatever gdb makes of another library's."""
    if value.type.code == gdb.TYPE_CODE_REF:
        value = value.referenced_value()
    try:
        return value["_M_dataplus"]["_M_p"].string()
    except gdb.error:
        return str(value)


class ErrorBreakpoint(gdb.Breakpoint):
    """Stops where the emulation records an error, before the threads' stacks are gone."""

    def __init__(self):
        super().__init__("kf::simt::Worker::record_error", internal=True)
        self.silent = True


class OwnFrame(FrameDecorator):
    """A frame of the user's source, as `frame` prints it: without the types of the parameters."""

    def function(self):
        """The function's name, or what gdb says where there is none."""
        name = self.inferior_frame().name()
        return super().function() if name is None else re.sub(r"(?<=[\w>])\(.*", "", name)


class HideEmulation:
    """Leaves the emulation's frames out of `backtrace`."""

    name, priority, enabled = "kernel-fusion", 100, True

    def filter(self, frames):
        """`frames` without those between a kernel and the launch, those below a barrier or a shuffle, and that of the
        running thread before those of another one."""
        held = None
        for decorated in frames:
            frame = decorated.inferior_frame()
            if frame.level() == 0 and kf_focus.is_shown_here():
                continue
            sal = frame.find_sal()
            path = sal.symtab.fullname() if sal.symtab is not None else ""
            emulation = bool(kf_state.OF_EMULATION.search(path)) or frame.name() == "kf_simt_begin"
            # The lambda that the rewriter puts around a kernel's call lies in the user's file.
            if held is not None and not (emulation and "operator()" in (held.inferior_frame().name() or "")):
                yield held
            held = None if emulation else OwnFrame(decorated)
        if held is not None:
            yield held


class Stepping:
    """While one thread steps, others of the grid do not run in between.

    To the emulation's watchdog, on an OS thread of its own, a thread at a prompt looks like one that computes for long:
    it would let another thread have a turn, or another block begin. So where only one block is at work, only its OS
    thread runs; where blocks may wait for each other, all run, and the watchdog's signal is dropped.
    """

    locking = None  # the setting of gdb before

    @classmethod
    def begin(cls) -> None:
        """To be called before a step."""
        try:
            block = kf_state.block_of_thread()
        except gdb.GdbError:
            return  # not a program of ours, as is said after each stop; it may step nevertheless
        if cls.locking is None and block is not None:
            cls.locking = gdb.parameter("scheduler-locking")
            if len(kf_state.blocks_at_work()) == 1:
                gdb.execute("set scheduler-locking on")
            gdb.execute("handle SIGURG nostop noprint nopass", to_string=True)

    @classmethod
    def end(cls) -> None:
        """To be called after each stop."""
        if cls.locking is not None:
            gdb.execute(f"set scheduler-locking {cls.locking}")
            gdb.execute("handle SIGURG nostop noprint pass", to_string=True)
            cls.locking = None


@command("cuda before-step", gdb.COMMAND_OBSCURE)
def before_step(argument):
    """Called by gdb before each command that steps: refuses where the thread shown does not run."""
    if kf_focus.is_shown_here():
        index = kf_focus.focused().thread_at(kf_focus.shown_thread.number)
        raise gdb.GdbError(
            f"Thread {text_of(index)} does not run, so it cannot step. "
            "`cuda thread running` goes back to the one that runs; `continue` goes on with the program."
        )
    kf_focus.unshow()
    Stepping.begin()


@command("cuda before-run", gdb.COMMAND_OBSCURE)
def before_run(argument):
    """Called by gdb before the program goes on: the thread that runs is shown again."""
    kf_focus.unshow()


STEPS = ("step", "next", "stepi", "nexti", "finish", "until", "advance", "jump")
RUNS = ("continue", "run", "start", "starti", "signal", "detach", "kill")


def set_up() -> None:
    """Makes what happens by itself."""
    for name in STEPS:
        gdb.execute(f"define hook-{name}\ncuda before-step\nend", to_string=True)
    for name in RUNS:
        gdb.execute(f"define hook-{name}\ncuda before-run\nend", to_string=True)
    gdb.execute("set print thread-events off")  # the OS threads are the emulation's affair
    gdb.events.stop.connect(stopped)
    gdb.events.cont.connect(lambda event: kf_focus.before_it_goes_on())  # an editor goes around the hooks
    gdb.unwinder.register_unwinder(None, kf_focus.Unwinder())
    gdb.events.exited.connect(lambda event: kf_focus.forget())
    gdb.frame_filters[HideEmulation.name] = HideEmulation()
    gdb.pretty_printers.append(find_printer)
    for folder in ("src/*", "include/*", "include/*/*"):
        gdb.execute(f"skip -gfi {SIMT / folder}", to_string=True)
    ErrorBreakpoint()
    with contextlib.suppress(gdb.error):  # gdb before 12 has no such setting, and asks nothing
        gdb.execute("set debuginfod enabled off", to_string=True)
    # A block at a time, in the main thread; and no time limits, since a thread at a breakpoint takes its time.
    for name, value in (("THREADS", "1"), ("SPIN_SECONDS", "0"), ("BUSY_SECONDS", "0")):
        if f"KF_SIMT_{name}" not in os.environ:
            gdb.execute(f"set environment KF_SIMT_{name} {value}")


set_up()
