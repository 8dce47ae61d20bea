"""New endings for failed responses, compared with no branches and with as many more samples.

deep_grpo.py runs on problems with one hard late step (`--task arithmetic:deep`). The second arm has
`--branch_weight 0`, so it samples branches, but does not learn from them. The third arm has twice
as many responses per prompt, which cost about as many tokens as the branches.

    python -m labs.lock.branch
"""

import sys

from labs import lab

TITLE = "Branches from failed responses: no better here, by the step or by the token"
FLAGS = "--task arithmetic:deep --steps 60 --beta 0 --eval_every 10 --save_every 1000"
ARMS = {
    "branches": f"deep_grpo.py {FLAGS}",
    "no branches": f"deep_grpo.py --branch_weight 0 {FLAGS}",
    "more samples": f"deep_grpo.py --branch_weight 0 --group_size 16 {FLAGS}",
}
COLUMNS = ("greedy", "sampled", "tokens", "extra_tokens", "groups_rescued")
COLOURS = dict(zip(ARMS, (lab.BLUE, lab.GREY, lab.ORANGE)))
SEEDS = 5


def spent(run: dict) -> list[float]:
    """Thousands of tokens learned from up to each evaluation, without those of branches."""
    main = [t / (1 + x) for t, x in zip(run["tokens"], run["extra_tokens"])]
    return [sum(main[: int(step)]) / 1000 for step in run["sampled@"]]


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "sampled after 20 steps", "sampled at the end", "tokens, thousands"]]
    for arm, runs in results.items():
        ended = [
            {
                "early": run["sampled"][2],
                "end": run["sampled"][-1],
                "tokens": sum(run["tokens"]) / 1000 if arm == "branches" else spent(run)[-1],
            }
            for run in runs
        ]
        cells = (lab.cell(ended, name) for name in ("early", "end"))
        table.append([arm, *cells, lab.cell(ended, "tokens", ".0f")])
    return table


def draw(results: dict) -> object:
    words = "sampled accuracy, by step", "by thousand tokens learned from"
    figure, axes = lab.sheet(TITLE, *words)
    lab.curves(axes[0], results, "sampled", COLOURS)
    for arm, colour in COLOURS.items():
        for run in results[arm]:
            whole = [sum(run["tokens"][: int(step)]) / 1000 for step in run["sampled@"]]
            tokens = whole if arm == "branches" else spent(run)
            axes[1].plot(tokens, run["sampled"], color=colour, linewidth=1.3, alpha=0.8)
    axes[1].set_xlabel("thousand tokens")
    for axis in axes:
        axis.set_ylim(0.1, 1.02)
    lab.key(axes[1], COLOURS)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
