"""A process that torchrun has started beside others: on a device of its own, and not alone when one of them ends."""

import contextlib
import datetime
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

TIMEOUT = 600.0
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")  # gloo's words


@contextlib.contextmanager
def process_group(
    program: str, kind: str | None = None, *, timeout: float = TIMEOUT, hint: str = ""
) -> Iterator[torch.device]:
    """This process as one of torchrun's workers, on a GPU of its own, which talk by NCCL, or on the CPU, by gloo. Where
    one fails, or is ended, one line says so, and all end.

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

    end_when_told(lambda: tell(f"another worker has ended, so all end{hint}"))
    try:
        yield device
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, dist.DistError) or any(sign in str(error) for sign in LOST):
            tell(f"worker {rank} has lost another one, so all end{hint}")
        else:
            tell(str(error))
        sys.stdout.flush()
        os._exit(1)  # a process group that is broken cannot be taken down in order
    dist.destroy_process_group()


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
