"""GRPO: outside numbers, closed forms, exact enumerations."""

import itertools
from dataclasses import replace
from types import ModuleType

import torch

from . import KL, RESPONSE_MEAN, SIDES, ZSCORE, ZSCORES, busy_batch, check_clip_statistics
from . import check_kl_ratio, check_parts_add_up, loss_of, matches, near, no_kl, number, one
from . import outcome, weighs, written_here


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


def check_asymmetric_clip(module: ModuleType) -> None:
    """clip_low bounds ratios below 1 and clip_high those above: 0.75 and 1.25 are cut by one of
    them only."""
    for low, high in ((0.2, 0.3), (0.3, 0.2)):
        bounds = {"clip_low": low, "clip_high": high}
        weighs(module, 1.25, 1.0, 1.25 if high == 0.3 else 0, **bounds)
        weighs(module, 0.75, -1.0, -0.75 if low == 0.3 else 0, **bounds)


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
    other_direction = (reference.exp() * (reference - policy)).sum()
    assert not torch.isclose(exact, other_direction, rtol=1e-2)


def check_kl_gradient(module: ModuleType) -> None:
    """The full gradient weight: M r Â + β (π_ref/π_θ - 1)."""
    batch, args = busy_batch(), replace(module.Args(), clip_low=9.0, clip_high=99.0, beta=0.3)
    grad = outcome(module, batch, args)[1]
    expected = (batch["logp"] - batch["old_logp"]).exp() * batch["advantages"][:, None]
    expected = expected + 0.3 * ((batch["ref_logp"] - batch["logp"]).exp() - 1)
    expected = -expected * batch["mask"] / batch["mask"].sum(1, keepdim=True) / 6
    near(grad, expected, "∂ loss / ∂ log π of six responses, nothing clipped, β = 0.3", 1e-9)


CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
CHECKS += [check_clip_statistics, check_kl_ratio]
RATIO, SURROGATE = "(logp - batch.old_logp).exp()", "torch.minimum(ratio * A, clipped * A)"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
RETURN = "return -per_response.sum(), mask.new_tensor(len(mask)), stats"
STD = "rewards.std(dim=1, keepdim=True)"
NO_EOS = "(objective * (e := mask * (mask.cumsum(1) < mask.sum(1)[:, None]))).sum(1) / e.sum(1)"
SEQUENCE_RATIO = "((logp - batch.old_logp) * mask).sum(1, keepdim=True).exp().expand_as(logp)"
CLIPPED = "ratio.clamp(1 - args.clip_low, 1 + args.clip_high)"
IN_LOGS = "(logp - batch.old_logp).clamp(-args.clip_low, args.clip_high).exp()"
MUTANTS = {
    **ZSCORE,
    **SIDES,
    **KL,
    **RESPONSE_MEAN,
    "clip in log space": (CLIPPED, IN_LOGS),
    "clip_high on both sides": (CLIPPED, CLIPPED.replace("clip_low", "clip_high")),
    "divided by the longest response": (
        AVERAGE,
        "(objective * mask).sum(dim=1) / mask.sum(dim=1).max()",
    ),
    "sequence ratio": (RATIO, SEQUENCE_RATIO),
    "detached ratio": (RATIO, "(logp.detach() - batch.old_logp).exp()"),
    "no mask": (AVERAGE, "objective.mean(dim=1)"),
    "sum for mean": (AVERAGE, "(objective * mask).sum(dim=1)"),
    "dropped EOS": (AVERAGE, NO_EOS),
    "mean of the part": (RETURN, "return -per_response.mean(), mask.new_tensor(1.0), stats"),
    "KL direction": ("batch.ref_logp - logp", "logp - batch.ref_logp"),
    "KL rewarded": ("objective - args.beta * k3", "objective + args.beta * k3"),
    "population std": (STD, "rewards.std(dim=1, keepdim=True, correction=0)"),
    "mean of the batch": ("rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
}
