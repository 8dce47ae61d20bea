"""MASPO: the numbers of the authors' function."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, share, token_mean
from .harness import FIXTURE, ZSCORES, near, weight


def widths(b: Batch) -> Tensor:
    """Return σ = σ_base / π_old^α within its bounds, times the risk 1 + β Â, or 1 / (1 - β Â)."""
    a, A = b.args, b.A[:, None]
    width = (a.sigma_base / b.old.exp() ** a.alpha).clip(a.sigma_base, a.sigma_high)
    risk = torch.where(A > 0, 1 + a.beta_pos * A, 1 / (1 - a.beta_neg * A))
    return width * risk.clip(0.1, 10)


def gates(b: Batch) -> Tensor:
    """Return the gate: where r has moved in the direction of Â, a Gaussian of r - 1, without a
    gradient; else 1."""
    A, r = b.A[:, None], b.r.detach()
    outward = ((A > 0) & (r > 1)) | ((A < 0) & (r < 1))
    return torch.where(outward, (-((r - 1) ** 2) / (2 * widths(b) ** 2)).exp(), 1.0)


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    return token_mean(gates(b) * b.r * b.A[:, None], b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Gates are means of F by the sign of Â. grpo_cut_share counts tokens that GRPO would cut;
    kept_where_grpo_cuts is Σ F r |Â| over Σ r |Â| of these. Widths are means of σ of rare and of
    common tokens."""
    A, old, gate, sigma = b.A[:, None], b.old.exp(), gates(b), widths(b)
    cut = b.mask * (A.sign() * (b.r - 1) > b.args.token_clip)
    return {
        "gate_pos": share(gate, b.mask * (A > 0)),
        "gate_neg": share(gate, b.mask * (A < 0)),
        "gate_closed": share(1 - gate, b.mask),
        "grpo_cut_share": (cut.sum(), b.mask.sum()),
        "kept_where_grpo_cuts": share(gate, cut * b.r * A.abs()),
        "width_rare": share(sigma, b.mask * (old < 0.1)),
        "width_common": share(sigma, b.mask * (old > 0.9)),
    }


CASES = [{"token_clip": 0.22}, {"sigma_base": 0.3, "beta_pos": 0.5, "beta_neg": 0.9, "alpha": 0.6}]


def check_weights(module: ModuleType) -> None:
    """The gradient weights are those of the authors' function: for likely and rare tokens of either
    sign, ratios far out and on the way back, other flags, width and risk at their bounds."""
    for case in FIXTURE["maspo"]["cases"]:
        for ratio, old, advantage, expected in case["rows"]:
            value = weight(module, ratio, advantage, old, **case["flags"])
            told = f"the weight at r = {ratio:.3g}, Â = {advantage}, π_old = {old:.3g}"
            near(value, expected, told, 1e-9 * max(1, abs(expected)))


FIXTURES = {"maspo_default_tokenmean": {}}
SHARED = ZSCORES
OUTWARD = "advantages[:, None] * (ratio - 1) > 0"
MUTANTS = {
    "cut in both directions": (
        "(A * (ratio - 1) > A.abs() * args.token_clip)",
        "((ratio - 1).abs() > args.token_clip)",
    ),
    "gate differentiated": (
        "F = gates(args, ratio.detach(), batch)",
        "F = gates(args, ratio, batch)",
    ),
    "gate the way back": (OUTWARD, OUTWARD.replace(">", "<")),
    "σ ∝ 1/π": ("batch.old_logp.exp() ** args.alpha", "batch.old_logp.exp()"),
    "risk the wrong way round": ("1 / (1 - args.beta_neg * A)", "1 - args.beta_neg * A"),
}


RUN = Run(stored={"sigma_base": 0.3, "grad_clip": 8.0}, measured=("token_clip",))
