"""PACED-RL: trajectory balance with every response enumerated, and goldilocks' choice."""

import itertools
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from . import Run, goldilocks
from .formulas import Batch
from .harness import POLICIES, RIGHT, every_sample, loss_of, near


def objective(b: Batch) -> tuple[Tensor, int]:
    """J is the mean of -β/2 (log Z + log π_θ(y)/π_old(y) - R/β)². A is R - V with V = β log Z."""
    log_ratio = ((b.logp - b.old) * b.mask).sum(1)
    return -(b.args.anchor / 2 * (log_ratio - b.A / b.args.anchor) ** 2).mean(), len(b.A)


def statistics(b: Batch) -> dict[str, tuple]:
    """anchor_kl is the mean over responses of β log(π_old/π_θ)."""
    log_ratio = ((b.logp - b.old) * b.mask).sum(1)
    return {"anchor_kl": (-b.args.anchor * log_ratio.sum(), len(b.A))}


CASES = [{}, {"anchor": 0.5}]


def balance(module: ModuleType, draws: list, logits: Tensor, V: Tensor, beta: float) -> Tensor:
    """Return the module's loss of a policy with these logits, in expectation over π_old."""
    rows, old = every_sample(draws)
    batch = {"logp": logits.log_softmax(0)[rows][:, None], "old_logp": old[rows][:, None]}
    batch["advantages"] = module.advantages(RIGHT[rows][None], V.reshape(1))[0]  # [n]
    args = replace(module.Args(), anchor=beta)
    return loss_of(module, args, **batch, mask=torch.ones(len(rows), 1))


def check_balance_is_the_regularised_optimum(module: ModuleType) -> None:
    """All squares are 0 at π_θ = π_old exp(R/β) / Z with log Z = log E_old[exp(R/β)], and nowhere
    else."""
    for draws, beta in itertools.product(POLICIES, (0.05, 0.5, 2.0)):
        best = every_sample(draws)[1] + RIGHT / beta
        V = beta * best.exp().sum().log()  # β log Z
        near(balance(module, draws, best, V, beta), 0, "trajectory balance at its optimum", 1e-20)
        assert balance(module, draws, best, V + 0.1, beta) > 1e-4
        assert balance(module, draws, best + RIGHT, V, beta) > 1e-4 * beta


RUN = Run(
    stored=goldilocks.CHOICE | {"grad_clip": 31.0, "lr": 3e-4},
    small=goldilocks.RUN.small,
    needs=goldilocks.RUN.needs,
)
