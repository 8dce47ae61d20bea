"""Dr. GRPO: outside numbers, and the law of difficulty."""

from types import ModuleType


from . import CENTRE, CENTRED, RESPONSE_MEAN, SIDES, check_clip_statistics, gradient_law
from . import matches, written_here

L = {"max_new_tokens": 6}  # the fixture's


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL's and another implementation's dr_grpo."""
    matches(module, "dr_grpo_eps0.2_maxlen6", **L)


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
