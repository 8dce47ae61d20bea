"""More samples from the root, or branches from failed responses?

Problems with one hard late step (`--task arithmetic:deep`). grpo.py samples G = 4 to 64 responses
to each prompt: once with 128 responses in a step, so that more responses mean fewer prompts, and
once with 16 prompts, so that more responses cost more. deep_grpo.py samples G = 8 and adds K = 2, 4
or 8 branches to each failed response.

    python -m labs.branches
"""

import sys

import numpy as np

from labs import lab

TITLE = "More samples help up to 16; branches cost more and end no higher"
FLAGS = "--task arithmetic:deep --steps 60 --beta 0 --minibatches 2 --eval_every 10"
FLAGS += " --eval_samples 2 --save_every 1000"
GROUPS = (4, 8, 16, 32, 64)
BRANCHES = (2, 4, 8)
ARMS = {}
for P in (32, 16, 8, 4, 2):
    G = 128 // P
    ARMS[f"{P} prompts, G = {G}"] = f"grpo.py {FLAGS} --prompts_per_step {P} --group_size {G}"
ARMS |= {f"16 prompts, G = {G}": f"grpo.py {FLAGS} --group_size {G}" for G in GROUPS if G != 8}
ARMS |= {f"16 prompts, G = 8, K = {K}": f"deep_grpo.py {FLAGS} --branches {K}" for K in BRANCHES}
COLUMNS = ("greedy", "sampled", "tokens", "extra_tokens", "zero_groups", "groups_rescued")
COLUMNS += ("branch_reward", "branch_reward_root", "pivots_saved", "pivots_saved_root", "reward")
SEEDS = 3


def rows(results: dict) -> list[list[str]]:
    """ "At equal tokens" is where the run that sampled least ends."""
    least = min(lab.spent(run)[-1] for runs in results.values() for run in runs)
    numbers = {
        "sampled at the end": (lab.end, ".2f"),
        "sampled at equal tokens": (lambda run: lab.at_tokens(run, least), ".2f"),
        "tokens, thousands": (lambda run: lab.spent(run)[-1], ".0f"),
        "branches right": (right, ".2f"),
        "branches right, from the root": (lambda run: right(run, "_root"), ".2f"),
    }
    return lab.table(results, numbers, runs=False)


def right(run: dict, where: str = "") -> float | None:
    """The share of right branches, over all steps that had some."""
    found = run[f"branch_reward{where}"]
    return float(np.mean(found)) if found else None


def draw(results: dict) -> object:
    words = "sampled accuracy at the end", "share of branches that are right"
    figure, axes = lab.sheet(TITLE, *words, width=11)
    kinds = {"128 responses": lab.ORANGE, "16 prompts": lab.BLUE, "branches": lab.GREEN}
    for arm, runs in results.items():
        kind = "16 prompts" if arm.startswith("16 prompts") else "128 responses"
        kind = "branches" if "K" in arm else kind
        tokens = [lab.spent(run)[-1] for run in runs]
        axes[0].scatter(tokens, [lab.end(run) for run in runs], s=16, color=kinds[kind], alpha=0.5)
        middle = np.median([lab.end(run) for run in runs])
        lab.label(axes[0], np.median(tokens), middle, arm.split(", ")[-1], kinds[kind])
        for where, colour in (("", lab.BLUE), ("_root", lab.ORANGE)):
            if "K" in arm:
                found = [right(run, where) for run in runs]
                axes[1].scatter([arm.split(", ")[-1]] * len(runs), found, color=colour, alpha=0.6)
    lab.plain_ticks(axes[0], "x", (200, 500, 1000, 2000))
    axes[0].set_xlabel("thousand tokens")
    axes[1].set_ylim(0, 1)
    lab.key(axes[0], kinds, 0.6, 0.25)
    lab.key(axes[1], {"from a cut inside the response": lab.BLUE, "from the root": lab.ORANGE})
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
