"""Trains as train.py does, on several GPUs, or in several processes on a CPU.

torchrun --standalone --nproc-per-node 4 train_parallel.py --parallel ddp --model 124M --dtype bfloat16 …
torchrun --standalone --nproc-per-node 2 train_parallel.py --parallel tensor --steps 200

Each option of train.py is one here too, and --batch is that of all workers together. What the strategies are, and what
each moves: pages/parallel.md.
"""

# ruff: noqa: E402  arguments are read first, so that --help needs no build
import argparse

from training.command import make_parser as parser_of_train

TIMEOUT = 600
HINT = "; --resume goes on from the last checkpoint"


def make_parser() -> argparse.ArgumentParser:
    parser = parser_of_train()
    parser.description = "Trains a GPT-2 as train.py does, with several workers that torchrun has started."
    part = parser.add_argument_group("workers")
    add = part.add_argument
    add(
        "--parallel",
        choices=("ddp", "fsdp2", "tensor", "tensor+ddp"),
        default="ddp",
        help="each worker has the model, or shards of it, or its heads and columns; or groups of these (default: ddp)",
    )
    add("--tensor", type=int, default=2, metavar="N", help="of tensor+ddp: workers that share a model (default: 2)")
    add(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"a worker that waits longer for another ends the job (default: {TIMEOUT})",
    )
    return parser


if __name__ == "__main__":
    make_parser().parse_args()

import sys

import torch.distributed as dist
from model.processes import process_group
from rich.console import Console
from train import report, train_as_told
from training.parallel import Parallel, Replicated, Sharded

from kernel_fusion.console import make_console  # not installed? pip install -e ..


def worker_of(options: argparse.Namespace, device) -> Parallel:
    """The worker that this process is, by --parallel and --tensor."""
    if options.parallel == "fsdp2":
        return Sharded(device)
    tensor = {"ddp": 1, "tensor": dist.get_world_size(), "tensor+ddp": options.tensor}[options.parallel]
    return Replicated(device, tensor)


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    try:
        with process_group("train_parallel.py", options.device, timeout=options.timeout, hint=HINT) as device:
            worker = worker_of(options, device)
            worker.check_same({f"--{name.replace('_', '-')}": value for name, value in vars(options).items()})
            options.device = str(device)
            console = make_console() if worker.rank == 0 else Console(quiet=True)
            result = train_as_told(options, console, worker=worker)
            worker.first(lambda: report(console, result, options.device))
    except ValueError as error:
        sys.exit(f"train_parallel.py: {error}")


if __name__ == "__main__":
    main()
