"""JustRL: outside numbers, its weights, and that every token counts the same."""

from types import ModuleType

import torch

from . import SIDES, ZSCORE, advantages_match, check_clip_statistics, check_equal_rewards, loss_of
from . import matches, near, no_kl, one, terms, toy_batch, two_responses, weighs, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL, OpenRLHF and others: token mean, ε 0.2 / 0.28."""
    matches(module, "dapo_eps0.2_0.28_tokenmean")


def check_by_hand(module: ModuleType) -> None:
    """The loss of two responses, by hand."""
    near(loss_of(module, module.Args(), **two_responses())[0], -0.246494, "the loss", 1e-6)


UP = {0.5: 0.5, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.25: 1.25, 1.3: 0, 1.5: 0, 2.0: 0, 4.0: 0}
DOWN = {0.5: 0, 0.75: 0, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.3: 1.3, 2.0: 2.0, 4.0: 4.0}


def check_weights(module: ModuleType) -> None:
    """M r Â with ε 0.2 below and 0.28 above."""
    for advantage, table in ((1.0, UP), (-1.0, DOWN)):
        for ratio, expected in table.items():
            weighs(module, ratio, advantage, advantage * expected)


def check_every_token_counts_the_same(module: ModuleType) -> None:
    """In a long response as in a short one; padding does not."""
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.float64)
    logp = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    batch = {"old_logp": logp.detach().clone(), "advantages": one(1.0, 1.0)[0], "mask": mask}
    loss_of(module, no_kl(module), logp=logp, **batch)[0].backward()
    near(logp.grad, -mask / 5, "∂ loss / ∂ log π of responses of 4 tokens and of 1", 1e-6)


def check_parts_add_up(module: ModuleType) -> None:
    """Summing before dividing gives the whole batch's loss for any split."""
    batch, args = toy_batch(), no_kl(module)
    whole = loss_of(module, args, **batch)[0]
    splits = (slice(0, 1), slice(1, 6))
    parts = [terms(module, args, **{k: v[rows] for k, v in batch.items()}) for rows in splits]
    assert torch.isclose(sum(p[0] for p in parts) / sum(p[1] for p in parts), whole, rtol=1e-14)


def check_advantages(module: ModuleType) -> None:
    """GRPO's z-score."""
    advantages_match(module, "ddof1_eps1e-6", 1e-8)


CHECKS = [*written_here(globals()), check_equal_rewards, check_clip_statistics]
RETURN = "return -(objective * mask).sum(), mask.sum(), stats"
SURROGATE, STD = "torch.minimum(ratio * A, clipped * A)", "rewards.std(dim=1, keepdim=True)"
BY_RESPONSE = "-((objective * mask).sum(1) / mask.sum(1)).sum(), mask.new_tensor(len(mask)), stats"
MUTANTS = {
    **ZSCORE,
    **SIDES,
    "mean of responses": (RETURN, f"return {BY_RESPONSE}"),
    "sign": (RETURN, RETURN.replace("-(", "(")),
    "no mask": (RETURN, RETURN.replace("(objective * mask)", "objective")),
    "padding counted": (RETURN, RETURN.replace("mask.sum()", "mask.new_tensor(mask.numel())")),
    "mean of the part": (
        RETURN,
        "return -(objective * mask).sum() / mask.sum(), mask.new_tensor(1.0), stats",
    ),
    "max for min": (SURROGATE, SURROGATE.replace("minimum", "maximum")),
    "no clip": (SURROGATE, "ratio * A"),
    "clip without min": (SURROGATE, "clipped * A"),
    "GRPO's upper bound": ("clip_high: NonNegative = 0.28", "clip_high: NonNegative = 0.2"),
    "bounds swapped": (
        "clamp(1 - args.clip_low, 1 + args.clip_high)",
        "clamp(1 - args.clip_high, 1 + args.clip_low)",
    ),
    "population std": (STD, "rewards.std(dim=1, keepdim=True, correction=0)"),
    "no std": (f"centred / ({STD} + 1e-6)", "centred"),
}
