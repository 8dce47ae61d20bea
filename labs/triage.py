"""Does the direction of the gap between sampler and trainer move before accuracy does?

    python -m labs.triage [--seeds N]

grpo.py under two stresses, 40 steps. In each step g = log π_old - log μ of every token, averaged
over segments of eight tokens of wrong and of right responses. Prints means over seeds and over four
steps. Runs are kept in runs/triage and not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from common.launch import launch
from common.run import Run, read_lines

from labs import lab
from labs.stresses import stressed

SIZE = 8  # tokens of a segment: responses have some 25
TITLE = "The gap's direction does not move before accuracy does"
FLAGS = "--steps 40 --prompts_per_step 16 --group_size 8 --eval_every 2 --eval_problems 128 "
FLAGS += "--eval_samples 2 --sampler_tolerance 1e6"
STRESSES = ("quantised sampler", "stale sampler")


def segment_means(g: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean g of each segment that has a token, from g and mask `[n, T]`."""
    pad = (-g.shape[1]) % SIZE
    sums = torch.nn.functional.pad(g * mask, (0, pad)).view(len(g), -1, SIZE).sum(-1)
    counts = torch.nn.functional.pad(mask, (0, pad)).view(len(g), -1, SIZE).sum(-1)
    return (sums / counts.clamp(min=1))[counts > 0]


def watch(out: Path) -> None:
    """Make every run write its segments, one line a step."""
    check, lines = Run.check_sampler, []

    def watched(run: Run, minibatches: list) -> dict:
        line = {}
        for name, sign in (("wrong", -1), ("right", 1)):
            means, sizes = [], []
            for batch in minibatches:
                rows = batch.advantages * sign > 0
                if rows.any():
                    mask = batch.mask[rows]
                    g = (batch.old_logp - batch.rollout_logp)[rows] * mask
                    means.append(segment_means(g, mask))
                    sizes.append(g.abs()[mask > 0])
            if means:
                line[name] = torch.cat(means).mean().item()
                line[f"{name}_size"] = torch.cat(sizes).mean().item()
        lines.append(line)
        out.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return check(run, minibatches)

    Run.check_sampler = watched


def one_run(stress: str, seed: int, folder: Path) -> None:
    module = stressed(Path("grpo.py"), stress)
    watch(folder.with_suffix(".jsonl"))
    sys.argv = ["grpo.py", *FLAGS.split(), "--seed", str(seed), "--run_dir", str(folder)]
    launch(module.main, module.Args)


def columns(stress: str, seeds: int) -> dict[str, np.ndarray]:
    """Accuracy, and mean g and |g| of wrong and right responses: `[seeds, 10]`, each the mean of
    four steps."""
    found = {name: [] for name in ("sampled", "wrong", "wrong_size", "right", "right_size")}
    for seed in range(1, seeds + 1):
        folder = Path(f"runs/triage/{stress.split()[0]}-{seed}")
        metrics = read_lines(folder / "metrics.jsonl")[1:]
        lines = [json.loads(line) for line in folder.with_suffix(".jsonl").open()]
        for name, values in found.items():
            source = metrics if name == "sampled" else lines
            values.append([line.get(name, np.nan) for line in source])
    return {n: np.nanmean(np.reshape(v, (seeds, 10, 4)), axis=2) for n, v in found.items()}


def rows(stress: str, seeds: int) -> list[list[str]]:
    """A line for every four steps: medians and ranges over seeds."""
    table = [["steps", "accuracy", "g, wrong", "|g|, wrong", "g, right", "|g|, right"]]
    for place, cells in enumerate(zip(*[v.T for v in columns(stress, seeds).values()])):
        shown = [f"{np.median(c):.2f} ({c.min():.2f}–{c.max():.2f})" for c in cells]
        table.append([f"{4 * place + 1} to {4 * place + 4}", *shown])
    return table


def draw(seeds: int) -> None:
    """Accuracy, g and |g| of wrong responses, a thin line for each seed."""
    figure, axes = lab.sheet(TITLE, *STRESSES)
    colours = {"sampled": lab.BLACK, "wrong_size": lab.BLUE, "wrong": lab.ORANGE}
    names = ("held-out accuracy", "|g| of wrong responses", "g of their segments")
    for axis, stress in zip(axes, STRESSES):
        for name, colour in colours.items():
            for values in columns(stress, seeds)[name]:
                axis.plot(np.arange(10) * 4 + 2.5, values, color=colour, alpha=0.8)
        axis.axhline(0, color=lab.GREY, linewidth=0.8)
        axis.set_xlabel("step")
    lab.key(axes[1], dict(zip(names, colours.values())), x=0.45, y=0.72)
    lab.save(figure, Path("runs/triage/figure.png"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        one_run(words.one[0], int(words.one[1]), Path(words.one[2]))
        return
    for seed in range(1, words.seeds + 1):
        for stress in STRESSES:
            folder = Path(f"runs/triage/{stress.split()[0]}-{seed}")
            if not (folder / "summary.json").exists():
                job = [sys.executable, "-m", "labs.triage", "--one", stress, str(seed), str(folder)]
                subprocess.run(job, check=True, stdout=subprocess.DEVNULL)
    for stress in STRESSES:
        print(stress)
        print(lab.text(rows(stress, words.seeds)), "", sep="\n")
    draw(words.seeds)


if __name__ == "__main__":
    main()
