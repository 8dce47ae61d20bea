"""Most prompts teach nothing: choose the prompts, or sample again?

`--task arithmetic:mix` trains on 75% problems of two terms, 20% of 16 terms (which no response of
64 tokens can finish) and 5% of 5 to 7 terms. All held-out problems have 5 to 7 terms. grpo.py draws
prompts at random. goldilocks.py chooses the prompts from which its teacher expects the policy to
learn most, and variants/paced.py chooses them by its partition function. variants/dapo.py replaces
zero-variance groups by new samples, which cost tokens.

    python -m labs.mix
"""

import sys

import numpy as np

from labs import lab

TITLE = "A teacher that chooses prompts helps; sampling again does too, at three times the tokens"
FLAGS = "--task arithmetic:mix --steps 120 --eval_every 20 --save_every 1000"
FILES = {
    "uniform": "grpo.py --beta 0",
    "Goldilocks": "goldilocks.py --beta 0",
    "PACED": "-m variants.paced",
    "DAPO": "-m variants.dapo",
}
ARMS = {arm: f"{file} {FLAGS}" for arm, file in FILES.items()}
COLUMNS = ("greedy", "sampled", "zero_groups", "tokens")
COLOURS = dict(zip(ARMS, (lab.ORANGE, lab.BLUE, lab.GREEN, lab.BLACK)))
SEEDS = 5


def rows(results: dict) -> list[list[str]]:
    """Make the table. Tokens include those that DAPO drops. "At equal tokens" means where the run
    with the fewest tokens ends."""
    least = min(lab.spent(run)[-1] for runs in results.values() for run in runs)
    numbers = {
        "highest greedy": (lab.maximum("greedy"), ".2f"),
        "greedy at the end": (lab.last_value("greedy"), ".2f"),
        "sampled at the end": (lab.last_value("sampled"), ".2f"),
        "zero-variance groups": (lambda run: np.mean(run["zero_groups"]), ".2f"),
        "tokens, thousands": (lambda run: lab.spent(run)[-1], ".0f"),
        "sampled at equal tokens": (lambda run: lab.at_tokens(run, least), ".2f"),
    }
    return lab.table(results, numbers)


def draw(results: dict) -> object:
    words = (
        "held-out accuracy, sampled",
        "held-out accuracy, greedy",
        "zero-variance groups (share)",
    )
    figure, axes = lab.make_figure(TITLE, *words, width=11)
    for axis, column, width in zip(axes, ("sampled", "greedy", "zero_groups"), (1, 1, 9)):
        for arm, colour in COLOURS.items():
            style = {"linestyle": "--" if arm == "PACED" else "-", "width": width}
            lab.median_curve(axis, results[arm], column, colour, **style)
        axis.set_ylim(0, 1.02)
        lab.legend(
            axis, COLOURS, {"sampled": 0.02, "greedy": 0.25, "zero_groups": 0.6}[column], 0.27
        )
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
