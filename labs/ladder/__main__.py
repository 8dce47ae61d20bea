"""Ladder: how do the signs of instability change with the number of parameters?

The embedded model in four widths (start.py), with the same sampled accuracy before training, is
trained by grpo.py without its KL term at rates a factor of two apart.

    python -m labs.ladder
"""

import json
import sys

import numpy as np
from checks.files import ROOT

from labs import lab
from labs.ladder.start import PARAMETERS

TITLE = "Ladder"
RATES = {"30k": (3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3), "124k": (3e-4, 6e-4, 1.2e-3, 2.4e-3)}
RATES |= {"500k": (1.5e-4, 3e-4, 6e-4, 1.2e-3), "2M": (1.5e-4, 3e-4, 6e-4)}
RUN = "grpo.py --beta 0 --steps 30 --eval_every 5 --eval_problems 128 --eval_samples 2"
RUN += " --save_every 1000"
ARMS = {}
for size, rates in RATES.items():
    for rate in rates:
        ARMS[f"{size}, {rate:g}"] = f"-m labs.ladder.start {size} {RUN} --lr {rate:g}"
LATE = "16 updates"
NUMBERS = {
    "spurious tokens, τ_p 0.002": "stapo: spurious, tokens, τ_p = 0.002",
    f"spurious tokens, τ_p 0.05, after {LATE}": f"stapo: spurious, tokens, τ_p = 0.05, {LATE}",
    f"their share of |gradient|², after {LATE}": f"stapo: spurious, gradient², τ_p = 0.05, {LATE}",
    f"ESS/B after {LATE}": f"vcpo: ESS/B, {LATE}",
    f"tokens cut after {LATE}": f"grpo: tokens cut, {LATE}",
    f"gradient cut after {LATE}": f"grpo: gradient cut, {LATE}",
    f"KL of a response after {LATE}": f"minirl: KL of a response, {LATE}",
}
DRAWN = (f"KL of a response after {LATE}", f"tokens cut after {LATE}")
STUDENT = {6: 2.447, 10: 2.228}  # of the t-distribution, by degrees of freedom
COLUMNS = ("sampled", "entropy", "response_len", "clip_share")
SEEDS = 3


def fell(run: dict) -> bool:
    """The last two measurements are below 0.8 of the best."""
    return max(run["sampled"][-2:]) < 0.8 * max(run["sampled"])


def largest(results: dict, size: str, seed: int) -> float:
    """The largest rate below the first at which this seed fell; a factor of two below the lowest
    rate if it fell at that."""
    found = RATES[size][0] / 2
    for rate in RATES[size]:
        if fell(results[f"{size}, {rate:g}"][seed]):
            break
        found = rate
    return found


def slope(points: dict[str, list[float]]) -> str:
    """Of log y by log of the number of parameters, with a 95% t-interval. `points`: size -> y of
    every seed."""
    x = np.log([PARAMETERS[size] for size, values in points.items() for _ in values])
    y = np.log([value for values in points.values() for value in values])
    power, start = np.polyfit(x, y, 1)
    error = np.square(y - power * x - start).sum() / (len(x) - 2) / np.square(x - x.mean()).sum()
    width = STUDENT[len(x) - 2] * error**0.5
    return f"{power:.2f} ({power - width:.2f}–{power + width:.2f})"


def rows(results: dict) -> list[list[str]]:
    """Sizes as columns; the last two are the slope over the four and SmolLM2 at its own rate."""
    table = [["", *PARAMETERS, "slope", "SmolLM2, lr 1e-5"]]
    rates = {size: [largest(results, size, n) for n in range(SEEDS)] for size in PARAMETERS}
    cells = ["/".join(f"{rate:.2g}" for rate in rates[size]) for size in PARAMETERS]
    table.append(["largest rate without a fall, by seed", *cells, slope(rates), "–"])
    smollm2 = json.loads((ROOT / "labs/real/panels.json").read_text())["results"]["SmolLM2"]
    panels = json.loads((ROOT / "labs/ladder/panels.json").read_text())
    for words, name in NUMBERS.items():
        points = {size: [run[name][0] for run in panels[size]] for size in PARAMETERS}
        cells = [" / ".join(f"{value:.2g}" for value in points[size]) for size in PARAMETERS]
        known = min(value for values in points.values() for value in values) > 0
        other = [run["numbers"][name][0] for run in smollm2 if name in run["numbers"]]
        cells += [slope(points) if known else "–", " / ".join(f"{x:.2g}" for x in other) or "–"]
        table.append([words, *cells])
    return table


def draw(results: dict) -> object:
    """Every seed."""
    figure, axes = lab.sheet(TITLE, "largest rate without a fall", *DRAWN, width=12)
    panels = json.loads((ROOT / "labs/ladder/panels.json").read_text())
    for size, count in PARAMETERS.items():
        values = [[largest(results, size, n) for n in range(SEEDS)]]
        values += [[run[NUMBERS[words]][0] for run in panels[size]] for words in DRAWN]
        for axis, column in zip(axes, values):
            axis.plot([count] * len(column), column, "o", color=lab.BLUE, alpha=0.6)
    for axis in axes:
        axis.set(xscale="log", yscale="log", xlabel="parameters")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
