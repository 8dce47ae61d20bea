"""Two independent blocks with a reward each: is one advantage enough for both?

Block 1 is four tokens, each right with probability 0.8 at first. Block 2 is one of 20 tokens, right
with probability 0.01 or 0.001. Each block has its own reward, 1 if all of it is right. As a control
block 1 is certain from the start. A rollout has 4 prompts with 8 responses each and serves one Adam
step. grpo.py and variants/dr_grpo.py get one reward, the sum or the product. variants/blockwise.py
gets both. It compares block 2 as its paper does, with siblings whose block 1 has the same reward,
or with the whole group (`--baseline group`). The losses divide a block by different lengths, so
plain steps would compare learning rates; Adam avoids this.

    python -m labs.credit --part blocks
"""

import numpy as np
import torch

from labs import lab, toy

TITLE = "If blocks are independent, an advantage for each finds the rare one sooner"
# Way -> file, its flags, the one reward of a response
WAYS = {
    "GRPO, sum": ("grpo", {}, torch.add),
    "GRPO, product": ("grpo", {}, torch.mul),
    "Dr. GRPO, sum": ("dr_grpo", {}, torch.add),
    "blockwise": ("blockwise", {}, None),
    "blockwise, group's mean": ("blockwise", {"baseline": "group"}, None),
}
# Setting -> probability of block 2, of a token of block 1, Adam's learning rate
SETTINGS = {
    "0.01": (0.01, 0.8, 0.05),
    "0.01, block 1 sure": (0.01, 1 - 1e-9, 0.05),
    "0.001": (0.001, 0.8, 0.05),
    "0.01, lr 0.2": (0.01, 0.8, 0.2),
}
ARMS = {f"{setting}: {way}": (*SETTINGS[setting], way) for setting in SETTINGS for way in WAYS}
COLOURS = dict(zip(WAYS, (lab.BLACK, lab.GREEN, lab.BLACK, lab.ORANGE, lab.BLUE)))
DASHED = "Dr. GRPO, sum"  # as black as its neighbour
FIRST, V, P, G, LONGEST, SHOWN = 4, 20, 4, 8, 3000, 120


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Rollouts until block 1, block 2 and both are right in half of all responses; the probability
    of block 2 after each rollout."""
    (p, easy, lr, way), generator = ARMS[arm], torch.Generator().manual_seed(seed)
    stem, flags, one = WAYS[way]
    module = toy.load(stem)
    logits = torch.zeros(FIRST + 1, V, dtype=torch.float64)  # [T, V]
    logits[:FIRST, 2:] = -1e9  # the tokens of block 1 are of two
    logits[:FIRST, 0], logits[FIRST] = toy.start(easy, 2)[0], toy.start(p, V)
    adam = torch.optim.Adam([logits], lr)
    working = (torch.arange(FIRST + 1) < FIRST).double().expand(P * G, -1)  # [N, T]
    curve, since = [], {}  # since: block -> the rollout after which it is right in half
    while len(curve) < SHOWN or (len(since) < 2 and len(curve) < LONGEST):
        chances = logits.softmax(-1)[:, 0]  # [T]
        curve.append(chances[FIRST].item())
        for block, chance in ((1, chances[:FIRST].prod()), (2, chances[FIRST])):
            if chance > 0.5:
                since.setdefault(block, len(curve) - 1)
        tokens = toy.sample(logits, P * G, generator)  # [N, T]
        first = (tokens[:, :FIRST] == 0).all(dim=1).double().view(P, G)  # [P, G]
        second = (tokens[:, FIRST] == 0).double().view(P, G)  # [P, G]
        held = {"old_logp": toy.logprobs(logits, tokens)}
        if one:
            held["advantages"] = module.advantages(one(first, second)).flatten()  # [N]
        else:
            args = module.Args(**flags)
            held |= {"working": working, "working_advantages": module.advantages(first).flatten()}
            held["advantages"] = module.answer_advantages(args, second, first, None).flatten()
        logits.grad = toy.gradient(module, flags, logits, tokens, **held)
        adam.step()
    need = [since.get(block, np.inf) for block in (1, 2)]
    return {"block 1": need[0], "block 2": need[1], "both": max(need), "p": curve[:SHOWN]}


def sooner(results: dict, arm: str, other: str) -> str:
    """In how many seeds an arm has both blocks before another way with the same setting."""
    setting = arm.partition(": ")[0]
    pairs = zip(results[arm], results[f"{setting}: {other}"])
    wins = [one["both"] < two["both"] for one, two in pairs]
    return "–" if arm.endswith(f": {other}") else f"{sum(wins)} of {len(wins)}"


def rows(results: dict) -> list[list[str]]:
    head = ["arm", "rollouts until block 1", "block 2", "both"]
    table = [[*head, "sooner than GRPO, sum", "sooner than blockwise"]]
    for arm, runs in results.items():
        cells = [lab.cell(runs, name, ".0f") for name in ("block 1", "block 2", "both")]
        wins = [sooner(results, arm, other) for other in ("GRPO, sum", "blockwise")]
        table.append([arm, *cells, *wins])
    return table


def draw(results: dict) -> object:
    words = "block 2, starting at 0.01", "rollouts until both blocks are right in half"
    figure, (left, right) = lab.sheet(TITLE, *words, width=10)
    for way, colour in COLOURS.items():
        runs, dashes = results[f"0.01: {way}"], "--" if way == DASHED else "-"
        lab.line(left, np.arange(SHOWN), runs, "p", colour, linestyle=dashes)
    left.set(xlabel="rollouts", ylabel="probability of block 2")
    for place, setting in enumerate(SETTINGS):
        for side, (way, colour) in enumerate(COLOURS.items()):
            values = [run["both"] for run in results[f"{setting}: {way}"]]
            x = place + 0.17 * (side - 2)
            face = "white" if way == DASHED else colour
            style = {"s": 14, "facecolor": face, "edgecolor": colour, "linewidth": 0.6}
            right.scatter(np.full(len(values), x), values, alpha=0.5, **style)
            middle = np.quantile(values, 0.5, method="inverted_cdf")
            right.plot(x, middle, "_", color=colour, markersize=15, markeredgewidth=3)
    ticks = [setting.replace(", ", ",\n") for setting in SETTINGS]
    right.set_xticks(range(len(SETTINGS)), labels=ticks)
    right.set(
        xlabel="probability of block 2 at first (learning rate 0.05 if not named)", ylim=(15, 700)
    )
    lab.plain_ticks(right, "y", (20, 50, 100, 200, 500))
    for place, (way, colour) in enumerate(reversed(COLOURS.items())):
        words = f"- - {way}" if way == DASHED else way
        lab.label(left, 0.02, 0.66 + 0.065 * place, words, colour, xycoords="axes fraction")
    return figure
