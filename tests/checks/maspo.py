"""MASPO: the authors' own function and numbers, the limit of an infinite width."""

from types import ModuleType

import stapo
import torch

from . import gradient, loss_of, matches, weight, written_here

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
            assert abs(weight(module, ratio, advantage, old) - advantage * expected) < 6e-5, ratio


def check_gates(module: ModuleType) -> None:
    """F alone, at five points, from the authors' code; the clamps on width and risk."""
    table = {(2, 0.9, 1): 0.642476, (2, 0.001, 1): 0.992558, (2, 0.9, 2): 0.658535}
    table |= {(0.5, 0.9, -1): 0.882948, (0.5, 0.01, -1): 0.991668}
    for (ratio, old, advantage), gate in table.items():
        assert abs(weight(module, ratio, advantage, old) / (ratio * advantage) - gate) < 1e-6
    # Width 501 without the cap, 10 with it
    capped = weight(module, 2.0, 1.0, 1e-9, beta_pos=0.0) / 2
    assert abs(capped - torch.tensor(-1 / 200.0).exp().item()) < 1e-6
    narrow = weight(module, 0.5, -1000.0, 1.0) / -500  # risk 1/31 without the floor, 0.1 with it
    assert abs(narrow - torch.tensor(-0.25 / 0.02).exp().item()) < 1e-6


def check_without_width_is_unclipped(module: ModuleType) -> None:
    """σ -> ∞ is the plain ratio objective, token-mean."""
    open_wide = gradient(stapo, tau_p=0.0, clip_low=1e9, clip_high=1e9)
    assert torch.allclose(gradient(module, sigma_base=1e9, sigma_high=1e9), open_wide, rtol=1e-9)
    assert not torch.allclose(gradient(module), open_wide, rtol=1e-3)


def check_statistics(module: ModuleType) -> None:
    """Where GRPO's gradient would be zero, part of it is kept; nothing is gated on the way back."""
    old = torch.tensor([[0.95, 0.05, 0.95], [0.95, 0.95, 0.95]], dtype=torch.float64).log()
    ratio = torch.tensor([[2.0, 2.0, 0.5], [1.0, 1.5, 0.9]], dtype=torch.float64)
    batch = {"logp": old + ratio.log(), "old_logp": old, "mask": torch.ones_like(old)}
    stats = loss_of(module, module.Args(), advantages=torch.tensor([1.0, -1.0]), **batch)[1]
    mean = {name: float(total / count) for name, (total, count) in stats.items()}
    assert abs(mean["grpo_cut_share"] - 2 / 6) < 1e-9  # the two at r = 2
    gates = [weight(module, 2.0, 1.0, old) / 2 for old in (0.95, 0.05)]
    assert abs(mean["kept_where_grpo_cuts"] - sum(gates) / 2) < 1e-6
    assert abs(mean["gate_pos"] - (sum(gates) + 1) / 3) < 1e-6
    assert mean["width_rare"] > 2 * mean["width_common"]


CHECKS = written_here(globals())
GATE = "(-((ratio - 1) ** 2) / (2 * sigma**2)).exp()"
RETURN = "return -(objective * mask).sum(), mask.sum()"
PER_RESPONSE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
MUTANTS = {
    "gate differentiated": (
        "with torch.no_grad():\n        old_p",
        "with torch.enable_grad():\n        old_p",
    ),
    "ratio detached": (
        "objective = gate * ratio * A",
        "objective = gate * ratio.detach() * A + 0 * logp",
    ),
    "two-sided gate": (f"torch.where(outward, {GATE}, 1.0)", GATE),
    "gate the way back": ("outward = A * (ratio - 1) > 0", "outward = A * (ratio - 1) < 0"),
    "no factor 2": ("(2 * sigma**2)", "(sigma**2)"),
    "σ ∝ 1/π": ("old_p**args.alpha", "old_p"),
    "width of the current policy": ("args.sigma_base / old_p", "args.sigma_base / logp.exp()"),
    "no cap": (".clamp(args.sigma_base, args.sigma_high)", ""),
    "no floor": (".clamp(0.1, 10)", ""),
    "risk the wrong way round": ("1 / (1 - args.beta_neg * A)", "1 - args.beta_neg * A"),
    "mean of response means": (
        RETURN,
        f"return -({PER_RESPONSE}).sum(), mask.new_tensor(len(mask))",
    ),
    "sign": ("return -(objective * mask)", "return (objective * mask)"),
}
