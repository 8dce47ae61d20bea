"""Training on responses that are eight batches old: what collapses, and what prevents it?

vcpo.py runs at three times its learning rate, with and without its two controls. One lowers the
learning rate by the effective sample size (`--ess_scaling`). The other is the baseline that
minimises the variance of the plain estimate (`--optimal_baseline`). A third arm has no controls and
lr 8e-4, the mean rate under the controls: would a smaller rate for all batches do as well? All arms
limit a response's weight to 8.

    python -m labs.stale
"""

import sys

import numpy as np

from labs import lab

TITLE = "At three times the learning rate, stale runs collapse without variance control"
RUN = "vcpo.py --lr 1e-3 --steps 100 --eval_every 20 --save_every 1000"
BARE = "--no_ess_scaling --no_optimal_baseline"
ARMS = {"both controls": RUN, "neither": f"{RUN} {BARE}"}
ARMS["neither, lr 8e-4"] = f"{RUN.replace(' --lr 1e-3', '')} {BARE} --lr 8e-4"
COLUMNS = ("greedy", "ess_ratio")
COLOURS = {"both controls": lab.BLUE, "neither": lab.ORANGE}
SHORT = "--lag 2"
SEEDS, LOW = 5, 0.5  # runs of each arm; accuracies below LOW count as lost


def rows(results: dict) -> list[list[str]]:
    numbers = {
        "greedy at the end": (lab.last_value("greedy"), ".2f"),
        "lowest after step 0": (lambda run: min(run["greedy"][1:]), ".2f"),
        "ESS/B, last 20 steps": (lab.mean_of_last_20("ess_ratio"), ".2f"),
        "√(ESS/B), mean": (lambda run: np.mean(np.sqrt(run["ess_ratio"])), ".2f"),
    }
    table = lab.table(results, numbers, runs=False)
    for row, runs in zip(table, ["", *results.values()]):
        lost = sum(run["greedy"][-1] < LOW for run in runs)
        row.insert(3, f"{lost} of {len(runs)}" if runs else "ended below 0.5")
    return table


def draw(results: dict) -> object:
    words = "held-out accuracy, greedy", "effective sample size (share of the batch)"
    figure, axes = lab.make_figure(TITLE, *words)
    lab.curves(axes[0], results, "greedy", COLOURS)
    lab.curves(axes[1], results, "ess_ratio", COLOURS, 9)
    lab.legend(axes[0], COLOURS)
    for axis in axes:
        axis.set_ylim(0, 1.02)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
