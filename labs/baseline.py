"""What to subtract from a reward: the group's mean, the batch's, or nothing?

24 prompts, each a table of 10 answers with one right: its chance is 0.9 (easy), 0.3 (middle) or
0.02 (hard). One rollout is 8 answers to each prompt of the batch; then one gradient step of one
length for everybody, since Adam undoes an advantage's scale: compared is where the steps go. The
batch holds 8 prompts of each kind, or 8 of one kind alone. variants/baselines.py's advantages by its
flag, and grpo.py's, through variants/justrl.py's loss.

    python -m labs.baseline
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "TITLE"
CHANCE = {"easy": 0.9, "middle": 0.3, "hard": 0.02}
HOW = {
    "GRPO": "",
    "RLOO": "rloo",
    "MaxRL": "maxrl",
    "REINFORCE++-baseline": "group",
    "ScaleRL's division": "scalerl",
    "REINFORCE++": "batch",
    "REINFORCE": "none",
}
BATCHES = {"mixed": ("easy", "middle", "hard"), **{kind: (kind,) for kind in CHANCE}}
ARMS = {f"{name}, {batch}": (name, batch) for batch in BATCHES for name in HOW}
V, EACH, G, ROLLOUTS, LENGTH = 10, 8, 8, 150, 0.5


def read(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log π of one-token responses `[N, 1]`, the first G to the first prompt of `[P, V]`."""
    return toy.logprobs(logits, tokens.view(-1, G).T).T.reshape(-1, 1)


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Chance of the right answer after each rollout, by kind of prompt, and where the steps went:
    the share of the gradient's squared length that each kind has, mean over rollouts."""
    name, batch = ARMS[arm]
    kinds, generator = BATCHES[batch], torch.Generator().manual_seed(seed)
    loss, files = toy.load("justrl"), (toy.load("baselines"), toy.load("grpo"))
    logits = torch.stack([toy.start(CHANCE[kind], V) for kind in kinds for _ in range(EACH)])
    found = {f"{what} {kind}": [] for kind in kinds for what in ("right", "share")}
    for _ in range(ROLLOUTS):
        right = logits.softmax(-1)[:, 0].view(-1, EACH).mean(dim=1)  # [kinds]
        tokens = toy.sample(logits, G, generator).T  # [P, G]
        rewards = (tokens == 0).double()  # [P, G]
        how = HOW[name]
        A = files[0].advantages(rewards, how) if how else files[1].advantages(rewards)  # [P, G]
        held = {"advantages": A.flatten(), "read": read}  # [N]
        held["old_logp"] = read(logits, tokens.reshape(-1, 1))  # [N, 1]
        step = toy.gradient(loss, {}, logits, tokens.reshape(-1, 1), **held)  # [P, V]
        size = step.square().sum()
        shares = step.square().sum(dim=1).view(-1, EACH).sum(dim=1) / size.clamp(min=1e-12)
        for kind, r, s in zip(kinds, right.tolist(), shares.tolist()):
            found[f"right {kind}"].append(r)
            found[f"share {kind}"].append(s)
        logits = logits - LENGTH * step / size.sqrt().clamp(min=1e-6)
    return found
