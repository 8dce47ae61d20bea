"""M2PO: which tokens the budget drops, and the remaining weights."""

from types import ModuleType

import torch
from torch import Tensor

from . import ZSCORES, Batch, no_kl, token_mean, written_here


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


def check_the_fewest_and_worst_go(module: ModuleType) -> None:
    """Random squares: the kept ones are the largest set of the smallest squares whose mean is
    within the budget."""
    generator = torch.Generator().manual_seed(1)
    for budget in (0.001, 0.04, 0.3, 9.0):
        args = no_kl(module, budget=budget)
        for size in (1, 2, 7, 40):
            squares = torch.randn(size, generator=generator, dtype=torch.float64) ** 2 / 3
            ordered = sorted(squares.tolist())
            means = [sum(ordered[:n]) / n for n in range(1, size + 1)]
            expected = sum(mean <= budget for mean in means)
            found = int((squares <= module.second_moment_bound(args, squares)).sum())
            told = f"of {size} squares, τ = {budget}: {found} are kept, not {expected}"
            assert found == expected, told
    assert module.second_moment_bound(args, torch.zeros(0)) == 0
    assert module.second_moment_bound(no_kl(module, budget=0.1), torch.ones(3)) == 0, "none fits"


READS = ("rollout_logp",)
CHECKS = [*written_here(globals()), *ZSCORES]
