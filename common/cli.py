"""The flags that all files share, the rules for their values, and errors that print as one line.

An algorithm file declares the flags that it reads itself, each with a kind (`lr: Positive = 3e-4`),
and inherits the others: `class Args(Flags)`. A value that breaks the rule of its kind ends the run
before it begins. Parsing, and printing of the errors, is in `launch`.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TextIO, get_type_hints


class BadInput(ValueError):
    """A mistake in what the user gave: one line on the screen, exit code 2, nothing written."""


class RunStopped(RuntimeError):
    """The end of a run that would train on wrong numbers: one line on the screen, exit code 1."""


@contextlib.contextmanager
def blame(what: str, kind: type = BadInput) -> Iterator[None]:
    """Turn any error inside into one line for people: "`what` (its message)".

    Use it only around code that reads or writes the files, models and data sets that the user
    named. Anywhere else it would hide a bug, whose traceback says more.
    """
    try:
        yield
    except (BadInput, RunStopped):
        raise
    except Exception as error:
        raise kind(f"{what} ({in_one_line(error)})") from error


@contextlib.contextmanager
def screen(stream: TextIO) -> Iterator[None]:
    """Print to stdout or stderr inside. If the reader of a pipe has ended (`| head -1`), this and
    all that follows goes nowhere, and the program goes on."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines to `file` (default: stdout) and flush it."""
    with screen(file or sys.stdout):
        print(*lines, sep="\n", file=file, flush=True)


def in_one_line(error: BaseException) -> str:
    """Return the first 240 characters of an exception's message, without line breaks."""
    return " ".join(str(error).split())[:240] or type(error).__name__


class Rule(NamedTuple):
    """The rule for one kind of number, in words for the error message and as a test."""

    words: str
    holds: Callable[[float], bool]


# numpy, torch and vLLM need seeds and sizes below 2**32. Infinite values would turn means into NaN.
MOST = 2**32 - 1
Count = Annotated[int, Rule(f"from 1 to {MOST}", lambda x: 1 <= x <= MOST)]
AtLeastTwo = Annotated[int, Rule(f"from 2 to {MOST}", lambda x: 2 <= x <= MOST)]
CountOrZero = Annotated[int, Rule(f"from 0 to {MOST}", lambda x: 0 <= x <= MOST)]
Positive = Annotated[float, Rule("a number above 0, and finite", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, Rule("0 or more, and finite", lambda x: 0 <= x < math.inf)]
Fraction = Annotated[float, Rule("from 0 to 1", lambda x: 0 <= x <= 1)]
PositiveFraction = Annotated[float, Rule("above 0 and at most 1", lambda x: 0 < x <= 1)]
# Below 0.01 a softmax gives one token all the probability; above 100 all tokens are about equal.
Temperature = Annotated[float, Rule("from 0.01 to 100", lambda x: 0.01 <= x <= 100)]
Exponent = Annotated[float, Rule("from 0 to 100", lambda x: 0 <= x <= 100)]
Betas = Annotated[tuple[float, float], Rule("from 0 to below 1", lambda x: 0 <= x < 1)]


@dataclass
class Flags:
    """The flags that describe a run rather than an algorithm; they are the same in every file."""

    # What to train, and where
    model: str = "tiny"
    """Hub name, local folder, or `tiny`: the small model in this repository."""
    task: str = "arithmetic"
    """`arithmetic` (or arithmetic:mix, :deep), a .jsonl or .parquet file, a data set on the hub
    (gsm8k, math, dapo-math-17k, ...), or a .py file of your own (see docs/yours.md)."""
    seed: CountOrZero = 1
    """Seed of the prompt order and of sampling; the held-out problems do not depend on it."""
    run_dir: str = ""
    """Folder for the results (default: runs/<algorithm>-<task>-s<seed>)."""

    # Evaluation, and what a run writes
    eval_every: Count = 25
    """Steps between evaluations on the held-out problems (our choice)."""
    eval_task: str = ""
    """Data set for evaluation (default: the task's test split, or problems held back for it)."""
    eval_problems: Count = 256
    """Number of held-out problems (our choice)."""
    eval_samples: Count = 4
    """Sampled responses per held-out problem, besides the greedy one (our choice)."""
    sample_every: CountOrZero = 10
    """Steps between groups of responses written token by token to samples.jsonl; step 1, every
    evaluation and the last step are written too (our choice; 0: no file)."""
    wandb: str = ""
    """Weights & Biases project to log to as well (needs the package)."""

    # Checkpoints
    save_every: Count = 50
    """Steps between checkpoints (our choice)."""
    keep: Count = 3
    """Number of checkpoints to keep; older ones are deleted (our choice)."""
    resume: Literal["no", "yes", "auto"] = "no"
    """Continue from the newest checkpoint in the run folder. auto: start anew if there is none;
    `--resume` alone: yes."""
    back_to: CountOrZero = 0
    """With --resume: go back to the checkpoint of this step and continue with other flags of the
    algorithm, such as a smaller lr or fewer minibatches (0: newest checkpoint, same flags)."""
    save_hf: bool = False
    """Save the final model in `model` in the run folder, in float32 and Hugging Face format."""

    # Prompts and answers
    instruction: str = "Let's think step by step and put the final answer in \\boxed{}."
    """Text appended to every text prompt of a data file or hub set."""
    chat: tuple[str, ...] = ()
    """KEY=VALUE ...: options of the model's chat template (enable_thinking=false)."""
    prompt_column: str = "prompt"
    """Column of a local file that holds the prompt."""
    answer_column: str = "answer"
    """Column of a local file that holds the reference answer."""
    max_prompt_tokens: Count = 1024
    """Longest prompt; longer prompts are skipped (our choice)."""

    # Sampling
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """Sampling engine: vLLM or transformers (auto: vllm on GPUs if it is installed, except for the
    embedded models)."""
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    rollout_rows: Count = 1024
    """Responses that the hf engine decodes together; fewer need less KV cache (our choice)."""
    sampler_tolerance: NonNegative = 0.0
    """Largest accepted mean |log π_old - log μ|; beyond it the run stops (our choice; 0: 0.001 in
    float32, 0.05 in bfloat16, 0.1 in float8)."""

    # vLLM
    vllm_memory: PositiveFraction = 0.3
    """Share of each GPU's memory that vLLM may use, weights included (our choice)."""
    vllm_sleep: bool = False
    """Move vLLM's weights to CPU memory while the trainer computes."""
    tensor_parallel: Count = 1
    """Neighbouring ranks that share one vLLM engine."""
    vllm: tuple[str, ...] = ()
    """KEY=VALUE ...: more options for vLLM's engine (kv_cache_dtype=fp8 enforce_eager=true)."""

    # Memory and speed of the trainer
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; the master weights are always float32 (auto: bfloat16 on
    GPUs, float32 on CPUs)."""
    micro_tokens: Count = 16384
    """Most tokens in one pass, with padding: bounds memory; same gradient (our choice)."""
    compile: bool = False
    """Compile decoder layers and the head's softmax. On an H100 this cut the update of a few layers
    by a third; no step of a large model has been timed."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, a third more compute."""
    shard_ranks: CountOrZero = 0
    """Neighbouring ranks that share one copy of the model (0: all ranks, or 1 below 10M
    parameters). With slow links between nodes, use the number of GPUs in a node."""
    offload: bool = False
    """Keep policy, gradients, AdamW's moments and π_ref in CPU memory and step there: 1.7B fits
    into 24 GB, but every step is slower."""
    offload_reference: bool = False
    """Keep π_ref in CPU memory, if the objective has a KL term."""

    def compares(self) -> bool:
        """Tell whether the file compares the responses of a group, so that a group needs two."""
        return True


def broken_rule(args: Flags) -> str:
    """Return the message for the first flag that breaks the rule of its kind, or ""."""
    for name, kind in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        numbers = value if isinstance(value, tuple) else (value,)
        for rule in getattr(kind, "__metadata__", ()):
            if isinstance(rule, Rule) and not all(map(rule.holds, numbers)):  # NaN breaks any rule
                return f"--{name} {value}: must be {rule.words}"
    return ""


def key_values(flag: str, words: tuple[str, ...]) -> dict:
    """Read KEY=VALUE ... as a dict. VALUE is JSON, or Python's True, False or None, else text."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"{flag} {word}: must be KEY=VALUE")
        value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
        options[key] = value
        with contextlib.suppress(json.JSONDecodeError):
            options[key] = json.loads(value)
    return options
