"""Most prompts teach nothing: three quarters too easy, a fifth impossible, one in twenty between.

`--task arithmetic:mix` trains on 75% of two terms, 20% of 16 terms (which no response of 64 tokens
can finish) and 5% of 5 to 7 terms; held out are problems of 5 to 7 terms alone. grpo.py draws
prompts as they come, goldilocks.py picks them by what its teacher expects them to teach.

    python -m labs.mix
"""

import sys

from labs import lab

TITLE = "A teacher that picks prompts learns the middle, from the same number of responses"
FLAGS = "--task arithmetic:mix --beta 0 --steps 120 --eval_every 20 --save_every 1000"
ARMS = {"uniform": f"grpo.py {FLAGS}", "Goldilocks": f"goldilocks.py {FLAGS}"}
COLUMNS = ("greedy", "sampled", "zero_groups", "response_len")
COLOURS = dict(zip(ARMS, (lab.ORANGE, lab.BLUE)))
SEEDS = 5


def rows(results: dict) -> list[list[str]]:
    head = ["arm", "greedy at the end", "sampled at the end", "groups without gradient"]
    table = [head]
    for arm, runs in results.items():
        ended = [{name: run[name][-1] for name in ("greedy", "sampled")} for run in runs]
        idle = [{"idle": lab.tail(run["zero_groups"], 120)} for run in runs]
        cells = (lab.cell(ended, name) for name in ("greedy", "sampled"))
        table.append([arm, *cells, lab.cell(idle, "idle")])
    return table


def draw(results: dict) -> object:
    words = "the middle, sampled accuracy", "the middle, greedy", "groups without gradient (share)"
    figure, axes = lab.sheet(TITLE, *words, width=11)
    for axis, column, width in zip(axes, ("sampled", "greedy", "zero_groups"), (1, 1, 9)):
        lab.curves(axis, results, column, COLOURS, width)
        axis.set_ylim(0, 1.02)
    lab.key(axes[0], COLOURS)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
