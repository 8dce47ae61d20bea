"""A run's picture: metrics.jsonl and config.json -> curves.png."""

import textwrap
from pathlib import Path

import numpy as np

from common.plumbing.errors import BadInput
from common.plumbing.folder import read_lines, saved_config, whole

PANELS = {  # metric -> title of its panel; the algorithm's telling metrics stand before `entropy`
    "reward": "reward (training samples)",
    "greedy": "held-out accuracy",
    "response_len": "response length (tokens)",
    "entropy": "entropy (nats per token)",
    "grad_norm": "gradient norm (before clipping)",
    "zero_groups": "groups without gradient (share)",
    "sampler_kl": "KL of sampler and trainer",
}
# In float32 sampler and trainer differ by some 1e-7 in log p and, squared, in KL: a curve that
# stays below this shows rounding, and nothing of the two.
ROUNDING = 1e-6
BLUE, ORANGE = "#0072B2", "#D55E00"  # also told apart by the colour-blind (Okabe and Ito)


def telling(config: dict) -> dict[str, str]:
    """The metrics that show the algorithm acting -> what they are, in words."""
    return config["acted"]


def series(lines: list[dict], name: str) -> np.ndarray:
    """Steps and values of a metric, `[2, n]`: NaN where a row has null, no point where it has
    none."""
    rows = [(row["step"], row[name]) for row in lines if name in row]
    number = [isinstance(value, int | float) and abs(value) < np.inf for _, value in rows]
    rows = [(step, value if known else np.nan) for (step, value), known in zip(rows, number)]
    return np.array(rows, float).reshape(-1, 2).T


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` values (odd), fewer at the ends, `[n]` -> `[n]`; a NaN counts in no
    mean and stays one: a gap."""
    known, window = np.isfinite(values), np.ones(min(width, len(values) - 1 | 1))
    total = np.convolve(np.where(known, values, 0.0), window, "same")  # [n]
    count = np.convolve(known, window, "same")  # [n]
    return np.where(known, total / np.maximum(count, 1), np.nan)


def sheet(titles: dict[str, str], heading: str) -> tuple:
    """(figure, metric -> axes): a panel for each metric, three in a row, to be drawn on.

    Letters are 10 pixels high or more where a README shows the picture 850 pixels wide.
    """
    from matplotlib.figure import Figure  # here: it takes a second that no start should cost
    from matplotlib.ticker import LogLocator, MaxNLocator

    rows, axes = -(-len(titles) // 3), {}
    figure = Figure(figsize=(10, 2.4 * rows + 0.6), layout="constrained")
    for place, (name, title) in enumerate(titles.items(), 1):
        same = next(iter(axes.values()), None)
        axes[name] = axis = figure.add_subplot(rows, 3, place, sharex=same)
        axis.set_title(textwrap.fill(title, 36), fontsize=11, parse_math=False)  # a $ is a $
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
        axis.set_xlabel("step" if place > len(titles) - 3 else "")  # the lowest of each column
        if name == "grad_norm":  # one spike of 100 would hide all the rest
            axis.set_yscale("log")
            axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5), numticks=3))
        for show in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            show(lambda value, _: f"{value:.5g}")
        if name in ("reward", "greedy", "sampled", "zero_groups"):
            axis.set_ylim(-0.03, 1.03)
    heading = "\n".join(textwrap.fill(line, 110) for line in heading.splitlines())
    figure.suptitle(heading, parse_math=False)
    return figure, axes


def draw_curves(folder: Path) -> Path:
    """Draw the run in `folder`; the path of its curves.png. BadInput where nothing can be drawn."""
    if not (config := saved_config(folder)):
        raise BadInput(f"{folder}: holds no run")
    lines, acted = read_lines(folder / "metrics.jsonl"), telling(config)
    names = dict.fromkeys([*[*PANELS][:3], *acted, *[*PANELS][3:]])
    found = {name: series(lines, name) for name in names}
    least = {"sampler_kl": ROUNDING, "grad_norm": 1e-30}  # a log axis has no 0
    fewest = 2 if len(lines) > 4 else 1  # one dot is no curve
    titles = {
        name: (PANELS | acted)[name]
        for name, (_, values) in found.items()
        if len(values) >= fewest and np.any(values >= least.get(name, -np.inf))  # False for NaN
    }
    if not titles:
        raise BadInput(f"{folder}: nothing to draw yet, metrics.jsonl holds no number")
    width = len(lines) // 12 | 1
    setting = f"{config['model']} on {config['task']}, seed {config['seed']}, lr {config['lr']}"
    drawn = f"faint: each step; line: mean of {width} steps" if width > 1 else "each step"
    figure, axes = sheet(titles, f"{config['algorithm']}: {setting}\n{drawn}")
    for name, axis in axes.items():
        steps, values = found[name]  # [n], [n]
        color = ORANGE if name in acted else BLUE
        if np.nanmin(values) < 0 or np.nanmax(values) > 1:  # a reward of another range
            axis.autoscale(axis="y")
        if name == "greedy":  # on the same problems each time: nothing to smooth
            axis.plot(steps, values, "o-", color=BLUE, label="greedy")
            axis.plot(*series(lines, "sampled"), "s--", color=ORANGE, label="sampled")
            axis.legend()
        elif 2 * len(steps) < len(lines):  # what happens now and then is no line
            axis.plot(steps, values, "o", markersize=4, color=color)
        else:
            axis.plot(steps, values, ".-", markersize=1, linewidth=1, color=color, alpha=0.3)
            axis.plot(steps, line := smooth(values, width), color=color)
            low, high = axis.get_ylim()
            if name == "grad_norm":  # one of nearly 0 would flatten all the rest
                axis.set_ylim(bottom=max(low, np.nanmin(line) / 20))
            elif (room := 0.1 * abs(high) - (high - low)) > 0:  # or rounding would fill the panel
                axis.set_ylim(low - room / 2, high + room / 2)
    with whole(folder / "curves.png") as partial:
        figure.savefig(partial, dpi=100, format="png")
    return folder / "curves.png"
