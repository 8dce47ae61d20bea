"""The reward does not care for length. Who makes wrong answers long all the same?

A response is right or wrong by the toss of a coin; its length is how long it goes on: after every
token it stops with a chance of 0.1 at first, one chance for right responses and one for wrong ones.
16 groups of 8, one plain gradient step each. The sum over tokens (minirl.py) has the step divided
by the mean length, so that all three begin alike.

    python -m labs.length
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "1/|y| makes wrong answers long and right ones short, for nothing"
ARMS = {
    "1/|y| (grpo)": ("grpo", {}, 1.0),
    "token mean (stapo)": ("stapo", {"tau_p": 0.0}, 1.0),
    "sum (minirl)": ("minirl", {}, 0.2),
}
COLOURS = dict(zip(ARMS, (lab.BLACK, lab.BLUE, lab.ORANGE)))
P, G, LONGEST, LR, ROLLOUTS, EVERY = 16, 8, 60, 1.0, 150, 3


def read(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log π of tokens `[N, T]` (1: it stops here) in right and wrong responses, half of the rows
    each; `logits [2, 2]`."""
    halves = tokens.view(2, -1)  # [2, N/2·T]
    return logits.log_softmax(-1).gather(1, halves).view(tokens.shape)  # [N, T]


def measure(arm: str, seed: int, quick: bool) -> dict:
    """The mean lengths of right and wrong responses (those of the policy, not of the sample)."""
    stem, flags, rate = ARMS[arm]
    module, generator = toy.load(stem), torch.Generator().manual_seed(seed)
    logits = torch.tensor([[0.9, 0.1]] * 2, dtype=torch.float64).log()  # [2, 2]
    lengths = []  # right, wrong
    for _ in range(15 if quick else ROLLOUTS):
        go = logits.softmax(-1)[:, 0]  # [2]
        lengths.append(((1 - go**LONGEST) / (1 - go)).tolist())
        coin = torch.rand(P, G, generator=generator) < 0.5  # [P, G]
        A = module.advantages(coin.double()).flatten()  # [N]
        right = coin.flatten()  # [N]
        A = torch.cat([A[right], A[~right]])
        pad = 2 * max(right.sum(), (~right).sum())  # two halves of equal size, for `read`
        stop = torch.rand(pad, LONGEST, generator=generator, dtype=torch.float64)
        stop = (stop < 1 - go.repeat_interleave(pad // 2)[:, None]).long()  # [N', T]
        mask = (stop.cumsum(1) - stop == 0).double()  # [N', T]: up to the token that stops
        here = torch.cat([torch.arange(right.sum()), pad // 2 + torch.arange((~right).sum())])
        old = read(logits, stop)  # [N', T]

        def rows(logits: torch.Tensor, tokens: torch.Tensor, here=here) -> torch.Tensor:
            return read(logits, tokens)[here]

        held = {"old_logp": old[here], "advantages": A, "mask": mask[here]}
        slope = toy.gradient(module, flags, logits, stop, rows, **held)
        logits = logits - rate * LR * slope
    right, wrong = zip(*lengths)
    found = {"right": right[::EVERY], "wrong": wrong[::EVERY]}
    return found | {"right end": right[-1], "wrong end": wrong[-1]}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "right at the end", "wrong at the end"]]
    for arm, runs in results.items():
        ends = (lab.cell(runs, f"{which} end", ".1f") for which in ("right", "wrong"))
        table.append([arm, *ends])
    return table


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, "length of wrong answers", "length of right answers")
    for axis, which in zip(axes, ("wrong", "right")):
        for arm, colour in COLOURS.items():
            runs = results[arm]
            x = EVERY * np.arange(len(runs[0][which]))
            lab.line(axis, x, runs, which, colour)
            align = {"va": "bottom" if "sum" in arm else "top"} if "/" not in arm else {}
            lab.label(axis, x[-1], lab.over(runs, which)[0][-1], arm, colour, **align)
        axis.set(xlabel="rollouts", ylabel="tokens", xlim=(0, 1.5 * len(x)))
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
