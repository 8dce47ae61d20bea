"""Ladder: how do the signs of instability change with the number of parameters?

The embedded model in four widths (start.py), with the same sampled accuracy before training, is
trained by grpo.py without its KL term at rates a factor of two apart.

    python -m labs.ladder
"""

import sys

from labs import lab

TITLE = "Ladder"
RATES = {"30k": (3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3), "124k": (3e-4, 6e-4, 1.2e-3, 2.4e-3)}
RATES |= {"500k": (1.5e-4, 3e-4, 6e-4, 1.2e-3), "2M": (1.5e-4, 3e-4, 6e-4)}
RUN = "grpo.py --beta 0 --steps 30 --eval_every 5 --eval_problems 128 --eval_samples 2"
RUN += " --save_every 1000"
ARMS = {}
for size, rates in RATES.items():
    for rate in rates:
        ARMS[f"{size}, {rate:g}"] = f"-m labs.ladder.start {size} {RUN} --lr {rate:g}"
COLUMNS = ("sampled", "entropy", "response_len", "clip_share")
SEEDS = 3


def rows(results: dict) -> list[list[str]]:
    return [["arm"]]


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, "")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
