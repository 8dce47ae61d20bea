"""Credit: does an exact verdict on every step prevent the falls that masks and gates were made for?

grpo.py without its KL term trains with the advantage of the whole response, with credit by step
(steps.py), and with the same credits dealt to the steps by chance. The settings are stresses of
docs/stability.md that lower its accuracy. SAPO, MASPO and STAPO are trained under four of them.

    python -m labs.credit
"""

import sys

from labs import lab
from labs.race.stresses import STRESSES
from labs.warning.rules import fell

TITLE = "Credit for the right steps does not prevent the falls"
HOW = ("outcome", "step", "shuffled")
SETTINGS = ("none", "lr x3", "16 updates", "stale sampler", "all four at half strength")
FOUR = SETTINGS[-1]
FLAGS = "--eval_problems 256 --eval_samples 2 --sampler_tolerance 1e6 --save_every 1000"


def command(how: str, stress: str, file: str = "grpo.py --beta 0", steps: int = 40) -> str:
    """A run of 16 prompts times 8 responses; five measurements after step 0."""
    words = f"-m labs.credit.steps {how} {stress.replace(' ', '-')} {file} {FLAGS}"
    return f"{words} --steps {steps} --eval_every {steps // 5}{STRESSES[stress].flags(128)}"


ARMS = {f"{stress}, {how}": command(how, stress) for stress in SETTINGS for how in HOW}
ARMS |= {f"lr x3, 100 steps, {how}": command(how, "lr x3", steps=100) for how in HOW[:2]}
FILES = ("sapo", "maspo", "stapo")
ARMS |= {
    f"{FOUR}, {file}, {how}": command(how, FOUR, f"{file}.py") for file in FILES for how in HOW[:2]
}
COLUMNS = ("sampled", "entropy", "response_len", "grad_norm", "clip_share")
SEEDS = 5


def score(run: dict) -> float:
    """As in docs/stability.md: the mean of the last three measurements."""
    return lab.tail(run["sampled"], 3)


def above(results: dict, arm: str, other: str) -> str:
    """In how many seeds an arm's score is above another's."""
    pairs = list(zip(results[arm], results[other]))
    return f"{sum(score(one) > score(two) for one, two in pairs)} of {len(pairs)}"


def rows(results: dict) -> list[list[str]]:
    """A row for each setting: scores, falls, and whether step is above the others, seed by seed."""
    table = [["setting", *HOW, "falls", "step above outcome", "step above shuffled"]]
    for setting in dict.fromkeys(arm.rpartition(", ")[0] for arm in ARMS):
        cells, falls, wins = [], [], []
        for how in HOW:
            runs = results.get(f"{setting}, {how}")
            if not runs:  # shuffled was not run
                cells.append("–")
                falls.append("–")
                wins.append("–")
                continue
            scores = [{"score": score(run)} for run in runs]
            cells.append(lab.cell(scores, "score"))
            falls.append(str(sum(fell(run) for run in runs)))
            wins.append(above(results, f"{setting}, step", f"{setting}, {how}"))
        table.append([setting, *cells, ", ".join(falls), wins[0], wins[2]])
    return table


COLOURS = dict(zip(HOW, (lab.BLACK, lab.BLUE, lab.ORANGE)))


def draw(results: dict) -> object:
    """A dot is a seed. On the right, every run of 100 steps."""
    words = "sampled accuracy, last three measurements", "lr x3, 100 steps: sampled accuracy"
    figure, axes = lab.sheet(TITLE, *words, width=11)
    settings = [*SETTINGS, *(f"{FOUR}, {file}" for file in FILES)]
    for y, setting in enumerate(reversed(settings)):
        for place, how in enumerate(HOW):
            runs = results.get(f"{setting}, {how}", [])
            if runs:
                lab.dots(
                    axes[0], y + 0.25 * (1 - place), [score(run) for run in runs], COLOURS[how]
                )
    words = [setting.replace(FOUR, "four stresses") for setting in reversed(settings)]
    axes[0].set_yticks(range(len(settings)), labels=words)
    for how in HOW[:2]:
        lab.bands(axes[1], results[f"lr x3, 100 steps, {how}"], "sampled", COLOURS[how])
    axes[1].set_ylim(0, 1)
    lab.key(axes[1], COLOURS)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
