"""Several workers that train together, one a process: by data parallelism, FSDP2 or tensor parallelism.

A worker of `Replicated` has all of the model or, where a group of them shares it, a part; of `Sharded` it has a part of
each matrix, which FSDP2 gathers when it is needed. Both take their own windows of each batch, and all steps are those
of one worker that has the whole batch.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpt2_model import GPT2
from model import weights as weight_files
from model.all_reduce import Exchange, see_each_other
from model.tensor_parallel import TensorParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from training import checkpoint
from training.run import Run
from training.step import GraphStep, Part, cross_entropy, step, weights_in, weights_of
from training.worker import Found, Worker


class Parallel(Worker):
    """One of the workers of this process group: in a mesh of `shares` groups that have their own part of a batch, each
    of `tensor` workers that share a model."""

    def __init__(self, device: torch.device, tensor: int = 1):
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        if self.workers % tensor:
            raise ValueError(f"--tensor must divide {self.workers}, the number of workers, got {tensor}")
        self.device, self.tensor = device, tensor
        self.share, self.shares = self.rank // tensor, self.workers // tensor
        shape, names = (self.shares, tensor), ("data", "tensor")
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)

    # ---- what all must agree about ----

    def check(self, run: Run) -> None:
        if run.batch % (run.accumulate * self.shares):
            raise ValueError(
                f"train: `batch` must be a multiple of {run.accumulate * self.shares}, `accumulate` times the workers "
                f"that share it, got {run.batch}"
            )

    def check_same(self, about: dict[str, Any]) -> None:
        own = dict(flat(about))
        every: list[Any] = [None] * self.workers
        dist.all_gather_object(every, own)
        for name in own:
            for rank, others in enumerate(every):
                if others.get(name) != every[0].get(name):
                    raise ValueError(
                        f"train: `{name}` must be the same on all workers, is {every[0].get(name)!r} on worker 0 and "
                        f"{others.get(name)!r} on worker {rank}"
                    )

    def first(self, work: Callable[[], Found]) -> Found | None:
        found, failed = None, None
        if self.rank == 0:
            try:
                found = work()
            except Exception as error:
                failed = error
        self.agree(failed)
        return found

    def agree(self, failed: Exception | None) -> None:
        """Raises on all workers what has failed on one; waits for all."""
        kind = next((kind for kind in (OSError, ValueError) if isinstance(failed, kind)), RuntimeError)
        every: list[Any] = [None] * self.workers
        dist.all_gather_object(every, None if failed is None else (kind, str(failed)))
        for rank, error in enumerate(every):
            if error:
                kind, text = error
                raise kind(text if rank == 0 else f"worker {rank}: {text}") from failed

    # ---- a step ----

    def computing(self, model: GPT2, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        """In it a part of a batch goes forward and backward."""
        raise NotImplementedError

    def step(self, run: Run, device: torch.device) -> Callable[..., torch.Tensor]:
        own = {"backward": self.backward, "clip_gradients": self.clip}
        take = GraphStep(device, **own) if run.graph else functools.partial(step, **own)

        def taken_by_all(*given: Any, **options: Any) -> torch.Tensor:
            """The step of this worker; the loss of all."""
            loss = take(*given, **options)
            # NCCL's watchdog does not look into a graph. Of a sum behind it, it notes that it does not come.
            dist.all_reduce(loss, group=self.mesh.get_group("data"))
            if self.tensor > 1:
                dist.all_reduce(loss, op=dist.ReduceOp.MAX, group=self.mesh.get_group("tensor"))  # all have the same
            return loss

        return taken_by_all

    def backward(self, model: GPT2, parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
        """As `training.step.backward`, of all workers' parts; returns this worker's share of the loss. Gradients move
        once, behind the last part."""
        weights = weights_of(parts)
        counted: int | torch.Tensor = sum(weights)
        if isinstance(counted, torch.Tensor):
            counted = counted.float()
            dist.all_reduce(counted, group=self.mesh.get_group("data"))
        else:
            counted *= self.shares  # all have as many
        total = torch.zeros((), device=self.device)
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            with self.moving(model, number == len(parts) - 1), self.computing(model, dtype):
                loss = self.loss(model, part) * weight / counted
                with torch.autocast(self.device.type, enabled=False):  # which is for the way there alone
                    loss.backward()
            total += loss.detach()
        return total

    def loss(self, model: GPT2, part: Part) -> torch.Tensor:
        return cross_entropy(model, part)

    def moving(self, model: GPT2, last: bool) -> contextlib.AbstractContextManager:
        """In it, a backward pass adds up the workers' gradients only if it is the last."""
        raise NotImplementedError

    def is_split(self, model: GPT2, name: str) -> bool:
        """Whether a worker has a part of this parameter only."""
        raise NotImplementedError

    def clip(self, model: GPT2, most: float) -> None:
        """As `training.step.clip_gradients`: a split parameter's square is a sum over workers, a whole one's is not."""
        grads: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            grads[self.is_split(model, name)].append(grad.to_local() if isinstance(grad, DTensor) else grad)
        square = nn.utils.get_total_norm(grads[False]).square()
        if grads[True]:
            split = nn.utils.get_total_norm(grads[True]).square()
            dist.all_reduce(split, group=self.splitting())
            square = square + split
        factor = (most / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads[True] + grads[False], factor)

    def splitting(self) -> dist.ProcessGroup:
        """The workers over which parameters are split."""
        return self.mesh.get_group("tensor")


def flat(about: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of dicts in it in place of these."""
    for name, value in about.items():
        yield from flat(value) if isinstance(value, dict) else [(name, value)]


class Replicated(Parallel):
    """Data parallel, and tensor parallel where more than one worker shares a model. Checkpoints are those of train.py:
    they hold whole tensors, and any number of workers goes on from them."""

    exchange: Exchange | None = None  # sums gradients, where steps are graphs and workers see each other's memory

    def place(self, model: GPT2, run: Run) -> GPT2:
        if self.tensor > 1:
            model = TensorParallel(model, self.mesh.get_group("tensor"))
        # Launched one by one, so many copies would hold the host for longer than they save.
        if self.shares > 1 and run.graph and see_each_other(self.mesh.get_group("data"), self.device):
            self.exchange = Exchange(self.mesh.get_group("data"), self.device)
        for parameter in model.parameters() if self.shares > 1 else ():
            dist.broadcast(parameter.detach(), group=self.mesh.get_group("data"), group_src=0)
        return model

    def computing(self, model: GPT2, dtype: torch.dtype) -> contextlib.AbstractContextManager:
        return weights_in(model, dtype, self.collect if self.shares > 1 else None)

    @contextlib.contextmanager
    def moving(self, model: GPT2, last: bool) -> Iterator[None]:
        self.last = last
        yield

    def backward(self, model: GPT2, parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
        self.buckets: dict[torch.Tensor, torch.Tensor] = {}  # by the first of the weights whose gradients it has
        self.sums: list[dist.Work] = []
        total = super().backward(model, parts, dtype)
        for each in self.sums:  # the GPU waits, the host does not
            each.wait()
        if self.exchange:
            self.exchange.wait()
        return total

    def collect(self, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """A block's gradients, of one part, to their bucket; after the last part its sum over workers begins."""
        bucket = self.buckets.pop(weights[0], None)  # what has come of the parts before
        directly = self.exchange and self.last and bucket is None  # these are all, and move as they are
        if not directly:
            together = torch.cat([gradient.flatten() for gradient in gradients])
            bucket = together.to(weights[0].dtype) if bucket is None else bucket.add_(together)
            gradients = [bucket]
        if not self.last:
            self.buckets[weights[0]] = bucket
            return
        if self.exchange:
            bucket = self.exchange.begin(weights[0], gradients)
        else:
            self.sums.append(dist.all_reduce(bucket, group=self.mesh.get_group("data"), async_op=True))
        for weight, own in zip(weights, bucket.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = own.view_as(weight)

    def is_split(self, model: GPT2, name: str) -> bool:
        return isinstance(model, TensorParallel) and model.is_split(name)

    def save(self, out, number, model, optimizer, about, *, keep, config):
        entries, parameters = whole_of(model, self.rank == 0)
        tensors = checkpoint.tensors_of(model, optimizer, gathering(model, self.rank == 0))
        self.first(lambda: checkpoint.write(out, number, entries | config, parameters, tensors, about, keep=keep))

    def load(self, path, model, optimizer):
        if not isinstance(model, TensorParallel):
            return super().load(path, model, optimizer)
        with torch.device("meta"):
            whole = dict(GPT2(model.whole_config).named_parameters())
        return checkpoint.load(path, model, optimizer, model.share, whole)

    def save_model(self, out, model, entries):
        sizes, parameters = whole_of(model, self.rank == 0)
        self.first(lambda: weight_files.write(out, sizes | entries, parameters))


def gathering(model: GPT2, keep: bool) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """What makes all of a worker's part of a parameter, or of what belongs to it. All workers call it: one after the
    other each comes together on every worker, and stays, in the host's memory, where `keep` is true."""

    def gather(name: str, part: torch.Tensor) -> torch.Tensor:
        if isinstance(part, DTensor):
            part = part.full_tensor()
        elif isinstance(model, TensorParallel):
            part = model.whole(name, part)
        return part.detach().cpu() if keep else part.new_empty(0)

    return gather


def whole_of(model: GPT2, keep: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The entries of the model's config and its whole parameters, by `gathering`."""
    config = model.whole_config if isinstance(model, TensorParallel) else model.config
    gather = gathering(model, keep)
    return config.entries(), {name: gather(name, part) for name, part in model.named_parameters()}


class Sharded(Parallel):
    """FSDP2. Each worker has a part of each matrix, of its gradient and of its moments; a block's are gathered when the
    block is computed. Vectors are a thousandth of a model, and whole everywhere, in float32.

    Checkpoints are of shards, by torch.distributed.checkpoint: each worker writes its own, and any number reads them.
    """

    def place(self, model: GPT2, run: Run) -> GPT2:
        half = run.torch_dtype != torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=run.torch_dtype if half else None, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        self.vectors = [p for p in model.parameters() if p.dim() < 2]
        options = {"mesh": self.mesh["data"], "mp_policy": policy, "ignored_params": set(self.vectors)}
        for block in model.h:
            fully_shard(block, **options)
        fully_shard(model, **options)
        for module in (model, *model.h):  # a sum: the loss is divided already
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, "loss")
        return model

    def backward(self, model: GPT2, parts: Sequence[Part], dtype: torch.dtype) -> torch.Tensor:
        total = super().backward(model, parts, dtype)
        grads = [p.grad for p in self.vectors]
        together = torch.cat(grads)
        dist.all_reduce(together, group=self.mesh.get_group("data"))
        torch._foreach_copy_(grads, list(together.split([len(grad) for grad in grads])))
        return total

    @contextlib.contextmanager
    def moving(self, model: GPT2, last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)
        yield

    @contextlib.contextmanager
    def computing(self, model: GPT2, dtype: torch.dtype) -> Iterator[None]:
        """By autocast: FSDP2 watches the parameters themselves, which `weights_in` puts copies in place of.

        Without a backward pass FSDP2 would leave the embedding gathered. A graph that is captured then would not
        gather it, and what is computed behind a replay would have it as it was before.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            yield
        model.reshard()

    def is_split(self, model: GPT2, name: str) -> bool:
        return isinstance(model.get_parameter(name), DTensor)

    def splitting(self) -> dist.ProcessGroup:
        return self.mesh.get_group("data")

    def save(self, out, number, model, optimizer, about, *, keep, config):
        from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save

        path = checkpoint.beside(checkpoint.place(out, number))
        try:
            self.first(lambda: checkpoint.begin(out, number))
            model.reshard()
            with quiet():
                save(self.state(model, optimizer), storage_writer=FileSystemWriter(path / checkpoint.SHARDS))
            self.first(lambda: checkpoint.finish(out, number, about, keep, (checkpoint.SHARDS,)))
        except (Exception, CheckpointException) as error:  # on all workers; the latter is no Exception
            failed = checkpoint.failure(out, number, in_a_line(error)) if self.rank == 0 else None
            self.agree(failed)

    def load(self, path, model, optimizer):
        from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load

        if not (path / checkpoint.SHARDS).exists():
            raise ValueError(f"train: {path} is not of shards: train.py, or another --parallel, goes on from it")
        for parameter in model.parameters():
            zero = torch.zeros((), device="cpu")
            optimizer.state[parameter] = {"step": zero if self.device.type == "cpu" else zero.to(self.device)} | {
                key: torch.zeros_like(parameter) for key in checkpoint.STATE[1:]
            }
        try:
            with quiet():
                load(self.state(model, optimizer), storage_reader=FileSystemReader(path / checkpoint.SHARDS))
        except CheckpointException as error:
            raise ValueError(f"train: {path / checkpoint.SHARDS} cannot be read: {in_a_line(error)}") from error
        return checkpoint.entries_of(path)["step"]

    def save_model(self, out, model, entries):
        model.reshard()
        sizes, parameters = whole_of(model, self.rank == 0)
        self.first(lambda: weight_files.write(out, sizes | entries, parameters))

    @staticmethod
    def state(model: GPT2, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Parameters and moments by name, as this worker has them: what is read is read into these."""
        found = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            found |= {f"{key}.{name}": optimizer.state[parameter][key] for key in checkpoint.STATE}
        return found


def in_a_line(error: BaseException) -> BaseException:
    """The first worker's error, where torch.distributed.checkpoint tells those of all, with all that was called."""
    for rank, (reason, _) in sorted(getattr(error, "failures", {}).items()):
        return OSError(f"worker {rank}: {reason}")
    return error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch.distributed.checkpoint about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
