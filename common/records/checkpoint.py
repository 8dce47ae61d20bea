"""Checkpoints that survive a kill at any moment, which of them a run continues from, and saving
the model in the Hugging Face format."""

import contextlib
import json
import random
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import takewhile
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

from common.cli import BadInput, Flags, RunStopped, blame, say
from common.clock import timed
from common.distributed import World, full_parameters
from common.records.files import as_lines, new_folder, numbered, read_lines, saved_config
from common.records.files import sync, write

# What may change on resume: how long, where and how often, and what trades memory for time.
FREE_ON_RESUME = set(
    """acted steps run_dir resume back_to keep save_every save_hf eval_every eval_samples
    sample_every wandb ranks shard_ranks micro_tokens rollout_rows sampler_tolerance
    gradient_checkpointing compile offload offload_reference vllm_memory vllm_sleep""".split()
)
# The files of a tokenizer and its chat template.
OF_A_TOKENIZER = r"(tokenizer|vocab|merges|special_|added_|chat_|spiece|tekken).*|.*\.tiktoken"
# Flags of an algorithm's file that must not change even with --back_to: the sizes of a rollout.
FIXED = {"prompts_per_step", "group_size", "max_new_tokens"}


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
        sync(path)  # torch has synced the shards itself
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            sync(partial / "shards")
            sync(partial)
            partial.rename(final)
            sync(final.parent)
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
    groups = [group for one in optimizers for group in one.param_groups]
    flags = [{name: group[name] for name in ("lr", "betas", "weight_decay")} for group in groups]
    set_state_dict(policy, optimizer, model_state_dict=weights, optim_state_dict=moments)
    groups = [group for one in optimizers for group in one.param_groups]
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
            save_torch_state_dict(revert_weight_conversion(policy.lm, weights), partial)
            for path in tokenizer.start.iterdir():
                if re.fullmatch(OF_A_TOKENIZER, path.name):
                    shutil.copyfile(path, partial / path.name)
            for name, entries in policy.lm.own.items():
                (partial / name).write_text(json.dumps(entries, indent=2) + "\n", "utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)


# Which checkpoint does a run continue from?


def folder_to_resume(name: Path, named: bool) -> Path:
    """Return `name` if the user has named it and it has a checkpoint, else the last of name,
    name.2, ... with a checkpoint. If none has a checkpoint, return `name`."""
    saved = [folder for folder in takewhile(Path.is_dir, numbered(name)) if checkpoints(folder)]
    if name in saved and named:
        return name
    return saved[-1] if saved else name


def checkpoint_to_resume(
    folder: Path, args: Flags, config: dict
) -> tuple[Path | None, dict | None]:
    """Return (checkpoint, changes) for a run with this config that continues in `folder`; refuse
    another run's folder. The checkpoint is None if `--resume auto` finds none. `changes` maps each
    flag that --back_to changes to its old and new value; it is None for a plain resume."""
    saved = checkpoints(folder)
    if not saved and args.resume == "auto":
        return None, None
    if not saved:
        raise BadInput(f"--resume: no checkpoint in {folder}")
    before = saved_config(folder)
    changed = {}  # without flags that an older version of this program did not write
    for name in sorted(config.keys() & before.keys() - FREE_ON_RESUME - {"id", "history"}):
        if before[name] != config[name]:
            changed[name] = [before[name], config[name]]
    history = before.get("history", [])
    gone_back = bool(history) and history[-1]["back_to"] == args.back_to and not changed
    going_back = args.back_to > 0 and not gone_back  # gone_back: the same command runs again
    steps = {step_of(path): path for path in saved}
    if going_back and args.back_to not in steps:
        there = ", ".join(map(str, steps))
        raise BadInput(f"--back_to {args.back_to}: {folder} has checkpoints of {there}")
    repairs = set()  # flags that may change
    if going_back:
        of_the_algorithm = asdict(args).keys() - {field.name for field in fields(Flags)}
        repairs = of_the_algorithm - FIXED | {"rollout_dtype"}
    for name, (was, now) in changed.items():
        if name not in repairs:
            raise BadInput(f"--resume: {folder} has {name} {was!r}, not {now!r}")
    if going_back:
        return steps[args.back_to], changed
    return saved[-1], None


def cut_back(folder: Path, done: int, last: int, going_back: bool) -> None:
    """Remove what a run of `last` steps wrote after step `done`, or with --back_to move it into a
    folder after_<done>. Refuse if metrics.jsonl lacks a step."""
    if done > last:
        raise BadInput(f"--steps {last}: {folder} is at step {done}")
    kept, later = {}, {}
    for name in ("metrics.jsonl", "samples.jsonl"):
        if (folder / name).exists():
            rows = read_lines(folder / name)
            kept[name] = [row for row in rows if row["step"] <= done]
            later[name] = [row for row in rows if row["step"] > done]
    steps = [row["step"] for row in kept.get("metrics.jsonl", [])]
    if steps != list(range(done + 1)):
        path = folder / "metrics.jsonl"
        raise BadInput(f"--resume: {path} does not hold the steps 0 to {done}, each once")
    if going_back:
        beside = new_folder(folder / f"after_{done}")
        for name, rows in later.items():
            write(beside / name, as_lines(rows))
        for path in checkpoints(folder):
            if step_of(path) > done:
                path.rename(beside / path.name)
        say(f"back to step {done}; what came after it is in {beside}")
    for name, rows in kept.items():
        write(folder / name, as_lines(rows))
    (folder / "summary.json").unlink(missing_ok=True)  # it describes steps that are removed
