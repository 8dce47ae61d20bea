"""Dr. GRPO: outside numbers, and the law of difficulty."""

from types import ModuleType

from torch import Tensor

from . import CENTRED, Batch, clip_statistics, gradient_law, surrogate

statistics = clip_statistics


def objective(b: Batch) -> tuple[Tensor, int]:
    """Every response is divided by the same length L."""
    return ((surrogate(b) * b.mask).sum(1) / b.args.max_new_tokens).mean(), len(b.mask)


CASES = [{}, {"max_new_tokens": 7, "clip_high": 0.28}]


def check_difficulty(module: ModuleType) -> None:
    """|∇J| is as p (1 - p): no 1/std that makes hard and easy prompts heavier."""
    gradient_law(module, 1.0, max_new_tokens=1)


FIXTURES = {"dr_grpo_eps0.2_maxlen6": {"max_new_tokens": 6}}
SHARED = CENTRED
