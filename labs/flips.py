"""Five in a hundred old log-probs are wrong by e^4: whose weights stay bounded, and at what price?

Responses of 40 tokens, the reward asks for the first 4 alone. What a router flip, a stale weight or
another precision does to single tokens is done here by hand: log π_old ± 4 on 5% of them. Four
plain gradient steps on each of 40 rollouts of 16 groups of 8. DPPO sums over tokens where the
others take means: its step is divided by their number. All losses are given grpo.py's advantages.

    python -m labs.flips
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "Wrong ratios wreck what does not matter, unless the weight is bounded"
GSPO = "GSPO, ε 0.05"
FILES = {
    "GRPO": ("grpo", {}),
    "MASPO": ("maspo", {}),
    "SAPO": ("sapo", {}),
    "MiniRL": ("minirl", {"length_norm": True}),
    GSPO: ("gspo", {"clip_low": 0.05, "clip_high": 0.05}),
    "CISPO": ("cispo", {}),
    "DPPO": ("dppo", {}),
    "VESPO": ("vespo", {}),
}
FILES = toy.given(FILES)
ARMS = {f"{name}, {how}": name for how in ("clean", "flips") for name in FILES}
COLOURS = {"GRPO": lab.BLACK, "MASPO": lab.ORANGE, "SAPO": lab.BLUE, GSPO: lab.GREEN}
COLOURS |= {"CISPO": lab.PINK, "DPPO": lab.GREY}
T, V, DECIDE, P, G, STEPS, LR, ROLLOUTS = 40, 6, 4, 16, 8, 4, 120.0, 40


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Chance that the first 4 are right, and mean entropy of the other 36, after each rollout."""
    (stem, flags), generator = FILES[ARMS[arm]], torch.Generator().manual_seed(seed)
    module, logits = toy.load(stem), torch.zeros(T, V, dtype=torch.float64)
    logits[:DECIDE, 0] = 0.5
    success, entropy = [], []
    for _ in range(10 if quick else ROLLOUTS):
        chances = logits.softmax(-1)  # [T, V]
        success.append(chances[:DECIDE, 0].prod().item())
        entropy.append(-(chances * chances.log())[DECIDE:].sum(-1).mean().item())
        tokens = toy.sample(logits, P * G, generator)  # [N, T]
        rewards = (tokens[:, :DECIDE] == 0).all(dim=1).double().view(P, G)  # [P, G]
        held = {"advantages": toy.load("grpo").advantages(rewards).flatten()}  # [N]
        held["old_logp"] = toy.logprobs(logits, tokens)  # [N, T]
        noise = torch.rand(2, *tokens.shape, generator=generator)  # [2, N, T]
        if arm.endswith("flips"):
            held["old_logp"] += 4.0 * (noise[0] < 0.05) * (noise[1] - 0.5).sign()
        for _ in range(STEPS):
            step = LR / T if stem == "dppo" else LR
            logits = logits - step * toy.gradient(module, flags, logits, tokens, **held)
    return {"success": success, "entropy": entropy}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "success after 10", "success at the end", "entropy at the end"]]
    for arm, runs in results.items():
        ends = [
            {"at": run["success"][10:11] or run["success"][-1:], "end": run["success"][-1]}
            | {"entropy": run["entropy"][-1]}
            for run in runs
        ]
        ends = [run | {"at": run["at"][0]} for run in ends]
        table.append([arm, *(lab.cell(ends, name) for name in ("at", "end", "entropy"))])
    return table


def draw(results: dict) -> object:
    words = "success, with flips", "entropy of the 36 tokens that do not matter, with flips"
    figure, axes = lab.sheet(TITLE, *words)
    places = {"GRPO": (17.5, 0.6), "MASPO": (9.8, 0.52), "SAPO": (3.2, 0.7), GSPO: (15, 0.4)}
    for arm, colour in COLOURS.items():
        runs = results[f"{arm}, flips"]
        for axis, name in zip(axes, ("success", "entropy")):
            x = np.arange(len(runs[0][name]))
            lab.line(axis, x, runs, name, colour)
            place = (x[-1], lab.over(runs, name)[0][-1]) if name == "entropy" else places.get(arm)
            below = {"va": "top" if arm == "GRPO" else "center"}
            if place:
                lab.label(axis, *place, arm, colour, **below)
    for axis, name in zip(axes, ("success", "entropy")):
        clean = lab.over(results["GRPO, clean"], name)[0]
        axis.plot(clean, color=lab.BLACK, linewidth=2, linestyle=":")
        axis.set(xlabel="rollouts", xlim=(0, 30 if name == "success" else 1.3 * len(clean)))
    lab.label(axes[1], 12, 1.72, "GRPO without flips", lab.BLACK)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
