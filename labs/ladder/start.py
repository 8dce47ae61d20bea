"""The embedded model in four widths, with about the same sampled accuracy, and a run from one.

    python -m labs.ladder.start SIZE FILE FLAGS...

SIZE is 30k, 124k, 500k or 2M parameters. All four imitate the demonstrations of the embedded model,
until their sampled accuracy reaches a goal or the cosine ends. The goal was the embedded model's
0.51. 30k and 500k ended at 0.45, so 0.45 became the goal of the two others. Each is made once and
kept in runs/labs/ladder: five to fifteen minutes on one core.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from checks.files import ROOT
from common.data import load_task
from common.distributed import ALONE
from common.launch import launch
from common.logprobs import Policy
from common.metrics import evaluate
from common.rollout import HFEngine
import torch
from filelock import FileLock
from tools.maintain.make_tiny import GUESS, SLIP, imitate, tokenizer, untrained

import grpo
from labs.race.stresses import load

PARAMETERS = {"30k": 31_584, "124k": 124_480, "500k": 494_592, "2M": 1_972_096}
# Hidden size; steps of the cosine; rate; how often to measure, on 256 problems, twice each; goal
SIZES = {"30k": (32, 12000, 3e-3, 400, 0.51), "124k": (64, 4000, 3e-3, 100, 0.45)}
SIZES |= {"500k": (128, 2000, 2e-3, 50, 0.51), "2M": (256, 1400, 1e-3, 25, 0.45)}


def reaches(goal: float, lm: torch.nn.Module, tok: object, every: int) -> Callable[[int], bool]:
    """For `imitate`: is the sampled accuracy at the goal?"""
    args = grpo.Args(eval_problems=256, eval_samples=2)
    task = load_task(args, tok)

    def enough(step: int) -> bool:
        if step == 0 or step % every:
            return False
        engine = HFEngine(lm, ALONE, 0, "float32", max_rows=512)
        engine.sync(Policy(lm))
        sampled = evaluate(engine, task, args, ALONE)["sampled"]
        print(f"step {step}: {sampled:.3f}", flush=True)
        return sampled >= goal

    return enough


def model(size: str) -> str:
    """The folder of a model, made if it is not there."""
    folder = ROOT / f"runs/labs/ladder/{size}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            width, steps, lr, every, goal = SIZES[size]
            torch.manual_seed(0)
            lm, tok = untrained("tiny", width), tokenizer()
            lm.generation_config.eos_token_id = [tok.eos_token_id]
            imitate(lm, tok, steps, lr, GUESS, SLIP, reaches(goal, lm, tok, every))
            lm.save_pretrained(folder)
            tok.save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    size, file, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    sys.argv = [Path(file).name, "--model", model(size), *flags]
    module = load(ROOT / file)
    launch(module.main, module.Args)
