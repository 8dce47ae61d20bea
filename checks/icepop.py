"""IcePop and related corrections: each in closed form, outside of PPO's clip."""

import itertools
import math
from types import ModuleType

import torch
from torch import Tensor

from . import CENTRE, CENTRED, RESPONSE_MEAN, busy_batch, check_parts_add_up, clipped, counts
from . import loss_of, matches, minirl, no_kl, one, response_tokens, weighs
from . import weight, written_here

PLACES = list(itertools.product((0.2, 0.4), (0.03, 0.1, 0.3, 0.9), (0.7, 1.0, 1.2, 1.5), (1.0, -1)))


def ppo(ratio: float, advantage: float) -> float:
    """PPO's M r Â at ε 0.2 / 0.27."""
    cut = (advantage > 0 and ratio > 1.27) or (advantage < 0 and ratio < 0.8)
    return 0.0 if cut else ratio * advantage


def found(
    module: ModuleType, gap: Tensor, moved: float, advantage: float, **flags: object
) -> Tensor:
    """The gradient weights of one response whose log w are `gap [1, T]`, all with the same r."""
    old = torch.full_like(gap, -2.0)
    logp = (old + moved).requires_grad_()
    rest = {"rollout_logp": old - gap, "advantages": one(advantage)[0]}
    args = no_kl(module, length_norm=False, **flags)
    loss_of(module, args, logp=logp, old_logp=old, mask=torch.ones_like(gap), **rest)[0].backward()
    return -logp.grad


def check_fixture(module: ModuleType) -> None:
    """If μ is π_old each correction leaves GRPO: value and gradient agree with TRL, OpenRLHF and
    others."""
    for name in ("tis", "mis", "icepop", "geometric", "opsm", "none"):
        matches(module, "grpo_eps0.2_seqmean", correction=name, clip_high=0.2)
    level = {"correction": "mis", "correction_level": "sequence"}
    matches(module, "grpo_eps0.2_seqmean", clip_high=0.2, **level)


def check_weights(module: ModuleType) -> None:
    """C M r Â of a token: PPO's term with r = π_θ/π_old, times a function of w = π_old/μ."""
    rules = {
        "tis": lambda w: min(w, 2.0),
        "mis": lambda w: w if 0.4 <= w <= 2.0 else 0.0,
        "icepop": lambda w: w if 0.4 <= w <= 2.0 else 0.0,
        "geometric": lambda w: float(0.4 <= w <= 2.0),
        "none": lambda w: 1.0,
    }
    for (name, rule), (old, mu, ratio, advantage) in itertools.product(rules.items(), PLACES):
        flags = {"correction": name, "w_low": 0.4, "w_high": 2.0}
        expected = rule(old / mu) * ppo(ratio, advantage)
        weighs(module, ratio, advantage, expected, old=old, mu=mu, **flags)
    assert weight(module, 1.0, 1.0, 0.4, 0.9) == 0 == weight(module, 1.0, 1.0, 0.6, 0.1)  # .5 and 5
    assert abs(weight(module, 1.0, 1.0, 0.4, 0.1) - 4) < 1e-12


def check_of_a_response(module: ModuleType) -> None:
    """W is the product of w; the geometric mean does not depend on the length."""
    level = {"correction_level": "sequence", "w_low": 0.5, "w_high": 2.0}
    for gap, W in ((one(0.5, -0.2, 0.1), math.exp(0.4)), (one(0.5, 0.4, 0.3), math.exp(1.2))):
        for name, expected in (("tis", min(W, 2.0)), ("mis", W if W <= 2 else 0.0)):
            weights = found(module, gap, 0.1, 1.0, correction=name, **level)
            assert torch.allclose(weights, torch.full_like(gap, expected * math.exp(0.1)))
    for T, gap, kept in itertools.product((1, 7, 500), (-0.02, -0.005, 0.005, 0.02), (1.0,)):
        flags = {"correction": "geometric", "w_low": 0.99, "w_high": 1.01}
        weights = found(module, torch.full((1, T), gap, dtype=torch.float64), 0.0, -1.0, **flags)
        assert (weights == (-kept if abs(gap) < 0.01 else 0.0)).all()
    far = torch.full((1, 900), 1.0, dtype=torch.float32)  # W is infinite in float32
    for name, expected in (("tis", 2.0), ("mis", 0.0)):
        assert (found(module, far, 0.0, 1.0, correction=name, **level) == expected).all()


def check_opsm(module: ModuleType) -> None:
    """A bad response has no gradient if its tokens have become less likely than under the sampler
    by more than δ, on the mean. A good one keeps its gradient. The weights are 0 and 1."""
    for gap, moved, advantage in itertools.product((-0.3, 0.0, 0.3), (-0.15, 0.0, 0.1), (1.0, -1)):
        log_w = one(gap, gap + 0.2, gap - 0.2)
        flags = {"correction": "opsm", "opsm_delta": 0.25, "clip_low": 9.0, "clip_high": 9.0}
        weights = found(module, log_w, moved, advantage, **flags)
        dropped = advantage < 0 and -(gap + moved) > 0.25  # mean log μ/π_θ
        expected = 0.0 if dropped else advantage * math.exp(moved)
        assert torch.allclose(weights, torch.full_like(weights, expected), rtol=1e-12)


def check_statistics(module: ModuleType) -> None:
    """Of all response tokens: corrected is the mean of |C - 1|, weight that of C, dropped_share
    counts those with C = 0, masked_share those that PPO cuts, masked_above those of them with Â >
    0, masked_below those with Â < 0. weight_max is the largest π_old/μ."""
    flags = {"correction": "icepop", "w_low": 0.8, "w_high": 1.3, "clip_low": 0.2}
    batch = busy_batch()
    t = response_tokens(batch)
    w = t.w / t.r  # π_old/μ
    C = torch.where((w >= 0.8) & (w <= 1.3), w, 0.0)
    expected = {f"masked_{name}": pair for name, pair in clipped(t, 0.2, 0.28).items()}
    expected |= {"corrected": ((C - 1).abs().sum(), t.M), "dropped_share": ((C == 0).sum(), t.M)}
    expected |= {"weight": (C.sum(), t.M), "weight_max": (w.max(), None)}
    counts(loss_of(module, no_kl(module, **flags, clip_high=0.28), **batch)[1], expected)


READS = ("old_logp", "rollout_logp")  # columns that the loss uses
CHECKS = [*written_here(globals()), *CENTRED, check_parts_add_up]
W = "(batch.old_logp - batch.rollout_logp) * mask"
OBJECTIVE = "weight * torch.minimum(ratio * A, clipped * A)"
SEQUENCE = '(over_response(log_w) if args.correction_level == "sequence" else log_w).exp()'
INSIDE = OBJECTIVE.replace("weight * ", "").replace("ratio", "weight * ratio")
INSIDE = INSIDE.replace("clipped", "(weight * ratio).clamp(1 - args.clip_low, 1 + args.clip_high)")
MUTANTS = {
    **CENTRE,
    **RESPONSE_MEAN,
    **minirl.COUNTED,
    "w the other way": (W, "(batch.rollout_logp - batch.old_logp) * mask"),
    "w of π_θ": (W, "(logp - batch.rollout_logp) * mask"),
    "inside the clip": (OBJECTIVE, INSIDE),
    "mask without weight": ("torch.where(kept(w), w, 0.0)", "torch.where(kept(w), 1.0, 0.0 * w)"),
    "cap for mask": ("torch.where(kept(w), w, 0.0)", "w.clamp(args.w_low, args.w_high)"),
    "no upper bound": ("(x >= args.w_low) & (x <= args.w_high)", "x >= args.w_low"),
    "sequences as tokens": (SEQUENCE, "log_w.exp()"),
    "opsm of good ones, too": ("(A >= 0) | (drift <= args.opsm_delta)", "drift <= args.opsm_delta"),
    "ratio to μ": (
        "ratio = (logp - batch.old_logp).exp()",
        "ratio = (logp - batch.rollout_logp).exp()",
    ),
    "no clip": ("torch.minimum(ratio * A, clipped * A)", "ratio * A"),
}
