"""GMPO: outside numbers, and that the clip of each log-ratio comes before the mean."""

import math
from types import ModuleType

import gspo
import torch

from . import ZSCORE, ZSCORES, busy_batch, check_parts_add_up, counts, loss_of, matches, no_kl, one
from . import response_tokens, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with verl's geo_mean, with the paper's clip and with a narrower one,
    which is not the same on both sides."""
    matches(module, "gmpo_0.4")
    matches(module, "gmpo_0.1_0.2", clip_low=0.1, clip_high=0.2)


def found(module: ModuleType, moved: tuple, advantage: float, **flags: float) -> torch.Tensor:
    """The gradient weights of one response's tokens, which have these log-ratios."""
    logp = one(*moved).requires_grad_()
    rest = {"old_logp": 0 * logp.detach(), "mask": 0 * logp.detach() + 1}
    rest["advantages"] = one(advantage)[0]
    loss_of(module, no_kl(module, **flags), logp=logp, **rest)[0].backward()
    return -logp.grad[0]


def check_clips_before_the_mean(module: ModuleType) -> None:
    """log r = [3, -.1] and Â > 0: the first counts as 0.4 and has no gradient; the second keeps its
    gradient with s = e^.15 / 2. GSPO, at the same ε, stops the whole response. With Â < 0 nothing
    is beyond the bound: s = e^1.45."""
    ours = found(module, (3.0, -0.1), 1.0)
    assert torch.allclose(ours, one(0.0, math.exp(0.15) / 2)[0])
    theirs = found(gspo, (3.0, -0.1), 1.0, clip_low=0.33, clip_high=0.49)
    assert (theirs == 0).all()
    ours = found(module, (3.0, -0.1), -1.0)
    assert torch.allclose(ours, -math.exp(1.45) / 2 * one(1.0, 1.0)[0])


def check_statistics(module: ModuleType) -> None:
    """Of all response tokens: clip_share those with M = 0, clip_above those of them with Â > 0,
    clip_below those with Â < 0."""
    batch = busy_batch()
    t = response_tokens(batch)
    above, below = (t.A > 0) & (t.r.log() > 0.2), (t.A < 0) & (t.r.log() < -0.1)
    assert above.any() and below.any()
    expected = {"clip_share": ((above | below).sum(), t.M)}
    expected |= {"clip_above": (above.sum(), t.M), "clip_below": (below.sum(), t.M)}
    args = no_kl(module, clip_low=0.1, clip_high=0.2)
    counts(loss_of(module, args, **batch)[1], expected)


CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
CLIP, RETURN = "log_ratio.clamp(-args.clip_low, args.clip_high)", "return -objective.sum()"
MEAN = "(bounded.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).exp()"
BOUNDED = "torch.where(A > 0, log_ratio.minimum(clipped), log_ratio.maximum(clipped))"
MUTANTS = {
    **ZSCORE,
    "clipped on both sides": (BOUNDED, "clipped"),
    "bounds swapped": (CLIP, "log_ratio.clamp(-args.clip_high, args.clip_low)"),
    "padding in the ratio": ("(logp - batch.old_logp) * mask", "logp - batch.old_logp"),
    "padding in the length": (MEAN, "bounded.mean(dim=1).exp()"),
    "detached": (
        "(logp - batch.old_logp) * mask",
        "(logp.detach() - batch.old_logp) * mask + 0 * logp",
    ),
    "μ for π_old": ("(logp - batch.old_logp) * mask", "(logp - batch.rollout_logp) * mask"),
    "sign": (RETURN, "return objective.sum()"),
    "clip_above and clip_below swapped": (
        "(((cut & out_above) * mask)",
        "(((cut & out_below) * mask)",
    ),
}
