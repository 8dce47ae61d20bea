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

TITLE = "to be measured"
FLAGS = "--task arithmetic:deep --steps 60 --beta 0 --minibatches 2 --eval_every 10"
FLAGS += " --eval_samples 2 --save_every 1000"
GROUPS, BRANCHES = (4, 8, 16, 32, 64), (2, 4, 8)
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
    table = [["arm", "sampled at the end", "sampled at equal tokens", "tokens, thousands"]]
    table[0] += ["branches right", "branches right, from the root"]
    for arm, runs in results.items():
        ended = [
            {
                "end": run["sampled"][-1],
                "equal": lab.at_tokens(run, least),
                "tokens": lab.spent(run)[-1],
                "right": np.mean(run.get("branch_reward", [np.nan])),
                "root": np.mean(run.get("branch_reward_root", [np.nan])),
            }
            for run in runs
        ]
        cells = [lab.cell(ended, "end"), lab.cell(ended, "equal"), lab.cell(ended, "tokens", ".0f")]
        table.append([arm, *cells, lab.cell(ended, "right"), lab.cell(ended, "root")])
    return table


def draw(results: dict) -> object:
    words = "sampled accuracy at the end", "sampled accuracy, by thousand tokens"
    figure, axes = lab.sheet(TITLE, *words, width=11)
    kinds = {"128 responses": lab.ORANGE, "16 prompts": lab.BLUE, "branches": lab.GREEN}
    for arm, runs in results.items():
        if "K" in arm:
            kind = "branches"
        else:
            kind = "16 prompts" if arm.startswith("16 prompts") else "128 responses"
        for run in runs:
            tokens = lab.spent(run)
            axes[0].scatter(tokens[-1], run["sampled"][-1], s=16, color=kinds[kind], alpha=0.7)
        middle = np.median([run["sampled"] for run in runs], 0)
        axes[1].plot(np.median([lab.spent(run) for run in runs], 0), middle, color=kinds[kind])
        lab.label(axes[1], tokens[-1], middle[-1], arm.split(", ", 1)[1], kinds[kind], fontsize=7)
    for axis in axes:
        lab.plain_ticks(axis, "x", (50, 100, 200, 500, 1000))
        axis.set_xlabel("thousand tokens")
    lab.key(axes[0], kinds)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
