"""The picture of one run, curves.png, from its config.json and its metrics.jsonl."""

import math
import os
import textwrap
from pathlib import Path

import numpy as np

from common.records.files import atomic_write, read_lines

PANELS = {  # metric -> title of its panel; the algorithm's own metrics come before `entropy`
    "reward": "reward (training samples)",
    "greedy": "held-out accuracy",
    "response_len": "response length (tokens)",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (before clipping)",
    "zero_groups": "groups without gradient (share)",
    "sampler_kl": "KL of sampler and trainer",
}
# A curve of the gradient norm, or of the KL between sampler and trainer, that stays below this
# shows only rounding.
ROUNDING = 1e-6
BLUE, ORANGE = "#0072B2", "#D55E00"  # the colour-blind can tell them apart (Okabe and Ito)


def series(lines: list[dict], name: str) -> np.ndarray:
    """Return steps and values of a metric, `[2, n]`. A null becomes NaN, and rows without the
    metric are left out."""
    steps, values = [], []
    for row in lines:
        if name in row:
            number = isinstance(row[name], int | float) and abs(row[name]) < np.inf
            steps.append(row["step"])
            values.append(row[name] if number else np.nan)
    return np.array([steps, values], float)


def odd(n: int) -> int:
    """Return n, or n + 1 if n is even."""
    return n if n % 2 else n + 1


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Average `[n]` over a centred window of `width` values (odd), fewer at the ends. A NaN counts
    in no mean and stays NaN."""
    known, window = np.isfinite(values), np.ones(min(width, odd(len(values) - 1)))
    total = np.convolve(np.where(known, values, 0.0), window, "same")  # [n]
    count = np.convolve(known, window, "same")  # [n]
    return np.where(known, total / np.maximum(count, 1), np.nan)


def draw_curves(config: dict, lines: list[dict]) -> object:
    """Draw the figure of a run, from its config.json and its metrics: three panels in a row."""
    # A Figure needs no backend. A notebook hands its own to its programs, whose Python may lack it.
    os.environ["MPLBACKEND"] = "agg"
    from matplotlib.figure import Figure  # here, because it takes a second to import

    acted = config["acted"]
    first, later = list(PANELS)[:3], list(PANELS)[3:]
    curves = {}  # metric -> its steps and values
    for name in dict.fromkeys([*first, *acted, *later]):
        steps, values = series(lines, name)  # [n], [n]
        least = ROUNDING if name in ("sampler_kl", "grad_norm") else -np.inf
        if np.any(values >= least):  # NaN >= least is False
            curves[name] = steps, values
    rows = math.ceil(len(curves) / 3)
    figure = Figure(figsize=(10, 2.4 * rows + 0.6), layout="constrained")
    width = odd(len(lines) // 12)
    setting = f"{config['model']} on {config['task']}, seed {config['seed']}, lr {config['lr']}"
    heading = textwrap.fill(f"{config['algorithm']}: {setting}", 110)
    drawn = f"faint: each step; line: mean of {width} step(s)"
    figure.suptitle(f"{heading}\n{drawn}", parse_math=False)  # keep a $ as it is
    for place, (name, (steps, values)) in enumerate(curves.items(), 1):
        axis = figure.add_subplot(rows, 3, place)
        axis.set_title(textwrap.fill((PANELS | acted)[name], 36), fontsize=11, parse_math=False)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        color = ORANGE if name in acted else BLUE
        if name == "greedy":  # on the same problems each time, so there is nothing to smooth
            axis.plot(steps, values, "o-", color=BLUE, label="greedy")
            axis.plot(*series(lines, "sampled"), "s--", color=ORANGE, label="sampled")
            axis.legend()
        else:
            axis.plot(steps, values, ".-", markersize=1, linewidth=1, color=color, alpha=0.3)
            axis.plot(steps, smooth(values, width), color=color)
    return figure


def draw_run(folder: Path, config: dict) -> Path:
    """Draw the run in `folder`; return the path of its curves.png."""
    figure = draw_curves(config, read_lines(folder / "metrics.jsonl"))
    with atomic_write(folder / "curves.png") as partial:
        figure.savefig(partial, dpi=100, format="png")
    return folder / "curves.png"
