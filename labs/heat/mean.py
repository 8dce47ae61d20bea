"""Train runs that fall from one model, and measure the mean of their weights.

    python -m labs.heat.mean grpo.py --runs 4     # two minutes on one core
    python -m labs.heat.mean grpo.py --shuffled   # eight runs without a signal

All runs start from the same weights: grpo.py's after five steps of 16 updates at three times its
rate. Each then takes ten more such steps with its own seed, so with other prompts and samples.
FILE trains these ten steps, with all flags that are not this program's.

`--shuffled` shuffles advantages within each group: no signal, but the same noise. Each number is
greedy accuracy on the held-out problems:

    start      the weights that all runs share
    each       every run's own
    mean2, mean4, ...   means of the weights of 2 runs, of 4, ...: disjoint sets of them
    back       every run, moved straight back to the mean's distance: nearer, but not averaged
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from checks import replaced
from checks.files import ROOT
from common.cli import BadInput, in_one_line
from common.data import load_task
from common.distributed import ALONE
from common.launch import resolve_auto
from common.metrics import evaluate
from common.model import load_model
from common.rollout import make_engine
from grpo import Args
from safetensors.torch import load_file
from tools import arguments
from torch import Tensor

from labs.lab import one_thread

FALL = "--minibatches 16 --lr 9e-4 --save_hf --save_every 1000"
MEASURE = "--eval_every 1000 --eval_samples 1 --eval_problems 8"  # as little as possible
SCORED = "rollout.advantages = advantages(rewards).flatten()"
SHUFFLED = "rollout.advantages = advantages(rewards)"
SHUFFLED += ".gather(1, torch.rand(P, G).argsort(1)).flatten()"


def train(command: str, seed: int, folder: Path, shuffled: bool = False) -> dict[str, Tensor]:
    """Train one run in a process of its own; return its weights by name."""
    file, *flags = command.split()
    environment = one_thread() | {"PYTHONPATH": str(ROOT)}
    if shuffled:
        folder.mkdir()
        text = replaced(ROOT / file, SCORED, SHUFFLED)
        file = folder / Path(file).name
        file.write_text(text, encoding="utf-8")
    words = [file, *flags, "--seed", seed, "--run_dir", folder / "run"]
    command_line = [sys.executable, *map(str, words)]
    pipes = {"capture_output": True, "text": True}
    ended = subprocess.run(command_line, cwd=ROOT, env=environment, **pipes)
    if ended.returncode:
        raise BadInput(f"{command}: {ended.stderr.splitlines()[-1]}")
    return load_file(folder / "run/model/model.safetensors")


class Examiner:
    """Measures the embedded model's greedy accuracy with any weights."""

    def __init__(self):
        args = Args(eval_samples=1)
        resolve_auto(args, ALONE, args.model)
        lm, tokenizer = load_model(args.model, ALONE)
        self.task, self.args = load_task(args, tokenizer), args
        self.engine = make_engine(args, lm, ALONE)

    def __call__(self, weights: dict[str, Tensor]) -> float:
        self.engine.lm.load_state_dict(weights, strict=False)  # a tied head is not in the file
        return evaluate(self.engine, self.task, self.args, ALONE)["greedy"]


def mean(runs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average the weights of several runs."""
    return {name: torch.stack([run[name] for run in runs]).mean(0) for name in runs[0]}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return ‖a - b‖ over all weights."""
    return torch.stack([(a[name] - b[name]).norm() for name in a]).norm().item()


def between(start: dict[str, Tensor], end: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Go this share of the straight way from one model's weights to another's."""
    return {name: start[name] + share * (end[name] - start[name]) for name in start}


def measure(start: dict[str, Tensor], runs: list[dict[str, Tensor]]) -> dict[str, list[float]]:
    """Measure the start, each run, means of their weights, and each run moved back."""
    greedy = Examiner()
    measured = {"start": [greedy(start)], "each": [greedy(run) for run in runs]}
    size = 2
    while size <= len(runs):
        sets = [runs[first : first + size] for first in range(0, len(runs) - size + 1, size)]
        measured[f"mean{size}"] = [greedy(mean(chosen)) for chosen in sets]
        size *= 2
    near = distance(mean(runs), start)
    measured["back"] = []
    for run in runs:
        share = near / distance(run, start)
        measured["back"].append(greedy(between(start, run, share)))
    return measured


def main() -> None:
    parser = arguments(__doc__, "labs.heat.mean")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("--runs", type=int, default=8, help="2 or more (default: 8)")
    parser.add_argument("--shuffled", action="store_true", help="advantages shuffled in each group")
    parser.add_argument("--seed", type=int, default=1, help="of the five steps (default: 1)")
    words, flags = parser.parse_known_args()
    if words.runs < 2:
        parser.error(f"--runs {words.runs}: must be 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        try:
            start = train(f"grpo.py {FALL} {MEASURE} --steps 5", words.seed, folder / "start")
            model = folder / "start/run/model"
            fork = f"{words.file} {FALL} {MEASURE} --model {model} --warmup 0 --steps 10 "
            fork += " ".join(flags)
            runs = []
            for number in range(1, words.runs + 1):
                print(f"run {number} of {words.runs} ...", flush=True)
                seed = 100 * words.seed + number
                runs.append(train(fork, seed, folder / str(number), words.shuffled))
        except (BadInput, OSError) as error:
            parser.error(in_one_line(error))
    measured = measure(start, runs)
    for name, values in measured.items():
        print(f"{name:14}", *(f"{value:.3f}" for value in values))


if __name__ == "__main__":
    main()
