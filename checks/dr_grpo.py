"""Dr. GRPO: outside numbers."""

from torch import Tensor

from .formulas import Batch, clip_statistics, surrogate
from .harness import CENTRED

statistics = clip_statistics


def objective(b: Batch) -> tuple[Tensor, int]:
    """Every response is divided by the same length L."""
    return ((surrogate(b) * b.mask).sum(1) / b.args.max_new_tokens).mean(), len(b.mask)


CASES = [{}, {"max_new_tokens": 7, "clip_high": 0.28}]


FIXTURES = {"dr_grpo_eps0.2_maxlen6": {"max_new_tokens": 6}}
SHARED = CENTRED
