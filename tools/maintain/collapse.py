"""Draw docs/collapse.gif from two runs: a run that falls beside one with a smaller step.

    python grpo.py --minibatches 16 --lr 9e-4 --steps 40 --eval_every 5 --run_dir runs/fall
    python grpo.py --minibatches 16 --lr 1e-4 --steps 40 --eval_every 5 --run_dir runs/small
    python -m tools.maintain.collapse runs/fall runs/small

A frame for each evaluation: greedy accuracy so far, and what the run then answers to its first
held-out problem. The whole curves come first: where nothing moves, as in print, they are all that
is seen. The letters are as large as a phone needs, which shows the picture at half its size.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from common.records.curves import BLUE, ORANGE
from common.records.files import read_lines, saved_config
from matplotlib.animation import FuncAnimation, PillowWriter

from checks.files import ROOT
from tools import arguments

PICTURE = ROOT / "docs" / "collapse.gif"
HELD = 4  # frames in which the whole curves stand
LETTERS = 15  # points


def evaluations(folder: Path) -> tuple[list[int], list[float], list[dict]]:
    """Steps, greedy accuracies and greedy responses of a run."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "greedy" in line]
    rows = [row for row in read_lines(folder / "samples.jsonl") if "example" in row]
    steps = [line["step"] for line in lines]
    return steps, [line["greedy"] for line in lines], [row["example"] for row in rows]


def in_words(folder: Path) -> str:
    """What a run does with a batch."""
    config = saved_config(folder)
    rate = f"{config['lr']:.0e}".replace("e-0", "e-")
    return f"{config['minibatches']} steps from each batch, rate {rate}"


def main(fallen: Path, steady: Path) -> None:
    """Write the picture."""
    plt.rcParams.update({"font.size": LETTERS})
    runs = [(fallen, ORANGE), (steady, BLUE)]
    measured = [evaluations(folder) for folder, _ in runs]
    steps, accuracies, examples = measured[0]
    figure = plt.figure(figsize=(8, 5.2), dpi=96)
    axis = figure.add_axes((0.07, 0.4, 0.9, 0.53))
    axis.set(xlim=(0, steps[-1]), ylim=(0, 1), xlabel="step")
    axis.set_title("right answers to new problems (share)", loc="left", fontsize=LETTERS)
    axis.spines[["top", "right"]].set_visible(False)
    problem = f"{examples[0]['prompt']}   the right answer is {examples[0]['answer']}"
    figure.text(0.02, 0.21, problem, family="monospace")
    curves, texts = [], []
    for place, (folder, colour) in enumerate(runs):
        curves.append(axis.plot([], [], "o-", color=colour, lw=3, ms=8, clip_on=False)[0])
        texts.append(figure.text(0.02, 0.12 - 0.09 * place, "", color=colour))
        texts[-1].set(family="monospace", fontsize=LETTERS + 4)
        axis.text(10, 0.62 + 0.2 * place, in_words(folder), color=colour)
    top, last = max(accuracies), len(steps) - 1
    verdict = f"fell from {top:.2f} to {accuracies[-1]:.2f}"
    fell = axis.text(steps[-1], 0.33, "", color=ORANGE, ha="right", weight="bold")

    def show(number: int) -> None:
        fell.set_text(verdict if number == last else "")
        for (at, accuracy, responses), curve, text in zip(measured, curves, texts):
            curve.set_data(at[: number + 1], accuracy[: number + 1])
            text.set_text(responses[number]["response"][:46])

    frames = [last] * HELD + list(range(last + 1))
    animation = FuncAnimation(figure, show, frames=frames)
    animation.save(PICTURE, PillowWriter(fps=1.5))


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("fallen", type=Path)
    parser.add_argument("steady", type=Path)
    words = parser.parse_args()
    sys.exit(main(words.fallen, words.steady))
