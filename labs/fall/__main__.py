"""Why does training fall? One fall is forked: each fork has the same weights and one change.

grpo.py falls with 16 updates a batch and three times its learning rate. A fork goes back to the
checkpoint after step 5 (the fall begins) or 15 (it is under way), changes one thing, and trains
until step 40. With `--resume --back_to` it keeps Adam's moments, π_ref and the order of the
prompts. A fork named *loaded* changes what cannot change on resume, so it starts a new run from the
weights alone, and has its own control, `loaded: none`. The arms of MEANS train eight runs from one
model and measure the mean of their weights (labs/fall/mean.py).

    python -m labs.fall
"""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

import numpy as np
from checks.files import ROOT

from labs import lab
from labs.fall.mean import DISTANCES, SCORED, SHUFFLED

TITLE = "Eight runs fall, the mean of their weights does not: noise carries the weights away"
FALL = "--minibatches 16 --lr 9e-4"
MEASURE = "--eval_every 5 --eval_samples 1"
FREE = "--clip_low 1e9 --clip_high 1e9"
RATE = "args.lr * min(1.0, step / max(1, args.warmup))"
DECAYED = "args.lr * (1 - step / args.steps)"  # linear, 0 at the last step
ADAMW = "torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)"
SGD = "torch.optim.SGD(policy.parameters(), args.lr)"
SPLIT = "rollout.split(args.minibatches)"
SAME, SHUFFLE = "none", "rewards shuffled"

# Flags (the last value of a flag wins), and a line of grpo.py and what it becomes.
RESUMED = {
    SAME: ("", None),
    "a third of the rate": ("--lr 3e-4", None),
    "a third of the rate, no upper clip": ("--lr 3e-4 --clip_high 10", None),
    "one update a batch": ("--minibatches 1", None),
    "four updates of 32 responses": ("--minibatches 4", None),
    "clip at 5%": ("--clip_low 0.05 --clip_high 0.05", None),
    "no clip": (FREE, None),
    "ten times the KL term": ("--beta 0.1", None),
    "no KL term": ("--beta 0", None),
    "gradient clip 0.1": ("--grad_clip 0.1", None),
    "β2 0.999": ("--betas 0.9 0.999", None),
    "the rate falls to 0": ("", (RATE, DECAYED)),
    "four updates of 8 responses": ("", (SPLIT, f"{SPLIT}[:4]")),
}
LOADED = {
    SAME: "grpo.py",
    "no KL term": "grpo.py --beta 0",
    "four times the prompts": "grpo.py --prompts_per_step 64",
    "new prompts for every update": "grpo.py --prompts_per_step 1 --minibatches 1",
    "plain SGD, steps of 0.3 at most": "grpo.py --lr 0.3",
    "plain SGD, steps of 0.055 at most": "grpo.py --lr 0.055",
    "GSPO": "gspo.py",
    "SAPO": "sapo.py",
    "STAPO": "stapo.py",
    "MASPO": "maspo.py",
    "CISPO": "-m variants.cispo",
    "DPPO's mask": "-m variants.dppo",
    "MiniRL": "minirl.py",
}
# From step 5 only.
NOISE = {
    SHUFFLE: ("", (SCORED, SHUFFLED)),
    "no momentum": ("--betas 0 0.95", None),
    "no momentum, a quarter of the rate": ("--betas 0 0.95 --lr 2.1e-4", None),
}
# Does accuracy depend on rate × √updates? rate × √updates -> the rates for 1, 4 and 16 updates
UPDATES = (1, 4, 16)
RULE = {
    "9e-4": (9e-4, 4.5e-4, 2.25e-4),
    "1.8e-3": (1.8e-3, 9e-4, 4.5e-4),
    "3.6e-3": (3.6e-3, 1.8e-3, 9e-4),
}
# (updates, rate) -> the fork that has them; three stand in RESUMED
FORK_WITH = {
    (1, 9e-4): "one update a batch",
    (4, 9e-4): "four updates of 32 responses",
    (16, 9e-4): SAME,
}
for rates in RULE.values():
    for updates, rate in zip(UPDATES, rates):
        if (updates, rate) not in FORK_WITH:
            name = f"{updates} updates at {rate:g}"
            FORK_WITH[updates, rate] = name
            NOISE[name] = (f"--minibatches {updates} --lr {rate:g}", None)
FRESH = {8: 1, 32: 4, 128: 16}  # new responses an update -> prompts
LENGTH, COUNT = 0.058, 160  # of updates
MEANS = {"true rewards": "-m labs.fall.mean grpo.py"}
MEANS[SHUFFLE] = f"{MEANS['true rewards']} --shuffled"
# The same with other losses
OTHERS = {name: f"{name}.py" for name in ("gspo", "sapo", "stapo", "maspo", "minirl")}
OTHERS["vcpo"] = "vcpo.py --lag 1 --steps 11 --prompts_per_step 16"
OTHERS["grpo without KL term"] = "grpo.py --beta 0"
SIZES = (1, 2, 4, 8)  # runs in a mean
STEPS, POINTS = 40, (5, 15)
MEANT = ("start", "each", "mean2", "mean4", "mean8", "noise", "shared", "random")
MEANT += ("distance", "mean_distance")


def fresh(responses: int) -> str:
    """Name the arm with so many new responses for every update."""
    return f"{POINTS[0]}: loaded: {responses} new responses for every update, one length"


ARMS, DAMAGE, COLUMNS = {}, {}, {}
for name, command in MEANS.items():
    ARMS[f"mean: {name}"] = command
    COLUMNS[f"mean: {name}"] = MEANT
for name, command in OTHERS.items():
    ARMS[f"mean: {name}"] = f"-m labs.fall.mean {command}"
    COLUMNS[f"mean: {name}"] = MEANT
for point in POINTS:
    for name, (flags, damage) in (RESUMED | (NOISE if point == POINTS[0] else {})).items():
        fork = f"grpo.py --resume --back_to {point} --steps {STEPS} --save_every 40 --keep 8"
        ARMS[f"{point}: {name}"] = f"{fork} {MEASURE} {FALL} {flags}".strip()
        if damage:
            DAMAGE[f"{point}: {name}"] = damage
    for name, command in LOADED.items():
        file, _, flags = command.partition(" --")
        length, often = STEPS - point, 5
        if "prompts_per_step 1 " in command:  # the same number of updates
            length, often = 16 * length, 16 * often
        fork = f"{file} --model FOLDER/{point} --warmup 0 --steps {length} --save_every 1000"
        measure = f"--eval_every {often} --eval_samples 1"
        own = f"--{flags}" if flags else ""
        ARMS[f"{point}: loaded: {name}"] = f"{fork} {measure} {FALL} {own}".strip()
        if "SGD" in name:
            DAMAGE[f"{point}: loaded: {name}"] = ADAMW, SGD
for responses, prompts in FRESH.items():
    name = fresh(responses)
    fork = f"-m labs.fall.steps --length {LENGTH} grpo.py --model FOLDER/{POINTS[0]} --warmup 0"
    batch = f"--prompts_per_step {prompts} --minibatches 1 --steps {COUNT}"
    ARMS[name] = f"{fork} {batch} --lr 9e-4 --eval_every 80 --eval_samples 1 --save_every 1000"
    COLUMNS[name] = ("greedy", "update", "signal", "way")
for arm in ARMS:
    COLUMNS.setdefault(arm, ("greedy",))
SHOWN = (SAME, "a third of the rate", "one update a batch")
SHOWN += ("clip at 5%", "no clip", "ten times the KL term", "no KL term", "β2 0.999")
SEEDS = 5
SHORT = "--steps 17 --eval_problems 256"  # for a quick run, which has the arms of QUICK
QUICK = [f"{POINTS[0]}: {name}" for name in (SAME, "a third of the rate", f"loaded: {SAME}")]
LOCK, PARENTS = Lock(), TemporaryDirectory()


@cache
def parent(seed: int) -> Path:
    """Train the run that a seed's forks start from; return a folder with this `run`, and the
    weights after each of POINTS in the Hugging Face format."""
    folder = Path(PARENTS.name) / str(seed)
    for point in POINTS:
        command = f"grpo.py {FALL} {MEASURE} --steps {point} --save_every 5 --keep 8 --save_hf"
        command += f" --seed {seed} --resume auto --run_dir {folder / 'run'}"
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
        subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=lab.one_thread(), **pipes)
        (folder / "run/model").rename(folder / str(point))
    return folder


def before(arm: str, seed: int, folder: Path) -> None:
    """Put what a fork starts from into its folder: the parent's run, or its weights alone."""
    point, _, name = arm.partition(": ")
    if point == "mean":  # makes its own
        return
    with LOCK:
        made = parent(seed)
    part = point if name.startswith("loaded") else "run"
    shutil.copytree(made / part, folder / part)


def end(runs: list[dict]) -> str:
    """Write the greedy accuracy at the end of an arm's runs."""
    return lab.cell([{"x": run["greedy"][-1]} for run in runs], "x")


def pooled(runs: list[dict], name: str) -> list[dict]:
    """Collect a column's values of all runs, as numbers `x`."""
    return [{"x": value} for run in runs for value in run[name]]


def rows(results: dict) -> list[list[str]]:
    """Make the page's tables, of the arms that have runs; a quick run has few."""
    early, late = POINTS
    table = [["fork", f"from step {early}", f"from step {late}"]]
    for name in SHOWN:
        cells = [
            end(results[arm]) if (arm := f"{point}: {name}") in results else "–" for point in POINTS
        ]
        table.append([name, *cells])
    if "mean: true rewards" not in results:
        return table
    table += [[""] * 3, ["mean of the weights of", *MEANS]]
    start = lab.cell(pooled(results["mean: true rewards"], "start"), "x")
    table.append(["none: step 5", start, start])
    for size in SIZES:
        name = f"mean{size}" if size > 1 else "each"
        cells = [lab.cell(pooled(results[f"mean: {kind}"], name), "x") for kind in MEANS]
        table.append([f"{size} run" + "s" * (size > 1), *cells])
    table += [[""] * 4, ["rate × √updates", *(f"{updates} a batch" for updates in UPDATES)]]
    for product, rates in RULE.items():
        arms = [f"{early}: {FORK_WITH[fork]}" for fork in zip(UPDATES, rates)]
        table.append([product, *(end(results[arm]) for arm in arms)])
    table += [[""] * 4, ["new responses an update", "accuracy", "distance from step 5"]]
    for responses in FRESH:
        runs = results[fresh(responses)]
        far = lab.cell([{"x": run["way"][-1]} for run in runs], "x")
        table.append([str(responses), end(runs), far])
    table += [[""] * 3, ["loss", "1 run", "mean of 8"]]
    for loss in OTHERS:
        runs = results[f"mean: {loss}"]
        table.append([loss, *(lab.cell(pooled(runs, name), "x") for name in ("each", "mean8"))])
    return table


def draw(results: dict) -> object:
    """Draw the mean of falls, updates of one length, and what lies in which direction."""
    panels = "The mean of eight falls", "Updates of one length", "From step 5, in three directions"
    figure, axes = lab.sheet(TITLE, *panels, width=12, height=4.2)
    axes[0].set_ylabel("greedy accuracy")
    for axis in axes:
        axis.set_ylim(0, 1)
    if "mean: true rewards" not in results:  # a quick run
        return figure
    colours = dict(zip(MEANS, (lab.BLUE, lab.ORANGE)))
    for kind, colour in colours.items():
        runs = results[f"mean: {kind}"]
        for size in SIZES:
            name = f"mean{size}" if size > 1 else "each"
            values = [number["x"] for number in pooled(runs, name)]
            axes[0].scatter([size] * len(values), values, s=14, color=colour, alpha=0.3)
        middles = [np.median([run[f"mean{n}" if n > 1 else "each"] for run in runs]) for n in SIZES]
        axes[0].plot(SIZES, middles, color=colour, linewidth=2)
    lab.plain_ticks(axes[0], "x", SIZES)
    axes[0].set_xlabel("runs in the mean of the weights")
    starts = pooled(results["mean: true rewards"], "start")
    axes[0].axhline(np.median([number["x"] for number in starts]), color=lab.GREY, linestyle=":")
    lab.key(axes[0], colours | {"step 5, where they begin": lab.GREY}, 0.42)

    ends = [[run["greedy"][-1] for run in results[fresh(responses)]] for responses in FRESH]
    for responses, values in zip(FRESH, ends):
        axes[1].scatter([responses] * len(values), values, s=20, color=lab.BLUE, alpha=0.4)
    axes[1].plot(list(FRESH), [np.median(values) for values in ends], color=lab.BLUE, linewidth=2)
    lab.plain_ticks(axes[1], "x", tuple(FRESH))
    axes[1].set_xlabel(f"new responses in each of {COUNT} updates of length {LENGTH}")

    lines = {"what two runs do not share": ("noise", lab.ORANGE)}
    lines["the mean of eight"] = ("shared", lab.BLUE)
    lines["a random direction"] = ("random", lab.GREY)
    for name, colour in lines.values():
        runs = results["mean: true rewards"]
        lab.line(axes[2], np.array(DISTANCES), runs, name, colour)
    axes[2].set_xlabel("distance from step 5 (‖Δθ‖)")
    lab.key(axes[2], {words: colour for words, (_, colour) in lines.items()})
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
