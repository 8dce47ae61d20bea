"""5% of the log-probs are wrong by a factor of e^4: which losses limit the damage?

Responses have 40 tokens; only the first 4 count for the reward. The lab makes the errors by hand
that a flipped router, a stale sampler or another precision causes: 5% of the log-probs are off by
±4. The wrong log-prob is π_old (which the trainer computes), or μ (which the sampler reports), or
both by the same amount, as if a trainer used the sampler's numbers as π_old. There are 40 rollouts
of 16 groups of 8, with four plain gradient steps on each. DPPO sums over tokens while the other
losses take means, so its learning rate is divided by the number of tokens. All losses get grpo.py's
advantages.

    python -m labs.flips
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "Wrong ratios cost entropy, unless the weight is bounded or π_old and μ are kept apart"
GSPO = "GSPO, ε 0.05"
FILES = {
    "GRPO": ("grpo", {}),
    "MASPO": ("maspo", {}),
    "SAPO": ("sapo", {}),
    "CISPO": ("cispo", {}),
    GSPO: ("gspo", {"clip_low": 0.05, "clip_high": 0.05}),
    "MiniRL": ("minirl", {"length_norm": True}),
    "DPPO": ("dppo", {}),
    "IcePop": ("icepop", {}),
}
READ_MU = ("MiniRL", "DPPO", "IcePop")  # the other losses do not use μ
ARMS = {f"{name}, {how}": name for how in ("clean", "wrong π_old") for name in FILES}
ARMS |= {f"{name}, {how}": name for how in ("wrong μ", "both wrong") for name in READ_MU}
T, V, DECIDE, P, G, STEPS, LR, ROLLOUTS = 40, 6, 4, 16, 8, 4, 120.0, 40


def measure(arm: str, seed: int) -> dict:
    """Measure the rollouts until the first 4 tokens are right in half of the responses, and at the
    end their probability and the mean entropy of the other 36."""
    (stem, flags), generator = FILES[ARMS[arm]], torch.Generator().manual_seed(seed)
    module, logits = toy.load(stem), torch.zeros(T, V, dtype=torch.float64)
    logits[:DECIDE, 0] = 0.5
    until = np.inf
    for rollout in range(ROLLOUTS):
        chances = logits.softmax(-1)  # [T, V]
        success = chances[:DECIDE, 0].prod().item()
        entropy = -(chances * chances.log())[DECIDE:].sum(-1).mean().item()
        if success > 0.5:
            until = min(until, rollout)
        tokens = toy.sample(logits, P * G, generator)  # [N, T]
        rewards = (tokens[:, :DECIDE] == 0).all(dim=1).double().view(P, G)  # [P, G]
        noise = torch.rand(2, *tokens.shape, generator=generator)  # [2, N, T]
        flips = 4.0 * (noise[0] < 0.05) * (noise[1] - 0.5).sign()  # [N, T]
        true = toy.logprobs(logits, tokens)  # [N, T]
        held = {"advantages": toy.load("grpo").advantages(rewards).flatten()}  # [N]
        held["old_logp"] = true + flips * arm.endswith(("wrong π_old", "both wrong"))
        held["rollout_logp"] = true + flips * arm.endswith(("wrong μ", "both wrong"))
        for _ in range(STEPS):
            step = LR / T if stem == "dppo" else LR
            logits = logits - step * toy.gradient(module, flags, logits, tokens, **held)
    return {"until": until, "end": success, "entropy": entropy}


def rows(results: dict) -> list[list[str]]:
    """Compare each run with the clean run of the same loss and seed."""
    head = "rollouts until success > 1/2", "seeds that learn later", "success at the end"
    table = [["arm", *head, "entropy at the end", "entropy lost"]]
    for arm, runs in results.items():
        later = lost = "–"
        if not arm.endswith("clean"):
            pairs = list(zip(runs, results[f"{ARMS[arm]}, clean"]))
            slower = [run["until"] > clean["until"] for run, clean in pairs]
            losses = [{"lost": clean["entropy"] - run["entropy"]} for run, clean in pairs]
            later = f"{sum(slower)} of {len(runs)}"
            lost = lab.cell(losses, "lost").replace("-0.00", "0.00")
        until, end = lab.cell(runs, "until", ".0f"), lab.cell(runs, "end")
        table.append([arm, until, later, end, lab.cell(runs, "entropy"), lost])
    return table


COLOURS = {"clean": lab.GREY, "wrong π_old": lab.BLACK}
COLOURS |= {"wrong μ": lab.BLUE, "both wrong": lab.ORANGE}


def draw(results: dict) -> object:
    words = ("rollouts until success > 1/2", "entropy of the other 36 tokens at the end")
    figure, axes = lab.make_figure(TITLE, *words, width=10, height=5)
    names = list(FILES)
    for axis, column in zip(axes, ("until", "entropy")):
        for place, (how, colour) in enumerate(COLOURS.items()):
            for row, name in enumerate(names):
                if f"{name}, {how}" not in results:
                    continue
                values = lab.median_and_band(results[f"{name}, {how}"], column)
                middle, low, high = np.minimum(values, ROLLOUTS)  # "never" is drawn at the edge
                y = row + 0.18 * (place - 1.5)
                axis.plot((low, high), (y, y), color=colour, linewidth=1.5, alpha=0.6)
                shape = ">" if values[0] > ROLLOUTS else "o"
                filled = "white" if how == "clean" else colour
                axis.plot(middle, y, shape, color=colour, markerfacecolor=filled, clip_on=False)
                if values[0] > ROLLOUTS:
                    lab.label(axis, middle - 1.5, y, "never", colour, ha="right")
        axis.set_yticks(range(len(names)), labels=names)
        axis.set(ylim=(len(names) - 0.4, -0.6))
        axis.grid(visible=False, axis="y")
    axes[0].set_xlim(0, ROLLOUTS)
    lab.legend(axes[0], COLOURS, 0.62, 0.28)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
