"""DPPO: outside numbers, the divergences, and the anchor μ."""

import itertools
import math
from types import ModuleType

import torch

from . import CENTRE, CENTRED, FIXTURE, RESPONSE_MEAN, busy_batch, check_parts_add_up, counts
from . import loss_of, minirl, no_kl, response_tokens, terms, toy_batch, two_responses, weighs
from . import weight, written_here


def matches_mean(module: ModuleType, case: str, **flags: object) -> None:
    """As a mean over tokens, the numbers are verl's; the file's own divisor is the responses."""
    expected, batch = FIXTURE["cases"][case], toy_batch()
    batch["logp"].requires_grad_()
    loss = terms(module, no_kl(module, **flags), **batch)[0] / batch["mask"].sum()
    loss.backward()
    assert abs(loss.item() - expected["loss"]) < 1e-8
    wanted = torch.tensor(expected["grad"], dtype=torch.float64)
    assert torch.allclose(batch["logp"].grad, wanted, rtol=0, atol=1e-8)


def check_fixture(module: ModuleType) -> None:
    """Summed values and gradients agree with verl's dppo_tv and dppo_kl."""
    matches_mean(module, "dppo_tv_0.2_tokenmean", trust_region="tv", delta=0.2)
    matches_mean(module, "dppo_kl_0.05_tokenmean", trust_region="kl", delta=0.05)


def divergence(kind: str, mu: float, p: float) -> float:
    if kind == "tv":
        return abs(p - mu)
    return mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu) / (1 - p))


def check_weights(module: ModuleType) -> None:
    """M min(π_θ/μ, 20) Â, M = 0 only beyond δ in the direction of Â; π_old does not matter."""
    places = (0.001, 0.04, 0.2, 0.5, 0.8, 0.99)
    for kind, mu, p, old in itertools.product(("tv", "kl"), places, places, (0.1, 0.9)):
        for advantage, delta in itertools.product((1.0, -1.0), (0.0, 0.31)):
            beyond = divergence(kind, mu, p) > (delta or {"tv": 0.15, "kl": 0.05}[kind])
            masked = beyond and (p - mu) * advantage > 0
            flags = {"trust_region": kind, "delta": delta}
            expected = 0 if masked else min(p / mu, 20.0) * advantage
            weighs(module, p / old, advantage, expected, 1e-9, old=old, mu=mu, **flags)


def check_sure_tokens(module: ModuleType) -> None:
    """Probabilities of 1 give no NaN: a token that fell from 1 is masked beyond δ, and not
    before."""
    for kind in ("tv", "kl"):
        for dtype in (torch.float32, torch.float64):
            for p, expected in ((1.0, -1.0), (0.97, -0.97), (0.5, 0.0)):
                logp = torch.tensor([[math.log(p)]], dtype=dtype, requires_grad=True)
                rest = {"old_logp": torch.zeros(1, 1, dtype=dtype), "mask": torch.ones(1, 1)}
                rest["advantages"] = torch.tensor([-1.0])
                loss_of(module, no_kl(module, trust_region=kind), logp=logp, **rest)[0].backward()
                assert abs(-logp.grad.item() - expected) < 1e-6


def check_two_sided(module: ModuleType) -> None:
    """prime-rl's IPO: tokens beyond δ are masked in both directions, and no others; the sign of Â
    does not matter."""
    flags = {"two_sided": True, "delta": 0.31, "is_cap": 1e9}
    for mu, p in itertools.product((0.001, 0.2, 0.5, 0.8, 0.99), repeat=2):
        for advantage in (1.0, -1.0):
            expected = 0.0 if abs(p - mu) > 0.31 else p / mu * advantage
            weighs(module, p / mu, advantage, expected, 1e-9, old=mu, mu=mu, **flags)


def check_log_square(module: ModuleType) -> None:
    """-2 κ log(π_θ/μ) is added to every token's weight, also to masked ones and to those of Â = 0;
    π_old does not matter."""
    for mu, p, advantage in itertools.product((0.1, 0.4, 0.9), (0.1, 0.5, 0.9), (1.0, 0.0, -1.0)):
        plain = weight(module, p / 0.3, advantage, 0.3, mu)
        expected = plain - 2 * 0.05 * math.log(p / mu)
        weighs(module, p / 0.3, advantage, expected, 1e-9, old=0.3, mu=mu, log_square=0.05)


def check_sums_tokens(module: ModuleType) -> None:
    """A sum over tokens, a mean over responses; padding counts for nothing."""
    batch = two_responses()
    batch["old_logp"] = batch["old_logp"] - 3
    logp = (batch["logp"] - 3).requires_grad_()
    loss_of(module, no_kl(module), **batch | {"logp": logp})[0].backward()
    ratio = (logp.detach() - batch["old_logp"]).exp()
    expected = -ratio * batch["advantages"][:, None] * batch["mask"] / 2
    assert torch.allclose(logp.grad, expected)


def check_statistics(module: ModuleType) -> None:
    """Of all response tokens: masked_share those with M = 0, masked_above those of them with Â > 0,
    masked_below those with Â < 0; weight is the mean weight, capped; weight_max the largest π_θ/μ
    before its cap."""
    batch, flags = busy_batch(), {"trust_region": "tv", "delta": 0.03, "is_cap": 1.3}
    t = response_tokens(batch)
    p = t.old * t.r
    mu = p / t.w
    above, below = (t.A > 0) & (p - mu > 0.03), (t.A < 0) & (mu - p > 0.03)
    assert above.any() and below.any()
    expected = {"masked_share": ((above | below).sum(), t.M), "masked_above": (above.sum(), t.M)}
    expected |= {"masked_below": (below.sum(), t.M), "weight_max": (t.w.max(), None)}
    expected["weight"] = t.w.clamp(max=1.3).sum(), t.M
    counts(loss_of(module, no_kl(module, **flags), **batch)[1], expected)


READS = ("rollout_logp",)  # columns that the loss uses
CHECKS = [*written_here(globals()), *CENTRED, check_parts_add_up]
TV = "(p - mu).abs()"
SIDES = "out_above, out_below = beyond & (p > mu), beyond & (p < mu)"
MUTANTS = {
    **CENTRE,
    **RESPONSE_MEAN,
    **minirl.COUNTED,
    "anchored at π_old": (
        "p, mu = logp.detach().exp(), batch.rollout_logp.exp()",
        "p, mu = logp.detach().exp(), batch.old_logp.exp()",
    ),
    "a ratio's bound": (TV, "(p / mu - 1).abs()"),
    "NaN is within": (
        "~(divergence <= (args.delta or DELTA[args.trust_region]))",
        "divergence > (args.delta or DELTA[args.trust_region])",
    ),
    "masked inward, too": (SIDES, "out_above, out_below = beyond, beyond"),
    "weight not detached": ("log_weight = logp.detach()", "log_weight = logp"),
    "two-sided inward alone": ("cut = beyond  #", "cut = beyond & ~cut  #"),
    "the square from π_old": (
        "* (logp - batch.rollout_logp) ** 2",
        "* (logp - batch.old_logp) ** 2",
    ),
}
