"""Ranks: set-up from torchrun's environment, FSDP2 sharding, exact sums over ranks, clean stops."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from common.cli import Flags, blame, say

# How long a collective waits for the last rank. Sampling and verifying may take ranks very unequal
# times. But they start an update together, because they have just agreed on the number of
# micro-batches, so a rank that is missing there has failed.
TIMEOUT = timedelta(hours=4)
UPDATE_TIMEOUT = timedelta(minutes=20)
LAYER = re.compile(r"\.\d+\.")  # in the names of a layer: model.layers.3.mlp, transformer.h.3.attn
SMALL = 10_000_000  # parameters: in smaller models gathering shards takes longer than computing


class StopFlag:
    """A flag that SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP (a closed terminal) raise: the run
    ends after this step, or this batch of an evaluation. A second signal kills as usual. A SIGHUP
    that nohup ignores stays ignored."""

    def __init__(self):
        self.raised = False

    def listen(self) -> None:
        """Start to catch signals. Until then a signal ends the program at once."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._raise)

    def _raise(self, number: int, frame: object) -> None:
        self.raised = True
        signal.signal(number, signal.SIG_DFL)

    def anywhere(self, world: "World") -> bool:
        """Tell all ranks whether any was signalled: they must leave the loop at the same step."""
        return global_max({"stop": float(self.raised)}, world)["stop"] > 0


@dataclass
class World:
    """This process's place among the ranks, and the device that it computes on."""

    rank: int
    size: int
    device: torch.device
    store: dist.Store | None = None  # key-value store of all ranks; works even if a rank has died
    groups: dict = field(default_factory=dict)  # see update_groups
    stop: StopFlag = field(default_factory=StopFlag)
    # What to close at the end, while the ranks can still communicate; `launch` closes it.
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


ALONE = World(0, 1, torch.device("cpu"))


def setup() -> World:
    """Join the process group, by NCCL on GPUs or gloo on CPUs. `python file.py` is one rank."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if alone and os.environ.get("SLURM_NTASKS", "1") != "1":
        say("SLURM_NTASKS is not 1, but this process is a run of its own: use torchrun")
    for name, value in defaults.items():  # vLLM reads these variables, too
        os.environ[name] = value if alone else os.environ.get(name, value)
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        # cuDNN would build a plan for every new shape, hundreds in a step, each up to 1 s.
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # more threads pay only above 10M parameters
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    if not alone and "TORCHELASTIC_RUN_ID" not in os.environ:  # the others may never be started
        say(f"rank {rank} of {size} waits for the others at {os.environ['MASTER_ADDR']}")
    with blame(f"rank {rank} of {size} cannot join the others"):
        if alone:  # this store needs no port, which another program could have taken
            store = dist.HashStore()
        else:
            store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    return World(rank, size, device, store)


def shard(policy: nn.Module, args: Flags, world: World, offload: bool = False) -> nn.Module:
    """Shard the policy in place with FSDP2, and give every rank the weights of rank 0.

    FSDP gathers and frees weights unit by unit. Each decoder layer is a unit, and the root unit
    holds embedding, last norm and head. `--shard_ranks` neighbouring ranks share one model; every
    such group holds a replica. Master weights, gradients and their sums are float32. With dtype
    bfloat16, forward and backward run on bfloat16 copies. With `offload` or `--offload`, shards,
    gradients and the optimiser step are in CPU memory. `--compile` compiles layers before that.
    A float32 model that is neither shared nor offloaded stays a plain module, because FSDP2 would
    give the same gradient but add 15% to a step at the embedded model's size.
    """
    # Find the decoder's layers by type: families name them differently.
    layers = [layer for layer in policy.modules() if isinstance(layer, GradientCheckpointingLayer)]
    size = sum(parameter.numel() for parameter in policy.parameters())
    if args.compile:
        policy.compiled = True
        for layer in layers:
            layer.forward = partial(compiled(type(layer).forward, dynamic=True), layer)
    if args.gradient_checkpointing:
        for layer in layers:  # transformers would do it in training mode only, and with dropout
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    offload = offload or args.offload
    sharing = args.shard_ranks or (1 if size < SMALL else world.size)  # ranks
    plain = sharing == 1 and args.dtype == "float32" and not offload
    if plain and world.size == 1:
        return broadcast_module(policy, world)
    sharers, _ = update_groups(world, sharing)  # all ranks must create their groups together
    if plain:
        return broadcast_module(policy, world)
    options = {
        "mesh": DeviceMesh.from_group(sharers, world.device.type),
        # Every unit frees its gathered weights after a pass. By default the root unit keeps them
        # for a backward pass, but a reference model has none.
        "reshard_after_forward": True,
    }
    if args.dtype == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    for layer in layers:
        fully_shard(broadcast_module(layer, world), **options)
    return fully_shard(broadcast_module(policy, world), **options)


@cache
def compiled(function: Callable, dynamic: bool | None = None) -> Callable:
    """Compile a function at its first call, for inputs of all shapes (`dynamic`), or for these at
    the second shape (None)."""
    # Round bfloat16 numbers inside a fused kernel as uncompiled layers do. The hf sampler is not
    # compiled, and must compute the same log-probs.
    options = {"emulate_precision_casts": True}
    # All layers of all models share this limit (default: 8). Policy and reference need more graphs:
    # with gradient, without it, for frozen weights, and each of these for one row.
    return torch.compile(function, dynamic=dynamic, recompile_limit=64, options=options)


def update_groups(world: World, sharing: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's two groups in the update: the `sharing` neighbours that share one model,
    and the ranks that hold the same shards in other replicas. All models use the same groups."""
    if sharing not in world.groups:
        ranks = torch.arange(world.size).view(-1, sharing)  # [replicas, sharing]
        sharers, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), UPDATE_TIMEOUT)
        replicas, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), UPDATE_TIMEOUT)
        world.groups[sharing] = sharers, replicas
    return world.groups[sharing]


def broadcast_module(module: nn.Module, world: World) -> nn.Module:
    """Send rank 0's weights and buffers to every rank's device. All ranks must call it.

    The other ranks need only the shapes (meta device). Sharded tensors stay as they are, and tied
    tensors stay tied.
    """
    received = {}  # an old tensor's id -> the new one; tied tensors come up twice and stay one
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, value in tensors.items():
                if value is None or isinstance(value, DTensor):
                    continue
                if id(value) not in received:
                    received[id(value)] = broadcast_tensor(value, world)
                tensors[name] = received[id(value)]
    return module


def broadcast_tensor(value: Tensor, world: World) -> Tensor:
    """Return rank 0's values of one parameter or buffer, on this rank's device."""
    if value.is_meta:
        received = torch.empty_like(value, device=world.device)
    else:
        received = value.detach().to(world.device)
    if world.size > 1:
        dist.broadcast(received, src=0)
    return nn.Parameter(received) if isinstance(value, nn.Parameter) else received


def full_parameters(
    policy: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the Hugging Face model, whole tensor) one by one. All ranks must call it.

    Shards are cast to `dtype` before they are gathered, which gives the same numbers with half the
    traffic. Buffers that belong to a checkpoint, such as a router's bias, come last.
    """
    for name, parameter in policy.lm.named_parameters():
        yield name, whole_tensor(parameter.detach(), dtype)
    saved = policy.lm.state_dict().keys()
    for name, buffer in policy.lm.named_buffers():
        if name in saved:
            yield name, buffer


def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Cast a tensor to `dtype`, and gather it if it is sharded. All ranks must call it."""
    if isinstance(tensor, DTensor):  # offloaded shards go to the GPU first, which casts faster
        tensor = tensor.to(tensor.device_mesh.device_type)
    tensor = tensor.to(dtype or tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def global_sum(values: dict[str, float | Tensor], world: World) -> dict[str, float]:
    """Sum each entry over all ranks, in float64. All ranks must pass the same keys."""
    return reduced(values, world, dist.ReduceOp.SUM)


def global_max(values: dict[str, float | Tensor], world: World) -> dict[str, float]:
    """Return the largest value of each entry over all ranks, which must pass the same keys."""
    return reduced(values, world, dist.ReduceOp.MAX)


def reduced(
    values: dict[str, float | Tensor], world: World, operation: dist.ReduceOp
) -> dict[str, float]:
    """Combine each entry over all ranks, in float64."""
    if not values:
        return {}
    names = sorted(values)  # in the same order on all ranks
    mine = [torch.as_tensor(values[name], dtype=torch.float64) for name in names]
    flat = torch.stack([value.to(world.device) for value in mine])
    if world.size > 1:
        dist.all_reduce(flat, op=operation)
    return dict(zip(names, flat.tolist()))


def gather(values: Tensor, world: World) -> Tensor:
    """Concatenate the vectors of all ranks, of any lengths, in rank order, on every rank."""
    if world.size == 1:
        return values
    return torch.cat(from_all(values.cpu())).to(values.device)


def from_all(value: object, group: dist.ProcessGroup | None = None) -> list:
    """Return the values of all ranks (of a group), in rank order, on every rank."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def from_rank_0(value: object) -> object:
    """Return rank 0's value on every rank."""
    shared = [value]
    dist.broadcast_object_list(shared)
    return shared[0]


def total_count(count: float | Tensor, world: World) -> float:
    """Add up how many terms all ranks have summed; 1 if none, so that zero gradients stay zero."""
    return global_sum({"count": count}, world)["count"] or 1.0


def divide_gradients(policy: nn.Module, count: float, world: World) -> None:
    """Turn each rank's gradient of its own sum into the gradient of the mean over all ranks.

    `count` is the number of terms in the sums of all ranks. FSDP has averaged the gradients over
    the ranks that share a model. Multiplied by the number of these ranks they are sums again, which
    are then added up over replicas and divided by the count. The result is the gradient of the mean
    in the objective, for any micro-batches and any number of ranks.
    """
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    sharded = isinstance(gradients[0], DTensor)
    averaged = gradients[0].device_mesh.size() if sharded else 1  # ranks
    if averaged < world.size:
        _, replicas = update_groups(world, averaged)
        for gradient in gradients:
            dist.all_reduce(gradient.to_local() if sharded else gradient, group=replicas)
    for gradient in gradients:
        gradient.mul_(averaged / count)


def clip_gradients(policy: nn.Module, max_norm: float) -> float:
    """Scale the gradient of all shards to norm `max_norm` at most; return its norm before that."""
    return whole_tensor(torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)).item()
