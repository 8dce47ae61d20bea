"""Does the direction of the gap between sampler and trainer move before accuracy does?

    python -m labs.triage SEED FOLDER

minirl.py as in the first arm of the lab mismatch: 8-bit sampler, three times the rate, 80 steps. In
each step g = log π_old - log μ of every token, averaged over segments of eight tokens of wrong and
of right responses, goes to FOLDER.jsonl. labs/triage.json has ten runs, and triage_read.py reads it.
"""

import json
import sys
from pathlib import Path

import torch
from common.launch import launch
from common.run import Run

from labs.stresses import load

SIZE = 8  # tokens of a segment: responses have some 25


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


def one_run(name: str, seed: int, folder: Path) -> None:
    module = load(Path("minirl.py"))
    watch(folder.with_suffix(".jsonl"))
    flags = "--model tiny-moe --lr 1e-3 --steps 80 --eval_every 4 --eval_problems 128 --eval_samples 2 --save_every 1000 --sampler_tolerance 10"
    sys.argv = ["minirl.py", *flags.split(), "--seed", str(seed), "--run_dir", str(folder)]
    launch(module.main, module.Args)


if __name__ == "__main__":
    one_run("8 bits", int(sys.argv[1]), Path(sys.argv[2]))
