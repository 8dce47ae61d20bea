"""A run from the outside: command line, ranks, and errors that are one line."""

import contextlib
import importlib.util
import io
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from common.distributed import ALONE, CLOSING, SMALL, World
from common.distributed import setup
from common.plumbing.errors import BadInput, RunStopped, blame, first_line
from common.plumbing.flags import broken_rule
from common.plumbing.model import EMBEDDED, parameters_of
from common.plumbing.tracking import Run

Stage = Callable[[object, World], None]  # of the flags and the ranks
# Flags that every model has its own values of, and what those usually are
USUAL = {
    "lr": "usual in full fine-tuning: 1e-6 for billions of parameters, 1e-5 for some 100 million",
    "max_new_tokens": "usual: 512 to 4096",
}


def launch(main: Stage, Args: type, prepare: Stage | None = None) -> None:
    """Parse the flags, join the ranks, run `main(args, world)`.

    Errors meant for people are one line on stderr: exit code 2 for bad input, 1 for a run that had
    to stop. A program that does not train has a `prepare(args, world)` in place of `check`.
    """
    world, code = ALONE, 0
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all loads: no page of traceback
    with contextlib.suppress(AttributeError):  # a terminal that cannot show ε is no reason to stop
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args = parse(Args)
        with blame("the ranks cannot be set up"):
            world = setup()
        if prepare:
            prepare(args, world)
        else:
            check(args, world)
            check_defaults(args, sys.argv)
        main(args, world)
        dist.barrier()  # leave together: gloo may abort a rank whose peer is still busy
    except Exception as error:
        code = 2 if isinstance(error, BadInput) else 1
        Run.bar.close()  # ends its line, before anything is said
        report(error, world)
        if world.size > 1:  # a clean-up would wait for ranks that wait for this one
            os._exit(code)
    finally:
        while CLOSING:
            CLOSING.pop()()
        if dist.is_initialized():
            dist.destroy_process_group()
    if code:
        sys.exit(code)


def report(error: Exception, world: World) -> None:
    """Say what went wrong, in one line if it is meant for people.

    Of several ranks the first that fails says it for all; torchrun then ends the others.
    """
    cause = error.__cause__ or error
    lost = isinstance(cause, dist.DistError)
    lost = lost or type(cause) is RuntimeError and "gloo" in str(cause) and world.size > 1
    if world.size > 1:
        time.sleep(3.0 * lost)  # who lost contact lets the one speak who knows why
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        with contextlib.suppress(Exception):  # the board may be what is lost
            if world.store.add(f"failures of start {start}", 1) > 1:
                return
    sampling = Run.phase in ("rollout", "evaluate", "branch", "sync")
    message = " ".join(str(error).splitlines())
    if isinstance(error, torch.OutOfMemoryError):
        lower = "--micro_tokens" if Run.phase else "--vllm_memory (what fits: tools.memory --model)"
        lower = "--rollout_rows or --vllm_memory" if sampling else lower
        message = f"out of memory in {Run.phase or 'set-up'} ({first_line(error)}): lower {lower}"
    elif lost:
        message = f"rank {world.rank} lost contact to another rank in {Run.phase}"
        message += f" ({first_line(error)}): go on with --resume"
    elif not isinstance(error, BadInput | RunStopped):
        traceback.print_exc()
        return
    line = "\n" * (world.rank > 0 and Run.phase != "")  # ends the first rank's progress bar
    line += f"{Path(sys.argv[0]).name}: error: {message}"
    print(line, file=sys.stderr, flush=True)


def parse(Args: type) -> object:
    """`Args` from the command line; tyro's boxed message for a wrong flag becomes one line."""
    header, box = sys.modules[Args.__module__].__doc__.splitlines()[0], io.StringIO()
    first, words = os.environ.get("RANK", "0") == "0", sys.argv[1:]
    for place, word in enumerate(words):
        if word == "--resume" and words[place + 1 : place + 2] != ["auto"]:
            words[place] = "--resume=True"  # what it means alone
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(Args, args=words, description=header, use_underscores=True)
    except SystemExit as stop:
        if stop.code == 2:
            # The first line is the box's title; rules divide the rest, its first part says why.
            lines = [line.strip(" │") for line in box.getvalue().splitlines()[1:]]
            parts = itertools.groupby(lines, lambda line: bool(line.strip("─-╰╯")))
            said = next((" ".join(part) for words, part in parts if words), "wrong flags")
            if first:
                print(f"{Path(sys.argv[0]).name}: error: {said}", file=sys.stderr)
        raise


def check(args: object, world: World) -> None:
    """Refuse values with which no run makes sense, or that leave a rank without its share."""
    if wrong := broken_rule(args):
        raise BadInput(wrong)
    if args.group_size < 2 and args.compares():
        raise BadInput(f"--group_size {args.group_size}: a group needs 2 responses to compare")
    unit = world.size * args.minibatches  # mini-batches are made of whole groups
    if args.prompts_per_step % unit:
        number = f"--prompts_per_step {args.prompts_per_step}"
        raise BadInput(f"{number}: not a multiple of ranks x --minibatches = {unit}")
    if args.wandb and not importlib.util.find_spec("wandb"):
        raise BadInput(f"--wandb {args.wandb}: needs the package (pip install wandb)")
    settle(args, world, args.model)


def check_defaults(args: object, words: list[str]) -> None:
    """Refuse a real model under defaults that are right for the embedded one: lr 3e-4 would destroy
    it, and 64 tokens cut off every answer. `words` is the command line."""
    given = {word.partition("=")[0].replace("-", "_") for word in words}
    left = [flag for flag in USUAL if f"__{flag}" not in given]
    if left and args.model not in EMBEDDED and parameters_of(args.model) > SMALL:
        asked = " and ".join(f"--{flag} ({USUAL[flag]})" for flag in left)
        raise BadInput(f"--model {args.model}: the defaults are the embedded model's; give {asked}")


def settle(args: object, world: World, model: str) -> None:
    """Let `auto` become what it means for this model on this machine; divide the ranks."""
    gpu = world.device.type == "cuda"
    if args.rollout == "auto":  # starting vLLM takes a minute, longer than an embedded model's run
        vllm = gpu and model not in EMBEDDED and importlib.util.find_spec("vllm")
        args.rollout = "vllm" if vllm else "hf"
    old = gpu and torch.cuda.get_device_capability(world.device) < (8, 0)
    apple = not gpu and torch.backends.mps.is_available()
    if args.dtype == "auto":  # before Ampere bfloat16 is emulated, and vLLM refuses it
        args.dtype = "bfloat16" if gpu and not old else "float32"
    if (old or apple) and world.rank == 0:
        why = "compute capability below 8.0" if old else "Apple's GPUs are not used"
        print(f"{why}: {args.dtype} on {world.device}", file=sys.stderr, flush=True)
    engine = args.tensor_parallel if args.rollout == "vllm" else 1
    for flag, ranks in (("shard_ranks", args.shard_ranks or 1), ("tensor_parallel", engine)):
        if world.size % ranks:
            raise BadInput(f"--{flag} {ranks}: does not divide the {world.size} rank(s)")
