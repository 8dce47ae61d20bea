"""Checkpoints that survive a kill at any moment, and the model in the Hugging Face format."""

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from common.cli import RunStopped, blame
from common.clock import timed
from common.distributed import World, full_parameters
from common.run import checkpoints, how_to_continue, step_of, sync


@timed("save")
def save_checkpoint(
    folder: Path,
    step: int,
    policy: nn.Module,
    optimizer: Optimizer,
    parts: dict,
    world: World,
    keep: int,
) -> None:
    """Write `folder/checkpoints/step_<n>`: sharded weights and moments, and each rank's random
    number generators and the `state_dict()` of each of `parts` (name -> object).

    It is written under another name and renamed when complete: a kill at any moment leaves the
    older checkpoints usable, of which the newest `keep` stay. `optimizer` may be a list of several.
    """
    final = folder / f"checkpoints/step_{step:06d}"
    partial = folder / "checkpoints/partial"
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(policy, optimizer)
    # Of a full disk torch only says "unexpected pos 704 vs 598".
    free = f"where {shutil.disk_usage(folder).free // 2**20} MB are free"
    what = f"cannot save {final}, {free}; {how_to_continue(folder)} once that is fixed"
    with blame(what, RunStopped), first_failure():
        partial.mkdir(parents=True, exist_ok=True)
        dcp.save({"policy": weights, "optimizer": moments}, checkpoint_id=partial / "shards")
        generators = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if world.device.type == "cuda":
            generators["cuda"] = torch.cuda.get_rng_state()
        states = {name: part.state_dict() for name, part in parts.items()}
        path = partial / f"rank{world.rank}.pt"
        torch.save({"generators": generators, "parts": states}, path)
        sync(path)  # torch has synced the shards
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            sync(partial / "shards")
            sync(partial)
            partial.rename(final)
            sync(final.parent)
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """torch's CheckpointException lists one failure for each rank: raise the first one instead."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error


def load_checkpoint(
    checkpoint: Path | None, policy: nn.Module, optimizer: Optimizer, parts: dict, world: World
) -> int:
    """Restore a checkpoint in place, with the `parts` that it was saved with; returns its step, or
    0 where there is none: a new run.

    Weights and moments fit any number of ranks. A part has the state of its own rank; on a rank
    that did not exist when it was saved, that of the first one. So a part whose state belongs to
    one rank alone must notice this in its `load_state_dict`: the hf engine keeps its fresh seed,
    vcpo's queue refuses.
    """
    if checkpoint is None:
        return 0
    weights, moments = get_state_dict(policy, optimizer)
    wrong = f"--resume: {checkpoint} does not fit --model, or is damaged"
    with blame(f"{wrong}: then delete it, and the one before it is taken"), first_failure():
        shards = dcp.FileSystemReader(checkpoint / "shards")
        shards.read_metadata()  # if it is damaged, dcp.load would log a page of traceback
        dcp.load({"policy": weights, "optimizer": moments}, storage_reader=shards)
        path = checkpoint / f"rank{world.rank}.pt"
        if not path.exists():
            path = checkpoint / "rank0.pt"
        saved = torch.load(path, weights_only=True, map_location="cpu")
    set_state_dict(policy, optimizer, model_state_dict=weights, optim_state_dict=moments)
    generators = saved["generators"]
    random.setstate(generators["python"])
    torch.set_rng_state(generators["torch"])
    if "cuda" in generators and world.device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"])
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    return step_of(checkpoint)


def save_model(policy: nn.Module, tokenizer: Tokenizer, folder: Path, world: World) -> None:
    """Write the model in the Hugging Face format: loadable by transformers, vLLM, and `--model`.

    It is written under another name and renamed when complete.
    """
    weights = {}
    for name, full in full_parameters(policy):  # all ranks gather, the first one keeps
        if world.rank == 0:
            weights[name] = full.cpu()
    if world.rank == 0:
        partial = folder.with_name(f"{folder.name}.partial")
        with blame(f"cannot save {folder}; go on with --resume once that is fixed", RunStopped):
            policy.lm.save_pretrained(partial, state_dict=weights)
            generation = json.dumps(policy.lm.generation, indent=2)
            (partial / "generation_config.json").write_text(generation)
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
