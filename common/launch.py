"""A run from the outside: command line, ranks, and errors that are one line."""

import contextlib
import importlib.util
import io
import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from common.data import HUB
from common.distributed import CLOSING, BadInput, Refused, RunStopped, World, first_line, setup
from common.flags import broken_rule
from common.model import EMBEDDED
from common.tracking import Run

Stage = Callable[[object, World], None]  # of the flags and the ranks


def launch(main: Stage, Args: type, prepare: Stage | None = None) -> None:
    """Parse the flags, join the ranks, run `main(args, world)`.

    Errors meant for people are one line on stderr: exit code 2 for bad input, 1 for a run that had
    to stop. A program that does not train has a `prepare(args, world)` in place of `check`.
    """
    # Every rank meets the same error: say it once.
    first_rank, world = os.environ.get("LOCAL_RANK", "0") == "0", None
    with contextlib.suppress(AttributeError):  # a terminal that cannot show ε is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = parse(Args, first_rank)
        world = setup()
        (prepare or check)(args, world)
        try:
            main(args, world)
        finally:
            if Run.bar is not None:
                Run.bar.close()  # ends its line, before anything is said
        dist.barrier()  # leave together: gloo may abort a rank whose peer is still busy
    except (BadInput, RunStopped) as error:
        bad = isinstance(error, BadInput)
        if not first_rank:  # it says the same; torchrun ends this one while it waits
            time.sleep(2)
        if first_rank or bad and not isinstance(error, Refused):
            say("error: " + " ".join(str(error).splitlines()))
        sys.exit(2 if bad else 1)
    except KeyboardInterrupt:  # before the first step; from there on StopFlag takes it
        if first_rank:
            say("interrupted")
        sys.exit(130)
    except torch.OutOfMemoryError as error:
        sampling = Run.phase in ("rollout", "evaluate", "branch", "sync")
        lower = "--rollout_rows or --vllm_memory" if sampling else "--micro_tokens"
        fall(f"out of memory in {Run.phase or 'set-up'} ({first_line(error)}): lower {lower}")
    except Exception as error:
        if world is None or world.size == 1:
            raise
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            gone = f"rank {world.rank} lost contact to another rank in {Run.phase}"
            advice = "torchrun names the one that failed first; go on with --resume"
            fall(f"{gone} ({first_line(error)}): {advice}", wait=3.0)
        traceback.print_exc()  # a clean-up would wait for ranks that wait for this one
        fall(f"rank {world.rank} failed in {Run.phase or 'set-up'}, see above")
    finally:
        while CLOSING:
            CLOSING.pop()()
        if dist.is_initialized():
            dist.destroy_process_group()


def say(message: str) -> None:
    """A line on stderr, in the program's name."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)


def fall(message: str, wait: float = 0.0) -> None:
    """End this rank without a clean-up, which would wait for others that may be gone or busy.

    After `wait` seconds, if torchrun is to see another rank fail first: it names the first one.
    """
    say(f"error: {message}")
    time.sleep(wait)
    os._exit(1)


def parse(Args: type, first_rank: bool = True) -> object:
    """`Args` from the command line; tyro's boxed message for a wrong flag becomes one line."""
    header, message = sys.modules[Args.__module__].__doc__.splitlines()[0], io.StringIO()
    options = {"description": header, "use_underscores": True, "console_outputs": first_rank}
    words = sys.argv[1:]
    after = words.index("--resume") + 1 if "--resume" in words else 0
    if after and (after == len(words) or words[after].startswith("-")):
        words.insert(after, "True")  # what it means alone; tyro lets no flag go without its word
    try:
        with contextlib.redirect_stderr(message):
            return tyro.cli(Args, args=words, **options)
    except SystemExit as stop:
        if stop.code != 2:
            raise
        # The first line is the box's title; rules divide the rest, its first part is the message.
        lines = [line.strip(" │") for line in message.getvalue().splitlines()[1:]]
        parts = itertools.groupby(lines, lambda line: bool(line.strip("─-╰╯")))
        said = (" ".join(part) for words, part in parts if words)
        # Only the first rank is told more.
        raise BadInput(next(said, "wrong flags")) from None


def check(args: object, world: World) -> None:
    """Refuse values with which no run makes sense, or that leave a rank without its share."""
    if wrong := broken_rule(args):
        raise BadInput(wrong)
    if args.group_size < 2:
        raise BadInput(f"--group_size {args.group_size}: a group needs 2 responses to compare")
    unit = world.size * args.minibatches  # mini-batches are made of whole groups
    if args.prompts_per_step % unit:
        number = f"--prompts_per_step {args.prompts_per_step}"
        raise BadInput(f"{number}: not a multiple of ranks x --minibatches = {unit}")
    if args.wandb and not importlib.util.find_spec("wandb"):
        raise BadInput(f"--wandb {args.wandb}: needs the package (pip install wandb)")
    settle(args, world, args.model)
    for line in without_effect(args, world) if world.rank == 0 else ():
        print(line, flush=True)


def settle(args: object, world: World, model: str) -> None:
    """Let `auto` become what it means for this model on this machine; divide the ranks."""
    gpu = world.device.type == "cuda"
    if args.rollout == "auto":  # starting vLLM takes a minute, longer than an embedded model's run
        vllm = gpu and model not in EMBEDDED and importlib.util.find_spec("vllm")
        args.rollout = "vllm" if vllm else "hf"
    engine = args.tensor_parallel if args.rollout == "vllm" else 1
    for flag, ranks in (("shard_ranks", args.shard_ranks or 1), ("tensor_parallel", engine)):
        if world.size % ranks:
            raise Refused(f"--{flag} {ranks}: does not divide the {world.size} rank(s)")
    if args.dtype == "auto":
        args.dtype = "bfloat16" if gpu else "float32"


def without_effect(args: object, world: World) -> Iterator[str]:
    """A line for each flag that was set and does nothing beside the others."""
    vllm, refers = args.rollout == "vllm", getattr(args, "beta", 0) > 0
    kinds = {task.partition(":")[0] for task in (args.task, args.eval_task) if task}
    made = {"arithmetic", "reasoning_gym"}
    for idle, where, names in (
        (not vllm, "with the hf engine", "vllm vllm_memory vllm_sleep tensor_parallel"),
        (vllm, "with vLLM", "rollout_rows"),
        (kinds == {"arithmetic"}, "with --task arithmetic", "max_prompt_tokens"),
        (kinds <= made, f"with --task {args.task}", "instruction"),
        (kinds <= {*made, *HUB}, "without a local file", "prompt_column answer_column"),
        (not refers, "without a KL term", "offload_reference"),
        (refers and world.device.type == "cpu", "on a CPU", "offload_reference"),
    ):
        for flag in fields(args) if idle else ():
            if flag.name in names.split() and getattr(args, flag.name) != flag.default:
                yield f"--{flag.name} has no effect {where}"
