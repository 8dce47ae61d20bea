"""Five layers on one another: what each adds alone, what is lost without it, and at what price.

variants/recipe.py with none of its layers (grpo.py without its KL term), with all, with all but
one, with one alone (the clip and the average alone are justrl.py), and with a pair of which one may
hurt the other: stale batches suffer from the variance of their weights, and a curriculum prefers
prompts that are solved half of the time, where the rewards vary most. ESS/B tells whether the one
feeds the other. (STAPO's mask has flags under which it acts here; a stale batch is 16 updates old.)

    python -m labs.stack
"""

import sys

import numpy as np

from labs import lab

TITLE = "Five layers: alone, together, and all but one"
RUN = "-m variants.recipe --steps 60 --eval_every 5 --eval_samples 2 --save_every 1000"
RUN += " --tau_p 0.05 --entropy_quantile 0.95 --lag 4"
OFF = {
    "clip": "--clip_high 0.2 --no_token_mean",
    "tokens": "--tokens none",
    "curriculum": "--no_curriculum",
    "branches": "--branches 0",
    "stale": "--lag 0",
}
LAYERS = {"nothing": (), "all five": tuple(OFF)}
LAYERS |= {f"without {name}": tuple(other for other in OFF if other != name) for name in OFF}
LAYERS |= {f"{name} alone": (name,) for name in OFF}
LAYERS["stale, curriculum"] = ("stale", "curriculum")
ARMS = {
    arm: " ".join([RUN, *(flags for name, flags in OFF.items() if name not in layers)])
    for arm, layers in LAYERS.items()
}
COLUMNS = ("greedy", "sampled", "tokens", "ess_ratio", "lr_scale", "zero_groups", "silenced")
QUICKLY = "--steps 6"  # one more than the queue holds
COLOURS = dict(zip(OFF, (lab.GREY, lab.PINK, lab.GREEN, lab.BLUE, lab.ORANGE)))
SEEDS = 5


def rows(results: dict) -> list[list[str]]:
    """At equal tokens: where the run that sampled least ends."""
    least = min(lab.spent(run)[-1] for runs in results.values() for run in runs)
    head = ["layers", "greedy at the end", "sampled at the end", "sampled, mean of evaluations"]
    head += ["tokens, thousands", "sampled at equal tokens"]
    table = [[*head, "groups without gradient", "ESS/B, mean", "ESS/B, lowest"]]
    for arm, runs in results.items():
        ended = [
            {
                "greedy": run["greedy"][-1],
                "sampled": run["sampled"][-1],
                "steps": np.mean(run["sampled"]),
                "tokens": lab.spent(run)[-1],
                "equal": lab.at_tokens(run, least),
                "idle": np.mean(run["zero_groups"]),
                "ess": np.mean(run["ess_ratio"]) if len(run["ess_ratio"]) else np.nan,
                "low": min(run["ess_ratio"], default=np.nan),
            }
            for run in runs
        ]
        cells = [lab.cell(ended, name) for name in ("greedy", "sampled", "steps")]
        cells += [lab.cell(ended, "tokens", ".0f")]
        cells += [lab.cell(ended, name) for name in ("equal", "idle")]
        stale = "stale" in LAYERS[arm]
        table.append([arm, *cells, *(lab.cell(ended, n) if stale else "–" for n in ("ess", "low"))])
    return table


def draw(results: dict) -> object:
    words = "all but one, sampled accuracy", "one alone, sampled", "ESS/B of stale batches"
    figure, axes = lab.sheet(TITLE, *words, width=12)
    few = {"all five": lab.BLACK} | {f"without {name}": c for name, c in COLOURS.items()}
    one = {"nothing": lab.BLACK} | {f"{name} alone": c for name, c in COLOURS.items()}
    aged = {"stale alone": lab.ORANGE, "stale, curriculum": lab.GREEN, "all five": lab.BLACK}
    lab.curves(axes[0], results, "sampled", few)
    lab.curves(axes[1], results, "sampled", one)
    lab.curves(axes[2], results, "ess_ratio", aged, 9)
    for axis, colours in zip(axes, (few, one, aged)):
        lab.key(axis, colours)
    for axis in axes:
        axis.set_ylim(0, 1.02)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
