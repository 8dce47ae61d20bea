"""Further methods. Run one from the root of the repository: `torchrun -m variants.dapo`.

A variant holds only what it changes: its header, its flags, its loss, and a diff of another file's
loop, `main = loop_of(grpo, globals(), LOOP)`. `python -m variants dapo` prints its loop in full.
The loop divides a loss's sum by its count, over all micro-batches and ranks. `ACTED` names metrics
that show the method at work; if the first is always 0, the run says so at its end.
"""

import inspect
import linecache
import re
from dataclasses import dataclass
from types import FunctionType, ModuleType

from common.cli import Betas, Count, Flags, NonNegative, Positive, Temperature, Whole

MARKS = r"(?m)^\s*# </?own>\n|  # </?own>$"


@dataclass
class Trunk(Flags):
    """The flags of every loop, as in grpo.py (a test compares them)."""

    steps: Count = 150
    """Training steps: a rollout, then `minibatches` optimiser steps (our choice)."""
    prompts_per_step: Count = 16
    """Prompts in a rollout, on all ranks together (our choice)."""
    group_size: Count = 8
    """G: responses to each prompt (DeepSeekMath: 64)."""
    minibatches: Count = 4
    """Optimiser steps per rollout; from the second on, π_θ differs from π_old (DeepSeekMath: 1)."""
    max_new_tokens: Count = 64
    """Largest number of tokens in a response (DeepSeekMath: 1024)."""
    temperature: Temperature = 1.0
    """Sampling temperature, also used for all log-probabilities (papers: 1)."""
    lr: Positive = 3e-4
    """AdamW's learning rate after warm-up, chosen for `tiny` (DeepSeekMath: 1e-6 at 7B)."""
    warmup: Whole = 5
    """Steps in which lr rises linearly to its full value (our choice; verl's default: 0)."""
    betas: Betas = (0.9, 0.95)
    """AdamW's β1 and β2 (OpenRLHF's; verl and most papers: 0.9 0.999)."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay (our choice; verl's default: 0.01)."""
    grad_clip: Positive = 1.0
    """Largest gradient norm; larger gradients are scaled down to it (verl's default)."""


def loop_of(base: ModuleType, namespace: dict, diff: str = "") -> FunctionType:
    """Return `base.main`, changed by a diff, as if it stood in the file with these globals.

    The diff has hunks of lines that begin with a blank, - or +, and an empty line between hunks.
    Each hunk must fit exactly one place (else LookupError). A name that the file does not define,
    such as `advantages`, is taken from `base`, the file whose loop this is.
    """
    for name, value in vars(base).items():
        namespace.setdefault(name, value)
    source = getattr(base.main, "source", None)  # if the base file is a variant
    if source is None:
        source = re.sub(MARKS, "", inspect.getsource(base.main))
    hunks = diff.strip("\n").split("\n\n") if diff else []
    for hunk in hunks:
        before, after = "", ""
        for line in hunk.split("\n"):
            sign, text = line[:1], line[1:] + "\n"
            if sign != "+":
                before += text
            if sign != "-":
                after += text
        if source.count(before) != 1:
            raise LookupError(f"{base.__name__}.main has no, or several times:\n{hunk}")
        source = source.replace(before, after)
    name = f"{namespace['__file__']}: main"
    linecache.cache[name] = len(source), None, source.splitlines(True), name  # for tracebacks
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    namespace["main"].source = source
    return namespace["main"]
