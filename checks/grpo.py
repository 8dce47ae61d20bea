"""GRPO: outside numbers, closed forms, exact enumerations."""

import itertools
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from . import ZSCORES, Batch, clip_statistics, k3, loss_of, matches, near, no_kl, number
from . import one, response_mean, surrogate, weighs, written_here


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


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL, OpenRLHF and others on the toy batch."""
    matches(module, "grpo_eps0.2_seqmean")


UP = {0.5: 0.5, 0.75: 0.75, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.25: 0, 1.3: 0, 1.5: 0, 2.0: 0, 4.0: 0}
DOWN = {0.5: 0, 0.75: 0, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.3: 1.3, 2.0: 2.0, 4.0: 4.0}


def check_coefficients(module: ModuleType) -> None:
    """The gradient weight c(r, Â) on ∇ log π, for one-token responses."""
    for advantage, table in ((1.0, UP), (-1.0, DOWN)):
        for ratio, expected in table.items():
            weighs(module, ratio, advantage, advantage * expected)


def check_eos_counts(module: ModuleType) -> None:
    """The last token of a response, its EOS, receives gradient like the others; padding receives
    none."""
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    logp = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
    batch = {"old_logp": logp.detach().clone(), "advantages": one(1.0, 1.0)[0], "mask": mask}
    loss_of(module, no_kl(module), logp=logp, **batch)[0].backward()
    expected = -mask / mask.sum(1, keepdim=True) / 2
    near(logp.grad, expected, "∂ loss / ∂ log π of responses of 3 tokens and of 1", 1e-6)


def check_kl(module: ModuleType) -> None:
    """With samples weighted by π_θ the KL term's value is KL(π_θ ‖ π_ref), by enumerating all
    3-token sequences."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]
    policy, reference = (logits.log_softmax(-1) for logits in draw)
    args, estimate, exact = replace(module.Args(), beta=1.0), 0.0, 0.0
    for sequence in itertools.product(range(4), repeat=3):
        picked = torch.tensor(sequence)[:, None]
        logp, ref_logp = (table.gather(1, picked).T for table in (policy, reference))
        batch = {"logp": logp, "old_logp": logp, "ref_logp": ref_logp}
        batch |= {"advantages": one(0.0)[0], "mask": one(1.0, 1.0, 1.0)}
        loss, stats = loss_of(module, args, **batch)
        probability = logp.sum().exp()
        estimate += probability * loss * 3  # a mean over 3 tokens
        exact += probability * (logp - ref_logp).sum()
        total, tokens = stats["ref_kl"]
        near(loss, total / tokens, "with β = 1 and Â = 0 the loss, against ref_kl", 1e-8)
        assert loss >= 0, f"k3 is never negative, and here it is {number(loss)}"
    near(estimate, exact, "the KL term's mean under π_θ, against KL(π_θ ‖ π_ref)")


def check_kl_ratio(module: ModuleType) -> None:
    """With kl_ratio, over all samples of π_old, the KL term is KL(π_θ ‖ π_ref), and its gradient is
    that of this KL, although π_θ is another policy. Without the flag, it is neither."""
    counts = torch.tensor([1, 7, 3, 4, 2, 3])
    outcomes, old = torch.repeat_interleave(torch.arange(6), counts), counts.double() / counts.sum()
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(2, 6, generator=generator, dtype=torch.float64) / 2
    theta, ref = (old.log() + noise[0]).requires_grad_(), (old.log() + noise[1]).log_softmax(0)
    logp = theta.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum()
    (truth,) = torch.autograd.grad(kl, theta, retain_graph=True)
    rows = {"logp": logp, "old_logp": old.log(), "ref_logp": ref}
    batch = {name: x[outcomes][:, None] for name, x in rows.items()}  # in exact proportion
    ones = torch.ones(len(outcomes), 1, dtype=torch.float64)
    batch |= {"mask": ones, "advantages": 0 * ones[:, 0]}
    found = {}
    for weighed in (True, False):
        args = replace(module.Args(), beta=1.0, kl_ratio=weighed)
        loss, _ = loss_of(module, args, **batch)
        found[weighed] = loss, torch.autograd.grad(loss, theta, retain_graph=True)[0]
    near(found[True][0], kl, "with kl_ratio the KL term, over all samples of π_old")
    near(found[True][1], truth, "its gradient by the logits, against that of KL(π_θ ‖ π_ref)")
    assert abs(found[False][0] - kl) > 1e-3, "without kl_ratio k3 is weighed by r, too"
    assert not torch.allclose(found[False][1], truth, rtol=1e-2)


CHECKS = [*ZSCORES, *written_here(globals())]
RATIO, SURROGATE = "(logp - batch.old_logp).exp()", "torch.minimum(ratio * A, clipped * A)"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
RETURN = "return -per_response.sum(), mask.new_tensor(len(mask)), stats"
STD = "rewards.std(dim=1, keepdim=True)"
NO_EOS = "(objective * (e := mask * (mask.cumsum(1) < mask.sum(1)[:, None]))).sum(1) / e.sum(1)"
# Mistakes that students and public code make: `labs.grade --hint` and `labs.bug` name them
MUTANTS = {
    "equal rewards not made 0": ("rewards = rewards - rewards[:, :1]", "rewards = 1.0 * rewards"),
    "mean of the batch": ("rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
    "population std": (STD, "rewards.std(dim=1, keepdim=True, correction=0)"),
    "sequence ratio": (
        RATIO,
        "((logp - batch.old_logp) * mask).sum(1, keepdim=True).exp().expand_as(logp)",
    ),
    "max for min": (SURROGATE, SURROGATE.replace("minimum", "maximum")),
    "clip without min": (SURROGATE, "clipped * A"),
    "KL direction": ("batch.ref_logp - logp", "logp - batch.ref_logp"),
    "k3 times r, a number": ("k3 = ratio * k3", "k3 = ratio.detach() * k3"),
    "dropped EOS": (AVERAGE, NO_EOS),
    "token-mean": (RETURN, "return -(objective * mask).sum(), mask.sum(), stats"),
    "a mean where the sum is asked": (RETURN, RETURN.replace("sum()", "mean()")),
    "mean of the part": (RETURN, "return -per_response.mean(), mask.new_tensor(1.0), stats"),
}
