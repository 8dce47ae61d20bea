"""Five in a hundred old log-probs are wrong by e^4: whose weights stay bounded, and at what price?

Responses of 40 tokens, the reward asks for the first 4 alone. What a router flip, a stale weight or
another precision does to single tokens is done here by hand: log π_old ± 4 on 5% of them. Four
plain gradient steps on each of 60 rollouts of 16 groups of 8.

    python -m labs.flips
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "Wrong ratios wreck what does not matter, unless the weight is bounded"
FILES = {
    "GRPO": ("grpo", {}),
    "MASPO": ("maspo", {}),
    "SAPO": ("sapo", {}),
    "MiniRL": ("minirl", {"length_norm": True}),
    "GSPO, ε 0.05": ("gspo", {"clip_low": 0.05, "clip_high": 0.05}),
    "CISPO": ("cispo", {}),
    "DPPO": ("dppo", {}),
}
FILES = toy.given(FILES)
ARMS = {f"{name}, {how}": name for how in ("clean", "flips") for name in FILES}
COLOURS = {"GRPO": lab.BLACK, "MASPO": lab.ORANGE, "SAPO": lab.BLUE, "GSPO, ε 0.05": lab.GREEN}
T, V, DECIDE, P, G, STEPS, LR, ROLLOUTS = 40, 6, 4, 16, 8, 4, 3.0, 60


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Chance that the first 4 are right, and mean entropy of the other 36, after each rollout."""
    (stem, flags), generator = FILES[ARMS[arm]], torch.Generator().manual_seed(seed)
    module, logits = toy.load(stem), torch.zeros(T, V, dtype=torch.float64)
    logits[:DECIDE, 0] = 0.5
    success, entropy, worst = [], [], []
    for _ in range(10 if quick else ROLLOUTS):
        chances = logits.softmax(-1)  # [T, V]
        success.append(chances[:DECIDE, 0].prod().item())
        entropy.append(-(chances * chances.log())[DECIDE:].sum(-1).mean().item())
        tokens = toy.sample(logits, P * G, generator)  # [N, T]
        rewards = (tokens[:, :DECIDE] == 0).all(dim=1).double().view(P, G)  # [P, G]
        held = {"advantages": module.advantages(rewards).flatten()}  # [N]
        held["old_logp"] = toy.logprobs(logits, tokens)  # [N, T]
        noise = torch.rand(2, *tokens.shape, generator=generator)  # [2, N, T]
        if arm.endswith("flips"):
            held["old_logp"] += 4.0 * (noise[0] < 0.05) * (noise[1] - 0.5).sign()
        for _ in range(STEPS):
            slope = toy.gradient(module, flags, logits, tokens, **held)
            worst.append(slope.norm().item())
            logits = logits - LR * T * slope / 40
    return {"success": success, "entropy": entropy, "norm": float(np.mean(worst))}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "success after 15", "success at the end", "entropy at the end", "gradient"]]
    for arm, runs in results.items():
        last = [
            {
                "at": run["success"][min(15, len(run["success"]) - 1)],
                "end": run["success"][-1],
                "entropy": run["entropy"][-1],
                "norm": run["norm"],
            }
            for run in runs
        ]
        table.append([arm, *(lab.cell(last, name) for name in ("at", "end", "entropy", "norm"))])
    return table


def draw(results: dict) -> object:
    words = "success, with flips", "entropy of the 36 tokens that do not matter, with flips"
    figure, axes = lab.sheet(TITLE, *words)
    for arm, colour in COLOURS.items():
        runs = results[f"{arm}, flips"]
        for axis, name in zip(axes, ("success", "entropy")):
            lab.line(axis, np.arange(len(runs[0][name])), runs, name, colour)
            lab.label(axis, len(runs[0][name]) - 1, lab.over(runs, name)[0][-1], arm, colour)
    for axis, name in zip(axes, ("success", "entropy")):
        clean = lab.over(results["GRPO, clean"], name)[0]
        axis.plot(clean, color=lab.GREY, linewidth=1.5, linestyle=":")
        axis.set(xlabel="rollouts", xlim=(0, 1.28 * len(clean)))
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
