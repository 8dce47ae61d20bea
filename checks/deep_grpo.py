"""DEEP-GRPO: the loss of two streams, pivots and their distribution, the regression."""

import math
import random
from types import ModuleType

import torch

from . import CENTRE, CENTRED, FIXTURE, KL, SIDES, add_up, check_clip_statistics, check_kl_ratio
from . import loss_of, matches, near, no_kl, toy_batch, written_here

AUTHORS = FIXTURE["deep_grpo"]["cases"]
IS_BRANCH = torch.tensor([False, True, False, False, True, False])  # of the toy batch


def streams(mask: torch.Tensor) -> torch.Tensor:
    """The column `branch` of the toy batch: T_main / T_branch on branches, 0 on main rows."""
    balance = mask[~IS_BRANCH].sum() / mask[IS_BRANCH].sum()
    return torch.where(IS_BRANCH, balance, 0.0)


def check_fixture(module: ModuleType) -> None:
    """Without branches: the token-mean of PPO's clipped objective, as in TRL and others (ε 0.2)."""
    matches(module, "bnpo_eps0.2_tokenmean")


def check_streams(module: ModuleType) -> None:
    """Each stream is averaged over its own tokens; λ weighs the branches' policy term, not their
    KL."""
    batch = toy_batch()
    batch["ref_logp"] = batch["logp"] - 0.3 * batch["mask"]
    mask, logp = batch["mask"], batch["logp"].requires_grad_()
    args = no_kl(module, branch_weight=0.7)
    args.beta = 0.1
    loss_of(module, args, **batch, branch=streams(mask))[0].backward()
    A, ratio = batch["advantages"][:, None], (logp.detach() - batch["old_logp"]).exp()
    alive = ~(((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8)))
    stream = torch.where(IS_BRANCH, 0.7, 1.0)[:, None]
    tokens = torch.where(IS_BRANCH[:, None], mask[IS_BRANCH].sum(), mask[~IS_BRANCH].sum())
    weight = stream * alive * ratio * A + 0.1 * (math.exp(-0.3) - 1)
    assert torch.allclose(-logp.grad, weight * mask / tokens, rtol=1e-9, atol=1e-15)


def check_parts_add_up(module: ModuleType) -> None:
    """Micro-batches, one of them branches only, with the mini-batch's T_main / T_branch, give the
    loss of the whole."""
    batch = toy_batch()
    batch["branch"] = streams(batch["mask"])
    add_up(module, no_kl(module), batch, [[0], [1, 4], [2, 3, 5]])


def check_pivots(module: ModuleType) -> None:
    """The root and every boundary except the response's last token."""
    assert module.pivots([1, 2, 9, 3, 9, 4], {9}) == [0, 3, 5]
    assert module.pivots([1, 9, 2, 9], {9}) == [0, 2]
    assert module.pivots([1, 8, 2, 9, 3], {8, 9}) == [0, 2, 4]
    assert module.pivots([4], {9}) == [0]


def check_pivot_distribution(module: ModuleType) -> None:
    """Q ∝ σ(u d + v) d^γ with d = (i+1)/(M+1): the probabilities with which the authors draw."""
    for case in AUTHORS:
        u, v = case["fit"] or (0.0, math.inf)
        found = module.pivot_distribution(case["segments"], u, v, case["gamma"])[1]
        near(found, torch.tensor(case["q"], dtype=torch.float64), "Q", 1e-10)


def check_choice_is_in_proportion(module: ModuleType) -> None:
    """6000 draws for a response of four segments: counts within four standard deviations of Q."""
    response, rng = [1, 9, 1, 1, 9, 1, 9, 2], random.Random(0)
    _, q = module.pivot_distribution(4, -3.0, 2.0, 2.0)
    draws = [module.choose_pivot(response, {9}, -3.0, 2.0, 2.0, rng) for _ in range(6000)]
    for i, kept in enumerate((0, 2, 5, 7)):
        count = sum(draw == (kept, (i + 1) / 5) for draw in draws)
        assert abs(count - 6000 * q[i]) < 4 * (6000 * q[i] * (1 - q[i])) ** 0.5


def check_fit(module: ModuleType) -> None:
    """u and v are those of the authors' scikit-learn, to the tolerance of its optimiser. P = 1 for
    up to 10 outcomes, and if all are the same."""
    for case in AUTHORS:
        pairs = [(i / segments, float(success)) for i, segments, success in case["feedback"]]
        found, expected = module.fit_success(pairs), case["fit"] or (0.0, math.inf)
        near(torch.tensor(found).double(), torch.tensor(expected).double(), "u and v", 2e-3)


CHECKS = [*written_here(globals()), *CENTRED, check_clip_statistics, check_kl_ratio]
RETURN = "return -per_response.sum(), mask[main].sum()"
LAMBDA = "torch.where(main, 1.0, args.branch_weight)"
DRAW = "rng.choices(range(len(cuts)), chances.tolist())[0]"
RIDGE = "torch.tensor([1.0, 0.0], dtype"
MUTANTS = {
    **CENTRE,
    **SIDES,
    **KL,
    "sign": (RETURN, RETURN.replace("-per", "per")),
    "one stream": (" * torch.where(main, 1.0, branch)", ""),
    "branches in the main average": (RETURN, RETURN.replace("mask[main].sum()", "mask.sum()")),
    "λ on the KL": ("args.beta * k3", f"args.beta * k3 * {LAMBDA}[:, None]"),
    "the last segment too": (" and i < len(response)]", "]"),
    "no estimate": ("torch.sigmoid(u * depth + v) *", "1.0 *"),
    "always the likeliest": (DRAW, "int(chances.argmax())"),
    "penalty on the intercept": (RIDGE, RIDGE.replace("1.0, 0.0", "1.0, 1.0")),
}
