"""What to subtract from a reward: the group's mean, the batch's mean, or nothing?

A prompt is a table of 10 answers. One is right, with probability 0.9 (easy), 0.3 (middle) or 0.02
(hard). The batch has 8 prompts of each kind, or 8 of one kind alone. A rollout has 8 answers to
each prompt and serves one gradient step. The step has the same length for every method, because
Adam divides by the scale of an advantage. So the lab compares where the steps go. Advantages are
those of variants/baselines.py, by its flag, and of grpo.py; the loss is that of variants/justrl.py.

    python -m labs.baseline
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "MaxRL serves hard prompts first, a batch's mean serves them last"
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


def measure(arm: str, seed: int) -> dict:
    """p(right) after each rollout, by kind of prompt; the share of the gradient's squared length
    that each kind has, mean over rollouts."""
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


# When a kind of prompt counts as learned
LEARNED = {"easy": 0.98, "middle": 0.9, "hard": 0.5}


def until(run: dict, kind: str) -> float:
    curve = run[f"right {kind}"]
    return next((i for i, p in enumerate(curve) if p > LEARNED[kind]), np.inf)


def rows(results: dict) -> list[list[str]]:
    asked = [("mixed", kind) for kind in CHANCE] + [(kind, kind) for kind in CHANCE]
    names = [f"{kind}, in the mixed batch" for kind in CHANCE]
    names += [f"{kind} alone" for kind in CHANCE]
    table = [["method", *names, "steps spent on hard ones, mixed"]]
    for name in HOW:
        cells = []
        for batch, kind in asked:
            ends = [{"until": until(run, kind)} for run in results[f"{name}, {batch}"]]
            cells.append(lab.cell(ends, "until", ".0f"))
        spent = [{"hard": np.mean(run["share hard"][:60])} for run in results[f"{name}, mixed"]]
        table.append([name, *cells, lab.cell(spent, "hard")])
    return table


COLOURS = {"GRPO": lab.BLACK, "RLOO": lab.GREY, "MaxRL": lab.BLUE}
COLOURS |= {"REINFORCE++": lab.ORANGE, "REINFORCE": lab.GREEN}


def draw(results: dict) -> object:
    words = [f"{kind} prompts, in the mixed batch" for kind in CHANCE] + ["hard prompts alone"]
    figure, axes = lab.sheet(TITLE, *words, width=13)
    asked = [("mixed", kind) for kind in CHANCE] + [("hard", "hard")]
    for axis, (batch, kind) in zip(axes, asked):
        for name, colour in COLOURS.items():
            runs = results[f"{name}, {batch}"]
            lab.line(axis, np.arange(ROLLOUTS), runs, f"right {kind}", colour)
        axis.set(xlabel="rollouts", ylim=(0.85 if kind == "easy" else -0.02, 1.01), xlim=(0, 100))
    axes[0].set_ylabel("p(right), mean over prompts")
    lab.key(axes[0], COLOURS, 0.4, 0.4)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
