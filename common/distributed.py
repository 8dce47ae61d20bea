"""Ranks: set-up from torchrun's environment, FSDP2 sharding, exact global sums, clean stops."""

import contextlib
import os
import signal
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

# Of the collectives: between two of them ranks may sample, or judge, for very different times.
TIMEOUT = timedelta(hours=4)
CLOSING: list[Callable[[], None]] = []  # what must be shut down before the process group is
SMALL = 10_000_000  # parameters, below which gathering shards takes longer than computing


class BadInput(ValueError):
    """Something the user gave is wrong: shown as one line, exit code 2, nothing written."""


class Refused(BadInput):
    """Bad input that all ranks refuse together: the first one says it for all."""


class RunStopped(RuntimeError):
    """Going on would train on wrong numbers: shown as one line, exit code 1."""


@contextlib.contextmanager
def blame(what: str, kind: type = BadInput) -> Iterator[None]:
    """Any error inside becomes one line for people: "`what` (its first line)".

    For other people's code, which raises many kinds: file formats, tokenizers, hub clients.
    """
    try:
        yield
    except (BadInput, RunStopped):
        raise
    except Exception as error:
        raise kind(f"{what} ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or of its cause's: what fits into one line."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass
class World:
    """Who this process is among the ranks, and the device it computes on."""

    rank: int
    size: int
    device: torch.device


def setup() -> World:
    """Join the process group: NCCL on GPUs, gloo on CPUs; `python file.py` is a world of one."""
    size, alone = from_environment("WORLD_SIZE", 1, least=1), "MASTER_PORT" not in os.environ
    rank, local_rank = from_environment("RANK", 0, most=size - 1), from_environment("LOCAL_RANK", 0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)}
    host = os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if alone and size > 1:
        raise BadInput(f"WORLD_SIZE={size}, but no MASTER_PORT: start several ranks with torchrun")
    if torch.cuda.is_available():
        found = torch.cuda.device_count()
        if local_rank >= found:
            wrong = f"{local_rank + 1} ranks or more on a machine with {found} GPU(s)"
            raise BadInput(
                f"{wrong}: --nproc_per_node {found}, or CUDA_VISIBLE_DEVICES= for its CPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # More only pays above 10M parameters.
        torch.set_num_threads(from_environment("OMP_NUM_THREADS", 1, least=1))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if alone:  # a store inside this process, no port to collide on
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return World(rank, size, device)
    port = from_environment("MASTER_PORT", 0, least=1, most=65535)
    # torchrun's store outlives a restart, with the addresses of the dead in it: a new name each
    # time. Several nodes count their restarts apart: for them docs/gpu.md names a variable.
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") if one_node else None
    with blame(f"ranks cannot meet at {host}:{port}", RunStopped):
        store = next(rendezvous("env://", timeout=TIMEOUT))[0]
        how = {"store": dist.PrefixStore(f"restart {restart}", store), "timeout": TIMEOUT}
        dist.init_process_group(backend, rank=rank, world_size=size, **how)
    return World(rank, size, device)


def from_environment(name: str, default: int, least: int = 0, most: int = 2**31) -> int:
    """A whole number that the launcher or the user set (of OpenMP's list the first)."""
    text = os.environ.get(name, "").split(",")[0] or str(default)
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    wrong = f"{name}={os.environ[name]} in the environment"
    raise BadInput(f"{wrong}: must be a number from {least} to {most}")


def shard(policy: nn.Module, args: object, world: World, offload: bool = False) -> nn.Module:
    """FSDP2 in place: each decoder layer a unit, the rest (embedding, last norm, head) the root's.

    `--shard_ranks` neighbours share a model, and others hold replicas of their shards. The weights
    are rank 0's, handed out a unit at a time. Master weights, gradients and their sums over ranks
    stay float32; with dtype bfloat16 the forward and backward passes run on bfloat16 copies. Every
    unit gives its gathered copy back after a pass, the root too (its default is to wait for a
    backward pass, which a reference model never has). With `offload` the shards wait in CPU memory.
    A rank with a model of its own in float32, not offloaded, has nothing to split or cast and keeps
    the plain module: FSDP2 would give the same gradient and, at the embedded model's size, take
    some 15% of the step for its bookkeeping. `scale_gradients` then does its sums over ranks.
    """
    small = sum(parameter.numel() for parameter in policy.parameters()) < SMALL
    sharing = args.shard_ranks or (1 if small else world.size)  # ranks
    if sharing == 1 and args.dtype == "float32" and not offload:
        return receive(policy, world)
    cast = (torch.bfloat16, torch.float32) if args.dtype == "bfloat16" else ()
    how = {"mp_policy": MixedPrecisionPolicy(*cast), "reshard_after_forward": True}
    replicas, names = world.size // sharing, ("replicas", "shards")
    mesh = init_device_mesh(world.device.type, (replicas, sharing), mesh_dim_names=names)
    how["mesh"] = mesh if replicas > 1 else mesh["shards"]
    if offload and world.device.type == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    for layer in policy.lm.base_model.layers:
        fully_shard(receive(layer, world), **how)
    return fully_shard(receive(policy, world), **how)


def receive(module: nn.Module, world: World) -> nn.Module:
    """Put rank 0's weights and buffers on every rank's device, in place of what a rank has.

    A rank other than 0 needs no more than their shapes (the meta device). What is sharded already
    is left alone, and what is tied stays tied.
    """
    received = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, value in tensors.items():
                if value is None or isinstance(value, DTensor):
                    continue
                if id(value) not in received:
                    own, where = value.detach(), {"device": world.device}
                    whole = torch.empty_like(own, **where) if own.is_meta else own.to(**where)
                    if world.size > 1:
                        dist.broadcast(whole, src=0)
                    trained = isinstance(value, nn.Parameter)
                    received[id(value)] = nn.Parameter(whole) if trained else whole
                tensors[name] = received[id(value)]
    return module


def full_parameters(
    policy: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name as in the Hugging Face model, whole tensor), one at a time; all ranks together.

    Cast to `dtype` before they are gathered: half the traffic, and the same bfloat16 numbers.
    """
    for name, parameter in policy.lm.named_parameters():
        yield name, whole_tensor(parameter.detach().to(dtype or parameter.dtype))


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, put together from its shards if it has any; all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def global_sum(values: dict[str, float | Tensor], world: World) -> dict[str, float]:
    """Each entry summed over all ranks in float64, or the maximum of one named `*_max`.

    Every rank gives the same keys.
    """
    names = sorted(values, key=lambda name: (name.endswith("_max"), name))
    split = sum(not name.endswith("_max") for name in names)
    own = {"dtype": torch.float64, "device": world.device}
    flat = torch.stack([torch.as_tensor(values[name], **own) for name in names])
    for part, operation in ((flat[:split], dist.ReduceOp.SUM), (flat[split:], dist.ReduceOp.MAX)):
        if len(part) and world.size > 1:
            dist.all_reduce(part, op=operation)
    return dict(zip(names, flat.tolist()))


def gather(values: Tensor, world: World) -> Tensor:
    """The ranks' vectors, of any lengths, end to end in rank order, on every rank."""
    parts = [None] * world.size
    dist.all_gather_object(parts, values.cpu())
    return torch.cat(parts).to(values.device)


@contextlib.contextmanager
def together(world: World, kind: type, what: str, *also: type) -> Iterator[None]:
    """Work on files inside; where it fails on one rank, all raise `kind`: "`what` (the cause)".

    To fail is to raise an OSError or one of `also`.
    """
    failure = ""
    try:
        yield
    except (BadInput, RunStopped) as error:
        failure = str(error)
    except (OSError, *also) as error:
        failure = f"{what} ({first_line(error)})"
    failures = [failure] * world.size
    if world.size > 1:
        dist.all_gather_object(failures, failure)
    if any(failures):
        raise kind(next(filter(None, failures)))


def scale_gradients(policy: nn.Module, factor: float) -> None:
    """Multiply every gradient by `factor`: sums become the mean that the objective asks for.

    A plain module on several ranks gets the mean over them here, which FSDP takes in each backward
    pass: one message for all gradients of an optimiser step. (All ranks have the same ones: a pass
    over no rows gives zeros.)
    """
    gradients = [one.grad for one in policy.parameters() if one.grad is not None]
    if dist.get_world_size() > 1 and not isinstance(gradients[0], DTensor):
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat.div_(dist.get_world_size()), gradients)
    for gradient in gradients:
        gradient.mul_(factor)


def clip_gradients(policy: nn.Module, max_norm: float) -> float:
    """Scale the gradient, over all shards, to norm `max_norm` at most; returns its norm before."""
    return whole_tensor(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)).item()


class StopFlag:
    """SIGINT, SIGTERM and SIGHUP finish the current step; a second one kills as usual."""

    def __init__(self):
        self.raised = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup the user said to go on.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._raise)

    def _raise(self, number: int, frame: object) -> None:
        self.raised = True
        signal.signal(number, signal.SIG_DFL)
        for output in (1, 2) if number == signal.SIGHUP else ():
            if stat.S_ISCHR(os.fstat(output).st_mode):  # the terminal is gone: writing would fail
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)

    def anywhere(self, world: World) -> bool:
        """True on all ranks once one was signalled: they must leave the loop at the same step."""
        return global_sum({"stop_max": float(self.raised)}, world)["stop_max"] > 0
