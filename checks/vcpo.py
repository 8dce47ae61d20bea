"""VCPO: the authors' numbers for loss, baseline and effective sample size."""

import math
from types import ModuleType
from unittest import mock

import torch
from common.batch import Rollout
from common.distributed import ALONE
from torch import Tensor

from . import Run
from .formulas import Batch, response_mean
from .harness import FIXTURE, advantages_match, check_equal_rewards, loss_and_gradient
from .harness import measured, near


def advantages(R: Tensor) -> Tensor:
    """Return z-scores with the population's standard deviation. (The file then subtracts b.)"""
    std = R.std(-1, correction=0, keepdim=True)
    return (R - R.mean(-1, keepdim=True)) / torch.where(std > 0, std, 1.0)


def age(b: Batch) -> Tensor:
    """Return w = π_θ(y)/μ(y) of whole responses `[n]`, without a gradient."""
    return ((b.logp.detach() - b.mu) * b.mask).sum(1).exp()


def objective(b: Batch) -> tuple[Tensor, int]:
    """J is the mean over responses of min(w, cap) Â 1/|y| Σ log π_θ."""
    weight = age(b).clip(max=b.args.is_cap) * b.A
    return response_mean(weight[:, None] * b.logp, b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """weight is the mean over responses of min(w, cap), with w of the whole response against μ;
    weight_max is the largest w before the cap."""
    w = age(b)
    return {"weight": (w.clip(max=b.args.is_cap).sum(), len(w)), "weight_max": (w.max(), "max")}


CASES = [{}, {"is_cap": 1.5}]


def authors() -> dict[str, Tensor]:
    """Return the fixture's two groups of four responses, and the numbers of the authors'
    functions."""
    stored = {name: x for name, x in FIXTURE["vcpo"].items() if name != "source"}
    return {name: torch.tensor(x, dtype=torch.float64) for name, x in stored.items()}


def check_weights(module: ModuleType) -> None:
    """The gradient weight is min(w, 8) Â / |y| / B, with w of the whole response against μ. It is
    the authors' gradient, as precisely as the float32 of their std allows, and finite for any w."""
    stored = authors()
    R = stored["rewards"].view(2, 4)
    A = ((R - stored["baseline"][:, None]) / R.std(dim=1, keepdim=True, correction=0)).flatten()
    columns = {name: stored[name] for name in ("mask", "logp", "rollout_logp")}
    columns |= {"old_logp": stored["logp"], "advantages": A}
    _, gradient = loss_and_gradient(module, module.Args(), **columns)
    near(gradient, stored["grad"], "∂ loss / ∂ log π on the authors' batch", 1e-7)
    weight = module.truncated(module.Args(), torch.tensor([-500.0, 500.0]).double())
    near(weight, [math.exp(-20), 8.0], "min(w, 8) at log w = ±500")
    columns["rollout_logp"] = columns["rollout_logp"] - 300
    largest = measured(module, module.Args(), **columns)["weight_max"][0]
    near(largest, math.exp(20), "weight_max at log w > 300", 1e-3)


def check_advantages(module: ModuleType) -> None:
    """Advantages are z-scores with the population's standard deviation, and 0 for a group of equal
    rewards."""
    advantages_match(module, "ddof0_eps1e-8", advantages)


def check_baseline(module: ModuleType) -> None:
    """b is the same as from the authors' function with the same norms, and finite for any
    weights."""
    stored = authors()
    R, norms = stored["rewards"].view(2, 4), stored["norms"].view(2, 4)
    columns = [stored[name] for name in ("logp", "rollout_logp", "mask")]
    log_w = module.log_weight(*columns).view(2, 4)
    shift = module.baseline_shift(log_w, norms, module.advantages(R))
    near(R.mean(1) + R.std(dim=1, correction=0) * shift, stored["baseline"], "b", 1e-8)
    assert module.baseline_shift(400 * log_w, norms, module.advantages(R)).isfinite().all()


def check_ess(module: ModuleType) -> None:
    """ESS/B is that of the authors' function. A factor of all weights, however large or small, does
    not change it. (In their code epsilon and float32 do.)"""
    stored = authors()
    log_w = ((stored["logp"] - stored["rollout_logp"]) * stored["mask"]).sum(1)
    for shift in (0.0, 700.0, -700.0):
        near(module.ess_ratio(log_w + shift), stored["ess_ratio"], "ESS/B", 1e-8)


def check_queue(module: ModuleType) -> None:
    """Batches leave in the order in which they came, `--lag` later."""
    stale = module.Stale(module.Args(lag=2, steps=9), ALONE)
    assert [stale.exchange([k]) for k in range(5)] == [[], [], [0], [1], [2]]


def check_shifts(module: ModuleType) -> None:
    """A group's b depends on the weights and norms of its own responses. It is 0 if rewards are
    equal."""
    generator = torch.Generator().manual_seed(1)
    logp, mu, norms = torch.rand(3, 12, 1, generator=generator, dtype=torch.float64)
    A = module.advantages(torch.tensor([[1.0, 0, 0, 0], [1] * 4, [0, 1, 1, 0]]).double())
    batch = Rollout(
        advantages=A.flatten(), rollout_logp=mu, mask=torch.ones_like(mu), row=norms, tokens=mu
    )

    def passed(policy: object, part: Rollout, *more: object) -> tuple[Tensor, Tensor]:
        return logp[: len(part)], part.row[:, 0]

    with mock.patch.object(module, "gradient_norms", passed):
        shifts = module.baseline_shifts(module.Args(group_size=4), None, batch, ALONE).view(3, 4)
    log_w = (logp[:8] - mu[[*range(4), *range(8, 12)]]).view(2, 4)
    expected = module.baseline_shift(log_w, norms[[*range(4), *range(8, 12)]].view(2, 4), A[::2])
    near(shifts[[0, 2]], expected[:, None].expand(2, 4), "b of two groups")
    near(shifts[1], torch.zeros(4), "b of equal rewards")


SHARED = [check_equal_rewards]
LOG_WEIGHT = "((logp.detach() - rollout_logp) * mask)"
HEAVY = "2 * log_w + 2 * norms.clamp(min=1e-30).log()"
ESS = "(2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp()"
MUTANTS = {
    "no cap": (".exp().clamp(max=args.is_cap)", ".exp()"),
    "weight not detached": (LOG_WEIGHT, "((logp - rollout_logp) * mask)"),
    "norms ignored": (HEAVY, "2 * log_w + 0 * norms"),
    "ESS in plain space": (ESS, "(log_w.exp().sum() ** 2 / log_w.exp().square().sum())"),
}


RUN = Run(
    stored={"lag": 1, "rho_on": 0.5, "grad_clip": 32.0, "steps": 3},  # one only fills the queue
    small="--lag 1",
    first=2,
    needs={"lag": {"lag": 0}},
    learns_in=30,  # one update a batch, and none in the first eight steps
    refuses=(("--lag 8 --steps 8", "--lag 8: must be"),),
)
