"""STAPO: its base objective, which tokens it silences, the entropy's quantile."""

from types import ModuleType

import numpy
import torch
from torch import Tensor

from . import Run
from .formulas import Batch, clip_statistics, surrogate, token_mean
from .harness import ZSCORES, near


def spurious(b: Batch) -> Tensor:
    """Return the spurious tokens (the paper's S2T): tokens of right responses that are improbable
    under π_θ (p < τ_p), at positions of low entropy (H < τ_h)."""
    p, everywhere = b.logp.detach().exp(), b.mask > 0
    rare = everywhere & (p < b.args.tau_p) & (b.A[:, None] > 0)
    among, quantile = everywhere, b.args.entropy_quantile
    if b.args.entropy_rule == "candidates":
        among, quantile = rare, b.args.candidate_quantile
    if not among.any():
        return rare
    height = numpy.quantile(b.entropy[among].numpy(), quantile)
    return rare & (b.entropy < height - 1e-5)  # equal entropies are treated alike


def objective(b: Batch) -> tuple[Tensor, Tensor]:
    """J is a mean over the tokens that are not silenced."""
    return token_mean(surrogate(b), b.mask * ~spurious(b))


def statistics(b: Batch) -> dict[str, tuple]:
    """silenced_share, silenced_prob and silenced_entropy are the share of silenced tokens, their
    mean π_θ and their mean entropy. clip_share and its parts are of all response tokens, silenced
    or not."""
    silent = spurious(b)
    number = silent.sum()
    return clip_statistics(b) | {
        "silenced_share": (number, b.mask.sum()),
        "silenced_prob": (b.logp.exp()[silent].sum(), number),
        "silenced_entropy": (b.entropy[silent].sum(), number),
    }


CASES = [
    {"tau_p": 0.45, "entropy_quantile": 0.9, "clip_low": 0.3, "clip_high": 0.2},
    {"tau_p": 0.45, "entropy_quantile": 0.3},
    {"tau_p": 0.95, "entropy_rule": "candidates", "candidate_quantile": 0.5},
    {"tau_p": 1e-9, "entropy_rule": "candidates"},  # without a candidate
]


def check_quantile_of_many(module: ModuleType) -> None:
    """A mini-batch may have more tokens than torch.quantile takes."""
    many = torch.full((2**24 + 1,), 0.5)
    near(module.entropy_threshold(module.Args(), many), 0.5, "τ_h of 2^24 + 1 equal entropies")


FIXTURES = {"dapo_eps0.2_0.28_tokenmean": {"tau_p": 0.0}}  # no token below: DAPO's loss
SHARED = ZSCORES
IMPROBABLE = "batch.logp.exp() < args.tau_p"
KEPT = "kept = mask * ~batch.spurious"
RETURN = "return -(objective * kept).sum(), kept.sum()"
MUTANTS = {
    "π_old for π_θ": (IMPROBABLE, IMPROBABLE.replace("logp", "old_logp")),
    "entropy ignored": ("candidates & sure", "candidates"),
    "threshold of a micro-batch": (
        KEPT,
        f"choose_tokens(args, batch, World(0, 1, logp.device))\n    {KEPT}",
    ),
    "all tokens in the denominator": (RETURN, RETURN.replace("kept.sum()", "mask.sum()")),
}


RUN = Run(
    stored={"tau_p": 0.9, "entropy_quantile": 0.8, "grad_clip": 4.0},
    needs={"candidate_quantile": {"entropy_rule": "candidates"}, "tau_p": {"tau_p": 1.0}},
    refuses=(("--entropy_quantile 80", "--entropy_quantile 80.0: must be from 0 to 1"),),
)
