"""The baselines: each by its formula; the loss is JustRL's."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run, justrl
from .harness import assert_statistics, near

objective, statistics, CASES = justrl.objective, justrl.statistics, justrl.CASES


def advantages(R: Tensor) -> Tensor:
    """Return RLOO's advantages: each reward minus the mean of the others."""
    G = R.shape[-1]
    return R - (R.sum(-1, keepdim=True) - R) / (G - 1)


R = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)
SIZES = torch.tensor([[4.0, 2, 1, 1], [2, 2, 2, 2], [8, 8, 8, 8], [1, 3, 5, 7]]).double()


def whitened(values: Tensor) -> Tensor:
    """Return the values with mean 0 and standard deviation 1 over all tokens."""
    tokens = values.flatten().repeat_interleave(SIZES.flatten().long())
    return (values - tokens.mean()) / (tokens.std() + 1e-6)


def check_rules(module: ModuleType) -> None:
    """Advantages are, with p the group's mean: none: R. rloo, the default: R minus the mean of the
    others. maxrl: (R - p) / p, 0 if none is right. scalerl: R - p over its standard deviation in
    the batch. batch and group: R and R - p, whitened over the batch's tokens."""
    p = R.mean(1, keepdim=True)
    rules = {"none": R, "rloo": advantages(R), "batch": whitened(R), "group": whitened(R - p)}
    rules["scalerl"] = (R - p) / ((R - p).std() + 1e-6)
    rules["maxrl"] = torch.tensor([[3.0, -1, -1, -1], [0] * 4, [0] * 4, [1, 1, -1, -1]])
    for how, expected in rules.items():
        near(module.advantages(R, how, SIZES), expected, how)
    near(module.advantages(R), advantages(R), "the default")


def check_equal_rewards(module: ModuleType) -> None:
    """A batch of equal rewards, also partly right ones, has advantages of exactly 0, except
    REINFORCE's."""
    for reward in (1.0, 0.0, 0.1, 0.3, 0.7, 0.9):
        rewards = torch.full((2, 8), reward)
        for how in ("rloo", "batch", "group", "maxrl", "scalerl"):
            near(module.advantages(rewards, how), 0 * rewards, f"{how}: rewards of {reward}", 0.0)


def check_metrics(module: ModuleType) -> None:
    """apart is the mean of |Â - (R - mean R)|, idle_push the share of Σ |Â| in zero-variance
    groups."""
    A, p = module.advantages(R, "batch"), R.mean(1, keepdim=True)
    expected = {"apart": ((A - (R - p)).abs().sum(), 16)}
    expected["idle_push"] = A[1:3].abs().sum(), A.abs().sum()
    assert_statistics(module.effect(R, A), expected)


RUN = Run(stored={"grad_clip": 6.0})
