"""A teacher scores every token: which teacher, and would a constant do as well?

Responses have 12 tokens. On the track the right token is 0. Any other token leaves the track, and
off it only token 1 leads back. The reward is 1 if the last token ends on the track. The policy is a
table of logits for each place, on and off the track. It starts in one of two ways. Its most likely
token is the right one, but samples contain mistakes; or its most likely token is a decoy.

variants/opd.py learns from teachers that are tables as well. One is true. One is true, but three in
ten of its scores have the wrong sign. One is right only on the track, where its own responses stay,
and prefers the decoy off it; it is asked everywhere, or only up to the first token that it finds
improbable. One is wrong: it prefers the decoy everywhere. Two constants replace a teacher: -0.5 for
each token, or for the fifth of all tokens that is least likely. grpo.py has the reward. Each of 60
rollouts has 16 groups of 8 and serves one plain gradient step.

    python -m labs.teacher
"""

import math
import sys
from dataclasses import replace

import torch
import checks
from torch import Tensor

from labs import lab, toy

TITLE = "A constant sharpens the policy, right or wrong; a true teacher corrects it"
T, V, P, G, ROLLOUTS, LR = 12, 8, 16, 8, 60, 20.0
RIGHT, DECOY = (0, 1), 2  # the right token on and off the track; the decoy
# Probability of the right token and of the decoy, on the track; off it
STARTS = {"greedy right": ((0.7, 0.05), (0.4, 0.1)), "greedy wrong": ((0.35, 0.45), (0.3, 0.4))}
SURE = 0.97
KNOWS = {
    "true teacher": ((SURE, 0.01), (SURE, 0.01)),
    "true, 3 of 10 flipped": ((SURE, 0.01), (SURE, 0.01)),
    "lost off its prefixes": ((SURE, 0.01), (0.01, SURE)),
    "lost, not asked there": ((SURE, 0.01), (0.01, SURE)),
    "wrong teacher": ((0.01, SURE), (0.01, SURE)),
}
HOW = (*KNOWS, "constant, all tokens", "constant, rarest fifth", "GRPO")
ARMS = {f"{start}: {how}": how for start in STARTS for how in HOW}


def table(chances: tuple) -> Tensor:
    """Logits [T, 2, V], on and off the track, for the probabilities (right, decoy); the rest of the
    probability is spread evenly."""
    rows = []
    for right, (p, decoy) in zip(RIGHT, chances):
        row = torch.full((V,), (1 - p - decoy) / (V - 2), dtype=torch.float64)
        row[right], row[DECOY] = p, decoy
        rows.append(row.log())
    return torch.stack(rows).expand(T, 2, V).clone()


def walk(logits: Tensor, count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Responses `[N, T]` and where each token was drawn: 0 on the track, 1 off it. Without a
    generator the most likely tokens are taken."""
    off, tokens, places = torch.zeros(count, dtype=torch.long), [], []
    for chances in logits.softmax(-1):  # [2, V]
        here = chances[off]  # [N, V]
        if generator:
            token = torch.multinomial(here, 1, generator=generator)[:, 0]
        else:
            token = here.argmax(-1)
        tokens.append(token)
        places.append(off)
        off = torch.where(off == 0, token != RIGHT[0], token != RIGHT[1]).long()
    return torch.stack(tokens, 1), torch.stack([*places, off], 1)  # [N, T], [N, T+1]


def logprobs(logits: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """log π of tokens `[N, T]`."""
    return logits.log_softmax(-1)[torch.arange(T), places[:, :T], tokens]


def success(logits: Tensor) -> float:
    """The exact probability to end on the track."""
    on = torch.ones((), dtype=torch.float64)
    for chances in logits.softmax(-1):
        on = on * chances[0, RIGHT[0]] + (1 - on) * chances[1, RIGHT[1]]
    return on.item()


def word(how: str, logp: Tensor, tokens: Tensor, places: Tensor, luck: Tensor) -> Tensor:
    """log π_T `[N, T]` of the teacher; for a constant, values whose difference to log π is that
    constant."""
    if how == "constant, all tokens":
        return logp - 0.5
    if how == "constant, rarest fifth":
        return logp - 0.5 * (logp <= logp.quantile(0.2))
    its = logprobs(table(KNOWS[how]), tokens, places)
    foreign = (its < math.log(0.05)).long()  # [N, T]
    if how == "lost, not asked there":
        return torch.where(foreign.cumsum(1) - foreign > 0, logp, its)
    return torch.where(luck < 0.3, 2 * logp - its, its) if "flipped" in how else its


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Probability of success, and the share of sampled tokens off the track, before each rollout
    and after the last; one step later, success of the greedy response and the entropy on the
    track."""
    start, how = arm.split(": ")[0], ARMS[arm]
    module = toy.load("grpo" if how == "GRPO" else "opd")
    args = replace(module.Args(), beta=float(how != "GRPO"))
    generator, logits = torch.Generator().manual_seed(seed), table(STARTS[start])
    found = {"success": [], "off": []}
    for _ in range(ROLLOUTS + 1):
        tokens, places = walk(logits, P * G, generator)  # [N, T], [N, T+1]
        found["success"].append(success(logits))
        found["off"].append(places[:, :T].double().mean().item())
        rewards = (places[:, -1] == 0).double().view(P, G)  # [P, G]
        given = {"advantages": module.advantages(rewards).flatten(), "mask": torch.ones(P * G, T)}
        given["old_logp"] = logprobs(logits, tokens, places)
        luck = torch.rand(tokens.shape, generator=generator)  # [N, T]
        leaf = logits.detach().requires_grad_()
        logp = logprobs(leaf, tokens, places)
        if how != "GRPO":
            given["ref_logp"] = word(how, logp.detach(), tokens, places, luck)
        loss, _ = checks.loss_of(module, args, logp=logp, **given)
        logits = logits - LR * torch.autograd.grad(loss, leaf)[0]
    found["greedy"] = float(walk(logits, 1, None)[1][0, -1] == 0)
    found["entropy"] = torch.distributions.Categorical(logits=logits[:, 0]).entropy().mean().item()
    return found


def when(success: list[float]) -> float:
    return next((i for i, p in enumerate(success) if p > 0.9), float("inf"))


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "success at the end", "of the greedy response", "rollouts until 0.9"]]
    table[0] += ["off the track at first", "off the track at the end", "entropy on the track"]
    for arm, runs in results.items():
        ended = [
            {"end": run["success"][-1], "greedy": run["greedy"], "until": when(run["success"])}
            | {"first": run["off"][0], "last": run["off"][-1], "entropy": run["entropy"]}
            for run in runs
        ]
        forms = {"end": ".2f", "greedy": ".0f", "until": ".0f", "first": ".2f", "last": ".2f"}
        forms |= {"entropy": ".2f"}
        table.append([arm, *(lab.cell(ended, name, form) for name, form in forms.items())])
    return table


COLOURS = dict(zip(HOW, (lab.BLUE, "#56B4E9", lab.PINK, "#AA7700", lab.ORANGE)))
COLOURS |= dict(zip(HOW[5:], (lab.GREY, lab.BLACK, lab.GREEN)))


def draw(results: dict) -> object:
    words = (f"probability of success, starting with {start}" for start in STARTS)
    figure, axes = lab.sheet(TITLE, *words, width=11, height=4.8)
    for axis, start in zip(axes, STARTS):
        for how, colour in COLOURS.items():
            runs = results[f"{start}: {how}"]
            lab.line(axis, range(ROLLOUTS + 1), runs, "success", colour)
        axis.set(ylim=(-0.02, 1.02), xlim=(0, ROLLOUTS), xlabel="rollouts")
    for place, (how, colour) in enumerate(COLOURS.items()):
        lab.label(axes[0], 0.6, 0.47 - 0.055 * place, how, colour, xycoords="axes fraction")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
