"""Ten stresses and their control, and one training run under one of them.

    python -m labs.stresses FILE STRESS FLAGS...

A stress changes a file's flags, engine, task or learning rate from outside. The policy itself
always answers the held-out problems, so a stress damages training and not the measurement.
"""

import argparse
import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

from common.cli import BadInput, blame, in_one_line
from common.distributed import World
from common.launch import launch, parse
from common.rollout import LAYER, ROUTERS
from common.run import Run
from common.tasks.reward import Verdict
from common.tiny.arithmetic import KINDS
from tools import arguments
from torch import nn


@dataclass(frozen=True)
class Stress:
    """The changes that a stress makes to a run. The defaults change nothing."""

    lr: float = 1.0  # factor on the file's learning rate
    minibatches: int = 0  # optimiser steps per rollout; 0: the file's number
    group_size: int = 0  # responses to a prompt, at the same number of rows; 0: the file's number
    sync_every: int = 1  # steps between syncs of the sampler
    levels: int = 0  # levels of the sampler's weights on either side of 0; 0: not quantised
    temperature: float = 1.0  # factor on the sampler's temperature
    flipped: float = 0.0  # share of verdicts that are flipped
    uninformative: bool = False  # train on the prompts of arithmetic:mix

    def flags(self, rows: int) -> str:
        """Write the stress's command-line flags, for a step of `rows` rows."""
        words = f" --minibatches {self.minibatches}" if self.minibatches else ""
        if self.group_size:
            prompts = rows // self.group_size
            words += f" --prompts_per_step {prompts} --group_size {self.group_size}"
        return words


STRESSES = {
    "none": Stress(),
    "lr x3": Stress(lr=3.0),
    "16 updates": Stress(minibatches=16),
    "stale sampler": Stress(sync_every=16),
    "quantised sampler": Stress(levels=2),
    "mildly quantised sampler": Stress(levels=4),
    "temperature-mismatched sampler": Stress(temperature=0.5),
    "noisy verifier": Stress(flipped=0.1),
    "uninformative prompts": Stress(uninformative=True),
    "groups of two": Stress(group_size=2),
    "all four at half strength": Stress(lr=2.0, sync_every=8, temperature=0.75, flipped=0.05),
}


def load(path: Path) -> ModuleType:
    """Load a file as a new module, even if a module of its name is imported already."""
    spec = importlib.util.spec_from_file_location(f"raced_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module


def quantise(model: nn.Module, levels: int) -> None:
    """Round each row of a layer's matrices to whole numbers from -levels to levels, times the row's
    scale. Routers stay as they are, because a rounded router would choose other experts."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and LAYER.search(name) and not name.endswith(ROUTERS):
            scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / levels  # [out, 1]
            weight.data.copy_((weight / scale).round() * scale)  # [out, in]


def stress_sampler(engine: object, stress: Stress) -> None:
    """Make an engine sample from stale or quantised weights, or at another temperature."""
    sync_now, sample = engine.sync, engine.generate
    engine.syncs = 0

    def sync(policy: nn.Module) -> None:
        engine.policy = policy  # the newest weights, for the examiner
        if engine.syncs % stress.sync_every == 0:
            sync_now(policy)
            if stress.levels and hasattr(engine, "llm"):  # vLLM
                engine.llm.apply_model(partial(quantise, levels=stress.levels))
            elif stress.levels:
                quantise(engine.lm, stress.levels)
        engine.syncs += 1

    def generate(prompts: list, n: int, limit: int, temperature: float, *more, **named) -> object:
        return sample(prompts, n, limit, temperature * stress.temperature, *more, **named)

    engine.sync, engine.generate = sync, generate


def flip(verifier: Callable, share: float, seed: int) -> Callable:
    """Make a verifier that flips each verdict with probability `share`, and flips the same ones for
    the same seed and call. A mark m becomes the call's best mark minus m: part marks work, too."""
    calls = 0

    def flipped(completions: list[str], answers: list) -> list[Verdict]:
        nonlocal calls
        calls += 1
        rng = random.Random(f"verdicts/{seed}/{calls}")
        verdicts = verifier(completions, answers)
        best = max((verdict.score for verdict in verdicts), default=0.0) or 1.0
        for place, verdict in enumerate(verdicts):
            if rng.random() < share:
                verdicts[place] = verdict._replace(score=best - verdict.score)
        return verdicts

    return flipped


def put_under(module: ModuleType, stress: Stress) -> None:
    """Replace the functions by which a module's `main` makes its engine and task, and evaluates."""
    make_engine, load_task = module.make_engine, module.load_task
    evaluate, main = module.evaluate, module.main

    def stressed_engine(args: object, lm: nn.Module, world: World, **named: object) -> object:
        engine = make_engine(args, lm, world, **named)
        stress_sampler(engine, stress)
        exact = replace(args, rollout="hf", rollout_dtype=args.dtype)  # samples the policy itself
        engine.examiner = make_engine(exact, lm, world)
        return engine

    def stressed_task(args: object, tokenizer: object) -> object:
        kind = KINDS.get(args.task)
        if stress.uninformative and kind:  # only in training; the held-out problems stay
            terms = KINDS["arithmetic:mix"].terms
            held_out_terms = kind.held_out_terms or kind.terms
            KINDS[args.task] = kind._replace(terms=terms, held_out_terms=held_out_terms)
        task = load_task(args, tokenizer)
        if kind:
            KINDS[args.task] = kind
        task.exact_verifier = task.verifier
        if stress.flipped:
            task.verifier = flip(task.verifier, stress.flipped, args.seed)
        return task

    def exact_evaluate(engine: object, task: object, *more: object) -> dict:
        engine.examiner.sync(engine.policy)
        return evaluate(engine.examiner, replace(task, verifier=task.exact_verifier), *more)

    def stressed_main(args: object, world: World) -> None:
        args.lr *= stress.lr
        main(args, world)

    module.make_engine, module.load_task = stressed_engine, stressed_task
    module.evaluate, module.main = exact_evaluate, stressed_main
    module.save_checkpoint = lambda *_: None


def stressed(path: Path, name: str) -> ModuleType:
    """Load a file and put it under a stress. Raise BadInput if it is not in grpo.py's form."""
    with blame(f"{path}: not a file in the form of grpo.py"):
        module = load(path)
        put_under(module, STRESSES[name])
    return module


def flags_under(name: str, module: ModuleType, words: list[str]) -> list[str]:
    """Append a stress's flags to a command line of the module, where the last value of a flag wins.
    Raise BadInput for a wrong flag."""
    argv = sys.argv
    try:
        sys.argv = [module.__name__, *words]
        args = parse(module.Args)
    finally:
        sys.argv = argv
    rows = args.prompts_per_step * args.group_size
    return [*words, *STRESSES[name].flags(rows).split()]


def main() -> None:
    """Train one run, whose metrics.jsonl labs.race reads."""
    parser = arguments(__doc__, "labs.stresses")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("stress", choices=STRESSES, metavar="STRESS")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS")
    words = parser.parse_args()
    try:
        module = stressed(words.file, words.stress)
        words.flags = flags_under(words.stress, module, words.flags)
    except BadInput as error:
        parser.error(in_one_line(error))
    # Draw no curves. An empty summary still shows that the run has reached its end.
    Run.finish = lambda run: (run.folder / "summary.json").write_text("{}")
    sys.argv = [words.file.name, *words.flags]
    launch(module.main, module.Args)


if __name__ == "__main__":
    main()
