"""Training on answers that are eight batches old: what collapses, and what holds it.

vcpo.py at three times its step size, with and without its two controls: the step shortened by the
effective sample size (`--ess_scaling`), and the baseline of least variance
(`--optimal_baseline`). Both arms cap a response's weight at 8.

    python -m labs.stale
"""

import sys

from labs import lab

TITLE = "Stale answers: without variance control the run collapses, with it it does not"
RUN = "vcpo.py --lr 1e-3 --steps 100 --eval_every 20 --save_every 1000"
ARMS = {"both controls": RUN, "neither": f"{RUN} --no_ess_scaling --no_optimal_baseline"}
COLUMNS = ("greedy", "sampled", "ess_ratio", "response_len", "entropy")
COLOURS = dict(zip(ARMS, (lab.BLUE, lab.ORANGE)))
QUICKLY = "--lag 2"
SEEDS, LOW = 5, 0.5  # runs of each arm; greedy accuracy below which a run has collapsed


def rows(results: dict) -> list[list[str]]:
    table = [
        ["arm", "greedy at the end", "lowest after step 0", "collapsed", "ESS/B, last 20 steps"]
    ]
    for arm, runs in results.items():
        ended = [
            {
                "end": run["greedy"][-1],
                "low": min(run["greedy"][1:]),
                "ess": lab.tail(run["ess_ratio"]),
            }
            for run in runs
        ]
        lost = sum(run["end"] < LOW for run in ended)
        cells = (lab.cell(ended, name) for name in ("end", "low"))
        table.append([arm, *cells, f"{lost} of {len(runs)}", lab.cell(ended, "ess")])
    return table


def draw(results: dict) -> object:
    words = "held-out accuracy, greedy", "effective sample size (share of the batch)"
    figure, axes = lab.sheet(TITLE, *words)
    lab.curves(axes[0], results, "greedy", COLOURS)
    lab.curves(axes[1], results, "ess_ratio", COLOURS, 9)
    lab.key(axes[0], COLOURS)
    for axis in axes:
        axis.set_ylim(0, 1.02)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
