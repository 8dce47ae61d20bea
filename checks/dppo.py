"""DPPO: outside numbers, the divergences, and the anchor μ."""

import itertools
import math
from types import ModuleType

import minirl as minirl_file
import torch

from . import EQUAL, FIXTURE, advantages_match, busy_batch, check_equal_rewards, counts
from . import gradient_law, loss_of, minirl, no_kl, response_tokens, terms, toy_batch, two_responses
from . import weighs, weight, written_here


def matches_mean(module: ModuleType, case: str, **flags: object) -> None:
    """As a mean over tokens, verl's numbers; the file's own divisor is the responses."""
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
    """M min(π_θ/μ, 20) Â, M = 0 only beyond δ and outward; π_old plays no part."""
    places = (0.001, 0.04, 0.2, 0.5, 0.8, 0.99)
    for kind, mu, p, old in itertools.product(("tv", "kl"), places, places, (0.1, 0.9)):
        for advantage, delta in itertools.product((1.0, -1.0), (0.0, 0.31)):
            beyond = divergence(kind, mu, p) > (delta or {"tv": 0.15, "kl": 0.05}[kind])
            masked = beyond and (p - mu) * advantage > 0
            flags = {"trust_region": kind, "delta": delta}
            expected = 0 if masked else min(p / mu, 20.0) * advantage
            weighs(module, p / old, advantage, expected, 1e-9, old=old, mu=mu, **flags)


def check_rare_tokens_move_and_common_ones_are_held(module: ModuleType) -> None:
    """minirl.py cuts 0.001 -> 0.0013 and passes 0.8 -> 0.99; here it is the other way round."""
    for mu, p, ours, theirs in ((0.001, 0.0013, 1.3, 0), (0.8, 0.99, 0, 0.99 / 0.8)):
        for kind in ("tv", "kl"):
            found = weight(module, p / mu, 1.0, mu, mu, trust_region=kind)
            assert abs(found - ours) < 1e-9
        assert abs(weight(minirl_file, p / mu, 1.0, mu, mu) - theirs) < 1e-9


def check_a_coin_bounds_from_below(module: ModuleType) -> None:
    """Whole distributions over 6 tokens: a token is masked only if they are further apart than δ,
    and by Pinsker KL within 0.05 keeps TV within 0.16."""
    generator = torch.Generator().manual_seed(2)
    seen = 0
    for _ in range(200):
        mu, p = torch.randn(2, 6, generator=generator, dtype=torch.float64).softmax(1)
        p = 0.6 * mu + 0.4 * p
        whole = {"tv": (p - mu).abs().sum() / 2, "kl": (mu * (mu / p).log()).sum()}
        assert divergence("tv", mu[0], p[0]) <= math.sqrt(divergence("kl", mu[0], p[0]) / 2) + 1e-12
        for kind, delta in (("tv", 0.15), ("kl", 0.05)):
            advantage = 1.0 if p[0] > mu[0] else -1.0
            ratio, flags = float(p[0] / mu[0]), {"trust_region": kind, "delta": delta}
            if weight(module, ratio, advantage, float(mu[0]), float(mu[0]), **flags) == 0:
                assert whole[kind] > delta
                seen += 1
    assert seen > 10


def check_sure_tokens(module: ModuleType) -> None:
    """Probabilities of 1 give no NaN: what fell from 1 is masked beyond δ, and not before."""
    for kind in ("tv", "kl"):
        for dtype in (torch.float32, torch.float64):
            for p, expected in ((1.0, -1.0), (0.97, -0.97), (0.5, 0.0)):
                logp = torch.tensor([[math.log(p)]], dtype=dtype, requires_grad=True)
                rest = {"old_logp": torch.zeros(1, 1, dtype=dtype), "mask": torch.ones(1, 1)}
                rest["advantages"] = torch.tensor([-1.0])
                loss_of(module, no_kl(module, trust_region=kind), logp=logp, **rest)[0].backward()
                assert abs(-logp.grad.item() - expected) < 1e-6


def check_two_sided(module: ModuleType) -> None:
    """prime-rl's IPO: masked beyond δ whichever way the token moved, and no token where it moved
    less; the sign of Â plays no part."""
    flags = {"two_sided": True, "delta": 0.31, "is_cap": 1e9}
    for mu, p in itertools.product((0.001, 0.2, 0.5, 0.8, 0.99), repeat=2):
        for advantage in (1.0, -1.0):
            expected = 0.0 if abs(p - mu) > 0.31 else p / mu * advantage
            weighs(module, p / mu, advantage, expected, 1e-9, old=mu, mu=mu, **flags)


def check_log_square(module: ModuleType) -> None:
    """-2 τ log(π_θ/μ) is added to every token's weight, to the masked ones', too, and to those of
    Â = 0; π_old plays no part."""
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


def check_advantages(module: ModuleType) -> None:
    """The reward minus the group's mean, nothing else: |∇J| is as p (1 - p)."""
    advantages_match(module, "mean_only", 1e-12)
    gradient_law(module, 1.0)


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


CHECKS = [*written_here(globals()), check_equal_rewards]
RETURN, TV = "return -per_response.sum(), mask.new_tensor(len(mask))", "(p - mu).abs()"
SIDES = "out_above, out_below = beyond & (p > mu), beyond & (p < mu)"
KL = "(1 - mu) * others - mu * log_weight"
MUTANTS = {
    **EQUAL,
    **minirl.COUNTED,
    "weight before the cap": ("((weight * mask).sum()", "((uncapped * mask).sum()"),
    "anchored at π_old": (
        "p, mu = logp.detach().exp(), rollout_logp.exp()",
        "p, mu = logp.detach().exp(), old_logp.exp()",
    ),
    "weight from π_old": ("logp.detach() - rollout_logp", "logp.detach() - old_logp"),
    "a ratio's bound": (TV, "(p / mu - 1).abs()"),
    "half of the whole": (TV, "(p - mu).abs() / 2"),
    "KL the other way": (KL, "p * log_weight - (1 - p) * others"),
    "one side of the coin": (KL, "-mu * log_weight"),
    "NaN is within": (
        "~(divergence <= (args.delta or DELTA[args.trust_region]))",
        "divergence > (args.delta or DELTA[args.trust_region])",
    ),
    "no care at 1": ("(1 - mu + 1e-8) / (1 - p + 1e-8)", "(1 - mu) / (1 - p)"),
    "masked inward, too": (SIDES, "out_above, out_below = beyond, beyond"),
    "masked inward only": (SIDES, "out_above, out_below = beyond & (p < mu), beyond & (p > mu)"),
    "the regions' δ swapped": ('{"tv": 0.15, "kl": 0.05}', '{"tv": 0.05, "kl": 0.15}'),
    "minirl's cap": ("is_cap: Positive = 20.0", "is_cap: Positive = 5.0"),
    "no cap": (".clamp(max=args.is_cap)", ""),
    "weight not detached": ("log_weight = logp.detach()", "log_weight = logp"),
    "no mask": ("~cut * weight", "weight"),
    "two-sided always": ("if args.two_sided:", "if True:"),
    "two-sided never": ("if args.two_sided:", "if False:"),
    "two-sided inward alone": ("cut = beyond  #", "cut = beyond & ~cut  #"),
    "the square from π_old": ("* (logp - rollout_logp) ** 2", "* (logp - old_logp) ** 2"),
    "the square not of masked tokens": (
        "args.log_square * (logp - rollout_logp) ** 2",
        "args.log_square * ~cut * (logp - rollout_logp) ** 2",
    ),
    "a KL for the square": ("* (logp - rollout_logp) ** 2", "* (logp - rollout_logp)"),
    "the square pushes away": ("objective - args.log_square", "objective + args.log_square"),
    "ratio in place of log π": ("~cut * weight * A * logp", "~cut * weight * A * logp.exp()"),
    "token-mean": (RETURN, "return -per_response.sum(), mask.sum()"),
    "std": ("return centred  #", "return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  #"),
    "sign": ("return -per_response.sum()", "return per_response.sum()"),
}
