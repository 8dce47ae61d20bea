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
from labs.warning.rules import fell

TITLE = "A larger model falls at a smaller learning rate"
RATES = {"30k": (3e-4, 6e-4, 1.2e-3, 2.4e-3, 4.8e-3), "124k": (3e-4, 6e-4, 1.2e-3, 2.4e-3)}
RATES |= {"500k": (1.5e-4, 3e-4, 6e-4, 1.2e-3), "2M": (1.5e-4, 3e-4, 6e-4)}
RUN = "grpo.py --beta 0 --steps 30 --eval_every 5 --eval_problems 128 --eval_samples 2"
RUN += " --save_every 1000"
ARMS = {}
for size, tried in RATES.items():
    for rate in tried:
        ARMS[f"{size}, {rate:g}"] = f"-m labs.ladder.start {size} {RUN} --lr {rate:g}"
LATE = "16 updates"
NUMBERS = {
    "spurious tokens, τ_p 0.002, before": "stapo: spurious, tokens, τ_p = 0.002",
    f"spurious tokens, τ_p 0.05, after {LATE}": f"stapo: spurious, tokens, τ_p = 0.05, {LATE}",
    f"their share of |gradient|², after {LATE}": f"stapo: spurious, gradient², τ_p = 0.05, {LATE}",
    f"ESS/B after {LATE}": f"vcpo: ESS/B, {LATE}",
    f"tokens cut after {LATE}": f"grpo: tokens cut, {LATE}",
    f"gradient cut after {LATE}": f"grpo: gradient cut, {LATE}",
    f"KL of a response after {LATE}": f"minirl: KL of a response, {LATE}",
}
DRAWN = (f"KL of a response after {LATE}", f"tokens cut after {LATE}")
TICKS = ((0.00015, 0.0003, 0.0006, 0.0012), (0.2, 0.5, 1), (0.06, 0.07, 0.08, 0.1))
COLUMNS = ("sampled", "entropy", "response_len", "clip_share")
SEEDS = 5


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
    """Of log y by log of the number of parameters, with two standard errors on either side.
    `points`: size -> y of every seed."""
    x = np.log([PARAMETERS[size] for size, values in points.items() for _ in values])
    y = np.log([value for values in points.values() for value in values])
    power, start = np.polyfit(x, y, 1)
    error = np.square(y - power * x - start).sum() / (len(x) - 2) / np.square(x - x.mean()).sum()
    return f"{power:.2f} ± {2 * error**0.5:.2f}"


def signs(name: str) -> dict[str, list[float]]:
    """size -> a number of every seed (panels.py)."""
    stored = json.loads((ROOT / "labs/ladder/signs.json").read_text(encoding="utf-8"))
    return {size: [run[name][0] for run in runs] for size, runs in stored.items()}


def smollm2(name: str) -> str:
    """The same of SmolLM2, two seeds; a dash if lab real has not measured it."""
    stored = json.loads((ROOT / "labs/real/panels.json").read_text(encoding="utf-8"))
    runs = [run["numbers"] for run in stored["results"]["SmolLM2"]]
    return ", ".join(f"{run[name][0]:.2g}" for run in runs) if name in runs[0] else "–"


def rates(results: dict) -> dict[str, list[float]]:
    """size -> the largest rate without a fall, of every seed."""
    found = {}
    for size in PARAMETERS:
        seeds = len(results[f"{size}, {RATES[size][0]:g}"])
        found[size] = [largest(results, size, seed) for seed in range(seeds)]
    return found


def told(values: list[float]) -> str:
    """`0.0006 (0.0006–0.0012)`: median, lowest, highest."""
    return lab.cell([{"x": value} for value in values], "x", ".2g")


def rows(results: dict) -> list[list[str]]:
    """Sizes as columns; the last two are the slope over the four and SmolLM2 at its own rate."""
    table = [["", *PARAMETERS, "slope", "SmolLM2, lr 1e-5"]]
    found = rates(results)
    cells = [told(found[size]) for size in PARAMETERS]
    table.append(["largest rate without a fall", *cells, slope(found), "–"])
    for words, name in NUMBERS.items():
        points = signs(name)
        cells = [told(points[size]) for size in PARAMETERS]
        positive = all(min(values) > 0 for values in points.values())
        cells.append(slope(points) if positive else "–")
        table.append([words, *cells, smollm2(name)])
    return table


def draw(results: dict) -> object:
    """Every seed."""
    figure, axes = lab.sheet(TITLE, "largest rate without a fall", *DRAWN, width=12)
    columns = [rates(results), *(signs(NUMBERS[words]) for words in DRAWN)]
    for axis, points in zip(axes, columns):
        for size, values in points.items():
            x = [PARAMETERS[size]] * len(values)
            axis.plot(x, values, "o", color=lab.BLUE, alpha=0.6)
    for axis, ticks in zip(axes, TICKS):
        axis.set(xscale="log", yscale="log", xlabel="parameters")
        lab.plain_ticks(axis, "y", ticks)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
