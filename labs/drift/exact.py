"""The gradient under a sampler that is not the policy, split into drift and covariance.

Nothing is trained. The embedded model's parameters, rounded to a few levels, sample 32 responses to
each of 64 prompts. At each of their prefixes the drift's part is exact, because the vocabulary has
only 18 tokens: Â Σ μ(v) ∇ log π(v). Averages over responses are estimates. The samples form two
halves, and every inner product is between vectors of different halves: so noise adds no length. The
policy's own gradient is that of as many responses which it samples itself.

    python -m labs.drift.exact
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from common.batch import Rollout
from common.data import load_task
from common.distributed import ALONE
from common.logprobs import Policy, micro_batches, response_logprobs
from common.metrics import Means
from common.model import load_model
from common.rollout import HFEngine
from torch import Tensor
from transformers import PreTrainedModel
from variants import centred

from labs import lab
from labs.race.stresses import quantise

TITLE = "Drift is most of the gradient only where the sampler is another policy"
LEVELS = {"0.01": 16, "0.04": 6, "0.11": 4, "0.17": 3, "0.90": 2}
ARMS = {f"gap {gap}": levels for gap, levels in LEVELS.items()}
PROMPTS, GROUP, SEEDS = 64, 32, 5
PLAIN = centred.Args(centre_top=0)
METHODS = {
    "nothing": PLAIN,
    "weight": replace(PLAIN, weight="tis"),
    "centred": centred.Args(),
    "both": centred.Args(weight="tis"),
}
COLOURS = dict(zip(METHODS, (lab.BLACK, lab.ORANGE, lab.BLUE, lab.GREEN)))


def objectives(batch: Rollout, logp: Tensor, methods: dict) -> dict[str, Tensor]:
    """Name -> a sum over responses. Those of centred.py; and parts of the drift: of rewards without
    a baseline, of right responses; and -KL(μ ‖ π), whose gradient is the mean score."""
    found = {name: -centred.policy_loss(args, logp, batch)[0] for name, args in methods.items()}
    if "centred" in methods:
        c = centred.centring(METHODS["centred"], batch)  # [n, T, K]
        score = ((c * batch.top_logp).sum(-1) * batch.mask).sum(1)  # [n]
        found["raw drift"] = (batch.rewards * score).sum()
        found["drift of right"] = (batch.advantages.clamp(min=0) * score).sum()
        found["towards μ"] = score.sum()
    return found


def gradients(lm: PreTrainedModel, levels: int, seed: int, methods: dict) -> dict[str, Tensor]:
    """Name -> the gradient by all parameters, a mean over the responses that a sampler of so many
    levels gives (0: the policy itself); and its mean `gap`."""
    policy, world = Policy(lm), ALONE
    engine = HFEngine(lm, world, seed, "float32", 4096, top=lm.config.vocab_size)
    if levels:
        quantise(engine.lm, levels)
    task = load_task(replace(PLAIN, seed=seed), load_model("tiny")[1])
    problems = [task.train(i) for i in range(PROMPTS)]
    batch = engine.generate([problem.prompt_ids for problem in problems], GROUP, 64, 1.0)
    rewards = task.score(batch, problems, GROUP, Means())  # [P, G]
    batch.advantages = centred.advantages(rewards).flatten()  # [N]
    found, gap = {}, 0.0
    for rows in micro_batches(policy, batch, 16384, world):
        micro = batch.rows(rows)
        logp, _ = response_logprobs(policy, micro, 1.0, None)  # [n, T]
        gap += ((logp - micro.rollout_logp).abs() * micro.mask).sum().detach()
        for name, total in objectives(micro, logp, methods).items():
            parts = torch.autograd.grad(total / len(batch), policy.parameters(), retain_graph=True)
            flat = torch.cat([part.flatten() for part in parts])
            found[name] = found.get(name, 0.0) + flat
    return found | {"gap": gap / batch.mask.sum()}


def inner(one: list[Tensor], other: list[Tensor]) -> float:
    """Inner product without the noise: each factor is from another half of the samples."""
    return float(one[0] @ other[1] + one[1] @ other[0]) / 2


def length(vector: list[Tensor]) -> float:
    return max(inner(vector, vector), 1e-12) ** 0.5


def cosine(one: list[Tensor], other: list[Tensor]) -> float:
    return inner(one, other) / (length(one) * length(other))


def measure(levels: int, seed: int) -> dict:
    """Lengths and cosines. `needed`: the number of responses whose mean gradient has as much noise
    as signal."""
    lm, _ = load_model("tiny")
    seeds = (2 * seed, 2 * seed + 1)
    halves = [gradients(lm, levels, half, METHODS) for half in seeds]
    own = [gradients(lm, 0, 1000 + half, {"nothing": PLAIN})["nothing"] for half in seeds]
    v = {name: [half[name] for half in halves] for name in halves[0]}
    gap = float(sum(v.pop("gap")) / 2)
    v["drift"] = [plain - rest for plain, rest in zip(v["nothing"], v["centred"])]
    v["drift of wrong"] = [drift - right for drift, right in zip(v["drift"], v["drift of right"])]
    found = {"gap": gap, "drift": length(v["drift"]) / length(v["nothing"])}
    found["covariance"] = length(v["centred"]) / length(v["nothing"])
    found["drift left by the group's mean"] = length(v["drift"]) / length(v["raw drift"])
    for name in METHODS:
        found[f"{name}, cosine"] = cosine(v[name], own)
        noise = PROMPTS * GROUP * float((v[name][0] - v[name][1]).square().sum()) / 2
        found[f"{name}, needed"] = noise / length(v[name]) ** 2
    for name in ("drift", "raw drift", "drift of right", "drift of wrong"):
        found[f"{name}, towards μ"] = cosine(v[name], v["towards μ"])
    return found


def rows(results: dict) -> list[list[str]]:
    names = list(next(iter(results.values()))[0])
    return [["sampler", *names]] + [
        [arm, *(lab.cell(runs, name) for name in names)] for arm, runs in results.items()
    ]


def draw(results: dict) -> object:
    """Over the gap: lengths, and cosines with the policy's own gradient."""
    words = "length, of the whole gradient's", "cosine with the policy's own gradient"
    figure, axes = lab.sheet(TITLE, *words)
    gaps = [np.median([run["gap"] for run in runs]) for runs in results.values()]
    drawn = {"drift": lab.PINK, "covariance": lab.BLUE}, COLOURS
    for axis, colours in zip(axes, drawn):
        for name, colour in colours.items():
            column = f"{name}, cosine" if name in METHODS else name
            ends = [lab.over(runs, column) for runs in results.values()]
            middle, low, high = np.array(ends).T
            axis.fill_between(gaps, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.plot(gaps, middle, color=colour, linewidth=2, marker="o")
        lab.plain_ticks(axis, "x", (0.01, 0.03, 0.1, 0.3, 1))
        axis.set_xlabel("gap of the sampler (nats per token)")
        lab.key(axis, colours)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
