"""Draw docs/collapse.gif from two runs: a run that falls beside one with a smaller step.

    python grpo.py --minibatches 16 --lr 9e-4 --steps 40 --eval_every 5 --run_dir runs/fall
    python grpo.py --minibatches 16 --lr 1e-4 --steps 40 --eval_every 5 --run_dir runs/small
    python -m tools.maintain.collapse runs/fall runs/small

A frame for each evaluation: greedy accuracy so far, and what the run then answers to its first
held-out problem. The whole curves come first: where nothing moves, as in print, they are all that
is seen.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from common.curves import BLUE, ORANGE
from common.run import read_lines, saved_config
from matplotlib.animation import FuncAnimation, PillowWriter

from checks.files import ROOT
from tools import arguments

PICTURE = ROOT / "docs" / "collapse.gif"
HELD = 4  # frames in which the whole curves stand


def evaluations(folder: Path) -> tuple[list[int], list[float], list[dict]]:
    """Steps, greedy accuracies and greedy responses of a run."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "greedy" in line]
    rows = [row for row in read_lines(folder / "samples.jsonl") if "example" in row]
    steps = [line["step"] for line in lines]
    return steps, [line["greedy"] for line in lines], [row["example"] for row in rows]


def main(fallen: Path, steady: Path) -> None:
    """Write the picture."""
    runs = [(fallen, ORANGE), (steady, BLUE)]
    measured = [evaluations(folder) for folder, _ in runs]
    steps, _, examples = measured[0]
    figure, (axis, words) = plt.subplots(2, height_ratios=[3, 1], figsize=(7.2, 4.4), dpi=80)
    words.axis("off")
    axis.set(xlim=(0, steps[-1]), ylim=(0, 1), xlabel="step", ylabel="greedy accuracy, held out")
    axis.spines[["top", "right"]].set_visible(False)
    prompt, answer = examples[0]["prompt"], examples[0]["answer"]
    words.text(0, 0.95, f"{prompt}   right: {answer}", family="monospace", va="top")
    curves, texts = [], []
    for place, (folder, colour) in enumerate(runs):
        config = saved_config(folder)
        label = f"--minibatches {config['minibatches']} --lr {config['lr']:g}"
        curves.append(axis.plot([], [], "o-", color=colour, label=label)[0])
        height = 0.55 - 0.4 * place
        texts.append(words.text(0, height, "", family="monospace", color=colour, va="top"))
    axis.legend(loc="center right", frameon=False)

    def show(number: int) -> None:
        for (at, accuracy, responses), curve, text in zip(measured, curves, texts):
            curve.set_data(at[: number + 1], accuracy[: number + 1])
            text.set_text(responses[number]["response"][:58])

    figure.tight_layout()
    last = len(steps) - 1
    frames = [last] * HELD + list(range(last + 1))
    animation = FuncAnimation(figure, show, frames=frames)
    animation.save(PICTURE, PillowWriter(fps=1.5))


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("fallen", type=Path)
    parser.add_argument("steady", type=Path)
    words = parser.parse_args()
    sys.exit(main(words.fallen, words.steady))
