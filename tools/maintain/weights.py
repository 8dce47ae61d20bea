"""Draw the gradient weight on ∇ log π against the ratio, for each objective and both signs of the
advantage.

    python -m tools.maintain.weights        writes docs/weights.png

Each curve is the autograd gradient of the file's own `policy_loss` on one-token responses, so a
response's ratio is its token's. goldilocks.py and deep_grpo.py have grpo.py's weight (deep_grpo's
branches times λ = 1). minirl is shown without a gap between sampler and trainer (μ = π_old), vcpo
without its baseline. Each curve ends at r = 1/π_old, where the token's probability is 1.
"""

import importlib

import common  # noqa: F401  (before torch)
import matplotlib
import torch
from matplotlib import pyplot
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from checks.files import ROOT
from tools import arguments
from tools.reader import KINDS, NEAR, weights

SPURIOUS = "rare, where another was sure"
# File, title, letter of the ratio, the kind of token
CURVES = [
    ("grpo", "GRPO, Goldilocks, DEEP-GRPO\nclip 0.2 / 0.2", "r", "unlikely"),
    ("gspo", "GSPO (note the axis)\nclip 3e-4 / 4e-4", "s", "unlikely"),
    ("sapo", "SAPO\nτ 1.0 / 1.05", "r", "unlikely"),
    ("stapo", "STAPO, most tokens\nclip 0.2 / 0.28", "r", "at a fork"),
    ("stapo", "STAPO, a spurious token\nπ_old 0.0001, low entropy", "r", SPURIOUS),
    ("minirl", "MiniRL\nmask 0.2 / 0.27, cap 5", "r", "unlikely"),
    ("maspo", "MASPO, a rare token\nπ_old 0.02", "r", "unlikely"),
    ("maspo", "MASPO, a common token\nπ_old 0.5, so r ≤ 2", "r", "likely"),
    ("vcpo", "VCPO\ncap 8", "w", "unlikely"),
]


def main() -> None:
    """Draw the nine panels."""
    matplotlib.use("Agg")
    pyplot.rcParams.update({"font.size": 9, "axes.titlesize": 9.5})
    figure, axes = pyplot.subplots(3, 3, figsize=(10.4, 9.2), layout="constrained", sharey=True)
    for axis, (name, title, letter, kind) in zip(axes.flat, CURVES):
        ratios = torch.logspace(-1.7, 1.7, 4001, dtype=torch.float64)  # 0.02 to 50
        if name == "gspo":
            ratios = torch.linspace(1 - NEAR, 1 + NEAR, 4001, dtype=torch.float64)
        ratios = ratios[ratios <= 1 / KINDS[kind][0]]
        found = weights(importlib.import_module(name), ratios)[:, list(KINDS).index(kind)]
        for sign, colour, weight in ((1.0, "tab:blue", found[0]), (-1.0, "tab:red", found[1])):
            axis.plot(ratios, sign * ratios, color="0.6", linestyle=(0, (2, 2)), linewidth=1)
            axis.plot(ratios, weight, color=colour, linewidth=2)
        axis.axvline(1.0, color="0.8", linewidth=1, zorder=0)
        axis.axhline(0.0, color="0.8", linewidth=1, zorder=0)
        axis.set_yscale("symlog", linthresh=1.0, linscale=1.0)
        ticks = "-50 -10 -3 -1 0 1 3 10 50".split()
        axis.set_yticks([float(tick) for tick in ticks], labels=ticks)
        axis.yaxis.set_minor_locator(NullLocator())
        ticks = "0.02 0.1 0.5 1 2 5 10 50".split()
        if name == "gspo":
            ticks = "0.999 1 1.001".split()
        else:
            axis.set(xscale="log", xlim=(0.018, 56))
        axis.set_xticks([float(tick) for tick in ticks], labels=ticks)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(title=title, xlabel=f"{letter}, {'token' if letter == 'r' else 'response'}")
        axis.grid(alpha=0.25)
    for row in axes:
        row[0].set_ylabel("weight on ∇ log π")
    lines = [Line2D([], [], color=colour, linewidth=2) for colour in ("tab:blue", "tab:red")]
    lines.append(Line2D([], [], color="0.6", linestyle=(0, (2, 2)), linewidth=1))
    words = ["Â = +1: raise the token", "Â = -1: lower the token"]
    words.append("the ratio itself: nothing is clipped")
    figure.legend(lines, words, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(ROOT / "docs" / "weights.png", dpi=130)


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
