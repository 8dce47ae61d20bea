"""GSPO: outside numbers (verl writes the paper's token form), a sequence's ratio."""

from types import ModuleType

import torch

from . import ZSCORE, ZSCORES, busy_batch, check_parts_add_up, counts, loss_of
from . import matches, no_kl, one, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with other implementations, at the paper's clip and at PPO's."""
    matches(module, "gspo_3e-4_4e-4")
    matches(module, "gspo_0.2_0.2", clip_low=0.2, clip_high=0.2)


def check_clips_sequences_not_tokens(module: ModuleType) -> None:
    """Tokens far off-policy in opposite directions: GRPO would cut two, GSPO cuts nothing. And the
    reverse."""
    mask = torch.ones(1, 4, dtype=torch.float64)
    rest = {"old_logp": 0 * mask, "mask": mask, "advantages": one(1.0)[0]}
    for logp, cut, tokens in ((one(0.5, -0.5, 0.25, -0.25), 0, 2), (0.01 * mask, 1, 0)):
        loss, stats = loss_of(module, module.Args(), logp=logp.requires_grad_(), **rest)
        loss.backward()
        assert torch.allclose(logp.grad, -(1 - cut) * mask / 4)
        assert stats["clip_share"][0] == cut and stats["token_clip_share"][0] == tokens


def check_statistics(module: ModuleType) -> None:
    """Of responses with Â ≠ 0: clip_share counts those that the clip cuts, clip_above those of them
    with Â > 0, clip_below those with Â < 0. Of their tokens: clip_share_of_tokens counts those of
    cut responses, token_clip_share those with r beyond 1 ± token_clip in the direction of Â."""
    batch, flags = busy_batch(), {"clip_low": 0.05, "clip_high": 0.07, "token_clip": 0.24}
    batch["advantages"][3] = 0.5  # of length 2; the last two responses have Â = 0
    mask, A = batch["mask"], batch["advantages"]
    length, log_ratio = mask.sum(1), (batch["logp"] - batch["old_logp"]) * mask
    s, live = (log_ratio.sum(1) / length).exp(), (A != 0).sum()
    above, below = (A > 0) & (s > 1.07), (A < 0) & (s < 0.95)
    expected = {"clip_share": ((above | below).sum(), live)}
    expected |= {"clip_above": (above.sum(), live), "clip_below": (below.sum(), live)}
    tokens = length[A != 0].sum()
    expected["clip_share_of_tokens"] = length[above | below].sum(), tokens
    far = A.sign()[:, None] * (log_ratio.exp() - 1) > 0.24
    expected["token_clip_share"] = (far & (A != 0)[:, None] & (mask > 0)).sum(), tokens
    counts(loss_of(module, no_kl(module, **flags), **batch)[1], expected)
    batch["advantages"] = -A
    above, below = (A < 0) & (s > 1.07), (A > 0) & (s < 0.95)
    expected = {"clip_above": (above.sum(), live), "clip_below": (below.sum(), live)}
    counts(loss_of(module, no_kl(module, **flags), **batch)[1], expected)


CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
ROOT_MEAN = "log_ratio.sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
CLAMP = "s.clamp(1 - args.clip_low, 1 + args.clip_high)"
MUTANTS = {
    **ZSCORE,
    "sum for mean in the ratio": (ROOT_MEAN, "log_ratio.sum(dim=1)"),
    "padding in the ratio": ("(logp - batch.old_logp) * mask", "logp - batch.old_logp"),
    "padding in the length": (ROOT_MEAN, "log_ratio.mean(dim=1)"),
    "sign": ("return -objective.sum()", "return objective.sum()"),
    "no clip": (f"clipped = {CLAMP}", "clipped = s"),
    "bounds swapped": (CLAMP, "s.clamp(1 - args.clip_high, 1 + args.clip_low)"),
    "detached": (
        "(logp - batch.old_logp) * mask",
        "(logp.detach() - batch.old_logp) * mask + 0 * logp",
    ),
    "μ for π_old": ("(logp - batch.old_logp) * mask", "(logp - batch.rollout_logp) * mask"),
    "clip_share of all responses": (
        '"clip_share": (cut.sum(), live.sum())',
        '"clip_share": (cut.sum(), len(cut))',
    ),
}
