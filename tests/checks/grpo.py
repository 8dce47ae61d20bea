"""GRPO: outside numbers, closed forms, exact enumerations."""

import itertools
from dataclasses import replace
from types import ModuleType

import torch

from . import advantages_match, loss_of, matches, no_kl, one, terms, toy_batch, written_here
from . import weight as gradient_weight


def check_fixture(module: ModuleType) -> None:
    """Value and gradient agree with TRL, OpenRLHF and others on the toy batch."""
    matches(module, "grpo_eps0.2_seqmean")


UP = {0.5: 0.5, 0.75: 0.75, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.25: 0, 1.3: 0, 1.5: 0, 2.0: 0, 4.0: 0}
DOWN = {0.5: 0, 0.75: 0, 0.9: 0.9, 1.0: 1.0, 1.1: 1.1, 1.3: 1.3, 2.0: 2.0, 4.0: 4.0}


def check_coefficients(module: ModuleType) -> None:
    """The gradient weight c(r, Â) on ∇ log π, and the share of clipped tokens, for one-token
    responses."""
    for advantage, table in ((1.0, UP), (-1.0, DOWN)):
        for ratio, expected in table.items():
            found = gradient_weight(module, ratio, advantage)
            assert abs(found - advantage * expected) < 1e-12, (ratio, advantage)
            batch = {"logp": one(ratio).log(), "old_logp": one(0.0), "mask": one(1.0)}
            stats = loss_of(module, no_kl(module), **batch, advantages=one(advantage)[0])[1]
            cut, tokens = stats["clip_share"]
            assert (cut / tokens).item() == (expected == 0)


def check_asymmetric_clip(module: ModuleType) -> None:
    """clip_low bounds ratios below 1 and clip_high those above: 0.75 and 1.25 are cut by one of
    them only."""
    up = gradient_weight(module, 1.25, 1.0, clip_low=0.2, clip_high=0.3)
    down = gradient_weight(module, 0.75, -1.0, clip_low=0.3, clip_high=0.2)
    assert abs(up - 1.25) < 1e-12 and abs(down + 0.75) < 1e-12


def check_eos_counts(module: ModuleType) -> None:
    """The last token of a response, its EOS, receives gradient like the others; padding receives
    none."""
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    logp = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
    batch = {"old_logp": logp.detach().clone(), "advantages": one(1.0, 1.0)[0], "mask": mask}
    loss_of(module, no_kl(module), logp=logp, **batch)[0].backward()
    assert torch.allclose(logp.grad, -mask / mask.sum(1, keepdim=True) / 2)


def check_parts_add_up(module: ModuleType) -> None:
    """Summing before dividing gives the whole batch's loss for any split; averaging the parts'
    means does not."""
    batch, args = toy_batch(), no_kl(module)
    whole = loss_of(module, args, **batch)[0]
    splits = (slice(0, 1), slice(1, 6))
    parts = [terms(module, args, **{k: v[rows] for k, v in batch.items()}) for rows in splits]
    total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
    assert torch.isclose(total / count, whole, rtol=1e-14)
    assert not torch.isclose(sum(part[0] / part[1] for part in parts) / 2, whole, rtol=1e-2)


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
        assert torch.isclose(total / tokens, loss) and loss >= 0
    assert torch.isclose(estimate, exact, rtol=1e-12, atol=0)
    other_direction = (reference.exp() * (reference - policy)).sum()
    assert not torch.isclose(exact, other_direction, rtol=1e-2)


def check_kl_gradient(module: ModuleType) -> None:
    """The full gradient weight: M r Â + β (π_ref/π_θ - 1)."""
    logp = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    old_logp, ref_logp = torch.tensor([[[-1.1, -2.5]], [[-0.4, -2.2]]], dtype=torch.float64)
    batch = {"old_logp": old_logp, "ref_logp": ref_logp}
    batch |= {"advantages": one(0.7)[0], "mask": one(1.0, 1.0)}
    loss_of(module, replace(module.Args(), beta=0.3), logp=logp, **batch)[0].backward()
    alive = torch.tensor([[1.0, 0.0]])  # exp(0.1) is inside the clip, exp(0.5) is not
    expected = alive * (logp - old_logp).exp() * 0.7 + 0.3 * ((ref_logp - logp).exp() - 1)
    assert torch.allclose(-logp.grad * 2, expected.detach(), rtol=1e-12, atol=0)


def check_advantages(module: ModuleType) -> None:
    """The z-score with the sample standard deviation, to 1e-8; exactly 0 for a group all right or
    all wrong."""
    advantages_match(module, "ddof1_eps1e-6", 1e-8)
    for equal in (1.0, 0.0, 0.7):  # part marks: 0.7 - the mean of eight is 6e-8
        assert (module.advantages(torch.full((2, 8), equal)) == 0).all()


CHECKS = written_here(globals())
RATIO, SURROGATE = "(logp - old_logp).exp()", "torch.minimum(ratio * A, clipped * A)"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
RETURN = "return -per_response.sum(), mask.new_tensor(len(mask)), stats"
BOUNDS = "clamp(1 - args.clip_low, 1 + args.clip_high)"
K3, STD = "log_ref_ratio.exp() - log_ref_ratio - 1", "rewards.std(dim=1, keepdim=True)"
NO_EOS = "(objective * (e := mask * (mask.cumsum(1) < mask.sum(1)[:, None]))).sum(1) / e.sum(1)"
SEQUENCE_RATIO = "((logp - old_logp) * mask).sum(1, keepdim=True).exp().expand_as(logp)"
DUAL_CLIP = f"torch.where(A < 0, torch.maximum({SURROGATE}, 3 * A), {SURROGATE})"
MUTANTS = {
    "sign": (RETURN, RETURN.replace("-per", "per")),
    "max for min": (SURROGATE, SURROGATE.replace("minimum", "maximum")),
    "no clip": (SURROGATE, "ratio * A"),
    "clip without min": (SURROGATE, "clipped * A"),
    "bounds swapped": (BOUNDS, "clamp(1 - args.clip_high, 1 + args.clip_low)"),
    "dual clip": (SURROGATE, DUAL_CLIP),
    "no ratio": (RATIO, "1 + 0 * logp + (logp - logp.detach())"),
    "log-ratio for ratio": (RATIO, "1 + logp - old_logp"),
    "sequence ratio": (RATIO, SEQUENCE_RATIO),
    "missing detach of old_logp": (RATIO, "(logp - logp).exp()"),
    "detached ratio": (RATIO, "(logp.detach() - old_logp).exp()"),
    "no mask": (AVERAGE, "objective.mean(dim=1)"),
    "padding in the length": (AVERAGE, "(objective * mask).sum(dim=1) / mask.shape[1]"),
    "token-mean": (RETURN, "return -(objective * mask).sum(), mask.sum(), stats"),
    "sum for mean": (AVERAGE, "(objective * mask).sum(dim=1)"),
    "dropped EOS": (AVERAGE, NO_EOS),
    "mean of the part": (RETURN, "return -per_response.mean(), mask.new_tensor(1.0), stats"),
    "KL direction": ("ref_logp - logp", "logp - ref_logp"),
    "KL rewarded": ("objective - args.beta * k3", "objective + args.beta * k3"),
    "k1 for k3": (K3, "-log_ref_ratio"),
    "k2 for k3": (K3, "log_ref_ratio**2 / 2"),
    "KL detached": (K3, f"({K3}).detach()"),
    "population std": (STD, "rewards.std(dim=1, keepdim=True, correction=0)"),
    "std of the batch": (STD, "rewards.std()"),
    "no std": (f"centred / ({STD} + 1e-6)", "centred"),
    "mean of the batch": ("rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
    "TRL's epsilon": ("+ 1e-6", "+ 1e-4"),
    "statistics of the wrong sign": ("(A > 0) & out_above", "(A < 0) & out_above"),
}
