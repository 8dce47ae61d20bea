"""M2PO: which tokens the budget drops, and the remaining weights."""

from torch import Tensor

from . import ZSCORES, Batch, token_mean


def trust_region(b: Batch) -> tuple[Tensor, Tensor]:
    """Return (log w)² `[n, T]` with w = π_θ/μ, and the tokens that moved in the direction of Â."""
    log_w = (b.logp - b.mu).detach()
    return log_w**2, (b.A[:, None] * log_w > 0) & (b.mask > 0)


def masked(b: Batch) -> Tensor:
    """Return the masked tokens: trust-region tokens of the largest squares, until the mean of the
    rest is within the budget."""
    squares, outward = trust_region(b)
    left = squares[outward].sort().values.tolist()
    while left and sum(left) / len(left) > b.args.budget:
        left.pop()  # the largest
    return outward & (squares > (left[-1] if left else 0.0) + 1e-6)  # equal tokens stay together


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is the token mean of M w Â, not clipped. Masked tokens count in the mean."""
    return token_mean(~masked(b) * (b.logp - b.mu).exp() * b.A[:, None], b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """second_moment is over the trust-region tokens, masked or not; weight_max is the largest w."""
    squares, outward = trust_region(b)
    return {
        "masked_share": (masked(b).sum(), b.mask.sum()),
        "second_moment": (squares[outward].sum(), outward.sum()),
        "weight_max": ((b.logp - b.mu).exp()[b.mask > 0].max(), None),
    }


CASES = [{}, {"budget": 0.02}, {"budget": 0.2}, {"budget": 1e-9}]  # (the last keeps no token)


SHARED = ZSCORES
