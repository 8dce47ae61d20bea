"""VESPO: outside numbers, and W far from 1."""

from types import ModuleType

import torch
from torch import Tensor

from .formulas import Batch, token_mean
from .harness import ZSCORES, loss_and_gradient, near, no_kl


def ratio(b: Batch) -> Tensor:
    """Return W `[n]`, the product of all ratios of a response, without a gradient."""
    return ((b.logp - b.old).detach() * b.mask).sum(1).exp()


def phi(b: Batch) -> Tensor:
    """Return φ(W) = W^k e^{λ (1 - W)} `[n]`."""
    right = (b.A >= 0).double()
    k = b.args.k_pos * right + b.args.k_neg * (1 - right)
    lam = b.args.lambda_pos * right + b.args.lambda_neg * (1 - right)
    return ratio(b) ** k * (lam * (1 - ratio(b))).exp()


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is the token mean of φ(W) Â log π_θ, with one weight for all tokens of a response."""
    return token_mean((phi(b) * b.A)[:, None] * b.logp, b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Means are over responses. gate_pos and gate_neg are the mean φ by the sign of Â."""
    up, down = b.A > 0, b.A < 0
    return {
        "reshaped": ((phi(b) - 1).abs().sum(), len(b.A)),
        "gate_pos": (phi(b)[up].sum(), up.sum()),
        "gate_neg": (phi(b)[down].sum(), down.sum()),
        "weight_max": (ratio(b).max(), "max"),
    }


CASES = [{}, {"k_pos": 1.5, "lambda_pos": 0.5, "k_neg": 1.0, "lambda_neg": 1.25}]


def check_extremes_weigh_nothing(module: ModuleType) -> None:
    """A long response far from π_old has weight 0: neither NaN nor infinite."""
    mask = torch.ones(2, 500, dtype=torch.float32)
    rest = {"old_logp": 0 * mask - 60, "mask": mask, "advantages": torch.tensor([1.0, -1.0])}
    for moved in (2.0, -2.0, 50.0, -50.0):
        _, gradient = loss_and_gradient(module, no_kl(module), logp=moved - 60 * mask, **rest)
        near(gradient, 0 * mask, f"∂ loss / ∂ log π where log r is {moved} everywhere", 1e-10)


FIXTURES = {"vespo_default": {}}
SHARED = ZSCORES
