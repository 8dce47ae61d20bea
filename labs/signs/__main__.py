"""Learning from right answers only, from wrong ones only, or both: what is learned, what is kept?

One prompt has 20 possible answers of one token. *Easy*: four are right, at 0.05 each at first.
*Rare*: one is right, at 0.002. *Uneven*: four are right, the most likely at 0.08, the others at
0.04. A rollout has 16 groups of 8 and serves four plain gradient steps, with PPO's clip at 0.2. The
arms differ in their advantages.

Three arms are those of arXiv 2506.01347, which has no baseline: PSR is R, NSR is R - 1, W-REINFORCE
is 0.1 for a right answer and -1 for a wrong one. Four arms are halves and parts of grpo.py's
z-score, which nobody has published. The last of these is what variants/signs.py does.

    python -m labs.signs
"""

import sys
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from labs import lab, toy

TITLE = "Half of a z-score never finds a rare answer; the paper's negatives do"
grpo = toy.load("grpo")


def signed(right: float, wrong: float, way: Callable[[Tensor], Tensor]) -> Callable:
    """Like this way, with a weight for each sign: rewards `[P, G]` -> advantages `[P, G]`."""
    return lambda R: torch.where(way(R) > 0, right, wrong) * way(R)


def centred(R: Tensor) -> Tensor:
    return R - R.mean(dim=1, keepdim=True)


WAYS = {
    "GRPO": grpo.advantages,
    "GRPO without std": centred,
    "PSR": signed(1, 0, lambda R: 2 * R - 1),
    "NSR": signed(0, 1, lambda R: 2 * R - 1),
    "W-REINFORCE": signed(0.1, 1, lambda R: 2 * R - 1),
    "right half of the z-score": signed(1, 0, grpo.advantages),
    "wrong half of the z-score": signed(0, 1, grpo.advantages),
    "z-score, wrong by half": signed(1, 0.5, grpo.advantages),
    "z-score, right by a tenth": None,  # those of signs.py
}
RIGHT = {"easy": [0.05] * 4, "rare": [0.002], "uneven": [0.08, 0.04, 0.04, 0.04]}
ROLLOUTS = {"easy": 150, "rare": 400, "uneven": 150}
ARMS = {f"{task}, {name}": (task, name) for task in ("easy", "rare") for name in WAYS}
ARMS |= {f"uneven, {name}": ("uneven", name) for name in list(WAYS)[:5]}
COLOURS = dict(zip(WAYS, (lab.BLACK, lab.GREY, lab.BLUE, lab.ORANGE, lab.GREEN)))
COLOURS["wrong half of the z-score"] = lab.PINK
V, P, G, STEPS, LR, EVERY = 20, 16, 8, 4, 0.5, 5


def measure(arm: str, seed: int) -> dict:
    """By rollout p(right), or, where several are right, how many of them are alive: e^(entropy
    among them)."""
    (task, name), generator = ARMS[arm], torch.Generator().manual_seed(seed)
    at = torch.tensor(RIGHT[task], dtype=torch.float64)
    right = len(at)  # the first of the tokens
    module = toy.load("grpo" if WAYS[name] else "signs")
    advantages = WAYS[name] or module.advantages
    rest = (1 - at.sum()) / (V - right)
    logits = torch.cat([at, rest.expand(V - right)]).log()[None]  # [1, V]
    success, alive = [], []
    for _ in range(ROLLOUTS[task]):
        chances = logits.softmax(-1)[0, :right]  # [right]
        among = chances / chances.sum()
        success.append(chances.sum().item())
        alive.append((-(among * among.log()).sum()).exp().item())
        tokens = toy.sample(logits, P * G, generator)  # [N, 1]
        held = {"advantages": advantages((tokens < right).double().view(P, G)).flatten()}  # [N]
        held["old_logp"] = toy.logprobs(logits, tokens)
        for _ in range(STEPS):
            logits = logits - LR * toy.gradient(module, {}, logits, tokens, **held)
    until = next((i for i, p in enumerate(success) if p > 0.5), np.inf)
    series = {"alive": alive[::EVERY]} if right > 1 else {"p": success[::EVERY]}
    return series | {"until": until, "end": success[-1], "left": alive[-1]}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "rollouts until p > 1/2", "before NSR", "p at the end", "right answers alive"]]
    for arm, runs in results.items():
        task = ARMS[arm][0]
        pairs = zip(runs, results[f"{task}, NSR"])  # of a seed
        first = sum(run["until"] < nsr["until"] for run, nsr in pairs)
        before = "–" if "NSR" in arm or task != "rare" else f"{first} of {len(runs)}"
        alive = "–" if task == "rare" else lab.cell(runs, "left", ".1f")
        until, end = lab.cell(runs, "until", ".0f"), lab.cell(runs, "end", ".3f")
        table.append([arm, until, before, end, alive])
    return table


# Panel -> what it shows of which task up to which rollout, and its labels: x, y, words
LABELS = {
    "rare: p(right)": (
        ("rare", "p", 400),
        {
            "wrong half of the z-score": (275, 0.06, "wrong half\nof the z-score"),
            "GRPO without std": (290, 0.5, "GRPO\nwithout std"),
            "GRPO": (30, 0.9, "GRPO"),
            "PSR": (180, 0.72, "PSR"),
            "NSR": (268, 0.3, "NSR"),
        },
    ),
    "easy: right answers alive, of four": (
        ("easy", "alive", 150),
        {
            "wrong half of the z-score": (0, 0, ""),
            "NSR": (2, 4.14, "NSR; under it the wrong half of the z-score"),
            "W-REINFORCE": (82, 3.7, "W-REINFORCE"),
            "PSR": (45, 1.55, "PSR"),
            "GRPO": (-3, 1.7, "GRPO"),
        },
    ),
    "uneven: right answers alive, of four": (
        ("uneven", "alive", 60),
        {"PSR": (18, 1.85, "PSR"), "NSR": (14, 2.1, "NSR"), "GRPO": (2, 1.3, "GRPO")},
    ),
}


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, *LABELS, width=12)
    for axis, ((task, column, until), labels) in zip(axes, LABELS.values()):
        for name, (x, y, words) in labels.items():
            every = results[f"{task}, {name}"]
            runs = [{column: run[column][: until // EVERY]} for run in every]
            at = EVERY * np.arange(len(runs[0][column]))
            lab.line(axis, at, runs, column, COLOURS[name])
            lab.label(axis, x, y, words, COLOURS[name])
        axis.set(xlabel="rollouts", ylim=(-0.02, 1.02) if column == "p" else (0.85, 4.3))
        axis.margins(x=0.02)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
