"""Three sizes of one model: rare tokens among the sure ones, the step size and the age that kill.

The embedded model (124k parameters) beside a narrower and a wider one, made by the same script from
the same demonstrations (`python -m tools.maintain.make_tiny tiny-30k`). stapo.py at growing step
sizes, with flags under which it counts enough of what it calls spurious; vcpo.py without its two
controls at growing lags, at its own step size.

    python -m labs.scale
"""

import sys

import numpy as np

from labs import lab

TITLE = "At three times the step size only the largest holds, mostly; age hurts none"
SIZES = {"30k": "tiny-30k", "124k": "tiny", "500k": "tiny-500k"}
RATES, LAGS = (3e-4, 1e-3, 3e-3), (4, 16, 64)
SHORT = "--eval_every 10 --eval_samples 2 --save_every 1000"
RATE = f"stapo.py --steps 40 --tau_p 0.01 {SHORT}"
LAG = f"vcpo.py --no_ess_scaling --no_optimal_baseline {SHORT}"
ARMS = {
    f"{size}, lr {rate:g}": f"{RATE} --model {model} --lr {rate:g}"
    for size, model in SIZES.items()
    for rate in RATES
}
ARMS |= {
    f"{size}, lag {lag}": f"{LAG} --model {model} --lag {lag} --steps {60 + lag}"
    for size, model in SIZES.items()
    for lag in LAGS
}
COLUMNS = ("greedy", "sampled", "silenced", "silenced_share", "tokens", "ess_ratio")
SEEDS = 5


def survived(run: dict) -> bool:
    """Ended no lower than where it began, measured by sampling."""
    return run["sampled"][-1] >= run["sampled"][0]


def rows(results: dict) -> list[list[str]]:
    head = ["arm", "sampled before", "sampled at the end", "survived", "spurious per 10,000 tokens"]
    table = [head]
    for arm, runs in results.items():
        ended = [
            {
                "before": run["sampled"][0],
                "end": run["sampled"][-1],
                "rare": 1e4 * sum(run["silenced"]) / sum(run["tokens"]),
            }
            for run in runs
        ]
        cells = [lab.cell(ended, name) for name in ("before", "end")]
        rare = "–" if "lag" in arm else lab.cell(ended, "rare", ".1f")
        table.append([arm, *cells, f"{sum(map(survived, runs))} of {len(runs)}", rare])
    return table


def draw(results: dict) -> object:
    words = (
        "stapo.py: sampled accuracy after 40 steps",
        "vcpo.py without controls: after 60 updates, lr 3e-4",
    )
    figure, axes = lab.sheet(TITLE, *words)
    colours = dict(zip(SIZES, (lab.ORANGE, lab.BLACK, lab.BLUE)))
    for axis, ticks, of in zip(axes, (RATES, LAGS), ("lr {:g}", "lag {}")):
        for size, colour in colours.items():
            ends = [
                [{"end": run["sampled"][-1]} for run in results[f"{size}, {of.format(t)}"]]
                for t in ticks
            ]
            middle, low, high = np.array([lab.over(runs, "end") for runs in ends]).T
            axis.fill_between(ticks, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.plot(ticks, middle, color=colour, linewidth=2, marker="o", markersize=4)
        lab.plain_ticks(axis, "x", ticks)
        axis.set_ylim(0, 1.02)
    axes[0].set_xlabel("lr")
    axes[1].set_xlabel("age of a batch, in updates")
    lab.key(axes[1], colours)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
