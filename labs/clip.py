"""What the clip holds, and when: none, PPO's, and one without min; 1, 4 and 16 mini-batches.

grpo.py at three times its step size, where it matters. `--clip_low 1e9 --clip_high 1e9` is no clip
at all. A clip *without* the min is not one of the file's flags: it is a bug, put in on purpose
(with one mini-batch r is 1, and it would be the same run).

    python -m labs.clip
"""

import sys

from labs import lab

TITLE = "The clip slows a decay that it does not stop"
RUN = "grpo.py --lr 1e-3 --steps 60 --eval_every 10 --eval_samples 2 --save_every 1000"
FREE = "--clip_low 1e9 --clip_high 1e9"
ARMS = {
    f"{name}, {n} per rollout": f"{RUN} --minibatches {n} {flags}".strip()
    for n in (1, 4, 16)
    for name, flags in (("clip", ""), ("no clip", FREE))
}
DAMAGE = {}
for n in (4, 16):
    ARMS[f"no min, {n} per rollout"] = f"{RUN} --minibatches {n}"
    DAMAGE[f"no min, {n} per rollout"] = "torch.minimum(ratio * A, clipped * A)", "clipped * A"
COLUMNS = ("greedy", "sampled", "clip_share", "ref_kl", "response_len", "grad_norm")
SEEDS = 5


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "greedy at the end", "highest greedy", "clip share, mean"]]
    for arm, runs in results.items():
        ended = [
            {
                "end": run["greedy"][-1],
                "high": max(run["greedy"]),
                "share": 100 * sum(run["clip_share"]) / len(run["clip_share"]),
            }
            for run in runs
        ]
        cells = (lab.cell(ended, name) for name in ("end", "high"))
        table.append([arm, *cells, lab.cell(ended, "share", ".2f") + " %"])
    return table


def draw(results: dict) -> object:
    counts = 1, 4, 16
    words = [f"{n} optimiser step{'s' * (n > 1)} per rollout" for n in counts]
    figure, axes = lab.sheet(TITLE, *words, width=11)
    colours = {"clip": lab.BLUE, "no clip": lab.ORANGE, "no min": lab.PINK}
    for axis, n in zip(axes, counts):
        some = {name: results.get(f"{name}, {n} per rollout") for name in colours}
        lab.curves(axis, some, "greedy", {name: colours[name] for name in some if some[name]})
        axis.set_ylim(0, 1.02)
    axes[0].set_ylabel("held-out accuracy, greedy")
    lab.key(axes[0], colours)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
