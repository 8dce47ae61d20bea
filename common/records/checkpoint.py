"""Checkpoints that survive a kill at any moment, and the model in the Hugging Face format."""

import contextlib
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.core_model_loading import revert_weight_conversion

from common.cli import RunStopped, blame, say
from common.clock import timed
from common.distributed import World, full_parameters
from common.records.files import flush_to_disk

# The files of a tokenizer and its chat template.
OF_A_TOKENIZER = r"(tokenizer|vocab|merges|special_|added_|chat_|spiece|tekken).*|.*\.tiktoken"


def checkpoints(folder: Path) -> list[Path]:
    """List a run's checkpoints, oldest first; other names are ignored."""
    paths = (folder / "checkpoints").glob("step_*")
    complete = [path for path in paths if re.fullmatch("step_[0-9]{6,}", path.name)]
    return sorted(complete, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step_"))


def how_to_continue(folder: Path) -> str:
    """Say how to go on after the run in `folder` had to stop."""
    return "go on with --resume" if checkpoints(folder) else "nothing is saved yet: start again"


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
    """Write `folder/checkpoints/step_<n>`: sharded weights and moments, and for each rank its
    random number generators and the `state_dict()` of each of `parts` (name -> object).

    It is written under another name and renamed when complete, so a kill at any moment leaves the
    older checkpoints usable. The newest `keep` stay. `optimizer` may be a list of optimisers.
    """
    final = folder / f"checkpoints/step_{step:06d}"
    partial = folder / "checkpoints/partial"
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(policy, optimizer)
    # Say how much is free, because on a full disk torch only says "unexpected pos 704 vs 598".
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
        flush_to_disk(path)  # torch has synced the shards itself
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            flush_to_disk(partial / "shards")
            flush_to_disk(partial)
            partial.rename(final)
            flush_to_disk(final.parent)
    if world.rank == 0:
        for old in checkpoints(folder)[:-keep]:
            try:
                shutil.rmtree(old)
            except OSError as error:  # somebody's link, perhaps, to a disk with more room
                say(f"\n{old} cannot be removed ({error})", file=sys.stderr)


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """Raise the first failure instead of torch's CheckpointException, which lists one per rank."""
    try:
        yield
    except CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from error


def load_checkpoint(
    checkpoint: Path | None, policy: nn.Module, optimizer: Optimizer, parts: dict, world: World
) -> int:
    """Restore a checkpoint in place, with the `parts` that were saved in it, and return its step.
    Return 0 without a checkpoint: a new run.

    Weights and moments fit any number of ranks. A part gets the state that its own rank saved, or
    rank 0's state on a rank that did not exist then. A part whose state belongs to one rank alone
    must notice this in its `load_state_dict`: the hf engine keeps its fresh seed, others refuse.
    """
    if checkpoint is None:
        return 0
    weights, moments = get_state_dict(policy, optimizer)
    wrong = f"--resume: {checkpoint} does not fit --model, or is damaged"
    with blame(f"{wrong}: then delete it, and the one before it is taken"), first_failure():
        shards = dcp.FileSystemReader(checkpoint / "shards")
        shards.read_metadata()  # fails first if damaged: dcp.load would log a page of traceback
        dcp.load({"policy": weights, "optimizer": moments}, storage_reader=shards)
        path = checkpoint / f"rank{world.rank}.pt"
        if not path.exists():
            path = checkpoint / "rank0.pt"
        saved = torch.load(path, weights_only=True, map_location="cpu")
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    groups = [group for optim in optimizers for group in optim.param_groups]
    flags = [{name: group[name] for name in ("lr", "betas", "weight_decay")} for group in groups]
    set_state_dict(policy, optimizer, model_state_dict=weights, optim_state_dict=moments)
    groups = [group for optim in optimizers for group in optim.param_groups]
    for group, of_this_command in zip(groups, flags):  # with --back_to they may differ
        group.update(of_this_command)
    generators = saved["generators"]
    random.setstate(generators["python"])
    torch.set_rng_state(generators["torch"])
    if "cuda" in generators and world.device.type == "cuda":
        torch.cuda.set_rng_state(generators["cuda"])
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    return step_of(checkpoint)


def save_model(policy: nn.Module, tokenizer: Tokenizer, folder: Path, world: World) -> None:
    """Write the model in the Hugging Face format, which transformers, vLLM and `--model` can load.

    The files beside the weights are the model's own from before training. transformers would write
    them in the spelling of its present version, which earlier versions read wrongly. All is written
    under another name and renamed when complete.
    """
    weights = {}
    for name, full in full_parameters(policy):  # all ranks gather, and rank 0 keeps
        if world.rank == 0:
            weights[name] = full.cpu()
    if world.rank == 0:
        partial = folder.with_name(f"{folder.name}.partial")
        with blame(f"cannot save {folder}; go on with --resume once that is fixed", RunStopped):
            partial.mkdir(exist_ok=True)
            weights = revert_weight_conversion(policy.lm, weights)
            for name, weight in weights.items():
                if weight.nbytes < weight.untyped_storage().nbytes():
                    weights[name] = weight.clone()  # an expert, part of its layer's one tensor
            save_torch_state_dict(weights, partial)
            for path in tokenizer.start.iterdir():
                if re.fullmatch(OF_A_TOKENIZER, path.name):
                    shutil.copyfile(path, partial / path.name)
            for name, entries in policy.lm.own.items():
                (partial / name).write_text(json.dumps(entries, indent=2) + "\n", "utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
