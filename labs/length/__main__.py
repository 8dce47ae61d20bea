"""The reward ignores length. Which losses make wrong answers long nevertheless?

A coin flip decides whether a response is right. After every token the response stops with a
probability that is 0.1 at first. Right and wrong responses each have their own probability. A
rollout has 16 groups of 8 responses and serves for one plain gradient step. dr_grpo.py subtracts
the group's mean but does not divide by the std, and divides by a constant for the length; its
learning rate is chosen such that all arms begin alike. laconic.py averages like grpo.py, and its
reward has a price for tokens beyond a budget of 10. In three arms one wrong response of each
rollout loops: it goes on to the limit of 60 tokens.

    python -m labs.length
"""

import sys

import numpy as np
from common.distributed import World
import torch

from labs import lab, toy

TITLE = "1/|y| makes wrong answers long and right ones short, without any benefit"
ARMS = {
    "1/|y| (grpo)": ("grpo", {}, 1.0),
    "1/|y|, a budget (laconic)": ("laconic", {"length_budget": 10}, 1.0),
    "token mean (justrl)": ("justrl", {}, 1.0),
    "constant (dr_grpo)": ("dr_grpo", {"max_new_tokens": 60}, 12.0),
}
COLOURS = dict(zip(ARMS, (lab.BLACK, lab.GREEN, lab.BLUE, lab.ORANGE)))
LOOP = ", one loop"
ARMS |= {f"{arm}{LOOP}": what for arm, what in ARMS.items() if what[0] != "laconic"}
LOWER = {  # the lower of two lines that end together
    "right": ["1/|y| (grpo)", "token mean (justrl)"],
    "wrong": ["constant (dr_grpo)"],
}
UNDER = "right", "1/|y| (grpo)"
P, G, LONGEST, LR, ROLLOUTS, EVERY = 16, 8, 60, 1.0, 150, 3


def measure(arm: str, seed: int) -> dict:
    """Measure the mean lengths of right and wrong responses under the policy, not in the sample."""
    stem, flags, rate = ARMS[arm]
    module, generator = toy.load(stem), torch.Generator().manual_seed(seed)
    budget = None
    if stem == "laconic":
        budget = module.Budget(module.Args(**flags), World(0, 1, torch.device("cpu")))
    logits = torch.tensor([[0.9, 0.1]] * 2, dtype=torch.float64).log()  # [2, 2]: go on, stop
    lengths = []  # right, wrong
    for _ in range(ROLLOUTS):
        go = logits.softmax(-1)[:, 0]  # [2]
        lengths.append(((1 - go**LONGEST) / (1 - go)).tolist())
        coin = torch.rand(P, G, generator=generator) < 0.5  # [P, G]: right
        which = (~coin).flatten().long()  # [N]: the row of `logits`
        chance = torch.rand(P * G, LONGEST, generator=generator, dtype=torch.float64)
        stop = (chance < 1 - go[which, None]).long()  # [N, T]
        if LOOP in arm:
            stop[(~coin).flatten().nonzero()[0]] = 0  # the first wrong response
        mask = (stop.cumsum(1) - stop == 0).double()  # [N, T]: up to the token that stops
        rewards = coin.double()  # [P, G]
        if budget:
            rewards = budget.charge(rewards, mask.sum(1).view(P, G))

        def read(logits: torch.Tensor, tokens: torch.Tensor, which=which) -> torch.Tensor:
            rows = logits.log_softmax(-1)[which, None].expand(-1, LONGEST, 2)  # [N, T, 2]
            return rows.gather(2, tokens[..., None])[..., 0]  # [N, T]

        held = {"old_logp": read(logits, stop), "mask": mask}
        held["advantages"] = module.advantages(rewards).flatten()
        logits = logits - rate * LR * toy.gradient(module, flags, logits, stop, read, **held)
    right, wrong = zip(*lengths)
    curves = {"right": right[::EVERY], "wrong": wrong[::EVERY]}
    return curves | {"right end": right[-1], "wrong end": wrong[-1]}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "right at the end", "wrong at the end"]]
    for arm, runs in results.items():
        ends = (lab.cell(runs, f"{which} end", ".1f") for which in ("right", "wrong"))
        table.append([arm, *ends])
    return table


def draw(results: dict) -> object:
    figure, axes = lab.make_figure(TITLE, "length of wrong answers", "length of right answers")
    for axis, which in zip(axes, ("wrong", "right")):
        for arm, colour in COLOURS.items():
            runs = results[arm]
            x = EVERY * np.arange(len(runs[0][which]))
            lab.line(axis, x, runs, which, colour)
            level = "top" if arm in LOWER[which] else "bottom"
            words = f"under it {arm}" if (which, arm) == UNDER else arm
            lab.label(axis, x[-1], lab.median_and_band(runs, which)[0][-1], words, colour, va=level)
        axis.set(xlabel="rollouts", ylabel="tokens", xlim=(0, 1.6 * x[-1]), ylim=(0, None))
        axis.set_xticks((0, 50, 100, 150))
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
