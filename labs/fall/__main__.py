"""Why does training fall? One fall is forked: each fork has the same weights and one change.

grpo.py falls with 16 updates a batch and three times its learning rate. Each fork goes back to the
checkpoint after step 5 (the fall begins) or 15 (it is under way), changes one thing, and trains
until step 40. With `--resume --back_to` it keeps Adam's moments, π_ref and the order of the
prompts. A fork named *loaded* changes what cannot change on resume, so it starts a new run from the
weights alone, and has its own control, `loaded: none`. *Watched* runs begin at step 0 and are
measured after some updates of each rollout (labs/fall/watch.py).

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
from labs.fall.watch import AFTER, MEASURED

TITLE = "At nine times the rate an update moves the policy 4 to 100 times as far, clip or not"
FALL = "--minibatches 16 --lr 9e-4"
MEASURE = "--eval_every 5 --eval_samples 1"
FREE = "--clip_low 1e9 --clip_high 1e9"
RATE = "args.lr * min(1.0, step / max(1, args.warmup))"
DECAYED = "args.lr * (1 - step / args.steps)"  # linear, 0 at the last step
ADAMW = "torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)"
SPLIT = "rollout.split(args.minibatches)"
SAME = "none"

# Flags (the last value of a flag wins), a line of grpo.py and what it becomes, and the accuracies
# at step 40 that we predicted for forks from POINTS (commit ed73bcd7).
RESUMED = {
    SAME: ("", None, 0.20, 0.20),
    "a third of the rate": ("--lr 3e-4", None, 0.90, 0.70),
    "a third of the rate, no upper clip": ("--lr 3e-4 --clip_high 10", None, 0.90, 0.70),
    "one update a batch": ("--minibatches 1", None, 0.90, 0.80),
    "four updates of 32 responses": ("--minibatches 4", None, 0.75, 0.55),
    "clip at 5%": ("--clip_low 0.05 --clip_high 0.05", None, 0.40, 0.25),
    "no clip": (FREE, None, 0.15, 0.15),
    "ten times the KL term": ("--beta 0.1", None, 0.45, 0.35),
    "no KL term": ("--beta 0", None, 0.05, 0.03),
    "gradient clip 0.1": ("--grad_clip 0.1", None, 0.35, 0.25),
    "β2 0.999": ("--betas 0.9 0.999", None, 0.20, 0.15),
    "the rate falls to 0": ("", (RATE, DECAYED), 0.70, 0.50),
    "four updates of 8 responses": ("", (SPLIT, f"{SPLIT}[:4]"), 0.60, 0.45),
}
LOADED = {
    SAME: ("grpo.py", None, None),
    "no KL term": ("grpo.py --beta 0", None, None),
    "four times the prompts": ("grpo.py --prompts_per_step 64", 0.80, 0.65),
    "new prompts for every update": ("grpo.py --prompts_per_step 1 --minibatches 1", 0.20, 0.15),
    "plain SGD, steps of 0.3 at most": ("grpo.py --lr 0.3", 0.60, 0.40),
    "plain SGD, steps of 0.055 at most": ("grpo.py --lr 0.055", None, None),
    "GSPO": ("gspo.py", 0.55, 0.40),
    "SAPO": ("sapo.py", 0.10, 0.05),
    "STAPO": ("stapo.py", 0.15, 0.15),
    "MASPO": ("maspo.py", 0.10, 0.05),
    "CISPO": ("-m variants.cispo", 0.10, 0.05),
    "DPPO's mask": ("-m variants.dppo", 0.25, 0.20),
    "MiniRL": ("minirl.py", 0.30, 0.20),
}
SGD = "torch.optim.SGD(policy.parameters(), args.lr)"
STEPS, POINTS = 40, (5, 15)
WATCHED = {
    "watched: the fall": FALL,
    "watched: no clip": f"{FALL} {FREE}",
    "watched: a ninth of the rate": "--minibatches 16 --lr 1e-4",
}
ARMS, DAMAGE = {}, {}
for name, flags in WATCHED.items():
    ARMS[name] = f"-m labs.fall.watch grpo.py --steps 16 --eval_every 1 --eval_samples 1 {flags}"
for point in POINTS:
    for name, (flags, damage, *_) in RESUMED.items():
        fork = f"grpo.py --resume --back_to {point} --steps {STEPS} --save_every 40 --keep 8"
        ARMS[f"{point}: {name}"] = f"{fork} {MEASURE} {FALL} {flags}".strip()
        if damage:
            DAMAGE[f"{point}: {name}"] = damage
    for name, (command, *_) in LOADED.items():
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
FINE = ("greedy", "reward", "entropy", "sampler_gap", "response_len", "shows_work")
FINE += tuple(f"{name}_{update}" for name in MEASURED for update in AFTER)
COLUMNS = {arm: FINE if arm in WATCHED else ("greedy",) for arm in ARMS}
SHOWN = {  # watched metrics
    "moved_16": "|Δ log π| of fresh tokens, by one update",
    "kl_16": "KL(π_old ‖ π_θ), nats per token",
    "beyond_16": "tokens beyond the clip's limit (share)",
    "entropy": "entropy (nats per token)",
    "sampler_gap": "gap between sampler and trainer (nats)",
    "response_len": "response length (tokens)",
    "shows_work": "responses that show work (share)",
    "reward": "reward",
    "greedy": "held-out accuracy, greedy",
}
BACK = "tokens beyond the limit that an update brings nearer (share)"
SEEDS = 5
SHORT = "--steps 17 --eval_problems 256"  # for a quick run, which has the arms of QUICK
some = [SAME, "a third of the rate", f"loaded: {SAME}"]
QUICK = [*WATCHED, *(f"{point}: {name}" for point in POINTS for name in some)]
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
    if point == "watched":
        return
    with LOCK:
        made = parent(seed)
    part = point if name.startswith("loaded") else "run"
    shutil.copytree(made / part, folder / part)


def fork_rows(results: dict) -> list[list[str]]:
    """Make rows with each fork's greedy accuracy at its end, from both points, and predictions."""
    changes = RESUMED | {f"loaded: {name}": change for name, change in LOADED.items()}
    rows = [["one change", "from step 5", "predicted", "from step 15", "predicted"]]
    known = [name for name in changes if f"{POINTS[0]}: {name}" in results]  # a quick run has few
    for name in known:
        *_, early, late = changes[name]
        row = [name]
        for point, predicted in zip(POINTS, (early, late)):
            runs = results[f"{point}: {name}"]
            row.append(lab.cell([{"end": run["greedy"][-1]} for run in runs], "end"))
            row.append("–" if predicted is None else f"{predicted:.2f}")
        rows.append(row)
    return rows


def at(run: dict, name: str) -> dict[int, float]:
    """Return a column's values by step, from step 1 on."""
    return {int(step): value for step, value in zip(run[f"{name}@"], run[name]) if step > 0}


def departure(run: dict, calm: list[dict], name: str) -> float:
    """Find the step from which the run stays above, or below, the range of the calm runs at the
    same steps until its end; inf if there is none."""
    others, since, side = [at(other, name) for other in calm], np.inf, 0
    for step, value in at(run, name).items():
        there = [other[step] for other in others]
        now = int(value > max(there)) - int(value < min(there))
        if now != side:
            since, side = step, now
    return since if side else np.inf


def mean_of(run: dict, name: str) -> float:
    """Average over the measured updates of all steps. There is no `back_1`, because before the
    first update no token is beyond the limit."""
    columns = [f"{name}_{update}" for update in AFTER if f"{name}_{update}" in run]
    return np.mean([np.mean(run[column]) for column in columns])


def watched_rows(results: dict) -> list[list[str]]:
    """Make rows with means of the watched runs, and when the fall leaves the calm runs' range."""
    rows = [["watched", "the fall", "no clip", "a ninth of the rate", "leaves its range at step"]]
    arms = [results[arm] for arm in WATCHED]
    early = [[{"x": np.mean(run["moved_16"][:3])} for run in runs] for runs in arms]
    first_steps = [lab.cell(runs, "x", ".2g") for runs in early]
    rows.append([f"{SHOWN['moved_16']}, first 3 steps", *first_steps, "–"])
    for name, words in SHOWN.items():
        first = [{"x": departure(run, arms[2], name)} for run in arms[0]]
        late = [
            lab.cell([{"x": lab.tail(run[name], 3)} for run in runs], "x", ".2g") for runs in arms
        ]
        rows.append([f"{words}, last 3 steps", *late, lab.cell(first, "x", ".0f")])
    for name, words in {"length": "length of an update", "back": BACK}.items():
        means = [lab.cell([{"x": mean_of(run, name)} for run in runs], "x", ".2g") for runs in arms]
        rows.append([words, *means, "–"])
    return rows


def rows(results: dict) -> list[list[str]]:
    return [*fork_rows(results), [""] * 5, *watched_rows(results)]


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, *SHOWN.values(), width=12, height=7.5, rows=3)
    colours = dict(zip(WATCHED, (lab.ORANGE, lab.BLUE, lab.GREY)))
    for axis, name in zip(axes, SHOWN):
        measured = name.rpartition("_")[0] in MEASURED
        for arm, colour in colours.items():
            runs = results[arm]
            if measured:
                lab.line(axis, *after_updates(runs, name.rpartition("_")[0]), "x", colour)
            else:
                steps = [16 * step for step in at(runs[0], name)]
                lines = [{"x": list(at(run, name).values())} for run in runs]
                lab.line(axis, steps, lines, "x", colour)
        axis.set_xlabel("optimiser steps")
    lab.key(axes[0], {arm.removeprefix("watched: "): c for arm, c in colours.items()}, 0.02, 0.95)
    return figure


def after_updates(runs: list[dict], name: str) -> tuple[list[int], list[dict]]:
    """Collect a measure after the updates of AFTER: its optimiser steps, and its values by run."""
    steps = [int(step) for step in runs[0][f"{name}_16@"]]
    order = [16 * (step - 1) + update for step in steps for update in AFTER]
    lines = [
        {"x": [at(run, f"{name}_{update}")[step] for step in steps for update in AFTER]}
        for run in runs
    ]
    return order, lines


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
