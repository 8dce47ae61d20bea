"""Goldilocks: GRPO's loss, the choice of prompts, and the law that says which prompts teach most.
(tests/loop holds the teacher.)"""

import random
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from common.distributed import ALONE

from . import Run, grpo
from .harness import POLICIES, RIGHT, ZSCORES, every_sample, loss_of, near, no_kl

objective, statistics, CASES = grpo.objective, grpo.statistics, grpo.CASES


def check_learning_value(module: ModuleType) -> None:
    """The learning value is sqrt(p̂ (1-p̂)) with p̂ over the group. It is 0 if all are right, all
    wrong, or all equally partly right."""
    rewards = [[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0.5, 0.3, 0.2, 0.2]]
    # Partial rewards: their standard deviation
    expected = torch.tensor([3**0.5 / 4, 0.5, 0, 0, 0.015**0.5])
    curriculum = object.__new__(module.Curriculum)
    assert torch.allclose(curriculum.learning_value(torch.tensor(rewards)), expected)
    assert (curriculum.learning_value(torch.full((1, 8), 0.7)) == 0).all()


def check_select(module: ModuleType) -> None:
    """With explore 0 each slot gets its best candidate, but no prompt is taken twice. If all of a
    slot's prompts are taken, it gets the best one again."""
    values = torch.tensor([[0.1, 0.4, 0.3], [0.5, 0.2, 0.1], [0.2, 0.3, 0.4], [0.3, 0.2, 0.1]])
    problems = [[SimpleNamespace(prompt=p) for p in slot] for slot in ("abc", "bcd", "edc", "bbb")]
    chosen = module.select(values, problems, 0.0, random.Random(0))
    # c, since b is gone; d, since c is gone; b again
    assert [choice.problem.prompt for choice in chosen] == ["b", "c", "d", "b"]
    assert not any(choice.by_chance for choice in chosen)
    near([choice.above for choice in chosen], [0.4 / 3, -0.2 / 3, 0, 0.1], "f above the mean", 1e-6)


def check_select_is_uniform_at_explore_1(module: ModuleType) -> None:
    """With explore 1 every candidate is taken equally often, for any values. With a smaller explore
    this share of the slots is filled at random."""
    rng, values = random.Random(0), torch.arange(8.0).repeat(4000, 1)
    problems = [[SimpleNamespace(prompt=f"{i}.{k}") for k in range(8)] for i in range(4000)]
    drawn = [choice.problem.prompt[-1] for choice in module.select(values, problems, 1.0, rng)]
    counts = torch.bincount(torch.tensor(list(map(int, drawn))), minlength=8)
    assert (counts - 500).abs().max() < 4 * (4000 / 8 * 7 / 8) ** 0.5  # four standard deviations
    some = module.select(values, problems, 0.25, rng)
    share = sum(choice.by_chance for choice in some) / 4000
    assert abs(share - 0.25) < 0.03
    assert all(choice.by_chance or choice.problem.prompt[-1] == "7" for choice in some)


def check_gradient_law(module: ModuleType) -> None:
    """The gradient's norm is sqrt(p (1-p)) times the distance between the mean scores of right and
    wrong answers. `learning_value` estimates the first factor."""
    for draws in POLICIES:
        rows, log_pi = every_sample(draws)
        theta, pi, n = log_pi.clone().requires_grad_(), log_pi.exp(), len(rows)
        logp = theta.log_softmax(0)[rows][:, None]
        batch = {"logp": logp, "old_logp": logp.detach(), "mask": torch.ones_like(logp)}
        batch["advantages"] = module.advantages(RIGHT[rows][None])[0]
        loss_of(module, no_kl(module), **batch).backward()
        p = (pi * RIGHT).sum()
        scores = torch.eye(6, dtype=torch.float64) - pi  # ∇ log π of each outcome, a row each
        apart = (pi * RIGHT) @ scores / p - (pi * (1 - RIGHT)) @ scores / (1 - p)
        law = (p * (1 - p)).sqrt() * apart.norm()
        ratio = theta.grad.norm() / law * (n / (n - 1)) ** 0.5  # the file divides by a sample's std
        near(ratio, 1, f"|∇J|, divided by the law's, at p = {p:.3g}", 1e-3)


def check_lesson(module: ModuleType) -> None:
    """The teacher is shown each prompt with the learning value of its own group."""
    curriculum, shown = object.__new__(module.Curriculum), []
    curriculum.args = module.Args(teacher_batch=3, window=3, teacher_updates=1)
    curriculum.world, curriculum.rng, curriculum.window = ALONE, random.Random(0), [([9], 0.4)]
    curriculum.predict = lambda ids, targets: shown.extend(zip(ids, targets.tolist()))
    curriculum.teacher = curriculum.optimizer = mock.MagicMock()
    chosen = [module.Choice(SimpleNamespace(prompt_ids=[k]), 0.0, False) for k in range(3)]
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    with mock.patch.multiple(module, divide_gradients=mock.DEFAULT, clip_gradients=lambda *_: 1.0):
        curriculum.learn(chosen, rewards)
    targets = {ids[0]: target for ids, target in shown}
    near([targets[k] for k in range(3)], [3**0.5 / 4, 0.5, 0.0], "targets of the prompts", 1e-6)


PARTS = [grpo.check_coefficients, grpo.check_eos_counts, grpo.check_kl, grpo.check_kl_ratio]
SHARED = [*ZSCORES, *PARTS]
STD = "std(dim=1, correction=0)"
MUTANTS = {
    "p (1-p)": (STD, "var(dim=1, correction=0)"),
    "the worst candidate": ("key=lambda k: -scores[k]", "key=lambda k: scores[k]"),
    "a prompt twice": ("if problems[k].prompt not in taken", "if True"),
}


# A teacher that chooses from the second step on
CHOICE = {"candidates": 5, "teacher_batch": 8, "window": 8, "teacher_updates": 1, "explore": 0.0}
RUN = Run(
    stored=CHOICE | {"beta": 0.01, "grad_clip": 4.0, "lr": 3e-4},
    first=2,  # the teacher chooses
    small="--candidates 4 --teacher_batch 8 --window 20",
    needs={"teacher_batch": {"window": 16}},
    refuses=(("--teacher_batch 64 --window 32", "--teacher_batch 64"),),
)
