"""Thirty easy tokens, then one hard decision: what does a branch near the end cost, and save?

Each of the 30 is right with chance 0.97, the last one, of 20, with 0.03 or 0.001; the reward wants
all. 4 prompts, 8 responses each. DEEP-GRPO cuts a failed response at a multiple of five tokens,
chosen by its own `choose_pivot`, and grows 8 new ends. *Same tokens* is no branches and three times
the responses. Adam, here alone: with plain steps whoever averages over fewer tokens, as a branch
does, would simply take longer ones.

    python -m labs.lock
"""

import sys
from random import Random

import deep_grpo as deep
import numpy as np
import torch

from labs import lab, toy

TITLE = "A branch saves steps; as many tokens in plain responses save more"
WAYS = {"no branches": 8, "no branches, same tokens": 24, "DEEP-GRPO": 8}  # -> responses
ARMS = {f"{p:g}, {way}": (p, way) for p in (0.03, 0.001) for way in WAYS}
COLOURS = dict(zip(WAYS, (lab.BLACK, lab.GREY, lab.ORANGE)))
EASY, V, P, K, LR, LONGEST = 30, 20, 4, 8, 0.05, 400
LINE = list(range(EASY + 1))  # what stands at which place is no matter to where a response is cut
BOUNDARIES = set(range(4, EASY, 5))


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Steps and tokens until half of all responses succeed, and tokens per step."""
    (p, way), generator = ARMS[arm], torch.Generator().manual_seed(seed)
    logits = torch.zeros(EASY + 1, V, dtype=torch.float64)  # [T, V]
    logits[:EASY, 2:] = -1e9  # the easy ones are of two
    logits[:EASY, 0], logits[EASY] = toy.start(0.97, 2)[0], toy.start(p, V)
    adam = torch.optim.Adam([logits], LR)
    rng, feedback, G, tokens = Random(seed), [], WAYS[way], 0
    steps, most = 0, 10 if quick else LONGEST
    while not (done := logits.softmax(-1)[:, 0].prod() > 0.5) and steps < most:
        steps += 1
        main = toy.sample(logits, P * G, generator)  # [N, T]
        rewards = (main == 0).all(dim=1).double()  # [N]
        batch, mask = main, torch.ones(main.shape, dtype=torch.float64)  # [N, T], [N, T]
        branch = torch.zeros(len(main), dtype=torch.float64)  # [N]
        A = deep.advantages(rewards.view(P, G)).flatten()  # [N]
        if way == "DEEP-GRPO":
            fit, rows = deep.fit_success(feedback), [(main, mask, A)]
            for parent in main[rewards == 0]:
                cut, depth = deep.choose_pivot(LINE, BOUNDARIES, *fit, 2.0, rng)
                grown = toy.sample(logits, K, generator)  # [K, T]
                grown[:, :cut] = parent[:cut]
                outcome = (grown == 0).all(dim=1).double()  # [K]
                feedback.append((depth, float(outcome.any())))
                tokens += K * (EASY + 1 - cut)
                if 0 < outcome.sum() < K:
                    own = (torch.arange(EASY + 1) >= cut).double().expand(K, -1)  # [K, T]
                    rows.append((grown, own, deep.advantages(outcome[None])[0]))
            batch, mask, A = (torch.cat(columns) for columns in zip(*rows))
            branch = (torch.arange(len(batch)) >= len(main)).double()  # [N + branches]
        tokens += main.numel()
        held = {"old_logp": toy.logprobs(logits, batch), "advantages": A, "mask": mask}
        logits.grad = toy.gradient(deep, {}, logits, batch, **held, branch=branch)
        adam.step()
    need = (steps, tokens) if done else (np.inf, np.inf)
    return {"steps": need[0], "tokens": need[1], "per step": tokens / steps}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "steps", "thousand tokens"]]
    for arm, runs in results.items():
        runs = [run | {"k": run["tokens"] / 1000} for run in runs]
        table.append([arm, lab.cell(runs, "steps", ".0f"), lab.cell(runs, "k", ".0f")])
    return table


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, "steps until half of all succeed", "thousand tokens until then")
    places = {arm: -y - (y > 2) for y, arm in enumerate(ARMS)}
    for axis, name, unit in zip(axes, ("steps", "tokens"), (1, 1000)):
        for arm, y in places.items():
            values = np.array([run[name] for run in results[arm]]) / unit
            colour = COLOURS[ARMS[arm][1]]
            axis.scatter(values, np.full(len(values), y), s=16, color=colour, alpha=0.3)
            axis.plot(np.median(values), y, "|", color=colour, markersize=18, markeredgewidth=3)
        axis.set_yticks([*places.values()], labels=[""] * len(places))
        axis.set_xlim(left=0)
    axes[0].set_yticks([*places.values()], labels=[arm.replace(", ", ": ", 1) for arm in places])
    axes[0].set_ylabel("chance of the right decision at first: way")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
