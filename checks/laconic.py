"""LACONIC: GRPO's loss, the cost of length, and how the price moves."""

from dataclasses import replace
from types import ModuleType

import torch
from common.distributed import ALONE

from . import Run, grpo
from .harness import ZSCORES, assert_statistics, near

objective, statistics, CASES = grpo.objective, grpo.statistics, grpo.CASES


def budget(module: ModuleType, price: float, **flags: object) -> object:
    """Return a budget with this price of length."""
    made = module.Budget(replace(module.Args(), **flags), ALONE)
    made.price = price
    return made


def check_charge(module: ModuleType) -> None:
    """Rewards become R - λ c, at the price before its step. The verifier's own rewards do not
    change."""
    rewards, lengths = torch.tensor([[1.0, 1, 0, 0]]), torch.tensor([[5.0, 20, 30, 10]])
    made = budget(module, 0.2, length_budget=10, price_lr=1.0, price_ceiling=9.0)
    near(made.charge(rewards, lengths), [[1.0, 0.8, -0.4, 0]], "rewards less the charge", 1e-6)
    assert rewards.tolist() == [[1, 1, 0, 0]]
    near(made.statistics()["charged"][0] / made.statistics()["charged"][1], 0.15, "charged", 1e-6)
    assert_statistics(made.statistics(), {"over_budget": (2, 4), "price": (0.2, 1)})


def check_price(module: ModuleType) -> None:
    """λ moves by η (mean |y| / B - 1): up if responses are too long on average, otherwise down,
    even if some are too long. It stays between floor and ceiling."""
    flags = {"length_budget": 10, "price_lr": 0.1, "price_floor": 0.01, "price_ceiling": 0.5}
    for lengths, before, after in (
        ([10, 20], 0.2, 0.25),  # 15 on average: 0.1 (1.5 - 1)
        ([1, 15], 0.2, 0.18),  # one is too long, their mean is 8
        ([2, 2], 0.05, 0.01),  # -0.03: the floor
        ([90, 90], 0.2, 0.5),  # 1.0: the ceiling
    ):
        made = budget(module, before, **flags)
        made.charge(torch.zeros(1, 2), torch.tensor([lengths]).float())
        near(made.price, after, f"the price after lengths {lengths}", 1e-6)


def check_right_beats_wrong(module: ModuleType) -> None:
    """With the defaults the longest right answer is worth more than the shortest wrong one, at any
    price."""
    args = module.Args()
    lengths = torch.tensor([[float(args.max_new_tokens), 1.0]])
    right, wrong = budget(module, args.price_ceiling).charge(torch.tensor([[1.0, 0]]), lengths)[0]
    assert right > wrong


SHARED = ZSCORES


RUN = Run(
    stored={"length_budget": 8, "price_lr": 1.0, "price_ceiling": 0.5, "grad_clip": 5.0},
    needs={"price_floor": {"price_floor": 0.2, "price_lr": 0.0}},
    refuses=(("--price_floor 1", "--price_ceiling 0.3: below price_floor or above 1e6"),),
)
