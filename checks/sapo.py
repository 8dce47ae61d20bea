"""SAPO: outside numbers, and r = 1."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, response_mean, share
from .harness import ZSCORES, near, weight


def temperatures(b: Batch) -> Tensor:
    right = (b.A > 0).double()[:, None]  # [n, 1]
    return b.args.tau_pos * right + b.args.tau_neg * (1 - right)


def objective(b: Batch) -> tuple[Tensor, int]:
    """f(r) = 4/τ σ(τ (r - 1)) replaces the ratio."""
    tau = temperatures(b)
    f = 4 / tau / (1 + (-tau * (b.r - 1)).exp())
    return response_mean(f * b.A[:, None], b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """The mean of f'(r) where Â > 0 and where Â < 0, and of 1 - f'(r) over all tokens."""
    gate, A = 1 / torch.cosh(temperatures(b) * (b.r - 1) / 2) ** 2, b.A[:, None]
    return {
        "gate_pos": share(gate, b.mask * (A > 0)),
        "gate_neg": share(gate, b.mask * (A < 0)),
        "gate_closed": share(1 - gate, b.mask),
    }


CASES = [{}, {"tau_pos": 1.5, "tau_neg": 2.5}]


def check_is_normalised_at_one(module: ModuleType) -> None:
    """At r = 1 the weight is Â for every τ."""
    for tau in (0.1, 1.0, 1.05, 5.0):
        near(weight(module, 1.0, 0.7, tau_pos=tau), 0.7, f"the weight at r = 1, Â = 0.7, τ = {tau}")
        near(weight(module, 1.0, -0.7, tau_neg=tau), -0.7, f"the one at Â = -0.7, τ = {tau}")


def check_gate_of_a_response(module: ModuleType) -> None:
    """For small steps, the mean gate of tokens with log-ratios x is 1 - τ²/4 ((mean x)² + var x).
    So it is a gate on the response's log s = mean x only if its tokens move alike."""
    x = 5e-3 * torch.tensor([2.0, -1.0, 4.0, 3.0], dtype=torch.float64)
    for tau in (1.0, 3.0):
        weights = torch.stack([weight(module, float(r), 1.0, tau_pos=tau) for r in x.exp()])
        taken = 1 - (weights.flatten() / x.exp()).mean()
        expected = tau**2 / 4 * (x.mean() ** 2 + x.var(correction=0))
        near(taken / expected, 1.0, f"what the gate takes, τ = {tau}", 2e-2)


FIXTURES = {"sapo_tau1.0_1.05_seqmean": {}}
SHARED = ZSCORES
SIGMOID = "torch.sigmoid(tau * (ratio - 1))"
MUTANTS = {
    "τ not divided out": ("4 / tau * torch.sigmoid", "4 * torch.sigmoid"),
    "temperatures swapped": ("where(A > 0", "where(A < 0"),
    "detached": (SIGMOID, f"{SIGMOID}.detach() * (1 + 0 * logp)"),
    "log-ratio": (SIGMOID, "torch.sigmoid(tau * (logp - batch.old_logp))"),
}


RUN = Run(stored={"grad_clip": 5.0})
