"""Train a file in the form of grpo.py, and log how far each update moves its weights.

    python -m labs.fall.steps grpo.py --minibatches 16 --lr 9e-4
    python -m labs.fall.steps --length 0.058 grpo.py --minibatches 1

`--length` makes every update as long as it says (‖Δθ‖ over all weights), in Adam's direction. A
line of metrics.jsonl gets two numbers of the step's updates, and one of the run so far:
    update   ‖Δθ‖ of an update, the mean
    signal   Σ m̂² / Σ v̂ over all weights after the last update, with Adam's moments. If gradients
             are pure noise it is (1-β1)/(1+β1), 0.053 at β1 = 0.9. If all are equal, it is 1
    way      ‖θ - θ_0‖, the distance from the weights that the run began with
"""

import argparse
import sys
from pathlib import Path
from types import ModuleType

import torch
from common.cli import BadInput, blame, in_one_line
from common.launch import launch
from tools import arguments
from torch import Tensor

from labs.stresses import load


def distance(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return ‖a - b‖ over all weights."""
    return torch.stack([(x - y).norm() for x, y in zip(a, b)]).norm()


def measured(module: ModuleType, length: float) -> None:
    """Replace a module's optimiser and `Run`, so that updates have a length and are logged."""
    updates, last = [], {}

    class AdamW(torch.optim.AdamW):
        @torch.no_grad()
        def step(self) -> None:
            weights = self.param_groups[0]["params"]
            before = [weight.clone() for weight in weights]
            if not last:
                last["start"] = before
            super().step()
            size = distance(weights, before)
            if length and size > 0:  # with a first gradient of 0 there is no direction yet
                for weight, old in zip(weights, before):
                    weight.copy_(old + (weight - old) * (length / size))
                size = distance(weights, before)
            updates.append(size)
            last["signal"] = self.signal(weights)
            last["way"] = distance(weights, last["start"])

        def signal(self, weights: list[Tensor]) -> Tensor:
            """Return Σ m̂² / Σ v̂."""
            beta1, beta2 = self.param_groups[0]["betas"]
            states = [self.state[weight] for weight in weights if weight in self.state]
            steps = states[0]["step"]
            m = sum(state["exp_avg"].square().sum() for state in states) / (1 - beta1**steps) ** 2
            v = sum(state["exp_avg_sq"].sum() for state in states) / (1 - beta2**steps)
            return m / v

    class Run(module.Run):
        def log(self, step: int, metrics: dict, minibatches: list = ()) -> None:
            if updates:
                metrics = metrics | {"update": torch.stack(updates).mean().item()}
                metrics |= {name: last[name].item() for name in ("signal", "way")}
                updates.clear()
            super().log(step, metrics, minibatches)

    module.Run, torch.optim.AdamW = Run, AdamW


def main() -> None:
    parser = arguments(__doc__, "labs.fall.steps")
    parser.add_argument("--length", type=float, default=0.0, help="0: as long as Adam makes them")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS")
    words = parser.parse_args()
    try:
        with blame(f"{words.file}: not a file in the form of grpo.py"):
            module = load(words.file)
            measured(module, words.length)
    except BadInput as error:
        parser.error(in_one_line(error))
    sys.argv = [words.file.name, *words.flags]
    launch(module.main, module.Args)


if __name__ == "__main__":
    main()
