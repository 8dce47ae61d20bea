"""Drift: a sampler that is not the policy pushes in the same direction at every step.

variants/centred.py trains with four samplers whose parameters are rounded to a few levels. Its
gradient is used as it is, with the bounded weight π/μ (`--weight tis`), with its drift removed
(centred), or with both; at the usual learning rate and at three times it. Held-out problems are
answered by the policy and by the sampler.

    python -m labs.drift.train
"""

import sys

import numpy as np

from labs import lab

TITLE = (
    "At the usual rate no correction moves the policy's accuracy; the weight lowers the sampler's"
)
GAPS = {16: "0.01", 4: "0.11", 3: "0.17", 2: "0.90"}  # levels -> nats per token, before training
RATES = {"usual rate": "3e-4", "three times": "1e-3"}
METHODS = {
    "nothing": "--centre_top 0",
    "weight": "--centre_top 0 --weight tis",
    "centred": "--centre_top 20",
    "both": "--centre_top 20 --weight tis",
}
RUN = "-m labs.mismatch.quantised {levels} centred.py --steps 40 --eval_every 20"
RUN += " --save_every 1000 --rollout_dtype float32 --sampler_tolerance 1e6"
ARMS = {}
for levels, gap in GAPS.items():
    for rate, lr in RATES.items():
        for method, flags in METHODS.items():
            arm = f"{gap}, {rate}, {method}"
            ARMS[arm] = f"{RUN.format(levels=levels)} --lr {lr} {flags}"
COLUMNS = ("policy_sampled", "sampled", "sampler_gap", "response_len", "centred", "weight_max")
COLOURS = dict(zip(METHODS, (lab.BLACK, lab.ORANGE, lab.BLUE, lab.GREEN)))
SEEDS = 5


def end(run: dict, name: str = "policy_sampled") -> float:
    """Sampled accuracy at the last evaluation."""
    return float(run[name][-1])


def rows(results: dict) -> list[list[str]]:
    """Medians and ranges; and in how many seeds an arm is above `nothing` of its gap and rate."""
    table = [["arm", "runs", "policy", "above nothing", "sampler", "gap, last 20 steps", "tokens"]]
    for arm, runs in results.items():
        if not runs:
            continue
        ended = [
            {
                "policy": end(run),
                "sampler": end(run, "sampled"),
                "gap": lab.tail(run["sampler_gap"]),
                "tokens": lab.tail(run["response_len"]),
            }
            for run in runs
        ]
        plain = results[f"{arm.rpartition(', ')[0]}, nothing"]
        pairs = list(zip(ended, plain))
        above = f"{sum(one['policy'] > end(other) for one, other in pairs)} of {len(pairs)}"
        cells = [lab.cell(ended, name) for name in ("policy", "sampler", "gap")]
        cells.insert(1, "–" if arm.endswith("nothing") else above)
        table.append([arm, str(len(runs)), *cells, lab.cell(ended, "tokens", ".0f")])
    return table


def draw(results: dict) -> object:
    """A dot is a run: a column of dots for each gap and method."""
    panels = {
        "policy, usual rate": ("usual rate", "policy_sampled"),
        "sampler, usual rate": ("usual rate", "sampled"),
        "policy, three times the rate": ("three times", "policy_sampled"),
    }
    figure, axes = lab.sheet(TITLE, *panels, width=11)
    for axis, (rate, column) in zip(axes, panels.values()):
        for x, gap in enumerate(GAPS.values()):
            for place, (method, colour) in enumerate(COLOURS.items()):
                values = [end(run, column) for run in results[f"{gap}, {rate}, {method}"]]
                at = x + 0.2 * (place - 1.5)
                axis.scatter(np.full(len(values), at), values, s=16, color=colour, alpha=0.6)
                if values:
                    axis.plot(at, np.median(values), "_", color=colour, markersize=9)
        axis.set_xticks(range(len(GAPS)), labels=GAPS.values())
        axis.set_xlabel("gap of the sampler (nats per token)")
        axis.set_ylim(0, 1)
    lab.key(axes[2], COLOURS, x=0.62, y=0.9)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
