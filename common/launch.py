"""A run from the outside: command line, ranks, and errors that are one line."""

import contextlib
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from common.distributed import ALONE, CLOSING, BadInput, RunStopped, World, first_line, setup
from common.flags import broken_rule
from common.model import EMBEDDED
from common.tracking import Run

Stage = Callable[[object, World], None]  # of the flags and the ranks


def launch(main: Stage, Args: type, prepare: Stage | None = None) -> None:
    """Parse the flags, join the ranks, run `main(args, world)`.

    Errors meant for people are one line on stderr: exit code 2 for bad input, 1 for a run that had
    to stop. A program that does not train has a `prepare(args, world)` in place of `check`.
    """
    world, code = ALONE, 0
    with contextlib.suppress(AttributeError):  # a terminal that cannot show ε is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = parse(Args)
        world = setup()
        (prepare or check)(args, world)
        main(args, world)
        dist.barrier()  # leave together: gloo may abort a rank whose peer is still busy
    except Exception as error:
        Run.bar.close()  # ends its line, before anything is said
        if world.rank:  # the first one says the same, or names what failed: torchrun ends this one
            time.sleep(3)
        code = 2 if isinstance(error, BadInput) else 1
        if message := in_words(error):
            print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
        elif world.size == 1:
            raise
        else:
            traceback.print_exc()
        if world.size > 1:  # a clean-up would wait for ranks that wait for this one
            os._exit(code)
    finally:
        while CLOSING:
            CLOSING.pop()()
        if dist.is_initialized():
            dist.destroy_process_group()
    if code:
        sys.exit(code)


def in_words(error: Exception) -> str:
    """An error that is meant for people, as one line; "" for others."""
    if isinstance(error, BadInput | RunStopped):
        return " ".join(str(error).splitlines())
    if isinstance(error, torch.OutOfMemoryError):
        sampling = Run.phase in ("rollout", "evaluate", "branch", "sync")
        lower = "--rollout_rows or --vllm_memory" if sampling else "--micro_tokens"
        return f"out of memory in {Run.phase or 'set-up'} ({first_line(error)}): lower {lower}"
    if isinstance(error, dist.DistError) or "gloo" in str(error):
        return f"another rank is gone ({first_line(error)}): go on with --resume"
    return ""


def parse(Args: type) -> object:
    """`Args` from the command line; tyro says on the first rank what is wrong with it."""
    header = sys.modules[Args.__module__].__doc__.splitlines()[0]
    first = os.environ.get("RANK", "0") == "0"
    return tyro.cli(Args, description=header, use_underscores=True, console_outputs=first)


def check(args: object, world: World) -> None:
    """Refuse values with which no run makes sense, or that leave a rank without its share."""
    if wrong := broken_rule(args):
        raise BadInput(wrong)
    unit = world.size * args.minibatches  # mini-batches are made of whole groups
    if args.prompts_per_step % unit:
        number = f"--prompts_per_step {args.prompts_per_step}"
        raise BadInput(f"{number}: not a multiple of ranks x --minibatches = {unit}")
    settle(args, world, args.model)


def settle(args: object, world: World, model: str) -> None:
    """Let `auto` become what it means for this model on this machine; divide the ranks."""
    gpu = world.device.type == "cuda"
    if args.rollout == "auto":  # starting vLLM takes a minute, longer than an embedded model's run
        vllm = gpu and model not in EMBEDDED and importlib.util.find_spec("vllm")
        args.rollout = "vllm" if vllm else "hf"
    if args.dtype == "auto":
        args.dtype = "bfloat16" if gpu else "float32"
    for flag in ("shard_ranks", "tensor_parallel"):
        if world.size % (ranks := vars(args)[flag] or 1):
            raise BadInput(f"--{flag} {ranks}: does not divide the {world.size} rank(s)")
