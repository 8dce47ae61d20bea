"""Does the tiny model's race predict the race of a real model?

    python -m labs.race.transfer                   compares table.json with real.json
    python -m labs.race.transfer runs/real.json    the same for a table of your own

Each cell is compared with grpo.py's under the same stress. `+` or `-`: all seeds lie above, or
below, all of grpo.py's. `up` or `down`: the median does. The picture of the curves lies beside
the table. docs/real.md has the printed tables and the picture of real.json.
"""

import argparse
import importlib
import json
import math
from pathlib import Path

import numpy as np
from checks.files import ROOT
from common.run import atomic_write

from labs import lab

race = importlib.import_module("labs.race.__main__")
REAL = ROOT / "labs/race/real.json"
SAME_ROW = {"grpo --lr 3.3e-6": "grpo, lr/3"}  # the real race's name -> the tiny race's
METHODS = "grpo --lr 3.3e-6,sapo,maspo,stapo,minirl,gspo,goldilocks,deep_grpo".split(",")
STRESSES = ["none", "lr x3", "all four at half strength"]


def sign(table: dict, method: str, stress: str) -> str:
    """`+`, `-` or `=`, as the race has it; `=`: the seeds overlap."""
    return race.sign(table, method, stress).strip("?") or "="


def direction(table: dict, method: str, stress: str) -> str:
    """Whether the median lies above grpo.py's: `up`, or `down`."""
    own, other = (race.median(table, name, stress) for name in (method, "grpo"))
    return "up" if own > other else "down"


def predicted(method: str, stress: str) -> tuple[str, str]:
    """Sign and direction of a cell in the tiny model's race."""
    tiny = race.stored(race.TABLE, race.BUDGET)
    cell = SAME_ROW.get(method, method), stress
    return sign(tiny, *cell), direction(tiny, *cell)


def predictions() -> list[list[str]]:
    """A line for each method: what the tiny model's race says of each stress."""
    told = [["method", *STRESSES]]
    for method in METHODS:
        cells = [" ".join(predicted(method, stress)) for stress in STRESSES]
        told.append([method, *cells])
    return told


def chance(sign: str, ours: int, theirs: int) -> float:
    """The probability that `sign` is right if both methods draw their scores from one distribution.

    All seeds of one method are above all of the other's in one of C(ours + theirs, ours) orders.
    """
    apart = 1 / math.comb(ours + theirs, ours)
    return 1 - 2 * apart if sign == "=" else apart


def comparison(real: dict) -> tuple[list[list[str]], str]:
    """A line for each cell that was measured with enough seeds, and the number of hits."""
    told = [["stress", "method", "predicted", "measured", "grpo", "method's", "sign", "direction"]]
    signs, directions, by_chance = [], [], 0.0
    for stress in race.columns(real):
        for method in METHODS:
            seeds = len(race.scores(real, method, stress))
            if min(seeds, len(race.scores(real, "grpo", stress))) < race.SEEDS:
                continue
            before = predicted(method, stress)
            now = sign(real, method, stress), direction(real, method, stress)
            hits = [one == other for one, other in zip(before, now)]
            signs.append(hits[0])
            directions.append(hits[1])
            medians = [f"{race.median(real, name, stress):.2f}" for name in ("grpo", method)]
            words = ["hit" if hit else "miss" for hit in hits]
            told.append([stress, method, " ".join(before), " ".join(now), *medians, *words])
            by_chance += chance(before[0], seeds, len(race.scores(real, "grpo", stress)))
    n = len(signs)
    summary = f"signs {sum(signs)} of {n} (chance: {by_chance:.1f}), "
    summary += f"directions {sum(directions)} of {n} (chance: {n / 2:.1f})"
    return told, summary


def control(real: dict) -> list[list[str]]:
    """A line for each method without a stress: medians of its seeds."""
    told = [
        ["method", "seeds", "before", "after", "score", "thousand tokens", "acted", "GB", "CPU s"]
    ]
    for method in race.methods(real):
        runs = race.runs_of(real, method, "none")
        if runs:
            accuracies = np.median([run["sampled"] for run in runs], axis=0)
            keys = "tokens acted gigabytes cpu_seconds".split()
            rest = [f"{np.median([run[key] for run in runs]):.3g}" for key in keys]
            scored = race.cell(real, method, "none")
            ends = [f"{accuracies[place]:.2f}" for place in (0, -1)]
            told.append([method, str(len(runs)), *ends, scored, *rest])
    return told


def draw(real: dict, path: Path) -> None:
    """Sampled accuracy by step: a panel for each method, a line for each stress (medians, with all
    seeds in between)."""
    from matplotlib.figure import Figure

    names = race.methods(real)
    rows = math.ceil(len(names) / 6)
    figure = Figure(figsize=(14.4, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, 6, sharey=True).flatten()
    steps = real["cells"][0]["runs"][0]["at"]  # the same for all runs
    for axis, name in zip(axes, names):
        for stress, colour in zip(STRESSES, (lab.BLACK, lab.BLUE, lab.ORANGE)):
            runs = race.runs_of(real, name, stress)
            if runs:
                lab.line(axis, steps, runs, "sampled", colour, label=stress)
        axis.set_title(name, fontsize=10)
        axis.set_xticks(steps)
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    figure.supxlabel("step")
    lab.entitle(figure, "SmolLM2-135M on two-digit sums: sampled accuracy on held-out problems")
    with atomic_write(path) as partial:
        figure.savefig(partial, dpi=130, format="png", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a real model's race with the tiny's")
    parser.add_argument("table", type=Path, nargs="?", default=REAL, help="default: real.json")
    path = parser.parse_args().table
    if not path.is_file():
        parser.error(f"{path}: not a file; docs/real.md has the command that makes a table")
    real = json.loads(path.read_text(encoding="utf-8"))
    rows, summary = comparison(real)
    print(lab.text(predictions()), lab.text(rows), summary, lab.text(control(real)), sep="\n\n")
    draw(real, path.with_name(f"{path.stem}-curves.png"))


if __name__ == "__main__":
    main()
