"""Checkpoints that survive a kill at any moment, and the model in the Hugging Face format."""

import itertools
import random
import re
import shutil
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.distributed import Refused, RunStopped, World, full_parameters, together
from common.folder import checksum

KEEP_CHECKPOINTS = 3


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first; what has another name is none of ours."""
    named = (path for path in folder.glob("step_*") if re.fullmatch("step_[0-9]{6,}", path.name))
    return sorted(filter(Path.is_dir, named), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name tells."""
    return int(checkpoint.name.removeprefix("step_"))


def save_checkpoint(
    folder: Path, step: int, policy: nn.Module, optimizer: Optimizer, state: dict, world: World
) -> None:
    """Write `folder/step_<n>`: sharded weights and moments, and each rank's RNGs and `state`.

    Written under another name, with checksums, and renamed when complete, so that a kill at any
    moment leaves the older ones usable. Several optimisers come as a list.
    """
    final, partial = folder / f"step_{step:06d}", folder / "partial"
    what = f"cannot save {final}; those before it are whole: mend that and go on with --resume"
    with together(world, RunStopped, what):
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    # get_state_dict lets an optimiser that never stepped take an empty step: undo its count.
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    unused = [one for one in optimizers if not one.state]
    weights, moments = get_state_dict(policy, optimizer)
    for values in (values for one in unused for values in one.state.values()):
        values["step"].zero_()
    try:
        # A full disk reaches us as any of these.
        with together(world, RunStopped, what, RuntimeError, CheckpointException):
            partial.mkdir(parents=True, exist_ok=True)  # another node may not have seen it yet
            shards = partial / "shards"
            dcp.save({"policy": weights, "optimizer": moments}, checkpoint_id=shards)
            own = [*shards.glob(f"__{world.rank}_*"), *[shards / ".metadata"][world.rank :]]
            share = {"generators": generators(world), "state": state, "ranks": world.size}
            share["sums"] = {path.name: checksum(path) for path in own}
            torch.save(share, partial / f"rank{world.rank}.pt")
    except RunStopped:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    with together(world, RunStopped, what):
        if world.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            saved = checkpoints(folder)
            place = saved.index(final)
            for old in saved[: place + 1][:-KEEP_CHECKPOINTS]:
                shutil.rmtree(old)
            for newer in saved[place + 1 :]:  # found damaged: no later resume shall meet it
                names = (folder / f"damaged{i}_{newer.name}" for i in itertools.count())
                newer.rename(next(path for path in names if not path.exists()))


def generators(world: World) -> dict:
    """The state of every random number generator that the trainer draws from."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if world.device.type == "cuda" else {})


def read_share(checkpoint: Path, world: World) -> dict:
    """What this rank saved, its files held to their checksums; any error says they are damaged.

    Where other ranks saved than read, they divide the files; one beyond gets the first share.
    """

    def read(rank: int) -> dict:
        path = checkpoint / f"rank{rank}.pt"
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():
                raise ValueError(f"{path.name} is not what was saved")
        return torch.load(path, weights_only=True, map_location="cpu")

    first = read(0)
    shares = {rank: read(rank) for rank in range(world.rank, first["ranks"], world.size)}
    for name, total in (pair for share in shares.values() for pair in share["sums"].items()):
        if checksum(checkpoint / "shards" / name) != total:
            raise ValueError(f"shards/{name} is not what was saved")
    return shares.get(world.rank, first)


def newest_whole(folder: Path, world: World, flag: str) -> tuple[Path, dict]:
    """The newest undamaged checkpoint in `folder`, for which `flag` asks, and this rank's share."""
    found, damaged = [checkpoints(folder)], []
    dist.broadcast_object_list(found)  # all ranks must take the same one
    for checkpoint in reversed(found[0]):
        try:
            # Damage takes many forms.
            with together(world, RunStopped, f"{checkpoint.name} is damaged", Exception):
                share = read_share(checkpoint, world)
            break
        except RunStopped as error:
            damaged.append(str(error))
    else:
        why = f"whole checkpoint in {folder}: {'; '.join(damaged)}"
        raise Refused(f"{flag}: no {why if damaged else f'checkpoint in {folder}'}")
    if damaged and world.rank == 0:
        print(f"{folder}: {'; '.join(damaged)}: going on from {checkpoint.name}", flush=True)
    return checkpoint, share


def load_checkpoint(
    folder: Path, policy: nn.Module, optimizer: Optimizer, world: World
) -> tuple[int, dict]:
    """Restore the newest whole checkpoint in place; returns its step and this rank's `state`.

    Weights and moments fit any number of ranks. `state["other_ranks"]` is how many saved, if not as
    many as now: a rank beyond has the first one's state, and what belongs to one rank alone is to
    be refused.
    """
    checkpoint, saved = newest_whole(folder, world, "--resume")
    weights, moments = get_state_dict(policy, optimizer)
    what = f"--resume: {checkpoint} does not fit --model"
    with together(world, Refused, what, CheckpointException):
        dcp.load({"policy": weights, "optimizer": moments}, checkpoint_id=checkpoint / "shards")
    set_state_dict(policy, optimizer, model_state_dict=weights, optim_state_dict=moments)
    states = saved["generators"]
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and world.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])
    other = saved["ranks"] if saved["ranks"] != world.size else 0
    if other and world.rank == 0:
        print(f"{checkpoint}: saved by {other} rank(s), now {world.size}: not to the bit")
    return step_of(checkpoint), saved["state"] | {"other_ranks": other}


def save_model(policy: nn.Module, tokenizer: Tokenizer, folder: Path, world: World) -> None:
    """Write the model in the Hugging Face format: loadable by transformers, vLLM, and `--model`."""
    weights = {}
    for name, full in full_parameters(policy):  # all ranks gather, the first one keeps
        if world.rank == 0:
            weights[name] = full.cpu()
    embedding, head = policy.lm.get_input_embeddings(), policy.lm.get_output_embeddings()
    if world.rank == 0 and head.weight is embedding.weight:
        shared = next(name for name in weights if name.endswith("embed_tokens.weight"))
        weights["lm_head.weight"] = weights[shared]
    with together(world, RunStopped, f"cannot write {folder}", SafetensorError):
        if world.rank == 0:
            policy.lm.save_pretrained(folder, state_dict=weights)
            tokenizer.save_pretrained(folder)
