"""How much of a fall is due to each of four causes, alone and together?

grpo.py and the two methods with the highest worst cell in docs/stability.md run under all sixteen
sets of four stresses, each at about half the strength there. With y the score of a set:
    main effect   the mean of y(with the cause) - y(without it), over the eight sets of the others
    interaction   the mean of y(both) - y(one) - y(other) + y(neither), over the four sets of the
                  other two: below 0, two together are worse than their sum

    python -m labs.shares
"""

import sys
from collections.abc import Iterator
from itertools import combinations

import numpy as np

from labs import lab
from labs.stresses import HALVES, SETS

TITLE = "What each cause, and each pair beyond its sum, adds to the score"
BUDGET = "--steps 40 --eval_every 8 --eval_samples 2 --sampler_tolerance 1e6"
FILES = {"grpo": "grpo.py", "recipe": "variants/recipe.py", "opd": "variants/opd.py"}
ARMS = {}
for file, path in FILES.items():
    for names in [(), *SETS]:
        on = ", ".join(names) or "none"
        ARMS[f"{file}: {on}"] = f"-m labs.stresses {path} '{on}' {BUDGET}"
COLUMNS = ("sampled",)
SEEDS = 3
QUICK = [arm for arm in ARMS if arm.startswith("grpo: ")]
PAIRS = list(combinations(HALVES, 2))


def scores(results: dict, file: str) -> dict[frozenset, np.ndarray]:
    """Map each set of causes to its scores `[seeds]`. As in labs.race, a score is the mean of the
    last three accuracies."""
    of = {}
    for names in [(), *SETS]:
        runs = results[f"{file}: {', '.join(names) or 'none'}"]
        of[frozenset(names)] = np.array([lab.tail(run["sampled"], 3) for run in runs])
    seeds = min(map(len, of.values()))
    return {names: values[:seeds] for names, values in of.items()}


def effect(of: dict[frozenset, np.ndarray], *causes: str) -> np.ndarray:
    """Compute the main effect of one cause, or the interaction of two, `[seeds]`."""
    found = []
    for others in of:
        if not others & set(causes):
            total = 0.0
            for size in range(len(causes) + 1):
                for some in combinations(causes, size):
                    total = total + (-1) ** (len(causes) - size) * of[others | set(some)]
            found.append(total)
    return np.mean(found, axis=0)


def numbers(of: dict[frozenset, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the table's rows: words, and a number for each seed."""
    yield "score without stress", of[frozenset()]
    yield "score under all four", of[frozenset(HALVES)]
    for cause in HALVES:
        yield f"alone: {cause}", of[frozenset([cause])] - of[frozenset()]
    for cause in HALVES:
        yield f"main effect: {cause}", effect(of, cause)
    for pair in PAIRS:
        yield f"interaction: {', '.join(pair)}", effect(of, *pair)


def files(results: dict) -> list[str]:
    """List the files with results; a quick run has one."""
    return [file for file in FILES if f"{file}: none" in results]


def rows(results: dict) -> list[list[str]]:
    table = [["", *files(results)]]
    columns = [dict(numbers(scores(results, file))) for file in files(results)]
    for words in columns[0]:
        cells = [lab.cell([{"x": x} for x in column[words]], "x") for column in columns]
        table.append([words, *cells])
    return table


def draw(results: dict) -> object:
    with_results = files(results)
    figure, axes = lab.sheet(TITLE, *(f"{file}.py" for file in with_results), width=11)
    kinds = {"main effect": lab.BLUE, "interaction": lab.ORANGE}
    for axis, file in zip(axes, with_results):
        shown = [row for row in numbers(scores(results, file)) if row[0].split(":")[0] in kinds]
        for place, (words, values) in enumerate(shown):
            lab.dots(axis, -place, values, kinds[words.split(":")[0]])
        axis.axvline(0, color=lab.GREY, linewidth=1)
        labels = [words.partition(": ")[2] for words, _ in shown] if axis is axes[0] else []
        axis.set_yticks([-place for place in range(len(labels))], labels)
        axis.set(xlim=(-0.19, 0.09), xlabel="change of the score")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
