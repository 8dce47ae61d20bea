"""MASPO: the authors' own function and numbers, the limit of an infinite width."""

from dataclasses import replace
from types import ModuleType

import torch

from . import TOKEN_MEAN, ZSCORE, ZSCORES, busy_batch, check_parts_add_up, counts, loss_of, matches
from . import response_tokens, weighs, weight, written_here

TABLE = {  # r: weights at π_old = .9 and .01, for Â = 1 and for Â = -1 (without the sign)
    0.5: (0.5, 0.5, 0.4415, 0.4958),
    0.75: (0.75, 0.75, 0.7270, 0.7484),
    0.9: (0.9, 0.9, 0.8955, 0.8997),
    1.0: (1, 1, 1, 1),
    1.1: (1.0951, 1.0997, 1.1, 1.1),
    1.3: (1.2493, 1.2965, 1.3, 1.3),
    2.0: (1.2850, 1.9414, 2, 2),
    4.0: (0.0746, 3.0608, 4, 4),
}


def check_fixture(module: ModuleType) -> None:
    """The authors' own function, at its defaults."""
    matches(module, "maspo_default_tokenmean")


def check_weights(module: ModuleType) -> None:
    """The gradient weight of likely and rare tokens, of either sign, at eight ratios."""
    for ratio, row in TABLE.items():
        cases = [(advantage, old) for advantage in (1.0, -1.0) for old in (0.9, 0.01)]
        for (advantage, old), expected in zip(cases, row):
            weighs(module, ratio, advantage, advantage * expected, 6e-5, old=old)


def check_gates(module: ModuleType) -> None:
    """F alone, at five points, from the authors' code; the clamps on width and risk."""
    table = {(2, 0.9, 1): 0.642476, (2, 0.001, 1): 0.992558, (2, 0.9, 2): 0.658535}
    table |= {(0.5, 0.9, -1): 0.882948, (0.5, 0.01, -1): 0.991668}
    for (ratio, old, advantage), gate in table.items():
        weighs(module, ratio, advantage, gate * ratio * advantage, 1e-5, old=old)
    # Width 501 without the cap, 10 with it
    capped = weight(module, 2.0, 1.0, 1e-9, beta_pos=0.0) / 2
    assert abs(capped - torch.tensor(-1 / 200.0).exp().item()) < 1e-6
    narrow = weight(module, 0.5, -1000.0, 1.0) / -500  # risk 1/31 without the floor, 0.1 with it
    assert abs(narrow - torch.tensor(-0.25 / 0.02).exp().item()) < 1e-6


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
    "μ for π_old": ("ratio = (logp - old_logp).exp()", "ratio = (logp - rollout_logp).exp()"),
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
