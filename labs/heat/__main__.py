"""Why does training collapse? Every optimiser step has a heat, rate √((1 + 13/G) / P) for P prompts
with G responses each, and the heat decides at which accuracy a run settles.

An arm is a run of the embedded model, and its name says what it varies. public.json has runs of
other people. In table.json, `beside` has what the page quotes of other models and of
labs/heat/mean.py.

    python -m labs.heat
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from checks.files import NINE, ROOT

from labs import lab

FOLDER = Path(__file__).parent
TITLE = "The heat of a step, rate √((1 + 13/G) / P), decides at which accuracy a run settles"
# Steps, by the number of prompts in a batch
FOUR = "--prompts_per_step 4 --steps 240 --eval_every 40 --warmup 20"
USUAL = "--steps 60 --eval_every 10"  # 16 prompts
MANY = "--prompts_per_step 64 --steps 24 --eval_every 4"
LATER = "--resume --back_to 40 --steps 120 --eval_every 20"
REUSED = "--prompts_per_step 64 --steps 12 --eval_every 2"  # with several updates per batch

# Updates per batch, prompts per update, heat: the run. Each prompt has 8 responses.
LEVELS = {
    (16, 1, "3.6e-4"): f"{USUAL} --minibatches 16 --lr 2.25e-4",
    (4, 4, "3.6e-4"): f"{USUAL} --minibatches 4 --lr 4.5e-4",
    (1, 16, "3.6e-4"): f"{USUAL} --minibatches 1 --lr 9e-4",
    (1, 64, "3.6e-4"): f"{MANY} --minibatches 1 --lr 1.8e-3",
    (64, 1, "3.6e-4"): f"{REUSED} --minibatches 64 --lr 2.25e-4",
    (4, 4, "5.2e-4"): f"{USUAL} --minibatches 4 --lr 6.4e-4",
    (16, 1, "7.3e-4"): f"{USUAL} --minibatches 16 --lr 4.5e-4",
    (4, 4, "7.3e-4"): f"{USUAL} --minibatches 4 --lr 9e-4",
    (1, 16, "7.3e-4"): f"{USUAL} --minibatches 1 --lr 1.8e-3",
    (1, 64, "7.3e-4"): f"{MANY} --minibatches 1 --lr 3.6e-3",
    (64, 1, "7.3e-4"): f"{REUSED} --minibatches 64 --lr 4.5e-4",
    (16, 4, "7.3e-4"): f"{REUSED} --minibatches 16 --lr 9e-4",
    (4, 16, "7.3e-4"): f"{REUSED} --minibatches 4 --lr 1.8e-3",
    (1, 4, "7.3e-4"): f"{FOUR} --minibatches 1 --lr 9e-4",
    (4, 4, "1.05e-3"): f"{USUAL} --minibatches 4 --lr 1.3e-3",
    (16, 1, "1.5e-3"): f"{USUAL} --minibatches 16 --lr 9e-4",
    (4, 4, "1.5e-3"): f"{USUAL} --minibatches 4 --lr 1.8e-3",
    (1, 16, "1.5e-3"): f"{USUAL} --minibatches 1 --lr 3.6e-3",
    (1, 64, "1.5e-3"): f"{MANY} --minibatches 1 --lr 7.2e-3",
    (4, 1, "1.5e-3"): f"{FOUR} --minibatches 4 --lr 9e-4",
}
OTHER = {
    # Prompts × responses in an update, one update per batch
    "64 × 2, rate 1.8e-3": f"{USUAL} --prompts_per_step 64 --group_size 2 --lr 1.8e-3",
    "32 × 4, rate 1.8e-3": f"{USUAL} --prompts_per_step 32 --group_size 4 --lr 1.8e-3",
    "4 × 32, rate 1.8e-3": f"{USUAL} --prompts_per_step 4 --group_size 32 --lr 1.8e-3",
    "2 × 64, rate 1.8e-3": f"{USUAL} --prompts_per_step 2 --group_size 64 --lr 1.8e-3",
    "16 × 2, rate 1.8e-3": "--steps 120 --eval_every 20 --warmup 20 --group_size 2 --lr 1.8e-3",
    "16 × 32, rate 1.8e-3": "--steps 24 --eval_every 4 --group_size 32 --lr 1.8e-3",
    "4 × 32, rate 9e-4": f"{USUAL} --prompts_per_step 4 --group_size 32 --lr 9e-4",
    # 80 more steps of a run of 40 steps that has fallen, or has not
    "fallen, then 3.6e-4": f"{LATER} --minibatches 4 --lr 4.5e-4",
    "fallen, then 7.3e-4": f"{LATER} --minibatches 4 --lr 9e-4",
    "good, then 3.6e-4": f"{LATER} --lr 4.5e-4",
    "good, then 7.3e-4": f"{LATER} --lr 9e-4",
    # One change at a heat of 7.3e-4
    "no clip": f"{USUAL} --lr 9e-4 --clip_low 1e9 --clip_high 1e9",
    "no KL term": f"{USUAL} --lr 9e-4 --beta 0",
    "ten times the KL term": f"{USUAL} --lr 9e-4 --beta 0.1",
    "no momentum": f"{USUAL} --lr 9e-4 --betas 0 0.95",
    "momentum 0.99": f"{USUAL} --lr 9e-4 --betas 0.99 0.95",
    "β2 0.999": f"{USUAL} --lr 9e-4 --betas 0.9 0.999",
}
FIRST = {"fallen": "--minibatches 16 --lr 9e-4", "good": ""}  # flags of the first 40 steps
# The other methods: heat -> rate. vcpo.py has 8 prompts in an update, the others have 4.
METHODS = [name for name in NINE if name != "grpo"] + ["dapo", "cispo", "dppo"]
RATES = {"5.2e-4": "6.4e-4", "7.3e-4": "9e-4", "1.05e-3": "1.3e-3"}
VCPO = {"7.3e-4": "1.28e-3", "1.05e-3": "1.8e-3", "1.5e-3": "2.56e-3"}

ARMS = {}
for (updates, prompts, heat), flags in LEVELS.items():
    ARMS[f"{updates} of {prompts}, {heat}"] = f"grpo.py {flags} --eval_samples 1"
for name, flags in OTHER.items():
    if "×" in name:
        flags += " --minibatches 1"
    ARMS[name] = f"grpo.py {flags} --eval_samples 1"
for name in METHODS:
    file = f"{name}.py" if name in NINE else f"-m variants.{name}"
    steps = "--steps 120 --eval_every 20" if name == "vcpo" else "--steps 45 --eval_every 15"
    for heat, rate in (VCPO if name == "vcpo" else RATES).items():
        ARMS[f"{name}, {heat}"] = f"{file} {steps} --lr {rate} --eval_samples 1"
COLUMNS = ("greedy",)
SEEDS = 5
SHORT = "--steps 4 --eval_every 2 --eval_problems 64 --warmup 1"  # of a quick run
QUICK = ["4 of 4, 3.6e-4", "4 of 4, 1.5e-3"]
HALF = (0.34 + 0.95) / 2  # between the included model and a cool run: half of the gain


def before(arm: str, seed: int, folder: Path) -> None:
    """Train the first 40 steps of an arm that continues a run."""
    first = arm.partition(", then ")[0]
    if first in FIRST:
        flags = f"--steps 40 --eval_every 20 --eval_samples 1 {FIRST[first]} --seed {seed}"
        words = [sys.executable, "grpo.py", *flags.split(), "--run_dir", str(folder / "run")]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(words, cwd=ROOT, env=lab.one_thread(), check=True, **pipes)


def level(run: dict) -> float:
    """Return where a run has settled: its mean accuracy in the second half of its steps."""
    half = run["greedy@"][-1] / 2
    return float(np.mean([x for step, x in zip(run["greedy@"], run["greedy"]) if step > half]))


def middle(runs: list[dict]) -> float:
    """Return the median over seeds of the level."""
    return float(lab.median_and_band([{"x": level(run)} for run in runs], "x")[0])


def edge(results: dict, name: str) -> float:
    """Return the heat at which a method has lost half of the gain, by interpolation between its
    arms; 0 if it has lost it at the lowest heat, inf if it has not at the highest."""
    heats = [arm.partition(", ")[2] for arm in results if arm.startswith(f"{name}, ")]
    levels = [middle(results[f"{name}, {heat}"]) for heat in heats]
    logs = np.log([float(heat) for heat in heats])
    crossing = np.interp(HALF, levels[::-1], logs[::-1], left=np.inf, right=-np.inf)
    return float(np.exp(crossing))


def rows(results: dict) -> list[list[str]]:
    """Make the tables: the level of every arm, and the edge of each method."""
    table = [["arm", "level"]]
    for arm, runs in results.items():
        table.append([arm, lab.cell([{"x": level(run)} for run in runs], "x")])
    if set(results) != set(QUICK):
        table += [["", ""], ["method", "half of the gain is lost at"]]
        for name in ("4 of 4", *METHODS):
            table.append([name, f"{edge(results, name):.1e}"])
    return table


def draw(results: dict) -> object:
    """Draw levels against the heat, of the embedded model and of others, and public runs without
    another known cause of a fall."""
    panels = "Included model (124,000 parameters)", "Other models", "Public runs"
    figure, axes = lab.make_figure(TITLE, *panels, width=13, height=4.6)
    if set(results) == set(QUICK):
        return figure
    colours = {1: lab.ORANGE, 4: lab.BLUE, 16: lab.GREEN, 64: lab.PINK}
    for updates, prompts, heat in LEVELS:
        shift = 0.94 + 0.03 * list(colours).index(prompts)  # so that dots do not hide each other
        for run in results[f"{updates} of {prompts}, {heat}"]:
            x = float(heat) * shift
            axes[0].scatter(x, level(run), s=22, color=colours[prompts], alpha=0.6)
    lab.plain_ticks(axes[0], "x", (3.6e-4, 7.3e-4, 1.5e-3))
    lab.legend(axes[0], {f"P = {prompts}": colour for prompts, colour in colours.items()})

    models = json.loads((FOLDER / "table.json").read_text("utf-8"))["beside"]["models"]
    names = dict(zip(models, (lab.ORANGE, lab.BLUE, lab.PINK)))
    for model, points in models.items():
        axes[1].scatter(*zip(*points), s=22, color=names[model], alpha=0.7)
    lab.legend(axes[1], names, y=0.2)

    public = json.loads((FOLDER / "public.json").read_text("utf-8"))
    public = [run for run in public if not run["other_cause"]]
    sets = list(dict.fromkeys(run["set"] for run in public))
    for run in public:
        heat = run["rate"] * ((1 + 13 / run["group"]) / run["prompts"]) ** 0.5
        above, marker, colour = (0.15, "x", lab.ORANGE) if run["fell"] else (-0.15, "o", lab.BLUE)
        y = sets.index(run["set"]) + above
        axes[2].scatter(heat, y, marker=marker, color=colour, s=20)
    axes[2].set_yticks(range(len(sets)), labels=sets, fontsize=8)
    lab.legend(axes[2], {"o did not fall": lab.BLUE, "x fell": lab.ORANGE})
    for axis in axes[:2]:
        axis.set_ylim(0, 1)
        axis.set_ylabel("greedy accuracy")
    for axis in axes[1:]:
        axis.set_xscale("log")
    for axis in axes:
        axis.set_xlabel("heat")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
