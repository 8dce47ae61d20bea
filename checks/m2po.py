"""M2PO: which tokens the budget drops, and the remaining weights."""

from types import ModuleType

import torch
from torch import Tensor

from . import ZSCORES, Batch, near, no_kl, token_mean


def trust_region(b: Batch) -> tuple[Tensor, Tensor]:
    """(log w)² `[n, T]` with w = π_θ/μ, and the tokens that moved in the direction of Â."""
    log_w = (b.logp - b.mu).detach()
    return log_w**2, (b.A[:, None] * log_w > 0) & (b.mask > 0)


def masked(b: Batch) -> Tensor:
    """The trust-region tokens of the largest squares, until the mean of the rest is within the
    budget."""
    squares, outward = trust_region(b)
    left = squares[outward].sort().values.tolist()
    while left and sum(left) / len(left) > b.args.budget:
        left.pop()  # the largest
    return outward & (squares > (left[-1] if left else 0.0) + 1e-6)  # equal tokens stay together


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """M w Â, not clipped; masked tokens count."""
    return token_mean(~masked(b) * (b.logp - b.mu).exp() * b.A[:, None], b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """second_moment is that of the trust-region tokens, masked or not; weight_max the largest w."""
    squares, outward = trust_region(b)
    return {
        "masked_share": (masked(b).sum(), b.mask.sum()),
        "second_moment": (squares[outward].sum(), outward.sum()),
        "weight_max": ((b.logp - b.mu).exp()[b.mask > 0].max(), None),
    }


CASES = [{}, {"budget": 0.02}, {"budget": 0.2}]


def check_bound(module: ModuleType) -> None:
    """The largest square that stays: of 1, 4, 9, 16 the means are 1, 2.5, 4.7, 7.5. None fits, or
    there is none: 0."""
    squares = torch.tensor([9.0, 1.0, 16.0, 4.0])
    for budget, expected in ((0.9, 0), (1.0, 1), (2.5, 4), (7.4, 9), (8.0, 16)):
        bound = module.second_moment_bound(no_kl(module, budget=budget), squares)
        near(bound, expected, f"of 9, 1, 16, 4 at a budget of {budget}")
    near(module.second_moment_bound(no_kl(module), squares[:0]), 0, "of no square")


SHARED = ZSCORES
