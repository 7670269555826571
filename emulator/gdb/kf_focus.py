"""Showing a thread that does not run.

A thread of the grid that waits has left its registers on its own stack. While it is shown, gdb is told that these
registers belong to the caller of the innermost frame, which is the running thread's: from there on gdb unwinds the
stack of the thread that waits, and `backtrace`, `info locals` and `print` need nothing else. The registers themselves
stay as they are, so the program may go on at any time. Only `threadIdx` is changed in the program's memory, and
restored before it goes on.
"""

import struct

import gdb
import gdb.unwinder
from kf_state import Block, block_of_thread, blocks_at_work, line_text, own_frame, text_of


class Shown:
    """A thread that does not run and is shown in the place of the one that does."""

    def __init__(self, block: Block, number: int):
        self.os_thread = block.os_thread
        self.number = number
        self.running_line = running_line(block)
        self.saved = block.saved_registers(number)
        self.os_thread.switch()
        innermost = gdb.newest_frame()
        self.pc, self.sp = (int(innermost.read_register(name)) for name in ("pc", "sp"))
        self.address = int(gdb.parse_and_eval("&kf::simt::threadIdx"))
        self.bytes = bytes(gdb.selected_inferior().read_memory(self.address, 12))
        gdb.selected_inferior().write_memory(self.address, struct.pack("3I", *block.thread_at(number)))

    def restore(self) -> None:
        """Makes `threadIdx` what it was."""
        gdb.selected_inferior().write_memory(self.address, self.bytes)


shown_thread: Shown | None = None


class FrameId:
    """The identity of the innermost frame while another thread is shown.

    gdb takes a caller with a lower stack address for an error, and the other stack may lie anywhere; so this frame is
    said to lie near 0. Where gdb prints it nevertheless, its variables are unreadable, and not wrong.
    """

    sp = gdb.Value(16)

    def __init__(self, pc: int):
        self.pc = gdb.Value(pc)


class Unwinder(gdb.unwinder.Unwinder):
    """Leads from the innermost frame of an OS thread to the frames of the thread that is shown."""

    def __init__(self):
        super().__init__("kernel-fusion")

    def __call__(self, pending):
        """The registers of the caller, for the innermost frame only."""
        at = shown_thread
        if not is_shown_here():
            return None
        if (int(pending.read_register("pc")), int(pending.read_register("sp"))) != (at.pc, at.sp):
            return None
        caller = pending.create_unwind_info(FrameId(at.pc))
        for name, value in at.saved.items():
            # As a number of the register's own size.
            caller.add_saved_register(name, gdb.Value(value).cast(pending.read_register(name).type))
        return caller


def unshow() -> None:
    """Ends the showing of a thread that does not run, if there is one."""
    if shown_thread is not None:
        before_it_goes_on()
        gdb.invalidate_cached_frames()


def before_it_goes_on() -> None:
    """The same just before the program runs, when gdb has begun to and must not be disturbed: it forgets the frames."""
    global shown_thread
    if shown_thread is not None:
        was, shown_thread = shown_thread, None
        was.restore()


def forget() -> None:
    """The program has ended: there is nothing to restore."""
    global shown_thread
    shown_thread = None


def is_shown_here() -> bool:
    """Whether gdb, on the OS thread that is selected, shows a thread that does not run."""
    here = gdb.selected_thread()
    return shown_thread is not None and here is not None and here.num == shown_thread.os_thread.num


def is_shown_in(block: Block) -> bool:
    """Whether the thread that is shown is one of this block's that does not run."""
    return shown_thread is not None and shown_thread.os_thread.num == block.os_thread.num


def running(block: Block) -> int | None:
    """The number of the block's thread that runs."""
    selected, frame = gdb.selected_thread(), gdb.selected_frame()
    block.os_thread.switch()
    sp = int(gdb.newest_frame().read_register("sp"))
    selected.switch()
    frame.select()
    return block.running(sp)


def running_line(block: Block) -> str:
    """Where the thread that runs is in the user's source, as ` at FILE:LINE`."""
    if is_shown_in(block):
        return shown_thread.running_line
    selected, frame = gdb.selected_thread(), gdb.selected_frame()
    block.os_thread.switch()
    own = own_frame(gdb.newest_frame())
    line = line_text(own.find_sal()) if own is not None else ""
    selected.switch()
    frame.select()
    return line


def shown(block: Block) -> int | None:
    """The number of the thread whose frames gdb shows."""
    return shown_thread.number if is_shown_in(block) else running(block)


def focused() -> Block:
    """The block that the selected OS thread works on, or else the first one at work, which is then selected."""
    if gdb.selected_thread() is None:
        raise gdb.GdbError("The program is not running.")
    block = block_of_thread()
    if block is None:
        at_work = blocks_at_work()
        if not at_work:
            raise gdb.GdbError("No kernel is running here.")
        block = at_work[0]
        block.os_thread.switch()
    return block


def show_thread(block: Block, number: int) -> None:
    """Makes gdb show the frames of a thread, and selects the innermost one in the user's source."""
    global shown_thread
    runs = running(block)
    name = f"thread {text_of(block.thread_at(number))} of block {text_of(block.index)}"
    if number != runs and block.has_exited(number):
        raise gdb.GdbError(f"{name} has exited.")
    if number != runs and block.fiber(number) is None:
        raise gdb.GdbError(f"{name} has not begun.")
    unshow()
    block.os_thread.switch()
    frame = gdb.newest_frame()
    if number != runs:
        shown_thread = Shown(block, number)
        gdb.invalidate_cached_frames()
        frame = gdb.newest_frame().older()
    frame = own_frame(frame)
    if frame is not None:
        frame.select()
