"""Credit: a reward for every step of the working, or one reward for the answer?

grpo.py runs on `--task variants/steps.py` (the reward is the share of the right solution's steps in
the response) and on `--task arithmetic` (right or wrong). Beside it run three methods that find out
which tokens earned a reward: stapo.py's mask, with flags under which it acts, deep_grpo.py's
branches, and variants/blockwise.py, with one advantage for the working and one for the answer.
Held-out answers are scored right or wrong in all arms.

    python -m labs.credit
    python -m labs.credit --part blocks
"""

import sys

import numpy as np

from labs import lab
from labs.credit import blocks

TITLE = "Step rewards leave fewer zero-variance groups, but the accuracy ends no higher"
FLAGS = "--steps 60 --eval_every 10 --save_every 1000"
FILES = {
    "GRPO": "grpo.py --beta 0",
    "STAPO": "stapo.py --tau_p 0.05 --entropy_quantile 0.95",
    "DEEP-GRPO": "deep_grpo.py --beta 0",
    "blockwise": "-m variants.blockwise",
}
TASKS = {"outcome": "arithmetic", "steps": "variants/steps.py"}
ARMS = {
    f"{task}, {name}": f"{file} --task {kind} {FLAGS}"
    for task, kind in TASKS.items()
    for name, file in FILES.items()
}
COLUMNS = ("greedy", "sampled", "zero_groups", "tokens", "silenced", "extra_tokens")
COLOURS = dict(zip(FILES, (lab.BLACK, lab.ORANGE, lab.BLUE, lab.GREEN)))
SEEDS, EARLY = 5, (10, 20)  # EARLY: steps


def at(run: dict, step: int) -> float:
    """Sampled accuracy at the first evaluation from this step on, or at the last one."""
    later = [value for when, value in zip(run["sampled@"], run["sampled"]) if when >= step]
    return (later or run["sampled"][-1:])[0]


def rows(results: dict) -> list[list[str]]:
    """An arm whose file lacks a number has – in the table."""
    early = [f"sampled, step {step}" for step in EARLY]
    head = ["arm", *early, "sampled at the end", "greedy at the end", "zero-variance groups"]
    table = [[*head, "tokens, thousands", "silenced"]]
    for arm, runs in results.items():
        ended = [
            {
                **{name: at(run, step) for name, step in zip(early, EARLY)},
                "sampled": run["sampled"][-1],
                "greedy": run["greedy"][-1],
                "zero": np.mean(run["zero_groups"]),
                "tokens": sum(run["tokens"]) / 1000,
                "silenced": sum(run["silenced"]),
            }
            for run in runs
        ]
        cells = [lab.cell(ended, name) for name in (*early, "sampled", "greedy", "zero")]
        masked = lab.cell(ended, "silenced", ".0f") if "STAPO" in arm else "–"
        table.append([arm, *cells, lab.cell(ended, "tokens", ".0f"), masked])
    return table


def draw(results: dict) -> object:
    words = "reward for the outcome: sampled accuracy", "reward for every step: sampled accuracy"
    figure, axes = lab.sheet(TITLE, *words)
    for axis, task in zip(axes, TASKS):
        for name, colour in COLOURS.items():
            lab.bands(axis, results[f"{task}, {name}"], "sampled", colour)
        axis.set_ylim(0, 1.02)
        lab.key(axis, COLOURS)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__], blocks=blocks)
