"""Signs: outside numbers at λ = 1, the two weights, and which responses are outliers."""

from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from . import KL, RESPONSE_MEAN, SIDES, ZSCORE, ZSCORES, check_clip_statistics, check_kl_ratio
from . import loss_of, matches, no_kl, toy_batch, weight, written_here


def check_fixture(module: ModuleType) -> None:
    """With λ = 1 it is GRPO: value and gradient of TRL, OpenRLHF and others."""
    matches(module, "grpo_eps0.2_seqmean", positive_weight=1.0)


UP = {0.5: 0.5, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.25: 0, 2.0: 0}
DOWN = {0.5: 0, 0.75: 0, 0.9: 0.9, 1.0: 1.0, 1.3: 1.3, 4.0: 4.0}


def check_weights(module: ModuleType) -> None:
    """M r u Â: λ = 0.1, 0.5 and 2 where Â > 0, 1 where Â < 0; the clip depends on r and Â's
    sign."""
    for positive in (0.1, 0.5, 2.0):
        for ratio, expected in UP.items():
            found = weight(module, ratio, 1.5, positive_weight=positive)
            assert abs(found - 1.5 * positive * expected) < 1e-12
        for ratio, expected in DOWN.items():
            found = weight(module, ratio, -1.5, positive_weight=positive)
            assert abs(found + 1.5 * expected) < 1e-12
    assert abs(weight(module, 1.0, 1.0) - 0.1) < 1e-12  # the paper's λ


def check_damped(module: ModuleType) -> None:
    """The share of Σ |Â| that is taken away: 0.9 · 1.5 of 4 with λ = 0.1; none with 1."""
    for positive, expected in ((0.1, 0.9 * 1.5), (1.0, 0.0)):
        stats = loss_of(module, no_kl(module, positive_weight=positive), **toy_batch())[1]
        taken, total = stats["damped"]
        assert abs(taken - expected) < 1e-12 and abs(total - 4) < 1e-12


def odd(module: ModuleType, values: list[float], k: float, column: int) -> list[int]:
    """Which of these lengths (column 0) or mean log μ (1) are outliers; the other is constant."""
    every = torch.full((len(values), 2), 7.0, dtype=torch.float64)
    every[:, column] = torch.tensor(values)
    found = module.outliers(no_kl(module, outliers=k), every, every)
    return found.nonzero()[:, 0].tolist()


def check_outliers(module: ModuleType) -> None:
    """Nine values of 10 and one of 40: mean 13, population std 9, so 40 is 3 std away. In both
    directions, for length and for log-prob."""
    for column, sign in ((0, 1), (1, 1), (1, -1)):
        values = [sign * x for x in [10.0] * 9 + [40.0]]
        assert odd(module, values, 2.95, column) == [9]
        assert odd(module, values, 3.05, column) == []
        assert odd(module, values, 0.3, column) == list(range(10))  # 10 is a third of a std away


def check_no_outliers(module: ModuleType) -> None:
    """If all are alike, rounding makes none; k = 0 turns the filter off."""
    assert odd(module, [0.1 + 1e-9 * i for i in range(8)], 1.0, 1) == []
    assert odd(module, [1.0, 2, 3, 99], 0.0, 0) == []


def check_statistics_are_of_all_ranks(module: ModuleType) -> None:
    """Mean and std are those of all responses, not of this rank's."""
    own = torch.tensor([[10.0, -1], [40, -1]]).double()
    every = torch.cat([own, torch.tensor([[10.0, -1]]).double().expand(8, 2)])
    found = module.outliers(no_kl(module, outliers=2.5), own, every)
    assert found.tolist() == [False, True]


def stored() -> SimpleNamespace:
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    return SimpleNamespace(
        mask=mask, rollout_logp=torch.tensor([[-1.0, -2, -3, -6], [-4, -2, 0, 0]])
    )


def check_measures(module: ModuleType) -> None:
    """Length and mean log μ over the response; the mean does not fall with the length."""
    expected: Tensor = torch.tensor([[4.0, -3.0], [2.0, -3.0]]).double()
    assert torch.equal(module.measures(stored()), expected)


def check_without_baseline(module: ModuleType) -> None:
    """±1, also in zero-variance groups; with λ the weights are λ and -1, as published."""
    rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(module.signs(rewards), torch.where(rewards > 0, 1.0, -1.0))


CHECKS = [*written_here(globals()), *ZSCORES, check_clip_statistics, check_kl_ratio]
WEIGHTS = "torch.where(A > 0, args.positive_weight * A, A)"
MUTANTS = {
    **ZSCORE,
    **SIDES,
    **KL,
    **RESPONSE_MEAN,
    "λ on wrong responses": (WEIGHTS, WEIGHTS.replace(">", "<")),
    "λ ignored": (WEIGHTS, "A"),
    "a wrong one 0": ("return 2 * rewards - 1", "return rewards"),
    "λ on the KL term": ("objective - args.beta * k3", "objective - args.beta * k3 * (A != 0)"),
    "sample std": ("every.std(0, correction=0)", "every.std(0)"),
    "own statistics": ("every.mean(0)", "own.mean(0)"),
    "rounding makes outliers": ("correction=0) + 1e-5", "correction=0)"),
    "the sum of log μ": ("rollout.rollout_logp.sum(1) / lengths", "rollout.rollout_logp.sum(1)"),
}
