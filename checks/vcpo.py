"""VCPO: the loss, the baseline of least variance, the effective sample size in log space."""

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from . import EQUAL, advantages_match, busy_batch, check_equal_rewards, counts, loss_of, near
from . import written_here


def check_weights(module: ModuleType) -> None:
    """min(w, 8) Â / |y| / B with w of the whole response against μ, for small, large and extreme
    weights."""
    for shift in (0.0, 0.3, 2.0, 300.0, -300.0):
        tensors = busy_batch()
        tensors["rollout_logp"] = tensors["rollout_logp"] - shift * tensors["mask"]
        logp = tensors["logp"].requires_grad_()
        loss, stats = loss_of(module, module.Args(), **tensors)
        loss.backward()
        log_w = ((logp.detach() - tensors["rollout_logp"]) * tensors["mask"]).sum(1).clamp(-20, 20)
        weight = log_w.exp().clamp(max=8.0) * tensors["advantages"] / tensors["mask"].sum(1) / 6
        assert torch.allclose(-logp.grad, weight[:, None] * tensors["mask"], rtol=1e-9, atol=0)
        assert torch.isclose(stats["weight_max"][0], log_w.exp().max())
        near(loss, (logp.grad * logp).sum(), "the loss", 1e-9 * weight.abs().max())


def check_advantages(module: ModuleType) -> None:
    """z-scores with the population's standard deviation, 0 for a group of equal rewards (the
    fixture adds 1e-6 to the std)."""
    advantages_match(module, "ddof0_eps1e-6", 2e-5)


def check_baseline(module: ModuleType) -> None:
    """With equal weights and norms it is the group mean, a shift of 0. Otherwise it is Σ w²|g|² Â /
    Σ w²|g|², at any magnitude."""
    advantages = module.advantages(torch.tensor([[1.0, 0, 0, 1, 0]], dtype=torch.float64))[0]
    same = torch.full((5,), 3.7, dtype=torch.float64)
    assert abs(module.baseline_shift(same, same, advantages)) < 1e-12
    log_w = torch.tensor([0.1, -0.5, 0.3, 0.0, 1.0], dtype=torch.float64)
    norms = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    weight = log_w.exp() ** 2 * norms**2
    expected = (weight * advantages).sum() / weight.sum()
    assert torch.isclose(module.baseline_shift(log_w, norms, advantages), expected)
    assert module.baseline_shift(400 * log_w, norms, advantages).isfinite()


def check_baseline_has_the_least_variance(module: ModuleType) -> None:
    """One-token answers, enumerated, and uncapped weights: the variance of w g (R - b) over μ is
    least at b, compared with a grid of others."""
    generator = torch.Generator().manual_seed(1)
    theta, moved = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 1], dtype=torch.float64)
    mu, pi = theta.log_softmax(0), (theta + 0.5 * moved).log_softmax(0)
    gradients = torch.eye(6, dtype=torch.float64) - pi.exp()  # ∇_θ log π(a), a row each
    norms, w = gradients.norm(dim=1), (pi - mu).exp()
    # An outcome stands in the "group" as often as μ draws it: fold that into the weight
    best = module.baseline_shift(pi - mu + mu / 2, norms, rewards)

    def variance(b: Tensor) -> float:
        estimate = (w * (rewards - b))[:, None] * gradients
        mean = mu.exp() @ estimate
        return float(mu.exp() @ estimate.square().sum(1) - mean.square().sum())

    others = [variance(best + delta) for delta in (-0.3, -0.1, -0.03, 0.03, 0.1, 0.3)]
    assert variance(best) < min(others) and variance(best) < variance(mu.exp() @ rewards)


def check_ess(module: ModuleType) -> None:
    """1 on-policy, (Σw)²/(B Σw²) in general, finite for log weights of ±500, where the plain
    formula gives NaN."""
    assert torch.isclose(module.ess_ratio(torch.zeros(64)), torch.tensor(1.0))
    log_w = torch.tensor([0.5, -1.0, 0.1, 2.0], dtype=torch.float64)
    w = log_w.exp()
    assert torch.isclose(module.ess_ratio(log_w), w.sum() ** 2 / (w**2).sum() / 4)
    extreme = torch.tensor([500.0, -500.0, 0.0, 499.0])
    assert 0.25 < module.ess_ratio(extreme) < 0.5
    assert torch.isclose(module.ess_ratio(extreme - 700), module.ess_ratio(extreme), rtol=1e-4)
    released = extreme.exp().sum() ** 2 / (extreme.exp().square().sum() + 1e-8) / 4
    # No damping at all, exactly when it is needed
    assert released.isnan() and min(1.0, released.item()) == 1.0


def check_statistics(module: ModuleType) -> None:
    """weight is the mean over responses of min(w, cap), w of the whole response against μ;
    weight_max the largest w before the cap."""
    tensors = busy_batch()
    log_w = ((tensors["logp"] - tensors["rollout_logp"]) * tensors["mask"]).sum(1)
    expected = {"weight": (log_w.exp().clamp(max=1.5).sum(), 6)}
    expected["weight_max"] = log_w.exp().max(), None
    counts(loss_of(module, replace(module.Args(), is_cap=1.5), **tensors)[1], expected)


READS = ("rollout_logp",)  # columns that the loss uses
CHECKS = [*written_here(globals()), check_equal_rewards]
LOG_WEIGHT = "((logp.detach() - rollout_logp) * mask)"
AVERAGE = "(logp * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
HEAVY = "2 * log_w + 2 * norms.clamp(min=1e-30).log()"
ESS = "(2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp()"
MUTANTS = {
    **EQUAL,
    "weight_max after the cap": ("log_w.clamp(max=20).exp()]).max()", "weight]).max()"),
    "mean for sum in the weight": (f"{LOG_WEIGHT}.sum(dim=1)", f"{LOG_WEIGHT}.mean(dim=1)"),
    "π_old for μ": (
        "log_w = log_weight(logp, rollout_logp, mask)  # [n]",
        "log_w = log_weight(logp, old_logp, mask)  # [n]",
    ),
    "no cap": (".exp().clamp(max=args.is_cap)", ".exp()"),
    "weight not detached": (LOG_WEIGHT, "((logp - rollout_logp) * mask)"),
    "sum over tokens": (AVERAGE, "(logp * mask).sum(dim=1)"),
    "sign": ("return -(weight", "return (weight"),
    "sample std": (", correction=0)", ")"),
    "norms ignored": (HEAVY, "2 * log_w + 0 * norms"),
    "ESS in plain space": (ESS, "(log_w.exp().sum() ** 2 / log_w.exp().square().sum())"),
    "ESS not divided by B": (".exp() / len(log_w)", ".exp()"),
}
