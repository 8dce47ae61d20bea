"""Ranks: set-up from torchrun's environment, FSDP2 sharding, exact sums over ranks, clean stops."""

import os
import signal
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from common.plumbing.errors import BadInput, blame

# Of the collectives: between two of them ranks may sample, or judge, for very different times.
TIMEOUT = timedelta(hours=4)
CLOSING: list[Callable[[], None]] = []  # what must be shut down before the process group is
SMALL = 10_000_000  # parameters, below which gathering shards takes longer than computing


@dataclass
class World:
    """Who this process is among the ranks, and the device it computes on."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None  # a board on which all ranks write, also while one is lost


ALONE = World(0, 1, torch.device("cpu"))


def setup() -> World:
    """Join the process group: NCCL on GPUs, gloo on CPUs; `python file.py` is a world of one."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    alone = "MASTER_PORT" not in os.environ
    if alone and os.environ.get("WORLD_SIZE", "1") != "1":
        raise BadInput("WORLD_SIZE is set, but no MASTER_PORT: start several ranks with torchrun")
    for name, value in one.items():  # vLLM reads them, too
        os.environ[name] = value if alone else os.environ.get(name, value)
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu and local >= (found := torch.cuda.device_count()):
        raise BadInput(f"{local + 1} ranks on {found} GPU(s): --nproc_per_node {found}")
    wanted = torch.version.cuda and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    if wanted and not gpu and os.path.exists("/dev/nvidiactl"):
        # A driver too old: without this, eight ranks would train on eight threads.
        with blame("this machine's GPU cannot be used; on its CPU: CUDA_VISIBLE_DEVICES="):
            torch.cuda.init()
    if gpu:
        torch.cuda.set_device(device)
        # It would build a plan, 0.03 to 1 s, for every new shape: hundreds a step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more only pays above 10M parameters
    if alone:  # a store inside this process, no port to collide on
        store = dist.HashStore()
    else:
        # torchrun's store outlives a restart, with the addresses of the dead in it: a new name each
        # time. Several nodes count their restarts apart: for them docs/cluster.md names a variable.
        one_node = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT") if one_node else None
        meeting = next(rendezvous("env://", timeout=TIMEOUT))[0]
        store = dist.PrefixStore(f"restart {restart}", meeting)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, device, store)


def shard(policy: nn.Module, args: object, world: World, offload: bool = False) -> nn.Module:
    """FSDP2 in place: each decoder layer a unit, the rest (embedding, last norm, head) the root's.

    `--shard_ranks` neighbours share a model, and others hold replicas of their shards. The weights
    are rank 0's, handed out a unit at a time. Master weights, gradients and their sums over ranks
    stay float32; with dtype bfloat16 the forward and backward passes run on bfloat16 copies. Every
    unit gives its gathered copy back after a pass, the root too (its default is to wait for a
    backward pass, which a reference model never has). With `offload`, or `--offload`, shards are in
    CPU memory, where their gradients are added up and the optimiser steps.
    A rank with a model of its own in float32, not offloaded, has nothing to split or cast and keeps
    the plain module: FSDP2 would give the same gradient and, at the embedded model's size, take
    some 15% of the step for its bookkeeping. `divide_gradients` then does its sums over ranks.
    """
    if args.gradient_checkpointing:
        policy.train().lm.gradient_checkpointing_enable({"use_reentrant": False})
    if args.compile and getattr(policy, "routing", None) and policy.routing.active:
        raise BadInput("--compile: not with experts, whose choice is recorded as it is made")
    for layer in policy.lm.base_model.layers if args.compile else ():
        layer.forward = torch.compile(layer.forward, dynamic=True)  # of any rows and lengths
    offload = offload or args.offload
    small = sum(parameter.numel() for parameter in policy.parameters()) < SMALL
    sharing = args.shard_ranks or (1 if small else world.size)  # ranks
    if sharing == 1 and args.dtype == "float32" and not offload:
        return receive(policy, world)
    cast = (torch.bfloat16, torch.float32) if args.dtype == "bfloat16" else ()
    how = {"mp_policy": MixedPrecisionPolicy(*cast), "reshard_after_forward": True}
    shape, names = (world.size // sharing, sharing), ("replicas", "shards")
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=names)
    how["mesh"], policy.replicas = mesh["shards"], mesh["replicas"].get_group()
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for layer in policy.lm.base_model.layers:
        fully_shard(receive(layer, world), **how)
    return fully_shard(receive(policy, world), **how)


def receive(module: nn.Module, world: World) -> nn.Module:
    """Put rank 0's weights and buffers on every rank's device, in place of what a rank has.

    The others need no more than their shapes (the meta device): a node would else hold the model
    once for each of its ranks. What is sharded already is left alone, what is tied stays tied.
    """
    received = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, value in tensors.items():
                if value is None or isinstance(value, DTensor):
                    continue
                if id(value) not in received:
                    empty = torch.empty_like(value, device=world.device)
                    whole = empty if value.is_meta else value.detach().to(world.device)
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
    """The tensor itself, put together from its shards if it has any; all ranks together.

    Offloaded shards go to the GPU first, where gathering is fast.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()


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


def everywhere(names: Iterable[str]) -> list[str]:
    """The names that any rank gives, in the same order on all; all ranks together."""
    parts = [sorted(names)] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(parts) > 1:
        dist.all_gather_object(parts, parts[0])
    return sorted(set().union(*parts))


def gather(values: Tensor, world: World) -> Tensor:
    """The ranks' vectors, of any lengths, end to end in rank order, on every rank."""
    parts = [None] * world.size
    dist.all_gather_object(parts, values.cpu())
    return torch.cat(parts).to(values.device)


def divide_gradients(policy: nn.Module, count: float | Tensor, world: World) -> None:
    """From each rank's gradient of its own sum to the gradient of the mean over all ranks.

    `count` is what this rank has summed over. FSDP has averaged the gradients over the ranks that
    share a model in each backward pass: times their number that is a sum. Over replicas, a plain
    module's in one message, they are summed here, once for all micro-batches. Over what all ranks
    have counted, that is the mean that the objective asks for, whatever the micro-batches and the
    number of ranks.
    """
    gradients, averaged = [one.grad for one in policy.parameters() if one.grad is not None], 1
    if isinstance(gradients[0], DTensor):
        averaged = gradients[0].device_mesh.size()  # ranks
        for gradient in gradients if averaged < world.size else ():
            dist.all_reduce(gradient.to_local(), group=policy.replicas)
    elif world.size > 1:
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, gradients)
    factor = averaged / global_sum({"count": count}, world)["count"]
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
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup: the user said to go on
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
