"""PACED-RL: trajectory balance with every response enumerated, and goldilocks' choice."""

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from . import Batch, goldilocks, loss_of, written_here

RIGHT = torch.tensor([1.0, 0, 0, 1, 0, 1], dtype=torch.float64)  # of six responses
COUNTS = (
    [1, 7, 3, 4, 2, 3],
    [12, 2, 1, 1, 2, 2],
    [1, 1, 1, 15, 1, 1],
)  # how often π_old gives each
BETAS = (0.05, 0.5, 2.0)


def objective(b: Batch) -> tuple[Tensor, int]:
    """Trajectory balance: -β/2 (log Z + log π_θ(y)/π_old(y) - R/β)². A is R - V, V = β log Z."""
    log_ratio = ((b.logp - b.old) * b.mask).sum(1)
    return -(b.args.anchor / 2 * (log_ratio - b.A / b.args.anchor) ** 2).mean(), len(b.A)


def statistics(b: Batch) -> dict[str, tuple]:
    """anchor_kl: the mean over responses of β log(π_old/π_θ)."""
    log_ratio = ((b.logp - b.old) * b.mask).sum(1)
    return {"anchor_kl": (-b.args.anchor * log_ratio.sum(), len(b.A))}


CASES = [{}, {"anchor": 0.5}]


def balance(module: ModuleType, counts: list[int], theta: Tensor, V: Tensor, beta: float) -> Tensor:
    """The module's loss of a policy with these logits, in expectation over π_old: a group that
    holds every response in exact proportion."""
    weights = torch.tensor(counts)
    rows = torch.repeat_interleave(torch.arange(6), weights)  # [n]
    logp = theta.log_softmax(0)[rows][:, None]  # [n, 1]
    old_logp = (weights.double() / weights.sum()).log()[rows][:, None]  # [n, 1]
    A = module.advantages(RIGHT[rows][None], V.reshape(1))[0]  # [n]
    batch = {"logp": logp, "old_logp": old_logp, "mask": torch.ones_like(logp), "advantages": A}
    return loss_of(module, replace(module.Args(), anchor=beta), **batch)[0]


def check_balance_is_the_regularised_optimum(module: ModuleType) -> None:
    """All squares are 0 at π_θ = π_old exp(R/β) / Z with log Z = log E_old[exp(R/β)], and nowhere
    else. This Z gives the accuracy: p = (Z - 1) / (exp(1/β) - 1)."""
    for beta in BETAS:
        for counts in COUNTS:
            old = torch.tensor(counts).double() / sum(counts)
            Z, p = (old * (RIGHT / beta).exp()).sum(), (old * RIGHT).sum()
            assert torch.isclose((Z - 1) / torch.tensor(1 / beta).double().expm1(), p)
            best, V = old.log() + RIGHT / beta, beta * Z.log()
            assert balance(module, counts, best, V, beta) < 1e-20
            assert balance(module, counts, best, V + 0.1, beta) > 1e-4
            assert balance(module, counts, best + RIGHT, V, beta) > 1e-4 * beta


def check_advantages(module: ModuleType) -> None:
    """R - V of the prompt itself. A group that is all right has advantages, too, if V < 1."""
    rewards = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    found = module.advantages(rewards, torch.tensor([0.75, 0.25]))
    assert torch.equal(found, torch.tensor([[0.25, 0.25, 0.25], [0.75, -0.25, -0.25]]))


SHARED = (goldilocks.check_select, goldilocks.check_select_is_uniform_at_explore_1)
CHECKS = [*written_here(globals()), *SHARED]
