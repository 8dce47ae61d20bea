"""Five layers combined: what does each add alone, what is lost without it, and at what price?

variants/recipe.py runs with none of its layers (grpo.py without its KL term), with all, with all
except one, and with one alone. (The clip and the average alone are justrl.py.) It also runs with a
pair of which one layer may hurt the other. Stale batches suffer from the variance of their
importance weights, and a curriculum prefers prompts that are solved half of the time, where the
rewards vary most. ESS/B shows whether one worsens the other. All arms run at the usual learning
rate, and at three times it, where runs decay. (STAPO's mask has flags under which it acts here. A
stale batch is 16 updates old.)

    python -m labs.stack
"""

import sys

import numpy as np

from labs import lab

TITLE = "At three times the learning rate five layers beat each one alone;\ntwo do nearly as well"
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
LAYERS["stale, curriculum, branches"] = ("stale", "curriculum", "branches")
RATES = {"": "", ", lr 1e-3": " --lr 1e-3"}
ARMS = {
    arm + rate: " ".join(
        [RUN + flag, *(flags for name, flags in OFF.items() if name not in layers)]
    )
    for rate, flag in RATES.items()
    for arm, layers in LAYERS.items()
}
COLUMNS = ("greedy", "sampled", "tokens", "ess_ratio", "lr_scale", "silenced")
SHORT = "--steps 6"  # one more than the queue holds
COLOURS = {"nothing": lab.ORANGE, "stale, curriculum": lab.GREEN, "all five": lab.BLACK}
SEEDS = 5


def against(layers: str) -> str | None:
    """The arm that a row is compared with, seed by seed."""
    if layers == "nothing":
        return None
    pairs = {"stale, curriculum": "stale alone", "stale, curriculum, branches": "stale, curriculum"}
    return pairs.get(layers, "all five" if layers.startswith("without") else "nothing")


def ended(run: dict, other: dict | None, least: float) -> dict:
    """The table's numbers of a run, compared with the `other` run of its seed. `least`: thousands
    of tokens at which all runs are compared."""
    found = {
        "late": lab.tail(run["sampled"], 3),
        "tokens": lab.spent(run)[-1],
        "equal": lab.at_tokens(run, least),
        "ess": np.mean(run["ess_ratio"]) if run["ess_ratio"] else np.nan,
    }
    if other:
        found["gain"] = found["late"] - lab.tail(other["sampled"], 3)
        found["pace"] = np.mean(run["sampled"]) - np.mean(other["sampled"])
    return found


def rows(results: dict) -> list[list[str]]:
    """Columns "at equal tokens" compare all runs of one learning rate where the run that sampled
    least ends."""
    titles = {
        "late": "sampled, last three",
        "gain": "less its reference's",
        "tokens": "thousand tokens",
    }
    titles |= {"pace": "mean of all, less its reference's", "equal": "sampled at equal tokens"}
    titles["ess"] = "ESS/B"
    shown = {"": tuple(titles), ", lr 1e-3": ("late", "gain", "tokens", "equal", "ess")}
    forms = {"gain": "+.3f", "pace": "+.3f", "tokens": ".0f"}
    table = [["layers"]]
    for rate, names in shown.items():
        table[0] += [rate.lstrip(", ") + ": " * bool(rate) + titles[name] for name in names]
    for layers in LAYERS:
        cells, other = [], against(layers)
        for rate, names in shown.items():
            least = min(lab.spent(run)[-1] for arm in LAYERS for run in results[arm + rate])
            runs = results[layers + rate]
            pairs = zip(runs, results[other + rate] if other else [None] * len(runs))
            told = [ended(run, beside, least) for run, beside in pairs]
            for name in names:
                known = "stale" in LAYERS[layers] if name == "ess" else name in told[0]
                cells.append(lab.cell(told, name, forms.get(name, ".2f")) if known else "–")
        table.append([layers, *cells])
    return table


def draw(results: dict) -> object:
    """Four arms without one layer, the usual rate and ESS/B are in the table only."""
    words = "sampled accuracy at lr 1e-3, last three evaluations"
    figure, (axis,) = lab.sheet(TITLE, words, width=7.4)
    arms = ["nothing", *(f"{name} alone" for name in OFF), "stale, curriculum"]
    arms += ["stale, curriculum, branches", "without branches", "all five"]
    for y, layers in enumerate(reversed(arms)):
        values = [lab.tail(run["sampled"], 3) for run in results[f"{layers}, lr 1e-3"]]
        lab.dots(axis, y, values, COLOURS.get(layers, lab.BLUE))
    axis.set_yticks(range(len(arms)), labels=reversed(arms))
    axis.set_xlim(0, 0.82)
    axis.tick_params(labelsize=12)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
