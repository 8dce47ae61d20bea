"""Draw pictures of docs/ again: stability, collapse, curves, smollm2.

    python -m labs.race.figures stability         from labs/race/table.json
    python -m labs.race.figures collapse RUNS     RUNS/fall and RUNS/small
    python -m labs.race.figures curves RUNS       RUNS/grpo and the other eight
    python -m labs.race.figures smollm2 RUNS      RUNS/smollm2

These commands make the runs:

    python grpo.py --minibatches 16 --lr 9e-4 --steps 40 --eval_every 5 --run_dir RUNS/fall
    python grpo.py --minibatches 16 --lr 1e-4 --steps 40 --eval_every 5 --run_dir RUNS/small
    python FILE --steps 100 --run_dir RUNS/NAME        for each of the nine

and docs/results.md ("A real model on two cores") has that of RUNS/smollm2.
"""

import sys
import textwrap
from pathlib import Path

import numpy as np
from checks.files import ROOT
from common.records.curves import BLUE, ORANGE, draw_curves, series, smooth
from common.records.files import read_lines, saved_config
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tools.explorer import NINE

from labs import lab
from labs.race.__main__ import TABLE, Cells, columns, median, methods, read, sign

DOCS = ROOT / "docs"
FRAME = "#D55E00"  # the orange of Okabe and Ito, which stands out on dark blue
START = 0.52  # sampled accuracy before training
ALL_FOUR = "all four at half strength"
HEADS = {  # a stress -> its column head, in lines that fit its column
    "16 updates": "16\nupdates",
    "stale sampler": "stale\nsampler",
    "quantised sampler": "quan-\ntised\nsampler",
    "mildly quantised sampler": "mildly\nquan-\ntised",
    "temperature-mismatched sampler": "temper-\nature\nmismatch",
    "noisy verifier": "noisy\nverifier",
    "uninformative prompts": "uninfor-\nmative\nprompts",
    "groups of two": "groups\nof two",
    ALL_FOUR: "all\nfour",
    "worst cell": "worst\ncell",
}


# Stability


def draw_stability(cells: Cells, names: list[str], title: str) -> Figure:
    """Draw a heat map, dark for low, with a number in every cell and a frame below the start."""
    names = sorted(names, key=lambda name: -median(cells, name, ALL_FOUR))
    heads = [*columns(cells), "worst cell"]
    heads.insert(0, heads.pop(heads.index(ALL_FOUR)))  # the rows are sorted by the first column
    medians = [[median(cells, name, head) for head in heads] for name in names]
    figure = Figure(figsize=(10, 1.9 + 0.25 * len(names)), layout="constrained")
    axis = figure.subplots()
    shades = np.array(medians, float)  # None becomes NaN, which is a blank cell
    axis.pcolormesh(shades, cmap="cividis", vmin=0.3, vmax=0.9, edgecolors="white")
    for y, name in enumerate(names):
        for x, head in enumerate(heads):
            value = medians[y][x]
            words = "–" if value is None else f"{value:.2f} {sign(cells, name, head)}".rstrip()
            colour = "white" if value is not None and value < 0.6 else "black"
            axis.text(x + 0.5, y + 0.5, words, color=colour, ha="center", va="center", fontsize=10)
            if value is not None and round(value, 2) < START:
                frame = Rectangle((x + 0.05, y + 0.08), 0.9, 0.84, fill=False)
                frame.set(edgecolor=FRAME, linewidth=2.2)
                axis.add_patch(frame)
    ticks = [HEADS.get(head, head) for head in heads]
    axis.set_xticks(np.arange(len(heads)) + 0.5, ticks, fontsize=10)
    axis.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=10.5)
    for label in axis.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == "grpo" else "normal")
    axis.invert_yaxis()
    for edge in (1, len(heads) - 1):
        axis.axvline(edge, color="black", linewidth=2)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    words = f"Sorted by “all four”. Frame: below the {START} before training. Medians over seeds.\n"
    words += "+ or -: all seeds above, or below, all of grpo's (?: fewer than five seeds)"
    axis.set_xlabel(words, loc="left", fontsize=10)
    lab.entitle(figure, title)
    return figure


def stability() -> None:
    """Draw both pictures."""
    cells = read(TABLE)
    everything = methods(cells)
    main = [name for name in everything if name in NINE or name.startswith("grpo, ")]
    variants = ["grpo", *(name for name in everything if name not in main)]
    title = "Under all four stresses five of the nine end below their start;\n"
    title += "grpo with a third of its rate does best"
    lab.save(draw_stability(cells, main, title), DOCS / "stability.png")
    title = "Of the variants only opd, with its trained teacher, "
    title += "stays well above the start everywhere"
    lab.save(draw_stability(cells, variants, title), DOCS / "stability-variants.png")


# A run that falls beside one with small steps


def evaluations(folder: Path) -> tuple[list[int], list[float], list[dict]]:
    """Return steps, greedy accuracies and greedy responses of a run."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "greedy" in line]
    rows = [row for row in read_lines(folder / "samples.jsonl") if "example" in row]
    steps = [line["step"] for line in lines]
    return steps, [line["greedy"] for line in lines], [row["example"] for row in rows]


def collapse(runs: Path) -> None:
    """Draw a frame for each evaluation: accuracy so far, and both answers to the first problem.

    The whole curves come first and stay for four frames, because a still shows only them.
    """
    size = 15  # points: a phone shows the picture at half its size
    both = [(runs / "fall", ORANGE, "large steps (rate 9e-4)")]
    both.append((runs / "small", BLUE, "small steps (rate 1e-4)"))
    measured = [evaluations(folder) for folder, _, _ in both]
    steps, accuracies, examples = measured[0]
    figure = Figure(figsize=(8, 5.5), dpi=96)
    axis = figure.add_axes((0.07, 0.43, 0.9, 0.5))
    axis.set(xlim=(0, steps[-1]), ylim=(0, 1))
    axis.set_xlabel("step", fontsize=size)
    axis.tick_params(labelsize=size)
    axis.set_title("right answers to new problems (share)", loc="left", fontsize=size)
    axis.spines[["top", "right"]].set_visible(False)
    problem = f"{examples[0]['prompt']}   the right answer is {examples[0]['answer']}"
    figure.text(0.02, 0.255, problem, family="monospace", fontsize=size)
    after = figure.text(0.02, 0.185, "", fontsize=size)
    curves, texts = [], []
    for place, (_, colour, words) in enumerate(both):
        curves.append(axis.plot([], [], "o-", color=colour, lw=3, ms=8, clip_on=False)[0])
        texts.append(figure.text(0.02, 0.105 - 0.08 * place, "", color=colour))
        texts[-1].set(family="monospace", fontsize=size + 4)
        axis.text(15, 0.62 + 0.2 * place, words, color=colour, fontsize=size)
    last = len(steps) - 1
    verdict = f"fell from {max(accuracies):.2f} to {accuracies[-1]:.2f}"
    fell = axis.text(steps[-1], 0.33, "", color=ORANGE, ha="right", weight="bold", fontsize=size)

    def show(number: int) -> None:
        fell.set_text(verdict if number == last else "")
        after.set_text(f"their answers after step {steps[number]}:")
        for (at, accuracy, responses), curve, text in zip(measured, curves, texts):
            curve.set_data(at[: number + 1], accuracy[: number + 1])
            text.set_text(responses[number]["response"][:46])

    frames = [last] * 4 + list(range(last + 1))
    FuncAnimation(figure, show, frames=frames).save(DOCS / "collapse.gif", PillowWriter(fps=1.5))


# Curves


def curves(runs: Path) -> None:
    """Draw a row of four panels for each of the nine. grpo is grey in the other rows."""
    figure = Figure(figsize=(9.3, 1.3 * len(NINE) + 1.2), layout="constrained")
    words = "Without stress eight of the nine learn alike;\n"
    words += "vcpo, with a quarter of the updates, is slower"
    lab.entitle(figure, words)
    figure.supxlabel("lines: means of 9 steps; grey: grpo", fontsize=10)
    rows = figure.subplots(len(NINE), 4, sharex=True)
    known = {}
    for name in NINE:
        known[name] = saved_config(runs / name), read_lines(runs / name / "metrics.jsonl")
    for name, axes in zip(NINE, rows):
        config, lines = known[name]
        own = next(iter(config["acted"]))
        if name != "grpo":
            draw_row(axes, known["grpo"][1], own, grey=True)
        draw_row(axes, lines, own, grey=False)
        axes[0].set_ylabel(name, fontsize=11, fontweight="bold")
        axes[3].set_title(textwrap.fill(config["acted"][own], 29), fontsize=9, color=ORANGE)
    heads = ("reward", "held-out accuracy\n(circles: greedy)", "response length\n(tokens)")
    for axis, head in zip(rows[0], heads):
        axis.set_title(head, fontsize=10)
    for axis in rows[-1]:
        axis.set_xlabel("step", fontsize=10)
    lab.save(figure, DOCS / "curves-nine.png")


def draw_row(axes: np.ndarray, lines: list[dict], own: str, grey: bool) -> None:
    """Draw one run's curves in the four panels of a row; in grey without its own metric."""
    blue, orange = ("0.75", "0.75") if grey else (BLUE, ORANGE)
    for axis, name in zip(axes, ("reward", "greedy", "response_len", own)):
        axis.tick_params(labelsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.5g}")
        if name == own and grey:
            continue
        steps, values = series(lines, name)
        if name == "greedy":
            axis.plot(steps, values, "o-", markersize=3, color=blue)
            axis.plot(*series(lines, "sampled"), "s--", markersize=3, color=orange)
            axis.set_ylim(-0.03, 1.03)
        elif 2 * len(steps) < len(lines):  # rare events are dots
            axis.plot(steps, values, "o", markersize=3, color=orange)
        else:
            axis.plot(steps, smooth(values, 9), color=orange if name == own else blue)
    axes[0].set_ylim(-0.03, 1.03)


def smollm2(runs: Path) -> None:
    """Draw the usual picture of a run without the two panels that say little here."""
    folder = runs / "smollm2"
    lines = read_lines(folder / "metrics.jsonl")
    for line in lines:
        line.pop("response_len", None)
        line.pop("grad_norm", None)
    figure = draw_curves(saved_config(folder), lines)
    lab.entitle(figure, "SmolLM2-135M learns sums in 24 steps (grpo.py, rate 3e-6, seed 1)")
    figure.supxlabel("faint: each step; lines: means of 3 steps", fontsize=10)
    lab.save(figure, DOCS / "curves-smollm2.png")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["stability"]:
        stability()
    else:
        {"collapse": collapse, "curves": curves, "smollm2": smollm2}[words[0]](Path(words[1]))
