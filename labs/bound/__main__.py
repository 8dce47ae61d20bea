"""Bound: the variance of a gradient estimate, by enumeration, and how much a baseline can remove.

A task has four prompts. A response is a sequence of two letters that ends by EOS, or after `depth`
tokens. Logits are random features of the prefix times shared weights, rewards are 0 or 1 by chance.
Every response is enumerated, and for the short tasks every group of eight, so there is no sampling.
Stale responses were sampled by other weights. A loss is *plain*, w Â Σ ∇ log π with w = π/μ, or *as
written*: grpo.py's on-policy, vcpo.py's with stale responses, 1/|y| and cut weights.

The unit is the variance of RLOO, whose mean is that of a known mean reward. What a file makes of
groups (GRPO's z-score, VCPO's b) is scaled until its mean has the same component along RLOO's mean;
after this the group mean and RLOO are the same.

    python -m labs.bound
"""

import itertools
import math
import sys
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from checks import loss_and_gradient, no_kl
from torch import Tensor

from labs import lab, toy

TITLE = "A critic would remove more than any better number per prompt"
DEPTHS = {"short": 2, "long": 6}
ARMS = {
    f"{length}, {age}, {loss}": (depth, age, loss)
    for length, depth in DEPTHS.items()
    for age in ("on-policy", "stale")
    for loss in ("plain", "as written")
}
SEEDS = 40
P, G, FEATURES, MOVED = 4, 8, 6, 0.35
FILES = {"VCPO's b": "vcpo", "GRPO's z-score": "grpo"}
ENOUGH = 20  # responses of a prompt; with more there are too many groups
EOS = 2


@cache
def responses(depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """All responses: tokens, mask and the number of the prefix before each token, `[K, T]`."""
    numbers, rows = {(): 0}, []
    for length in range(depth + 1):
        for letters in itertools.product((0, 1), repeat=length):
            rows.append(letters if length == depth else (*letters, EOS))
            if length < depth:
                numbers.setdefault(letters, len(numbers))
    tokens, nodes = torch.zeros(2, len(rows), depth, dtype=torch.long)
    mask = torch.zeros(len(rows), depth, dtype=torch.float64)
    for row, letters in enumerate(rows):
        for place, token in enumerate(letters):
            tokens[row, place], mask[row, place] = token, 1
            nodes[row, place] = numbers[letters[:place]]
    return tokens, mask, nodes


@cache
def groups(count: int) -> tuple[Tensor, Tensor]:
    """All groups of G of so many responses, without order, `[M, G]`; log of their orders `[M]`."""
    found = torch.tensor(list(itertools.combinations_with_replacement(range(count), G)))
    times = torch.zeros(len(found), count).scatter_add_(1, found, torch.ones(found.shape))  # [M, K]
    return found, math.lgamma(G + 1) - (times.double() + 1).lgamma().sum(1)


def random_prompt(depth: int, stale: bool, as_written: bool, draw: torch.Generator, theta: Tensor):
    """One prompt: of each response its chance under μ, reward, log w, and the weight on each
    token's gradient `[K, T, D]` in the loss with Â = 1; and Q - V of each token."""
    tokens, mask, nodes = responses(depth)
    features = torch.randn(2**depth - 1, FEATURES, generator=draw, dtype=torch.float64)
    moved = MOVED * torch.randn(theta.shape, generator=draw, dtype=torch.float64)
    logits = features @ theta  # [nodes, 3]
    logits[:, EOS] -= 1
    sampler = logits + features @ moved if stale else logits
    logp, mu = (x.log_softmax(-1)[nodes, tokens] * mask for x in (logits, sampler))  # [K, T] each
    reward = torch.zeros(len(mask), dtype=torch.float64)
    while reward.min() == reward.max():
        reward = (torch.rand(len(mask), generator=draw) < 0.4).double()
    log_w = (logp - mu).sum(1)  # [K]
    if as_written:
        module = toy.load("vcpo" if stale else "grpo")
        columns = {"logp": logp, "old_logp": logp, "rollout_logp": mu, "mask": mask}
        ones = torch.ones(len(mask), dtype=torch.float64)
        _, slope = loss_and_gradient(module, no_kl(module), advantages=ones, **columns)
        weight = -slope * len(mask)  # [K, T]
    else:
        weight = log_w.exp()[:, None] * mask
    # ∇ log π(token) by θ: features times (one-hot - π)
    surprise = torch.eye(3, dtype=torch.float64)[tokens] - logits.softmax(-1)[nodes]  # [K, T, 3]
    slope = (features[nodes][..., None] * surprise[..., None, :]).flatten(2)  # [K, T, D]
    chance, through = logp.sum(1).exp(), torch.zeros(2**depth - 1, len(mask), dtype=torch.float64)
    for place in range(depth):  # [nodes, K]: 1 where a response passes a prefix
        through[nodes[:, place], torch.arange(len(mask))] += mask[:, place]
    value = (through @ (chance * reward)) / (through @ chance)  # [nodes]: V under π
    after = torch.cat([value[nodes[:, 1:]], reward[:, None]], 1)  # [K, T]
    last = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], 1) == 0  # [K, T]
    critic = torch.where(last, reward[:, None], after) - value[nodes]  # [K, T]: Q - V
    return SimpleNamespace(
        p=mu.sum(1).exp(),
        reward=reward,
        log_w=log_w,
        norms=(slope * mask[..., None]).sum(1).norm(dim=1),
        parts=weight[..., None] * slope,
        nodes=nodes,
        critic=critic,
        value=value[0],
    )


def moments(p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean `[D]` of vectors `[K, D]`, and the sum of the variances of their coordinates."""
    mean = p @ x
    return mean, p @ x.square().sum(1) - mean.square().sum()


def covariance(p: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Summed over coordinates, of `[K, N, D]` and `[K, M, D]` -> `[N, M]`."""
    x, y = x - torch.einsum("k,knd->nd", p, x), y - torch.einsum("k,knd->nd", p, y)
    return torch.einsum("k,knd,kmd->nm", p, x, y)


def rloo(one: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """Mean and variance of RLOO in a group of G: a U-statistic of the pairs' (a - a')(R - R')/2."""
    a, p, r = one.parts.sum(1), one.p, one.reward  # [K, D], [K], [K]
    apart = (r[:, None] - r) / 2  # [K, K]
    given = (apart @ p)[:, None] * a - (apart * p) @ a  # [K, D]: mean of a pair, given its first
    mean, first = moments(p, given)
    square = a.square().sum(1)  # [K]
    distance = square[:, None] + square - 2 * a @ a.T  # [K, K]
    both = p @ (apart.square() * distance) @ p - mean.square().sum()
    return mean, (2 * (G - 2) * first + both) / math.comb(G, 2)


def in_groups(one: SimpleNamespace, name: str) -> tuple[Tensor, Tensor]:
    """Mean and variance of what the file makes of groups, by all groups."""
    index, orders = groups(len(one.p))
    chance = (orders + one.p.log()[index].sum(1)).exp()  # [M]
    module = toy.load(name)
    A = module.advantages(one.reward[index])  # [M, G]
    if name == "vcpo":
        A = A - module.baseline_shift(one.log_w[index], one.norms[index], A)[:, None]
        A = A * one.reward[index].std(dim=1, correction=0, keepdim=True)  # without the division
    share = torch.zeros(len(A), len(one.p), dtype=torch.float64)
    share.scatter_add_(1, index, A / G)  # [M, K]
    return moments(chance, share @ one.parts.sum(1))


def by_prefix(one: SimpleNamespace) -> Tensor:
    """The parts of each response's gradient, by the prefix before them: `[K, nodes, D]`."""
    K, T, D = one.parts.shape
    found = torch.zeros(K, int(one.nodes.max()) + 1, D, dtype=torch.float64)
    return found.scatter_add_(1, one.nodes[..., None].expand(K, T, D), one.parts)


def least(one: SimpleNamespace, parts: Tensor) -> Tensor:
    """The estimate of each response `[K, D]` with the numbers b that leave the least variance, one
    for each of its `parts [K, M, D]`."""
    earned = (one.parts.sum(1) * one.reward[:, None])[:, None]  # [K, 1, D]
    M, c = covariance(one.p, parts, parts), covariance(one.p, parts, earned)
    b = torch.linalg.pinv(M, rtol=1e-10, hermitian=True) @ c  # [M, 1]
    return earned[:, 0] - (parts * b).sum(1)


def measure(arm: str, seed: int) -> dict:
    """Of each estimate the variance of a batch's gradient, divided by RLOO's."""
    depth, age, loss = ARMS[arm]
    draw = torch.Generator().manual_seed(seed)
    theta = torch.randn(FEATURES, 3, generator=draw, dtype=torch.float64) / FEATURES**0.5
    asked = []
    for _ in range(P):
        asked.append(random_prompt(depth, age == "stale", loss == "as written", draw, theta))
    whole = [one.parts.sum(1)[:, None] for one in asked]  # [K, 1, D] each
    up, under = 0.0, 0.0  # of the best constant
    for one, a in zip(asked, whole):
        up += covariance(one.p, a, a * one.reward[:, None, None]).item()
        under += covariance(one.p, a, a).item()
    heavy = [one.p * (2 * one.log_w).exp() * one.norms**2 for one in asked]  # [K] each
    baselines = {
        "no baseline": [0.0] * P,
        "known mean": [one.value for one in asked],
        "known b of VCPO": [h @ one.reward / h.sum() for h, one in zip(heavy, asked)],
        "best constant": [up / under] * P,
    }
    vectors = {  # name -> the estimate of each response, for each prompt
        name: [a[:, 0] * (one.reward - b)[:, None] for one, a, b in zip(asked, whole, numbers)]
        for name, numbers in baselines.items()
    }
    vectors["best per prompt"] = [least(one, a) for one, a in zip(asked, whole)]
    vectors["best per token"] = [least(one, by_prefix(one)) for one in asked]
    vectors["perfect critic"] = [(one.parts * one.critic[..., None]).sum(1) for one in asked]

    found = {"RLOO": [rloo(one) for one in asked]}  # name -> mean and variance for each prompt
    if len(asked[0].p) <= ENOUGH:
        for name, file in FILES.items():
            found[name] = [in_groups(one, file) for one in asked]
    for name, estimates in vectors.items():
        both = [moments(one.p, x) for one, x in zip(asked, estimates)]
        found[name] = [(mean, variance / G) for mean, variance in both]
    means = {name: sum(mean for mean, _ in prompts) for name, prompts in found.items()}  # [D] each
    target = means["RLOO"]
    numbers = {name: sum(variance for _, variance in prompts) for name, prompts in found.items()}
    for name in numbers.keys() & FILES.keys():
        numbers[name] = numbers[name] / (means[name] @ target / target.square().sum()) ** 2
    numbers = {name: float(x / numbers["RLOO"]) for name, x in numbers.items()}
    numbers["cosine"] = float(torch.cosine_similarity(means["best per token"], target, dim=0))
    numbers["ESS/B"] = np.mean([1 / float(one.p @ (2 * one.log_w).exp()) for one in asked])
    return numbers


def rows(results: dict) -> list[list[str]]:
    names = list(dict.fromkeys(name for runs in results.values() for name in runs[0]))
    table = [["variance / RLOO's", *results]]
    for name in names:
        cells = [lab.cell(runs, name) if name in runs[0] else "–" for runs in results.values()]
        table.append([name, *cells])
    return table


SHOWN = ("no baseline", "known mean", "best constant", "best per prompt", "best per token")
SHOWN += ("perfect critic",)
COLOURS = {"short, on-policy": lab.BLUE, "long, on-policy": lab.BLACK}
COLOURS |= {"short, stale": lab.GREEN, "long, stale": lab.ORANGE}


def draw(results: dict) -> object:
    """Medians over tasks, and the middle 80% of them."""
    figure, axes = lab.sheet(TITLE, "plain loss", "losses as written", width=11)
    for axis, loss in zip(axes, ("plain", "as written")):
        for place, (kind, colour) in enumerate(COLOURS.items()):
            for y, name in enumerate(reversed(SHOWN)):
                middle, low, high = lab.over(results[f"{kind}, {loss}"], name)
                at = y + 0.27 - 0.18 * place
                axis.plot([low, high], [at, at], color=colour, linewidth=2, alpha=0.4)
                axis.plot(middle, at, "o", color=colour, markersize=6)
        axis.axvline(1, color=lab.GREY, linestyle=":")
        axis.set(xlim=(0, 2.2), xlabel="variance, of RLOO's (dotted)")
        axis.set_yticks(range(len(SHOWN)), labels=reversed(SHOWN) if loss == "plain" else ())
    lab.key(axes[1], COLOURS, 0.62)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])
