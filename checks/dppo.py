"""DPPO: outside numbers."""

from torch import Tensor

from . import Run
from .formulas import Batch, share
from .harness import CENTRED


def beyond(b: Batch) -> Tensor:
    """Return True where D(μ ‖ π_θ) of "this token or another" is above δ: total variation or KL."""
    mu, p = b.mu.exp(), b.logp.detach().exp()
    if b.args.trust_region == "tv":
        return (p - mu).abs() > (b.args.delta or 0.15)
    no_mu = (1 - mu).clip(min=0) + 1e-8
    no_p = (1 - p).clip(min=0) + 1e-8
    return mu * (mu / p).log() + no_mu * (no_mu / no_p).log() > (b.args.delta or 0.05)


def masked(b: Batch) -> Tensor:
    """Return the tokens beyond δ in the direction of Â, or with `--two_sided` in both
    directions."""
    inward = b.A[:, None] * (b.logp - b.mu).detach() <= 0
    return beyond(b) if b.args.two_sided else beyond(b) & ~inward


def gate(b: Batch) -> Tensor:
    """Return M: 0 where masked, else 1; with `--soft` DRPO's slope."""
    if b.args.soft:
        return 1 - b.A[:, None].sign() * (b.logp.detach().exp() - b.mu.exp()) / b.args.delta
    return 1 - masked(b).double()


def objective(b: Batch) -> tuple[Tensor, int]:
    """J is the sum over tokens of M min(π_θ/μ, cap) Â log π_θ - κ (log π_θ/μ)²."""
    weight = (b.logp - b.mu).detach().exp().clip(max=b.args.is_cap)
    x = gate(b) * weight * b.A[:, None] * b.logp - b.args.log_square * (b.logp - b.mu) ** 2
    return (x * b.mask).sum(1).mean(), len(b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Means are over all response tokens. weight_max is the largest π_θ/μ before its cap."""
    w, cut = (b.logp - b.mu).exp(), masked(b)
    return {
        "masked_share": share((1 - gate(b)).abs(), b.mask),
        "masked_above": share(cut & (w > 1), b.mask),
        "masked_below": share(cut & (w < 1), b.mask),
        "weight": share(w.clip(max=b.args.is_cap), b.mask),
        "weight_max": (w[b.mask > 0].max(), "max"),
    }


CASES = [
    {"trust_region": "tv", "delta": 0.03, "is_cap": 1.3},
    {"trust_region": "kl", "log_square": 0.05},
    {"trust_region": "tv", "two_sided": True},
    {"soft": True, "delta": 0.03},
]


FIXTURES = {"dppo_tv_0.2_tokenmean": {"trust_region": "tv", "delta": 0.2}}
FIXTURES["dppo_kl_0.05_tokenmean"] = {"trust_region": "kl", "delta": 0.05}
PER_TOKEN = True  # verl's mean is one over tokens
SHARED = CENTRED


RUN = Run(needs={"two_sided": {"delta": 0.01}})
