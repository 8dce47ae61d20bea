"""Signs: GRPO's loss with two weights, and which responses are outliers."""

from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from . import Run, grpo
from .formulas import Batch, clip_statistics
from .harness import ZSCORES, near, no_kl


def weighted(b: Batch) -> Tensor:
    return torch.where(b.A > 0, b.args.positive_weight * b.A, b.A)


def objective(b: Batch) -> tuple[Tensor, int]:
    """J is GRPO's with u Â for Â: u = λ if Â > 0, else 1."""
    return grpo.objective(Batch(**vars(b) | {"A": weighted(b)}))


def statistics(b: Batch) -> dict[str, tuple]:
    """As in grpo.py; damped is the share of Σ |Â| that is taken away."""
    size = b.A.abs().sum()
    return clip_statistics(b) | {"damped": (size - weighted(b).abs().sum(), size)}


CASES = [flags | {"positive_weight": 0.25} for flags in grpo.CASES]


def check_outliers(module: ModuleType) -> None:
    """Of nine values of 10 and one of 40 (mean 13, population std 9) the 40 is 3 std away. This
    holds in both directions, for length and for log-prob. If all are alike, rounding makes no
    outlier. k = 0 turns the filter off."""

    def odd(values: list[float], k: float) -> list[int]:
        """Return the rows that are outliers, with equal lengths or equal log-probs."""
        every = torch.tensor([[7.0, value] for value in values], dtype=torch.float64)
        args = no_kl(module, outliers=k)
        rows = []
        for columns in (every, every.flip(1)):
            rows.append(module.outliers(args, columns, columns).nonzero()[:, 0].tolist())
        assert rows[0] == rows[1]
        return rows[0]

    for sign in (1, -1):
        values = [sign * x for x in [10.0] * 9 + [40.0]]
        assert odd(values, 2.95) == [9] and odd(values, 3.05) == []
        assert odd(values, 0.3) == list(range(10))  # 10 is a third of a std away
    assert odd([0.1 + 1e-9 * i for i in range(8)], 1.0) == odd([1.0, 2, 3, 99], 0.0) == []


def check_length_and_logp(module: ModuleType) -> None:
    """The two values are the length and the mean log μ over the response, which does not fall with
    the length. An outlier is judged among the responses of all ranks."""
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    mu = torch.tensor([[-1.0, -2, -3, -6], [-4, -2, 0, 0]])
    values = module.length_and_logp(SimpleNamespace(mask=mask, rollout_logp=mu))
    near(values, torch.tensor([[4.0, -3.0], [2.0, -3.0]]), "length and mean log μ")
    every = torch.cat([values, values[:1].expand(8, 2)])
    assert module.outliers(no_kl(module, outliers=2.5), values, every).tolist() == [False, True]


def check_without_baseline(module: ModuleType) -> None:
    """Advantages are ±1, also in zero-variance groups. With λ they are λ and -1, as published."""
    rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(module.signs(rewards), torch.where(rewards > 0, 1.0, -1.0))


SHARED = ZSCORES


RUN = Run(stored={"outliers": 1.5, "grad_clip": 3.0})
