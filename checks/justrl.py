"""JustRL: outside numbers and its weights."""

from types import ModuleType

from . import BY_TOKEN, SIDES, TOKEN_MEAN, ZSCORE, ZSCORES, check_clip_statistics
from . import check_parts_add_up, matches, weighs, written_here


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL, OpenRLHF and others: token mean, ε 0.2 / 0.28."""
    matches(module, "dapo_eps0.2_0.28_tokenmean")


UP = {0.5: 0.5, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.25: 1.25, 1.3: 0, 1.5: 0, 2.0: 0, 4.0: 0}
DOWN = {0.5: 0, 0.75: 0, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.3: 1.3, 2.0: 2.0, 4.0: 4.0}


def check_weights(module: ModuleType) -> None:
    """M r Â with ε 0.2 below and 0.28 above."""
    for advantage, table in ((1.0, UP), (-1.0, DOWN)):
        for ratio, expected in table.items():
            weighs(module, ratio, advantage, advantage * expected)


LOSS = [*written_here(globals()), check_parts_add_up]
CHECKS = [*LOSS, *ZSCORES, check_clip_statistics]
BOUNDS = "clamp(1 - args.clip_low, 1 + args.clip_high)"
STD = "rewards.std(dim=1, keepdim=True)"
DAMAGES = {  # those of baselines, too
    **SIDES,
    **TOKEN_MEAN,
    "mean of the part": (BY_TOKEN, f"{BY_TOKEN.replace(', ', ' / mask.sum(), ')} / mask.sum()"),
    "GRPO's upper bound": ("clip_high: NonNegative = 0.28", "clip_high: NonNegative = 0.2"),
    "bounds swapped": (BOUNDS, "clamp(1 - args.clip_high, 1 + args.clip_low)"),
}
MUTANTS = DAMAGES | ZSCORE | {"population std": (STD, STD.replace("True", "True, correction=0"))}
