"""The gradient under a sampler that is not the policy, split into drift and covariance.

Nothing is trained. The embedded model's parameters, rounded to a few levels, sample 32 responses to
each of 64 prompts. At each of their prefixes the drift's part is exact, because the vocabulary has
only 18 tokens: Â Σ μ(v) ∇ log π(v). Averages over responses are estimates. The samples form two
halves, and every inner product is between vectors of different halves: so noise adds no length. The
policy's own gradient is that of as many responses which it samples itself.

    python -m labs.drift
"""

import sys
from dataclasses import replace

import numpy as np
import torch
from common.batch import Rollout
from common.data import load_task
from common.distributed import ALONE
from common.logprobs import Policy, micro_batches, response_logprobs
from common.model import load_model
from common.rollout import HFEngine
from torch import Tensor
from transformers import PreTrainedModel
from variants import centred

from labs import lab
from labs.race.stresses import quantise

TITLE = "Without its drift the gradient is hardly nearer to the policy's own; with a weight it is"
ARMS = {"gap 0.01": 16, "gap 0.11": 4, "gap 0.17": 3, "gap 0.90": 2}  # levels of the sampler
PROMPTS, GROUP, SEEDS = 64, 32, 5
PLAIN = centred.Args(centre_top=0)
METHODS = {
    "nothing": PLAIN,
    "weight": replace(PLAIN, weight="tis"),
    "centred": centred.Args(),
    "both": centred.Args(weight="tis"),
}
COLOURS = dict(zip(METHODS, (lab.BLACK, lab.ORANGE, lab.BLUE, lab.GREEN)))


def objectives(batch: Rollout, logp: Tensor, methods: dict, parts: bool) -> dict[str, Tensor]:
    """Name -> a sum over responses. Those of centred.py; and parts of the drift: of rewards without
    a baseline, of right responses; and -KL(μ ‖ π), whose gradient is the mean score."""
    found = {name: -centred.policy_loss(args, logp, batch)[0] for name, args in methods.items()}
    if parts:
        c = centred.centring(METHODS["centred"], batch)  # [n, T, K]
        score = ((c * batch.top_logp).sum(-1) * batch.mask).sum(1)  # [n]
        found["raw drift"] = (batch.rewards * score).sum()
        found["drift of right"] = (batch.advantages.clamp(min=0) * score).sum()
        found["towards μ"] = score.sum()
    return found


def sampled(lm: PreTrainedModel, levels: int, seed: int) -> Rollout:
    """Responses of a sampler of so many levels (0: the policy itself), with their advantages."""
    engine = HFEngine(lm, ALONE, seed, "float32", 4096, top=lm.config.vocab_size)
    if levels:
        quantise(engine.lm, levels)
    task = load_task(replace(PLAIN, seed=seed), load_model("tiny")[1])
    problems = [task.train(i) for i in range(PROMPTS)]
    batch = engine.generate([problem.prompt_ids for problem in problems], GROUP, 64, 1.0)
    rewards = task.score(batch, problems, GROUP)  # [P, G]
    batch.advantages = centred.advantages(rewards).flatten()  # [N]
    return batch


def gradients(
    lm: PreTrainedModel, batch: Rollout, methods: dict, parts: bool = False
) -> dict[str, Tensor]:
    """Objective's name -> its gradient by all parameters, a mean over the responses; and their mean
    `gap`."""
    policy = Policy(lm)
    found, gap = {}, 0.0
    for rows in micro_batches(policy, batch, 16384, ALONE):
        micro = batch.rows(rows)
        logp, _ = response_logprobs(policy, micro, 1.0, None)  # [n, T]
        gap += ((logp - micro.rollout_logp).abs() * micro.mask).sum().detach()
        for name, total in objectives(micro, logp, methods, parts).items():
            each = torch.autograd.grad(total / len(batch), policy.parameters(), retain_graph=True)
            flat = torch.cat([gradient.flatten() for gradient in each])
            found[name] = found.get(name, 0.0) + flat
    return found | {"gap": gap / batch.mask.sum()}


def inner(one: list[Tensor], other: list[Tensor]) -> float:
    """Inner product without the noise: each factor is from another half of the samples."""
    return float(one[0] @ other[1] + one[1] @ other[0]) / 2


def measure(arm: str, seed: int) -> dict:
    """Inner products `a, b` of gradients, from two halves; and the `noise` of one response."""
    lm, _ = load_model("tiny")
    seeds = (2 * seed, 2 * seed + 1)
    halves = [gradients(lm, sampled(lm, ARMS[arm], half), METHODS, True) for half in seeds]
    selves = [sampled(lm, 0, 1000 + half) for half in seeds]
    own = [gradients(lm, batch, {"nothing": PLAIN})["nothing"] for batch in selves]
    v = {name: [half[name] for half in halves] for name in halves[0]}
    found = {"gap": float(sum(v.pop("gap")) / 2), "own, own": inner(own, own)}
    v["drift"] = [plain - rest for plain, rest in zip(v["nothing"], v["centred"])]
    v["drift of wrong"] = [drift - right for drift, right in zip(v["drift"], v["drift of right"])]
    for name, vector in v.items():
        found[f"{name}, {name}"] = inner(vector, vector)
        found[f"{name}, own"] = inner(vector, own)
        found[f"{name}, towards μ"] = inner(vector, v["towards μ"])
    found["share"] = (found["drift, drift"] / found["nothing, nothing"]) ** 0.5
    for name in METHODS:
        distance = v[name][0] - v[name][1]
        found[f"{name}, noise"] = PROMPTS * GROUP * float(distance @ distance) / 2
    return found


def figures(runs: list[dict]) -> dict[str, float]:
    """Lengths, cosines and noise, of the runs' mean inner products. NaN: no length beyond noise.
    `needed`: the number of responses whose mean gradient is noise by half."""
    mean = {name: np.mean([run[name] for run in runs]) for name in runs[0]}

    def length(name: str) -> float:
        square = mean[f"{name}, {name}"]
        return square**0.5 if square > 0 else np.nan

    whole = length("nothing")
    found = {"gap": mean["gap"], "drift": length("drift") / whole}  # of the whole's length
    found["covariance"] = length("centred") / whole
    found["left by the group's mean"] = length("drift") / length("raw drift")
    for name in METHODS:
        found[f"{name}, cosine"] = mean[f"{name}, own"] / (length(name) * length("own"))
        found[f"{name}, needed"] = mean[f"{name}, noise"] / length(name) ** 2
    for name in ("raw drift", "drift", "drift of right", "drift of wrong"):
        product = length(name) * length("towards μ")
        found[f"{name}, towards μ"] = mean[f"{name}, towards μ"] / product
    return found


def error(runs: list[dict], name: str) -> float:
    """Twice the standard error over seeds, by leaving each out; NaN: of one seed."""
    if len(runs) == 1:
        return np.nan
    without = [figures(runs[:i] + runs[i + 1 :])[name] for i in range(len(runs))]
    n = len(runs)
    return 2 * float(np.sqrt((n - 1) * np.var(without)))


def rows(results: dict) -> list[list[str]]:
    """A column for each sampler: a figure, and twice its standard error."""
    every = [figures(runs) for runs in results.values()]
    table = [["", *results]]
    for name in every[0]:
        cells = [name]
        for found, runs in zip(every, results.values()):
            form = ".0f" if name.endswith("needed") else ".2f"
            told = f"{found[name]:{form}} ± {error(runs, name):{form}}"
            cells.append("–" if np.isnan(found[name]) else told)
        table.append(cells)
    return table


def draw(results: dict) -> object:
    """Over the gap: lengths, and cosines with the policy's own gradient."""
    words = "length, of the whole gradient's", "cosine with the policy's own gradient"
    figure, axes = lab.sheet(TITLE, *words)
    every = [figures(runs) for runs in results.values()]
    gaps = [found["gap"] for found in every]
    lengths = {"drift": lab.PINK, "covariance": lab.BLUE}
    for axis, colours in zip(axes, (lengths, COLOURS)):
        for name, colour in colours.items():
            column = f"{name}, cosine" if name in METHODS else name
            middle = [found[column] for found in every]
            spread = [error(runs, column) for runs in results.values()]
            axis.errorbar(gaps, middle, spread, color=colour, linewidth=2, marker="o", capsize=3)
        lab.plain_ticks(axis, "x", (0.01, 0.03, 0.1, 0.3, 1))
        axis.set_xlabel("gap of the sampler (nats per token)")
        axis.set_ylim(-0.2, 1.2)
        lab.key(axis, colours, y=0.45)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
