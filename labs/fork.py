"""A rare right token: how fast may it grow? And how far may a common one move?

One prompt, ten possible answers of one token, the right one at probability 0.001. A rollout is 32
groups of 16 and serves 16 plain gradient steps, as many as make a clip matter. All losses are given
grpo.py's advantages (DPPO's own have no std, which is another question).

    python -m labs.fork
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "The clip holds a rare token back, and a common one hardly at all"
ARMS = toy.given(
    {
        "GRPO": ("grpo", {}),
        "clip-higher": ("grpo", {"clip_high": 0.28}),
        "MASPO": ("maspo", {}),
        "SAPO": ("sapo", {}),
        "CISPO": ("cispo", {}),
        "DPPO": ("dppo", {}),
    }
)
# Arm -> colour, and where its name stands beside its two lines
LOOKS = {
    "GRPO": (lab.BLACK, (27.5, 0.03), (0.11, 0.14)),
    "clip-higher": (lab.GREY, (17.3, 0.45), None),
    "MASPO": (lab.ORANGE, (8.4, 0.4), (0.0085, 0.42)),
    "SAPO": (lab.BLUE, (15.5, 0.05), (0.028, 0.2)),
    "CISPO": (lab.GREEN, (8.4, 0.8), (0.0045, 0.8)),
    "DPPO": (lab.PINK, (8.4, 0.2), (0.0092, 0.6)),
}
ANSWERS, P, G, STEPS, LR = 10, 32, 16, 16, 1.0
STARTS = (0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9)
LONGEST = 40


def rollout(arm: str, logits: torch.Tensor, lr: float, generator: torch.Generator) -> torch.Tensor:
    """The logits `[1, V]` after one rollout and its gradient steps."""
    stem, flags = ARMS[arm]
    module = toy.load(stem)
    tokens = toy.sample(logits, P * G, generator)  # [N, 1]
    rewards = (tokens == 0).double().view(P, G)  # [P, G]
    held = {"old_logp": toy.logprobs(logits, tokens)}  # [N, 1]
    held["advantages"] = toy.load("grpo").advantages(rewards).flatten()  # [N]
    for _ in range(STEPS):
        logits = logits - lr * toy.gradient(module, flags, logits, tokens, **held)
    return logits


def measure(arm: str, seed: int, quick: bool) -> dict:
    """p(right) after each rollout; rollouts until it passes 1/2; and the mirror: how much mass one
    rollout moves at most (five times the step size), by the right token's probability before."""
    generator = torch.Generator().manual_seed(seed)
    logits, curve = toy.start(0.001, ANSWERS)[None], []  # [1, V]
    for _ in range(LONGEST):
        curve.append(logits.softmax(-1)[0, 0].item())
        logits = rollout(arm, logits, LR, generator)
    until = next((i for i, p in enumerate(curve) if p > 0.5), np.nan)
    moved = []
    for p in STARTS:
        before = toy.start(p, ANSWERS)[None]  # [1, V]
        after = rollout(arm, before, 5 * LR, generator)
        moved.append(after.softmax(-1)[0, 0].item() - p)
    return {"p": curve, "rollouts": until, "moved": moved}


def rows(results: dict) -> list[list[str]]:
    head = ["arm", "rollouts until p > 1/2", "mass moved from 0.01", "mass moved from 0.5"]
    at = [STARTS.index(0.01), STARTS.index(0.5)]
    moved = {
        arm: [[{"m": run["moved"][i]} for run in runs] for i in at] for arm, runs in results.items()
    }
    return [head] + [
        [arm, lab.cell(runs, "rollouts", ".0f"), *(lab.cell(m, "m", ".3f") for m in moved[arm])]
        for arm, runs in results.items()
    ]


def draw(results: dict) -> object:
    words = "the right answer, at 0.001 at first", "what one rollout adds, at five times the step"
    figure, (left, right) = lab.sheet(TITLE, *words)
    for arm, runs in results.items():
        colour, *places = LOOKS[arm]
        lab.line(left, np.arange(LONGEST), runs, "p", colour)
        lab.line(right, STARTS, runs, "moved", colour)
        for axis, place in zip((left, right), places):
            if place:
                lab.label(axis, *place, arm, colour)
    left.set(xlabel="rollouts", ylabel="p(right)")
    right.set(xlabel="p(right) before", ylabel="added to p(right)")
    lab.plain_ticks(left, "y", (0.001, 0.01, 0.1, 1))
    lab.plain_ticks(right, "x", [start for start in STARTS if start != 0.7])
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
