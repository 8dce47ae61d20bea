"""Further methods. Run one from the root of the repository: `torchrun -m variants.dapo`.

A variant holds only what it changes: its header, its flags, its loss, and a diff of another file's
loop, `main = loop_of(grpo, globals(), LOOP)`. `python -m variants dapo` prints its loop in full.
The loop divides a loss's sum by its count, over all micro-batches and ranks. `ACTED` names metrics
that show the method at work; if the first is always 0, the run says so at its end.
"""

import ast
import builtins
import dis
import inspect
import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType

from common.cli import Betas, Count, CountOrZero, Flags, NonNegative, Positive, Temperature

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
    warmup: CountOrZero = 5
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
    Each hunk must fit exactly one place (else LookupError). What the base file imports is there,
    too. Names that the base file defines are not copied: write `advantages = justrl.advantages`. A
    name that the loop lacks is a NameError now, not in the middle of a run.
    """
    if hasattr(base.main, "source"):  # the base file is a variant
        source, imports = base.main.source, base.main.imports | imported(base)
    else:
        source = re.sub(MARKS, "", inspect.getsource(base.main))
        imports = imported(base)
    for name, value in imports.items():
        namespace.setdefault(name, value)
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
    main = namespace["main"]
    main.source, main.imports = source, imports
    for needed in global_names(main.__code__):
        if needed not in namespace and not hasattr(builtins, needed):
            raise NameError(f"{name} needs {needed}, which the file does not define")
    return main


def global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function reads, also in its lambdas and comprehensions."""
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from global_names(part)


def imported(module: ModuleType) -> dict[str, object]:
    """Return what a module's import statements bind, by name."""
    objects = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                objects[name] = getattr(module, name)
    return objects
