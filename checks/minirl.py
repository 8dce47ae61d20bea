"""MiniRL: the two roles of μ and π_old, sums over tokens, the paper's first-order claim."""

import itertools
from types import ModuleType

import torch
from torch import Tensor

from . import CENTRE, CENTRED, RESPONSE_MEAN, busy_batch, check_parts_add_up, clipped, counts
from . import every_answer, loss_of, near, no_kl, response_tokens, terms, two_responses, weighs
from . import written_here


def check_weights(module: ModuleType) -> None:
    """M min(π_θ/μ, 5) Â: the mask sees π_θ/π_old, the weight π_θ/μ."""
    for old, mu, ratio, advantage in itertools.product(
        (0.2, 0.4), (0.01, 0.1, 0.3), (0.7, 0.9, 1.2, 1.3), (1.0, -1.0)
    ):
        masked = (advantage > 0 and ratio > 1.27) or (advantage < 0 and ratio < 0.8)
        expected = 0 if masked else min(old * ratio / mu, 5.0) * advantage
        weighs(module, ratio, advantage, expected, old=old, mu=mu)
        plain = 0 if masked else ratio * advantage
        weighs(module, ratio, advantage, plain, old=old, mu=mu, correct_mismatch=False)


def check_sums_tokens(module: ModuleType) -> None:
    """A sum over tokens, a mean over responses; with length_norm a mean over tokens; padding counts
    for nothing."""
    batch = two_responses()
    for flags, scale in (({}, 1.0), ({"length_norm": True}, batch["mask"].sum(1, keepdim=True))):
        logp = batch["logp"].detach().requires_grad_()
        args = no_kl(module, clip_high=9.0, **flags)
        loss = loss_of(module, args, **batch | {"logp": logp})[0]
        loss.backward()
        expected = -logp.detach().exp() * batch["advantages"][:, None] * batch["mask"] / scale / 2
        value = (expected * logp).sum()
        near(loss, value, f"the loss, 3 tokens and 2 {flags}", 1e-9)
        near(logp.grad, expected, f"∂ loss / ∂ log π of 3 tokens and of 2 {flags}", 1e-9)


def check_statistics(module: ModuleType) -> None:
    """Of all response tokens: masked_share those with M = 0, masked_above those of them with Â > 0,
    masked_below those with Â < 0; weight is the mean weight, capped; weight_max the largest π_θ/μ
    before its cap."""
    batch, flags = busy_batch(), {"clip_low": 0.2, "clip_high": 0.28, "is_cap": 1.3}
    t = response_tokens(batch)
    expected = {f"masked_{name}": pair for name, pair in clipped(t, 0.2, 0.28).items()}
    expected |= {"weight": (t.w.clamp(max=1.3).sum(), t.M), "weight_max": (t.w.max(), None)}
    counts(loss_of(module, no_kl(module, **flags), **batch)[1], expected)


def check_first_order(module: ModuleType) -> None:
    """The paper's claim, with every sequence enumerated. Under samples of μ the surrogate's
    gradient equals that of the expected reward if π_θ = μ. The gap grows with the distance.
    Dividing by length breaks the equality at once."""
    generator = torch.Generator().manual_seed(3)
    where, mask = every_answer()
    base, direction = torch.randn(2, 3, 4, 3, generator=generator, dtype=torch.float64)
    rewards = torch.randn(len(mask), generator=generator, dtype=torch.float64)

    def logps(theta: Tensor) -> Tensor:
        return theta.log_softmax(-1)[where] * mask  # [answers, 3]

    mu = logps(base)
    near(mu.sum(1).exp().sum(), 1, "the sum of all answers' probabilities")

    def gap(distance: float, **flags: bool) -> float:
        theta = (base + distance * direction).requires_grad_()
        truth = torch.autograd.grad((logps(theta).sum(1).exp() * rewards).sum(), theta)[0]
        args = no_kl(module, clip_low=99.0, clip_high=99.0, is_cap=1e9, **flags)
        weighted = mu.sum(1).exp() * rewards  # E over μ: each sequence counts with its probability
        rest = {"old_logp": mu, "rollout_logp": mu, "advantages": weighted, "mask": mask}
        ours = torch.autograd.grad(-terms(module, args, logp=logps(theta), **rest)[0], theta)[0]
        return float((ours - truth).norm() / truth.norm())

    gaps = [gap(distance) for distance in (0.0, 0.05, 0.1, 0.2, 0.4)]
    assert gaps[0] < 1e-12 and gaps[-1] > 0.05
    assert all(close < far for close, far in itertools.pairwise(gaps))
    assert gap(0.0, length_norm=True) > 0.1


READS = ("old_logp", "rollout_logp")  # columns that the loss uses
CHECKS = [*written_here(globals()), *CENTRED, check_parts_add_up]
BEHAVIOUR = "batch.rollout_logp if args.correct_mismatch else batch.old_logp"
RATIO = "ratio = (logp.detach() - batch.old_logp).exp()"
MASKED = '"masked_above": (((cut & out_above) * mask).sum(), mask.sum())'
UNCAPPED = "uncapped[mask > 0]]).max()"
COUNTED = {  # those of dppo and icepop, too
    "masked_share without the mask": ("((cut * mask).sum()", "(cut.sum()"),
    "masked_above for masked_below": (MASKED, MASKED.replace("out_above", "out_below")),
    "weight_max after the cap": (UNCAPPED, "weight[mask > 0]]).max()"),
}
MUTANTS = {
    **CENTRE,
    **RESPONSE_MEAN,
    **COUNTED,
    "mask from π_θ/μ": (RATIO, RATIO.replace("old_logp", "rollout_logp")),
    "weight from π_old": (BEHAVIOUR, BEHAVIOUR.replace("rollout_logp", "old_logp")),
    "no cap": (".clamp(max=args.is_cap)", ""),
    "weight not detached": (
        "uncapped = (logp.detach() - behaviour)",
        "uncapped = (logp - behaviour)",
    ),
    "ratio in place of log π": ("~cut * weight * A * logp", "~cut * weight * A * logp.exp()"),
    "no mask": ("~cut * weight", "weight"),
    "length-normalised": ("if args.length_norm:", "if True:"),
}
