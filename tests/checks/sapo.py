"""SAPO: outside numbers, the published weights, limits of the temperature."""

from types import ModuleType

import grpo
import torch

from . import gradient, loss_of, matches, one, two_responses, weight, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with another implementation at the paper's temperatures."""
    matches(module, "sapo_tau1.0_1.05_seqmean")


def check_by_hand(module: ModuleType) -> None:
    """The loss of two responses, by hand."""
    assert abs(loss_of(module, module.Args(), **two_responses())[0].item() + 0.099864) < 1e-6


TABLE = {0.5: (0.4700, 0.4671), 0.75: (0.7384, 0.7372), 0.9: (0.8978, 0.8975), 1.0: (1.0, 1.0)}
TABLE |= {1.1: (1.0973, 1.0970), 1.3: (1.2712, 1.2683), 2.0: (1.5729, 1.5362)}
TABLE |= {4.0: (0.7228, 0.6304)}


def check_weights(module: ModuleType) -> None:
    """r Â sech²(τ (r - 1) / 2), and the published table."""
    for ratio, (up, down) in TABLE.items():
        assert abs(weight(module, ratio, 1.0) - up) < 6e-5
        assert abs(weight(module, ratio, -1.0) + down) < 6e-5
    exact = 1.7 * 0.6 / torch.cosh(one(2.5 * 0.7 / 2)).item() ** 2
    assert abs(weight(module, 1.7, 0.6, tau_pos=2.5) - exact) < 1e-12


def check_is_normalised_at_one(module: ModuleType) -> None:
    """At r = 1 the weight is Â for every τ."""
    for tau in (0.1, 1.0, 1.05, 5.0):
        assert abs(weight(module, 1.0, 0.7, tau_pos=tau) - 0.7) < 1e-12
        assert abs(weight(module, 1.0, -0.7, tau_neg=tau) + 0.7) < 1e-12


def check_without_temperature_is_unclipped(module: ModuleType) -> None:
    """τ -> 0 is the plain ratio objective, the same as GRPO with its clip wide open."""
    open_wide = gradient(grpo, clip_low=1e9, clip_high=1e9)
    assert torch.allclose(gradient(module, tau_pos=1e-4, tau_neg=1e-4), open_wide, rtol=1e-6)
    assert not torch.allclose(gradient(module), open_wide, rtol=1e-3)


def check_statistics(module: ModuleType) -> None:
    """How far the gate is open, apart for either sign of Â, and none of it for Â = 0."""
    logp = torch.tensor([[1.5, 0.0], [1.5, 0.0], [0.0, 0.0]], dtype=torch.float64)
    batch = {"logp": logp, "old_logp": 0 * logp, "mask": torch.ones_like(logp)}
    stats = loss_of(module, module.Args(), advantages=torch.tensor([1.0, -1, 0]), **batch)[1]
    for name, tau in (("gate_pos", 1.0), ("gate_neg", 1.05)):
        closed = 1 - 1 / torch.cosh(one(tau * (4.481689 - 1) / 2)).item() ** 2
        total, count = stats[name]
        assert abs(float(total / count) - (1 - closed / 2)) < 1e-6


CHECKS = written_here(globals())
SIGMOID = "torch.sigmoid(tau * (ratio - 1))"
RETURN = "return -per_response.sum(), mask.new_tensor(len(mask))"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
MUTANTS = {
    "ratio twice": ("(ratio - 1)) * A  # [n, T]: f(r)", "(ratio - 1)) * ratio * A  # [n, T]: f(r)"),
    "no 4/τ": ("4 / tau * torch.sigmoid", "torch.sigmoid"),
    "temperatures swapped": ("where(A > 0", "where(A < 0"),
    "one temperature": ("A.new_tensor(args.tau_neg)", "A.new_tensor(args.tau_pos)"),
    "detached": (SIGMOID, f"{SIGMOID}.detach() * (1 + 0 * logp)"),
    "log-ratio": (SIGMOID, "torch.sigmoid(tau * (logp - old_logp))"),
    "sign": ("return -per_response.sum()", "return per_response.sum()"),
    "token-mean": (RETURN, "return -(objective * mask).sum(), mask.sum()"),
    "no mask": (AVERAGE, "objective.mean(dim=1)"),
}
