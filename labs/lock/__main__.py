"""Thirty easy tokens, then one hard decision: what does a branch near the end cost, and save?

Each of the 30 tokens is right with probability 0.97. The last one, of 20, is right with probability
0.03, 0.001 or 0.0002. All must be right for a reward. There are 4 prompts with 8 responses each.
DEEP-GRPO cuts a failed response at a multiple of five tokens, which its `choose_pivot` chooses, and
samples 8 new ends. *Same tokens* has no branches but three times the responses. The optimiser is
Adam, at two learning rates, because with plain gradient steps a method that averages over fewer
tokens, as branches do, would take longer steps.

    python -m labs.lock
"""

import sys
from random import Random

import deep_grpo as deep
import numpy as np
import torch

from labs import lab, toy

TITLE = "Branches find a rare lock sooner, then learn it more slowly"
SEEDS = 40  # luck finds the rarest lock, so that twenty seeds disagree with twenty others
WAYS = {"no branches": 8, "no branches, same tokens": 24, "DEEP-GRPO": 8}  # -> responses
ARMS = {
    f"lr {lr:g}, {p:g}, {way}": (lr, p, way)
    for lr in (0.05, 0.3)
    for p in (0.03, 0.001, 0.0002)
    for way in WAYS
}
COLOURS = dict(zip(WAYS, (lab.BLACK, lab.BLUE, lab.ORANGE)))
EASY, V, P, K, LONGEST = 30, 20, 4, 8, 5000
LINE = list(range(EASY + 1))  # the cut of a response does not depend on its tokens
BOUNDARIES = set(range(4, EASY, 5))


def measure(arm: str, seed: int) -> dict:
    """Measure steps and tokens until half of all responses succeed; the step of the first success
    in a sample, and the steps from there; and tries, samples per step with all easy tokens right.
    """
    (lr, p, way), generator = ARMS[arm], torch.Generator().manual_seed(seed)
    logits = torch.zeros(EASY + 1, V, dtype=torch.float64)  # [T, V]
    logits[:EASY, 2:] = -1e9  # easy tokens have two choices
    logits[:EASY, 0], logits[EASY] = toy.start(0.97, 2)[0], toy.start(p, V)
    adam = torch.optim.Adam([logits], lr)
    rng, feedback, G = Random(seed), [], WAYS[way]
    steps, tokens, tries, first = 0, 0, 0, np.inf
    while not (done := logits.softmax(-1)[:, 0].prod() > 0.5) and steps < LONGEST:
        steps += 1
        main = toy.sample(logits, P * G, generator)  # [N, T]
        rewards = (main == 0).all(dim=1).double()  # [N]
        batch, mask = main, torch.ones(main.shape, dtype=torch.float64)  # [N, T], [N, T]
        branch = torch.zeros(len(main), dtype=torch.float64)  # [N]
        A, sampled = deep.advantages(rewards.view(P, G)).flatten(), [main]  # [N]
        if way == "DEEP-GRPO":
            fit, rows = deep.fit_success(feedback), [(main, mask, A)]
            for parent in main[rewards == 0]:
                cut, depth = deep.choose_pivot(LINE, BOUNDARIES, *fit, 2.0, rng)
                grown = toy.sample(logits, K, generator)  # [K, T]
                grown[:, :cut] = parent[:cut]
                outcome = (grown == 0).all(dim=1).double()  # [K]
                feedback.append((depth, float(outcome.any())))
                sampled.append(grown)
                tokens += K * (EASY + 1 - cut)
                if 0 < outcome.sum() < K:
                    ending = (torch.arange(EASY + 1) >= cut).double().expand(K, -1)  # [K, T]
                    rows.append((grown, ending, deep.advantages(outcome[None])[0]))
            batch, mask, A = (torch.cat(columns) for columns in zip(*rows))
            T_branch = mask[len(main) :].sum()  # []
            branch = torch.zeros(len(batch), dtype=torch.float64)  # [N + branches]
            branch[len(main) :] = main.numel() / T_branch.clamp(min=1)
        tokens += main.numel()
        every = torch.cat(sampled) == 0  # [N + all branches, T]
        tries += every[:, :EASY].all(dim=1).sum().item()
        first = min(first, steps if every.all(dim=1).any() else np.inf)
        held = {"old_logp": toy.logprobs(logits, batch), "advantages": A, "mask": mask}
        logits.grad = toy.gradient(deep, {}, logits, batch, **held, branch=branch)
        adam.step()
    tries /= steps
    if not done:
        steps = tokens = np.inf
    return {
        "steps": steps,
        "tokens": tokens,
        "first": first,
        "climb": steps - first,
        "tries": tries,
    }


def wins(results: dict, arm: str, other: str) -> str:
    """Count the seeds in which an arm needs fewer tokens than another way, at equal lock and lr."""
    lr, p, way = ARMS[arm]
    pairs = zip(results[arm], results[f"lr {lr:g}, {p:g}, {other}"])
    fewer = [ours["tokens"] < theirs["tokens"] for ours, theirs in pairs]
    return "–" if way == other else f"{sum(fewer)} of {len(fewer)}"


def rows(results: dict) -> list[list[str]]:
    none, same, _ = WAYS
    head = ["arm", "steps", "thousand tokens", "fewer than none", "fewer than same tokens"]
    table = [[*head, "first success", "steps from there", "tries a step"]]
    for arm, runs in results.items():
        runs = [run | {"k": run["tokens"] / 1000} for run in runs]
        cells = [lab.cell(runs, name, ".0f") for name in ("steps", "k", "first", "climb", "tries")]
        table.append([arm, *cells[:2], wins(results, arm, none), wins(results, arm, same)])
        table[-1] += cells[2:]
    return table


def draw(results: dict) -> object:
    """Draw tokens instead of steps, because arms differ in how many tokens a step has."""
    figure, axes = lab.make_figure(TITLE, "Adam, lr 0.05", "Adam, lr 0.3", width=10)
    chances = list(dict.fromkeys(p for _, p, _ in ARMS.values()))
    for axis, lr in zip(axes, (0.05, 0.3)):
        for place, p in enumerate(chances):
            for side, (way, colour) in enumerate(COLOURS.items()):
                values = [run["tokens"] / 1000 for run in results[f"lr {lr:g}, {p:g}, {way}"]]
                x = place + 0.25 * (side - 1)
                spread = x + np.linspace(-0.07, 0.07, len(values))
                axis.scatter(spread, values, s=14, color=colour, alpha=0.35, linewidth=0)
                middle = np.quantile(values, 0.5, method="inverted_cdf")
                axis.plot(x, middle, "_", color=colour, markersize=20, markeredgewidth=3)
        axis.set_xticks(range(len(chances)), labels=[f"{p:g}" for p in chances])
        axis.set(xlabel="probability of the right decision at first", ylim=(8, 5000))
        lab.plain_ticks(axis, "y", (10, 30, 100, 300, 1000, 3000))
    axes[0].set_ylabel("thousand tokens until half of all succeed")
    for place, (way, colour) in enumerate(reversed(COLOURS.items())):
        words = way.replace("same tokens", "three times the responses")
        style = {"xycoords": "axes fraction"}
        lab.label(axes[0], 0.02, 0.82 + 0.065 * place, words, colour, **style)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
