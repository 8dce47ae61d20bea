"""The start of every program: it reads the command line, joins the ranks, and prints errors."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from torch._dynamo.exc import TorchDynamoException

from common.cli import BadInput, Flags, RunStopped, blame, broken_rule, in_one_line, say
from common.clock import SPENT
from common.distributed import ALONE, SMALL, World, setup
from common.model import parameters_of
from common.model_files import EMBEDDED

# What gloo and NCCL say if a peer is gone
LOST_RANK = "Connection (reset|closed|refused)|remote process exited|Broken pipe"
Stage = Callable[[Flags, World], None]
# The flags whose right value depends on the model, and what people usually take.
USUAL = {
    "lr": "usual in full fine-tuning: 1e-6 for billions of parameters, 1e-5 for some 100 million",
    "max_new_tokens": "usual: 512 to 4096",
}


def launch(main: Stage, Args: type[Flags], prepare: Stage | None = None) -> None:
    """Parse the flags, join the ranks, and run `main(args, world)`.

    Errors meant for people print as one line on stderr. The exit code is 2 for bad input, and 1 for
    a run that had to stop. A program that does not train passes a `prepare(args, world)`, which
    replaces `check`.
    """
    prepare = prepare or check
    SPENT.clear()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during loading prints no traceback
    with contextlib.suppress(AttributeError):  # a notebook's stdout needs no such change
        sys.stdout.reconfigure(errors="backslashreplace")
    world = ALONE
    code = 0
    try:
        world = setup()
        args = parse(Args)
        prepare(args, world)
        main(args, world)
        dist.barrier()  # leave together, because gloo may abort a rank whose peer is still busy
    except Exception as error:
        code = 2 if isinstance(error, BadInput) else 1
        report(error, world)
        if world.size > 1:  # cleaning up would wait for ranks that wait for this one
            os._exit(code)
    finally:
        world.closing.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    if code:
        sys.exit(code)


def report(error: Exception, world: World) -> None:
    """Print what went wrong: one line if the error is meant for people, else a traceback.

    Only the first rank that fails prints it; torchrun then ends the others.
    """
    if world.size > 1:
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
        with contextlib.suppress(Exception):  # the store may be gone with a lost rank
            if world.store.add(f"failures of start {start}", 1) > 1:
                return
    if not isinstance(error, BadInput):
        print(file=sys.stderr)  # ends the line of the progress bar
    # torch has no error class for CPU memory.
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "alloc_cpu" in str(error):
        lower = "--micro_tokens, or of the sampler --rollout_rows or --vllm_memory"
        phase = getattr(error, "phase", "update or set-up")  # see `timed`
        message = f"out of memory in {phase} ({in_one_line(error)}): lower {lower}"
    elif isinstance(error, TorchDynamoException):
        message = f"--compile fails: go on with --resume, without it ({in_one_line(error)})"
    elif isinstance(error, BadInput | RunStopped):
        message = " ".join(str(error).splitlines())
    elif isinstance(error, RuntimeError) and world.size > 1 and re.search(LOST_RANK, str(error)):
        message = "another rank has ended: see its message, or its exit code below (-9: killed by "
        message += "the system, mostly for lack of main memory); go on with --resume"
    else:
        traceback.print_exc()
        return
    say(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)


def parse(Args: type[Flags]) -> Flags:
    """Parse the command line into `Args`. On a wrong flag, raise tyro's message without its box."""
    description = sys.modules[Args.__module__].__doc__.splitlines()[0]
    words = sys.argv[1:]
    for place, word in enumerate(words):
        alone = place + 1 == len(words) or words[place + 1].startswith("--")
        if word == "--resume" and alone:
            words[place] = "--resume=yes"
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            args = tyro.cli(Args, args=words, description=description, use_underscores=True)
    except SystemExit as stop:
        if stop.code:
            words = re.sub("[─│╭╮╰╯]|-{3,}", " ", output.getvalue()).split()
            raise BadInput(" ".join(words)) from None
        raise  # after --help
    for name, value in vars(args).items():
        if isinstance(value, str) and value.startswith("~"):  # a shell leaves it so behind =
            setattr(args, name, os.path.expanduser(value))
    return args


def check(args: Flags, world: World) -> None:
    """Refuse flags that make no sense, or that ranks cannot share evenly; replace every `auto`."""
    if wrong := broken_rule(args):
        raise BadInput(wrong)
    if args.group_size < 2 and args.compares():
        raise BadInput(f"--group_size {args.group_size}: a group needs 2 responses to compare")
    unit = world.size * args.minibatches  # mini-batches are made of whole groups
    if args.prompts_per_step % unit:
        number = f"--prompts_per_step {args.prompts_per_step}"
        raise BadInput(f"{number}: not a multiple of ranks x --minibatches = {unit}")
    if args.wandb and world.rank == 0:
        with blame(f"--wandb {args.wandb}: cannot be used"):  # now, not after minutes of loading
            import wandb

            wandb.Settings(project=args.wandb)  # checks the name by W&B's own rules
            wandb.login()
    resolve_auto(args, world, args.model)
    check_defaults(args, sys.argv)


def check_defaults(args: Flags, words: list[str]) -> None:
    """Refuse a real model with defaults made for the embedded one: lr 3e-4 would destroy it, and 64
    tokens would cut off every answer. `words` is the command line."""
    named = {word.partition("=")[0].replace("-", "_") for word in words}
    left = [flag for flag in USUAL if f"__{flag}" not in named]
    if left and args.model not in EMBEDDED and parameters_of(args.model) > SMALL:
        flags = " and ".join(f"--{flag} ({USUAL[flag]})" for flag in left)
        raise BadInput(f"--model {args.model}: the defaults are the embedded model's; give {flags}")


def resolve_auto(args: Flags, world: World, model: str) -> None:
    """Replace each `auto` for this model and machine; check that ranks divide into groups."""
    gpu = world.device.type == "cuda"
    if args.rollout == "auto":  # starting vLLM takes a minute, too long for an embedded model
        useful = gpu and model not in EMBEDDED and importlib.util.find_spec("vllm")
        args.rollout = "vllm" if useful else "hf"
    if args.dtype == "auto":  # before Ampere (8.0) bfloat16 is emulated, and vLLM refuses it
        native = gpu and torch.cuda.get_device_capability(world.device) >= (8, 0)
        args.dtype = "bfloat16" if native else "float32"
    sharing = {"shard_ranks": args.shard_ranks or 1}
    if args.rollout == "vllm":
        sharing["tensor_parallel"] = args.tensor_parallel
    for flag, ranks in sharing.items():
        if world.size % ranks:
            raise BadInput(f"--{flag} {ranks}: does not divide the {world.size} rank(s)")
