"""Formulas that the objectives of several checks share, in float64."""

from types import SimpleNamespace

import torch
from torch import Tensor


class Batch(SimpleNamespace):
    """The arguments of an objective, in float64.

    `logp` (with gradient), `old`, `mu` and `ref` are the log-probs of π_θ, π_old, μ and π_ref.
    They, `entropy` and `mask` are `[n, T]`, `A` is `[n]`. `args` are the flags. Further columns
    have the same names as in Rollout.
    """

    @property
    def r(self) -> Tensor:
        return (self.logp - self.old).exp()  # [n, T]


def z_score(R: Tensor) -> Tensor:
    """Return advantages `[P, G]` as most files do: with the sample standard deviation."""
    return (R - R.mean(-1, keepdim=True)) / (R.std(-1, keepdim=True) + 1e-6)


def without_mean(R: Tensor) -> Tensor:
    return R - R.mean(-1, keepdim=True)


def response_mean(x: Tensor, mask: Tensor) -> tuple[Tensor, int]:
    """Return the mean over responses of the means over their tokens (0 for a response without any),
    and the number of responses."""
    return ((x * mask).sum(1) / mask.sum(1).clip(min=1)).mean(), len(mask)


def token_mean(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over all tokens, and their number."""
    return (x * mask).sum() / mask.sum(), mask.sum()


def clipped(r: Tensor, A: Tensor, args: object) -> Tensor:
    """Return PPO's min(r A, clip(r) A)."""
    return torch.minimum(r * A, r.clip(1 - args.clip_low, 1 + args.clip_high) * A)


def surrogate(b: Batch) -> Tensor:
    return clipped(b.r, b.A[:, None], b.args)


def k3(b: Batch) -> Tensor:
    """Return π_ref/π_θ - log(π_ref/π_θ) - 1. `--kl_ratio` multiplies it by r, with its gradient."""
    plain = (b.ref - b.logp).exp() - (b.ref - b.logp) - 1
    return b.r * plain if b.args.kl_ratio else plain


def share(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mean over the tokens of the mask, as a pair (sum, count)."""
    return (x * mask).sum(), mask.sum()


def cut_shares(b: Batch, A: Tensor, name: str = "clip") -> dict[str, tuple]:
    """Return the share of response tokens that lose their gradient by PPO's clip, in all and by the
    side on which r is: above 1 + ε for Â > 0, below 1 - ε for Â < 0."""
    above, below = (A > 0) & (b.r > 1 + b.args.clip_high), (A < 0) & (b.r < 1 - b.args.clip_low)
    sides = {"share": above | below, "above": above, "below": below}
    return {f"{name}_{side}": share(tokens, b.mask) for side, tokens in sides.items()}


def clip_statistics(b: Batch) -> dict[str, tuple]:
    """clip_share counts the response tokens that lose their gradient by the clip: Â > 0 and r > 1 +
    clip_high (clip_above), or Â < 0 and r < 1 - clip_low (clip_below). ref_kl is k3 itself, not
    times β."""
    statistics = cut_shares(b, b.A[:, None])
    if getattr(b.args, "beta", 0.0) > 0:
        statistics["ref_kl"] = share(k3(b), b.mask)
    return statistics
