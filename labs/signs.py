"""Learning from right answers only, from wrong ones only, or both: what is found, what is kept?

One prompt, 20 possible answers of one token. *Easy*: four are right, at 0.05 each at first; *rare*:
one is, at 0.002. 16 groups of 8, four plain gradient steps on each rollout, with grpo.py's loss;
the arms change the advantages of one sign alone. The last is variants/signs.py's loss as it is.

    python -m labs.signs
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "Wrong answers alone keep every right one alive, and never find a rare one"
WEIGHTS = {"both": (1.0, 1.0), "right only": (1.0, 0.0), "wrong only": (0.0, 1.0)}
WEIGHTS |= {"wrong by half": (1.0, 0.5), "right by a tenth": None}
ARMS = {f"{task}, {name}": (task, name) for task in ("easy", "rare") for name in WEIGHTS}
COLOURS = dict(zip(WEIGHTS, (lab.BLACK, lab.BLUE, lab.ORANGE, lab.GREY, lab.GREEN)))
RIGHT, AT = {"easy": 4, "rare": 1}, {"easy": 0.05, "rare": 0.002}
V, P, G, STEPS, LR, ROLLOUTS, EVERY = 20, 16, 8, 4, 0.5, 150, 3


def measure(arm: str, seed: int, quick: bool) -> dict:
    """p(right), and how many right answers are alive: e^(entropy among them), by rollout."""
    (task, name), generator = ARMS[arm], torch.Generator().manual_seed(seed)
    right, weights = RIGHT[task], WEIGHTS[name]
    module, (up, down) = toy.load("grpo" if weights else "signs"), weights or (1.0, 1.0)
    chances = torch.full((V,), (1 - right * AT[task]) / (V - right), dtype=torch.float64)
    chances[:right] = AT[task]
    logits, success, alive = chances.log()[None], [], []  # [1, V]
    for _ in range(15 if quick else ROLLOUTS):
        chances = logits.softmax(-1)[0, :right]  # [right]
        among = chances / chances.sum()
        success.append(chances.sum().item())
        alive.append((-(among * among.log()).sum()).exp().item())
        tokens = toy.sample(logits, P * G, generator)  # [N, 1]
        A = module.advantages((tokens < right).double().view(P, G)).flatten()  # [N]
        held = {"advantages": torch.where(A > 0, up, down) * A}
        held["old_logp"] = toy.logprobs(logits, tokens)
        for _ in range(STEPS):
            logits = logits - LR * toy.gradient(module, {}, logits, tokens, **held)
    until = next((i for i, p in enumerate(success) if p > 0.5), np.inf)
    series = {"p": success[::EVERY]} | ({"alive": alive[::EVERY]} if task == "easy" else {})
    return series | {"until": until, "end": success[-1], "left": alive[-1]}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "rollouts until p > 1/2", "p at the end", "right answers alive"]]
    for arm, runs in results.items():
        alive = lab.cell(runs, "left", ".1f") if "easy" in arm else "–"
        cells = lab.cell(runs, "until", ".0f"), lab.cell(runs, "end", ".3f"), alive
        table.append([arm, *cells])
    return table


def draw(results: dict) -> object:
    words = "easy: p(right)", "easy: right answers alive, of four", "rare: p(right)"
    figure, axes = lab.sheet(TITLE, *words, width=11)
    panels = ("easy", "p"), ("easy", "alive"), ("rare", "p")
    for axis, (task, column) in zip(axes, panels):
        for name, colour in COLOURS.items():
            runs = results[f"{task}, {name}"]
            x = EVERY * np.arange(len(runs[0]["p"]))
            lab.line(axis, x, runs, column, colour)
            if column == "alive":
                height = lab.over(runs, column)[0][-1] + {"both": -0.09, "wrong by half": 0.09}.get(
                    name, 0
                )
                lab.label(axis, x[-1], height, name, colour)
        axis.set_xlabel("rollouts")
    axes[1].set(ylim=(0.85, 4.15), xlim=(0, 1.5 * x[-1]))
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
