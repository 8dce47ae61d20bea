"""Tokens that do not matter to the reward: what do masks do to them, and to a discovery?

There are three toys. *junk*: responses have 28 tokens. At 20 places one token has probability 0.99,
and all others are junk tokens; the other 8 places are undecided. The reward is a coin flip. *fork*:
the first token alone decides. A wrong one has probability 0.98, the right one 0.001; two undecided
tokens follow. *spark*: the first token chooses one of two ways. The usual way, at 0.94, is right
half of the time. The rare way, at 0.05, needs a second token, which is right in one of five samples
and can be learned. Junk and fork compare STAPO's mask with training only the 20% of tokens with the
highest entropy. Spark compares GRPO with JustRL. *Exact credit* is GRPO with an advantage for each
token from a perfect critic, Q - V over the group's std, instead of one for the whole response.

    python -m labs.junk
"""

import sys

import numpy as np
import torch
from torch import Tensor

from labs import lab, toy

TITLE = "STAPO's mask cannot tell a slip from a discovery; it removes both"
CREDIT = "exact credit"
MASKS = {"GRPO": "grpo", "STAPO": "stapo", "top 20%": "entropy20", CREDIT: "grpo"}
CLIPS = {"GRPO": "grpo", "JustRL": "justrl", CREDIT: "grpo"}
TASKS = {"junk": MASKS, "fork": MASKS, "spark": CLIPS}  # task -> name -> the file
ARMS = {
    f"{task}, {name}": (task, file) for task, files in TASKS.items() for name, file in files.items()
}
COLOURS = {"GRPO": lab.BLACK, "STAPO": lab.ORANGE, "top 20%": lab.GREEN, "JustRL": lab.BLUE}
COLOURS[CREDIT] = "#56B4E9"
P, G, V = 16, 8, 20
LR = {"junk": 4.0, "fork": 6.0, "spark": 4.0}  # times a response's tokens, except in spark
STEPS = {"junk": 1, "fork": 1, "spark": 4}  # gradient steps per rollout; with one no clip acts
EVERY, ROLLOUTS = 2, {"junk": 200, "fork": 150, "spark": 200}


def tables(task: str) -> Tensor:
    """Make the first policy: logits `[T, V]`."""
    if task == "junk":
        sure, free = toy.start(0.99, V).expand(20, V), torch.zeros(8, V, dtype=torch.float64)
        return torch.cat([sure, free])
    # Token 0 is right, token 1 the usual one.
    right, usual = (0.001, 0.98) if task == "fork" else (0.05, 0.94)
    fork = torch.full((V,), (1 - right - usual) / (V - 2), dtype=torch.float64)
    fork[0], fork[1] = right, usual
    if task == "fork":
        return torch.stack([fork.log(), *torch.zeros(2, V, dtype=torch.float64)])
    return torch.stack([fork.log(), toy.start(0.2, V)])


def outcome(task: str, tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return right or wrong `[N]`, and the mask `[N, T]`: the usual way has no second token."""
    coin = torch.rand(P, G, generator=generator, dtype=torch.float64).flatten() < 0.5  # [N]
    mask, first = torch.ones(tokens.shape, dtype=torch.float64), tokens[:, 0]
    if task == "junk":
        return coin, mask
    if task == "fork":
        return first == 0, mask
    mask[:, 1] = first == 0
    return ((first == 1) & coin) | ((tokens == 0).all(dim=1)), mask


def exact_advantages(task: str, chances: Tensor, tokens: Tensor, right: Tensor) -> Tensor:
    """Return `[N, T]`: how much each token changes the chance of a right response, Q - V, over the
    group's std; 0 if all rewards are equal, as in GRPO. No token gets the credit of a coin flip."""
    credit = torch.zeros(tokens.shape, dtype=torch.float64)  # junk: no token changes it
    first = tokens[:, 0] == 0  # [N]
    if task == "fork":
        credit[:, 0] = first.double() - chances[0, 0]
    if task == "spark":
        second = chances[1, 0]  # chance of a right second token
        value = torch.zeros(V, dtype=torch.float64)  # by first token
        value[0], value[1] = second, 0.5
        credit[:, 0] = value[tokens[:, 0]] - chances[0] @ value
        credit[:, 1] = ((tokens[:, 1] == 0).double() - second) * first
    std = right.double().view(P, G).std(dim=1).repeat_interleave(G)[:, None]  # [N, 1]
    return torch.where(std > 0, credit / (std + 1e-6), 0)


def measure(arm: str, seed: int) -> dict:
    """Measure, by rollout, the mean probability of junk or of the right first token, and when it
    passes 1/2; in spark only the latter."""
    task, file = ARMS[arm]
    generator = torch.Generator().manual_seed(seed)
    credited = arm.endswith(CREDIT)
    module = toy.load(file)
    if credited:
        module = toy.by_token(module)
    logits, curve = tables(task), []
    lr = LR[task] * (1 if task == "spark" else len(logits))
    for _ in range(ROLLOUTS[task]):
        chances = logits.softmax(-1)  # [T, V]
        p = (1 - chances[:20, 0]).mean() if task == "junk" else chances[0, 0]
        curve.append(p.item())
        tokens = toy.sample(logits, P * G, generator)  # [N, T]
        right, mask = outcome(task, tokens, generator)
        old_logp = toy.logprobs(logits, tokens)  # [N, T]
        entropy = -(chances * logits.log_softmax(-1)).sum(-1).expand_as(old_logp)  # [N, T]
        advantages = module.advantages(right.double().view(P, G)).flatten()  # [N]
        held = {"advantages": advantages, "entropy": entropy, "mask": mask, "old_logp": old_logp}
        if credited:
            held["token_advantages"] = exact_advantages(task, chances, tokens, right)
        for _ in range(STEPS[task]):
            logits = logits - lr * toy.gradient(module, {}, logits, tokens, **held)
    until = next((i for i, p in enumerate(curve) if p > 0.5), np.inf)
    numbers = {"start": curve[0], "end": curve[-1], "until": until}
    return numbers | ({"lowest": min(curve)} if task == "spark" else {"p": curve[::EVERY]})


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "p at the end", "rose in", "found by", "rollouts until found", "lowest p"]]
    for arm, runs in results.items():
        of = f" of {len(runs)}"
        if "junk" in arm:
            rose = sum(run["end"] > run["start"] for run in runs)
            table.append([arm, lab.cell(runs, "end", ".4f"), f"{rose}{of}", "–", "–", "–"])
            continue
        by = f"{sum(np.isfinite(run['until']) for run in runs)}{of}"
        end = lab.cell(runs, "end", ".4f") if "fork" in arm else "–"
        lowest = lab.cell(runs, "lowest", ".4f") if "spark" in arm else "–"
        table.append([arm, end, "–", by, lab.cell(runs, "until", ".0f"), lowest])
    return table


LABELS = {  # panel -> x, y and words of each arm's label
    "junk": {
        "GRPO": (203, 0.0104, "GRPO"),
        "STAPO": (203, 0.0022, "STAPO"),
        "top 20%": (203, 0.0135, "top 20%"),
        CREDIT: (203, 0.0085, CREDIT),
    },
    "fork": {
        "GRPO": (70, 0.5, "GRPO"),
        "STAPO": (58, 0.00135, "STAPO, top 20% (dashed)"),
        "top 20%": (0, 1, ""),
        CREDIT: (70, 0.25, CREDIT),
    },
    "spark": {
        "GRPO": (120, 0.36, "GRPO"),
        "JustRL": (118, 0.94, "JustRL"),
        CREDIT: (120, 0.1, CREDIT),
    },
}


def draw(results: dict) -> object:
    words = "junk: probability of junk tokens", "fork: probability of the right token"
    figure, axes = lab.make_figure(TITLE, *words, "spark: share of seeds that find it", width=12)
    for axis, (task, labels) in zip(axes, LABELS.items()):
        for name, (x, y, text) in labels.items():
            runs = results[f"{task}, {name}"]
            at = np.arange(0, ROLLOUTS[task], EVERY)
            colour, dashed = COLOURS[name], "--" if (task, name) == ("fork", "top 20%") else "-"
            if task == "spark":
                share = [np.mean([run["until"] <= rollout for run in runs]) for rollout in at]
                axis.step(at, share, color=colour, linewidth=2, where="post")
            else:
                lab.line(axis, at, runs, "p", colour, linestyle=dashed)
            lab.label(axis, x, y, text, colour)
        axis.set(xlabel="rollouts")
    axes[2].set(ylim=(-0.02, 1.02))
    axes[0].set(xlim=(0, 265), xticks=(0, 50, 100, 150, 200))
    lab.plain_ticks(axes[0], "y", (0.002, 0.005, 0.01, 0.02, 0.05))
    lab.plain_ticks(axes[1], "y", (0.001, 0.01, 0.1, 1))
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
