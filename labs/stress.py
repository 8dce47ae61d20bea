"""Ten conditions under which any file is trained alike, and one run under one of them.

A stress is flags, and a change of what a file's `main` is given: its engine, its task and its step
size. The file itself is not touched, so that a method of yours (a file in the house's form) is put
under exactly what ours are. What each imitates, and how its strength was chosen: docs/stability.md.

In all of them the held-out problems are answered by the policy itself, in float32 at temperature 1:
a damaged sampler damages training and never its measurement.

A run is a fork of a process that has loaded torch and transformers; no checkpoint, no curves.
"""

import importlib.util
import os
import random
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import common  # noqa: F401  (before torch)
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (once, before the forks)
from common.distributed import World
from common.plumbing import launch
from common.plumbing.errors import BadInput, blame
from common.plumbing.folder import read_lines
from common.plumbing.tracking import Run
from common.tiny.arithmetic import KINDS
from torch import Tensor, nn

FORM = ("Args", "ACTED", "main", "load_task", "make_engine", "evaluate", "save_checkpoint")
# Equal steps for all: 40, of 16 groups of 8; six measurements, of 512 answers each.
STEPS, EVERY = 40, 8
COUNT = STEPS // EVERY + 1  # measurements, with the one before training
# No run ends because its sampler is not the trainer's (the last flag): that is what is measured.
BUDGET = f"--prompts_per_step 16 --group_size 8 --eval_every {EVERY} --eval_problems 256"
BUDGET += " --eval_samples 2 --sampler_tolerance 1e6"
# What no method may change; the second task has the first one's problems, and marks for steps
RULES = {"model": ("tiny",), "task": ("arithmetic", "arithmetic:steps")}
RULES |= {"max_new_tokens": (64,), "reward": ("",)}
# What a run was like in its last 16 steps: without it a score has no reason
LATE, DIARY = 16, ("entropy", "zero_groups", "sampler_gap", "response_len", "grad_norm")
USELESS = KINDS["arithmetic:mix"].terms


class Stress(NamedTuple):
    """What a run is put under; the defaults are none."""

    words: str = ""  # what breaks in real systems, and how it is imitated here
    flags: str = ""
    lr: float = 1.0  # times the file's own step size
    every: int = 1  # steps between two syncs of the sampler
    levels: int = 0  # of a sampler's weight, on either side of 0; 0: it is not rounded
    cold: float = 1.0  # times the temperature that training asks for
    wrong: float = 0.0  # share of verdicts that are turned
    useless: bool = False  # prompts of arithmetic:mix

    def strength(self) -> dict[str, object]:
        """What it sets, without the words."""
        own = self._asdict().items() - Stress()._asdict().items()
        return {name: value for name, value in sorted(own) if name != "words"}


STRESSES = {
    "none": Stress(
        "Nothing is added: the control, at a file's own settings but the rows of a step."
    ),
    "lr x3": Stress(
        "A step size is tuned on one model and kept on the next. Here it is three times the file's "
        "own.",
        lr=3.0,
    ),
    "16 updates": Stress(
        "Rollouts are dear, so each is used for many optimiser steps. Here for 16, of one group "
        "each.",
        "--minibatches 16",
    ),
    "old sampler": Stress(
        "In an asynchronous system weights reach the sampler late. Here it takes them over after "
        "every 16th step only, and the trainer evaluates π_old itself, with newer weights than "
        "those that sampled.",
        every=16,
    ),
    "coarse sampler": Stress(
        "A sampler's weights are quantised, and it samples from another policy. Here each row of a "
        "layer's matrix is rounded to 5 values, from -2 to 2 times its scale.",
        levels=2,
    ),
    "cold sampler": Stress(
        "Sampler and trainer differ in one setting. Here the sampler divides by 0.5 times the "
        "trainer's temperature, and reports the log-probs that it sampled with.",
        cold=0.5,
    ),
    "wrong verifier": Stress(
        "Verifiers err, both ways. Here a tenth of the verdicts in training is turned (0.1), by a "
        "rule of the seed and of how often the verifier was asked.",
        wrong=0.1,
    ),
    "useless prompts": Stress(
        "Most prompts of a set are too easy or too hard for the model. Here 75% have two terms and "
        "20% have 16, too many to work out in 64 tokens, as in `arithmetic:mix`; the held-out "
        "problems stay those of the control, 2 to 7 terms, and half of them are like the last 5%.",
        useless=True,
    ),
    "pairs": Stress(
        "Long responses are dear, so groups are small. Here 2 responses to each of 64 prompts, as "
        "many rows as 8 to each of 16.",
        "--prompts_per_step 64 --group_size 2",
    ),
    "four at half": Stress(
        "Nothing is ever wrong alone. Here four of the above at half strength: 2 times the step "
        "size, a sampler of every 8th step at 0.75 times the temperature, and 0.05 of the "
        "verdicts turned.",
        lr=2.0,
        every=8,
        cold=0.75,
        wrong=0.05,
    ),
}


@lru_cache
def loaded(path: Path) -> ModuleType:
    """A file in the house's form as a module of its own; BadInput if it is none."""
    where = importlib.util.spec_from_file_location(f"raced_{path.stem}", path)
    if where is None:
        raise BadInput(f"{path}: no Python file")
    with blame(f"{path}: cannot be loaded"):
        module = sys.modules[where.name] = importlib.util.module_from_spec(where)
        where.loader.exec_module(module)
    if lacking := [name for name in FORM if not hasattr(module, name)]:
        raise BadInput(f"{path}: no file in the form of grpo.py: it has no {', '.join(lacking)}")
    return module


def rounded(weight: Tensor, levels: int) -> Tensor:
    """Each row `[out, in]` to whole numbers from -levels to levels, times its own scale."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / levels  # [out, 1]
    return (weight / scale).round() * scale


def strained(engine: object, stress: Stress) -> object:
    """The engine with a sampler that is late, coarse or cold; `engine.policy` is the trainer's."""
    take, draw, engine.syncs = engine.sync, engine.generate, 0

    def sync(policy: nn.Module) -> None:
        engine.policy = policy
        if engine.syncs % stress.every == 0:
            take(policy)
            for name, weight in engine.lm.named_parameters() if stress.levels else ():
                if weight.dim() >= 2 and ".layers." in name:
                    weight.copy_(rounded(weight, stress.levels))
        engine.syncs += 1

    def generate(prompts: list, n: int, limit: int, temperature: float, *more, **named) -> object:
        return draw(prompts, n, limit, temperature * stress.cold, *more, **named)

    engine.sync, engine.generate = sync, generate
    return engine


def erring(verifier: Callable, share: float, seed: int) -> Callable:
    """A verifier that flips each verdict with this probability, by a rule of the seed and how often
    it was asked. Where it gives part marks, wrong becomes the best mark of the call."""
    asked = 0

    def judged(completions: list[str], answers: list[str]) -> list[float]:
        nonlocal asked
        asked += 1
        rng = random.Random(f"verdicts/{seed}/{asked}")
        marks = verifier(completions, answers)
        best = max(marks, default=0.0) or 1.0
        return [best - v if rng.random() < share else v for v in marks]

    return judged


def put_under(module: ModuleType, stress: Stress) -> None:
    """Replace what the module's `main` makes its engine, its task and its measurements with."""
    make_engine, load_task, main = module.make_engine, module.load_task, module.main

    def engine_of(args: object, lm: nn.Module, world: World, **named: object) -> object:
        engine = strained(make_engine(args, lm, world, **named), stress)
        engine.examiner = make_engine(replace(args, rollout_dtype="float32"), lm, world)
        return engine

    def task_of(args: object, tokenizer: object) -> object:
        kind = KINDS[args.task]
        if stress.useless:  # in training: the held-out problems stay those of the control
            kinds = {"terms": USELESS, "held_out": kind.held_out or kind.terms}
            KINDS[args.task] = kind._replace(**kinds)
        task = load_task(args, tokenizer)
        KINDS[args.task] = kind
        held_out = task.held_out_verifier or task.verifier
        verifier = erring(task.verifier, stress.wrong, args.seed) if stress.wrong else task.verifier
        return replace(task, verifier=verifier, held_out_verifier=held_out)

    def evaluate(
        engine: object, task: object, tokenizer: object, args: object, world: World
    ) -> dict[str, float]:
        """The policy's own sampled accuracy; each time with the same random numbers."""
        examiner, state = engine.examiner, engine.examiner.state_dict()
        examiner.sync(engine.policy)
        prompts = [problem.prompt_ids for problem in task.held_out]
        rollout = examiner.generate(prompts, args.eval_samples, args.max_new_tokens, 1.0)
        examiner.load_state_dict(state)
        texts = tokenizer.batch_decode(rollout.response_ids(), skip_special_tokens=True)
        answers = [p.answer for p in task.held_out for _ in range(args.eval_samples)]
        return {"sampled": sum(task.held_out_verifier(texts, answers)) / len(answers)}

    def stressed(args: object, world: World) -> None:
        for name, allowed in RULES.items():
            if getattr(args, name) not in allowed:
                raise BadInput(f"--{name} {getattr(args, name)}: the same for all who race")
        args.lr *= stress.lr
        main(args, world)

    module.make_engine, module.load_task, module.evaluate = engine_of, task_of, evaluate
    module.main, module.save_checkpoint = stressed, lambda *_: None


def child(module: ModuleType, flags: str, stress: Stress, seed: int, folder: Path, steps: int):
    """One run, in a process that was forked for it; what it says goes to `said`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or a GPU's bfloat16 would race with float32
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
    for output in (1, 2):
        os.dup2(said, output)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", errors="backslashreplace") for n in (1, 2))
    # A flag's last value counts: the budget's before the row's own, the stress's before both
    words = f"{flags} --steps {steps} {BUDGET} {stress.flags} --seed {seed}"
    sys.argv = [Path(module.__file__).name, *words.split(), "--run_dir", str(folder / "run")]
    Run.finish = lambda run: None  # no curves, no summary
    put_under(module, stress)
    try:
        launch.launch(module.main, module.Args)
    finally:
        sys.stdout.flush(), sys.stderr.flush()


def outcome(folder: Path, code: int, acted: str, steps: int = STEPS) -> dict:
    """What a run came to: a series of (step, sampled accuracy, thousands of tokens), the mean of
    the metric `acted`, and means of its last steps. One that stopped itself is a result, and so is
    one that refused to begin: `stopped` or `refused` says why. BadInput if somebody ended it, or it
    broke."""
    text = (folder / "said").read_text(errors="replace") if (folder / "said").exists() else ""
    said = (text.splitlines() or ["no word"])[-1]
    path = folder / "run" / "metrics.jsonl"
    lines = read_lines(path) if path.exists() else []
    ended = bool(lines) and lines[-1]["step"] == steps
    # It ended itself: its numbers were none any more, or it did not begin. A full disk is neither.
    own = code == 1 and re.search("nan|infinite", said, re.I) or code == 2 and not path.exists()
    if ": error: " not in said and code or not (own or code == 0 and ended):
        raise BadInput(f"exit code {code}: {said[:200]}")
    if code == 2:
        return {"refused": said.partition(": error: ")[2]}
    found, tokens = {"at": [], "sampled": [], "thousands": []}, 0.0
    for line in lines:
        tokens += line.get("tokens", 0) / 1000
        if "sampled" in line:
            for name, value in zip(found, (line["step"], line["sampled"], tokens)):
                found[name].append(round(value, 4))
    if not found["sampled"]:
        raise BadInput("broke: it logged no `sampled`, the accuracy that is scored")
    found |= {"tokens": round(tokens, 1), "acted": mean(lines, acted)}
    found["late"] = {name: mean(lines[-LATE:], name) for name in DIARY}
    return found | ({"stopped": said.partition(": error: ")[2]} if code else {})


def mean(lines: list[dict], name: str) -> float:
    """Of a metric over steps, to three digits; where it has no value it counts 0."""
    values = [line[name] or 0.0 for line in lines if name in line]
    return float(f"{sum(values) / max(1, len(values)):.3g}")
