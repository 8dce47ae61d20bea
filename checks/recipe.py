"""The recipe: all its layers at once, and each layer off. (Numbers of other people's code are in
the checks of the files that the layers come from.)"""

import torch
from torch import Tensor

from . import Run, goldilocks, maspo, stapo, vcpo
from .formulas import Batch, both_streams, clip_statistics, response_mean, share, surrogate
from .formulas import token_mean
from .harness import ZSCORES


def kept(b: Batch) -> Tensor:
    return b.mask * ~stapo.spurious(b) if b.args.tokens == "stapo" else b.mask


def age(b: Batch) -> Tensor:
    """Return w = π_old(y)/μ(y) of whole responses `[n]`."""
    return ((b.old - b.mu) * b.mask).sum(1).exp()


def objective(b: Batch) -> tuple[Tensor, Tensor | int]:
    """J has STAPO's tokens or MASPO's gate and, with a lag, the factor min(w, cap). Main rows and
    branches are averaged separately, and λ weighs the branches."""
    gated = b.args.tokens == "maspo"
    x = maspo.gates(b) * b.r * b.A[:, None] if gated else surrogate(b)
    weight = torch.where(b.branch > 0, b.args.branch_weight, 1.0)
    if b.args.lag:
        weight = weight * age(b).clip(max=b.args.is_cap)
    mean = token_mean if b.args.token_mean else response_mean
    return both_streams(b, weight[:, None] * x, kept(b), mean)


def statistics(b: Batch) -> dict[str, tuple]:
    """Metrics are clip_share and its sides, or gate_closed; the weights of responses; and the
    silenced share."""
    pairs = {"silenced_share": ((b.mask - kept(b)).sum(), b.mask.sum())}
    if b.args.lag:
        w = age(b)
        pairs["weight"] = w.clip(max=b.args.is_cap).sum(), len(w)
        pairs["weight_max"] = w.max(), None
    if b.args.tokens == "maspo":
        return pairs | {"gate_closed": share(1 - maspo.gates(b), b.mask)}
    return pairs | clip_statistics(b)


TOKENS = {"tau_p": 0.45, "entropy_quantile": 0.9}
CASES = [
    {"branch_weight": 0.75, "is_cap": 1.1} | TOKENS,
    {"token_mean": False, "lag": 0} | TOKENS,
    {"tokens": "maspo", "branch_weight": 0.75},
    {"tokens": "none"},
]


SHARED = ZSCORES


GATE = "sigma_base sigma_high alpha beta_pos beta_neg".split()
RUN = Run(
    stored=goldilocks.CHOICE
    | {"tau_p": 0.9, "lag": 1, "rho_on": 0.5, "branches": 2, "lr": 3e-4, "steps": 3}
    | {"branch_weight": 0.7, "grad_clip": 12.0},
    small=f"{vcpo.RUN.small} {goldilocks.RUN.small}",
    needs={
        "lag": {"lag": 0},
        "tau_p": {"tau_p": 1.0},
        "candidate_quantile": {"entropy_rule": "candidates"},
        "teacher_batch": {"window": 16},
    }
    | {flag: {"tokens": "maspo"} for flag in GATE},
)
