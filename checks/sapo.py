"""SAPO: outside numbers, the published weights, and r = 1."""

from dataclasses import replace
from types import ModuleType

import torch

from . import RESPONSE_MEAN, ZSCORE, ZSCORES, busy_batch, check_parts_add_up, counts
from . import loss_of, matches, one, response_tokens, weighs, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with another implementation at the paper's temperatures."""
    matches(module, "sapo_tau1.0_1.05_seqmean")


TABLE = {0.5: (0.4700, 0.4671), 0.75: (0.7384, 0.7372), 0.9: (0.8978, 0.8975), 1.0: (1.0, 1.0)}
TABLE |= {1.1: (1.0973, 1.0970), 1.3: (1.2712, 1.2683), 2.0: (1.5729, 1.5362)}
TABLE |= {4.0: (0.7228, 0.6304)}


def check_weights(module: ModuleType) -> None:
    """r Â sech²(τ (r - 1) / 2), and the published table."""
    for ratio, (up, down) in TABLE.items():
        weighs(module, ratio, 1.0, up, 6e-5)
        weighs(module, ratio, -1.0, -down, 6e-5)
    exact = 1.7 * 0.6 / torch.cosh(one(2.5 * 0.7 / 2)).item() ** 2
    weighs(module, 1.7, 0.6, exact, tau_pos=2.5)


def check_is_normalised_at_one(module: ModuleType) -> None:
    """At r = 1 the weight is Â for every τ."""
    for tau in (0.1, 1.0, 1.05, 5.0):
        weighs(module, 1.0, 0.7, 0.7, tau_pos=tau)
        weighs(module, 1.0, -0.7, -0.7, tau_neg=tau)


def check_statistics(module: ModuleType) -> None:
    """f'(r) of response tokens: gate_pos is its mean where Â > 0, gate_neg where Â < 0, gate_closed
    the mean of 1 - f'(r) over all."""
    batch = busy_batch()
    t, flags = response_tokens(batch), {"tau_pos": 1.5, "tau_neg": 2.5}
    tau = torch.where(t.A > 0, 1.5, 2.5).double()
    gate = 1 / torch.cosh(tau * (t.r - 1) / 2) ** 2
    up, down = t.A > 0, t.A < 0
    expected = {"gate_pos": (gate[up].sum(), up.sum()), "gate_neg": (gate[down].sum(), down.sum())}
    expected["gate_closed"] = (1 - gate).sum(), t.M
    counts(loss_of(module, replace(module.Args(), **flags), **batch)[1], expected)


CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
SIGMOID = "torch.sigmoid(tau * (ratio - 1))"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
MUTANTS = {
    **ZSCORE,
    **RESPONSE_MEAN,
    "μ for π_old": (
        "ratio = (logp - batch.old_logp).exp()",
        "ratio = (logp - batch.rollout_logp).exp()",
    ),
    "τ not divided out": ("4 / tau * torch.sigmoid", "4 * torch.sigmoid"),
    "gate_closed without the mask": ("((1 - gate) * mask).sum()", "(1 - gate).sum()"),
    "gates swapped": (
        "up, down = (A > 0) * mask, (A < 0) * mask",
        "up, down = (A < 0) * mask, (A > 0) * mask",
    ),
    "temperatures swapped": ("where(A > 0", "where(A < 0"),
    "detached": (SIGMOID, f"{SIGMOID}.detach() * (1 + 0 * logp)"),
    "log-ratio": (SIGMOID, "torch.sigmoid(tau * (logp - batch.old_logp))"),
    "no mask": (AVERAGE, "objective.mean(dim=1)"),
}
