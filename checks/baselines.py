"""The baselines: each by hand and over ranks; the loss is JustRL's."""

from types import ModuleType

import torch
from torch import Tensor

from . import counts, justrl, near, number, written_here

objective, statistics, CASES = justrl.objective, justrl.statistics, justrl.CASES


def advantages(R: Tensor) -> Tensor:
    """RLOO: each minus the mean of the others."""
    G = R.shape[-1]
    return R - (R.sum(-1, keepdim=True) - R) / (G - 1)


R = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)
SIZES = torch.tensor([[4.0, 2, 1, 1], [2, 2, 2, 2], [8, 8, 8, 8], [1, 3, 5, 7]]).double()


def check_rloo(module: ModuleType) -> None:
    """R_i minus the mean of the others; the default."""
    near(module.advantages(R, "rloo"), advantages(R), "RLOO", 1e-12)
    near(module.advantages(R), advantages(R), "the default", 1e-12)


def check_reinforce(module: ModuleType) -> None:
    """The reward itself: a group all right is pushed up."""
    assert torch.equal(module.advantages(R, "none"), R)


def check_whitened(module: ModuleType) -> None:
    """Over the batch's tokens: mean 0, standard deviation 1; all right up, all wrong down."""
    for how, values in (("batch", R), ("group", R - R.mean(1, keepdim=True))):
        found = module.advantages(R, how, SIZES)
        tokens = values.flatten().repeat_interleave(SIZES.flatten().long())  # one for each token
        near(found, (values - tokens.mean()) / (tokens.std() + 1e-6), how, 1e-12)
    assert (module.advantages(R, "batch", SIZES)[1] > 0).all()
    assert (module.advantages(R, "batch", SIZES)[2] < 0).all()


def check_maxrl(module: ModuleType) -> None:
    """(R - p) / p: 3 and -1s for one right of four; 0 if none is right."""
    near(module.advantages(R, "maxrl")[0], torch.tensor([3.0, -1, -1, -1]).double(), "1/4", 1e-12)
    near(module.advantages(R, "maxrl")[3], torch.tensor([1.0, 1, -1, -1]).double(), "2/4", 1e-12)
    assert not module.advantages(R, "maxrl")[1:3].any()


def check_scalerl(module: ModuleType) -> None:
    """R minus the group's mean, divided by the standard deviation of this in the whole batch."""
    centred = R - R.mean(1, keepdim=True)
    expected = centred / (centred.std() + 1e-6)
    near(module.advantages(R, "scalerl", SIZES), expected, "batch std", 1e-12)


def check_equal_rewards(module: ModuleType) -> None:
    """A batch of equal rewards, also partly right ones, has advantages of exactly 0, except
    REINFORCE's."""
    for reward in (1.0, 0.0, 0.1, 0.3, 0.7, 0.9):
        rewards = torch.full((2, 8), reward)
        for how in ("rloo", "batch", "group", "maxrl", "scalerl"):
            worst = module.advantages(rewards, how).abs().max().item()
            assert worst == 0, f"{how}: rewards of {reward:g} give {number(worst)}, expected 0"


def check_metrics(module: ModuleType) -> None:
    """apart: mean |Â - (R - mean R)|; idle_push: the share of Σ |Â| in zero-variance groups."""
    A = module.advantages(R, "batch")
    found = module.effect(R, A)
    centred = R - R.mean(1, keepdim=True)
    expected = {"apart": ((A - centred).abs().sum(), 16)}
    expected["idle_push"] = A[1:3].abs().sum(), A.abs().sum()
    counts(found, expected)


CHECKS = [*written_here(globals()), justrl.check_fixture]
