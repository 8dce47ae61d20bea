"""Positions that do not matter to the reward: what masks do to them, and to a discovery.

*junk*: responses of 20 tokens of which one is at 0.99 (a junk token otherwise) and 8 that are open;
the reward is a coin. *fork*: the first token alone decides; a wrong one is at 0.98, the right one
at 0.001, two open tokens follow. Beside STAPO's mask those of two neighbours: the top 20% by
entropy, and Lp-Reg's spring under rare tokens of bad responses.

    python -m labs.junk
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "STAPO's mask cannot tell a slip from a discovery: it removes both"
FILES = {"GRPO": "grpo", "STAPO": "stapo", "top 20%": "entropy20", "Lp-Reg": "lp_reg"}
ARMS = {
    f"{task}, {name}": (task, stem) for task in ("junk", "fork") for name, stem in FILES.items()
}
COLOURS = dict(zip(FILES, (lab.BLACK, lab.ORANGE, lab.GREEN, lab.BLUE)))
P, G, V, LR = 16, 8, 20, {"junk": 4.0, "fork": 6.0}
EVERY, ROLLOUTS = 2, {"junk": 200, "fork": 150}


def tables(task: str) -> torch.Tensor:
    """The policy at first: logits `[T, V]`."""
    if task == "junk":
        sure, free = toy.start(0.99, V).expand(20, V), torch.zeros(8, V, dtype=torch.float64)
        return torch.cat([sure, free])
    fork = torch.full((V,), 0.019 / (V - 2), dtype=torch.float64)
    fork[0], fork[1] = 0.001, 0.98
    return torch.stack([fork.log(), *torch.zeros(2, V, dtype=torch.float64)])


def measure(arm: str, seed: int, quick: bool) -> dict:
    """The mean chance of a junk token, or the right one's, after each rollout."""
    (task, stem), generator = ARMS[arm], torch.Generator().manual_seed(seed)
    module, logits, curve = toy.load(stem), tables(task), []
    for _ in range(20 if quick else ROLLOUTS[task]):
        chances = logits.softmax(-1)  # [T, V]
        p = (1 - chances[:20, 0]).mean() if task == "junk" else chances[0, 0]
        curve.append(p.item())
        tokens = toy.sample(logits, P * G, generator)  # [N, T]
        coin = torch.rand(P, G, generator=generator, dtype=torch.float64) < 0.5  # [P, G]
        right = coin if task == "junk" else (tokens[:, 0] == 0).view(P, G)
        old_logp = toy.logprobs(logits, tokens)  # [N, T]
        entropy = -(chances * logits.log_softmax(-1)).sum(-1).expand_as(old_logp)  # [N, T]
        held = {"advantages": module.advantages(right.double()).flatten(), "entropy": entropy}
        if stem == "lp_reg":
            every = logits.log_softmax(-1).repeat(P * G, 1)  # [N·T, V]
            proxy = module.proxy_logprobs(every, tokens.flatten(), module.Args().kappa)
            held["proxy_logp"] = proxy.view(tokens.shape)
        slope = toy.gradient(module, {}, logits, tokens, old_logp=old_logp, **held)
        logits = logits - LR[task] * len(logits) * slope
    found = next((i for i, p in enumerate(curve) if p > 0.5), np.inf)
    return {"p": curve[::EVERY], "end": curve[-1], "found": found}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "p at the end", "found by", "rollouts until found"]]
    for arm, runs in results.items():
        found = [run for run in runs if np.isfinite(run["found"])] if "fork" in arm else []
        by = f"{len(found)} of {len(runs)}" if "fork" in arm else "–"
        when = lab.cell(found, "found", ".0f") if found else "–"
        table.append([arm, lab.cell(runs, "end", ".4f"), by, when])
    return table


def draw(results: dict) -> object:
    words = "chance of a junk token; the reward is a coin", "chance of the right token, by rollout"
    figure, axes = lab.sheet(TITLE, *words)
    for axis, task in zip(axes, ("junk", "fork")):
        for name, colour in COLOURS.items():
            runs = results[f"{task}, {name}"]
            x = EVERY * np.arange(len(runs[0]["p"]))
            lab.line(axis, x, runs, "p", colour)
            level = "bottom" if name in ("GRPO", "top 20%") else "top"  # of two that end together
            apart = 1.13 if name == "top 20%" and task == "junk" else 1.0
            lab.label(axis, x[-1], apart * lab.over(runs, "p")[0][-1], name, colour, va=level)
        axis.set(xlabel="rollouts", xlim=(0, 1.25 * x[-1]))
    lab.plain_ticks(axes[0], "y", (0.002, 0.005, 0.01, 0.02, 0.05))
    lab.plain_ticks(axes[1], "y", (0.001, 0.01, 0.1, 1))
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
