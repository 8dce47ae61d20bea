"""Two blocks, two rewards, and neither hangs on the other: is one advantage for both enough?

Block 1 is four tokens, each right with chance 0.8 at first; block 2 is one of 20, at 0.01 or 0.001.
Each block has its own reward, 1 where all of it is right. 4 prompts, 8 responses each, one Adam
step a rollout. grpo.py and variants/dr_grpo.py get one reward, the sum or the product;
variants/blockwise.py gets both, and compares block 2 as its paper does, with siblings whose block 1
has the same reward, or with the whole group (`--baseline group`). Adam, as the losses divide a
block by different lengths: with plain steps the comparison would show the step size.

    python -m labs.blocks
"""

import sys

import numpy as np
import torch

from labs import lab, toy

TITLE = "With a reward for each block, an advantage for each is sooner there"
# Way -> file, its flags, the one reward of a response
WAYS = {
    "GRPO, sum": ("grpo", {}, torch.add),
    "GRPO, product": ("grpo", {}, torch.mul),
    "Dr. GRPO, sum": ("dr_grpo", {}, torch.add),
    "blockwise": ("blockwise", {}, None),
    "blockwise, group's mean": ("blockwise", {"baseline": "group"}, None),
}
SETTINGS = {"0.01": (0.01, 0.05), "0.001": (0.001, 0.05), "0.01, lr 0.2": (0.01, 0.2)}
ARMS = {f"{setting}: {way}": (*SETTINGS[setting], way) for setting in SETTINGS for way in WAYS}
COLOURS = dict(zip(WAYS, (lab.BLACK, lab.GREY, lab.PINK, lab.ORANGE, lab.BLUE)))
FIRST, V, P, G, LONGEST, SHOWN = 4, 20, 4, 8, 3000, 150


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Rollouts until block 1, block 2 and both are right in half of all responses; the chance of
    block 2 after each rollout."""
    (p, lr, way), generator = ARMS[arm], torch.Generator().manual_seed(seed)
    stem, flags, one = WAYS[way]
    module = toy.load(stem)
    logits = torch.zeros(FIRST + 1, V, dtype=torch.float64)  # [T, V]
    logits[:FIRST, 2:] = -1e9  # the tokens of block 1 are of two
    logits[:FIRST, 0], logits[FIRST] = toy.start(0.8, 2)[0], toy.start(p, V)
    adam = torch.optim.Adam([logits], lr)
    working = (torch.arange(FIRST + 1) < FIRST).double().expand(P * G, -1)  # [N, T]
    curve, since = [], {}  # since: block -> the rollout after which it is right in half
    while len(since) < 2 and len(curve) < LONGEST:
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
    shown = [*curve, *[curve[-1]] * SHOWN][:SHOWN]
    return {"block 1": need[0], "block 2": need[1], "both": max(need), "p": shown}
