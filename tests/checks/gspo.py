"""GSPO: outside numbers, a sequence's ratio, the paper's token form."""

import itertools
from types import ModuleType

import grpo
import torch

from . import gradient, loss_of, matches, no_kl, one, toy_batch, two_responses, weight, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with other implementations, at the paper's clip and at PPO's."""
    matches(module, "gspo_3e-4_4e-4")
    matches(module, "gspo_0.2_0.2", clip_low=0.2, clip_high=0.2)


def check_by_hand(module: ModuleType) -> None:
    """Two responses by hand: s = 1.068939 and .985112, both clipped, and all tokens with them."""
    loss, stats = loss_of(module, module.Args(), **two_responses())
    assert abs(loss.item() - (-1.0004 + 0.9997) / 2) < 1e-12
    shares = [stats["clip_share"], stats["clip_share_of_tokens"]]
    assert [float(total / count) for total, count in shares] == [1, 1]


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


def check_ignores_padding(module: ModuleType) -> None:
    """Garbage on padding and more of it change nothing."""
    batch, args = two_responses(), no_kl(module, clip_low=0.5, clip_high=0.5)
    wide = {
        name: torch.nn.functional.pad(x, (0, 3)) if x.dim() == 2 else x for name, x in batch.items()
    }
    wide["logp"] = wide["logp"] + 7 * (1 - wide["mask"])
    assert torch.isclose(loss_of(module, args, **batch)[0], loss_of(module, args, **wide)[0])


def check_token_form_has_the_same_gradient(module: ModuleType) -> None:
    """The paper's GSPO-token, written out here: s_t = sg[s] π/sg[π], seq-mean-token-mean."""
    for flags in ({}, {"clip_low": 0.2, "clip_high": 0.2}):
        args, batch = no_kl(module, **flags), toy_batch()
        logp, mask, A = batch["logp"].requires_grad_(), batch["mask"], batch["advantages"][:, None]
        s = (((logp - batch["old_logp"]) * mask).sum(1) / mask.sum(1)).exp().detach()[:, None]
        s_token = s * (logp - logp.detach()).exp()
        clipped = s_token.clamp(1 - args.clip_low, 1 + args.clip_high)
        objective = torch.minimum(s_token * A, clipped * A)
        ((objective * mask).sum(1) / mask.sum(1)).mean().neg().backward()
        assert torch.allclose(logp.grad, gradient(module, **flags), rtol=1e-12, atol=1e-15)


def check_of_one_token_is_grpo(module: ModuleType) -> None:
    """A response of one token has GRPO's gradient weight at the same clip."""
    for ratio, advantage in itertools.product((0.5, 0.79, 0.9, 1.0, 1.1, 1.21, 2.0), (1.0, -1.0)):
        ours = weight(module, ratio, advantage, clip_low=0.2, clip_high=0.2)
        assert abs(ours - weight(grpo, ratio, advantage)) < 1e-12


CHECKS = written_here(globals())
ROOT_MEAN = "log_ratio.sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
CLAMP = "s.clamp(1 - args.clip_low, 1 + args.clip_high)"
ARITHMETIC = "(log_ratio.exp() * mask).sum(dim=1) / mask.sum(dim=1)"
MUTANTS = {
    "sum for mean in the ratio": (ROOT_MEAN, "log_ratio.sum(dim=1)"),
    "padding in the ratio": ("(logp - old_logp) * mask", "logp - old_logp"),
    "padding in the length": (ROOT_MEAN, "log_ratio.mean(dim=1)"),
    "sign": ("return -objective.sum()", "return objective.sum()"),
    "max for min": ("torch.minimum", "torch.maximum"),
    "no clip": (f"clipped = {CLAMP}", "clipped = s"),
    "bounds swapped": (CLAMP, "s.clamp(1 - args.clip_high, 1 + args.clip_low)"),
    "arithmetic mean of ratios": (f"({ROOT_MEAN}).exp()", ARITHMETIC),
    "weighted by length": (
        "return -objective.sum()",
        "return -(objective * mask.sum(dim=1)).sum()",
    ),
    "detached": ("(logp - old_logp) * mask", "(logp.detach() - old_logp) * mask + 0 * logp"),
}
