"""The command line: flags and their rules, and errors of one line.

An algorithm file declares the flags that it reads itself, each by its kind (`lr: Positive = 3e-4`),
and inherits the others: `class Args(Flags)`. A value that breaks the rule of its kind ends the run
before it begins. `launch` shows the errors.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TextIO, get_type_hints


class BadInput(ValueError):
    """The user gave something wrong: shown as one line, exit code 2, nothing written."""


class RunStopped(RuntimeError):
    """Going on would train on wrong numbers: shown as one line, exit code 1."""


@contextlib.contextmanager
def blame(what: str, kind: type = BadInput) -> Iterator[None]:
    """Any error inside becomes one line for people: "`what` (its message)".

    Only around what reads or writes the files, models and sets that the user named. Elsewhere it
    would hide a bug of ours, or of a task file, whose traceback says more.
    """
    try:
        yield
    except (BadInput, RunStopped):
        raise
    except Exception as error:
        raise kind(f"{what} ({in_one_line(error)})") from error


def say(*lines: str, file: TextIO | None = None) -> None:
    """Print lines at once on `file`, or stdout."""
    print(*lines, sep="\n", file=file, flush=True)


def in_one_line(error: BaseException) -> str:
    """The first 240 characters of an exception's message, without line breaks."""
    return " ".join(str(error).split())[:240] or type(error).__name__


class Rule(NamedTuple):
    """The rule for numbers of a kind: in words for the message, and as a test."""

    words: str
    holds: Callable[[float], bool]


# numpy, torch and vLLM hold a seed or a size below 2**32. Of an infinite number a sum is NaN.
MOST = 2**32 - 1
Count = Annotated[int, Rule(f"from 1 to {MOST}", lambda x: 1 <= x <= MOST)]
Several = Annotated[int, Rule(f"from 2 to {MOST}", lambda x: 2 <= x <= MOST)]
Whole = Annotated[int, Rule(f"from 0 to {MOST}", lambda x: 0 <= x <= MOST)]
Positive = Annotated[float, Rule("a number above 0, and finite", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, Rule("0 or more, and finite", lambda x: 0 <= x < math.inf)]
Share = Annotated[float, Rule("from 0 to 1", lambda x: 0 <= x <= 1)]
PositiveShare = Annotated[float, Rule("above 0 and at most 1", lambda x: 0 < x <= 1)]
# Below 0.01 a softmax gives one token all probability; above 100 all tokens have the same.
Temperature = Annotated[float, Rule("from 0.01 to 100", lambda x: 0.01 <= x <= 100)]
Exponent = Annotated[float, Rule("from 0 to 100", lambda x: 0 <= x <= 100)]
Betas = Annotated[tuple[float, float], Rule("from 0 to below 1", lambda x: 0 <= x < 1)]


@dataclass
class Flags:
    """The flags that describe a run and not an algorithm; the same in every file."""

    model: str = "tiny"
    """Hub name, local folder, or `tiny`: the small model in this repository."""
    eval_every: Count = 25
    """Steps between two evaluations on the held-out problems (our choice)."""
    save_every: Count = 50
    """Steps between two checkpoints (our choice)."""
    save_hf: bool = False
    """Save the final model in the Hugging Face format, in float32, in `model` in the run folder."""
    resume: bool | Literal["auto"] = False
    """Continue from the newest checkpoint in the run folder; auto: only if there is one."""
    back_to: Whole = 0
    """With --resume: go back to the checkpoint of this step, and on with other flags of the
    algorithm: a smaller lr, fewer minibatches (0: the newest checkpoint, and no other flags)."""
    keep: Count = 3
    """Checkpoints that are kept, the newest ones (our choice)."""
    micro_tokens: Count = 16384
    """Tokens, with padding, in one pass: limits memory; the gradient is the same (our choice)."""
    task: str = "arithmetic"
    """`arithmetic` (or arithmetic:mix, :deep), a .jsonl or .parquet file, a hub set (gsm8k, math,
    dapo-math-17k, ...), or a .py file of your own (see docs/yours.md)."""
    seed: Whole = 1
    """Seed of the prompts' order and of sampling; the held-out problems do not depend on it."""
    run_dir: str = ""
    """Folder for the results (default: runs/<algorithm>-<task>-s<seed>)."""
    rollout: Literal["auto", "vllm", "hf"] = "auto"
    """Sampling engine: vLLM or transformers (auto: vllm on GPUs if it is installed, except for the
    embedded models)."""
    rollout_dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    """Precision of the sampler's weights (auto: as dtype; float8 with vllm: on GPUs only)."""
    rollout_rows: Count = 1024
    """Responses that the hf engine decodes at once; fewer need a smaller KV cache (our choice)."""
    vllm_memory: PositiveShare = 0.3
    """Share of each GPU's memory for vLLM, its weights included (our choice)."""
    vllm_sleep: bool = False
    """Move vLLM's weights to CPU memory while the trainer computes."""
    tensor_parallel: Count = 1
    """Neighbouring ranks that share one vLLM engine."""
    vllm: tuple[str, ...] = ()
    """KEY=VALUE ...: further options of vLLM's engine (kv_cache_dtype=fp8 enforce_eager=true)."""
    sampler_tolerance: NonNegative = 0.0
    """Largest mean |log π_old - log μ| before the run stops (our choice; 0: 0.001 in float32, 0.05
    in bfloat16, 0.1 in float8)."""
    eval_task: str = ""
    """Set for evaluation (default: the task's own test split, or problems held back)."""
    eval_problems: Count = 256
    """Held-out problems (our choice)."""
    eval_samples: Count = 4
    """Sampled responses to each held-out problem, beside the greedy one (our choice)."""
    sample_every: Whole = 10
    """Steps between two groups of responses written to samples.jsonl token by token; step 1, each
    evaluation and the last step are written too (our choice; 0: no file)."""
    max_prompt_tokens: Count = 1024
    """Longer prompts are skipped (our choice)."""
    instruction: str = "Let's think step by step and put the final answer in \\boxed{}."
    """Appended to every text prompt of a data file or hub set."""
    chat: tuple[str, ...] = ()
    """KEY=VALUE ...: options of the model's chat template (enable_thinking=false)."""
    prompt_column: str = "prompt"
    """Column of a local file with the prompt."""
    answer_column: str = "answer"
    """Column of a local file with the reference answer."""
    wandb: str = ""
    """Weights & Biases project to log to as well (needs the package)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; the master weights are always float32 (auto: bfloat16 on
    GPUs, float32 on CPUs)."""
    compile: bool = False
    """Compile decoder layers and the head's softmax. On an H100 it took a third off the update of
    some layers; no step of a large model has been timed."""
    gradient_checkpointing: bool = False
    """Recompute each layer in backward: less memory, a third more compute."""
    shard_ranks: Whole = 0
    """Neighbouring ranks that share one copy of the model; 0: all ranks, or 1 below 10M parameters.
    With slow links between nodes, use the number of GPUs in a node."""
    offload: bool = False
    """Keep policy, gradient, AdamW's moments and π_ref in CPU memory, and step there: 1.7B fits
    into 24 GB, but every step is slower."""
    offload_reference: bool = False
    """Keep π_ref in CPU memory, if the objective has a KL term."""

    def compares(self) -> bool:
        """Whether the responses of a group are compared, so that a group needs two."""
        return True


def broken_rule(args: Flags) -> str:
    """The message for the first flag that breaks the rule of its kind; "" if none does."""
    for name, kind in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        numbers = value if isinstance(value, tuple) else (value,)
        for rule in getattr(kind, "__metadata__", ()):
            if isinstance(rule, Rule) and not all(map(rule.holds, numbers)):  # no NaN holds
                return f"--{name} {value}: must be {rule.words}"
    return ""


def key_values(flag: str, words: tuple[str, ...]) -> dict:
    """KEY=VALUE ... as a dict; VALUE is JSON (or Python's True, False, None), or else text."""
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
