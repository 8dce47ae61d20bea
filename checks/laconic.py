"""LACONIC: GRPO's loss, the cost of length, and how the price moves."""

from dataclasses import replace
from types import ModuleType

import torch
from common.distributed import World

from . import grpo, written_here

objective, statistics, CASES = grpo.objective, grpo.statistics, grpo.CASES


def budget(module: ModuleType, price: float = 0.0, **flags: object) -> object:
    """A budget of 10 tokens at some price of length."""
    args = replace(module.Args(), **({"length_budget": 10} | flags))
    made = module.Budget(args, World(0, 1, torch.device("cpu")))
    made.price = price
    return made


def check_charge(module: ModuleType) -> None:
    """R - λ c at the price before its step; the verifier's own rewards do not change."""
    rewards, lengths = torch.tensor([[1.0, 1, 0, 0]]), torch.tensor([[5.0, 20, 30, 10]])
    made = budget(module, 0.2, price_lr=1.0, price_ceiling=9.0)
    charged = made.charge(rewards, lengths)
    assert torch.allclose(charged, torch.tensor([[1.0, 0.8, -0.4, 0]]))
    assert rewards.tolist() == [[1, 1, 0, 0]]
    found = {name: float(a) / b for name, (a, b) in made.statistics().items()}
    assert abs(found["charged"] - 0.15) < 1e-6 and found["over_budget"] == 0.5
    assert found["price"] == 0.2


def check_price(module: ModuleType) -> None:
    """λ moves by η (mean |y| / B - 1): up if responses are too long on average, otherwise down,
    even if some are too long. It stays between floor and ceiling."""
    bounds = {"price_floor": 0.01, "price_ceiling": 0.5}
    for lengths, before, after in (
        ([10, 20], 0.2, 0.25),  # 15 on average: 0.1 (1.5 - 1)
        ([10, 10], 0.2, 0.2),
        ([1, 15], 0.2, 0.18),  # one is too long, their mean is 8
        ([2, 2], 0.05, 0.01),  # -0.03: the floor
        ([90, 90], 0.2, 0.5),  # 1.0: the ceiling
    ):
        made = budget(module, before, price_lr=0.1, **bounds)
        made.charge(torch.zeros(1, 2), torch.tensor([lengths]).float())
        assert abs(made.price - after) < 1e-6, lengths


def check_right_beats_wrong(module: ModuleType) -> None:
    """With the defaults the longest right answer is worth more than the shortest wrong one, at any
    price."""
    args = module.Args()
    made = budget(module, args.price_ceiling, length_budget=args.length_budget)
    lengths = torch.tensor([[float(args.max_new_tokens), 1.0]])
    right, wrong = made.charge(torch.tensor([[1.0, 0]]), lengths)[0]
    assert right > wrong


CHECKS = [*written_here(globals()), *grpo.CHECKS]
