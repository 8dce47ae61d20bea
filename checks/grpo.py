"""GRPO: outside numbers, closed forms, exact enumerations."""

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from . import POLICIES, ZSCORES, Batch, Run, clip_statistics, every_sample, k3, loss_and_gradient
from . import loss_of, near, no_kl, one, response_mean, surrogate, weight


def objective(b: Batch) -> tuple[Tensor, int]:
    """DeepSeekMath's objective; with `--kl_ratio` DeepSeek-V3.2's, whose k3 is multiplied by r."""
    kl = b.args.beta * k3(b) if b.args.beta else 0.0
    return response_mean(surrogate(b) - kl, b.mask)


statistics = clip_statistics
CASES = [
    {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.3},
    {"clip_low": 0.3, "clip_high": 0.2, "beta": 0.3, "kl_ratio": True},
    {"beta": 0.0},
]


# Above 1 first: there "max for min" fails, and below 1 "clip without min"
UP = {1.0: 1.0, 1.1: 1.1, 1.25: 0, 1.3: 0, 1.5: 0, 2.0: 0, 4.0: 0, 0.9: 0.9, 0.75: 0.75, 0.5: 0.5}
DOWN = {0.5: 0, 0.75: 0, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.3: 1.3, 2.0: 2.0, 4.0: 4.0}


def check_coefficients(module: ModuleType) -> None:
    """The gradient weight of a one-token response is r Â, or 0 if the clip acts: r > 1.2 with Â >
    0, or r < 0.8 with Â < 0."""
    for advantage, table in ((1.0, UP), (-1.0, DOWN)):
        for ratio, expected in table.items():
            found = weight(module, ratio, advantage)
            near(found, advantage * expected, f"the weight at r = {ratio}, Â = {advantage}")


def check_eos_counts(module: ModuleType) -> None:
    """The last token of a response, its EOS, receives gradient like the others; padding receives
    none."""
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    batch = {"logp": -mask, "old_logp": -mask, "advantages": one(1.0, 1.0)[0], "mask": mask}
    _, gradient = loss_and_gradient(module, no_kl(module), **batch)
    expected = -mask / mask.sum(1, keepdim=True) / 2
    near(gradient, expected, "∂ loss / ∂ log π of responses of 3 tokens and of 1", 1e-6)


def kl_term(module: ModuleType, theta: Tensor, ref: Tensor, draws: list, **flags: object) -> Tensor:
    """Return the loss with β = 1 and Â = 0 over all samples of π_old."""
    rows, old = every_sample(draws)
    columns = {"logp": theta.log_softmax(0), "old_logp": old, "ref_logp": ref}
    batch = {name: x[rows][:, None] for name, x in columns.items()}  # [n, 1]
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    args = replace(module.Args(), beta=1.0, **flags)
    loss = loss_of(module, args, **batch, mask=ones, advantages=0 * ones[:, 0])
    return loss


def check_kl(module: ModuleType) -> None:
    """Over all samples of π_θ the KL term is KL(π_θ ‖ π_ref)."""
    for draws, other in zip(POLICIES, POLICIES[1:]):
        (_, logp), (_, ref) = every_sample(draws), every_sample(other)
        kl = (logp.exp() * (logp - ref)).sum()
        loss = kl_term(module, logp, ref, draws)
        near(loss, kl, "the KL term's mean under π_θ, against KL(π_θ ‖ π_ref)")


def check_kl_ratio(module: ModuleType) -> None:
    """With kl_ratio, over all samples of π_old, the KL term is KL(π_θ ‖ π_ref) in value and
    gradient, although π_θ is another policy. Without the flag it is so in neither."""
    draws, other, third = POLICIES
    theta, ref = every_sample(other)[1].requires_grad_(), every_sample(third)[1]
    logp = theta.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum()
    (truth,) = torch.autograd.grad(kl, theta)
    found = {}
    for weighed in (True, False):
        loss = kl_term(module, theta, ref, draws, kl_ratio=weighed)
        found[weighed] = loss, torch.autograd.grad(loss, theta)[0]
    near(found[True][0], kl, "with kl_ratio the KL term, over all samples of π_old")
    near(found[True][1], truth, "its gradient by the logits, against that of KL(π_θ ‖ π_ref)")
    assert abs(found[False][0] - kl) > 1e-3, "without kl_ratio k3 is weighed by r, too"
    assert not torch.allclose(found[False][1], truth, rtol=1e-2)


FIXTURES = {"grpo_eps0.2_seqmean": {}}
SHARED = ZSCORES
RATIO = "ratio = (logp - batch.old_logp).exp()"
SURROGATE = "torch.minimum(ratio * A, clipped * A)"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
WEIGHED = "kl = (logp - batch.old_logp).exp() * kl"
RETURN = "return -per_response.sum(), mask.new_tensor(len(mask))"
STD = "rewards.std(dim=1, keepdim=True)"
NO_EOS = "(objective * (e := mask * (mask.cumsum(1) < mask.sum(1)[:, None]))).sum(1) / e.sum(1)"
# Mistakes that students and public code make: `labs.grade --hint` and `labs.bug` name them
MUTANTS = {
    "equal rewards not made 0": ("rewards = rewards - rewards[:, :1]", "rewards = 1.0 * rewards"),
    "mean of the batch": ("rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
    "population std": (STD, "rewards.std(dim=1, keepdim=True, correction=0)"),
    "sequence ratio": (
        RATIO,
        "ratio = ((logp - batch.old_logp) * mask).sum(1, keepdim=True).exp().expand_as(logp)",
    ),
    "max for min": (SURROGATE, SURROGATE.replace("minimum", "maximum")),
    "clip without min": (SURROGATE, "clipped * A"),
    "KL direction": ("batch.ref_logp - logp", "logp - batch.ref_logp"),
    "k3 times r, a number": (WEIGHED, WEIGHED.replace("logp -", "logp.detach() -")),
    "dropped EOS": (AVERAGE, NO_EOS),
    "token-mean": (RETURN, "return -(objective * mask).sum(), mask.sum()"),
    "a mean where the sum is asked": (RETURN, RETURN.replace("sum()", "mean()")),
    "mean of the part": (RETURN, "return -per_response.mean(), mask.new_tensor(1.0)"),
}


RUN = Run(stored={"beta": 0.1, "grad_clip": 6.0}, learns_in=8)
