"""A process that torchrun has started beside others: on a device of its own, and not alone when one of them ends."""

import atexit
import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

TIMEOUT = 600.0
GIVE_UP = 3  # seconds within which those who wait for the same worker end their waits
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")  # gloo's words


@contextlib.contextmanager
def process_group(
    program: str, kind: str | None = None, *, timeout: float = TIMEOUT, hint: str = ""
) -> Iterator[torch.device]:
    """This process as one of torchrun's workers, on a GPU of its own, which talk by NCCL, or on the CPU, by gloo. Where
    one fails, or is ended, one line says so, and all end. On the CPU the process ends with the context: see `leave`.

    Args:
        program: whose name stands before the line.
        kind: of device, "cuda" or "cpu"; None takes GPUs where there are any.
        timeout: in seconds; a worker that waits longer for another gives up.
        hint: behind the line that says that a worker has ended.

    Raises:
        ValueError: torchrun has not started it; another device; fewer GPUs than workers.
    """
    if "RANK" not in os.environ:
        raise ValueError(f"it is started by torchrun: torchrun --standalone --nproc-per-node 2 {program} …")
    if kind not in (None, "cuda", "cpu"):
        raise ValueError(f"--device must be cuda or cpu, where each worker has its own, got {kind}")
    on_gpu = torch.cuda.is_available() if kind is None else kind == "cuda"
    if on_gpu and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        raise ValueError(
            f"{os.environ['LOCAL_WORLD_SIZE']} workers need as many GPUs, and there are {torch.cuda.device_count()}; "
            f"--device cpu does without"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=datetime.timedelta(seconds=timeout), device_id=device if on_gpu else None
    )
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()

    def tell(text: str) -> None:
        with contextlib.suppress(Exception):  # the store may be gone as well
            if store.add("told", 1) > 1:
                return
        print(f"{program}: {text}", file=sys.stderr, flush=True)

    def tell_who() -> None:
        silent = " and ".join(f"worker {other}" for other in silent_of(store, rank))
        tell(f"{silent or 'another worker'} has ended or hangs; others have waited for it, so all end{hint}")

    end_when_told(lambda: tell(f"another worker has ended, so all end{hint}"))
    finished = threading.Event()
    if on_gpu:
        end_when_stuck(device, tell_who, finished)
    try:
        yield device
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in LOST):
            tell_who()
        else:
            tell(str(error))
        sys.stdout.flush()
        os._exit(1)  # a process group that is broken cannot be taken down in order
    finished.set()
    dist.destroy_process_group()
    if not on_gpu:
        leave()


def leave() -> NoReturn:
    """Ends the process as Python does, but does not take Python down: gloo's threads outlive their group, and one that
    lets go of a tensor then asks for Python, finds none, and aborts the process (seen once in about 50)."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def silent_of(store: dist.Store, rank: int) -> list[int]:
    """The workers that have lost nobody: for them the others have waited. Those gave up at about the same time."""
    store.set(f"{rank} has lost another", "")
    for _ in range(10 * GIVE_UP):
        silent = [n for n in range(dist.get_world_size()) if not store.check([f"{n} has lost another"])]
        if not silent:
            break
        time.sleep(0.1)
    return silent


def end_when_told(tell: Callable[[], None]) -> None:
    """torchrun ends the others where one has ended. A worker may be waiting for it then, in a call that no handler of
    Python's interrupts: the signal wakes a thread, and that ends the process."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(writer)

    def wait() -> None:
        while True:
            if signal.SIGTERM in os.read(reader, 1):
                tell()
                os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def end_when_stuck(device: torch.device, tell: Callable[[], None], finished: threading.Event) -> None:
    """Who waits inside NCCL gets no exception. NCCL's watchdog notes that a sum has not come in time, and ends the
    process a minute later, with much text and no name: this thread looks at its note, and is earlier."""

    def wait() -> None:
        while not finished.wait(0.5):
            if gave_up(device):
                tell()
                os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def gave_up(device: torch.device) -> bool:
    """Whether a group of this process has waited too long, or lost a worker."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return any(group._get_backend(device).get_error() != ErrorType.SUCCESS for group in groups)
