"""The baselines: each by hand and over ranks; the loss is JustRL's."""

from types import ModuleType

import torch

from . import check_clip_statistics, counts, justrl, near, number, written_here

R = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.float64)
SIZES = torch.tensor([[4.0, 2, 1, 1], [2, 2, 2, 2], [8, 8, 8, 8], [1, 3, 5, 7]]).double()


def check_rloo(module: ModuleType) -> None:
    """R_i minus the mean of the others, computed as these words say."""
    found = module.advantages(R, "rloo")
    for p, i in torch.cartesian_prod(torch.arange(4), torch.arange(4)).tolist():
        others = [R[p, j].item() for j in range(4) if j != i]
        near(found[p, i], R[p, i] - sum(others) / 3, "RLOO", 1e-12)
    assert torch.equal(module.advantages(R), found)  # the default


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


CHECKS = [*written_here(globals()), *justrl.LOSS, check_clip_statistics]
MUTANTS = {
    **justrl.DAMAGES,
    "RLOO with itself": ("centred * (G / (G - 1))", "centred"),
    "mean of the batch": ("equal.mean(dim=1, keepdim=True)", "equal.mean()"),
    "REINFORCE centred": ("        return rewards\n", "        return centred\n"),
    "MaxRL without a mean": ("torch.where(mean > 0, centred / mean, 0.0)", "centred / mean"),
    "std by tokens": ("moments(centred, each, world)", "moments(centred, sizes, world)"),
    "equal rewards not made 0": ("equal = rewards - rewards[:, :1]", "equal = 1.0 * rewards"),
    "whitened by responses": ("each if sizes is None else sizes", "each"),
    "forms of REINFORCE++ exchanged": ('how == "batch" else', 'how == "group" else'),
    "idle push of all": ("size[idle].sum()", "size.sum()"),
}
