"""Dr. GRPO: outside numbers, and what a constant length means."""

from types import ModuleType

import torch

from . import CENTRE, CENTRED, RESPONSE_MEAN, SIDES, check_clip_statistics, gradient_law, loss_of
from . import matches, no_kl, one, two_responses, written_here

L = {"max_new_tokens": 6}  # the fixture's


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL's and another implementation's dr_grpo."""
    matches(module, "dr_grpo_eps0.2_maxlen6", **L)


def check_by_hand(module: ModuleType) -> None:
    """The loss of two responses with ε 0.2 / 0.28 and L = 10: half of the sum over tokens, by L."""
    flags = {"clip_low": 0.2, "clip_high": 0.28, "max_new_tokens": 10}
    loss = loss_of(module, no_kl(module, **flags), **two_responses())[0]
    assert abs(loss.item() + 0.061624) < 1e-6  # the two responses' sums: -3.203902, 1.97143


def check_length_does_not_matter(module: ModuleType) -> None:
    """A token of a long response weighs as much as one of a short one."""
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.float64)
    logp = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    batch = {"old_logp": logp.detach().clone(), "advantages": one(1.0, 1.0)[0], "mask": mask}
    loss_of(module, no_kl(module), logp=logp, **batch)[0].backward()
    assert torch.allclose(logp.grad, -mask / 2 / module.Args().max_new_tokens)


def check_difficulty(module: ModuleType) -> None:
    """|∇J| is as p (1 - p): no 1/std that makes hard and easy prompts heavier."""
    gradient_law(module, 1.0, max_new_tokens=1)


CHECKS = [*written_here(globals()), *CENTRED, check_clip_statistics]
AVERAGE = "(objective * mask).sum(dim=1) / args.max_new_tokens"
MUTANTS = {
    **CENTRE,
    **RESPONSE_MEAN,
    **SIDES,
    "own length": (AVERAGE, "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"),
    "padded width": (AVERAGE, "(objective * mask).sum(dim=1) / mask.shape[1]"),
    "no mask": (AVERAGE, "objective.sum(dim=1) / args.max_new_tokens"),
    "leave one out": (
        "return centred",
        "return centred * rewards.shape[1] / (rewards.shape[1] - 1)",
    ),
}
