"""VESPO: outside numbers, the shape of φ(W), and W as the product of all ratios."""

import itertools
import math
from types import ModuleType

import torch

from . import TOKEN_MEAN, ZSCORE, ZSCORES, busy_batch, check_parts_add_up, counts, loss_of
from . import matches, no_kl, one, weighs, weight, written_here


def phi(W: float, k: float, lam: float) -> float:
    return W**k * math.exp(lam * (1 - W))


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL's vespo."""
    matches(module, "vespo_default")


def check_hill(module: ModuleType) -> None:
    """φ(W) Â of a one-token response, for rare and common ones; 1 at W = 1, its maximum at k /
    λ."""
    for old, W in itertools.product((1.0, 0.001), (0.01, 0.5, 2 / 3, 1.0, 1.5, 2.0, 6.0)):
        for advantage, k, lam in ((1.0, 2, 3), (-1.0, 3, 2)):
            weighs(module, W, advantage, advantage * phi(W, k, lam), old=old)
            top = advantage * weight(module, k / lam, advantage, old)
            assert advantage * weight(module, W, advantage, old) <= top + 1e-12
        flags = {"k_pos": 1.5, "lambda_pos": 0.5}
        assert abs(weight(module, W, 1.0, old, **flags) - phi(W, 1.5, 0.5)) < 1e-7
    assert abs(weight(module, 1.0, 1.0) - 1) < 1e-12 and abs(weight(module, 1.0, -1.0) + 1) < 1e-12


def check_extremes_weigh_nothing(module: ModuleType) -> None:
    """A long response far from π_old has weight 0: neither NaN nor infinite."""
    mask = torch.ones(2, 500, dtype=torch.float32)
    rest = {"old_logp": 0 * mask - 60, "mask": mask, "advantages": torch.tensor([1.0, -1.0])}
    for moved in (2.0, -2.0, 50.0, -50.0):
        logp = (rest["old_logp"] + moved).requires_grad_()
        loss_of(module, no_kl(module), logp=logp, **rest)[0].backward()
        assert (logp.grad.abs() < 1e-10).all()
    for moved, W in ((one(15.0, 15.0), 20.0), (one(50.0, -30.0), 0.0)):  # the authors' clamps
        logp, A = moved.clone().requires_grad_(), one(1.0)[0]
        rest = {"old_logp": 0 * moved, "mask": 0 * moved + 1, "advantages": A}
        flags = {"k_pos": 1.0, "lambda_pos": 0.0}  # φ = W
        loss_of(module, no_kl(module, **flags), logp=logp, **rest)[0].backward()
        assert torch.allclose(logp.grad, -math.exp(W) * rest["mask"] / moved.numel())


def check_statistics(module: ModuleType) -> None:
    """Of responses: reshaped is the mean of |φ - 1|, gate_pos that of φ where Â > 0, gate_neg where
    Â < 0, weight_max the largest W before φ."""
    batch = busy_batch()
    A, mask = batch["advantages"], batch["mask"]
    log_W = ((batch["logp"] - batch["old_logp"]) * mask).sum(1)
    k, lam = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
    hill, up, down = (k * log_W + lam * (1 - log_W.exp())).exp(), A > 0, A < 0
    expected = {"gate_pos": (hill[up].sum(), up.sum()), "gate_neg": (hill[down].sum(), down.sum())}
    expected |= {"reshaped": ((hill - 1).abs().sum(), 6), "weight_max": (log_W.exp().max(), None)}
    counts(loss_of(module, no_kl(module), **batch)[1], expected)


CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
SUM = "(log_ratio * mask).sum(dim=1, keepdim=True)"
OBJECTIVE = "phi * A * logp"
MUTANTS = {
    **ZSCORE,
    **TOKEN_MEAN,
    "μ for π_old": (
        "(logp.detach() - batch.old_logp).clamp(-20, 20)",
        "(logp.detach() - batch.rollout_logp).clamp(-20, 20)",
    ),
    "reshaped by signs": ("((phi - 1).abs().sum(), n)", "((phi - 1).sum(), n)"),
    "gate_neg of Â > 0": ("(phi * (A < 0)).sum()", "(phi * (A > 0)).sum()"),
    "a root": (SUM, f"({SUM} / mask.sum(dim=1, keepdim=True))"),
    "padding in W": (SUM, "log_ratio.sum(dim=1, keepdim=True)"),
    "weight not detached": ("(logp.detach() - batch.old_logp)", "(logp - batch.old_logp)"),
    "signs swapped": ("A >= 0, args.k_pos, args.k_neg", "A >= 0, args.k_neg, args.k_pos"),
    "W not clamped": (f"{SUM}.clamp(-20, 20)", SUM),
    "ratio in place of log π": (OBJECTIVE, "phi * A * (logp - batch.old_logp).exp()"),
}
