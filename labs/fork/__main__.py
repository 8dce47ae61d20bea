"""How fast can a rare right token grow under a clip, and how far can a common one move?

One prompt has ten possible answers of one token. The right one has probability 0.001. A rollout has
32 groups of 16 answers and serves for 16 plain gradient steps, enough for a clip to matter. Then
the lab measures what one rollout adds to other probabilities, at this learning rate, and at two and
five times this rate. All losses get grpo.py's advantages. (DPPO's have no std, which is another
question.)

    python -m labs.fork
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "The clip slows a rare token at every learning rate, a common one only at small rates"
ARMS = {
    "GRPO": ("grpo", {}),
    "clip-higher": ("grpo", {"clip_high": 0.28}),
    "MASPO": ("maspo", {}),
    "SAPO": ("sapo", {}),
    "CISPO": ("cispo", {}),
    "DPPO": ("dppo", {}),
}
LOOKS = {  # arm -> colour and dashes
    "GRPO": (lab.BLACK, "-"),
    "clip-higher": (lab.BLACK, "--"),
    "MASPO": (lab.ORANGE, "-"),
    "SAPO": (lab.BLUE, "-"),
    "CISPO": (lab.GREEN, "-"),
    "DPPO": (lab.PINK, ":"),
}
ANSWERS, P, G, STEPS, LR = 10, 32, 16, 16, 1.0
TIMES = (1, 2, 5)  # multiples of the learning rate
STARTS = (0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9)
LONGEST = 40


def rollout(arm: str, logits: torch.Tensor, lr: float, generator: torch.Generator) -> torch.Tensor:
    """Return the logits `[1, V]` after one rollout and its gradient steps."""
    stem, flags = ARMS[arm]
    module = toy.load(stem)
    tokens = toy.sample(logits, P * G, generator)  # [N, 1]
    rewards = (tokens == 0).double().view(P, G)  # [P, G]
    held = {"old_logp": toy.logprobs(logits, tokens)}  # [N, 1]
    held["advantages"] = toy.load("grpo").advantages(rewards).flatten()  # [N]
    for _ in range(STEPS):
        logits = logits - lr * toy.gradient(module, flags, logits, tokens, **held)
    return logits


def measure(arm: str, seed: int) -> dict:
    """Measure p(right) by rollout, the rollouts until it passes 1/2, and what one rollout adds to
    each p(right) of STARTS, at each multiple of the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    logits, curve = toy.start(0.001, ANSWERS)[None], []  # [1, V]
    for _ in range(LONGEST):
        curve.append(logits.softmax(-1)[0, 0].item())
        logits = rollout(arm, logits, LR, generator)
    until = next((i for i, p in enumerate(curve) if p > 0.5), np.nan)
    numbers = {"p": curve, "rollouts": until}
    for times in TIMES:
        added = []
        for p in STARTS:
            before = toy.start(p, ANSWERS)[None]  # [1, V]
            after = rollout(arm, before, times * LR, generator)
            added.append(after.softmax(-1)[0, 0].item() - p)
        numbers[f"added {times}"] = added
    return numbers


def rows(results: dict) -> list[list[str]]:
    cases = [(p, times) for p in (0.01, 0.5) for times in (1, 5)]
    table = [["arm", "rollouts until p > 1/2", *(f"added to {p}, step ×{t}" for p, t in cases)]]
    for arm, runs in results.items():
        cells = [lab.cell(runs, "rollouts", ".0f")]
        for p, times in cases:
            added = [{"p": run[f"added {times}"][STARTS.index(p)]} for run in runs]
            cells.append(lab.cell(added, "p", ".3f"))
        table.append([arm, *cells])
    return table


def draw(results: dict) -> object:
    words = "the right answer, starting at 0.001", "what one rollout adds"
    words = *words, "the same, at five times the learning rate"
    figure, (left, *others) = lab.make_figure(TITLE, *words, width=12)
    for arm, (colour, dashes) in LOOKS.items():
        if arm in ("GRPO", "MASPO"):  # the bands of the others would cover these two
            lab.line(left, np.arange(LONGEST), results[arm], "p", colour, linestyle=dashes)
        else:
            middle = lab.median_and_band(results[arm], "p")[0]
            left.plot(middle, color=colour, linewidth=2, linestyle=dashes)
        for axis, times in zip(others, (1, 5)):
            lab.line(axis, STARTS, results[arm], f"added {times}", colour, linestyle=dashes)
    lab.label(left, 31, 0.13, "GRPO", lab.BLACK)
    lab.label(left, 17.2, 0.35, "clip-\nhigher", lab.BLACK)
    lab.label(others[0], 0.09, 0.055, "GRPO", lab.BLACK)
    lab.label(others[0], 0.07, 0.24, "clip-higher", lab.BLACK)
    lab.label(others[1], 0.1, 0.12, "GRPO and\nclip-higher", lab.BLACK)
    for axis, x in ((left, 0.03), (others[0], 0.03)):
        for place, arm in enumerate(("CISPO", "MASPO", "SAPO", "DPPO")):
            words = "DPPO (dotted)" if arm == "DPPO" else arm
            where = {"xycoords": "axes fraction"}
            lab.label(axis, x, 0.93 - 0.065 * place, words, LOOKS[arm][0], **where)
    left.set(xlabel="rollouts", ylabel="p(right)")
    lab.plain_ticks(left, "y", (0.001, 0.01, 0.1, 1))
    for axis in others:
        axis.set(xlabel="p(right) before", ylim=(-0.03, 1))
        lab.plain_ticks(axis, "x", [start for start in STARTS if start != 0.7])
    others[0].set_ylabel("added to p(right)")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
