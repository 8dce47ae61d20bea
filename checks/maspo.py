"""MASPO: the numbers of the authors' function."""

from dataclasses import replace
from types import ModuleType

import torch

from . import FIXTURE, TOKEN_MEAN, ZSCORE, ZSCORES, busy_batch, check_parts_add_up, counts, loss_of
from . import matches, response_tokens, weighs, written_here


def check_fixture(module: ModuleType) -> None:
    """The authors' own function, at its defaults."""
    matches(module, "maspo_default_tokenmean")


def check_weights(module: ModuleType) -> None:
    """Gradient weights by the authors' function: likely and rare tokens of either sign, ratios far
    out and on the way back, other flags, width and risk at their bounds."""
    for case in FIXTURE["maspo"]["cases"]:
        for ratio, old, advantage, expected in case["rows"]:
            tolerance = 1e-9 * max(1, abs(expected))
            weighs(module, ratio, advantage, expected, tolerance, old=old, **case["flags"])


def check_statistics(module: ModuleType) -> None:
    """Of response tokens: the mean gate F where Â > 0 (gate_pos) and where Â < 0 (gate_neg), the
    mean of 1 - F (gate_closed); the share of those with r beyond 1 ± token_clip in the direction of
    Â (grpo_cut_share), and of these Σ F r |Â| over Σ r |Â| (kept_where_grpo_cuts); the mean of σ
    where π_old is below 0.1 (width_rare) and above 0.9 (width_common)."""
    batch = busy_batch()
    t, args = (
        response_tokens(batch),
        replace(module.Args(), token_clip=0.22, beta_pos=0.05, beta_neg=0.3),
    )
    width = (args.sigma_base / t.old**args.alpha).clamp(args.sigma_base, args.sigma_high)
    risk = torch.where(t.A > 0, 1 + args.beta_pos * t.A, 1 / (1 - args.beta_neg * t.A))
    sigma, outward = width * risk.clamp(0.1, 10), t.A * (t.r - 1) > 0
    gate = torch.where(outward, (-((t.r - 1) ** 2) / (2 * sigma**2)).exp(), 1.0)
    up, down, cut = t.A > 0, t.A < 0, t.A.sign() * (t.r - 1) > 0.22
    pull, rare, common = (t.r * t.A.abs())[cut], t.old < 0.1, t.old > 0.9
    assert rare.any() and common.any()
    expected = {"gate_pos": (gate[up].sum(), up.sum()), "gate_neg": (gate[down].sum(), down.sum())}
    expected |= {"gate_closed": ((1 - gate).sum(), t.M), "grpo_cut_share": (cut.sum(), t.M)}
    expected["kept_where_grpo_cuts"] = (gate[cut] * pull).sum(), pull.sum()
    expected["width_rare"] = sigma[rare].sum(), rare.sum()
    expected["width_common"] = sigma[common].sum(), common.sum()
    counts(loss_of(module, args, **batch)[1], expected)


CHECKS = [*written_here(globals()), *ZSCORES, check_parts_add_up]
MUTANTS = {
    **ZSCORE,
    **TOKEN_MEAN,
    "μ for π_old": (
        "ratio = (logp - batch.old_logp).exp()",
        "ratio = (logp - batch.rollout_logp).exp()",
    ),
    "gate_closed without the mask": ("((1 - gate) * mask).sum()", "(1 - gate).sum()"),
    "gates swapped": (
        "up, down = (A > 0) * mask, (A < 0) * mask",
        "up, down = (A < 0) * mask, (A > 0) * mask",
    ),
    "cut in both directions": (
        "(A * (ratio - 1) > A.abs() * args.token_clip)",
        "((ratio - 1).abs() > args.token_clip)",
    ),
    "gate differentiated": (
        "with torch.no_grad():\n        old_p",
        "with torch.enable_grad():\n        old_p",
    ),
    "gate the way back": ("outward = A * (ratio - 1) > 0", "outward = A * (ratio - 1) < 0"),
    "σ ∝ 1/π": ("old_p**args.alpha", "old_p"),
    "risk the wrong way round": ("1 / (1 - args.beta_neg * A)", "1 - args.beta_neg * A"),
}
