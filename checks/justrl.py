"""JustRL: outside numbers."""

from torch import Tensor

from .formulas import Batch, clip_statistics, surrogate, token_mean
from .harness import ZSCORES


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is PPO's clipped objective, averaged over all tokens, as in many variants."""
    return token_mean(surrogate(b), b.mask)


statistics = clip_statistics
CASES = [{}, {"clip_low": 0.3, "clip_high": 0.2}]


FIXTURES = {"dapo_eps0.2_0.28_tokenmean": {}}
SHARED = ZSCORES
