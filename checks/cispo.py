"""CISPO: outside numbers, and a capped weight on every token."""

from types import ModuleType


from . import TOKEN_MEAN, ZSCORE, ZSCORES, busy_batch, check_parts_add_up, clipped, counts
from . import loss_of, matches, no_kl, response_tokens, weighs, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL's cispo and another implementation's, cap 1.28."""
    matches(module, "cispo_cap1.28_tokenmean", is_cap=1.28)


def check_weights(module: ModuleType) -> None:
    """min(r, 5) Â, for rare and for common tokens: no gradient goes through the weight."""
    for old in (1.0, 0.3, 0.001):
        for ratio in (0.01, 0.5, 0.9, 1.0, 1.3, 2.0, 4.9, 5.1, 50.0):
            for advantage in (1.0, -1.0):
                weighs(module, ratio, advantage, min(ratio, 5.0) * advantage, old=old)
    weighs(module, 3.0, -1.0, -2.0, is_cap=2.0)


def check_statistics(module: ModuleType) -> None:
    """Of all response tokens: kept_beyond_clip those from which PPO's clip would take the gradient,
    capped_share those with r beyond the cap. weight_max is the largest r before the cap."""
    batch, flags = busy_batch(), {"clip_low": 0.2, "clip_high": 0.28, "is_cap": 1.24}
    t = response_tokens(batch)
    expected = {"kept_beyond_clip": clipped(t, 0.2, 0.28)["share"]}
    expected["capped_share"] = (t.r > 1.24).sum(), t.M
    expected["weight_max"] = t.r.max(), None
    counts(loss_of(module, no_kl(module, **flags), **batch)[1], expected)


CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
RATIO, WEIGHT = "(logp.detach() - batch.old_logp).exp()", "ratio.clamp(max=args.is_cap)"
KEPT = "((A > 0) & out_above) | ((A < 0) & out_below)"
MUTANTS = {
    **ZSCORE,
    **TOKEN_MEAN,
    "μ for π_old": (RATIO, "(logp.detach() - batch.rollout_logp).exp()"),
    "capped_share by the clip": (
        "((ratio > args.is_cap) * mask)",
        "((ratio > 1 + args.clip_high) * mask)",
    ),
    "weight_max after the cap": ("ratio[mask > 0]]).max()", "weight[mask > 0]]).max()"),
    "weight not detached": (RATIO, "(logp - batch.old_logp).exp()"),
    "no cap": (WEIGHT, "ratio"),
    "a lower bound": (WEIGHT, "ratio.clamp(1 - args.clip_low, args.is_cap)"),
    "counted wrongly": (KEPT, "((A > 0) & out_below) | ((A < 0) & out_above)"),
}
