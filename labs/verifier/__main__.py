"""A verifier that can be exploited: the reward rises while the accuracy falls.

`--task labs/verifier/noisy.py` accepts a response if its answer occurs anywhere in the worked
solution. Some verifiers search a reference text for the number in this way. The strict verifier
scores the held-out problems.

    python -m labs.verifier
"""

import sys

from labs import lab

TITLE = "What the verifier lets pass is what the policy learns"
FLAGS = "--steps 100 --beta 0 --eval_every 20 --save_every 1000"
ARMS = {
    "verifier with a hole": f"grpo.py --task labs/verifier/noisy.py {FLAGS}",
    "strict verifier": f"grpo.py {FLAGS}",
}
COLUMNS = ("greedy", "reward", "response_len")
COLOURS = dict(zip(ARMS, (lab.ORANGE, lab.BLUE)))
SEEDS = 5


def rows(results: dict) -> list[list[str]]:
    numbers = {
        "training reward": (lab.mean_of_last_20("reward"), ".2f"),
        "held-out greedy": (lab.last_value("greedy"), ".2f"),
        "highest before": (lab.maximum("greedy"), ".2f"),
        "tokens per response": (lab.mean_of_last_20("response_len"), ".0f"),
    }
    return lab.table(results, numbers, runs=False)


def draw(results: dict) -> object:
    words = "training reward (its verifier's)", "held-out accuracy, greedy (strict)"
    figure, axes = lab.make_figure(TITLE, *words)
    for axis, column, width in zip(axes, ("reward", "greedy"), (9, 1)):
        lab.curves(axis, results, column, COLOURS, width)
        axis.set_ylim(0, 1.02)
    lab.legend(axes[0], COLOURS)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
